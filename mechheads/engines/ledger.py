"""The books of one run: which cells are open, which blocks are in hand here or elsewhere, what came of them."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from mechheads.cell_store import CellStore, Claim
from mechheads.cells import CellFailure, CellKey
from mechheads.engines.blocks import Block, EngineReport
from mechheads.errors import InvalidInput

OnCell = Callable[[CellKey, "str | None"], None]


@dataclass
class Task:
    """A block in hand.

    Attributes:
        block: The block, or a part of it.
        wanted: Its cells that are not stored yet.
        claimed: Name of the block whose claim covers it.
        deaths: How many workers died on it.
    """

    block: Block
    wanted: tuple[CellKey, ...]
    claimed: str
    deaths: int = 0


@dataclass
class _Held:
    """A claim, its block, and how many tasks it still covers."""

    claim: Claim
    block: Block
    covered: int = 1


class Ledger:
    """What is to be done, and what was. One for each run; it alone claims blocks and counts cells.

    Args:
        blocks: All blocks of the run.
        store: Where the cells go.

    Attributes:
        tell: Told each cell as it is settled here or elsewhere: None, or the error it failed with.
        open: The cells that are not settled.

    Raises:
        InvalidInput: If two blocks have one name.
    """

    def __init__(self, blocks: Sequence[Block], store: CellStore):
        names = [block.name for block in blocks]
        if len(set(names)) < len(names):
            twice = next(name for i, name in enumerate(names) if name in names[:i])
            raise InvalidInput(f"two blocks are named {twice!r}; give each a name of its own.")
        self.store = store
        self.tell: OnCell = lambda cell, error: None
        cells = dict.fromkeys(cell for block in blocks for cell in block.cells)
        self.open = dict.fromkeys(store.missing(cells))
        self._total, self._done = len(cells), 0
        self._failed: dict[CellKey, str] = {}
        # A failure recorded after this moment by another process is not tried again in this run.
        self._old_failures = {cell: store.failure_time(cell) for cell in self.open}
        self._waiting = deque(block for block in blocks if any(cell in self.open for cell in block.cells))
        self._put_off: deque[Block] = deque()
        self._again: deque[Task] = deque()
        self._held: dict[str, _Held] = {}

    @property
    def size(self) -> int:
        """How many blocks have something missing, and nobody here has begun them."""
        return len(self._waiting) + len(self._put_off) + len(self._again)

    @property
    def elsewhere(self) -> bool:
        """Whether all that remains to be taken is claimed by other processes."""
        return bool(self._put_off) and not self._waiting and not self._again

    def take(self) -> Task | None:
        """The next block that nobody else works on, claimed; None if there is none at the moment."""
        if self._again:
            task = self._again.popleft()
            task.wanted = self._still_open(task.wanted)
            if task.wanted:
                return task
            self.settle(task)
            return self.take()
        while self._waiting:
            block = self._waiting.popleft()
            if not any(cell in self.open for cell in block.cells):
                continue
            claim = self.store.claim(block.name)
            if claim is None:
                self._put_off.append(block)
                continue
            wanted = self._still_open(block.cells)
            if wanted:
                self._held[block.name] = _Held(claim, block)
                return Task(block, wanted, block.name)
            claim.release()
        return None

    def recall(self) -> None:
        """Look again at the blocks that were claimed elsewhere."""
        self._waiting.extend(self._put_off)
        self._put_off.clear()

    def _still_open(self, cells: Sequence[CellKey]) -> tuple[CellKey, ...]:
        """Those of the cells that nobody has settled meanwhile."""
        for cell in cells:
            if cell not in self.open:
                continue
            if self.store.intact(cell):
                self._settle_cell(cell, None)
            elif self.store.failure_time(cell) != self._old_failures[cell]:
                failure = self.store.failure(cell)
                if failure is not None:
                    self._failed[cell] = str(failure)
                    self._settle_cell(cell, str(failure))
        return tuple(cell for cell in cells if cell in self.open)

    def note(self, cell: CellKey, error: str | None) -> None:
        """A cell was stored here (None) or failed here."""
        if cell not in self.open:
            return
        if error is None:
            self._done += 1
        else:
            self._failed[cell] = error
        self._settle_cell(cell, error)

    def _settle_cell(self, cell: CellKey, error: str | None) -> None:
        del self.open[cell]
        self.tell(cell, error)

    def settle(self, task: Task) -> None:
        """A task is finished; its claim ends with the last task that it covers."""
        held = self._held[task.claimed]
        held.covered -= 1
        if held.covered == 0:
            del self._held[task.claimed]
            held.claim.release()

    def give_back(self, task: Task) -> None:
        """Let somebody else take a task that was never begun."""
        self._again.append(task)

    def lost(self, task: Task, reason: str, *, retries: int) -> None:
        """A worker died on a task: try it again, then cell by cell, and at last record what kills workers."""
        task.deaths += 1
        self._gather(task.wanted)
        task.wanted = self._still_open(task.wanted)
        if task.deaths <= retries:
            self._again.append(task)
            return
        if len(task.block.cells) > 1:
            parts = [part for part in task.block.split() if part.cells[0] in task.wanted]
            self._again.extend(Task(part, part.cells, task.claimed, task.deaths - 1) for part in parts)
            self._held[task.claimed].covered += len(parts)
        else:
            times = f"{task.deaths} times in a row" if task.deaths > 1 else "once"
            for cell in task.wanted:
                failure = CellFailure(cell, "WorkerLost", f"the worker died on this cell, {times}: {reason}")
                self.store.put_failure(failure)
                self.note(cell, str(failure))
        self.settle(task)

    def close(self) -> None:
        """Give every claim back."""
        for held in self._held.values():
            self._gather(held.block.cells)
            held.claim.release()
        self._held.clear()

    def _gather(self, cells: Sequence[CellKey]) -> None:
        """Note what our workers stored before they died or were dropped, and could not tell any more."""
        for cell in cells:
            if cell in self.open and self.store.intact(cell):
                self.note(cell, None)

    def report(self, *, interrupted: bool) -> EngineReport:
        """What came of the run so far."""
        skipped = self._total - self._done - len(self._failed) - len(self.open)
        return EngineReport(self._done, skipped, tuple(self._failed.items()), interrupted, len(self.open))
