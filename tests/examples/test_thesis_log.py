"""What a row of the log says: means over images, which images judge, sums over a ramp, and random numbers that hang on seed and step."""

from __future__ import annotations

import plots
import pytest
import torch
import train as common
from thesis import masked_model, train_run
from thesis import train as program
from torch.utils.flop_counter import FlopCounterMode

PLAIN = ("--device", "cpu", "--threads", "1", "--data", "digits", "--batch", "64", "--warmup", "0", "--cooldown", "0", "--masks-from", "0", "--epochs", "1")
UNMOVED = (*PLAIN, "--mix-prob", "0", "--smoothing", "0", "--lr", "1e-12", "--min-lr", "1e-12", "--weight-decay", "0", "--holdout", "300")
CONFIG = ("--config", "ResMLP2 @ XPatch = masked 0.75 (16, 16); XChannel = masked 0.75 (16, 16);")


def test_means_are_over_images_and_the_held_out_ones_judge(tmp_path):
    """Of a model that stands still; the last batch is smaller, and its images count as much as the others."""
    args = program.arguments([*UNMOVED, "--dense", "--no-figures", "--read-test", "--out", str(tmp_path)])
    program.run(args)
    (row,), run = plots.read_csv(tmp_path / "log.csv"), program.Run(args)
    seen, held, test = (common.evaluate(run.model, images) for images in (run.data.train(1), run.data.held(), run.data.test()))
    assert (float(row["train_loss"]), float(row["train_acc"])) == pytest.approx((seen["val_loss"], seen["top1"]), abs=1e-4)
    assert [float(row[c]) for c in ("val_loss", "top1", "top5")] == pytest.approx([held[c] for c in ("val_loss", "top1", "top5")], abs=1e-4)
    assert float(row["top1"]) != pytest.approx(test["top1"], abs=1e-4)


def test_costs_are_counted_along_the_ramp(monkeypatch):
    """Every so many steps of an epoch, each count for the steps up to the next one or to the end; what was dense before the ratio is in the sums."""
    monkeypatch.setattr(train_run, "FLOP_EVERY", 7)
    args = program.arguments([*UNMOVED, *CONFIG, "--schedule", "linear:16"])
    run, other = program.Run(args), program.Run(args)
    (images, labels), *_ = other.data.train(1)
    loaded, flop = [], []
    for _ in range(other.data.steps):
        loaded.append(other.loaded()[0])
        with FlopCounterMode(display=False) as counter:
            other.train_step(images, labels)
        flop.append(counter.get_total_flops())
    assert len(list(run.epoch(1))) == 18 == len(flop) and flop[0] > flop[7] > flop[14]
    assert run.sums["flop"] == 7 * flop[0] + 7 * flop[7] + 4 * flop[14]
    assert run.sums["loaded"] == 7 * loaded[0] + 7 * loaded[7] + 4 * loaded[14] and loaded[0] == run.loaded()[1] == 4 * run.loaded()[0]


def test_a_step_s_random_numbers_hang_on_its_seed_and_its_number(monkeypatch):
    """So runs of one seed draw the same, whatever they mask, and no two steps do."""
    seeds: list[int] = []
    runs = [program.Run(program.arguments([*PLAIN, "--seed", "3", *more])) for more in (["--dense"], CONFIG)]
    monkeypatch.setattr(torch, "manual_seed", seeds.append)
    for run in runs:
        list(run.epoch(1))
    assert seeds == [3 * 1_000_003 + step for step in range(runs[0].step)] * 2


def test_a_step_that_is_timed_has_the_final_ratio():
    """As one of the same masks without a ramp."""
    flop, images, labels = [], torch.randn(2, 3, 8, 8), torch.zeros(2, dtype=torch.int64)
    for more in (["--dense"], CONFIG, [*CONFIG, "--schedule", "cubic:1ep"]):
        step = masked_model.bare(program.arguments([*PLAIN, *more]), steps_per_epoch=10)
        with FlopCounterMode(display=False) as counter:
            step(images, labels)
        flop.append(counter.get_total_flops())
    assert flop[0] > flop[1] == flop[2]
