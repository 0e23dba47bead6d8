"""The machinery of the GPU run, with dummy stages."""

import dataclasses
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fxmask.bench import device_stages, gpu, nm
from fxmask.bench.clock import Times
from fxmask.bench.stages import LOG, RESULTS, Result, Stage, python, run_stages
from fxmask.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def test_stages_survive_failures(tmp_path):
    # a stage that hangs, with a child that would outlive it and that ignores a polite end
    hang = "print('hanging'); import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)']); time.sleep(60)"
    stages = [
        Stage("first", python("-c", "print('one'); print('two')"), 20),
        Stage("broken", python("-c", "raise SystemExit(3)"), 20),
        Stage("again", python("-c", "print('retried')"), 20, after_failure_of="broken"),
        Stage("never", python("-c", "print('no')"), 20, after_failure_of="first"),
        Stage("hanging", python("-c", hang), 3.0),
        Stage("absent", ["/no/such/program"], 20),
        Stage("elsewhere", python("-c", "pass"), 20, skip="no tool"),
        Stage("last", python("-c", "import os; print(os.environ['MORE'])"), 20, env={"MORE": "more"}),
    ]
    begin = time.monotonic()
    results = {r.name: r for r in run_stages(stages, tmp_path, say=lambda line: None)}
    assert time.monotonic() - begin < 40
    assert {n: r.status for n, r in results.items()} == {
        "first": "ok", "broken": "failed", "again": "ok", "hanging": "timeout", "absent": "failed", "elsewhere": "skipped", "last": "ok"
    }  # fmt: skip
    assert results["first"].last == "two" and results["broken"].code == 3 and results["last"].last == "more" and results["hanging"].last == "hanging"
    assert [r["name"] for r in json.loads((tmp_path / RESULTS).read_text())] == list(results)
    assert "==== hanging" in (tmp_path / LOG).read_text()
    assert "failed" in "\n".join(gpu.summary(list(results.values()), tmp_path))


def test_stages_share_a_time_limit(tmp_path):
    stages = [Stage("slow", python("-c", "import time; time.sleep(30)"), 20), Stage("late", python("-c", "pass"), 20)]
    results = run_stages(stages, tmp_path, time_limit=0.5, say=lambda line: None)
    assert [r.status for r in results] == ["timeout", "skipped"] and "--time-limit" in results[1].last


def test_stages_that_measure_nothing_run_side_by_side(tmp_path):
    # the first waits for a file that the second makes, so neither ends alone; the next one runs when both are through
    wait = "import pathlib, sys, time\nwhile not pathlib.Path(sys.argv[1]).exists(): time.sleep(0.02)\nprint('met')"
    mark = tmp_path / "mark"
    stages = [
        Stage("waits", python("-c", wait, str(mark)), 20, beside=True),
        Stage("makes", python("-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).touch(); print('made')", str(mark)), 20, beside=True),
        Stage("breaks", python("-c", "raise SystemExit(3)"), 20, beside=True),
        Stage("alone", python("-c", "import pathlib, sys; pathlib.Path(sys.argv[1]).unlink(); print('removed')", str(mark)), 20),
        Stage("again", python("-c", "pass"), 20, after_failure_of="breaks"),
    ]
    results = run_stages(stages, tmp_path, say=lambda line: None, jobs=2)
    assert [(r.name, r.status) for r in results] == [("waits", "ok"), ("makes", "ok"), ("breaks", "failed"), ("alone", "ok"), ("again", "ok")]
    assert re.findall(r"==== (\w+).*\n(\w*)", (tmp_path / LOG).read_text()) == [
        ("waits", "met"), ("makes", "made"), ("breaks", ""), ("alone", "removed"), ("again", "")
    ]  # fmt: skip
    assert not list(tmp_path.glob(f"*.{LOG}"))


def test_an_interrupt_ends_what_runs_side_by_side(tmp_path):
    stages = [Stage("quick", python("-c", "pass"), 20, beside=True), Stage("slow", python("-c", "import time; time.sleep(30)"), 40, beside=True)]

    def interrupted(line):
        raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        run_stages(stages, tmp_path, say=interrupted, jobs=2)
    assert time.monotonic() - begin < 15


