"""The files of the measured tune never stand in the way of a result: damaged, not writable, written by two processes at once."""

import json
import multiprocessing
import os
import pwd
import tempfile
import time
from pathlib import Path

import pytest
import torch
from unit.tuned import a_table, forward, said  # noqa: F401  (a_table is a fixture)

from fxmask.kernels import tune
from fxmask.kernels.cpu import deciding
from fxmask.kernels.cpu.plans import BY_NAME

DAMAGE = {
    "garbage": lambda t: b"\xff\xfe\x00 no json \x80",
    "text": lambda t: b"no json",
    "empty": lambda t: b"",
    "truncated": lambda t: t[: len(t) // 2].encode(),
    "a list": lambda t: b"[1, 2]",
    "null": lambda t: b"null",
    "nested too deep": lambda t: b"[" * 200_000,
    "times are a list": lambda t: changed(t, times=[1.0]),
    "a time is a text": lambda t: changed(t, times=dict.fromkeys(BY_NAME, "fast")),
    "a time has 400 digits": lambda t: changed(t, times=dict.fromkeys(BY_NAME, 10**400)),
    "no time": lambda t: changed(t, at=None),
    "a name is a list": lambda t: changed(t, name=["rows-512"]),
    "no such plan": lambda t: changed(t, name="diagonal-64", times={"diagonal-64": 1e-6}),
    "a plan of another op": lambda t: changed(t, name="columns-512", times={"columns-512": 1e-6}),
    "a plan that impl='cpu' may not take": lambda t: changed(t, name="masked_dense", times={"masked_dense": 1e-6}),
    "other code": lambda t: changed(t, stamp={**tune.stamp(), "code": "0"}),
    "another key": lambda t: changed(t, key="dx/1"),
    "another version": lambda t: changed(t, stamp={**tune.stamp(), "torch": "1.0"}),
    "another format": lambda t: changed(t, stamp={**tune.stamp(), "format": 0}),
}


def changed(text, **entries):
    return json.dumps({**json.loads(text), **entries}).encode()


@pytest.mark.parametrize("damage", DAMAGE.values(), ids=DAMAGE)
def test_a_damaged_file_is_made_again_with_one_warning(table, damage):
    forward()
    (file,) = table.files()
    text = file.read_text()
    file.write_bytes(damage(text))
    table.fresh()
    found = said(forward)
    assert len(found) == 1 and str(file) in found[0] and "made again" in found[0]
    assert len(table.measured) == 1 and table.files() == [file]
    assert {**json.loads(file.read_text()), "times": 0, "at": 0, "name": 0} == {**json.loads(text), "times": 0, "at": 0, "name": 0}
    table.fresh()
    assert said(forward) == [] and not table.measured


OTHERS = {
    "cores": (os, "cpu_count", lambda: 999),
    "processor": (tune, "cpu_name", lambda: "another"),
    "torch": (torch, "__version__", f"{torch.__version__}.1"),
    "format": (tune, "FORMAT", 0),
    "code": (tune, "code", lambda: "0"),
}


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
def test_a_decision_of_another_machine_or_version_is_not_taken(table, monkeypatch, other):
    forward()
    monkeypatch.setattr(*other)
    table.fresh()
    assert said(forward) == [] and len(table.measured) == 1 and len(table.files()) == 2


def test_a_folder_that_cannot_be_made_costs_one_warning(table, tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FXMASK_CACHE", str(tmp_path / "file" / "below"))
    found = said(lambda: (forward(), forward("auto"), table.fresh(), forward()))
    assert len(found) == 1 and "FXMASK_CACHE" in found[0] and str(tmp_path / "file") in found[0]
    assert (tmp_path / "file").read_text() == "" and len(table.measured) == 1


@pytest.mark.parametrize(("owner", "name", "error"), [(os, "replace", PermissionError), (tempfile, "mkstemp", PermissionError), (json, "dump", OSError)])
def test_a_folder_that_cannot_be_written_costs_one_warning(table, owner, name, error, monkeypatch):
    def refuse(*_, **__):
        raise error(28, "no space, or no right")

    monkeypatch.setattr(owner, name, refuse)
    found = said(lambda: (forward(), forward("auto")))
    assert len(found) == 1 and "cannot be kept" in found[0] and "FXMASK_TUNE=0" in found[0]
    assert table.files() == [] and len(table.measured) == len(deciding.decisions) == 2


def test_a_file_that_can_be_neither_read_nor_replaced_is_named_once_for_each(table):
    forward()
    (file,) = table.files()
    file.unlink()
    file.mkdir()  # root may read any file, but no folder
    table.fresh()
    found = said(lambda: (forward(), table.fresh(), forward()))
    assert 1 <= len(found) <= 2 and all(str(file) in text for text in found)


def test_nobody_is_at_home(table, monkeypatch, tmp_path):
    """A user without an entry, as in many containers: there is no folder to keep anything in."""
    for name in ("HOME", "XDG_CACHE_HOME", "FXMASK_CACHE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", lambda uid: {}[uid])
    assert len(said(lambda: (forward(), forward("auto")))) <= 1
    assert len(deciding.decisions) == 2
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert tune.folder() == tmp_path / "xdg" / "fxmask"
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert tune.folder() == Path(tmp_path) / ".cache" / "fxmask"


def write_often(n):
    for i in range(200):
        tune.store("a key", tune.Choice("rows-512", "measured", {"rows-512": n + i / 1000, **{f"other {j}": 1.0 for j in range(50)}}))


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_processes_that_write_the_same_decision_at_once(table):
    writers = [multiprocessing.get_context("fork").Process(target=write_often, args=(n,)) for n in (1, 2)]
    tune.store("a key", tune.Choice("rows-512", "measured", {"rows-512": 0.0}))
    for p in writers:
        p.start()
    seen, end = set(), time.monotonic() + 60
    while any(p.is_alive() for p in writers) and time.monotonic() < end:
        seen.add(int(tune.load("a key", BY_NAME).times["rows-512"]))  # None, and a warning, where a file is half written
    for p in writers:
        p.join(60)
    assert [p.exitcode for p in writers] == [0, 0] and seen & {1, 2}
    (file,) = table.files()
    assert file.suffix == ".json" and tune.load("a key", BY_NAME).name == "rows-512"
