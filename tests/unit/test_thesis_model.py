"""The closed forms of the thesis' memory model and of Barley's tables: published figures, bytes counted by hand, wrong arguments."""

from __future__ import annotations

import doctest
from fractions import Fraction

import pytest
import torch

from fxmask.analysis import barley, thesis
from fxmask.analysis.model_shapes import LinearShape, ModelShapes
from fxmask.analysis.thesis import VARIANTS, block_lines, flop, flop_kept, kept_bytes, loaded_elements, movement
from fxmask.errors import ConfigError, ShapeError
from fxmask.kernels.grid import expand_mask, grid_shape

CIFAR = ModelShapes.resmlp()
S12 = ModelShapes.resmlp(image=224, patch=16, dim=384, depth=12, classes=1000)


def test_published_sizes():
    assert CIFAR.parameters == 192_074 and CIFAR.maskable == 184_320
    assert S12.parameters == 15_350_872
    assert ModelShapes.resmlp(image=224, patch=14, dim=384, depth=12, classes=1000).parameters == 15_607_912
    assert CIFAR.macs == 11_993_728 and CIFAR.maskable_macs == 11_796_480


def test_bytes_of_a_batch():
    """Each sum by hand, from the list of tensors that the thesis counts."""
    moved = movement(CIFAR, (32, 32), 0.8)
    assert moved.other_weights == 64 * 48 * 4 + 256 * (1 + 30 + 2) + 64 * 10 * 4 + 128 == 23_424
    assert moved.activations == 128 * 7_050 * 4 == 3_609_600
    assert moved.dense_weights == 184_320 * 4 == 737_280
    assert moved.masked_weights == 5 * (1 + 4 + 4) * 32 * 128
    assert movement(CIFAR, (32, 32), 0.8, memory_model="tokens").activations == 128 * 253_002 * 4  # 129.5 MB


@pytest.mark.parametrize(("batches", "dense", "masked"), [(391, "318.29", "278.01"), (390.625, "317.98", "277.75")])
def test_totals_of_a_run(batches, dense, masked):
    moved = movement(CIFAR, (32, 32), 0.8)
    assert f"{moved.dense_gib(batches * 200):.2f}" == dense
    assert f"{moved.gib(batches * 200):.2f}" == masked


@pytest.mark.parametrize(("variant", "gib"), [("A", "278.01"), ("C", "278.43"), ("D", "291.44"), ("K", "278.43")])
def test_variants(variant, gib):
    assert f"{movement(CIFAR, (32, 32), 0.8, variant=variant).gib(391 * 200):.2f}" == gib


@pytest.mark.parametrize(
    ("rows", "cols", "lines"),
    [(32, 32, dict(A=32, C=33, D=64, K=33)), (4, 4, dict(A=4, C=2, D=8, K=5)), (3, 33, dict(A=6, C=5, D=9, K=7)), (64, 1, dict(A=64, C=3, D=128, K=65))],
)
def test_lines_of_a_block(rows, cols, lines):
    assert {v: block_lines(rows, cols, variant=v) for v in VARIANTS} == lines
    assert block_lines(rows, cols, itemsize=2) <= lines["A"]


def test_cap():
    """1x1 blocks fetch a line an element: 32 times their bytes."""
    capped, free = (movement(CIFAR, (1, 1), 0.5, cap=cap) for cap in (True, False))
    assert capped.total == capped.dense == free.dense < free.total
    assert free.masked_weights == 92_160 * 128
    assert movement(CIFAR, (32, 32), 0.8).total == movement(CIFAR, (32, 32), 0.8, cap=False).total


def by_hand(mask, shape, block, variant):
    """Lines of the kept blocks, one block after the other."""
    lines = 0
    for i, j in mask.nonzero().tolist():
        one = torch.zeros_like(mask)
        one[i, j] = True
        full = expand_mask(one, shape, block)
        lines += block_lines(int(full.any(1).sum()), int(full.any(0).sum()), variant=variant)
    return lines


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize(("shape", "block"), [((70, 100), (16, 48)), ((5, 7), (2, 3)), ((16, 16), (64, 64)), ((64, 256), (32, 32))])
def test_masks_count_what_ragged_blocks_hold(shape, block, variant):
    linear, grid = LinearShape("w", *shape), grid_shape(shape, block)
    for ratio in (0.0, 0.5, 0.9):
        mask = torch.zeros(grid[0] * grid[1], dtype=torch.bool)
        mask[torch.randperm(mask.numel(), generator=torch.Generator().manual_seed(1))[: thesis.keep_count(mask.numel(), ratio)]] = True
        mask = mask.view(grid)
        assert kept_bytes(linear, block, mask=mask, variant=variant) == 128 * by_hand(mask, shape, block, variant)
        assert loaded_elements(linear, block, mask=mask) == int(expand_mask(mask, shape, block).sum())
        divides = all(s % min(b, s) == 0 for s, b in zip(shape, block, strict=True))
        for exact, closed in (
            (kept_bytes(linear, block, mask=mask, variant=variant), kept_bytes(linear, block, ratio, variant=variant)),
            (loaded_elements(linear, block, mask=mask), loaded_elements(linear, block, ratio)),
        ):
            assert exact == closed if divides else exact <= closed


