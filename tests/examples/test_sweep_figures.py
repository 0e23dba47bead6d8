"""The figures of a sweep, of which a part has ended."""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from thesis import sweep, sweep_checks, sweep_figures, sweep_file, sweep_results

SWEEPS = Path(__file__).parents[2] / "examples" / "thesis" / "sweeps"


@pytest.fixture(scope="module")
def part():
    """Four of 342 runs, two of them 32x32 at 80 %."""
    pytest.importorskip("matplotlib")
    jobs = sweep_file.read(SWEEPS / "thesis_grid.yaml").jobs
    accuracy = {"32x32-0.8-masked-seed0": 75.19, "32x32-0.8-unmasked-seed0": 10.0, "1x1-0.1-masked-seed0": 80.0, "64x64-0.8-masked-seed0": 71.0}
    runs = []
    for job in jobs:
        if job.name in accuracy:
            log = [{"epoch": str(i), "top1": str(accuracy[job.name] * i / 200), "train_loss": "1.5", "loaded": "1"} for i in range(1, 201)]
            runs.append(sweep_results.Ended(job, {**vars(job.namespace()), "steps": 391}, log, None))
    return runs, jobs


def test_heatmap_of_a_part(part):
    runs, jobs = part
    modes = list(sweep_figures.modes_of(jobs))
    assert [(mode, len(cells)) for mode, _, cells in modes] == [("masked", 171), ("unmasked", 171)]
    figure = sweep_figures.heatmap(runs, jobs, *modes[0])
    axes = figure.axes[0]
    assert {text.get_text() for text in axes.texts} == {"75.2 %\n278", "80.0 %\n318.3", "71.0 %\n282.5"}
    values = axes.images[0].get_array().filled(math.nan).tolist()
    assert (len(values), len(values[0])) == (19, 9) and sum(not math.isnan(v) for line in values for v in line) == 3
    blocks = [label.get_text() for label in axes.get_yticklabels()]
    assert values[blocks.index("32x32")][7] == 75.19 and values[0][0] == 80.0
    assert "4 of 342 runs of the sweep have ended, 3 of 171 cells" in axes.get_title()
    empty = sweep_figures.heatmap([], jobs, *modes[0])
    assert not empty.axes[0].texts and "0 of 342" in empty.axes[0].get_title()


def test_curves(part):
    """Figure 6.4: a curve a block and mode at 80 %, and nothing of the other ratios."""
    runs, jobs = part
    masked, unmasked = sweep_figures.curves(runs, jobs, list(sweep_figures.modes_of(jobs)), 0.8).axes
    assert {line.get_label(): line.get_ydata()[-1] for line in masked.lines} == {"32x32": 75.19, "64x64": 71.0}
    assert [line.get_label() for line in unmasked.lines] == ["32x32"] and "2 of 19 blocks at 80%" in masked.get_title()
    same = {line.get_label(): line.get_color() for line in masked.lines}
    assert unmasked.lines[0].get_color() == same["32x32"] != same["64x64"]


def test_seeds_of_a_cell_are_averaged(part):
    """In the curves at every epoch, as in the heat map."""
    runs, jobs = part
    run = next(run for run in runs if run.job.name == "64x64-0.8-masked-seed0")
    other = replace(run, log=[{**row, "top1": str(float(row["top1"]) + 2)} for row in run.log])
    modes = list(sweep_figures.modes_of(jobs))
    (line,) = sweep_figures.curves([run, other], jobs, modes, 0.8).axes[0].lines
    assert line.get_ydata()[0] == pytest.approx(71 / 200 + 1) and line.get_ydata()[-1] == 72
    (text,) = sweep_figures.heatmap([run, other], jobs, *modes[0]).axes[0].texts
    assert text.get_text().startswith("72.0 %")


def test_files(part, tmp_path):
    runs, jobs = part
    names = {path.name for path in sweep_figures.draw(runs, jobs, tmp_path)}
    singles = {f"figure_6_5_32x32-0.8-{mode}-seed0.png" for mode in ("masked", "unmasked")}
    assert names == {"figure_6_1_masked.png", "figure_6_2_unmasked.png", "figure_6_4.png", *singles} == {p.name for p in tmp_path.iterdir()}
    figure = sweep_figures.single(runs[0])
    assert [axes.lines[0].get_color() for axes in figure.axes] == ["tab:green", "tab:blue"]


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"ratio": 0.85}, r"--ratio: expected one of the sweep's, 0\.1, .*0\.9, got 0\.85"),
        ({"names": ["nothere"]}, "--figure-of: expected runs that have ended, such as 1x1-0.1-masked-seed0, .*, got nothere"),
        ({"names": ["2x2-0.1-masked-seed0"]}, "--figure-of: expected runs that have ended, .*, got 2x2-0.1-masked-seed0"),
    ],
)
def test_figures_of_nothing(asked, message, part, tmp_path):
    with pytest.raises(sweep_checks.SweepError, match=message):
        sweep_figures.draw(*part, tmp_path, **asked)
    assert not list(tmp_path.iterdir())


def test_tables_alone_without_matplotlib(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert sweep.main(["figures", str(SWEEPS / "small.yaml"), "--out", str(tmp_path)]) == 0
    assert "no figures: matplotlib cannot be imported: import of matplotlib halted" in capsys.readouterr().out
    assert {path.name for path in tmp_path.glob("*.csv")} == {"masked_accuracy.csv", "loaded_elements.csv"} and not list(tmp_path.glob("*.png"))
