"""Words, or nothing, where a csv of the examples has numbers: one line that names the file, the column and the value, and 2; nothing is written."""

from __future__ import annotations

import csv
import json
from contextlib import nullcontext
from pathlib import Path

import plots
import pytest
from benchmarks import advice, train_step
from sparsedrop import figure_3, table_1
from thesis import accuracy, combination, csv_files, gaps, isoflop, memory_movement, run_folder, stability
from tracking import CsvLog, keep_epochs

from fxmask.errors import ConfigError

RESULTS = Path(plots.__file__).parent / "results"
RUNS = RESULTS / "cifar10_accuracy.csv"
CASES = [
    *((gaps, ["--csv"], RUNS, column) for column in ("test_top1", "held_top1", "train_tflop")),
    *((isoflop, ["plot", "--out", "x.png", "--csv"], RUNS, column) for column in ("test_top1", "train_tflop")),
    (isoflop, ["plot", "--out", "x.png", "--times"], RESULTS / "cifar10_isoflop_time.csv", "step_ms"),
    (combination, ["--csv"], RUNS, "test_top1"),
    (accuracy, ["table", "--runs", ".", "--csv"], RUNS, "seed"),
    (stability, ["--models", "mlp512", "--modes", "dense", "--csv"], RESULTS / "stability.csv", "spike"),
    (table_1, ["--size", "small", "--tasks", "digits", "--csv"], RESULTS / "sparsedrop" / "table_1.csv", "val_loss"),
    *((figure_3, [], RESULTS / "cpu" / "block_dropout.csv", column) for column in ("p", "ms", "gflops_dense_equivalent")),
    *((train_step, ["--plot"], RESULTS / "epyc" / "train_step.csv", column) for column in ("ms_p50", "ratio", "x_dense")),
    *((advice, ["--csv"], RESULTS / "epyc" / "train_step.csv", column) for column in ("ms_p50", "ratio")),
]


WRONG = [(case, "many") for case in CASES] + [(case, "0") for case in CASES if case[-1] in ("train_tflop", "step_ms")]


@pytest.mark.parametrize(("case", "value"), WRONG, ids=[f"{case[0].__name__} {case[-1]} {value}" for case, value in WRONG])
def test_a_word_for_a_number_or_no_cost(case, value, capsys, monkeypatch, tmp_path):
    script, args, source, column = case
    monkeypatch.chdir(tmp_path)
    rows, path = plots.read_csv(source), Path("t.csv")
    for row in rows:
        row[column] = value
    with path.open("w", newline="") as file:
        table = csv.DictWriter(file, list(rows[0]))
        table.writeheader()
        table.writerows(rows)
    before = path.read_bytes()
    try:
        code = script.main([*args, "t.csv"])
    except SystemExit as end:
        code = end.code
    assert code == 2 and f"for {column} in each row, got '{value}'" in capsys.readouterr().err
    assert path.read_bytes() == before and {p.name for p in tmp_path.iterdir()} <= {"t.csv", "t.csv.lock"}


