"""Layers whose owner reads `.weight` instead of calling them would be silently dense; they are not."""

import copy
import warnings

import pytest
import torch
from sample_models import with_zeros
from torch import nn

import fxmask
from fxmask.errors import UnsupportedError
from fxmask.passes.finding.products import find_products
from fxmask.passes.finding.readers import weight_readers


def attention():
    torch.manual_seed(0)
    return nn.MultiheadAttention(32, 4, batch_first=True)


def layer():
    torch.manual_seed(0)
    return nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)


def encoder():
    return nn.TransformerEncoder(layer(), 2)


def run(m, x):
    return m(x, x, x)[0] if isinstance(m, nn.MultiheadAttention) else m(x)


MODELS = {"attention": attention, "layer": layer, "encoder": encoder}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
@pytest.mark.parametrize("backward", ["masked", "ste"])
def test_train_eval_and_fast_path_are_all_masked(make, backward):
    dense = make()
    model = fxmask.apply(copy.deepcopy(dense), ratio=0.75, backward=backward)
    names = list(fxmask.masks(model))
    assert len(names) == sum(isinstance(m, nn.Linear) for m in dense.modules())
    expected, x = with_zeros(dense, names, (16, 16), 0.75), torch.randn(2, 5, 32)
    for mode in (True, False):
        y, e = run(model.train(mode), x), run(expected.train(mode), x)
        assert torch.equal(y, e)
    with torch.no_grad():  # the fused inference path
        assert torch.allclose(run(model, x), run(expected, x), atol=1e-6)
        assert not torch.allclose(run(model, x), run(dense.eval(), x), atol=1e-3)
    gy = torch.randn(2, 5, 32)  # a sum of squares has next to no gradient behind a layer norm
    run(model.train(), x).backward(gy)
    run(expected.train(), x).backward(gy)
    for name, p in model.named_parameters():
        if name in names:
            mask = fxmask.masks(model)[name].repeat_interleave(16, 0).repeat_interleave(16, 1)
            assert torch.allclose(p.grad[mask], expected.get_parameter(name).grad[mask], atol=1e-5)
            assert (p.grad[~mask] == 0).all() == (backward == "masked")
            if backward == "ste":
                assert torch.allclose(p.grad, expected.get_parameter(name).grad, atol=1e-5)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_padding_masks_and_nested_tensors():
    model = fxmask.apply(encoder(), ratio=0.75).eval()
    expected = with_zeros(encoder(), list(fxmask.masks(model)), (16, 16), 0.75).eval()
    x, pad = torch.randn(2, 5, 32), torch.tensor([[False] * 5, [False] * 3 + [True] * 2])
    with torch.no_grad():
        y, e = model(x, src_key_padding_mask=pad), expected(x, src_key_padding_mask=pad)
    assert torch.allclose(y[~pad], e[~pad], atol=1e-6)


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_copies_checkpoints_and_restore(make):
    dense, x = make(), torch.randn(2, 5, 32)
    y = run(dense, x)
    model = fxmask.apply(copy.deepcopy(dense), ratio=0.75)
    assert list(model.state_dict()) == list(dense.state_dict())
    other = copy.deepcopy(model)
    assert torch.equal(run(other, x), run(model, x))
    torch.optim.SGD(model.parameters(), 0.1)
    with fxmask.dense(model):
        assert torch.equal(run(model, x), y)
    assert torch.equal(run(fxmask.restore(model), x), y)
    assert [type(m) for m in model.modules()] == [type(m) for m in dense.modules()]


def test_compiled_fullgraph():
    model, x = fxmask.apply(layer(), ratio=0.75), torch.randn(2, 5, 32)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    assert torch.allclose(compiled(x), model(x), atol=1e-6)


def test_unmasked_needs_the_call():
    model = attention()
    with pytest.raises(UnsupportedError, match=r"(?s)reads its weight and never calls it.*out_proj.*overrides=\{'out_proj': dict\(backward='ste'\)\}"):
        fxmask.apply(model, backward="unmasked")
    fxmask.apply(model, backward="unmasked", overrides={"out_proj": dict(backward="ste")})


