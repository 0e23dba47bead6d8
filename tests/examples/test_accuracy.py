"""The comparisons of recipes: what a recipe promises, what becomes of runs that were stopped, verdicts of accuracy at equal cost, spikes of a loss."""

from __future__ import annotations

import csv
import json
import math
import os
import shlex
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from pathlib import Path

import plots
import pytest
import torch
import train as common
from thesis import accuracy, accuracy_table, checkpoint, combination, hidden_groups, lock, masked_model, recipes, stability
from thesis import train as program
from thesis.recipe import CIFAR10
from thesis.train_run import HOW_RUN, LATER

import fxmask

ROOT = Path(__file__).parents[2]
DIGITS = ["--data", "digits", "--holdout", "200", "--epochs", "1", "--seeds", "0"]
EVERY = {**recipes.SEARCH, **recipes.FINAL, **recipes.ISOFLOP}


@pytest.mark.parametrize("name", list(EVERY))
def test_every_recipe_is_a_command_and_ends_its_ramp_in_time(name):
    args = program.arguments(["--data", "cifar10", "--epochs", "20", *recipes.COMMON, *recipes.arguments_of(name, 20)])
    batch = int(name.rpartition("-batch")[2]) if "-batch" in name else 128
    assert (args.epochs, args.batch, args.mix_prob) == (20, batch, 0)
    assert args.dense == (args.config is None) == name.startswith("dense")
    schedule, start = common.schedule(args.schedule, 352), round(args.masks_from * 352)
    assert (start <= 10 * 352) if schedule is None else schedule.ratio_at(10 * 352 - start, 0.8) == 0.8, "the final ratio holds for the last half of the steps"
    regrow = masked_model.regrow(args.regrow, 352)
    assert regrow is None or regrow.until <= 20 * 352


@pytest.mark.parametrize("name", list(recipes.THESIS))
def test_recipes_of_the_thesis_length_are_its_table(name):
    args, table = (program.arguments([*words, "--data", "cifar10"]) for words in ([*recipes.COMMON, *recipes.arguments_of(name, 200)], []))
    ours = {"opt", "masks_from"} if "-b32-" in name else {"opt"} if name == "thesis-dense-adamw" else set()
    ours |= {"opt", "weight_decay"} if "-muon" in name else set()
    ours |= {"masks_from"} if args.dense else set()
    assert {key for key in asdict(CIFAR10) if getattr(args, key) != getattr(table, key)} == ours
    assert name.startswith("thesis-b32-") == (args.schedule == "cubic:100ep")
    assert args.guard == ("freeze" if "-b32-" in name else "free" if args.config else "auto")
    assert (args.teacher is not None) == name.endswith("-taught") and args.weight_decay == (0.1 if "-muon" in name else 1e-4)


@pytest.mark.slow
def test_runs_in_turns_as_graphs(tmp_path, capsys):
    """In one process, a row each; again nothing is run; without --graphs they are other runs."""
    command = ["thesis", *DIGITS, "--epochs", "1", "--only", "thesis-dense", "thesis-b32-80", "--runs", str(tmp_path), "--csv", str(tmp_path / "a.csv")]
    turns = ["--in-turns", "2", "--at-once", "1", "--graphs"]
    for times in (1, 2):
        assert accuracy.main([*command, *turns]) == 0
        table = plots.read_csv(tmp_path / "a.csv")
        assert [(row["phase"], row["run"], row["epochs"]) for row in table] == [("thesis", "thesis-dense", "1"), ("thesis", "thesis-b32-80", "1")]
        assert all("--graphs" in row["command"] and float(row["test_top1"]) > 5 for row in table)
        assert capsys.readouterr().out.count(": ended") == (2 if times == 1 else 0)
    assert accuracy.main(command) == 2
    assert "expected a run with graphs False, as the command and the recipe say, got one with graphs True" in capsys.readouterr().err


def finished(folder: Path, epochs: int = 2, rows: int = 2, **facts) -> None:
    folder.mkdir(parents=True)
    header = ",".join(program.COLUMNS)
    row = ",".join(str(i) for i, _ in enumerate(program.COLUMNS))
    (folder / "log.csv").write_text("\n".join([header, *[row] * rows]) + "\n")
    known = {"epochs": epochs, "dense": True, "data": "digits", "threads": 1, "torch": "2", "holdout": 200}
    (folder / "run.json").write_text(json.dumps({**known, **facts}))


