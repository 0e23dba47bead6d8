"""How an example ends: a line and 2 for what is missing or refused, a line and 130 for Ctrl-C, silence where nobody reads on."""

import errno
import io
import os
import sys
from pathlib import Path

import pytest
import train
from benchmarks import train_step
from danhofer import choose, learned, tables_3_4
from sparsedrop import figure_3, figure_4
from thesis import (
    accuracy,
    accuracy_page,
    barley_table_3,
    barley_table_4,
    checkpoint,
    combination,
    flops,
    hidden_groups,
    many,
    side_by_side,
    stability,
    sweep,
    table_6_2,
)
from thesis import train as thesis_train


def test_ctrl_c_is_told_in_a_line(capsys, monkeypatch, tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    (tmp_path / "runs.json").write_text("[]")
    table = ["--models", "mlp512", "--modes", "dense", "--csv", str(tmp_path / "t.csv")]
    for module, name, args, words in (
        (stability, "losses_of", table, "stability.py: stopped; the same command goes on\n"),
        *((m, "cells", [], f"{m.__name__.removeprefix('thesis.')}.py: stopped\n") for m in (barley_table_3, flops, table_6_2)),
        (accuracy_page, "tables", [], "accuracy_page.py: stopped\n"),
        (many, "together", [str(tmp_path / "runs.json")], "thesis/many.py: stopped\n"),
        (many, "together", [str(tmp_path / "runs.json"), "--quiet"], ""),  # a sweep, which tells it itself
        (train, "write_run", ["--out", str(tmp_path / "a")], "train.py: stopped\n"),
        (thesis_train, "_turns", ["--out", str(tmp_path / "b")], "thesis/train.py: stopped; the same command goes on\n"),
    ):
        monkeypatch.setattr(module, name, stop)
        assert module.main(args) == 130 and capsys.readouterr().err == words


@pytest.mark.parametrize("buffer", [-1, 0])
def test_who_has_seen_enough_hears_nothing_more(buffer, capsys, monkeypatch):
    """As `gaps.py | head`: the rest of what is printed goes nowhere, at exit, too."""
    read, write = os.pipe()
    os.close(read)
    with io.TextIOWrapper(open(write, "wb", buffer), write_through=not buffer) as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        assert side_by_side.exit_code("a.py", lambda: print("more")) == 2
        pipe.flush()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("package", ["sklearn", "torchvision"])
def test_a_package_that_is_not_installed(package, capsys, monkeypatch, tmp_path):
    for name in [name for name in sys.modules if name == package or name.startswith(f"{package}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, package, None)
    module, args = {
        "sklearn": (stability, ["--models", "mlp512", "--modes", "dense", "--steps", "10", "--batch", "4", "--csv", str(tmp_path / "t.csv")]),
        "torchvision": (train_step, ["--model", "vit-b16", "--batch", "1", "--threads", "1", "--csv", str(tmp_path / "t.csv")]),
    }[package]
    if package == "torchvision":
        monkeypatch.setattr("torchvision_shim.find_spec", lambda name: None)
        monkeypatch.delitem(sys.modules, package)
    assert module.main(args) == 2 and "pip install" in capsys.readouterr().err


def test_a_pipe_that_breaks_elsewhere_is_told(capsys):
    def run():
        raise BrokenPipeError(32, "Broken pipe")  # to a worker, say

    assert side_by_side.exit_code("a.py", run) == 2 and capsys.readouterr().err == "a.py: [Errno 32] Broken pipe\n"


def test_damaged_checkpoints_of_runs_are_told(capsys, tmp_path):
    folder = tmp_path / "final" / "a-seed0"
    folder.mkdir(parents=True)
    (folder / checkpoint.LAST).write_bytes(b"PK\3\4")
    assert hidden_groups.main(["--runs", str(tmp_path), "--csv", str(tmp_path / "t.csv")]) == 2
    assert f"hidden_groups.py: no whole checkpoint in {folder}" in capsys.readouterr().err


@pytest.mark.parametrize(("module", "name"), [(learned, "danhofer_learned"), (choose, "danhofer_choice"), (tables_3_4, "danhofer_tables_3_4")])
def test_a_table_that_is_no_csv_is_refused_before_anything_is_learned(module, name, capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(module, "task_of", lambda *_: pytest.fail("began"))
    (tmp_path / f"{name}.csv").write_bytes(bytes(range(128, 256)))
    assert module.main(["--out", str(tmp_path)]) == 2 and f"{name}.csv: expected a csv, got" in capsys.readouterr().err
    (tmp_path / f"{name}.csv").write_text("form,top1\ndense\n")  # whose cut-off row would be written anew as a whole one
    assert module.main(["--out", str(tmp_path)]) == 2 and f"{name}.csv: expected values for form, top1 in each row" in capsys.readouterr().err


def test_a_seed_that_no_run_can_have_is_told_before_the_first(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(accuracy.sweep_local, "one_process_each", lambda *_: pytest.fail("began"))
    with pytest.raises(SystemExit) as end:
        accuracy.main(["final", "--data", "digits", "--seeds", "-1", "--runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv")])
    assert end.value.code == 2 and "--seeds: expected a number from 0 to 1099511627776, got -1" in capsys.readouterr().err


def test_a_folder_behind_a_closed_one(capsys, monkeypatch, tmp_path):
    """Whose files may not even be looked at."""
    closed, stat, access = tmp_path / "closed", os.stat, os.access
    closed.mkdir()

    def refused(path, *args, **options):
        if closed in Path(path).parents:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return stat(path, *args, **options)

    monkeypatch.setattr(os, "stat", refused)
    monkeypatch.setattr(os, "access", lambda path, mode: path != closed and access(path, mode))
    with pytest.raises(SystemExit, match="2"):
        side_by_side.options("", ["--out", str(closed / "a" / "b")])
    assert f"--out: expected a folder to write to, got {closed / 'a' / 'b'}: {closed} is not to be written to" in capsys.readouterr().err


def test_a_run_that_failed_is_told_by_the_status_and_a_seed_named_twice_is_one(monkeypatch, tmp_path):
    begun = []
    monkeypatch.setattr(accuracy.sweep_local, "one_process_each", lambda runs, *_: begun.extend(run.name for run in runs) or len(runs))
    words = ["--only", "dense-muon", "--seeds", "3", "3", "--runs", str(tmp_path / "runs"), "--csv", str(tmp_path / "t.csv")]
    assert accuracy.main(["final", "--data", "digits", *words]) == 1 and begun == ["dense-muon-seed3"]


OUT = {  # scripts that have an `--out` of their own
    "barley": (barley_table_4, ["--data", "digits"], "--runs"), "barley's table": (barley_table_4, ["--data", "digits"], "--out"),
    "combination": (combination, [], "--out"), "figure 3": (figure_3, ["t.csv"], "--out"), "figure 4": (figure_4, ["--size", "small"], "--out"),
    "tables": (table_6_2, [], "--out"),
}  # fmt: skip


@pytest.mark.parametrize("case", OUT)
def test_folders_that_cannot_be_written_to_are_told_first(case, capsys, monkeypatch, tmp_path):
    module, args, option = OUT[case]
    (tmp_path / "file").write_text("")
    monkeypatch.setattr(os, "access", lambda *_: False)
    for out, words in ((tmp_path / "file" / "new", f"{tmp_path / 'file'} is no folder"), (tmp_path / "new", f"{tmp_path} is not to be written to")):
        with pytest.raises(SystemExit, match="2"):
            module.main([*args, option, str(out)])
        assert capsys.readouterr().err.endswith(f"error: {option}: expected a folder to write to, got {out}: {words}\n")


def test_folders_that_are_files(capsys, tmp_path):
    file = tmp_path / "file"
    file.write_text("")
    small = str(Path(sweep.__file__).parent / "sweeps" / "small.yaml")
    for action in ("run", "list", "table", "figures"):
        with pytest.raises(SystemExit, match="2"):
            sweep.main([action, small, "--out", str(file / "runs")])
        assert f"error: --out: expected a folder to write to, got {file / 'runs'}: {file} is no folder" in capsys.readouterr().err
    assert accuracy.main(["final", "--data", "digits", "--only", "dense-muon", "--runs", str(file), "--csv", str(tmp_path / "t.csv")]) == 2
    assert str(file) in capsys.readouterr().err
