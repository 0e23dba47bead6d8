"""The zoo: other people's models, masked without an edit, each in a process of its own with limits of time and memory; a row a model.

    python examples/zoo/run.py                                  # every model, the cheapest first; goes on where it was stopped
    python examples/zoo/run.py --source timm --limit 50         # or --only 'resnet*' 'vit_tiny*'
    python examples/zoo/run.py --inductor                       # Inductor and stock Inductor, too, for the smallest model of each family
    python examples/zoo/run.py --own package.module:callable    # a model of yours: a function that returns (model, args); bench-output/zoo_own.csv
    python examples/zoo/run.py --report                         # only the summary page, from the csv

A check that has a result in the csv is not made again (`--again`: it is). What breaks a limit is a row, and the next model goes on; a model that could not
be made within the limits is tried again, one of yours whatever kept it out. Ends with 1 where one of yours was not made. A second run beside this one wants a
csv of its own.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from math import inf
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

from zoo import catalogue, results, summary
from zoo.catalogue import Entry

EXAMPLES = Path(__file__).resolve().parents[1]
PACKAGES = {"torchvision": "torchvision", "timm": "timm", "huggingface": "transformers"}
CSV, README = EXAMPLES / "results" / "zoo.csv", EXAMPLES.parent / "README.md"
OWN_CSV = Path("bench-output/zoo_own.csv")
INDUCTOR, INDUCTOR_MODELS = ("inductor", "inductor_stock"), 60


class UsageError(ValueError):
    """Nothing could be run as the command line asks."""


def arguments(argv: list[str] | None) -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--csv", type=Path, help=f"default: examples/results/zoo.csv, with --own {OWN_CSV}")
    p.add_argument("--source", nargs="+", choices=catalogue.SOURCES)
    p.add_argument("--only", nargs="+", metavar="GLOB", help="of names")
    p.add_argument("--own", nargs="+", default=[], metavar="MODULE:CALLABLE", help="these models, and no others")
    p.add_argument("--limit", type=int, help="at most so many models that have something to do")
    p.add_argument("--checks", nargs="+", choices=tuple(results.RESULTS), default=[c for c in results.RESULTS if c not in INDUCTOR])
    p.add_argument("--inductor", action="store_true", help=f"Inductor, too, and stock's, for the smallest model of each family, at most {INDUCTOR_MODELS}")
    p.add_argument("--again", action="store_true", help="make the checks anew")
    p.add_argument("--jobs", type=int, default=2, help="models at once")
    p.add_argument("--seconds", type=float, default=600.0, help="limit of a process")
    p.add_argument("--gigabytes", type=float, default=8.0, help="limit of a process")
    p.add_argument("--report", action="store_true", help="only write the summary page")
    a = p.parse_args(argv)
    for name in ("jobs", "seconds", "gigabytes", "limit"):
        if (value := getattr(a, name)) is not None and not 0 < value < inf:
            p.error(f"--{name}: expected more than 0, and a finite number, got {value:g}")
    a.csv = (a.csv or (OWN_CSV if a.own else CSV)).resolve()
    for spec in a.own:
        if not all(spec.partition(":")):
            p.error(f"--own: expected module:callable, got {spec!r}")
    return a


def plan(a: argparse.Namespace, rows: dict[tuple[str, str], results.Row]) -> list[tuple[Entry, list[str]]]:
    """Each model with the checks that it lacks."""
    entries = catalogue.listed()
    small = catalogue.smallest_of_families(entries, INDUCTOR_MODELS) if a.inductor else set()
    if a.own:
        entries = [Entry("own", spec.partition(":")[0], spec) for spec in a.own]
    found = []
    for e in catalogue.chosen(entries, a.source, a.only):
        checks = [*a.checks, *(c for c in INDUCTOR if e in small and c not in a.checks)]
        missing = checks if a.again else results.to_do(rows.get((e.source, e.name), {}), checks)
        if missing:
            found.append((e, missing))
    return found[: a.limit]


def one(entry: Entry, row: dict[str, Any], checks: list[str], a: argparse.Namespace) -> dict[str, Any]:
    """A model's row: a process, and where a limit ends that in a check, another one for the checks behind it."""
    row, left, earlier = {**results.blank(entry), **row, "status": ""}, list(checks), float(row.get("seconds") or 0)
    row |= {column: "" for check in checks for column in results.RESULTS[check]}
    while left:
        began = time.perf_counter()
        lines, ended = in_process(entry, left, a)
        at = "build"
        for columns in lines:
            at = columns.pop("at", at)
            columns["peak_mb"] = max(int(columns.get("peak_mb", 0)), int(row.get("peak_mb") or 0)) or ""
            row |= columns
        earlier += time.perf_counter() - began
        row["seconds"] = f"{earlier:.1f}"
        if row["status"] or at == "build":
            row["status"] = row["status"] or f"build: {ended}"
            break
        row |= {at: "no", f"{at}_why": ended}
        left = left[left.index(at) + 1 :]
    row["status"] = row["status"] or "ok"
    return row


