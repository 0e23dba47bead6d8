"""What `fxmask.explain` says of a model that the backend compiles: its graphs, as far as they have run."""

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import Wrap, compiled, failing, graph_of
from sample_models import mlp
from torch import nn

import fxmask
from fxmask.errors import StateError

OPTIONS = {"ratio": 0.5, "block": (16, 16)}


def rows_of(model):
    return {row["name"].removeprefix("_orig_mod."): row for row in fxmask.explain(model).rows}


def test_before_and_after_the_first_call():
    model = Wrap(mlp())
    call = compiled(model, **OPTIONS)
    before = rows_of(model)
    assert not any(row["masked"] for row in before.values())
    call(torch.randn(4, 64)).sum().backward()
    after = rows_of(model)
    assert after.keys() == before.keys() and all(row["masked"] for row in after.values() if "backend='fxmask' alone" in row["reason"])
    assert after["inner.0"]["masked"] and after["inner.0"]["block"] == "16x16" and after["inner.0"]["backward"] == "masked"


def test_a_model_that_was_not_called_says_so():
    report = fxmask.explain(torch.compile(Wrap(mlp()), backend="fxmask", options=OPTIONS))
    assert {row["reason"] for row in report.rows} == {"no graph of backend='fxmask' that has run is known to mask it"}
    assert any("other code is dense" in note for note in report.notes)


@pytest.mark.parametrize("criterion", ["fro", "random"])
def test_rows_are_those_of_apply(criterion):
    """Blocks at the edges are smaller than the others, so the achieved ratio tells which blocks a mask keeps."""
    torch.manual_seed(0)
    options = {"ratio": 0.6, "block": (16, 32), "criterion": criterion, "seed": 3}
    plain, masked = Wrap(mlp(sizes=(72, 104, 40))), Wrap(mlp(sizes=(72, 104, 40)))
    masked.load_state_dict(plain.state_dict())
    fxmask.apply(masked, **options)
    compiled(plain, **options)(torch.randn(4, 72))
    by_graphs, by_apply = rows_of(plain), rows_of(masked)
    same = ("masked", "shape", "block", "blocks", "target_ratio", "final_ratio", "achieved_ratio", "backward", "ranks_by", "mask_age", "activations")
    assert [[row[k] for k in same] for row in by_graphs.values()] == [[row[k] for k in same] for row in by_apply.values()]
    assert by_graphs.keys() == by_apply.keys() and all(row["achieved_ratio"] % 1 for row in by_graphs.values())


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.small, self.idle = nn.Linear(64, 64), nn.Linear(48, 4), nn.Linear(64, 64)
        self.bare = nn.Parameter(torch.randn(48, 64))
        self.attention = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        x = self.attention(x, x, x, need_weights=False)[0]
        return self.small(F.linear(self.first(x), self.bare))


def test_calls_without_a_layer_and_layers_that_stay_dense():
    model = Mixed()
    compiled(model, **OPTIONS, exclude=["first"])(torch.randn(2, 8, 64))
    report = fxmask.explain(model)
    rows = {row["name"]: row for row in report.rows}
    assert {name for name, row in rows.items() if row["masked"]} == {"bare", "attention.out_proj"}
    assert rows["attention.out_proj"]["why"] == "its reader takes W∘M as an argument"
    assert rows["first"]["reason"] == "in exclude (backend='fxmask')" and rows["small"]["reason"].startswith("default exclusion")
    assert rows["attention.in_proj_weight"]["reason"].startswith("its in_proj is a Parameter and no Linear")
    assert rows["idle"]["reason"].startswith("no graph of backend=")
    kept = sum(p.numel() for p in (model.bare, model.attention.out_proj.weight)) / 2
    whole = sum(m.weight.numel() for m in (model.first, model.small, model.idle)) + model.attention.in_proj_weight.numel()
    assert report.summary["of them in kept blocks"] == kept + whole and report.summary["masked"] == 2


def test_the_last_graph_that_ran_is_the_one_that_counts():
    model, x = Wrap(mlp()), torch.randn(4, 64)
    half, most = compiled(model, **OPTIONS), compiled(model, ratio=0.75, block=(16, 16), exclude=["inner.2"])
    half(x)
    assert rows_of(model)["inner.2"]["target_ratio"] == 0.5
    torch._dynamo.reset()
    most(x)
    assert rows_of(model)["inner.0"]["target_ratio"] == 0.75
    assert not rows_of(model)["inner.2"]["masked"] and rows_of(model)["inner.2"]["reason"] == "in exclude (backend='fxmask')"


def test_layers_that_share_a_graph():
    class Four(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Wrap(nn.Linear(64, 64)) for _ in range(4))

        def forward(self, x):
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return x

    model, graphs = Four(), []

    def inner(gm, inputs):
        graphs.append(gm)
        return gm.forward

    compiled(model, inner, **OPTIONS)(torch.randn(4, 64))
    assert len(graphs) < 4 and [row["masked"] for row in rows_of(model).values()] == [True] * 4


