"""Weights of a Dynamo graph that no mask can have: an error, or a dense product with its reason."""

import re

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import Wrap, compiled, failing
from torch import nn
from torch._higher_order_ops.map import map as over

import fxmask
from fxmask.errors import FxMaskWarning, UnsupportedError
from fxmask.passes.infra import Pass


class Doubles(Pass):
    """Of the user's own: a linear's weight is multiplied, and what that is the trace does not say."""

    def run(self, gm):
        (node,) = (n for n in gm.graph.nodes if n.target is F.linear)
        with gm.graph.inserting_before(node):
            node.args = (node.args[0], gm.graph.call_function(torch.mul, (node.args[1], 2)), *node.args[2:])
        return ["inner"]


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing")
@pytest.mark.parametrize(("options", "dtype", "words"), [
    ({"passes": [Doubles()]}, None, "the graph computes its weight, and the trace does not say its shape; use fxmask.apply on the model"),
    ({}, torch.complex64, r"its weight is complex \(torch.complex64\), and masks are for real weights"),
], ids=["without a shape", "complex"])  # fmt: skip
def test_a_weight_that_no_mask_can_have_is_an_error(options, dtype, words):
    model, x = Wrap(nn.Linear(64, 64, dtype=dtype)), torch.randn(4, 64, dtype=dtype)
    error = failing(model, x, ratio=0.5, **options)
    assert isinstance(error, UnsupportedError) and re.match(rf"cannot change 'inner': {words}\.\n  where: inner\n  fix: .*exclude='inner'", str(error))
    torch.testing.assert_close(compiled(model, ratio=0.5, exclude="inner")(x), model(x))


class ARow(nn.Module):
    """A product with a row, as F.linear takes one, beside a layer."""

    def __init__(self):
        super().__init__()
        self.fc, self.row = nn.Linear(64, 64), nn.Parameter(torch.randn(64))

    def forward(self, x):
        return self.fc(x) * F.linear(x, self.row)[:, None]


def test_a_row_stays_dense():
    model = ARow()
    with pytest.warns(FxMaskWarning, match=r"row stays dense: its weight has the shape \(64,\)"):
        compiled(model, ratio=0.5)(torch.randn(4, 64))
    rows = {r["name"]: (r["masked"], r["reason"]) for r in fxmask.explain(model).rows}
    assert rows["fc"][0] and rows["row"] == (False, "its weight has the shape (64,) (backend='fxmask')")


class Bank(nn.Module):
    """A product with every weight of a bank, beside a layer."""

    def __init__(self):
        super().__init__()
        self.fc, self.bank = nn.Linear(64, 64), nn.Parameter(torch.randn(3, 64, 64))

    def forward(self, x):
        return over(lambda w, y: F.linear(y, w), self.bank, self.fc(x))


def test_a_bank_of_weights_stays_dense_however_few_they_are():
    with pytest.warns(FxMaskWarning, match=r"bank stays dense: its weight has the shape \(3, 64, 64\)"):
        compiled(Bank(), ratio=0.5)(torch.randn(4, 64))


def test_a_size_that_moves_is_not_asked_whether_a_weight_is_small():
    """It would compile anew for small ones."""
    q, k, graphs = nn.Linear(64, 64), nn.Linear(64, 64), []
    call = compiled(lambda x: F.linear(q(x), k(x)), lambda gm, inputs: graphs.append(gm) or gm.forward, ratio=0.5)
    with pytest.warns(FxMaskWarning, match="its weight is computed from an input"):
        [call(torch.randn(n, 64)) for n in (32, 40, 20, 8)]
    assert len(graphs) == 2
