"""The numbers of a study, and what they say in plain words."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd

from mechheads.engines import EngineReport
from mechheads.errors import InvalidInput
from mechheads.provenance import json_ready
from mechheads.study import Study
from mechheads.study_fields import RANDOM
from mechheads.study_parts import Prepared, headline
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats import (
    InterventionAgreement,
    areas,
    compare_interventions,
    compare_rankings,
    minimal_k,
    necessity_sufficiency,
    task_dissociation,
    verdict,
)
from mechheads.tasks import METRICS, Task

# A share lost by which a curve counts as fallen.
SHARE = 0.5


@dataclass(frozen=True, eq=False)
class StudyStats:
    """Statistics of a study, each task by its own first metric.

    Attributes:
        metrics: The metric each task is judged by.
        worst: Its value where nothing is left: chance for a choice, else 0.
        areas: Share lost over the curve; ``sweep_stats.areas`` with a column ``intervention``, for every ranking.
        minimal: Fewest heads that halve the metric; ``sweep_stats.minimal_k``, likewise.
        comparisons: Pairs of rankings on the targets, random heads among them; ``sweep_stats.compare_rankings``.
        dissociation: Share lost on the targets less that on the controls; ``sweep_stats.task_dissociation``.
        sides: Necessity and sufficiency on the targets; ``sweep_stats.necessity_sufficiency``.
        agreement: Interventions side by side, by target; empty where there is one alone.
        verdict: What the study says, by target.
        unsaid: What could not be computed, and why.
    """

    metrics: Mapping[str, str]
    worst: Mapping[str, float]
    areas: pd.DataFrame
    minimal: pd.DataFrame
    comparisons: pd.DataFrame
    dissociation: pd.DataFrame
    sides: pd.DataFrame
    agreement: Mapping[str, InterventionAgreement]
    verdict: Mapping[str, str]
    unsaid: tuple[str, ...]


def measure(study: Study, sweeps: SweepSet, tasks: Mapping[str, Task], *, n_boot: int = 2000) -> StudyStats:
    """All statistics of a study; what cannot be computed is left out and named.

    Args:
        study: The study.
        sweeps: Its results.
        tasks: Its tasks.
        n_boot: Number of bootstrap samples.
    """
    return _Measuring(study, sweeps, tasks, n_boot).run()


class _Measuring:
    """The statistics of one study while they are taken."""

    def __init__(self, study: Study, sweeps: SweepSet, tasks: Mapping[str, Task], n_boot: int):
        self.study, self.sweeps = study, sweeps
        self.metrics = {name: headline(study.tasks[name], task) for name, task in tasks.items()}
        self.worst = {name: _chance(task, self.metrics[name]) for name, task in tasks.items()}
        self.targets = study.targets
        self.controls = [name for name in tasks if name not in self.targets]
        # Controls that are lists of bad heads are no rankings that should fall first.
        self.tested = [*study.rankings, RANDOM]
        self.options: dict[str, Any] = {"n_boot": n_boot, "seed": study.seed}
        self.unsaid: list[str] = []

    def run(self) -> StudyStats:
        ablated = [(label, self.sweeps[label]) for label in self.sweeps.ablated]
        every = [(label, sweep, task) for label, sweep in ablated for task in sweep.tasks]
        target = [(label, sweep, task) for label, sweep, task in every if task in self.targets]
        return StudyStats(
            metrics=self.metrics,
            worst=self.worst,
            areas=self.table(
                "areas", every, lambda s, t: areas(s, self.metrics[t], t, worst=self.worst, **self.options)
            ),
            minimal=self.table(
                "minimal k", every,
                lambda s, t: minimal_k(s, self.metrics[t], t, share=SHARE, worst=self.worst, **self.options),
            ),
            comparisons=self.table("comparisons of rankings", target, self.compared),
            dissociation=self.table(
                "dissociation", target if self.controls else [], self.dissociated
            ),
            sides=self.table(
                "necessity and sufficiency",
                [(label, s, t) for label, s, t in target if self.sweeps.complement(label) is not None],
                self.both_sides,
            ),
            agreement=self.agreeing(),
            verdict={name: self.told(name) for name in self.targets},
            unsaid=tuple(dict.fromkeys(self.unsaid)),
        )  # fmt: skip

    def table(
        self,
        what: str,
        cases: Sequence[tuple[str, SweepResult, str]],
        build: Callable[[SweepResult, str], pd.DataFrame],
    ) -> pd.DataFrame:
        """One table of all interventions and tasks."""
        parts = []
        for label, sweep, task in cases:
            try:
                part = build(sweep, task)
            except InvalidInput as error:
                self.unsaid.append(f"{what} ({label}, {task}): {error}")
                continue
            parts.append(part.assign(intervention=label)[["intervention", *part.columns]])
        return pd.concat(parts, ignore_index=True) if parts else pd.DataFrame()

    def rankings(self, sweep: SweepResult) -> list[str]:
        return [name for name in self.tested if name in sweep.rankings]

    def compared(self, sweep: SweepResult, task: str) -> pd.DataFrame:
        named = self.rankings(sweep)
        if len(named) < 2:
            raise InvalidInput("there is one ranking alone, and no random heads.")
        return compare_rankings(sweep, self.metrics[task], task, named, **self.options)

    def dissociated(self, sweep: SweepResult, task: str) -> pd.DataFrame:
        return task_dissociation(
            sweep, task, [c for c in self.controls if c in sweep.tasks], self.metrics[task],
            control_metric=self.metrics, ranking=self.rankings(sweep), worst=self.worst, **self.options,
        )  # fmt: skip

    def both_sides(self, sweep: SweepResult, task: str) -> pd.DataFrame:
        label = next(name for name, one in self.sweeps.items() if one is sweep)
        return necessity_sufficiency(
            self.sweeps, label, self.metrics[task], task, self.rankings(sweep), share=SHARE, worst=self.worst,
            **self.options,
        )  # fmt: skip

    def agreeing(self) -> dict[str, InterventionAgreement]:
        out = {}
        for name in self.targets if len(self.sweeps.ablated) > 1 else ():
            try:
                first = self.sweeps[self.sweeps.ablated[0]]
                out[name] = compare_interventions(
                    self.sweeps, self.metrics[name], name, self.rankings(first), **self.options
                )
            except InvalidInput as error:
                self.unsaid.append(f"agreement of interventions ({name}): {error}")
        return out

    def told(self, target: str) -> str:
        """The paragraph on a target; controls count by their own metrics, as shares of what they are."""
        alike = [c for c in self.controls if _better(self.metrics[c]) == _better(self.metrics[target])]
        keep = {name: self.metrics[name] for name in (target, *alike)}
        shown = {}
        for label, sweep in self.sweeps.items():
            frame = sweep.frame
            frame = frame.loc[
                frame["ranking"].isin([*self.tested, "none"]) & (frame["metric"] == frame["task"].map(keep))
            ]
            # Only shares are compared between tasks, so all may go by one name.
            if not frame.empty:
                shown[label] = SweepResult(frame.assign(metric=self.metrics[target]), sweep.meta)
        try:
            said = verdict(SweepSet(shown), target=target, worst=self.worst, share=SHARE, **self.options)
            floor = self.worst[target]
            return said if not floor else f"{said} Shares of {target} are of what it scores above chance, {floor:.3g}."
        except InvalidInput as error:
            return f"On {target} nothing can be said: {error}"


def _better(metric: str) -> bool:
    return METRICS[metric].higher_is_better


def _chance(task: Task, metric: str) -> float:
    """What guessing gets, on average over the trials; 0 where there is no such number."""
    found = [METRICS[metric].chance(trial) for trial in task.trials]
    known = [one for one in found if one is not None]
    return float(np.mean(known)) if len(known) == len(found) else 0.0


def summarise(
    study: Study, ready: Prepared, model: Mapping[str, Any], report: EngineReport, stats: StudyStats, *, seconds: float
) -> dict[str, Any]:
    """Everything a script would want, JSON-ready; undefined and infinite numbers are null."""
    count = ready.plan.count(heads_per_block=study.heads_per_block)
    tables = ("areas", "minimal", "comparisons", "dissociation", "sides")
    return json_ready(
        {
            "study": study.to_dict(),
            "model": dict(model),
            "plan": {**vars(count), "rows_by_task": dict(count.rows_by_task), "notes": list(ready.plan.notes)},
            "tasks": {name: task.describe() for name, task in ready.tasks.items()},
            "rankings": {name: heads.labels for name, heads in ready.heads.items()},
            "complete": not report.failed and not report.left,
            "cells": {
                "computed": report.done, "there_already": report.skipped, "left": report.left,
                "failed": [{"cell": str(key), "error": error} for key, error in report.failed],
            },
            "metrics": dict(stats.metrics),
            "worst": dict(stats.worst),
            "verdict": dict(stats.verdict),
            **{name: rows_of(getattr(stats, name)) for name in tables},
            "agreement": {
                name: {"pairs": rows_of(one.pairs), "ranks": rows_of(one.ranks)}
                for name, one in stats.agreement.items()
            },
            "unsaid": list(stats.unsaid),
            "notes": list(ready.notes),
            "caveats": list(ready.caveats),
            "seconds": round(seconds, 1),
        },
        where="summary",
    )  # fmt: skip


def rows_of(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A table as JSON-ready rows."""
    return [{str(k): _plain(v) for k, v in row.items()} for row in frame.to_dict("records")]


def _plain(value: Any) -> Any:
    value = value.item() if isinstance(value, np.generic) else value
    return None if isinstance(value, float) and not math.isfinite(value) else value
