"""Scores and masks by the form that is fastest where a weight lies: the same masks from each, and that it is the one that runs."""

import itertools

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import fxmask
from fxmask.kernels import saliency, score, scoring
from fxmask.kernels.cpu import score as cpu_score
from fxmask.kernels.grid import grid_shape
from fxmask.passes.state import ranking


@pytest.mark.parametrize("block", [(1, 1), (3, 5), (16, 16), (64, 8), (1000, 1000)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_over_blocks(block, dtype):
    """By slices, in float64, ragged edges and blocks that are larger than the weight included."""
    for n, k in ((64, 48), (70, 41), (3, 200), (1, 1)):
        t = torch.randn(k, n, generator=torch.Generator().manual_seed(n), dtype=dtype).t()
        nb, kb = grid_shape((n, k), block)
        exact = torch.zeros(nb, kb, dtype=torch.float64)
        for i, j in itertools.product(range(nb), range(kb)):
            exact[i, j] = t[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]].double().sum()
        got = saliency.block_sums(t, block)
        assert got.dtype == dtype and got.shape == exact.shape
        assert torch.allclose(got.double(), exact, atol=1e-4 if dtype == torch.float32 else 1e-12)
    assert saliency.block_sums(torch.zeros(0, 5), block).shape == (0, grid_shape((0, 5), block)[1])
    assert saliency.block_sums(torch.zeros(5, 0), block).shape == (grid_shape((5, 0), block)[0], 0)


def test_the_exponent_of_a_sum_that_float64_rounds_up():
    """All of its 54 bits are ones: as a float64 it is the next power of two, as a key one below that."""
    totals = torch.tensor([2**54 - 1, 2**54, 2**54 + 2**33])
    below, power, above = score.sum_bits(totals, torch.zeros(3, dtype=torch.int32), 44, False).tolist()
    assert (below, above) == (power - 1, power + 1)


def test_terms_have_as_many_bits_as_their_sum_leaves():
    assert [score.sum_shift(n) for n in (1, 2**18, 2**18 + 1, 2**20)] == [44, 44, 43, 42]


def test_the_sums_of_a_convolution_are_those_of_its_matrix():
    w = torch.randn(8, 3, 2, 2).to(memory_format=torch.channels_last)
    assert torch.equal(saliency.block_sums(w, (4, 4)), saliency.block_sums(w.reshape(8, 12), (4, 4)))


def layers(impl, **options):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 256), nn.Linear(256, 96))
    return fxmask.apply(model, ratio=0.5, block=(16, 16), impl=impl, **options)


def steps(model, n=4):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model)
    for i in range(n):
        optimizer.zero_grad()
        model(torch.randn(8, 96, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimizer.step()
    return fxmask.masks(model)


LASTING = [
    {"criterion": "taylor", "average": 0.9}, {"criterion": "gradient"}, {"average": 0.5}, {"hysteresis": 0.2}, {"gain": True},
    {"criterion": "l1", "average": 0.9}, {"regrow": fxmask.Regrow("random", 0.3)}, {"criterion": "taylor", "cover": True},
]  # fmt: skip


def refused(*args, **named):
    raise AssertionError("another form was asked for")


@pytest.mark.parametrize("options", LASTING, ids=str)
def test_the_faster_keys_of_a_cpu_are_those_that_run(monkeypatch, options):
    expected = steps(layers("reference", **options))
    ours, theirs = layers("auto", **options), layers("reference", **options)
    with monkeypatch.context() as patched:
        patched.setattr(score, "block_keys", refused)
        patched.setattr(cpu_score, "plain_keys", refused)  # what the faster form leaves to the plain one
        found = steps(ours)
    assert all(torch.equal(mask, expected[name]) for name, mask in found.items())
    monkeypatch.setattr(cpu_score, "block_keys", refused)
    assert all(torch.equal(mask, expected[name]) for name, mask in steps(theirs).items())


@pytest.mark.parametrize("options", LASTING[:3], ids=str)
def test_masks_of_scores_alone_are_selected_without_ranks(monkeypatch, options):
    """One sort of the blocks, and not four."""
    monkeypatch.setattr(ranking, "ranks_of", refused)
    assert steps(layers("auto", **options))


def test_keys_have_the_same_bits_by_every_form():
    w = torch.randn(200, 150)
    for criterion in score.CRITERIA[:-1]:
        for impl in ("auto", "reference", "cpu"):
            assert torch.equal(scoring.block_keys(w, (16, 16), criterion, impl), score.block_keys(w, (16, 16), criterion))


@pytest.mark.parametrize("impl", ["auto", "reference", "cpu"])
@pytest.mark.parametrize("scale", [1.0, 2.0**-100, 2.0**90])
def test_a_sum_just_below_a_power_of_two_is_not_above_it(scale, impl):
    """By less than a double tells, so that its leading bit cannot be read off one."""
    halves, rest = [0.5 * scale], [scale * 2.0**-i for i in range(2, 45)]
    for criterion, terms, below in (("l1", halves * 2047 + rest, 1024), ("fro", halves * 4095 + rest[:21] * 3, 32)):
        w = torch.zeros(2, 128 * 64)
        w[0, : len(terms)] = torch.tensor(terms)
        w[1, : below if criterion == "l1" else below**2] = scale
        key, above = scoring.block_keys(w.view(256, 64), (128, 64), criterion, impl)
        assert above == key + 1 and float(score.norms_of(above, w, criterion)) == below * scale


@pytest.mark.parametrize("block", [(16, 16), (512, 512), (512, 1024)], ids=str)
def test_keys_stand_for_the_norms_of_blocks_of_any_size(block):
    """Larger ones have fewer bits a term, or their sums would not fit."""
    w = torch.randn(block, generator=torch.Generator().manual_seed(0))
    for criterion, norm in (("l1", w.double().abs().sum()), ("fro", w.double().square().sum().sqrt())):
        found = score.norms_of(score.block_keys(w, block, criterion), w, criterion)
        torch.testing.assert_close(found.double(), norm.view(1, 1), rtol=1e-6, atol=0)


@pytest.mark.parametrize("average", [0.0, 0.9])
def test_a_score_that_is_not_finite_lasts_only_as_long_as_it_is_shown(average):
    inf = float("inf")
    scores, shown = torch.tensor([[1.0, 2.0]]), [torch.tensor([[inf, 4.0]]), torch.tensor([[3.0, 4.0]])]
    scoring.take_in(scores, shown[0], average, adds=False, holds=True)
    assert scores.tolist() == [[1, 2]]  # such a step is not taken in at all where scores are held
    scoring.take_in(scores, shown[0], average, adds=False, holds=False)
    torch.testing.assert_close(scores, torch.tensor([[inf, average * 2 + (1 - average) * 4]]))
    scoring.take_in(scores, shown[1], average, adds=False, holds=False)
    torch.testing.assert_close(scores, torch.tensor([[3, average * (average * 2 + (1 - average) * 4) + (1 - average) * 4]]))


def test_the_sum_of_a_broken_block_is_infinite():
    w = torch.ones(2, 3)
    w[0, 0], w[1, 1] = float("nan"), -float("inf")
    for criterion in ("fro", "l1"):
        keys = score.block_keys(w, (1, 1), criterion)
        assert score.sum_of_keys(keys).tolist() == [[float("inf"), 1, 1], [1, float("inf"), 1]]


def test_keys_without_values():
    """Of as many elements as the faster form takes, which asks for values."""
    with FakeTensorMode():
        w = torch.empty(200, 150)
        assert w.numel() >= cpu_score.LEAST and scoring.block_keys(w, (16, 16), "fro").shape == (13, 10)
