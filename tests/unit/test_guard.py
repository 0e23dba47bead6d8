"""fxmask.guard: what an optimiser's step does to masked weights and their momenta, and that it counts."""

import copy
import pickle

import pytest
import torch
from sample_models import mlp
from torch import fx, nn, optim

import fxmask
from fxmask.errors import ConfigError, StateError, UnsupportedError
from fxmask.kernels.grid import expand_mask
from fxmask.passes.state.lost_guards import KEPT
from fxmask.passes.stepping.guarded_weight import POLICIES
from fxmask.passes.stepping.optimiser import LEFT

PLAIN, FOREACH, FUSED = dict(foreach=False), dict(foreach=True), dict(fused=True)
OPTIMISERS = {
    "SGD": (optim.SGD, dict(lr=0.1), (PLAIN, FOREACH, FUSED)),
    "SGD-momentum": (optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.1), (PLAIN, FOREACH, FUSED)),
    "SGD-nesterov": (optim.SGD, dict(lr=0.1, momentum=0.9, nesterov=True), (PLAIN, FOREACH, FUSED)),
    "Adam": (optim.Adam, dict(lr=0.01, weight_decay=0.1, amsgrad=True), (PLAIN, FOREACH, FUSED)),
    "AdamW": (optim.AdamW, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH, FUSED)),
    "RMSprop": (optim.RMSprop, dict(lr=0.01, weight_decay=0.1, momentum=0.5, centered=True), (PLAIN, FOREACH)),
    "Adagrad": (optim.Adagrad, dict(lr=0.01, weight_decay=0.1, initial_accumulator_value=0.1), (PLAIN, FOREACH, FUSED)),
    "Adamax": (optim.Adamax, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "NAdam": (optim.NAdam, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "RAdam": (optim.RAdam, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "Adadelta": (optim.Adadelta, dict(lr=0.5, weight_decay=0.1), (PLAIN, FOREACH)),
    "ASGD": (optim.ASGD, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "Rprop": (optim.Rprop, dict(lr=0.01), (PLAIN, FOREACH)),
}
EVERY = [
    pytest.param(cls, {**options, **form}, id=f"{name}-{'-'.join(f'{k}-{v}' for k, v in form.items())}")
    for name, (cls, options, forms) in OPTIMISERS.items()
    for form in forms
]


class SignDescent(optim.Optimizer):
    """Somebody's own optimiser, which moves everything it sees."""

    def __init__(self, params, lr=0.01):
        super().__init__(params, dict(lr=lr))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                memory = self.state[p].setdefault("memory", torch.ones_like(p))
                memory.mul_(0.9).add_(p.grad)
                p.sub_(group["lr"] * torch.sign(memory))


EVERY.append(pytest.param(SignDescent, {}, id="SignDescent"))


def build(cls, options, **config):
    torch.manual_seed(0)
    model = fxmask.apply(mlp(), ratio=0.6, block=(16, 16), **config)
    return model, cls(model.parameters(), **options)


def train(model, optimiser, steps, each=lambda i: None):
    torch.manual_seed(1)
    for i in range(steps):
        x = torch.randn(8, 64)
        optimiser.zero_grad()
        model(x).square().mean().backward()
        optimiser.step()
        each(i)


def masked_elements(model):
    weights = dict(model.named_parameters())
    return {name: ~expand_mask(mask, weights[name].shape, (16, 16)) for name, mask in fxmask.masks(model).items()}


def momenta(optimiser, weight):
    return {k: t.clone() for k, t in optimiser.state[weight].items() if torch.is_tensor(t) and t.shape == weight.shape}


@pytest.mark.parametrize(("cls", "options"), EVERY)
def test_freeze(cls, options):
    """100 steps: the masked part of weights and momenta keeps its bits, the kept part is what the optimiser alone makes of it."""
    model, optimiser = build(cls, options, refresh=0)
    alone, their_optimiser = build(cls, options, refresh=0)
    handle = fxmask.guard(optimiser, model)
    assert set(handle.policies.values()) == {"freeze"}
    masked, weights, start = masked_elements(model), dict(model.named_parameters()), copy.deepcopy(model.state_dict())
    first = {}

    def unmoved(i):
        for name, out in masked.items():
            assert torch.equal(weights[name][out], start[name][out])
            now = {k: t[out] for k, t in momenta(optimiser, weights[name]).items()}
            was = first.setdefault(name, now)
            assert now.keys() == was.keys() and all(torch.equal(now[k], was[k]) for k in now)

    train(model, optimiser, 100, unmoved)
    train(alone, their_optimiser, 100)
    assert fxmask.explain(model).rows[0]["step"] == 100
    theirs = dict(alone.named_parameters())
    for name, out in masked.items():
        assert torch.equal(weights[name][~out], theirs[name][~out]) and not torch.equal(weights[name][~out], start[name][~out])
        for k, t in momenta(optimiser, weights[name]).items():
            assert torch.equal(t[~out], momenta(their_optimiser, theirs[name])[k][~out])
    untouched = [n for n in weights if n not in masked]
    assert untouched and all(torch.equal(weights[n], theirs[n]) for n in untouched)


def test_there_is_something_to_freeze():
    """Without a guard these optimisers do move masked weights: through decay, momenta or their own ways."""
    moved = []
    for name, (cls, options, _) in OPTIMISERS.items():
        model, optimiser = build(cls, options, refresh=0)
        out, before = masked_elements(model)["0.weight"], model[0].weight.detach().clone()
        train(model, optimiser, 3)
        if not torch.equal(model[0].weight[out], before[out]):
            moved.append(name)
    assert {"Adam", "AdamW", "SGD-momentum", "RMSprop", "Adagrad"} <= set(moved)


DECAY = [  # each optimiser in one of its forms, and in the others, too, where there is time
    *(pytest.param(cls, dict(lr=0.01, weight_decay=0.1), id=cls.__name__) for cls in (optim.SGD, optim.Adam, optim.AdamW)),
    *(pytest.param(*e.values, id=e.id, marks=() if i % 3 == 0 else pytest.mark.slow) for i, e in enumerate(EVERY)),
]


@pytest.mark.parametrize(("cls", "options"), DECAY)
def test_decay(cls, options):
    model, optimiser = build(cls, options, refresh=0)
    model[0].weight.data[:, 0] = 0  # these do not move where they are masked
    fxmask.guard(optimiser, model, masked_weights="decay")
    masked, expected = masked_elements(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    schedule = optim.lr_scheduler.StepLR(optimiser, 30, 0.5)

    def decayed(i):
        for name, out in masked.items():
            expected[name] = expected[name] * (1 - optimiser.param_groups[0]["lr"] * options.get("weight_decay", 0))
            assert torch.equal(dict(model.named_parameters())[name][out], expected[name][out])
        schedule.step()

    train(model, optimiser, 100, decayed)


# each optimiser with one of the two, and with the other one, too, where there is time
FREE = [
    pytest.param(*e.values, backward, id=f"{backward}-{e.id}", marks=pytest.mark.slow if (i + j) % 2 else ())
    for i, backward in enumerate(("ste", "unmasked"))
    for j, e in enumerate(EVERY)
]


@pytest.mark.parametrize(("cls", "options", "backward"), FREE)
def test_free_is_the_optimiser_alone(cls, options, backward):
    model, optimiser = build(cls, options, backward=backward)
    alone, their_optimiser = build(cls, options, backward=backward)
    assert set(fxmask.guard(optimiser, model).policies.values()) == {"free"}
    train(model, optimiser, 100)
    train(alone, their_optimiser, 100)
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), alone.parameters(), strict=True))


@pytest.mark.parametrize("form", ["module", "graph"])
def test_masks_follow_the_steps(form):
    torch.manual_seed(0)
    model = fxmask.apply(mlp() if form == "module" else fx.symbolic_trace(mlp()), ratio=0.7, refresh=2, start=3, schedule=fxmask.Schedule("cubic", 10))
    optimiser = optim.AdamW(model.parameters())
    with pytest.raises(StateError, match=r"call fxmask\.guard"):
        model(torch.randn(2, 64))
    fxmask.guard(optimiser, model)
    twin = copy.deepcopy(model)
    fxmask.step(twin, 0)
    for i in range(1, 16):
        train(model, optimiser, 1)
        twin.load_state_dict(model.state_dict())
        fxmask.step(twin)
        rows = [r for r in fxmask.explain(model).rows if r["masked"]]
        assert {r["step"] for r in rows} == {i} and {r["masked_weights"] for r in rows} == {"freeze"}
        ours, theirs = fxmask.masks(model), fxmask.masks(twin)
        assert all(int(ours[n].sum()) == int(theirs[n].sum()) for n in ours)


def test_accumulation_counts_once_and_eval_never():
    model, optimiser = build(optim.SGD, dict(lr=0.1), backward="rigl")
    fxmask.guard(optimiser, model)
    for _ in range(4):
        model(torch.randn(2, 64)).square().mean().backward()
    optimiser.step()
    model.eval()(torch.randn(2, 64))
    assert fxmask.explain(model).rows[0]["step"] == 1


def test_momenta_of_a_returning_block_are_zeroed_when_asked():
    torch.manual_seed(0)
    for returning in ("keep", "zero"):
        model = fxmask.apply(nn.Sequential(nn.Linear(32, 32, bias=False)), ratio=0.5, block=(16, 16), schedule=None, refresh=1)
        optimiser = optim.SGD(model.parameters(), lr=1.0, momentum=0.5)
        fxmask.guard(optimiser, model, returning=returning)
        w = model[0].weight
        with torch.no_grad():
            w.fill_(0.1)
            w[:16] = torch.linspace(1.0, 2.0, 32)  # block row 0 is kept
            w[16:] = 0.5
        optimiser.state[w]["momentum_buffer"] = torch.full_like(w, 7.0)
        model(torch.randn(2, 32)).sum().backward()
        w.grad.zero_()
        w.grad[:16] = w.detach()[:16] - 3.5  # momentum 3.5 and this gradient take row 0 to zero: row 1 is kept from now on
        optimiser.step()
        assert fxmask.masks(model)["0.weight"].tolist() == [[False, False], [True, True]]
        buffer = optimiser.state[w]["momentum_buffer"]
        assert torch.equal(buffer[16:], torch.full((16, 32), 7.0 if returning == "keep" else 0.0)) and buffer[:16].any()


def test_groups_have_their_own_decay():
    model, _ = build(optim.SGD, dict(lr=0.1))
    groups = [dict(params=[model[0].weight], lr=0.5, weight_decay=0.2), dict(params=[p for p in model.parameters() if p is not model[0].weight])]
    optimiser = optim.AdamW(groups, lr=0.1, weight_decay=0.0)
    fxmask.guard(optimiser, model, masked_weights="decay")
    masked, before = masked_elements(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    train(model, optimiser, 1)
    for name, factor in (("0.weight", 1 - 0.5 * 0.2), ("2.weight", 1.0)):
        out = masked[name]
        assert torch.equal(dict(model.named_parameters())[name][out], (before[name] * factor)[out])


def test_a_compiled_step():
    model, optimiser = build(optim.AdamW, dict(lr=0.01, weight_decay=0.1, foreach=True), refresh=0)
    fxmask.guard(optimiser, model)
    masked, before = masked_elements(model), {n: p.detach().clone() for n, p in model.named_parameters()}
    step = torch.compile(lambda: optimiser.step(), backend="eager")
    for _ in range(3):
        model(torch.randn(8, 64)).square().mean().backward()
        step()
    assert fxmask.explain(model).rows[0]["step"] == 3
    for name, out in masked.items():
        p = dict(model.named_parameters())[name]
        assert torch.equal(p[out], before[name][out]) and not torch.equal(p[~out], before[name][~out])


def test_a_step_that_is_compiled_as_one_graph_is_told_why_not():
    model, optimiser = build(optim.SGD, dict(lr=0.01), refresh=0)
    fxmask.guard(optimiser, model)
    model(torch.randn(8, 64)).square().mean().backward()
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"fxmask\.guard looks after a step(.|\n)*without fullgraph=True"):
        torch.compile(lambda: optimiser.step(), backend="eager", fullgraph=True)()


def test_two_optimisers_share_a_model():
    model = fxmask.apply(mlp(), ratio=0.6)
    first, second = optim.SGD([model[0].weight], lr=0.1), optim.SGD([model[2].weight], lr=0.1)
    one, two = fxmask.guard(first, model), fxmask.guard(second, model)
    assert list(one.policies) == ["0.weight"] and list(two.policies) == ["2.weight"]
    model(torch.randn(2, 64)).sum().backward()
    first.step()
    assert [r["step"] for r in fxmask.explain(model).rows if r["masked"]] == [1, 0]


def test_remove():
    model, optimiser = build(optim.SGD, dict(lr=0.1), refresh=2)
    with fxmask.guard(optimiser, model) as handle:
        train(model, optimiser, 1)
    handle.remove()
    assert fxmask.explain(model).rows[0]["masked_weights"] == "left to the optimiser (no guard)"
    with pytest.raises(StateError, match="expected a step source"):
        model(torch.randn(2, 64))
    fxmask.guard(optimiser, model)
    train(model, optimiser, 1)
    assert fxmask.explain(model).rows[0]["step"] == 2


def test_a_mask_between_two_refreshes_is_not_stale_when_the_guard_goes():
    """It is as old as a guarded one may be; what is written after that makes it another weight's."""
    model, optimiser = build(optim.SGD, dict(lr=2.0, momentum=0.9), refresh=10, backward="ste")
    with fxmask.guard(optimiser, model):
        train(model, optimiser, 8)
    now, fresh = fxmask.masks(model), copy.deepcopy(model)
    fxmask.refresh(fresh)
    assert any(not torch.equal(m, now[name]) for name, m in fxmask.masks(fresh).items())
    model.eval()(torch.randn(2, 64))  # any warning is an error here
    with torch.no_grad():
        model[0].weight.mul_(1.0)
    with pytest.warns(fxmask.FxMaskWarning, match="evaluated with a mask of weights that it no longer has"):
        model(torch.randn(2, 64))


def test_copies_are_not_guarded():
    model, optimiser = build(optim.SGD, dict(lr=0.1))
    fxmask.guard(optimiser, model)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert fxmask.explain(twin).rows[0]["masked_weights"] == "left to the optimiser (no guard)"
        fxmask.guard(optim.SGD(twin.parameters(), lr=0.1), twin)
    pickle.dumps(optimiser)
    train(model, optimiser, 1)
    assert fxmask.explain(model).rows[0]["step"] == 1


def test_an_optimiser_of_another_model_beside_weights_that_rest():
    """Steps of a weight that rests are counted by whoever steps the others; an optimiser of none of these is a mistake."""
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)), ratio=0.5)
    model[0].weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="the optimiser holds none of the masked weights"):
        fxmask.guard(torch.optim.SGD(copy.deepcopy(model).parameters(), lr=0.1), model)
    assert list(fxmask.guard(torch.optim.SGD(model.parameters(), lr=0.1), model).policies) == ["0.weight", "1.weight"]
    resting = fxmask.apply(nn.Sequential(nn.Linear(64, 64).requires_grad_(False), nn.Linear(64, 4)), ratio=0.5)
    assert fxmask.guard(torch.optim.SGD(resting[1].parameters(), lr=0.1), resting).policies == {}  # the head alone trains


