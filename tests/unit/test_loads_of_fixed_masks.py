"""`refresh=0` once weights were trained under it: a load of weights leaves the mask, since blocks of other norms would be another model."""

import copy
import io

import pytest
import torch
from sample_models import Region, best_blocks, mlp
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


def test_a_weight_s_masks_stay_together_or_not_at_all(monkeypatch):
    """Of two layers that share a weight one was trained, and the other never ran."""
    monkeypatch.setattr("fxmask.passes.state.site_forward._TRACED", {})  # where other tests have compiled layers like these
    model = fxmask.apply(tied(), ratio=0.6, refresh=0)
    model[0](torch.randn(3, 64))
    fxmask.step(model)
    model[0].load_state_dict(mlp(seed=5, sizes=(64, 64, 10))[0].state_dict())
    best = best_blocks(model[0].weight, (16, 16), 0.6)
    assert all(torch.equal(model[i]._fxmask_mask, best) for i in (0, 2))


def test_what_was_lost_on_the_meta_device_is_built_of_what_is_loaded():
    model, _ = trained()
    model.to("meta").to_empty(device="cpu")
    other = mlp(seed=5)
    model.load_state_dict(other.state_dict())
    assert same(fxmask.masks(model), fxmask.masks(fxmask.apply(other, ratio=0.6)))


@pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta state")
def test_sparse_weights_are_refused_with_a_way_out():
    for refresh in (0, 1):
        model = fxmask.apply(mlp(), ratio=0.5, refresh=refresh)
        model[0].weight = nn.Parameter(mlp()[0].weight.detach().to_sparse_bsr((16, 16)))
        with pytest.raises(fxmask.errors.UnsupportedError, match=r"has become a torch.sparse_bsr tensor: expected a plain one"):
            model(torch.randn(2, 64))
        with pytest.raises(fxmask.errors.UnsupportedError, match=r"has become a torch.sparse_bsr tensor: expected a plain one"):
            fxmask.finalize(model)
    model = fxmask.apply(mlp(), ratio=0.5, refresh=0)
    state = {name: t.to_sparse_bsr((16, 16)) if name == "2.weight" else t for name, t in mlp().state_dict().items()}
    with pytest.raises(fxmask.errors.UnsupportedError, match=r"(?s)has become a torch.sparse_bsr.*where: 2.weight.*to_dense"):
        model.load_state_dict(state, assign=True)


def test_sparse_weights_are_refused_where_a_mask_stays():
    model, _ = trained()
    with pytest.raises(fxmask.errors.UnsupportedError, match=r"has become a torch.sparse_coo tensor"):
        model.load_state_dict({name: t.to_sparse() if name == "2.weight" else t for name, t in model.state_dict().items()}, assign=True)


def anew(model, other):
    return same(fxmask.masks(model), fxmask.masks(fxmask.apply(copy.deepcopy(other), ratio=0.6)))


def _assigned(model, other):
    model.to("meta").load_state_dict(other.state_dict(), assign=True)
    return model


def _meta_first(model, other):
    model.load_state_dict(copy.deepcopy(other).to("meta").state_dict(), assign=True)
    model.load_state_dict(other.state_dict(), assign=True)
    return model


def _read_on_meta(model, other):
    torch.save(model, saved := io.BytesIO())
    model = torch.load(io.BytesIO(saved.getvalue()), map_location="meta", weights_only=False)
    model.load_state_dict(other.state_dict(), assign=True)
    return model


@pytest.mark.parametrize("way", [_assigned, _meta_first, _read_on_meta])
def test_real_weights_for_a_model_on_the_meta_device_build_it(way):
    model, _ = trained()
    other = mlp(seed=5)
    model = way(model, other)
    assert anew(model, other)
    assert torch.equal(model(x := torch.randn(3, 64)), fxmask.apply(other, ratio=0.6)(x))


def test_masks_that_were_given_come_through_the_meta_device():
    kept = fxmask.masks(fxmask.apply(mlp(), ratio=0.6, criterion="random"))
    for way in (_assigned, _meta_first):
        model, _ = trained(masks=kept, ratio=0.5)
        assert same(fxmask.masks(way(model, mlp(seed=5))), kept)
    model, _ = trained(masks=kept, ratio=0.5)
    with pytest.raises(fxmask.errors.StateError, match="were lost on the meta device"):
        _read_on_meta(model, mlp(seed=5))


def test_a_load_that_moves_the_state_takes_the_mask_along():
    model, _ = trained()
    kept = fxmask.masks(model)
    for site in (model[0], model[2]):
        site._fxmask_keep = site._fxmask_keep.to("meta")  # as if the weight had come to another device than the state
    model.load_state_dict(mlp(seed=5).state_dict())
    assert same(kept, fxmask.masks(model))
    assert int(model[0]._fxmask_keep) == int(kept["0.weight"].sum())


