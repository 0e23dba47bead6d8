"""N:M masks: exactly n of m by magnitude, against loops; permutations, transposable tiles, draws of learned masks, and the gradients that are not W∘M's."""

import math
from itertools import product

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property.often import examples

from fxmask.errors import UnsupportedError
from fxmask.kernels import nm, nm_permute
from fxmask.kernels.nm_ops import learned, nm_learned, nm_sr_ste, sr_ste

NM = [(2, 4), (1, 4), (3, 4), (1, 2), (4, 8), (2, 7)]
DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]


def by_loop(w: torch.Tensor, n: int, m: int) -> torch.Tensor:
    """The n largest of each group, NaN before Inf, ties to the lowest index."""
    mask = torch.zeros(w.shape, dtype=torch.bool)
    for r, row in enumerate(w.double().tolist()):
        for g in range(0, len(row), m):
            order = sorted(range(m), key=lambda i: (not math.isnan(row[g + i]), 0 if math.isnan(row[g + i]) else -abs(row[g + i]), i))
            mask[r, [g + i for i in order[:n]]] = True
    return mask


@examples(60)
@given(st.sampled_from(NM), st.integers(0, 5), st.integers(1, 4), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**31))
def test_exactly_n_of_m_by_magnitude(ratio, rows, groups, dtype, few_values, seed):
    n, m = ratio
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, groups * m, generator=g)
    w = w.round() if few_values else w  # ties, zeros of both signs
    if few_values:
        w[torch.rand(w.shape, generator=g) < 0.1] = math.nan
        w[torch.rand(w.shape, generator=g) < 0.1] = -math.inf
    w = w.to(dtype)
    mask = nm.magnitude_mask(w, n, m)
    assert (mask.reshape(rows, groups, m).sum(2) == n).all() and torch.equal(mask, by_loop(w, n, m))


def test_a_transposed_weight_is_read_along_its_rows():
    w = torch.randn(8, 6).t()
    assert torch.equal(nm.magnitude_mask(w, 2, 4), nm.magnitude_mask(w.contiguous(), 2, 4))


@pytest.mark.parametrize(("n", "m"), NM)
def test_patterns_are_all_and_each_once(n, m):
    table = nm.patterns(n, m)
    want = [p for p in product((True, False), repeat=m) if sum(p) == n]
    assert table.tolist() == [list(p) for p in want] and len(want) == math.comb(m, n)


@examples(25)
@given(st.sampled_from(NM), st.integers(1, 12), st.integers(1, 5), st.booleans(), st.integers(0, 2**31))
def test_a_permutation_keeps_at_least_what_none_keeps(ratio, rows, groups, odd, seed):
    n, m = ratio
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(rows, groups * m, generator=g) * torch.rand(groups * m, generator=g).exp()
    if odd:
        w[0, 0], w[-1, -1] = math.nan, math.inf
    order = nm_permute.permutation(w, n, m, 8)
    assert sorted(order.tolist()) == list(range(groups * m)) and torch.equal(order, nm_permute.permutation(w, n, m, 8))
    mask = nm_permute.permuted_mask(w, order, n, m)
    assert (mask[:, order].reshape(rows, groups, m).sum(2) == n).all()
    assert torch.equal(mask[:, order], nm.magnitude_mask(w[:, order], n, m))
    assert nm.retained(w, mask) >= nm.retained(w, nm.magnitude_mask(w, n, m))


@pytest.mark.parametrize("shape", [(0, 16), (3, 4), (3, 0)], ids=str)
def test_a_permutation_of_nothing_or_of_one_group_is_none(shape):
    assert torch.equal(nm_permute.permutation(torch.randn(shape), 2, 4, 8), torch.arange(shape[1]))


@pytest.mark.parametrize("seed", range(5))
def test_a_permutation_of_a_broken_weight_keeps_no_less(seed):
    """A mask keeps NaN before all else, and the search counts it as nothing."""
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(3, 12, generator=g)
    w[torch.rand(3, 12, generator=g) < 0.3] = math.nan
    kept = nm.retained(w, nm_permute.permuted_mask(w, nm_permute.permutation(w, 2, 4, 8), 2, 4))
    assert kept >= nm.retained(w, nm.magnitude_mask(w, 2, 4))


@examples(25)
@given(st.integers(0, 5), st.integers(1, 20), st.integers(0, 2**31))
def test_what_stands_in_an_order_is_put_back(rows, columns, seed):
    g = torch.Generator().manual_seed(seed)
    t, order = torch.randn(rows, columns, generator=g, dtype=torch.float64, requires_grad=True), torch.randperm(columns, generator=g)
    back = nm_permute.put_back(t, order)
    assert torch.equal(back[:, order], t)
    assert torch.equal(torch.autograd.grad(back, t, gy := torch.randn(rows, columns, generator=g, dtype=torch.float64))[0], gy[:, order])


