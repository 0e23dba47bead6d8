"""FLOP of the backward: which gradients there are, what is computed again, and what is called or shared more than once."""

import copy
from contextlib import nullcontext

import pytest
import torch
from analysis.counted import analyze as count
from analysis.counted import both, mlp, totals
from torch import nn
from torch.utils import checkpoint

import fxmask
from fxmask.errors import UnsupportedError


def test_the_first_layer_has_no_dx():
    model, x = mlp(16, 32, 8), torch.randn(5, 16)
    first, second = 2 * 5 * 16 * 32, 2 * 5 * 32 * 8
    s = count(model, x).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (first + second, second, first + second)
    s = count(model, x.requires_grad_()).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (first + second,) * 3


def test_a_frozen_layer_has_no_dw():
    model, x = mlp(16, 32, 24, 8), torch.randn(5, 16)
    one, two, three = (2 * 5 * a * b for a, b in ((16, 32), (32, 24), (24, 8)))
    model[2].requires_grad_(False)
    s = count(model, x).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (one + two + three, two + three, one + three)
    assert not [r for r in count(model, x).tables["nodes"] if r["module"] == "2" and r["phase"] in ("dW", "db", "opt")]
    model[0].requires_grad_(False)  # now nobody asks for the gradient behind the third layer
    s = count(model, x).summary["flop"]
    assert (s["bwd_dx"], s["bwd_dw"]) == (0, three)
    assert totals(count(model, x))[1] == both(model.to("meta"), x.to("meta"))[1]


def test_nothing_is_trained():
    model = mlp(16, 32, 8).requires_grad_(False)
    report = count(model, torch.randn(5, 16))
    assert totals(report)[1] == 0 and {r["phase"] for r in report.tables["nodes"]} == {"fwd"}
    assert any("forward only" in n for n in report.notes)


def test_a_part_under_no_grad():
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.frozen, self.head = mlp(16, 32), nn.Linear(32, 8)

        def forward(self, x):
            with torch.no_grad():
                x = self.frozen(x)
            return self.head(x)

    s = count(M(), torch.randn(5, 16)).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (2 * 5 * 32 * (16 + 8), 0, 2 * 5 * 32 * 8)


@pytest.mark.parametrize("around", [torch.no_grad, torch.inference_mode, torch.enable_grad])
def test_the_callers_mode_does_not_matter(around):
    model, x = mlp(16, 32, 8), torch.randn(5, 16)
    expected = count(model, x).summary["flop"]
    with around():
        assert count(model, x).summary["flop"] == expected
        assert torch.is_grad_enabled() == (around is torch.enable_grad) and torch.is_inference_mode_enabled() == (around is torch.inference_mode)


class Spectrum(nn.Module):
    def forward(self, x):
        return torch.fft.fft(x)


def test_a_complex_output_has_a_backward():
    """As where a loss is of a spectrum."""
    model, x = mlp(16, 32, 8), torch.randn(5, 16)
    report, plain = count(nn.Sequential(model, Spectrum()), x), count(model, x)
    assert report.summary["flop"] == plain.summary["flop"] and not any("forward only" in n for n in report.notes)


class TwiceWithGradients(nn.Linear):
    def forward(self, x):
        x = super().forward(x)
        return super().forward(x) if torch.is_grad_enabled() else x


def test_a_forward_alone_runs_without_gradients():
    found = [count(TwiceWithGradients(16, 16), torch.randn(5, 16), **phases).summary["flop"]["fwd"] for phases in ({}, {"phases": ("fwd",)})]
    assert found == [2 * 2 * 5 * 256, 2 * 5 * 256]


