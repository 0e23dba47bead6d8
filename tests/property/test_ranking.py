"""Masks by scores that last: order, hysteresis, exchange of blocks, and what they do to the weights."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from property.often import examples
from torch import nn, optim

import fxmask
from fxmask.kernels.grid import expand_mask
from fxmask.kernels.select import select_blocks, select_ranked
from fxmask.passes.state.ranking import ranks_of, regrown

SPECIAL = st.sampled_from([0.0, -0.0, 1.0, -1.0, math.inf, -math.inf, math.nan])
VALUES = st.one_of(st.floats(-1e6, 1e6, width=32), st.floats(-(2.0**-130), 2.0**-130, width=32), SPECIAL)


@given(st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=40))
@examples(300)
def test_ranks_have_the_exact_order_of_the_scores(pairs):
    """By the scores, then by the second ones, then by the index; in Python's arithmetic."""
    first, second = (torch.tensor(values, dtype=torch.float32) for values in zip(*pairs, strict=True))
    got = ranks_of(first, second)
    best = sorted(range(len(pairs)), key=lambda i: (math.isnan(pairs[i][0]), _key(pairs[i][0]), math.isnan(pairs[i][1]), _key(pairs[i][1]), -i))
    expected = torch.empty(len(pairs), dtype=torch.int32)
    expected[best] = torch.arange(len(pairs), dtype=torch.int32)
    assert torch.equal(got, expected)


@given(st.lists(st.tuples(VALUES, st.integers(0, 2**31 - 1) | st.integers(0, 2)), min_size=1, max_size=40), st.data())
@examples(300)
def test_a_mask_of_the_best_scores_lets_keys_decide_ties(pairs, data):
    """By the scores, then by the keys, then by the index; in Python's arithmetic. The ranks of both say the same."""
    keep = data.draw(st.integers(1, len(pairs)))
    scores, keys = torch.tensor([s for s, _ in pairs], dtype=torch.float32)[None], torch.tensor([k for _, k in pairs], dtype=torch.int32)[None]
    best = sorted(range(len(pairs)), key=lambda i: (math.isnan(pairs[i][0]), _key(pairs[i][0]), pairs[i][1], -i))[-keep:]
    expected = torch.zeros(1, len(pairs), dtype=torch.bool)
    expected[0, best] = True
    assert torch.equal(select_ranked(scores, keys, torch.tensor(keep)), expected)
    assert torch.equal(select_blocks(ranks_of(scores, keys), torch.tensor(keep)), expected)


def _key(value):
    return 0.0 if math.isnan(value) else value


@st.composite
def exchanges(draw):
    nb, kb = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    blocks = nb * kb
    keep = draw(st.integers(1, blocks))
    old = draw(st.integers(1, blocks))
    n = draw(st.integers(0, keep - 1))
    seed = draw(st.integers(0, 2**31))
    return nb, kb, keep, old, n, seed


@given(exchanges(), st.booleans())
@examples(300)
def test_an_exchange_keeps_exactly_k_and_the_best(case, cover):
    nb, kb, keep, old_count, n, seed = case
    generator = torch.Generator().manual_seed(seed)
    keys, growth = (torch.randint(0, 9, (nb, kb), generator=generator, dtype=torch.int32) for _ in range(2))
    old = torch.zeros(nb * kb, dtype=torch.bool)
    old[torch.randperm(nb * kb, generator=generator)[:old_count]] = True
    old = old.reshape(nb, kb)
    new, grown = regrown(keys, old, torch.tensor(keep), n, growth, cover)
    assert int(new.sum()) == keep
    assert not (grown & (old | ~new)).any()
    if cover:
        assert keep < max(nb, kb) or (new.any(0).all() and new.any(1).all())
        return
    best, grows = (lambda i, of=of: (-int(of.flatten()[i]), i) for of in (keys, growth))
    kept = sorted(old.flatten().nonzero().flatten().tolist(), key=best)[:keep]
    back = sorted((~old).flatten().nonzero().flatten().tolist(), key=best)[: keep - len(kept)]  # where the ratio falls
    stay = kept[: max(1, len(kept) - n)]
    others = sorted((i for i in range(nb * kb) if i not in stay + back), key=grows)[: len(kept) - len(stay)]
    assert sorted(new.flatten().nonzero().flatten().tolist()) == sorted(stay + back + others)
    assert grown.flatten().nonzero().flatten().tolist() == sorted(i for i in others if not old.flatten()[i])