def test_only_runs_that_have_ended_are_in_the_table(tmp_path):
    runs, table = tmp_path / "runs", tmp_path / "t.csv"
    finished(runs / "search" / "dense-adam-seed0")
    finished(runs / "search" / "b16-cubic-seed0", rows=1)
    (runs / "search" / "b32-cubic-seed0").mkdir()
    finished(runs / "isoflop" / "dense-d32-seed1")  # its test images were not read
    assert accuracy_table.write(runs, table) == 1
    assert [(r["run"], r["seed"], r["test_top1"]) for r in plots.read_csv(table)] == [("dense-adam", "0", "")]
    (runs / "isoflop" / "dense-d32-seed1" / "test.json").write_text('{"top1": 61.234, "top5": 90.0}')
    assert accuracy_table.write(runs, table) == 2 == accuracy_table.write(runs, table)
    assert plots.read_csv(table)[-1]["test_top1"] == "61.23"


def test_rows_of_other_machines_stay_in_the_table(tmp_path):
    table = tmp_path / "t.csv"
    finished(tmp_path / "here" / "search" / "dense-adam-seed0")
    finished(tmp_path / "there" / "search" / "dense-adam-seed1")
    finished(tmp_path / "there" / "search" / "dense-adamw-lr0.01-seed0")
    assert [accuracy_table.write(tmp_path / name, table) for name in ("here", "there", "here", "nowhere")] == [1, 3, 3, 3]
    assert [(r["run"], r["seed"]) for r in plots.read_csv(table)] == [("dense-adamw-lr0.01", "0"), ("dense-adam", "0"), ("dense-adam", "1")]


def test_two_that_write_the_table_lose_no_row(tmp_path, monkeypatch):
    """One comes while the other has read the table and not yet written it."""
    table, row_of, others = tmp_path / "t.csv", accuracy_table.row_of, []
    for name in ("here", "there"):
        finished(tmp_path / name / "search" / f"dense-adam-seed{len(name)}")

    def slow(*run):
        if not others:
            others.append(threading.Thread(target=accuracy_table.write, args=(tmp_path / "there", table)))
            others[0].start()
            others[0].join(0.3)
        return row_of(*run)

    monkeypatch.setattr(accuracy_table, "row_of", slow)
    accuracy_table.write(tmp_path / "here", table)
    others[0].join()
    assert [r["seed"] for r in plots.read_csv(table)] == ["4", "5"]


def test_a_table_whose_writing_is_stopped_is_as_it_was(tmp_path, monkeypatch):
    table = tmp_path / "t.csv"
    finished(tmp_path / "here" / "search" / "dense-adam-seed0")
    finished(tmp_path / "there" / "search" / "dense-adam-seed1")
    accuracy_table.write(tmp_path / "here", table)
    before = table.read_bytes()

    def stopped(self, rows):
        raise KeyboardInterrupt

    monkeypatch.setattr(csv.DictWriter, "writerows", stopped)
    with pytest.raises(KeyboardInterrupt):
        accuracy_table.write(tmp_path / "there", table)
    assert table.read_bytes() == before and not list(tmp_path.glob(".*"))


def recorded(runs: Path, phase: str, name: str, *options: str, lacks: tuple[str, ...] = ()) -> list[str]:
    """A run of seed 0 that has ended, with the record that train.py leaves but for options that it did not have; the command that asks for it."""
    asked = ["--data", "digits", "--epochs", "2", "--holdout", "200"]
    words = [*asked, *recipes.COMMON, *recipes.arguments_of(name, 2, 0, runs), *options, "--read-test"]
    out = runs / phase / f"{name}-seed0"
    facts = json.loads(json.dumps(vars(program.arguments([*words, "--out", str(out)])), default=str))
    finished(out, **{k: v for k, v in facts.items() if k not in lacks})
    (out / "test.json").write_text('{"top1": 61.234, "top5": 90.0}')
    return [phase, *asked, "--seeds", "0", "--runs", str(runs), "--only", name]


@pytest.fixture
def begun(monkeypatch):
    """The runs that are started, none of which trains."""
    started = []
    monkeypatch.setattr(accuracy.sweep_local.subprocess, "run", lambda words, **_: started.append(words) or subprocess.CompletedProcess(words, 0))
    return started


