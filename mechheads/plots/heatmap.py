"""Head scores as a layer by head heatmap."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.plots.describe import describe_scores
from mechheads.plots.style import (
    DIVERGING,
    INK,
    SMALL,
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

# Pixels around and between panels: left, room for a colour bar with its title, below, below a legend.
_LEFT, _BAR, _BELOW, _LEGEND = 62, 112, 58, 34


def head_heatmap(
    scores: HeadScores,
    *,
    heads: Any = None,
    title: str | None = None,
    ci: bool = True,
    limit: int | float | None = None,
    top: int = 0,
    level: float = 0.95,
) -> go.Figure:
    """Draw the pooled score of every head, layers rising upward, heads to the right.

    Red is positive, blue negative, white zero: the colours run from ``-limit`` to ``+limit``. Heads
    without a defined score are grey. Hovering shows label, score, interval, rank and number of trials.

    Args:
        scores: What to draw.
        heads: Heads to outline (a HeadSet or anything one parses from).
        title: Title; the method and the model if None.
        ci: Compute the bootstrap interval of each head and show it on hovering.
        limit: Score at the ends of the colour bar, in the unit of the scores; the largest magnitude if None.
        top: Outline that many heads with the highest score.
        level: Confidence level of the interval.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: If no trial is kept, the limit is not a positive number, ``top`` is more than the
            heads with a score, or a head does not exist.
    """
    return score_heatmaps([scores], heads=heads, title=title, ci=ci, limit=limit, top=top, level=level)


def score_heatmaps(
    scores: Sequence[HeadScores],
    *,
    heads: Any = None,
    title: str | None = None,
    ci: bool = True,
    limit: int | float | None = None,
    top: int = 0,
    level: float = 0.95,
) -> go.Figure:
    """Draw several scores side by side, each with its own colour bar in its own unit.

    Args:
        scores: One or more results, such as ``[locos, attention_spatial]``.
        heads: Heads to outline in every panel.
        title: Title of the whole figure.
        ci: As in ``head_heatmap``.
        limit: One limit for all panels; each panel's own largest magnitude if None.
        top: Outline in every panel its own highest heads.
        level: Confidence level.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: As ``head_heatmap``, and if there are no scores.
    """
    panels = list(scores)
    if not panels:
        raise InvalidInput("there are no scores to draw; give at least one HeadScores.")
    outlined = HeadSet.parse(heads) if heads is not None else HeadSet()
    figure, descriptions = go.Figure(), []
    domains, size = _layout(panels, with_legend=bool(len(outlined) or top))
    for i, (panel, domain) in enumerate(zip(panels, domains, strict=True), start=1):
        frame = _frame(panel, ci=ci, level=level)
        figure.add_traces(_panel_traces(panel, frame, i, domain, limit=limit, level=level))
        outlined.check(panel.n_layers, panel.n_heads)
        first = i == 1
        if top:
            name = f"Top {top} of each score" if len(panels) > 1 else f"Top {top}"
            figure.add_trace(_outline(panel.top(top), name, i, dash="solid", legend=first))
        if len(outlined):
            dash = "dot" if top else "solid"
            figure.add_trace(_outline(outlined, "Chosen heads", i, dash=dash, legend=first))
        figure.update_layout(_axes(panel, i, domain))
        if len(panels) > 1:
            figure.add_annotation(
                text=f"<b>{plain(display_name(panel.method))}</b>",
                x=domain[0],
                y=1,
                xref="paper",
                yref="paper",
                xanchor="left",
                yanchor="bottom",
                yshift=4,
                showarrow=False,
                font={"size": 14},
            )
        descriptions.append(describe_scores(panel, frame, level=level))
    figure.update_layout(
        template=template(), title=_title(panels, title), meta={"description": " ".join(descriptions)}, **size
    )
    return figure


def _frame(scores: HeadScores, *, ci: bool, level: float) -> pd.DataFrame:
    """One row per head; the parts are left out, they are not drawn."""
    scores.mean()  # raises, saying why, if no trial is kept
    slim = HeadScores(
        method=scores.method,
        values=scores.values,
        kept=scores.kept,
        weights=scores.weights,
        trial_ids=scores.trial_ids,
        unit=scores.unit,
        pooling=scores.pooling,
    )
    return slim.to_frame(ci=True, level=level) if ci else slim.to_frame()


def _panel_traces(
    scores: HeadScores,
    frame: pd.DataFrame,
    i: int,
    domain: tuple[float, float],
    *,
    limit: int | float | None,
    level: float,
) -> list[go.Heatmap]:
    """The heatmap of the defined heads, and a grey one of the others if there are any."""
    shape = (scores.n_layers, scores.n_heads)
    z = frame["score"].to_numpy(dtype=float).reshape(shape)
    bound = _limit(z, limit)
    hover = _hover(frame, scores.unit, level).reshape(*shape, -1)
    where = {"xaxis": f"x{i}", "yaxis": f"y{i}", "xgap": 1, "ygap": 1, "hoverongaps": False}
    if max(shape) > 40:
        where |= {"xgap": 0, "ygap": 0}
    lines = [f"%{{customdata[{j}]}}" for j in range(1, hover.shape[-1])]
    template = f"<b>%{{customdata[0]}}</b><br>{'<br>'.join(lines)}<extra></extra>"
    common = {"customdata": hover, "hovertemplate": template, **where}
    unit = f" ({plain(scores.unit)})" if scores.unit else ""
    traces = [
        go.Heatmap(
            z=z,
            zmin=-bound,
            zmid=0,
            zmax=bound,
            colorscale=DIVERGING,
            name=plain(scores.method),
            colorbar={
                "title": {"text": f"{plain(display_name(scores.method))} score{unit}", "side": "right"},
                "x": domain[1],
                "xanchor": "left",
                "xpad": 8,
                "thickness": 14,
                "len": 1,
                "y": 0.5,
                "outlinewidth": 0.5,
                "outlinecolor": INK,
                "ticks": "outside",
                "ticklen": 4,
                "nticks": 7,
                "tickfont": {"size": SMALL},
            },
            **common,
        )
    ]
    undefined = ~np.isfinite(z)
    if undefined.any():
        traces.append(
            go.Heatmap(
                z=np.where(undefined, 0.0, np.nan),
                zmin=0,
                zmax=1,
                showscale=False,
                name="undefined",
                colorscale=[[0, UNDEFINED_COLOUR], [1, UNDEFINED_COLOUR]],
                **common,
            )
        )
    return traces


def _limit(z: np.ndarray, limit: int | float | None) -> float:
    """End of the colour bar: the one asked for, or the largest magnitude (1 if all is zero or undefined)."""
    if limit is None:
        finite = np.abs(z[np.isfinite(z)])
        return float(finite.max()) if finite.size and finite.max() > 0 else 1.0
    if not (math.isfinite(limit) and limit > 0):
        raise InvalidInput(f"limit is {limit!r}; give the score at the end of the colour bar, a number above 0.")
    return float(limit)


def _hover(frame: pd.DataFrame, unit: str, level: float) -> np.ndarray:
    """Ready texts ``[head, line]``: label, score, interval if it was computed, rank, trials."""
    ranked = int(np.isfinite(frame["score"]).sum())
    unit = f" {plain(unit)}" if unit else ""
    rows = []
    for row in frame.to_dict("records"):
        trials = plural(row["n_trials"], "trial")
        if not math.isfinite(row["score"]):
            texts = ["score: undefined", "no kept trial defines it", "no rank", trials]
            rows.append([row["label"], *(texts if "ci_low" in row else texts[:1] + texts[2:])])
            continue
        texts = [f"score: {number(row['score'])}{unit}"]
        if "ci_low" in row:
            texts.append(f"{percent(level)} CI: {interval(row['ci_low'], row['ci_high'])}")
        rows.append([row["label"], *texts, f"rank: {row['rank']:.0f} of {ranked}", trials])
    return np.array(rows, dtype=object)


def _outline(heads: HeadSet, name: str, i: int, *, dash: str, legend: bool) -> go.Scatter:
    """Squares around the cells of the heads, as one broken line that the legend can name."""
    x: list[float | None] = []
    y: list[float | None] = []
    for head in heads:
        x += [head.head + d for d in (-0.5, 0.5, 0.5, -0.5, -0.5)] + [None]
        y += [head.layer + d for d in (-0.5, -0.5, 0.5, 0.5, -0.5)] + [None]
    return go.Scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": "black", "width": 2.5, "dash": dash},
        name=name,
        hoverinfo="skip",
        showlegend=legend,
        legendgroup=name,
        xaxis=f"x{i}",
        yaxis=f"y{i}",
        meta={"heads": heads.labels},
        cliponaxis=False,
    )


def _axes(scores: HeadScores, i: int, domain: tuple[float, float]) -> dict[str, Any]:
    """Both axes of one panel, cells centred on whole numbers."""
    layers, heads = scores.n_layers, scores.n_heads
    n = "" if i == 1 else str(i)
    bare = {"showgrid": False, "zeroline": False}
    return {
        f"xaxis{n}": {
            "title": {"text": "Head (index in its layer)"},
            "range": [-0.5, heads - 0.5],
            "domain": domain,
            "tickvals": count_ticks(heads),
            "anchor": f"y{n}",
            **bare,
        },
        f"yaxis{n}": {
            "title": {"text": "Layer (index, last on top)" if i == 1 else ""},
            "range": [-0.5, layers - 0.5],
            "tickvals": count_ticks(layers, most=16),
            "anchor": f"x{n}",
            **bare,
        },
    }


def _layout(panels: list[HeadScores], *, with_legend: bool) -> tuple[list[tuple[float, float]], dict[str, Any]]:
    """Domain of each panel on the paper's width, and the size of the figure in pixels."""
    most = 420 if len(panels) == 1 else 340
    widths = [min(max(30 * p.n_heads, 240), most) for p in panels]
    # A panel's own colour bar stands to its right; then the next panel's ticks.
    between = _BAR + 26
    inner = sum(widths) + between * (len(panels) - 1)
    domains, start = [], 0.0
    for width in widths:
        domains.append((start / inner, min((start + width) / inner, 1.0)))
        start += width + between
    top = 66 if len(panels) == 1 else 90
    below = _BELOW + (_LEGEND if with_legend else 0)
    height = min(max(15 * max(p.n_layers for p in panels), 160), 560)
    size = {
        "width": _LEFT + inner + _BAR,
        "height": top + height + below,
        "margin": {"l": _LEFT, "r": _BAR, "t": top, "b": below},
    }
    return domains, size


def _title(panels: list[HeadScores], title: str | None) -> dict[str, Any]:
    """Title, and a subtitle with the number of trials."""
    models = {_model_name(p) for p in panels} - {""}
    if title is None:
        what = display_name(panels[0].method) if len(panels) == 1 else "Head scores"
        title = f"{what}, {models.pop()}" if len(models) == 1 else what
    counts = sorted({p.n_kept for p in panels})
    trials = plural(counts[0], "trial") if len(counts) == 1 else f"{counts[0]} to {counts[-1]} trials"
    return {"text": plain(title), "subtitle": {"text": f"mean over {trials}"}}


def _model_name(scores: HeadScores) -> str:
    model = scores.meta.get("model")
    return str(model.get("name", "")) if isinstance(model, dict) else ""
