"""PyTorch's default device (torch.set_default_device, `with torch.device(...)`) is for the tensors that a user makes: on a CPU nothing of ours goes there."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

import fxmask
from fxmask import ActivationPruning, BlockDropout, NMMask, Regrow, Schedule, WeightMask
from fxmask.kernels.cpu import implementation as cpu
from fxmask.kernels.cpu.plans import BY_NAME

BLOCK, WEIGHT = (16, 16), WeightMask(ratio=0.5, block=(8, 8))


def operands(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(0)
    x, gy, w = (torch.randn(s, generator=g).to(dtype) for s in ((70, 50), (70, 40), (40, 50)))
    return x, gy, w, torch.rand(3, 4, generator=g) > 0.5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("plan", ["rows-512", "rows-512x3", "runs-2048", "columns-512"])
def test_plans(plan, dtype):
    (x, gy, w, mask), how = operands(dtype), BY_NAME[plan]

    def all_ops() -> list[Tensor]:
        found = []
        if how.layout != "columns":
            found += [cpu.masked_linear(x, w, None, mask, BLOCK, how), cpu.masked_linear_dx(gy, w, mask, BLOCK, how)]
        return found + (list(cpu.backward(gy, x, w, mask, BLOCK, how)) if how.layout != "runs" and how.group == 1 else [])

    want = all_ops()
    with torch.device("meta"):
        got = all_ops()
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


CONFIGS = {
    "mask": dict(config=WEIGHT),
    "random": dict(config=replace(WEIGHT, criterion="random", cover=True)),
    "spectral": dict(config=replace(WEIGHT, criterion="spectral")),
    "taylor": dict(config=replace(WEIGHT, criterion="taylor", average=0.5, hysteresis=0.2)),
    "soft": dict(config=replace(WEIGHT, schedule=Schedule("cubic", steps=4), soft=True)),
    "gain": dict(config=replace(WEIGHT, schedule=Schedule("linear", steps=4), gain=True)),
    "regrow": dict(config=replace(WEIGHT, backward="rigl", dense_every=2, refresh=2, regrow=Regrow(until=10))),
    "set": dict(config=replace(WEIGHT, refresh=2, regrow=Regrow("random"))),
    "phases": dict(config=replace(WEIGHT, phases={1: {"block": (4, 4)}, 2: {"backward": "ste"}})),
    "erk": dict(config=WEIGHT, allocation="erk"),
    "global": dict(config=WEIGHT, allocation="global"),
    "byte": dict(config=WEIGHT, allocation="byte"),
    "pruning": dict(config=ActivationPruning(ratio=0.5, block=8, noise=0.5)),
    "dropout": dict(config=BlockDropout(p=0.5, block=(8, 8))),
    "magnitude": dict(config=NMMask()),
    "transposable": dict(config=NMMask(transposable=True)),
    "permuted": dict(config=NMMask(mode="permuted")),
    "learned": dict(config=NMMask(mode="learned")),
    "sr-ste": dict(config=NMMask(mode="sr-ste")),
}


def trained(case: dict, model: nn.Module, x: Tensor) -> list[Tensor]:
    """Outputs of three steps and of evaluation, and the weights after `restore`."""
    torch.manual_seed(1)
    fxmask.apply(model, case["config"], allocation=case.get("allocation"))
    optimiser = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    if isinstance(case["config"], WeightMask):
        fxmask.guard(optimiser, model)
    found = []
    for _ in range(3):
        optimiser.zero_grad()
        found.append(model(x))
        found[-1].square().mean().backward()
        optimiser.step()
    found.append(model.eval()(x))
    fxmask.explain(model)
    fxmask.restore(model)
    return found + list(model.parameters())


@pytest.mark.filterwarnings("ignore:allocation by:fxmask.FxMaskWarning")
@pytest.mark.parametrize("case", CONFIGS.values(), ids=CONFIGS)
def test_training(case):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(24, 32)
    want = trained(case, copy.deepcopy(model), x)
    with torch.device("meta"):
        got = trained(case, model, x)
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)


def test_compiled():
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32)), torch.randn(24, 32)
    want = torch.compile(model, backend="fxmask", options={"ratio": 0.5, "block": (8, 8), "inner": "aot_eager"})(x)
    torch.compiler.reset()
    with torch.device("meta"):
        got = torch.compile(model, backend="fxmask", options={"ratio": 0.5, "block": (8, 8), "inner": "aot_eager"})(x)
    assert torch.equal(got, want)
    assert not torch.equal(got, model(x))
