"""Cells over the same trials, and linear sums of them with paired bootstraps: what every number here is made of."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from mechheads.agreement.resampling import widening
from mechheads.errors import InvalidInput, UnknownName
from mechheads.stats import bootstrap_weights, check_count, check_level, percentiles, wilson
from mechheads.sweep_cells import BASELINE, cell_arrays, within_trial
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet

if TYPE_CHECKING:
    import pandas as pd

# A cell: label of the intervention, ranking, number of heads.
Key = tuple[str, str, int]
Terms = Sequence[tuple[Key, float]]
# Metrics in which less is better, besides those that meta["lower_is_better"] names.
LOWER_IS_BETTER = ("perplexity", "loss", "nll")
# The label of a sweep that is looked at alone.
ALONE = ""


@dataclass(frozen=True, eq=False)
class Contrast:
    """A weighted sum of cells, over the trials that all of them define.

    Attributes:
        per_trial: ``[trial]``, draws averaged.
        samples: ``[n_boot]``, trials and draws resampled.
        bounds: Least and greatest value it can have, where every value of the metric lies in 0 to 1; else None.
        level: Confidence level.
    """

    per_trial: np.ndarray
    samples: np.ndarray
    bounds: tuple[float, float] | None
    level: float

    @property
    def n(self) -> int:
        """Number of trials."""
        return len(self.per_trial)

    @property
    def value(self) -> float:
        """Mean over trials; NaN if there is none."""
        return float(self.per_trial.mean()) if self.n else float("nan")

    @cached_property
    def ends(self) -> tuple[float, float]:
        """The interval: percentiles, widened for few trials; NaN for fewer than two.

        Trials that are all alike leave a bootstrap no width. Where the metric goes from 0 to 1, the share of trials
        that Wilson's interval leaves open, ``1 - wilson(n, n).low``, is then given the extremes that a trial can have.
        """
        if self.n < 2:
            return float("nan"), float("nan")
        value = self.value
        if self.bounds is None:
            return widened(value, self.samples, self.level, self.n)
        least, most = self.bounds
        if np.ptp(self.samples) < 1e-12:
            open_ = unseen(self.n, self.level)
            low, high = value + open_ * (least - value), value + open_ * (most - value)
        else:
            low, high = widened(value, self.samples, self.level, self.n)
        # Rounding must not push an end past the value itself.
        return max(min(low, value), least), min(max(high, value), most)


@dataclass(frozen=True, eq=False)
class Joint:
    """Cells of one task and metric, of one sweep or several, all over the same list of trials.

    Attributes:
        task: The task.
        metric: The metric.
        trials: Ids of all trials of any cell.
        cells: By (label, ranking, k) values ``[draw trial]``; NaN = not measured. The run without ablation is
            (label, ``"none"``, 0).
        sign: 1 where more is better, -1 where less is.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.
    """

    task: str
    metric: str
    trials: tuple[str, ...]
    cells: Mapping[Key, np.ndarray]
    sign: int
    level: float
    n_boot: int
    seed: int

    @cached_property
    def bounded(self) -> bool:
        """Whether every value lies in 0 to 1: right or wrong, a share, an F1."""
        found = [v[np.isfinite(v)] for v in self.cells.values()]
        return all(bool(((v >= 0.0) & (v <= 1.0)).all()) for v in found)

    @cached_property
    def _weights(self) -> tuple[np.ndarray, dict[int, np.ndarray]]:
        """How often each sample draws each trial; and each draw, by the number of draws."""
        # From seed, task and trials alone, so that a number does not depend on what else was asked for.
        name = zlib.crc32("\n".join((self.task, *self.trials)).encode())
        counts = bootstrap_weights(len(self.trials), self.n_boot, np.random.default_rng([self.seed, name]))
        sizes = sorted({len(values) for values in self.cells.values()})
        return counts, {d: self._draws(d, np.random.default_rng([self.seed, name, d])) for d in sizes}

    def _draws(self, d: int, rng: np.random.Generator) -> np.ndarray:
        """How often each sample takes each draw: d - 1 are taken of d, so that their mean has the right spread.

        A mean of d taken of d varies by ``(d - 1) / d`` too little, by half for two (Rao, Wu, Journal of the American
        Statistical Association 83, 1988).
        """
        if d == 1:
            return np.ones((self.n_boot, 1))
        taken = rng.integers(0, d, size=(self.n_boot, d - 1))
        return (taken[:, :, None] == np.arange(d)).sum(axis=1).astype(float)

    def rankings(self, label: str) -> list[str]:
        """Rankings of a label, without the baseline."""
        return list(dict.fromkeys(r for of, r, _ in self.cells if of == label and r != BASELINE))

    def ks(self, label: str, ranking: str) -> list[int]:
        """Numbers of heads that a ranking has a cell of its own for, rising."""
        return sorted(k for of, r, k in self.cells if (of, r) == (label, ranking))

    def base(self, label: str) -> Key | None:
        """The run without ablation of a label, if it was measured."""
        key = (label, BASELINE, 0)
        return key if key in self.cells else None

    def mask(self, keys: Sequence[Key]) -> np.ndarray:
        """Trials that every one of the cells defines, in one draw at least."""
        return np.logical_and.reduce([np.isfinite(within_trial(self.cells[key])) for key in keys])

    def contrast(self, terms: Terms, *, mask: np.ndarray | None = None) -> Contrast:
        """``sum of weight * cell mean`` over the trials of the mask; if None, over those that all terms define."""
        keep = self.mask([key for key, _ in terms]) if mask is None else mask
        total, samples, size = np.zeros(int(keep.sum())), np.zeros(self.n_boot), 0.0
        for key, weight in terms:
            values = self.cells[key][:, keep]
            total += weight * within_trial(values)
            samples += weight * self._means(values, keep)
            size += abs(weight) * float(np.nanmax(np.abs(values), initial=0.0))
        # What rounding alone leaves of equal values must not look like a difference.
        total, samples = (np.where(np.abs(x) < 1e-13 * size, 0.0, x) for x in (total, samples))
        bounds = None
        if self.bounded:
            weights = [weight for _, weight in terms]
            bounds = sum(min(w, 0.0) for w in weights), sum(max(w, 0.0) for w in weights)
        return Contrast(total, samples, bounds, self.level)

    def _means(self, values: np.ndarray, keep: np.ndarray) -> np.ndarray:
        """Bootstrap means of a cell ``[draw trial]``: over draws within the trial, then over trials."""
        counts, by_size = self._weights
        drawn, draws, defined = counts[:, keep], by_size[len(values)], np.isfinite(values).astype(float)
        if len(values) == 1:
            weight, total = drawn @ defined[0], drawn @ np.where(defined[0] > 0, values[0], 0.0)
            return np.divide(total, weight, out=np.full(self.n_boot, np.nan), where=weight > 0)
        known = draws @ defined  # [n_boot trial]
        total = draws @ np.where(defined > 0, values, 0.0)
        within = np.divide(total, known, out=np.zeros(total.shape), where=known > 0)
        weight = (drawn * (known > 0)).sum(axis=1)
        return np.divide((drawn * within).sum(axis=1), weight, out=np.full(self.n_boot, np.nan), where=weight > 0)


def unseen(n: int, level: float) -> float:
    """Share of trials that may differ though none of n did: what Wilson's interval leaves open."""
    return 1.0 - wilson(n, n, level=level).low


