"""Choices of a sweep are launched once before they are timed."""

import threading

import torch

from fxmask.bench import cells, precompiling
from fxmask.bench.driver import Run, run_cells

CPU = torch.device("cpu")


def by(seen, fail=False):
    """A provider of a forward that notes the threads of its calls."""

    def prepare(i):
        seen.append((i.cell.block[0], threading.get_ident()))
        if fail:
            raise ValueError("no such tile")
        return lambda: (i.x @ i.masked_weight.t(),)

    return prepare


def test_each_choice_once_and_failures_are_left(tmp_path):
    seen, broken, known, said = [], [], [], []
    registry = {"good": by(seen), "bad": by(broken, fail=True), "dense": by(known)}
    wanted = [
        cells.Cell("forward", "forward", 40, 48, 32, "fp32", (b, b), ratio, "random", 0, name) for ratio in (0.5, 0.8) for b in (16, 8) for name in registry
    ]
    run = Run(CPU, tmp_path, 100.0, 0.0, load=lambda: 0.0, say=said.append, registry=registry, csv="tiles.csv")
    assert precompiling.compile_choices(run, wanted)
    assert sorted(block for block, _ in seen) == sorted(block for block, _ in broken) == [8, 16] and not known  # one ratio; no baselines
    assert threading.get_ident() not in {thread for _, thread in seen + broken}
    assert run.time_limit < 100.0 and said[-1].startswith("compiled 2 of 4 choices in ")
    run.time_limit = None
    assert run_cells(run, [c for c in wanted if c.provider != "dense"]) == 0
    assert {(r["provider"], r["gate"], r["verdict"]) for r in run.table.rows} == {("good", "pass", "ok"), ("bad", "fail", "none: ValueError: no such tile")}
    seen.clear()
    assert precompiling.compile_choices(run, wanted) and not seen  # the csv has them
