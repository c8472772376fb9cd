"""AUROC of every head: whether it scores a candidate higher where that is the answer than where it is not."""

from __future__ import annotations

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.verdicts.decisions import ROUNDING, align, centred, check_some
from mechheads.verdicts.resampling import intervals

_HEADS = 512  # heads worked on at once


def auroc(scores: CandidateScores) -> np.ndarray:
    """Area under the ROC curve of each head, which no standing preference of the head for one answer can move.

    For a candidate index c that is the answer in some trials and not in others: the probability that the centred score
    ``S_c - mean_j S_j`` is higher in a trial whose answer is c than in one whose answer is another, ties counting half.
    The mean over such c. For two candidates this is the AUROC of the margin ``S_1 - S_0``. A calibration offset shifts
    all scores of a candidate alike and leaves it as it is. Candidates that stand in another order from trial to trial
    are brought into one first (``align``).

    Returns:
        ``[layer head]`` float64: 0.5 is chance, below it the head speaks for the wrong answer; NaN for heads that lack
        a score, and where no index is the answer in some trials only.

    Raises:
        InvalidInput: If there is no trial.
    """
    check_some(scores)
    scores = align(scores)
    flat = scores.values.reshape(*scores.values.shape[:2], -1)
    out = np.empty(flat.shape[2])
    for start in range(0, len(out), _HEADS):
        block = slice(start, start + _HEADS)
        out[block] = auroc_parts(flat[:, :, block], scores.labels, scores.n_candidates)[0]
    return out.reshape(scores.values.shape[2:])


def auroc_intervals(
    scores: CandidateScores, *, level: float = 0.95, n_boot: int = 2000, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """Bootstrap intervals of ``auroc``, ``(low, high)`` each ``[layer head]``.

    Resampling every head's ranking would cost a sort per sample. An AUROC is a two-sample U-statistic, so each trial's
    first-order share in it (its *placement*: the part of the other class that it beats) is resampled instead, over
    whole groups; what this leaves out is of the order of 1/n of the trials. Of a head that separates all trials,
    Wilson's interval for as many trials as the rarer class has is given.
    """
    check_some(scores)
    scores = align(scores)
    flat = scores.values.reshape(*scores.values.shape[:2], -1)
    ends = np.empty((2, flat.shape[2]))
    counts = [int((scores.labels == c).sum()) for c in range(flat.shape[1])]
    rarer = max(1, min((min(n, len(scores) - n) for n in counts if 0 < n < len(scores)), default=1))
    for start in range(0, flat.shape[2], _HEADS):
        block = slice(start, start + _HEADS)
        value, share = auroc_parts(flat[:, :, block], scores.labels, scores.n_candidates)
        ends[:, block] = intervals(value + share, scores.groups, level=level, n_boot=n_boot, seed=seed, n_even=rarer)
    return ends[0].reshape(scores.values.shape[2:]), ends[1].reshape(scores.values.shape[2:])


def auroc_parts(values: np.ndarray, labels: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """AUROC and each trial's first-order share in it.

    Args:
        values: Scores ``[trial candidate head]``.
        labels: ``[trial]``.
        counts: ``[trial]`` number of candidates.

    Returns:
        ``[head]``, and ``[trial head]`` with mean zero over trials: a sample that draws trial t ``w_t`` times has about
        the AUROC ``value + sum_t w_t share_t / sum_t w_t``.
    """
    n, width, heads = values.shape
    middle = centred(values, counts)
    total, share, used = np.zeros(heads), np.zeros((n, heads)), 0
    # The two indices of two candidates mirror each other.
    for c in (1,) if width == 2 else range(width):
        there = np.flatnonzero(counts > c)
        positive = labels[there] == c
        if positive.all() or not positive.any():
            continue
        placed = _placements(_without_rounding(middle[there, c], values), positive)
        area = placed[positive].mean(axis=0)
        total, used = total + area, used + 1
        away = placed - area
        away[positive] *= n / positive.sum()
        away[~positive] *= n / (~positive).sum()
        share[there] += away
    if not used:
        return np.full(heads, np.nan), np.full((n, heads), np.nan)
    there = np.arange(width)[None, :, None] < counts[:, None, None]
    undefined = (there & np.isnan(values)).any(axis=(0, 1))
    return np.where(undefined, np.nan, total / used), np.where(undefined, np.nan, share / used)


def _without_rounding(x: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Centred scores ``[trial head]``, all alike for heads in which they differ by less than float32 can tell."""
    size = np.fmax.reduce(np.abs(values), axis=(0, 1))
    return np.where(np.ptp(x, axis=0) <= ROUNDING * size, 0.0, x)


def _placements(x: np.ndarray, positive: np.ndarray) -> np.ndarray:
    """For a positive trial the part of the negatives below it, for a negative that of the positives above; ties half.

    A trial's rank among all less its rank within its own class counts those of the other class below it.
    """
    from scipy.stats import rankdata

    ranks = rankdata(x, axis=0)
    out = np.empty(x.shape)
    for mine in (positive, ~positive):
        others = len(x) - mine.sum()
        out[mine] = (ranks[mine] - rankdata(x[mine], axis=0)) / others
    out[~positive] = 1 - out[~positive]
    return out
