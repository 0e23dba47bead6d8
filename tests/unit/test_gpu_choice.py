"""When `auto` takes the kernels on a GPU: the closed form against the recorded run, and what a site makes of it. A device is faked, and nothing launched."""

import copy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import fxmask
from fxmask.bench import fit_choice, providers, table
from fxmask.bench.cells import Cell
from fxmask.bench.inputs import Inputs
from fxmask.kernels import availability, gpu_choice
from fxmask.kernels.grid import grid_shape, keep_count
from fxmask.kernels.lists import UNITS
from fxmask.passes.settings import looks
from fxmask.passes.settings.feedback import Progress
from fxmask.passes.state import gpu_site, tensors

RECORDED = Path(__file__).parents[2] / "examples/results/h200/bench.csv"
WIDE, BLOCK, CUDA = (4096, 4096), (64, 64), torch.device("cuda")


@pytest.fixture
def hopper(monkeypatch):
    """A CPU that says that it is of compute capability 9; who launches a kernel fails."""
    monkeypatch.setattr(gpu_choice, "capability", lambda device: (9, 0))
    monkeypatch.setattr(gpu_choice, "kernels_run", lambda device: True)


def recorded_steps():
    """(sizes, masked-dense's time over the kernels') of the recorded steps."""
    steps = {(fit_choice.sizes(r), r["provider"]): float(r["ms_p50"]) for r in fit_choice.read(str(RECORDED)) if r["op"] == "step"}
    return [(key, steps[key, "masked_dense"] / t) for (key, provider), t in steps.items() if provider == "fxmask_triton"]


def test_no_loss_above_3_percent_and_no_missed_win_above_10(hopper):
    found = recorded_steps()
    assert len(found) == 21
    for (tokens, shape, block, density), factor in found:
        taken = gpu_choice.choice(CUDA, torch.bfloat16, tokens, shape, block, density) == "triton"
        assert factor >= 0.97 if taken else factor <= 1.1, (tokens, shape, block, density, factor)


def test_the_constants_are_those_of_the_recorded_run():
    """After another run: python -m fxmask.bench.fit_choice examples/results/h200/bench.csv."""
    fitted = fit_choice.fit(fit_choice.read(str(RECORDED)))
    assert fitted.keys() == gpu_choice.SECONDS.keys()
    for key, values in fitted.items():
        assert gpu_choice.SECONDS[key] == pytest.approx(values, rel=0.01), key


def test_the_command_says_what_it_takes(capsys):
    for argv, code in (["--help"], 0), (["nowhere.csv"], 2):
        with pytest.raises(SystemExit) as end:
            fit_choice.main(argv)
        assert end.value.code == code
    said = capsys.readouterr()
    assert "Constants of `kernels.gpu_choice` from a recorded benchmark" in said.out
    assert said.err.endswith("error: expected a csv that fxmask bench has written, got nowhere.csv\n")
    fit_choice.main([str(RECORDED)])
    assert len(capsys.readouterr().out.splitlines()) == len(gpu_choice.SECONDS)


def recorded(**changed):
    """A csv of one row of the recorded run, with other values in it."""
    row = {**next(r for r in table.read(RECORDED) if r["op"] == "forward" and r["provider"] == "fxmask_triton"), **changed}
    return f"{','.join(row)}\n{','.join(row.values())}\n".encode()


OTHERS = {"empty": b"", "another": b"a,b\n1,2\n", "fp32": recorded(dtype="fp32"), "spoilt": recorded(ms_p50="1.2.3"), "picture": b"\x89PNG\r\n"}


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS)
def test_the_command_is_given_another_csv(text, tmp_path, capsys):
    path = tmp_path / "other.csv"
    path.write_bytes(text)
    with pytest.raises(SystemExit):
        fit_choice.main([str(path)])
    assert capsys.readouterr().err.endswith(f"error: expected a csv that fxmask bench has written, got {path}\n")


def test_a_row_that_was_cut_off_is_left_out(tmp_path):
    path = tmp_path / "bench.csv"
    path.write_bytes(recorded() + recorded().splitlines()[1][:25])
    assert len(fit_choice.read(str(path))) == 1


