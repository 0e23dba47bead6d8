"""What the gate and the GPU tests let pass: sums in one chain and operands cut to TF32 do, a product in too few bits and one that lacks something do not."""

import math

import pytest
import torch

from fxmask.bench import cells, gate, inputs, tolerance
from fxmask.bench.dropping import differs
from fxmask.bench.tolerance import allowed
from fxmask.kernels import reference

M, N, K = 600, 64, 96


def bits(t, kept, nearest=False):
    """Float32 with so many bits of the fraction: the rest is dropped, or rounded."""
    drop = 23 - kept
    return ((t.contiguous().view(torch.int32) + ((1 << drop - 1) if nearest else 0)) & -(1 << drop)).view(torch.float32)


def chain(gy, x):
    """gy^T x in float32, one token after the other."""
    out = torch.zeros(gy.shape[1], x.shape[1])
    for g, row in zip(gy, x, strict=True):
        out.addr_(g, row)
    return out


@pytest.fixture(scope="module")
def dw():
    return inputs.make_inputs(cells.Cell("dw", "backward", M, N, K, "fp32", (16, 16), 0.5, "random", 0, "x"), torch.device("cpu"))


def test_float32(dw):
    """Through the gate, which knows how long the sums are. A chain is beyond the bound of cuBLAS' sums, which the one of 16 bits would be."""
    def product(gy, x):
        return reference.masked(gy.t() @ x, dw.mask, dw.block)

    added = reference.masked(chain(dw.gy, dw.x), dw.mask, dw.block)
    assert gate.check_matmul(dw, (added,)).passed
    exact, plain = gate.plain_outputs(dw, torch.float64)[0], gate.plain_outputs(dw, torch.float32)[0]
    assert allowed(exact, plain, 0) < (added.double() - exact).abs().max()
    wrong = {
        "tf32": product(bits(dw.gy, 10, nearest=True), bits(dw.x, 10, nearest=True)),
        "a step of 32 less": product(dw.gy[:-32], dw.x[:-32]),
        "a token less": product(dw.gy[:-1], dw.x[:-1]),
        "unmasked": dw.gy.t() @ dw.x,
        "nan": added * float("nan"),
    }
    for name, got in wrong.items():
        verdict = gate.check_matmul(dw, (got,))
        assert not verdict.passed and "over the budget" in verdict.why, name


def test_tf32():
    """Operands cut to 10 bits pass, to 9 they do not; PyTorch's are rounded to the nearest."""
    g = torch.Generator().manual_seed(0)
    gy, x = torch.randn(M, N, generator=g), torch.randn(M, K, generator=g)
    exact, plain = gy.double().t() @ x.double(), bits(gy, 10, nearest=True).t() @ bits(x, 10, nearest=True)

    def error(gy, x):
        return float(((gy.t() @ x).double() - exact).abs().max())

    budget = allowed(exact, plain, M, tf32=True)
    assert error(bits(gy, 10), bits(x, 10)) <= budget < error(bits(gy, 9), bits(x, 9))
    assert allowed(exact, plain, M) < error(bits(gy, 10), bits(x, 10))  # twice the base is too little
    assert error(bits(gy, 10)[:-32], bits(x, 10)[:-32]) > budget


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_without_its_scale(dtype):
    g = torch.Generator().manual_seed(0)
    x, w, gy = (torch.randn(s, generator=g).to(dtype) for s in ((M, K), (N, K), (M, N)))
    keep = torch.rand(M, K, generator=g) >= 0.1
    dropped, scale = torch.where(keep, x, 0), 1 / (1 - 0.1)
    for s, right in ((scale, True), (1.0, False)):
        for product in range(3):
            parts = [(dropped * scale) @ w.t(), torch.where(keep, gy @ w, 0) * scale, gy.t() @ (dropped * scale)]
            parts[product] = parts[product] / scale * s
            _, why = differs((*parts, keep), (x, w, gy), (1, 1), 0.1)
            assert (not why) == right and (right or ("y", "dX", "dW")[product] in why)


def test_nothing_passes_beside_a_baseline_that_is_no_number():
    exact = torch.ones(2, 2, dtype=torch.float64)
    assert math.isnan(allowed(exact, torch.full((2, 2), float("nan")), 4))  # no error is below it


@pytest.mark.parametrize(("dtype", "tf32", "bases", "roundings"), [(torch.bfloat16, False, 2, 1), (torch.float32, True, 4, 1), (torch.float32, False, 2, 6)])
def test_what_is_allowed_of_sums_of_a_hundred_terms(dtype, tf32, bases, roundings):
    exact = torch.tensor([[-8.0, 1.0]], dtype=torch.float64)
    plain = torch.tensor([[-8.0, 1.25]], dtype=dtype)
    assert allowed(exact, plain, 100, tf32) == pytest.approx(bases * 0.25 + roundings * 8 * torch.finfo(dtype).eps, rel=1e-12)


def test_each_product_has_its_own_number_of_terms(monkeypatch):
    """K of the forward, N of dX, tokens of dW."""
    seen = []
    monkeypatch.setattr(tolerance, "allowed", lambda exact, plain, terms, tf32=False: seen.append(terms) or 1.0)
    i = inputs.make_inputs(cells.Cell("step", "both", 40, N, K, "fp32", (16, 16), 0.5, "random", 0, "x"), torch.device("cpu"))
    outputs = gate.plain_outputs(i, torch.float64)
    gate.check_matmul(i, tuple(outputs))
    gate.over_budget(outputs, outputs, outputs)
    gate.over_budget([outputs[0], None, outputs[2]], outputs, outputs)
    assert seen == [K, N, 40, K, N, 40, K, 40]


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_no_number_is_over_every_budget(value):
    exact = [torch.ones(4, 4, dtype=torch.float64)] * 3
    for k, name in enumerate(("y", "dX", "dW")):
        got = [t.clone() for t in exact]
        got[k][0, 0] = value
        assert gate.over_budget(got, exact, exact) == (float("inf"), f"{name}: error inf over the budget {allowed(exact[0], exact[0], 4):.3g}")


def test_results_of_the_dtypes_size():
    """Root mean squares tell what many elements lose, the largest error what one does; what is missing is wrong."""
    g = torch.Generator().manual_seed(0)
    exact = torch.randn(100, 100, generator=g, dtype=torch.float64)
    plain = exact + 1e-4 * torch.randn(100, 100, generator=g, dtype=torch.float64)
    worst = (plain - exact).abs().max()
    one, every = plain.clone(), exact + 2.2 * (plain - exact)
    one[3, 4] = exact[3, 4] + 4.1 * worst
    assert gate.of_the_dtypes_size([plain], [plain], [exact])[1] and gate.of_the_dtypes_size([exact + 1.9 * (plain - exact)], [plain], [exact])[1]
    for got in ([one], [every], [], [plain, plain], [plain * float("nan")]):
        assert not gate.of_the_dtypes_size(got, [plain, plain], [exact])[1]
    assert gate.of_the_dtypes_size([one], [plain], [exact])[0] == pytest.approx(float(4.1 * worst / exact.abs().max()))
