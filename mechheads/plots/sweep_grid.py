"""Ablation curves side by side: interventions in columns, tasks in rows; and the two sides of one intervention."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput, UnknownName
from mechheads.plots.curves import (
    chosen,
    common_range,
    curve_traces,
    drawn_rankings,
    heads_at,
    k_axis,
    metric_axis,
    ranking_styles,
)
from mechheads.plots.describe import describe_curves
from mechheads.plots.panels import Grid
from mechheads.plots.style import INK, display_name, number, percent, plain, spread_ticks
from mechheads.sweep_result import BASELINE
from mechheads.sweep_set import KEPT_SUFFIX, SweepSet
from mechheads.sweep_stats.sides import sides

# Panels a row up to which each has its full width.
_WIDE, _MOST = 3, 6


def intervention_curves(
    sweeps: SweepSet,
    *,
    metric: str | None = None,
    tasks: Sequence[str] | str | None = None,
    rankings: Sequence[str] | str | None = None,
    labels: Sequence[str] | None = None,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw the ablation curves of several interventions side by side.

    A column an intervention, a row a task; a ranking has the same colour in all, and all panels of the figure share the
    range of the metric, so that heights can be compared straight across. Bands, bars and hover texts are those of
    ``ablation_curve``.

    Args:
        sweeps: The set.
        metric: The metric; the first if None.
        tasks: Tasks to draw, in that order; all of the first label's if None.
        rankings: Rankings to draw, in that order; all if None.
        labels: Interventions to draw, in that order; all in which k counts ablated heads if None. At most 6.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If a name is not in the set.
        InvalidInput: If there is nothing to draw, or more than 6 labels.
    """
    names = (sweeps.ablated or sweeps.labels) if labels is None else list(dict.fromkeys(labels))
    for name in names:
        if name not in sweeps:
            raise UnknownName("sweep of the set", name, sweeps.labels)
    if not 0 < len(names) <= _MOST:
        raise InvalidInput(f"{len(names)} interventions are to be drawn; a row holds 1 to {_MOST}: choose labels.")
    panels = _Panels(sweeps, names, metric, tasks, rankings, level=level, n_boot=n_boot, seed=seed)
    heads = {True: "Keeping only the highest-ranked heads", False: "Ablating the highest-ranked heads"}
    kinds = {sweeps[name].kept for name in names}
    plain_title = heads[kinds.pop()] if len(kinds) == 1 else "Ablating and keeping the highest-ranked heads"
    plain_title += f", {len(names)} interventions" if len(names) > 1 else ""
    return panels.figure(plain_title if title is None else title)


