"""`refresh=0` once weights were trained under it: a load of weights leaves the mask, since blocks of other norms would be another model."""

import copy

import pytest
import torch
from sample_models import mlp
from torch import nn

import fxmask


def trained(make=mlp, steps=30, **options):
    """A model whose masks are by now others than those of its weights' norms, and its optimiser's guard."""
    model = fxmask.apply(make(), **{"ratio": 0.6, "block": (16, 16), "refresh": 0, **options})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.3)
    fxmask.guard(optimizer, model)
    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(3))
    for _ in range(steps):
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
    return model, optimizer


def traced():
    return torch.fx.symbolic_trace(mlp())


def tied():
    model = mlp(sizes=(64, 64, 64, 10))
    model[2].weight = model[0].weight
    return model


def same(masks, others):
    return all(torch.equal(m, others[name]) for name, m in masks.items())


def by_norm(model):
    return fxmask.masks(fxmask.apply(mlp_of(model), ratio=0.6, block=(16, 16)))


def mlp_of(model):
    dense = mlp()
    dense.load_state_dict(model.state_dict())
    return dense


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("make", [mlp, traced, tied])
def test_its_own_weights_and_others_leave_the_mask(make, assign):
    model, _ = trained(make)
    kept, x = fxmask.masks(model), torch.randn(4, 64)
    if make is mlp:
        assert not same(kept, by_norm(model))  # or this test could not fail
    before = model(x)
    model.load_state_dict(copy.deepcopy(model.state_dict()), assign=assign)
    assert same(kept, fxmask.masks(model))
    assert torch.equal(model(x), before)
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()}, assign=assign)
    assert same(kept, fxmask.masks(model))


def test_before_the_first_step_a_load_builds_it():
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    fxmask.step(model, 0)
    other = mlp(seed=5)
    model.load_state_dict(other.state_dict())
    assert same(fxmask.masks(model), fxmask.masks(fxmask.apply(other, ratio=0.6)))


def test_refresh_builds_it_anew_on_demand():
    model, _ = trained()
    other = mlp(seed=5)
    model.load_state_dict(other.state_dict())
    fxmask.refresh(model)
    assert same(fxmask.masks(model), fxmask.masks(fxmask.apply(other, ratio=0.6)))


def test_of_a_phase_that_holds_the_mask():
    model, _ = trained(refresh=5, schedule=fxmask.Schedule("cubic", steps=10), phases={10: dict(refresh=0)})
    kept = fxmask.masks(model)
    model.load_state_dict(mlp(seed=5).state_dict())
    assert same(kept, fxmask.masks(model))


def test_inside_dense_and_on_a_copy():
    model, _ = trained()
    kept, twin = fxmask.masks(model), copy.deepcopy(model)
    for m in (model, twin):
        with fxmask.dense(m):
            m.load_state_dict(mlp(seed=5).state_dict())
            assert all(mask.all() for mask in fxmask.masks(m).values())
        assert same(kept, fxmask.masks(m))


def test_training_goes_on_after_the_best_weights_are_back():
    model, optimizer = trained()
    best, kept = copy.deepcopy(model.state_dict()), fxmask.masks(model)
    x = torch.randn(8, 64)
    before = model(x)
    for _ in range(2):
        model(x).square().mean().backward()
        optimizer.step()
    model.load_state_dict(best)
    assert torch.equal(model(x), before)
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    assert same(kept, fxmask.masks(model))


def test_what_was_lost_on_the_meta_device_is_built_of_what_is_loaded():
    model, _ = trained()
    model.to("meta").to_empty(device="cpu")
    other = mlp(seed=5)
    model.load_state_dict(other.state_dict())
    assert same(fxmask.masks(model), fxmask.masks(fxmask.apply(other, ratio=0.6)))


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta state")
def test_sparse_weights_are_refused_with_a_way_out():
    model = fxmask.apply(mlp(), ratio=0.5)
    model[0].weight = nn.Parameter(mlp()[0].weight.detach().to_sparse_bsr((16, 16)))
    with pytest.raises(fxmask.errors.UnsupportedError, match=r"has become a torch.sparse_bsr tensor: expected a plain one"):
        model(torch.randn(2, 64))
    model = fxmask.apply(mlp(), ratio=0.5, refresh=0)
    state = {name: t.to_sparse_bsr((16, 16)) if name == "2.weight" else t for name, t in mlp().state_dict().items()}
    with pytest.raises(fxmask.errors.UnsupportedError, match=r"(?s)has become a torch.sparse_bsr.*where: 2.weight.*to_dense"):
        model.load_state_dict(state, assign=True)
