"""Triton reads TRITON_INTERPRET when a kernel is decorated, so these tests run in processes of their own, which test_in_interpreter.py reports.

They begin with the session and are waited for at its end: beside the other tests one after another, alone as many at once as there are cores. Where the tests
run in several processes anyhow (pytest-xdist), one of these does nothing else at first.
"""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import pytest

INSIDE = os.environ.get("FXMASK_INTERPRETER") == "1"
FOLDER = Path(__file__).parent
Group = tuple[Path, ...]  # files that one process runs
collect_ignore_glob = ["test_in_interpreter.py"] if INSIDE else ["test_[!i]*.py"]
if INSIDE:
    from interpreter.quick import quicken

    quicken()


class Runs:
    """The runs of some groups of this folder's files, begun."""

    def __init__(self, groups: list[Group], marks: str, at_once: int) -> None:
        self._going: list[subprocess.Popen[str]] = []
        self._pool, self._stopped = ThreadPoolExecutor(at_once), False
        self.of: dict[Group, Future[subprocess.CompletedProcess[str]]] = {group: self._pool.submit(self._run, group, marks) for group in groups}

    def _run(self, group: Group, marks: str) -> subprocess.CompletedProcess[str]:
        env = {**os.environ, "TRITON_INTERPRET": "1", "FXMASK_INTERPRETER": "1", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider", "-m", marks, *map(str, group)]
        if self._stopped:
            return subprocess.CompletedProcess(command, 1, "", "stopped")
        process = subprocess.Popen(command, env=env, cwd=FOLDER.parent.parent, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self._going.append(process)
        out, err = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, out, err)

    def stop(self) -> None:
        """End what still runs, as where the session was broken off."""
        self._stopped = True
        for process in self._going:
            process.kill()
        self._pool.shutdown()


RUNS = pytest.StashKey[Runs]()


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: (item.path.name == "test_in_interpreter.py") != _is_one_of_several(item.config))  # stable: the others keep their order


def _is_one_of_several(config: pytest.Config) -> bool:
    return hasattr(config, "workerinput")


def _begin(session: pytest.Session) -> None:
    ours = [item.callspec.params["paths"] for item in session.items if item.path.name == "test_in_interpreter.py"]  # type: ignore[attr-defined]
    if ours and not session.config.option.collectonly:
        alone = len(ours) == len(session.items)
        marks = "not slow" if "not slow" in session.config.option.markexpr else ""
        session.config.stash[RUNS] = Runs(ours, marks, (os.cpu_count() or 1) if alone else 1)


def pytest_collection_finish(session: pytest.Session) -> None:
    if not _is_one_of_several(session.config):  # each of which collects them all
        _begin(session)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if RUNS in session.config.stash:
        session.config.stash[RUNS].stop()


@pytest.fixture
def runs(request: pytest.FixtureRequest) -> dict[Group, Future[subprocess.CompletedProcess[str]]]:
    """For each group that was selected its run."""
    if RUNS not in request.config.stash:
        _begin(request.session)
    return request.config.stash[RUNS].of
