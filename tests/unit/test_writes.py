"""A weight or an input that a graph writes into: no mask, no W∘M and no dropout is read on the other side of the write."""

import copy
import functools
import operator
import time

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import fxmask
from fxmask.compiler import backend
from fxmask.passes.graphs.writes import Writes, written


def _out(t, y):
    torch.mul(y, 2, out=t)
    return t


def around(f):
    """Of more arguments than what it is around, and what it is around is not asked."""

    @functools.wraps(f)
    def inner(t, by, inplace=False):
        return f(t.mul_(by) if inplace else t * by)

    return inner


def passing(f):
    @functools.wraps(f)
    def inner(*args, **kwargs):
        return f(*args, **kwargs)

    return inner


@around
def scaled(t):
    return t


@passing
def passed(t, by, inplace=False):
    return t.mul_(by) if inplace else t * by


fx.wrap("scaled")
fx.wrap("passed")


# what is done to t, which y is beside -> whether it may write into t
FORMS = {
    "t.add_(y)": (lambda t, y: t.add_(y), True),
    "t.view(-1).mul_(2)": (lambda t, y: t.view(-1).mul_(2), True),
    "t.__setitem__(0, y[0])": (lambda t, y: t.__setitem__(0, y[0]), True),
    "t.__imul__(2)": (lambda t, y: t.__imul__(2), True),
    "t.data.clamp_(0)": (lambda t, y: t.data.clamp_(0), True),
    "t.detach()[0].zero_()": (lambda t, y: t.detach()[0].zero_(), True),
    "mul(y, 2, out=t)": (_out, True),
    "relu(t, inplace=True)": (lambda t, y: F.relu(t, inplace=True), True),
    "relu(t, True)": (lambda t, y: F.relu(t, True), True),
    "scaled(t, 2, True)": (lambda t, y: scaled(t, 2, True), True),
    "scaled(t, 2, inplace=True)": (lambda t, y: scaled(t, 2, inplace=True), True),
    "passed(t, 2, inplace=True)": (lambda t, y: passed(t, 2, inplace=True), True),
    "scaled(t, 2)": (lambda t, y: scaled(t, 2), False),
    "relu_(t)": (lambda t, y: torch.relu_(t), True),
    "_foreach_add_([y, t], 1)": (lambda t, y: torch._foreach_add_([y, t], 1), True),
    "aten.copy_(t, y)": (lambda t, y: torch.ops.aten.copy_.default(t, y), True),
    "t.contiguous().add_(y)": (lambda t, y: t.contiguous().add_(y), True),  # may be t itself
    "einsum('ij->ji', t).zero_()": (lambda t, y: torch.ops.aten.einsum.default("ij->ji", [t]).zero_(), True),  # its schema does not tell
    "aten.dropout(t, 0.5, False).zero_()": (lambda t, y: torch.ops.aten.dropout.default(t, 0.5, False).zero_(), True),
    "(t.chunk(2) + (t,))[2].zero_()": (lambda t, y: operator.add(t.chunk(2), (t,))[2].zero_(), True),
    "embedding(i, t, max_norm=1)": (lambda t, y: F.embedding(torch.tensor([0, 1]), t, max_norm=1.0), True),
    "embedding(i, t).zero_()": (lambda t, y: F.embedding(torch.tensor([0, 1]), t).zero_(), False),
    "y.add_(1).add_(t)": (lambda t, y: y.add_(1).add_(t), False),
    "y.add_(t)": (lambda t, y: y.add_(t), False),
    "(t + y).add_(1)": (lambda t, y: (t + y).add_(1), False),
    "linear(y, t).relu_()": (lambda t, y: F.linear(y, t).relu_(), False),
    "t.clone().zero_()": (lambda t, y: t.clone().zero_(), False),
    "aten.add(t, y).add_(1)": (lambda t, y: torch.ops.aten.add.Tensor(t, y).add_(1), False),
    "relu(t, inplace=False)": (lambda t, y: F.relu(t, inplace=False), False),
    "logical_or": (lambda t, y: operator.or_(t > 1, y > 1), False),
    "t.requires_grad_()": (lambda t, y: t.requires_grad_(), False),
}


