"""Which options of a mask go together: those that make it depend on more than the weight as it is."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...kernels.errors import ConfigError, UnsupportedError
from ..state.saliency import GIVEN, LEARNED
from .checks import is_number
from .regrow import Regrow
from .schedule import Schedule

if TYPE_CHECKING:
    from .config import WeightMask


ONLY_GIVEN = "criterion='given' ranks by the masks or scores that fxmask.apply is given, and by nothing else"


def check_dynamics(c: WeightMask) -> None:
    """Raise ConfigError or UnsupportedError for moving averages, hysteresis, regrowth, soft masks and gain that cannot work as asked; make numbers plain."""
    others = [name for name in ("average", "hysteresis", "regrow", "phases") if c.criterion == GIVEN and getattr(c, name)]
    if others:
        got = ", ".join(f"{name}={getattr(c, name)!r}" for name in others)
        raise ConfigError(f"{ONLY_GIVEN}: expected no {' nor '.join(others)} with it, got {got}.")
    for name, high in (("average", 1), ("hysteresis", 1000)):
        value = getattr(c, name)
        if not is_number(value) or not 0 <= value < high:
            raise ConfigError(f"{name}: expected a number in [0, {high}), got {value!r}.")
        object.__setattr__(c, name, float(value))  # numpy's numbers could not be saved
    for name in ("soft", "gain"):
        if type(getattr(c, name)) is not bool:
            raise ConfigError(f"{name}: expected a bool, got {getattr(c, name)!r}.")
    if c.regrow is not None and not isinstance(c.regrow, Regrow):
        raise ConfigError(f"regrow: expected None or a fxmask.Regrow, got {c.regrow!r}.")
    # read in forwards, where the compiler takes floats for what may move
    object.__setattr__(c, "_observes", c.criterion in LEARNED or c.average > 0)
    object.__setattr__(c, "_remembers", c.observes or c.hysteresis > 0 or c.regrow is not None or c.gain or c.criterion == GIVEN)
    if c.remembers and c.ties != "lowest":
        what = "scores that last keep exactly k blocks: expected ties='lowest' with average, hysteresis, regrow or gain, and of masks or scores given"
        raise ConfigError(f"{what}, got {c.ties!r}.")
    if c.criterion == "random" and (c.average or c.hysteresis):
        got = f"average={c.average}, hysteresis={c.hysteresis}"
        raise ConfigError(f"criterion='random' has no scores to average or to hold on to: expected both 0, got {got}.")
    if c.criterion == "movement" and c.hysteresis >= 1:  # s + h |s| falls as s < 0 rises
        what = "criterion='movement' has scores below 0, of which a hysteresis of 1 and more would let the best leave first"
        raise ConfigError(f"{what}: expected hysteresis below 1, got {c.hysteresis}.")
    if c.refresh == 0 and (c.observes or c.hysteresis or c.regrow is not None):
        raise ConfigError("refresh=0 builds the mask once: expected refresh of at least 1 with gradient criteria, average, hysteresis or regrow.")
    if c.wants_growth and c.backward not in ("rigl", "ste", "unmasked"):
        what = f"regrow by gradient needs dense gradients, and backward={c.backward!r} gives masked blocks none: expected backward='rigl', 'ste' or 'unmasked'."
        raise ConfigError(f"{what} Regrow('random') works with any.")
    if c.soft and not (isinstance(c.schedule, Schedule) and c.schedule.moves):
        what = "soft=True scales masked blocks down over the ramp of a schedule"
        raise ConfigError(f"{what}: expected schedule=fxmask.Schedule('cubic', steps=...), got {c.schedule!r}.")
    if c.soft and c.impl in ("triton", "cpu"):
        raise UnsupportedError(f"soft=True computes densely until the ramp's end, which impl={c.impl!r} does not: expected impl='auto' or 'reference'.")
    if c.soft and c.gain:
        raise ConfigError("soft=True lets blocks fade, and gain=True makes up for blocks that are cut off: expected one of them.")
    if c.criterion == "movement" and c.backward == "masked":
        what = "criterion='movement' compares what kept and masked blocks do, and backward='masked' leaves masked ones standing"
        raise ConfigError(f"{what}: expected backward='ste' (as in the paper) or 'rigl'.")
