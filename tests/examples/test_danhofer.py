"""Danhofer's tables and learned masks: the published values, the shares that the source gives, recipes and their choice, resume, a ResNet-18 from a file."""

from __future__ import annotations

import csv
import dataclasses
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from danhofer import choose, command, learned, learning, networks, small, tables_3_4
from data import torchvision
from torch import nn

import fxmask

SMALL = ["--dense-epochs", "1"]


def rows_of(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.read_text().splitlines()))


@pytest.fixture(scope="module")
def task() -> networks.Task:
    return small.trained("digits", 0, batch=128, epochs=1)


@pytest.mark.parametrize(("name", "parameters", "macs"), [("convnext_tiny", 5.4, 4.2), pytest.param("convnext_small", 3.1, 2.2, marks=pytest.mark.slow)])
def test_shares_of_a_convnext_are_the_published_ones(name, parameters, macs):
    """The source's masked layers are the stem and the three down-sampling convolutions."""
    with torch.device("meta"):
        model = getattr(torchvision().models, name)().eval()
        found = networks.Task(name, model, None, None, 600, torch.zeros(1, 3, 224, 224))
    masked = [r["name"] for r in fxmask.explain(networks.masked(found, "conv")).rows if r["masked"]]
    assert masked == ["features.0.0", "features.2.1", "features.4.1", "features.6.1"]
    ours, theirs = tables_3_4.share_lines(found, "conv")
    published = f"{parameters} % of the parameters, {macs} % of the MACs"
    assert published in ours and published in theirs


def test_which_layers_of_a_resnet_and_of_the_small_network():
    with torch.device("meta"):
        resnet = networks.Task("resnet18", torchvision().models.resnet18().eval(), None, None, 90, torch.zeros(1, 3, 224, 224))
    counts = []
    for layers in networks.LAYERS:
        rows = fxmask.explain(networks.masked(resnet, layers)).rows
        counts.append(sum(bool(r["masked"]) for r in rows))
    assert counts == [19, 1, 20]
    for name, example in (("digits", torch.zeros(1, 1, 8, 8)), ("cifar10", torch.zeros(1, 3, 32, 32))):
        found = networks.Task(name, small.network(name).eval(), None, None, 100, example)
        of = len(small.SMALL[name].convolutions)
        assert [r["masked"] for r in fxmask.explain(networks.masked(found, "conv")).rows] == [False, *[True] * (of - 1), False]
        assert found.model(example).shape == (1, 10)


def test_accuracy_counts_images():
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.p = nn.Parameter(torch.zeros(()))

        def forward(self, x):
            return x + self.p

    scores = torch.tensor([[9.0, 8, 7, 6, 5, 4], [9, 8, 7, 6, 5, 4], [9, 8, 7, 6, 5, 4], [4, 9, 8, 7, 6, 5]])
    batches = [(scores[:3], torch.tensor([0, 4, 5])), (scores[3:], torch.tensor([1]))]
    assert networks.accuracy(Fixed().train(), batches) == {"top1": 50.0, "top5": 75.0}


def test_tables(tmp_path, capsys):
    assert tables_3_4.main([*SMALL, "--out", str(tmp_path)]) == 0
    first = rows_of(tmp_path / "danhofer_tables_3_4.csv")
    assert [(r["table"], r["form"], r["metric"]) for r in first[:2]] == [("3", "dense", "top1"), ("3", "dense", "top5")] and len(first) == 8
    assert tables_3_4.main([*SMALL, "--layers", "all", "--out", str(tmp_path)]) == 0
    assert rows_of(tmp_path / "danhofer_tables_3_4.csv")[:8] == first, "rows of another choice are kept"
    assert "masked: 2 layers" in capsys.readouterr().out


