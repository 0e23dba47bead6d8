"""What the tests of `fxmask.graphed` train: one small model, as it is and on a stand-in for CUDA graphs (`unit.tape`)."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from unit import tape

import fxmask
from fxmask import Schedule, WeightMask

BLOCK = (8, 8)
RAMP = Schedule("cubic", steps=15)
MIX = {"refresh": 2, "criterion": "taylor", "average": 0.9, "schedule": RAMP}


@pytest.fixture
def graphs(monkeypatch):
    """Steps are recorded on a CPU, too."""
    monkeypatch.setattr("fxmask.cuda_graphs.graphed_step.recorder", lambda device: tape.Tape)
    monkeypatch.setattr("fxmask.passes.state.tensors.capturing", lambda t: tape.recording[0])


def adamw(params, lr):
    return torch.optim.AdamW(params, lr=lr, weight_decay=0.1, fused=True, capturable=True)


class Run:
    """A masked model in training, graphed or not."""

    def __init__(self, graphed, *configs, guard=None, optimiser=None, schedule_lr=True, warmup=2, **options):
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
        if configs or options:
            fxmask.apply(self.model, *(configs or (WeightMask(0.5, BLOCK, **options),)), include=["0", "2"])
        self.x, self.y = torch.zeros(16, 32), torch.zeros(16, dtype=torch.int64)
        lr = torch.tensor(0.02) if schedule_lr else 0.02
        self.optimiser = (optimiser or adamw)(self.model.parameters(), lr)
        self.rate = torch.optim.lr_scheduler.ExponentialLR(self.optimiser, 0.95) if schedule_lr else None
        if configs or options:
            fxmask.guard(self.optimiser, self.model, **(guard or {}))
        self.step = fxmask.graphed(self.plain, self.optimiser, warmup=warmup) if graphed else self.plain
        self.losses, self.masks, self.steps = [], [], 0

    def plain(self):
        self.optimiser.zero_grad(set_to_none=True)
        loss = F.cross_entropy(self.model(self.x), self.y)
        loss.backward()
        self.optimiser.step()
        return loss.detach()

    def train(self, n, step=None):
        for _ in range(n):
            g = torch.Generator().manual_seed(self.steps)
            self.steps += 1
            self.x.copy_(torch.randn(16, 32, generator=g))
            self.y.copy_(torch.randint(10, (16,), generator=g))
            self.losses.append(float((step or self.step)()))
            if self.rate is not None:
                self.rate.step()
            self.masks.append({k: m.clone() for k, m in fxmask.masks(self.model).items()} if hasattr(self.model[0], "_fxmask_step") else {})
        return self


def pair(*configs, **options):
    """The same run graphed and as it is."""
    return Run(True, *configs, **options), Run(False, *configs, **options)


def assert_same(a, b):
    assert a.losses == b.losses
    for p, q in zip(a.model.parameters(), b.model.parameters(), strict=True):
        assert torch.equal(p, q)
        for key, t in a.optimiser.state[p].items():
            assert torch.equal(torch.as_tensor(t), torch.as_tensor(b.optimiser.state[q][key])), key
    for i, (m, n) in enumerate(zip(a.masks, b.masks, strict=True)):
        assert all(torch.equal(m[k], n[k]) for k in n), i


def assert_goes_on(graphed, plain, n=8):
    """From here on as the other one, after whatever was refused or done to both."""
    graphed.train(n), plain.train(n)
    assert graphed.losses[-n:] == plain.losses[-n:]
