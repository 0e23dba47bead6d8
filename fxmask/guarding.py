"""`fxmask.guard`: the optimiser's steps move the masks, and leave masked weights as the policy says."""

from __future__ import annotations

import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from . import other_steps
from .decided import decided_by_apply, times_applied
from .kernels.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError, first_of, message
from .passes import elementwise, lost_guards, phases, pruning_schedule, ranks, rebuild
from .passes import masked_step as kept_alone
from .passes import site as state
from .passes.bypass import warn_of_dense_gradients, warn_of_dense_readers
from .passes.find import graph_modules, resolve
from .passes.optimiser import POLICIES, RETURNING, Guarded, after_step, before_step, group_of, may_freeze, note_masks, reset_returned
from .passes.saliency import observe, refuse_shard
from .passes.site import Site
from .passes.weights import peek_weight
from .pruning import scheduled_layers
from .sites import required_sites, sites, values_of
from .swap import MaskedLayer

Followed = tuple[Site, "torch.Tensor | None"]
Named = tuple[str, Site, torch.Tensor]
_AGAIN = (
    "a guard ended with fxmask.restore, and its model is masked anew",
    "call fxmask.guard(optimizer, model) again; or remove() on the handle of the old guard, if that is meant.",
)
_NEWLY = (
    "layers were masked after fxmask.guard, which does not hold them",
    "call remove() on its handle, then fxmask.guard(optimizer, model) again.",
)


