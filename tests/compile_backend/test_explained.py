"""What `fxmask.explain` says of a model that the backend compiles: its graphs, as far as they have run."""

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import Wrap, compiled
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
    assert {row["reason"] for row in report.rows} == {"dense so far: no graph of backend='fxmask' has run with it"}
    assert any("eager code is dense" in note for note in report.notes)


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
    assert rows["idle"]["reason"].startswith("fxmask.apply has not seen it")
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
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Wrap(nn.Linear(64, 64)) for _ in range(2))

        def forward(self, x):
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return x

    model = Two()
    compiled(model, **OPTIONS)(torch.randn(4, 64))
    assert [row["masked"] for row in rows_of(model).values()] == [True, True]


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
