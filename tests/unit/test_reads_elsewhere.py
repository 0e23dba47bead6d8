"""Weights that an owner's forward reads where it does not itself: in compiled methods, in eager parts of a compiled forward, in threads, checkpoints."""

import copy
import gc
import pickle
import threading
import warnings
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

import fxmask
from fxmask import lost_writes
from fxmask.errors import UnsupportedError
from fxmask.reading import count


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.n = nn.Linear(64, 64, bias=False), 0

    def inner(self, x):
        return F.linear(x, self.fc.weight).tanh()

    def forward(self, x):
        return self.inner(x)


class Threads(Own):
    def forward(self, x):
        with ThreadPoolExecutor(2) as pool:
            return torch.cat(list(pool.map(self.inner, x.chunk(2))))


class Compiled(Own):
    inner = torch.compile(Own.inner, backend="eager")


class Disabled(Own):
    inner = torch.compiler.disable(Own.inner)


class Broken(Own):
    """A graph break, and an attribute by which its second half alone is compiled anew."""

    def forward(self, x):
        x = x * 1
        torch._dynamo.graph_break()
        return self.inner(x) + 0 * self.n


def outputs(kind):
    """(model, x, what the masked layer gives, what the dense one gives)."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    dense, x = kind(), torch.randn(8, 64)
    layer = fxmask.apply(nn.Sequential(copy.deepcopy(dense.fc)), ratio=0.5)
    wrong = F.linear(x, dense.fc.weight).tanh()
    expected = layer(x).tanh()
    assert not torch.allclose(expected, wrong, atol=1e-2)
    return fxmask.apply(dense, ratio=0.5), x, expected


@pytest.mark.parametrize("kind", [Compiled, Threads])
def test_an_eager_forward(kind):
    model, x, expected = outputs(kind)
    with warnings.catch_warnings():
        warnings.simplefilter("error", fxmask.FxMaskWarning)
        torch.testing.assert_close(model(x), expected)
        with torch.no_grad():
            torch.testing.assert_close(model.eval()(x), expected)
    assert model.fc.weight is model.fc._parameters["weight"]  # and the Parameter again, once it has ended


class Around(nn.Module):
    """Reads what a module inside of it reads, before and after that one's forward."""

    def __init__(self):
        super().__init__()
        self.own = Own()

    def forward(self, x):
        return F.linear(x, self.own.fc.weight), self.own(x), F.linear(x, self.own.fc.weight)


@pytest.mark.parametrize("how", [lambda m: m, lambda m: torch.compile(m, backend="eager", fullgraph=True)], ids=["eager", "compiled"])
def test_an_owner_around_an_owner(how):
    torch._dynamo.reset()
    torch.manual_seed(0)
    model, x = Around(), torch.randn(8, 64)
    expected = fxmask.apply(nn.Sequential(copy.deepcopy(model.own.fc)), ratio=0.5)(x)
    fxmask.apply(model, ratio=0.5)
    for y, z in zip(how(model)(x), (expected, expected.tanh(), expected), strict=True):
        torch.testing.assert_close(y, z)


def test_a_method_that_is_compiled_on_the_instance():
    model, x, expected = outputs(Own)
    model.inner = torch.compile(model.inner, backend="eager")
    torch.testing.assert_close(model(x), expected)


@pytest.mark.parametrize("kind", [Disabled, Compiled, Broken])
def test_a_compiled_forward(kind):
    model, x, expected = outputs(kind)
    torch.testing.assert_close(torch.compile(model, backend="eager")(x), expected)
    assert model.fc.weight is model.fc._parameters["weight"]


def test_a_forward_whose_second_half_is_compiled_no_more():
    model, x, expected = outputs(Broken)
    call = torch.compile(model, backend="eager")
    with torch._dynamo.config.patch(recompile_limit=2):
        for model.n in range(4):
            torch.testing.assert_close(call(x), expected)
    model.n = -1
    with torch.compiler.set_stance("eager_on_recompile"):
        torch.testing.assert_close(call(x), expected)
    assert model.fc.weight is model.fc._parameters["weight"]


