"""What comes behind a layer may write into its output, as ReLU(inplace=True) does."""

import copy

import pytest
import torch
from torch import nn

import fxmask

CONFIGS = {
    "masked": fxmask.WeightMask(0.0, (16, 16)),
    "ste": fxmask.WeightMask(0.0, (16, 16), backward="ste"),
    "pruned": fxmask.ActivationPruning(0.5, 16),
    "dropped": fxmask.BlockDropout(1e-9, (4, 16)),
}


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("shape", [(3, 10, 64), (30, 64)], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_an_output_is_written_in_place(config, shape, bias):
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(64, 48, bias=bias), nn.ReLU(inplace=True)).double()
    model, x = fxmask.apply(copy.deepcopy(dense), CONFIGS[config]), torch.randn(shape, dtype=torch.float64, requires_grad=True)
    out, want = model(x), dense(x)
    torch.testing.assert_close(out, want)
    gradients = [torch.autograd.grad(y.square().sum(), x)[0] for y in (out, want)]
    torch.testing.assert_close(*gradients)
