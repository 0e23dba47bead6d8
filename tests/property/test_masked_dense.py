"""The CPU's masked-dense has the bits of the reference, whatever the shape, block, dtype, layout or broken element."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples

from fxmask.kernels import reference
from fxmask.kernels.cpu import chosen, masked_dense
from fxmask.kernels.grid import grid_shape

SIZES, SIDES = st.integers(1, 70), st.one_of(st.integers(1, 8), st.integers(1, 200))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
BROKEN = (float("nan"), float("inf"), float("-inf"), -0.0)


FORMS = {"kept": (1 << 30, 1 << 30), "kept bits": (1, 1 << 30), "rows of bits": (1, 1)}


@pytest.fixture(scope="module", autouse=True, params=FORMS)
def form(request):
    """Weights of any size in every form."""
    few, many = FORMS[request.param]
    with mock.patch.multiple(masked_dense, FEW=few, MANY=many):
        yield masked_dense.Bits if many == 1 else masked_dense.Kept


def same_bits(a, b):
    integer = INTEGERS[a.element_size()]
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def operands(n, k, block, dtype, seed, m=5):
    g = torch.Generator().manual_seed(seed)
    x, gy, w, bias = (torch.randn(s, generator=g).to(dtype) for s in ((m, k), (m, n), (n, k), (n,)))
    return x, gy, w, bias, torch.rand(grid_shape((n, k), block), generator=g) < 0.5


@given(SIZES, SIZES, SIDES, SIDES, DTYPES, st.booleans(), st.integers(0, 99))
@examples(300)
def test_a_masked_weight_is_equal_to_the_bit(n, k, rows, cols, dtype, transposed, seed):
    *_, w, _, mask = operands(n, k, (rows, cols), dtype, seed)
    for i, value in enumerate(BROKEN):
        w.view(-1)[(seed + 7 * i) % (n * k)] = value
    w = w.t().contiguous().t() if transposed else w
    before, expected = w.clone(), reference.masked(w, mask, (rows, cols))
    got = masked_dense.masked(w, mask, (rows, cols))
    assert same_bits(got, expected) and got.stride() == expected.stride() and got.data_ptr() != w.data_ptr() and same_bits(w, before)


@given(SIZES, SIZES, SIDES, SIDES, DTYPES, st.sampled_from(["plain", "tokens contiguous", "three axes"]), st.booleans(), st.integers(0, 99))
@examples(200)
def test_every_op_is_equal_to_the_bit(n, k, rows, cols, dtype, layout, transposed, seed):
    b = rows, cols
    x, gy, w, bias, mask = operands(n, k, b, dtype, seed, 6)
    if layout == "three axes":
        x, gy = x.view(2, 3, k), gy.view(2, 3, n)
    elif layout == "tokens contiguous":
        x, gy = (t.t().contiguous().t() for t in (x, gy))
    w = w.t().contiguous().t() if transposed else w
    given = x, gy, w, bias
    before = [t.clone() for t in given]
    assert same_bits(masked_dense.masked_linear(x, w, bias, mask, b), reference.masked_linear(x, w, bias, mask, b))
    expected = reference.masked_linear_backward(gy, x, w, mask, None, b, "masked")
    for got, want in zip(masked_dense.masked_linear_backward(gy, x, w, mask, b), expected, strict=True):
        assert same_bits(got, want) and got.is_contiguous()
    assert same_bits(masked_dense.masked_linear_dx(gy, w, mask, b, "masked"), expected[0])
    assert same_bits(masked_dense.masked_linear_dw(gy, x, mask, None, b, "masked"), expected[1])
    assert all(same_bits(t, old) for t, old in zip(given, before, strict=True))


@pytest.mark.parametrize(("n", "block"), [(1009, 16), (1009, 64), (500, 999), (1000, 64), (1024, 128), (300, 1)])
def test_bits_take_no_more_than_a_mask_of_the_weight(n, block):
    """Or than a row of bits for each row of blocks."""
    nb = -(-n // block)
    bits = masked_dense.bits_of(torch.ones(nb, 5, dtype=torch.bool), (n, 80), (block, 16), torch.int32)
    assert bits.rows.numel() * 4 <= max(n, nb * 4) * 80 and bits.rows.shape[2] == 80


def test_complex_weights_that_no_integer_is_as_wide_as():
    w = torch.randn(256, 256, dtype=torch.complex128)
    mask = torch.eye(4, dtype=torch.bool)
    assert torch.equal(masked_dense.masked(w, mask, (64, 64)), reference.masked(w, mask, (64, 64)))


def test_the_dispatch_takes_it(monkeypatch, form):
    """Small layers never take strips: `auto` multiplies by what this module masks."""
    x, gy, w, _, mask = operands(48, 40, (16, 16), torch.float32, 0)
    calls = []
    monkeypatch.setattr(form, "cut", lambda self, w, out=None: calls.append(w.shape) or w.clone())
    y = chosen.AUTO.masked_linear(x, w, None, mask, (16, 16))
    torch.testing.assert_close(y, x @ w.t())  # nothing was cut off
    chosen.AUTO.masked_linear_backward(gy, x, w, mask, None, (16, 16), "masked")
    assert calls == [(48, 40)] * 3