def necessity_curves(
    sweeps: SweepSet,
    label: str | None = None,
    *,
    metric: str | None = None,
    tasks: Sequence[str] | str | None = None,
    rankings: Sequence[str] | str | None = None,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw necessity beside sufficiency: left the heads of a ranking ablated, right all others ablated.

    Heads are necessary where the left curve falls, and sufficient where the right one rises to the dashed line, the run
    without ablation. Drawn like ``intervention_curves``.

    Args:
        sweeps: A set with a label and its complement.
        label: The label; the first that has a complement if None.
        metric: The metric; the first if None.
        tasks: Tasks to draw; all if None.
        rankings: Rankings to draw; all if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If a name is not in the set.
        InvalidInput: If the label has no complement, or there is nothing to draw.
    """
    pair = list(sides(sweeps, label))
    panels = _Panels(sweeps, pair, metric, tasks, rankings, level=level, n_boot=n_boot, seed=seed)
    return panels.figure(f"Necessity and sufficiency, {pair[0]}" if title is None else title)


class _Panels:
    """The curves of all panels, and the figure made of them."""

    def __init__(
        self,
        sweeps: SweepSet,
        labels: list[str],
        metric: str | None,
        tasks: Sequence[str] | str | None,
        rankings: Sequence[str] | str | None,
        *,
        level: float,
        n_boot: int,
        seed: int,
    ) -> None:
        self.sweeps, self.labels, self.level = sweeps, labels, level
        first = sweeps[labels[0]]
        self.metric = first.metrics[0] if metric is None else metric
        self.tasks = chosen("task", tasks, first.tasks)
        known = list(dict.fromkeys(r for name in labels for r in sweeps[name].rankings))
        self.rankings = chosen("ranking", rankings, known)
        parts = []
        for name in labels:
            part = sweeps[name].curve(self.metric, level=level, n_boot=n_boot, seed=seed)
            parts.append(part.assign(label=name))
        curve = pd.concat(parts, ignore_index=True)
        curve = curve.loc[curve["task"].isin(self.tasks) & curve["ranking"].isin([*self.rankings, BASELINE])]
        if tasks is None:
            self.tasks = [task for task in self.tasks if (curve["task"] == task).any()]
        if curve.empty or not self.tasks:
            raise InvalidInput(
                f"{self.metric!r} was not measured for {', '.join(self.rankings)} on the tasks asked for."
            )
        self.curve = curve
        drawn = set[str]().union(*(drawn_rankings(sweeps[name]) for name in labels))
        self.styles = ranking_styles(known, curve, drawn=drawn)
        self.label, self.proportion = metric_axis(first, self.metric)

    def figure(self, title: str) -> go.Figure:
        """Draw it."""
        width = 265.0 if len(self.labels) <= _WIDE else 880.0 / len(self.labels)
        titles = tuple(self._title(task, name) for task in self.tasks for name in self.labels)
        grid = Grid(len(self.labels), len(self.tasks), width, 230, titles=titles)
        figure = go.Figure()
        named: set[str] = set()
        for row, task in enumerate(self.tasks):
            for column, name in enumerate(self.labels):
                self._draw(figure, row * grid.columns + column + 1, name, task, named)
                self._axes(figure, grid, row, column)
        bands = f"bands: {percent(self.level)} bootstrap intervals over trials and draws"
        if any(self.styles[r]["control"] for r in named if r in self.styles):
            bands += "; bars: lowest to highest random draw"
        return grid.finish(figure, title, [bands], self._told())

    def _draw(self, figure: go.Figure, i: int, name: str, task: str, named: set[str]) -> None:
        """Band and line of every ranking in one panel, and the line of the whole model beside kept heads."""
        sweep = self.sweeps[name]
        here = self.curve.loc[(self.curve["label"] == name) & (self.curve["task"] == task)]
        for ranking in self.rankings:
            rows = here.loc[here["ranking"] == ranking].sort_values("k")
            if rows.empty:
                continue
            heads = heads_at(sweep, ranking, task, self.metric)
            figure.add_traces(
                curve_traces(
                    rows, self.styles[ranking], heads, i, self.level, legend=ranking not in named, kept=sweep.kept
                )
            )
            named.add(ranking)
        if sweep.kept:
            self._baseline(figure, i, name, task, named)

    def _baseline(self, figure: go.Figure, i: int, name: str, task: str, named: set[str]) -> None:
        """The run without ablation of the other side, across the panel."""
        other = name.removesuffix(KEPT_SUFFIX)
        rows = self.curve.loc[(self.curve["label"] == other) & (self.curve["task"] == task) & (self.curve["k"] == 0)]
        if rows.empty or not math.isfinite(float(rows["mean"].iloc[0])):
            return
        mean, ks = float(rows["mean"].iloc[0]), self._ks(name)
        words = display_name(BASELINE)
        figure.add_trace(
            go.Scatter(
                x=ks,
                y=[mean] * len(ks),
                mode="lines",
                line={"color": INK, "width": 1.5, "dash": "dash"},
                name=words,
                legendgroup=BASELINE,
                showlegend=BASELINE not in named,
                hovertemplate=f"<b>{words}</b><br>mean: {number(mean)}<extra></extra>",
                xaxis=f"x{i}",
                yaxis=f"y{i}",
            )
        )
        named.add(BASELINE)

    def _ks(self, name: str) -> list[int]:
        return sorted(set(self.curve.loc[self.curve["label"] == name, "k"].tolist()))

    def _axes(self, figure: go.Figure, grid: Grid, row: int, column: int) -> None:
        """Axes of one panel and its title."""
        name, task = self.labels[column], self.tasks[row]
        ks = self._ks(name)
        pad = 0.03 * (ks[-1] - ks[0]) or 0.5
        # A row is a task, whose range its panels share; proportions share one in all rows.
        of_task = self.curve.loc[self.curve["task"] == task]
        x: dict[str, Any] = {
            "title": {"text": k_axis(self.sweeps[name].kept)},
            "tickvals": spread_ticks(ks, gap=0.055 * 265 / grid.panel_width),
            "range": [ks[0] - pad, ks[-1] + pad],
            "showgrid": False,
        }
        y: dict[str, Any] = {
            "range": [-0.03, 1.03] if self.proportion else common_range(of_task),
            "title": {"text": plain(self.label) if column == 0 else ""},
            "showticklabels": column == 0,
            "dtick": 0.2 if self.proportion else None,
        }
        grid.place(figure, row, column, self._title(task, name), x=x, y=y)

    def _title(self, task: str, label: str) -> str:
        return f"{display_name(task)}, {label}" if len(self.tasks) > 1 else label

    def _told(self) -> str:
        """The sentences of every column."""
        parts = []
        for name in self.labels:
            rows = self.curve.loc[self.curve["label"] == name]
            told = describe_curves(rows, self.label, level=self.level, kept=self.sweeps[name].kept)
            parts.append(f"{name}: {told}")
        return " ".join(parts)
