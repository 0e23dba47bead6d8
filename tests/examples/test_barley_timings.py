"""Figures 4, 5 and 10 of Barley: what is timed and proven right first, where pruning begins to win, csv files that are gone on with, memory by formula."""

from __future__ import annotations

from types import SimpleNamespace

import plots
import pytest
import torch
from benchmarks import pruned_linear, pruned_step
from benchmarks.resumed import measured
from thesis import barley_figure_10, barley_figures_4_5

from fxmask.bench import clock
from fxmask.bench.table import Table

OPERATOR = ["--samples", "3", "--tokens", "12", "--features", "32", "--widths", "24", "--blocks", "8", "16", "--sparsities", "0.5", "0.75", "--repeats", "2"]
OPERATOR += ["--threads", "1", "--device", "cpu"]
EPOCH = ["--model", "tiny", "--batches", "2", "4", "--activations", "0.75:8", "--repeats", "3", "--threads", "1", "--device", "cpu"]


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """No load of other processes, so that a test says itself what is busy."""
    monkeypatch.setattr(clock, "load_average", lambda: 0.5)


def unused(*_, **__):
    raise AssertionError("measured again")


def test_operators(tmp_path, capsys, monkeypatch):
    command = [*OPERATOR, "--out", str(tmp_path)]
    assert barley_figures_4_5.main(command) == 0
    out, path = capsys.readouterr().out, tmp_path / "barley_figures_4_5_cpu.csv"
    rows = plots.read_csv(path)
    assert tuple(rows[0]) == pruned_linear.COLUMNS and len(rows) == 2 * 3 * 3  # blocks, sparsities with dense, parts
    for r in rows:
        share = 1 - float(r["sparsity"])
        formula = {"dW": 1 / share, "forward": 1.0, "both": 2 / (1 + share)}[r["part"]]
        assert float(r["formula_x_dense"]) == pytest.approx(formula, rel=1e-5) and float(r["error"]) < 1e-4
        assert 0 < float(r["ms_p10"]) <= float(r["ms_p50"]) <= float(r["ms_p90"]) and float(r["of_peak_pct"]) > 0 and r["source"] and r["utc"]
        assert r["x_dense"] == "1" or float(r["sparsity"])
        flop = 2 * 3 * 12 * 32 * 24 * (2 if r["part"] == "both" else 1)
        assert float(r["gflops_dense_equivalent"]) == pytest.approx(flop / float(r["ms_p50"]) / 1e6, rel=1e-4)
        assert (r["verdict"] == "ok") == (r["busy"] == "0")
    assert "published 50 % (A30), by formula any sparsity, ours 1x8" in out and "of 8 cells (dW, and forward and dW)" in out
    if (tmp_path / "barley_figures_4_5_cpu.png").exists():
        assert (tmp_path / "barley_figures_4_5_cpu.png").stat().st_size > 10_000
    monkeypatch.setattr(barley_figures_4_5, "group", unused)
    assert barley_figures_4_5.main(command) == 0 and plots.read_csv(path) == rows
    assert capsys.readouterr().out.count("measured already") == 2


def test_a_wrong_dw_is_not_timed(monkeypatch, capsys):
    """The gate sees a dense dW in the place of the pruned one, and the difference of two sparsities."""
    a = barley_figures_4_5_arguments()
    w, x, gy = pruned_linear.data(a, 24)
    grads = {}
    for s in (0.0, 0.5, 0.75):
        forward, dw = pruned_linear.layer(w, x, gy, 8, s)
        grads[s] = dw(forward())
    for s, own in grads.items():
        for other, dw in grads.items():
            assert (pruned_linear.error(x, gy, 8, s, dw) <= pruned_linear.WRONG) == (dw is own), (s, other)
    assert torch.equal(grads[0.0], gy.flatten(0, 1).t() @ x.flatten(0, 1)), "without pruning it is the dense product"
    monkeypatch.setattr(pruned_linear, "error", lambda *_: 0.5)
    assert barley_figures_4_5.main(OPERATOR) == 2
    assert "dW at D = 24, 1x8: expected an error of at most 0.02 of its norm against float64" in capsys.readouterr().err


def barley_figures_4_5_arguments():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(barley_figures_4_5, "run", seen.append)
        barley_figures_4_5.main(OPERATOR)
    return seen[0]


def test_where_pruning_begins_to_win():
    def line(x: dict[float, float]):
        return [{"D": "384", "block": "64", "part": "dW", "sparsity": str(s), "x_dense": str(v)} for s, v in x.items()]

    for x, wins in (({0.1: 1.2, 0.5: 0.9, 0.7: 1.1, 0.9: 3.0}, 0.7), ({0.1: 1.1, 0.9: 2.0}, 0.1), ({0.1: 5.0, 0.9: 1.0}, None), ({0.0: 1.0}, None)):
        assert barley_figures_4_5.wins_from(line({0.0: 1.0, **x}), 384, 64, "dW") == wins
    assert barley_figures_4_5.wins_from(line({0.9: 2.0}), 1536, 64, "dW") is None


