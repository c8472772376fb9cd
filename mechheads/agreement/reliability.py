"""How far a ranking of heads would come out the same on other trials, and how many trials that takes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.agreement.pairs import compare, sizes
from mechheads.agreement.resampling import BLOCK, WEIGHTS_TRIAL, check_maps, weighted_means
from mechheads.errors import InvalidInput
from mechheads.provenance import json_ready
from mechheads.scores import HeadScores
from mechheads.stats import check_count, check_level, percentiles, spearman_brown

if TYPE_CHECKING:
    import pandas as pd

_PAIR = ("first", "second")


@dataclass(frozen=True, eq=False)
class SplitHalf:
    """Reliability of a ranking, made by ``split_half``.

    Attributes:
        spearman: Mean over splits of Spearman's rho between the rankings of the two halves.
        split_low: Lower percentile over splits. It shows how much the choice of halves matters; it is no confidence
            interval, since all splits are of the same trials.
        split_high: Upper percentile.
        reliability: ``spearman`` stepped up to all kept trials by the Spearman-Brown formula.
        overlap: One row per k: ``k overlap split_low split_high jaccard expected``, the heads that the top k of both
            halves share and how many chance would give. Not stepped up: it is what half of the trials give.
        n_trials: Kept trials.
        n_half: Trials in a half; with an odd number one trial sits out, another one in each split.
        n_splits: Random splits.
        level: Level of the percentiles.
        reason: Why the numbers are NaN; empty if they are not.
    """

    spearman: float
    split_low: float
    split_high: float
    reliability: float
    overlap: pd.DataFrame
    n_trials: int
    n_half: int
    n_splits: int
    level: float
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        return _plain(self, "overlap")


@dataclass(frozen=True, eq=False)
class TrialsNeeded:
    """Learning curve of a ranking, made by ``trials_needed``.

    Attributes:
        n: Trials at which the reliability reaches the target; None if that cannot be said.
        target: Reliability asked for.
        extrapolated: Whether n lies beyond the largest m that was measured, so that it rests on the Spearman-Brown
            formula and not on data.
        reason: How n was found, or why there is none, in a sentence.
        curve: One row per number of trials m: ``m spearman split_low split_high spearman_brown``. ``spearman`` is the
            mean rho of the rankings of two disjoint sets of m trials, which is the reliability of a ranking from m
            trials; ``spearman_brown`` is what the formula makes of the largest m. Where the two part, do not trust n.
        n_trials: Kept trials.
        reliability: Reliability of the ranking from all kept trials, by the formula.
    """

    n: int | None
    target: float
    extrapolated: bool
    reason: str
    curve: pd.DataFrame
    n_trials: int
    reliability: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        return _plain(self, "curve")


def split_half(
    scores: HeadScores,
    *,
    n_splits: int = 200,
    seed: int = 0,
    k: Sequence[int] | int = (5, 10, 20),
    level: float = 0.95,
) -> SplitHalf:
    """Split the kept trials at random into halves and compare the two rankings of the heads.

    With r the mean rho over splits of n trials into halves of m, the reliability of the ranking from all n is
    ``f r / (1 + (f - 1) r)`` with ``f = n / m`` (Spearman 1910, Brown 1910). The formula is exact for linear
    correlations of scores whose noise is independent between trials; for ranks it is close.

    Args:
        scores: Scores with at least two kept trials; weights and pooling are used in each half.
        n_splits: Random splits.
        seed: Seed of the splits.
        k: Size of the top sets, one or several.
        level: Level of the percentiles over splits.

    Raises:
        InvalidInput: If fewer than two trials are kept, the scores come from weights alone, or k is more than the
            heads with a score.
    """
    import pandas as pd

    ks, n = sizes(k), _usable(scores)
    check_level(level)
    m = n // 2
    n_heads = int(np.isfinite(scores.mean()).sum())
    if ks[-1] > n_heads:
        raise InvalidInput(f"k is {ks[-1]}, but only {n_heads} heads have a score; ask for at most {n_heads}.")
    columns = [("spearman", 0), *((s, size) for size in ks for s in ("overlap", "jaccard"))]
    results = _halves(scores, m, columns, n_splits, seed)
    rho = results["spearman", 0]
    low, high = (float(x) for x in percentiles(rho, level))
    mean = _mean(rho)
    rows = []
    for size in ks:
        shared = results["overlap", size]
        ends = percentiles(shared, level)
        rows.append(
            {
                "k": size,
                "overlap": _mean(shared),
                "split_low": float(ends[0]),
                "split_high": float(ends[1]),
                "jaccard": _mean(results["jaccard", size]),
                "expected": size**2 / n_heads,
            }
        )
    reason = "" if math.isfinite(mean) else "in no split both halves rank the heads: the scores are constant"
    return SplitHalf(
        spearman=mean,
        split_low=low,
        split_high=high,
        reliability=spearman_brown(mean, n / m),
        overlap=pd.DataFrame(rows),
        n_trials=n,
        n_half=m,
        n_splits=n_splits,
        level=level,
        reason=reason,
    )


def trials_needed(
    scores: HeadScores, *, target: float = 0.9, n_splits: int = 200, seed: int = 0, level: float = 0.95
) -> TrialsNeeded:
    """How many trials a ranking needs before another set of as many would give nearly the same.

    Reliability is measured at m = 2, 4, 8, ... and at half of the kept trials, as the mean rho between the rankings of
    two disjoint random sets of m trials. Where the target is reached within these, n lies there; beyond them the
    formula of Spearman and Brown, solved for the number of trials, extrapolates from the largest m with reliability r:
    ``n = m target (1 - r) / (r (1 - target))``.

    Args:
        scores: Scores with at least four kept trials.
        target: Reliability asked for, between 0 and 1.
        n_splits: Random pairs of sets at each m.
        seed: Seed of the draws.
        level: Level of the percentiles over splits.

    Raises:
        InvalidInput: If fewer than four trials are kept, the scores come from weights alone, or the target is not
            between 0 and 1.
    """
    import pandas as pd

    if not 0.0 < target < 1.0:
        raise InvalidInput(f"target is {target!r}; a reliability to reach lies between 0 and 1, such as 0.9.")
    check_level(level)
    n = _usable(scores, least=4)
    ms = sorted({2**i for i in range(1, n.bit_length()) if 2**i <= n // 2} | {n // 2})
    rows = []
    for m in ms:
        rho = _halves(scores, m, [("spearman", 0)], n_splits, seed)["spearman", 0]
        low, high = percentiles(rho, level)
        rows.append({"m": m, "spearman": _mean(rho), "split_low": float(low), "split_high": float(high)})
    curve = pd.DataFrame(rows)
    measured, last = curve["spearman"].to_numpy(dtype=float), float(curve["spearman"].iloc[-1])
    curve["spearman_brown"] = [spearman_brown(last, m / ms[-1]) for m in ms]
    needed, extrapolated, reason = _solve(ms, measured, target)
    return TrialsNeeded(
        n=needed,
        target=float(target),
        extrapolated=extrapolated,
        reason=reason,
        curve=curve,
        n_trials=n,
        reliability=spearman_brown(last, n / ms[-1]),
    )


def _solve(ms: list[int], measured: np.ndarray, target: float) -> tuple[int | None, bool, str]:
    """Number of trials for the target, whether it is extrapolated, and a sentence on it."""
    reached = [i for i, r in enumerate(measured) if r >= target]
    at = reached[0] if reached else len(ms) - 1
    m, r = ms[at], float(measured[at])
    if not math.isfinite(r):
        return None, False, f"rankings from {m} trials are undefined, because the scores are constant."
    if r <= 0:
        return None, False, (
            f"rankings from two sets of {m} trials do not agree at all (mean rho {r:.2f}), so no number of trials "
            "can be named: the scores show no stable order of heads."
        )  # fmt: skip
    # A little is taken off before rounding up, so that m itself is not missed by the last digit.
    solved = math.inf if r >= 1 else m * target * (1 - r) / (r * (1 - target))
    if reached:
        least = ms[at - 1] + 1 if at else 1
        n = m if r >= 1 else min(max(math.ceil(solved - 1e-9), least), m)
        return n, False, f"measured: two sets of {m} trials agree with a mean rho of {r:.2f}."
    n = math.ceil(solved - 1e-9)
    return n, True, (
        f"an extrapolation by the Spearman-Brown formula from two sets of {m} trials, whose rankings agree with a "
        f"mean rho of {r:.2f}; more than {m} a set were not measured."
    )  # fmt: skip


def _usable(scores: HeadScores, *, least: int = 2) -> int:
    """Number of kept trials, if there are enough."""
    check_maps({"scores": scores}, least=1)
    if tuple(scores.trial_ids) == (WEIGHTS_TRIAL,):
        raise InvalidInput(
            f"{scores.method!r} is computed from the weights alone: it has no trials, and comes out the same each time."
        )
    if scores.n_kept < least:
        raise InvalidInput(f"{scores.method!r} kept {scores.n_kept} trials; this needs at least {least}.")
    return scores.n_kept


def _halves(
    scores: HeadScores, m: int, columns: list[tuple[str, int]], n_splits: int, seed: int
) -> dict[tuple[str, int], np.ndarray]:
    """Statistics between two disjoint random sets of m kept trials, ``[split]`` each."""
    check_count("n_splits", n_splits)
    check_count("seed", seed, least=0)
    rng = np.random.default_rng([seed, m])
    order = np.argsort(rng.random((n_splits, scores.n_kept)), axis=1)
    out = {key: np.full(n_splits, np.nan) for key in columns}
    size = max(1, BLOCK // (2 * scores.n_layers * scores.n_heads))
    for start in range(0, n_splits, size):
        block = order[start : start + size]
        means = {}
        for name, chosen in zip(_PAIR, (block[:, :m], block[:, m : 2 * m]), strict=True):
            counts = np.zeros(block.shape)
            np.put_along_axis(counts, chosen, 1.0, axis=1)
            means[name] = weighted_means(scores, counts)
        for (_, _, statistic, k), values in compare(means, [_PAIR], columns).items():
            out[statistic, k][start : start + size] = values
    return out


def _mean(values: np.ndarray) -> float:
    """Mean over the splits in which the statistic is defined; NaN if there is none."""
    finite = values[np.isfinite(values)]
    return float(finite.mean()) if finite.size else math.nan


def _plain(result: Any, table: str) -> dict[str, Any]:
    """The fields of a result, JSON-ready, its table as a list of rows."""

    def ready(value: Any) -> Any:
        return None if isinstance(value, float) and not math.isfinite(value) else value

    fields = {name: ready(value) for name, value in vars(result).items() if name != table}
    rows = [{str(key): ready(v) for key, v in row.items()} for row in getattr(result, table).to_dict("records")]
    return json_ready({**fields, table: rows})
