"""fxmask.guard(masked_step=True): a step on kept blocks alone is the step of freeze, for every elementwise optimiser."""

import copy
from functools import cache

import pytest
import torch
from torch import fx, nn, optim
from unit.test_guard import masked_elements

import fxmask
from fxmask.errors import ConfigError
from fxmask.kernels.grid import expand_mask, grid_shape
from fxmask.passes.stepping.kept_blocks import KeptBlocks
from fxmask.passes.stepping.masked_step import kept_on_host

PLAIN, FOREACH, FUSED = dict(foreach=False), dict(foreach=True), dict(fused=True)
OPTIMISERS = {
    "SGD": (optim.SGD, dict(lr=0.1), (PLAIN, FOREACH, FUSED)),
    "SGD-momentum": (optim.SGD, dict(lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.1), (PLAIN, FOREACH, FUSED)),
    "SGD-nesterov": (optim.SGD, dict(lr=0.01, momentum=0.9, nesterov=True, maximize=True), (PLAIN, FOREACH, FUSED)),
    "Adam": (optim.Adam, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH, FUSED)),
    "Adam-amsgrad": (optim.Adam, dict(lr=0.01, weight_decay=0.1, amsgrad=True, maximize=True), (PLAIN, FOREACH, FUSED)),
    "AdamW": (optim.AdamW, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH, FUSED)),
    "AdamW-tensor-lr": (optim.AdamW, dict(lr=torch.tensor(0.01), weight_decay=0.1), (PLAIN, FUSED)),
    "NAdam": (optim.NAdam, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "RAdam": (optim.RAdam, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "Adamax": (optim.Adamax, dict(lr=0.01, weight_decay=0.1), (PLAIN, FOREACH)),
    "Adagrad": (optim.Adagrad, dict(lr=0.01, weight_decay=0.1, initial_accumulator_value=0.1), (PLAIN, FOREACH, FUSED)),
    "Adadelta": (optim.Adadelta, dict(lr=0.5, weight_decay=0.1), (PLAIN, FOREACH)),
    "RMSprop": (optim.RMSprop, dict(lr=0.01, weight_decay=0.1, momentum=0.5, centered=True), (PLAIN, FOREACH)),
    "Rprop": (optim.Rprop, dict(lr=0.01), (PLAIN, FOREACH)),
    "ASGD": (optim.ASGD, dict(lr=0.01, weight_decay=0.1, t0=5), (PLAIN, FOREACH)),
}
EVERY = [pytest.param(name, form, id=f"{name}-{'-'.join(f'{k}-{v}' for k, v in form.items())}") for name, (*_, forms) in OPTIMISERS.items() for form in forms]
RAMP = dict(ratio=0.7, block=(16, 16), refresh=2, schedule=fxmask.Schedule("cubic", 15))  # begins with every block, ends before the 20 steps do


def net():
    """A weight of whole blocks, and a ragged one."""
    return nn.Sequential(nn.Linear(64, 48), nn.Tanh(), nn.Linear(48, 37), nn.Tanh(), nn.Linear(37, 8))


def build(cls, options, make=net, groups=lambda m: m.parameters(), **config):
    torch.manual_seed(0)
    model = fxmask.apply(make(), fxmask.WeightMask(**{**RAMP, **config}))
    options = {k: v.clone() if torch.is_tensor(v) else v for k, v in options.items()}
    return model, cls(groups(model), **options)


def gradients(model, optimiser):
    optimiser.zero_grad()
    model(torch.randn(8, 64, dtype=next(model.parameters()).dtype)).square().mean().backward()


def train(model, optimiser, steps=20, each=lambda i: None, seed=1):
    torch.manual_seed(seed)
    for i in range(steps):
        gradients(model, optimiser)
        optimiser.step()
        each(i)


ADAMW = dict(lr=0.01, weight_decay=0.1)


def pair(cls=optim.AdamW, options=ADAMW, returning="keep", step=True, **config):
    """The same run twice: with the masked step, and under freeze."""
    runs = []
    for masked_step in (step, False):
        model, optimiser = build(cls, options, **config)
        handle = fxmask.guard(optimiser, model, returning=returning, masked_step=masked_step)
        assert handle.masked_step is masked_step and set(handle.policies.values()) == {"freeze"}
        runs.append((model, optimiser))
    return runs


def same(ours, theirs, rtol=1e-5, atol=1e-7):
    """Weights and state of two runs, to rounding, with the same names, shapes and dtypes."""
    order = [[next(n for n, q in model.named_parameters() if p is q) for p in optimiser.state] for model, optimiser in (ours, theirs)]
    assert order[0] == order[1] and (order[0] or isinstance(theirs[1], optim.SGD))
    for (name, p), q in zip(ours[0].named_parameters(), theirs[0].parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=rtol, atol=atol)
        a, b = ours[1].state.get(p, {}), theirs[1].state.get(q, {})
        assert list(a) == list(b), name
        for key in a:
            assert type(a[key]) is type(b[key]), (name, key)
            if torch.is_tensor(a[key]):
                least = atol * min(1.0, 10 * float(b[key].abs().max()))  # second moments are smaller than that
                torch.testing.assert_close(a[key], b[key], rtol=rtol, atol=least)
            else:
                assert a[key] == b[key]


def outside(model, optimiser, out):
    """What a step must not touch: copies of masked elements of weights, and of momenta that there are."""
    found = {}
    for name, p in model.named_parameters():
        if name in out:
            found[name] = p.detach()[out[name]]
            found |= {(name, k): t[out[name]] for k, t in optimiser.state.get(p, {}).items() if torch.is_tensor(t) and t.shape == p.shape}
    return found


@cache
def frozen_run(name):
    """20 steps under freeze, plain."""
    cls, options, _ = OPTIMISERS[name]
    model, optimiser = build(cls, {**options, "foreach": False})
    fxmask.guard(optimiser, model)
    train(model, optimiser)
    return model, optimiser


@pytest.mark.parametrize(("name", "form"), EVERY)
def test_it_is_freeze(name, form):
    """20 steps of a cubic ramp, masks that move: freeze's weights and state to rounding, the bits of whatever is masked."""
    cls, options, _ = OPTIMISERS[name]
    model, optimiser = build(cls, {**options, **form})
    assert fxmask.guard(optimiser, model, masked_step=True).masked_step is True
    first, counts = {n: o.clone() for n, o in masked_elements(model).items()}, set()
    torch.manual_seed(1)
    for _ in range(20):
        out = masked_elements(model)
        counts.add(sum(int(o.sum()) for o in out.values()))
        before, weight = outside(model, optimiser, out), model[0].weight.detach().clone()
        gradients(model, optimiser)
        optimiser.step()
        after = outside(model, optimiser, out)
        assert all(torch.equal(after[k], t) for k, t in before.items()) and not torch.equal(model[0].weight, weight)
    same((model, optimiser), frozen_run(name))
    last = masked_elements(model)
    assert len(counts) > 4 and any((first[n] & ~last[n]).any() or (last[n] & ~first[n]).any() for n in last)
    assert fxmask.explain(model).rows[0]["step"] == 20


@pytest.mark.parametrize("name", OPTIMISERS)
def test_state_that_a_masked_step_makes(name):
    """Masks from the first step on, another one for each: state begins at masked places as under freeze, and is there when blocks return."""
    cls, options, _ = OPTIMISERS[name]
    ours, theirs = pair(cls, {**options, "foreach": False}, schedule=None, refresh=1, criterion="random")
    train(*ours, 1)
    train(*theirs, 1)
    same(ours, theirs)
    train(*ours, 3, seed=2)
    train(*theirs, 3, seed=2)
    same(ours, theirs)


def test_bits_where_the_arithmetic_is_the_same():
    """SGD with momentum, plain: every element is computed alike in a tensor of any shape, so kept ones agree to the bit, too."""
    ours, theirs = pair(optim.SGD, dict(lr=0.1, momentum=0.5, foreach=False))
    train(*ours)
    train(*theirs)
    same(ours, theirs, rtol=0, atol=0)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b, self.out = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 40)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.out(torch.tanh(self.b(torch.tanh(self.a(x)))))


