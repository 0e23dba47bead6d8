"""Several runs of train.py in one process, in turns: a step of each, then the next step of each. The images are loaded once, and lie on the device.

On a GPU every run has a stream of its own and no step waits for the device, so their kernels overlap; on a CPU the runs take turns and nothing more. A
step's random numbers hang on its run's seed and its number, so each run's results are those that it has alone. `seconds` in a log is the run's share of the
time; together they make the process's. One process can launch only so many kernels: with train.py's --graphs a step is one launch. More
of them, side by side, are sweep.py's --jobs.

    python examples/thesis/many.py RUNS.json --at-once 8        # [["name", ["--data", "digits", "--out", "DIR"]], ...]; sweep.py writes it
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TextIO

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from checked_arguments import check_numbers
from data import Data, DataMissing
from image_folder import MEMORY_LIMIT_PX
from resmlp import PRESETS
from train import flushed_denormals

import fxmask
from thesis import train
from thesis.masked_model import preset_of
from thesis.side_by_side import exit_code
from thesis.train_run import data_of

SHARED = ("data", "root", "batch", "image", "workers", "holdout", "device")  # what one set of loaded images serves


class Turns:
    """One run in the middle of others."""

    def __init__(self, name: str, args: argparse.Namespace, images: Images) -> None:
        self.name, self.args, self.images = name, args, images
        self.output: TextIO = sys.stderr  # where its folder cannot be made
        self.steps: Iterator[None] | None = None
        self.stream = torch.cuda.Stream(args.device) if torch.device(args.device).type == "cuda" else None

    def begin(self) -> Iterator[None]:
        """The run's steps; what is wrong with the folder is said by train.py."""
        with contextlib.suppress(OSError):
            self.args.out.mkdir(parents=True, exist_ok=True)
            self.output = (self.args.out / "output.txt").open("a")
        return train.turns(self.args, self.images.of(self.args))

    def step(self) -> int | None:
        """One step; an exit status when the run has come to an end. What it prints goes to output.txt in its folder."""
        try:
            self.steps = self.steps or self.begin()
            with contextlib.redirect_stdout(self.output), contextlib.redirect_stderr(self.output), torch.cuda.stream(self.stream):
                next(self.steps)
                return None
        except StopIteration:
            status = 0
        except Exception as error:  # whatever one run dies of, the others go on
            status = 2 if isinstance(error, fxmask.FxMaskError) else 1
            self.output.write(f"{error}\n" if status == 2 else traceback.format_exc())
        if self.output is not sys.stderr:
            self.output.close()
        return status


def side_of(args: argparse.Namespace) -> int:
    """Of a run's images, in pixels."""
    return PRESETS[preset_of(args)].image


class Images:
    """The runs' images, the last set kept; each run gets them in the order of its seed."""

    def __init__(self) -> None:
        self.key: tuple[Any, ...] | None = None
        self.data: Data | None = None

    def of(self, args: argparse.Namespace) -> Data:
        key = tuple(side_of(args) if name == "image" else getattr(args, name) for name in SHARED)
        if key != self.key or self.data is None:
            self.key, self.data = key, None  # the old set is let go before the new one comes
            self.data = data_of(args)
            if torch.cuda.is_available():
                torch.cuda.synchronize()  # all streams read what one has written
        assert self.data.of_seed is not None  # `together` has looked
        return self.data.of_seed(args.seed)


@flushed_denormals()
def together(runs: Sequence[tuple[str, argparse.Namespace]], at_once: int, after: Callable[[str, int], None]) -> int:
    """Train all runs, `at_once` of them at a time; `after(name, exit status)` when one has ended. Returns how many failed.

    Raises: DataMissing where images do not fit into memory, before anything is trained.
    """
    for _, args in runs:
        if side_of(args) > MEMORY_LIMIT_PX:
            what = f"expected images of at most {MEMORY_LIMIT_PX} pixels, which fit into memory, got {args.data} of {side_of(args)} pixels"
            raise DataMissing(f"--at-once: {what}.")
    waiting, going, images, failed = deque(runs), deque[Turns](), Images(), 0
    while waiting or going:
        while waiting and len(going) < at_once:
            name, args = waiting.popleft()
            if args.threads:
                torch.set_num_threads(args.threads)
            going.append(Turns(name, args, images))
        one = going.popleft()
        status = one.step()
        if status is None:
            going.append(one)
        else:
            failed += status != 0
            after(one.name, status)
    return failed


def main(argv: list[str] | None = None) -> int:
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("runs", type=Path, metavar="RUNS.json")
    p.add_argument("--at-once", type=int, default=8)
    p.add_argument("--quiet", action="store_true", help="say nothing of Ctrl-C, of which whoever started it tells")
    args = p.parse_args(argv)
    check_numbers(p, args)
    try:
        given = [(name, list(map(str, words))) for name, words in json.loads(args.runs.read_text())]
    except OSError as error:
        p.error(f"expected a file of runs, got {args.runs}: {error.strerror}")
    except (ValueError, TypeError) as error:
        p.error(f"{args.runs}: expected a list of [name, [words of train.py]], got another thing: {error}")
    runs = [(name, train.arguments(words)) for name, words in given]
    failed = partial(together, runs, args.at_once, lambda name, status: print(json.dumps([name, status]), flush=True))
    return exit_code("thesis/many.py", lambda: min(1, failed()), "" if args.quiet else "stopped")


if __name__ == "__main__":
    sys.exit(main())
