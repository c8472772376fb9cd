"""Whole curves as one number: the area over them, and the k at which half is gone."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput
from mechheads.sweep_cells import area
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats.joint import ALONE, Joint, Key, check_names, joints, per_label, refuse_kept, the_metric
from mechheads.sweep_stats.ratio import share_left

if TYPE_CHECKING:
    import pandas as pd

Worst = float | int | Mapping[str, float]


def worst_of(worst: Worst, task: str) -> float:
    """Value at which nothing is left of a task, from one number or one a task."""
    value = worst.get(task, 0.0) if isinstance(worst, Mapping) else worst
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise InvalidInput(f"worst is {value!r} for {task!r}; give the value at which nothing is left, a number.")
    return float(value)


def area_terms(label: str, ranking: str, ks: Sequence[int], base: Key | None) -> list[tuple[Key, float]]:
    """The trapezoid over k, divided by its range, as weights of cells; k = 0 is the base where there is one."""
    weights = area(list(ks), np.eye(len(ks)))
    keys = [base if k == 0 and base is not None else (label, ranking, k) for k in ks]
    return [(key, float(w)) for key, w in zip(keys, weights, strict=True)]


def areas(
    sweep: SweepResult | SweepSet,
    metric: str | None = None,
    task: Sequence[str] | str | None = None,
    ranking: Sequence[str] | str | None = None,
    *,
    worst: Worst = 0.0,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Area over each curve, as a share of the baseline: ``over = 1 - (auc - worst) / (baseline - worst)``.

    auc is the trapezoid rule over k, from 0, divided by the greatest k: the mean height of the curve. So ``over`` is
    the share of the metric that ablation takes away, on average over k: 0 nothing, 1 (nearly) everything from the
    first head on, below 0 ablation helps. Only trials that are measured at every k of the ranking count. Areas of
    rankings with other k cannot be compared; ``compare_rankings`` uses the k in common.

    Args:
        sweep: A sweep, or a set: then every sweep of it that ablates the sets, in the column ``intervention``.
        metric: The metric; the sweep's first if None.
        task: Tasks; all if None.
        ranking: Rankings; all if None.
        worst: Value of the metric at which nothing is left (such as chance), or one a task.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        A row per task and ranking: ``task ranking metric auc auc_low auc_high baseline over over_low over_high valid
        reason k_max n_k n_trials n_draws``; ``over`` and its ends are NaN where not valid, and ``reason`` says why.

    Raises:
        UnknownName: If a name is not in the sweep.
        InvalidInput: If a ranking has fewer than two k, the baseline counted, or k counts kept heads.
    """

    def build(result: SweepResult) -> pd.DataFrame:
        refuse_kept(result, "an area over the curve")
        wanted, name = check_names(result, "ranking", ranking), the_metric(result, metric)
        options = {"level": level, "n_boot": n_boot, "seed": seed}
        found = joints({ALONE: result}, name, check_names(result, "task", task), **options)
        rows = [
            _area_row(joint, one, worst_of(worst, joint.task))
            for joint in found.values()
            for one in wanted
            if one in joint.rankings(ALONE)
        ]
        return tidy(rows, name, **options)

    return per_label(sweep, build)


def tidy(rows: list[dict[str, Any]], metric: str, **options: Any) -> pd.DataFrame:
    """A table with the column ``metric`` and the options in ``attrs``; refused if there is no row."""
    import pandas as pd

    if not rows:
        raise InvalidInput(f"{metric!r} was measured for none of the rankings on the tasks asked for.")
    frame = pd.DataFrame(rows)
    if "metric" not in frame:
        frame.insert(2, "metric", metric)
    frame.attrs = {**options}
    return frame


def _area_row(joint: Joint, ranking: str, worst: float) -> dict[str, Any]:
    base, own = joint.base(ALONE), joint.ks(ALONE, ranking)
    ks = ([0] if base else []) + own
    if len(ks) < 2:
        raise InvalidInput(
            f"{ranking!r} on {joint.task!r} has only k={ks}; an area needs two values of k "
            "(the baseline counts as k=0)."
        )
    terms = area_terms(ALONE, ranking, ks, base)
    height, over = joint.contrast(terms), share_left(joint, terms, base, worst=worst)
    lost = over.ratio.lost()
    return {
        "task": joint.task,
        "ranking": ranking,
        "auc": height.value,
        "auc_low": height.ends[0],
        "auc_high": height.ends[1],
        "baseline": over.before,
        "over": lost.value,
        "over_low": lost.low,
        "over_high": lost.high,
        "valid": lost.valid,
        "reason": lost.reason,
        "k_max": ks[-1],
        "n_k": len(ks),
        "n_trials": height.n,
        "n_draws": max(len(joint.cells[ALONE, ranking, k]) for k in own),
    }