def test_what_was_refreshed_since_its_last_step_is_built_anew():
    model, _ = trained()
    model.load_state_dict(mlp(seed=7).state_dict())
    fxmask.refresh(model)
    other = mlp(seed=5)
    model.load_state_dict(other.state_dict())
    assert anew(model, other)


def test_at_the_first_step_of_a_phase_or_a_start_no_step_was_made_under_it():
    for options in (dict(refresh=5, phases={30: dict(refresh=0)}), dict(start=30)):
        model, optimizer = trained(**options)
        other = mlp(seed=5)
        model.load_state_dict(other.state_dict())
        assert anew(model, other), options
        optimizer.zero_grad()
        model(torch.randn(2, 64)).sum().backward()
        optimizer.step()
        kept = fxmask.masks(model)
        model.load_state_dict(mlp(seed=6).state_dict())
        assert same(kept, fxmask.masks(model)), options


def test_steps_that_are_told_before_any_forward_are_none_under_it():
    block = (12, 20)  # no other test compiles such layers in this process, which would count as a forward of this one
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0, block=block)
    fxmask.step(model, 1000)
    other = mlp(seed=5)
    model.load_state_dict(other.state_dict())
    assert same(fxmask.masks(model), fxmask.masks(fxmask.apply(other, ratio=0.6, block=block)))


def test_a_mask_that_a_state_brought_stays_where_its_weights_come_second():
    run, _ = trained(block=(20, 12))
    model = fxmask.apply(mlp(seed=1), ratio=0.6, refresh=0, block=(20, 12))
    fxmask.load_state_dict(model, fxmask.state_dict(run))
    model.load_state_dict(run.state_dict())
    assert same(fxmask.masks(run), fxmask.masks(model))
    assert not same(fxmask.masks(run), fxmask.masks(fxmask.apply(mlp_of(run), ratio=0.6, block=(20, 12))))  # or this test could not fail


@pytest.mark.parametrize("steps", [0, 5])
def test_what_was_refreshed_since_its_masks_were_brought_is_none_that_a_state_brought(steps):
    """Its masks are those of the weights by then: other weights build them anew, and no warning, an error here, says that masks are lost."""
    block = (20, 12)  # as in the test before
    model, run = (fxmask.apply(mlp(seed=seed), ratio=0.6, refresh=0, block=block) for seed in range(2))
    fxmask.load_state_dict(model, fxmask.state_dict(run))
    fxmask.refresh(model)
    fxmask.step(model, steps)
    other = mlp(seed=5)
    model.load_state_dict(other.state_dict())
    assert same(fxmask.masks(model), fxmask.masks(fxmask.apply(other, ratio=0.6, block=block)))


def test_layers_that_share_a_weight_stay_together():
    model = fxmask.apply(tied(), ratio=0.6, refresh=0)
    model(torch.randn(2, 64))
    fxmask.step(nn.Sequential(model[0], model[1]))  # of one of the two
    model.load_state_dict(mlp(seed=5, sizes=(64, 64, 64, 10)).state_dict())
    masks = fxmask.masks(model)
    assert torch.equal(masks["0.weight"], masks["2.weight"])


def test_regions_that_are_compiled_once_stay_too():
    """The code of one region may serve another (PyTorch 2.13), whose forward then notes nothing."""

    model = fxmask.apply(nn.Sequential(*(Region() for _ in range(4))), ratio=0.6, refresh=0)
    model[1:].requires_grad_(False)
    optimizer, compiled = torch.optim.AdamW(model.parameters(), lr=1e-2), torch.compile(model, backend="aot_eager")
    fxmask.guard(optimizer, model)
    kept = fxmask.masks(model)
    for _ in range(2):
        optimizer.zero_grad()
        compiled(torch.randn(4, 64)).square().sum().backward()
        optimizer.step()
    model.load_state_dict({name: torch.randn_like(t) for name, t in model.state_dict().items()})
    assert same(kept, fxmask.masks(model))


def test_a_copy_whose_weights_are_averaged_in_place_says_nothing(recwarn):
    model, _ = trained(refresh=5, phases={10: dict(refresh=0)})
    average = torch.optim.swa_utils.AveragedModel(model).eval()
    average.update_parameters(model)
    model.load_state_dict(mlp(seed=5).state_dict())
    average.update_parameters(model)
    with torch.no_grad():
        average(torch.randn(2, 64))
    assert [str(w.message) for w in recwarn] == []


def test_meta_weights_inside_dense():
    model, _ = trained()
    other = mlp(seed=5)
    with fxmask.dense(model):
        _assigned(model, other)
        assert all(mask.all() for mask in fxmask.masks(model).values())
    assert anew(model, other)


def test_masks_that_come_back_move_with_the_model_inside_dense():
    model = fxmask.apply(mlp(), ratio=0.6, refresh=0)
    with fxmask.dense(model):
        model.to("meta")
    assert all(layer._fxmask_mask.is_meta for layer in (model[0], model[2]))
