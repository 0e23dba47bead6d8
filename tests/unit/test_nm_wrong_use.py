"""What `NMMask` refuses: the text of each message, and that nothing has changed."""

import numpy
import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import nn

import fxmask
from fxmask import NMMask
from fxmask.errors import UnsupportedError


def net() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(4, 16, 3, padding=1, stride=2), nn.GELU(), nn.Flatten(), nn.Linear(256, 32), nn.GELU(), nn.Linear(32, 10))


WRONG = {
    "n": (lambda: NMMask(4, 4), "1 <= n < m <= 32"),
    "m": (lambda: NMMask(2, 64), "got n=2, m=64"),
    "mode": (lambda: NMMask(mode="best"), "unknown mode: expected one of magnitude, permuted"),
    "tau": (lambda: NMMask(mode="learned", tau=0), "tau: expected a finite number above 0"),
    "tau_from": (lambda: NMMask(mode="learned", tau_from=0.0, tau_steps=9), "expected a finite number above 0 and an int of at least 1, or neither"),
    "tau_from alone": (lambda: NMMask(mode="learned", tau_from=1.0), "got tau_from=1.0, tau_steps=0"),
    "tau_steps alone": (lambda: NMMask(mode="learned", tau_steps=9), "got tau_from=None, tau_steps=9"),
    "tau_steps": (lambda: NMMask(mode="learned", tau_from=1.0, tau_steps=0.5), "got tau_from=1.0, tau_steps=0.5"),
    "tau_from of another mode": (lambda: NMMask(tau_from=1.0, tau_steps=9), "tau_from is an option of mode='learned'"),
    "nobody counts": (lambda: fxmask.apply(net(), NMMask(mode="learned", tau_from=1.0, tau_steps=9))(torch.randn(2, 4, 8, 8)), "nobody tells them"),
    "decay": (lambda: NMMask(mode="sr-ste", decay=-1), "decay: expected"),
    "passes": (lambda: NMMask(mode="permuted", passes=0), "passes: expected"),
    "final": (lambda: NMMask(mode="learned", final="best"), "unknown final: expected one of argmax, sample"),
    "init": (lambda: NMMask(mode="learned", init="zero"), "unknown init: expected one of glorot, magnitude"),
    "soft": (lambda: NMMask(mode="learned", soft=1), "soft: expected True or False"),
    "permute": (lambda: NMMask(mode="learned", permute=1), "permute: expected True or False"),
    "permute of another mode": (lambda: NMMask(permute=True), "permute is an option of mode='learned'"),
    "another mode's": (lambda: NMMask(tau=0.5), "tau is an option of mode='learned'"),
    "transposable": (lambda: NMMask(1, 4, transposable=True), "expected n=2, m=4"),
    "patterns": (lambda: NMMask(8, 16, mode="learned"), "at most 4096, got 12870"),
    "with a WeightMask": (
        lambda: fxmask.apply(net(), NMMask(), fxmask.WeightMask()),
        "goes alone: expected one config, got NMMask and WeightMask; .*fewer than n of m",
    ),
    "with a subclass of one": (lambda: fxmask.apply(net(), type("Mine", (fxmask.WeightMask,), {})(), NMMask()), "got Mine and NMMask; .*fewer than n of m"),
    "with pruning": (lambda: fxmask.apply(net(), fxmask.ActivationPruning(), NMMask()), "goes alone: .*; its layers .* saves inputs whole"),
    "with dropout": (lambda: fxmask.apply(net(), NMMask(), fxmask.BlockDropout(0.1)), "goes alone: .*; its layers .* drops nothing of inputs"),
    "twice": (lambda: fxmask.apply(net(), NMMask(), NMMask()), "goes alone: .*; a weight has one mask"),
    "again": (lambda: fxmask.apply(fxmask.apply(net(), NMMask()), NMMask()), "has N:M masks already"),
    "blocks later": (lambda: fxmask.apply(fxmask.apply(net(), NMMask()), ratio=0.5), "has N:M masks already"),
    "after blocks": (
        lambda: fxmask.apply(fxmask.apply(net()), NMMask()),
        r"masked, pruned or dropped already: expected a dense one\.(?s:.*)restore\(model\) first; N:M masks do not go",
    ),
    "ratio beside it": (lambda: fxmask.apply(net(), NMMask(), ratio=0.5), "an NMMask goes alone, without the options of a WeightMask: .*got ratio"),
    "allocation": (lambda: fxmask.apply(net(), NMMask(), allocation="erk"), "expected None beside an NMMask"),
    "option": (lambda: fxmask.apply(net(), NMMask(), overrides={"3": {"ratio": 0.5}}), "unknown option .* got 'ratio'"),
    "trace": (lambda: fxmask.apply(torch.fx.symbolic_trace(net()), NMMask()), "on the nn.Module instead of its trace"),
    "tracing": (lambda: torch.fx.symbolic_trace(fxmask.apply(net(), NMMask())), "cannot look into"),
    "meta": (lambda: fxmask.apply(net().to("meta"), NMMask(mode="learned")), "needs the weight's values"),
    "freeze": (lambda: fxmask.freeze(net()), "has no N:M mask"),
    "freeze blocks": (lambda: fxmask.freeze(fxmask.apply(net())), "fixed by kept = fxmask.masks"),
    "step": (lambda: fxmask.step(fxmask.apply(net(), NMMask())), "it has N:M masks alone"),
    "guard": (lambda: fxmask.guard(torch.optim.SGD((m := fxmask.apply(net(), NMMask())).parameters()), m), "it has N:M masks alone"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use(case):
    call, words = WRONG[case]
    with pytest.raises(fxmask.FxMaskError, match=words):
        call()


@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")
@pytest.mark.parametrize("mode", ["magnitude", "sr-ste", "permuted", "learned"])
def test_a_trace_by_torch_jit(mode):
    """PyTorch cannot trace how bits are ranked, and dies of it. What rests, or is learned, it can."""
    model, x = fxmask.apply(nn.Sequential(nn.Linear(64, 32)), NMMask(mode=mode)).eval(), torch.randn(4, 64)
    with torch.no_grad():
        if mode in ("magnitude", "sr-ste"):
            with pytest.raises(fxmask.FxMaskError, match=r"torch.jit.trace cannot record(.|\n)*where: NMLinear(.|\n)*fxmask.freeze\(model\)"):
                torch.jit.trace(model, x)
            fxmask.freeze(model)
        assert torch.equal(torch.jit.trace(model, x)(x), model(x))


def test_numbers_of_numpy_are_numbers():
    assert NMMask(mode="sr-ste", decay=numpy.float32(0.5)) == NMMask(mode="sr-ste", decay=0.5)
    found = NMMask(mode="learned", tau=numpy.float32(0.5), tau_from=numpy.int64(2), tau_steps=3)
    assert found == NMMask(mode="learned", tau=0.5, tau_from=2.0, tau_steps=3) and type(found.tau_from) is type(found.tau) is float
    with pytest.raises(fxmask.FxMaskError, match=r"tau: expected a finite number above 0, got .*nan"):
        NMMask(mode="learned", tau=numpy.float32("nan"))


def test_wrong_use_loses_nothing():
    model = net()
    with pytest.raises(fxmask.FxMaskError, match="got n=9, m=4"):
        fxmask.apply(model, NMMask(), overrides={"3": {"n": 9}})
    assert repr(model) == repr(net())


def test_the_ops_themselves_refuse_forward_ad():
    """Which would take their tangents for zero."""
    w, mask, fx = torch.ones(4, 4), torch.ones(4, 4, dtype=torch.bool), torch.ops.fxmask
    for call in (lambda: fx.nm_learned(w, w, mask), lambda: fx.nm_sr_ste(w, mask, 0.1)):
        call()
        with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="forward-mode AD"):
            call()


class Own(nn.Linear):
    def forward(self, x):
        return super().forward(x).relu()


def test_a_linear_with_a_forward_of_its_own_stays_dense_and_is_not_told_to_read():
    """`read="weight"`, which a WeightMask has, is no option here."""
    with pytest.warns(fxmask.FxMaskWarning, match="^1 stays dense: Own has a forward of its own, which a mask would not reach") as told:
        model = fxmask.apply(nn.Sequential(nn.Linear(32, 32), Own(32, 32)), NMMask())
    assert list(fxmask.masks(model)) == ["0.weight"] and "read=" not in str(told[0].message)
    assert fxmask.explain(model).rows[1]["reason"] == "Own has a forward of its own, which a mask would not reach"


@pytest.mark.parametrize("mode", ["magnitude", "permuted", "learned", "sr-ste"])
def test_a_forward_on_freed_memory_is_refused(mode):
    """PyTorch would read there, and the process would die."""
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 64)), NMMask(2, 4, mode=mode))
    model[0].weight.untyped_storage().resize_(0)
    with pytest.raises(UnsupportedError, match=r"this weight's memory was freed(.|\n)*fix: run the forward of the wrapper"):
        model(torch.randn(2, 32))


@pytest.mark.parametrize("taken", ["flat", "freed", "empty"])
def test_a_weight_that_a_wrapper_has_taken(taken):
    """As FullyShardedDataParallel and ZeRO-3 leave weights between forwards."""
    model = fxmask.apply(nn.Sequential(nn.Linear(32, 64), nn.Linear(64, 32)), NMMask(2, 4))
    if taken == "freed":
        model[0].weight.data.untyped_storage().resize_(0)
    else:
        model[0].weight.data = model[0].weight.data.flatten()[: 100 if taken == "flat" else 0]
    for call in (fxmask.masks, fxmask.freeze, fxmask.finalize):
        with pytest.raises(UnsupportedError, match=r"flattened or freed this weight(.|\n)*where: 0\n(.|\n)*fully_shard or DistributedDataParallel"):
            call(model)
    first, second = fxmask.explain(model).rows
    assert first["reason"] == "selected; a wrapper has flattened or freed its weight, which it gives the forward alone" and first["achieved_ratio"] is None
    assert second["reason"] == "selected" and second["achieved_ratio"] == 0.5
