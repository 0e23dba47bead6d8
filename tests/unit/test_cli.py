"""What ends the command besides its own errors: a reader that has gone, a disk that is full, an encoding without some signs, requests that cannot be meant."""

from __future__ import annotations

import errno
import io
import os

import pytest
import torch
from torch import nn

from fxmask import cli
from fxmask.analysis import models
from fxmask.compiler import sources
from fxmask.errors import ConfigError
from fxmask.kernels import tune

SPEC = f"{__name__}:net"
LISTED = ("bench", "--list", "--device", "cpu")


def net():
    return nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 64))


def test_a_reader_that_has_gone(monkeypatch, capsys):
    """As `head` does: no traceback, now or at the interpreter's end, and nothing said."""
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes, "w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert cli.main(LISTED) == 2
        out.write("more")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("closed", ["stdout", "stderr"])
def test_streams_that_are_closed(monkeypatch, closed):
    """As `>&-` does: nobody reads, and the command does what else it does."""
    monkeypatch.setattr(f"sys.{closed}", None)
    assert cli.main(["env"]) == cli.main(["analyze", SPEC, "--input", "8x64"]) == 0


@pytest.mark.parametrize(("meta", "builds"), [(True, 2), (False, 1)])
def test_a_model_that_cannot_be_built_is_not_built_again(monkeypatch, meta, builds):
    """But with values, where it had none."""
    made = []

    def breaks():
        made.append(torch.empty(0).device.type)
        raise RuntimeError("no such luck")

    monkeypatch.setattr(f"{__name__}.net", breaks)
    with pytest.raises(ConfigError, match="cannot be built: RuntimeError: no such luck"):
        models.load(SPEC, meta=meta)
    assert made == ["meta", "cpu"][-builds:]


class Full(io.StringIO):
    def write(self, text):
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdout", Full())
    assert cli.main(LISTED) == 2
    assert capsys.readouterr().err == "fxmask: cannot read or write: [Errno 28] No space left on device\n"


def test_an_encoding_without_some_signs(monkeypatch):
    raw = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(raw, encoding="cp1252"))
    assert cli.main(["analyze", SPEC, "--input", "8x64", "--ratio", "0.5"]) == 0
    assert b"FLOP" in raw.getvalue() and b"W?M" in raw.getvalue()


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("bench", "--device", "cpu", "--shapes", "64x64->64", "--out", "{file}"), "the csv cannot be written: File exists.\n  where: {file}\n"),
        (("bench", "--device", "cpu", "--dispatch", "0"), "--dispatch 0: expected at least 1."),
        (("bench", "--device", "cpu", "--dtype", "tf32", "--list"), "--dtype tf32 is a mode of GPUs: expected another dtype on a CPU."),
        (("explain", SPEC, "--ratio", "0.5", "--block", ""), "block: expected out x in, such as 16x16, got ''."),
        (("explain", SPEC, "--ratio", "0.5", "-o", ""), "-o: expected a path, got ''."),
        (("explain", SPEC, "--ratio", "0.5", "-o", ".csv"), "-o: expected a path, got '.csv'."),
        (("analyze", SPEC, "--input", "99999999999999999999x64"), "input: expected fewer than 2^63 elements, got '99999999999999999999x64'."),
        (("analyze", SPEC, "--input", "8x64:quint8"), "input: expected a dtype that is not quantized, such as int8, got '8x64:quint8'."),
        (("analyze", SPEC, "--input", "8x64", "--table", "thesis"), "--table thesis: expected --memory-model thesis, which makes it, got none."),
        (("advise", SPEC, "--input", "8x64:float8_e4m3fn", "--seconds", "1"), "the model cannot run on these inputs: RuntimeError: "),
        (("bench", "--device", "cpu", "--seed", "9" * 20, "--list"), f"--seed {'9' * 20}: expected a number nearer to 0 than 2^53."),
    ],
    ids=["out is a file", "dispatch", "tf32", "block", "out", "a suffix alone", "size", "quantized", "no such table", "8 bits", "seed"],
)
def test_requests_that_cannot_be_meant(args, said, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    assert cli.main([a.format(file=tmp_path / "file") for a in args]) == 2
    assert said.replace("{file}", str(tmp_path / "file")) in capsys.readouterr().err and [p.name for p in tmp_path.iterdir()] == ["file"]


def test_options_of_advise_that_are_given_again():
    a = cli.parser().parse_args(["advise", SPEC, "--input", "8x64", "--include", "0", "--include", "2", "--blocks", "8", "--blocks", "16", "32"])
    assert (a.include, a.blocks, a.exclude) == (["0", "2"], ["8", "16", "32"], None)


def test_caches_of_homes_and_of_zips(monkeypatch, tmp_path):
    """A `~` that no shell has seen is a home; the XDG specification ignores relative paths; a zip, whose files cannot be listed, is told by its version."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("FXMASK_CACHE", "~/kept")
    assert tune.folder() == tmp_path / "kept"
    monkeypatch.delenv("FXMASK_CACHE")
    for given, found in (("relative", tmp_path / ".cache"), (str(tmp_path / "xdg"), tmp_path / "xdg")):
        monkeypatch.setenv("XDG_CACHE_HOME", given)
        assert tune.folder() == found / "fxmask"
    monkeypatch.setattr(sources, "__file__", str(tmp_path / "fxmask.whl" / "fxmask" / "compiler" / "sources.py"))
    sources.source_hash.cache_clear()
    try:
        assert sources.source_hash() == f"version-{sources.__version__}"
    finally:
        sources.source_hash.cache_clear()
