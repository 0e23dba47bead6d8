"""The pass that prunes what linear calls of a graph save: `y = linear(x, w, b)` becomes `y = fxmask_pruned.<name>(x, w, b)`; and the one that turns it back."""

from __future__ import annotations

from torch import Tensor, nn
from torch.fx import GraphModule

from ..finding.choose import Decision
from ..infra import Pass, replace_node
from ..settings.activation_pruning import ActivationPruning
from ..state.noted import note
from ..state.pruning_schedule import install
from ..state.scripting import refuse_symbolic
from .graph_calls import PRUNED, call_site, calls_of, give_back, input_arg, linear_parts


class PrunedSite(nn.Module):
    """A call of a graph whose input is saved pruned. Of `name` and `held` see `Candidate.local`."""

    _fxmask_pruning: ActivationPruning

    def __init__(self, config: ActivationPruning, name: str, held: bool) -> None:
        super().__init__()
        install(self, config)
        self._fxmask_name, self._fxmask_held = name, held

    def extra_repr(self) -> str:
        return f"{self._fxmask_name}, {self._fxmask_pruning.words()}"

    def _begin(self, x: Tensor) -> None:
        note(self)
        refuse_symbolic(self, x, "a call whose input is pruned", "ActivationPruning")


class PrunedCall(PrunedSite):
    """Of a linear: (x, w, b) -> y."""

    def __init__(self, config: ActivationPruning, name: str, held: bool, origin: str) -> None:
        super().__init__(config, name, held)
        self._fxmask_origin = origin

    def forward(self, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        self._begin(x)
        return self._fxmask_pruning.linear(x, weight, bias, self.training)


class PruneActivations(Pass):
    """Rewrites the linear calls that were selected in one graph: [(decision, configuration)]."""

    def __init__(self, chosen: list[tuple[Decision, ActivationPruning]]) -> None:
        self.chosen = chosen

    def run(self, gm: GraphModule) -> list[str]:
        names = []
        for d, config in self.chosen:
            if d.candidate.host is not gm:
                continue
            for node in d.candidate.nodes:
                w, b, origin = linear_parts(gm, node)
                site = PrunedCall(config, d.candidate.local, d.candidate.held, origin)
                replace_node(gm, node, call_site(gm, PRUNED, node, site, (input_arg(node), w, b)))
            names.append(d.candidate.name)
        return names


class RestoreActivations(Pass):
    """Turns pruned calls of a graph back into what they were."""

    def run(self, gm: GraphModule) -> list[str]:
        names = []
        for node, site in calls_of(gm, PrunedCall):
            give_back(gm, node, site._fxmask_origin, node.args[0])
            names.append(site._fxmask_name)
        if PRUNED in gm._modules:
            delattr(gm, PRUNED)
        return names
