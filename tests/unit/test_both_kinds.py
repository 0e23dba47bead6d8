"""Models whose parts were masked one by one: block masks in one submodule, N:M masks in another, permanent ones in a third."""

import pytest
import torch
from torch import nn

import fxmask
from fxmask import NMMask
from fxmask.errors import StateError


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32))


def test_dense_is_not_for_n_m_masks_beside_block_masks():
    model, plain, x = net(), net(), torch.randn(4, 32)
    fxmask.apply(model[0], ratio=0.5), fxmask.apply(model[2], NMMask())
    y = model(x)
    words = r"fxmask.dense is for block masks: expected these alone, got N:M masks(.|\n)*where: 2\n(.|\n)*submodules"
    with pytest.raises(StateError, match=words), fxmask.dense(model):
        pass
    assert torch.equal(model(x), y)
    with fxmask.dense(model[0]):
        assert torch.equal(model[0](x), plain[0](x))


@pytest.mark.parametrize("again", [NMMask(), fxmask.WeightMask(ratio=0.5, block=(16, 16))], ids=["N:M", "blocks"])
def test_a_part_that_is_masked_after_finalize(again):
    model, x = fxmask.finalize(fxmask.apply(net(), ratio=0.5, include="0")), torch.randn(4, 32)
    assert fxmask.masks(model) == {}
    fxmask.apply(model[2], again)
    assert list(fxmask.masks(model)) == ["2.weight"] and fxmask.stability(model, x).rows[1]["change"] > 0


@pytest.mark.parametrize("config", [fxmask.ActivationPruning(0.5, 16), fxmask.BlockDropout(0.5, (16, 16))])
def test_masks_of_a_model_whose_inputs_alone_are_pruned_or_dropped(config):
    with pytest.raises(StateError, match=r"(?s)expected weight masks, got inputs that are pruned or dropped.*give fxmask.apply a WeightMask"):
        fxmask.refresh(fxmask.apply(nn.Sequential(nn.Linear(32, 32), nn.ReLU()), config))
