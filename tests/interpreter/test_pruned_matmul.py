"""dW from pruned inputs by the kernel: against float64, its bits, autograd, and its bytes as `kernels.pruned_cost` and `fxmask.analyze` count them."""

import copy

import pytest
import torch
import torch.nn.functional as F
from interpreter.test_kernels import poisoned_empty as poisoned_empty
from interpreter.trace import recording
from torch import nn

import fxmask
from fxmask import ActivationPruning, WeightMask
from fxmask.errors import UnsupportedError
from fxmask.kernels import layer_cost, lists, matmul_cost, prune, prune_ops, pruned_cost, reference
from fxmask.kernels.grid import expand_mask, grid_shape
from fxmask.kernels.triton import prune_launch
from fxmask.kernels.triton.device import LAUNCHES

FP16, FP32 = torch.float16, torch.float32
# samples, rows, in, out, block, kept (negative: from the end), dtype, splits, weight mask's block or None, and how dense that is
QUICK = [
    (2, 19, 48, 130, 16, 50, FP16, 1, None, 0.0),
    (2, 19, 96, 34, 32, -1, FP32, 3, None, 0.0),  # all blocks but one
    (2, 21, 83, 70, 16, 1, FP32, 2, None, 0.0),  # one block a sample, all of it ragged
    (1, 9, 200, 130, 64, 1, FP16, 3, None, 0.0),  # all strips but one empty
    (2, 19, 150, 66, 128, 21, FP32, 2, (32, 64), 0.4),
    (2, 19, 72, 70, 16, 20, FP32, 2, (5, 3), 0.5),  # a block that no list has: whole, then masked
]
SLOW = [
    *((2, 37, 3 * b, 130, b, kept, dtype, splits, None, 0.0) for b, splits in ((16, 1), (32, 3), (64, 1), (128, 2)) for kept, dtype in ((9, FP16), (-1, FP32))),
    *((2, 21, 5 * 16 + 3, 70, 16, kept, FP32, splits, None, 0.0) for kept, splits in ((-1, 1), (40, 5))),
    (7, 1, 96, 6, 32, 2, FP16, 0, None, 0.0),  # an input of two axes, fewer out_features than a tile
    (2, 20, 10, 34, 16, 7, FP32, 0, None, 0.0),  # less than a block
    *((3, 37, 168, 200, b, 60, FP16, splits, (bh, bw), 0.3) for b, bh, bw, splits in ((16, 16, 64, 1), (64, 16, 16, 3), (32, 128, 32, 2), (128, 32, 128, 1))),
    (2, 30, 150, 302, 64, 50, FP32, 2, (64, 64), 0.4),
    (2, 30, 150, 302, 32, 50, FP32, 1, (32, 16), 0.05),  # strips whose every block of W is masked
    (2, 30, 150, 300, 16, 90, FP32, 1, (128, 128), 0.5),
]


def name(c):
    words = "b{}-kept{}-{}-splits{}".format(*c[4:6], str(c[6])[-7:], c[7])
    return "-".join(["x".join(map(str, c[:4])), words, "mask{}x{}".format(*c[8]) if c[8] else "all"])


CASES = [*(pytest.param(c, id=name(c)) for c in QUICK), *(pytest.param(c, id=name(c), marks=pytest.mark.slow) for c in SLOW)]
case = pytest.mark.parametrize("case", CASES)


def make(samples, rows, k, n, block, kept, dtype, splits, mask_block, density, seed=0):
    """gy, values, index, shape, mask; blocks at random, so that strips differ."""
    g = torch.Generator().manual_seed(seed)
    blocks = prune.block_count(rows, k, block)
    kept = kept if kept > 0 else blocks + kept
    best = torch.stack([torch.randperm(blocks, generator=g)[:kept].sort().values for _ in range(samples)])
    x = torch.randn(samples, rows, k, generator=g).to(dtype)
    values = prune._blocks(x, block).gather(1, best[:, :, None].expand(-1, -1, block))
    gy = torch.randn(samples, rows, n, generator=g).to(dtype)
    mask = None
    if mask_block is not None:
        mask = torch.rand(grid_shape((n, k), mask_block), generator=g) < density
        mask[0, -1] = True
    return gy, values, best.to(prune.index_dtype(blocks)), (samples, rows, k), mask