def minimal_k(
    sweep: SweepResult | SweepSet,
    metric: str | None = None,
    task: Sequence[str] | str | None = None,
    ranking: Sequence[str] | str | None = None,
    *,
    share: float = 0.5,
    worst: Worst = 0.0,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> pd.DataFrame:
    """Fewest ablated heads, of the k measured, at which no more than a share of the baseline is left.

    The least measured k with ``mean(k) - worst <= share * (baseline - worst)``; nothing is put between two measured k.
    Each bootstrap sample (trials, and draws where there are several) finds its own. The interval goes from the samples'
    lower order statistic, or the first k at which the interval of what is left reaches down to the share, whichever is
    less, to their upper one, or the first k at which it lies below the share, whichever is more. A curve that never
    falls so far is censored: ``k`` is NaN, ``k_high`` is infinite, and ``told`` says "not reached by k = ...". Where
    the baseline itself is nothing, the row is not valid, with the reason.

    Args:
        sweep: A sweep, or a set (column ``intervention``).
        metric: The metric; the sweep's first if None.
        task: Tasks; all if None.
        ranking: Rankings; all if None.
        share: Share of the baseline that may be left, 0 to below 1: 0.5 is half.
        worst: Value of the metric at which nothing is left, or one a task.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        A row per task and ranking: ``task ranking metric share k k_low k_high reached told valid reason k_max n_trials
        n_draws``; ``reached`` is the share of samples in which it is reached.

    Raises:
        UnknownName: If a name is not in the sweep.
        InvalidInput: If the share is out of range, or k counts kept heads.
    """
    if not 0 <= share < 1:
        raise InvalidInput(f"share is {share!r}; give the share of the baseline that may be left, 0 to below 1.")

    def build(result: SweepResult) -> pd.DataFrame:
        refuse_kept(result, "a k that halves the metric")
        wanted, name = check_names(result, "ranking", ranking), the_metric(result, metric)
        options = {"level": level, "n_boot": n_boot, "seed": seed}
        found = joints({ALONE: result}, name, check_names(result, "task", task), **options)
        rows = [
            _minimal_row(joint, one, float(share), worst_of(worst, joint.task))
            for joint in found.values()
            for one in wanted
            if one in joint.rankings(ALONE)
        ]
        return tidy(rows, name, **options)

    return per_label(sweep, build)


def _minimal_row(joint: Joint, ranking: str, share: float, worst: float) -> dict[str, Any]:
    ks, base = joint.ks(ALONE, ranking), joint.base(ALONE)
    keys: list[Key] = [(ALONE, ranking, k) for k in ks]
    row: dict[str, Any] = {
        "task": joint.task,
        "ranking": ranking,
        "share": share,
        "k": math.nan,
        "k_low": math.nan,
        "k_high": math.nan,
        "reached": math.nan,
        "told": "",
        "valid": False,
        "reason": "",
        "k_max": ks[-1],
        "n_trials": 0,
        "n_draws": max(len(joint.cells[key]) for key in keys),
    }
    # The share of the mean over all k is refused for the same reasons as that at each k, on the same trials.
    left = share_left(joint, [(key, 1 / len(keys)) for key in keys], base, worst=worst).ratio
    row |= {"n_trials": left.n, "valid": left.valid, "reason": left.reason}
    if not left.valid or base is None:
        return row | {"told": f"cannot be said: {left.reason}"}
    mask = joint.mask([base, *keys])
    before = joint.contrast([(base, 1.0)], mask=mask)
    gaps = [joint.contrast([(key, 1.0), (base, -share)], mask=mask) for key in keys]
    # What is left above the share that may be, in every sample, at every k; the worst value counts as 0.
    above = [joint.sign * (np.array([gap.value, *gap.samples]) - (1 - share) * worst) for gap in gaps]
    fallen = np.array(above) <= 1e-12 * max(1.0, abs(before.value))
    least = np.where(fallen.any(axis=0), np.array(ks, dtype=float)[fallen.argmax(axis=0)], math.inf)
    k, samples = float(least[0]), least[1:]
    low = float(np.quantile(samples, (1 - joint.level) / 2, method="lower"))
    high = float(np.quantile(samples, (1 + joint.level) / 2, method="higher"))
    # Where trials are few or all alike, samples agree on more than is known: each k's own interval has its say.
    own = [[joint.sign * (end - (1 - share) * worst) for end in gap.ends] for gap in gaps]
    low = min(low, k, *(float(at) for at, ends in zip(ks, own, strict=True) if min(ends) <= 0))
    high = max(high, k, min((float(at) for at, ends in zip(ks, own, strict=True) if max(ends) <= 0), default=math.inf))
    return row | {
        "k": k if math.isfinite(k) else math.nan,
        "k_low": low,
        "k_high": high,
        "reached": float(np.isfinite(samples).mean()),
        "told": _told(k, low, high, ks[-1]),
    }


def _told(k: float, low: float, high: float, most: int) -> str:
    """``"k = 5 [1, 10]"``, or that it is not reached."""
    never = f"not reached by k = {most}"
    ends = [f"{end:.0f}" if math.isfinite(end) else never for end in (low, high)]
    if not math.isfinite(k):
        return never if ends[0] == never else f"{never} [{ends[0]}, {never}]"
    return f"k = {k:.0f} [{ends[0]}, {ends[1]}]"
