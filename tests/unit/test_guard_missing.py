"""What a guard does not hold it says: weights that other parameters make, and layers that were restored and masked anew."""

import gc
import pickle
import warnings
import weakref

import pytest
import torch
from torch import fx, nn, optim
from torch._subclasses import FakeTensorMode
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.nn.utils import parametrizations, parametrize, prune

import fxmask
from fxmask import FxMaskWarning
from fxmask.errors import StateError, UnsupportedError
from fxmask.kernels.grid import expand_mask

MADE = "weights that other parameters make"
ANEW = r"a guard ended with fxmask\.restore, and its model is masked anew: expected a new guard, got none"
WRAPS = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "old-weight_norm": nn.utils.weight_norm,
    "old-spectral_norm": nn.utils.spectral_norm,
    "pruned": lambda m: prune.l1_unstructured(m, "weight", amount=0.3),
    "given-back": lambda m: parametrize.register_parametrization(m, "weight", nn.Identity()),  # as a fake quantiser that is off does
}
OLD = pytest.mark.filterwarnings("ignore:.torch.nn.utils.(weight|spectral)_norm. is deprecated:FutureWarning")


def net(wrap=None, at=(2,)):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
    for i in at if wrap else ():
        wrap(model[i])
    return model


def adamw(model):
    return optim.AdamW(model.parameters(), 1e-2, weight_decay=0.1)


def train(model, optimiser, steps=1):
    for i in range(steps):
        optimiser.zero_grad()
        model(torch.randn(8, 64, generator=torch.Generator().manual_seed(i))).square().mean().backward()
        optimiser.step()


def policies(model):
    return {r["name"]: r["masked_weights"] for r in fxmask.explain(model).rows if r["masked"]}


def masked_part(model, masks, name="0.weight"):
    weight = model.get_parameter(name).detach()
    return weight[~expand_mask(masks[name], weight.shape, (16, 16))].clone()


# ---- weights that other parameters make --------------------------------------------------------------------------------------------------------------------


@OLD
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_made_weight_is_named(wrap):
    """One warning at `guard`, on the line that calls it; the other layers are guarded, and `explain` has the reason."""
    model = fxmask.apply(net(wrap), ratio=0.5)
    optimiser = adamw(model)
    with pytest.warns(FxMaskWarning, match=MADE) as caught:
        handle = fxmask.guard(optimiser, model)
    assert len(caught) == 1 and caught[0].filename == __file__
    text = str(caught[0].message)
    assert "the optimiser moves what they are computed from, and their masked weights with it." in text and "where: 2.weight\n" in text
    assert "fix: remove that before fxmask.apply (torch.nn.utils.parametrize.remove_parametrizations, torch.nn.utils.prune.remove)" in text
    assert "masked_weights='free' says that it is meant" in text
    assert handle.policies == {"0.weight": "freeze", "4.weight": "freeze"}
    assert policies(model) == {"0": "freeze", "2": "left to the optimiser (other parameters make this weight)", "4": "freeze"}
    train(model, optimiser, 2)  # no second word
    handle.remove()
    assert set(policies(model).values()) == {"left to the optimiser (no guard)"}


def test_five_at_most():
    model = nn.Sequential(*(parametrizations.weight_norm(nn.Linear(64, 64)) for _ in range(7)))
    fxmask.apply(model, ratio=0.5)
    with pytest.warns(FxMaskWarning, match=r"where: 0.weight, 1.weight, 2.weight, 3.weight, 4.weight and 2 more\n"):
        fxmask.guard(adamw(model), model)


class Hyper(nn.Module):
    """A layer's output is the weight of a product."""

    def __init__(self):
        super().__init__()
        self.make = nn.Linear(64, 64, bias=False)
        self.register_buffer("code", torch.randn(64, 64))

    def forward(self, x):
        return nn.functional.linear(x, self.make(self.code))


