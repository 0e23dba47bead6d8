"""Wrong masks and scores of the user's own: what is said, and that the model is as it was."""

import pytest
import torch
from torch import nn
from unit.given_masks import diagonal, mask_of, net, scores

import fxmask
from fxmask.errors import ConfigError, FxMaskError, UnsupportedError

WRONG = {
    "no such layer": (dict(masks={"9": diagonal()}), ConfigError, "'9' is no linear of this model: expected some of 0, 2"),
    "no dict": (dict(masks=diagonal()), ConfigError, "expected a dict of layer's name to tensor, got Tensor"),
    "no tensor": (dict(scores={"0": [1.0]}), ConfigError, r"scores\['0'\]: expected a tensor of real numbers.*got list"),
    "scores as a mask": (dict(masks={"0": scores()}), ConfigError, "got torch.float32; scores go into scores="),
    "a mask as scores": (dict(scores={"0": diagonal()}), ConfigError, "got torch.bool; a mask goes into masks="),
    "of single weights": (dict(masks={"0": torch.ones(64, 64) > 0}), ConfigError, r"(?s)expected shape \(4, 4\).*fix: \S*to_blocks\(mask, \(16, 16\)\)\.any"),
    "of a few single weights": (dict(masks={"0": torch.eye(64, dtype=torch.bool)}), ConfigError, r"(?s)4 of 16 blocks are kept in part.*block=\(1, 1\)"),
    "scores of single weights": (dict(masks=None, scores={"0": torch.ones(64, 64)}), ConfigError, r"to_blocks\(scores, \(16, 16\)\).sum"),
    "a layout of ints": (dict(masks={"0": diagonal().long()}), ConfigError, r"got torch.int64; of zeros and ones .bool\(\) makes one"),
    "complex": (dict(masks=None, scores={"0": torch.ones(4, 4, dtype=torch.complex64)}), ConfigError, "of real numbers.*got torch.complex64"),
    "sparse": (dict(masks={"0": diagonal().to_sparse()}), ConfigError, "got a torch.sparse_coo one"),
    "no layer at all": (dict(masks={}), ConfigError, "masks: expected a dict of layer's name to tensor, got an empty one"),
    "no scores at all": (dict(masks=None, scores={}), ConfigError, "scores: expected a dict of layer's name to tensor, got an empty one"),
    "an overridden ratio": (dict(overrides={"0": dict(ratio=0.9)}), ConfigError, "overrides give '0' another ratio"),
    "an overridden criterion": (dict(overrides={"0": dict(criterion="l1")}), ConfigError, "overrides give '0' another criterion"),
    "an idle refresh": (dict(refresh=7), ConfigError, "refresh=7 beside a mask"),
    "a name in a wrapper": (dict(masks={"module.0.weight": diagonal()}), ConfigError, r"(?s)no linear of this model.*without what a wrapper puts before it"),
    "of other blocks": (dict(block=(32, 32)), ConfigError, r"expected shape \(2, 2\).*got \(4, 4\)"),
    "empty": (dict(masks={"0": torch.zeros(4, 4, dtype=torch.bool)}), ConfigError, "keeps no block"),
    "NaN": (dict(masks=None, scores={"0": torch.full((4, 4), torch.nan)}), ConfigError, "got NaN in 16 of 16 blocks"),
    "meta": (dict(masks={"0": torch.ones(4, 4, dtype=torch.bool, device="meta")}), UnsupportedError, "meta device"),
    "both": (dict(scores={"0.weight": scores()}), ConfigError, "are of one weight"),
    "both, the same numbers": (dict(scores={"0.weight": diagonal().float()}), ConfigError, "are of one weight"),
    "excluded": (dict(exclude="0"), ConfigError, "of a layer that stays dense: in exclude"),
    "an idle ratio": (dict(ratio=0.9), ConfigError, "ratio=0.9 beside a mask"),
    "nothing idle, for all": (dict(criterion="given", ratio=0.9), ConfigError, "^ratio=0.9 beside a mask"),
    "an idle criterion": (dict(criterion="l1"), ConfigError, "criterion='l1' beside a mask"),
    "no mask": (dict(masks=None, criterion="given"), ConfigError, "neither a mask nor scores"),
    "no mask for one": (dict(include=["0", "2"], criterion="given"), ConfigError, "criterion='given' for '2'"),
    "cover": (dict(cover=True), ConfigError, "expected cover=False"),
    "average": (dict(average=0.9), ConfigError, "expected no average with it"),
    "regrow": (dict(regrow=fxmask.Regrow("random")), ConfigError, "expected no regrow with it"),
    "phases": (dict(phases={3: dict(backward="ste")}), ConfigError, "expected no phases with it"),
    "a later phase": (dict(phases={3: dict(criterion="given")}), ConfigError, "expected it from the first step on"),
    "ties": (dict(ties="keep"), ConfigError, "expected ties='lowest'"),
    "allocation": (dict(allocation="erk"), ConfigError, "masks are for block masks of weights: expected neither beside an allocation"),
}


@pytest.mark.parametrize("case", WRONG)
def test_wrong_use_says_what_and_changes_nothing(case):
    options, error, words = WRONG[case]
    model = net()
    with pytest.raises(error, match=words):
        fxmask.apply(model, **{"masks": {"0": diagonal()}, **options})
    assert type(model[0]) is nn.Linear
    assert not [name for name in model[0].__dict__ if name.startswith("_fxmask_")]


@pytest.mark.parametrize("config", [fxmask.NMMask(), fxmask.ActivationPruning(), fxmask.BlockDropout(p=0.1)], ids=lambda c: type(c).__name__)
def test_beside_other_systems_alone(config):
    with pytest.raises(ConfigError, match=f"expected neither beside {type(config).__name__} alone"):
        fxmask.apply(net(), config, masks={"0": diagonal()})
    if not isinstance(config, fxmask.NMMask):
        assert torch.equal(mask_of(fxmask.apply(net(), fxmask.WeightMask(), config, masks={"0": diagonal()})), diagonal())


def test_the_compiler_backend_refuses():
    own = "makes its masks from weights: expected no masks or scores of your own"
    wrong = [({"masks": {"0": diagonal()}}, own), ({"criterion": "given"}, own), ({"overrides": {"0": {"criterion": "given"}}}, "keeps no state")]
    for options, words in wrong:
        with pytest.raises((FxMaskError, torch._dynamo.exc.BackendCompilerFailed), match=words):
            torch.compile(net(), backend="fxmask", options=options)(torch.randn(2, 64))
        torch._dynamo.reset()
