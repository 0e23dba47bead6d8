"""The recipes' own `main` on every rank, into the folder that RECIPES_OUT names."""

from __future__ import annotations

import contextlib
import io
import os
import runpy
from functools import partial
from pathlib import Path
from unittest import mock

import torch.distributed as dist

RECIPES = Path(__file__).resolve().parents[2] / "examples" / "recipes"
FIRST = 8  # inside the recipes' cubic ramp of 30 steps, so that a lost step count shows


def saves(recipe: str) -> None:
    """Train and save, in the process group that is there; as scripts of their own they are started in the slow tier."""
    shown = io.StringIO()
    there = mock.patch.multiple(dist, init_process_group=lambda backend: None, destroy_process_group=lambda: None)
    with contextlib.redirect_stdout(shown), there:
        runpy.run_path(str(RECIPES / recipe))["main"](["--steps", str(FIRST), "--out", str(Path(os.environ["RECIPES_OUT"]) / recipe)])
    first = int(os.environ["RANK"]) == 0
    assert (f"step {FIRST} on {os.environ['WORLD_SIZE']} ranks: loss" in shown.getvalue()) == first and ("0.75" in shown.getvalue()) == first


CASES = {f"recipe-{name}": partial(saves, name) for name in ("ddp.py", "fsdp2.py")}
