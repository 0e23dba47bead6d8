"""Ways to use the library that once went wrong silently."""

import copy
import pickle
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sample_models import Residual, best_blocks, mlp, same_snapshot, snapshot
from torch import fx, nn

import fxmask
from fxmask.errors import ConfigError, StateError, UnsupportedError

X = torch.randn(3, 64, generator=torch.Generator().manual_seed(9))
FORMS = pytest.mark.parametrize("form", ["module", "trace", "export"])


def formed(form, model=None):
    model = model or mlp()
    return {"module": lambda: model, "trace": lambda: fx.symbolic_trace(model), "export": lambda: torch.export.export(model, (X,)).module()}[form]()


@FORMS
def test_nothing_is_masked_twice(form):
    model = fxmask.apply(formed(form), ratio=0.5)
    before, y = snapshot(model), model(X)
    for target in (model, nn.Sequential(model)):
        with pytest.raises(StateError, match="is masked already"):
            fxmask.apply(target, ratio=0.9)
    assert same_snapshot(before, snapshot(model)) and torch.equal(model(X), y)
    assert {r["target_ratio"] for r in fxmask.explain(model).rows if r["masked"]} == {0.5}


@FORMS
def test_a_second_apply_that_fails_leaves_the_first_alone(form):
    model = fxmask.apply(formed(form), include="0", ratio=0.5)
    before, y = snapshot(model), model(X)
    with pytest.raises(ConfigError):
        fxmask.apply(model, include="2", ratio=2)
    assert same_snapshot(before, snapshot(model)) and torch.equal(model(X), y)
    fxmask.apply(model, include="2", ratio=0.75)
    assert sorted(fxmask.masks(model)) == ["0.weight", "2.weight"]


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


def test_a_symbolic_trace_of_a_masked_model_raises():
    for model in (fxmask.apply(mlp()), fxmask.apply(fx.symbolic_trace(mlp()))):
        with pytest.raises(UnsupportedError, match="would freeze its masks"):
            fx.symbolic_trace(model)


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


def test_a_replaced_forward_is_said_to_be_dense():
    def patched():
        model = mlp()
        old = model[0].forward
        model[0].forward = lambda *a: old(*a) * 2
        return model

    y = patched()(X)
    for target in (patched(), fx.symbolic_trace(patched())):
        with pytest.warns(fxmask.FxMaskWarning, match="0 stays dense: its forward was replaced on the instance"):
            fxmask.apply(target, ratio=0)
        assert torch.equal(target(X), y)


@pytest.mark.parametrize("mode", ["masked", "ste", "unmasked", "rigl"])
def test_second_derivatives_of_both_forms_agree(mode):
    config = fxmask.WeightMask(ratio=0.6, backward=mode, dense_every=1)
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32)).double(), config)
    fxmask.step(model, 0)
    x = torch.randn(3, 32, dtype=torch.float64, requires_grad=True)
    (gx,) = torch.autograd.grad(model(x).sin().sum(), x, create_graph=True)
    expected = torch.autograd.grad(gx.square().sum(), model[0].weight)[0]

    def penalty(w):
        f = lambda x: torch.func.functional_call(model, {"0.weight": w}, (x,)).sin().sum()  # noqa: E731
        return torch.func.grad(f)(x.detach()).square().sum()

    assert torch.allclose(torch.func.grad(penalty)(model[0].weight.detach()), expected)


def test_refresh_0_and_a_schedule_contradict():
    with pytest.raises(ConfigError, match="refresh=0 builds the mask once, and a schedule wants it to move"):
        fxmask.WeightMask(refresh=0, schedule=fxmask.Schedule())


def test_a_linear_inside_and_outside_of_a_graph():
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc = nn.Linear(64, 64)
            self.body = fx.symbolic_trace(nn.Sequential(self.fc, nn.GELU()))

        def forward(self, x):
            return self.fc(x) + self.body(x)

    torch.manual_seed(0)
    dense = Both()
    model = fxmask.apply(copy.deepcopy(dense), ratio=0.75)
    w = dense.fc.weight * best_blocks(dense.fc.weight, (16, 16), 0.75).repeat_interleave(16, 0).repeat_interleave(16, 1)
    h = F.linear(X, w, dense.fc.bias)
    assert torch.equal(model(X), h + F.gelu(h))


class TiedHead(nn.Module):
    def __init__(self):
        super().__init__()
        self.emb, self.fc, self.head = nn.Embedding(50, 32), nn.Linear(32, 32), nn.Linear(32, 50, bias=False)
        self.head.weight = self.emb.weight

    def forward(self, i):
        return self.head(self.fc(self.emb(i)))


@pytest.mark.parametrize("trace", [fx.symbolic_trace, lambda m: torch.export.export(m, (torch.arange(4),)).module()], ids=["trace", "export"])
def test_a_tied_embedding_is_seen_in_graphs(trace):
    assert list(fxmask.masks(fxmask.apply(trace(TiedHead())))) == ["fc.weight"]


