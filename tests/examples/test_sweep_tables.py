"""The tables of a sweep that a second process writes at the same time."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import plots
from thesis import sweep, sweep_results


def test_two_that_write_the_tables(tmp_path, monkeypatch):
    """One begins and ends while the other is writing."""
    inner = []

    def row(run):
        if not inner:
            inner.append(run)
            sweep_results.write(["table"], tmp_path)
        return {"run": run}

    for name in ("accuracy_row", "loaded_row"):
        monkeypatch.setattr(sweep_results, name, row)
    sweep_results.write(["sweep"], tmp_path)
    assert inner == ["sweep"] and [plots.read_csv(tmp_path / f"{name}.csv")[0]["run"] for name in ("masked_accuracy", "loaded_elements")] == ["sweep", "sweep"]
    assert not list(tmp_path.glob(".*"))


def test_a_table_that_began_earlier_is_not_written_over_a_later_one(tmp_path, monkeypatch):
    table, ended, seen = sweep.Table(SimpleNamespace(jobs=()), tmp_path / "out"), [], []

    def collect(jobs, out):
        found = list(ended)
        if not seen:
            seen.append(threading.Thread(target=sweep.Table(table.sweep, table.out).write))
            ended.append("a run that ends meanwhile")
            seen[0].start()
            seen[0].join(0.3)
        return found

    written = []
    monkeypatch.setattr(sweep_results, "collect", collect)
    monkeypatch.setattr(sweep_results, "write", lambda runs, out: written.append(runs))
    table.write()
    seen[0].join()
    assert written == [[], ["a run that ends meanwhile"]]
