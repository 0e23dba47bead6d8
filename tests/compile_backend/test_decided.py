"""What fxmask.apply has decided stays: in copies, with other Parameters, and whatever graph of another model Dynamo would take."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from compile_backend.helpers import OPTIONS, Wrap, compiled
from sample_models import mlp
from torch import nn

import fxmask
from fxmask.compiler import backend
from fxmask.errors import StateError
from fxmask.explaining.inspection import UNSEEN


def pair():
    torch.manual_seed(0)
    return fxmask.apply(nn.ModuleDict({"a": nn.Linear(32, 32), "b": nn.Linear(32, 32)}), ratio=0.75, exclude="b")


class Attention(nn.Module):
    """Its weight is read: no op of ours in the graph says that it is masked."""

    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x, need_weights=False)[0]


def assigned(model):
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    return model


COPIES = {
    "deepcopy": copy.deepcopy,
    "assign": assigned,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "copied twice": lambda m: copy.deepcopy(copy.deepcopy(m)),
}


def dense(layer, x):
    return F.linear(x, layer.weight, layer.bias)


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_layer_that_apply_left_out_stays_dense_in_copies(copied):
    layer, x = copied(pair())["b"], torch.randn(4, 32)
    assert torch.equal(compiled(Wrap(layer))(x), dense(layer, x))


@pytest.mark.parametrize("copied", COPIES.values(), ids=COPIES)
def test_a_weight_that_is_read_is_masked_once_in_copies(copied):
    torch.manual_seed(0)
    model, x = copied(fxmask.apply(Attention(), ratio=0.25)), torch.randn(2, 5, 32)
    torch.testing.assert_close(compiled(model)(x), model(x))


def test_a_graph_that_masks_meets_a_copy_of_a_layer_that_apply_left_out():
    torch.manual_seed(0)
    plain, x = nn.Linear(32, 32), torch.randn(4, 32)
    compiled(Wrap(plain))(x)
    with pytest.raises(StateError, match="has left a layer dense, and this graph"):
        compiled(Wrap(copy.deepcopy(pair())["b"]))(x)


def test_a_dense_graph_is_for_no_layer_of_a_plain_model():
    model, plain, x = pair(), nn.Linear(32, 32), torch.randn(4, 32)
    call = compiled(Wrap(model["b"]))
    call(x)
    other = compiled(Wrap(plain))
    with pytest.raises(StateError, match=r"(?s)compiled dense, as fxmask.apply had decided, and meets a layer that apply has not seen.*_dynamo\.reset"):
        other(x)
    for copied in (copy.deepcopy(model), assigned(model)):  # new weights, and nothing else
        assert torch.equal(compiled(Wrap(copied["b"]))(x), dense(copied["b"], x))
    assert torch.equal(call(x), dense(model["b"], x))
    fxmask.restore(model)
    with pytest.raises(StateError, match="has not seen, or has restored"):
        call(x)
    torch._dynamo.reset()
    assert not torch.equal(other(x), dense(plain, x))


def test_a_new_layer_of_a_masked_model_is_dense_in_the_old_graph_and_in_its_own():
    """A head that is replaced: what `apply` has masked in the graph says for all of it."""
    model, x = Wrap(nn.Sequential(*pair().values())), torch.randn(4, 32)
    call = compiled(model)
    call(x)
    model.inner[1] = nn.Linear(32, 32)
    assert torch.equal(call(x), model(x))
    torch._dynamo.reset()
    assert torch.equal(call(x), model(x))


def test_restore_says_where_the_masks_of_the_backend_are():
    """As masks, state_dict, finalize, step and guard do; explain lists these masks."""
    model = Wrap(mlp())
    text = r"(?s)fxmask\.restore: the masks of this model live in the graphs that backend='fxmask' has compiled.*call the model that torch\.compile was given"
    named = torch.compile(model, backend="fxmask", options={**OPTIONS, "inner": "eager"})
    with pytest.raises(StateError, match=text):
        fxmask.restore(named)
    named(torch.randn(4, 64))
    with pytest.raises(StateError, match=text):
        fxmask.restore(model)
    with pytest.raises(StateError, match="nothing is masked in this model"):
        fxmask.restore(Wrap(mlp()))


def test_nothing_is_left_of_a_decision_after_restore():
    model = pair()
    before = set(nn.Linear(32, 32).__dict__)
    fxmask.restore(model)
    assert all(set(m.__dict__) == before and not m.weight.__dict__ for m in model.values())


@pytest.mark.parametrize("masks", [fxmask.WeightMask(ratio=0.5, block=(8, 8)), fxmask.NMMask(2, 4)], ids=["blocks", "N:M"])
def test_nothing_is_left_of_a_decision_after_finalize(masks):
    torch.manual_seed(0)
    model, x = Wrap(nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 8))), torch.randn(4, 32)
    final = fxmask.finalize(fxmask.apply(model, masks))
    assert {r["reason"] for r in fxmask.explain(final).rows} == {UNSEEN}  # of the head, too, which was excluded
    assert not torch.equal(compiled(final)(x), final(x))
    torch._dynamo.reset()
    assert not torch.equal(compiled(final, ratio=0.75, block=(8, 8))(x), final(x))


class Broken(nn.Module):
    """A lookup of a table that is a head's weight as well, and behind a break a linear and the head."""

    def __init__(self):
        super().__init__()
        self.table, self.fc, self.head = nn.Embedding(48, 32), nn.Linear(32, 32), nn.Linear(32, 48, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words):
        x = self.table(words)
        torch._dynamo.graph_break()
        return self.head(self.fc(x))


@pytest.mark.filterwarnings("ignore:backend='fxmask' masked nothing", "ignore:.*stays dense")
def test_graphs_without_linears_serve_everybody():
    """Norms, penalties and lookups of weights that `apply` has decided about, and of others."""
    model, plain = pair(), nn.Linear(32, 32)
    square = torch.compile(lambda w: w.square().sum(), backend=backend.fxmask_backend, options={"inner": "eager"})
    for w in (model["a"].weight, plain.weight, fxmask.restore(model)["a"].weight):
        torch.testing.assert_close(square(w), w.square().sum())
    student, teacher, words = fxmask.apply(Broken(), ratio=0.5, block=(8, 8)), Broken(), torch.randint(0, 48, (2, 3))
    for net in (student, teacher):
        torch.compile(net, backend=backend.fxmask_backend, options={"inner": "eager"})(words)