def test_a_permutation_finds_what_can_be_kept_whole():
    """Large columns side by side lose half of them; apart, none."""
    w = torch.full((16, 32), 0.01)
    w[:, :16] = 1 + torch.rand(16, 16, generator=torch.Generator().manual_seed(0))
    mask = nm_permute.permuted_mask(w, nm_permute.permutation(w, 2, 4, 16), 2, 4)
    assert mask[:, :16].all() and not mask[:, 16:].any()


def test_a_wide_weight_is_searched_in_parts():
    g = torch.Generator().manual_seed(0)
    w = torch.randn(4, 3 * nm_permute.COLUMNS + 8, generator=g) * torch.randn(3 * nm_permute.COLUMNS + 8, generator=g).exp()
    order = nm_permute.permutation(w, 2, 4, 4)
    assert sorted(order.tolist()) == list(range(w.shape[1]))
    assert nm.retained(w, nm_permute.permuted_mask(w, order, 2, 4)) > 1.01 * nm.retained(w, nm.magnitude_mask(w, 2, 4))


def test_transposable_patterns_are_all_and_each_once():
    tiles = torch.tensor(list(product((True, False), repeat=16))).reshape(-1, 4, 4)
    want = tiles[(tiles.sum(1) == 2).all(1) & (tiles.sum(2) == 2).all(1)]
    assert torch.equal(nm.transposable_patterns(), want.reshape(90, 16))


@examples(25)
@given(st.integers(1, 3), st.integers(1, 3), st.sampled_from(DTYPES), st.booleans(), st.integers(0, 2**31))
@example(2, 1, torch.float64, True, 0)
def test_transposable_tiles_are_the_best_of_90(rows, columns, dtype, odd, seed):
    w = torch.randn(4 * rows, 4 * columns, generator=torch.Generator().manual_seed(seed)).to(dtype)
    if odd:
        w *= min(torch.finfo(dtype).max, 1e290) / 100  # finite ones that are almost too large to be
        w[0, 0], w[-1, -1] = math.nan, -math.inf
    table = nm.transposable_patterns()
    mask = nm.transposable_mask(w, table)
    tiles = mask.reshape(rows, 4, columns, 4)
    assert (tiles.sum(1) == 2).all() and (tiles.sum(3) == 2).all()
    if odd:
        assert mask[0, 0] and mask[-1, -1]
        return
    size = w.double().abs().reshape(rows, 4, columns, 4)
    for r, c in product(range(rows), range(columns)):
        sums = [float((size[r, :, c] * p.reshape(4, 4)).sum()) for p in table]
        assert torch.equal(tiles[r, :, c], table[max(range(90), key=lambda i: (round(sums[i], 12), -i))].reshape(4, 4))


@examples(25)
@given(st.sampled_from(NM), st.sampled_from([0.01, 0.1, 1.0]), st.sampled_from(DTYPES), st.integers(0, 2**31))
def test_drawn_masks_are_patterns_and_soft_ones_sum_to_n(ratio, tau, dtype, seed):
    n, m = ratio
    torch.manual_seed(seed)
    table, logits = nm.patterns(n, m), torch.randn(20, math.comb(m, n)).to(dtype)
    soft, hard = nm.sample(logits, table, tau)
    assert hard.dtype == torch.bool and (hard.sum(1) == n).all()
    assert soft.dtype == torch.promote_types(dtype, torch.float32) and soft.isfinite().all() and (soft >= 0).all()
    torch.testing.assert_close(soft.sum(1), torch.full_like(soft[:, 0], n))
    assert torch.equal(nm.argmax_mask(logits, table), table[logits.argmax(1)])


def test_noise_is_finite_where_the_generator_gives_zero(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "exponential_", torch.Tensor.zero_)
    for dtype in (torch.float16, torch.float32, torch.float64):
        assert nm.gumbel(torch.ones(5, 6, dtype=dtype)).isfinite().all()


def test_draws_under_autocast_are_those_without_it():
    """Its product in 16 bits would round soft masks, which then sum to n no more."""
    table, logits, found = nm.patterns(2, 4), torch.randn(50, 6), []
    for on in (False, True):
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            found.append(nm.sample(logits, table, 0.7))
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1]) and found[1][0].dtype == torch.float32


def test_draws_follow_the_softmax_of_the_logits():
    torch.manual_seed(0)
    table, logits = nm.patterns(2, 4), torch.randn(6)
    _, hard = nm.sample(logits.expand(20000, 6).contiguous(), table, 0.1)
    share = (hard[:, None] == table).all(2).double().mean(0)
    torch.testing.assert_close(share, torch.softmax(logits.double(), 0), atol=0.015, rtol=0)


