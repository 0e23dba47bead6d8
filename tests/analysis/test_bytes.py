"""Bytes in the tables of `fxmask.analyze`: by hand for PyTorch's ops, by the kernels' closed forms for masked layers."""


import pytest
import torch
from analysis.counted import Apply, analyze
from torch import nn

import fxmask
from fxmask.analysis import devices
from fxmask.kernels import dense_cost, layer_cost
from fxmask.kernels.cost import Cost
from fxmask.kernels.triton.tiles import best_tile


@pytest.fixture
def library():
    """For ops that go with the test."""
    with torch.library._scoped_library("fxmask_analysis", "FRAGMENT") as found:
        yield found


def bytes_of(report, op="", column="bytes_min"):
    return {r["phase"]: r[column] for r in report.tables["nodes"] if op in r["op"] and r["phase"] != "opt"}


def test_bytes_of_a_dense_linear():
    m, n, k = 600, 300, 200
    report = analyze(nn.Linear(k, n), torch.randn(m, k, requires_grad=True))
    assert bytes_of(report, "mm") == {"fwd": 4 * (m * k + n * k + n + m * n), "dX": 4 * (m * n + n * k + m * k), "dW": 4 * (m * n + m * k + n * k)}
    assert bytes_of(report, "sum") == {"db": 4 * (m * n + n)}
    # an H100's dense tile is 256 x 256: 3 of them along the tokens, 2 along the outputs
    asked = bytes_of(report, "mm", "bytes_req")
    assert asked["fwd"] == 4 * (2 * m * k + 3 * (n * k + n) + m * n)
    assert asked["dX"] == 4 * (1 * m * n + 3 * n * k + m * k) and asked["dW"] == 4 * (1 * m * n + 2 * m * k + n * k)
    operands = {(r["phase"], r["operand"], r["direction"]) for r in report.tables["traffic"] if "mm" in r["op"]}
    assert operands == {
        *(("fwd", o, "read") for o in ("x", "w", "bias")), ("fwd", "y", "write"), ("dX", "dy", "read"), ("dX", "w", "read"), ("dX", "dx", "write"),
        ("dW", "dy", "read"), ("dW", "x", "read"), ("dW", "dw", "write"),
    }  # fmt: skip


N = 60  # elements of the operands below
STREAMS = {
    "relu": (lambda x: x.relu(), 8 * N),
    "add": (lambda x: x + x.flip(0), 8 * N + 12 * N),
    "square": (lambda x: x * x, 8 * N),  # one operand, twice
    "in place": (lambda x: x.mul_(2), 8 * N),
    "overwritten": (lambda x: x.fill_(1), 4 * N),
    "view": (lambda x: x.t().reshape(2, 5, 6).transpose(0, 1)[1:], 8 * N),  # reshape copies, the rest moves nothing
    "sum": (lambda x: x.sum(0), 4 * N + 4 * 6),
    "expanded": (lambda x: x[:1].expand(10, 6) + 1, 4 * 6 + 4 * N),
    "rows": (lambda x: x[torch.tensor([1, 3])], 4 * 12 + 4 * 12 + 16),
    "to half": (lambda x: x.half(), 6 * N),
    "cat": (lambda x: torch.cat([x, x], 1), 4 * N + 8 * N),
    "three times": (lambda x: torch.addcmul(x, x, x), 8 * N),
    "slices that overlap": (lambda x: x[:9] + x[1:], 4 * N + 4 * 54),
    "rows put": (lambda x: x.index_put_((torch.tensor([1, 3]),), torch.ones(())), 16 + 8 + 4 * 12),
    "rows added to": (lambda x: x.index_put_((torch.tensor([1, 3]),), torch.ones(()), accumulate=True), 16 + 8 + 8 * 12),
    "where rows and columns meet": (lambda x: x.index_put_((torch.tensor([[1], [3]]), torch.tensor([0, 2, 5])), torch.ones(())), 40 + 8 + 4 * 6),
    "columns put": (lambda x: x.__setitem__((slice(None), torch.tensor([1, 3])), torch.ones(())), 16 + 8 + 4 * 10 * 2),  # as caches of keys are filled
    "columns where bools say": (lambda x: x.__setitem__((slice(None), torch.ones(6, dtype=torch.bool)), torch.ones(())), 2 * 6 + 8 + 8 * N),
    "where bools say": (lambda x: x.index_put_((torch.ones(10, dtype=torch.bool),), torch.ones(())), 2 * 10 + 8 + 8 * N),  # values tell where: all
    "more often than there are": (lambda x: x.index_put_((torch.zeros(99, dtype=torch.long),), torch.ones(())), 16 * 99 + 8 + 4 * N),
}


