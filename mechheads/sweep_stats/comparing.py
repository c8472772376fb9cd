"""Rankings against each other: all pairs, at each k and over the whole curve."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput
from mechheads.stats import holm
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats.joint import ALONE, Joint, Key, check_names, flip_tests, joints, per_label, the_metric
from mechheads.sweep_stats.whole_curves import area_terms, tidy

if TYPE_CHECKING:
    import pandas as pd


def compare_rankings(
    sweep: SweepResult | SweepSet,
    metric: str | None = None,
    task: Sequence[str] | str | None = None,
    ranking: Sequence[str] | str | None = None,
    *,
    level: float = 0.95,
    n_boot: int = 2000,
    n_perm: int = 20000,
    seed: int = 0,
) -> pd.DataFrame:
    """Every pair of rankings, at every k that both have and over the area under their curves.

    ``difference = mean_a - mean_b`` over the trials that both define, in the metric's unit; for an area, of the
    trapezoid over the k in common, divided by their range. Where more is better, below 0 means that a's heads matter
    more (where k counts kept heads, above 0: that a's suffice better). Intervals are paired bootstraps over trials, and
    over draws where there are several. p is a two-sided paired sign-flip test over trials; draws are averaged within a
    trial first, so with random heads it is about **these** draws: ask ``SweepResult.beyond_control`` about random sets
    in general.

    ``p_holm`` is corrected (Holm 1979) for all comparisons of the table (of one intervention) of the same kind, those
    at single k and those of areas counting apart; ``n_tests`` says for how many.

    With no head kept (k = 0 where k counts kept heads) all rankings are the same, so nothing is compared there.

    Args:
        sweep: A sweep, or a set (column ``intervention``).
        metric: The metric; the sweep's first if None.
        task: Tasks; all if None.
        ranking: Rankings to compare; all if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        n_perm: Number of sign patterns.
        seed: Seed of both.

    Returns:
        A row per task, kind, k and pair: ``task of metric k a b mean_a mean_b difference ci_low ci_high p_value p_holm
        n_tests n_trials n_draws_a n_draws_b``; ``of`` is ``"k"`` or ``"area"``, and k the greatest for an area.

    Raises:
        UnknownName: If a name is not in the sweep.
        InvalidInput: If there are fewer than two rankings, or no pair of them shares a k and a trial.
    """

    def build(result: SweepResult) -> pd.DataFrame:
        wanted, name = check_names(result, "ranking", ranking), the_metric(result, metric)
        if len(set(wanted)) < 2:
            raise InvalidInput(f"there is only the ranking {', '.join(wanted)!r}; a comparison needs two.")
        options = {"level": level, "n_boot": n_boot, "seed": seed}
        found = joints({ALONE: result}, name, check_names(result, "task", task), **options)
        rows: list[dict[str, Any]] = []
        for joint in found.values():
            rows += _pairs(joint, [r for r in wanted if r in joint.rankings(ALONE)], n_perm)
        if not rows:
            raise InvalidInput(f"no two of {', '.join(wanted)} share a k and a trial of {name!r}.")
        return correct(tidy(rows, name, **options, n_perm=n_perm))

    return per_label(sweep, build)


def correct(frame: pd.DataFrame, by: str = "of") -> pd.DataFrame:
    """Fill ``p_holm`` and ``n_tests`` from ``p_value``, kind by kind; rows without a p count as no test."""
    frame["p_holm"], frame["n_tests"] = np.nan, 0
    for _, rows in frame.groupby(by, sort=False):
        tested = rows.index[np.isfinite(rows["p_value"])]
        if len(tested):
            frame.loc[tested, "p_holm"] = holm(rows.loc[tested, "p_value"].to_numpy())
            frame.loc[rows.index, "n_tests"] = len(tested)
    return frame


def _pairs(joint: Joint, rankings: Sequence[str], n_perm: int) -> list[dict[str, Any]]:
    """Rows of one task, with their p."""
    rows, columns = [], []
    for a, b in itertools.combinations(rankings, 2):
        own = [joint.ks(ALONE, r) for r in (a, b)]
        common = sorted(set(own[0]) & set(own[1]))
        base = joint.base(ALONE)
        kinds: list[tuple[str, int, Any]] = [("k", k, [[((ALONE, r, k), 1.0)] for r in (a, b)]) for k in common if k]
        ks = ([0] if base else []) + common
        if len(ks) > 1:
            kinds.append(("area", ks[-1], [area_terms(ALONE, r, ks, base) for r in (a, b)]))
        for of, k, sides in kinds:
            row, column = _pair(joint, of, k, (a, b), sides)
            if row:
                rows.append(row)
                columns.append(column)
    if rows:
        for row, p in zip(rows, flip_tests(columns, n_perm, joint.seed), strict=True):
            row["p_value"] = float(p)
    return rows


def _pair(
    joint: Joint, of: str, k: int, names: tuple[str, str], sides: list[list[tuple[Key, float]]]
) -> tuple[dict[str, Any], np.ndarray]:
    """One row without its p, and its differences over all trials, 0 where a trial lacks one."""
    mask = joint.mask([key for side in sides for key, _ in side])
    if not mask.any():
        return {}, np.empty(0)
    means = [joint.contrast(side, mask=mask).value for side in sides]
    # The baseline stands in both areas and cancels.
    weights: dict[Key, float] = {}
    for sign, side in zip((1.0, -1.0), sides, strict=True):
        for key, weight in side:
            weights[key] = weights.get(key, 0.0) + sign * weight
    apart = joint.contrast(list(weights.items()), mask=mask)
    column = np.zeros(len(joint.trials))
    column[mask] = apart.per_trial
    draws = [max(len(joint.cells[key]) for key, _ in side) for side in sides]
    return {
        "task": joint.task,
        "of": of,
        "k": k,
        "a": names[0],
        "b": names[1],
        "mean_a": means[0],
        "mean_b": means[1],
        "difference": apart.value,
        "ci_low": apart.ends[0],
        "ci_high": apart.ends[1],
        "p_value": np.nan,
        "p_holm": np.nan,
        "n_tests": 0,
        "n_trials": apart.n,
        "n_draws_a": draws[0],
        "n_draws_b": draws[1],
    }, column
