"""Allocation across layers: budgets are met to the block or not exceeded, and blocks go where the definition says, by references without the library."""

import math
import warnings
from fractions import Fraction

import pytest
import torch
from hypothesis import assume, example, given
from hypothesis import strategies as st
from property.often import examples
from torch import nn

import fxmask
from fxmask.errors import ConfigError
from fxmask.kernels.grid import grid_shape, keep_count, ratio_keeping
from fxmask.passes.settings.allocation import Item, proportional, ranked

pytestmark = pytest.mark.filterwarnings("ignore:allocation by:fxmask.FxMaskWarning")  # of layers that are nearly cut out

SHAPES = st.lists(st.tuples(st.integers(16, 150), st.integers(16, 150)), min_size=1, max_size=6)
RATIOS = st.one_of(st.sampled_from([0.0, 0.3, 0.5, 0.8, 0.9]), st.floats(0, 0.97))
BLOCKS = st.sampled_from([(16, 16), (8, 8), (32, 16), (7, 5)])


class Layers(nn.Module):
    """Linears of any shapes, each run on so many tokens of its own."""

    def __init__(self, shapes, tokens=(), seed=0):
        super().__init__()
        torch.manual_seed(seed)
        self.layers = nn.ModuleList([nn.Linear(k, n, bias=False) for n, k in shapes])
        self.tokens = tokens
        for layer in self.layers:  # of unlike magnitudes, or one threshold would be much like another
            layer.weight.data.mul_(math.exp(float(torch.randn(()))))

    def forward(self, x):
        return sum(m(x.new_zeros(t, m.in_features)).sum() for m, t in zip(self.layers, self.tokens, strict=True)) + x.sum()


def name(i):
    return f"layers.{i}"


def kept_by(model):
    return [int(m.sum()) for m in fxmask.masks(model).values()]


def applied(shapes, found, block, ratio, **options):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxmask.FxMaskWarning)  # layers that stay whole
        return fxmask.apply(Layers(shapes, **options), ratio=ratio, block=block, overrides=found.overrides)


def blocks_of(shapes, block):
    return [math.prod(grid_shape(s, block)) for s in shapes]


def tried(*args, **options):
    """The allocation; the example is left out where the budget has no room for a block in each layer."""
    try:
        return fxmask.allocate(*args, **options)
    except ConfigError as e:
        if "a budget that cannot be met" not in str(e):
            raise
        return assume(False)


@given(st.integers(1, 10**6).flatmap(lambda n: st.tuples(st.integers(1, n), st.just(n))))
@examples(500)
def test_the_ratio_that_keeps_so_many(case):
    kept, n = case
    assert 0 <= ratio_keeping(kept, n) < 1 and keep_count(n, ratio_keeping(kept, n)) == kept


@given(SHAPES, RATIOS, BLOCKS, st.sampled_from(["uniform", "erk", "global"]))
@examples(80)
def test_a_budget_of_blocks_is_met_to_the_block(shapes, ratio, block, method):
    found, counts = tried(Layers(shapes), ratio, method, block), blocks_of(shapes, block)
    kept = kept_by(applied(shapes, found, block, ratio))
    assert kept == list(found.kept.values()) and counts == list(found.blocks.values())
    assert list(found) == [name(i) for i in range(len(shapes))]
    if method == "uniform":
        assert set(found.values()) == {ratio} and kept == [keep_count(n, ratio) for n in counts]
    else:
        assert sum(kept) == found.spent == found.budget == keep_count(sum(counts), ratio)
    assert all(1 <= k <= n for k, n in zip(kept, counts, strict=True)) and found.unit == "blocks" and found.total == sum(counts)


def erk_by_the_authors(shapes, ratio):
    """The loop of google-research/rigl: densities eps * (out + in) / (out * in); layers above 1 become dense, the others share what is left."""
    dense = set()
    while True:
        rhs = sum((1 - ratio) * n * k for i, (n, k) in enumerate(shapes) if i not in dense) - sum(ratio * shapes[i][0] * shapes[i][1] for i in dense)
        raw = {i: (n + k) / (n * k) for i, (n, k) in enumerate(shapes) if i not in dense}
        if not raw:
            return [1.0] * len(shapes)
        eps = rhs / sum(r * math.prod(shapes[i]) for i, r in raw.items())
        if eps * max(raw.values()) <= 1 + 1e-12:
            return [eps * raw[i] if i in raw else 1.0 for i in range(len(shapes))]
        dense |= {i for i, r in raw.items() if r == max(raw.values())}


@given(st.lists(st.tuples(st.integers(2, 12), st.integers(2, 12)), min_size=1, max_size=7), st.floats(0.0, 0.9))
@examples(150)
@example([(2, 2), (2, 8)], 0.796875)
def test_erk_is_the_authors_to_a_block(grids, ratio):
    """Where no layer has less than a block; weights are whole blocks, so that elements and blocks say the same."""
    shapes = [(16 * n, 16 * k) for n, k in grids]
    counts = [n * k for n, k in grids]
    whole = keep_count(sum(counts), ratio) / sum(counts)  # what is shared out are whole blocks, up to one more than the ratio says
    densities = erk_by_the_authors(shapes, 1 - whole)
    assume(all(d * n >= 1 for d, n in zip(densities, counts, strict=True)))
    found = fxmask.allocate(Layers(shapes), ratio, "erk")
    for kept, d, n in zip(found.kept.values(), densities, counts, strict=True):
        assert abs(kept - d * n) < 1 + 1e-6


def cut(x, low, high):
    return min(max(x, low), high)


ITEMS = st.lists(st.tuples(st.integers(1, 60), st.integers(1, 9), st.integers(1, 30)), min_size=1, max_size=7)


