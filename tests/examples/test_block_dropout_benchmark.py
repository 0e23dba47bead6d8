"""The benchmark of block dropout: rows for every rate and contender, appended."""

import csv
from pathlib import Path

import pytest
import torch
from benchmarks import block_dropout

from fxmask.bench.provenance import provenance


def test_rows_of_all_contenders(tmp_path, capsys):
    args = ["--tokens", "64", "--features", "64", "--block", "32", "--repeats", "2", "--rates", "0", "0.5", "--device", "cpu", "--csv", str(tmp_path / "t.csv")]
    assert block_dropout.main(args) == 0 and block_dropout.main(args) == 0
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 5 and {r["p"] for r in rows} == {"0.0", "0.5"} and all(float(r["ms"]) > 0 for r in rows)
    header = (tmp_path / "t.csv").read_text().splitlines()[0].split(",")
    assert len(set(header)) == len(header) == len(rows[0]) and {r["device"] for r in rows} == {provenance(torch.device("cpu"))["device"]}
    dense = next(r for r in rows if r["contender"] == "dense")
    assert float(dense["gflops_dense_equivalent"]) == pytest.approx(6 * 64 * 64**2 / float(dense["ms"]) / 1e6, rel=2e-3), "forward, dX and dW"
    assert dense["x_dense"] == "1" and "its mask takes" in capsys.readouterr().out


def test_the_first_two_turns_warm_up():
    seconds = iter((9.0, 9.0, 1.0, 2.0, 4.0))
    assert block_dropout.medians(lambda call: next(seconds), {"a": lambda: None}, 3) == {"a": 2000.0}


def refused(args, words, capsys):
    assert block_dropout.main(["--device", "cpu", *args]) == 2 and words in capsys.readouterr().err


WRONG = {
    "rates": (["--rates", "0.5", "1"], "expected a number in [0, 1), got 1.0"),
    "block": (["--block", "0"], "two positive ints (tokens, features)"),
    "dtype": (["--impl", "cpu", "--dtype", "float16", "--tokens", "8", "--features", "8", "--rates", "0.5"], "expected float32 or float64"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case, capsys):
    refused(*WRONG[case], capsys)


def test_a_csv_with_other_columns_is_refused_before_anything_is_measured(tmp_path, capsys):
    path = tmp_path / "t.csv"
    path.write_text("p,ms\n0.5,1\n")
    refused(["--csv", str(path)], "expected the columns", capsys)
    assert path.read_text() == "p,ms\n0.5,1\n"


def test_the_recorded_rows_fit_the_command():
    """Appending to them goes on under the same header."""
    path = Path(__file__).parents[2] / "examples/results/cpu/block_dropout.csv"
    header = path.read_text().splitlines()[0].split(",")
    assert header[-len(block_dropout.MEASURED) :] == list(block_dropout.MEASURED) and len(set(header)) == len(header)
