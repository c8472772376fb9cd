"""Where in the network the heads lie that know the answer."""

from __future__ import annotations

import math
from typing import Any

import plotly.graph_objects as go

from mechheads.errors import InvalidInput
from mechheads.plots.profile import panel_heading
from mechheads.plots.style import PALETTE, count_ticks, number, plural, template
from mechheads.plots.verdict_parts import ACCURACY, CHANCE, chance_line, heading, legend_room, zoomed
from mechheads.verdicts import DepthProfile

_NAMES = {
    "best": "Best head of the layer",
    "mean": "Mean of the layer's heads",
    "significant": "Right more often than chance",
    "inverse": "Inverse: wrong more often",
}


def accuracy_profile(profile: DepthProfile, *, title: str | None = None) -> go.Figure:
    """Draw accuracy by layer, and how many heads of each layer pass correction.

    Above, the best head of each layer and the mean of its heads, with chance dotted. The best of many heads is above
    chance by luck alone: what counts is below, the heads that are significantly right (upward) and wrong (downward),
    corrected for having looked at all. Hovering names the best head and the number of heads and trials.

    Args:
        profile: What ``depth_profile`` returned.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: If the value is no depth profile.
    """
    if not isinstance(profile, DepthProfile):
        raise InvalidInput(f"profile is a {type(profile).__name__}; give what depth_profile() returned.")
    frame, layers = profile.frame, len(profile.frame)
    x = frame["layer"].tolist()
    figure = go.Figure()
    hover = {name: _hover(profile, name) for name in _NAMES}
    for name, colour, dash, symbol in (
        ("best", PALETTE[2], "solid", "circle"),
        ("mean", PALETTE[6], "dash", "square"),
    ):
        figure.add_trace(
            go.Scatter(
                x=x,
                y=frame[name].tolist(),
                mode="lines+markers",
                name=_NAMES[name],
                line={"color": colour, "width": 2, "dash": dash},
                marker={"symbol": symbol, "size": 6, "color": colour},
                customdata=hover[name],
                hovertemplate="%{customdata}<extra></extra>",
            )
        )
    figure.add_trace(
        chance_line(
            [-0.5, *x, layers - 0.5],
            [profile.chance] * (layers + 2),
            hovertemplate=f"chance: {number(profile.chance)}<extra></extra>",
        )
    )
    # The colours of the accuracy heatmap: red above chance, blue below.
    for name, colour, sign in (("significant", PALETTE[1], 1), ("inverse", PALETTE[0], -1)):
        figure.add_trace(
            go.Bar(
                x=x,
                y=[sign * n for n in frame[name]],
                name=_NAMES[name],
                marker={
                    "color": colour,
                    "pattern": {"shape": "" if sign > 0 else "/", "fillmode": "overlay", "fgcolor": "white", "size": 5},
                },
                customdata=hover[name],
                hovertemplate="%{customdata}<extra></extra>",
                xaxis="x2",
                yaxis="y2",
            )
        )
    _lay_out(figure, profile, title)
    return figure


def _hover(profile: DepthProfile, name: str) -> list[str]:
    """Ready texts, one per layer."""
    out = []
    for row in profile.frame.to_dict("records"):
        lines = [f"<b>layer {row['layer']}</b>"]
        if not row["heads"]:
            lines.append("no head has a score in every trial")
        elif name == "best":
            lines.append(f"best head: {row['best_head']}, accuracy {number(row['best'])}")
        elif name == "mean":
            lines.append(f"mean accuracy: {number(row['mean'])}")
        else:
            what = "right more often than chance" if name == "significant" else "inverse"
            lines.append(f"{plural(row[name], 'head')} {what} (corrected p\u00a0\u2264\u00a0{profile.alpha:g})")
        out.append("<br>".join([*lines, f"{plural(row['heads'], 'head')}, {plural(profile.n_trials, 'trial')}"]))
    return out


def _lay_out(figure: go.Figure, profile: DepthProfile, title: str | None) -> None:
    """Two panels above each other with one axis of layers, title and size."""
    frame, layers = profile.frame, len(profile.frame)
    left, inner = 66, 600
    width = left + inner + 20
    trials = plural(profile.n_trials, "held-out trial" if profile.on == "test" else "calibration trial")
    lines = [f"{trials}; chance {profile.chance:.2f}; corrected p\u00a0\u2264\u00a0{profile.alpha:g}", _where(profile)]
    text, top = heading("Accuracy by layer" if title is None else title, lines, width=width, left=left)
    upper, lower, between = 230, 130, 44
    total = upper + lower + between
    below = 58 + legend_room([*_NAMES.values(), CHANCE], inner)
    ticks: dict[str, Any] = {"range": [-0.5, layers - 0.5], "tickvals": count_ticks(layers, most=20), "showgrid": False}
    high, low = int(frame["significant"].max()), int(frame["inverse"].max())
    step = max(1, math.ceil((high + low) / 5))
    counts = list(range(-step * math.ceil(low / step), step * math.ceil(max(high, 1) / step) + 1, step))
    figure.update_layout(
        template=template(),
        title=text,
        xaxis={**ticks, "anchor": "y", "showticklabels": False},
        yaxis={
            "title": {"text": ACCURACY},
            "domain": [1 - upper / total, 1],
            "range": zoomed([*frame["best"], *frame["mean"], profile.chance]),
            "nticks": 7,
        },
        xaxis2={**ticks, "anchor": "y2", "title": {"text": "Layer (index)"}, "matches": "x"},
        yaxis2={
            "title": {"text": "Heads (number)"},
            "domain": [0, lower / total],
            "anchor": "x2",
            "tickvals": counts,
            "ticktext": [str(abs(n)) for n in counts],
            "range": [min(counts[0], -0.2) - 0.1, counts[-1] + 0.1],
            "zeroline": True,
            "zerolinecolor": "#1A1A1A",
            "zerolinewidth": 1,
        },
        barmode="relative",
        bargap=0.3 if layers > 1 else 0.8,
        hovermode="closest",
        width=width,
        height=top + 24 + total + below,
        margin={"l": left, "r": 20, "t": top + 24, "b": below},
        meta={
            "description": f"Profile of accuracy over {plural(layers, 'layer')}. {_peak(profile)}{profile.summary()}"
        },
    )
    panel_heading(figure, "Accuracy", 0.0)
    panel_heading(figure, "Heads that pass correction: right upward, inverse downward", 0.0)
    layout: Any = figure.layout
    layout.annotations[-1].y = lower / total


def _where(profile: DepthProfile) -> str:
    """The subtitle: how many heads pass, and in which thirds they lie."""
    right, inverse = (int(profile.frame[name].sum()) for name in ("significant", "inverse"))
    if not right and not inverse:
        return "No head passes correction."
    parts = []
    if right:
        parts.append(
            f"{plural(right, 'head')} right more often than chance, {profile.first_third_share:.0%} of them in the "
            f"first third of the layers, {profile.last_third_share:.0%} in the last"
        )
    else:
        parts.append("No head passes correction for being right")
    if inverse:
        parts.append(f"{inverse} inverse, {profile.inverse_first_third_share:.0%} in the first third")
    return "; ".join(parts)


def _peak(profile: DepthProfile) -> str:
    """The best head of all, in a sentence."""
    best = profile.frame["best"]
    if not best.notna().any():
        return ""
    row = profile.frame.loc[best.idxmax()]
    return f"The best head is {row['best_head']} with {number(row['best'])}; guessing gives {number(profile.chance)}. "
