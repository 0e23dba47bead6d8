"""The names that users type are a promise: a change here is a change for them, and belongs in CHANGELOG.md."""

from __future__ import annotations

import fxmask

PUBLIC = [
    "ActivationPruning",
    "BlockDropout",
    "Feedback",
    "FxMaskError",
    "FxMaskWarning",
    "HealthLog",
    "NMMask",
    "Regrow",
    "Report",
    "Schedule",
    "WeightMask",
    "advise",
    "allocate",
    "analyze",
    "apply",
    "dense",
    "explain",
    "feedback",
    "finalize",
    "freeze",
    "graphed",
    "guard",
    "load_state_dict",
    "masks",
    "refresh",
    "register_cost",
    "restore",
    "stability",
    "state_dict",
    "step",
]


def test_public_names_are_frozen():
    assert sorted(fxmask.__all__) == PUBLIC


def test_public_names_exist_and_are_documented():
    assert [name for name in PUBLIC if not (getattr(fxmask, name).__doc__ or "").strip()] == []
