"""Head scores as a layer by head heatmap."""

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
from mechheads.heads import HeadSet
from mechheads.plots.agreement import beside_ticks
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
# So many panels stand in one row, as wide as they like. More are wrapped into rows that fit a page of _PAGE pixels, at
# most _COLUMNS in each, and fewer where a head would get less than _CELL pixels.
_ONE_ROW, _PAGE, _COLUMNS, _CELL = 3, 900, 4, 4.5
# Pixels in wrapped rows: from a map to the next one, and to the right of the last; between rows; a line of a heading.
_BETWEEN, _LAST, _ROWS, _LINE = 118, 90, 56, 18


@dataclass(frozen=True)
class _Place:
    """Where a panel stands, in shares of the plot's width and height, and what is written around it."""

    x: tuple[float, float]
    y: tuple[float, float]
    heading: str
    bar: str
    head_title: str
    layer_title: str
    head_ticks: list[int]


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

    More than three are wrapped into rows of at most four, fewer if they have many heads a layer.

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
    wrapped = len(panels) > _ONE_ROW
    lay_out = _wrapped if wrapped else _one_row
    places, size = lay_out(panels, below=_BELOW + (_LEGEND if len(outlined) or top else 0))
    for i, (panel, place) in enumerate(zip(panels, places, strict=True), start=1):
        frame = _frame(panel, ci=ci, level=level)
        figure.add_traces(_panel_traces(panel, frame, i, place, limit=limit, level=level))
        outlined.check(panel.n_layers, panel.n_heads)
        here: dict[str, Any] = {"showlegend": i == 1, "xaxis": f"x{i}", "yaxis": f"y{i}"}
        if top:
            name = f"Top {top} of each score" if len(panels) > 1 else f"Top {top}"
            figure.add_trace(outline(panel.top(top), name, legendgroup=name, **here))
        if len(outlined):
            dash = "dot" if top else "solid"
            figure.add_trace(outline(outlined, "Chosen heads", dash=dash, legendgroup="Chosen heads", **here))
        figure.update_layout(_axes(panel, i, place))
        if len(panels) > 1:
            figure.add_annotation(
                text=f"<b>{place.heading}</b>",
                align="left",
                x=place.x[0],
                y=place.y[1],
                xref="paper",
                yref="paper",
                xanchor="left",
                yanchor="bottom",
                yshift=4,
                showarrow=False,
                font={"size": 14},
            )
        descriptions.append(describe_scores(panel, frame, level=level))
    meta: dict[str, Any] = {"description": " ".join(descriptions)}
    if wrapped:
        meta["least_width"] = _PAGE - 40  # narrower, colour bars would meet the ticks of the next panel
    figure.update_layout(template=template(), title=_title(panels, title), meta=meta, **size)
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
    place: _Place,
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
    traces = [
        go.Heatmap(
            z=z,
            zmin=-bound,
            zmid=0,
            zmax=bound,
            colorscale=DIVERGING,
            name=plain(scores.method),
            colorbar={
                "title": {"text": place.bar, "side": "right"},
                "x": place.x[1],
                "xanchor": "left",
                "xpad": 8,
                "thickness": 14,
                "len": place.y[1] - place.y[0],
                "y": (place.y[0] + place.y[1]) / 2,
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


def outline(heads: HeadSet, name: str, *, dash: str = "solid", **fields: Any) -> go.Scatter:
    """Squares around the cells of the heads, as one broken line that the legend can name; ``fields`` of the trace."""
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
        meta={"heads": heads.labels},
        cliponaxis=False,
        **fields,
    )


def _axes(scores: HeadScores, i: int, place: _Place) -> dict[str, Any]:
    """Both axes of one panel, cells centred on whole numbers."""
    layers, heads = scores.n_layers, scores.n_heads
    n = "" if i == 1 else str(i)
    bare = {"showgrid": False, "zeroline": False}
    return {
        f"xaxis{n}": {
            "title": {"text": place.head_title},
            "range": [-0.5, heads - 0.5],
            "domain": place.x,
            "tickvals": place.head_ticks,
            "anchor": f"y{n}",
            **bare,
        },
        f"yaxis{n}": {
            "title": {"text": place.layer_title},
            "range": [-0.5, layers - 0.5],
            "domain": place.y,
            "tickvals": count_ticks(layers, most=16),
            "anchor": f"x{n}",
            **bare,
        },
    }


def _one_row(panels: list[HeadScores], *, below: int) -> tuple[list[_Place], dict[str, Any]]:
    """Places of panels side by side, and the size of the figure in pixels."""
    most = 420 if len(panels) == 1 else 340
    widths = [min(max(30 * p.n_heads, 240), most) for p in panels]
    # A panel's own colour bar stands to its right; then the next panel's ticks.
    between = _BAR + 26
    inner = sum(widths) + between * (len(panels) - 1)
    places, start = [], 0.0
    for panel, width in zip(panels, widths, strict=True):
        name, unit = plain(display_name(panel.method)), f" ({plain(panel.unit)})" if panel.unit else ""
        places.append(
            _Place(
                x=(start / inner, min((start + width) / inner, 1.0)),
                y=(0.0, 1.0),
                heading=name,
                bar=f"{name} score{unit}",
                head_title="Head (index in its layer)",
                layer_title="" if places else "Layer (index, last on top)",
                head_ticks=count_ticks(panel.n_heads),
            )
        )
        start += width + between
    top = 66 if len(panels) == 1 else 90
    height = min(max(15 * max(p.n_layers for p in panels), 160), 560)
    return places, _size(inner, height, right=_BAR, top=top, below=below)


def _wrapped(panels: list[HeadScores], *, below: int) -> tuple[list[_Place], dict[str, Any]]:
    """Places of panels in rows as wide as a page, and the size of the figure in pixels."""
    height = min(max(9 * max(p.n_layers for p in panels), 190), 360)
    # Letters beside a colour bar are about 7 pixels wide, the bold ones of a heading 8.5.
    bars = [textwrap.wrap(f"Score ({p.unit})" if p.unit else "Score", height // 7) for p in panels]
    more = _LINE * (max(map(len, bars)) - 1)
    between, inner = _BETWEEN + more, _PAGE - _LEFT - _LAST - more
    widths = {c: (inner - between * (c - 1)) / c for c in range(1, _COLUMNS + 1)}
    most = max(p.n_heads for p in panels)
    fitting = max((c for c, width in widths.items() if width >= _CELL * most), default=1)
    rows = math.ceil(len(panels) / fitting)
    columns = math.ceil(len(panels) / rows)  # rows of equal length rather than a last one with a single panel
    width = widths[columns]
    headings = [textwrap.wrap(display_name(p.method), int((width + between - 12) / 8.5)) for p in panels]
    row_gap = _ROWS + _LINE * (max(map(len, headings)) - 1)
    total = rows * height + (rows - 1) * row_gap
    places = []
    for i, panel in enumerate(panels):
        row, column = divmod(i, columns)
        left, top = column * (width + between), row * (height + row_gap)
        places.append(
            _Place(
                x=(left / inner, min((left + width) / inner, 1.0)),
                y=(max(1 - (top + height) / total, 0.0), 1 - top / total),
                heading="<br>".join(map(plain, headings[i])),
                bar=beside_ticks("<br>".join(map(plain, bars[i]))),
                head_title="Head (index)" if i + columns >= len(panels) else "",
                layer_title="Layer (index, last on top)" if column == 0 else "",
                head_ticks=count_ticks(panel.n_heads, most=max(int(width / 22), 2)),
            )
        )
    return places, _size(inner, total, right=_LAST + more, top=90 + row_gap - _ROWS, below=below)


def _size(inner: int | float, height: int | float, *, right: int, top: int, below: int) -> dict[str, Any]:
    """Size of the whole figure and its margins, in pixels."""
    return {
        "width": _LEFT + inner + right,
        "height": top + height + below,
        "margin": {"l": _LEFT, "r": right, "t": top, "b": below},
    }


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
