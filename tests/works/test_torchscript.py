"""torch.jit.script of a changed model says what to do; of one whose masks are permanent it works, and torch.jit.trace follows the weight."""

import pytest
import torch
from torch import nn

import fxmask
from fxmask import ActivationPruning, BlockDropout, NMMask, WeightMask
from fxmask.errors import UnsupportedError

pytestmark = [pytest.mark.filterwarnings("ignore:`torch.jit"), pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")]
MASK = WeightMask(0.5, (8, 8))


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


CHANGED = {
    "mask": lambda: fxmask.apply(mlp(), MASK),
    "pruning": lambda: fxmask.apply(mlp(), ActivationPruning(0.5, block=8)),
    "dropout": lambda: fxmask.apply(mlp(), BlockDropout(0.5, block=(1, 8))),
    "N:M": lambda: fxmask.apply(mlp(), NMMask(2, 4)),
    "graph": lambda: fxmask.apply(torch.fx.symbolic_trace(mlp()), MASK),
    "reader": lambda: fxmask.apply(nn.MultiheadAttention(32, 4), MASK),
}


@pytest.mark.parametrize("kind", CHANGED)
def test_script_raises(kind):
    with pytest.raises(UnsupportedError, match=r"torch\.jit\.script cannot compile a layer that fxmask has changed[\s\S]*fxmask\.finalize"):
        torch.jit.script(CHANGED[kind]())


@pytest.mark.parametrize("kind", ["mask", "N:M", "reader"])
def test_script_of_what_is_permanent(kind):
    model, x = fxmask.finalize(CHANGED[kind]()), torch.randn(4, 32)
    args = (x, x, x) if kind == "reader" else (x,)
    torch.testing.assert_close(torch.jit.script(model)(*args), model(*args))


@pytest.mark.parametrize("kind", ["mask", "graph"])
def test_a_trace_follows_the_weight(kind):
    model, x = CHANGED[kind](), torch.randn(4, 32)
    traced, before = torch.jit.trace(model, x), fxmask.masks(model)
    with torch.no_grad():
        next(iter(model.parameters())).mul_(torch.randn(32, 32))
    assert any(not torch.equal(m, before[n]) for n, m in fxmask.masks(model).items())
    torch.testing.assert_close(traced(x), model(x))


MADE = {
    "scripted": lambda: torch.jit.script(mlp()),
    "traced": lambda: torch.jit.trace(CHANGED["mask"](), torch.randn(4, 32)),
    "inside": lambda: nn.Sequential(torch.jit.script(mlp()), nn.Linear(32, 32)),
}
CALLS = {
    "apply": fxmask.apply,
    "explain": fxmask.explain,
    "masks": fxmask.masks,
    "step": fxmask.step,
    "restore": fxmask.restore,
    "finalize": fxmask.finalize,
    "allocate": lambda m: fxmask.allocate(m, 0.5),
    "stability": lambda m: fxmask.stability(m, torch.randn(4, 32)),
    "guard": lambda m: fxmask.guard(torch.optim.SGD(m.parameters(), lr=0.1), m),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("made", MADE)
def test_what_is_scripted_is_told_so(made, call):
    """And not that nothing is masked: the masks are part of it."""
    model = MADE[made]()
    with pytest.raises(UnsupportedError, match=rf"fxmask\.{call} looks at Python modules: expected none that torch\.jit has[\s\S]*was scripted or traced"):
        CALLS[call](model)
