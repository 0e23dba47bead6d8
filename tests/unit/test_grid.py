"""The block grid and the exact number of kept blocks."""

import csv
from fractions import Fraction
from pathlib import Path

import pytest
import torch

from fxmask.errors import ConfigError, ShapeError
from fxmask.kernels.grid import as_matrix, check_block, expand_mask, grid_shape, keep_count, kept_elements, ratio_units, to_blocks

TABLE = Path(__file__).parents[2] / "examples" / "thesis" / "published" / "table_6_2.csv"
CIFAR_LAYERS = [((64, 64), 5), ((256, 64), 5), ((64, 256), 5)]


def table_cells():
    for row in csv.DictReader(TABLE.read_text().splitlines()):
        rows, cols = map(int, row.pop("block").split("x"))
        for percent, value in row.items():
            yield pytest.param((rows, cols), int(percent.rstrip("%")) / 100, value, id=f"{rows}x{cols}-{percent}")


@pytest.mark.parametrize(("block", "ratio", "published"), list(table_cells()))
def test_thesis_table_6_2(block, ratio, published):
    """Loaded weights in billions over 200 epochs of 391 batches, printed with two decimals."""
    loaded = 0
    for shape, count in CIFAR_LAYERS:
        nb, kb = grid_shape(shape, block)
        loaded += count * keep_count(nb * kb, ratio) * block[0] * block[1]
    billions = Fraction(loaded * 391 * 200, 10**9)
    assert abs(billions - Fraction(published)) <= Fraction(5, 1000)  # rounded to two decimals


def test_the_table_has_all_its_cells():
    assert len(list(table_cells())) == 171


@pytest.mark.parametrize("percent", range(100))
@pytest.mark.parametrize("n_blocks", [1, 2, 7, 10, 99, 1000, 229_376])
def test_keep_count_is_exact(n_blocks, percent):
    exact = n_blocks - n_blocks * percent // 100 if n_blocks * percent % 100 else n_blocks * (100 - percent) // 100
    assert keep_count(n_blocks, percent / 100) == max(1, exact)


def test_a_sum_of_decimals_is_the_decimal():
    assert ratio_units(0.1 + 0.2) == ratio_units(0.3) == 300_000_000
    assert keep_count(10, 0.7) == 3  # ceil in floats gives 4
    assert keep_count(10, 0.1 + 0.2) == 7


@pytest.mark.parametrize("ratio", [-0.1, 1.0, 1, 2, float("nan"), float("inf"), "0.5", None, True, 0.9999999999])
def test_bad_ratio(ratio):
    with pytest.raises(ConfigError, match=r"expected a finite number in \[0, 1\), got"):
        keep_count(10, ratio)


@pytest.mark.parametrize("block", [16, (16,), (16, 0), (-1, 16), (16.0, 16), (16, 16, 16), "16x16", None, (True, 1)])
def test_bad_block(block):
    with pytest.raises(ConfigError, match="block must be two positive ints"):
        check_block(block)


def test_what_is_wrong_with_a_number_that_looks_right():
    with pytest.raises(ConfigError, match=r"in \[0, 1\), got 0\.9999999999, which nine decimals round to 1\."):
        ratio_units(0.9999999999)
    with pytest.raises(ConfigError, match=r"got \(2147483648, 16\); a side is below 2\^31\."):
        check_block((2**31, 16))
    with pytest.raises(ConfigError, match=r"got \(16, 0\)\.$"):
        check_block((16, 0))
    with pytest.raises(ConfigError, match=r"block must be two positive ints"):
        check_block((16, torch.tensor(16, device="meta")))  # has no value
    for ratio, hint in ((2, r"got 2; 2 % is 0\.02\."), (1.5, r"got 1\.5\."), (100, r"got 100\.")):
        with pytest.raises(ConfigError, match=rf"{hint}$"):
            ratio_units(ratio)


def test_a_weight_has_two_axes():
    with pytest.raises(ShapeError, match="two axes"):
        grid_shape((4, 4, 4), (2, 2))
    with pytest.raises(ShapeError, match=r"at least two axes \(out_features, in_features\): got shape \(4,\)"):
        as_matrix(torch.randn(4))
    with pytest.raises(ConfigError, match=r"two positive ints.*got \(0, 16\)"):
        grid_shape((32, 32), (0, 16))
    with pytest.raises(ConfigError, match=r"two positive ints.*got \(16, -1\)"):
        grid_shape((32, 32), (16, -1))


@pytest.mark.parametrize(("shape", "block"), [((5, 7), (2, 3)), ((4, 4), (2, 2)), ((3, 9), (8, 16)), ((1, 1), (1, 1))])
def test_blocks_expand_and_counts_agree(shape, block):
    w = torch.arange(1.0, shape[0] * shape[1] + 1).reshape(shape)
    nb, kb = grid_shape(shape, block)
    blocks = to_blocks(w, block)
    assert blocks.shape == (nb, kb, min(block[0], shape[0]) * min(block[1], shape[1]))  # a block is cut to the weight
    for i in range(nb):
        for j in range(kb):
            mask = torch.zeros(nb, kb, dtype=torch.bool)
            mask[i, j] = True
            full = expand_mask(mask, shape, block)
            part = w[i * block[0] : (i + 1) * block[0], j * block[1] : (j + 1) * block[1]]
            assert full.shape == shape
            assert (w * full).sum() == part.sum() == blocks[i, j].sum()
            assert kept_elements(mask, shape, block) == part.numel()
