"""Masks under DistributedDataParallel, with a checkpoint that any number of processes resumes.

    torchrun --nproc-per-node 2 examples/recipes/ddp.py --steps 20 --out runs/ddp
    torchrun --nproc-per-node 1 examples/recipes/ddp.py --steps 40 --out runs/ddp --resume

gloo on CPUs, nccl on CUDA. The order is: move, `fxmask.apply`, wrap, optimiser, load, guard. Masks are built from the weights, which DDP keeps equal to the
bit, so nothing about masks is sent. What is saved is the plain model's, so that the names hold without the wrapper.
"""

from __future__ import annotations

import argparse
import os
import pickle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxmask

WIDTH, CLASSES, BATCH = 64, 10, 32


def build_model() -> nn.Module:
    """A small classifier; the seed makes it the same on every rank, which cached masks (`refresh` other than 1) rely on."""
    torch.manual_seed(0)
    layers = [layer for _ in range(2) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def batch_of(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a step's batch; the batch is the same for any number of ranks. A DistributedSampler does this for a data set."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=g)
    y = x[:, :CLASSES].argmax(1)
    return x[rank::world], y[rank::world]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Rank 0 writes what all ranks hold: weights, masks' state, optimiser."""
    if dist.get_rank() == 0:
        new = path.with_suffix(".new")
        torch.save({"step": step, "model": model.state_dict(), "masks": fxmask.state_dict(model), "optimizer": optimizer.state_dict()}, new)
        os.replace(new, path)  # a killed run leaves the last whole one
    dist.barrier()


def load(path: Path, device: torch.device, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Every rank reads it: weights, then masks, then the optimiser. Returns the step to go on from."""
    saved: dict[str, Any] = torch.load(path, weights_only=True, map_location=device)
    model.load_state_dict(saved["model"])
    fxmask.load_state_dict(model, saved["masks"])
    optimizer.load_state_dict(saved["optimizer"])
    return saved["step"]


def main(argv: list[str] | None = None) -> float:
    """Train to `--steps` optimiser steps, save, and return the last loss over all ranks: nan where the run was there already."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps in all, those before a resume included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true")
    parser.add_argument("--ratio", type=float, default=0.75)
    args = parser.parse_args(argv)
    if "RANK" not in os.environ:
        parser.error("expected to be started by torchrun, which says how many processes there are; on one: torchrun --nproc-per-node 1")
    path = args.out / "checkpoint.pt"
    if args.resume and not path.is_file():
        parser.error(f"--resume: expected a checkpoint at {path}, found none; leave --resume out to begin a run")
    try:
        fxmask.WeightMask(ratio=args.ratio, block=(16, 16))
        args.out.mkdir(parents=True, exist_ok=True)
    except (fxmask.FxMaskError, OSError) as error:
        parser.error(str(error).splitlines()[0])

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")

    model = fxmask.apply(build_model().to(device), ratio=args.ratio, block=(16, 16), schedule=fxmask.Schedule("cubic", steps=30))
    wrapped = DistributedDataParallel(model, device_ids=[device.index] if cuda else None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    try:
        first = load(path, device, model, optimizer) if args.resume else 0
    except (RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        got = f"{type(error).__name__}: {error}".replace(":\n\t", ": ").splitlines()[0].partition(". ")[0]
        parser.error(f"--resume: expected a checkpoint of this script at {path}, of the same --ratio, got {got}")
    guard = fxmask.guard(optimizer, model)  # after loading: hooks cannot be saved

    mean = torch.full((), float("nan"), device=device)
    for step in range(first, args.steps):
        x, y = (t.to(device) for t in batch_of(step, rank, world))
        loss = nn.functional.cross_entropy(wrapped(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
    save(path, max(first, args.steps), model, optimizer)
    if rank == 0:
        trained = f"step {args.steps} on {world} ranks: loss {float(mean):.6f}"
        print(trained if first < args.steps else f"already at step {first}: --steps {args.steps} leaves none to take")
        print(fxmask.explain(model))
    guard.remove()
    del wrapped  # whose reducer would be the last to hold gloo's group: PyTorch then joins its thread under the GIL, and may wait for ever
    dist.destroy_process_group()
    return float(mean)


if __name__ == "__main__":
    main()
