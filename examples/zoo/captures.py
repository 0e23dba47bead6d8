"""What is asked of every model when something captures it: fx.symbolic_trace, torch.export, Dynamo; stock PyTorch is asked, too, which names its limits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

import fxmask
from fxmask import backend_watch
from zoo.checks import NO, TIED, Columns, Subject, reason, some, told
from zoo.equality import BLOCK, RATIO, Masks, Outcome, compare, compare_outputs, element_masks, inputs_of, masked_copy, outputs_of, run, write_in, written_in

COMPUTED = " (a computed weight)"
STOCK = "stock PyTorch: "  # how a reason begins that is not fxmask's


def traced(s: Subject) -> Columns:
    """The FX pass on a trace of the dense model, against `apply`."""

    def trace(dtype: torch.dtype) -> torch.fx.GraphModule:
        return torch.fx.symbolic_trace(copy.deepcopy(s.model).eval().to(dtype))

    try:
        gm = trace(torch.float32)
        same = compare_outputs(outputs_of(gm, s.made), outputs_of(copy.deepcopy(s.model).eval(), s.made))
    except Exception as error:
        return {"trace": NO, "trace_why": STOCK + reason(error)}
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
        return {"graph": NO, "graph_why": STOCK + reason(error)}
    return rewritten(s, gm, "graph", export)


def rewritten(s: Subject, gm: torch.fx.GraphModule, name: str, capture: Callable[[torch.dtype], torch.fx.GraphModule]) -> Columns:
    """The columns of a graph that the FX pass rewrites. Captured again, float64 decides where float32 rounds too much, then the graph with W∘M written in."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxmask.apply(gm, ratio=RATIO, block=BLOCK)
    found = fxmask.explain(gm)
    sites = set(fxmask.masks(gm)) if found.summary["masked"] else set()
    computed = sorted(str(r["name"]) for r in found.rows if r["masked"] and not {r["name"], f"{r['name']}.weight"} & sites)
    why = difference(sites | {name + COMPUTED for name in computed}, set(s.masks)) + [t for t in told(caught) if sites]
    if computed:  # neither `apply` nor a dense copy can have these masks
        gm = masked_but_for(capture(torch.float32), computed)
    same = compare_outputs(outputs_of(gm, s.made), outputs_of(s.masked().eval(), s.made))
    if same.startswith(NO) and " inf times " not in same:  # what is not finite on one side alone is no rounding
        try:
            wide = in_float64(s, capture, computed)
        except Exception as error:
            why.append(f"float64: {reason(error)}")
        else:
            why, same = [*why, f"float32: {same}"], wide
    if same.startswith(NO):
        alone = against_itself(s, gm, sites, capture)
        if alone.startswith(NO):
            why.append(f"the graph with W∘M written in: {alone}")
        elif sites == set(s.masks):  # the pass is right, and the graph is no longer the model's
            return {name: NO, f"{name}_why": f"{STOCK}its graph with W∘M written in is not the model ({same})"}
        else:
            why, same = [*why, f"apply: {same}"], alone
    return {name: len(sites), f"{name}_equal": same, f"{name}_why": "; ".join(why)}


def against_itself(s: Subject, gm: torch.fx.GraphModule, sites: set[str], capture: Callable[[torch.dtype], torch.fx.GraphModule]) -> str:
    """The outputs of a rewritten graph against those of the same graph, not rewritten, with W∘M written into its weights."""
    try:
        return compare_outputs(outputs_of(gm, s.made), outputs_of(write_in(capture(torch.float32), masks_of(s, sites)), s.made))
    except Exception as error:
        return f"{NO}: {reason(error)}"


def masks_of(s: Subject, sites: set[str]) -> Masks:
    """Those of `apply`, and of weights that a graph masks beside them."""
    return {name: s.masks[name] if name in s.masks else as_linear(s.model.get_parameter(name)) for name in sites}


