"""The run on a GPU, `make gpu`: stages in subprocesses with their own limits, then what was found and the goals.

`python -m fxmask.bench.gpu --stages tests,quick --out DIR`. Needs torch, Triton, numpy and pytest, no installation and no network. `--time-limit` and
`--stages` divide it, and a second run goes on with the cells that the csvs lack. Stages before `ceilings` measure nothing, and `--jobs` of them run at a time;
`tests` in as many processes, where pytest-xdist is installed.

| stages | what | limit in s, together |
| --- | --- | --- |
| versions, precompile, memcheck, tests, flows, graphs, limits, ceilings | does it run, is it right, what cuBLAS and a copying kernel reach | 60 to 240 each |
| ptxas | tests that failed, by the toolkit's own | 240 |
| bandwidth, tensorcore | what the L2, the memory and the tensor cores give to a kernel that does nothing else | 65 |
| tiles, splits | the forward over tiles, dW over shares of the tokens | 150 |
| metadata | a refresh of a layer and of a model, one by one and grouped | 50 |
| dropout | a linear behind block dropout, against p, beside dense, dropout and linear, and dropped zeros in dense products | 60 |
| pruning | dW from pruned inputs, beside the product with the whole input | 90 |
| nm | 2:4 masks in a training step, and the hardware's 2:4 form in the forward, beside the dense layer | 30 |
| quick, full | the benchmark: two shapes, and all | 125, 480 |
| small | whole training steps that wait for the host, ResMLP-S12 and the thesis' CIFAR model: eager, and as one CUDA graph each | 180 |
| train | whole training steps: a GPT block stack of width 4,096, ResMLP-S12 | 540 |
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from ..errors import ConfigError, FxMaskError
from .cells import names
from .device_stages import KERNELS
from .driver import CSV
from .findings import finding_lines, latest, limits, rows_of
from .goals import goal_lines
from .stages import LOG, ROOT, Result, Stage, python, run_stages
from .table import Table

TESTS = {
    "tests": ("test_numbers.py", "test_dropout.py", "test_pruning.py", "test_metadata.py"),
    "flows": ("test_flows.py", "test_auto.py"),
    "graphs": ("test_graphs.py", "test_training.py"),
    "limits": ("test_limits.py", "test_compile.py"),
}
# stages with a csv of their own, and their limits in seconds
PARTS = {"bandwidth": 40, "tensorcore": 25, "tiles": 105, "splits": 45, "metadata": 50, "dropout": 60, "pruning": 90, "nm": 30}
# options of train_step.py
CONTENDERS = ("dense_eager", "dense_graphed", "masked_dense", "fxmask_eager", "fxmask_graphed")
SMALL = ("--model", "resmlp-s12", "cifar", "--block", "64", "--ratio", "0.8", "--refresh", "1", "10", "--energy", "0", "--contenders", *CONTENDERS)
TRAIN = ("--model", "gpt", "resmlp-s12", "--block", "64", "128", "--ratio", "0.8", "--impl", "triton")
# pytest as it comes, without the plugins and options that pyproject.toml asks for
INI = """[pytest]
addopts = --import-mode=importlib
pythonpath = {root} {root}/tests {root}/examples
markers =
    gpu: needs a CUDA device
    slow: takes more than a few seconds
