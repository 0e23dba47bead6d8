"""What counts as a Linear and as an Embedding by what it computes: subclasses with nn.Linear's forward written anew, tables of classes of their own."""

import copy
import functools

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fxmask
from fxmask.errors import FxMaskWarning
from fxmask.passes.finding.plain_forward import computes_linear


class Scripted(nn.Linear):
    """As timm has it in the heads of most of its models."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        if torch.jit.is_scripting():
            bias = self.bias.to(dtype=input.dtype) if self.bias is not None else None
            return F.linear(input, self.weight.to(dtype=input.dtype), bias=bias)
        else:
            return F.linear(input, self.weight, self.bias)


class Returns(nn.Linear):
    def forward(self, x):
        """The same again."""
        return F.linear(x, self.weight, self.bias)


class Normed(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight / self.weight.norm(), self.bias)


class NoBias(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight)


class Twice(nn.Linear):
    def forward(self, x):
        x = x + x
        return F.linear(x, self.weight, self.bias)


x = torch.ones(1, 32)


class Constant(nn.Linear):
    """Its x is not its input."""

    def forward(this, y):
        return F.linear(x, this.weight, this.bias)


class Made(nn.Linear):
    weight = property(lambda self: self._parameters["weight"] * 2)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("cls", [nn.Linear, Scripted, Returns])
def test_the_same_forward_is_masked(cls):
    torch.manual_seed(0)
    dense, x = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), cls(48, 32)), torch.randn(3, 32)
    assert computes_linear(cls)
    model = fxmask.apply(copy.deepcopy(dense))
    twin = nn.Sequential(nn.Linear(32, 48), nn.ReLU(), nn.Linear(48, 32))
    twin.load_state_dict(dense.state_dict())
    fxmask.apply(twin)
    assert list(fxmask.masks(model)) == ["0.weight", "2.weight"]
    assert torch.equal(model(x), twin(x)) and not torch.equal(model(x), dense(x))
    assert isinstance(model[2], cls) and type(fxmask.restore(model)[2]) is cls


@pytest.mark.parametrize("cls", [Normed, NoBias, Twice, Constant])
def test_another_forward_stays_dense_and_is_named(cls):
    assert not computes_linear(cls)
    with pytest.warns(FxMaskWarning, match=f"^1 stays dense: {cls.__name__} has its own forward"):
        model = fxmask.apply(nn.Sequential(nn.Linear(32, 48), cls(48, 32)))
    assert list(fxmask.masks(model)) == ["0.weight"]


def doubled(f):
    @functools.wraps(f)
    def forward(self, x):
        return 2 * f(self, x)

    return forward


@pytest.mark.parametrize("decorate", [torch.autocast("cpu", dtype=torch.bfloat16), torch.no_grad(), doubled], ids=["autocast", "no_grad", "doubled"])
@pytest.mark.parametrize("plain", [nn.Linear, Returns])
def test_what_is_around_a_forward_computes_too(decorate, plain):
    class Decorated(plain):
        forward = decorate(plain.forward)

    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(32, 48), Decorated(48, 32)), torch.randn(3, 32)
    dense = copy.deepcopy(model)
    with pytest.warns(FxMaskWarning, match="^1 stays dense: Decorated has its own forward"):
        fxmask.apply(model, ratio=0)
    assert torch.equal(model(x), dense(x)) and model(x).dtype == dense(x).dtype and model(x).requires_grad == dense(x).requires_grad
    fxmask.apply(fxmask.restore(model), ratio=0.5, overrides={"1": dict(read="weight")})  # the way out that is named
    with torch.no_grad():
        for name, mask in fxmask.masks(model).items():
            dense.get_parameter(name).mul_(mask.repeat_interleave(16, 0).repeat_interleave(16, 1))
    assert torch.equal(model(x), dense(x))


class Packed(nn.Linear):
    """Like bitsandbytes' Linear4bit: a forward of its own, over packed values."""

    def __init__(self, n, k, dtype):
        super().__init__(n, k)
        self.weight = nn.Parameter(torch.zeros(n * k // 2, 1, dtype=dtype), requires_grad=False)

    def forward(self, x):
        return x.new_zeros(*x.shape[:-1], self.out_features)


def test_packed_values_are_called_quantised():
    """No override would help, and none is advised."""
    with pytest.warns(FxMaskWarning) as caught:
        model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), Packed(32, 32, torch.uint8)))
    said = "1 stays dense: Packed has its own forward, and its weight is quantised (torch.uint8); mask the float model first, then quantise."
    assert [str(w.message) for w in caught] == [said]
    assert list(fxmask.masks(model)) == ["0.weight"]


