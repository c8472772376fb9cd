"""Intervals and tests over trials. Plain numbers in, plain numbers out.

The unit of resampling is always the trial: answer steps and draws inside a trial are not independent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from mechheads.errors import InvalidInput


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval.

    Attributes:
        estimate: The statistic on the data as they are.
        low: Lower end; NaN if there are too few trials for an interval.
        high: Upper end; NaN likewise.
        level: Confidence level, 0 to 1.
        n: Number of trials.
    """

    estimate: float
    low: float
    high: float
    level: float
    n: int

    def __str__(self) -> str:
        if math.isnan(self.low):
            return f"{self.estimate:.2f} [no interval, n={self.n}]"
        return f"{self.estimate:.2f} [{self.low:.2f}, {self.high:.2f}]"


@dataclass(frozen=True)
class RankAgreement:
    """How alike two score maps order the heads: both in -1 to 1, over n jointly finite entries."""

    spearman: float
    kendall: float
    n: int


@dataclass(frozen=True)
class TopKOverlap:
    """Heads shared by two top-k sets: their count, and ``count / |union|`` (Jaccard, 0 to 1)."""

    count: int
    jaccard: float
    k: int


def check_level(level: float) -> float:
    """Return the confidence level if it lies strictly between 0 and 1."""
    if not 0.0 < level < 1.0:
        raise InvalidInput(f"level is {level!r}; a confidence level lies between 0 and 1, such as 0.95.")
    return float(level)


def check_count(name: str, value: Any, *, least: int = 1, most: int | None = None) -> int:
    """Return a whole number from ``least`` to ``most``, both included, or raise naming it."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
    if not whole or value < least or (most is not None and value > most):
        bounds = f">= {least}" if most is None else f"from {least} to {most}"
        raise InvalidInput(f"{name} is {value!r}; it must be a whole number {bounds}.")
    return int(value)


def _vector(name: str, values: Any) -> np.ndarray:
    """A finite, non-empty float64 vector."""
    vector = np.asarray(values, dtype=np.float64)
    if vector.ndim != 1:
        raise InvalidInput(f"{name} has shape {vector.shape}; expected one number per trial, shape (trial,).")
    if vector.size == 0:
        raise InvalidInput(f"{name} is empty; at least one trial is needed.")
    if not np.isfinite(vector).all():
        first = int(np.flatnonzero(~np.isfinite(vector))[0])
        raise InvalidInput(f"{name}[{first}] is {vector[first]}; drop undefined trials first.")
    return vector


def _pair(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two finite vectors over the same trials."""
    a, b = _vector("a", a), _vector("b", b)
    if a.shape != b.shape:
        raise InvalidInput(f"a has {a.size} trials and b has {b.size}; paired values need the same trials.")
    return a, b


def bootstrap_weights(n: int, n_boot: int, rng: np.random.Generator) -> np.ndarray:
    """How often each trial is drawn in each bootstrap sample.

    Args:
        n: Number of trials.
        n_boot: Number of samples.
        rng: Source of randomness.

    Returns:
        Counts, float64 ``[n_boot, trial]``; every row sums to n. A resampled weighted mean of ``x`` is
        ``(counts @ (w * x)) / (counts @ w)``.
    """
    check_count("n", n)
    check_count("n_boot", n_boot)
    drawn = rng.integers(0, n, size=(n_boot, n))
    drawn += np.arange(n_boot)[:, None] * n
    return np.bincount(drawn.ravel(), minlength=n_boot * n).reshape(n_boot, n).astype(np.float64)


def percentiles(samples: np.ndarray, level: float) -> tuple[np.ndarray, np.ndarray]:
    """Lower and upper percentile over axis 0, ignoring NaN; NaN where a column has only NaN.

    Args:
        samples: ``[n_boot, ...]``.
        level: Confidence level.
    """
    tails = [(1 - level) / 2, (1 + level) / 2]
    flat = samples.reshape(len(samples), -1)
    missing = np.isnan(flat)
    out = np.full((2, flat.shape[1]), np.nan)
    # nanquantile goes column by column, so only the columns that need it take that road.
    whole = ~missing.any(axis=0)
    ragged = ~whole & ~missing.all(axis=0)
    if whole.any():
        out[:, whole] = np.quantile(flat[:, whole], tails, axis=0)
    if ragged.any():
        out[:, ragged] = np.nanquantile(flat[:, ragged], tails, axis=0)
    shape = samples.shape[1:]
    return out[0].reshape(shape), out[1].reshape(shape)


