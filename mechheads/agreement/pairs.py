"""How far head detectors agree: rank correlation, shared top heads, and what chance alone would give."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.agreement.rank_rows import Ranked, kendall_rows, ranked, spearman_rows, top_share_rows
from mechheads.agreement.resampling import (
    WEIGHTS_TRIAL,
    check_maps,
    is_fixed,
    kept_ids,
    sample_blocks,
    shifted_interval,
    trial_groups,
)
from mechheads.errors import InvalidInput, UnknownName
from mechheads.provenance import json_ready
from mechheads.scores import HeadScores
from mechheads.stats import check_count, check_level

if TYPE_CHECKING:
    import pandas as pd

STATISTICS = ("spearman", "kendall", "overlap", "jaccard")
_CORRELATIONS = {"spearman": spearman_rows, "kendall": kendall_rows}


@dataclass(frozen=True, eq=False, repr=False)
class Agreement:
    """Pairwise agreement of score maps, made by ``agreement``.

    Attributes:
        names: The methods, in the order given.
        frame: One row per pair and statistic, columns ``a b statistic k value ci_low ci_high expected n_heads
            n_trials_shared reason``. ``k`` is 0 for rank correlations. ``expected`` is what two independent random
            rankings give. ``n_heads`` counts heads that both define. ``reason`` says why a value or its interval is
            undefined (NaN), or what to know about it; empty if there is nothing.
        ks: The sizes of the top sets.
        level: Confidence level of the intervals.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.
        shape: ``(layers, heads a layer)``.
        n_trials: Kept trials of each method.
        groups: Methods resampled together, group by group; a method in no group has no trial noise to resample.
    """

    names: tuple[str, ...]
    frame: pd.DataFrame
    ks: tuple[int, ...]
    level: float
    n_boot: int
    seed: int
    shape: tuple[int, int]
    n_trials: Mapping[str, int]
    groups: tuple[tuple[str, ...], ...]

    def __repr__(self) -> str:
        return f"Agreement({len(self.names)} methods, {math.prod(self.shape)} heads, k={list(self.ks)})"

    def to_frame(self) -> pd.DataFrame:
        """A copy of ``frame``."""
        return self.frame.copy()

    def rows(self, statistic: str, k: int | None = None) -> pd.DataFrame:
        """The rows of one statistic, one per pair.

        Args:
            statistic: ``"spearman"``, ``"kendall"``, ``"overlap"`` or ``"jaccard"``.
            k: Size of the top sets; may be left out for correlations, or if there is one only.

        Raises:
            UnknownName: If there is no such statistic.
            InvalidInput: If k was not computed, or must be said.
        """
        if statistic not in STATISTICS:
            raise UnknownName("statistic of an agreement", statistic, STATISTICS)
        if statistic in _CORRELATIONS:
            if k is not None:
                raise InvalidInput(f"k is {k!r}, but {statistic} is over all heads; leave k out.")
            k = 0
        elif k is None and len(self.ks) == 1:
            k = self.ks[0]
        elif k not in self.ks:
            raise InvalidInput(f"k is {k!r}; the {statistic} was computed at k in {list(self.ks)}.")
        return self.frame.loc[(self.frame["statistic"] == statistic) & (self.frame["k"] == k)].reset_index(drop=True)

    def pair(self, a: str, b: str, statistic: str = "spearman", k: int | None = None) -> dict[str, Any]:
        """One row as a dict; the order of the two methods does not matter.

        Raises:
            UnknownName: If a method is not among those compared.
            InvalidInput: As ``rows``, or if both are the same method.
        """
        for name in (a, b):
            if name not in self.names:
                raise UnknownName("method of the agreement", name, self.names)
        rows = self.rows(statistic, k)
        here = rows.loc[rows["a"].isin([a, b]) & rows["b"].isin([a, b])]
        if a == b or here.empty:
            raise InvalidInput(f"there is no pair of {a!r} and {b!r}; name two different methods that were compared.")
        return {str(key): value for key, value in here.iloc[0].to_dict().items()}

    def matrix(self, statistic: str = "spearman", k: int | None = None, *, column: str = "value") -> pd.DataFrame:
        """One statistic as a square table, methods in both directions.

        Args:
            statistic: As in ``rows``.
            k: As in ``rows``.
            column: ``"value"``, ``"ci_low"``, ``"ci_high"``, ``"expected"`` or ``"n_heads"``.

        Returns:
            Symmetric; on the diagonal the value of a method against itself (1, or k for the overlap), NaN for the
            other columns. Pairs that were not compared are NaN.
        """
        import pandas as pd

        columns = ("value", "ci_low", "ci_high", "expected", "n_heads")
        if column not in columns:
            raise UnknownName("column of the agreement", column, columns)
        rows = self.rows(statistic, k)
        square = pd.DataFrame(np.nan, index=list(self.names), columns=list(self.names))
        for a, b, value in zip(rows["a"], rows["b"], rows[column], strict=True):
            square.loc[a, b] = square.loc[b, a] = value
        if column == "value":
            own = float(rows["k"].iloc[0]) if statistic == "overlap" and len(rows) else 1.0
            for name in self.names:
                square.loc[name, name] = own
        return square

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        rows = [
            {str(key): None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
            for row in self.frame.to_dict("records")
        ]
        return json_ready(
            {
                "names": self.names,
                "ks": self.ks,
                "level": self.level,
                "n_boot": self.n_boot,
                "seed": self.seed,
                "shape": self.shape,
                "n_trials": dict(self.n_trials),
                "groups": self.groups,
                "pairs": rows,
            }
        )


def agreement(
    scores: Mapping[str, HeadScores],
    *,
    k: Sequence[int] | int = (5, 10, 20),
    level: float = 0.95,
    n_boot: int = 1000,
    seed: int = 0,
    statistics: Sequence[str] = STATISTICS,
    reference: str | None = None,
) -> Agreement:
    """Compare every pair of score maps of the same model.

    Over the heads that both maps define: Spearman's rho; Kendall's tau-b; how many of the k highest heads they share
    (``overlap``, 0 to k) and ``overlap / (2k - overlap)`` (``jaccard``, 0 to 1). Two independent random rankings share
    ``k**2 / n_heads`` heads on average (``expected``; 0 for correlations, and for Jaccard the overlap's put into its
    formula).

    Heads that tie for the last places of a top set share them evenly, so the overlap of maps with ties is the
    expectation under random tie breaking: two sparse detectors do not agree merely because the lowest-numbered heads
    fill up both sets.

    Intervals resample trials with replacement and move the percentiles to the estimate
    (``resampling.shifted_interval`` says why); an interval speaks of another set of as many trials, the noise of the
    scores included. One without width means that every sample gave the same count. Methods scored on the same trials
    are resampled together; those on other trials independently; scores of the weights alone have no trial noise and
    stay as they are.

    Args:
        scores: Name to scores, at least two. Each method's own ``kept``, ``weights`` and ``pooling`` are used.
        k: Size of the top sets, one or several.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.
        statistics: Which to compute.
        reference: Compare only the pairs with this method.

    Returns:
        The pairwise values. A map with all scores equal has no ranking: its values are NaN, with the reason.

    Raises:
        InvalidInput: If there are fewer than two maps, their shapes differ, a method kept no trial, or k is more than
            the heads that a pair defines.
        UnknownName: If a statistic or the reference is unknown.
    """
    maps = check_maps(scores, why="agreement needs")
    ks = sizes(k)
    check_level(level)
    check_count("seed", seed, least=0)
    for name in statistics:
        if name not in STATISTICS:
            raise UnknownName("statistic of an agreement", name, STATISTICS)
    if reference is not None and reference not in maps:
        raise UnknownName("method of the agreement", reference, maps)
    pairs = [p for p in itertools.combinations(maps, 2) if reference is None or reference in p]
    if reference is not None:
        pairs = [(reference, b if a == reference else a) for a, b in pairs]
    point = {name: one.mean().reshape(1, -1) for name, one in maps.items()}
    _check_sizes(point, pairs, ks)
    columns = [(s, size) for s in STATISTICS if s in statistics for size in ((0,) if s in _CORRELATIONS else ks)]
    estimates = compare(point, pairs, columns)
    samples = {key: np.full(n_boot, np.nan) for key in estimates}
    if not all(is_fixed(one) for one in maps.values()):
        for block, means in sample_blocks(maps, check_count("n_boot", n_boot), seed):
            for key, values in compare(means, pairs, columns).items():
                samples[key][block] = values
    groups = trial_groups(maps)
    rows = []
    for a, b in pairs:
        for statistic, size in columns:
            value = float(estimates[a, b, statistic, size][0])
            rows.append(_row(maps, point, (a, b), (statistic, size), value, samples[a, b, statistic, size], level))
    import pandas as pd

    return Agreement(
        names=tuple(maps),
        frame=pd.DataFrame(rows),
        ks=ks,
        level=level,
        n_boot=n_boot,
        seed=seed,
        shape=(next(iter(maps.values())).n_layers, next(iter(maps.values())).n_heads),
        n_trials={name: one.n_kept for name, one in maps.items()},
        groups=tuple(map(tuple, groups)),
    )


def sizes(k: Sequence[int] | int) -> tuple[int, ...]:
    """Sizes of top sets, rising, each once."""
    values = list(k) if isinstance(k, Iterable) else [k]
    if not values:
        raise InvalidInput("k is empty; give the size of a top set, such as 10, or several.")
    return tuple(sorted({check_count("k", value) for value in values}))


def _check_sizes(point: Mapping[str, np.ndarray], pairs: list[tuple[str, str]], ks: tuple[int, ...]) -> None:
    for a, b in pairs:
        n = int((np.isfinite(point[a]) & np.isfinite(point[b])).sum())
        if ks[-1] > n:
            raise InvalidInput(f"k is {ks[-1]}, but {a!r} and {b!r} both score only {n} heads; ask for at most {n}.")


def compare(
    means: Mapping[str, np.ndarray], pairs: list[tuple[str, str]], columns: list[tuple[str, int]]
) -> dict[tuple[str, str, str, int], np.ndarray]:
    """Every statistic of every pair, ``[sample]``; maps are ``[sample, head]``, or one row for all samples."""
    own = {name: ranked(values) for name, values in means.items()}
    wanted = sorted({size for _, size in columns if size})
    shares = {(name, size): top_share_rows(r, size) for name, r in own.items() for size in wanted}
    out: dict[tuple[str, str, str, int], np.ndarray] = {}
    for a, b in pairs:
        if own[a].defined.all() and own[b].defined.all():
            x, y = own[a], own[b]
            top = {size: (shares[a, size], shares[b, size]) for size in wanted}
        else:
            both = np.isfinite(means[a]) & np.isfinite(means[b])
            x, y = (ranked(np.where(both, means[name], np.nan)) for name in (a, b))
            top = {size: (top_share_rows(x, size), top_share_rows(y, size)) for size in wanted}
        x, y = _same_rows(x, y)
        for statistic, size in columns:
            if statistic in _CORRELATIONS:
                out[a, b, statistic, size] = _CORRELATIONS[statistic](x, y)
                continue
            shared = np.einsum("rh,rh->r", *np.broadcast_arrays(*top[size]))
            # A constant map has no top: what it would share is the tie breaking alone.
            shared[(x.distinct < 2) | (y.distinct < 2)] = np.nan
            out[a, b, statistic, size] = shared if statistic == "overlap" else shared / (2 * size - shared)
    return out


def _same_rows(x: Ranked, y: Ranked) -> tuple[Ranked, Ranked]:
    """Both with as many rows: one row stands for all."""
    n = max(len(x.order), len(y.order))
    return (x, y) if len(x.order) == len(y.order) else (x.repeated(n), y.repeated(n))


def _row(
    maps: Mapping[str, HeadScores],
    point: Mapping[str, np.ndarray],
    pair: tuple[str, str],
    column: tuple[str, int],
    value: float,
    samples: np.ndarray,
    level: float,
) -> dict[str, Any]:
    """One row of ``Agreement.frame``."""
    (a, b), (statistic, size) = pair, column
    both = np.isfinite(point[a][0]) & np.isfinite(point[b][0])
    n = int(both.sum())
    chance = size**2 / n if size else 0.0
    greatest = {"overlap": float(size)}.get(statistic, 1.0)
    correlation = statistic in _CORRELATIONS
    resampled = [maps[name].n_kept for name in pair if not is_fixed(maps[name])]
    still, trials = not resampled, min(resampled, default=0)
    low, high = (
        (math.nan, math.nan)
        if still
        else shifted_interval(
            value, samples, level, trials, low=-1.0 if correlation else 0.0, high=greatest, fisher=correlation
        )
    )
    return {
        "a": a,
        "b": b,
        "statistic": statistic,
        "k": size,
        "value": value,
        "ci_low": low,
        "ci_high": high,
        "expected": chance / (2 * size - chance) if statistic == "jaccard" else chance,
        "n_heads": n,
        "n_trials_shared": len(set(kept_ids(maps[a])) & set(kept_ids(maps[b]))),
        "reason": "; ".join(_reasons(maps, {name: point[name][0][both] for name in pair}, size, still=still)),
    }


def _reasons(maps: Mapping[str, HeadScores], values: Mapping[str, np.ndarray], k: int, *, still: bool) -> list[str]:
    """What a reader must know about one row: why it is undefined, ties, noise that the interval leaves out."""
    reasons = []
    for name, own in values.items():
        if len(own) < 2:
            return [f"only {len(own)} heads are defined in both"]
        if (own == own[0]).all():
            reasons.append(f"every score of {name!r} is {own[0]:g}, so it ranks nothing")
        elif k:
            last = np.sort(own)[len(own) - k]
            tied, left = int((own == last).sum()), k - int((own > last).sum())
            if tied > left:
                reasons.append(f"{tied} heads of {name!r} tie at {last:g} for the last {left} of its top {k}")
    if still:
        return [*reasons, "no interval: neither has two trials to resample"]
    return reasons + [
        f"the interval leaves out the noise of {name!r}, which has one trial"
        for name in values
        if is_fixed(maps[name]) and maps[name].trial_ids != (WEIGHTS_TRIAL,)
    ]
