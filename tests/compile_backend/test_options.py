"""What the backend is asked for: options, coverage, and what it cannot do."""

import copy
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, Wrap, compiled, failing
from sample_models import Attention, mlp
from torch import nn
from torch.autograd import forward_ad
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.compiler import backend, backend_options
from fxmask.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError


def test_nothing_to_mask_is_a_warning_and_with_require_an_error():
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU())
    x = torch.randn(2, 1, 8, 8)
    with pytest.warns(FxMaskWarning, match=r"masked nothing in a graph: it has no linear\.\n.*\n.*a graph break splits a model"):
        compiled(Wrap(model), **OPTIONS)(x)
    error = failing(Wrap(model), x, **OPTIONS, require=True)
    assert isinstance(error, UnsupportedError) and "expected anything at all to be masked in this graph, got nothing" in str(error)


def test_a_layer_that_one_block_covers_is_a_gap():
    with pytest.warns(FxMaskWarning, match="so these stay dense: inner"):
        compiled(Wrap(nn.Linear(32, 32)), ratio=0.9, block=(64, 64))(torch.randn(4, 32))
    torch._dynamo.reset()
    with pytest.warns(FxMaskWarning, match="choose a smaller block"):
        error = failing(Wrap(nn.Linear(32, 32)), torch.randn(4, 32), ratio=0.9, block=(64, 64), require=True)
    assert "require: expected inner to be masked in this graph" in str(error)


def test_a_layer_that_is_required_has_to_be_there():
    x = torch.randn(4, 64)
    compiled(Wrap(mlp()), **OPTIONS, require=["inner.0", "*.2"])(x)
    error = failing(Wrap(mlp()), x, **OPTIONS, require="inner.9")
    assert isinstance(error, UnsupportedError) and "expected 'inner.9' to be masked in this graph, got inner.0, inner.2" in str(error)
    error = failing(Wrap(mlp()), x, **OPTIONS, exclude="inner.0", require="inner.0")
    assert "dense: inner.0: in exclude" in str(error)


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        (dict(rato=0.5), ConfigError, "unknown option: expected some of ratio, block"),
        (dict(max_autotune=True), ConfigError, "options of Inductor go into options={'inductor'"),
        (dict(ratio=1.5), ConfigError, "expected a finite number in"),
        (dict(refresh=10), UnsupportedError, "keeps no state between calls, and refresh counts optimiser steps"),
        (dict(schedule=fxmask.Schedule(steps=3)), UnsupportedError, "use fxmask.apply"),
        (dict(backward="rigl"), UnsupportedError, "backward=rigl counts optimiser steps"),
        (dict(criterion="gradient"), UnsupportedError, "criterion=gradient counts optimiser steps"),
        (dict(criterion="given"), UnsupportedError, "makes its masks from weights: expected no masks or scores of your own"),
        (dict(masks={}), UnsupportedError, "expected no masks or scores of your own"),
        (dict(scores={}), UnsupportedError, "expected no masks or scores of your own"),
        (dict(allocation="erk"), UnsupportedError, "the backend meets calls and no modules, and allocation asks about modules.\n  where: "),
        ({3: 1, "rato": 2}, ConfigError, "unknown option: expected some of ratio, block"),
        (dict(match="all"), ConfigError, "expected linear or matmul, got 'all'"),
        (dict(inductor=3), ConfigError, "expected a dict of Inductor's options"),
        (dict(inductor={"max_autotune": True}, inner="eager"), ConfigError, "expected one of them"),
        (dict(inductor={"max_autotun": True}), ConfigError, "got 'max_autotun'; did you mean 'max_autotune'?"),
        (dict(inductor={3: True}), ConfigError, "expected options of Inductor, which torch._inductor.list_options() lists, or 'mode', got 3."),
        (dict(inductor={"max_autotune": "no"}), ConfigError, "inductor: expected max_autotune as bool, got 'no'."),
        (dict(inductor={"mode": "fast"}), ConfigError, "inductor: Unrecognized mode=fast, should be one of: default"),
        (dict(inductor={"mode": True}), ConfigError, "inductor: expected mode as str, got True."),
        (dict(inner="inductr"), ConfigError, "inner: expected the name of another backend or a function that is one, got 'inductr'; did you mean 'inductor'?"),
        (dict(inner="fxmask"), ConfigError, "inner: expected the name of another backend or a function that is one, got 'fxmask'."),
        (dict(inner=["eager"]), ConfigError, "function that is one, got ['eager']; did you mean 'eager'?"),
        (dict(inner=np.array(["eager", "inductor"])), ConfigError, "function that is one, got array(['eager', 'inductor'], dtype="),
        (dict(inner=np.array(["eager", "inductor"]), inductor={"max_autotune": True}), ConfigError, "function that is one, got array(['eager'"),
        (dict(require=[3]), ConfigError, "require: expected a glob"),
        (dict(passes=3), ConfigError, "passes: expected a list of"),
    ],
    ids=lambda v: str(v)[:40],
)
def test_wrong_options(options, kind, text):
    with pytest.raises(kind, match=re.escape(text)):
        backend.parse(options)


