"""WeightMask on Conv2d: what is masked and what is left alone, and what it computes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from unit.conv_models import BLOCK, BOTH, CONVS, backward, images, masked, net, twin_of

import fxmask
from fxmask import Schedule, WeightMask
from fxmask.errors import ConfigError, FxMaskWarning, StateError, UnsupportedError
from fxmask.kernels.conv import graft
from fxmask.kernels.grid import expand_mask
from fxmask.swap import MaskedLayer

# ---- which layers ----------------------------------------------------------------------------------------------------------------------------------------


def test_convolutions_are_masked_where_they_are_asked_for_alone():
    model = fxmask.apply(net(), ratio=0.5, block=BLOCK)
    assert list(fxmask.masks(model)) == ["8.weight"] and type(model[0]) is nn.Conv2d and [r["name"] for r in fxmask.explain(model).rows] == ["8"]
    assert list(fxmask.masks(masked(nn.Conv2d))) == CONVS
    found = fxmask.explain(masked(nn.Conv2d)).rows[-1]
    assert (found["name"], found["masked"], found["reason"]) == ("8", False, "not in layers")
    model = masked([nn.Conv2d, nn.Linear])
    assert list(fxmask.masks(model)) == [*CONVS, "8.weight"]
    assert [m.shape for m in fxmask.masks(model).values()] == [(3, 3), (4, 2), (2, 18), (3, 4), (3, 6)]
    assert [int(m.sum()) for m in fxmask.masks(model).values()] == [5, 4, 18, 6, 9]
    assert "MaskedConv2d(4, 24, kernel_size=(3, 3)" in repr(model) and "ratio=0.5, block=(8, 16)" in repr(model[0])
    rows = fxmask.explain(model).rows
    assert [r["shape"] for r in rows] == ["24x4x3x3", "32x24x1x1", "16x32x3x3", "24x16x2x2", "20x96"]
    assert rows[0]["impl"] == "masked_dense" and "windows overlap" in rows[0]["why"] and "no recorded run" in rows[1]["why"]
    assert fxmask.explain(model).to_dict()["summary"]["layers"] == 5


def test_patterns_and_overrides_reach_convolutions():
    kept = fxmask.masks(fxmask.apply(net(), ratio=0.5, block=BLOCK, layers=BOTH, exclude="0", overrides={"4": {"ratio": 0.9}, "6": False}))
    assert list(kept) == ["2.weight", "4.weight", "8.weight"] and int(kept["4.weight"].sum()) == 4
    assert list(fxmask.masks(fxmask.apply(net(), ratio=0.5, block=BLOCK, layers=BOTH, include=nn.Conv2d))) == CONVS
    small = fxmask.apply(nn.Sequential(nn.Conv2d(3, 16, 1), nn.Conv2d(16, 32, 3)), ratio=0.5, layers=nn.Conv2d)
    assert fxmask.explain(small).rows[0]["reason"] == "default exclusion: min(out, in) = 3 < 16"


@pytest.mark.parametrize("layers", [nn.Conv1d, nn.Module, "Conv2d", (nn.Conv2d, nn.ConvTranspose2d), (), 2])
def test_other_layers_are_refused(layers):
    with pytest.raises(ConfigError, match=r"layers: expected torch.nn.Linear, torch.nn.Conv2d, or both in a tuple, got"):
        fxmask.apply(net(), layers=layers)
    with pytest.raises(ConfigError, match="layers: expected"):
        fxmask.allocate(net(), 0.5, layers=layers)


@pytest.mark.parametrize(
    ("layers", "model", "words"),
    [
        (None, nn.Conv2d(16, 16, 1), r"it has no linear \(layers=nn\.Conv2d is for its convolutions\)"),
        (None, nn.ConvTranspose2d(16, 16, 1), "it has no linear"),
        (nn.Conv2d, nn.ReLU(), "it has no Conv2d"),
        (BOTH, nn.ReLU(), "it has no linear and no Conv2d"),
    ],
)
def test_a_model_without_such_layers_is_told_so(layers, model, words):
    with pytest.warns(FxMaskWarning, match=rf"^fxmask\.apply masked nothing: {words}[.;]"):
        fxmask.apply(nn.Sequential(model), ratio=0.5, layers=layers)


class Scaled(nn.Conv2d):
    def forward(self, x):
        return self._conv_forward(x, 2 * self.weight, self.bias)


class Twice(nn.Conv2d):
    """PyTorch's forward, and a convolution of its own."""

    def _conv_forward(self, x, weight, bias):
        return super()._conv_forward(x, 2 * weight, bias)


