"""Dose and response: what every further head, or every head alone, does to the metric."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput
from mechheads.plots.curves import chosen, metric_axis
from mechheads.plots.panels import PAGE, Grid
from mechheads.plots.style import (
    CONTROL_COLOUR,
    INK,
    PALETTE,
    display_name,
    interval,
    number,
    percent,
    plain,
    plural,
)
from mechheads.sweep_result import SweepResult
from mechheads.sweep_stats import dose_response

_COLUMNS, _EACH = 3, 25


def dose_response_plot(
    sweep: SweepResult,
    ranking: str | None = None,
    *,
    metric: str | None = None,
    tasks: Sequence[str] | str | None = None,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw what each step of k adds to the effect of a ranking, or what single heads do.

    One panel a task. With a ranking: a row a step, from the first heads at the top; the dot is the change of the mean
    from the k before to this k, the bar its paired interval. Without: a row a ranking that holds one head alone (``kind
    "single"`` of ``dose_response``), those that lower the metric of the first task most at the top; if there is none,
    the steps of the first ranking. Filled dots: p, corrected for all rows, is at most one less the level. Hovering
    names the heads, the change, its interval, the change a head and the p.

    Args:
        sweep: What to draw.
        ranking: The ranking whose steps to draw.
        metric: The metric; the first if None.
        tasks: Tasks to draw, in that order; all if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If a name is not in the sweep.
        InvalidInput: If there is no step to draw.
    """
    wanted = chosen("task", tasks, sweep.tasks)
    measure = sweep.metrics[0] if metric is None else metric
    rankings = None if ranking is None else chosen("ranking", ranking, sweep.rankings)
    frame = dose_response(sweep, measure, wanted, rankings, level=level, n_boot=n_boot, seed=seed)
    if tasks is None:
        wanted = [task for task in wanted if (frame["task"] == task).any()]
    singles = frame.loc[frame["kind"] == "single"]
    shown = singles if ranking is None and len(singles) else frame.loc[frame["ranking"] == frame["ranking"].iloc[0]]
    names = _names(shown, wanted[0])
    columns = min(len(wanted), _COLUMNS)
    left = 24 + 7 * max(len(name) for name in names.values())
    lines = math.ceil(len(wanted) / columns)
    # As wide as a page has room for beside the names, within reason.
    width = min(max((PAGE - 16 - left - 36 * (columns - 1)) / columns, 190), 400 if columns == 1 else 270)
    height = max(_EACH * len(names), 70)
    titles = tuple(map(display_name, wanted))
    grid = Grid(columns, lines, width, height, left=left, bottom=72, below=92, titles=titles)
    figure = go.Figure()
    span = _span(shown)
    label = metric_axis(sweep, measure)[0]
    for i, task in enumerate(wanted):
        rows = shown.loc[shown["task"] == task]
        figure.add_traces(_dots(rows, list(names), i + 1, level, first=i == 0))
        grid.place(
            figure,
            *divmod(i, columns),
            display_name(task),
            x={
                "title": {"text": "<br>".join(("Change of", plain(_lower(label))))},
                "range": span,
                "nticks": 6,
                "zeroline": True,
                "zerolinecolor": INK,
                "zerolinewidth": 1,
            },
            y={
                "range": [len(names) - 0.5, -0.5],
                "tickvals": list(range(len(names))),
                "ticktext": [plain(name) for name in names.values()],
                "showticklabels": i % columns == 0,
                "ticks": "",
                "gridcolor": "#F0F0F0",
            },
        )
    single = bool((shown["kind"] == "single").all())
    what = "Single heads" if single else f"Each further step of {display_name(str(shown['ranking'].iloc[0]))}"
    bars = f"bars: {percent(level)} paired intervals; filled: corrected p at most {number(1 - level)}"
    description = _told(shown, names, label, level)
    return grid.finish(figure, f"{what}: dose and response" if title is None else title, [bars], description)


def _lower(label: str) -> str:
    """A metric inside a sentence, unless it is an acronym."""
    return label[:1].lower() + label[1:] if label[1:2].islower() else label


def _names(shown: pd.DataFrame, first: str) -> dict[tuple[str, int], str]:
    """Name of each row by (ranking, k), from the top down."""
    rows = shown.loc[shown["task"] == first]
    if rows.empty:
        raise InvalidInput(f"no step was measured on {first!r}; there is nothing to draw.")
    rows = rows.sort_values("change" if (shown["kind"] == "single").all() else "k_to", kind="stable")
    names = {}
    for row in rows.to_dict("records"):
        heads = row["heads"].split()
        added = row["k_to"] - row["k_from"]
        single = row["kind"] == "single"
        text = heads[0] if len(heads) == 1 else f"+{plural(added, 'head')}"
        names[row["ranking"], row["k_to"]] = text if single else f"{text} (k {row['k_from']} to {row['k_to']})"
    return names


