"""The Lightning recipe: its state goes through Lightning's checkpoints, and a resumed run ends with the bits of one that was never stopped."""

import runpy
from pathlib import Path

import pytest
import torch

import fxmask
from fxmask.kernels.grid import expand_mask
from fxmask.passes.state.site import Site

pytestmark = [
    pytest.mark.models,
    pytest.mark.filterwarnings("ignore:.isinstance.treespec, LeafSpec:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*(num_workers|does not have many workers|logging interval|exists and is not empty|Please add the following callbacks)"),
]
RECIPE = Path(__file__).resolve().parents[2] / "examples" / "recipes" / "lightning_callback.py"


@pytest.fixture(scope="module")
def recipe(torchvision):
    pytest.importorskip("lightning")
    return runpy.run_path(str(RECIPE))


@pytest.fixture
def train(recipe):
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield lambda *args: recipe["main"]([str(a) for a in args])
    torch.set_num_threads(before)


def saved(folder):
    state = torch.load(folder / "last.ckpt", weights_only=True)
    return state, state["callbacks"]["MaskCallback"]["masks"]["masks"]


def test_resumed_is_as_never_stopped(train, tmp_path):
    whole = train("--steps", 20, "--out", tmp_path / "whole")
    train("--steps", 10, "--out", tmp_path / "parts")
    state, masks = saved(tmp_path / "parts")
    assert state["global_step"] == 10 and {e["step"] for e in masks.values()} == {10} and {e["policy"] for e in masks.values()} == {"freeze"}
    parts = train("--steps", 20, "--out", tmp_path / "parts", "--resume")
    assert saved(tmp_path / "parts")[1] == saved(tmp_path / "whole")[1] and len(masks) == 2
    assert {e["step"] for e in fxmask.state_dict(parts)["masks"].values()} == {20}
    assert all(torch.equal(p, q) for p, q in zip(whole.parameters(), parts.parameters(), strict=True))
    assert all(site._fxmask_guard is None for site in parts.modules() if isinstance(site, Site))


def quiet(**options):
    return dict(accelerator="cpu", devices=1, logger=False, enable_progress_bar=False, enable_model_summary=False, **options)


def test_masked_weights_rest(recipe):
    """Blocks that were never kept have the bits they began with, though AdamW decays."""
    import lightning

    module = recipe["Classifier"]()
    fxmask.apply(fxmask.restore(module.model), ratio=0.75, block=(16, 16))
    masks, before = fxmask.masks(module), {n: p.detach().clone() for n, p in module.named_parameters()}
    lightning.Trainer(max_steps=4, callbacks=[recipe["MaskCallback"]()], enable_checkpointing=False, **quiet()).fit(module, recipe["data"]())
    for name, mask in fxmask.masks(module).items():
        never, now = ~expand_mask(mask | masks[name], before[name].shape, (16, 16)), module.get_parameter(name)
        assert torch.equal(now[never], before[name][never]) and not torch.equal(now, before[name])


@pytest.mark.parametrize("resumed", [False, True])
def test_a_validation_before_training_warns_of_nothing(train, recipe, tmp_path, resumed):
    """Lightning's sanity check runs before any optimiser is guarded; a warning would be an error here."""
    import lightning

    class Validated(recipe["Classifier"]):
        def validation_step(self, batch, index):
            self.model(batch[0])

    if resumed:
        train("--steps", 10, "--out", tmp_path)
    module, path = Validated(), str(tmp_path / "last.ckpt") if resumed else None
    trainer = lightning.Trainer(max_steps=14, callbacks=[recipe["MaskCallback"]()], enable_checkpointing=False, default_root_dir=tmp_path, **quiet())
    trainer.fit(module, recipe["data"](), recipe["data"](), ckpt_path=path)
    assert {e["step"] for e in fxmask.state_dict(module)["masks"].values()} == {14}


def test_manual_optimisation_and_two_optimisers(recipe, tmp_path):
    """Each optimiser that holds masked weights is guarded, one that holds none is left alone."""
    import lightning

    class Manual(recipe["Classifier"]):
        def __init__(self):
            super().__init__()
            self.automatic_optimization = False

        def training_step(self, batch, index):
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            for optimizer in self.optimizers():
                optimizer.zero_grad()
            self.manual_backward(loss)
            for optimizer in self.optimizers():
                optimizer.step()

        def configure_optimizers(self):
            return [torch.optim.SGD(self.model[:4].parameters(), lr=0.1), torch.optim.SGD(self.model[4].parameters(), lr=0.1)]

    callback, module = recipe["MaskCallback"](), Manual()
    guards = []
    callback.teardown = lambda *_, **__: guards.extend(callback.guards)
    lightning.Trainer(max_epochs=1, callbacks=[callback], enable_checkpointing=False, **quiet()).fit(module, recipe["data"]())
    assert len(guards) == 1 and set(guards[0].policies) == {"model.0.weight", "model.2.weight"}
    assert {e["step"] for e in fxmask.state_dict(module)["masks"].values()} == {10}