def oracle(gy, values, index, shape, mask, block):
    """The pruned input put together block by block, a dense product, masked; in the dtype of gy."""
    samples, rows, k = shape
    b, strips = values.shape[2], -(-k // values.shape[2])
    x = gy.new_zeros(samples, rows, strips * b)
    for i in range(samples):
        for j, flat in enumerate(index[i].tolist()):
            row, strip = divmod(flat, strips)
            x[i, row, strip * b : (strip + 1) * b] = values[i, j]
    dw = gy.reshape(-1, gy.shape[-1]).t() @ x[..., :k].reshape(-1, k)
    return dw if mask is None else dw * expand_mask(mask, tuple(dw.shape), block)


@case
def test_numbers_bits_and_bytes(case):
    gy, values, index, shape, mask = make(*case)
    dtype, splits, mask_block = case[6:9]
    with recording() as launches:
        got = prune_launch.pruned_dw(gy, values, index, shape, mask, mask_block or (1, 1), splits=splits)
    exact = oracle(gy.double(), values.double(), index, shape, mask, mask_block)
    low = oracle(gy, values, index, shape, mask, mask_block)
    assert got.dtype == dtype and not got.isnan().any()
    budget = 2 * (low.double() - exact).abs().max() + torch.finfo(dtype).eps * exact.abs().max()
    assert (got.double() - exact).abs().max() <= budget
    assert torch.equal(got, prune_launch.pruned_dw(gy, values, index, shape, mask, mask_block or (1, 1), splits=splits))
    if mask is not None:
        assert (got[~expand_mask(mask, tuple(got.shape), mask_block)] == 0).all()
    check_bytes(launches, case, gy, values, index, shape, mask)


def check_bytes(launches, case, gy, values, index, shape, mask):
    (_, rows, k), n, block, dtype, mask_block = shape, gy.shape[-1], values.shape[2], case[6], case[8]
    strips = -(-k // block)
    row, _, begins = prune.strip_rows(index, rows, strips)
    entries = begins.diff().tolist()
    (entry,) = [e for e in launches if e.kernel == "pruned_matmul_kernel"]
    splits = entry.grid[1]
    assert splits == (case[7] or 1)
    gathered = mask is not None and prune_launch.listed(mask_block)
    found = matmul_cost.lists_of(mask, (n, k), mask_block, True, block) if gathered else None
    kept = layer_cost.kept_by_strip(mask, (n, k), mask_block, block) if gathered else []
    expected = pruned_cost.pruned_matmul(
        entries, len(row.unique()), (n, k), block, dtype.itemsize, splits=splits, tile_tokens=entry.scalars["BT"], lists=found, kept=kept
    )
    zero = dict.fromkeys(entry.operands, 0)
    assert {name: o.bytes_read for name, o in entry.operands.items()} == zero | expected.reads
    assert {name: o.bytes_written for name, o in entry.operands.items()} == zero | expected.writes
    assert {name: o.distinct_written for name, o in entry.operands.items()} == zero | expected.writes_min
    least = zero | expected.reads_min
    for name, operand in entry.operands.items():
        assert operand.distinct_read == least[name] or (gathered and name == "gy" and operand.distinct_read < least[name]), name
    assert entry.flop == expected.flop_issued >= expected.flop_useful
    sums = [e for e in launches if e.kernel == "sum_splits_kernel"]
    assert len(sums) == (splits > 1)
    for e in sums:
        written = found.kept if gathered else n * k
        added = matmul_cost.sum_splits((n, k), mask_block or (1, 1), written, dtype.itemsize, splits=splits, masked=gathered)
        assert sum(o.bytes_read for o in e.operands.values()) == sum(added.reads.values())
        assert sum(o.bytes_written for o in e.operands.values()) == sum(added.writes.values())


@pytest.mark.parametrize("layout", [lambda t: t.mT.contiguous().mT, lambda t: t[..., :1].expand_as(t), lambda t: F.pad(t, (3, 2))[..., 3:-2]])
def test_operands_that_lie_otherwise(layout):
    """Of dY columns side by side, one for all, or odd strides from an odd place; of the kept blocks features that are apart."""
    gy, values, index, shape, _ = make(2, 19, 64, 48, 16, 20, FP16, 1, None, 0)
    gy, apart = layout(gy), values.mT.contiguous().mT
    expected = prune_launch.pruned_dw(gy.contiguous(), values, index, shape)
    with recording() as launches:
        got = prune_launch.pruned_dw(gy, apart, index, shape)
    assert torch.equal(got, expected)
    (entry,) = (e for e in launches if e.kernel == "pruned_matmul_kernel")
    read = entry.operands["gy"].tensor
    assert read.data_ptr() % 16 == 0 and read.stride(0) % 2 == 0


def test_issued_flop_are_those_of_both_densities():
    """Tiles of dW gather what W keeps, so that half of both is a quarter of the product."""
    gy, values, index, shape, _ = make(2, 64, 64, 256, 32, 64, FP16, 1, None, 0)
    mask = torch.zeros(16, 4, dtype=torch.bool)
    mask[::2] = True  # no tile of 128 is empty
    with recording() as launches:
        prune_launch.pruned_dw(gy, values, index, shape, mask, (16, 16), splits=1)
        prune_launch.pruned_dw(gy, values, index, shape, splits=1)
    half, whole = (e.flop for e in launches if e.kernel == "pruned_matmul_kernel")
    assert 2 * half == whole < 2 * 256 * 64 * 2 * 64  # the dense product


def test_dropped_rows_and_masked_features_are_never_read():
    """A row of dY whose blocks are all dropped, and an out_feature that is all masked, may hold anything; so may what lies beyond a strip's list."""
    gy, values, index, shape, mask = make(2, 30, 96, 64, 32, 9, FP32, 1, (16, 32), 0.5)
    mask[1] = False
    expected = prune_launch.pruned_dw(gy, values, index, shape, mask, (16, 32))
    row, _, _ = prune.strip_rows(index, 30, 3)
    free = torch.ones(60, dtype=torch.bool)
    free[row.long()] = False
    assert free.any()
    gy.view(60, 64)[free] = float("nan")
    gy[..., 16:32] = float("inf")
    assert torch.equal(prune_launch.pruned_dw(gy, values, index, shape, mask, (16, 32)), expected)


WITH = {"alone": (), "masked": (WeightMask(0.5, (16, 32), impl="triton"),), "ste": (WeightMask(0.5, (16, 16), backward="ste"),)}


@pytest.mark.parametrize("dtype", [pytest.param(FP16, marks=pytest.mark.slow), FP32], ids=str)
@pytest.mark.parametrize("masks", WITH.values(), ids=WITH)
def test_autograd(dtype, masks):
    """All but dW to the bit; dW as near as two orders of a sum are; masked blocks zero."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(40, 32)).to(dtype)
    x, gy, grads = torch.randn(2, 20, 40).to(dtype), torch.randn(2, 20, 32).to(dtype), {}
    for impl in ("triton", "reference"):
        m = fxmask.apply(copy.deepcopy(dense), *masks, ActivationPruning(0.6, 16, impl=impl))
        LAUNCHES.clear()
        v = x.clone().requires_grad_()
        m(v).backward(gy)
        assert LAUNCHES["pruned_matmul_kernel"] == (impl == "triton")
        grads[impl] = {"x": v.grad, **{n: p.grad for n, p in m.named_parameters()}}
    triton, plain = grads["triton"], grads["reference"]
    assert torch.equal(triton["x"], plain["x"]) and torch.equal(triton["0.bias"], plain["0.bias"])
    torch.testing.assert_close(triton["0.weight"], plain["0.weight"], rtol=2e-2 if dtype == FP16 else 1e-4, atol=5e-2 if dtype == FP16 else 1e-4)
    if masks and masks[0].backward == "masked":
        kept = expand_mask(fxmask.masks(m)["0.weight"], (32, 40), (16, 32))
        assert (triton["0.weight"][~kept] == 0).all() and not kept.all()
    else:
        assert (triton["0.weight"] != 0).all()


@pytest.mark.parametrize("width", [64, 128], ids=["in strips of the lists", "in others"])
@pytest.mark.parametrize("flag", [False, True])
def test_a_dense_step_of_rigl_uses_no_lists_of_the_mask(flag, width):
    """The lists that the forward has are the mask's; where dW is wanted dense, they would leave blocks out."""
    torch.manual_seed(0)
    x, w, gy, mask = torch.randn(1, 9, 128), torch.randn(64, 128, requires_grad=True), torch.randn(1, 9, 64), torch.tensor([[True, False], [False, True]])
    lists = prune_launch.refresh.strip_lists(mask, (32, 64))
    values, index = prune.compress(x, width, 512 // width, False)
    y = prune_ops.pruned_linear(x, w, None, values, index, False, mask, 32, 64, "rigl", torch.tensor(flag), "triton", lists, "triton")
    y.backward(gy)
    wanted = torch.ones_like(mask) if flag else mask
    torch.testing.assert_close(w.grad, reference.masked(prune.dw(gy, values, index, x.shape, False), wanted, (32, 64)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("what", ["turned", "block", "odd"])
def test_what_the_kernel_does_not_take_is_expanded(what):
    k, n, block = (24, 40, 8) if what == "block" else (48, 41, 16) if what == "odd" else (20, 40, 16)
    layer = fxmask.apply(nn.Linear(k, n), ActivationPruning(0.5, block, impl="triton"), include=lambda m, name: True, exclude=())
    x = torch.randn(2, k, 32).transpose(1, 2) if what == "turned" else torch.randn(2, 10, k)
    assert prune.is_turned(x, block) == (what == "turned")
    LAUNCHES.clear()
    y = layer(x)
    gy = torch.randn_like(y)
    y.backward(gy)
    turned = prune.is_turned(x, block)
    b, r, c = prune.sample_shape(x.shape, turned)
    blocks = prune.block_count(r, c, block)
    packed = prune.compress(x, block, blocks - prune.dropped_count(blocks, 0.5), turned)
    torch.testing.assert_close(layer.weight.grad, prune.dw(gy, *packed, x.shape, turned))
    assert not LAUNCHES["pruned_matmul_kernel"]


def test_float64_raises_in_the_forward():
    layer = fxmask.apply(nn.Linear(32, 32, dtype=torch.float64), ActivationPruning(0.5, 16, impl="triton"))
    with pytest.raises(UnsupportedError, match=r"dtype torch\.float64"):
        layer(torch.randn(2, 10, 32, dtype=torch.float64))


def test_a_cached_masks_lists_are_used():
    """Where their strips are as wide as the input's blocks."""
    gy, values, index, shape, mask = make(2, 30, 256, 160, 64, 20, FP16, 1, (32, 64), 0.5)
    lists = prune_launch.refresh.strip_lists(mask, (32, 64))
    LAUNCHES.clear()
    got = prune_ops.pruned_dw(gy, values, index, list(shape), False, mask, 32, 64, "triton", lists)
    assert not LAUNCHES["strip_lists_kernel"]
    assert torch.equal(got, prune_ops.pruned_dw(gy, values, index, list(shape), False, mask, 32, 64, "triton")) and LAUNCHES["strip_lists_kernel"]
    torch.testing.assert_close(got, reference.masked(prune.dw(gy, values, index, shape, False), mask, (32, 64)), rtol=1e-2, atol=2e-2)


MASKS = {"alone": (), "masked": (WeightMask(0.6, (32, 32), impl="triton"),), "other": (WeightMask(0.6, (8, 8), impl="triton"),)}


@pytest.mark.parametrize("tokens", [(2, 40), pytest.param((8, 520), marks=pytest.mark.slow)], ids=["whole", "splits"])
@pytest.mark.parametrize("masks", MASKS.values(), ids=MASKS)
def test_the_table_of_an_analysis_is_the_trace(masks, tokens):
    k, n, features = 96, 136, 32
    gathers = bool(masks) and masks[0].block == (32, 32)
    model = fxmask.apply(nn.Sequential(nn.Linear(k, n)).to(FP16), *masks, ActivationPruning(0.5, features, impl="triton"))
    x = torch.randn(*tokens, k).to(FP16)
    x[:, ::2] *= 100  # these rows are kept, whole: all strips have as many, as the analysis assumes
    report = fxmask.analyze(model, x, device="h100-sxm")
    (row,) = [r for r in report.tables["nodes"] if r["op"] == "fxmask.pruned_dw"]
    y = model(x)
    with recording() as launches:
        y.backward(torch.ones_like(y))
    by_us = sum(o.bytes_read + o.bytes_written for e in launches if not e.kernel.startswith("list_matmul") for o in e.operands.values())
    rows, strips = tokens[0] * tokens[1], k // features
    by_torch = pruned_cost.strip_rows(strips * rows, strips * rows // 2, 2).bytes_req + (matmul_cost.zero_fill((n, k), 2).bytes_req if gathers else 0)
    assert row["bytes_req"] == by_us + by_torch
    kernels = {e.kernel for e in launches}
    assert ("sum_splits_kernel" in kernels) == (tokens == (8, 520)) and "pruned_matmul_kernel" in kernels and ("strip_lists_kernel" in kernels) == gathers
    assert row["flop_executed"] == sum(e.flop for e in launches if e.kernel == "pruned_matmul_kernel")
    kept = expand_mask(fxmask.masks(model)["0.weight"], (n, k), masks[0].block).sum() if masks else n * k
    assert row["flop"] == 2 * (rows // 2) * kept  # useful: what no kernel leaves out is multiplied, and zeroed afterwards


@pytest.mark.slow
@pytest.mark.parametrize("strip", [16, 32, 64])
@pytest.mark.parametrize("block", [(16, 16), (32, 128), (128, 32)])
def test_lists_in_narrow_strips(strip, block):
    mask = torch.rand(grid_shape((300, 270), block), generator=torch.Generator().manual_seed(1)) < 0.4
    got, want = prune_launch.refresh.strip_lists(mask, block, strip), lists.packed(mask, block, strip)
    for g, w in zip(lists.unpack(got, tuple(mask.shape), block, True, strip), lists.unpack(want, tuple(mask.shape), block, True, strip), strict=True):
        assert torch.equal(g, w)
