"""Masks for random shapes, blocks, ratios and magnitudes: exactly k blocks, the right ones, whatever the order of summation."""

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples

from fxmask.kernels import ops
from fxmask.kernels.grid import grid_shape, keep_count, to_blocks
from fxmask.kernels.score import CRITERIA, KEY_INF, KEY_NAN, block_keys
from fxmask.kernels.select import select_blocks

SIZES = st.integers(1, 70)
BLOCKS = st.sampled_from([(1, 1), (1, 4), (4, 1), (2, 3), (16, 16), (8, 32), (64, 16), (128, 128), (5, 7)])
RATIOS = st.one_of(st.sampled_from([0.0, 0.1, 0.3, 0.5, 0.7, 0.9, 0.999]), st.floats(0, 0.999))
SCALES = st.sampled_from([1e-44, 1e-40, 1e-38, 1e-20, 1.0, 1e20, 1e36])


def build(w, block, ratio, criterion="fro", ties="lowest", step=0, stream=0):
    nb, kb = grid_shape(w.shape, block)
    keep = torch.tensor(keep_count(nb * kb, ratio))
    return ops.block_index(w, keep, torch.tensor(step), *block, criterion, ties, stream)


def weight(n, k, scale, seed, dtype=torch.float32):
    g = torch.Generator().manual_seed(seed)
    return (torch.randn(n, k, generator=g, dtype=torch.float64) * scale).to(dtype)


def exact_square_sums(w, block):
    """Sum of squares of each block in exact rational arithmetic."""
    (nb, kb), (bh, bw) = grid_shape(w.shape, block), block
    rows = w.double().tolist()
    sums = []
    for i in range(nb):
        for j in range(kb):
            sums.append(sum(Fraction(v) ** 2 for r in rows[i * bh : (i + 1) * bh] for v in r[j * bw : (j + 1) * bw]))
    return sums


@given(SIZES, SIZES, BLOCKS, RATIOS, SCALES, st.sampled_from(CRITERIA), st.integers(0, 99))
@examples(150)
def test_exactly_k(n, k, block, ratio, scale, criterion, seed):
    nb, kb = grid_shape((n, k), block)
    mask = build(weight(n, k, scale, seed), block, ratio, criterion)
    exact = math.ceil(nb * kb * (1 - Fraction(round(ratio * 10**9), 10**9)))
    assert int(mask.sum()) == max(1, exact)


@given(st.integers(1, 40), st.integers(1, 40), BLOCKS, RATIOS, SCALES, st.integers(0, 99))
@examples(100)
def test_the_best_blocks_by_exact_arithmetic(n, k, block, ratio, scale, seed):
    """The key keeps 21 bits below the leading one, so blocks closer than 2^-20 may stand either way; all others may not."""
    w = weight(n, k, scale, seed)
    sums, mask = exact_square_sums(w, block), build(w, block, ratio).flatten().tolist()
    worst = min(s for s, m in zip(sums, mask, strict=True) if m)
    best = max((s for s, m in zip(sums, mask, strict=True) if not m), default=Fraction(0))
    assert worst >= best * (1 - Fraction(1, 2**20))


@given(SIZES, SIZES, BLOCKS, RATIOS, SCALES, st.sampled_from(["fro", "l1", "linf"]), st.integers(0, 99))
@examples(100)
def test_the_same_mask_in_every_order_of_summation(n, k, block, ratio, scale, criterion, seed):
    w = weight(n, k, scale, seed)
    blocks = to_blocks(w, block)
    (nb, kb), elements = grid_shape(w.shape, block), blocks.shape[-1]
    shuffled = blocks[..., torch.randperm(elements, generator=torch.Generator().manual_seed(seed))]
    keys = block_keys(w, block, criterion)
    again = block_keys(shuffled.reshape(nb * kb, elements), (1, elements), criterion).reshape(nb, kb)
    assert torch.equal(keys, again)
    assert torch.equal(keys, block_keys(blocks.flip(-1).reshape(nb * kb, elements), (1, elements), criterion).reshape(nb, kb))


@given(SIZES, SIZES, BLOCKS, st.integers(-60, 60), st.integers(0, 99))
@examples(60)
def test_scaling_by_a_power_of_two_changes_no_mask(n, k, block, power, seed):
    w = weight(n, k, 1.0, seed)
    assert torch.equal(build(w, block, 0.5), build(w * 2.0**power, block, 0.5))


