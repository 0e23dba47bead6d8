"""The parser of the thesis' configuration strings: what it reads, and the text and place of every refusal."""

from __future__ import annotations

import pytest
import torch
from resmlp import PRESETS, ResMLP
from thesis.config import Item, ThesisConfigError, parse

import fxmask

PATCH, FC1, FC2 = "blocks.*.patch_mix", "blocks.*.fc1", "blocks.*.fc2"


def test_published_string():
    config = parse("ResMLP5 @ XChannel = masked 0.9 (16, 16); XPatch = masked 0.9 (16, 16);")
    assert (config.model, config.depth) == ("ResMLP", 5)
    assert config.items == (Item("XChannel", "masked", 0.9, (16, 16), (FC1, FC2)), Item("XPatch", "masked", 0.9, (16, 16), (PATCH,)))
    arguments = config.apply_arguments()
    assert (arguments["ratio"], arguments["block"]) == (0.9, (16, 16))
    assert arguments["include"] == [FC1, FC2, PATCH]


def test_layers_may_differ():
    config = parse("ResMLP12 @ XPatch=masked 0.5 (2, 2); XChannel=masked 0.3 (1, 1);")
    assert config.depth == 12
    assert config.apply_arguments()["overrides"] == {
        PATCH: {"ratio": 0.5, "block": (2, 2)},
        FC1: {"ratio": 0.3, "block": (1, 1)},
        FC2: {"ratio": 0.3, "block": (1, 1)},
    }


def test_digit_picks_a_linear_and_sparse_is_drawn_once():
    overrides = parse("ResMLP5@XChannel1=sparse .25(8,4);XChannel2=masked 0.5 (4, 8)").apply_arguments()["overrides"]
    assert overrides == {FC1: {"ratio": 0.25, "block": (8, 4), "criterion": "random", "refresh": 0}, FC2: {"ratio": 0.5, "block": (4, 8)}}


def test_later_item_holds():
    overrides = parse("ResMLP5 @ XChannel = masked 0.9 (16, 16); XChannel2 = masked 0.5 (16, 16);").apply_arguments()["overrides"]
    assert (overrides[FC1]["ratio"], overrides[FC2]["ratio"]) == (0.9, 0.5)


@pytest.mark.parametrize("text", ["ResMLP5", "ResMLP5 @", "  ResMLP 5 @  "])
def test_no_items_is_dense(text):
    assert parse(text).apply_arguments() == {}


@pytest.mark.parametrize(
    "text",
    [
        "ResMLP5@XPatch=masked 0.5(2,2)",
        "ResMLP5 @ XPatch = masked 0.5 (2, 2)",
        " ResMLP5  @\n  XPatch1 =\tmasked 0.50 ( 2 , 2 ) ; ",
    ],
)
def test_spaces_are_free(text):
    assert parse(text).apply_arguments()["overrides"] == {PATCH: {"ratio": 0.5, "block": (2, 2)}}


