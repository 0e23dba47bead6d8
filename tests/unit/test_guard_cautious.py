"""Cautious optimisers, whose step is divided by a mean over the whole weight: masked zeros would make it larger."""

import warnings

import pytest
import torch
from torch import nn, optim

import fxmask


class Cautious(optim.Optimizer):
    """As timm's: elements whose gradient and momentum disagree rest, and the others move by so much more."""

    def __init__(self, params, lr=1.0):
        super().__init__(params, {"lr": lr, "caution": True})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)
                agree = (m * p.grad > 0).to(p.dtype)
                p.sub_(m * agree, alpha=group["lr"] / float(agree.mean()))


def moved(**how):
    """By how much of its gradient an element moves at most."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64, bias=False)), ratio=0.75, block=(16, 16))
    optimiser = Cautious(model.parameters())
    fxmask.guard(optimiser, model, **how)
    before = model[0].weight.detach().clone()
    model(torch.randn(8, 64)).sum().backward()
    gradient = model[0].weight.grad.abs().max()
    optimiser.step()
    return float((model[0].weight.detach() - before).abs().max() / gradient)


def test_a_step_on_kept_blocks_alone_has_the_right_size():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert moved(masked_step="elementwise") == pytest.approx(1, abs=1e-5)


def test_a_guard_says_what_masks_do_to_it():
    with pytest.warns(fxmask.FxMaskWarning, match=r"(?s)cautious step divides .*where: Cautious\n.*masked_step='elementwise'") as caught:
        assert moved() == pytest.approx(4, abs=1e-5)  # a quarter of the blocks is kept
    assert len(caught) == 1 and caught[0].filename == __file__
