"""`torch.compile(model, backend="fxmask", options={...})`: masks the linears of each graph that Dynamo captures, or prunes what they save; then comes Inductor.

Nothing is edited and nothing is kept: masks follow the weights in every forward, and what counts optimiser steps needs `fxmask.apply`. What Dynamo does not
capture stays dense, so sites are counted, zero is a warning, `require` makes gaps an error, and an optimiser step whose gradients came around the compiled
graph is a warning.
"""

from __future__ import annotations

import importlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext
from torch._subclasses import FakeTensor
from torch.fx import GraphModule, Node

from ..decided import decided_by_apply, mark_again
from ..kernels.errors import ConfigError, StateError, UnsupportedError, message
from ..passes.finding.candidate import Candidate, surround
from ..passes.finding.choose import Decision, choose
from ..passes.finding.patterns import matches
from ..passes.graphs.bodies import Body, graphs_of
from ..passes.graphs.canonical import Canonicalise, transposed
from ..passes.graphs.graph_calls import LINEARS, MASKED_LINEAR, weight_arg
from ..passes.graphs.input_sources import source_name
from ..passes.graphs.lifted import find_lifted
from ..passes.graphs.lifted_mask import MaskLifted
from ..passes.graphs.lifted_pruning import PruneLifted, find_lifted_products, is_called
from ..passes.graphs.sunk import sunk
from ..passes.infra import CleanUp, Pass, run_passes
from . import backend_steps, backend_transforms, backend_watch
from .backend_names import class_of_frame, of_model, split_by_ddp, warn_of_parts
from .backend_options import WHERE, Options, parse, refuse_steps
from .backend_refusals import refuse_state, refuse_transforms
from .backend_report import report
from .backend_watch import Done
from .computed import made_of
from .sources import tag_caches


def _backend(gm: GraphModule, example_inputs: Sequence[Any], *, mode: str | None = None, options: Mapping[str, Any] | None = None) -> Callable[..., Any]:
    """The backend itself, as torch.compile calls it for each graph; see `Options`. Raises: FxMaskError, which torch.compile wraps with its text."""
    backend_steps.state.reached = True
    backend_transforms.asked()
    o = parse(options)
    found = rewrite(gm, example_inputs, o)
    real, bodies = _real(gm, example_inputs), graphs_of(gm)
    left = not any(done.changes for _, _, done in found) and not _has_masks(bodies)
    weights = [c.weight for c in find_lifted(bodies, real)] if left else []
    _forget_traces()
    compiled, given = _inner(o, mode)(gm, example_inputs), list(real.values())
    return backend_watch.watch(backend_watch.watch_left(compiled, given, weights), found, given)


def __getattr__(name: str) -> Any:
    """`fxmask_backend`, for the entry point and for `backend=`: whoever takes it wants masks, so that an optimiser step without any graph is told."""
    if name != "fxmask_backend":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    backend_steps.asked()
    backend_transforms.asked()
    return _backend


def rewrite(gm: GraphModule, inputs: Sequence[Any], o: Options) -> list[tuple[str, Tensor, Done]]:
    """Mask one Dynamo graph in place: names and real Parameters of its linears, and what is done to them."""
    bodies = graphs_of(gm)
    for body in bodies:
        run_passes(body.graph, o.passes)
    real = _real(gm, inputs)
    mark_again()
    if _masked_already(bodies, real, o):
        return []
    bodies = sunk(gm, lambda body, node, user: transposed(node, user, _is_parameter(body.origin, real)))
    if o.match == "matmul":
        for body in bodies:
            run_passes(body.graph, [Canonicalise(_is_parameter(body.origin, real))])
        bodies = graphs_of(gm)  # which may be given the new nodes
    refuse_transforms(bodies)
    wants_products = o.activations is not None and o.activations.affine
    products, roles = find_lifted_products(bodies, real) if wants_products else ([], {})
    linears = find_lifted(bodies, real, class_of_frame())
    grads = [t for n, t in real.items() if isinstance(t, Tensor) and source_name(n).endswith(".grad")]
    if not (linears or products) and backend_watch.gradients_are_known(grads):  # an optimiser's graph, in a step that is compiled whole
        return []
    made = made_of(linears, bodies, real)
    decisions = choose([*linears, *products], o.config, o.include, o.exclude, o.of_masks, None, of_model)
    pruned = o.pruned([d for d in decisions if is_called(d)])
    for _, config in pruned:
        refuse_steps(config)
    offered = [] if o.alone else [d for d in decisions if not d.candidate.product]
    refuse_state(offered)
    told = warn_of_parts(decisions, {"include": o.include, "exclude": o.exclude, "overrides": list(o.overrides or {})})
    passes: list[Pass] = [MaskLifted(offered), *([PruneLifted(pruned, roles)] if pruned else []), CleanUp()]
    for body in bodies:
        run_passes(body.graph, passes)
    gm.recompile()
    masked = [d for d in offered if d.config is not None]
    if o.alone:
        report(decisions, [d for d, _ in pruned], o, _in_parts())
    else:
        report(offered, masked, o, _in_parts())
    words = {id(d): config.words() for d, config in pruned}
    required = {id(d.candidate.weight) for d in decisions if o.require is True or any(matches(p, d.candidate) for p in o.require_patterns)}
    found = _done(decisions, {id(d) for d in masked}, words, made)
    return [(name, w, what._replace(told=told, required=id(w) in required)) for name, w, what in found]


