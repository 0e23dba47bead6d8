"""The thesis' tables tell runs of other settings apart, and several that write one table lose no row of each other."""

from __future__ import annotations

import csv
import json
import threading
from types import SimpleNamespace

import plots
import pytest
from thesis import accuracy_table, cifar10_modes, combination, csv_files, gaps, isoflop, stability
from thesis import train as program

JPEG = "CIFAR-10 as JPEG, quality 75"


def finished(folder, rows=2, **facts):
    folder.mkdir(parents=True)
    row = ",".join(str(i) for i, _ in enumerate(program.COLUMNS))
    (folder / "log.csv").write_text("\n".join([",".join(program.COLUMNS), *[row] * rows]) + "\n")
    known = {"epochs": 2, "dense": True, "data": "digits", "threads": 1, "torch": "2", "holdout": 200}
    (folder / "run.json").write_text(json.dumps({**known, **facts}))


def test_runs_of_several_holdouts_are_rows_of_their_own(tmp_path):
    table = tmp_path / "t.csv"
    for holdout in (200, 100):
        finished(tmp_path / str(holdout) / "search" / "dense-adam-seed0", holdout=holdout)
        accuracy_table.write(tmp_path / str(holdout), table)
    assert [r["holdout"] for r in plots.read_csv(table)] == ["100", "200"]


def test_rows_of_before_have_their_holdout_in_the_command(tmp_path):
    table = tmp_path / "t.csv"
    finished(tmp_path / "runs" / "search" / "dense-adam-seed0")
    accuracy_table.write(tmp_path / "runs", table)
    (row,) = plots.read_csv(table)
    old = {k: v for k, v in row.items() if k != "holdout"}
    csv_files.write(table, list(old), [old])
    assert accuracy_table.setting_of(old) == accuracy_table.setting_of(row) == ("digits", "2", "200")
    assert accuracy_table.write(tmp_path / "runs", table) == 1 and plots.read_csv(table) == [row]


def test_a_row_has_the_last_epoch_s_values_and_all_epochs_sums(tmp_path):
    """The test images' accuracies beside the held-out ones, none of a search."""
    out = tmp_path / "dense-adam-seed0"
    finished(out, ran_on=["NVIDIA H200", "cpu"])
    rows = [{c: str((i + 1) * epoch) for i, c in enumerate(program.COLUMNS)} for epoch in (1, 100)]  # a column's number, and a hundred times that
    scale = {"flop": 1e12, "loaded": 1e9}
    csv_files.write(out / "log.csv", program.COLUMNS, ({c: float(v) * scale.get(c, 1) if c in scale else v for c, v in r.items()} for r in rows))
    (out / "test.json").write_text(json.dumps({"top1": 70.0, "top5": 90.0}))
    row = accuracy_table.row_of("final", "dense-adam", 0, out)
    assert [row[c] for c in ("train_loss", "train_acc", "held_top1", "ratio_achieved")] == ["200.0000", "400.00", "500.00", "700.0000"]
    assert [row[c] for c in ("flips", "train_tflop", "loaded_weights_g", "train_seconds")] == [808, "1010.00", "1111.000", "1212"]
    assert [row[c] for c in ("test_top1", "test_top5", "device")] == ["70.00", "90.00", "NVIDIA H200, cpu"]
    assert (row["block"], row["target_ratio"]) == ("", "0"), "by which a dense width is told"
    assert accuracy_table.row_of("search", "dense-adam", 0, out)["test_top1"] == ""
    csv_files.write(out / "log.csv", program.COLUMNS, rows[:1])
    assert accuracy_table.row_of("final", "dense-adam", 0, out) is None


def final(run, top1, *, epochs="20", data=JPEG, holdout="5000", seed="0", phase="final"):
    return {
        "phase": phase, "run": run, "seed": seed, "epochs": epochs, "data": data, "holdout": holdout, "test_top1": top1, "held_top1": top1, "train_tflop": "20",
        "target_ratio": "0" if run.startswith("dense") else "0.8",
    }  # fmt: skip


