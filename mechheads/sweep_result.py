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
from mechheads.stats import Interval, bootstrap_weights, check_level, paired_bootstrap, paired_permutation, percentiles
from mechheads.sweep_cells import (
    BASELINE,
    area_rows,
    by_trial,
    cell_arrays,
    checked_frame,
    curve_rows,
    with_baseline,
)

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["BASELINE", "KEPT", "Comparison", "SweepResult"]

# Value of meta["side"] where all heads but the k of a ranking are ablated.
KEPT = "kept"


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
        meta: Provenance, JSON-ready. Where ``meta["side"]`` is ``"kept"`` all heads but a ranking's first k were
            ablated: k counts the heads **kept**, k = 0 is the model without any head and may stand under any ranking,
            and there is no ranking ``"none"``.
    """

    frame: pd.DataFrame
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        meta = json_ready(self.meta, where="meta")
        if meta.get("side", "ablated") not in ("ablated", KEPT):
            raise InvalidInput(
                f"meta['side'] is {meta['side']!r}; it says which heads k counts: 'ablated' or {KEPT!r}."
            )
        object.__setattr__(self, "meta", meta)
        object.__setattr__(self, "frame", checked_frame(self.frame, kept=self.kept))

    def __repr__(self) -> str:
        return (
            f"SweepResult(rankings={self.rankings}, k={self.ks}, tasks={self.tasks}, "
            f"metrics={self.metrics}, {len(set(self.frame['trial_id']))} trials)"
        )

    @property
    def kept(self) -> bool:
        """Whether k counts the heads kept, all others being ablated."""
        return self.meta.get("side") == KEPT

    @property
    def rankings(self) -> list[str]:
        """Rankings in order of appearance, without the baseline."""
        return [r for r in dict.fromkeys(self.frame["ranking"]) if r != BASELINE]

    @property
    def ks(self) -> list[int]:
        """Numbers of ablated (or kept) heads, rising; 0 is the baseline, or no head kept."""
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
        """The rows of one cell; ``k=0`` gives the baseline for every ranking, unless k counts the heads kept.

        Raises:
            UnknownName: If a name is not in the sweep.
            InvalidInput: If this cell was not measured.
        """
        self._known("ranking", ranking, self._known_rankings())
        self._known("task", task, self.tasks)
        self._known("metric", metric, self.metrics)
        frame = self.frame
        of_ranking = frame["ranking"] == (BASELINE if k == 0 and not self.kept else ranking)
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
            n_draws``, with the baseline as k=0 of every ranking (not where k counts the heads kept). ``draw_min`` and
            ``draw_max`` are the extremes of the draws' own means. Intervals are NaN for fewer than two trials.

        Raises:
            UnknownName: If a name is not in the sweep.
            InvalidInput: If the metric was not measured there.
        """
        import pandas as pd

        check_level(level)
        rows = []
        for name, cells in self._tasks(metric, task, ranking).items():
            rows += curve_rows(name, cells, level=level, n_boot=n_boot, seed=seed)
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

        It has the unit of the metric: the mean height of the curve. Low = the ablated heads matter; where k counts the
        heads kept, high = they suffice.

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
            rows += area_rows(name, cells, level=level, n_boot=n_boot, seed=seed)
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
        x, y = (by_trial(self.cell(r, 0 if r == BASELINE else k, task, metric)) for r in (a, b))
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
        draws. Where the ranking itself has several draws (the seeds of an intervention: S of them, numbered
        ``draw = set * S + seed``), both are averaged over seeds first, and a whole random set is drawn.

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
        cell = self.cell(ranking, k, task, metric)
        own = by_trial(cell)
        rows = self.cell(control, k, task, metric)
        sets = rows["draw"] // len(set(cell["draw"]))
        drawn = [by_trial(rows.loc[sets == one]) for one in sorted(set(sets))]
        shared = [t for t in dict.fromkeys(cell["trial_id"]) if t in own and all(t in values for values in drawn)]
        if not shared:
            raise InvalidInput(
                f"{ranking!r} and {control!r} share no trial at k={k} on {task!r}; nothing can be paired."
            )
        difference = np.array([[values[t] - own[t] for t in shared] for values in drawn])  # [set trial]
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

    def _known_rankings(self) -> list[str]:
        return self.rankings if self.kept else [*self.rankings, BASELINE]

    def _tasks(
        self, metric: str, task: str | None, ranking: str | None
    ) -> dict[str, dict[tuple[str, int], np.ndarray]]:
        """Values by task and cell, each ``[draw trial]`` over all trials of the task; NaN = not measured."""
        self._known("metric", metric, self.metrics)
        if task is not None:
            self._known("task", task, self.tasks)
        if ranking is not None:
            self._known("ranking", ranking, self._known_rankings())
        out: dict[str, dict[tuple[str, int], np.ndarray]] = {}
        wanted = [r for r in self.rankings if ranking in (None, r)] or [BASELINE]
        for name in self.tasks if task is None else [task]:
            rows = self.frame.loc[(self.frame["metric"] == metric) & (self.frame["task"] == name)]
            cells = with_baseline(cell_arrays(rows), wanted)
            if cells:
                out[name] = cells
        if not out:
            raise InvalidInput(f"{metric!r} was not measured on {task!r} for {' or '.join(wanted)}.")
        return out
