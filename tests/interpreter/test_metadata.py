"""Keys, selection and lists on the device equal their plain forms, bit for bit, on every input."""

import pytest
import torch

from fxmask.kernels import lists, ops, score, select
from fxmask.kernels.grid import grid_shape
from fxmask.kernels.triton import launch

NAN, INF = float("nan"), float("inf")
BLOCKS = [(16, 16), (32, 16), (16, 64), (64, 64), (128, 32), (128, 128)]


def weights():
    g = torch.Generator().manual_seed(0)
    w = torch.randn(200, 150, generator=g)
    spread = w * torch.logspace(-30, 30, 150)[None]
    special = w.clone()
    special[0, 0], special[20, 20], special[40, 40], special[70, 100], special[150:, :] = NAN, -NAN, INF, -INF, 0.0
    yield "random", w
    yield "half", w.half()
    yield "bfloat16", w.bfloat16()
    yield "strided", torch.randn(200, 170, generator=g)[:, :150]
    yield "spread", spread
    yield "special", special
    yield "constant", torch.full((200, 150), 0.1)
    yield "zeros", torch.zeros(200, 150)
    yield "minus-zeros", -torch.zeros(200, 150)
    yield "quantised", (w * 2).round() / 2
    for scale in (1e-45, 1e-44, 1e-40, 1.2e-38, 1e-20, 1e20, 1e36, 8e37):
        yield f"scale-{scale}", (w.double() * scale).float()
    denormal = torch.zeros(200, 150)
    denormal[5, 5], denormal[50, 50], denormal[100, 100] = 1e-45, 1.1754942e-38, 1.1754944e-38
    yield "edges-of-denormals", denormal


WEIGHTS = dict(weights())


@pytest.mark.parametrize("block", BLOCKS, ids=str)
@pytest.mark.parametrize("name", WEIGHTS)
def test_keys(name, block):
    w = WEIGHTS[name]
    assert torch.equal(launch.block_keys(w, block), score.block_keys(w, block, "fro"))


@pytest.mark.parametrize("shape", [(1, 1), (15, 17), (16, 300), (129, 64), (64, 129)], ids=str)
def test_keys_of_ragged_weights(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for block in BLOCKS:
        assert torch.equal(launch.block_keys(w, block), score.block_keys(w, block, "fro"))


@pytest.mark.parametrize("n", [1, 2, 31, 100, 1000, 4097])
@pytest.mark.parametrize("kind", ["random", "few", "equal", "zeros", "top"])
def test_selection(n, kind):
    g = torch.Generator().manual_seed(n)
    keys = {
        "random": torch.randint(0, 2**31 - 1, (n,), generator=g),
        "few": torch.randint(0, 3, (n,), generator=g),
        "equal": torch.full((n,), 12345),
        "zeros": torch.zeros(n),
        "top": torch.where(torch.rand(n, generator=g) < 0.3, score.KEY_NAN, score.KEY_INF),
    }[kind].to(torch.int32)[None]
    for k in sorted({1, 2, n // 3, n // 2, n - 1, n} & set(range(1, n + 1))):
        keep = torch.tensor(k)
        mask = launch.select(keys, keep)
        assert int(mask.sum()) == k
        assert torch.equal(mask, select.select_blocks(keys, keep)), k


@pytest.mark.parametrize("step", [16, 32, 64])
@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "cols"])
@pytest.mark.parametrize("block", [*BLOCKS, (16, 128), (128, 16)], ids=str)
def test_lists(block, transposed, step):
    g = torch.Generator().manual_seed(step)
    for shape, density in (((300, 200), 0.3), ((128, 640), 0.05), ((17, 1000), 0.5), ((700, 40), 0.0), ((256, 256), 1.0)):
        grid = grid_shape(shape, block)
        mask = torch.rand(grid, generator=g) < density
        lay = lists.layout(grid, block, transposed, step=step)
        for got, expected in zip(launch.strip_lists(mask, lay, transposed), lists.strip_lists(mask, lay, transposed), strict=True):
            assert torch.equal(got, expected)


def test_lists_say_what_the_mask_says():
    """Independent of both forms: decode the entries back into blocks."""
    block, grid = (16, 32), (20, 9)
    mask = torch.rand(grid, generator=torch.Generator().manual_seed(3)) < 0.3
    lay = lists.layout(grid, block, False)
    entries, counts, order = lists.strip_lists(mask, lay, False)
    decoded = torch.zeros_like(mask)
    for s in range(lay.strips):
        units = [int(e) & 0xFFFF for e in entries[s, : counts[s]]]
        assert units == sorted(set(units)) and (entries[s, counts[s] :] == 0).all()
        for e in entries[s, : counts[s]]:
            for g in range(lay.group):
                if int(e) >> 16 >> g & 1:
                    decoded[s * lay.strip // block[0] + g, (int(e) & 0xFFFF) * lay.unit // block[1]] = True
    assert torch.equal(decoded, mask)
    lengths = counts[order.long()]
    assert (lengths[:-1] >= lengths[1:]).all() and sorted(order.tolist()) == list(range(lay.strips))


@pytest.mark.parametrize("criterion", ["fro", "l1", "random"])
@pytest.mark.parametrize("ties", ["lowest", "keep"])
def test_the_op(criterion, ties):
    w = WEIGHTS["quantised"]
    for block in ((16, 16), (64, 32), (8, 8), (5, 7)):
        for k in (1, 7, 20):
            args = (w, torch.tensor(k), torch.tensor(4), *block, criterion, ties, 9)
            assert torch.equal(ops.block_index(*args, "triton"), ops.block_index(*args, "reference"))
