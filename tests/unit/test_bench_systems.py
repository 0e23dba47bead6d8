"""`fxmask bench --system`: activation pruning, block dropout and N:M masks beside the dense layer, on the CPU as a device of its own."""

import csv
import dataclasses
import os
import platform

import pytest
import torch

from fxmask.bench import clock, dropping, nm, provenance, pruning, systems
from fxmask.cli import main
from fxmask.kernels import dropout_ops

OWN = {"activations": ("form", "fxmask"), "dropout": ("provider", "fxmask"), "nm": ("provider", "masked_dense")}


@pytest.fixture(autouse=True)
def small_and_idle(monkeypatch):
    monkeypatch.setattr(dropping, "CPU_SHAPE", (256, 128, 256))
    monkeypatch.setattr(nm, "CPU_SHAPE", (64, 48, 32))
    monkeypatch.setattr(pruning, "CPU_INPUT", (2, 24, 128))
    monkeypatch.setattr(pruning, "OUTPUTS", (40, 24))
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    torch.manual_seed(0)  # of four blocks, one draw in sixteen drops all: then even a wrong dW is right


def bench(system, out, *options):
    return main(["bench", "--device", "cpu", "--system", system, "--quick", "--sample-s", "0.01", "--out", str(out), *options])


@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_every_cell_is_right_and_stands_beside_dense(system, tmp_path, capsys):
    column, own = OWN[system]
    assert bench(system, tmp_path) == 0
    lines = capsys.readouterr().out.splitlines()
    (path,) = tmp_path.glob("*.csv")
    with path.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {r["gate"] for r in rows} == {"pass"} and {r["verdict"] for r in rows} == {"ok"} and {r["dtype"] for r in rows} == {"fp32"}
    assert {own, "dense"} <= {r[column] for r in rows} and all(float(r["ms_p50"]) > 0 for r in rows)
    table = lines[-len(rows) :]
    for row, line in zip(rows, table, strict=True):
        (dense,) = [r for r in rows if r[column] == "dense" and all(r[c] == row[c] for c in systems.SYSTEMS[system].alike)]
        assert line.split()[0] == row[column] and f"{float(dense['ms_p50']) / float(row['ms_p50']):.2f}" in line.split()
    assert bench(system, tmp_path) == 0  # goes on: nothing is measured again
    assert f"{len(rows)} of {len(rows)} cells are in" in capsys.readouterr().out


def test_another_commit_goes_on_and_other_threads_measure_anew(tmp_path, capsys, monkeypatch):
    def shown():
        return [line.split()[0] for line in capsys.readouterr().out.splitlines()[-2:]]

    before = torch.get_num_threads()
    try:
        assert bench("nm", tmp_path, "--threads", "1") == 0 and shown() == ["dense", "masked_dense"]
        first = (tmp_path / "nm.csv").read_text()
        with monkeypatch.context() as m:
            m.setattr(provenance, "commit", lambda: ("another", "1"))
            m.setattr(platform, "python_version", lambda: "3.99.0")
            assert bench("nm", tmp_path, "--threads", "1") == 0 and shown() == ["dense", "masked_dense"]
        assert (tmp_path / "nm.csv").read_text() == first
        assert bench("nm", tmp_path, "--threads", "2") == 0 and shown() == ["dense", "masked_dense"]
    finally:
        torch.set_num_threads(before)
    with (tmp_path / "nm.csv").open(newline="") as file:
        assert [r["threads"] for r in csv.DictReader(file)] == ["1", "1", "2", "2"]


def test_a_wrong_result_gets_no_time(tmp_path, capsys, monkeypatch):
    right = dropout_ops.dropped_dw
    monkeypatch.setattr(dropout_ops, "dropped_dw", lambda *args: right(*args) * 1.01)
    assert bench("dropout", tmp_path, "--cells", "dense/*,fxmask/*/0.5") == 1
    last = capsys.readouterr().out.splitlines()[-1]
    assert last.split()[0] == "fxmask" and "none: dW" in last


