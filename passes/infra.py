"""What a pass is: it takes a GraphModule, rewrites nodes, and says what it did."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from torch.fx import GraphModule


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

    def __call__(self, gm: GraphModule) -> PassResult:
        rewritten = self.run(gm)
        if rewritten:
            gm.graph.lint()
            gm.recompile()
        return PassResult(gm, rewritten)


def run_passes(gm: GraphModule, passes: Sequence[Pass]) -> list[PassResult]:
    """Run passes in order over one graph module, in place."""
    return [p(gm) for p in passes]
