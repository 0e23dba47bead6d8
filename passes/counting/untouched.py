"""What a run on fake tensors must leave as it was: attributes of modules, what they hold, random states, switches of PyTorch."""

from __future__ import annotations

import random
import sys
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import torch
from torch import nn

CONTAINERS = (dict, list, set, deque)  # with their subclasses, such as an OrderedDict


@contextmanager
def unchanged(root: nn.Module) -> Iterator[None]:
    """Inside, modules may be changed at will: afterwards every attribute is what it was, what lists, dicts and objects hold, and so are the random states."""
    modules = list(root.modules())
    before = [(m, dict(m.__dict__)) for m in modules]
    held: dict[int, tuple[Any, Any]] = {}
    for _, attributes in before:
        for value in attributes.values():
            _copies(value, held)
    state, numpy = random.getstate(), sys.modules.get("numpy")  # a forward can use only what somebody has imported
    drawn = numpy.random.get_state() if numpy is not None else None
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        random.setstate(state)
        if numpy is not None:
            numpy.random.set_state(drawn)
        for m, attributes in before:
            m.__dict__.clear()
            m.__dict__.update(attributes)
        for container, contents in held.values():
            _refill(container, contents)


def _copies(value: Any, held: dict[int, tuple[Any, Any]], objects: bool = True) -> None:
    """Note what a container holds, and the containers in it; of an object its attributes, and not of those that it refers to, such as a trainer's."""
    if isinstance(value, tuple):
        for v in value:
            _copies(v, held, objects)
        return
    if not isinstance(value, CONTAINERS):
        attributes = None if isinstance(value, (nn.Module, torch.Tensor, ModuleType)) else getattr(value, "__dict__", None)
        if not objects or type(attributes) is not dict:
            return
        value, objects = attributes, False
    if id(value) not in held:
        held[id(value)] = (value, dict(value) if isinstance(value, dict) else list(value))
        for v in value.values() if isinstance(value, dict) else value:
            _copies(v, held, objects)


def _refill(container: Any, contents: Any) -> None:
    """Put back what a container held; one that nobody changed is not touched."""
    now: Any = dict(container) if isinstance(container, dict) else list(container)
    same = len(now) == len(contents) and all(a is b for a, b in zip(_flat(now), _flat(contents), strict=True))
    if not same:
        container.clear()
        container.extend(contents) if isinstance(container, (list, deque)) else container.update(contents)


def _flat(contents: Any) -> list[Any]:
    return [x for item in contents.items() for x in item] if isinstance(contents, dict) else contents


@contextmanager
def plain_ops() -> Iterator[None]:
    """Inside, no fused op hides its products: encoder layers leave their fast path, recurrent layers their library's kernels."""
    fast, onednn = torch.backends.mha.get_fastpath_enabled(), torch._C._get_mkldnn_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    torch._C._set_mkldnn_enabled(False)  # torch.backends.mkldnn.flags warns of a setting that is not touched here
    try:
        with torch.inference_mode(False), torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        torch._C._set_mkldnn_enabled(onednn)
