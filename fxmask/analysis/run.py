"""`fxmask.analyze`: run the model once without arithmetic, cost every op, make the tables."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from ..bench.provenance import provenance, utc
from ..kernels import draw_ops
from ..kernels.errors import ConfigError, UnsupportedError, message
from ..kernels.grid import plain_int
from ..passes.counting import dropout_rules, masked_rules, other_products, pruned_rules, rules  # noqa: F401  (they register their rules)
from ..passes.counting.capture import capture
from ..passes.counting.dense_step import mark
from ..passes.counting.moves import work_of
from ..passes.counting.recording import Recording
from ..passes.counting.traced import arguments
from ..passes.counting.work import Target, Work, makes_weight
from ..passes.settings.checks import one_of
from . import devices, footprint, optimiser, tables, thesis_table
from . import summary as totals
from .dynamics import cut_off, said_of
from .explained import explain
from .notes import notes_of
from .report import SCHEMA, Analysis
from .thesis import MODELS

PHASES = ("fwd", "dX", "dW", "opt")
IMPLS = ("triton", "reference")


def analyze(
    model: Any,
    inputs: Any,
    *,
    kwargs: Mapping[str, Any] | None = None,
    phases: Sequence[str] = PHASES,
    device: str | devices.Device | torch.device | None = None,
    optimizer: str | torch.optim.Optimizer | None = "adamw",
    steps: int | None = None,
    impl: str | None = None,
    dtype: torch.dtype | None = None,
    memory_model: str = "tokens",
    count_elementwise: bool = False,
    strict: bool = False,
    masked_step: bool | None = None,
    progress: Callable[[int], None] | None = None,
) -> Analysis:
    """FLOP and memory movement of one training step, layer by layer, predicted for a device; no GPU is needed, and of the model nothing is computed.

    Args:
        model: nn.Module (masked or not), fx.GraphModule, graph of Dynamo, or torch.export.ExportedProgram; its weights may be on the meta device.
        inputs: a tensor, a tuple of the model's arguments, or a dict of its keyword arguments; only shapes and dtypes are looked at. kwargs: more of them.
        phases: of fwd, dX, dW (the bias' gradient with it), opt; only ("fwd",) runs no backward but the forward's own.
        device: whose roofs are drawn: a name of `fxmask.analysis.devices`, "cpu" (this one, measured), a torch.device, a Device. Default: this machine's GPU
            where it is known, else "h100-sxm".
        optimizer: a name (adamw, sgd, sgd_momentum, ...), an instance, or None.
        steps: adds the totals of a run of so many steps to the summary.
        impl: how masked layers are counted: "triton" or "reference" (masked-dense); default: as each layer says, and triton for "auto".
        dtype: count as if all floating tensors had this dtype.
        memory_model: "thesis" adds a table of that name: bytes by the model of Bespalov's thesis, beside the same with activations of every token.
        count_elementwise: count one FLOP an element for ops without products, too. strict: raise where an op is unknown. progress: called with the
            number of ops so far.
        masked_step: True: count the optimiser's step as `guard(masked_step=True)` makes it, False: as a dense one. Default: as the guard of an instance says; a
            name has none.

    Returns:
        An `Analysis` with the tables summary, modules, nodes, traffic, roofline, footprint, coverage. FLOP are useful ones unless their name says
        otherwise; a MAC is two. Rows are integers and add up to the totals exactly; a parameter that is used twice counts once for memory, twice for FLOP.

    Raises:
        ConfigError: an unknown device, phase, optimizer or impl, or no model.   UnsupportedError: the model cannot run without values, or with these inputs;
        with `strict`, an op without a cost.

    Side effects: none; parameters, buffers, attributes, hooks, random states and the training flag are what they were. A mask that each forward builds is
    read off the real weight; a weight without values gets a typical mask with exactly as many kept blocks, and a note.
    Cost: an eager step without arithmetic, about 0.5 ms an op; and the norms of blocks of real weights, for masks that a forward builds, of weights that a
    parametrisation computes, and of layers that do not run.
    """
    target_device = devices.of_machine() or devices.device("h100-sxm") if device is None else devices.device(device)
    phases = _phases(phases)
    _check(impl, memory_model, dtype, steps, progress, masked_step, count_elementwise=count_elementwise, strict=strict)
    steps = plain_int(steps)
    optimizer = optimizer if "opt" in phases else None
    optimiser.kind_of(optimizer)
    args, named = _arguments(inputs, kwargs)
    backward = any(p in phases for p in ("dX", "dW", "opt"))  # what is trained has a gradient
    with cut_off(model) as fading, draw_ops.drawn_by_one_op(impl):
        recording = capture(model, args, named, backward, dtype, progress)
    target = Target(target_device.dense_tile, impl or "", count_elementwise)
    works = [w for c in recording.calls for w in work_of(c, target)]
    for w in works:
        if w.phase == "dX" and w.call is not None and makes_weight(w.call.forward):  # also by an op of a masked layer, whose rule sees a token's gradient in it
            w.phase = "dW"
    if recording.backward:
        works += optimiser.step(recording, optimizer, works, masked_step, target)
    wanted = {*phases, "db"} if "dW" in phases else {*phases}
    wanted |= {"recompute"} if wanted & {"dX", "dW"} else set() if recording.backward else {"recompute", "dX", "dW", "db"}  # what a forward does itself
    mark(works, recording.changed, recording.own)
    forward = [w for w in works if w.phase == "fwd"]  # knows the masks, whatever is asked for
    works = [w for w in works if w.phase in wanted]
    rows, shares = tables.coverage(works, recording)
    if strict and rows:
        ops = ", ".join(f"{r['op']} ({r['count']}x, {r['example_shapes']})" for r in rows)
        fix = f"register one: {rows[0]['suggestion']} on a function of the op's arguments that gives its FLOP; or strict=False."
        raise UnsupportedError(message(f"analyze(strict=True) knows no cost of: {ops}.", fix=fix))
    report = _report(model, recording, works, forward, target_device, optimizer, steps, impl, rows, shares)
    if dtype is not None:
        report.title += f", counted in {str(dtype).removeprefix('torch.')}"
    if memory_model == "thesis":
        report.tables["thesis"] = thesis_table.rows(forward, recording, steps)
    report.notes += said_of(recording.sites.values(), fading)
    return report


def _phases(given: Any) -> tuple[str, ...]:
    found = tuple(given) if isinstance(given, Iterable) and not isinstance(given, (str, Tensor)) and getattr(given, "ndim", 1) == 1 else ()
    if not found or not all(isinstance(p, str) and p in PHASES for p in found):
        raise ConfigError(f"phases: expected a sequence of {', '.join(PHASES)}, got {given!r}.")
    return found


def _check(impl: str | None, memory_model: str, dtype: torch.dtype | None, steps: int | None, progress: Any, masked_step: Any, **flags: Any) -> None:
    one_of("memory_model", memory_model, MODELS)
    if impl is not None and (not isinstance(impl, str) or impl not in IMPLS):
        raise ConfigError(f"impl: expected one of {', '.join(IMPLS)} or None, got {impl!r}.")
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype: expected a floating dtype, such as torch.bfloat16, or None, got {dtype!r}.")
    if steps is not None and (plain_int(steps) is None or steps < 0):
        raise ConfigError(f"steps: expected a number of steps or None, got {steps!r}.")
    if progress is not None and not callable(progress):
        raise ConfigError(f"progress: expected a function of the number of ops so far, or None, got {progress!r}.")
    if masked_step is not None and type(masked_step) is not bool:
        raise ConfigError(f"masked_step: expected True, False or None, got {masked_step!r}.")
    for option, value in flags.items():
        if type(value) is not bool:
            raise ConfigError(f"{option}: expected True or False, got {value!r}.")


def _arguments(inputs: Any, kwargs: Mapping[str, Any] | None) -> tuple[tuple[Any, ...], dict[str, Any]]:
    args, named = arguments(inputs, kwargs)
    if not any(isinstance(t, Tensor) for t in tree_leaves((args, named))):
        shape = isinstance(inputs, (tuple, list)) and bool(inputs) and all(plain_int(n) is not None for n in inputs)
        got = f"a shape; its tensor is torch.empty({tuple(inputs)}, device='meta')." if shape else f"{type(inputs).__name__}."
        raise ConfigError(f"inputs: expected a tensor, a tuple of arguments or a dict of keyword arguments with at least one tensor in it, got {got}")
    return args, named


def _report(
    model: Any, recording: Recording, works: list[Work], forward: list[Work], device: devices.Device, optimizer: Any, steps: int | None, impl: str | None,
    unknown: list[dict[str, Any]], shares: dict[str, float],
) -> Analysis:  # fmt: skip
    names = tables.node_names(recording.calls)
    tf32 = torch.backends.cuda.matmul.allow_tf32
    kept = tables.kept_parameters(forward, recording)
    summary = totals.summary(works, kept, recording, device, tf32, steps)
    summary |= {"coverage": shares, **optimiser.summary(optimizer), **optimiser.saved(works)}
    shapes = [f"{'x'.join(map(str, t.shape))}:{str(t.dtype).removeprefix('torch.')}" for t in recording.inputs]
    found = {
        "summary": totals.rows(summary),
        "modules": tables.modules(works, kept, recording),
        "nodes": tables.nodes(works, names),
        "traffic": tables.traffic_rows(works, names, device),
        "roofline": tables.roofline_rows(works, names, device, tf32),
        "footprint": footprint.rows(recording, works, forward),
        "coverage": unknown,
    }
    where = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    meta = {
        "schema_version": SCHEMA,
        "utc": utc(),
        "model": type(model).__name__,
        "inputs": shapes,
        "optimizer": summary["optimizer"],
        "impl": impl or "as each layer says",
        "mask_hash": _hash(forward),
        "analysed_device": device.name,
        "peaks": device.peak_flops,
        "dram_bytes_s": device.dram_bytes_s,
        "l2_bytes_s": device.l2_bytes_s,
        "peaks_source": device.source,
        **{f"run_{k}" if k == "device" else k: v for k, v in provenance(where).items()},
    }
    by_element = bool(recording.by_element or recording.uncounted)
    said = totals.words(works, device, tf32, shares, by_element, len(recording.sites))
    notes = [*said, *optimiser.words(works), *notes_of(model, recording, works, impl, device)]
    title = f"fxmask.analyze: {type(model).__name__}, inputs {', '.join(shapes)}, on {device.name}"
    return Analysis(title, found, notes, summary, meta, lambda node: explain(node, works, names, device, tf32))


def _hash(forward: list[Work]) -> str:
    h = hashlib.sha256()
    masks = (p.mask for w in forward if w.call is not None and w.kept is not None for p in w.call.inputs)
    for mask in filter(None, masks):
        h.update(mask.values.cpu().numpy().tobytes())
    return h.hexdigest()[:16]