class GuardHandle:
    """What `guard` gives: `policies` {parameter's name: policy}, `masked_step` as it was asked for, and `remove()`.

    A context manager, too. It ends with its optimiser, and with `restore`: masks of a later `apply` want a guard of their own, and a step without it warns.
    """

    def __init__(
        self, optimizer: Optimizer, guarded: list[Guarded], followed: list[Followed], others: list[Named], choice: str, returning: str, masked_step: bool | str,
        pruned: list[nn.Module], model: nn.Module,
    ) -> None:  # fmt: skip
        self._hooks: list[Any] = []
        self._pruned = pruned
        self.masked_step, self._under_way = masked_step, None  # type: bool | str, kept_alone.Step | None
        self._guarded, self._followed, self._others = guarded, followed, others
        self._choice, self._returning, self._token = choice, returning, object()
        self._lost: list[Named] = []  # guarded once and restored since, till somebody masks them anew
        self._model = weakref.ref(model)  # the optimiser must not keep it
        self._looked_at: set[int] = set()  # ids of sites whose first masked step has been looked at
        self._clear = "" if masked_step else elementwise.cleared_while_masked(ranks.stepping(optimizer), returning)
        self.optimizer, self.steps = weakref.ref(optimizer), 0
        self._held, self._applied = _count(optimizer), times_applied()
        self._hooks = [optimizer.register_step_pre_hook(self._before), optimizer.register_step_post_hook(self._after)]
        if masked_step:  # whoever looks after a step sees weights that have moved
            optimizer._optimizer_step_post_hooks.move_to_end(self._hooks[1].id, last=False)  # type: ignore[attr-defined]
        self._take(guarded, followed)
        for m in pruned:
            pruning_schedule.follow(m, self._token)
        other_steps.watch(self)

    def _take(self, guarded: list[Guarded], followed: list[Followed]) -> None:
        for g in guarded:
            g.site._fxmask_policy, g.site._fxmask_choice, g.site._fxmask_was, g.clear = g.policy, g.choice, None, self._clear
        for site, _ in followed:
            site._fxmask_guard = self._token
        rebuild.advance(followed, 0)

    @property
    def policies(self) -> dict[str, str]:
        """What happens to the masked part of each weight."""
        return {g.name: g.policy for g in self._guarded if self._is_ours(g.site)}

    def _is_ours(self, site: Site) -> bool:
        return site.__dict__.get("_fxmask_guard") is self._token  # neither restored since nor masked anew

    def _counts(self, m: nn.Module) -> bool:
        return m.__dict__.get("_fxmask_pruning_guard") is self._token

    def _adopt(self, optimizer: Optimizer) -> None:
        """Guard masked weights that `add_param_group` has brought since."""
        if _count(optimizer) == self._held:
            return
        self._held = _count(optimizer)
        new = [(n, s, w) for n, s, w in self._others if "_fxmask_guard" in s.__dict__ and group_of(optimizer, w) is not None and s._fxmask_policy is None]
        guarded = [_guarded(n, s, w, self._choice) for n, s, w in new]
        followed: list[Followed] = [(s, w) for _, s, w in new if s._fxmask_guard is None]
        self._guarded, self._followed = self._guarded + guarded, self._followed + followed
        self._take(guarded, followed)

    def _let_go(self) -> None:
        """Leave alone what was restored."""
        ours = [g for g in self._guarded if self._is_ours(g.site)]
        if len(ours) < len(self._guarded):
            self._lost += [(g.name, g.site, g.weight) for g in self._guarded if not self._is_ours(g.site)]
        self._guarded = ours
        self._followed = [(s, w) for s, w in self._followed if self._is_ours(s)]

    def _warn_of_new_masks(self, optimizer: Optimizer) -> None:
        """FxMaskWarning, once, where layers were masked after the guard, for the first time or again, and nobody guards them."""
        again, newly = any(decided_by_apply(w) for _, _, w in self._lost), self._applied != times_applied()
        if not (again or newly):  # what was restored is dense
            return
        self._applied = times_applied()
        model = self._model()
        found = self._lost if model is None else sites(model)
        bare = [n for n, s, w in found if s.__dict__.get("_fxmask_policy", "") is None and isinstance(w, nn.Parameter) and group_of(optimizer, w) is not None]
        self._lost = [] if again else self._lost
        if bare:
            what, fix = _AGAIN if again else _NEWLY
            what += ": expected a new guard, got none. Masked weights move, steps do not count."
            warnings.warn(message(what, first_of(bare), fix), FxMaskWarning, stacklevel=5)

    @torch.compiler.disable
    def _before(self, optimizer: Optimizer, args: Any, kwargs: Any) -> Any:
        if _is_no_step(optimizer):
            return None
        self._under_way = None  # what a step that raised has left
        self._let_go()
        self._adopt(optimizer)
        if self._lost or self._applied != times_applied():
            self._warn_of_new_masks(optimizer)
        for g in self._guarded:
            if g.site._fxmask_is_dense:
                what = "optimizer.step() inside fxmask.dense: expected masks in force."
                raise StateError(message(what, g.name, "leave the with block first."))
            if isinstance(g.weight, nn.Parameter) and g.site.__dict__.get("_parameters", {}).get("weight", g.weight) is not g.weight:
                what = "this weight's Parameter has been replaced since fxmask.guard: expected the one that is guarded, got another."
                fix = "make the optimiser of the new Parameters, then call fxmask.guard again, and fxmask.refresh(model) where masks are cached."
                raise StateError(message(what, g.name, fix))
        warn_of_dense_readers((g.name, g.site, g.weight) for g in self._guarded)
        closure = any(map(callable, (*args[1:], *kwargs.values())))
        masked_step = bool(self.masked_step and self._guarded)  # without layers the step is the optimiser's, or that of a guard that came later
        if masked_step:
            elementwise.refuse_call(optimizer, closure, self._hooks[0].id)
        for g in self._guarded:
            if closure and g.site._fxmask_config.needs_grad:
                what = "a step with a closure makes its gradients inside, where no score can see them: expected optimizer.step() without one."
                raise UnsupportedError(message(what, g.name, "use a criterion of the weight alone, without regrow by gradient."))
        for g in self._guarded:
            scale, skipped = (getattr(optimizer, name, None) for name in ("grad_scale", "found_inf"))  # a GradScaler's, of fused steps
            observe(g.site, g.weight, ranks.stepping(optimizer).state.get(g.weight, {}), g.stateless, scale, skipped)
        if masked_step:
            self._under_way = kept_alone.begin(optimizer, self._guarded, self.masked_step == "elementwise")
        else:
            before_step(optimizer, self._guarded, closure)
        note_masks(optimizer, self._guarded, zero=self._returning == "zero")
        if not closure and len(self._looked_at) < len(self._guarded):
            masked = [g for g in self._guarded if id(g.site) not in self._looked_at and g.mask is not None and state.masks_any(g.site)]
            self._looked_at.update(id(g.site) for g in masked)
            warn_of_dense_gradients(masked)
        return None if self._under_way is None else ((self._under_way.stand_in, *args[1:]), kwargs)

    @torch.compiler.disable
    def _after(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if _is_no_step(optimizer):
            return
        self.steps += 1
        if self._under_way is not None:
            kept_alone.finish(optimizer, self._under_way)
            self._under_way = None
        if not self.masked_step:
            after_step(optimizer, self._guarded)
        for g in self._guarded:
            g.stateless = g.weight.grad is not None and not ranks.stepping(optimizer).state.get(g.weight)
        rebuild.advance([(site, _now(site, weight)) for site, weight in self._followed], 1)
        for m in filter(self._counts, self._pruned):
            pruning_schedule.advance(m, 1)
        reset_returned(optimizer, self._guarded)

    def remove(self) -> None:
        """Take the guard off; masks whose configuration counts steps then want `fxmask.step`. Calling it again changes nothing."""
        for hook in self._hooks:
            hook.remove()
        other_steps.unwatch(self)
        for site in [s for s, _ in self._followed if self._is_ours(s)] if self._hooks else []:
            site._fxmask_policy, site._fxmask_guard, site._fxmask_announced = None, None, False
        for m in filter(self._counts, self._pruned) if self._hooks else []:
            pruning_schedule.follow(m, None)
        self._hooks = []

    def __del__(self, ends: Callable[[], bool] = sys.is_finalizing) -> None:
        """The hooks hold the handle, the optimiser holds the hooks: it goes when the optimiser goes. At the process's end PyTorch's modules are half gone."""
        if not ends():
            left = [(g.site, g.policy) for g in self._guarded if self._is_ours(g.site)] if self._hooks else []
            self.remove()
            for site, policy in left:  # nobody has taken it off
                site._fxmask_was = policy
                lost_guards.expect_guard(site)

    def __enter__(self) -> GuardHandle:
        return self

    def __exit__(self, *exc: object) -> None:
        self.remove()


def _count(optimizer: Optimizer) -> int:
    return sum(len(group["params"]) for group in optimizer.param_groups)


def _now(site: Site, weight: torch.Tensor | None) -> torch.Tensor | None:
    """The weight as it is after a step: a parametrised one is another tensor each time. Asked for where a mask is cached."""
    if not (site._fxmask_given.wants_weight and isinstance(site, MaskedLayer)) or (ranks.is_shard(weight) and isinstance(weight, nn.Parameter)):
        return weight
    with torch.no_grad():
        return peek_weight(site)


_STEP = elementwise.STEP


def _is_no_step(optimizer: Optimizer) -> bool:
    """Whether another step of this optimiser is running, that of a subclass which calls super().step(): the outermost alone is a step.

    Nor is the one of lr 0 and zero gradients that torch.distributed.checkpoint.state_dict takes to make an optimiser's state before it loads one.
    """
    frame, steps = sys._getframe(), 0
    while frame is not None:
        steps += frame.f_code is _STEP and frame.f_locals.get("self") is optimizer
        if frame.f_code.co_name == "_init_optim_state" and frame.f_globals.get("__name__") == "torch.distributed.checkpoint.state_dict":
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return steps > 1


def guard(
    optimizer: Optimizer, model: nn.Module, masked_weights: str = "auto", returning: str = "keep", *, masked_step: bool | str = False
) -> GuardHandle:
    """Let an optimiser's steps count, and decide what they do to masked weights. Call it once, after `apply`; again after a resume.

    Args:
        optimizer: any `torch.optim.Optimizer` that holds the masked weights; schedulers, closures, foreach and fused forms included. A step that is captured in
            a CUDA graph counts once, when it is captured. A GradScaler's skipped step counts with fused optimisers, not with others. A model whose weights
            are shared out among several optimisers takes a guard for each.
        masked_weights: `freeze`: masked elements and their momenta keep their bits. `decay`: masked elements are multiplied by 1 - lr * weight_decay of their
            group and nothing else; momenta are the optimiser's. `free`: whatever the optimiser does, as in the thesis; a decay that is coupled into an adaptive
            step then drives masked weights to zero. `auto`: freeze for backward="masked" and for "rigl" with regrow, free for the others, which live on
            moving masked weights; phases that change the mode change it. Under a soft mask masked weights learn until the ramp's end. A weight that other
            parameters make (weight_norm, pruning, a graph) moves with these: `auto` warns of it where it would freeze, and guards the others.
        returning: momenta of a block that comes back: `keep` (as they are: under freeze those of the day it left) or `zero`. Under `regrow` always zero.
            Under freeze Muon's momenta are zero while masked, whatever is asked for, because they would turn the kept blocks. `zero` does the same for
            an optimiser that is not torch.optim's: for one whose step of an element reads others, and whose state lies as the weight does. One that keeps
            its state in other coordinates (Shampoo, SOAP) wants `free`; Adafactor's factored moments and LBFGS's history are left as they are.
        masked_step: True: freeze, by a step that reads and writes the kept blocks of weights, gradients and momenta alone. For torch.optim's elementwise
            optimisers (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD); "elementwise": for a class of your own, too, whose
            step moves each element by its own gradient and state, from param_groups and self.state. Not with closures, torch.compile of the step, CUDA graphs
            around it, differentiable=True, fully_shard or ZeroRedundancyOptimizer.

    Returns: a handle with `policies`, `masked_step` and `remove()`.
    Raises: ConfigError (unknown policy; the optimiser holds none of the masked weights; masked_step with decay or free), StateError (nothing masked, or
    guarded already), UnsupportedError (freeze or decay where masked weights must move, or of a weight that another parameter makes; masked_step where it says
    not).
    Cost: during a step a copy of each guarded weight, under freeze of its momenta too; with masked_step a copy of the kept blocks instead. Nothing between
    steps. One `block_index` a layer without a cached mask; under fully_shard that gathers its weight.
    Not from a paper: the thesis (Bespalov 2025, listing 5.10) leaves masked weights to the optimiser.
    """
    for name, value, allowed in (("masked_weights", masked_weights, POLICIES), ("returning", returning, RETURNING)):
        if value not in allowed:
            raise ConfigError(f"unknown {name}: expected one of {', '.join(allowed)}, got {value!r}.")
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"fxmask.guard: expected a torch.optim.Optimizer first and the model second, got {type(optimizer).__name__}.")
    if type(masked_step) is not bool and masked_step != "elementwise":
        raise ConfigError(f"masked_step: expected True, False or 'elementwise', got {masked_step!r}.")
    if masked_step and masked_weights not in ("auto", "freeze"):
        raise ConfigError(f"masked_step leaves masked weights as they are: expected masked_weights='freeze' or 'auto' with it, got {masked_weights!r}.")
    masked_weights = "freeze" if masked_step else masked_weights
    found = required_sites(model, "fxmask.guard")
    # a wrapper that skips Optimizer.__init__ may have the dicts of hooks, and a step that never calls them
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") or not getattr(type(optimizer).step, "hooked", False):
        what = f"{type(optimizer).__name__} has no step hooks: expected an optimiser that calls Optimizer.__init__."
        raise UnsupportedError(message(what, type(optimizer).__name__, "pass the optimiser that it wraps."))
    if masked_step:
        elementwise.refuse(optimizer, masked_step == "elementwise")
    guarded, followed, others = [], [], []
    _refuse_scattered(optimizer, found)
    for name, site, weight in found:
        held = weight is not None and group_of(optimizer, weight) is not None
        derived = weight is None or not isinstance(weight, nn.Parameter)
        if held and weight is not None:
            guarded.append(_guarded(name, site, weight, masked_weights, bool(masked_step)))
            if masked_step:
                elementwise.refuse_shard(name, weight)
        elif derived and masked_weights in ("freeze", "decay"):
            what = f"masked_weights={masked_weights!r} of a weight that other parameters make: expected a Parameter of the layer."
            raise UnsupportedError(message(what, name, "use masked_weights='free', or exclude the layer from fxmask.apply."))
        if not held and weight is not None and not derived:
            others.append((name, site, weight))
        if held or ((derived or (weight is not None and not weight.requires_grad)) and site._fxmask_guard is None):
            if site._fxmask_config.cached and weight is not None:
                state.check_agreed(site, values_of(name, weight, "fxmask.guard"))
            followed.append((site, weight))
    if not guarded and not followed:
        what = "the optimiser holds none of the masked weights: expected one that was built from this model's parameters."
        raise ConfigError(message(what, ", ".join(name for name, _, _ in found[:3]), "pass the optimiser that steps this model."))
    free = [m for _, m in scheduled_layers(model) if m.__dict__["_fxmask_pruning_guard"] is None]
    pruned = [m for m in free if any(group_of(optimizer, p) is not None for p in m.parameters())]
    if masked_weights == "auto":
        _warn_of_made_weights(optimizer, model, found)
    return GuardHandle(optimizer, guarded, followed, others, masked_weights, returning, masked_step, pruned, model)


