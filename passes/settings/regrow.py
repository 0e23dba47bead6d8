"""How many blocks are exchanged, and by what: plain numbers on the host. `passes.state.ranking` makes the mask."""

from __future__ import annotations

import dataclasses
import math

from ...kernels.errors import ConfigError
from ...kernels.grid import plain_int
from .checks import is_number, one_of

GROWTH = ("gradient", "random")


@dataclasses.dataclass(frozen=True)
class Regrow:
    """Exchange of blocks at every rebuild: the worst kept ones leave, and as many masked ones come back by something else than their weights.

    Of k kept blocks floor(f k) are put up for exchange, and may come back at once, where they win against those that were masked: f = fraction / 2 (1 +
    cos(pi t / until)) at t steps after `start`, none from `until` on (Evci et al. 2020, arXiv:1911.11134, sec. 3). They come back with weights and momenta
    of zero, as there (momenta under `fxmask.guard`; `fxmask.step` knows no optimiser). Nothing else exchanges blocks under `regrow`. Where the ratio falls,
    masked blocks come back beside the exchange, by their scores and with the weights that they have. A weight that rests (requires_grad=False) exchanges none.

    Args:
        by: `gradient`: those with the largest norm of the dense gradient of the last step that had one, and none while there was none since the last exchange
            (RigL; backward="rigl" with refresh=dense_every, "ste" or "unmasked"). `random`: any, by a counter of (seed, step, name), equal on all ranks
            (SET, Mocanu et al. 2018, arXiv:1707.04780).
        fraction: in (0, 1). until: optimiser steps, None: for ever at `fraction`.

    Raises: ConfigError.
    """

    by: str = "gradient"
    fraction: float = 0.3
    until: int | None = None

    def __post_init__(self) -> None:
        one_of("Regrow.by", self.by, GROWTH)
        if not is_number(self.fraction) or not 0 < self.fraction < 1:
            raise ConfigError(f"Regrow.fraction is the share of kept blocks that are exchanged: expected a number in (0, 1), got {self.fraction!r}.")
        object.__setattr__(self, "fraction", float(self.fraction))
        if self.until is not None:
            until = plain_int(self.until)
            if until is None or until < 1:
                raise ConfigError(f"Regrow.until counts optimiser steps: expected None or an int of at least 1, got {self.until!r}.")
            object.__setattr__(self, "until", until)

    def exchanged(self, step: int, kept: int) -> int:
        """Blocks exchanged `step` steps after the start, of `kept` ones; at least one stays. A millionth is forgiven: in floats .29 of 100 is below 29."""
        share = self.fraction
        if self.until is not None:
            share *= 0.0 if step >= self.until else (1 + math.cos(math.pi * step / self.until)) / 2
        return min(int(share * kept + 1e-6), kept - 1)
