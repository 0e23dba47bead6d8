"""Compilation in a process of its own: one that crashes or hangs costs its configuration, not the run."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
from collections.abc import Iterator
from multiprocessing.connection import Connection

from artefacts import Facts, facts_of
from record import Config

LIMIT_S = 180  # for one configuration; most take less than one


def _serve(configs: list[Config], pipe: Connection) -> None:
    while True:
        try:
            index = pipe.recv()
        except EOFError:  # the parent has ended
            return
        # a cache that lasts one configuration: what is read was compiled now
        with tempfile.TemporaryDirectory(prefix="fxmask-aot-") as cache:
            os.environ["TRITON_CACHE_DIR"] = cache
            try:
                pipe.send(facts_of(configs[index]))
            except Exception as e:  # the compiler's own errors have no common class
                pipe.send(f"{type(e).__name__}: {e}")


class Worker:
    def __init__(self, configs: list[Config]) -> None:
        # forked, so that neither Triton is imported again nor a kernel pickled
        context = multiprocessing.get_context("fork")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(configs, theirs), daemon=True)
        self.process.start()
        theirs.close()

    def ask(self, index: int) -> Facts | str:
        self.pipe.send(index)
        if not self.pipe.poll(LIMIT_S):
            self.end()
            return f"still compiling after {LIMIT_S} s"
        try:
            return self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.end()
            return f"the compiler's process ended with {self.process.exitcode}"

    def end(self) -> None:
        self.pipe.close()
        self.process.join(1)
        if self.process.is_alive():
            self.process.kill()
            self.process.join()


def compile_all(configs: list[Config]) -> Iterator[tuple[Config, Facts | str]]:
    """Each configuration with its facts, or with what went wrong."""
    worker = Worker(configs)
    try:
        for index, config in enumerate(configs):
            if worker.process.exitcode is not None:
                worker = Worker(configs)
            yield config, worker.ask(index)
    finally:
        worker.end()
