"""How many calibration trials it takes."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from mechheads.errors import InvalidInput
from mechheads.plots.style import CONTROL_COLOUR, INK, PALETTE, SMALL, number, percent, plural, template
from mechheads.plots.verdict_parts import ACCURACY, CHANCE, OWN, band, chance_line, heading, legend_room, zoomed
from mechheads.verdicts import LearningCurve

# How many calibration trials the paper takes (Tulchinskii et al., 2025).
PAPER = 400
_HELD_OUT, _ITS_OWN = "On held-out trials", "On the calibration trials (optimistic)"


def calibration_curve(curve: LearningCurve, *, level: float = 0.9, title: str | None = None) -> go.Figure:
    """Draw the accuracy of the chosen heads against the number of trials that they were chosen by.

    Solid: on held-out trials. Dashed: on the very trials they were chosen by, which flatters them, the more the fewer
    they are. Lines are means over draws of calibration trials, bands their percentiles: they show how much the draw
    matters, and are no confidence interval for other test trials. The upright marks the 400 of the paper. Hovering
    shows draws, trials, and how many of the heads the whole set chooses too.

    Args:
        curve: What ``learning_curve`` returned.
        level: Share of the draws inside the bands.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: If the level is out of range, or the value is no learning curve.
    """
    if not isinstance(curve, LearningCurve):
        raise InvalidInput(f"curve is a {type(curve).__name__}; give what learning_curve() returned.")
    bands = curve.bands(level)
    sizes = bands["size"].tolist()
    ends = [sizes[0] / 1.25, sizes[-1] * 1.25]
    figure = go.Figure()
    for name, label, colour, dash, symbol in (
        ("calibration", _ITS_OWN, PALETTE[1], "dash", "square"),
        ("test", _HELD_OUT, PALETTE[0], "solid", "circle"),
    ):
        low, high = (bands[f"{name}_{end}"].tolist() for end in ("low", "high"))
        figure.add_traces(band(sizes, low, high, colour, label))
        bar = {"type": "data", "symmetric": False, "thickness": 1.3, "width": 4, "color": colour}
        bar["array"] = (bands[f"{name}_high"] - bands[name]).clip(lower=0).tolist()
        bar["arrayminus"] = (bands[name] - bands[f"{name}_low"]).clip(lower=0).tolist()
        figure.add_trace(
            go.Scatter(
                x=sizes,
                y=bands[name].tolist(),
                mode="lines+markers",
                name=label,
                line={"color": colour, "width": 2, "dash": dash},
                marker={"symbol": symbol, "size": 7, "color": colour},
                # A band along a single size has no area.
                error_y=bar if len(sizes) == 1 else None,
                customdata=_hover(curve, bands, name, label, level),
                hovertemplate="%{customdata}<extra></extra>",
                cliponaxis=False,
            )
        )
    figure.add_traces(_levels(curve, ends))
    left, inner = 66, 560
    width = left + inner + 20
    head = "the chosen head" if curve.k == 1 else f"the {curve.k} chosen heads"
    lines = [
        f"{head} on {plural(curve.n_test, 'held-out trial')}; bands: middle {percent(level)} of draws of calibration "
        "trials"
    ]
    text, top = heading("Accuracy by number of calibration trials" if title is None else title, lines,
                        width=width, left=left)  # fmt: skip
    below = 58 + legend_room([_ITS_OWN, _HELD_OUT, OWN, CHANCE], inner)
    lowest = [bands[f"{name}_{end}"].tolist() for name in ("calibration", "test") for end in ("low", "high")]
    y_range = zoomed([*(v for values in lowest for v in values), curve.chance, curve.baseline])
    if ends[0] <= PAPER <= ends[1]:
        _mark(figure, y_range)
    figure.update_layout(
        template=template(),
        title=text,
        xaxis={
            "type": "log",
            "title": {"text": "Calibration trials (number; log scale)"},
            "tickvals": _ticks(sizes),
            "ticktext": [str(n) for n in _ticks(sizes)],
            "range": [math.log10(ends[0]), math.log10(ends[1])],
            "showgrid": False,
        },
        yaxis={"title": {"text": ACCURACY}, "range": y_range, "nticks": 8},
        hovermode="closest",
        width=width,
        height=top + 320 + below,
        margin={"l": left, "r": 20, "t": top, "b": below},
        meta={"description": f"Curves of accuracy against the number of calibration trials. {curve.summary()}"},
    )
    return figure


def _ticks(sizes: list[int]) -> list[int]:
    """The sizes, less those that stand too close to the next larger one to be read."""
    kept: list[int] = []
    for size in reversed(sizes):
        if not kept or kept[-1] / size >= 1.3:
            kept.append(size)
    return kept[::-1]


def _hover(curve: LearningCurve, bands: Any, name: str, label: str, level: float) -> list[str]:
    """Ready texts, one per size."""
    out = []
    for row in bands.to_dict("records"):
        drawn = "" if row["n"] == row["size"] else f" ({number(row['n'])} on average: groups are kept whole)"
        out.append(
            f"<b>{label}</b><br>{row['size']} calibration trials{drawn}<br>accuracy: {number(row[name])}, mean of "
            f"{plural(row['draws'], 'draw')}<br>middle {percent(level)} of draws: {number(row[f'{name}_low'])} to "
            f"{number(row[f'{name}_high'])}<br>{plural(curve.n_test, 'held-out trial')}<br>share of the "
            f"{plural(curve.k, 'head')} that all {curve.n_calibration} trials choose: {number(row['overlap'])}"
        )
    return out


def _levels(curve: LearningCurve, ends: list[float]) -> list[go.Scatter]:
    """The levels of the model and of chance, with points enough to hover over them anywhere."""
    x = [ends[0] * (ends[1] / ends[0]) ** (i / 20) for i in range(21)]
    own = go.Scatter(
        x=x,
        y=[curve.baseline] * len(x),
        mode="lines",
        line={"color": INK, "width": 2, "dash": "dashdot"},
        name=OWN,
        hovertemplate=f"<b>{OWN}</b><br>accuracy: {number(curve.baseline)}<br>"
        f"{plural(curve.n_test, 'held-out trial')}<extra></extra>",
    )
    guess = chance_line(x, [curve.chance] * len(x), hovertemplate=f"chance: {number(curve.chance)}<extra></extra>")
    return [own, guess]


def _mark(figure: go.Figure, y_range: list[float]) -> None:
    """The paper's number of trials."""
    figure.add_shape(
        type="line",
        x0=PAPER,
        x1=PAPER,
        y0=0,
        y1=1,
        yref="paper",
        line={"color": CONTROL_COLOUR, "width": 1},
        layer="below",
        name=f"{PAPER} trials",
    )
    figure.add_annotation(
        text=f"{PAPER}",
        x=math.log10(PAPER),
        y=y_range[1],
        yanchor="top",
        xanchor="left",
        xshift=3,
        showarrow=False,
        font={"size": SMALL, "color": CONTROL_COLOUR},
    )
