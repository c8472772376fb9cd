"""Ablation sweeps: rankings x k x tasks x interventions, with random heads that are never the tested ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from mechheads.cell_store import CellStore
from mechheads.engines import LocalEngine, RayEngine
from mechheads.errors import InvalidInput
from mechheads.head_set_runs import RunLimits
from mechheads.interventions import Intervention
from mechheads.model import Model
from mechheads.provenance import collect, content_hash
from mechheads.scores import HeadScores
from mechheads.sweep_controls import RandomHeads, as_rankings, caveats, named_rankings
from mechheads.sweep_plan import SweepPlan, plan
from mechheads.sweep_result import SweepResult
from mechheads.sweep_run import SweepRun, run_plan
from mechheads.sweep_set import SweepSet
from mechheads.sweep_sets import Controls
from mechheads.tasks import Task
from mechheads.trials import TrialSet


def run_sweep(
    model: Model,
    rankings: Any,
    *,
    k: Any,
    tasks: Mapping[str, TrialSet | Task],
    intervention: Intervention | Mapping[str, Intervention],
    controls: RandomHeads | Controls | None = None,
    sides: Sequence[str] = ("ablated",),
    seeds: Sequence[int] | None = None,
    max_new_tokens: int | Mapping[str, int] = 20,
    store: CellStore | str | Path | None = None,
    engine: LocalEngine | RayEngine | None = None,
    batch_size: int = 64,
    heads_per_block: int = 16,
    progress: bool | None = None,
) -> SweepResult | SweepSet:
    """Ablate the first k heads of each ranking and see what the model still does.

    Args:
        model: The model.
        rankings: HeadScores or head sets by name, best first; or one of them alone.
        k: Set sizes: counts, fractions of all heads, or ``Threshold``; the baseline (0) is always run.
        tasks: Tasks, or trials, by name; the first is the target, the others are controls. Trials with a gold answer
            are answered, trials with candidates alone are a choice (``Task.of``).
        intervention: What to do to the heads (``mean_ablation(...)``, ``zero_ablation()``); or several by label.
        controls: Random heads; or ``Controls``, for bottom and nearest-to-zero heads too. None: none.
        sides: ``"ablated"`` (the set: is it needed?) and ``"kept"`` (all heads but the set: does it suffice?).
        seeds: Seeds of resample ablations, each a draw of the result; None: the seed that each was given.
        max_new_tokens: Longest answer, tokens; one number, or one for each task. A ``Task`` has its own.
        store: A ``CellStore`` or its folder, so that a rerun computes only what is missing; None keeps nothing.
        engine: Where cells run; None: in this process.
        batch_size: Rows run together, a row being a prompt under a head set; changes nothing beyond rounding.
        heads_per_block: Most head sets that share a prompt's clean run.
        progress: Show a bar (None: only on a terminal).

    The first Ctrl-C finishes the block in hand and keeps the cells that are done (``meta["complete"]`` is then False);
    cells that failed are named in a warning and in ``meta["failed"]``. A warning says when heads were chosen on trials
    they are tested on, when a mean was taken on them, or when scores come from other weights; the same stands in
    ``meta["caveats"]``.

    Returns:
        Per-trial results of every cell: a ``SweepResult`` for one intervention on one side, else a ``SweepSet``.

    Raises:
        InvalidInput: If rankings, sizes or trials do not fit, or the intervention names heads already.
        OutputNotWritable: If the store cannot be written; what is in it stays.
    """
    given = named_rankings(rankings)
    several = isinstance(intervention, Mapping) or tuple(sides) != ("ablated",)
    doing = _named_interventions(intervention)
    ready = as_tasks(model, tasks, max_new_tokens)
    made = plan_sweep(model, given, k=k, tasks=ready, interventions=doing, controls=controls, sides=sides, seeds=seeds)
    found = list(dict.fromkeys(c for one in doing.values() for c in caveats(model, given, one, _trials(ready))))
    for caveat in found:
        warnings.warn(caveat, stacklevel=3)
    run = run_plan(
        model,
        made,
        ready,
        doing,
        store=CellStore(store) if isinstance(store, (str, Path)) else store,
        engine=engine,
        limits=RunLimits(rows=batch_size),
        heads_per_block=heads_per_block,
        progress=progress,
    )
    if not run.complete:
        warnings.warn(_incomplete(run), stacklevel=3)
    results = sweep_results(model, made, run, given, ready, doing, controls, found)
    if several:
        return SweepSet(results, {"labels": list(results)})
    return next(iter(results.values()))


def plan_sweep(
    model: Model,
    rankings: Mapping[str, Any],
    *,
    k: Any,
    tasks: Mapping[str, Task],
    interventions: Mapping[str, Intervention],
    controls: RandomHeads | Controls | None = None,
    sides: Sequence[str] = ("ablated",),
    seeds: Sequence[int] | None = None,
    k_beyond: str = "refuse",
) -> SweepPlan:
    """The plan of ``run_sweep``, to be read and counted before it is run.

    Raises:
        InvalidInput: As ``run_sweep`` does.
    """
    heads = as_rankings(rankings)
    # Scores stay scores where there are any, for bottom and nearest-to-zero sets and thresholds.
    ranked = {name: one if isinstance(one, HeadScores) else heads[name] for name, one in rankings.items()}
    return plan(
        ranked,
        k=k,
        tasks={name: len(task.trials) for name, task in tasks.items()},
        shape=(model.spec.n_layers, model.spec.n_heads),
        interventions={
            label: tuple(seeds) if seeds is not None and one.kind == "resample" else (one.seed,)
            for label, one in interventions.items()
        },
        sides=sides,
        controls=Controls(controls) if isinstance(controls, RandomHeads) else controls,
        k_beyond=k_beyond,
    )


def as_tasks(
    model: Model, tasks: Mapping[str, TrialSet | Task], max_new_tokens: int | Mapping[str, int] = 20
) -> dict[str, Task]:
    """Tasks by name, all of whose trials the model can run; refused before the first pass where one cannot.

    Raises:
        InvalidInput: For no tasks, a task without trials, or trials that cannot be run or judged.
    """
    if not tasks:
        raise InvalidInput("a sweep needs at least one task, such as {'passkey': trials}.")
    longest = _longest_answers(max_new_tokens, tasks)
    out = {
        name: one if isinstance(one, Task) else Task.of(name, one, max_new_tokens=longest[name])
        for name, one in tasks.items()
    }
    for name, task in out.items():
        for trial in task.trials:
            model.check_tokens(trial.tokens, what=f"trial {trial.id!r} of task {name!r}")
    return out


def sweep_results(
    model: Model,
    made: SweepPlan,
    run: SweepRun,
    rankings: Mapping[str, Any],
    tasks: Mapping[str, Task],
    interventions: Mapping[str, Intervention],
    controls: RandomHeads | Controls | None,
    found: Sequence[str],
) -> dict[str, SweepResult]:
    """The results of a run by label, each with where it came from."""
    described = model.describe()
    random = controls.random if isinstance(controls, Controls) else controls
    out = {}
    for label, table in run.tables.items():
        cells = [cell for cell in made.cells if cell.label == label]
        doing = interventions[cells[0].intervention]
        meta = collect(
            described,
            "sweep",
            {
                "intervention": doing.describe(),
                "seeds": list(made.interventions[cells[0].intervention]),
                "k": sorted({0, *(cell.k for cell in cells)}),
                "controls": None if random is None else asdict(random),
                "max_new_tokens": {name: task.max_new_tokens for name, task in tasks.items()},
                "stop_at_newline": all(task.stop_at_newline for task in tasks.values()),
                "rankings": {name: heads.labels for name, heads in as_rankings(rankings).items()},
                "metrics": {name: list(task.measured) for name, task in tasks.items()},
            },
            "+".join(tasks),
            content_hash({name: task.trials.hash for name, task in tasks.items()}),
            {name: task.trials.options for name, task in tasks.items()},
            seed=None if random is None else random.seed,
            complete=run.complete,
            caveats=list(found),
            ablated=model.backend.hooked(),
            interventions=list(model.ablations),  # weights pruned for a while leave no hook
            task_hashes={name: task.trials.hash for name, task in tasks.items()},
            side=cells[0].side,
            failed=[f"{key}: {error}" for key, error in run.report.failed],
            notes=list(made.notes),
        )
        out[label] = SweepResult(table, meta)
    return out


def _named_interventions(given: Intervention | Mapping[str, Intervention]) -> dict[str, Intervention]:
    """Interventions by label, none of which names heads."""
    named = dict(given) if isinstance(given, Mapping) else {getattr(given, "kind", "?"): given}
    for one in named.values():
        if not isinstance(one, Intervention) or one.heads is not None:
            raise InvalidInput(
                "a sweep takes an intervention without heads, such as mh.zero_ablation(), and chooses them."
            )
    return named


def _trials(tasks: Mapping[str, Task]) -> dict[str, TrialSet]:
    return {name: task.trials for name, task in tasks.items()}


def _incomplete(run: SweepRun) -> str:
    """What a run that did not come to its end says."""
    report = run.report
    if report.interrupted:
        return f"interrupted: the {report.done + report.skipped} cells that are done are kept, {report.left} are left."
    first = report.failed[0]
    return (
        f"{len(report.failed)} cells failed and are left out (the first, {first[0]}: {first[1]}); run again to try "
        "them again."
    )


def _longest_answers(given: int | Mapping[str, int], tasks: Mapping[str, Any]) -> dict[str, int]:
    """Longest answer of each task, from one number or a number for each."""
    if isinstance(given, int):
        return dict.fromkeys(tasks, given)
    missing = [task for task in tasks if task not in given and not isinstance(tasks[task], Task)]
    if missing:
        raise InvalidInput(f"max_new_tokens names no length for the task {missing[0]!r}; it names {sorted(given)}.")
    return dict(given)
