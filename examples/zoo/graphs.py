"""What is asked of every model as a graph: fx.symbolic_trace and torch.export, with the FX pass behind them; stock PyTorch is asked, too, for its limits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import torch

import fxmask
from zoo.captures import COMPUTED, STOCK, by_stock_pytorch, difference, masks_of
from zoo.checks import NO, Columns, Subject, reason, told
from zoo.equality import BLOCK, RATIO, Outcome, compare_outputs, inputs_of, outputs_of, settle, write_in

Capture = Callable[[torch.dtype], torch.fx.GraphModule]


def traced(s: Subject) -> Columns:
    """The FX pass on a trace of the dense model, against `apply`."""

    def trace(dtype: torch.dtype) -> torch.fx.GraphModule:
        return torch.fx.symbolic_trace(copy.deepcopy(s.model).eval().to(dtype))

    try:
        gm = trace(torch.float32)
        same = compare_outputs(outputs_of(gm, s.made), outputs_of(copy.deepcopy(s.model).eval(), s.made))
    except Exception as error:
        return {"trace": NO, "trace_why": by_stock_pytorch(error)}
    if same.startswith(NO):
        return {"trace": NO, "trace_why": f"{STOCK}the trace computes something else ({same})"}
    return rewritten(s, gm, "trace", trace)


def export_rewritten(s: Subject) -> Columns:
    """The FX pass on torch.export's graph of the dense model, against `apply`."""

    def export(dtype: torch.dtype) -> torch.fx.GraphModule:
        args, kwargs = inputs_of(s.made, dtype, grad=False)
        return torch.export.export(copy.deepcopy(s.model).eval().to(dtype), args, kwargs).module()

    try:
        gm = export(torch.float32)
    except Exception as error:
        return {"graph": NO, "graph_why": by_stock_pytorch(error)}
    return rewritten(s, gm, "graph", export)


def rewritten(s: Subject, gm: torch.fx.GraphModule, name: str, capture: Capture) -> Columns:
    """The columns of a graph that the FX pass rewrites. Where float32 rounds too much: captured again (`settle`), then against itself with W∘M."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxmask.apply(gm, ratio=RATIO, block=BLOCK)
    found = fxmask.explain(gm)
    sites = set(fxmask.masks(gm)) if found.summary["masked"] else set()
    computed = sorted(str(r["name"]) for r in found.rows if r["masked"] and not {r["name"], f"{r['name']}.weight"} & sites)
    why = difference(sites | {name + COMPUTED for name in computed}, set(s.masks)) + [t for t in told(caught) if sites]
    if computed:  # neither `apply` nor a dense copy can have these masks
        gm = masked_but_for(capture(torch.float32), computed)
    narrow = outputs_of(gm, s.made), outputs_of(s.masked().eval(), s.made)
    same = compare_outputs(*narrow)
    if same.startswith(NO):
        try:
            wide = in_float64(s, capture, computed)
        except Exception as error:
            why.append(f"float64: {reason(error)}")
        else:
            why, same = [*why, f"float32: {same}"], settle((Outcome(narrow[0], {}), Outcome(narrow[1], {})), wide, {})
    if same.startswith(NO):
        alone = against_itself(s, gm, sites, capture)
        if alone.startswith(NO):
            why.append(f"the graph with W∘M written in: {alone}")
        elif sites == set(s.masks):  # the pass is right, and the graph is no longer the model's
            return {name: NO, f"{name}_why": f"{STOCK}its graph with W∘M written in is not the model ({same})"}
        else:
            why, same = [*why, f"apply: {same}"], alone
    return {name: len(sites), f"{name}_equal": same, f"{name}_why": "; ".join(why)}


def against_itself(s: Subject, gm: torch.fx.GraphModule, sites: set[str], capture: Capture) -> str:
    """The outputs of a rewritten graph against those of the same graph, not rewritten, with W∘M written into its weights."""
    try:
        return compare_outputs(outputs_of(gm, s.made), outputs_of(write_in(capture(torch.float32), masks_of(s, sites)), s.made))
    except Exception as error:
        return f"{NO}: {reason(error)}"


def masked_but_for(gm: torch.fx.GraphModule, but: list[str]) -> torch.fx.GraphModule:
    """A graph that the pass has rewritten, but for some linears; its warnings have been told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxmask.FxMaskWarning)
        fxmask.apply(gm, ratio=RATIO, block=BLOCK, exclude=tuple(but))
    return gm


def in_float64(s: Subject, capture: Capture, but: list[str]) -> tuple[Outcome, Outcome]:
    """The outputs of a rewritten graph and of `apply`, where rounding is of no size."""
    gm, model = masked_but_for(capture(torch.float64), but), copy.deepcopy(s.model).eval().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxmask.FxMaskWarning)  # told of in float32
        fxmask.apply(model, ratio=RATIO, block=BLOCK)
    return Outcome(outputs_of(gm, s.made, torch.float64), {}), Outcome(outputs_of(model, s.made, torch.float64), {})


def exported(s: Subject) -> Columns:
    """torch.export of the masked model."""
    masked = s.masked().eval()
    try:
        found = torch.export.export(masked, s.made.args, s.made.kwargs).module()
        same = compare_outputs(outputs_of(found, s.made), outputs_of(masked, s.made))
    except Exception as error:
        try:
            torch.export.export(copy.deepcopy(s.model).eval(), s.made.args, s.made.kwargs)
        except Exception as stock:
            return {"export": NO, "export_why": by_stock_pytorch(stock)}
        return {"export": NO, "export_why": reason(error)}
    return {"export": NO if same.startswith(NO) else "yes", "export_why": same}


GRAPHS: dict[str, Callable[[Subject], Columns]] = {"trace": traced, "graph": export_rewritten, "export": exported}
