"""`make aot`: compile, without a GPU, every configuration that the launchers can launch, and check what came out (checks.py). Exit status 1 where one fails.

It is a program and not a test module, because a process whose tests run Triton's interpreter cannot compile. test_aot.py runs it.
"""

from __future__ import annotations

import argparse
import sys
import time

import torch
import triton
from artefacts import Facts
from cases import enumerate_configs, kernels
from checks import SHARED_LIMIT, failures
from pool import compile_all
from record import Config

HEADER = f"{'arch':6} {'kernel':16} {'first asked for by':52} {'regs':>4} {'spills':>6} {'KiB':>5}  {'buffers':28} {'bytes':6} {'instruction':16}"


def line(config: Config, facts: Facts | str) -> str:
    head = f"sm_{config.arch:<3} {config.name.removesuffix('_kernel'):16} {config.label:52}"
    if isinstance(facts, str):
        return head
    buffers = " ".join(f"{n}x{what}" for n, what in facts.buffers) or "-"
    copies = "/".join(map(str, sorted(facts.copies))) or "-"
    return f"{head} {facts.registers:4} {facts.spills:6} {facts.shared / 1024:5.0f}  {buffers:28} {copies:6} {' '.join(facts.instructions) or '-':16}"


def chosen(args: argparse.Namespace) -> list[Config]:
    selection = "smoke" if args.smoke else "all" if args.all else "pairs"
    configs = [config for arch in args.arch for config in enumerate_configs(arch, selection)]
    return [config for config in configs if args.only in f"{config.name} {config.label}"]


def main() -> int:
    parser = argparse.ArgumentParser(prog="make aot", description=__doc__.splitlines()[0])
    parser.add_argument("--arch", type=int, nargs="+", default=[80, 90, 100], choices=sorted(SHARED_LIMIT), help="architectures, 90 for sm_90")
    parser.add_argument("--all", action="store_true", help="the whole product of the axes instead of all pairs of their values: hours")
    parser.add_argument("--only", default="", metavar="TEXT", help="configurations whose kernel or label has this text")
    parser.add_argument("--smoke", action="store_true", help="one launch of each op")
    parser.add_argument("--list", action="store_true", help="print what would be compiled")
    args = parser.parse_args()

    start = time.monotonic()
    configs = chosen(args)
    if args.list:
        print(*(line(config, "") for config in configs), sep="\n")
        return 0
    print(f"triton {triton.__version__}, torch {torch.__version__}, python {sys.version.split()[0]}\n\n{HEADER}", flush=True)
    wrong: list[str] = []
    for config, facts in compile_all(configs):
        found = [facts] if isinstance(facts, str) else failures(facts, config)
        print(line(config, facts), "FAILED" if found else "ok", flush=True)
        for what in found:
            print("       ", what.strip().replace("\n", "\n        "), flush=True)
        wrong += [config.label] if found else []
    unseen = sorted(kernels() - {config.name for config in configs}) if not args.only else []
    for name in unseen:
        print(f"FAILED: nothing in cases.py launches {name}")
    count = len(configs) + len(unseen)
    failed = len(wrong) + len(unseen)
    print(f"\n{count} configurations, {count - failed} passed, {failed} failed ({time.monotonic() - start:.0f} s)")
    return 1 if failed or not configs else 0


if __name__ == "__main__":
    sys.exit(main())
