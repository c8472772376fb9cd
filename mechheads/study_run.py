"""A study, run: heads ranked, cells computed where they are missing, statistics, and one page."""

from __future__ import annotations

import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mechheads.analysis import CircuitAnalysis
from mechheads.cell_runs import CellNames, CellRecipe, blocks_of
from mechheads.cell_store import CellStore
from mechheads.demo import write_json
from mechheads.engines import Block, EngineReport, LocalEngine, RayEngine, run_blocks
from mechheads.errors import InvalidInput
from mechheads.head_set_runs import RunLimits
from mechheads.interventions import Intervention
from mechheads.interventions.applying import prepared_on
from mechheads.model import Model, load
from mechheads.result_files import write_atomically
from mechheads.study import Study
from mechheads.study_page import write_study_page
from mechheads.study_parts import Prepared, Say, Scored, prepare_study
from mechheads.study_status import (
    CELLS,
    PAGE,
    SCORES,
    STUDY,
    SUMMARY,
    SWEEP,
    PlannedBlock,
    PlannedRun,
    write_plan,
)
from mechheads.study_summary import StudyStats, measure, summarise
from mechheads.sweep import sweep_results
from mechheads.sweep_plan import SweepPlan
from mechheads.sweep_run import run_plan
from mechheads.sweep_set import SweepSet

Engine = LocalEngine | RayEngine


@dataclass(frozen=True)
class Estimate:
    """How long the cells take that are missing, from blocks that were run and timed.

    Attributes:
        seconds_per_row: Seconds a row (a trial in a run) took, by task.
        seconds: Seconds that the rest takes.
        rows: Rows that are left.
        workers: Workers that were taken to share them evenly.
    """

    seconds_per_row: Mapping[str, float]
    seconds: float
    rows: int
    workers: int

    def __str__(self) -> str:
        each = ", ".join(f"{task} {1000 * s:.3g} ms" for task, s in self.seconds_per_row.items())
        shared = f", shared by {self.workers} workers" if self.workers > 1 else ""
        return f"measured for a row: {each}; the {self.rows:,} rows left take about {duration(self.seconds)}{shared}"


@dataclass(frozen=True, eq=False)
class StudyResult:
    """What a study found, and where it lies.

    Attributes:
        study: The study as it was run.
        plan: Its cells.
        sweep_set: Results by label; None if only the plan was asked for.
        report: Cells done, skipped, failed and left; None likewise.
        scores: What ranked the heads, by ranking.
        folder: Where everything lies.
        estimate: How long the rest was expected to take; None if nothing was missing, or it could not be measured.
        stats: Statistics; None if only the plan was asked for, or the run was interrupted.
        summary: The numbers, JSON-ready; empty likewise.
    """

    study: Study
    plan: SweepPlan
    sweep_set: SweepSet | None
    report: EngineReport | None
    scores: Mapping[str, Scored]
    folder: Path
    estimate: Estimate | None = None
    stats: StudyStats | None = None
    summary: Mapping[str, Any] = field(default_factory=dict)

    @property
    def complete(self) -> bool:
        """Whether every cell is there."""
        return self.report is not None and not self.report.failed and not self.report.left

    @property
    def page(self) -> Path | None:
        """The page, if it was written."""
        return self.folder / PAGE if self.stats is not None else None


