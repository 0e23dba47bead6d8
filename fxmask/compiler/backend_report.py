"""What is said of a graph that the backend has rewritten: what stays dense unasked, and what `require` wants and does not get."""

from __future__ import annotations

from collections.abc import Sequence

from ..kernels.errors import UnsupportedError, message, warn
from ..kernels.grid import grid_shape
from ..passes.finding.candidate import Candidate
from ..passes.finding.choose import Decision, reasons_of
from ..passes.finding.patterns import matches
from .backend_options import WHERE, Options

ASKED = ("default exclusion", "in exclude", "not in include", "overrides")  # reasons to stay dense that are no gap
WAYS = "a graph break splits a model into several graphs, and torch.compile(fullgraph=True) shows it; fxmask.apply(model, ...) masks without any capture."


def report(decisions: list[Decision], masked: list[Decision], o: Options, parts: Sequence[Candidate]) -> None:
    """Count what was masked, or with `alone` pruned; what stays dense unasked is named. What is in other `parts` of the graph alone is said of these."""
    left = [d for d in decisions if not any(d is m for m in masked)]
    here = [p for p in o.require_patterns if any(matches(p, d.candidate) for d in decisions) or not any(matches(p, c) for c in parts)]
    missing = [repr(p) for p in here if not any(matches(p, d.candidate) for d in masked)]
    elsewhere = bool(parts) and not decisions
    whole = [d.candidate.name for d in masked if not o.alone and d.config and d.config.ratio > 0 and _keeps_all(d)]
    done = "pruned" if o.alone else "masked"
    if whole:
        what = f"no block can be masked at this ratio, so these stay dense: {', '.join(whole)}."
        warn(message(what, WHERE, "choose a smaller block for them."))
    if o.require is True:
        missing = [*(d.candidate.name for d in left if not d.reason.startswith(ASKED)), *whole] if masked or elsewhere else ["anything at all"]
    if missing:
        names = ", ".join(d.candidate.name for d in masked) or "nothing"
        what = f"require: expected {', '.join(missing)} to be {done} in this graph, got {names}{f' (dense: {reasons_of(left)})' if left else ''}."
        raise UnsupportedError(message(what, WHERE, f"{WAYS} What is meant to stay dense goes into exclude."))
    if not masked and not elsewhere:
        warn(message(f"backend='fxmask' {done} nothing in a graph: {reasons_of(left)}.", WHERE, WAYS))


def _keeps_all(d: Decision) -> bool:
    assert d.config is not None
    nb, kb = grid_shape(d.candidate.weight.shape, d.config.block)
    return d.config.keep_at(0, nb * kb) == nb * kb
