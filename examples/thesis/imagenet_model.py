"""The masked model of an ImageNet run: the thesis' ResMLP in any size, or a model of timm's."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import Any

import torch
import train as common
from data import DataMissing, torchvision
from resmlp import PRESETS, ResMLP
from torch import nn

import fxmask
from thesis.config import parse

PRESET = PRESETS["imagenet-thesis"]
SIZES = ("patch", "dim", "depth", "expansion")


def build(args: argparse.Namespace, classes: int, steps: int, device: torch.device) -> nn.Module:
    """The model that the command line asks for, masked, on its device; the seed makes it the same on every rank. `steps` is an epoch's."""
    thesis = parse(args.config) if args.config else None
    torch.manual_seed(args.seed)
    model = (timm_model(args, classes) if args.timm else resmlp(args, classes, thesis.depth if thesis else None)).to(device)
    if args.dense:
        return model
    masks: dict[str, Any] = thesis.apply_arguments() if thesis else {"ratio": args.ratio, "block": tuple(args.block), **default_names(args, model)}
    if not masks:
        raise fxmask.FxMaskError(f"--config {args.config!r}: expected layers to mask behind '@', got none.\n  fix: --dense trains without masks.")
    options: dict[str, Any] = {"backward": args.backward, "criterion": args.criterion, "refresh": args.refresh, "seed": args.seed, "cover": args.cover}
    options |= {"start": round(args.masks_from * steps), "schedule": common.schedule(args.schedule, steps)}
    names = {key: masks.pop(key) for key in ("include", "exclude", "overrides") if key in masks}
    return fxmask.apply(model, fxmask.WeightMask(**masks, **options), **names)


def resmlp(args: argparse.Namespace, classes: int, depth: int | None) -> ResMLP:
    """The thesis' ResMLP12, but for the sizes that are given."""
    if depth is not None and args.depth not in (None, depth):
        raise fxmask.FxMaskError(f"--depth: expected {depth}, as in --config {args.config!r}, got {args.depth}.\n  fix: leave --depth out.")
    sizes = {name: getattr(args, name) for name in SIZES if getattr(args, name) is not None} | ({"depth": depth} if depth else {})
    try:
        return ResMLP(replace(PRESET, image=args.image, classes=classes, **sizes))
    except ValueError as error:
        raise fxmask.FxMaskError(f"--image, --patch: {error}") from error


def timm_model(args: argparse.Namespace, classes: int) -> nn.Module:
    """One of timm's models, untrained."""
    timm = import_timm(f"--timm {args.timm}")
    if not timm.is_model(args.timm):
        near = ", ".join(timm.list_models(f"*{args.timm.split('_')[0]}*")[:5]) or "none with a name like it"
        what = f"--timm: expected a model of timm {timm.__version__}, got {args.timm!r}; it has {near}."
        raise fxmask.FxMaskError(f"{what}\n  fix: one of timm.list_models().")
    try:
        return timm.create_model(args.timm, num_classes=classes, img_size=args.image)
    except TypeError:  # models that take any size have no such argument
        return timm.create_model(args.timm, num_classes=classes)


def import_timm(what: str) -> Any:
    """timm, which imports torchvision."""
    torchvision()
    try:
        import timm
    except ImportError as error:
        raise DataMissing(f"{what}: expected timm, got {error}.\n  fix: pip install 'fxmask[models]', or timm") from error
    return timm


def default_names(args: argparse.Namespace, model: nn.Module) -> dict[str, Any]:
    """Which linears are masked without --config: as in the thesis all but patch embedding and head."""
    if not args.timm:
        return {"include": "blocks.*"}
    head = model.get_classifier()  # type: ignore[operator]
    return {"exclude": [*args.exclude, *(name for name, m in model.named_modules() if m is head)]}
