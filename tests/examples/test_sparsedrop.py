"""The scripts of SparseDrop's table and figures, on data that ship with packages."""

import csv
import dataclasses
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from data import DataMissing
from sparsedrop import figure_3, figure_4, models, table_1, tasks
from sparsedrop import train as runs
from torch import nn

from fxmask.dropping import dropped_layers
from fxmask.errors import ConfigError

TINY = dataclasses.replace(tasks.SMALL["digits"], train=64, held=32, batch=32, every=1, epochs=2, size=(("width", 32),))
NARROW = (("width", 16), ("depth", 1), ("heads", 2))
TINY_GPT = dataclasses.replace(tasks.SMALL["gpt"], train=8, held=4, batch=4, every=1, epochs=1, size=(*NARROW, ("context", 8)))
TINY_VIT = dataclasses.replace(tasks.SMALL["cifar10"], train=8, held=4, batch=4, every=1, epochs=1, size=(*NARROW, ("patch", 8)))
TINY_TASKS = {"digits": TINY, "gpt": TINY_GPT, "cifar10": TINY_VIT}


@pytest.fixture(autouse=True)
def tiny(monkeypatch):
    monkeypatch.setitem(tasks.TASKS, "small", {**tasks.SMALL, **TINY_TASKS})


def linears(model):
    return [m for m in model.modules() if isinstance(m, nn.Linear)]


@pytest.mark.parametrize("name", TINY_TASKS)
def test_every_linear_has_its_dropout(name):
    task, loaded = TINY_TASKS[name], figure_4.noise(TINY_TASKS[name])
    dense, dropout, blocks = (runs.build(task, loaded, method, 0.3, 8) for method in runs.METHODS)
    n = len(linears(dense))
    assert n == {"digits": 4, "gpt": 5, "cifar10": 6}[name]
    assert not any(isinstance(m, nn.Dropout) for m in dense.modules())
    assert [m.p for m in dropout.modules() if isinstance(m, nn.Dropout)] == [0.3] * n
    assert sum(type(m) is not nn.Linear for m in linears(blocks)) == n == len(list(dropped_layers(blocks)))
    x, y = loaded.train
    assert dense(x).flatten(0, -2).shape == (y.numel(), loaded.classes)
    for other in (dropout, blocks):
        assert not torch.equal(other(x), other(x)), "training drops"
        other.eval()
        other.load_state_dict(dict(zip(other.state_dict(), dense.state_dict().values(), strict=True)))
        assert torch.equal(other(x), dense.eval()(x)), "evaluation does not"


def test_a_character_is_followed_by_the_next_and_attention_does_not_look_ahead():
    x, y, vocabulary = tasks.characters(8)
    assert torch.equal(x[:, 1:], y[:, :-1]) and torch.equal(x[1:, 0], y[:-1, -1]) and [int(x.min()), int(x.max())] == [0, vocabulary - 1]
    gpt = models.GPT(nn.Linear, vocabulary, context=8, width=16, depth=2, heads=2)
    changed = x[:1].clone()
    changed[0, 5:] = (changed[0, 5:] + 1) % vocabulary
    before, after = gpt(x[:1]), gpt(changed)
    assert torch.equal(before[:, :5], after[:, :5]) and not torch.equal(before[:, 5:], after[:, 5:])


def test_the_parts_are_disjoint_and_as_large_as_published():
    loaded = tasks.load(tasks.FULL["digits"], None)
    assert [len(p[1]) for p in (loaded.train, loaded.held)] == [1149, 288] and loaded.train[0].shape[1:] == (1, 32, 32)
    seen = {t.numpy().tobytes() for t in loaded.train[0]}
    assert sum(t.numpy().tobytes() in seen for t in loaded.held[0]) <= 2, "but for digits that are drawn alike"
    gpt = tasks.load(tasks.FULL["gpt"], None)  # the text is shorter than the published one: the same proportion
    assert len(gpt.train[1]) == pytest.approx(4 * len(gpt.held[1]), abs=4)
    with pytest.raises(DataMissing, match="needs --root"):
        tasks.load(tasks.FULL["mnist"], None)


