"""Layers whose weight is None or was deleted: what needs it names the layer, `restore` goes through, and `apply` says why it cannot be masked."""

import pytest
import torch
from sample_models import mlp
from torch import nn

import fxmask
from fxmask.errors import FxMaskWarning, StateError, UnsupportedError

MAKE = {
    "modules": lambda: fxmask.apply(mlp(), ratio=0.5),
    "cached": lambda: fxmask.apply(mlp(), ratio=0.5, refresh=5),
    "read": lambda: fxmask.apply(mlp(), ratio=0.5, overrides={"0": dict(read="weight")}),
    "conv": lambda: fxmask.apply(nn.Sequential(nn.Conv2d(16, 32, 1)), ratio=0.5, layers=nn.Conv2d),
    "N:M": lambda: fxmask.apply(mlp(), fxmask.NMMask(2, 4)),
    "permuted": lambda: fxmask.apply(mlp(), fxmask.NMMask(2, 4, mode="permuted")),
    "pruned": lambda: fxmask.apply(mlp(), fxmask.ActivationPruning(0.5)),
    "dropped": lambda: fxmask.apply(mlp(), fxmask.BlockDropout(0.5, block=(2, 8))),
}
ENDS = {"none": lambda m: setattr(m, "weight", None), "deleted": lambda m: delattr(m, "weight")}
GONE = "this layer has no weight any more"


def broken(kind, end):
    model = MAKE[kind]()
    ENDS[end](model.get_submodule("0"))
    return model


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", MAKE)
def test_a_forward_names_the_layer(kind, end):
    model = broken(kind, end)
    x = torch.randn(1, 16, 4, 4) if kind == "conv" else torch.randn(4, 64)
    with pytest.raises(StateError, match=rf"{GONE}[^\n]*\n  where: (0\.weight|\w+\(in_features=64)"):
        model(x)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", MAKE)
def test_restore_goes_through(kind, end):
    dense = fxmask.restore(broken(kind, end))
    assert getattr(dense.get_submodule("0"), "weight", None) is None
    assert not any(row["masked"] for row in fxmask.explain(dense).rows)


CALLS = {
    "masks": fxmask.masks,
    "finalize": fxmask.finalize,
    "refresh": fxmask.refresh,
    "state_dict": fxmask.state_dict,
    "load_state_dict": lambda m: fxmask.load_state_dict(m, {"format": 1, "masks": {}}),
    "step": fxmask.step,
    "guard": lambda m: fxmask.guard(torch.optim.SGD(m.parameters(), lr=0.1), m),
    "dense": lambda m: fxmask.dense(m).__enter__(),
    "explain": fxmask.explain,
    "log": fxmask.HealthLog,
    "analyze": lambda m: fxmask.analyze(m, (torch.randn(4, 64),)),
}


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["modules", "cached"])
def test_calls_that_need_the_weight_name_the_layer(kind, end, call):
    model = broken(kind, end)
    with pytest.raises(StateError, match=rf"{GONE}[^\n]*\n  where: 0\.weight\n  fix: give it one"):
        CALLS[call](model)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["N:M", "permuted"])
def test_calls_on_masks_of_single_elements_name_the_layer(kind, end):
    saved = fxmask.state_dict(MAKE[kind]())
    for call in (fxmask.masks, fxmask.freeze, fxmask.finalize, lambda m: fxmask.load_state_dict(m, saved)):
        with pytest.raises(StateError, match=GONE):
            call(broken(kind, end))


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", ["modules", "cached", "read", "N:M", "permuted"])
def test_weights_load_into_the_other_layers(kind, end):
    model, weights = broken(kind, end), mlp().state_dict()
    model.load_state_dict({name: t for name, t in weights.items() if name != "0.weight"})
    assert torch.equal(model.get_submodule("2").weight, weights["2.weight"])


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("kind", MAKE)
def test_the_model_moves_as_a_dense_one_does(kind, end):
    assert all(p.dtype == torch.float64 for p in broken(kind, end).double().parameters())


@pytest.mark.parametrize("kind", ["modules", "conv"])
@pytest.mark.parametrize("end", ENDS)
def test_apply_names_the_layer_and_goes_on_without_it(kind, end):
    model = fxmask.restore(broken(kind, end))
    layers = (nn.Linear, nn.Conv2d)
    with pytest.raises(UnsupportedError, match="cannot change '0': it has no weight"):
        fxmask.apply(model, ratio=0.5, layers=layers)
    if kind == "modules":
        fxmask.apply(model, ratio=0.5, exclude="0")
        assert list(fxmask.masks(model)) == ["2.weight"]


@pytest.mark.parametrize("end", ENDS)
def test_so_it_does_in_a_trace(end):
    model = torch.fx.symbolic_trace(mlp())
    ENDS[end](model.get_submodule("0"))
    assert fxmask.explain(model).rows[0]["name"] == "0"
    with pytest.raises(UnsupportedError, match="cannot change '0': it has no weight"):
        fxmask.apply(model, ratio=0.5)
    fxmask.apply(model, ratio=0.5, exclude="0")
    assert list(fxmask.masks(model)) == ["2.weight"]


class Packed(nn.Linear):
    """As layers of quantisation libraries do it."""

    def __init__(self):
        super().__init__(64, 64)
        packed = self.weight.detach()
        del self.weight
        self.register_buffer("packed", packed)

    def forward(self, x):
        return nn.functional.linear(x, self.packed, self.bias)


def test_a_subclass_that_keeps_its_weight_elsewhere_does_not_stop_apply():
    model = nn.Sequential(Packed(), nn.Linear(64, 64))
    with pytest.warns(FxMaskWarning, match="0 stays dense: Packed has its own forward, and it has no weight"):
        fxmask.apply(model, ratio=0.5)
    assert list(fxmask.masks(model)) == ["1.weight"] and model(torch.randn(4, 64)).shape == (4, 64)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_a_layer_that_is_lazy_still_is_an_error_though_weights_were_loaded_into_it():
    """It becomes another class in its first forward."""
    model = nn.Sequential(nn.LazyLinear(64))
    model.load_state_dict(nn.Sequential(nn.Linear(64, 64)).state_dict())
    with pytest.raises(UnsupportedError, match="cannot change '0': its weight is not initialised yet; run one forward first"):
        fxmask.apply(model)


@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature")
def test_lazy_layers_have_no_elements():
    model = fxmask.apply(nn.Sequential(nn.LazyConv2d(16, 3), nn.LazyLinear(64), nn.Linear(64, 64)), include="2", layers=(nn.Linear, nn.Conv2d))
    report = fxmask.explain(model)
    assert [r["shape"] for r in report.rows] == ["0x0", "0x0", "64x64"] and "weight elements in layers: 4096\n" in str(report)
