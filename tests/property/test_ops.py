"""Forward, dX, dW and db of every backward mode, for random shapes, against formulas written out here in float64."""

import functools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples

from fxmask.kernels import ops, reference
from fxmask.kernels.grid import grid_shape

MODES = ["masked", "ste", "unmasked", "rigl", "rigl-dense"]
BLOCKS = st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 3), (16, 16), (8, 32), (64, 16), (128, 128)])


def by_hand(x, w, b, mask, block, gy, mode):
    """The definitions, block by block, in numpy: nothing here comes from the library."""
    n, k = w.shape
    xf, gf = x.reshape(-1, k), gy.reshape(-1, n)
    y, dx, dw = np.zeros((len(xf), n)), np.zeros((len(xf), k)), np.zeros((n, k))
    for i in range(mask.shape[0]):
        for j in range(mask.shape[1]):
            r, c = slice(i * block[0], (i + 1) * block[0]), slice(j * block[1], (j + 1) * block[1])
            if mask[i, j]:
                y[:, r] += xf[:, c] @ w[r, c].T
            if mask[i, j] or mode == "unmasked":
                dx[:, c] += gf[:, r] @ w[r, c]
            if mask[i, j] or mode in ("ste", "unmasked", "rigl-dense"):
                dw[r, c] = gf[:, r].T @ xf[:, c]
    y = y if b is None else y + b
    return y.reshape(gy.shape), dx.reshape(x.shape), dw, gf.sum(0)


def run(x, w, b, mask, block, gy, mode):
    x, w = x.clone().requires_grad_(), w.clone().requires_grad_()
    b = None if b is None else b.clone().requires_grad_()
    dense = torch.tensor(mode == "rigl-dense") if mode.startswith("rigl") else None
    results = []
    for function in (ops.linear, functools.partial(ops.linear, impl="reference"), functools.partial(ops.linear, impl="cpu"), reference.composite):
        y = function(x, w, b, mask, block, mode.removesuffix("-dense"), dense)
        inputs = [t for t in (x, w, b) if t is not None]
        results.append((y.detach(), *torch.autograd.grad(y, inputs, gy)))
    return results


@pytest.mark.parametrize("mode", MODES)
@given(
    st.lists(st.integers(1, 5), min_size=0, max_size=3), st.integers(1, 150), st.integers(1, 150), BLOCKS, st.floats(0, 1), st.booleans(), st.integers(0, 99)
)
@examples(40)
def test_every_mode_against_its_definition(mode, lead, n, k, block, density, bias, seed):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*lead, k, generator=g, dtype=torch.float64)
    w, b = torch.randn(n, k, generator=g, dtype=torch.float64), torch.randn(n, generator=g, dtype=torch.float64)
    gy = torch.randn(*lead, n, generator=g, dtype=torch.float64)
    mask = torch.rand(grid_shape((n, k), block), generator=g) < density
    expected = by_hand(x.numpy(), w.numpy(), b.numpy() if bias else None, mask.numpy(), block, gy.numpy(), mode)
    for got in run(x, w, b if bias else None, mask, block, gy, mode):
        for name, a, e in zip(("y", "dx", "dw", "db"), got, expected, strict=False):
            np.testing.assert_allclose(a.numpy(), e, rtol=1e-10, atol=1e-10, err_msg=name)
        assert len(got) == 3 + bias


@pytest.mark.parametrize("mode", ["masked", "ste", "unmasked", "rigl"])
@pytest.mark.parametrize("shape", [(0, 40), (3, 0, 40), (40,)])
def test_no_tokens_and_one_token(mode, shape):
    x, w, mask = torch.randn(shape, requires_grad=True), torch.randn(24, 40, requires_grad=True), torch.ones(2, 3, dtype=torch.bool)
    y = ops.linear(x, w, None, mask, (16, 16), mode)
    assert y.shape == (*shape[:-1], 24)
    y.sum().backward()
    assert x.grad.shape == x.shape and w.grad.shape == w.shape


def test_a_masked_block_is_never_multiplied():
    """What is masked may be Inf or NaN: a zero times it is not computed."""
    w = torch.randn(32, 32)
    w[0, 20] = float("nan")
    mask = torch.tensor([[True, False], [True, True]])
    x = torch.randn(4, 32, requires_grad=True)
    y = ops.linear(x, w.requires_grad_(), None, mask, (16, 16), "masked")
    y.sum().backward()
    assert y.isfinite().all() and x.grad.isfinite().all() and w.grad.isfinite().all()
    mask[0, 1] = True
    assert ops.linear(x, w, None, mask, (16, 16), "masked").isnan().any()
