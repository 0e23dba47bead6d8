"""fxmask.guard(masked_step=True): steps that raise, optimisers and calls that are refused, hooks, GradScaler, classes of one's own."""

import copy

import pytest
import torch
from torch import nn, optim
from torch.distributed.fsdp import fully_shard
from unit.test_masked_step import ADAMW, build, gradients, net, pair, same, train

import fxmask
from fxmask.errors import UnsupportedError
from fxmask.kernels.grid import expand_mask
from fxmask.passes.stepping.kept_blocks import KeptBlocks


class Own(optim.Optimizer):
    """Somebody's own optimiser: elementwise, with notes about itself, its groups and a memory of its own kind."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, dict(lr=lr, rounds=0))
        self.seen, self.fails = 0, False

    @torch.no_grad()
    def step(self, closure=None):
        self.seen += 1
        for group in self.param_groups:
            group["rounds"] += 1
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] = {"memory": torch.ones_like(p), "count": torch.zeros(()), "note": "new"}
                state = self.state[p]
                state["note"] = "old"
                state["memory"].mul_(0.9).add_(p.grad)
                state["count"] += 1
                p.sub_(group["lr"] * torch.sign(state["memory"]))
        if self.fails:
            raise RuntimeError("out of memory")


class Longer(optim.AdamW):
    """A step that calls the one that it inherits, which runs hooks of its own."""

    def step(self, closure=None):
        return super().step(closure)


class Forgetful(Own):
    """A step that makes an entry of the state, and another one that takes it away."""

    def step(self, closure=None):
        super().step()
        for state in self.state.values() if self.seen % 2 == 0 else ():
            del state["note"]


def test_what_a_step_takes_out_of_the_state_is_gone():
    for steps, noted in ((3, True), (4, False)):
        model, optimiser = build(Forgetful, {}, schedule=None)
        fxmask.guard(optimiser, model, masked_step="elementwise")
        train(model, optimiser, steps)
        assert all(("note" in state) == noted for state in optimiser.state.values())


def test_a_class_that_somebody_vouches_for():
    optim.AdamW([torch.ones(1)])  # from then on AdamW's own step runs hooks, also where a subclass calls it
    for cls in (Own, Longer):
        model, optimiser = build(cls, {})
        with pytest.raises(UnsupportedError, match=rf"(?s)masked_step of {cls.__name__}, which fxmask does not know: expected one of SGD, Adam.*'elementwise'"):
            fxmask.guard(optimiser, model, masked_step=True)
        assert not optimiser._optimizer_step_pre_hooks
        ours, theirs = pair(cls, {}, step="elementwise")
        train(*ours)
        train(*theirs)
        same(ours, theirs)
        assert fxmask.explain(ours[0]).rows[0]["step"] == 20
        if cls is Own:
            assert ours[1].seen == 20 and ours[1].param_groups[0]["rounds"] == 20 and ours[1].state[ours[0][0].weight]["note"] == "old"


@pytest.mark.parametrize("at", [0, 3])
def test_a_step_that_raises_leaves_everything_in_place(at):
    """Whether state was there or not: guarded weights, momenta and counts have their bits, the optimiser its own Parameters; the next step is a right one."""
    ours, theirs = pair(Own, {}, step="elementwise", schedule=None)  # a ramp would begin with every block, which is the optimiser's own step
    train(*ours, at)
    model, optimiser = ours
    groups, params = optimiser.param_groups, [p for g in optimiser.param_groups for p in g["params"]]
    gradients(model, optimiser)
    names = list(fxmask.masks(model))
    before = copy.deepcopy({n: (model.get_parameter(n).detach(), optimiser.state.get(model.get_parameter(n))) for n in names})
    rounds = optimiser.param_groups[0]["rounds"]
    optimiser.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimiser.step()
    optimiser.fails = False
    assert optimiser.param_groups is groups and all(a is b for a, b in zip(params, (p for g in groups for p in g["params"]), strict=True))
    assert all(any(k is p for p in params) for k in optimiser.state) and rounds == optimiser.param_groups[0]["rounds"] == optimiser.seen == at
    for name, (weight, state) in before.items():
        p = model.get_parameter(name)
        assert torch.equal(p, weight)
        assert (state is None) == (p not in optimiser.state)
        for key, value in (state or {}).items():
            assert torch.equal(optimiser.state[p][key], value) if torch.is_tensor(value) else optimiser.state[p][key] == value
    copy.deepcopy(optimiser.state_dict())
    assert fxmask.explain(model).rows[0]["step"] == at
    # what is no masked weight has moved, as after any step that raises: put back, so that both runs have the same to go on from
    train(*theirs, at)
    for p, q in zip(model.parameters(), theirs[0].parameters(), strict=True):
        p.data.copy_(q)
        if q in theirs[1].state:
            optimiser.state[p] = copy.deepcopy(theirs[1].state[q])
        else:
            optimiser.state.pop(p, None)
    train(*ours, 4, seed=5)
    train(*theirs, 4, seed=5)
    same(ours, theirs)


def refused(optimiser_of, match, **more):
    model, _ = build(optim.SGD, dict(lr=0.1), **more)
    optimiser = optimiser_of(model)
    for step in (True, "elementwise"):
        with pytest.raises(UnsupportedError, match=match):
            fxmask.guard(optimiser, model, masked_step=step)
    assert not getattr(optimiser, "_optimizer_step_pre_hooks", None)


def test_optimisers_that_look_at_other_elements():
    matrices = lambda m: [p for p in m.parameters() if p.ndim == 2]  # noqa: E731
    others = [optim.Adafactor, optim.LBFGS, optim.SparseAdam, type("Mine", (optim.LBFGS,), {})]
    for cls in others:
        what = rf"(?s)masked_step of {cls.__name__}: expected an optimiser that moves each element by its own.*leave masked_step out, or use one of SGD"
        refused(lambda m, cls=cls: cls(m.parameters()), what)
    refused(lambda m: optim.Muon(matrices(m)), "masked_step of Muon: expected an optimiser that moves each element by its own")


def test_differentiable():
    some = lambda m, **more: [dict(params=[m[0].weight]), dict(params=[m[2].weight], **more)]  # noqa: E731
    for make in (lambda m: optim.SGD(m.parameters(), differentiable=True), lambda m: optim.SGD(some(m, differentiable=True))):
        refused(make, "differentiable=True: expected a step that nobody differentiates")


def test_weights_that_must_move_or_that_others_make():
    limit = "masked_step=True with backward=.ste. would cancel it.*\n.*\n  fix: leave masked_step out"
    refused(lambda m: optim.SGD(m.parameters(), lr=0.1), limit, backward="ste")
    make = lambda: torch.nn.Sequential(torch.nn.utils.parametrizations.weight_norm(torch.nn.Linear(64, 64)))  # noqa: E731
    refused(lambda m: optim.SGD(m.parameters(), lr=0.1), "a weight that other parameters make", make=make)


@pytest.mark.filterwarnings("ignore:.torch.jit.interface. is deprecated")  # torch's own, where its optimisers are imported
def test_shares_of_weights_and_of_states(mesh):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model, _ = build(optim.SGD, dict(lr=0.1))
    zero = ZeroRedundancyOptimizer(model.parameters(), optim.AdamW, lr=0.01)
    with pytest.raises(UnsupportedError, match=r"(?s)shares its state out among processes: expected one that holds all of it.*freeze works there"):
        fxmask.guard(zero, model, masked_step=True)
    model = fully_shard(model, mesh=mesh)
    with pytest.raises(UnsupportedError, match=r"(?s)a weight that fully_shard has shared out: expected a whole one.*where: 0.weight.*freeze works there"):
        fxmask.guard(optim.SGD(model.parameters(), lr=0.1), model, masked_step=True)


def test_closures():
    model, optimiser = build(optim.SGD, dict(lr=0.1))
    fxmask.guard(optimiser, model, masked_step=True)
    gradients(model, optimiser)
    for call in (lambda: optimiser.step(lambda: 0.0), lambda: optimiser.step(closure=lambda: 0.0)):
        with pytest.raises(UnsupportedError, match=r"(?s)masked_step with a closure, .*: expected them before it.*call backward before optimizer.step"):
            call()
    optimiser.step(closure=None)


def test_a_capture(monkeypatch):
    model, optimiser = build(optim.SGD, dict(lr=0.1))
    fxmask.guard(optimiser, model, masked_step=True)
    gradients(model, optimiser)
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        with pytest.raises(UnsupportedError, match=r"(?s)masked_step inside a CUDA graph: expected a step outside of one.*capture forward and backward alone"):
            optimiser.step()


def test_a_compiled_step():
    """Refused in compiled code, which would be compiled anew each time; not where the compiler was told to leave the step alone."""
    ours, theirs = pair(optim.SGD, dict(lr=0.1, momentum=0.9, foreach=False))
    model, optimiser = ours
    gradients(model, optimiser)
    what = r"(?s)masked_step inside torch.compile, .*: expected an optimizer.step.. that runs as it is.*torch.compiler.disable"
    for call in (optimiser.step, lambda: optimiser.step()):
        with pytest.raises(UnsupportedError, match=what):
            torch.compile(call, backend="eager")()
    alone = torch.compiler.disable(lambda: optimiser.step())

    def counted(x):
        alone()
        return x + 1

    step = torch.compile(counted, backend="eager")
    for i in range(3):
        torch.manual_seed(i)
        gradients(model, optimiser)
        assert step(torch.zeros(())) == 1
        torch.manual_seed(i)
        gradients(*theirs)
        theirs[1].step()
    same(ours, theirs)


def test_hooks_of_others():
    """A pre-hook before the guard's may change gradients, one after it is refused; a post-hook sees weights as they stay, whenever it was registered,
    under freeze, too."""
    ours, theirs = pair()
    runs = []
    for masked_step in (True, False):
        model, optimiser = build(optim.AdamW, ADAMW)
        halved = lambda o, args, kwargs: [p.grad.mul_(0.5) for g in o.param_groups for p in g["params"]] and None  # noqa: E731
        seen = []
        optimiser.register_step_pre_hook(halved)
        optimiser.register_step_post_hook(lambda o, args, kwargs, seen=seen, m=model: seen.append(m[0].weight.detach().clone()))
        fxmask.guard(optimiser, model, masked_step=masked_step)
        train(model, optimiser, 5, lambda i, m=model, seen=seen: torch.testing.assert_close(seen[i], m[0].weight.detach(), rtol=0, atol=0))
        assert len(seen) == 5
        runs.append((model, optimiser))
    same(*runs)
    late = ours[1].register_step_pre_hook(halved)
    gradients(*ours)
    with pytest.raises(UnsupportedError, match=r"(?s)a step pre-hook that was registered after fxmask.guard.*: expected the guard last.*register it before"):
        ours[1].step()
    late.remove()
    ours[1].step()


def test_two_models_of_one_optimiser():
    """Guarded together, or the one with masked_step last; a guard behind it is refused when it is made, not at a step."""
    both = torch.nn.ModuleList([net(), net()])
    for m in both:
        fxmask.apply(m, ratio=0.5)
    optimiser = optim.AdamW(both.parameters(), **ADAMW)
    first = fxmask.guard(optimiser, both[0], masked_step=True)
    for masked_step in (True, False):
        with pytest.raises(UnsupportedError, match=r"(?s)a second guard on an optimiser whose first has masked_step.*remove\(\).*guard the models together"):
            fxmask.guard(optimiser, both[1], masked_step=masked_step)
    assert len(optimiser._optimizer_step_pre_hooks) == 1 and fxmask.explain(both[1]).rows[0]["masked_weights"] == "left to the optimiser (no guard)"
    first.remove()
    assert len(fxmask.guard(optimiser, both, masked_step=True).policies) == 2 * len(first._held.guarded)


@pytest.mark.parametrize("cls", [optim.AdamW, optim.SGD])
@pytest.mark.parametrize("fused", [True, False])
def test_grad_scaler(cls, fused):
    """A step with an infinite gradient moves nothing, and unscaled gradients of kept blocks are the same."""
    runs = pair(cls, dict(lr=0.01, weight_decay=0.1, fused=fused, foreach=False))
    for model, optimiser in runs:
        scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
        torch.manual_seed(1)
        for i in range(6):
            optimiser.zero_grad()
            scaler.scale(model(torch.randn(8, 64)).square().mean()).backward()
            before = model[0].weight.detach().clone()
            if i in (0, 3):
                model[0].bias.grad[0] = torch.inf
            scaler.step(optimiser)
            scaler.update()
            assert torch.equal(model[0].weight, before) == (i in (0, 3))
        assert not hasattr(optimiser, "found_inf")
    same(*runs)
    assert fxmask.explain(runs[0][0]).rows[0]["step"] == (6 if fused else 4)
    for p, q in zip(runs[0][0].parameters(), runs[1][0].parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad)


def test_gradients_that_are_missing():
    """A weight without a gradient stays as it is, and so does its state."""
    ours, theirs = pair()
    for model, optimiser in (ours, theirs):
        train(model, optimiser, 3)
        gradients(model, optimiser)
        model[0].weight.grad = None
        before = model[0].weight.detach().clone()
        optimiser.step()
        assert torch.equal(model[0].weight, before)
    same(ours, theirs)


def test_gradients_that_are_no_plain_tensors():
    model, optimiser = build(optim.AdamW, ADAMW, schedule=None)
    fxmask.guard(optimiser, model, masked_step=True)
    gradients(model, optimiser)
    model[0].weight.grad = model[0].weight.grad.to_sparse()
    with pytest.raises(UnsupportedError, match=r"(?s)a gradient that is no plain tensor: expected torch.strided, got torch.sparse_coo.*0.weight.*leave"):
        optimiser.step()


def elsewhere(name):
    """A class whose groups, or state, are somebody else's."""
    return type("Wrapped", (Own,), {name: property(lambda self: self.held, lambda self, value: setattr(self, "held", value))})


