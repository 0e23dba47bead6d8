"""Where a model multiplies activations by a parameter, y = a x (+ b), and saves x for da: modules that are such a product and nothing else (timm's Affine and
LayerScale), products inside other forwards, which no change of class reaches, and products in FX graphs. A product goes by its parameter's name."""

from __future__ import annotations

import ast
import operator
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.fx import GraphModule, Node
from torch.nn.utils import parametrize

from ..graphs.graph_calls import call_stack, resolve
from ..infra import recorded_value
from .candidate import REPLACED, Candidate, base_of, join, weight_problem
from .per_class import per_class
from .plain_forward import product_of
from .readers import forward_sources
from .said import parsed

SCALED = "fxmask_scaled"  # the container of a graph module
INSIDE = "it stands inside a forward that does more, which a swapped class does not reach"
PROPERTIES = ("T", "mT", "data")
TIMES = {"mul", "mul_", "multiply", "addcmul", "addcmul_"}
MUL = {operator.mul, torch.mul, torch.multiply, torch.ops.aten.mul.Tensor, "mul", "multiply"}
MUL_ = {operator.imul, torch.ops.aten.mul_.Tensor, "mul_"}
ADDCMUL = {torch.addcmul, torch.ops.aten.addcmul.default, "addcmul"}
FACTORS = {"input": "u", "self": "u", "other": "v"}  # arguments by name
SUMMANDS = {"input": "b", "self": "b", "tensor1": "u", "tensor2": "v"}


def find_products(model: nn.Module) -> list[Candidate]:
    """The products of a model, in the model's order. `skip` says why one stays dense; nobody takes them for Linears, so that says nothing aloud."""
    found: list[Candidate] = []
    for name, m in model.named_modules():
        if isinstance(m, GraphModule):
            found += _in_graph(name, m)
            continue
        whole = product_of(base_of(m))
        for leaf in (whole.a,) if whole else _products_inside(base_of(m)):
            weight = m._parameters.get(leaf)
            if weight is None and parametrize.is_parametrized(m, leaf):
                made = torch.empty(0, device="meta")
                found.append(_candidate(join(name, leaf), made, m, types=type(m).__mro__, skip="a parametrisation makes it from another parameter"))
            elif weight is not None:
                found.append(_candidate(join(name, leaf), weight, m, types=type(m).__mro__, skip="" if whole else INSIDE))
                if whole and "forward" in m.__dict__:
                    found[-1].skip = REPLACED
    return found


def _candidate(path: str, weight: Tensor, module: nn.Module | None = None, **more: Any) -> Candidate:
    new = Candidate(path, path, weight, module, quiet=True, sized=False, product=True, **more)
    new.skip = new.skip or weight_problem(weight)
    return new


@per_class
def _products_inside(cls: type[nn.Module]) -> tuple[str, ...]:
    """Names p of `self.p`, or of `self.p.view(...)` and its like, that a class multiplies by in its forward, by its source."""
    found = []
    for node in (n for tree in parsed(forward_sources(cls)) for n in ast.walk(tree)):
        operands: list[ast.expr] = []
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult):
            operands = [node.left, node.right]
        elif isinstance(node, ast.AugAssign) and isinstance(node.op, ast.Mult):
            operands = [node.value]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TIMES:
            operands = [node.func.value, *node.args, *(k.value for k in node.keywords)]
            if "addcmul" in node.func.attr:  # the first one, behind `torch` or before the dot, is added
                operands = operands[2 if ast.unparse(node.func.value) == "torch" else 1 :]
        found += [name for name in map(_own, operands) if name]
    return tuple(dict.fromkeys(found))


def _own(e: ast.expr) -> str:
    """p of `self.p`, of what a method makes of it, or of a part of it."""
    while True:
        if isinstance(e, ast.Call) and isinstance(e.func, ast.Attribute):
            e = e.func.value
        elif isinstance(e, ast.Subscript) or (isinstance(e, ast.Attribute) and e.attr in PROPERTIES):
            e = e.value
        else:
            return e.attr if isinstance(e, ast.Attribute) and isinstance(e.value, ast.Name) and e.value.id == "self" else ""


# ---- graphs ----------------------------------------------------------------------------------------------------------------------------------------------


def _in_graph(prefix: str, gm: GraphModule) -> Iterator[Candidate]:
    """The products of one graph, one candidate a parameter, and those that were rewritten."""
    behind = parameters_behind(gm)
    found: dict[str, Candidate] = {}
    for node in gm.graph.nodes:
        if node.op == "call_module" and str(node.target).startswith(f"{SCALED}."):
            site: Any = gm.get_submodule(str(node.target))
            found[site._fxmask_name] = _candidate(join(prefix, site._fxmask_name), resolve(gm, site._fxmask_name))
        elif parts := product_parts(node, behind):
            path = behind[parts["a"]][0]
            if path not in found:
                skip, types = larger(node, parts["x"]), call_stack(node)[1]
                found[path] = _candidate(join(prefix, path), resolve(gm, path), host=gm, weight_path=path, types=types, skip=skip)
            found[path].nodes.append(node)
    yield from found.values()


def parameters_behind(gm: GraphModule, lifted: Mapping[Node, Any] | None = None) -> dict[Node, list[Any]]:
    """Of each node that depends on no input of the graph: the paths of the parameters that it is made of. `lifted`: inputs that are parameters."""
    behind: dict[Node, list[Any]] = {node: [node] for node in lifted or {}}
    for node in gm.graph.nodes:
        if lifted is None and node.op == "get_attr":
            behind[node] = [str(node.target)] if isinstance(resolve(gm, str(node.target)), nn.Parameter) else []
        elif node.op != "placeholder" and all(n in behind for n in node.all_input_nodes):
            behind[node] = [path for n in node.all_input_nodes for path in behind[n]]
    return behind


def product_parts(node: Node, behind: dict[Node, list[Any]]) -> dict[str, Node]:
    """The arguments of a product, in their order, by what they are: `x`, `a` and for an addcmul `b`; empty for what is no product with a parameter."""
    named = FACTORS if node.target in MUL or node.target in MUL_ else SUMMANDS if node.target in ADDCMUL else {}
    roles = list(dict.fromkeys(named.values()))
    given = [*zip(roles, node.args, strict=False), *((named.get(k, ""), v) for k, v in node.kwargs.items() if k != "value" or v != 1)]
    whole = len(node.args) <= len(roles) and sorted(k for k, _ in given) == sorted(roles)
    if node.op not in ("call_function", "call_method") or not named or not whole:
        return {}
    parts: dict[str, Node] = {k: v for k, v in given if isinstance(v, Node)}
    if len(parts) != len(roles):
        return {}
    for x, a in (("u", "v"), ("v", "u")):
        if parts[x] not in behind and behind.get(parts[a]) and not (node.target in MUL_ and x == "v"):
            return {{x: "x", a: "a"}.get(k, k): n for k, n in parts.items()}
    return {}


def larger(node: Node, x: Node) -> str:
    """Why a product is dense whose result the trace says to be larger than what it multiplies; empty where it is not, or the trace does not say."""
    y, given = recorded_value(node), recorded_value(x)
    if isinstance(y, Tensor) and isinstance(given, Tensor) and all(isinstance(n, int) for n in (*y.shape, *given.shape)) and y.shape != given.shape:
        return f"its result {tuple(y.shape)} is larger than what it multiplies, {tuple(given.shape)}"
    return ""