def run_study(
    study: Study,
    *,
    model: Model | None = None,
    store: str | Path | None = None,
    engine: Engine | None = None,
    say: Say = lambda text: None,
    progress: bool | None = None,
    plan_only: bool = False,
    commands: Sequence[str] = (),
) -> StudyResult:
    """Run what is missing of a study, and write down what it says.

    In the folder: ``scores/`` and ``cells/``, both found again by what they are results of; ``plan.json``; ``sweep/``
    (a ``SweepSet``), ``summary.json``, ``study.yaml`` (every default filled in) and ``study.html``, written at the end.
    A run that was stopped anywhere, even killed, goes on where it was when it is started again.

    Before the bulk of the work one block of each task is run and timed, and what is left is extrapolated from it; the
    timed cells are kept like any others.

    Args:
        study: The study (``load_study``).
        model: The model, if it is loaded already; else the study's is loaded.
        store: Folder of results; the study's if None.
        engine: Where cells run; the study's if None.
        say: Told what is going on.
        progress: Show bars (None: only on a terminal).
        plan_only: Rank the heads, plan, time a block of each task, and stop there.
        commands: How to repeat it, for the page; one that reads ``study.yaml`` if empty.

    The first Ctrl-C lets the block in hand finish and keeps it; sweep and page are not written then
    (``result.report.interrupted``). Cells that failed are left out of both and named there, and tried again by the
    next run.

    Raises:
        InvalidInput: If the study does not fit the model, or there are hooks on it.
        OutputNotWritable: If the folder cannot be written, before anything is run.
        MechheadsError: If not one cell could be computed; with the first one's error.
        KeyboardInterrupt: If it was interrupted before there was a cell to keep.
    """
    started = time.monotonic()
    folder = Path(store if store is not None else study.store)
    cells = CellStore(folder / CELLS)
    cells.check_writable()
    model = _load(study) if model is None else model
    if model.backend.hooked():
        raise InvalidInput("there are hooks on the model, which no store remembers; take them off.")
    study = _as_run(study, model, folder)
    ready = prepare_study(study, CircuitAnalysis(model, store=folder / SCORES, progress=progress), say)
    engine = engine_of(study) if engine is None else engine
    work = _Work(study, model, ready, cells, engine)
    write_plan(folder, study.name, model.spec.name, work.planned())
    _write_text(folder / STUDY, study.resolved())
    say(ready.plan.describe(heads_per_block=study.heads_per_block))
    estimate = work.estimate(say)
    if plan_only:
        return StudyResult(study, ready.plan, None, None, ready.scores, folder, estimate)
    run = run_plan(
        model, ready.plan, ready.tasks, work.interventions, store=cells, engine=engine, limits=work.limits,
        heads_per_block=study.heads_per_block, progress=progress,
    )  # fmt: skip
    report = replace(run.report, done=run.report.done + work.done, skipped=run.report.skipped - work.done)
    results = sweep_results(
        model, ready.plan, run, ready.heads, ready.tasks, ready.interventions, ready.random, ready.caveats
    )
    described = {"study": study.to_dict(), "model": model.describe(), "complete": run.complete}
    sweep_set = SweepSet(results, {**described, "notes": list(ready.notes), "caveats": list(ready.caveats)})
    done = StudyResult(study, ready.plan, sweep_set, report, ready.scores, folder, estimate)
    if report.interrupted:
        return done
    say("statistics and page")
    stats = measure(study, sweep_set, ready.tasks)
    summary = summarise(study, ready, model.describe(), report, stats, seconds=time.monotonic() - started)
    sweep_set.save(folder / SWEEP)
    shown = list(commands) or [shlex.join(["mechheads", "sweep", str(folder / STUDY), "--store", str(folder)])]
    write_study_page(folder / PAGE, study, ready, sweep_set, report, stats, summary, shown)
    write_json(folder / SUMMARY, summary)
    return replace(done, stats=stats, summary=summary)


def engine_of(study: Study) -> Engine:
    """The engine that a study names."""
    part = study.engine
    if part.kind == "local":
        return LocalEngine(part.processes, part.threads)
    return RayEngine(
        part.workers, part.address, num_cpus=part.threads or 1, num_gpus=part.num_gpus, retries=part.retries
    )


def limits_of(study: Study) -> RunLimits:
    """How much a study lets run at once."""
    memory = study.batch.memory_gb
    return RunLimits(study.batch.rows) if memory is None else RunLimits(study.batch.rows, int(memory * 1e9))


