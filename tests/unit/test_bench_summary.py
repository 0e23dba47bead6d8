"""What is read off the rows of a benchmark: crossovers, goals, refresh columns."""

from pathlib import Path

import pytest
import torch

from fxmask.bench import cells, compare, device_stages, findings, goals, gpu, summary, sweeps, table
from fxmask.bench.dropping import DROPOUT
from fxmask.bench.nm import NM_PART
from fxmask.bench.parts import PARTS
from fxmask.bench.probes import BANDWIDTH, TENSORCORE
from fxmask.bench.pruning import PRUNING
from fxmask.bench.refreshes import METADATA

ROOT = Path(__file__).resolve().parents[2]


def synthetic(provider, ratio, x, op="forward", block="64", shape=("8192", "4096", "4096"), **more):
    row = dict.fromkeys(table.COLUMNS, "")
    m, n, k = shape
    row |= {"op": op, "provider": provider, "M": m, "N": n, "K": k, "dtype": "bf16", "block_n": block, "mask": "random", "gate": "pass", "verdict": "ok"}
    return row | {"ratio": str(ratio), "x_best": str(x), "ms_p50": str(1 / x if x else 1), **more}


def test_crossover():
    rows = [synthetic("fxmask_triton", r, x) for r, x in ((0.5, 1.1), (0.7, 0.9), (0.8, 1.2), (0.9, 2.5))]
    rows += [synthetic("fxmask_triton", r, x, block="16") for r, x in ((0.5, 0.4), (0.9, 0.8))]
    rows += [synthetic("fxmask_triton", r, x, block="32") for r, x in ((0.5, 1.0), (0.9, 1.1))]  # as fast is not faster
    rows += [synthetic("masked_dense", 0.5, 1.0), synthetic("fxmask_triton", 0.95, 9.0, gate="fail")]
    found = {c["block_n"]: c for c in summary.crossovers(rows)}
    assert found["64"]["wins_from"] == 0.8 and found["64"]["x"][0.5] == 1.1  # a win below a loss is none
    assert found["16"]["wins_from"] is None and found["32"]["wins_from"] == 0.9 and set(found) == {"16", "32", "64"}
    text = "\n".join(summary.crossover_lines(rows))
    assert "never" in text and "from 0.8" in text and "0.9: 0.80" in text


def test_plot(tmp_path):
    pytest.importorskip("matplotlib")
    path = summary.plot([synthetic("fxmask_triton", r, x) for r, x in ((0.5, 0.8), (0.9, 2.5))], tmp_path / "crossover.png")
    assert path.stat().st_size > 1000


@pytest.mark.parametrize(("dtype", "worst", "said"), [("bf16", "1e-2", "1.00x"), ("fp32", "4.6e-2", "4.60x")])
def test_goal_of_errors(dtype, worst, said):
    rows = [synthetic("fxmask_triton", 0.5, 1.0, dtype=dtype, max_err=err, base_err="1e-2") for err in ("1e-2", worst)]
    (line,) = [g for g in goals.goal_lines(rows, {}, {}) if g.startswith("3 ")]
    assert f"{said} over 2 cells in {dtype}" in line and f"[{'+' if said == '1.00x' else '!'}]" in line


def test_goals():
    empty = goals.goal_lines([], {}, {})
    assert all("not measured" in line for line in empty) and {line.split()[0] for line in empty} == {str(n) for n in range(1, 11)}
    rows = [synthetic("fxmask_triton", r, x, block="128", flop_issued="1e12", bytes_min="1e6") for r, x in ((0.5, 1.5), (0.7, 2.0), (0.8, 3.3))]
    line = next(g for g in goals.goal_lines(rows, {}, {"flops_per_s": 8e15, "bytes_per_s": 4e12}) if g.startswith("5 forward 8192x4096->4096 b128"))
    assert "1.50/2.00/3.30/- [+!+-]" in line and "MMA 41 %" in line


