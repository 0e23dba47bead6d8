"""What layers give for inputs is no weight in graphs, however it comes to a product; what they make of parameters, or choose among them, is one."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, compiled, graph_of
from torch import nn
from torch.testing import FileCheck
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.errors import FxMaskWarning
from fxmask.passes.finding import made


class Scores(nn.Module):
    """A product of what two layers give, as in attention; one by what a layer makes of a parameter, which is a weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.q, self.k, self.inner, self.w = nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32), nn.Parameter(torch.randn(32, 32))

    def forward(self, x):
        return F.linear(self.q(x), self.k(x).relu()) + F.linear(x, self.inner(self.w))


GIVEN = r"^linear(_2)? stays dense: its weight is computed from an input of the model\.$"


@pytest.mark.parametrize("form", ["training", "no_grad", "checkpoint"])
def test_a_product_of_two_layers_outputs_stays_dense_and_says_so(form):
    model = Scores()
    called = (lambda x: checkpoint(model, x, use_reentrant=False)) if form == "checkpoint" else model
    with torch.set_grad_enabled(form != "no_grad"), pytest.warns(FxMaskWarning, match=GIVEN) as told:
        (text,) = graph_of(called, torch.randn(32, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 4, exactly=True).run(text)
    assert len(told) == 1


def test_so_does_one_in_another_body_than_that_of_the_layer():
    model = Scores()

    def forward(x):
        w = checkpoint(model.k, x, use_reentrant=False)
        return checkpoint(lambda z: F.linear(z, w), x, use_reentrant=False)

    with pytest.warns(FxMaskWarning, match="linear(_1)? stays dense: its weight is computed from an input of the model"):
        (text,) = graph_of(forward, torch.randn(32, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)


def test_so_does_it_in_traces():
    model, x = Scores(), torch.randn(32, 32)
    with pytest.warns(FxMaskWarning, match=GIVEN):
        gm = fxmask.apply(torch.fx.symbolic_trace(model), **OPTIONS, exclude="linear_1")
    assert torch.equal(gm(x), fxmask.apply(Scores(), **OPTIONS)(x))
    with pytest.warns(FxMaskWarning, match=GIVEN):
        gm = fxmask.apply(torch.export.export(model, (x,)).module(), **OPTIONS)
    assert sorted(r["name"] for r in fxmask.explain(gm).rows if r["masked"]) == ["inner", "k", "linear_4", "q"]


@pytest.mark.parametrize("training", [True, False])
def test_an_argument_by_itself_is_no_weight_but_a_view_of_one(training):
    """As what a layer has given before a graph break, or to a part of the model that is compiled alone."""

    class Apart(Scores):
        def forward(self, x):
            q, k, view = self.q(x), self.k(x), self.w[:, :]
            torch._dynamo.graph_break()
            return F.linear(F.linear(q, k), view)

    with torch.set_grad_enabled(training), pytest.warns(FxMaskWarning, match="linear stays dense: its weight is a plain tensor, not a parameter"):
        _, text = graph_of(Apart(), torch.randn(32, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 1, exactly=True).run(text)


class Titles(Scores):
    """Scores inputs by what a layer gives for tokens, which are numbers."""

    def __init__(self):
        super().__init__()
        self.table, self.bag = nn.Embedding(9, 32), nn.EmbeddingBag(9, 32)

    def forward(self, x, tokens):
        return F.linear(self.q(x), self.k(self.table(tokens))) + F.linear(x, self.table(tokens)) + F.linear(x, self.bag(tokens[:, None]))


def test_so_does_a_product_with_what_layers_give_for_tokens():
    x = torch.randn(8, 32), torch.arange(32) % 9
    with pytest.warns(FxMaskWarning, match=r"linear_[234] stays dense: its weight is computed from an input of the model") as told:
        found = compiled(Titles(), **OPTIONS)(*x)
    assert len(told) == 3 and torch.equal(found, fxmask.apply(Titles(), **OPTIONS)(*x))
    with pytest.warns(FxMaskWarning, match=r"linear_[234] stays dense: its weight is computed from an input of the model") as told:
        gm = fxmask.apply(torch.export.export(Titles(), x).module(), **OPTIONS)
    assert len(told) == 3 and torch.equal(found, gm(*x))


def test_so_does_one_inside_of_a_body_that_is_given_the_tokens_or_what_an_input_is_scaled_to():
    model = Titles()

    def forward(x, tokens):
        scaled = x * model.w[0]
        return checkpoint(lambda z, t: F.linear(z, model.table(t)), x, tokens, use_reentrant=False) + checkpoint(lambda z: F.linear(z, scaled) @ z, x)

    with pytest.warns(FxMaskWarning, match=r"its weight is computed from an input of the model|masked nothing") as told:
        compiled(forward, **OPTIONS)(torch.randn(32, 32), torch.arange(32) % 9)
    assert sum("stays dense" in str(w.message) for w in told) == 2


def test_so_does_one_with_what_a_body_looks_up():
    model = Titles()
    with pytest.warns(FxMaskWarning, match="its weight is computed from an input of the model|masked nothing") as told:
        compiled(lambda x, t: F.linear(x, checkpoint(model.table, t, use_reentrant=False)), **OPTIONS)(torch.randn(32, 32), torch.arange(32) % 9)
    assert len(told) == 2


@pytest.mark.parametrize("config", [fxmask.WeightMask(0.5, (8, 16)), fxmask.ActivationPruning(0.5, 8)])
def test_what_a_layer_makes_of_a_weight_is_none_of_that_layer_s_afterwards_either(config):
    class Made(Scores):
        def forward(self, x):
            return x @ self.k(self.q.weight).T + self.inner(x)

    gm = fxmask.apply(torch.export.export(Made(), (torch.randn(4, 32),)).module(), config)
    assert sorted(row["name"] for row in fxmask.explain(gm).rows) == ["inner", "k"]


def test_what_a_linear_makes_of_constants_is_one():
    class Tables(Scores):
        def __init__(self):
            super().__init__()
            self.turn = nn.Buffer(torch.eye(32))

        def forward(self, x):
            return self.q(x) + F.linear(x, F.linear(self.turn, self.turn * 2))

    with pytest.warns(FxMaskWarning, match="^linear_[12] stays dense: its weight is a constant, not a parameter") as told:
        fxmask.apply(torch.export.export(Tables(), (torch.randn(4, 32),)).module(), **OPTIONS)
    assert len(told) == 2


class Shared(Scores):
    """A region that multiplies by what it is handed, which is a weight in some calls alone."""

    def forward(self, x):
        region = torch.compiler.nested_compile_region(lambda z, w: F.linear(z, w))
        made, y = self.made(x), self.q(x)
        for w in made:
            y = region(y, w)
        return y


class WeightAndScores(Shared):
    def made(self, x):
        return [self.w * 2, self.w * 3, self.k(x)]


class Weights(Shared):
    def made(self, x):
        return [self.w * 2, self.w * 3, self.w * 4]


@pytest.mark.parametrize(("cls", "reason"), [(WeightAndScores, "its weight is computed from an input"), (Weights, "it stands in a region that")])
def test_a_region_that_is_handed_other_weights_or_what_is_none_is_dense(cls, reason):
    with pytest.warns(FxMaskWarning, match=f"linear.* stays dense: {reason}"):
        compiled(cls(), **OPTIONS)(torch.randn(32, 32))


def test_a_weight_that_is_made_outside_of_the_body_that_it_is_masked_in_has_a_row():
    class Made(Scores):
        def forward(self, x):
            made = self.w * 2
            return checkpoint(lambda z: F.linear(z, made), x, use_reentrant=False)

    model = Made()
    compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert ("linear", True) in [(r["name"], r["masked"]) for r in fxmask.explain(model).rows]


def test_a_product_that_is_made_a_linear_is_one_for_the_bodies_that_it_is_handed_to():
    def forward(x, w):
        k = x @ w.t()
        return checkpoint(lambda z: F.linear(z, k), x, use_reentrant=False)

    with pytest.warns(FxMaskWarning, match="linear stays dense: its weight is computed from an input"):
        (text,) = graph_of(forward, torch.randn(32, 32), nn.Parameter(torch.randn(32, 32)), **OPTIONS, match="matmul")
    FileCheck().check_count("masked_linear.default(", 1, exactly=True).run(text)


class Chosen(Scores):
    """A condition that is handed what a layer gives, and a weight that comes out of the graph around it."""

    def forward(self, x):
        def product(z, k, w):
            return F.linear(z, k) + F.linear(z, w)

        return torch.cond(x.sum() > 0, product, lambda z, k, w: product(-z, k, w), (x, self.k(x), self.w * 2))


def test_what_a_layer_gives_to_a_body_of_a_trace_is_no_weight_there():
    with pytest.warns(FxMaskWarning, match=r"^(true|false)_graph_0.linear_1 stays dense: its weight is computed from an input of the model\.$") as told:
        gm = fxmask.apply(torch.export.export(Chosen(), (torch.randn(32, 32),)).module(), **OPTIONS)
    assert len(told) == 2 and sum(r["masked"] for r in fxmask.explain(gm).rows) == 3


class Features(Scores):
    """What no Linear gives: of a convolution, and of an input that is scaled."""

    def __init__(self):
        super().__init__()
        self.conv, self.scale = nn.Conv1d(1, 32, 3), nn.Parameter(torch.ones(32))

    def forward(self, x):
        return F.linear(x, self.conv(x[:, None]).mean(2)) + F.linear(x, x * self.scale) + F.linear(x, self.w * x.mean())


def test_a_matrix_of_an_input_is_no_weight_whatever_has_made_it_but_a_number_scales_one():
    model, x = Features(), torch.randn(32, 32)
    with pytest.warns(FxMaskWarning, match=r"^linear(_1)? stays dense: its weight is computed from an input of the model\.$") as told:
        (text,) = graph_of(model, x, **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 1, exactly=True).run(text)
    with pytest.warns(FxMaskWarning, match=r"^linear(_1)? stays dense: its weight is computed from an input of the model\.$") as also:
        gm = fxmask.apply(torch.export.export(model, (x,)).module(), **OPTIONS)
    assert len(told) == len(also) == 2 and [r["masked"] for r in fxmask.explain(gm).rows] == [False, False, True]


ALIKE = {
    "type_as": lambda w, h: w.type_as(h),
    "to": lambda w, h: w.to(h),
    "view_as": lambda w, h: w.view_as(h),
    "ones_like": lambda w, h: w * torch.ones_like(h),
    "new_ones": lambda w, h: w * h.new_ones(32, 1),
    "its own, by way of complex numbers": lambda w, h: torch.fft.irfft(torch.fft.rfft(w)),
}


@pytest.mark.parametrize("name", ALIKE)
@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_a_weight_that_is_made_to_look_as_what_a_layer_gives_is_one(name):
    class Looks(Scores):
        def forward(self, x):
            h = self.q(x)
            return F.linear(h, ALIKE[name](self.w, h))

    (text,) = graph_of(Looks(), torch.randn(32, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 2, exactly=True).run(text)
    gm = fxmask.apply(torch.export.export(Looks(), (torch.randn(32, 32),)).module(), **OPTIONS)
    assert gm.code.count("fxmask.masked_linear.default(") == 2


FILLED = {
    "rows": lambda w, z: z.__setitem__(slice(16), w[:16]),
    "a view": lambda w, z: z[:16].copy_(w[:16] * 2),
    "all": lambda w, z: z.copy_(w),
}


@pytest.mark.parametrize("fill", FILLED)
@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_a_weight_that_is_written_into_what_looks_like_it_is_one(fill):
    class Fills(Scores):
        def forward(self, x):
            z = torch.zeros_like(self.w)
            FILLED[fill](self.w, z)
            return F.linear(self.q(x), z)

    (text,) = graph_of(Fills(), torch.randn(4, 32), **OPTIONS)
    FileCheck().check_count("masked_linear.default", 2, exactly=True).run(text)
    gm = fxmask.apply(torch.export.export(Fills(), (torch.randn(4, 32),)).module(), **OPTIONS)
    assert gm.code.count("fxmask.masked_linear.default(") == 2


class Routed(nn.Module):
    """The matrix that a router chooses for an input: the layer gives its number, and none of its values."""

    def __init__(self):
        super().__init__()
        self.router, self.experts = nn.Linear(32, 4), nn.Parameter(torch.randn(4, 32, 32))

    def forward(self, x):
        return F.linear(x, self.experts.index_select(0, self.router(x).mean(0).argmax(0, keepdim=True))[0])


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_a_weight_that_a_layer_chooses_is_one():
    model, x = Routed(), torch.randn(8, 32)
    (text,) = graph_of(model, x, **OPTIONS)
    FileCheck().check_count("masked_linear.default", 1, exactly=True).run(text)
    gm = fxmask.apply(torch.export.export(model, (x,)).module(), **OPTIONS)
    assert [r["masked"] for r in fxmask.explain(gm).rows] == [False, True]


class OfVectors(Scores):
    """Matrices of vectors, and of bits and whole numbers that choose nothing; a vector that scales a weight, whatever its axes, makes none."""

    def forward(self, x, numbers):
        made = self.w + torch.outer(x[0], x[1]), torch.stack([row * self.w[0] for row in x]), (x.mean(0) @ self.w.repeat(1, 32)).view(32, 32)
        made += (x > 0).to(x.dtype) * self.w[0], F.one_hot(numbers, 32).to(x.dtype) * self.w[0], (9 * x).to(torch.int8).to(x.dtype) * self.w[0]
        y = F.linear(x, self.w * x.mean(0)) + F.linear(x, self.w * x.mean(0, keepdim=True))
        for w in made:
            y = y + F.linear(x, w)
        return y


def test_a_matrix_that_is_made_of_an_inputs_vectors_or_whole_numbers_is_no_weight():
    model, x = OfVectors(), (torch.randn(32, 32), torch.arange(32))
    with pytest.warns(FxMaskWarning, match=r"^linear_[2-7] stays dense: its weight is computed from an input of the model\.$") as told:
        (text,) = graph_of(model, *x, **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 2, exactly=True).run(text)
    with pytest.warns(FxMaskWarning, match=r"^linear_[2-7] stays dense: its weight is computed from an input of the model\.$") as also:
        gm = fxmask.apply(torch.export.export(model, x).module(), **OPTIONS)
    assert len(told) == len(also) == 6 and sum(r["masked"] for r in fxmask.explain(gm).rows) == 2


def test_whole_numbers_and_bits_that_a_call_is_given_are_no_weight_of_a_trace():
    class Edges(Scores):
        def forward(self, x, edges):
            return F.linear(self.q(x), edges.to(x.dtype)) + F.linear(x, (edges > 0).to(x.dtype))

    with pytest.warns(FxMaskWarning, match=r"^linear_[12] stays dense: its weight is computed from an input of the model\.$") as told:
        fxmask.apply(torch.export.export(Edges(), (torch.randn(32, 32), torch.ones(32, 32, dtype=torch.long))).module(), **OPTIONS)
    assert len(told) == 2


class Batch(NamedTuple):
    x: torch.Tensor


@dataclasses.dataclass
class Record:
    x: torch.Tensor


@pytest.mark.parametrize("kind", [Batch, Record])
def test_what_an_object_holds_that_a_call_is_given_is_an_input(kind):
    class OfBatch(Scores):
        def forward(self, batch):
            return F.linear(self.q(batch.x), self.k(batch.x)) + F.linear(batch.x, batch.x * self.w[0])

    with pytest.warns(FxMaskWarning, match=r"^linear_[23] stays dense: its weight is computed from an input of the model\.$") as told:
        (text,) = graph_of(OfBatch(), kind(torch.randn(32, 32)), **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 2, exactly=True).run(text)
    assert len(told) == 2


def test_what_an_earlier_graph_has_left_in_an_object_is_no_weight():
    class Leaves(Scores):
        def forward(self, record):
            record.x = self.k(record.x)
            torch._dynamo.graph_break()
            return F.linear(self.q(record.x), record.x)

    with pytest.warns(FxMaskWarning, match="^x stays dense: its weight is a plain tensor, not a parameter"):
        _, text = graph_of(Leaves(), Record(torch.randn(32, 32)), **OPTIONS)
    FileCheck().check_count("masked_linear.default(", 1, exactly=True).run(text)


def test_what_many_layers_are_given_is_walked_once(monkeypatch):
    """Each layer's own inputs again would be a quadratic walk for one weight, minutes for a deep model."""
    gm = torch.fx.symbolic_trace(nn.Sequential(nn.Embedding(9, 32), *(nn.Linear(32, 32) for _ in range(50))))
    walked, values_from = [], made._values_from
    monkeypatch.setattr(made, "_values_from", lambda node: walked.append(node) or values_from(node))
    *_, last, _ = gm.graph.nodes
    assert [n.op for n in made.inputs_of_layers(last, {})] == ["placeholder"]
    assert len(walked) <= 2 * len(gm.graph.nodes)
