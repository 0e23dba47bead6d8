"""The tables of a sweep that a second process writes at the same time."""

from __future__ import annotations

import json
import threading
from types import SimpleNamespace

import plots
import pytest
from thesis import csv_files, sweep, sweep_file, sweep_results
from thesis import train as program


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


@pytest.mark.parametrize(("test", "holdout", "judged"), [(False, 0, "test images"), (False, 9, "held-out training images"), (True, 9, "test images")])
def test_a_run_s_rows(test, holdout, judged, tmp_path):
    """The last epoch's values, or the test images' accuracies; sums over all epochs; no row before the last epoch has ended."""
    fixed = {"data_set": "digits", "epochs": 2}
    train = {"holdout": holdout, "read_test": test, "masks_from": 0, "warmup": 0, "cooldown": 0}
    grid = {"model_config": ["ResMLP1 @ XPatch = masked 0.5 (16, 16); XChannel = masked 0.5 (16, 16);"]}
    (tmp_path / "a.json").write_text(json.dumps({"hp": grid, "fixed": fixed, "train": train}))
    (job,) = sweep_file.read(tmp_path / "a.json").jobs
    facts = vars(job.namespace()) | {"steps": 3, "torch": "2"}
    (tmp_path / "run.json").write_text(json.dumps(facts, default=str))
    rows = [{c: str((i + 1) * epoch) for i, c in enumerate(program.COLUMNS)} for epoch in (1, 100)]  # a column's number, and a hundred times that
    for written in (rows[:1], rows):
        assert sweep_results.ended(job, tmp_path) is None
        csv_files.write(tmp_path / "log.csv", program.COLUMNS, written)
    if test:
        assert sweep_results.ended(job, tmp_path) is None
        (tmp_path / "test.json").write_text(json.dumps({"top1": 70.0, "top5": 90.0}))
    run = sweep_results.ended(job, tmp_path)
    row, loaded = sweep_results.accuracy_row(run), sweep_results.loaded_row(run)
    values = [row[c] for c in ("train_loss", "val_loss", "train_acc", "top1", "top5", "ratio_achieved", "judged_on")]
    assert values == ["200.0000", "300.0000", "400.00", *(["70.00", "90.00"] if test else ["500.00", "600.00"]), "700.0000", judged]
    assert (row["flips"], row["epochs"], row["seconds"], run.top1) == (808, 2, "1212.0", 70 if test else 500)
    assert (loaded["batches"], loaded["measured"], loaded["predicted"]) == (6, 1111, 6 * 24 * 256)
