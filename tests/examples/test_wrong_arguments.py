"""Missing files and numbers that cannot be meant: examples say so in one line, before anything runs, and end with 2."""

import runpy
import sys
from pathlib import Path

import demo
import pytest
import train
from benchmarks import advice, block_dropout, masked_step, page_faults, tile_scan, traffic, train_step, whole_model
from danhofer import choose, learned, tables_3_4
from recipes import ddp, fsdp2, timm_train
from sparsedrop import figure_4, table_1
from thesis import accuracy, barley_figure_10, barley_figures_4_5, barley_table_3, cifar10_modes, flops, imagenet, isoflop, many, stability, sweep
from thesis import train as thesis_train

NO_FILE = "which is no file"
AT_LEAST = "expected at least 1, got 0"
NO_TEXT = str(Path(demo.__file__).with_name("results") / "cifar10_isoflop.png")
OF_A_STEP = ["--features", "32", "--layers", "1", "--block", "16", "--repeats", "1", "--csv", "t.csv"]
ROOT = ["--root", "nowhere"]
CASES = {
    "a scan": (tile_scan, ["--show", "nowhere.csv"], NO_FILE),
    "a scan that is none": (tile_scan, ["--show", __file__], f"tile_scan.py: {__file__}: expected a csv with the columns shape, op, block"),
    "cells": (traffic, ["table", __file__], f"traffic.cells.json, {NO_FILE}"),
    "a shape": (traffic, ["run", "--shapes", "foo"], "expected e.g. 8192x4096->14336, got 'foo'"),
    "a traffic device": (traffic, ["run", "--device", "foo"], "--device: expected cpu, or cuda where there is a GPU, got 'foo'"),
    "runs": (many, ["nowhere.json"], "expected a file of runs, got nowhere.json"),
    "runs that are none": (many, [__file__], "expected a list of [name, [words of train.py]]"),
    "a script": (timm_train, ["nowhere.py"], NO_FILE),
    "a ratio of a script": (timm_train, ["--ratio", "2", __file__], "expected a finite number in [0, 1), got 2.0"),
    "turns": (isoflop, ["time", "--turns", "0"], f"--turns: {AT_LEAST}"),
    "images": (accuracy, ["search", "--root", "nowhere"], "expected a folder of images, got nowhere"),
    "runs of a table": (accuracy, ["table", "--runs", "nowhere"], "expected a folder of runs, got nowhere"),
    "a device of dropout": (block_dropout, ["--device", "foo"], "--device: expected cpu, or cuda"),
    "threads of dropout": (block_dropout, ["--threads", "0"], f"--threads: {AT_LEAST}"),
    "a device of a step": (train_step, ["--device", "foo", "--csv", "out.csv"], "--device: expected cpu, or cuda where there is a GPU, got 'foo'"),
    "a compiler": (train_step, ["--compile-backend", "foo", "--csv", "out.csv"], "--compile-backend foo, --compile-mode default: Invalid backend: 'foo'"),
    "a compiler's mode": (train_step, ["--compile-mode", "foo", "--csv", "out.csv"], "--compile-mode foo: Unrecognized mode=foo"),
    "a device of an optimiser": (masked_step, ["--device", "foo"], "--device: expected cpu, or cuda where there is a GPU, got 'foo'"),
    "a refresh": (masked_step, ["--refresh", "-1"], "--refresh: expected 0 or more, got -1"),
    "a device that is not there": (masked_step, ["--device", "cuda:99"], "--device: expected cpu, or cuda where there is a GPU, got 'cuda:99'"),
    "a ratio behind another": (masked_step, [*OF_A_STEP, "--ratios", "0.5", "2"], "expected a finite number in [0, 1), got 2.0"),
    "a folder of cells": (traffic, ["run", "--device", "cpu", "--shapes", "8x8->8", "--out", f"{__file__}/out"], "expected a folder to write to"),
    "repeats": (masked_step, ["--repeats", "0"], f"--repeats: {AT_LEAST}"),
    "figure 4": (figure_4, ["--threads", "0"], f"--threads: {AT_LEAST}"),
    "repeats of dropout": (block_dropout, ["--repeats", "0"], f"--repeats: {AT_LEAST}"),
    "tokens of dropout": (block_dropout, ["--tokens", "0"], f"--tokens: {AT_LEAST}"),
    "repeats of a step": (train_step, ["--repeats", "0"], f"--repeats: {AT_LEAST}"),
    "repeats of an operator": (barley_figures_4_5, ["--repeats", "0"], f"--repeats: {AT_LEAST}"),
    "threads of an operator": (barley_figures_4_5, ["--threads", "0"], f"--threads: {AT_LEAST}"),
    "mini-batches of an epoch": (barley_figure_10, ["--batches", "8", "0"], f"--batches: {AT_LEAST}"),
    "threads of an epoch": (barley_figure_10, ["--threads", "0"], f"--threads: {AT_LEAST}"),
    "memory of an epoch": (barley_figure_10, ["--memory", "nan"], "--memory: expected a number above 0, got nan"),
    "samples of a table": (barley_table_3, ["--batch", "0"], f"--batch: {AT_LEAST}"),
    "epochs of modes": (cifar10_modes, ["--root", ".", "--epochs", "0"], f"--epochs: {AT_LEAST}"),
    "words of runs": (many, ["--at-once", "0", "nowhere.json"], f"--at-once: {AT_LEAST}"),
    "a rate of masks": (learned, ["--lr", "-1"], "--lr: expected a number above 0, got -1.0"),
    "workers of masks": (tables_3_4, ["--workers", "-1"], "--workers: expected 0 or more, got -1"),
    "seeds of masks": (choose, ["--seed", "1", "-1"], "--seed: expected a number from 0 to 1099511627776, got -1"),
    "a batch of masks": (choose, ["--batch", "0"], f"--batch: {AT_LEAST}"),
    "a device of masks": (learned, ["--device", "foo"], "--device: expected cpu, or cuda where there is a GPU, got 'foo'"),
    "seeds of dropout": (table_1, ["--seeds", str(2**70)], f"--seeds: expected a number from 0 to {2**40}, got {2**70}"),
    "a training's device": (train, ["--device", "foo"], "--device: expected cpu, or cuda where there is a GPU, got 'foo'"),
    "a thesis training's device": (thesis_train, ["--device", "foo"], "--device: expected cpu, or cuda where there is a GPU, got 'foo'"),
    "bounds": (stability, ["--steps", "9", "--models", "mlp512", "--modes", "dense", "--csv", "t.csv"], "--steps: expected at least 10, got 9"),
    "a batch": (stability, ["--batch", "0"], f"--batch: {AT_LEAST}"),
    "epochs of a comparison": (accuracy, ["final", "--epochs", "0"], f"--epochs: {AT_LEAST}"),
    "processes of a comparison": (accuracy, ["final", "--at-once", "0"], f"--at-once: {AT_LEAST}"),
    "a held-out set of a comparison": (accuracy, ["final", "--holdout", "-3"], "--holdout: expected 0 or more, got -3"),
    "a model of other images": (thesis_train, ["--model", "cifar"], "--model cifar takes images of 32 pixels, --data digits has 8."),
    "a recipe of other images": (thesis_train, ["--recipe", "imagenet"], "--model imagenet-thesis takes images of 224 pixels, --data digits has 8."),
    "an exchange": (thesis_train, ["--regrow", "gradient"], "--regrow BY:FRACTION: expected a number, got ''."),
    "pruned inputs": (thesis_train, ["--activations", "abc"], "--activations: expected a number, got 'abc'."),
    "blocks of pruned inputs": (thesis_train, ["--activations", "0.5:x"], "--activations: expected RATIO:BLOCK such as 0.5:16, got '0.5:x'."),
    "cycles": (thesis_train, ["--schedule", "cyclic:5ep,cycles=a"], "--schedule: cycles=: expected a number, got 'a'."),
    "a ramp's start": (train, ["--schedule", "cubic:5ep,initial=x"], "--schedule: initial=: expected a number, got 'x'."),
    "a warm-up to less": (thesis_train, ["--lr", "1e-4"], "--warmup-lr: expected a number above 0 and at most --lr, 0.0001, "),
    "a decay to more": (thesis_train, ["--lr", "1e-6", "--warmup", "0"], "--min-lr: expected at most --lr, 1e-06, got 1e-05"),
    "mixing by neither": (thesis_train, ["--cutmix", "0", "--mix-switch", "1"], "--mix-switch: expected a share below 1, since MixUp alone is on, got 1.0"),
    "cuts of none": (thesis_train, ["--mixup", "0", "--mix-switch", "0"], "--mix-switch: expected a share above 0, since CutMix alone is on, got 0.0"),
    "layers of nobody": (imagenet, [*ROOT, "--exclude", "fc1"], "--exclude: expected with --timm"),
    "masks beside a configuration": (imagenet, [*ROOT, "--config", "ResMLP1", "--ratio", "0.5"], "which layers are masked and how: leave out --ratio"),
    "blocks beside none": (imagenet, [*ROOT, "--dense", "--block", "8", "8"], "--dense has no masks: leave out --config, --ratio and --block"),
    "a sweep that is no text": (sweep, ["list", NO_TEXT], "got none that can be read (it is no text)"),
    "runs of sweep's table": (sweep, ["table", "x.yaml", "--only", "zzz"], "--only: expected with run or list, got it with table"),
    "a ratio that nothing draws": (sweep, ["run", "x.yaml", "--ratio", "0.5"], "--ratio: expected with figures, got it with run"),
    "epochs of a figure": (flops, ["--epochs", "0"], f"--epochs: {AT_LEAST}"),
    "a seed": (train, ["--seed", str(2**62)], "--seed: expected a number from 0 to 1099511627776, got 4611686018427387904"),
    "a thesis training's seed": (thesis_train, ["--seed", "-1"], "--seed: expected a number from 0 to 1099511627776, got -1"),
    "one process of no torchrun": (ddp, ["--out", "run"], "expected to be started by torchrun"),
    "one shard of no torchrun": (fsdp2, ["--out", "run"], "expected to be started by torchrun"),
    "the demo's folder": (demo, ["--out", f"{__file__}/out"], "expected a folder to write to"),
} | {
    f"{m.__name__} {option}": (m, [option, "0" if option != "--ratio" else "2"], words)
    for m in (advice, page_faults, whole_model)
    for option, words in (("--ratio", "expected a finite number in [0, 1)"), ("--block", "expected e.g. (16, 16), got (0, 0)"), ("--threads", AT_LEAST))
} | {
    f"{m.__name__} {option}": (m, [option, "0"], f"{option}: {AT_LEAST}")
    for m, options in (
        (train_step, ("--batch", "--width", "--depth", "--sequence", "--warm-up")),
        (tables_3_4, ("--limit", "--dense-epochs")),
        (barley_figures_4_5, ("--samples", "--tokens", "--features", "--widths")),
        (masked_step, ("--features", "--layers")),
        (whole_model, ("--batch", "--steps")),
        (page_faults, ("--turns",)),
    )
    for option in options
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_two(case, capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RANK", raising=False)  # of a torchrun around the tests
    module, args, words = CASES[case]
    try:
        code = module.main(args)
    except SystemExit as end:
        code = end.code
    said = capsys.readouterr().err.strip()
    assert code == 2 and words in said and "Traceback" not in said
    assert not list(tmp_path.iterdir())


THREE, TWO = {"train": train, "thesis": thesis_train, "imagenet": imagenet}, {"thesis": thesis_train, "imagenet": imagenet}
RANGES = [
    *((THREE, option, "-1") for option in ("--threads", "--workers", "--refresh", "--warmup", "--min-lr", "--weight-decay")),
    *((THREE, option, value) for option, value in (("--epochs", "0"), ("--batch", "0"), ("--lr", "0"), ("--lr", "nan"), ("--smoothing", "2"))),
    *((TWO, f"--{name}", "-1") for name in ("cooldown", "mixup", "cutmix", "mix-prob", "mix-switch", "masks-from", "save-every")),
    *((TWO, option, value) for option, value in (("--stop", "0"), ("--dim", "0"), ("--dim", "-4"), ("--mix-prob", "1.1"), ("--warmup", "inf"))),
    *(({"imagenet": imagenet}, option, "0") for option in ("--image", "--depth", "--patch")),
    ({"thesis": thesis_train}, "--holdout", "-3"),
]  # fmt: skip


@pytest.mark.parametrize(("script", "option", "value"), [(script, option, value) for scripts, option, value in RANGES for script in scripts])
def test_numbers_of_a_recipe(script, option, value, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        THREE[script].main([*(ROOT if script == "imagenet" else ()), option, value, "--out", str(tmp_path / "run")])
    assert end.value.code == 2 and f"error: {option}: expected " in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("args", "code"), [([], 2), (["nowhere"], 2), (["--help"], 0)])
def test_the_script_of_plots(args, code, capsys, monkeypatch):
    path = Path(demo.__file__).with_name("plots.py")
    monkeypatch.setattr(sys, "argv", [str(path), *args])
    with pytest.raises(SystemExit) as end:
        runpy.run_path(str(path), run_name="__main__")
    out = capsys.readouterr()
    assert end.value.code == code and ("usage" in out.out + out.err or "nowhere" in out.err)
