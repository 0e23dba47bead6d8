"""`fxmask.guard`: an optimiser's steps count, and masked weights rest or move as the policy says. What it gives is in `guard_handle`."""

from __future__ import annotations

from collections.abc import Iterator

from torch import nn
from torch.fx import GraphModule, Node
from torch.optim import Optimizer

from ..kernels.errors import ConfigError, UnsupportedError, first_of, message, warn
from ..passes.finding.graph_linears import graph_modules
from ..passes.graphs.graph_calls import behind, resolve
from ..passes.settings import phases
from ..passes.settings.checks import one_of
from ..passes.state import ranks
from ..passes.state.site import Site
from ..passes.stepping import elementwise
from ..passes.stepping.guarded_weight import POLICIES, RETURNING, may_freeze
from ..passes.stepping.held import group_of
from ..pruning import scheduled_layers
from ..sites import Masked, required_sites
from ..swap import MaskedLayer
from .guard_handle import GuardHandle, masked_step_of, remove_ended
from .guarded import makers_of, shared_out, warn_of_ranks
from .replaced import warn_of_dense_owners, warn_of_lost


def guard(
    optimizer: Optimizer, model: nn.Module, masked_weights: str = "auto", returning: str = "keep", *, masked_step: bool | str = False
) -> GuardHandle:
    """Let an optimiser's steps count, and decide what they do to masked weights. Call it once, after `apply`; again after a resume.

    Args:
        optimizer: any `torch.optim.Optimizer` that holds the masked weights; schedulers, closures, foreach and fused forms included. CUDA graphs of a step
            are `fxmask.graphed`'s. A GradScaler's skipped step counts with fused optimisers, not with others. A model whose weights are shared out among
            several optimisers takes a guard for each. What one is given later, by `add_param_group`, is guarded from its next step on.
        masked_weights: `freeze`: masked elements and their momenta keep their bits. `decay`: masked elements are multiplied by 1 - lr * weight_decay of their
            group and nothing else; momenta are the optimiser's. `free`: whatever the optimiser does, as in the thesis; a decay that is coupled into an adaptive
            step then drives masked weights to zero. `auto`: freeze for backward="masked" and for "rigl" with regrow, free for the others, which live on
            moving masked weights; phases that change the mode change it. Under a soft mask masked weights learn until the ramp's end. A weight that other
            parameters make (weight_norm, pruning, a graph) moves with these: `auto` warns of it where it would freeze, and guards the others.
        returning: momenta of a block that comes back: `keep` (as they are: under freeze those of the day it left) or `zero`. Under `regrow` always zero.
            Under freeze Muon's momenta are zero while masked, whatever is asked for, because they would turn the kept blocks. `zero` does the same for
            an optimiser that is not torch.optim's: for one whose step of an element reads others, and whose state lies as the weight does. One that keeps
            its state in other coordinates (Shampoo, SOAP) wants `free`; Adafactor's factored moments and LBFGS's history are left as they are.
        masked_step: True: freeze, by a step that reads and writes the kept blocks of weights, gradients and momenta alone. For torch.optim's elementwise
            optimisers (SGD, Adam, AdamW, NAdam, RAdam, Adamax, Adagrad, Adadelta, RMSprop, Rprop, ASGD); "elementwise": for a class of your own, too, whose
            step moves each element by its own gradient and state, from param_groups and self.state. Not with closures, torch.compile of the step, CUDA graphs
            around it, differentiable=True, fully_shard or ZeroRedundancyOptimizer.

    A step that raises half-way (out of memory, Ctrl-C) leaves what it has moved, masked weights among it, unless `masked_step` made it: go on from a saved
    state, as the next step warns.

    Returns: a handle with `policies`, `masked_step` and `remove()`.
    Raises: ConfigError (unknown policy; the optimiser holds none of the masked weights; masked_step with decay or free), StateError (nothing masked, or
    guarded already), UnsupportedError (freeze where masked weights must move; freeze or decay of a weight that another parameter makes; masked_step where it
    says not). Warns, at the first step if not before, where masks begin at step 0 under an optimiser that has stepped their weights, so that their state
    was not loaded: those that count steps, those of refresh=0 whose weights were loaded after `apply`, and schedules of pruned inputs.
    Cost: during a step a copy of each guarded weight that has a gradient (under an optimiser that is not PyTorch's, of each), under freeze of its momenta too,
    and there of masked blocks alone by the kernels of a GPU, and on a CPU of weights of 2^18 elements and more in blocks of 8 columns and more; where momenta
    are zero while masked a copy of the gradient instead of theirs; with masked_step one of the kept blocks. Between steps nothing, but where the blocks of
    cached masks lie that a CPU gathers, or masked_step does: 8 bytes for each run of 8 elements and more in a row of a block, 24 in ragged columns. One
    `block_index` a layer without a cached mask; under fully_shard that gathers its weight.
    Not from a paper: the thesis (Bespalov 2025, listing 5.10) leaves masked weights to the optimiser.
    """
    one_of("masked_weights", masked_weights, POLICIES)
    one_of("returning", returning, RETURNING)
    if not isinstance(optimizer, Optimizer):
        raise ConfigError(f"fxmask.guard: expected a torch.optim.Optimizer first and the model second, got {type(optimizer).__name__}.")
    if type(masked_step) is not bool and not (isinstance(masked_step, str) and masked_step == "elementwise"):
        raise ConfigError(f"masked_step: expected True, False or 'elementwise', got {masked_step!r}.")
    if masked_step and masked_weights not in ("auto", "freeze"):
        raise ConfigError(f"masked_step leaves masked weights as they are: expected masked_weights='freeze' or 'auto' with it, got {masked_weights!r}.")
    masked_weights = "freeze" if masked_step else masked_weights
    found = required_sites(model, "fxmask.guard")
    warn_of_lost(model)
    warn_of_dense_owners(model)
    # a wrapper that skips Optimizer.__init__ may have the dicts of hooks, and a step that never calls them
    if not hasattr(optimizer, "_optimizer_step_pre_hooks") or not getattr(type(optimizer).step, "hooked", False):
        what = f"{type(optimizer).__name__} has no step hooks: expected an optimiser that calls Optimizer.__init__."
        raise UnsupportedError(message(what, type(optimizer).__name__, f"pass the optimiser that it wraps{_inner(optimizer)}."))
    if masked_step:
        elementwise.refuse(optimizer, masked_step == "elementwise")
    elif any(group.get("caution") for group in optimizer.param_groups):
        what = "a cautious step divides by the share of elements whose gradient agrees with the momentum, and masked ones have none: their layers' rate grows."
        fix = "fxmask.guard(optimizer, model, masked_step='elementwise') shows such an optimiser the kept blocks alone."
        warn(message(what, type(optimizer).__name__, fix))
    if masked_step_of(optimizer):
        what = "a second guard on an optimiser whose first has masked_step, which has to be the last before the step: expected one for all of its models."
        fix = "call remove() on the first handle, and guard the models together: fxmask.guard(optimizer, nn.ModuleList([a, b]), masked_step=True)."
        raise UnsupportedError(message(what, type(optimizer).__name__, fix))
    _refuse_scattered(optimizer, found)
    held = shared_out(optimizer, found, scheduled_layers(model), masked_weights, bool(masked_step))
    others_train = any(weight.requires_grad for _, _, weight in held.others)
    foreign = others_train and not any(group_of(optimizer, p) is not None for p in model.parameters())  # beside layers that rest it would count else
    if not held.guarded and (not held.followed or foreign):
        what = "the optimiser holds none of the masked weights: expected one that was built from this model's parameters."
        raise ConfigError(message(what, ", ".join(name for name, _, _ in found[:3]), "pass the optimiser that steps this model."))
    if masked_weights == "auto":
        _warn_of_made_weights(optimizer, model, found)
    warn_of_ranks(found)
    handle = GuardHandle(optimizer, held, returning, masked_step, model)
    remove_ended(optimizer, handle)
    return handle


