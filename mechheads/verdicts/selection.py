"""The best heads of a set of calibration trials."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head, HeadSet
from mechheads.stats import check_count
from mechheads.verdicts.balance import MIN_TRIALS, concerns
from mechheads.verdicts.decisions import accuracy, align, check_some, offsets
from mechheads.verdicts.discrimination import auroc_parts

CRITERIA = ("accuracy", "auroc")
_CLOSE = 1e-10


def select(
    scores: CandidateScores,
    k: int = 1,
    *,
    by: str = "accuracy",
    offset: str = "none",
    inverse: bool = False,
    min_trials: int = MIN_TRIALS,
) -> HeadSet:
    """The k best heads of these trials, best first. Give calibration trials, and report the heads on others.

    Heads that tie are ordered by the other criterion, then by layer and head.

    Args:
        scores: Scores on calibration trials.
        k: How many heads.
        by: ``"accuracy"``, or ``"auroc"`` (blind to a head's standing preference for one answer).
        offset: ``"none"`` or ``"median"`` (``offsets``), for accuracy.
        inverse: Take the heads that are most reliably *wrong* instead, worst first. They are of use only with their
            sign turned: ``evaluate(scores, heads, inverse=heads)``.
        min_trials: Warn with fewer trials than this; 0 for never.

    Warns:
        UserWarning: With the numbers, if trials are few or unbalanced in label, rule or depth.

    Raises:
        InvalidInput: If there is no trial, fewer than k heads have scores, or ``inverse`` is neither True nor False.
        UnknownName: If the criterion or the offset is unknown.
    """
    check_some(scores)
    check_count("min_trials", min_trials, least=0)
    if not isinstance(inverse, bool):
        raise InvalidInput(f"inverse is {inverse!r}; give True (the heads most reliably wrong) or False.")
    check_criterion(by)
    scores = align(scores)
    right = accuracy(scores, offsets(scores, offset))
    chosen = best_heads([scores], [right], k, by=by, inverse=inverse)
    found = concerns(scores, min_trials=min_trials)
    if found:
        warnings.warn(f"Heads were chosen on weak calibration trials. {' '.join(found)}", stacklevel=2)
    return chosen


def check_criterion(by: str) -> None:
    """Refuse a criterion that there is not."""
    if by not in CRITERIA:
        raise UnknownName("criterion", by, CRITERIA)


def best_heads(
    parts: Sequence[CandidateScores],
    rights: Sequence[np.ndarray],
    k: int,
    *,
    by: str = "accuracy",
    inverse: bool = False,
) -> HeadSet:
    """The k best heads over one or several sets of trials, each set counting alike.

    Args:
        parts: Scores with candidates in one order each.
        rights: Accuracies ``[layer head]`` on each of them.
        k: How many heads.
        by: ``"accuracy"`` or ``"auroc"``; the other breaks ties (AUROC is taken only of heads that tie).
        inverse: The worst instead.
    """
    check_count("k", k)
    right = np.mean(rights, axis=0)
    flat = right.ravel()
    defined = int(np.isfinite(flat).sum())
    if k > defined:
        raise InvalidInput(f"k is {k}, but only {defined} heads have a score in every trial; ask for no more.")
    sign = 1.0 if inverse else -1.0
    first = np.where(np.isfinite(flat), sign * flat, np.inf)
    second = np.full(flat.size, np.inf)
    able = np.flatnonzero(first <= np.sort(first)[k - 1] + _CLOSE if by == "accuracy" else np.isfinite(first))
    areas = np.mean([_areas(part, able) for part in parts], axis=0)
    if by == "auroc" and np.isnan(areas).all():
        raise InvalidInput("one candidate is right in every trial, so no AUROC exists; use by='accuracy'.")
    second[able] = sign * np.nan_to_num(areas, nan=0.5)
    if by == "auroc":
        first, second = second, first
    # What is equal on paper differs in the last digits.
    order = np.lexsort((np.arange(flat.size), np.round(second, 10), np.round(first, 10)))
    return HeadSet(Head(*divmod(int(i), right.shape[1])) for i in order[:k])


def _areas(scores: CandidateScores, able: np.ndarray) -> np.ndarray:
    """AUROC of some heads, by their place in ``[layer x head]``."""
    values = scores.values.reshape(*scores.values.shape[:2], -1)[:, :, able]
    return auroc_parts(values, scores.labels, scores.n_candidates)[0]