@pytest.mark.parametrize("impl", ["auto", "cpu"])
def test_a_convolution_of_its_own_is_given_the_masked_weight(impl):
    """No matmul of patches, which fit here, is put in its place."""
    model = fxmask.apply(nn.Sequential(Twice(16, 32, 2, stride=2)), ratio=0.5, block=(4, 4), impl=impl, layers=nn.Conv2d)
    (row,), (mask,) = fxmask.explain(model).rows, fxmask.masks(model).values()
    assert (row["impl"], row["why"]) == ("masked_dense", "PyTorch's convolution of W∘M: Twice convolves in its own way")
    conv, x = model[0], torch.randn(2, 16, 8, 8)
    weight = conv.weight * expand_mask(mask, (32, 64), (4, 4)).view(32, 16, 2, 2)
    assert torch.equal(conv(x), F.conv2d(x, 2 * weight, conv.bias, stride=2))


class Doubled(nn.Conv2d):
    def __call__(self, x):
        return super().__call__(2 * x)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.called = nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3)

    def forward(self, x):
        return self.called(F.conv2d(x, self.conv.weight))


def test_what_stays_dense_has_a_row_and_a_reason():
    grouped = nn.Conv2d(16, 16, 3, groups=16), nn.Conv2d(16, 32, 3, groups=2)
    model = nn.Sequential(*grouped, Scaled(32, 16, 3), Reader(), nn.Conv2d(16, 16, 3), Doubled(16, 16, 3))
    model[4].forward = model[4].forward
    dense = copy.deepcopy(model)
    with pytest.warns(FxMaskWarning) as seen:
        fxmask.apply(model, ratio=0.5, block=BLOCK, layers=nn.Conv2d)
    reasons = {r["name"]: r["reason"] for r in fxmask.explain(model).rows}
    assert reasons == {
        "0": "a grouped convolution (groups=16)", "1": "a grouped convolution (groups=2)", "2": "Scaled has a forward of its own, which a mask would not reach",
        "3.conv": "its owner reads its weight and never calls it", "3.called": "selected",
        "4": "its forward was replaced on the instance, and a swapped class would not be called; call fxmask.apply before that",
        "5": "Doubled has a forward of its own, which a mask would not reach",
    }  # fmt: skip
    told = sorted(str(w.message).partition(" ")[0] for w in seen)
    assert told == ["2", "3.conv", "4", "5"]  # a grouped one is no surprise
    x = torch.randn(1, 16, 16, 16)
    fxmask.restore(model)
    assert torch.equal(model(x), dense(x))


def test_what_cannot_be_masked_is_an_error():
    with pytest.raises(UnsupportedError, match="cannot change '0': its weight is not initialised yet; run one forward first"):
        fxmask.apply(nn.Sequential(nn.LazyConv2d(16, 3)), layers=nn.Conv2d)
    with pytest.raises(UnsupportedError, match="cannot change '0': its weight is complex"):
        fxmask.apply(nn.Sequential(nn.Conv2d(16, 16, 3, dtype=torch.complex64)), layers=nn.Conv2d)
    with pytest.raises(UnsupportedError, match="read='weight', which is for Linears: got a convolution"):
        masked(nn.Conv2d, read="weight")
    with pytest.raises(StateError, match="masked already"):
        masked(nn.Conv2d, masked())
    with pytest.raises(ConfigError, match="with ActivationPruning alone, which is for inputs of Linears"):
        fxmask.apply(net(), fxmask.ActivationPruning(0.5, 8), layers=BOTH)
    shared = nn.Sequential(nn.Conv2d(16, 16, 3), nn.Conv2d(16, 16, 3))
    shared[1].weight = shared[0].weight
    with pytest.raises(ConfigError, match="one weight would be masked twice, differently: '0' and '1' share it"):
        fxmask.apply(shared, ratio=0.5, block=BLOCK, layers=nn.Conv2d, overrides={"1": {"ratio": 0.9}})
    fxmask.apply(shared, ratio=0.5, block=BLOCK, layers=nn.Conv2d)
    assert torch.equal(*fxmask.masks(shared).values())


def test_a_block_that_exceeds_the_weight_is_one_block():
    with pytest.warns(FxMaskWarning, match=r"no block can be masked at this ratio, so these stay dense: 0 \(1 block of \(64, 1000\)\)"):
        model = fxmask.apply(net(), ratio=0.5, block=(64, 1000), layers=nn.Conv2d, include="0")
    assert fxmask.masks(model)["0.weight"].tolist() == [[True]] and torch.equal(model(images()), net()(images()))


def test_inputs_of_convolutions_are_neither_pruned_nor_dropped():
    model = fxmask.apply(net(), WeightMask(0.5, BLOCK, backward="ste"), fxmask.ActivationPruning(0.5, 8), layers=BOTH)
    rows = {r["name"]: (r["masked"], r["activations"] is not None) for r in fxmask.explain(model).rows}
    assert rows == {"0": (True, False), "2": (True, False), "4": (True, False), "6": (True, False), "8": (True, True)}


