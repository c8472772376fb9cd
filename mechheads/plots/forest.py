"""What is left of a task after taking out the k best heads of each ranking: one row a ranking."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput
from mechheads.plots.curves import (
    chosen,
    common_range,
    drawn_rankings,
    heads_at,
    hover_texts,
    metric_axis,
    ranking_styles,
    sweep_title,
)
from mechheads.plots.describe import describe_forest
from mechheads.plots.style import (
    CONTROL_COLOUR,
    INK,
    PALETTE,
    SMALL,
    display_name,
    fade,
    interval,
    number,
    percent,
    plain,
    plural,
    template,
)
from mechheads.sweep_result import BASELINE, SweepResult

_COLUMNS = 3
# Pixels: from a panel to the next, from a row of panels to the next, a line of text.
_BETWEEN, _ROWS, _LINE = 26, 84, 17


@dataclass(frozen=True)
class _Drawn:
    """What all panels have in common.

    Attributes:
        rows: ``SweepResult.curve`` at k, for the rankings and tasks drawn.
        baselines: The same without ablation, one row a task that has it.
        styles: Colour, symbol and name of each ranking.
        order: Rankings from the top down.
        tasks: Tasks, a panel each.
        label: What is measured, with its unit.
        span: Ends of the common axis; None if there is no value at all.
        level: Confidence level.
    """

    rows: pd.DataFrame
    baselines: pd.DataFrame
    styles: dict[str, dict[str, Any]]
    order: list[str]
    tasks: list[str]
    label: str
    span: list[float] | None
    level: float

    def of(self, task: str, *, control: bool) -> pd.DataFrame:
        """Rows of a task with their place from the top, those of random heads or the others."""
        kept = [r for r in self.order if self.styles[r]["control"] == control]
        rows = self.rows.loc[(self.rows["task"] == task) & self.rows["ranking"].isin(kept)]
        return rows.assign(place=[self.order.index(r) for r in rows["ranking"]])


def ablation_forest(
    sweep: SweepResult,
    *,
    k: int,
    metric: str = "correct",
    tasks: Sequence[str] | str | None = None,
    rankings: Sequence[str] | str | None = None,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw the mean of a metric after ablating the k best heads of each ranking, with its interval.

    One panel a task, one row a ranking, those with the lowest mean on the first task at the top. The dashed line is
    the run without ablation, the band about it its interval. Random heads are grey; the thick bar runs from their
    lowest to their highest draw. A row without a value says so. Hovering shows value, interval, trials and heads.

    Args:
        sweep: What to draw.
        k: Number of ablated heads, one of ``sweep.ks`` above 0.
        metric: One of ``sweep.metrics``.
        tasks: Tasks to draw, in that order; all that have the metric at this k if None.
        rankings: Rankings to draw; all that were measured at this k if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If a metric, task or ranking is not in the sweep.
        InvalidInput: If nothing was measured there or at this k, or the tasks or rankings asked for are none.
    """
    drawn = _collect(sweep, k, metric, tasks, rankings, level=level, n_boot=n_boot, seed=seed)
    figure = go.Figure()
    for i, task in enumerate(drawn.tasks, start=1):
        figure.add_traces(_baseline(drawn, task, i))
        for control in (True, False):
            rows = drawn.of(task, control=control)
            if len(rows):
                heads = [heads_at(sweep, r, task, metric) for r in rows["ranking"]]
                figure.add_traces(_range_of_draws(rows, i) if control else [])
                figure.add_trace(_dots(drawn, rows, heads, i, control=control))
        figure.add_traces(_empty(drawn, task, i))
    _name_once(figure)
    _lay_out(figure, drawn)
    heads = "highest-ranked head" if k == 1 else f"{k} highest-ranked heads"
    name = sweep_title(sweep).partition(", ")[2]
    figure.update_layout(
        title={
            "text": plain(f"Ablating the {heads}{f', {name}' if name else ''}" if title is None else title),
            "subtitle": {"text": _bars(drawn)},
        },
        meta={"description": describe_forest(drawn.rows, drawn.baselines, drawn.label, k=int(k), level=level)},
    )
    return figure


