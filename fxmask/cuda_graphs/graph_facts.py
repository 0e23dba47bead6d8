"""The addresses that a captured step reads, and the Python values that it was captured with: `graphed_step` compares both before every call.

Tensors, modules and their hooks are compared by identity, and kept alive here, so that no other one gets their address; Python values are compared by value.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as every
from torch.optim import Optimizer

from ..decided import times_changed
from ..guards.guard_handle import GuardHandle
from ..passes.state.site import Site

SITE = tuple(f"_fxmask_{name}" for name in ("keep", "count", "dense", "mask", "lists", "score", "scale"))
HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
OF_ALL = (every._global_forward_pre_hooks, every._global_forward_hooks, every._global_backward_pre_hooks, every._global_backward_hooks)
LAYER = tuple(f"_fxmask_{name}" for name in ("pruning", "dropping", "nm", "nm_frozen"))


class Facts:
    """Of one set of graphs: its optimisers, and the modules of guarded models, of `models` and of `layers` of others, which grow with each capture."""

    def __init__(
        self, optimizers: Sequence[Optimizer], models: Iterable[nn.Module], layers: dict[nn.Module, None], handles: Sequence[GuardHandle], device: torch.device
    ) -> None:
        self.device = device
        self.optimizers, self.layers = optimizers, layers
        self.modules: dict[nn.Module, None] = {}
        for root in (*models, *layers, *(m for h in handles for m in h._noticed.alive())):
            self.watch(() if root in self.modules else root.modules())
        self.watch(site for h in handles for site, _ in h._held.followed)
        self.handles = list(handles)

    @property
    def groups(self) -> list[dict[str, Any]]:
        """Of all optimisers, as they are now."""
        return [group for o in self.optimizers for group in o.param_groups]

    def watch(self, modules: Iterable[nn.Module]) -> None:
        """Compare these, too."""
        self.modules.update(dict.fromkeys(modules))

    def lies(self, value: Any) -> bool:
        """Whether a replay reads this number from memory. A Python number, or a CPU tensor beside weights on a GPU, is part of the graph."""
        return isinstance(value, Tensor) and value.device == self.device

    def tensors(self) -> list[Any]:
        """What is compared by identity, children and hooks of modules among it, and where the optimisers' tensors lie; sites' masks and scalars are rewritten
        in place from now on."""
        found: list[Any] = [hook for hooks in OF_ALL for hook in (None, *hooks.values())]
        for o in self.optimizers:
            before, after = (getattr(o, f"_optimizer_step_{kind}_hooks", {}) for kind in ("pre", "post"))  # accelerate's wrapper has none
            found += (*before.values(), o, *after.values())
            for state in o.state.values():
                found += state.values()
        for group in self.groups:
            found += group["params"]
            found += [v for v in group.values() if isinstance(v, Tensor)]
            for p in group["params"]:
                if p._backward_hooks or p._post_accumulate_grad_hooks:
                    found += (p, *(p._backward_hooks or {}).values(), None, *(p._post_accumulate_grad_hooks or {}).values())
        for m in self.modules:
            found += (m, _forward_of(m.__class__), m.__dict__.get("forward"))  # libraries replace both, and a GraphModule makes the first anew
            found += m._parameters.values()
            found += m._buffers.values()
            found += m._modules.values()  # one that is new has to be watched, too
            for kind in HOOKS:
                if m.__dict__[kind]:
                    found += (kind, *m.__dict__[kind].values())  # with its place: a hook that has moved elsewhere is another
            if isinstance(m, Site) and "_fxmask_keep" in m.__dict__:
                if not m._fxmask_in_place:
                    m._fxmask_in_place = True
                found += [m.__dict__[name] for name in SITE]
            elif "_fxmask_nm" in m.__dict__:
                found += [v for v in m.__dict__.values() if isinstance(v, Tensor)]
        places = [t.data_ptr() for o in self.optimizers for state in o.state.values() for t in state.values() if isinstance(t, Tensor)]  # which .data moves
        return [t for t in found if not isinstance(t, (int, float))] + places

    def decisions(self) -> dict[str, Hashable]:
        """What is compared by value, by what a warning calls it."""
        kind = self.device.type
        modules = self.modules
        return {
            "numbers of the optimiser": numbers(self.groups, self),
            "where parameters lie, or whether they are trained": tuple((p.data_ptr(), p.requires_grad) for group in self.groups for p in group["params"]),
            "where tensors of the modules lie, or whether they are trained": tuple(
                (t.data_ptr(), t.requires_grad) for m in modules for d in (m._parameters, m._buffers) for t in d.values() if t is not None
            ),
            "classes of modules, or whether they train": tuple((m.__class__, m.training) for m in modules),
            "phases, modes or kernels of masks": tuple(_of_site(m) for m in modules if "_fxmask_keep" in m.__dict__),
            "how inputs are pruned or dropped, or N:M masks frozen": tuple(_of_layer(m) for m in modules if not m.__dict__.keys().isdisjoint(LAYER)),
            "models that are masked, or so no more": 0 if modules and not self.layers else times_changed(),
            "autocast, or gradients": (torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind), torch.is_grad_enabled()),
            "PyTorch's settings": _settings(),
        }


def _forward_of(kind: type) -> Any:
    """What a class has for its forward: asked for by attribute, a classmethod and a partialmethod are new objects each time."""
    for c in kind.__mro__:
        if "forward" in c.__dict__:
            return c.__dict__["forward"]
    return None


def _settings() -> Hashable:
    """Of the process: by these PyTorch chooses kernels and dtypes."""
    b = torch.backends
    matmul, conv = b.cuda.matmul, b.cudnn.conv  # type: ignore[attr-defined]
    sums = matmul.allow_fp16_reduced_precision_reduction, matmul.allow_bf16_reduced_precision_reduction, matmul.allow_fp16_accumulation
    products = matmul.fp32_precision, conv.fp32_precision, sums
    attention = b.cuda.flash_sdp_enabled(), b.cuda.mem_efficient_sdp_enabled(), b.cuda.math_sdp_enabled(), b.cuda.cudnn_sdp_enabled()
    return torch.get_default_dtype(), torch.are_deterministic_algorithms_enabled(), b.cudnn.deterministic, products, attention


def _of_site(s: Any) -> Hashable:
    return s._fxmask_phase, s._fxmask_kind, s._fxmask_from, s._fxmask_softening, s._fxmask_is_dense


def _of_layer(m: Any) -> Hashable:
    return tuple(map(m.__dict__.get, LAYER))


def numbers(groups: Iterable[dict[str, Any]], facts: Facts) -> str:
    """The optimisers' numbers that a graph would hold fixed."""
    return repr([(k, len(v) if k == "params" else _plain(v)) for group in groups for k, v in group.items() if not facts.lies(v)])


