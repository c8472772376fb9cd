"""Shares of what there was without ablation; refused, with the reason, where there is nothing to take a share of."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from mechheads.agreement.resampling import widening
from mechheads.sweep_stats.joint import Contrast, Joint, Key, Terms, unseen

# A denominator below this share of the largest value is taken for nothing.
TINY = 0.01


@dataclass(frozen=True)
class Ratio:
    """A quotient of two means, or why there is none.

    Attributes:
        value: The quotient; NaN where it is not valid.
        low: Lower end of its interval; NaN likewise.
        high: Upper end; NaN likewise.
        valid: Whether it may be read as a number.
        reason: Why not; empty where it is valid.
        level: Confidence level.
        n: Number of trials.
    """

    value: float
    low: float
    high: float
    valid: bool
    reason: str = ""
    level: float = 0.95
    n: int = 0

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]" if self.valid else f"not valid: {self.reason}"

    def lost(self) -> Ratio:
        """One minus it: the share lost where this is the share left."""
        return Ratio(1 - self.value, 1 - self.high, 1 - self.low, self.valid, self.reason, self.level, self.n)


@dataclass(frozen=True, eq=False)
class Share:
    """A ratio with what further statistics need.

    Attributes:
        ratio: The share left, ``(after - worst) / (before - worst)``.
        samples: Bootstrap samples of it; empty where it is not valid.
        influence: ``[trial]`` numbers whose mean is the ratio r and whose spread is its noise: ``r + (a - r b) /
            mean(b)`` with a and b a trial's value after and before, less the worst.
        before: Mean without ablation.
        after: Mean with.
    """

    ratio: Ratio
    samples: np.ndarray
    influence: np.ndarray
    before: float = math.nan
    after: float = math.nan


def refused(reason: str, level: float, n: int) -> Ratio:
    """A ratio that is none."""
    return Ratio(math.nan, math.nan, math.nan, False, reason, level, n)


def share_left(joint: Joint, terms: Terms, base: Key | None, *, worst: float = 0.0) -> Share:
    """What is left of a metric: ``(A - worst) / (B - worst)``, B without ablation, A a weighted mean of other cells.

    Both are over the trials that all cells define, and the interval is a paired bootstrap in which both vary. It is
    refused where ``B - worst`` has the wrong sign (inverted), where its interval holds 0 or it is below 1% of the
    largest value (degenerate), and where B was not measured or there are fewer than two trials.

    Args:
        joint: The cells.
        terms: The cells of A with weights that sum to 1.
        base: The cell of B.
        worst: Value of the metric at which nothing is left, such as chance.
    """
    nothing = np.empty(0)
    if base is None or base not in joint.cells:
        return Share(refused("not measured without ablation", joint.level, 0), nothing, nothing)
    keys = [key for key, _ in terms]
    mask = joint.mask([base, *keys])
    after, before = joint.contrast(terms, mask=mask), joint.contrast([(base, 1.0)], mask=mask)
    means = {"before": before.value, "after": after.value}
    reason = _refusal(joint, before, after, worst)
    if reason:
        return Share(refused(reason, joint.level, before.n), nothing, nothing, **means)
    sign = joint.sign
    below, above = sign * (before.value - worst), sign * (after.value - worst)
    value = above / below
    samples = _quotients(sign * (after.samples - worst), sign * (before.samples - worst))
    low, high = _ends(joint, value, samples, below, before.n, worst)
    if not (math.isfinite(low) and math.isfinite(high)):
        reason = "degenerate: the value without ablation is so unsure that the interval has no end"
        return Share(refused(reason, joint.level, before.n), nothing, nothing, **means)
    influence = value + sign * ((after.per_trial - worst) - value * (before.per_trial - worst)) / below
    return Share(Ratio(value, low, high, True, "", joint.level, before.n), samples, influence, **means)


def _refusal(joint: Joint, before: Contrast, after: Contrast, worst: float) -> str:
    """Why there is nothing to take a share of; empty if there is."""
    if before.n < 2:
        return f"too few trials ({before.n}) were measured both with and without ablation"
    ends = [joint.sign * (end - worst) for end in before.ends]
    low, high = min(ends), max(ends)
    told = f"{before.value:.3g} [{before.ends[0]:.3g}, {before.ends[1]:.3g}] without ablation"
    if high < 0:
        why = "less is better here" if joint.sign < 0 else "its values are below 0"
        hint = f" ({why}: worst must be given)" if worst == 0 else ""
        return f"inverted: {told} is worse than {worst:g}, the value at which nothing is left{hint}"
    if low <= 0:
        return f"degenerate: {told} cannot be told from {worst:g}, the value at which nothing is left"
    largest = max(np.abs(x.per_trial - worst).max() for x in (before, after))
    if abs(before.value - worst) < TINY * largest:
        return f"degenerate: {told} is tiny beside values as far as {largest:.3g} from {worst:g}"
    return ""


def _quotients(above: np.ndarray, below: np.ndarray) -> np.ndarray:
    """Sample by sample; without a denominator a sample is infinitely far off, on the side of its numerator."""
    far = np.where(above > 0, np.inf, np.where(above < 0, -np.inf, 0.0))
    return np.divide(above, below, out=far, where=below > 0)


def _ends(joint: Joint, value: float, samples: np.ndarray, below: float, n: int, worst: float) -> tuple[float, float]:
    """The interval of the quotient."""
    attainable = (-math.inf, math.inf)
    if joint.bounded:
        ends = [joint.sign * (x - worst) / below for x in (0.0, 1.0)]
        attainable = min(ends), max(ends)
    samples = samples[~np.isnan(samples)]
    if joint.bounded and np.isfinite(samples).all() and np.ptp(samples) < 1e-12:
        reach = unseen(n, joint.level) * (attainable[1] - attainable[0])
        low, high = value - reach, value + reach
    else:
        tails = (1 - joint.level) / 2, (1 + joint.level) / 2
        wide = widening(n, joint.level)
        # Order statistics rather than interpolation: some samples may be infinite.
        parts = [float(np.quantile(samples, q, method=m)) for q, m in zip(tails, ("lower", "higher"), strict=True)]
        low, high = (value + wide * (end - value) for end in parts)
    return max(min(low, value), attainable[0]), min(max(high, value), attainable[1])
