"""The thesis' two training recipes (S. Bespalov, Heidelberg 2025, tables 5.1 and 5.2), with torch's schedulers and torchvision's MixUp and CutMix.

Ours, because the tables leave them open: the warm-up and the cool-down lie within the epochs, the rate moves every step, and the cosine begins where the
warm-up ends. The tables' decay rate of 0.1 belongs to step schedules and to restarts of the cosine, neither of which the recipes use.
"""

from __future__ import annotations

from argparse import ArgumentParser
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ConstantLR, CosineAnnealingLR, LinearLR, LRScheduler, SequentialLR

import fxmask
from thesis.muon import MuonAdamW


@dataclass(frozen=True)
class Recipe:
    """How a run trains. `epochs` plans the schedule; lengths are in epochs, rates per step."""

    epochs: int = 200
    batch: int = 128
    opt: str = "adam"  # adam: decay is coupled into the gradient; adamw: decoupled; muon: ours, no table's
    lr: float = 0.01
    weight_decay: float = 1e-4
    min_lr: float = 1e-5
    warmup: float = 5
    warmup_lr: float = 1e-3
    cooldown: float = 10
    mixup: float = 0.2  # alpha; 0: none
    cutmix: float = 0.8
    mix_prob: float = 1.0  # share of the batches that are mixed
    mix_switch: float = 0.5  # of those, the share that CutMix takes
    smoothing: float = 0.1
    masks_from: float = 10  # first epoch with masks; epochs before it are dense

    @classmethod
    def of(cls, args: Any) -> Recipe:
        """That of a command line, whose options have the fields' names."""
        return cls(**{f.name: getattr(args, f.name) for f in fields(cls)})

    @staticmethod
    def add_options(p: ArgumentParser, default: Recipe | None = None) -> None:
        """An option for each field, whose values are the recipe's where they are not given."""
        for f in fields(Recipe):
            kind, choices = {"int": int, "float": float}.get(str(f.type), str), tuple(OPTIMISERS) if f.name == "opt" else None
            value, said = (getattr(default, f.name), "recipe, default %(default)s") if default else (None, f"recipe: {f.name}")
            p.add_argument(f"--{f.name.replace('_', '-')}", type=kind, choices=choices, default=value, help=said)


CIFAR10 = Recipe()
IMAGENET = Recipe(
    epochs=300, batch=64, opt="adamw", lr=1e-3, weight_decay=0.005, warmup_lr=1e-5, mixup=0.8, cutmix=1.0, masks_from=0
)  # configured for 300 epochs and stopped after 90  # fmt: skip
RECIPES = {"cifar10": CIFAR10, "imagenet": IMAGENET}
OPTIMISERS: dict[str, Any] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "muon": MuonAdamW}


def optimiser(parameters: Any, recipe: Recipe, graphs: str | None = None) -> Optimizer:
    """The recipe's optimiser; `graphs`: a device, for steps that are captured there: fused, and the rate a tensor, which `Rates` fills."""
    more: dict[str, Any] = {"lr": recipe.lr} if graphs is None else {"lr": torch.tensor(recipe.lr, device=graphs), "fused": True, "capturable": True}
    optim: Optimizer = OPTIMISERS[recipe.opt](parameters, weight_decay=recipe.weight_decay, **more)
    return optim


def guard(optim: Optimizer, model: nn.Module, policy: str) -> Any:
    """`fxmask.guard`; under freeze an optimiser that looks at whole matrices must not see what masked blocks have left in their momenta."""
    return fxmask.guard(optim, model, masked_weights=policy, returning="zero" if isinstance(optim, MuonAdamW) else "keep")


def scheduler(optim: Optimizer, recipe: Recipe, steps: int) -> LRScheduler:
    """Warm-up, cosine, cool-down, for `steps` optimiser steps an epoch; step it after every optimiser step."""
    warm, cool = round(recipe.warmup * steps), round(recipe.cooldown * steps)
    cosine = max(1, recipe.epochs * steps - warm - cool)
    parts: list[tuple[int, LRScheduler]] = []
    if warm:
        parts.append((warm, LinearLR(optim, recipe.warmup_lr / recipe.lr, total_iters=warm)))
    parts.append((cosine, CosineAnnealingLR(optim, cosine, recipe.min_lr)))
    if cool:
        parts.append((cool, ConstantLR(optim, recipe.min_lr / recipe.lr, total_iters=cool + 1)))
    ends = [sum(length for length, _ in parts[: i + 1]) for i in range(len(parts) - 1)]
    return SequentialLR(optim, [part for _, part in parts], ends)


class Rates:
    """The recipe's scheduler. It computes on Python numbers, also where the optimiser's rate is a tensor: one in float32 would drift, step by step."""

    def __init__(self, optim: Optimizer, recipe: Recipe, steps: int) -> None:
        self.optim, self.numbers = optim, optim
        if isinstance(optim.param_groups[0]["lr"], Tensor):
            self.numbers = torch.optim.SGD([nn.Parameter(torch.zeros(()))], lr=recipe.lr)
        self.scheduler = scheduler(self.numbers, recipe, steps)
        self._show()

    @property
    def rate(self) -> float:
        """Of the next step."""
        return float(self.scheduler.get_last_lr()[0])

    def step(self) -> None:
        """After every step of the optimiser."""
        if self.numbers is not self.optim:
            self.numbers.step()  # moves nothing; schedulers want it
        self.scheduler.step()
        self._show()

    def _show(self) -> None:
        if self.numbers is self.optim:
            return
        for group in self.optim.param_groups:
            group["lr"] = group["lr"].to(group["params"][0].device).fill_(self.rate)  # a state that was loaded may have brought one of the CPU

    def state_dict(self) -> dict[str, Any]:
        return self.scheduler.state_dict()

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        """After the optimiser's."""
        self.scheduler.load_state_dict(saved)
        if self.numbers is not self.optim:
            self.numbers.param_groups[0]["lr"] = self.rate
        self._show()


class Mixing:
    """MixUp or CutMix of a whole batch: (images, labels) -> (images, labels or, mixed, a distribution over the classes [B, classes])."""

    def __init__(self, recipe: Recipe, classes: int) -> None:
        self.prob, self.mixes = recipe.mix_prob, []
        wanted = [("MixUp", recipe.mixup, 1 - recipe.mix_switch), ("CutMix", recipe.cutmix, recipe.mix_switch)]
        if self.prob > 0 and any(alpha > 0 for _, alpha, _ in wanted):
            from data import torchvision

            torchvision()
            from torchvision.transforms import v2

            self.mixes = [(share, getattr(v2, name)(alpha=alpha, num_classes=classes)) for name, alpha, share in wanted if alpha > 0]

    def __call__(self, images: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Draws from torch's default generator on the CPU."""
        if not self.mixes or len(labels) < 2 or torch.rand(()) >= self.prob:
            return images, labels
        shares = torch.tensor([share for share, _ in self.mixes])
        chosen = self.mixes[int(torch.multinomial(shares, 1))][1]
        mixed: tuple[Tensor, Tensor] = chosen(images, labels)
        return mixed