@pytest.mark.parametrize(("x", "roof", "hit"), [(1.9, "81", "+"), (1.9, "79", "!"), (1.7, "81", "!"), (1.9, "", "!")])
def test_a_goal_of_two_halves(x, roof, hit):
    rows = [synthetic("fxmask_triton", 0.7, x, block="128", shape=goals.VIT_FC1, roof_pct=roof)]
    (line,) = [g for g in goals.goal_lines(rows, {}, {}) if g.startswith("7 ViT fc1 b128")]
    assert f"% of the roof [{hit}]" in line


def test_refresh_columns():
    row = {"ms_p50": "1.0"}
    compare.add_refreshes(row, [{"ms_p50": "0.5"}, None])
    assert row == {"ms_p50": "1.0"}
    compare.add_refreshes(row, [{"ms_p50": "0.5"}, {"ms_p50": "0.3"}])
    assert (row["ms_refresh_1"], row["ms_refresh_10"], row["ms_refresh_100"]) == ("1.8", "1.08", "1.008")


OWN = cells.Cell("forward", "forward", 8192, 4096, 4096, "bf16", (64, 64), 0.8, "random", 0, "fxmask_triton")


@pytest.mark.parametrize(
    ("by", "ran", "ms"), [("fxmask_auto", "forward triton", "0.3"), ("fxmask_auto", "forward masked_dense", "0.1"), ("fxmask_triton", "", "5.2")]
)
def test_lists_are_added_where_kernels_ran(by, ran, ms):
    cell, own = OWN.by(by), dict.fromkeys(table.COLUMNS, "") | {"ms_p50": "1", "ran": ran}
    made = (("block_index", "fxmask_auto", "0.1"), ("block_index", "fxmask_triton", "5"), ("lists", "fxmask_triton", "0.2"), ("lists", "fxmask_reference", "7"))
    rows = [synthetic(by, 0.8, "", op="metadata", phase=phase, block_k="64", ms_p50=t) for phase, by, t in made]
    rows += [r | {"ms_p50": "9"} | other for r in rows for other in ({"dtype": "fp32"}, {"N": "1024"}, {"block_k": "32"})]  # of other weights
    compare.with_refreshes(rows, cell, own)
    assert own["metadata_ms"] == ms


SAME = ("fxmask", "source", "device", "driver", "torch", "triton", "ptxas", "threads")


def baselines(dense, masked):
    """Rows of the two baselines of OWN, by what tells them from one another."""
    made = ((OWN.dense(), dense), (OWN.by("masked_dense"), masked))
    return [dict.fromkeys(table.COLUMNS, "") | table.what(c) | {"gate": "pass", "verdict": "ok", "driver": "1", **times} for c, times in made]


def test_a_row_stands_beside_the_latest_baselines_that_may_be_compared():
    times = [{"ms_p50": "3", "cold_ms_p50": "4"}, {"ms_p50": "2", "cold_ms_p50": "5"}]
    wrong = ({"verdict": "none: load 9 on 2 cores"}, {"gate": "fail"}, *({c: "other"} for c in SAME), {"dtype": "fp16"}, {"M": "1"})
    later = [r | {"ms_p50": "90"} | w for w in wrong for r in baselines(*times)]
    before = baselines({"ms_p50": "70"}, {"ms_p50": "70"})
    own = dict.fromkeys(table.COLUMNS, "") | {"driver": "1", "ms_p50": "1", "cold_ms_p50": "2"}
    compare.with_baselines([*before, *baselines(*times), *later], OWN, own)
    assert (own["x_dense"], own["x_best"], own["cold_x_dense"], own["cold_x_best"]) == ("3", "2", "2", "2")


def test_every_column_is_explained():
    text = (ROOT / "examples/results/README.md").read_text()
    assert [c for c in table.COLUMNS if f"`{c}`" not in text] == []


