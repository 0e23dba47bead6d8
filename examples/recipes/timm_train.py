"""Masks under timm's own training script, unchanged.

timm's wheel has no train.py: take that of your timm's version from its repository, and run this before it. What follows the script's path goes to the script.

    python examples/recipes/timm_train.py --ratio 0.8 --block 32 32 path/to/train.py --data-dir DATA --model resmlp_12_224 --opt adamw ...
    torchrun --nproc-per-node 2 examples/recipes/timm_train.py --ratio 0.8 --block 32 32 path/to/train.py ...

One call of the script is met: `timm.optim.create_optimizer_v2(model, ...)`, which gets the model on its device, before it is averaged, compiled or wrapped.
There the model is masked and its optimiser guarded. The masks' state rides in the optimiser's state_dict, under "fxmask", by hooks that PyTorch has for that:
so it is in every file that timm's CheckpointSaver writes, and `--resume` loads it after the weights. Under `--no-resume-opt` the masks' steps begin anew, as
the optimiser's do.

Tested: a stand-in script that makes the calls of train.py (create_model, create_optimizer_v2, CheckpointSaver, resume_checkpoint), in one process. Run by hand
once: train.py of timm 1.0.29.dev0 itself, two epochs on a CPU, resumed, with EMA. Not tested: distillation (the teacher stays dense), GradScaler, several
processes. `--model-ema` masks its own averages; with `--ramp` the averaged copy stays at the ratio that it was made with, and warns. `--opt lookahead_...`
raises: that wrapper moves weights past every hook.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchvision_shim import import_torchvision  # for a CPU build of torch beside torchvision's default wheel; leave it out elsewhere

import fxmask

KEY = "fxmask"


def masked_optimizer(create: Any, options: dict[str, Any], made: list[Any]) -> Any:
    """`create_optimizer_v2` that masks the model first and guards what it made; handles go to `made`."""

    def create_optimizer_v2(model: Any, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        if not isinstance(model, nn.Module):
            raise TypeError(f"timm_train: create_optimizer_v2 got {type(model).__name__}: expected the model, whose Linears can be masked.")
        fxmask.apply(model, **options)
        optimizer = create(model, *args, **kwargs)
        made.append(fxmask.guard(optimizer, model))
        carry_state(optimizer, model)
        if os.environ.get("RANK", "0") == "0":
            print(fxmask.explain(model))
        return optimizer

    return create_optimizer_v2


def carry_state(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    """Put the masks' state into the optimiser's state_dict, and take it from one that is loaded."""

    def saved(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        return {**state, KEY: fxmask.state_dict(model)}

    def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if KEY not in state:
            what = "the checkpoint has no masks' state: expected one that was saved under timm_train.py."
            raise ValueError(f"{what}\n  fix: --no-resume-opt, or --initial-checkpoint, starts a masked run from a dense model's weights.")
        fxmask.load_state_dict(model, state[KEY])
        return {k: v for k, v in state.items() if k != KEY}

    optimizer.register_state_dict_post_hook(saved)
    optimizer.register_load_state_dict_pre_hook(load)


def main(argv: list[str] | None = None) -> dict[str, Any]:
    """Run the script under masks; returns its globals."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ratio", type=float, default=0.5)
    parser.add_argument("--block", type=int, nargs=2, default=(16, 16))
    parser.add_argument("--backward", default="masked")
    parser.add_argument("--ramp", type=int, default=0, help="optimiser steps of a cubic ramp of the ratio; 0: none")
    parser.add_argument("--exclude", nargs="*", default=["head"], help="patterns of layers that stay dense")
    parser.add_argument("script", help="timm's train.py")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="for the script")
    args = parser.parse_args(argv)
    if not Path(args.script).is_file():
        parser.error(f"script: expected the path of timm's train.py, got {args.script}, which is no file")
    try:
        fxmask.WeightMask(ratio=args.ratio, block=tuple(args.block), backward=args.backward)
        fxmask.Schedule("cubic", steps=args.ramp or 1)
    except fxmask.FxMaskError as error:
        parser.error(str(error).splitlines()[0])
    options = dict(ratio=args.ratio, block=tuple(args.block), backward=args.backward, exclude=args.exclude)
    if args.ramp:
        options["schedule"] = fxmask.Schedule("cubic", steps=args.ramp)

    try:
        import_torchvision()
        import timm.optim
    except ImportError as error:
        parser.error(f"expected timm and torchvision installed: {str(error).splitlines()[0]}; pip install 'fxmask[models]'")

    made: list[Any] = []
    create, before = timm.optim.create_optimizer_v2, sys.argv
    timm.optim.create_optimizer_v2 = masked_optimizer(create, options, made)
    sys.argv = [args.script, *args.arguments]
    sys.path.insert(0, str(Path(args.script).resolve().parent))
    try:
        result = runpy.run_path(args.script, run_name="__main__")
    finally:
        timm.optim.create_optimizer_v2, sys.argv = create, before
        sys.path.pop(0)
    if not made:
        raise RuntimeError(f"{args.script} never called timm.optim.create_optimizer_v2, so nothing was masked: expected timm's train.py.")
    return result


if __name__ == "__main__":
    main()