def test_tied_layers_are_chosen_one_by_one():
    model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))
    model[2].weight = model[0].weight
    swapped, gm = fxmask.apply(copy.deepcopy(model), exclude="2", ratio=0.7), fxmask.apply(fx.symbolic_trace(model), exclude="2", ratio=0.7)
    assert list(fxmask.masks(swapped)) == list(fxmask.masks(gm)) == ["0.weight"]
    assert torch.equal(swapped(X), gm(X))


def test_the_attention_in_proj_has_a_row():
    rows = {r["name"]: r for r in fxmask.explain(fxmask.apply(nn.MultiheadAttention(32, 4))).rows}
    assert "is a Parameter and no Linear" in rows["in_proj_weight"]["reason"] and rows["out_proj"]["masked"]


@FORMS
def test_patterns_mean_the_same_in_every_form(form):
    for pattern in (nn.Linear, nn.Module, lambda m, n: isinstance(m, nn.Linear), lambda m, n: m.out_features > 10):
        assert sorted(fxmask.masks(fxmask.apply(formed(form), include=pattern))) == ["0.weight", "2.weight"]


def test_a_trace_in_eval_is_in_eval():
    gm = fxmask.apply(fx.symbolic_trace(mlp().eval()), refresh=2)
    assert not gm.fxmask_sites.training
    gm(X)


def frozen_examples():
    class Functions(nn.Module):
        def __init__(self, f):
            super().__init__()
            self.fc, self.f = nn.Linear(64, 64), f

        def forward(self, x):
            return self.f(self.fc(x))

    def attend(x):
        return F.scaled_dot_product_attention(x[None], x[None], x[None], dropout_p=0.5)

    yield fx.symbolic_trace(Functions(attend)), "scaled_dot_product_attention"
    yield fx.symbolic_trace(Functions(lambda x: torch.dropout(x, 0.5, True))), "dropout"
    for f, name in ((torch.rand_like, "rand_like"), (torch.randn_like, "randn_like"), (lambda x: torch.empty_like(x).bernoulli_(0.5) * x, "bernoulli")):
        yield torch.export.export(Functions(f), (X,)).module(), name
    norm = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    yield torch.export.export(norm, (X,)).module(), "batch_norm"


def test_frozen_randomness_and_statistics_are_said():
    for gm, name in frozen_examples():
        with pytest.warns(fxmask.FxMaskWarning, match=rf"no longer follows train\(\) and eval\(\) here: .*{name}"):
            fxmask.apply(gm)


def test_a_warning_made_an_error_changes_nothing():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128))
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fxmask.FxMaskWarning):
            fxmask.apply(model, block=(64, 64))
    assert same_snapshot(before, snapshot(model))


def test_a_weight_with_one_axis_is_left_dense():
    class Vector(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.v = nn.Linear(64, 64), nn.Parameter(torch.randn(64))

        def forward(self, x):
            return F.linear(self.fc(x), self.v)

    with pytest.warns(fxmask.FxMaskWarning, match="v stays dense: its weight has 1 axes"):
        gm = fxmask.apply(fx.symbolic_trace(Vector()))
    assert list(fxmask.masks(gm)) == ["fc.weight"]


def test_looking_runs_no_power_iteration():
    torch.manual_seed(0)
    model = nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(64, 64)))
    before = copy.deepcopy(model.state_dict())
    fxmask.apply(model, ratio=0.5)
    fxmask.step(model)
    fxmask.masks(model), fxmask.explain(model)
    with pytest.raises(StateError):
        fxmask.apply(model)
    fxmask.restore(model)
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_submodule_with_our_name_is_left_alone():
    class Taken(nn.Module):
        def __init__(self):
            super().__init__()
            self.fxmask_sites = nn.Linear(64, 64)

        def forward(self, x):
            return self.fxmask_sites(x)

    gm = fx.symbolic_trace(Taken())
    keys, y = list(gm.state_dict()), gm(X)
    fxmask.restore(fxmask.apply(gm))
    assert list(gm.state_dict()) == keys and torch.equal(gm(X), y)


def test_a_step_that_cannot_be_taken_moves_nothing():
    model = fxmask.apply(mlp(), refresh=2)
    model[2].to("meta")
    with pytest.raises(UnsupportedError, match="got a meta tensor"):
        fxmask.step(model)
    assert [r["step"] for r in fxmask.explain(model).rows if r["masked"]] == [0, 0]


@pytest.mark.parametrize("form", ["module", "trace"])
def test_distillation_from_the_dense_self(form):
    for options in (dict(backward="rigl"), dict(refresh=2), {}):
        model = fxmask.apply(formed(form), ratio=0.7, **options)
        fxmask.step(model, 0)
        y = model(X)
        with torch.no_grad(), fxmask.dense(model):
            teacher = model(X)
        (y - teacher).square().sum().backward()


