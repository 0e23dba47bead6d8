"""Exported graphs whose linears stand in the bodies of cond, scan, map and while_loop, which PyTorch traces anew in every call that trains."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as over_rows
from torch._higher_order_ops.scan import scan

import fxmask
from fxmask.passes.graph_calls import MASKED_LINEAR

OPTIONS = dict(ratio=0.5, block=(8, 8))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.last = (nn.Linear(32, 32) for _ in range(3))


class Cond(Layers):
    def forward(self, x):
        return self.last(torch.cond(x.sum() > 0, lambda z: self.a(z), lambda z: self.b(z) + 1, (x,)))


class Scan(Layers):
    def forward(self, x):
        def step(carry, z):
            carry = torch.tanh(self.a(carry) + z)
            return carry, 2 * carry

        return self.last(scan(step, torch.zeros_like(x[0]), self.b(x))[1])


class Map(Layers):
    def forward(self, x):
        return self.last(over_rows(lambda z: self.a(z) * self.b(z), x))


RIGL, RAMP = dict(backward="rigl", dense_every=2), dict(schedule=fxmask.Schedule("linear", steps=3))
CASES = {"cond": (Cond, 1, {}), "the other branch": (Cond, -1, RIGL), "scan": (Scan, 1, RAMP), "map": (Map, 1, dict(backward="unmasked"))}


def masked_calls(gm):
    return sum(len(m.graph.find_nodes(op="call_function", target=MASKED_LINEAR)) for m in gm.modules() if isinstance(m, torch.fx.GraphModule))


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_class_swap(name):
    cls, sign, options = CASES[name]
    x, options = sign * torch.rand(3, 4, 32), {**OPTIONS, **options}
    model = cls()
    gm = fxmask.apply(torch.export.export(copy.deepcopy(model), (x,)).module(), **options)
    assert masked_calls(gm) == 3
    fxmask.apply(model, **options)
    for _ in range(3):
        for m in (model, gm):
            m.zero_grad()
            fxmask.step(m, 0)
        y, expected = gm(x), model(x)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(y, expected)
        grads = dict(gm.named_parameters())
        for n, p in model.named_parameters():
            none = torch.zeros_like(p)  # of the branch that is not taken
            torch.testing.assert_close(none if grads[n].grad is None else grads[n].grad, none if p.grad is None else p.grad)
        for m in (model, gm):
            fxmask.step(m)
