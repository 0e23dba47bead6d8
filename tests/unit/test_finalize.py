"""`fxmask.finalize`: masks that are made permanent change no output, leave nothing of fxmask behind, and what cannot be done changes nothing."""

import copy
import io
import re

import pytest
import torch
import torch.nn.functional as F
from sample_models import Attention, Computed, Residual, mlp, same_snapshot, snapshot, with_zeros
from torch import fx, nn
from torch.nn.utils import parametrizations, prune

import fxmask
from fxmask.errors import ConfigError, StateError, UnsupportedError

UNSEEN = "fxmask.apply has not seen it, or its masks were taken off or made permanent"

# torch says once in a process that a layout is young
pytestmark = pytest.mark.filterwarnings("ignore:Sparse BSR tensor support is in beta:UserWarning")
NAMES = ["0.weight", "2.weight"]


class Tied(nn.Module):
    """Two layers of one weight."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(32, 32), nn.Linear(32, 32)
        self.b.weight = self.a.weight

    def forward(self, x):
        return self.b(F.gelu(self.a(x)))


MODELS = {"mlp": (mlp, (6, 64)), "residual": (Residual, (3, 32, 32)), "attention": (Attention, (3, 5, 32)), "tied": (Tied, (6, 32))}
OPTIONS = [{}, dict(refresh=0), dict(criterion="random", seed=3), dict(block=(8, 20)), dict(backward="rigl", ratio=0.5)]


def plain(model, like, hooks=0):
    """Whether no class and no attribute of the masks is left, and so many hooks."""
    left = [name for m in model.modules() for name in m.__dict__ if name.startswith("_fxmask") and name != "_fxmask_final"]
    found = sum(len(m._load_state_dict_post_hooks) + len(m._forward_pre_hooks) + len(m._forward_hooks) for m in model.modules())
    return [type(m) for m in model.modules()] == [type(m) for m in like.modules()] and not left and found == hooks


def refused(model, error, text, format="dense"):
    """An error of that text, and a model as it was, masks included."""
    before, masks = snapshot(model), None
    if isinstance(error, type) and error is not StateError:
        masks = fxmask.explain(model).rows
    with pytest.raises(error, match=text):
        fxmask.finalize(model, format)
    assert same_snapshot(before, snapshot(model))
    assert masks is None or masks == fxmask.explain(model).rows


# ---- dense -----------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_dense(name, options):
    make, shape = MODELS[name]
    model, dense, x = fxmask.apply(make(), **{"ratio": 0.75, **options}), make(), torch.randn(shape)
    fxmask.step(model, 3)
    parameters, masks, y = dict(model.named_parameters()), fxmask.masks(model), model(x)
    assert fxmask.finalize(model) is model
    assert torch.allclose(model(x), y, atol=1e-5) and not torch.allclose(dense(x), y, atol=1e-3)
    assert plain(model, dense) and fxmask.masks(model) == {}
    assert list(model.state_dict()) == list(dense.state_dict())
    block = options.get("block", (16, 16))
    for key, p in model.named_parameters():
        assert p is parameters[key] and p.requires_grad
        expected = dense.get_parameter(key).detach()
        if key in masks:
            kept = masks[key].repeat_interleave(block[0], 0).repeat_interleave(block[1], 1)[: p.shape[0], : p.shape[1]]
            assert not kept.all()
            expected = expected * kept
        assert torch.equal(p, expected), key


def test_an_ordinary_model_afterwards():
    """It trains densely, can be masked again, and knows no masks to restore."""
    model, x = fxmask.finalize(fxmask.apply(mlp(), ratio=0.75)), torch.randn(6, 64)
    assert torch.equal(model(x), with_zeros(mlp(), NAMES, (16, 16), 0.75)(x))
    with pytest.raises(StateError, match="nothing is masked in this model"):
        fxmask.restore(model)
    assert {row["reason"] for row in fxmask.explain(model).rows} == {UNSEEN}
    zero = model[0].weight == 0
    model(x).square().sum().backward()
    assert model[0].weight.grad[zero].any()
    torch.optim.SGD(model.parameters(), 0.1).step()
    assert model[0].weight[zero].any()
    fxmask.apply(model, ratio=0.5)
    assert len(fxmask.masks(model)) == 2
    with pytest.raises(StateError, match="nothing is masked"):
        fxmask.masks(fxmask.restore(model))  # a model that was never finalised in this form


def test_masked_infinities_become_zeros():
    model = fxmask.apply(nn.Linear(32, 32), ratio=0.75, refresh=0)
    gone = ~fxmask.masks(model)["weight"].repeat_interleave(16, 0).repeat_interleave(16, 1)
    with torch.no_grad():
        model.weight[gone] = torch.inf
    fxmask.finalize(model)
    assert not model.weight[gone].any() and model.weight[~gone].all()


@pytest.mark.parametrize("how", ["symbolic_trace", "export"])
@pytest.mark.parametrize("name", ["mlp", "residual", "tied"])
def test_graphs(how, name):
    make, shape = MODELS[name]
    x = torch.randn(shape)

    def traced():
        return fx.symbolic_trace(make()) if how == "symbolic_trace" else torch.export.export(make(), (x,)).module()

    gm, dense = fxmask.apply(traced(), ratio=0.75), traced()
    y = gm(x)
    fxmask.finalize(gm)
    assert torch.allclose(gm(x), y, atol=1e-5) and not torch.allclose(dense(x), y, atol=1e-3)
    assert sorted(gm.state_dict()) == sorted(dense.state_dict()) and fxmask.masks(gm) == {}
    assert "fxmask" not in gm.code and [n for n, _ in gm.named_modules()] == [n for n, _ in dense.named_modules()]


def test_exports_carry_zeros():
    model, x = fxmask.finalize(fxmask.apply(mlp(), ratio=0.75)), torch.randn(6, 64)
    program = torch.export.export(model, (x,))
    assert not [n for n in program.graph.nodes if "fxmask" in str(n.target)]
    assert (program.state_dict["0.weight"] == 0).sum() == 18 * 256
    torch.save(model, buffer := io.BytesIO())
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x), model(x))
    assert torch.equal(copy.deepcopy(model)(x), model(x)) and fxmask.masks(copy.deepcopy(model)) == {}


def test_a_compiled_model_follows():
    model, x = fxmask.apply(mlp(), ratio=0.75), torch.randn(6, 64)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    y = compiled(x)
    fxmask.finalize(model)
    assert torch.allclose(compiled(x), y, atol=1e-5)
    with torch.no_grad():
        model[0].weight.fill_(1.0)
    assert torch.allclose(compiled(x), model(x), atol=1e-4)


# ---- BSR -------------------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [False, True], ids=["no-grad", "grad"])
@pytest.mark.parametrize("name", ["mlp", "residual", "tied"])
def test_bsr(name, grad):
    make, shape = MODELS[name]
    model, x = fxmask.apply(make(), ratio=0.75), torch.randn(shape)
    masks, y, keys = fxmask.masks(model), model(x), list(model.state_dict())
    fxmask.finalize(model, format="bsr")
    with torch.set_grad_enabled(grad):
        assert torch.allclose(model(x), y, atol=1e-5)
    assert plain(model, make(), hooks=len(masks)) and fxmask.masks(model) == {} and list(model.state_dict()) == keys
    for key, mask in masks.items():
        w = model.get_parameter(key)
        assert w.layout == torch.sparse_bsr and not w.requires_grad and w.values().shape == (int(mask.sum()), 16, 16)
    assert name != "tied" or model.a.weight is model.b.weight


@pytest.mark.parametrize("shape", [(64,), (1, 64), (6, 64), (2, 3, 64), (2, 3, 2, 64), (0, 64)], ids=str)
@pytest.mark.parametrize("bias", [True, False], ids=["bias", "no-bias"])
def test_bsr_of_any_input(shape, bias):
    torch.manual_seed(0)
    model, x = fxmask.apply(nn.Linear(64, 32, bias=bias), ratio=0.75), torch.randn(shape)
    y = model(x)
    fxmask.finalize(model, "bsr")
    assert torch.allclose(model(x), y, atol=1e-5)
    if len(shape) == 3:
        x = torch.randn(2, 64, 3).transpose(1, 2)
        assert torch.allclose(model(x), F.linear(x, model.weight.to_dense(), model.bias), atol=1e-5)


def test_bsr_files():
    model, x = fxmask.finalize(fxmask.apply(mlp(), ratio=0.75), "bsr"), torch.randn(6, 64)
    other = fxmask.finalize(fxmask.apply(mlp(seed=5), ratio=0.75), "bsr")
    for m in (model, model.state_dict()):
        torch.save(m, buffer := io.BytesIO())
        buffer.seek(0)
        if m is model:
            assert torch.equal(torch.load(buffer, weights_only=False)(x), model(x))
        else:
            other.load_state_dict(torch.load(buffer, weights_only=True))
            assert torch.equal(other(x), model(x))


def test_what_pytorch_cannot_do_with_bsr():
    model = fxmask.finalize(fxmask.apply(nn.Linear(64, 32), ratio=0.75), "bsr")
    with torch.inference_mode(), pytest.raises(UnsupportedError, match=r"inside torch.inference_mode: expected torch.no_grad, in Linear\(in_features=64"):
        model(torch.randn(2, 64))
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        with pytest.raises(UnsupportedError, match=r"under autocast on a CPU: expected no autocast around Linear\(in_features=64"):
            model(torch.randn(2, 64))
        with torch.autocast("cpu", enabled=False):
            assert model(torch.randn(2, 64)).shape == (2, 32)


def test_bsr_weights_are_not_masked_again():
    model = fxmask.finalize(fxmask.apply(mlp(), ratio=0.75), "bsr")
    with pytest.raises(UnsupportedError, match=r"cannot change '0': its weight is sparse \(torch.sparse_bsr\)(.|\n)*mask the dense model"):
        fxmask.apply(model, ratio=0.75)
    assert model(torch.randn(2, 64)).shape == (2, 10) and not any(row["masked"] for row in fxmask.explain(model).rows)


@pytest.mark.parametrize("made_inside", [False, True])
def test_inside_inference_mode(made_inside):
    with torch.inference_mode(made_inside):
        model = fxmask.apply(mlp(), ratio=0.75)
    x = torch.randn(6, 64)
    with torch.inference_mode():
        y = model(x)
        fxmask.finalize(model)
        assert torch.allclose(model(x), y, atol=1e-5)
    assert int((model[0].weight == 0).sum()) == 18 * 256
    assert made_inside or model(x).requires_grad


@pytest.mark.parametrize("options", [dict(block=(8, 16)), dict(block=(16, 8))], ids=str)
def test_bsr_of_blocks_that_pytorch_does_not_multiply(options):
    text = r"PyTorch cannot multiply by a torch.sparse_bsr weight in blocks of \(\d+, \d+\), torch.float32 on cpu: (.|\n)*where: 0.weight(.|\n)*format='dense'"
    refused(fxmask.apply(mlp(), ratio=0.75, **options), UnsupportedError, text, "bsr")


def test_bsr_of_a_dtype_that_pytorch_does_not_multiply():
    refused(fxmask.apply(mlp().bfloat16(), ratio=0.75), UnsupportedError, r"PyTorch cannot multiply by a(.|\n)*torch.bfloat16 on cpu: ", "bsr")


# ---- errors, which change nothing ------------------------------------------------------------------------------------------------------------------------


def test_an_unknown_format():
    said = "unknown format of finalize: expected one of dense, bsr, 2:4, got 'csr'; did you mean 'bsr'?"
    refused(fxmask.apply(mlp(), ratio=0.75), ConfigError, re.escape(said), "csr")


def test_nothing_masked():
    refused(mlp(), StateError, "fxmask.finalize: nothing is masked in this model: expected one that fxmask.apply has changed")
    with pytest.raises(StateError, match="nothing is masked"):
        fxmask.finalize(fxmask.finalize(fxmask.apply(mlp(), ratio=0.75)))


@pytest.mark.parametrize("config", [fxmask.ActivationPruning(0.5, 16), fxmask.BlockDropout(0.1, (4, 16))], ids=["pruned", "dropped"])
def test_pruned_or_dropped_inputs_alone_end(config):
    model = fxmask.apply(mlp(), config)
    refused(model, StateError, r"format='2:4' stores the blocks of weight masks(.|\n)*use format='dense', or fxmask.restore", "2:4")
    assert fxmask.finalize(model) is model and plain(model, mlp()) and fxmask.masks(model) == {}
    x = torch.randn(3, 64)
    assert torch.equal(model.eval()(x), mlp().eval()(x))


def test_an_adapter_is_merged_behind_it():
    """As docs/training.md has it: W∘M and the factors' product are the weight, and outputs stay. Under masks the product would be ranked and cut, too."""
    torch.manual_seed(0)
    base, down, up, x = nn.Linear(64, 64), nn.Linear(64, 4, bias=False), nn.Linear(4, 64, bias=False), torch.randn(3, 64)
    model = fxmask.apply(nn.Sequential(base), ratio=0.5)
    want = model(x) + up(down(x))
    fxmask.finalize(model)
    base.weight.data += (up.weight @ down.weight).detach()
    torch.testing.assert_close(model(x), want)


