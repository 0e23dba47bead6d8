"""`fxmask bench --device cpu`: whole steps in turns, on tiny shapes."""

import os
import sys
import time
from dataclasses import replace
from unittest import mock

import pytest
import torch

from fxmask.bench import contenders, floor, interleaved, provenance, regret, table
from fxmask.cli import main
from fxmask.errors import ConfigError
from fxmask.kernels.cpu import deciding, implementation

SHAPE = "300x64->96"
OPTIONS = ("--shapes", SHAPE, "--blocks", "32", "--ratios", "0.5,0.8", "--masks", "random")


@pytest.fixture(autouse=True)
def idle(monkeypatch):
    """A machine that does nothing else, and no decision of another test."""
    monkeypatch.setattr(os, "getloadavg", lambda: (0.5, 0.5, 0.5))
    monkeypatch.setattr(deciding, "decisions", {})
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def bench(out, *options):
    """The exit status, and the rows of the csv."""
    status = main(["bench", "--device", "cpu", "--sample-s", "0", "--out", str(out), *OPTIONS, *options])
    path = out / interleaved.CSV
    return status, table.read(path, interleaved.COLUMNS) if path.exists() else []


def test_rows_are_complete(tmp_path, capsys):
    status, rows = bench(tmp_path)
    assert status == 0 and len(rows) == 2 * len(contenders.CONTENDERS)
    assert [r["provider"] for r in rows] == list(contenders.CONTENDERS) * 2
    shared = provenance.provenance(torch.device("cpu"))
    always = {"utc", "load", "load_after", "turns", "mask_ms", "forward_ms", "backward_ms", "ms_p50", "ms_p10", "ms_p90", "cpu_ms_p50", "max_err"}
    for r in rows:
        assert {c: r[c] for c in shared} == shared and r["threads"] == str(torch.get_num_threads()) and r["source"]
        assert (r["op"], r["phase"], r["dtype"], r["mask"], r["M"], r["K"], r["N"]) == ("step", "interleaved", "fp32", "random", "300", "64", "96")
        assert (r["block_n"], r["block_k"], r["gate"], r["verdict"]) == ("32", "32", "pass", "ok") and float(r["load"]) == 0.5
        assert not {c for c in always if not r[c]} and int(r["turns"]) >= 5
        assert 0 < float(r["ms_p10"]) <= float(r["ms_p50"]) <= float(r["ms_p90"])
        own = r["provider"].startswith("fxmask")
        assert bool(r["forward_plan"]) == bool(r["backward_plan"]) == own
        assert (float(r["max_err"]) > 0) == (r["provider"] != "dense") and float(r["max_err"]) < 1e-5
    assert {r["ratio"] for r in rows} == {"0.5", "0.8"}
    assert {r["forward_plan"] for r in rows if r["provider"] == "fxmask_auto"} == {"masked_dense"}
    assert not {"", "masked_dense"} & {r[p] for r in rows if r["provider"] == "fxmask_cpu" for p in ("forward_plan", "backward_plan")}
    assert "crossover: times faster" in capsys.readouterr().out


@pytest.mark.parametrize(("threads", "column"), [(1, "cpu_ms_p50"), (2, "ms_p50")])
def test_speed_is_against_the_faster_baseline(tmp_path, threads, column):
    """In process time on one thread, in wall time on more."""
    _, rows = bench(tmp_path, "--threads", str(threads))
    assert {r["threads"] for r in rows} == {str(threads)}
    for ratio in ("0.5", "0.8"):
        found = {r["provider"]: r for r in rows if r["ratio"] == ratio}
        dense, masked = (float(found[b][column]) for b in ("dense", "masked_dense"))
        for r in found.values():
            own = float(r[column])
            assert float(r["x_dense"]) == pytest.approx(dense / own, rel=1e-5)
            assert float(r["x_masked_dense"]) == pytest.approx(masked / own, rel=1e-5)
            assert float(r["x_best"]) == pytest.approx(min(dense, masked) / own, rel=1e-5)


