"""Bytes of an optimiser's step on kept blocks alone, by hand; and how `fxmask.analyze` learns of it."""

import json

import pytest
import torch
from analysis.counted import analyze
from torch import nn, optim

import fxmask
from fxmask.cli import main
from fxmask.errors import ConfigError
from fxmask.kernels import layer_cost
from fxmask.kernels.grid import kept_elements

X = torch.randn(5, 64)
BUILD = layer_cost.block_index((96, 64), (16, 16), 4, True).bytes_min  # of a mask that is not cached: all of w is read, its mask written


def net(refresh=0, **options):
    torch.manual_seed(0)
    return fxmask.apply(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 10)), ratio=0.75, block=(16, 16), refresh=refresh, **options)


def row(report, node="0.weight"):
    return next(r for r in report.tables["nodes"] if r["phase"] == "opt" and r["node"] == node)


@pytest.mark.parametrize(("optimizer", "states"), [("sgd", 0), ("sgd_momentum", 1), ("adamw", 2)])
def test_by_hand(optimizer, states):
    """6 of 24 blocks of 256 float32 elements, each of 16 runs. A gather reads an element and writes it, so does a scatter."""
    report = analyze(net(), X, optimizer=optimizer, masked_step=True)
    kept, runs, tensors = 4 * 6 * 256, 6 * 16, 2 + states
    gathered = tensors * (kept + kept + 8 * runs)
    stepped = tensors * kept + (tensors - 1) * kept
    scattered = (tensors - 1) * (kept + kept + 8 * runs)
    expected = gathered + stepped + scattered + 8 * runs + 24
    found = row(report)
    assert found["bytes_min"] == found["bytes_req"] == expected
    assert (found["impl"], found["nnzb"], found["density"], found["flop"]) == ("masked_step", 6, 0.25, 0)
    (least,) = (r for r in report.tables["roofline"] if r["phase"] == "opt" and r["node"] == "0.weight")
    assert (least["t_min_us"], least["t_dense_min_us"]) == (pytest.approx(2 * (2 * tensors)), pytest.approx(2)), "2 us for each gather, step, and scatter"
    # of both layers, biases included, beside a dense step of all of them
    moved, dense = expected + (3 + 2 * states) * 4 * (96 + 10 * 96 + 10), (3 + 2 * states) * 4 * (96 * 64 + 96 + 10 * 96 + 10)
    (said,) = (n for n in report.notes if n.startswith("Masked step"))
    assert said.endswith(f"{moved / 1e6:.4g} MB a step, gathers and scatters included, a dense step {dense / 1e6:.4g}: {1 - moved / dense:.1%} less.")
    # what is not masked is stepped densely, and what is not counted so, too
    plain = analyze(net(), X, optimizer=optimizer)
    assert row(plain)["bytes_min"] == (3 + 2 * states) * 4 * 96 * 64 and row(plain)["impl"] is None
    for other in ("0.bias", "2.weight", "2.bias"):
        assert row(report, other) == row(plain, other)
    moved = report.summary["optimizer_bytes"]
    assert moved["dense"] == plain.summary["bytes_min"]["opt"] and moved["masked"] == report.summary["bytes_min"]["opt"]
    assert moved["saved"] == moved["dense"] - moved["masked"] == row(plain)["bytes_min"] - expected and "optimizer_bytes" not in plain.summary
    assert moved["saved"] > 0
    assert {r["quantity"] for r in report.tables["summary"]} >= {"optimizer_bytes_dense", "optimizer_bytes_masked", "optimizer_bytes_saved"}
    assert [n for n in report.notes if n.startswith("Masked step")] and not [n for n in plain.notes if n.startswith("Masked step")]
    # state is held whole, and nothing but the step has changed
    assert report.tables["footprint"] == plain.tables["footprint"]
    assert [r for r in report.tables["nodes"] if r["phase"] != "opt"] == [r for r in plain.tables["nodes"] if r["phase"] != "opt"]
    operands = {(r["operand"], r["direction"]): r["bytes_min"] for r in report.tables["traffic"] if r["phase"] == "opt" and r["node"] == "0.weight"}
    assert operands["w", "read"] == operands["w", "write"] == operands["dw", "read"] == kept and operands["mask", "read"] == 24
    assert operands.get(("opt_state", "read"), 0) == operands.get(("opt_state", "write"), 0) == states * kept
    assert operands["compact", "read"] == operands["compact", "write"] == (3 + 2 * states) * kept