def test_a_compiled_and_an_eager_forward_of_two_threads_do_not_disturb_each_other():
    """The eager one begins while the compiled one is under way, and ends after it."""
    model, x, expected = outputs(Own)
    under_way, goes_on, waits = threading.Event(), threading.Event(), False

    def pausing(gm, inputs):
        def run(*args):
            if waits:
                under_way.set()
                goes_on.wait(30)
            return gm(*args)

        return run

    compiled = torch.compile(model, backend=pausing)
    compiled(x)
    waits, found = True, []
    thread = threading.Thread(target=lambda: found.append(compiled(x)))
    thread.start()
    under_way.wait(30)

    def inner(x):
        goes_on.set()
        thread.join()
        return Own.inner(model, x)

    model.inner = inner
    found.append(model(x))
    del model.inner
    found.append(model(x))
    for y in found:
        torch.testing.assert_close(y, expected)
    assert model.fc.weight is model.fc._parameters["weight"]


class Held(torch.autograd.Function):
    """x W^T of a weight that is no argument, as memory-saving layers have it."""

    @staticmethod
    def forward(ctx, x, layer):
        w = layer.weight.detach()
        ctx.save_for_backward(w)
        return x @ w.t()

    @staticmethod
    def backward(ctx, g):
        return g @ ctx.saved_tensors[0], None


class Checkpointed(Own):
    def __init__(self, reentrant):
        super().__init__()
        self.out, self.reentrant = nn.Linear(64, 64), reentrant

    def half(self, x):
        with torch.no_grad():
            gate = F.linear(x, self.fc.weight).sigmoid()
        return self.out(self.inner(x) * gate + Held.apply(x, self.fc))

    def forward(self, x):
        return self.half(x) if self.reentrant is None else checkpoint(self.half, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("backward", ["masked", "ste"])
@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_in_the_owner_runs_its_part_anew_with_the_mask(reentrant, backward):
    torch.manual_seed(0)
    dense, x, found = Checkpointed(None), torch.randn(8, 64), []
    for dense.reentrant in (None, reentrant):
        model, given = fxmask.apply(copy.deepcopy(dense), ratio=0.5, backward=backward), x.clone().requires_grad_()
        y = model(given)
        y.square().sum().backward()
        found.append([y, given.grad, *(p.grad for p in model.parameters())])
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("create_graph", [False, True])
def test_a_hook_in_backward_meets_the_parameter(create_graph):
    model, x, _ = outputs(Own)
    parameter, seen = model.fc._parameters["weight"], []
    model.register_full_backward_hook(lambda *_: seen.append(model.fc.weight))
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append(model.fc.weight))
    model(x.requires_grad_()).square().sum().backward(create_graph=create_graph)
    assert len(seen) == 2 and all(w is parameter for w in seen)


class RunsBackward(Own):
    def inner(self, x):
        super().inner(x).sum().backward()


def test_a_hook_in_a_backward_that_a_method_of_the_owner_runs_meets_the_parameter():
    """Outside of a forward, where the method itself reads the Parameter."""
    model, x, _ = outputs(RunsBackward)
    parameter, seen = model.fc._parameters["weight"], []
    parameter.register_post_accumulate_grad_hook(lambda _: seen.append(model.fc.weight))
    model.inner(x)
    assert len(seen) == 1 and seen[0] is parameter


@pytest.mark.parametrize("reentrant", [True, False])
def test_a_checkpoint_outside_of_the_owner_reads_the_parameter_both_times(reentrant):
    model, _, _ = outputs(Own)
    scale, found = torch.ones((), requires_grad=True), []
    for wrap in (lambda f, s: f(s), lambda f, s: checkpoint(f, s, use_reentrant=reentrant)):
        scale.grad = None
        wrap(lambda s: (model.fc.weight * s).square().sum(), scale).backward()
        found.append(scale.grad)
    assert torch.equal(*found)


@pytest.mark.parametrize("compiled", [False, True])
def test_a_copy_made_while_the_owner_runs_reads_its_parameter(compiled):
    """And again when a forward of the copy has ended."""
    model, x, _ = outputs(Own)
    copies, inner = [], model.inner
    model.inner = lambda x: copies.append((copy.deepcopy(model), pickle.loads(pickle.dumps(model.fc)))) or inner(x)
    count([model.fc], 1, compiled)  # inside of another owner's forward
    model(x)
    copied, pickled = copies[0]
    copied.inner = inner
    for m in (copied.fc, pickled, copied.fc):
        assert m.weight is m._parameters["weight"]
        copied(x)


def test_a_read_that_fails_is_not_answered_by_the_dense_parameter(monkeypatch):
    """As nn.Module answers an AttributeError of a property."""
    model, x, _ = outputs(Own)

    def broken(*_):
        raise AttributeError("no such thing")

    monkeypatch.setattr("fxmask.swap.forward_mask", broken)
    with pytest.raises(RuntimeError, match="reading a masked weight failed: no such thing"):
        model(x)


