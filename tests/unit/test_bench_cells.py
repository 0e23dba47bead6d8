"""The stages of the GPU run that have a csv of their own: what they measure, their cells and tiles, and their kernels compiled for GPUs."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fxmask.bench import device_stages, gpu, probes, pruning, refreshes, sweeps
from fxmask.kernels.grid import keep_count

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")


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


def test_what_the_probes_do_is_counted():
    pytest.importorskip("triton")
    load = probes.prepare_load(probes.Load("L2", "pointer", 64, 4, 4), CPU)
    tile = 128 * 64 * 2  # bytes; six of them, loaded twice by eight programs, are two steps each
    assert load.worth(2.0) == {"set_bytes": 6 * tile, "bytes": 8 * 2 * tile, "tb_per_s": 8 * 2 * tile / 2e-3 / 1e12}
    multiply = probes.prepare_multiply(probes.Multiply(32, 4), CPU)
    assert multiply.worth(2.0)["flop"] == 2 * 8 * 3 * 64 * 32 * 128  # of eight programs, three steps each


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
    narrow = {s.replace("x128x64", "x64x64") for s in sizes} | {"256x64x64-w4-s3", "256x64x64-w4-s4"}
    smaller = {b: {sweeps.tile_name(t) for t in sweeps.tiles_of(torch.bfloat16, (b, b), CPU)} for b in (64, 32)}
    assert smaller[64] == {*sizes, *narrow, *(f"{s}-tma" for s in narrow)} and smaller[32] == {*sizes, *narrow}  # bits: no TMA
    few = {s for s in sizes if s.startswith("128") and "w8" in s}
    less = {n for n in names if not n.startswith("256x128x64-w8-s4")}  # which takes 4 x 384 x 64 elements of 2 bytes
    for capability, room, left in (((9, 0), 232_448, set(names)), ((9, 0), 150_000, less), ((8, 0), 166_912, few)):
        properties = SimpleNamespace(shared_memory_per_block_optin=room, shared_memory_per_block=49_152)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, properties=properties: properties)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, capability=capability: capability)
        assert left == {sweeps.tile_name(t) for t in sweeps.tiles_of(torch.bfloat16, (128, 128), torch.device("cuda"))}


@pytest.mark.parametrize("stage", sweeps.OPS)
def test_cells_of_the_sweeps(stage):
    cells, settings = sweeps.sweep(stage, CPU, False)
    assert len(cells) == len(set(cells)) and settings["csv"] == f"{stage}.csv"
    assert {(c.block[0], c.ratio) for c in cells if c.block[0]} == {(b, r) for b in (128, 64, 32, 16) for r in (0.8, 0.5, 0.9)}
    assert all(c.provider in settings["registry"] for c in cells)
    for n, c in enumerate(cells):  # baselines before what is compared with them, and the library's own choice before the others
        if c.provider not in ("dense", "masked_dense"):
            assert {c.dense(), c.by("masked_dense")} <= set(cells[:n]) and (c.provider == "own" or c.by("own") in cells[:n])
    assert {c.ratio for c in sweeps.sweep(stage, CPU, True)[0]} == {0.0, 0.8}
    if stage == "splits":
        assert {f"128x128x64-w8-s4-splits-{s}" for s in (1, 2, 4)} < {c.provider for c in cells}


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
    assert set(stages) - set(less) == {"small", "full", "train"} and all("--quick" in less[n].command for n in second)
    assert set(gpu.PARTS) == {*device_stages.PARTS, *sweeps.OPS}


def test_every_column_is_explained():
    text = (ROOT / "examples/results/README.md").read_text()
    assert [c for p in device_stages.PARTS.values() for c in p.columns if f"`{c}`" not in text] == []
    assert [n for n in gpu.PARTS if f"`{n}.csv`" not in text] == []


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