def test_prices_and_points_are_of_one_holdout():
    rows = [final("mask", "75"), final("dense", "76"), final("dense", "99", holdout="0")]
    pairs = (("a", "mask", "dense"),)
    assert [(r["data"], r["test"]) for r in gaps.differences(rows, pairs)] == [(f"{JPEG}, 5000 held out", "-1.00")]
    assert "data" not in gaps.differences(rows[:2], pairs)[0]
    found = isoflop.points([{**r, "phase": "isoflop"} for r in rows])
    assert [(p["run"], p["accuracy"], p["holdout"]) for p in found] == [("mask", 75, "5000"), ("dense", 76, "5000"), ("dense", 99, "0")]


@pytest.mark.parametrize(
    ("other", "said", "options"),
    [
        ({"data": "digits"}, f"20 epochs of {JPEG} with 5000 images held out, 20 epochs of digits with 5000 images held out", ("--data", "folder")),
        ({"epochs": "34"}, f"20 epochs of {JPEG} with 5000 images held out, 34 epochs of {JPEG} with 5000 images held out", ("--epochs", "20")),
        ({"holdout": "0"}, f"20 epochs of {JPEG} with 0 images held out, 20 epochs of {JPEG} with 5000 images held out", ("--holdout", "5000")),
    ],
)
def test_a_combination_is_of_one_setting(other, said, options, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(combination, "counted", lambda name: {"run": name, "GFLOP total": 2.0, "MiB held": 2.0})
    table, (dense, _, mask, _) = tmp_path / "t.csv", combination.RUNS
    rows = [final(dense, "70"), final(dense, "72", seed="1"), final(mask, "69"), final(dense, "99", **other), final("not-compared", "1", epochs="3")]
    csv_files.write(table, list(rows[0]), rows)
    assert combination.main(["--csv", str(table)]) == 2
    assert f"expected runs of one data set, one length and one holdout in {table}, got {said}.\n  fix: --data, --epochs, --holdout." in capsys.readouterr().err
    assert combination.main(["--csv", str(table), *options, "--out", str(tmp_path)]) == 0
    assert [(r["top-1, %"], r["seeds"]) for r in plots.read_csv(tmp_path / "combination.csv") if r["seeds"] != "0"] == [("70", "1"), ("69", "1")]
    csv_files.write(table, list(rows[0]), [final(dense, "70"), final(mask, "69", seed="1")])
    assert combination.main(["--csv", str(table)]) == 2 and "expected runs with a seed in common" in capsys.readouterr().err


def test_two_that_measure_stability_lose_no_row(tmp_path, monkeypatch):
    """The other ends while this one trains."""
    table, losses = tmp_path / "t.csv", [2.0] * 20
    monkeypatch.setattr(stability, "losses_of", lambda *_: losses)
    command = ["--models", "mlp512", "--steps", "20", "--csv", str(table), "--modes"]

    def trains(*_):
        monkeypatch.setattr(stability, "losses_of", lambda *_: losses)
        assert stability.main([*command, "ste", "dense"]) == 0
        return losses

    monkeypatch.setattr(stability, "losses_of", trains)
    assert stability.main([*command, "dense", "masked"]) == 0
    assert [r["mode"] for r in plots.read_csv(table)] == ["ste", "dense", "masked"], "each once"
    monkeypatch.setattr(stability, "losses_of", lambda *_: [float(i) for i in range(20)])
    stability.main([*command, "rigl"])
    assert [plots.read_csv(table)[-1][c] for c in ("mode", "first_loss", "last_loss")] == ["rigl", "0.0000", "14.5000"], "the mean of the last ten"


def test_two_that_write_the_modes_lose_no_row(tmp_path, monkeypatch):
    """One has read the table, and another run ends and is written before it writes."""
    names, others, read = list(cifar10_modes.RUNS)[:2], [], csv_files.read
    dense = {"backward": "masked", "opt": "adam", "guard": "free", "criterion": "fro", "schedule": None, "seed": 0}
    finished(tmp_path / "runs" / names[0], **dense)

    def slow(path, *columns):
        found = read(path, *columns)
        if not others:
            finished(tmp_path / "runs" / names[1], **dense)
            others.append(threading.Thread(target=cifar10_modes.write, args=(tmp_path / "runs", tmp_path / "t.csv")))
            others[0].start()
            others[0].join(0.3)
        return found

    monkeypatch.setattr(csv_files, "read", slow)
    cifar10_modes.write(tmp_path / "runs", tmp_path / "t.csv")
    others[0].join()
    with (tmp_path / "t.csv").open(newline="") as file:
        assert [r["run"] for r in csv.DictReader(file)] == names


def test_a_row_of_the_modes_has_the_last_epoch_s_values_and_all_epochs_sums(tmp_path):
    facts = {"backward": "ste", "opt": "adam", "guard": "free", "criterion": "fro", "schedule": None, "seed": 3}
    finished(tmp_path / "a", dense=False, **facts)
    rows = [{c: str((i + 1) * epoch * (10**12 if c == "flop" else 1)) for i, c in enumerate(program.COLUMNS)} for epoch in (1, 100)]
    csv_files.write(tmp_path / "a" / "log.csv", program.COLUMNS, rows)
    row = cifar10_modes.row_of("ste-adam-free", tmp_path / "a")
    assert [row[c] for c in ("top1", "top5", "train_acc", "val_loss", "ratio_achieved")] == ["500.00", "600.00", "400.00", "300.0000", "700.0000"]
    assert [row[c] for c in ("flips", "train_tflop", "train_seconds")] == [808, "1010.00", "1212"]
    assert [row[c] for c in ("mode", "guard", "schedule", "target_ratio", "seed", "epochs")] == ["ste", "free", "constant", 0.8, 3, 2]


def test_the_modes_refuse_the_folder_of_another_run_in_their_own_words(tmp_path, monkeypatch, capsys):
    """Not in those of train.py, whose --out and --fresh they do not have; the same command is given to train.py."""
    begun: list[list[str]] = []
    monkeypatch.setattr(cifar10_modes.subprocess, "run", lambda command, **_: begun.append(command) or SimpleNamespace(returncode=1))
    command = ["--root", str(tmp_path), "--only", "ste-adam-free", "--runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv")]
    assert cifar10_modes.main(command) == 1
    facts = vars(program.arguments(begun[0][2:]))
    finished(tmp_path / "runs" / "ste-adam-free", rows=1, **json.loads(json.dumps(facts, default=str)))
    assert cifar10_modes.main(command) == 1 and begun[0] == begun[1]
    assert cifar10_modes.main([*command, "--seed", "1"]) == 2 and len(begun) == 2
    assert "expected a run with seed 1, as this command says, got one with seed 0.\n  fix: another --runs folder." in capsys.readouterr().err


