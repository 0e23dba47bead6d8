"""The recipes that `accuracy.py` compares: names, and the arguments of train.py that make them. Lengths are shares of the run."""

from __future__ import annotations

COMMON = ("--warmup", "1", "--cooldown", "0", "--mix-prob", "0", "--masks-from", "0", "--batch", "128", "--weight-decay", "1e-4")


def masks(ratio: float, side: int) -> tuple[str, ...]:
    """Token mixing and both channel linears in square blocks, as in the thesis."""
    return ("--config", f"ResMLP5 @ XPatch = masked {ratio} ({side}, {side}); XChannel = masked {ratio} ({side}, {side});")


ADAM, ADAMW = ("--opt", "adam"), ("--opt", "adamw")
HALF = ("--schedule", "cubic:{half}")  # from dense to the ratio over the first half of the steps
B32, B16 = masks(0.8, 32), masks(0.5, 16)
FREEZE, FREE = ("--guard", "freeze"), ("--guard", "free")

SEARCH: dict[str, tuple[str, ...]] = {
    "dense-adamw-lr0.01": ("--dense", *ADAMW, "--lr", "0.01"),
    "b32-literal": (*B32, *ADAM, *FREE, "--lr", "0.01"),
    "b32-cubic": (*B32, *ADAMW, *FREEZE, *HALF, "--lr", "0.01"),
    "b32-cubic-cover": (*B32, *ADAMW, *FREEZE, *HALF, "--lr", "0.01", "--cover"),
    "dense-adamw-lr0.005": ("--dense", *ADAMW, "--lr", "0.005"),
    "b32-cubic-lr0.005": (*B32, *ADAMW, *FREEZE, *HALF, "--lr", "0.005"),
    "b32-cubic-free": (*B32, *ADAMW, *FREE, *HALF, "--lr", "0.01"),
    "b16-cubic": (*B16, *ADAMW, *FREEZE, *HALF, "--lr", "0.01"),
}
FINAL: dict[str, tuple[str, ...]] = {}


def arguments_of(name: str, epochs: int) -> list[str]:
    """The arguments of a recipe for a run of so many epochs."""
    return [word.format(half=f"{epochs / 2:g}ep") if "{" in word else word for word in {**SEARCH, **FINAL}[name]]
