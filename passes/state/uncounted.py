"""Forwards of masks that depend on steps which nobody counts: an error in training, in an evaluation a warning where the mask is out of date.

So it is with a copy that averages the weights of a run: it is never stepped, and what moves its weights tells nobody.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ...kernels.errors import StateError, message, warn
from ..finding.weights import is_ensemble
from ..settings import phases
from . import site as state
from . import site_mask, tensors
from .site import Site

STALE = "a mask of weights that it no longer has: refresh counts steps, none was told since they were written."
REFRESH = "call fxmask.refresh(model); an average of a run's weights takes the run's masks by fxmask.load_state_dict(average, fxmask.state_dict(model))."


def uncounted(site: Site) -> bool:
    """Whether the mask counts steps that nobody tells."""
    return site._fxmask_given.needs_steps and (site._fxmask_copied or not site._fxmask_announced)


def nobody_counts(site: Site, weight: Tensor) -> None:
    """StateError in training where no step source was announced; in evaluations, as a teacher's forwards without gradients are, FxMaskWarnings."""
    if site.training and not site._fxmask_announced:
        fix = "call fxmask.guard(optimizer, model), or fxmask.step(model, 0) once before training and fxmask.step(model) after every optimizer.step()."
        fix += " A guard counts what its optimiser holds and what rests: a weight that nobody is to train, as beneath a new head, wants"
        fix += " requires_grad_(False) before that; one that its optimiser was given after that wants fxmask.step(model, 0), once."
        fix += " A run that is resumed takes up its steps by fxmask.load_state_dict first."
        if not (torch.is_grad_enabled() and weight.requires_grad):  # step(model, 0) alone would leave it at its first ratio
            fix += " A copy that nobody trains (a target, an average, a momentum teacher) takes the run's, after each step of the run:"
            fix += " fxmask.load_state_dict(copy, fxmask.state_dict(model)), then fxmask.step(copy, 0)."
        what = "start, schedule, refresh > 1, hysteresis, phases, regrow, gain, backward='rigl' and criteria of gradients, momenta or averages count optimiser"
        what += " steps: expected a step source before training, got none."
        raise StateError(message(what, site._fxmask_name, fix))
    if torch.compiler.is_compiling():  # before the step is read, which would recompile whenever it moves
        return
    if site.training and torch.is_grad_enabled():  # a copy that goes on, and may be stepped after this
        return
    warn_of_steps(site, weight)
    if is_stale(site, weight):
        warn(message(f"a masked model is evaluated with {STALE}", site._fxmask_name, REFRESH))


def warn_of_steps(site: Site, weight: Tensor | None) -> None:
    """FxMaskWarning where steps would make the ratio, or the phase, another one; not where its own steps have brought it, as between two guards."""
    noted = site._fxmask_version
    moved = weight is not None and noted is not None and state.version(weight) != noted  # since, and nobody has told a step
    if site._fxmask_is_dense or (site._fxmask_step and not site._fxmask_copied and not moved):
        return
    c, given = site._fxmask_config, site._fxmask_given
    now = c.ratio_at(site._fxmask_step)
    if phases.to_come(given, site._fxmask_step, ("block", "criterion", "ties", "cover")):
        what = f"a masked model with phases is evaluated in its phase of step {site._fxmask_step}, in blocks of {c.block}: phases count steps, none was told"
        warn(f"{what} (fxmask.step).")
    if now != given.final_ratio:
        warn(f"a masked model is evaluated at ratio {round(now, 6)}, not {given.final_ratio}: start or schedule count steps, none was told (fxmask.step).")


def is_stale(site: Site, weight: Tensor) -> bool:
    """Whether a cached mask is another one than its weight's, which has been written since. Told once for each write; what leaves no version is not seen."""
    mask, begun = site._fxmask_mask, site._fxmask_step >= site._fxmask_config.start
    if mask is None or mask.is_meta or not begun or site._fxmask_is_dense or is_ensemble(weight) or tensors.capturing(weight):
        return False
    version, made = state.version(weight), site._fxmask_version
    site._fxmask_version = version
    if version is None or made is None or version == made:
        return False
    if site._fxmask_own is not None or site._fxmask_config.refresh == 0:  # masks for good, of whatever weights
        return False
    if site._fxmask_config.remembers:  # its scores are those of the copy's beginning: what it would be now nobody knows
        return site._parameters.get("weight") is weight
    site_mask.fits(site, weight)
    with torch.no_grad():
        return not torch.equal(site_mask.build(site, weight.detach()), mask)
