"""A planned sweep, run: blocks on an engine, cells in a store, tables put together from what is there."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mechheads.cell_runs import CellNames, CellRecipe, blocks_of
from mechheads.cell_store import CellStore
from mechheads.engines import EngineReport, LocalEngine, RayEngine, run_blocks
from mechheads.errors import InvalidInput, MechheadsError
from mechheads.head_set_runs import RunLimits
from mechheads.interventions import Intervention
from mechheads.model import Model
from mechheads.sweep_plan import SweepPlan, assemble
from mechheads.tasks import Task

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class SweepRun:
    """What came of a plan.

    Attributes:
        tables: A table in the columns of ``SweepResult`` by label, of the cells that are there.
        report: How many cells were done, skipped, failed and left.
    """

    tables: Mapping[str, pd.DataFrame]
    report: EngineReport

    @property
    def complete(self) -> bool:
        """Whether every cell of the plan is in the tables."""
        return not self.report.failed and not self.report.left


def run_plan(
    model: Model,
    made: SweepPlan,
    tasks: Mapping[str, Task],
    interventions: Mapping[str, Intervention],
    *,
    store: CellStore | None = None,
    engine: LocalEngine | RayEngine | None = None,
    limits: RunLimits | None = None,
    heads_per_block: int = 16,
    progress: bool | None = None,
) -> SweepRun:
    """Compute what is missing of a plan, and put its tables together.

    Args:
        model: The model.
        made: The plan.
        tasks: Tasks by the names the plan has.
        interventions: Interventions by the labels the plan has, without heads.
        store: Where cells are kept; None keeps them until this call returns.
        engine: Where they run; None: in this process.
        limits: How much is run at once; changes nothing beyond rounding.
        heads_per_block: Most runs of a block, whose prompts are prefilled once for all of them.
        progress: Show a bar (None: only on a terminal).

    Raises:
        InvalidInput: If there are hooks on the model, or the engine needs a model it can load.
        MechheadsError: If not one cell could be computed; with the first one's error.
        OutputNotWritable: If the store cannot be written; what is in it stays.
    """
    engine = LocalEngine() if engine is None else engine
    here = isinstance(engine, LocalEngine) and engine.processes == 1
    if model.backend.hooked():
        raise InvalidInput(
            "there are hooks on the model (an intervention in force, perhaps), which no cell's name remembers; take "
            "them off first."
        )
    described = model.describe()
    names = CellNames.of(described, tasks, interventions, made.interventions)
    recipe = CellRecipe(
        model if here else model.spec.name,
        dict(tasks),
        dict(interventions),
        {} if here else {"dtype": model.spec.dtype, "revision": model.spec.revision},
        limits or RunLimits(),
        None if here else names.model,
    )
    blocks = blocks_of(made, names, heads_per_block=heads_per_block)
    with _store(store) as cells:
        report = run_blocks(recipe, blocks, cells, engine=engine, progress=progress)
        keys = {work: names.key(work) for work in made.works}
        found = {work: result for work, key in keys.items() if (result := cells.get(key)) is not None}
    if not found:
        if report.interrupted:
            raise KeyboardInterrupt  # nothing to keep, so it is an ordinary Ctrl-C
        first = report.failed[0] if report.failed else (None, "no cell was computed")
        raise MechheadsError(f"not one of {len(keys)} cells could be computed; the first: {first[1]}")
    return SweepRun(assemble(made, found, allow_missing=len(found) < len(made.works)), report)


@contextmanager
def _store(store: CellStore | None) -> Iterator[CellStore]:
    """The store, or one that is gone afterwards."""
    if store is not None:
        yield store
        return
    with tempfile.TemporaryDirectory(prefix="mechheads-cells-") as folder:
        yield CellStore(Path(folder))
