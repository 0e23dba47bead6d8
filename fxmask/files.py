"""Tables as files, which are written whole or not at all."""

from __future__ import annotations

import csv
import errno
import io
import os
import shutil
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from .kernels.errors import ConfigError, message


def csv_text(rows: list[dict[str, Any]]) -> str:
    """Rows as csv; missing values are empty."""
    columns = list(dict.fromkeys(k for r in rows for k in r))
    out = io.StringIO()
    writer = csv.DictWriter(out, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return out.getvalue()


def as_path(path: object, caller: str) -> Path:
    """ConfigError for what is no path."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"{caller}: expected a path, got {path!r}.")
    return Path(path)


def cannot_write(folder: Path, e: OSError) -> ConfigError:
    """What to raise where a folder takes no files."""
    what = f"the output folder cannot be written: {e.strerror or e}."
    return ConfigError(message(what, str(folder), "name a folder that you may write to."))


def write_files(files: dict[str, str], folder: Path) -> None:
    """All files or none: written into a folder beside, then moved; folders that were made for them go again."""
    new = [p for p in (folder, *folder.parents) if not p.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        beside = Path(tempfile.mkdtemp(prefix=".fxmask-", dir=folder))
    except OSError as e:
        _remove(new)
        raise cannot_write(folder, e) from None
    done = False
    try:
        for name, content in files.items():
            (beside / name).write_text(content, encoding="utf-8")
            if (folder / name).is_dir():
                raise IsADirectoryError(errno.EISDIR, f"{name} is a folder there")
        for name in files:
            os.replace(beside / name, folder / name)
        done = True
    except OSError as e:
        raise ConfigError(message(f"the tables cannot be written: {e.strerror or e}.", str(folder), "make room, or name another folder.")) from None
    finally:
        shutil.rmtree(beside, ignore_errors=True)
        if not done:
            _remove(new)


def _remove(folders: list[Path]) -> None:
    for p in folders:
        with suppress(OSError):
            p.rmdir()
