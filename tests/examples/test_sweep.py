"""Sweeps: the runs of a file, what is said of wrong ones, that nothing is lost or counted twice, and the tables and figures."""

from __future__ import annotations

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import plots
import pytest
import torch
from saved_states import same
from thesis import checkpoint, lock, many, memory_movement, sweep, sweep_file, sweep_results
from thesis import train as program
from thesis.side_by_side import blocks_and_ratios, published
from thesis.train_run import HOW_RUN

from fxmask.analysis.model_shapes import ModelShapes
from fxmask.analysis.thesis import movement

ROOT = Path(__file__).parents[2]
SWEEPS = ROOT / "examples" / "thesis" / "sweeps"
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
MASKS = "ResMLP1 @ XPatch = masked {ratio} {block}; XChannel = masked {ratio} {block};"
FIXED = {"data_set": "digits", "batch_size": 150, "epochs": 2, "mixup_prob": 0.7}  # some batches are mixed, by PyTorch's one generator that all runs share
SMALL = {
    "hp": {"model_config": [MASKS], "block": ["16x16"], "ratio": [0.5, 0.8], "backward": ["masked", "unmasked"]},
    "fixed": FIXED,
    "train": {"warmup": 0, "cooldown": 0, "masks_from": 0, "threads": 1, "save_every": 2, "holdout": 1000},
    "meta": {"run": "local", "mode": "grid"},
}
NAMES = [f"16x16-{ratio}-{mode}-seed0" for ratio in (0.5, 0.8) for mode in ("masked", "unmasked")]


def file_of(folder: Path, name: str = "sweep.json", **sections: object) -> Path:
    path = folder / name
    path.write_text(json.dumps({**SMALL, **sections}))
    return path


def rows(out: Path, name: str = "masked_accuracy") -> list[dict[str, str]]:
    """A csv of a sweep, without what a clock says."""
    return [{k: v for k, v in row.items() if k != "seconds"} for row in plots.read_csv(out / f"{name}.csv")]


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Four runs that nobody disturbed, three at a time in turns."""
    out = tmp_path_factory.mktemp("whole")
    assert sweep.main(["run", str(file_of(out)), "--out", str(out), "--at-once", "3"]) == 0
    return out


@pytest.fixture(scope="module")
def thesis_jobs():
    return sweep_file.read(SWEEPS / "thesis_grid.yaml").jobs


def test_the_thesis_grid(thesis_jobs):
    """342 distinct runs, the blocks and ratios of table 6.2 in both modes."""
    jobs = thesis_jobs
    assert len(jobs) == 342 == len({job.name for job in jobs}) == len({job.arguments for job in jobs})
    cells = {(sweep_results.block_and_ratio(job), job.settings["backward"]) for job in jobs}
    assert cells == {(cell, mode) for cell in blocks_and_ratios() for mode in ("masked", "unmasked")}
    args = jobs[0].namespace()
    assert (args.epochs, args.batch, args.opt, args.lr, args.weight_decay, args.guard, args.criterion) == (200, 128, "adam", 0.01, 1e-4, "free", "spectral")
    assert (args.warmup_lr, args.mixup, args.cutmix, args.mix_prob, args.masks_from) == (1e-3, 0.2, 0.8, 1.0, 10)


def test_seeds_are_paired():
    """Each seed runs the same settings."""
    jobs = sweep_file.read(SWEEPS / "ours_grid.yaml").jobs
    of = [{" ".join(job.arguments).replace(f"--seed {seed}", "") for job in jobs if job.settings["seed"] == seed} for seed in ("0", "1")]
    assert len(jobs) == 2 * 19 * 9 * 3 and of[0] == of[1] and len(of[0]) == 513


def test_other_grids(tmp_path):
    """Any option can be in the grid; strings without {} are the thesis' own; a dense model is one run, whatever the modes."""
    hp = {"model_config": ["ResMLP2", "ResMLP2 @ XPatch = masked 0.5 (4, 4);"], "backward": ["masked", "ste"], "guard": ["free", "auto"], "seed": [3]}
    jobs = sweep_file.read(file_of(tmp_path, hp=hp)).jobs
    assert [job.name for job in jobs][:2] == ["ResMLP2-dense-guardfree-seed3", "ResMLP2-dense-guardauto-seed3"] and len(jobs) == 6
    assert jobs[-1].name == "ResMLP2-XPatch.masked.4x4.0.5-ste-guardauto-seed3" and sweep_results.variant(jobs[-1]) == "guard=auto"
    fixed = "{data_set: digits, lr: 1e-4, warmup_lr: 1e-5, pretrained_classes: null}"
    (tmp_path / "a.yaml").write_text(f'hp.model_config: ["ResMLP2 @ XPatch = masked 0.5 (4, 4);"]\nfixed: {fixed}\n')
    (job,) = sweep_file.read(tmp_path / "a.yaml").jobs
    assert job.namespace().lr == 1e-4


