"""Bodies of checkpoints, conditions and regions: transposes that Dynamo computes in front of them, and other weights that they are given."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, compiled, failing
from torch import nn
from torch._higher_order_ops.while_loop import while_loop
from torch._higher_order_ops.wrap import wrap, wrap_activation_checkpoint
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask.errors import FxMaskWarning
from fxmask.passes.infra import Pass


def saved(f, *args):
    return checkpoint(f, *args, use_reentrant=False)


BODIES = {
    "T": lambda m, x: saved(lambda t: t @ m.a.T, x),
    "mT": lambda m, x: saved(lambda t: t @ m.a.mT, x),
    "in a body of a body": lambda m, x: saved(lambda t: saved(lambda u: u @ m.a.T, t), x),
    "of two branches, the first": lambda m, x: torch.cond(x.sum() > -1e9, lambda t: t @ m.a.T, lambda t: t @ m.a.T * 2, (x,)),
    "of two branches, the second": lambda m, x: torch.cond(x.sum() > 1e9, lambda t: t @ m.a.T * 2, lambda t: t @ m.a.T, (x,)),
    "behind the body, too": lambda m, x: saved(lambda t: t @ m.a.T, x) + 0 * m.a.T[:1],
    "computed outside": lambda m, x: (lambda turned: saved(lambda t: t @ turned, x))(m.a.transpose(0, 1)),
}


class InBody(nn.Module):
    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.made = nn.Parameter(torch.randn(32, 32)), forward

    def forward(self, x):
        return self.made(self, x)


@pytest.mark.parametrize("how", BODIES)
def test_a_transpose_that_dynamo_takes_out_of_a_body_is_followed(how):
    x, found = torch.randn(4, 32), []
    for make in (lambda m, x: x @ m.a.t(), BODIES[how]):
        model = InBody(make)
        y = compiled(model, **OPTIONS, match="matmul", require=True)(x)
        y.square().sum().backward()
        found.append((y, model.a.grad))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("read", [saved, lambda f, x: f(x)], ids=["in a body", "plain"])
def test_a_transpose_without_gradient_gives_none_to_its_parameter(read, off):
    def forward(m, x):
        with off():
            turned = m.a.T
        return read(lambda t: t @ turned, x) + x @ m.a.T

    x, found = torch.randn(4, 32), []
    for compile_it in (lambda m: torch.compile(m, backend="eager"), lambda m: compiled(m, ratio=0.0, match="matmul")):
        model = InBody(forward)
        compile_it(model)(x).square().sum().backward()
        found.append(model.a.grad)
    torch.testing.assert_close(found[1], found[0])


def test_a_product_without_gradient_is_masked_all_the_same():
    def forward(m, x):
        with torch.no_grad():
            return saved(lambda t: t @ m.a.T, x) + x @ m.a.T

    with torch.no_grad():
        expected = compiled(InBody(lambda m, x: 2 * (x @ m.a.t())), **OPTIONS, match="matmul")(x := torch.randn(4, 32))
    torch.testing.assert_close(compiled(InBody(forward), **OPTIONS, match="matmul")(x), expected)


class Noted(Pass):
    """A pass of somebody's own."""

    def __init__(self, met):
        self.met = met

    def run(self, gm):
        self.met += [node.target for node in gm.graph.nodes if node.target in ("tanh", "relu")]
        return []


def test_passes_of_ones_own_reach_bodies():
    met, fc = [], nn.Linear(32, 32)
    compiled(lambda x: saved(lambda t: fc(t).tanh(), x).relu(), **OPTIONS, passes=[Noted(met)])(torch.randn(4, 32))
    assert sorted(met) == ["relu", "tanh"]


