"""What `finalize` must not write: a weight that two layers mask differently, and one that PyTorch cannot free of its parametrisation in place."""

import pytest
import torch
from sample_models import mlp
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

import fxmask
from fxmask.errors import FxMaskWarning, StateError, UnsupportedError


def tied_afterwards(**options):
    """Two layers, masked by weights of their own, that share one since."""
    torch.manual_seed(0)
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ratio=0.5, **options)
    m[1].weight = m[0].weight
    return m


TWO_MASKS = {"cached": {"refresh": 0}, "ratio": {"overrides": {"1": {"ratio": 0.75}}}, "block": {"overrides": {"1": {"block": (32, 16)}}}}


@pytest.mark.parametrize("how", TWO_MASKS.values(), ids=TWO_MASKS)
@pytest.mark.parametrize("form", ["dense", "bsr"])
def test_one_weight_in_two_masks(how, form):
    m = tied_afterwards(**how)
    before, x = m[0].weight.detach().clone(), torch.randn(4, 64)
    y = m.eval()(x)
    with pytest.raises(StateError, match=r"masked twice, differently, by 0.weight and 1.weight(.|\n)*where: 1.weight"):
        fxmask.finalize(m, form)
    assert torch.equal(m[0].weight, before) and torch.equal(m(x), y) and len(fxmask.masks(m)) == 2


def test_one_weight_in_one_mask():
    """Masks that follow the weight are equal once they share it."""
    m, x = tied_afterwards().eval(), torch.randn(4, 64)
    y = m(x)
    assert torch.allclose(fxmask.finalize(m)(x), y, atol=1e-6) and (m[0].weight == 0).float().mean() == 0.5


def test_the_way_out_of_a_parametrisation_works():
    """As the message says it, with masks that are more than their weights."""
    torch.manual_seed(0)
    m, x, options = mlp(), torch.randn(4, mlp()[0].in_features), dict(ratio=0.5, refresh=0)
    parametrizations.weight_norm(m[0])
    fxmask.apply(m, **options)
    with torch.no_grad():
        m[0].parametrizations.weight.original1.mul_(torch.rand(m[0].weight.shape))  # the mask is the one of before
    y, state = m.eval()(x), fxmask.state_dict(m)
    with pytest.raises(UnsupportedError, match="this weight is computed") as refused:
        fxmask.finalize(m)
    assert "fix: remove that first: torch.nn.utils.parametrize.remove_parametrizations" in str(refused.value)
    parametrize.remove_parametrizations(m[0], "weight")
    assert all(torch.equal(e["mask"], state["masks"][n]["mask"]) for n, e in fxmask.state_dict(m)["masks"].items())
    assert torch.allclose(fxmask.finalize(m)(x), y, atol=1e-5) and (m[0].weight == 0).float().mean() >= 0.5


@pytest.mark.parametrize("how", ["pruned", "parametrised after"])
def test_what_can_be_removed_in_place(how):
    m, x = mlp(), torch.randn(4, mlp()[0].in_features)
    if how == "pruned":
        prune.l1_unstructured(m[0], "weight", 0.2)
    fxmask.apply(m, ratio=0.5)
    if how == "parametrised after":
        parametrizations.weight_norm(m[0])
    y = m.eval()(x)
    with pytest.raises(UnsupportedError, match="fix: remove that first"):
        fxmask.finalize(m)
    prune.remove(m[0], "weight") if how == "pruned" else parametrize.remove_parametrizations(m[0], "weight")
    assert torch.allclose(fxmask.finalize(m)(x), y, atol=1e-5)


def test_a_soft_ramp_says_what_becomes_of_its_factors():
    m = fxmask.apply(mlp(), ratio=0.5, soft=True, schedule=fxmask.Schedule("linear", 10))
    fxmask.step(m, 5)
    with pytest.warns(FxMaskWarning, match="whose masked blocks still count by a factor and become zeros"):
        fxmask.finalize(m)


def test_one_weight_under_masks_that_are_alike_in_other_blocks():
    model = nn.ModuleDict({"a": nn.Linear(40, 40), "b": nn.Linear(40, 40)})
    fxmask.apply(model, ratio=0.5, block=(20, 20), overrides={"b": dict(block=(24, 24))})
    model["b"].weight = model["a"].weight
    with torch.no_grad():
        model["a"].weight.zero_()
        model["a"].weight[:20, :20], model["a"].weight[24:, 24:] = 9.0, 9.0
    assert torch.equal(*fxmask.masks(model).values())
    with pytest.raises(StateError, match=r"masked twice, differently, by a.weight and b.weight"):
        fxmask.finalize(model)
