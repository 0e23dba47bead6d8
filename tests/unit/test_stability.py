"""`fxmask.stability`: values by hand, what it reads of a model, its table, and what it refuses."""

import copy
import math
from collections import OrderedDict

import pytest
import torch
from torch import nn

import fxmask
from fxmask.chains import SLOPES, slope_of
from fxmask.margins import EVERY, Stability


def tiny() -> nn.Sequential:
    """4 -> 2 -> 2, W1 = [[3, 0, 0, 0], [0, 4, 0, 1]], W2 = [[2, 2], [0, 0]], biases (0, 0) and (5, 0), in float64."""
    model = nn.Sequential(nn.Linear(4, 2), nn.Sigmoid(), nn.Linear(2, 2)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[3.0, 0, 0, 0], [0, 4, 0, 1]]))
        model[0].bias.zero_()
        model[2].weight.copy_(torch.tensor([[2.0, 2], [0, 0]]))
        model[2].bias.copy_(torch.tensor([5.0, 0]))
    return model


def masked() -> nn.Sequential:
    return fxmask.apply(tiny(), fxmask.NMMask(1, 4), include="0")  # leaves the 1 out


X = torch.tensor([[0.0, 0, 0, 0], [3, 0, 0, 4]], dtype=torch.float64)
HIDDEN = torch.sigmoid(torch.tensor([[0.0, 0], [9, 4]], dtype=torch.float64))


def close(got, want):
    torch.testing.assert_close(torch.as_tensor(got), torch.as_tensor(want, dtype=torch.float64), rtol=1e-12, atol=0)


def test_by_hand():
    moved = {"0.weight": tiny()[0].weight.detach() + torch.tensor([[0, 0, 0, 0], [0.5, 0, 0, -1.5]])}
    found = fxmask.stability(masked(), X, moved)
    gap = 5 + 2 * HIDDEN.sum(1)
    close(found.margin, torch.tanh(gap / 2) / 2)  # of two classes p1 - p2 = tanh(gap / 2)
    lengths, largest, norm = torch.tensor([0.0, 5]).double(), torch.tensor([0.0, 4]).double(), math.sqrt(8)  # of x; of W2, whose largest row sum is 4
    close(found.bounds["3.4"]["0"], 1 * lengths * 0.25 * norm)  # sigmoid: 1/4
    close(found.bounds["3.5"]["0"], math.sqrt(17) * lengths * 0.25 * norm)
    close(found.bounds["3.6"]["0"], (5 + 2) * largest * 0.25 * 4)
    assert "2" not in found.bounds["3.4"]
    close(found.bounds["3.5"]["2"], norm * HIDDEN.norm(dim=1))
    close(found.bounds["3.6"]["2"], 4 * HIDDEN.amax(1))
    close(found.bounds["3.4"][EVERY], 1 * lengths * 0.25 * norm)
    assert found.stable("3.4", "0").tolist() == [True, False] == (found.margin > found.bounds["3.4"]["0"]).tolist()
    row = found.rows[0]
    assert (row["name"], row["shape"], row["slope"], row["unchanged"]) == ("0", "2x4", 0.25, 2)
    assert (row["stable_3.4"], row["stable_3.5"], row["stable_3.6"]) == (1, 1, 1)
    assert row["norm"] == pytest.approx(math.sqrt(17)) and row["change"] == pytest.approx(1) and row["bound_3.4"] == pytest.approx(2.5 * 0.25 * norm)
    assert found.rows[1]["change"] is None and found.rows[1]["unchanged"] is None and found.rows[-1]["name"] == EVERY
    assert isinstance(found, Stability) and "all masks at once" in str(found) and found.to_dict()["rows"] == found.rows


def test_two_masks_by_hand():
    model = fxmask.apply(tiny(), fxmask.NMMask(1, 4), exclude=(), overrides={"2": dict(m=2)})  # W2 becomes [[2, 0], [0, 0]]
    close(fxmask.stability(model, X).bounds["3.4"][EVERY], 2 * (0.25 * torch.tensor([0.0, 5]).double()) + 2 * HIDDEN.norm(dim=1))


def test_as_printed():
    found = fxmask.stability(masked(), X, literal=True)
    close(found.bounds["3.5"]["2"], torch.tensor([0.0, 5]).double() * 0.25 * math.sqrt(17) * math.sqrt(8))
    close(found.bounds["3.6"]["2"], torch.tensor([0.0, 4]).double() * 0.25 * 5 * 4)
    assert [r["holds"] for r in found.rows] == [True, False]  # a sigmoid of 0 is not 0
    assert "only where `holds` is True: not for 2" in str(found) and EVERY not in found.bounds["3.4"]
    dense = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Linear(2, 2)).double()
    with torch.no_grad():
        dense[0].weight.copy_(torch.eye(2))
        dense[1].weight.copy_(torch.tensor([[1.0, 1], [-1, 1]]))  # without the -1 its norm is larger
    assert [r["holds"] for r in fxmask.stability(dense, X[:, :2], literal=True).rows] == [True, "not 3.5"]


