"""Workers in processes of their own on this machine, started anew (``spawn``), never forked."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

from mechheads.cell_store import CellStore
from mechheads.cells import CellKey
from mechheads.engines.blocks import Block, EngineError, Recipe, work_on
from mechheads.engines.crew import Event
from mechheads.engines.local import set_threads
from mechheads.errors import OutputNotWritable

GOODBYE_S = 5.0


@dataclass
class _Hand:
    """One process, the pipe to it, and the block it gets when it is ready."""

    process: Any
    pipe: Connection
    built: bool = False
    due: tuple[Block, tuple[CellKey, ...]] | None = None


class Processes:
    """A crew of processes; each builds its worker once and writes cells into the store itself.

    Args:
        recipe: Builds the worker.
        store: Where cells go.
        threads: Threads of torch in each; None: as many as torch takes, but at most ``cores``.
        cores: Cores for each.

    Raises:
        EngineError: If the recipe cannot be pickled.
    """

    def __init__(self, recipe: Recipe, store: CellStore, *, threads: int | None, cores: int):
        try:
            self._recipe = pickle.dumps(recipe)
        except Exception as error:
            raise EngineError(
                f"the recipe {type(recipe).__name__} cannot be sent to another process: {error}. "
                "Build it from values that pickle, in a module that can be imported, or use processes=1."
            ) from error
        self._setup = (str(store.path), threads, cores)
        self._spawn = multiprocessing.get_context("spawn")
        self._hands: dict[int, _Hand] = {}
        self._hired = 0

    def hire(self) -> int:
        """Start a process; see ``Crew``."""
        here, there = self._spawn.Pipe()
        process = self._spawn.Process(
            target=_serve, args=(there, self._recipe, *self._setup), name=f"mechheads-worker-{self._hired}", daemon=True
        )
        process.start()
        there.close()  # the worker's end is now the worker's alone, so its death closes the pipe
        self._hired += 1
        self._hands[self._hired] = _Hand(process, here)
        return self._hired

    def give(self, worker: int, block: Block, wanted: Sequence[CellKey]) -> None:
        """Send a block, now or when the worker is built: nobody reads the pipe before."""
        hand = self._hands[worker]
        hand.due = (block, tuple(wanted))
        if hand.built:
            self._send(hand)

    def _send(self, hand: _Hand) -> None:
        due, hand.due = hand.due, None
        if due is not None:
            # A broken pipe: the process is dead, and hear() says so.
            with suppress(BrokenPipeError, ConnectionResetError):
                hand.pipe.send(due)

    def hear(self, timeout: float | None) -> list[Event]:
        """What the workers tell; see ``Crew``."""
        ends: dict[Any, int] = {hand.pipe: number for number, hand in self._hands.items()}
        ends.update({hand.process.sentinel: number for number, hand in self._hands.items()})
        ready = wait(list(ends), timeout)
        return [event for number in sorted({ends[end] for end in ready}) for event in self._hear_one(number)]

    def _hear_one(self, number: int) -> list[Event]:
        hand = self._hands[number]
        events = []
        try:
            while hand.pipe.poll(0):
                kind, value, text = hand.pipe.recv()
                if kind == "built":
                    hand.built = True
                    self._send(hand)
                else:
                    events.append(Event(number, kind, text, cell=value))
        except (EOFError, ConnectionResetError):
            hand.process.join(GOODBYE_S)
        if not hand.process.is_alive():
            events.append(Event(number, "lost", _how(hand.process.exitcode), built=hand.built))
            self._discard(number)
        return events

    def _discard(self, number: int) -> None:
        hand = self._hands.pop(number)
        hand.pipe.close()
        hand.process.join()
        hand.process.close()

    def close(self, *, drop: bool) -> None:
        """End the processes; see ``Crew``. None of them is left when this returns."""
        for hand in self._hands.values():
            if drop:
                hand.process.kill()
            hand.pipe.close()  # a worker that waits for a block takes this as its end
        for hand in self._hands.values():
            hand.process.join(GOODBYE_S)
            if hand.process.is_alive():
                hand.process.kill()
                hand.process.join()
            hand.process.close()
        self._hands.clear()


def _how(code: int | None) -> str:
    """How a process ended, in words."""
    if code is not None and code < 0:
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (the system does so when memory runs out)" if name == "SIGKILL" else ""
        return f"its process was ended by {name}{hint}"
    return f"its process ended with exit code {code}; what it said last is on standard error"


def _serve(pipe: Connection, recipe: bytes, path: str, threads: int | None, cores: int) -> None:
    """A worker process: build, then run the blocks that come, until the pipe closes or the parent is gone."""
    # The parent hears of signals and tells the workers; a Ctrl-C reaches all processes of a terminal.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()
    try:
        worker = pickle.loads(recipe).build()
        set_threads(threads, at_most=cores)
        store = CellStore(path, create=False)
    except Exception as error:
        pipe.send(("unbuilt", None, f"{type(error).__name__}: {error}"))
        return
    pipe.send(("built", None, None))
    while True:
        try:
            block, wanted = pipe.recv()
        except EOFError:
            return
        try:
            work_on(worker, block, wanted, store, tell=lambda cell, error: pipe.send(("cell", cell, error)))
            pipe.send(("done", None, None))
        except OutputNotWritable as error:
            pipe.send(("unwritable", None, str(error)))
            return


def _end_with(sentinel: int) -> None:
    """End this process at once when its parent does, in the middle of a block too: nobody waits for it any more."""
    wait([sentinel])
    os._exit(1)
