"""Rows of `fxmask.explain` for weights that compiled graphs compute, and names of compiled models."""

import copy

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import Wrap, compiled, steps_of
from sample_models import mlp
from torch import nn

import fxmask

OPTIONS = {"ratio": 0.6, "block": (16, 32)}


class Scaled(nn.Module):
    """A weight that the forward computes, in a block of its own, so that its name is no node's."""

    def __init__(self, n=40, k=72):
        super().__init__()
        self.w, self.g = nn.Parameter(torch.randn(n, k)), nn.Parameter(torch.ones(n, 1))

    def forward(self, x):
        return F.linear(x, self.w * self.g)


class Computed(nn.Module):
    def __init__(self, norm=nn.utils.parametrizations.weight_norm):
        super().__init__()
        torch.manual_seed(0)
        self.block, self.normed, self.plain = Scaled(), norm(nn.Linear(40, 104)), nn.Linear(104, 40)

    def forward(self, x):
        return self.plain(self.normed(self.block(x)))


def rows_of(model):
    return {row["name"]: row for row in fxmask.explain(model).rows}


@pytest.mark.parametrize("norm", [nn.utils.parametrizations.weight_norm, nn.utils.weight_norm])
@pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated")
def test_weights_that_a_graph_computes(norm):
    model, applied, x = Computed(norm), Computed(norm), torch.randn(4, 72)
    call = compiled(model, **OPTIONS)
    assert set(rows_of(model)) == {"normed", "plain"}
    call(x)
    report, rows, expected = fxmask.explain(model), rows_of(model), rows_of(fxmask.apply(applied, **OPTIONS))
    same = ("masked", "shape", "blocks", "target_ratio", "achieved_ratio")
    assert {n: [rows[n][k] for k in same] for n in ("normed", "plain")} == {n: [expected[n][k] for k in same] for n in ("normed", "plain")}
    row = rows["block"]
    assert set(rows) == {"block", "normed", "plain"} and row["masked"] and row["shape"] == "40x72" and row["blocks"] == 9 and row["achieved_ratio"] is None
    assert row["reason"] == "selected in graphs of backend='fxmask' alone; the graph computes its weight" and row["why"] == "the graph computes its weight"
    assert report.summary["linears"] == 3 and report.summary["weight elements in linears"] == 2 * 104 * 40
    health = [{row["name"]: row for row in fxmask.explain(m, health=True).rows} for m in (model, applied)]
    for n in ("normed", "plain"):
        assert all(health[0][n][k] == health[1][n][k] is not None for k in ("kept_norm_fraction", "dead_rows", "dead_cols"))
    fxmask.apply(model, **OPTIONS)
    assert set(rows_of(model)) == {"normed", "plain"}  # what graphs did is past


def test_the_last_graph_says_what_becomes_of_a_computed_weight():
    model, x = Computed(), torch.randn(4, 72)
    half, none = compiled(model, **OPTIONS), compiled(model, **OPTIONS, exclude=["block", "normed"])
    for call, masked in ((half, True), (none, False), (half, True)):
        call(x)
        rows = rows_of(model)
        assert rows["block"]["masked"] is masked and rows["normed"]["masked"] is masked and rows["plain"]["masked"]
    none(x)
    assert rows_of(model)["normed"]["reason"] == "in exclude (backend='fxmask')"


