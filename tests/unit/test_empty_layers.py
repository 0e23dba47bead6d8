"""Layers without outputs or without inputs, as slimmed models have them, and training on the meta device, where no tensor has values."""

import pytest
import torch
from sample_models import mlp
from torch import nn

import fxmask
from fxmask import ActivationPruning, BlockDropout, Feedback, Regrow, Schedule, WeightMask

CONFIGS = {
    "mask": (WeightMask(0.5, (8, 8)),),
    "spectral": (WeightMask(0.5, (8, 8), criterion="spectral"),),
    "cached, covering": (WeightMask(0.5, (8, 8), refresh=2, cover=True),),
    "pruned": (ActivationPruning(0.5, block=8),),
    "masked and pruned": (WeightMask(0.5, (8, 8)), ActivationPruning(0.5, block=8)),
    "dropped": (BlockDropout(0.5, block=(1, 8)),),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.filterwarnings("ignore::fxmask.FxMaskWarning")  # that nothing can be masked
@pytest.mark.parametrize("shape", [(4, 32), (2, 3, 32), (0, 32)], ids=str)
@pytest.mark.parametrize(("inside", "out"), [(0, 16), (16, 0)])
@pytest.mark.parametrize("config", CONFIGS)
def test_a_layer_without_elements_trains(config, inside, out, shape):
    model = nn.Sequential(nn.Linear(32, inside), nn.Linear(inside, out))
    fxmask.apply(model, *CONFIGS[config], exclude=())
    if isinstance(CONFIGS[config][0], WeightMask):
        fxmask.step(model, 0)
    x = torch.randn(shape, requires_grad=True)
    y = model(x)
    y.sum().backward()
    assert y.shape == (*shape[:-1], out) and torch.equal(x.grad, torch.zeros_like(x))
    assert all(p.grad.shape == p.shape for p in model.parameters())


SCORED = {
    "flips": dict(schedule=Feedback("flip_rate", every=1, goal=0.1)),
    "average": dict(average=0.5),
    "hysteresis": dict(hysteresis=0.1),
    "gain": dict(gain=True, schedule=Schedule("linear", steps=3)),
    "regrowth": dict(regrow=Regrow("random")),
    "gradient": dict(criterion="gradient", backward="ste"),
}


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.filterwarnings("ignore::fxmask.FxMaskWarning")  # that nothing can be masked
@pytest.mark.parametrize(("inside", "out"), [(0, 16), (16, 0)])
@pytest.mark.parametrize("config", SCORED)
def test_a_layer_without_elements_among_steps_that_count(config, inside, out):
    model = nn.Sequential(nn.Linear(32, inside), nn.Linear(inside, out))
    fxmask.apply(model, WeightMask(**{"ratio": 0.5, "block": (8, 8), "criterion": "spectral", **SCORED[config]}), exclude=())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model)
    log, full = fxmask.HealthLog(model), [name for name, p in model.named_parameters() if p.ndim == 2 and p.numel()]
    for _ in range(4):
        assert [r["name"] for r in log.update().rows] == full
        optimizer.zero_grad()
        model(torch.randn(4, 32)).sum().backward()
        optimizer.step()
    fxmask.load_state_dict(model, fxmask.state_dict(model))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
@pytest.mark.parametrize("shape", [(8, 0), (0, 8)])
def test_a_layer_without_elements_has_no_2_4_form(shape):
    model = fxmask.apply(nn.Sequential(nn.Linear(*shape)), WeightMask(0.5, (2, 2)), exclude=())
    with pytest.raises(fxmask.FxMaskError, match="2:4 wants at most 2 nonzeros"):
        fxmask.finalize(model, "2:4")


def test_guarded_steps_on_the_meta_device():
    with torch.device("meta"):
        model, x = mlp(), torch.empty(6, 64)
    fxmask.apply(model, ratio=0.5)
    optimizer = torch.optim.AdamW(model.parameters())
    fxmask.guard(optimizer, model)
    for _ in range(3):
        optimizer.zero_grad()
        model(x).sum().backward()
        optimizer.step()
    assert {r["step"] for r in fxmask.explain(model).rows if r["masked"]} == {3}
