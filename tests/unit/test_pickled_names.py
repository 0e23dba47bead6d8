"""What is pickled holds classes and functions by the modules that they lived in: models and trainers that were saved before they moved load."""

from __future__ import annotations

import pickle

import pytest

import fxmask
from fxmask import bsr, fused
from fxmask.guards import noticed

MOVED = {
    "fxmask.dropping Pair": fused.Pair,
    "fxmask.dropping FusedDropout": fused.FusedDropout,
    "fxmask.finalizing _before_bsr": bsr.before_bsr,
    "fxmask.guards.guard_handle _none": noticed.gone,
    "fxmask.health HealthLog": fxmask.HealthLog,
}


@pytest.mark.parametrize("name", MOVED)
def test_what_was_pickled_by_an_older_name_loads(name):
    module, _, attribute = name.partition(" ")
    assert pickle.loads(f"c{module}\n{attribute}\n.".encode()) is MOVED[name]