class Sideways(nn.Module):
    """A weight whose memory is that of its transpose."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 48)
        self.fc.weight = nn.Parameter(self.fc.weight.detach().t().contiguous().t())

    def forward(self, x):
        return self.fc(x)


CASES = {
    "each forward": dict(refresh=1),
    "never": dict(refresh=0, schedule=None),
    "late": dict(start=4),
    "returning": dict(returning="zero"),
    "ties": dict(ties="keep", criterion="linf"),
    "cover": dict(cover=True, ratio=0.6),
    "random": dict(criterion="random", refresh=1),
    "oblong": dict(block=(16, 32)),
    "ragged in both": dict(block=(20, 36)),
    "larger than the weight": dict(block=(64, 16), ratio=0.5, schedule=None),
    "one": dict(ratio=0.99, schedule=None),
    "none": dict(ratio=0.0, schedule=None),
    "graph": dict(make=lambda: fx.symbolic_trace(net())),
    "tied": dict(make=Tied),
    "sideways": dict(make=Sideways),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:.*one block covers:fxmask.errors.FxMaskWarning")
def test_configurations(case):
    ours, theirs = pair(**CASES[case])
    moved = ours[0].get_parameter(next(iter(fxmask.masks(ours[0])))).detach().clone()
    train(*ours, 8)
    train(*theirs, 8)
    same(ours, theirs)
    assert not torch.equal(moved, ours[0].get_parameter(next(iter(fxmask.masks(ours[0])))))


def test_half_precision():
    ours, theirs = pair(make=lambda: net().bfloat16())
    train(*ours, 5)
    train(*theirs, 5)
    same(ours, theirs, rtol=1e-2, atol=1e-3)


def test_groups_and_schedulers():
    """Groups keep their own lr and decay, and schedulers, which hold them, go on."""

    def groups(model):
        first = dict(params=[model[0].weight, model[2].bias], lr=0.05, weight_decay=0.5)
        return [first, dict(params=[model[2].weight], lr=0.001), dict(params=[model[4].bias])]

    ours, theirs = pair(groups=groups)
    for model, optimiser in (ours, theirs):
        held = [id(g) for g in optimiser.param_groups]
        schedule = optim.lr_scheduler.OneCycleLR(optimiser, max_lr=[0.1, 0.02, 0.01], total_steps=21)
        train(model, optimiser, each=lambda i, s=schedule: s.step())
        assert [id(g) for g in optimiser.param_groups] == held
        assert [p.shape for g in optimiser.param_groups for p in g["params"]] == [p.shape for g in groups(model) for p in g["params"]]
    same(ours, theirs)
    assert ours[1].param_groups[0]["lr"] == theirs[1].param_groups[0]["lr"] != 0.05


def test_a_group_that_comes_later():
    ours, theirs = pair(groups=lambda m: [m[0].weight], refresh=1, schedule=None)
    for model, optimiser in (ours, theirs):
        train(model, optimiser, 4)
        optimiser.add_param_group(dict(params=[model[2].weight], lr=0.02))
        train(model, optimiser, 4)
    same(ours, theirs)
    assert ours[1].state[ours[0][2].weight]["step"] == 4


def test_states_are_saved_and_loaded():
    """The optimiser's own keys and shapes between steps; a masked run goes on under freeze, and the other way round."""
    ours, theirs = pair()
    train(*ours, 6)
    train(*theirs, 6)
    saved, expected = copy.deepcopy(ours[1].state_dict()), theirs[1].state_dict()
    assert saved["param_groups"] == expected["param_groups"] and list(saved["state"]) == list(expected["state"])
    for i, entries in expected["state"].items():
        assert {k: (t.shape, t.dtype) for k, t in saved["state"][i].items()} == {k: (t.shape, t.dtype) for k, t in entries.items()}
    twin = copy.deepcopy(ours[1])
    assert not twin._optimizer_step_pre_hooks and all(p.shape == q.shape for p, q in zip(twin.state, ours[1].state, strict=True))
    train(*ours, 6)  # what is loaded replaces what these have made
    weights, masks = {k: v.clone() for k, v in theirs[0].state_dict().items()}, fxmask.state_dict(theirs[0])
    for (model, optimiser), other in ((ours, expected), (theirs, saved)):
        model.load_state_dict(weights)
        fxmask.load_state_dict(model, masks)
        optimiser.load_state_dict(copy.deepcopy(other))
    train(*ours, 6, seed=2)
    train(*theirs, 6, seed=2)
    same(ours, theirs)


