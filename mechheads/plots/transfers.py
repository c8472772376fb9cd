"""What heads chosen on one data set are worth on another."""

from __future__ import annotations

import math
import textwrap
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mechheads.errors import InvalidInput
from mechheads.plots.style import INK, SMALL, number, percent, plain, plural, template
from mechheads.plots.verdict_parts import (
    LETTER,
    OWN,
    bound_of,
    chance_colours,
    colour_bar,
    ends_told,
    estimate_told,
    grey_cells,
    heading,
    ink_on,
)
from mechheads.verdicts import Transfer

# Pixels of a cell, and letters in a line of a data set's name.
_CELL, _HIGH, _NAME = 124, 60, 18


def transfer_matrix(transfer: Transfer, *, limit: int | float | None = None, title: str | None = None) -> go.Figure:
    """Draw the accuracy of heads by the data set they were chosen on (rows) and tested on (columns).

    The last row is the model's own output. White is chance, red above, blue below. Where sets differ in chance the
    colours show accuracy less chance, and the cells accuracy all the same. A cell holds the heads' mean accuracy, its
    interval, and how many of the heads are inverted there: wrong more often than chance. Cells tested on the set that
    heads were chosen on are framed. Hovering adds the paired difference from the model.

    Args:
        transfer: What ``transfer`` returned.
        limit: Distance from chance at which the colours end; to the farthest cell, at least 0.25, if None.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: If the limit is out of range, or the value is no transfer.
    """
    if not isinstance(transfer, Transfer):
        raise InvalidInput(f"transfer is a {type(transfer).__name__}; give what transfer() returned.")
    first = transfer.cells.iloc[: len(transfer.names)]
    chance = first["chance"].to_numpy(dtype=float)
    accuracy = np.vstack([transfer.matrix, transfer.baseline])
    common = bool(np.ptp(chance) < 1e-9)
    z = accuracy if common else accuracy - chance
    bound = bound_of(accuracy - chance, limit)
    colours = (
        chance_colours(float(chance[0]), bound)
        if common
        else chance_colours(0.0, bound, low=-float(chance.max()), high=1 - float(chance.min()))
    )
    what = f"Accuracy (proportion right; white: chance, {chance[0]:.2f})"
    bar, beside = colour_bar(what if common else "Accuracy less chance (proportion right)", _HIGH * len(accuracy))
    cells: dict[str, Any] = {"xgap": 2, "ygap": 2, "hoverongaps": False, "customdata": _hover(transfer)}
    cells["hovertemplate"] = "%{customdata}<extra></extra>"
    figure = go.Figure(
        [
            go.Heatmap(
                z=z,
                name="accuracy",
                colorbar=bar,
                **colours,
                **cells,
            ),
            *grey_cells(z, **cells),
            _frames(transfer),
            _texts(transfer, ink_on(colours, z.ravel())),
        ]
    )
    _lay_out(figure, transfer, beside, "Heads chosen on one data set, tested on another" if title is None else title)
    return figure


