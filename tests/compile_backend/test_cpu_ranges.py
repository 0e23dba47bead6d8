"""Strips over several token ranges inside compiled code: Inductor's own threads before and after them, and the bits of eager mode."""

import pytest
import torch

import fxmask


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow), 3])
def threads(request):
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    assert torch.get_num_threads() == request.param
    torch.set_num_threads(before)


def trained(model, call, x):
    """Losses, and gradients at the end, of three steps."""
    optimiser, losses = torch.optim.SGD(model.parameters(), 0.1), []
    for _ in range(3):
        optimiser.zero_grad()
        loss = call(x).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.detach())
    return [*losses, *(p.grad.clone() for p in model.parameters())]


def test_several_ranges_under_inductor(threads):
    """1,200 tokens are up to three ranges."""
    runs = {}
    for compiled in (False, True):
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(96, 160), torch.nn.ReLU(), torch.nn.Linear(160, 96))
        fxmask.apply(model, ratio=0.5, block=(16, 16), impl="cpu")
        x = torch.randn(2, 600, 96)
        runs[compiled] = trained(model, torch.compile(model) if compiled else model, x)
    for got, expected in zip(runs[True], runs[False], strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-6)
    with torch.no_grad():
        fused = torch.compile(model)
        assert torch.equal(fused(x), fused(x)) and torch.equal(fused(x), model(x))
