"""`fxmask.finalize`: masks made permanent. Zeros in the weights, BSR weights, or PyTorch's semi-structured 2:4 ones; the model is an ordinary one again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from .bsr import before_bsr, bsr
from .dropping import any_dropped
from .explaining.inspection import masks
from .kernels.errors import StateError, UnsupportedError, first_of, message, warn
from .kernels.reference import masked
from .masking import restore
from .nm.nm_finalizing import final_nm
from .nm.nm_layers import any_nm
from .nm.semi_structured import semi_structured
from .passes.finding.candidate import join
from .passes.finding.find import find
from .passes.finding.graph_linears import graph_modules
from .passes.graphs.graph_calls import MASKED_LINEAR, resolve
from .passes.graphs.graph_site import refuse_split
from .passes.settings.checks import one_of
from .passes.settings.config import WeightMask
from .passes.settings.looks import undecided
from .passes.state.site import Site
from .passes.state.site_forward import refuse_lost
from .passes.state.uncounted import REFRESH, STALE, is_stale, uncounted
from .pruning import any_pruned
from .sites import FINAL, Masked, any_masked, expect_module, refuse_dense, refuse_shared, required_sites, values_of
from .swap import MaskedLayer

M = TypeVar("M", bound=nn.Module)
FORMATS = ("dense", "bsr", "2:4")
FINAL_NOW = "This model is final by now: begin again from its checkpoint."
_before_bsr = before_bsr  # the name by which the hooks of models of before were pickled


@torch.inference_mode(False)
@torch.no_grad()
def finalize(model: M, format: str = "dense") -> M:
    """Make the masks of a model permanent, in place, and return it: no layer is masked any more, and `fxmask.masks` is empty.

    Block dropout and pruned inputs end with the masks, or alone, as by `fxmask.restore`; dropouts that were fused drop again. Batch norms are fused behind it:
    PyTorch's `fuse_conv_bn_eval` writes a scaled weight into a copy of the layer, and a masked copy would rank its blocks anew.

    Args:
        format: `dense`: every weight becomes W∘M, the same Parameter with zeros; exports carry them. `bsr`: frozen `torch.sparse_bsr` weights of the masks'
            blocks, for inference under torch.no_grad (PyTorch has no deepcopy, change of dtype, inference_mode, autocast or backward for them). A pickle of the
            whole model wants fxmask where it is loaded; a plain model takes the state_dict by load_state_dict(..., assign=True).
            `2:4`: frozen `torch.sparse.SparseSemiStructuredTensor` weights, where every row keeps at most 2 of 4 neighbours.
            Of a convolution `dense` alone: zeros in its weight, by which PyTorch convolves densely; it multiplies the others in Linears only. So `bsr` and
            `2:4` raise where convolutions are masked; `finalize(model.head, "2:4")` is of a submodule, and the rest can be finalized densely after it.

    The masks are those of the next forward: call it at the end of training, when a schedule has come to its ratio (before, it warns).
    Raises: ConfigError; StateError (nothing masked, inside `fxmask.dense`, a guard in force); UnsupportedError (a weight that is computed or sharded, one that
    something else uses unmasked, ragged blocks or blocks that PyTorch cannot multiply for `bsr`, no 2:4 pattern or no device for it); then nothing has changed.
    Cost: one copy a weight.
    """
    one_of("format of finalize", format, FORMATS)
    expect_module(model, "fxmask.finalize")
    if any_nm(model):
        return _ended(model, format, *final_nm(model, format))
    if not any_masked(model) and (any_pruned(model) or any_dropped(model)):
        if format != "dense":
            what = f"fxmask.finalize: format={format!r} stores the blocks of weight masks: expected a WeightMask in this model, got pruned or dropped inputs"
            raise StateError(message(f"{what} alone.", type(model).__name__, "use format='dense', or fxmask.restore(model), which end them."))
        return _ended(model, format, [], {})
    refuse_split(model, "fxmask.finalize")
    found = required_sites(model, "fxmask.finalize")
    users = _unmasked_users(model)
    for name, site, weight in found:
        _check(name, site, weight, format, users)
    kept = masks(model)
    _warn_of_early(found, kept)
    _check_shared(found, kept)
    made: dict[int, Tensor] = {}
    for name, site, weight in found:
        if id(weight) not in made:
            assert weight is not None  # _check has seen it
            made[id(weight)] = _made(format, name, masked(weight, kept[name], site._fxmask_config.block), site._fxmask_config)
    return _ended(model, format, [(site, weight) for _, site, weight in found if weight is not None], made)


def _ended(model: M, format: str, layers: Sequence[tuple[nn.Module, Tensor]], made: Mapping[int, Tensor]) -> M:
    """The model without masks, its layers with what was made of their weights, by the ids of these: layers that share one share what becomes of it."""
    frozen = {} if format == "dense" else {key: nn.Parameter(w, requires_grad=False) for key, w in made.items()}
    restore(model)
    for m, weight in layers:
        if format == "dense":
            with torch.inference_mode() if weight.is_inference() else nullcontext():  # what was made inside it is written inside it
                weight.copy_(made[id(weight)])
        else:
            m._parameters["weight"] = frozen[id(weight)]
            if format == "bsr":
                m.register_forward_pre_hook(before_bsr, with_kwargs=True)
    model.__dict__[FINAL] = format
    return model


def _warn_of_early(found: list[Masked], kept: dict[str, Tensor]) -> None:
    """FxMaskWarning where these masks are not those that training comes to, or older than their weights."""
    early = [f"{name} at {now:g} of {_end(site):g}" for name, site, _ in found if (now := _ratio(site)) != _end(site)]
    early += [f"{name}, whose masked blocks still count by a factor and become zeros" for name, site, _ in found if site._fxmask_softening]
    early += [f"{name} at {_ratio(site):g} of {site._fxmask_given.ratio:g}, whose Feedback has measured nothing" for name, site, _ in found if undecided(site)]
    early += [f"{name}, whose mask is older than its ratio" for name, site, _ in found if name in kept and _is_behind(site, kept[name])]
    if early:
        what = f"fxmask.finalize before the schedule has come to its end: {', '.join(early[:3])}{' ...' if len(early) > 3 else ''}."
        fix = "train on before that, or tell the steps that were taken by fxmask.step(model, n) or fxmask.load_state_dict, losses by fxmask.feedback; a mask "
        warn(message(what, "", f"{fix}that is built every so many steps and is behind its schedule is brought to it by fxmask.refresh(model). {FINAL_NOW}"))
    old = [name for name, site, weight in found if weight is not None and uncounted(site) and is_stale(site, weight)]
    if old:
        warn(message(f"fxmask.finalize makes permanent {STALE}", first_of(old), f"before that {REFRESH} {FINAL_NOW}"))


def _ratio(site: Site) -> float:
    """The ratio of the mask that is made permanent; a cached one has that of the step at which it was built."""
    c = site._fxmask_config
    return c.ratio_at(site._fxmask_built if c.cached else site._fxmask_step)


def _is_behind(site: Site, mask: Tensor) -> bool:
    """Whether a feedback has raised the ratio since its cached mask was built; a schedule says so by its steps."""
    c = site._fxmask_config
    return site._fxmask_progress is not None and c.cached and c.ties == "lowest" and int(mask.sum()) > c.keep_at(site._fxmask_step, mask.numel())


def _end(site: Site) -> float:
    """The ratio that training comes to: of a feedback by what it measures, the one that it allows."""
    return site._fxmask_config.ratio if site._fxmask_progress is not None else site._fxmask_given.final_ratio


def _check(name: str, site: Site, weight: Tensor | None, format: str, users: dict[int, str]) -> None:
    """Raise for what cannot be made permanent."""
    refuse_lost(site)
    refuse_dense(name, site, "fxmask.finalize")
    if site._fxmask_guard is not None:
        what = "fxmask.finalize under a guard, which would write masked weights back: expected training to be over."
        raise StateError(message(what, name, "call remove() on the handle of fxmask.guard first."))
    weight = values_of(name, weight, "fxmask.finalize")
    if not isinstance(weight, nn.Parameter):
        what = f"fxmask.finalize writes into Parameters, and this weight is computed (a {type(weight).__name__}, by a parametrisation or a pruning)."
        fix = "remove that first: torch.nn.utils.parametrize.remove_parametrizations, or torch.nn.utils.prune.remove."
        raise UnsupportedError(message(what, name, fix))
    if is_traceable_wrapper_subclass(weight):
        what = f"fxmask.finalize needs whole weights, and this one is a {type(weight).__name__}."
        raise UnsupportedError(message(what, name, "load the gathered state_dict into a masked model that is not sharded, and finalize that."))
    refuse_shared(name, weight, users)
    if format == "dense":
        return
    if not isinstance(site, MaskedLayer):
        what = f"format={format!r} replaces the weight of a Linear, and this one is used by a traced graph."
        raise UnsupportedError(message(what, name, "call fxmask.apply on the nn.Module, or use format='dense'."))
    if isinstance(site, nn.Conv2d):
        what = f"PyTorch multiplies weights of format={format!r} in Linears alone: got a convolution."
        raise UnsupportedError(message(what, name, "use format='dense', or exclude the convolutions."))
    if site._fxmask_config.read == "weight":
        what = f"format={format!r} needs the call of the layer, and its owner reads the weight instead."
        raise UnsupportedError(message(what, name, "use format='dense'."))


def _check_shared(found: list[Masked], kept: dict[str, Tensor]) -> None:
    """Raise StateError where layers that share a weight mask it in two ways: it can have the zeros of one."""
    first: dict[int, tuple[str, Site]] = {}
    for name, site, weight in found:
        other, its = first.setdefault(id(weight), (name, site))
        same = its._fxmask_config.block == site._fxmask_config.block and torch.equal(kept[other], kept[name])
        if not same:
            what = f"one weight is masked twice, differently, by {other} and {name}: expected the same mask from all layers that share it."
            fix = "tie layers before fxmask.apply; or untie these, by a Parameter of its own for one of them."
            raise StateError(message(what, name, fix))


def _unmasked_users(model: nn.Module) -> dict[int, str]:
    """Who uses a weight without its mask, by the weight's id: linears that stay dense, tables, and whatever else holds the same Parameter."""
    users = {id(c.weight): "an Embedding" if c.tied_embedding else c.name or "the model itself" for c in find(model) if c.tied_embedding or not c.masked}
    in_graphs = {id(m) for _, gm in graph_modules(model) for m in gm.modules()}  # they hold what the graph uses, and `find` has read the graph
    for name, m in model.named_modules():
        if not isinstance(m, MaskedLayer) and id(m) not in in_graphs:
            for leaf, p in m._parameters.items():
                users.setdefault(id(p), join(name, leaf))
    for prefix, gm in graph_modules(model):
        for node in gm.graph.find_nodes(op="get_attr"):
            for user in node.users:
                if user.target is not MASKED_LINEAR and not (user.op == "call_module" and isinstance(gm.get_submodule(str(user.target)), Site)):
                    users.setdefault(id(resolve(gm, str(node.target))), join(prefix, user.name))
    return users


def _made(format: str, name: str, w: Tensor, c: WeightMask) -> Tensor:
    """W∘M in one of `FORMATS`."""
    if format == "bsr":
        return bsr(name, w, c.block)
    return semi_structured(name, w, f"blocks of {c.block} at ratio {c.ratio}") if format == "2:4" else w