def test_nm_masks_take_layers_too():
    model = fxmask.apply(net(), fxmask.NMMask(2, 4), layers=nn.Linear)
    assert list(fxmask.masks(model)) == ["8.weight"] and {r["reason"] for r in fxmask.explain(model).rows if not r["masked"]} == {"not in layers"}
    assert list(fxmask.masks(fxmask.apply(net(), fxmask.NMMask(2, 4), layers=nn.Conv2d))) == CONVS


# ---- what it computes ------------------------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("impl", ["reference", "auto", "cpu"])
@pytest.mark.parametrize("last", [False, True])
def test_the_bits_of_a_dense_copy_and_none_of_a_masked_element(impl, last):
    x = images()
    dense = net()
    if last:
        x, dense = x.to(memory_format=torch.channels_last), dense.to(memory_format=torch.channels_last)
    model = masked(nn.Conv2d, copy.deepcopy(dense), impl=impl)
    twin = twin_of(model, dense)
    found, expected = backward(model, x), backward(twin, x)
    for (name, p), g in zip(twin.named_parameters(), expected[2:], strict=True):
        if name in CONVS:
            g.masked_fill_(p == 0, 0)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12) if impl == "cpu" else torch.testing.assert_close(a, b, rtol=0, atol=0)
    for name, mask in fxmask.masks(model).items():  # where nothing is kept, no value is read
        w = model.get_parameter(name)
        w.data.masked_fill_(~expand_mask(mask, w.shape, BLOCK), 1e-30)
    assert torch.equal(model(x), found[0])


def test_patches_that_fit_are_multiplied_by_the_implementation_that_was_asked_for(monkeypatch):
    dense, called = nn.Sequential(nn.Conv2d(32, 48, 2, 2)), []
    model = masked(nn.Conv2d, dense, impl="cpu")
    monkeypatch.setattr(nn.Conv2d, "_conv_forward", lambda m, x, *_: called.append(x.shape))
    for shape, others in (((2, 32, 4, 5), 0), ((32, 2, 2), 0), ((2, 32, 1, 5), 1), ((2, 31, 4, 4), 1)):
        called.clear()
        model(torch.randn(shape))
        assert len(called) == others


@pytest.mark.parametrize("kernel", [1, 2])
@pytest.mark.parametrize("shape", [(1, 32, 9, 7), (2, 32, 9, 7), (32, 9, 7), (2, 32, 2, 2), (1, 32, 3, 2), (2, 32, 1, 2)])
def test_patches_have_the_strides_of_pytorchs_convolution(kernel, shape):
    """Also where an axis of length 1 could have any: PyTorch tells the memory format of one image by its batch's stride, of one pixel by all of them."""
    dense = nn.Sequential(nn.Conv2d(32, 48, (min(kernel, shape[-2]), kernel), kernel))
    model = masked(nn.Conv2d, copy.deepcopy(dense), impl="cpu")
    formats = (torch.contiguous_format, torch.channels_last) if len(shape) == 4 else (torch.contiguous_format,)
    for x in (torch.randn(shape).to(memory_format=f) for f in formats):
        assert model(x).stride() == dense(x).stride()


@pytest.mark.parametrize("config", [WeightMask(0.5, (4, 4)), WeightMask(0.5, (4, 4), backward="ste"), fxmask.NMMask()], ids=["masked", "ste", "nm"])
def test_strides_of_a_weight_that_say_no_format_give_the_result_none(config):
    """Those of W∘M would say one: of a 1x1 kernel, channels that lie inside."""
    dense = nn.Sequential(nn.Conv2d(16, 32, 1))
    dense[0].weight = nn.Parameter(torch.randn(1, 32, 1, 16).permute(1, 3, 0, 2))
    model = fxmask.apply(copy.deepcopy(dense), config, layers=nn.Conv2d)
    for x in (torch.randn(2, 16, 5, 5).to(memory_format=f) for f in (torch.contiguous_format, torch.channels_last)):
        assert model(x).stride() == dense(x).stride()


@pytest.mark.parametrize("x", [torch.ones(2, 1, 8, 8).expand(2, 3, 8, 8), torch.ones(2, 1, 1, 1)], ids=["grey, expanded to three channels", "one number"])
def test_strides_of_an_image_that_say_no_format_give_the_result_none(x):
    dense = nn.Sequential(nn.Conv2d(x.shape[1], 32, 1))
    model = fxmask.apply(copy.deepcopy(dense), WeightMask(0.5, BLOCK, impl="cpu"), layers=nn.Conv2d, exclude=())
    assert model(x).stride() == dense(x).stride()


def test_a_view_of_one_pixel_is_as_good_as_in_the_dense_model():
    dense, x = nn.Sequential(nn.Conv2d(4, 32, 4, 4), nn.Upsample(scale_factor=2)), torch.randn(3, 4, 4, 4)
    model = masked(nn.Conv2d, copy.deepcopy(dense), impl="cpu")
    assert model(x).view(3, -1).shape == dense(x).view(3, -1).shape == (3, 128)


