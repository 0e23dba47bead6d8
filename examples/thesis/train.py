"""The thesis' training of ResMLP with block masks: its recipes, checkpoints, exact resume. The same command again goes on where a run stopped.

    python examples/thesis/train.py --data cifar10 --root DIR --config "ResMLP5 @ XPatch = masked 0.8 (32, 32); XChannel = masked 0.8 (32, 32);"
    python examples/thesis/train.py --data folder --root DIR --recipe imagenet --stop 90 --config "ResMLP12 @ XChannel = masked 0.8 (32, 32);"
    python examples/thesis/train.py --data digits --epochs 10 --warmup 1 --cooldown 1 --masks-from 0 --batch 32

The literal mode of the thesis' code, whose masked weights keep falling under Adam's coupled decay: --criterion spectral --guard free, with --backward masked
or --backward unmasked. Any field of the recipe is an option; accuracies are top-1 in percent on the test images with the masks active; with --holdout
on training images that are held out, and the test images are read by --read-test alone, once, after the last epoch (test.json).
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
import train as common
from checked_arguments import check_device, check_numbers
from data import Data, DataMissing, load
from plots import plot_run
from resmlp import PRESETS
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode
from tracking import ActiveBlocks, CsvLog, MaskTracker, keep_epochs

import fxmask
from thesis import checkpoint, lock
from thesis.graphs import GraphedRun
from thesis.masked_model import CRITERIA, build, check, preset_of
from thesis.recipe import OPTIMISERS, RECIPES, Mixing, Rates, Recipe, guard, optimiser
from thesis.teacher import Teacher, watched

COLUMNS = ("epoch", "train_loss", "val_loss", "train_acc", "top1", "top5", "ratio_achieved", "flips", "lr", "flop", "loaded", "seconds")
FLOP_EVERY, FLOP_EVERY_GRAPHED = 25, 1000  # steps, from an epoch's first on; steps that are counted are no graph's
LATER = {"graphs": False, "amp": "none", "from_teacher": False, "teach_blocks": 0.0, "hidden": None}  # options that older checkpoints do not know
HOW_RUN = ("out", "threads", "workers", "save_every", "stop", "fresh", "root", "device", "no_figures")  # may change from one start of a run to the next


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; the recipe's fields take the recipe's values where they are not given."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--data", choices=tuple(common.DEFAULT_MODEL), default="digits")
    p.add_argument("--root", type=Path, help="folder of the images; nothing is downloaded")
    p.add_argument("--model", choices=tuple(PRESETS), help="default: digits, cifar, or with --recipe imagenet imagenet-thesis")
    p.add_argument("--recipe", choices=tuple(RECIPES), default="cifar10")
    for f in fields(Recipe):
        p.add_argument(f"--{f.name.replace('_', '-')}", type={"int": int, "float": float}.get(str(f.type), str), help=f"recipe: {f.name}")
    p.add_argument("--config", help='the thesis\' configuration string, such as "ResMLP5 @ XPatch = masked 0.8 (32, 32);"')
    p.add_argument("--dense", action="store_true", help="no masks; default without --config: 32x32 blocks at 80 %% (16x16 at 50 %% for digits)")
    p.add_argument("--backward", choices=("masked", "ste", "unmasked", "rigl"), default="masked")
    p.add_argument("--criterion", choices=CRITERIA, default="fro")
    p.add_argument("--average", type=float, default=0.0, help="moving average of the scores, such as 0.9")
    p.add_argument("--hysteresis", type=float, default=0.0)
    p.add_argument("--regrow", metavar="BY:FRACTION[:UNTIL]", help="exchange of blocks at every rebuild: gradient:0.3:10ep or random:0.3")
    p.add_argument("--dense-every", type=int, default=100, help="steps between dense gradients with --backward rigl")
    p.add_argument("--soft", action="store_true", help="masked blocks are scaled down over the ramp instead of being cut off")
    p.add_argument("--gain", action="store_true", help="kept weights take over the norm of blocks that leave")
    p.add_argument("--cover", action="store_true", help="no row and no column of blocks without a kept one")
    p.add_argument("--allocation", choices=("erk", "global", "byte"), help="one budget of blocks for all layers; default: the ratio in each")
    p.add_argument("--activations", metavar="RATIO[:BLOCK]", help="prune what the blocks' linears save for the backward, such as 0.5:16; with --dense, too")
    p.add_argument("--dim", type=int, help="width of the model instead of the preset's")
    p.add_argument("--expansion", type=int, help="hidden over outer width instead of the preset's")
    p.add_argument("--hidden", type=int, help="hidden units of the channel linears, whatever the expansion")
    p.add_argument("--teacher", metavar="DIR", help="learn from the logits of this dense run, too; same --data, --seed and --holdout")
    p.add_argument("--teach", metavar="SHARE[:TEMPERATURE]", default="0.7:2", help="of the loss; default %(default)s")
    p.add_argument("--teach-blocks", metavar="WEIGHT", type=float, default=0.0, help="learn what the teacher's blocks give, too; added to the loss")
    p.add_argument("--from-teacher", action="store_true", help="begin with the teacher's weights")
    p.add_argument("--amp", choices=("none", "bf16"), default="none", help="bf16: autocast; weights and masks stay float32")
    p.add_argument("--graphs", action="store_true", help="steps as CUDA graphs (fxmask.graphed), where a GPU would wait for the host")
    p.add_argument("--holdout", type=int, default=0, metavar="N", help="keep N training images from training, and judge by them")
    p.add_argument("--read-test", action="store_true", help="with --holdout: judge the last epoch on the test images")
    p.add_argument("--refresh", type=int, default=1, metavar="STEPS", help="steps between rebuilds of the masks; 0: built once")
    p.add_argument("--schedule", metavar="KIND:STEPS", help="ramp of the ratio from 0, such as cubic:5ep")
    p.add_argument("--guard", choices=("auto", "freeze", "decay", "free"), default="auto", help="what the optimiser does to masked weights")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--stop", type=int, metavar="EPOCH", help="end after this epoch of the plan")
    p.add_argument("--save-every", type=int, default=200, metavar="STEPS", help="checkpoints, besides one an epoch")
    p.add_argument("--fresh", action="store_true", help="begin again, whatever lies in --out")
    p.add_argument("--no-figures", action="store_true", help="examples/plots.py OUT draws them later")
    p.add_argument("--out", type=Path, default=Path("thesis-output"))
    p.add_argument("--threads", type=int)
    p.add_argument("--workers", type=int, default=0)
    p.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args(argv)
    for name, value in asdict(RECIPES[args.recipe]).items():
        if getattr(args, name) is None:
            setattr(args, name, value)
    check_numbers(p, args)
    check_device(p, args.device)
    if args.opt not in OPTIMISERS:
        p.error(f"--opt: expected one of {', '.join(OPTIMISERS)}, got {args.opt}")
    if not args.teacher and (args.from_teacher or args.teach_blocks):
        p.error("--from-teacher and --teach-blocks: expected a --teacher, got none")
    if args.dense and args.config:
        p.error("--dense has no masks: leave out --config")
    return args


def data_of(args: argparse.Namespace) -> Data:
    """The run's images, on its device where they fit into memory."""
    image, how = PRESETS[preset_of(args)].image, {"seed": args.seed, "workers": args.workers, "holdout": args.holdout, "device": args.device}
    return load(args.data, args.root, batch=args.batch, image=image, **how)


