"""fxmask.allocate on models: which layers take part, tokens, shared weights, `apply(allocation=...)`, and what cannot be met."""

import copy
from fractions import Fraction

import pytest
import torch
from sample_models import Attention, Residual, mlp
from torch import fx, nn

import fxmask
from fxmask.errors import ConfigError, StateError, UnsupportedError
from fxmask.passes.settings.allocation import Item, check_budget, proportional


def big():
    """192 tokens in every layer for an input of (3, 64, 64)."""
    return Residual(tokens=64, dim=64)


def same(a, b):
    return list(a) == list(b) and all(torch.equal(m, b[n]) for n, m in a.items())


@pytest.mark.parametrize("method", ["uniform", "erk", "global", "byte"])
@pytest.mark.parametrize("form", [lambda m: m, fx.symbolic_trace], ids=["module", "graph"])
def test_apply_with_an_allocation_is_apply_with_its_ratios(method, form):
    found = fxmask.allocate(form(mlp()), 0.6, method)
    by_hand = fxmask.apply(form(mlp()), ratio=0.6, overrides=found.overrides)
    model = fxmask.apply(form(mlp()), ratio=0.6, allocation=method)
    assert same(fxmask.masks(model), fxmask.masks(by_hand))
    assert [r["final_ratio"] for r in fxmask.explain(model).rows if r["masked"]] == list(found.values())


def test_what_rounding_leaves_goes_to_the_largest_remainders():
    items = [Item(10, 1, 10)] * 3
    for shares, kept in (([2.25, 3.75, 4.0], [2, 4, 4]), ([2.75, 3.75, 3.5], [3, 4, 3]), ([2.5, 3.5, 4.0], [3, 3, 4])):
        assert proportional(items, [Fraction(s) for s in shares], 10) == kept


def test_a_budget_of_one_block_a_layer_is_one():
    items = [Item(10, 3, 30), Item(4, 5, 18)]
    check_budget(items, 8, 0.8, "bytes")
    with pytest.raises(ConfigError, match=r"leaves 7 of 48 bytes, and one block in each of 2 layers is 8; expected a ratio of at most 0\.8333"):
        check_budget(items, 7, 0.9, "bytes")


def test_a_ramp_ends_at_each_layers_ratio():
    found = fxmask.allocate(mlp(), 0.6, "erk")
    config = fxmask.WeightMask(ratio=0.6, schedule=fxmask.Schedule("linear", steps=4), criterion="l1")
    model = fxmask.apply(mlp(), config, allocation="erk")
    fxmask.step(model, 0)
    assert all(m.all() for m in fxmask.masks(model).values())
    fxmask.step(model, 4)
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == list(found.kept.values())


def test_erk_by_hand():
    """(64, 64) and (256, 64): 16 and 64 blocks, densities as 8 to 5, so shares as 128 to 320: of 20 blocks 5.71 and 14.29."""
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 256))
    found = fxmask.allocate(model, 0.75, "erk")
    assert found.kept == {"0": 6, "1": 14} and found.budget == found.spent == 20 and found.total == 80 and found.unit == "blocks"
    assert found == {"0": 0.625, "1": 0.78125}


def test_erk_keeps_a_small_layer_whole():
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 512))
    assert fxmask.allocate(model, 0.25, "erk").kept == {"0": 4, "1": 47}  # eps of the big layer alone: 51 - 4


def test_flop_prefers_layers_that_see_fewer_tokens():
    """Two layers with the same weights; the second runs twice on more tokens."""

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.a = nn.Linear(64, 64)
            self.b = copy.deepcopy(self.a)

        def forward(self, x, y):
            return self.a(x).sum() + self.b(self.b(y)).sum()

    x, y = torch.zeros(3, 64), torch.zeros(2, 6, 64)  # 3 and 24 tokens
    found = fxmask.allocate(Two(), 0.5, "flop", inputs=(x, y))
    assert found.total == 2 * 4096 * 27 and found.budget == found.total // 2 and found.unit == "FLOP"
    assert found.kept["a"] == 16 > found.kept["b"]  # eight times cheaper, and its mean squares are the same
    assert found.spent == 2 * 256 * (3 * 16 + 24 * found.kept["b"]) <= found.budget < found.spent + 2 * 256 * 24
    by_name = fxmask.allocate(Two(), 0.5, "flop", inputs={"x": x.to("meta")}, kwargs={"y": y})
    assert by_name == found and by_name.spent == found.spent
    swapped = fxmask.allocate(Two(), 0.5, "flop", inputs=(y, x))  # 12 tokens, and twice 3
    assert swapped.total == 2 * 4096 * 18 and swapped.kept["b"] > swapped.kept["a"]


