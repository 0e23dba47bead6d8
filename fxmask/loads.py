"""Loading weights into a masked graph: its masks do not own their weights, so the owners tell them of new ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import nn
from torch.fx import GraphModule

from .passes.graphs.graph_site import GraphSite, graph_sites
from .passes.state.loaded import after_load
from .passes.state.site import Site
from .passes.state.ties import Ties


def _owner_loaded(site: GraphSite, leaf: str, owner: nn.Module, incompatible: object) -> None:
    ties = site.__dict__.get("_fxmask_tied")
    if ties is not None:
        ties.join(site, owner, leaf)
    after_load(site, getattr(owner, leaf))


def _graph_loaded(gm: nn.Module, incompatible: object) -> None:
    for site, weight in graph_sites(gm):  # type: ignore[arg-type]
        if weight is not None and "." not in (site.weight_path or ""):
            after_load(site, weight)


def note_ties(model: nn.Module) -> None:
    """Let the masks of one weight know each other: layers load one after the other, and what one loads is the weight of all."""
    users: dict[int, list[tuple[Site, nn.Module, str]]] = {}
    for m in model.modules():
        places: list[tuple[Site, nn.Module, str]] = [(m, m, "weight")] if isinstance(m, Site) and not isinstance(m, GraphSite) else []
        if isinstance(m, GraphModule):  # its own parameters are loaded before any hook runs
            paths = [(site, *(site.weight_path or "").rpartition(".")) for site, _ in graph_sites(m)]
            places = [(site, m.get_submodule(owner), leaf) for site, owner, dot, leaf in paths if dot]
        for site, owner, leaf in places:
            users.setdefault(id(owner._parameters.get(leaf)), []).append((site, owner, leaf))
    users.pop(id(None), None)
    for same in users.values():
        ties = Ties() if len(same) > 1 else None
        for site, owner, leaf in same:
            site._fxmask_tied = ties
            if ties is not None:
                ties.join(site, owner, leaf)


def _is_ours(hook: Any) -> bool:
    return hook is _graph_loaded or (isinstance(hook, partial) and hook.func is _owner_loaded)


def watch_loads(gm: GraphModule) -> None:
    """Follow `load_state_dict` of a graph module, or of the submodules that hold its weights. Calling it again changes nothing."""
    watched = [hook.args[0] for m in gm.modules() for hook in m._load_state_dict_post_hooks.values() if isinstance(hook, partial) and _is_ours(hook)]
    for site, weight in graph_sites(gm):
        owner, _, leaf = (site.weight_path or "").rpartition(".")
        if weight is None or any(site is w for w in watched):
            continue
        if owner:
            gm.get_submodule(owner).register_load_state_dict_post_hook(partial(_owner_loaded, site, leaf))
        elif _graph_loaded not in gm._load_state_dict_post_hooks.values():  # a hook on the root that held the root could not be pickled
            gm.register_load_state_dict_post_hook(_graph_loaded)


def unwatch_loads(gm: GraphModule) -> None:
    """Remove what `watch_loads` registered."""
    for m in gm.modules():
        unhook(m, _is_ours)


def unhook(m: nn.Module, ours: Callable[[Any], bool]) -> None:
    """Remove those hooks of a module's loads that are ours."""
    hooks = m._load_state_dict_post_hooks
    for key in [k for k, hook in hooks.items() if ours(hook)]:
        del hooks[key]
