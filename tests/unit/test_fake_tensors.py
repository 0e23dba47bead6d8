"""Training steps of a masked model under FakeTensorMode, in which PyTorch's tools estimate memory: nothing may ask for values."""

import functools

import pytest
import torch
from sample_models import mlp
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fxmask
from fxmask.errors import StateError, UnsupportedError

ADAMW = functools.partial(optim.AdamW, lr=0.1)
FUSED = functools.partial(optim.AdamW, lr=0.1, fused=True)
SGD = functools.partial(optim.SGD, lr=0.1, momentum=0.9)
RAMP = fxmask.Schedule("linear", steps=2)


def train(model, optimiser, steps=3):
    for _ in range(steps):
        optimiser.zero_grad()
        model(torch.randn(8, 64)).square().mean().backward()
        optimiser.step()


MASKS = (
    {},
    dict(refresh=0),
    dict(refresh=2),
    dict(schedule=RAMP),
    dict(schedule=RAMP, soft=True),
    dict(schedule=RAMP, gain=True),
    dict(backward="ste"),
    dict(backward="rigl", regrow=fxmask.Regrow("gradient", 0.3)),
    dict(criterion="taylor", average=0.9),
    dict(criterion="random", cover=True),
    dict(phases={2: {"block": (8, 8)}}),
)
GUARDS = (dict(masked_weights="decay"), dict(masked_weights="free"), dict(returning="zero"))


@pytest.mark.parametrize(
    ("mask", "guard", "optimiser_of"),
    [*((mask, {}, ADAMW) for mask in MASKS), *(({}, guard, of) for guard in GUARDS for of in (ADAMW, FUSED, SGD)), (dict(refresh=2), GUARDS[-1], SGD)],
    ids=str,
)
def test_guarded_steps(mask, guard, optimiser_of):
    with FakeTensorMode():
        model = fxmask.apply(mlp(), ratio=0.5, block=(16, 16), **mask)
        optimiser = optimiser_of(model.parameters())
        handle = fxmask.guard(optimiser, model, **guard)
        train(model, optimiser)
    weight = model[0].weight
    assert handle.steps == 3 and any(isinstance(t, FakeTensor) and t.shape == weight.shape for t in optimiser.state[weight].values())


@pytest.mark.parametrize("refresh", [1, 2])
def test_steps_on_kept_blocks_alone(refresh):
    """Whose copies are as large as the kept blocks are many, which the host knows."""
    with FakeTensorMode():
        model = fxmask.apply(mlp(), ratio=0.5, block=(16, 16), refresh=refresh)
        optimiser = ADAMW(model.parameters())
        fxmask.guard(optimiser, model, masked_step=True)
        train(model, optimiser)
    assert optimiser.state[model[0].weight]["exp_avg"].shape == model[0].weight.shape


@pytest.mark.parametrize("config", [fxmask.ActivationPruning(ratio=0.5, block=4), fxmask.BlockDropout(p=0.5)])
def test_configs_of_inputs(config):
    with FakeTensorMode():
        model = fxmask.apply(mlp(), config)
        train(model, SGD(model.parameters()))
    assert isinstance(model[0].weight.grad, FakeTensor)


def test_convolutions_and_muon():
    with FakeTensorMode():
        model = fxmask.apply(nn.Sequential(nn.Conv2d(16, 32, 3), nn.Conv2d(32, 32, 3)), ratio=0.5, block=(16, 16), layers=(nn.Conv2d,))
        optimiser = SGD(model.parameters())
        fxmask.guard(optimiser, model)
        model(torch.randn(2, 16, 8, 8)).mean().backward()
        optimiser.step()
        linear = fxmask.apply(nn.Sequential(nn.Linear(64, 64, bias=False)), ratio=0.5, block=(16, 16))
        muon = optim.Muon(linear.parameters(), lr=0.1)
        fxmask.guard(muon, linear)
        train(linear, muon)
    assert isinstance(model[1].weight.grad, FakeTensor) and muon.state[linear[0].weight]["momentum_buffer"].shape == (64, 64)


@pytest.mark.parametrize("refresh", [1, 2])
def test_explain_leaves_out_what_only_values_tell(refresh):
    with FakeTensorMode():
        model = fxmask.apply(mlp(), ratio=0.5, block=(16, 16), refresh=refresh)
        optimiser = ADAMW(model.parameters())
        fxmask.guard(optimiser, model)
        train(model, optimiser)
        (row, *_) = fxmask.explain(model).rows
    assert (row["step"], row["target_ratio"], row["blocks"]) == (3, 0.5, 24) and row["achieved_ratio"] is None


def test_patterns_two_of_four():
    with FakeTensorMode():
        model = fxmask.apply(mlp(), fxmask.NMMask(2, 4))
        train(model, ADAMW(model.parameters()))
        (row, *_) = fxmask.explain(model).rows
    assert row["achieved_ratio"] is None and isinstance(model[0].weight.grad, FakeTensor)


def test_what_needs_values_says_so():
    saved = fxmask.state_dict(fxmask.apply(mlp(), ratio=0.5, block=(16, 16), refresh=2))
    with FakeTensorMode() as mode:
        with pytest.raises(UnsupportedError, match="allocation by scores needs the weights' values: expected real memory, got a fake tensor"):
            fxmask.apply(mlp(), ratio=0.5, block=(16, 16), allocation="global")
        with pytest.raises(UnsupportedError, match=r"masks\['0.weight'\]: expected values, got a fake tensor"):
            fxmask.apply(mlp(), masks={"0.weight": torch.ones(6, 4, dtype=torch.bool)}, block=(16, 16))
        saved["masks"]["0.weight"]["mask"] = mode.from_tensor(saved["masks"]["0.weight"]["mask"])
        with pytest.raises(StateError, match=r"mask: expected a tensor of torch\.bool with values, got one of torch\.bool"):
            fxmask.load_state_dict(fxmask.apply(mlp(), ratio=0.5, block=(16, 16), refresh=2), saved)
