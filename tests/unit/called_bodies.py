"""Graphs built by hand, as exports of every version have other ones: a body that is called for two layers, with the weight of each."""

import torch
from torch import fx, nn


def body_of(product, dim):
    body = fx.GraphModule({}, fx.Graph())
    x, w = (body.graph.placeholder(n) for n in "xw")
    w.meta["val"] = torch.empty(dim, dim, device="meta")
    body.graph.output(product(body.graph, x, w))
    body.recompile()
    return body


def in_a_body(product, dim=32):
    """A product that stands in a body of its own."""

    def call(graph, x, w):
        graph.owning_module.inner = body_of(product, dim)
        return graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("inner"), None, x, w))

    return call


def called_twice(product, dim=32):
    """Of layers a and b; `product(graph, x, w)` gives the body's node."""
    return called({"body": body_of(product, dim)}, ("body", "body"), dim)


def holding(**held):
    """A body that calls those, one after the other."""
    graph = fx.Graph()
    x, w = (graph.placeholder(n) for n in "xw")
    for name in held:
        x = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr(name), None, x, w))
    graph.output(x)
    return fx.GraphModule(held, graph)


def shared_by_two(product, dim=32):
    """Two bodies, called for a layer each, that share the body in them, as branches of a condition do; the product stands in a body of that."""
    shared = body_of(in_a_body(product, dim), dim)
    return called({n: holding(shared=shared) for n in ("first", "second")}, ("first", "second"), dim)


def shared_in_turn(product, depth, dim=32):
    """The product stands in a body that two others share, and so on, each pair in one."""
    body = body_of(product, dim)
    for _ in range(depth):
        body = holding(first=holding(shared=body), second=holding(shared=body))
    return called({"body": body}, ("body", "body"), dim)


def called(bodies, calls, dim):
    layers, graph = nn.ModuleDict({n: nn.Linear(dim, dim) for n in "ab"} | bodies), fx.Graph()
    z = graph.placeholder("x")
    for n, body in zip("ab", calls, strict=True):
        z = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr(body), None, z, graph.get_attr(f"{n}.weight")))
    graph.output(z)
    return fx.GraphModule(layers, graph)