def test_kept_blocks_are_exact():
    """10 blocks at 70 %: 3, where a ceil in floats gives 4."""
    assert loaded_elements(LinearShape("w", 10, 1), (1, 1), 0.7) == 3
    assert kept_bytes(LinearShape("w", 10, 1), (1, 1), 0.1 + 0.2) == 7 * 128


def test_count_is_so_many_layers():
    five = ModelShapes((LinearShape("a", 64, 64, count=5), LinearShape("b", 256, 64, count=5), LinearShape("c", 64, 256, count=5)))
    assert movement(five, (32, 32), 0.8).masked_weights == movement(CIFAR, (32, 32), 0.8).masked_weights
    assert sum(loaded_elements(m, (2, 2), 0.3) for m in five.linears) == sum(loaded_elements(m, (2, 2), 0.3) for m in CIFAR.linears if m.masked)
    assert flop_kept(five, (32, 32), 0.8) == 2 * 46_080


def test_a_layer_without_a_mask_is_loaded_whole():
    one = {"blocks.0.fc1.weight": torch.tensor([[True, False]] * 8)}
    moved = movement(CIFAR, (32, 32), masks=one)
    assert moved.dense_weights - moved.masked_weights == 8 * 32 * 128
    assert 2 * CIFAR.macs - flop_kept(CIFAR, (32, 32), masks=one) == 2 * 64 * 8 * 32 * 32
    assert movement(CIFAR, (32, 32), masks={}).total == moved.dense


def test_flop():
    for percent in range(0, 100, 10):
        assert flop(CIFAR, percent / 100) == 23_987_456 - 23_592_960 * percent // 100
    assert flop(CIFAR, 0) / flop(CIFAR, 0.8) == pytest.approx(4.69, abs=0.005)
    assert sum(loaded_elements(m, (64, 64), 0.8) for m in CIFAR.linears if m.masked) == 184_320 // 3  # not a fifth
    assert flop_kept(CIFAR, (64, 64), 0.8) == 23_987_456 - 2 * 64 * 122_880


def test_example_in_the_docstring():
    assert doctest.testmod(thesis).attempted and not doctest.testmod(thesis).failed


def test_every_copy_of_a_linear_that_is_not_masked_has_its_weight_and_bias():
    heads = [LinearShape("head", 10, 64, masked=False, count=count) for count in (1, 3)]
    one, three = (movement(ModelShapes((W, head)), (32, 32), 0.5).other_weights for head in heads)
    assert (one, three) == (2560 + 128, 3 * (2560 + 128))


