"""The data of the examples: the fixed split, batches that only the seed decides, augmentation, and what is said where it is missing."""

from __future__ import annotations

import shutil
import sys
from types import ModuleType

import pytest
import torch
from data import DataMissing, Pixels, digits, draws, flip_and_crop, load, seeded
from distributed.imagenet_runs import make_folder
from saved_states import same
from thesis import imagenet_model
from thesis import train as thesis_train


def test_digits_split_is_fixed_and_stratified():
    data = load("digits", batch=2000)
    (train_x, train_y), (test_x, test_y) = next(data.train(1)), next(data.test())
    assert (data.image, data.channels, data.classes, data.steps) == (8, 1, 10, 1)
    assert train_x.shape == (1437, 1, 8, 8)
    assert test_x.shape == (360, 1, 8, 8)
    assert abs(train_x.mean()) < 1e-5
    assert abs(train_x.std() - 1) < 1e-3
    share = train_y.bincount() / 1437 - test_y.bincount() / 360
    assert share.abs().max() < 0.003
    assert torch.equal(test_x, next(load("digits", batch=2000, seed=5).test())[0])


def test_batches_depend_on_seed_and_epoch_only():
    def labels(seed, epoch):
        return torch.cat([y for _, y in load("digits", batch=100, seed=seed).train(epoch)])

    first = labels(0, 1)
    torch.rand(7)  # the global generator has no say
    assert torch.equal(first, labels(0, 1))
    assert not torch.equal(first, labels(0, 2))
    assert not torch.equal(first, labels(1, 1))
    assert torch.equal(first.bincount(), labels(1, 2).bincount())


def test_batches_that_are_augmented_together_are_the_same(monkeypatch):
    """As on a GPU: the last ones may be fewer, and smaller."""
    images = torch.randint(0, 256, (100, 3, 16, 16), dtype=torch.uint8)
    pixels = Pixels(images, torch.arange(100), torch.zeros(3, 1, 1), torch.ones(3, 1, 1))
    one_by_one = list(pixels.batches(8, seeded(0, 1), augment=True))
    monkeypatch.setattr("data.BATCHES_AT_ONCE", {"cpu": 5})
    together = list(pixels.batches(8, seeded(0, 1), augment=True))
    assert [len(y) for _, y in together] == [8] * 12 + [4]
    assert all(torch.equal(a, b) for pair in zip(one_by_one, together, strict=True) for a, b in zip(*pair, strict=True))


def test_no_images_are_an_empty_batch():
    pixels = Pixels(torch.zeros(0, 1, 8, 8, dtype=torch.uint8), torch.zeros(0, dtype=torch.int64), torch.zeros(1, 1, 1), torch.ones(1, 1, 1))
    assert [tuple(x.shape) for x, _ in pixels.batches(4)] == [(0, 1, 8, 8)]


def test_flip_and_crop_is_a_shift_or_a_mirrored_shift():
    x = torch.arange(1, 65, dtype=torch.uint8).reshape(1, 1, 8, 8).expand(40, 2, 8, 8)
    y = flip_and_crop(x, *draws(torch.arange(40).split(16), 1, torch.Generator().manual_seed(0)))
    padded = [torch.nn.functional.pad(v, (1, 1, 1, 1)) for v in (x[0], x[0].flip(2))]
    possible = [p[:, i : i + 8, j : j + 8] for p in padded for i in range(3) for j in range(3)]
    found = [[torch.equal(sample, p) for p in possible].index(True) for sample in y]
    assert len(set(found)) > 9


def test_of_seed_is_a_load_with_that_seed():
    """The same batches without loading the images again, and of what is held out."""
    data, other = load("digits", batch=500, holdout=100).of_seed(3), load("digits", batch=500, holdout=100, seed=3)
    for a, b in ((data.train(2), other.train(2)), (data.test(), other.test()), (data.held(), other.held())):
        assert all(torch.equal(x, y) for pair in zip(a, b, strict=True) for x, y in zip(*pair, strict=True))


def test_a_batch_is_made_on_the_device_of_the_images():
    """On meta tensors, as any op that mixes devices raises there too."""
    train, _ = digits()
    x, y = next(train.to("meta").batches(64, torch.Generator().manual_seed(0), augment=True))
    assert (x.device.type, y.device.type, x.shape, x.dtype) == ("meta", "meta", (64, 1, 8, 8), torch.float32)


@pytest.mark.parametrize("name", ["cifar10", "folder"])
def test_missing_folder(name, tmp_path):
    with pytest.raises(DataMissing, match="needs --root"):
        load(name, batch=8)
    with pytest.raises(DataMissing, match="fix: ") as caught:
        load(name, tmp_path, batch=8)
    assert str(tmp_path) in str(caught.value)


def test_classes_of_few_training_images():
    assert load("digits", batch=8, holdout=1436).classes == 10  # one is left


@pytest.mark.parametrize("there", [None, ModuleType("sklearn.datasets")], ids=["missing", "broken"])
def test_missing_scikit_learn(there, monkeypatch):
    """Or one that is there and does not load, by the reason that it gives."""
    monkeypatch.setitem(sys.modules, "sklearn.datasets", there)
    why = "import of sklearn.datasets halted" if there is None else "cannot import name 'load_digits'"
    with pytest.raises(DataMissing, match=f"scikit-learn, which cannot be imported: {why}.*\n  fix: pip install scikit-learn"):
        load("digits", batch=8)


