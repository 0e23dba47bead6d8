"""Ways to apply masks that once went wrong silently: layers that were missed or masked twice, options that were misread."""

import copy
import warnings

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sample_models import best_blocks, mlp, same_snapshot, snapshot
from torch import fx, nn
from unit.formed_models import FORMS, X, formed

import fxmask
from fxmask.errors import ConfigError, StateError, UnsupportedError
from fxmask.passes.graphs.trace_check import frozen_randomness


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
    with pytest.raises(ConfigError, match=r"expected a finite number in .*got 2"):
        fxmask.apply(model, include="2", ratio=2)
    assert same_snapshot(before, snapshot(model)) and torch.equal(model(X), y)
    fxmask.apply(model, include="2", ratio=0.75)
    assert sorted(fxmask.masks(model)) == ["0.weight", "2.weight"]


def test_a_symbolic_trace_of_a_masked_model_raises():
    for model in (fxmask.apply(mlp()), fxmask.apply(fx.symbolic_trace(mlp()))):
        with pytest.raises(UnsupportedError, match="would freeze its masks"):
            fx.symbolic_trace(model)


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
    assert [(row["name"], row["masked"]) for row in fxmask.explain(model).rows] == [("fc", True)] and "fxmask" not in model.body.code  # swapped, not rewritten


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


@pytest.mark.parametrize("train", [True, False])
@pytest.mark.parametrize("drops", [nn.Dropout(0.5, inplace=True), nn.AlphaDropout(0.5, inplace=True), nn.FeatureAlphaDropout(0.5), nn.RReLU()], ids=str)
def test_an_export_says_in_which_mode_it_drops(drops, train):
    gm = torch.export.export(nn.Sequential(nn.Linear(64, 64), drops).train(train), (X,)).module()
    assert [how.partition(" ")[2] for how in frozen_randomness(gm)] == [f"(as in {'train' if train else 'eval'})"]


def test_what_drops_nothing_in_any_mode_is_not_frozen():
    model = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.0, inplace=True))
    assert frozen_randomness(torch.export.export(model, (X,)).module()) == []


def test_torchs_own_functions_are_seen_in_a_symbolic_trace():
    class Model(nn.Module):
        def forward(self, x):
            return torch.dropout_(torch.alpha_dropout(torch.rrelu(x, training=True), 0.5, False) + 0, 0.5, True)

    assert frozen_randomness(fx.symbolic_trace(Model())) == ["rrelu (as in train)", "alpha_dropout (as in eval)", "dropout_ (as in train)"]


def test_what_draws_by_itself_is_seen_in_a_symbolic_trace():
    class Model(nn.Module):
        def forward(self, x):
            noise = torch.empty_like(x).exponential_() + torch.normal(x, 1.0)
            return F.gumbel_softmax(noise), noise.softmax(-1).multinomial(2), torch.randint_like(x, 5)

    names = ("exponential_", "normal", "gumbel_softmax", "multinomial", "randint_like")
    assert frozen_randomness(fx.symbolic_trace(Model())) == [f"{name} (drawn always)" for name in names]


def test_a_warning_made_an_error_changes_nothing():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128))
    before = snapshot(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(fxmask.FxMaskWarning, match="no block can be masked at this ratio, so these stay dense: 0 "):
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


def test_a_reader_tied_to_a_plain_linear():
    class TwoUsers(nn.Module):
        def __init__(self):
            super().__init__()
            self.attn, self.fc = nn.MultiheadAttention(32, 4, bias=False), nn.Linear(32, 32, bias=False)
            self.fc.weight = self.attn.out_proj.weight

    assert sorted(fxmask.masks(fxmask.apply(TwoUsers()))) == ["attn.out_proj.weight", "fc.weight"]