W = LinearShape("w", 64, 64)


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda: movement(CIFAR, (32, 32), 0.8, variant="B"), ConfigError, "variant: expected one of A, C, D, K, got 'B'"),
        (lambda: movement(CIFAR, (32, 32), 0.8, memory_model="lines"), ConfigError, "memory_model: expected one of thesis, tokens, got 'lines'"),
        (lambda: movement(CIFAR, (32, 32), 0.8, batch=0), ConfigError, "batch: expected a positive int, got 0"),
        (lambda: movement(CIFAR, (32, 32), 0.8, itemsize=2.0), ConfigError, "itemsize: expected a positive int, got 2.0"),
        (lambda: movement(CIFAR, (32, 32), 1.0), ConfigError, r"expected a finite number in \[0, 1\), got 1.0"),
        (lambda: movement(CIFAR, (32, 0), 0.5), ConfigError, "block must be two positive ints"),
        (lambda: movement(CIFAR, (32, 32)), ConfigError, "expected either ratio or masks, got neither"),
        (lambda: movement(CIFAR, (32, 32), 0.5, masks={}), ConfigError, "expected either ratio or masks, got both"),
        (lambda: movement(CIFAR, (32, 32), masks={"head.weight": torch.ones(1)}), ShapeError, r"expected names of masked linears, got \['head.weight'\]"),
        (lambda: movement(CIFAR, (32, 32), 0.8).gib(0), ConfigError, "batches: expected a positive finite number, got 0"),
        (lambda: movement(CIFAR, (32, 32), 0.8).dense_gib(float("nan")), ConfigError, "batches: expected a positive finite number, got nan"),
        (lambda: loaded_elements(W, (32, 32)), ConfigError, "w: expected either ratio or a mask, got neither"),
        (lambda: loaded_elements(W, (32, 32), mask=torch.ones(2, 3) > 0), ShapeError, r"w: expected a bool mask of \(2, 2\) blocks .* \(2, 3\) for 1"),
        (lambda: loaded_elements(W, (32, 32), mask=torch.ones(2, 2)), ShapeError, r"expected a bool mask of .*, got torch.float32 \(2, 2\)"),
        (lambda: LinearShape("w", 64, 0), ShapeError, "w: in_features: expected a positive int, got 0"),
        (lambda: LinearShape("w", 64, 64, rows=1.5), ShapeError, "w: rows: expected a positive int, got 1.5"),
        (lambda: ModelShapes(()), ShapeError, r"linears: expected at least one, each with a name of its own, got \[\]"),
        (lambda: ModelShapes((W, W)), ShapeError, r"each with a name of its own, got \['w', 'w'\]"),
        (lambda: ModelShapes((W,), ((64, -1),)), ShapeError, "sizes of tensors and activations: expected a positive int, got -1"),
        (lambda: ModelShapes.resmlp(image=30), ShapeError, "image: expected a multiple of patch=4, got 30"),
        (lambda: ModelShapes.resmlp(depth=0), ShapeError, "depth: expected a positive int, got 0"),
        (lambda: barley.kept_blocks(196, 384, 5, 0.5), ShapeError, "block: expected a divisor of the 384 features, got 5"),
        (lambda: barley.kept_blocks(196, 384, 0, 0.5), ConfigError, "block: expected a positive int, got 0"),
        (lambda: barley.kept_blocks(196, 384, 4, 1.5), ConfigError, "expected a finite number in"),
        (lambda: barley.bsr_bytes(196, 384, 4, 0.5, index_bytes=3), ConfigError, "index_bytes: expected 0, 1, 2, 4 or 8, got 3"),
        (lambda: barley.saved_bytes([(196, 384)], 0, 4, 0.5), ConfigError, "batch: expected a positive int, got 0"),
    ],
)
def test_wrong_arguments(call, error, text):
    with pytest.raises(error, match=text):
        call()


def test_barley_counts():
    assert [barley.kept_blocks(1, 5, 1, s) for s in (0, 0.5, 1)] == [5, 3, 0]  # round(2.5) is 2
    assert barley.bsr_bytes(196, 384, 64, 0.8) == 235 * 64 * 4 + 235 * 8 + 197 * 8  # 1,176 blocks; 940.8 of them go, rounded
    assert len(barley.resmlp_inputs()) == 36
    dense, kept = barley.saved_bytes(barley.resmlp_inputs(), 32, 64, 0.8)
    assert dense / 2**20 == 661.5 and kept < dense
    assert barley.overhead_percent(196, 384, 1, 0) == Fraction(100 * (196 * 384 + 197), 196 * 384)


@pytest.mark.parametrize(("index_bytes", "percent"), [(8, "-32.73"), (4, "-32.91"), (2, "-33.00"), (0, "-33.09")])
def test_barley_savings_by_the_width_of_an_index(index_bytes, percent):
    dense, kept = barley.saved_bytes(barley.resmlp_inputs(), 32, 64, 0.8, index_bytes=index_bytes)
    assert f"{100 * (kept - dense) / 2**20 / 1599.2:.2f}" == percent


def test_barley_savings_in_16_bits():
    """196 x 384 features in blocks of 64 at 80 %: 235 blocks are kept."""
    dense, kept = barley.saved_bytes([(196, 384)], 2, 64, 0.8, itemsize=2, index_bytes=4)
    assert (dense, kept) == (2 * 196 * 384 * 2, 2 * (235 * 64 * 2 + (235 + 197) * 4))


def test_barley_activations():
    saved, gradients = (4 * n / 2**20 for n in barley.resmlp_activations())
    assert f"{saved:.2f} {gradients:.2f}" == "1552.98 45.94"