def test_rows_of_the_last_sources_and_machine_alone_are_fitted(tmp_path):
    path = tmp_path / "bench.csv"
    path.write_bytes(recorded() + b"".join(recorded(**{name: "other"}).splitlines()[1] + b"\n" for name in ("source", "device")) + recorded().splitlines()[1])
    assert [(r["source"], r["device"]) for r in fit_choice.read(str(path))] == [tuple(table.read(path)[0][c] for c in ("source", "device"))] * 2


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
def test_rows_of_a_cpu_in_the_same_file_are_left_out(tmp_path, dtype):
    path = tmp_path / "bench.csv"
    path.write_bytes(recorded() + recorded(device="a CPU", threads="1", dtype=dtype).splitlines()[1])
    assert [(r["device"], r["dtype"]) for r in fit_choice.read(str(path))] == [("NVIDIA H200", "bf16")]


def test_predictions_are_near_the_recorded_steps():
    for (tokens, shape, block, density), factor in recorded_steps():
        assert gpu_choice.factor(tokens, shape, block, density) == pytest.approx(factor, rel=0.2)


def test_lists_of_every_forward_take_their_time():
    case = 4096, WIDE, BLOCK, 0.2
    own, dense = (sum(gpu_choice.seconds(op, *case, "masked", impl) for op in ("forward", "dx", "dw")) for impl in ("triton", "masked_dense"))
    assert gpu_choice.factor(*case) == pytest.approx(dense / own) and gpu_choice.factor(*case, lists=True) == pytest.approx(dense / (own + gpu_choice.LISTS))


def test_what_the_seconds_multiply_by_hand():
    """1,000 tokens, 200 -> 300, a quarter kept in 16 x 32: three strips of 128 features, of eight blocks each, and eight tiles of 128 tokens."""
    m, n, k, kept = 1000, 300, 200, 0.25
    mn, mk, nk, flop = m * n, m * k, n * k, 2 * m * n * k
    dense = {op: gpu_choice.features(op, m, (n, k), (16, 32), kept, False) for op in ("forward", "dx", "dw")}
    assert dense == {"forward": (1, flop, 2 * mk, 2 * mn), "dx": (1, flop, 2 * mn, 2 * mk), "dw": (1, flop, 2 * (mn + mk), 2 * nk)}
    issued = flop * (1 - 0.75**8) * 3 * 128 / 300
    forward, dw = (gpu_choice.features(op, m, (n, k), (16, 32), kept, True) for op in ("forward", "dw"))
    assert forward == pytest.approx((1, issued * 132 / 24, (issued + flop * kept) / 128 * 1.8, 2 * mn))
    assert dw == pytest.approx((1, issued, issued * 2 / 128 * 1.8, 2 * nk))
    flop = 2 * 100 * 17024 * 4096  # 133 strips fill the device, in tiles of 256 tokens
    assert gpu_choice.features("forward", 100, (17024, 4096), (128, 128), kept, True) == pytest.approx((1, flop / 4, flop / 4 * 3 / 256, 2 * 100 * 17024))
    flop = 2 * 2048 * 256 * 4096  # four strips, in tiles of twice 128 features
    assert gpu_choice.features("dw", 2048, (256, 4096), (64, 64), kept, True) == pytest.approx((1, flop / 4, flop / 4 * (1 / 64 + 1 / 256), 2 * 256 * 4096))


@pytest.mark.parametrize(("backward", "whole"), [("masked", ""), ("rigl", ""), ("ste", "dw"), ("unmasked", "dx dw")])
def test_products_that_a_mode_leaves_whole_take_masked_denses_time(backward, whole):
    case = 8192, WIDE, BLOCK, 0.1, backward
    same = [op for op in ("forward", "dx", "dw") if gpu_choice.seconds(op, *case, "triton") == gpu_choice.seconds(op, *case, "masked_dense")]
    assert same == whole.split()


