"""A pass of one's own, as passes/README.md explains it: GELU becomes relu(x)^2 (So et al. 2021, "Primer"), on a trace and inside the compiler backend.

    python examples/own_pass.py
"""

import argparse

import torch
import torch.nn.functional as F
from torch import fx, nn

from fxmask.compiler.backend import fxmask_backend
from fxmask.passes.infra import CleanUp, Pass, run_passes


class SquaredRelu(Pass):
    """GELU becomes relu(x)^2."""

    def run(self, gm: fx.GraphModule) -> list[str]:
        names = []
        for node in gm.graph.find_nodes(op="call_function", target=F.gelu):
            with gm.graph.inserting_before(node):
                relu = gm.graph.call_function(F.relu, (node.args[0],))
                new = gm.graph.call_function(torch.square, (relu,))
            new.meta = dict(node.meta)
            node.replace_all_uses_with(new)
            gm.graph.erase_node(node)
            names.append(new.name)
        return names


class Block(nn.Module):
    """fc1, GELU, fc2."""

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


def main() -> None:
    """Rewrite a trace, then a compiled model, and compare."""
    torch.manual_seed(0)
    model, x = Block(), torch.randn(4, 64)
    traced = fx.symbolic_trace(model)
    (result, _) = run_passes(traced, [SquaredRelu(), CleanUp()])
    print(f"rewritten: {', '.join(result.rewritten)}\n{traced.code}")
    compiled = torch.compile(model, backend=fxmask_backend, options={"ratio": 0.0, "passes": [SquaredRelu()], "inner": "eager"})
    assert torch.equal(compiled(x), traced(x))
    print("The compiled model computes the same.")


if __name__ == "__main__":
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    main()
