"""One training in one process or in several that torchrun starts: who writes, what is added up, and one error for all.

gloo on CPUs, nccl on CUDA. Started without torchrun there is no process group, and every call here is that of a single rank.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import fxmask

T = TypeVar("T")


class RankError(fxmask.FxMaskError):
    """What one rank could not do, raised on all of them."""


@dataclass(frozen=True)
class Ranks:
    """This process among those of the run. `grouped`: there is a process group, be it of one."""

    rank: int
    world: int
    device: torch.device
    grouped: bool

    @property
    def first(self) -> bool:
        """Whether this rank writes and prints."""
        return self.rank == 0

    def sum(self, t: Tensor) -> Tensor:
        """The sum over all ranks; `t` itself stays as it is."""
        t = t.clone()
        if self.grouped:
            dist.all_reduce(t)
        return t

    def each(self, t: Tensor) -> list[Tensor]:
        """Every rank's `t`, in their order."""
        found = [torch.zeros_like(t) for _ in range(self.world)]
        if not self.grouped:
            return [t.clone()]
        dist.all_gather(found, t)
        return found

    def wrap(self, model: nn.Module) -> nn.Module:
        """`model` under DistributedDataParallel."""
        if not self.grouped:
            return model
        # Else DDP regroups its buckets after the first step, three ranks and more then add up in another order, and the first step of a resumed run differs in
        # its last bits. PyTorch warns that nothing is unused; the search is short beside a step.
        ids = [self.device.index] if self.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=ids, find_unused_parameters=True)

    def share_buffers(self, model: nn.Module) -> None:
        """Running statistics as rank 0 has them, which are those that it saves."""
        for buffer in model.buffers() if self.grouped else ():
            dist.broadcast(buffer, 0)

    def together(self, work: Callable[[], T]) -> T:
        """What `work` returns on this rank. Where it fails on any, all raise, so that none waits for one that is gone; `work` itself must not communicate."""
        if not self.grouped:
            return work()
        result, failed = None, ""
        try:
            result = work()
        except (fxmask.FxMaskError, OSError) as error:
            failed = str(error) or type(error).__name__
        texts: list[Any] = [None] * self.world
        dist.all_gather_object(texts, failed)
        if any(texts):
            rank = next(i for i, text in enumerate(texts) if text)
            raise RankError(texts[rank] + (f"\n  where: rank {rank} of {self.world}" if rank else ""))
        return result  # type: ignore[return-value]


@contextmanager
def started(device: str) -> Iterator[Ranks]:
    """The process group of torchrun's environment, or of whoever has made one already; none without torchrun."""
    local, cuda, gpus = int(os.environ.get("LOCAL_RANK", "0")), torch.device(device).type == "cuda", torch.cuda.device_count()
    if cuda and local >= gpus:
        what = f"expected a GPU for each process of a machine, got process {local + 1} and {gpus} GPU(s)."
        raise fxmask.FxMaskError(f"{what}\n  fix: {f'torchrun --nproc-per-node {gpus}, or ' if gpus else ''}--device cpu.")
    if "WORLD_SIZE" not in os.environ:
        yield Ranks(0, 1, torch.device(device), grouped=False)
        return
    place = torch.device("cuda", local) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(place)
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("nccl" if cuda else "gloo", device_id=place if cuda else None)
    yield Ranks(dist.get_rank(), dist.get_world_size(), place, grouped=True)
    if ours:  # not after an exception: the others may be waiting in a collective, and torchrun ends them
        dist.destroy_process_group()