def test_a_csv_tells_networks_apart_by_how_they_were_trained(task, tmp_path, monkeypatch):
    """Other epochs, seeds and batches are rows beside; the same ones replace; rows of before the columns stay."""
    monkeypatch.setattr("danhofer.command.trained", lambda name, seed, root, batch, epochs: dataclasses.replace(task, epochs=epochs))
    monkeypatch.setattr(learned, "learn", lambda task, layers, *_: networks.masked(task, layers, mode="learned"))
    monkeypatch.setattr(choose, "learn", learned.learn)
    monkeypatch.setattr(choose, "TRIED", [learning.SOURCE])
    runs = [["--dense-epochs", "1"], ["--dense-epochs", "2"], ["--dense-epochs", "1", "--seed", "1"], ["--dense-epochs", "1", "--batch", "32"]]
    cells = {tables_3_4: ("table", "metric", "form"), learned: ("form",), choose: ("form",)}
    counts = {tables_3_4: 8 * 3, learned: 5 * 4, choose: 4 * (3 + 1 + 3)}  # a batch changes no mask by magnitude; a choice is of all its seeds
    for script, name in ((tables_3_4, "tables_3_4"), (learned, "learned"), (choose, "choice")):
        path = tmp_path / f"danhofer_{name}.csv"
        path.write_text("model,layers,seed,form\ndigits,conv,0,older\n")
        for run in [*runs, *runs]:
            assert script.main([*run, "--out", str(tmp_path)]) in (0, 1)
        older, *rows = rows_of(path)
        assert (older["form"], older["dense_epochs"]) == ("older", "") and len(rows) == counts[script]
        of = [c for c in ("seed", "dense_epochs", "batch") if c in rows[0]]
        assert len({tuple(r[c] for c in (*of, *cells[script])) for r in rows}) == counts[script]
        assert {r["dense_epochs"] for r in rows} == {"1", "2"} and len(of) == (2 if script is tables_3_4 else 3)


def test_published_values_are_all_there():
    assert [tables_3_4.published(name)["permuted24_top1"] for name in networks.NETWORKS] == ["21.48", "49.27", "48.37", "75.90", "76.44"]
    assert tables_3_4.published("digits") == {}


def test_a_state_is_of_its_batches(tmp_path):
    net = nn.Sequential(nn.Conv2d(4, 8, 1), nn.Flatten(), nn.Linear(8, 4)).eval()
    x = torch.randn(8, 4, 1, 1)
    task = networks.Task("tiny", net, lambda epoch: [(x, torch.zeros(8, dtype=torch.long))], None, 10, x[:1], batch=8)
    path, recipe = tmp_path / "run.pt", learning.SOURCE | {"epochs": 1}
    learning.learn(task, "conv", 0, recipe, path)
    for name, value in (("batch", 4), ("limit", 2)):
        with pytest.raises(networks.DataMissing, match=rf"expected .*'{name}': {value}, .* got a run of .*'batch': 8, 'limit': None"):
            learning.learn(dataclasses.replace(task, **{name: value}), "conv", 0, recipe, path)
    saved = torch.load(path, weights_only=True)
    del saved["settings"]["batch"], saved["settings"]["limit"]  # as older files are
    torch.save(saved, path)
    learning.learn(dataclasses.replace(task, batch=4), "conv", 0, recipe, path)


@pytest.mark.slow
def test_learning_changes_logits_alone_and_goes_on_where_it_stopped(task, tmp_path, monkeypatch):
    before = {n: t.clone() for n, t in task.model.state_dict().items()}
    recipe = learning.SOURCE | {"epochs": 3, "keep": True}
    whole = learning.learn(task, "conv", 5, recipe)
    assert all(torch.equal(t, whole.state_dict()[n]) and torch.equal(t, task.model.state_dict()[n]) for n, t in before.items())
    for stop in (1, 3):
        with monkeypatch.context() as patch:
            patch.setattr(learning, "range", lambda first, end, stop=stop: range(first, min(stop, end)), raising=False)
            parts = learning.learn(task, "conv", 5, recipe, tmp_path / "run.pt")
    wanted, got = fxmask.masks(whole), fxmask.masks(parts)
    assert all(torch.equal(m, got[n]) for n, m in wanted.items())
    assert all(torch.equal(p, parts.state_dict()[n]) for n, p in whole.state_dict().items() if n.endswith("nm_logits"))
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    group = saved["optimizer"]["param_groups"][0]
    assert (group["initial_lr"], group["betas"], group["weight_decay"]) == (1.0, (0.9, 0.999), 1e-4) and group["lr"] == pytest.approx(1e-3)
    with pytest.raises(networks.DataMissing, match=r"expected .* got a run of"):
        learning.learn(task, "conv", 6, recipe, tmp_path / "run.pt")