@pytest.mark.parametrize("form", ["T", "mT"])
def test_transposes_in_front_of_a_body_that_several_layers_share(form):
    """They are the layers' own, and one body can have one mask only: dense, with a row; alike they must be, or it would be another product."""
    torch.manual_seed(0)
    a, b, x = (nn.Parameter(torch.randn(32, 32)) for _ in range(3))
    region = torch.compiler.nested_compile_region(lambda w, x: x @ w)

    def forward(x):
        return region(a.T, x * 2) + region(getattr(b, form), x + 1)

    with pytest.warns(FxMaskWarning) as caught:
        y = compiled(forward, **OPTIONS, match="matmul")(x)
    assert ("compiled once for several layers" if form == "T" else "it has no linear") in str(caught[-1].message)
    torch.testing.assert_close(y, forward(x))


class CalledTwice(nn.Module):
    """One layer in a region, on an input of the graph and on what it has given."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(32, 32)

    def forward(self, x):
        region = torch.compiler.nested_compile_region(lambda fc, x: fc(x).relu())
        return region(self.fc, region(self.fc, x))


def test_a_region_that_is_given_one_layer_twice_is_masked():
    """Also where nobody wants a gradient, in which both calls have one body."""
    model, x = CalledTwice(), torch.randn(4, 32, requires_grad=True)
    masked = fxmask.apply(copy.deepcopy(model), **OPTIONS)
    torch.testing.assert_close(compiled(model, **OPTIONS)(x), masked(x))
    with torch.no_grad():
        torch.testing.assert_close(compiled(model, **OPTIONS)(x), masked(x))
    report = fxmask.explain(model)
    assert [(row["name"], row["masked"]) for row in report.rows] == [("fc", True)]


shared = torch.compiler.nested_compile_region(lambda w, x: F.linear(x, w))
doubled = torch.compiler.nested_compile_region(lambda w, x: (lambda made: saved(lambda t: F.linear(t, made), x))(w * 2))


class Given(nn.Module):
    """Bodies that are given weights of layers, and weights that are made of them, or of a buffer."""

    def __init__(self, forward):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.made = nn.Linear(32, 32), nn.Linear(32, 32), forward
        self.register_buffer("c", torch.randn(32, 32))

    def forward(self, x):
        return self.made(self, x)


ONE = {
    "in front of a body": lambda m, x: (lambda w: saved(lambda t: F.linear(t, w), x))(m.a.weight * 2),
    "by one region in two bodies": lambda m, x: saved(lambda t: shared(m.a.weight, t), x) + saved(lambda t: shared(m.a.weight, t), x + 1),
    "in a region, in front of a body there": lambda m, x: doubled(m.a.weight, x) + doubled(m.a.weight, x + 1),
}
SEVERAL = {
    "one, another, and the first again": lambda m, x: shared(m.a.weight, x * 2) + shared(m.b.weight, x + 1) + shared(m.a.weight, x * 3),
    "one, another, and the first again, for another input": lambda m, x: shared(m.a.weight, x) + shared(m.b.weight, x) + shared(m.a.weight, x * 3),
    "one, and what another makes": lambda m, x: shared(m.a.weight, x * 2) + shared(m.b.weight * 2, x + 1),
    "what one makes, and another": lambda m, x: shared(m.a.weight * 2, x * 2) + shared(m.b.weight, x + 1),
    "what both make": lambda m, x: shared(m.a.weight * 2, x * 2) + shared(m.b.weight * 2, x + 1),
    "what the region makes of both": lambda m, x: doubled(m.a.weight, x) + doubled(m.b.weight, x + 1),
}


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("how", ONE)
def test_a_weight_of_one_layer_that_bodies_are_given_has_a_row(how):
    model = Given(ONE[how])
    compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert {row["name"]: row["masked"] for row in fxmask.explain(model).rows} == {"a": True, "b": False}


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
@pytest.mark.parametrize("call", [wrap, wrap_activation_checkpoint])
def test_a_layer_in_a_body_that_calls_it_and_no_more_is_masked(call):
    model, x = Given(lambda m, x: call(lambda t: m.a(t), x)), torch.randn(4, 32)
    found = compiled(model, **OPTIONS)(x)
    assert torch.equal(found, fxmask.apply(model.a, **OPTIONS)(x))


both_ways = torch.compiler.nested_compile_region(lambda w, x: shared(w, x) - 2 * shared(w, -x))


@pytest.mark.parametrize("sign", [1, -1])
def test_regions_in_a_condition_are_masked_where_they_train(sign):
    """Dynamo has traced the branches by then, and knows the regions in them by their names."""
    forward, x = lambda m, x: torch.cond(x.sum() > 0, lambda t: both_ways(m.a.weight, t), lambda t: 3 * shared(m.a.weight, -t), (x,)), sign * torch.rand(4, 32)
    model = Given(forward)
    layer = fxmask.apply(copy.deepcopy(model.a), **OPTIONS)
    found, expected = compiled(model, **OPTIONS, inner="aot_eager")(x), 3 * sign * (layer(x) - layer.bias)
    torch.testing.assert_close(found, expected)
    found.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(model.a.weight.grad, layer.weight.grad)


def test_a_table_that_is_looked_up_in_a_body_is_one_outside_of_it():
    table, made = nn.Embedding(32, 32), nn.Linear(32, 32)
    model = Given(lambda m, x: torch.nn.functional.linear(m.made_of(saved(lambda t: m.table(t), torch.arange(4))), m.table.weight))
    model.table, model.made_of = table, made
    compiled(model, **OPTIONS)(torch.randn(4, 32))
    found = {row["name"]: (row["masked"], row["reason"]) for row in fxmask.explain(model).rows}
    assert found["made_of"][0] and found["table.weight"] == (False, "default exclusion: weight tied to an Embedding (backend='fxmask')")


def test_each_layer_that_a_region_multiplies_by_in_no_linear_call_is_told_of():
    region = torch.compiler.nested_compile_region(lambda w, x: x @ w.t())
    model = Given(lambda m, x: region(m.a.weight, x * 2) + region(m.b.weight, x + 1))
    with pytest.warns(FxMaskWarning, match=r"^[ab] stays dense: matmul\(\) reads it|masked nothing") as told:
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert [str(w.message)[0] for w in told if "stays dense" in str(w.message)] == ["a", "b"]


@torch.no_grad()
def test_a_body_in_one_where_no_mask_may_stand_is_as_closed():
    def step(m):
        return lambda i, x: (i + 1, torch.cond(x.sum() > 0, m.a, lambda t: t + 1, (x,)))

    model = Given(lambda m, x: while_loop(lambda i, x: i < 2, step(m), (torch.tensor(0), m.b(x)))[1])
    with pytest.warns(FxMaskWarning, match="^a stays dense: it stands in the body of while_loop"):
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert [row["masked"] for row in fxmask.explain(model).rows] == [False, True]


@torch.no_grad()
@pytest.mark.parametrize("first", [True, False])
def test_a_region_that_such_a_body_shares_is_closed_wherever_it_is_called_first(first):
    def forward(m, x):
        y = shared(m.a.weight, x) if first else x
        y = while_loop(lambda i, z: i < 2, lambda i, z: (i + 1, shared(m.a.weight, z)), (torch.tensor(0), y))[1]
        return m.b(y if first else shared(m.a.weight, y))

    model = Given(forward)
    with pytest.warns(FxMaskWarning, match="^a stays dense: it stands in the body of while_loop"):
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert [row["masked"] for row in fxmask.explain(model).rows] == [False, True]


in_a_region = torch.compiler.nested_compile_region(lambda w, x: torch.einsum("bi,oi->bo", x, w))
twice = torch.compiler.nested_compile_region(lambda w, x: in_a_region(w, x) + in_a_region(w, x + 1))
SHARING = {
    "checkpoints": lambda m, x: saved(lambda t: twice(m.a.weight, t), x) + saved(lambda t: twice(m.b.weight, t), x),
    "branches": lambda m, x: torch.cond(x.sum() > 0, lambda t: twice(m.a.weight, t), lambda t: twice(m.b.weight, t), (x,)),
}


@pytest.mark.parametrize("how", SHARING)
def test_a_region_that_bodies_share_is_told_of_for_the_layers_of_all_of_them(how):
    model = Given(SHARING[how])
    with pytest.warns(FxMaskWarning, match=r"^[ab] stays dense: einsum\(\) reads it|masked nothing") as told:
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert sorted(str(w.message)[0] for w in told if "stays dense" in str(w.message)) == ["a", "b"]


@pytest.mark.parametrize("how", SEVERAL)
def test_a_region_that_is_given_weights_of_several_layers_stays_dense(how):
    model, x = Given(SEVERAL[how]), torch.randn(4, 32)
    with pytest.warns(FxMaskWarning, match="compiled once for several layers"):
        y = compiled(model, **OPTIONS)(x)
    torch.testing.assert_close(y, model(x))
    assert not any(row["masked"] for row in fxmask.explain(model).rows)


def test_each_layer_of_a_region_that_is_compiled_once_for_several_is_told_of():
    model = Given(SEVERAL["one, another, and the first again"])
    reason = r"it stands in a region that is compiled once for several layers, and masks there.*use fxmask\.apply on the model"
    with pytest.warns(FxMaskWarning, match=f"stays dense: {reason}|masked nothing") as told:
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert [str(w.message)[0] for w in told if "stays dense" in str(w.message)][:2] == ["a", "b"]
    assert all(re.match(reason, row["reason"]) for row in fxmask.explain(model).rows[:2])
    torch._dynamo.reset()
    with pytest.warns(FxMaskWarning, match="stays dense"):
        assert "expected b to be masked" in str(failing(model, torch.randn(4, 32), **OPTIONS, require="b")).replace("'", "")


@torch.no_grad()
def test_a_region_that_is_given_what_two_buffers_make_has_no_weight_there():
    model = Given(lambda m, x: shared(m.c * 2, x * 2) + shared(m.c * 3, x + 1) + m.a(x))
    with pytest.warns(FxMaskWarning, match="the graph makes its weight of no parameter"):
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert {row["name"]: row["masked"] for row in fxmask.explain(model).rows} == {"a": True, "b": False}


class Handed(nn.Module):
    """A body is handed what is made of a layer's weight; `make` makes it, and the body multiplies by it as `product` does."""

    def __init__(self, make, product):
        super().__init__()
        self.fc, self.turn, self.made, self.product = nn.Linear(32, 32), nn.Buffer(torch.eye(32).flip(0)), make, product

    def forward(self, x):
        w = self.made(self.fc.weight, self.turn)
        return saved(lambda t: self.product(t, w), x)