def test_masks_are_built_by_kernels_where_these_run_and_take_the_case(monkeypatch):
    case = torch.empty(64, 64), BLOCK, "fro", "lowest", False
    asked = []
    monkeypatch.setattr(gpu_choice, "triton_ops", lambda: SimpleNamespace(builds=lambda *given: asked.append(given) or len(asked) == 1))
    for runs, builds in ((True, True), (True, False), (False, False)):
        monkeypatch.setattr(gpu_choice, "kernels_run", lambda device, runs=runs: runs)
        assert gpu_choice.builds(*case) is builds
    assert asked == [case] * 2


def test_dx_is_the_forward_of_the_transposed_weight():
    for block in ((128, 16), (32, 64)):
        dx, forward = gpu_choice.features("dx", 4096, (512, 384), block, 0.3, True), gpu_choice.features("forward", 4096, (384, 512), block[::-1], 0.3, True)
        assert dx == forward


def test_a_weight_with_more_units_than_lists_can_name_stays_masked_dense(hopper):
    for units in (UNITS, UNITS + 1):
        assert gpu_choice.takes(CUDA, (16, 16 * units), (16, 16)) == gpu_choice.takes(CUDA, (16 * units, 16), (16, 16)) == (units == UNITS)


def test_a_weight_without_elements_stays_masked_dense(hopper):
    assert [gpu_choice.takes(CUDA, shape, BLOCK) for shape in ((64, 64), (0, 64), (64, 0))] == [True, False, False]


def test_what_was_not_recorded_stays_masked_dense(hopper, monkeypatch):
    def chosen(dtype=torch.bfloat16, tokens=8192, shape=WIDE, block=BLOCK, density=0.1):
        return gpu_choice.choice(CUDA, dtype, tokens, shape, block, density)

    assert chosen() == chosen(torch.float16) == "triton"
    assert not gpu_choice.listable((16, 1 << 21), (16, 16)) and chosen(shape=(16, 1 << 21), block=(16, 16), density=0.01) == "masked_dense"
    others = [dict(dtype=torch.float32), dict(tokens=1000), dict(shape=(4096, 4095)), dict(block=(48, 64)), dict(density=0.9), dict(shape=(64, 64))]
    assert [chosen(**other) for other in others] == ["masked_dense"] * len(others)
    for found in (None, (8, 0), (10, 0)):
        monkeypatch.setattr(gpu_choice, "capability", lambda device, found=found: found)
        assert chosen() == "masked_dense"


def test_no_device_takes_no_kernel():
    cpu = torch.device("cpu")
    assert gpu_choice.capability(cpu) is None and not gpu_choice.kernels_run(cpu) and not gpu_choice.takes(cpu, WIDE, BLOCK)


def test_where_triton_does_not_run_auto_stays_masked_dense(monkeypatch):
    def broken():
        raise RuntimeError("no C compiler")

    for module in (gpu_choice, availability):
        monkeypatch.setattr(module, "capability", lambda device: (9, 0))
    monkeypatch.setattr(availability, "triton_ops", broken)
    monkeypatch.setattr(availability, "_TRIED", {})
    with pytest.warns(fxmask.FxMaskWarning, match="stays masked-dense on cpu: Triton does not run there"):
        assert not gpu_choice.takes(torch.device("cpu"), WIDE, BLOCK)
    assert not gpu_choice.takes(torch.device("cpu"), WIDE, BLOCK)  # one warning


@pytest.mark.parametrize(
    ("device", "hip", "there", "found"),
    [("cuda:1", None, True, (9, 1)), ("cpu", None, True, None), ("cuda:1", "6.2", True, None), ("cuda:1", None, False, None)],
)
def test_a_device_of_cuda_alone_has_a_compute_capability(device, hip, there, found, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", hip)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    monkeypatch.setattr(availability, "_capability", availability._capability.__wrapped__)
    assert availability.capability(torch.device(device)) == found


def test_a_capture_runs_no_kernel_that_has_not_run_before_and_that_is_not_remembered(monkeypatch):
    monkeypatch.setattr(availability, "capability", lambda device: (9, 0))
    monkeypatch.setattr(availability, "_TRIED", {})
    monkeypatch.setattr(availability, "_try_on", lambda device: True)
    found = []
    for capturing in (True, False, True):
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda capturing=capturing: capturing)
        found.append(availability.kernels_run(CUDA))
    assert found == [False, True, True]


