"""Where the linears of a Dynamo graph are, and of the bodies inside it: its parameters are inputs, which say where they come from."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.fx import Node
from torch.utils.weak import WeakTensorKeyDictionary

from ..finding.candidate import IN_PROJ, IN_PROJ_WEIGHTS, Candidate, weight_problem
from ..finding.dense_reads import CHANGED, reads_in
from ..finding.made import ACTIVATION, inputs_in, inputs_of_layers, values_behind
from ..infra import recorded_value
from .bodies import Body
from .fused_dropout import DroppedCall
from .graph_calls import EMBEDDINGS, LINEARS, call_stack, layer_name, weight_arg
from .input_sources import is_buffer, is_held, is_trainable_input, source_name, untrained
from .pruned_linears import PrunedCall
from .regions import is_trainable

# calls that take the weights of Linears as arguments: the argument's name or place, and the layer's name inside the module that makes the call
READERS: dict[Any, dict[str, str]] = {
    F.multi_head_attention_forward: {f"{x}_proj_weight": f"{x}_proj" for x in ("out", "q", "k", "v")},
    torch._transformer_encoder_layer_fwd: {"5": "self_attn.out_proj", "14": "linear1", "16": "linear2"},
}
# their arguments that are packed projections, which are no Linear's weights, and no linear calls
PACKED: dict[Any, tuple[str, ...]] = {
    F.multi_head_attention_forward: IN_PROJ_WEIGHTS,
    torch._transformer_encoder_layer_fwd: ("3",),
}
INPUTS = ("Pruned", "Dropped")  # how names of classes begin that `fxmask.apply` gives layers whose inputs it changes
BOTH = f"{CHANGED}; restore the model, and give fxmask.apply both in one call"
PACKS = "the graph packs it from other weights for its attention; use fxmask.apply"
looked_up = WeakTensorKeyDictionary()  # weights that some graph of this process used as an embedding's


def find_lifted(bodies: Sequence[Body], real: Mapping[Node, Any], root: type | None = None) -> list[Candidate]:
    """The linear calls of a Dynamo graph and of its bodies, grouped by host and weight.

    `real`: what outermost inputs are given; `root`: the class of the module whose own code is compiled, where there is one.
    """
    found: dict[Any, Candidate] = {}
    for body in bodies:
        for node in body.graph.graph.nodes:
            _add_call(found, body, node, real, root)
    _add_dense_reads(found, bodies, real)
    for c in found.values():
        c.tied_embedding = c.weight in looked_up
    return list(found.values())


def _add_call(found: dict[Any, Candidate], body: Body, node: Node, real: Mapping[Node, Any], root: type | None) -> None:
    """The weights that a call multiplies by, as a linear call or a function that takes them; those that it looks up as a table are noted."""
    if node.target in LINEARS:
        w = weight_arg(node)
        _add(found, body, node, w, "", real, BOTH if _is_ours(node, root) else "")
        for other in body.places.get(w, ())[1:]:  # the weight of another call of the same body
            if isinstance(real.get(other), nn.Parameter):
                _add(found, body, node, other, "", real, _closed(body.closed_to(w)))
    given = _arguments(node)
    read = [(w, layer) for key, layer in READERS.get(node.target, {}).items() if isinstance(w := given.get(key), Node)]
    read = [(w, layer) for w, layer in read if layer[0] not in "qkv" or source_name(body.origin.get(w, w)).endswith(".weight")]
    for w, layer in read:
        _add(found, body, node, w, layer, real)
    packed = [a for key in PACKED.get(node.target, ()) if isinstance(a := given.get(key), Node)]
    for w in packed:
        if not any(w is other for other, _ in read):
            _add(found, body, node, w, "in_proj", real, IN_PROJ if w in body.origin else PACKS, quiet=True)
    for a in node.all_input_nodes if node.target in EMBEDDINGS else ():
        table = real.get(body.origin.get(a, a))
        if isinstance(table, nn.Parameter):
            looked_up[table] = True


def _add_dense_reads(found: dict[Any, Candidate], bodies: Sequence[Body], real: Mapping[Node, Any]) -> None:
    """Products that read a layer's weight and are no linear calls: those that may be linears in other words, and those that read what is masked elsewhere."""

    def own(body: Body) -> dict[Node, Any]:
        weights = {n: source for n, source in body.origin.items() if isinstance(w := real.get(source), nn.Parameter) and w.dim() == 2}
        named = {n: ((source,), False) for n, source in weights.items() if source_name(source).rpartition(".")[2] == "weight"}
        return {**{n: ((), False) for n, source in body.origin.items() if is_buffer(source)}, **named}

    called = {id(c.weight) for c in found.values() if not c.skip}
    hosts = {body.graph: body for body in bodies}
    for gm, read in reads_in([(body.graph, own(body)) for body in bodies]):
        if read.as_linear or id(real[read.weight]) in called:
            words = BOTH if read.is_ours else f"{read.words}; use fxmask.apply on the model, or match='matmul' for x @ w.t()"
            _add(found, hosts[gm], read.node, read.weight, "", real, words)


