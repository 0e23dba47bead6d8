"""Masks under FSDP2 (`fully_shard`), with a checkpoint that any number of processes resumes.

    torchrun --nproc-per-node 2 examples/recipes/fsdp2.py --steps 20 --out runs/fsdp2
    torchrun --nproc-per-node 1 examples/recipes/fsdp2.py --steps 40 --out runs/fsdp2 --resume

gloo on CPUs, nccl on CUDA. The order is: move, `fxmask.apply`, `fully_shard`, optimiser, load, guard. A forward sees the weights that fully_shard has gathered,
so its masks are those of one process. The guard gathers each masked weight once a step, one at a time, and so do `fxmask.masks`, `explain` and `refresh`: call
them on all ranks. `fxmask.state_dict` is the same on every rank.
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import fxmask

WIDTH, CLASSES, BATCH = 64, 10, 32
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)  # whole tensors, on rank 0


class Block(nn.Module):
    """A residual block; each is sharded and gathered on its own."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(nn.functional.gelu(self.fc1(self.norm(x))))


def build_model() -> nn.Sequential:
    """A small classifier; the seed makes it the same on every rank, as fully_shard wants it."""
    torch.manual_seed(0)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, CLASSES))


def batch_of(step: int, rank: int, world: int) -> tuple[Tensor, Tensor]:
    """This rank's share of a step's batch; the batch is the same for any number of ranks. A DistributedSampler does this for a data set."""
    g = torch.Generator().manual_seed(step)
    x = torch.randn(BATCH, WIDTH, generator=g)
    y = x[:, :CLASSES].argmax(1)
    return x[rank::world], y[rank::world]


def save(path: Path, step: int, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """All ranks gather, rank 0 writes whole tensors. torch.distributed.checkpoint.save would write each rank's part of weights and moments; the masks' state is
    the same on every rank, and its form may change as they train, so that goes into a file of its own, as here."""
    weights, moments = get_state_dict(model, optimizer, options=FULL)
    if dist.get_rank() == 0:
        new = path.with_suffix(".new")
        torch.save({"step": step, "model": weights, "masks": fxmask.state_dict(model), "optimizer": moments}, new)
        os.replace(new, path)  # a killed run leaves the last whole one
    dist.barrier()


def load(path: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Every rank reads it and takes its part: weights and optimiser, then masks. Returns the step to go on from."""
    saved: dict[str, Any] = torch.load(path, weights_only=True, map_location="cpu")
    set_state_dict(model, optimizer, model_state_dict=saved["model"], optim_state_dict=saved["optimizer"], options=FULL)
    fxmask.load_state_dict(model, saved["masks"])
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
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))

    # moved before it is sharded: fully_shard moves parameters alone, and masks have tensors of their own
    model = fxmask.apply(build_model().to(device), ratio=args.ratio, block=(16, 16), schedule=fxmask.Schedule("cubic", steps=30))
    for block in model[:2]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.05)
    try:
        first = load(path, model, optimizer) if args.resume else 0
    except (RuntimeError, EOFError, LookupError, TypeError, ValueError, pickle.UnpicklingError) as error:
        got = f"{type(error).__name__}: {error}".splitlines()[0].partition(". ")[0]
        parser.error(f"--resume: expected a checkpoint of this script at {path}, of the same --ratio, got {got}")
    guard = fxmask.guard(optimizer, model)  # after loading: hooks cannot be saved

    mean = torch.full((), float("nan"), device=device)
    for step in range(first, args.steps):
        x, y = (t.to(device) for t in batch_of(step, rank, world))
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach() / world
        dist.all_reduce(mean)
    save(path, max(first, args.steps), model, optimizer)
    report = fxmask.explain(model)  # on all ranks: it gathers
    if rank == 0:
        trained = f"step {args.steps} on {world} ranks: loss {float(mean):.6f}"
        print(trained if first < args.steps else f"already at step {first}: --steps {args.steps} leaves none to take")
        print(report)
    guard.remove()
    dist.destroy_process_group()
    return float(mean)


if __name__ == "__main__":
    main()
