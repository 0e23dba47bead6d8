"""fxmask.explain and the Report it returns."""

import csv
import json
import os
import subprocess
import sys

import pytest
import torch
from sample_models import mlp
from torch import fx, nn

import fxmask
from fxmask.errors import ConfigError
from fxmask.kernels.cpu import deciding

UNSEEN = "fxmask.apply has not seen it, or its masks were taken off or made permanent"


def test_a_row_for_every_linear(monkeypatch):
    for name in ("small", "decisions"):
        monkeypatch.setattr(deciding, name, {})  # layers of these shapes have run in other tests
    report = fxmask.explain(fxmask.apply(mlp(), ratio=0.7, block=(32, 32)))
    assert [r["name"] for r in report.rows] == ["0", "2", "4"]
    first = report.rows[0]
    assert first["masked"] and first["target_ratio"] == 0.7
    assert first["achieved_ratio"] == pytest.approx(1 - 2 / 6)  # ceil(6 * 0.3) = 2 blocks of 6
    assert (first["impl"], first["why"], first["mask_age"], first["flips"]) == ("auto", "chosen when it first runs", None, None)
    assert report.summary["masked"] == 2
    assert report.summary["of them in kept blocks"] == 2 * 2 * 1024 + 640


def test_ragged_edges_count_what_they_hold():
    model = torch.nn.Sequential(torch.nn.Linear(20, 20, bias=False))
    torch.nn.init.zeros_(model[0].weight).detach()[16:, 16:] = 1  # the best block is the 4x4 corner
    row = fxmask.explain(fxmask.apply(model, ratio=0.75)).rows[0]
    assert row["achieved_ratio"] == pytest.approx(1 - 16 / 400)
    assert row["target_ratio"] == 0.75


@pytest.mark.parametrize("dense", ["0", "1"])
def test_a_weight_that_is_dense_in_one_of_two_layers_is_whole_in_memory(dense):
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    model[1].weight = model[0].weight
    summary = fxmask.explain(fxmask.apply(model, ratio=0.5, block=(8, 8), exclude=dense)).summary
    assert summary == {"linears": 2, "masked": 1, "weight elements in linears": 1024, "of them in kept blocks": 1024}


@pytest.mark.parametrize("form", ["module", "graph"])
def test_it_prints_and_saves(form, tmp_path):
    model = fxmask.apply(mlp() if form == "module" else fx.symbolic_trace(mlp()))
    report = fxmask.explain(model)
    assert "default exclusion: min(out, in) = 10 < 16" in str(report)
    assert "save no time" in str(report)
    rows = list(csv.DictReader(report.save(tmp_path / "r.csv").read_text().splitlines()))
    assert {r["name"] for r in rows} == {"0", "2", "4"}
    data = json.loads(report.save(tmp_path / "r.json").read_text())
    assert data == report.to_dict()
    assert report.save(tmp_path / "r.md").read_text().startswith("| name")
    assert "<table>" in report.save(tmp_path / "r.html").read_text()
    assert r"\begin{tabular}" in report.save(tmp_path / "r.tex").read_text()
    with pytest.raises(ConfigError, match=r"expected a path that ends in .csv, .json, .md, .html, .tex, .txt, got 'r.xls'"):
        report.save(tmp_path / "r.xls")


@pytest.mark.parametrize("name", ["r.csv", "r.md"])
def test_a_folder_is_made_or_refused(name, tmp_path):
    report = fxmask.explain(mlp())
    path = tmp_path / "new" / "folder" / name
    assert report.save(path) == path and path.read_text()
    (tmp_path / "file").write_text("")
    (tmp_path / f"folder-{name}").mkdir()
    for wrong in (tmp_path / "file" / name, tmp_path / f"folder-{name}"):
        with pytest.raises(ConfigError, match=rf"the report cannot be written: expected a path that takes a file(.|\n)*where: {wrong}(.|\n)*fix: name a file"):
            report.save(wrong)


def test_an_unmasked_model_says_so():
    report = fxmask.explain(mlp())
    assert {r["reason"] for r in report.rows} == {UNSEEN}
    assert not any(r["masked"] for r in report.rows)