@pytest.mark.parametrize("name", ["param_groups", "state"])
def test_an_optimiser_that_keeps_its_groups_or_its_state_elsewhere(name):
    model, optimiser = build(elsewhere(name), {}, schedule=None)
    fxmask.guard(optimiser, model, masked_step="elementwise")
    gradients(model, optimiser)
    before = model[0].weight.detach().clone()
    with pytest.raises(UnsupportedError, match=r"(?s)whose param_groups or state are not plain attributes: expected those of .*pass the optimiser that"):
        optimiser.step()
    assert torch.equal(model[0].weight, before)


def test_two_models_in_one_optimiser():
    """A guard that freezes, then one with a masked step."""
    one, two = (fxmask.apply(net(), ratio=0.5, block=(16, 16)) for _ in range(2))
    optimiser = optim.AdamW([*one.parameters(), *two.parameters()])
    fxmask.guard(optimiser, one)
    fxmask.guard(optimiser, two, masked_step=True)
    before = [m[0].weight.detach().clone() for m in (one, two)]
    masked = [~fxmask.masks(m)["0.weight"].repeat_interleave(16, 0).repeat_interleave(16, 1) for m in (one, two)]
    (one(torch.randn(4, 64)).sum() + two(torch.randn(4, 64)).sum()).backward()
    optimiser.step()
    for model, was, out in zip((one, two), before, masked, strict=True):
        assert torch.equal(model[0].weight[out], was[out]) and not torch.equal(model[0].weight, was)
        assert not optimiser.state[model[0].weight]["exp_avg"][out].any()


