"""Forward, dX and dW on the device against float64: blocks, dtypes, ragged and strided shapes, outputs poisoned before."""

import pytest
import torch
from gpu.bodies import check_numbers, check_repeats, check_token_mixing

pytestmark = pytest.mark.gpu
BLOCKS = [(128, 128), (64, 64), (32, 32), (16, 16), (16, 128), (128, 16), (32, 64), (8, 8), (3, 5), (1, 4)]
PRECISIONS = ["bf16", "fp16", "fp32", "tf32"]


def name(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("block", BLOCKS, ids=name)
@pytest.mark.parametrize("ratio", [0.5, 0.9])
def test_whole_tiles(block, ratio, precision):
    check_numbers("cuda", (512, 384, 640), block, ratio, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_ragged(block, precision):
    check_numbers("cuda", (301, 200, 328), block, 0.7, precision)


@pytest.mark.parametrize("block", BLOCKS[:4], ids=name)
@pytest.mark.parametrize("gap", [8, 5])
def test_rows_apart(block, gap):
    check_numbers("cuda", (130, 257, 196), block, 0.6, "bf16", gap)


@pytest.mark.parametrize("block", BLOCKS[:4], ids=name)
@pytest.mark.parametrize("ratio", [0.0, 0.99])
def test_extreme_ratios(block, ratio):
    check_numbers("cuda", (257, 512, 512), block, ratio, "bf16")


@pytest.mark.parametrize("shape", [(1, 128, 128), (4096, 128, 256), (2048, 1024, 1024)], ids=name)
def test_few_and_many_tokens(shape):
    """Many tokens split dW's sum."""
    check_numbers("cuda", shape, (64, 64), 0.8, "bf16")


@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_the_same_bits_every_time(precision):
    check_repeats("cuda", (4096, 256, 384), (32, 32), 0.7, precision)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [(16, 16), (32, 64), (128, 128)], ids=name)
@pytest.mark.parametrize("shape", [(4, 384, 196, 196), (3, 40, 320, 136)], ids=name)
def test_token_mixing(shape, block, dtype):
    check_token_mixing("cuda", shape, block, dtype)
