"""The bytes and FLOP that the kernels move and issue, recorded, are those of `matmul_cost` and `mask_cost`, operand by operand and byte for byte."""

import pytest
import torch
import triton
import triton.language as tl
from interpreter.trace import recording
from torch import nn
from triton.runtime.errors import InterpreterError

import fxmask
from fxmask.kernels import cost, mask_cost, matmul_cost
from fxmask.kernels.grid import expand_mask, grid_shape, keep_count, kept_elements
from fxmask.kernels.strides import tokens_inner
from fxmask.kernels.triton import launch, masked_dense, refresh, saliency, tiles

FP16, FP32 = torch.float16, torch.float32

# (M, N, K), block, ratio, dtype, bias, what else: `holes` empties a strip in both directions, `gaps` puts 5 elements between rows, `none` masks everything
CASES = [
    *(((70, 160, 128), (b, b), r, FP16, r > 0.6, "") for b in (16, 32, 64, 128) for r in (0.0, 0.5, 0.9, 0.99)),  # ragged M, ragged last strip
    *(((70, 160, 72), (b, b), r, FP32, r < 0.6, "") for b in (16, 32, 64, 128) for r in (0.0, 0.5, 0.9)),
    *(((40, 150, 170), b, r, FP16, True, "") for b in ((16, 64), (64, 16), (128, 32), (32, 128)) for r in (0.5, 0.9)),  # rectangular, all of it ragged
    *(((40, 150, 100), b, 0.7, FP32, False, "gaps") for b in ((16, 128), (128, 16), (64, 32), (32, 64))),
    ((130, 256, 192), (128, 128), 0.5, FP16, True, ""),  # the last unit of 64 is all edge
    ((65, 192, 192), (128, 128), 0.5, FP32, True, "gaps"),
    ((130, 192, 320), (64, 128), 0.5, FP16, False, "gaps"),
    ((1, 100, 200), (16, 16), 0.9, FP16, True, ""),
    ((1, 16, 16), (16, 16), 0.0, FP32, True, ""),
    ((5, 7, 9), (16, 32), 0.0, FP16, True, "gaps"),  # less than a block
    ((40, 300, 290), (16, 32), 0.8, FP16, True, "holes"),
    ((40, 300, 290), (64, 64), 0.5, FP32, False, "holes"),
    ((40, 130, 130), (32, 32), 0.5, FP16, True, "none"),
    ((0, 64, 64), (16, 16), 0.5, FP16, True, ""),
]
ODD_BLOCKS = [((0, 9, 33), (1, 1), 0.5), ((0, 40, 130), (3, 5), 0.9), ((0, 16, 200), (2, 128), 0.0), ((0, 37, 41), (8, 8), 0.99)]
NAMES = ["M{}-N{}-K{}-b{}x{}-r{}-{}-{}{}".format(*s, *b, r, str(d)[-7:], "bias" * h, e) for s, b, r, d, h, e in CASES]
SELDOM = [(s[1] == 160 and r in (0.0, 0.9)) or (s == (40, 150, 170) and r == 0.9) for s, _, r, *_ in CASES]  # ratios between those that the default run has
case = pytest.mark.parametrize(
    ("shape", "block", "ratio", "dtype", "has_bias", "extra"),
    [pytest.param(*c, marks=[pytest.mark.slow] if seldom else []) for c, seldom in zip(CASES, SELDOM, strict=True)],
    ids=NAMES,
)


def make_mask(shape, block, ratio, extra):
    nb, kb = grid_shape(shape, block)
    chosen = torch.randperm(nb * kb, generator=torch.Generator().manual_seed(sum(shape)))[: keep_count(nb * kb, ratio)]
    mask = torch.zeros(nb * kb, dtype=torch.bool).index_fill(0, chosen, True).reshape(nb, kb)
    if extra == "holes":
        mask[: 128 // block[0]] = False
        mask[:, 128 // block[1] : 256 // block[1]] = False
    return mask & (extra != "none")


def make(rows, cols, dtype, extra):
    t = torch.randn(rows, cols + 5 * (extra == "gaps"), generator=torch.Generator().manual_seed(rows + cols)).to(dtype)
    return t[:, :cols]


def recorded(function, *args, **named):
    with recording() as launches:
        function(*args, **named)
    return {entry.kernel.removesuffix("_kernel"): entry for entry in launches}


def agrees(entry, expected, also_reads=()):
    """Requested bytes to the byte, issued FLOP, and distinct bytes equal to the compulsory ones; of `also_reads` a kernel may touch more."""
    zero = dict.fromkeys(entry.operands, 0)
    assert {n: o.bytes_read for n, o in entry.operands.items()} == zero | expected.reads
    assert {n: o.bytes_written for n, o in entry.operands.items()} == zero | expected.writes
    assert {n: o.distinct_written for n, o in entry.operands.items()} == zero | expected.writes_min
    for name, operand in entry.operands.items():
        least = expected.reads_min.get(name, 0)
        assert operand.distinct_read == least or (name in also_reads and operand.distinct_read > least), name
    assert entry.flop == expected.flop_issued
    assert expected.flop_useful <= expected.flop_issued
    assert expected.bytes_min <= expected.bytes_req


def lists_agree(entries, grid, block, strip):
    agrees(entries["strip_lists"], mask_cost.strip_lists(grid, block, strip))
    agrees(entries["order"], mask_cost.order(grid, block, strip))


@case
@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "dX"])
def test_list_matmul(shape, block, ratio, dtype, has_bias, extra, transposed):
    check_list_matmul(shape, block, ratio, dtype, has_bias, extra, transposed)


