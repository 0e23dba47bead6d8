"""The tables of an analysis, made from its list of works. Numbers are integers of FLOP, bytes and elements; only ratios and times are floats."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import Any

import torch

from ..kernels.grid import grid_shape, kept_elements
from ..passes.counting.calls import Call
from ..passes.counting.recording import Recording
from ..passes.counting.work import ELEMENTWISE, FREE, UNKNOWN, Work
from . import roofline, traffic
from .devices import Device


def node_names(calls: Iterable[Call]) -> dict[int, str]:
    """{id(call): name of its node}: a graph's own name, else module and op, numbered where a module runs an op again. A backward has its forward's."""
    found: dict[int, str] = {}
    seen: Counter[str] = Counter()
    for c in calls:
        if c.forward is not None:
            continue
        base = c.node or f"{c.module or '(model)'}:{c.op.partition('.')[2] or c.op}"
        seen[base] += 1
        found[id(c)] = base if seen[base] == 1 or (c.node and not c.backward) else f"{base}#{seen[base]}"
    return found


def name_of(work: Work, names: dict[int, str]) -> str:
    if work.call is None:
        return work.weight
    call = work.call
    while call.forward is not None:  # a gradient's gradient has another one's
        call = call.forward
    return names[id(call)]


def module_of(work: Work) -> str:
    if work.call is None:
        return work.weight.rpartition(".")[0]
    return work.call.module


def _dtype(d: torch.dtype | None) -> str | None:
    return None if d is None else str(d).removeprefix("torch.")


def _key(work: Work, names: dict[int, str]) -> dict[str, Any]:
    return {"node": name_of(work, names), "module": module_of(work), "op": work.op, "phase": work.phase}


def nodes(works: list[Work], names: dict[int, str]) -> list[dict[str, Any]]:
    """T1: a row for each op and phase that does something."""
    rows = []
    for w in works:
        if w.status == FREE:
            continue
        c, density = w.cost, w.kept / w.elements if w.kept is not None and w.elements else None
        rows.append(
            _key(w, names)
            | {
                "calls": 1,
                "m": w.m or None,
                "n": w.n or None,
                "k": w.k or None,
                "batch": w.batch if w.m else None,
                "dtype_in": _dtype(w.dtype),
                "dtype_acc": ("float32" if w.dtype in (torch.float16, torch.bfloat16) else _dtype(w.dtype)) if w.m else None,
                "dtype_out": _dtype(w.call.outputs[0].dtype) if w.call and w.call.outputs else _dtype(w.dtype),
                "block_n": w.block[0] if w.block else None,
                "block_k": w.block[1] if w.block else None,
                "nnzb": w.nnzb,
                "density": density,
                "sparsity": None if density is None else 1 - density,
                "impl": w.impl or None,
                "mac": macs(w),
                "flop": c.flop_useful,
                "flop_dense": w.flop_dense,
                "flop_executed": c.flop_issued,
                "bytes_min": c.bytes_min,
                "bytes_req": c.bytes_req,
                "param_bytes": c.reads_min.get("w", 0) if w.phase in ("fwd", "recompute") else 0,
                "index_bytes": sum(c.reads_min.get(n, 0) for n in ("entries", "counts", "order", "mask")),
                "weights_loaded": loaded_weights(w),
                "status": w.status,
            }
        )
    return rows


def macs(work: Work) -> int:
    """Multiplications of products; what ops without products compute is none."""
    return 0 if work.status == ELEMENTWISE else work.cost.flop_useful // 2


def loaded_weights(work: Work) -> int:
    """Weight elements that a forward loads: those of kept blocks, once; table 6.2 of Bespalov's thesis counts these."""
    if work.phase != "fwd" or not work.weight or not work.m or work.again:
        return 0
    return work.elements if work.kept is None else work.kept


def traffic_rows(works: list[Work], names: dict[int, str], device: Device) -> list[dict[str, Any]]:
    """T3: a row for each op, phase, operand and direction."""
    return [_key(w, names) | r | {"dram_model": traffic.DRAM_MODEL} for w in works if w.status != FREE for r in traffic.operands(w, device)]


def roofline_rows(works: list[Work], names: dict[int, str], device: Device, tf32: bool) -> list[dict[str, Any]]:
    """T4: a row for each op and phase."""
    return [_key(w, names) | {"flop": w.cost.flop_useful} | roofline.row(w, device, tf32) for w in works if w.status != FREE]


