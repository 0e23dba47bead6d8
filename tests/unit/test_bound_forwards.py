"""A forward that was bound while a layer was masked, as Accelerate's hooks and other wrappers keep it: after restore and finalize it is the layer's own."""

import functools

import pytest
import torch
from sample_models import Scale
from torch import nn

import fxmask
from fxmask import ActivationPruning, BlockDropout, NMMask, WeightMask

X, IMAGE = torch.randn(4, 32, generator=torch.Generator().manual_seed(0)), torch.randn(2, 16, 8, 8)
MASK = WeightMask(0.5, (16, 16))


class Read(nn.Module):
    """Its weight is read, not called."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        return nn.functional.linear(x, self.fc.weight, self.fc.bias)


class Called(Read):
    """Its weight is read, and it is called, too."""

    def forward(self, x):
        return super().forward(x) + self.fc(x)


CASES = {
    "linear": (lambda: nn.Linear(32, 32), MASK, (X,)),
    "conv": (lambda: nn.Conv2d(16, 16, 2), WeightMask(0.5, (4, 4)), (IMAGE,)),
    "owner": (lambda: nn.MultiheadAttention(32, 2), MASK, (X, X, X)),
    "reader": (Read, MASK, (X,)),
    "nm": (lambda: nn.Linear(32, 32), NMMask(2, 4), (X,)),
    "pruned": (lambda: nn.Linear(32, 32), ActivationPruning(0.5, 16), (X,)),
    "pruned and masked": (lambda: nn.Linear(32, 32), (MASK, ActivationPruning(0.5, 16)), (X,)),
    "pruned product": (lambda: Scale(32), ActivationPruning(0.5, 16, affine=True), (X,)),
    "dropped": (lambda: nn.Linear(32, 32), BlockDropout(0.5, (2, 16)), (X,)),
}


def wrap(module):
    module._old_forward = module.forward
    module.forward = functools.partial(lambda m, *args: m._old_forward(*args), module)


@pytest.mark.filterwarnings("ignore:.*finalize")
@pytest.mark.parametrize("take_off", [fxmask.restore, fxmask.finalize])
@pytest.mark.parametrize("case", CASES)
def test_a_bound_forward_outlives_the_masks(case, take_off):
    make, config, inputs = CASES[case]
    configs = config if isinstance(config, tuple) else (config,)
    model = fxmask.apply(nn.ModuleList([make()]), *configs, **({"layers": nn.Conv2d} if case == "conv" else {})).eval()
    wrap(model[0])
    model[0](*inputs)
    take_off(model)
    first = lambda y: y[0] if isinstance(y, tuple) else y  # noqa: E731
    wrapped, plain = first(model[0](*inputs)), first(type(model[0]).forward(model[0], *inputs))
    assert torch.equal(wrapped, plain) and not type(model[0]).__name__.startswith(("Masked", "NM", "Pruned", "Dropped"))
    left = {name for m in model.modules() for name in vars(m) if name.startswith("_fxmask")}
    assert take_off is fxmask.finalize or not left
    model[0].forward = model[0]._old_forward  # what taking Accelerate's hook off leaves
    assert torch.equal(first(model[0](*inputs)), plain)


def test_a_fused_dropout_that_was_wrapped():
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.Dropout(0.5), nn.Linear(32, 32)), BlockDropout(block=(2, 16)))
    for m in model:
        wrap(m)
    model(X)
    fxmask.restore(model)
    assert not torch.equal(model(X), model(X)) and torch.equal(model.eval()(X), model(X))


@pytest.mark.filterwarnings("ignore:.*finalize")
@pytest.mark.parametrize("take_off", [fxmask.restore, fxmask.finalize])
def test_a_layer_that_is_read_and_was_wrapped(take_off):
    model = fxmask.apply(Called(), WeightMask(0.5, (16, 16), read="weight"))
    wrap(model.fc)
    masked = model(X)
    take_off(model)
    y = nn.functional.linear(X, model.fc.weight, model.fc.bias)
    assert torch.equal(model(X), y + y) and torch.equal(masked, y + y) == (take_off is fxmask.finalize)
