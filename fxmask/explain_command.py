"""`fxmask explain`: what masks would do to each linear of a named model."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from .analysis import models
from .analysis.command import FORMATS, add_mask_options, check_mask_options, masked
from .analysis.report import SUFFIX, TABLEFMT
from .files import csv_text, write_files
from .inspection import explain
from .kernels.dispatch import IMPLEMENTATIONS
from .places import place
from .report import Report


def add_options(p: argparse.ArgumentParser) -> None:
    p.add_argument("model", help="timm:resmlp_12_224, torchvision:vit_b_16, or package.module:callable, which may have masks already")
    add_mask_options(p)
    p.add_argument("--impl", choices=IMPLEMENTATIONS, default=None, help="as for apply")
    p.add_argument("--format", choices=FORMATS, action="append", default=None, help="of what is written (csv, json, markdown) or printed")
    p.add_argument("-o", "--out", default=None, metavar="DIR", help="write the rows there, too; a path such as rows.csv is one file")


def main(a: argparse.Namespace) -> int:
    """Build with weights, as the achieved ratio is theirs; mask, print, write."""
    out = None if a.out is None else place(a.out, SUFFIX.values())
    check_mask_options(a, ("impl",))
    model = models.load(a.model, meta=False)
    masked(model, a, **({"impl": a.impl} if a.impl else {}))
    report = explain(model)
    if out is not None:
        _save(report, out, a.format or ["csv", "json", "markdown"])
    print(report if a.out is not None or not a.format else _text(report, a.format[0]))
    return 0


def _save(report: Report, path: Path, formats: list[str]) -> None:
    one = next((form for form, suffix in SUFFIX.items() if suffix == path.suffix), None)
    if one is not None:
        write_files({path.name: _text(report, one) + "\n"}, path.parent)
    else:
        write_files({f"explain{SUFFIX[form]}": _text(report, form) + "\n" for form in formats}, path)


def _text(report: Report, form: str) -> str:
    if form == "json":
        return json.dumps(report.to_dict(), indent=1)
    if form == "csv":
        return csv_text(report.rows).rstrip("\n")
    return report.whole() if form == "text" else report.table(TABLEFMT[form])
