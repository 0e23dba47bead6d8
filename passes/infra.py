"""What a pass is: it takes a GraphModule, rewrites nodes, and says what it did. How passes are run: in order, the graph cleaned up behind them."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from torch.fx import GraphModule

_dumped = itertools.count()


@dataclasses.dataclass
class PassResult:
    """`rewritten` names the sites in graph order; the graph module is the one that went in, changed in place."""

    graph_module: GraphModule
    rewritten: list[str]

    @property
    def modified(self) -> bool:
        return bool(self.rewritten)


class Pass:
    """One idea, one file: subclass, and rewrite nodes in `run`, which returns the names of what it rewrote.

    A pass matches by the target of a node, never by its name. `__call__` checks the graph and recompiles it, so that `run` only edits.
    """

    def run(self, gm: GraphModule) -> list[str]:
        """Edit `gm.graph`; return the names of the rewritten sites."""
        raise NotImplementedError

    def uuid(self) -> str:
        """What a compiled artefact depends on: the pass's file, and its settings where it has any (`settings`)."""
        return hashlib.sha256(Path(inspect.getfile(type(self))).read_bytes() + repr(self.settings()).encode()).hexdigest()

    def settings(self) -> tuple[object, ...]:
        """What else than its source decides what the pass does, as plain values."""
        return ()

    def __call__(self, gm: GraphModule) -> PassResult:
        rewritten = self.run(gm)
        if rewritten:
            gm.graph.lint()
            gm.recompile()
        return PassResult(gm, rewritten)


class CleanUp(Pass):
    """Removes nodes that nothing uses any more, such as the transpose in front of a product that became a linear."""

    def run(self, gm: GraphModule) -> list[str]:
        before = [n.name for n in gm.graph.nodes]
        gm.graph.eliminate_dead_code()
        left = {n.name for n in gm.graph.nodes}
        return [name for name in before if name not in left]


def run_passes(gm: GraphModule, passes: Sequence[Pass]) -> list[PassResult]:
    """Run passes in order over one graph module, in place. `FXMASK_DUMP` names a folder for the graph before and after each."""
    results = []
    for p in passes:
        where = _begin_dump(gm, p)
        results.append(p(gm))
        if where is not None:
            _write(where, "after", gm, f"{len(results[-1].rewritten)} rewritten: {', '.join(results[-1].rewritten)}")
    return results


def _begin_dump(gm: GraphModule, p: Pass) -> Path | None:
    folder = os.environ.get("FXMASK_DUMP")
    if not folder:
        return None
    path = Path(folder) / f"{os.getpid()}.{next(_dumped):03d}.{type(p).__name__}"
    path.parent.mkdir(parents=True, exist_ok=True)
    _write(path, "before", gm, "before")
    return path


def _write(path: Path, when: str, gm: GraphModule, what: str) -> None:
    path.with_name(f"{path.name}.{when}.py").write_text(f"# {what}\n{gm.print_readable(print_output=False)}\n")
