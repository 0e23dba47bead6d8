"""A dense linear below autograd, with the bits that F.linear and its backward have where a weight needs a gradient."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .reference import product_of_rows, rows


def forward(x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    """y, contiguous.

    PyTorch multiplies an input of three axes or more as one matrix of rows there, and below autograd, where nothing needs a gradient, by batches.
    """
    if x.dim() < 3 or (bias is not None and x.is_contiguous()):
        return F.linear(x, w, bias).contiguous()
    return product_of_rows(x, w, bias)


def has_rows_inside(x: Tensor) -> bool:
    """Whether the input of the dense matmul is a matrix whose rows lie inside, for which PyTorch computes dX^T = W^T dY^T."""
    if x.dim() < 2 or x.stride(-2) != 1 or x.stride(-1) != x.shape[-2]:
        return False
    return all(n == 1 for n in x.shape[:-2])


def dx(gy: Tensor, w: Tensor, rows_inside: bool) -> Tensor:
    """dX = dY W."""
    flat = rows(gy)
    gx = torch.mm(w.t(), flat.t()).t() if rows_inside else torch.mm(flat, w)
    return gx.reshape(*gy.shape[:-1], w.shape[1])


def db(gy: Tensor, flat: bool) -> Tensor:
    """db = sum dY: F.linear flattens a contiguous input (`flat`), and adds the bias to the product of any other."""
    return rows(gy).sum(0) if flat else gy.sum_to_size(gy.shape[-1])