def test_kernels_run_from_compute_capability_8_on(monkeypatch):
    monkeypatch.setattr(availability, "triton_ops", lambda: SimpleNamespace(block_index=lambda *_: None))
    for found, runs in ((None, False), ((7, 5), False), ((8, 0), True), ((12, 0), True)):
        monkeypatch.setattr(availability, "capability", lambda device, found=found: found)
        monkeypatch.setattr(availability, "_TRIED", {})
        assert availability.kernels_run(torch.device("cpu")) == runs, found


@pytest.fixture
def tries(monkeypatch):
    """What a first launch on a device of compute capability 9 is given; kernels stand there that refuse what no kernel can read, and once have no memory."""
    seen = []

    def block_index(w, *_):
        seen.append(type(w))
        if len(seen) == 1 and not isinstance(w, FakeTensor):
            raise torch.OutOfMemoryError("CUDA out of memory")
        w.numpy()

    monkeypatch.setattr(availability, "capability", lambda device: (9, 0))
    monkeypatch.setattr(availability, "triton_ops", lambda: SimpleNamespace(block_index=block_index))
    monkeypatch.setattr(availability, "_TRIED", {})
    return seen


def test_a_first_try_without_memory_or_on_fake_tensors_says_nothing_of_triton(tries):
    cpu = torch.device("cpu")
    assert not availability.kernels_run(cpu)
    with FakeTensorMode():
        assert availability.kernels_run(cpu)
    assert availability.kernels_run(cpu) and tries == [torch.Tensor] * 2


def test_modes_that_skip_less_gain_less():
    factors = [gpu_choice.factor(8192, WIDE, BLOCK, 0.1, mode) for mode in ("masked", "ste", "unmasked")]
    assert factors == sorted(factors, reverse=True) and factors[-1] > 1
    assert gpu_choice.factor(8192, WIDE, BLOCK, 0.1, "rigl") == factors[0]


def test_small_blocks_are_thought_slower():
    factors = [gpu_choice.factor(8192, WIDE, (b, b), 0.1) for b in (128, 64, 32, 16)]
    assert factors == sorted(factors, reverse=True)


# ---- sites -----------------------------------------------------------------------------------------------------------------------------------------------


def layer(**options):
    with torch.device("meta"):
        m = nn.Linear(4096, 4096)
    options = {"ratio": 0.9, "block": BLOCK, **options}
    return fxmask.apply(nn.Sequential(m), **options)[0]


def test_what_a_layer_looks_at(hopper):
    m = layer()
    assert m._fxmask_from == gpu_choice.pays_from(WIDE, BLOCK, gpu_site.density(m), "masked", True) == 1024
    assert layer(block=(12, 64))._fxmask_from == layer(impl="reference")._fxmask_from == 0
    assert layer(overrides={"0": dict(read="weight")})._fxmask_from == 0  # its owner reads W∘M
    assert layer(ratio=0.1)._fxmask_from == gpu_choice.NEVER
    assert copy.deepcopy(m)._fxmask_from == 1024


def test_a_ramp_changes_it_at_marks(hopper):
    m = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 256))
    fxmask.apply(m, ratio=0.9, block=(16, 16), schedule=fxmask.Schedule("linear", steps=40), start=2)
    fxmask.step(m, 0)
    seen = []
    for _ in range(60):
        seen.append(gpu_site.density(m[0]))
        assert gpu_site.density(m[1]) == seen[-1] >= 1 - m[0]._fxmask_config.ratio_at(m[0]._fxmask_step) - 0.01
        fxmask.step(m)
    assert len(set(seen)) == 5 and seen == sorted(seen, reverse=True) and seen[-1] < 0.11


