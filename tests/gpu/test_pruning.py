"""dW from pruned inputs on the device against float64, and its bits; N:M masks against those of the CPU."""

import pytest
from gpu.pruning_bodies import check_layer, check_nm, check_pruned_dw

pytestmark = pytest.mark.gpu
PRECISIONS = ["bf16", "fp16", "fp32", "tf32"]


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("features", [16, 32, 64, 128])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 0.9])
def test_whole_tiles(features, ratio, precision):
    check_pruned_dw("cuda", (8, 196, 384), 512, features, ratio, precision)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("features", [16, 64, 128, 24])
@pytest.mark.parametrize("mask_block", [None, (16, 16), (64, 32), (5, 3)], ids=str)
def test_ragged(features, precision, mask_block):
    check_pruned_dw("cuda", (3, 101, 203), 330, features, 0.6, precision, mask_block)


@pytest.mark.parametrize("features", [16, 64])
def test_one_block_and_all_but_one(features):
    for kept in (1, -1):
        check_pruned_dw("cuda", (5, 40, 256), 256, features, kept, "bf16")


@pytest.mark.parametrize("masked", [False, True])
def test_a_layer_without_a_host_sync(masked):
    check_layer("cuda", masked)


@pytest.mark.parametrize("dtypes", [("fp32", "fp32"), ("fp32", "bf16"), ("bf16", "bf16"), ("fp16", "fp16")], ids=str)
@pytest.mark.parametrize(("n", "m"), [(1, 2), (2, 4), (1, 4), (3, 8)])
def test_nm_masks(n, m, dtypes):
    check_nm("cuda", (301, 1000), n, m, *dtypes)
