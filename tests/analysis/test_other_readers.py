"""Weights that are read by other ways than a linear call: views that somebody holds, masks that a trace was given, ops that fill zeros or move them."""

import pytest
import torch
import torch.nn.functional as F
from analysis.counted import Apply, Reads, analyze
from analysis.unchanged import unchanged
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import fxmask
from fxmask.kernels.grid import expand_mask

TOKENS, BLOCK = 24, (16, 16)
DENSE = 2 * TOKENS * 48 * 64


def masked(how, **options):
    torch.manual_seed(0)
    return fxmask.apply(Reads(how), fxmask.WeightMask(0.75, BLOCK, **options), overrides={"fc": {"read": "weight"}})


def tokens():
    return torch.randn(TOKENS, 64, requires_grad=True)


def of_phases(report, name="flop"):
    return tuple(report.summary[name].get(phase, 0) for phase in ("fwd", "bwd_dx", "bwd_dw"))


# ---- views that somebody holds -------------------------------------------------------------------------------------------------------------------------


class Held(nn.Module):
    """A view of the weight that was made before: an attribute, in a list, or in a closure."""

    def __init__(self, where, made):
        super().__init__()
        self.fc = nn.Linear(64, 48, bias=False)
        view = made(self.fc.weight)
        if where == "attribute":
            self.view = view
        elif where == "list":
            self.views = [view]
        self.find = {"attribute": lambda: self.view, "list": lambda: self.views[0], "closure": lambda: view}[where]

    def forward(self, x):
        return x @ self.find()


@pytest.mark.parametrize("where", ["attribute", "list", "closure"])
@pytest.mark.parametrize("had", [None, 1.0])
def test_a_view_of_a_weight_that_somebody_holds(where, had):
    """Its gradient is the weight's, which stays what it was; no op is unknown for being given a real tensor."""
    model, x = Held(where, lambda w: w.t()), tokens()
    model.fc.weight.grad = had and torch.full((48, 64), had)
    unchanged(model, lambda: analyze(model, x))
    report = analyze(model, x)
    assert of_phases(report) == (DENSE,) * 3 and not report.tables["coverage"]
    assert [r["op"] for r in report.tables["nodes"] if r["phase"] == "opt"] == ["optim.adamw"], "it is trained"
    made = [r["module"] for r in report.tables["modules"] if r["params"]]
    assert made == ["(model)", "fc"] and (model.fc.weight.grad is None) == (had is None)


def test_a_view_without_a_gradient_and_one_on_the_meta_device():
    report = analyze(Held("attribute", lambda w: w.detach().t()), tokens())
    assert of_phases(report) == (DENSE, DENSE, 0) and not report.tables["coverage"]
    with torch.device("meta"):
        model = Held("attribute", lambda w: w.t())
    assert of_phases(analyze(model, tokens())) == (DENSE,) * 3


def test_a_view_past_a_mask_is_told_of():
    """What reads it runs densely, whatever the layer says of itself."""
    model = fxmask.apply(Held("closure", lambda w: w.t()), ratio=0.75, block=BLOCK)
    report = analyze(model, tokens())
    assert of_phases(report) == (DENSE,) * 3 and not any("No layer is masked" in n for n in report.notes)
    assert any(n.startswith("No product here reads any of the 1 masked weights with its mask: dense") for n in report.notes)
    assert "1 products read masked weights past their masks, such as mm of fc.weight in (model): they run densely." in report.notes
    assert not [n for n in analyze(masked(F.linear), tokens()).notes if "past their masks" in n or n.startswith("No product")]


def test_what_is_made_of_another_models_weight_leaves_no_gradient_there():
    other = nn.Linear(64, 48)
    twice = (other.weight * 2).t()
    assert sum(of_phases(analyze(Apply(lambda x: x @ twice), tokens()))) == 3 * DENSE and other.weight.grad is None


# ---- what is made of a masked weight -------------------------------------------------------------------------------------------------------------------

KEEP = {
    "relu": lambda w: w.relu(),
    "tanh": lambda w: w.tanh() * 3,
    "abs": lambda w: w.abs(),
    "normalised": F.normalize,
    "rolled": lambda w: w.roll(1, 0),
    "rows in another order": lambda w: w[torch.arange(47, -1, -1)],
    "dropped": lambda w: F.dropout(w, 0.5),
    "cast": lambda w: w.bfloat16().float(),
}
FILL = {
    "exp": lambda w: w.exp(),
    "sigmoid": lambda w: w.sigmoid(),
    "softmax": lambda w: w.softmax(-1),
    "cos": lambda w: w.cos(),
    "a lower bound": lambda w: w.clamp(min=0.1),
    "layer norm": lambda w: F.layer_norm(w, (64,)),
    "sums": lambda w: w.cumsum(0),
    "reciprocal": lambda w: w.reciprocal(),
    "divides": lambda w: torch.ones(48, 64) / w,
}


