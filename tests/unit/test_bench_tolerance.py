"""What the gate and the GPU tests let pass: sums in one chain and operands cut to TF32 do, a product in too few bits and one that lacks something do not."""

import math

import pytest
import torch

from fxmask.bench import cells, gate, inputs
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