def test_inside_dense_and_under_a_guard():
    model = fxmask.apply(mlp(), ratio=0.75)
    with fxmask.dense(model):
        refused(model, StateError, r"inside fxmask.dense: expected masks in force(.|\n)*where: 0.weight")
    handle = fxmask.guard(torch.optim.SGD(model.parameters(), 0.1), model)
    refused(model, StateError, r"under a guard, which would write masked weights back(.|\n)*where: 0.weight(.|\n)*call remove\(\)")
    handle.remove()
    fxmask.finalize(model)


@pytest.mark.parametrize("how", [parametrizations.weight_norm, parametrizations.spectral_norm, lambda m: prune.l1_unstructured(m, "weight", 0.3)],
                         ids=["weight_norm", "spectral_norm", "prune"])  # fmt: skip
def test_a_computed_weight(how):
    model = mlp()
    how(model[2])
    text = r"writes into Parameters, and this weight is computed \(a Tensor(.|\n)*where: 2.weight(.|\n)*remove_parametrizations"
    refused(fxmask.apply(model, ratio=0.75), UnsupportedError, text)


def test_a_weight_that_a_graph_computes():
    gm = fxmask.apply(torch.export.export(Computed(), (torch.randn(2, 32),)).module(), ratio=0.75)
    refused(gm, UnsupportedError, "fxmask.finalize needs the weight's values: expected a parameter, but this graph computes the weight")


