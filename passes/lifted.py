"""Where the linears of a Dynamo graph are: its parameters are inputs, and the bodies of checkpoints and conditions are graphs of their own."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.utils._pytree import tree_leaves

from .find import EMBEDDINGS, LINEARS, Candidate, call_stack, weight_arg, weight_problem

PARTS = re.compile(r"\['([^']+)'\]|\.([A-Za-z_]\w*)|\[(\d+)\]")
CONTAINERS = ("_modules", "_parameters", "_buffers")
# calls that take the weights of Linears as arguments, and where: name of the layer inside the module that makes the call, position
READERS: dict[Any, tuple[tuple[str, int], ...]] = {
    F.multi_head_attention_forward: (("out_proj", 11),),
    torch._native_multi_head_attention: (("out_proj", 7),),
    torch._transformer_encoder_layer_fwd: (("self_attn.out_proj", 5), ("linear1", 14), ("linear2", 16)),
}


def graphs_of(gm: GraphModule) -> Iterator[tuple[GraphModule, dict[Node, Node]]]:
    """The graph and the bodies inside it, each with where its inputs come from: placeholder -> placeholder of the outermost graph."""
    yield from _graphs(gm, {n: n for n in gm.graph.nodes if n.op == "placeholder"}, set())


def _graphs(gm: GraphModule, origin: dict[Node, Node], seen: set[int]) -> Iterator[tuple[GraphModule, dict[Node, Node]]]:
    if id(gm) in seen:
        return
    seen.add(id(gm))
    yield gm, origin
    for node in gm.graph.nodes:
        operands = tree_leaves((node.args, node.kwargs))
        bodies = [a for a in operands if isinstance(a, Node) and a.op == "get_attr" and isinstance(_attribute(gm, a), GraphModule)]
        for body in bodies:
            inner = _attribute(gm, body)
            inputs = [n for n in inner.graph.nodes if n.op == "placeholder"]
            given = [a for a in operands[operands.index(bodies[-1]) + 1 :] if isinstance(a, Node)]
            known = {i: origin[g] for i, g in zip(inputs, given, strict=False) if g in origin} if len(inputs) == len(given) else {}
            yield from _graphs(inner, known, seen)


def _attribute(gm: GraphModule, node: Node) -> Any:
    value: Any = gm
    for part in str(node.target).split("."):
        value = getattr(value, part, None)
    return value


def find_lifted(gm: GraphModule, inputs: Sequence[Any]) -> list[Candidate]:
    """The linear calls of a Dynamo graph and of its bodies, grouped by host and weight; `inputs` are what the backend was given, real Parameters among them."""
    real = dict(zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=False))
    found: dict[Any, Candidate] = {}
    looked_up: set[int] = set()
    for host, origin in graphs_of(gm):
        for node in host.graph.nodes:
            if node.op != "call_function":
                continue
            if node.target in LINEARS:
                _add(found, host, node, weight_arg(node), "", origin, real)
            for layer, position in READERS.get(node.target, ()):
                if position < len(node.args) and isinstance(node.args[position], Node):
                    _add(found, host, node, node.args[position], layer, origin, real)
            if node.target in EMBEDDINGS:
                looked_up |= {id(real.get(origin.get(a, a))) for a in node.all_input_nodes}
    for c in found.values():
        c.tied_embedding = id(c.weight) in looked_up
    return list(found.values())


def _add(found: dict[Any, Candidate], host: GraphModule, node: Node, w: Node, layer: str, origin: dict[Node, Node], real: dict[Node, Any]) -> None:
    """Note one use of a weight: a linear call, or an argument of a reader (`layer` names it in the module that makes the call)."""
    source = origin.get(w)
    value = real.get(source) if source is not None else None
    if not isinstance(value, Tensor):
        value = w.meta.get("example_value", w.meta.get("val"))
    path, types = call_stack(node)
    stacked = ".".join(filter(None, (path, layer)))
    param = _source_name(source) if source is not None else ""
    name = param.removesuffix(".weight") if param.endswith(".weight") else stacked or param or node.name
    c = found.get((id(host), w))
    if c is None:
        c = Candidate(name, param or f"{name}.weight", value if isinstance(value, Tensor) else torch.empty(0, 0), host=host, input=w)
        c.types = () if layer else types
        found[id(host), w] = c
        if not isinstance(value, Tensor):
            c.problem = "the graph computes its weight, and the trace does not say its shape; use fxmask.apply on the model"
        elif weight_problem(value):
            c.problem = weight_problem(value)
        elif value.dim() != 2:
            c.skip = f"its weight has {value.dim()} axes"
        else:
            c.module = nn.utils.skip_init(nn.Linear, value.shape[1], value.shape[0], device="meta")  # for patterns that look at a module
            c.types = (*c.types, *nn.Linear.__mro__) if nn.Linear not in c.types else c.types
    c.nodes.append(node)


def _source_name(node: Node) -> str:
    """Path of a lifted parameter in its model, from Dynamo's own name for where it comes from; empty for what is no attribute of a module."""
    source = getattr(node.meta.get("grapharg"), "source", None)
    if source is None:
        return ""
    name = source.name if isinstance(source.name, str) else source.name()
    head, _, rest = name.partition("]")  # L['self'], or another local or global
    if not rest:
        return ""
    parts = [a or b or c for a, b, c in PARTS.findall(rest)]
    return ".".join(p for p in parts if p not in CONTAINERS)