def test_a_weight_with_a_dense_use():
    """Attention reads its packed weight, and the model calls it, too."""

    class Both(nn.Module):
        def __init__(self, first):
            super().__init__()
            self.attention, self.first = nn.MultiheadAttention(64, 4), first

        def forward(self, x):
            call = lambda: F.linear(x, self.attention.in_proj_weight)[..., :64]  # noqa: E731
            y = call() if self.first else 0
            y = y + self.attention(x, x, x, need_weights=False)[0]
            return y if self.first else y + call()

    for first in (True, False):
        torch._dynamo.reset()
        model, x = Both(first), torch.randn(4, 2, 64)
        (text,) = graph_of(model, x, **OPTIONS)
        assert text.count("masked_linear.default") == 1
        compiled(model, **OPTIONS)(x)
        row = rows_of(model)["attention.in_proj_weight"]
        assert row["masked"] and "in some of its uses; in others: its in_proj is a Parameter" in row["reason"]
        assert fxmask.explain(model).summary["of them in kept blocks"] == 3 * 64 * 64 + 64 * 64 / 2
        torch._dynamo.reset()
        assert "expected attention.in_proj_weight to be masked" in str(failing(model, x, **OPTIONS, require=True))


@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")
def test_weights_that_have_no_elements_or_another_shape_since():
    model = Wrap(nn.Linear(0, 32))
    compiled(model, **OPTIONS, exclude=())(torch.randn(4, 0))
    assert rows_of(model)["inner"]["achieved_ratio"] is None
    model = Wrap(nn.Linear(32, 32))
    compiled(model, **OPTIONS)(torch.randn(4, 32))
    model.inner.weight.data = torch.empty(0)
    assert rows_of(model)["inner"]["reason"].endswith("given another shape since")


def test_meta_weights_have_no_ratio():
    with torch.device("meta"):
        model = Wrap(nn.Linear(32, 32))
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    row = rows_of(model)["inner"]
    assert row["masked"] and row["achieved_ratio"] is None


def test_the_graph_that_ran_last_counts_also_where_it_is_dense():
    model, x = Wrap(mlp()), torch.randn(4, 64)
    a, b = compiled(model, **OPTIONS), compiled(model, **OPTIONS, exclude=["inner.0"])
    for call, masked in ((a, True), (b, False), (a, True), (b, False)):
        call(x)
        assert rows_of(model)["inner.0"]["masked"] is masked


def test_apply_ends_what_graphs_did():
    model = Wrap(mlp())
    compiled(model, **OPTIONS)(torch.randn(4, 64))
    fxmask.apply(model, **OPTIONS)
    assert {row["reason"] for row in rows_of(model).values()} <= {"selected", "default exclusion: min(out, in) = 10 < 16"}
    fxmask.finalize(model)
    assert not any(row["masked"] or "graphs" in row["reason"] for row in rows_of(model).values())


def test_a_model_that_apply_has_masked_in_part():
    model = Wrap(mlp())
    fxmask.apply(model.inner[0], **OPTIONS)
    call = torch.compile(model, backend="fxmask", options={"inner": "eager"})
    call(torch.randn(4, 64))
    rows = rows_of(call)
    assert rows["inner.0"]["masked"] and rows["inner.2"]["reason"] == "no graph of backend='fxmask' that has run is known to mask it"


def test_products_are_no_linears():
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.fc, self.scale = nn.Linear(64, 64), nn.Parameter(torch.ones(64))

        def forward(self, x):
            return self.fc(x) * self.scale

    model = Scaled()
    compiled(model, activations={"ratio": 0.5, "block": 4, "affine": True})(torch.randn(8, 64)).sum().backward()
    report = fxmask.explain(model)
    assert report.summary["linears"] == 1 and report.summary["products with parameters"] == 1
    assert [row["activations"] for row in report.rows] == ["50 % of 1x4"] * 2 and not any(row["masked"] for row in report.rows)


def test_health_of_masks_in_graphs():
    torch.manual_seed(0)
    model, applied = Wrap(mlp()), Wrap(mlp())
    compiled(model, **OPTIONS)(torch.randn(4, 64))
    fxmask.apply(applied, **OPTIONS)
    ours, theirs = (fxmask.explain(m, health=True).rows[0] for m in (model, applied))
    assert [ours[k] for k in ("kept_norm_fraction", "dead_rows", "dead_cols")] == [theirs[k] for k in ("kept_norm_fraction", "dead_rows", "dead_cols")]
    assert 0.5 < ours["kept_norm_fraction"] < 1


def test_a_weight_whose_memory_was_freed_since():
    model = Wrap(mlp())
    compiled(model, **OPTIONS)(torch.randn(4, 64))
    model.inner[0].weight.data.untyped_storage().resize_(0)
    row = rows_of(model)["inner.0"]
    assert row["masked"] and row["reason"].startswith("selected in graphs of backend='fxmask' alone; a wrapper has flattened or freed its weight")
    assert row["achieved_ratio"] is None
    assert fxmask.explain(model).summary["of them under masks that nobody knows here"] == model.inner[0].weight.numel()


def test_pruned_inputs():
    model = Wrap(mlp())
    compiled(model, activations={"ratio": 0.5, "block": 4})(torch.randn(4, 64)).sum().backward()
    row = rows_of(model)["inner.0"]
    assert not row["masked"] and row["reason"] == "not masked; input pruned in graphs of backend='fxmask' alone" and row["activations"] == "50 % of 1x4"
    torch._dynamo.reset()
    compiled(model, **OPTIONS, activations={"ratio": 0.5, "block": 4})(torch.randn(4, 64)).sum().backward()
    row = rows_of(model)["inner.0"]
    assert row["masked"] and row["activations"] == "50 % of 1x4"


def test_masks_point_to_it():
    with pytest.raises(StateError, match=r"fxmask\.explain lists what graphs mask"):
        fxmask.masks(torch.compile(mlp(), backend="fxmask"))