def check_list_matmul(shape, block, ratio, dtype, has_bias, extra, transposed, tile=None):
    m, n, k = shape
    mask, w = make_mask((n, k), block, ratio, extra), make(n, k, dtype, extra)
    x, bias = make(m, n if transposed else k, dtype, extra), make(1, n, dtype, "")[0] if has_bias and not transposed else None
    entries = recorded(launch.list_matmul, x, w, bias, mask, block, transposed, tile=tile)
    tile = tile or tiles.best_tile(dtype, block, transposed, (m, *((k, n) if transposed else (n, k))))
    lists = matmul_cost.lists_of(mask, (n, k), block, transposed, tile.strip)
    expected = matmul_cost.list_matmul(lists, m, dtype.itemsize, tile_tokens=tile.tokens, step=tile.step, bias=bias is not None, tma=tile.tma)
    lists_agree(entries, mask.shape, block, tiles.other_strip(tile.strip, block, transposed))
    kept = expand_mask(mask, (n, k), block)
    assert expected.flop_useful == 2 * m * int(kept.sum())
    if m == 0:
        assert "list_matmul" not in entries and expected.bytes_req == expected.bytes_min == expected.flop_issued == 0
        return
    entry = entries["list_matmul"]
    # entries: one step ahead; x: an empty place of a step's last entries loads unit 0
    agrees(entry, expected, also_reads=("entries", "x") if lists.layout.unit < tile.step else ("entries",))
    assert not entry.operands["w"].reads[~kept].any(), "a masked element of W was loaded"
    assert (entry.operands["y"].writes == 1).all()


