"""FLOP of products that are no matmul of two matrices, by hand; PyTorch's counter leaves most of them out."""

import pytest
import torch
import torch.nn.functional as F
from analysis.counted import Apply, Reads, analyze
from torch import nn

import fxmask


class Of(nn.Module):
    """A function of a parameter and of the inputs."""

    def __init__(self, shape, how, dtype=torch.float32):
        super().__init__()
        self.w, self.how = nn.Parameter(torch.randn(shape, dtype=dtype)), how

    def forward(self, *inputs):
        return self.how(self.w, *inputs)


def rand(*shape):
    return torch.randn(shape, requires_grad=True)


def of_phases(report):
    return tuple(report.summary["flop"].get(phase, 0) for phase in ("fwd", "bwd_dx", "bwd_dw"))


# the model, its inputs, FLOP of forward, dX, dW; outer products, of which dW of a product with one vector is one, multiply no matrices
PRODUCTS = {
    "a vector": (lambda: Of((7, 8), lambda w, x: w @ x), (rand(8),), (112, 112, 0)),
    "a vector, and a bias": (lambda: Of((7, 8), lambda w, b, x: torch.addmv(b, w, x)), (rand(7), rand(8)), (112, 112, 0)),
    "two vectors": (lambda: Of((8,), torch.dot), (rand(8),), (16, 0, 0)),
    "a batch that is summed": (lambda: Of((4, 6), torch.addbmm), (rand(3, 4, 5), rand(3, 5, 6)), (720, 1440, 0)),
    "a sum with products": (lambda: Of((3, 4, 6), torch.baddbmm), (rand(3, 4, 5), rand(3, 5, 6)), (720, 1440, 0)),
    "bilinear": (lambda: nn.Bilinear(5, 6, 7), (rand(3, 5), rand(3, 6)), (2 * 3 * 210, 4 * 3 * 210, 2 * 3 * 210)),
    "bilinear, of more axes": (lambda: nn.Bilinear(5, 6, 7), (rand(2, 3, 5), rand(2, 3, 6)), (2 * 6 * 210, 4 * 6 * 210, 2 * 6 * 210)),
    "bilinear, of one that needs no gradient": (lambda: nn.Bilinear(5, 6, 7), (rand(3, 5), torch.randn(3, 6)), (2 * 3 * 210,) * 3),
    "distances of many": (lambda: Of((30, 8), lambda w, x: torch.cdist(x, w)), (rand(40, 8),), (2 * 40 * 30 * 8,) * 3),
    "distances in a batch": (lambda: Of((2, 30, 8), lambda w, x: torch.cdist(x, w)), (rand(2, 40, 8),), (2 * 2 * 40 * 30 * 8,) * 3),
    "time, batch, channels": (lambda: Of((3, 4, 6), lambda w, b, x: torch.conv_tbc(x, w, b)), (rand(6), rand(7, 2, 4)), (2 * 10 * 3 * 4 * 6,) * 3),
}


@pytest.mark.parametrize("name", PRODUCTS)
def test_by_hand(name):
    make, inputs, expected = PRODUCTS[name]
    report = analyze(make(), *inputs)
    assert of_phases(report) == expected and not report.tables["coverage"]
    assert report.summary["mac"]["total"] == sum(expected) // 2


X, Y = torch.randn(4, 5), torch.randn(5, 6)
IN_PLACE = {
    "addmm_": (lambda: torch.zeros(4, 6).addmm_(X, Y), 240),
    "baddbmm_": (lambda: torch.zeros(3, 4, 6).baddbmm_(X.expand(3, 4, 5), Y.expand(3, 5, 6)), 720),
    "addbmm_": (lambda: torch.zeros(4, 6).addbmm_(X.expand(3, 4, 5), Y.expand(3, 5, 6)), 720),
    "addmv_": (lambda: torch.zeros(4).addmv_(X, Y[:, 0]), 40),
}


@pytest.mark.parametrize("name", IN_PLACE)
def test_into_what_there_is(name):
    make, flop = IN_PLACE[name]
    report = analyze(Apply(lambda x: make() + x.sum()), torch.randn(2), phases=("fwd",), strict=True)
    assert report.summary["flop"]["fwd"] == flop