WRONG = [
    ({"fixd": {}}, r"the file: expected keys among hp, fixed, train, meta, sbatch, .*got 'fixd'.\n  fix: did you mean 'fixed'"),
    ({"fixed": {**FIXED, "epoch": 3}}, r"fixed: expected keys among .*got 'epoch'.\n  fix: did you mean 'epochs'"),
    ({"train": {"gard": "free"}}, r"train: expected keys among .*guard.*got 'gard'.\n  fix: did you mean 'guard'"),
    ({"hp": {"model_configs": []}}, r"hp: expected keys among model_config, block, ratio, .*got 'model_configs'.\n  fix: did you mean 'model_config'"),
    ({"sbatch": {"cpus_per_task": 4}}, r"sbatch: expected keys among .*got 'cpus_per_task'.\n  fix: did you mean 'cpus-per-task'"),
    ({"hp": {**SMALL["hp"], "ratio": ["high"]}}, r"hp.ratio: expected ratios in \[0, 1\), such as 0.8, got 'high'"),
    ({"hp": {**SMALL["hp"], "ratio": [1.5]}}, r"hp.ratio: expected ratios in \[0, 1\), such as 0.8, got '1.5'"),
    ({"hp": {**SMALL["hp"], "ratio": 0.5}}, r"hp.ratio: expected a list of values, got '0.5'.\n  fix: write \[a, b, ...\]"),
    ({"hp": {**SMALL["hp"], "block": [[16, 16]]}}, r"hp.block: expected single values in the list, got a list of 2"),
    ({"hp": {**SMALL["hp"], "block": [16]}}, r"hp.block: expected blocks such as 16x16, got '16'"),
    ({"hp": {**SMALL["hp"], "ratio": [0.5, 0.5]}}, r"hp.ratio: expected each value once, got '0.5' twice"),
    ({"hp": {**SMALL["hp"], "seed": ["one"]}}, r"run 16x16-0.5-masked-seedone: argument --seed: invalid int value: 'one'"),
    ({"hp": {**SMALL["hp"], "backward": ["maskd"]}}, r"argument --backward: invalid choice: 'maskd'"),
    ({"hp": {**SMALL["hp"], "lr": [0.1]}, "fixed": {**FIXED, "lr": 0.2}}, r"--lr of train.py: expected it from one of hp, fixed and train, got it from two"),
    ({"hp": {"model_config": [MASKS], "block": ["4x4"]}}, r"hp.ratio: expected a list of them beside 'ResMLP1 @ .*, got none"),
    ({"hp": {"model_config": ["ResMLP2"], "block": ["4x4"]}}, r"hp.block: expected \{block\} in model_config, got none"),
    ({"hp": {"model_config": ["ResMLP2 @ XPach = masked 0.5 (4, 4);"]}}, r"hp.model_config: .*expected a layer \(XPatch, XChannel\), got 'XPach'"),
    ({"hp": {"model_config": ["ResMLP2", "ResMLP2 @"]}}, r"hp.model_config: expected configurations that mean different masks, got two that are 'ResMLP2-d"),
    ({"fixed": {"epochs": 1}}, r"fixed: expected data_set, one of digits, cifar10, folder, imagenet, got none"),
    ({"fixed": {**FIXED, "data_set": "mnist"}}, r"fixed.data_set: expected one of digits, .*got 'mnist'"),
    ({"fixed": {**FIXED, "epochs": "two"}}, r"fixed.epochs: expected a whole number of at least 1, got 'two'"),
    ({"fixed": {**FIXED, "lr": [1, 2]}}, r"fixed.lr: expected one value, got a list of 2.\n  fix: lists of values belong into hp"),
    ({"fixed": {**FIXED, "weight_decay": "much"}}, r"fixed.weight_decay: expected a number that is not negative, got 'much'"),
    ({"fixed": {**FIXED, "num_classes": 100}}, r"fixed.num_classes: expected 10, that of the data set digits, got 100"),
    ({"fixed": {**FIXED, "patch_size": 4}}, r"fixed.patch_size: expected 1, that of the model digits, got 4"),
    ({"fixed": {**FIXED, "pretrained_classes": 1000}}, r"fixed.pretrained_classes: expected none, got '1000': every run begins with random weights"),
    ({"train": {"hidden": 48}}, r"train: expected keys among .*got 'hidden'"),
    ({"train": {"cover": "maybe"}}, r"train.cover: expected true or false, got 'maybe'"),
    ({"train": {"activations": "abc"}}, r"run 16x16-0.5-masked-seed0: --activations: expected a number, got 'abc'.\n  where: an option of train.py"),
    ({"train": {"regrow": "gradient"}}, r"run .*--regrow BY:FRACTION: expected a number, got ''"),
    ({"train": {"schedule": "cubic:zz"}}, r"run .*: expected a number of optimiser steps such as 500, or of epochs such as 10ep, got 'zz'"),
    ({"train": {"model": "cifar"}}, r"run .*: --model cifar takes images of 32 pixels, --data digits has 8"),
    ({"train": {"warmup": -1}}, r"run .*: --warmup: expected 0 or more, got -1.0"),
    ({"meta": {"sandbox": "$NO_SUCH/x"}}, r"meta.sandbox: expected a folder, got \$NO_SUCH/x, whose variable is not set.\n  fix: set it, or .* --out"),
    ({"meta": {"mode": "random"}}, r"meta.mode: expected grid, got 'random'"),
    ({"meta": {"run": "cloud"}}, r"meta.run: expected local or slurm, got 'cloud'"),
    ({"meta": {"script": "none.py"}}, r"meta.script: expected a script that takes train.py's options, got .*none.py, which is not there"),
    ({"meta": {"gpus": 999}}, r"meta.gpus: expected at most \d+, which this machine shows, got 999"),
    ({"hp": []}, r"hp: expected model_config, a list of configuration strings, got none"),
    ({"meta": "local"}, r"meta: expected keys with values, got 'local'"),
]