@case
@pytest.mark.parametrize("splits", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_sampled_matmul(shape, block, ratio, dtype, has_bias, extra, splits):
    check_sampled_matmul(shape, block, ratio, dtype, has_bias, extra, splits)


def check_sampled_matmul(shape, block, ratio, dtype, has_bias, extra, splits, tile=None):
    (m, n, k), accumulate = shape, has_bias  # about half of the cases have either
    mask, gy, x = make_mask((n, k), block, ratio, extra), make(m, n, dtype, extra), make(m, k, dtype, extra)
    entries = recorded(launch.sampled_matmul, gy, x, mask, block, torch.zeros(n, k, dtype=dtype) if accumulate else None, splits, tile=tile)
    entry = entries["sampled_matmul"]
    strip = tile.strip if tile else tiles.strip_for(block, False)
    lists = matmul_cost.lists_of(mask, (n, k), block, False, strip)
    constants = entry.scalars
    expected = matmul_cost.sampled_matmul(
        lists, m, dtype.itemsize, splits=splits, tile_tokens=constants["BT"], tile_features=constants["UNIT_W"] * constants["Q"], accumulate=accumulate
    )
    lists_agree(entries, mask.shape, block, tiles.other_strip(strip, block, False))
    agrees(entry, expected, also_reads=("gy", "x"))  # a tile reads its strip of gy whole
    kept = expand_mask(mask, (n, k), block)
    written = entry.operands["out"].writes.reshape(-1, n, k)
    assert torch.equal(written, kept.long().expand(splits, n, k))
    assert ("sum_splits" in entries) == (splits > 1)
    if splits > 1:
        total = entries["sum_splits"]
        agrees(total, matmul_cost.sum_splits((n, k), block, int(kept.sum()), dtype.itemsize, splits=splits, accumulate=accumulate))
        assert torch.equal(total.operands["out"].writes, kept.long())


@pytest.mark.parametrize(("shape", "block", "ratio", "extra"), [(s, b, r, e) for s, b, r, _, _, e in CASES] + [(*odd, "") for odd in ODD_BLOCKS])
@pytest.mark.parametrize(("source", "target"), [(FP32, FP16), (FP16, FP16)], ids=["cast", "mask"])
def test_mask_cast(shape, block, ratio, extra, source, target):
    mask, w = make_mask(shape[1:], block, ratio, extra), make(*shape[1:], source, extra)
    entry = recorded(masked_dense.mask_cast, w, mask, block, target)["mask_cast"]
    agrees(entry, mask_cost.mask_cast(shape[1:], block, int(kept_elements(mask, shape[1:], block)), source.itemsize, target.itemsize))
    assert torch.equal(entry.operands["w"].reads, expand_mask(mask, shape[1:], block).long()), "a masked element of W was loaded"


@case
def test_metadata(shape, block, ratio, dtype, has_bias, extra):
    _, n, k = shape
    nb, kb = grid_shape((n, k), block)
    w = make(n, k, dtype, extra)
    agrees(recorded(refresh.block_keys, w, block)["block_keys"], mask_cost.block_keys((n, k), block, dtype.itemsize))
    keys, keep = torch.arange(nb * kb, dtype=torch.int32).reshape(nb, kb), torch.tensor(keep_count(nb * kb, ratio))
    agrees(recorded(refresh.select, keys, keep)["select"], mask_cost.select(nb * kb))
    scores = torch.arange(nb * kb).sub(nb * kb // 2).div(3, rounding_mode="floor").float().reshape(nb, kb)  # at most three tie
    ties = int((scores == scores.flatten().sort(descending=True).values[keep - 1]).sum())
    agrees(recorded(refresh.select, keys, keep, scores)["select"], mask_cost.select(nb * kb, ties))


@pytest.mark.parametrize(("shape", "block"), [((40, 130), (8, 8)), ((18, 300), (2, 128)), ((5, 3), (1, 1))], ids=str)
def test_keys_of_several_rows_of_blocks_a_program(shape, block):
    agrees(recorded(refresh.block_keys, make(*shape, FP32, ""), block)["block_keys"], mask_cost.block_keys(shape, block, 4))


@case
def test_scores_off_gradients(shape, block, ratio, dtype, has_bias, extra):
    """Weight and gradient once, and nothing of their size is written."""
    _, n, k = shape
    nb, kb = grid_shape((n, k), block)
    w, grad = make(n, k, dtype, extra), make(n, k, FP32, "")
    for criterion in saliency.BY_GRADIENT:
        entry = recorded(saliency.saliency, w, grad, block, criterion)["saliency"]
        agrees(entry, mask_cost.saliency((n, k), block, dtype.itemsize, 4, criterion != "gradient"))
    for average in (0.0, 0.9):
        entry = recorded(saliency.take_in, torch.rand(nb, kb), torch.rand(nb, kb), average, False, True)["take_in"]
        agrees(entry, mask_cost.take_in(nb * kb, average > 0))


@pytest.mark.parametrize("tile", [tiles.Tile(32, 64, 32, 4, 2), tiles.Tile(16, 256, 64, 4, 2)], ids=["strip-below-a-block", "strip-of-16-blocks"])
@pytest.mark.parametrize("block", [(128, 128), pytest.param((16, 16), marks=pytest.mark.slow), (32, 128)])
def test_other_tiles(tile, block):
    for transposed in (False, True):
        check_list_matmul((70, 300, 200), block, 0.7, FP16, True, "", transposed, tile)
    check_sampled_matmul((70, 300, 200), block, 0.7, FP16, True, "", 3, tile)


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "dX"])
@pytest.mark.parametrize("block", [(64, 64), (128, 128)], ids=str)
def test_descriptors_read_nothing_behind_the_edges(block, transposed):
    """Neither tokens nor rows of W; pointers repeat the last one of each."""
    by_descriptors = [tile for tile in tiles.candidates(FP16, block, transposed) if tile.tma]
    for tile in by_descriptors:
        check_list_matmul((70, 296, 200), block, 0.7, FP16, True, "", transposed, tile)
    assert by_descriptors