def bootstrap_mean(
    values: Any, weights: Any = None, *, level: float = 0.95, n_boot: int = 2000, seed: int = 0
) -> Interval:
    """Weighted mean over trials with a percentile bootstrap interval.

    ``estimate = sum(w * x) / sum(w)``; trials are drawn with replacement, their weights go with them.

    Args:
        values: One number per trial.
        weights: One weight >= 0 per trial, or None for equal weights.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.

    Raises:
        InvalidInput: If the input is empty, of unequal length, not finite, or the weights sum to zero.
    """
    check_level(level)
    x = _vector("values", values)
    w = np.ones_like(x) if weights is None else _vector("weights", weights)
    if w.shape != x.shape:
        raise InvalidInput(f"there are {x.size} values but {w.size} weights; give one weight per trial.")
    if (w < 0).any() or w.sum() == 0:
        raise InvalidInput("weights must be >= 0 and not all zero.")
    estimate = float(w @ x / w.sum())
    if x.size < 2:
        return Interval(estimate, math.nan, math.nan, level, x.size)
    counts = bootstrap_weights(x.size, n_boot, np.random.default_rng(seed))
    total = counts @ w
    drawn = total > 0
    samples = (counts @ (w * x))[drawn] / total[drawn]
    low, high = percentiles(samples, level)
    return Interval(estimate, float(low), float(high), level, x.size)


def paired_bootstrap(a: Any, b: Any, *, level: float = 0.95, n_boot: int = 2000, seed: int = 0) -> Interval:
    """Mean of ``a - b`` over the same trials, with a percentile bootstrap interval.

    Raises:
        InvalidInput: If the input is empty, of unequal length or not finite.
    """
    a, b = _pair(a, b)
    return bootstrap_mean(a - b, level=level, n_boot=n_boot, seed=seed)


