"""Blocks shared out among several workers, whatever they are: processes here, or actors on a cluster."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, runtime_checkable

from mechheads.cells import CellKey
from mechheads.engines.blocks import Block, EngineError
from mechheads.engines.interrupts import Interrupts
from mechheads.engines.ledger import Ledger, Task
from mechheads.engines.local import PAUSES_S
from mechheads.errors import OutputNotWritable

# Blocks may hold cells that kill their worker; a machine on which every worker dies is another matter.
DEATHS_IN_A_ROW = 12


@dataclass(frozen=True)
class Event:
    """What a worker tells.

    Attributes:
        worker: Which one.
        kind: ``cell``: a cell is settled; ``done``: the block is; ``lost``: the worker is dead; ``unwritable``: the
            store cannot be written; ``unbuilt``: the worker could not be built.
        text: The error, or the reason; None for a cell that was stored.
        cell: The cell of a ``cell``.
        built: Whether a worker that is lost had been built.
    """

    worker: int
    kind: Literal["cell", "done", "lost", "unwritable", "unbuilt"]
    text: str | None = None
    cell: CellKey | None = None
    built: bool = True


@runtime_checkable
class Crew(Protocol):
    """Workers that can be hired, given blocks, and heard."""

    def hire(self) -> int:
        """Start a worker; returns its number. It may be given a block at once."""
        ...

    def give(self, worker: int, block: Block, wanted: Sequence[CellKey]) -> None:
        """Let a worker run a block."""
        ...

    def hear(self, timeout: float | None) -> list[Event]:
        """What happened; waits for it, at most ``timeout`` seconds. A worker that is ``lost`` is heard no more."""
        ...

    def close(self, *, drop: bool) -> None:
        """End all workers; ``drop``: at once, whatever they do."""
        ...


def run_crew(crew: Crew, ledger: Ledger, interrupts: Interrupts, *, size: int, retries: int) -> None:
    """Keep up to ``size`` workers busy until nothing is left to take; a dead worker is replaced.

    Raises:
        OutputNotWritable: If the store cannot be written; all workers are stopped then.
        EngineError: If no worker can be built, or workers die one after the other without a single cell between.
    """
    shift = _Shift(crew, ledger, size, retries)
    drop = True
    try:
        shift.work(interrupts)
        drop = False
    finally:
        crew.close(drop=drop)


class _Shift:
    """Who works on what."""

    def __init__(self, crew: Crew, ledger: Ledger, size: int, retries: int):
        self.crew, self.ledger, self.size, self.retries = crew, ledger, size, retries
        self.busy: dict[int, Task] = {}
        self.idle: list[int] = []
        self.deaths = 0

    def work(self, interrupts: Interrupts) -> None:
        looks = 0
        while True:
            if not interrupts.asked:
                self._share_out()
            if not self.busy and (interrupts.asked or not self.ledger.elsewhere):
                return
            # Signals and what other processes hold are looked at between two waits.
            pause = PAUSES_S[min(looks, len(PAUSES_S) - 1)]
            looks += 1
            if self.busy:
                events = self.crew.hear(pause)
                looks = 0 if events else looks
                for event in events:
                    self._note(event)
            else:
                time.sleep(pause)
            self.ledger.recall()

    def _share_out(self) -> None:
        while len(self.busy) < self.size:
            task = self.ledger.take()
            if task is None:
                return
            worker = self.idle.pop() if self.idle else self.crew.hire()
            self.busy[worker] = task
            self.crew.give(worker, task.block, task.wanted)

    def _note(self, event: Event) -> None:
        if event.kind == "cell":
            assert event.cell is not None
            self.deaths = 0
            self.ledger.note(event.cell, event.text)
        elif event.kind == "done":
            self.ledger.settle(self.busy.pop(event.worker))
            self.idle.append(event.worker)
        elif event.kind == "unwritable":
            raise OutputNotWritable(event.text)
        elif event.kind == "unbuilt":
            raise EngineError(f"no worker can be built: {event.text}")
        else:
            self._lose(event)

    def _lose(self, event: Event) -> None:
        self.deaths += 1
        task = self.busy.pop(event.worker, None)
        if task is None:
            self.idle.remove(event.worker)
        elif event.built and self.deaths <= DEATHS_IN_A_ROW:
            self.ledger.lost(task, event.text or "", retries=self.retries)
        elif not event.built and self.deaths <= self.retries:
            self.ledger.give_back(task)
        else:
            what = "without a single cell between" if event.built else "while they were being built"
            raise EngineError(
                f"workers died one after the other, {self.deaths} of them, {what}; the last: {event.text}. "
                "Look at the memory of the machine, then run again: what is stored is kept."
            )
