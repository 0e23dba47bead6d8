"""Bodies of the GPU tests of numbers and metadata, each for any device: the tests run them on CUDA, `rehearse.py` on the CPU in Triton's interpreter."""

from __future__ import annotations

import math
from contextlib import contextmanager

import torch
from torch import nn

import fxmask
from fxmask.bench.tolerance import allowed, largest
from fxmask.kernels import draw_ops, dropout, dropout_ops, lists, ops, reference, saliency
from fxmask.kernels.grid import expand_mask, grid_shape, keep_count
from fxmask.kernels.score import block_keys
from fxmask.kernels.select import select_ranked
from fxmask.kernels.triton import launch, refresh
from fxmask.kernels.triton import saliency as triton_saliency
from fxmask.kernels.triton.device import LAUNCHES

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


@contextmanager
def poisoned():
    """Memory that a kernel should write holds NaN, or the largest int, before."""
    real = torch.empty

    def empty(*args, **kwargs):
        t = real(*args, **kwargs)
        return t.fill_(float("nan")) if t.is_floating_point() else t.fill_(True if t.dtype == torch.bool else torch.iinfo(t.dtype).max)

    launch.torch.empty = empty
    try:
        yield
    finally:
        launch.torch.empty = real


@contextmanager
def tf32(on):
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = on
    try:
        yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before


def make(device, shape, block, ratio, dtype, gap=0, seed=0):
    """x, w, bias, gy and a mask with the exact number of kept blocks; `gap` elements between the rows of x."""
    m, n, k = shape
    g = torch.Generator().manual_seed(seed)
    x, w, b, gy = (torch.randn(s, generator=g).to(dtype).to(device) for s in ((m, k + gap), (n, k), (n,), (m, n)))
    nb, kb = grid_shape((n, k), block)
    chosen = torch.randperm(nb * kb, generator=g)[: keep_count(nb * kb, ratio)]
    mask = torch.zeros(nb * kb, dtype=torch.bool).index_fill(0, chosen, True).reshape(nb, kb)
    return x[:, :k], w, b, gy, mask.to(device)


def forward_and_gradients(impl, x, w, b, gy, mask, block):
    wanted = [t.detach().requires_grad_() for t in (x, w, b) if t is not None]
    y = ops.masked_linear(*wanted[:2], wanted[2] if b is not None else None, mask, *block, "masked", None, impl)
    return [y.detach(), *torch.autograd.grad(y, wanted, gy)]


def assert_close(got, exact, low, what, terms, tf32=False):
    """As near to float64 as `bench.tolerance` says of sums of so many terms; `low`: plain PyTorch in the same precision."""
    assert got.dtype == low.dtype and got.device == low.device, what
    assert not got.isnan().any(), f"{what}: something was not written"
    budget, error = allowed(exact, low, terms, tf32), largest(got.double() - exact)
    assert error <= budget, f"{what}: error {error:.3g}, budget {budget:.3g}"


def assert_launched(block, n, k, dropped=False):
    """The launches of one forward and backward, of masks or of dropout: matmuls that skip blocks where rows can be copied, else a pass of masking each.

    The forward reads rows of k features alone, dX and dW also rows of n.
    """
    forward, backward = lists.skips("forward", (n, k), block), lists.skips("dx", (n, k), block)
    passes = {"mask_cast_kernel": (not forward) + (1 + dropped) * (not backward), "zero_masked_kernel": int(not backward and not dropped)}
    want = {"list_matmul_kernel": forward + backward, "sampled_matmul_kernel": int(backward)} | passes
    got = {name: LAUNCHES[name] for name in want}
    assert got == want, f"the forward {'skips' if forward else 'masks'}, the backward {'skips' if backward else 'masks'}: expected launches {want}, got {got}"


def check_numbers(device, shape, block, ratio, precision, gap=0):
    """Forward, dX, dW and db against float64, outputs poisoned before; masked blocks of dW are exact zeros."""
    args = make(device, shape, block, ratio, DTYPES[precision], gap)
    x, w, b, gy, mask = args
    LAUNCHES.clear()
    with tf32(precision == "tf32"):
        with poisoned():
            got = forward_and_gradients("triton", *args, block)
        low = forward_and_gradients("reference", *args, block)
    exact = forward_and_gradients("reference", *(t.double() for t in (x, w, b, gy)), mask, block)
    m, n, k = shape
    for what, g, e, q, terms in zip(("y", "dx", "dw", "db"), got, exact, low, (k, n, m, m), strict=True):
        assert_close(g, e, q, what, terms, precision == "tf32")
    assert_launched(block, n, k)
    assert (reference.masked(got[2], ~mask, block) == 0).all()


def check_repeats(device, shape, block, ratio, precision, times=5):
    """The same bits in every run."""
    args = make(device, shape, block, ratio, DTYPES[precision])
    first = forward_and_gradients("triton", *args, block)
    for _ in range(times):
        assert all(torch.equal(a, b) for a, b in zip(first, forward_and_gradients("triton", *args, block), strict=True))