def test_the_argument_keeps_its_name():
    model = fxmask.apply(mlp())
    assert torch.equal(model[0](input=X), model[0](X))


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


@pytest.mark.parametrize("value", [10**400, np.float32(0.5), np.float64(0.25)])
def test_numbers_of_every_kind(value):
    if isinstance(value, int):
        with pytest.raises(ConfigError, match="expected a finite number"):
            fxmask.WeightMask(ratio=value)
    else:
        fxmask.apply(mlp(), ratio=value, block=(np.int64(16), 16))
    with pytest.raises(ConfigError, match="two positive ints"):
        fxmask.WeightMask(block=(10**30, 16))
    with pytest.raises(ConfigError, match="overrides: expected a dict"):
        fxmask.apply(mlp(), overrides="0")
    with pytest.raises(ConfigError, match=r"expected None or a fxmask\.Schedule"):
        fxmask.WeightMask(schedule=np.zeros(2))


def test_blocks_far_larger_than_the_weight_cost_nothing():
    with pytest.warns(fxmask.FxMaskWarning, match="no block can be masked"):
        model = fxmask.apply(mlp(), block=(2**30, 2**30))
    assert torch.equal(model(X), mlp()(X))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors():
    model = fxmask.apply(mlp(), ratio=0.7)
    nested = torch.nested.nested_tensor([X, X[:1]])
    got = model(nested).unbind()
    assert torch.allclose(got[0], model(X), atol=1e-6) and torch.allclose(got[1], model(X[:1]), atol=1e-6)


def test_a_reader_tied_to_a_plain_linear():
    class TwoUsers(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.fc = nn.MultiheadAttention(32, 4, bias=False), nn.Linear(32, 32, bias=False)
            self.fc.weight = self.attn.out_proj.weight

    assert sorted(fxmask.masks(fxmask.apply(TwoUsers()))) == ["attn.out_proj.weight", "fc.weight"]


def test_the_first_step_recompiles_nothing():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    model = fxmask.apply(mlp(), criterion="random")
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for _ in range(3):
        compiled(X)
        fxmask.step(model)
    assert counter.frame_count == 1


def test_apply_inside_inference_mode():
    model = mlp()
    with torch.inference_mode():
        fxmask.apply(model, refresh=2)
    fxmask.step(model, 4)
    model(X).sum().backward()


@pytest.mark.parametrize("mode", ["masked", "ste", "rigl", "unmasked"])
def test_a_masked_inf_is_nothing_in_the_aten_form_too(mode):
    from fxmask.kernels import ops, reference

    w, mask = torch.randn(32, 32), torch.tensor([[True, False], [True, True]])
    w[0, 20] = float("inf")
    expected = ops.masked_linear(X[:, :32], w, None, mask, 16, 16, mode)
    assert expected.isfinite().all()
    if mode != "unmasked":  # whose dX goes through the whole weight
        assert torch.equal(reference.composite(X[:, :32], w, None, mask, (16, 16), mode), expected)


def test_flips_start_at_zero():
    model = fxmask.apply(mlp(), ratio=0.7, refresh=0)
    assert [r["flips"] for r in fxmask.explain(model).rows if r["masked"]] == [0, 0]


def test_readers_in_many_threads():
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model, x = fxmask.apply(nn.TransformerEncoder(layer, 2), ratio=0.75).eval(), torch.randn(2, 5, 32)
    with torch.no_grad():
        expected = model(x)

    def run(_):
        with torch.no_grad():
            return torch.equal(model(x), expected)

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(run, range(200)))
    assert run(0)
    assert all(isinstance(m.weight, nn.Parameter) for m in model.modules() if isinstance(m, nn.Linear))


@pytest.mark.parametrize("options", [dict(backward="rigl"), dict(refresh=2), dict(refresh=0)], ids=str)
def test_state_made_in_inference_mode_can_be_trained_with(options):
    model = fxmask.apply(mlp(), ratio=0.7, **options)
    fxmask.step(model, 0)
    with torch.inference_mode():
        with fxmask.dense(model):
            model(X)
        model.to("cpu")
        fxmask.step(model, 2)
        model.load_state_dict(mlp(seed=4).state_dict())
    model(X).sum().backward()


@pytest.mark.parametrize("refresh", [0, 2])
def test_a_mask_that_was_lost_on_meta_is_not_used(refresh):
    model = fxmask.apply(mlp(), ratio=0.75, refresh=refresh)
    fxmask.step(model, 0)
    model.to("meta").to_empty(device="cpu")
    with pytest.raises(StateError, match="a cached mask was lost on the meta device"):
        model(X)
    with torch.no_grad():
        for p, q in zip(model.parameters(), mlp().parameters(), strict=True):
            p.copy_(q)
    fxmask.refresh(model)
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [6, 6]
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
