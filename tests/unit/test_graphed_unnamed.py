"""Layers of models that nobody has named or guards: `fxmask.graphed` finds them as they run, and sees where others have come in their places."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unit.graphed_runs import BLOCK, graphs  # noqa: F401  (a fixture)

import fxmask
from fxmask import ActivationPruning, BlockDropout, WeightMask

pytestmark = pytest.mark.usefixtures("graphs")


def made():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


def losses(model, changes, graphed):
    """Of six steps before the changes and behind each of them; with the number of captures."""
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = torch.zeros(16, 32), torch.zeros(16, dtype=torch.int64)

    def plain():
        optimiser.zero_grad(set_to_none=True)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimiser.step()
        return loss.detach()

    step, seen = fxmask.graphed(plain, optimiser, warmup=2) if graphed else plain, []
    for change in (lambda m: m, *changes):
        change(model)
        for i in range(6):
            torch.manual_seed(i)
            x.copy_(torch.randn(16, 32)), y.copy_(torch.randint(10, (16,)))
            seen.append(float(step()))
    return seen, step.captures if graphed else 0


METHODS = {
    "masks": (WeightMask(0.5, BLOCK, refresh=0), WeightMask(0.75, BLOCK, refresh=0)),
    "pruned inputs": (ActivationPruning(0.5, 8), ActivationPruning(0.25, 8)),
    "block dropout": (BlockDropout(p=0.1, block=BLOCK), BlockDropout(p=0.6, block=BLOCK)),
}


@pytest.mark.parametrize("form", [made, lambda: torch.fx.symbolic_trace(made())], ids=["modules", "trace"])
@pytest.mark.parametrize(("first", "second"), METHODS.values(), ids=METHODS)
def test_another_method_in_place_of_the_first(form, first, second):
    """By restore and apply, or by restore alone; a trace has other modules then, and those that ran know nothing of it."""
    results = []
    for graphed in (True, False):
        changes = (lambda m: fxmask.apply(fxmask.restore(m), second), fxmask.restore)
        results.append(losses(fxmask.apply(form(), first), changes, graphed))
    assert results[0][0] == results[1][0]
    assert results[0][1] == 3


def test_block_dropout_in_eval():
    results = [losses(fxmask.apply(made(), BlockDropout(p=0.3, block=BLOCK)), [nn.Module.eval], graphed) for graphed in (True, False)]
    assert results[0] == (results[1][0], 2)


def test_products_of_a_trace():
    """An affine layer's products with parameters."""

    class Affine(nn.Module):
        def __init__(self):
            super().__init__()
            self.body, self.alpha = made(), nn.Parameter(torch.ones(32))

        def forward(self, x):
            return self.body(self.alpha * x)

    def trace():
        return fxmask.apply(torch.fx.symbolic_trace(Affine()), ActivationPruning(0.5, 8, affine=True), include=["alpha"])

    results = [losses(trace(), [fxmask.restore], graphed) for graphed in (True, False)]
    assert results[0] == (results[1][0], 2)