@pytest.mark.parametrize("trained", [True, False])
def test_a_weight_that_a_layer_of_a_graph_makes(trained):
    gm = fx.symbolic_trace(nn.Sequential(Hyper(), nn.Linear(64, 64)))
    FakeTensorProp(gm, FakeTensorMode(allow_non_fake_inputs=True)).propagate(torch.randn(4, 64))  # the trace says shapes then
    fxmask.apply(gm, ratio=0.5, include=["linear", "1"])
    optimiser = torch.optim.SGD(gm.parameters() if trained else gm.get_submodule("1").parameters(), lr=0.1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fxmask.guard(optimiser, gm)
    assert [MADE in str(w.message) for w in caught] == [True] * trained
    assert not trained or "where: linear.weight\n" in str(caught[0].message)


def test_free_says_that_it_is_meant():
    model = fxmask.apply(net(parametrizations.weight_norm), ratio=0.5)
    optimiser = adamw(model)
    fxmask.guard(optimiser, model, masked_weights="free")
    assert policies(model) == {"0": "free", "2": "left to the optimiser (other parameters make this weight)", "4": "free"}
    model = fxmask.apply(net(parametrizations.weight_norm), ratio=0.5)
    with pytest.raises(UnsupportedError, match="a weight that other parameters make"):
        fxmask.guard(adamw(model), model, masked_weights="freeze")


@OLD
@pytest.mark.parametrize("wrap", WRAPS.values(), ids=WRAPS)
def test_a_weight_that_is_made_from_now_on(wrap):
    """Guarded as a Parameter, then parametrised or pruned: an error before anything moves, and the guard that its fix asks for."""
    model = fxmask.apply(net(), ratio=0.5)
    optimiser = adamw(model)
    handle = fxmask.guard(optimiser, model)
    train(model, optimiser)
    wrap(model[2])
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    with pytest.raises(StateError, match=r"(?s)made from other parameters since fxmask\.guard.*where: 2\.weight\n.*remove\(\)"):
        train(model, optimiser)
    assert all(torch.equal(p, before[n]) for n, p in model.named_parameters())
    handle.remove()
    optimiser = adamw(model)
    with pytest.warns(FxMaskWarning, match=MADE):
        fxmask.guard(optimiser, model)
    train(model, optimiser)


@pytest.mark.parametrize(
    ("config", "warns"),
    [
        (dict(backward="ste"), False),
        (dict(backward="rigl"), False),
        (dict(backward="masked", refresh=0), True),
        (dict(backward="ste", phases={5: dict(backward="masked")}), True),
    ],
    ids=["ste", "rigl", "masked", "a later phase"],
)
def test_only_where_auto_would_freeze(config, warns):
    """Modes that live on moving masked weights lose nothing."""
    model = fxmask.apply(net(parametrizations.weight_norm), fxmask.WeightMask(ratio=0.5, **config))
    if warns:
        with pytest.warns(FxMaskWarning, match=MADE):
            fxmask.guard(adamw(model), model)
    else:
        fxmask.guard(adamw(model), model)


def test_only_of_what_this_optimiser_moves():
    """Neither of a layer that another optimiser has, nor of one that rests."""
    model = fxmask.apply(net(parametrizations.weight_norm), ratio=0.5)
    fxmask.guard(optim.SGD([p for i in (0, 4) for p in model[i].parameters()], 0.1), model)
    model = fxmask.apply(net(parametrizations.weight_norm), ratio=0.5)
    bias, rest = model[2].bias, [p for p in model[2].parameters() if p is not model[2].bias]
    fxmask.guard(optim.SGD([model[0].weight, bias], 0.1), model).remove()
    with pytest.warns(FxMaskWarning, match=MADE):
        fxmask.guard(optim.SGD(rest, 0.1), model)
    model = fxmask.apply(net(parametrizations.weight_norm), ratio=0.5)
    model[2].requires_grad_(False)
    fxmask.guard(adamw(model), model)


class Outer(nn.Module):
    """Its weight is a product, which a symbolic trace keeps in the graph, one factor a module's."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.mix = nn.Linear(64, 64), nn.Parameter(torch.randn(64, 8)), nn.Linear(8, 64, bias=False)

    def forward(self, x):
        return nn.functional.linear(self.first(x), self.mix(self.a))


@pytest.mark.parametrize("wrap", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_a_weight_that_a_graph_computes(wrap):
    gm = fxmask.apply(torch.export.export(net(wrap), (torch.randn(2, 64),)).module(), ratio=0.5)
    with pytest.warns(FxMaskWarning, match=rf"(?s){MADE}.*where: linear_1.weight\n"):
        handle = fxmask.guard(adamw(gm), gm)
    assert handle.policies == {"0.weight": "freeze", "4.weight": "freeze"}
    assert policies(gm)["linear_1"] == "left to the optimiser (other parameters make this weight)"
    handle.remove()
    fxmask.guard(optim.SGD([gm.get_parameter("0.weight"), gm.get_parameter("2.bias")], 0.1), gm)  # of what it is made from this one holds nothing


@pytest.mark.parametrize("held", ["a", "mix.weight"])
def test_a_graph_that_makes_a_weight_of_parameters_and_modules(held):
    gm = torch.export.export(Outer(), (torch.randn(2, 64),)).module()
    fxmask.apply(gm, ratio=0.5, exclude="mix")
    assert fxmask.masks(gm).keys() == {"first.weight"} and len(policies(gm)) == 2
    fxmask.guard(optim.SGD([gm.get_parameter("first.weight")], 0.1), gm).remove()
    with pytest.warns(FxMaskWarning, match=MADE):
        fxmask.guard(optim.SGD([gm.get_parameter(held)], 0.1), gm)


# ---- restored, and masked anew -----------------------------------------------------------------------------------------------------------------------------


def guarded(form="module", **options):
    model = net() if form == "module" else fx.symbolic_trace(net())
    optimiser = adamw(fxmask.apply(model, ratio=0.5))
    return model, optimiser, fxmask.guard(optimiser, model, **options)


@pytest.mark.parametrize("options", [{}, dict(masked_step=True), dict(masked_weights="free")], ids=["freeze", "masked_step", "free"])
@pytest.mark.parametrize("form", ["module", "graph"])
@pytest.mark.parametrize("again", [{}, dict(masked_step=True)], ids=["", "masked_step again"])
@pytest.mark.parametrize("between", [0, 2], ids=["at once", "after dense steps"])
def test_a_guard_that_went_with_restore_is_missed(form, between, options, again):
    """One warning, at the first step that would move masked weights; a new guard holds them, and takes the old one's hooks off."""
    model, optimiser, handle = guarded(form, **options)
    train(model, optimiser)
    fxmask.restore(model)
    assert handle.policies == {}
    train(model, optimiser, between)  # dense: nothing is said
    fxmask.apply(model, ratio=0.8)
    with pytest.warns(FxMaskWarning, match=ANEW) as caught:
        train(model, optimiser)
    assert len(caught) == 1 and caught[0].filename == __file__
    text = str(caught[0].message)
    assert "Masked weights move, steps do not count." in text and "where: 0.weight, 2.weight, 4.weight\n" in text
    assert "fix: call fxmask.guard(optimizer, model) again; or remove() on the handle of the old guard, if that is meant." in text
    train(model, optimiser)  # once
    assert handle.policies == {} and set(policies(model).values()) == {"left to the optimiser (no guard)"}
    assert fxmask.guard(optimiser, model, **again).policies.keys() == {"0.weight", "2.weight", "4.weight"}
    assert len(optimiser._optimizer_step_pre_hooks) == len(optimiser._optimizer_step_post_hooks) == 1
    masks = fxmask.masks(model)
    before = masked_part(model, masks)
    train(model, optimiser)
    assert torch.equal(masked_part(model, masks), before)


@pytest.mark.parametrize("form", ["module", "graph"])
def test_after_restore_a_guard_with_masked_step_is_in_no_new_ones_way(form):
    """Before any step, in which it lets go of what was restored."""
    model, optimiser, _ = guarded(form, masked_step=True)
    fxmask.apply(fxmask.restore(model), ratio=0.8)
    fxmask.guard(optimiser, model, masked_step=True)
    masks = fxmask.masks(model)
    before = masked_part(model, masks)
    train(model, optimiser)
    assert torch.equal(masked_part(model, masks), before) and [row["step"] for row in fxmask.explain(model).rows] == [1, 1, 1]


def test_what_was_restored_stays_dense_where_its_model_is_gone_and_others_are_masked():
    inner = net()
    whole = fxmask.apply(nn.Sequential(inner), ratio=0.5)
    optimiser = adamw(inner)
    handle = fxmask.guard(optimiser, whole)
    fxmask.restore(whole)
    train(inner, optimiser)
    del whole
    assert len(pickle.dumps(handle)) < 2000  # without the weights that it still knows of
    fxmask.apply(net(), ratio=0.5)
    train(inner, optimiser)  # warnings are errors here


def test_restore_alone_says_nothing():
    model, optimiser, _ = guarded()
    fxmask.restore(model)
    train(model, optimiser, 3)


def test_a_new_guard_is_enough():
    """The old one is left where it was, and says nothing."""
    model, optimiser, old = guarded()
    fxmask.restore(model)
    fxmask.apply(model, ratio=0.8)
    new = fxmask.guard(optimiser, model)
    train(model, optimiser, 2)
    assert old.policies == {} and set(new.policies.values()) == {"freeze"} and fxmask.explain(model).rows[0]["step"] == 2


def test_a_handle_that_was_removed_says_nothing():
    model, optimiser, handle = guarded()
    fxmask.restore(model)
    handle.remove()
    fxmask.apply(model, ratio=0.8)
    train(model, optimiser, 2)


def test_layers_that_the_new_masks_leave_dense():
    model, optimiser, _ = guarded()
    fxmask.restore(model)
    fxmask.apply(model, ratio=0.8, include="4")
    with pytest.warns(FxMaskWarning, match=rf"(?s){ANEW}.*where: 4.weight\n"):
        train(model, optimiser)
    model, optimiser, _ = guarded()
    fxmask.restore(model)
    fxmask.apply(model, fxmask.NMMask(2, 4))  # which no guard holds
    train(model, optimiser, 2)


def test_masks_of_another_optimiser():
    """Masked anew, but nothing that this optimiser moves."""
    model = fxmask.apply(net(), ratio=0.5)
    first, second = optim.SGD(model[0].parameters(), 0.1), optim.SGD(model[4].parameters(), 0.1)
    fxmask.guard(first, model)
    fxmask.restore(model)
    fxmask.apply(model, ratio=0.8, include="4")
    train(model, first)
    fxmask.guard(second, model)
    train(model, second)


def test_a_part_of_the_model():
    """The rest of it is guarded still."""
    model, optimiser, handle = guarded()
    fxmask.restore(model[0])
    fxmask.apply(model[0], ratio=0.8)
    with pytest.warns(FxMaskWarning, match=rf"(?s){ANEW}.*where: 0.weight\n"):
        train(model, optimiser)
    assert handle.policies == {"2.weight": "freeze", "4.weight": "freeze"}


@pytest.mark.parametrize("anew", [True, False])
def test_a_model_that_is_gone(anew):
    """The optimiser does not keep it; layers that live on elsewhere are told of all the same."""
    layers = [nn.Linear(64, 64), nn.Linear(64, 64)]
    whole = fxmask.apply(nn.ModuleList(layers), ratio=0.5)
    optimiser = optim.SGD(whole.parameters(), 0.1)
    fxmask.guard(optimiser, whole)
    seen, model = weakref.ref(whole), nn.Sequential(*layers)
    del whole
    gc.collect()
    assert seen() is None
    fxmask.restore(model)
    if anew:
        fxmask.apply(model, ratio=0.8)
        with pytest.warns(FxMaskWarning, match=rf"(?s){ANEW}.*where: 0.weight, 1.weight\n"):
            train(model, optimiser)
    train(model, optimiser)


def test_ordinary_steps_look_for_nothing(monkeypatch):
    """Neither walk over the model nor question to `apply` while nothing was restored."""
    model, optimiser, _ = guarded()

    def asked(*args):
        raise AssertionError("an ordinary step looks for new masks")

    monkeypatch.setattr("fxmask.guards.noticed.sites", asked)
    monkeypatch.setattr("fxmask.guards.noticed.decided_by_apply", asked)
    train(model, optimiser, 2)


LATE = "layers were masked after fxmask.guard, which does not hold them: expected a new guard, got none. Masked weights move, steps do not count."


@pytest.mark.parametrize("options", [{}, dict(masked_step=True), dict(masked_weights="free")], ids=["freeze", "masked_step", "free"])
def test_layers_masked_after_the_guard(options):
    """One warning, at the first step that would move their masked weights; the layers of before are guarded all along."""
    model = net()
    optimiser = adamw(fxmask.apply(model, ratio=0.5, include="0"))
    handle = fxmask.guard(optimiser, model, **options)
    train(model, optimiser)
    fxmask.apply(model, ratio=0.8, include=["2", "4"])
    with pytest.warns(FxMaskWarning, match=LATE) as caught:
        train(model, optimiser)
    assert len(caught) == 1 and caught[0].filename == __file__
    assert "where: 2.weight, 4.weight\n" in str(caught[0].message)
    train(model, optimiser)  # once
    assert handle.policies.keys() == {"0.weight"}
    handle.remove()
    assert fxmask.guard(optimiser, model, **options).policies.keys() == {"0.weight", "2.weight", "4.weight"}
    train(model, optimiser)


def test_masks_after_the_guard_that_are_none_of_its_concern():
    """Another model; weights of another optimiser; layers with a guard of their own."""
    model = net()
    fxmask.apply(model, ratio=0.5, include="0")
    optimiser = optim.SGD([p for p in model.parameters() if p is not model[2].weight], 0.1)
    fxmask.guard(optimiser, model)
    fxmask.apply(net(), ratio=0.5)
    fxmask.apply(model, ratio=0.8, include="2")
    train(model, optimiser)
    part = fxmask.apply(nn.Sequential(model[4]), ratio=0.8)
    fxmask.guard(optimiser, part)
    train(model, optimiser, 2)
