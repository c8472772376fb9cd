"""The dissociation score of an ablation sweep: how much more the wanted task suffers than a control."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mechheads.errors import InvalidInput, UnknownName
from mechheads.stats import bootstrap_weights, check_level, percentiles
from mechheads.sweep_result import BASELINE, SweepResult

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False)
class Selectivity:
    """Dissociation score against the number of ablated heads, made by ``selectivity``.

    Attributes:
        frame: One row per ranking and k: ``ranking k score ci_low ci_high drop control_drop n_trials
            n_control_trials``. ``score = drop - control_drop``; drops are shares of the value without ablation.
        best: One row per ranking: ``ranking k score``, the k with the highest score. It was picked by looking, so its
            score is too high on average; quote another data set's score at that k.
        task: The task that should suffer.
        control: The task that should not.
        metric: Metric of the task.
        control_metric: Metric of the control.
        level: Confidence level.
    """

    frame: pd.DataFrame
    best: pd.DataFrame
    task: str
    control: str
    metric: str
    control_metric: str
    level: float


def selectivity(
    sweep: SweepResult,
    *,
    task: str,
    control: str,
    metric: str | None = None,
    control_metric: str | None = None,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> Selectivity:
    """Dissociation score of every ranking: ``DS(k) = (R(0) - R(k)) / R(0) - (P(0) - P(k)) / P(0)``.

    R is the mean metric on the task (retrieval), P on the control (parametric recall, arithmetic), k the number of
    ablated heads. 1: the task is gone and the control untouched; 0: both suffer alike; below 0: the control suffers
    more. Random draws are averaged within a trial first, so their spread is not in the interval.

    (Gema, Alex, Minervini, arXiv 2607.01002, whose published code
    resamples the runs with and without ablation as if they were of different trials; here a trial stands in both, and
    the interval is as narrow as pairing makes it.)

    Args:
        sweep: An ablation sweep with both tasks and the run without ablation.
        task: The task that should suffer.
        control: The task that should not.
        metric: Metric of the task, where higher is better and zero is the worst; the sweep's first if None.
        control_metric: Metric of the control; that of the task if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.

    Raises:
        UnknownName: If a task or metric is not in the sweep.
        InvalidInput: If both tasks are the same, one was not measured without ablation, or its value without ablation
            is not above zero, so that no share of it can be lost.
    """
    import pandas as pd

    check_level(level)
    metric = sweep.metrics[0] if metric is None else metric
    control_metric = metric if control_metric is None else control_metric
    if task == control:
        raise InvalidInput(f"task and control are both {task!r}; a dissociation needs two tasks.")
    drops = [
        _drops(sweep, t, m, n_boot, seed + i) for i, (t, m) in enumerate(((task, metric), (control, control_metric)))
    ]
    rows = []
    for ranking, k in drops[0]:
        if (ranking, k) not in drops[1]:
            continue
        (drop, samples, n), (control_drop, control_samples, n_control) = (d[ranking, k] for d in drops)
        low, high = (float(x) for x in percentiles(samples - control_samples, level))
        few = min(n, n_control) < 2
        rows.append(
            {
                "ranking": ranking,
                "k": k,
                "score": drop - control_drop,
                "ci_low": math.nan if few else low,
                "ci_high": math.nan if few else high,
                "drop": drop,
                "control_drop": control_drop,
                "n_trials": n,
                "n_control_trials": n_control,
            }
        )
    if not rows:
        raise InvalidInput(f"{task!r} and {control!r} were measured at no common ranking and k.")
    frame = pd.DataFrame(rows)
    best = frame.loc[frame.groupby("ranking", sort=False)["score"].idxmax(), ["ranking", "k", "score"]]
    return Selectivity(frame, best.reset_index(drop=True), task, control, metric, control_metric, level)


def _drops(
    sweep: SweepResult, task: str, metric: str, n_boot: int, seed: int
) -> dict[tuple[str, int], tuple[float, np.ndarray, int]]:
    """Share of the baseline lost in every cell with k above 0, its samples ``[n_boot]``, and the trials."""
    for kind, name, known in (("task", task, sweep.tasks), ("metric", metric, sweep.metrics)):
        if name not in known:
            raise UnknownName(f"{kind} of the sweep", name, known)
    frame = sweep.frame.loc[(sweep.frame["task"] == task) & (sweep.frame["metric"] == metric)]
    # Draws of a trial are averaged first, so a trial counts once.
    table = frame.pivot_table(index=["ranking", "k"], columns="trial_id", values="value", aggfunc="mean")
    if (BASELINE, 0) not in table.index:
        raise InvalidInput(f"{metric!r} on {task!r} was not measured without ablation, so nothing can be called lost.")
    base = table.loc[(BASELINE, 0)].to_numpy(dtype=float)
    if not np.nanmean(base) > 0:
        raise InvalidInput(
            f"{metric!r} on {task!r} is {np.nanmean(base):g} without ablation; a share of it can only be lost if it "
            "is above 0. Choose a metric that is 0 at worst, on a task the model can do."
        )
    counts = bootstrap_weights(table.shape[1], n_boot, np.random.default_rng(seed))
    out = {}
    for (ranking, k), row in table.iterrows():
        if ranking == BASELINE:
            continue
        values = row.to_numpy(dtype=float)
        paired = np.isfinite(values) & np.isfinite(base)
        if not paired.any():
            continue
        before, after = base[paired], values[paired]
        if not before.mean() > 0:
            raise InvalidInput(f"{metric!r} on {task!r} is 0 without ablation on the trials of {ranking!r} at k={k}.")
        total = counts[:, paired] @ before
        lost = counts[:, paired] @ (before - after)
        samples = np.divide(lost, total, out=np.full(n_boot, np.nan), where=total > 0)
        out[str(ranking), int(k)] = (float((before - after).sum() / before.sum()), samples, int(paired.sum()))
    return out