def _refuse_scattered(optimizer: Optimizer, found: list[tuple[str, Site, torch.Tensor | None]]) -> None:
    """UnsupportedError where each process has the momenta of a part of the weights, and a mask by them would differ between processes."""
    by_momenta = [name for name, site, _ in found if any(c.criterion == "momentum" for c in phases.in_turn(site._fxmask_given))]
    if by_momenta and ranks.several() and ranks.stepping(optimizer) is not optimizer:
        what = f"criterion='momentum' under {type(optimizer).__name__}, which leaves each rank the momenta of its share: expected all of them on each."
        fix = "use criterion='gradient' with average=0.9, which every rank computes for itself; or a plain optimiser under DistributedDataParallel."
        raise UnsupportedError(message(what, first_of(by_momenta), fix))


def _warn_of_made_weights(optimizer: Optimizer, model: nn.Module, found: list[tuple[str, Site, torch.Tensor | None]]) -> None:
    """FxMaskWarning where `auto` would freeze a weight that is no Parameter, and the optimiser moves what it is made of."""
    made = [(name, site) for name, site, w in found if not isinstance(w, nn.Parameter) and any(map(may_freeze, phases.in_turn(site._fxmask_given)))]
    left = [name for name, site in made if any(p.requires_grad and group_of(optimizer, p) is not None for p in _makers(model, site))]
    if left:
        what = "weights that other parameters make (by a parametrisation, a pruning or a graph) cannot be guarded: the optimiser moves what they are computed"
        what += " from, and their masked weights with it."
        fix = "remove that before fxmask.apply (torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove), or exclude the layer; "
        warnings.warn(message(what, first_of(left), fix + "masked_weights='free' says that it is meant."), FxMaskWarning, stacklevel=3)


