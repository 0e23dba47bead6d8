"""Scores off gradients, their averages and the masks that go by them, by kernels: against float64, and to the bit against the plain forms."""

import itertools
import math

import pytest
import torch
from torch import nn

import fxmask
from fxmask.kernels import saliency as plain
from fxmask.kernels import score, scoring, select
from fxmask.kernels.grid import grid_shape, to_blocks
from fxmask.kernels.triton import device, implementation, refresh, saliency

NAN, INF = math.nan, math.inf
SPECIAL = torch.tensor([0.0, -0.0, 1.0, -1.0, INF, -INF, NAN, -NAN, 1e-45, -1e-45, 3e38])
SHAPES = [(200, 150), (64, 64), (17, 300), (1, 1), (150, 41)]


@pytest.mark.parametrize("criterion", plain.BY_GRADIENT)
@pytest.mark.parametrize("block", [(16, 16), (32, 16), (128, 32)], ids=str)
def test_sums_over_blocks(block, criterion):
    g = torch.Generator().manual_seed(0)
    for (n, k), dtypes in itertools.product(SHAPES, [(torch.float32, torch.float32), (torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16)]):
        w = torch.randn(n, k + 20, generator=g).to(dtypes[0])[:, :k]
        grad = torch.randn(n, k + 4, generator=g).to(dtypes[1])[:, :k]
        assert saliency.takes_gradient(w, grad, block)
        got, terms = saliency.saliency(w, grad, block, criterion), (to_blocks(t.double(), block) for t in (w, grad))
        a, b = terms
        exact = {"gradient": b.square().sum(-1).sqrt(), "taylor": (a * b).sum(-1).abs(), "movement": -(a * b).sum(-1)}[criterion]
        assert got.dtype == torch.float32 and got.shape == grid_shape((n, k), block)
        assert torch.allclose(got.double(), exact, rtol=0, atol=1e-6 * float((a * b).abs().sum(-1).max() + b.square().sum(-1).max()))
        assert torch.equal(got, saliency.saliency(w, grad, block, criterion))


def test_what_is_not_finite_is_seen():
    for value in (NAN, INF):
        w, grad = torch.ones(64, 48), torch.ones(64, 48)
        grad[20, 40] = value
        for criterion in plain.BY_GRADIENT:
            found = saliency.saliency(w, grad, (16, 16), criterion).isfinite()
            assert not found[1, 2] and found.sum() == 11


def test_what_the_kernel_does_not_take():
    w = torch.ones(64, 64)
    takes = saliency.takes_gradient
    assert takes(w, w, (16, 16))
    assert not takes(w, w, (16, 12)) and not takes(w.double(), w, (16, 16)) and not takes(w, w.double(), (16, 16))
    assert not takes(w[:0], w[:0], (16, 16)) and not takes(w, w.to("meta"), (16, 16))


@pytest.mark.parametrize("n", [1, 5, 40, 5000])
@pytest.mark.parametrize("holds", [False, True], ids=["", "holds"])
def test_averages_to_the_bit(n, holds):
    g = torch.Generator().manual_seed(n)
    skips = (None, torch.zeros(()), torch.ones(1))
    for average, adds, skipped, first, last in itertools.product((0.0, 0.9), (False, True), skips, (None, 0.0, NAN, INF), (None, NAN, INF)):
        scores, new = torch.randn(n, generator=g), torch.randn(n, generator=g)
        if first == 0:
            scores.zero_()
        elif first is not None:
            scores[0] = first
        if last is not None:
            new[-1] = last
        expected, before = scores.clone(), scores.clone()
        plain.take_in(expected, new, average, adds, holds, skipped)
        saliency.take_in(scores, new, average, adds, holds, skipped)
        assert torch.equal(scores.view(torch.int32)[~scores.isnan()], expected.view(torch.int32)[~scores.isnan()])
        assert torch.equal(scores.isnan(), expected.isnan())
        if holds and (last is not None or (skipped is not None and skipped.any())):
            assert torch.equal(scores.view(torch.int32), before.view(torch.int32))


