"""Layers of compiled models that no graph of the backend has met when they are trained: where Dynamo skips a frame it calls no backend, and says nothing.

torch.compile does not tell a backend what it compiles, so compiled models are looked for among all objects: at the first optimiser steps with gradients of
weights that no graph knows, and ever more rarely after that.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..decided import decided_by_apply, mark_again
from ..kernels.errors import first_of, message
from ..passes.finding.candidate import OWNER_REPLACED, REPLACED, Candidate, weight_problem
from ..passes.finding.choose import Decision, choose
from ..passes.finding.find import find
from ..passes.finding.outside import outside, unsaid
from ..passes.finding.patterns import matches
from ..passes.finding.plain_forward import computes_linear
from ..passes.state.ranks import is_shard
from .backend_names import inside_ddp
from .backend_options import Options, given_to, parse
from .computed import computed
from .shards import aliases, gathered, is_unknown, is_unread

FORWARDS = ("forward", "_call_impl", "_wrapped_call_impl", "__call__")  # what runs a whole model, of what torch.compile may be given
APPLY = "or use fxmask.apply(model, ...), which is masked in eager code, too."
SKIPPED = "Dynamo skips a whole frame for a graph break in a loop, and everything under torch.compiler.disable and force_eager"
SHARDED = "and a Linear that fully_shard was given by itself, as its hooks break graphs: give it the block around that; "
SHARDED += "or use fxmask.apply(model, ...) before fully_shard, which is masked in eager code, too."
CONTAINER = "DDP around a container and, before PyTorch 2.14, module.compile() of one call no backend"


class Missed(NamedTuple):
    """What a model was compiled for and does not have: its weights, whether its options make that an error, and the text."""

    weights: list[Tensor]
    required: bool
    text: str


def missed(weights: Sequence[Tensor]) -> list[Missed]:
    """Which of these weights, that have gradients and that no graph has met, the backend was to mask, or to prune the inputs of; by compiled model."""
    mark_again()
    unmet = {id(t): w for w in weights if not any(map(decided_by_apply, aliases(w))) for t in aliases(w)}
    found: list[Missed] = []
    for model, given, in_place in _compiled_models() if unmet else ():
        root: nn.Module = inside_ddp(model)
        if not any(id(p) in unmet for p in root.parameters()):
            continue
        o, unread = parse(given), is_unread(root)
        decisions = chosen(root, o, unmet, unread)
        gaps = [d for d in decisions if id(d.candidate.weight) in unmet]
        told = [unmet[id(d.candidate.weight)] for d in gaps]
        if gaps:
            required = _is_required(o, decisions, gaps)
            fix = f"{SKIPPED}: torch.compile(fullgraph=True) shows where, move it out of the loop; {APPLY}"
            if type(root).__module__.startswith("torch.nn.") and (in_place or root is not model):
                fix = f"{CONTAINER}: use torch.compile(model), and put DDP around that; {APPLY}"
            if any(map(is_shard, told)):
                fix = f"{SKIPPED}, {SHARDED}"
            what = _what(o, gaps, required, any(is_unknown(w, unread) for w in told))
            found.append(Missed(told, required, message(what, type(root).__name__, fix)))
        unmet = {i: w for i, w in unmet.items() if not any(w is t for t in told)}
    return found


def _what(o: Options, gaps: Sequence[Decision], required: bool, unknown: bool) -> str:
    names = [d.candidate.name or "the model itself" for d in gaps]
    done = "masked" if any(_is_masked(o, d) for d in gaps) else "pruned"
    what = f"an optimiser step has gradients of {first_of(names, 3)} of a model that is compiled by backend='fxmask', and "
    unshown = f"this PyTorch's fully_shard does not show whether graphs have {done} them"
    what += unshown if unknown else "no graph has reached it with them: they are dense so far"
    return what + (f", and require={o.require!r} wants them {done}." if required else ".")


def _compiled_models() -> Iterator[tuple[nn.Module, Mapping[str, Any] | None, bool]]:
    """Models that torch.compile, or their own compile(), was given with this backend, its options, and whether it is the latter; not of a container whose
    compile() wraps its call, as from PyTorch 2.14 on: then it is compiled as any other."""
    optimized = torch._dynamo.OptimizedModule  # looked up once: there may be millions of objects
    for o in gc.get_objects():
        kind = type(o)  # not isinstance, which asks proxies for what they stand for
        if issubclass(kind, optimized):
            model, callback, in_place = o._modules.get("_orig_mod"), getattr(o.__dict__.get("dynamo_ctx"), "callback", None), False
        elif kind is FunctionType and getattr(called := getattr(o, "_torchdynamo_orig_callable", None), "__name__", "") in FORWARDS:
            bound = called if hasattr(called, "__self__") else getattr(called, "__wrapped__", None)
            model, callback, in_place = getattr(bound, "__self__", None), _closure(o).get("callback"), bound is called
        else:
            continue
        ours, options = given_to(callback)
        if ours and isinstance(model, nn.Module):
            yield model, options, in_place


def _closure(f: FunctionType) -> dict[str, Any]:
    found = {}
    for name, cell in zip(f.__code__.co_freevars, f.__closure__ or (), strict=False):
        try:
            found[name] = cell.cell_contents
        except ValueError:  # empty
            continue
    return found


def chosen(root: nn.Module, o: Options, unmet: Collection[int], unread: bool, any_forward: bool = False) -> list[Decision]:
    """The linears that graphs are to mask or to prune in the whole model, if it has any of these weights; with `any_forward` also weights
    that a forward may use as one, which is not looked into. Raises as a capture does, where options are wrong."""
    found = find(root)
    linears = [c for c in found if not c.masked and (_graphs_mask(c, unread) or (any_forward and c.reads_itself))]
    linears += [c for c in unsaid(outside(root, found)) if c.weight.dim() == 2] if any_forward else []
    if not any(id(c.weight) in unmet for c in linears):
        return []
    for c in linears:
        c.problem, c.skip, c.owners = "", "", []  # graphs can mask what they read in any mode
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of patterns, which is said where a graph is captured
        decisions = choose(linears, o.config, o.include, o.exclude, o.of_masks, root)
    pruned = {id(d) for d, _ in o.pruned(decisions)}
    return [d for d in decisions if _is_masked(o, d) or id(d) in pruned]


def _is_masked(o: Options, d: Decision) -> bool:
    return not o.alone and d.config is not None and d.config.ratio > 0


def _graphs_mask(c: Candidate, unread: bool) -> bool:
    """Whether a graph could mask it. It is given what fully_shard gathers, and follows a forward that was put on an instance, where `apply` can do neither."""
    given, cls = gathered(c.weight), type(c.module)
    if c.problem and (weight_problem(given) if given is not None else not is_unknown(c.weight, unread)):
        return False
    if computed(aliases(c.weight)):  # a forward makes another weight of it, which the graph has met
        return False
    return computes_linear(cls) if c.skip in (REPLACED, OWNER_REPLACED) else not c.skip


def _is_required(o: Options, decisions: Sequence[Decision], gaps: Sequence[Decision]) -> bool:
    """Whether `require` makes these gaps an error: it is True, or one of its patterns has nothing else."""
    left = {id(d) for d in gaps}
    hits = ([id(d) in left for d in decisions if matches(p, d.candidate)] for p in o.require_patterns)
    return o.require is True or any(hit and all(hit) for hit in hits)
