"""Runs of a sweep by a process each, beside what a killed sweep has left."""

import os
import threading
from types import SimpleNamespace

from thesis import lock, sweep_local


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
