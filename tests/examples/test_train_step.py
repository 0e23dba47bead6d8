"""The benchmark of whole training steps: what it times, what it writes, and that a run which was stopped goes on."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import plots
import pytest
import torch
from benchmarks import step_contenders, step_group, step_measure, step_models, train_step
from benchmarks.step_models import Spec
from torch import nn

import fxmask
from fxmask.bench import clock
from fxmask.errors import ConfigError

CPU = torch.device("cpu")
TINY = ("--model", "tiny", "--block", "8", "--ratio", "0.75", "--threads", "1", "--repeats", "3", "--device", "cpu")
EAGER = ("--contenders", "dense_eager", "masked_dense", "fxmask_eager")


def run(csv, *options: str) -> list[dict[str, str]]:
    """The rows of the csv afterwards, with those that a kill cut off."""
    assert train_step.main([*TINY, "--csv", str(csv), *options]) == 0
    return plots.read_csv(csv, ("ratio", "contender"))


@pytest.fixture(autouse=True)
def calm(monkeypatch):
    """No load of other processes, so that a test says itself what is busy."""
    monkeypatch.setattr(clock, "load_average", lambda: 0.5)


@pytest.fixture(scope="module")
def all_of_them(tmp_path_factory):
    """The csv of all contenders, those that compile without Inductor."""
    csv = tmp_path_factory.mktemp("steps") / "train_step.csv"
    return csv, run(csv, "--compile-backend", "aot_eager", "--warm-up", "3")


@pytest.mark.slow
def test_steps_as_graphs(tmp_path):
    """Right beside those that are none; of a graph, which holds its memory, no peak is told."""
    rows = run(tmp_path / "a.csv", "--contenders", "dense_eager", "dense_graphed", "masked_dense", "fxmask_graphed", "--refresh", "1", "10", "--warm-up", "3")
    assert [(r["contender"], r["refresh"], r["gate"]) for r in rows if "graphed" in r["contender"]] == [
        ("dense_graphed", "", "pass"), ("fxmask_graphed", "1", "pass"), ("fxmask_graphed", "10", "pass"),
    ]  # fmt: skip
    assert all((r["peak_bytes"] == "") == ("graphed" in r["contender"]) for r in rows)


def test_a_peak_is_of_what_is_held_at_once():
    """Not of all that a step allocates: four times a mebibyte, of which two at a time."""

    def step():
        held = torch.empty(2**20, dtype=torch.uint8)
        for _ in range(3):
            held = torch.empty(2**20, dtype=torch.uint8)
        del held

    peak = step_measure._peak(SimpleNamespace(batch=(torch.zeros(1),), step=step))
    assert 2 * 2**20 <= peak < 3 * 2**20


def test_steps_by_scores_that_last(tmp_path):
    """Beside those by norms, and right beside masked-dense by the same scores."""
    named = ("masked_dense", "fxmask_eager", "taylor_masked_dense", "taylor_eager")
    rows = run(tmp_path / "a.csv", "--contenders", *named, "--refresh", "1", "--warm-up", "4")
    assert [(r["contender"], r["gate"]) for r in rows] == [(name, "pass") for name in named]
    s = setting()
    lasting = [name for name in named if step_contenders.runner(s, name, 1, step_models.data(s.spec)).model.blocks[0].fc1._fxmask_config.average == 0.9]
    assert lasting == ["taylor_masked_dense", "taylor_eager"]


def test_the_hash_of_the_code_is_of_what_a_step_runs(monkeypatch):
    """Of every folder of the package but those that a step does not enter, and the kernels, which have their own."""
    hashed = set()
    monkeypatch.setattr(step_contenders, "file_hash", lambda files, root: hashed.update(p.relative_to(root).as_posix() for p in files) or "0" * 12)
    step_contenders.code.__wrapped__()
    package = Path(fxmask.__file__).parent
    elsewhere = ("kernels", "bench", "analysis", "advice")
    entered = {p.relative_to(package).as_posix() for folder in (package, package / "passes") for p in folder.rglob("*.py")}
    assert {name for name in entered if name.split("/")[0] not in elsewhere} <= hashed


def numbers(row, *columns):
    return [float(row[c]) for c in columns]


def test_rows(all_of_them):
    rows = all_of_them[1]
    assert tuple(rows[0]) == step_group.COLUMNS
    masked = [(name, n) for name in ("masked_dense", "fxmask_eager", "fxmask_compiled") for n in ("1", "10", "100")]
    assert [(r["contender"], r["refresh"]) for r in rows] == [("dense_eager", ""), ("dense_compiled", ""), *masked]
    for r in rows:
        assert r["gate"] == "pass" and r["clock"] == "process" and int(r["turns"]) >= 3
        low, mid, high, first = numbers(r, "ms_p10", "ms_p50", "ms_p90", "first_step_s")
        assert 0 < low <= mid <= high and first > 0
        held, peak, saved = numbers(r, "held_bytes", "peak_bytes", "saved_bytes")
        assert held > 3 * 4 * float(r["params"])  # and AdamW's counters
        assert 0 < saved < peak
        assert r["utc"] and r["torch"] == torch.__version__ and r["source"] and len(r["code"]) == 12
        assert r["busy"] in ("0", "1") and (r["verdict"] == "ok") == (r["busy"] == "0")
        assert not r["j_per_step"] and not r["bytes_measured"] and not r["throttled"]


def test_losses_agree(all_of_them):
    loss = {(r["contender"], r["refresh"]): float(r["loss"]) for r in all_of_them[1]}
    assert loss["dense_compiled", ""] == pytest.approx(loss["dense_eager", ""], rel=1e-5)
    masked = [v for (name, _), v in loss.items() if not name.startswith("dense")]
    assert masked == pytest.approx([masked[0]] * 9, rel=1e-5)
    assert abs(masked[0] - loss["dense_eager", ""]) > 1e-4  # masks are in force


def test_flop_predicted_and_measured(all_of_them):
    for r in all_of_them[1]:
        assert int(r["flop_measured"]) == int(r["flop_predicted"])
    dense, masked = all_of_them[1][0], all_of_them[1][-1]
    assert int(masked["flop_predicted"]) < int(dense["flop_predicted"]) and int(dense["bytes_min"]) > 0


def test_against(all_of_them):
    rows = all_of_them[1]
    best = min(float(r["ms_p50"]) for r in rows if r["contender"].startswith("dense"))
    of = {r["refresh"]: float(r["ms_p50"]) for r in rows if r["contender"] == "masked_dense"}
    for r in rows:
        assert float(r["x_dense"]) == pytest.approx(best / float(r["ms_p50"]), rel=1e-4)
        if r["refresh"]:
            assert float(r["x_masked_dense"]) == pytest.approx(of[r["refresh"]] / float(r["ms_p50"]), rel=1e-4)


def test_amortised(all_of_them):
    assert step_measure.amortised(10.0, 30.0, 10) == 12.0
    assert step_measure.amortised(10.0, 30.0, 1) == 30.0
    for r in all_of_them[1]:
        if r["refresh"] in ("", "1"):
            assert not r["ms_plain"] and not r["ms_rebuild"]
        else:
            plain, rebuild, ms = numbers(r, "ms_plain", "ms_rebuild", "ms_p50")
            assert ms == pytest.approx(plain + (rebuild - plain) / int(r["refresh"]), rel=1e-4)


def test_plot(all_of_them, capsys):
    csv = all_of_them[0]
    assert train_step.main(["--plot", str(csv)]) == 0
    assert csv.with_suffix(".png").read_bytes().startswith(b"\x89PNG")
    assert train_step.main(["--plot", str(csv.with_name("none.csv"))]) == 2
    assert "expected a csv with rows" in capsys.readouterr().err


def setting(**changes):
    values = dict(block=8, ratio=0.75, dtype="fp32", optimizer="adamw", masked_step=True, impl="auto", compile_mode="default", compile_backend="", threads=1)
    return step_contenders.Setting(Spec("tiny", CPU, 4), **{**values, **changes})


@pytest.mark.parametrize("masked_step", [True, False])
def test_which_steps_rebuild(masked_step):
    s = setting(masked_step=masked_step)
    r = step_contenders.runner(s, "fxmask_eager", 2, step_models.data(s.spec))
    seen = []
    for _ in range(5):
        before = fxmask.masks(r.model)
        with torch.no_grad():
            for name in before:
                r.model.get_parameter(name).normal_()
        seen.append(r.rebuilds)
        r.step()
        assert any(not torch.equal(m, before[n]) for n, m in fxmask.masks(r.model).items()) == seen[-1]
    assert seen == [False, True, False, True, False]


@pytest.mark.slow
def test_stopped_and_gone_on_with(tmp_path, monkeypatch, capsys):
    csv, measured, original = tmp_path / "steps.csv", [], train_step.measure
    options = (*EAGER, "--ratio", "0.5", "0.75", "--refresh", "10", "--impl", "reference")

    def until_the_second(s, *rest):
        if measured:
            raise KeyboardInterrupt
        measured.append(s.ratio)
        return original(s, *rest)

    monkeypatch.setattr(train_step, "measure", until_the_second)
    assert train_step.main([*TINY, "--csv", str(csv), *options]) == 130
    first = csv.read_bytes()
    assert len(plots.read_csv(csv)) == 3
    monkeypatch.setattr(train_step, "measure", lambda s, *rest: measured.append(s.ratio) or original(s, *rest))
    rows = run(csv, *options)
    assert measured == [0.5, 0.75]
    assert csv.read_bytes().startswith(first) and [r["ratio"] for r in rows] == ["0.5"] * 3 + ["0.75"] * 3
    out = capsys.readouterr().out
    assert "at 50 %, adamw: measured already" in out and "best: fxmask_eager on tiny" in out.splitlines()[-1]

    csv.write_bytes(csv.read_bytes()[:-30])  # killed while it wrote: the group is not whole
    run(csv, *options)
    assert measured == [0.5, 0.75, 0.75]
    run(csv, *options, "--optimizer", "sgd")  # other settings are another group
    assert measured == [0.5, 0.75, 0.75, 0.5, 0.75]


@pytest.mark.slow
def test_other_code_is_measured_anew(tmp_path, monkeypatch):
    few = ("--contenders", "dense_eager")
    assert len(run(tmp_path / "steps.csv", *few)) == 1
    monkeypatch.setattr(step_contenders, "code", lambda: "another")
    assert len(run(tmp_path / "steps.csv", *few)) == 2


def test_busy(tmp_path, monkeypatch):
    csv, few = tmp_path / "steps.csv", ("--contenders", "dense_eager", "fxmask_eager", "--refresh", "10")
    monkeypatch.setattr(clock, "load_average", lambda: 99.0)
    rows = run(csv, *few)
    assert {r["busy"] for r in rows} == {"1"} and all("busy: load 99.0 on" in r["verdict"] for r in rows)
    assert all(r["x_dense"] for r in rows)  # said, not hidden
    assert len(run(csv, *few)) == 2
    monkeypatch.setattr(clock, "load_average", lambda: 0.0)
    rows = run(csv, *few, "--again")
    assert len(rows) == 4
    calm = rows[-1]["busy"] == "0"  # the later row of a group counts
    assert len(run(csv, *few, "--again")) == (4 if calm else 6)


class Slowed(step_measure.Watch):
    def throttled(self):
        return "clocks were held down: power limit"


def test_state_of_the_machine(monkeypatch):
    def state(share, watch):
        return step_group.state_of(CPU, watch, 0.5, share)

    quiet = step_measure.Watch(CPU)
    monkeypatch.setattr("os.cpu_count", lambda: 2)
    assert [step_group.state_of(CPU, quiet, load, 0.99)["verdict"] for load in (2.0, 2.5)] == ["ok", "busy: load 2.5 on 2 cores"]
    assert state(0.99, quiet)["busy"] == "0"
    waited = state(0.5, quiet)
    assert waited["busy"] == "1" and waited["verdict"] == "busy: 0.50 of a core"
    slow = state(0.99, Slowed(CPU))
    assert slow["busy"] == "0" and slow["verdict"] == "throttled: clocks were held down: power limit" and slow["throttled"]


def test_wrong_losses_give_no_speed():
    row = {"contender": "fxmask_eager", "refresh": "10", "ms_p50": "1"}
    found = {("masked_dense", 2): {"losses": (2.0, 1.9)}, ("fxmask_eager", 2): {"losses": (2.0, 1.7)}}
    row |= step_group.gate(row, found, "fp32")
    assert row["gate"] == "fail" and row["verdict"] == "none: wrong loss, 1.7 for 1.9"
    rows = [{"contender": "dense_eager", "refresh": "", "ms_p50": "2"}, row]
    step_group.against(rows)
    assert rows[0]["x_dense"] == "1" and "x_dense" not in row


@pytest.mark.parametrize(
    "options",
    [
        ("--model", "gpt", "--width", "64", "--depth", "1", "--sequence", "8", "--block", "16", "--batch", "2"),
        pytest.param(("--dtype", "bf16", "--masked-step", "auto"), marks=pytest.mark.slow),
        pytest.param(("--one-at-a-time", "--optimizer", "sgd", "--impl", "reference", "--masked-step", "off"), marks=pytest.mark.slow),
    ],
    ids=["gpt", "bf16", "one-at-a-time"],
)
def test_options(tmp_path, options):
    rows = run(tmp_path / "steps.csv", *EAGER, "--refresh", "10", *options)
    assert [r["gate"] for r in rows] == ["pass"] * 3
    assert all(int(r["flop_measured"]) == int(r["flop_predicted"]) for r in rows)


def test_wrong_use(tmp_path, capsys):
    csv = tmp_path / "a.csv"
    for options, text in (
        (("--contenders", "sparse"), "--contenders: expected names of dense_eager, dense_compiled"),
        (("--model", "resnet"), "--model: expected names of resmlp-s12"),
        (("--refresh", "0"), "--refresh: expected numbers of steps of at least 1, got 0"),
        (("--impl", "fast"), "impl"),
        (("--block", "8", "0"), "expected e.g. (16, 16), got (0, 0)"),
        (("--ratio", "0.75", "2"), "expected a finite number in [0, 1), got 2.0"),
        (("--model", "gpt", "--width", "257"), "--width: expected a multiple of its 2 heads, one for each 128, got 257"),
        (("--device", "meta"), "--device: expected cpu"),
    ):
        assert train_step.main([*TINY, *EAGER, "--csv", str(csv), *options]) == 2
        assert text in capsys.readouterr().err and not csv.exists()
    (tmp_path / "taken").touch()
    assert train_step.main([*TINY, *EAGER, "--csv", str(tmp_path / "taken" / "a.csv")]) == 2
    assert capsys.readouterr().err.startswith(f"train_step.py: the csv cannot be written: File exists.\n  where: {tmp_path / 'taken'}\n  fix: name a file")
    with pytest.raises(ConfigError, match=r"Sequential: expected an nn.Linear whose name matches 'blocks\.\*', got a model without linears"):
        step_models.check_maskable(nn.Sequential(nn.Conv2d(3, 8, 3)), "blocks.*")
    with pytest.raises(ConfigError, match="inputs: expected tensors on cpu, where the model's weights are, got one on meta"):
        step_models.check_inputs(nn.Linear(4, 4), torch.zeros(2, 4), torch.zeros(2, 4, device="meta"))


def test_depth_that_fits():
    assert step_models.depth_that_fits(free=1000, held=10, passing=20, instances=5, rest=100) == 10
    assert step_models.depth_that_fits(free=1000, held=10, passing=20, instances=5, rest=900) == 1


@pytest.mark.parametrize("name", [n for n in step_models.MODELS if n != "vit-b16"])
def test_models(name):
    spec = Spec(name, torch.device("meta"), 2, width=256, depth=2, sequence=16)
    model = step_models.build(spec)
    step_models.check_maskable(model, step_models.MODELS[name].include)
    x, y = step_models.data(spec)
    assert model(x).shape[:-1] == y.shape


@pytest.mark.slow
def test_inductor(tmp_path):
    rows = run(tmp_path / "steps.csv", "--contenders", "dense_eager", "dense_compiled", "masked_dense", "fxmask_compiled", "--refresh", "10")
    assert [r["gate"] for r in rows] == ["pass"] * 4
    assert all(int(r["saved_bytes"]) > 0 for r in rows)


@pytest.mark.gpu
@pytest.mark.parametrize("impl", ["auto", "triton"])
def test_on_a_gpu(tmp_path, impl):
    for model in (("--model", "tiny"), ("--model", "gpt", "--width", "256", "--depth", "2", "--sequence", "64")):
        rows = run(tmp_path / "steps.csv", *model, "--device", "cuda", "--block", "16", "--ratio", "0.5", "--dtype", "bf16", "--energy", "0.5", "--impl", impl)
        rows = [r for r in rows if r["model"] == model[1]]
        assert all(r["gate"] == "pass" and r["clock"] == "events" and float(r["peak_bytes"]) > 0 for r in rows)


@pytest.mark.gpu
def test_depth_on_a_gpu():
    s = setting()
    spec = Spec("gpt", torch.device("cuda", 0), 2, width=1024, sequence=128)
    assert step_models.depth_on_cuda(spec, 8, step_contenders.hungriest(s)) > step_models.depth_on_cuda(spec, 64, step_contenders.hungriest(s)) >= 1
