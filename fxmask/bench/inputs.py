"""Tensors and masks of a cell. Always N(0, 1): matmuls run faster on zeros and on repeated values."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property

import torch
from torch import Tensor

from ..kernels import reference
from ..kernels.grid import expand_mask, grid_shape, keep_count
from .cells import Cell

TORCH_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "tf32": torch.float32}


def make_mask(grid: tuple[int, int], ratio: float, kind: str, seed: int) -> Tensor:
    """A mask bool [NB, KB] with exactly the kept blocks of `ratio`, on the CPU.

    `random`: every block is as likely as any other. `rows`: block rows differ in how much of them is kept, as in weights sorted by magnitude.
    """
    g = torch.Generator().manual_seed(seed)
    score = torch.randn(grid, generator=g)
    if kind == "rows":
        score = score + 1.5 * torch.randn(grid[0], 1, generator=g)
    chosen = torch.sort(score.flatten(), descending=True, stable=True).indices[: keep_count(score.numel(), ratio)]
    return torch.zeros(score.numel(), dtype=torch.bool).index_fill(0, chosen, True).reshape(grid)


@cache
def operands(shape: tuple[int, int, int], dtype: str, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """x (M, K), W (N, K) and dY (M, N) of a linear, for stages whose masks are made in the call; `shape`: (M, N, K)."""
    (m, n, k), g = shape, torch.Generator(device=device).manual_seed(0)
    return tuple(torch.randn(s, generator=g, device=device).to(TORCH_DTYPES[dtype]) for s in ((m, k), (n, k), (m, n)))  # type: ignore[return-value]


@dataclass
class Inputs:
    """x [M, K], w [N, K], gy [M, N] in the cell's dtype; mask [NB, KB]; keep and step as `block_index` takes them."""

    cell: Cell
    device: torch.device
    x: Tensor
    w: Tensor
    gy: Tensor
    mask: Tensor
    keep: Tensor
    step: Tensor

    @property
    def block(self) -> tuple[int, int]:
        return self.cell.block

    @cached_property
    def element_mask(self) -> Tensor:
        """The mask by elements, bool [N, K]: given to the masked-dense baseline, and so not in its time."""
        return expand_mask(self.mask, self.w.shape, self.block).contiguous()

    @cached_property
    def masked_weight(self) -> Tensor:
        return reference.masked(self.w, self.mask, self.block)


def make_inputs(cell: Cell, device: torch.device) -> Inputs:
    """The same values for every provider of a cell; a fresh draw for every shape and seed."""
    g = torch.Generator(device=device).manual_seed(1000 * cell.seed + cell.M + 3 * cell.N + 7 * cell.K)
    dtype = TORCH_DTYPES[cell.dtype]

    def normal(rows: int, cols: int) -> Tensor:
        return torch.randn(rows, cols, generator=g, device=device, dtype=torch.float32).to(dtype)

    block = cell.block if cell.block[0] else (cell.N, cell.K)
    grid = grid_shape((cell.N, cell.K), block)
    mask = make_mask(grid, cell.ratio, cell.mask, cell.seed)
    keep = torch.tensor(int(mask.sum()), device=device)
    x, w, gy = normal(cell.M, cell.K), normal(cell.N, cell.K), normal(cell.M, cell.N)
    return Inputs(cell, device, x, w, gy, mask.to(device), keep, torch.zeros((), dtype=torch.int64, device=device))
