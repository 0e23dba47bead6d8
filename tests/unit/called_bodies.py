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
    layers, graph = nn.ModuleDict({n: nn.Linear(dim, dim) for n in "ab"}), fx.Graph()
    layers["body"] = body_of(product, dim)
    z = graph.placeholder("x")
    for n in "ab":
        z = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), None, z, graph.get_attr(f"{n}.weight")))
    graph.output(z)
    return fx.GraphModule(layers, graph)