@pytest.mark.parametrize(
    ("options", "wanted", "got"),
    [
        (["--epochs", "34"], "epochs 34", "epochs 2"),
        (["--holdout", "100"], "holdout 100", "holdout 200"),
        (["--data", "cifar10"], "data 'cifar10'", "data 'digits'"),
        (["--data", "cifar10", "--holdout", "0"], "data 'cifar10', holdout 0", "data 'digits', holdout 200"),
    ],
)
def test_a_run_of_other_settings_is_not_taken_for_what_is_asked(options, wanted, got, tmp_path, begun, capsys):
    command = [*recorded(tmp_path / "runs", "final", "dense-muon"), "--csv", str(tmp_path / "t.csv")]
    assert accuracy.main(command) == 0 and not begun
    before = (tmp_path / "t.csv").read_bytes()
    capsys.readouterr()
    assert accuracy.main([*command, *options, "--only", "dense-adamw-lr0.01", "dense-muon"]) == 2
    folder = tmp_path / "runs" / "final" / "dense-muon-seed0"
    said = f"{folder}: expected a run with {wanted}, as the command and the recipe say, got one with {got}.\n  fix: another --runs folder.\n"
    assert capsys.readouterr().err == f"thesis/accuracy.py: {said}"
    assert not begun and (tmp_path / "t.csv").read_bytes() == before


@pytest.mark.parametrize(("phase", "name"), [(phase, name) for phase, (names, _, _) in accuracy_table.PHASES.items() for name in names])
def test_runs_of_older_days_and_of_moved_folders_are_the_same(phase, name, tmp_path, begun):
    args = program.arguments([*recipes.COMMON, *recipes.arguments_of(name, 2)])
    command = recorded(tmp_path / "before", phase, name, lacks=tuple(k for k, v in LATER.items() if getattr(args, k) == v))
    (tmp_path / "before").rename(tmp_path / "runs")  # its pupils name their teachers' old folder
    assert accuracy.main([*command, "--runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv")]) == 0 and not begun
    (row,) = plots.read_csv(tmp_path / "t.csv")
    assert row["command"].endswith(shlex.join(["--epochs", "2", "--seed", "0", *recipes.COMMON, *recipes.arguments_of(name, 2)]))


def test_a_recipe_that_has_changed_since_its_run(tmp_path, begun, capsys, monkeypatch):
    """The row is that of the run, and the new recipe is not said to have run."""
    name, runs, table = "b32-tokens-whole-taylor", tmp_path / "runs", tmp_path / "t.csv"
    old = ("--config", "ResMLP5 @ XChannel = masked 0.1 (2, 2);", "--opt", "adam", "--cover", "--lr", "0.5")
    now = recipes.FINAL[name]
    monkeypatch.setitem(recipes.FINAL, name, old)
    command = [*recorded(runs, "final", name), "--csv", str(table)]
    monkeypatch.setitem(recipes.FINAL, name, now)
    assert accuracy.main(["table", "--runs", str(runs), "--csv", str(table)]) == 0
    (row,) = plots.read_csv(table)
    assert (row["target_ratio"], row["block"]) == ("0.1", "2x2")
    ran = vars(program.arguments(shlex.split(row["command"])[2:]))
    facts = json.loads((runs / "final" / f"{name}-seed0" / "run.json").read_text())
    assert all(ran[k] == facts[k] for k in ran if k not in (*HOW_RUN, "read_test"))
    assert accuracy.main(command) == 2 and not begun
    assert "expected a run with opt 'adamw', lr 0.01, config 'ResMLP5 @ XChannel1 = masked" in capsys.readouterr().err


def test_files_that_are_half_written_are_of_no_ended_run(tmp_path):
    recorded(tmp_path, "final", "dense-muon")
    out = tmp_path / "final" / "dense-muon-seed0"
    for name in ("run.json", "log.csv", "test.json"):
        assert accuracy_table.row_of("final", "dense-muon", 0, out)
        whole = (out / name).read_text()
        (out / name).write_text(whole[:-3])
        assert accuracy_table.row_of("final", "dense-muon", 0, out) is None
        (out / name).write_text(whole)


def test_the_search_never_reads_the_test_images(tmp_path, capsys):
    command = ["search", *DIGITS, "--runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv"), "--only", "dense-adam"]
    assert accuracy.main(command) == 0
    out = tmp_path / "runs" / "search" / "dense-adam-seed0"
    assert not (out / "test.json").exists() and "test images" not in (out / "output.txt").read_text()
    (row,) = plots.read_csv(tmp_path / "t.csv")
    assert row["test_top1"] == "" and float(row["held_top1"]) > 5
    before = (out / "log.csv").stat().st_mtime_ns
    assert accuracy.main(command) == 0
    assert (out / "log.csv").stat().st_mtime_ns == before, "what has ended is not run again"
    with pytest.raises(SystemExit):
        accuracy.main([*command, "--only", "densse"])
    assert "expected names among" in capsys.readouterr().err