def test_flop_of_whatever_calls_the_weight():
    """Transposed inputs, a weight that attention reads, a parametrised one, a graph."""
    found = fxmask.allocate(big(), 0.5, "flop", inputs=torch.zeros(3, 64, 64))
    assert found.total == 2 * 192 * sum(m.weight.numel() for m in big().modules() if isinstance(m, nn.Linear))
    graph = fxmask.allocate(fx.symbolic_trace(big()), 0.5, "flop", inputs=torch.zeros(3, 64, 64))
    assert {"mix", "fc1", "fc2"} < set(graph) and graph.total > found.total  # and the functional linear
    found = fxmask.allocate(Attention(), 0.5, "flop", block=(8, 8), inputs=torch.zeros(3, 10, 32))
    assert found.total == 2 * 30 * (32 * 32 + 48 * 32)
    normed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(64, 64)))
    assert fxmask.allocate(normed, 0.5, "flop", inputs=torch.zeros(7, 64)).total == 2 * 7 * 4096


def test_byte_counts_the_dtypes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64, dtype=torch.float64))
    model[1].weight.data.copy_(model[0].weight.data)
    found = fxmask.allocate(model, 0.5, "byte")
    assert found.total == 4096 * 12 and found.unit == "bytes" and found.kept["0"] > found.kept["1"]
    assert found.budget - 256 * 8 < found.spent == 256 * (4 * found.kept["0"] + 8 * found.kept["1"]) <= found.budget


