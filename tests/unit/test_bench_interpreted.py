"""The stages of the GPU run that have a csv of their own: their bodies in Triton's interpreter, and that wrong kernels are found."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fxmask.bench import device_stages, dropping, findings, nm, pruning, refreshes, sweeps, table
from fxmask.kernels.errors import UnsupportedError

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


def interpreted(code, *args):
    env = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code, *map(str, args)], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    return done.stdout


STAGES = "import sys; from fxmask.bench.device_stages import main; sys.exit(max(main([s, '--out', sys.argv[1], '--quick']) for s in sys.argv[2:]))"


def rows_of(out, stage):
    columns = device_stages.PARTS[stage].columns if stage in device_stages.PARTS else table.COLUMNS
    rows = table.read(out / f"{stage}.csv", columns)
    assert {(r["gate"], r["verdict"]) for r in rows} == {("pass", "none: interpreter")}
    return rows


@pytest.mark.slow
def test_probes_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    text = interpreted(STAGES, tmp_path, "bandwidth", "tensorcore")
    assert "bandwidth.csv: 12 of 12 cells, 0 failed, 0 left" in text and "tensorcore.csv: 4 of 4 cells" in text
    for row in rows_of(tmp_path, "bandwidth"):
        assert row["max_err"] == "0" and float(row["tb_per_s"]) == pytest.approx(int(row["bytes"]) / float(row["ms_p50"]) / 1e9, rel=1e-4)
    for row in rows_of(tmp_path, "tensorcore"):
        assert float(row["tflop_per_s"]) == pytest.approx(int(row["flop"]) / float(row["ms_p50"]) / 1e9, rel=1e-4)


BROKEN = """
import torch
from fxmask.bench import probes
real_load, real_multiply, cpu = probes.load_launch, probes.multiply_launch, torch.device("cpu")

def less(cell, x, sums, limit, passes):
    launch = real_load(cell, x, sums, limit, passes)
    at = len(launch.args) - 2
    return probes.Launch(launch.kernel, launch.programs, (*launch.args[:at], launch.args[at] - 1, *launch.args[at + 1:]), launch.constants)

for cell in probes.load_cells(cpu, True)[:2]:
    ready = probes.prepare_load(cell, cpu)
    assert ready.check()[1] == "", ready.check()
    probes.load_launch = less  # a step is left out, in the launch that is checked
    assert "not all was loaded" in ready.check()[1]
    probes.load_launch = real_load