def test_logits_by_magnitude_have_its_mask_as_argmax():
    w, table = torch.randn(8, 32), nm.patterns(2, 4)
    assert torch.equal(nm.argmax_mask(nm.magnitude_logits(w, table), table).reshape(w.shape), nm.magnitude_mask(w, 2, 4))
    assert not nm.magnitude_logits(torch.zeros(8, 32), table).any()


@pytest.mark.parametrize(("n", "m"), NM)
def test_straight_through_is_the_gradient_of_the_soft_form(n, m):
    table = nm.patterns(n, m)
    w, gy = torch.randn(4, 3 * m, dtype=torch.float64), torch.randn(4, 3 * m, dtype=torch.float64)
    logits = torch.randn(12, len(table), dtype=torch.float64)
    wanted = []
    for straight in (True, False):
        torch.manual_seed(0)
        a, b = w.clone().requires_grad_(), logits.clone().requires_grad_()
        soft, hard = (t.reshape(w.shape) for t in nm.sample(b, table, 0.5))
        y = nm_learned(a, soft, hard) if straight else a * soft
        assert not straight or torch.equal(y, torch.where(hard, w, 0))
        y.backward(gy)
        wanted.append((a.grad, b.grad, hard))
    (ga, gb, hard), (_, soft_gb, _) = wanted
    assert torch.equal(gb, soft_gb) and gb.abs().sum() > 0 and torch.equal(ga, torch.where(hard, gy, 0))


def test_sr_ste_adds_decay_of_what_is_masked():
    w, gy = torch.randn(4, 16, dtype=torch.float64, requires_grad=True), torch.randn(4, 16, dtype=torch.float64)
    mask = nm.magnitude_mask(w, 2, 4)
    y = nm_sr_ste(w, mask, 0.3)
    y.backward(gy)
    assert torch.equal(y.detach(), torch.where(mask, w.detach(), 0))
    torch.testing.assert_close(w.grad, gy + 0.3 * (1 - mask.double()) * w.detach(), rtol=0, atol=1e-15)


def test_a_weight_that_is_not_finite_and_not_drawn_does_not_show_in_a_transform():
    w, hard = torch.tensor([1.0, math.inf, -math.inf, math.nan]), torch.tensor([True, False, False, False])
    gradient, y = torch.func.grad_and_value(lambda s: learned(w, s, hard).sum())(torch.full((4,), 0.5))
    assert y == 1 and gradient.tolist() == [1, 0, 0, 0]


def test_function_transforms_and_forward_ad_see_into_learned_masks():
    w, soft, hard = torch.randn(3, 2, 8), torch.rand(3, 2, 8), torch.rand(3, 2, 8) < 0.5
    got = torch.func.vmap(torch.func.grad(lambda s, a, k: learned(a, s, k).sum()), (0, None, 0))(soft, w[0], hard)
    torch.testing.assert_close(got, w[0].expand(3, 2, 8))
    y, tangent = torch.func.jvp(lambda a: learned(a, soft, hard), (w,), (w,))
    assert torch.equal(y, torch.where(hard, w, 0)) and torch.equal(tangent, y)
    with pytest.raises(UnsupportedError, match="gradient is that of no function"):
        torch.func.grad(lambda a: sr_ste(a, hard, 0.1).sum())(w)


def test_second_derivatives_of_learned_masks_are_alike_in_function_transforms():
    w, soft, v = (torch.randn(4, 8, dtype=torch.float64) for _ in range(3))
    hard = torch.rand(4, 8) > 0.5

    def curved(w):
        return torch.func.grad(lambda s: learned(w, s, hard).square().sum() + (learned(w, s, hard) * v).sum())(soft)

    w1, s1 = w.clone().requires_grad_(), soft.clone().requires_grad_()
    (g,) = torch.autograd.grad(learned(w1, s1, hard).square().sum() + (learned(w1, s1, hard) * v).sum(), s1, create_graph=True)
    (expected,) = torch.autograd.grad(g.sum(), w1)
    torch.testing.assert_close(torch.func.grad(lambda w: curved(w).sum())(w), expected)
    assert (expected != 0).any()


def test_the_ops_keep_what_pytorch_asks_of_ops():
    w, soft, mask = torch.randn(4, 8, requires_grad=True), torch.rand(4, 8, requires_grad=True), torch.rand(4, 8) < 0.5
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(nm_learned, (w, soft, mask), test_utils=checks)
    torch.library.opcheck(nm_sr_ste, (w, mask, 0.1), test_utils=checks)
    with pytest.raises(UnsupportedError, match="forward-mode AD"):
        torch.func.jvp(lambda a: nm_sr_ste(a, mask, 0.1), (w.detach(),), (w.detach(),))
