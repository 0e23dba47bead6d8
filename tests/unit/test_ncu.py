"""Exports of Nsight Compute: both formats, units, ranges, sums, and what is no export."""

import pytest

from fxmask.analysis.ncu import COLUMNS, COMMAND, read_ncu_csv, sum_by_range
from fxmask.errors import ConfigError

PUSHED = "thread Domain:Push/Pop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
STARTED = "Id:Domain:Start/Stop_Range:PL_Type:PL_Value:CLR_Type:Color:Msg_Type:Msg"
TIME, READ, WRITTEN, L2, L1, L1_HITS, L2_HITS = COLUMNS


def line(*cells):
    return ",".join('"' + str(c).replace('"', '""') + '"' for c in cells) + "\n"


def nvtx(*names):
    return "7  " + "  ".join(f'"<default domain>:{n}:none:none:none:none:none:none"' for n in names) if names else ""


def long(*rows, ranges=False):
    """Rows (id, kernel, metric, unit, value), or with ranges (id, kernel, names of ranges, metric, unit, value), as `ncu --csv` prints them."""
    head = line("ID", "Process ID", *([PUSHED] if ranges else []), "Kernel Name", "Device", "Section Name", "Metric Name", "Metric Unit", "Metric Value")
    if ranges:
        return head + "".join(line(i, 41, nvtx(*names), kernel, 0, "Command line profiler metrics", *rest) for i, kernel, names, *rest in rows)
    return head + "".join(line(i, 41, kernel, 0, "Command line profiler metrics", *rest) for i, kernel, *rest in rows)


def wide(units, *rows, ranges=PUSHED):
    """Rows (id, kernel, names of ranges, values of `units`' metrics), as `ncu --csv --page raw` prints them."""
    head = line("ID", "Process ID", "Process Name", ranges, "Kernel Name", "CC", *units) + line("", "", "", "", "", "", *units.values())
    return head + "".join(line(i, 41, "python3", nvtx(*names), kernel, "9.0", *values) for i, kernel, names, *values in rows)


@pytest.fixture
def read(tmp_path):
    def run(text, encoding="utf-8"):
        (tmp_path / "step.csv").write_bytes(text.encode(encoding))
        return read_ncu_csv(tmp_path / "step.csv")

    return run


def test_the_long_format(read):
    text = "==PROF== Connected to process 41 (/usr/bin/python3)\nloss 0.5, 0.25\n" + long(
        (0, 'gemm<128, 64>(int, "x")', TIME, "usecond", "1,041.50"),
        (0, 'gemm<128, 64>(int, "x")', READ, "Mbyte", "2.5"),
        (0, 'gemm<128, 64>(int, "x")', WRITTEN, "Kbyte", "640"),
        (0, 'gemm<128, 64>(int, "x")', L2, "sector", "100,000"),
        (0, 'gemm<128, 64>(int, "x")', L1_HITS, "%", "12.5"),
        (0, 'gemm<128, 64>(int, "x")', "sm__cycles_active.avg", "cycle", "99"),
        (1, "copy", TIME, "nsecond", "2,000"),
        (1, "copy", L2_HITS, "%", "n/a"),
    )
    rows = read(text + "==PROF== Disconnected from process 41\n")
    assert rows[0] == {
        "id": 0,
        "kernel": 'gemm<128, 64>(int, "x")',
        "range": "",
        "time_us": 1041.5,
        "dram_read_bytes": 2.5e6,
        "dram_write_bytes": 640e3,
        "l2_bytes": 3.2e6,
        "l1_hit_rate": 12.5,
        "gbps_meas": pytest.approx(3.14e6 / 1041.5e-6 / 1e9),
    }
    assert rows[1] == {"id": 1, "kernel": "copy", "range": "", "time_us": 2.0}  # n/a is absent, and so is what was not collected


def test_what_the_program_prints_is_left_out_where_it_has_as_many_cells(read):
    text = long((0, "gemm", TIME, "us", "3"))
    cells = len(text.splitlines()[0].split('","'))
    printed = ",".join(["loss 0.5", *["x"] * (cells - 1)]) + "\n"
    rows = read(text + printed + line(1, 41, "copy", 0, "-", TIME, "us", "4"))
    assert [(r["id"], r["kernel"], r["time_us"]) for r in rows] == [(0, "gemm", 3.0), (1, "copy", 4.0)]


