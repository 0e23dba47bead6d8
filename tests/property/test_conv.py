"""Masked convolutions against loops: the weight as a matrix, exactly k blocks of it, the convolution itself, and the gradients of every mode."""

import copy
from itertools import permutations, product
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples
from torch import nn

import fxmask
from fxmask.kernels import conv
from fxmask.kernels.grid import as_matrix, expand_mask, kept_elements, matrix_shape, to_blocks

MODES = ("masked", "ste", "unmasked", "rigl")
PADDING_MODES = ("zeros", "reflect", "replicate", "circular")


@st.composite
def convs(draw):
    kernel = draw(st.tuples(st.integers(1, 3), st.integers(1, 3)))
    padding = draw(st.sampled_from(("same", "valid", "ints")))
    stride = (1, 1) if padding == "same" else draw(st.one_of(st.tuples(st.integers(1, 3), st.integers(1, 3)), st.just(kernel)))
    padding = draw(st.one_of(st.just(0), st.tuples(st.integers(0, 2), st.integers(0, 2)))) if padding == "ints" else padding
    options = dict(stride=stride, padding=padding, dilation=draw(st.sampled_from((1, 2, (1, 2)))), bias=draw(st.booleans()))
    return nn.Conv2d(draw(st.integers(1, 4)), draw(st.integers(1, 6)), kernel, padding_mode=draw(st.sampled_from(PADDING_MODES)), **options).double()


def place(i: int, size: int, mode: str) -> int:
    """Where a padded image reads; -1 for a zero."""
    if 0 <= i < size:
        return i
    if mode == "zeros":
        return -1
    if mode == "circular":
        return i % size
    return min(max(i, 0), size - 1) if mode == "replicate" else -i if i < 0 else 2 * (size - 1) - i


