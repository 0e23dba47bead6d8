"""The optimiser's step: one pass over the parameters that are trained, their gradients and its state; of kept blocks alone under `guard(masked_step=True)`."""

from __future__ import annotations

from typing import Any

import torch

from ..guards.guard_handle import masked_step_of
from ..kernels import dense_cost, layer_cost
from ..kernels.cost import Cost
from ..kernels.errors import ConfigError, message
from ..kernels.grid import clipped, grid_shape, matrix_shape
from ..passes.counting.masked_rules import implementation
from ..passes.counting.recording import Recording
from ..passes.counting.work import EXACT, Target, Work
from ..passes.stepping.held import ids_of
from .tables import masks_of

# tensors of a parameter's size that an optimiser keeps, by the class's name in torch.optim
STATES = {"adamw": 2, "adam": 2, "nadam": 2, "radam": 2, "adamax": 2, "adadelta": 2, "sgd": 0, "sgd_momentum": 1, "adagrad": 1, "rmsprop": 1, "lion": 1}


def kind_of(optimizer: str | torch.optim.Optimizer | None) -> tuple[str, int]:
    """(name, tensors of state a parameter); ConfigError for one that is not known. An instance of SGD has momentum where any of its groups has."""
    if optimizer is None:
        return "none", 0
    if isinstance(optimizer, torch.optim.Optimizer):
        name = type(optimizer).__name__.lower()
        if name == "sgd" and any(g.get("momentum") for g in optimizer.param_groups):
            name = "sgd_momentum"
        options = ("amsgrad", "momentum", "centered") if name == "rmsprop" else ("amsgrad",)
        extra = sum(any(g.get(option) for g in optimizer.param_groups) for option in options)
    else:
        name, extra = str(optimizer).lower(), 0
    if name not in STATES:
        got = f"an instance of {type(optimizer).__name__}" if isinstance(optimizer, torch.optim.Optimizer) else repr(optimizer)
        what = f"optimizer: expected one of {', '.join(STATES)}, an instance of one of them, or None, got {got}."
        raise ConfigError(message(what, fix="name the one that keeps as many tensors of state: optimizer='sgd' keeps none, 'lion' one, 'adamw' two."))
    return name, STATES[name] + extra


def dense_step(size: int, states: int) -> Cost:
    """One pass over a parameter of `size` bytes.

    Compulsory and requested B: w, dw and `states` tensors of its size read; w and states written
    """
    state = {"opt_state": states * size} if states else {}
    return dense_cost.stream({"w": size, "dw": size} | state, {"w": size} | state)


def masked_step(shape: tuple[int, int], block: tuple[int, int], nnzb: int, kept: int, itemsize: int, states: int, cached: bool, triton: bool) -> Cost:
    """A step on the `kept` elements of a weight (N, K) that lie in `nnzb` kept blocks, with s = states tensors of state, b bytes an element.

    Gathered      w, dw, s states: b kept each read from where they lie, and written as `compact`
    Step          compact: (2 + s) b kept read, (1 + s) b kept written
    Scattered     compact: (1 + s) b kept read; w, s states: b kept each written
    Runs          a kept block is one run of elements a row, R of them: 8 B each written once, and read by each gather and scatter; where ragged columns leave
                  rows that runs do not fill, 24 written, and 16 read by a scatter. Of a cached mask they are found once, and counted in each step
    Mask          NB KB B read; at ragged edges expanded to N KB B, written and read (on a CPU always, which is not counted); where it is not cached the guard
                  builds it anew, from all of w
    In sum        (9 + 6 s) b kept, runs and mask; a dense step has (3 + 2 s) b N K
    On a GPU the last run at a ragged edge is moved more than once instead, in shorter runs and without an expanded mask (`passes.stepping.kept_blocks`):
    not counted.
    Compulsory and requested B are the same; `compact` and `runs` stay in a cache that is large enough for them.
    """
    (n, k), (height, width), piece = shape, clipped(block, shape), itemsize * kept
    ragged = k % width != 0
    runs = nnzb * height if ragged else kept // width  # at most, in ragged columns
    state = {"opt_state": states * piece} if states else {}
    compact = {"compact": (3 + 2 * states) * piece}
    grid = grid_shape(shape, block)
    expanded = n * grid[1] if ragged or n % height else 0
    asked = 8 * runs * (2 + states + (1 + states) * (2 if ragged else 1))
    reads = {"w": piece, "dw": piece, **state, **compact, "runs": asked, "mask": grid[0] * grid[1] + expanded}
    found = dense_cost.stream(reads, {"w": piece, **state, **compact, "runs": (24 if ragged else 8) * runs} | ({"mask": expanded} if expanded else {}))
    return found if cached else found + layer_cost.block_index(shape, block, itemsize, triton)