def modules(works: list[Work], kept: dict[str, int], recording: Recording) -> list[dict[str, Any]]:
    """T2: a row for each module, with all that is below it; the first row is the model. `kept`: see `kept_parameters`."""
    flop: Counter[str] = Counter()
    dense: Counter[str] = Counter()
    moved: Counter[str] = Counter()
    for w in works:
        for name in _ancestors(module_of(w)):
            flop[name] += w.cost.flop_useful
            dense[name] += w.flop_dense
            moved[name] += w.cost.bytes_min
    rows = []
    for name, kind in recording.modules.items():
        inside = [n for n in recording.parameters if not name or n.startswith(f"{name}.")]
        params = sum(recording.parameters[n].numel() for n in inside)
        if not (params or flop[name] or moved[name]):
            continue
        rows.append(
            {
                "module": name or "(model)",
                "type": kind,
                "depth": name.count(".") + bool(name),
                "params": params,
                "params_kept": sum(kept[n] for n in inside),
                "density": sum(kept[n] for n in inside) / params if params else None,
                "flop": flop[name],
                "flop_pct": 100 * flop[name] / flop[""] if flop[""] else None,
                "flop_dense": dense[name],
                "bytes_min": moved[name],
                "bytes_min_pct": 100 * moved[name] / moved[""] if moved[""] else None,
                "calls": recording.executions.get(name, 0),
            }
        )
    return rows


def _ancestors(name: str) -> list[str]:
    parts = name.split(".") if name else []
    return [".".join(parts[:i]) for i in range(len(parts) + 1)]


def kept_parameters(forward: list[Work], recording: Recording) -> dict[str, int]:
    """Elements of every parameter that a forward uses, or would if its layer ran: those of kept blocks, all of one that is not masked."""
    kept = {name: p.numel() for name, p in recording.parameters.items()} | recording.idle | recording.by_element
    return kept | {name: n for name, (_, _, n) in masks_of(forward, recording).items()}


def masks_of(forward: list[Work], recording: Recording) -> dict[str, tuple[tuple[int, int] | None, int | None, int]]:
    """Block, kept blocks and kept elements of every parameter whose mask a forward uses: of all of it, though an op reads a part."""
    sizes = {name: p.numel() for name, p in recording.parameters.items()}
    found = {w.weight: (w.block, w.nnzb, w.kept) for w in forward if w.kept is not None and w.weight in sizes}
    read = {p.weight: p.mask for w in forward if w.call for p in w.call.inputs if p.weight in sizes and p.mask is not None and p.mask.block is not None}
    for name, m in read.items():
        if m.block and m.shape and prod(m.shape) == sizes[name] and tuple(m.values.shape) == grid_shape(m.shape, m.block):
            found[name] = m.block, int(m.values.sum()), int(kept_elements(m.values, m.shape, m.block))
    return found


def coverage(works: list[Work], recording: Recording) -> tuple[list[dict[str, Any]], dict[str, float]]:
    """T7: a row for each unknown op; and the covered shares of ops, of parameters and of compulsory bytes, in percent."""
    unknown = [w for w in works if w.status == UNKNOWN]
    rows = []
    for op in dict.fromkeys(w.op for w in unknown):
        group = [w for w in unknown if w.op == op]
        call = group[0].call
        shapes = ", ".join("x".join(map(str, p.shape)) for p in call.inputs) if call else ""
        fix = f"@fxmask.register_cost(torch.ops.{op})"
        rows.append({"op": op, "count": len(group), "example_shapes": shapes, "bytes_min": sum(w.cost.bytes_min for w in group), "suggestion": fix})
    blind = {n for w in unknown if w.call for p in w.call.inputs for n in p.weight.split("+") if n}
    sizes = {n: p.numel() for n, p in recording.parameters.items()}
    moved = sum(w.cost.bytes_min for w in works)

    def share(part: int, whole: int) -> float:
        return 100.0 if not whole else 100 * (1 - part / whole)

    shares = {
        "nodes_pct": share(len(unknown), len(works)),
        "params_pct": share(sum(sizes.get(n, 0) for n in blind), sum(sizes.values())),
        "bytes_pct": share(sum(w.cost.bytes_min for w in unknown), moved),
    }
    return rows, shares
