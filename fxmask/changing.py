"""What `fxmask.apply` and `fxmask.restore` do to layers and graphs: masks are put in, all of them or none, and taken out."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import nn

from .conv_layers import MaskedConv2d
from .loads import note_ties, unwatch_loads, watch_loads
from .passes.finding.choose import Decision
from .passes.finding.graph_linears import graph_modules
from .passes.finding.readers import ancestors
from .passes.graphs.graph_site import graph_sites
from .passes.graphs.weight_mask import MaskWeights, RestoreLinears
from .passes.infra import run_passes
from .passes.state.rebuild import Job, rebuild
from .swap import MaskedLinear, WeightReader, swap, unswap


def mask(model: nn.Module, decisions: list[Decision], then: Callable[[], None]) -> None:
    """Mask what was chosen, then do what else belongs to it; where either fails, take off these masks. Masks that were there before stay."""
    streams = _stream_names(decisions)
    owners = {id(d): _owners(model, d) for d in decisions}
    new_readers = [m for found in owners.values() for m in found if not isinstance(m, WeightReader)]
    swapped = [(d, m) for d in decisions if d.config is not None and d.candidate.host is None and (m := d.candidate.module) is not None]
    rewrite = MaskWeights(decisions, streams)
    try:
        for d, m in swapped:
            assert d.config is not None
            mixin = MaskedConv2d if isinstance(m, nn.Conv2d) else MaskedLinear
            swap(m, d.config, d.candidate.param_name, streams[id(d.candidate.weight)], owners[id(d)], mixin, d.own)
        for _, gm in graph_modules(model):
            run_passes(gm, [rewrite])
        for _, gm in graph_modules(model):
            watch_loads(gm)
            new = [(site, weight) for site, weight in graph_sites(gm) if any(site is made for made in rewrite.made)]
            rebuild([Job(site, weight, first=True) for site, weight in new if weight is not None])
        note_ties(model)
        then()
    except BaseException:
        for m in (*(m for _, m in swapped), *new_readers):
            unswap(m)
        for _, gm in graph_modules(model):
            run_passes(gm, [RestoreLinears(rewrite.made)])
            unwatch_loads(gm)
            watch_loads(gm)
        raise


def unmask(model: nn.Module) -> None:
    """Make masked layers and graphs what they were."""
    for _, gm in graph_modules(model):
        unwatch_loads(gm)
        run_passes(gm, [RestoreLinears()])
    for m in list(model.modules()):
        unswap(m)


def _stream_names(decisions: list[Decision]) -> dict[int, str]:
    """A weight that has two names has one random mask: the first name's."""
    names: dict[int, str] = {}
    for d in decisions:
        names.setdefault(id(d.candidate.weight), d.candidate.lifted or d.candidate.param_name)
    return names


def _owners(model: nn.Module, d: Decision) -> list[nn.Module]:
    """The modules whose forward reads the weight; where the user says that one does and none is known, all that hold the layer."""
    if d.config is None or d.config.read != "weight" or d.candidate.module is None:
        return []
    if d.candidate.owners:
        return d.candidate.owners
    return [m for m in ancestors(model, d.candidate.module) if not isinstance(m, torch.fx.GraphModule)]
