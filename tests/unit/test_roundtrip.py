"""Checkpoints and copies: dense to masked and back, deepcopy, pickle, torch.save."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from sample_models import mlp
from torch import nn
from torch.nn.utils import parametrize, prune

import fxmask
from fxmask import ActivationPruning, BlockDropout, NMMask, WeightMask


class Wide(nn.Linear):
    """A subclass without a forward of its own."""

    extra = 3


def subclassed():
    torch.manual_seed(0)
    return nn.Sequential(Wide(64, 32), nn.Linear(32, 32))


def saved(m):
    buffer = io.BytesIO()
    torch.save(m, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


COPIERS = {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved}


def test_dense_checkpoints_fit_masked_models_and_back():
    dense, model = mlp(seed=1), fxmask.apply(mlp(seed=2), ratio=0.8, refresh=2)
    assert model.load_state_dict(dense.state_dict(), strict=True).missing_keys == []
    reference = fxmask.apply(mlp(seed=1), ratio=0.8)
    assert all(torch.equal(a, b) for a, b in zip(fxmask.masks(model).values(), fxmask.masks(reference).values(), strict=True))
    back = mlp(seed=3)
    back.load_state_dict(model.state_dict(), strict=True)
    assert all(torch.equal(a, b) for a, b in zip(back.state_dict().values(), dense.state_dict().values(), strict=True))
    torch.save(model.state_dict(), buffer := io.BytesIO())
    buffer.seek(0)
    assert list(torch.load(buffer, weights_only=True)) == list(dense.state_dict())


@pytest.mark.parametrize("options", [{}, dict(refresh=2), dict(backward="rigl"), dict(criterion="random", seed=3)], ids=str)
@pytest.mark.parametrize("make", [mlp, subclassed], ids=["mlp", "subclass"])
@pytest.mark.parametrize("copier", COPIERS)
def test_copies(copier, make, options):
    model = fxmask.apply(make(), ratio=0.75, **options)
    fxmask.step(model, 3)
    other = COPIERS[copier](model)
    x = torch.randn(2, 64)
    assert torch.equal(model(x), other(x))
    assert [type(m) for m in model.modules()] == [type(m) for m in other.modules()]
    assert not {id(t) for t in (*model.parameters(), *model.buffers())} & {id(t) for t in (*other.parameters(), *other.buffers())}
    for m in (model, other):
        m[0].weight.data.copy_(m[0].weight.data.flip(0))
        fxmask.step(m)
    assert torch.equal(model(x), other(x))
    assert [r["step"] for r in fxmask.explain(other).rows if r["masked"]] == [4] * 2
    fxmask.restore(other)
    assert [type(m) for m in other.modules()] == [type(m) for m in make().modules()]
    if make is subclassed:
        assert other[0].extra == 3


def test_weight_norm_and_pruned_linears():
    torch.manual_seed(0)
    x = torch.randn(2, 64)
    for wrap in (lambda m: nn.utils.parametrizations.weight_norm(m), lambda m: prune.random_unstructured(m, "weight", 0.3)):
        model = nn.Sequential(wrap(nn.Linear(64, 64)))
        weight, keys, cls = model[0].weight.detach().clone(), list(model.state_dict()), type(model[0])
        fxmask.apply(model, ratio=0.75)
        mask = fxmask.masks(model)["0.weight"].repeat_interleave(16, 0).repeat_interleave(16, 1)
        assert torch.equal(model(x), nn.functional.linear(x, weight * mask, model[0].bias))
        model(x).square().sum().backward()
        assert all(p.grad is not None for p in model.parameters())
        assert list(model.state_dict()) == keys
        fxmask.restore(model)
        assert type(model[0]) is cls


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
@pytest.mark.parametrize("config", [fxmask.WeightMask(ratio=0.75), fxmask.NMMask()], ids=["blocks", "n:m"])
@pytest.mark.parametrize("wrap", [nn.utils.weight_norm, lambda m, name: prune.random_unstructured(m, name, 0.3)], ids=["weight_norm", "prune"])
def test_a_bias_that_is_computed_before_the_weight_is_not_taken_for_it(wrap, config):
    x, layer = torch.randn(2, 64), wrap(wrap(nn.Linear(64, 64), "bias"), "weight")
    weight, bias = layer.weight.detach().clone(), layer.bias.detach().clone()
    model = fxmask.apply(nn.Sequential(layer), config)
    mask = fxmask.masks(model)["0.weight"]
    elements = mask if mask.shape == weight.shape else mask.repeat_interleave(16, 0).repeat_interleave(16, 1)
    assert not mask.all()
    torch.testing.assert_close(model(x), nn.functional.linear(x, weight * elements, bias))


def test_a_class_changed_after_apply_is_not_broken_by_restore():
    model, x = fxmask.apply(mlp(), ratio=0.7), torch.randn(2, 64)
    nn.utils.parametrizations.weight_norm(model[0])
    y = model(x)
    assert fxmask.masks(model)["0.weight"].sum() == 8
    with pytest.raises(fxmask.FxMaskError, match=r"the class of 0 was changed after fxmask.apply \(to ParametrizedMaskedLinear\)"):
        fxmask.restore(model)
    assert torch.equal(model(x), y)
    nn.utils.parametrize.remove_parametrizations(model[0], "weight")
    fxmask.restore(model)
    assert type(model[0]) is nn.Linear


def test_a_copy_keeps_a_class_that_was_changed_after_apply():
    model = fxmask.apply(mlp(), ratio=0.7)
    model[0].__class__ = type("Mine", (type(model[0]),), {})
    other = copy.deepcopy(model)
    assert type(other[0]) is type(model[0]) and type(other[2]) is type(model[2])


@pytest.mark.parametrize("config", [WeightMask(), NMMask()], ids=str)
def test_restore_leaves_no_hook_of_loads(config):
    """Or a pickle of the dense model would ask for fxmask."""
    model = fxmask.apply(mlp(), config, include=["0", "2"])
    assert len(model[0]._load_state_dict_post_hooks) == 1
    fxmask.restore(model)
    assert not any(m._load_state_dict_post_hooks for m in model.modules()) and b"fxmask" not in pickle.dumps(model)


def test_restore_leaves_no_hook_of_loads_in_a_graph():
    gm = fxmask.apply(torch.fx.symbolic_trace(mlp()), ratio=0.7)
    assert any(m._load_state_dict_post_hooks for m in gm.modules())
    fxmask.restore(gm)
    assert not any(m._load_state_dict_post_hooks for m in gm.modules())


def test_an_apply_that_fails_leaves_the_hooks_of_loads_in_a_graph_as_they_were(monkeypatch):
    gm = fxmask.apply(torch.fx.symbolic_trace(mlp()), ratio=0.7, include="0")
    before = [len(m._load_state_dict_post_hooks) for m in gm.modules()]
    monkeypatch.setattr("fxmask.changing.note_ties", lambda model: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        fxmask.apply(gm, ratio=0.7, include="2")
    assert [len(m._load_state_dict_post_hooks) for m in gm.modules()] == before


class ParametrizedLinear(nn.Linear):
    """Named as PyTorch names what a parametrisation makes, and none of it."""

    extra = 4


def test_a_class_that_is_named_as_a_parametrised_one_keeps_what_it_adds():
    model = fxmask.apply(nn.Sequential(ParametrizedLinear(64, 64)), ratio=0.5)
    assert model[0].extra == 4 and type(fxmask.restore(model)[0]) is ParametrizedLinear


def test_an_optimizer_built_before_apply_resumes():
    torch.manual_seed(1)
    x, y = torch.randn(16, 64), torch.randn(16, 10)

    def train(model, optimizer, steps):
        for _ in range(steps):
            optimizer.zero_grad()
            (model(x) - y).square().mean().backward()
            optimizer.step()

    model = mlp()
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    fxmask.apply(model, ratio=0.7)
    train(model, optimizer, 3)
    state = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    train(model, optimizer, 3)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.7)
    other = torch.optim.Adam(fresh.parameters(), 0.01)
    fresh.load_state_dict(state[0])
    other.load_state_dict(state[1])
    train(fresh, other, 3)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), fresh.parameters(), strict=True))


# ---- the order of loads ----------------------------------------------------------------------------------------------------------------------------------


def saved_run(steps=3, **options):
    """A run whose masks are older than its weights: (masked model, its weights, its masks' state)."""
    model = fxmask.apply(mlp(), ratio=0.5, **options)
    fxmask.step(model, 0)
    for _ in range(steps):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.randn_like(p))
        fxmask.step(model)
    return model, copy.deepcopy(model.state_dict()), fxmask.state_dict(model)


