"""Totals of an analysis, and what they say: where masking helps, and where it cannot."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from ..passes.counting.recording import Recording
from ..passes.counting.work import Work
from . import roofline, tables, traffic
from .devices import Device

MAKING = ("fxmask.block_index", "fxmask.strip_lists")  # of masks and their lists, in forwards
CPU_STRIPS = (
    "No bound of the speed-up is stated for a CPU: what masks leave out runs there by strips of PyTorch's own matmuls, or densely, whichever is expected to be "
    "faster, and neither is modelled. Rows of impl triton count the kernels of GPUs: their bytes, issued FLOP and t_min are none of this CPU's. "
    "fxmask.advise times a dense model's layers here."
)
CPU_DENSE = "No bound of the speed-up is stated for a CPU, whose caches least times leave out; fxmask.advise times a dense model's layers here."
LOWER_BOUNDS = "Totals are lower bounds"
NAMES = {"fwd": "fwd", "recompute": "recompute", "dX": "bwd_dx", "dW": "bwd_dw", "db": "bwd_db", "opt": "opt"}


def by_phase(works: list[Work], count: Callable[[Work], int]) -> dict[str, int]:
    """{fwd, bwd_dx, bwd_dw, ..., total}: sums of a count, integers."""
    found: Counter[str] = Counter()
    for w in works:
        found[NAMES[w.phase]] += count(w)
    always = ("fwd", "bwd_dx", "bwd_dw")
    return {n: found[n] for n in NAMES.values() if n in always or found[n]} | {"total": sum(found.values())}


def summary(works: list[Work], kept: dict[str, int], recording: Recording, device: Device, tf32: bool, steps: int | None) -> dict[str, Any]:
    """T6, nested: FLOP, bytes and times of a step, parameters (`kept`: see `kept_parameters`), and with `steps` the totals of a run."""
    params = sum(p.numel() for p in recording.parameters.values())
    useful, dense = by_phase(works, lambda w: w.cost.flop_useful), by_phase(works, lambda w: w.flop_dense)
    moved = by_phase(works, lambda w: w.cost.bytes_min)
    operands = [o for w in works for o in traffic.operands(w, device)]
    loaded = sum(tables.loaded_weights(w) for w in works)
    found: dict[str, Any] = {
        "params": params,
        "params_kept": sum(kept.values()),
        "density": sum(kept.values()) / params if params else None,
        "flop": useful,
        "flop_dense": dense,
        "flop_executed": by_phase(works, lambda w: w.cost.flop_issued),
        "mac": by_phase(works, tables.macs),
        "bytes_min": moved,
        "bytes_req": by_phase(works, lambda w: w.cost.bytes_req),
        **{level: sum(o[level] for o in operands) for level in ("bytes_sector", "bytes_line", "bytes_dram_est")},
        "weights_loaded": loaded,
        "ai_dram": useful["total"] / moved["total"] if moved["total"] else None,
        "t_min_us": 1e6 * sum(roofline.seconds(w, device, tf32) for w in works if w.launches),
        "t_dense_min_us": 1e6 * sum(roofline.dense_seconds(w, device, tf32) for w in works if w.launches),
    }
    if steps is not None:
        run = {"flop_dense": dense["total"], "flop_adjusted": useful["total"], "flop_saved": dense["total"] - useful["total"]}
        run |= {"weights_loaded": loaded, "bytes_min": moved["total"]}
        found["run"] = {"steps": steps, **{n: v * steps for n, v in run.items()}}
    return found


def rows(summary: dict[str, Any]) -> list[dict[str, Any]]:
    """The summary as rows: quantity, its phases, total; what has no phases has a total alone."""
    found: list[dict[str, Any]] = []
    for name, value in summary.items():
        if isinstance(value, dict) and "total" in value:
            found.append({"quantity": name, **value})
        elif isinstance(value, dict):
            found += [{"quantity": f"{name}_{k}", "total": v} for k, v in value.items()]
        else:
            found.append({"quantity": name, "total": value})
    return found


def words(works: list[Work], device: Device, tf32: bool, covered: dict[str, float], by_element: bool, masks: int) -> list[str]:
    """What the numbers say, one sentence each, with the numbers. by_element: whether there are N:M masks; masks: how many block masks."""
    masked = [w for w in works if w.dense is not None and w.phase != "opt"]
    of_what = " where nothing is masked" if masked and device.is_cpu else ""
    said = [f"A FLOP ratio is not a speed-up; t_min is a lower bound{of_what}; L1 hits and bank conflicts are not modelled."]
    if min(covered.values()) < 100:
        parts = ", ".join(f"{v:.1f} % of {n.removesuffix('_pct')}" for n, v in covered.items())
        said.append(f"{LOWER_BOUNDS} (>=): covered are {parts}; table coverage names the ops, register_cost adds one.")
    if masked:
        return said + _of_masked(masked, works, device, tf32)
    if by_element or any(w.extra for w in works):
        return [*said, "Masks leave out no FLOP here: layers multiply by W∘M densely, and what makes it is work that a dense step does not have."]
    which = f"No product here reads any of the {masks} masked weights with its mask" if masks else "No layer is masked"
    return [*said, f"{which}: dense and useful FLOP agree."]


def _of_masked(masked: list[Work], works: list[Work], device: Device, tf32: bool) -> list[str]:
    low, plain = sum(w.cost.bytes_min for w in masked), sum(roofline.dense_of(w).cost.bytes_min for w in masked)
    flop, dense = sum(w.cost.flop_useful for w in masked), sum(w.flop_dense for w in masked)
    weights = sum(_weight_bytes(roofline.dense_of(w)) for w in masked)
    added = [w for w in works if w.extra and w.launches and w.phase != "opt"]  # the guard's own masks are in the masked step's rows
    said = [_left_out(1 - flop / dense if dense else 0, plain, low, added)]
    if plain and weights / plain < 0.5 and any(w.kept is not None for w in masked):  # pruning and block dropout are of activations
        said.append(
            f"Activations dominate: of the dense layers' bytes {1 - weights / plain:.1%} are activations and their gradients, which a weight mask does not "
            "shrink; fewer tokens a step, or wider layers, make weights count."
        )
    issued, impls = sum(w.cost.flop_issued for w in masked), {w.impl for w in masked}
    if not device.is_cpu:
        said += _of_times(masked, added, works, device, tf32)
    if "masked_dense" in impls:
        said.append("Layers with impl masked_dense multiply by W∘M densely: they issue all dense FLOP and move more bytes than a dense layer.")
    elif flop and issued > 1.5 * flop and not device.is_cpu:
        blocks = ", ".join(f"{a}x{b}" for a, b in sorted({w.block for w in masked if w.block}))
        which = f"any of their blocks ({blocks})" if blocks else "anything in them"
        said.append(
            f"Of {issued / 1e9:.4g} GFLOP that the kernels issue, {flop / 1e9:.4g} are useful: tensor cores take whole tiles, 128 tokens or more by 64 or 128 "
            f"features in steps of 64, wherever {which} is kept."
        )
    if device.is_cpu:
        said.append(CPU_DENSE if impls <= {"masked_dense"} else CPU_STRIPS)
    return said


def _of_times(masked: list[Work], added: list[Work], works: list[Work], device: Device, tf32: bool) -> list[str]:
    """What least times say: of the masked ops, by which roof, and of the whole step. added: what a dense step does not have."""
    def least(ops: Iterable[Work]) -> float:
        return sum(roofline.seconds(w, device, tf32) for w in ops)

    by_bound = Counter(max(b := roofline.bounds(w, device, tf32), key=lambda n: b[n]) for w in masked)
    t, t_dense = least(masked), least(map(roofline.dense_of, masked))
    parts = ", ".join(f"{n} {c}" for n, c in by_bound.most_common())
    said = [
        f"On {device.name} their {len(masked)} ops are bound by: {parts}. Least time {1e6 * t:.4g} us, of the dense ones {1e6 * t_dense:.4g} us: "
        f"{t_dense / t if t else 0:.2f} times as fast as dense, were both at theirs; where dense ops are further from theirs, masks gain more."
    ]
    if by_bound["launch"] > len(masked) / 2:
        said.append("Launch-bound: most of these ops are shorter than a launch, so masking cannot make them faster; larger batches or CUDA graphs first.")
    said += _of_l2(masked, device, tf32)
    others = [w for w in works if (w.dense is None or w.phase == "opt") and w.launches]
    rest, rest_dense = least(others), sum(roofline.dense_seconds(w, device, tf32) for w in others)
    if t + rest:
        share, gain = rest_dense / (t_dense + rest_dense), (t_dense + rest_dense) / (t + rest)
        which = "Other ops, the masked step among them," if any(w.dense for w in others) else "Ops that no mask touches"
        said.append(f"{which} take {share:.0%} of the dense step's least time: the whole step is {gain:.2f} times as fast as dense, were all at theirs.")
        made = least(added)
        bare = (t_dense + rest_dense) / (t + rest - made) if t + rest > made else gain
        if f"{bare:.2f}" != f"{gain:.2f}":  # a dense step has none of it, and no share of the step's time names it
            what = _named(added)
            said[-1] += f" {what[0].upper()}{what[1:]} takes {1e6 * made:.4g} us, which a dense step does not have: {bare:.2f} times without it."
    return said


def _left_out(less_flop: float, plain: int, low: int, added: list[Work]) -> str:
    """The shares of FLOP and compulsory bytes that masks leave out, with and without what makes the masks. plain, low: bytes of matmuls, dense and masked."""
    more = sum(w.cost.bytes_min for w in added)
    with_it, without = (1 - b / plain if plain else 0 for b in (low + more, low))
    said = f"Masked layers: {less_flop:.1%} of their FLOP are left out, and {with_it:.1%} of their compulsory bytes"
    said += f" ({plain / 1e6:.4g} -> {(low + more) / 1e6:.4g} MB a step)"
    if not more:
        return f"{said}."
    said += f": {without:.1%} (-> {low / 1e6:.4g} MB) without {_named(added)}, which moves {more / 1e6:.4g} MB."
    built = any(w.op == "fxmask.block_index" for w in added)
    return f"{said} Masks are made in every forward; refresh=N makes them every N steps." if built else said


def _named(added: list[Work]) -> str:
    """What a dense step does not have, with the names of its ops, which are those of the tables."""
    ops = dict.fromkeys(w.op for w in added)
    what = "making the masks" if set(ops) <= set(MAKING) else "the extra work of masks"
    return f"{what} ({', '.join(o.rpartition('.')[2] for o in ops)})"


def _weight_bytes(w: Work) -> int:
    name = "dw" if w.phase == "dW" else "w"
    return w.cost.reads_min.get(name, 0) + w.cost.writes_min.get(name, 0)


def _of_l2(masked: list[Work], device: Device, tf32: bool) -> list[str]:
    """What the L2 cache must give: for the masked ops' least times, and for the dense matmuls', which is the most that it is known to have to give.

    Nothing of a device that says what it gives: that is a roof of its least times, and no op needs more for them.
    """
    asked = [w for w in masked if w.cost.bytes_req and w.cost.flop_useful]
    if not asked or device.l2_bytes_s:
        return []
    plain = [roofline.dense_of(w) for w in asked]
    known = max(w.cost.bytes_req / roofline.seconds(w, device, tf32) for w in plain)
    need, w = max(((w.cost.bytes_req / roofline.seconds(w, device, tf32), w) for w in asked), key=lambda p: p[0])
    if need <= known:
        return []
    where = w.call.module if w.call else w.weight
    limited, limited_dense = (sum(max(roofline.seconds(w, device, tf32), w.cost.bytes_req / known) for w in ops) for ops in (asked, plain))
    gain = limited_dense / limited
    return [
        f"L2-bound: for its least time {where} ({w.phase}) needs {need / 1e12:.3g} TB/s from the L2 cache; no datasheet says what it gives, "
        f"dense matmuls at their least time need {known / 1e12:.3g}. Were that all that it gives, the matmuls of masked layers would be {gain:.2f} times as "
        "fast as dense; larger blocks ask for less."
    ]
