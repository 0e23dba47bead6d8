"""Runs of examples/thesis/imagenet.py on a small ImageFolder; as a script of torchrun, one on all ranks that is broken off twice beside one that is not."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from saved_states import same
from thesis import checkpoint
from thesis import imagenet as program
from thesis.imagenet_run import Run

import fxmask

ROOT = Path(__file__).resolve().parents[2]
PATHS = f"{ROOT}:{ROOT / 'tests'}:{ROOT / 'examples'}"  # PYTHONPATH of this file as a script
MODEL = ("--image", "32", "--patch", "8", "--dim", "32", "--depth", "2", "--block", "8", "8")
SHORT = ("--batch", "8", "--epochs", "3", "--warmup", "1", "--cooldown", "1", "--save-every", "4", "--device", "cpu")
OPTIONS = (*MODEL, *SHORT, "--refresh", "2", "--schedule", "cubic:10")
TEST_IMAGES = 21


class Crash(Exception):
    pass


def make_folder(root: Path, train: int = 12, test: int = 5) -> Path:
    """Four classes that a colour tells apart, 40x40 noise; one has an image more to test, so that two ranks get unequal shares."""
    from PIL import Image

    g = torch.Generator().manual_seed(0)
    for part, n in (("train", train), ("val", test)):
        for c in range(4):
            folder = root / part / f"class{c}"
            folder.mkdir(parents=True)
            for i in range(n + (part == "val" and c == 0)):
                pixels = torch.randint(0, 80, (40, 40, 3), generator=g, dtype=torch.uint8)
                pixels[..., c % 3] += 100 * (c < 3)
                Image.fromarray(pixels.numpy()).save(folder / f"{i}.png")
    return root


def state(out: Path) -> dict[str, Any]:
    """The last checkpoint without the wall time."""
    saved = torch.load(out / checkpoint.LAST, weights_only=True)
    saved["progress"].pop("seconds")
    return saved


def rows(out: Path) -> list[str]:
    """The log without the wall time."""
    return [line.rpartition(",")[0] for line in (out / "log.csv").read_text().splitlines()]


def broken_off(argv: list[str], calls: int) -> None:
    """A run that ends in the middle of its `calls`-th forward, in training or in the test."""
    honest, seen = Run.forward, 0

    def forward(self, *args):
        nonlocal seen
        seen += 1
        if seen == calls:
            raise Crash
        return honest(self, *args)

    with mock.patch.object(Run, "forward", forward):
        try:
            program.main(argv)
        except Crash:
            return
    raise AssertionError(f"expected a crash in forward {calls}, got a run of {seen}")


def on_all_ranks(data: str, out: Path, *options: str) -> None:
    from distributed.common import same_on_all_ranks

    made: list[Run] = []

    class Kept(Run):
        def __init__(self, *args):
            super().__init__(*args)
            made.append(self)

    whole, broken = ([*OPTIONS, *options, "--root", data, "--out", str(out / name)] for name in ("whole", "broken"))
    with mock.patch.object(program, "Run", Kept):
        assert program.main(whole) == 0
        for calls in (6, 9):  # behind the checkpoints of steps 4 and 8, inside epochs
            broken_off(broken, calls)
        assert program.main(broken) == 0
    for run in (made[0], made[-1]):
        assert run.wrapped is not run.model and run.step == 3 * run.images.steps
        masks = fxmask.masks(run.model)
        assert same_on_all_ranks(*run.model.parameters()) and same_on_all_ranks(*masks.values())
        assert all(0 < int(m.sum()) < m.numel() for m in masks.values())
    drawn = torch.rand(1)  # the last step's seed has the rank in it
    assert not same_on_all_ranks(drawn)
    assert same(state(out / "whole"), state(out / "broken")) and rows(out / "whole") == rows(out / "broken")
    assert len(rows(out / "whole")) == 4


if __name__ == "__main__":
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    on_all_ranks(sys.argv[1], Path(sys.argv[2]), *sys.argv[3:])
    dist.destroy_process_group()
    print("on all ranks: done")