@pytest.mark.parametrize("name", [*KEEP, *FILL])
def test_zeros_that_an_op_keeps_are_left_out_and_those_that_it_fills_are_not(name):
    made = {**KEEP, **FILL}[name]
    report = analyze(masked(lambda x, w: F.linear(x, made(w))), tokens())
    assert of_phases(report) == ((DENSE // 4 if name in KEEP else DENSE),) * 3 and of_phases(report, "flop_dense") == (DENSE,) * 3
    assert report.summary["params_kept"] == 48 * 64 // 4


MODES = [("masked", 0), ("ste", 0), ("rigl", 0), ("rigl", 1)]  # and the step: of rigl every second one is dense


@pytest.mark.parametrize("refresh", [1, 3])
@pytest.mark.parametrize(("mode", "step"), MODES)
@pytest.mark.parametrize("layer", ["read", "convolution"])
def test_the_weights_gradient_in_a_trace_is_counted_as_in_the_model(layer, mode, step, refresh):
    """A trace holds ops and no mode: which blocks of dW are wanted is what its ops let through."""
    config = fxmask.WeightMask(0.75, BLOCK, backward=mode, refresh=refresh, dense_every=2)
    torch.manual_seed(0)
    if layer == "read":
        model, x = fxmask.apply(Reads(F.linear), config, overrides={"fc": {"read": "weight"}}), tokens()
    else:
        model, x = fxmask.apply(nn.Sequential(nn.Conv2d(32, 32, 3, bias=False)), config, layers=nn.Conv2d), torch.randn(2, 32, 8, 8, requires_grad=True)
    fxmask.step(model, step)
    plain, traced = analyze(model, x), analyze(torch.export.export(model, (x,)).module(), x)
    forward, _, dw = of_phases(plain)
    assert dw == (4 * forward if mode == "ste" or (mode, step) == ("rigl", 1) else forward)
    for name in ("flop", "flop_dense", "flop_executed"):
        assert of_phases(traced, name) == of_phases(plain, name), name


@pytest.mark.parametrize("mode", ["masked", "ste", "rigl"])
def test_masks_that_a_graph_of_dynamo_is_given(mode):
    """A cached mask is an input of it, and so is the flag of `rigl`."""
    model, x, found = masked(F.linear, backward=mode, refresh=3), tokens(), []
    fxmask.step(model, 1)

    def backend(gm, inputs):
        found.append(analyze(gm, *inputs))
        return gm.forward

    torch._dynamo.reset()
    torch.compile(model, backend=backend)(x)
    (report,), plain = found, analyze(model, x)
    assert of_phases(report) == of_phases(plain) == (DENSE // 4, DENSE // 4, DENSE if mode == "ste" else DENSE // 4)
    assert report.summary["params_kept"] == plain.summary["params_kept"] == 48 * 64 // 4


@pytest.mark.parametrize("read", ["call", "weight"])
def test_a_cached_mask_in_a_graph_of_make_fx(read):
    """Its constants are buffers."""
    torch.manual_seed(0)
    model, x = fxmask.apply(Reads(F.linear) if read == "weight" else nn.Sequential(nn.Linear(64, 48)), ratio=0.75, block=BLOCK, refresh=0), tokens()
    assert of_phases(analyze(make_fx(model)(x), x)) == (DENSE // 4,) * 3


DENSELY = {
    "keys": (lambda x, w: F.scaled_dot_product_attention(x[None, None], w[None, None], w[None, None]), "_scaled_dot_product"),
    "rows": (lambda x, w: x @ w[:5].clone().t(), "mm"),
    "joined": (lambda x, w: F.linear(x, torch.cat([w, w])), "mm"),
    "repeated": (lambda x, w: F.linear(x, w.repeat(2, 1)), "mm"),
    "transposed convolution": (lambda x, w: F.conv_transpose1d(x.t()[None], w.t()[:, :, None]), "convolution"),
}


@pytest.mark.parametrize("name", DENSELY)
def test_products_with_a_masked_weight_that_are_counted_densely_are_told_of(name):
    how, op = DENSELY[name]
    report = analyze(masked(how), tokens())
    assert report.summary["flop"]["fwd"] == report.summary["flop_dense"]["fwd"] > 0
    (said,) = (n for n in report.notes if "made of W∘M" in n)
    assert said.startswith("1 products with what is made of W∘M are counted densely, an upper bound") and op in said


@pytest.mark.parametrize("how", [F.linear, lambda x, w: F.linear(x, w.exp()), lambda x, w: F.linear(x, w + 1)], ids=["masked", "filled", "added to"])
def test_products_that_are_counted_as_they_are_have_no_such_note(how):
    assert not [n for n in analyze(masked(how), tokens()).notes if "made of W∘M" in n]


# ---- what stands where the mask leaves something out ----------------------------------------------------------------------------------------------------

COLUMNS = torch.arange(64) < 32
TWO = torch.tensor([0.0, 0.5])
CHOSEN = {
    "by its sign, or a number": lambda w: torch.where(w > 0, w, 0.5),
    "by its sign, or a tensor": lambda w: torch.where(w > 0, w, torch.tensor(0.5)),
    "by its sign, or 0": lambda w: torch.where(w > 0, w, 0),
    "by its sign, or itself": lambda w: torch.where(w > 0, 1.0, w),
    "of two numbers": lambda w: torch.where(w > 0, 1.0, -1.0),
    "of two numbers, one of which is 0": lambda w: torch.where(w < 1e-3, 1.0, 0.0),
    "its own negative": lambda w: torch.where(w < 0, -w, w),
    "filled where small": lambda w: w.masked_fill(w < 1e-3, 0.7),
    "cut where small": lambda w: w.masked_fill(w < 1e-3, 0),
    "0 where small": lambda w: torch.where(w < 1e-3, 0.0, w),
    "whether it is large": lambda w: (w > 1e-3).float(),
    "whether it is small": lambda w: (w < 1e-3).float(),
    "multiplied by that": lambda w: w * (w > 1e-3),
    "by its sign, or ones": lambda w: torch.where(w > 0, w, torch.ones_like(w)),
    "by its sign, or zeros": lambda w: torch.where(w > 0, w, torch.zeros_like(w)),
    "by its sign, or a 1": lambda w: torch.where(w > 0, w, torch.ones(())),
    "by its sign, or a full 2": lambda w: torch.where(w > 0, w, torch.full((), 2.0)),
    "by its sign, or a 0 of another dtype": lambda w: torch.where(w > 0, w, torch.zeros((), dtype=torch.float64).to(w.dtype)),
    "by its sign, or a 0 that was overwritten": lambda w: torch.where(w > 0, w, torch.scalar_tensor(0.0).fill_(0.5)),
    "by its sign, or its mean": lambda w: torch.where(w > 0, w, w.mean()),
    "by its column, or a number made of it": lambda w: torch.where(COLUMNS, w, w.exp()),
    "by its column, or its difference from itself": lambda w: torch.where(COLUMNS, w, w - w),
    "by its column, or its difference from another": lambda w: torch.where(COLUMNS, w, w - w.mean()),
    "filled where large, by a tensor": lambda w: w.masked_fill(w > 1e-3, torch.tensor(0.7)),
    "filled where small, in place": lambda w: w.clone().masked_fill_(w < 1e-3, 0.7),
    "cut where small, in place": lambda w: w.clone().masked_fill_(w < 1e-3, 0),
    "overwritten": lambda w: w.clone().copy_(torch.ones(48, 64)),
    "bits of its sign": lambda w: ((w > 0).int() & 1).float(),
    "cut by what is not small": lambda w: torch.where(torch.isfinite(w), w, 0.0),
}


@pytest.mark.parametrize("name", CHOSEN)
def test_what_is_chosen_by_a_masked_weight_counts_where_it_is_not_zero(name):
    """Compared with the values of a real run: zeros outside of kept blocks, or none there that is one for its mask."""
    made, found = CHOSEN[name], []

    def how(x, w):
        found.append(made(w))
        return F.linear(x, found[-1])

    model, x = masked(how), tokens()
    model(x)
    outside = ~expand_mask(fxmask.masks(model)["fc.weight"], (48, 64), BLOCK)
    zeros = not found[0].detach()[outside].any()
    report = analyze(model, x)
    assert report.summary["flop"]["fwd"] == (DENSE // 4 if zeros else DENSE) and report.summary["flop_dense"]["fwd"] == DENSE
    assert report.summary["params_kept"] == 48 * 64 // 4


def test_a_weight_that_is_expanded_over_a_batch_is_loaded_once():
    """As 3 equal matrices of a batched product; without a mask, and with one."""
    def how(x, w):
        return torch.bmm(x.view(3, 8, 64), w.t().expand(3, -1, -1))

    for model, kept in ((Reads(how), 48 * 64), (masked(how), 48 * 64 // 4)):
        report = analyze(model, tokens())
        assert report.summary["flop"]["fwd"] == 2 * TOKENS * kept and report.summary["weights_loaded"] == kept


@pytest.mark.parametrize("mode", ["masked", "ste"])
def test_a_condition_of_the_models_own_takes_nothing_from_a_modes_gradient(mode):
    """It is wanted in kept blocks, by ste everywhere, as without the condition."""
    model = masked(lambda x, w: F.linear(x, torch.where(COLUMNS, w, 0)), backward=mode)
    assert of_phases(analyze(model, tokens()))[::2] == (DENSE // 4, DENSE if mode == "ste" else DENSE // 4)


def test_an_element_of_a_buffer_is_a_constant_of_no_known_value():
    model = masked(lambda x, w: F.linear(x, torch.where(w > 0, w, model.two[1])))
    model.register_buffer("two", TWO.clone())
    assert of_phases(analyze(model, tokens())) == (DENSE, DENSE, DENSE)
