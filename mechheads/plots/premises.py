"""Whether verdicts move as the premises they rest on are taken away."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput, UnknownName
from mechheads.plots.style import (
    CONTROL_COLOUR,
    DASHES,
    INK,
    PALETTE,
    SYMBOLS,
    count_ticks,
    number,
    percent,
    plain,
    plural,
    template,
)
from mechheads.plots.verdict_parts import bars, ends_told, heading, legend_room
from mechheads.premise_result import ALL, ARMS, CUMULATIVE, MEASURES, ORDERS, PremiseAblation

_ARMS = {
    "gold": "Premises of the proof",
    "best heads": "Premises the best heads attend to",
    "model": "Premises the model depends on",
    "random": "Random, outside the proof",
    "random any": "Random, any",
}
_MEASURES = {
    "flipped": ("Verdicts that move as premises are removed", "Verdicts moved (proportion of questions)"),
    "drop": ("Loss of the first verdict as premises are removed", "Fall of the first verdict's log-odds (nats)"),
    "change": ("Gain of the right answer as premises are removed", "Change of the right answer's log-odds (nats)"),
}


def premise_curves(
    result: PremiseAblation,
    *,
    measure: str = "flipped",
    order: str = CUMULATIVE,
    arms: Sequence[str] | str | None = None,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw how many verdicts move as ever more premises are removed, one line per kind of premise.

    The reference is the model's first verdict, on the whole prompt: no premise removed, none moved. A verdict that
    rests on evidence moves without the premises of its proof and stays without others; random premises are grey and
    dashed. Questions with fewer premises drop out at higher numbers, so the number of questions stands under each.
    Bars are bootstrap intervals over groups of questions. Hovering shows value, interval and number of questions.

    Args:
        result: What ``run_premises`` returned.
        measure: ``"flipped"`` (share of verdicts), ``"drop"`` or ``"change"`` (log-odds in nats), as in ``by_arm``.
        order: ``"cumulative"``, or ``"one at a time"``: the n-th removal alone, all others being there.
        arms: Kinds of premises to draw, in that order; all if None.
        level: Confidence level.
        n_boot: Bootstrap samples.
        seed: Seed of the draws.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If there is no such measure, order or arm.
        InvalidInput: If no arm is left, nothing was removed in this order, or the value is no premise ablation.
    """
    if not isinstance(result, PremiseAblation):
        raise InvalidInput(f"result is a {type(result).__name__}; give what run_premises() returned.")
    for kind, name, known in (("measure", measure, list(MEASURES)), ("order", order, list(ORDERS))):
        if name not in known:
            raise UnknownName(f"{kind} of the premise ablation", name, known)
    wanted = _wanted(result, arms)
    cells = result.by_arm(order, level=level, n_boot=n_boot, seed=seed)
    rounds = cells if cells.empty else cells.loc[cells["arm"].isin(wanted) & (cells["round"] != ALL)]
    if rounds.empty:
        raise InvalidInput(f"no premise was removed {order!r} in the arms {', '.join(wanted)}; there is no curve.")
    figure = go.Figure()
    for i, arm in enumerate(wanted):
        rows = rounds.loc[rounds["arm"] == arm]
        if len(rows):
            figure.add_trace(_line(rows, arm, measure, (i - (len(wanted) - 1) / 2) * 0.05, level))
    _lay_out(figure, result, rounds, measure, order, (title, level))
    description = (
        f"Curves of {_MEASURES[measure][1].lower()} against the number of premises removed, by kind of premise. "
        f"{_told(rounds, wanted, measure)} {result.summary()}"
    )
    figure.update_layout(meta={"description": description})
    return figure


def _wanted(result: PremiseAblation, arms: Sequence[str] | str | None) -> list[str]:
    """The arms to draw, checked."""
    if arms is None:
        return [arm for arm in ARMS if arm in result.arms]
    wanted = [arms] if isinstance(arms, str) else list(dict.fromkeys(arms))
    if not wanted:
        raise InvalidInput(f"no arm is left to draw; give some of {', '.join(result.arms)}, or None for all.")
    for arm in wanted:
        if arm not in result.arms:
            raise UnknownName("arm of the premise ablation", arm, result.arms)
    return wanted


def _style(arm: str) -> dict[str, Any]:
    """Colour, dash and symbol of an arm, the same whichever others are drawn; random ones as controls."""
    i = ARMS.index(arm)
    if arm.startswith("random"):
        dash = "dash" if arm == "random" else "dot"
        return {"colour": CONTROL_COLOUR, "dash": dash, "symbol": "square-open" if arm == "random" else "circle-open"}
    return {"colour": PALETTE[i], "dash": DASHES[0], "symbol": SYMBOLS[i]}


