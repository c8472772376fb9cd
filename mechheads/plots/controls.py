"""Target against control: how much of each is lost as more heads are ablated."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.plots.curves import chosen, drawn_rankings, ranking_styles
from mechheads.plots.panels import Grid
from mechheads.plots.style import CONTROL_COLOUR, SMALL, display_name, fade, interval, number, percent, plain, plural
from mechheads.sweep_result import SweepResult
from mechheads.sweep_stats import task_dissociation

_COLUMNS = 3
# From one end that has its k beside it to the next, as a share of the axis.
_CLEAR = 0.12


def control_scatter(
    sweep: SweepResult,
    target: str,
    controls: Sequence[str] | str | None = None,
    *,
    metric: str | None = None,
    rankings: Sequence[str] | str | None = None,
    worst: float | dict[str, float] = 0.0,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw the share lost on the target (right) against that lost on a control (up), one panel a control.

    A point is a ranking at one k, joined in the order of k, the number of heads beside its last where there is room;
    bars are intervals. Points below the diagonal lose more of the target than of the control; heads of the target alone
    go along the lower edge. Cells without a valid share are left out and counted in the subtitle.

    Args:
        sweep: What to draw.
        target: The task that should suffer.
        controls: Tasks that should not; all others if None.
        metric: The metric; the first if None.
        rankings: Rankings to draw, in that order; all if None.
        worst: Value at which nothing is left, or one a task.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If a name is not in the sweep.
        InvalidInput: As ``task_dissociation``.
    """
    wanted = chosen("ranking", rankings, sweep.rankings)
    options = {"level": level, "n_boot": n_boot, "seed": seed}
    frame = task_dissociation(sweep, target, controls, metric, ranking=wanted, worst=worst, n_perm=1, **options)
    valid = frame.loc[frame["valid"]]
    names = list(dict.fromkeys(frame["control"]))
    draws = {ranking: len(set(rows["draw"])) for ranking, rows in sweep.frame.groupby("ranking")}
    sizes = pd.DataFrame({"ranking": sweep.rankings, "n_draws": [draws[r] for r in sweep.rankings]})
    styles = ranking_styles(sweep.rankings, sizes, drawn=drawn_rankings(sweep))
    columns = min(len(names), _COLUMNS)
    lines = math.ceil(len(names) / columns)
    size = 400 if columns == 1 else 290 if columns == 2 else 235
    across = f"Lost on {display_name(target)} (share)"
    titles = tuple(map(display_name, names))
    grid = Grid(columns, lines, size, size, between=72, below=96, left=72, titles=titles, x_title=across)
    figure = go.Figure()
    span = _span(valid)
    shown: set[str] = set()
    for i, control in enumerate(names):
        figure.add_traces(_diagonal(span, i + 1))
        ends: list[tuple[float, float]] = []
        for ranking in wanted:
            rows = valid.loc[(valid["control"] == control) & (valid["ranking"] == ranking)].sort_values("k")
            if len(rows):
                end = float(rows["lost"].iloc[-1]), float(rows["control_lost"].iloc[-1])
                # Random heads crowd about nothing lost, and names on top of one another say nothing.
                free = not styles[ranking]["control"] and all(
                    math.dist(end, other) > _CLEAR * (span[1] - span[0]) for other in ends
                )
                path = _path(rows, styles[ranking], i + 1, level, legend=ranking not in shown, named=free)
                figure.add_trace(path)
                shown.add(ranking)
                ends += [end] if free else []
        axis: dict[str, Any] = {"range": span, "nticks": 7, "zeroline": True, "zerolinecolor": "#C8C8C8"}
        row, column = divmod(i, columns)
        grid.place(
            figure,
            row,
            column,
            display_name(control),
            x={**axis, "title": {"text": "<br>".join(map(plain, grid.broken(across)))}},
            y={**axis, "title": {"text": "Lost on the control (share)"} if column == 0 else {}},
        )
    lines_told = [f"shares of the value without ablation; bars: {percent(level)} intervals; dotted: both lose alike"]
    left_out = len(frame) - len(valid)
    if left_out:
        lines_told.append(f"{plural(left_out, 'cell')} without a valid share left out")
    words = f"Lost on {display_name(target)} and on {'its control' if len(names) == 1 else 'controls'}"
    return grid.finish(figure, words if title is None else title, lines_told, _told(valid, target, left_out, level))


