"""The benchmark of block dropout: rows for every rate and contender, appended."""

import csv

from benchmarks import block_dropout


def test_rows_of_all_contenders(tmp_path, capsys):
    args = ["--tokens", "64", "--features", "64", "--block", "32", "--repeats", "2", "--rates", "0", "0.5", "--device", "cpu", "--csv", str(tmp_path / "t.csv")]
    assert block_dropout.main(args) == 0 and block_dropout.main(args) == 0
    with (tmp_path / "t.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 4 and {r["p"] for r in rows} == {"0.0", "0.5"} and all(float(r["ms"]) > 0 for r in rows)
    dense = next(r for r in rows if r["contender"] == "dense")
    assert float(dense["gflops_dense_equivalent"]) > 0 and dense["x_dense"] == "1" and "fused" in capsys.readouterr().out
