"""From the shards that optimisers and checkpoints hold to the Parameters that `fully_shard` gathers from them, which are what a graph is given.

PyTorch (2.11 to 2.15) keeps both in one object for each parameter, under private names. Where another version has other names nothing is found, and it is said
that nothing is known. Nothing of torch.distributed is imported that the process has not imported itself. Shards go by their ids, which are checked: weak
references would stop torch.utils.swap_tensors, by which `model.to` moves them.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import Tensor, nn

from ..passes.state.ranks import is_shard, is_sharded_module

HELD = ("sharded_param", "_sharded_post_forward_param")  # which of them a module has depends on where in a step it is
_kept: dict[int, weakref.ref[Any]] = {}  # a shard's id -> what fully_shard keeps of it


def look(weights: Iterable[Tensor]) -> None:
    """Learn what fully_shard has, if some of these are shards that are not known: one walk over its parameters."""
    if any(is_shard(w) and _of(w) is None for w in weights):
        _kept.clear()
        for kept in _all_kept():
            _kept.update((id(t), weakref.ref(kept)) for name in HELD if (t := getattr(kept, name, None)) is not None)


def gathered(w: Tensor) -> Tensor | None:
    """The Parameter that forwards have in a shard's place; None of what is no shard, of a shard that is not fully_shard's, and where it is not known."""
    return getattr(_of(w), "_unsharded_param", None)


def aliases(w: Tensor) -> list[Tensor]:
    """The tensors by which a weight may be known: itself, and what is gathered from it."""
    whole = gathered(w)
    return [w] if whole is None else [w, whole]


def is_unread(model: nn.Module) -> bool:
    """Whether fully_shard has parts of a model, and nothing that it keeps of them is known."""
    return any(map(is_sharded_module, model.modules())) and all(_of(p) is None for p in model.parameters())


def is_unknown(w: Tensor, unread: bool) -> bool:
    """Whether fully_shard may gather this weight of a model, `unread` or not, and it is not known what. Not of other shards, as of tensor parallelism."""
    return is_shard(w) and gathered(w) is None and (unread or _of(w) is not None)


def local(t: Tensor) -> Tensor:
    """A shard's own memory, which fully_shard adds gradients to without a word to the shard; any other tensor as it is."""
    return getattr(t, "_local_tensor", t)


def _of(shard: Tensor) -> Any:
    ref = _kept.get(id(shard))
    kept = None if ref is None else ref()
    return kept if any(getattr(kept, name, None) is shard for name in HELD) else None


def _all_kept() -> Iterator[Any]:
    """Of all modules of the process: whoever looks at an optimiser has no model."""
    states = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", None) or {}
    for state in {id(s): s for ref in list(states.values()) if (s := ref() if isinstance(ref, weakref.ref) else ref) is not None}.values():
        groups = getattr(state, "_fsdp_param_groups", None)
        for group in [getattr(state, "_fsdp_param_group", None)] if groups is None else groups:
            yield from getattr(group, "fsdp_params", ())