def _line(rows: pd.DataFrame, arm: str, measure: str, away: int | float, level: float) -> go.Scatter:
    """Line of one arm."""
    style, name = _style(arm), _ARMS[arm]
    # Side by side, so that bars of equal numbers do not hide each other.
    x = [int(r) + away for r in rows["round"]]
    low, high = (rows[f"{measure}_{end}"].tolist() for end in ("low", "high"))
    hover = []
    for row in rows.to_dict("records"):
        groups = "" if row["n_groups"] == row["n"] else f" in {plural(row['n_groups'], 'group')}"
        hover.append(
            f"<b>{name}</b><br>{plural(int(row['round']), 'premise')}<br>"
            f"{_MEASURES[measure][1]}: {number(row[measure])}<br>{percent(level)} CI: "
            f"{ends_told(row[f'{measure}_low'], row[f'{measure}_high'])}<br>{plural(row['n'], 'question')}{groups}"
        )
    line = go.Scatter(
        x=x,
        y=rows[measure].tolist(),
        mode="lines+markers",
        name=plain(name),
        line={"color": style["colour"], "width": 2, "dash": style["dash"]},
        marker={"symbol": style["symbol"], "size": 8, "color": style["colour"]},
        error_y=bars(rows[measure], low, high, style["colour"]),
        customdata=hover,
        hovertemplate="%{customdata}<extra></extra>",
        cliponaxis=False,
        meta={"arm": arm},
    )
    return line


def _lay_out(
    figure: go.Figure,
    result: PremiseAblation,
    rounds: pd.DataFrame,
    measure: str,
    order: str,
    words: tuple[str | None, float],
) -> None:
    """Axes, title and size."""
    title, level = words
    left, inner = 66, 580
    width = left + inner + 20
    what = "cumulatively" if order == CUMULATIVE else "one at a time"
    model = result.meta.get("model")
    name = str(model.get("name", "")) if isinstance(model, dict) else ""
    lines = [
        f"{plural(len(result.questions), 'question')}, premises removed {what}; bars: {percent(level)} "
        "bootstrap intervals over groups"
    ]
    whole = f"{_MEASURES[measure][0]}{f', {name}' if name else ''}"
    text, top = heading(whole if title is None else title, lines, width=width, left=left)
    drawn: Any = figure.data
    below = 74 + legend_room([t.name for t in drawn if t.showlegend is not False], inner)
    numbers = sorted({int(r) for r in rounds["round"]})
    counts = {r: sorted(set(rounds.loc[rounds["round"] == r, "n"])) for r in numbers}
    ticks = [numbers[i] for i in count_ticks(len(numbers), most=7)]
    axis: dict[str, Any] = {"title": {"text": _MEASURES[measure][1]}}
    if measure == "flipped":
        axis |= {"range": [-0.03, 1.03], "dtick": 0.2}
    else:
        axis |= {"zeroline": True, "zerolinecolor": INK, "zerolinewidth": 1}
    removal = "Premises removed (number" if order == CUMULATIVE else "Premise removed (its place in the order"
    figure.update_layout(
        template=template(),
        title=text,
        xaxis={
            "title": {"text": f"{removal}); n: number of questions"},
            "tickvals": ticks,
            "ticktext": [f"{r}<br>n={_span(counts[r])}" for r in ticks],
            "range": [numbers[0] - 0.4, numbers[-1] + 0.4],
            "showgrid": False,
        },
        yaxis=axis,
        hovermode="closest",
        width=width,
        height=top + 320 + below,
        margin={"l": left, "r": 20, "t": top, "b": below},
    )


def _span(counts: list[int]) -> str:
    """``"40"``, ``"38 to 40"``: arms may differ in the questions they could be run on."""
    return str(counts[0]) if len(counts) == 1 else f"{counts[0]} to {counts[-1]}"


def _told(rounds: pd.DataFrame, wanted: list[str], measure: str) -> str:
    """First and last number of each arm."""
    parts = []
    for arm in wanted:
        rows = rounds.loc[rounds["arm"] == arm]
        if rows.empty or not math.isfinite(rows[measure].iloc[0]):
            continue
        first, last = rows.iloc[0], rows.iloc[-1]
        told = f"{_ARMS[arm]}: {number(first[measure])} after {plural(int(first['round']), 'removal')}"
        if len(rows) > 1:
            told += f", {number(last[measure])} after {plural(int(last['round']), 'removal')}"
        parts.append(told)
    return "; ".join(parts) + "." if parts else ""
