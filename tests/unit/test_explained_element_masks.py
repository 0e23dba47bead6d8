"""What `explain` says of traces of models with N:M masks, and what `apply` does to them: as exported, and after decompositions."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from unit.nm_models import MODES

import fxmask
from fxmask.errors import FxMaskWarning

IN_TRACE = "masked before it was traced; the mask is part of the graph"


def traces(model, *inputs):
    """The module of a program, and that of its decompositions."""
    program = torch.export.export(model, inputs)
    with warnings.catch_warnings():  # PyTorch's own
        warnings.simplefilter("ignore", FutureWarning)
        return program.module(), program.run_decompositions().module()


def rows(model, *columns):
    return [tuple(row[c] for c in columns) for row in fxmask.explain(model).rows]


def net():
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1, stride=2), nn.Flatten(), nn.Linear(256, 32, bias=False), nn.ReLU(), nn.Linear(32, 32))


class Body(nn.Module):
    """A layer in a body, of which the trace does not say in which module it was made."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda y: self.fc(y), lambda y: y + 1, (x,))


class Loop(Body):
    """The inputs of such a body have no names."""

    def forward(self, x):
        return while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, torch.tanh(self.fc(z))), (torch.tensor(0), x))[1]


@pytest.mark.parametrize(("mode", "state"), [*((mode, "eval") for mode in MODES), ("magnitude", "frozen")])
def test_a_layer_in_the_body_of_a_loop(mode, state):
    model = fxmask.apply(Loop(), fxmask.NMMask(2, 4, **MODES[mode])).eval()
    if state == "frozen":
        fxmask.freeze(model)
    gm = torch.export.export(model, (torch.randn(4, 64),)).module()
    assert rows(gm, "name", "masked", "block", "reason") == [("fc", True, "N:M", IN_TRACE)]


@pytest.mark.parametrize(("mode", "state"), [*((mode, "train") for mode in MODES), ("learned", "eval"), ("magnitude", "frozen"), ("soft", "frozen")])
def test_each_layer_has_its_row_and_is_not_masked_again(mode, state):
    torch.manual_seed(0)
    cases = [(net(), torch.randn(4, 4, 8, 8), [("0", "16x4x3x3"), ("2", "32x256"), ("4", "32x32")]), (Body(), torch.ones(64, 64), [("fc", "64x64")])]
    for model, x, layers in cases:
        fxmask.apply(model, fxmask.NMMask(2, 4, **MODES[mode])).train(state == "train")
        if state == "frozen":
            fxmask.freeze(model)
        for gm in traces(model, x):
            assert rows(gm, "name", "shape", "masked", "block", "reason") == [(*layer, True, "N:M", IN_TRACE) for layer in layers]
            known = state == "frozen" or mode == "permuted"  # as constants; but a body is given its own, which it does not know
            assert rows(gm, "achieved_ratio") == [(0.5 if known and isinstance(model, nn.Sequential) else None,)] * len(layers)
            y = gm(x)
            with pytest.warns(FxMaskWarning) as told:
                fxmask.apply(gm, ratio=0.5, block=(16, 16))
            assert any("masked nothing: its linears were masked before it was traced" in str(w.message) for w in told)  # of draws another one tells
            drawn = state == "train" and MODES[mode].get("mode") == "learned"
            assert drawn or torch.equal(gm(x), y)


@pytest.mark.parametrize("mode", MODES)
def test_parameters_that_are_inputs_of_a_programs_graph_are_weights(mode):
    for model, x, layers in ((net(), torch.randn(4, 4, 8, 8), 3), (Body(), torch.ones(64, 64), 1)):
        fxmask.apply(model, fxmask.NMMask(2, 4, **MODES[mode])).eval()
        assert rows(torch.export.export(model, (x,)).graph_module, "masked", "block") == [(True, "N:M")] * layers


class Autocast(nn.Module):
    """A layer in an autocast region, whose ops are of this module after decompositions."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            return self.fc(x)


@pytest.mark.parametrize("mode", MODES)
def test_a_layer_in_an_autocast_region_has_its_row(mode):
    model = Autocast()
    fxmask.apply(model, fxmask.NMMask(2, 4, **MODES[mode])).eval()
    for gm in traces(model, torch.randn(4, 64)):
        assert rows(gm, "name", "masked", "block", "reason") == [("fc", True, "N:M", IN_TRACE)]


class Own(nn.Module):
    """A mask of somebody's own, under a name of ours; in a body, too, under another one."""

    def __init__(self):
        super().__init__()
        self.fc, self.inner = nn.Linear(64, 64), nn.Linear(64, 64)
        self.nm_mask, self.kept = (nn.Buffer(torch.rand(64, 64) > 0.5) for _ in range(2))

    def forward(self, x):
        y = F.linear(x, torch.where(self.nm_mask, self.fc.weight, 0))
        return torch.cond(y.sum() > 0, lambda z: F.linear(z, torch.where(self.kept, self.inner.weight, 0) * self.kept), lambda z: z + 1, (y,))


class Handed(nn.Module):
    """Such a mask is an input."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x, nm_mask):
        return F.linear(x, torch.where(nm_mask, self.fc.weight, 0))


def test_masks_of_somebodys_own_are_none_of_ours():
    for gm in traces(Own(), torch.randn(4, 64)):
        assert rows(gm, "masked", "shape") == [(False, "64x64")] * 2
    for gm in traces(Handed(), torch.randn(4, 64), torch.rand(64, 64) > 0.5):
        assert not any(masked for masked, in rows(gm, "masked"))


class Beside(nn.Module):
    """A layer whose weight its owner reads, and so stays dense, beside one that is masked."""

    def __init__(self):
        super().__init__()
        self.read, self.masked = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return self.masked(x) @ self.read.weight.T


def test_what_stays_dense_beside_them_says_so():
    model = Beside()
    fxmask.apply(model, fxmask.NMMask(2, 4), exclude=["read"])
    for gm in traces(model, torch.randn(4, 64)):
        assert rows(gm, "name", "masked") == [("read", False), ("masked", True)]


class Gated(nn.Module):
    """An input that is gated by its own bits, as masks by magnitude rank a weight by its."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return torch.where(x.view(torch.int32) > 0, x, 0) @ self.fc.weight.T


class GatedInABody(Gated):
    def forward(self, x):
        return torch.cond(x.sum() > 0, super().forward, lambda z: z + 1, (x,))


class GatedAndMoreInABody(Gated):
    def forward(self, x):
        return torch.cond(x.sum() > 0, lambda z: super(GatedAndMoreInABody, self).forward(z * 2), lambda z: z + 1, (x,))


@pytest.mark.parametrize("kind", [Gated, GatedInABody, GatedAndMoreInABody])
def test_an_input_is_no_weight(kind):
    for gm in traces(kind(), torch.randn(4, 64)):
        assert rows(gm, "name", "masked") == [("fc", False)]