@pytest.mark.parametrize(("name", "folder"), [("mnist", "MNIST"), ("fashion", "FashionMNIST")])
def test_images_of_mnist_as_its_files_have_them(name, folder, tmp_path):
    raw, images, labels = tmp_path / folder / "raw", torch.zeros(30, 28, 28, dtype=torch.uint8), torch.arange(30) % 10
    images[:, 0, 27] = 10 * labels.to(torch.uint8) + 100  # a pixel that tells the label, and on which side
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        header = (struct.pack(">IIII", 2051, 30, 28, 28), struct.pack(">II", 2049, 30))
        (raw / f"{part}-images-idx3-ubyte").write_bytes(header[0] + images.numpy().tobytes())
        (raw / f"{part}-labels-idx1-ubyte").write_bytes(header[1] + labels.to(torch.uint8).numpy().tobytes())
    loaded = tasks.load(dataclasses.replace(tasks.SMALL[name], train=20, held=10), tmp_path)
    assert [p[0].shape for p in (loaded.train, loaded.held)] == [(20, 1, 32, 32), (10, 1, 32, 32)] and loaded.classes == 10
    x, y = (torch.cat(parts) for parts in zip(loaded.train, loaded.held, strict=True))
    assert torch.equal(x[:, 0, 2, 29].argsort(stable=True), y.argsort(stable=True)) and (x == x[:, :, :1, :1]).sum() == 30 * (32 * 32 - 1)
    assert abs(x[:, :, 2:30, 2:30].mean()) < 1e-2 and x[:, 0, 2, 29].min() > 0


def test_an_evaluation_is_the_mean_over_all_that_is_predicted():
    """Of a GPT every character, in batches of unequal size."""
    y = torch.tensor([[0, 1], [1, 1], [0, 2]])
    logits = torch.tensor([0.0, 1.0, 0.0, 0.0]).expand(3, 2, 4)
    model = nn.Identity()
    loss, accuracy = runs.evaluate(model, (logits, y), 2)
    assert loss == pytest.approx(float(nn.functional.cross_entropy(logits.flatten(0, 1), y.flatten()))) and accuracy == 50


def test_training_stops_when_the_held_out_loss_stays(monkeypatch):
    found = iter([(2.0, 60.0), (1.0, 50.0), (1.5, 70.0), (1.2, 50.0), (1.1, 50.0), (0.5, 50.0)])  # loss, accuracy
    monkeypatch.setattr(runs, "evaluate", lambda *_: next(found))
    task = dataclasses.replace(TINY, epochs=100, patience=3)
    got = runs.train(task, tasks.load(task, None), "sparsedrop", 0.5, 8, 0, "cpu")
    assert (got["val_loss"], got["val_accuracy"], got["best_step"], got["steps"], got["ended"]) == (1.0, 50.0, 2, 5, "patience")
    with pytest.raises(ConfigError, match="expected an evaluation every 500 steps with a finite loss, got none in 2 steps of 64 images"):
        runs.train(dataclasses.replace(task, every=500, epochs=1), tasks.load(task, None), "dense", 0, 8, 0, "cpu")


ADDS = """
import sys
from pathlib import Path
from sparsedrop import table_1
for seed in range(15):
    for who in (sys.argv[2], "both"):
        row = dict.fromkeys(table_1.COLUMNS, 0)
        table_1.append(Path(sys.argv[1]), {**row, "task": who, "seed": seed})
"""


@pytest.mark.slow
def test_two_processes_that_write_one_table_lose_no_row(tmp_path):
    """Rows of the same settings replace each other."""
    path, folder = tmp_path / "t.csv", Path(table_1.__file__).resolve().parents[1]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(folder), str(folder.parent), os.environ.get("PYTHONPATH", "")])}
    running = [subprocess.Popen([sys.executable, "-c", ADDS, str(path), who], env=env) for who in "ab"]
    assert [p.wait() for p in running] == [0, 0]
    found = [(r["task"], int(r["seed"])) for r in table_1.read(path)]
    assert sorted(found) == [(who, seed) for who in ("a", "b", "both") for seed in range(15)]


