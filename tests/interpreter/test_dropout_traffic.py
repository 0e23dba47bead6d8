"""The bytes and FLOP of block dropout's launches, recorded, are those of `kernels.layer_cost.dropped`, operand by operand and byte for byte."""

import dataclasses
import math

import pytest
import torch
import torch.nn.functional as F
from interpreter.test_traffic import agrees, moved, table_of
from interpreter.trace import recording
from torch import nn

import fxmask
from fxmask import BlockDropout
from fxmask.kernels import draw_ops, dropout, layer_cost, mask_cost, matmul_cost
from fxmask.kernels.grid import expand_mask, grid_shape, kept_elements
from fxmask.kernels.triton import dropped, tiles
from fxmask.passes.counting.calls import typical_mask

FP16, FP32 = torch.float16, torch.float32
KERNELS = {"forward": {"x": "w", "w": "x"}, "dx": {"dy": "gy", "w": "x", "dx": "out"}, "dw": {"dy": "x", "x": "w", "dw": "y"}}  # how a kernel calls operands

# (M, N, K), block, p, dtype, bias, what else: `holes` drops a strip of both directions
CASES = [
    *(((70, 136, 130), (b, b), p, FP16, p > 0.2, "") for b in (16, 32, 64, 128) for p in (0.0, 0.5, 0.9)),
    *(((150, 40, 170), b, 0.5, FP32, b[0] > 32, "") for b in ((16, 128), (128, 16), (64, 32), (32, 64), (128, 128))),
    ((290, 48, 200), (32, 16), 0.5, FP16, True, "holes"),
    ((40, 48, 64), (16, 16), 1.0, FP16, True, "none"),
    ((1, 2, 2), (64, 16), 0.0, FP32, True, ""),
    ((0, 48, 64), (16, 16), 0.5, FP16, True, ""),
]
case = pytest.mark.parametrize(("shape", "block", "p", "dtype", "bias", "extra"), CASES, ids=str)