def test_learned_reports_what_it_checks(tmp_path, capsys):
    code = learned.main([*SMALL, "--batch", "128", "--epochs", "1", "--out", str(tmp_path)])
    said = capsys.readouterr()
    assert "1 epochs are more than the source's 10 % of the 1" in said.err
    assert "bit-identical: True; two evaluations the same: True; 2 of every 4 kept: True" in said.out
    rows = {r["form"]: float(r["top1"]) for r in rows_of(tmp_path / "danhofer_learned.csv")}
    assert list(rows) == ["dense", "magnitude", "permuted", "learned", "learned_permuted"]
    assert code == int(min(rows["learned"], rows["learned_permuted"]) < max(rows["magnitude"], rows["permuted"]))


def test_kept_masks_are_the_best_of_all_epochs(task, capsys):
    """By the loss on training images, of the masks at the beginning, too: those by magnitude, or permuted ones."""
    recipe = learning.SOURCE | {"epochs": 2, "init": "magnitude", "keep": True}
    start = {False: fxmask.masks(networks.masked(task, "conv")), True: fxmask.masks(networks.masked(task, "conv", mode="permuted"))}
    for permute, lr in ((False, 1e-9), (True, 1e-9), (False, 0.3)):
        model = learning.learn(task, "conv", 0, recipe | {"lr": lr, "permute": permute})
        said = capsys.readouterr().out
        losses = [float(line.split()[-1]) for line in said.splitlines() if "likeliest masks" in line]
        assert len(losses) == 3 and f"kept: the masks after epoch {losses.index(min(losses))}" in said
        same = all(torch.equal(m, start[permute][n]) for n, m in fxmask.masks(model).items())
        assert same == (lr < 0.1) and learned.exactly_two(model)


def test_against_the_dense_network(task):
    x, y = next(iter(task.train(0)))
    with torch.no_grad():
        dense = task.model(x)
    losses, p, q = learning._losses(task), dense.softmax(1), dense.flip(1).softmax(1)
    torch.testing.assert_close(losses["dense"](dense.flip(1), x, y), (p * (p / q).log()).sum(1).mean())
    assert float(losses["dense"](dense, x, y)) < 1e-6 < float(losses["dense"](dense.flip(1), x, y))
    assert torch.equal(losses["labels"](dense, x, y), nn.functional.cross_entropy(dense, y))


def test_held_out_images_are_nobody_else_s(task):
    parts = [torch.cat([x.flatten(1) for x, _ in batches]) for batches in (task.train(0), task.held(), task.test())]
    assert [len(p) for p in parts] == [1437 - 287, 287, 360]
    assert len(torch.cat(parts).unique(dim=0)) == len(torch.cat(parts)) == 1797


def test_recipes_are_chosen_without_test_images(tmp_path, monkeypatch, capsys):
    def refused() -> None:
        raise AssertionError("a test image is read")

    trained = small.trained
    monkeypatch.setattr("danhofer.command.trained", lambda *of: dataclasses.replace(trained(*of), test=refused))
    monkeypatch.setattr(choose, "TRIED", [learning.SOURCE, choose.OURS])
    assert choose.main([*SMALL, "--batch", "128", "--seed", "7", "8", "--epochs", "1", "--out", str(tmp_path)]) == 0
    rows = rows_of(tmp_path / "danhofer_choice.csv")
    assert [r["form"] for r in rows] == ["dense", "magnitude", "permuted", "learned", "learned"] * 2
    means = {init: sum(float(r["top1"]) for r in rows if r["init"] == init) for init in ("glorot", "magnitude")}
    assert {r["init"] for r in rows if r["chosen"] == "1"} == {max(means, key=lambda init: means[init])}
    assert choose.main(["--model", "resnet18"]) == 2 and "expected digits or cifar10" in capsys.readouterr().err