def test_what_is_interrupted_begins_no_other_run(tmp_path, monkeypatch, capsys):
    begun = []

    def stopped(command, **more):
        begun.append(command)
        if len(begun) == 1:
            raise KeyboardInterrupt
        time.sleep(0.5)  # the one that a free worker has begun before anybody knew
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(accuracy.sweep_local.subprocess, "run", stopped)
    assert accuracy.main(["final", *DIGITS, "--runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv"), "--at-once", "1"]) == 130
    assert len(begun) <= 2 and "stopped; the same command goes on" in capsys.readouterr().err


def test_a_run_that_a_killed_comparison_left_training_is_waited_for(tmp_path, begun, monkeypatch):
    command = [*recorded(tmp_path, "final", "dense-muon"), "--csv", str(tmp_path / "t.csv")]
    test = (tmp_path / "final" / "dense-muon-seed0" / "test.json").rename(tmp_path / "test.json")
    monkeypatch.setattr(lock, "wait_until_free", lambda folder, **_: bool(test.rename(folder / "test.json")))
    assert accuracy.main(command) == 0 and not begun


@pytest.mark.slow
def test_a_killed_comparison_goes_on_and_counts_nothing_twice(tmp_path):
    tables = []
    for kill in (False, True):
        runs, table = tmp_path / f"runs{kill}", tmp_path / f"{kill}.csv"
        command = [sys.executable, str(ROOT / "examples/thesis/accuracy.py"), "isoflop", *DIGITS, "--runs", str(runs), "--csv", str(table)]
        command += ["--only", "dense-d32", "d128-b16-75-static", "--at-once", "1"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        if kill:
            process = subprocess.Popen(command, env=environment, start_new_session=True)
            while not (runs / "isoflop" / "d128-b16-75-static-seed0" / "run.json").exists() and process.poll() is None:
                time.sleep(0.05)
            assert process.poll() is None and plots.read_csv(table), "killed while the second one trains"
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        subprocess.run(command, env=environment, check=True)
        tables.append([{k: v for k, v in r.items() if k != "train_seconds"} for r in plots.read_csv(table)])
    assert tables[0] == tables[1] and len(tables[0]) == 2


def test_hidden_groups_of_masks(tmp_path, capsys):
    fc1 = torch.tensor([[1, 1], [0, 1], [0, 0], [0, 0]]).bool()  # of four groups the first is alive
    fc2 = torch.tensor([[1, 0, 1, 0], [0, 0, 1, 0]]).bool()
    assert hidden_groups.groups_of(fc1, fc2) == {"groups": 4, "alive": 1, "gone": 1, "half": 2, "kept": 6, "wasted": 3}
    masks = {"blocks.0.fc1.weight": {"mask": fc1}, "blocks.0.fc2.weight": {"mask": fc2}, "blocks.0.patch_mix.weight": {"mask": fc1}}
    parts = {**dict.fromkeys(checkpoint.PARTS, 0), "settings": {"epochs": 2}}
    states = {"masked": {"masks": masks}, "dense": None, "uncached": {"masks": {n: {"mask": None} for n in masks}}, "underway": {"masks": masks}}
    for name, state in states.items():
        finished(tmp_path / "runs" / "final" / f"{name}-seed0", rows=1 if name == "underway" else 2)
        checkpoint.save(tmp_path / "runs" / "final" / f"{name}-seed0", {**parts, "masks": state})
    assert hidden_groups.main(["--runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv")]) == 0
    assert [(r["run"], r["layer"], r["wasted"]) for r in plots.read_csv(tmp_path / "t.csv")] == [("masked-seed0", "blocks.0", "3")]
    assert "50.0" in capsys.readouterr().out  # percent of the blocks
    (tmp_path / "runs" / "final" / "masked-seed0").rename(tmp_path / "runs" / "final" / "another-seed0")
    assert hidden_groups.main(["--runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv")]) == 0
    assert [r["run"] for r in plots.read_csv(tmp_path / "t.csv")] == ["another-seed0", "masked-seed0"]  # the rows of other machines' runs stay
    assert hidden_groups.main(["--runs", str(tmp_path / "t.csv")]) == 2


