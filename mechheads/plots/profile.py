"""Where in the network the scores lie, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.agreement.rank_rows import ranked, top_share_rows
from mechheads.agreement.resampling import check_maps, is_fixed
from mechheads.errors import InvalidInput
from mechheads.plots.agreement import beside_ticks, line_style, positive_colours, trials_told
from mechheads.plots.describe import describe_profile
from mechheads.plots.style import (
    INK,
    SMALL,
    count_ticks,
    display_name,
    number,
    plain,
    template,
)
from mechheads.scores import HeadScores
from mechheads.stats import check_count

# More lines than this hide each other: from there on a row of cells stands for each method.
_MOST_LINES = 4


def layer_profile(scores: HeadScores | Mapping[str, HeadScores], *, k: int = 20, title: str | None = None) -> go.Figure:
    """Draw how the scores and the top k heads are spread over the layers.

    Left, the positive mass of each layer: the mean over its heads of ``max(score, 0)``, in the unit of the scores for
    one method, and as share of the sum over layers for several, so that units do not matter. Right, the share of the
    top k heads in each layer. Up to four methods are lines, more are rows of cells.

    Args:
        scores: One result, or several by name.
        k: Size of the top sets.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: If shapes differ, no trial is kept, there are no scores, or k is more than the heads with a score.
    """
    maps = {scores.method: scores} if isinstance(scores, HeadScores) else dict(scores)
    maps = check_maps(maps, least=1, why="a layer profile needs")
    frame = profile_frame(maps, k=k)
    single = len(maps) == 1
    first = next(iter(maps.values()))
    if single:
        unit = f" ({plain(first.unit)})" if first.unit else ""
        mass = ("mass", "Mean positive score", f"Mean positive score a head{unit}")
    else:
        mass = ("mass_share", "Positive score mass", "Share of the positive mass (0 to 1)")
    panels = (mass, ("top_share", f"Top {k} heads", f"Share of the top {k} heads (0 to 1)"))
    draw = _profile_lines if len(maps) <= _MOST_LINES else _profile_cells
    figure = go.Figure()
    draw(figure, frame, list(maps), panels)
    name = f"{display_name(first.method)} by layer" if single else "Scores by layer"
    over = trials_told([one.n_kept for one in maps.values() if not is_fixed(one)] or [1])
    figure.update_layout(
        template=template(),
        title={"text": plain(name if title is None else title), "subtitle": {"text": f"mean over {over}"}},
        meta={"description": describe_profile(frame, first.n_layers, k)},
    )
    return figure


def profile_frame(scores: Mapping[str, HeadScores], *, k: int) -> pd.DataFrame:
    """What ``layer_profile`` draws.

    Returns:
        A row per method and layer: ``method layer mass mass_share top top_share``. ``mass`` is the mean over the
        layer's defined heads of ``max(score, 0)``, ``mass_share`` the layer's sum of it over that of all layers (NaN if
        no score is positive), ``top`` the number of top k heads in the layer (heads that tie for the last places count
        in part), ``top_share`` that over k.

    Raises:
        InvalidInput: If k is more than the heads with a score.
    """
    check_count("k", k)
    rows = []
    for name, one in scores.items():
        mean = one.mean()
        defined = np.isfinite(mean)
        if k > defined.sum():
            raise InvalidInput(f"k is {k}, but {name!r} scores only {int(defined.sum())} heads; ask for no more.")
        positive = np.where(defined, np.maximum(mean, 0.0), 0.0).sum(axis=1)
        heads = defined.sum(axis=1)
        total = positive.sum()
        in_top = np.nansum(top_share_rows(ranked(mean.reshape(1, -1)), k)[0].reshape(mean.shape), axis=1)
        for layer in range(one.n_layers):
            top = float(in_top[layer])
            rows.append(
                {
                    "method": name,
                    "layer": layer,
                    "mass": float(positive[layer] / heads[layer]) if heads[layer] else math.nan,
                    "mass_share": float(positive[layer] / total) if total > 0 else math.nan,
                    "top": top,
                    "top_share": top / k,
                }
            )
    return pd.DataFrame(rows)


def _profile_hover(rows: pd.DataFrame, name: str) -> list[str]:
    out = []
    for row in rows.to_dict("records"):
        share = f" ({number(row['mass_share'])} of all layers)" if math.isfinite(row["mass_share"]) else ""
        out.append(
            f"<b>{plain(display_name(name))}, layer {row['layer']}</b><br>mean positive score: {number(row['mass'])}"
            f"{share}<br>top heads: {number(row['top'])} ({number(row['top_share'])} of the set)"
        )
    return out


def _profile_lines(
    figure: go.Figure, frame: pd.DataFrame, names: list[str], panels: tuple[tuple[str, str, str], ...]
) -> None:
    layers = int(frame["layer"].max()) + 1
    for j, (column, _, _) in enumerate(panels, start=1):
        for i, name in enumerate(names):
            rows, style = frame.loc[frame["method"] == name], line_style(i)
            figure.add_trace(
                go.Scatter(
                    x=rows["layer"].tolist(),
                    y=rows[column].tolist(),
                    mode="lines+markers",
                    name=plain(display_name(name)),
                    legendgroup=name,
                    showlegend=j == 1 and len(names) > 1,
                    line={"color": style["colour"], "width": 2, "dash": style["dash"]},
                    marker={"symbol": style["symbol"], "size": 6, "color": style["colour"]},
                    customdata=_profile_hover(rows, name),
                    hovertemplate="%{customdata}<extra></extra>",
                    xaxis=f"x{j}",
                    yaxis=f"y{j}",
                )
            )
    below = 56 + (34 if len(names) > 1 else 0)
    _side_by_side(figure, panels, layers, gap=0.14)
    for j, (_, _, label) in enumerate(panels, start=1):
        figure.update_layout({f"yaxis{j if j > 1 else ''}": {"title": {"text": label}, "rangemode": "tozero"}})
    figure.update_layout(
        width=840, height=290 + below + 90, margin={"l": 66, "r": 20, "t": 92, "b": below}, hovermode="closest"
    )


def _profile_cells(
    figure: go.Figure, frame: pd.DataFrame, names: list[str], panels: tuple[tuple[str, str, str], ...]
) -> None:
    layers = int(frame["layer"].max()) + 1
    labels = [plain(display_name(name)) for name in names]
    hover = [_profile_hover(frame.loc[frame["method"] == name], name) for name in names]
    label = 9 + 7 * max(map(len, labels))
    gap = 0.15
    for j, (column, _, unit) in enumerate(panels, start=1):
        z = [frame.loc[frame["method"] == name, column].tolist() for name in names]
        end = (1 - gap) / 2 if j == 1 else 1.0
        figure.add_trace(
            go.Heatmap(
                z=z,
                y=labels,
                zmin=0,
                colorscale=positive_colours(),
                xaxis=f"x{j}",
                yaxis=f"y{j}",
                xgap=1 if layers <= 40 else 0,
                ygap=1,
                customdata=hover,
                hovertemplate="%{customdata}<extra></extra>",
                name=plain(unit),
                colorbar={
                    "title": {"text": beside_ticks(unit), "side": "right"},
                    "x": end,
                    "xanchor": "left",
                    "xpad": 6,
                    "thickness": 12,
                    "len": 1,
                    "outlinewidth": 0.5,
                    "outlinecolor": INK,
                    "nticks": 6,
                    "tickfont": {"size": SMALL},
                },
            )
        )
    _side_by_side(figure, panels, layers, gap=gap)
    for j in (1, 2):
        figure.update_layout(
            {
                f"yaxis{j if j > 1 else ''}": {
                    "autorange": "reversed",
                    "showgrid": False,
                    "ticks": "",
                    "showticklabels": j == 1,
                },
                f"xaxis{j if j > 1 else ''}": {"showgrid": False},
            }
        )
    figure.update_layout(
        width=label + 780, height=92 + max(26 * len(names), 180) + 56, margin={"l": label, "r": 88, "t": 92, "b": 56}
    )


def _side_by_side(figure: go.Figure, panels: tuple[tuple[str, str, str], ...], layers: int, *, gap: float) -> None:
    """Two panels with the layer as common x, each with a heading."""
    width = (1 - gap) / 2
    for j, (_, heading, _) in enumerate(panels, start=1):
        start = 0.0 if j == 1 else width + gap
        n = "" if j == 1 else str(j)
        figure.update_layout(
            {
                f"xaxis{n}": {
                    "title": {"text": "Layer (index)"},
                    "domain": [start, min(start + width, 1.0)],
                    "range": [-0.5, layers - 0.5],
                    "tickvals": count_ticks(layers),
                    "anchor": f"y{n}",
                    "showgrid": False,
                },
                f"yaxis{n}": {"anchor": f"x{n}"},
            }
        )
        panel_heading(figure, heading, start)


def panel_heading(figure: go.Figure, text: str, x: float) -> None:
    """A bold heading above a panel."""
    figure.add_annotation(
        text=f"<b>{plain(text)}</b>",
        x=x,
        y=1,
        xref="paper",
        yref="paper",
        xanchor="left",
        yanchor="bottom",
        yshift=6,
        showarrow=False,
        font={"size": 14},
    )