@pytest.mark.parametrize("name", small.SMALL)
def test_recipes_are_those_that_were_chosen(name):
    """And the tables' networks are no networks of the choice."""
    folder = Path(learned.__file__).parents[1] / "results" / "nm"
    chosen = [r for r in rows_of(folder / "danhofer_choice.csv") if r["model"] == name and r["chosen"] == "1"]
    tables = [r for r in rows_of(folder / "danhofer_learned.csv") if r["model"] == name]
    assert chosen and tables and {r["seed"] for r in tables}.isdisjoint(r["seed"] for r in chosen)
    recipe = {key: str(int(v) if isinstance(v, bool) else v) for key, v in learning.RECIPES[name].items()}
    assert all({key: r[key] for key in recipe} == recipe and r["held_out"] == str(small.SMALL[name].held) for r in [*chosen, *tables])


def test_cifar10_from_image_files(tmp_path, monkeypatch, capsys):
    from PIL import Image

    for part, label, n in ((part, label, n) for part in ("train", "test") for label in "abcdefghij" for n in range(2)):
        (tmp_path / part / label).mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (32, 32), (25 * "abcdefghij".index(label), 90 + n, 10)).save(tmp_path / part / label / f"{n}.png")
    monkeypatch.setitem(small.SMALL, "cifar10", dataclasses.replace(small.SMALL["cifar10"], held=4))
    small.images.cache_clear()
    run = ["--model", "cifar10", *SMALL, "--epochs", "1", "--seed", "0", "1"]
    assert learned.main([*run, "--data", str(tmp_path), "--out", str(tmp_path)]) in (0, 1)
    small.images.cache_clear()
    rows = rows_of(tmp_path / "danhofer_learned.csv")
    assert [(r["seed"], r["form"]) for r in rows[4:6]] == [("0", "learned_permuted"), ("1", "dense")] and {r["held_out"] for r in rows} == {"4"}
    assert learned.main(run) == 2 and "--model cifar10: expected --data FOLDER" in capsys.readouterr().err
    assert learned.main([*run, "--data", str(tmp_path / "train")]) == 2 and "fix: give --data the folder" in capsys.readouterr().err
    monkeypatch.undo()
    assert learned.main([*run, "--data", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert f"--data {tmp_path}: holdout: expected fewer than the 20 training images and at least one, got 5000" in said
    assert learned.main([*run, "--data", str(tmp_path), "--state", "x.pt"]) == 2 and "expected one seed" in capsys.readouterr().err


def test_the_recipe_with_the_highest_mean_is_chosen():
    """Not the one with the best seed; forms that are not learned are no recipes."""
    tops = [("learned", 0.1, (80.0, 70.0)), ("learned", 0.3, (74.0, 77.0)), ("learned", 1.0, (77.0, 74.0)), ("dense", 0.5, (99.0, 99.0))]
    rows = [{"form": form, "top1": top1, **learning.SOURCE, "lr": lr} for form, lr, both in tops for top1 in both]
    assert choose.chosen(rows)["lr"] == 0.3


@pytest.mark.parametrize("script", [learned, choose])
def test_a_seed_named_twice_is_one(script, monkeypatch):
    ran: list[int] = []
    monkeypatch.setattr(script, "task_of", lambda args, seed: ran.append(seed) or SimpleNamespace(epochs=90))
    monkeypatch.setattr(learned, "run", lambda *_: ([{}], True, []))
    monkeypatch.setattr(choose, "tried", lambda args, seed: [{"form": "learned", "top1": 1.0, **learning.SOURCE, "task": choose.task_of(args, seed)}])
    for name in ("show", "share_lines"):
        monkeypatch.setattr(script, name, lambda *_: [], raising=False)
    assert script.main(["--seed", "3", "4", "3"]) == 0 and ran == [3, 4]


def test_two_that_write_one_table_lose_no_row(tmp_path, monkeypatch):
    """One has read it, and the other comes before it writes."""
    args, read, others = SimpleNamespace(out=tmp_path, limit=None, device="cpu"), command.csv_files.read, []

    def slow(path):
        found = read(path)
        if not others:
            others.append(threading.Thread(target=command.merge, args=(args, "t", [{"seed": 1, "top1": 2}], ["seed"])))
            others[0].start()
            others[0].join(0.3)
        return found

    monkeypatch.setattr(command.csv_files, "read", slow)
    command.merge(args, "t", [{"seed": 0, "top1": 1}], ["seed"])
    others[0].join()
    assert [r["seed"] for r in read(tmp_path / "t.csv")] == ["0", "1"]


def test_a_changed_weight_is_seen(task):
    other = networks.masked(task, "conv", mode="learned")
    assert learned.repeats(other, task) and other[3].train() is other[3] and not learned.repeats(other, task)
    assert learned.untouched(task.model, other)
    other[1].running_mean.add_(1)
    assert not learned.untouched(task.model, other)


@pytest.mark.slow
def test_learned_masks_are_at_least_as_accurate():
    assert learned.main([]) == 0


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["--limit", "5"], "--limit: expected --model resnet18 or"),
        (["--checkpoint", "weights.pt"], "--checkpoint: expected --model resnet18 or"),
        (["--model", "resnet18", *SMALL], "--dense-epochs: expected --model digits or cifar10, got resnet18.\n  fix: leave --dense-epochs out."),
    ],
)
@pytest.mark.parametrize("script", [tables_3_4, learned, choose])
def test_options_that_would_do_nothing(script, words, text, capsys):
    if script is choose and "resnet18" in words:
        text = "expected digits or cifar10"
    assert script.main(words) == 2 and text in capsys.readouterr().err