@pytest.mark.parametrize("name", STREAMS)
def test_bytes_of_ops_without_products(name):
    f, expected = STREAMS[name]
    report = analyze(Apply(f), torch.randn(10, 6), phases=("fwd",))
    assert report.summary["bytes_min"]["fwd"] == report.summary["bytes_req"]["fwd"] == expected
    assert report.summary["flop"]["total"] == 0 and not report.tables["coverage"]


def test_bytes_of_attention():
    b, h, q, kv, d = 2, 3, 300, 200, 16
    f = torch.nn.functional.scaled_dot_product_attention
    report = analyze(Apply(f), *(torch.randn(b, h, t, d, requires_grad=True) for t in (q, kv, kv)))
    rows, stats = 4 * b * h * d, 4 * b * h * q  # a row of each head; the log-sum-exp, float32
    row = next(r for r in report.tables["nodes"] if r["phase"] == "fwd" and "attention" in r["op"])
    assert row["bytes_min"] == rows * (2 * q + 2 * kv) + stats
    assert row["bytes_req"] == rows * (2 * q + 3 * 2 * kv) + stats  # K and V again for each 128 queries
    back = next(r for r in report.tables["nodes"] if r["phase"] == "dX" and "attention" in r["op"])
    assert back["bytes_min"] == rows * (4 * q + 4 * kv) + stats  # dY, Q, Y, dQ; K, V, dK, dV
    assert back["flop_executed"] - back["flop"] == 2 * b * h * q * kv * d  # S = Q K^T once more
    said = report.explain(row["node"])
    masked = analyze(Apply(f), *(torch.randn(b, h, t, d) for t in (q, kv, kv)), torch.zeros(q, kv), phases=("fwd",))
    (masked,) = (r for r in masked.tables["nodes"] if "attention" in r["op"])
    assert [masked[c] - row[c] for c in ("bytes_min", "bytes_req")] == [4 * q * kv] * 2
    assert said.index("softmax(Q K^T) V, fused") < said.index("Its fused backward: dV, dP, dQ and dK")


def test_a_batch_of_nothing_moves_its_weights_alone():
    """No product is left of the masked ops, so nothing is asked of the L2 cache for one, and an operand without a byte has no row."""
    report = analyze(fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5), torch.randn(0, 64))
    assert report.summary["flop"]["total"] == 0 and "L2-bound" not in str(report)
    rows = report.tables["traffic"]
    assert all(r["bytes_req"] and r["bytes_min"] for r in rows) and {"w", "dw"} <= {r["operand"] for r in rows}


def test_an_op_of_the_users_own_writes_nothing_where_it_returns_a_view(library):
    """A result in a storage of its own is written; one in that of an input is not."""
    library.define("parts(Tensor(a) x) -> (Tensor(a), Tensor)")
    library.impl("parts", lambda x: (x[:1], x.sum(0)), "CompositeExplicitAutograd")
    report = analyze(Apply(lambda x: torch.ops.fxmask_analysis.parts(x)[1]), torch.randn(10, 6), phases=("fwd",))
    assert bytes_of(report, "fxmask_analysis.parts") == {"fwd": 4 * 10 * 6 + 4 * 6}


def test_an_op_of_the_users_own_writes_a_result_once_that_it_returns_twice(library):
    library.define("twice(Tensor x) -> Tensor[]")
    library.impl("twice", lambda x: [y := x.clone(), y.t()], "CompositeExplicitAutograd")
    report = analyze(Apply(lambda x: torch.ops.fxmask_analysis.twice(x)[1]), torch.randn(10, 6), phases=("fwd",))
    assert bytes_of(report, "fxmask_analysis.twice") == {"fwd": 2 * 4 * 10 * 6}