def masked_but_for(gm: torch.fx.GraphModule, but: list[str]) -> torch.fx.GraphModule:
    """A graph that the pass has rewritten, but for some linears; its warnings have been told."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxmask.FxMaskWarning)
        fxmask.apply(gm, ratio=RATIO, block=BLOCK, exclude=tuple(but))
    return gm


def in_float64(s: Subject, capture: Callable[[torch.dtype], torch.fx.GraphModule], but: list[str]) -> str:
    """The outputs of a rewritten graph against `apply`, where rounding is of no size."""
    gm, model = masked_but_for(capture(torch.float64), but), copy.deepcopy(s.model).eval().double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", fxmask.FxMaskWarning)  # told of in float32
        fxmask.apply(model, ratio=RATIO, block=BLOCK)
    same = compare_outputs(*(outputs_of(m, s.made, torch.float64) for m in (gm, model)))
    return same if same.startswith(NO) else "float64"


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
            return {"export": NO, "export_why": STOCK + reason(stock)}
        return {"export": NO, "export_why": reason(error)}
    return {"export": NO if same.startswith(NO) else "yes", "export_why": same}


class Counting:
    """A backend that counts graphs, hands them on, and notes which parameters they are called with."""

    def __init__(self, inner: str) -> None:
        self.graphs, self.inner, self.given = 0, torch._dynamo.lookup_backend(inner), dict[int, nn.Parameter]()

    def __call__(self, gm: torch.fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        self.graphs += 1
        made = self.inner(gm, list(inputs))

        def noted(*args: Any) -> Any:
            self.given |= {id(a): a for a in args if isinstance(a, nn.Parameter)}
            return made(*args)

        return noted

    def captured(self, model: nn.Module) -> set[str]:
        """Names of the model's parameters that a graph was called with: what is not among them was met by eager code alone."""
        return {name for name, p in model.named_parameters(remove_duplicate=False) if id(p) in self.given}


def by_aot_eager(s: Subject) -> Columns:
    """The compiler backend on the dense model in training, against stock Dynamo on the dense copy with W∘M written in: same graphs, same random numbers."""
    stock = Counting("aot_eager")
    try:
        expected, captured = by_stock(s, s.masks, stock)
    except Exception as error:
        return {"stock": NO, "backend": "-", "backend_why": STOCK + reason(error)}
    if not stock.graphs:
        return {"stock": NO, "backend": "-", "backend_why": f"{STOCK}no graph was captured"}
    row: Columns = {"stock": stock.graphs}
    try:
        found, sites, said = with_backend(s, True, {"inner": Counting("aot_eager")})
        why, masks = difference(sites, set(s.masks)) + (said if sites != set(s.masks) else []), s.masks
        known = {name for name in sites if not name.endswith(COMPUTED) and id(s.model.get_parameter(name)) not in tied(s, s.model)}
        meant = known | (set(masks) & captured)  # it meets calls, and so a linear of another class than nn.Linear, too; what eager code runs it cannot meet
        if meant != set(masks):
            masks = masks_of(s, meant)
            expected, _ = by_stock(s, masks, Counting("aot_eager"))
        same = compare(found, expected, masks)
        if same.startswith(NO):  # as in `applied`: rounding may be all that a gradient has
            why, wide = [*why, f"float32: {same}"], torch.float64
            found, _, _ = with_backend(s, True, {"inner": Counting("aot_eager")}, wide)
            same = compare(found, by_stock(s, masks, Counting("aot_eager"), wide)[0], masks)
            same = same if same.startswith(NO) else "float64"
    except Exception as error:
        return {**row, "backend": NO, "backend_why": reason(error)}
    return {**row, "backend": len(sites), "backend_equal": same, "backend_why": "; ".join(why)}


def by_stock(s: Subject, masks: Masks, backend: Counting, dtype: torch.dtype = torch.float32) -> tuple[Outcome, set[str]]:
    """Stock Dynamo on a dense copy with W∘M written in, in training, and the names of the parameters that reached a graph."""
    dense = written_in(s.model, masks).train().to(dtype)
    torch._dynamo.reset()
    return run(dense, s.made, torch.compile(dense, backend=backend), dtype), backend.captured(dense)