@pytest.mark.parametrize("form", FORMS)
def test_what_writes(form):
    f, writes = FORMS[form]
    gm = fx.symbolic_trace(f)
    (t, *_) = (n for n in gm.graph.nodes if n.op == "placeholder")
    assert bool(Writes(gm).into(t)) == writes
    given = torch.rand(4, 4) + 1
    before, y = given.clone(), torch.rand(4, 4)
    with torch.no_grad():
        gm(given, y)
    assert writes or torch.equal(given, before)  # what is called no write is none
    assert form.startswith(("t.requires", "t.contiguous", "relu", "t.data")) or torch.equal(given, before) != writes


def test_an_item_that_is_set_is_a_write():
    graph = fx.Graph()  # as Dynamo has it; symbolic_trace cannot
    t = graph.placeholder("t")
    graph.call_function(operator.setitem, (graph.call_method("t", (t,)), 0, 1))
    graph.output(t)
    assert Writes(fx.GraphModule({}, graph)).into(t)


def test_two_inputs_of_one_memory():
    graph, held = fx.Graph(), torch.zeros(4, 4)
    t, view, other = (graph.placeholder(name) for name in ("t", "view", "other"))
    for node, value in ((t, held), (view, held[1:]), (other, torch.zeros(4, 4))):
        node.meta["example_value"] = value
    graph.call_method("zero_", (view,))
    graph.output(t)
    writes = Writes(fx.GraphModule({}, graph))
    assert writes.into(t) and writes.into(held) and not writes.into(other)


@pytest.mark.parametrize("how", [setattr, torch.Tensor.set_, torch.ops.aten.set_.source_Tensor, "set_", "shallow_copy_data_"])
def test_a_tensor_that_is_given_other_memory(how):
    """It is written then, and later by whoever writes what it was given."""
    lib = torch.library.Library("fxmask_test_memory", "FRAGMENT")
    lib.define("shallow_copy_data_(Tensor(a!) self, Tensor source) -> Tensor(a!)")  # as ATen has it from PyTorch 2.14 on
    how = torch.ops.fxmask_test_memory.shallow_copy_data_ if how == "shallow_copy_data_" else how
    graph = fx.Graph()
    t, new, other = (graph.placeholder(name) for name in ("t", "new", "other"))
    before = graph.call_function(F.relu, (t,))
    args = (t, "data", new) if how is setattr else (t, new)
    (graph.call_method if how == "set_" else graph.call_function)(how, args)
    graph.call_method("add_", (new, 1))
    graph.call_method("add_", (other, 1))
    after = graph.call_function(F.relu, (t,))
    graph.output((before, after))
    writes = Writes(fx.GraphModule({}, graph))
    assert len(writes.into(t)) == 2 and len(writes.into(other)) == 1 and writes.sections([before, after], t) == [0, 2]


def test_an_op_by_any_of_its_forms():
    lib = torch.library.Library("fxmask_test_writes", "FRAGMENT")
    lib.define("renorm(Tensor(a!) w, Tensor v) -> ()")
    lib.impl("renorm", lambda w, v: w.copy_(v), "CompositeExplicitAutograd")
    for op in (torch.ops.fxmask_test_writes.renorm, torch.ops.fxmask_test_writes.renorm.default):
        graph = fx.Graph()
        t, v = graph.placeholder("t"), graph.placeholder("v")
        graph.call_function(op, (t, v))
        graph.output(t)
        writes = Writes(fx.GraphModule({}, graph))
        assert writes.into(t) and not writes.into(v)


class Flat(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64, bias=False)
        self.register_buffer("flat", self.fc.weight.data.view(-1))

    def forward(self, x, new):
        a = self.fc(x)
        self.flat.copy_(new.reshape(-1))
        return a, self.fc(x)