def test_wrong_use():
    model, optimiser = build(optim.SGD, dict(lr=0.1))
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=f"unknown masked_weights: expected one of {', '.join(POLICIES)}, got 'ice'"):
        fxmask.guard(optimiser, model, "ice")
    with pytest.raises(ConfigError, match=r"unknown returning: expected one of keep, zero"):
        fxmask.guard(optimiser, model, returning="later")
    with pytest.raises(ConfigError, match=r"expected a torch.optim.Optimizer first and the model second, got Sequential"):
        fxmask.guard(model, optimiser)
    with pytest.raises(ConfigError, match=r"(?s)the optimiser holds none of the masked weights.*0.weight.*pass the optimiser that steps this model"):
        fxmask.guard(optim.SGD(mlp().parameters(), lr=0.1), model)
    with pytest.raises(StateError, match="nothing is masked"):
        fxmask.guard(optimiser, mlp())
    handle = fxmask.guard(optimiser, model)
    with pytest.raises(StateError, match=r"(?s)guarded already \(policy 'freeze'\).*0.weight.*call remove\(\) on the first handle"):
        fxmask.guard(optimiser, model)
    with pytest.raises(StateError, match=r"(?s)guarded already.*in turn.*weights of their own: leave shared ones to one of them"):
        fxmask.guard(optim.SGD(model.parameters(), lr=0.1), model)
    assert len(optimiser._optimizer_step_pre_hooks) == 1
    with fxmask.dense(model), pytest.raises(StateError, match=r"optimizer.step\(\) inside fxmask.dense"):
        optimiser.step()
    handle.remove()
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("backward", ["ste", "unmasked", "rigl"])
def test_freeze_would_cancel_modes_that_move_masked_weights(backward):
    model, optimiser = build(optim.SGD, dict(lr=0.1), backward=backward)
    with pytest.raises(UnsupportedError, match=rf"(?s)masked_weights='freeze' with backward='{backward}' would cancel it.*'auto' or 'free'"):
        fxmask.guard(optimiser, model, "freeze")
    assert not optimiser._optimizer_step_pre_hooks