"""


def _again(stage: Stage) -> list[Stage]:
    """A failed stage once more with the toolkit's own ptxas, where there is one: the one in Triton's wheels has miscompiled Hopper kernels."""
    ptxas = shutil.which("ptxas") or shutil.which("ptxas", path="/usr/local/cuda/bin")
    return [replace(stage, name="ptxas", env={"TRITON_PTXAS_PATH": ptxas}, after_failure_of=stage.name, beside=False)] if ptxas else []


def _pytest(name: str, ini: Path, limit_s: float, processes: int = 1) -> Stage:
    folder = ROOT / "tests" / "gpu"
    files = [str(folder / f) for f in TESTS[name]]
    command = python("-m", "pytest", "-c", str(ini), "--rootdir", str(ROOT), "-p", "no:cacheprovider", "-q", "-rfE", "--tb=short", "-m", "gpu", *files)
    command += ["-n", str(processes)] if processes > 1 and importlib.util.find_spec("xdist") else []
    return Stage(name, command, limit_s, "" if folder.is_dir() else "tests/gpu is only in a checkout", beside=True)


def _part(name: str, out: Path, limit_s: int, quick: bool) -> Stage:
    """A stage that stops itself 15 s before its limit: starting takes a part of that, and the cell that runs last another."""
    less = ("--quick",) if quick else ()
    return Stage(name, python("-m", "fxmask.bench.device_stages", name, "--out", str(out), "--time-limit", str(limit_s - 15), *less), limit_s)


def _steps(name: str, out: Path, limit_s: int, options: Sequence[str]) -> Stage:
    """Rows that are there already are not measured again, and what a limit cuts off keeps what it has."""
    script = ROOT / "examples" / "benchmarks" / "train_step.py"
    command = python(str(script), "--dtype", "bf16", *options, "--seconds", "20", "--csv", str(out / "train_step.csv"))
    return Stage(name, command, limit_s, "" if script.exists() else "examples are only in a checkout")


def make_stages(out: Path, ini: Path, quick: bool = False, jobs: int = 1) -> list[Stage]:
    """All stages, in order. `quick`: fewer cells, and none of `small`, `full` and `train`; `jobs`: processes of `tests`."""
    part = ("-m", "fxmask.bench.device_stages")
    bench = ("-m", "fxmask", "bench", "--device", "cuda", "--out", str(out))
    sanitizer = shutil.which("compute-sanitizer")
    missing = "" if sanitizer else "compute-sanitizer is not on the PATH"
    tests = _pytest("tests", ini, 240, jobs)
    tool = [sanitizer or "compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9"]
    return [
        Stage("versions", python("-m", "fxmask", "env"), 60, beside=True),
        Stage("precompile", python(*part, "precompile"), 90, beside=True),
        *(Stage(f"memcheck-{k}", [*tool, *python(*part, "tiny", k)], 120, missing, beside=True) for k in KERNELS),
        tests,
        _pytest("flows", ini, 180, jobs),
        _pytest("graphs", ini, 90),
        replace(_pytest("limits", ini, 120), beside=False),
        *_again(tests),
        Stage("ceilings", python(*part, "ceilings", "--out", str(out)), 60),
        *(_part(name, out, limit, quick) for name, limit in PARTS.items()),
        Stage("quick", python(*bench, "--quick", "--time-limit", "105"), 125),
        *([] if quick else [_steps("small", out, 180, SMALL), Stage("full", python(*bench, "--time-limit", "450"), 480), _steps("train", out, 540, TRAIN)]),
    ]


def chosen(stages: Sequence[Stage], wanted: str) -> list[Stage]:
    """The stages whose name, or its part before the hyphen, is asked for; all where nothing is."""
    asked = names(wanted)
    known = {s.name for s in stages} | {s.name.partition("-")[0] for s in stages}
    if set(asked) - known:
        order = dict.fromkeys(s.name.partition("-")[0] for s in stages)
        raise ConfigError(f"unknown stage: expected some of {', '.join(order)}, got {', '.join(sorted(set(asked) - known))}.")
    return [s for s in stages if not asked or {s.name, s.name.partition("-")[0]} & set(asked)]


def summary(results: Sequence[Result], out: Path) -> list[str]:
    """The closing table: stages, what they found, then goals."""
    lines = ["", "stage        status   seconds"]
    lines += [f"{r.name:12} {r.status:8} {r.seconds:7.1f}  {'' if r.status == 'ok' else r.last}".rstrip() for r in results]
    found = rows_of(out, lines.append)
    same = latest(lambda: Table(out / CSV), lines.append, ("dtype",))
    lines += ["", "found", *finding_lines(found), "", "goal / measured / bound"]
    return lines + goal_lines(same, {r.name: r.status for r in results}, limits(out, found), found["metadata"])


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m fxmask.bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--stages", default="", metavar="NAMES", help="some of those above, e.g. tests,quick")
    p.add_argument("--quick", action="store_true", help="fewer cells in the stages from bandwidth on, and no stages small, full and train")
    p.add_argument("--out", type=Path, default=Path("bench-output"), metavar="DIR", help=f"csvs, {LOG} and stages.json are written there")
    p.add_argument("--time-limit", type=float, default=None, metavar="S", help="of the whole run")
    jobs = max(1, min(8, (os.cpu_count() or 1) // 2))
    p.add_argument("--jobs", type=int, default=jobs, metavar="N", help="how many stages that measure nothing run at a time (%(default)s)")
    a = p.parse_args(argv)
    if a.jobs < 1:
        p.error(f"--jobs: expected at least 1, got {a.jobs}")
    if not torch.cuda.is_available():
        where = "Run it on a machine with a GPU and a CUDA build of torch."
        print(f"make gpu: expected a CUDA device, got none (torch {torch.__version__}). {where}", file=sys.stderr)
        return 1
    out = a.out.resolve()
    with tempfile.TemporaryDirectory() as folder:
        ini = Path(folder) / "pytest.ini"
        ini.write_text(INI.format(root=ROOT), encoding="utf-8")
        try:
            stages = chosen(make_stages(out, ini, quick=a.quick, jobs=a.jobs), a.stages)
        except FxMaskError as e:
            print(f"fxmask: {e}", file=sys.stderr)
            return 2
        results = run_stages(stages, out, a.time_limit, jobs=a.jobs)
    print("\n".join(summary(results, out)))
    return 1 if any(r.status in ("failed", "timeout") for r in results) else 0


if __name__ == "__main__":
    sys.exit(main())
