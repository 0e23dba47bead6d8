"""`fxmask.feedback`: the loss that drives the ratio of masks with `Feedback("loss")`."""

from __future__ import annotations

from numbers import Real

from torch import Tensor, nn

from .kernels.errors import ConfigError, StateError, UnsupportedError, message
from .passes.settings import looks
from .passes.settings.checks import is_number
from .passes.state import ranks, tensors
from .sites import required_sites


def feedback(model: nn.Module, value: float | Tensor) -> dict[str, float]:
    """Report a loss, such as that of a validation, to masks with `schedule=fxmask.Feedback("loss", ...)`.

    Every `every`-th report decides: the ratio goes up, or down, by one change with the optimiser's next step, and not before. Where there are several ranks all
    of them call this, with the same number: reduce it first. Before `start` a report is the dense model's, and changes nothing.

    Args:
        value: a finite number, or a tensor with one element, for which the host waits.

    Returns: {parameter's name: the ratio of the next optimiser step}.
    Raises: ConfigError (no finite number); StateError (nothing follows a loss, inside `fxmask.dense`, or ranks that report different numbers);
    UnsupportedError (inside a CUDA graph); and then nothing has changed.
    """
    found = [(name, site) for name, site, _ in required_sites(model, "fxmask.feedback") if looks.feedback_of(site, "loss") is not None]
    if not found:
        what = "fxmask.feedback: no mask of this model follows a loss: expected one with schedule=fxmask.Feedback('loss', ...)."
        raise StateError(message(what, type(model).__name__, "fxmask.apply(model, ..., schedule=fxmask.Feedback('loss', every=1))."))
    for name, site in found:
        if site._fxmask_is_dense:
            what = "fxmask.feedback inside fxmask.dense, where a loss is the dense model's: expected masks in force."
            raise StateError(message(what, name, "leave the with block, and report the loss of the masked model."))
        if tensors.capturing(site._fxmask_keep):
            what = "fxmask.feedback inside a CUDA graph, whose replays would report nothing: expected it after a replay."
            raise UnsupportedError(message(what, name, "return the loss from the step, and report it between steps."))
    number = value.item() if isinstance(value, Tensor) and value.numel() == 1 and not value.is_meta else value
    loss = float(number) if isinstance(number, Real) and not isinstance(number, bool) else None
    reported = ranks.gathered(loss)  # before anything raises, or the other ranks would wait
    if len(set(map(repr, reported))) > 1:
        what = f"ranks report different losses, and their masks would part: expected one number, got {', '.join(map(repr, reported[:8]))}."
        raise StateError(message(what, "fxmask.feedback", "reduce the loss first: torch.distributed.all_reduce, then divide by the number of ranks."))
    if loss is None or not is_number(loss):
        raise ConfigError(f"fxmask.feedback: expected a loss, a finite number, got {value!r}; leave a report out where training has diverged.")
    return {name: looks.report(site, loss) for name, site in found}