def _span(shown: pd.DataFrame) -> list[float]:
    """One range for all panels, zero in it."""
    values = shown[["change", "ci_low", "ci_high"]].to_numpy(dtype=float).ravel()
    values = np.append(values[np.isfinite(values)], 0.0)
    room = 0.06 * float(np.ptp(values)) or 0.5
    return [float(values.min()) - room, float(values.max()) + room]


def _dots(rows: pd.DataFrame, order: list[tuple[str, int]], i: int, level: float, *, first: bool) -> list[go.Scatter]:
    """Dots and bars of one panel, those that are significant filled."""
    rows = rows.assign(place=[_place(order, r, k) for r, k in zip(rows["ranking"], rows["k_to"], strict=True)])
    rows = rows.loc[rows["place"] >= 0]
    traces = []
    filled = rows["p_holm"] <= 1 - level
    for sure, part in ((True, rows.loc[filled]), (False, rows.loc[~filled])):
        if part.empty:
            continue
        colour = PALETTE[0] if sure else CONTROL_COLOUR
        change = part["change"].to_numpy(dtype=float)
        above, below = (np.nan_to_num(np.maximum(d, 0.0)) for d in (part["ci_high"] - change, change - part["ci_low"]))
        traces.append(
            go.Scatter(
                x=change.tolist(),
                y=part["place"].tolist(),
                mode="markers",
                marker={
                    "symbol": "circle" if sure else "circle-open",
                    "size": 9,
                    "color": colour,
                    "line": {"width": 1.6, "color": colour},
                },
                error_x={
                    "type": "data",
                    "symmetric": False,
                    "array": above.tolist(),
                    "arrayminus": below.tolist(),
                    "thickness": 1.3,
                    "width": 4,
                    "color": colour,
                },
                customdata=_hover(part, level),
                hovertemplate="%{customdata}<extra></extra>",
                name="Changed" if sure else "Not told from no change",
                showlegend=False,
                xaxis=f"x{i}",
                yaxis=f"y{i}",
                cliponaxis=False,
            )
        )
    if first:
        traces += [_key(True), _key(False)]
    return traces


def _place(order: list[tuple[str, int]], ranking: str, k: int) -> int:
    return order.index((ranking, k)) if (ranking, k) in order else -1


def _key(sure: bool) -> go.Scatter:
    """An entry of the legend, there whether or not the first panel has such a dot."""
    colour = PALETTE[0] if sure else CONTROL_COLOUR
    return go.Scatter(
        x=[None],
        y=[None],
        mode="markers",
        marker={
            "symbol": "circle" if sure else "circle-open",
            "size": 9,
            "color": colour,
            "line": {"width": 1.6, "color": colour},
        },
        name="Changed" if sure else "Not told from no change",
        hoverinfo="skip",
    )


def _hover(rows: pd.DataFrame, level: float) -> list[str]:
    """Ready texts, one a row."""
    out = []
    for row in rows.to_dict("records"):
        heads = row["heads"].split()
        names = ", ".join(heads[:6]) + (f" and {len(heads) - 6} more" if len(heads) > 6 else "")
        lines = [
            f"<b>{plain(display_name(row['ranking']))}</b>, k {row['k_from']} to {row['k_to']}",
            f"change: {number(row['change'])}",
            f"{percent(level)} CI: {interval(row['ci_low'], row['ci_high'])}",
            f"a head: {number(row['per_head'])}",
            f"p: {number(row['p_value'], 2)}, corrected {number(row['p_holm'], 2)}",
            plural(row["n_trials"], "trial") + (f", {row['n_draws']} draws" if row["n_draws"] > 1 else ""),
        ]
        out.append("<br>".join([*lines, *([f"heads: {plain(names)}"] if names else [])]))
    return out


def _told(shown: pd.DataFrame, names: dict[tuple[str, int], str], label: str, level: float) -> str:
    """The sentences of the figure: on each task the strongest change."""
    text = [
        f"Dot plot of the change of {_lower(label)} by {plural(len(names), 'step')}, with {percent(level)} intervals."
    ]
    for task, rows in shown.groupby("task", sort=False):
        known = rows.loc[np.isfinite(rows["change"])]
        if known.empty:
            text.append(f"{display_name(str(task))}: no value.")
            continue
        most = known.loc[known["change"].abs().idxmax()]
        name = names.get((str(most["ranking"]), int(most["k_to"])), str(most["ranking"]))
        sure = int((known["p_holm"] <= 1 - level).sum())
        text.append(
            f"{display_name(str(task))}: the greatest change is {number(float(most['change']))} "
            f"({interval(float(most['ci_low']), float(most['ci_high']))}) at {name}; "
            f"{sure} of {len(known)} are told from no change."
        )
    return " ".join(text)