@given(st.floats(0.01, 0.99), st.one_of(st.none(), st.integers(1, 200)), st.integers(1, 500))
@examples(200)
def test_the_share_exchanged_falls_to_none(fraction, until, kept):
    regrow = fxmask.Regrow("random", fraction, until)
    counts = [regrow.exchanged(step, kept) for step in range(220)]
    assert all(0 <= c <= min(kept - 1, fraction * kept + 1e-6) for c in counts)
    assert all(a >= b for a, b in pairwise(counts))
    assert counts[0] == min(int(fraction * kept + 1e-6), kept - 1)
    if until is not None:
        assert counts[until:] == [0] * (220 - until)
        half = fraction / 2 * (1 + math.cos(math.pi * (until // 2) / until)) * kept
        assert counts[until // 2] == min(int(half + 1e-6), kept - 1)


@pytest.mark.parametrize("parts", [100, 3, 7])
def test_the_share_exchanged_is_that_of_the_number_that_was_meant(parts):
    for p in range(1, parts):
        regrow = fxmask.Regrow("random", p / parts)
        assert all(regrow.exchanged(0, kept) == p * kept // parts for kept in range(2, 400))


def training(model, n=1, lr=0.1):
    optimizer = optim.SGD(model.parameters(), lr=lr)
    fxmask.guard(optimizer, model)
    for i in range(n):
        optimizer.zero_grad()
        x = torch.randn(16, model[0].in_features, generator=torch.Generator().manual_seed(i))
        model(x).square().mean().backward()
        yield
        optimizer.step()


def linear(k=64, n=64, seed=0, **config):
    torch.manual_seed(seed)
    return fxmask.apply(nn.Sequential(nn.Linear(k, n)), fxmask.WeightMask(**{"ratio": 0.5, "block": (16, 16), **config}))


@given(st.integers(0, 10**6), st.floats(0, 3), st.floats(0.1, 0.9))
@examples(40)
def test_hysteresis_lets_in_only_what_exceeds_by_its_share(seed, hysteresis, ratio):
    """Against the definition: kept blocks' norms count (1 + h) times."""
    model = linear(seed=seed, hysteresis=hysteresis, ratio=ratio)
    fxmask.step(model, 0)
    old = fxmask.masks(model)["0.weight"]
    with torch.no_grad():
        model[0].weight.mul_(torch.rand(4, 4, generator=torch.Generator().manual_seed(seed)).repeat_interleave(16, 0).repeat_interleave(16, 1))
    fxmask.step(model)
    norms = model[0].weight.detach().double().reshape(4, 16, 4, 16).square().sum((1, 3)).sqrt()
    norms = torch.where(old, norms * (1 + hysteresis), norms).flatten()
    kept = fxmask.masks(model)["0.weight"].flatten()
    assert int(kept.sum()) == int(old.sum())
    assert norms[kept].min() >= norms[~kept].max() * (1 - 1e-6)


def test_an_endless_hysteresis_never_moves_and_none_does():
    moved = {}
    for hysteresis in (0.0, 999.0):
        model = linear(hysteresis=hysteresis, average=0.0, backward="ste", refresh=2)  # refresh=2: the same cached path for both
        before = fxmask.masks(model)["0.weight"]
        for _ in training(model, 20, lr=5.0):
            pass
        moved[hysteresis] = int((fxmask.masks(model)["0.weight"] != before).sum())
    assert moved[999.0] == 0 < moved[0.0]


@pytest.mark.parametrize("by", ["gradient", "random"])
def test_blocks_that_return_start_at_zero(by):
    model = linear(regrow=fxmask.Regrow(by, 0.5), backward="rigl" if by == "gradient" else "masked", dense_every=3, refresh=3)
    last, returned = fxmask.masks(model)["0.weight"], 0
    for step, _ in enumerate(training(model, 13)):
        now, w = fxmask.masks(model)["0.weight"], model[0].weight.detach()
        assert int(now.sum()) == 8
        if step % 3:
            assert torch.equal(now, last)
        else:
            came = expand_mask(now & ~last, w.shape, (16, 16))
            returned += int((now & ~last).sum())
            assert not w[came].any()
        last = now
    assert returned > (4 if by == "random" else 0)


def test_rigl_grows_where_the_dense_gradient_is_largest():
    """The last dense gradient, of the step before the exchange, by the block's norm; among all blocks that do not stay."""
    model = linear(regrow=fxmask.Regrow("gradient", 0.5), backward="rigl", dense_every=4, refresh=4)
    for step, _ in enumerate(training(model, 5)):
        grad, w, old = model[0].weight.grad.clone(), model[0].weight.detach().clone(), fxmask.masks(model)["0.weight"]
        if step == 3:
            assert grad.reshape(4, 16, 4, 16).abs().sum((1, 3)).count_nonzero() == 16, "the gradient of the fourth step is dense"
            moved = w - 0.1 * grad * expand_mask(old, w.shape, (16, 16))  # frozen elsewhere
            norms = torch.where(old, moved.reshape(4, 16, 4, 16).square().sum((1, 3)).sqrt(), 0).flatten()
            stay = set(norms.argsort(descending=True)[:4].tolist())
            grown = [i for i in grad.reshape(4, 16, 4, 16).square().sum((1, 3)).flatten().argsort(descending=True).tolist() if i not in stay][:4]
    assert set(fxmask.masks(model)["0.weight"].flatten().nonzero().flatten().tolist()) == stay | set(grown)


def test_random_regrowth_is_a_counter():
    masks = []
    for seed, noise in ((0, 1), (0, 2), (1, 1)):
        model = linear(regrow=fxmask.Regrow("random", 0.5), refresh=1)
        if seed:
            model = linear(regrow=fxmask.Regrow("random", 0.5), refresh=1, criterion="fro")
            fxmask.restore(model)
            fxmask.apply(model, fxmask.WeightMask(regrow=fxmask.Regrow("random", 0.5), seed=seed))
        torch.manual_seed(noise)
        for _ in training(model, 4):
            pass
        masks.append(fxmask.masks(model)["0.weight"])
    assert torch.equal(masks[0], masks[1]) and not torch.equal(masks[0], masks[2])


def test_exchanges_by_scores():
    """Of the kept blocks those with the lowest scores leave, and others come: masked ones, whose Taylor scores are 0, would never come by scores."""
    model, came = linear(regrow=fxmask.Regrow("random", 0.5), criterion="taylor", ratio=0.5), 0
    old = fxmask.masks(model)["0.weight"]
    for step, _ in enumerate(training(model, 6)):
        new = fxmask.masks(model)["0.weight"]
        if step:
            scores = model[0]._fxmask_score.flatten()
            kept = sorted(old.flatten().nonzero().flatten().tolist(), key=lambda i: -float(scores[i]))
            assert int(new.sum()) == 8 and new.flatten()[kept[:4]].all()
            came += int((new & ~old).sum())
        old = new
    assert came > 3


def norm_of(model):
    w, mask = model[0].weight.detach().double(), fxmask.masks(model)["0.weight"]
    return float(torch.where(expand_mask(mask, w.shape, (16, 16)), w, 0).square().sum().sqrt())


@given(st.integers(0, 10**6), st.floats(0.1, 0.95), st.sampled_from(["random", "fro"]))
@examples(30)
@example(479, 0.25, "random")
def test_gain_keeps_the_norm_of_a_static_mask(seed, ratio, criterion):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64))
    dense = float(model[0].weight.detach().double().square().sum().sqrt())
    before = model[0].weight.detach().clone()
    fxmask.apply(model, fxmask.WeightMask(ratio=ratio, block=(16, 16), criterion=criterion, refresh=0, gain=True))
    assert norm_of(model) == pytest.approx(dense, rel=1e-6)
    kept = expand_mask(fxmask.masks(model)["0.weight"], before.shape, (16, 16))
    assert torch.equal(model[0].weight.detach()[~kept], before[~kept])
    kept &= before != 0  # some seeds draw one
    ratio_of = model[0].weight.detach()[kept] / before[kept]
    assert float(ratio_of.max() / ratio_of.min()) == pytest.approx(1, rel=1e-5)


def test_gain_keeps_the_norm_over_a_ramp():
    model = linear(gain=True, schedule=fxmask.Schedule("linear", steps=8), ratio=0.75)
    norm = norm_of(model)
    for _ in training(model, 10, lr=0.0):
        assert norm_of(model) == pytest.approx(norm, rel=1e-5)
    assert int(fxmask.masks(model)["0.weight"].sum()) == 4


def test_a_gain_does_nothing_where_none_leave():
    model = linear(gain=True, refresh=1)
    before = model[0].weight.detach().clone()
    for _ in training(model, 3, lr=0.0):
        pass
    assert torch.equal(model[0].weight.detach(), before)
