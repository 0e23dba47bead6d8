"""What a layer costs by an implementation: by hand, and in the tiles, splits and passes that the launchers choose."""

import pytest
import torch

from fxmask.kernels import dense_cost, layer_cost, mask_cost, matmul_cost, pruned_cost
from fxmask.kernels.grid import grid_shape
from fxmask.kernels.lists import fixed_length, listed

pytest.importorskip("triton")

from fxmask.kernels.triton import dropped, launch, prune_launch, tiles

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


@pytest.fixture
def launches(monkeypatch):
    """(kernel, its grid, its constants) of launches that do not happen, of tensors without memory."""
    found = []
    monkeypatch.setattr(launch.device, "launch", lambda kernel, grid, like, *a, **c: found.append((kernel.fn.__name__.removesuffix("_kernel"), grid, c)))
    return found


@pytest.fixture
def counted(monkeypatch):
    """The named arguments of the closed forms that are asked for."""
    found = {}

    def spy(module, name):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *a, **c: found.update({name: c}) or real(*a, **c))

    for module, name in ((matmul_cost, "list_matmul"), (matmul_cost, "sampled_matmul"), (pruned_cost, "pruned_matmul")):
        spy(module, name)
    return found


def empty(*shape, dtype=FP16):
    return torch.empty(*shape, device="meta", dtype=dtype)


def ones(shape, block, device="cpu"):
    return torch.ones(grid_shape(shape, block), dtype=torch.bool, device=device)


# tokens, (N, K), block: rows of 16 bytes, or not, of either operand; output tiles that fill the device counted one way and not the other; edges
SIZES = [
    *((8192, shape, 128) for shape in ((4096, 4096), (4100, 4096), (4096, 4100), (4104, 4096), (512, 1024))),
    *((100, (17024, 4096), 128), (100, (4096, 17024), 128), (17000, (128, 4096), 128), (70, (300, 200), 64)),
]


@pytest.mark.parametrize(("tokens", "shape", "block"), SIZES)
@pytest.mark.parametrize("dtype", [BF16, FP32])
@pytest.mark.parametrize("op", ["forward", "dx"])
def test_forward_and_dx_are_counted_in_the_tile_that_is_launched(op, dtype, tokens, shape, block, launches, counted):
    (n, k), transposed = shape, op == "dx"
    layer_cost.by_lists(op, tokens, shape, ones(shape, (block, block)), (block, block), dtype)
    x, w, mask = empty(tokens, n if transposed else k, dtype=dtype), empty(n, k, dtype=dtype), ones(shape, (block, block), "meta")
    launch.list_matmul(x, w, None, mask, (block, block), transposed)
    ((_, _, made),) = [found for found in launches if found[0] == "list_matmul"]
    asked = counted["list_matmul"]
    assert [asked[name] for name in ("tile_tokens", "step", "tma", "bias")] == [made[name] for name in ("BM", "STEP", "TMA", "HAS_BIAS")]


@pytest.mark.parametrize("inner", [False, True])
def test_dw_is_counted_in_the_tile_that_is_launched(inner, launches, counted):
    """Twice as wide a one where lists are long, but for tokens that lie side by side."""
    shape, block = (256, 4096), (32, 32)
    gy, x = (empty(2, f, 1024).transpose(1, 2) if inner else empty(2, 1024, f) for f in shape)
    layer_cost.by_lists("dw", 2048, shape, ones(shape, block), block, FP16, inner=inner)
    launch.sampled_matmul(gy, x, ones(shape, block, "meta"), block)
    (((_, splits), made),) = [found[1:] for found in launches if found[0] == "sampled_matmul"]
    asked = counted["sampled_matmul"]
    assert (asked["splits"], asked["tile_tokens"], asked["tile_features"]) == (splits, made["BT"], made["Q"] * made["UNIT_W"])
    assert asked["tile_features"] == (128 if inner else 256)


def test_a_given_tile_of_dw_is_counted_with_its_features_and_splits():
    shape, block, mask, tile = (256, 512), (32, 32), torch.ones(8, 16, dtype=torch.bool), tiles.Tile(128, 128, 16, 8, 3)
    lists = matmul_cost.lists_of(mask, shape, block, False, 128)
    one = matmul_cost.sampled_matmul(lists, 900, 2, splits=3, tile_tokens=16, tile_features=256)
    expected = one + matmul_cost.zero_fill(shape, 2) + matmul_cost.sum_splits(shape, block, 256 * 512, 2, splits=3)
    assert layer_cost.by_lists("dw", 900, shape, mask, block, FP16, tile=tile, features=256, splits=3) == expected