def by_loop(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None, m: nn.Conv2d) -> torch.Tensor:
    """A convolution, window by window."""
    (kh, kw), (sh, sw), (dh, dw) = w.shape[2:], m.stride, m.dilation
    before = [d * (k - 1) // 2 for k, d in zip((kh, kw), (dh, dw), strict=True)] if m.padding == "same" else [0, 0] if m.padding == "valid" else m.padding
    after = [d * (k - 1) - b for k, d, b in zip((kh, kw), (dh, dw), before, strict=True)] if m.padding == "same" else before
    rows, cols = ((n + b + a - d * (k - 1) - 1) // s + 1 for n, b, a, d, k, s in zip(x.shape[2:], before, after, (dh, dw), (kh, kw), (sh, sw), strict=True))
    y = torch.zeros(len(x), len(w), rows, cols, dtype=x.dtype)
    for r in range(rows):
        for c in range(cols):
            for i in range(kh):
                for j in range(kw):
                    a, b = place(r * sh + i * dh - before[0], x.shape[2], m.padding_mode), place(c * sw + j * dw - before[1], x.shape[3], m.padding_mode)
                    if a >= 0 and b >= 0:
                        y[:, :, r, c] += x[:, :, a, b] @ w[:, :, i, j].t()
    return y if bias is None else y + bias[:, None, None]


def kept_by_loop(mask: torch.Tensor, shape: torch.Size, block: tuple[int, int]) -> torch.Tensor:
    """Which elements of (c_out, c_in, kh, kw) lie in kept blocks of (c_out, c_in * kh * kw)."""
    kept = torch.zeros(shape, dtype=torch.bool)
    for o in range(shape[0]):
        for i in range(shape[1]):
            for a in range(shape[2]):
                for b in range(shape[3]):
                    kept[o, i, a, b] = mask[o // block[0], (i * shape[2] * shape[3] + a * shape[3] + b) // block[1]]
    return kept


def dense_with(m: nn.Conv2d, w: torch.Tensor, x: torch.Tensor, gy: torch.Tensor | None = None) -> tuple[torch.Tensor, ...]:
    """y, gy, dX, dW, db of a dense copy with another weight."""
    twin, x = copy.deepcopy(m), x.clone().requires_grad_()
    twin.weight.data.copy_(w)
    y = twin(x)
    gy = torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(1)) if gy is None else gy
    y.backward(gy)
    return y.detach(), gy, x.grad, twin.weight.grad, None if twin.bias is None else twin.bias.grad


def strides(t: torch.Tensor) -> list[int]:
    """The strides that say anything."""
    return [stride for size, stride in zip(t.shape, t.stride(), strict=True) if size > 1]


def near(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool((a - b).abs().max() <= 1e-12 * (1 + b.abs().max())) if b.numel() else a.shape == b.shape


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")  # PyTorch's own
@pytest.mark.filterwarnings("ignore:no block can be masked at this ratio:fxmask.FxMaskWarning")
@examples(100)
@given(
    convs(), st.tuples(st.integers(1, 9), st.integers(1, 40)), st.sampled_from((0.0, 0.3, 0.5, 0.9)), st.sampled_from(MODES),
    st.sampled_from(("reference", "auto", "cpu")), st.tuples(st.integers(7, 9), st.integers(7, 9)), st.booleans(), st.booleans(), st.integers(0, 2**31),
)  # fmt: skip
def test_a_masked_convolution_is_that_of_the_masked_weight(m, block, ratio, mode, impl, size, batched, last, seed):
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in m.parameters():
            p.copy_(torch.randn(p.shape, generator=g))
    x = torch.randn(2, m.in_channels, *size, generator=g, dtype=torch.float64)
    if last:
        x, m = x.to(memory_format=torch.channels_last), m.to(memory_format=torch.channels_last)
    x = x if batched else x[0]
    dense, before = copy.deepcopy(m), m.weight.detach().clone()
    fxmask.apply(m, fxmask.WeightMask(ratio, block, backward=mode, impl=impl, dense_every=2), layers=nn.Conv2d, exclude=())
    fxmask.step(m, 0)
    mask = fxmask.masks(m)["weight"]

    shape = (m.out_channels, m.in_channels * m.kernel_size[0] * m.kernel_size[1])
    assert mask.shape == (ceil(shape[0] / block[0]), ceil(shape[1] / block[1]))
    assert int(mask.sum()) == max(1, ceil(mask.numel() * round((1 - ratio) * 10) / 10))
    kept = kept_by_loop(mask, m.weight.shape, block)
    assert torch.equal(kept, expand_mask(mask, m.weight.shape, block)) and int(kept.sum()) == int(kept_elements(mask, shape, block))
    scores = to_blocks(before, block).square().sum(-1)
    if not mask.all():
        assert scores[mask].min() >= scores[~mask].max() * (1 - 1e-5)

    given = x.clone().requires_grad_()
    y = m(given)
    w = torch.where(kept, before, 0)
    expected, gy, dx, dw, db = dense_with(dense, w, x)
    images = x if batched else x[None]
    bias = None if dense.bias is None else dense.bias.detach()
    by_hand = by_loop(images, w, bias, dense)
    assert near(y.detach(), by_hand if batched else by_hand[0]) and near(y.detach(), expected) and strides(y) == strides(expected)
    y.backward(gy)
    dx = dense_with(dense, before, x, gy)[2] if mode == "unmasked" else dx
    assert near(given.grad, dx) and near(m.weight.grad, dw if mode in ("ste", "unmasked") else torch.where(kept, dw, 0))
    assert db is None or near(m.bias.grad, db)
    assert torch.equal(m.weight, before)
    fxmask.restore(m)
    assert type(m) is nn.Conv2d and m.weight.stride() == dense.weight.stride() and torch.equal(m(x), dense(x))


@examples(60)
@given(st.tuples(*[st.integers(1, 5)] * 4), st.tuples(st.integers(1, 7), st.integers(1, 60)), st.booleans(), st.integers(0, 2**31))
def test_a_weight_of_four_axes_is_a_matrix_row_by_row(shape, block, last, seed):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(seed))
    w = w.to(memory_format=torch.channels_last) if last else w
    rows = [[w[o, i, a, b].item() for i in range(shape[1]) for a in range(shape[2]) for b in range(shape[3])] for o in range(shape[0])]
    assert as_matrix(w).tolist() == rows and matrix_shape(shape) == (shape[0], len(rows[0]))
    assert torch.equal(to_blocks(w, block), to_blocks(torch.tensor(rows), block))


@pytest.mark.parametrize("kernel", [(1, 1), (1, 2), (2, 2), (3, 2)])
@pytest.mark.parametrize("stride", [(1, 1), (2, 2), (3, 2), (3, 3)])
def test_patches_are_the_windows_of_the_image(kernel, stride):
    if kernel[0] > stride[0] or kernel[1] > stride[1]:
        assert not conv.is_patchwise(kernel, stride, (1, 1))
        return
    assert conv.is_patchwise(kernel, stride, (1, 1)) and conv.is_patchwise(kernel, stride, (2, 2)) == (kernel == (1, 1))
    x = torch.randn(2, 3, 8, 7)
    found, (rows, cols) = conv.patches(x, kernel, stride)
    want = torch.nn.functional.unfold(x, kernel, stride=stride).transpose(1, 2)
    assert (rows, cols) == ((8 - kernel[0]) // stride[0] + 1, (7 - kernel[1]) // stride[1] + 1) and torch.equal(found, want)


def test_patches_of_1x1_are_views():
    x = torch.randn(2, 3, 8, 7)
    for image in (x, x.to(memory_format=torch.channels_last)):
        assert conv.patches(image, (1, 1), (1, 1))[0].data_ptr() == image.data_ptr()


@pytest.mark.parametrize(("value", "found"), [(2, (2, 2)), ((2,), (2, 2)), ([2], (2, 2)), ((2, 3), (2, 3)), ([2, 3], (2, 3))])
def test_options_are_read_as_a_convolution_reads_them(value, found):
    assert conv.pair(value) == found
    x, w = torch.randn(1, 1, 9, 9), torch.randn(1, 1, 2, 2)
    assert torch.equal(torch.conv2d(x, w, stride=value), torch.conv2d(x, w, stride=found))


def test_an_image_fits_that_a_convolution_takes():
    w = torch.randn(2, 3, 2, 4)
    for shape in [(1, 3, 2, 4), (3, 2, 4), (3, 3, 5), (3, 1, 4), (3, 2, 3), (2, 2, 4), (4, 2, 4), (5, 4, 2, 4), (5, 2, 2, 4), (2, 4), (1, 1, 3, 2, 4)]:
        x = torch.randn(shape)
        try:
            torch.conv2d(x, w)
        except RuntimeError:
            assert not conv.fits(x, w)
        else:
            assert conv.fits(x, w)


def test_channels_lie_inside_where_pytorch_says_so():
    """By the memory format that a pooling gives, of all orders of the axes, some expanded; but for one number a sample, in which nothing tells formats."""
    for shape in product((0, 1, 2), (1, 2, 3), (1, 2), (1, 3)):
        formats = [torch.empty(shape, memory_format=f).stride() for f in (torch.contiguous_format, torch.channels_last)]
        if formats[0] == formats[1]:
            continue
        for order, expanded in product(permutations(range(4)), (None, 0, 1, 2, 3)):
            strides, step = [0] * 4, 1
            for axis in order:
                strides[axis], step = (0, step) if axis == expanded else (step, step * max(1, shape[axis]))
            t = torch.empty_strided(shape, strides)
            if t.numel():
                assert conv.is_channels_last(t) == (torch.max_pool2d(t, 1).stride() == formats[1]), (shape, strides)
            else:
                assert not conv.is_channels_last(t)