def test_spikes():
    smooth = [2.3 * 0.98**i for i in range(100)]
    assert stability.spike(smooth) == (0.0, 0)
    height, at = stability.spike([*smooth[:50], *[5.0] * 10, *smooth[50:]])
    assert height == pytest.approx((5 - sum(smooth[40:50]) / 10) / math.log(10), rel=0.01) and at == 60
    assert stability.spike([*smooth, math.nan])[0] == math.inf


def test_stability_measures_what_it_says(tmp_path, capsys):
    table = tmp_path / "s.csv"
    command = ["--models", "mlp512", "--modes", "dense", "masked", "--steps", "25", "--csv", str(table)]
    assert stability.main(command) == 0
    first = plots.read_csv(table)
    assert [r["mode"] for r in first] == ["dense", "masked"] and all(float(r["last_loss"]) < float(r["first_loss"]) for r in first)
    assert first[0]["last_loss"] != first[1]["last_loss"], "masks are in force"
    assert stability.main(command) == 0 and plots.read_csv(table) == first, "what was measured is not measured again"
    assert "no spike above 0.5" in capsys.readouterr().out


def test_activations_are_pruned_with_and_without_masks():
    for more, masked in ((["--dense"], 0), ([], 3)):
        args = program.arguments(["--data", "digits", *more, "--activations", "0.5:8"])
        model = masked_model.build(args, "digits", 1, 10, 10)
        rows = fxmask.explain(model).rows
        inside = [r for r in rows if r["name"].startswith("blocks.0.")]
        assert [r["activations"] for r in inside] == ["50 % of 1x8"] * 3 and sum(r["masked"] for r in inside) == masked
        assert all(r["activations"] is None for r in rows if not r["name"].startswith("blocks."))
    assert masked_model.activations("0.25").block == 16 and masked_model.activations(None) is None


@pytest.mark.filterwarnings("ignore:allocation by:fxmask.FxMaskWarning")
def test_an_allocation_shares_out_the_one_ratio_of_a_configuration():
    common_ratio = {"blocks.*.a": {"ratio": 0.5, "block": (16, 16)}, "blocks.*.b": {"ratio": 0.5, "block": (16, 16)}}
    assert masked_model.shared(common_ratio) == {"blocks.*.a": {"block": (16, 16)}, "blocks.*.b": {"block": (16, 16)}}
    several = {**common_ratio, "blocks.*.b": {"ratio": 0.25, "block": (16, 16)}}
    assert masked_model.shared(several) == several
    args = program.arguments(["--data", "cifar10", "--epochs", "2", *recipes.COMMON, *recipes.arguments_of("b16-global-taylor", 2)])
    model = masked_model.build(args, "cifar", 3, 10, 4)
    fxmask.step(model, 8)
    kept = [int(m.sum()) / m.numel() for m in fxmask.masks(model).values()]
    sizes = [m.numel() for m in fxmask.masks(model).values()]
    assert len(set(kept)) > 3 and sum(k * n for k, n in zip(kept, sizes, strict=True)) == pytest.approx(sum(sizes) / 2, abs=1)


def test_the_table_of_both(tmp_path, capsys):
    """Accuracies are those of the csv, an empty cell where there is none; FLOP of both are the product of the shares, where they are of one layer."""
    path = tmp_path / "a.csv"
    known = ((combination.RUNS[0], 70.0), (combination.RUNS[0], 72.0), (combination.RUNS[2], 69.5))
    path.write_text("phase,run,test_top1\n" + "".join(f"final,{run},{top1}\n" for run, top1 in known))
    assert combination.main(["--csv", str(path), "--out", str(tmp_path / "out")]) == 0
    rows = plots.read_csv(tmp_path / "out" / "combination.csv")
    assert [r["run"] for r in rows] == list(combination.RUNS) and combination.RUNS[2] in capsys.readouterr().out
    assert [(r["top-1, %"], r["seeds"], r["below dense"]) for r in rows] == [("71", "2", "0"), ("", "0", ""), ("69.5", "1", "1.5"), ("", "0", "")]
    dense, pruned, masked, both = (float(r["GFLOP bwd_dw"]) for r in rows)
    assert dense > pruned > both and masked > both and both < 0.55 * masked
    assert rows[1]["MiB held"] == rows[3]["MiB held"] and float(rows[3]["of dense's FLOP, %"]) < float(rows[2]["of dense's FLOP, %"])