def check_mask(device, w, block, ratio):
    """The mask is the CPU's, to the bit, and exact in its number; twice."""
    nb, kb = grid_shape(w.shape, block)
    keep = keep_count(nb * kb, ratio)
    count, zero = torch.tensor(keep), torch.tensor(0)
    expected = reference.block_index(w, count, zero, block, "fro", "lowest", 0)
    for _ in range(2):
        with poisoned():
            got = ops.block_index(w.to(device), count.to(device), zero.to(device), *block, "fro", "lowest", 0, "triton")
        assert got.device.type == torch.device(device).type and int(got.sum()) == keep
        assert torch.equal(got.cpu(), expected)


def check_lists(device, mask, block):
    """The packed lists of both directions are the plain form's."""
    with poisoned():
        got = refresh.strip_lists(mask.to(device), block).cpu()
    check_same_lists(got, mask, block)


def check_same_lists(got, mask, block):
    for transposed in (False, True):
        both = (lists.unpack(t, tuple(mask.shape), block, transposed) for t in (got, lists.packed(mask, block)))
        for g, e in zip(*both, strict=True):
            assert torch.equal(g, e)


def check_group(device, shapes, block, dtype, ratio=0.7):
    """Masks and lists of a model's weights in one set of launches are those of the CPU."""
    weights = [torch.randn(shape).to(dtype) for shape in shapes]
    keeps = [torch.tensor(keep_count(nb * kb, ratio)) for nb, kb in (grid_shape(shape, block) for shape in shapes)]
    with poisoned():
        found = refresh.refresh_group([w.to(device) for w in weights], [k.to(device) for k in keeps], block)
    for w, keep, (mask, packed) in zip(weights, keeps, found, strict=True):
        assert torch.equal(mask.cpu(), reference.block_index(w, keep, keep, block, "fro", "lowest", 0))
        check_same_lists(packed.cpu(), mask.cpu(), block)


def check_scores(device, shapes, block, dtype, ratio=0.7):
    """Scores off gradients near float64, their averages to the bit, and the masks of a model by them: those of the CPU, whatever ties."""
    weights, gradients = ([torch.randn(shape).to(dtype) for shape in shapes] for _ in range(2))
    grids = [grid_shape(shape, block) for shape in shapes]
    for w, grad in zip(weights, gradients, strict=True):
        for criterion in saliency.BY_GRADIENT:
            got = triton_saliency.saliency(w.to(device), grad.to(device), block, criterion).cpu().double()
            exact = saliency.block_sums((grad.double() * (grad if criterion == "gradient" else w).double()), block)
            size = saliency.block_sums((grad.double() * (grad if criterion == "gradient" else w).double()).abs(), block).max()
            exact = {"gradient": exact.sqrt(), "taylor": exact.abs(), "movement": -exact}[criterion]
            assert float((got - exact).abs().max()) <= 1e-5 * float(size)
    tiny = torch.full(shapes[0], 1e-21, device=device)  # whose squares are denormal
    assert (triton_saliency.saliency(tiny, tiny, block, "gradient") > 0).all()
    for average, adds, skipped in ((0.9, False, None), (0.0, True, torch.zeros(1)), (0.9, False, torch.ones(1)), (0.0, False, None)):
        scores, new = torch.randn(grids[0]), torch.randn(grids[0])
        ours = scores.to(device)
        triton_saliency.take_in(ours, new.to(device), average, adds, True, None if skipped is None else skipped.to(device))
        saliency.take_in(scores, new, average, adds, True, skipped)
        assert torch.equal(ours.cpu(), scores)
    for scores in ([torch.randn(g) for g in grids], [torch.randint(-1, 2, g).float() for g in grids]):
        keeps = [torch.tensor(keep_count(nb * kb, ratio)) for nb, kb in grids]
        with poisoned():
            found = refresh.refresh_group(*([t.to(device) for t in ts] for ts in (weights, keeps)), block, [s.to(device) for s in scores])
        for w, keep, s, (mask, packed) in zip(weights, keeps, scores, found, strict=True):
            assert torch.equal(mask.cpu(), select_ranked(s, block_keys(w, block, "fro"), keep))
            check_same_lists(packed.cpu(), mask.cpu(), block)


def check_token_mixing(device, shape, block, dtype, ratio=0.7):
    """Inputs whose tokens lie side by side, forward, dX and dW, against the same numbers in rows."""
    b, c, n, k = shape
    x, gy = (torch.randn(b, f, c, device=device).to(dtype).transpose(1, 2) for f in (k, n))
    w, nb, kb = torch.randn(n, k, device=device).to(dtype), *grid_shape((n, k), block)
    mask = torch.rand(nb, kb, device=device) > ratio
    mask[0, 0] = True
    with poisoned():
        got = forward_and_gradients("triton", x, w, None, gy, mask, block)
    assert got[0].stride(1) == got[1].stride(1) == 1
    low = forward_and_gradients("reference", x, w, None, gy, mask, block)
    exact = forward_and_gradients("reference", *(None if t is None else t.double() for t in (x, w, None, gy)), mask, block)
    for what, g, e, q, terms in zip(("y", "dx", "dw"), got, exact, low, (k, n, b * c), strict=False):
        assert_close(g, e, q, what, terms)


