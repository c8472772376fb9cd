"""How far detectors agree: a matrix of all pairs, and shared top heads against k."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.agreement import Agreement, agreement
from mechheads.agreement.resampling import check_maps
from mechheads.errors import UnknownName
from mechheads.plots.describe import describe_agreement, describe_overlap
from mechheads.plots.style import (
    CONTROL_COLOUR,
    DASHES,
    DIVERGING,
    INK,
    PALETTE,
    SMALL,
    SYMBOLS,
    display_name,
    fade,
    number,
    percent,
    plain,
    plural,
    template,
)
from mechheads.scores import HeadScores

# Up to so many lines their intervals are drawn as bands; more bands would hide each other.
_MOST_BANDS = 3
_KS = (2, 3, 5, 8, 10, 15, 20, 30, 50, 75, 100, 150, 200, 300, 500, 750, 1000)
_NAMES = {
    "spearman": ("Spearman's rank correlation", "Spearman's rho (\u22121 to 1)"),
    "kendall": ("Kendall's rank correlation", "Kendall's tau-b (\u22121 to 1)"),
    "overlap": ("Shared heads among the top {k}", "Shared heads (number, of {k})"),
    "jaccard": ("Shared heads among the top {k}, as Jaccard index", "Jaccard index (0 to 1)"),
}


def positive_colours() -> list[list[float | str]]:
    """White to red: the upper half of the diverging colours, for values that are never negative."""
    return [[2 * float(at) - 1, colour] for at, colour in DIVERGING if float(at) >= 0.5]


def agreement_matrix(
    result: Agreement, value: str = "spearman", *, k: int | None = None, title: str | None = None
) -> go.Figure:
    """Draw one statistic of every pair of methods as an annotated square.

    Correlations run from -1 (blue) over 0 (white) to 1 (red); shared heads from none (white) to all (red). Hovering
    shows the interval, what chance gives, how many heads and trials stand behind it, and why a cell is empty.

    Args:
        result: What ``agreement`` returned.
        value: ``"spearman"``, ``"kendall"``, ``"overlap"`` or ``"jaccard"``.
        k: Size of the top sets, for the last two; may be left out if there is one only.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If there is no such statistic.
        InvalidInput: If k was not computed, or must be said.
    """
    rows = result.rows(value, k)
    size = int(rows["k"].iloc[0])
    names = [plain(display_name(name)) for name in result.names]
    z = result.matrix(value, k).to_numpy(dtype=float, copy=True)
    np.fill_diagonal(z, np.nan)
    correlation = value in ("spearman", "kendall")
    top = float(size) if value == "overlap" else 1.0
    heading, unit = (text.format(k=size) for text in _NAMES[value])
    shape = {"x": names, "y": names, "xgap": 1, "ygap": 1, "hoverongaps": False}
    figure = go.Figure(
        go.Heatmap(
            z=z,
            zmin=-1 if correlation else 0,
            zmax=top,
            colorscale=DIVERGING if correlation else positive_colours(),
            text=[[_cell(v, value) for v in row] for row in z],
            texttemplate="%{text}",
            textfont={"size": SMALL},
            customdata=_pair_hover(result, rows),
            hovertemplate="%{customdata}<extra></extra>",
            colorbar=upright_bar(unit),
            name=plain(value),
            **shape,
        )
    )
    undefined = ~np.isfinite(z)
    figure.add_trace(
        go.Heatmap(
            z=np.where(undefined, 0.0, np.nan),
            zmin=0,
            zmax=1,
            showscale=False,
            colorscale=[[0, "#F2F2F2"], [1, "#F2F2F2"]],
            name="no value",
            customdata=_pair_hover(result, rows),
            hovertemplate="%{customdata}<extra></extra>",
            **shape,
        )
    )
    side, label = 50 * len(names), 9 + max(7 * max(map(len, names)), 60)
    resampled = {name for group in result.groups for name in group} or set(result.names)
    over = trials_told(result.n_trials[name] for name in resampled)
    figure.update_layout(
        template=template(),
        title={
            "text": plain(heading if title is None else title),
            "subtitle": {"text": f"{math.prod(result.shape)} heads, scores over {over}; grey: no value"},
        },
        xaxis={"tickangle": -40, "showgrid": False, "ticks": "", "constrain": "domain"},
        yaxis={"autorange": "reversed", "showgrid": False, "ticks": ""},
        width=max(side + label + 110, 420),
        height=max(side, 100) + 66 + int(0.7 * label) + 16,
        margin={"l": label, "r": 110, "t": 66, "b": int(0.7 * label) + 16},
        meta={"description": describe_agreement(result, value, k)},
    )
    return figure


def upright_bar(title: str, *, x: float = 1) -> dict[str, Any]:
    """A colour bar to the right of a plot, from its left edge, with a title of plain text or of safe markup."""
    return {
        "title": {"text": beside_ticks(title), "side": "right"},
        "x": x,
        "xanchor": "left",
        "xpad": 8,
        "thickness": 14,
        "len": 1,
        "outlinewidth": 0.5,
        "outlinecolor": INK,
        "ticks": "outside",
        "ticklen": 4,
        "nticks": 7,
        "tickfont": {"size": SMALL},
    }


def beside_ticks(title: str) -> str:
    """Title of a colour bar, one line further out: plotly may place it before it knows how wide the ticks are."""
    return f"<br>{title}"


def trials_told(counts: Iterable[int]) -> str:
    """``"18 trials"``, ``"18 to 20 trials"``."""
    known = sorted(set(counts))
    return plural(known[0], "trial") if len(known) == 1 else f"{known[0]} to {known[-1]} trials"


def _cell(value: float, statistic: str) -> str:
    """What stands in a cell: two digits after the point, a count without those it does not need."""
    if not math.isfinite(value):
        return ""
    text = f"{value:.3g}" if statistic == "overlap" else f"{value:.2f}"
    return text.replace("-", "\u2212")


def _pair_hover(result: Agreement, rows: pd.DataFrame) -> list[list[str]]:
    """Ready texts ``[method][method]``."""
    names = list(result.names)
    texts = [[f"<b>{plain(display_name(a))}</b><br>with itself" if a == b else "" for b in names] for a in names]
    for row in rows.to_dict("records"):
        lines = [f"<b>{plain(display_name(row['a']))} and {plain(display_name(row['b']))}</b>"]
        of = f" of the top {row['k']}" if row["k"] else ""
        lines.append(f"{plain(row['statistic'])}{of}: {number(row['value'])}")
        if math.isfinite(row["ci_low"]):
            lines.append(f"{percent(result.level)} CI: {number(row['ci_low'])} to {number(row['ci_high'])}")
        lines.append(f"by chance: {number(row['expected'])}")
        lines.append(f"{plural(row['n_heads'], 'head')}, {plural(row['n_trials_shared'], 'common trial')}")
        lines += [plain(reason) for reason in row["reason"].split("; ") if reason]
        i, j = names.index(row["a"]), names.index(row["b"])
        texts[i][j] = texts[j][i] = "<br>".join(lines)
    return texts


def overlap_curves(
    scores: Mapping[str, HeadScores],
    reference: str | None = None,
    ks: Sequence[int] | None = None,
    *,
    level: float = 0.95,
    n_boot: int = 500,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw the share of the top k heads that each method has in common with a reference, against k.

    The grey dashes are chance, ``k / n_heads``. With up to three other methods the intervals are drawn as bands; with
    more they stand in the hover text alone.

    Args:
        scores: Name to scores, at least two.
        reference: The method to compare with; the first if None.
        ks: Sizes of the top sets; about a dozen, up to half of the heads, if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the draws.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If the reference is not among the scores.
        InvalidInput: As ``agreement``.
    """
    maps = check_maps(scores, why="overlap needs")
    reference = next(iter(maps)) if reference is None else reference
    if reference not in maps:
        raise UnknownName("method of the overlap curves", reference, maps)
    if ks is None:
        least = min(int(np.isfinite(one.mean()).sum()) for one in maps.values())
        ks = [k for k in _KS if k <= least // 2] or [1]
    result = agreement(maps, k=ks, level=level, n_boot=n_boot, seed=seed, statistics=("overlap",), reference=reference)
    figure = go.Figure()
    others = [name for name in maps if name != reference]
    for i, name in enumerate(others):
        rows = result.frame.loc[result.frame["b"] == name].sort_values("k")
        figure.add_traces(_overlap_line(rows, name, i, level, band=len(others) <= _MOST_BANDS))
    chance = result.frame.drop_duplicates("k").sort_values("k")
    figure.add_trace(
        go.Scatter(
            x=chance["k"].tolist(),
            y=(chance["expected"] / chance["k"]).tolist(),
            mode="lines",
            line={"color": CONTROL_COLOUR, "dash": "dash", "width": 1.5},
            name="Chance",
            hovertemplate="chance, k = %{x}: %{y:.3f}<extra></extra>",
        )
    )
    named = display_name(reference)
    bands = f"bands: {percent(level)} bootstrap intervals" if len(others) <= _MOST_BANDS else "intervals: on hovering"
    ticks = [k for k in result.ks if k in (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)] or list(result.ks)
    figure.update_layout(
        template=template(),
        title={
            "text": plain(f"Top heads shared with {named}" if title is None else title),
            "subtitle": {"text": f"{math.prod(result.shape)} heads; {bands}"},
        },
        xaxis={
            "type": "log",
            "title": {"text": "Size of the top set (number of heads, k; log scale)"},
            "tickvals": ticks,
            "ticktext": [str(k) for k in ticks],
            "showgrid": False,
        },
        yaxis={"title": {"text": f"Shared with {plain(named)} (share of the k heads)"}, "range": [-0.03, 1.03]},
        legend=side_legend(),
        hovermode="closest",
        width=720,
        height=max(420, 66 + 56 + 30 * (len(others) + 1)),
        margin={"l": 66, "r": 180, "t": 66, "b": 56},
        meta={"description": describe_overlap(result, reference)},
    )
    return figure


def side_legend() -> dict[str, Any]:
    """A legend in a column to the right of the plot, for more lines than fit below it."""
    return {"orientation": "v", "x": 1.02, "xanchor": "left", "y": 1, "yref": "paper", "yanchor": "top"}


def line_style(i: int) -> dict[str, Any]:
    """Colour, dash and symbol of the i-th line: told apart in grey print too."""
    return {
        "colour": PALETTE[i % len(PALETTE)],
        "dash": DASHES[i // len(PALETTE) % len(DASHES)],
        "symbol": SYMBOLS[i % len(SYMBOLS)] + ("" if i < len(PALETTE) else "-open"),
    }


def _overlap_line(rows: pd.DataFrame, name: str, i: int, level: float, *, band: bool) -> list[go.Scatter]:
    """Line of one method, and its band."""
    style, label = line_style(i), plain(display_name(name))
    k = rows["k"].to_numpy(dtype=float)
    share, low, high = (rows[c].to_numpy(dtype=float) / k for c in ("value", "ci_low", "ci_high"))
    traces = []
    if band and np.isfinite(low).all():
        traces.append(
            go.Scatter(
                x=[*k, *k[::-1]],
                y=[*high, *low[::-1]],
                mode="lines",
                line={"width": 0},
                fill="toself",
                fillcolor=fade(style["colour"], 0.16),
                hoverinfo="skip",
                showlegend=False,
                name=f"{label}, interval",
                legendgroup=label,
            )
        )
    hover = [
        [
            f"{number(row['value'])} of {row['k']} shared, {number(row['expected'])} by chance",
            f"{percent(level)} CI: {number(row['ci_low'])} to {number(row['ci_high'])}"
            if math.isfinite(row["ci_low"])
            else "no interval",
            "<br>".join(plain(reason) for reason in row["reason"].split("; ")),
        ]
        for row in rows.to_dict("records")
    ]
    line = go.Scatter(
        x=k,
        y=share,
        mode="lines+markers",
        name=label,
        legendgroup=label,
        line={"color": style["colour"], "width": 2, "dash": style["dash"]},
        marker={"symbol": style["symbol"], "size": 7, "color": style["colour"]},
        customdata=hover,
        hovertemplate=f"<b>{label}</b><br>%{{customdata[0]}}<br>%{{customdata[1]}}<br>%{{customdata[2]}}<extra></extra>",
        cliponaxis=False,
    )
    return [*traces, line]