def _texts(transfer: Transfer, inks: list[str]) -> go.Scatter:
    """What stands in the cells, row by row, the model's last."""
    rows = transfer.cells.to_dict("records")
    width = len(transfer.names)
    texts = [_cell(row) for row in rows] + [_cell(row, "baseline", "baseline") for row in rows[:width]]
    return go.Scatter(
        x=[i % width for i in range(len(texts))],
        y=[i // width for i in range(len(texts))],
        mode="text",
        text=texts,
        textfont={"size": SMALL, "color": inks},
        name="numbers",
        hoverinfo="skip",
        showlegend=False,
    )


def _cell(row: dict[Any, Any], name: str = "accuracy", lead: str = "ci") -> str:
    if not math.isfinite(row[name]):
        return ""
    low, high = row[f"{lead}_low"], row[f"{lead}_high"]
    lines = [f"<b>{row[name]:.2f}</b>", f"{low:.2f} to {high:.2f}" if math.isfinite(low) else "no interval"]
    if name == "accuracy" and row["inverted"]:
        lines.append(f"\u25bc {row['inverted']} inverted")
    return "<br>".join(lines)


def _hover(transfer: Transfer) -> list[list[str]]:
    """Ready texts of all cells, the model's row last."""
    width, level = len(transfer.names), percent(transfer.level)
    out, last = [], []
    for i, row in enumerate(transfer.cells.to_dict("records")):
        tested, trials = plain(row["tested_on"]), plural(row["n"], "test trial")
        own = f"model's own: {number(row['baseline'])} ({ends_told(row['baseline_low'], row['baseline_high'])})"
        heads = transfer.heads[row["chosen_on"]].labels
        named = [", ".join(heads[j : j + 6]) for j in range(0, min(len(heads), 24), 6)]
        if i % width == 0:
            out.append([])
        out[-1].append(
            "<br>".join(
                [
                    f"<b>chosen on {plain(row['chosen_on'])}, tested on {tested}</b>",
                    f"accuracy: {number(row['accuracy'])}",
                    f"{level} CI: {ends_told(row['ci_low'], row['ci_high'])}",
                    f"{trials}; chance {number(row['chance'])}",
                    own,
                    f"difference: {number(row['difference'])} "
                    f"({ends_told(row['difference_low'], row['difference_high'])})",
                    f"of {plural(transfer.k, 'head')}: {row['right']} right, {row['inverted']} inverted",
                    f"heads: {',<br>'.join(named)}" + (f"<br>and {len(heads) - 24} more" if len(heads) > 24 else ""),
                ]
            )
        )
        if i < width:
            last.append(f"<b>{OWN}, tested on {tested}</b><br>{own}<br>{trials}; chance {number(row['chance'])}")
    return [*out, last]


def _frames(transfer: Transfer) -> go.Scatter:
    """Squares about the cells of sets with themselves, and a stroke above the model's row."""
    x: list[float | None] = []
    y: list[float | None] = []
    for i, row in enumerate(transfer.rows):
        if row in transfer.names:
            j = transfer.names.index(row)
            x += [j + d for d in (-0.48, 0.48, 0.48, -0.48, -0.48)] + [None]
            y += [i + d for d in (-0.47, -0.47, 0.47, 0.47, -0.47)] + [None]
    x += [-0.5, len(transfer.names) - 0.5]
    y += [len(transfer.rows) - 0.5] * 2
    return go.Scatter(
        x=x,
        y=y,
        mode="lines",
        line={"color": INK, "width": 2},
        name="chosen and tested on the same set",
        hoverinfo="skip",
        showlegend=False,
        cliponaxis=False,
    )


def _lay_out(figure: go.Figure, transfer: Transfer, beside: int, title: str) -> None:
    """Axes, title and size."""
    first = transfer.cells.iloc[: len(transfer.names)].to_dict("records")
    columns = [[*map(plain, textwrap.wrap(r["tested_on"], _NAME)), f"n={r['n']}, chance {r['chance']:.2f}"]
               for r in first]  # fmt: skip
    rows = [textwrap.wrap("mix of all" if r == "mix" else r, _NAME) for r in transfer.rows]
    named = [[*map(plain, name), f"n={transfer.trials[r]}"] for r, name in zip(transfer.rows, rows, strict=True)]
    named.append(["<b>Model's</b>", "<b>own output</b>"])
    left = 50 + LETTER * max(len(line) for name in [*rows, ["own output"]] for line in name)
    inner = _CELL * len(columns)
    width = max(left + inner + beside, 600)
    lines = [
        f"{'mean ' if transfer.k > 1 else ''}accuracy of {plural(transfer.k, 'head')} on test trials, with "
        f"{percent(transfer.level)} bootstrap intervals",
        "frame: chosen and tested on the same set; \u25bc: heads wrong more often than chance "
        f"(corrected p\u00a0\u2264\u00a0{transfer.alpha:g})",
    ]
    text, top = heading(title, lines, width=width, left=left)
    below = 34 + 16 * max(map(len, columns))
    figure.update_layout(
        template=template(),
        title=text,
        xaxis={
            "title": {"text": "Tested on (n: test trials)"},
            "tickvals": list(range(len(columns))),
            "ticktext": ["<br>".join(name) for name in columns],
            "range": [-0.5, len(columns) - 0.5],
            "showgrid": False,
            "ticks": "",
        },
        yaxis={
            "title": {"text": "Chosen on (n: calibration trials)"},
            "tickvals": list(range(len(named))),
            "ticktext": ["<br>".join(name) for name in named],
            "range": [len(named) - 0.5, -0.5],
            "showgrid": False,
            "ticks": "",
        },
        width=width,
        height=top + _HIGH * len(named) + below,
        margin={"l": left, "r": width - left - inner, "t": top, "b": below},
        meta={
            "description": (
                f"Matrix of the accuracy of heads by the data set they were chosen on and tested on. {_told(transfer)} "
                f"{transfer.summary()}"
            )
        },
    )


def _told(transfer: Transfer) -> str:
    """How the best cell away from its own set does."""
    away = transfer.cells.loc[(transfer.cells["chosen_on"] != transfer.cells["tested_on"])]
    away = away.loc[away["chosen_on"].isin(transfer.names) & np.isfinite(away["accuracy"])]
    if away.empty:
        return ""
    best = away.loc[(away["accuracy"] - away["chance"]).idxmax()]
    return (
        f"The best transfer is from {best['chosen_on']} to {best['tested_on']}: {estimate_told(best)}, where the model "
        f"itself has {best['baseline']:.2f}."
    )