class Twice(nn.Module):
    """One layer, called twice; another that shares its weight."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(24, 24), nn.Linear(24, 24, bias=False)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(self.a(self.a(x)))


def test_a_layer_called_twice_and_a_tied_weight():
    report = count(Twice(), torch.randn(5, 24))
    one = 2 * 5 * 24 * 24
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (3 * one, 2 * one, 3 * one)
    assert report.summary["params"] == 24 * 24 + 24
    rows = {r["module"]: r for r in report.tables["modules"]}
    assert rows["a"]["calls"] == 2 and rows["b"]["calls"] == 1
    assert rows["a"]["flop"] == 5 * one and rows["b"]["flop"] == 3 * one  # no dX in a's first call
    assert len([r for r in report.tables["nodes"] if r["phase"] == "opt"]) == 2
    names = {r["node"] for r in report.tables["nodes"] if r["phase"] == "fwd"}
    assert len(names) == 3  # every call has a name of its own


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_recomputes(reentrant):
    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.body, self.last = nn.Linear(16, 16), mlp(16, 40, 16), nn.Linear(16, 8)

        def forward(self, x):
            return self.last(checkpoint.checkpoint(self.body, self.first(x), use_reentrant=reentrant))

    model, x = M(), torch.randn(5, 16)
    body, first, last = 2 * 2 * 5 * 16 * 40, 2 * 5 * 16 * 16, 2 * 5 * 16 * 8
    report = count(model, x)
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"], s["total"] - s["fwd"]) == (body + first + last, body + last, body + first + last, totals(report)[1])
    # the second of the two matmuls is not needed again: nothing behind it is saved but what the first half makes; PyTorch's own early stop says so
    assert s["recompute"] == (body if reentrant else both(copy.deepcopy(model).to("meta"), x.to("meta"))[1] - s["bwd_dx"] - s["bwd_dw"])
    assert s["recompute"] in (body // 2, body)
    rows = [r for r in report.tables["nodes"] if r["phase"] == "recompute" and r["flop"]]
    assert rows and all(r["module"].startswith("body") for r in rows)
    with pytest.warns(UserWarning, match="None of the inputs") if reentrant else nullcontext():  # as without an analysis
        assert "recompute" not in {r["phase"] for r in count(model, x, phases=("fwd",)).tables["nodes"]}
    dense = copy.deepcopy(model)
    dense.forward = lambda x: dense.last(dense.body(dense.first(x)))
    saved = [r.tables["footprint"][-1]["saved_activations"] for r in (report, count(dense, x))]
    assert saved[0] < saved[1]


def test_gradients_of_gradients():
    """A model that differentiates inside its forward, as learned forces do: the counts are those of the ops that run."""

    class M(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = mlp(4, 32, 1)

        def forward(self, x):
            x = x.detach().requires_grad_()
            energy = self.net(x).sum()
            return torch.autograd.grad(energy, x, create_graph=True)[0]

    seen = []

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
                a, b = args[-2:]
                seen.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
            return out

    model, x = M(), torch.randn(6, 4)
    with Products():
        y = model(x)
        y.backward(torch.ones_like(y))
    assert totals(count(model, x))[2] == sum(seen)


class Force(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(16, 24)

    def forward(self, x):
        return torch.func.grad(lambda z: self.fc(z).square().sum())(x)


def test_a_forward_that_differentiates_by_functions():
    """What it does itself counts where the forward alone is asked for."""
    model, x, one = Force(), torch.randn(6, 16), 2 * 6 * 16 * 24
    s = count(model, x, phases=("fwd",)).summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["total"]) == (one, one, 2 * one)
    with pytest.raises(UnsupportedError, match=r"(?s)saved tensor hooks.*fix: the forward differentiates by torch\.func: .*phases=\('fwd',\)"):
        count(model, x)


class Energy(nn.Module):
    def __init__(self, create_graph):
        super().__init__()
        self.fc, self.create_graph = nn.Linear(16, 24), create_graph

    def forward(self, x):
        with torch.enable_grad():
            z = x.detach().requires_grad_()
            return torch.autograd.grad(self.fc(z).square().sum(), z, create_graph=self.create_graph)[0]


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_forward_that_differentiates_by_autograd(create_graph):
    """As learned forces do."""
    s = count(Energy(create_graph), torch.randn(6, 16), phases=("fwd",)).summary["flop"]
    assert (s["fwd"], s["total"]) == (2 * 6 * 16 * 24, 4 * 6 * 16 * 24)


class Penalty(nn.Module):
    """Of the gradient by the input, which has a gradient itself: create_graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(64, 32), nn.Linear(32, 64)

    def forward(self, x):
        y = self.b(torch.tanh(self.a(x))).square().sum()
        return y + torch.autograd.grad(y, x, create_graph=True)[0].square().sum()


def test_gradients_of_a_gradient():
    """Two products of a size P: 2 P forward, 2 P by the first gradient, each of which has two, and the usual four; nothing runs again."""
    one = 2 * 8 * 64 * 32
    report = count(Penalty(), torch.randn(8, 64, requires_grad=True))
    s = report.summary["flop"]
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"], s["total"]) == (2 * one, 6 * one, 4 * one, 12 * one) and "recompute" not in s
    products = [r for r in report.tables["nodes"] if r["m"]]
    assert {r["node"] for r in products} == {"a:addmm", "b:addmm"}, "all are of the two layers"
    assert [sum(r["flop"] for r in products if r["module"] == m) for m in "ab"] == [6 * one] * 2
    assert "b:addmm  aten.mm  dX" in report.explain("b")


