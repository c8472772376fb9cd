"""Necessity beside sufficiency: what is left without a set of heads, and what the set alone still does."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mechheads.errors import InvalidInput
from mechheads.sweep_set import KEPT_SUFFIX, SweepSet
from mechheads.sweep_stats.joint import Joint, Key, check_names, joints, the_metric
from mechheads.sweep_stats.ratio import Ratio, share_left
from mechheads.sweep_stats.whole_curves import Worst, tidy, worst_of

if TYPE_CHECKING:
    import pandas as pd


def necessity_sufficiency(
    sweeps: SweepSet,
    label: str | None = None,
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
    """What ablating a set takes away, and what the set alone keeps, at every k of both sides.

    ``necessity = 1 - (ablated - worst) / (baseline - worst)``: the share lost without the set; 1 = nothing is left.
    ``sufficiency = (kept - worst) / (baseline - worst)``: the share left when every other head is ablated; 1 = as good
    as the whole model. Both are paired with the run without ablation of the ablated side.

    ``call`` compares both intervals with ``share``: ``"necessary and sufficient"``, ``"necessary"`` (and not
    sufficient), ``"sufficient"`` (and not necessary), ``"neither"``; ``"unsettled"`` where an interval holds the share,
    and empty where a ratio is not valid. A high sufficiency means little where the model keeps as much without any
    head: ``empty`` is the mean there (k = 0 of the kept side), NaN if not measured.

    Args:
        sweeps: A set with a label and its complement, such as ``"mean"`` and ``"mean, kept"``.
        label: The label; the first that has a complement if None.
        metric: The metric; the sweep's first if None.
        task: Tasks; all if None.
        ranking: Rankings; all if None.
        share: Share of the baseline from which a set counts as necessary, or sufficient, between 0 and 1.
        worst: Value at which nothing is left, or one a task.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.

    Returns:
        A row per task, ranking and k above 0: ``task ranking metric k baseline ablated kept empty necessity
        necessity_low necessity_high sufficiency sufficiency_low sufficiency_high call valid reason n_trials``, with
        ``ablated_low ablated_high kept_low kept_high`` beside their means.

    Raises:
        UnknownName: If a name is not in the set.
        InvalidInput: If there is no complement, or the sides share no cell.
    """
    if not 0 < share < 1:
        raise InvalidInput(f"share is {share!r}; give a share of the baseline between 0 and 1.")
    label, other = sides(sweeps, label)
    first = sweeps[label]
    name, rankings = the_metric(first, metric), check_names(first, "ranking", ranking)
    options = {"level": level, "n_boot": n_boot, "seed": seed}
    pair = {label: first, other: sweeps[other]}
    rows = []
    for joint in joints(pair, name, check_names(first, "task", task), **options).values():
        for one in rankings:
            for k in sorted(set(joint.ks(label, one)) & set(joint.ks(other, one)) - {0}):
                rows.append(_row(joint, (label, other), one, k, share, worst_of(worst, joint.task)))
    if not rows:
        raise InvalidInput(f"{label!r} and {other!r} have no ranking and k in common; there is nothing side by side.")
    return tidy(rows, name, **options, intervention=label)


def sides(sweeps: SweepSet, label: str | None) -> tuple[str, str]:
    """A label and its complement.

    Raises:
        UnknownName: If the label is not in the set.
        InvalidInput: If there is no complement, or the label is one.
    """
    if label is not None and sweeps[label].kept:
        raise InvalidInput(
            f"{label!r} is itself a complement; give the label that it belongs to, {label.removesuffix(KEPT_SUFFIX)!r}."
        )
    found = [(one, sweeps.complement(one)) for one in (sweeps.ablated if label is None else [label])]
    for one, other in found:
        if other is not None:
            return one, other
    raise InvalidInput(
        f"the set holds {', '.join(map(repr, sweeps))}, and no complement{f' of {label!r}' if label else ''}; "
        f"sufficiency needs a sweep that ablates all heads but the set, labelled like '{label or 'mean'}{KEPT_SUFFIX}'."
    )


def _row(joint: Joint, labels: tuple[str, str], ranking: str, k: int, share: float, worst: float) -> dict[str, Any]:
    base = joint.base(labels[0])
    keys: list[Key] = [(one, ranking, k) for one in labels]
    means = [joint.contrast([(key, 1.0)]) for key in keys]
    left = [share_left(joint, [(key, 1.0)], base, worst=worst) for key in keys]
    necessity, sufficiency = left[0].ratio.lost(), left[1].ratio
    valid = necessity.valid and sufficiency.valid
    reasons = dict.fromkeys(r.reason for r in (necessity, sufficiency) if r.reason)
    return {
        "task": joint.task,
        "ranking": ranking,
        "k": k,
        "baseline": joint.contrast([(base, 1.0)]).value if base else math.nan,
        "ablated": means[0].value,
        "ablated_low": means[0].ends[0],
        "ablated_high": means[0].ends[1],
        "kept": means[1].value,
        "kept_low": means[1].ends[0],
        "kept_high": means[1].ends[1],
        "empty": _empty(joint, labels[1]),
        "necessity": necessity.value,
        "necessity_low": necessity.low,
        "necessity_high": necessity.high,
        "sufficiency": sufficiency.value,
        "sufficiency_low": sufficiency.low,
        "sufficiency_high": sufficiency.high,
        "call": _call(necessity, sufficiency, share) if valid else "",
        "valid": valid,
        "reason": "; ".join(reasons),
        "n_trials": min(r.n for r in (necessity, sufficiency)),
    }


def _empty(joint: Joint, label: str) -> float:
    """Mean with no head kept, under whichever ranking it stands first."""
    for key in joint.cells:
        if key[0] == label and key[2] == 0:
            return joint.contrast([(key, 1.0)]).value
    return math.nan


def _call(necessity: Ratio, sufficiency: Ratio, share: float) -> str:
    """The two intervals against the share."""
    said = []
    for ratio in (necessity, sufficiency):
        if ratio.low <= share <= ratio.high:
            return "unsettled"
        said.append(ratio.low > share)
    return {
        (True, True): "necessary and sufficient",
        (True, False): "necessary",
        (False, True): "sufficient",
        (False, False): "neither",
    }[said[0], said[1]]
