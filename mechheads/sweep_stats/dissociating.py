"""Whether a task loses more than other tasks do: the share lost on the target, less that on a control."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput
from mechheads.stats import check_count
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats.comparing import correct
from mechheads.sweep_stats.joint import ALONE, Joint, check_names, joints, per_label, refuse_kept, the_metric
from mechheads.sweep_stats.ratio import Ratio, Share, share_left
from mechheads.sweep_stats.whole_curves import Worst, tidy, worst_of

if TYPE_CHECKING:
    import pandas as pd


def task_dissociation(
    sweep: SweepResult | SweepSet,
    target: str,
    controls: Sequence[str] | str | None = None,
    metric: str | None = None,
    *,
    control_metric: Mapping[str, str] | str | None = None,
    ranking: Sequence[str] | str | None = None,
    worst: Worst = 0.0,
    level: float = 0.95,
    n_boot: int = 2000,
    n_perm: int = 5000,
    seed: int = 0,
) -> pd.DataFrame:
    """Share lost on the target less share lost on each control, at every k of every ranking.

    ``lost = 1 - (mean(k) - worst) / (baseline - worst)`` on each task, ``difference = lost on target - lost on
    control``: 1 where the target is gone and the control untouched, 0 where both suffer alike, below 0 where the
    control suffers more. It is the score of ``agreement.selectivity`` (arXiv 2607.01002), which raises where there is
    no baseline to lose a share of; here such a row is not valid and says why, and there are tests and several controls.

    Intervals: bootstrap over trials within each task, and over draws where there are several; the tasks' trials are not
    the same, so that of the difference is put together from the two (``difference -/+ sqrt(sum of squared distances to
    the ends)``: Zou, Donner, Statistics in Medicine 27, 2008). p is a two-sided permutation test that the two tasks
    lose the same share: each trial stands with ``lost - (a - left b) / mean(b)`` (a and b its values with and without
    ablation, less the worst), whose mean over a task is its share lost; the trials are dealt out to the two tasks anew,
    and Welch's t of the two is compared (studentised, so that tasks of unequal spread do no harm: Chung, Romano, Annals
    of Statistics 41, 2013). ``p_holm`` is corrected for all rows of the table (of one intervention).

    Args:
        sweep: A sweep, or a set (column ``intervention``).
        target: The task that should suffer.
        controls: The tasks that should not; all others if None.
        metric: Metric of the target; the sweep's first if None.
        control_metric: Metric of the controls, or one a control; that of the target if None.
        ranking: Rankings; all if None.
        worst: Value at which nothing is left, or one a task.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        n_perm: Number of permutations.
        seed: Seed of both.

    Returns:
        A row per control, ranking and k: ``target control metric control_metric ranking k lost lost_low lost_high
        control_lost control_low control_high difference ci_low ci_high p_value p_holm n_tests valid reason n_trials
        n_control_trials``.

    Raises:
        UnknownName: If a name is not in the sweep.
        InvalidInput: If there is no control, or no cell in common, or k counts kept heads.
    """
    check_count("n_perm", n_perm)

    def build(result: SweepResult) -> pd.DataFrame:
        refuse_kept(result, "a share lost")
        name = the_metric(result, metric)
        check_names(result, "task", target)
        others = [t for t in check_names(result, "task", controls) if controls is not None or t != target]
        if not others or target in others:
            raise InvalidInput(f"the controls of {target!r} are {others}; give other tasks of {result.tasks}.")
        options = {"level": level, "n_boot": n_boot, "seed": seed}
        own = joints({ALONE: result}, name, [target], **options)[target]
        rows = []
        for control in others:
            measure = control_metric.get(control) if isinstance(control_metric, Mapping) else control_metric
            measure = the_metric(result, measure or name)
            other = joints({ALONE: result}, measure, [control], **options)[control]
            rows += _rows(own, other, check_names(result, "ranking", ranking), worst, n_perm)
        return correct(tidy(rows, name, **options, n_perm=n_perm), "metric")

    return per_label(sweep, build)


def _rows(own: Joint, other: Joint, rankings: Sequence[str], worst: Worst, n_perm: int) -> list[dict[str, Any]]:
    """The rows of one control."""
    rows = []
    for ranking in rankings:
        for k in sorted(set(own.ks(ALONE, ranking)) & set(other.ks(ALONE, ranking))):
            terms = [((ALONE, ranking, k), 1.0)]
            shares = [share_left(j, terms, j.base(ALONE), worst=worst_of(worst, j.task)) for j in (own, other)]
            lost, control = (share.ratio.lost() for share in shares)
            row: dict[str, Any] = {
                "target": own.task,
                "control": other.task,
                "metric": own.metric,
                "control_metric": other.metric,
                "ranking": ranking,
                "k": k,
                **_columns("lost", "lost", lost),
                **_columns("control_lost", "control", control),
                "difference": math.nan,
                "ci_low": math.nan,
                "ci_high": math.nan,
                "p_value": math.nan,
                "p_holm": math.nan,
                "n_tests": 0,
                "valid": lost.valid and control.valid,
                "reason": _reason(own.task, lost, other.task, control),
                "n_trials": lost.n,
                "n_control_trials": control.n,
            }
            rows.append(row | _difference(shares, own, n_perm) if row["valid"] else row)
    return rows


def _columns(name: str, ends: str, ratio: Ratio) -> dict[str, float]:
    return {name: ratio.value, f"{ends}_low": ratio.low, f"{ends}_high": ratio.high}


def _reason(target: str, lost: Ratio, control: str, other: Ratio) -> str:
    """Why there is no difference, task by task."""
    return "; ".join(f"{task}: {ratio.reason}" for task, ratio in ((target, lost), (control, other)) if not ratio.valid)


def _difference(shares: Sequence[Share], joint: Joint, n_perm: int) -> dict[str, float]:
    """The difference with its interval and p."""
    own, other = shares
    value = other.ratio.value - own.ratio.value
    # Of the tasks' own intervals, which also know what may hide behind trials that all did the same.
    low = value - math.hypot(other.ratio.value - other.ratio.low, own.ratio.high - own.ratio.value)
    high = value + math.hypot(other.ratio.high - other.ratio.value, own.ratio.value - own.ratio.low)
    p = two_sample_test(-own.influence, -other.influence, n_perm=n_perm, seed=joint.seed)
    return {"difference": value, "ci_low": low, "ci_high": high, "p_value": p}


def two_sample_test(x: np.ndarray, y: np.ndarray, *, n_perm: int = 5000, seed: int = 0) -> float:
    """Two-sided permutation p that two groups of trials have the same mean, by Welch's t.

    All ways to deal the trials out to the two groups are gone through if they are at most n_perm; else n_perm are drawn
    and ``p = (# + 1) / (n_perm + 1)``. NaN for fewer than two trials in a group.
    """
    n, both = len(x), np.concatenate([x, y])
    if min(n, len(y)) < 2:
        return math.nan
    total = math.comb(len(both), n)
    rng = np.random.default_rng(seed)
    if total <= n_perm:
        chosen = np.array(list(itertools.combinations(range(len(both)), n)))
        inside = np.zeros((total, len(both)), dtype=bool)
        np.put_along_axis(inside, chosen, True, axis=1)
    else:
        first = np.zeros((n_perm, len(both)), dtype=bool)
        first[:, :n] = True
        inside = rng.permuted(first, axis=1)
    observed = np.zeros((1, len(both)), dtype=bool)
    observed[0, :n] = True
    reach = _welch(observed, both)[0] * (1 - 1e-9)
    hits = int((_welch(inside, both) >= reach).sum())
    return hits / total if total <= n_perm else (hits + 1) / (n_perm + 1)


def _welch(inside: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Size of Welch's t of the trials inside against those outside, ``[sample trial]`` to ``[sample]``."""
    # About the common mean, so that no digits are lost.
    values = values - values.mean()
    means, errors = [], []
    for group in (inside, ~inside):
        n = group.sum(axis=1)
        mean = group @ values / n
        means.append(mean)
        errors.append((group @ values**2 / n - mean**2) / (n - 1))
    apart, error = np.abs(means[0] - means[1]), np.maximum(errors[0] + errors[1], 0.0)
    # Rounding alone makes neither a difference nor a spread.
    scale = np.abs(values).max()
    apart = np.where(apart < 1e-9 * scale, 0.0, apart)
    error = np.where(error < 1e-18 * scale**2, 0.0, error)
    without = np.where(apart > 0, np.inf, 0.0)
    return np.divide(apart, np.sqrt(error), out=without, where=error > 0)
