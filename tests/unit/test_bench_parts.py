"""The stages of the GPU run that have a csv of their own: the machinery on the CPU, their bodies in Triton's interpreter, their kernels compiled for GPUs."""

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch

from fxmask.bench import device_stages, dropping, findings, gpu, nm, part, probes, pruning, refreshes, session, sweeps, table
from fxmask.bench.driver import Run, run_cells
from fxmask.kernels.errors import UnsupportedError
from fxmask.kernels.grid import keep_count

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


class Thing(NamedTuple):
    number: int
    what: str


def fake(prepare=None, cells=(), **options):
    """A part whose cells say what happens to them."""

    def by_what(cell, device):
        if cell.what == "raises":
            raise ValueError("no such tile\nand more")
        return part.Prepared(lambda: None, lambda: (0.5, "too far off" if cell.what == "wrong" else ""), lambda ms: {"per_s": 1e3 / max(ms, 1e-9)})

    return part.Part("things", Thing, ("per_s",), lambda device, quick: list(cells), prepare or by_what, **options)


def make_session(out, **options):
    said = []
    return session.Session(CPU, out, sample_s=0.0, **{"load": lambda: 0.0, "say": said.append, **options}), said


CELLS = [Thing(1, "right"), Thing(2, "wrong"), Thing(3, "raises"), Thing(4, "right")]


def test_every_cell_is_a_row(tmp_path):
    s, said = make_session(tmp_path)
    rows, left = part.run_part(s, fake(), CELLS)
    assert left == 0 and [r["gate"] for r in rows] == ["pass", "fail", "fail", "pass"]
    assert [r["verdict"] for r in rows] == ["ok", "none: too far off", "none: ValueError: no such tile", "ok"]
    assert [bool(r["ms_p50"] and r["per_s"]) for r in rows] == [True, False, False, True]
    for row in table.read(tmp_path / "things.csv", fake().columns):
        assert all(row[c] for c in ("fxmask", "source", "utc", "device", "torch", "python", "number", "what"))
    assert "none: too far off" in said[1] and "per_s=" in said[3]


def test_a_second_run_goes_on(tmp_path):
    s, _ = make_session(tmp_path)
    part.run_part(s, fake(), CELLS[:2])
    with (tmp_path / "things.csv").open("a") as f:
        f.write("0.1.0,half a li")
    s, said = make_session(tmp_path)
    rows, _ = part.run_part(s, fake(), CELLS)
    assert said[0].startswith("2 of 4 cells are in things.csv") and len(said) == 3 and len(rows) == 4
    s, said = make_session(tmp_path)
    rows, _ = part.run_part(s, fake(sources=lambda: "other kernels"), CELLS[:1])
    assert len(said) == 1 and [r["source"] for r in rows] == ["other kernels"]  # measured again: other sources


def test_the_time_limit_ends_a_part(tmp_path):
    def slow(cell, device):
        time.sleep(0.1)
        return part.Prepared(lambda: None, lambda: (0.0, ""), lambda ms: {})

    s, said = make_session(tmp_path, time_limit=0.25)
    rows, left = part.run_part(s, fake(slow), [Thing(i, "right") for i in range(20)])
    assert 0 < left < 20 and len(rows) == 20 - left and "stopped by the time limit" in said[-1]


def test_a_dead_device_ends_a_part(tmp_path, monkeypatch):
    monkeypatch.setattr(session.Session, "alive", lambda self: False)
    s, said = make_session(tmp_path)
    rows, left = part.run_part(s, fake(), CELLS)
    assert left == 2 and [r["number"] for r in rows] == ["1", "2"] and "answers no more" in said[-1]  # the others get no row, and so another run tries them
    run = Run(CPU, tmp_path, sample_s=0.0, load=lambda: 0.0, say=said.append, registry={})  # no provider: every cell raises
    cells, _ = sweeps.sweep("splits", CPU, True)
    assert run_cells(run, cells) == len(cells) - 1 and len(run.table.rows) == 1