@pytest.mark.parametrize(("sections", "message"), WRONG)
def test_wrong_files(sections, message, tmp_path, capsys):
    out = [] if "sandbox" in sections.get("meta", ()) else ["--out", str(tmp_path / "out")]
    assert sweep.main(["run", str(file_of(tmp_path, **sections)), *out]) == 2
    assert re.search(message, capsys.readouterr().err)
    assert not list(tmp_path.glob("out/*/run.json"))


def test_files_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    for name, text, message in (
        ("none.yaml", None, "expected a sweep file, got none that can be read"),
        ("a.yaml", "hp: [", "expected YAML, got while parsing"),
        ("b.yaml", "fixed:\n  lr: 1\n  lr: 2\n", "lr: expected each key once, got it twice"),
        ("a.json", "{", "expected JSON, got"),
        ("c.yaml", "words", "expected the sections hp, fixed, train, meta, sbatch, got 'words'"),
    ):
        if text is not None:
            (tmp_path / name).write_text(text)
        assert sweep.main(["list", str(tmp_path / name)]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert sweep.main(["list", str(SWEEPS / "small.yaml")]) == 2
    why = "import of yaml halted; None in sys.modules"
    assert f"PyYAML, which cannot be imported: {why}.\n  fix: pip install PyYAML, or write the sweep as .json" in capsys.readouterr().err
    assert sweep.main(["list", str(file_of(tmp_path)), "--out", str(tmp_path)]) == 0
    assert "0 of 4 runs have ended" in capsys.readouterr().out


def test_tables(whole):
    accuracy, loaded = rows(whole), rows(whole, "loaded_elements")
    assert [r["run"] for r in accuracy] == [r["run"] for r in loaded] == NAMES
    assert [(r["block"], r["ratio"], r["backward"], r["seed"]) for r in accuracy][:2] == [("16x16", "0.5", "masked", "0"), ("16x16", "0.5", "unmasked", "0")]
    last = plots.read_csv(whole / NAMES[3] / "log.csv")[-1]
    assert {r["judged_on"] for r in accuracy} == {"held-out training images"}
    assert float(accuracy[3]["top1"]) == pytest.approx(float(last["top1"]), abs=0.005) and accuracy[3]["epochs"] == "2"
    assert all(float(r["seconds"]) > 0 for r in plots.read_csv(whole / "masked_accuracy.csv"))
    # 2 epochs of 3 batches; (64, 64), (128, 32) and (32, 128) in 16x16 blocks: half of 16 + 16 + 16, a fifth rounded up to 4 + 4 + 4
    assert [int(r["predicted"]) for r in loaded] == [int(r["measured"]) for r in loaded] == [6 * n * 256 for n in (24, 24, 12, 12)]


def test_every_command_makes_its_run(whole):
    words = shlex.split(rows(whole)[1]["command"])
    assert words[:2] == ["python", "examples/thesis/train.py"]
    facts = json.loads((whole / NAMES[1] / "run.json").read_text())
    now = json.loads(json.dumps(vars(program.arguments(words[2:])), default=str))
    assert {k: v for k, v in now.items() if k not in HOW_RUN} == {k: facts[k] for k in now if k not in HOW_RUN}


def fake(job: sweep_file.Job, steps: int, epochs: int) -> sweep_results.Ended:
    """A run as its log would have it."""
    row = {"top1": "50", "train_loss": "1", "loaded": "0", "flips": "0", "seconds": "1"}
    facts = {**vars(job.namespace()), "steps": steps}
    return sweep_results.Ended(job, facts, [{**row, "epoch": str(i + 1)} for i in range(epochs)], None)


def test_predictions_are_the_published_tables(thesis_jobs):
    """All 171 cells of table 6.2, and the memory movement of figures 6.1 and 6.2."""
    table = {(line["block"], ratio): text for line in published("table_6_2") for ratio, text in line.items() if ratio != "block"}
    jobs = [job for job in thesis_jobs if job.settings["backward"] == "masked"]
    for job in jobs:
        row, cell = sweep_results.loaded_row(fake(job, 391, 200)), sweep_results.block_and_ratio(job)
        assert row["predicted_g"] == row["published_g"] == table.pop((row["block"], f"{cell[1]:.0%}"))
        assert float(row["moved_gib"]) == pytest.approx(movement(ModelShapes.resmlp(), *cell).gib(391 * 200), rel=1e-5)
    assert not table and sweep_results.loaded_row(fake(jobs[0], 391, 199))["published_g"] == ""


def same_as(whole: Path, out: Path) -> None:
    assert rows(out) == rows(whole) and rows(out, "loaded_elements") == rows(whole, "loaded_elements")
    for name in NAMES:  # no epoch twice
        assert [r["epoch"] for r in plots.read_csv(out / name / "log.csv")] == ["1", "2"]


def start_and_kill(file: Path, out: Path, options: list[str], after: int) -> None:
    """kill -9 when so many runs have ended."""
    command = [sys.executable, str(ROOT / "examples" / "thesis" / "sweep.py"), "run", str(file), "--out", str(out), *options]
    process = subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
    for line in process.stdout:
        after -= ": ended;" in line
        if not after:
            break
    process.send_signal(signal.SIGKILL)
    process.stdout.close()
    assert process.wait() == -signal.SIGKILL


def test_killed_and_gone_on(tmp_path, whole, capsys):
    """In the middle of two runs, in one process: what was left goes on, and the tables are those of an undisturbed sweep."""
    out = tmp_path / "out"
    start_and_kill(file_of(tmp_path), out, ["--at-once", "2"], after=1)
    assert (out / lock.NAME).exists() and (out / NAMES[1] / "checkpoint.pt").exists()
    assert sweep.main(["run", str(file_of(tmp_path)), "--out", str(out), "--at-once", "2"]) == 0
    said = capsys.readouterr().out
    assert "1 of 4 runs have ended, 3 to run" in said and "4 of 4 runs have ended" in said
    assert "going on after step" in (out / NAMES[1] / "output.txt").read_text()
    same_as(whole, out)


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path, whole):
    chance, command = random.Random(), [sys.executable, str(ROOT / "examples" / "thesis" / "sweep.py"), "run", str(file_of(tmp_path))]
    hits = 0
    for _ in range(4):
        process = subprocess.Popen([*command, "--out", str(tmp_path / "out"), "--at-once", "3"], env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)
        assert "to run" in process.stdout.readline()
        time.sleep(chance.uniform(0, 4))
        process.send_signal(signal.SIGKILL)
        process.stdout.close()
        hits += process.wait() == -signal.SIGKILL
    assert sweep.main(["run", str(file_of(tmp_path)), "--out", str(tmp_path / "out"), "--at-once", "3"]) == 0
    same_as(whole, tmp_path / "out")
    assert hits