def test_only_stages_that_measure_nothing_run_beside_others(tmp_path):
    stages = gpu.make_stages(tmp_path, tmp_path / "pytest.ini", jobs=4)
    beside = {s.name.partition("-")[0] for s in stages if s.beside}
    assert beside == {"versions", "precompile", "memcheck", "tests", "flows", "graphs"}
    assert [s.beside for s in stages] == sorted((s.beside for s in stages), reverse=True)  # all at once, and before the others
    tests = next(s for s in stages if s.name == "tests")
    assert (list(tests.command[-2:]) == ["-n", "4"]) == (importlib.util.find_spec("xdist") is not None)


def test_stages_can_be_chosen(tmp_path):
    stages = gpu.make_stages(tmp_path, tmp_path / "pytest.ini")
    assert [s.name for s in gpu.chosen(stages, "quick,tests")] == ["tests", "quick"]
    assert {s.name.partition("-")[0] for s in gpu.chosen(stages, "memcheck")} == {"memcheck"}
    assert gpu.chosen(stages, "") == stages
    with pytest.raises(ConfigError, match=r"unknown stage: expected some of versions, .* got nonsense"):
        gpu.chosen(stages, "quick,nonsense")


def test_the_help_names_the_stages(tmp_path, capsys):
    with pytest.raises(SystemExit):
        gpu.main(["--help"])
    said = capsys.readouterr().out
    assert all(s.name.partition("-")[0] in said.partition("options:")[0] for s in gpu.make_stages(tmp_path, tmp_path / "pytest.ini"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_gpu_run_without_a_device(tmp_path, capsys):
    assert gpu.main(["--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("make gpu: expected a CUDA device, got none (torch ")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("status", "code"), [("ok", 0), ("skipped", 0), ("failed", 1), ("timeout", 1)])
def test_a_stage_that_failed_or_hung_fails_the_run(tmp_path, monkeypatch, status, code):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu, "run_stages", lambda stages, *_, **__: [Result(s.name, status if s.name == "nm" else "ok") for s in stages])
    assert gpu.main(["--stages", "nm,quick", "--out", str(tmp_path)]) == code


def test_ceilings_are_in_units_a_second(tmp_path, monkeypatch, capsys):
    """2 ms for the product, 4 ms for as many bytes as are read, and written."""
    took = iter((2.0, 4.0))
    monkeypatch.setattr(device_stages, "check_device", lambda name: torch.device("meta"))
    monkeypatch.setattr(device_stages, "flush_buffer", lambda device: None)
    monkeypatch.setattr(device_stages, "time_cuda", lambda call, flush, samples: Times((0.0, next(took), 0.0), "graph"))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (8 << 30, 9 << 30))
    assert device_stages.ceilings(tmp_path) == 0
    assert json.loads((tmp_path / "ceilings.json").read_text()) == {"flops_per_s": 2 * 8192**3 / 2e-3, "bytes_per_s": 2 * (2 << 30) / 4e-3}
    assert "550 TFLOP/s (2.000 ms); a kernel that copies: 1.07 TB/s" in capsys.readouterr().out


@pytest.mark.parametrize("right", [True, False])
def test_a_stage_fails_where_a_cell_does(tmp_path, monkeypatch, capsys, right):
    pytest.importorskip("triton")
    monkeypatch.setattr(device_stages, "check_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(nm, "TINY", (8, 4, 8))
    cells = [nm.NM(provider, "step", *nm.TINY, "fp32") for provider in ("dense", "masked_dense")]
    part = dataclasses.replace(nm.NM_PART, cells=lambda device, quick: cells)
    monkeypatch.setitem(device_stages.PARTS, "nm", part)
    if not right:
        monkeypatch.setitem(nm.STEPS, "masked_dense", lambda tensors: (*nm.dense(tensors)[:3], nm.nm.magnitude_mask(tensors[1], 2, 4)))
    assert device_stages.main(["nm", "--out", str(tmp_path)]) == (0 if right else 1)
    said = capsys.readouterr().out.splitlines()[-1]
    assert said == "nm.csv: 2 of 2 cells, 0 failed, 0 left" if right else said.startswith("nm.csv: 1 of 2 cells, 1 failed, 0 left none: y: error")


@pytest.mark.slow
def test_bodies_of_the_gpu_tests_run_in_the_interpreter():
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, ROOT / "tests/gpu/rehearse.py"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert re.search(r"\d+ bodies in", done.stdout)


@pytest.mark.slow
def test_flows_of_the_gpu_tests_run_on_the_cpu():
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}:{ROOT / 'tests'}"}
    done = subprocess.run([sys.executable, ROOT / "tests/gpu/flows.py"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    assert "failed: none" in done.stdout
