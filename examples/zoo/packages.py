"""The packages that models come from, imported once for all processes; whichever is missing is told by its models."""

from __future__ import annotations

import importlib
from contextlib import suppress

from torchvision_shim import import_torchvision

with suppress(ImportError):
    import_torchvision()  # first: the others import it, which beside a CPU build of torch wants the shim
    for name in ("timm", "transformers", "transformers.modeling_utils", "transformers.models.auto.modeling_auto"):
        importlib.import_module(name)
