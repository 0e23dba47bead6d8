"""The compiler leaves the ops' own Python alone where a frame that it skips calls them, forward and backward."""

import torch

from fxmask.kernels import ops  # noqa: F401  (registers torch.ops.fxmask)


def test_nothing_of_an_op_is_compiled():
    x, w = torch.randn(8, 17, requires_grad=True), torch.randn(33, 17, requires_grad=True)
    mask, two, graphs = torch.ones(3, 2, dtype=torch.bool), torch.tensor(2), []

    @torch._dynamo.disable(recursive=False)  # as a frame that the compiler gives up: what it calls is looked at
    def step(x, w):
        seen = helper(x)
        y = torch.ops.fxmask.masked_linear(x, w, None, mask, 16, 16, "masked")
        y.sum().backward()
        with torch.no_grad():
            torch.ops.fxmask.masked_linear(x, w, None, mask, 16, 16, "masked")
        torch.ops.fxmask.block_index(w, two, torch.tensor(0), 16, 16, "fro", "lowest", 0)
        return y + seen.sum()

    def helper(x):
        return x.detach() * 2

    def backend(gm, _):
        graphs.append([n.name for n in gm.graph.nodes if n.op.startswith("call_")])
        return gm.forward

    torch.compile(lambda x, w: step(x, w), backend=backend)(x, w)
    assert len(graphs) == 1 and graphs[0][-1] == "mul", graphs  # the helper's alone: the compiler did look
    assert x.grad is not None and w.grad is not None
