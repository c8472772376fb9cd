"""The cells of a sweep as arrays ``[draw trial]``, and what is drawn from them: means, bootstraps, areas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput
from mechheads.stats import bootstrap_weights, percentiles, wilson

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
CellArrays = Mapping[tuple[str, int], np.ndarray]


def checked_frame(frame: pd.DataFrame, *, kept: bool = False) -> pd.DataFrame:
    """A copy with the columns in order and of their types, or InvalidInput.

    Args:
        frame: The table of a sweep.
        kept: Whether all heads but the set were ablated; then k = 0 stands under any ranking and no row is without
            ablation.
    """
    missing = [c for c in COLUMNS if c not in frame.columns]
    if missing or frame.empty:
        what = f"lacks the column {missing[0]!r}" if missing else "has no rows"
        raise InvalidInput(f"the sweep's table {what}; it needs the columns {', '.join(COLUMNS)}.")
    for name in ("draw", "k"):
        if not all(isinstance(x, int) or float(x).is_integer() for x in frame[name].tolist()):
            raise InvalidInput(f"the column {name!r} of the sweep's table must hold whole numbers.")
    frame = frame[list(COLUMNS)].astype(COLUMNS).reset_index(drop=True)
    _check_k(frame, kept)
    twice = frame.duplicated(_CELL)
    if twice.any():
        row = frame[twice].iloc[0][_CELL].to_dict()
        raise InvalidInput(f"the sweep's table has two values for {row}; every cell and trial needs one.")
    if np.isinf(frame["value"]).any():
        row = frame[np.isinf(frame["value"])].iloc[0]
        raise InvalidInput(f"{row['metric']} of trial {row['trial_id']!r} is {row['value']}; expected finite or NaN.")
    return frame


def _check_k(frame: pd.DataFrame, kept: bool) -> None:
    """Numbers of heads that fit their ranking and side."""
    if (frame["k"] < 0).any():
        row = frame[frame["k"] < 0].iloc[0]
        raise InvalidInput(f"a row of {row['ranking']!r} has k {row['k']}; a number of heads is 0 or more.")
    if kept:
        if (frame["ranking"] == BASELINE).any():
            raise InvalidInput(
                f"a row has ranking {BASELINE!r}, but meta['side'] is 'kept': all heads but k are ablated in every "
                "row. The run without ablation belongs into the sweep of the other side."
            )
        return
    stray = (frame["ranking"] == BASELINE) != (frame["k"] == 0)
    if stray.any():
        row = frame[stray].iloc[0]
        raise InvalidInput(
            f"a row has ranking {row['ranking']!r} and k {row['k']}; the run without ablation, and "
            f"only that, has ranking {BASELINE!r} and k 0."
        )


def cell_arrays(rows: pd.DataFrame) -> dict[tuple[str, int], np.ndarray]:
    """``[draw trial]`` by (ranking, k), over all trials that stand in the rows; NaN = not measured."""
    place = {trial: i for i, trial in enumerate(sorted(set(rows["trial_id"])))}
    values: dict[tuple[str, int], dict[int, np.ndarray]] = {}
    columns = (rows[c].tolist() for c in ("ranking", "k", "draw", "trial_id", "value"))
    for ranking, k, draw, trial, value in zip(*columns, strict=True):
        by_draw = values.setdefault((ranking, k), {})
        by_draw.setdefault(draw, np.full(len(place), np.nan))[place[trial]] = value
    return {key: np.stack([by_draw[d] for d in sorted(by_draw)]) for key, by_draw in values.items()}


def by_trial(cell: pd.DataFrame) -> dict[str, float]:
    """Mean over draws of each trial that has a value."""
    values: dict[str, list[float]] = {}
    for trial, value in zip(cell["trial_id"].tolist(), cell["value"].tolist(), strict=True):
        if not np.isnan(value):
            values.setdefault(trial, []).append(value)
    return {trial: float(np.mean(v)) for trial, v in sorted(values.items())}


def with_baseline(cells: dict[tuple[str, int], np.ndarray], wanted: list[str]) -> dict[tuple[str, int], np.ndarray]:
    """The wanted rankings' cells, rising in k, the baseline standing as k=0 of each."""
    out = {}
    for ranking in wanted:
        own = {k: v for (r, k), v in cells.items() if r == ranking}
        if own and (BASELINE, 0) in cells:
            own[0] = cells[BASELINE, 0]
        out |= {(ranking, k): own[k] for k in sorted(own)}
    return out


