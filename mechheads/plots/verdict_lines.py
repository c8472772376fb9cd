"""Chosen heads and their vote against the model's own output, by kind of question."""

from __future__ import annotations

import itertools
import math
import textwrap
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput, UnknownName
from mechheads.plots.agreement import line_style
from mechheads.plots.style import INK, display_name, fade, number, percent, plain, plural, template
from mechheads.plots.verdict_parts import (
    ACCURACY,
    CHANCE,
    LETTER,
    OWN,
    band,
    bars,
    chance_line,
    ends_told,
    estimate_told,
    heading,
    legend_room,
    model_name,
)
from mechheads.verdicts import Evaluation

# So many heads are drawn if none are named; more lines hide each other.
MOST_HEADS = 3
_AXES = {
    "depth": "Depth (reasoning steps)",
    "distractors": "Distractors (number)",
    "rule": "Rule",
}


def verdict_curves(
    evaluation: Evaluation, *, by: str = "depth", scorers: Sequence[str] | str | None = None, title: str | None = None
) -> go.Figure:
    """Draw the accuracy of chosen heads, of their majority and of the model itself by kind of question.

    Where kinds are numbers (depth, distractors) they run to the right: lines with the interval of each point as a bar,
    the model's own as a dashed line with its band. Where they are names (rules) each has a row, the model's own a
    dashed stroke in its band. Dots are chance. Under each kind stands its number of trials; hovering shows intervals,
    the paired difference from the model, and its corrected p-value.

    Args:
        evaluation: What ``evaluate`` returned.
        by: One of ``evaluation.by``.
        scorers: Which of ``evaluation.scorers`` to draw besides the model; the first three heads and the majority if
            None.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If the evaluation is not broken down by that, or has no such scorer.
        InvalidInput: If no scorer is left, or the value is no evaluation.
    """
    if not isinstance(evaluation, Evaluation):
        raise InvalidInput(f"evaluation is a {type(evaluation).__name__}; give what evaluate() returned.")
    if by not in evaluation.by:
        raise UnknownName("column that the evaluation is broken down by", by, evaluation.by)
    drawn = _drawn(evaluation, scorers)
    frame = evaluation.frame()
    frame = frame.loc[frame["by"] == by]
    own = frame.loc[frame["scorer"] == "model"].reset_index(drop=True)
    values = own["value"].tolist()
    numeric = all(isinstance(v, (int, float, np.number)) and not isinstance(v, bool) for v in values)
    name = model_name(evaluation.scores)
    what = display_name(by).lower()
    whole = f"Heads against the model, by {what}{f', {name}' if name else ''}"
    lines = [_subtitle(evaluation)]
    left_out = len(evaluation.heads) - sum(s in evaluation.heads.labels for s in drawn)
    if left_out:
        lines.append(f"{left_out} of {plural(len(evaluation.heads), 'head')} not drawn")
    draw = _lines if numeric else _rows
    figure = draw(evaluation, frame, own, by, drawn, (whole if title is None else title, lines))
    description = f"Accuracy by {what}, with {percent(evaluation.level)} intervals. {_told(frame, own, drawn, what)}"
    figure.update_layout(template=template(), hovermode="closest", meta={"description": description})
    return figure


def _drawn(evaluation: Evaluation, scorers: Sequence[str] | str | None) -> list[str]:
    """The scorers to draw, the model left aside."""
    if scorers is None:
        heads = evaluation.heads.labels[:MOST_HEADS]
        return heads + [s for s in evaluation.scorers if s == "majority"]
    wanted = [scorers] if isinstance(scorers, str) else list(dict.fromkeys(scorers))
    for one in wanted:
        if one not in evaluation.scorers:
            raise UnknownName("scorer of the evaluation", one, evaluation.scorers)
    wanted = [one for one in wanted if one != "model"]
    if not wanted:
        others = ", ".join(s for s in evaluation.scorers if s != "model")
        raise InvalidInput(f"no scorer is left to draw beside the model; give some of {others}, or None.")
    return wanted


def _subtitle(evaluation: Evaluation) -> str:
    n = len(evaluation.scores)
    groups = len(set(evaluation.scores.groups))
    over = plural(n, "trial") + ("" if groups == n else f" in {plural(groups, 'group')}")
    return f"{over}; bars and band: {percent(evaluation.level)} bootstrap intervals"


def _label(evaluation: Evaluation, scorer: str) -> str:
    """A scorer as the legend names it."""
    if scorer == "majority":
        return f"Majority of {len(evaluation.heads)} heads"
    return f"{scorer} (inverse, sign turned)" if scorer in evaluation.inverse.labels else scorer


