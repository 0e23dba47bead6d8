"""Classes that notebooks and factory functions define: what they close over is freed, as without masks."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmask
from fxmask import ActivationPruning, NMMask, WeightMask

pytestmark = pytest.mark.usefixtures("little_garbage")


def one(kind, config, taken_off):
    data = torch.randn(10)

    class Lin(nn.Linear):
        table = data

        def forward(self, x):
            return F.linear(x, self.weight, self.bias)

    class Enc(nn.TransformerEncoderLayer):
        def forward(self, *args, **kwargs):
            data.add_(1)
            return super().forward(*args, **kwargs)

    model = fxmask.apply(nn.Sequential(Lin(64, 64) if kind == "linear" else Enc(64, 4, 64, batch_first=True)), config)
    model(torch.randn(4, 4, 64)).sum().backward()
    fxmask.explain(model)
    if taken_off:
        fxmask.restore(model)
    return weakref.ref(data)


MASK = WeightMask(0.5, (16, 16))


@pytest.mark.parametrize("taken_off", [True, False])
@pytest.mark.parametrize(("kind", "config"), [("linear", MASK), ("linear", NMMask(2, 4)), ("linear", ActivationPruning(0.5, 16)), ("reader", MASK)])
def test_a_class_goes_with_its_layers(kind, config, taken_off):
    found = [one(kind, config, taken_off) for _ in range(3)]
    for _ in range(4):  # class by class
        gc.collect()
    assert [r() for r in found] == [None] * 3


def test_the_class_is_one_as_long_as_it_is_used():
    models = [fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5) for _ in range(2)]
    gc.collect()
    assert type(models[0][0]) is type(models[1][0]) is type(fxmask.apply(nn.Linear(64, 64), ratio=0.5))


def test_nothing_compiles_anew_when_models_come_and_go():
    """The class of a model that is defined in a module stays, though no model is left that has it."""
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter, x, frames = CompileCounterWithBackend("aot_eager"), torch.randn(2, 4, 64), []
    for _ in range(4):
        model = fxmask.apply(nn.Sequential(nn.TransformerEncoderLayer(64, 4, 64, batch_first=True)), ratio=0.5)
        compiled = torch.compile(model, backend=counter, fullgraph=True)
        compiled(x).sum().backward()
        frames.append(counter.frame_count)
        del model, compiled
        gc.collect()
    assert frames == [frames[0]] * 4