def test_a_mask_that_each_forward_builds_is_built_again():
    cached, anew = (row(analyze(net(refresh), X, masked_step=True))["bytes_min"] for refresh in (0, 1))
    assert anew - cached == BUILD > 4 * 96 * 64


def test_ragged_edges():
    """Kept elements are counted as they are; a run is written by two indices, and the mask is expanded to rows first."""
    torch.manual_seed(0)
    layer = nn.Linear(40, 50)
    layer.weight.data[48:], layer.weight.data[:, 32:] = 5, 5
    model = fxmask.apply(nn.Sequential(layer), ratio=0.5, block=(16, 16), refresh=0)
    mask = fxmask.masks(model)["0.weight"]
    kept, nnzb = int(kept_elements(mask, (50, 40), (16, 16))), int(mask.sum())
    found = row(analyze(model, torch.randn(3, 40), optimizer="adamw", masked_step=True))["bytes_min"]
    assert found == 21 * 4 * kept + 16 * nnzb * (24 + 4 * 8 + 3 * 16) + mask.numel() + 2 * 50 * 3 and nnzb * 256 > kept  # 21 = 9 + 6 * 2


def test_the_guard_says_so():
    model = net()
    optimizer = optim.AdamW(model.parameters())
    dense = analyze(model, X, optimizer=optimizer)
    handle = fxmask.guard(optimizer, model)
    assert analyze(model, X, optimizer=optimizer).tables["nodes"] == dense.tables["nodes"]
    handle.remove()
    with fxmask.guard(optimizer, model, masked_step=True):
        masked = analyze(model, X, optimizer=optimizer)
        assert masked.tables["nodes"] == analyze(model, X, optimizer="adamw", masked_step=True).tables["nodes"] != dense.tables["nodes"]
        assert analyze(model, X, optimizer=optimizer, masked_step=False).tables["nodes"] == dense.tables["nodes"]
        assert "0.weight" in masked.explain("0.weight") and "In sum        (9 + 6 s) b kept" in masked.explain("0.weight")
    assert analyze(model, X, optimizer=optimizer).tables["nodes"] == dense.tables["nodes"]


def test_what_it_costs_where_much_is_kept():
    """At 25 % it moves more than a dense step, and says so."""
    torch.manual_seed(0)
    model = fxmask.apply(nn.Sequential(nn.Linear(64, 96)), ratio=0.25, block=(16, 16), refresh=0)
    report = analyze(model, X, masked_step=True)
    assert report.summary["optimizer_bytes"]["saved"] < 0
    assert [n for n in report.notes if n.startswith("Masked step") and "% more: fewer blocks must be kept" in n]


def test_modes_whose_masked_weights_move_are_stepped_densely():
    for backward in ("ste", "unmasked", "rigl"):
        assert "optimizer_bytes" not in analyze(net(refresh=1, backward=backward), X, masked_step=True).summary


def test_wrong_use():
    with pytest.raises(ConfigError, match="masked_step: expected True, False or None, got 'yes'"):
        analyze(net(), X, masked_step="yes")


def test_the_command(capsys, tmp_path, monkeypatch):
    (tmp_path / "tiny_for_masked_step.py").write_text("from torch import nn\ndef net():\n    return nn.Sequential(nn.Linear(64, 96))\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for more in ([], ["--masked-step"]):
        main(["analyze", "tiny_for_masked_step:net", "--input", "5x64", "--ratio", "0.75", "--format", "json", *more])
        found.append(json.loads(capsys.readouterr().out)["summary"])
    assert "optimizer_bytes" not in found[0] and found[1]["optimizer_bytes"]["saved"] == found[0]["bytes_min"]["opt"] - found[1]["bytes_min"]["opt"]
