"""The state of a run of train.py: a step, an epoch, its row, checkpoints."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from typing import Any

import torch
import train as common
from data import Data, load
from resmlp import PRESETS
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from tracking import CsvLog, MaskTracker

import fxmask
from thesis import checkpoint
from thesis.graphs import GraphedRun
from thesis.masked_model import build, check, preset_of
from thesis.recipe import Mixing, Rates, Recipe, guard, optimiser
from thesis.teacher import Teacher, watched

COLUMNS = ("epoch", "train_loss", "val_loss", "train_acc", "top1", "top5", "ratio_achieved", "flips", "lr", "flop", "loaded", "seconds")
FLOP_EVERY, FLOP_EVERY_GRAPHED = 25, 1000  # steps, from an epoch's first on; steps that are counted are no graph's
LATER = {"graphs": False, "amp": "none", "from_teacher": False, "teach_blocks": 0.0, "hidden": None}  # options that older checkpoints do not know
HOW_RUN = ("out", "threads", "workers", "save_every", "stop", "fresh", "root", "device", "no_figures")  # may change from one start of a run to the next


def data_of(args: argparse.Namespace) -> Data:
    """The run's images, on its device where they fit into memory."""
    image, how = PRESETS[preset_of(args)].image, {"seed": args.seed, "workers": args.workers, "holdout": args.holdout, "device": args.device}
    return load(args.data, args.root, batch=args.batch, image=image, **how)


