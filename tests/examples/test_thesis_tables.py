"""The scripts of the thesis' and of Barley's tables: every published cell, compared here once more, and what the scripts say and write."""

from __future__ import annotations

import csv
import os
import re
import subprocess
import sys
from fractions import Fraction
from pathlib import Path

import pytest
import torch
from thesis import (
    barley_model,
    barley_table_1,
    barley_table_2,
    barley_table_3,
    flops,
    masked_elements,
    memory_movement,
    real_models,
    side_by_side,
    table_6_2,
)

from fxmask.analysis.barley import resmlp_activations
from fxmask.analysis.model_shapes import ModelShapes
from fxmask.errors import ConfigError

ROOT = Path(__file__).parents[2]


def oracle(name):
    return list(csv.DictReader((ROOT / "examples" / "thesis" / "published" / f"{name}.csv").read_text().splitlines()))


def last_line(capsys):
    return capsys.readouterr().out.rstrip().split("\n")[-1]


def test_shapes_of_the_real_models():
    real = real_models.cifar_shapes()
    assert real == ModelShapes.resmlp()
    assert sum(p.numel() for p in real_models.cifar_model().parameters()) == real.parameters == 192_074
    assert real.macs == 11_993_728
    with torch.device("meta"):
        assert sum(p.numel() for p in barley_model.S12().parameters()) == 15_350_872


def test_table_6_2(tmp_path, capsys):
    assert table_6_2.main(["--out", str(tmp_path)]) == 0
    assert last_line(capsys) == "171 of 171 published cells agree (to the printed digits); formula and ours are the same in 171 of 171"
    written = {(r["block"], r["ratio"]): r for r in csv.DictReader((tmp_path / "table_6_2.csv").read_text().splitlines())}
    cells = [(line["block"], ratio, text) for line in oracle("table_6_2") for ratio, text in line.items() if ratio != "block"]
    assert len(cells) == len(written) == 171
    for block, ratio, text in cells:
        assert written[block, ratio]["formula"] == written[block, ratio]["ours"] == written[block, ratio]["published"]
        assert Fraction(written[block, ratio]["ours"]) == Fraction(text)


def test_barley_table_2():
    rows = {(r["sparsity"], r["block"]): r for r in barley_table_2.cells()}
    cells = [(f"{line['sparsity_pct']}%", f"1x{b[1:]}", text) for line in oracle("barley_table_2") for b, text in line.items() if b[0] == "b"]
    assert len(cells) == len(rows) == 48
    for sparsity, block, text in cells:
        assert float(rows[sparsity, block]["ours"]) == float(rows[sparsity, block]["formula"]) == float(text)
    assert {r["status"] for r in rows.values()} == {"agrees"}


def test_barley_table_1(capsys):
    assert barley_table_1.main([]) == 0
    out = capsys.readouterr().out
    rows = {r["part"]: r for r in barley_table_1.cells()}
    published = {line["part"]: float(line["published_mib"]) for line in oracle("barley_table_1")}
    for part in ("input", "activations"):
        for column in ("formula", "ours"):
            assert float(rows[part][column]) == pytest.approx(published[part], rel=1e-3)
        assert rows[part]["status"] == "agrees"
    assert [rows[part]["ours"] for part in ("input", "model", "optimizer", "activations")] == ["18.50", "58.56", "117.12", "1598.92"]
    for part in ("model", "optimizer", "total"):
        assert rows[part]["status"] == "differs"
        assert f"unexplained: {part}, +{published[part] - float(rows[part]['ours']):.2f} MiB more than ours" in out
    assert "within the table: activations is 88.9 % of the total, printed 89.0" in out
    assert out.rstrip().split("\n")[-1].startswith("2 of 5 published cells agree (within 0.1 %)")