def pair(*layers):
    return nn.Sequential(nn.Linear(64, 64), *layers, nn.Linear(64, 64))


class ByHand(nn.Linear):
    """Whose function has its backward in Python."""

    class Of(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, gy):
            x, w = ctx.saved_tensors
            return gy @ w, gy.t() @ x

    def forward(self, x):
        return self.Of.apply(x, self.weight)


TWICE = {  # of what the first gradient is, and (fwd, dX, dW) in products of both layers: by x, a product by the mask's half of the weight counts as 1/2
    "dense": (lambda: pair(), "xw", (1, 5, 3)),
    "in Python": (lambda: nn.Sequential(ByHand(64, 64, bias=False), nn.Tanh(), ByHand(64, 64, bias=False)), "xw", (1, 5, 3)),
    "masked": (lambda: fxmask.apply(pair(), ratio=0.5, block=(16, 16)), "xw", (0.5, 2.5, 1.5)),
    "ste": (lambda: fxmask.apply(pair(), ratio=0.5, block=(16, 16), backward="ste"), "xw", (0.5, 3.5, 3)),  # products by dW's gradient are dense
    "unmasked": (lambda: fxmask.apply(pair(), ratio=0.5, block=(16, 16), backward="unmasked"), "xw", (0.5, 5, 3)),
    "dropped": (lambda: fxmask.apply(pair(), fxmask.BlockDropout(p=0.5, block=(8, 16))), "xw", (0.5, 2.5, 1.5)),
    "pruned": (lambda: fxmask.apply(pair(), fxmask.ActivationPruning(ratio=0.5, block=8)), "x", (1, 3, 1.5)),  # the gradient by x makes no dW
}


@pytest.mark.parametrize("name", TWICE)
def test_gradients_of_gradients_by_weights(name):
    """dX has two gradients, by dY and W; dW has two, by dY and X, neither of which is a weight's."""
    make, by, expected = TWICE[name]
    torch.manual_seed(0)

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.m = make()

        def forward(self, x):
            y = self.m(x).square().sum()
            return y + sum(g.square().sum() for g in torch.autograd.grad(y, [x, *self.m.parameters()] if by == "xw" else x, create_graph=True))

    found = count(Twice(), torch.randn(8, 64, requires_grad=True)).summary["flop"]
    one = 2 * 2 * 8 * 64 * 64
    assert tuple(found[k] / one for k in ("fwd", "bwd_dx", "bwd_dw")) == expected and "recompute" not in found


class Product(torch.autograd.Function):
    """Whose first op is of the weight alone."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w.t().contiguous()

    @staticmethod
    def backward(ctx, gy):
        x, w = ctx.saved_tensors
        return gy @ w, gy.t() @ x


class Functions(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(48, 64)), nn.Parameter(torch.randn(32, 48))

    def forward(self, x):
        return Product.apply(Product.apply(x, self.a), self.b)


def test_a_function_with_a_backward_of_its_own():
    model, x = Functions(), torch.randn(6, 64)
    s, one = count(model, x).summary["flop"], 2 * 6 * (64 * 48 + 48 * 32)
    assert (s["fwd"], s["bwd_dx"], s["bwd_dw"]) == (one,) * 3, "it makes a gradient of an input that needs none, too"
    assert totals(count(model, x))[:2] == both(model, x)


class Square(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, gy):
        return 2 * gy * ctx.saved_tensors[0]


class Teacher(nn.Module):
    """A function without a weight, and at once after it another layer without gradients."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.teacher = nn.Linear(64, 48), nn.Linear(48, 32), nn.Linear(64, 32)

    def forward(self, x):
        h = Square.apply(self.a(x))
        with torch.no_grad():
            t = self.teacher(x)
        return self.b(h) - t


def test_what_comes_after_a_function_is_not_of_it():
    nodes = count(Teacher(), torch.randn(6, 64)).tables["nodes"]
    assert [r["op"] for r in nodes if r["module"] == "teacher" and r["phase"] != "fwd"] == []
    assert [r["phase"] for r in nodes if r["op"] == "aten.mul"] == ["fwd", "dX", "dX"]