def test_a_product_in_a_body_by_what_is_made_of_a_weight_outside_is_told_of():
    model = nn.Sequential(Handed(lambda w, turn: w.t().contiguous(), torch.matmul), nn.Linear(32, 32))
    with pytest.warns(FxMaskWarning, match=r"0.fc stays dense: matmul\(\) reads it, which is no linear call"):
        compiled(model, **OPTIONS)(torch.randn(4, 32))
    assert [(row["name"], row["masked"]) for row in fxmask.explain(model).rows] == [("0.fc", False), ("1", True)]


@pytest.mark.filterwarnings("error::fxmask.errors.FxMaskWarning")
def test_a_product_outside_of_a_body_that_makes_the_weight_of_a_linear_in_it_is_not():
    model, x = Handed(torch.matmul, torch.nn.functional.linear), torch.randn(4, 32)
    compiled(model, **OPTIONS, require=True)(x)

    class Either(Handed):
        def forward(self, x):
            return torch.cond(x.sum() > 0, lambda t, w: self.product(t, w), lambda t, w: self.product(-t, w), (x, self.made(self.fc.weight, self.turn)))

    gm = fxmask.apply(torch.export.export(Either(torch.matmul, torch.nn.functional.linear), (x,)).module(), **OPTIONS)
    assert [row["masked"] for row in fxmask.explain(gm).rows] == [True, True]