def _hover(evaluation: Evaluation, rows: pd.DataFrame, by: str, label: str) -> list[str]:
    """Ready texts, one per kind of question."""
    out = []
    for row in rows.to_dict("records"):
        groups = "" if row["n_groups"] == row["n"] else f" in {plural(row['n_groups'], 'group')}"
        lines = [
            f"<b>{plain(label)}</b>",
            f"{plain(display_name(by))}: {plain(row['value'])}",
            f"accuracy: {number(row['accuracy'])}",
            f"{percent(evaluation.level)} CI: {ends_told(row['ci_low'], row['ci_high'])}",
            f"{plural(row['n'], 'trial')}{groups}; chance {number(row['chance'])}",
        ]
        if row["scorer"] != "model":
            ends = ends_told(row["difference_low"], row["difference_high"])
            lines.append(f"model's own: {number(row['baseline'])}, difference {number(row['difference'])} ({ends})")
            lines.append(f"corrected p of the difference: {number(row['p_holm'])}")
        out.append("<br>".join(lines))
    return out


def _told(frame: pd.DataFrame, own: pd.DataFrame, drawn: list[str], what: str) -> str:
    """The numbers in words: first scorer, majority and model."""
    shown = list(dict.fromkeys([drawn[0], *(s for s in drawn if s == "majority")]))
    parts = []
    for base in own.to_dict("records"):
        here = frame.loc[[v == base["value"] for v in frame["value"]]].set_index("scorer")
        told = [f"{s} {estimate_told(here.loc[s])}" for s in shown]
        parts.append(
            f"{what.capitalize()} {base['value']} ({plural(base['n'], 'trial')}): {', '.join(told)}, model "
            f"{estimate_told(base)}, chance {base['chance']:.2f}."
        )
    return " ".join(parts)


def _lines(
    evaluation: Evaluation,
    frame: pd.DataFrame,
    own: pd.DataFrame,
    by: str,
    drawn: list[str],
    words: tuple[str, list[str]],
) -> go.Figure:
    """Kinds that are numbers."""
    x = own["value"].astype(float).tolist()
    step = min((b - a for a, b in itertools.pairwise(x)), default=1.0)
    figure = go.Figure(band(x, own["ci_low"].tolist(), own["ci_high"].tolist(), INK, OWN))
    ends = [x[0] - 0.4 * step, *x, x[-1] + 0.4 * step]
    chance = own["chance"].tolist()
    figure.add_trace(
        chance_line(
            ends, [chance[0], *chance, chance[-1]], legendrank=1002, hovertemplate="chance: %{y:.3g}<extra></extra>"
        )
    )
    figure.add_trace(
        go.Scatter(
            x=x,
            y=own["accuracy"].tolist(),
            mode="lines+markers",
            line={"color": INK, "width": 2, "dash": "dash"},
            marker={"symbol": "line-ew-open", "size": 10, "line": {"width": 2}},
            error_y=bars(own["accuracy"], own["ci_low"], own["ci_high"], fade(INK, 0.45)),
            name=OWN,
            legendrank=1001,
            customdata=_hover(evaluation, own, by, OWN),
            hovertemplate="%{customdata}<extra></extra>",
            cliponaxis=False,
        )
    )
    for i, scorer in enumerate(drawn):
        rows = frame.loc[frame["scorer"] == scorer]
        style, label = line_style(i), _label(evaluation, scorer)
        # Side by side, so that bars of equal kinds do not hide each other.
        away = (i - (len(drawn) - 1) / 2) * min(0.06, 0.4 / len(drawn)) * step
        figure.add_trace(
            go.Scatter(
                x=[v + away for v in x],
                y=rows["accuracy"].tolist(),
                mode="lines+markers",
                name=plain(label),
                line={"color": style["colour"], "width": 2, "dash": style["dash"]},
                marker={"symbol": style["symbol"], "size": 7, "color": style["colour"]},
                error_y=bars(rows["accuracy"], rows["ci_low"], rows["ci_high"], style["colour"]),
                customdata=_hover(evaluation, rows, by, label),
                hovertemplate="%{customdata}<extra></extra>",
                cliponaxis=False,
                meta={"scorer": scorer},
            )
        )
    left, right, inner = 66, 20, max(580, 64 * len(x))
    width = left + inner + right
    text, top = heading(*words, width=width, left=left)
    below = 72 + legend_room([_label(evaluation, s) for s in drawn] + [OWN, CHANCE], inner)
    figure.update_layout(
        title=text,
        xaxis={
            "title": {"text": f"{plain(_AXES.get(by, display_name(by)))}; n: number of trials"},
            "tickvals": x,
            "ticktext": [f"{v:g}<br>n={n}" for v, n in zip(x, own["n"], strict=True)],
            "range": [ends[0], ends[-1]],
            "showgrid": False,
        },
        yaxis={"title": {"text": ACCURACY}, "range": [-0.03, 1.03], "dtick": 0.2},
        width=width,
        height=top + 320 + below,
        margin={"l": left, "r": right, "t": top, "b": below},
    )
    return figure


