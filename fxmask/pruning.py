"""`ActivationPruning` on modules: another forward by class swap, as for masks, or an attribute of a layer that is masked."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor, nn
from torch.fx import Proxy

from .kernels.errors import UnsupportedError, message
from .passes.activation_pruning import ActivationPruning, PruneActivations, PrunedCall, RestoreActivations
from .passes.choose import Decision
from .passes.find import graph_modules
from .passes.infra import run_passes
from .passes.weights import raw_weight
from .swap import MaskedLinear, Swapped, masked_class


class PrunedLinear(Swapped):
    """Forward of a Linear whose input (..., K) is saved pruned. Mixed into a subclass of the layer's own class, never constructed."""

    _fxmask_pruning: ActivationPruning
    bias: Tensor | None

    def forward(self, input: Tensor) -> Tensor:
        if isinstance(input, Proxy):
            what = "torch.fx.symbolic_trace cannot look into a pruned layer: expected a dense model."
            raise UnsupportedError(message(what, type(self).__name__, "trace first, then fxmask.apply(traced, ActivationPruning(...))."))
        return self._fxmask_pruning.linear(input, raw_weight(self), self.bias)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, activations: {self._fxmask_pruning.words()}"


def prune(model: nn.Module, chosen: list[tuple[Decision, ActivationPruning]]) -> None:
    """Change what was chosen; masks are in place by then."""
    for d, config in chosen:
        m = d.candidate.module
        if d.candidate.host is None and m is not None:
            if not isinstance(m, MaskedLinear):
                m.__class__ = masked_class(type(m), PrunedLinear)
            m._fxmask_pruning = config  # type: ignore[assignment]
    rewrite = PruneActivations(chosen)
    for _, gm in graph_modules(model):
        run_passes(gm, [rewrite])


def unprune(model: nn.Module) -> None:
    """Make pruned layers what they were."""
    for _, gm in graph_modules(model):
        run_passes(gm, [RestoreActivations()])
    for m in model.modules():
        if isinstance(m, PrunedLinear):
            m.__class__ = m._fxmask_base  # type: ignore[assignment]
        if "_fxmask_pruning" in m.__dict__:
            del m.__dict__["_fxmask_pruning"]


def pruned_layers(model: nn.Module) -> Iterator[tuple[str, ActivationPruning]]:
    """(name of the layer, its configuration)."""
    for name, m in model.named_modules():
        if isinstance(m, PrunedCall):
            yield m._fxmask_name, m._fxmask_pruning
        elif "_fxmask_pruning" in m.__dict__:
            yield name, m.__dict__["_fxmask_pruning"]


def any_pruned(model: nn.Module) -> bool:
    return next(pruned_layers(model), None) is not None
