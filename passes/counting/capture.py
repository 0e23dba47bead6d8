"""Run a model once on fake tensors, forward and backward, and leave it as it was.

What may be given: an nn.Module, an fx.GraphModule (traced, from Dynamo with its parameters among the inputs, or unlifted), an exported program. Parameters and
buffers are replaced by fake ones for the time of the run, and every attribute of every module is put back afterwards, and the random states with them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

from ...kernels.errors import FxMaskError, UnsupportedError, message
from ...kernels.grid import matrix_shape
from ..finding.candidate import CHANGED, base_of, join
from ..finding.graph_linears import graph_modules
from ..graphs.graph_site import GraphSite, graph_sites
from ..state.site import Site
from .calls import storage_of
from .fakes import Fakes, quiet, swap
from .origins import Origins
from .other_masks import kept_of_idle, kept_of_nm, masks_in_traces, masks_of_computed
from .record import CALL_CODE, Recorder
from .recording import Recording, Saved
from .traced import module_of, placeholders, runnable, traced_calls, traced_kinds
from .untouched import plain_ops, unchanged

FIX = (
    "check the inputs' shapes and dtypes; where the code needs values (.item(), an if over a tensor), pass the part of the model that does not, or a traced "
    "graph of it (torch.fx.symbolic_trace, torch.export.export)."
)
BY_FUNC = "the forward differentiates by torch.func: take torch.autograd.grad there, or count the forward alone (phases=('fwd',))."


class _Nodes(fx.Interpreter):
    """Runs a graph, and tells the recorder which node runs."""

    def __init__(self, gm: fx.GraphModule, recorder: Recorder) -> None:
        super().__init__(gm)
        self.recorder = recorder

    def run_node(self, n: fx.Node) -> Any:
        self.recorder.node, self.recorder.stack = n.name, module_of(n)
        out = super().run_node(n)  # where it raises, the node stays noted
        self.recorder.node = self.recorder.stack = ""
        return out


def capture(
    model: Any,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None = None,
    backward: bool = True,
    dtype: torch.dtype | None = None,
    progress: Callable[[int], None] | None = None,
) -> Recording:
    """Record one step of a model: its forward on `args` and `kwargs`, and the backward from all outputs that require a gradient.

    Tensors among the inputs are looked at for shape, dtype and requires_grad alone; they may be meta tensors, and so may the model's. With `dtype` all floating
    tensors are taken as if they had it. `progress` is called with the number of ops so far.
    Raises UnsupportedError where the model cannot run without values (an `.item()`, an `if` over a tensor) or is sharded, ConfigError for what is no model.
    Cost: one eager forward and backward without arithmetic, some 0.5 ms an op; no memory for tensors. A mask that each forward builds is built once, from the
    real weight.
    """
    gm, root = runnable(model)
    modules = dict(root.named_modules())
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    faked = Fakes(mode, dtype)
    with unchanged(root), plain_ops(), torch.compiler.set_stance("force_eager"):
        computed, traced = masks_of_computed(root), masks_in_traces(root)
        parameters, buffers = swap(root, faked)
        given = [(name, t) for name, t in placeholders(gm, args) if isinstance(t, Tensor)]  # Dynamo gives the model's tensors as inputs
        parameters |= {name: t for name, t in given if isinstance(t, nn.Parameter) and name not in parameters}
        inputs = [t for t in tree_leaves((args, kwargs or {})) if isinstance(t, Tensor) and not isinstance(t, nn.Parameter)]
        fake_args, fake_kwargs = tree_map(lambda a: faked(a) if isinstance(a, Tensor) else a, (tuple(args), dict(kwargs or {})))
        origins, sites = _origins(faked, parameters, buffers, inputs), _named_sites(root)
        origins.neutral |= {storage_of(faked(t)) for name, t in given if "_fxmask_" in name}  # what masks hold
        origins.computed, origins.masked_dw = computed, {name for name, m in sites.items() if _wants_kept_dw(m)}
        cached = [(m, m._fxmask_mask) for m in modules.values() if isinstance(m, Site) and m._fxmask_mask is not None]
        in_blocks = [(i.mask, i.block, i.weight) for i in traced if i.mask is not None and i.block is not None and i.weight.dim() > 1]
        origins.cached = {storage_of(mask): (block, matrix_shape(w.shape)) for mask, block, w in in_blocks}  # a cached one stands there alone
        origins.cached |= {storage_of(mask): (m._fxmask_config.block, m._fxmask_shape) for m, mask in cached}
        lists = {storage_of(m._fxmask_lists) for m, _ in cached if m._fxmask_lists is not None}
        before = {storage_of(faked(t)) for t in inputs} | lists | {*origins.cached}
        recorder = Recorder({id(m): name for name, m in modules.items()}, origins, faked.made, faked.views(parameters.values()), progress)
        run = _Nodes(gm, recorder).run if gm is not None else root
        with mode, quiet():
            saved, ran = _step(lambda: run(*fake_args, **fake_kwargs), recorder, before, backward, parameters.values())
        read = {p.weight for c in recorder.calls for p in c.inputs}  # whatever else is made of a parameter, some op has read that alone
        idle = kept_of_idle(sites, parameters, read)
    by_element, unknown = kept_of_nm(root, parameters, traced)
    kinds = {name: type(m).__name__ for name, m in modules.items()}
    executions = dict(Counter(name for _, name in recorder.frames.values()))
    changed = {name: m for name, m in modules.items() if isinstance(m, (nn.Linear, nn.Conv2d)) and not CHANGED.isdisjoint(m.__dict__)}
    if gm is not None:
        known = traced_kinds(gm)
        kinds = known | {name: kind for name, kind in kinds.items() if kind != "Module" or name not in known}  # a tracer's modules only hold parameters
        executions = traced_calls(gm) | executions | {"": 1}  # an interpreter runs it, no call of the module
    return Recording(
        recorder.calls,
        saved,
        parameters,
        buffers,
        inputs,
        kinds,
        sites,
        changed=set(changed),
        own={name for name, m in changed.items() if isinstance(m, Site) and m._fxmask_config.read == "weight" and base_of(m).forward is not nn.Linear.forward},
        idle=idle,
        by_element=by_element,
        executions=executions,
        typical=origins.typical,
        uncounted=origins.uncounted | unknown,
        backward=ran,
        trained={name for name, p in parameters.items() if faked(p).grad is not None or id(p) in recorder.trained},
        dtype=dtype,
    )


def _named_sites(root: nn.Module) -> dict[str, Site]:
    """The masks by the names that weights have in this model; `apply` may have been given a part of it, or what it is a part of."""
    layers = {join(prefix, "weight"): m for prefix, m in root.named_modules() if isinstance(m, Site) and not isinstance(m, GraphSite)}
    return layers | {join(prefix, site._fxmask_name): site for prefix, gm in graph_modules(root) for site, _ in graph_sites(gm)}


def _origins(faked: Fakes, parameters: dict[str, Tensor], buffers: dict[str, Tensor], inputs: list[Tensor]) -> Origins:
    weights = {storage_of(t): (name, p) for name, p in parameters.items() for t in (p, faked(p))}  # some code holds the real ones
    origins = Origins(weights, {storage_of(faked(b)) for b in buffers.values()})
    origins.values = {storage_of(faked(t)): t for t in (*inputs, *buffers.values())}
    return origins


def _step(run: Callable[[], Any], recorder: Recorder, known: set[int], backward: bool, parameters: Iterable[Tensor]) -> tuple[list[Saved], bool]:
    """Forward and backward under the recorder: what autograd saved that was not `known`, and whether a backward ran."""
    saved: list[Saved] = []
    with recorder, torch.enable_grad() if backward else torch.no_grad():
        try:
            for p in parameters:  # what is made of a real one before, such as a view that a closure holds, has its gradient written there
                recorder.watch(p)
            with _saves(recorder, saved, known) if backward else nullcontext():  # what a backward recomputes is held for a moment only
                out = run()
            return saved, _backward(out) if backward else False
        except FxMaskError:
            raise
        except Exception as e:
            raise _failed(recorder, e) from e
        finally:
            recorder.restore()


def _wants_kept_dw(site: Site) -> bool:
    """Whether this step's gradient of the weight is wanted in kept blocks alone."""
    mode = site._fxmask_config.backward
    return mode == "masked" or (mode == "rigl" and not site._fxmask_dense_now)


