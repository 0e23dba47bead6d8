"""Masks that once went wrong silently while weights were loaded, written, copied, moved and stepped."""

import copy
import pickle

import pytest
import torch
from sample_models import Residual, best_blocks, mlp
from torch import fx, nn
from torch.nn.utils import prune
from unit.formed_models import X, formed

import fxmask
from fxmask.errors import StateError, UnsupportedError


@pytest.mark.parametrize("form", ["module", "trace"])
@pytest.mark.parametrize("options", [{}, dict(refresh=2)], ids=str)
def test_meta_models_and_assign(form, options):
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64))
    if options:
        with pytest.raises(UnsupportedError, match="got a meta tensor"):
            fxmask.apply(formed(form, model), **options)
        return
    model = fxmask.apply(formed(form, model), ratio=0.7)
    dense = mlp(sizes=(64, 96, 64))
    model.load_state_dict(dense.state_dict(), assign=True)
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [8, 8]
    assert torch.equal(model(X), fxmask.apply(dense, ratio=0.7)(X))


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.weight_norm. is deprecated")
@pytest.mark.parametrize("wrap", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm], ids=["new", "old"])
def test_weight_norm_follows_load_state_dict(wrap):
    def make(seed):
        torch.manual_seed(seed)
        return nn.Sequential(wrap(nn.Linear(64, 64)))

    for options in (dict(refresh=1), dict(refresh=0)):
        model, other = fxmask.apply(make(0), ratio=0.75, **options), fxmask.apply(make(1), ratio=0.75)
        assert not torch.equal(fxmask.masks(model)["0.weight"], fxmask.masks(other)["0.weight"])
        model.load_state_dict(other.state_dict())
        assert torch.equal(fxmask.masks(model)["0.weight"], fxmask.masks(other)["0.weight"])
        assert torch.equal(model(X), other(X))