@pytest.mark.parametrize(("masked", "kept"), [(False, 64 * 64), (True, 64 * 64 // 2)])
def test_bytes_of_the_parts_that_a_long_pruned_product_is_summed_from(masked, kept):
    """8,192 tokens, half of each strip's kept, are four shares of 1,024: float32 sums that are written, read and added up."""
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), *([fxmask.WeightMask(0.5)] * masked), fxmask.ActivationPruning(0.5, 16))
    for tokens, shares in ((8192, 4), (64, 0)):
        rows = analyze(model, torch.randn(tokens, 64, requires_grad=True)).tables["traffic"]
        found = {(r["operand"], r["direction"]): (r["bytes_req"], r["bytes_min"]) for r in rows if r["op"] == "fxmask.pruned_dw"}
        assert found.get(("parts", "read")) == ((4 * shares * kept,) * 2 if shares else None)
        zeros = 4 * 64 * 64 if masked else 0  # written where no block is kept, too
        assert found["dw", "write"] == (zeros + 4 * (1 + shares) * kept,) * 2


class Multiplies(nn.Module):
    """Calls an op of ours itself, with a mask that it is given."""

    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.randn(64, 96))

    def forward(self, x, mask):
        return torch.ops.fxmask.masked_linear(x, self.w, None, mask, 16, 16, "masked")


def test_a_mask_that_nobody_knows_is_counted_as_dense():
    report = analyze(Multiplies(), torch.randn(8, 96, requires_grad=True), torch.zeros(4, 6, dtype=torch.bool))
    assert {r["phase"]: r["flop"] for r in report.tables["nodes"] if "masked_linear" in r["op"]} == dict.fromkeys(("fwd", "dX", "dW"), 2 * 8 * 64 * 96)
    assert any(n.startswith("1 masked weights come without the number of their kept blocks: they are counted as dense") for n in report.notes)


@pytest.mark.parametrize("model", [nn.Linear(96, 64), nn.Conv1d(3, 4, 3)], ids=["linear", "convolution"])
def test_no_tokens_ask_for_no_fewer_bytes_than_they_must(model):
    x = torch.randn(0, 96) if isinstance(model, nn.Linear) else torch.randn(0, 3, 9)
    rows = [r for r in analyze(model, x).tables["nodes"] if r["m"] is not None or r["phase"] == "fwd"]
    assert rows and all(r["bytes_min"] <= r["bytes_req"] and r["flop"] == 0 for r in rows)


def test_bytes_of_an_embedding():
    report = analyze(nn.Embedding(1000, 16), torch.randint(0, 1000, (3, 5)))
    assert bytes_of(report, "embedding")["fwd"] == 15 * (8 + 2 * 64)  # the rows that are read, not the table
    assert bytes_of(report, "embedding")["dW"] == 15 * (8 + 64) + 64 * 1000


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(("words", "rows"), [(1000, 15), (9, 9)])
def test_bytes_of_bags_of_an_embedding(words, rows, mode):
    """Rows that are read, of a small table no more than it has; products there are none, and nothing is unknown."""
    model = nn.EmbeddingBag(words, 16, mode=mode)
    report = fxmask.analyze(model, torch.randint(0, 9, (3, 5)), device="h100-sxm", optimizer=None, strict=True)
    read = [r["bytes_min"] for r in report.tables["traffic"] if r["op"] == "aten._embedding_bag" and r["operand"] == "w"]
    written = [r["bytes_min"] for r in report.tables["traffic"] if r["phase"] == "dW" and r["direction"] == "write"]
    assert (read, written, report.summary["flop"]["total"]) == ([rows * 64], [words * 64], 0)
    flop = fxmask.analyze(model, torch.randint(0, 9, (3, 5)), device="h100-sxm", phases=("fwd",), count_elementwise=True).tables["nodes"]
    assert [r["flop"] for r in flop if r["op"] == "aten._embedding_bag"] == [rows * 16], "one for each element that is summed"


@pytest.mark.parametrize(("words", "rows"), [(1000, 15), (9, 15)])
def test_elements_of_an_embedding_are_those_that_it_gives(words, rows):
    report = fxmask.analyze(nn.Embedding(words, 16), torch.randint(0, 9, (3, 5)), device="h100-sxm", phases=("fwd",), count_elementwise=True)
    assert [r["flop"] for r in report.tables["nodes"] if r["op"] == "aten.embedding"] == [rows * 16]


