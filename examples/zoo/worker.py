"""One model in one process, with limits: check after check, each result written as soon as it is there."""

from __future__ import annotations

import json
import os
import resource
import time
import warnings
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("FXMASK_TUNE", "0")  # no timing: what is compared are numbers
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

import torch
import torch._dynamo
import torch._functorch.aot_autograd
import torch.export

import fxmask
from zoo import sources
from zoo.catalogue import Entry
from zoo.checks import CHECKS, Subject, facts, reason
from zoo.compiled import COMPILED
from zoo.graphs import GRAPHS

ALL = {**CHECKS, **GRAPHS, **COMPILED}  # the cheap ones first


def work(entry: Entry, names: list[str], path: Path, seconds: float, gigabytes: float) -> None:
    """Run checks of one model; each line of the file is {"at": a check} when it begins, or its columns when it has ended."""
    os.setsid()  # so that whoever ends this process ends the compilers that it has started, too
    resource.setrlimit(resource.RLIMIT_DATA, (int(gigabytes * 1e9),) * 2)
    resource.setrlimit(resource.RLIMIT_CPU, (int(2 * seconds) + 60,) * 2)  # where nobody is left to end it
    warnings.simplefilter("ignore")
    sources.refuse_network()
    started = time.perf_counter()
    with path.open("a", buffering=1) as file:

        def write(**columns: Any) -> None:
            file.write(json.dumps(columns) + "\n")

        write(at="build", **provenance())
        try:
            subject = Subject(sources.make(entry))
            write(**facts(subject))
        except Exception as error:
            skipped = sources.wants_network(error)
            write(status=f"skipped: needs files from a network ({reason(error)})" if skipped else f"build: {reason(error)}")
            return
        for name in names:
            write(at=name)
            try:
                columns = ALL[name](subject)
            except Exception as error:
                columns = {name: "no", f"{name}_why": reason(error)}
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
            write(**columns, seconds=round(time.perf_counter() - started, 1), peak_mb=round(peak))
        write(status="ok")


def provenance() -> dict[str, str]:
    """Versions, as far as they are imported or installed."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"utc": datetime.now(timezone.utc).strftime("%Y-%m-%d %H:%M"), "fxmask": fxmask.__version__, "torch": torch.__version__}
    for package in ("torchvision", "timm", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = ""
    return found