def test_a_mode_is_given_among_the_options_of_inductor():
    """torch.compile itself takes either of mode and options; dashes are those of torch.compile(options=...)."""
    assert backend.parse({"inductor": {"mode": "reduce-overhead"}}).inductor == {"triton.cudagraphs": True}
    assert backend.parse({"inductor": {"mode": "default", "max-autotune": True}}).inductor == {"max_autotune": True}
    assert backend.parse({"inductor": {"triton.cudagraphs": False, "mode": "reduce-overhead"}}).inductor == {"triton.cudagraphs": False}


@pytest.mark.parametrize("change", [dict(start=100), dict(schedule=fxmask.Schedule(steps=9)), dict(backward="rigl"), dict(refresh=0)], ids=str)
def test_options_that_need_state_are_refused_in_overrides_too(change):
    error = failing(Wrap(mlp()), torch.randn(4, 64), **OPTIONS, overrides={"inner.0": change})
    assert isinstance(error, UnsupportedError) and "the options of 'inner.0' count optimiser steps or cache a mask" in str(error)


def test_a_call_that_takes_a_weight_as_an_argument_cannot_be_unmasked():
    options, x = dict(OPTIONS, backward="unmasked"), torch.randn(4, 6, 32)
    error = failing(Attention(), x, **options)
    assert isinstance(error, UnsupportedError) and "multi_head_attention_forward takes the weight of this layer as an argument" in str(error)
    assert "overrides={'attention.out_proj': dict(backward='ste')}, or exclude it" in str(error)
    for change in (dict(backward="ste"), False):
        compiled(Attention(), **options, overrides={"attention.out_proj": change})(x)


def test_a_mode_of_inductor_needs_inductor():
    call = torch.compile(Wrap(mlp()), backend=backend.fxmask_backend, options={**OPTIONS, "inner": "eager"})
    with pytest.raises(ConfigError, match="mode='max-autotune' is Inductor's, and inner='eager'"):
        backend._inner(backend.parse({"inner": "eager"}), "max-autotune")
    call(torch.randn(4, 64))


ABOUT_MASKS = {
    "ratio": 0.5, "block": (16, 16), "backward": "ste", "criterion": "l1", "ties": "keep", "impl": "reference", "seed": 1, "cover": True,
    "activations": {"ratio": 0.5}, "include": "a", "exclude": "a", "overrides": {"a": False}, "require": True, "match": "matmul",
}  # fmt: skip


@pytest.mark.parametrize("option", ABOUT_MASKS)
def test_each_option_that_says_what_is_masked_contradicts_apply(option):
    assert backend_options.parse({option: ABOUT_MASKS[option]}).masks
    assert not {*backend_options.OF_APPLY} & {*backend_options.MASK, *backend_options.OWN}
    assert ABOUT_MASKS.keys() == {*backend_options.MASK, *backend_options.OWN} - {"passes", "inner", "inductor"}


@pytest.mark.parametrize("options", [{}, {"inner": "eager"}, {"inductor": {"max_autotune": True}}, {"passes": []}])
def test_options_that_say_how_a_graph_is_compiled_contradict_nothing(options):
    assert not backend.parse(options).masks


def test_options_that_contradict_apply():
    model = Wrap(fxmask.apply(mlp(), ratio=0.5, block=(16, 16)))
    error = failing(model, torch.randn(4, 64), **OPTIONS)
    assert isinstance(error, StateError) and "masked by fxmask.apply, and the backend got options of its own" in str(error)
    torch._dynamo.reset()
    x = torch.randn(4, 64)
    assert torch.equal(compiled(model)(x), model(x))  # without options: what apply has decided, head and all