def test_meta_weights_and_lost_masks():
    with torch.device("meta"):
        model = mlp()
    refused(fxmask.apply(model, ratio=0.75), UnsupportedError, "fxmask.finalize needs the weight's values: expected real memory, got a meta tensor")
    model = fxmask.apply(mlp(), ratio=0.75, refresh=0).to("meta").to_empty(device="cpu")
    with torch.no_grad():
        for p in model.parameters():
            p.fill_(1.0)
    refused(model, StateError, r"a cached mask was lost on the meta device(.|\n)*where: 0.weight")


class Sharing(nn.Module):
    """A weight that an Embedding, a dense linear or another module uses, too."""

    def __init__(self, how):
        super().__init__()
        torch.manual_seed(0)
        self.how, self.head, self.other = how, nn.Linear(32, 48), nn.Linear(32, 48)
        self.table = nn.Embedding(48, 32)
        if how == "table":
            self.table.weight = self.head.weight
        elif how == "other":
            self.other.weight = self.head.weight
        else:
            self.held = self.head.weight

    def forward(self, tokens):
        x = self.table(tokens)
        return self.head(x) + self.other(x) + x @ (self.held.t() if self.how == "held" else self.other.weight.t())


@pytest.mark.parametrize(("how", "who"), [("table", "an Embedding"), ("other", "other"), ("held", "held")])
@pytest.mark.parametrize("format", ["dense", "bsr"])
@pytest.mark.filterwarnings("ignore:weights of masked layers are parameters of other modules")
def test_a_weight_that_something_else_uses(how, who, format):
    model = fxmask.apply(Sharing(how), ratio=0.75, include="head")
    refused(model, UnsupportedError, rf"^{who} uses this weight unmasked, and would get the zeros(.|\n)*where: head.weight(.|\n)*untie the two", format)


