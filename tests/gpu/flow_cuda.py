"""16 bits with a scaler, and what CUDA alone has: streams, graphs of a step, memory; see `flow_bodies.py`."""

from __future__ import annotations

import functools
import gc
from contextlib import nullcontext

import torch
from gpu.flow_bodies import BLOCK, STEPS, WIDTH, adamw, assert_masks_equal, assert_same_weights, batch, check_training, loss_of, masked_net, net, sgd, train
from torch import nn

import fxmask
from fxmask import ActivationPruning, Schedule, WeightMask


def check_scaled(device, impl, dtype, optimiser=sgd, **guarding):
    """autocast with a GradScaler, one of whose steps is skipped: the loss falls, masked weights rest."""
    device_type = torch.device(device).type
    model = masked_net(device, impl, refresh=0)
    before = model[0].weight.detach().clone()
    opt, scaler = optimiser(model.parameters()), torch.amp.GradScaler(device_type, init_scale=2.0**10)
    fxmask.guard(opt, model, **guarding)
    losses = []
    for i in range(STEPS):
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device_type, dtype):
            loss = nn.functional.cross_entropy(model(batch(device)[0]).float(), batch(device)[1])
        scaler.scale(loss).backward()
        if i == 1:
            model[0].weight.grad[0, 0] = float("inf")
        scaler.step(opt)
        scaler.update()
        losses.append(float(loss.detach()))
    left = ~fxmask.masks(model)["0.weight"].repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
    assert scaler.get_scale() == 2.0**9 and losses[-1] < losses[0]
    assert torch.equal(model[0].weight.detach()[left], before[left]) and model[0].weight.isfinite().all()


def check_streams(device, impl):
    """Two models train on two streams, in turns; each as alone."""
    cuda = torch.device(device).type == "cuda"
    streams = [torch.cuda.Stream() for _ in range(2)] if cuda else [None, None]
    models = [masked_net(device, impl, refresh=n) for n in (1, 2)]
    others = [masked_net("cpu", "reference", refresh=n) for n in (1, 2)]
    if cuda:
        torch.cuda.synchronize()
    for model, stream in zip(models, streams, strict=True):
        with torch.cuda.stream(stream) if cuda else nullcontext():
            train(model, device)
    if cuda:
        torch.cuda.synchronize()
    for model, other in zip(models, others, strict=True):
        train(other, "cpu")
        assert_same_weights(model, other)
        assert_masks_equal(model, other)


def check_graphed_step(device, impl, **options):
    """A CUDA graph of the whole step, optimiser and guard included, replayed: the weights of the same steps in eager mode."""
    model, other = masked_net(device, impl, **options), masked_net(device, "reference", **options)
    cuda = torch.device(device).type == "cuda"
    opts = [adamw(m.parameters(), capturable=cuda, foreach=True) for m in (model, other)]
    for opt, m in zip(opts, (model, other), strict=True):
        fxmask.guard(opt, m)
    x, target = batch(device)

    def step(m, opt):
        opt.zero_grad(set_to_none=True)
        loss_of(m, x, target).backward()
        opt.step()

    side = torch.cuda.Stream() if cuda else None
    if side is not None:
        side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side) if cuda else nullcontext():
        for _ in range(3):
            step(model, opts[0])
    if side is not None:
        torch.cuda.current_stream().wait_stream(side)
        opts[0].zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step(model, opts[0])
    for seed in range(3):
        x.copy_(batch(device, seed=seed)[0])
        if side is None:
            step(model, opts[0])
        else:
            graph.replay()
    x.copy_(batch(device)[0])
    for _ in range(3):
        step(other, opts[1])
    for seed in range(3):
        x.copy_(batch(device, seed=seed)[0])
        step(other, opts[1])
    assert_same_weights(model, other, 2e-3)
    if not options:
        assert_masks_equal(model, other)


def check_memory(device, impl):
    """Nothing that a step allocates stays, with masks that are cached, ramps, guards and pruned inputs."""
    model = fxmask.apply(
        net(device), WeightMask(0.8, BLOCK, impl=impl, refresh=2, schedule=Schedule("cubic", steps=10), backward="ste"), ActivationPruning(0.5, 16)
    )
    opt = adamw(model.parameters())
    fxmask.guard(opt, model)
    x = torch.randn(2, 16, WIDTH, device=device)
    held = []
    for i in range(30):
        opt.zero_grad(set_to_none=True)
        model(x).square().mean().backward()
        opt.step()
        if i in (13, 21, 29):  # behind the ramp, and masks are rebuilt in every second step
            gc.collect()
            held.append(torch.cuda.memory_allocated() if x.is_cuda else 0)
    assert held[-1] <= held[0], held


of = functools.partial
FLOWS = {
    "float16 with a scaler": of(check_scaled, dtype=torch.float16),
    "bfloat16 with a scaler": lambda device, impl: check_scaled(device, impl if torch.device(device).type == "cuda" else "auto", torch.bfloat16),
    "float16 with a scaler, fused": of(check_scaled, dtype=torch.float16, optimiser=of(adamw, fused=True)),
    "float16 with a scaler, masked step": of(check_scaled, dtype=torch.float16, optimiser=of(adamw, fused=True), masked_step=True),
    "two streams": check_streams,
    "graph of a step": check_graphed_step,
    "graph of a step, cached": of(check_graphed_step, refresh=0),
    "memory": check_memory,
    "trained by the default impl": lambda device, impl: check_training(device, "auto", {"refresh": 2}),
}
