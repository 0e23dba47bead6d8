"""`fxmask explain`: what masks would do to each linear of a named model."""

from __future__ import annotations

import argparse
from pathlib import Path

from ..analysis import models
from ..analysis.command import add_mask_options, check_formats, check_mask_options, masked
from ..files import write_files
from ..kernels.dispatch import IMPLEMENTATIONS
from ..places import place
from ..report import FORMATS, SUFFIX, Report, formatted
from .inspection import explain


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", help="timm:resmlp_12_224, torchvision:vit_b_16, or package.module:callable, which may have masks already")
    add_mask_options(p)
    p.add_argument("--impl", choices=IMPLEMENTATIONS, default=None, help="as for apply")
    p.add_argument("--format", choices=SUFFIX, action="append", default=None, help="of what is written (csv, json, markdown) or printed")
    p.add_argument("-o", "--out", default=None, metavar="DIR", help="write the rows there, too; a path such as rows.csv is one file")


def main(a: argparse.Namespace) -> int:
    """Build with weights, as the achieved ratio is theirs; mask, print, write."""
    out = None if a.out is None else place(a.out, FORMATS)
    check_formats(a.format, out)
    check_mask_options(a, ("impl",))
    model = models.load(a.model, meta=False)
    masked(model, a, **({"impl": a.impl} if a.impl else {}))
    report = explain(model)
    if out is not None:
        _save(report, out, a.format or ["csv", "json", "markdown"])
    print(report if a.out is not None or not a.format else formatted(report, a.format[0]))
    return 0


def _save(report: Report, path: Path, formats: list[str]) -> None:
    one = FORMATS.get(path.suffix)
    files = {f"explain{SUFFIX[form]}": form for form in formats} if one is None else {path.name: one}
    write_files({name: formatted(report, form) + "\n" for name, form in files.items()}, path if one is None else path.parent)
