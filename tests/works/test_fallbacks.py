"""Where torch.compile gives up, a model of fxmask.apply runs in eager code, and eager code is masked."""

import pytest
import torch
import torch.nn.functional as F
from sample_models import Residual, mlp
from torch import nn
from torch._dynamo.testing import CompileCounter
from works.twin import MODELS, check, near, pair, results, slow_but, some

# Dynamo looks at the .grad of whatever tensor enters a frame
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf Tensor is being accessed:UserWarning")


def compiled(model, counter=None, **options):
    return torch.compile(model, backend=counter or "aot_eager", **options)


@pytest.mark.parametrize("name", slow_but(MODELS, "mlp", "encoder"))
@pytest.mark.parametrize("stance", ["force_eager", "eager_on_recompile"])
def test_stances(stance, name):
    make, shape = MODELS[name]
    masked, twin, kept = pair(make())
    call, x = compiled(masked), some(*shape)
    with torch.compiler.set_stance(stance):
        check(results(call, masked, x), results(twin, twin, x), kept)
    call(x)
    x = some(shape[0] + 1, *shape[1:])  # would be a second compile
    with torch.compiler.set_stance(stance):
        check(results(call, masked, x), results(twin, twin, x), kept)


@pytest.mark.parametrize("name", slow_but(MODELS, "mlp"))
def test_the_recompile_limit(name):
    make, shape = MODELS[name]
    masked, twin, kept = pair(make())
    counter = CompileCounter()
    call = compiled(masked, counter, dynamic=False)
    with torch._dynamo.config.patch(recompile_limit=2):
        for n in range(2, 7):
            x = some(n, *shape[1:])
            check(results(call, masked, x), results(twin, twin, x), kept)
    assert counter.frame_count == 2, "the limit was not reached"


class Loop(nn.Module):
    """Graph breaks in a loop, in front of layers of every kind."""

    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.where = where
        self.layers = nn.ModuleList([nn.Linear(32, 32) for _ in range(3)])
        self.attention, self.block = nn.MultiheadAttention(32, 2, batch_first=True), Residual()

    def forward(self, x):
        for layer in self.layers:
            if self.where == "loop":
                torch._dynamo.graph_break()
            x = F.gelu(layer(x))
            x = x + self.attention(x, x, x, need_weights=False)[0]
        if self.where == "value" and x.sum() > 0:
            x = x * 2
        return self.block(x)


@pytest.mark.parametrize("where", slow_but(["loop", "value"], "loop"))
def test_graph_breaks(where):
    masked, twin, kept = pair(Loop(where))
    x = some(3, 32, 32)
    check(results(compiled(masked), masked, x), results(twin, twin, x), kept)


class Reader(nn.Module):
    """Reads the weight of its layer, behind a graph break of its own."""

    def __init__(self, where):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.where = nn.Linear(64, 64), where

    def forward(self, x):
        if self.where == "first":
            torch._dynamo.graph_break()
        for i in range(2):
            if self.where == "loop":
                torch._dynamo.graph_break()
            x = F.gelu(F.linear(x, self.fc.weight, self.fc.bias)) + i
        return self.last(x)

    def last(self, x):
        if self.where == "method":
            torch._dynamo.graph_break()
        return x @ self.fc.weight.t()


@pytest.mark.parametrize("where", slow_but(["", "first", "loop", "method"], "first", "method"))
@pytest.mark.parametrize("nested", slow_but([False, True], False), ids=["alone", "nested"])
def test_graph_breaks_in_a_reader(where, nested):
    model = Reader(where)
    masked, twin, kept = pair(nn.Sequential(nn.Linear(64, 64), model) if nested else model)
    x = some(3, 64)
    for _ in range(2):
        check(results(compiled(masked), masked, x), results(twin, twin, x), kept)
    w = compiled(lambda: masked[1].fc.weight * 1 if nested else masked.fc.weight * 1)()
    assert not (w == 0).any(), "outside of its owner's forward the weight is the Parameter"


def test_a_frame_that_is_disabled():
    masked, twin, kept = pair(mlp())
    masked[2].forward = torch.compiler.disable(masked[2].forward)
    x = some(6, 64)
    check(results(compiled(masked), masked, x), results(twin, twin, x), kept)


@pytest.mark.parametrize("of", ["model", "layer"])
def test_module_compile(of):
    """nn.Sequential.compile and nn.Linear.compile, of which Dynamo may capture nothing."""
    masked, twin, kept = pair(mlp())
    (masked if of == "model" else masked[0]).compile(backend="aot_eager")
    x = some(6, 64)
    check(results(masked, masked, x), results(twin, twin, x), kept)


def test_suppressed_errors():
    """A backend that fails, where failures are to be passed over."""
    masked, twin, _ = pair(mlp())

    def broken(gm, inputs):
        raise RuntimeError("no compiler here")

    with torch._dynamo.config.patch(suppress_errors=True):
        near(torch.compile(masked, backend=broken)(some(6, 64)).detach(), twin(some(6, 64)).detach())