def test_a_second_run_measures_what_is_missing(tmp_path, monkeypatch):
    _, first = bench(tmp_path)
    text = (tmp_path / interleaved.CSV).read_bytes()
    real, measured = interleaved.measure, []
    monkeypatch.setattr(interleaved, "measure", lambda cell, *a: measured.append(cell) or real(cell, *a))
    assert bench(tmp_path) == (0, first) and not measured and (tmp_path / interleaved.CSV).read_bytes() == text
    _, rows = bench(tmp_path, "--ratios", "0.8,0.9")
    assert [c.ratio for c in measured] == [0.9] and rows[: len(first)] == first
    bench(tmp_path, "--threads", "2")
    assert len(measured) == 3  # another measurement by other threads
    bench(tmp_path, "--ratios", "0.7", "--time-limit", "-1")
    assert len(measured) == 3


@pytest.mark.parametrize("module", [interleaved, regret])
def test_a_cell_that_would_not_end_in_time_is_not_begun(tmp_path, monkeypatch, module):
    """As in every other run: the longest cell of late says what the next one takes."""
    now, real, said = [0.0], module.measure, []

    def takes_ten_seconds(*a):
        now[0] += 10
        return real(*a)

    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    monkeypatch.setattr(module, "measure", takes_ten_seconds)
    if module is interleaved:
        table_of = module.run(list(module.cells((SHAPE,), (32,), (0.5, 0.8, 0.9), ("random",), "fp32", 0)), tmp_path, 0.0, 25, ("dense",), said.append)
    else:
        monkeypatch.setattr(regret, "SHAPES", ((48, 32),))
        monkeypatch.setattr(regret, "TOKENS", (40,))
        table_of = module.run(regret.draw(3, "fp32", 0), tmp_path, 0.0, 25, said.append)
    assert len(table_of.rows) == 2 and said[-1] == "stopped by the time limit of 25 s with 1 cells left; the same command goes on from here"


def test_the_time_that_decides_is_printed(tmp_path, capsys):
    for threads, column in (("1", "cpu_ms_p50"), ("2", "ms_p50")):
        _, rows = bench(tmp_path / threads, "--threads", threads, "--ratios", "0.5")
        assert "  ".join(f"{r['provider']} {float(r[column]):.1f} ms" for r in rows) in capsys.readouterr().out


def test_a_busy_machine_gives_no_verdict_and_is_asked_again(tmp_path, monkeypatch, capsys):
    with monkeypatch.context() as m:
        m.setattr(os, "getloadavg", lambda: (1e3, 0.0, 0.0))
        status, rows = bench(tmp_path)
    assert status == 0 and len(rows) == 8 and "no row can be compared" in capsys.readouterr().out
    for r in rows:
        assert r["verdict"] == f"none: load 1000.0 on {os.cpu_count()} cores" and r["ms_p50"]
        assert not (r["x_dense"] or r["x_masked_dense"] or r["x_best"])
    _, rows = bench(tmp_path)
    assert len(rows) == 16 and all(r["verdict"] == "ok" and r["x_best"] for r in rows[8:])
    assert len(bench(tmp_path)[1]) == 16


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_a_wrong_contender_fails(tmp_path, monkeypatch, value):
    real = implementation.masked_linear
    with monkeypatch.context() as m:
        m.setattr(implementation, "masked_linear", lambda *a: real(*a).fill_(value))
        status, rows = bench(tmp_path)
    assert status == 1
    for r in rows:
        wrong = r["provider"] == "fxmask_cpu"
        assert r["gate"] == ("fail" if wrong else "pass") and bool(r["x_best"]) == (not wrong)
        assert not wrong or not float(r["max_err"]) <= 0.5


OTHER = {"source_hash": lambda: "0" * 12, "_triton": lambda real=provenance._triton: (real()[0], "another ptxas")}


@pytest.mark.parametrize("name", OTHER)
def test_rows_of_other_sources_and_compilers_do_not_count(tmp_path, monkeypatch, name):
    """What failed once, in a version that is gone, is no failure of this one."""
    with monkeypatch.context() as m:
        m.setattr(provenance, name, OTHER[name])
        m.setattr(implementation, "masked_linear", lambda x, w, *_: x.new_zeros(len(x), len(w)))
        assert bench(tmp_path)[0] == 1
    status, rows = bench(tmp_path)
    assert len(rows) == 16 and status == 0