def as_linear(weight: torch.Tensor) -> torch.Tensor:
    """The mask of a weight, as an nn.Linear's would be."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight = nn.Parameter(weight.detach().clone())
    return element_masks(masked_copy(nn.Sequential(layer)))["0.weight"]


def by_inductor(s: Subject) -> Columns:
    """The same through Inductor, in eval mode, against the dense copy in eager mode."""
    expected = run(s.dense().eval(), s.made)
    try:
        found, sites, said = with_backend(s, False, {})
    except Exception as error:
        torch._dynamo.reset()
        try:
            dense = s.dense().eval()
            run(dense, s.made, torch.compile(dense))
        except Exception as stock:
            return {"inductor": NO, "inductor_why": STOCK + reason(stock)}
        return {"inductor": NO, "inductor_why": reason(error)}
    same = compare(found, expected, s.masks)
    why = difference(sites, set(s.masks)) + (said if sites != set(s.masks) else [])
    if same.startswith(NO):  # as in `applied`: rounding may be all that a gradient has
        why, wide = [*why, f"float32: {same}"], torch.float64
        found, _, _ = with_backend(s, False, {}, wide)
        same = compare(found, run(s.dense().eval().to(wide), s.made, dtype=wide), s.masks)
        same = same if same.startswith(NO) else "float64"
    return {"inductor": same, "inductor_why": "; ".join(why)}


def with_backend(s: Subject, train: bool, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Outcome, set[str], list[str]]:
    """(outcome, names of the weights whose masks ran, warnings) of a compiled copy.

    A weight that the graph computes has its layer's name and `COMPUTED`. A dense copy cannot have masks of such weights written in, nor of an embedding's,
    which is masked where the embedding runs in eager code: the outcome is one without them.
    """
    from fxmask import backend
    from fxmask.backend import fxmask_backend

    model, rewritten = copy.deepcopy(s.model).train(train).to(dtype), []
    options = {"ratio": RATIO, "block": BLOCK, **options}
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught, patch.object(backend, "rewrite", recording(backend.rewrite, rewritten)):
        warnings.simplefilter("always")
        found = run(model, s.made, torch.compile(model, backend=fxmask_backend, options=options), dtype)
    uses = {id(w) for w, use in backend_watch._uses.items() if use.calls}
    own = {id(p): name for name, p in model.named_parameters()}
    computed = {name for name, w in rewritten if id(w) not in own}
    aside = computed | {name for name, w in rewritten if id(w) in tied(s, model)}
    if aside:
        found, _, _ = with_backend(s, train, {**options, "exclude": sorted(aside)}, dtype)
    return found, {name for i, name in own.items() if i in uses} | {name + COMPUTED for name in computed}, told(caught)


def tied(s: Subject, model: nn.Module) -> set[int]:
    """Weights of linears that are an embedding's, too, of the model or a copy."""
    return {id(model.get_parameter(name)) for name, why in s.eligible.items() if why == TIED}


def recording(rewrite: Callable[..., Any], found: list[Any]) -> Callable[..., Any]:
    """The backend's `rewrite`, noting what it returns."""

    def noted(*args: Any) -> Any:
        done = rewrite(*args)
        found.extend(done)
        return done

    return noted


def difference(found: set[str], expected: set[str]) -> list[str]:
    """Sites that are not those of `apply`."""
    less, more = expected - found, found - expected
    return [f"not masked: {some(less)}"] * bool(less) + [f"masked, and not by apply: {some(more)}"] * bool(more)


CAPTURES: dict[str, Callable[[Subject], Columns]] = {
    "trace": traced, "graph": export_rewritten, "export": exported, "backend": by_aot_eager, "inductor": by_inductor,
}  # fmt: skip