def test_the_modes_keep_the_rows_of_other_runs(tmp_path):
    """Of other folders, lengths, seeds and data; a run that lies here has one row, and one that has not ended none."""
    table, name = tmp_path / "t.csv", "dense-adam"
    facts = {"backward": "masked", "opt": "adam", "guard": "free", "criterion": "fro", "schedule": None, "seed": 0}
    committed = csv_files.read(cifar10_modes.HERE.parent / "results" / "cifar10_modes.csv")
    csv_files.write(table, cifar10_modes.COLUMNS, committed)
    others = [{}, {"seed": 1}, {"data": "folder"}, {"epochs": 3, "rows": 3}]
    for i, other in enumerate(others):
        finished(tmp_path / str(i) / name, **facts | other)
        cifar10_modes.write(tmp_path / str(i), table)
        cifar10_modes.write(tmp_path / str(i), table)
    finished(tmp_path / "running" / "ste-adam-free", epochs=4, **facts)
    cifar10_modes.write(tmp_path / "running", table)
    rows = csv_files.read(table)
    added = [r for r in rows if r not in committed]
    assert len(committed) == 13 and [r for r in rows if r in committed] == committed and {r["run"] for r in rows[: 1 + len(others)]} == {name}
    assert [(r["epochs"], r["seed"], r["data"]) for r in added] == [("2", "0", "digits"), ("2", "1", "digits"), ("2", "0", JPEG), ("3", "0", "digits")]
