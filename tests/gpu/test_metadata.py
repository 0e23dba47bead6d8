"""Masks and lists made on the device equal the CPU's, to the bit."""

import pytest
import torch
from gpu.bodies import check_group, check_lists, check_mask, check_scores

pytestmark = pytest.mark.gpu
BLOCKS = [(16, 16), (32, 32), (64, 64), (128, 128), (16, 128), (64, 32), (3, 5)]


def weights():
    w = torch.randn(400, 520, generator=torch.Generator().manual_seed(0))
    special = w.clone()
    special[0, 0], special[99, 200], special[300, 300], special[210:230] = float("nan"), -float("nan"), float("inf"), 0.0
    return {
        "fp32": w,
        "bf16": w.bfloat16(),
        "fp16": w.half(),
        "special": special,
        "equal": torch.full((400, 520), 0.1),
        "zeros": torch.zeros(400, 520),
        "quantised": (2 * w).round() / 2,
        "denormal": (w.double() * 1e-42).float(),
        "large": w * 1e37,
    }


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("kind", ["fp32", "bf16", "fp16", "special", "equal", "zeros", "quantised", "denormal", "large"])
def test_masks(kind, block):
    for ratio in (0.0, 0.5, 0.9, 0.99):
        check_mask("cuda", weights()[kind], block, ratio)


@pytest.mark.parametrize("block", [(16, 16), (64, 64)], ids=str)
def test_a_large_weight(block):
    """More blocks than one program selects among, at 16 x 16."""
    check_mask("cuda", torch.randn(4096, 1536, generator=torch.Generator().manual_seed(1)).bfloat16(), block, 0.8)


@pytest.mark.parametrize("block", BLOCKS[:-1], ids=str)
def test_lists(block):
    g = torch.Generator().manual_seed(0)
    for grid, density in (((24, 40), 0.3), ((128, 96), 0.05), ((1, 300), 0.5), ((33, 7), 0.0), ((16, 16), 1.0)):
        check_lists("cuda", torch.rand(grid, generator=g) < density, block)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [(16, 16), (64, 64), (128, 32)], ids=str)
def test_a_model_at_once(block, dtype):
    check_group("cuda", ((1536, 384), (384, 1536), (4096, 4096), (1000, 500), (1, 1)), block, dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("block", [(32, 32), (64, 64), (128, 32)], ids=str)
def test_scores_off_gradients_and_masks_by_them(block, dtype):
    """The largest grid is as large as one program selects among, at 32 x 32."""
    check_scores("cuda", ((1536, 384), (384, 1536), (4096, 4096), (1000, 500), (1, 1)), block, dtype)
