"""What a sweep hands to submitit, of which a fake stands here with the parts that are used."""

from __future__ import annotations

import json
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
from thesis import sweep, sweep_slurm
from thesis.sweep_checks import SweepError

SWEEP = {
    "hp": {"model_config": ["ResMLP2 @ XPatch = masked {ratio} (4, 4);"], "ratio": [0.5, 0.8, 0.9]},
    "fixed": {"data_set": "digits", "epochs": 1},
    "meta": {"run": "slurm", "prefix": "grid", "gpus": 4},
    "sbatch": {"partition": "gpu", "gpus": 2, "cpus-per-task": 8, "mem": "16G", "time": "1-02:30:00", "export": "ALL", "chdir": "/home"},
}


class Submitit:
    """Records what is asked of it; the states of jobs can be set."""

    def __init__(self) -> None:
        self.parameters: dict[str, object] = {}
        self.sent: list[list[str]] = []
        self.states: dict[str, str] = {}
        self.helpers = SimpleNamespace(CommandFunction=lambda command: command)
        self.batches = 0

    def AutoExecutor(self, folder, cluster):
        assert cluster == "slurm" and Path(folder).is_absolute()
        return self

    def SlurmJob(self, folder, job_id):
        return SimpleNamespace(state=self.states[job_id])

    def update_parameters(self, **parameters):
        self.parameters = parameters

    @contextmanager
    def batch(self):
        self.batches += 1
        yield

    def submit(self, command):
        self.sent.append(command)
        job_id = f"7_{len(self.sent)}"
        self.states[job_id] = "PENDING"
        return SimpleNamespace(job_id=job_id)


@pytest.fixture
def package(monkeypatch):
    fake = Submitit()
    monkeypatch.setitem(sys.modules, "submitit", fake)
    return fake


@pytest.fixture
def run(tmp_path):
    (tmp_path / "sweep.json").write_text(json.dumps(SWEEP))
    return lambda *options: sweep.main(["run", str(tmp_path / "sweep.json"), "--out", str(tmp_path / "out"), *options])


def test_what_is_submitted(package, run, tmp_path, capsys):
    assert run() == 0 and package.batches == 1
    assert package.parameters == {
        "name": "grid", "slurm_partition": "gpu", "slurm_mem": "16G", "cpus_per_task": 8, "timeout_min": 26 * 60 + 30, "slurm_array_parallelism": 2,
        "slurm_additional_parameters": {"gpus": "2", "export": "ALL", "chdir": "/home"},
    }  # fmt: skip
    assert len(package.sent) == 3 and all(command[0] == sys.executable and command[1].endswith("examples/thesis/train.py") for command in package.sent)
    outs = [Path(command[command.index("--out") + 1]) for command in package.sent]
    assert len(set(outs)) == 3 and all(out.is_absolute() and out.parent == (tmp_path / "out").resolve() for out in outs)
    assert "3 runs sent to SLURM, 0 queued or running from before" in capsys.readouterr().out


@pytest.mark.parametrize("option", ["--jobs", "--at-once"])
def test_processes_of_this_machine(option, package, run, capsys):
    assert run(option, "7") == 2 and not package.sent
    assert f"{option}: expected meta.run local" in capsys.readouterr().err


def test_only_what_is_neither_queued_nor_running_is_sent_again(package, run, capsys):
    run()
    package.states |= {"7_1": "RUNNING", "7_2": "FAILED", "7_3": "CANCELLED by 0"}
    capsys.readouterr()
    assert run() == 0 and len(package.sent) == 5
    assert "2 runs sent to SLURM, 1 queued or running from before" in capsys.readouterr().out
    assert package.sent[3:] == package.sent[1:3]
    assert run() == 0 and len(package.sent) == 5  # all three are alive now


def test_a_job_that_slurm_does_not_know_yet(package, run, monkeypatch):
    run()
    package.states = dict.fromkeys(package.states, "UNKNOWN")
    assert run() == 0 and len(package.sent) == 3
    now = sweep_slurm.time.time
    monkeypatch.setattr(sweep_slurm.time, "time", lambda: now() + 3600)
    assert run() == 0 and len(package.sent) == 6


def test_a_damaged_record_sends_nothing(package, run, tmp_path, capsys):
    """Without it, what is queued would be sent a second time."""
    run()
    for text in ("{", "[1]", '{"a": 1}'):
        (tmp_path / "out" / sweep_slurm.RECORD).write_text(text)
        assert run() == 2 and f"{sweep_slurm.RECORD}: expected what was sent, got" in capsys.readouterr().err
    assert len(package.sent) == 3


def test_without_submitit_or_slurm(run, monkeypatch, package, capsys):
    def nowhere(folder, cluster):
        raise RuntimeError('Could not detect "srun", are you indeed on a slurm cluster?')

    monkeypatch.setattr(package, "AutoExecutor", nowhere)
    assert run() == 2 and 'meta.run: slurm: Could not detect "srun"' in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "submitit", None)
    assert run() == 2
    why = "import of submitit halted; None in sys.modules"
    assert f"slurm needs submitit, which cannot be imported: {why}.\n  fix: pip install submitit, or run: local" in capsys.readouterr().err


def test_times():
    said = {"90": 90, "90:30": 91, "12:00:00": 720, "1-12": 36 * 60, "1-12:30": 36 * 60 + 30, "2-00:00:01": 2881}
    assert {text: sweep_slurm.minutes(text) for text in said} == said
    with pytest.raises(SweepError, match=r"sbatch.time: expected sbatch's form, such as 90, 12:00:00 or 1-12:00:00, got '12h'"):
        sweep_slurm.minutes("12h")


def test_variables_of_the_folder(monkeypatch, tmp_path):
    """As in fixed.data_dir."""
    monkeypatch.setenv("FXMASK_RUNS", str(tmp_path))
    (tmp_path / "sweep.json").write_text(json.dumps({**SWEEP, "meta": {"sandbox": "$FXMASK_RUNS/all", "prefix": "grid"}}))
    assert sweep.main(["table", str(tmp_path / "sweep.json")]) == 0
    assert (tmp_path / "all" / "grid" / "masked_accuracy.csv").exists()