class Writes(Own):
    def __init__(self):
        super().__init__()
        self.out = nn.Linear(64, 64)

    def forward(self, x):
        with torch.no_grad():
            self.fc.weight.clamp_(-0.01, 0.01)
        return self.out(self.inner(x))


class WritesData(Writes):
    def forward(self, x):
        w = self.fc.weight
        w.data = w.data / w.data.norm()
        return self.out(self.inner(x))


class WritesOut(Writes):
    def forward(self, x):
        with torch.no_grad():
            torch.mul(self.fc.weight, 0.5, out=self.fc.weight)
        return self.out(self.inner(x))


class WritesView(Writes):
    def forward(self, x):
        w = self.fc.weight.view(-1)
        with torch.no_grad():
            w[:8].mul_(0.5)
        return self.out(self.inner(x))


class WritesRows(Writes):
    """A lookup with max_norm scales what it finds."""

    def forward(self, x):
        rows = F.embedding(torch.arange(8), self.fc.weight, max_norm=0.1)
        return self.out(self.inner(x)) + 0 * rows.sum()


@pytest.mark.parametrize("kind", [Writes, WritesData, WritesOut, WritesView, WritesRows])
def test_a_write_that_would_go_into_the_masked_weight_leaves_the_layer_dense_and_says_so(kind):
    torch.manual_seed(0)
    model, x = kind(), torch.randn(8, 64)
    expected = copy.deepcopy(model)
    with pytest.warns(fxmask.FxMaskWarning, match=f"fc stays dense: the forward of {kind.__name__} writes to its weight and reads it.*call the layer there"):
        fxmask.apply(model, ratio=0.5)
    fxmask.apply(expected, ratio=0.5, exclude="fc")
    torch.testing.assert_close(model(x), expected(x))
    assert torch.equal(model.fc.weight, expected.fc.weight) and list(fxmask.masks(model)) == ["out.weight"]


def halve(w):
    with torch.no_grad():
        w[:32].mul_(0.5)


class WritesInAFunction(Writes):
    """As no source of this class shows."""

    def forward(self, x):
        halve(self.fc.weight)
        return self.out(self.inner(x))


def test_a_write_that_no_source_shows_raises_where_it_would_be_lost():
    model, x = fxmask.apply(WritesInAFunction(), ratio=0.5), torch.randn(8, 64)
    text = r"the forward of WritesInAFunction writes into the weight of this layer(.|\n)*where: fc\.weight(.|\n)*call the layer there; or exclude the layer"
    for _ in range(2):
        with pytest.raises(UnsupportedError, match=text):
            model(x)
    fxmask.restore(model)
    before = model.fc.weight.detach().clone()
    model(x)
    assert torch.equal(model.fc.weight[:32], before[:32] / 2)


class ReadsOften(Own):
    def forward(self, x):
        for _ in range(lost_writes.MOST + 5):
            self.inner(x)
        self.held = len(lost_writes._read.get(self.fc, ()))
        return self.inner(x)


def test_reads_are_looked_at_in_the_first_eager_forward_alone():
    model, x, _ = outputs(ReadsOften)
    for held in (lost_writes.MOST, 0, 0):
        model(x)
        assert model.held == held and model.fc not in lost_writes._read


class Fails(WritesInAFunction):
    """As one that runs out of memory does, and is tried again."""

    bad, seen = True, ()

    def forward(self, x):
        w = self.fc.weight
        self.seen = (*self.seen, weakref.ref(w))
        y = F.linear(x, w)
        if self.bad:
            raise RuntimeError("out of memory")
        halve(w)
        return self.out(y)


def test_a_forward_that_fails_leaves_no_memory_and_the_next_one_is_looked_at():
    model, x = fxmask.apply(Fails(), ratio=0.5), torch.randn(8, 64)
    for _ in range(lost_writes.MOST + 5):
        with pytest.raises(RuntimeError, match="out of memory"):
            model(x)
    gc.collect()
    assert model.seen and all(ref() is None for ref in model.seen)
    model.bad = False
    with pytest.raises(UnsupportedError, match="the forward of Fails writes into the weight of this layer"):
        model(x)


def test_a_trace_records_no_look_at_what_is_read():
    model, x, _ = outputs(Own)
    traces = [make_fx(model)(x).code for _ in range(2)]
    assert traces[0] == traces[1]
