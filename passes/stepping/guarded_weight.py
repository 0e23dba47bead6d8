"""One masked weight in an optimiser: the policy of its masked part, and what is kept of it during a step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from ..settings.config import WeightMask
from ..state import ranks
from ..state.lost_guards import KEPT
from ..state.site import Site
from .momenta import NO_MOMENTA, word

if TYPE_CHECKING:
    from . import gathered, set_aside

POLICIES = ("auto", *KEPT, "free")
RETURNING = ("keep", "zero")
EVERY = "*"


def policy_of(config: WeightMask, policy: str) -> str:
    """What `auto` means: freeze where masked weights get no gradient or start anew when they return, free where the mode lives on it."""
    if policy != "auto":
        return policy
    return "freeze" if may_freeze(config) else "free"


def may_freeze(config: WeightMask) -> bool:
    """Whether frozen masked weights leave the mode its sense: not where it waits for them to move."""
    return config.backward == "masked" or (config.backward == "rigl" and config.regrow is not None)


@dataclass
class Guarded:
    """One masked weight in an optimiser, and what its step must not overwrite."""

    name: str
    site: Site
    weight: Tensor
    choice: str  # what the guard was asked for
    clear: str = ""  # under freeze: which state is zero while masked, instead of keeping its bits: one key, or EVERY
    mask: Tensor | None = None
    block: tuple[int, int] = (1, 1)  # of that mask
    before: Tensor | None = None
    momenta: dict[str, Tensor] = field(default_factory=dict)
    aside: list[set_aside.Kept] | None = None  # in place of `before`: what kernels set aside, of all weights; `momenta` are the optimiser's own tensors then
    gathered: gathered.Gathered | None = None  # in place of `before`: what masked blocks held, as `momenta` is then, too
    gradient: Tensor | None = None  # whole, where the step was given that of kept blocks alone
    last: tuple[Tensor, tuple[int, int]] | None = None  # mask and block before the step, where blocks that return have no momenta
    had_gradient: bool = False  # before the step, which may take it away
    by_grad: bool = True  # whether the optimiser surely moves it by its gradient alone
    averages: frozenset[str] = frozenset()  # what the optimiser calls averages of gradients
    by_momenta: bool = False  # its mask goes by them, in some phase
    stateless: bool = False  # such a mask's: the last step moved the weight, and the optimiser has no state for it
    found: tuple[Tensor, Any, Any] | None = None  # by `gathered.blocks_of`: of which cached mask, what else it holds for, and where the blocks lie

    def clears(self, key: str) -> bool:
        """Whether this state is zero while masked."""
        return word(key) == self.clear or (self.clear == EVERY and word(key) not in NO_MOMENTA)

    def forget(self) -> None:
        """Let go of what the step was not to overwrite."""
        self.mask = self.before = self.gradient = self.aside = self.gathered = None
        self.momenta = {}

    @property
    def copied(self) -> bool:
        """Whether it holds what a step must not overwrite: the step is under way, or has raised."""
        return self.before is not None or self.aside is not None or self.gathered is not None

    @property
    def moved(self) -> bool:
        """After a step: whether it may have moved, by the gradient that it has by now, which a closure makes inside, or by whatever some optimisers use."""
        return not self.by_grad or self.weight.grad is not None

    @property
    def into(self) -> Tensor:
        """The weight, or this process's part, to write back into.

        One without a gradient before the step may not have moved, and keeps its version: who still needs it for a backward must not take it for another one.
        """
        part = ranks.part(self.weight)
        return part if self.had_gradient else part.data

    @property
    def policy(self) -> str:
        """Of the step that is next: `auto` follows the backward mode from phase to phase."""
        return policy_of(self.site._fxmask_config, self.choice)
