"""Errors of selected linears, before anything is changed: weights and calls that cannot be masked so, and weights that others use in another way."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from torch import nn

from ...kernels.errors import ConfigError, StateError, UnsupportedError, message
from ..settings.config import WeightMask
from ..settings.phases import IN_NODES, changes_any, in_turn
from ..state.saliency import GIVEN
from .candidate import Candidate

if TYPE_CHECKING:
    from .choose import Decision


def check_selected(decisions: list[Decision]) -> None:
    """Errors of selected linears: weights that cannot be masked, or are masked already, or twice in two ways."""
    first: dict[int, Decision] = {}
    decisions = [d for d in decisions if not d.candidate.product]
    for d in decisions:
        if d.config is not None:
            where = d.candidate.name or "the model itself"
            _check_weight(d.candidate, d.config, where)
            _check_call(d.candidate, d.config, where)
            _check_shared(d, d.config, where, decisions, first.setdefault(id(d.candidate.weight), d))


def _check_weight(c: Candidate, config: WeightMask, where: str) -> None:
    """Raise where a weight cannot be masked so, whatever calls it."""
    if c.problem:
        raise UnsupportedError(message(f"cannot change {where!r}: {c.problem}.", where, f"or leave it out: exclude={c.name!r}."))
    if c.masked:
        raise StateError(message(f"{where!r} is masked already: expected a dense layer.", where, "call fxmask.restore(model) first."))
    if config.read == "weight" and nn.Conv2d in c.types:
        what = f"cannot mask {where!r} by read='weight', which is for Linears: got a convolution."
        raise UnsupportedError(message(what, where, f"exclude={c.name!r}, or let its owner call it."))
    if config.read == "weight" and (c.module is None or c.nodes or "weight" not in c.module._parameters):
        what = f"cannot mask {where!r} by read='weight': expected a module with a plain weight parameter."
        raise UnsupportedError(message(what, where, f"exclude={c.name!r}."))
    if config.cached and c.weight.is_meta:
        kind = f"a cached mask (refresh={config.refresh})"
        kind = "a mask that outlives a step (gradients, averages, hysteresis, regrow, gain)" if config.remembers else kind
        what = f"{kind} needs the weight's values: expected real memory, got a meta tensor."
        later = f", or use refresh=1; phases={{1: dict(refresh={config.refresh})}} beside it has masks cached from the first step on."
        fix = "materialise the model first" + ("." if config.remembers else later)
        raise UnsupportedError(message(what, where, fix))


def _check_call(c: Candidate, config: WeightMask, where: str) -> None:
    """Raise where a call in a graph cannot have what a module can."""
    if c.host is None:
        return
    baked = changes_any(config, IN_NODES) if c.weight_node is None else []
    if baked:
        what = f"a traced graph holds {' and '.join(baked)} in its nodes: expected phases that change nothing of these, got {config.phases!r}."
        raise UnsupportedError(message(what, where, "call fxmask.apply on the nn.Module instead of its trace; torch.compile that."))
    computed = c.weight_path is None and c.weight_node is None
    if computed and config.ever_cached:
        refresh = next(p.refresh for p in in_turn(config) if p.cached)
        what = f"a cached mask (refresh={refresh}) needs the parameter, and this graph computes the weight."
        fix = "use refresh=1 for it" + (", no gradient criterion, average, hysteresis, regrow or gain." if config.remembers else ".")
        fix = "give the mask or scores to the nn.Module, before it is traced or exported." if config.criterion == GIVEN else fix
        raise UnsupportedError(message(what, where, fix))
    if computed and config.wants_weight:
        what = "Feedback('flip_rate') looks at the weight between steps, and this graph computes it."
        raise UnsupportedError(message(what, where, "call fxmask.apply on the nn.Module instead of its trace, or use another schedule for it."))
    if config.soft:
        what = "soft=True is for modules: expected an nn.Linear that is called, got a call in a graph."
        raise UnsupportedError(message(what, where, "apply fxmask to the nn.Module, and trace or compile it afterwards; or leave soft out."))


def _check_shared(d: Decision, config: WeightMask, where: str, decisions: list[Decision], first: Decision) -> None:
    """Raise where others use the weight in another way. `first`: the first decision about it."""
    c, writes = d.candidate, config.gain or config.regrow is not None
    others = [o.candidate.name for o in decisions if o.candidate.weight is c.weight and o.candidate is not c] if writes else []
    if others or (writes and c.tied_embedding):
        what = f"gain and regrow write the weight of {where!r}, which {', '.join(map(repr, others)) or 'an Embedding'} uses, too: expected one user."
        raise ConfigError(message(what, where, "leave them out for it, or exclude it."))
    if first.config is None or dataclasses.replace(first.config, read="call") != dataclasses.replace(config, read="call"):
        what = f"one weight would be masked twice, differently: {first.candidate.name!r} and {where!r} share it."
        raise ConfigError(message(what, where, "give both the same options, or exclude both."))