def test_finite_cache():
    """A weight that does not fit in half of the L2 is read again for every 2,048 tokens, one that fits once."""
    make = lambda device, tokens: analyze(nn.Linear(1024, 1024, bias=False), torch.randn(tokens, 1024), device=device, phases=("fwd",))  # noqa: E731
    small = devices.Device("small", {"fp32": 1e13}, 1e12, 1 << 22, None, 1e-6, (128, 128), "made up")
    for device, tokens, times in ((small, 8192, 4), (small, 2048, 1), ("h100-sxm", 8192, 1)):
        row = next(r for r in make(device, tokens).tables["traffic"] if r["operand"] == "w")
        assert row["bytes_min"] == 4 << 20 and row["bytes_dram_est"] == times * (4 << 20), (device, tokens)
        assert "finite L2" in row["dram_model"]


def test_finite_cache_of_tokens():
    """Where 2,048 do not fit in half of the L2, they are read again for every tile of 128 outputs; for dW all of them for every 528 tiles."""
    small = devices.Device("small", {"fp32": 1e13}, 1e12, 1 << 22, None, 1e-6, (128, 128), "made up")
    with torch.device("meta"):
        layer, x = nn.Linear(3072, 4096, bias=False), torch.empty(8192, 3072, requires_grad=True)
    found = {(r["phase"], r["operand"]): r["bytes_dram_est"] // r["bytes_min"] for r in analyze(layer, x, device=small, optimizer=None).tables["traffic"]}
    assert (found["fwd", "x"], found["dX", "dy"]) == (32, 24)
    assert found["dW", "x"] == found["dW", "dy"] == -(-32 * 24 // 528)
    assert found["fwd", "y"] == found["dX", "dx"] == found["dW", "dw"] == 1
    with torch.device("meta"):
        layer, x = nn.Linear(256, 4096, bias=False), torch.empty(8192, 256)
    (row,) = (r for r in analyze(layer, x, device=small, phases=("fwd",)).tables["traffic"] if r["operand"] == "x")
    assert row["bytes_dram_est"] == row["bytes_min"] == 8 << 20 and row["bytes_req"] == 32 * (8 << 20), "2,048 tokens are half of the cache, and stay"


def test_runs_of_a_dense_product_are_rows_of_its_operands():
    """Rows of 8 floats are a quarter of a line, those of 64 or more two lines for 64 of them, however the other operand lies."""
    model = Apply(lambda x, w: x @ w)
    rows = analyze(model, torch.randn(1024, 8), torch.randn(8, 128), phases=("fwd",)).tables["traffic"]
    lines = [(r["direction"], r["bytes_req"], r["bytes_sector"], r["bytes_line"]) for r in rows]
    x, w, y = 4 * 1024 * 8, 4 * 8 * 128, 4 * 1024 * 128
    asked = 1024 // 256 * w  # by each tile of 256 rows
    assert lines == [("read", x, x, 4 * x), ("read", asked, asked, asked), ("write", y, y, y)]


def test_runs_of_rows_that_are_no_whole_sectors():
    """Rows of 200 half floats begin in the middle of a sector each other time, so that half of the runs of a block's 32 bytes touch two."""
    model = fxmask.apply(nn.Sequential(nn.Linear(200, 200, bias=False).half()), ratio=0.5, block=(16, 16))
    rows = analyze(model, torch.randn(64, 200).half().requires_grad_(), impl="triton").tables["traffic"]
    found = {(r["phase"], r["operand"]): r for r in rows if r["op"].startswith("fxmask.masked_linear") and r["direction"] == "read"}
    for key in (("fwd", "x"), ("fwd", "w"), ("dX", "dy"), ("dW", "x")):
        assert found[key]["bytes_sector"] * 2 == found[key]["bytes_req"] * 3, key
    written = [r for r in rows if r["direction"] == "write" and r["bytes_sector"] > r["bytes_req"]]
    assert written and all(r["bytes_dram_est"] == r["bytes_min"] for r in written), "what is written leaves the cache once, and whole"


def test_runs_of_a_block_waste_three_quarters_of_a_line():
    """16 half floats are a sector, and begin anywhere in a line."""
    model = fxmask.apply(nn.Sequential(nn.Linear(256, 256, bias=False).half()), ratio=0.5, block=(16, 16))
    rows = analyze(model, torch.randn(64, 256).half(), phases=("fwd",), impl="triton").tables["traffic"]
    columns = ("bytes_req", "bytes_sector", "bytes_line", "reread", "sector_eff")
    found = {r["operand"]: [r[c] for c in columns] for r in rows if r["op"] == "fxmask.masked_linear"}
    kept, x = 2 * 128 * 256, 2 * 64 * 256
    assert found["w"] == [kept, kept, 4 * kept, 1, 1] and found["x"] == [4 * x, 4 * x, 16 * x, 4, 1]
    assert found["counts"] == [8, 32, 128, 1, 0.25]


# ---- masked layers and the kernels' closed forms ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("block", "dtype"), [((16, 16), torch.float16), ((64, 32), torch.bfloat16), ((128, 128), torch.float32), ((32, 64), torch.float16)])
def test_a_masked_layer_has_the_kernels_bytes(block, dtype):
    n, k, tokens = 300, 200, 70
    torch.manual_seed(3)
    model = fxmask.apply(nn.Sequential(nn.Linear(k, n)).to(dtype), ratio=0.6, block=block)
    mask, tile = fxmask.masks(model)["0.weight"], devices.device("h100-sxm").dense_tile
    report = analyze(model, torch.randn(tokens, k, dtype=dtype).requires_grad_(), impl="triton")
    rows = {(r["phase"], r["op"]): r for r in report.tables["nodes"]}
    seen = 0
    for op, phase, name in (("forward", "fwd", "masked_linear"), ("dx", "dX", "masked_linear_dx"), ("dw", "dW", "masked_linear_dw")):
        expected = layer_cost.by_lists(op, tokens, (n, k), mask, block, dtype, bias=op == "forward")
        assert expected == layer_cost.layer(op, "triton", tokens, (n, k), mask, block, dtype, tile, bias=op == "forward")
        row = rows[phase, f"fxmask.{name}"]
        assert (row["bytes_min"], row["bytes_req"]) == (expected.bytes_min, expected.bytes_req)
        assert (row["flop"], row["flop_executed"]) == (expected.flop_useful, expected.flop_issued)
        assert (row["nnzb"], row["block_n"], row["block_k"]) == (int(mask.sum()), *block)
        seen += row["bytes_req"]
    assert rows["fwd", "fxmask.block_index"]["bytes_req"] == layer_cost.block_index((n, k), block, dtype.itemsize, True).bytes_req
    assert rows["fwd", "fxmask.strip_lists"]["bytes_req"] == layer_cost.strip_lists((n, k), block).bytes_req
    assert seen > 3 * tokens * (n + k) * dtype.itemsize


@pytest.mark.parametrize("inner", [True, False])
def test_tokens_that_lie_side_by_side_are_read_as_they_lie(inner):
    """Token mixing, which other tiles suit."""
    torch.manual_seed(3)
    model = fxmask.apply(nn.Sequential(nn.Linear(512, 512)).half(), ratio=0.6, block=(64, 64))
    x = torch.randn(2, 512, 136, dtype=torch.float16).transpose(1, 2)
    report = analyze(model, x if inner else x.contiguous(), impl="triton")
    (row,) = (r for r in report.tables["nodes"] if r["op"] == "fxmask.masked_linear")
    mask = fxmask.masks(model)["0.weight"]
    found = {i: layer_cost.by_lists("forward", 2 * 136, (512, 512), mask, (64, 64), x.dtype, bias=True, inner=i) for i in (True, False)}
    assert found[True].bytes_req != found[False].bytes_req and row["bytes_req"] == found[inner].bytes_req


@pytest.mark.parametrize(("shape", "skipped"), [((64, 48), "forward dx dw"), ((65, 48), "forward"), ((64, 49), ""), ((65, 49), "")])
def test_where_the_kernels_mask_and_multiply_densely_the_tables_say_so(shape, skipped):
    """Rows of an odd number of elements cannot be copied in pieces of 4 bytes: the forward reads rows of K, dX and dW rows of N, too."""
    tokens, tile = 70, devices.device("h100-sxm").dense_tile
    model = fxmask.apply(nn.Sequential(nn.Linear(*shape[::-1], bias=False)), ratio=0.5, block=(16, 16))
    rows = analyze(model, torch.randn(tokens, shape[1]).requires_grad_(), device="h100-sxm").tables["nodes"]
    for op, name in (("forward", "masked_linear"), ("dx", "masked_linear_dx"), ("dw", "masked_linear_dw")):
        (row,) = (r for r in rows if r["op"] == f"fxmask.{name}")
        dense = layer_cost.dense(op, tokens, shape, 4, tile).flop_issued
        assert row["impl"] == ("triton" if op in skipped.split() else "triton (mask, then dense)")
        assert (row["flop_executed"] == dense) == (op not in skipped.split()) and row["flop"] < 2 * tokens * shape[0] * shape[1]


def test_a_mask_of_inference_mode_is_counted_as_it_is_now():
    with torch.inference_mode():
        mask = torch.tensor([[True, False], [False, False]])
        one, mask[1, 1] = layer_cost.by_lists("forward", 70, (32, 32), mask, (16, 16), torch.float32), True
        assert layer_cost.by_lists("forward", 70, (32, 32), mask, (16, 16), torch.float32).flop_useful == 2 * one.flop_useful == 4 * 70 * 256


@pytest.mark.parametrize("inference", [False, True])
def test_lists_of_a_mask_that_is_rewritten_in_place_are_counted_anew(inference):
    """Inference tensors do not say when they change."""
    with torch.inference_mode(inference):
        mask, found = torch.eye(2) > 0, []
        for _ in range(2):
            lists = layer_cost.lists_of(mask, (32, 32), (16, 16), False, 128)
            assert (layer_cost.lists_of(mask, (32, 32), (16, 16), False, 128) is lists) == (not inference)  # remembered
            found.append(lists.kept)
            mask.fill_(True)
    assert found == [512, 1024]


def test_rows_that_no_descriptor_can_name_are_counted_in_the_tile_without_one():
    """dX reads rows of dY, which 16 bytes divide, and of W, which they do not."""
    shape, block, mask = (4096, 4100), (128, 128), torch.ones(32, 33, dtype=torch.bool)
    tiles = [best_tile(torch.float16, block, True, (8192, 4100, 4096), tma=tma) for tma in (False, True)]
    plain, by_tma = (layer_cost.by_lists("dx", 8192, shape, mask, block, torch.float16, tile=tile) for tile in tiles)
    assert layer_cost.by_lists("dx", 8192, shape, mask, block, torch.float16) == plain != by_tma


def test_operands_that_get_one_name_are_added_up():
    assert Cost(reads={"x": 1, "w": 2, "y": 4}).renamed({"x": "dy", "w": "dy"}).reads == {"dy": 3, "y": 4}


def test_a_product_without_a_result_depends_on_no_byte():
    for m, n in ((0, 8), (8, 0)):
        assert dense_cost.matmul(m, n, 16, 4, (128, 128)).reads_min == {"x": 0, "w": 0}


def test_attention_whose_queries_share_keys_asks_for_these_again():
    """8 heads of 256 queries over 2 heads of 385 keys, in tiles of 128: forward each reads K and V twice, backward Q and dY four times."""
    sizes = 3, 8, 256, 385, 16, 32, 2
    k, q = 2 * 3 * 2 * 385 * 16, 2 * 3 * 8 * 256 * 16
    found, back = dense_cost.attention(*sizes, kv_heads=2), dense_cost.attention_backward(*sizes, kv_heads=2)
    assert found.reads == {"q": q, "k": 2 * 4 * k, "v": 2 * 4 * 2 * k} and found.reads_min == {"q": q, "k": k, "v": 2 * k}
    assert back.reads == {"dy": 4 * 2 * q, "q": 4 * q, "k": k, "v": 2 * k, "y": 2 * q} and back.writes == {"dq": q, "dk": k, "dv": 2 * k}
    product = 2 * 3 * 8 * 256 * 385  # of one feature; the backward makes Q K^T once more
    assert found.flop_useful == found.flop_issued == product * (16 + 32)
    assert (back.flop_useful, back.flop_issued) == (product * 2 * (16 + 32), product * (3 * 16 + 2 * 32))


def test_a_mask_that_is_held_between_steps_is_no_saved_activation():
    """One that each forward builds is: a byte a block."""
    found = []
    for refresh in (1, 5):
        model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), ratio=0.5, block=(8, 8), refresh=refresh)
        fxmask.step(model, 0)
        found.append(analyze(model, torch.randn(4, 64)).tables["footprint"][-1]["saved_activations"])
    assert found == [4 * 64 * 4 + 2 * 64, 4 * 64 * 4]
