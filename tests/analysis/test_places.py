"""Where commands write: an unknown suffix is an error before anything is loaded or timed; a folder is made where one is meant."""

import os

import pytest

from fxmask.cli import main
from fxmask.errors import ConfigError
from fxmask.places import place

NOWHERE = "nowhere:net"  # a model that is no module: what is said before it is looked for
COMMANDS = {
    "explain": (["explain", NOWHERE], ".csv, .json, .md, .html, .tex, .txt"),
    "analyze": (["analyze", NOWHERE, "--input", "7x64"], ".csv, .json, .md, .html, .tex"),
    "advise": (["advise", NOWHERE, "--input", "7x64"], ".json"),
    "bench": (["bench", "--device", "cpu", "--list"], "expected a folder, got"),
    "bench of a system": (["bench", "--device", "cpu", "--system", "nm", "--list"], "expected a folder, got"),
}


@pytest.mark.parametrize("command", COMMANDS)
def test_an_unknown_suffix(command, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    args, words = COMMANDS[command]
    assert main([*args, "--out", "rows.xyz"]) == 2
    said = capsys.readouterr().err
    assert "rows.xyz" in said and words in said and "nowhere" not in said
    assert not os.listdir(tmp_path)


def test_folders_that_are_meant(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.1").mkdir()
    for name in ("out", "run.1", "run.2/", tmp_path / "new", "rows.csv"):
        assert place(name, [".csv"]).name == os.path.basename(os.path.normpath(name))
    with pytest.raises(ConfigError, match=r"-o: expected a folder or a file that ends in \.csv, got 'run\.2'.*\n  fix: .*write run\.2/"):
        place("run.2", [".csv"])


def test_plots_beside_one_file(capsys, tmp_path):
    assert main(["analyze", NOWHERE, "--input", "7x64", "--plot", "-o", str(tmp_path / "a.csv")]) == 2
    assert "--plot writes into a folder: expected -o DIR, got the file" in capsys.readouterr().err