def widened(value: float, samples: np.ndarray, level: float, n: int) -> tuple[float, float]:
    """Percentile interval about the value, made wider for few trials (``agreement.resampling.widening``)."""
    low, high = (float(x) for x in percentiles(samples, level))
    wide = widening(n, level)
    return value + wide * (low - value), value + wide * (high - value)


def joints(
    results: Mapping[str, SweepResult],
    metric: str,
    tasks: Sequence[str],
    *,
    level: float,
    n_boot: int,
    seed: int,
) -> dict[str, Joint]:
    """The cells of each task that has the metric, over the trials of all results together.

    Raises:
        InvalidInput: If the metric was measured on none of the tasks.
    """
    check_level(level)
    check_count("n_boot", n_boot, least=2)
    check_count("seed", seed, least=0)
    out = {}
    for task in tasks:
        rows = {label: _rows(result, task, metric) for label, result in results.items()}
        trials = sorted({trial for part in rows.values() for trial in part["trial_id"]})
        if not trials:
            continue
        cells: dict[Key, np.ndarray] = {}
        for label, part in rows.items():
            own = sorted(set(part["trial_id"]))
            place = np.searchsorted(trials, own) if own else np.array([], dtype=int)
            for (ranking, k), values in cell_arrays(part).items():
                whole = np.full((len(values), len(trials)), np.nan)
                whole[:, place] = values
                cells[label, ranking, k] = whole
        sign = direction(results, metric)
        out[task] = Joint(task, metric, tuple(trials), cells, sign, level, n_boot, seed)
    if not out:
        raise InvalidInput(f"{metric!r} was not measured on {' or '.join(map(repr, tasks))}.")
    return out