@contextmanager
def _saves(recorder: Recorder, saved: list[Saved], inputs: set[int]) -> Iterator[None]:
    known = set(recorder.origins.real) | inputs | recorder.origins.neutral  # buffers; what a forward makes of them, or draws, autograd holds

    def pack(t: Tensor) -> Tensor:
        key = storage_of(t)
        if key not in known:
            known.add(key)
            saved.append(Saved(recorder.origins.place(t), recorder.module()[0], t.untyped_storage().nbytes()))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        yield


def _backward(out: Any) -> bool:
    """Backward from every output that has a gradient, complex ones too, as a loss would begin it; False where there is none."""
    found = [t for t in tree_leaves(out) if isinstance(t, Tensor) and t.requires_grad]
    if found:
        torch.autograd.backward(found, [torch.empty_like(t) for t in found], retain_graph=True)  # the model may hold some that it was made of
    return bool(found)


def _raised_in(recorder: Recorder, e: Exception) -> str:
    """Name of the innermost module whose call an error came through."""
    found, tb = "", e.__traceback__
    while tb is not None:
        if tb.tb_frame.f_code is CALL_CODE:
            found = recorder.modules.get(id(tb.tb_frame.f_locals["self"])) or found
        tb = tb.tb_next
    return found


def _failed(recorder: Recorder, e: Exception) -> UnsupportedError:
    last = recorder.calls[-1] if recorder.calls else None
    where = f"{recorder.node or _raised_in(recorder, e) or '(model)'}, after {last.op if last else 'nothing'}"
    what = f"the model cannot run on fake tensors, which have shapes and no values: {type(e).__name__}: {str(e).strip().partition(chr(10))[0][:300]}"
    return UnsupportedError(message(what, where, BY_FUNC if "saved tensor hooks" in str(e) else FIX))
