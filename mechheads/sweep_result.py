"""Results of an ablation sweep: one value per trial and cell, and the curves drawn from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput, ResultFileError, UnknownName
from mechheads.provenance import json_ready
from mechheads.result_files import read_table, write_table
from mechheads.stats import (
    Interval,
    bootstrap_weights,
    check_level,
    paired_bootstrap,
    paired_permutation,
    percentiles,
    wilson,
)

if TYPE_CHECKING:
    import pandas as pd

BASELINE = "none"
COLUMNS = {
    "ranking": str,
    "draw": int,
    "k": int,
    "task": str,
    "trial_id": str,
    "metric": str,
    "value": float,
    "heads": str,
}
_CELL = ["ranking", "draw", "k", "task", "trial_id", "metric"]


@dataclass(frozen=True)
class Comparison:
    """Two rankings at one k, over the same trials.

    Attributes:
        a: First ranking.
        b: Second ranking.
        k: Heads ablated.
        metric: What was measured.
        task: On which task.
        mean_a: Mean under a.
        mean_b: Mean under b.
        difference: ``mean_a - mean_b`` with its paired bootstrap interval.
        p_value: Two-sided paired sign-flip p.
        n: Trials measured under both.
    """

    a: str
    b: str
    k: int
    metric: str
    task: str
    mean_a: float
    mean_b: float
    difference: Interval
    p_value: float
    n: int

    def __str__(self) -> str:
        return f"{self.a} - {self.b} at k={self.k}: {self.difference}, p={self.p_value:.2g}, n={self.n}"


@dataclass(frozen=True, eq=False, repr=False)
class SweepResult:
    """Per-trial results of every cell (ranking x k x task x metric) of an ablation sweep.

    Attributes:
        frame: One row per measured value, columns ``ranking draw k task trial_id metric value heads``.
            The run without ablation has ranking ``"none"`` and k 0. ``draw`` numbers the draws of random
            controls and is 0 elsewhere; ``heads`` names the ablated heads.
        meta: Provenance, JSON-ready.
    """

    frame: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        object.__setattr__(self, "frame", _checked(self.frame))
        object.__setattr__(self, "meta", json_ready(self.meta, where="meta"))

    def __repr__(self) -> str:
        return (
            f"SweepResult(rankings={self.rankings}, k={self.ks}, tasks={self.tasks}, "
            f"metrics={self.metrics}, {len(set(self.frame['trial_id']))} trials)"
        )

    @property
    def rankings(self) -> list[str]:
        """Rankings in order of appearance, without the baseline."""
        return [r for r in dict.fromkeys(self.frame["ranking"]) if r != BASELINE]

    @property
    def ks(self) -> list[int]:
        """Numbers of ablated heads, rising; 0 is the baseline."""
        return sorted(set(self.frame["k"].tolist()))

    @property
    def tasks(self) -> list[str]:
        """Tasks in order of appearance."""
        return list(dict.fromkeys(self.frame["task"]))

    @property
    def metrics(self) -> list[str]:
        """Metrics in order of appearance."""
        return list(dict.fromkeys(self.frame["metric"]))

    def cell(self, ranking: str, k: int, task: str, metric: str) -> pd.DataFrame:
        """The rows of one cell; ``k=0`` gives the baseline for every ranking.

        Raises:
            UnknownName: If a name is not in the sweep.
            InvalidInput: If this cell was not measured.
        """
        self._known("ranking", ranking, [*self.rankings, BASELINE])
        self._known("task", task, self.tasks)
        self._known("metric", metric, self.metrics)
        frame = self.frame
        of_ranking = frame["ranking"] == (BASELINE if k == 0 else ranking)
        here = of_ranking & (frame["task"] == task) & (frame["metric"] == metric)
        rows = frame.loc[here & (frame["k"] == k)]
        if rows.empty:
            measured = sorted(set(frame.loc[here, "k"].tolist()))
            raise InvalidInput(
                f"{metric!r} on {task!r} was not measured for {ranking!r} at k={k}; measured there: k in {measured}."
            )
        return rows.reset_index(drop=True)

    def curve(
        self,
        metric: str,
        task: str | None = None,
        ranking: str | None = None,
        *,
        level: float = 0.95,
        n_boot: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Mean over trials against k, with intervals.

        Random draws are averaged, so that a trial counts once. All cells of a task are resampled with the same trials
        (paired bootstrap); where there are random draws, these are resampled as well. Where all trials of a cell are
        right, or all wrong, a bootstrap has no width: Wilson's interval for a proportion stands there.

        Args:
            metric: What to show.
            task: One task; all if None.
            ranking: One ranking; all if None.
            level: Confidence level.
            n_boot: Number of bootstrap samples.
            seed: Seed of the draws.

        Returns:
            A row per (ranking, task, k): ``ranking task k mean ci_low ci_high draw_min draw_max n_trials
            n_draws``, with the baseline as k=0 of every ranking. ``draw_min`` and ``draw_max`` are the
            extremes of the draws' own means. Intervals are NaN for fewer than two trials.

        Raises:
            UnknownName: If a name is not in the sweep.
            InvalidInput: If the metric was not measured there.
        """
        import pandas as pd

        check_level(level)
        rows = []
        for name, cells in self._tasks(metric, task, ranking).items():
            samples = _resample(cells, n_boot, seed)
            for (of_ranking, k), by_draw in cells.items():
                low, high = percentiles(samples[of_ranking, k], level)
                per_trial = _within_trial(by_draw)
                n, means = int(np.isfinite(per_trial).sum()), _mean(by_draw)
                few = n < 2
                if _unanimous(by_draw):
                    exact = wilson(round(float(per_trial[np.isfinite(per_trial)].sum())), n, level=level)
                    low, high = exact.low, exact.high
                rows.append(
                    {
                        "ranking": of_ranking,
                        "task": name,
                        "k": k,
                        "mean": float(_mean(per_trial[None])[0]),
                        "ci_low": np.nan if few else float(low),
                        "ci_high": np.nan if few else float(high),
                        "draw_min": float(means.min()),
                        "draw_max": float(means.max()),
                        "n_trials": n,
                        "n_draws": len(by_draw),
                    }
                )
        return pd.DataFrame(rows)

    def auc(
        self,
        metric: str,
        task: str | None = None,
        ranking: str | None = None,
        *,
        level: float = 0.95,
        n_boot: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Area under each curve over k: the trapezoid rule, divided by the range of k.

        It has the unit of the metric: the mean height of the curve. Low = the ablated heads matter.

        Returns:
            A row per (ranking, task): ``ranking task auc ci_low ci_high k_min k_max n_k n_trials``; n_trials
            is the smallest of its cells.

        Raises:
            UnknownName: If a name is not in the sweep.
            InvalidInput: If a ranking has fewer than two values of k.
        """
        import pandas as pd

        check_level(level)
        rows = []
        for name, cells in self._tasks(metric, task, ranking).items():
            samples = _resample(cells, n_boot, seed)
            for of_ranking in dict.fromkeys(r for r, _ in cells):
                ks = sorted(k for r, k in cells if r == of_ranking)
                if len(ks) < 2:
                    raise InvalidInput(
                        f"{of_ranking!r} on {name!r} has only k={ks}; an area needs two values of k "
                        "(the baseline counts as k=0)."
                    )
                trials = [_within_trial(cells[of_ranking, k]) for k in ks]
                n = min(int(np.isfinite(t).sum()) for t in trials)
                area = _area(ks, np.array([_mean(t[None]) for t in trials]))
                low, high = percentiles(_area(ks, np.array([samples[of_ranking, k] for k in ks])), level)
                few = n < 2
                rows.append(
                    {
                        "ranking": of_ranking,
                        "task": name,
                        "auc": float(area[0]),
                        "ci_low": np.nan if few else float(low),
                        "ci_high": np.nan if few else float(high),
                        "k_min": ks[0],
                        "k_max": ks[-1],
                        "n_k": len(ks),
                        "n_trials": n,
                    }
                )
        return pd.DataFrame(rows)

    def compare(
        self,
        a: str,
        b: str,
        k: int,
        metric: str,
        task: str | None = None,
        *,
        level: float = 0.95,
        n_boot: int = 2000,
        n_perm: int = 10000,
        seed: int = 0,
    ) -> Comparison:
        """Paired difference of two rankings at one k, over the trials measured under both.

        ``"none"`` stands for the run without ablation. Random draws are averaged within the trial first.

        Args:
            a: First ranking.
            b: Second ranking; the difference is a minus b.
            k: Heads ablated.
            metric: What to compare.
            task: On which task; may be left out if the sweep has one only.
            level: Confidence level.
            n_boot: Number of bootstrap samples.
            n_perm: Number of sign flips.
            seed: Seed of both.

        Raises:
            UnknownName: If a name is not in the sweep.
            InvalidInput: If a cell is missing, or the two share no trial.
        """
        if task is None:
            if len(self.tasks) != 1:
                raise InvalidInput(f"the sweep has the tasks {self.tasks}; say which one to compare on.")
            task = self.tasks[0]
        x, y = (_by_trial(self.cell(r, 0 if r == BASELINE else k, task, metric)) for r in (a, b))
        shared = [trial for trial in x if trial in y]
        if not shared:
            raise InvalidInput(f"{a!r} and {b!r} share no trial at k={k} on {task!r}; nothing can be paired.")
        left, right = np.array([x[t] for t in shared]), np.array([y[t] for t in shared])
        return Comparison(
            a=a,
            b=b,
            k=int(k),
            metric=metric,
            task=task,
            n=len(shared),
            mean_a=float(left.mean()),
            mean_b=float(right.mean()),
            difference=paired_bootstrap(left, right, level=level, n_boot=n_boot, seed=seed),
            p_value=paired_permutation(left, right, n_perm=n_perm, seed=seed),
        )

    def beyond_control(
        self,
        ranking: str,
        k: int,
        metric: str,
        task: str,
        *,
        control: str = "random",
        level: float = 0.95,
        n_boot: int = 4000,
        seed: int = 0,
    ) -> Interval:
        """How much lower a metric is without a ranking's k heads than without a random set of k.

        The estimate is ``mean over draws of the control - mean of the ranking``, over the trials of both; positive:
        these heads cost more. The interval asks whether the set is worse than *a* random set, not than their average,
        since random sets differ too: each bootstrap sample draws trials with replacement and one of the control's
        draws.

        Args:
            ranking: The ranking.
            k: Heads ablated.
            metric: What to compare.
            task: On which task.
            control: The control; several draws of it are needed for an interval.
            level: Confidence level.
            n_boot: Number of bootstrap samples.
            seed: Seed of the bootstrap.

        Raises:
            UnknownName: If a name is not in the sweep.
            InvalidInput: If a cell is missing, or the two share no trial.
        """
        check_level(level)
        own = self.cell(ranking, k, task, metric).set_index("trial_id")["value"]
        drawn = self.cell(control, k, task, metric).pivot(index="draw", columns="trial_id", values="value")
        shared = [t for t in own.index if t in drawn.columns and np.isfinite(own[t]) and drawn[t].notna().all()]
        if not shared:
            raise InvalidInput(
                f"{ranking!r} and {control!r} share no trial at k={k} on {task!r}; nothing can be paired."
            )
        difference = np.asarray(drawn[shared], dtype=float) - np.asarray(own[shared], dtype=float)  # [draw trial]
        estimate, (draws, n) = float(difference.mean()), difference.shape
        if draws < 2 or n < 2:
            return Interval(estimate, math.nan, math.nan, level, n)
        rng = np.random.default_rng(seed)
        counts = bootstrap_weights(n, n_boot, rng)
        which = rng.integers(0, draws, size=n_boot)
        samples = (counts * difference[which]).sum(axis=1) / n
        low, high = percentiles(samples, level)
        return Interval(estimate, float(low), float(high), level, n)

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file with the provenance inside; see ``HeadScores.save``."""
        import pyarrow as pa

        table = pa.Table.from_pandas(self.frame, preserve_index=False)
        return write_table(path, table, kind="sweep", header={"n_rows": len(self.frame), "meta": self.meta})

    @classmethod
    def load(cls, path: str | Path) -> SweepResult:
        """Read what ``save`` wrote.

        Raises:
            ResultFileError: If the file is missing, damaged, foreign, inconsistent or too new.
        """
        table, header = read_table(path, kind="sweep")
        try:
            if header["n_rows"] != table.num_rows:
                raise ValueError(f"it has {table.num_rows} rows but its header says {header['n_rows']}")
            return cls(frame=table.to_pandas(), meta=header["meta"])
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ResultFileError(f"{path} is not a consistent sweep file: {reason}") from error

    def _known(self, kind: str, name: str, known: list[str]) -> None:
        if name not in known:
            raise UnknownName(f"{kind} of the sweep", name, known)

    def _tasks(
        self, metric: str, task: str | None, ranking: str | None
    ) -> dict[str, dict[tuple[str, int], np.ndarray]]:
        """Values by task and cell, each ``[draw trial]`` over all trials of the task; NaN = not measured."""
        self._known("metric", metric, self.metrics)
        if task is not None:
            self._known("task", task, self.tasks)
        if ranking is not None:
            self._known("ranking", ranking, [*self.rankings, BASELINE])
        out: dict[str, dict[tuple[str, int], np.ndarray]] = {}
        wanted = [r for r in self.rankings if ranking in (None, r)] or [BASELINE]
        for name in self.tasks if task is None else [task]:
            rows = self.frame.loc[(self.frame["metric"] == metric) & (self.frame["task"] == name)]
            cells = _with_baseline(_cells(rows), wanted)
            if cells:
                out[name] = cells
        if not out:
            raise InvalidInput(f"{metric!r} was not measured on {task!r} for {' or '.join(wanted)}.")
        return out


def _checked(frame: pd.DataFrame) -> pd.DataFrame:
    """A copy with the columns in order and of their types, or InvalidInput."""
    missing = [c for c in COLUMNS if c not in frame.columns]
    if missing or frame.empty:
        what = f"lacks the column {missing[0]!r}" if missing else "has no rows"
        raise InvalidInput(f"the sweep's table {what}; it needs the columns {', '.join(COLUMNS)}.")
    for name in ("draw", "k"):
        if not all(isinstance(x, int) or float(x).is_integer() for x in frame[name].tolist()):
            raise InvalidInput(f"the column {name!r} of the sweep's table must hold whole numbers.")
    frame = frame[list(COLUMNS)].astype(COLUMNS).reset_index(drop=True)
    stray = (frame["ranking"] == BASELINE) != (frame["k"] == 0)
    if stray.any():
        row = frame[stray].iloc[0]
        raise InvalidInput(
            f"a row has ranking {row['ranking']!r} and k {row['k']}; the run without ablation, and "
            f"only that, has ranking {BASELINE!r} and k 0."
        )
    twice = frame.duplicated(_CELL)
    if twice.any():
        row = frame[twice].iloc[0][_CELL].to_dict()
        raise InvalidInput(f"the sweep's table has two values for {row}; every cell and trial needs one.")
    if np.isinf(frame["value"]).any():
        row = frame[np.isinf(frame["value"])].iloc[0]
        raise InvalidInput(f"{row['metric']} of trial {row['trial_id']!r} is {row['value']}; expected finite or NaN.")
    return frame


def _cells(rows: pd.DataFrame) -> dict[tuple[str, int], np.ndarray]:
    """``[draw trial]`` by (ranking, k), over all trials that stand in the rows; NaN = not measured."""
    place = {trial: i for i, trial in enumerate(sorted(set(rows["trial_id"])))}
    values: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    columns = (rows[c].tolist() for c in ("ranking", "k", "draw", "trial_id", "value"))
    for ranking, k, draw, trial, value in zip(*columns, strict=True):
        by_draw = values.setdefault((ranking, k), {})
        by_draw.setdefault(draw, np.full(len(place), np.nan))[place[trial]] = value
    return {key: np.stack([by_draw[d] for d in sorted(by_draw)]) for key, by_draw in values.items()}


def _by_trial(cell: pd.DataFrame) -> dict[str, float]:
    """Mean over draws of each trial that has a value."""
    values: dict[str, list[float]] = {}
    for trial, value in zip(cell["trial_id"].tolist(), cell["value"].tolist(), strict=True):
        if not np.isnan(value):
            values.setdefault(trial, []).append(value)
    return {trial: float(np.mean(v)) for trial, v in sorted(values.items())}


def _with_baseline(cells: dict[tuple[str, int], np.ndarray], wanted: list[str]) -> dict[tuple[str, int], np.ndarray]:
    """The wanted rankings' cells, rising in k, the baseline standing as k=0 of each."""
    out = {}
    for ranking in wanted:
        own = {k: v for (r, k), v in cells.items() if r == ranking}
        if own and (BASELINE, 0) in cells:
            own[0] = cells[BASELINE, 0]
        out |= {(ranking, k): own[k] for k in sorted(own)}
    return out


def _mean(rows: np.ndarray) -> np.ndarray:
    """Mean of each row over its finite entries; NaN if there is none."""
    defined = np.isfinite(rows)
    count = defined.sum(axis=-1)
    total = np.where(defined, rows, 0.0).sum(axis=-1)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)