def test_the_table_goes_on_where_it_was_and_takes_the_best_p(tmp_path, capsys):
    path = tmp_path / "t.csv"
    command = ["--tasks", "digits", "--size", "small", "--rates", "0.1", "0.5", "--block", "8", "--device", "cpu", "--csv", str(path)]
    assert table_1.main(command) == 0
    whole = path.read_text()
    rows = table_1.read(path)
    assert [(r["method"], r["p"]) for r in rows] == [("dense", "0"), *((m, p) for m in ("dropout", "sparsedrop") for p in ("0.1", "0.5"))]
    path.write_text(whole[: whole.rindex(",", 0, -20)])  # killed within the last line
    capsys.readouterr()
    assert table_1.main(command) == 0
    assert capsys.readouterr().out.count("task=") == 1, "only what was missing ran"
    same = [[r[c] for c in ("p", "val_accuracy", "val_loss", "steps")] for r in table_1.read(path)]
    assert same == [[r[c] for c in ("p", "val_accuracy", "val_loss", "steps")] for r in rows]
    made = table_1.side_by_side([{**r, "val_accuracy": "99" if r["p"] == "0.5" else "1"} for r in rows])
    assert [r["best p"] for r in made] == ["0", "0.5", "0.5"] and "published val_loss" in made[0]
    made = table_1.side_by_side([{**r, "task": "gpt", "val_accuracy": "99" if r["p"] == "0.5" else "1", "val_loss": r["p"]} for r in rows])
    assert [r["best p"] for r in made] == ["0", "0.1", "0.1"], "of the GPT by loss"
    told = [("sparsedrop", block, device, "0.1", accuracy) for block, device, accuracy in (("32", "cpu", "97"), ("16", "cpu", "98"), ("16", "cuda", "99"))]
    told = [("dense", "", "cpu", "0", "96"), *told]
    made = table_1.side_by_side([{**rows[0], **dict(zip(("method", "block", "device", "p", "val_accuracy"), of, strict=True))} for of in told])
    assert [(r["method"], r["block"], r["device"], r["best p"], f"{r['accuracy, %']:g}") for r in made] == told, "blocks and devices are no seeds"
    assert table_1.main(["--tasks", "mnist", "--csv", str(path)]) == 2 and "needs --root" in capsys.readouterr().err
    tasks.TASKS["small"]["digits"] = dataclasses.replace(TINY, every=500)  # of the fixture
    assert table_1.main([*command[:-1], str(tmp_path / "other.csv")]) == 2 and "fix: more images" in capsys.readouterr().err


def test_figures(tmp_path, capsys):
    command = ["--size", "small", "--tasks", "digits", "gpt", "--rates", "0.5", "--repeats", "1", "--threads", str(torch.get_num_threads()), "--device", "cpu"]
    assert figure_4.main([*command, "--out", str(tmp_path)]) == 0
    with (tmp_path / "figure_4.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(r["task"], r["method"]) for r in rows] == [(t, m) for t in ("digits", "gpt") for m in runs.METHODS]
    assert all(float(r["ms"]) > 0 and r["torch"] for r in rows) and rows[0]["x_dense"] == "1.000"
    assert (tmp_path / "figure_4.png").stat().st_size > 5_000 and "gpt: " in capsys.readouterr().out
    table = tmp_path / "d.csv"
    header = "device,threads,dtype,tokens,features,block,p,contender,ms,gflops_dense_equivalent"
    table.write_text("\n".join([header, "cpu,1,float32,8,8,4,0.0,dense,1,2", "cpu,2,float32,8,8,4,0.0,fused,1,2", "cpu,2,float32,8,8,4,0.5,fused,1,2"]) + "\n")
    assert len(figure_3.figure(table_rows := figure_3.read_csv(table)).axes) == 4 and len(table_rows) == 3
    assert figure_3.main([str(table), "--out", str(tmp_path)]) == 0 and (tmp_path / "figure_3.png").exists()


WRONG = {
    "rate": (["--rates", "0.5", "1"], "expected a number in [0, 1), got 1.0"),
    "block": (["--block", "0"], "two positive ints (tokens, features)"),
    "device": (["--device", "tpu"], "--device: expected cpu"),
}


@pytest.mark.parametrize("script", [table_1, figure_4])
@pytest.mark.parametrize("case", WRONG)
def test_what_no_run_can_have_is_refused_before_the_first(script, case, capsys, monkeypatch):
    args, words = WRONG[case]
    monkeypatch.setattr(script, "train" if script is table_1 else "measure", lambda *_: pytest.fail("a run began"))
    assert script.main(["--size", "small", "--tasks", "digits", *args]) == 2 and words in capsys.readouterr().err


def test_a_figure_of_another_csv_is_refused(tmp_path, capsys):
    for text, words in (("p,ms\n", "got none"), ("p,ms\n1,2\n", "got none of device, ")):
        (tmp_path / "t.csv").write_text(text)
        assert figure_3.main([str(tmp_path / "t.csv"), "--out", str(tmp_path)]) == 2 and words in capsys.readouterr().err
