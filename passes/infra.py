"""What a pass is: it takes a GraphModule, rewrites nodes, and says what it did. How passes are run: in order, the graph cleaned up behind them."""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import itertools
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.fx import GraphModule, Node

from ..kernels.errors import ConfigError, message

_dumped = itertools.count()


@dataclasses.dataclass
class PassResult:
    """`rewritten` names the sites in graph order; the graph module is the one that went in, changed in place."""

    graph_module: GraphModule
    rewritten: list[str]

    @property
    def modified(self) -> bool:
        return bool(self.rewritten)


def recorded_value(node: Node) -> Any:
    """What a trace recorded of a node's result: of a tensor a fake one, as Dynamo or torch.export has it; None where it is silent."""
    return node.meta.get("example_value", node.meta.get("val"))


def replace_node(gm: GraphModule, old: Node, new: Node) -> None:
    """Put a node in another one's place."""
    new.meta = dict(old.meta)
    old.replace_all_uses_with(new)
    gm.graph.erase_node(old)


def call_again(gm: GraphModule, node: Node, name: str) -> None:
    """Give a node the name of one that is gone: a graph that is turned back reads as it did. Where another node has it by now, nothing changes."""
    if name and all(n.name != name for n in gm.graph.nodes):
        node.name = name


class Pass:
    """One idea, one file: subclass, and rewrite nodes in `run`, which returns the names of what it rewrote.

    A pass matches by the target of a node, never by its name. `__call__` checks the graph and recompiles it, so that `run` only edits.
    """

    def run(self, gm: GraphModule) -> list[str]:
        """Edit `gm.graph`; return the names of the rewritten sites."""
        raise NotImplementedError

    def uuid(self) -> str:
        """What a compiled artefact depends on: the files of the pass's classes, and its settings where it has any (`settings`)."""
        h = hashlib.sha256(repr((type(self).__qualname__, self.settings())).encode())
        for cls in type(self).__mro__[:-1]:
            try:
                h.update(Path(inspect.getfile(cls)).read_bytes())
            except (OSError, TypeError):  # written in a notebook or at a prompt
                h.update(cls.__qualname__.encode())
        return h.hexdigest()

    def settings(self) -> tuple[object, ...]:
        """What else than its source decides what the pass does, as plain values."""
        return ()

    def __call__(self, gm: GraphModule) -> PassResult:
        rewritten = self.run(gm)
        if not isinstance(rewritten, (list, tuple)):  # without names the graph would not be recompiled, and the old code would run
            what = f"a pass gives the names of what it rewrote: expected a list of them, got {rewritten!r}."
            raise ConfigError(message(what, f"{type(self).__qualname__}.run", "return the names, and [] where nothing was rewritten."))
        if rewritten:
            gm.graph.lint()
            gm.recompile()
        return PassResult(gm, list(rewritten))


aten = torch.ops.aten
# functions, and ops with all of their overloads: what `callee` returns
SWAP_METHODS = ("transpose", "swapaxes", "swapdims", "movedim", "moveaxis")
SWAPS = {getattr(owner, name) for owner in (torch, aten) for name in SWAP_METHODS}
ADJOINTS = {torch.adjoint, aten.adjoint}
TRANSPOSES = {torch.t, torch.permute, aten.t, aten.permute, *ADJOINTS, *SWAPS}
FLIPS = {"T": "numpy_T", "mT": "mT", "H": "matrix_H", "mH": "mH"}  # attributes, and the ops that torch.export and, from PyTorch 2.14 on, Dynamo write for them
FLIP_OPS = {getattr(aten, op): name for name, op in FLIPS.items()}


def callee(node: Node) -> Any:
    """The function that a node calls; of an op with all of its overloads, as `torch.ops.aten.t` is written by hand and `torch.ops.aten.t.default` in traces."""
    return getattr(node.target, "overloadpacket", node.target)


def flip(node: Node) -> str:
    """The attribute of `FLIPS` that a node reads; empty for any other node."""
    if node.op != "call_function":
        return ""
    if node.target is getattr:
        return str(node.args[1]) if node.args[1] in FLIPS else ""
    return FLIP_OPS.get(callee(node), "")


def is_transpose(node: Node) -> bool:
    """Whether a node only looks at a tensor with its axes in another order."""
    if node.op == "call_function":
        return callee(node) in TRANSPOSES or bool(flip(node))
    return node.op == "call_method" and node.target in ("t", "adjoint", "permute", *SWAP_METHODS)


class CleanUp(Pass):
    """Removes what rewritten nodes leave behind: transposes and attributes that nothing uses.

    Nothing else, because a graph before functionalisation may write into tensors by calls whose results nobody uses (a counter's `add_`, a buffer's `copy_`).
    """

    def run(self, gm: GraphModule) -> list[str]:
        names = []
        for node in reversed(list(gm.graph.nodes)):
            if not node.users and (is_transpose(node) or node.op == "get_attr"):
                names.append(node.name)
                gm.graph.erase_node(node)
        return names


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
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(path, "before", gm, "before")
    except OSError as e:
        fix = "name a folder that you may write to, or unset it."
        raise ConfigError(message(f"FXMASK_DUMP: graphs cannot be written there: {e.strerror or e}.", folder, fix)) from None
    return path


def _write(path: Path, when: str, gm: GraphModule, what: str) -> None:
    path.with_name(f"{path.name}.{when}.py").write_text(f"# {what}\n{gm.print_readable(print_output=False)}\n", encoding="utf-8")
