"""The zoo with tiny stand-ins: its checks see what they should, and nothing that a model does ends it."""

from __future__ import annotations

from pathlib import Path

import pytest
from zoo import results, run

STAND_INS = Path(__file__).with_name("zoo_stand_ins.py")


@pytest.fixture(autouse=True)
def _importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(STAND_INS.parent)  # which the models' processes inherit


def zoo(path: Path, *names: str, more: tuple[str, ...] = ("--checks", "apply")) -> dict[str, results.Row]:
    """The rows of stand-ins, by name."""
    words = ["--csv", str(path), "--jobs", "2", "--own", *(f"zoo_stand_ins:{name}" for name in names), *more]
    assert run.main(words) == 0
    return {name.partition(":")[2]: row for (_, name), row in results.read(path).items()}


def test_every_check_of_a_model_and_every_limit(tmp_path, capsys):
    """One run of all stand-ins, as one costs the imports."""
    path = tmp_path / "zoo.csv"
    rows = zoo(path, "small", more=())
    small = rows["small"]
    assert small["status"] == "ok" and small["input"] == "5x32"
    assert (small["linears"], small["eligible"], small["left_out"], small["apply"], small["unreached"]) == ("4", "3", "1 smaller than 16", "3", "1")
    assert (small["train"], small["eval"], small["guard"], small["analyze"], small["flop_equal"]) == ("bits", "bits", "yes", "yes", "yes")
    assert (small["trace"], small["export"], small["stock"]) == ("2", "yes", "1")
    assert (small["backend"], small["backend_equal"]) == ("2", "bits") and "unused" in small["backend_why"]

    rows = zoo(path, "bypass", "network", "broken", "slow", "hungry", "killed", more=("--checks", "apply", "guard", "--seconds", "3", "--gigabytes", "3"))
    bypass = rows["bypass"]
    assert bypass["train"].startswith("no: ") and bypass["eval"].startswith("no: ") and bypass["guard"] == "no"
    assert rows["network"]["status"].startswith("skipped: needs files from a network")
    assert rows["broken"]["status"] == "build: ValueError: no such model"
    assert rows["slow"]["apply"] == "no" and rows["slow"]["apply_why"] == "out of time: 3 s" == rows["slow"]["guard_why"]
    assert rows["hungry"]["apply_why"] == "out of memory"
    assert "SIGKILL" in rows["killed"]["apply_why"]
    assert rows["small"] == small

    page = path.with_suffix(".md").read_text()
    assert "own:bypass" not in page and "zoo_stand_ins:bypass" in page and "needs files from a network" in page and "out of memory" in page
    capsys.readouterr()
    zoo(path, "small", "network", "slow", more=("--checks", "apply", "guard"))
    assert capsys.readouterr().out.startswith("0 models with something to do, 7 in ")