class Normed(nn.Module):
    """Keeps the rows of its weight at norm 1, through the Parameter, before it calls the layer."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64, bias=False)

    def forward(self, x):
        self.fc.weight.data = nn.functional.normalize(self.fc.weight.data, dim=1)
        return self.fc(x)


class NormedInPlace(Normed):
    def forward(self, x):
        with torch.no_grad():
            self.fc.weight.copy_(nn.functional.normalize(self.fc.weight, dim=1))
        return self.fc(x)


@pytest.mark.parametrize("kind", [Normed, NormedInPlace])
def test_a_write_in_the_owners_forward_reaches_the_parameter(kind):
    torch.manual_seed(0)
    m = fxmask.apply(kind(), ratio=0.5)
    m(torch.randn(2, 64))
    assert torch.allclose(m.fc.weight.norm(dim=1), torch.ones(64), atol=1e-6)


class OnlySaid(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(64, 64)

    def forward(self, x):
        """y = x @ self.fc.weight.t() + b"""
        return self.fc(x)  # not self.fc.weight alone


class OtherName(nn.Module):
    def __init__(me):
        super().__init__()
        me.fc = nn.Linear(64, 64)

    def forward(me, x):
        return nn.functional.linear(x, me.fc.weight, me.fc.bias)


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))

    def forward(self, x):
        return nn.functional.linear(x, self.layers[0].weight) + nn.functional.linear(x, self.layers[1].weight)


def test_words_are_no_reads():
    """Docstrings and comments do not decide how a layer runs."""
    assert not weight_readers(OnlySaid())


@pytest.mark.parametrize("kind", [OtherName, Indexed])
def test_reads_by_another_name_or_an_index_are_masked(kind):
    torch.manual_seed(0)
    dense = kind()
    m = fxmask.apply(copy.deepcopy(dense), ratio=0.75)
    expected, x = with_zeros(dense, list(fxmask.masks(m)), (16, 16), 0.75), torch.randn(3, 64)
    assert torch.allclose(m(x), expected(x), atol=1e-6)
    assert not torch.allclose(m(x), dense(x), atol=1e-2)


def test_what_is_read_in_inference_mode_and_under_vmap():
    """Tensors that count no writes, or that a transform wraps."""
    dense, x = attention(), torch.randn(3, 2, 5, 32)
    model = fxmask.apply(copy.deepcopy(dense), ratio=0.75)
    expected = with_zeros(dense, list(fxmask.masks(model)), (16, 16), 0.75)
    with torch.inference_mode():
        assert torch.allclose(run(model, x[0]), run(expected, x[0]), atol=1e-6)
    model = fxmask.apply(copy.deepcopy(attention()), ratio=0.75)  # nothing has been read yet
    weights = {name: torch.stack([p.detach()] * 3) for name, p in model.named_parameters()}
    found = torch.vmap(lambda w, a: torch.func.functional_call(model, w, (a, a, a))[0])(weights, x)
    assert torch.allclose(found, torch.stack([run(expected, a) for a in x]), atol=1e-5)


@pytest.mark.parametrize("make", [layer, encoder])
@pytest.mark.parametrize("chosen", [dict(include="*self_attn.out_proj"), dict(exclude=["*linear*"])])
def test_the_fast_path_reads_an_attention_that_is_masked_alone(make, chosen):
    dense, x = make().eval(), torch.randn(2, 5, 32)
    model = fxmask.apply(copy.deepcopy(dense), ratio=0.75, **chosen)
    names = list(fxmask.masks(model))
    assert names and all(name.endswith("out_proj.weight") for name in names)
    expected = with_zeros(dense, names, (16, 16), 0.75)
    with torch.no_grad():
        assert torch.allclose(model(x), expected(x), atol=1e-6) and not torch.allclose(model(x), dense(x), atol=1e-3)
    assert torch.equal(model(x), expected(x))


def test_a_reader_that_apply_was_not_given_is_told():
    """A layer that is masked by itself, and that the fast path of its owner reads."""
    model = layer()
    fxmask.apply(model.linear2, ratio=0.75)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.warns(fxmask.FxMaskWarning, match="(?s)without their masks: expected fxmask.apply to be given it.*where: linear2"):
        fxmask.guard(optimizer, model).remove()
    assert any("Read dense by a module that fxmask.apply was not given: linear2" in note for note in fxmask.explain(model).notes)
    fxmask.restore(model.linear2)
    fxmask.apply(model, ratio=0.75, include="linear2")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fxmask.guard(optimizer, model)
    assert not any("Read dense" in note for note in fxmask.explain(model).notes)


def told_of(model):
    return [note for note in fxmask.explain(model).notes if "Read dense by a module" in note]


def test_so_is_an_attention_alone_and_one_that_shares_what_another_reads():
    alone, a, b = attention(), attention(), attention()
    fxmask.apply(alone.out_proj, ratio=0.75)
    b.out_proj = a.out_proj
    fxmask.apply(a, ratio=0.75)
    assert told_of(alone) and told_of(nn.ModuleList([a, b])) and not told_of(a)
    model = layer()
    fxmask.apply(model.linear2, ratio=0.75)
    fxmask.apply(model, ratio=0.75, include="linear1")
    assert told_of(model)


def test_an_adapter_around_a_masked_layer_is_not():
    """It reads the weight in a merge alone, and a step that it trains in tells of it."""

    class Adapter(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.merged = nn.Linear(32, 32), False

        def forward(self, x):
            return nn.functional.linear(x, self.base.weight * 2) if self.merged else self.base(x)

    model = Adapter()
    fxmask.apply(model.base, ratio=0.75)
    assert not told_of(model)


class Reads(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.utils.parametrizations.weight_norm(nn.Linear(32, 32)), nn.Linear(32, 32)

    def forward(self, x):
        return self.head(nn.functional.linear(x, self.fc.weight))


@pytest.mark.parametrize(("make", "name", "options"), [
    (Reads, "fc", {}),
    (lambda: torch.fx.symbolic_trace(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))), "1", dict(overrides={"1": dict(read="weight")})),
], ids=["computed", "traced"])  # fmt: skip
def test_what_cannot_be_read_masked(make, name, options):
    model = make()
    text = rf"cannot mask '{name}' by read='weight': expected a module with a plain weight parameter(.|\n)*exclude='{name}'"
    with pytest.raises(UnsupportedError, match=text):
        fxmask.apply(model, **options)
    assert len(fxmask.masks(fxmask.apply(model, exclude=name))) == 1


class Holds(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.head = nn.Linear(32, 32), nn.Linear(32, 32)


TEXT = """
class Typed(Holds):
    def forward(self, x):
        return self.head(F.linear(x, self.fc.weight))


