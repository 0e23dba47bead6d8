"""Block dropout on the device: forward, dX and dW against float64, the same bits for a seed, one CUDA graph, no sync."""

import pytest
import torch
from gpu.bodies import check_dropout, check_dropout_repeats
from gpu.test_graphs import no_sync
from torch import nn

import fxmask

pytestmark = pytest.mark.gpu
BLOCKS = [(128, 128), (64, 64), (32, 32), (16, 16), (16, 128), (128, 16), (8, 8), (3, 5)]


def name(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else None


@pytest.mark.parametrize("precision", ["bf16", "fp16", "fp32", "tf32"])
@pytest.mark.parametrize("block", BLOCKS, ids=name)
def test_numbers(block, precision):
    for shape, p, gap in (((512, 384, 640), 0.1, 0), ((301, 200, 328), 0.5, 8), ((130, 196, 260), 0.9, 5)):
        check_dropout("cuda", shape, block, p, precision, gap)


@pytest.mark.parametrize("shape", [(1, 128, 128), (1024, 1024, 1024), (9000, 128, 256)], ids=name)
@pytest.mark.parametrize("p", [0.0, 0.05, 0.9])
def test_few_and_many_tokens(shape, p):
    """Many tokens split dW's sum."""
    check_dropout("cuda", shape, (128, 128), p, "bf16")


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_the_same_bits_for_a_seed(precision):
    check_dropout_repeats("cuda", (4096, 256, 384), (32, 32), 0.5, precision)


def trained():
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(256, 512), nn.GELU(), nn.Linear(512, 256)).cuda().half()
    return fxmask.apply(layers, fxmask.BlockDropout(0.5, (64, 64), impl="triton"))


def test_no_sync():
    model, x = trained(), torch.randn(300, 256, device="cuda", dtype=torch.half)
    model(x).sum().backward()  # compiles kernels
    with no_sync():
        model(x).sum().backward()


def test_a_replay_draws_anew():
    """A mask is drawn inside the graph, from the generator that replays move on."""
    model, x = trained(), torch.randn(300, 256, device="cuda", dtype=torch.half)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        model(x).sum().backward()
    torch.cuda.current_stream().wait_stream(side)
    model.zero_grad()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = model(x)
        y.sum().backward()
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append(y.clone())
    assert all(t.isfinite().all() for t in seen) and not torch.equal(seen[0], seen[1]) and not torch.equal(seen[1], seen[2])