def _collect(
    sweep: SweepResult,
    k: int,
    metric: str,
    tasks: Sequence[str] | str | None,
    rankings: Sequence[str] | str | None,
    *,
    level: float,
    n_boot: int,
    seed: int,
) -> _Drawn:
    """Check what is asked for, and compute it."""
    if sweep.kept:
        raise InvalidInput(
            "in this sweep k counts the heads kept, and the forest is of ablated heads; necessity_curves() shows both "
            "sides."
        )
    if not sweep.rankings:
        raise InvalidInput("the sweep has only the run without ablation; there is no ranking to compare it with.")
    wanted_tasks = chosen("task", tasks, sweep.tasks)
    wanted = chosen("ranking", rankings, sweep.rankings)
    _check_k(k, sweep.ks)
    curve = sweep.curve(metric, level=level, n_boot=n_boot, seed=seed)
    at_k = curve.loc[(curve["k"] == k) & curve["ranking"].isin(wanted)]
    if tasks is None:
        wanted_tasks = [t for t in wanted_tasks if (at_k["task"] == t).any()] or wanted_tasks
    for task in wanted_tasks:
        if not (at_k["task"] == task).any():
            sweep.cell(wanted[0], k, task, metric)  # raises, saying what was not measured
    at_k = at_k.loc[at_k["task"].isin(wanted_tasks)]
    measured = [r for r in wanted if (at_k["ranking"] == r).any()]
    for ranking in wanted if rankings is not None else ():
        if ranking not in measured:
            sweep.cell(ranking, k, wanted_tasks[0], metric)  # raises
    first = at_k.loc[at_k["task"] == wanted_tasks[0]].set_index("ranking")["mean"].to_dict()
    label, proportion = metric_axis(sweep, metric)
    baselines = curve.loc[(curve["k"] == 0) & curve["task"].isin(wanted_tasks)].drop_duplicates("task")
    return _Drawn(
        rows=at_k,
        baselines=baselines,
        styles=ranking_styles(sweep.rankings, curve, drawn=drawn_rankings(sweep)),
        order=sorted(measured, key=lambda r: first[r] if math.isfinite(first.get(r, math.nan)) else math.inf),
        tasks=wanted_tasks,
        label=label,
        span=[-0.03, 1.03] if proportion else common_range(pd.concat([at_k, baselines])),
        level=level,
    )


def _check_k(k: int, known: list[int]) -> None:
    """The number of heads is one that was measured."""
    ablated = [one for one in known if one > 0]
    if isinstance(k, bool) or not isinstance(k, (int, np.integer)) or k not in ablated:
        raise InvalidInput(
            f"k is {k!r}; give the number of ablated heads, one that the sweep has measured: "
            f"{', '.join(map(str, ablated))}."
        )


def _bars(drawn: _Drawn) -> str:
    """The subtitle: over how many trials, and what the bars are."""
    counts = sorted(set(drawn.rows["n_trials"].tolist()) - {0}) or [0]
    trials = plural(counts[0], "trial") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} trials"
    if not np.isfinite(drawn.rows["ci_low"]).any():
        return f"mean over {trials}; too few for intervals"
    return f"mean over {trials}; thin bars and grey band: {percent(drawn.level)} intervals"


def _baseline(drawn: _Drawn, task: str, i: int) -> list[go.Scatter]:
    """Line and band of the run without ablation, over all rows of a panel."""
    found = drawn.baselines.loc[drawn.baselines["task"] == task].to_dict("records")
    if not found or not math.isfinite(found[0]["mean"]):
        return []
    row, ends = found[0], [-0.5, len(drawn.order) - 0.5]
    low, high = row["ci_low"], row["ci_high"]
    name = display_name(BASELINE)
    common = {"mode": "lines", "xaxis": f"x{i}", "yaxis": f"y{i}", "legendgroup": BASELINE}
    traces = []
    if math.isfinite(low) and math.isfinite(high):
        traces.append(
            go.Scatter(
                x=[low, low, high, high, low],
                y=[*ends, *ends[::-1], ends[0]],
                line={"width": 0},
                fill="toself",
                fillcolor=fade(INK, 0.07),
                hoverinfo="skip",
                showlegend=False,
                name=f"{name}, interval",
                **common,
            )
        )
    text = (
        f"<b>{name}</b><br>mean: {number(row['mean'])}<br>{percent(drawn.level)} CI: {interval(low, high)}"
        f"<br>{plural(row['n_trials'], 'trial')}"
    )
    # A point at every row, so that the line can be hovered over anywhere.
    at = [ends[0], *range(len(drawn.order)), ends[1]]
    traces.append(
        go.Scatter(
            x=[row["mean"]] * len(at),
            y=at,
            line={"color": INK, "width": 1.5, "dash": "dash"},
            name=name,
            legendrank=4,
            hovertemplate=f"{text}<extra></extra>",
            cliponaxis=False,
            **common,
        )
    )
    return traces


def _range_of_draws(rows: pd.DataFrame, i: int) -> list[go.Scatter]:
    """Thick bars from the lowest to the highest draw, for the rows that have several."""
    x: list[float | None] = []
    y: list[float | None] = []
    for row in rows.loc[rows["n_draws"] > 1].to_dict("records"):
        x += [row["draw_min"], row["draw_max"], None]
        y += [row["place"], row["place"], None]
    if not x:
        return []
    return [
        go.Scatter(
            x=x,
            y=y,
            mode="lines",
            line={"color": fade(CONTROL_COLOUR, 0.35), "width": 9},
            name="Lowest to highest random draw",
            legendrank=3,
            hoverinfo="skip",
            xaxis=f"x{i}",
            yaxis=f"y{i}",
            cliponaxis=False,
        )
    ]