def _inner(wrapper: Optimizer) -> str:
    """Where a wrapper that skips Optimizer.__init__ keeps its optimiser, as Accelerate's does."""
    name = next((name for name, value in vars(wrapper).items() if isinstance(value, Optimizer)), None)
    return "" if name is None else f": optimizer.{name}"


def _refuse_scattered(optimizer: Optimizer, found: list[Masked]) -> None:
    """UnsupportedError where each process has the momenta of a part of the weights, and a mask by them would differ between processes."""
    by_momenta = [name for name, site, _ in found if "momentum" in phases.values(site._fxmask_given, "criterion")]
    if by_momenta and ranks.several() and ranks.stepping(optimizer) is not optimizer:
        what = f"criterion='momentum' under {type(optimizer).__name__}, which leaves each rank the momenta of its share: expected all of them on each."
        fix = "use criterion='gradient' with average=0.9, which every rank computes for itself; or a plain optimiser under DistributedDataParallel."
        raise UnsupportedError(message(what, first_of(by_momenta), fix))


def _warn_of_made_weights(optimizer: Optimizer, model: nn.Module, found: list[Masked]) -> None:
    """FxMaskWarning where `auto` would freeze a weight that is no Parameter, and the optimiser moves what it is made of."""
    made = [(name, site) for name, site, w in found if not isinstance(w, nn.Parameter) and any(map(may_freeze, phases.in_turn(site._fxmask_given)))]
    left = [name for name, site in made if any(p.requires_grad and group_of(optimizer, p) is not None for p in _makers(model, site))]
    if left:
        what = "weights that other parameters make (by a parametrisation, a pruning or a graph) cannot be guarded: the optimiser moves what they are computed"
        what += " from, and their masked weights with it."
        fix = "remove that before fxmask.apply (torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove), or exclude the layer; "
        warn(message(what, first_of(left), fix + "masked_weights='free' says that it is meant."))


def _makers(model: nn.Module, site: Site) -> Iterator[nn.Parameter]:
    """The parameters that a weight is computed from: those of its layer but the bias, or those that its graph reads for it."""
    if isinstance(site, MaskedLayer):
        yield from makers_of(site)
        return
    for gm, call in _calls_of(model, site):
        yield from _parameters_behind(model, gm, call.args[0])


def _parameters_behind(model: nn.Module, gm: GraphModule, value: object) -> Iterator[nn.Parameter]:
    """The parameters that a value of a graph is computed from; what the graph is given comes from the graphs that call it."""
    for n in behind(value):
        if n.op == "get_attr" and isinstance(p := resolve(gm, str(n.target)), nn.Parameter):
            yield p
        elif n.op == "call_module":
            yield from gm.get_submodule(str(n.target)).parameters()
        elif n.op == "placeholder":
            at = gm.graph.find_nodes(op="placeholder").index(n)
            for outer, call in _calls_of(model, gm):  # split_module passes one by one, in order
                yield from (p for a in call.args[at : at + 1] for p in _parameters_behind(model, outer, a))


def _calls_of(model: nn.Module, called: nn.Module) -> Iterator[tuple[GraphModule, Node]]:
    """(graph, node) of the calls of a module by graphs."""
    for _, gm in graph_modules(model):
        yield from ((gm, n) for n in gm.graph.find_nodes(op="call_module") if gm.get_submodule(str(n.target)) is called)
