"""Which blocks of an input are kept, their packed form, and dW from it, against loops in float64 (Barley and Fröning 2023)."""

from fractions import Fraction

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples

from fxmask.analysis.barley import kept_blocks
from fxmask.errors import ConfigError
from fxmask.kernels import prune, prune_plan
from fxmask.kernels.cpu import prune_strips

SHAPES = [(3, 5, 64), (2, 7, 40), (4, 33), (50,), (2, 3, 4, 32), (1, 1, 16)]


def by_loop(x: torch.Tensor, block: int, kept: int, turned: bool) -> torch.Tensor:
    """The pruned input, sample by sample, block by block."""
    a = (x.transpose(-1, -2) if turned else x).clone()
    flat = a.reshape(a.shape[0] if a.dim() > 1 else 1, -1, a.shape[-1])
    for sample in flat:
        found = [(-float(row[j : j + block].double().norm()), i, j) for i, row in enumerate(sample) for j in range(0, len(row), block)]
        numbered = sorted((score, number, i, j) for number, (score, i, j) in enumerate(found))
        for _, _, i, j in numbered[kept:]:
            sample[i, j : j + block] = 0
    a = flat.reshape(a.shape)
    return a.transpose(-1, -2) if turned else a


def case(shape, turned, seed=0):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g, dtype=torch.float64)
    return x.transpose(-1, -2).contiguous().transpose(-1, -2) if turned else x


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("ratio", [0.0, 0.3, 0.5, 0.9])
@pytest.mark.parametrize("block", [8, 16, 64])
def test_the_weakest_blocks_of_each_sample_go(shape, ratio, block):
    for turned in (False, True) if len(shape) > 2 else (False,):
        x = case(shape, turned)
        inner = turned and shape[-1] > 1 and shape[-2] > 1
        assert prune.is_turned(x, block) == (inner and not (shape[-2] % block and shape[-1] % block == 0))
        b, r, c = prune.sample_shape(x.shape, turned)
        n = prune.block_count(r, c, block)
        kept = n - prune.dropped_count(n, ratio)
        values, index = prune.compress(x, block, kept, turned)
        assert values.shape == (b, kept, block) and index.shape == (b, kept) and index.dtype == torch.int16
        assert (index[:, 1:] > index[:, :-1]).all() and values.is_contiguous() and values.untyped_storage()._cdata != x.untyped_storage()._cdata
        back = prune.expand(values, index, x.shape, turned)
        assert torch.equal(back, by_loop(x, block, kept, turned)) and back.shape == x.shape
        gy = torch.randn(*shape[:-1], 24, dtype=torch.float64)
        want = torch.einsum("mo,mi->oi", gy.reshape(-1, 24), back.reshape(-1, shape[-1]))
        torch.testing.assert_close(prune.dw(gy, values, index, x.shape, turned), want, rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("shape", "out", "block", "ratio", "turned", "pays"),
    [
        ((8, 196, 384), 384, 64, 0.7, False, True),
        ((8, 196, 384), 384, 64, 0.5, False, False),
        ((8, 196, 384), 384, 128, 0.5, False, True),
        ((8, 196, 384), 384, 384, 0.4, False, True),  # a row is a block
        ((8, 196, 384), 384, 1024, 0.6, False, False),  # and padded to more than it has
        ((8, 196, 384), 384, 16, 0.8, False, True),
        ((8, 196, 384), 384, 16, 0.7, False, False),
        ((8, 196, 384), 384, 64, 0.9, True, False),
        ((4, 10, 64), 96, 16, 0.9, False, False),  # too small
        ((400, 10, 64), 96, 16, 0.9, False, True),
        ((4, 0, 64), 96, 16, 0.9, False, False),  # nothing
    ],
)
def test_when_strips_pay(shape, out, block, ratio, turned, pays):
    b, r, c = prune.sample_shape(shape, turned)
    n = prune.block_count(r, c, block)
    values, gy = torch.empty(b, n - prune.dropped_count(n, ratio), block), torch.empty(*shape[:-1], out)
    assert prune_strips.pays(gy, values, list(shape), turned) == pays
    assert not prune_strips.pays(gy.to("meta"), values.to("meta"), list(shape), turned)


@examples(60)
@given(st.integers(1, 4), st.integers(1, 40), st.integers(33, 200), st.sampled_from([32, 48, 64]), st.floats(0, 0.99), st.integers(0, 9))
def test_strips_give_the_dense_product(samples, rows, features, block, ratio, seed):
    x = case((samples, rows, features), False, seed)
    n = prune.block_count(rows, features, block)
    values, index = prune.compress(x, block, n - prune.dropped_count(n, ratio), False)
    gy = torch.randn(samples, rows, 20, dtype=torch.float64)
    got = prune_strips.dw(gy, values, index, list(x.shape))
    torch.testing.assert_close(got, prune.dw(gy, values, index, x.shape, False), rtol=0, atol=1e-11)
    assert got.is_contiguous()