@pytest.mark.parametrize("impl", ["reference", "auto", "cpu"])
def test_an_input_of_another_dtype_is_refused(impl):
    for dtype in (torch.float16, torch.float64, torch.int64):
        for model, x in ((nn.Conv2d(32, 32, 1), torch.ones(1, 32, 4, 4)), (nn.Linear(32, 32), torch.ones(4, 32))):
            with pytest.raises(RuntimeError, match=r"should be the same|have the same dtype"):
                masked(BOTH, nn.Sequential(model), impl=impl)(x.to(dtype))


def test_a_broken_masked_weight_reaches_nothing():
    for backward_mode in ("masked", "ste", "unmasked"):
        for impl in ("auto", "cpu"):
            model = masked(nn.Conv2d, backward=backward_mode, impl=impl, refresh=0)
            fxmask.step(model, 0)
            for name, mask in fxmask.masks(model).items():
                w = model.get_parameter(name)
                w.data.masked_fill_(~expand_mask(mask, w.shape, BLOCK), torch.inf)
            y = model(images())
            y.sum().backward()
            assert torch.isfinite(y).all() and (backward_mode == "unmasked" or all(torch.isfinite(p.grad).all() for p in model.parameters()))


def test_mode_unmasked_convolves_twice_for_a_gradient_alone():
    m, x = nn.Sequential(nn.Conv2d(16, 16, 3)), torch.randn(2, 16, 8, 8)
    fxmask.apply(m, WeightMask(0.5, (4, 4), backward="unmasked"), layers=nn.Conv2d)
    found = []
    for on in (False, True):
        with torch.set_grad_enabled(on), FlopCounterMode(display=False) as counter:
            m(x)
        found.append(counter.get_total_flops())
    assert found[1] == 2 * found[0] == 2 * 2 * 2 * 36 * 16 * 16 * 9


def test_rigl_has_a_dense_gradient_on_its_steps():
    model = masked(nn.Conv2d, backward="rigl", dense_every=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    fxmask.guard(optimizer, model)
    for dense in (False, True, False):
        found = {n: expand_mask(m, model.get_parameter(n).shape, BLOCK) for n, m in fxmask.masks(model).items()}
        backward(model, images())
        assert all(bool(model.get_parameter(n).grad[~kept].any()) == dense for n, kept in found.items())
        optimizer.step()


def test_a_soft_mask_fades():
    model = masked(nn.Conv2d, soft=True, schedule=Schedule("linear", steps=4))
    fxmask.step(model, 0)
    assert torch.allclose(model(images()), net()(images()), rtol=1e-12)
    fxmask.step(model, 4)
    assert torch.equal(model(images()), twin_of(model, net())(images()))


def test_a_parametrised_weight_is_masked_as_it_is_computed():
    dense = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 16, 3)), nn.utils.parametrizations.spectral_norm(nn.Conv2d(16, 16, 1))).double()
    model = fxmask.apply(copy.deepcopy(dense).eval(), ratio=0.5, block=BLOCK, layers=nn.Conv2d)
    x, w = torch.randn(2, 16, 6, 6, dtype=torch.float64), [m.weight.detach() for m in dense.eval()]
    for p in model.modules():
        assert not isinstance(p, MaskedLayer) or type(p).__name__.startswith("Masked")
    masks = list(fxmask.masks(model).values())
    w = [torch.where(expand_mask(m, t.shape, BLOCK), t, 0) for m, t in zip(masks, w, strict=True)]
    assert torch.allclose(model(x), F.conv2d(F.conv2d(x, w[0], dense[0].bias), w[1], dense[1].bias), rtol=1e-12, atol=1e-12)


def test_a_graft_has_the_value_of_one_and_the_gradient_of_the_other():
    a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
    torch.autograd.gradcheck(lambda b: graft(b.detach() * 2 - b.detach(), b), b)
    graft(a, b * torch.tensor([1.0, torch.inf, 3.0])).sum().backward()
    assert a.grad is None and b.grad.tolist() == [1.0, torch.inf, 3.0]
    y, t = torch.func.jvp(lambda b: graft(a, b * torch.tensor([1.0, torch.inf, 3.0])), (b,), (torch.ones(3),))
    assert torch.equal(y, a) and (t[0], t[2]) == (1, 3)  # by the plain form, which gives what is not finite no gradient
    assert not torch.func.grad(lambda a: graft(a, b.detach()).sum())(a.detach()).any()
    torch.library.opcheck(torch.ops.fxmask.graft.default, (a.detach(), b))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode"):
        torch.ops.fxmask.graft(torch.autograd.forward_ad.make_dual(a.detach(), b.detach()), b.detach())
