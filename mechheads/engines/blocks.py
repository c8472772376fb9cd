"""What an engine is given and what it gives back: blocks of cells, the recipe of a worker, a report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, runtime_checkable

from mechheads.cells import CellFailure, CellKey, CellResult
from mechheads.errors import InvalidInput, MechheadsError

Keep = Callable[[CellKey, CellResult], None]


class EngineError(MechheadsError, RuntimeError):
    """The engine itself cannot go on: no worker can be built, or every one of them dies."""


@dataclass(frozen=True)
class Block:
    """Cells that run together. Made by the plan alone, so that a rerun makes the same ones.

    Attributes:
        name: Names the block among all blocks of a store; the claim on it goes by this name.
        cells: The cells, each once.
        payload: What the worker needs to know, picklable. ``payload.only(i)`` must give that of the i-th cell alone.
        trials: How many trials each cell's result must have, in the order of ``cells``; empty: not checked.

    Raises:
        InvalidInput: If there is no name or no cell, a cell stands twice, or ``trials`` is of another length.
    """

    name: str
    cells: tuple[CellKey, ...]
    payload: Any = None
    trials: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "cells", tuple(self.cells))
        object.__setattr__(self, "trials", tuple(self.trials))
        if not self.name or not self.cells or len(set(self.cells)) < len(self.cells):
            raise InvalidInput(
                f"block {self.name!r} has {len(self.cells)} cells, {len(set(self.cells))} of them different; "
                "give it a name and at least one cell, each once."
            )
        if self.trials and len(self.trials) != len(self.cells):
            raise InvalidInput(
                f"block {self.name!r} has {len(self.cells)} cells and {len(self.trials)} numbers of trials; "
                "give one a cell, or none."
            )

    def split(self) -> tuple[Block, ...]:
        """One block for each cell, in their order; a block of one cell gives itself."""
        if len(self.cells) == 1:
            return (self,)
        return tuple(
            replace(
                self,
                name=f"{self.name}/{i}",
                cells=(cell,),
                payload=None if self.payload is None else self.payload.only(i),
                trials=self.trials[i : i + 1],
            )
            for i, cell in enumerate(self.cells)
        )


@runtime_checkable
class Worker(Protocol):
    """Computes blocks, one after the other."""

    def run(self, block: Block, keep: Keep) -> None:
        """Compute every cell of the block and hand each to ``keep``, in any order.

        The same block must give the same results wherever it runs. An error costs the cells not yet kept; they are
        then tried one by one.
        """
        ...


@runtime_checkable
class Recipe(Protocol):
    """Builds the worker where it will work; picklable, so that it can get there."""

    def build(self) -> Worker:
        """The worker, its model loaded."""
        ...


@dataclass(frozen=True)
class EngineReport:
    """What came of a run.

    Attributes:
        done: Cells that this run computed and stored.
        skipped: Cells that were stored before, or meanwhile by another process.
        failed: Cells that failed, each with its error; the store has the tracebacks.
        interrupted: Whether Ctrl-C or SIGTERM came.
        left: Cells neither stored nor failed.
    """

    done: int = 0
    skipped: int = 0
    failed: tuple[tuple[CellKey, str], ...] = ()
    interrupted: bool = False
    left: int = 0

    def __str__(self) -> str:
        text = f"{self.done} cells computed, {self.skipped} there already, {len(self.failed)} failed, {self.left} left"
        if self.failed:
            text += f"; first failure: {self.failed[0][0]}: {self.failed[0][1]}"
        return text + ("; interrupted: run again to go on" if self.interrupted else "")


@runtime_checkable
class Sink(Protocol):
    """Where results go: a ``CellStore``, or a list that travels to one."""

    def put(self, key: CellKey, result: CellResult) -> Any: ...  # noqa: D102
    def put_failure(self, failure: CellFailure) -> Any: ...  # noqa: D102


def work_on(
    worker: Worker,
    block: Block,
    wanted: Sequence[CellKey],
    sink: Sink,
    *,
    tell: Callable[[CellKey, str | None], None],
    leave: Callable[[], bool] = lambda: False,
) -> None:
    """Run a block whole, then one by one the cells that it brought no sound result for.

    A result that is undefined from end to end, or has the wrong number of trials, is no sound one: its cell is tried
    alone, and recorded as failed if it is the same there.

    Args:
        worker: The worker.
        block: All of the block, so that batches are those of a run that was never stopped.
        wanted: The cells of it that are not stored yet; the others are computed along and not stored again.
        sink: Where results and failures go.
        tell: Told each wanted cell that was stored (None) or failed (its error).
        leave: Asked before each cell that runs alone; True leaves the rest.

    Raises:
        OutputNotWritable: If the sink cannot take a result: nothing computed after that would be kept.
    """
    open_cells = dict.fromkeys(wanted)
    problem = _run(worker, block, open_cells, sink, tell)
    single = len(block.cells) == 1
    for part in block.split():
        cell = part.cells[0]
        if cell not in open_cells:
            continue
        if not single:
            if leave():
                return
            problem = _run(worker, part, open_cells, sink, tell)
        if cell in open_cells:
            assert problem is not None  # _run gives one where a cell is still open
            failure = replace(problem, key=cell)
            sink.put_failure(failure)
            del open_cells[cell]
            tell(cell, str(failure))


def _run(
    worker: Worker,
    block: Block,
    open_cells: dict[CellKey, None],
    sink: Sink,
    tell: Callable[[CellKey, str | None], None],
) -> CellFailure | None:
    """Run a block; cells stored leave ``open_cells``. Returns what explains why one of its cells is still in it.

    The record of an error and not the error, which would hold on to the tensors of the frames it came through.
    """
    broken: list[BaseException] = []
    problems: list[CellFailure] = []

    def keep(cell: CellKey, result: CellResult) -> None:
        try:
            _check(block, cell, result)
        except InvalidInput as error:
            problems.append(
                CellFailure.of(cell, error)
            )  # the other cells of the block may be sound, so the worker goes on
            return
        if cell not in open_cells:
            return
        try:
            sink.put(cell, result)
            del open_cells[cell]
            tell(cell, None)
        except BaseException as error:
            broken.append(error)  # ours, not the worker's: it must get through, whatever the worker does with it
            raise

    try:
        worker.run(block, keep)
    except Exception as error:
        problems.insert(0, CellFailure.of(block.cells[0], error))
    if broken:
        raise broken[0]
    if not problems:
        gone = InvalidInput(f"the worker came back from block {block.name!r} without a result for the cell.")
        problems.append(CellFailure.of(block.cells[0], gone))
    return problems[0] if any(cell in open_cells for cell in block.cells) else None


def _check(block: Block, cell: CellKey, result: CellResult) -> None:
    """InvalidInput if a worker hands over what cannot be the result of the cell."""
    if cell not in block.cells:
        raise InvalidInput(f"the worker kept {cell}, which is not in block {block.name!r}.")
    if not isinstance(result, CellResult):
        raise InvalidInput(f"the worker kept a {type(result).__name__} for the cell; it must be a CellResult.")
    expected = block.trials[block.cells.index(cell)] if block.trials else len(result.trial_ids)
    if len(result.trial_ids) != expected:
        raise InvalidInput(f"the result has {len(result.trial_ids)} trials, but the task has {expected}.")
    if result.undefined:
        raise InvalidInput(f"every value of the cell is NaN ({', '.join(result.values)}), so it measured nothing.")
