"""Scores by KV group: the query heads that share one key/value head, which a KV cache keeps or drops together."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.agreement.pairs import sizes
from mechheads.agreement.resampling import WEIGHTS_TRIAL, check_maps, is_fixed, weighted_means
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head
from mechheads.scores import HeadScores
from mechheads.stats import bootstrap_weights, check_count, check_level, percentiles

if TYPE_CHECKING:
    import pandas as pd

HOW = ("max", "mean", "sum")


@dataclass(frozen=True, eq=False, repr=False)
class KVGroups:
    """Scores of the KV groups of a model, made by ``by_kv_group``.

    Attributes:
        method: Method of the scores.
        unit: Unit of the values, that of the scores.
        how: ``"max"``, ``"mean"`` or ``"sum"`` over the heads of a group.
        values: ``[layer kv_head]`` float64; NaN = undefined.
        low: Lower end of the interval; NaN where there is none.
        high: Upper end.
        best: ``[layer kv_head]`` index of the query head with the highest score in the group; -1 if none is defined.
        heads_per_group: Query heads that share a key/value head.
        level: Confidence level.
        n_trials: Kept trials; 0 where the scores read the weights alone.
    """

    method: str
    unit: str
    how: str
    values: np.ndarray
    low: np.ndarray
    high: np.ndarray
    best: np.ndarray
    heads_per_group: int
    level: float
    n_trials: int

    def __repr__(self) -> str:
        layers, groups = self.values.shape
        return f"KVGroups({self.method!r}, {self.how} over {self.heads_per_group} heads, {layers} x {groups} groups)"

    def to_frame(self) -> pd.DataFrame:
        """One row per group: ``layer kv_head label score ci_low ci_high rank heads best_head``.

        ``rank`` is 1 for the highest score, ties in order of (layer, kv_head), NaN if undefined; ``heads`` names the
        query heads, ``best_head`` the highest of them.
        """
        import pandas as pd

        layers, groups = self.values.shape
        flat = self.values.ravel()
        rank = np.full(flat.size, np.nan)
        order = [i for i in np.argsort(-flat, kind="stable") if np.isfinite(flat[i])]
        rank[order] = np.arange(1, len(order) + 1)
        places = [divmod(i, groups) for i in range(layers * groups)]
        size = self.heads_per_group
        return pd.DataFrame(
            {
                "layer": [layer for layer, _ in places],
                "kv_head": [kv for _, kv in places],
                "label": [f"L{layer}KV{kv}" for layer, kv in places],
                "score": flat,
                "ci_low": self.low.ravel(),
                "ci_high": self.high.ravel(),
                "rank": rank,
                "heads": [
                    ", ".join(str(Head(layer, kv * size + i)) for i in range(size)) for layer, kv in places
                ],
                "best_head": [
                    str(Head(layer, int(best))) if best >= 0 else ""
                    for (layer, _), best in zip(places, self.best.ravel(), strict=True)
                ],
            }
        )  # fmt: skip


def key_value_heads(scores: HeadScores, n_key_value_heads: int | None = None) -> int:
    """Key/value heads a layer: the number given, or what the scores' provenance says.

    Raises:
        InvalidInput: If neither says it, the two differ, or it does not divide the number of query heads.
    """
    model = scores.meta.get("model")
    known = model.get("n_key_value_heads") if isinstance(model, dict) else None
    if n_key_value_heads is None and known is None:
        raise InvalidInput(
            f"the scores of {scores.method!r} do not say how many key/value heads the model has; give "
            "n_key_value_heads (num_key_value_heads in the model's configuration)."
        )
    n = check_count("n_key_value_heads", known if n_key_value_heads is None else n_key_value_heads)
    if known is not None and n != known:
        raise InvalidInput(f"n_key_value_heads is {n}, but the scores come from a model with {known}; leave it out.")
    if scores.n_heads % n:
        raise InvalidInput(
            f"n_key_value_heads is {n}, which does not divide the {scores.n_heads} query heads of a layer."
        )
    return n


def by_kv_group(
    scores: HeadScores,
    n_key_value_heads: int | None = None,
    *,
    how: str = "max",
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> KVGroups:
    """Put the pooled scores of the query heads of each KV group together.

    Query heads ``g * s`` to ``g * s + s - 1`` of a layer read key/value head g, with
    ``s = n_heads / n_key_value_heads``. ``"max"`` asks whether any head of the group scores high: a cache that must not
    hurt it has to keep the group. ``"mean"`` and ``"sum"`` ask for the group as a whole; a sum is undefined where a
    head is, the others leave undefined heads out. Values of the heads are pooled over trials first.

    Intervals are percentile bootstraps over trials, the whole statistic computed anew each time. The maximum of
    several noisy means tends to lie above the greatest true one, the more so the fewer the trials.

    Args:
        scores: Scores of the query heads.
        n_key_value_heads: Key/value heads a layer; what the scores' provenance says if None.
        how: ``"max"``, ``"mean"`` or ``"sum"``.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.

    Raises:
        InvalidInput: If no trial is kept, or as ``key_value_heads``.
        UnknownName: If ``how`` is none of the three.
    """
    check_maps({"scores": scores}, least=1)
    check_level(level)
    if how not in HOW:
        raise UnknownName("way to put heads together", how, HOW)
    groups = key_value_heads(scores, n_key_value_heads)
    shape, size = (scores.n_layers, groups), scores.n_heads // groups
    mean = scores.mean()
    heads = mean.reshape(*shape, size)
    defined = np.isfinite(heads)
    best = np.where(defined, heads, -np.inf).argmax(axis=-1) + size * np.arange(groups)
    low = high = np.full(shape, np.nan)
    if not is_fixed(scores):
        counts = bootstrap_weights(scores.n_kept, n_boot, np.random.default_rng(seed))
        samples = _together(weighted_means(scores, counts).reshape(n_boot, *shape, size), how)
        low, high = percentiles(samples, level)
        few = (np.isfinite(scores.values[scores.kept]).sum(axis=0) < 2).reshape(*shape, size).all(axis=-1)
        low, high = np.where(few, np.nan, low), np.where(few, np.nan, high)
    return KVGroups(
        method=scores.method,
        unit=scores.unit,
        how=how,
        values=_together(heads, how),
        low=low,
        high=high,
        best=np.where(defined.any(axis=-1), best, -1),
        heads_per_group=size,
        level=level,
        n_trials=0 if tuple(scores.trial_ids) == (WEIGHTS_TRIAL,) else scores.n_kept,
    )


def _together(heads: np.ndarray, how: str) -> np.ndarray:
    """``[... head]`` to ``[...]``."""
    if how == "sum":
        return heads.sum(axis=-1)
    defined = np.isfinite(heads)
    n = defined.sum(axis=-1)
    if how == "max":
        return np.where(n > 0, np.where(defined, heads, -np.inf).max(axis=-1), np.nan)
    total = np.where(defined, heads, 0.0).sum(axis=-1)
    return np.divide(total, n, out=np.full(n.shape, np.nan), where=n > 0)


def kv_ranking(scores: HeadScores, n_key_value_heads: int | None = None, **options: Any) -> pd.DataFrame:
    """The KV groups with a defined score, highest first.

    Args:
        scores: As in ``by_kv_group``.
        n_key_value_heads: Likewise.
        **options: ``how``, ``level``, ``n_boot``, ``seed`` of ``by_kv_group``.

    Returns:
        The rows of ``KVGroups.to_frame``, in order of rank.
    """
    frame = by_kv_group(scores, n_key_value_heads, **options).to_frame()
    frame = frame.loc[frame["rank"].notna()].sort_values("rank").reset_index(drop=True)
    return frame.assign(rank=frame["rank"].astype(int))


def kv_coverage(
    scores: HeadScores, n_key_value_heads: int | None = None, *, k: Sequence[int] | int = (5, 10, 20, 50)
) -> pd.DataFrame:
    """How many KV groups the k highest heads lie in.

    Heads of a group share keys and values, so their scores go together and k heads need fewer than k groups. k heads
    drawn at random from N, in groups of s, lie in ``(N / s) (1 - C(N - s, k) / C(N, k))`` groups on average.

    Args:
        scores: Scores of the query heads.
        n_key_value_heads: Key/value heads a layer; what the scores' provenance says if None.
        k: Numbers of heads, one or several.

    Returns:
        A row per k: ``k groups expected n_groups share``; ``share`` is ``groups / n_groups``, what of the cache would
        have to be kept.

    Raises:
        InvalidInput: If no trial is kept, k is more than the heads with a score, or as ``key_value_heads``.
    """
    import pandas as pd

    check_maps({"scores": scores}, least=1)
    groups = key_value_heads(scores, n_key_value_heads)
    size, total = scores.n_heads // groups, scores.n_layers * groups
    n = total * size
    rows = []
    for count in sizes(k):
        covered = len({(h.layer, h.kv_group(scores.n_heads, groups)) for h in scores.top(count)})
        missed = math.comb(n - size, count) / math.comb(n, count)
        rows.append(
            {
                "k": count,
                "groups": covered,
                "expected": total * (1 - missed),
                "n_groups": total,
                "share": covered / total,
            }
        )
    return pd.DataFrame(rows)