def test_a_step_that_raised_leaves_nothing_for_a_model_that_was_restored_since():
    model, optimiser = build(Own, {}, schedule=None)
    fxmask.guard(optimiser, model, masked_step="elementwise")
    gradients(model, optimiser)
    optimiser.fails = True
    with pytest.raises(RuntimeError, match="out of memory"):
        optimiser.step()
    optimiser.fails = False
    fxmask.restore(model)
    before = [p.detach().clone() for p in model.parameters()]
    gradients(model, optimiser)
    optimiser.step()
    assert all((p != b).any() for p, b in zip(model.parameters(), before, strict=True))


def test_who_looks_after_a_step_sees_weights_that_have_moved():
    """Also a hook that was there before the guard."""
    model, optimiser = build(optim.SGD, dict(lr=0.1), schedule=None)
    seen = []
    optimiser.register_step_post_hook(lambda *_: seen.append(model[0].weight.detach().clone()))
    fxmask.guard(optimiser, model, masked_step=True)
    train(model, optimiser, 1)
    assert torch.equal(seen[0], model[0].weight)


FOUND = [(dict(refresh=5), 4), (dict(refresh=0), 1), (dict(refresh=1), 20), (dict(refresh=5, block=(16, 4)), 20)]  # of short runs places are not remembered


