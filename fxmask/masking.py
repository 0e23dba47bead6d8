"""`fxmask.apply` and `fxmask.restore`: choose first, change last. What is changed then is in `changing`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from torch import Tensor, nn

from .allocating import allocated
from .asked import AUTO, DEFAULT_BLOCK, DEFAULT_RATIO, FRO, MASKED, ONE, SEED, START, check_model, configs_of
from .changing import mask, unmask
from .compiler.backend_watch import forget, seen
from .decided import forget_decided, mark_decided, note_change
from .dense_warnings import warn_if_dense, warn_of_graphs, warn_of_holders, warn_of_outside, warn_of_reads, warn_of_regions
from .dropping import undrop
from .fused import FusedDropout
from .given import Given, refuse_given
from .inputs import Inputs, check_inputs, mask_overrides, only_inputs, out_of_reach, saved_pruned, wanted_products, warn_of_products
from .kernels.errors import ConfigError, StateError, message
from .nm.nm_layers import NMLayer, unswap_nm
from .nm.nm_masking import apply_nm, refuse_nm
from .passes.counting.traced import backend_of
from .passes.finding.choose import Decision, choose
from .passes.finding.conv import KINDS, Kinds, find_layers, kinds_of
from .passes.finding.outside import outside
from .passes.finding.patterns import Patterns
from .passes.graphs.graph_site import refuse_split
from .passes.settings.activation_pruning import ActivationPruning
from .passes.settings.block_dropout import BlockDropout
from .passes.settings.budget import with_budgets
from .passes.settings.config import Feedback, Schedule, WeightMask
from .passes.settings.nm_mask import NMMask
from .passes.state.rebuild import start_gain
from .passes.state.site import Site
from .pruning import unprune
from .sites import FINAL, INPUTS, REASONS, SELECTED, expect_module, refuse_scripted, sites
from .swapped import Swapped, forget_asked, refuse_changed_class

M = TypeVar("M", bound=nn.Module)


def apply(
    model: M,
    *configs: WeightMask | ActivationPruning | BlockDropout | NMMask,
    ratio: float = DEFAULT_RATIO,
    block: tuple[int, int] = DEFAULT_BLOCK,
    backward: str = MASKED,
    criterion: str = FRO,
    refresh: int = ONE,
    start: int = START,
    schedule: Schedule | Feedback | None = None,
    include: Patterns = None,
    exclude: Patterns = None,
    overrides: Mapping[Any, Mapping[str, Any] | bool] | None = None,
    impl: str = AUTO,
    seed: int = SEED,
    allocation: str | None = None,
    layers: Kinds = None,
    masks: Mapping[str, Tensor] | None = None,
    scores: Mapping[str, Tensor] | None = None,
    **more: Any,
) -> M:
    """Mask the linears of a model, and its convolutions where `layers` says so, in place, and return it.

    `apply(model, ratio=0.5, block=(16, 16))` is short for `apply(model, WeightMask(ratio=0.5, block=(16, 16)))`; the options are those of `WeightMask`.
    The layers of an nn.Module change their class; a GraphModule's linear calls become `torch.ops.fxmask.masked_linear` nodes. Parameters, state_dict keys, the
    hooks that a layer has, and optimisers stay valid in both.

    Args:
        configs: a WeightMask, an ActivationPruning or a BlockDropout, or a WeightMask with one of the others; layers that both select have both. Or an
            NMMask, alone, which takes Linears and Conv2ds of an nn.Module.
        model: any nn.Module, or a GraphModule of `fx.symbolic_trace` or `torch.export.export(...).module()`.
        include, exclude: a glob, a `re:` pattern, a module type (the layer's own, or that of a module around it), a callable (module, name) -> bool, or a
            sequence of those, against module names. By default all linears but: a weight tied to an Embedding, min(out, in) < 16, a LoRA factor. A non-empty
            `exclude` adds to these, `exclude=()` switches them off, an exact name in `include` lifts them.
        overrides: {pattern: dict of the config's options, or False}; the last match wins. Beside a WeightMask the options of the others are
            {"activations": dict of them, or False}, {"dropout": dict of them, or False}.
        layers: nn.Linear, nn.Conv2d or both in a tuple: what is masked of what the patterns select; by default Linears (of an NMMask both). A Conv2d's weight
            is a matrix (c_out, c_in * kh * kw), from which blocks are cut. Those with groups stay dense, as do convolutions that a traced graph calls as
            functions; inputs of convolutions are neither pruned nor dropped.
        allocation: None: `ratio` in every layer. `erk`, `global` or `byte`: a budget of 1 - ratio for all layers, see `fxmask.allocate`.
        masks: {layer's name: bool [ceil(N / block_rows), ceil(K / block_cols)], True = kept}, of any device: masks of your own, as `fxmask.masks` returns them.
            They are kept whatever the weights become, and where weights are loaded; with a Schedule the last one is this. Without `include` these layers
            alone are selected, also for what goes beside the WeightMask. A layer's ratio is its mask's.
        scores: the same with real numbers, float32 as they are compared: the blocks with the highest are kept, as many as `ratio` says, now or at the end of
            the schedule; ties go by the norm of the weight.
        more: the other options of `WeightMask`, such as average=0.9.

    Raises: ConfigError, StateError, UnsupportedError; the model is then as it was.
    Cost: host work a layer; no forward runs. With `refresh` other than 1, one `block_index` a layer.

    Example:
        >>> model = fxmask.apply(torch.nn.Sequential(torch.nn.Linear(64, 64)), ratio=0.75)
        >>> int(fxmask.masks(model)["0.weight"].sum())
        4
    """
    options = dict(ratio=ratio, block=block, backward=backward, criterion=criterion, refresh=refresh, start=start, schedule=schedule, impl=impl, seed=seed)
    config, other = configs_of(configs, options, more)
    kinds = kinds_of(layers, KINDS if isinstance(other, NMMask) else (nn.Linear,))
    if config is None and isinstance(other, (ActivationPruning, BlockDropout)) and kinds != (nn.Linear,):
        what = f"layers={layers!r} with {type(other).__name__} alone, which is for inputs of Linears."
        raise ConfigError(message(what, "fxmask.apply", "leave layers out, or give a WeightMask, too."))
    check_model(model)
    note_change()
    refuse_nm(model)
    if config is None or allocation is not None:
        refuse_given(masks, scores, "an allocation, which has ratios of its own" if config is not None else f"{type(other).__name__} alone")
    check_inputs(model, config, other)
    if isinstance(other, NMMask):
        if allocation is not None:
            raise ConfigError(f"allocation shares out ratios of blocks: expected None beside an NMMask, got {allocation!r}.")
        return apply_nm(model, other, include, exclude, overrides, kinds)
    told = overrides if other is None else mask_overrides(overrides, other, config is None)
    found = find_layers(model, kinds)
    left = outside(model, found) if config is not None else []
    found = [*(out_of_reach(found) if config is None else found), *wanted_products(model, other)]
    given = Given(found, masks, scores)
    decisions = choose(found, config or WeightMask(), given.include(include), exclude, told, model, left=left)
    decisions = decisions if config is None else given.decided(decisions, config, include)
    inputs = Inputs(model, decisions, other, overrides, config is None)
    if config is None and allocation is not None:
        raise ConfigError(f"allocation={allocation!r} shares out kept blocks of weights: expected a WeightMask with it, got {type(other).__name__} alone.")
    if isinstance(other, ActivationPruning) and other.affine:
        warn_of_products(decisions)
    if config is None:
        only_inputs(model, decisions, inputs)
        forget(model, (d.candidate.weight for d in decisions if id(d) in inputs.wanted))
        return model
    products = [d for d in decisions if d.candidate.product]
    decisions = [d for d in decisions if not d.candidate.product]
    if allocation is not None:
        decisions = allocated(model, decisions, overrides, config.ratio, allocation)
    decisions = with_budgets(decisions)
    warn_of_graphs(model)
    warn_of_reads(model, decisions)
    warn_of_holders(model, (d for d in decisions if d.config is not None), decisions)
    warn_if_dense(model, decisions, left, kinds)
    warn_of_outside(left, decisions, given.include(include), exclude)
    inputs.warn_if_none()
    warn_of_regions(model, [d for d in (*decisions, *products) if (id(d) in inputs.wanted if d.candidate.product else d.config is not None)])
    before = {id(site) for _, site, _ in sites(model)}

    def gain() -> None:  # last, as it changes weights
        start_gain([(site, w) for _, site, w in sites(model) if w is not None and id(site) not in before])

    mask(model, decisions, lambda: inputs.change(model, gain))
    _note(model, decisions, saved_pruned(model, products))
    return model


def _note(model: nn.Module, decisions: list[Decision], products: list[Decision]) -> None:
    """Keep what was decided: for `explain`, for a guard, and for the compiler backend."""
    model.__dict__.pop(FINAL, None)
    model.__dict__[REASONS] = {d.candidate.key: d.reason for d in (*decisions, *products) if d.config is None or d.candidate.product}
    masked = (d.candidate.name for d in decisions if d.config is not None and d.candidate.host is None)
    model.__dict__[SELECTED] = tuple(dict.fromkeys((*model.__dict__.get(SELECTED, ()), *masked)))
    mark_decided(decisions)
    forget(model, (d.candidate.weight for d in decisions))


def restore(model: M) -> M:
    """Make a masked model dense again, in place and bit for bit; return it. What `gain` and `regrow` have done to weights is part of them by then.

    Raises: StateError where nothing is masked, UnsupportedError where a masked layer's class was changed since.
    """
    expect_module(model, "fxmask.restore")
    if not any_changed(model):
        _refuse_compiled(model)
        refuse_scripted(model, "fxmask.restore")
        raise StateError(message("nothing is masked in this model: expected one that fxmask.apply has changed.", fix="call fxmask.apply(model, ...) first."))
    if any(site._fxmask_is_dense for site in model.modules() if isinstance(site, Site)):
        raise StateError(message("fxmask.restore inside fxmask.dense: expected masks in force.", fix="leave the with block first."))
    refuse_split(model, "fxmask.restore")
    note_change()
    for name, m in model.named_modules():
        if isinstance(m, Swapped):
            refuse_changed_class(name, m)
    unswap_nm(model)
    unprune(model)
    undrop(model)
    unmask(model)
    forget_decided(model)
    for m in model.modules():
        m.__dict__.pop(REASONS, None)
        m.__dict__.pop(SELECTED, None)
        forget_asked(m)
    return model


def any_changed(model: nn.Module) -> bool:
    """Whether `apply` has changed anything of a model that is changed still."""
    return any(isinstance(m, (Site, NMLayer, FusedDropout)) or not INPUTS.isdisjoint(m.__dict__) for m in model.modules())


def _refuse_compiled(model: nn.Module) -> None:
    """StateError for a model that graphs of the compiler backend mask: in it there is nothing to take back."""
    if backend_of(model) == "fxmask" or any((done := seen(p)) is not None and done.changes for p in model.parameters()):
        what = "fxmask.restore: the masks of this model live in the graphs that backend='fxmask' has compiled: expected a model that fxmask.apply has changed."
        fix = "call the model that torch.compile was given, which is dense (after model.compile(): torch.compiler.set_stance('force_eager'))."
        raise StateError(message(what, type(model).__name__, f"{fix} fxmask.explain lists what graphs mask."))