def _is_ours(node: Node, root: type | None) -> bool:
    """Whether a layer makes a call, or what stands for one in a trace, whose input `fxmask.apply` prunes or drops in training: dense there, so that it is none
    to mask in evaluation, either."""
    cls = next(iter(call_stack(node)[1]), root)
    return cls in (PrunedCall, DroppedCall) or getattr(cls, "_fxmask_prefix", "") in INPUTS


def _arguments(node: Node) -> Mapping[str, Any]:
    """What a reader is given, by name or, where it has no signature, by position."""
    if node.target is F.multi_head_attention_forward:
        return inspect.signature(F.multi_head_attention_forward).bind_partial(*node.args, **node.kwargs).arguments
    return {str(i): a for i, a in enumerate(node.args)}


def _add(found: dict[Any, Candidate], body: Body, node: Node, w: Node, layer: str, real: Mapping[Node, Any], skip: str = "", quiet: bool = False) -> None:
    """Note one use of a weight: a linear call, or an argument of a reader (`layer` names it in the module that makes the call).

    `skip`: why this use stays dense, apart from the linear calls of the same weight.
    """
    key = w, bool(skip)
    if key in found:
        found[key].nodes.append(node)
        return
    source = body.origin.get(w, w if w in real else None)  # in a body that is given what is made of it
    value = None if source is None else real.get(source)
    if not isinstance(value, Tensor):
        value = recorded_value(w)
    path, types = call_stack(node)
    param = "" if source is None else source_name(source)
    name = layer_name(param) or ".".join(filter(None, (path, layer))) or node.name
    shown = value if isinstance(value, Tensor) else torch.empty(0, 0)
    c = Candidate(name, param or f"{name}.weight", shown, host=body.graph, nodes=[node], weight_node=w, skip=skip, quiet=quiet)
    c.call = node.name if source is None else ""
    c.sized = shown.dim() == 2 and all(isinstance(n, int) for n in shown.shape)
    found[key] = c
    if skip:
        return
    if not isinstance(value, Tensor):
        c.problem = "the graph computes its weight, and the trace does not say its shape; use fxmask.apply on the model"
    elif why := _why_no_weight(body, w, real, nn.Linear in types and param.rpartition(".")[2] == "weight"):
        c.skip = why
    elif problem := weight_problem(value):
        c.problem = problem
    elif not c.sized:
        c.skip = f"its weight has the shape {tuple(value.shape)}"
    elif closed := body.closed_to(w):
        c.skip = _closed(closed)
    else:
        c.stand_in()


def _closed(by: str) -> str:
    return f"it stands in {by}, and masks there would be of another layer or miss a gradient; use fxmask.apply on the model"


def _why_no_weight(body: Body, w: Node, real: Mapping[Node, Any], layer: bool) -> str:
    """Why nobody trains what a linear multiplies by: it is a buffer, or made of buffers and inputs alone, or a matrix of an input; else empty.

    Empty for a `layer`'s own, too: `apply` masks it, whatever it is.
    """
    if w in body.origin:
        return "" if layer else untrained(body.origin[w], real.get(body.origin[w]))
    made_of = values_behind(w, body.given)
    inputs = [n for n in made_of if n.op == "placeholder" and n not in body.given]
    placed = [(n.graph.owning_module or body.graph, n) for n in made_of]
    if not (any(is_trainable_input(real.get(n), n) for n in inputs) or any(is_trainable(gm, n) for gm, n in placed)):
        return "the graph makes its weight of no parameter"
    if any(not (is_held(n) or is_trainable_input(real.get(n), n)) for n in inputs_in(w, body.given)):
        return ACTIVATION
    return ACTIVATION if any(not (is_held(n) or isinstance(real.get(n), nn.Parameter)) for n in inputs_of_layers(w, body.given)) else ""
