"""Freeze by gathering what is masked, as large weights on a CPU are: to the bit what copies of whole tensors leave."""

import copy
import functools

import pytest
import torch
from torch import nn, optim

import fxmask
from fxmask.kernels.grid import expand_mask
from fxmask.passes.stepping import gathered

RAMP = fxmask.Schedule("cubic", steps=3)
OPTIMISERS = {
    "adamw": functools.partial(optim.AdamW, lr=0.01, weight_decay=0.1),
    "amsgrad": functools.partial(optim.Adam, lr=0.01, amsgrad=True),
    "fused": functools.partial(optim.AdamW, lr=0.01, fused=True),
    "sgd": functools.partial(optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    "rprop": functools.partial(optim.Rprop, lr=0.01),
    "asgd": functools.partial(optim.ASGD, lr=0.1),
    "adafactor": optim.Adafactor,
}


class Several(nn.Module):
    """A ragged Linear, a stored transpose and a convolution in channels_last."""

    def __init__(self):
        super().__init__()
        self.ragged, self.turned = nn.Linear(50, 72), nn.Linear(72, 64)
        self.turned.weight = nn.Parameter(self.turned.weight.detach().t().contiguous().t())
        self.conv = nn.Conv2d(16, 32, 3, padding=1).to(memory_format=torch.channels_last)

    def forward(self, x):
        y = self.turned(self.ragged(x).relu())
        return self.conv(y.view(-1, 16, 2, 2)).square().mean()


@pytest.fixture
def count(monkeypatch):
    """How many weights were gathered; as small as these are, and in narrower blocks, too."""
    found, real = [], gathered.gather

    def gather(g, momenta):
        found.append(g.name)
        real(g, momenta)

    monkeypatch.setattr(gathered, "gather", gather)
    monkeypatch.setattr(gathered, "LARGE", 0)
    monkeypatch.setattr(gathered, "HELD", 1)
    return found


def train(optimiser, closure=False, steps=6, policy="auto", **mask):
    torch.manual_seed(0)
    model = Several()
    fxmask.apply(model, **{"ratio": 0.5, "block": (16, 16), "layers": (nn.Linear, nn.Conv2d), **mask})
    optimiser = OPTIMISERS[optimiser](model.parameters())
    fxmask.guard(optimiser, model, policy)
    before = copy.deepcopy([p.detach() for p in model.parameters()])
    for _ in range(steps):
        x = torch.randn(8, 50)

        def run(x=x):
            optimiser.zero_grad()
            loss = model(x)
            loss.backward()
            return loss

        optimiser.step(run) if closure else (run(), optimiser.step())
    return model, optimiser, before


def states(model, optimiser):
    return [t for p in model.parameters() for t in (p.detach(), *optimiser.state[p].values()) if isinstance(t, torch.Tensor)]


def same(got, expected):
    return [torch.equal(a, b) for a, b in zip(states(*got[:2]), states(*expected[:2]), strict=True)]


CASES = [
    *((name, {}) for name in OPTIMISERS),
    ("adamw", dict(refresh=0)),
    ("adamw", dict(refresh=2)),
    ("adamw", dict(schedule=RAMP)),
    ("adamw", dict(schedule=RAMP, soft=True)),
    ("adamw", dict(block=(8, 4))),
    ("adamw", dict(block=(1, 16))),
    ("adamw", dict(block=(64, 64))),
    ("adamw", dict(ratio=0.9)),
    ("adamw", dict(ratio=0.0)),
    ("adamw", dict(closure=True)),
    ("adamw", dict(criterion="random")),
    ("sgd", dict(criterion="random", refresh=2)),
    ("sgd", dict(phases={2: {"block": (8, 8)}, 4: {"block": (32, 16)}})),
    ("sgd", dict(backward="rigl", regrow=fxmask.Regrow("random", 0.3))),
]


@pytest.mark.parametrize(("optimiser", "options"), CASES, ids=str)
def test_the_bits_of_copies(optimiser, options, count, monkeypatch):
    got = train(optimiser, **options)
    assert {"ragged.weight", "turned.weight", "conv.weight"} == set(count)
    del count[:]
    monkeypatch.setattr(gathered, "LARGE", 1 << 40)
    expected = train(optimiser, **options)
    assert not count and all(same(got, expected))
    assert [p.stride() for p in got[0].parameters()] == [p.stride() for p in expected[0].parameters()]


def test_masked_elements_stay_and_others_move(count):
    model, _, before = train("adamw", refresh=0)
    for name, p, old in zip(dict(model.named_parameters()), model.parameters(), before, strict=True):
        if (mask := fxmask.masks(model).get(name)) is not None:
            kept = expand_mask(mask, p.flatten(1).shape, (16, 16))
            moved = (p.detach() != old).flatten(1)
            assert moved[kept].all() and not moved[~kept].any()


def test_masked_elements_decay_where_that_was_asked_for(count):
    model, _, before = train("adamw", refresh=0, policy="decay")
    for name, p, old in zip(dict(model.named_parameters()), model.parameters(), before, strict=True):
        if (mask := fxmask.masks(model).get(name)) is not None:
            out = ~expand_mask(mask, p.flatten(1).shape, (16, 16))
            torch.testing.assert_close(p.detach().flatten(1)[out], old.flatten(1)[out] * (1 - 0.01 * 0.1) ** 6)
    assert not count


def test_a_step_on_kept_blocks_gathers_the_others_where_there_is_no_gradient(count):
    class Decays(optim.SGD):
        @torch.no_grad()
        def step(self, closure=None):
            super().step(closure)
            for p in self.param_groups[0]["params"]:
                p.mul_(0.9)

    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5, block=(16, 16), refresh=0)
    optimiser, w = Decays(model.parameters(), lr=0.1), model[0].weight
    fxmask.guard(optimiser, model, masked_step="elementwise")
    out, before = ~expand_mask(fxmask.masks(model)["0.weight"], w.shape, (16, 16)), w.detach().clone()
    model(torch.randn(4, 64)).square().mean().backward()
    optimiser.step()
    between = w.detach().clone()
    optimiser.zero_grad()
    optimiser.step()
    assert torch.equal(w[out], before[out]) and torch.equal(w[~out], between[~out] * 0.9) and count


def test_large_weights_alone_are_gathered_in_blocks_that_are_not_narrow():
    found, sizes = {}, {"small": (256, 256), "large": (512, 512), "narrow": (512, 512)}
    model = nn.ModuleDict({name: nn.Linear(*size, bias=False) for name, size in sizes.items()})
    fxmask.apply(model, ratio=0.5, block=(16, 16), overrides={"narrow": {"block": (16, 4)}})
    optimiser = OPTIMISERS["sgd"](model.parameters())
    handle = fxmask.guard(optimiser, model)
    sum(layer(torch.randn(2, layer.in_features)).sum() for layer in model.values()).backward()
    of = handle._held
    optimiser.register_step_pre_hook(lambda *_: found.update({g.name: tuple((g.gathered.weight if g.gathered else g.before).shape) for g in of.guarded}))
    optimiser.step()
    assert found == {"small.weight": (256, 256), "large.weight": (1, 512 * 256), "narrow.weight": (512, 512)}
