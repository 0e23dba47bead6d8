"""What the tests of torch.compile(backend="fxmask") share."""

import pytest
import torch
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

from fxmask.compiler import backend

OPTIONS = dict(ratio=0.75, block=(8, 16))


def compiled(model, inner="eager", **options):
    return torch.compile(model, backend=backend.fxmask_backend, options={**options, "inner": inner})


def train(model, call, make_x, steps=5, lr=0.01):
    torch.manual_seed(1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = call(make_x()).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def graph_of(model, *args, **options):
    """The code of the rewritten graphs."""
    texts = []

    def keep(gm, inputs):
        texts.append(gm.print_readable(print_output=False))
        return gm.forward

    torch.compile(model, backend=backend.fxmask_backend, options={**options, "inner": keep})(*args)
    return texts


class Wrap(nn.Module):
    """A class that Dynamo does not skip, as it does containers."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return self.inner(x)


def failing(model, *args, **options):
    with pytest.raises(BackendCompilerFailed) as caught:
        compiled(model, **options)(*args)
    return caught.value.inner_exception


def steps_of(model, call, n):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for i in range(n):
        optimizer.zero_grad()
        call(torch.randn(4 + i, 64)).sum().backward()
        optimizer.step()
