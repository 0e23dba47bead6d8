"""A name for the code of this package, so that nothing compiled by another version of it is taken from a cache.

The compiler's caches know an op by its name: a new process would run the old backward of an op whose formula has changed.
"""

from __future__ import annotations

import functools
from pathlib import Path

import torch

from ..kernels.file_hash import file_hash
from ..version import __version__

FOLDERS = ("kernels", "passes", "compiler", "cuda_graphs", "explaining", "guards", "health", "nm", "")  # of the package; its benchmarks decide nothing compiled


@functools.cache
def source_hash() -> str:
    """SHA-256 over the library's files, 16 hex digits; of its version where there are none, as in a zip."""
    root = Path(__file__).parents[1]
    files = [f for folder in FOLDERS for f in sorted((root / folder).rglob("*.py") if folder else root.glob("*.py"))]
    return file_hash(files, root)[:16] if files else f"version-{__version__}"


def tag_caches() -> None:
    """Add the hash to the tag that every key of torch.compile's caches holds."""
    mine, config = f"fxmask-{source_hash()}", torch.compiler.config
    if mine not in config.cache_key_tag:
        config.cache_key_tag = "+".join(filter(None, (config.cache_key_tag, mine)))
