"""Dose and response: what each further head, or each head alone, does to the metric."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats.comparing import correct
from mechheads.sweep_stats.joint import ALONE, Joint, Key, check_names, flip_tests, joints, per_label, the_metric
from mechheads.sweep_stats.whole_curves import tidy

if TYPE_CHECKING:
    import pandas as pd


def dose_response(
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
    """How much the metric changes from each k to the next, and with single heads.

    A row of the kind ``"step"``: ``change = mean(k_to) - mean(k_from)``, paired over the trials of both, for two
    neighbouring k of a ranking, the first from the run without ablation (or, where k counts kept heads, from its own k
    = 0 if that was measured). ``per_head = change / (k_to - k_from)``. It is the effect of the added heads **after**
    those before them; heads that stand in for each other make it differ from what they do alone. A ranking whose only
    cell is one head is of the kind ``"single"``: that head alone against the run without ablation. Below 0: the metric
    falls. Unit: that of the metric.

    p is a two-sided paired sign-flip test; ``p_holm`` is corrected (Holm 1979) for all rows of the same kind.

    Args:
        sweep: A sweep, or a set (column ``intervention``).
        metric: The metric; the sweep's first if None.
        task: Tasks; all if None.
        ranking: Rankings; all if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        n_perm: Number of sign patterns.
        seed: Seed of both.

    Returns:
        A row per task, ranking and step: ``task ranking metric kind k_from k_to heads change ci_low ci_high per_head
        p_value p_holm n_tests n_trials n_draws``; ``heads`` are those added, empty where draws differ or the sets are
        not nested.

    Raises:
        UnknownName: If a name is not in the sweep.
        InvalidInput: If there is no step at all.
    """

    def build(result: SweepResult) -> pd.DataFrame:
        wanted, name = check_names(result, "ranking", ranking), the_metric(result, metric)
        options = {"level": level, "n_boot": n_boot, "seed": seed}
        found = joints({ALONE: result}, name, check_names(result, "task", task), **options)
        rows: list[dict[str, Any]] = []
        for joint in found.values():
            rows += _steps(joint, [r for r in wanted if r in joint.rankings(ALONE)], result, n_perm)
        return correct(tidy(rows, name, **options, n_perm=n_perm), "kind")

    return per_label(sweep, build)


def _steps(joint: Joint, rankings: Sequence[str], result: SweepResult, n_perm: int) -> list[dict[str, Any]]:
    rows, columns = [], []
    for ranking in rankings:
        base = joint.base(ALONE)
        own: list[Key] = [(ALONE, ranking, k) for k in joint.ks(ALONE, ranking)]
        keys = ([base] if base else []) + own
        sets = _sets(result, ranking)
        kind = "single" if [key[2] for key in own] == [1] else "step"
        for before, after in itertools.pairwise(keys):
            terms = [(after, 1.0), (before, -1.0)]
            mask = joint.mask([after, before])
            change = joint.contrast(terms, mask=mask)
            column = np.zeros(len(joint.trials))
            column[mask] = change.per_trial
            columns.append(column)
            rows.append(
                {
                    "task": joint.task,
                    "ranking": ranking,
                    "kind": kind,
                    "k_from": before[2],
                    "k_to": after[2],
                    "heads": _added(sets, before[2], after[2]),
                    "change": change.value,
                    "ci_low": change.ends[0],
                    "ci_high": change.ends[1],
                    "per_head": change.value / (after[2] - before[2]),
                    "p_value": math.nan,
                    "n_trials": change.n,
                    "n_draws": len(joint.cells[after]),
                }
            )
    for row, p in zip(rows, flip_tests(columns, n_perm, joint.seed) if rows else (), strict=True):
        row["p_value"] = float(p) if row["n_trials"] else math.nan
    return rows


def _sets(result: SweepResult, ranking: str) -> dict[int, list[str]]:
    """The one head set of each k, where there is one and it is named in full."""
    frame = result.frame.loc[result.frame["ranking"] == ranking]
    out: dict[int, list[str]] = {0: []}
    for k, texts in frame.groupby("k")["heads"].unique().items():
        heads = texts[0].replace(",", " ").split()
        if len(texts) == 1 and len(heads) == k:
            out[int(str(k))] = heads
    return out


def _added(sets: dict[int, list[str]], before: int, after: int) -> str:
    """The heads that the greater set has more, if it holds the smaller one."""
    if before not in sets or after not in sets or not set(sets[before]) <= set(sets[after]):
        return ""
    return " ".join(head for head in sets[after] if head not in sets[before])
