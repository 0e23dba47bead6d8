"""`fxmask analyze`: the tables of a model, from a command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ..kernels.errors import ConfigError
from ..masking import any_changed, apply
from ..places import place
from ..report import FORMATS, SUFFIX, formatted
from . import devices, models, optimiser, plots
from .report import TABLES, Analysis
from .run import IMPLS, analyze

WITHOUT_VALUES = (
    "This command builds its model on the meta device: weights that its code seeds or loads have no values here, and masks are not theirs; "
    "fxmask.analyze(model, inputs) reads the weights of a model that you built."
)
ABOUT = """FLOP and memory movement of a model, layer by layer, dense or masked, without a GPU.

The model is built on the meta device where it can be: without memory, and without the values of its weights, seeded and loaded ones included. Their masks are
drawn at random, with exactly as many kept blocks as real ones have; fxmask.analyze(model, inputs), in Python, reads real weights."""
MASK_OPTIONS = ("block", "backward", "criterion", "include", "exclude")  # of `fxmask.apply`, beside the ratio


def add_options(p: argparse.ArgumentParser) -> None:
    p.description = ABOUT
    p.add_argument("model", help="timm:resmlp_12_224, torchvision:vit_b_16, or package.module:callable; built without its weights' values")
    p.add_argument("--input", action="append", required=True, metavar="SHAPE", help="1x3x224x224 or 2x128:int64; once for each argument of the model")
    add_mask_options(p)
    p.add_argument("--impl", choices=IMPLS, default=None, help="count masked layers as these kernels")
    p.add_argument("--device", default=None, help=f"{', '.join(devices.DEVICES)}, or cpu (measured)")
    p.add_argument("--dtype", default=None, help="count floating tensors as bfloat16, float16, ...")
    p.add_argument("--optimizer", default="adamw", help=f"{', '.join(optimiser.STATES)}, or none")
    p.add_argument("--masked-step", action="store_true", help="count the optimiser's step on kept blocks alone, as guard(masked_step=True) makes it")
    p.add_argument("--steps", type=int, default=None, help="totals of a run of so many steps, too")
    p.add_argument("--memory-model", choices=("tokens", "thesis"), default="tokens", help="thesis: bytes by Bespalov's memory model, too")
    p.add_argument("--eval", action="store_true", help="eval mode, forward only")
    p.add_argument("--strict", action="store_true", help="an op without a known cost is an error")
    p.add_argument("--compare", action="store_true", help="dense and masked side by side")
    p.add_argument("--explain", metavar="NODE", default=None, help="print the formulas of a node or module with their numbers")
    p.add_argument("--table", choices=TABLES, action="append", default=None, help="print these tables instead")
    p.add_argument("--format", choices=SUFFIX, action="append", default=None, help="of what is written (csv, json, markdown) or printed")
    p.add_argument("-o", "--out", default=None, metavar="DIR", help="write all tables there, and plots with --plot")
    p.add_argument("--plot", action="store_true", help="roofline.png and traffic.png in DIR (needs matplotlib)")


def add_mask_options(p: argparse.ArgumentParser) -> None:
    """What `masked` reads."""
    p.add_argument("--ratio", type=float, default=None, help="mask the linears with this share of masked blocks")
    p.add_argument("--block", default=None, metavar="OUTxIN", help="block of the masks (16x16)")
    p.add_argument("--backward", default=None, help="masked (the default), ste, unmasked or rigl")
    p.add_argument("--criterion", default=None, help="fro (the default), spectral, l1, linf, random, ...")
    for name in ("--include", "--exclude"):  # one at a time: several would take the model, too
        p.add_argument(name, action="extend", nargs=1, default=None, metavar="PATTERN", help="a pattern of layers, as for apply; may be given again")


def check_mask_options(a: argparse.Namespace, options: tuple[str, ...] = (), unless: str = "") -> None:
    """ConfigError for an option that masks would have, where no ratio asks for them."""
    given = [f"--{name.replace('_', '-')}" for name in (*MASK_OPTIONS, *options) if getattr(a, name)]
    if given and a.ratio is None:
        raise ConfigError(f"{', '.join(given)}: needs --ratio, which asks for masks: expected one in [0, 1){unless}, got none; add --ratio 0.5.")


def check_formats(given: list[str] | None, out: Path | None, printed: bool = False) -> None:
    """A form that would be neither written nor printed is refused. `printed`: a table is printed in it, whatever is written."""
    forms, one = ", ".join(given or ()), None if out is None else FORMATS.get(out.suffix)
    if one is not None and not printed and forms not in ("", one):
        raise ConfigError(f"--format: expected {one}, as the file of -o is by its name, got {forms}.\n  fix: leave it out, or give -o a folder.")
    if given and len(given) > 1 and (out is None or one is not None):
        raise ConfigError(f"--format: expected one form to print, got {forms}.\n  fix: give one, or -o a folder, which takes several.")


def masked(model: nn.Module, a: argparse.Namespace, **options: Any) -> None:
    """Apply the masks that were asked for, if any."""
    if a.ratio is not None:
        options |= {name: value for name in MASK_OPTIONS[1:] if (value := getattr(a, name)) is not None}
        apply(model, ratio=a.ratio, block=models.make_block("16x16" if a.block is None else a.block), **options)


def _check(a: argparse.Namespace, out: Path | None) -> None:
    """ConfigError for options that do not go together."""
    if a.plot and (out is None or out.suffix in FORMATS):
        raise ConfigError(f"--plot writes into a folder: expected -o DIR, got {'none' if out is None else f'the file {a.out!r}'}.")
    if a.explain and a.format and out is None:
        raise ConfigError(f"--explain prints text: expected no --format without -o, got {', '.join(a.format)}.\n  fix: leave it out, or give -o DIR, too.")
    if len(asked := [f"--{name}" for name in ("explain", "table", "compare") if getattr(a, name)]) > 1:
        raise ConfigError(f"each of --explain, --table and --compare prints something else: expected one of them, got {' and '.join(asked)}.")
    if "thesis" in (a.table or ()) and a.memory_model != "thesis":
        raise ConfigError("--table thesis: expected --memory-model thesis, which makes it, got none.\n  fix: add it.")
    check_formats(a.format, out, bool(a.table))
    check_mask_options(a, ("compare",))


def main(a: argparse.Namespace) -> int:
    """Build, mask, analyse, print or write."""
    out = None if a.out is None else place(a.out, FORMATS)
    _check(a, out)
    dtype = getattr(torch, a.dtype, None) if a.dtype else None
    if a.dtype and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"--dtype: expected a floating dtype of torch, such as bfloat16, got {a.dtype!r}.")
    inputs = tuple(models.make_input(s) for s in a.input)
    model = models.load(a.model).train(not a.eval)
    if not any_changed(model):
        check_mask_options(a, ("impl", "masked_step"), ", or a model that has masks")

    def run() -> Analysis:
        with _progress(a.model) as tick:
            return analyze(
                model, inputs, phases=("fwd",) if a.eval else ("fwd", "dX", "dW", "opt"), device=a.device,
                optimizer=None if a.optimizer == "none" else a.optimizer, steps=a.steps, impl=a.impl, dtype=dtype, strict=a.strict, progress=tick,
                memory_model=a.memory_model, masked_step=True if a.masked_step else None,
            )  # fmt: skip

    plain = run() if a.compare else None
    masked(model, a)
    report = run()
    if any("have no values" in n for n in report.notes):
        report.notes.append(WITHOUT_VALUES)
    said = _said(a, report, plain)  # before anything is written: what cannot be said leaves no files
    if a.plot:
        plots.available()
    if out is not None:
        report.save(out, formats=a.format or ("csv", "json", "markdown"))
        if a.plot:
            plots.roofline(report, out / "roofline.png")
            plots.traffic(report, out / "traffic.png")
    print(said)
    return 0


def _said(a: argparse.Namespace, report: Analysis, plain: Analysis | None) -> str:
    if a.explain:
        return report.explain(a.explain)
    if a.table:
        form = (a.format or ["text"])[0]
        return "\n\n".join(report.printed(t, form) for t in a.table)
    if plain is not None:  # --compare
        both = plain.compare(report)
        both.notes += [n for n in report.notes if n not in both.notes]
        return formatted(both, a.format[0]) if a.format and a.out is None else str(both)
    if a.format and a.out is None:
        return report.printed("all", a.format[0])
    return str(report)


class _progress:
    """Counts ops on a terminal's error stream; silent where there is none."""

    def __init__(self, name: str) -> None:
        self.name, self.shown = name, False

    def __enter__(self) -> Callable[[int], None] | None:
        return self._tick if sys.stderr is not None and sys.stderr.isatty() else None

    def _tick(self, ops: int) -> None:
        if ops % 200 == 0:
            self.shown = True
            print(f"\r{self.name}: {ops} ops", end="", file=sys.stderr, flush=True)

    def __exit__(self, *_: object) -> None:
        if self.shown:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
