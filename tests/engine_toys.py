"""Toy cells for the engines: numbers from the key alone, and cells that misbehave in every way; no model needed.

Run as a program it works off a plan of toys: the tests start it, and kill it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from mechheads.cell_store import CellStore
from mechheads.cells import CellKey, CellResult
from mechheads.engines import Block, Keep, LocalEngine, RayEngine, run_blocks

TRIALS = 5


def key(number: int) -> CellKey:
    return CellKey("toy-model", "toy-task", (f"L{number // 8}H{number % 8}",), "toy-zero")


def result(cell: CellKey, trials: int = TRIALS) -> CellResult:
    """Deterministic numbers; the first trial's second metric is undefined."""
    rng = np.random.default_rng(int(cell.digest, 16))
    rank = rng.normal(size=trials)
    rank[0] = np.nan
    ids = tuple(f"trial-{i}" for i in range(trials))
    return CellResult(ids, {"hit": rng.integers(0, 2, trials), "rank": rank}, tuple(f"answer {i}" for i in ids))


@dataclass(frozen=True)
class Orders:
    """What each cell of a block is to do; "" is to behave."""

    orders: tuple[str, ...]

    def only(self, i: int) -> Orders:
        return Orders(self.orders[i : i + 1])


@dataclass(frozen=True)
class Toys:
    """A recipe. Every cell computed is a line of the log: its digest and the process."""

    log: str
    delay: float = 0.0
    fail: str = ""
    at_once: bool = False  # keep all cells of a block at its end

    def build(self) -> ToyWorker:
        if self.fail == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.fail:
            raise ValueError(self.fail)
        return ToyWorker(self)


@dataclass
class ToyWorker:
    recipe: Toys
    kept: list[tuple[CellKey, CellResult]] = field(default_factory=list)

    def run(self, block: Block, keep: Keep) -> None:
        for cell, order in zip(block.cells, block.payload.orders, strict=True):
            with open(self.recipe.log, "a", encoding="utf-8") as log:
                log.write(f"{cell.digest} {os.getpid()}\n")
            time.sleep(self.recipe.delay)
            made = obey(order, cell)
            if made is not None:
                keep(cell, made)


def obey(order: str, cell: CellKey) -> CellResult | None:
    """A result, or one of the ways to have none."""
    what, _, value = order.partition(":")
    made = result(cell)
    if what == "nan":
        return CellResult(made.trial_ids, {name: np.full(TRIALS, np.nan) for name in made.values})
    if what == "short":
        return result(cell, TRIALS - 2)
    if what == "raise":
        raise RuntimeError(f"poison in {value}")
    if what == "memory":
        raise MemoryError("no memory for the toy")
    if what == "nothing":
        return None
    if what == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "once" and not Path(value).exists():  # dies, but the first time only
        Path(value).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "signal":  # to this process, so only where the worker runs in it
        signal.raise_signal(signal.Signals[value])
    if what == "stubborn":  # a worker that takes Ctrl-C as a wish to end early, as some loops over trials do
        try:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            return None
    if what == "delete":
        shutil.rmtree(value)
    if what == "sleep":
        time.sleep(float(value))
    return made


def plan(blocks: int, cells: int, orders: dict[int, str] | None = None) -> list[Block]:
    """Blocks of toys; ``orders`` by the number of the cell."""
    made = []
    for b in range(blocks):
        numbers = range(b * cells, (b + 1) * cells)
        payload = Orders(tuple((orders or {}).get(n, "") for n in numbers))
        made.append(Block(f"block-{b}", tuple(key(n) for n in numbers), payload, (TRIALS,) * cells))
    return made


def content(store: CellStore) -> dict[str, bytes]:
    """All that a store says, byte for byte; temporary files and locks say nothing."""
    files = [*store.path.glob("[!.]*.parquet"), *store.path.glob("failed/[!.]*")]
    return {str(file.relative_to(store.path)): file.read_bytes() for file in files}


def logged(log: Path) -> list[str]:
    """Digests of the cells computed, in order."""
    return [line.split()[0] for line in log.read_text(encoding="utf-8").splitlines()] if log.exists() else []


def workers(log: Path) -> set[int]:
    """The processes that computed them."""
    return {int(line.split()[1]) for line in log.read_text(encoding="utf-8").splitlines()} if log.exists() else set()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("log")
    parser.add_argument("--blocks", type=int, default=4)
    parser.add_argument("--cells", type=int, default=4)
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--ray", type=int, default=0)
    parser.add_argument("--order", nargs=2, action="append", default=[])
    parser.add_argument("--file-size", type=int, default=0)
    parser.add_argument("--wait", action="store_true", help="begin when a line comes")
    options = parser.parse_args()
    if options.file_size:  # as a full disk: no file may grow beyond it
        import resource

        resource.setrlimit(resource.RLIMIT_FSIZE, (options.file_size, options.file_size))
    store = CellStore(options.store)
    print("go", flush=True)
    if options.wait:
        sys.stdin.readline()
    engine = RayEngine(workers=options.ray) if options.ray else LocalEngine(processes=options.processes)
    blocks = plan(options.blocks, options.cells, {int(number): order for number, order in options.order})
    report = run_blocks(
        Toys(options.log, options.delay),
        blocks,
        store,
        engine=engine,
        on_cell=lambda cell, error: print(f"cell {cell.digest} {error or 'stored'}", flush=True),
    )
    print(f"{report.done} {report.skipped} {len(report.failed)} {report.interrupted} {report.left}", flush=True)


if __name__ == "__main__":
    main()