@pytest.mark.parametrize(("config", "times"), FOUND, ids=["every 5", "never", "every", "short runs"])
def test_kept_blocks_are_found_once_for_each_mask(config, times, monkeypatch):
    """And anew for one that a state brings, or that kernels rewrite in place, where no version tells."""
    made = []
    monkeypatch.setattr("fxmask.passes.stepping.gathered.KeptBlocks", lambda *args: made.append(args[0]) or KeptBlocks(*args))
    model, optimiser = build(optim.AdamW, ADAMW, schedule=None, **config)
    fxmask.guard(optimiser, model, masked_step=True)
    train(model, optimiser, 20)
    assert len(made) == 2 * times
    if config["refresh"]:
        return
    other, _ = build(optim.AdamW, ADAMW, schedule=None, **config)
    nn.init.normal_(other[0].weight)
    fxmask.refresh(other)
    assert not torch.equal(other[0]._fxmask_mask, model[0]._fxmask_mask)
    fxmask.load_state_dict(model, fxmask.state_dict(other))
    before, masks = model[0].weight.detach().clone(), fxmask.masks(model)
    train(model, optimiser, 1)
    kept = expand_mask(masks["0.weight"], (48, 64), (16, 16))
    assert torch.equal(before[~kept], model[0].weight[~kept]) and not torch.equal(before[kept], model[0].weight[kept])
    model[0]._fxmask_in_place = True
    for turn in range(2):
        model[0]._fxmask_mask.data.copy_(~model[0]._fxmask_mask)
        before = model[0].weight.detach().clone()
        train(model, optimiser, 1)
        kept = expand_mask(model[0]._fxmask_mask, (48, 64), (16, 16))
        assert torch.equal(before[~kept], model[0].weight[~kept]) and not torch.equal(before[kept], model[0].weight[kept]), turn


def test_a_guard_whose_masks_were_restored_leaves_the_step_alone():
    """Also one with a closure, which a masked step refuses."""
    model, optimiser = build(optim.AdamW, ADAMW, schedule=None)
    fxmask.guard(optimiser, model, masked_step=True)
    fxmask.restore(model)
    before = model[0].weight.detach().clone()
    optimiser.step(lambda: model(torch.randn(4, 64)).square().sum().backward())
    assert not torch.equal(model[0].weight, before)