@pytest.mark.parametrize(("shape", "tokens"), [((1024, 2048), 8192), ((130, 200), 5000), ((130, 8192), 9000)])
def test_dropouts_gradients_are_counted_in_the_splits_that_are_launched(shape, tokens, launches, counted):
    """dX is dW of a weight that is the input, and reads an operand whose tokens lie side by side."""
    (n, k), block = shape, (32, 32)
    keep, gy = ones((tokens, k), block, "meta"), empty(tokens, n)
    dropped.dw(gy, empty(tokens, k), keep, block, 0.5)
    dropped.dx(gy, empty(n, k), keep, block, 0.5)
    found = {kernel: (grid, constants) for kernel, grid, constants in launches}
    made = layer_cost.dropped("dw", tokens, shape, ones((tokens, k), block), block, FP16)
    splits = found["list_matmul"][0][1]
    assert counted["list_matmul"]["splits"] == splits
    assert made.writes == {"dw": 2 * n * k} | ({"parts": 4 * splits * n * k} if splits > 1 else {})
    layer_cost.dropped("dx", tokens, shape, ones((tokens, k), block), block, FP16)
    ((_, splits), constants), asked = found["sampled_matmul"], counted["sampled_matmul"]
    assert (asked["splits"], asked["tile_tokens"], asked["tile_features"]) == (splits, constants["BT"], constants["Q"] * constants["UNIT_W"])