def warned_of_order(caught):
    return [str(w.message) for w in caught if "expected the weights first" in str(w.message)]


def loads(model, *states):
    """The warnings of loading these in turn: of a pair (weights, masks) what is given."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for state in states:
            (fxmask.load_state_dict if "masks" in state else nn.Module.load_state_dict)(model, state)
    return warned_of_order(caught)


def test_weights_behind_masks_warn_once_for_all_layers():
    _, weights, masks = saved_run(refresh=100)
    found = loads(fxmask.apply(mlp(seed=9), ratio=0.5, refresh=100), masks, weights)
    assert len(found) == 1 and "where: 0.weight; masks had been brought for 0.weight, 2.weight\n" in found[0]
    assert "fix: load the weights first, then the masks: model.load_state_dict, then fxmask.load_state_dict" in found[0]


def test_a_warning_of_order_names_three_masks_and_counts_the_rest():
    deep = lambda: fxmask.apply(nn.Sequential(*(nn.Linear(64, 64) for _ in range(5))), ratio=0.5, refresh=0)  # noqa: E731
    model = deep()
    found = loads(deep(), fxmask.state_dict(model), deep().state_dict())
    assert len(found) == 1 and "brought for 0.weight, 1.weight, 2.weight and 2 more\n" in found[0]


def test_weights_of_one_layer_behind_masks_warn_of_that_one():
    _, weights, masks = saved_run(refresh=100)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=100)
    fxmask.load_state_dict(fresh, masks)
    found = loads(fresh[2], {name[2:]: w for name, w in weights.items() if name.startswith("2.")})
    assert len(found) == 1 and "where: 2.weight; masks had been brought for 0.weight, 2.weight\n" in found[0]


def test_weights_behind_masks_for_good_leave_them():
    model, weights, masks = saved_run(refresh=0)
    fresh, kept = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=0), fxmask.masks(model)
    assert loads(fresh, masks, weights) == []
    assert all(torch.equal(mask, kept[name]) for name, mask in fxmask.masks(fresh).items())


def test_weights_before_masks_do_not_warn_and_keep_them():
    model, weights, masks = saved_run(refresh=0)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=0)
    assert loads(fresh, weights, masks) == []
    kept = fxmask.masks(model)
    assert all(torch.equal(mask, kept[name]) for name, mask in fxmask.masks(fresh).items())


def test_masks_that_the_weights_have_anyway_do_not_warn():
    _, weights, masks = saved_run(refresh=1, criterion="fro")  # each forward builds them
    assert loads(fxmask.apply(mlp(seed=9), ratio=0.5), masks, weights) == []
    _, weights, masks = saved_run(refresh=3)  # the last step has built them from these weights
    assert loads(fxmask.apply(mlp(seed=9), ratio=0.5, refresh=3), masks, weights) == []


def test_both_in_order_a_second_time_do_not_warn():
    _, weights, masks = saved_run(refresh=100)
    other = fxmask.apply(mlp(seed=3), ratio=0.5, refresh=100)
    others, theirs = mlp(seed=4).state_dict(), fxmask.state_dict(other)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=100)
    assert loads(fresh, weights, masks, others, theirs) == []
    assert all(torch.equal(mask, theirs["masks"][name]["mask"]) for name, mask in fxmask.masks(fresh).items())
    assert len(loads(fresh, masks, weights)) == 1  # and the wrong order is told then, too


@pytest.mark.parametrize("between", [fxmask.step, fxmask.refresh])
def test_weights_behind_a_step_or_a_refresh_do_not_warn(between):
    _, _, masks = saved_run(refresh=100)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=100)
    fxmask.load_state_dict(fresh, masks)
    between(fresh)
    assert loads(fresh, mlp(seed=5).state_dict()) == []


def test_a_run_that_loaded_weights_and_stepped_warns_of_the_order_later():
    _, weights, masks = saved_run(refresh=100)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=100)
    fresh.load_state_dict(mlp(seed=5).state_dict())
    fxmask.step(fresh)
    assert len(loads(fresh, masks, weights)) == 1


def test_weights_behind_a_step_that_failed_warn(monkeypatch):
    _, weights, masks = saved_run(refresh=100)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=100)
    fxmask.load_state_dict(fresh, masks)
    with monkeypatch.context() as patched:
        patched.setattr("fxmask.passes.settings.looks.look", lambda found: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            fxmask.step(fresh)
    assert len(loads(fresh, weights)) == 1


def test_weights_behind_masks_that_are_rewritten_in_place_warn():
    _, weights, masks = saved_run(refresh=100)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=100)
    for m in (fresh[0], fresh[2]):
        m._fxmask_in_place = True  # as fxmask.graphed has it
    assert len(loads(fresh, masks, weights)) == 1


def test_weights_behind_masks_on_the_meta_device_warn():
    _, weights, masks = saved_run(refresh=0)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=0).to("meta")
    fresh.load_state_dict(mlp().to("meta").state_dict(), assign=True)  # without values these do not come first
    fxmask.load_state_dict(fresh, masks)
    with pytest.warns(fxmask.FxMaskWarning, match="expected the weights first"):
        fresh.load_state_dict(weights, assign=True)
    assert fresh(torch.ones(3, 64)).isfinite().all()


@pytest.mark.parametrize("copier", COPIERS)
def test_copies_of_a_model_that_has_loaded_masks_warn_too(copier):
    _, weights, masks = saved_run(refresh=100)
    fresh = fxmask.apply(mlp(seed=9), ratio=0.5, refresh=100)
    fxmask.load_state_dict(fresh, masks)
    keys = list(mlp().state_dict())
    for model in (COPIERS[copier](fresh), fresh):  # a copy that has told it takes nothing from the model
        assert list(model.state_dict()) == keys
        assert len(loads(model, weights)) == 1


def test_a_graph_warns_too():
    graph = lambda seed: fxmask.apply(torch.fx.symbolic_trace(mlp(seed=seed)), ratio=0.5, refresh=0)  # noqa: E731
    model = graph(0)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn_like(p))
    assert len(loads(graph(9), fxmask.state_dict(model), model.state_dict())) == 1


class Doubled(nn.Module):
    def forward(self, w):
        return 2 * w

    def right_inverse(self, w):
        return w / 2


@pytest.mark.parametrize("config", [WeightMask(), WeightMask(refresh=0), NMMask(), ActivationPruning(0.5, 16), BlockDropout(0.1, (4, 16))], ids=str)
@pytest.mark.parametrize("wrap", ["weight", "bias", "weight_norm", "spectral_norm"])
def test_a_parametrisation_from_before_apply_can_be_removed(wrap, config):
    """The layer stays what it was made, with the weight that the parametrisation leaves; of a copy, too, and the other one keeps its own."""
    torch.manual_seed(0)
    layer, x, name = nn.Linear(64, 64), torch.randn(3, 64), "bias" if wrap == "bias" else "weight"
    parametrize.register_parametrization(layer, wrap, Doubled()) if wrap == name else getattr(nn.utils.parametrizations, wrap)(layer)
    model = fxmask.apply(nn.Sequential(layer), config).eval()
    y, twin = model(x), copy.deepcopy(model)
    for m in (twin, model):
        assert torch.equal(m(x), y)
        parametrize.remove_parametrizations(m[0], name)
        assert isinstance(m[0]._parameters[name], nn.Parameter)
        torch.testing.assert_close(m(x), y)
    model[0].extra_repr()
    assert type(fxmask.restore(model)[0]) is nn.Linear and type(fxmask.restore(twin)[0]) is nn.Linear


class OwnState(nn.Linear):
    """Says itself what is pickled of it, as a class that a parametrisation makes does."""

    extra = 5

    def __getstate__(self):
        return {**self.__dict__, "said": True}


def test_a_class_that_says_what_is_pickled_of_it_keeps_what_it_adds():
    model = fxmask.apply(nn.Sequential(OwnState(64, 64)), ratio=0.5)
    assert isinstance(model[0], OwnState) and model[0].extra == 5 and type(fxmask.restore(model)[0]) is OwnState
