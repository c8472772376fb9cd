"""Heads that several detectors put among their highest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from mechheads.agreement.rank_rows import clear_top, ranked
from mechheads.agreement.resampling import check_maps
from mechheads.errors import InvalidInput
from mechheads.heads import Head, HeadSet
from mechheads.scores import HeadScores
from mechheads.stats import check_count

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class Consensus:
    """Heads found by several methods, made by ``consensus``.

    Attributes:
        frame: One row per head in at least one top set, most methods first, then best mean rank: columns ``layer head
            label count mean_rank which``. ``which`` names the methods, comma-separated; ``mean_rank`` is over all
            methods that score the head, 1 the highest.
        heads: The heads that at least ``at_least`` methods have in their top k, in the order of the frame.
        by_count: One row per number of methods m: ``methods`` m, ``heads`` with at least m, ``expected`` by chance.
        k: Size of the top sets.
        at_least: Methods needed.
        names: The methods.
        n_top: Heads in each method's top set: k, or fewer where a tie leaves the last places open.
        notes: What to know: which methods' top sets are smaller than k, and why.
    """

    frame: pd.DataFrame
    heads: HeadSet
    by_count: pd.DataFrame
    k: int
    at_least: int
    names: tuple[str, ...]
    n_top: Mapping[str, int]
    notes: tuple[str, ...]

    @property
    def expected(self) -> float:
        """How many heads as many methods would share if each drew its top set at random."""
        rows = self.by_count.loc[self.by_count["methods"] == self.at_least, "expected"]
        return float(rows.iloc[0])

    def __repr__(self) -> str:
        return (
            f"Consensus({len(self.heads)} heads in the top {self.k} of at least {self.at_least} of "
            f"{len(self.names)} methods, {self.expected:.2g} expected by chance)"
        )


def consensus(scores: Mapping[str, HeadScores], *, k: int = 10, at_least: int | None = None) -> Consensus:
    """Count for every head how many methods have it among their k highest.

    By chance: if method i put a random set of ``n_i`` of its ``N_i`` scored heads on top, independently of the others,
    a head would be in it with probability ``n_i / N_i``; the number of methods that have it is then Poisson-binomial
    (binomial where all are alike), and the expected number of heads with at least m is the sum over heads. Detectors
    that read the same attention patterns are not independent, so more than chance is no proof of retrieval.

    Heads that tie for the last places are in no top set, since nothing says which of them belongs there.

    Args:
        scores: Name to scores, at least two.
        k: Size of the top sets.
        at_least: How many methods must have a head; more than half of them if None, both of two.

    Raises:
        InvalidInput: If there are fewer than two methods, their shapes differ, one kept no trial, or k or ``at_least``
            is out of range.
    """
    import pandas as pd

    maps = check_maps(scores, why="a consensus needs")
    check_count("k", k)
    needed = len(maps) // 2 + 1 if at_least is None else check_count("at_least", at_least)
    if needed > len(maps):
        raise InvalidInput(f"at_least is {at_least}, but there are only {len(maps)} methods.")
    points = np.stack([one.mean().ravel() for one in maps.values()])
    tops, notes = _tops(list(maps), points, k)
    falling = ranked(-points).average
    count = tops.sum(axis=0)
    defined = np.isfinite(points)
    mean_rank = np.where(defined, falling, 0.0).sum(axis=0) / np.maximum(defined.sum(axis=0), 1)
    chosen = sorted(np.flatnonzero(count).tolist(), key=lambda i: (-count[i], mean_rank[i], i))
    n_heads = next(iter(maps.values())).n_heads
    heads = [Head(*divmod(i, n_heads)) for i in chosen]
    frame = pd.DataFrame(
        {
            "layer": [h.layer for h in heads],
            "head": [h.head for h in heads],
            "label": [str(h) for h in heads],
            "count": [int(count[i]) for i in chosen],
            "mean_rank": [float(mean_rank[i]) for i in chosen],
            "which": [", ".join(name for name, top in zip(maps, tops, strict=True) if top[i]) for i in chosen],
        }
    )
    by_count = pd.DataFrame(
        {
            "methods": range(1, len(maps) + 1),
            "heads": [int((count >= m).sum()) for m in range(1, len(maps) + 1)],
            "expected": _expected(tops.sum(axis=1), defined),
        }
    )
    return Consensus(
        frame=frame,
        heads=HeadSet(h for h, i in zip(heads, chosen, strict=True) if count[i] >= needed),
        by_count=by_count,
        k=k,
        at_least=needed,
        names=tuple(maps),
        n_top={name: int(top.sum()) for name, top in zip(maps, tops, strict=True)},
        notes=notes,
    )


def _tops(names: list[str], points: np.ndarray, k: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """``[method head]`` bool, the heads that are surely among the k highest, and notes on ties."""
    tops, notes = [], []
    for name, own in zip(names, points, strict=True):
        n = int(np.isfinite(own).sum())
        if k > n:
            raise InvalidInput(f"k is {k}, but {name!r} scores only {n} heads; ask for at most {n}.")
        top = clear_top(own, k)
        tops.append(top)
        if top.sum() < k:
            last = float(np.sort(own[np.isfinite(own)])[-k])
            notes.append(
                f"the top {k} of {name!r} is {int(top.sum())} heads: {int((own == last).sum())} more tie at {last:g}, "
                "and are left out"
            )
    return np.stack(tops), tuple(notes)


def _expected(n_top: np.ndarray, defined: np.ndarray) -> list[float]:
    """Expected number of heads in at least 1, 2, ... random top sets."""
    chance = np.where(defined, (n_top / defined.sum(axis=1))[:, None], 0.0)
    # exactly[m, head]: probability that m of the methods so far have the head.
    exactly = np.zeros((len(chance) + 1, chance.shape[1]))
    exactly[0] = 1.0
    for p in chance:
        exactly[1:] = exactly[1:] * (1 - p) + exactly[:-1] * p
        exactly[0] *= 1 - p
    at_least = np.cumsum(exactly[::-1].sum(axis=1))[::-1]
    return [float(x) for x in at_least[1:]]