def make(shape, block, p, dtype, extra):
    m, n, k = shape
    g = torch.Generator().manual_seed(sum(shape))
    x, w, b, gy = (torch.randn(*s, generator=g).to(dtype) for s in ((m, k), (n, k), (n,), (m, n)))
    keep = dropout.draw(m, k, block, min(p, 0.9), torch.tensor(sum(shape)))
    if extra == "holes":
        keep[: 128 // block[0]] = False
        keep[:, 128 // block[1] :] = False
    return x, w, b, gy, keep & (extra != "none")


def recorded(op, shape, block, p, dtype, bias, extra, splits=1):
    """The op's launches by kernel, what they should cost in the names of the kernels' operands, and the mask."""
    x, w, b, gy, keep = make(shape, block, p, dtype, extra)
    calls = {
        "forward": lambda: dropped.linear(x, w, b if bias else None, keep, block, 0.5),
        "dx": lambda: dropped.dx(gy, w, keep, block, 0.5),
        "dw": lambda: dropped.dw(gy, x, keep, block, 0.5, splits=splits),
    }
    with recording() as launches:
        calls[op]()
    expected = layer_cost.dropped(op, shape[0], shape[1:], keep, block, dtype, bias=bias and op == "forward", splits=splits)
    assert expected.flop_useful == 2 * shape[1] * int(kept_elements(keep, (shape[0], shape[2]), block))
    return {entry.kernel.removesuffix("_kernel"): entry for entry in launches}, expected.renamed(KERNELS[op]), keep


def without_zeros(made, shape, dtype):
    """dX's cost without the zeros that torch writes, which is no launch of ours."""
    size = dtype.itemsize * shape[0] * shape[2]
    writes, least = ({"out": moved["out"] - size} for moved in (made.writes, made.writes_min))
    return dataclasses.replace(made, writes=writes, writes_min=least)


@case
@pytest.mark.parametrize("op", ["forward", "dx", "dw"])
def test_each_launch(op, shape, block, p, dtype, bias, extra):
    entries, expected, keep = recorded(op, shape, block, p, dtype, bias, extra)
    (m, _, k), name = shape, "sampled_matmul" if op == "dx" else "list_matmul"
    if m == 0 and op != "dw":
        assert name not in entries and expected.bytes_req == 0
        return
    entry, kept = entries[name], expand_mask(keep, (m, k), block)
    if op == "dx":
        agrees(entry, without_zeros(expected, shape, dtype), also_reads=("gy", "x"))  # a tile reads its strip of dY whole
        assert torch.equal(entry.operands["out"].writes.reshape(m, k), kept.long()), "a dropped element of dX was written"
    else:
        agrees(entry, expected, also_reads=("entries", "x"))  # one step ahead; an empty place of a step's last entries loads unit 0
        assert not entry.operands["w"].reads[~kept].any(), "a dropped element of X was loaded"
        assert (entry.operands["y"].writes == 1).all()
    assert set(entries) == {name, "strip_lists", "order"}


@pytest.mark.parametrize(("shape", "block", "dtype"), [((300, 40, 170), (64, 32), FP16), ((300, 40, 70), (16, 128), FP32)], ids=str)
@pytest.mark.parametrize(("splits", "extra"), [(2, "holes"), (7, "holes"), (7, "")])
def test_splits(shape, block, dtype, splits, extra):
    entries, expected, keep = recorded("dw", shape, block, 0.5, dtype, False, extra, splits)
    one, total = entries["list_matmul"], entries["sum_splits"]
    assert moved([one, total]) == expected.bytes_req and one.flop == expected.flop_issued
    assert one.operands["counts"].bytes_read == 4 * math.prod(one.grid)  # which lie behind the entries: no share begins there
    agrees(total, matmul_cost.sum_splits(shape[1:], (1, 1), shape[1] * shape[2], dtype.itemsize, splits=splits, masked=False))
    assert (one.operands["y"].writes == 1).all() and not one.operands["w"].reads[~expand_mask(keep, (shape[0], shape[2]), block)].any()


@pytest.mark.parametrize("lie", [lambda t: F.pad(t, (0, 1))[:, :-1], lambda t: torch.cat([t.new_zeros(1), t.flatten()])[1:].view(t.shape)], ids=["odd", "off"])
def test_rows_that_lie_badly_are_copied(lie):
    """As those of masked layers are: loads would leave the pipeline."""
    x, w, _, gy, keep = make((40, 48, 64), (16, 16), 0.5, FP16, "")
    args = keep, (16, 16), 0.5
    with recording() as launches:
        found = dropped.linear(lie(x), lie(w), None, *args), dropped.dx(lie(gy), lie(w), *args), dropped.dw(lie(gy), lie(x), *args, splits=1)
    assert all(map(torch.equal, found, (dropped.linear(x, w, None, *args), dropped.dx(gy, w, *args), dropped.dw(gy, x, *args, splits=1))))
    read = [o.tensor for entry in launches for name, o in entry.operands.items() if name in ("x", "w", "gy") and "matmul" in entry.kernel]
    assert len(read) == 6 and all(t.data_ptr() % 16 == 0 and all(s == 1 or s % 2 == 0 for s in t.stride()) for t in read)


@pytest.mark.parametrize("tokens", [0, 40, 40_000])
def test_drawing(tokens):
    with recording() as launches:
        dropped.draw(tokens, 100, (16, 32), 0.5, torch.tensor(3))
    made = mask_cost.draw(-(-tokens // 16) * 4, tiles.DRAWN)
    assert bool(launches) == bool(tokens) == bool(made.bytes_req)
    for entry in launches:
        agrees(entry, made)


@pytest.mark.parametrize(("block", "dtype", "p"), [((16, 16), FP16, 0.4), ((64, 32), FP32, 0.5), ((128, 128), FP16, 0.5)], ids=str)
def test_the_table_of_an_analysis_is_the_trace_of_a_step(block, dtype, p, monkeypatch):
    """Which blocks a layer will drop nobody knows before: of a step that drops the mask that the table expects, the table is the trace."""
    n, k, tokens = 136, 72, 150
    model = fxmask.apply(nn.Sequential(nn.Linear(k, n)).to(dtype), BlockDropout(p, block, impl="triton"))
    x = torch.randn(2, tokens // 2, k).to(dtype).requires_grad_()
    rows, grid = table_of(model, x), grid_shape((tokens, k), block)
    keep = typical_mask(grid, round((1 - p) * grid[0] * grid[1]))
    monkeypatch.setattr(draw_ops, "mask", lambda *_: keep)
    with recording() as launches:
        y = model(x)
        forward = len(launches)
        y.backward(torch.ones_like(y))
    assert [entry.kernel for entry in launches[:forward]] == ["strip_lists_kernel", "order_kernel", "list_matmul_kernel"]
    dx, dw = sorted(launches[forward:], key=lambda entry: entry.kernel, reverse=True)
    assert (dx.kernel, dw.kernel) == ("sampled_matmul_kernel", "list_matmul_kernel")
    assert rows["fwd", "drop_mask"]["bytes_req"] == mask_cost.draw(grid[0] * grid[1], tiles.DRAWN).bytes_req
    assert rows["fwd", "strip_lists"]["bytes_req"] == moved(launches[:2])
    zeros = matmul_cost.zero_fill((tokens, k), dtype.itemsize).bytes_req
    for phase, op, entry, more in (("fwd", "linear", launches[2], 0), ("dX", "dx", dx, zeros), ("dW", "dw", dw, 0)):
        row = rows[phase, f"dropped_{op}"]
        assert row["bytes_req"] == moved([entry]) + more and row["flop_executed"] == entry.flop and row["impl"] == "triton"
        assert row["flop"] == 2 * n * int(kept_elements(keep, (tokens, k), block)) and row["bytes_min"] <= row["bytes_req"]