class Table(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.table = nn.Linear(64, 64, bias=False), nn.Embedding(64, 64, max_norm=0.05)
        self.table.weight = self.fc.weight
        self.register_buffer("i", torch.arange(32))

    def forward(self, x, new):
        a, rows = self.fc(x), self.table(self.i)
        return a, self.fc(x) + 0 * rows.sum()


@pytest.mark.parametrize("kind", [Flat, Table])
def test_a_write_through_another_name_of_the_memory(kind):
    torch.manual_seed(0)
    net, x, new = kind(), torch.randn(8, 64), torch.randn(64, 64)
    before = net.fc.weight.detach().clone()
    gm = fxmask.apply(fx.symbolic_trace(net), ratio=0.5, include="fc")
    _, found = gm(x, new)
    assert not torch.equal(net.fc.weight, before)
    torch.testing.assert_close(found, fxmask.apply(nn.Sequential(net.fc), ratio=0.5)(x))  # of the weight as it is now


@pytest.mark.slow
def test_long_chains_of_writes_take_no_time_of_their_own():
    """Linear in the graph: a walk back from each write would take minutes."""

    def f(x):
        for _ in range(20000):
            x = x.add_(1)
        return x

    gm = fx.symbolic_trace(f)
    began = time.perf_counter()
    writes = Writes(gm)
    assert len(writes.into(next(iter(gm.graph.nodes)))) == 20000
    assert time.perf_counter() - began < 20


def test_of_modules_only_those_in_place_write():
    gm = fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU(inplace=True), nn.ReLU()))
    assert [len([*written(gm, n)]) for n in gm.graph.nodes] == [0, 0, 1, 0, 0]


class Rows(nn.Linear):
    def forward(self, x):
        return x[1:]


@pytest.mark.parametrize("kind", [nn.Linear, Rows])
def test_a_module_of_a_known_kind_alone_makes_a_new_tensor(kind):
    graph = fx.Graph()
    t = graph.placeholder("t")
    graph.call_method("zero_", (graph.call_module("m", (t,)),))
    graph.output(t)
    assert bool(Writes(fx.GraphModule({"m": kind(4, 4)}, graph)).into(t)) == (kind is Rows)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        return self.fc(x)


def _written_between(net, x, new):
    a = net(x)
    with torch.no_grad():
        net.fc.weight.copy_(new)
    return a, net(x)


def _scaled_by_lists(net, x, new):
    a = net(x)
    with torch.no_grad():
        torch._foreach_mul_([net.fc.weight], [new])
    return a, net(x)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@pytest.mark.parametrize("call", [_written_between, _scaled_by_lists])
def test_a_compiled_function_has_a_new_mask_after_a_write(call, inner):
    torch.manual_seed(0)
    net, x, new = Net(), torch.randn(8, 64), torch.randn(64, 64)
    expected = call(fxmask.apply(copy.deepcopy(net), ratio=0.5), x, new)
    torch._dynamo.reset()
    found = torch.compile(call, backend=backend.fxmask_backend, options=dict(ratio=0.5, inner=inner), fullgraph=True)(net, x, new)
    torch.testing.assert_close(found, expected)
    assert not torch.allclose(found[1], net(x), atol=1e-2)  # masked after the write, too


def _given_other_memory(net, x, new):
    """What is written into that afterwards is written into the weight."""
    net.fc.weight.data = new
    a = net(x)
    new.mul_(new)
    return a, net(x)


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
@torch.no_grad()
def test_a_compiled_function_has_a_new_mask_after_a_write_into_memory_that_its_weight_was_given(inner):
    torch.manual_seed(0)
    net, x, new = Net(), torch.randn(8, 64), torch.randn(64, 64)
    expected = _given_other_memory(fxmask.apply(copy.deepcopy(net), ratio=0.5), x, new.clone())
    torch._dynamo.reset()
    compiled = torch.compile(_given_other_memory, backend=backend.fxmask_backend, options=dict(ratio=0.5, inner=inner), fullgraph=True)
    torch.testing.assert_close(compiled(net, x, new), expected)


class TracedWrite(Net):
    def forward(self, x, new):
        a = self.fc(x)
        self.fc.weight.data.copy_(new)
        return a, self.fc(x), self.fc(2 * x)


def test_a_trace_has_a_new_mask_after_a_write():
    torch.manual_seed(0)
    net, x, new = TracedWrite(), torch.randn(8, 64), torch.randn(64, 64)
    expected = fxmask.apply(copy.deepcopy(net), ratio=0.5)(x, new)
    gm = fxmask.apply(fx.symbolic_trace(net), ratio=0.5)
    torch.testing.assert_close(gm(x, new), expected)
    assert sum(n.op == "call_module" and "fxmask_sites" in n.target for n in gm.graph.nodes) == 2  # the last two calls share one
    code = fx.symbolic_trace(TracedWrite()).code
    assert fxmask.restore(gm).code == code