def in_process(entry: Entry, checks: list[str], a: argparse.Namespace) -> tuple[list[dict[str, Any]], str]:
    """What a process wrote, and how it ended where it did not end by itself."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines"
        process = CONTEXT.Process(target=_work, args=(entry, checks, path, a.seconds, a.gigabytes))
        process.start()
        LIVE.add(process)
        process.join(a.seconds)
        late = process.is_alive()
        _end(process)
        LIVE.discard(process)
        lines = path.read_text().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except json.JSONDecodeError:  # cut off
            break
    code = process.exitcode or 0
    if late:
        return found, f"out of time: {a.seconds:g} s"
    return found, f"ended by {signal.Signals(-code).name}, {a.gigabytes:g} GB allowed" if code < 0 else f"exit {code}"


CONTEXT = multiprocessing.get_context("forkserver")  # a process that has imported everything, of which each model gets a copy


LIVE: set[Any] = set()


def _work(*args: Any) -> None:
    from zoo.worker import work

    work(*args)


def _end(process: Any) -> None:
    """The process and what it has started."""
    if process.is_alive():
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:  # it has no group of its own yet
            process.kill()
    process.join()


def main(argv: list[str] | None = None) -> int:
    a = arguments(argv)
    page = a.csv.with_suffix(".md")
    try:
        if not a.report:
            with results.alone(a.csv):
                results.read(a.csv)  # raises for another file
                check_models(a)
                run_all(a)
        rows = list(results.read(a.csv).values())
        if a.report and not rows:
            raise UsageError(f"{a.csv}: expected rows to report, got none.\n  fix: name another --csv, or leave --report out.")
        page.write_text(summary.page(rows))
    except (results.TableError, UsageError, OSError) as error:
        print(f"zoo: {error}", file=sys.stderr)
        return 2
    if a.csv == CSV:
        README.write_text(summary.into(README.read_text(), rows))
    print(f"{len(rows)} rows; {page}")
    not_made = [r for r in rows if r["source"] == "own" and r["name"] in a.own and r["status"] != "ok"]
    for r in not_made:
        print(f"zoo: {r['name']}: {r['status']}", file=sys.stderr)
    return 1 if not_made else 0


def check_models(a: argparse.Namespace) -> None:
    """Raises: UsageError where no model is meant, or the package of one is missing: its absence would be a row of every model."""
    meant = [] if a.own else catalogue.chosen(catalogue.listed(), a.source, a.only)
    if not (meant or a.own):
        raise UsageError(f"no model of the list is called {' or '.join(a.only or ())}.\n  fix: names are in {catalogue.LIST}.")
    missing = sorted({e.source for e in meant if importlib.util.find_spec(PACKAGES[e.source]) is None})
    if missing:
        raise UsageError(f"no package {', '.join(PACKAGES[s] for s in missing)}.\n  fix: pip install '.[models]', or --source without {', '.join(missing)}.")


def run_all(a: argparse.Namespace) -> None:
    """Every model that lacks a check, `a.jobs` at once; rows are appended as they are made."""
    results.compact(a.csv)
    rows = results.read(a.csv)
    os.environ["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), str(EXAMPLES.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    jobs, lock = plan(a, rows), threading.Lock()
    CONTEXT.set_forkserver_preload(["zoo.worker", *(["zoo.packages"] if any(e.source != "own" for e, _ in jobs) else [])])
    print(f"{len(jobs)} models with something to do, {len(rows)} in {a.csv}", flush=True)

    def do(job: tuple[Entry, list[str]]) -> None:
        entry, checks = job
        row = one(entry, rows.get((entry.source, entry.name), {}), checks, a)
        with lock:
            results.append(a.csv, row)
            print(summary.line(row), flush=True)

    pool = ThreadPoolExecutor(a.jobs)
    try:
        list(pool.map(do, jobs))
    except KeyboardInterrupt:
        print("zoo: stopped; the same command goes on", file=sys.stderr, flush=True)
        for process in list(LIVE):
            _end(process)
        os._exit(130)  # threads would go on with the next model
    finally:
        pool.shutdown(cancel_futures=True)
    results.compact(a.csv)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # as Ctrl-C: models' processes would go on without this one
    sys.exit(main())
