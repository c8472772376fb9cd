"""Bootstrap over groups of trials, for many heads at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from mechheads.agreement.resampling import widening
from mechheads.errors import InvalidInput
from mechheads.stats import Interval, bootstrap_weights, check_count, check_level, percentiles, wilson

# Samples are worked on in blocks of about this many numbers.
BLOCK = 4_000_000


def group_codes(groups: Sequence[str]) -> np.ndarray:
    """``[trial]`` number of a trial's group, by the groups' sorted names: draws do not depend on the trials' order."""
    return np.unique(np.asarray(groups, dtype=str), return_inverse=True)[1].reshape(-1)


def group_sums(x: np.ndarray, codes: np.ndarray) -> np.ndarray:
    """Sums over the trials of each group: ``[trial ...]`` to ``[group ...]``."""
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    return np.add.reduceat(x[order], starts, axis=0) if len(starts) else x[order]


def check_draws(level: float, n_boot: int, seed: int) -> None:
    """Refuse options of a bootstrap that cannot be."""
    check_level(level)
    check_count("n_boot", n_boot, least=2)
    check_count("seed", seed, least=0)


def intervals(
    x: np.ndarray,
    groups: Sequence[str],
    *,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    low: float = 0.0,
    high: float = 1.0,
    n_even: int | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Percentile bootstrap intervals of the means over trials, one for each column.

    Whole groups are drawn with replacement: questions about one world are not independent. A sample's mean is
    ``sum_g w_g sum_x_g / sum_g w_g n_g``. All columns share the draws. A percentile interval of few groups is too
    narrow, so its ends are moved out from the mean by the factor that makes this good (``widening``).

    Where every trial gives the same number a bootstrap has no width: at the ends of the range Wilson's interval of as
    many trials as there are groups stands in; a difference of 0 in every trial is bounded by how many trials could
    differ at most (Wilson's upper end for none in n).

    Args:
        x: ``[trial column]``; a column with a NaN has no interval.
        groups: ``[trial]`` names of the groups.
        level: Confidence level.
        n_boot: Number of samples.
        seed: Seed of the draws.
        low: Least value x's mean can take.
        high: Greatest.
        n_even: Number of trials for Wilson's interval; the number of groups if None.

    Returns:
        ``(low, high)``, each ``[column]``; NaN with fewer than two groups.
    """
    check_draws(level, n_boot, seed)
    codes = group_codes(groups)
    n_groups = int(codes.max(initial=-1)) + 1
    ends = np.full((2, x.shape[1]), np.nan)
    if n_groups < 2:
        return ends[0], ends[1]
    sizes = group_sums(np.ones(len(codes)), codes)
    counts = bootstrap_weights(n_groups, n_boot, np.random.default_rng(seed)).astype(np.float32)
    total = counts.astype(np.float64) @ sizes
    wide = widening(n_groups, level)
    step = max(1, BLOCK // max(n_boot, len(codes)))
    for start in range(0, x.shape[1], step):
        columns = x[:, start : start + step]
        mean = columns.mean(axis=0)
        # Less the mean, so that single precision keeps its digits for what varies.
        sums = group_sums(columns - mean, codes).astype(np.float32)
        away = np.array(percentiles((counts @ sums) / total[:, None], level))
        block = np.clip(mean + wide * away, low, high)
        same = (columns == columns[0]).all(axis=0)
        for column in np.flatnonzero(same):
            block[:, column] = _even(float(columns[0, column]), n_even or n_groups, level, low, high)
        ends[:, start : start + step] = np.where(np.isnan(mean), np.nan, block)
    return ends[0], ends[1]


def _even(value: float, n: int, level: float, low: float, high: float) -> np.ndarray:
    """Interval of n equal numbers."""
    if value in (low, high):
        end = wilson(n if value == high else 0, n, level=level)
        return low + (high - low) * np.array([end.low, end.high])
    if value == 0:  # inside the range, so a difference
        most = wilson(0, n, level=level).high
        return np.array([-most, most])
    return np.array([value, value])


def interval(
    x: np.ndarray,
    groups: Sequence[str],
    *,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    low: float = 0.0,
    high: float = 1.0,
) -> Interval:
    """``intervals`` of one number a trial."""
    x = np.asarray(x, dtype=np.float64)
    if not x.size:
        raise InvalidInput("there are no trials to take an interval over; give at least one.")
    ends = intervals(x[:, None], groups, level=level, n_boot=n_boot, seed=seed, low=low, high=high)
    return Interval(float(x.mean()), float(ends[0][0]), float(ends[1][0]), level, len(x))
