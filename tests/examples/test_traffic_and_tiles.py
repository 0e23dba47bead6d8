"""What `traffic.py table` makes of a profile by ncu, and `tile_scan.py --show` of a scan; neither needs a GPU."""

from __future__ import annotations

import csv
import json

import plots
import pytest
from benchmarks import tile_scan, traffic

WHERE = {"git_sha": "abc", "device": "a GPU", "torch": "2", "triton": "3"}
CELLS = (
    {"op": "dx", "shape": "8x4->4", "provider": "dense", "block": "", "ratio": "0", "bytes_min": 800},
    {"op": "dx", "shape": "8x4->4", "provider": "fxmask_triton", "block": "2x2", "ratio": "0.5", "bytes_min": 300, "bytes_req": 640},
)
METRICS = ("lts__t_sectors_srcunit_tex.sum", "dram__bytes_read.sum", "dram__bytes_write.sum", "gpu__time_duration.sum")
KERNELS = (("cell-0", "gemm(float *)", 50, 700, 300, 2000), ("cell-1", "list_kernel", 8, 100, 60, 600), ("cell-1", "sum_kernel", 2, 10, 30, 400))
SCAN = (
    ("dx", "", "", "dense", "", "", 0.4),
    ("dx", 128, 0.8, "256x128x64-w8-s4-tma", "", "", 0.1),  # the library's own
    ("dx", 128, 0.8, "128x128x64-w8-s3", "", "", 0.2),
    ("dw", "", "", "dense", "", "", 0.6),
    ("dw", 64, 0.8, "128x64x64-w8-s3", 128, 2, 0.3),
)


@pytest.fixture
def profile(tmp_path):
    """A csv of ncu in its wide form, and the cells that belong to it."""

    def write(kernels=KERNELS):
        (tmp_path / traffic.CELLS).write_text(json.dumps({"provenance": WHERE, "cells": CELLS}))
        heads = ("ID", "Process ID", "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg", "Kernel Name", *METRICS)
        ranged = ((i, 7, f'7  "<default domain>:{r}:none:none:none:none:none:none" ', *rest) for i, (r, *rest) in enumerate(kernels))
        path = tmp_path / "traffic.ncu.csv"
        with path.open("w", newline="") as f:
            f.write("==PROF== Connected\n")
            csv.writer(f, quoting=csv.QUOTE_ALL).writerows((heads, ("", "", "", "", "sector", "byte", "byte", "ns"), *ranged))
        return ["table", str(path), "--out", str(tmp_path)]

    return write


def test_table_of_traffic(profile, tmp_path, capsys):
    assert traffic.main(profile()) == 0
    dense, ours = plots.read_csv(tmp_path / "traffic.csv")
    assert dense["device"] == "a GPU" and dense["kernels"] == "gemm" and ours["kernels"] == "list_kernel sum_kernel"
    assert [float(ours[c]) for c in traffic.MEASURED] == [320, 200, 1]  # both kernels of its range; 32 bytes a sector
    assert [float(r["l2_of_dense"]) for r in (dense, ours)] == [1, 0.2]
    assert dense["bytes_req"] == dense["l2_of_req"] == "" and float(ours["l2_of_req"]) == 0.5
    said = capsys.readouterr().out
    assert said.startswith("a GPU, torch 2, Triton 3") and "measured / closed form" in said


def test_table_without_a_range_of_every_cell(profile, capsys):
    assert traffic.main(profile(KERNELS[:1])) == 2
    assert "expected an NVTX range cell-1 for each of 2 cells, got 1 ranges" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["{", "[]", "{}", "\udcff"])
def test_table_of_damaged_cells(text, profile, tmp_path, capsys):
    command = profile()
    (tmp_path / traffic.CELLS).write_text(text, errors="surrogateescape")
    assert traffic.main(command) == 2 and f"{traffic.CELLS}: expected what `traffic.py run` writes, got" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "words"),
    [
        ("8192x4096->4096,dx,128", "expected values for shape, op, block, ratio, tile, features, splits, ms in each row, got fewer in row 1."),
        ("", "expected a csv that --csv has written, got no rows."),
        ("8192x4096->4096,dx,128,0.8,a,,,many", "expected a number above 0 for ms in each row, got 'many'."),
    ],
)
def test_table_of_a_scan_that_was_cut_off(row, words, tmp_path, capsys):
    path = tmp_path / "scan.csv"
    path.write_text(f"shape,op,block,ratio,tile,features,splits,ms\n{row}\n")
    assert tile_scan.main(["--show", str(path)]) == 2 and capsys.readouterr().err.startswith(f"tile_scan.py: {path}: {words}\n")


def test_table_of_a_scan_that_has_nothing_dense(tmp_path, capsys):
    (tmp_path / "scan.csv").write_text("shape,op,block,ratio,tile,features,splits,ms\n8192x4096->4096,dx,128,0.8,a,,,3\n")
    with pytest.raises(SystemExit, match="2"):
        tile_scan.main(["--show", str(tmp_path / "scan.csv")])
    assert "scan.csv, where a row lacks or spoils ('8192x4096->4096', 'dx')" in capsys.readouterr().err


def test_table_of_a_scan(tmp_path, capsys):
    path = tmp_path / "scan.csv"
    rows = [("shape", "op", "block", "ratio", "tile", "features", "splits", "ms"), *(("8192x4096->4096", *row) for row in SCAN)]
    path.write_text("\n".join(",".join(map(str, row)) for row in rows) + "\n")
    assert tile_scan.main(["--show", str(path)]) == 0
    dx, dw = (line.split() for line in capsys.readouterr().out.splitlines()[2:])
    assert dx == ["8192x4096->4096", "dx", "128", "0.80", "256x128x64-w8-s4-tma", "4.00", "256x128x64-w8-s4-tma", "4.00"]
    assert dw == ["8192x4096->4096", "dw", "64", "0.80", "128x64x64-w8-s3", "128/2", "2.00", "128x64x64-w8-s4", "-"]  # its own was not scanned
