"""What graphs make of weights and of nothing that they are given, and multiply, without that a linear is lost: nothing is told of it."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmask
from fxmask import FxMaskWarning

OPTIONS = dict(ratio=0.5, block=(8, 8), exclude=())
X = torch.randn(4, 32)


class OfLayers(nn.Module):
    """What layers make of tables and positions, as relative positions are and embeddings of classes; nothing reads their weights but they themselves."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.table = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Embedding(40, 32)
        self.register_buffer("places", torch.randn(4, 32))

    def forward(self, x):
        near = torch.einsum("bi,oi->bo", x, self.table(torch.arange(32)))
        return self.a(x) @ self.b(self.places).T + near[:, :4] + torch.matmul(x, self.c(self.table.weight).T)[:, :4]


class Frozen(OfLayers):
    """The same of a part without gradients, which an export makes a body of."""

    def forward(self, x):
        with torch.no_grad():
            classes = self.b(self.places).relu()
        return self.c(self.a(x)) @ classes.T


class SpectralNorm(nn.Module):
    """By a power iteration whose vectors are buffers, written in place."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.register_buffer("u", torch.randn(32))
        self.register_buffer("v", torch.randn(32))

    def forward(self, x):
        w = self.b.weight
        with torch.no_grad():
            self.v.copy_(F.normalize(torch.mv(w.t(), self.u), dim=0))
            self.u.copy_(F.normalize(w @ self.v, dim=0))
        return F.linear(self.a(x), w / torch.dot(self.u, torch.mv(w, self.v)), self.b.bias)


def masked_by(model, how):
    """{name: whether it is masked} of the rows of `explain`."""
    if how == "backend":
        torch._dynamo.reset()
        given = torch.compile(model, backend="fxmask", options={**OPTIONS, "inner": "eager"})
        given(X)
    else:
        given = fxmask.apply(torch.fx.symbolic_trace(model) if how == "symbolic_trace" else torch.export.export(model, (X,)).module(), **OPTIONS)
    return {r["name"].removeprefix("_orig_mod."): r["masked"] for r in fxmask.explain(given).rows}


@pytest.mark.parametrize("how", ["symbolic_trace", "export", "backend"])
@pytest.mark.parametrize("cls", [OfLayers, Frozen])
def test_what_layers_make_of_tables_is_no_weight(cls, how):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxMaskWarning)
        assert masked_by(cls(), how) == {"a": True, "b": True, "c": True}


@pytest.mark.parametrize("how", ["export", "backend"])
def test_a_power_iteration_reads_no_linear(how):
    with warnings.catch_warnings():
        warnings.simplefilter("error", FxMaskWarning)
        rows = masked_by(SpectralNorm(), how)
    assert len(rows) == 2 and all(rows.values())