def mean_rows(rows: np.ndarray) -> np.ndarray:
    """Mean of each row over its finite entries; NaN if there is none."""
    defined = np.isfinite(rows)
    count = defined.sum(axis=-1)
    total = np.where(defined, rows, 0.0).sum(axis=-1)
    return np.divide(total, count, out=np.full(count.shape, np.nan), where=count > 0)


def within_trial(by_draw: np.ndarray) -> np.ndarray:
    """``[draw trial]`` to ``[trial]``: the mean over draws."""
    return mean_rows(by_draw.T)


def resample(cells: Mapping[tuple[str, int], np.ndarray], n_boot: int, seed: int) -> dict[tuple[str, int], np.ndarray]:
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


def unanimous(by_draw: np.ndarray) -> bool:
    """Whether one draw's trials are all right or all wrong, where a bootstrap would have no width."""
    values = by_draw[np.isfinite(by_draw)]
    return len(by_draw) == 1 and len(values) > 0 and (bool((values == 0).all()) or bool((values == 1).all()))


def area(ks: list[int], heights: np.ndarray) -> np.ndarray:
    """Trapezoid over the first axis ``[k ...]``, divided by the range of k."""
    width = np.diff(np.array(ks, dtype=np.float64))
    middle = (heights[1:] + heights[:-1]) / 2
    return np.tensordot(width, middle, axes=1) / (ks[-1] - ks[0])


def curve_rows(task: str, cells: CellArrays, *, level: float, n_boot: int, seed: int) -> list[dict[str, Any]]:
    """Rows of ``SweepResult.curve`` for the cells of one task."""
    samples = resample(cells, n_boot, seed)
    rows = []
    for (ranking, k), by_draw in cells.items():
        low, high = percentiles(samples[ranking, k], level)
        per_trial = within_trial(by_draw)
        n, means = int(np.isfinite(per_trial).sum()), mean_rows(by_draw)
        few = n < 2
        if unanimous(by_draw):
            exact = wilson(round(float(per_trial[np.isfinite(per_trial)].sum())), n, level=level)
            low, high = exact.low, exact.high
        rows.append(
            {
                "ranking": ranking,
                "task": task,
                "k": k,
                "mean": float(mean_rows(per_trial[None])[0]),
                "ci_low": np.nan if few else float(low),
                "ci_high": np.nan if few else float(high),
                "draw_min": float(means.min()),
                "draw_max": float(means.max()),
                "n_trials": n,
                "n_draws": len(by_draw),
            }
        )
    return rows


def area_rows(task: str, cells: CellArrays, *, level: float, n_boot: int, seed: int) -> list[dict[str, Any]]:
    """Rows of ``SweepResult.auc`` for the cells of one task."""
    samples = resample(cells, n_boot, seed)
    rows = []
    for ranking in dict.fromkeys(r for r, _ in cells):
        ks = sorted(k for r, k in cells if r == ranking)
        if len(ks) < 2:
            raise InvalidInput(
                f"{ranking!r} on {task!r} has only k={ks}; an area needs two values of k (the baseline counts as k=0)."
            )
        trials = [within_trial(cells[ranking, k]) for k in ks]
        n = min(int(np.isfinite(t).sum()) for t in trials)
        middle = area(ks, np.array([mean_rows(t[None]) for t in trials]))
        low, high = percentiles(area(ks, np.array([samples[ranking, k] for k in ks])), level)
        few = n < 2
        rows.append(
            {
                "ranking": ranking,
                "task": task,
                "auc": float(middle[0]),
                "ci_low": np.nan if few else float(low),
                "ci_high": np.nan if few else float(high),
                "k_min": ks[0],
                "k_max": ks[-1],
                "n_k": len(ks),
                "n_trials": n,
            }
        )
    return rows