def host_values(facts: Facts) -> list[tuple[dict[Any, Any], Any, Any]]:
    """(dict, key, value) of what optimisers keep on the host: a capture that moves it would move it once, and no replay again."""
    own = [state for o in facts.optimizers for state in o.state.values()] + facts.groups
    return [(d, k, v.clone() if isinstance(v, Tensor) else v) for d in own for k, v in d.items() if k != "params" and not facts.lies(v)]


def moved(values: list[tuple[dict[Any, Any], Any, Any]]) -> bool:
    """Whether some of these are others by now."""
    return repr([_plain(v) for _, _, v in values]) != repr([_plain(d.get(k)) for d, k, _ in values])


def put_back(values: list[tuple[dict[Any, Any], Any, Any]]) -> None:
    """As they were; a tensor keeps its place."""
    for d, k, v in values:
        d[k] = d[k].copy_(v) if isinstance(v, Tensor) and isinstance(d.get(k), Tensor) else v


def _plain(value: Any) -> Any:
    return value.tolist() if isinstance(value, Tensor) else value  # of the CPU: those on a device lie there


def keys_of(optimizers: Iterable[Optimizer]) -> dict[Any, set[Any]]:
    """The entries of the optimisers' state, by parameter."""
    return {p: set(state) for o in optimizers for p, state in o.state.items()}