def _dots(drawn: _Drawn, rows: pd.DataFrame, heads: list[dict[int, list[str]]], i: int, *, control: bool) -> go.Scatter:
    """Dots with their intervals."""
    colour = CONTROL_COLOUR if control else PALETTE[0]
    mean = rows["mean"].to_numpy(dtype=float)
    # Rounding may put a mean a hair outside its interval; a bar of negative length would be drawn the wrong way.
    above, below = (np.maximum(d, 0.0) for d in (rows["ci_high"] - mean, mean - rows["ci_low"]))
    names = [plain(drawn.styles[r]["name"]) for r in rows["ranking"]]
    hover = [[f"<b>{name}</b>", *hover_texts(rows.iloc[[j]], heads[j], drawn.level)[0]] for j, name in enumerate(names)]
    lines = "<br>".join(f"%{{customdata[{j}]}}" for j in range(6))
    return go.Scatter(
        x=mean.tolist(),
        y=rows["place"].tolist(),
        mode="markers",
        marker={
            "symbol": "square" if control else "circle",
            "color": colour,
            "size": 8,
        },
        error_x={
            "type": "data",
            "symmetric": False,
            "array": np.nan_to_num(above).tolist(),
            "arrayminus": np.nan_to_num(below).tolist(),
            "thickness": 1.3,
            "width": 4,
            "color": colour,
        },
        customdata=hover,
        hovertemplate=f"{lines}<extra></extra>",
        name="Random heads" if control else "Highest-ranked heads",
        legendrank=2 if control else 1,
        xaxis=f"x{i}",
        yaxis=f"y{i}",
        cliponaxis=False,
    )


def _empty(drawn: _Drawn, task: str, i: int) -> list[go.Scatter]:
    """The words in rows without a dot."""
    rows = drawn.rows.loc[(drawn.rows["task"] == task) & np.isfinite(drawn.rows["mean"])]
    missing = [j for j, ranking in enumerate(drawn.order) if ranking not in set(rows["ranking"])]
    if not missing:
        return []
    return [
        go.Scatter(
            x=[drawn.span[0] if drawn.span else 0.0] * len(missing),
            y=missing,
            mode="text",
            text=[" no value"] * len(missing),
            textposition="middle right",
            textfont={"size": SMALL, "color": CONTROL_COLOUR},
            hoverinfo="skip",
            showlegend=False,
            name="no value",
            xaxis=f"x{i}",
            yaxis=f"y{i}",
        )
    ]


def _name_once(figure: go.Figure) -> None:
    """One legend entry for the traces of the same name in several panels."""
    seen: set[str] = set()
    traces: Any = figure.data
    for trace in traces:
        if trace.showlegend is not None:
            continue
        trace.update(showlegend=trace.name not in seen, legendgroup=trace.name)
        seen.add(trace.name)


def _lay_out(figure: go.Figure, drawn: _Drawn) -> None:
    """Axes, panel titles and size; panels share the range of x, and the names of the rankings in their row."""
    columns = min(len(drawn.tasks), _COLUMNS)
    lines = math.ceil(len(drawn.tasks) / columns)
    names = [drawn.styles[r]["name"] for r in drawn.order]
    names = [textwrap.wrap(name, max(30, 6 + len(name) // 2)) for name in names]
    left = 22 + 7 * max(len(part) for name in names for part in name)
    each = 25 if max(map(len, names)) == 1 else 34
    panel_height = max(each * len(drawn.order), 60)
    width, right, top = 720 if columns == 1 else 900, 20, 92
    inner = width - left - right
    panel_width = (inner - _BETWEEN * (columns - 1)) / columns
    label = textwrap.wrap(drawn.label, max(int(panel_width / 7), 12))
    row_gap = _ROWS + _LINE * (len(label) - 1)
    plot_height = lines * panel_height + (lines - 1) * row_gap
    for i, task in enumerate(drawn.tasks):
        line, column = divmod(i, columns)
        n = str(i + 1) if i else ""
        x0 = column * (panel_width + _BETWEEN) / inner
        y1 = 1 - line * (panel_height + row_gap) / plot_height
        figure.update_layout(
            {
                f"xaxis{n}": {
                    "domain": [x0, min(x0 + panel_width / inner, 1.0)],
                    "anchor": f"y{n}",
                    "range": drawn.span,
                    "title": {"text": "<br>".join(map(plain, label))},
                    "nticks": 6,
                },
                f"yaxis{n}": {
                    "domain": [max(y1 - panel_height / plot_height, 0.0), y1],
                    "anchor": f"x{n}",
                    "range": [len(drawn.order) - 0.5, -0.5],
                    "tickvals": list(range(len(drawn.order))),
                    "ticktext": ["<br>".join(map(plain, name)) for name in names],
                    "showticklabels": column == 0,
                    "ticks": "",
                    "gridcolor": "#F0F0F0",
                },
            }
        )
        figure.add_annotation(
            text=f"<b>{plain(display_name(task))}</b>",
            x=x0,
            y=y1,
            xref="paper",
            yref="paper",
            xanchor="left",
            yanchor="bottom",
            yshift=6,
            showarrow=False,
            font={"size": 14},
        )
    bottom = 56 + _LINE * (len(label) - 1) + (34 if columns > 1 else 56)
    figure.update_layout(
        template=template(),
        width=width,
        height=top + plot_height + bottom,
        hovermode="closest",
        margin={"l": left, "r": right, "t": top, "b": bottom},
    )
