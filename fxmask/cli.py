"""The command `fxmask`, also `python -m fxmask`."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import torch

from .advice import command as advice
from .analysis import command as analysis
from .bench import command
from .bench.provenance import clocks, provenance
from .errors import FxMaskError
from .explaining import explain_command
from .version import __version__


def env(_: argparse.Namespace) -> int:
    """Print versions, devices and clocks: what a report of a problem should carry."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    for name, value in {**provenance(device), **clocks(device), "cuda": torch.version.cuda or "none"}.items():
        print(f"{name:14} {value or '-'}")
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="fxmask", description="Block-sparse masks for PyTorch models: analyse, explain, measure, and say what is installed.")
    p.add_argument("--version", action="version", version=f"fxmask {__version__}")
    sub = p.add_subparsers(dest="command", required=True)
    bench = sub.add_parser("bench", help="time the masked linear against dense, masked-dense and torch's block-sparse kernels")
    command.add_options(bench)
    bench.set_defaults(run=command.main)
    tables = sub.add_parser("analyze", help="FLOP and memory movement of a model, layer by layer, dense or masked, without a GPU")
    analysis.add_options(tables)
    tables.set_defaults(run=analysis.main)
    rows = sub.add_parser("explain", help="what becomes of every linear of a model: masked or not, why, target and achieved ratio")
    explain_command.add_options(rows)
    rows.set_defaults(run=explain_command.main)
    advise = sub.add_parser("advise", help="which block and ratio pay for a model on this machine, from times of its layers")
    advice.add_options(advise)
    advise.set_defaults(run=advice.main)
    sub.add_parser("env", help="print versions, devices and clocks").set_defaults(run=env)
    return p


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; 0 where all went well, 1 where a result was wrong, 2 for a request that cannot be served, 130 where it was interrupted."""
    a = parser().parse_args(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a formula has signs that not every encoding has
    try:
        code = int(a.run(a))
        if sys.stdout is not None:  # closed by whoever calls
            sys.stdout.flush()
        return code
    except FxMaskError as e:
        print(f"fxmask: {e}", file=sys.stderr)
    except BrokenPipeError:  # whoever reads has seen enough, as head does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left in the buffer would raise again at exit
    except OSError as e:
        print(f"fxmask: cannot read or write: {e}", file=sys.stderr)
    except KeyboardInterrupt:
        kept = "; the csv has every row that was measured, and the same command goes on behind it" if a.command == "bench" else ""
        print(f"fxmask: interrupted{kept}.", file=sys.stderr)
        return 130
    return 2
