"""The state of an ImageNet run on one rank: a step, an epoch, the test, checkpoints."""

from __future__ import annotations

import argparse
import contextlib
import io
import time
from typing import Any

import torch
import train as common
from torch import Tensor
from torch.nn import functional as F
from tracking import MaskTracker

import fxmask
from thesis import checkpoint
from thesis.imagenet_data import open_images
from thesis.imagenet_model import build, import_timm
from thesis.ranks import Ranks
from thesis.recipe import Mixing, Recipe, guard, optimiser, scheduler

COLUMNS = ("epoch", "train_loss", "val_loss", "train_acc", "top1", "top5", "ratio_achieved", "flips", "lr", "test_images", "seconds")
HOW_RUN = ("out", "threads", "workers", "save_every", "stop", "fresh", "root", "device")  # may change from one start of a run to the next


class Run:
    """One rank's part of a training run. `ranks.together` makes it, so nothing in `__init__` communicates."""

    def __init__(self, args: argparse.Namespace, ranks: Ranks) -> None:
        self.args, self.ranks, self.recipe = args, ranks, Recipe.of(args)
        self._check()
        options = {name: getattr(args, name) for name in ("image", "batch", "seed", "workers", "loader")}
        self.images = open_images(args.root, ranks, **options)
        self.model = build(args, len(self.images.classes), self.images.steps, ranks.device)
        self.optimiser = optimiser(self.model.parameters(), self.recipe)
        self.scheduler = scheduler(self.optimiser, self.recipe, self.images.steps)
        self.mixing = Mixing(self.recipe, len(self.images.classes))
        self.guard = None if args.dense else guard(self.optimiser, self.model, args.guard)
        self.tracker = MaskTracker(self.model, counts=False)
        self.wrapped = self.model
        self.step, self.epochs_done, self.seconds = 0, 0, 0.0
        # loss, right answers, images of this epoch on this rank: on the device, so that a step does not wait for it
        self.sums = torch.zeros(3, dtype=torch.float64, device=ranks.device)

    def _check(self) -> None:
        args, world = self.args, self.ranks.world
        if args.batch % world or args.batch < world:
            low, high = max(1, args.batch // world) * world, (args.batch // world + 1) * world
            fix = f"  fix: --batch {low} or {high}, or another number of processes."
            raise fxmask.FxMaskError(f"--batch: expected a multiple of the {world} processes, who share it, got {args.batch}.\n{fix}")
        if args.batch == world and args.mix_prob > 0:
            what = f"--batch {args.batch} on {world} process(es): expected two images a process or more, which MixUp and CutMix mix, got one."
            raise fxmask.FxMaskError(f"{what}\n  fix: a larger --batch, or --mix-prob 0.")
        if args.amp == "bf16" and self.ranks.device.type == "cuda" and not torch.cuda.is_bf16_supported():
            raise fxmask.FxMaskError(f"--amp bf16: expected a GPU that has bfloat16, got {torch.cuda.get_device_name()}.\n  fix: --amp none.")
        if args.loader == "timm":
            import_timm("--loader timm")

    def settings(self) -> dict[str, Any]:
        """What must not change when a run goes on."""
        data = {"classes": len(self.images.classes), "train_images": self.images.train_images}
        return {k: v for k, v in vars(self.args).items() if k not in HOW_RUN} | data

    def save(self) -> None:
        """Rank 0 writes: weights, masks and momenta are the same everywhere, and the sums of all ranks are gathered."""
        sums = [t.tolist() for t in self.ranks.each(self.sums)]
        if not self.ranks.first:
            return
        parts: dict[str, Any] = {"model": self.model, "optimiser": self.optimiser, "scheduler": self.scheduler, "tracker": self.tracker}
        state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
        state["masks"] = None if self.args.dense else fxmask.state_dict(self.model)
        progress = {"step": self.step, "epochs_done": self.epochs_done, "sums": sums, "seconds": self.seconds, "processes": self.ranks.world}
        checkpoint.save(self.args.out, {**state, "progress": progress, "settings": self.settings()})

    def resume(self) -> bool:
        """Go on from the folder's checkpoint, if it has one, and wrap the model; on all ranks."""
        went_on = self.ranks.together(self._load)
        steps = [int(t) for t in self.ranks.each(torch.tensor(self.step, device=self.ranks.device))]
        if len(set(steps)) > 1:
            what = f"{self.args.out}: expected the same checkpoint on every rank, got steps {steps}."
            raise checkpoint.CheckpointError(f"{what}\n  fix: --out must be a folder that all machines share.")
        self.wrapped = self.ranks.wrap(self.model)
        return went_on

    def _load(self) -> bool:
        with contextlib.redirect_stderr(io.StringIO()) if not self.ranks.first else contextlib.nullcontext():  # one rank tells of a damaged file
            state = None if self.args.fresh else checkpoint.load(self.args.out, map_location="cpu")
        if state is None:
            return False
        progress, out, world = state["progress"], self.args.out, self.ranks.world
        checkpoint.same_settings(state["settings"], self.settings(), out)
        if progress["processes"] != world:
            what = f"{out}: expected {progress['processes']} process(es), as this run began with, got {world}: each has a share of every batch."
            raise checkpoint.CheckpointError(f"{what}\n  fix: torchrun --nproc-per-node {progress['processes']}, another --out, or --fresh.")
        self.model.load_state_dict(state["model"])
        if not self.args.dense:
            fxmask.load_state_dict(self.model, state["masks"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.scheduler.load_state_dict(state["scheduler"])
        self.tracker.load_state_dict(state["tracker"])
        self.step, self.epochs_done, self.seconds = progress["step"], progress["epochs_done"], progress["seconds"]
        self.sums = torch.tensor(progress["sums"][self.ranks.rank], dtype=torch.float64, device=self.ranks.device)
        return True

    def forward(self, model: torch.nn.Module, images: Tensor) -> Tensor:
        """Logits in float32."""
        with torch.autocast(self.ranks.device.type, torch.bfloat16, enabled=self.args.amp == "bf16"):
            return model(images).float()

    def train_step(self, images: Tensor, labels: Tensor) -> None:
        """One optimiser step. All that is random in it hangs on the seed, the step and the rank, so that a resumed run draws the same."""
        torch.manual_seed((self.args.seed * 1_000_003 + self.step) * self.ranks.world + self.ranks.rank)
        images, labels = images.to(self.ranks.device, non_blocking=True), labels.to(self.ranks.device, non_blocking=True)
        mixed, targets = self.mixing(images, labels)
        logits = self.forward(self.wrapped, mixed)
        loss = F.cross_entropy(logits, targets, label_smoothing=self.recipe.smoothing)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()  # the guard's hooks count it
        self.scheduler.step()
        self.sums[0] += loss.detach().double() * len(labels)
        self.sums[1] += (logits.argmax(1) == labels).sum()
        self.sums[2] += len(labels)
        self.step += 1

    def epoch(self, epoch: int) -> None:
        """The rest of an epoch, from the step that the run has come to: none of it where the run was broken off between the last step and the row."""
        done, steps, began = self.step - (epoch - 1) * self.images.steps, self.images.steps, time.perf_counter()
        self.wrapped.train()
        batches = self.images.train(epoch, done)
        for images, labels in common.progress(batches, steps - done, f"epoch {epoch}") if self.ranks.first else batches:
            self.train_step(images, labels)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.seconds, began = self.seconds + time.perf_counter() - began, time.perf_counter()
                self.save()
        self.seconds += time.perf_counter() - began

    @torch.no_grad()
    def evaluate(self) -> dict[str, float]:
        """Mean loss and accuracies on the test images, each counted once, whatever the number of ranks."""
        self.ranks.share_buffers(self.model)
        self.model.eval()
        sums = torch.zeros(4, dtype=torch.float64, device=self.ranks.device)
        for images, labels in self.images.test():
            images, labels = images.to(self.ranks.device, non_blocking=True), labels.to(self.ranks.device, non_blocking=True)
            logits = self.forward(self.model, images)
            best = logits.topk(min(5, logits.shape[1]), dim=1).indices == labels[:, None]
            sums[:3] += torch.stack([F.cross_entropy(logits, labels, reduction="sum"), best[:, 0].sum(), best.sum()])
            sums[3] += len(labels)
        loss, top1, top5, n = self.ranks.sum(sums).tolist()
        if n != self.images.test_images:
            raise RuntimeError(f"evaluate: expected {self.images.test_images} test images over all ranks, got {n:.0f}.")
        return {"val_loss": loss / n, "top1": 100 * top1 / n, "top5": 100 * top5 / n, "test_images": int(n)}

    def report(self, epoch: int) -> dict[str, float]:
        """The epoch's csv row: the same on every rank, but for the seconds. `flips` are blocks that are elsewhere than an epoch ago."""
        began = time.perf_counter()
        loss, right, n = self.ranks.sum(self.sums).tolist()
        scores = {"train_loss": loss / n, "train_acc": 100 * right / n, **self.evaluate()}
        self.tracker.before_step()
        row = {"epoch": epoch, **scores, "ratio_achieved": self.tracker.ratio_achieved(), "flips": self.tracker.take_flips()}
        row |= {"lr": self.scheduler.get_last_lr()[0], "seconds": self.seconds + time.perf_counter() - began}
        self.sums, self.seconds, self.epochs_done = torch.zeros_like(self.sums), 0.0, epoch
        return row
