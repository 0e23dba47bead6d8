"""`--opt muon`: Muon for the matrices, AdamW for the rest, as one optimiser with one learning rate.

Muon (K. Jordan et al., 2024, kellerjordan.github.io/posts/muon) orthogonalises the momentum of a whole matrix; torch.optim.Muon does the work. Its step is
scaled to the size of AdamW's (J. Liu et al., 2025, arXiv:2502.16982), so that one rate serves both. A matrix with fewer than 32 rows or columns, such as a head
of ten classes, is left to AdamW.

torch.optim.Muon reads its rate on the host, which no CUDA graph can do. Its step is linear in the rate, so where that is a tensor it is taken at a rate of 1
and then scaled.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import AdamW, Muon, Optimizer

SMALLEST = 32  # rows or columns


class MuonAdamW(Optimizer):
    """One group of matrices, one of everything else; one state, which a checkpoint holds as that of any optimiser.

    Under masks: `fxmask.guard(..., returning="zero")`, as all recorded runs had it, clears AdamW's momenta, too. Takes parameters, no groups.
    """

    def __init__(self, params: Iterable[nn.Parameter], lr: float | Tensor, weight_decay: float, fused: bool | None = None, capturable: bool = False) -> None:
        whole = list(params)
        matrices = [p for p in whole if p.ndim == 2 and min(p.shape) >= SMALLEST]
        rest = [p for p in whole if not any(p is m for m in matrices)]
        parts = [(Muon(matrices, lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"), matrices)] if matrices else []
        parts += [(AdamW(rest, lr=lr, weight_decay=weight_decay, fused=fused, capturable=capturable), rest)] if rest else []
        self.parts = [part for part, _ in parts]
        super().__init__([{**part.defaults, "params": params} for part, params in parts], {})

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "parts": self.parts}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Both parts' steps, each on its group and on the common state."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.param_groups, part.state = [group], self.state
            if isinstance(part, Muon) and isinstance(group["lr"], Tensor):
                _scaled_step(part, group)
            else:
                part.step()
        return loss


@torch.no_grad()
def _scaled_step(part: Muon, group: dict[str, Any]) -> None:
    """Muon's step at a rate that stays where it lies: weights go that share of the way of a step at a rate of 1."""
    part.param_groups = [{**group, "lr": 1.0}]
    weights = [p for p in group["params"] if p.grad is not None]
    before = [p.detach().clone() for p in weights]
    part.step()
    for p, old in zip(weights, before, strict=True):
        torch.lerp(old, p, group["lr"].to(p.dtype), out=p)
