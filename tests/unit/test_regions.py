"""Regions that the compiler traces once for all layers alike (`torch.compiler.nested_compile_region`), where fxmask makes layers differ."""

import copy
import warnings

import pytest
import torch
from sample_models import Region, Scale
from torch import nn

import fxmask
from fxmask import ActivationPruning, BlockDropout, NMMask, WeightMask
from fxmask.errors import FxMaskWarning


def regions():
    torch.manual_seed(0)
    torch._dynamo.reset()
    return nn.Sequential(nn.Linear(64, 64), *(Region() for _ in range(3)))


def step(model, call):
    torch.manual_seed(1)
    y = call(torch.randn(8, 64))
    y.square().sum().backward()
    return y, [p.grad for p in model.parameters()]


def compiled_like_eager(model):
    """Outputs and gradients of the compiled model and of the model itself."""
    other = copy.deepcopy(model)
    found = step(other, torch.compile(other, backend="aot_eager", fullgraph=True))
    torch.testing.assert_close(found, step(model, model))


PRUNED = ActivationPruning(ratio=0.5, block=16)


OWN = {
    "pruned": ([PRUNED], "3.fc", dict(ratio=0.25)),
    "not pruned": ([PRUNED], "3.fc", False),
    "masked, not pruned": ([WeightMask(), PRUNED], "1.fc", dict(activations=False)),
    "n:m": ([NMMask()], "2.fc", dict(n=1)),
    "cover": ([WeightMask(ratio=0.75)], "2.fc", dict(cover=True)),
    "decay": ([NMMask(mode="sr-ste")], "3.fc", dict(decay=0.1)),
}


@pytest.mark.parametrize("name", OWN)
def test_layers_with_options_of_their_own(name):
    configs, layer, own = OWN[name]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fxmask.apply(regions(), *configs, overrides={layer: own})
    compiled_like_eager(model)


def test_the_number_is_of_all_that_was_asked_for():
    """Not of the configuration alone that came last."""
    own = {"1.fc": dict(activations=dict(ratio=0.25)), "2.fc": dict(criterion="l1")}
    model = fxmask.apply(regions(), WeightMask(), PRUNED, overrides=own)
    assert len({model[i].fc._fxmask_asked for i in (1, 2, 3)}) == 3


@pytest.mark.parametrize(("config", "own"), [(PRUNED, dict(ratio=0.25)), (BlockDropout(p=0.5), dict(p=0.25))])
def test_after_restore_the_number_is_of_what_is_asked_then(config, own):
    model = regions()
    for _ in range(2):
        fxmask.apply(model, config, overrides={"1.fc": own})
        assert len({model[i].fc._fxmask_asked for i in (1, 2)}) == 2
        fxmask.restore(model)


@pytest.mark.parametrize("beside", [[], [WeightMask(ratio=0.0)]])
def test_dropout_of_its_own(beside):
    own = dict(p=0.0) if not beside else dict(dropout=dict(p=0.0))
    model = fxmask.apply(regions(), *beside, BlockDropout(p=0.5, block=(8, 16)), overrides={"3.fc": own})
    _, grads = step(model, torch.compile(model, backend="aot_eager", fullgraph=True))
    dropped = [int((grads[i] == 0).all(0).sum()) for i in (4, 6)]  # features of a batch that is one block high
    assert dropped[0] in (16, 32, 48) and dropped[1] == 0


@pytest.mark.parametrize("configs", [[], [NMMask()], [PRUNED], [BlockDropout(p=0.5)], [WeightMask(), PRUNED]], ids=["mask", "n:m", "pruned", "dropped", "both"])
def test_a_dense_region_before_others_is_warned_of(configs):
    for layer in (1, 2):  # dense code serves what comes after it, also where a changed one is the first
        with pytest.warns(FxMaskWarning, match=rf"{layer}\.fc is dense before {layer + 1}\.fc: compiled, {layer + 1}\.fc and its like may run dense"):
            fxmask.apply(regions(), *configs, exclude=f"{layer}.*")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxmask.apply(regions(), *configs, exclude="3.*")  # that one is traced by itself
        fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32)), *configs, exclude="0")  # no regions
        small, large = Region(), Region()
        small.fc = nn.Linear(32, 32)
        fxmask.apply(nn.Sequential(small, large), *configs, exclude="0.*")  # not alike


LEFT_OUT = {"excluded": dict(exclude="2.fc.a"), "not pruned": dict(overrides={"2.fc.a": dict(activations=False)})}


@pytest.mark.parametrize(("configs", "left"), [([], "excluded"), ([WeightMask()], "excluded"), ([WeightMask()], "not pruned")])
def test_a_dense_product_before_others_is_warned_of(configs, left):
    model = regions()
    for region in model[1:]:
        region.fc = Scale(64)
    with pytest.warns(FxMaskWarning, match=r"2\.fc is dense before 3\.fc"):
        fxmask.apply(model, *configs, ActivationPruning(ratio=0.5, block=16, affine=True), **LEFT_OUT[left])


def test_what_the_warning_recommends():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model = fxmask.apply(regions(), overrides={"1.fc": dict(ratio=0.0)})
    assert fxmask.masks(model)["1.fc.weight"].all() and not fxmask.masks(model)["2.fc.weight"].all()
    compiled_like_eager(model)


@pytest.mark.parametrize("layer", ["1.fc", "2.fc", "?.fc"])
def test_phases_are_followed(layer):
    """Also those of one layer alone: PyTorch looks at the first of the layers that share code, in later steps, too."""
    model = fxmask.apply(regions(), overrides={layer: dict(phases={1: dict(block=(8, 8))})})
    fxmask.step(model, 0)
    other = copy.deepcopy(model)
    fxmask.step(other, 0)
    call = torch.compile(other, backend="aot_eager", fullgraph=True)
    for _ in range(2):
        torch.testing.assert_close(step(other, call), step(model, model))
        model.zero_grad()
        other.zero_grad()
        fxmask.step(model)
        fxmask.step(other)


def test_phases_of_a_convolution_are_followed():
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = nn.Sequential(*(Region() for _ in range(3)))
    for region in model:
        region.fc = nn.Conv2d(32, 32, 1)
    fxmask.apply(model, layers=nn.Conv2d, overrides={"2.fc": dict(phases={1: dict(block=(8, 8))})})
    fxmask.step(model, 0)
    call, x = torch.compile(model, backend="eager", fullgraph=True), torch.randn(2, 32, 4, 4)
    for _ in range(2):
        torch.testing.assert_close(call(x), model(x))
        fxmask.step(model)
