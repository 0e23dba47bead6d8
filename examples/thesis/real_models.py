"""What the scripts of the thesis' tables measure on its real model, beside the closed forms: its shapes, and masks that the library makes."""

from __future__ import annotations

import copy
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from resmlp import PRESETS, ResMLP
from torch import Tensor, nn

import fxmask
from fxmask.analysis.model_shapes import LinearShape, ModelShapes
from thesis.config import parse

CONFIG = "ResMLP5 @ XPatch = masked {ratio} ({rows}, {cols}); XChannel = masked {ratio} ({rows}, {cols});"


@cache
def cifar_model() -> ResMLP:
    """The thesis' CIFAR-10 model, with weights by chance: counts of kept blocks do not depend on them."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return ResMLP(PRESETS["cifar"])


@cache
def cifar_shapes() -> ModelShapes:
    """The shapes of that model, measured; its blocks' linears are the masked ones."""
    return shapes_of(cifar_model(), torch.empty(1, 3, 32, 32, device="meta"), lambda name: name.startswith("blocks."))


@contextmanager
def masked(model: ResMLP, block: tuple[int, int], ratio: float) -> Iterator[nn.Module]:
    """`model` masked by the thesis' configuration string, and dense again after."""
    arguments = parse(CONFIG.format(ratio=ratio, rows=block[0], cols=block[1])).apply_arguments()
    with warnings.catch_warnings():  # at 64x64 one block covers the token mixing, as in the thesis
        warnings.simplefilter("ignore", fxmask.FxMaskWarning)
        model = fxmask.apply(model, **arguments)
    try:
        yield model
    finally:
        fxmask.restore(model)


@cache
def cifar_masks(block: tuple[int, int], ratio: float) -> dict[str, Tensor]:
    """The masks that the library makes of the model, by the weights' names."""
    with masked(cifar_model(), block, ratio) as model:
        return fxmask.masks(model)


def shapes_of(model: nn.Module, images: Tensor, is_masked: Callable[[str], bool]) -> ModelShapes:
    """The shapes of a real model, from its parameters and one forward on meta tensors. `is_masked` is asked for each linear's weight by name.

    The first linear reads the image, whole; every other activation counts its features once, which is the thesis' way.
    """
    model = copy.deepcopy(model).to("meta")
    linears: list[LinearShape] = []

    def note(name: str) -> Callable[[nn.Linear, tuple[Tensor], Tensor], None]:
        def hook(m: nn.Linear, args: tuple[Tensor], out: Tensor) -> None:
            rows = args[0].numel() // args[0].shape[0] // m.in_features
            linears.append(LinearShape(f"{name}.weight", m.out_features, m.in_features, is_masked(f"{name}.weight"), rows, bias=m.bias is not None))

        return hook

    inside = {n: m for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for name, m in inside.items():
        m.register_forward_hook(note(name))
    model(images.to("meta"))
    tensors = tuple(tuple(p.shape) for n, p in model.named_parameters() if n.rpartition(".")[0] not in inside)
    sizes = [n for m in linears for n in (m.in_features, m.out_features)]
    return ModelShapes(tuple(linears), tensors, (images[0].numel(), *sizes[1:]))
