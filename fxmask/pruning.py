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
from .passes.pruning_schedule import install, is_scheduled, uninstall, words
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
        return f"{super().extra_repr()}, activations: {words(self)}"


def prune(model: nn.Module, chosen: list[tuple[Decision, ActivationPruning]]) -> None:
    """Change what was chosen; masks are in place by then."""
    for d, config in chosen:
        m = d.candidate.module
        if d.candidate.host is None and m is not None:
            if not isinstance(m, MaskedLinear):
                m.__class__ = masked_class(type(m), PrunedLinear)
            install(m, config)
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
        uninstall(m)


def pruned_layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """(name of the layer, the module that holds its configuration)."""
    for name, m in model.named_modules():
        if "_fxmask_pruning" in m.__dict__:
            yield (m._fxmask_name if isinstance(m, PrunedCall) else name), m


def scheduled_layers(model: nn.Module) -> list[tuple[str, nn.Module]]:
    """Those whose ratio depends on the step."""
    return [(name, m) for name, m in pruned_layers(model) if is_scheduled(m)]


def any_pruned(model: nn.Module) -> bool:
    return next(pruned_layers(model), None) is not None
