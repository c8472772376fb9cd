"""Whether heads follow the reasoning or the wording: originals against their flipped twins."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput
from mechheads.plots.scatter import MOST_POINTS
from mechheads.plots.style import (
    CONTROL_COLOUR,
    INK,
    PALETTE,
    SMALL,
    UNDEFINED_COLOUR,
    fade,
    number,
    percent,
    plural,
    template,
)
from mechheads.plots.verdict_parts import bars, bound_of, chance_colours, colour_bar, ends_told, heading, legend_room
from mechheads.verdicts import Debias

# Up to so many heads all have their bars; of more only the flagged ones, and so many names are written.
_MOST_BARS, _MOST_NAMES = 30, 8
_INNER = 440
_ALONE = "Statement alone: accuracy less chance (proportion)"
_SAME, _PUT_UP = "Equally often right", "Drop put up with"


def debias_plot(
    debias: Debias, *, limit: int | float | None = None, seed: int = 0, title: str | None = None
) -> go.Figure:
    """Draw every head's accuracy on original questions against that on their twins with the label turned.

    A head that follows the reasoning lies on the diagonal; one below it is less often right once the wording no longer
    points to the answer. The dotted line is the drop that is put up with. Flagged heads are diamonds with their name:
    their drop is beyond that line with its whole interval, or the statement alone tells them the answer. With
    statements alone, colours are accuracy there less chance: white is none, as it should be, red and blue mean that
    premises are not needed. Bars are intervals. Hovering shows everything.

    Args:
        debias: What ``debias`` returned.
        limit: Distance from chance at which the colours end; to the farthest head, at least 0.25, if None.
        seed: Seed of the heads drawn where there are more than 5,000 (flagged ones always are).
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: If the limit is out of range, or the value is no result of ``debias``.
    """
    if not isinstance(debias, Debias):
        raise InvalidInput(f"debias is a {type(debias).__name__}; give what debias() returned.")
    frame = debias.frame().assign(excess=lambda f: f["statement_only"] - debias.statement_chance)
    bound = bound_of(frame["excess"].to_numpy(dtype=float), limit)
    shown = _thinned(frame, seed)
    ends = _square(shown)
    figure = go.Figure(_guides(debias, ends))
    for flagged in (False, True):
        rows = shown.loc[shown["flagged"] == flagged]
        if len(rows):
            # The first trace with points carries the colour bar.
            first = not flagged or not (~shown["flagged"]).any()
            barred = flagged or len(shown) <= _MOST_BARS
            figure.add_trace(_points(debias, rows, flagged, bound=bound, bar=first, barred=barred))
    coloured = debias.statement_only is not None
    left, inner, right = 70, _INNER, 110 if coloured else 40
    width = left + inner + right
    traces: Any = figure.data
    names = [t.name for t in traces]
    text, top = heading("Originals against flipped twins" if title is None else title, _lines(debias, shown, frame),
                        width=width, left=left)  # fmt: skip
    below = 58 + legend_room(names, inner)
    axis: dict[str, Any] = {"range": ends, "nticks": 8}
    figure.update_layout(
        template=template(),
        title=text,
        xaxis={**axis, "title": {"text": "Accuracy on originals (proportion right)"}},
        yaxis={**axis, "title": {"text": "Accuracy on flipped twins (proportion right)"}},
        hovermode="closest",
        width=width,
        height=top + inner + below,
        margin={"l": left, "r": right, "t": top, "b": below},
        meta={"description": f"Scatter of accuracy on flipped twins against that on originals. {debias.summary()}"},
    )
    return figure


def _lines(debias: Debias, shown: pd.DataFrame, frame: pd.DataFrame) -> list[str]:
    """The subtitle."""
    n, heads = len(debias.original), len(frame)
    over = plural(n, "pair") + " of twins"
    if debias.statement_only is not None:
        over += f", {plural(len(debias.statement_only), 'statement')} alone"
    flagged = int(frame["flagged"].sum())
    told = f"{flagged} of {plural(heads, 'head')} flagged for exploiting wording"
    if not flagged:
        told = f"No head is flagged for exploiting wording, of {heads} looked at"
    lines = [f"{over}; bars: {percent(debias.level)} bootstrap intervals over groups", told]
    if len(shown) < heads:
        lines.append(f"{len(shown)} of {heads} heads drawn: the flagged ones and a random draw of the others")
    return lines


def _thinned(frame: pd.DataFrame, seed: int) -> pd.DataFrame:
    """The flagged heads and as many of the others as can be drawn."""
    if len(frame) <= MOST_POINTS:
        return frame
    others = np.flatnonzero(~frame["flagged"].to_numpy())
    room = max(MOST_POINTS - int(frame["flagged"].sum()), 0)
    drawn = np.random.default_rng(seed).choice(others, size=min(room, len(others)), replace=False)
    return frame.iloc[np.sort(np.concatenate([np.flatnonzero(frame["flagged"]), drawn]))]


def _square(frame: pd.DataFrame) -> list[float]:
    """One range for both axes, with room for all intervals that are drawn."""
    columns = ["original", "flipped"]
    if len(frame) <= _MOST_BARS:
        columns += ["original_low", "original_high", "flipped_low", "flipped_high"]
    values = frame[columns].to_numpy(dtype=float)
    marked = frame.loc[frame["flagged"], ["original_low", "original_high", "flipped_low", "flipped_high"]].to_numpy()
    values = np.concatenate([values.ravel(), marked.astype(float).ravel()])
    values = values[np.isfinite(values)]
    low, high = (float(values.min()), float(values.max())) if values.size else (0.0, 1.0)
    room = max(0.07 * (high - low), 0.03)
    return [max(low - room, -0.03), min(high + room, 1.03)]


def _guides(debias: Debias, ends: list[float]) -> list[go.Scatter]:
    """The diagonal, and the line of the drop that is put up with."""
    shared: dict[str, Any] = {"mode": "lines", "hoverinfo": "skip", "x": ends}
    lines = [go.Scatter(y=ends, line={"color": INK, "width": 1.2}, name=_SAME, **shared)]
    if debias.tolerance:
        lines.append(
            go.Scatter(
                y=[e - debias.tolerance for e in ends],
                line={"color": CONTROL_COLOUR, "width": 1.2, "dash": "dot"},
                name=f"{_PUT_UP} ({debias.tolerance:g})",
                **shared,
            )
        )
    return lines


def _points(
    debias: Debias, rows: pd.DataFrame, flagged: bool, *, bound: int | float, bar: bool, barred: bool
) -> go.Scatter:
    """The flagged heads, or the others."""
    name = "Flagged: exploits wording" if flagged else "Other heads"
    edge = INK if flagged else fade(INK, 0.55)
    marker: dict[str, Any] = {
        "symbol": "diamond" if flagged else "circle",
        "size": 11 if flagged else 7,
        "color": PALETTE[1] if flagged else UNDEFINED_COLOUR,
        "line": {"width": 1.8 if flagged else 0.7, "color": edge},
    }
    if debias.statement_only is not None:
        colours = chance_colours(0.0, bound, low=-1.0)
        marker |= {"color": rows["excess"].tolist(), "cmin": colours["zmin"], "cmax": colours["zmax"]}
        marker |= {"colorscale": colours["colorscale"], "showscale": bar}
        if bar:
            marker["colorbar"] = colour_bar(_ALONE, _INNER)[0]
    named = flagged and len(rows) <= _MOST_NAMES
    point = go.Scatter(
        x=rows["original"].tolist(),
        y=rows["flipped"].tolist(),
        mode="markers+text" if named else "markers",
        text=[f" {label}" for label in rows["label"]] if named else None,
        textposition=[_side(x) for x in rows["original"]] if named else None,
        textfont={"size": SMALL},
        name=name,
        marker=marker,
        customdata=_hover(debias, rows),
        hovertemplate="%{customdata}<extra></extra>",
        cliponaxis=False,
        meta={"heads": rows["label"].tolist()},
    )
    if barred:
        colour = fade(INK, 0.5 if flagged else 0.3)
        point.update(
            error_x=bars(rows["original"], rows["original_low"], rows["original_high"], colour),
            error_y=bars(rows["flipped"], rows["flipped_low"], rows["flipped_high"], colour),
        )
    return point


def _side(x: int | float) -> str:
    """Names stand below the point, off the bars, and inward where it is far to the right."""
    return "bottom left" if x > 0.8 else "bottom right"


def _hover(debias: Debias, rows: pd.DataFrame) -> list[str]:
    """Ready texts, one per head."""
    level, out = percent(debias.level), []
    for row in rows.to_dict("records"):
        lines = [f"<b>{row['label']}</b>"]
        for name in ("original", "flipped", "difference"):
            told = {"original": "originals", "flipped": "flipped twins", "difference": "drop"}[name]
            lines.append(
                f"{told}: {number(row[name])} ({level} CI {ends_told(row[f'{name}_low'], row[f'{name}_high'])})"
            )
        lines.append(f"{plural(len(debias.original), 'pair')}")
        if math.isfinite(row["statement_only"]) and debias.statement_only is not None:
            lines.append(
                f"statement alone: {number(row['statement_only'])} "
                f"({level} CI {ends_told(row['statement_low'], row['statement_high'])})"
            )
            chance = row["statement_only"] - row["excess"]
            lines.append(
                f"chance there {number(chance)}, corrected p {number(row['p_statement'])}, "
                f"{plural(len(debias.statement_only), 'statement')}"
            )
        lines += [f"flagged: {part}" for part in str(row["reason"]).split("; ") if part]
        out.append("<br>".join(lines))
    return out