@pytest.mark.parametrize("when", ["timed", "read"])
def test_a_cell_that_raises_behind_its_gate_has_failed(tmp_path, monkeypatch, when):
    """While it is timed, or while what its time tells is read off, as by another launch."""

    def raises(*_):
        raise RuntimeError("an illegal access")

    if when == "timed":
        monkeypatch.setattr(clock, "time_cpu", raises)
    else:
        worthless = dataclasses.replace(nm.NM_PART, prepare=lambda *given: nm.prepare(*given)._replace(worth=raises))
        monkeypatch.setitem(systems.SYSTEMS, "nm", worthless)
    assert bench("nm", tmp_path) == 1
    with (tmp_path / "nm.csv").open(newline="") as file:
        assert {(r["gate"], r["ms_p50"], r["verdict"]) for r in csv.DictReader(file)} == {("fail", "", "none: RuntimeError: an illegal access")}


def test_a_busy_machine_gets_no_ratio(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 1e3, 1e3))
    assert bench("nm", tmp_path) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[-1].endswith("cores") and "none: load 1000.0" in out.splitlines()[-1] and "1.00" not in out.splitlines()[-2]
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    assert bench("nm", tmp_path) == 0  # measured again, and shown once
    out = capsys.readouterr().out
    assert "load" not in out and [line.split()[0] for line in out.splitlines()[-2:]] == ["dense", "masked_dense"]


def test_a_losing_row_has_its_ratio_and_one_without_a_verdict_has_none():
    row = {**dict.fromkeys(nm.NM_PART.columns, ""), "op": "step", "gate": "pass", "verdict": "ok"}
    times = {"dense": {"ms_p50": "1"}, "masked_dense": {"ms_p50": "4"}, "fxmask_triton": {"ms_p50": "2", "verdict": "none: load 9 on 2 cores"}}
    lines = systems.summary("nm", [row | {"provider": name} | values for name, values in times.items()]).splitlines()[2:]
    assert [line.split()[:4] for line in lines[:2]] == [["dense", "step", "1", "1.00"], ["masked_dense", "step", "4", "0.25"]]
    assert lines[2].split()[:4] == ["fxmask_triton", "step", "2", "none:"]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
@pytest.mark.parametrize("system", systems.SYSTEMS)
def test_cells_of_a_device(system, device, capsys):
    assert main(["bench", "--device", device, "--system", system, "--list"]) == 0  # lists without a GPU
    names = capsys.readouterr().out.split()
    assert names and len(names) == len(set(names)) and names[0].startswith("dense/")
    assert all(("fp32" in n.split("/")) for n in names) == (device == "cpu")
    assert any("triton" in n for n in names) == (device == "cuda")


def test_rates_and_ratios_of_the_papers(capsys):
    assert {c.p for c in dropping.cpu_cells(False)} == {0.0, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9}
    assert {c.ratio for c in pruning.cpu_cells(False) if c.form == "fxmask"} == {r / 10 for r in range(1, 10)}


OF_WEIGHTS = [["--blocks", "32"], ["--ratios", "0.5"], ["--shapes", "8x8->8"], ["--floor"], ["--dispatch", "5"], ["--dtype", "bf16"], ["--masks", "rows"]]


@pytest.mark.parametrize("option", OF_WEIGHTS)
def test_options_of_weight_masks(option, tmp_path, capsys):
    assert bench("dropout", tmp_path, *option) == 2
    said = capsys.readouterr().err
    assert f"got {option[0]}" in said and "fix:" in said and not list(tmp_path.iterdir())
    threads = torch.get_num_threads()
    assert bench("dropout", tmp_path, "--threads", "0") == 2 and torch.get_num_threads() == threads
    assert bench("dropout", tmp_path, "--cells", "nothing") == 2 and "leaves nothing" in capsys.readouterr().err