@given(st.integers(0, 5000), st.floats(0, 0.999))
def test_as_many_go_as_the_paper_says(n, ratio):
    dropped = prune.dropped_count(n, ratio)
    exact = round(Fraction(round(ratio * 10**9), 10**9) * n)
    assert dropped == max(0, min(exact, n - 1))


@pytest.mark.parametrize(("n", "ratio", "dropped"), [(2, 0.25, 0), (6, 0.25, 2), (10, 0.25, 2), (14, 0.25, 4), (10, 0.05, 0), (30, 0.05, 2), (5, 0.5, 2)])
def test_halves_go_to_the_even_number(n, ratio, dropped):
    assert prune.dropped_count(n, ratio) == dropped == round(n * ratio)


@pytest.mark.parametrize("kept", range(1, 13))
def test_elements_of_kept_blocks_are_counted_at_most(kept):
    """Of rows of two whole blocks and one of 8 features: exactly where these are the weakest."""
    x = 1 + torch.rand(2, 4, 40)
    for weakest in (True, False):
        x[..., 32:] = 1e-3 if weakest else 9.0
        values, index = prune.compress(x, 16, kept, False)
        elements = int(prune.expand(torch.ones_like(values), index, x.shape, False).sum())
        counted = prune.kept_of_input(values.shape, x.shape, False)
        assert counted == elements if weakest else counted >= elements


def test_the_counts_are_those_of_the_papers_tables():
    for rows, cols, block, s in ((196, 384, 64, 0.5), (196, 384, 16, 0.8), (196, 1536, 64, 0.9), (196, 384, 128, 0.3)):
        n = prune.block_count(rows, cols, block)
        assert n - prune.dropped_count(n, s) == kept_blocks(rows, cols, block, s)


def test_ties_go_to_the_lowest_number_and_nan_is_kept():
    x = torch.ones(1, 2, 32)
    _, index = prune.compress(x, 8, 3, False)
    assert index.tolist() == [[0, 1, 2]]
    x[0, 1, 20] = float("nan")
    _, index = prune.compress(x, 8, 1, False)
    assert index.tolist() == [[6]]


def test_half_precision_norms_do_not_overflow():
    x = torch.full((1, 1, 64), 300.0, dtype=torch.float16)  # squares are Inf in float16
    x[0, 0, 32:] = 400.0
    _, index = prune.compress(x, 32, 1, False)
    assert index.tolist() == [[1]]


def test_an_axis_of_one_is_not_where_blocks_lie():
    """Its stride says nothing: parts of a transposed view that keep one token, or one channel."""
    x = torch.randn(2, 50, 48)
    assert prune.is_turned(x.transpose(1, 2), 16)
    assert not prune.is_turned(x.transpose(1, 2)[:, :1], 16) and not prune.is_turned(x[:, :1].transpose(1, 2), 16)


def test_index_is_as_small_as_it_goes():
    assert prune.index_dtype(2**15) == torch.int16 and prune.index_dtype(2**15 + 1) == torch.int32
    x = torch.randn(1, 2**15 + 1, 1)
    values, index = prune.compress(x, 1, 5, False)
    assert index.dtype == torch.int32 and torch.equal(prune.expand(values, index, x.shape, False), by_loop(x, 1, 5, False))


def test_noise_moves_blocks_near_the_threshold_only():
    x = torch.ones(1, 100, 8)
    x[0, :10] = 100.0
    x[0, 90:] = 0.01
    drawn = set()
    for seed in range(20):
        u = torch.rand(1, 100, generator=torch.Generator().manual_seed(seed))
        _, index = prune.compress(x, 8, 50, False, torch.exp2(2 * u - 1))
        found = set(index[0].tolist())
        assert found >= set(range(10)) and not found & set(range(90, 100))
        drawn.add(frozenset(found))
    assert len(drawn) == 20


def test_noise_multiplies_and_divides_alike():
    """By 2^u, u uniform between -noise and noise, so that blocks that differ by more than 4^noise are not drawn by lot."""
    _, _, drawn = prune_plan.plan(torch.randn(8, 100, 64), 16, 0.5, 3.0)
    u = drawn.log2()
    assert drawn.shape == (8, 400) and u.min() < -2.9 and u.max() > 2.9 and u.abs().max() <= 3 and u.mean().abs() < 0.2


def test_width():
    assert prune.check_width(64) == 64
    for wrong in (0, -1, 2.0, "64", True, None, (1, 64)):
        with pytest.raises(ConfigError, match="positive int"):
            prune.check_width(wrong)


def test_features_whose_blocks_are_all_dropped_have_a_gradient_of_zero(monkeypatch):
    """Whatever lay in the memory that the strips write to."""
    x, gy = torch.randn(1, 20, 96), torch.randn(1, 20, 8)
    x[..., 32:64] = 1e-6
    values, index = prune.compress(x, 32, 40, False)
    expected = prune.dw(gy, values, index, tuple(x.shape), False)
    monkeypatch.setattr(torch.Tensor, "new_empty", lambda t, *shape, **_: t.new_full(shape, float("nan")))
    found = prune_strips.dw(gy, values, index, list(x.shape))
    assert torch.allclose(found, expected, atol=1e-5) and not found[:, 32:64].any()
