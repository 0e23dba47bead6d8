"""A csv that is not the one a script reads or rewrites: said with its name and what is wrong, before anything is measured or written."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import plots
import pytest
from benchmarks import advice
from sparsedrop import figure_3, table_1
from thesis import accuracy, accuracy_page, cifar10_modes, combination, csv_files, gaps, hidden_groups, isoflop, memory_movement, stability

from fxmask.errors import ConfigError

FOREIGN = {"other columns": b"a,b,c\n1,2,3\n", "a binary file": bytes(range(128, 256)) * 9, "a folder": None}
SCRIPTS = {
    "stability": (stability, ["--models", "mlp512", "--modes", "dense", "--steps", "10", "--batch", "4", "--csv"]),
    "gaps": (gaps, ["--csv"]),
    "combination": (combination, ["--csv"]),
    "isoflop": (isoflop, ["plot", "--out", "x.png", "--csv"]),
    "isoflop beside times": (isoflop, ["plot", "--out", "x.png", "--times"]),
    "times": (isoflop, ["time", "--turns", "1", "--batch", "2", "--only", "dense-d64", "--times"]),
    "pages": (accuracy_page, ["page.md", "--csv"]),
    "pages beside times": (accuracy_page, ["page.md", "--times"]),
    "runs' table": (accuracy, ["table", "--runs", ".", "--csv"]),
    "runs": (accuracy, ["search", "--root", ".", "--csv"]),
    "modes": (cifar10_modes, ["--root", ".", "--csv"]),
    "groups": (hidden_groups, ["--runs", ".", "--csv"]),
    "dropout": (table_1, ["--size", "small", "--tasks", "digits", "--rates", "0.5", "--csv"]),
    "dropout's figure": (figure_3, []),
    "advice": (advice, ["--seconds", "1", "--csv"]),
    "accuracies": (memory_movement, ["--accuracy"]),
}  # fmt: skip


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Works in a folder of its own; a script that measures, trains or opens a page has gone too far."""
    monkeypatch.chdir(tmp_path)
    for module, name in ((stability, "losses_of"), (isoflop, "measure"), (table_1, "train"), (advice, "asked"), (cifar10_modes.subprocess, "run")):
        monkeypatch.setattr(module, name, lambda *_, **__: pytest.fail("began"))
    return tmp_path


def ends_with(module, args):
    try:
        return module.main(args)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize("kind", FOREIGN)
@pytest.mark.parametrize("script", SCRIPTS)
def test_another_s_csv_is_refused(script, kind, folder, capsys):
    module, args = SCRIPTS[script]
    path = folder / "t.csv"
    path.mkdir() if FOREIGN[kind] is None else path.write_bytes(FOREIGN[kind])
    code = ends_with(module, [*args, str(path)])
    said = capsys.readouterr().err
    assert code == 2 and str(path) in said and "expected" in said and "got" in said
    assert [p.name for p in folder.iterdir()] == ["t.csv"] and (FOREIGN[kind] is None or path.read_bytes() == FOREIGN[kind])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a,b\n1\n", "got fewer in row 1"),
        ("a\n1\n", "got none of b"),
        ("a,b,c\n1,2,3\n", "got c, too"),
        ("a,b\n1,2,3\n", "got more in row 1"),
    ],
)
def test_a_table_of_other_or_cut_rows_is_not_written_anew(text, words, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        csv_files.read_own(path, ("a", "b"))
    with pytest.raises(ConfigError, match="its folder cannot be made"):
        csv_files.read_own(path / "t.csv", ("a", "b"))


@pytest.mark.parametrize(("text", "words"), [("a,b\n1,2,3\n", "got more in row 1"), ("a,b\n1,2\n1\n", "got fewer in row 2")])
def test_a_row_of_more_or_fewer_values_is_not_read(text, words, tmp_path):
    path = tmp_path / "t.csv"
    path.write_text(text)
    for columns in ((), ("b",)):
        with pytest.raises(ConfigError, match=f"expected values for {', '.join(columns or 'ab')} in each row, {words}"):
            csv_files.read(path, columns)
    if "more" in words:
        with pytest.raises(ConfigError, match="got a value without a column, too"):
            csv_files.read_own(path, ("a", "b"), cut_off=True)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_csv_that_a_spreadsheet_has_saved(end, tmp_path):
    """With a mark of UTF-8 in front, and the line ends of another system."""
    (tmp_path / "t.csv").write_bytes(f"\N{ZERO WIDTH NO-BREAK SPACE}a,b{end}1,2{end}".encode())
    assert csv_files.read(tmp_path / "t.csv", ("a", "b")) == [{"a": "1", "b": "2"}]


def test_a_table_is_read_as_it_was_written_whatever_the_locale(tmp_path, monkeypatch):
    monkeypatch.setattr("io.text_encoding", lambda encoding, *_: encoding or "latin-1")
    csv_files.write(tmp_path / "t.csv", ["command"], [{"command": "--root B\u00e4ume"}])
    assert csv_files.read(tmp_path / "t.csv") == [{"command": "--root B\u00e4ume"}]


def test_what_younger_columns_and_cut_rows_are_allowed_for(tmp_path):
    path = tmp_path / "t.csv"
    assert csv_files.read_own(path, ("a", "b")) == []
    path.write_text("a\n1\n")
    assert csv_files.read_own(path, ("a", "b"), younger=("b",)) == [{"a": "1"}]
    path.write_text("a,b\n1,2\n3")
    assert csv_files.read_own(path, ("a", "b"), cut_off=True) == [{"a": "1", "b": "2"}]


@pytest.mark.parametrize(("text", "words"), [("a,b\n1,2\n", "got none of epoch"), ("epoch,top1,train_loss\n", "expected a row for each epoch")])
def test_figures_of_no_training_are_refused(text, words, tmp_path, monkeypatch, capsys):
    (tmp_path / "log.csv").write_text(text)
    path = Path(plots.__file__)
    monkeypatch.setattr(sys, "argv", [str(path), str(tmp_path)])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    assert end.value.code == 2 and words in capsys.readouterr().err and not list(tmp_path.glob("*.png"))