class Teacher(nn.Module):
    def __init__(self):
        super().__init__()
        self.att = nn.MultiheadAttention(64, 4, batch_first=True)

    def forward(self, x):
        with torch.no_grad():
            t = self.att(x, x, x)[0]
        return (self.att(x, x, x)[0] - t.roll(1, 0)).square().mean()


@pytest.mark.parametrize("inner", ["eager", "aot_eager"])
def test_a_weight_read_first_without_gradients_has_one_afterwards(inner):
    torch.manual_seed(0)
    net, x = Teacher(), torch.randn(2, 5, 64)
    options = dict(ratio=0.5, include="att.out_proj")
    expected = fxmask.apply(copy.deepcopy(net), **options)
    expected(x).backward()
    torch._dynamo.reset()
    torch.compile(net, backend=backend.fxmask_backend, options=dict(options, inner=inner), fullgraph=True)(x).backward()
    torch.testing.assert_close(net.att.out_proj.weight.grad, expected.att.out_proj.weight.grad)


class Product(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a, self.b = nn.Linear(64, 64, bias=False), nn.Linear(64, width, bias=False)

    def forward(self, x):
        return self.a(x), self.b(self.a.weight)


@pytest.mark.parametrize("masks", [{}, {"ratio": 0.0}], ids=["alone", "beside masks"])
@pytest.mark.parametrize("width", [64, 32])
def test_a_weight_that_is_another_linears_input_is_pruned_as_an_input(width, masks):
    torch.manual_seed(0)
    net, x = Product(width), torch.randn(4, 8, 64)
    torch._dynamo.reset()
    found = torch.compile(net, backend=backend.fxmask_backend, options=dict(masks, activations=dict(ratio=0.5, block=16), inner="eager"))(x)
    torch.testing.assert_close(found, net(x))


class Dropped(nn.Module):
    def __init__(self, write):
        super().__init__()
        self.inp, self.drop, self.fc, self.write = nn.Linear(64, 64), nn.Dropout(1e-9), nn.Linear(64, 64), write
        self.first = nn.Dropout(1e-9)

    def forward(self, x, pos):
        x = self.inp(self.first(x) if self.write == "input, of a call that is rewritten, too" else x)
        h = self.drop(x)
        if "input" in self.write:
            x.add_(pos)
        elif self.write == "output":
            h.add_(pos)
        elif self.write == "other":
            pos.add_(1)
        return self.fc(h), x


@pytest.mark.filterwarnings("ignore:what torch.export makes has no train:fxmask.FxMaskWarning")
@pytest.mark.parametrize("write", ["input", "output", "other", "input, of a call that is rewritten, too"])
@pytest.mark.parametrize("trace", [fx.symbolic_trace, None], ids=["symbolic_trace", "export"])
def test_a_dropout_is_not_fused_past_a_write(write, trace):
    """p is so small that nothing is dropped."""
    torch.manual_seed(0)
    net, x = Dropped(write), torch.randn(32, 64)
    gm = trace(net) if trace else torch.export.export(copy.deepcopy(net), (x, torch.ones(32, 64))).module()
    expected = net(x, torch.full((32, 64), 100.0))[0]
    own = fxmask.BlockDropout(block=(16, 16))
    if write not in ("input", "output"):
        fxmask.apply(gm, own)
        assert [m._fxmask_name for m in gm.fxmask_dropped.children()] == ["fc" if write == "other" else "inp"]
    else:
        with pytest.warns(fxmask.FxMaskWarning, match="changed nothing"):
            fxmask.apply(gm, own)
    torch.testing.assert_close(gm(x, torch.full((32, 64), 100.0))[0], expected)


class OfAGraph(nn.Module):
    """A product with a sparse buffer, whose memory nobody can name, before a dropout and a linear."""

    def __init__(self):
        super().__init__()
        self.drop, self.fc = nn.Dropout(1e-9), nn.Linear(64, 64)
        self.register_buffer("edges", torch.eye(8).to_sparse())

    def forward(self, x):
        return self.fc(self.drop(torch.sparse.mm(self.edges, x)))


def test_a_sparse_tensor_in_a_graph_is_no_obstacle():
    net, x = OfAGraph(), torch.randn(8, 64)
    gm = fxmask.apply(fx.symbolic_trace(net), fxmask.BlockDropout(block=(16, 16)))
    assert "fxmask_dropped" in gm.code
    torch.testing.assert_close(gm(x), net(x))