def test_what_autocast_leaves_as_it_is_takes_no_kernel():
    """Float64, which autocast casts on neither side."""
    m = fxmask.apply(nn.Sequential(nn.Linear(64, 64)), ratio=0.5, block=(16, 16))[0]
    m._fxmask_from = 1
    single, double = torch.ones(2, 64), torch.ones(2, 64).double()
    with torch.autocast("cpu", torch.bfloat16):
        found = [gpu_site.implementation(m, x, w, None) for x, w in ((single, m.weight), (double, m.weight.double()), (double, m.weight))]
    assert found == ["triton", "masked_dense", "auto"]


def test_a_look_at_the_dense_model_changes_nothing(hopper):
    m = layer()
    before = m._fxmask_from
    with fxmask.dense(m):
        assert m._fxmask_from == before
    assert m._fxmask_from == before


def test_the_benchmark_measures_what_a_layer_runs(hopper, monkeypatch):
    """`fxmask_auto` asks the same function, with the ratio of its cell."""
    monkeypatch.setattr(gpu_choice, "LEAST", 64)
    for ratio, shape in ((0.9, (64, 4096, 4096)), (0.3, (64, 4096, 4096)), (0.9, (64, 64, 64))):
        m, n, k = shape
        cell = Cell("forward", "forward", m, n, k, "bf16", BLOCK, ratio, "random")
        w, mask = torch.empty(n, k, dtype=torch.bfloat16, device="meta"), torch.empty(grid_shape((n, k), BLOCK), dtype=torch.bool, device="meta")
        density = keep_count(mask.numel(), ratio) / mask.numel()
        gpu_choice.pays_from.cache_clear()
        expected = gpu_choice.pays_from((n, k), BLOCK, density) <= m
        i = Inputs(cell, CUDA, w, w, w, mask, mask, mask)
        assert providers.ran(i) == ""  # of another provider
        i.cell = cell.by("fxmask_auto")
        assert providers.ran(i) == f"forward {'triton' if expected else 'masked_dense'}"
        assert providers.pays(i) == expected == (gpu_choice.factor(m, (n, k), BLOCK, density) >= gpu_choice.MARGIN)
    gpu_choice.pays_from.cache_clear()


@pytest.mark.parametrize("schedule", [fxmask.Schedule("cosine", steps=200, initial=0.9), fxmask.Schedule("cubic", steps=200)], ids=["falling", "rising"])
def test_a_ratio_on_its_way_counts_at_a_few_marks(schedule):
    """Each is a recompile. Between marks the lower ratio decides, which favours masked-dense."""
    config = fxmask.WeightMask(0.3, BLOCK, schedule=schedule)
    seen = [gpu_site.settled_ratio(config, step, 0.3) for step in range(220)]
    assert len(set(seen)) <= 5 and seen[-1] == pytest.approx(0.3)
    assert all(mark <= config.ratio_at(step) + 1e-9 for step, mark in enumerate(seen))


def test_layers_that_move_alone_stay_at_their_lowest_ratio(hopper):
    """By flips; marks of their own would recompile what they are compiled in for each of them. By the loss all move together."""
    found = {}
    for measure in ("flip_rate", "loss"):
        m = layer(schedule=fxmask.Feedback(measure, every=1, goal=1.0))
        before = m._fxmask_from
        looks.load(m, {**Progress(level=100, next=100)._asdict(), "looked": None})
        tensors.sync(m)
        assert m._fxmask_config.ratio == 0.9
        found[measure] = m._fxmask_from != before
    assert found == {"flip_rate": False, "loss": True}


@pytest.mark.parametrize("backward", ["masked", "ste", "unmasked"])
def test_from_there_on_they_pay_at_every_number_of_tokens(backward):
    for shape in ((384, 384), (384, 1536), (4096, 4096), (768, 14336)):
        for block, density in (((16, 64), 0.3), ((64, 64), 0.2), ((128, 128), 0.5)):
            least = gpu_choice.pays_from(shape, block, density, backward)
            counts = [1024 * quarters << power >> 2 for power in range(7) for quarters in range(4, 8)]
            pays = [gpu_choice.factor(t, shape, block, density, backward) >= gpu_choice.MARGIN for t in counts]
            at = counts.index(least) if least < gpu_choice.NEVER else len(counts)
            assert all(pays[at:]) and not any(pays[at - 1 : at]), (shape, block, density)