def _span(valid: pd.DataFrame) -> list[float]:
    """One range for all axes, 0 to 1 in it and not much more than a share of 1.5 below."""
    columns = ["lost", "lost_low", "lost_high", "control_lost", "control_low", "control_high"]
    values = valid[columns].to_numpy(dtype=float).ravel()
    values = np.concatenate([values[np.isfinite(values)], [0.0, 1.0]])
    return [max(float(values.min()), -1.5) - 0.05, min(float(values.max()), 2.5) + 0.05]


def _diagonal(span: list[float], i: int) -> go.Scatter:
    """Where both lose the same share."""
    return go.Scatter(
        x=span,
        y=span,
        mode="lines",
        line={"color": CONTROL_COLOUR, "width": 1.2, "dash": "dot"},
        hoverinfo="skip",
        showlegend=False,
        name="both lose alike",
        xaxis=f"x{i}",
        yaxis=f"y{i}",
    )


def _path(rows: pd.DataFrame, style: dict[str, Any], i: int, level: float, *, legend: bool, named: bool) -> go.Scatter:
    """The points of one ranking in one panel, joined; ``named``: the last has its k beside it."""
    name, colour = plain(style["name"]), style["colour"]

    def bars(value: str, ends: str) -> dict[str, Any]:
        above, below = rows[f"{ends}_high"] - rows[value], rows[value] - rows[f"{ends}_low"]
        return {
            "type": "data",
            "symmetric": False,
            "array": np.maximum(above, 0.0).tolist(),
            "arrayminus": np.maximum(below, 0.0).tolist(),
            "thickness": 1,
            "width": 0,
            "color": fade(colour, 0.45),
        }

    # At the right edge there is room to the left alone.
    side = "left" if rows["lost"].iloc[-1] > 0.85 else "center"
    last = [""] * (len(rows) - 1) + [f"k {rows['k'].iloc[-1]}" if named else ""]
    return go.Scatter(
        x=rows["lost"].tolist(),
        y=rows["control_lost"].tolist(),
        mode="lines+markers+text",
        text=last,
        textposition=f"top {side}",
        textfont={"size": SMALL, "color": colour},
        line={"color": colour, "width": 1.5, "dash": style["dash"]},
        marker={"symbol": style["symbol"], "size": 8, "color": colour},
        error_x=bars("lost", "lost"),
        error_y=bars("control_lost", "control"),
        customdata=_hover(rows, name, level),
        hovertemplate="%{customdata}<extra></extra>",
        name=name,
        legendgroup=name,
        showlegend=legend,
        xaxis=f"x{i}",
        yaxis=f"y{i}",
    )


def _hover(rows: pd.DataFrame, name: str, level: float) -> list[str]:
    """Ready texts, one a point."""
    ci = f"{percent(level)} CI"
    return [
        f"<b>{name}</b>, {plural(row['k'], 'head')} ablated"
        f"<br>{plain(display_name(row['target']))} loses {number(row['lost'])} "
        f"({ci} {interval(row['lost_low'], row['lost_high'])})"
        f"<br>{plain(display_name(row['control']))} loses {number(row['control_lost'])} "
        f"({ci} {interval(row['control_low'], row['control_high'])})"
        f"<br>difference {number(row['difference'])} ({ci} {interval(row['ci_low'], row['ci_high'])})"
        f"<br>{plural(row['n_trials'], 'trial')}, {row['n_control_trials']} of the control"
        for row in rows.to_dict("records")
    ]


def _told(valid: pd.DataFrame, target: str, left_out: int, level: float) -> str:
    """The sentences of the figure: for each control and ranking the greatest k."""
    text = [f"Scatter of the share lost on {display_name(target)} against that lost on a control."]
    for control, of_control in valid.groupby("control", sort=False):
        parts = []
        for ranking, rows in of_control.groupby("ranking", sort=False):
            row = rows.sort_values("k").iloc[-1]
            parts.append(
                f"{display_name(str(ranking))} at {plural(int(row['k']), 'head')} loses "
                f"{number(float(row['lost']))} and {number(float(row['control_lost']))}"
            )
        text.append(f"{display_name(str(control))}: {'; '.join(parts)}.")
    if left_out:
        text.append(f"{plural(left_out, 'cell')} without a valid share.")
    return " ".join(text) + f" Intervals are at {percent(level)}."
