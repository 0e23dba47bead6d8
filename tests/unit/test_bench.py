"""`fxmask bench` on the CPU, with tiny shapes."""

import csv
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fxmask.bench import cells, costs, gate, inputs, providers, table
from fxmask.bench.driver import CSV, Run, check_device, read_ceilings, run_cells
from fxmask.cli import main
from fxmask.errors import ConfigError, UnsupportedError
from fxmask.kernels import lists, tune
from fxmask.kernels.cpu import plans

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
TINY = ("40x32->48",)


def some_cells(only="*/b64x64/r0.8/*", **options):
    return cells.make_cells("cpu", "fp32", quick=True, only=only, shapes=TINY, **options)


def make_run(out, **options):
    said = []
    return Run(CPU, out, sample_s=0.0, **{"load": lambda: 0.0, "say": said.append, **options}), said


def test_rows_are_complete(tmp_path):
    run, _ = make_run(tmp_path)
    assert run_cells(run, some_cells()) == 0
    rows = table.read(tmp_path / CSV)
    assert {r["op"] for r in rows} == set(cells.OPS)
    always = {"fxmask", "source", "utc", "device", "torch", "python", "load", *table.WHAT, "how", "ms_p50", "ms_p10", "ms_p90", "cpu_ms_p50", "bytes_min"}
    for row in rows:
        if row["gate"] == "skip":  # a build of torch without BSR matmuls
            assert row["provider"] in cells.ANCHORS
            continue
        assert (row["gate"], row["verdict"]) == ("pass", "ok")
        assert not {c for c in always if not row[c]}
        assert float(row["ms_p10"]) <= float(row["ms_p50"]) <= float(row["ms_p90"])
        if row["op"] != "metadata":
            assert row["max_err"] and row["base_err"] and row["x_dense"] and row["flop_useful"]
            assert row["provider"] == "dense" or row["x_best"]
    own = next(r for r in rows if r["provider"] == "fxmask_reference" and r["op"] == "step")
    metadata = next(r for r in rows if r["phase"] == "block_index")
    assert own["metadata_ms"] == metadata["ms_p50"]
    assert float(own["ms_refresh_10"]) == pytest.approx(float(own["ms_p50"]) + float(metadata["ms_p50"]) / 10, rel=1e-4)


def test_rows_of_auto_say_what_ran(tmp_path):
    run, _ = make_run(tmp_path)
    names = ("dense", "masked_dense", "fxmask_reference", "fxmask_auto")
    made = cells.make_cells("cpu", "fp32", quick=True, only="*/b64x64/r0.8/*,metadata*", providers=names, shapes=TINY)
    run_cells(run, [*made, *(c.by("fxmask_auto") for c in made if c.provider == "fxmask_reference")])
    found = {(r["op"], r["ran"]) for r in table.read(tmp_path / CSV) if r["provider"] == "fxmask_auto"}
    alone = {(op, f"{op} masked_dense") for op in ("forward", "dx", "dw")}
    assert found - {("metadata", "")} == alone | {("step", "forward masked_dense, dx masked_dense, dw masked_dense")}
    assert {r["ran"] for r in table.read(tmp_path / CSV) if r["provider"] != "fxmask_auto"} == {""}


def test_a_refresh_is_that_of_the_provider(tmp_path):
    """`auto` makes its masks another way than the reference does."""
    run, _ = make_run(tmp_path)
    run_cells(run, some_cells("forward/*/b64x64/r0.8/*,metadata*"))
    rows = [r for r in table.read(tmp_path / CSV) if r["block_n"] == "64"]
    masks = {r["provider"]: r["ms_p50"] for r in rows if r["phase"] == "block_index"}
    assert {r["provider"]: r["metadata_ms"] for r in rows if r["metadata_ms"]} == masks and set(masks) == {"fxmask_reference", "fxmask_auto"}