def test_weights_of_layers_that_share_a_graph_and_of_other_models():
    class Three(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(Scaled(32, 32) for _ in range(3))

        def forward(self, x):
            for layer in self.layers:
                torch._dynamo.graph_break()
                x = layer(x)
            return x

    model = Three()
    other = copy.deepcopy(model)
    compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert [row["masked"] for row in fxmask.explain(model).rows] == [True] * 3
    assert not fxmask.explain(other).rows


def test_a_weight_that_is_made_of_the_input_too():
    """It is one weight, however many inputs there were."""
    class Moved(Scaled):
        def forward(self, x):
            return F.linear(x, self.w * x.mean())

    model = Wrap(Moved())
    call = compiled(model, **OPTIONS)
    for _ in range(2):
        call(torch.randn(4, 72))
    assert [row["masked"] for row in fxmask.explain(model).rows] == [True]


def test_a_weight_that_is_made_of_two_parts_is_in_each():
    class Apart(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Scaled(), Scaled()

        def forward(self, x):
            return F.linear(x, self.a.w * self.b.g)

    model = Apart()
    call = compiled(model, **OPTIONS)
    call(torch.randn(4, 72))
    assert [[row["masked"] for row in fxmask.explain(part).rows] for part in (model.a, model.b)] == [[True], [True]]


class Cast(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight.to(x.dtype))


class Owner(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        return F.linear(x, self.fc.weight.to(x.dtype))


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize(("made", "name"), [(lambda: Cast(64, 64), "inner.0"), (Owner, "inner.0.fc")], ids=["by itself", "by its owner"])
def test_a_layer_whose_weight_is_cast_has_one_row_and_was_met(made, name):
    model = Wrap(nn.Sequential(made(), nn.Linear(64, 64)))
    call = compiled(model, **OPTIONS, require=True)
    steps_of(model, call, 2)
    rows = fxmask.explain(model).rows
    assert [(row["name"], row["masked"]) for row in rows] == [(name, True), ("inner.1", True)]
    assert rows[0]["reason"].endswith("; the graph computes its weight")
    torch._dynamo.reset()
    compiled(model, **OPTIONS, exclude="inner.0*")(torch.randn(4, 64))
    assert rows_of(model)[name]["reason"] == "in exclude (backend='fxmask'); the graph computes its weight"


class Held(nn.Module):
    def __init__(self, fc, call):
        super().__init__()
        self.fc, self.call = fc, call

    def forward(self, x):
        return self.call(self.fc, x)


def normed(n, k):
    return nn.utils.parametrizations.weight_norm(nn.Linear(n, k))


ROWS = {
    "turned": (lambda: nn.Linear(64, 32), lambda fc, x: F.linear(x, fc.weight.t()), {"fc": "", "linear": "64x32"}),
    "made and turned": (lambda: normed(64, 32), lambda fc, x: F.linear(x, fc.weight.t()), {"fc": "", "linear": "64x32"}),
    "beside its call": (lambda: nn.Linear(32, 32), lambda fc, x: fc(x) + F.linear(x, fc.weight * 2), {"fc": "32x32", "linear_1": "32x32"}),
    "another's": (lambda: nn.ModuleList(nn.Linear(32, 32) for _ in "ab"), lambda fc, x: F.linear(x, fc[1].weight * 2), {"fc.0": "", "fc.1": "32x32"}),
    "another's that is made": (lambda: nn.ModuleList(normed(32, 32) for _ in "ab"), lambda fc, x: fc[1](x), {"fc.0": "", "fc.1": "32x32"}),
}


@pytest.mark.parametrize(("made", "call", "expected"), ROWS.values(), ids=ROWS)
def test_a_layer_takes_no_row_of_another_weight(made, call, expected):
    """Of one of another shape, one beside its own, or one that other parameters make."""
    model = Held(made(), call)
    compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert {name: row["shape"] if row["masked"] else "" for name, row in rows_of(model).items()} == expected


def test_several_weights_of_one_module_are_told_apart():
    class Two(Scaled):
        def forward(self, x):
            return F.linear(F.linear(x, self.w * self.g), (self.w + 1).t())

    model = Wrap(Two())
    call = compiled(model, **OPTIONS)
    call(torch.randn(4, 72))
    names = [row["name"] for row in fxmask.explain(model).rows]
    assert len(set(names)) == 2
    torch._dynamo.reset()
    compiled(model, **OPTIONS, exclude=names[0])(torch.randn(4, 72))  # they are names for patterns, too
    assert {n: rows_of(model)[n]["masked"] for n in names} == {names[0]: False, names[1]: True}


@pytest.mark.parametrize("wrap", [lambda m: m, nn.Sequential, lambda m: nn.ModuleDict({"a_orig_mod": m})])
def test_a_compiled_model_has_the_names_of_the_model(wrap):
    model = fxmask.apply(mlp(), ratio=0.5, block=(16, 16))
    expected = list(rows_of(wrap(model)))
    found = fxmask.explain(wrap(torch.compile(model)))
    assert [row["name"] for row in found.rows] == expected
    assert rows_of(torch.compile(model[0])).keys() == {"(the model itself)"}


def test_names_that_look_like_the_compilers_stay():
    model = nn.ModuleDict({"a_orig_mod": nn.Linear(64, 64), "_orig_mods": nn.Linear(64, 64), "b_orig_mod": nn.Sequential(nn.Linear(64, 64))})
    assert list(rows_of(fxmask.apply(model, ratio=0.5, block=(16, 16)))) == ["a_orig_mod", "_orig_mods", "b_orig_mod.0"]


def test_notes_of_a_compiled_model_have_its_names():
    model = fxmask.apply(mlp(), ratio=0.5, block=(16, 16))
    model[0].weight.grad = torch.ones_like(model[0].weight)
    notes = [fxmask.explain(m).notes for m in (model, torch.compile(model))]
    assert notes[0] == notes[1] and any("have not run" in n or "has not run" in n for n in notes[0])


class OfNoLayer(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc, self.p = nn.Linear(72, 72), nn.Parameter(torch.randn(40, 72))

    def forward(self, x):
        return F.linear(self.fc(x), self.p)


def test_a_parameter_of_no_layer_has_signs_of_health_too():
    model = OfNoLayer()
    compiled(model, **OPTIONS)(torch.randn(4, 72))
    applied = fxmask.apply(nn.Sequential(nn.Linear(72, 40)), **OPTIONS)
    with torch.no_grad():
        applied[0].weight.copy_(model.p)
    rows = {row["name"]: row for row in fxmask.explain(model, health=True).rows}
    assert rows["p"]["kept_norm_fraction"] == fxmask.explain(applied, health=True).rows[0]["kept_norm_fraction"]


class Experts(nn.Module):
    """Multiplies by an expert's weight that the graph looks up, and by one that comes from the graph before."""

    def __init__(self):
        super().__init__()
        self.stacked, self.fixed, self.unused = (nn.Parameter(torch.randn(3, 48, 48)) for _ in range(3))

    def forward(self, x):
        y, chosen = F.linear(x, self.fixed[1]), self.stacked[2]
        torch._dynamo.graph_break()
        return F.linear(y, chosen)


def test_a_part_of_a_parameter_has_a_row_and_is_reached_whichever_graph_looks_it_up():
    model = compiled(Experts(), ratio=0.5, block=(16, 16))
    model(torch.randn(4, 48)).sum().backward()
    report = fxmask.explain(model)
    assert sorted((r["name"], r["masked"], r["shape"]) for r in report.rows) == [("linear", True, "48x48"), ("y", True, "48x48")]
    assert [int(p.grad.ne(0).sum((1, 2)).max()) for p in (model.stacked, model.fixed)] == [5 * 256] * 2
    (note,) = (n for n in report.notes if "masks do not reach" in n)
    assert "unused" in note and "stacked" not in note and "fixed" not in note


class Looked(nn.Module):
    """Looks up all experts that it uses before a graph break, into a list, a dictionary or a tuple."""

    def __init__(self, kind):
        super().__init__()
        self.first, self.stacked, self.kind = nn.Linear(48, 48), nn.Parameter(torch.randn(3, 48, 48)), kind

    def forward(self, x):
        x = self.first(x)
        found = {"list": [self.stacked[0], self.stacked[2]], "dict": {0: self.stacked[0], 1: self.stacked[2]}, "tuple": self.stacked.unbind()[::2]}[self.kind]
        torch._dynamo.graph_break()
        return F.linear(F.linear(x, found[0]), found[1])


@pytest.mark.parametrize("kind", ["list", "dict", "tuple"])
def test_parts_of_a_parameter_that_a_collection_holds_have_rows(kind):
    model = compiled(Looked(kind), ratio=0.5, block=(16, 16))
    model(torch.randn(4, 48)).sum().backward()
    report = fxmask.explain(model)
    assert [(r["masked"], r["shape"]) for r in report.rows] == [(True, "48x48")] * 3 and not any("masks do not reach" in n for n in report.notes)


class InDoubles(nn.Linear):
    def forward(self, x):
        return F.linear(x.double(), self.weight.double(), self.bias.double()).float()


@pytest.mark.parametrize("made", [lambda: normed(64, 64), lambda: InDoubles(64, 64)], ids=["of two", "a cast"])
@pytest.mark.filterwarnings("ignore:.* stays dense:fxmask.errors.FxMaskWarning")
def test_a_computed_weight_has_one_row_where_apply_has_changed_inputs_of_others(made):
    model = fxmask.apply(nn.Sequential(normed(64, 64), made()), fxmask.ActivationPruning(0.5, block=16), include=["0"])
    call = compiled(model, ratio=0.5, block=(16, 16))
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            call(torch.randn(4, 64))
        assert [(r["name"], r["masked"]) for r in fxmask.explain(call).rows] == [("0", False), ("1", True)]