NORMS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "old-weight_norm": nn.utils.weight_norm,
    "old-spectral_norm": nn.utils.spectral_norm,
    "old-weight_norm of the bias": lambda m: prune.random_unstructured(nn.utils.weight_norm(m, "bias"), "weight", 0.5),
    "old-spectral_norm of the bias": lambda m: prune.random_unstructured(nn.utils.spectral_norm(m, "bias"), "weight", 0.5),
}


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.(weight|spectral)_norm. is deprecated")
@pytest.mark.parametrize("refresh", [1, 2])
@pytest.mark.parametrize("norm", NORMS)
def test_masks_of_a_weight_that_is_made_are_those_of_the_next_forward(norm, refresh):
    """And not of the last one's weight, which the old hooks leave as an attribute until the next forward."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(NORMS[norm](nn.Linear(64, 64))), ratio=0.75, refresh=refresh)
    fxmask.step(model, 0)
    for _ in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(torch.rand_like(p))
        fxmask.step(model, refresh)
        told = fxmask.masks(model)["0.weight"]
        model(X)
        assert torch.equal(told, best_blocks(model[0].weight.detach(), (16, 16), 0.75))


@pytest.mark.parametrize("form", ["module", "trace"])
def test_cached_masks_follow_loads_of_copies_parts_and_inside_dense(form):
    make = mlp if form == "module" else lambda seed=0: fx.symbolic_trace(mlp(seed))
    new = fxmask.apply(mlp(seed=5), ratio=0.7)
    expected = fxmask.masks(new)

    def same(model, names=("0.weight", "2.weight")):
        return all(torch.equal(fxmask.masks(model)[n], expected[n]) for n in names)

    model = pickle.loads(pickle.dumps(fxmask.apply(make(), ratio=0.7, refresh=0)))
    model.load_state_dict(new.state_dict())
    assert same(model)
    model = fxmask.apply(make(), ratio=0.7, refresh=0)
    model.get_submodule("0").load_state_dict(new[0].state_dict())
    assert same(model, ["0.weight"]) and not same(model)
    with fxmask.dense(model):
        model.load_state_dict(new.state_dict())
        assert all(m.all() for m in fxmask.masks(model).values())
        with pytest.raises(StateError, match=r"fxmask\.dense"):  # still inside
            copy.deepcopy(model)
        flips = [r["flips"] for r in fxmask.explain(model).rows if r["masked"]]
        model.load_state_dict(new.state_dict())
        assert flips == [r["flips"] for r in fxmask.explain(model).rows if r["masked"]]  # the mask that waits is the same
    assert same(model)
    fxmask.restore(model)
    assert not any(m._load_state_dict_post_hooks for m in model.modules())


def test_a_root_parameter_of_a_pickled_graph():
    gm = pickle.loads(pickle.dumps(fxmask.apply(fx.symbolic_trace(Residual()), ratio=0.75, refresh=2)))
    fxmask.step(gm, 0)
    gm.load_state_dict(Residual(seed=3).state_dict())
    assert torch.equal(fxmask.masks(gm)["proj"], best_blocks(gm.proj, (16, 16), 0.75))


@pytest.mark.parametrize("use_buffers", [False, True])
def test_an_average_of_models_keeps_the_count_of_blocks(use_buffers):
    model = fxmask.apply(mlp(), ratio=0.7, refresh=2)
    average = torch.optim.swa_utils.AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9), use_buffers=use_buffers)
    for _ in range(3):
        average.update_parameters(model)
    assert [int(m.sum()) for m in fxmask.masks(average.module).values()] == [8, 8]
    assert not list(model.buffers())


def test_writes_to_a_read_weight_arrive():
    for pick in (lambda m: m.linear1, lambda m: m.self_attn.out_proj):
        torch.manual_seed(0)
        model = fxmask.apply(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), ratio=0.5)
        layer, x = pick(model), torch.randn(2, 5, 32)
        y = model(x)
        assert isinstance(layer.weight, nn.Parameter)
        layer.weight.data.mul_(2)
        assert not torch.equal(model(x), y)
        with torch.no_grad():
            layer.weight.zero_()
        assert not layer._parameters["weight"].any()
        nn.init.ones_(layer.weight)
        assert (layer._parameters["weight"] == 1).all()
        model(x).sum().backward()
        assert layer.weight.grad is not None


@pytest.mark.filterwarnings("ignore:.torch.nn.utils.spectral_norm. is deprecated")
@pytest.mark.parametrize("norm", ["spectral_norm", "old-spectral_norm"])
def test_looking_runs_no_power_iteration(norm):
    torch.manual_seed(0)
    model = nn.Sequential(NORMS[norm](nn.Linear(64, 64)))
    before = copy.deepcopy(model.state_dict())
    fxmask.apply(model, ratio=0.5)
    fxmask.step(model)
    fxmask.masks(model), fxmask.explain(model)
    with pytest.raises(StateError, match="'0' is masked already"):
        fxmask.apply(model)
    fxmask.restore(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_step_that_cannot_be_taken_moves_nothing():
    model = fxmask.apply(mlp(), refresh=2)
    model[2].to("meta")
    with pytest.raises(UnsupportedError, match="got a meta tensor"):
        fxmask.step(model)
    assert [r["step"] for r in fxmask.explain(model).rows if r["masked"]] == [0, 0]


def test_explain_and_copies_around_dense_and_steps():
    torch.manual_seed(0)
    layer = fxmask.apply(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), start=3)
    fxmask.explain(layer)
    model = fxmask.apply(mlp())
    with fxmask.dense(model):
        with pytest.raises(StateError, match=r"fxmask\.restore inside fxmask\.dense"):
            fxmask.restore(model)
        for copier in (copy.deepcopy, pickle.dumps):
            with pytest.raises(StateError, match="copying or pickling a masked model inside"):
                copier(model)


def test_flips_start_at_zero():
    model = fxmask.apply(mlp(), ratio=0.7, refresh=0)
    assert [r["flips"] for r in fxmask.explain(model).rows if r["masked"]] == [0, 0]
    model.to("meta").to_empty(device="cpu")
    assert [r["flips"] for r in fxmask.explain(model).rows if r["masked"]] == [0, 0]


@pytest.mark.parametrize("steps", [True, False])
@pytest.mark.parametrize("options", [dict(backward="rigl"), dict(refresh=2), dict(refresh=0), dict(soft=True, schedule=fxmask.Schedule("cubic", 4))], ids=str)
def test_state_made_in_inference_mode_can_be_trained_with(options, steps):
    model = fxmask.apply(mlp(), ratio=0.7, **options)
    fxmask.step(model, 0)
    with torch.inference_mode():
        with fxmask.dense(model):
            model(X)
        model.to("cpu")
        if steps:
            fxmask.step(model, 2)
        model.load_state_dict(mlp(seed=4).state_dict())
        with fxmask.dense(model):
            model(X)
    model(X).sum().backward()


WAYS = {"load": lambda m: m.load_state_dict(mlp(seed=4).state_dict()), "refresh": fxmask.refresh, "step": lambda m: fxmask.step(m, 2)}


@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_masks_that_inference_mode_builds_anew_can_be_trained_with(way):
    model = fxmask.apply(mlp(), ratio=0.7, refresh=2)
    fxmask.step(model, 0)
    with torch.inference_mode():
        way(model)
    model(X).sum().backward()
    assert model[0].weight.grad.any()


def test_a_model_that_is_materialised_in_inference_mode_trains_with_weights_of_its_own():
    model = fxmask.apply(mlp().to("meta"), ratio=0.7, schedule=fxmask.Schedule("cubic", steps=4))
    with torch.inference_mode():
        model.to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict(), assign=True)
    fxmask.step(model, 4)
    model(X).sum().backward()
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [8, 8]


@pytest.mark.parametrize("criterion", ["fro", "random"])
def test_a_meta_model_that_is_called_with_weights_masks_them(criterion):
    model, other = (fxmask.apply(m, ratio=0.7, criterion=criterion) for m in (mlp().to("meta"), mlp()))
    for m in (model, other):
        fxmask.step(m, 3)
    weights = {k: t.detach() for k, t in other.named_parameters()}
    assert torch.equal(torch.func.functional_call(model, weights, X), other(X))


def test_a_phase_that_caches_no_mask_misses_none():
    model, other = (fxmask.apply(mlp(), ratio=0.75, refresh=2, phases={2: dict(refresh=1)}) for _ in range(2))
    model.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for p, own in zip(model.parameters(), other.parameters(), strict=True):
            p.copy_(own)
    for m in (model, other):
        fxmask.step(m, 2)
    assert torch.equal(model(X), other(X))


@pytest.mark.parametrize("refresh", [0, 3])
def test_masks_of_a_meta_model_may_be_cached_from_the_first_step_on(refresh):
    with torch.device("meta"):
        model, other = mlp(), mlp()
    with pytest.raises(UnsupportedError, match=rf"or use refresh=1; phases={{1: dict\(refresh={refresh}\)}} beside it has masks cached"):
        fxmask.apply(other, ratio=0.75, refresh=refresh)
    model, other = (fxmask.apply(m, ratio=0.75, phases={1: dict(refresh=refresh)}) for m in (model, mlp()))
    model.to_empty(device="cpu").load_state_dict(other.state_dict())
    for m in (model, other):
        fxmask.step(m, 0)
        for _ in range(5):
            with torch.no_grad():
                m[0].weight.copy_(m[0].weight.flip(0))
            fxmask.step(m)
    assert torch.equal(model(X), other(X)) and fxmask.explain(model).rows[0]["mask_age"] == (4 if refresh == 0 else 2)


@pytest.mark.parametrize("refresh", [0, 2])
def test_a_mask_that_was_lost_on_meta_is_not_used(refresh):
    model = fxmask.apply(mlp(), ratio=0.75, refresh=refresh)
    fxmask.step(model, 0)
    model.to("meta").to_empty(device="cpu")
    for _ in range(2):
        with pytest.raises(StateError, match="a cached mask was lost on the meta device"):
            model(X)
        model.double().float()  # a later move brings nothing back
    row = fxmask.explain(model, health=True).rows[0]
    assert row["masked"] and row["reason"].startswith("selected; its mask was lost on the meta device, and its forward raises until")
    assert {row[k] for k in ("achieved_ratio", "impl", "kept_norm_fraction", "dead_rows")} == {None}
    with torch.no_grad():
        for p, q in zip(model.parameters(), mlp().parameters(), strict=True):
            p.copy_(q)
    fxmask.refresh(model)
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [6, 6]
    assert fxmask.explain(model).rows[0]["reason"] == "selected"
    model(X)


def test_a_mask_that_was_lost_on_meta_is_not_said_to_be_stale():
    model = fxmask.apply(mlp(), ratio=0.75, refresh=2).to("meta").to_empty(device="cpu").eval()
    with pytest.raises(StateError, match="a cached mask was lost on the meta device"):  # and no warning, which would be an error here
        model(X)


def test_a_change_of_dtype_leaves_the_masks_alone():
    model = fxmask.apply(mlp(), refresh=2).type(torch.float64)
    fxmask.step(model, 0)
    assert all(m.dtype == torch.bool for m in fxmask.masks(model).values())
    model(X.double())


def test_the_parameter_of_a_read_layer_can_be_replaced():
    model = fxmask.apply(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), ratio=0.5)
    del model.linear1.weight
    with pytest.raises(AttributeError):
        _ = model.linear1.weight
    model.linear1.weight = nn.Parameter(torch.randn(64, 32))
    model(torch.randn(2, 5, 32)).sum().backward()
    assert model.linear1.weight.grad is not None


def test_a_mask_that_was_lost_on_meta_comes_back_with_the_state():
    model = fxmask.apply(mlp(), ratio=0.75, refresh=0)
    fxmask.step(model, 0)
    weights, state = {k: v.clone() for k, v in model.state_dict().items()}, fxmask.state_dict(model)
    y = model(X)
    model.to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(weights[name])
    fxmask.load_state_dict(model, state)
    assert torch.equal(model(X), y)


@pytest.mark.parametrize(
    "options", [dict(), dict(backward="rigl", dense_every=2), dict(soft=True, schedule=fxmask.Schedule("linear", steps=6))], ids=["plain", "rigl", "soft"]
)
def test_masks_of_each_forward_are_made_on_the_meta_device_as_elsewhere(options):
    """Weights are set by hand there, and nothing was lost."""
    torch.manual_seed(0)
    twin, x = fxmask.apply(nn.Sequential(nn.Linear(32, 32)), ratio=0.5, block=(8, 8), **options), torch.randn(4, 32)
    with torch.device("meta"):
        model = fxmask.apply(nn.Sequential(nn.Linear(32, 32)), ratio=0.5, block=(8, 8), **options)
    model.to_empty(device="cpu")
    with torch.no_grad():
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            p.copy_(q)
    for n in (0, 1, 1):
        for m in (model, twin):
            fxmask.step(m, n)
            m.zero_grad()
            m(x).square().mean().backward()
        assert torch.equal(model(x), twin(x)) and torch.equal(model[0].weight.grad, twin[0].weight.grad)


def test_weights_of_inference_mode_have_masks_that_are_built_once():
    with torch.inference_mode():
        model = fxmask.apply(nn.Sequential(nn.Linear(32, 32)), ratio=0.5, block=(8, 8), refresh=0).eval()
        assert copy.deepcopy(model)(torch.ones(2, 32)).isfinite().all()
    fxmask.refresh(model)
    assert fxmask.masks(model)["0.weight"].sum() == 8