@pytest.mark.slow
@pytest.mark.parametrize("options", [["--jobs", "2"], ["--jobs", "2", "--at-once", "2"]])
def test_killed_with_processes(options, tmp_path, whole):
    """The processes that a killed sweep leaves train on, and are waited for."""
    out = tmp_path / "out"
    start_and_kill(file_of(tmp_path), out, options, after=1)
    assert sweep.main(["run", str(file_of(tmp_path)), "--out", str(out), *options]) == 0
    same_as(whole, out)


def test_images_that_are_not_there(tmp_path, capsys, monkeypatch):
    """Said once, before every run says it."""
    monkeypatch.delenv("CIFAR10", raising=False)
    file = file_of(tmp_path, fixed={**FIXED, "data_set": "cifar10", "data_dir": "$CIFAR10"})
    assert sweep.main(["run", str(file), "--out", str(tmp_path)]) == 2
    assert "fixed.data_dir: expected the folder of the images of cifar10, got " in capsys.readouterr().err
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_an_ended_sweep_is_left_alone(whole, capsys):
    before = {p: p.stat().st_mtime_ns for p in whole.glob("*/*")}
    assert sweep.main(["run", str(file_of(whole)), "--out", str(whole)]) == 0
    assert {p: p.stat().st_mtime_ns for p in whole.glob("*/*")} == before
    assert "4 of 4 runs have ended, 0 to run" in capsys.readouterr().out