def test_the_wide_format(read):
    units = {TIME: "ns", READ: "byte", WRITTEN: "Gbyte", L2: "sector", L2_HITS: "%", "launch__grid_size": ""}
    rows = read(wide(units, (3, "a", (), 1500, 4096, 0.5, 8, 75.25, 64), (4, "b", ("step", "blocks.0.fc1"), 1000, "", 0, 0, "nan", 64)))
    assert rows[0]["gbps_meas"] == pytest.approx((4096 + 5e8) / 1500)
    assert {k: rows[0][k] for k in ("id", "kernel", "time_us", "dram_read_bytes", "dram_write_bytes", "l2_bytes", "l2_hit_rate")} == {
        "id": 3,
        "kernel": "a",
        "time_us": 1.5,
        "dram_read_bytes": 4096,
        "dram_write_bytes": 5e8,
        "l2_bytes": 256,
        "l2_hit_rate": 75.25,
    }
    assert rows[1] == {"id": 4, "kernel": "b", "range": "blocks.0.fc1", "time_us": 1, "dram_write_bytes": 0, "l2_bytes": 0}  # measured zeros stay


@pytest.mark.parametrize("order", [1, -1])
def test_a_metric_stands_before_what_pages_call_it(read, order):
    said = [(0, "k", TIME, "usecond", "3"), (0, "k", "Duration", "usecond", "2.97"), (0, "k", L2_HITS, "%", "50.25"), (0, "k", "L2 Hit Rate", "%", "50")]
    (row,) = read(long(*said[::order]))
    assert (row["time_us"], row["l2_hit_rate"]) == (3.0, 50.25)


def test_both_formats_say_the_same(read):
    flat = read(wide({TIME: "us", READ: "Mbyte"}, (0, "k", ("fc",), 5, 2), (1, "k", ("fc",), 7, 3)))
    assert flat == read(
        long(*[(i, "k", ("fc",), m, u, v) for i, t, b in ((0, 5, 2), (1, 7, 3)) for m, u, v in ((TIME, "us", t), (READ, "Mbyte", b))], ranges=True)
    )


@pytest.mark.parametrize(
    ("unit", "us"), [("nsecond", 1e-3), ("ns", 1e-3), ("usecond", 1), ("us", 1), ("msecond", 1e3), ("ms", 1e3), ("second", 1e6), ("s", 1e6)]
)
def test_units_of_time(read, unit, us):
    assert read(long((0, "k", TIME, unit, "3")))[0]["time_us"] == pytest.approx(3 * us)


@pytest.mark.parametrize(("unit", "size"), [("byte", 1), ("Kbyte", 1e3), ("Mbyte", 1e6), ("Gbyte", 1e9), ("Tbyte", 1e12), ("MB", 1e6)])
def test_units_of_bytes(read, unit, size):
    assert read(long((0, "k", READ, unit, "3.5")))[0]["dram_read_bytes"] == round(3.5 * size)


@pytest.mark.parametrize(("metric", "unit"), [(READ, "sector"), (READ, "Mbit"), (TIME, "cycle"), (L2, "byte"), (READ, ""), (READ, "Mbyte/second")])
def test_a_wrong_unit_is_not_scaled(read, metric, unit):
    with pytest.raises(ConfigError, match=rf"unknown unit of {COLUMNS[metric]}: expected .*, got '{unit}'.\n  where: .*step.csv, line 2\n  fix: .*base"):
        read(long((0, "k", metric, unit, "3")))


def test_pages_of_sections(read):
    rows = read(
        long(
            (0, "k", "Duration", "us", "10"),
            (0, "k", "Memory Throughput", "%", "55.5"),
            (0, "k", "Memory Throughput", "Gbyte/second", "800"),
            (0, "k", "L1/TEX Hit Rate", "%", "40"),
            (0, "k", "L2 Hit Rate", "%", "60"),
        )
    )
    assert rows == [{"id": 0, "kernel": "k", "range": "", "time_us": 10, "gbps_meas": pytest.approx(800), "l1_hit_rate": 40, "l2_hit_rate": 60}]


