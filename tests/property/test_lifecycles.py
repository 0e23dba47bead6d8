"""Lives of masked models: masks, optimisers, guards, steps, states, copies, restore and finalize, in any order.

Whatever came before, a model computes W∘M of its masks, a run that takes up a saved state goes on with the same bits, and what is refused changes nothing.
"""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from property.often import examples
from saved_states import same, through_a_file
from torch import fx, nn, optim

import fxmask
from fxmask.errors import FxMaskError
from fxmask.kernels.grid import expand_mask, keep_count
from fxmask.sites import sites

pytestmark = pytest.mark.filterwarnings("ignore::fxmask.errors.FxMaskWarning")


def without_conflicts(drawn):
    """Those of the options that go together, from the first on."""
    found = {}
    for name, value in drawn.items():
        try:
            fxmask.WeightMask(**found, **{name: value})
            found[name] = value
        except FxMaskError:
            pass
    return found


OPTIONS = st.fixed_dictionaries(
    {
        "ratio": st.sampled_from([0.0, 0.3, 0.5, 0.75, 0.9]),
        "block": st.sampled_from([(8, 8), (16, 16), (8, 16), (5, 7)]),
        "backward": st.sampled_from(["masked", "ste", "rigl", "unmasked"]),
        "criterion": st.sampled_from(["fro", "l1", "random", "taylor", "movement", "momentum"]),
        "refresh": st.sampled_from([1, 3, 0]),
    },
    optional={
        "phases": st.sampled_from([{1: {"block": (4, 4)}}, {2: {"refresh": 2}}, {3: {"backward": "ste"}}]),
        "schedule": st.sampled_from([fxmask.Schedule("cubic", steps=6), fxmask.Schedule("linear", steps=3), fxmask.Schedule("cyclic", steps=4)]),
        "soft": st.just(True),
        "average": st.just(0.5),
        "hysteresis": st.just(0.2),
        "cover": st.just(True),
        "gain": st.just(True),
        "start": st.just(2),
        "ties": st.just("keep"),
        "regrow": st.just(fxmask.Regrow("random", 0.4)),
    },
).map(without_conflicts)
OPTIMISERS = [
    lambda p: optim.AdamW(p, lr=0.01),
    lambda p: optim.SGD(p, lr=0.05, momentum=0.9, weight_decay=0.01),
    lambda p: optim.Adam(p, lr=0.01, weight_decay=0.01, foreach=False),
]


class Net(nn.Module):
    """Ragged layers, two that share a weight, and one whose weight its owner reads."""

    def __init__(self):
        super().__init__()
        self.a, self.b, self.c, self.d = nn.Linear(24, 40), nn.Linear(40, 33, bias=False), nn.Linear(33, 40), nn.Linear(40, 33, bias=False)
        self.d.weight = self.b.weight
        self.out, self.attention = nn.Linear(33, 32), nn.MultiheadAttention(32, 2, batch_first=True)

    def forward(self, x):
        h = self.b(F.gelu(self.a(x)))
        h = self.out(h + self.d(F.gelu(self.c(h))))
        return self.attention(h, h, h, need_weights=False)[0]