def test_barley_table_3():
    rows, base = barley_table_3.cells()
    published = oracle("barley_table_3")
    assert len(rows) == len(published) == 9
    for r, line in zip(rows, published, strict=True):
        assert (r["sparsity"], r["block"]) == (f"{line['sparsity_pct']}%", f"1x{line['block']}")
        for column in ("formula", "ours"):
            assert float(r[column]) == pytest.approx(float(line["activations_mib"]), rel=7e-3)
        assert float(r["formula"]) - float(r["ours"]) == pytest.approx(1599.2 - base, abs=0.011)  # each on a base of its own, else the same
    assert rows[-1]["ours_delta_pct_of_table_1"] == "-32.7" and rows[-1]["ours_delta_pct_of_autograd"] == "-33.7"
    assert barley_table_3.doubts(rows, base)[0] == "within the table: 70% 1x64: -462.0 of 1599.2 is -28.9 %, printed -29.0"


def test_barley_table_3_with_products():
    """One sample's bytes, 32 times, against kept values and 16-bit numbers; ours has in 12 inputs of token mixing 4 blocks of 64 for 196 tokens."""
    rows = barley_table_3.products()
    assert [(r["inputs"], r["dense"], r["ours"], r["saves_pct"]) for r in rows] == [
        (36, "1552.98", "1031.60", "33.57"), (61, "1552.98", "848.17", "45.38"), (85, "1552.98", "672.07", "56.72")
    ]  # fmt: skip
    assert all(6.7 < float(r["ours"]) - float(r["formula"]) < 6.9 for r in rows)


def test_what_autograd_saves():
    """Bytes without values, real bytes of one sample, and the closed form are the same; the inputs of 36 linears are 661.5 MiB of them."""
    with torch.device("meta"):
        model = barley_model.S12()
    meta = barley_model.saved_by_autograd(model, *barley_model.inputs(32, "meta"))
    one, inputs = barley_model.block_inputs()
    assert meta == 32 * one == 4 * resmlp_activations()[0]
    assert f"{meta / 2**20:.2f}" == "1552.98"
    assert len(inputs) == 36 and 32 * sum(a.nbytes for a in inputs) / 2**20 == 661.5


def test_pruned_bsr_keeps_the_strongest_blocks():
    a = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    bsr = barley_model.pruned_bsr(a, 4, Fraction(1, 4))
    norms = torch.linalg.vector_norm(a.view(6, 2, 4), dim=-1)
    kept = norms > norms.flatten().sort().values[2]
    assert torch.equal(bsr.to_dense(), (a.view(6, 2, 4) * kept[..., None]).view(6, 8))
    assert bsr.values().shape == (9, 1, 4)