def test_a_bound_by_the_l2():
    row = synthetic("fxmask_triton", 0.8, 2.0, block="16", block_k="16", flop_issued="1e11", bytes_min="1e8", bytes_req="2e9")  # in 0.5 ms
    ceilings = {"flops_per_s": 8e14, "bytes_per_s": 4e12}
    assert goals.bound(row, ceilings) == "MMA 25 %, L2 asked for 4.0 TB/s"
    rates = {"l2_bytes_per_s_128": 6e12, "l2_bytes_per_s_64": 5.5e12, "l2_bytes_per_s_32": 5e12}
    assert goals.bound(row, ceilings | rates) == "L2 80 %, L2 asked for 4.0 of 5.0 TB/s"  # in rows of 32 bytes
    assert goals.bound(row | {"block_k": "128"}, ceilings | rates) == "L2 67 %, L2 asked for 4.0 of 6.0 TB/s"
    assert goals.bound(row | {"block_k": "128"}, rates) == "ceilings not measured, L2 asked for 4.0 of 6.0 TB/s"
    assert goals.bound(row | {"dtype": "tf32"}, ceilings) == "ceilings not measured, L2 asked for 4.0 TB/s"  # the rate is bf16's


def goal(rows, begin, **given):
    (line,) = [g for g in goals.goal_lines(rows, {}, {}, **given) if g.startswith(begin)]
    return line


def test_a_goal_of_a_step_has_the_refresh_of_every_tenth_step_in_it():
    rows = [synthetic("fxmask_triton", 0.8, 3, op="step", block="128", ms_p50="1", ms_refresh_10="1.5")]
    assert "/ -/-/2.00/- [--!-]" in goal(rows, "6 step 8192x4096->4096 b128")
    assert "not measured" in goal([r | {"ms_refresh_10": ""} for r in rows], "6 step 8192x4096->4096 b128")
    wrong = [r | w for r in rows for w in ({"verdict": "none: load 9 on 2 cores"}, {"gate": "fail"}, {"mask": "rows"}, {"provider": "masked_dense"})]
    assert "2.00" in goal([*rows, *[r | {"x_best": "9"} for r in wrong]], "6 step 8192x4096->4096 b128")


def test_the_worst_case_decides_whether_auto_holds_the_floor():
    rows = [synthetic(by, r, 1, ms_p50=t) for r, own in ((0.5, "1.05"), (0.8, "0.9")) for by, t in (("masked_dense", "1"), ("fxmask_auto", own))]
    assert "1.05x its time at most, over 2 cells [!]" in goal(rows, "9 ") and "0.90x its time at most, over 1 cells [+]" in goal(rows[2:], "9 ")
    assert "not measured" in goal(rows[1::2], "9 ")


@pytest.mark.parametrize(("least", "mark"), [("1.2", "!"), ("1.3", "+")])
def test_the_faster_anchor_and_the_worst_case_decide(least, mark):
    times = {0.5: (("torch_bsr", "3"), ("torch_bsr_s4", "1.5")), 0.8: (("torch_bsr", least), ("torch_bsr_s4", "4")), 0.9: ()}
    rows = [synthetic(by, r, 1, ms_p50=t) for r, others in times.items() for by, t in (*others, ("fxmask_triton", "1"))]
    assert f"/ {float(least):.2f} to 1.50x over 2 cells [{mark}]" in goal(rows, "10 forward b64")


def test_a_refresh_is_the_sum_of_its_parts_where_it_was_not_measured_whole():
    shape, more = ("8192", "14336", "4096"), {"op": "metadata", "block": "128", "block_k": "128"}
    made = (("block_index", "0.03"), ("lists", "0.035"))
    rows = [synthetic("fxmask_triton", 0.8, 1, shape=shape, phase=phase, ms_p50=t, **more) for phase, t in made]
    assert "b128 <= 60 us / 65 us [!]" in goal(rows, "4 refresh 14336x4096 bf16 b128")
    assert "not measured" in goal(rows[:1], "4 refresh 14336x4096 bf16 b128")