def test_a_layer_that_apply_left_out_stays_dense_in_a_graph_of_its_own():
    torch.manual_seed(0)
    layer = nn.Linear(32, 32)
    model = fxmask.apply(nn.ModuleDict({"a": nn.Linear(32, 32), "b": layer}), ratio=0.75, exclude="b")
    x = torch.randn(4, 32)
    assert torch.equal(compiled(Wrap(layer))(x), F.linear(x, layer.weight, layer.bias))
    torch._dynamo.reset()
    fxmask.restore(model)
    assert not torch.equal(compiled(Wrap(layer), ratio=0.75)(x), layer(x))


def test_a_layer_that_apply_leaves_out_afterwards_is_not_masked_by_an_old_graph():
    torch.manual_seed(0)
    layer, x = nn.Linear(32, 32), torch.randn(4, 32)
    call = compiled(Wrap(layer))
    assert not torch.equal(call(x), layer(x))
    fxmask.apply(nn.ModuleDict({"a": nn.Linear(32, 32), "b": layer}), ratio=0.75, exclude="b")
    with pytest.raises(StateError, match=r"(?s)has left a layer dense, and this graph.*inner.*torch\._dynamo\.reset"):
        call(x)
    torch._dynamo.reset()
    assert torch.equal(call(x), layer(x))


@pytest.mark.parametrize("transform", ["grad", "vmap", "jvp"])
def test_function_transforms_raise(transform):
    model, x = Wrap(nn.Linear(32, 32)), torch.randn(4, 32)
    call = {
        "grad": lambda: torch.func.grad(lambda t: model(t).sum())(x),
        "vmap": lambda: torch.func.vmap(model)(x),
        "jvp": lambda: torch.func.jvp(model, (x,), (x,)),
    }[transform]
    error = failing(call, **OPTIONS)
    assert isinstance(error, UnsupportedError) and "use fxmask.apply" in str(error)


def dual(model, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(model(forward_ad.make_dual(x, x))).tangent


HIDDEN = {
    "dual": (Wrap(nn.Linear(32, 32)), dual, "_make_dual"),
    "reader": (nn.MultiheadAttention(32, 4), lambda m, x: torch.vmap(lambda t: m(t, t, t, need_weights=False)[0])(x[:, None]), "vmap"),
    "body": (nn.Linear(32, 32), lambda m, x: torch.vmap(lambda t: checkpoint(m, t, use_reentrant=False))(x), "vmap"),
    "behind": (nn.Linear(32, 32), lambda m, x: torch.vmap(lambda t: m(torch.func.grad(lambda u: u.square().sum())(t)))(x), "vmap"),
}


@pytest.mark.filterwarnings("ignore:There is a performance drop because we have not yet implemented the batching rule")
@pytest.mark.parametrize(("model", "call", "by"), HIDDEN.values(), ids=HIDDEN)
def test_forward_ad_and_linears_that_are_hidden_in_a_transform_raise(model, call, by):
    """In what reads a weight, in a body, and behind an inner transform."""
    error = failing(lambda x: call(model, x), torch.randn(4, 32), **OPTIONS)
    assert isinstance(error, UnsupportedError) and f"by a function transform ({by})" in str(error)


class MappedMask(nn.Module):
    """A mask of attention that vmap makes from indices, beside linears, as transformers has it."""

    def __init__(self):
        super().__init__()
        self.inner, self.out = nn.Linear(32, 32), nn.Linear(32, 48)

    def forward(self, x):
        seen = torch.vmap(lambda i: torch.vmap(lambda j: j <= i)(torch.arange(4)))(torch.arange(4))
        return self.out(seen.to(x.dtype) @ self.inner(x))


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_linears_beside_a_function_transform_are_masked(inner):
    torch.manual_seed(0)
    model, x = MappedMask(), torch.randn(4, 32)
    applied = fxmask.apply(copy.deepcopy(model), **OPTIONS)
    y, expected = compiled(model, **{**OPTIONS, "inner": inner, "require": True})(x), applied(x)
    assert torch.equal(y, expected) and not torch.equal(y, model(x))
    y.sum().backward()
    expected.sum().backward()
    assert all(torch.equal(p.grad, q.grad) for p, q in zip(model.parameters(), applied.parameters(), strict=True))


def test_functions_of_apply_say_where_the_masks_are():
    model = mlp()
    call = torch.compile(model, backend="fxmask", options={**OPTIONS, "inner": "eager"})
    call(torch.randn(4, 64))
    assert any("rows are of the last that ran" in note for note in fxmask.explain(call).notes)
    for function in (fxmask.masks, lambda m: fxmask.guard(torch.optim.SGD(m.parameters(), 0.1), m)):
        with pytest.raises(StateError, match=r"(?s)compiled by backend='fxmask'.*fix: give fxmask.apply the backend's options instead"):
            function(call)
    assert not any("compiled graphs" in note for note in fxmask.explain(torch.compile(mlp())).notes)


def test_packed_projections_stay_dense_and_are_told():
    model, x = nn.MultiheadAttention(32, 4, batch_first=True), torch.randn(2, 5, 32)
    error = failing(Attends(model), x, **OPTIONS, require=True)
    assert "expected inner.in_proj_weight to be masked" in str(error) and "no Linear" in str(error) and "goes into exclude" in str(error)
    torch._dynamo.reset()
    y = compiled(Attends(model), **OPTIONS, require=True, exclude="*.in_proj_weight")(x)
    assert torch.equal(y, Attends(fxmask.apply(model, **OPTIONS))(x))


class Attends(Wrap):
    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


@pytest.mark.parametrize("train", [True, False])
def test_so_they_are_in_an_encoder_layer(train):
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True).train(train)
    with torch.set_grad_enabled(train):
        error = failing(Wrap(layer), torch.randn(2, 5, 32), **OPTIONS, require=True)
    masked = str(error).partition("got ")[2].partition(" (dense")[0]
    assert "expected inner.self_attn.in_proj_weight to be masked" in str(error)
    assert set(masked.split(", ")) == {f"inner.{name}" for name in ("self_attn.out_proj", "linear1", "linear2")}


