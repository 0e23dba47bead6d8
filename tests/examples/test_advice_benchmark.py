"""The table of what advise predicts beside what train_step.py measured."""

from __future__ import annotations

import csv

import pytest
import torch
from benchmarks import advice, page_faults

import fxmask
from fxmask.bench.provenance import provenance

COLUMNS = ("device", "model", "batch", "threads", "block", "ratio", "contender", "refresh", "ms_p50", "dtype", "optimizer", "masked_step")


def csv_of(path, dense, ours):
    here = (provenance(torch.device("cpu"))["device"], "tiny", 4, 1, 8, 0.75)
    rows = [(*here, "dense_eager", "", dense), (*here, "fxmask_eager", 1, 1e9), (*here, "fxmask_eager", 10, ours)]
    rows += [("another machine", *here[1:], "fxmask_eager", 10, 1e9), (*here[:2], 16, *here[3:], "fxmask_eager", 10, 1e9)]
    rows = [(*row, "fp32", "adamw", "on") for row in rows]
    others = (("bf16", "adamw", "on"), ("fp32", "sgd", "on"))  # other runs of the same model, later
    rows += [(*here, contender, refresh, 1e9, *other) for other in others for contender, refresh in (("dense_eager", ""), ("fxmask_eager", 10))]
    rows += [(*here, "fxmask_eager", 10, 1e9, "fp32", "adamw", "off")]
    with path.open("w", newline="") as file:
        out = csv.writer(file)
        out.writerows([COLUMNS, *rows])
    return path


class Plan:
    def __init__(self, gain):
        self.gain, self.blocks = gain, {"fc": (8, 8)}


class Found:
    def __init__(self, gain):
        self.plan, self.gain, self.summary = None if gain is None else Plan(gain), gain or 1.0, {"advice": "so"}
        self.tried = 1.75


@pytest.mark.parametrize(
    ("gain", "dense", "verdict", "status"),
    [(2.2, 20.0, "ok", 0), (2.34, 20.0, "off", 1), (1.6, 20.0, "off", 1), (1.06, 9.9, "loses", 1), (None, 5.0, "ok", 0)],
)
def test_verdicts(gain, dense, verdict, status, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(advice, "asked", lambda *a: Found(gain))
    path = csv_of(tmp_path / "a.csv", dense, 10.0)
    assert advice.main(["--model", "tiny", "--block", "8", "--ratio", "0.75", "--threads", "1", "--csv", str(path)]) == status
    last = capsys.readouterr().out.splitlines()[-1]
    assert verdict in last and "1.75" in last and f"{dense / 10:.3g}" in last


@pytest.mark.slow
def test_of_a_model_that_nobody_measured(tmp_path, capsys):
    """Asked in earnest: a tiny model, for which no mask pays."""
    assert advice.main(["--model", "tiny", "--block", "8", "--ratio", "0.75", "--threads", "1", "--seconds", "60", "--csv", str(tmp_path / "no.csv")]) == 0
    out = capsys.readouterr().out
    assert "leave it dense" in out and "| tiny" in out


def test_it_reads_what_was_measured(monkeypatch):
    with advice.CSV.open(newline="") as file:
        rows = list(csv.DictReader(file))
    monkeypatch.setattr(advice, "provenance", lambda device: {"device": "AMD EPYC"})
    assert 2.0 < advice.measured(rows, "mlp", 4096, 64, 0.8, 2) < 3.0 and advice.measured(rows, "mlp", 4096, 64, 0.5, 2) is None
    assert fxmask.__version__ == rows[0]["fxmask"]


def test_page_faults_are_those_of_the_step(monkeypatch, capsys):
    """And seconds of the system: both have been counted since the process began."""
    counted = iter((i, 2 * i, 1000 * i) for i in range(99))
    monkeypatch.setattr(page_faults, "usage", lambda: next(counted))
    assert page_faults.main(["--model", "tiny", "--block", "8", "--ratio", "0.75", "--threads", "1", "--turns", "2"]) == 0
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in capsys.readouterr().out.splitlines()[-2:]]
    assert [row[2:] for row in rows] == [["2000", "1000"]] * 2


def test_page_faults_of_steps(capsys):
    assert page_faults.main(["--model", "tiny", "--block", "8", "--ratio", "0.75", "--threads", "1", "--turns", "2"]) == 0
    out = capsys.readouterr().out
    assert "| dense_eager " in out and "| fxmask_eager " in out and "page faults" in out and "process time" in out
