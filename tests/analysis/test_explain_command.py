"""`fxmask explain` from a command line: what it prints and writes, and how it ends where it cannot."""

import csv
import json
import os
import sys

import pytest
from analysis.spec import SOURCE, SPEC, models, net  # noqa: F401

import fxmask
from fxmask.cli import main


def explain(capsys, *args):
    code = main(["explain", *map(str, args)])
    out = capsys.readouterr()
    return code, out.out, out.err


def test_explain_prints_what_the_function_says(capsys):
    code, out, err = explain(capsys, f"{SPEC}:net", "--ratio", "0.5", "--block", "16")
    assert code == 0 and not err and not os.listdir(".")
    assert out == f"{fxmask.explain(fxmask.apply(net(), ratio=0.5, block=(16, 16)))}\n"
    assert "achieved_ratio" in out, "it has the model's weights"
    assert explain(capsys, f"{SPEC}:masked")[1] == out
    assert explain(capsys, f"{SPEC}:net")[1] == f"{fxmask.explain(net())}\n"


def test_explain_options_reach_apply(capsys):
    code, out, _ = explain(capsys, f"{SPEC}:net", "--ratio", "0.75", "--block", "32x16", "--backward", "ste", "--impl", "reference", "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0 and [(r["target_ratio"], r["block"], r["backward"], r["impl"]) for r in rows] == [(0.75, "32x16", "ste", "reference")] * 2
    code, out, _ = explain(capsys, f"{SPEC}:net", "--ratio", "0.5", "--exclude", "2", "--criterion", "l1", "--format", "json")
    rows = json.loads(out)["rows"]
    assert code == 0 and [(r["masked"], r["reason"], r["ranks_by"]) for r in rows] == [(True, "selected", "l1"), (False, "in exclude", None)]
    assert [r["masked"] for r in json.loads(explain(capsys, f"{SPEC}:net", "--ratio", "0.5", "--include", "2", "--format", "json")[1])["rows"]] == [False, True]
    code, out, _ = explain(capsys, "--ratio", "0.5", "--include", "0", "--include", "2", f"{SPEC}:net", "--format", "json")
    assert code == 0 and [r["masked"] for r in json.loads(out)["rows"]] == [True, True], "a pattern each, and the model after them"
    code, out, _ = explain(capsys, f"{SPEC}:net", "--ratio", "0.75", "--format", "csv")
    assert code == 0 and [r["name"] for r in csv.DictReader(out.splitlines())] == ["0", "2"]


def test_explain_writes_files(capsys, tmp_path):
    code, out, _ = explain(capsys, f"{SPEC}:net", "--ratio", "0.5", "-o", tmp_path / "a" / "b")
    assert code == 0 and out.startswith("fxmask.explain\n")
    assert {p.name for p in (tmp_path / "a" / "b").iterdir()} == {"explain.csv", "explain.json", "explain.md"}
    assert explain(capsys, f"{SPEC}:net", "--ratio", "0.5", "-o", tmp_path / "rows.csv")[:2] == (0, out)
    assert (tmp_path / "rows.csv").read_text() == (tmp_path / "a" / "b" / "explain.csv").read_text()


@pytest.mark.parametrize("suffix", [".csv", ".json", ".md", ".html", ".tex", ".txt"])
def test_explain_writes_what_the_report_saves(capsys, tmp_path, suffix):
    assert explain(capsys, f"{SPEC}:net", "--ratio", "0.5", "--block", "16", "-o", tmp_path / f"by{suffix}")[0] == 0
    saved = fxmask.explain(fxmask.apply(net(), ratio=0.5, block=(16, 16))).save(tmp_path / f"own{suffix}").read_bytes()
    assert saved == (tmp_path / f"by{suffix}").read_bytes() and b"selected" in saved and b"\r" not in saved
    assert (rb"\toprule" in saved) == (suffix == ".tex")


def test_explain_says_what_it_cannot_do(capsys, tmp_path):
    (tmp_path / "file").write_text("mine")
    for args, text in (
        ((f"{SPEC}:net", "--block", "16", "--impl", "reference"), "--block, --impl: needs --ratio, which asks for masks"),
        ((f"{SPEC}:net", "--exclude", "0"), "--exclude: needs --ratio, which asks for masks"),
        ((f"{SPEC}:net", "--ratio", "0.5", "-o", tmp_path / "file" / "below"), "the output folder cannot be written: Not a directory."),
        ((f"{SPEC}:masked", "--ratio", "0.5"), "is masked already"),
        ((f"{SPEC}:breaks",), "'spec_models:breaks' cannot be built: RuntimeError: no such luck"),
    ):
        code, out, err = explain(capsys, *args)
        assert code == 2 and not out and err.startswith("fxmask: ") and text in err


def test_a_module_of_the_folder_that_it_is_called_in(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p not in ("", str(tmp_path))])  # as of the installed command, which begins with its own folder
    (tmp_path / "lies_here.py").write_text(SOURCE)
    assert explain(capsys, "lies_here:net")[0] == 0
    code, _, err = explain(capsys, "lies_nowhere:net")
    assert code == 2 and "fix: check the name, and that it lies in the folder that this is called in, or in one on PYTHONPATH." in err
