"""Several processes: weights that `fully_shard` has shared out (DTensors), and whether there are several.

A mask is of the whole weight. In a forward fully_shard has gathered it; anywhere else it is gathered here, by all ranks together. What an optimiser's step
does to masked weights needs each process's own part alone. Nothing of torch.distributed is imported that the process has not imported itself.
"""

from __future__ import annotations

import sys

import torch.distributed
from torch import Tensor, nn
from torch.optim import Optimizer

from ...kernels.errors import UnsupportedError, message


def is_shard(t: object) -> bool:
    """Whether a tensor is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(t, module.DTensor)


def refuse_shard(t: Tensor, what: str, where: str = "") -> None:
    """UnsupportedError where what a forward runs on is a DTensor: a mask is of the whole weight, and no op of ours has rules of sharding."""
    if is_shard(t):
        what = f"{what} runs on a sharded weight ({t.placements}): expected the whole one, as fully_shard gathers it."  # type: ignore[attr-defined]
        fix = "call the module that fully_shard was given (register_fsdp_forward_method for a method of it); exclude layers that are tensor-parallel."
        raise UnsupportedError(message(what, where, fix))


def several() -> bool:
    """Whether this process is one of several that talk to each other."""
    return torch.distributed.is_available() and torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1


def gathered(value: object) -> list[object]:
    """A plain value of every rank, in their order; all ranks have to call it together. Of one process its own."""
    if not several():
        return [value]
    found: list[object] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(found, value)
    return found


def first(t: Tensor) -> Tensor:
    """Rank 0's tensor, bool, on every rank: of what each has drawn for itself. All ranks have to call it together; of one process its own."""
    if not several():
        return t
    sent = t.to(torch.uint8)  # which every backend sends
    torch.distributed.broadcast(sent, 0)
    return sent.bool()


def whole(t: Tensor) -> Tensor:
    """A sharded tensor gathered, on every rank; any other as it is. All ranks have to call it together."""
    return t.full_tensor() if is_shard(t) else t  # type: ignore[attr-defined]


def part(t: Tensor) -> Tensor:
    """This process's part of a sharded tensor, in the same memory; any other tensor as it is."""
    return t.to_local() if is_shard(t) else t  # type: ignore[attr-defined]


def part_like(full: Tensor, weight: Tensor) -> Tensor:
    """Of a tensor that every rank holds whole, the part that lies where this process's part of `weight` does. No communication."""
    if not is_shard(weight):
        return full
    placements, mesh = weight.placements, weight.device_mesh  # type: ignore[attr-defined]
    tensors = sys.modules["torch.distributed.tensor"]
    return tensors.distribute_tensor(full, mesh, placements, src_data_rank=None).to_local()


def stepping(optimizer: Optimizer) -> Optimizer:
    """The optimiser that holds this process's part of the state: ZeroRedundancyOptimizer gives each process one, and has no state itself."""
    module = sys.modules.get("torch.distributed.optim.zero_redundancy_optimizer")
    if module is None or not isinstance(optimizer, module.ZeroRedundancyOptimizer):
        return optimizer
    if not hasattr(optimizer, "optim"):  # overlap_with_ddp=True: it is made later, and steps in DDP's hooks
        what = "ZeroRedundancyOptimizer(overlap_with_ddp=True): expected an optimiser whose own step moves the weights, because that is what guard follows."
        raise UnsupportedError(message(what, type(optimizer).__name__, "leave overlap_with_ddp out."))
    inner: Optimizer = optimizer.optim
    return inner


def at_rest(model: nn.Module) -> None:
    """Have fully_shard put its shards back where a forward left whole weights: the shards are the Parameters that optimisers hold."""
    for m in model.modules():
        if is_sharded_module(m):
            m.reshard()  # type: ignore[operator]


def is_sharded_module(m: nn.Module) -> bool:
    """Whether a module was given to `fully_shard`."""
    module = sys.modules.get("torch.distributed.fsdp")
    return module is not None and isinstance(m, module.FSDPModule)