def duration(seconds: int | float) -> str:
    """Seconds in the unit that reads well."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def _load(study: Study) -> Model:
    part = study.model
    return load(
        part.name, revision=part.revision, dtype=part.dtype, device=part.device, n_devices=part.n_devices
    )  # fmt: skip


def _as_run(study: Study, model: Model, folder: Path) -> Study:
    """The study with the model and the folder that it is run with."""
    named = study.model
    if model.spec.name != named.name:
        named = named.model_copy(update={"name": model.spec.name, "revision": model.spec.revision})
    return study.model_copy(update={"model": named, "store": str(folder)})


def _write_text(path: Path, text: str) -> None:
    write_atomically(path, lambda target: _written(target, text))


def _written(path: Path, text: str) -> None:
    path.write_bytes(text.encode())


class _Work:
    """The blocks of a study, and how long they take.

    Attributes:
        interventions: What is done; with its means, once they were taken in the process that uses them.
        done: Cells that were computed while blocks were timed.
    """

    def __init__(self, study: Study, model: Model, ready: Prepared, cells: CellStore, engine: Engine):
        self.model, self.ready, self.cells, self.engine = model, ready, cells, engine
        self.limits = limits_of(study)
        self.names = CellNames.of(model.describe(), ready.tasks, ready.interventions, ready.plan.interventions)
        self.blocks = blocks_of(ready.plan, self.names, heads_per_block=study.heads_per_block)
        self.interventions = ready.interventions
        self.done = 0

    def planned(self) -> list[PlannedBlock]:
        """The blocks as they are written down."""
        return [
            PlannedBlock(
                block.name,
                tuple(
                    PlannedRun(cell, work.task, work.intervention)
                    for cell, work in zip(block.cells, block.payload.works, strict=True)
                ),
            )
            for block in self.blocks
        ]

    def estimate(self, say: Say) -> Estimate | None:
        """Time a block of each task, and say how long the rest takes.

        The block is run here, whatever the engine. It is the middle one of the largest: blocks are sorted by the first
        layer that their sets touch, so that the first are the dearest. None if there is little more than that to do.

        Raises:
            KeyboardInterrupt: If a signal came; what was computed is kept.
        """
        missing = set(self.cells.missing(cell for block in self.blocks for cell in block.cells))
        left = [block for block in self.blocks if missing & set(block.cells)]
        tasks = {task: [b for b in left if b.payload.works[0].task == task] for task in self.ready.tasks}
        if len(left) < 2 * sum(map(bool, tasks.values())) or not left:
            return None
        say(f"timing a block of each task ({len(left)} blocks are to be run)")
        recipe = self._here()
        each: dict[str, float] = {}
        for task, blocks in tasks.items():
            most = max((len(b.cells) for b in blocks), default=0)
            whole = [b for b in blocks if len(b.cells) == most]
            block = next((b for b in whole[len(whole) // 2 :] if self._free(b)), None)
            if block is None:
                continue
            seconds, report = self._timed(recipe, block)
            self.done += report.done
            if report.interrupted:
                raise KeyboardInterrupt
            left.remove(block)
            if report.done and not report.failed:
                each[task] = seconds / sum(block.trials)
        if not each:
            return None
        works = {work for block in left for work in block.payload.works}
        mine = replace(self.ready.plan, cells=tuple(c for c in self.ready.plan.cells if c.work in works))
        count = mine.count().rows_by_task
        shown = {task: each.get(task, max(each.values())) for task in mine.tasks}
        workers = getattr(self.engine, "workers", 0) or getattr(self.engine, "processes", 1)
        found = Estimate(each, mine.estimate(shown, workers=workers) if works else 0.0, sum(count.values()), workers)
        say(str(found))
        return found

    def _here(self) -> CellRecipe:
        """The recipe in this process, its means taken, so that they are not timed."""
        prepared: dict[str, Intervention] = {
            label: prepared_on(self.model, one) for label, one in self.ready.interventions.items()
        }
        if isinstance(self.engine, LocalEngine) and self.engine.processes == 1:
            # The run that follows is in this process too, and need not take them again.
            self.interventions = prepared
        return CellRecipe(self.model, dict(self.ready.tasks), prepared, limits=self.limits)

    def _free(self, block: Block) -> bool:
        """Whether no other process works on a block."""
        claim = self.cells.claim(block.name)
        if claim is not None:
            claim.release()
        return claim is not None

    def _timed(self, recipe: CellRecipe, block: Block) -> tuple[float, EngineReport]:
        """Run one block; seconds and report."""
        threads = self.engine.threads if isinstance(self.engine, LocalEngine) else None
        begun = time.perf_counter()
        report = run_blocks(recipe, [block], self.cells, engine=LocalEngine(threads=threads), progress=False)
        return time.perf_counter() - begun, report
