"""One CUDA graph holds forward, backward and the masks' refresh; nothing in a training step waits for the device."""

from contextlib import contextmanager

import pytest
import torch
from gpu.training_bodies import assert_same_training, check_optimiser_steps, model_pair, train_step

import fxmask

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")]
CACHED = {"refresh": 10}


@contextmanager
def no_sync():
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("options", [{}, CACHED], ids=["every-forward", "cached"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("block", [(16, 16), (64, 64)], ids=str)
def test_one_graph(options, dtype, block):
    """Replays follow the weights: the masks inside are those of the new weights."""
    model, other = model_pair("cuda", dtype, width=256, block=block, **options)
    for m in (model, other):
        fxmask.step(m, 0)
    x, gy = (torch.randn(300, 256, device="cuda", dtype=dtype) for _ in range(2))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            train_step(model, x, gy)
    torch.cuda.current_stream().wait_stream(side)
    for p in model.parameters():
        p.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = train_step(model, x, gy)
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            for p, q in zip(model.parameters(), other.parameters(), strict=True):
                q.copy_(p.normal_(0, 0.05))
            x.normal_()
        fxmask.refresh(other)
        for q in other.parameters():
            q.grad = None
        graph.replay()  # cached masks: this forward still has the old ones, and the refresh behind it makes the new
        graph.replay()
        expected = train_step(other, x, gy)
        assert_same_training(model, other, y, expected, 1e-3 if dtype == torch.float32 else 0.05)


RIGL = {"backward": "rigl", "refresh": 2, "dense_every": 2}
WAYS = {
    "every-forward": {},
    "cached": {"refresh": 2},
    "rigl": {"backward": "rigl", "refresh": 2},
    "regrow": {**RIGL, "regrow": fxmask.Regrow("gradient")},
    "average": {"criterion": "taylor", "average": 0.9, "refresh": 2},
    "schedule": {"refresh": 2, "schedule": fxmask.Schedule("cubic", 10)},
    "freeze": {"refresh": 2, "guard": {"masked_weights": "freeze"}},
    "decay": {"refresh": 2, "guard": {"masked_weights": "decay"}},
    "kept-blocks": {"refresh": 2, "guard": {"masked_step": True}},
}


@pytest.mark.parametrize("options", WAYS.values(), ids=WAYS)
def test_no_sync_in_training(options):
    check_optimiser_steps("cuda", no_sync, steps=4, **options)