def _done(decisions: list[Decision], masked: set[int], words: Mapping[int, str], made: Mapping[int, tuple[int, ...]]) -> list[tuple[str, Tensor, Done]]:
    """For every weight what the graph does to it. `words`: of pruned inputs. Both go by the decision's id, `made` (see `made_of`) by the weight's."""
    names = Counter(n for n, _ in {(d.candidate.name, id(d.candidate.weight)) for d in decisions})
    found: dict[int, tuple[str, Tensor, Done]] = {}
    for d in decisions:
        c, activations = d.candidate, words.get(id(d))
        name, w, before = found.get(id(c.weight), (c.name, c.weight, Done(product=c.product)))
        if id(d) in masked:
            now = before._replace(mask=d.config, stream_name=c.param_name, called=any(n.target in LINEARS for n in c.nodes))
        else:
            why = d.reason if d.config is None else "its reader takes the weight as an argument, and no linear call prunes its input"
            now = before if activations else before._replace(dense=why)
        now = now._replace(activations=activations or before.activations, product=before.product and c.product)
        if id(w) in made:
            now = now._replace(shape=tuple(w.shape), made_of=made[id(w)])
            name = c.name if names[c.name] == 1 else c.call or c.name  # several weights of one module
        found[id(w)] = (name if before.changes or id(w) in made else c.name), w, now
    return list(found.values())


def _real(gm: GraphModule, inputs: Sequence[Any]) -> dict[Node, Any]:
    """The inputs as the program holds them, by placeholder: DDP's splitting of a graph into buckets gives fake ones."""
    found = {}
    for node, value in zip((n for n in gm.graph.nodes if n.op == "placeholder"), inputs, strict=False):
        given = value
        if isinstance(value, FakeTensor):
            given = getattr(node.meta.get("grapharg"), "example", None)
            if any(user.target in LINEARS and weight_arg(user) is node for user in node.users) and (given is None or isinstance(given, FakeTensor)):
                what = f"the backend was given no real tensor for {node.name}, as where DDP splits graphs, and cannot tell what fxmask.apply has decided."
                raise UnsupportedError(message(what, WHERE, "set torch._dynamo.config.optimize_ddp = False, or use fxmask.apply(model, ...) before DDP."))
        found[node] = given
    return found


def _is_parameter(origin: Mapping[Node, Node], real: Mapping[Node, Any]) -> Callable[[Node], bool]:
    def is_parameter(node: Node) -> bool:
        value = real.get(origin.get(node, node))
        return isinstance(value, torch.nn.Parameter) and value.dim() == 2

    return is_parameter


def _forget_traces() -> None:
    """Dynamo traces the branches of a condition, and notes what it finds of the regions in them by their names: of regions without masks, which AOTAutograd
    would take for ours."""
    context = TracingContext.try_get()
    if context is not None:
        context.hop_dispatch_set_cache = type(context.hop_dispatch_set_cache)()


def _masked_already(bodies: Sequence[Body], real: Mapping[Node, Any], o: Options) -> bool:
    """Whether `apply` has decided about this model; options of the masks would contradict it."""
    decided = _has_masks(bodies) or any(isinstance(t, Tensor) and decided_by_apply(t) for t in real.values())
    if decided and o.masks:
        what = "this model was masked by fxmask.apply, and the backend got options of its own: expected one of them to say what is masked."
        raise StateError(message(what, WHERE, "leave the options out, or call fxmask.restore(model) first."))
    return decided


def _has_masks(bodies: Sequence[Body]) -> bool:
    return any(n.target is MASKED_LINEAR for body in bodies for n in body.graph.graph.nodes)


def _in_parts() -> list[Candidate]:
    """The linears of the graph that DDP is splitting, whose parts it gives to the backend one by one; none where it splits nothing."""
    whole = split_by_ddp()
    found = [] if whole is None else find_lifted(graphs_of(whole[0]), _real(*whole))
    surround(found, None)
    return found


def _inner(o: Options, mode: str | None) -> Callable[[GraphModule, Sequence[Any]], Callable[..., Any]]:
    if o.inner != "inductor":
        if mode is not None:
            raise ConfigError(message(f"mode={mode!r} is Inductor's, and inner={o.inner!r}: expected one of them.", WHERE, "leave one of them out."))
        found = torch._dynamo.lookup_backend(o.inner)
        return lambda gm, inputs: found(gm, list(inputs))
    compile_fx = importlib.import_module("torch._inductor.compile_fx").compile_fx
    patches = {**(torch._inductor.list_mode_options(mode) if mode else {}), **o.inductor}
    tag_caches()  # anew: somebody may have set the tag since
    tag = "+".join([torch.compiler.config.cache_key_tag, *(p.uuid() for p in o.passes)])

    def compile_by_inductor(gm: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        with torch.compiler.config.patch(cache_key_tag=tag):  # type: ignore[attr-defined]
            return compile_fx(gm, inputs, config_patches=patches)

    return compile_by_inductor