@pytest.mark.parametrize(("how", "who"), [("table", "an Embedding"), ("other", "other"), ("held", "t")])
@pytest.mark.filterwarnings("ignore:a graph reads masked weights whole")
def test_a_weight_that_a_graph_uses_elsewhere(how, who):
    gm = fxmask.apply(fx.symbolic_trace(Sharing(how)), ratio=0.75, include="head")
    refused(gm, UnsupportedError, rf"^{who} uses this weight unmasked")


@pytest.mark.parametrize("format", ["bsr", "2:4"])
def test_layers_that_are_not_called(format):
    gm = fxmask.apply(fx.symbolic_trace(mlp()), ratio=0.75)
    refused(gm, UnsupportedError, f"format='{format}' replaces the weight of a Linear, and this one is used by a traced graph", format)
    model = fxmask.apply(Attention(), ratio=0.75)
    text = rf"format='{format}' needs the call of the layer, and its owner reads the weight instead(.|\n)*where: attention.out_proj.weight"
    refused(model, UnsupportedError, text, format)


def test_bsr_of_ragged_blocks():
    text = r"no ragged blocks: expected a weight that \(20, 16\) divides, got \(96, 64\)(.|\n)*where: 0.weight"
    refused(fxmask.apply(mlp(), ratio=0.75, block=(20, 16)), UnsupportedError, text, "bsr")


def test_2_4():
    refused(fxmask.apply(mlp(), ratio=0.75), UnsupportedError, r"at most 2 nonzeros among 4 neighbours of a row: got 4, with blocks of \(16, 16\)", "2:4")
    model = fxmask.apply(nn.Linear(66, 32), ratio=0.75)
    refused(model, UnsupportedError, r"2:4 wants at most 2 nonzeros among 4", "2:4")  # a row that fours do not divide
    model = nn.Linear(64, 32)
    with torch.no_grad():
        model.weight[:, ::2] = 0
    fxmask.apply(model, ratio=0.75)
    refused(model, UnsupportedError, r"semi-structured weights need a CUDA device of capability 8.0: got cpu(.|\n)*where: weight", "2:4")


def test_a_class_that_was_changed():
    """What restore refuses, finalize refuses."""
    model = fxmask.apply(mlp(), ratio=0.75)
    parametrizations.weight_norm(model[0])
    refused(model, UnsupportedError, r"this weight is computed")
    model = fxmask.apply(mlp(), ratio=0.75)
    model[0].__class__ = type("Other", (type(model[0]),), {})
    refused(model, UnsupportedError, "the class of 0 was changed after fxmask.apply")
