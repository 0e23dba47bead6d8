"""The measured tune: decisions are made once, kept on disk, and never stand in the way of a result."""

import json
import math
import multiprocessing
import os
import pwd
import tempfile
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch

import fxmask
from fxmask.errors import FxMaskWarning
from fxmask.kernels import ops, reference, tune
from fxmask.kernels.cpu import chosen, deciding
from fxmask.kernels.cpu.plans import BY_NAME, Case, plans

BLOCK = (16, 16)
G = torch.Generator().manual_seed(0)
X, W, GY = (torch.randn(s, generator=G) for s in ((600, 64), (48, 64), (600, 48)))
MASK = torch.rand(3, 4, generator=G) < 0.5
REAL = tune.measure


class Table:
    """The files, and what was measured: the names of the candidates of each tune."""

    def __init__(self, folder):
        self.folder, self.measured, self.budget = folder, [], 0.002

    def measure(self, candidates, threads, budget=None):
        self.measured.append(list(candidates))
        return REAL(candidates, threads, self.budget)

    def files(self):
        return sorted(self.folder.iterdir()) if self.folder.exists() else []

    def fresh(self):
        """As in another process."""
        deciding.decisions.clear()
        self.measured.clear()


@pytest.fixture(autouse=True)
def table(monkeypatch, tmp_path):
    """Small ops are tuned, into a folder of their own, on a machine that is not busy."""
    made = Table(tmp_path / "cache")
    monkeypatch.setenv("FXMASK_TUNE", "1")
    monkeypatch.setenv("FXMASK_CACHE", str(made.folder))
    monkeypatch.setattr(deciding, "SMALL", 0.0)
    monkeypatch.setattr(deciding, "NEAR", 1e9)
    monkeypatch.setattr(tune, "measure", made.measure)
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(time, "process_time", time.perf_counter)
    monkeypatch.setattr(time, "thread_time", time.perf_counter)
    monkeypatch.setattr(deciding, "decisions", {})
    monkeypatch.setattr(deciding, "small", {})
    monkeypatch.setattr(tune, "_warned", set())
    return made


def forward(impl="cpu"):
    y = ops.linear(X, W, None, MASK, BLOCK, "masked", None, impl)
    torch.testing.assert_close(y, reference.masked_linear(X, W, None, MASK, BLOCK))
    return y


def said(f):
    """The texts of fxmask's warnings; any other is an error, as ever."""
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        f()
    assert all(issubclass(w.category, FxMaskWarning) for w in found), [str(w.message) for w in found]
    return [str(w.message) for w in found]


@pytest.mark.parametrize("impl", ["cpu", "auto"])
def test_a_choice_is_measured_once_kept_and_loaded(table, monkeypatch, impl):
    forward(impl)
    forward(impl)
    assert len(table.measured) == 1 and len(table.measured[0]) == 2 + (impl == "auto")
    (file,) = table.files()
    content, (first,) = json.loads(file.read_text()), deciding.decisions.values()
    assert content["name"] == first.name == min(first.times, key=first.times.get) and content["stamp"] == tune.stamp()
    assert set(content["times"]) == set(table.measured[0]) and not first.busy and abs(first.at - time.time()) < 60
    table.fresh()
    monkeypatch.setattr(tune, "measure", lambda *_: pytest.fail("measured again"))
    forward(impl)
    assert list(deciding.decisions.values()) == [first] and table.files() == [file]


def test_every_op_its_dtype_and_tokens_decide_for_themselves(table):
    a, b, gy = X.clone().requires_grad_(), W.clone().requires_grad_(), GY
    ops.linear(a, b, None, MASK, BLOCK, "masked", None, "cpu").backward(gy)
    ops.masked_linear_dx(gy, W, MASK, *BLOCK, "masked", None, "cpu")
    ops.masked_linear_dw(gy, X, MASK, *BLOCK, "masked", None, "cpu")
    assert len(table.files()) == len(table.measured) == 4
    ops.linear(X.double(), W.double(), None, MASK, BLOCK, "masked", None, "cpu")
    ops.linear(X[:300], W, None, MASK, BLOCK, "masked", None, "cpu")
    ops.linear(X, W, None, MASK & (torch.arange(4) < 1), BLOCK, "masked", None, "cpu")
    assert len(table.files()) == len(table.measured) == 7
    ops.linear(X[:599], W, None, MASK, BLOCK, "masked", None, "cpu")  # as good as 600 tokens
    assert len(table.measured) == 7


