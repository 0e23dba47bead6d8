"""How far a product may be from float64's: one rule for the benchmark's gate and for the GPU tests.

b is the largest error of plain PyTorch in the same precision, and a rounding is that of the largest result.

| precision | allowed |
| --- | --- |
| bf16, fp16 | 2 b and a rounding |
| fp32 of n terms | 2 b and 1 + sqrt(n) / 2 roundings |
| tf32 | 4 b and a rounding |

bf16, fp16: sums are added up in float32, and what that loses is less than the result's own rounding. fp32: the kernels add a result's n terms up in one chain,
cuBLAS in parts. A chain rounds n times, each time by at most half a unit of what it has by then, and roundings add up like a random walk. tf32: cuBLAS rounds
operands to the nearest number of 11 bits. A kernel's operands go from shared memory to Hopper's tensor cores as float32, of which these drop the low 13 bits:
up to twice as much is lost, and always towards zero, so that what is lost does not cancel.

On an H200 with N(0, 1) data float32 lost up to 6.2 b over 1,568 terms, as much as chains on a CPU lose on the same numbers, and 0.54 of what is allowed; tf32
up to 3.1 b, and where a CPU cuts the operands 3.4 b. The rule of tf32 is for numbers with a mean of zero: of n positive terms the loss grows like n, b like
sqrt(n). A product in TF32 misses the bound of fp32 by two orders of magnitude, a missing step of the sum misses all.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def largest(t: Tensor) -> float:
    """Largest magnitude; 0 of nothing, NaN where there is one."""
    return float(t.abs().max()) if t.numel() else 0.0


def allowed(exact: Tensor, plain: Tensor, terms: int, tf32: bool = False) -> float:
    """The largest error against `exact`, float64, of a product with sums of `terms` terms; `plain`: that of PyTorch in the same precision, TF32 or not."""
    base, rounding = largest(plain.double() - exact), torch.finfo(plain.dtype).eps * largest(exact)
    if plain.dtype != torch.float32:
        return 2 * base + rounding
    return 4 * base + rounding if tf32 else 2 * base + (1 + math.sqrt(terms) / 2) * rounding


def missed(got: Tensor, exact: Tensor, plain: Tensor, terms: int, tf32: bool = False) -> tuple[float, str]:
    """The largest error of a product, infinite where a number is missing, and why it is too much; empty where it is not. The others: as for `allowed`."""
    error, budget = largest(got.double() - exact), allowed(exact, plain, terms, tf32)
    error = math.inf if math.isnan(error) else error
    return error, "" if error <= budget else f"error {error:.3g} over the budget {budget:.3g}"