def test_many_at_once_equals_alone(tmp_path, whole):
    """To the bit, though three others trained in between."""
    job = sweep_file.read(file_of(tmp_path)).jobs[2]
    assert program.main([*job.arguments, "--no-figures", "--out", str(tmp_path / "alone")]) == 0
    alone, turns = (torch.load(out / checkpoint.LAST, weights_only=True) for out in (tmp_path / "alone", whole / job.name))
    assert all(same(alone[part], turns[part]) for part in ("model", "optimiser", "tracker"))
    logs = [[{k: v for k, v in r.items() if k != "seconds"} for r in plots.read_csv(out / "log.csv")] for out in (tmp_path / "alone", whole / job.name)]
    assert logs[0] == logs[1]


def test_one_run_fails_and_the_others_go_on(tmp_path):
    job, said = sweep_file.read(file_of(tmp_path)).jobs[0], {}
    arguments = [[*job.arguments, "--epochs", "1", "--no-figures", "--out", str(tmp_path / name)] for name in "abc"]
    arguments[1] += ["--schedule", "nonsense:2"]
    assert many.together([(a[-1][-1] if i != 1 else "b", program.arguments(a)) for i, a in enumerate(arguments)], 2, said.__setitem__) == 1
    assert said == {"a": 0, "b": 2, "c": 0}
    assert "nonsense" in (tmp_path / "b" / "output.txt").read_text() and len(plots.read_csv(tmp_path / "c" / "log.csv")) == 1


