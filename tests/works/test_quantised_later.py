"""Weights that a tool has put into another tensor class after `apply`, as torchao's quantize_ does: clear words, where that class knows none of the ops."""

import pytest
import torch
from sample_models import mlp
from torch import nn
from torch.utils._python_dispatch import return_and_correct_aliasing
from works.twin import slow_but

import fxmask
from fxmask.errors import UnsupportedError

PLAIN = {torch.ops.aten.detach.default, torch.ops.aten.clone.default, torch.ops.aten.alias.default}
SAID = r"weight has become a Int8 since fxmask.apply(.|\n)*fix: call fxmask.finalize\(model\) first, then quantise"


class Int8(torch.Tensor):
    """Like torchao's: values and a scale for each row, an F.linear of its own, and no other op."""

    @staticmethod
    def __new__(cls, values, scale):
        return torch.Tensor._make_wrapper_subclass(cls, values.shape, dtype=scale.dtype, device=values.device)

    def __init__(self, values, scale):
        self.values_, self.scale = values, scale

    def __repr__(self):
        return "Int8(...)"

    def __tensor_flatten__(self):
        return ["values_", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["values_"], inner["scale"])

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is nn.functional.linear:
            return func(args[0], args[1].values_ * args[1].scale, *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func not in PLAIN:
            raise NotImplementedError(f"{func} is not implemented")
        made = cls(func(args[0].values_), func(args[0].scale))
        return return_and_correct_aliasing(func, args, kwargs or {}, made)


def quantise(model):
    for m in model.modules():
        if isinstance(m, nn.Linear):
            w = m.weight.detach()
            scale = w.abs().amax(1, keepdim=True) / 127
            m.weight = nn.Parameter(Int8((w / scale).round().to(torch.int8), scale), requires_grad=False)
    return model


OPTIONS = {"each forward": {}, "cached": dict(refresh=0), "read": dict(overrides={"0": dict(read="weight")})}


@pytest.mark.parametrize("name", slow_but(OPTIONS, "cached"))
def test_a_forward_says_what_to_do(name):
    model = quantise(fxmask.apply(mlp(), ratio=0.75, **OPTIONS[name])).eval()
    for ask in (lambda: model(torch.randn(4, 64)), lambda: torch.compile(model, backend="aot_eager")(torch.randn(4, 64))):
        with pytest.raises(UnsupportedError, match=SAID):
            ask()


@pytest.mark.parametrize("ask", [fxmask.masks, fxmask.finalize], ids=lambda f: f.__name__)
def test_so_does_what_needs_its_values(ask):
    with pytest.raises(UnsupportedError, match=SAID):
        ask(quantise(fxmask.apply(mlp(), ratio=0.75)))


def test_an_nm_mask():
    with pytest.raises(UnsupportedError, match=SAID):
        quantise(fxmask.apply(mlp(), fxmask.NMMask(2, 4)))(torch.randn(4, 64))


def test_explain_names_it():
    row = fxmask.explain(quantise(fxmask.apply(mlp(), ratio=0.75))).rows[0]
    assert row["masked"] and row["reason"] == "selected; its weight has become a Int8 since, and its forward raises"
    assert row["achieved_ratio"] is row["impl"] is None


def test_what_it_says_works():
    x = torch.randn(4, 64)
    model = fxmask.apply(mlp(), ratio=0.75)
    y = model(x)
    assert (quantise(fxmask.finalize(model))(x) - y).abs().max() < 0.05
    dense = mlp()
    y = dense(x)
    assert (fxmask.restore(quantise(fxmask.apply(mlp(), ratio=0.75)))(x) - y).abs().max() < 0.05