# ---- its parts ----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(32, 48), (30, 48), (32, 40), (30, 44), (29, 41), (8, 8), (1, 5)], ids=str)
@pytest.mark.parametrize("block", [(16, 16), (8, 24), (1, 1), (64, 64)], ids=str)
def test_kept_blocks(shape, block):
    """Gathered elements are those of the mask, whatever the strides; scattering writes them back and nothing else; a count gives the same blocks, and at ragged
    edges some elements twice."""
    grid = -(-shape[0] // block[0]), -(-shape[1] // block[1])
    for seed in range(3):
        mask = torch.rand(grid, generator=torch.Generator().manual_seed(seed)) < 0.5
        elements = expand_mask(mask, shape, block)
        for counted, found in enumerate((KeptBlocks(mask, shape, block), KeptBlocks(mask, shape, block, int(mask.sum())))):
            for make in (torch.clone, lambda t: t.t().contiguous().t(), lambda t: torch.stack([t, t], -1)[..., 0], lambda t: torch.stack([-t, t])[1]):
                t = make(torch.arange(1.0, 1 + elements.numel()).reshape(shape))
                kept = found.gather(t)
                assert kept.shape == (1, found.numel) and torch.equal(kept.unique(), t[elements].sort().values)
                assert found.numel == int(elements.sum()) or (counted and (shape[0] % block[0] or shape[1] % block[1]))
                expected = torch.where(elements, -t, t)
                found.scatter(t, -kept)
                assert torch.equal(t, expected)


COUNTED = [dict(refresh=1), dict(refresh=3), dict(start=3), dict(refresh=0, schedule=None), dict(cover=True), dict(start=3, refresh=1)]


@pytest.mark.parametrize(("shape", "block"), [((24, 64), (2, 2)), ((24, 60), (16, 3)), ((24, 56), (5, 12))], ids=str)
def test_where_the_number_is_known_no_value_of_the_mask_is_asked_for(shape, block):
    """On the meta device nobody could answer. A run is as wide as a block, or as four elements of one that is ragged."""
    mask = torch.ones(grid_shape(shape, block), dtype=torch.bool, device="meta")
    assert KeptBlocks(mask, shape, block, 3).numel == 3 * block[0] * block[1]


@pytest.mark.parametrize("config", COUNTED, ids=str)
def test_the_host_knows_how_many_blocks_are_kept(config):
    model, optimiser = build(optim.SGD, dict(lr=0.1), **config)
    handle = fxmask.guard(optimiser, model, masked_step=True)

    def check(i=0):
        assert [kept_on_host(g.site) for g in handle._held.guarded] == [int(m.sum()) for m in fxmask.masks(model).values()]

    check()
    train(model, optimiser, each=check)


@pytest.mark.parametrize("config", [dict(ties="keep"), dict(schedule=fxmask.Feedback("loss", every=1))], ids=str)
def test_or_says_that_the_mask_alone_does(config):
    assert kept_on_host(build(optim.SGD, dict(lr=0.1), **config)[0][0]) is None


def test_a_feedback_says_nothing_of_a_mask_that_it_has_not_built():
    """The ratio falls to keeping every block, and the mask in force is still the one that was built at a higher ratio."""
    model, optimiser = build(optim.AdamW, ADAMW, refresh=100, schedule=fxmask.Feedback("loss", every=1, change=0.35))
    fxmask.guard(optimiser, model, masked_step=True)
    for loss in (1.0, 2.0):
        fxmask.feedback(model, loss)
        train(model, optimiser, 1)
        if loss == 1.0:
            fxmask.refresh(model)
    weight, kept = model[0].weight, expand_mask(fxmask.masks(model)["0.weight"], (48, 64), (16, 16))
    assert fxmask.explain(model).rows[0]["target_ratio"] == 0 and not kept.all()
    before = weight.detach().clone()
    train(model, optimiser, 1)
    assert torch.equal(before[~kept], weight[~kept]) and not torch.equal(before[kept], weight[kept])


@pytest.mark.filterwarnings("ignore::fxmask.FxMaskWarning", "ignore:Initializing zero-element tensors")
def test_a_layer_without_features_is_left_to_the_optimiser():
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 0), nn.Linear(0, 4)), ratio=0.5, block=(16, 16), ties="keep", include=["0", "1"])
    optimiser = optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimiser, model, masked_step=True)
    train(model, optimiser, 1)


