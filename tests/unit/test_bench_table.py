"""The csv of measurements: what it holds of a cell that was measured more than once."""

from fxmask.bench import table
from fxmask.bench.driver import CSV


def test_a_table_holds_what_it_was_given_but_for_what_a_busy_machine_measured(tmp_path):
    busy, ok = ({"op": op, "verdict": verdict} for op, verdict in (("dx", f"{table.BUSY} 9 on 2 cores"), ("dw", "ok")))
    made = table.Table(tmp_path / CSV)
    made.extend([busy, ok])
    assert [row in of for of in (made, table.Table(tmp_path / CSV)) for row in (busy, ok)] == [False, True] * 2


def test_a_cell_that_was_measured_again_is_shown_as_it_was_last(tmp_path):
    busy, other = ({"op": op, "verdict": f"{table.BUSY} 9 on 2 cores", "device": ""} for op in ("dx", "dw"))
    made = table.Table(tmp_path / CSV)
    made.extend([busy, other, busy | {"verdict": "ok"}, busy | {"device": "another"}])
    for of in (made, table.Table(tmp_path / CSV)):
        assert [(r["op"], r["verdict"]) for r in of.of([other, busy])] == [("dx", "ok"), ("dw", other["verdict"])] and of.of([{"op": "step"}]) == []