@pytest.mark.parametrize("row", ["32x32,0.8,masked,many", "32x32,0.8"])
def test_accuracies_that_are_none(row, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(memory_movement, "cells", lambda: pytest.fail("began"))
    (tmp_path / "t.csv").write_text(f"block,ratio,mode,top1\n{row}\n")
    assert memory_movement.main(["--accuracy", str(tmp_path / "t.csv")]) == 2 and "t.csv: expected" in capsys.readouterr().err


LOG = "epoch,top1,train_loss\n1,50,2.0\n"
BLOCKS = "epoch,layer,block_row,block_col,active_steps\n"


@pytest.mark.parametrize(
    ("log", "blocks", "words"),
    [
        (LOG + "2,much,1.0\n", "", "log.csv: expected a number for top1 in each row, got 'much'"),
        (LOG + "two,50,1.0\n", "", "log.csv: expected a whole number for epoch in each row, got 'two'"),
        (LOG, BLOCKS + "1,XPatch,0,b,3\n", "active_blocks.csv: expected a whole number for block_col in each row, got 'b'"),
        (LOG, BLOCKS + "1,XPatch,0,0,3\n1,XPatch,1,1,3\n", "expected 2x2 blocks of XPatch after epoch 1, got fewer"),
        (LOG, BLOCKS + "1,XPatch,0,0,3\n1,XChannel1,0,0,3\n2,XPatch,0,0,3\n", "expected 1x1 blocks of XChannel1 after epoch 2, got fewer"),
    ],
)
def test_figures_of_spoilt_rows(log, blocks, words, tmp_path):
    (tmp_path / "log.csv").write_text(log)
    (tmp_path / "active_blocks.csv").write_text(blocks)
    with pytest.raises(ConfigError, match=words):
        plots.plot_run(tmp_path)


def test_what_is_kept_of_a_log_that_goes_on(tmp_path):
    path = tmp_path / "log.csv"
    path.write_text("epoch,top1\n1,50\n2,60\n3")
    keep_epochs(path, 1)
    assert path.read_text().split() == ["epoch,top1", "1,50"]
    path.write_text("epoch,top1\n1,50\n2")
    keep_epochs(path, 2)
    assert path.read_text().split() == ["epoch,top1", "1,50"]
    for text, words in (("a,b\n1,2\n", "got none of epoch"), ("epoch,b\none,2\n", "got 'one'"), ("\udcff", "expected a csv")):
        path.write_text(text, errors="surrogateescape")
        with pytest.raises(ConfigError, match=words):
            keep_epochs(path, 1)
    path.write_text("")
    keep_epochs(path, 1)
    keep_epochs(tmp_path / "none.csv", 1)
    assert path.read_text() == "" and [p.name for p in tmp_path.iterdir()] == ["log.csv"]
    CsvLog(path, ("epoch", "top1"), append=True).write({"epoch": 1, "top1": 50})
    assert path.read_text().split() == ["epoch,top1", "1,50"]


FACTS = {"epochs": 1, "data": "digits", "dense": True, "holdout": 0, "threads": 1, "torch": "2"}


@pytest.mark.parametrize(
    ("facts", "log", "words"),
    [
        ({"epochs": 1, "ratio": 0.5}, "epoch\n1\n", "run.json: expected what thesis/train.py writes, got no data"),
        ({**FACTS, "epochs": "1"}, "epoch\n1\n", "run.json: expected what thesis/train.py writes, got epochs that are no number"),
        (FACTS, "epoch,top1\n1,much\n", "log.csv: expected a number for top1 in each row, got 'much'"),
        (FACTS, "epoch,top1\n1\n", "log.csv: expected a number for top1 in each row, got None"),
    ],
)
def test_a_table_of_spoilt_runs(facts, log, words, capsys, tmp_path):
    folder = tmp_path / "final" / "dense-muon-seed0"
    folder.mkdir(parents=True)
    (tmp_path / "final" / "dense-muon-seedling").mkdir()  # none of a run
    (folder / "run.json").write_text(json.dumps(facts))
    (folder / "log.csv").write_text(log)
    assert accuracy.main(["table", "--runs", str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 2 and words in capsys.readouterr().err
    (folder / "test.json").write_text('{"top1": "much"}')
    with pytest.raises(ConfigError, match=r"test\.json: expected a number for top1"):
        run_folder.test_of(folder)


@pytest.mark.parametrize("loss", ["nan", "inf", "-inf"])
def test_the_log_of_a_run_that_diverged_is_read(loss, tmp_path):
    (tmp_path / "log.csv").write_text(f"epoch,train_loss,top1\n1,{loss},10.0\n")
    assert run_folder.log_of(tmp_path) == [{"epoch": "1", "train_loss": loss, "top1": "10.0"}]
    with pytest.raises(ConfigError, match=f"expected a number above 0 for train_loss in each row, got '{loss}'") if loss != "inf" else nullcontext():
        csv_files.numbers(tmp_path / "log.csv", run_folder.log_of(tmp_path), "train_loss", above=0)


@pytest.mark.parametrize("last", [0, 1])
@pytest.mark.parametrize("cut", ["1,2", "1,2,3,4"])
def test_a_cut_off_row_goes_where_it_is_the_only_one(cut, last, tmp_path):
    (tmp_path / "log.csv").write_text(f"epoch,a,b\n{cut}")
    keep_epochs(tmp_path / "log.csv", last)
    assert (tmp_path / "log.csv").read_text() == "epoch,a,b\n"


def test_a_log_that_was_killed_before_its_columns_gets_them(tmp_path):
    (tmp_path / "log.csv").touch()
    for _ in range(2):
        CsvLog(tmp_path / "log.csv", ("epoch", "a"), append=True)
    assert (tmp_path / "log.csv").read_text() == "epoch,a\n"
