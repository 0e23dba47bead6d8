"""Measurements beside an analysis: several after each other, kernels in no range, and models without ops."""

import pytest
import torch
from torch import nn

import fxmask
from fxmask.errors import ConfigError

HEADER = '"ID","Process ID","Kernel Name","NVTX Push/Pop_Range","gpu__time_duration.sum","dram__bytes_read.sum","dram__bytes_write.sum"'
UNITS = '"","","","","ns","byte","byte"'


class Net(nn.Module):
    """A ReLU is the model's own op, in no module below it."""

    def __init__(self):
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(16, 16), nn.Linear(16, 16)

    def forward(self, x):
        return self.fc2(torch.relu(self.fc1(x)))


@pytest.fixture
def report():
    return fxmask.analyze(Net(), torch.randn(4, 16), device="h100-sxm")


@pytest.fixture
def csv(tmp_path):
    """A function that writes an export of Nsight Compute: of each kernel its NVTX range and its ns."""

    def write(*kernels):
        cells = [f'"0 ""<default domain>:{name}:none:none:none:none:none:none"""' if name else '""' for name, _ in kernels]
        lines = [f'"{i}","1","k",{cell},"{ns}","1000","1000"' for i, (cell, (_, ns)) in enumerate(zip(cells, kernels, strict=True))]
        (tmp_path / "n.csv").write_text("\n".join([HEADER, UNITS, *lines, ""]))
        return tmp_path / "n.csv"

    return write


def test_kernels_outside_of_any_range_are_no_ops_of_the_model(report, csv):
    report.attach_measurements(ncu_csv=csv(("", 5_000_000), ("fc1", 5000), ("", 7)))
    (row,) = report.tables["measured"]
    assert (row["name"], row["t_meas_us"], row["launches"]) == ("fc1", 5.0, 1)
    assert report.notes[-1] == "Kernels of the csv outside of any NVTX range, which are in no row: 2."
    assert not any("t_meas_us" in r for r in report.tables["roofline"] if not r["module"])
    report.attach_measurements(ncu_csv=csv(("fc2", 5000)))
    assert sum("outside of any NVTX range" in note for note in report.notes) == 1


def test_times_of_the_model_itself_are_its_own_ops(report):
    report.attach_measurements(timings={"": 1e-3})
    (row,) = report.tables["measured"]
    assert (row["name"], row["t_meas_us"]) == ("", 1000) and not any("NVTX" in note for note in report.notes)


def test_a_csv_without_ranges_names_nothing(report, csv):
    with pytest.raises(ConfigError, match="measurements are named by no NVTX range: expected nodes or modules of this analysis, such as"):
        report.attach_measurements(ncu_csv=csv(("", 5)))
    assert "measured" not in report.tables


def test_measurements_add_up(report, csv):
    report.attach_measurements(timings={"fc1": 1e-5, "fc2": 4e-5})
    report.attach_measurements(timings={"fc2": 2e-5})
    report.attach_measurements(ncu_csv=csv(("fc1", 5000)))
    rows = {r["name"]: r for r in report.tables["measured"]}
    assert list(rows) == ["fc1", "fc2"] and [r["t_meas_us"] for r in rows.values()] == [5.0, 20.0]
    assert rows["fc1"]["bytes_meas"] == 2000 and "bytes_meas" not in rows["fc2"]
    assert not {"l2_bytes", "l1_hit_rate", "l2_hit_rate"} & {*rows["fc1"], *rows["fc2"]}  # this csv has none: absent, and not 0


def test_an_analysis_without_rows():
    report = fxmask.analyze(nn.Identity(), torch.randn(4), device="h100-sxm")
    with pytest.raises(ConfigError, match=r"measurements are named a: expected nodes or modules of this analysis, which has none\."):
        report.attach_measurements(timings={"a": 1.0})


@pytest.mark.parametrize("name", ["blocks.1", "blocks.1/fwd", "blocks.1:addmm"])
def test_a_name_means_its_own_rows(name):
    model = nn.Sequential()
    model.blocks = nn.Sequential(*(nn.Linear(16, 16) for _ in range(11)))  # blocks.10 begins as blocks.1 does
    report = fxmask.analyze(model, torch.randn(4, 16), device="h100-sxm")
    report.attach_measurements(timings={name: 1e-3}, energy={"j_per_step": 2.5})
    own = [r for r in report.tables["roofline"] if name in (r["module"], r["node"], f"{r['module']}/{r['phase']}")]
    least, flop = sum(r["t_min_us"] for r in own), sum(r["flop"] for r in own)
    moved = sum(r["bytes_min"] for r in report.tables["nodes"] if name in (r["module"], r["node"], f"{r['module']}/{r['phase']}"))
    (row,) = report.tables["measured"]
    assert (row["rows"], row["flop"], row["bytes_min"], row["t_min_us"]) == (len(own), flop, moved, least) and flop and moved
    assert row["roof_pct"] == pytest.approx(least / 10) and row["pred_err"] == pytest.approx(least / 1000 - 1)
    assert row["tflops_meas"] == pytest.approx(flop / 1e9) and row["gbps_min_meas"] == pytest.approx(moved / 1e6)
    assert report.tables["energy"] == [{"j_per_step": 2.5}]
    assert [r for r in report.tables["roofline"] if "t_meas_us" in r] == (own if len(own) == 1 else [])


def test_measured_bytes_stand_beside_the_estimate_of_the_same_rows(report, csv):
    report.attach_measurements(ncu_csv=csv(("fc2", 5000)))
    (row,) = report.tables["measured"]
    assert (row["bytes_meas"], row["bytes_dram_est"]) == (2000, sum(r["bytes_dram_est"] for r in report.tables["traffic"] if r["module"] == "fc2"))
