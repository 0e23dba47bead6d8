"""No time for a wrong result: every provider is compared with float64 before it is timed.

The budget is that of `bench.tolerance`, beside masked-dense in the same precision. Masks and lists must be equal to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..kernels import lists, reference
from . import providers
from .cells import products
from .inputs import Inputs
from .tolerance import largest, missed


class Verdict(NamedTuple):
    """`passed`, the largest error of all outputs against float64, and masked-dense's own; None for masks and lists."""

    passed: bool
    max_err: float | None
    base_err: float | None
    why: str = ""


def dense_of(t: Tensor) -> Tensor:
    return t.to_dense() if t.layout == torch.sparse_bsr else t


def plain_outputs(i: Inputs, dtype: torch.dtype) -> list[Tensor]:
    """The outputs of a matmul op by plain PyTorch in `dtype`, on the device. `dense` has a mask of one kept block, the whole weight."""
    block = i.block if i.block[0] else (i.cell.N, i.cell.K)
    w, x, gy = (t.to(dtype) for t in (i.w, i.x, i.gy))
    made = {
        "forward": lambda: reference.masked_linear(x, w, None, i.mask, block),
        "dx": lambda: reference.masked_linear_dx(gy, w, i.mask, block, "masked"),
        "dw": lambda: reference.masked_linear_dw(gy, x, i.mask, None, block, "masked"),
    }
    return [made[name]() for name in products(i.cell.op)]


def check_matmul(i: Inputs, outputs: tuple[Any, ...]) -> Verdict:
    """Compare the outputs with float64, and with plain PyTorch in the same precision."""
    exact = plain_outputs(i, torch.float64)
    baseline = plain_outputs(i, i.w.dtype)
    worst, base, why = 0.0, 0.0, ""
    terms = {"forward": i.cell.K, "dx": i.cell.N, "dw": i.cell.M}
    for name, got, want, low in zip(products(i.cell.op), outputs, exact, baseline, strict=True):
        got = dense_of(got)
        if got.shape != want.shape:
            return Verdict(False, None, None, f"expected shape {tuple(want.shape)}, got {tuple(got.shape)}")
        err, said = missed(got, want, low, terms[name], i.cell.dtype == "tf32")
        worst, base, why = max(worst, err), max(base, largest(low.double() - want)), why or said
    return Verdict(not why, worst, base, why)


def over_budget(step: Sequence[Tensor | None], exact: Sequence[Tensor], plain: Sequence[Tensor]) -> tuple[float, str]:
    """The largest error of y, dX and dW against float64, and which of them is over the budget, empty where none is. None: not computed."""
    worst, why = 0.0, ""
    terms = exact[1].shape[-1], exact[0].shape[-1], exact[0].shape[0]  # K, N and tokens
    for what, got, want, low, n in zip(("y", "dX", "dW"), step, exact, plain, terms, strict=False):
        if got is None:
            continue
        error, said = missed(got, want, low, n)
        worst, why = max(worst, error), why or (said and f"{what}: {said}")
    return worst, why


def of_the_dtypes_size(got: Sequence[Tensor], plain: Sequence[Tensor], exact: Sequence[Tensor]) -> tuple[float, bool]:
    """Largest error against float64, as a share of the largest value; and whether it is of the dtype's size.

    Of its size: at most twice plain PyTorch's root mean square and 4 times its largest one. (Sums over kept blocks alone are added in another order.)
    """
    worst, good = 0.0, len(got) == len(exact)
    for one, low, want in zip(got, plain, exact, strict=False):
        size, eps = largest(want) or 1.0, torch.finfo(one.dtype).eps
        own, base = ((t - want) / size for t in (one, low))
        err, small = largest(own), float(own.square().mean().sqrt()) <= 2 * float(base.square().mean().sqrt()) + eps
        worst, good = max(worst, err if err == err else float("inf")), good and small and err <= 4 * largest(base) + eps
    return worst, good


def list_parts(packed: Tensor, mask: Tensor, block: tuple[int, int]) -> list[Tensor]:
    """Entries, counts and order of both directions; what lies between them in the packed lists is undefined."""
    grid = (mask.shape[0], mask.shape[1])
    return [t for transposed in (False, True) for t in lists.unpack(packed, grid, block, transposed)]


def check_metadata(i: Inputs, outputs: tuple[Tensor, ...]) -> Verdict:
    """Compare masks or lists with their plain form on the CPU, bit by bit."""
    out, mask = outputs[0].cpu(), i.mask.cpu()
    if i.cell.phase == "block_index":
        got, expected = [out], [reference.block_index(i.w.cpu(), i.keep.cpu(), i.step.cpu(), i.block, "fro", "lowest", 0)]
    else:
        got, expected = list_parts(out, mask, i.block), list_parts(lists.packed(mask, i.block), mask, i.block)
    same = [torch.equal(g, want) for g, want in zip(got, expected, strict=True)]
    return Verdict(all(same), None, None, "" if all(same) else f"differs from the CPU's in part {same.index(False)}")


def check(i: Inputs, call: providers.Call) -> Verdict:
    """Run a provider once and judge its outputs."""
    return check_metadata(i, call()) if i.cell.op == "metadata" else check_matmul(i, call())
