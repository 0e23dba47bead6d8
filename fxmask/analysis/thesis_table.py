"""The memory model of `fxmask.analysis.thesis` on a recorded model: `analyze(..., memory_model="thesis")`."""

from __future__ import annotations

from typing import Any

from ..passes.counting.recording import Recording
from ..passes.counting.work import Work
from .model_shapes import LinearShape
from .thesis import GIB, VARIANTS, Movement, kept_bytes, tensor_bytes

DERIVED = "derived: the source leaves open the lines of a kept block and the number of batches"


def rows(forward: list[Work], recording: Recording, steps: int | None) -> list[dict[str, Any]]:
    """A row for each variant, and one with activations of every token: bytes of one forward of a batch in lines of 128 bytes, and GiB of `steps` of them.

    What a linear reads and writes counts once a sample in the thesis' model; the first linear reads the whole sample. Biases of masked layers are left out.
    """
    linears = [w for w in forward if w.weight and w.m and w.call is not None]
    samples = recording.inputs[0].shape[0] if recording.inputs and recording.inputs[0].dim() else 1
    features, by_token = _activations(linears, recording, samples)
    masked = {w.weight: w for w in linears if w.kept is not None}
    left_out = {f"{name.rpartition('.')[0]}.bias".removeprefix(".") for name in masked}
    others = sum(tensor_bytes(p.numel()) for name, p in recording.parameters.items() if name not in masked and name not in left_out)
    dense = sum(tensor_bytes(w.elements) for w in masked.values())
    found = []
    for model, variant in [*(("thesis", v) for v in VARIANTS), ("tokens", "A")]:
        sizes = features if model == "thesis" else by_token
        kept = sum(_kept(w, variant) for w in masked.values())
        moved = Movement(kept, dense, others, sum(tensor_bytes(samples * n) for n in sizes))
        row: dict[str, Any] = {"memory_model": model, "variant": variant, "batch": samples}
        row |= {"masked_weights_bytes": kept, "dense_weights_bytes": dense, "other_weights_bytes": others, "activations_bytes": moved.activations}
        row |= {"total_bytes": moved.total, "dense_bytes": moved.dense}
        if steps is not None:
            row |= {"steps": steps, "total_gib": moved.total * steps / GIB, "dense_gib": moved.dense * steps / GIB}
        found.append(row | {"note": DERIVED})
    return found


def _activations(linears: list[Work], recording: Recording, samples: int) -> tuple[list[int], list[int]]:
    """Elements a sample that linears read and write: once, and for all tokens."""
    once: list[int] = []
    tokens: list[int] = []
    for i, w in enumerate(linears):
        first = i == 0 and bool(recording.inputs)
        once += [recording.inputs[0].numel() // samples if first else w.k, w.n]
        per_sample = max(1, w.m * w.batch // samples)
        tokens += [per_sample * w.k, per_sample * w.n]
    return once, tokens


def _kept(w: Work, variant: str) -> int:
    mask = next(p.mask.values for p in w.call.inputs if p.mask is not None) if w.call else None
    assert mask is not None and w.block is not None
    n = w.elements // w.k if w.k else 0
    return kept_bytes(LinearShape(w.weight, n, w.k), w.block, mask=mask, variant=variant)

