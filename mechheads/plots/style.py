"""One look for all figures: template, colours, and the words on axes.

Nothing is registered with plotly; each figure carries its own template.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

import plotly.graph_objects as go

# Okabe and Ito's palette, which stays distinct under all common forms of colour blindness; its yellow is
# left out (too pale for a line on white).
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
# Line patterns that go with the colours: told apart in grey print too.
DASHES = ("solid", "dash", "dot", "dashdot", "longdash")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "x", "cross", "star")
CONTROL_COLOUR = "#6E6E6E"
UNDEFINED_COLOUR = "#B8B8B8"
INK = "#1A1A1A"

# ColorBrewer's RdBu turned round: blue is negative, white zero, red positive. Blue against red is told
# apart with any red-green deficiency.
DIVERGING: list[list[float | str]] = [
    [0.0, "#053061"],
    [0.1, "#2166AC"],
    [0.2, "#4393C3"],
    [0.3, "#92C5DE"],
    [0.4, "#D1E5F0"],
    [0.5, "#FFFFFF"],
    [0.6, "#FDDBC7"],
    [0.7, "#F4A582"],
    [0.8, "#D6604D"],
    [0.9, "#B2182B"],
    [1.0, "#67001F"],
]

# Fonts that stand on the reader's machine; none is fetched.
FONT = "Helvetica, Arial, 'Liberation Sans', 'DejaVu Sans', sans-serif"
FONT_SIZE = 13
SMALL = 12
# The mark of an empty cell: an en dash.
MISSING = "\u2013"

_BUTTONS = (
    "zoom2d",
    "pan2d",
    "select2d",
    "lasso2d",
    "zoomIn2d",
    "zoomOut2d",
    "autoScale2d",
    "toggleSpikelines",
    "hoverClosestCartesian",
    "hoverCompareCartesian",
    "sendChartToCloud",
)

_DISPLAY = {
    "locos": "LOCOS",
    "attention_spatial": "Attention-spatial",
    "dla": "DLA",
    "wu": "Wu",
    "headkv": "HeadKV",
    "qrhead": "QRHead",
    "cri": "CRI",
    "ov_copying": "OV copying",
    "ov_norm": "OV norm",
    "qk_norm": "QK norm",
    "qk_matching": "QK matching",
    "ov_token_copying": "OV token copying",
    "tuned_lens": "Tuned lens",
    "qk": "QK-score",
    "random": "Random heads",
    "none": "No ablation",
}


def template() -> go.layout.Template:
    """The template of every mechheads figure, made anew at each call.

    White ground, dark text of 12 px or more, thin grid, Okabe-Ito colours, blue-white-red for signed
    values: readable when the figure is printed at the width of a journal column.
    """
    axis = {
        "showline": True,
        "linecolor": INK,
        "linewidth": 1,
        "ticks": "outside",
        "ticklen": 4,
        "tickcolor": INK,
        "gridcolor": "#E6E6E6",
        "zeroline": False,
        "automargin": True,
        "tickfont": {"size": SMALL},
        "title": {"font": {"size": FONT_SIZE}, "standoff": 8},
    }
    return go.layout.Template(
        layout={
            "font": {"family": FONT, "size": FONT_SIZE, "color": INK},
            "title": {
                "font": {"size": 16},
                "subtitle": {"font": {"size": SMALL, "color": "#4A4A4A"}},
                "x": 0,
                "xref": "paper",
                "xanchor": "left",
                "yref": "container",
                "y": 1,
                "yanchor": "top",
                "pad": {"t": 12},
            },
            "paper_bgcolor": "white",
            "plot_bgcolor": "white",
            "colorway": list(PALETTE),
            "colorscale": {"diverging": DIVERGING},
            "xaxis": axis,
            "yaxis": axis,
            "legend": {
                "font": {"size": SMALL},
                "orientation": "h",
                "x": 0,
                "xanchor": "left",
                "yref": "container",
                "y": 0,
                "yanchor": "bottom",
                "bgcolor": "rgba(0,0,0,0)",
            },
            "hoverlabel": {"font": {"family": FONT, "size": FONT_SIZE}, "align": "left", "namelength": -1},
            "margin": {"l": 60, "r": 20, "t": 64, "b": 56},
            # Only "save picture" and "reset" stay: the full bar would cover the title,
            # and its button to upload the data has no place in a tool that works offline.
            "modebar": {"remove": list(_BUTTONS), "bgcolor": "rgba(0,0,0,0)", "color": "#8A8A8A"},
        }
    )


def plain(text: object) -> str:
    """The text with ``< > &`` escaped, since plotly reads labels as a kind of HTML."""
    return html.escape(str(text), quote=False)


def display_name(name: str) -> str:
    """A method, ranking or task as a reader says it: ``"attention_spatial"`` -> ``"Attention-spatial"``."""
    known = _DISPLAY.get(name)
    if known is not None:
        return known
    words = name.replace("_", " ").strip()
    return words[:1].upper() + words[1:]


def number(value: float, digits: int = 3) -> str:
    """A number with that many significant digits and a true minus; an en dash if it is not finite.

    From 1000 to a million all digits before the point are written out.
    """
    if not math.isfinite(value):
        return MISSING
    text = f"{value:.0f}" if 1000 <= abs(value) < 1e6 else f"{value:.{digits}g}"
    return text.replace("-", "\u2212")


def plural(n: int, noun: str) -> str:
    """``"1 trial"``, ``"40 trials"``."""
    return f"{n} {noun}" if n == 1 else f"{n} {noun}s"


def interval(low: float, high: float) -> str:
    """``"0.12 to 0.34"``, or why there is none."""
    if not (math.isfinite(low) and math.isfinite(high)):
        return "none (fewer than two trials)"
    return f"{number(low)} to {number(high)}"


def percent(level: float) -> str:
    """A confidence level as people write it: ``0.95`` -> ``"95%"``."""
    return f"{100 * level:.4g}%"


def fade(colour: str, opacity: float) -> str:
    """``"#RRGGBB"`` as an ``rgba(...)`` colour of that opacity."""
    red, green, blue = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{opacity})"


def count_ticks(n: int, most: int = 12) -> list[int]:
    """Whole numbers from 0 below n, evenly spaced, at most ``most`` of them or so."""
    step = next((s for s in (1, 2, 4, 5, 8, 10, 16, 20, 25, 50) if n <= s * most), 100)
    return list(range(0, n, step))


def spread_ticks(values: Sequence[int], gap: float = 0.055) -> list[int]:
    """Those of the rising values that stand far enough apart on a linear axis to be read.

    The first and last always stay; ``gap`` is a share of the range.
    """
    if len(values) < 2:
        return list(values)
    least = gap * (values[-1] - values[0])
    kept = [values[0]]
    for value in values[1:-1]:
        if value - kept[-1] >= least and values[-1] - value >= least:
            kept.append(value)
    return [*kept, values[-1]]