@pytest.mark.parametrize("at", [0, 4999])
def test_one_of_many_decides_wherever_it_stands(at):
    """What is not finite, and the only score that is not 0: in the first pass of the program, or in its last."""
    one = torch.zeros(5000)
    one[at] = 1.0
    for scores, new in ((torch.ones(5000), torch.where(one > 0, NAN, one)), (one, torch.ones(5000))):
        expected = scores.clone()
        plain.take_in(expected, new, 0.9, False, True)
        saliency.take_in(scores, new, 0.9, False, True)
        assert torch.equal(scores, expected) and not torch.equal(scores, new)


def scored(n, kind, g):
    return {
        "random": torch.randn(n, generator=g),
        "zeros": torch.zeros(n),
        "few": torch.randint(-1, 2, (n,), generator=g).float(),
        "below": -torch.rand(n, generator=g),
        "special": SPECIAL[torch.randint(0, len(SPECIAL), (n,), generator=g)],
    }[kind]


@pytest.mark.parametrize("n", [1, 2, 31, 100, 4097])
@pytest.mark.parametrize("kind", ["random", "zeros", "few", "below", "special"])
def test_selection_by_scores_and_then_by_keys(n, kind):
    g = torch.Generator().manual_seed(n)
    scores = scored(n, kind, g)[None]
    for most in (3, 2**31 - 1):
        keys = torch.randint(0, most, (1, n), generator=g, dtype=torch.int32)
        for k in sorted({1, 2, n // 3, n // 2, 2 * n // 3, n - 1, n} & set(range(1, n + 1))):  # two thirds: among both zeros of the special ones
            mask = refresh.select(keys, torch.tensor(k), scores)
            assert int(mask.sum()) == k
            assert torch.equal(mask, select.select_ranked(scores, keys, torch.tensor(k))), k


@pytest.mark.parametrize("kind", ["random", "few"])
def test_a_model_at_once(kind):
    """Each weight of a group by its own scores."""
    g = torch.Generator().manual_seed(3)
    weights = [torch.randn(s, generator=g) for s in ((200, 150), (128, 240), (17, 300), (1, 1))]
    grids = [grid_shape(w.shape, (16, 16)) for w in weights]
    scores = [scored(nb * kb, kind, g).view(nb, kb) for nb, kb in grids]
    keeps = [torch.tensor(max(1, nb * kb // 3)) for nb, kb in grids]
    found = refresh.refresh_group(weights, keeps, (16, 16), scores)
    for w, keep, s, (mask, lists) in zip(weights, keeps, scores, found, strict=True):
        assert torch.equal(mask, select.select_ranked(s, score.block_keys(w, (16, 16), "fro"), keep))
        assert torch.equal(lists, refresh.strip_lists(mask, (16, 16)))


def trained(impl, n=4, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 80), nn.Linear(80, 64))
    fxmask.apply(model, ratio=0.7, impl=impl, schedule=fxmask.Schedule("cubic", 4), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model, "free")
    for i in range(n):
        optimizer.zero_grad()
        model(torch.randn(5, 64, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        device.LAUNCHES.clear()
        optimizer.step()
        yield model, {name.removesuffix("_kernel"): count for name, count in device.LAUNCHES.items()}


MADE = ("block_keys", "select", "strip_lists", "order")
LEARNED = {"saliency": 3, "take_in": 3, **dict.fromkeys(MADE, 1)}
COUNTS = [
    ({"criterion": "taylor", "average": 0.9}, LEARNED),
    ({"criterion": "gradient"}, LEARNED),
    ({"criterion": "movement", "backward": "ste"}, LEARNED),
    ({"average": 0.9}, {"block_keys": 4, "take_in": 3, "select": 1, "strip_lists": 1, "order": 1}),  # norms of each weight, and those behind the step
    ({"gain": True}, dict.fromkeys(MADE, 1)),  # no scores: norms alone
]


@pytest.mark.parametrize(("options", "launches"), COUNTS, ids=lambda c: "-".join(map(str, c)))
def test_steps_of_a_model(options, launches):
    """Two launches a layer for its scores, and four for all masks. They are the masks of those scores, to the bit."""
    for model, found in trained("triton", **options):
        assert found == launches
        for layer in (model[0], model[2], model[3]):
            keys, scores = score.block_keys(layer.weight.detach(), (16, 16), "fro"), layer._fxmask_score
            if not options.get("gain"):  # which scales the weights behind the mask
                chosen = select.select_blocks(keys, layer._fxmask_keep) if scores is None else select.select_ranked(scores, keys, layer._fxmask_keep)
                assert torch.equal(layer._fxmask_mask, chosen)


def test_some_layers_with_scores_and_some_without():
    """A group each."""
    mixed = dict(criterion="taylor", overrides={"2": dict(criterion="fro", gain=True)})
    for (ours, found), (theirs, _) in zip(*(trained(impl, 2, **mixed) for impl in ("triton", "reference")), strict=True):
        assert found["select"] == found["take_in"] == 2
        assert all(torch.equal(mask, fxmask.masks(theirs)[name]) for name, mask in fxmask.masks(ours).items())


def test_steps_by_kernels_are_those_of_the_reference():
    for (ours, _), (theirs, launches) in zip(*(trained(impl, criterion="taylor", average=0.9) for impl in ("triton", "reference")), strict=True):
        assert not launches
        for name, mask in fxmask.masks(ours).items():
            assert torch.equal(mask, fxmask.masks(theirs)[name])
        for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
            assert torch.allclose(a, b, atol=1e-5)


def test_very_many_blocks_are_averaged_and_selected_by_the_plain_forms(monkeypatch):
    """One program would read them all."""
    expected = [fxmask.masks(model) for model, _ in trained("triton", criterion="taylor", average=0.9)]
    for module in (implementation, saliency):
        monkeypatch.setattr(module, "SELECT_MAX", 21)  # the grids have 24, 30 and 20 blocks
    for (model, found), masks in zip(trained("triton", criterion="taylor", average=0.9), expected, strict=True):
        assert found["select"] == found["take_in"] == 1 and found["block_keys"] == 3
        assert all(torch.equal(mask, masks[name]) for name, mask in fxmask.masks(model).items())


OTHERS = [
    {"hysteresis": 0.5}, {"criterion": "taylor", "hysteresis": 0.5}, {"regrow": fxmask.Regrow("random", 0.5)}, {"criterion": "random", "refresh": 2},
    {"criterion": "random", "gain": True}, {"criterion": "l1", "average": 0.9},
]  # fmt: skip


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_masks_that_go_by_more_than_scores_or_by_no_norm_of_the_kernels(options):
    """One by one, in plain PyTorch behind the keys: the reference's."""
    for (ours, found), (theirs, _) in zip(*(trained(impl, **options) for impl in ("triton", "reference")), strict=True):
        assert "select" not in found
        for name, mask in fxmask.masks(ours).items():
            assert torch.equal(mask, fxmask.masks(theirs)[name])


def test_what_scores_take_in_may_lie_in_another_order():
    new, scores, expected = torch.randn(4, 6).t(), torch.zeros(6, 4), torch.zeros(6, 4)
    scoring.take_in(scores, new, 0.5, False, False, impl="triton")
    plain.take_in(expected, new, 0.5, False, False)
    assert torch.equal(scores, expected)


def test_scores_that_do_not_lie_in_one_piece():
    """As a checkpoint may bring them: the plain form takes them."""
    (model, _), *_ = trained("triton", 1, criterion="taylor", average=0.9)
    for layer in (model[0], model[2], model[3]):
        layer._fxmask_score = layer._fxmask_score.t().contiguous().t()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model, "free")
    optimizer.zero_grad()
    model(torch.randn(5, 64)).square().mean().backward()
    device.LAUNCHES.clear()
    optimizer.step()
    assert not device.LAUNCHES["take_in_kernel"] and not device.LAUNCHES["select_kernel"]
    layer = model[0]
    keys = score.block_keys(layer.weight.detach(), (16, 16), "fro")
    assert torch.equal(layer._fxmask_mask, select.select_ranked(layer._fxmask_score, keys, layer._fxmask_keep))