class Own(nn.Linear):
    def forward(self, x):
        return F.linear(x, self.weight, self.bias)
"""
TYPED: dict = {"Holds": Holds, "F": nn.functional, "nn": nn, "__name__": "typed"}
exec(TEXT, TYPED)
Pieces = type("Pieces", (Holds,), {
    "forward": lambda self, x: self.head(nn.functional.linear(x, self.fc.weight)),
})  # fmt: skip


@pytest.mark.parametrize("cls", [TYPED["Typed"], Pieces], ids=["no file", "a piece of a statement"])
def test_a_reader_without_a_source_is_told_at_the_first_step(cls):
    """What was typed in at a prompt has none; of a lambda Python shows the lines, which need not be a whole statement."""
    model = fxmask.apply(cls(), ratio=0.5, include="fc")
    assert weight_readers(model) == {} and find_products(model) == []
    fxmask.step(model, 0)
    model(torch.randn(4, 32)).sum().backward()
    with pytest.warns(fxmask.FxMaskWarning, match=r"(?s)never run.*where: fc\.weight\n"):
        fxmask.step(model)


def test_a_linear_without_a_source_stays_dense():
    with pytest.warns(fxmask.FxMaskWarning, match="^1 stays dense: Own has its own forward"):
        model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), TYPED["Own"](32, 32)))
    assert list(fxmask.masks(model)) == ["0.weight"]
