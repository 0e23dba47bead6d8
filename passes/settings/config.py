"""What a user asks for: the frozen, validated configuration of one method. Its schedule is in `passes.settings.schedule`."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from ...kernels.dispatch import IMPLEMENTATIONS, check_available
from ...kernels.errors import ConfigError, UnsupportedError
from ...kernels.grid import check_block, keep_count, plain_int, ratio_units
from ...kernels.reference import MODES
from ...kernels.score import CRITERIA
from ...kernels.select import NO_COVER, TIES
from ..state.saliency import GIVEN, LEARNED
from .checks import at_least, one_of
from .dynamics import ONLY_GIVEN, check_dynamics
from .feedback import Feedback as Feedback
from .options import Options
from .phases import Phases, check_phases, in_turn, values
from .regrow import Regrow as Regrow
from .schedule import SCHEDULES
from .schedule import Schedule as Schedule


@dataclasses.dataclass(frozen=True)
class WeightMask(Options):
    """Dynamic structured weight masking: the weight's best blocks are kept, the others are left out of the matmuls (Bespalov 2025).

    Args:
        ratio: sparsity, the fraction of blocks that are masked, in [0, 1). Exactly `ceil(n_blocks * (1 - ratio))` blocks are kept, and at least one.
        block: (out_features, in_features) of a block; edges may be ragged.
        backward: `masked`, `ste`, `unmasked` or `rigl`; table in `kernels.reference`.
        criterion: `fro`, `spectral`, `l1`, `linf` or `random`, see `kernels.score`; `gradient`, `taylor`, `movement` or `momentum`, see
            `passes.state.saliency`; `given`: the masks or scores that `fxmask.apply` is given.
        refresh: 1: every forward builds the mask from the weight as it is. N > 1: built every N optimiser steps. 0: built once and kept; weights
            that are loaded build it anew until a step was counted after a forward with it.
        start: first optimiser step with masks; before it every block is kept.
        schedule: None, a `Schedule` of the ratio, which ends at `ratio`, or a `Feedback`, which stays at or below it.
        ties: `lowest`: exactly that many blocks, ties to the lowest flat index. `keep`: ties with the last kept block stay too (the thesis' code).
        dense_every: for `rigl`: every so many optimiser steps the weight's gradient is dense.
        read: `call`: the layer is called. `weight`: its owner reads `.weight` instead, which then gives W∘M.
        impl: `auto`, `reference`, `cpu` or `triton`; an explicit one never falls back, but to masked-dense in convolutions whose windows overlap, have gaps
            or reach into padding, `cpu` also under torch.func and forward AD and of nested inputs, and `triton` of blocks with other sides than 16, 32, 64 and
            128 and of odd numbers of features, as `fxmask.explain` says.
            Of the norms `fro` alone has kernels of its own: by the others masks are made in plain PyTorch, under `triton`, too.
            On a GPU `auto` is the choice of `passes.state.gpu_site`. seed: for `criterion="random"`.
        cover: no block row and no block column without a kept block, where the ratio leaves max(rows, columns) of them; see `kernels.select.covering`.
        average: in [0, 1), the moving average of the scores over optimiser steps (see `passes.state.saliency`); 0: as they are now.
        hysteresis: a masked block replaces a kept one whose score it exceeds by more than this share; 0.2: by a fifth (ours). Of `movement` below 1.
        regrow: None, or a `Regrow`: blocks are exchanged at every rebuild, by the gradient or at random.
        soft: over the schedule's ramp masked blocks are not cut off but scaled by a factor that falls linearly from 1 to 0, with the true gradient (decaying
            masks, Kao et al. 2022, arXiv:2209.07617); until the ramp's end the layer computes densely. Modules only.
        gain: where the number of kept blocks changes, at `apply` or by a step, kept weights are scaled, in place, so that the layer keeps its norm; see
            `passes.state.ranking.keep_norm`. Weights that are loaded later are left as they are, and other blocks at the same ratio scale nothing.
        phases: None, or {optimiser step: dict of new values, ...} for block, backward, criterion, ties, cover and refresh: from that step on, and until another
            phase names them. A phase that changes more than backward begins with a new mask where it is cached. Under torch.compile one recompile for each set
            of values, of which Dynamo takes 8 (`torch._dynamo.config.recompile_limit`). In a traced graph block and
            backward are no phases: UnsupportedError.

    `gradient` and its like, average, hysteresis, regrow and gain keep the mask between steps whatever `refresh` says, and so need `fxmask.guard` or
    `fxmask.step`. They rank between steps, on [NB, KB] scores: by kernels where these run, under hysteresis and regrow in plain PyTorch.

    Raises: ConfigError, UnsupportedError.
    """

    ratio: float = 0.5
    block: tuple[int, int] = (16, 16)
    backward: str = "masked"
    criterion: str = "fro"
    refresh: int = 1
    start: int = 0
    schedule: Schedule | Feedback | None = None
    ties: str = "lowest"
    dense_every: int = 100
    read: str = "call"
    impl: str = "auto"
    seed: int = 0
    cover: bool = False
    average: float = 0.0
    hysteresis: float = 0.0
    regrow: Regrow | None = None
    soft: bool = False
    gain: bool = False
    phases: Mapping[int, Mapping[str, Any]] | Phases | None = None

    _observes: ClassVar[bool]  # plain attributes of each instance, and no fields
    _remembers: ClassVar[bool]
    _wants_weight: ClassVar[bool]
    _needs_steps: ClassVar[bool]

    def __post_init__(self) -> None:
        ratio_units(self.ratio)
        object.__setattr__(self, "ratio", float(self.ratio))  # numpy's numbers could not be saved
        object.__setattr__(self, "block", check_block(self.block))
        one_of("backward mode", self.backward, MODES)
        if callable(self.criterion):
            raise ConfigError(f"criterion: expected a name, got {self.criterion!r}; scores that you compute yourself go in by fxmask.apply(scores=...).")
        one_of("criterion", self.criterion, (*CRITERIA, *LEARNED, GIVEN))
        one_of("ties", self.ties, TIES)
        one_of("read", self.read, ("call", "weight"))
        one_of("impl", self.impl, IMPLEMENTATIONS)
        check_available(self.impl)
        for name, low in (("refresh", 0), ("start", 0), ("dense_every", 1)):
            object.__setattr__(self, name, at_least(name, getattr(self, name), low))
        seed = plain_int(self.seed)
        if seed is None:
            raise ConfigError(f"seed: expected an int, got {self.seed!r}.")
        object.__setattr__(self, "seed", seed)
        if type(self.cover) is not bool or (self.cover and self.ties != "lowest"):
            raise ConfigError(f"cover: expected a bool, and ties='lowest' with True, got {self.cover!r} with ties={self.ties!r}.")
        if self.cover and self.impl == "triton":
            raise UnsupportedError(NO_COVER)
        if isinstance(self.schedule, str) and self.schedule in SCHEDULES:
            if self.schedule != "constant":
                raise ConfigError(f"schedule={self.schedule!r} needs a length: expected fxmask.Schedule({self.schedule!r}, steps=...).")
            object.__setattr__(self, "schedule", None)
        if self.schedule is not None and not isinstance(self.schedule, (Schedule, Feedback)):
            own = "; a ramp of your own is an object of a class made from fxmask.Schedule, with another ratio_at" if callable(self.schedule) else ""
            raise ConfigError(f"schedule: expected None or a fxmask.Schedule (or fxmask.Feedback), got {self.schedule!r}{own}.")
        if self.refresh == 0 and self.schedule is not None and self.schedule.moves:
            what = "refresh=0 builds the mask once, and a schedule wants it to move: expected refresh of at least 1 with a schedule"
            ramp = isinstance(self.schedule, Schedule)
            raise ConfigError(f"{what}{'; phases={step: dict(refresh=0)} holds it, from a step at which the ramp has ended on' if ramp else ''}.")
        check_dynamics(self)
        if isinstance(self.schedule, Feedback):
            self.schedule.check_mask(self.ratio, self.refresh)
        if self.read == "weight" and self.backward == "unmasked":
            raise UnsupportedError(
                "backward='unmasked' needs the call of the layer, and read='weight' has none: expected masked, ste or rigl for this layer."
            )
        if self.phases is not None:
            object.__setattr__(self, "phases", check_phases(self))
            if GIVEN in values(self, "criterion"):
                raise ConfigError(f"{ONLY_GIVEN}: expected it from the first step on, got it in phases={self.phases!r}.")
        self._set_kind(self.block, self.backward, self.criterion, self.ties, self.cover, self.impl, self.phases)
        counts_flips = isinstance(self.schedule, Feedback) and self.schedule.measure == "flip_rate"
        object.__setattr__(self, "_wants_weight", counts_flips or self.ever_cached)
        moving = self.schedule is not None and self.schedule.moves
        counts = self.start > 0 or self.refresh > 1 or self.backward == "rigl" or self.phases is not None
        object.__setattr__(self, "_needs_steps", moving or counts or (self.remembers and self.refresh > 0))

    @property
    def needs_steps(self) -> bool:
        """Whether the mask depends on how many optimiser steps were taken."""
        return self._needs_steps

    @property
    def cached(self) -> bool:
        """Whether the mask outlives a forward; the others follow the weight, whoever writes it."""
        return self.refresh != 1 or self.remembers

    @property
    def observes(self) -> bool:
        """Whether every optimiser step adds to the scores."""
        return self._observes

    @property
    def needs_grad(self) -> bool:
        """Whether a step's gradient is read."""
        return self.criterion in LEARNED or self.wants_growth

    @property
    def wants_growth(self) -> bool:
        """Whether dense gradients are kept for the next regrowth."""
        return self.regrow is not None and self.regrow.by == "gradient"

    @property
    def remembers(self) -> bool:
        """Whether a mask depends on more than the weight as it is."""
        return self._remembers

    @property
    def ever_cached(self) -> bool:
        """Whether it does in any phase."""
        return any(c.cached for c in in_turn(self))

    @property
    def touches_weight(self) -> bool:
        """Whether optimiser steps of any phase read the weight's gradient, or write the weight."""
        return any(c.observes or c.regrow is not None or c.gain for c in in_turn(self))

    @property
    def wants_weight(self) -> bool:
        """Whether optimiser steps look at the weight: to build a mask that is cached, or to count flips."""
        return self._wants_weight

    @property
    def final_ratio(self) -> float:
        """The ratio in the end; of a feedback the highest that it can come to."""
        return self.ratio_at(10**12)

    def ratio_at(self, step: int) -> float:
        """Target ratio at an optimiser step; 0 before `start`. Of a `Feedback` by loss or flips the highest that it can come to: masks know theirs."""
        if step < self.start:
            return 0.0
        return self.ratio if self.schedule is None else self.schedule.ratio_at(step - self.start, self.ratio)

    def keep_at(self, step: int, n_blocks: int) -> int:
        """Kept blocks (nnzb) of `n_blocks` at an optimiser step."""
        return keep_count(n_blocks, self.ratio_at(step))

    def soft_scale_at(self, step: int) -> float:
        """The factor of masked blocks at an optimiser step: 1 before the ramp of a soft mask, 0 from its end on; 0 without `soft`."""
        if not self.soft or not isinstance(self.schedule, Schedule):
            return 0.0
        done = (step - self.start - self.schedule.warmup) / self.schedule.ramp
        return min(1.0, max(0.0, 1.0 - done))

    @property
    def softened_from(self) -> int | None:
        """The optimiser step from which a soft mask cuts its blocks off; None without `soft`."""
        return self.start + self.schedule.warmup + self.schedule.ramp if self.soft and isinstance(self.schedule, Schedule) else None
