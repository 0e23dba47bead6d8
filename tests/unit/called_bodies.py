"""A graph built by hand, as exports of every version have other ones: a body that is called for two layers, with the weight of each."""

import torch
from torch import fx, nn


def called_twice(product, dim=32):
    """Of layers a and b; `product(graph, x, w)` gives the body's node."""
    layers, body, graph = nn.ModuleDict({n: nn.Linear(dim, dim) for n in "ab"}), fx.GraphModule({}, fx.Graph()), fx.Graph()
    x, w = (body.graph.placeholder(n) for n in "xw")
    w.meta["val"] = torch.empty(dim, dim, device="meta")
    body.graph.output(product(body.graph, x, w))
    body.recompile()
    layers["body"] = body
    z = graph.placeholder("x")
    for n in "ab":
        z = graph.call_function(torch.ops.higher_order.invoke_subgraph, (graph.get_attr("body"), None, z, graph.get_attr(f"{n}.weight")))
    graph.output(z)
    return fx.GraphModule(layers, graph)
