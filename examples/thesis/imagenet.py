"""ImageNet, or any folder like it: the thesis' table 5.2 in one process or in several, exact resume. The same command again goes on where a run stopped.

    torchrun --nproc-per-node 4 examples/thesis/imagenet.py --root DIR --workers 8 --amp bf16 --out runs/imagenet \\
        --config "ResMLP12 @ XPatch = masked 0.8 (32, 32); XChannel = masked 0.8 (32, 32);"
    python examples/thesis/imagenet.py --root DIR --timm resmlp_12_224 --ratio 0.8 --block 32 32

`--root` holds train/<class>/* and val/<class>/*. `--batch` counts the images of a step on all processes together, 64 as on the thesis' one GPU, so that the
recipe is the same for any number of them; faster runs give a larger one and choose --lr for it. The run is planned for 300 epochs and stopped after 90.
A resumed run needs as many processes as it began with and, on a CPU, ends with the bits of one that nobody disturbed.
"""

from __future__ import annotations

import argparse
import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other examples, from whatever folder it is started

import torch
from checked_arguments import check_numbers
from plots import plot_run
from tracking import CsvLog, keep_epochs
from train import flushed_denormals

import fxmask
from fxmask.kernels.reference import MODES
from fxmask.kernels.score import CRITERIA
from fxmask.passes.stepping.guarded_weight import POLICIES
from thesis import checkpoint, lock, ranks
from thesis.imagenet_model import SIZES
from thesis.imagenet_run import COLUMNS, Run
from thesis.recipe import IMAGENET, Recipe
from thesis.side_by_side import GOES_ON, exit_code

RATIO, BLOCK = 0.8, [32, 32]  # without --config


def arguments(argv: list[str] | None) -> argparse.Namespace:
    """The command line, table 5.2 where nothing is given."""
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--root", type=Path, required=True, help="folder with train and val; nothing is downloaded")
    Recipe.add_options(p, IMAGENET)
    p.add_argument("--config", help='the thesis\' configuration string, such as "ResMLP12 @ XPatch = masked 0.8 (32, 32);"')
    p.add_argument("--ratio", type=float, help=f"without --config: fraction of blocks that are masked, default {RATIO}")
    p.add_argument("--block", type=int, nargs=2, metavar=("OUT", "IN"), help="default {} {}".format(*BLOCK))
    p.add_argument("--dense", action="store_true", help="no masks")
    p.add_argument("--image", type=int, default=224, help="side in pixels")
    for name in SIZES:
        p.add_argument(f"--{name}", type=int, help="of the ResMLP, instead of the thesis'")
    p.add_argument("--timm", metavar="NAME", help="a model of timm's instead")
    p.add_argument("--exclude", nargs="*", default=[], help="with --timm: patterns of layers that stay dense, besides its head")
    p.add_argument("--backward", choices=MODES, default="masked")
    p.add_argument("--criterion", choices=CRITERIA, default="fro")
    p.add_argument("--cover", action="store_true", help="no row and no column of blocks without a kept one")
    p.add_argument("--refresh", type=int, default=1, metavar="STEPS", help="steps between rebuilds of the masks; 0: built once")
    p.add_argument("--schedule", metavar="KIND:STEPS", help="ramp of the ratio from 0, such as cubic:5ep")
    p.add_argument("--guard", choices=POLICIES, default="auto", help="what the optimiser does to masked weights")
    p.add_argument("--amp", choices=("none", "bf16"), default="none", help="bf16: autocast; weights and masks stay float32")
    p.add_argument("--loader", choices=("torchvision", "timm"), default="torchvision", help="timm: its readers, transforms and prefetching loader")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--stop", type=int, default=90, metavar="EPOCH", help="end after this epoch of the plan, default %(default)s")
    p.add_argument("--save-every", type=int, default=1000, metavar="STEPS", help="checkpoints, besides one an epoch")
    p.add_argument("--fresh", action="store_true", help="begin again, whatever lies in --out")
    p.add_argument("--out", type=Path, default=Path("imagenet-output"))
    p.add_argument("--threads", type=int)
    p.add_argument("--workers", type=int, default=0, help="processes that decode images, for each process that trains")
    p.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if torch.cuda.is_available() else "cpu")
    args = p.parse_args(argv)
    check_numbers(p, args)
    if args.dense and (args.config or args.ratio is not None or args.block):
        p.error("--dense has no masks: leave out --config, --ratio and --block")
    if args.config and (args.ratio is not None or args.block):
        p.error("--config says which layers are masked and how: leave out --ratio and --block")
    if args.exclude and not args.timm:
        p.error("--exclude: expected with --timm, whose layers it names; the thesis' model has --config")
    if args.timm and (args.config or any(getattr(args, name) is not None for name in SIZES)):
        p.error(f"--timm: its models have their own layers and sizes: leave out --config, {', '.join(f'--{name}' for name in SIZES)}")
    args.ratio, args.block = RATIO if args.ratio is None else args.ratio, args.block or BLOCK  # a checkpoint has them in any case
    return args