@pytest.mark.parametrize("config", [fxmask.NMMask(), fxmask.NMMask(mode="learned"), fxmask.WeightMask(0.5, (4, 8)), fxmask.WeightMask(0.5, (5, 7), refresh=0)])
def test_masks_of_every_kind_are_those_of_the_forward(config):
    """`unchanged` is by W∘M: it counts what the masked model itself predicts."""
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Flatten(), nn.Linear(36, 32), nn.Dropout(0.5), nn.ELU(2.0), nn.Sequential(nn.Linear(32, 16), nn.Softplus()), nn.Softmax(dim=1))
    model, x = fxmask.apply(copy.deepcopy(dense), config), torch.randn(200, 6, 6)
    before = copy.deepcopy(model.state_dict())
    found = fxmask.stability(model, x)
    assert [r["name"] for r in found.rows] == ["1", "4.0", EVERY] and [r["slope"] for r in found.rows[:2]] == [2, 1]
    p = dense.eval()(x).double().topk(2, 1).values
    torch.testing.assert_close(found.margin, (p[:, 0] - p[:, 1]) / 2, rtol=0, atol=1e-6)
    assert model.training and all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))
    same = int((model.eval()(x).argmax(1) == dense(x).argmax(1)).sum())
    assert found.rows[-1]["unchanged"] == same < 200
    change = fxmask.finalize(copy.deepcopy(model)).get_parameter("1.weight") - dense.get_parameter("1.weight")
    assert found.rows[0]["change"] == pytest.approx(float(torch.linalg.matrix_norm(change.detach().double(), 2)), rel=1e-6)


def test_inputs_are_the_callers():
    """A module in front that works in place works on a copy."""
    x = X - 1
    fxmask.stability(nn.Sequential(nn.ReLU(inplace=True), *tiny()), x)
    assert torch.equal(x, X - 1)


def test_dropouts_that_rest():
    class Named(nn.Dropout):
        pass

    model = nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Dropout(0.5), nn.Linear(32, 32), nn.ReLU(), Named(0.5), nn.Linear(32, 4))
    fxmask.apply(model, fxmask.BlockDropout(0.5, (4, 4)), include="3")
    assert "fused into the next linear" in repr(model[2])
    assert [r["name"] for r in fxmask.stability(model, torch.randn(8, 32)).rows] == ["0", "3", "6"]


def test_a_linear_alone_and_a_broken_weight():
    linear = nn.Linear(8, 3)
    assert [r["name"] for r in fxmask.stability(linear, torch.randn(4, 8), {"weight": linear.weight + 1}).rows] == [""]
    linear.weight.data[0, 0] = math.nan
    assert fxmask.stability(linear, torch.randn(4, 8)).rows[0]["stable_3.5"] == 0


def test_a_module_in_several_places_runs_in_each():
    act = nn.Sigmoid()
    layers = [nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 3)]
    x = torch.randn(5, 4)
    one, several = (nn.Sequential(layers[0], a, layers[1], b, layers[2]) for a, b in ((act, act), (nn.Sigmoid(), nn.Sigmoid())))
    moved = {"0.weight": layers[0].weight.detach() * 0.99}
    found, expected = (fxmask.stability(m, x, moved) for m in (one, several))
    assert torch.equal(found.margin, expected.margin)
    for name, layers_of in expected.bounds.items():
        for layer, bound in layers_of.items():
            assert torch.equal(found.bounds[name][layer], bound)