def test_a_computed_weight_of_another_forward_is_no_way_out():
    made = torch.nn.utils.parametrizations.weight_norm(Twice(48, 32))
    with pytest.warns(FxMaskWarning) as caught:
        fxmask.apply(nn.Sequential(nn.Linear(32, 48), made))
    assert len(caught) == 1 and "and its weight is computed" in str(caught[0].message) and "read=" not in str(caught[0].message)


class Adapter(nn.Linear):
    """Like PEFT's VBLoRA and GraLoRA layers: a Linear by name, around the layer whose weight it shows."""

    def __init__(self, base_layer):
        super(nn.Linear, self).__init__()
        self.base_layer, self.in_features, self.out_features = base_layer, base_layer.in_features, base_layer.out_features
        self.shift = nn.Parameter(torch.zeros(base_layer.out_features))

    @property
    def weight(self):
        return self.base_layer.weight

    @property
    def bias(self):
        return self.base_layer.bias

    def forward(self, x):
        return self.base_layer(x) + self.shift


@pytest.mark.parametrize("options", [{}, dict(regrow=fxmask.Regrow("random", fraction=0.5), refresh=2, ratio=0.5)], ids=["plain", "regrow"])
@pytest.mark.parametrize("order", ["wrapped", "masked"])
def test_a_wrapper_is_no_linear_of_its_own(order, options):
    """Its base layer is masked, and nothing is said of it; masks that write see one user of the weight."""
    model = nn.Sequential(nn.Linear(32, 48), nn.Linear(48, 32))
    for name in (order, "masked" if order == "wrapped" else "wrapped"):
        if name == "wrapped":
            model[1] = Adapter(model[1])
        else:
            fxmask.apply(model, **options)
    assert {n.replace("base_layer.", "") for n in fxmask.masks(model)} == {"0.weight", "1.weight"}
    report = fxmask.explain(model)
    assert report.summary["linears"] == report.summary["masked"] == 2


def test_a_weight_that_the_class_computes_is_another_forward():
    assert not computes_linear(Made)


class QuantEmbedding(nn.Module):
    """A table that does not derive from nn.Embedding, as quantisation-aware code has it."""

    def __init__(self, n, dim):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n, dim))

    def forward(self, tokens):
        return F.embedding(tokens, self.weight)


def test_a_head_that_is_the_table_of_another_class_of_embedding():
    model = nn.Sequential(QuantEmbedding(50, 64), nn.Linear(64, 64), nn.Linear(64, 50, bias=False))
    model[2].weight = model[0].weight
    fxmask.apply(model)
    assert list(fxmask.masks(model)) == ["1.weight"]
    assert [row["reason"] for row in fxmask.explain(model).rows if row["name"] == "2"] == ["default exclusion: weight tied to an Embedding"]


class Shows(nn.Linear):
    """Has no weight, and computes with that of a layer inside, which it never calls."""

    weight = property(lambda self: self.inner.weight)

    def __init__(self):
        nn.Module.__init__(self)
        self.in_features, self.out_features, self.bias = 48, 32, None
        self.inner = nn.Linear(48, 32, bias=False)


def test_a_layer_that_computes_with_the_weight_of_one_inside_is_masked():
    model, x = nn.Sequential(Shows()), torch.randn(3, 48)
    twin = nn.Sequential(copy.deepcopy(model[0].inner))
    fxmask.apply(model), fxmask.apply(twin)
    torch.testing.assert_close(model(x), twin(x))
    assert [(row["name"], row["masked"]) for row in fxmask.explain(model).rows] == [("0", True), ("0.inner", True)]


def test_a_weight_of_two_names_has_the_random_mask_of_the_first():
    tied, alone = (nn.Sequential(*(nn.Linear(64, 64) for _ in range(2))) for _ in range(2))
    tied[1].weight = tied[0].weight
    masks, apart = (fxmask.masks(fxmask.apply(m, ratio=0.5, criterion="random")) for m in (tied, alone))
    assert torch.equal(masks["0.weight"], apart["0.weight"]) and torch.equal(masks["1.weight"], apart["0.weight"])