@pytest.mark.parametrize("transposed", [False, True], ids=["forward", "dX"])
@pytest.mark.parametrize("block", [(16, 16), (64, 32), (128, 128)])
@pytest.mark.parametrize("shape", [(3, 24, 160, 128), (2, 104, 150, 170)])
def test_token_mixing(shape, block, transposed):
    """An input whose tokens lie side by side is read as it is: no copy, no element twice for its layout."""
    b, c, n, k = shape
    mask, w = make_mask((n, k), block, 0.6, ""), make(n, k, FP16, "")
    x = make(b * (n if transposed else k), c, FP16, "").reshape(b, -1, c).transpose(1, 2)
    assert tokens_inner(x)
    lists, tile = matmul_cost.lists_of(mask, (n, k), block, transposed), tiles.tile_for(FP16, tiles.strip_for(block, transposed))
    entry = recorded(launch.list_matmul, x, w, None, mask, block, transposed)["list_matmul"]
    assert entry.operands["x"].tensor.data_ptr() == x.data_ptr()
    expected = matmul_cost.list_matmul(lists, b * c, 2, tile_tokens=tile.tokens, predicated=True)
    agrees(entry, expected, also_reads=("entries", "x") if lists.layout.unit < tile.step else ("entries",))


def test_token_mixing_dw():
    b, c, n, k, block = 3, 24, 160, 128, (32, 32)
    mask = make_mask((n, k), block, 0.6, "")
    gy, x = (make(b * f, c, FP16, "").reshape(b, f, c).transpose(1, 2) for f in (n, k))
    lists = matmul_cost.lists_of(mask, (n, k), block, False)
    for g, t in ((gy, x), (gy.contiguous(), x), (gy, x.contiguous())):
        entry = recorded(launch.sampled_matmul, g, t, mask, block)["sampled_matmul"]
        assert entry.operands["gy"].tensor.data_ptr() == g.data_ptr() and entry.operands["x"].tensor.data_ptr() == t.data_ptr()
        agrees(entry, matmul_cost.sampled_matmul(lists, b * c, 2, tile_tokens=entry.scalars["BT"]), also_reads=("gy", "x"))


@pytest.mark.parametrize("kind", ["distinct", "ties"])
def test_selection_of_many_blocks(monkeypatch, kind):
    monkeypatch.setattr(refresh, "SELECT_MAX", 0)
    n, chunk = 10_000, refresh.CHUNK
    keys = torch.arange(n, dtype=torch.int32)[None] if kind == "distinct" else torch.full((1, n), 7, dtype=torch.int32)
    with recording() as launches:
        refresh.select(keys, torch.tensor(3000))
    assert [entry.kernel for entry in launches] == ["histogram_kernel"] * 3 + ["write_mask_kernel"]
    for digit, entry in enumerate(launches[:3]):
        expected = mask_cost.histogram(n, digit, chunk)
        read, written = ({name: getattr(o, f"bytes_{what}") for name, o in entry.operands.items()} for what in ("read", "written"))
        assert read == expected.reads and written == {"key": 0, "keep": 0} | expected.writes
        assert {name: o.distinct_read for name, o in entry.operands.items()} == expected.reads_min
    agrees(launches[3], mask_cost.write_mask(n, chunk, kind == "ties"))


def test_costs_add_up_by_operand():
    a, b = mask_cost.select(10), mask_cost.mask_cast((4, 6), (2, 2), 8, 4, 2)
    both = sum([a, b], cost.Cost())
    assert both.reads == {"key": 40, "keep": 8, "w": 32, "mask": 24} and both.writes == {"mask": 10, "out": 48}
    assert both.bytes_req == a.bytes_req + b.bytes_req and both.bytes_min == both.bytes_req - 24 + 6
    assert matmul_cost.zero_fill((4, 6), 2).bytes_req == 48