probes.multiply_launch = lambda a, b, out, steps: real_multiply(a, b, out, steps - 1)
assert "is off by" in probes.prepare_multiply(probes.multiply_cells(cpu, True)[-1], cpu).check()[1]
"""


def test_a_probe_that_does_less_is_found():
    pytest.importorskip("triton")
    interpreted(BROKEN)


@pytest.mark.slow
def test_sweeps_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    interpreted(STAGES, tmp_path, *sweeps.OPS)
    for stage in sweeps.OPS:
        cells, _ = sweeps.sweep(stage, CPU, True)
        rows = rows_of(tmp_path, stage)
        assert [r["provider"] for r in rows] == [c.provider for c in cells]
        assert all(r["max_err"] and r["flop_issued"] and (r["bytes_req"] or r["provider"].endswith("dense")) for r in rows)


@pytest.mark.slow
def test_refreshes_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    interpreted(STAGES, tmp_path, "metadata")
    rows = rows_of(tmp_path, "metadata")
    assert len(rows) == len(refreshes.cells(CPU, True))
    for row in rows:
        assert int(row["launches"]) == 4 * (1 if row["form"] == "group" else int(row["weights"]))


@pytest.mark.slow
def test_dropout_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    interpreted(STAGES, tmp_path, "dropout")
    rows = rows_of(tmp_path, "dropout")
    names = ("dropout_linear", "masked_dense", "fxmask_triton")
    assert [(r["provider"], r["p"]) for r in rows] == [("dense", "0"), *((name, p) for p in ("0", "0.5") for name in names)]
    assert all(float(r["dense_tflop_per_s"]) == pytest.approx(6 * 200 * 96 * 128 / float(r["ms_p50"]) / 1e9, rel=1e-4) for r in rows)


def test_a_wrong_dropout_is_found():
    torch.manual_seed(0)
    tensors, block = tuple(torch.randn(s) for s in ((40, 32), (24, 32), (40, 24))), (16, 16)

    def why(step):
        return dropping.differs(step, tensors, block, 0.5)[1]

    right = dropping.masked_dense(*tensors, block, 0.5)
    assert why(right) == "" and why(dropping.dropout_linear(*tensors, block, 0.5)) == "" and why(dropping.dense(*tensors, block, 0.5)) == ""
    assert right[3].shape == (3, 2) and not right[3].all() and right[3].any()
    for i, what in enumerate(("y", "dX", "dW")):
        assert why((*right[:i], 2 * right[i], *right[i + 1 :])).startswith(f"{what}: error")
    assert why((*right[:3], ~right[3]))  # products of other blocks than the mask says


def test_what_was_found_of_dropout():
    size = {"M": "8", "N": "4", "K": "2", "block": "128"}
    times = {("dense", "0"): 2.0, ("dropout_linear", "0.1"): 3.0, ("fxmask_triton", "0.1"): 2.5, ("fxmask_triton", "0.5"): 1.0, ("masked_dense", "0.5"): 2.5}
    rows = [{**size, "provider": n, "p": p, "ms_p50": str(t)} for (n, p), t in times.items()]
    lines = findings._dropout(rows)
    assert lines[0] == "dropout 8x2->4 p = 0.1 / 2.5000 ms, 0.80x the speed of dense, 1.20x the speed of dropout_linear"
    assert lines[1].endswith("2.00x the speed of dense, 2.50x the speed of masked_dense") and lines[2].endswith("from 0.5 on")
    assert findings._dropout([]) == ["dropout / not measured"]
    again = [r for r in rows if r["p"] != "0.1"] + [r for r in rows if r["p"] == "0.1"]  # what was busy is measured again, at the csv's end
    assert findings._dropout(again) == lines


@pytest.mark.slow
def test_pruned_products_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    interpreted(STAGES, tmp_path, "pruning")
    rows = rows_of(tmp_path, "pruning")
    wanted = {("dense", "0"), ("reference", "0"), *((form, "0") for form in pruning.OWN), ("reference", "0.8"), ("triton", "0.8")}
    assert {(r["form"], r["w_ratio"]) for r in rows} == wanted
    for row in rows:
        assert float(row["tflop_per_s"]) == pytest.approx(int(row["flop"]) / float(row["ms_p50"]) / 1e9, rel=1e-4)
        assert int(row["flop"]) <= int(row["flop_issued"]) or row["form"] == "dense"


@pytest.mark.slow
def test_nm_masks_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    interpreted(STAGES, tmp_path, "nm")
    rows = rows_of(tmp_path, "nm")
    assert [(r["provider"], r["op"]) for r in rows] == [(name, "step") for name in ("dense", "masked_dense", "fxmask_triton")]
    assert all(float(r["dense_tflop_per_s"]) == pytest.approx(6 * 40 * 48 * 64 / float(r["ms_p50"]) / 1e9, rel=1e-4) for r in rows)


def test_a_wrong_nm_mask_is_found():
    torch.manual_seed(0)
    tensors = tuple(torch.randn(s) for s in ((40, 32), (24, 32), (40, 24)))
    right = nm.masked_dense(tensors)
    assert nm.differs(right, tensors)[1] == "" == nm.differs(nm.dense(tensors), tensors)[1] and nm.differs((right[0], None, None, right[3]), tensors)[1] == ""
    assert int(right[3].sum()) == 24 * 16 and "another mask" in nm.differs((*right[:3], ~right[3]), tensors)[1]
    for i, what in enumerate(("y", "dX", "dW")):
        assert nm.differs((*right[:i], 2 * right[i], *right[i + 1 :]), tensors)[1].startswith(f"{what}: error")
    cell = nm.NM("semi_structured", "forward", *nm.TINY, "bf16")
    with pytest.raises(UnsupportedError, match="need a CUDA device"):
        nm.prepare(cell, CPU)
    planned = {(c.provider, c.op) for c in nm.cells(torch.device("cuda"), True)}
    assert planned == {*((p, "step") for p in nm.STEPS), ("dense", "forward"), ("semi_structured", "forward")}
    size = {"M": "8", "N": "4", "K": "2", "op": "step"}
    times = {"dense": 2.0, "masked_dense": 4.0, "fxmask_triton": 2.5}
    lines = findings._nm([{**size, "provider": name, "ms_p50": str(t)} for name, t in times.items()])
    assert lines == ["2:4 step 8x2->4 / speed of the dense layer's: masked_dense 0.50x, fxmask_triton 0.80x"] and findings._nm([]) == ["2:4 / not measured"]


def test_a_wrong_pruned_product_is_found(monkeypatch):
    cell = pruning.cells(CPU, True)[1]
    assert cell.form == "reference" and pruning.prepare(cell, CPU).check()[1] == ""
    dense = cell._replace(form="dense")  # the whole input is another product
    assert "over the budget" in pruning.prepare(dense, CPU).check()[1]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_stage_without_a_device(tmp_path, capsys):
    assert device_stages.main(["bandwidth", "--out", str(tmp_path)]) == 2
    assert "expected a CUDA device, got none" in capsys.readouterr().err and not list(tmp_path.iterdir())
