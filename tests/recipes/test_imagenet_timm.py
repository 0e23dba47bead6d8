"""The ImageNet path with timm's models and timm's loader: a run that is broken off ends with the bits of one that is not."""

from __future__ import annotations

import pytest
import torch
from distributed.imagenet_runs import MODEL, SHORT, TEST_IMAGES, broken_off, make_folder, rows, state
from saved_states import same
from thesis import imagenet as program
from thesis.imagenet_data import open_images
from thesis.imagenet_model import build
from thesis.ranks import Ranks

import fxmask

# timm's reader leaves closing its files to Python
pytestmark = [
    pytest.mark.models,
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:unclosed file <_io.BufferedReader name='.*png'>:ResourceWarning"),
]
ALONE = Ranks(0, 1, torch.device("cpu"), grouped=False)


@pytest.fixture(scope="module")
def root(torchvision, tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("imagenet") / "data")


RUNS = {
    "model": ("--timm", "test_vit", "--image", "32", "--block", "16", "16", "--exclude", "*.attn.*"),
    "batch-norm": ("--timm", "test_resnet", "--image", "32", "--dense"),
    "loader": (*MODEL, "--loader", "timm"),
    "loader-workers": (*MODEL, "--loader", "timm", "--workers", "2"),
}


@pytest.mark.parametrize("name", RUNS)
def test_resume_is_exact(name, root, tmp_path):
    outs, options = [tmp_path / "whole", tmp_path / "broken"], [*RUNS[name], *SHORT, "--root", str(root), "--out"]
    broken_off([*options, str(outs[1])], 6)
    for out in outs:
        assert program.main([*options, str(out)]) == 0
    assert same(*map(state, outs)) and rows(outs[0]) == rows(outs[1]) and len(rows(outs[0])) == 4
    losses = [float(row.split(",")[1]) for row in rows(outs[0])[1:]]
    assert losses[-1] < losses[0]


def test_which_layers_are_masked():
    args = program.arguments(["--root", "x", "--timm", "test_vit", "--image", "32", "--block", "16", "16", "--exclude", "*.attn.*"])
    rows = {row["name"]: row["masked"] for row in fxmask.explain(build(args, 4, 1, ALONE.device)).rows}
    assert not rows["head"] and not rows["blocks.0.attn.qkv"] and rows["blocks.0.mlp.fc1"] and rows["blocks.0.mlp.fc2"]


def test_the_published_resmlp():
    """By its name in timm, for as many classes as the folder has."""
    model = build(program.arguments(["--root", "x", "--timm", "resmlp_12_224"]), 7, 1, ALONE.device)
    assert model.head.out_features == 7 and sum(row["masked"] for row in fxmask.explain(model).rows) == 36


def test_unknown_model(root, tmp_path, capsys):
    assert program.main(["--root", str(root), "--out", str(tmp_path), "--timm", "resmlp_13", "--batch", "8"]) == 2
    told = capsys.readouterr().err
    assert "expected a model of timm" in told and "got 'resmlp_13'; it has resmlp_12_224" in told


def test_both_loaders_show_the_same_images(root):
    """In the same order; crops differ, and so does the test's resampling, by little."""
    ours, theirs = (open_images(root, ALONE, image=32, batch=8, seed=0, workers=0, loader=name) for name in ("timm", "torchvision"))
    for images in (ours, theirs):
        assert (images.classes, images.steps, images.train_images, images.test_images) == ([f"class{c}" for c in range(4)], 6, 48, TEST_IMAGES)
    for (_, labels), (_, others) in zip(ours.train(1, 2), theirs.train(1, 2), strict=True):
        assert torch.equal(labels, others)
    for (pixels, labels), (others, same_labels) in zip(ours.test(), theirs.test(), strict=True):
        assert torch.equal(labels, same_labels) and pixels.shape == others.shape and (pixels - others).abs().mean() < 0.2
