"""Small sweeps for the tests of their statistics and figures, and a slow bootstrap that goes sample by sample."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet

COLUMNS = ["ranking", "draw", "k", "task", "trial_id", "metric", "value", "heads"]
# Values of a cell: one row of trials, or one a draw.
Values = Sequence[float] | Sequence[Sequence[float]] | np.ndarray


def sweep(cells: Mapping[Any, Values], *, metric: str = "correct", **meta: Any) -> SweepResult:
    """A sweep from ``{(ranking, k): values}`` or ``{(task, ranking, k): values}``; None and NaN are undefined."""
    rows = []
    for key, values in cells.items():
        task, ranking, k = key if len(key) == 3 else ("needles", *key)
        table = np.atleast_2d(np.asarray(values, dtype=float))
        for draw, of_draw in enumerate(table):
            heads = ", ".join(f"L{i}H{draw}" for i in range(k))
            rows += [
                (ranking, draw, k, task, f"{task}{i:03d}", metric, value, heads) for i, value in enumerate(of_draw)
            ]
    return SweepResult(pd.DataFrame(rows, columns=COLUMNS), meta)


def right(n: int, of: int) -> list[float]:
    """The first n of so many trials are right."""
    return [1.0] * n + [0.0] * (of - n)


def planted(
    seed: int = 0,
    *,
    n: int = 24,
    rankings: Mapping[str, Sequence[float]] | None = None,
    tasks: Mapping[str, float] | None = None,
    ks: Sequence[int] = (1, 5, 10),
    draws: int = 3,
    binary: bool = True,
    base: float = 0.9,
    kept: bool = False,
    metric: str = "correct",
) -> SweepResult:
    """Trials of unequal difficulty; a ranking has the chance of success given at each k, times a task's factor.

    Args:
        seed: Seed.
        n: Trials a task.
        rankings: Chance of success at each k.
        tasks: How much of each drop a task feels: 1 all, 0 none.
        ks: Numbers of heads.
        draws: Draws of random heads; 0 for none.
        binary: Right or wrong, or else a number about that chance.
        base: Chance of success without ablation.
        kept: Whether k counts kept heads.
        metric: Name of the metric.
    """
    rng = np.random.default_rng(seed)
    rankings = {"locos": (0.6, 0.2, 0.05), "dla": (0.85, 0.7, 0.5)} if rankings is None else rankings
    cells: dict[Any, Any] = {}
    for task, felt in (tasks or {"needles": 1.0, "recall": 0.0}).items():
        easy = rng.random(n)

        def values(chance: float, easy: np.ndarray = easy) -> np.ndarray:
            mixed = 0.6 * easy + 0.4 * rng.random(n)
            return (mixed < chance).astype(float) if binary else chance + 0.3 * (0.5 - mixed)

        if not kept:
            cells[task, "none", 0] = values(base)
        for name, chances in rankings.items():
            if kept:
                cells[task, name, 0] = values(0.02)
            for k, chance in zip(ks, chances, strict=True):
                cells[task, name, k] = values(base - felt * (base - chance) if not kept else base - chance)
        for k in ks if draws else ():
            cells[task, "random", k] = [values(base - 0.03 * d if not kept else 0.05) for d in range(draws)]
    return sweep(cells, metric=metric, **({"side": "kept"} if kept else {}))


def study(seed: int = 0, **fields: Any) -> SweepSet:
    """Three interventions and a complement."""
    return SweepSet(
        {
            "mean": planted(seed, **fields),
            "zero": planted(seed + 1, **fields),
            "resample": planted(seed + 2, **fields),
            "mean, kept": planted(seed + 3, kept=True, **fields),
        }
    )


class Slow:
    """Bootstraps of one task and metric, trial by trial and draw by draw, in loops."""

    def __init__(self, result: SweepResult, task: str = "needles", *, n_boot: int = 40, seed: int = 0):
        rows = result.frame.loc[result.frame["task"] == task]
        self.trials = sorted(set(rows["trial_id"]))
        self.values: dict[tuple[str, int], list[dict[str, float]]] = {}
        for (ranking, k, _), part in rows.groupby(["ranking", "k", "draw"]):
            known = part.loc[np.isfinite(part["value"])]
            cell = self.values.setdefault((str(ranking), int(k)), [])
            cell.append(dict(zip(known["trial_id"], known["value"], strict=True)))
        name = zlib.crc32("\n".join((task, *self.trials)).encode())
        n = len(self.trials)
        self.drawn = np.random.default_rng([seed, name]).integers(0, n, size=(n_boot, n))
        self.taken = {
            d: np.random.default_rng([seed, name, d]).integers(0, d, size=(n_boot, d - 1)) if d > 1 else None
            for d in {len(cell) for cell in self.values.values()}
        }
        self.n_boot = n_boot

    def common(self, *keys: tuple[str, int]) -> list[str]:
        """Trials that all of the cells define."""
        return [t for t in self.trials if all(any(t in draw for draw in self.values[key]) for key in keys)]

    def of_trial(self, key: tuple[str, int], trial: str, draws: Sequence[int]) -> float | None:
        found = [self.values[key][d][trial] for d in draws if trial in self.values[key][d]]
        return sum(found) / len(found) if found else None

    def per_trial(self, key: tuple[str, int], trials: Sequence[str]) -> list[float]:
        return [float(self.of_trial(key, t, range(len(self.values[key])))) for t in trials]  # type: ignore[arg-type]

    def mean(self, key: tuple[str, int], trials: Sequence[str]) -> float:
        return float(np.mean(self.per_trial(key, trials)))

    def samples(self, key: tuple[str, int], trials: Sequence[str]) -> np.ndarray:
        """Means of every sample over those of its trials that are asked for."""
        taken, out = self.taken[len(self.values[key])], []
        for b in range(self.n_boot):
            found = []
            for i in self.drawn[b]:
                if self.trials[i] in trials:
                    value = self.of_trial(key, self.trials[i], [0] if taken is None else taken[b].tolist())
                    found += [] if value is None else [value]
            out.append(np.mean(found))
        return np.array(out)


def widened(value: float, samples: np.ndarray, n: int, level: float = 0.95) -> tuple[float, float]:
    """Percentile interval, stretched about the value by ``sqrt(n / (n - 1)) * t / z``."""
    upper = (1 + level) / 2
    stretch = np.sqrt(n / (n - 1)) * stats.t.ppf(upper, n - 1) / stats.norm.ppf(upper)
    low, high = np.quantile(samples, [1 - upper, upper])
    return value + stretch * (low - value), value + stretch * (high - value)