BAD = {  # string -> position, message
    "": (0, "expected the model's name and depth, such as 'ResMLP5', got the end of the string"),
    "ViT5 @": (0, "expected the model ResMLP, got 'ViT'"),
    "ResMLP @ XPatch": (7, "expected the depth of ResMLP, such as 'ResMLP5', got '@'"),
    "ResMLP0": (6, "expected a depth of at least 1, got 0"),
    "ResMLP5 XPatch": (8, "expected '@' and the layers to mask, or the end of the string (all layers dense), got 'XPatch'"),
    "ResMLP5 @ ;": (10, "expected a layer (XPatch, XChannel), got ';'"),
    "ResMLP5 @ XHead = masked 0.5 (2, 2);": (10, "expected a layer (XPatch, XChannel), got 'XHead'"),
    "ResMLP5 @ XPatch2 = masked 0.5 (2, 2);": (16, "XPatch has 1 linear(s): expected XPatch or XPatch1, got 'XPatch2'"),
    "ResMLP5 @ XChannel3 = masked 0.5 (2, 2);": (18, "expected XChannel or XChannel1 or XChannel2, got 'XChannel3'"),
    "ResMLP5 @ XPatch masked 0.5 (2, 2);": (17, "expected '=', got 'masked'"),
    "ResMLP5 @ XPatch = mask 0.5 (2, 2);": (19, "expected one of masked, sparse, compressed, got 'mask'"),
    "ResMLP5 @ XPatch = masked (2, 2);": (26, "expected a ratio in [0, 1), the fraction of blocks that are masked, such as 0.9, got '('"),
    "ResMLP5 @ XPatch = masked -0.5 (2, 2);": (26, "such as 0.9, got '-'"),
    "ResMLP5 @ XPatch = masked 90 (2, 2);": (26, "got 90. Write 0.9 for 90 %"),
    "ResMLP5 @ XPatch = masked 1.0 (2, 2);": (26, "expected a ratio in [0, 1), the fraction of blocks that are masked, got 1."),
    "ResMLP5 @ XPatch = masked 0.5;": (29, "expected a block such as (16, 16), got ';'"),
    "ResMLP5 @ XPatch = masked 0.5 2, 2;": (30, "expected a block such as (16, 16), got '2'"),
    "ResMLP5 @ XPatch = masked 0.5 (x, 2);": (31, "expected the block's height, a positive whole number, got 'x'"),
    "ResMLP5 @ XPatch = masked 0.5 (2 2);": (33, "expected ',' between the block's height and width, got '2'"),
    "ResMLP5 @ XPatch = masked 0.5 (2, 0);": (34, "expected the block's width, a positive whole number, got 0"),
    "ResMLP5 @ XPatch = masked 0.5 (2, 2;": (35, "expected ')' after the block's width, got ';'"),
    "ResMLP5 @ XPatch = masked 0.5 (2, 2) XChannel": (37, "expected ';' after the item, got 'XChannel'"),
    "ResMLP5 @ XPatch = masked 0.5 (2, 2); XPatch = masked 0.6 (2, 2);": (10, "'XPatch' has no effect: later items name the same linears"),
    "ResMLP5 @ XChannel1 = masked 0.5 (2, 2); XChannel = sparse 0.6 (2, 2);": (10, "'XChannel1' has no effect"),
    "ResMLP5 @ XPatch = compressed 2;": (30, "expected a block such as (16, 16), got '2'"),
}


@pytest.mark.parametrize("text", BAD)
def test_bad_string(text):
    position, message = BAD[text]
    with pytest.raises(ThesisConfigError) as caught:
        parse(text)
    assert message in str(caught.value)
    assert caught.value.position == position
    first, echo, caret = str(caught.value).split("\n")
    assert first.startswith(f"thesis configuration, at character {position}: ")
    assert echo == "  " + text
    assert caret.index("^") == 2 + position


@pytest.mark.parametrize("rest", ["(16, 16)", "(16, 16) (4, 4)", "(1, 16) bsr", "(1, 16) bsr l2 0.5", "(1, 16) (1, 4) bsr l2 0.5"])
def test_compressed_is_read_and_refused(rest):
    text = f"ResMLP5 @ XChannel = compressed {rest}; XPatch = masked 0.5 (2, 2);"
    with pytest.raises(ThesisConfigError, match="are not weight masks") as caught:
        parse(text)
    assert caught.value.position == text.index("compressed")
    for way_out in ("'masked R (h, w)'", "'sparse R (h, w)'", "leave the layer out"):
        assert way_out in str(caught.value)


def test_error_is_what_callers_expect():
    assert issubclass(ThesisConfigError, fxmask.FxMaskError)
    assert issubclass(ThesisConfigError, ValueError)


def test_arguments_mask_the_named_layers_only():
    torch.manual_seed(0)
    config = parse("ResMLP5 @ XPatch = masked 0.75 (16, 16); XChannel2 = sparse 0.5 (32, 32);")
    model = fxmask.apply(ResMLP(PRESETS["cifar"]), **config.apply_arguments())
    masks = fxmask.masks(model)
    assert set(masks) == {f"blocks.{i}.{name}.weight" for i in range(5) for name in ("patch_mix", "fc2")}
    assert masks["blocks.0.patch_mix.weight"].sum() == 4
    assert masks["blocks.0.fc2.weight"].sum() == 8