def test_nothing_is_held_between_steps():
    model, optimiser = build(optim.AdamW, dict(lr=0.01))
    handle = fxmask.guard(optimiser, model, masked_step=True)
    train(model, optimiser, 3)
    assert handle._under_way is None and set(optimiser.state) == set(model.parameters())
    handle.remove()
    train(*build(optim.AdamW, dict(lr=0.01), refresh=1, schedule=None), 1)
    assert not optimiser._optimizer_step_pre_hooks and not optimiser._optimizer_step_post_hooks


def test_the_option_is_checked():
    model, optimiser = build(optim.SGD, dict(lr=0.1))
    for policy in ("decay", "free"):
        with pytest.raises(ConfigError, match=f"masked_step leaves masked weights as they are: expected masked_weights='freeze' .* got '{policy}'"):
            fxmask.guard(optimiser, model, policy, masked_step=True)
    with pytest.raises(ConfigError, match="masked_step: expected True, False or 'elementwise', got 'yes'"):
        fxmask.guard(optimiser, model, masked_step="yes")
    assert not optimiser._optimizer_step_pre_hooks and fxmask.guard(optimiser, model).masked_step is False


@pytest.mark.parametrize("name", ["taylor", "soft", "regrow", "feedback"])
def test_with_masks_that_score_soften_regrow_or_follow_a_feedback(name):
    """The same run as under freeze, where masked weights learn on a soft ramp and scores see the gradient."""
    ramp = fxmask.Schedule("linear", steps=8)
    config = {
        "taylor": dict(criterion="taylor", average=0.5, schedule=ramp),
        "soft": dict(soft=True, schedule=ramp),
        "regrow": dict(regrow=fxmask.Regrow("random", 0.5), refresh=2),
        "feedback": dict(schedule=fxmask.Feedback("flip_rate", every=2, goal=0.5, change=0.2), refresh=2),
    }[name]
    runs = []
    for masked_step in (False, True):
        torch.manual_seed(0)
        model = fxmask.apply(nn.Sequential(nn.Linear(40, 56)), fxmask.WeightMask(ratio=0.6, block=(16, 16), **config))
        optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        fxmask.guard(optimizer, model, masked_step=masked_step)
        for step in range(12):
            optimizer.zero_grad()
            model(torch.randn(8, 40, generator=torch.Generator().manual_seed(step))).square().mean().backward()
            optimizer.step()
        runs.append((model[0].weight.detach(), fxmask.masks(model)["0.weight"]))
    assert torch.equal(runs[0][1], runs[1][1]) and not runs[0][1].all()
    torch.testing.assert_close(runs[0][0], runs[1][0])
