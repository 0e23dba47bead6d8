"""Masks under Lightning: a callback that guards the optimisers, and whose state goes with Lightning's own checkpoints.

    python examples/recipes/lightning_callback.py --steps 20 --out runs/lightning
    python examples/recipes/lightning_callback.py --steps 40 --out runs/lightning --resume

In your own script:

    module.model = fxmask.apply(module.model, ratio=0.8, block=(32, 32))       # or in __init__, or in configure_model
    trainer = Trainer(callbacks=[MaskCallback()])
    trainer.fit(module, data, ckpt_path="last")

MaskCallback puts itself before all other callbacks, so that the trial steps of LearningRateFinder, BatchSizeFinder and Tuner are guarded, too; the state from
before their search comes back with their checkpoint.

Tested with one process, automatic and manual optimisation. Under the ddp strategy nothing changes. Lightning's FSDP and DeepSpeed strategies are not tested.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from torchvision_shim import import_torchvision  # for a CPU build of torch beside torchvision's default wheel; leave it out elsewhere

with contextlib.suppress(ImportError):  # lightning does without
    import_torchvision()

try:
    import lightning
    from lightning.pytorch.callbacks import Callback, ModelCheckpoint
except ImportError as error:
    if __name__ != "__main__":
        raise
    print(f"lightning_callback.py: {error}\n  fix: pip install 'fxmask[models]', or lightning", file=sys.stderr)
    sys.exit(2)
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import fxmask


class MaskCallback(Callback):
    """Guards every optimiser that holds masked weights. Arguments: those of `fxmask.guard`."""

    def __init__(self, masked_weights: str = "auto", returning: str = "keep") -> None:
        self.options = dict(masked_weights=masked_weights, returning=returning)
        self.guards: list[Any] = []
        self.guarded: list[torch.optim.Optimizer] = []
        self.module: nn.Module | None = None
        self.loaded: dict[str, Any] | None = None

    def setup(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self.module = pl_module
        # Lightning sorts its tuners to the front, wherever they are listed, and they train in their on_fit_start
        trainer.callbacks = [self, *(c for c in trainer.callbacks if c is not self)]

    def state_dict(self) -> dict[str, Any]:
        """What Lightning puts into a checkpoint under the callback's name."""
        assert self.module is not None
        return {"masks": fxmask.state_dict(self.module)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Kept until training or an evaluation begins. Where optimisers are guarded, a tuner puts back what it found, the weights before this."""
        self.loaded = state_dict["masks"]
        if self.guards:
            self.take_up()

    def on_load_checkpoint(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, checkpoint: dict[str, Any]) -> None:
        if self.state_key not in checkpoint.get("callbacks", {}):
            what = "the checkpoint has no masks' state: expected one that was saved with MaskCallback."
            raise ValueError(f"{what}\n  fix: start a masked run from dense weights by module.load_state_dict(checkpoint['state_dict']) instead of ckpt_path.")

    def take_up(self, *_: Any) -> None:
        if self.loaded is not None:
            assert self.module is not None
            fxmask.load_state_dict(self.module, self.loaded)
            self.loaded = None

    on_sanity_check_start = on_validation_start = on_test_start = on_predict_start = take_up

    def on_fit_start(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule) -> None:
        """Guard the optimisers, before a tuner's trial steps and before the evaluation that comes before training."""
        self.take_up()
        if [*map(id, self.guarded)] == [*map(id, trainer.optimizers)]:
            return
        self.let_go()
        fxmask.step(pl_module, 0)  # also where no optimiser holds a weight yet, as with a backbone that is unfrozen later
        names = fxmask.state_dict(pl_module)["masks"]
        masked = {id(p) for n, p in pl_module.named_parameters() if n in names}
        self.guarded = list(trainer.optimizers)
        for optimizer in self.guarded:  # of several, a discriminator's may hold none
            if len(self.guarded) == 1 or any(id(p) in masked for group in optimizer.param_groups for p in group["params"]):
                self.guards.append(fxmask.guard(optimizer, pl_module, **self.options))

    on_train_start = on_fit_start  # for a strategy that has made or loaded something since

    def let_go(self) -> None:
        for guard in self.guards:
            guard.remove()
        self.guards, self.guarded = [], []

    def teardown(self, trainer: lightning.Trainer, pl_module: lightning.LightningModule, stage: str) -> None:
        self.let_go()


# ---- a demo ----------------------------------------------------------------------------------------------------------------------------------------------


class Classifier(lightning.LightningModule):
    """A small classifier with masked Linears."""

    def __init__(self, ratio: float = 0.75) -> None:
        super().__init__()
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 10))
        self.model = fxmask.apply(model, ratio=ratio, block=(16, 16), schedule=fxmask.Schedule("cubic", steps=30))

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-3, weight_decay=0.05)


def data() -> DataLoader:
    """Ten batches, in the same order in every epoch."""
    x = torch.randn(320, 64, generator=torch.Generator().manual_seed(0))
    return DataLoader(TensorDataset(x, x[:, :10].argmax(1)), batch_size=32)


def main(argv: list[str] | None = None) -> Classifier:
    """Train the demo; returns its module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="optimiser steps in all, those before a resume included")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--resume", action="store_true", help="from the last checkpoint in --out")
    args = parser.parse_args(argv)
    if args.resume and not (args.out / "last.ckpt").is_file():
        parser.error(f"--resume: expected a checkpoint at {args.out / 'last.ckpt'}, found none; leave --resume out to begin a run")

    module = Classifier()
    keep = ModelCheckpoint(args.out, save_last=True, every_n_train_steps=10)
    quiet = dict(logger=False, enable_progress_bar=False, enable_model_summary=False)
    trainer = lightning.Trainer(max_steps=args.steps, accelerator="auto", devices=1, callbacks=[MaskCallback(), keep], default_root_dir=args.out, **quiet)
    trainer.fit(module, data(), ckpt_path=str(args.out / "last.ckpt") if args.resume else None)
    print(fxmask.explain(module))
    return module


if __name__ == "__main__":
    main()