def test_wrong_use(capsys):
    for words, text in (
        (["--sparsities", "0"], "--sparsities: expected numbers between 0 and 1"),
        (["--blocks", "5"], "expected a divisor of the 32 features, got 5"),
        (["--widths", "8"], "--widths: expected 16 or more, as narrower layers stay dense, got 8"),
        (["--device", "meta"], "--device: expected cpu, or cuda where there is a GPU, got 'meta'."),
        (["--device", "abacus"], "--device: expected cpu, or cuda where there is a GPU, got 'abacus'."),
    ):
        assert barley_figures_4_5.main([*OPERATOR, *words]) == 2
        assert text in capsys.readouterr().err
    for words, text in (
        (["--activations", "much"], "--activations: expected RATIO:BLOCK such as 0.8:16, got 'much'"),
        (["--activations", "2:16"], "--activations: expected RATIO:BLOCK such as 0.8:16, got '2:16' (ratio"),
    ):
        assert barley_figure_10.main([*EPOCH, *words]) == 2
        assert text in capsys.readouterr().err


@pytest.mark.slow
def test_epochs(tmp_path, capsys, monkeypatch):
    command = [*EPOCH, "--out", str(tmp_path)]
    assert barley_figure_10.main(command) == 0
    out, path = capsys.readouterr().out, tmp_path / "barley_figure_10_cpu.csv"
    rows = plots.read_csv(path)
    assert tuple(rows[0]) == pruned_step.COLUMNS
    assert [(r["batch"], r["activations"]) for r in rows] == [(b, p) for b in ("2", "4") for p in ("dense", "0.75:8")]
    for r in rows:
        saved, known, step = (float(r[c]) for c in ("ours_saved_mib", "formula_saved_mib", "ours_step_mib"))
        assert saved == pytest.approx(known, rel=0.01) and step == pytest.approx(float(r["formula_step_mib"]), rel=0.3) and step > saved
        steps = -(-50_000 // int(r["batch"]))
        assert float(r["epoch_s"]) == pytest.approx(steps * float(r["ms_p50"]) / 1e3, rel=1e-4)
    for dense, pruned in (rows[:2], rows[2:]):
        assert float(pruned["ours_saved_mib"]) < float(dense["ours_saved_mib"]) and float(dense["x_dense"]) == 1
    assert "scaled" in out and "of 2 rows" in out
    monkeypatch.setattr(barley_figure_10, "group", unused)
    assert barley_figure_10.main(command) == 0 and plots.read_csv(path) == rows


def test_an_epoch_at_the_limit_is_scaled_by_the_largest_batch_that_was_measured(monkeypatch):
    monkeypatch.setattr(barley_figure_10, "largest_batch", lambda a, activations: 7)
    rows = [{"activations": "dense", "batch": batch, "images_per_s": speed} for batch, speed in (("8", "10"), ("16", "20"))]
    (found,) = barley_figure_10.at_the_limit(rows, SimpleNamespace(activations=["0.5:8"], memory=1, model="tiny"))
    assert found["epoch, s"] == "2500 scaled"


@pytest.mark.slow
def test_the_largest_batch_fits_and_the_next_does_not():
    seen = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(barley_figure_10, "run", seen.append)
        barley_figure_10.main([*EPOCH, "--memory", "0.01"])
    a = seen[0]
    for activations in ("dense", "0.75:8"):
        n = barley_figure_10.largest_batch(a, activations)
        sizes = [pruned_step.footprint(a, activations, b)["total"] for b in (n, n + 1)]
        assert sizes[0] <= 0.01 * 2**30 < sizes[1], (activations, n, sizes)
    a.memory = 1e-6
    assert barley_figure_10.largest_batch(a, "dense") == 0


@pytest.mark.parametrize(("script", "options"), [(barley_figures_4_5, OPERATOR), (barley_figure_10, EPOCH)], ids=["4 and 5", "10"])
def test_a_folder_that_cannot_be_made_is_said_first(tmp_path, capsys, script, options):
    (tmp_path / "taken").touch()
    assert script.main([*options, "--out", str(tmp_path / "taken" / "out")]) == 2
    out, err = capsys.readouterr()
    assert not out and f"the csv cannot be written: Not a directory.\n  where: {tmp_path / 'taken' / 'out'}\n" in err


def test_rows_that_need_not_be_measured_again(tmp_path):
    table = Table(tmp_path / "t.csv", ("block", "ms", "busy", "verdict", "device"), ("block",))
    table.extend([{"block": "8", "ms": "1", "busy": "1", "verdict": "busy", "device": "a"}, {"block": "16", "ms": "2", "busy": "0", "device": "a"}])
    one, two = {"block": "8", "device": "a"}, {"block": "16", "device": "a"}
    assert [r["ms"] for r in measured(table, [two, one]) or ()] == ["2", "1"]
    assert measured(table, [one], again=True) is None and measured(table, [two], again=True) and measured(None, [one]) is None
    assert measured(table, [one, {"block": "8", "device": "b"}]) is None, "another machine's row is none"
    table.extend([{"block": "8", "ms": "3", "busy": "0", "device": "a"}])
    assert [r["ms"] for r in measured(table, [one], again=True) or ()] == ["3"], "the latest row holds"
