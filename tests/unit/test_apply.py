"""fxmask.apply on an nn.Module: what it masks, what it leaves alone, and that it can be undone."""

import re

import pytest
import torch
from sample_models import Residual, best_blocks, mlp, same_snapshot, snapshot, with_zeros
from torch import nn

import fxmask
from fxmask.errors import ConfigError, StateError, UnsupportedError


@pytest.mark.parametrize("block", [(16, 16), (8, 32), (5, 7)], ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.8])
def test_output_and_gradients_equal_a_dense_model_with_zeros(block, ratio):
    x = torch.randn(6, 64)
    dense = mlp()
    expected = with_zeros(dense, ["0.weight", "2.weight"], block, ratio)
    model = fxmask.apply(mlp(), ratio=ratio, block=block)
    y, e = model(x), expected(x)
    assert torch.equal(y, e)
    y.square().sum().backward()
    e.square().sum().backward()
    for name, p in model.named_parameters():
        grad = expected.get_parameter(name).grad
        if name in ("0.weight", "2.weight"):
            mask = best_blocks(dense.get_parameter(name), block, ratio).repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)
            grad = grad * mask[: grad.shape[0], : grad.shape[1]]
        assert torch.equal(p.grad, grad), name


def test_ratio_zero_is_bitwise_dense_on_a_transposed_input():
    x = torch.randn(3, 32, 32)
    dense, model = Residual(), fxmask.apply(Residual(), ratio=0)
    for m in (dense, model):
        m(x).square().sum().backward()
    assert torch.equal(dense(x), model(x))
    for (n, p), q in zip(dense.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(p.grad, q.grad), n


def test_masks_are_the_best_blocks():
    model = fxmask.apply(mlp(), ratio=0.7)
    masks = fxmask.masks(model)
    assert list(masks) == ["0.weight", "2.weight"]
    for name, mask in masks.items():
        assert torch.equal(mask, best_blocks(model.get_parameter(name), (16, 16), 0.7))


def test_it_is_the_same_object_with_the_same_everything():
    model = mlp()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    calls = []
    model[0].register_forward_hook(lambda *a: calls.append(1))
    before = {n: id(p) for n, p in model.named_parameters()}
    keys = list(model.state_dict())
    assert fxmask.apply(model) is model
    assert {n: id(p) for n, p in model.named_parameters()} == before
    assert list(model.state_dict()) == keys
    assert isinstance(model[0], nn.Linear) and "ratio=0.5" in repr(model)
    model(torch.randn(2, 64)).sum().backward()
    assert calls == [1]
    old = model[0].weight.clone()
    optimizer.step()  # built before apply
    assert not torch.equal(old, model[0].weight)


@pytest.mark.parametrize("cached", [False, True])
def test_restore_is_bit_identical(cached):
    model, x = mlp(), torch.randn(4, 64)
    before, y = snapshot(model), model(x)
    fxmask.restore(fxmask.apply(model, ratio=0.8, refresh=0 if cached else 1))
    assert same_snapshot(before, snapshot(model))
    assert torch.equal(y, model(x))
    with pytest.raises(StateError, match="nothing is masked"):
        fxmask.restore(model)


def test_the_model_may_be_a_linear():
    model = fxmask.apply(nn.Linear(32, 32), ratio=0.75)
    assert list(fxmask.masks(model)) == ["weight"]
    assert int(fxmask.masks(model)["weight"].sum()) == 1
    fxmask.restore(model)
    assert type(model) is nn.Linear


# ---- selection -------------------------------------------------------------------------------------------------------------------------------------------


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.fc, self.lm_head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.lm_head.weight = self.embed.weight
        self.lora_A, self.tiny = nn.ModuleDict({"default": nn.Linear(32, 16)}), nn.Linear(32, 15)

    def forward(self, x):
        h = self.fc(self.embed(x))
        return self.lm_head(h), self.lora_A["default"](h), self.tiny(h)


def masked_names(model):
    return sorted(n.removesuffix(".weight") for n in fxmask.masks(model))


def test_default_exclusions_are_exactly_three_and_reported():
    model = fxmask.apply(Tied())
    assert masked_names(model) == ["fc"]
    reasons = {r["name"]: r["reason"] for r in fxmask.explain(model).rows}
    assert reasons == {
        "fc": "selected",
        "lm_head": "default exclusion: weight tied to an Embedding",
        "lora_A.default": "default exclusion: LoRA factor",
        "tiny": "default exclusion: min(out, in) = 15 < 16",
    }


@pytest.mark.parametrize("names", ["lora_A lora_B", "lora_a lora_b", "lora_down lora_up"])
def test_factors_of_lora_by_the_names_of_its_libraries(names):
    down, up = names.split()
    model = fxmask.apply(nn.ModuleDict({"base": nn.Linear(64, 64), down: nn.Linear(64, 32, bias=False), up: nn.Linear(32, 64, bias=False)}))
    assert masked_names(model) == ["base"]
    assert {r["reason"] for r in fxmask.explain(model).rows} == {"selected", "default exclusion: LoRA factor"}


@pytest.mark.parametrize(("options", "expected"), [
    (dict(exclude=()), ["fc", "lm_head", "lora_A.default", "tiny"]),
    (dict(include=["fc", "lm_head"]), ["fc", "lm_head"]),
    (dict(include=["*", "tiny"]), ["fc", "tiny"]),
    (dict(include="l*"), []),
    (dict(include="re:^f"), ["fc"]),
    (dict(include=nn.Linear), ["fc"]),
    (dict(include=lambda m, name: m.out_features == 50, exclude=()), ["lm_head"]),
    (dict(exclude="fc"), []),
    (dict(include="fc", exclude="fc"), []),
    (dict(exclude=(), overrides={"l*": False}), ["fc", "tiny"]),
    (dict(exclude=(), overrides={"l*": False, "lm_head": {}}), ["fc", "lm_head", "tiny"]),
])  # fmt: skip
@pytest.mark.filterwarnings("ignore:fxmask.apply masked nothing", "ignore:no block can be masked")
def test_include_exclude_overrides(options, expected):
    model = fxmask.apply(Tied(), **options)
    assert sorted(r["name"] for r in fxmask.explain(model).rows if r["masked"]) == expected


def test_overrides_change_options_and_the_last_match_wins():
    model = fxmask.apply(mlp(), overrides={"*": dict(ratio=0.75), "2": dict(block=(32, 32), backward="ste")})
    rows = {r["name"]: r for r in fxmask.explain(model).rows}
    assert (rows["0"]["target_ratio"], rows["0"]["block"]) == (0.75, "16x16")
    assert (rows["2"]["target_ratio"], rows["2"]["block"], rows["2"]["backward"]) == (0.5, "32x32", "ste")


def test_a_config_object_is_the_same_as_options():
    a, b = fxmask.apply(mlp(), ratio=0.75, block=(8, 8)), fxmask.apply(mlp(), fxmask.WeightMask(ratio=0.75, block=(8, 8)))
    assert all(torch.equal(p, q) for p, q in zip(fxmask.masks(a).values(), fxmask.masks(b).values(), strict=True))


def test_two_layers_that_share_a_weight_share_its_mask():
    for criterion in ("fro", "random"):
        model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
        model[1].weight = model[0].weight
        fxmask.apply(model, criterion=criterion)
        a, b = fxmask.masks(model).values()
        assert torch.equal(a, b)


def test_what_matches_nothing_is_a_warning_that_lists_the_names():
    for option in ("include", "exclude"):
        with pytest.warns(fxmask.FxMaskWarning) as got:
            fxmask.apply(mlp(), **{option: "head*"})
        assert f"{option}: 'head*' matches nothing; there are: 0, 2, 4." in str(got[0].message)
    with pytest.warns(fxmask.FxMaskWarning, match="overrides: 'head' matches nothing"):
        fxmask.apply(mlp(), overrides={"head": dict(ratio=0.1)})


def test_what_stays_dense_is_a_warning():
    with pytest.warns(fxmask.FxMaskWarning, match=r"masked nothing: 0: in exclude; 2: in exclude; 4: in exclude"):
        fxmask.apply(mlp(), exclude="*")
    with pytest.warns(fxmask.FxMaskWarning, match="it has no linear"):
        fxmask.apply(nn.ReLU())
    with pytest.warns(fxmask.FxMaskWarning, match=r"no block can be masked at this ratio, so these stay dense: 0 \(1 block of \(128, 128\)\)"):
        fxmask.apply(nn.Sequential(nn.Linear(64, 64)), block=(128, 128))


class Own(nn.Linear):
    def forward(self, x):
        return nn.functional.linear(x, self.weight, self.bias) * 2


def test_a_forward_of_its_own_is_reported_and_can_be_read():
    with pytest.warns(fxmask.FxMaskWarning, match=r"0 stays dense: Own has its own forward.*overrides=\{'0': dict\(read='weight'\)\}"):
        model = fxmask.apply(nn.Sequential(Own(32, 32), nn.Linear(32, 32)))
    assert masked_names(model) == ["1"]
    torch.manual_seed(0)
    model = nn.Sequential(Own(32, 32))
    expected = with_zeros(model, ["0.weight"], (16, 16), 0.5)
    fxmask.apply(model, overrides={"0": dict(read="weight")})
    x = torch.randn(3, 32)
    assert torch.equal(model(x), expected(x))


@pytest.mark.parametrize("config", [fxmask.ActivationPruning(0.5, 16), fxmask.BlockDropout(0.1, (4, 16))], ids=["pruned", "dropped"])
def test_a_forward_of_its_own_keeps_its_input(config):
    """The way out of masks, read='weight', is none here."""
    with pytest.warns(fxmask.FxMaskWarning, match=r"^0 stays dense: Own has its own forward, whose input is out of reach; where that is a linear") as caught:
        model = fxmask.apply(nn.Sequential(Own(32, 32), nn.Linear(32, 32)), config)
    assert len(caught) == 1 and "read=" not in str(caught[0].message) and type(model[0]) is Own and type(model[1]) is not nn.Linear
    with pytest.warns(fxmask.FxMaskWarning, match="0 stays dense"), pytest.raises(ConfigError, match=r"unknown option in overrides\['0'\](.|\n)*got 'read'"):
        fxmask.apply(nn.Sequential(Own(32, 32), nn.Linear(32, 32)), config, overrides={"0": dict(read="weight")})


# ---- wrong use -------------------------------------------------------------------------------------------------------------------------------------------


def quantised():
    return torch.ao.nn.quantized.dynamic.Linear(32, 32)


def integer():
    m = nn.Linear(32, 32)
    m.weight = nn.Parameter(torch.ones(32, 32, dtype=torch.int8), requires_grad=False)
    return m


def half_masked():
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    fxmask.apply(m[1])
    return m


def two_ways():
    m = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    m[1].weight = m[0].weight
    return m


def compiled_inside():
    m = mlp()
    m[0].compile()
    return m


WRONG = [
    (mlp, dict(ratio=1.0), ConfigError, "expected a finite number in [0, 1), got 1.0"),
    (mlp, dict(ratio=float("nan")), ConfigError, "got nan"),
    (mlp, dict(ratio=-0.1), ConfigError, "got -0.1"),
    (mlp, dict(block=(16,)), ConfigError, "two positive ints"),
    (mlp, dict(block=(16, 0)), ConfigError, "two positive ints"),
    (mlp, dict(backward="sparse"), ConfigError, "unknown backward mode: expected one of masked, ste, unmasked, rigl, got 'sparse'"),
    (mlp, dict(criterion="l3"), ConfigError, "unknown criterion: expected one of fro, spectral, l1, linf, random, gradient, taylor, movement, momentum"),
    (mlp, dict(criterion=torch.norm), ConfigError, "scores that you compute yourself go in by fxmask.apply(scores=...)"),
    (mlp, dict(impl="cuda"), ConfigError, "unknown impl: expected one of auto, reference, cpu, triton, got 'cuda'"),
    (mlp, dict(impl="triton"), UnsupportedError, "impl='triton' needs a CUDA device, or TRITON_INTERPRET=1"),
    (mlp, dict(refresh=-1), ConfigError, "refresh counts optimiser steps"),
    (mlp, dict(start=1.5), ConfigError, "start counts optimiser steps"),
    (mlp, dict(schedule="cubic"), ConfigError, "expected fxmask.Schedule('cubic', steps=...)"),
    (mlp, dict(schedule=3), ConfigError, "schedule: expected None or a fxmask.Schedule"),
    (mlp, dict(schedule=abs), ConfigError, "a ramp of your own is an object of a class made from fxmask.Schedule"),
    (mlp, dict(seed="a"), ConfigError, "seed: expected an int"),
    (mlp, dict(ration=0.1), ConfigError, "unknown option in fxmask.apply, besides include, exclude, overrides, allocation, layers, masks and scores: expected"),
    (mlp, dict(average=2), ConfigError, "average: expected"),
    (mlp, dict(overrides={"0": dict(ration=0.1)}), ConfigError, "unknown option in overrides['0']: expected some of ratio,"),
    (mlp, dict(overrides={"0": {}, "2": dict(ratio=2)}), ConfigError, "overrides['2']: ratio is the fraction of blocks that are masked"),
    (mlp, dict(overrides={"2": dict(read="weight", backward="unmasked")}), UnsupportedError, "overrides['2']: backward='unmasked' needs the call"),
    (mlp, dict(overrides={"0": True}), ConfigError, "expected a dict of options or False, got True"),
    (mlp, dict(include=3), ConfigError, "include: expected a glob"),
    (mlp, dict(exclude="re:("), ConfigError, "is no regular expression"),
    (lambda: [1], {}, ConfigError, "expected an nn.Module, got list"),
    (lambda: torch.compile(mlp()), {}, UnsupportedError, "got one that is compiled"),
    (compiled_inside, {}, UnsupportedError, "got one that is compiled"),
    (lambda: nn.DataParallel(mlp()), {}, UnsupportedError, "wrapped for data parallelism"),
    (quantised, {}, UnsupportedError, "its weight is quantised"),
    (integer, {}, UnsupportedError, "its weight is quantised (torch.int8)"),
    (lambda: nn.Sequential(nn.LazyLinear(32)), {}, UnsupportedError, "not initialised yet"),
    (half_masked, {}, StateError, "'1' is masked already: expected a dense layer"),
    (two_ways, dict(overrides={"1": dict(ratio=0.1)}), ConfigError, "one weight would be masked twice, differently: '0' and '1' share it"),
    (lambda: mlp().to("meta"), dict(refresh=0), UnsupportedError, "a cached mask (refresh=0) needs the weight's values: expected real memory, got a meta"),
    (lambda: mlp().to("meta"), dict(gain=True), UnsupportedError, "a mask that outlives a step (gradients, averages, hysteresis, regrow, gain) needs"),
    (lambda: mlp().to("meta"), dict(allocation="global"), UnsupportedError, "of fxmask.apply: allocation='erk'"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "options", "error", "text"), WRONG, ids=[w[3][:40] for w in WRONG])
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor", "ignore:Lazy modules are a new feature")
def test_wrong_use_gets_a_clear_error_and_changes_nothing(make, options, error, text):
    model = make()
    before = snapshot(model) if isinstance(model, nn.Module) and "not initialised" not in text else None
    with pytest.raises(error, match=re.escape(text)) as e:
        fxmask.apply(model, **options)
    assert isinstance(e.value, fxmask.FxMaskError)
    assert before is None or same_snapshot(before, snapshot(model))


def test_every_option_of_a_weight_mask_is_one_of_apply():
    given = dict(ratio=0.75, criterion="taylor", average=0.9, hysteresis=0.2, regrow=fxmask.Regrow("random", 0.3), cover=True, gain=True, ties="lowest")
    model = fxmask.apply(mlp(), **given)
    assert {name: getattr(model[0]._fxmask_config, name) for name in given} == given


def test_configs_together_with_options():
    mask = fxmask.WeightMask(ratio=0.7)
    for options in (dict(ratio=0.5), dict(ratio=0.7), dict(block=(8, 8)), dict(backward="ste"), dict(average=0.9)):
        name = next(iter(options))
        with pytest.raises(ConfigError, match=f"configs and {name}: expected options of the mask inside WeightMask"):
            fxmask.apply(mlp(), mask, **options)
    defaults = dict(ratio=0.5, block=(16, 16), backward="masked", criterion="fro", refresh=1, start=0, impl="auto", seed=0)
    for name, value in defaults.items():  # typed, they are meant
        with pytest.raises(ConfigError, match=f"configs and {name}: expected options of the mask inside WeightMask"):
            fxmask.apply(mlp(), fxmask.WeightMask(refresh=5, start=5, seed=5, backward="ste", criterion="l1"), **{name: value})
    plain = fxmask.apply(mlp())[0]._fxmask_given
    assert {name: type(getattr(plain, name)) for name in defaults} == {name: type(value) for name, value in defaults.items()}
    beside = {
        (fxmask.ActivationPruning(0.5), "affine"): "configs and affine: expected options of the mask inside ActivationPruning(...), got both",
        (fxmask.WeightMask(0.5), "refresh"): "write fxmask.WeightMask(..., refresh=0.8), or leave out what is the default; beside a config go include, exclude",
        (fxmask.ActivationPruning(0.5), "ratio"): "inside ActivationPruning(...) or WeightMask(...), got both",
        (fxmask.NMMask(2, 4), "method"): "unknown option beside configs: expected options inside of them (WeightMask: ratio, ",
        (mask, "raito"): "got 'raito'.",
    }
    for (config, name), text in beside.items():
        with pytest.raises(ConfigError, match=re.escape(text)):
            fxmask.apply(mlp(), config, **{name: 0.8})
    with pytest.raises(ConfigError, match="expected one WeightMask, got 2"):
        fxmask.apply(mlp(), mask, mask)
    with pytest.raises(ConfigError, match=r"config: expected a fxmask.WeightMask, ActivationPruning, BlockDropout or NMMask, got 0\.5"):
        fxmask.apply(mlp(), 0.5)


def test_a_ddp_wrapped_model(tmp_path):
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.parallel.DistributedDataParallel(mlp())
        with pytest.raises(UnsupportedError, match="wrapped for data parallelism"):
            fxmask.apply(model)
    finally:
        torch.distributed.destroy_process_group()


def test_a_dtensor_weight(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import distribute_tensor

    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    try:
        model = nn.Sequential(nn.Linear(32, 32))
        model[0].weight = nn.Parameter(distribute_tensor(model[0].weight, init_device_mesh("cpu", (1,))))
        with pytest.raises(UnsupportedError, match=r"its weight is a DTensor; call fxmask\.apply before sharding"):
            fxmask.apply(model)
    finally:
        torch.distributed.destroy_process_group()


def test_a_failure_half_way_is_undone(monkeypatch):
    model = nn.Sequential(mlp(), torch.fx.symbolic_trace(mlp()))
    before = snapshot(model)
    code, real = model[1].code, fxmask.changing.swap

    def broken(*args):
        raise MemoryError

    monkeypatch.setattr("fxmask.changing.swap", lambda *a: real(*a) if a[2] == "0.0.weight" else broken())
    with pytest.raises(MemoryError):
        fxmask.apply(model)
    monkeypatch.undo()
    monkeypatch.setattr("fxmask.passes.graphs.weight_mask._rewrite", broken)
    with pytest.raises(MemoryError):
        fxmask.apply(model)
    assert same_snapshot(before, snapshot(model))
    assert model[1].code == code


@pytest.mark.parametrize("call", [fxmask.masks, fxmask.step, fxmask.refresh, lambda m: fxmask.dense(m).__enter__()], ids=["masks", "step", "refresh", "dense"])
def test_calls_on_a_model_without_masks(call):
    with pytest.raises(StateError, match="nothing is masked in this model"):
        call(mlp())


def test_meta_models_can_be_masked_but_have_no_masks_to_show():
    model = fxmask.apply(mlp().to("meta"))
    with pytest.raises(UnsupportedError, match="got a meta tensor"):
        fxmask.masks(model)
    assert [r["achieved_ratio"] for r in fxmask.explain(model).rows] == [None] * 3
    model.to_empty(device="cpu")
    model.load_state_dict(mlp().state_dict())
    reference = fxmask.apply(mlp())
    x = torch.randn(2, 64)
    assert torch.equal(model(x), reference(x))


def test_an_override_that_names_a_layer_which_stays_dense():
    """It asks for one layer, and a default exclusion holds: said, with what lifts it."""
    model = mlp()
    with pytest.warns(fxmask.FxMaskWarning, match=r"overrides\['4'\] names a layer that stays dense by default exclusion: min\(out, in\) = 10 < 16; .*include"):
        fxmask.apply(model, overrides={"4": dict(ratio=0.25, block=(5, 16)), "0": False})
    assert [r["masked"] for r in fxmask.explain(fxmask.restore(fxmask.apply(mlp(), overrides={"4": False, "*": dict(ratio=0.7)}))).rows] == [False] * 3
    found = fxmask.apply(mlp(), include=["*", "4"], overrides={"4": dict(ratio=0.25, block=(5, 16))})
    assert [r["masked"] for r in fxmask.explain(found).rows] == [True] * 3
