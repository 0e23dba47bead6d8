"""Operands of several devices: one on the meta device, as weights are that a checkpoint did not have, would otherwise give memory that nobody has written."""

import pytest
import torch
from sample_models import mlp
from torch import nn

import fxmask
from fxmask.errors import ShapeError
from fxmask.kernels import ops

X = torch.randn(4, 64)
MAKE = {
    "built": lambda: fxmask.apply(mlp(), ratio=0.5),
    "cached": lambda: fxmask.apply(mlp(), ratio=0.5, refresh=0),
    "reference": lambda: fxmask.apply(mlp(), ratio=0.5, impl="reference"),
    "read": lambda: fxmask.apply(mlp(), ratio=0.5, overrides={"0": dict(read="weight")}),
    "graph": lambda: fxmask.apply(torch.fx.symbolic_trace(mlp()), ratio=0.5),
    "exported": lambda: torch.export.export(fxmask.apply(mlp(), ratio=0.5), (X,)).module(),
    "dropped": lambda: fxmask.apply(mlp(), fxmask.BlockDropout(0.5, block=(2, 8))),
    "pruned": lambda: fxmask.apply(mlp(), fxmask.ActivationPruning(0.5, 16)),
    "masked and pruned": lambda: fxmask.apply(mlp(), fxmask.WeightMask(0.5), fxmask.ActivationPruning(0.5, 16)),
}


def bias_left_behind(model, x):
    """As by load_state_dict(strict=False, assign=True) of a checkpoint without it."""
    layer = model.get_submodule("0")
    layer.bias = nn.Parameter(layer.bias.detach().to("meta"))
    return model(x)


USES = {"input": lambda m, x: m(x.to("meta")), "weights": lambda m, x: m.to("meta")(x), "bias": bias_left_behind}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("kind", MAKE)
def test_several_devices_are_refused_as_by_a_dense_layer(kind, use):
    with pytest.raises(RuntimeError, match=r"device meta|expected device cpu"):
        USES[use](mlp(), X)
    model = MAKE[kind]()
    with pytest.raises(ShapeError, match=r"is on (meta|cpu) and the (input|weight) on (cpu|meta): expected one device\.[^$]*fix: move the input, or the model"):
        USES[use](model, X)


@pytest.mark.parametrize("kind", ["built", "cached", "read"])
def test_the_layer_is_named(kind):
    with pytest.raises(ShapeError, match=r"the input is on cpu and the weight on meta: expected one device\.\n  where: 0\.weight\n  fix: move the input"):
        MAKE[kind]().to("meta")(X)


@pytest.mark.parametrize("kind", ["built", "graph", "exported", "dropped", "pruned"])
def test_one_device_is_enough_for_shapes(kind):
    y = MAKE[kind]().to("meta")(X.to("meta"))
    assert y.is_meta and y.shape == mlp()(X).shape


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("elsewhere", ["keep", "step"])
def test_a_mask_is_made_on_one_device(elsewhere, impl):
    t = {"weight": torch.randn(64, 64), "keep": torch.tensor(3), "step": torch.tensor(0)}
    t[elsewhere] = t[elsewhere].to("meta")
    with pytest.raises(ShapeError, match=rf"{elsewhere} is on meta and the input on cpu: expected one device"):
        ops.block_index(*t.values(), 16, 16, "fro", "lowest", 0, impl)
