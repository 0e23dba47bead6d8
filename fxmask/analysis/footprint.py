"""What a training step holds in memory, by kind and module: bytes of tensors, without the allocator's rounding."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ..kernels.lists import listed, packed_length
from ..passes.counting.recording import Recording
from ..passes.counting.work import Work

KINDS = ("weights", "buffers", "metadata", "saved_activations", "gradients", "optimizer_state")


def rows(recording: Recording, works: list[Work], forward: list[Work]) -> list[dict[str, Any]]:
    """T5: a row for each module that holds something itself, one for the input, one for the largest tensor that an op makes (workspace), and the total.

    saved_activations: storages that autograd holds for the backward, each once, without parameters, buffers and the model's inputs. metadata: masks and strip
    lists as bytes a layer needs while it runs (masks that are built in every forward are among the saved tensors, too, and count there alone). naive_mask: what
    a layer that multiplies by W∘M needs more, an element mask and the masked copy of the weight.
    """
    held: dict[str, Counter[str]] = {}

    def add(module: str, kind: str, size: int) -> None:
        if size:
            held.setdefault(module, Counter())[kind] += size

    for name, p in recording.parameters.items():
        module, size = name.rpartition(".")[0], recording.size(p)
        add(module, "weights", size)
        if name in recording.trained:
            add(module, "gradients", size)
    for w in works:
        if w.phase == "opt":
            add(w.weight.rpartition(".")[0], "optimizer_state", (w.dense or w.cost).reads_min.get("opt_state", 0))
    for name, b in recording.buffers.items():
        add(name.rpartition(".")[0], "buffers", recording.size(b))
    for s in recording.saved:
        add(s.module, "saved_activations", s.bytes)
    for name, site in recording.sites.items():
        grid, module = site._fxmask_grid, name.rpartition(".")[0]
        if site._fxmask_mask is not None:
            add(module, "metadata", grid[0] * grid[1])
            if (site._fxmask_config.impl == "triton" or site._fxmask_lists is not None) and listed(site._fxmask_config.block):
                add(module, "metadata", 4 * packed_length(grid, site._fxmask_config.block))
    # one of a weight, however often its layer is called
    copies = {(w.call.module, w.weight): w.elements * (1 + w.dtype.itemsize) for w in forward if w.call and w.dtype and w.kept is not None}
    naive: Counter[str] = Counter()
    for (module, _), copy in copies.items():
        naive[module] += copy
    made: dict[str, dict[str, int]] = {m or "(model)": {**kinds, "total": sum(kinds.values()), "naive_mask": naive[m]} for m, kinds in held.items()}
    size, largest = _held(recording), max((p.bytes for w in works if w.call and not w.call.is_view for p in w.call.outputs), default=0)
    made |= {"(input)": {"input": size, "total": size}, "(workspace)": {"workspace": largest, "total": largest}}
    columns = (*KINDS, "input", "workspace", "total", "naive_mask")
    made["(total)"] = {c: sum(row.get(c, 0) for row in made.values()) for c in columns}
    return [{"module": module, **{c: row.get(c, 0) for c in columns}} for module, row in made.items()]


def _held(recording: Recording) -> int:
    """Bytes of the model's inputs: a tensor that is given twice counts once, and views of one storage, such as an expanded one, for no more than that has."""
    views: dict[int, dict[Any, int]] = {}
    storages: dict[int, int] = {}
    for t in recording.inputs:
        storage, size = t.untyped_storage(), recording.size(t)
        views.setdefault(storage._cdata, {})[t.storage_offset(), t.shape, t.stride()] = size
        storages[storage._cdata] = size * (storage.nbytes() // t.itemsize) // t.numel() if t.numel() else 0
    return sum(min(sum(sizes.values()), storages[key]) for key, sizes in views.items())
