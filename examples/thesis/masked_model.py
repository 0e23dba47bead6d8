"""The model of a run of train.py: ResMLP with the masks that the command line asks for."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
import train as common
from checked_arguments import check_model
from resmlp import PRESETS, ResMLP
from torch import Tensor, nn
from torch.nn import functional as F

import fxmask
from fxmask.errors import ConfigError
from fxmask.kernels import score
from fxmask.passes.state.saliency import LEARNED
from thesis.config import parse
from thesis.recipe import Recipe, guard, optimiser

CRITERIA = (*score.CRITERIA, *LEARNED)


def regrow(text: str | None, per_epoch: int) -> fxmask.Regrow | None:
    """`--regrow`: "gradient:0.3:10ep", "random:0.3", or nothing."""
    if text is None:
        return None
    by, _, rest = text.partition(":")
    fraction, _, until = rest.partition(":")
    return fxmask.Regrow(by, common.number(fraction, "--regrow BY:FRACTION"), common.steps(until, per_epoch) if until else None)


def preset_of(args: argparse.Namespace) -> str:
    """The model's name among the presets."""
    return args.model or ("imagenet-thesis" if args.recipe == "imagenet" else common.DEFAULT_MODEL[args.data])


def build(args: argparse.Namespace, name: str, channels: int, classes: int, steps: int, begin: Mapping[str, Tensor] | None = None) -> nn.Module:
    """The model that the command line asks for, with its masks; `args.dense` is set where it has none. `steps`: an epoch's; `begin`: weights, before masks."""
    thesis, preset = parse(args.config) if args.config else None, PRESETS[name]
    sizes = {key: value for key, value in (("dim", args.dim), ("expansion", args.expansion), ("hidden", args.hidden)) if value}
    torch.manual_seed(args.seed)
    model = ResMLP(replace(preset, channels=channels, classes=classes, depth=thesis.depth if thesis else preset.depth, **sizes)).to(args.device)
    if begin is not None:
        begin_with(model, begin)
    configs, how = masks_of(args, steps)
    args.dense = not any(isinstance(config, fxmask.WeightMask) for config in configs)
    return fxmask.apply(model, *configs, **how) if configs else model


def masks_of(args: argparse.Namespace, steps: int) -> tuple[list[fxmask.WeightMask | fxmask.ActivationPruning], dict[str, Any]]:
    """What `fxmask.apply` is given, none for a model without either; `steps`: an epoch's."""
    default = {"ratio": 0.5, "block": (16, 16)} if args.data == "digits" else {"ratio": 0.8, "block": (32, 32)}
    masks: dict[str, Any] = parse(args.config).apply_arguments() if args.config else default | {"include": "blocks.*"}
    if args.allocation and "overrides" in masks:
        masks["overrides"] = shared(masks["overrides"])
    inputs = [config for config in [activations(args.activations)] if config]
    if args.dense or not masks:
        return [*inputs], {"include": "blocks.*"}
    options = {"backward": args.backward, "criterion": args.criterion, "refresh": args.refresh, "seed": args.seed, "cover": args.cover}
    options |= {key: getattr(args, key) for key in ("average", "hysteresis", "dense_every", "soft", "gain")}
    options["regrow"] = regrow(args.regrow, steps)
    options |= {"start": round(args.masks_from * steps), "schedule": common.schedule(args.schedule, steps)}
    names = {key: masks.pop(key) for key in ("include", "overrides") if key in masks}
    return [fxmask.WeightMask(**masks, **options), *inputs], {**names, "allocation": args.allocation}


def check(args: argparse.Namespace) -> None:
    """What is wrong whatever the images are. Raises: FxMaskError."""
    check_model(preset_of(args), args.data)
    for steps in (1, 10, 100, 1000):  # lengths in epochs that are too short for one step may be long enough for many, and others the other way round
        try:
            masks_of(args, steps)
            return
        except fxmask.FxMaskError:
            pass
    masks_of(args, 10**6)


def begin_with(model: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Load another model's weights, before masks and gains are made of them. FxMaskError where its shape is another."""
    theirs, ours = ({name: tuple(t.shape) for name, t in state.items()} for state in (weights, model.state_dict()))
    differ = [name for name in theirs | ours if theirs.get(name) != ours.get(name)]
    if differ:
        got = f"{differ[0]} {theirs.get(differ[0], 'missing')}, the pupil has {ours.get(differ[0], 'none')}"
        raise fxmask.FxMaskError(f"--from-teacher: expected a teacher of the pupil's shape, got {got}.")
    model.load_state_dict(weights)


def shared(overrides: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Overrides for an allocation: the one ratio of a configuration string is everybody's budget; where it names several, each layer keeps its own."""
    ratios = {change["ratio"] for change in overrides.values()}
    return {p: {k: v for k, v in change.items() if k != "ratio" or len(ratios) > 1} for p, change in overrides.items()}


def activations(text: str | None) -> fxmask.ActivationPruning | None:
    """`--activations`: "0.5:16" is half of the 1x16 blocks of what the blocks' linears read."""
    if text is None:
        return None
    ratio, _, block = text.partition(":")
    if block and not block.isdigit():
        raise ConfigError(f"--activations: expected RATIO:BLOCK such as 0.5:16, got {text!r}.")
    return fxmask.ActivationPruning(common.number(ratio, "--activations"), int(block or 16))


def bare(args: argparse.Namespace, steps_per_epoch: int) -> Callable[[torch.Tensor, torch.Tensor], None]:
    """A training step of the recipe at its final ratio, without data, logs and counters: for timing."""
    recipe = Recipe.of(args)
    model = build(args, args.model or common.DEFAULT_MODEL[args.data], 3, 10, steps_per_epoch)
    optim = optimiser(model.parameters(), recipe)
    if not args.dense:
        fxmask.step(model, recipe.epochs * steps_per_epoch)
        guard(optim, model, args.guard)

    def step(images: torch.Tensor, labels: torch.Tensor) -> None:
        loss = F.cross_entropy(model(images), labels, label_smoothing=recipe.smoothing)
        optim.zero_grad(set_to_none=True)
        loss.backward()
        optim.step()

    return step