def test_files_that_are_not_there(tmp_path, capsys):
    torch.save({"conv1.weight": torch.zeros(1)}, tmp_path / "weights.pt")
    run = ["--model", "resnet18", "--data", str(tmp_path), "--checkpoint"]
    (tmp_path / "text.pt").write_text("no weights")
    fits = "expected the state_dict of resnet18, got"
    for wrong, words in (("none.pt", "got no file none.pt"), (str(tmp_path / "weights.pt"), fits), (str(tmp_path / "text.pt"), fits)):
        assert tables_3_4.main([*run, wrong]) == 2
        assert words in capsys.readouterr().err
    assert learned.main(["--model", "resnet18"]) == 2
    assert "expected --checkpoint FILE and --data FOLDER" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_from_a_file(tmp_path, capsys, monkeypatch):
    """A ResNet-18 that knows nothing, over six images: the command, from its checkpoint to its csv. Permutations are searched in small parts, in less time."""
    from PIL import Image

    monkeypatch.setattr("fxmask.kernels.nm_permute.COLUMNS", 64)
    torch.manual_seed(0)
    torch.save(torchvision().models.resnet18().state_dict(), tmp_path / "weights.pt")
    for i, name in enumerate("abcdef"):
        for part in ("train", "val"):
            (tmp_path / part / name).mkdir(parents=True)
            Image.new("RGB", (260, 300), (40 * i, 90, 10)).save(tmp_path / part / name / "0.png")
    run = ["--model", "resnet18", "--checkpoint", str(tmp_path / "weights.pt"), "--data", str(tmp_path), "--batch", "2"]
    assert learned.main([*run, "--epochs", "1", "--limit", "2", "--state", str(tmp_path / "run.pt"), "--out", str(tmp_path)]) in (0, 1)
    said = capsys.readouterr()
    assert "bit-identical: True" in said.out and "no danhofer_learned.csv is written" in said.err and not (tmp_path / "danhofer_learned.csv").exists()
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    assert len(saved["logits"]) == 19 and saved["epoch"] == 1 and saved["settings"]["init"] == "glorot" and saved["settings"]["lr"] == 1.0
    assert tables_3_4.main([*run, "--data", str(tmp_path / "val")]) == 2
    assert "expected a folder val" in capsys.readouterr().err
