"""`fxmask.advise`: will masks pay for this model on this device?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from ..asked import check_model
from ..bench.clock import load_average
from ..dropping import any_dropped
from ..errors import ConfigError, StateError, UnsupportedError
from ..kernels.errors import message
from ..passes.counting.traced import arguments
from ..passes.finding.choose import choose
from ..passes.finding.find import find
from ..passes.finding.patterns import Patterns
from ..passes.settings.checks import at_least
from ..passes.settings.config import WeightMask
from ..pruning import any_pruned
from ..sites import any_masked
from .advice import Advice, Known, advice_of
from .layers import Layer, layers_of
from .plan import chosen, plans
from .search import Cell, check_cells, device_of, search
from .step import mean_square
from .trial import Trial, copied, outcome

RATIOS = (0.5, 0.7, 0.8, 0.9)
BLOCKS = {"cpu": (64, 32, 16), "cuda": (128, 64, 32)}
FOR_STEPS = 0.2  # of the time goes to whole steps at the beginning, and as much to the check at the end


def advise(
    model: nn.Module,
    inputs: Any,
    *,
    target: float = 1.05,
    kwargs: Mapping[str, Any] | None = None,
    ratios: Sequence[float] = RATIOS,
    blocks: Sequence[int | tuple[int, int]] | None = None,
    refresh: int = 10,
    backward: str = "masked",
    impl: str = "auto",
    include: Patterns = None,
    exclude: Patterns = None,
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = torch.optim.AdamW,
    loss: Callable[[Any], Tensor] | None = None,
    seconds: float = 60.0,
    check: bool = True,
) -> Advice:
    """Which block and ratio pay for this model on this device, layer by layer, and what a training step would gain; that nothing pays, where nothing does.

    Times single layers (each signature once: forward, backward, the optimiser's step, the rebuild of the mask), dense and masked in turns, and one whole dense
    step; the step of a masked model is predicted as the dense one, less what the layers that pay save. Where the advised masks can be tried on a copy in the
    time that is left, they are: the dense step counts as the mean of all its times, what turns out to lose is not advised, and the next higher ratio is tried.

    Args:
        model: a dense nn.Module where it will be trained (device, dtype); eager steps are timed. inputs, kwargs: of its forward, as for `analyze`, but real
            tensors of the batch that will be trained on. Call it under the `torch.autocast` that the training uses.
        target: how many times as fast as dense the step is to be; the lowest ratio that is predicted to reach it is advised.
        ratios, blocks: what is tried; blocks as (out, in) or one number for both. Default blocks: 64, 32, 16 on a CPU, 128, 64, 32 on CUDA.
        refresh, backward, impl, include, exclude: as for `apply`. optimizer: makes one from parameters, such as a functools.partial; None: no step.
            It is guarded with `masked_step=True` where it can be. loss: of the model's output; default: the mean square of its tensors that require a gradient.
        seconds: when the search stops; a layer that is being timed then is finished. What was not reached is said.
        check: whether to try the advice on a copy.

    Returns: an `Advice`, a `Report` with a row for every linear that `apply` would mask: its dense time in ms, and at each ratio the best block and its gain,
        or why it was not timed.
    Raises: ConfigError (arguments; model and inputs on more than one device, or on meta), StateError (the model is masked already), UnsupportedError (no linear
        that could be masked is called; no output requires a gradient; the model cannot be copied).
    Side effects: none on the model, its gradients, the inputs and PyTorch's random states: copies are run, which take the model's memory once more, twice for
        the check. What hooks and other generators hold outside of the model moves as in some ten steps. On a CPU the plans that are timed
        stay in the cache of `FXMASK_CACHE`, where training finds them.
    """
    begin, load = time.perf_counter(), load_average()
    cells = _check(model, target, ratios, blocks, refresh, seconds, optimizer, loss, check)
    refresh = int(refresh)  # NumPy's could not be saved
    args, named = arguments(inputs, kwargs)
    device = device_of(model, [t for t in tree_leaves((args, named)) if isinstance(t, Tensor)])
    blocks_of = BLOCKS[device.type] if blocks is None else blocks
    cells = cells or check_cells(blocks_of, ratios)
    options: dict[str, Any] = {"backward": backward, "impl": impl}
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.inference_mode(False), torch.enable_grad():
        args, named = tree_map(_own, (args, named))
        own = copied(model)
        decisions = choose(find(own), WeightMask(ratio=cells[0][1], block=cells[0][0], refresh=refresh, **options), include, exclude, None, own)
        layers = layers_of(own, decisions, args, named)
        if not any(not layer.why for layer in layers):
            raise _nothing_to_time(own, layers, [f"{d.candidate.name or '(model)'}: {d.reason}" for d in decisions if d.config is None])
        trial = Trial(own, (args, named), loss or mean_square, optimizer, refresh, options, device)
        dense = trial.dense(FOR_STEPS * seconds)
        until = begin + seconds * (1 - FOR_STEPS * check)
        found = search(layers, cells, options, optimizer, refresh, until)
        ratios_of, dense_times, trials = sorted({r for _, r in cells}), [dense], dict[float, float]()
        notes: list[str] = []
        while True:
            dense = statistics.mean(dense_times)  # layers were timed between these, and a machine's speed drifts
            made = plans(found, ratios_of, dense)
            plan = chosen(made, target, trials)
            if plan is None or not check or plan.ratio in trials:
                break
            tried = trial.of(plan, begin + seconds, notes)
            if tried is None:
                break
            dense_times.append(tried[0])
            trials[plan.ratio] = tried[0] / tried[1]
            notes.append(outcome(plan, tried, target))
    loads, took = (load, load_average()), time.perf_counter() - begin
    known, narrowed = Known(layers, found, cells, made, plan, dense, trials), include is not None or exclude is not None
    return advice_of(trial, known, target, narrowed, notes, loads, took)


def _check(model: Any, target: Any, ratios: Any, blocks: Any, refresh: Any, seconds: Any, optimizer: Any, loss: Any, check: Any) -> list[Cell]:
    check_model(model, "fxmask.advise")
    if any_masked(model) or any_pruned(model) or any_dropped(model):
        fix = "fxmask.restore(model) first, or advise before apply."
        raise StateError(message("fxmask.advise compares masks with the dense model: expected one without masks.", "", fix))
    for name, value in (("target", target), ("seconds", seconds)):
        if isinstance(value, bool) or not isinstance(value, Real) or not value > 0:  # type: ignore[operator]  # numpy's scalars are Real, too
            raise ConfigError(f"{name}: expected a number above 0, got {value!r}.")
    at_least("refresh", refresh, 0)
    if type(check) is not bool or not (loss is None or callable(loss)):
        raise ConfigError(f"advise: expected check, True or False, and loss, a function of the model's output, or None, got {check!r} and {loss!r}.")
    if optimizer is not None and (isinstance(optimizer, torch.optim.Optimizer) or not callable(optimizer)):
        got = f"an instance of {type(optimizer).__name__}" if isinstance(optimizer, torch.optim.Optimizer) else repr(optimizer)
        raise ConfigError(f"optimizer: expected a class or a function that makes one from parameters, or None, got {got}.")
    return check_cells(blocks, ratios) if blocks is not None else []


def _own(t: Any) -> Any:
    """A tensor of the caller's as a leaf of our own, which may be written to; anything else as it is."""
    return t.detach().clone().requires_grad_(t.requires_grad) if isinstance(t, Tensor) else t


def _nothing_to_time(model: nn.Module, layers: list[Layer], others: list[str]) -> UnsupportedError:
    reasons = "; ".join([f"{layer.name or '(model)'}: {layer.why}" for layer in layers] + others)[:600] or "it has no linear"
    what = f"advise found nothing to time: expected a linear that can be masked and is called, got none: {reasons}."
    fix = "no mask that advise times pays here; where include, exclude or a default left a linear dense, an exact name in include= takes it."
    return UnsupportedError(message(what, type(model).__name__, fix))
