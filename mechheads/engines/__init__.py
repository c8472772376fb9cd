"""Engines: the same blocks of cells, here, in several processes, or on a Ray cluster, to the same bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from mechheads.cell_store import CellStore
from mechheads.cells import CellKey
from mechheads.engines.blocks import Block, EngineError, EngineReport, Keep, Recipe, Worker
from mechheads.engines.interrupts import Interrupts
from mechheads.engines.ledger import Ledger
from mechheads.engines.local import LocalEngine
from mechheads.engines.ray import RayEngine
from mechheads.errors import OutputNotWritable
from mechheads.progress import progress_bar

__all__ = [
    "Block",
    "EngineError",
    "EngineReport",
    "Keep",
    "LocalEngine",
    "RayEngine",
    "Recipe",
    "Worker",
    "run_blocks",
]


def run_blocks(
    recipe: Recipe,
    blocks: Iterable[Block],
    store: CellStore,
    *,
    engine: LocalEngine | RayEngine | None = None,
    progress: bool | None = None,
    on_cell: Callable[[CellKey, str | None], None] | None = None,
) -> EngineReport:
    """Compute what is missing of the blocks' cells, and store each as soon as it is there.

    A block with nothing missing is skipped; one with anything missing runs whole. A block that another process works
    on is put off, and looked at again at the end. Cells that fail are recorded in the store and tried again by the
    next run. The first Ctrl-C or SIGTERM lets the blocks in hand finish, the second drops them; either way the report
    says ``interrupted`` and what is stored stays.

    Args:
        recipe: Builds a worker; not called if nothing is missing.
        blocks: The blocks. Equal ones on every run and every machine that shares the store.
        store: Where the cells go.
        engine: Where the blocks run; None: in this process.
        progress: Show a bar over cells (None: only on a terminal).
        on_cell: Called here with each cell as it is settled, and None or the error it failed with.

    Returns:
        What was done, and what was not.

    Raises:
        InvalidInput: If two blocks have one name.
        OutputNotWritable: If the store cannot be written, before anything is computed or later;
            ``error.partial["report"]`` then says how far the run came.
        EngineError: If workers cannot be built or keep dying; ``partial`` likewise.
    """
    engine = LocalEngine() if engine is None else engine
    ledger = Ledger(tuple(blocks), store)
    if not ledger.open:
        return ledger.report(interrupted=False)
    store.check_writable()
    store.clean()
    with progress_bar("cells", len(ledger.open), show=progress) as advance, Interrupts() as interrupts:

        def tell(cell: CellKey, error: str | None) -> None:
            advance(1)
            if on_cell is not None:
                on_cell(cell, error)

        ledger.tell = tell
        try:
            engine.run(recipe, ledger, interrupts)
        except KeyboardInterrupt:
            interrupts.asked = True
        except (OutputNotWritable, EngineError) as error:
            ledger.close()
            error.partial = {"report": ledger.report(interrupted=interrupts.asked)}
            raise
        finally:
            ledger.close()
    return ledger.report(interrupted=interrupts.asked)
