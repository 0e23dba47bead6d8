"""The formulas of a node with its numbers in them: what makes a table believable."""

from __future__ import annotations

import inspect
from typing import Any

from ..kernels import dense_cost, layer_cost, mask_cost, matmul_cost, pruned_cost
from ..kernels.errors import ConfigError
from ..passes.counting import dropout_rules, other_products, rules
from ..passes.counting.work import Work
from . import optimiser, roofline, tables, traffic
from .devices import Device

BY_KERNELS: dict[str, Any] = {
    "fxmask.masked_linear": matmul_cost.list_matmul,
    "fxmask.masked_linear_dx": matmul_cost.list_matmul,
    "fxmask.masked_linear_dw": matmul_cost.sampled_matmul,
    "fxmask.pruned_linear": matmul_cost.list_matmul,
    "fxmask.pruned_dw": pruned_cost.pruned_matmul,
    "fxmask.dropped_linear": matmul_cost.list_matmul,
    "fxmask.dropped_dx": matmul_cost.sampled_matmul,
    "fxmask.dropped_dw": matmul_cost.list_matmul,
}
WITHOUT_KERNELS: dict[str, Any] = {
    "fxmask.pruned_dw": pruned_cost.plain_dw,
    "fxmask.compress": pruned_cost.compress,
    **dict.fromkeys(("fxmask.dropped_linear", "fxmask.dropped_dx", "fxmask.dropped_dw"), dropout_rules.share),
    "fxmask.drop_mask": mask_cost.draw,
    "fxmask.block_index": mask_cost.block_keys,
    "fxmask.strip_lists": mask_cost.strip_lists,
}


def formulas(work: Work) -> Any:
    """The closed forms that a work was counted by."""
    if work.impl in ("masked_dense", "triton (mask, then dense)"):
        return layer_cost.masked_dense if work.op.startswith("fxmask.") else rules.leave_out
    if work.phase == "opt":
        return optimiser.masked_step if work.impl == "masked_step" else optimiser.dense_step
    if work.impl == "triton" and work.op in BY_KERNELS:
        return BY_KERNELS[work.op]
    if not work.impl and work.op in WITHOUT_KERNELS:
        return WITHOUT_KERNELS[work.op]
    if work.op in other_products.ONCE:
        return other_products.once
    if "attention" in work.op:
        return dense_cost.attention_backward if "backward" in work.op else dense_cost.attention
    if "conv" in work.op:
        return dense_cost.convolution
    return dense_cost.matmul if work.m else dense_cost.stream


def explain(node: str, works: list[Work], names: dict[int, str], device: Device, tf32: bool) -> str:
    """All works of a node or a module (or of all modules inside it, where it has none itself), one after the other."""
    shown, module = [w for w in works if w.status != "free"], "" if node == "(model)" else node
    chosen = [w for w in shown if tables.name_of(w, names) == node] or [w for w in shown if tables.module_of(w) == module]
    chosen = chosen or [w for w in shown if not module or tables.module_of(w).startswith(f"{module}.")]
    if not chosen:
        known = list(dict.fromkeys(tables.name_of(w, names) for w in works if w.m))
        near = [n for n in known if node in n][:5] or known[:5]
        some = f"{len(known)} nodes, such as {', '.join(near)}, or a module's name"
        raise ConfigError(f"no node or module {node!r} in this analysis: expected one of its {some}.")
    return "\n\n".join(_one(w, names, device, tf32) for w in chosen)


def _one(w: Work, names: dict[int, str], device: Device, tf32: bool) -> str:
    c = w.cost
    lines = [f"{tables.name_of(w, names)}  {w.op}  {w.phase}  [{w.status}{', ' + w.impl if w.impl else ''}]"]
    if w.m:
        item = "" if w.dtype is None else f"{str(w.dtype).removeprefix('torch.')}, {w.dtype.itemsize} B an element"
        lines.append(f"  sizes    M = {w.m}, N = {w.n}, K = {w.k}, batch = {w.batch}, {item}")
    if w.kept is not None and w.block is not None:
        lines.append(
            f"  mask     blocks {w.block[0]}x{w.block[1]}, nnzb = {w.nnzb}, kept = {w.kept} of {w.elements} weight elements: "
            f"sparsity {1 - w.kept / w.elements if w.elements else 0:.4f}"
        )
    if w.m and w.kept is not None:
        tokens = w.cost.flop_useful // (2 * w.kept) if w.kept else 0
        dense = "a dense step has no such product" if w.extra else f"dense 2 M N K = {w.flop_dense}"
        lines.append(f"  useful   2 * tokens * kept = 2 * {tokens} * {w.kept} = {c.flop_useful} FLOP; {dense}; issued {c.flop_issued}")
    elif w.m:
        product = f"2 * {w.batch} * {w.m} * {w.n} * {w.k} = " if c.flop_useful == 2 * w.batch * w.m * w.n * w.k else ""  # not of attention
        lines.append(f"  useful   {product}{c.flop_useful} FLOP; issued {c.flop_issued}")
    for o in traffic.operands(w, device):
        reread = "" if o["reread"] is None else f", {o['reread']:.2f}x"
        asked = f"compulsory {o['bytes_min']} B, requested {o['bytes_req']} B{reread}, DRAM estimate {o['bytes_dram_est']} B"
        lines.append(f"  {o['direction']:5} {o['operand']:9} {asked}")
    lines.append(f"  bytes    compulsory {c.bytes_min}, requested {c.bytes_req}")
    peaks = {"compute": roofline.peak_of(w, device, tf32), "dram": device.dram_bytes_s, "l2": device.l2_bytes_s}
    for roof, t in sorted(roofline.bounds(w, device, tf32).items(), key=lambda p: -p[1]):
        if roof == "launch":
            how = f"{w.launches} x {device.launch_s:.2g} s"
        else:
            amount, unit = {"compute": (c.flop_issued, "FLOP"), "dram": (c.bytes_min, "B"), "l2": (c.bytes_req, "B")}[roof]
            how = f"{amount} {unit} / {peaks[roof]:.4g} {unit}/s"
        lines.append(f"  roof     {roof:8} {1e6 * t:.4g} us = {how}")
    text = inspect.getdoc(formulas(w)) or ""  # there is one of it, the docstring
    lines += ["  formulas", *(f"    {line}" for line in text.splitlines())]
    return "\n".join(lines)