def test_so_they_are_without_gradients_and_with_keys_of_another_width():
    x = torch.randn(2, 5, 32)
    with torch.no_grad():
        error = failing(Attends(nn.MultiheadAttention(32, 4, batch_first=True).eval()), x, **OPTIONS, require=True)
    assert "expected inner.in_proj_weight to be masked" in str(error)

    class Crossed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = nn.MultiheadAttention(32, 4, kdim=16, vdim=48, batch_first=True)

        def forward(self, x, k, v):
            return self.attention(x, k, v, need_weights=False)[0]

    torch._dynamo.reset()
    error = failing(Crossed(), x, torch.randn(2, 5, 16), torch.randn(2, 5, 48), **OPTIONS, require=True)
    assert all(f"attention.{p}_proj_weight" in str(error) for p in "qkv")


@pytest.mark.parametrize("by", [dict(include=["*in_proj_weight", "*out_proj"]), dict(overrides={"*in_proj_weight": dict(ratio=0.5)})])
def test_whoever_asks_for_them_by_name_is_told(by):
    with pytest.warns(FxMaskWarning, match=r"inner\.in_proj_weight stays dense: its in_proj is a Parameter"):
        compiled(Attends(nn.MultiheadAttention(32, 4, batch_first=True)), **OPTIONS, **by)(torch.randn(2, 5, 32))
    with pytest.warns(FxMaskWarning, match=r"in_proj_weight stays dense: its in_proj is a Parameter"):
        fxmask.apply(nn.Sequential(nn.MultiheadAttention(32, 4)), **OPTIONS, **by)


@pytest.mark.parametrize("wrong", [fxmask.WeightMask(0.5), 0.5, "ratio", ["ratio"]], ids=["config", "number", "word", "list"])
def test_options_that_are_no_dict(wrong):
    with pytest.raises(ConfigError, match=r"options: expected a dict such as \{'ratio': 0.5, 'block': \(64, 64\)\}, got "):
        backend_options.parse(wrong)


@pytest.mark.parametrize("option", ["backward", "criterion", "match"])
def test_an_array_where_a_word_is_wanted(option):
    with pytest.raises(ConfigError, match=f"{option}.*: expected "):
        backend_options.parse({option: np.array(["linear", "matmul"])})


def test_patterns_are_shown_their_shape():
    big = lambda module, name: module.weight.shape[0] > 40  # noqa: E731
    model = Attends(nn.MultiheadAttention(32, 4, batch_first=True))
    with pytest.warns(FxMaskWarning) as told:
        compiled(model, **OPTIONS, include=big)(torch.randn(2, 5, 32))
    first, second = (str(w.message) for w in told)
    assert first.startswith("inner.in_proj_weight stays dense")
    assert "masked nothing in a graph: inner.out_proj: not in include; inner.in_proj_weight: its in_proj" in second
    with pytest.warns(FxMaskWarning, match="masked nothing: in_proj_weight: its in_proj is a Parameter .*; out_proj: in exclude"):
        fxmask.apply(nn.MultiheadAttention(32, 4), **OPTIONS, exclude=lambda module, name: not big(module, name))
