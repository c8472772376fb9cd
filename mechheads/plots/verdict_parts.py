"""What the figures of verdicts share: colours about chance, the lines of chance and of the model, headings, room."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput
from mechheads.plots.agreement import upright_bar
from mechheads.plots.style import CONTROL_COLOUR, DIVERGING, INK, UNDEFINED_COLOUR, fade, number, plain

OWN, CHANCE = "Model's own output", "Chance"
ACCURACY = "Accuracy (proportion right)"
# The colours run at least so far from chance: with a scale that ends at the luckiest head, noise would look like a
# finding.
LEAST_BOUND = 0.25
# Pixels a letter takes, on the wide side: title, and everything of size SMALL.
_TITLE_LETTER, LETTER = 8.6, 6.1
_TITLE_LINE, LINE = 20, 16
# To the right of the title stand the buttons that save the picture and reset it.
_BUTTONS = 100


def chance_colours(
    chance: int | float, bound: int | float, *, low: int | float = 0.0, high: int | float = 1.0
) -> dict[str, Any]:
    """Colours with chance in the middle: white there, red above, blue below, equal distances equally strong.

    They are cut where no value can be, so that a bar for one right answer of five does not show accuracies below 0.

    Args:
        chance: The value in white.
        bound: Distance from it at which the colours end.
        low: Least value there can be.
        high: Greatest.

    Returns:
        ``zmin``, ``zmax`` and ``colorscale`` of a heatmap.
    """
    ends = max(chance - bound, low), min(chance + bound, high)
    places = [chance + (2 * float(p) - 1) * bound for p, _ in DIVERGING]
    channels = np.array([[int(str(c)[i : i + 2], 16) for i in (1, 3, 5)] for _, c in DIVERGING], dtype=float)
    kept = [ends[0], *(p for p in places if ends[0] < p < ends[1]), ends[1]]
    scale = []
    for place in kept:
        rgb = [round(float(np.interp(place, places, channels[:, i]))) for i in range(3)]
        scale.append([(place - ends[0]) / (ends[1] - ends[0]), "#{:02X}{:02X}{:02X}".format(*rgb)])
    scale[0][0], scale[-1][0] = 0.0, 1.0
    return {"zmin": ends[0], "zmax": ends[1], "colorscale": scale}


def bound_of(distances: np.ndarray, limit: int | float | None) -> float:
    """How far from chance the colours run: as asked for, or to the farthest value but at least ``LEAST_BOUND``."""
    if limit is None:
        finite = np.abs(distances[np.isfinite(distances)])
        return max(float(finite.max(initial=0.0)), LEAST_BOUND)
    if not (math.isfinite(limit) and 0 < limit <= 1):
        raise InvalidInput(
            f"limit is {limit!r}; give the distance from chance at which the colours end, above 0 and at most 1."
        )
    return float(limit)


def colour_bar(title: str, height: int | float) -> tuple[dict[str, Any], int]:
    """A colour bar beside a plot of that height, and the pixels to leave for it; the title is broken to fit."""
    lines = wrapped(title, height, 7.0)
    bar = upright_bar("<br>".join(map(plain, lines)))
    return bar, 84 + LINE * len(lines)


def ink_on(colours: dict[str, Any], values: np.ndarray) -> list[str]:
    """For each value the colour, black or white, that is read better on the colour of a heatmap's cell."""
    places = [colours["zmin"] + float(p) * (colours["zmax"] - colours["zmin"]) for p, _ in colours["colorscale"]]
    parts = np.array([[int(str(c)[i : i + 2], 16) for i in (1, 3, 5)] for _, c in colours["colorscale"]]) / 255
    rgb = np.stack([np.interp(values, places, parts[:, i]) for i in range(3)], axis=-1)
    linear = np.where(rgb <= 0.03928, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    # Relative luminance as WCAG has it: contrast with black and with white is equal at 0.179.
    return ["white" if light < 0.179 else INK for light in linear @ [0.2126, 0.7152, 0.0722]]


def grey_cells(z: np.ndarray, **fields: Any) -> list[go.Heatmap]:
    """A grey map of the cells without a value, if there are any."""
    undefined = ~np.isfinite(z)
    if not undefined.any():
        return []
    grey = [[0, UNDEFINED_COLOUR], [1, UNDEFINED_COLOUR]]
    hidden = np.where(undefined, 0.0, np.nan)
    return [go.Heatmap(z=hidden, zmin=0, zmax=1, showscale=False, name="undefined", colorscale=grey, **fields)]


def ends_told(low: int | float, high: int | float) -> str:
    """``"0.12 to 0.34"``, or why there is no interval: it is over groups of trials."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "none (fewer than two groups)"
    return f"{number(low)} to {number(high)}"


def estimate_told(row: Any, name: str = "accuracy", lead: str = "ci") -> str:
    """``"0.71 (0.66 to 0.76)"``."""
    low, high = row[f"{lead}_low"], row[f"{lead}_high"]
    ends = f" ({low:.2f} to {high:.2f})" if math.isfinite(low) and math.isfinite(high) else ""
    return f"{row[name]:.2f}{ends}".replace("-", "\u2212")


def model_name(scores: CandidateScores) -> str:
    """What the provenance calls the model; empty if it does not."""
    model = scores.meta.get("model")
    return str(model.get("name", "")) if isinstance(model, dict) else ""


def bars(values: Any, low: Any, high: Any, colour: str) -> dict[str, Any]:
    """Error bars from an interval; none where it is undefined."""
    values, low, high = (np.asarray(x, dtype=float) for x in (values, low, high))
    # Rounding may put a mean a hair outside its interval; a bar of negative length would be drawn the wrong way.
    above, below = (np.nan_to_num(np.maximum(d, 0.0)) for d in (high - values, values - low))
    return {
        "type": "data",
        "symmetric": False,
        "array": above.tolist(),
        "arrayminus": below.tolist(),
        "thickness": 1.3,
        "width": 4,
        "color": colour,
    }


def band(
    x: Sequence[int | float], low: Sequence[int | float], high: Sequence[int | float], colour: str, name: str
) -> list[go.Scatter]:
    """The area of an interval along x, one closed piece per unbroken run of points that have one."""
    out_x: list[float | None] = []
    out_y: list[float | None] = []
    run: list[tuple[float, float, float]] = []
    for at, a, b in [*zip(x, low, high, strict=True), (math.nan, math.nan, math.nan)]:
        if math.isfinite(a) and math.isfinite(b):
            run.append((float(at), float(a), float(b)))
        elif run:
            out_x += [r[0] for r in run] + [r[0] for r in reversed(run)] + [run[0][0], None]
            out_y += [r[1] for r in run] + [r[2] for r in reversed(run)] + [run[0][1], None]
            run = []
    if not out_x:
        return []
    return [
        go.Scatter(
            x=out_x[:-1],
            y=out_y[:-1],
            mode="lines",
            line={"width": 0},
            fill="toself",
            fillcolor=fade(colour, 0.13),
            hoverinfo="skip",
            showlegend=False,
            name=f"{name}, interval",
        )
    ]


def chance_line(x: Sequence[Any], y: Sequence[Any], **fields: Any) -> go.Scatter:
    """The dotted grey line of guessing."""
    return go.Scatter(
        x=list(x),
        y=list(y),
        mode="lines",
        line={"color": CONTROL_COLOUR, "width": 1.5, "dash": "dot"},
        name=CHANCE,
        **fields,
    )


def wrapped(text: str, pixels: int | float, letter: int | float = LETTER) -> list[str]:
    """The text in lines that fit."""
    return textwrap.wrap(text, max(int(pixels / letter), 12), break_on_hyphens=False) or [""]


def heading(title: str, lines: Iterable[str], *, width: int | float, left: int | float) -> tuple[dict[str, Any], int]:
    """Title and subtitle, broken into lines that the figure has room for.

    Args:
        title: The title.
        lines: The subtitle; each begins a new line.
        width: Width of the figure, pixels.
        left: Its left margin, where the text begins.

    Returns:
        The title for the layout, and the pixels it takes from the top.
    """
    above = wrapped(title, width - left - _BUTTONS, _TITLE_LETTER)
    below = [part for line in lines for part in wrapped(line, width - left - 20)]
    text = {"text": "<br>".join(map(plain, above)), "subtitle": {"text": "<br>".join(map(plain, below))}}
    return text, 28 + _TITLE_LINE * len(above) + LINE * len(below)


def legend_room(names: Sequence[str], width: int | float) -> int:
    """Pixels that a legend below the plot takes: plotly sets it in columns once it is wider than the plot."""
    if not names:
        return 0
    widths = [45 + 5.8 * len(name) for name in names]
    rows = 1
    if sum(widths) > width:
        rows = math.ceil(len(names) / max(int(width / max(widths)), 1))
    return 8 + 20 * rows


def zoomed(values: Iterable[int | float], *, least: int | float = 0.1) -> list[float]:
    """Range of an axis of accuracies about these values, a little wider, within what can be."""
    finite = [v for v in values if math.isfinite(v)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    room = max(0.08 * (high - low), (least - (high - low)) / 2)
    return [max(low - room, -0.03), min(high + room, 1.03)]
