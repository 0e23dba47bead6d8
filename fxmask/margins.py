"""`fxmask.stability`: whether masks can change what a chain of layers predicts, by the bounds of Danhofer (2024)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .chains import Link, chain_of, row_sum, spectral
from .kernels.errors import ConfigError, ShapeError, message
from .passes.finding.candidate import join
from .report import Report
from .sites import values_of

BOUNDS = ("3.4", "3.5", "3.6")  # as the paper numbers them
EVERY = "all masks at once"
Found = dict[str, dict[str, Tensor]]  # {bound: {layer: (B,)}}


class Stability(Report):
    """What `stability` found. margin: (B,), half the distance of the two largest probabilities of the dense model.

    bounds: {"3.4" | "3.5" | "3.6": {layer: (B,)}}, in "3.4" with the entry "all masks at once" where layers are masked. All float64.
    stable(which, layer): bool (B,), whether the margin exceeds the bound, so that the prediction cannot change.
    """

    margin: Tensor
    bounds: Found

    def stable(self, which: str, layer: str) -> Tensor:
        """Where the prediction is proven to stay."""
        return self.margin > self.bounds[which][layer]


@torch.no_grad()
def stability(model: nn.Module, inputs: Tensor, updated: Mapping[str, Tensor] | None = None, literal: bool = False) -> Stability:
    """Bounds on what masking one layer does to the predictions of softmax∘f_d∘..∘f_1, f_i(h) = σ_i(W_i h + b_i), beside the margin that they must stay below.

    With γ = (p1 - p2) / 2 of the dense model, σ_i Lipschitz with constant L_i, and layer j masked, its prediction is the dense one's wherever γ exceeds

    | bound | | for |
    | --- | --- | --- |
    | 3.4 | ‖ΔW_j‖ ‖h‖ Π_{i>=j} L_i Π_{i>j} ‖W_i‖ | the mask that the layer has, ΔW = W∘M - W |
    | 3.5 | ‖abs(W_j)‖ ‖h‖ Π_{i>=j} L_i Π_{i>j} ‖W_i‖ | any mask of the layer |
    | 3.6 | (‖W_j‖∞ + ‖U_j‖∞) ‖h‖∞ Π_{i>=j} L_i Π_{i>j} ‖W_i‖∞ | any mask of the weight W_j + U_j, to which the layer has moved |

    h is what arrives at layer j. ‖·‖ of a matrix is the largest singular value, ‖·‖∞ the largest absolute row sum; of h: the length, the largest element.
    Two things are ours. The source has ‖x‖ Π_{i<j} L_i ‖W_i‖ for ‖h‖, which is right only where nothing in front of the layer has a bias and σ_i(0) = 0. And
    it has ‖W_j‖ in 3.5, which zeros can make larger (a Hadamard matrix's sqrt(n) becomes about n / 2). `literal=True` computes what is printed and says where
    that proves nothing. All masks of the model at once, ours too: e_i <= L_i (‖W_i∘M_i‖ e_{i-1} + ‖ΔW_i‖ ‖h_{i-1}‖).

    The bounds are products of norms, for few layers and large margins. Where no layer has a bias and σ_i(0) = 0, γ exceeds neither 3.5 nor 3.6, ever.

    Args:
        model: an nn.Sequential of Linears, masked or not, and activations; a softmax at its end may be left out. It is read as in eval(), and not changed.
        inputs: (B, ...) of any floating dtype; behind a leading Flatten (B, K).
        updated: newer weights by their names, such as a later `state_dict()`, for U; what it does not name has not moved.
        literal: the source's formulas.

    Returns: `Stability`, a `Report` with a row a layer: medians of the bounds over the inputs, of how many inputs the margin exceeds each, and `unchanged`: of
    how many the mask of this layer alone does not change the prediction, as computed.
    Raises: UnsupportedError for another model, ShapeError, ConfigError. Not differentiable.
    Cost: a singular value decomposition or two a layer and a forward for each masked one, in float64. Exact to its rounding.
    """
    if type(literal) is not bool:
        raise ConfigError(f"fxmask.stability: literal: expected True or False, got {literal!r}.")
    front, links = chain_of(model)
    h = _inputs(inputs, front, links[0])
    if len(links[-1].weight) < 2:
        raise ShapeError(message("fxmask.stability: expected at least two classes to choose among, got one output.", links[-1].name, "give a classifier."))
    margin, label, arrived = _run(links, h)
    found = bounds_of(links, arrived, _moves(links, updated), literal)
    masked = {link.name: [link] for link in links if link.masked is not None}
    if masked and not literal:
        found["3.4"][EVERY] = together(links, arrived)
        masked[EVERY] = [link for link in links if link.masked is not None]
    same = {name: int((_logits(links, h, parts).argmax(1) == label).sum()) for name, parts in masked.items()}
    rows = [_row(link, links[:j], margin, found, same, literal) for j, link in enumerate(links)]
    if EVERY in same:
        rows.append({"name": EVERY} | _cells(EVERY, margin, found) | {"unchanged": same[EVERY]})
    form = "as printed" if literal else "as they hold"
    median = float(margin.quantile(0.5))
    made = Stability(f"fxmask.stability: {len(margin)} inputs, margins {median:.3g} in the median, {float(margin.max()):.3g} at most; bounds {form}", rows)
    made.margin, made.bounds = margin, found
    if literal and (doubtful := [str(r["name"]) for r in rows if r["holds"] is not True]):
        made.notes.append(f"Printed bounds prove something only where `holds` is True: not for {', '.join(doubtful)}. Without literal=True all layers' do.")
    return made


def bounds_of(links: Sequence[Link], arrived: Sequence[Tensor], moves: Mapping[str, Tensor], literal: bool) -> Found:
    """{bound: {layer: (B,)}}; 3.4 for masked layers alone. arrived: (B, K_i), what each link is given; moves: U (N, K) by the layer's name."""
    norms, rows = [link.norm for link in links], [link.row_sum for link in links]
    found: Found = {which: {} for which in BOUNDS}
    for j, link in enumerate(links):
        slopes = math.prod(part.slope for part in links[j:])
        behind, behind_inf = slopes * math.prod(norms[j + 1 :]), slopes * math.prod(rows[j + 1 :])
        if literal:
            before = math.prod(part.slope for part in links[:j])
            reach, reach_inf = arrived[0].norm(dim=1) * before * math.prod(norms[:j]), _largest(arrived[0]) * before * math.prod(rows[:j])
        else:
            reach, reach_inf = arrived[j].norm(dim=1), _largest(arrived[j])
        if link.masked is not None:
            found["3.4"][link.name] = link.change * reach * behind
        found["3.5"][link.name] = (link.norm if literal else spectral(link.weight.abs())) * reach * behind
        moved = row_sum(moves[link.name]) if link.name in moves else 0.0
        found["3.6"][link.name] = (link.row_sum + moved) * reach_inf * behind_inf
    return found


def together(links: Sequence[Link], arrived: Sequence[Tensor]) -> Tensor:
    """(B,): how far all masks together can move the logits."""
    error = torch.zeros_like(arrived[0][:, 0])
    for link, h in zip(links, arrived, strict=True):
        norm = link.norm if link.masked is None else spectral(link.masked)
        error = link.slope * (norm * error + link.change * h.norm(dim=1))
    return error


def _largest(h: Tensor) -> Tensor:
    return h.abs().amax(1)


def _logits(links: Sequence[Link], h: Tensor, masked: Sequence[Link] = ()) -> Tensor:
    for link in links:
        h = link(h, link.masked if any(link is part for part in masked) else None)
    return h


def _run(links: Sequence[Link], h: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """(margin (B,), prediction (B,), what each link is given) of the dense chain."""
    arrived = []
    for link in links:
        arrived.append(h)
        h = link(h)
    top = torch.softmax(h, 1).topk(2, 1).values
    return (top[:, 0] - top[:, 1]) / 2, h.argmax(1), arrived


def _inputs(inputs: Tensor, front: Sequence[nn.Module], first: Link) -> Tensor:
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or not inputs.numel() or inputs.is_meta:
        got = f"{inputs.dtype} {tuple(inputs.shape)} on {inputs.device}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise ConfigError(message(f"fxmask.stability: expected inputs (B, ...), a floating tensor with elements, got {got}.", "inputs", "give a batch."))
    h = inputs.detach().to(first.weight.device, torch.float64, copy=True)  # a module in front may work in place
    for m in front:
        h = m(h)
    if h.dim() != 2 or h.shape[1] != first.weight.shape[1]:
        what = f"fxmask.stability: expected (B, {first.weight.shape[1]}) at the first Linear, a prediction each, got {tuple(h.shape)}."
        raise ShapeError(message(what, first.name or "the model itself", "give inputs of that shape, or an nn.Flatten() in front."))
    return h


def _moves(links: Sequence[Link], updated: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
    """U by the layer's name: how far each weight has moved."""
    if updated is None:
        return {}
    named = {join(link.name, "weight"): link for link in links}
    if not isinstance(updated, Mapping) or named.keys().isdisjoint(updated):
        got = ", ".join(map(str, list(updated)[:5])) if isinstance(updated, Mapping) else type(updated).__name__
        raise ConfigError(message(f"updated: expected weights by name, some of {', '.join(named)}, got {got}.", "fxmask.stability", "give a state_dict()."))
    found = {}
    for name, link in named.items():
        if name in updated:
            new = updated[name]
            if not isinstance(new, Tensor) or new.is_complex() or new.layout is not torch.strided:
                got = f"{new.dtype}, {new.layout}" if isinstance(new, Tensor) else type(new).__name__
                what = f"updated[{name!r}]: expected a dense tensor of real numbers, got {got}."
                raise ConfigError(message(what, "fxmask.stability", "give a state_dict()."))
            if new.shape != link.weight.shape:
                what = f"updated[{name!r}]: expected shape {tuple(link.weight.shape)}, got {tuple(new.shape)}."
                raise ShapeError(message(what, "fxmask.stability", "give weights of the same model."))
            found[link.name] = values_of(name, new, "fxmask.stability").detach().to(link.weight) - link.weight
    return found


def _cells(name: str, margin: Tensor, found: Found) -> dict[str, Any]:
    """The median of each bound, and the number of inputs whose margin exceeds it."""
    cells: dict[str, Any] = {}
    for which in BOUNDS:
        bound = found[which].get(name)
        cells[f"bound_{which}"] = None if bound is None else float(bound.quantile(0.5))
        cells[f"stable_{which}"] = None if bound is None else int((margin > bound).sum())
    return cells


def _row(link: Link, before: Sequence[Link], margin: Tensor, found: Found, same: Mapping[str, int], literal: bool) -> dict[str, Any]:
    change = None if link.masked is None else link.change
    row = {"name": link.name, "shape": "x".join(map(str, link.weight.shape)), "norm": link.norm, "change": change, "slope": link.slope}
    holds: dict[str, Any] = {}
    if literal:
        zero = all(part.keeps_zero() for part in before)
        grows = spectral(link.weight.abs()) > (1 + 1e-9) * link.norm
        holds = {"holds": True if zero and not grows else "not 3.5" if zero else False}
    return row | _cells(link.name, margin, found) | {"unchanged": same.get(link.name)} | holds