def check_many_elements(device, tokens, wide, narrow, dtype, sample=300):
    """Tensors of tokens * wide elements in every role: y and gy of a wide output, x and dx of a wide input. The last rows are compared."""
    block = (64, 64)
    for n, k in ((wide, narrow), (narrow, wide)):
        w = torch.randn(n, k, device=device).to(dtype)
        mask = torch.rand(grid_shape((n, k), block), device=device) < 0.3
        mask[0, 0] = True
        x = torch.randn(tokens, k, device=device, dtype=dtype)
        y = ops.masked_linear(x, w, None, mask, *block, "masked", None, "triton")
        for rows in (slice(0, sample), slice(tokens - sample, None)):
            low = reference.masked_linear(x[rows], w, None, mask, block)
            assert_close(y[rows], reference.masked_linear(x[rows].double(), w.double(), None, mask, block), low, f"y {n}x{k}", k)
        dx = ops.masked_linear_dx(y, w, mask, *block, "masked", None, "triton")  # y stands for its gradient
        last = slice(tokens - sample, None)
        low = reference.masked_linear_dx(y[last], w, mask, block, "masked")
        assert_close(dx[last], reference.masked_linear_dx(y[last].double(), w.double(), mask, block, "masked"), low, f"dx {n}x{k}", n)
        del dx
        y[: tokens - sample] = 0  # so that dW depends on the last rows alone
        dw = ops.masked_linear_dw(y, x, mask, *block, "masked", None, "triton")
        low = reference.masked_linear_dw(y[last], x[last], mask, None, block, "masked")
        assert_close(dw, reference.masked_linear_dw(y[last].double(), x[last].double(), mask, None, block, "masked"), low, f"dw {n}x{k}", tokens)
        del x, y, dw


def check_dropout(device, shape, block, p, precision, gap=0):
    """Block dropout's forward, dX and dW against float64 under one mask, outputs poisoned before; a mask is the CPU's, to the bit."""
    (m, n, k), g, dtype = shape, torch.Generator().manual_seed(1), DTYPES[precision]
    x, w, b, gy = (torch.randn(s, generator=g).to(dtype).to(device) for s in ((m, k + gap), (n, k), (n,), (m, n)))
    seed = torch.tensor(12345)
    keep = dropout.draw(m, k, block, p, seed.to(device))
    assert torch.equal(keep.cpu(), dropout.draw(m, k, block, p, seed))
    assert torch.equal(draw_ops.drop_mask(seed.to(device), m, k, *block, p, "triton"), keep)

    def run(impl, x, w, b, gy):
        wanted = [t.detach().requires_grad_() for t in (x, w, b)]
        y = dropout_ops.dropped_linear(*wanted, keep, *block, p, impl)
        return [y.detach(), *torch.autograd.grad(y, wanted, gy)]

    LAUNCHES.clear()
    with tf32(precision == "tf32"):
        with poisoned():
            got = run("triton", x[:, :k], w, b, gy)
        low = run("reference", x[:, :k], w, b, gy)
    exact = run("reference", *(t.double() for t in (x[:, :k], w, b, gy)))
    for what, t, e, q, terms in zip(("y", "dx", "dw", "db"), got, exact, low, (k, n, m, m), strict=True):
        assert_close(t, e, q, what, terms, precision == "tf32")
    assert_launched(block, n, k, dropped=True)
    assert not got[1][~expand_mask(keep, (m, k), block)].any()


def check_dropout_repeats(device, shape, block, p, precision, times=5):
    """A seed gives the same bits in every run, masks included; another one other blocks."""
    (m, n, k), dtype = shape, DTYPES[precision]
    model = fxmask.apply(nn.Sequential(nn.Linear(k, n)).to(device, dtype), fxmask.BlockDropout(p, block, impl="triton"))
    x = torch.randn(m, k, device=device, dtype=dtype, requires_grad=True)

    def run(seed):
        torch.manual_seed(seed)
        y = model(x)
        return [y.detach(), *torch.autograd.grad(y.float().square().sum(), (x, *model.parameters()))]

    first = run(0)
    for _ in range(times):
        assert all(torch.equal(a, b) for a, b in zip(first, run(0), strict=True))
    assert not torch.equal(first[0], run(1)[0])


def tokens_beyond(limit, wide):
    """Tokens with which tokens * wide exceeds `limit`."""
    return math.ceil(limit / wide) + 137