def of_part(part, **values):
    return dict.fromkeys(part.columns, "") | {"gate": "pass", "verdict": "ok", "device": "H200"} | values


def test_goals_of_a_refresh():
    def lines(refreshes, rows=()):
        return [g for g in goals.goal_lines(rows, {}, {}, refreshes) if g.startswith("4 ")]

    assert len(lines([])) == 6 and all("not measured" in g for g in lines([]))
    layer = {"scope": "layer", "form": "single", "weights": "1", "N": "14336", "K": "4096", "dtype": "bf16"}
    rows = [of_part(METADATA, **layer, block="128", ms_p50="0.055"), of_part(METADATA, **layer, block="16", ms_p50="0.15")]
    rows += [of_part(METADATA, scope="model", form="group", weights="28", dtype=d, block="16", launches=n) for d, n in (("bf16", "7"), ("fp32", "9"))]
    text = "\n".join(lines(rows))
    assert "b128 <= 60 us / 55 us [+]" in text and "b16 <= 130 us / 150 us [!]" in text and "9 at most, over 2 groups [!]" in text
    steps = [synthetic("fxmask_triton", 0.8, 1, op="step", ms_refresh_10=t) for t in ("1.02", "1.05")]
    assert "4.8 % at most, over 2 cells [!]" in lines([], steps)[-1]


def write(part, out, rows):
    table_of = part.table(out)
    for row in rows:
        table_of.append(row)


def test_findings(tmp_path):
    found = findings.rows_of(tmp_path)
    assert all("not measured" in line for line in findings.finding_lines(found)) and findings.limits(tmp_path, found) == {}
    loads = [("L2", "tma", "128", "4", "6.5"), ("L2", "tma", "128", "2", "7.25"), ("L2", "pointer", "128", "4", "6"), ("L2", "pointer", "32", "4", "4.5")]
    names = ("level", "by", "row_bytes", "programs_per_sm", "tb_per_s")
    rows = [of_part(BANDWIDTH, **dict(zip(names, v, strict=True))) for v in (*loads, ("HBM", "tma", "128", "4", "4.25"))]
    no_times = ({"gate": "fail"}, {"verdict": "none: interpreter"})
    rows += [of_part(BANDWIDTH, **dict(zip(names, ("L2", "tma", "64", "4", "99"), strict=True))) | wrong for wrong in no_times]
    write(BANDWIDTH, tmp_path, [of_part(BANDWIDTH, device="A100", level="L2", by="tma", row_bytes="128", tb_per_s="50"), *rows])
    write(TENSORCORE, tmp_path, [of_part(TENSORCORE, n="16", programs_per_sm=c, tflop_per_s=t) for c, t in (("4", "333.4"), ("1", "200"))])
    group = {"scope": "model", "form": "group", "weights": "28", "dtype": "bf16", "block": "64", "ms_p50": "0.2", "launches": "4", "tb_per_s": "2.5"}
    write(METADATA, tmp_path, [of_part(METADATA, **group)])
    for stage, op in (("tiles", "forward"), ("splits", "dw")):
        table_of = sweeps.table(stage, tmp_path)
        table_of.append(synthetic("dense", 0, "", op=op, block="0"))
        for name, x in (("own", 2.0), ("a", 1.0), ("b", 2.5)):
            table_of.append(synthetic(name, 0.8, x, op=op, block="128"))
        table_of.append(synthetic("c", 0.8, 9.0, op=op, block="128", gate="fail"))
    found = findings.rows_of(tmp_path)
    text = "\n".join(findings.finding_lines(found))
    assert "rows of 128 B: tma 7.25 (2 programs each), pointer 6.00 (4 programs each); rows of 32 B: pointer 4.50" in text and "tma 4.25" in text
    assert "n = 16: 333" in text and "refresh model of 28 weights bf16 b64 group / 200 us, 4 launches, 2.50 TB/s" in text
    for line in ("tiles forward", "splits dw"):
        assert f"{line} b128 at 0.8 / best of 3: b 0.400 ms, 2.50x the speed of the faster baseline; own 0.500 ms (1.25x of it)" in text
    assert findings.limits(tmp_path, found) == {"l2_bytes_per_s_128": 7.25e12, "l2_bytes_per_s_32": 4.5e12}
    (tmp_path / "ceilings.json").write_text('{"flops_per_s": 8e14}')
    assert findings.limits(tmp_path, found) == {"flops_per_s": 8e14, "l2_bytes_per_s_128": 7.25e12, "l2_bytes_per_s_32": 4.5e12}
    closing = "\n".join(gpu.summary([], tmp_path))
    assert "n = 16: 333" in closing and "goal / measured / bound" in closing