def test_a_rehearsal_gets_no_verdict(tmp_path):
    s, _ = make_session(tmp_path, rehearsal=True)
    rows, _ = part.run_part(s, fake(), CELLS[:1])
    assert rows[0]["gate"] == "pass" and rows[0]["verdict"] == "none: interpreter"


# ---- what the stages measure -----------------------------------------------------------------------------------------------------------------------------


def test_the_sums_of_the_loads():
    rows, cols, unit, programs, steps = 3 * probes.TILE_ROWS, 2, 16, 4, 5
    x = torch.randint(-8, 9, (rows, cols * probes.TILE_WIDTH)).half()
    got = probes.expected_sums(x, unit, programs, steps)
    for p in range(programs):
        total = 0.0
        for i in range(steps):
            row, step = divmod((p + i * programs) % (3 * cols), cols)
            for piece in range(probes.TILE_WIDTH // unit):
                first = step * unit + piece * cols * unit
                total += float(x[row * probes.TILE_ROWS :][: probes.TILE_ROWS, first : first + unit].float().sum())
        assert got[p] == total
    seen = torch.zeros(cols * probes.TILE_WIDTH)  # the steps of a row of tiles load each feature once
    for step in range(cols):
        for piece in range(probes.TILE_WIDTH // unit):
            seen[step * unit + piece * cols * unit :][:unit] += 1
    assert (seen == 1).all()


def test_cells_of_the_parts():
    loads = probes.load_cells(CPU, False)
    assert {(c.level, c.by, c.row_bytes) for c in loads} == {(v, b, r) for v in ("L2", "HBM") for b in ("tma", "pointer") for r in (128, 64, 32)}
    assert [c.n for c in probes.multiply_cells(CPU, True)] == [128, 64, 32, 16]
    wanted = {("layer", 1), ("model", len(refreshes.TINY_MODEL))}
    found = refreshes.cells(CPU, False)
    assert {(c.scope, c.weights) for c in found} == wanted and {c.form for c in found} == {"single", "group"}
    assert {(c.dtype, c.block) for c in found} == {(d, b) for d in ("bf16", "fp32") for b in (128, 64, 32, 16)}
    assert {c.dtype for c in refreshes.cells(CPU, True)} == {"bf16"}
    found = pruning.cells(torch.device("cuda"), False)
    assert {c.block for c in found} == {0, 16, 32, 64, 128} and {c.N for c in found} == {384, 1536} and pruning.INPUT == (64, 196, 384)
    assert {c.ratio for c in found if c.form == "triton"} == {r / 10 for r in range(1, 10)} and len(found) == len(set(found))
    shapes = refreshes.MODEL
    assert shapes.count((14336, 4096)) == 4 and shapes.count((1536, 384)) == shapes.count((384, 1536)) == 12 and len(shapes) == 28
    assert sum(probes.L2_ROWS * probes.FEATURES * 2 // 2**20 for _ in range(2)) <= 50  # in both halves of the L2
    assert probes.HBM_ROWS * probes.FEATURES * 2 > 20 * 60e6 and probes.HBM_ROWS * probes.FEATURES < 2**31


def test_tiles_of_the_sweep(monkeypatch):
    names = [sweeps.tile_name(t) for t in sweeps.tiles_of(torch.bfloat16, (128, 128), CPU)]
    assert len(names) == len(set(names)) and names[0] == sweeps.tile_name(sweeps.candidates(torch.bfloat16, (128, 128), False)[0])
    sizes = [f"{size}-s{stages}" for size in ("256x128x64-w8", "128x128x64-w8", "128x128x64-w4") for stages in (3, 4)]
    assert {*sizes, *(f"{s}-tma" for s in sizes)} == set(names)
    assert set(sizes) == {sweeps.tile_name(t) for t in sweeps.tiles_of(torch.bfloat16, (64, 64), CPU)}  # bits: no TMA
    for capability, room, left in (((9, 0), 232_448, set(names)), ((8, 0), 166_912, {s for s in sizes if not s.startswith("256")})):
        properties = SimpleNamespace(shared_memory_per_block_optin=room, shared_memory_per_block=49_152)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert left == {sweeps.tile_name(t) for t in sweeps.tiles_of(torch.bfloat16, (128, 128), torch.device("cuda"))}


@pytest.mark.parametrize("stage", sweeps.OPS)
def test_cells_of_the_sweeps(stage):
    cells, settings = sweeps.sweep(stage, CPU, False)
    assert len(cells) == len(set(cells)) and settings["csv"] == f"{stage}.csv"
    assert {(c.block[0], c.ratio) for c in cells if c.block[0]} == {(b, r) for b in (128, 64) for r in (0.8, 0.5, 0.9)}
    assert all(c.provider in settings["registry"] for c in cells)
    for n, c in enumerate(cells):  # baselines before what is compared with them, and the library's own choice before the others
        if c.provider not in ("dense", "masked_dense"):
            assert {c.dense(), c.by("masked_dense")} <= set(cells[:n]) and (c.provider == "own" or c.by("own") in cells[:n])
    assert {c.ratio for c in sweeps.sweep(stage, CPU, True)[0]} == {0.0, 0.8}
    if stage == "splits":
        assert {f"splits-{s}" for s in (1, 2, 4, 8, 16)} < {c.provider for c in cells}


def test_a_choice_has_its_own_cost():
    pytest.importorskip("triton")
    from fxmask.bench.inputs import make_inputs

    cells, settings = sweeps.sweep("tiles", CPU, True)
    i = make_inputs(next(c for c in cells if c.provider == "256x128x64-w8-s3"), CPU)
    big = settings["costs"](i)
    i.cell = i.cell.by("128x128x64-w8-s3")
    small = settings["costs"](i)
    assert big["bytes_req"] < small["bytes_req"] and big["flop_useful"] == small["flop_useful"]  # W is read for half as many tiles
    i.cell = i.cell.by("masked_dense")
    assert "bytes_req" not in settings["costs"](i)


def test_a_wrong_refresh_is_found():
    cell = refreshes.cells(CPU, True)[-1]  # the model, grouped, in the smallest blocks
    block = (cell.block, cell.block)
    right = [refreshes._expected(cell.dtype, i, block, CPU) for i in range(cell.weights)]
    assert refreshes.differs(right, cell, CPU) == ""
    grids = [tuple(m.shape) for m, _ in right]
    assert [int(m.sum()) for m, _ in right] == [keep_count(a * b, cell.ratio) for a, b in grids]
    masks = [(~m if i == 2 else m, lists) for i, (m, lists) in enumerate(right)]
    assert "weight 2" in refreshes.differs(masks, cell, CPU)
    lists = [(m, t + 1 if i == 1 else t) for i, (m, t) in enumerate(right)]
    assert "weight 1" in refreshes.differs(lists, cell, CPU)
    assert "expected 4 weights, got 3" in refreshes.differs(right[:3], cell, CPU)


def test_stages_fit_into_their_call(tmp_path):
    stages = {s.name: s for s in gpu.make_stages(tmp_path, tmp_path / "pytest.ini")}
    second = ["bandwidth", "tensorcore", "tiles", "splits", "metadata", "dropout", "pruning", "nm", "quick"]
    assert [n for n in stages if n in second] == second and sum(stages[n].limit_s for n in second) <= 570  # of a call of 600
    for name in gpu.PARTS:
        command = list(stages[name].command)
        assert command[3] == name and float(command[command.index("--time-limit") + 1]) < stages[name].limit_s and "--quick" not in command
    less = {s.name: s for s in gpu.make_stages(tmp_path, tmp_path / "pytest.ini", quick=True)}
    assert set(stages) - set(less) == {"full", "train"} and all("--quick" in less[n].command for n in second)
    assert set(gpu.PARTS) == {*device_stages.PARTS, *sweeps.OPS}


def test_every_column_is_explained():
    text = (ROOT / "examples/results/README.md").read_text()
    assert [c for p in device_stages.PARTS.values() for c in p.columns if f"`{c}`" not in text] == []
    assert [n for n in gpu.PARTS if f"`{n}.csv`" not in text] == []


# ---- in the interpreter ----------------------------------------------------------------------------------------------------------------------------------


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
    lines = findings._dropout([{**size, "provider": n, "p": p, "ms_p50": str(t)} for (n, p), t in times.items()])
    assert lines[0] == "dropout 8x2->4 p = 0.1 / 2.5000 ms, 0.80x the speed of dense, 1.20x the speed of dropout_linear"
    assert lines[1].endswith("2.00x the speed of dense, 2.50x the speed of masked_dense") and lines[2].endswith("from 0.5 on")
    assert findings._dropout([]) == ["dropout / not measured"]


def test_pruned_products_in_the_interpreter(tmp_path):
    pytest.importorskip("triton")
    interpreted(STAGES, tmp_path, "pruning")
    rows = rows_of(tmp_path, "pruning")
    wanted = {("dense", "0"), ("reference", "0"), *((form, "0") for form in pruning.OWN), ("reference", "0.8"), ("triton", "0.8")}
    assert {(r["form"], r["w_ratio"]) for r in rows} == wanted
    for row in rows:
        assert float(row["tflop_per_s"]) == pytest.approx(int(row["flop"]) / float(row["ms_p50"]) / 1e9, rel=1e-4)
        assert int(row["flop"]) <= int(row["flop_issued"]) or row["form"] == "dense"


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


# ---- compiled for GPUs -----------------------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def compiled(monkeypatch):
    """Facts of a launch on an architecture, its PTX and TTGIR, by the tools of tests/aot."""
    pytest.importorskip("triton")
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "aot"))
    import artefacts
    import record

    def of(launch, arch):
        config = record.configure(record.Call(launch.kernel, launch.args, launch.constants), arch, "probe")
        made = artefacts.compile_config(config)
        return artefacts.facts_of(config), made["ptx"], made["ttgir"]

    return of


def meta(*shape, dtype=torch.bfloat16):
    return torch.empty(shape, dtype=dtype, device="meta")


@pytest.mark.parametrize("row_bytes", [128, 64, 32])
@pytest.mark.parametrize(("by", "arch"), [("pointer", 90), ("pointer", 80), ("tma", 90)])  # before sm_90 there is no TMA
def test_loads_are_compiled(compiled, arch, row_bytes, by):
    stages, pieces = 4, 128 // row_bytes
    cell = probes.Load("L2", by, row_bytes, stages, 4)
    x, sums = meta(probes.L2_ROWS, probes.FEATURES), meta(528, dtype=torch.float32)
    facts, ptx, _ = compiled(probes.load_launch(cell, x, sums, float("inf"), probes.L2_PASSES), arch)
    assert facts.spills == 0 and facts.registers < 128  # four programs of 128 threads a multiprocessor
    tile = 128 * 128  # bytes of a step, which a thread of 128 copies in 16 bytes
    if by == "pointer":
        assert facts.copies == {16: stages * tile // 128 // 16} and facts.bulk == 0 and facts.buffers == [(stages - 1, "128x64xbf16")]
    else:
        assert facts.bulk == stages * pieces and not facts.copies and facts.buffers == [(stages - 1, f"128x{row_bytes // 2}xbf16")] * pieces
    assert ptx.count("ld.shared.v4") == tile // 128 // 16 and ptx.count("add.f32") + ptx.count("add.rn.f32") >= 64  # all of a step is read and added


@pytest.mark.parametrize("arch", [90, 80])
@pytest.mark.parametrize("n", [16, 32, 64, 128])
def test_instructions_are_compiled(compiled, arch, n):
    facts, ptx, ttgir = compiled(probes.multiply_launch(meta(64, 128), meta(n, 128), meta(528, 64, n, dtype=torch.float32), 2048), arch)
    before, _, loop = ttgir.partition("scf.for")
    assert facts.spills == 0 and facts.shared == 2 * 128 * (64 + n) and before.count("ttg.local_alloc") == 2 and "ttg.local_alloc" not in loop
    if arch == 90:
        assert ptx.count(f"m64n{n}k16.f32.bf16.bf16") == facts.instructions["wgmma.mma_async"] == 8 and facts.register_operands == 0
        assert max(facts.waits) == 1  # one group runs while the next is issued
    else:
        assert facts.instructions == {"mma.sync": 8 * n // 8} and ptx.count("m16n8k16") == n