def step(recording: Recording, optimizer: str | torch.optim.Optimizer | None, works: list[Work], masked: bool | None, target: Target) -> list[Work]:
    """A row for each parameter: reads it, its gradient and its state, writes it and the state; all of the parameter's dtype, masked weights included.

    An instance steps what it was given, a name all parameters; those without a gradient stay, as torch.optim leaves them. masked: whether weights whose
    masked parts may stay are stepped on kept blocks alone; None: those that the optimiser's guard says. `works` knows their masks.
    """
    if optimizer is None:
        return []
    name, states = kind_of(optimizer)
    instance = optimizer if isinstance(optimizer, torch.optim.Optimizer) else None
    given = None if instance is None else set(ids_of(instance))
    if given is not None and recording.parameters and not any(id(p) in given for p in recording.parameters.values()):
        what = f"optimizer: expected one that holds parameters of the analysed model, got {type(instance).__name__} of {len(given)} others."
        raise ConfigError(message(what, "", "make it of model.parameters(), or name its kind (optimizer='adamw')."))
    guarded = {id(p) for p in masked_step_of(instance)} if instance is not None and masked is None else set()
    masks, found = masks_of([w for w in works if w.phase == "fwd"], recording), []
    for parameter, p in recording.parameters.items():
        if parameter not in recording.trained or (given is not None and id(p) not in given):
            continue
        dtype = recording.dtype if recording.dtype and p.is_floating_point() else p.dtype
        row = Work(None, "opt", EXACT, dense_step(recording.size(p), states), dtype=dtype, weight=parameter, elements=p.numel(), name=f"optim.{name}")
        found.append(row)
        (block, nnzb, kept), site = masks.get(parameter, (None, None, 0)), recording.sites.get(parameter)
        if site is None or block is None or nnzb is None or kept == p.numel():
            continue
        c = site._fxmask_config
        if id(p) in guarded or (masked is True and c.backward == "masked"):
            triton = implementation(c.impl, target) == "triton"
            row.dense, row.cost = row.cost, masked_step(matrix_shape(p.shape), block, nnzb, kept, dtype.itemsize, states, c.cached, triton)
            row.block, row.nnzb, row.kept, row.impl, row.launches = block, nnzb, kept, "masked_step", 4 + 2 * states  # gathers, a step, scatters
    return found


def saved(works: list[Work]) -> dict[str, dict[str, int]]:
    """What a masked step moves of all parameters, and what a dense one would: {"optimizer_bytes": {dense, masked, saved}}; nothing where no step is masked."""
    rows = [w for w in works if w.phase == "opt"]
    if not any(w.dense for w in rows):
        return {}
    dense, masked = sum((w.dense or w.cost).bytes_min for w in rows), sum(w.cost.bytes_min for w in rows)
    return {"optimizer_bytes": {"dense": dense, "masked": masked, "saved": dense - masked}}


def words(works: list[Work]) -> list[str]:
    """A sentence on the masked step, where there is one."""
    found = saved(works).get("optimizer_bytes")
    if not found:
        return []
    dense, masked = found["dense"] / 1e6, found["masked"] / 1e6
    said = f"{1 - masked / dense:.1%} less" if masked <= dense else f"{masked / dense - 1:.1%} more: fewer blocks must be kept for it to pay"
    return [f"Masked step: the optimiser moves {masked:.4g} MB a step, gathers and scatters included, a dense step {dense:.4g}: {said}."]


def summary(optimizer: str | torch.optim.Optimizer | None) -> dict[str, Any]:
    """What the step was counted as."""
    name, states = kind_of(optimizer)
    return {"optimizer": name, "state_tensors": states}