class Run:
    """One training run and all of its state. `data`: what `data_of(args)` gives, where it is loaded already."""

    def __init__(self, args: argparse.Namespace, data: Data | None = None) -> None:
        self.args, self.recipe = args, Recipe(**{f.name: getattr(args, f.name) for f in fields(Recipe)})
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


def turns(args: argparse.Namespace, data: Data | None = None) -> Iterator[None]:
    """Train until the plan's end, or --stop, and stop after each step, so that one process can train several models in turns."""
    r = Run(args, data)
    with lock.held(args.out):
        yield from _turns(args, r)


def _turns(args: argparse.Namespace, r: Run) -> Iterator[None]:
    went_on = r.resume()
    done = r.step // r.data.steps
    log_path, blocks_path = args.out / "log.csv", args.out / "active_blocks.csv"
    if went_on:
        print(f"going on after step {r.step} (epoch {done + 1})", flush=True)
        checkpoint.has_epochs(log_path, done)
        keep_epochs(log_path, done)
        keep_epochs(blocks_path, done)
    else:
        checkpoint.begin_again(args.out)
    log, blocks = CsvLog(log_path, COLUMNS, append=went_on), ActiveBlocks(blocks_path, r.tracker, append=went_on)
    last = args.epochs if args.stop is None else min(args.stop, args.epochs)
    facts = {"torch": torch.__version__, "threads": torch.get_num_threads(), "steps": r.data.steps, "command": shlex.join(sys.argv)}
    here = args.device if done < last else None
    facts["ran_on"] = checkpoint.ran_on(args.out, here, went_on)
    (args.out / "run.json").write_text(json.dumps({**vars(args), **facts}, indent=1, default=str) + "\n")
    for epoch in range(done + 1, last + 1):
        yield from r.epoch(epoch)
        r.report(epoch, log)
        blocks.write(epoch)
        r.save()
    if args.read_test and r.step == args.epochs * r.data.steps:
        with r.autocast():
            scores = common.evaluate(r.model, r.data.test(), args.device)
        (args.out / "test.json").write_text(json.dumps(scores) + "\n")
        print("test images: " + "  ".join(f"{k} {v:.6g}" for k, v in scores.items()))
    for path in (log_path, *(() if args.no_figures else plot_run(args.out))):
        print(path)


def run(args: argparse.Namespace) -> int:
    """All turns of one run."""
    for _ in turns(args):
        pass
    return 0


@common.flushed_denormals()
def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 2 where data, a package, a checkpoint or an argument is not as it must be."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    try:
        return run(args)
    except (DataMissing, fxmask.FxMaskError, checkpoint.CheckpointError, lock.InUse) as error:
        print(f"thesis/train.py: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
