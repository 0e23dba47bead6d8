"""The CPU's fast keys have the bits of the plain ones, whatever the shape, block, dtype, magnitude, stride or broken element."""

from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from property.often import examples

from fxmask.kernels import reference
from fxmask.kernels.cpu import implementation, score
from fxmask.kernels.score import CRITERIA, block_keys

SIZES, SIDES = st.integers(1, 90), st.one_of(st.integers(1, 8), st.integers(1, 300))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16, torch.float64])
LAYOUTS = ("plain", "transposed", "every second", "a window", "one row for all")
KINDS = ("normal", "mixed", "with zeros", "zeros", "equal", "nan", "inf", "-inf and nan")
SUMS = st.sampled_from(["fro", "l1"])


@pytest.fixture(scope="module", autouse=True)
def small_weights_too():
    """Below `LEAST` the CPU takes the plain keys, which would be compared with themselves."""
    with mock.patch.object(score, "LEAST", 1):
        yield


def values(n, k, kind, power, g):
    """float64 (N, K) of a magnitude of 10 ** power."""
    w = torch.randn(n, k, generator=g, dtype=torch.float64)
    if kind == "mixed":  # rows and columns from the smallest denormals on
        w *= 10.0 ** (40 * torch.rand(n, 1, generator=g, dtype=torch.float64) - 30) * 10.0 ** (-12 * torch.rand(1, k, generator=g, dtype=torch.float64))
    elif kind == "with zeros":
        w[torch.rand(n, k, generator=g) < 0.8] = 0
        w[: n // 2] = 0
    elif kind == "zeros":
        w = -torch.zeros_like(w)
    elif kind == "equal":
        w.fill_(-1.7)
    w = w * 10.0**power
    for name, value in (("nan", float("nan")), ("-inf", float("-inf")), ("inf", float("inf"))):
        if kind in (name, "-inf and nan") and name in kind:
            w.view(-1)[int(torch.randint(n * k, (), generator=g))] = value
    return w


def laid_out(w, layout):
    """The same values by other strides."""
    n, k = w.shape
    if layout == "transposed":
        return w.t().contiguous().t()
    if layout == "every second":
        return torch.stack([w, w + 1], 2).view(n, 2 * k)[:, ::2]
    if layout == "a window":
        return torch.nn.functional.pad(w, (3, 2, 1, 1))[1:-1, 3:-2]
    return w[:1].expand(n, k) if layout == "one row for all" else w


@given(SIZES, SIZES, SIDES, SIDES, DTYPES, st.sampled_from(LAYOUTS), st.sampled_from(KINDS), st.integers(-44, 38), SUMS, st.integers(0, 99))
@examples(500)
def test_the_keys_of_sums_are_equal_to_the_bit(n, k, rows, cols, dtype, layout, kind, power, criterion, seed):
    g = torch.Generator().manual_seed(seed)
    w = laid_out(values(n, k, kind, power, g).to(dtype), layout)
    expected = block_keys(w, (rows, cols), criterion)
    for chunk in (score.CHUNK, 1 + seed * 13):  # of one row at a time up to all of it
        with mock.patch.object(score, "CHUNK", chunk):
            got = score.block_keys(w, (rows, cols), criterion)
        assert got.dtype == expected.dtype and torch.equal(got, expected)


@given(SIZES, SIZES, SIDES, SIDES, DTYPES, st.sampled_from(KINDS), st.sampled_from(CRITERIA), st.integers(0, 99))
@examples(60)
def test_the_keys_of_every_criterion(n, k, rows, cols, dtype, kind, criterion, seed):
    w = values(n, k, kind, 0, torch.Generator().manual_seed(seed)).to(dtype)
    step = torch.tensor(seed)
    assert torch.equal(score.block_keys(w, (rows, cols), criterion, step, 7), block_keys(w, (rows, cols), criterion, step, 7))


@pytest.mark.parametrize("power", [-44, -38, -20, 0, 19, 37])
@pytest.mark.parametrize("criterion", ["fro", "l1"])
def test_each_magnitude_takes_the_fast_path(criterion, power, monkeypatch):
    """Denormals too, and blocks of 10 ** 38 beside blocks of 10 ** -44."""
    g = torch.Generator().manual_seed(3)
    w = values(80, 70, "normal", power, g).clamp(-3e38, 3e38).float()
    w[:16], w[32:48, 7] = 1e-44, 3e38
    expected = block_keys(w, (16, 9), criterion)
    assert len(expected.unique()) > 10
    monkeypatch.setattr(score, "plain_keys", refuse)
    assert torch.equal(score.block_keys(w, (16, 9), criterion), expected)


@pytest.mark.parametrize("criterion", ["fro", "l1"])
def test_every_power_of_two_alone_is_scaled_exactly(criterion):
    """With no smaller or larger block beside it: where the scale stops being a float32 is told by this block itself."""
    w = torch.rand(12, 10, generator=torch.Generator().manual_seed(4)) + 1e-3
    for power in range(-148, 128):
        tiny = torch.ldexp(w, torch.tensor(power))
        assert torch.equal(score.block_keys(tiny, (8, 8), criterion), block_keys(tiny, (8, 8), criterion)), power


def refuse(*_):
    raise AssertionError("the plain keys were asked for")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize(("shape", "block"), [
    ((1024, 768), (64, 64)), ((1000, 770), (16, 16)), ((196, 196), (32, 7)), ((700, 300), (512, 512)), ((30, 20), (999, 999)),
])  # fmt: skip
def test_ordinary_weights_take_the_fast_path(shape, block, dtype, monkeypatch):
    w = values(*shape, "normal", -1, torch.Generator().manual_seed(1)).to(dtype)
    for criterion in ("fro", "l1"):
        expected = block_keys(w, block, criterion)
        with monkeypatch.context() as m:
            m.setattr(score, "plain_keys", refuse)
            assert torch.equal(score.block_keys(w.requires_grad_(), block, criterion), expected)


@pytest.mark.parametrize(("shape", "block", "criterion", "broken"), [
    pytest.param((600, 16), (score.ROWS + 1, 8), "fro", None, id="more rows than add up exactly"),
    pytest.param((512, 1030), (512, 513), "l1", None, id="more elements than leave 44 bits"),
    pytest.param((40, 40), (8, 8), "linf", None, id="linf"),
    pytest.param((40, 40), (8, 8), "spectral", None, id="spectral"),
    pytest.param((40, 40), (8, 8), "fro", float("nan"), id="nan"),
    pytest.param((40, 40), (8, 8), "l1", float("-inf"), id="inf"),
])  # fmt: skip
def test_what_the_fast_path_cannot_do_is_left_to_the_plain_keys(shape, block, criterion, broken, monkeypatch):
    w, asked = torch.randn(shape, generator=torch.Generator().manual_seed(2)), []
    if broken is not None:
        w[3, 5] = broken
    monkeypatch.setattr(score, "plain_keys", lambda *a: asked.append(a) or block_keys(*a))
    assert torch.equal(score.block_keys(w, block, criterion), block_keys(w, block, criterion))
    assert len(asked) == 1


def test_full_blocks_of_the_largest_terms_add_up_exactly():
    """512 rows of all but 2 ** 44 each: the most that float64 is asked to hold."""
    w = torch.full((512, 4), 1 - 2.0**-24)
    w[:, 1] = 1 - 2.0**-23
    w[100, 2] = 2.0**-22  # the last bit that counts
    w[101:, 2] = 2.0**-23
    w[0, 3] = 1.5
    for criterion in ("fro", "l1"):
        for block in ((512, 1), (512, 4), (511, 2)):
            assert torch.equal(score.block_keys(w, block, criterion), block_keys(w, block, criterion))


@pytest.mark.parametrize(("criterion", "terms"), [("l1", (2.0**43, 2.0**22 - 1, 0.75, 0.75)), ("fro", (2.0**21, 1448, 21, 2, 1, 1, 0.87, 0.87))])
def test_each_term_is_truncated_before_they_add_up(criterion, terms):
    """The whole parts are one less than the key's next value; what is behind the points adds up to more than one."""
    w = torch.tensor(terms)[:, None] / 2.0 ** (22 if criterion == "fro" else 44)
    assert torch.equal(score.block_keys(w, w.shape, criterion), block_keys(w, w.shape, criterion))


@pytest.mark.parametrize(("shape", "ties"), [((0, 5), "lowest"), ((5, 0), "lowest"), ((40, 33), "lowest"), ((40, 33), "keep")])
def test_masks_are_those_of_the_reference(shape, ties):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(5)).round()  # of many ties
    arguments = (w, torch.tensor(3), torch.tensor(0), (4, 4), "fro", ties, 0)
    assert torch.equal(implementation.block_index(*arguments), reference.block_index(*arguments))


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_defaults_do_not_matter(dtype, criterion):
    """Trainers set a default dtype around forwards (Lightning's bf16-true), programs a default device."""
    w = torch.randn(70, 33, generator=torch.Generator().manual_seed(0))
    step, stream = torch.tensor(3), 5
    expected = score.block_keys(w, (16, 16), criterion, step, stream)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with torch.device("meta"):
            got = score.block_keys(w, (16, 16), criterion, step, stream)
    finally:
        torch.set_default_dtype(before)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("rows", [64, 70])
def test_block_rows_that_threads_share_out(rows, monkeypatch):
    """The ragged last row is in the last share."""
    w, before = torch.randn(rows, 48, generator=torch.Generator().manual_seed(0)), torch.get_num_threads()
    monkeypatch.setattr(score, "SHARE", 1)
    monkeypatch.setattr(score, "GRAIN", 1)
    torch.set_num_threads(2)
    try:
        found = score.block_keys(w, (16, 16), "fro")
    finally:
        torch.set_num_threads(before)
    assert torch.equal(found, block_keys(w, (16, 16), "fro"))