def test_wide_reports_print_short():
    """What all rows, or all masked ones, say alike stands once below, long cells are cut; names, reasons, rows and whole tables stay."""
    alike = {"masked": True, "reason": "selected", "shape": "64x64", "block": "32x32"}
    rows = [{"name": f"l{i}", **alike, "ranks_by": "taylor" if i else None, "ratio": i / 8, "why": f"measured {i} " + "x" * 90} for i in range(3)]
    report = fxmask.Report("wide", [*rows, {"name": "head", "masked": False, "reason": "its owner " + "x" * 50, "shape": "64x64"}])
    text = str(report)
    assert "\nall rows: shape 64x64\n" in text and "\nmasked rows: block 32x32\n" in text and text.count("32x32") == 1
    assert max(map(len, text.splitlines())) < max(map(len, report.table().splitlines())) - 40 and "x" * 60 not in text
    assert "x" * 50 in text and text.count("taylor") == 2  # which of the masked rows have it is part of what the table says
    assert "report.table() and --format text have it whole" in text and text.isascii()
    assert rows[0]["why"] in report.whole() and report.table() in report.whole() and report.table().count("32x32") == 3
    narrow = fxmask.Report("narrow", [{"name": "a", "block": "32x32"}, {"name": "b", "block": "32x32"}])
    assert str(narrow) == narrow.whole() == "narrow\n" + narrow.table()


def test_long_lines_below_a_wide_table_are_wrapped():
    rows = [{"name": str(i), "masked": True, "reason": "selected", **{f"column_{c}": "v" * 30 for c in "abcdefgh"}} for i in range(2)]
    lines = str(fxmask.Report("t", rows)).splitlines()
    assert max(map(len, lines)) <= 120 and lines[-1].startswith("  ")


def test_formats_of_a_table():
    report = fxmask.Report("t", [{"name": "a", "n": 1}])
    assert report.table("markdown") == report.table("github") and "|" in report.table("markdown")
    with pytest.raises(ConfigError, match=r"expected markdown or one of .*latex.*, got 'tabular'"):
        report.table("tabular")


NAMED = r"""
import sys, torch, fxmask
model = torch.nn.Sequential()
model.add_module("gr\u00f6\u00dfe", torch.nn.Linear(64, 64))
fxmask.apply(model, block=(16, 16))
log = fxmask.HealthLog(model, sys.argv[1] + "/health.csv")
log.update()
for name in ("r.csv", "r.md"):
    fxmask.explain(model).save(sys.argv[1] + "/" + name)
"""


def test_files_are_utf_8_whatever_the_locale(tmp_path):
    there = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    subprocess.run([sys.executable, "-c", NAMED, str(tmp_path)], env=there, check=True)
    assert all("größe" in (tmp_path / name).read_text(encoding="utf-8") for name in ("health.csv", "r.csv", "r.md"))


def test_a_part_of_a_model_says_what_apply_has_decided_of_the_whole():
    part = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 10))
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), part), ratio=0.5)
    head, of_part = fxmask.explain(model).rows[2], fxmask.explain(part).rows
    assert head["reason"] == "default exclusion: min(out, in) = 10 < 16" and of_part[0]["reason"] == "selected"
    assert of_part[1]["reason"] == "left dense by fxmask.apply of a larger model, whose explain says why, or by an earlier one"
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)))  # whose weight is computed
    fxmask.apply(nn.Sequential(normed, nn.Linear(64, 64)), ratio=0.5, exclude="0.*")
    assert fxmask.explain(normed).rows[0]["reason"] == of_part[1]["reason"]
    attention = nn.MultiheadAttention(32, 2)  # whose packed projection is no layer
    fxmask.apply(nn.Sequential(attention), ratio=0.5)
    assert fxmask.explain(attention).rows[0]["reason"] == of_part[1]["reason"]
    part[0], other = nn.Linear(64, 64), part[0]
    part[0].weight = other._parameters["weight"]  # masked in the layer that it was in
    assert fxmask.explain(part).rows[0]["reason"] == UNSEEN
    part[0] = other
    fxmask.restore(model)
    assert {r["reason"] for r in fxmask.explain(part).rows} == {UNSEEN}


def test_a_dense_model_has_no_notes_on_masks():
    assert fxmask.explain(nn.Sequential(nn.Linear(32, 32))).notes == []