@given(SIZES, SIZES, BLOCKS, RATIOS)
@examples(60)
def test_ties_go_to_the_lowest_flat_index(n, k, block, ratio):
    w = torch.full((n * block[0], k * block[1]), -0.5)  # whole blocks, so that all are equal
    mask = build(w, block, ratio)
    kept = int(mask.sum())
    assert mask.flatten().tolist() == [True] * kept + [False] * (mask.numel() - kept)
    assert build(w, block, ratio, ties="keep").all()


@pytest.mark.parametrize("criterion", CRITERIA)
def test_nan_and_inf_are_kept_first(criterion):
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(0))
    w[17, 1], w[40, 50], w[60, 33] = float("nan"), -float("nan"), float("-inf")
    keys = block_keys(w, (16, 16), criterion, torch.tensor(3), 5)
    assert keys[1, 0] == keys[2, 3] == KEY_NAN
    assert keys[3, 2] == KEY_INF
    assert ((keys >= 0) & (keys <= KEY_NAN)).all()
    keep3 = select_blocks(keys, torch.tensor(3))
    assert keep3[1, 0] and keep3[2, 3] and keep3[3, 2]


@pytest.mark.parametrize("criterion", ["fro", "l1", "linf", "spectral"])
def test_zeros_score_zero(criterion):
    assert block_keys(torch.zeros(8, 8), (3, 3), criterion).eq(0).all()
    assert block_keys(-torch.zeros(8, 8), (3, 3), criterion).eq(0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_dtypes_round_to_float32_first(dtype):
    w = weight(48, 48, 1.0, 0, torch.float64)
    w[:16, :16], w[0, 0] = 0, 1 - 2.0**-30  # to 1, which is another power of two
    w = w.to(dtype)
    assert torch.equal(block_keys(w, (16, 16), "fro"), block_keys(w.float(), (16, 16), "fro"))


NORMS = {"l1": lambda b: b.abs().sum(), "linf": lambda b: b.abs().max(), "spectral": lambda b: torch.linalg.svdvals(b)[0]}


@pytest.mark.parametrize(("criterion", "norm"), NORMS.items(), ids=NORMS)
@pytest.mark.parametrize("scale", [1e-40, 1.0, 8e37])
def test_other_norms_rank_as_defined(criterion, norm, scale):
    w = weight(64, 48, scale, 4)
    mask = build(w, (16, 8), 0.6, criterion)
    scaled = (w.double() / scale).unfold(0, 16, 16).unfold(1, 8, 8)
    norms = torch.stack([torch.stack([norm(scaled[i, j]) for j in range(6)]) for i in range(4)])
    assert norms[mask].min() >= norms[~mask].max() * (1 - 1e-5)


def test_spectral_is_not_frobenius():
    w = weight(256, 64, 1.0, 0)
    assert not torch.equal(build(w, (8, 8), 0.5), build(w, (8, 8), 0.5, "spectral"))
    assert torch.equal(build(w, (1, 8), 0.5), build(w, (1, 8), 0.5, "spectral"))  # a row has one singular value, its norm


def test_random_is_a_function_of_seed_step_and_name():
    w = torch.ones(256, 256)
    first = build(w, (16, 16), 0.5, "random", step=3, stream=11)
    assert torch.equal(first, build(torch.randn(256, 256), (16, 16), 0.5, "random", step=3, stream=11))
    for step, stream in ((4, 11), (3, 12), (3, 11 + 2**40)):
        other = build(w, (16, 16), 0.5, "random", step=step, stream=stream)
        assert 64 < int((first != other).sum()) < 192  # unrelated masks of 256 blocks differ in about 128
    state = torch.get_rng_state()
    build(w, (16, 16), 0.5, "random")
    assert torch.equal(state, torch.get_rng_state())


def test_blocks_of_any_size_do_not_overflow():
    w = torch.full((2048, 1024), 3.4e38)
    w[:1024] = 3.3e38
    assert build(w, (1024, 1024), 0.5).flatten().tolist() == [False, True]
    assert build(w.div(2), (1024, 1024), 0.5, "l1").flatten().tolist() == [False, True]


@pytest.mark.parametrize("ties", ["lowest", "keep"])
def test_a_weight_without_elements_has_no_blocks(ties):
    assert select_blocks(torch.zeros(0, 3, dtype=torch.int32), torch.tensor(1), ties).shape == (0, 3)
