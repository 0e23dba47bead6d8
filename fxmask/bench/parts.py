"""The stages of the GPU run that have a csv of their own, but for the sweeps."""

from __future__ import annotations

from .dropping import DROPOUT
from .nm import NM_PART
from .part import Part
from .probes import BANDWIDTH, TENSORCORE
from .pruning import PRUNING
from .refreshes import METADATA

PARTS: dict[str, Part] = {part.name: part for part in (BANDWIDTH, TENSORCORE, METADATA, DROPOUT, PRUNING, NM_PART)}
