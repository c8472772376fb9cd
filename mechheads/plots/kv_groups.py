"""Scores by the key/value heads that a cache keeps or drops."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.agreement.groups import KVGroups, by_kv_group
from mechheads.errors import InvalidInput
from mechheads.plots.agreement import upright_bar
from mechheads.plots.describe import describe_groups, trials_behind
from mechheads.plots.profile import panel_heading
from mechheads.plots.style import (
    DIVERGING,
    PALETTE,
    UNDEFINED_COLOUR,
    count_ticks,
    display_name,
    interval,
    number,
    percent,
    plain,
    plural,
    template,
)
from mechheads.scores import HeadScores


def kv_group_view(
    scores: HeadScores,
    n_key_value_heads: int | None = None,
    *,
    how: str = "max",
    top: int = 12,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw the scores of the KV groups: all of them as a map, and the highest with their intervals.

    A KV group is the query heads that share one key/value head: what a cache keeps or drops as one. Hovering names its
    heads and the highest of them.

    Args:
        scores: Scores of the query heads.
        n_key_value_heads: Key/value heads a layer; what the scores' provenance says if None.
        how: ``"max"``, ``"mean"`` or ``"sum"`` over the heads of a group.
        top: How many groups to list.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: As ``by_kv_group``, or if no group has a score, or ``top`` is not above 0.
        UnknownName: If ``how`` is unknown.
    """
    groups = by_kv_group(scores, n_key_value_heads, how=how, level=level, n_boot=n_boot, seed=seed)
    frame = groups.to_frame()
    ranked = frame.loc[frame["rank"].notna()].sort_values("rank")
    if ranked.empty:
        raise InvalidInput(f"no KV group of {scores.method!r} has a defined score; there is nothing to draw.")
    if isinstance(top, bool) or not isinstance(top, (int, np.integer)) or top < 1:
        raise InvalidInput(f"top is {top!r}; it must be a whole number >= 1.")
    listed = ranked.head(top)
    layers, n_groups = groups.values.shape
    left, bar, right = min(max(34 * n_groups, 130), 420), 200, 330
    inner = left + bar + right
    figure = go.Figure([*_group_map(groups, frame, left / inner), _group_list(groups, listed)])
    height = min(max(15 * layers, 24 * len(listed), 200), 560)
    unit = f" ({plain(groups.unit)})" if groups.unit else ""
    start = (left + bar) / inner
    name = f"{display_name(groups.method)} by KV group"
    heads = plural(groups.heads_per_group, "query head")
    how_told = {"max": "highest", "mean": "mean", "sum": "sum"}[how]
    figure.update_layout(
        template=template(),
        title={
            "text": plain(name if title is None else title),
            "subtitle": {"text": f"{how_told} of the {heads} that share a key/value head, {trials_behind(groups)}"},
        },
        xaxis={
            "title": {"text": "Key/value head (index)"},
            "domain": [0, left / inner],
            "range": [-0.5, n_groups - 0.5],
            "tickvals": count_ticks(n_groups),
            "showgrid": False,
        },
        yaxis={
            "title": {"text": "Layer (index, last on top)"},
            "range": [-0.5, layers - 0.5],
            "tickvals": count_ticks(layers, most=16),
            "showgrid": False,
        },
        xaxis2={
            "title": {"text": f"Group score{unit}"},
            "domain": [start, 1],
            "anchor": "y2",
            "rangemode": "tozero",
            "zeroline": True,
            "zerolinecolor": "#C8C8C8",
        },
        yaxis2={"anchor": "x2", "autorange": "reversed", "showgrid": False, "ticks": ""},
        width=62 + inner + 24,
        height=92 + height + 58,
        margin={"l": 62, "r": 24, "t": 92, "b": 58},
        showlegend=False,
        meta={"description": describe_groups(groups, listed)},
    )
    panel_heading(figure, "All groups", 0.0)
    panel_heading(figure, f"Highest {len(listed)}, with {percent(level)} intervals", start)
    return figure


def _group_hover(groups: KVGroups, frame: pd.DataFrame) -> list[str]:
    unit = f" {plain(groups.unit)}" if groups.unit else ""
    out = []
    for row in frame.to_dict("records"):
        if not math.isfinite(row["score"]):
            out.append(f"<b>{row['label']}</b><br>score: undefined<br>heads: {row['heads']}")
            continue
        out.append(
            f"<b>{row['label']}</b><br>score: {number(row['score'])}{unit}<br>{percent(groups.level)} CI: "
            f"{interval(row['ci_low'], row['ci_high'])}<br>rank: {row['rank']:.0f}<br>heads: {row['heads']}"
            f"<br>highest: {row['best_head']}"
        )
    return out


def _group_map(groups: KVGroups, frame: pd.DataFrame, end: float) -> list[go.Heatmap]:
    """All groups, and the undefined ones in grey."""
    z = groups.values
    finite = np.abs(z[np.isfinite(z)])
    bound = float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    common: dict[str, Any] = {
        "customdata": np.array(_group_hover(groups, frame), dtype=object).reshape(z.shape),
        "hovertemplate": "%{customdata}<extra></extra>",
        "hoverongaps": False,
        "xgap": 1 if max(z.shape) <= 40 else 0,
        "ygap": 1 if max(z.shape) <= 40 else 0,
    }
    unit = f" ({plain(groups.unit)})" if groups.unit else ""
    colorbar = upright_bar(f"Group score{unit}", x=end)
    traces = [
        go.Heatmap(
            z=z, zmin=-bound, zmid=0, zmax=bound, colorscale=DIVERGING, colorbar=colorbar, name="groups", **common
        )
    ]
    if not np.isfinite(z).all():
        grey = [[0, UNDEFINED_COLOUR], [1, UNDEFINED_COLOUR]]
        hidden = np.where(np.isfinite(z), np.nan, 0.0)
        traces.append(
            go.Heatmap(z=hidden, zmin=0, zmax=1, showscale=False, colorscale=grey, name="undefined", **common)
        )
    return traces


def _group_list(groups: KVGroups, listed: pd.DataFrame) -> go.Scatter:
    """The highest groups as points with their intervals."""
    has = np.isfinite(listed["ci_low"])
    return go.Scatter(
        x=listed["score"].tolist(),
        y=[f"{row['label']}" for row in listed.to_dict("records")],
        mode="markers",
        marker={"color": PALETTE[0], "size": 8},
        error_x={
            "type": "data",
            "symmetric": False,
            "array": np.where(has, listed["ci_high"] - listed["score"], 0.0).tolist(),
            "arrayminus": np.where(has, listed["score"] - listed["ci_low"], 0.0).tolist(),
            "thickness": 1.2,
            "width": 4,
            "color": PALETTE[0],
        },
        customdata=_group_hover(groups, listed),
        hovertemplate="%{customdata}<extra></extra>",
        xaxis="x2",
        yaxis="y2",
        name="highest groups",
    )