def test_a_weight_that_other_parameters_make():
    model = fxmask.apply(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)), nn.Linear(64, 64)), ratio=0.5)
    optimiser = optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(UnsupportedError, match=r"(?s)a weight that other parameters make.*0.weight"):
        fxmask.guard(optimiser, model, "freeze")
    with pytest.warns(fxmask.FxMaskWarning, match="(?s)weights that other parameters make.*0.weight"):
        handle = fxmask.guard(optimiser, model)
    assert list(handle.policies) == ["1.weight"]
    train(model, optimiser, 2)
    assert [r["step"] for r in fxmask.explain(model).rows] == [2, 2]


@pytest.mark.parametrize("policy", ["freeze", "decay"])
def test_a_closure_that_gives_a_layer_no_gradient(policy):
    """The optimiser leaves that layer alone, its masked weights too; of the other one it moves what is kept."""
    model, optimizer = build(optim.SGD, dict(lr=0.1, momentum=0.9, weight_decay=0.5))
    fxmask.guard(optimizer, model, masked_weights=policy)
    before, kept = copy.deepcopy(model.state_dict()), expand_mask(fxmask.masks(model)["0.weight"], model[0].weight.shape, (16, 16))

    def closure():
        optimizer.zero_grad()
        loss = model[0](torch.randn(3, 64)).square().mean()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert torch.equal(model[2].weight, before["2.weight"]) and not torch.equal(model[0].weight[kept], before["0.weight"][kept])
    factor = 1 - 0.1 * 0.5 if policy == "decay" else 1.0
    assert torch.equal(model[0].weight[~kept], before["0.weight"][~kept] * factor)


def test_each_policy_that_rests_says_what_a_step_leaves():
    assert set(LEFT) == set(KEPT), "a policy of passes.state.lost_guards.KEPT wants an entry in passes.stepping.optimiser.LEFT"
