"""Keys, selection and lists on the device equal their plain forms, bit for bit, on every input."""

import pytest
import torch

from fxmask.kernels import lists, ops, score, select
from fxmask.kernels.grid import grid_shape
from fxmask.kernels.triton import device, refresh

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
    # in units of the smallest denormal: half of the scale, squares that sum up to one truncated unit less than a bit of the key, and four that truncation drops
    least = [1 << 22, *(1 << 1 + j // 2 for j in range(21) for _ in range(1 + j % 2)), 1, 1, 1, 1]
    truncated = torch.zeros(200, 150)
    truncated[:3, :16].view(torch.int32)[...] = torch.tensor(least + [0] * (48 - len(least)), dtype=torch.int32).view(3, 16)
    yield "truncated", truncated


WEIGHTS = dict(weights())
FEW = [("special", (16, 64)), *((name, block) for name in WEIGHTS for block in BLOCKS if name == "random" or block == (128, 32))]
ALL = [(name, block) for name in WEIGHTS for block in BLOCKS if (name, block) not in FEW]


@pytest.mark.parametrize(("name", "block"), [*FEW, *(pytest.param(*c, marks=pytest.mark.slow) for c in ALL)], ids=str)
def test_keys(name, block):
    w = WEIGHTS[name]
    assert torch.equal(refresh.block_keys(w, block), score.block_keys(w, block, "fro"))


@pytest.mark.parametrize("shape", [(1, 1), (15, 17), (16, 300), (129, 64), (64, 129)], ids=str)
def test_keys_of_ragged_weights(shape):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    for block in BLOCKS:
        assert torch.equal(refresh.block_keys(w, block), score.block_keys(w, block, "fro"))


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
        mask = refresh.select(keys, keep)
        assert int(mask.sum()) == k
        assert torch.equal(mask, select.select_blocks(keys, keep)), k


@pytest.mark.parametrize("n", [31, 4097, 9000])
@pytest.mark.parametrize("kind", ["random", "few", "equal", "zeros", "top"])
def test_selection_by_histograms(monkeypatch, n, kind):
    """What serves more than 16,384 blocks, on every number of chunks."""
    monkeypatch.setattr(refresh, "SELECT_MAX", 0)
    device.LAUNCHES.clear()
    test_selection(n, kind)
    assert device.LAUNCHES["histogram_kernel"] and not device.LAUNCHES["select_kernel"]


def same_lists(got, mask, block, strip=None):
    expected, grid = lists.packed(mask, block, strip), tuple(mask.shape)
    for transposed in (False, True):
        for g, e in zip(lists.unpack(got, grid, block, transposed, strip), lists.unpack(expected, grid, block, transposed, strip), strict=True):
            assert torch.equal(g, e)


@pytest.mark.parametrize("strip", [64, pytest.param(128, marks=pytest.mark.slow), 256])
@pytest.mark.parametrize("block", [*BLOCKS, (16, 128), (128, 16)], ids=str)
def test_lists(block, strip):
    g = torch.Generator().manual_seed(strip)
    for shape, density in (((300, 200), 0.3), ((128, 440), 0.05), ((17, 300), 0.5), ((300, 40), 0.0), ((130, 256), 1.0)):
        mask = torch.rand(grid_shape(shape, block), generator=g) < density
        same_lists(refresh.strip_lists(mask, block, strip), mask, block, strip)


def test_lists_of_more_than_a_chunk(monkeypatch):
    monkeypatch.setattr(refresh, "LIST_CHUNK", 32)
    for grid, block in (((1, 70), (16, 16)), ((40, 3), (128, 16)), ((70, 1), (128, 64)), ((260, 1), (128, 128))):  # the last has more strips than a chunk, too
        mask = torch.rand(grid, generator=torch.Generator().manual_seed(1)) < 0.5
        same_lists(refresh.strip_lists(mask, block), mask, block)


def test_every_place_of_a_list_is_written(monkeypatch):
    """The places behind the last unit, too, which matmuls read ahead, also where they lie in a chunk by themselves."""
    monkeypatch.setattr(refresh, "LIST_CHUNK", 32)
    real, mask = torch.zeros, torch.rand(3, 64, generator=torch.Generator().manual_seed(2)) < 0.5
    with monkeypatch.context() as m:
        m.setattr(torch, "zeros", lambda *sizes, **options: real(*sizes, **options).fill_(-1))
        found = refresh.strip_lists(mask, (16, 16))
    same_lists(found, mask, (16, 16))


@pytest.mark.parametrize(("most", "dtype"), [(16_384, torch.float32), (8, torch.bfloat16)], ids=["small-fp32", "large-bf16"])
@pytest.mark.parametrize("block", [pytest.param(b, marks=() if b in ((32, 16), (128, 128)) else pytest.mark.slow) for b in BLOCKS], ids=str)
def test_a_model_at_once(monkeypatch, most, block, dtype):
    """A group of weights gets the masks and lists that each would get alone, in as many launches as one weight."""
    monkeypatch.setattr(refresh, "SELECT_MAX", most)
    g = torch.Generator().manual_seed(5)
    weights = [torch.randn(s, generator=g).to(dtype) for s in ((200, 150), (128, 240), (17, 300), (1, 1), (150, 41))]
    strided, unaligned = torch.randn(100, 170, generator=g).to(dtype)[:, :150], torch.randn(333, generator=g).to(dtype)[1:].reshape(83, 4)
    weights += [torch.zeros(64, 64, dtype=dtype), strided, unaligned]
    sizes = [grid_shape(w.shape, block) for w in weights]
    keeps = [torch.tensor(max(1, nb * kb // 3)) for nb, kb in sizes]
    device.LAUNCHES.clear()
    found = refresh.refresh_group(weights, keeps, block)
    many = max(nb * kb for nb, kb in sizes) > most
    assert sum(device.LAUNCHES.values()) == (7 if many else 4)  # and a memset for `many`: at most 8
    for w, keep, (mask, packed) in zip(weights, keeps, found, strict=True):
        assert torch.equal(mask, select.select_blocks(score.block_keys(w, block, "fro"), keep))
        same_lists(packed, mask, block)


@pytest.mark.parametrize("most", [16_384, 2])
def test_a_model_at_once_whose_sizes_16_divides(monkeypatch, most):
    """Then the table counts columns, strides and addresses in larger units."""
    monkeypatch.setattr(refresh, "SELECT_MAX", most)
    g, found, group_of = torch.Generator().manual_seed(6), [], refresh.group_of
    monkeypatch.setattr(refresh, "group_of", lambda *of: found.append(group_of(*of)) or found[-1])
    weights = [torch.randn(40, 96, generator=g), torch.randn(32, 80, generator=g)[:, :48], torch.randn(17, 304, generator=g)]
    keeps = [torch.tensor(k) for k in (5, 3, 11)]
    for w, keep, (mask, packed) in zip(weights, keeps, refresh.refresh_group(weights, keeps, (16, 16)), strict=True):
        assert torch.equal(mask, select.select_blocks(score.block_keys(w, (16, 16), "fro"), keep))
        same_lists(packed, mask, (16, 16))
    assert (found[0].weight_unit, found[0].cols_unit, found[0].stride_unit) == (4, 16, 16)


def test_a_group_follows_its_weights():
    """The table is kept by address and shape: new values are seen, and so is another tensor."""
    w, keep = torch.randn(64, 64), torch.tensor(5)
    for _ in range(3):
        w.data = torch.randn(64, 64)
        (mask, _), = refresh.refresh_group([w], [keep], (16, 16))
        w.mul_(-2)
        w[:16, :16] = 100
        (after, _), = refresh.refresh_group([w], [keep.fill_(3)], (16, 16))
        keep.fill_(5)
        assert mask.sum() == 5 and after.sum() == 3 and after[0, 0]
        assert torch.equal(after, select.select_blocks(score.block_keys(w, (16, 16), "fro"), torch.tensor(3)))


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