@pytest.mark.parametrize(
    ("cell", "name"),
    [
        (nvtx("fc1"), "fc1"),
        (nvtx("step", "blocks.0:fwd"), "blocks.0:fwd"),  # innermost; a colon of its own
        ('7  "<default domain>:fc1:none"', "fc1"),
        ("", ""),
    ],
)
@pytest.mark.parametrize("column", [PUSHED, STARTED])
def test_ranges(read, cell, name, column):
    head = line("ID", column, "Kernel Name", "Metric Name", "Metric Unit", "Metric Value")
    assert read(head + line(0, cell, "k", TIME, "us", 1))[0]["range"] == name


def test_two_exports_and_two_processes_in_a_file(read):
    one = long((0, "a", TIME, "us", 1))
    assert [r["kernel"] for r in read(one + one.replace('"a"', '"b"') + line(0, 42, "c", 0, "", TIME, "us", 3))] == ["a", "b", "c"]


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_what_windows_writes(read, encoding):
    assert read(long((0, "k", TIME, "us", 4)).replace("\n", "\r\n"), encoding)[0]["time_us"] == 4


def test_sums_by_range(read):
    units = {TIME: "us", READ: "byte", WRITTEN: "byte", L2: "sector", L2_HITS: "%", L1_HITS: "%"}
    rows = read(
        wide(
            units,
            (0, "gemm", ("fc1",), 10, 4000, 1000, 300, 80, 20),
            (1, "copy", ("fc2",), 2, 500, 500, 10, 50, 10),
            (2, "gelu", ("fc1",), 30, 2000, 3000, 100, 40, 60),
            (3, "zero", (), 1, 0, 64, 2, 0, 0),
        )
    )
    sums = sum_by_range(rows)
    assert list(sums) == ["fc1", "fc2", ""]
    assert sums["fc1"] == {
        "range": "fc1",
        "launches": 2,
        "kernels": ["gemm", "gelu"],
        "time_us": 40,
        "dram_read_bytes": 6000,
        "dram_write_bytes": 4000,
        "l2_bytes": 400 * 32,
        "l1_bytes": None,
        "l1_hit_rate": None,  # 20 % and 60 % of unknown numbers of sectors
        "l2_hit_rate": pytest.approx(0.75 * 80 + 0.25 * 40),
        "gbps_meas": pytest.approx(10_000 / 40e-6 / 1e9),
    }
    assert (sums["fc2"]["l1_hit_rate"], sums[""]["dram_read_bytes"]) == (10, 0)
    assert sum(s["time_us"] for s in sums.values()) == sum(r["time_us"] for r in rows)


def test_a_part_is_no_sum(read):
    sums = sum_by_range(read(long((0, "a", TIME, "us", 1), (0, "a", READ, "byte", 5), (1, "b", TIME, "us", 2), (1, "b", READ, "byte", "n/a"))))
    assert (sums[""]["time_us"], sums[""]["dram_read_bytes"], sums[""]["gbps_meas"]) == (3, None, None)


def test_no_such_file(tmp_path):
    for path in (tmp_path / "none.csv", tmp_path):
        with pytest.raises(
            ConfigError, match=r"no csv of Nsight Compute there: expected a file that can be read, got '.*' \(.+\).\n  fix: ncu --csv .*dram__bytes_read"
        ):
            read_ncu_csv(path)


SUMMARY = line("Process ID", "Kernel Name", "Invocations", "Metric Name", "Metric Unit", "Minimum", "Maximum", "Average")


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("", "no table of Nsight Compute"),
        ("==ERROR== ERR_NVGPUCTRPERM\n", "no table of Nsight Compute"),
        (SUMMARY + line(1, "k", 2, "Duration", "us", 1, 3, 2), "no table of Nsight Compute"),  # one row for all launches
        (long(), "no kernels in this csv"),
        (wide({TIME: "us"}), "no kernels in this csv"),
        (long((0, "k", "sm__cycles_active.avg", "cycle", 9)), "none of the metrics that are used"),
        (long((0, "k", TIME, "us", 9)) + '"1","41","k","0","Comm', "a row is cut off: expected 8 cells, got 5"),
    ],
    ids=["empty", "refused", "summary", "no-rows", "no-wide-rows", "other-metrics", "cut-off"],
)
def test_no_export(read, text, error):
    with pytest.raises(ConfigError, match=error) as raised:
        read(text)
    assert "step.csv" in str(raised.value) and COMMAND in str(raised.value)