def test_what_ran_is_what_was_decided(monkeypatch):
    i = inputs.make_inputs(cells.Cell("step", "step", 40, 48, 32, "fp32", (16, 16), 0.5, "random", 0, "fxmask_auto"), CPU)
    asked = []
    monkeypatch.setattr(providers.deciding, "of", lambda case, forced: asked.append((case, forced)) or tune.Choice(f"rows-{case.op}", "", {}, 40))
    assert providers.ran(i) == "forward rows-forward, dx rows-dx, dw rows-dw"
    assert asked[1] == (plans.Case("dx", 40, (48, 32), (16, 16), 0.5, torch.float32), False)


def test_a_file_without_the_last_columns_is_read_and_goes_on(tmp_path):
    chosen, path = some_cells(), tmp_path / CSV
    first, _ = make_run(tmp_path)
    run_cells(first, chosen[:4])
    older = [c for c in table.COLUMNS if c not in table.LATER]
    rows = table.read(path)
    with path.open("w", newline="") as f:
        writer = csv.DictWriter(f, older, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        f.write("0.1.0,half a li")
    assert table.read(path) == [{**r, "ran": ""} for r in rows]
    second, said = make_run(tmp_path)
    assert "ran" not in path.read_text().splitlines()[0].split(",")  # not before there is a row for it
    run_cells(second, chosen)
    assert f"4 of {len(chosen)} cells" in said[0] and "\n\n" not in path.read_text()
    with path.open(newline="") as f:
        every = list(csv.DictReader(f))
    assert len(every) == len(chosen) and every[:4] == [{**r, "ran": ""} for r in rows] and list(every[0]) == list(table.COLUMNS)
    assert not list(tmp_path.glob(".*")) and not any(None in r or None in r.values() for r in every)
    with pytest.raises(ConfigError, match="expected a csv with this version's columns"):
        table.read(path, [c for c in table.COLUMNS if c != "gate"])


def test_a_second_run_goes_on(tmp_path):
    chosen = some_cells()
    first, _ = make_run(tmp_path)
    run_cells(first, chosen[:4])
    with (tmp_path / CSV).open("a") as f:
        f.write("0.1.0,half a li")  # killed while it wrote
    second, said = make_run(tmp_path)
    run_cells(second, chosen)
    assert f"4 of {len(chosen)} cells" in said[0] and len(said) == len(chosen) - 3
    keys = [table.key(r) for r in table.read(tmp_path / CSV)]
    assert len(keys) == len(set(keys)) == len(chosen)
    third, said = make_run(tmp_path)
    third.shared["source"] = "other kernels"
    run_cells(third, chosen[:2])
    assert len(said) == 2  # measured again: another provenance


def test_rows_of_other_threads_are_no_baselines_and_are_not_shown(tmp_path, capsys, monkeypatch):
    """They are other measurements: each is measured again, and stands beside its own alone."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    before = torch.get_num_threads()
    command = ["bench", "--device", "cpu", "--op-by-op", "--quick", "--shapes", TINY[0], "--cells", "forward/*/b64x64/r0.8/*", "--sample-s", "0"]
    try:
        assert main([*command, "--out", str(tmp_path), "--threads", "1"]) == 0 and "fxmask_reference forward" in capsys.readouterr().out
        assert main([*command, "--out", str(tmp_path), "--threads", "2", "--providers", "fxmask_reference"]) == 0
    finally:
        torch.set_num_threads(before)
    out = capsys.readouterr().out
    assert "1 of 1 cells" not in out and "no row can be compared" in out
    *_, last = table.read(tmp_path / CSV)
    assert (last["threads"], last["provider"], last["x_dense"]) == ("2", "fxmask_reference", "")


def test_a_wrong_provider_gets_no_time(tmp_path):
    def wrong(i):
        call = providers.REGISTRY["fxmask_reference"](i)
        return lambda: tuple(t * 1.001 if t.is_floating_point() else ~t for t in call())

    def unwritten(i):
        return lambda: (torch.full((i.cell.M, i.cell.N), float("nan")),)

    def raises(i):
        raise ValueError("no such kernel")

    def raises_later(i):  # the first call is judged, others are timed
        calls = iter([providers.REGISTRY["fxmask_reference"](i)])
        return lambda: next(calls)()

    for name, bad in (("wrong", wrong), ("unwritten", unwritten), ("raises", raises), ("later", raises_later)):
        run, _ = make_run(tmp_path / name, registry={**providers.REGISTRY, "fxmask_reference": bad})
        run_cells(run, some_cells("forward/*/b64x64/r0.8/*"))
        rows = {r["provider"]: r for r in run.table.rows}
        row = rows["fxmask_reference"]
        assert row["gate"] == "fail" and not row["ms_p50"] and row["verdict"].startswith("none: ")
        assert rows["masked_dense"]["gate"] == "pass"
        again, _ = make_run(tmp_path / name)  # of the same sources: it is not tried again
        assert run_cells(again, some_cells("forward/*/b64x64/r0.8/*")) == 0 and again.table.rows == run.table.rows
    run, _ = make_run(tmp_path / "metadata", registry={**providers.REGISTRY, "fxmask_reference": wrong})
    run_cells(run, some_cells("metadata.block_index*"))
    assert {(r["provider"], r["gate"]) for r in run.table.rows} == {("fxmask_reference", "fail"), ("fxmask_auto", "pass")}


def test_a_busy_machine_gives_no_verdict(tmp_path):
    run, _ = make_run(tmp_path, load=lambda: 1e3)
    run_cells(run, some_cells("forward/*/b64x64/r0.8/*"))
    assert all(r["verdict"].startswith("none: load 1000.0 on ") and not r["x_dense"] for r in run.table.rows if r["gate"] == "pass")
    quiet, said = make_run(tmp_path)
    run_cells(quiet, some_cells("forward/*/b64x64/r0.8/*"))
    assert len(said) >= 4 and quiet.table.rows[-1]["verdict"] == "ok"  # measured again


def test_each_cell_has_its_own_mask_and_data(tmp_path):
    """A run holds the operands for all providers of a cell, and for no other."""
    names, globs = ("dense", "masked_dense", "fxmask_reference"), "forward/*/b16x16/r0.5/random,forward/*/b16x16/r0.9/random,forward/*/b32x32/r0.5/random"
    run, _ = make_run(tmp_path)
    run_cells(run, cells.make_cells("cpu", "fp32", only=globs, providers=names, shapes=("40x64->96",)))
    found = {(r["provider"], r["block_n"], r["ratio"]): float(r["density"]) for r in run.table.rows}
    own = {(p, b, r): d for p in names[1:] for b, r, d in (("16", "0.5", 0.5), ("16", "0.9", 0.125), ("32", "0.5", 0.5))}
    assert found == {("dense", "0", "0"): 1.0, **own} and {r["gate"] for r in run.table.rows} == {"pass"}
    made = [inputs.make_inputs(cells.Cell("forward", "forward", 40, 96, 64, "fp32", (16, 16), 0.5, "random", seed, "x"), CPU) for seed in (0, 1)]
    assert not any(torch.equal(a, b) for a, b in zip(*([i.x, i.w, i.gy, i.mask] for i in made), strict=True))


def test_memory_that_runs_out_is_no_failure(tmp_path):
    def full(i):
        raise torch.OutOfMemoryError("CUDA out of memory")

    run, _ = make_run(tmp_path, registry={**providers.REGISTRY, "masked_dense": full})
    run_cells(run, some_cells("forward/*/b64x64/r0.8/*", providers=("masked_dense", "fxmask_reference")))
    assert [(r["gate"], r["verdict"], bool(r["ms_p50"])) for r in run.table.rows] == [("skip", "none: out of memory", False), ("pass", "ok", True)]


def test_auto_alone_takes_kernels_where_they_pay(monkeypatch):
    i, ran = inputs.make_inputs(some_cells("forward/*/b64x64/r0.8/*")[0], CPU), []
    monkeypatch.setattr(providers, "pays", lambda i: True)
    monkeypatch.setattr(providers.ops, "lists", lambda mask, block, impl: ran.append(impl))
    for impl in ("reference", "auto", "triton"):
        providers.fxmask(impl)(i)
    assert ran == ["reference", "triton", "triton"]


def test_time_limit(tmp_path):
    def slow(i):
        time.sleep(0.1)
        return providers.masked_dense(i)

    chosen = some_cells("forward/*,step/*", providers=("masked_dense",), masks=("random",))
    run, said = make_run(tmp_path, time_limit=0.35, registry={"masked_dense": slow})
    left = run_cells(run, chosen)
    assert 0 < left < len(chosen) and "stopped by the time limit" in said[-1]
    assert len(table.read(tmp_path / CSV)) == len(chosen) - left


def test_a_cell_that_fails_is_said_before_a_picture_that_cannot_be_written(tmp_path, capsys, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setitem(providers.REGISTRY, "fxmask_reference", lambda i: lambda: (torch.zeros(i.cell.M, i.cell.N),))
    (tmp_path / "out" / "crossover.png").mkdir(parents=True)
    args = ["bench", "--device", "cpu", "--op-by-op", "--quick", "--shapes", TINY[0], "--cells", "forward/*/b64x64/r0.8/*", "--sample-s", "0"]
    assert main([*args, "--out", str(tmp_path)]) == 1 and "gate: fxmask_reference forward" in capsys.readouterr().out
    assert main([*args, "--plot", "--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr()
    assert "gate: fxmask_reference forward" in said.out and "Is a directory" in said.err


def test_command_line(tmp_path, capsys):
    args = ["bench", "--device", "cpu", "--op-by-op", "--quick", "--shapes", TINY[0], "--cells", "forward/*/b128x128/*"]
    args += ["--out", str(tmp_path), "--sample-s", "0"]
    assert main(args) == 0
    assert "crossover" in capsys.readouterr().out
    assert main([*args, "--list"]) == 0
    assert "forward/40x32->48/fp32/b128x128/r0.8/random/fxmask_reference" in capsys.readouterr().out
    refused = {"--cells": ("nothing/*", "leaves nothing"), "--providers": ("cublas", "unknown provider"), "--shapes": ("12", "a shape is TOKENSxIN")}
    for option, (value, words) in refused.items():
        assert main([*args, option, value]) == 2
        assert words in capsys.readouterr().err
    for bad in (["bench", "--fast"], ["bench", "--device", "tpu"], ["profile"], []):
        with pytest.raises(SystemExit) as e:
            main(bad)
        assert e.value.code == 2


def test_masks_that_are_asked_for(capsys):
    """Also by a quick run, and with the refreshes of these masks; what an error suggests matches something."""

    def listed(*options):
        assert main(["bench", "--device", "cpu", "--op-by-op", "--list", *options]) == 0
        return capsys.readouterr().out.split()

    for quick in ((), ("--quick",)):
        every = listed("--masks", "rows", *quick)
        assert {name.split("/")[5] for name in every} == {"rows", "-"} and [n for n in every if n.startswith("metadata")]
        assert {name.split("/")[5] for name in listed("--masks", "random,rows", *quick)} == {"random", "rows", "-"}
    assert {name.split("/")[5] for name in listed("--quick")} == {"random", "-"}
    assert listed("--cells", "metadata*", "--masks", "rows")
    for options in (("--masks", "rows"), ("--providers", "torch_bsr"), ("--quick", "--providers", "fxmask_auto")):
        assert main(["bench", "--device", "cpu", "--op-by-op", "--list", "--cells", "nothing", *options]) == 2
        assert listed("--cells", capsys.readouterr().err.split("'")[3], *options)
    assert main(["bench", "--device", "cpu", "--op-by-op", "--list", "--providers", "torch_bsr,fxmask_auto", "--masks", "rows"]) == 0  # auto's own masks
    assert main(["bench", "--device", "cpu", "--op-by-op", "--list", "--providers", "torch_bsr", "--masks", "rows"]) == 2
    assert capsys.readouterr().err == "fxmask: --providers: expected some for rows masks on cpu, got torch_bsr.\n"


def test_env_as_a_module():
    done = subprocess.run([sys.executable, "-m", "fxmask", "env"], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.search(rf"^torch +{re.escape(torch.__version__)}$", done.stdout, re.MULTILINE)
    assert re.search(r"^fxmask +\S", done.stdout, re.MULTILINE) and re.search(r"^source +[0-9a-f]{12}$", done.stdout, re.MULTILINE)


def test_another_csv_is_refused(tmp_path):
    (tmp_path / CSV).write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match=r"expected a csv with this version's columns"):
        make_run(tmp_path)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_without_a_device():
    with pytest.raises(UnsupportedError, match=r"expected a CUDA device, got none"):
        check_device("cuda")


# ---- cells, masks, costs ---------------------------------------------------------------------------------------------------------------------------------


def test_cells_of_a_gpu_come_in_order_of_value():
    full, quick = cells.make_cells("cuda", "bf16"), cells.make_cells("cuda", "bf16", quick=True)
    assert set(quick) <= set(full) and len(full) == len(set(full))
    assert {c.shape for c in full} == set(cells.CUDA_SHAPES) and len({c.shape for c in quick}) == 2
    assert {c.block[0] for c in quick} == {0, 64, 128} and {c.block[0] for c in full} == {0, 16, 32, 64, 128}
    metadata = [(c.shape, c.block, c.phase, c.provider) for c in full if c.op == "metadata"]
    assert len(metadata) == len(set(metadata))  # it costs the same for every ratio and kind of mask
    place = {c: i for i, c in enumerate(full)}
    assert next(c for c in full if c.op != "metadata").group == f"forward/{cells.CUDA_SHAPES[0]}/bf16/b0x0/r0/-"
    refreshes = {(c.shape, c.block): place[c] for c in reversed(full) if c.phase == "lists" and c.provider == "fxmask_triton"}
    for c in full:  # baselines and metadata first, so that every row can be compared
        if c.provider not in ("dense", "masked_dense") and c.op != "metadata":
            assert max(place[c.dense()], place[c.by("masked_dense")], refreshes[c.shape, c.block]) < place[c]


@pytest.mark.parametrize("kind", cells.MASKS)
def test_masks_are_exact(kind):
    mask = inputs.make_mask((24, 40), 0.7, kind, 0)
    assert int(mask.sum()) == 288 and torch.equal(mask, inputs.make_mask((24, 40), 0.7, kind, 0))
    spread = mask.float().mean(1).std()
    assert (spread > 0.2) == (kind == "rows")


@pytest.mark.parametrize("shape", ["25088x384->1536", "8192x4096->4096", "1024x1024->1024", "4096x96->80"])
@pytest.mark.parametrize("block", cells.BLOCKS)
def test_costs_count_the_launched_splits(shape, block, monkeypatch):
    from fxmask.kernels.dispatch import triton_ops

    launch = pytest.importorskip("triton") and triton_ops().launch
    (m, n, k), grids, counted = cells.parse_shape(shape), {}, []
    real = costs.layer_cost.matmul_cost.sampled_matmul
    monkeypatch.setattr(launch.device, "launch", lambda kernel, grid, like, *a, **c: grids.update({kernel.fn.__name__: grid}))
    monkeypatch.setattr(costs.layer_cost.matmul_cost, "sampled_matmul", lambda *a, **c: counted.append((a[0].layout, c)) or real(*a, **c))
    i = inputs.make_inputs(cells.Cell("dw", "backward", 8, n, k, "bf16", (block, block), 0.8, "random", 0, "fxmask_triton"), CPU)
    i.cell = cells.replace(i.cell, M=m)  # the tensors need not be as long
    costs.cost_of(i)
    tensors = [torch.empty(s, device="meta", dtype=torch.bfloat16) for s in ((m, n), (m, k))]
    launch.sampled_matmul(*tensors, i.mask.to("meta"), (block, block))
    ((lay, given),) = counted
    assert grids["sampled_matmul_kernel"] == (lay.strips * -(-lay.units // (given["tile_features"] // lay.unit)), given["splits"])


def test_costs_of_the_kernels():
    pytest.importorskip("triton")
    for op in ("forward", "dx", "dw", "step"):
        i = inputs.make_inputs(cells.Cell(op, "-", 256, 128, 256, "bf16", (64, 64), 0.5, "random", 0, "fxmask_triton"), CPU)
        found = costs.cost_of(i)
        assert found["flop_useful"] == 2 * 256 * 64 * 256 * (3 if op == "step" else 1)
        assert found["flop_issued"] >= found["flop_useful"] and found["bytes_req"] >= found["bytes_min"] > 0


@pytest.mark.parametrize(("op", "products"), [("forward", 1), ("dx", 1), ("dw", 1), ("step", 3)])
def test_costs_of_the_others(op, products):
    """Their FLOP and bytes are those of the mathematics; what a library's sparse product issues is unknown."""
    i = inputs.make_inputs(cells.Cell(op, "-", 40, 96, 64, "fp32", (32, 32), 0.5, "random", 0, "masked_dense"), CPU)
    whole, own, ends = 2 * products * 40 * 96 * 64, 2 * products * 40 * 96 * 64 // 2, 40 * 64 + 40 * 96
    assert costs.cost_of(i) == {"flop_useful": own, "bytes_min": 4 * products * (ends + 96 * 64 // 2), "flop_issued": whole}
    i.cell = i.cell.by("torch_bsr")
    assert costs.cost_of(i) == {"flop_useful": own, "bytes_min": 4 * products * (ends + 96 * 64 // 2)}
    dense = inputs.make_inputs(i.cell.dense(), CPU)
    assert costs.cost_of(dense) == {"flop_useful": whole, "bytes_min": 4 * products * (ends + 96 * 64), "flop_issued": whole}
    i.cell = cells.replace(i.cell, op="metadata", phase="block_index", provider="fxmask_reference")
    assert costs.cost_of(i) == {"bytes_min": costs.layer_cost.block_index((96, 64), (32, 32), 4, False).bytes_min}


def test_gate_of_lists():
    i = inputs.make_inputs(cells.Cell("metadata", "lists", 1, 96, 64, "fp32", (16, 16), 0.5, "random", 0, "fxmask_reference"), CPU)
    call = providers.REGISTRY["fxmask_reference"](i)
    assert gate.check(i, call).passed
    for part in range(6):  # entries, counts and order, both ways
        wrong = call()[0].clone()
        lists.unpack(wrong, tuple(i.mask.shape), (16, 16), part >= 3)[part % 3].view(-1)[0] += 1
        assert not gate.check(i, lambda wrong=wrong: (wrong,)).passed


@pytest.mark.parametrize("text", ['{"flops_per_s": ', "[1]", '{"flops_per_s": null}', '{"flops_per_s": "many"}', "\udcff"])
def test_ceilings_that_are_damaged_are_told(text, tmp_path, capsys):
    (tmp_path / "ceilings.json").write_text(text, errors="surrogateescape")
    assert read_ceilings(tmp_path) == {}
    said = capsys.readouterr().err
    assert said.startswith(f"{tmp_path / 'ceilings.json'}: expected a number for each name, got ")
    assert "; t_min_us and roof_pct stay empty.\n  fix: remove it, or measure it anew" in said


def test_ceilings_are_optional_and_of_a_gpu_in_16_bits(tmp_path, capsys):
    assert read_ceilings(tmp_path) == {} and not capsys.readouterr().err
    (tmp_path / "ceilings.json").write_text('{"flops_per_s": 7.8e14, "bytes_per_s": 4.3e12}')
    made = [c for dtype in ("fp32", "bf16") for c in cells.make_cells("cpu", dtype, True, "forward/*/b64x64/r0.8/*", ("dense", "masked_dense"), TINY)]
    run, _ = make_run(tmp_path)
    assert run.ceilings == {}  # whoever measured them, this is a CPU
    run.ceilings = read_ceilings(tmp_path)
    run_cells(run, made)
    rows = table.read(tmp_path / CSV)
    assert len(rows) == len(made) == 4
    for row in rows:
        if row["dtype"] == "fp32":
            assert row["ms_p50"] and not row["t_min_us"] and not row["roof_pct"]
        else:
            assert float(row["t_min_us"]) == pytest.approx(1e6 * int(row["bytes_min"]) / 4.3e12, rel=1e-4)
            assert float(row["roof_pct"]) == pytest.approx(float(row["t_min_us"]) / float(row["ms_p50"]) / 10, rel=1e-4)