def test_blocks_of_several_sizes_compare():
    """By mean squares: cutting a layer finer changes what a block costs, not what an element is worth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(128, 128), nn.Linear(128, 128))
    model[1].weight.data.mul_(3)
    found = fxmask.allocate(model, 0.5, "global", block=(32, 32), overrides={"1": dict(block=(16, 16))})
    assert found.blocks == {"0": 16, "1": 64} and found.unit == "times 256 elements" and found.total == 128 and found.budget == found.spent == 64
    assert found.kept == {"0": 1, "1": 60}  # layer 1 is worth nine times as much; one block of layer 0 stays
    odd = fxmask.allocate(nn.Sequential(nn.Linear(96, 96), nn.Linear(96, 96)), 0.5, "erk", block=(32, 32), overrides={"1": dict(block=(24, 24))})
    assert (odd.unit, odd.total, odd.budget) == ("times 64 elements", 288, 144)  # blocks of 1,024 and of 576
    assert odd.spent == 16 * odd.kept["0"] + 9 * odd.kept["1"] <= 144


def test_broken_blocks_rank_first():
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    model[1].weight.data.mul_(1e-3)
    model[1].weight.data[::16, ::16] = float("nan")  # in all 16 blocks
    assert fxmask.allocate(model, 0.5, "global").kept == {"0": 1, "1": 15}


def test_layers_that_share_a_weight():
    model = mlp(sizes=(64, 64, 64, 64))
    model[2].weight = model[0].weight
    found = fxmask.allocate(model, 0.5, "global")
    assert found["0"] == found["2"] and found.total == 32 and sum(found.kept[n] for n in ("0", "4")) == 16
    fxmask.apply(model, ratio=0.5, overrides=found.overrides)
    assert fxmask.allocate(copy.deepcopy(fxmask.restore(model)), 0.5, "flop", inputs=torch.zeros(5, 64)).total == 2 * 5 * 3 * 4096


def test_who_takes_part():
    """As in apply: default exclusions, include, exclude, overrides; a layer whose override names a ratio has no part in the budget."""
    assert list(fxmask.allocate(mlp(), 0.5, "erk")) == ["0", "2"]
    assert list(fxmask.allocate(mlp(), 0.5, "erk", exclude="0")) == ["2"]
    assert list(fxmask.allocate(mlp(), 0.5, "erk", include=["2", "4"], block=(2, 2))) == ["2", "4"]
    pinned = {"0": dict(ratio=0.25)}
    found = fxmask.allocate(mlp(), 0.5, "global", overrides=pinned)
    assert list(found) == ["2"] and found.total == 24 and found.kept == {"2": 12}
    model = fxmask.apply(mlp(), ratio=0.5, allocation="global", overrides=pinned)
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [18, 12]
    assert fxmask.allocate(mlp(), 0.5, "erk", overrides={"*": dict(ratio=0.25)}) == {}


def test_the_last_override_that_matches_says_whether_a_ratio_is_named():
    """As it says in apply what else a layer has: options do not add up."""
    changes = {"*": dict(ratio=0.25), "0": dict(backward="ste"), "2": dict(ratio=0.75)}
    found = fxmask.allocate(mlp(), 0.5, "erk", overrides=changes)
    assert list(found) == ["0"] and found["0"] == pytest.approx(0.5, abs=0.05)
    model = fxmask.apply(mlp(), ratio=0.5, allocation="erk", overrides=changes)
    assert [r["final_ratio"] for r in fxmask.explain(model).rows if r["masked"]] == [found["0"], 0.75]
    both = {"*": dict(ratio=0.25), "0": dict(backward="ste"), "2": dict(backward="ste")}
    assert list(fxmask.allocate(mlp(), 0.5, "erk", overrides=both)) == ["0", "2"]


@pytest.mark.filterwarnings("ignore:allocation by:fxmask.FxMaskWarning")
def test_nothing_is_changed():
    model = Residual()
    before = copy.deepcopy(model.state_dict())
    state = torch.get_rng_state()
    fxmask.allocate(model, 0.5, "flop", block=(8, 8), inputs=torch.zeros(3, 32, 32))
    assert all(torch.equal(t, before[n]) for n, t in model.state_dict().items()) and torch.equal(state, torch.get_rng_state())
    assert type(model.fc1) is nn.Linear and model.training


def meta():
    with torch.device("meta"):
        return mlp()


class Half(nn.Module):
    def __init__(self):
        super().__init__()
        self.used, self.unused = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        return self.used(x)


X = torch.zeros(2, 64)
WRONG = {
    "method": (mlp, 0.5, dict(method="fair"), ConfigError, "unknown allocation method: expected one of uniform, erk, global, flop, byte, got 'fair'"),
    "ratio": (mlp, 1.0, dict(method="erk"), ConfigError, r"expected a finite number in \[0, 1\), got 1.0"),
    "erk": (mlp, 0.99, dict(method="erk"), ConfigError, "leaves 1 of 48 blocks, and one block in each of 2 layers is 2; expected a ratio of at most 0.9583"),
    "global": (mlp, 0.99, dict(method="global"), ConfigError, "a budget that cannot be met: ratio=0.99 leaves 1 of 48 blocks"),
    "flop": (mlp, 0.97, dict(method="flop", inputs=X), ConfigError, "1,474 of 49,152 FLOP, and one block in each of 2 layers is 2,048; .* at most 0.9583"),
    "byte": (mlp, 0.97, dict(method="byte"), ConfigError, "leaves 1,474 of 49,152 bytes"),
    "inputs": (mlp, 0.5, dict(method="flop"), ConfigError, "expected inputs= with the model's arguments, got NoneType"),
    "unreached": (Half, 0.5, dict(method="flop", inputs=X[:, :32]), ConfigError, "(?s)no FLOP of 'unused' in a forward with these inputs.*exclude='unused'"),
    "meta": (meta, 0.5, dict(method="global"), UnsupportedError, "(?s)needs the weights' values.*where: 0.*method='erk'"),
    "no model": (lambda: 3, 0.5, {}, ConfigError, "fxmask.allocate: expected an nn.Module, got int"),
    "compiled": (lambda: torch.compile(mlp()), 0.5, {}, UnsupportedError, r"one that is compiled\.(?s:.*)call fxmask\.allocate on the plain module first"),
    "wrapped": (lambda: nn.DataParallel(mlp()), 0.5, {}, UnsupportedError, "fxmask.allocate: .* one that is wrapped"),
    "masked": (lambda: fxmask.apply(mlp()), 0.5, {}, StateError, "masked already"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    make, ratio, options, error, text = WRONG[case]
    with pytest.raises(error, match=text):
        fxmask.allocate(make(), ratio, **options)


def test_wrong_use_of_apply():
    model = mlp()
    with pytest.raises(ConfigError, match=r"(?s)apply\(allocation='flop'\) has no inputs.*fxmask.allocate\(model, ratio, 'flop', inputs=x\)"):
        fxmask.apply(model, allocation="flop")
    with pytest.raises(ConfigError, match="a budget that cannot be met"):
        fxmask.apply(model, ratio=0.99, allocation="erk")
    with pytest.raises(ConfigError, match="unknown allocation method"):
        fxmask.apply(model, allocation="Erk")
    with pytest.raises(ConfigError, match=r"(?s)apply\(allocation='erk'\) has nothing to share out: overrides= names the ratio of each of 2 layers.*where: 0"):
        fxmask.apply(model, allocation="erk", overrides={"*": dict(ratio=0.25)})
    assert type(model[0]) is nn.Linear


def test_meta_weights_will_do_where_only_shapes_count():
    assert fxmask.allocate(meta(), 0.5, "erk") == fxmask.allocate(mlp(), 0.5, "erk")


@pytest.mark.parametrize("method", ["global", "flop", "byte"])
def test_a_layer_that_is_nearly_cut_out_is_told_of(method):
    """Fresh weights: PyTorch's initialiser gives wide rows small values."""
    torch.manual_seed(0)
    model, inputs = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 64)), torch.zeros(4, 64) if method == "flop" else None
    with pytest.warns(fxmask.FxMaskWarning, match=rf"(?s)by '{method}' nearly cuts layers out.*where: 2 \(\d of 128 blocks\).*'erk'") as caught:
        found = fxmask.allocate(model, 0.5, method, inputs=inputs)
    assert found.kept["2"] < 6 and len(caught) == 1 and caught[0].filename == __file__
    assert min(fxmask.allocate(model, 0.5, "erk").kept.values()) > 50