def test_images_that_do_not_fit_into_memory(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(many, "data_of", lambda args: pytest.fail("loaded"))
    file = file_of(tmp_path, fixed={**FIXED, "data_set": "folder", "data_dir": str(tmp_path)}, train={**SMALL["train"], "model": "s12", "holdout": 0})
    assert sweep.main(["run", str(file), "--out", str(tmp_path / "out"), "--at-once", "2"]) == 2
    assert "--at-once: expected images of at most 64 pixels, which fit into memory, got folder of 224 pixels" in capsys.readouterr().err


@pytest.mark.gpu
@pytest.mark.parametrize("graphs", [[], ["--graphs"]], ids=["steps", "graphs"])
def test_many_at_once_on_a_gpu(graphs, tmp_path):
    """A stream each; what a run has alone it has among others, but for the order of sums."""
    jobs = sweep_file.read(file_of(tmp_path)).jobs
    runs = [(job.name, job.namespace(*graphs, "--device", "cuda", "--no-figures", "--out", str(tmp_path / "turns" / job.name))) for job in jobs]
    assert many.together(runs, len(runs), lambda name, status: None) == 0
    for job in jobs:
        alone, turns = tmp_path / "alone" / job.name, tmp_path / "turns" / job.name
        assert program.main([*job.arguments, *graphs, "--device", "cuda", "--no-figures", "--out", str(alone)]) == 0
        first, second = (torch.load(out / checkpoint.LAST, weights_only=True, map_location="cpu")["model"] for out in (alone, turns))
        for name in first:
            torch.testing.assert_close(second[name], first[name], rtol=1e-3, atol=1e-4)


def test_two_sweeps_or_runs_in_one_folder(tmp_path, whole, capsys):
    with lock.held(whole):
        assert sweep.main(["run", str(file_of(whole)), "--out", str(whole)]) == 2
    said = capsys.readouterr().err
    assert "expected a folder that no other run writes into, got one that is in use by process" in said and str(os.getpid()) in said
    job = sweep_file.read(file_of(tmp_path)).jobs[0]
    with lock.held(tmp_path / "run"):
        assert program.main([*job.arguments, "--out", str(tmp_path / "run")]) == 2
    assert "in use by process" in capsys.readouterr().err and not (tmp_path / "run" / "log.csv").exists()
    assert sweep.main(["run", str(file_of(whole)), "--out", str(whole)]) == 0


def test_a_run_that_still_trains_is_waited_for(tmp_path, capsys):
    taken, waited = threading.Event(), []

    def other():
        with lock.held(tmp_path):
            taken.set()
            time.sleep(0.3)
            waited.append(True)

    thread = threading.Thread(target=other)
    thread.start()
    taken.wait()
    lock.wait_until_free(tmp_path, every_s=0.02)
    assert waited and "waiting: " in capsys.readouterr().out
    thread.join()


def test_other_settings_in_the_folder(tmp_path, whole, capsys):
    assert sweep.main(["table", str(file_of(tmp_path, fixed={**FIXED, "lr": 0.3})), "--out", str(whole)]) == 2
    assert "expected a run with lr 0.3, as the sweep's file says, got one with lr 0.01.\n  fix: another --out" in capsys.readouterr().err


def test_a_process_each(tmp_path, whole, capsys):
    """Any script that takes train.py's options; one that fails is named, and the rest goes on."""
    script, out = tmp_path / "copy.py", tmp_path / "out"
    script.write_text(
        "import shutil, sys, pathlib\nout = pathlib.Path(sys.argv[sys.argv.index('--out') + 1])\n"
        f"if out.name == {NAMES[1]!r}:\n    sys.exit(3)\nshutil.copytree(pathlib.Path({str(whole)!r}) / out.name, out, dirs_exist_ok=True)\n"
    )
    file = file_of(tmp_path, meta={"script": str(script)})
    assert sweep.main(["run", str(file), "--out", str(out), "--jobs", "2"]) == 1
    said = capsys.readouterr().out
    assert f"{NAMES[1]}: failed with exit status 3, see {out / NAMES[1] / 'output.txt'}" in said and "3 of 4 runs have ended" in said
    assert rows(out) == [row for row in rows(whole) if row["run"] != NAMES[1]]
    assert sweep.main(["run", str(file), "--out", str(out), "--at-once", "2"]) == 2
    assert "--at-once: expected meta.run local and no script but train.py" in capsys.readouterr().err
    assert sweep.main(["run", str(file), "--out", str(out), "--only", "8x8*"]) == 2
    assert "--only: expected patterns of runs' names such as '16x16-0.5-masked-seed0', got 8x8*" in capsys.readouterr().err


def test_a_log_that_is_cut_off_does_not_count(tmp_path, whole):
    shutil.copytree(whole / NAMES[0], tmp_path / NAMES[0])
    job = sweep_file.read(file_of(tmp_path)).jobs[0]
    log = tmp_path / NAMES[0] / "log.csv"
    assert sweep_results.ended(job, tmp_path / NAMES[0])
    log.write_text(log.read_text()[:-4])
    assert sweep_results.ended(job, tmp_path / NAMES[0]) is None


def test_accuracies_of_memory_movement(tmp_path):
    path = tmp_path / "masked_accuracy.csv"
    path.write_text("block,ratio,backward,top1\n32x32,0.8,masked,70\n32x32,0.8,masked,72\n,,dense,80\n")
    assert memory_movement.accuracies(path) == {"masked": {("32x32", "80%"): 71.0}}
