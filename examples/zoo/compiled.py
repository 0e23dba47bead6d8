"""What is asked of every model through Dynamo: the compiler backend in `aot_eager` and Inductor; stock PyTorch is asked, too, which names its limits."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

from fxmask.compiler import backend_watch
from zoo.captures import COMPUTED, STOCK, by_stock_pytorch, difference, masks_of
from zoo.checks import NO, TIED, Columns, Subject, reason, told
from zoo.equality import BLOCK, RATIO, Masks, Outcome, compare, run, settle, written_in


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
        why = by_stock_pytorch(error)
        return {"stock": NO, "backend": "-" if why.startswith(STOCK) else NO, "backend_why": why}
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
            far, _, _ = with_backend(s, True, {"inner": Counting("aot_eager")}, wide)
            same = settle((found, expected), (far, by_stock(s, masks, Counting("aot_eager"), wide)[0]), masks)
    except Exception as error:
        return {**row, "backend": NO, "backend_why": reason(error)}
    return {**row, "backend": len(sites), "backend_equal": same, "backend_why": "; ".join(why)}


def by_stock(s: Subject, masks: Masks, backend: Counting, dtype: torch.dtype = torch.float32) -> tuple[Outcome, set[str]]:
    """Stock Dynamo on a dense copy with W∘M written in, in training, and the names of the parameters that reached a graph."""
    dense = written_in(s.model, masks).train().to(dtype)
    torch._dynamo.reset()
    return run(dense, s.made, torch.compile(dense, backend=backend), dtype), backend.captured(dense)


def by_inductor(s: Subject) -> Columns:
    """The same through Inductor, in eval mode, against the dense copy in eager mode."""
    expected = run(s.dense().eval(), s.made)
    try:
        found, sites, said = with_backend(s, False, {})
    except Exception as error:
        try:
            stock_inductor(s)
        except Exception as stock:
            return {"inductor": NO, "inductor_why": by_stock_pytorch(stock)}
        return {"inductor": NO, "inductor_why": reason(error)}
    same = compare(found, expected, s.masks)
    why = difference(sites, set(s.masks)) + (said if sites != set(s.masks) else [])
    if same.startswith(NO):  # as in `applied`: rounding may be all that a gradient has
        why, wide = [*why, f"float32: {same}"], torch.float64
        far, _, _ = with_backend(s, False, {}, wide)
        same = settle((found, stock_inductor(s)), (far, run(s.dense().eval().to(wide), s.made, dtype=wide)), s.masks)
    return {"inductor": same, "inductor_why": "; ".join(why)}


def by_stock_inductor(s: Subject) -> Columns:
    """Stock Inductor on the dense copy, against that in eager mode: what the column `inductor` stands beside."""
    try:
        same = compare(stock_inductor(s), run(s.dense().eval(), s.made), {})
    except Exception as error:
        return {"inductor_stock": NO, "inductor_stock_why": reason(error)}
    return {"inductor_stock": NO if same.startswith(NO) else same, "inductor_stock_why": same if same.startswith(NO) else ""}


def stock_inductor(s: Subject) -> Outcome:
    """Of the dense copy in eval mode."""
    torch._dynamo.reset()
    dense = s.dense().eval()
    return run(dense, s.made, torch.compile(dense))


def with_backend(s: Subject, train: bool, options: dict[str, Any], dtype: torch.dtype = torch.float32) -> tuple[Outcome, set[str], list[str]]:
    """(outcome, names of the weights whose masks ran, warnings) of a compiled copy.

    A weight that the graph computes has its layer's name and `COMPUTED`. A dense copy cannot have masks of such weights written in, nor of an embedding's,
    which is masked where the embedding runs in eager code: the outcome is one without them.
    """
    from fxmask.compiler import backend
    from fxmask.compiler.backend import fxmask_backend

    model, rewritten = copy.deepcopy(s.model).train(train).to(dtype), []
    options = {"ratio": RATIO, "block": BLOCK, **options}
    torch._dynamo.reset()
    with warnings.catch_warnings(record=True) as caught, patch.object(backend, "rewrite", recording(backend.rewrite, rewritten)):
        warnings.simplefilter("always")
        found = run(model, s.made, torch.compile(model, backend=fxmask_backend, options=options), dtype)
    uses = {id(w) for w, use in backend_watch.uses.items() if use.calls}
    own = {id(p): name for name, p in model.named_parameters()}
    computed = {name for name, w, done in rewritten if done.changes and id(w) not in own}
    aside = computed | {name for name, w, done in rewritten if done.changes and id(w) in tied(s, model)}
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


COMPILED: dict[str, Callable[[Subject], Columns]] = {"backend": by_aot_eager, "inductor": by_inductor, "inductor_stock": by_stock_inductor}