@triton.jit
def copy_kernel(x_ptr, y_ptr, n, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    tl.store(y_ptr + i, tl.load(x_ptr + i), mask=i < n)


def test_the_recorder_sees_a_stray_access():
    x, y = torch.arange(16.0), torch.zeros(16)
    with recording() as launches:
        copy_kernel[(1,)](x, y, 8, SIZE=16)
        assert launches[0].operands["x"].bytes_read == 64 and launches[0].operands["y"].bytes_written == 32 and y[7] == 7
        with pytest.raises(InterpreterError, match="copy_kernel: a load of 16 elements is not within one operand"):
            copy_kernel[(1,)](x[:12], y, 8, SIZE=16)
        with pytest.raises(InterpreterError, match="StrayAccess"):  # every second element is no part of the operand
            copy_kernel[(1,)](x, torch.zeros(16, 2)[:, 0], 8, SIZE=16)


def test_in_place_is_read_by_the_first_name_and_written_by_the_last():
    w, mask = torch.randn(4, 6), torch.tensor([[True, False]])
    entry = recorded(masked_dense.mask_cast, w, mask, (4, 3), FP32, w)["mask_cast"]
    agrees(entry, mask_cost.mask_cast((4, 6), (4, 3), 12, 4, 4))
    assert (w[:, 3:] == 0).all() and (w[:, :3] != 0).all()


def table_of(model, x):
    """{(phase, op): its row} of an analysis, and the bytes that it says each asks for."""
    report = fxmask.analyze(model, x, device="h100-sxm")
    return {(r["phase"], r["op"].removeprefix("fxmask.")): r for r in report.tables["nodes"] if r["op"].startswith("fxmask.")}


def moved(entries):
    """Requested bytes of recorded launches."""
    return sum(o.bytes_read + o.bytes_written for entry in entries for o in entry.operands.values())


@pytest.mark.parametrize("block", [(16, 16), (32, 64), (3, 5)])
def test_an_analysis_says_what_a_cached_mask_holds(block):
    """Its lists, too, where a kernel takes the block; and counts them there alone, not as what autograd saves."""
    model = fxmask.apply(nn.Sequential(nn.Linear(72, 136)), ratio=0.4, block=block, refresh=2, impl="triton")
    fxmask.step(model, 0)
    mask, packed = fxmask.masks(model)["0.weight"], model[0]._fxmask_lists
    assert (packed is None) == (block == (3, 5))
    held = fxmask.analyze(model, torch.randn(4, 72), device="h100-sxm").tables["footprint"][-1]
    assert held["metadata"] == mask.numel() + (0 if packed is None else packed.nbytes)
    assert held["saved_activations"] == 0


@pytest.mark.parametrize(
    ("block", "dtype", "layout"),
    [
        *(((16, 16), FP16, "rows"), ((32, 64), FP16, "rows"), ((64, 32), FP32, "rows"), ((128, 64), FP16, "rows")),
        *(((16, 16), FP16, "mixing"), ((32, 32), FP32, "mixing")),
    ],
)
def test_the_table_of_an_analysis_is_the_trace_of_a_step(block, dtype, layout):
    """A masked layer, forward and backward: what `fxmask.analyze` says that it asks for is what it asked for, op by op and to the byte."""
    n, k, tokens = 136, 72, 40
    torch.manual_seed(5)
    model = fxmask.apply(nn.Sequential(nn.Linear(k, n)).to(dtype), ratio=0.4, block=block, impl="triton")
    mixing = layout == "mixing"  # tokens side by side, in input and gradient
    x = (torch.randn(2, k, tokens, dtype=dtype).transpose(1, 2) if mixing else torch.randn(2, tokens, k, dtype=dtype)).requires_grad_()
    assert tokens_inner(x) == (mixing and dtype == FP16)
    rows = table_of(model, x)
    with recording() as launches:
        y = model(x)
        forward = list(launches)
        y.backward(torch.ones(2, n, tokens, dtype=dtype).transpose(1, 2) if mixing else torch.ones(2, tokens, n, dtype=dtype))
    names = [entry.kernel.removesuffix("_kernel") for entry in launches]
    assert names.count("list_matmul") == 2 and names.count("sampled_matmul") == 1 and "sum_splits" not in names
    found = dict(zip(["block_keys", "select", "strip_lists", "order", "forward"], forward, strict=True))
    assert [entry.kernel.removesuffix("_kernel") for entry in forward] == [*list(found)[:-1], "list_matmul"]
    behind = {entry.kernel: entry for entry in launches[len(forward) :]}
    dx, dw = behind["list_matmul_kernel"], behind["sampled_matmul_kernel"]
    assert rows["fwd", "block_index"]["bytes_req"] == moved([found["block_keys"], found["select"]])
    assert rows["fwd", "strip_lists"]["bytes_req"] == moved([found["strip_lists"], found["order"]])
    assert rows["fwd", "masked_linear"]["bytes_req"] == moved([found["forward"]])
    assert rows["dX", "masked_linear_dx"]["bytes_req"] == moved([dx])
    zeros = matmul_cost.zero_fill((n, k), dtype.itemsize).bytes_req  # torch's, no launch of ours
    assert rows["dW", "masked_linear_dw"]["bytes_req"] == moved([dw]) + zeros
    for phase, op, entry in (("fwd", "masked_linear", found["forward"]), ("dX", "masked_linear_dx", dx), ("dW", "masked_linear_dw", dw)):
        assert rows[phase, op]["flop_executed"] == entry.flop
        mask = fxmask.masks(model)["0.weight"]
        assert rows[phase, op]["flop"] == 2 * 2 * tokens * int(kept_elements(mask, (n, k), block))
    written = {n: o.distinct_written for n, o in dw.operands.items()}
    assert rows["dW", "masked_linear_dw"]["bytes_min"] - zeros <= moved([dw]) and written["out"] == dtype.itemsize * int(kept_elements(mask, (n, k), block))