def _rows(result: SweepResult, task: str, metric: str) -> pd.DataFrame:
    frame = result.frame
    return frame.loc[(frame["task"] == task) & (frame["metric"] == metric)]


def direction(results: Mapping[str, SweepResult], metric: str) -> int:
    """1 where more of the metric is better, -1 where less is."""
    given = [r.meta.get("lower_is_better") or () for r in results.values()]
    named = [name for names in given for name in ([names] if isinstance(names, str) else names)]
    return -1 if metric in named or metric.split("_")[-1] in LOWER_IS_BETTER else 1


def check_names(result: SweepResult, kind: str, names: Sequence[str] | str | None) -> list[str]:
    """Tasks, rankings or metrics of a sweep, those asked for, checked; all if None.

    Raises:
        UnknownName: If one is not in the sweep.
    """
    known = {"task": result.tasks, "ranking": result.rankings, "metric": result.metrics}[kind]
    if names is None:
        return known
    names = [names] if isinstance(names, str) else list(names)
    for name in names:
        if name not in known:
            raise UnknownName(f"{kind} of the sweep", name, known)
    return names


def the_metric(result: SweepResult, metric: str | None) -> str:
    """The metric asked for, or the sweep's first."""
    return result.metrics[0] if metric is None else check_names(result, "metric", metric)[0]


def per_label(what: SweepResult | SweepSet, build: Callable[[SweepResult], pd.DataFrame]) -> pd.DataFrame:
    """The table of a sweep, or of every sweep of a set whose k counts ablated heads, with its label in front.

    Raises:
        InvalidInput: If it is neither, or a set of complements alone.
    """
    import pandas as pd

    if isinstance(what, SweepResult):
        return build(what)
    if not isinstance(what, SweepSet):
        raise InvalidInput(f"sweep is a {type(what).__name__}; give a SweepResult or a SweepSet.")
    if not what.ablated:
        raise InvalidInput(f"the set has complements alone ({', '.join(what)}); give one that ablates the sets too.")
    parts = []
    for label in what.ablated:
        part = build(what[label])
        part.insert(0, "intervention", label)
        parts.append(part)
    whole = pd.concat(parts, ignore_index=True)
    whole.attrs = {**parts[0].attrs}
    return whole


def refuse_kept(result: SweepResult, what: str) -> None:
    """Raise where k counts kept heads, since nothing there is without ablation."""
    if result.kept:
        raise InvalidInput(
            f"in this sweep k counts the heads kept, and it has no run without ablation; {what} needs one. Give the "
            "SweepSet with both sides to necessity_sufficiency()."
        )


def flip_tests(columns: Sequence[np.ndarray], n_perm: int, seed: int) -> np.ndarray:
    """Two-sided sign-flip p of each column: ``stats.paired_permutation`` for many at once, with common signs.

    A trial that a column lacks may be put as 0 there: its sign changes nothing.

    Args:
        columns: Differences ``[trial]``, all of one length.
        n_perm: Number of sign patterns; if all ``2**n`` are no more, each is taken once.
        seed: Seed of the patterns.
    """
    check_count("n_perm", n_perm)
    d = np.stack(columns, axis=1)
    n, reach = len(d), np.abs(d.sum(axis=0)) - 1e-12 * np.abs(d).sum(axis=0)
    exact = n < 31 and 2**n <= n_perm
    patterns = np.arange(2**n) if exact else None
    rng = np.random.default_rng(seed)
    total, hits, done = 2**n if exact else n_perm, np.zeros(d.shape[1]), 0
    block = max(1, 2_000_000 // max(n, d.shape[1]))
    while done < total:
        size = min(block, total - done)
        if patterns is not None:
            bits = (patterns[done : done + size, None] >> np.arange(n)) & 1
        else:
            bits = rng.integers(0, 2, size=(size, n))
        hits += (np.abs((1.0 - 2.0 * bits) @ d) >= reach).sum(axis=0)
        done += size
    return hits / total if exact else (hits + 1) / (total + 1)
