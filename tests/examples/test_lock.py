"""One run a folder: of this process, of another, and of one that was killed."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from thesis import lock

BEGIN = f"import os, signal, sys\nsys.path.insert(0, {str(Path(__file__).parents[2] / 'examples')!r})\nfrom pathlib import Path\nfrom thesis import lock\n"
TAKE = "with lock.held(Path(sys.argv[1])):\n    "
KILLED = """pid = os.fork()  # as a loader's worker, with all open files
    if pid:
        Path(sys.argv[2]).write_text(str(pid))
        os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()
"""


def other(code: str, *paths: Path) -> subprocess.CompletedProcess[str]:
    """A process that takes the folder."""
    where = {"stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE} if code != KILLED else {}
    return subprocess.run([sys.executable, "-c", BEGIN + TAKE + code, *map(str, paths)], text=True, check=False, **where)


def test_a_second_run_is_refused(tmp_path):
    """And by being refused does not free the folder."""
    with lock.held(tmp_path):
        for _ in range(2):
            with pytest.raises(lock.InUse, match=f"in use by process {os.getpid()} on "), lock.held(tmp_path / ".." / tmp_path.name):
                pass
            done = other("pass", tmp_path)
            assert done.returncode == 1 and f"in use by process {os.getpid()} on " in done.stderr
    assert other("pass", tmp_path).returncode == 0
    with lock.held(tmp_path):
        pass


def test_workers_of_a_killed_run_hold_nothing(tmp_path):
    folder, pid = tmp_path / "run", tmp_path / "pid"
    assert other(KILLED, folder, pid).returncode == -signal.SIGKILL
    try:
        with lock.held(folder):
            assert str(os.getpid()) in (folder / lock.NAME).read_text()
    finally:
        os.kill(int(pid.read_text()), signal.SIGKILL)


def test_a_folder_that_cannot_be_written_to(tmp_path):
    (tmp_path / lock.NAME).mkdir()
    with pytest.raises(lock.InUse, match=r"cannot be made: Is a directory\.\n  fix: name a folder that you may write to"), lock.held(tmp_path):
        pass


def test_a_file_system_without_locks(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(lock.fcntl, "lockf", none)
    with lock.held(tmp_path):
        assert "no file locks there (No locks available); see to it that no other run writes here" in capsys.readouterr().err


def test_a_table_on_a_file_system_without_locks_is_written(tmp_path, monkeypatch, capsys):
    def none(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(lock.fcntl, "flock", none)
    with lock.alone(tmp_path / "t.csv"):
        (tmp_path / "t.csv").write_text("a")
    assert "t.csv: no file locks there (Function not implemented); see to it that no other process rewrites it" in capsys.readouterr().err