def _makers(model: nn.Module, site: Site) -> Iterator[nn.Parameter]:
    """The parameters that a weight is computed from: those of its layer but the bias, or those that its graph reads for it."""
    if isinstance(site, MaskedLayer):
        yield from (p for name, p in site.named_parameters() if name != "bias" and not name.startswith(("bias_", "parametrizations.bias.")))
        return
    for _, gm in graph_modules(model):
        todo, seen = [n for n in gm.graph.nodes if n.op == "call_module" and gm.get_submodule(str(n.target)) is site], set()
        while todo:
            for node in todo.pop().all_input_nodes:
                if node in seen:
                    continue
                seen.add(node)
                todo.append(node)
                if node.op in ("get_attr", "call_module"):
                    maker = resolve(gm, str(node.target))
                    yield from [maker] if isinstance(maker, nn.Parameter) else maker.parameters() if node.op == "call_module" else ()


def masked_step_of(optimizer: Optimizer) -> list[torch.Tensor]:
    """The weights that an optimiser steps on kept blocks alone, because its guard says so."""
    hooks = getattr(optimizer, "_optimizer_step_pre_hooks", {}).values()
    handles = [h for h in (getattr(hook, "__self__", None) for hook in hooks) if isinstance(h, GuardHandle) and h.masked_step]
    return [g.weight for h in handles for g in h._guarded if h._is_ours(g.site)]


def _guarded(name: str, site: Site, weight: torch.Tensor, masked_weights: str, masked_step: bool = False) -> Guarded:
    moving = [c.backward for c in phases.in_turn(site._fxmask_given) if not may_freeze(c)]  # in any phase
    refuse_shard(site, weight)
    if site._fxmask_policy is not None:
        what = f"this weight is guarded already (policy {site._fxmask_policy!r}): expected one guard for a masked weight."
        raise StateError(message(what, name, "call remove() on the first handle."))
    if masked_weights == "freeze" and moving:
        asked, fix = ("masked_step=True", "leave masked_step out.") if masked_step else ("masked_weights='freeze'", "use masked_weights='auto' or 'free'.")
        what = f"{asked} with backward={moving[0]!r} would cancel it: its masked weights must move. expected 'masked', or 'free'."
        raise UnsupportedError(message(what, name, fix))
    return Guarded(name, site, weight, masked_weights)
