"""Import torchvision beside a CPU build of torch.

torchvision's default wheel is linked against CUDA. Without the CUDA libraries its C++ ops do not load, which it tolerates, but then it
attaches shape rules to two of those ops, `nms` and `qnms`, and that fails because nobody has declared them. Declaring the two is enough for
models and transforms; calling them still fails, as they have no kernel.
"""

from __future__ import annotations

import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import torch

_OPS = ("nms", "qnms")
_declared: list[torch.library.Library] = []  # a Library that is garbage-collected takes its declarations with it


def import_torchvision() -> ModuleType:
    """Return the module `torchvision`; raise ImportError that says how to install it where it is missing."""
    if "torchvision" in sys.modules:
        return sys.modules["torchvision"]
    spec = find_spec("torchvision")
    if spec is None or spec.origin is None:
        raise ImportError(
            "torchvision: expected it installed, got no such package.\n"
            "  where: the image data sets and models of the examples and tests\n"
            "  fix: pip install 'fxmask[vision]', or 'torchvision' in the version that belongs to your torch"
        )
    # with ops that load, a second declaration would be the error
    if not _ops_load(Path(spec.origin).parent) and not _declared:
        library = torch.library.Library("torchvision", "FRAGMENT")
        for op in _OPS:
            library.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        _declared.append(library)
    return import_module("torchvision")


def _ops_load(package: Path) -> bool:
    """Whether torchvision's C++ ops load beside this torch, tried as torchvision does it."""
    for path in package.glob("_C*"):
        try:
            torch.ops.load_library(path)
        except (ImportError, OSError):
            continue
        return True
    return False
