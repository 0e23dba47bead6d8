"""A small model, its batches, and digests of bits, for the cases that run on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor, nn

WIDTH, BATCH = 48, 16


class Block(nn.Module):
    """A residual block whose inner width is ragged in blocks of 16 and odd, so that two ranks hold unequal parts."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.fc1, self.fc2 = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 67), nn.Linear(67, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.fc2(torch.relu(self.fc1(self.norm(x))))


def build(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(Block(), Block(), nn.Linear(WIDTH, 32)).to(dtype)


def batch_of(step: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """The whole batch of a step, the same on every rank."""
    g = torch.Generator().manual_seed(1000 + step)
    x = torch.randn(BATCH, WIDTH, generator=g, dtype=dtype)
    return x, x[:, :32].sin()


def share(t: Tensor) -> Tensor:
    """This rank's part of a batch."""
    return t[dist.get_rank() :: dist.get_world_size()]


def mean_over_ranks(loss: Tensor) -> Tensor:
    loss = loss.detach().clone()
    dist.all_reduce(loss)
    return loss / dist.get_world_size()


def digest(*tensors: Tensor) -> Tensor:
    """A number that changes when any bit or its place does: int64, wrapping sums."""
    total = torch.zeros((), dtype=torch.int64)
    for t in tensors:
        bits = t.detach().contiguous().flatten().view(torch.uint8).to(torch.int64)
        total = total * 1000003 + (bits * (2 * torch.arange(bits.numel()) + 1)).sum()
    return total


def same_on_all_ranks(*tensors: Tensor) -> bool:
    mine = digest(*tensors)
    all_of_them = [torch.zeros_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(all_of_them, mine)
    return all(torch.equal(t, mine) for t in all_of_them)
