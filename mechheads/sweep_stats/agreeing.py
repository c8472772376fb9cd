"""Whether zero, mean and resample tell the same story: the interventions of a set side by side."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput, UnknownName
from mechheads.stats import rank_agreement
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats.comparing import correct
from mechheads.sweep_stats.joint import Contrast, Joint, Terms, check_names, flip_tests, joints, the_metric
from mechheads.sweep_stats.whole_curves import area_terms, tidy

if TYPE_CHECKING:
    import pandas as pd

# A rank correlation of fewer rankings than this says nothing.
LEAST_RANKINGS = 3


@dataclass(frozen=True, eq=False)
class InterventionAgreement:
    """Interventions side by side, made by ``compare_interventions``.

    Attributes:
        cells: A row per intervention, task, ranking and k: ``intervention task metric ranking k mean ci_low ci_high
            change change_low change_high direction n_trials``. ``change`` is the mean less that without ablation
            (paired), ``direction`` -1 or 1 where its interval lies below or above 0, else 0.
        pairs: A row per two interventions, task, ranking and k: ``a b metric task ranking k difference ci_low ci_high
            p_value p_holm n_tests opposite apart n_trials``; ``difference = mean under a - mean under b``, paired.
            ``opposite``: both change the metric, each beyond its interval, in different directions. ``apart``: the
            interval of the difference does not hold 0.
        ranks: A row per two interventions, task and k: ``a b metric task of k spearman kendall n_rankings n_trials
            reason``: how alike they order the rankings by mean (``of`` is ``"k"``) or by area (``"area"``, k the
            greatest), over the trials that both define under every one of the rankings.
        level: Confidence level.
    """

    cells: pd.DataFrame
    pairs: pd.DataFrame
    ranks: pd.DataFrame
    level: float

    @property
    def disagreements(self) -> pd.DataFrame:
        """The pairs that are opposite or apart."""
        return self.pairs.loc[self.pairs["opposite"] | self.pairs["apart"]].reset_index(drop=True)


def compare_interventions(
    sweeps: SweepSet,
    metric: str | None = None,
    task: Sequence[str] | str | None = None,
    ranking: Sequence[str] | str | None = None,
    *,
    labels: Sequence[str] | None = None,
    level: float = 0.95,
    n_boot: int = 2000,
    n_perm: int = 20000,
    seed: int = 0,
) -> InterventionAgreement:
    """Put the interventions of a set side by side, cell by cell and ranking by ranking.

    All are compared over the trials that both define, with the same bootstrap trials; draws of random heads are
    averaged within a trial, and resampled together where there are equally many. p is a paired sign-flip test,
    corrected (Holm 1979) for all pairs of the table.

    Args:
        sweeps: The set; complements are left out.
        metric: The metric; the first sweep's first if None.
        task: Tasks; all of the first sweep if None.
        ranking: Rankings; all of the first sweep if None.
        labels: Interventions to compare, in that order; all that ablate the sets if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        n_perm: Number of sign patterns.
        seed: Seed of both.

    Raises:
        UnknownName: If a name is not in the set or its first sweep.
        InvalidInput: If there are fewer than two interventions, or they share no cell.
    """
    names = sweeps.ablated if labels is None else list(dict.fromkeys(labels))
    for name in names:
        if name not in sweeps.ablated:
            raise UnknownName("intervention of the set", name, sweeps.ablated)
    if len(names) < 2:
        raise InvalidInput(f"the set has only the intervention {', '.join(names)!r}; an agreement needs two.")
    first = sweeps[names[0]]
    measure, tasks = the_metric(first, metric), check_names(first, "task", task)
    rankings = check_names(first, "ranking", ranking)
    options = {"level": level, "n_boot": n_boot, "seed": seed}
    found = joints({name: sweeps[name] for name in names}, measure, tasks, **options)
    cells, pairs, ranks = [], [], []
    for joint in found.values():
        cells += [_cell(joint, name, r, k) for name in names for r in rankings for k in joint.ks(name, r)]
        pairs += _pairs(joint, names, rankings, n_perm)
        ranks += _ranks(joint, names, rankings)
    if not pairs:
        raise InvalidInput(f"{' and '.join(names)} share no ranking, k and trial of {measure!r}.")
    return InterventionAgreement(
        cells=tidy(cells, measure, **options),
        pairs=correct(tidy(pairs, measure, **options, n_perm=n_perm), "metric"),
        ranks=tidy(ranks, measure, **options),
        level=level,
    )


def _change(joint: Joint, label: str, ranking: str, k: int) -> Contrast | None:
    """What ablation does to the mean, in the metric's unit."""
    base = joint.base(label)
    return joint.contrast([((label, ranking, k), 1.0), (base, -1.0)]) if base else None


