"""The stages of the GPU run that have a csv of their own: their machinery, on the CPU."""

import time
from typing import NamedTuple

import pytest
import torch

from fxmask.bench import dropping, nm, part, pruning, refreshes, session, sweeps, table
from fxmask.bench.driver import Run, run_cells

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


OF_2_MS = {
    "dropout": (dropping, dropping.Dropping("masked_dense", 40, 24, 48, "fp32", 16, 0.5), {"dense_tflop_per_s": 6 * 40 * 24 * 48 / 2e-3 / 1e12}),
    "nm, a step": (nm, nm.NM("dense", "step", 40, 24, 48, "fp32"), {"dense_tflop_per_s": 6 * 40 * 24 * 48 / 2e-3 / 1e12}),
    "nm, a forward": (nm, nm.NM("dense", "forward", 40, 24, 48, "fp32"), {"dense_tflop_per_s": 2 * 40 * 24 * 48 / 2e-3 / 1e12}),
    "of refreshes": (refreshes, refreshes.Refresh("layer", "single", 1, 72, 100, "bf16", 16, 0.8), {"launches": 4, "bytes": 14400, "tb_per_s": 7.2e-6}),
    "a model's": (refreshes, refreshes.Refresh("model", "group", 4, None, None, "fp32", 16, 0.8), {"launches": 4, "bytes": 47232, "tb_per_s": 23.616e-6}),
}


@pytest.mark.parametrize("name", OF_2_MS)
def test_what_two_milliseconds_tell(monkeypatch, name):
    module, cell, expected = OF_2_MS[name]
    monkeypatch.setattr(refreshes, "launches_of", lambda call: 4)
    assert module.prepare(cell, CPU).worth(2.0) == pytest.approx(expected)


def test_what_two_milliseconds_tell_of_a_pruned_product():
    """Of 2 x 20 rows: half of the input is kept, and so half of the FLOP count; what an expanded product issues is all of them."""
    whole = 2 * 2 * 20 * 64 * 40
    for form, issued in (("reference", whole), ("dense", whole), ("fxmask", None)):
        ratio, block = (0.0, 0) if form == "dense" else (0.5, 16)
        cell = pruning.Pruned(form, 2, 20, 64, 40, "fp32", block, ratio, 0.0)
        flop = whole if form == "dense" else whole // 2
        expected = {"flop": flop, "tflop_per_s": flop / 2e-3 / 1e12} | ({"flop_issued": issued} if issued else {})
        assert pruning.prepare(cell, CPU).worth(2.0) == pytest.approx(expected), form


def test_a_pruned_product_that_is_no_number_is_wrong(monkeypatch):
    ready = pruning.prepare(pruning.Pruned("fxmask", 2, 20, 64, 40, "fp32", 16, 0.5, 0.0), CPU)
    assert ready.check()[1] == ""
    monkeypatch.setattr(pruning.prune_ops, "pruned_dw", lambda *_: torch.full((40, 64), float("nan")))
    assert ready.check()[1].startswith("error inf over the budget")
