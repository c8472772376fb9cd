"""The plan of a sweep: every cell, the work behind them with nothing twice, and the table put together again.

A *cell* is a name: (ranking, draw, k) under an intervention on a task. What is run for it is a ``Work``: a head set,
ablated in some way, on a task. Many cells may rest on one work; each work is run once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import TYPE_CHECKING, Any

from mechheads.cells import CellResult
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.stats import check_count
from mechheads.study_fields import BASELINE, BOTTOM, NEAREST_ZERO, RANDOM
from mechheads.study_model import Study
from mechheads.sweep_cells import COLUMNS
from mechheads.sweep_controls import RandomHeads
from mechheads.sweep_set import KEPT_SUFFIX
from mechheads.sweep_sets import Controls, NamedSet, Ranked, Threshold, named_sets

if TYPE_CHECKING:
    import pandas as pd

SIDES = ("ablated", "kept")
BEYOND = ("refuse", "drop")


@dataclass(frozen=True)
class Work:
    """What is run once: a head set ablated on a task.

    Attributes:
        task: Name of the task.
        heads: The heads that are ablated, in order of (layer, head).
        intervention: Label of the intervention; ``"none"`` for no heads.
        seed: Its seed; 0 for no heads.
    """

    task: str
    heads: HeadSet
    intervention: str
    seed: int

    @property
    def first_layer(self) -> int | None:
        """The lowest layer that is touched; below it everything is as in the clean run. None for no heads."""
        return self.heads[0].layer if len(self.heads) else None


@dataclass(frozen=True)
class PlannedCell:
    """One cell of the results.

    Attributes:
        ranking: Where the set comes from; ``"none"`` is the run without ablation.
        draw: Number of the random draw and the intervention's seed: ``draw * n_seeds + seed's place``.
        k: Heads of the set.
        heads: The set, best first: ablated, or kept.
        side: ``"ablated"``, or ``"kept"``: all heads but the set are ablated.
        intervention: Label of the intervention.
        seed: Its seed.
        work: What it rests on.
    """

    ranking: str
    draw: int
    k: int
    heads: HeadSet
    side: str
    intervention: str
    seed: int
    work: Work

    @property
    def task(self) -> str:
        """Name of the task."""
        return self.work.task

    @property
    def label(self) -> str:
        """The label of its table in a SweepSet."""
        return self.intervention + (KEPT_SUFFIX if self.side == "kept" else "")


@dataclass(frozen=True)
class PlanCount:
    """How much a plan is.

    Attributes:
        cells: Cells of the results.
        named_sets: Head sets by name: (ranking, draw, k, side), the run without ablation included.
        head_sets: Different ones among the sets that are ablated.
        runs: Works: a head set ablated in one way on one task.
        rows: A trial in a run; what a loop without sharing would forward one by one.
        rows_by_task: The same for each task.
        prompts: Clean rows: a trial in a block, whose head sets share its prefill.
        layers_saved: Share of layers that prefill need not compute, because a head set's row begins at the first layer
            it touches, 0 to 1; against a full pass for each row.
    """

    cells: int
    named_sets: int
    head_sets: int
    runs: int
    rows: int
    rows_by_task: Mapping[str, int]
    prompts: int
    layers_saved: float


@dataclass(frozen=True, eq=False)
class SweepPlan:
    """Every cell of a sweep, and the work behind them; the same input makes the same plan.

    Attributes:
        cells: In the order of the results: label, task, ranking, k, draw.
        tasks: Trials of each task.
        interventions: Seeds of each intervention.
        shape: Layers and heads of the model.
        notes: What was left out, and why.
    """

    cells: tuple[PlannedCell, ...]
    tasks: Mapping[str, int]
    interventions: Mapping[str, tuple[int, ...]]
    shape: tuple[int, int]
    notes: tuple[str, ...] = ()

    @cached_property
    def works(self) -> tuple[Work, ...]:
        """What is run, each once, in the order of the cells."""
        return tuple(dict.fromkeys(cell.work for cell in self.cells))

    @property
    def labels(self) -> list[str]:
        """Labels of the tables."""
        return list(dict.fromkeys(cell.label for cell in self.cells))

    @property
    def rankings(self) -> list[str]:
        """Rankings and controls, without the baseline."""
        return [r for r in dict.fromkeys(cell.ranking for cell in self.cells) if r != BASELINE]

    @property
    def ks(self) -> list[int]:
        """Numbers of heads, rising."""
        return sorted({cell.k for cell in self.cells})

    def blocks(self, *, heads_per_block: int = 16) -> list[tuple[Work, ...]]:
        """The work in blocks that share the clean run of their prompts.

        A block has one task, and its interventions may differ. Head sets whose first layers are close stand together,
        so that their rows split off late and leave at about the same depth; the run without ablation comes last.

        Args:
            heads_per_block: Most works of a block.

        Raises:
            InvalidInput: If it is no number from 1.
        """
        check_count("heads_per_block", heads_per_block)
        order = {label: i for i, label in enumerate(self.interventions)}

        def place(work: Work) -> tuple[Any, ...]:
            first = self.shape[0] if work.first_layer is None else work.first_layer
            return first, len(work.heads), tuple(work.heads), order.get(work.intervention, -1), work.seed

        blocks = []
        for task in self.tasks:
            works = sorted((w for w in self.works if w.task == task), key=place)
            blocks += [tuple(works[i : i + heads_per_block]) for i in range(0, len(works), heads_per_block)]
        return blocks

    def count(self, *, heads_per_block: int = 16) -> PlanCount:
        """Cells, head sets, runs and rows, and the share of layers that is saved.

        With L layers, a work whose first touched layer is f costs L - f layers of each prompt; the clean row of a block
        goes up to the last f of its works (to L for the run without ablation, which is that row itself).
        """
        layers = self.shape[0]
        spent = prompts = 0
        for block in self.blocks(heads_per_block=heads_per_block):
            trials = self.tasks[block[0].task]
            firsts = [layers if w.first_layer is None else w.first_layer for w in block]
            spent += trials * (max(firsts) + sum(layers - first for first in firsts))
            prompts += trials
        by_task = {task: n * sum(w.task == task for w in self.works) for task, n in self.tasks.items()}
        rows = sum(by_task.values())
        return PlanCount(
            cells=len(self.cells),
            named_sets=len({(c.ranking, c.draw // len(self.interventions[c.intervention]), c.k, c.side)
                            for c in self.cells}),
            head_sets=len({w.heads for w in self.works}),
            runs=len(self.works),
            rows=rows,
            rows_by_task=by_task,
            prompts=prompts,
            layers_saved=1 - spent / (rows * layers) if rows else 0.0,
        )  # fmt: skip

    def estimate(self, seconds_per_row: float | Mapping[str, float], *, workers: int = 1) -> float:
        """Seconds the plan takes, from what a row (a trial in a run) took where it was measured.

        Args:
            seconds_per_row: Seconds a row, of each task or of all; measured as rows run in blocks, so that what blocks
                save is in it.
            workers: Workers that share the rows evenly.

        Raises:
            InvalidInput: If a number is not above zero, or a task is not named.
        """
        check_count("workers", workers)
        total = 0.0
        for task, rows in self.count().rows_by_task.items():
            if isinstance(seconds_per_row, Mapping) and task not in seconds_per_row:
                raise InvalidInput(f"seconds_per_row names no time for the task {task!r}; it names "
                                   f"{sorted(seconds_per_row)}.")  # fmt: skip
            each = seconds_per_row[task] if isinstance(seconds_per_row, Mapping) else seconds_per_row
            if not each > 0:
                raise InvalidInput(f"seconds_per_row is {each!r} for {task!r}; it must be above 0.")
            total += rows * each
        return total / workers

    def missing(self, done: Any) -> list[Work]:
        """Works that are not in a collection."""
        return [work for work in self.works if work not in done]

    def describe(self, *, heads_per_block: int = 16) -> str:
        """The plan as a table to read before it runs."""
        n = self.count(heads_per_block=heads_per_block)
        what = ", ".join(
            label + (f" ({len(seeds)} seeds)" if len(seeds) > 1 else "") for label, seeds in self.interventions.items()
        )
        sides = [side for side in SIDES if any(cell.side == side for cell in self.cells)]
        draws = sorted({cell.draw // len(self.interventions[cell.intervention]) for cell in self.cells
                        if cell.ranking == RANDOM})  # fmt: skip
        rows = [
            ("model", f"{self.shape[0]} layers of {self.shape[1]} heads"),
            ("rankings", ", ".join(f"{r} ({len(draws)} draws)" if r == RANDOM else r for r in self.rankings)),
            ("k", " ".join(map(str, self.ks))),
            ("interventions", what),
            ("sides", ", ".join(sides)),
            ("tasks", ", ".join(f"{task} ({trials} trials)" for task, trials in self.tasks.items())),
            ("cells", f"{n.cells:,}"),
            ("head sets", f"{n.head_sets:,} different, of {n.named_sets:,} named"),
            ("runs", f"{n.runs:,} (a head set on a task)"),
            ("rows", f"{n.rows:,} (a trial in a run): "
             + ", ".join(f"{task} {count:,}" for task, count in n.rows_by_task.items())),
            ("clean prefills", f"{n.prompts:,} (a prompt in a block of up to {heads_per_block} runs)"),
            ("layers saved", f"{n.layers_saved:.0%} of prefill"),
        ]  # fmt: skip
        lines = [f"{name:<16}{text}" for name, text in rows]
        return "\n".join([*lines, *(f"{'note':<16}{note}" for note in self.notes)])

    def __str__(self) -> str:
        return self.describe()


def plan(
    rankings: Mapping[str, Any],
    *,
    k: int | float | Real | Threshold | Sequence[int | float | Real | Threshold],
    tasks: Mapping[str, int],
    shape: tuple[int, int],
    interventions: Mapping[str, Sequence[int]],
    sides: Sequence[str] = ("ablated",),
    controls: Controls | None = None,
    k_beyond: str = "refuse",
) -> SweepPlan:
    """Every cell of a sweep.

    Args:
        rankings: HeadScores, QK-scores of calibration trials, ``Ranked`` or head sets, by name; best first.
        k: Sizes: counts, fractions of all heads (rounded, at least 1) and thresholds. The run without ablation is
            always there.
        tasks: How many trials each task has.
        shape: Layers and heads of the model.
        interventions: Seeds of each intervention, by label.
        sides: ``"ablated"`` (the set) and ``"kept"`` (all but the set). Kept sets begin at k = 0, all heads ablated,
            under every ranking.
        controls: Random, bottom and nearest-to-zero sets. Random sets stand at every k of any ranking.
        k_beyond: What to do with a k for which too few heads are ranked, or left to draw from: ``"refuse"``, or
            ``"drop"``, which leaves it out and says so in ``notes``.

    Raises:
        InvalidInput: If names clash, sizes do not fit, or nothing is left.
        UnknownName: For an unknown side, or ranking of a control.
    """
    _check(rankings, tasks, interventions, sides, k_beyond)
    ranked = {name: Ranked.of(value) for name, value in rankings.items()}
    sizes = [k] if isinstance(k, (int, float, Real, Threshold)) else list(k)
    named, notes = named_sets(ranked, sizes, shape, controls or Controls(), k_beyond)
    cells = _cells(named, tasks, shape, interventions, sides)
    given = {label: tuple(seeds) for label, seeds in interventions.items()}
    return SweepPlan(tuple(cells), dict(tasks), given, shape, tuple(notes))


def plan_study(
    study: Study, rankings: Mapping[str, Any], *, tasks: Mapping[str, int], shape: tuple[int, int]
) -> SweepPlan:
    """The plan of a study, once its rankings are scored and its trials made; see ``plan``.

    Raises:
        InvalidInput: If rankings or tasks are not those of the study; or as ``plan`` does.
    """
    for what, given, asked in (("rankings", rankings, study.rankings), ("tasks", tasks, study.tasks)):
        if list(given) != list(asked):
            raise InvalidInput(f"the study {study.name!r} has the {what} {list(asked)}, but {list(given)} were given.")
    part = study.controls.random
    random = None
    if part is not None:
        seed = study.seed if part.seed is None else part.seed
        random = RandomHeads(part.draws, part.exclude_tested, part.match_layers, seed, part.at)
    sizes = [s.short() if s.threshold is None else Threshold(s.threshold, s.rankings) for s in study.k]
    return plan(
        {name: Ranked.of(value, by=study.rankings[name].by) for name, value in rankings.items()},
        k=sizes,
        tasks=tasks,
        shape=shape,
        interventions={i.label: i.seeds for i in study.interventions},
        sides=study.sides,
        controls=Controls(
            random, None if part is None else part.tested, study.controls.bottom, study.controls.nearest_zero
        ),
        k_beyond=study.k_beyond,
    )


def assemble(
    made: SweepPlan, results: Mapping[Work, CellResult], *, allow_missing: bool = False
) -> dict[str, pd.DataFrame]:
    """The tables of a sweep, one for each label, from the results of its work.

    Args:
        made: The plan.
        results: Result of each work.
        allow_missing: Leave out cells whose work has no result, rather than refuse.

    Returns:
        Label to a table in the columns of ``SweepResult``, a row per cell, trial and metric. ``heads`` names the
        ablated heads, best first; on the side ``"kept"``, the kept ones. A label without any result is left out.

    Raises:
        InvalidInput: If results are missing, or do not fit: trials of a task that differ between its results, or in
            number from the plan's; or metrics that differ.
    """
    import pandas as pd

    lacking = made.missing(results)
    if lacking and not allow_missing:
        raise InvalidInput(
            f"{len(lacking)} of {len(made.works)} results are missing, the first on {lacking[0].task!r} with "
            f"{lacking[0].intervention!r} of {len(lacking[0].heads)} heads; run the sweep again to fill them in."
        )
    _check_results(made, results)
    parts: dict[str, list[dict[str, Any]]] = {}
    for cell in made.cells:
        result = results.get(cell.work)
        if result is None:
            continue
        ids, heads = list(result.trial_ids), " ".join(cell.heads.labels)
        for metric, values in result.values.items():
            parts.setdefault(cell.label, []).append(
                {
                    "ranking": [cell.ranking] * len(ids), "draw": [cell.draw] * len(ids), "k": [cell.k] * len(ids),
                    "task": [cell.task] * len(ids), "trial_id": ids, "metric": [metric] * len(ids),
                    "value": values.tolist(), "heads": [heads] * len(ids),
                }
            )  # fmt: skip
    return {
        label: pd.DataFrame({name: [x for part in own for x in part[name]] for name in COLUMNS}).astype(COLUMNS)
        for label, own in parts.items()
    }


def _check_results(made: SweepPlan, results: Mapping[Work, CellResult]) -> None:
    """Refuse results of other trials, or of other metrics, than those they stand beside."""
    first: dict[str, CellResult] = {}
    for work in made.works:
        result = results.get(work)
        if result is None:
            continue
        ids, n = tuple(result.trial_ids), made.tasks[work.task]
        if len(ids) != n:
            raise InvalidInput(f"a result on {work.task!r} has {len(ids)} trials; the plan has {n}.")
        known = first.setdefault(work.task, result)
        if ids != tuple(known.trial_ids):
            raise InvalidInput(f"results on {work.task!r} are of different trials; they cannot stand in one table.")
        if list(result.values) != list(known.values):
            raise InvalidInput(
                f"results on {work.task!r} have the metrics {list(known.values)} and {list(result.values)}; they "
                "cannot stand in one table."
            )


def _check(rankings: Any, tasks: Any, interventions: Any, sides: Sequence[str], k_beyond: str) -> None:
    if not isinstance(rankings, Mapping) or not rankings:
        raise InvalidInput("a sweep needs at least one ranking by name, such as {'locos': locos}.")
    taken = {BASELINE, RANDOM, *(form.format(name) for name in rankings for form in (BOTTOM, NEAREST_ZERO))}
    for name in rankings:
        if name in taken:
            raise InvalidInput(f"a ranking cannot be called {name!r}; that names a control.")
    if not tasks:
        raise InvalidInput("a sweep needs at least one task, such as {'passkey': 40}.")
    for task, n in tasks.items():
        check_count(f"trials of the task {task!r}", n)
    if not interventions:
        raise InvalidInput("a sweep needs at least one intervention, such as {'mean': (0,)}.")
    for label, seeds in interventions.items():
        if label == BASELINE or label.endswith(KEPT_SUFFIX):
            raise InvalidInput(f"an intervention cannot be called {label!r}; that names something else.")
        if not seeds or len(set(seeds)) < len(seeds):
            raise InvalidInput(f"the intervention {label!r} has the seeds {list(seeds)}; give at least one, each once.")
    if not sides or len(set(sides)) < len(sides):
        raise InvalidInput(f"sides is {list(sides)}; name at least one of {', '.join(SIDES)}, each once.")
    for side in sides:
        if side not in SIDES:
            raise UnknownName("side", side, SIDES)
    if k_beyond not in BEYOND:
        raise UnknownName("k_beyond", k_beyond, BEYOND)


def _cells(
    named: Sequence[NamedSet],
    tasks: Mapping[str, int],
    shape: tuple[int, int],
    interventions: Mapping[str, Sequence[int]],
    sides: Sequence[str],
) -> list[PlannedCell]:
    """Cells of every side, intervention and task."""
    every = HeadSet((layer, head) for layer in range(shape[0]) for head in range(shape[1]))
    cells = []
    for side in sides:
        kept = side == "kept"
        # Nothing kept is every head ablated, whatever the ranking; nothing ablated is the baseline.
        empty = list(dict.fromkeys(one.ranking for one in named)) if kept else [BASELINE]
        sets = [*(NamedSet(name, 0, 0, HeadSet()) for name in empty), *named]
        # A set is sorted or turned round once, not for every intervention and task.
        targets = [every - one.heads if kept else HeadSet(sorted(one.heads)) for one in sets]
        for label, seeds in interventions.items():
            for task in tasks:
                for one, target in zip(sets, targets, strict=True):
                    for place, seed in enumerate(seeds[:1] if one.ranking == BASELINE else seeds):
                        work = Work(task, target, label, seed) if len(target) else Work(task, HeadSet(), BASELINE, 0)
                        draw = one.draw * len(seeds) + place
                        cells.append(PlannedCell(one.ranking, draw, one.k, one.heads, side, label, seed, work))
    return cells
