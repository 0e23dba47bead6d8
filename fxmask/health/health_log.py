"""Whether dynamic masks are alive: what moved, what never does, what nobody reads any more."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ..kernels.errors import ConfigError, StateError, message, warn
from ..kernels.grid import grid_shape, plain_int
from ..passes.settings.phases import in_turn
from ..passes.state import ranks
from ..passes.state import site as state
from ..passes.state.saliency import GIVEN
from ..passes.state.site_mask import mask_outside
from ..report import Report
from ..sites import required_sites, sites_in_force, values_of
from .health_checks import fits
from .health_file import appended, keep_until, log_path, rows_of, write
from .health_plots import curves, heatmaps
from .health_signs import signs

STILL = 10  # updates without any flip after which a mask that could move is said to stand still


class HealthLog:
    """Follows the masks of a model from update to update; call `update()` once an epoch, or every so many steps.

    A row a masked weight (but of one without elements) and update: kept blocks and ratio; flips (blocks that changed place since the last update; a change of
    the ratio alone moves blocks, too), flip_rate (of the blocks), flips_total; age_mean and age_max (updates since a block last changed, over blocks);
    never_kept (share of blocks that no update has seen kept); kept_norm_fraction (||W∘M||^2 / ||W||^2); dead_rows and dead_cols (shares of output and input
    features without a kept block).

    Where a phase changes a layer's blocks, or a layer of another shape takes its place, its ages, activity and never_kept begin anew with the next update,
    which counts no flips; flips_total goes on.

    Args:
        model: one that `fxmask.apply` has changed. path: a csv that every update appends to, or None; a file that is there is taken up by `load_state_dict`
            alone, which drops the rows of later updates.
        still: updates without a flip, at a constant ratio, after which a warning says once that a mask that could move has stopped; of a cached mask those
            since which it was built anew, of a weight that rests (requires_grad=False) none.

    `activity`: {name: int64 [NB, KB]}, how many updates saw each block kept: figure 6.6 of Bespalov 2025 when called after every step. `report()`: the latest
    rows. `plot(path)` and `heatmap(path, name)` need matplotlib. `state_dict()` and `load_state_dict()` carry it over a resume.
    Raises: StateError without masks, and of an update inside `fxmask.dense`; UnsupportedError for meta weights, ConfigError.
    Cost of an update: one `block_index` a layer that has no cached mask, one pass over each weight, and a host sync; nothing between updates, and no hooks.
    """

    def __init__(self, model: nn.Module, path: str | Path | None = None, still: int = STILL) -> None:
        known = plain_int(still)
        if known is None or known < 1:
            raise ConfigError(f"HealthLog: still counts updates: expected an int of at least 1, got {still!r}.")
        self.model, self.still = model, known
        self.updates, self.rows = 0, list[dict[str, Any]]()
        self.activity: dict[str, Tensor] = {}
        self._last: dict[str, dict[str, Any]] = {}
        self._said: set[tuple[str, str]] = set()
        required_sites(model, "fxmask.HealthLog")
        self.path = log_path(path)

    @torch.no_grad()
    def update(self) -> Report:
        """Look at the masks as the next forward will use them; append rows, warn where a layer has died, a mask stands still or a weight is not finite."""
        if not self.updates and self.path is not None and self.path.exists() and self.path.stat().st_size:
            what = f"HealthLog: {self.path} holds the rows of another run: expected a new file, or a log that goes on by load_state_dict."
            raise StateError(message(what, fix="name another path, or load the state of the log that has written it."))
        found = []  # before anything is counted, as this, and a file that cannot be opened, may raise
        for name, site, weight in sites_in_force(self.model, "HealthLog.update"):
            w = values_of(name, weight, "HealthLog.update").detach()
            if w.numel():
                rests = isinstance(weight, nn.Parameter) and not weight.requires_grad
                found.append((name, site, w, mask_outside(site, w).to("cpu", copy=True), rests))  # a cached one may be rewritten in place
        with nullcontext() if self.path is None else appended(self.path) as file:
            self.updates += 1
            looked = [self._row(name, site, ranks.whole(w), mask, rests) for name, site, w, mask, rests in found]  # whole weights one at a time
            rows = [row for row, _ in looked]
            self.rows += rows
            if file is not None:
                write(file, rows)
        for row, told in looked:  # last, as a filter may make them errors
            self._warn(row["name"], *told)
        return self.report()

    def _row(self, name: str, site: state.Site, w: Tensor, mask: Tensor, rests: bool) -> tuple[dict[str, Any], tuple[bool, int, float, float]]:
        """A row, and what `_warn` asks of it."""
        last = self._since_blocks(name, mask, site._fxmask_config.block)
        changed = mask != last["mask"]
        flips = int(changed.sum())
        last["age"] = torch.where(changed, 0, last["age"] + (self.updates > last["since"]))
        last["flips"] += flips
        active = self.activity[name]
        active += mask
        config, block = site._fxmask_config, site._fxmask_config.block
        now, held, total = signs(w, mask, block)
        anew = not config.cached or site._fxmask_built != last.get("built")  # one that nothing has built since cannot have moved
        last["quiet"] = last["quiet"] + anew if not flips and self.updates > last["since"] else 0
        last["mask"], last["built"] = mask, site._fxmask_built
        row = {
            "update": self.updates,
            "step": site._fxmask_step,
            "name": name,
            "blocks": mask.numel(),
            "kept": int(mask.sum()),
            "ratio": 1 - float(mask.double().mean()),
            "flips": flips,
            "flip_rate": flips / mask.numel(),
            "flips_total": last["flips"],
            "age_mean": float(last["age"].double().mean()),
            "age_max": int(last["age"].max()),
            "never_kept": float((active == 0).double().mean()),
            **now,
        }
        moves = config.refresh != 0 and config.criterion != GIVEN and row["kept"] < row["blocks"] and not rests
        return row, (moves, last["quiet"], held, total)

    def _since_blocks(self, name: str, mask: Tensor, block: tuple[int, int]) -> dict[str, Any]:
        """What is known of a layer since it has these blocks: nothing at its first update, and at the first one in others or of another size."""
        last = self._last.get(name)
        if last is None or tuple(last["block"]) != block or last["mask"].shape != mask.shape:
            zeros, flips = torch.zeros_like(mask, dtype=torch.int64), 0 if last is None else last["flips"]
            last = self._last[name] = {"mask": mask, "age": zeros, "flips": flips, "quiet": 0, "block": list(block), "since": self.updates}
            self.activity[name] = zeros.clone()
        return last

    def _warn(self, name: str, moves: bool, quiet: int, held: float, total: float) -> None:
        if moves and quiet >= self.still:
            what = f"the mask of {name} has stopped moving: no block changed place in {quiet} updates, though it is built anew."
            fix = "a ramp of the ratio, backward='ste' or 'rigl', or cover=True are ways out; refresh=0 keeps it on purpose."
            self._once("still", name, f"{what} Masks by magnitude let go of nothing once masked weights rest; {fix}")
        if not math.isfinite(total):
            what = f"the weight {name} is not finite: expected a finite sum of squares, got {total}"
            where = "in masked blocks alone" if math.isfinite(held) else "in kept blocks, so that the layer's output is not finite either"
            self._once("finite", name, f"{what}, {where}. Go back to a checkpoint from before it.")
        if not held:
            self._once("dead", name, f"the layer of {name} has died: its kept blocks hold 0 of the weight's norm. Its output is its bias alone.")

    def _once(self, what: str, name: str, words: str) -> None:
        if (what, name) not in self._said:
            self._said.add((what, name))
            warn(words)

    def report(self) -> Report:
        """The rows of the latest update; totals in the summary."""
        rows = [r for r in self.rows if r["update"] == self.updates]
        blocks, flips = sum(r["blocks"] for r in rows), sum(r["flips"] for r in rows)
        summary = {"updates": self.updates, "blocks": blocks, "flips": flips, "flip_rate": flips / blocks if blocks else None}
        return Report("fxmask.HealthLog", rows, summary=summary)

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain numbers, which `torch.load(weights_only=True)` reads."""
        last = {n: {**e, "mask": e["mask"].clone(), "age": e["age"].clone(), "block": list(e["block"])} for n, e in self._last.items()}
        return {"updates": self.updates, "last": last, "activity": {n: a.clone() for n, a in self.activity.items()}}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """Go on where a saved log stopped; StateError for what is none, or one of other weights, and where the file of the path is no log's."""
        found = {name: site for name, site, _ in required_sites(self.model, "HealthLog.load_state_dict")}
        grids = {name: {grid_shape(s._fxmask_shape, c.block) for c in in_turn(s._fxmask_given)} for name, s in found.items()}
        if not fits(saved, grids):
            what = "HealthLog.load_state_dict: expected what state_dict returned for this model's masks, got other keys, names or shapes."
            raise StateError(message(what, fix="make the log of the same model, masked with the same blocks."))
        rows = rows_of(self.path) if self.path is not None and self.path.exists() else None
        held = {n: {**e, "mask": e["mask"].cpu(), "age": e["age"].cpu()} for n, e in saved["last"].items()}  # torch.load(map_location=...) may have moved them
        self.updates, self._last = saved["updates"], {n: {"block": found[n]._fxmask_config.block, "since": 1, **e} for n, e in held.items()}
        self.activity = {n: a.detach().to("cpu", copy=True) for n, a in saved["activity"].items()}
        self.rows = [r for r in self.rows if r["update"] <= self.updates]  # later ones will be made again
        if self.path is not None and rows is not None:
            keep_until(self.path, rows, self.updates)

    def plot(self, path: str | Path) -> Path:
        """Flip rate, kept share of the squared norm, and dead rows of every layer over the updates of this process."""
        return curves(self.rows, path)

    def heatmap(self, path: str | Path, names: str | Sequence[str] | None = None) -> Path:
        """How often each block was kept, one picture a layer (figure 6.6 of Bespalov 2025); `names`: of some weights, or of one."""
        names = [names] if isinstance(names, str) else names
        if names is not None and not isinstance(names, (list, tuple)):
            raise ConfigError(f"heatmap: expected a name of a weight, or a list of names, got {names!r}.")
        unknown = [n for n in names or [] if not isinstance(n, str) or n not in self.activity]
        if unknown or not self.activity:
            raise ConfigError(f"heatmap: expected names among {', '.join(self.activity) or '(no update yet)'}, got {unknown or 'a log without updates'}.")
        seen = {n: 1 + self.updates - self._last[n]["since"] for n in names or self.activity}
        return heatmaps({n: self.activity[n] / updates for n, updates in seen.items()}, path)