def test_a_timm_that_does_not_load_says_why(monkeypatch):
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setattr(imagenet_model, "torchvision", lambda: None)
    with pytest.raises(DataMissing, match=r"--timm a: expected timm, got import of timm halted.*\n  fix: pip install 'fxmask\[models\]', or timm"):
        imagenet_model.import_timm("--timm a")


def test_unknown_name():
    with pytest.raises(ValueError, match="expected digits, cifar10 or folder, got 'mnist'"):
        load("mnist", batch=8)


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory):
    """Two classes, three training images and one test image each, 40x40."""
    pytest.importorskip("torchvision_shim")
    image = pytest.importorskip("PIL.Image")
    try:
        from torchvision_shim import import_torchvision

        import_torchvision()
    except ImportError:
        pytest.skip("needs torchvision")
    root = tmp_path_factory.mktemp("images")
    for part, count in (("train", 3), ("val", 1)):
        for shade, label in ((40, "dark"), (220, "light")):
            (root / part / label).mkdir(parents=True)
            for i in range(count):
                image.new("RGB", (40, 40), (shade, shade, i)).save(root / part / label / f"{i}.png")
    return root


def test_small_image_folder_is_kept_in_memory(image_folder):
    data = load("folder", image_folder, batch=4, image=32)
    assert (data.image, data.channels, data.classes, data.steps) == (32, 3, 2, 2)
    assert [len(y) for _, y in data.train(1)] == [4, 2]
    x, y = next(data.test())
    assert x.shape == (2, 3, 32, 32)
    assert y.tolist() == [0, 1]
    assert x[0].mean() < 0 < x[1].mean()


def test_large_image_folder_is_read_as_it_goes(image_folder):
    data = load("folder", image_folder, batch=4, image=96)
    assert (data.image, data.steps) == (96, 2)
    first = [x for x, _ in data.train(1)]
    assert [tuple(x.shape) for x in first] == [(4, 3, 96, 96), (2, 3, 96, 96)]
    assert next(data.test())[0].shape == (2, 3, 96, 96)


LARGE = ("--recipe", "imagenet", "--config", "ResMLP1 @ XChannel = masked 0.5 (16, 16);", "--dim", "16", "--mix-prob", "0", "--warmup", "0", "--cooldown", "0")


def test_a_run_on_large_images_that_was_broken_off(torchvision, tmp_path):
    """Ends with the bits of one that was not, whoever decodes: what is drawn for an image hangs on nothing that a skipped batch leaves behind."""
    options = ["--data", "folder", "--root", str(make_folder(tmp_path / "data", 2, 1)), *LARGE, "--epochs", "1", "--batch", "2", "--no-figures", "--out"]
    for name, workers in (("whole", "0"), ("broken", "1")):
        turns = thesis_train.turns(thesis_train.arguments([*options, str(tmp_path / name), "--workers", workers, "--save-every", "2"]))
        for step, _ in enumerate(turns, 1):
            if name == "broken" and step == 3:  # behind the checkpoint of step 2
                break
        turns.close()
    assert thesis_train.main([*options, str(tmp_path / "broken")]) == 0
    whole, broken = (torch.load(tmp_path / name / "checkpoint.pt", weights_only=True) for name in ("whole", "broken"))
    assert same(whole["model"], broken["model"]) and whole["progress"]["step"] == broken["progress"]["step"] == 4


def test_large_images_depend_on_seed_and_epoch_only(torchvision, tmp_path):
    root = make_folder(tmp_path / "data", 2, 1)

    def images(epoch=1, **options):
        return [x for x, _ in load("folder", root, batch=4, image=96, **options).train(epoch)]

    first = images()
    torch.rand(7)
    assert same(first, images()) and same(first, images(workers=1))
    assert not same(first, images(2)) and not same(first, images(seed=1))


@pytest.mark.parametrize("side", [32, 96])
def test_wrong_image_folders(image_folder, tmp_path, side):
    """Other classes to test than to train would be compared by their numbers; an empty folder and a file that is no image are named."""

    def told():
        with pytest.raises(DataMissing) as caught:
            list(load("folder", root, batch=4, image=side).train(1))
        return str(caught.value)

    root = shutil.copytree(image_folder, tmp_path / "data")
    (root / "val" / "dark").rename(root / "val" / "shady")
    assert f"{root}: expected the same classes in train and val, got 2 and 2; only in train: dark; only in val: shady.\n  fix: those folders" in told()
    (root / "val" / "shady").rename(root / "val" / "dark")
    (root / "train" / "light" / "1.png").write_bytes(b"no image")
    assert f"{root / 'train' / 'light' / '1.png'}: expected an image, got UnidentifiedImageError" in told()
    (root / "train" / "none").mkdir()
    assert f"{root}: expected one folder a class with images in it, got: " in told()
    shutil.rmtree(root / "train")
    (root / "train").mkdir()
    assert f"{root}: expected one folder a class with images in it, got: " in told()


def test_a_holdout_of_more_images_than_there_are(tmp_path, capsys):
    assert thesis_train.main(["--data", "digits", "--holdout", "5000", "--out", str(tmp_path / "run")]) == 2
    assert "holdout: expected fewer than the 1437 training images and at least one, got 5000" in capsys.readouterr().err and not (tmp_path / "run").exists()
