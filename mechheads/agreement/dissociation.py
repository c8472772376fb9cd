"""What separates two score maps of the same heads, such as non-literal retrieval from literal."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.agreement.pairs import compare
from mechheads.agreement.rank_rows import clear_top, ranked
from mechheads.agreement.resampling import (
    check_maps,
    draw_counts,
    is_fixed,
    kept_ids,
    student,
    weighted_means,
    widening,
)
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head, HeadSet
from mechheads.provenance import json_ready
from mechheads.scores import HeadScores
from mechheads.stats import check_count, check_level, percentiles

if TYPE_CHECKING:
    import pandas as pd

SCALES = ("sd", "rank")


@dataclass(frozen=True, eq=False, repr=False)
class Dissociation:
    """Difference of two score maps, head by head, made by ``dissociation``.

    Attributes:
        frame: One row per head: ``layer head label a b a_scaled b_scaled difference ci_low ci_high all_low all_high
            top_a top_b call``. ``a`` and ``b`` are the pooled scores in their units; ``difference`` is
            ``a_scaled - b_scaled``, positive where a stands out. ``ci_*`` is the interval of one head looked at alone,
            ``all_*`` the band that holds for all heads at once. ``call`` is ``"a_only"``, ``"b_only"``, ``"shared"`` or
            empty.
        names: Names of a and b.
        units: Units of a and b.
        scale: ``"sd"`` or ``"rank"``.
        k: Size of the top sets.
        level: Confidence level.
        n_trials: Kept trials of a and of b.
        n_shared: Trials in both, which are resampled together.
        spearman: Rank correlation of the two maps.
        reason: Why there are no intervals; empty if there are.
    """

    frame: pd.DataFrame
    names: tuple[str, str]
    units: tuple[str, str]
    scale: str
    k: int
    level: float
    n_trials: tuple[int, int]
    n_shared: int
    spearman: float
    reason: str

    def heads(self, call: str) -> HeadSet:
        """The heads called ``"a_only"``, ``"b_only"`` or ``"shared"``, greatest scaled score first.

        Raises:
            UnknownName: If it is none of these.
        """
        if call not in ("a_only", "b_only", "shared"):
            raise UnknownName("kind of head", call, ("a_only", "b_only", "shared"))
        rows = self.frame.loc[self.frame["call"] == call]
        by = {"a_only": rows["a_scaled"], "b_only": rows["b_scaled"]}.get(call, rows["a_scaled"] + rows["b_scaled"])
        order = by.sort_values(ascending=False, kind="stable").index
        return HeadSet(rows.loc[order, "label"].tolist())

    @property
    def a_only(self) -> HeadSet:
        """In the top k of a, not of b, and significantly higher in a."""
        return self.heads("a_only")

    @property
    def b_only(self) -> HeadSet:
        """In the top k of b, not of a, and significantly higher in b."""
        return self.heads("b_only")

    @property
    def shared(self) -> HeadSet:
        """In the top k of both."""
        return self.heads("shared")

    def __repr__(self) -> str:
        a, b = self.names
        return (
            f"Dissociation({a!r} against {b!r}, k={self.k}: {len(self.a_only)} only in the first, "
            f"{len(self.b_only)} only in the second, {len(self.shared)} in both)"
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        rows = [
            {str(key): None if isinstance(v, float) and not math.isfinite(v) else v for key, v in row.items()}
            for row in self.frame.to_dict("records")
        ]
        fields = {name: value for name, value in vars(self).items() if name not in ("frame", "spearman")}
        sets = {call: self.heads(call).labels for call in ("a_only", "b_only", "shared")}
        rho = self.spearman if math.isfinite(self.spearman) else None
        return json_ready({**fields, **sets, "spearman": rho, "heads": rows})


def dissociation(
    a: HeadScores,
    b: HeadScores,
    *,
    names: tuple[str, str] | None = None,
    scale: str = "sd",
    k: int = 20,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> Dissociation:
    """Compare two score maps head by head, such as non-literal trials (a) against literal ones (b).

    The maps are first brought to one scale, over the heads that both define:

    * ``"sd"``: ``score / sd``, with sd the map's standard deviation over heads (no mean is taken off, so zero keeps its
      meaning). Noise counts into sd: with very different numbers of trials the map of fewer trials is pressed down.
    * ``"rank"``: ``(rank - 1) / (n - 1)``, 0 for the lowest of n heads, 1 for the highest; ties share their mean rank.

    Then ``difference = a_scaled - b_scaled`` for every head. Trials are resampled (together where a and b share them)
    and scaling included in every sample. ``ci`` is the percentile interval of one head, around its difference. Because
    all heads are looked at, calls rest on the wider band ``difference -/+ c * se``: se is the head's standard deviation
    over samples and c the quantile, over samples, of the greatest ``|difference* - mean difference*| / se`` of all
    heads, so that at the given level no head of equal standing is called. Both are widened for few trials, c by going
    from the normal to Student's distribution with the smaller number of trials, less one, as degrees of freedom.

    A head is ``a_only`` if it is among the k highest of a, not of b, and its band lies above zero; ``b_only`` the other
    way round; ``shared`` if it is among the k highest of both, whatever the difference. Heads in one top k only whose
    band holds zero get no call: the data do not tell. Heads that tie for the last places are in no top k.

    Args:
        a: Scores under the first condition.
        b: Scores of the same heads under the second.
        names: Names for both; their methods if None, numbered where these are equal.
        scale: ``"sd"`` or ``"rank"``.
        k: Size of the top sets.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.

    Raises:
        InvalidInput: If shapes differ, a map kept no trial or is constant, fewer than two heads are defined in both, or
            k is more than these.
        UnknownName: If the scale is unknown.
    """
    if names is None:
        names = (a.method, b.method) if a.method != b.method else (f"{a.method} 1", f"{b.method} 2")
    if names[0] == names[1]:
        raise InvalidInput(f"both maps are named {names[0]!r}; give them different names.")
    maps = check_maps(dict(zip(names, (a, b), strict=True)))
    check_level(level)
    check_count("k", k)
    check_count("n_boot", n_boot, least=2)
    if scale not in SCALES:
        raise UnknownName("scale", scale, SCALES)
    points = [one.mean().reshape(1, -1) for one in maps.values()]
    both = np.isfinite(points[0][0]) & np.isfinite(points[1][0])
    points = [p[:, both] for p in points]
    _check_points(names, points, k)
    scaled = [_scaled(p, scale)[0] for p in points]
    difference = scaled[0] - scaled[1]
    reason, samples = _samples(maps, both, scale, n_boot, seed)
    n = len(difference)
    ends = [np.full(n, np.nan)] * 4
    if samples is not None:
        trials = min(one.n_kept for one in maps.values() if not is_fixed(one))
        wide = widening(trials, level)
        middle = percentiles(samples, 0.0)[0]  # the median, undefined samples left out
        low, high = (difference + wide * (end - middle) for end in percentiles(samples, level))
        ends = [low, high, *_band(difference, samples, level, trials)]
    tops = [clear_top(p[0], k) for p in points]
    call = np.full(n, "", dtype=object)
    call[tops[0] & ~tops[1] & (ends[2] > 0)] = "a_only"
    call[tops[1] & ~tops[0] & (ends[3] < 0)] = "b_only"
    call[tops[0] & tops[1]] = "shared"
    columns = {
        "a_scaled": scaled[0],
        "b_scaled": scaled[1],
        "difference": difference,
        "ci_low": ends[0],
        "ci_high": ends[1],
        "all_low": ends[2],
        "all_high": ends[3],
    }
    rho = compare({"a": points[0], "b": points[1]}, [("a", "b")], [("spearman", 0)])
    return Dissociation(
        frame=_frame(a, b, both, columns, tops, call),
        names=(str(names[0]), str(names[1])),
        units=(a.unit, b.unit),
        scale=scale,
        k=k,
        level=level,
        n_trials=(a.n_kept, b.n_kept),
        n_shared=len(set(kept_ids(a)) & set(kept_ids(b))),
        spearman=float(rho["a", "b", "spearman", 0][0]),
        reason=reason,
    )


def _check_points(names: tuple[str, str], points: list[np.ndarray], k: int) -> None:
    n = points[0].shape[1]
    if n < 2:
        raise InvalidInput(f"only {n} heads are defined in both maps; their scale needs two.")
    if k > n:
        raise InvalidInput(f"k is {k}, but both maps score only {n} heads; ask for at most {n}.")
    for name, point in zip(names, points, strict=True):
        if (point == point[0, 0]).all():
            raise InvalidInput(f"every score of {name!r} is {point[0, 0]:g}; a constant map has no scale.")


def _scaled(values: np.ndarray, scale: str) -> np.ndarray:
    """``[sample, head]`` on the common scale; NaN for a sample that has none."""
    if scale == "rank":
        r = ranked(values)
        return (r.average - 1) / np.maximum(r.n - 1, 1)[:, None]
    defined = np.isfinite(values)
    n = np.maximum(defined.sum(axis=1, keepdims=True), 1)
    mean = np.where(defined, values, 0.0).sum(axis=1, keepdims=True) / n
    sd = np.sqrt(np.where(defined, (values - mean) ** 2, 0.0).sum(axis=1, keepdims=True) / n)
    return np.divide(values, sd, out=np.full(values.shape, np.nan), where=sd > 0)


def _samples(
    maps: dict[str, HeadScores], both: np.ndarray, scale: str, n_boot: int, seed: int
) -> tuple[str, np.ndarray | None]:
    """Differences of the resampled maps ``[sample, head]``, or why there are none."""
    if all(is_fixed(one) for one in maps.values()):
        return "neither map has two trials to resample", None
    sides = []
    for name, counts in draw_counts(maps, n_boot, seed).items():
        means = maps[name].mean().reshape(1, -1) if counts is None else weighted_means(maps[name], counts)
        sides.append(_scaled(means[:, both], scale))
    return "", sides[0] - sides[1]


def _band(difference: np.ndarray, samples: np.ndarray, level: float, n: int) -> tuple[np.ndarray, np.ndarray]:
    """Band around the differences that holds for all heads at once; NaN for heads without spread."""
    defined = np.isfinite(samples)
    drawn = np.maximum(defined.sum(axis=0), 1)
    mean = np.where(defined, samples, 0.0).sum(axis=0) / drawn
    se = np.sqrt(np.where(defined, (samples - mean) ** 2, 0.0).sum(axis=0) / drawn)
    moving = se > 1e-12
    if not moving.any():
        return np.full(len(se), np.nan), np.full(len(se), np.nan)
    away = np.abs(samples[:, moving] - mean[moving]) / se[moving]
    c = float(np.quantile(np.where(np.isfinite(away), away, 0.0).max(axis=1), level))
    half = np.where(moving, student(c, n) * se, np.nan)
    return difference - half, difference + half


def _frame(
    a: HeadScores,
    b: HeadScores,
    both: np.ndarray,
    columns: dict[str, np.ndarray],
    tops: list[np.ndarray],
    call: np.ndarray,
) -> pd.DataFrame:
    """One row per head; what only heads in both maps have is NaN, False or empty elsewhere."""
    import pandas as pd

    heads = [Head(*divmod(i, a.n_heads)) for i in range(both.size)]
    frame = pd.DataFrame(
        {
            "layer": [h.layer for h in heads],
            "head": [h.head for h in heads],
            "label": [str(h) for h in heads],
            "a": a.mean().ravel(),
            "b": b.mean().ravel(),
        }
    )
    for name, values in columns.items():
        frame[name] = np.nan
        frame.loc[both, name] = values
    for name, top in zip(("top_a", "top_b"), tops, strict=True):
        whole = np.zeros(both.size, dtype=bool)
        whole[both] = top
        frame[name] = whole
    calls = np.full(both.size, "", dtype=object)
    calls[both] = call
    return frame.assign(call=[str(c) for c in calls])
