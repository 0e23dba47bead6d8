"""What moves a feedback's ratio: reported losses, and looks at the masks every so many optimiser steps. The rules are in `passes.settings.feedback`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...kernels.errors import message, warn
from ..state import tensors
from ..state.site import Site
from ..state.site_mask import mask_outside
from .checks import is_number
from .feedback import Feedback, Progress, held

SILENT = 10_000  # optimiser steps without any report of a loss, after which a warning says so


def feedback_of(site: Site, measure: str) -> Feedback | None:
    """The feedback of a mask, where it has one by this measure."""
    schedule = site._fxmask_given.schedule
    return schedule if isinstance(schedule, Feedback) and schedule.measure == measure else None


def undecided(site: Site) -> bool:
    """Whether a feedback had nothing to decide by yet: no mean of reported losses, no two looks. Its ratio is the first one then, whatever was trained."""
    f, p = site._fxmask_given.schedule, site._fxmask_progress
    return isinstance(f, Feedback) and p is not None and p.best is None and p.level == 0 and f.levels(site._fxmask_given.ratio) > 0


def take(site: Site) -> None:
    """An optimiser's step is taken: what was decided since the last one comes into force."""
    p = site._fxmask_progress
    if p is not None and p.level != p.next:
        _move(site, p._replace(level=p.next))


def _move(site: Site, p: Progress) -> None:
    site._fxmask_progress = p
    site._fxmask_config = held(site._fxmask_config, site._fxmask_given, p)


def report(site: Site, loss: float) -> float:
    """Take up a finite loss; not before `start`, where it is the dense model's. Returns the ratio of the optimiser's next step."""
    f, p, given = feedback_of(site, "loss"), site._fxmask_progress, site._fxmask_given
    assert f is not None and p is not None
    target = given.ratio
    if site._fxmask_step < given.start:
        return f.ratio_of(p.next, target) if site._fxmask_step + 1 >= given.start else 0.0
    p = p._replace(total=p.total + loss, told=p.told + 1)
    if p.told == f.every:
        mean = p.total / p.told
        level = p.next + (1 if f.rises(mean, p.best) else -1)
        p = Progress(p.level, min(max(level, 0), f.levels(target)), mean if p.best is None else min(mean, p.best))
    site._fxmask_progress = p
    return f.ratio_of(p.next, target)


def _crossed(site: Site, before: int, every: int) -> bool:
    start, now = site._fxmask_given.start, site._fxmask_step
    return now >= start and (now - start) // every > (before - start) // every


@torch.inference_mode(False)
@torch.no_grad()
def look(found: Sequence[tuple[Site, Tensor | None, int]]) -> None:
    """Masks, their weights, and the step before: where a look is due, count the blocks that changed place since the last one, and let ratios rise.

    A host sync where there was a look before.
    """
    found = [t for t in found if isinstance(t[0]._fxmask_given.schedule, Feedback)]
    if not found:
        return
    _warn_of_silence([site for site, _, before in found if _crossed(site, max(before, site._fxmask_given.start), SILENT)])
    due: list[tuple[Site, Feedback, Tensor]] = []
    for site, weight, before in found:
        f = feedback_of(site, "flip_rate")
        if f is None or weight is None or weight.is_meta or site._fxmask_is_dense or not _crossed(site, before, f.every):
            continue
        mask, old = mask_outside(site, weight.detach()), site._fxmask_looked
        site._fxmask_looked = mask.clone()  # one that is cached may be rewritten in place
        if old is not None:
            due.append((site, f, (mask != old).sum() - (mask.sum() - old.sum()).abs()))  # a change of the ratio alone is no flip
    flips = torch.stack([t.to(due[0][2].device) for _, _, t in due]).tolist() if due else []
    rise: list[Site] = []
    for (site, f, _), n in zip(due, flips, strict=True):
        p, share = site._fxmask_progress, n / max(1, site._fxmask_blocks)
        assert p is not None and f.goal is not None
        site._fxmask_progress = p = p._replace(best=share if p.best is None else min(share, p.best))
        if share < f.goal:
            level = min(p.level + 1, f.levels(site._fxmask_given.ratio))
            _move(site, p._replace(level=level, next=level))
            rise.append(site)
    tensors.sync(*rise)


def _warn_of_silence(sites: list[Site]) -> None:
    names = [s._fxmask_name for s in sites if feedback_of(s, "loss") is not None and s._fxmask_progress == Progress()]
    if names and sites[0]._fxmask_step - sites[0]._fxmask_given.start < 2 * SILENT:  # once
        what = f"no loss was reported in {SILENT:,} optimiser steps, so the ratio of Feedback('loss') stays at its first value."
        warn(message(what, names[0], "call fxmask.feedback(model, loss) after each validation."))


# ---- to save and to load -----------------------------------------------------------------------------------------------------------------------------------


def saved(site: Site) -> dict[str, Any]:
    """What a state holds of a feedback: nothing where none has anything to remember."""
    p, looked = site._fxmask_progress, site._fxmask_looked
    return {} if p is None else {"feedback": {**p._asdict(), "looked": None if looked is None else looked.detach().clone()}}


def wrong(site: Site, entry: Any, grid: tuple[int, int]) -> Iterator[str]:
    """What no run can have saved of a feedback; for the first error alone."""
    if site._fxmask_progress is None:
        if entry is not None:
            yield f"feedback: expected none, got {type(entry).__name__}"
        return
    if not isinstance(entry, dict) or set(entry) != {*Progress._fields, "looked"}:
        yield f"feedback: expected a dict with {', '.join(Progress._fields)} and looked, got {sorted(entry) if isinstance(entry, dict) else entry!r}"
    f = site._fxmask_given.schedule
    assert isinstance(f, Feedback)
    ranges = {"level": f.levels(site._fxmask_given.ratio), "next": f.levels(site._fxmask_given.ratio), "told": f.every - 1}
    for key, most in ranges.items():
        if type(entry[key]) is not int or not 0 <= entry[key] <= most:
            yield f"feedback.{key}: expected an int from 0 to {most}, got {entry[key]!r}"
    for key in ("best", "total"):
        if not (is_number(entry[key]) or (key == "best" and entry[key] is None)):
            yield f"feedback.{key}: expected a finite number, got {entry[key]!r}"
    t = entry["looked"]
    if t is not None and (not isinstance(t, Tensor) or t.dtype != torch.bool or tuple(t.shape) != grid or t.is_meta):
        yield f"feedback.looked: expected None or a mask of {grid}, got {type(t).__name__}"


def load(site: Site, entry: dict[str, Any] | None) -> None:
    """Take up what `saved` gave."""
    if entry is not None:
        _move(site, Progress(**{k: entry[k] for k in Progress._fields}))
        looked = entry["looked"]
        site._fxmask_looked = None if looked is None else looked.to(device=site._fxmask_keep.device).clone()
