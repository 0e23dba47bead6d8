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
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
import train as common
from checked_arguments import check_device, check_numbers
from data import Data
from plots import plot_run
from resmlp import PRESETS
from tracking import ActiveBlocks, CsvLog, keep_epochs

from fxmask.kernels.reference import MODES
from fxmask.passes.stepping.guarded_weight import POLICIES
from thesis import checkpoint, lock
from thesis.masked_model import CRITERIA
from thesis.recipe import RECIPES, Recipe
from thesis.side_by_side import GOES_ON, exit_code
from thesis.train_run import COLUMNS, Run


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line; the recipe's fields take the recipe's values where they are not given."""
    p = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    p.add_argument("--data", choices=tuple(common.DEFAULT_MODEL), default="digits")
    p.add_argument("--root", type=Path, help="folder of the images; nothing is downloaded")
    p.add_argument("--model", choices=tuple(PRESETS), help="default: digits, cifar, or with --recipe imagenet imagenet-thesis")
    p.add_argument("--recipe", choices=tuple(RECIPES), default="cifar10")
    Recipe.add_options(p)
    p.add_argument("--config", help='the thesis\' configuration string, such as "ResMLP5 @ XPatch = masked 0.8 (32, 32);"')
    p.add_argument("--dense", action="store_true", help="no masks; default without --config: 32x32 blocks at 80 %% (16x16 at 50 %% for digits)")
    p.add_argument("--backward", choices=MODES, default="masked")
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
    p.add_argument("--guard", choices=POLICIES, default="auto", help="what the optimiser does to masked weights")
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
    if not args.teacher and (args.from_teacher or args.teach_blocks):
        p.error("--from-teacher and --teach-blocks: expected a --teacher, got none")
    if args.dense and args.config:
        p.error("--dense has no masks: leave out --config")
    return args


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
    checkpoint.write_facts(args.out, {**vars(args), **facts})
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


def run(args: argparse.Namespace) -> None:
    """All turns of one run."""
    for _ in turns(args):
        pass


@common.flushed_denormals()
def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 2 where data, a package, a checkpoint or an argument is not as it must be."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    return exit_code("thesis/train.py", lambda: run(args), GOES_ON)


if __name__ == "__main__":
    sys.exit(main())
