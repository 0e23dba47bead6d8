"""Table IV and figures 7 and 8 of Barley: the grid of runs, what is made of runs that have ended, colours, bytes by formula and by autograd, wrong use."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

import plots
import pytest
import torch
from thesis import barley_figure_8, barley_runs, barley_table_4, side_by_side, sweep_results
from thesis.masked_model import preset_of

ROOT = Path(__file__).parents[2]
DIGITS = ["--data", "digits", "--epochs", "1", "--seeds", "0", "--at-once", "4"]


def arguments(script, *words: str):
    """What the script would make of a command line."""
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(script, "work", lambda args: seen.append(args) or 0)
        assert script.main(list(words)) == 0
    return seen[0]


def stand_ins(args, accuracy: dict[tuple[int, str, int], float]) -> list[sweep_results.Ended]:
    """Runs by (mini-batch, pruned, seed) that have ended with an accuracy."""
    batches, pruned = sorted({b for b, _, _ in accuracy}), sorted({p for _, p, _ in accuracy if p})
    found = []
    for job in barley_runs.grid(args, "stand-in", batches, pruned).jobs:
        key = int(job.settings["batch"]), job.settings["activations"], int(job.settings["seed"])
        if key in accuracy:
            log = [{"epoch": str(i + 1), "top1": str(accuracy[key]), "train_loss": str(2.0 - i / 10 + key[2])} for i in range(args.epochs)]
            found.append(sweep_results.Ended(job, {}, log, None))
    return found


def test_published():
    table = [(int(r["mini_batch"]), int(r["dense_top1"]), int(r["sparse50_top1"])) for r in side_by_side.published("barley_table_4")]
    assert table == [(16, 82, 82), (32, 89, 89), (64, 91, 90), (128, 90, 90)]
    assert barley_figure_8.claims() == {"orange down to": 1.5, "seeds of dense differ by": 1, "viable to at least": 70, "viable to at most": 80}


def test_the_grids_are_commands_of_train():
    args = arguments(barley_table_4)
    assert (args.data, args.epochs, args.seeds, args.batches) == ("cifar10", 20, [0, 1], [16, 32, 64, 128])
    jobs = barley_runs.grid(args, "t", args.batches, [args.activations]).jobs
    runs = [job.namespace() for job in jobs]
    assert sorted((r.batch, r.activations or "", r.seed) for r in runs) == [(b, p, s) for b in (16, 32, 64, 128) for p in ("", "0.5:16") for s in (0, 1)]
    assert {(r.model, r.epochs, r.mix_prob, r.opt, r.lr, preset_of(r)) for r in runs} == {("cifar", 20, 0.0, "adamw", 0.005, "cifar")}
    assert all(not job.config.items for job in jobs), "no weight is masked"
    args = arguments(barley_figure_8)
    assert len(barley_runs.grid(args, "t", [args.batch], [f"{s:g}:{b}" for b in args.blocks for s in args.sparsities]).jobs) == 2 * (1 + 5 * 9)
    args = arguments(barley_table_4, "--data", "folder", "--model", "s12", "--root", "x")
    run = barley_runs.grid(args, "t", [16], ["0.5:16"]).jobs[0].namespace()
    assert preset_of(run) == "s12" and barley_runs.shape(args).image == 224


def test_table_4_of_runs_that_have_ended():
    args = arguments(barley_table_4, "--data", "digits", "--epochs", "3")
    pruned = "0.5:16"
    ended = {(16, "", 0): 90.0, (16, "", 1): 92.0, (16, pruned, 0): 89.0, (16, pruned, 1): 91.0, (32, "", 0): 90.0, (32, pruned, 1): 95.0, (64, "", 1): 80.0}
    ended |= {(64, pruned, 1): 78.9, (128, pruned, 0): 50.0}
    found = barley_runs.cells(stand_ins(args, ended))
    rows = {r["mini_batch"]: r for r in barley_table_4.table(found, args)}
    assert [rows[16][c] for c in ("ours_dense", "ours_pruned", "ours_difference", "dense_seeds_differ_by", "seeds", "status")] == [
        "91.00", "90.00", "-1.00", "2.00", 2, "within",
    ]  # fmt: skip
    assert (rows[32]["ours_difference"], rows[32]["status"], rows[32]["seeds"]) == ("", "", 0), "no seed in common: nothing to compare"
    assert (rows[64]["ours_difference"], rows[64]["status"]) == ("-1.10", "below")
    assert (rows[128]["ours_dense"], rows[128]["ours_pruned"], rows[128]["status"]) == ("", "50.00", "")
    assert [rows[b]["published_difference"] for b in (16, 32, 64, 128)] == ["+0", "+0", "-1", "+0"]
    curves = barley_table_4.curves(found)
    assert [(r["epoch"], r["train_loss"], r["seeds"]) for r in curves if (r["mini_batch"], r["activations"]) == (16, "dense")] == [
        ("1", "2.5000", 2), ("2", "2.4000", 2), ("3", "2.3000", 2),
    ]  # fmt: skip
    pytest.importorskip("matplotlib")
    panels = barley_table_4.figure(curves, args).axes
    assert [p.get_title() for p in panels] == [f"mini-batch {b}" for b in (16, 32, 64, 128)]
    assert list(panels[2].lines[1].get_ydata()) == [3.0, 2.9, 2.8]


@pytest.mark.parametrize(("difference", "colour"), [(0.0, "green"), (2.0, "green"), (-1e-9, "green"), (-0.01, "orange"), (-1.5, "orange"), (-1.51, "red")])
def test_the_rule_of_the_colours(difference, colour):
    assert barley_figure_8.colour(difference) == colour


def test_figure_8_of_runs_that_have_ended():
    args = arguments(barley_figure_8, "--data", "digits", "--blocks", "8", "16", "--sparsities", "0.3", "0.5", "0.7", "--batch", "64")
    ended = {(64, "", 0): 90.0, (64, "", 1): 92.0, (64, "0.3:8", 0): 91.0, (64, "0.3:8", 1): 91.0, (64, "0.5:8", 0): 85.0, (64, "0.7:8", 0): 90.0}
    ended |= {(64, "0.3:16", 1): 91.5, (64, "0.5:16", 1): 90.5}
    rows = barley_figure_8.rows_of(barley_runs.cells(stand_ins(args, ended)), args)
    assert [(r["block"], r["sparsity"], r["difference"], r["colour"]) for r in rows] == [
        (8, "0.3", "+0.00", "green"), (8, "0.5", "-5.00", "red"), (8, "0.7", "+0.00", "green"),
        (16, "0.3", "-0.50", "orange"), (16, "0.5", "-1.50", "orange"), (16, "0.7", "", ""),
    ]  # fmt: skip
    assert [barley_figure_8.viable(rows, b) for b in (8, 16, 32)] == [0.3, 0.5, None]
    pytest.importorskip("matplotlib")
    axes = barley_figure_8.figure(rows, "title").axes[0]
    assert axes.images[0].get_array().tolist() == [[0, 2, 0], [1, 1, None]]
    assert [t.get_text() for t in axes.get_xticklabels()] == ["30%", "50%", "70%"]
    assert [t.get_text() for t in axes.texts] == ["91.0", "85.0", "90.0", "91.5", "90.5"]


def test_the_highest_sparsity_without_red_in_whatever_order_they_are_given(tmp_path, capsys):
    args = arguments(barley_figure_8, "--data", "digits", "--blocks", "8", "16", "--sparsities", "0.9", "0.125", "--seeds", "0")
    ended = stand_ins(args, {(32, p, 0): 90.0 for p in ("", "0.125:8", "0.9:8", "0.125:16")})
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(barley_figure_8, "train_all", lambda *_: (ended, 5, 0))
        assert barley_figure_8.main(["--data", "digits", "--blocks", "8", "16", "--sparsities", "0.9", "0.125", "--seeds", "0", "--out", str(tmp_path)]) == 0
    said = capsys.readouterr().out
    assert "from 1x16 on): 1x8 90%, 1x16 12.5%" in said and ["block", "12.5%", "90%"] in [line.split() for line in said.splitlines()]


@pytest.mark.parametrize("pruned", ["0.5:16", "0.9:4", "0.3:32"])
def test_what_is_saved_is_what_the_formula_says(pruned):
    """Kept blocks and 16-bit numbers instead of the dense inputs, and nothing else changes."""
    args = arguments(barley_table_4, "--data", "digits")
    config = barley_runs.shape(args)
    whole, kept = barley_runs.formula_mib(config, 64, pruned)
    measured = 64 * (barley_runs.held_bytes(config, barley_runs.DENSE) - barley_runs.held_bytes(config, pruned)) / 2**20
    assert whole - kept == pytest.approx(measured, abs=1e-12) and 0 < kept < whole
    args.batches, args.activations = [64], pruned
    (row,) = barley_table_4.table({}, args)
    assert float(row["of_held_pct"]) == pytest.approx(100 * measured * 2**20 / 64 / barley_runs.held_bytes(config, barley_runs.DENSE), abs=0.06)
    assert whole == 64 * 2 * 64 * (32 + 32 + 128) * 4 / 2**20  # two blocks of three linears, 64 tokens


def test_a_row_s_command_makes_the_same_runs():
    for script, more in ((barley_table_4, ["--batches", "16", "64"]), (barley_figure_8, ["--blocks", "8", "--sparsities", "0.25", "0.5"])):
        args = arguments(script, "--data", "digits", "--seeds", "3", "4", "--lr", "0.1", "--threads", "2", "--jobs", "2", *more)
        own = {"batches": args.batches, "activations": args.activations} if script is barley_table_4 else {"blocks": args.blocks, "batch": args.batch}
        own |= {} if script is barley_table_4 else {"sparsities": args.sparsities}
        again = arguments(script, *shlex.split(barley_runs.command(args, script.NAME, **own))[2:])
        assert {**vars(again), "jobs": 2} == vars(args)


def test_wrong_use(tmp_path, capsys):
    for words, text in (
        (["--data", "digits", "--activations", "0.5:5"], "expected a divisor of the 32 features, got 5"),
        (["--data", "digits", "--activations", "half"], "pruned inputs: expected RATIO:BLOCK such as 0.5:16, got 'half'"),
        (["--data", "digits", "--seeds", "1", "1"], "--seed: expected each value once, got '1' twice."),
        (["--runs", str(tmp_path)], "--root: expected the folder of the images of cifar10, got none."),
    ):
        assert barley_table_4.main(words) == 2
        assert text in capsys.readouterr().err
    for option in ("--jobs", "--epochs", "--batches"):
        with pytest.raises(SystemExit):
            barley_table_4.main(["--data", "digits", option, "0"])
        assert f"{option}: expected at least 1, got 0" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        barley_table_4.main(["--data", "cifar10", "--model", "s12"])
    assert "--model: expected cifar with --data cifar10, got s12; images of 224 pixels for s12 come from --data folder" in capsys.readouterr().err


def test_a_table_from_training_to_csv(tmp_path, capsys):
    """Trained once, then read: what has ended is not trained again, and other settings are refused."""
    command = [*DIGITS, "--batches", "256", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]
    assert barley_table_4.main([*command, "--table"]) == 0
    assert "0 of 2 runs have ended" in capsys.readouterr().out and not (tmp_path / "out").exists()
    assert barley_table_4.main(command) == 0
    assert "2 of 2 runs have ended" in capsys.readouterr().out
    (row,) = plots.read_csv(tmp_path / "out" / "barley_table_4_digits.csv")
    assert row["published_dense"] == "" and 5 < float(row["ours_dense"]) < 100 and row["formula_saved_mib"] == row["ours_saved_mib"] and row["epochs"] == "1"
    assert len(plots.read_csv(tmp_path / "out" / "barley_figure_7_digits.csv")) == 2
    logs = {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("log.csv")}
    assert len(logs) == 2 and barley_table_4.main(command) == 0
    assert logs == {path: path.stat().st_mtime_ns for path in (tmp_path / "runs").rglob("log.csv")}
    assert barley_table_4.main([*command, "--lr", "0.1"]) == 2
    assert "expected a run with lr 0.1, as this command says, got one with lr 0.005.\n  fix: another --runs" in capsys.readouterr().err


@pytest.mark.slow
def test_a_killed_figure_8_goes_on_and_loses_nothing(tmp_path):
    tables = []
    for kill in (False, True):
        out = tmp_path / f"out{kill}"
        command = [sys.executable, str(ROOT / "examples/thesis/barley_figure_8.py"), *DIGITS, "--epochs", "3", "--blocks", "16", "--sparsities", "0.5", "0.9"]
        command += ["--at-once", "1", "--runs", str(tmp_path / f"runs{kill}"), "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if kill:
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            deadline = time.time() + 240
            while len(list((tmp_path / "runsTrue").rglob("log.csv"))) < 2 and process.poll() is None and time.time() < deadline:
                time.sleep(0.05)
            assert process.poll() is None, "killed in the middle"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            before = {p: p.read_text() for p in (tmp_path / "runsTrue").rglob("log.csv")}
        subprocess.run(command, env=environment, check=True)
        if kill:
            first = next(text for text in before.values() if len(text.splitlines()) == 4)
            assert first in [p.read_text() for p in before], "a run that had ended was not trained again"
        tables.append(plots.read_csv(out / "barley_figure_8_digits.csv"))
    assert tables[0] == tables[1] and [r["colour"] in barley_figure_8.COLOURS for r in tables[0]] == [True, True]


def test_figure_8b_of_a_folder_with_more_classes(tmp_path, capsys):
    """Images of 12 classes in the place of CIFAR-100: the head has as many, and the csv says what ran."""
    image = pytest.importorskip("PIL.Image")
    for part, n in (("train", 2), ("test", 1)):
        for label in range(12):
            folder = tmp_path / "images" / part / f"class{label:02}"
            folder.mkdir(parents=True)
            for i in range(n):
                image.new("RGB", (32, 32), (20 * label, 255 - 20 * label, 100 * i)).save(folder / f"{i}.png")
    command = ["--data", "folder", "--root", str(tmp_path / "images"), "--epochs", "1", "--seeds", "0", "--batch", "8", "--blocks", "16", "--sparsities", "0.5"]
    assert barley_figure_8.main([*command, "--at-once", "2", "--runs", str(tmp_path / "runs"), "--out", str(tmp_path / "out")]) == 0
    assert "2 of 2 runs have ended; of 1 cells" in capsys.readouterr().out
    (row,) = plots.read_csv(tmp_path / "out" / "barley_figure_8_folder.csv")
    assert row["formula_saved_mib"] == row["ours_saved_mib"] and row["model"] == "cifar" and "--root DIR" in row["command"]
    weights = torch.load(next((tmp_path / "runs").rglob("checkpoint.pt")), weights_only=True)["model"]
    assert weights["head.weight"].shape == (12, 64)