def test_impl_cpu_never_multiplies_densely_and_the_reference_never_asks(table, monkeypatch):
    monkeypatch.setattr(deciding, "seconds", lambda plan, case: 1.0 if plan.chunk else 1e-8)
    forward("cpu")
    assert "masked_dense" not in table.measured[0]
    forward("auto")
    assert "masked_dense" in table.measured[1]
    monkeypatch.setattr(chosen.Form, "_plan", lambda *_: pytest.fail("asked"))
    forward("reference")


DAMAGE = {
    "garbage": lambda t: b"\xff\xfe\x00 no json \x80",
    "text": lambda t: b"no json",
    "empty": lambda t: b"",
    "truncated": lambda t: t[: len(t) // 2].encode(),
    "a list": lambda t: b"[1, 2]",
    "null": lambda t: b"null",
    "nested too deep": lambda t: b"[" * 200_000,
    "times are a list": lambda t: changed(t, times=[1.0]),
    "a time is a text": lambda t: changed(t, times=dict.fromkeys(BY_NAME, "fast")),
    "a time has 400 digits": lambda t: changed(t, times=dict.fromkeys(BY_NAME, 10**400)),
    "no time": lambda t: changed(t, at=None),
    "a name is a list": lambda t: changed(t, name=["rows-512"]),
    "no such plan": lambda t: changed(t, name="diagonal-64", times={"diagonal-64": 1e-6}),
    "a plan of another op": lambda t: changed(t, name="columns-512", times={"columns-512": 1e-6}),
    "a plan that impl='cpu' may not take": lambda t: changed(t, name="masked_dense", times={"masked_dense": 1e-6}),
    "other code": lambda t: changed(t, stamp={**tune.stamp(), "code": "0"}),
    "another key": lambda t: changed(t, key="dx/1"),
    "another version": lambda t: changed(t, stamp={**tune.stamp(), "torch": "1.0"}),
    "another format": lambda t: changed(t, stamp={**tune.stamp(), "format": 0}),
}


def changed(text, **entries):
    return json.dumps({**json.loads(text), **entries}).encode()


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_made_again_with_one_warning(table, damage):
    forward()
    (file,) = table.files()
    text = file.read_text()
    file.write_bytes(damage(text))
    table.fresh()
    found = said(forward)
    assert len(found) == 1 and str(file) in found[0] and "made again" in found[0]
    assert len(table.measured) == 1 and table.files() == [file]
    assert {**json.loads(file.read_text()), "times": 0, "at": 0, "name": 0} == {**json.loads(text), "times": 0, "at": 0, "name": 0}
    table.fresh()
    assert said(forward) == [] and not table.measured


def test_a_folder_that_cannot_be_made_costs_one_warning(table, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXMASK_CACHE", str(tmp_path / "file" / "below"))
    found = said(lambda: (forward(), forward("auto"), table.fresh(), forward()))
    assert len(found) == 1 and "FXMASK_CACHE" in found[0] and str(tmp_path / "file") in found[0]
    assert (tmp_path / "file").read_text() == "" and len(table.measured) == 1


@pytest.mark.parametrize(("owner", "name", "error"), [(os, "replace", PermissionError), (tempfile, "mkstemp", PermissionError), (json, "dump", OSError)])
def test_a_folder_that_cannot_be_written_costs_one_warning(table, owner, name, error, monkeypatch):
    def refuse(*_, **__):
        raise error(28, "no space, or no right")

    monkeypatch.setattr(owner, name, refuse)
    found = said(lambda: (forward(), forward("auto")))
    assert len(found) == 1 and "cannot be kept" in found[0] and "FXMASK_TUNE=0" in found[0]
    assert table.files() == [] and len(table.measured) == len(deciding.decisions) == 2


def test_a_file_that_can_be_neither_read_nor_replaced_is_named_once_for_each(table):
    forward()
    (file,) = table.files()
    file.unlink()
    file.mkdir()  # root may read any file, but no folder
    table.fresh()
    found = said(lambda: (forward(), table.fresh(), forward()))
    assert 1 <= len(found) <= 2 and all(str(file) in text for text in found)


def test_nobody_is_at_home(table, monkeypatch, tmp_path):
    """A user without an entry, as in many containers: there is no folder to keep anything in."""
    for name in ("HOME", "XDG_CACHE_HOME", "FXMASK_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert len(said(lambda: (forward(), forward("auto")))) <= 1
    assert len(deciding.decisions) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tune.folder() == tmp_path / "xdg" / "fxmask"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tune.folder() == Path(tmp_path) / ".cache" / "fxmask"


def write_often(n):
    for i in range(200):
        tune.store("a key", tune.Choice("rows-512", "measured", {"rows-512": n + i / 1000, **{f"other {j}": 1.0 for j in range(50)}}))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_write_the_same_decision_at_once(table):
    writers = [multiprocessing.get_context("fork").Process(target=write_often, args=(n,)) for n in (1, 2)]
    tune.store("a key", tune.Choice("rows-512", "measured", {"rows-512": 0.0}))
    for p in writers:
        p.start()
    seen, end = set(), time.monotonic() + 60
    while any(p.is_alive() for p in writers) and time.monotonic() < end:
        seen.add(int(tune.load("a key", BY_NAME).times["rows-512"]))  # None, and a warning, where a file is half written
    for p in writers:
        p.join(60)
    assert [p.exitcode for p in writers] == [0, 0] and seen & {1, 2}
    (file,) = table.files()
    assert file.suffix == ".json" and tune.load("a key", BY_NAME).name == "rows-512"


def test_switched_off_nothing_is_measured_or_written(table, monkeypatch):
    monkeypatch.setenv("FXMASK_TUNE", "0")
    forward()
    monkeypatch.delenv("FXMASK_TUNE")
    deciding.decisions.clear()
    torch.use_deterministic_algorithms(True)
    try:
        forward("auto")
        forward("cpu")
    finally:
        torch.use_deterministic_algorithms(False)
    assert {c.why for c in deciding.decisions.values()} == {"estimated"} and not table.measured and table.files() == []
    deciding.decisions.clear()
    forward()
    assert len(table.measured) == 1


def later(monkeypatch, seconds):
    """As if so much time had passed."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + seconds)


@pytest.mark.parametrize("kept", [True, False], ids=["on disk", "in memory"])
def test_a_machine_that_stays_busy_is_asked_less_and_less_often(table, kept, monkeypatch):
    """Never for good, and never every minute."""
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    if not kept:
        monkeypatch.setattr(tune, "load", lambda key, names: None)
        monkeypatch.setattr(tune, "store", lambda key, choice: None)
    forward()
    for repeats in range(1, 5):
        later(monkeypatch, tune.AGAIN * 2 ** (repeats - 1) - 5)
        forward()
        assert len(table.measured) == repeats
        later(monkeypatch, 10)
        forward()
        assert len(table.measured) == repeats + 1 and [c.tries for c in deciding.decisions.values()] == [repeats]
    if kept:  # another process goes on from there
        table.fresh()
        forward()
        assert not table.measured and [c.tries for c in deciding.decisions.values()] == [4]


def test_another_thread_at_work_makes_a_machine_busy_and_is_not_timed(monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(os, "getloadavg", lambda: (0.0, 0.0, 0.0))
    monkeypatch.setattr(time, "process_time", lambda: 2 * time.perf_counter())
    assert REAL({"a": lambda: None}, 1, 0.01).busy and not REAL({"a": lambda: None}, 2, 0.01).busy
    stop = threading.Event()
    other = threading.Thread(target=lambda: [sum(range(1000)) for _ in iter(stop.is_set, True)])
    other.start()
    try:
        sleeping = REAL({"a": lambda: time.sleep(0.05)}, 1, 0.0)
    finally:
        stop.set()
        other.join()
    assert sleeping.times["a"] < 0.01  # the process's own time has the other thread's in it


@pytest.mark.parametrize("cause", ["load", "waiting"])
def test_a_tune_on_a_busy_machine_is_repeated(table, cause, monkeypatch):
    with monkeypatch.context() as m:
        m.setattr(os, "getloadavg", lambda: (1e3 * (cause == "load"), 0.0, 0.0))
        m.setattr(time, "process_time", lambda: (1.0 if cause == "load" else 0.5) * time.perf_counter())
        forward()
    assert [c.busy for c in deciding.decisions.values()] == [True] and json.loads(table.files()[0].read_text())["busy"] is True
    forward()
    assert len(table.measured) == 1  # not at once
    later(monkeypatch, tune.AGAIN + 1)
    forward()
    assert len(table.measured) == 2 and [c.busy for c in deciding.decisions.values()] == [False]
    forward()
    table.fresh()
    forward()
    assert not table.measured and json.loads(table.files()[0].read_text())["busy"] is False


def test_the_budget_is_held_and_the_fastest_wins():
    calls = []

    def candidate(name, seconds):
        return lambda: (calls.append(name), time.sleep(seconds))

    begin = time.perf_counter()
    choice = REAL({"slow": candidate("slow", 0.02), "fast": candidate("fast", 0.002)}, 2, 0.1)
    assert 0.1 <= time.perf_counter() - begin < 0.3 + 10 * 0.022
    assert choice.name == "fast" and 0.002 <= choice.times["fast"] < choice.times["slow"] and choice.times["slow"] >= 0.02
    assert 2 <= calls.count("slow") == calls.count("fast") <= 6
    assert {tuple(calls[i : i + 2]) for i in range(0, len(calls), 2)} == {("slow", "fast"), ("fast", "slow")}  # in turns, in either order
    calls.clear()
    REAL({"slow": candidate("slow", 0.02)}, 2, 0.01)
    assert len(calls) == tune.LEAST == 2  # one to warm up, and one that counts
    calls.clear()
    REAL({"slow": candidate("slow", 0.02)}, 2, 0.06)
    assert len(calls) == tune.TURNS  # within thrice the budget


@pytest.mark.parametrize("op", ["forward", "dx", "dw", "backward"])
@pytest.mark.parametrize("threads", [1, 2, 16])
@pytest.mark.parametrize("forced", [True, False])
def test_large_layers_are_timed_on_few_tokens(op, threads, forced):
    """By our own closed forms a tune takes its time and no more, but for layers whose few tokens take as long; small ones get all their tokens."""
    for features in (64, 1024, 4096, 16384):
        case = Case(op, 25088, (features, features), (64, 64), 0.5, torch.float32)
        names = [*map(str, plans(case)), *(() if forced else ("masked_dense",))]
        n = deciding.sample(case, names, threads)
        took = tune.TURNS * sum(deciding.seconds(BY_NAME[p], case._replace(tokens=n)) for p in names) / threads
        assert 256 * threads <= n <= deciding.SAMPLE and (n == 256 * threads or took <= 1.1 * tune.OVER * tune.BUDGET)
        assert n == deciding.SAMPLE or features > 1024
    assert deciding.sample(case._replace(tokens=100), names, threads) == 100


def test_a_tune_runs_over_the_sample_alone(table, monkeypatch):
    monkeypatch.setattr(deciding, "sample", lambda case, names, threads: 257)
    seen, real = [], chosen.implementation.masked_linear
    monkeypatch.setattr(chosen.implementation, "masked_linear", lambda x, *rest: (seen.append(len(x)), real(x, *rest))[1])
    forward("cpu")
    assert set(seen[:-1]) == {257} and seen[-1] == 600 and [c.tokens for c in deciding.decisions.values()] == [257]
    assert json.loads(table.files()[0].read_text())["tokens"] == 257


@pytest.mark.parametrize(("share", "wins"), [(0.97, "rows-512"), (0.99, "masked_dense")])
def test_a_plan_has_to_beat_masked_dense_by_a_margin(table, monkeypatch, share, wins):
    times = {"rows-512": share, "masked_dense": 1.0}
    monkeypatch.setattr(tune, "measure", lambda candidates, threads: tune.Choice("rows-512", "measured", times))
    forward("auto")
    assert [c.name for c in deciding.decisions.values()] == [wins]


def test_small_cases_are_never_timed(table, monkeypatch):
    monkeypatch.setattr(deciding, "SMALL", 1e-3)
    forward("auto")
    forward("cpu")
    assert not table.measured and table.files() == []
    case = Case("forward", 600, (48, 64), BLOCK, float(MASK.double().mean()), torch.float32)
    small, strips = (deciding.of(case, forced) for forced in (False, True))
    assert (small.name, small.why, strips.name in BY_NAME, strips.why) == ("masked_dense", "too small to gain", True, "estimated")
    assert "masked_dense" in small.times and list(deciding.decisions.values()) == [strips]


def test_an_empty_batch_decides_nothing(table, monkeypatch):
    monkeypatch.setattr(deciding, "SMALL", 1e-3)
    for impl in ("auto", "cpu"):
        assert ops.linear(X[:0], W, None, MASK, BLOCK, "masked", None, impl).shape == (0, 48)
    assert not deciding.small and not deciding.decisions


@pytest.mark.parametrize("op", ["forward", "dx", "dw", "backward"])
def test_estimates_name_every_plan(op):
    case = Case(op, 600, (48, 64), BLOCK, 0.5, torch.float32)
    choice = deciding.decide(case, ("a", "case", op), False, 1, lambda plan, tokens: lambda: None)
    assert set(choice.times) <= {*map(str, plans(case)), "masked_dense"} and choice.name in BY_NAME


def test_explain_says_what_was_chosen(monkeypatch):
    torch.manual_seed(0)
    model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(64, 48)), ratio=0.5, block=BLOCK, impl="cpu")
    (row,) = fxmask.explain(model).rows
    assert (row["impl"], row["why"]) == ("cpu", "chosen when it first runs")
    model(X.clone().requires_grad_()).sum().backward()
    (row,) = fxmask.explain(model).rows
    for op in ("forward", "backward"):
        choice = deciding.of(Case(op, 600, (48, 64), BLOCK, 0.5, torch.float32), forced=True)
        assert f"{op} {choice.name}" in row["impl"] and f"{choice.name} {1e3 * choice.times[choice.name]:.3g} ms" in row["why"]
    assert row["why"].startswith("forward measured over 600 tokens: ") and "busy" not in row["why"]
    monkeypatch.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0))
    deciding.decisions.clear()
    monkeypatch.setattr(tune, "load", lambda key, names: None)
    model(X)
    assert "forward measured over 600 tokens, on a busy machine: will be repeated: " in str(fxmask.explain(model).rows[0]["why"])


def test_explain_tells_layers_of_one_shape_apart():
    """By their ratio, by the tokens that they saw, and not by what another model ran."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    fxmask.apply(model, ratio=0.5, block=BLOCK, impl="cpu", include=["0", "3"])
    fxmask.apply(model, ratio=0.75, block=BLOCK, impl="cpu", include=["1"])
    fxmask.apply(model, ratio=0.25, block=BLOCK, impl="cpu", include=["2"])
    names = {0.5: "rows-512", 0.25: "runs-2048"}
    model[3](X)
    model[1](X)
    for key, choice in deciding.decisions.items():  # as if measured
        density = next(d for d in names if key[4] == deciding._step(d))
        deciding.decisions[key] = choice._replace(name=names[density], times={names[density]: 1e-3 * key[4] ** 2})
    first, second, third, fourth = fxmask.explain(model).rows
    assert first["impl"] == fourth["impl"] == "forward rows-512" and second["impl"] == "forward runs-2048" and third["why"] == "chosen when it first runs"
    assert "16 ms" in first["why"] and "64 ms" in second["why"]
    model[1](X[:70])
    (tokens,) = (key for key in deciding.decisions if key[1] == round(2 * math.log2(70)))
    deciding.decisions[tokens] = deciding.decisions[tokens]._replace(name="rows-512")
    (_, second, *_) = fxmask.explain(model).rows
    assert second["impl"] == "forward rows-512 (about 64 tokens) or runs-2048 (about 512 tokens)" and second["why"].count("forward measured over") == 2
    dense = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), ratio=0.0, block=BLOCK, impl="cpu")
    dense(X)
    assert [fxmask.explain(dense).rows[0][c] for c in ("impl", "why")] == ["masked_dense", "no block is masked"]