class Lives(RuleBasedStateMachine):
    make = staticmethod(Net)

    def __init__(self):
        super().__init__()
        self.threads = torch.get_num_threads()
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.model, self.optimizer, self.handle, self.guarded, self.applied, self.saved = self.make(), None, None, None, [], None

    def teardown(self):
        torch.set_num_threads(self.threads)

    def masked(self):
        return any(True for _ in sites(self.model))

    def everything(self):
        state = fxmask.state_dict(self.model) if self.masked() else None
        return copy.deepcopy((self.model.state_dict(), state)), [type(m) for m in self.model.modules()]

    def attempt(self, action):
        """Whether it went through; what is refused leaves everything as it was."""
        before = self.everything()
        try:
            action()
        except FxMaskError:
            assert same(self.everything(), before)
            return False
        return True

    @initialize(options=OPTIONS, make=st.sampled_from(OPTIMISERS))
    def begin(self, options, make):
        """As most lives do; masks, optimisers and guards of later rules come on top, or behind a restore."""
        self.apply(options, None)
        if not self.masked():  # for the tied weight or the one that is read
            self.apply(options, ["a", "c", "out"])
        self.optimise(make)
        self.attempt_guard("auto", False)
        if self.masked():
            self.save()

    @rule(options=OPTIONS, include=st.sampled_from([None, ["a", "c", "out"], ["a", "b", "d"], "att*"]))
    def apply(self, options, include):
        options = {**options, "include": include, "impl": "reference"}
        if self.attempt(lambda: fxmask.apply(self.model, **options)):
            self.applied.append(options)

    @rule(make=st.sampled_from(OPTIMISERS))
    def optimise(self, make):
        if self.handle is not None:
            self.unguard()
        self.optimizer, self.make_optimizer = make(self.model.parameters()), make

    @precondition(lambda self: self.optimizer is not None and self.handle is None and self.masked())
    @rule(policy=st.sampled_from(["auto", "freeze", "decay", "free"]), masked_step=st.sampled_from([False, False, True]))
    def guard(self, policy, masked_step):
        self.attempt_guard(policy, masked_step)

    def attempt_guard(self, policy, masked_step):
        handles = []
        if self.attempt(lambda: handles.append(fxmask.guard(self.optimizer, self.model, policy, masked_step=masked_step))):
            self.handle, self.guarded = handles[0], (policy, masked_step)

    @precondition(lambda self: self.handle is not None)
    @rule()
    def unguard(self):
        self.handle.remove()
        self.handle = None

    @precondition(lambda self: self.optimizer is not None)
    @rule(steps=st.integers(1, 4))
    def train(self, steps):
        for _ in range(steps):
            if not self.attempt(lambda: train(self.model, self.optimizer, torch.randn(3, 5, 24))):
                return
            if self.masked():
                self.computes_what_its_masks_say()

    @precondition(masked)
    @rule(n=st.integers(0, 3))
    def step(self, n):
        self.attempt(lambda: fxmask.step(self.model, n))

    @precondition(masked)
    @rule()
    def refresh(self):
        self.attempt(lambda: fxmask.refresh(self.model))

    @rule(which=st.integers(0, 7), data=st.booleans())
    def write(self, which, data):
        p = list(self.model.parameters())[which]
        with torch.no_grad():
            new = p * torch.rand_like(p) * 2
            if data:
                p.data = new
            else:
                p.copy_(new)

    @rule(how=st.sampled_from([copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))]))
    def copies(self, how):
        other, x = how(self.model), torch.randn(3, 5, 24)
        assert torch.equal(other.eval()(x), self.model.eval()(x))

    @precondition(masked)
    @rule()
    def save(self):
        self.saved = through_a_file((self.model.state_dict(), fxmask.state_dict(self.model)))

    @precondition(lambda self: self.saved is not None and self.masked())
    @rule()
    def load(self):
        self.model.load_state_dict(self.saved[0])
        if self.attempt(lambda: fxmask.load_state_dict(self.model, self.saved[1])):
            ours = fxmask.state_dict(self.model)["masks"]
            assert all(same(ours[n][key], entry[key]) for n, entry in self.saved[1]["masks"].items() for key in ("step", "built", "mask", "score"))

    @precondition(lambda self: self.optimizer is not None and self.masked() and len(self.applied) == 1)
    @rule()
    def resume(self):
        """Save, build anew, load, and take a step here and there."""
        model_state, mask_state, optimizer_state = through_a_file((self.model.state_dict(), fxmask.state_dict(self.model), self.optimizer.state_dict()))
        other = fxmask.apply(self.make(), **self.applied[0])
        optimizer = self.make_optimizer(other.parameters())
        other.load_state_dict(model_state)
        fxmask.load_state_dict(other, mask_state)
        optimizer.load_state_dict(optimizer_state)
        if self.handle is not None and self.handle.policies:
            fxmask.guard(optimizer, other, self.guarded[0], masked_step=self.guarded[1])
        x, ran = torch.randn(3, 5, 24), []
        for m, o in ((self.model, self.optimizer), (other, optimizer)):
            try:
                train(m, o, x)
                ran.append(True)
            except FxMaskError:
                ran.append(False)
        assert ran[0] == ran[1]
        assert same(other.state_dict(), self.model.state_dict()) and same(optimizer.state_dict()["state"], self.optimizer.state_dict()["state"])
        if ran[0]:
            assert same(fxmask.state_dict(other)["masks"], fxmask.state_dict(self.model)["masks"])

    @rule()
    def explain(self):
        before = self.everything()
        str(fxmask.explain(self.model, health=True))
        assert same(self.everything(), before)

    @precondition(masked)
    @rule()
    def dense(self):
        plain, x = Net().eval(), torch.randn(3, 5, 24)
        plain.load_state_dict(self.model.state_dict())
        with fxmask.dense(self.model.eval()):
            assert torch.equal(self.model(x), plain(x))

    @precondition(masked)
    @rule()
    def restore(self):
        weights = self.everything()[0][0]
        fxmask.restore(self.model)
        fresh = self.make()
        assert same(self.model.state_dict(), weights)
        self.applied.clear()
        assert [type(m) for m in self.model.modules()][1:] == [type(m) for m in fresh.modules()][1:] and not self.masked()
        if isinstance(fresh, fx.GraphModule):
            assert self.model.code == fresh.code

    @precondition(masked)
    @rule()
    def finalize(self):
        x, soft = torch.randn(3, 5, 24), any(site._fxmask_softening for _, site, _ in sites(self.model))
        y = self.model.eval()(x)
        if self.attempt(lambda: fxmask.finalize(self.model)):
            assert soft or torch.equal(self.model(x), y)
            self.applied.clear()

    @precondition(masked)
    @invariant()
    def computes_what_its_masks_say(self):
        plain, found, masks, done = Net().eval(), {n: s for n, s, _ in sites(self.model)}, fxmask.masks(self.model), set()
        plain.load_state_dict(self.model.state_dict())
        parameters = dict(plain.named_parameters(remove_duplicate=False))
        for name, site in found.items():
            c, mask, w = site._fxmask_config, masks[name], parameters[name]
            step = site._fxmask_built if c.cached else site._fxmask_step
            assert c.ties == "keep" or int(mask.sum()) == keep_count(mask.numel(), c.ratio_at(step))
            if id(w) not in done:
                w.data = torch.where(expand_mask(mask, w.shape, c.block), w, c.soft_scale_at(site._fxmask_step) * w)
                done.add(id(w))
        x, training = torch.randn(3, 5, 24), self.model.training
        torch.testing.assert_close(self.model.eval()(x), plain(x))
        self.model.train(training)


def train(model, optimizer, x):
    optimizer.zero_grad()
    y = model.train()(x)
    (y.square().mean() + y.mean()).backward()
    optimizer.step()


class GraphLives(Lives):
    make = staticmethod(lambda: fx.symbolic_trace(Net()))


def case(machine, lives):
    """The TestCase of a machine, of its own each time."""
    found = type(machine.__name__, (machine,), {}).TestCase
    found.settings = examples(lives, stateful_step_count=20)
    return found


TestModules, TestGraphs = case(Lives, 40), case(GraphLives, 20)
TestManyModules, TestManyGraphs = (pytest.mark.slow(pytest.mark.timeout(1200)(case(machine, 300))) for machine in (Lives, GraphLives))