def paired_permutation(a: Any, b: Any, *, n_perm: int = 10000, seed: int = 0) -> float:
    """Two-sided sign-flip test that the mean of ``a - b`` is zero.

    Under the null the two conditions of a trial may be exchanged, so each difference may take either
    sign. If all ``2**n`` sign patterns are at most ``n_perm`` they are enumerated and
    ``p = #{|flipped sum| >= |observed sum|} / 2**n``; otherwise n_perm patterns are drawn and
    ``p = (# + 1) / (n_perm + 1)``, which is never zero.

    Raises:
        InvalidInput: If the input is empty, of unequal length or not finite.
    """
    check_count("n_perm", n_perm)
    a, b = _pair(a, b)
    difference = a - b
    n = difference.size
    # Sums that are equal on paper differ in the last bits; they count as equal.
    threshold = abs(difference.sum()) - 1e-12 * np.abs(difference).sum()
    if n < 63 and 2**n <= n_perm:
        patterns = (np.arange(2**n)[:, None] >> np.arange(n)) & 1
        sums = (1.0 - 2.0 * patterns) @ difference
        return float(np.mean(np.abs(sums) >= threshold))
    rng = np.random.default_rng(seed)
    hits, left, block = 0, n_perm, max(1, 2_000_000 // n)
    while left:
        size = min(left, block)
        sums = (1.0 - 2.0 * rng.integers(0, 2, size=(size, n))) @ difference
        hits += int(np.count_nonzero(np.abs(sums) >= threshold))
        left -= size
    return (hits + 1) / (n_perm + 1)


def wilson(successes: int, n: int, *, level: float = 0.95) -> Interval:
    """A proportion with its Wilson score interval, which holds up near 0 and 1.

    With ``p = successes / n`` and normal quantile z: centre ``(p + z²/2n) / (1 + z²/n)``, half width
    ``z / (1 + z²/n) * sqrt(p(1-p)/n + z²/4n²)``.

    Raises:
        InvalidInput: If n < 1 or successes is not between 0 and n.
    """
    from statistics import NormalDist

    check_level(level)
    check_count("n", n)
    check_count("successes", successes, least=0)
    if successes > n:
        raise InvalidInput(f"successes is {successes} but there are only {n} trials.")
    p = successes / n
    z2 = NormalDist().inv_cdf((1 + level) / 2) ** 2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = math.sqrt(z2 * (p * (1 - p) / n + z2 / (4 * n * n))) / (1 + z2 / n)
    # At 0 and n the bound is the estimate itself; rounding must not push it past.
    low = 0.0 if successes == 0 else centre - half
    high = 1.0 if successes == n else centre + half
    return Interval(p, low, high, level, int(n))


def holm(p_values: Any) -> np.ndarray:
    """p-values corrected for having made several tests (Holm 1979): the chance of any false call stays below the level.

    With the m values in rising order, ``p_(i) -> max over j <= i of min(1, (m - j) p_(j))``, j from 0.

    Args:
        p_values: One p-value a test, 0 to 1.

    Returns:
        Corrected values in the order given.

    Raises:
        InvalidInput: If there is none, or one is not between 0 and 1.
    """
    p = _vector("p_values", p_values)
    if (p < 0).any() or (p > 1).any():
        raise InvalidInput(f"p_values holds {p[(p < 0) | (p > 1)][0]}; a p-value lies between 0 and 1.")
    order = np.argsort(p, kind="stable")
    raised = np.minimum(1.0, np.maximum.accumulate((len(p) - np.arange(len(p))) * p[order]))
    out = np.empty_like(p)
    out[order] = raised
    return out


def _scores(a: Any, b: Any) -> tuple[np.ndarray, np.ndarray]:
    """Two score maps of the same shape, flattened; NaN may stand for undefined."""
    a, b = np.asarray(a, dtype=np.float64), np.asarray(b, dtype=np.float64)
    if a.shape != b.shape:
        raise InvalidInput(f"a has shape {a.shape}, b has shape {b.shape}; both must score the same heads.")
    return a.ravel(), b.ravel()


def rank_agreement(a: Any, b: Any) -> RankAgreement:
    """Spearman's rho and Kendall's tau-b of two score maps of the same shape.

    Args:
        a: Scores, any shape, such as ``[layer head]``; entries not finite in either map are left out.
        b: Scores of the same heads.

    Raises:
        InvalidInput: If shapes differ, fewer than two entries are finite in both, or one map is constant.
    """
    from scipy import stats

    x, y = _scores(a, b)
    both = np.isfinite(x) & np.isfinite(y)
    x, y = x[both], y[both]
    if x.size < 2:
        raise InvalidInput(f"only {x.size} entries are finite in both maps; a rank correlation needs two.")
    for name, values in (("a", x), ("b", y)):
        if (values == values[0]).all():
            raise InvalidInput(f"every entry of {name} is {values[0]}; a constant map has no ranking.")
    rho: Any = stats.spearmanr(x, y)
    tau: Any = stats.kendalltau(x, y)
    return RankAgreement(spearman=float(rho.statistic), kendall=float(tau.statistic), n=int(x.size))


def topk_overlap(a: Any, b: Any, k: int) -> TopKOverlap:
    """How many of the k highest entries two score maps share.

    Ties go to the earlier entry, so the result is the same on every machine.

    Raises:
        InvalidInput: If shapes differ, or k is more than the finite entries of either map.
    """
    check_count("k", k)
    x, y = _scores(a, b)
    tops = []
    for name, values in (("a", x), ("b", y)):
        finite = int(np.isfinite(values).sum())
        if k > finite:
            raise InvalidInput(f"k is {k}, but only {finite} entries of {name} are finite; ask for no more.")
        keyed = np.where(np.isfinite(values), -values, np.inf)
        tops.append(set(np.argsort(keyed, kind="stable")[:k].tolist()))
    count = len(tops[0] & tops[1])
    return TopKOverlap(count=count, jaccard=count / (2 * k - count), k=int(k))


def spearman_brown(r: float, factor: float) -> float:
    """Reliability of a measure that is ``factor`` times as long as one of reliability r.

    ``factor * r / (1 + (factor - 1) * r)``: what a correlation between two sets of m trials each says about sets of
    ``factor * m`` (Spearman, Brown, British Journal of Psychology 3, 1910).

    Args:
        r: Correlation between two parallel measurements, -1 to 1; NaN gives NaN.
        factor: How many times longer, above 0; below 1 is shorter.

    Returns:
        NaN where the formula has no meaning: for an r so negative that the denominator is not positive.

    Raises:
        InvalidInput: If r or the factor is out of range.
    """
    if math.isnan(r):
        return math.nan
    if not -1.0 <= r <= 1.0:
        raise InvalidInput(f"r is {r!r}; a correlation lies between -1 and 1.")
    if not (math.isfinite(factor) and factor > 0):
        raise InvalidInput(f"factor is {factor!r}; expected how many times longer, a number above 0.")
    below = 1 + (factor - 1) * r
    return float(factor * r / below) if below > 0 else math.nan
