"""`fxmask bench --system`: activation pruning, block dropout and N:M masks beside the dense layer, on a CPU or a GPU; weight masks have a grid of their own."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from .compare import usable
from .dropping import DROPOUT
from .nm import NM_PART
from .part import Part, names_of, run_part
from .pruning import PRUNING
from .session import Session
from .table import Row, number

SYSTEMS: dict[str, Part] = {"activations": PRUNING, "dropout": DROPOUT, "nm": NM_PART}


def cells(system: str, device: str, quick: bool) -> list[Any]:
    """What is measured there, dense first."""
    part = SYSTEMS[system]
    assert part.on_cpu is not None
    return part.on_cpu(quick) if device == "cpu" else part.cells(torch.device(device), quick)


def name_of(cell: Any) -> str:
    """"fxmask/1024/1024/1024/fp32/128/0.5": the fields of a cell."""
    return "/".join(names_of(cell).values())


def run(system: str, chosen: Sequence[Any], device: torch.device, out: Path, time_limit: float | None, sample_s: float) -> list[Row]:
    """The rows of these cells; a second run goes on where the first stopped."""
    return run_part(Session(device, out, time_limit, sample_s), SYSTEMS[system], chosen)[0]


def summary(system: str, rows: Sequence[Row]) -> str:
    """Every row beside the dense one: above 1 it was faster. Losing rows, and those without a verdict, too."""
    from tabulate import tabulate  # here: a GPU machine may lack it, and stages do without

    part = SYSTEMS[system]
    dense = {tuple(r[c] for c in part.alike): number(r, "ms_p50") for r in rows if r[part.by] == "dense" and usable(r)}
    shown = []
    for r in rows:
        whole, own = dense.get(tuple(r[c] for c in part.alike)), number(r, "ms_p50")
        beside = f"{whole / own:.2f}" if whole and own and usable(r) else ""
        shown.append([*(r[c] for c in part.kind._fields), r["ms_p50"], beside, r["verdict"]])
    return tabulate(shown, [*part.kind._fields, "ms", "x dense", "verdict"], disable_numparse=True)
