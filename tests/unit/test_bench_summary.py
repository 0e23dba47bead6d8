"""What is read off the rows of a benchmark: crossovers, goals, refresh columns."""

from pathlib import Path

import pytest

from fxmask.bench import compare, goals, summary, table

ROOT = Path(__file__).resolve().parents[2]



def synthetic(provider, ratio, x, op="forward", block="64", shape=("8192", "4096", "4096"), **more):
    row = dict.fromkeys(table.COLUMNS, "")
    m, n, k = shape
    row |= {"op": op, "provider": provider, "M": m, "N": n, "K": k, "dtype": "bf16", "block_n": block, "mask": "random", "gate": "pass", "verdict": "ok"}
    return row | {"ratio": str(ratio), "x_best": str(x), "ms_p50": str(1 / x if x else 1), **more}


def test_crossover():
    rows = [synthetic("fxmask_triton", r, x) for r, x in ((0.5, 1.1), (0.7, 0.9), (0.8, 1.2), (0.9, 2.5))]
    rows += [synthetic("fxmask_triton", r, x, block="16") for r, x in ((0.5, 0.4), (0.9, 0.8))]
    rows += [synthetic("masked_dense", 0.5, 1.0), synthetic("fxmask_triton", 0.95, 9.0, gate="fail")]
    found = {c["block_n"]: c for c in summary.crossovers(rows)}
    assert found["64"]["wins_from"] == 0.8 and found["64"]["x"][0.5] == 1.1  # a win below a loss is none
    assert found["16"]["wins_from"] is None and set(found) == {"16", "64"}
    text = "\n".join(summary.crossover_lines(rows))
    assert "never" in text and "from 0.8" in text and "0.9: 0.80" in text


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = summary.plot([synthetic("fxmask_triton", r, x) for r, x in ((0.5, 0.8), (0.9, 2.5))], tmp_path / "crossover.png")
    assert path.stat().st_size > 1000


def test_goals():
    empty = goals.goal_lines([], {}, {})
    assert all("not measured" in line for line in empty) and {line.split()[0] for line in empty} == {str(n) for n in range(1, 11)}
    rows = [synthetic("fxmask_triton", r, x, block="128", flop_issued="1e12", bytes_min="1e6") for r, x in ((0.5, 1.5), (0.7, 2.0), (0.8, 3.3))]
    line = next(g for g in goals.goal_lines(rows, {}, {"flops_per_s": 8e15, "bytes_per_s": 4e12}) if g.startswith("5 forward 8192x4096->4096 b128"))
    assert "1.50/2.00/3.30/- [+!+-]" in line and "MMA 41 %" in line


def test_refresh_columns():
    row = {"ms_p50": "1.0"}
    compare.add_refreshes(row, [{"ms_p50": "0.5"}, None])
    assert row == {"ms_p50": "1.0"}
    compare.add_refreshes(row, [{"ms_p50": "0.5"}, {"ms_p50": "0.3"}])
    assert (row["ms_refresh_1"], row["ms_refresh_10"], row["ms_refresh_100"]) == ("1.8", "1.08", "1.008")


def test_every_column_is_explained():
    text = (ROOT / "examples/results/README.md").read_text()
    assert [c for c in table.COLUMNS if f"`{c}`" not in text] == []