@pytest.mark.parametrize("kind", [*SLOPES, lambda: nn.LeakyReLU(0.3), lambda: nn.LeakyReLU(-2), lambda: nn.ELU(0.5), lambda: nn.ELU(3)])
def test_slopes_are_the_largest_there_are(kind):
    m, x = kind(), torch.linspace(-9, 9, 18001, dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(m(x).sum(), x)
    most, said = float(slope.abs().max()), slope_of(m, "")
    assert most <= said <= 1.002 * most


class Own(nn.Sequential):
    def forward(self, x):
        return super().forward(x) + 1


def hooked() -> nn.Sequential:
    model = tiny()
    model[1].register_forward_hook(lambda m, args, y: y + 1)
    return model


SOFT = dict(block=(4, 4), schedule=fxmask.Schedule("cubic", steps=10), soft=True)
class Doubled(nn.Dropout):
    def forward(self, x):
        return 2 * x


UPDATE = torch.ones(2, 4)
WRONG = {
    "conv": (lambda: fxmask.stability(nn.Sequential(nn.Conv2d(1, 2, 3)), X), "expected an nn.Sequential of Linear, .* got Conv2d"),
    "norm": (lambda: fxmask.stability(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)), X), "got LayerNorm"),
    "no chain": (lambda: fxmask.stability(nn.MultiheadAttention(4, 2), X), "got MultiheadAttention"),
    "own forward": (lambda: fxmask.stability(Own(nn.Linear(4, 4)), X), "got Own"),
    "a layer twice": (lambda: fxmask.stability(nn.Sequential(layer := nn.Linear(4, 4), nn.ReLU(), layer), X.float()), "a weight in two places"),
    "hooks": (lambda: fxmask.stability(hooked(), X), "forward hooks"),
    "a dropout with a forward of its own": (lambda: fxmask.stability(nn.Sequential(nn.Linear(4, 4), Doubled(), nn.Linear(4, 4)), X), "got Doubled"),
    "softmax inside": (lambda: fxmask.stability(nn.Sequential(nn.Linear(4, 4), nn.Softmax(1), nn.Linear(4, 4)), X), "a softmax before the end"),
    "softmax over the batch": (lambda: fxmask.stability(nn.Sequential(nn.Linear(4, 4), nn.Softmax(0)), X), r"over dim=0, which (?s:.*)fix: Softmax\(dim=1\)"),
    "no linear": (lambda: fxmask.stability(nn.Sequential(nn.ReLU()), X), "no Linear at all"),
    "no features": (lambda: fxmask.stability(_empty(), X), r"with elements, got shape \(0, 4\)"),
    "no module": (lambda: fxmask.stability(nn.Sequential(OrderedDict(a=nn.Linear(4, 2), b=None)), X), r"got None(?s:.*)where: b\n"),
    "one class": (lambda: fxmask.stability(nn.Linear(4, 1), X), "at least two classes"),
    "inputs": (lambda: fxmask.stability(tiny(), [1.0]), "a floating tensor with elements, got list"),
    "integers": (lambda: fxmask.stability(tiny(), X.long()), "got torch.int64"),
    "shape": (lambda: fxmask.stability(tiny(), X[:, :3]), r"expected \(B, 4\) at the first Linear"),
    "tokens": (lambda: fxmask.stability(tiny(), X[None]), r"got \(1, 2, 4\)"),
    "meta": (lambda: fxmask.stability(tiny().to("meta"), X), "needs the weight's values"),
    "names": (lambda: fxmask.stability(tiny(), X, {"fc.weight": X}), "some of 0.weight, 2.weight, got fc.weight"),
    "updated's type": (lambda: fxmask.stability(tiny(), X, {"0.weight": [1.0]}), r"\['0.weight'\]: expected a dense tensor of real numbers, got list"),
    "complex updates": (lambda: fxmask.stability(tiny(), X, {"0.weight": UPDATE.cfloat()}), r"of real numbers, got torch\.complex64"),
    "meta updates": (lambda: fxmask.stability(tiny(), X, {"0.weight": UPDATE.to("meta")}), r"got a meta tensor(?s:.*)where: 0\.weight"),
    "sparse updates": (lambda: fxmask.stability(tiny(), X, {"0.weight": UPDATE.to_sparse()}), r"got torch\.float32, torch\.sparse_coo"),
    "updated's shape": (lambda: fxmask.stability(tiny(), X, {"0.weight": X.T}), r"updated\['0.weight'\]: expected shape \(2, 4\)"),
    "soft": (lambda: fxmask.stability(_soft(), torch.randn(2, 32)), "a soft mask on its ramp"),
    "dropping": (lambda: fxmask.stability(fxmask.apply(nn.Sequential(nn.Linear(32, 32)), fxmask.BlockDropout(0.1, mc=True), include="0"), X), "mc=True"),
}


def _empty() -> nn.Sequential:
    model = tiny()
    model[0].weight, model[2].weight = nn.Parameter(torch.empty(0, 4)), nn.Parameter(torch.empty(2, 0))
    return model


def _soft() -> nn.Sequential:
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 32)), fxmask.WeightMask(0.5, **SOFT))
    fxmask.step(model, 0)
    return model


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    call, words = WRONG[case]
    with pytest.raises(fxmask.FxMaskError, match=words):
        call()
