"""Nested tensors through masked graphs and the backend, which call the op itself: values and gradients of the class swap."""

import pytest
import torch
from torch import nn

import fxmask

OPTIONS = dict(ratio=0.5, block=(8, 8))
pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")


def mlp():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def by_backend(model, inner):
    return torch.compile(model, backend="fxmask", options={**OPTIONS, "inner": inner})


# PyTorch compiles nothing with nested tensors of the strided layout
CASES = {
    "graph, jagged": (torch.jagged, lambda m: fxmask.apply(torch.fx.symbolic_trace(m), **OPTIONS)),
    "graph, strided": (torch.strided, lambda m: fxmask.apply(torch.fx.symbolic_trace(m), **OPTIONS)),
    "backend, jagged": (torch.jagged, lambda m: by_backend(m, "eager")),
    "backend through AOT, jagged": (torch.jagged, lambda m: by_backend(m, "aot_eager")),
}


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case):
    torch._dynamo.reset()
    layout, make = CASES[case]
    parts = [torch.randn(3, 32), torch.randn(5, 32)]
    model, expected = mlp(), fxmask.apply(mlp(), **OPTIONS)
    run, x = make(model), torch.nested.nested_tensor(parts, layout=layout)
    found = torch.cat(run(x).unbind())
    wanted = torch.cat([expected(p) for p in parts])
    torch.testing.assert_close(found, wanted)
    found.square().sum().backward()
    wanted.square().sum().backward()
    for p, q in zip((run if isinstance(run, torch.fx.GraphModule) else model).parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            y = run(torch.nested.nested_tensor(parts, layout=layout))
            torch.testing.assert_close(torch.cat(y.unbind()), wanted.detach())


def test_kernels_refuse_them():
    x = torch.nested.nested_tensor([torch.randn(3, 32), torch.randn(5, 32)], layout=torch.jagged)
    w, mask = torch.randn(32, 32), torch.ones(4, 4, dtype=torch.bool)
    with pytest.raises(fxmask.errors.UnsupportedError, match=r"impl='triton' got a nested tensor"):
        torch.ops.fxmask.masked_linear(x, w, None, mask, 8, 8, "masked", None, "triton", None)