class Run:
    """One training run and all of its state. `data`: what `data_of(args)` gives, where it is loaded already."""

    def __init__(self, args: argparse.Namespace, data: Data | None = None) -> None:
        self.args, self.recipe = args, Recipe.of(args)
        check(args)
        self.data = data or data_of(args)
        sizes = self.data.channels, self.data.classes
        self.teacher = Teacher(args, *sizes) if args.teacher else None
        begin = self.teacher.model.state_dict() if self.teacher and args.from_teacher else None
        self.model = build(args, preset_of(args), *sizes, self.data.steps, begin)
        if self.teacher:
            self.teacher.meet(self.model)
        self.optimiser = optimiser(self.model.parameters(), self.recipe, args.device if args.graphs else None)
        self.rates = Rates(self.optimiser, self.recipe, self.data.steps)
        self.mixing = Mixing(self.recipe, self.data.classes)
        self.guard = None if args.dense else guard(self.optimiser, self.model, args.guard)
        self.tracker = MaskTracker(self.model, counts=False)
        self.counted = torch.zeros(2, dtype=torch.float64, device=args.device)  # loss and right; left on the device, which would have to be waited for
        self.step, self.sums = 0, {"n": 0.0, "seconds": 0.0, "flop": 0.0, "loaded": 0.0}
        models = [self.model, *([self.teacher.model] if self.teacher else [])]
        self.graphed = GraphedRun(self.compute, self.optimiser, models, self.data.classes, args.batch) if args.graphs else None

    def loaded(self) -> tuple[float, float]:
        """(weight elements of the thesis' layers that a forward loads, of all that they have): token mixing and channel linears, masked or not."""
        rows = {row["name"]: row["achieved_ratio"] or 0.0 for row in fxmask.explain(self.model).rows if row["masked"]}
        layers = [(name, m.weight.numel()) for name, m in self.model.named_modules() if name.startswith("blocks.") and isinstance(m, nn.Linear)]
        return sum(n * (1 - rows.get(name, 0.0)) for name, n in layers), float(sum(n for _, n in layers))

    def settings(self) -> dict[str, Any]:
        """What must not change when a run goes on."""
        known = {k: v for k, v in vars(self.args).items() if k not in HOW_RUN and (k != "teach" or self.args.teacher)}
        return {k: v for k, v in known.items() if k not in LATER or v != LATER[k]}

    def save(self) -> None:
        """A checkpoint that `torch.load(weights_only=True)` opens; `model` is a plain state_dict."""
        parts = {"model": self.model, "optimiser": self.optimiser, "scheduler": self.rates, "tracker": self.tracker}
        state: dict[str, Any] = {name: part.state_dict() for name, part in parts.items()}
        state["masks"] = None if self.args.dense else fxmask.state_dict(self.model)
        checkpoint.save(self.args.out, {**state, "progress": {"step": self.step, "sums": self.read_sums()}, "settings": self.settings()})

    def resume(self) -> bool:
        """Go on from the folder's checkpoint, if it has one: weights first, then masks, then the optimiser."""
        state = None if self.args.fresh else checkpoint.load(self.args.out, "cpu")  # another device may have begun the run
        if state is None:
            return False
        checkpoint.same_settings({**LATER, **state["settings"]}, {**LATER, **self.settings()}, self.args.out)
        self.model.load_state_dict(state["model"])
        if not self.args.dense:
            fxmask.load_state_dict(self.model, state["masks"])
        self.optimiser.load_state_dict(state["optimiser"])
        self.rates.load_state_dict(state["scheduler"])
        self.tracker.load_state_dict(state["tracker"])
        self.step, sums = state["progress"]["step"], dict(state["progress"]["sums"])
        self.counted.copy_(torch.tensor([sums.pop("loss"), sums.pop("right")], dtype=torch.float64))
        self.sums = sums
        return True

    def read_sums(self) -> dict[str, float]:
        """The epoch's sums so far; waits for the device."""
        return {**dict(zip(("loss", "right"), self.counted.tolist(), strict=True)), **self.sums}

    def autocast(self) -> torch.autocast:
        """Where forwards run."""
        return torch.autocast(torch.device(self.args.device).type, torch.bfloat16, enabled=self.args.amp == "bf16")

    def train_step(self, images: torch.Tensor, labels: torch.Tensor, counted: bool = False) -> None:
        """One optimiser step. All that is random in it hangs on the seed and the step, so that a resumed run draws the same. `counted`: with its FLOP."""
        torch.manual_seed(self.args.seed * 1_000_003 + self.step)
        mixed, targets = self.mixing(images, labels)
        compute = self.compute if counted or self.graphed is None else self.graphed
        compute(*(t.to(self.args.device) for t in (mixed, targets, labels)))
        self.rates.step()
        self.sums["n"] += len(labels)
        self.step += 1

    def compute(self, mixed: torch.Tensor, targets: torch.Tensor, labels: torch.Tensor) -> None:
        """What the device does of a step: it lies in a CUDA graph with --graphs, so nothing here may depend on the host's numbers."""
        self.tracker.before_step()
        with self.autocast():
            logits, blocks = watched(self.model, mixed) if self.teacher else (self.model(mixed), [])
        logits = logits.float()
        loss = F.cross_entropy(logits, targets, label_smoothing=self.recipe.smoothing)
        if self.teacher:
            with self.autocast():
                loss = self.teacher.loss(mixed, logits, blocks, loss)
        self.optimiser.zero_grad(set_to_none=True)
        loss.backward()
        self.optimiser.step()  # the guard's hooks count it
        self.counted += torch.stack([loss.detach().double() * len(labels), (logits.argmax(1) == labels).sum().double()])

    def epoch(self, epoch: int) -> Iterator[None]:
        """The rest of an epoch, from the step that the run has come to; stops after each step. `seconds` leaves out what others do meanwhile."""
        done, save_every, began = self.step - (epoch - 1) * self.data.steps, self.args.save_every, time.perf_counter()
        every = FLOP_EVERY if self.graphed is None else FLOP_EVERY_GRAPHED
        self.model.train()
        for i, (images, labels) in enumerate(common.progress(self.data.train(epoch), self.data.steps, f"epoch {epoch}")):
            if i < done:
                continue
            if i % every == 0:  # useful FLOPs; a ramp moves little until they are counted again
                steps = min(every, self.data.steps - i)
                self.sums["loaded"] += self.loaded()[0] * steps
                with FlopCounterMode(display=False) as counter:
                    self.train_step(images, labels, counted=True)
                self.sums["flop"] += float(counter.get_total_flops()) * steps
            else:
                self.train_step(images, labels)
            if save_every and self.step % save_every == 0 and i + 1 < self.data.steps:  # the last step's is saved with the epoch's row, or a kill loses the row
                self.sums["seconds"] += time.perf_counter() - began
                began = time.perf_counter()
                self.save()
            self.sums["seconds"] += time.perf_counter() - began
            yield
            began = time.perf_counter()
        self.sums["seconds"] += time.perf_counter() - began

    def report(self, epoch: int, log: CsvLog) -> None:
        """The epoch's csv row and line."""
        began, sums = time.perf_counter(), self.read_sums()
        scores = {"train_loss": sums["loss"] / sums["n"], "train_acc": 100 * sums["right"] / sums["n"]}
        with self.autocast():
            scores |= common.evaluate(self.model, (self.data.held or self.data.test)(), self.args.device)
        loaded, whole = self.loaded()
        row = {"epoch": epoch, **scores, "ratio_achieved": 1 - loaded / whole, "flips": self.tracker.take_flips()}
        row |= {"lr": self.rates.rate, "flop": sums["flop"], "loaded": sums["loaded"], "seconds": sums["seconds"] + time.perf_counter() - began}
        log.write({k: round(v, 8) for k, v in row.items()})
        self.sums = dict.fromkeys(self.sums, 0.0)
        self.counted.zero_()
        print("  ".join(f"{k} {v:.6g}" for k, v in row.items()), flush=True)