def tuned(recipe, tmp_path, tuner, ratio, **mask):
    """A module that was trained with a tuner, and its weights and masks' state when the tuner had ended."""
    import lightning

    class Tuned(recipe["Classifier"]):
        def __init__(self):
            super().__init__()
            fxmask.apply(fxmask.restore(self.model), ratio=ratio, block=(16, 16), **mask)
            self.lr, self.batch_size, self.seen = 1e-3, 32, {}
            self.begun = {n: p.detach().clone() for n, p in self.named_parameters()}

        def train_dataloader(self):
            return torch.utils.data.DataLoader(recipe["data"]().dataset, batch_size=self.batch_size)

        def training_step(self, batch, index):
            policies = {site._fxmask_policy for site in self.modules() if isinstance(site, Site)}
            assert policies == {"freeze"}, "a trial step without a guard"
            return super().training_step(batch, index)

        def on_train_start(self):
            steps = {e["step"] for e in fxmask.state_dict(self)["masks"].values()}
            self.seen = {"steps": steps, "weights": {n: p.detach().clone() for n, p in self.named_parameters()}, "masks": fxmask.masks(self)}

    module = Tuned()
    masks, trainer = fxmask.masks(module), dict(max_steps=4, enable_checkpointing=False, default_root_dir=tmp_path, **quiet())
    lightning.Trainer(callbacks=[tuner, recipe["MaskCallback"]()], **trainer).fit(module)
    return module, masks


@pytest.mark.filterwarnings("ignore:.*(triggered tensorboard|Failed to compute suggestion|does not have a .val_dataloader)")
@pytest.mark.parametrize("mask", [dict(schedule=fxmask.Schedule("cubic", steps=30)), dict(refresh=3), {}], ids=["schedule", "cached", "plain"])
@pytest.mark.parametrize("name", ["LearningRateFinder", "BatchSizeFinder"])
def test_a_tuners_trial_steps_are_guarded_and_taken_back(recipe, tmp_path, name, mask):
    """Tuners train before on_train_start, and Lightning sorts them before other callbacks."""
    from lightning.pytorch import callbacks

    options = dict(num_training_steps=5) if name == "LearningRateFinder" else dict(max_trials=2, steps_per_trial=2)
    module, masks = tuned(recipe, tmp_path, getattr(callbacks, name)(**options), 0.75, **mask)
    assert module.seen["steps"] == {0}
    assert all(torch.equal(w, module.begun[n]) for n, w in module.seen["weights"].items())
    assert all(torch.equal(m, masks[n]) for n, m in module.seen["masks"].items())
    assert {e["step"] for e in fxmask.state_dict(module)["masks"].values()} == {4}


def test_a_checkpoint_without_masks_is_refused(train, tmp_path):
    train("--steps", 10, "--out", tmp_path)
    state, _ = saved(tmp_path)
    del state["callbacks"]["MaskCallback"]
    torch.save(state, tmp_path / "last.ckpt")
    with pytest.raises(ValueError, match="no masks' state"):
        train("--steps", 20, "--out", tmp_path, "--resume")


def test_an_evaluation_of_a_checkpoint_has_its_masks(train, recipe, tmp_path):
    """Inside the ramp the ratio is not the last one, and a fresh module would be dense."""
    import lightning

    wanted, seen = fxmask.masks(train("--steps", 10, "--out", tmp_path)), []

    class Evaluated(recipe["Classifier"]):
        def test_step(self, batch, index):
            seen.append(fxmask.masks(self))
            return self.model(batch[0]).sum()

    trainer = lightning.Trainer(callbacks=[recipe["MaskCallback"]()], default_root_dir=tmp_path, **quiet())
    trainer.test(Evaluated(), recipe["data"](), ckpt_path=str(tmp_path / "last.ckpt"), verbose=False)
    assert seen and all(torch.equal(mask, seen[0][name]) for name, mask in wanted.items()) and not wanted["model.0.weight"].all()
