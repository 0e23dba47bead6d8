"""Where benchmarks append rows: a folder that is not there yet, and files with other columns, which are refused before anything is measured."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from benchmarks import block_dropout, checked, masked_step, whole_model
from plots import read_csv

from fxmask.errors import ConfigError

RESULTS = Path(__file__).parents[2] / "examples" / "results"
DROPOUT = ["--tokens", "32", "--features", "32", "--block", "16", "--repeats", "1", "--rates", "0.5", "--threads", "1", "--device", "cpu"]
STEP = ["--features", "32", "--layers", "1", "--block", "16", "--repeats", "1", "--ratios", "0.5"]
WHOLE = ["--preset", "digits", "--steps", "1", "--block", "16", "--batch", "2", "--workers", "0"]
SCRIPTS = {"dropout": (block_dropout, [*DROPOUT, "--csv"], 5), "step": (masked_step, [*STEP, "--csv"], 1), "whole": (whole_model, [*WHOLE, "--out"], 3)}


@pytest.mark.parametrize("name", SCRIPTS)
def test_rows_in_a_new_folder_and_none_under_other_columns(name, tmp_path, capsys, monkeypatch):
    script, words, rows = SCRIPTS[name]
    path = tmp_path / "new" / "folder" / "t.csv"
    for times in (1, 2):
        assert script.main([*words, str(path)]) == 0
        assert len(read_csv(path)) == rows * times
    header, _, rest = path.read_text().partition("\n")
    path.write_text(held := f"gpu,{header}\n{rest}")
    for clock in ("perf_counter", "process_time"):
        monkeypatch.setattr(f"time.{clock}", lambda: pytest.fail("something is measured"))
    for wrong, text in ((path, f"{path}: expected the columns {header.split(',')[0]}"), (path / "t.csv", "cannot be written: File exists")):
        assert script.main([*words, str(wrong)]) == 2 and text in capsys.readouterr().err
    assert path.read_text() == held


@pytest.mark.parametrize("path", ["cpu/whole_model.csv", "epyc/whole_model.csv"])
def test_the_recorded_steps_fit_the_command(path):
    checked.table("--out", RESULTS / path, whole_model.COLUMNS)
    with pytest.raises(ConfigError, match=f"--out .*{path}: expected the columns a, got source, "):
        checked.table("--out", RESULTS / path, ["a"])


def test_a_place_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    """And a csv that is empty, as a killed run leaves one, gets the columns."""
    for _ in range(2):
        checked.table("--csv", tmp_path / "t.csv", ["a", "b"])
    checked.append(tmp_path / "t.csv", ["a", "b"], [{"a": 1, "b": 2}])
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,2\n"
    (tmp_path / "t.csv").write_text("a,b\n1,2\n3")
    checked.append(tmp_path / "t.csv", ["a", "b"], [{"a": 5, "b": 6}])
    assert (tmp_path / "t.csv").read_text() == "a,b\n1,2\n3\n5,6\n"  # no row is glued to the half one of a killed run
    (tmp_path / "s.csv").write_bytes("\N{ZERO WIDTH NO-BREAK SPACE}a,b\r\n1,2\r\n".encode())  # as a spreadsheet saves it
    checked.table("--csv", tmp_path / "s.csv", ["a", "b"])
    checked.append(tmp_path / "s.csv", ["a", "b"], [{"a": 5, "b": 6}])
    assert (tmp_path / "s.csv").read_bytes() == "\N{ZERO WIDTH NO-BREAK SPACE}a,b\r\n1,2\r\n5,6\n".encode()
    with pytest.raises(ConfigError, match=r"--csv /proc/t\.csv: cannot be written: "):
        checked.table("--csv", Path("/proc/t.csv"), ["a"])
    os.mkfifo(tmp_path / "pipe")  # as /dev/stdout is, where another program reads it
    (tmp_path / "long").write_text("a" * 200_000)
    for name, words in (("pipe", "File or stream is not seekable"), ("long", "field larger than field limit")):
        with pytest.raises(ConfigError, match=f"{name}: cannot be written: {words}"):
            checked.table("--csv", tmp_path / name, ["a"])