def test_memory_movement(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    measured = tmp_path / "masked_accuracy.csv"
    measured.write_text("block,ratio,mode,top1\n32x32,0.8,masked,75.19\n")
    assert memory_movement.main(["--out", str(tmp_path), "--accuracy", str(measured)]) == 0
    out = capsys.readouterr().out
    assert "75.2% 278.01" in out and "277.75" in out and "masked, GiB capped at the dense model's, ours" in out
    assert "0 of 8 candidates give 277; the nearest is 277.75" in out
    assert out.rstrip().split("\n")[-1].startswith("1 of 2 published figures agree with a candidate")
    assert {p.name for p in tmp_path.iterdir()} == {measured.name, "memory_movement_masked.csv", "memory_movement_masked.png", "memory_movement_text.csv"}
    rows = list(csv.DictReader((tmp_path / "memory_movement_masked.csv").read_text().splitlines()))
    assert len(rows) == 171 and all(r["formula"] == r["ours"] and r["status"] == "derived" for r in rows)
    assert max(float(r["ours"]) for r in rows) == 318.29  # capped
    dense = [r for r in memory_movement.text_cells() if r["what"] == "dense"]
    assert [(r["batches"], r["ours"]) for r in dense] == [(391, "318.29"), (390.625, "317.98")]
    cell = next(r for r in rows if (r["block"], r["ratio"]) == ("32x32", "80%"))
    assert [cell[k] for k in ("ours", "at_390.625_batches", "variant_C", "variant_D", "variant_K")] == ["278.01", "277.75", "278.43", "291.44", "278.43"]


def test_accuracy_needs_its_columns(tmp_path):
    (tmp_path / "a.csv").write_text("block,top1\n32x32,75\n")
    with pytest.raises(ConfigError, match=r"a\.csv: expected a csv with the columns block, ratio, mode, top1, got none of ratio, mode"):
        memory_movement.accuracies(tmp_path / "a.csv")
    with pytest.raises(ConfigError, match=r"--accuracy: expected rows of runs that have a block, got no file .*none\.csv"):
        memory_movement.accuracies(tmp_path / "none.csv")
    for text in ("", "block,ratio,mode,top1\n", "block,ratio,mode,top1\n,,masked,80\n"):  # no run has ended, or dense ones alone
        (tmp_path / "a.csv").write_text(text)
        with pytest.raises(ConfigError, match=r"--accuracy: expected rows of runs that have a block, got none in .*a\.csv"):
            memory_movement.accuracies(tmp_path / "a.csv")


def test_masked_elements():
    rows = {(r["block"], r["ratio"]): r for r in masked_elements.cells()}
    assert len(rows) == 27 and all(r["formula"] == r["ours"] for r in rows.values())
    assert [rows[block, "80%"]["achieved"] for block in ("2x2", "32x32", "64x64")] == ["80.0%", "75.0%", "66.7%"]
    assert rows["64x64", "20%"]["ours"] == "0"


def test_flops():
    rows = {(r["block"], r["ratio"]): r for r in flops.cells((0.3, 0.8))}
    assert len(rows) == 6 and all(r["formula"] == r["ours"] for r in rows.values())
    for (_, ratio), r in rows.items():
        target = 23_987_456 - 23_592_960 * int(ratio.rstrip("%")) // 100
        assert (r["dense"], r["adjusted_target"], r["saved_target"]) == (23_987_456, target, 23_987_456 - target)
    assert [rows[block, "80%"]["fewer_ours"] for block in ("2x2", "32x32", "64x64")] == ["4.69", "3.81", "2.90"]
    assert rows["2x2", "80%"]["fewer_target"] == "4.69"


def test_a_cell_can_differ():
    good, rounded, bad = (side_by_side.row({}, value, value, "5.00", unit="") for value in (5, 5.004, 5.006))
    assert [r["status"] for r in (good, rounded, bad)] == ["agrees", "agrees", "differs"]
    assert side_by_side.row({}, 5, 6, "5.00", unit="")["status"] == "differs"
    assert [side_by_side.row({}, v, v, "100", unit="", within_percent=0.7)["status"] for v in (100.69, 100.71)] == ["agrees", "differs"]
    assert side_by_side.tally([good, bad], "so") == "1 of 2 published cells agree (so); formula and ours are the same in 2 of 2"


def test_out_that_cannot_be_written(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit, match="2"):
        side_by_side.save(tmp_path / "file", "table", [{"a": 1}])
    assert re.search(r"--out: cannot write .*table.csv: .* Name a folder that can be written to", capsys.readouterr().err)
    with pytest.raises(SystemExit, match="2"):
        side_by_side.options("", ["--out", str(tmp_path / "file")])  # before anything is computed
    assert re.search("error: --out: expected a folder to write to, got .*file: .* is no folder", capsys.readouterr().err)


def test_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    side_by_side.save(tmp_path, "table", [{"a": 1}], draw=lambda: pytest.fail("drawn"))
    assert "no table.png: matplotlib cannot be imported: import of matplotlib halted" in capsys.readouterr().out
    assert [p.name for p in tmp_path.iterdir()] == ["table.csv"]


@pytest.mark.slow
def test_runs_from_any_folder(tmp_path):
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    script = ROOT / "examples" / "thesis" / "barley_table_2.py"
    done = subprocess.run([sys.executable, str(script), "--out", "here"], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.rstrip().split("\n")[-1].startswith("48 of 48 published cells agree")
    assert not done.stderr and (tmp_path / "here" / "barley_table_2.csv").exists()
