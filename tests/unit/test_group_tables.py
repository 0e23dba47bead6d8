"""Tables of groups of weights: how many are remembered, and that a captured CUDA graph keeps its own."""

from collections import Counter

import pytest
import torch

pytest.importorskip("triton")
from fxmask.kernels.triton import group

BLOCK, TILE = (16, 16), (64, 64)


def places(n, seed=0):
    """Of `n` weights that nobody has: a table depends on addresses and shapes alone."""
    return [(group.Place(4096 * (seed + i + 1), 64, 64, 64, 8 * i),) for i in range(n)]


def table(place, where="cpu"):
    return group.group_of(place, 4, BLOCK, TILE, torch.device(where))


@pytest.fixture(autouse=True)
def empty(monkeypatch):
    monkeypatch.setattr(group, "_captured", {})
    group._made.cache_clear()
    yield
    group._made.cache_clear()


def test_a_step_may_have_many_groups():
    """A step before a capture leaves every table of the step."""
    found = places(200)
    first = [table(p) for p in found]
    assert all(table(p) is t for p, t in zip(found, first, strict=True))


def test_what_a_graph_replays_over_stays(monkeypatch):
    sends = Counter()
    monkeypatch.setattr(group, "sent", lambda t, device: sends.update([device.type]) or t)
    capturing = [False]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    ours, other, *later = places(2 + group.KEPT)
    before = [table(p, "cuda") for p in (ours, other)]
    capturing[0] = True
    assert table(ours, "cuda") is before[0]
    capturing[0] = False
    for p in later:
        table(p, "cuda")
    sends.clear()
    assert table(ours, "cuda") is before[0] and not sends
    assert table(other, "cuda") is not before[1]  # nobody replays over it