@pytest.mark.parametrize("beside", [True, False])
def test_a_speed_beside_a_dense_product_that_was_not_measured_is_none(beside):
    size = {"M": "64", "N": "40", "K": "72"}
    pruned = [of_part(PRUNING, form="triton", N="40", dtype="bf16", block="64", ratio=r, w_ratio="0", ms_p50=t) for r, t in (("0.9", "0.5"), ("0.5", "2"))]
    nm = [of_part(NM_PART, provider="masked_dense", op="step", **size, ms_p50="4")]
    pruned += [r | {"w_ratio": "0.8", "ms_p50": "0.01"} for r in pruned]  # under a weight mask it is another product
    dropped = [of_part(DROPOUT, provider="fxmask_triton", **size, p=p, ms_p50=t) for p, t in (("0.1", "0.9"), ("0.2", "2"), ("0.5", "0.5"))]
    if beside:
        pruned.insert(0, of_part(PRUNING, form="dense", N="40", dtype="bf16", ms_p50="1"))
        nm.insert(0, of_part(NM_PART, provider="dense", op="step", **size, ms_p50="1"))
        dropped.insert(0, of_part(DROPOUT, provider="dense", **size, p="0", ms_p50="1"))
    found = dict.fromkeys([*PARTS, *sweeps.OPS], ()) | {"pruning": pruned, "nm": nm, "dropout": dropped}
    text = "\n".join(findings.finding_lines(found))
    assert f"b = 64 / speed of the dense product's at {'0.5: 0.50x, 0.9: 2.00x' if beside else 'not measured'}\n" in text
    assert text.endswith(f"2:4 step 64x72->40 / speed of the dense layer's: {'masked_dense 0.25x' if beside else 'not measured'}")
    assert f"dropout 64x72->40 p = 0.5 / 0.5000 ms, {'2.00x the speed of dense' if beside else 'nothing beside it'}\n" in text
    assert ("faster than dense from p = 0.05 on / from 0.5 on" in text) == beside


def test_a_csv_of_another_version_leaves_the_rest(tmp_path, monkeypatch, capsys):
    """Its stage says so, and so does the closing table, which is made after hours."""
    write(TENSORCORE, tmp_path, [of_part(TENSORCORE, n="16", programs_per_sm="4", tflop_per_s="333.4")])
    for name in ("bandwidth.csv", "bench.csv"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    lines = gpu.summary([], tmp_path)
    said = [line.partition(": expected a csv with this version's columns")[0] for line in lines if line.startswith("not read")]
    assert said == ["not read: bandwidth.csv", "not read: bench.csv"] and "n = 16: 333" in "\n".join(lines)
    assert sum(line.startswith("10 ") for line in lines) == 6
    pytest.importorskip("triton")
    monkeypatch.setattr(device_stages, "check_device", lambda name: torch.device("cpu"))
    assert device_stages.main(["bandwidth", "--quick", "--out", str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("fxmask: bandwidth.csv: expected a csv with this version's columns")
