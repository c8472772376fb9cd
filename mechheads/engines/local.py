"""Blocks on this machine: in this process, or in several that are started for it."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import dataclass

from mechheads.engines.blocks import Block, Keep, Recipe, Worker, work_on
from mechheads.engines.interrupts import Interrupts
from mechheads.engines.ledger import Ledger
from mechheads.errors import InvalidInput

PAUSES_S = (0.1, 0.2, 0.5, 1.0)  # between two looks at what other processes hold; the last one goes on


@dataclass(frozen=True)
class LocalEngine:
    """Runs blocks on this machine.

    Attributes:
        processes: 1: in this process. More: so many processes are started anew, each with a worker of its own, so
            each with the model in its memory; a script that starts them needs ``if __name__ == "__main__":``.
        threads: Threads of torch for each worker; None: its cores shared evenly among several processes, but no more
            than torch would take, and torch's own number in one process.
        retries: How often a block is tried again whose process died (killed, out of memory), before its cells are
            tried one by one.

    Raises:
        InvalidInput: If a number is not a whole one, or too small.
    """

    processes: int = 1
    threads: int | None = None
    retries: int = 2

    def __post_init__(self) -> None:
        check_whole("processes", self.processes, 1)
        check_whole("retries", self.retries, 0)
        if self.threads is not None:
            check_whole("threads", self.threads, 1)

    def run(self, recipe: Recipe, ledger: Ledger, interrupts: Interrupts) -> None:
        """Work off the ledger; returns when nothing is left to take, or after a signal."""
        if self.processes == 1:
            _run_here(recipe, ledger, interrupts, self.threads)
            return
        from mechheads.engines.crew import run_crew
        from mechheads.engines.processes import Processes

        size = min(self.processes, ledger.size)
        crew = Processes(recipe, ledger.store, threads=self.threads, cores=max(1, cores() // self.processes))
        run_crew(crew, ledger, interrupts, size=size, retries=self.retries)


def check_whole(name: str, value: object, least: int) -> None:
    """InvalidInput unless the value is a whole number of at least ``least``."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InvalidInput(f"{name} is {value!r}; it must be a whole number of at least {least}.")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def set_threads(threads: int | None, *, at_most: int | None = None) -> int | None:
    """Set torch's threads, if torch is loaded; returns how many it had, None where nothing was changed."""
    torch = sys.modules.get("torch")  # a worker without torch need not wait for its import
    if torch is None or (threads is None and at_most is None):
        return None
    before = torch.get_num_threads()
    torch.set_num_threads(threads or min(before, at_most or before))
    return before


class _Droppable:
    """A worker whose block counts as dropped after a second Ctrl-C, even if the worker made an end of it itself."""

    def __init__(self, worker: Worker, interrupts: Interrupts):
        self.worker, self.interrupts = worker, interrupts

    def run(self, block: Block, keep: Keep) -> None:
        self.worker.run(block, keep)
        if self.interrupts.dropped:
            raise KeyboardInterrupt


def _run_here(recipe: Recipe, ledger: Ledger, interrupts: Interrupts, threads: int | None) -> None:
    """One block after the other in this process; the worker is built when there is a block for it."""
    worker: Worker | None = None
    before: int | None = None
    looks = 0
    try:
        while not interrupts.asked:
            task = ledger.take()
            if task is None:
                if not ledger.elsewhere:
                    return
                time.sleep(PAUSES_S[min(looks, len(PAUSES_S) - 1)])
                looks += 1
                ledger.recall()
                continue
            looks = 0
            if worker is None:
                worker = _Droppable(recipe.build(), interrupts)
                before = set_threads(threads)
                if interrupts.asked:
                    return
            work_on(worker, task.block, task.wanted, ledger.store, tell=ledger.note, leave=lambda: interrupts.asked)
            ledger.settle(task)
    finally:
        set_threads(before)
