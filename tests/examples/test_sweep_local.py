"""Runs of a sweep by a process each, beside what a killed sweep has left, and in turns, of which some fail."""

import os
import shutil
import threading
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from thesis import lock, many, sweep, sweep_local, train


def test_a_run_that_a_killed_sweep_began_after_we_had_looked(tmp_path):
    """It takes its folder while ours starts, which is refused; it is waited for, and counts."""
    script, folder, ended, told = tmp_path / "run.py", tmp_path / "a", [], []
    script.write_text("import sys; sys.exit(2)")
    began, looked = threading.Event(), threading.Event()

    def other():
        with lock.held(folder):
            began.set()
            looked.wait(60)
            ended.append("a")

    def is_ended(job):
        if not ended:
            threading.Thread(target=other).start()
            assert began.wait(60)
            threading.Timer(0.5, looked.set).start()
        return bool(ended)

    job = SimpleNamespace(name="a", arguments=())
    folder.mkdir()
    failed = sweep_local.one_process_each([job], tmp_path, script, [dict(os.environ)], is_ended, lambda *a: told.append(a))
    assert (failed, told) == (0, [("a", 0)])
    ended.clear()
    free = SimpleNamespace(name="b", arguments=())
    assert sweep_local.one_process_each([free], tmp_path, script, [dict(os.environ)], lambda _: False, lambda *a: told.append(a)) == 1  # tried once
    assert told[1:] == [("b", 2)]


def test_a_run_that_a_killed_sweep_ends_while_ours_is_refused(tmp_path):
    """Nobody holds the folder any more when we look again."""
    script, job, looks, told = tmp_path / "run.py", SimpleNamespace(name="a", arguments=()), iter((False, True)), []
    script.write_text("import sys; sys.exit(2)")
    failed = sweep_local.one_process_each([job], tmp_path, script, [dict(os.environ)], lambda _: next(looks), lambda *a: told.append(a))
    assert (failed, told) == (0, [("a", 0)])


def test_a_run_that_is_waited_for_is_not_begun_after_an_interruption(tmp_path, monkeypatch):
    began, waits, tries = [], threading.Event(), iter(range(5))

    def held(folder):
        waits.set()
        if next(tries, None) is not None:
            raise lock.InUse("by another")
        return nullcontext()

    def run(command, **more):
        began.append(command[-1])
        assert waits.wait(60)
        raise KeyboardInterrupt

    (tmp_path / "b").mkdir()
    (tmp_path / "b" / lock.NAME).touch()
    monkeypatch.setattr(lock, "held", held)
    monkeypatch.setattr(sweep_local.subprocess, "run", run)
    jobs = [SimpleNamespace(name=name, arguments=()) for name in "ab"]
    with pytest.raises(KeyboardInterrupt):
        sweep_local.one_process_each(jobs, tmp_path, tmp_path, [dict(os.environ)] * 2, lambda _: False, lambda *_: None)
    assert began == [str(tmp_path / "a")]


@pytest.mark.parametrize("in_turns", [False, True])
def test_ctrl_c_is_no_failure_of_the_runs_that_it_stops(in_turns, tmp_path, monkeypatch):
    """All processes hear it; the first makes us stop, the second ends a moment later."""
    events, told, second = [], [], threading.Event()
    monkeypatch.setattr(sweep_local, "threading", SimpleNamespace(Event=lambda: events.append(threading.Event()) or events[0]))

    def run(command, **more):
        if not any(str(word).endswith(("/b", ".runs1.json")) for word in command):
            assert second.wait(60)
            raise KeyboardInterrupt
        second.set()
        assert all(event.wait(60) for event in events)
        return SimpleNamespace(returncode=130, stdout=())

    monkeypatch.setattr(sweep_local.subprocess, "run", run)
    monkeypatch.setattr(sweep_local.subprocess, "Popen", lambda command, **more: nullcontext(run(command)))
    jobs, envs, after = [SimpleNamespace(name=name, arguments=()) for name in "ab"], [dict(os.environ)] * 2, lambda *a: told.append(a)
    sweeps = {True: lambda: sweep_local.in_turns(jobs, tmp_path, 1, envs, None, after)}
    sweeps[False] = lambda: sweep_local.one_process_each(jobs, tmp_path, tmp_path, envs, lambda _: False, after)
    with pytest.raises(KeyboardInterrupt):
        sweeps[in_turns]()
    assert not told


def test_a_run_that_another_process_took_first_is_said_to_be_its(tmp_path, monkeypatch, capsys):
    """As what a killed sweep of several at once has left goes on to its next run: no failure of ours, and no output.txt that says why."""
    table = sweep.Table(SimpleNamespace(jobs=("a", "b")), tmp_path)
    monkeypatch.setattr(table, "write", list)
    for name in "ab":
        (tmp_path / name).mkdir()
    with lock.held(tmp_path / "a"):
        table.after("a", 2)
    table.after("b", 2)
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith(f"a: not trained here, as it is in use by process {os.getpid()} on ") and "the same command waits for it" in first
    assert second == f"b: failed with exit status 2, see {tmp_path / 'b' / 'output.txt'}; 0 of 2 runs have ended"


@pytest.mark.parametrize("action", ["list", "table"])
def test_a_reader_that_has_gone(action, tmp_path, monkeypatch, capsys):
    """As `head` does: no traceback, now or at the interpreter's end, and nothing said."""
    file = tmp_path / "sweep.yaml"
    shutil.copy(Path(sweep.__file__).parent / "sweeps" / "small.yaml", file)
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert sweep.main([action, str(file), "--out", str(tmp_path / "out")]) == 2
        out.write("more")
    assert capsys.readouterr().err == ""


def test_whatever_one_run_dies_of_the_others_go_on(tmp_path, capsys):
    """Before its first step, too: a folder that cannot be made, images that are not enough."""
    (tmp_path / "file").touch()
    options, told = ["--epochs", "1", "--batch", "700", "--threads", "1", "--no-figures"], {}
    outs = {"good": tmp_path / "good", "no folder": tmp_path / "file" / "out", "few": tmp_path / "few", "last": tmp_path / "last"}
    runs = [(name, train.arguments([*options, "--out", str(out), "--holdout", "99999" if name == "few" else "0"])) for name, out in outs.items()]
    assert many.together(runs, 2, told.__setitem__) == 2
    assert told == {"good": 0, "no folder": 2, "few": 2, "last": 0}
    assert f"{outs['no folder']} cannot be made: Not a directory.\n  fix: name a folder" in capsys.readouterr().err
    assert (outs["few"] / "output.txt").read_text().startswith("holdout: expected fewer than the 1437 training images") and (outs["last"] / "log.csv").exists()