@pytest.mark.parametrize("given", [False, True], ids=["made", "given"])
@pytest.mark.parametrize("block", [None, (16, 64), (128, 128), (5, 3)], ids=str)
@pytest.mark.parametrize(("features", "tokens", "dtype", "tf32"), [(16, 200, FP32, False), (64, 5000, FP16, False), (128, 50_000, FP32, True)])
def test_a_pruned_dw_is_counted_in_the_passes_that_are_launched(features, tokens, dtype, tf32, block, given, launches, counted):
    (n, k), item = (1000, 500), dtype.itemsize
    strips, gathered, grid = -(-k // features), block is not None and listed(block), None if block is None else grid_shape((n, k), block)
    entries, mask = tokens * strips // 2, None if block is None else ones((n, k), block)
    made = layer_cost.pruned_dw(entries, tokens, (n, k), features, dtype, mask, block or (1, 1), given=given, tf32=tf32)
    x = empty(1, entries, features, dtype=dtype), empty(1, entries, dtype=torch.int32), (1, tokens, k)
    lists = empty(fixed_length(grid, block), dtype=torch.int32) if given and gathered else None
    by_strip = tuple(empty(size, dtype=torch.int32) for size in (entries, entries, strips + 1))
    prune_launch.pruned_dw(empty(1, tokens, n, dtype=dtype), *x, mask if mask is None else mask.to("meta"), block or (1, 1), lists, tf32, by_strip=by_strip)
    found = {kernel: (grid, constants) for kernel, grid, constants in launches}
    (programs, splits), constants = found["pruned_matmul"]
    assert (counted["pruned_matmul"]["splits"], counted["pruned_matmul"]["tile_tokens"]) == (splits, constants["BT"])
    assert made.reads["begins"] == 8 * splits * programs
    sums, listing = "sum_splits" in found, []
    if "strip_lists" in found:
        listing = [mask_cost.strip_lists(grid, block, features), mask_cost.order(grid, block, features)]
    assert made.writes["lists"] == 8 * entries + sum(c.writes["lists"] for c in listing)
    assert made.reads.get("mask", 0) == n * k * (("zero_masked" in found) + (sums and gathered)) + sum(c.reads.get("mask", 0) for c in listing)
    assert made.reads.get("parts", 0) == sums * 4 * splits * n * k
    assert made.writes["out"] == n * k * ((4 * splits + item if sums else item) + gathered * item)  # sums and what they add up to, or dW itself; zeros first


@pytest.mark.parametrize("bias", [False, True])
def test_masked_dense_by_hand(bias):
    """600 tokens, 200 -> 300, in tiles of 256 x 256, or 208 where there are 200: the dense product, and W∘M, or dW's zeros, read and written."""
    m, n, k, mn, mk, nk = 600, 300, 200, 600 * 300, 600 * 200, 300 * 200
    cast, b = {"mask": nk}, {"bias": 3 * 2 * n} if bias else {}
    of = lambda op, bias=False: layer_cost.masked_dense(op, m, (n, k), 1000, 2, (256, 256), bias=bias)  # noqa: E731
    forward, dx, dw = of("forward", bias), of("dx"), of("dw")
    assert forward.reads == {"x": 2 * 2 * mk, "w": 2 * nk + 3 * 2 * nk, **cast, **b} and forward.writes == {"w": 2 * nk, "y": 2 * mn}
    assert dx.reads == {"x": 2 * mn, "w": 2 * nk + 3 * 2 * nk, **cast} and dx.writes == {"w": 2 * nk, "y": 2 * mk}
    assert dw.reads == {"gy": 2 * mn, "x": 2 * 2 * mk, "out": 2 * nk, **cast} and dw.writes == {"out": 2 * 2 * nk}
    assert forward.bytes_min == 2 * (mk + mn + 3 * nk + n * bias) + nk
    assert [c.flop_useful for c in (forward, dx, dw)] == [2 * m * 1000] * 3
    assert [c.flop_issued for c in (forward, dx, dw)] == [2 * 768 * 512 * k, 2 * 768 * 208 * n, 2 * 512 * 208 * m]


def test_a_small_output_has_a_tile_of_whole_sixteens():
    assert dense_cost.matmul(34, 50, 8, 4, (128, 128)).flop_issued == 2 * 48 * 64 * 8


def test_what_is_no_triton_is_counted_as_masked_dense():
    mask = torch.eye(4) > 0
    by_us, other = (layer_cost.layer("dx", impl, 70, (64, 64), mask, (16, 16), FP32, (128, 128)) for impl in ("triton", "masked_dense"))
    assert other == layer_cost.masked_dense("dx", 70, (64, 64), 4 * 256, 4, (128, 128)) != by_us


def test_many_blocks_are_selected_by_three_histograms_and_a_pass():
    most = tiles.SELECT_MAX
    assert layer_cost.selection(most, True) == mask_cost.select(most) and layer_cost.selection(most + 1, False) == mask_cost.select(most + 1)
    found, programs = layer_cost.selection(most + 1, True), 5
    assert found.reads == {"key": 4 * 4 * (most + 1), "keep": 4 * 8 * programs, "bins": 4 * 2048 * programs * (1 + 2 + 3 + 3)}
    assert found.writes == {"bins": 3 * 4 * 2048 * programs, "mask": most + 1}
    assert found.reads_min == {"key": 4 * 4 * (most + 1), "keep": 4 * 8, "bins": 4 * 2048 * (1 + 2 + 3 + 3)}
    assert found.writes_min == {"bins": 3 * 4 * 2048, "mask": most + 1}


def test_the_list_of_a_pruned_inputs_entries_by_hand():
    found = pruned_cost.strip_rows(100, 30, 2)
    assert found.reads == {"index": 2 * 30, "flags": 100, "sums": 4 * 30} and found.writes == {"flags": 100, "sums": 4 * 100, "lists": 8 * 30}
    assert found.reads_min == {"index": 2 * 30} and found.writes_min == {"lists": 8 * 30} and found.flop_issued == 0


def test_compulsory_bytes_of_a_masked_dw_by_hand():
    """Two of four block rows, two of three block columns and three blocks of 16 x 32 keep something; M = 10 tokens, 2 bytes."""
    mask = torch.tensor([[True, False, False], [False, False, False], [True, False, True], [False, False, False]])
    lists = matmul_cost.lists_of(mask, (64, 96), (16, 32), False)
    found = matmul_cost.sampled_matmul(lists, 10, 2, tile_tokens=64)
    lists_read = {"entries": 4 * 2, "counts": 4, "order": 4}
    assert found.reads_min == {"gy": 2 * 10 * 32, "x": 2 * 10 * 64, **lists_read}
    assert matmul_cost.list_matmul(lists, 10, 2, tile_tokens=128).reads_min == {"x": 2 * 10 * 64, "w": 2 * 3 * 16 * 32, **lists_read}


def test_compulsory_bytes_of_a_pruned_dw_by_hand():
    """Of a mask's lists: 8 rows of dY, two strips of the input, of which W keeps a block of 32 x 16 and nothing. Never more than is asked for."""
    mask = torch.zeros(4, 2, dtype=torch.bool)
    mask[1, 0] = True
    lists = matmul_cost.lists_of(mask, (128, 32), (32, 16), True, 16)
    few, many = (pruned_cost.pruned_matmul(e, 8, (128, 32), 16, 2, tile_tokens=64, lists=lists, kept=[512, 0]) for e in ([3, 5], [90, 5]))
    assert few.reads_min == {"gy": 2 * 3 * 32, "values": 2 * 16 * 3, "rows": 4 * 3, "slots": 4 * 3, "begins": 4 * 3, "entries": 4, "counts": 4 * 2}
    assert few.writes == {"out": 2 * 512} and many.reads_min["gy"] == 2 * 8 * 128 and many.flop_useful == 2 * 90 * 512
    assert [layer_cost.pruned_dw(entries, 8, (128, 32), 16, FP16).reads_min["gy"] for entries in (3, 12)] == [2 * 3 * 128, 2 * 8 * 128]