def test_narrow_numbers():
    """int8 and float8."""
    x, one = torch.ones(32, 32, dtype=torch.int8), torch.ones(())
    assert analyze(Apply(torch._int_mm), x, x, strict=True).summary["flop"]["fwd"] == 2 * 32**3
    f = torch.randn(32, 32).to(torch.float8_e4m3fn)
    scaled = Apply(lambda a: torch._scaled_mm(a, a.t(), one, one, out_dtype=torch.bfloat16))
    assert analyze(scaled, f, strict=True).summary["flop"]["fwd"] == 2 * 32**3


def test_distances_of_few_are_told_of():
    """They multiply no matrices, and have no formula here."""
    report = analyze(Apply(torch.cdist), rand(8, 8), rand(8, 8))
    assert [r["op"] for r in report.tables["coverage"]] == ["aten._cdist_forward", "aten._cdist_backward"]


DENSE = 2 * 24 * 48 * 64
MASKED = {
    "a vector": (lambda x, w: w @ x[0], (DENSE // 96, DENSE // 96, 0)),
    "bilinear": (lambda x, w: F.bilinear(x[:, :8], x[:, 8:16], w.view(48, 8, 8)), (DENSE // 4, DENSE // 2, DENSE // 4)),
    "distances": (lambda x, w: torch.cdist(x, w), (DENSE // 4,) * 3),
}


@pytest.mark.parametrize("name", MASKED)
def test_masked(name):
    how, expected = MASKED[name]
    torch.manual_seed(0)
    model = fxmask.apply(Reads(how), ratio=0.75, block=(16, 16), overrides={"fc": {"read": "weight"}})
    report = analyze(model, rand(24, 64))
    assert of_phases(report) == expected and report.summary["flop_dense"]["total"] == 4 * sum(expected)


def test_the_formula_is_the_one_that_was_counted_by():
    report = analyze(nn.Bilinear(5, 6, 7), torch.randn(3, 5), torch.randn(3, 6), phases=("fwd",))
    assert "2 * 1 * 21 * 1 * 30 = 1260 FLOP" in report.explain("(model):_trilinear") and "those of every operand, once" in report.explain("(model):_trilinear")


NAMED = {  # operands of the forward, dX and dW
    "by a weight": (lambda w, x: x @ w, {"x", "w", "y"}, {"dy", "w", "dx"}, {"x", "dy", "dw"}),
    "of a weight": (lambda w, x: w @ x, {"w", "x", "y"}, {"w", "dy", "dx"}, {"dy", "x", "dw"}),
    "of two inputs": (lambda w, x: (x * w[0, 0]) @ x.t(), {"x", "x2", "y"}, {"dy", "x2", "dx"}, set()),
}


@pytest.mark.parametrize("name", NAMED)
def test_operands_have_the_names_of_what_they_are(name):
    how, *expected = NAMED[name]
    report = analyze(Of((8, 8), how), rand(8, 8))
    rows = [r for r in report.tables["traffic"] if r["op"] == "aten.mm"]
    assert [{r["operand"] for r in rows if r["phase"] == phase} for phase in ("fwd", "dX", "dW")] == expected
    held = [(r["param_bytes"], r["index_bytes"]) for r in report.tables["nodes"] if r["op"] == "aten.mm"]
    assert held[0] == (0 if name == "of two inputs" else 4 * 64, 0) and {*held[1:]} == {(0, 0)}


def test_a_product_and_a_convolution_are_explained_by_their_own_formulas():
    said = [analyze(m, x).explain("0") for m, x in ((nn.Sequential(nn.Linear(8, 8)), rand(2, 8)), (nn.Sequential(nn.Conv1d(8, 8, 3)), rand(2, 8, 9)))]
    assert ["products (m, k) @ (k, n)" in s for s in said] == [True, False] and ["A convolution as the matmul" in s for s in said] == [False, True]


def test_bytes_of_a_vector_and_a_bias():
    report = analyze(Of((7, 8), lambda w, b, x: torch.addmv(b, w, x)), rand(7), rand(8), phases=("fwd",))
    assert {(r["operand"], r["direction"]): r["bytes_min"] for r in report.tables["traffic"]} == {
        ("bias", "read"): 28, ("w", "read"): 224, ("x", "read"): 32, ("y", "write"): 28
    }