def _direction(change: Contrast | None) -> int:
    """-1 or 1 where the interval of a change leaves 0 out, else 0."""
    if change is None or not math.isfinite(change.ends[0]):
        return 0
    return 1 if change.ends[0] > 0 else -1 if change.ends[1] < 0 else 0


def _cell(joint: Joint, label: str, ranking: str, k: int) -> dict[str, Any]:
    own, change = joint.contrast([((label, ranking, k), 1.0)]), _change(joint, label, ranking, k)
    return {
        "intervention": label,
        "task": joint.task,
        "ranking": ranking,
        "k": k,
        "mean": own.value,
        "ci_low": own.ends[0],
        "ci_high": own.ends[1],
        "change": change.value if change else math.nan,
        "change_low": change.ends[0] if change else math.nan,
        "change_high": change.ends[1] if change else math.nan,
        "direction": _direction(change),
        "n_trials": own.n,
    }


def _pairs(joint: Joint, names: Sequence[str], rankings: Sequence[str], n_perm: int) -> list[dict[str, Any]]:
    """Rows of two interventions at every cell that both have."""
    rows, columns = [], []
    for a, b in itertools.combinations(names, 2):
        for ranking in rankings:
            for k in sorted(set(joint.ks(a, ranking)) & set(joint.ks(b, ranking))):
                terms = [((a, ranking, k), 1.0), ((b, ranking, k), -1.0)]
                mask = joint.mask([key for key, _ in terms])
                if not mask.any():
                    continue
                apart = joint.contrast(terms, mask=mask)
                column = np.zeros(len(joint.trials))
                column[mask] = apart.per_trial
                columns.append(column)
                low, high = apart.ends
                ways = [_direction(_change(joint, name, ranking, k)) for name in (a, b)]
                rows.append(
                    {
                        "a": a,
                        "b": b,
                        "task": joint.task,
                        "ranking": ranking,
                        "k": k,
                        "difference": apart.value,
                        "ci_low": low,
                        "ci_high": high,
                        "p_value": math.nan,
                        "p_holm": math.nan,
                        "n_tests": 0,
                        "opposite": ways[0] * ways[1] < 0,
                        "apart": bool(low > 0 or high < 0),
                        "n_trials": apart.n,
                    }
                )
    for row, p in zip(rows, flip_tests(columns, n_perm, joint.seed) if rows else (), strict=True):
        row["p_value"] = float(p)
    return rows


def _ranks(joint: Joint, names: Sequence[str], rankings: Sequence[str]) -> list[dict[str, Any]]:
    """Rank correlations of the rankings' means, at each k and over areas."""
    rows = []
    for a, b in itertools.combinations(names, 2):
        both = {r: set(joint.ks(a, r)) & set(joint.ks(b, r)) for r in rankings}
        both = {r: ks for r, ks in both.items() if ks}
        for k in sorted(set().union(*both.values())):
            at_k = [r for r, ks in both.items() if k in ks]
            terms = [[[((n, r, k), 1.0)] for r in at_k] for n in (a, b)]
            rows.append({"a": a, "b": b, "task": joint.task, "of": "k", "k": k, **_agreement(joint, terms)})
        common = sorted(set.intersection(*both.values())) if both else []
        ks = ([0] if joint.base(a) and joint.base(b) else []) + common
        if common and len(ks) > 1:
            terms = [[area_terms(n, r, ks, joint.base(n)) for r in both] for n in (a, b)]
            rows.append({"a": a, "b": b, "task": joint.task, "of": "area", "k": ks[-1], **_agreement(joint, terms)})
    return rows


def _agreement(joint: Joint, terms: Sequence[Sequence[Terms]]) -> dict[str, Any]:
    """Both coefficients of the rankings' values under two interventions, or why there are none."""
    mask = joint.mask([key for side in terms for of_ranking in side for key, _ in of_ranking])
    n, trials = len(terms[0]), int(mask.sum())
    row: dict[str, Any] = {
        "spearman": math.nan,
        "kendall": math.nan,
        "n_rankings": n,
        "n_trials": trials,
        "reason": "",
    }
    if n < LEAST_RANKINGS:
        return row | {"reason": f"only {n} ranking{'s' if n > 1 else ''}; an order needs {LEAST_RANKINGS}"}
    if not trials:
        return row | {"reason": "no trial was measured under all rankings of both"}
    x, y = (np.array([joint.contrast(one, mask=mask).value for one in side]) for side in terms)
    if np.ptp(x) < 1e-12 or np.ptp(y) < 1e-12:
        return row | {"reason": "all rankings have the same mean under one of the two"}
    found = rank_agreement(x, y)
    return row | {"spearman": found.spearman, "kendall": found.kendall}
