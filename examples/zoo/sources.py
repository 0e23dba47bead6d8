"""From an entry of the list to a model with random weights, and inputs for it."""

from __future__ import annotations

import importlib
import socket
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from torch import Tensor, nn
from torchvision_shim import import_torchvision

from zoo.catalogue import Entry
from zoo.huggingface import tiny

IMAGE = 128  # side, where a model takes it: what is published costs three times as much
SHAPED_BY_IMAGE = {"mlp_mixer"}  # families whose layers are as wide as the image has patches: the published size


class NetworkError(ConnectionError):
    """A model asked for files from a network."""


@dataclass
class Made:
    """A model, its inputs, and what about it is not as published."""

    model: nn.Module
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = field(default_factory=dict)
    note: str = ""

    def shapes(self) -> str:
        """ "2x3x128x128", "input_ids 2x12": the input column."""
        named = [("", a) for a in self.args] + list(self.kwargs.items())
        return ", ".join(f"{name} {'x'.join(map(str, t.shape))}".strip() for name, t in named if isinstance(t, Tensor))


def refuse_network() -> None:
    """From now on, whatever this process wants to fetch raises; weights are random, so no model should want anything."""

    def refuse(self: socket.socket, address: Any) -> None:
        if self.family != socket.AF_UNIX:
            raise NetworkError(f"this model wants files from a network ({address!r})")

    socket.socket.connect = refuse  # type: ignore[method-assign,assignment]
    socket.socket.connect_ex = refuse  # type: ignore[method-assign,assignment]


def wants_network(error: BaseException | None) -> bool:
    """Whether an error, or what it came from, is about files that are not here."""
    while error is not None:
        if isinstance(error, ConnectionError) or type(error).__name__ in ("OfflineModeIsEnabled", "LocalEntryNotFoundError", "URLError"):
            return True
        error = error.__cause__ or error.__context__
    return False


def make(entry: Entry) -> Made:
    """The model of an entry, with the same random weights in every process."""
    torch.manual_seed(0)
    others = {"torchvision": _torchvision, "timm": _timm, "own": _own}
    made = tiny(entry.name, entry.task) if entry.source == "huggingface" else others[entry.source](entry.name)
    with torch.no_grad():
        stir(made.model)
    return made


def stir(model: nn.Module) -> None:
    """Noise in every parameter that is constant: a head or a layer scale that starts at zero would hide what stands before it."""
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        if p.is_floating_point() and p.numel() and bool((p == p.flatten()[0]).all()):
            p += (torch.randn(p.shape, generator=generator) * (0.5 * p[0].numel() ** -0.5 if p.dim() > 1 else 0.1)).to(p.dtype)


def images(model: nn.Module, channels: int, height: int, width: int) -> Tensor:
    """Two of them; four where a BatchNorm1d sees one number a sample, of which two would leave only a sign."""
    batch = 4 if any(isinstance(m, nn.BatchNorm1d) for m in model.modules()) else 2
    return torch.randn(batch, channels, height, width, generator=torch.Generator().manual_seed(2))


def _runs(model: nn.Module, *shape: int) -> bool:
    try:
        with torch.no_grad():
            model.eval()(torch.zeros(1, *shape))
    except Exception:  # whatever a model says of a size that it does not take
        return False
    finally:
        model.train()
    return True


def _torchvision(name: str) -> Made:
    models = import_torchvision().models
    published = 299 if name == "inception_v3" else 224
    options: dict[str, Any] = {"init_weights": True} if name in ("inception_v3", "googlenet") else {}
    smaller = published if name == "inception_v3" else IMAGE  # its auxiliary head, which trains alone, takes nothing smaller
    for more, size in _tries(name.startswith(("vit", "maxvit")), smaller, published, "input_size" if name.startswith("maxvit") else "image_size"):
        value = (size, size) if "input_size" in more else size
        try:
            model = models.get_model(name, weights=None, **options, **dict.fromkeys(more, value))
        except (TypeError, ValueError, AssertionError):  # vit_h_14 asserts that its patches fit
            continue
        if size == published or _runs(model, 3, size, size):
            return Made(model, (images(model, 3, size, size),), note="" if size == published else f"image {size} for {published}")
    raise AssertionError("the published size is always tried")


def _timm(name: str) -> Made:
    import_torchvision()
    import timm

    cfg = timm.models.get_pretrained_cfg(name)
    assert cfg is not None
    channels, height, width = cfg.input_size
    smaller = IMAGE if timm.models._registry._model_to_module[name] not in SHAPED_BY_IMAGE else max(height, width)
    if smaller < max(height, width):
        for more, size in _tries(bool(cfg.fixed_input_size), smaller, max(height, width), "img_size"):
            try:
                model = timm.create_model(name, pretrained=False, **dict.fromkeys(more, size))
            except (TypeError, ValueError, AssertionError, RuntimeError):
                continue
            if size == smaller and _runs(model, channels, size, size):
                return Made(model, (images(model, channels, size, size),), note=f"image {size} for {height}")
    model = timm.create_model(name, pretrained=False)
    return Made(model, (images(model, channels, height, width),))


def _tries(fixed: bool, smaller: int, published: int, option: str) -> Iterator[tuple[tuple[str, ...], int]]:
    """(options that take the size, size): a model for one size has to be told; the published size is what it has anyway."""
    yield ((option,) if fixed else ()), smaller
    yield (), published


def _own(name: str) -> Made:
    module, _, attribute = name.partition(":")
    found = getattr(importlib.import_module(module), attribute)()
    if isinstance(found, Made):
        return found
    match found:  # a lone nn.Sequential would be taken apart, and a tensor in the place of args cut into its rows
        case (nn.Module() as model, tuple() | list() as args):
            return Made(model, tuple(args))
        case (nn.Module() as model, tuple() | list() as args, Mapping() as kwargs):
            return Made(model, tuple(args), dict(kwargs))
    got = f"({', '.join(type(part).__name__ for part in found)})" if isinstance(found, (tuple, list)) else type(found).__name__
    raise TypeError(f"expected (model, args), an nn.Module and the tuple of its inputs, from {name}, got {got}")