def _rows(
    evaluation: Evaluation,
    frame: pd.DataFrame,
    own: pd.DataFrame,
    by: str,
    drawn: list[str],
    words: tuple[str, list[str]],
) -> go.Figure:
    """Kinds that are names, a row each."""
    places = np.arange(len(own), dtype=float)
    figure = go.Figure(_own_in_rows(evaluation, own, by, places))
    for i, scorer in enumerate(drawn):
        rows = frame.loc[frame["scorer"] == scorer]
        style, label = line_style(i), _label(evaluation, scorer)
        away = (i - (len(drawn) - 1) / 2) * 0.7 / len(drawn)
        figure.add_trace(
            go.Scatter(
                x=rows["accuracy"].tolist(),
                y=(places + away).tolist(),
                mode="markers",
                name=plain(label),
                marker={"symbol": style["symbol"], "size": 8, "color": style["colour"]},
                error_x=bars(rows["accuracy"], rows["ci_low"], rows["ci_high"], style["colour"]),
                customdata=_hover(evaluation, rows, by, label),
                hovertemplate="%{customdata}<extra></extra>",
                cliponaxis=False,
                meta={"scorer": scorer},
            )
        )
    names = [textwrap.wrap(_kind(v), 30) or [""] for v in own["value"]]
    told = [f"n={n}" for n in own["n"]]
    left = 24 + LETTER * max(max(map(len, name)) + 2 + len(n) for name, n in zip(names, told, strict=True))
    labels = [f"{'<br>'.join(map(plain, name))}  {n}" for name, n in zip(names, told, strict=True)]
    right, inner = 20, 480
    width = left + inner + right
    text, top = heading(*words, width=width, left=left)
    below = 58 + legend_room([_label(evaluation, s) for s in drawn] + [OWN, CHANCE], inner)
    figure.update_layout(
        title=text,
        xaxis={"title": {"text": ACCURACY}, "range": [-0.03, 1.03], "dtick": 0.2},
        yaxis={
            "range": [len(places) - 0.5, -0.5],
            "tickvals": places.tolist(),
            "ticktext": labels,
            "ticks": "",
            "showgrid": False,
        },
        width=width,
        height=top + max((20 + 12 * len(drawn)) * len(places), 60) + below,
        margin={"l": left, "r": right, "t": top, "b": below},
    )
    return figure


def _kind(value: Any) -> str:
    """A kind of question as its row names it."""
    text = str(value).replace("_", " ")
    return text[:1].upper() + text[1:]


def _own_in_rows(evaluation: Evaluation, own: pd.DataFrame, by: str, places: np.ndarray) -> list[go.Scatter]:
    """The model's interval as a block in each row, its accuracy as a dashed stroke, chance as a dotted one."""
    blocks: list[list[float | None]] = [[], []]
    strokes: list[list[Any]] = [[], [], []]
    chance: list[list[float | None]] = [[], []]
    hover = _hover(evaluation, own, by, OWN)
    for place, row, text in zip(places.tolist(), own.to_dict("records"), hover, strict=True):
        low, high = row["ci_low"], row["ci_high"]
        if math.isfinite(low) and math.isfinite(high):
            blocks[0] += [low, high, high, low, low, None]
            blocks[1] += [place - 0.42, place - 0.42, place + 0.42, place + 0.42, place - 0.42, None]
        ys = [place - 0.42, place, place + 0.42, None]
        strokes[0] += [row["accuracy"]] * 3 + [None]
        strokes[1] += ys
        strokes[2] += [text] * 3 + [""]
        chance[0] += [row["chance"], row["chance"], None]
        chance[1] += [place - 0.5, place + 0.5, None]
    block = go.Scatter(
        x=blocks[0][:-1],
        y=blocks[1][:-1],
        mode="lines",
        line={"width": 0},
        fill="toself",
        fillcolor=fade(INK, 0.13),
        hoverinfo="skip",
        showlegend=False,
        name=f"{OWN}, interval",
    )
    stroke = go.Scatter(
        x=strokes[0][:-1],
        y=strokes[1][:-1],
        mode="lines",
        line={"color": INK, "width": 2, "dash": "dash"},
        customdata=strokes[2][:-1],
        hovertemplate="%{customdata}<extra></extra>",
        name=OWN,
        legendrank=1001,
        cliponaxis=False,
    )
    dots = chance_line(chance[0][:-1], chance[1][:-1], legendrank=1002, hovertemplate="chance: %{x:.3g}<extra></extra>")
    return [*([block] if blocks[0] else []), dots, stroke]
