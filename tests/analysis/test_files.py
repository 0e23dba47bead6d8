"""What `Analysis.save` writes can be read back, and is whole or not there; what it prints."""

import csv
import errno
import json
import tempfile
from pathlib import Path

import pytest
from analysis.counted import analyze, masked

from fxmask.analysis import report as report_module
from fxmask.errors import ConfigError

FORMATS = ("csv", "json", "markdown", "html", "latex", "text")


@pytest.fixture(scope="module")
def small():
    model, x = masked("mixer")
    return analyze(model, x)


def rows_of(text):
    return list(csv.DictReader(text.splitlines()))


def assert_same(read, rows):
    assert len(read) == len(rows)
    for got, row in zip(read, rows, strict=True):
        for column, value in row.items():
            if value is None:
                assert got[column] == ""
            elif isinstance(value, (int, float)):
                assert type(value)(got[column]) == value, column
            else:
                assert got[column] == value


def test_a_folder_of_all_formats(small, tmp_path):
    assert small.save(tmp_path / "new" / "out", formats=FORMATS) == tmp_path / "new" / "out"
    tables = [t for t, rows in small.tables.items() if rows]
    suffixes = [s for f, s in report_module.SUFFIX.items() if f != "json"]
    assert {p.name for p in (tmp_path / "new" / "out").iterdir()} == {"analysis.json", *(t + s for t in tables for s in suffixes)}
    for t in tables:
        assert_same(rows_of((tmp_path / "new" / "out" / f"{t}.csv").read_text()), small.tables[t])
        assert "<table>" in (tmp_path / "new" / "out" / f"{t}.html").read_text()
        assert r"\toprule" in (tmp_path / "new" / "out" / f"{t}.tex").read_text()
        assert "|" in (tmp_path / "new" / "out" / f"{t}.md").read_text()
        assert small.title in (tmp_path / "new" / "out" / f"{t}.txt").read_text()
    assert json.loads((tmp_path / "new" / "out" / "analysis.json").read_text()) == json.loads(json.dumps(small.to_dict()))


@pytest.mark.parametrize("suffix", [".csv", ".json", ".md", ".html", ".tex", ".txt"])
def test_one_file(small, tmp_path, suffix):
    path = small.save(str(tmp_path / f"out{suffix}"))
    assert path == tmp_path / f"out{suffix}" and [p.name for p in tmp_path.iterdir()] == [path.name]
    if suffix == ".csv":
        assert_same(rows_of(path.read_text()), small.tables["nodes"])
    elif suffix == ".json":
        assert json.loads(path.read_text()) == json.loads(json.dumps(small.to_dict()))
    else:
        assert "blocks.0" in path.read_text()


def test_saving_again_replaces(small, tmp_path):
    (tmp_path / "nodes.csv").write_text("old")
    (tmp_path / "mine.txt").write_text("not ours")
    small.save(tmp_path)
    small.save(tmp_path)
    assert_same(rows_of((tmp_path / "nodes.csv").read_text()), small.tables["nodes"])
    assert (tmp_path / "mine.txt").read_text() == "not ours" and not list(tmp_path.glob(".*"))


@pytest.mark.parametrize("after", [0, 1, 4])
def test_a_disk_that_fills_up(small, tmp_path, monkeypatch, after):
    (tmp_path / "nodes.csv").write_text("old")
    written, write = [], Path.write_text

    def full(path, *args, **kwargs):
        if len(written) >= after:
            raise OSError(28, "No space left on device")
        written.append(path)
        return write(path, *args, **kwargs)

    monkeypatch.setattr(Path, "write_text", full)
    for path in (tmp_path, tmp_path / "new" / "folder"):
        written.clear()
        with pytest.raises(ConfigError, match=r"cannot be written: No space left on device"):
            small.save(path)
    written[:] = [None] * 9
    with pytest.raises(ConfigError, match="No space left"):
        small.save(tmp_path / "one.json")
    monkeypatch.undo()
    assert [p.name for p in tmp_path.iterdir()] == ["nodes.csv"] and (tmp_path / "nodes.csv").read_text() == "old"


def test_a_folder_in_the_way_of_a_file(small, tmp_path):
    (tmp_path / "traffic.csv").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written"):
        small.save(tmp_path, formats="csv")
    assert [p.name for p in tmp_path.iterdir()] == ["traffic.csv"]
    (tmp_path / "all.json").mkdir()
    with pytest.raises(ConfigError, match=r"cannot be written"):
        small.save(tmp_path / "all.json")


def test_a_folder_that_is_locked(small, tmp_path, monkeypatch):
    def refuse(*args, **kwargs):  # as chmod would, but for root, who writes everywhere
        raise PermissionError(errno.EACCES, "Permission denied")

    monkeypatch.setattr(tempfile, "mkdtemp", refuse)
    with pytest.raises(ConfigError, match=r"the output folder cannot be written: Permission denied"):
        small.save(tmp_path / "out")


def test_printed(small):
    assert json.loads(small.printed("traffic", "json")) == json.loads(json.dumps(small.tables["traffic"]))
    assert_same(rows_of(small.printed("nodes", "csv")), small.tables["nodes"])
    text = str(small)
    assert "params_kept" in text and "blocks.0" in text and small.notes[0] in text
    everything = small.printed("all")
    assert all(f"{t}\n" in everything for t, rows in small.tables.items() if rows)