def run(args: argparse.Namespace, here: ranks.Ranks) -> int:
    """Hold the folder and train."""
    r = here.together(lambda: Run(args, here))
    with ExitStack() as stack:
        here.together(lambda: stack.enter_context(lock.held(args.out)) if here.first else None)
        return train(r)


def train(r: Run) -> int:
    """Until the plan's end, or --stop."""
    args, here, went_on = r.args, r.ranks, r.resume()
    here.together(lambda: write_begin(r, went_on) if here.first else None)
    log = CsvLog(args.out / "log.csv", COLUMNS, append=True) if here.first else None
    for epoch in range(r.epochs_done + 1, min(args.stop, args.epochs) + 1):
        r.epoch(epoch)
        row = r.report(epoch)
        if log:
            log.write({k: round(v, 8) for k, v in row.items()})
            print("  ".join(f"{k} {v:.6g}" for k, v in row.items()), flush=True)
        r.save()
    if log and r.epochs_done:
        for path in (log.path, *plot_run(args.out)):
            print(path)
    return 0


def write_begin(r: Run, went_on: bool) -> None:
    """What the run is, on the screen and in run.json; the log cut to the epochs that are done."""
    args, images, world = r.args, r.images, r.ranks.world
    path = args.out / "log.csv"
    if went_on:
        print(f"going on after step {r.step} (epoch {r.epochs_done + 1})", flush=True)
        checkpoint.has_epochs(path, r.epochs_done)
        keep_epochs(path, r.epochs_done)
    else:
        checkpoint.begin_again(args.out)
        CsvLog(path, COLUMNS)
        print(fxmask.explain(r.model))
    facts = {"parameters": sum(p.numel() for p in r.model.parameters()), "steps_per_epoch": images.steps, "batch_per_process": args.batch // world}
    facts |= {"torch": torch.__version__, "threads": torch.get_num_threads(), "command": shlex.join(sys.argv)}
    checkpoint.write_facts(args.out, {**vars(args), **r.settings(), **facts})
    print(
        f"{images.train_images} + {images.test_images} images, {len(images.classes)} classes; {facts['parameters']:,} parameters; {args.batch} images a step, "
        f"{facts['batch_per_process']} on each of {world} process(es); {images.steps} steps an epoch",
        flush=True,
    )


@flushed_denormals()
def main(argv: list[str] | None = None) -> int:
    """Returns the exit status: 2 where data, a package, a checkpoint or an argument is not as it must be."""
    args = arguments(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    return exit_code("thesis/imagenet.py", lambda: start(args), GOES_ON)


def start(args: argparse.Namespace) -> int:
    """This process's part, alone or among those of torchrun."""
    with ranks.started(args.device) as here:
        try:
            return run(args, here)
        except ranks.RankError as error:  # all ranks have it, one tells it
            if here.first:
                print(f"thesis/imagenet.py: {error}", file=sys.stderr, flush=True)
            return 2


if __name__ == "__main__":
    sys.exit(main())
