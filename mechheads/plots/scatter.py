"""Two methods head by head."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.agreement import agreement
from mechheads.agreement.rank_rows import clear_top
from mechheads.errors import InvalidInput
from mechheads.heads import Head
from mechheads.plots.describe import describe_pair
from mechheads.plots.style import (
    PALETTE,
    UNDEFINED_COLOUR,
    display_name,
    number,
    percent,
    plain,
    template,
)
from mechheads.scores import HeadScores

# Above this many points a browser draws an SVG scatter slowly.
MOST_POINTS = 5000


def method_scatter(
    a: HeadScores,
    b: HeadScores,
    *,
    names: tuple[str, str] | None = None,
    k: int = 10,
    level: float = 0.95,
    n_boot: int = 1000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw every head's score under two methods, the top k of each picked out.

    Hovering names the head, both scores and both ranks. Heads that tie for the last places of a top set are not picked
    out. Above 5,000 heads the top heads are drawn in full and the
    others as a random draw, which the figure says.

    Args:
        a: Scores to the right.
        b: Scores upward.
        names: Names for both; their methods if None, numbered where these are equal.
        k: Size of the top sets.
        level: Confidence level of the correlation in the subtitle.
        n_boot: Number of bootstrap samples for it.
        seed: Seed of the bootstrap, and of the heads drawn.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: As ``agreement``.
    """
    if names is None:
        names = (a.method, b.method) if a.method != b.method else (f"{a.method} 1", f"{b.method} 2")
    if names[0] == names[1]:
        raise InvalidInput(f"both maps are named {names[0]!r}; give them different names.")
    maps = dict(zip(names, (a, b), strict=True))
    result = agreement(maps, k=k, level=level, n_boot=n_boot, seed=seed, statistics=("spearman", "overlap"))
    frame = _scatter_frame(a, b, k)
    shown, left_out = _thinned(frame, seed)
    labels = [display_name(name) for name in names]
    kinds = (
        ("", "Other heads", UNDEFINED_COLOUR, "circle", 6),
        ("a", f"Top {k} of {labels[0]}", PALETTE[0], "square", 9),
        ("b", f"Top {k} of {labels[1]}", PALETTE[1], "diamond", 10),
        ("ab", f"Top {k} of both", PALETTE[2], "circle", 10),
    )
    figure = go.Figure()
    units = [f" ({plain(one.unit)})" if one.unit else "" for one in (a, b)]
    for kind, label, colour, symbol, size in kinds:
        rows = shown.loc[shown["kind"] == kind]
        figure.add_trace(
            go.Scatter(
                x=rows["a"].tolist(),
                y=rows["b"].tolist(),
                mode="markers",
                name=plain(label),
                marker={
                    "color": colour,
                    "symbol": symbol,
                    "size": size,
                    "opacity": 0.7 if kind == "" else 1.0,
                    "line": {"width": 0.5, "color": "white"},
                },
                customdata=_scatter_hover(rows, labels, (a.unit, b.unit)),
                hovertemplate="%{customdata}<extra></extra>",
                showlegend=not rows.empty,
                cliponaxis=False,
            )
        )
    rho, shared = result.pair(*names), result.pair(*names, "overlap", k)
    told = f"Spearman {number(rho['value'], 2)}"
    if math.isfinite(rho["ci_low"]):
        told += f" ({percent(level)} CI {number(rho['ci_low'], 2)} to {number(rho['ci_high'], 2)})"
    told += f"; {number(shared['value'])} of the top {k} shared, {number(shared['expected'], 2)} by chance"
    if left_out:
        told += f"<br>{len(shown)} of {len(frame)} heads drawn: the top ones and a random draw of the others"
    figure.update_layout(
        template=template(),
        title={
            "text": plain(f"{labels[0]} and {labels[1]}" if title is None else title),
            "subtitle": {"text": told},
        },
        xaxis={"title": {"text": f"{plain(labels[0])} score{units[0]}"}, "zeroline": True, "zerolinecolor": "#C8C8C8"},
        yaxis={"title": {"text": f"{plain(labels[1])} score{units[1]}"}, "zeroline": True, "zerolinecolor": "#C8C8C8"},
        hovermode="closest",
        width=620,
        height=540,
        margin={"l": 70, "r": 20, "t": 90 if left_out else 70, "b": 92},
        meta={"description": describe_pair(result, names, k, drawn=len(shown), total=len(frame))},
    )
    return figure


def _scatter_frame(a: HeadScores, b: HeadScores, k: int) -> pd.DataFrame:
    """Heads that both define, with scores, ranks, and whose top k each is in."""
    both = np.isfinite(a.mean()) & np.isfinite(b.mean())
    tops = [clear_top(np.where(both, one.mean(), np.nan).ravel(), k) for one in (a, b)]
    columns = zip(*(x.ravel() for x in (a.mean(), b.mean(), a.rank(), b.rank())), strict=True)
    rows = []
    for i, (x, y, rank_x, rank_y) in enumerate(columns):
        if math.isfinite(x) and math.isfinite(y):
            place = divmod(i, a.n_heads)
            kind = ("a" if tops[0][i] else "") + ("b" if tops[1][i] else "")
            rows.append((str(Head(*place)), x, y, int(rank_x), int(rank_y), kind))
    return pd.DataFrame(rows, columns=["label", "a", "b", "rank_a", "rank_b", "kind"])


def _thinned(frame: pd.DataFrame, seed: int) -> tuple[pd.DataFrame, int]:
    """The top heads and as many of the others as can be drawn, and how many are left out."""
    if len(frame) <= MOST_POINTS:
        return frame, 0
    others = np.flatnonzero((frame["kind"] == "").to_numpy())
    room = max(MOST_POINTS - (len(frame) - len(others)), 0)
    drawn = np.random.default_rng(seed).choice(others, size=min(room, len(others)), replace=False)
    keep = np.sort(np.concatenate([np.flatnonzero((frame["kind"] != "").to_numpy()), drawn]))
    return frame.iloc[keep], len(frame) - len(keep)


def _scatter_hover(rows: pd.DataFrame, labels: list[str], units: tuple[str, str]) -> list[str]:
    """Ready texts: head, and score and rank under both."""
    out = []
    for row in rows.to_dict("records"):
        lines = [f"<b>{row['label']}</b>"]
        for side, label, unit in zip("ab", labels, units, strict=True):
            lines.append(
                f"{plain(label)}: {number(row[side])} {plain(unit)}".rstrip() + f", rank {row[f'rank_{side}']}"
            )
        out.append("<br>".join(lines))
    return out
