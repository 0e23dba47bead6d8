"""Exported graphs whose linears stand in the bodies of cond, scan, map and while_loop, which PyTorch traces anew in every call that trains."""

import copy

import pytest
import torch
from torch import nn
from torch._higher_order_ops.map import map as over_rows
from torch._higher_order_ops.scan import scan
from torch._higher_order_ops.while_loop import while_loop
from unit.called_bodies import called_twice, in_a_body, shared_by_two, shared_in_turn

import fxmask
from fxmask.passes.finding.graph_linears import graph_modules
from fxmask.passes.graphs import bodies, regions
from fxmask.passes.graphs.graph_calls import MASKED_LINEAR

OPTIONS = dict(ratio=0.5, block=(8, 8))


class Layers(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.last = (nn.Linear(32, 32) for _ in range(3))


class Cond(Layers):
    def forward(self, x):
        return self.last(torch.cond(x.sum() > 0, lambda z: self.a(z), lambda z: self.b(z) + 1, (x,)))


class Scan(Layers):
    def forward(self, x):
        def step(carry, z):
            carry = torch.tanh(self.a(carry) + z)
            return carry, 2 * carry

        return self.last(scan(step, torch.zeros_like(x[0]), self.b(x))[1])


class Map(Layers):
    def forward(self, x):
        return self.last(over_rows(lambda z: self.a(z) * self.b(z), x))


RIGL, RAMP = dict(backward="rigl", dense_every=2), dict(schedule=fxmask.Schedule("linear", steps=3))
CASES = {"cond": (Cond, 1, {}), "the other branch": (Cond, -1, RIGL), "scan": (Scan, 1, RAMP), "map": (Map, 1, dict(backward="unmasked"))}


def masked_calls(gm):
    return sum(len(m.graph.find_nodes(op="call_function", target=MASKED_LINEAR)) for m in gm.modules() if isinstance(m, torch.fx.GraphModule))


@pytest.mark.parametrize("name", CASES)
def test_training_is_that_of_the_class_swap(name):
    cls, sign, options = CASES[name]
    x, options = sign * torch.rand(3, 4, 32), {**OPTIONS, **options}
    model = cls()
    gm = fxmask.apply(torch.export.export(copy.deepcopy(model), (x,)).module(), **options)
    assert masked_calls(gm) == 3
    fxmask.apply(model, **options)
    for _ in range(3):
        for m in (model, gm):
            m.zero_grad()
            fxmask.step(m, 0)
        y, expected = gm(x), model(x)
        y.square().sum().backward()
        expected.square().sum().backward()
        assert torch.equal(y, expected)
        grads = dict(gm.named_parameters())
        for n, p in model.named_parameters():
            none = torch.zeros_like(p)  # of the branch that is not taken
            torch.testing.assert_close(none if grads[n].grad is None else grads[n].grad, none if p.grad is None else p.grad)
        for m in (model, gm):
            fxmask.step(m)


class While(Layers):
    def forward(self, x):
        return self.last(while_loop(lambda i, z: i < 3, lambda i, z: (i + 1, torch.tanh(self.a(z))), (torch.tensor(0), self.b(x)))[1])


class Within(nn.Module):
    def __init__(self):
        super().__init__()
        self.block, self.head = Cond(), nn.Linear(32, 32)

    def forward(self, x):
        return self.head(self.block(x))


class Nested(Layers):
    def forward(self, x):
        return self.last(torch.cond(x.sum() > 0, lambda z: torch.cond(z.max() > 5, lambda u: self.a(u), lambda u: self.b(u), (z,)), lambda z: self.a(z), (x,)))


NAMES = {Cond: "a b last", Scan: "a b last", Map: "a b last", While: "a b last", Within: "block.a block.b block.last head", Nested: "a a b last"}


def rows_of(model):
    return sorted((r["name"], r["masked"], r["reason"]) for r in fxmask.explain(model).rows)


@pytest.mark.parametrize("cls", NAMES)
def test_a_layer_in_a_body_goes_by_its_own_name(cls):
    gm = torch.export.export(cls(), (torch.rand(3, 32),)).module()
    names = NAMES[cls].split()
    assert [r[0] for r in rows_of(gm)] == names
    inner = names[0]
    fxmask.apply(gm, **OPTIONS, exclude=inner)
    assert rows_of(gm) == sorted((n, n != inner, "in exclude" if n == inner else "selected") for n in names)
    fxmask.restore(gm)
    holder = nn.Sequential(fxmask.apply(gm, **OPTIONS, include="re:", overrides={inner: dict(ratio=0.75)}))  # warnings are errors here
    assert {r["name"]: r["target_ratio"] for r in fxmask.explain(holder).rows} == {f"0.{n}": 0.75 if n == inner else 0.5 for n in names}


def test_random_masks_in_a_body_are_those_of_the_class_swap():
    x, model = torch.rand(3, 32), Cond()
    gm = fxmask.apply(torch.export.export(copy.deepcopy(model), (x,)).module(), **OPTIONS, criterion="random")
    assert torch.equal(gm(x), fxmask.apply(model, **OPTIONS, criterion="random")(x))


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.head = nn.Embedding(32, 32), nn.Linear(32, 32)
        self.head.weight = self.table.weight

    def forward(self, i):
        return torch.cond(i.sum() > 0, lambda z: self.head(z), lambda z: z + 1, (self.table(i),))


class LookedUpInABody(Tied):
    def forward(self, i):
        return self.head(torch.cond(i.sum() > 0, lambda z: self.table(z), lambda z: self.table(z) + 1, (i,)))


class Autocast(Tied):
    def forward(self, i):
        with torch.autocast("cpu", torch.bfloat16):
            return self.head(self.table(i))


@pytest.mark.parametrize("kind", [Tied, LookedUpInABody, Autocast])
def test_the_weight_of_an_embedding_is_left_alone_in_a_body(kind):
    gm = torch.export.export(kind(), (torch.arange(4),)).module()
    with pytest.warns(fxmask.FxMaskWarning, match="masked nothing: .*tied to an Embedding"):
        fxmask.apply(gm, **OPTIONS)


def test_a_body_of_two_layers_has_neither_name():
    gm = called_twice(lambda body, x, w: body.call_function(torch.ops.aten.linear.default, (x, w)))
    assert rows_of(gm)[0][0] == "body.linear_default"


def test_nor_has_a_body_in_it():
    gm = called_twice(in_a_body(lambda body, x, w: body.call_function(torch.ops.aten.linear.default, (x, w))))
    assert rows_of(gm)[0][0] == "body.inner.linear_default"


def test_nor_has_one_in_a_body_that_two_others_share():
    gm = shared_by_two(lambda body, x, w: body.call_function(torch.ops.aten.linear.default, (x, w)))
    assert [r[0] for r in rows_of(gm)] == ["first.shared.inner.linear_default"]


def test_both_layers_stay_dense_that_such_a_body_is_given_for_an_einsum():
    gm = shared_by_two(lambda body, x, w: body.call_function(torch.einsum, ("bi,oi->bo", x, w)))
    assert [r[0] for r in rows_of(gm)] == ["a", "b"]


def test_such_a_body_is_given_no_constant_where_one_call_gives_a_parameter():
    gm = shared_by_two(lambda body, x, w: body.call_function(torch.ops.aten.linear.default, (x, w)))
    value = gm.a.weight.data
    del gm.a.weight
    gm.a.register_buffer("weight", value)
    fxmask.apply(gm, **OPTIONS)  # warnings are errors here
    assert ("first.shared.inner.linear_default", True, "selected") in rows_of(gm)


def test_bodies_that_others_share_in_turn_are_read_once_each(monkeypatch):
    """And not by each of the ways to them, which double with every turn."""
    gm, read = shared_in_turn(lambda body, x, w: body.call_function(torch.einsum, ("bi,oi->bo", x, w)), depth=6), []
    monkeypatch.setattr(bodies, "bodies_of", lambda graph: [read.append(graph), *regions.bodies_of(graph)][1:])
    found = bodies.graphs_of(gm)
    assert [body.graph for body in found] == [graph for _, graph in graph_modules(gm)] and set(read) == {body.graph for body in found}
    *_, w = found[-1].graph.graph.find_nodes(op="placeholder")
    assert len(read) == len(found) == 20 and [str(n.target) for n in found[-1].places[w]] == ["a.weight", "b.weight"]


@pytest.mark.parametrize("which", "ab")
def test_a_body_that_one_call_gives_a_constant_and_the_other_a_parameter_has_a_weight(which):
    gm = called_twice(lambda body, x, w: body.call_function(torch.ops.aten.linear.default, (x, w)))
    table = gm.get_submodule(which)
    value = table.weight.data
    del table.weight
    table.register_buffer("weight", value)
    fxmask.apply(gm, **OPTIONS)  # warnings are errors here
    assert ("body.linear_default", True, "selected") in rows_of(gm)


class Tables(Layers):
    """A table, and one that is made of it, in a body each."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.randn(32, 32))

    def forward(self, x):
        with torch.no_grad():
            y = nn.functional.linear(x, self.table)
        return self.last(torch.cond(x.sum() > 0, lambda z: nn.functional.linear(z, self.table * 2), lambda z: self.b(z), (x,)) + y)


def test_constants_that_come_into_a_body_stay_constants():
    model, x = Tables(), torch.rand(4, 32)
    with pytest.warns(fxmask.FxMaskWarning, match="stays dense: its weight is a constant, not a parameter") as told:
        gm = fxmask.apply(torch.export.export(model, (x,)).module(), **OPTIONS)
    assert len(told) == 2 and sorted(r["name"] for r in fxmask.explain(gm).rows if r["masked"]) == ["b", "last"]
    assert torch.equal(gm(x), fxmask.apply(model, **OPTIONS)(x))
