"""Candidate scores made up for tests of ``mechheads.verdicts``: noise, with heads whose accuracy is chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.verdicts import baseline_credit

TEXTS = (" true", " false", " unknown", " both", " neither")


def made(
    values: Any,
    labels: Sequence[int] | np.ndarray,
    *,
    candidates: Sequence[Sequence[str]] | None = None,
    groups: Sequence[str] | None = None,
    records: Sequence[Mapping[str, Any]] | None = None,
    baseline: Any = None,
    split: str | None = None,
    name: str = "t",
) -> CandidateScores:
    """Scores from ``[trial candidate layer head]``, everything else filled in."""
    values = np.asarray(values, dtype=np.float32)
    n, width = values.shape[:2]
    texts = [TEXTS[:width]] * n if candidates is None else candidates
    rows = [dict(r) for r in records] if records is not None else [{} for _ in range(n)]
    for i, row in enumerate(rows):
        if groups is not None:
            row["group"] = groups[i]
        if split is not None:
            row["split"] = split
    if baseline is None:
        baseline = np.where(np.arange(width) < np.array([len(c) for c in texts])[:, None], -1.0, np.nan)
    return CandidateScores(
        values=values,
        baseline=np.asarray(baseline, dtype=np.float64),
        labels=np.asarray(labels, dtype=np.int64),
        candidates=texts,
        trial_ids=[f"{name}{i:04d}" for i in range(n)],
        records=rows,
    )


def noisy(
    n: int,
    *,
    shape: tuple[int, int] = (4, 5),
    width: int = 2,
    planted: Mapping[tuple[int, int], float] | None = None,
    own: float = 0.5,
    seed: int = 0,
    group_size: int = 1,
    split: str | None = None,
    name: str = "t",
    **columns: Sequence[Any],
) -> CandidateScores:
    """Noise for scores; planted heads are right with a given chance, the model itself with ``own``."""
    rng = np.random.default_rng([seed, n, width])
    labels = rng.permutation(np.arange(n) % width)
    values = rng.normal(size=(n, width, *shape))
    rows = np.arange(n)

    def answers(chance: float) -> np.ndarray:
        wrong = (labels + rng.integers(1, width, size=n)) % width
        return np.where(rng.random(n) < chance, labels, wrong)

    for at, chance in (planted or {}).items():
        values[:, :, at[0], at[1]] = -np.abs(values[:, :, at[0], at[1]])
        values[rows, answers(chance), at[0], at[1]] = 1.0
    baseline = np.full((n, width), -2.0)
    baseline[rows, answers(own)] = -0.5
    records = [{"group": f"{name}{i // group_size}"} | {k: v[i] for k, v in columns.items()} for i in range(n)]
    return made(values, labels, baseline=baseline, split=split, name=name, records=records)


def own(scores: CandidateScores) -> np.ndarray:
    """``[trial]`` how far the model itself is right."""
    return baseline_credit(scores)[np.arange(len(scores)), scores.labels]


def splits(
    planted: Mapping[tuple[int, int], float], *, name: str = "t", n: int = 400, n_test: int = 300, **options: Any
) -> CandidateScores:
    """Calibration and test trials in one."""
    a = noisy(n, planted=planted, split="calibration", name=f"{name}c", **options)
    return a.merge(
        noisy(n_test, planted=planted, split="test", seed=options.pop("seed", 0) + 77, name=f"{name}t", **options)
    )