def test_list_and_globs(tmp_path, capsys):
    assert bench(tmp_path, "--list") == (0, [])
    assert capsys.readouterr().out.split() == [f"step/{SHAPE}/fp32/b32x32/r{r}/random" for r in ("0.5", "0.8")]
    status, rows = bench(tmp_path, "--cells", "*/r0.8/*,nothing*", "--providers", "dense,fxmask_cpu")
    assert status == 0 and [(r["provider"], r["ratio"], r["x_best"]) for r in rows] == [("dense", "0.8", ""), ("fxmask_cpu", "0.8", "")]
    capsys.readouterr()
    assert bench(tmp_path / "none", "--cells", "forward/*") == (2, [])
    assert "leaves nothing to measure" in capsys.readouterr().err


@pytest.mark.parametrize(("option", "value"), [
    ("--blocks", "wide"), ("--blocks", "0"), ("--ratios", "half"), ("--ratios", "1"), ("--ratios", "1.5"),
    ("--providers", "cublas"), ("--shapes", "12"), ("--shapes", "0x8->8"), ("--threads", "-1"),
])  # fmt: skip
def test_options_that_cannot_be_meant(tmp_path, capsys, option, value):
    assert bench(tmp_path, option, value) == (2, [])
    assert "expected" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--masks", "rows,foo"), "--masks 'rows,foo': expected some of random, rows, separated by commas."),
        (("--masks", ","), "--masks ',': expected some of random, rows"),
        (("--dispatch", "-2"), "--dispatch -2: expected at least 1."),
        (("--sample-s", "nan"), "--sample-s nan: expected at least 0."),
        (("--time-limit", "-1"), "--time-limit -1.0: expected at least 0."),
        (("--ratios", "0.5,1"), "--ratios '0.5,1': expected numbers of at least 0 and below 1, separated by commas."),
        (("--seed", str(-(1 << 53))), "--seed -9007199254740992: expected a number nearer to 0 than 2^53."),
        (("--dispatch", "2", "--floor", "--blocks", "32"), "expected --cells to choose among them, got --blocks, --floor."),
        (("--floor", "--masks", "rows"), "--floor: its cells are fixed; expected --cells to choose among them, got --masks."),
        (("--op-by-op", "--ratios", "0.5"), "--op-by-op: its cells are fixed; expected --cells to choose among them, got --ratios."),
        (("--op-by-op", "--floor"), "got --floor."),
        (("--op-by-op", "--threads", "0"), "--threads 0: expected at least 1."),
        (("--device", "cuda", "--threads", "2"), "--device cuda: its cells are fixed; expected --cells to choose among them, got --"),
        (("--device", "cuda", "--sample-s", "2"), "got --sample-s."),
        (("--device", "cuda", "--system", "nm", "--threads", "2", "--sample-s", "2"), "got --threads, --sample-s."),
    ],
    ids=lambda v: "".join(v) if isinstance(v, tuple) else "",
)
def test_options_that_a_run_would_not_look_at(tmp_path, capsys, options, words):
    assert main(["bench", "--device", "cpu", "--list", "--out", str(tmp_path), *options]) == 2
    assert words in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_quick_and_defaults(tmp_path, capsys):
    def listed(*options):
        assert main(["bench", "--device", "cpu", "--list", "--out", str(tmp_path), *options]) == 0
        return capsys.readouterr().out.split()

    assert len(listed("--quick")) == len(interleaved.RATIOS) and len(listed()) == 2 * 3 * 2 * len(interleaved.RATIOS)
    assert set(listed("--quick")[0].split("/")) >= {"step", "512x128->256", "fp32", "random"}
    assert listed("--quick", "--dtype", "bf16")[0].split("/")[2] == "bf16"
    quick = {tuple(line.split("/")[3::2]) for line in listed("--quick", "--blocks", "64,32,64", "--ratios", "0.5", "--masks", "rows,random")}
    assert quick == {(b, m) for b in ("b64x64", "b32x32") for m in ("random", "rows")}  # what is asked for is not cut short
    assert len(listed("--quick", "--blocks", "64,32,64", "--ratios", "0.5", "--masks", "rows")) == 2
    assert len(listed("--dispatch", "7")) == 7 and len(listed("--floor")) == len(list(floor.cells("fp32", 0)))
    mixing = listed("--floor", "--cells", "*x196->196/*/token_mixing")
    assert mixing and all(line.split("/")[1].endswith("x196->196") and line.endswith("/token_mixing") for line in mixing)
    assert main(["bench", "--device", "cpu", "--floor", "--list", "--cells", "nothing"]) == 2
    assert "--cells 'nothing' leaves nothing to measure" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())  # nothing was measured


