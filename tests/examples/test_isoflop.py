"""Accuracy at equal cost: verdicts against the frontier of dense widths, which runs may stand in one plot, times that stay."""

from __future__ import annotations

import csv

import plots
import pytest
from thesis import isoflop, recipes


def runs_of(name, ratio, flop, *accuracies):
    return [{"phase": "isoflop", "run": name, "target_ratio": ratio, "train_tflop": flop, "test_top1": a} for a in accuracies]


def test_verdicts_against_the_frontier():
    rows = [*runs_of("a", 0, 1, 60, 61), *runs_of("b", 0, 4, 70, 70.4), *runs_of("c", 0, 16, 80, 80)]
    rows += [*runs_of("above", 0.8, 2, 67, 67.4), *runs_of("within", 0.8, 2, 65.5, 66.3), *runs_of("below", 0.8, 8, 70, 71), *runs_of("off", 0.8, 32, 99)]
    rows += runs_of("near", 0.8, 2, 66.0, 66.1)  # 0.7 above, and the seeds of the narrower width, which are its neighbours, lie 1 apart
    found = isoflop.points(rows)
    verdicts = {v["run"]: v for v in isoflop.verdicts(found, "tflop")}
    assert [verdicts[n]["verdict"] for n in ("above", "within", "below", "off")] == ["above", "within the spread", "below", "outside of the dense widths"]
    assert verdicts["near"]["verdict"] == "within the spread"
    assert verdicts["above"]["dense there"] == pytest.approx((60.5 + 70.2) / 2)  # halfway in the logarithm
    assert verdicts["above"]["difference"] == pytest.approx(67.2 - 65.35)
    narrow = {v["run"]: v for v in isoflop.verdicts(isoflop.points([*rows, *runs_of("dense-d2-e1", 0, 2, 90.0, 90.0)]), "tflop")}
    assert narrow["dense-d2-e1"]["verdict"] == "above" and narrow["above"] == verdicts["above"], "fewer hidden units alone are no part of the frontier"
    one_seed = isoflop.points([*rows, *runs_of("lucky", 0.8, 2, 90)])
    assert next(v for v in isoflop.verdicts(one_seed, "tflop") if v["run"] == "lucky")["verdict"] == "above (one seed)"


def test_isoflop_needs_runs(tmp_path, capsys):
    (tmp_path / "t.csv").write_text("phase,run\n")
    assert isoflop.main(["plot", "--csv", str(tmp_path / "t.csv")]) == 2
    assert "expected rows of phase isoflop" in capsys.readouterr().err


def test_isoflop_draws(tmp_path, capsys, monkeypatch):
    rows = [*runs_of("a", 0, 1, 60, 61), *runs_of("b", 0, 4, 70, 70.4), *runs_of("m", 0.8, 2, 67)]
    lines = [",".join(rows[0]), *(",".join(map(str, r.values())) for r in rows)]
    (tmp_path / "t.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "time.csv").write_text("run,step_ms\na,10\nb,40\nm,100\n")
    out = tmp_path / "new" / "p.png"
    assert isoflop.main(["plot", "--csv", str(tmp_path / "t.csv"), "--times", str(tmp_path / "time.csv"), "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    assert out.stat().st_size > 10_000 and "above (one seed)" in printed and "outside of the dense widths" in printed
    before = out.read_bytes()
    other = tmp_path / "p.pdf"
    assert isoflop.main(["plot", "--csv", str(tmp_path / "t.csv"), "--out", str(other)]) == 0 and other.read_bytes().startswith(b"%PDF")

    def full(_, part, **how):
        part.write_bytes(b"\x89PNG")
        raise OSError("No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    assert isoflop.main(["plot", "--csv", str(tmp_path / "t.csv"), "--out", str(out)]) == 2 and list(out.parent.iterdir()) == [out]
    assert out.read_bytes() == before


def test_points_are_of_one_data_set_and_length(tmp_path, capsys):
    def of(data, epochs, *runs):
        return [{**r, "data": data, "epochs": epochs} for rows in runs for r in rows]

    jpeg, table = "CIFAR-10 as JPEG, quality 75", tmp_path / "t.csv"
    rows = of(jpeg, "8", runs_of("a", 0, 1, 60, 61), runs_of("b", 0, 4, 70), runs_of("m", 0.8, 2, 67))
    rows += of(jpeg, "1", runs_of("a", 0, 1, 30)) + of("digits", "8", runs_of("b", 0, 2, 90))
    found = isoflop.points(rows)
    assert [(p["run"], p["accuracy"], p["seeds"]) for p in found] == [("a", 60.5, 2), ("b", 70, 1), ("m", 67, 1), ("a", 30, 1), ("b", 90, 1)]
    (verdict,) = isoflop.verdicts(found, "tflop")
    assert verdict["dense there"] == pytest.approx((60.5 + 70) / 2)
    with table.open("w", newline="") as file:
        out = csv.DictWriter(file, list(rows[0]))
        out.writeheader()
        out.writerows(rows)
    command = ["plot", "--csv", str(table), "--times", str(tmp_path / "none.csv"), "--out", str(tmp_path / "p.png")]
    assert isoflop.main(command) == 2
    got = f"1 epochs of {jpeg}, 8 epochs of {jpeg}, 8 epochs of digits"
    assert f"expected runs of one data set, one length and one holdout in {table}, got {got}.\n  fix: --data, --epochs, --holdout." in capsys.readouterr().err
    assert isoflop.main([*command, "--data", "folder", "--epochs", "8"]) == 0
    assert "60.50" in (said := capsys.readouterr().out) and "30.00" not in said and "90.00" not in said
    assert isoflop.main([*command, "--epochs", "9"]) == 2 and "got none" in capsys.readouterr().err


def test_times_that_are_not_measured_again_stay(tmp_path, monkeypatch):
    table, names = tmp_path / "time.csv", list(recipes.ISOFLOP)[:3]
    took = iter((1.5, 2.5))

    def measure(turns, batch, names):
        ms = next(took)
        return [{**dict.fromkeys(isoflop.TIME_COLUMNS, "1"), "run": name, "step_ms": ms} for name in names]

    monkeypatch.setattr(isoflop, "measure", measure)
    assert isoflop.main(["time", "--times", str(table), "--only", *names]) == 0 == isoflop.main(["time", "--times", str(table), "--only", names[1]])
    assert [(r["run"], r["step_ms"]) for r in plots.read_csv(table)] == [(names[0], "1.5"), (names[1], "2.5"), (names[2], "1.5")]


def test_a_step_s_time_is_of_the_turns_behind_the_first(monkeypatch):
    """Which compiles and allocates: not counted, in the quartiles either."""
    now, steps = [0.0], {name: iter(seconds) for name, seconds in (("a", (9, 1, 2, 3, 4, 5)), ("b", (9, 1, 1, 1, 1, 1)))}

    def bare(args, steps_per_epoch):
        mine = next(names)
        return lambda images, labels: now.__setitem__(0, now[0] + next(steps[mine]) / 1e3)

    names = iter("ab")
    monkeypatch.setattr(isoflop.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(isoflop, "arguments_of", lambda name, epochs: ["--dense"])
    monkeypatch.setattr("thesis.masked_model.bare", bare)
    a, b = isoflop.measure(5, 2, ["a", "b"])
    assert [a[c] for c in ("run", "step_ms", "step_ms_low", "step_ms_high", "turns", "threads")] == ["a", 3, 2, 4, 5, 1] and b["step_ms"] == 1
