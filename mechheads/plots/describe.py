"""Figures and results in one or two plain sentences, for people who do not see the picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput
from mechheads.plots.style import display_name, interval, number, percent, plural
from mechheads.scores import HeadScores
from mechheads.sweep_result import SweepResult


def describe(what: go.Figure | HeadScores | SweepResult) -> str:
    """Say in plain words what a figure, or the figure of a result, shows.

    Args:
        what: A figure of ``mechheads.plots`` (its sentence was written when it was drawn), any other plotly
            figure (its title is all that is known), head scores, or a sweep (its first metric).

    Raises:
        InvalidInput: If it is none of these, or the scores have no kept trial.
    """
    if isinstance(what, HeadScores):
        return describe_scores(what, what.to_frame(ci=True), level=0.95)
    if isinstance(what, SweepResult):
        metric = what.metrics[0]
        return describe_curves(what.curve(metric), display_name(metric), level=0.95)
    if isinstance(what, go.Figure):
        layout: Any = what.layout
        meta = layout.meta
        if isinstance(meta, dict) and meta.get("description"):
            return str(meta["description"])
        title = layout.title.text
        return f"Figure: {title}." if title else f"Figure without a title, with {len(what.data)} traces."
    raise InvalidInput(
        f"cannot describe a value of type {type(what).__name__}; give a plotly Figure, HeadScores or a SweepResult."
    )


def describe_scores(scores: HeadScores, frame: pd.DataFrame, *, level: float) -> str:
    """The sentence of a heatmap, from the frame that it draws (``HeadScores.to_frame``)."""
    unit = f" ({scores.unit})" if scores.unit else ""
    text = (
        f"Heatmap of {display_name(scores.method)} scores{unit} of {plural(len(frame), 'attention head')} "
        f"({plural(scores.n_layers, 'layer')} by {plural(scores.n_heads, 'head')}), "
        f"mean over {plural(scores.n_kept, 'trial')}."
    )
    ranked = frame.loc[np.isfinite(frame["score"])].sort_values("rank")
    if ranked.empty:
        return f"{text} No head has a defined score."
    top = ranked.iloc[0]
    text += f" The highest is {top['label']} with {number(top['score'])}"
    if "ci_low" in frame and np.isfinite(top["ci_low"]):
        text += f" ({percent(level)} confidence interval {interval(top['ci_low'], top['ci_high'])})"
    if len(ranked) > 1:
        text += ", then " + ", ".join(
            f"{row['label']} ({number(row['score'])})" for _, row in ranked.iloc[1:3].iterrows()
        )
        last = ranked.iloc[-1]
        text += f"; the lowest is {last['label']} with {number(last['score'])}"
    undefined = len(frame) - len(ranked)
    return f"{text}." + (f" Undefined: {plural(undefined, 'head')}." if undefined else "")


def describe_curves(curve: pd.DataFrame, metric: str, *, level: float) -> str:
    """The sentences of an ablation curve, from ``SweepResult.curve``."""
    if metric[1:2].islower():  # not an acronym, so it may stand inside a sentence
        metric = metric[:1].lower() + metric[1:]
    text = [f"Curves of {metric} against the number of ablated heads, with {percent(level)} intervals."]
    for task, of_task in curve.groupby("task", sort=False):
        parts = []
        for ranking, rows in of_task.groupby("ranking", sort=False):
            rows = rows.sort_values("k")
            first, last = rows.iloc[0], rows.iloc[-1]
            change = f"{number(first['mean'])} at {first['k']} heads"
            if len(rows) > 1:
                change += f" to {number(last['mean'])} at {last['k']} heads"
            parts.append(f"{display_name(str(ranking))} from {change}")
        text.append(f"{display_name(str(task))}: {'; '.join(parts)}.")
    return " ".join(text)