def _within_trial(by_draw: np.ndarray) -> np.ndarray:
    """``[draw trial]`` to ``[trial]``: the mean over draws."""
    return _mean(by_draw.T)


def _resample(cells: Mapping[tuple[str, int], np.ndarray], n_boot: int, seed: int) -> dict[tuple[str, int], np.ndarray]:
    """Bootstrap means of every cell, ``[n_boot]``, all from the same resampled trials.

    Where a cell has several random draws, the draws are resampled too: another run would draw other heads.
    """
    if not cells:
        return {}
    rng = np.random.default_rng(seed)
    n = next(iter(cells.values())).shape[1]
    counts = bootstrap_weights(n, n_boot, rng).astype(np.float64)
    draws = {d: bootstrap_weights(d, n_boot, rng).astype(np.float64) for d in sorted({len(c) for c in cells.values()})}
    out = {}
    for key, by_draw in cells.items():
        defined = np.isfinite(by_draw)
        of_draw = draws[len(by_draw)]
        weight = np.einsum("bd,bt,dt->b", of_draw, counts, defined.astype(np.float64), optimize=True)
        total = np.einsum("bd,bt,dt->b", of_draw, counts, np.where(defined, by_draw, 0.0), optimize=True)
        out[key] = np.divide(total, weight, out=np.full(n_boot, np.nan), where=weight > 0)
    return out


def _unanimous(by_draw: np.ndarray) -> bool:
    """Whether one draw's trials are all right or all wrong, where a bootstrap would have no width."""
    values = by_draw[np.isfinite(by_draw)]
    return len(by_draw) == 1 and len(values) > 0 and (bool((values == 0).all()) or bool((values == 1).all()))


def _area(ks: list[int], heights: np.ndarray) -> np.ndarray:
    """Trapezoid over the first axis ``[k ...]``, divided by the range of k."""
    width = np.diff(np.array(ks, dtype=np.float64))
    middle = (heights[1:] + heights[:-1]) / 2
    return np.tensordot(width, middle, axes=1) / (ks[-1] - ks[0])