@given(ITEMS, st.floats(0, 1))
@examples(300)
def test_shares_of_any_cost(rows, part):
    """Never more than the budget, no block left that would fit, and each share within rounding of a common eps."""
    items, densities = [Item(n, c, n * c) for n, c, _ in rows], [Fraction(d, 7) for *_, d in rows]
    need, whole = sum(i.each for i in items), sum(i.whole for i in items)
    budget = need + math.floor((whole - need) * part)
    kept = proportional(items, densities, budget)
    left = budget - sum(i.spent(k) for i, k in zip(items, kept, strict=True))
    assert left >= 0 and all(1 <= k <= i.blocks for i, k in zip(items, kept, strict=True))
    assert all(k == i.blocks or i.each > left for i, k in zip(items, kept, strict=True))
    if len({i.each for i in items}) == 1:
        assert left < items[0].each
        low, high = 0.0, 1e9  # eps by bisection
        for _ in range(200):
            eps = (low + high) / 2
            spent = sum(i.each * cut(eps * float(d) * i.blocks, 1, i.blocks) for i, d in zip(items, densities, strict=True))
            low, high = (eps, high) if spent <= budget else (low, eps)
        for k, i, d in zip(kept, items, densities, strict=True):
            assert abs(k - cut(low * float(d) * i.blocks, 1, i.blocks)) < 1 + 1e-6


@given(SHAPES, RATIOS, BLOCKS, st.integers(0, 99))
@examples(60)
@example([(40, 56), (56, 40)], 0.5, (16, 16), 7)  # where ragged blocks stand at the threshold, in rows and in columns
def test_global_is_one_threshold(shapes, ratio, block, seed):
    """By mean squares in float64: no block that is left out is better than one that is kept, but for the best of each layer, which stay."""
    model = Layers(shapes, seed=seed)
    found = tried(model, ratio, "global", block)
    worst, best = math.inf, 0.0
    for i, layer in enumerate(model.layers):
        means = sorted((b.double().square().mean().item() for row in layer.weight.detach().split(block[0], 0) for b in row.split(block[1], 1)), reverse=True)
        k = found.kept[name(i)]
        worst = min([worst, *means[1:k]])
        best = max([best, *means[k:]])
    assert worst >= best * (1 - 2**-18)


@given(SHAPES, RATIOS, BLOCKS, st.sampled_from(["flop", "byte"]), st.lists(st.integers(1, 40), min_size=6, max_size=6), st.integers(0, 99))
@examples(60)
def test_flop_and_bytes_stay_in_the_budget(shapes, ratio, block, method, tokens, seed):
    """As the masks that come of it use them, counted here; and no block is left that would fit, edges taken as whole blocks."""
    tokens = tokens[: len(shapes)]
    use = [2 * t if method == "flop" else 4 for t in tokens]
    options = dict(tokens=tokens, seed=seed)
    found = tried(Layers(shapes, **options), ratio, method, block, inputs=torch.zeros(1))
    model = applied(shapes, found, block, ratio, **options)
    elements = [n * k for n, k in shapes]
    dense = sum(e * u for e, u in zip(elements, use, strict=True))
    assert found.total == dense and found.budget <= dense * (1 - ratio) * (1 + 1e-8) and found.budget >= dense * (1 - ratio) * (1 - 1e-8) - 1
    used = 0
    for (n, k), u, mask in zip(shapes, use, fxmask.masks(model).values(), strict=True):
        full = mask.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[:n, :k]
        used += int(full.sum()) * u
    assert used <= found.spent <= found.budget
    for i, ((n, k), u) in enumerate(zip(shapes, use, strict=True)):
        kept, each = found.kept[name(i)], min(block[0], n) * min(block[1], k)
        more = (min((kept + 1) * each, n * k) - min(kept * each, n * k)) * u
        assert kept == found.blocks[name(i)] or more > found.budget - found.spent


@given(ITEMS, st.floats(0, 1), st.integers(0, 999))
@examples(200)
def test_ranked_is_greedy(rows, part, seed):
    """Against a loop over all blocks, best first, that takes what fits and shuts a layer whose next block does not."""
    g = torch.Generator().manual_seed(seed)
    items = [Item(n, c, n * c - min(c - 1, d)) for n, c, d in rows]
    scores = [torch.randint(0, 9, (i.blocks,), generator=g).double() for i in items]  # with many ties
    need, whole = sum(i.spent(1) for i in items), sum(i.whole for i in items)
    budget = need + math.floor((whole - need) * part)
    kept, left, shut = [1] * len(items), budget - need, set()
    tops = [s.sort(descending=True).values.tolist() for s in scores]
    for _, j, at in sorted((-top, j, at) for j, t in enumerate(tops) for at, top in enumerate(t) if at):
        price = items[j].spent(at + 1) - items[j].spent(at)
        if j not in shut and price <= left:
            kept[j], left = at + 1, left - price
        else:
            shut.add(j)
    found = ranked(items, scores, budget)
    spent = sum(i.spent(k) for i, k in zip(items, found, strict=True))
    assert found == kept and spent <= budget
    assert all(k == i.blocks or i.spent(k + 1) - i.spent(k) > budget - spent for i, k in zip(items, found, strict=True))


@pytest.mark.parametrize("method", ["erk", "global"])
def test_a_larger_ratio_never_gives_more_blocks_in_all(method):
    shapes = [(64, 96), (128, 64), (32, 32)]
    totals = [sum(fxmask.allocate(Layers(shapes), r / 20, method).kept.values()) for r in range(18)]
    assert totals == sorted(totals, reverse=True) and totals[0] == 24 + 32 + 4