def test_plot(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    status, _ = bench(tmp_path, "--plot")
    (file,) = tmp_path.glob("*.png")
    assert status == 0 and file.read_bytes().startswith(b"\x89PNG") and f"wrote {file.name}" in capsys.readouterr().out


def test_a_picture_that_cannot_be_made_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setattr(interleaved, "measure", lambda *a, **k: pytest.fail("measured"))
    assert bench(tmp_path, "--plot") == (2, []) and "plots need matplotlib" in capsys.readouterr().err


def test_a_picture_that_cannot_be_written(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    bench(tmp_path)
    (tmp_path / f"cpu-{torch.get_num_threads()}-threads.png").mkdir()
    status, rows = bench(tmp_path, "--plot")
    assert status == 2 and rows and "the output folder cannot be written: Is a directory" in capsys.readouterr().err


def test_another_csv_is_refused(tmp_path):
    (tmp_path / interleaved.CSV).write_text("a,b\n1,2\n")
    with pytest.raises(ConfigError, match="this version's columns"):
        interleaved.run([], tmp_path, 0.0, None, contenders.CONTENDERS)


@pytest.mark.parametrize(("taken", "why"), [("out", "File exists"), ("out/cpu.csv", "Is a directory")])
def test_a_place_that_cannot_be_written_is_refused_before_anything_is_measured(tmp_path, monkeypatch, capsys, taken, why):
    """A file where the folder belongs, a folder where the csv does."""
    out, wrong = tmp_path / "out", tmp_path / taken
    wrong.parent.mkdir(exist_ok=True)
    wrong.touch() if wrong == out else wrong.mkdir()
    monkeypatch.setattr(interleaved, "measure", lambda *a, **k: pytest.fail("measured"))
    assert main(["bench", "--device", "cpu", "--quick", "--out", str(out)]) == 2
    err = capsys.readouterr().err
    assert f"the csv cannot be written: {why}.\n  where: {wrong}\n" in err


def test_an_interrupted_run_says_what_is_kept(tmp_path, monkeypatch, capsys):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(interleaved, "measure", interrupt)
    assert main(["bench", "--device", "cpu", "--quick", "--out", str(tmp_path)]) == 130
    assert capsys.readouterr().err == "fxmask: interrupted; the csv has every row that was measured, and the same command goes on behind it.\n"


def test_the_floor_counts_cells_and_names_those_below_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(floor, "GRID", (((48, 32), (300,), ("interleaved", "token_mixing")), ((48, 32), (20,), ("interleaved",))))
    monkeypatch.setattr(floor, "BLOCKS", (16, 64))  # 64 is larger than the weight, and left out
    status = main(["bench", "--device", "cpu", "--floor", "--sample-s", "0", "--threads", "1", "--out", str(tmp_path)])
    rows = table.read(tmp_path / floor.CSV, interleaved.COLUMNS)
    assert len(rows) == 3 * len(floor.RATIOS) * len(floor.CONTENDERS) and {r["phase"] for r in rows} == {"interleaved", "token_mixing"}
    assert {r["gate"] for r in rows} == {"pass"}
    text, good = floor.summary(rows)
    assert " of 6 cells of 256 tokens or more" in text and capsys.readouterr().out.endswith(text + "\n") and status == (0 if good else 1)
    for r in rows:  # as if: auto as fast as masked-dense, but for one cell, and slower by 300 us on few tokens
        slow = r["phase"] == "token_mixing" and r["ratio"] == "0.9"
        small = 0.6 if r["M"] == "20" else 0.0
        r["cpu_ms_p50"] = str(1.0 + (0.5 * slow + small) * (r["provider"] == "fxmask_auto"))
    text, good = floor.summary(rows)
    lines = text.splitlines()
    assert not good
    assert lines[0] == "floor: 5 of 6 cells of 256 tokens or more at 0.97 or more of masked-dense's speed; 0 of 3 smaller ones at most 100 us a call over it"
    assert "300x32->48 fp32 b16 90% token_mixing: 0.67 of masked-dense, +250 us a call; 0.67 of it behind the op; dense 0.67; masked_dense" in lines[1]
    assert len(lines) == 5 and all("+300 us a call" in line for line in lines[2:])


def floor_rows(**changes):
    """A cell of four rows, auto as fast as masked-dense; `changes`: of auto's row."""
    row = {"phase": "interleaved", "M": "300", "K": "32", "N": "48", "dtype": "fp32", "block_n": "16", "ratio": "0.5", "threads": "1"}
    row |= {"cpu_ms_p50": "1", "verdict": "ok", "gate": "pass", "forward_plan": "a", "backward_plan": "b"}
    return [row | {"provider": p} | (changes if p == "fxmask_auto" else {}) for p in floor.CONTENDERS]


def test_the_floor_says_what_it_could_not_judge():
    text, good = floor.summary(floor_rows())
    assert text.startswith("floor: 1 of 1 cells") and good
    for rows, said, fine in (
        (floor_rows(gate="fail", cpu_ms_p50=""), "wrong results of fxmask_auto", False),
        (floor_rows(verdict="none: load 9 on 2 cores"), "no verdict, none: load 9 on 2 cores", True),
        (floor_rows()[:3], "no row of fxmask_auto", True),
        (floor_rows(cpu_ms_p50="1.1"), "0.91 of masked-dense", False),
    ):
        text, good = floor.summary(rows)
        assert text.startswith(f"floor: 0 of {1 if '0.91' in said else 0} cells") and said in text and good == fine
    busy, again = floor_rows(verdict="none: load 9 on 2 cores"), floor_rows()
    assert floor.summary(busy + again) == floor.summary(again)


OTHERS = ({"source": "another"}, {"threads": "7"}, {"device": "another"}, {"dtype": "bf16"}, {"mask_seed": "1"}, {"M": "21"})


def test_rows_of_other_sources_threads_and_settings_are_not_counted(tmp_path, capsys):
    command = ["bench", "--device", "cpu", "--floor", "--cells", "step/20x32->48*", "--sample-s", "0", "--out", str(tmp_path), "--threads"]
    with mock.patch.object(floor, "GRID", (((48, 32), (20,), ("interleaved",)),)), mock.patch.object(floor, "BLOCKS", (16,)):
        main([*command, "1"])
        kept = table.Table(tmp_path / floor.CSV, interleaved.COLUMNS)
        for changes in OTHERS:
            kept.extend([r | {"gate": "fail"} | changes for r in kept.rows[: len(floor.CONTENDERS)]])
        main([*command, "1"])
    out = capsys.readouterr().out
    assert [line.split("; ")[1].split()[2] for line in out.splitlines() if line.startswith("floor: ")] == ["3", "3"] and "wrong" not in out


def test_the_dispatch_judges_its_own_cases_alone(tmp_path, monkeypatch, capsys):
    for name, value in (("SHAPES", ((48, 32),)), ("TOKENS", (40,)), ("BLOCKS", (16,)), ("RATIOS", (0.5,)), ("OPS", ("dx",))):
        monkeypatch.setattr(regret, name, value)
    command = ["bench", "--device", "cpu", "--dispatch", "1", "--sample-s", "0", "--threads", "1", "--out", str(tmp_path)]
    main(command)
    kept = table.Table(tmp_path / regret.CSV, regret.COLUMNS)
    kept.extend([kept.rows[0] | {"gate": "fail"} | changes for changes in OTHERS])
    main(command)
    out = capsys.readouterr().out
    assert out.count("dispatch: ") == out.count(" of 1 choices ") == 2 and "wrong" not in out


def test_token_mixing_has_contiguous_tokens():
    cell = next(interleaved.cells((SHAPE,), (32,), (0.5,), ("random",), "fp32", 0))
    assert contenders.layer_of(cell).x.stride() == (64, 1)
    mixed = contenders.layer_of(replace(cell, phase="token_mixing"))
    assert mixed.x.stride() == (1, 300) and torch.equal(mixed.x, contenders.layer_of(cell).x)


def test_masked_dense_behind_the_op_is_a_contender(tmp_path):
    _, rows = bench(tmp_path, "--providers", "dense,masked_dense,fxmask_reference")
    assert [r["provider"] for r in rows[:3]] == ["dense", "masked_dense", "fxmask_reference"] and not rows[2]["forward_plan"] and rows[2]["x_best"]


@pytest.mark.slow
def test_dispatch_compares_choices_with_every_plan(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(regret, "TOKENS", (40, 4096))
    monkeypatch.setattr(regret, "SHAPES", ((48, 32), (256, 512)))
    monkeypatch.setattr(regret, "BLOCKS", (16,))
    monkeypatch.setenv("FXMASK_TUNE", "0")
    command = ["bench", "--device", "cpu", "--dispatch", "100", "--sample-s", "0", "--threads", "1", "--out", str(tmp_path)]
    status = main(command)
    rows = table.read(tmp_path / regret.CSV, regret.COLUMNS)
    assert {r["op"] for r in rows} == set(regret.OPS) and {r["why"] for r in rows} == {"too small to gain", "estimated"}
    for r in rows:
        times = dict(t.split(":") for t in r["times"].split())
        assert "masked_dense" in times and r["chosen"] in times and len(times) == 3 and float(r["regret"]) >= 0
    text, good = regret.summary(rows)
    assert capsys.readouterr().out.endswith(text + "\n") and status == (0 if good else 1) and {r["gate"] for r in rows} == {"pass"}
    for r in rows:
        r |= {"verdict": "ok", "regret": "0.01", "x_masked_dense": "1"}
    text, good = regret.summary(rows)
    assert good and text.startswith(f"dispatch: {len(rows)} of {len(rows)} choices within 5% of the best plan (100.0%), median 1.0%, worst 1%; 0 below 0.97")
    for r in rows[: len(rows) // 10]:
        r["regret"] = "0.06"
    assert not regret.summary(rows)[1]
    rows[-1] |= {"verdict": "none: load 9 on 2 cores"}
    assert "1 cases have no verdict" in regret.summary(rows)[0]


@pytest.mark.parametrize("op", regret.OPS)
def test_dispatch_refuses_wrong_results(tmp_path, monkeypatch, capsys, op):
    """One plan of those that the grid's case has gives something else: no verdict about its speed."""
    real = {n: getattr(regret.implementation, n) for n in ("masked_linear", "masked_linear_dx", "backward")}

    def spoil(result):
        return tuple(None if t is None else 1.01 * t for t in result) if isinstance(result, tuple) else 1.01 * result

    for n, call in real.items():
        monkeypatch.setattr(regret.implementation, n, lambda *a, call=call: spoil(call(*a)))
    monkeypatch.setattr(regret, "OPS", (op,))
    for name, value in (("SHAPES", ((48, 32),)), ("TOKENS", (40,)), ("BLOCKS", (16,)), ("RATIOS", (0.5,))):
        monkeypatch.setattr(regret, name, value)
    assert main(["bench", "--device", "cpu", "--dispatch", "1", "--sample-s", "0", "--threads", "1", "--out", str(tmp_path)]) == 1
    assert f"  {op} 40x32->48 b16 r0.5: wrong results, error 0.0" in capsys.readouterr().out
