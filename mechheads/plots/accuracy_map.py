"""How often every head is right, as a layer by head map with chance in the middle."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import plotly.graph_objects as go

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head, HeadSet
from mechheads.plots.heatmap import outline
from mechheads.plots.style import count_ticks, number, percent, plural, template
from mechheads.plots.verdict_parts import (
    bound_of,
    chance_colours,
    colour_bar,
    ends_told,
    grey_cells,
    heading,
    legend_room,
    model_name,
)
from mechheads.verdicts import Judgement, judge

MARKS = ("significant", "both", "none")
_LEFT, _WIDTH = 62, 600


def accuracy_heatmap(
    result: Judgement | CandidateScores,
    *,
    split: str | None = None,
    mark: str = "significant",
    heads: Any = None,
    alpha: float = 0.05,
    ci: bool = True,
    limit: int | float | None = None,
    title: str | None = None,
) -> go.Figure:
    """Draw the accuracy of every head, layers rising upward, heads to the right.

    White is chance, red above, blue below; equal distances from chance are equally strong, and the colours run at least
    0.25 to either side, so that noise stays pale. Heads without a score in every trial are grey. Rings are heads right
    more often than chance, corrected for having looked at all; crosses those wrong more often (inverse heads). Hovering
    shows accuracy, interval, AUROC, p-values and the number of trials.

    Args:
        result: A judgement, or candidate scores to judge: with splits, heads are judged on ``"calibration"`` and
            ``"test"``; without, on all trials. For other options call ``judge`` yourself.
        split: ``"test"`` or ``"calibration"``; None for test where there is one.
        mark: ``"significant"``: heads that pass on these trials; ``"both"``: on calibration and on test trials;
            ``"none"``.
        heads: Heads to outline (a HeadSet or anything one parses from).
        alpha: Largest corrected p-value of a marked head.
        ci: Compute the bootstrap interval of each head and show it on hovering.
        limit: Distance from chance at which the colours end; to the farthest head, at least 0.25, if None.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        InvalidInput: If there are no test trials but they are asked for, alpha or the limit is out of range, a head
            does not exist, or the result is neither a judgement nor candidate scores.
        UnknownName: If there is no such split or mark.
    """
    judgement = _judged(result)
    if mark not in MARKS:
        raise UnknownName("mark of the accuracy heatmap", mark, MARKS)
    on = judgement.side(split)
    outlined = HeadSet() if heads is None else HeadSet.parse(heads)
    z = judgement.accuracy(on)
    outlined.check(*z.shape)
    side = "both" if mark == "both" else on
    found = judgement.significant(alpha, on=side), judgement.inverse(alpha, on=side)
    inner, height = min(max(30 * z.shape[1], 240), 420), min(max(15 * z.shape[0], 160), 560)
    bound = bound_of(z - judgement.chance(on), limit)
    bar, beside = colour_bar(f"Accuracy (proportion right; white: chance, {judgement.chance(on):.2f})", height)
    figure = go.Figure(_cells(judgement, on, z, bound, bar, ci=ci))
    if mark != "none":
        cell = min(inner / z.shape[1], height / z.shape[0])
        figure.add_traces([trace for kind in (0, 1) for trace in _marks(found[kind], kind, cell)])
    if len(outlined):
        figure.add_trace(outline(outlined, "Chosen heads", showlegend=True))
    traces: Any = figure.data
    names = [t.name for t in traces if t.showlegend]
    width = max(_LEFT + inner + beside, _WIDTH)
    text, top = heading(*_words(judgement, on, side, found, alpha, title), width=width, left=_LEFT)
    below = 58 + legend_room(names, inner)
    figure.update_layout(
        template=template(),
        title=text,
        xaxis={
            "title": {"text": "Head (index in its layer)"},
            "range": [-0.5, z.shape[1] - 0.5],
            "tickvals": count_ticks(z.shape[1]),
            "showgrid": False,
        },
        yaxis={
            "title": {"text": "Layer (index, last on top)"},
            "range": [-0.5, z.shape[0] - 0.5],
            "tickvals": count_ticks(z.shape[0], most=16),
            "showgrid": False,
        },
        width=width,
        height=top + height + below,
        margin={"l": _LEFT, "r": width - _LEFT - inner, "t": top, "b": below},
        legend={"tracegroupgap": 0},
        meta={"description": _described(judgement, on, z, alpha)},
    )
    return figure


def _judged(result: Any) -> Judgement:
    """The judgement itself, or that of scores with the default options."""
    if isinstance(result, Judgement):
        return result
    if not isinstance(result, CandidateScores):
        raise InvalidInput(
            f"result is a {type(result).__name__}; give the Judgement that judge() returns, or CandidateScores."
        )
    if not result.splits:
        return judge(result)
    return judge(result.split("calibration"), result.split("test") if "test" in result.splits else None)


def _trials(judgement: Judgement, on: str) -> str:
    n = len(judgement.scores(on))
    return plural(n, "held-out trial" if on == "test" else "calibration trial")


def _words(
    judgement: Judgement, on: str, side: str, found: tuple[HeadSet, HeadSet], alpha: float, title: str | None
) -> tuple[str, list[str]]:
    """Title and subtitle: trials, chance, the model's own accuracy, and how many heads pass."""
    name = model_name(judgement.calibration)
    heads = judgement.permutation(on).n_heads
    base = judgement.baseline(on)
    own = f"{base.estimate:.2f}"
    if math.isfinite(base.low):
        own += f" ({percent(base.level)} CI {base.low:.2f} to {base.high:.2f})"
    lines = [f"{_trials(judgement, on)}; chance {judgement.chance(on):.2f}; model's own output {own}"]
    where = "on calibration and on test trials, " if side == "both" else ""
    right, inverse = map(len, found)
    passing = f"{where}corrected p\u00a0\u2264\u00a0{alpha:g}"
    if not heads:
        lines.append("No head has a score in every trial.")
    elif right:
        lines.append(f"{right} of {heads} heads right more often than chance, {inverse} inverse ({passing})")
    else:
        p = np.maximum(judgement.p("calibration"), judgement.p("test")) if side == "both" else judgement.p(on)
        least = float(np.nanmin(p))
        lines.append(
            f"No head passes correction: none of {heads} is right more often than chance allows for the best of so many"
            f" ({where}smallest corrected p = {least:.2g})."
        )
        lines += [f"{plural(inverse, 'head')} inverse: wrong more often than chance ({passing})"] if inverse else []
    return (f"Accuracy of each head{f', {name}' if name else ''}" if title is None else title), lines


def _cells(judgement: Judgement, on: str, z: np.ndarray, bound: int | float, bar: Any, *, ci: bool) -> list[go.Heatmap]:
    """The map of heads with a score, and a grey one of the others."""
    chance = judgement.chance(on)
    gap = 0 if max(z.shape) > 40 else 1
    hover = _hover(judgement, on, z, ci=ci)
    common: dict[str, Any] = {
        "customdata": hover,
        "hovertemplate": f"{'<br>'.join(f'%{{customdata[{j}]}}' for j in range(hover.shape[-1]))}<extra></extra>",
        "xgap": gap,
        "ygap": gap,
        "hoverongaps": False,
    }
    return [
        go.Heatmap(z=z, name="accuracy", colorbar=bar, **chance_colours(chance, bound), **common),
        *grey_cells(z, **common),
    ]


def _hover(judgement: Judgement, on: str, z: np.ndarray, *, ci: bool) -> np.ndarray:
    """Ready texts ``[layer head line]``."""
    trials = _trials(judgement, on)
    p, inverse, area = judgement.p(on), judgement.p_inverse(on), judgement.auroc(on)
    low, high = judgement.interval(on) if ci else (z, z)
    rows = []
    columns = (np.asarray(x).ravel().tolist() for x in (z, low, high, area, p, inverse))
    for i, (right, below, above, auroc, passes, turned) in enumerate(zip(*columns, strict=True)):
        label = f"<b>{Head(*divmod(i, z.shape[1]))}</b>"
        if not math.isfinite(right):
            texts = ["accuracy: undefined", "no score in every trial", "", "", trials]
        else:
            texts = [
                f"accuracy: {number(right)}",
                f"{percent(judgement.level)} CI: {ends_told(below, above)}",
                f"AUROC: {number(auroc)}",
                f"corrected p: {number(passes)} (right), {number(turned)} (inverse)",
                trials,
            ]
        rows.append([label, *(texts if ci else [texts[0], *texts[2:]])])
    return np.array(rows, dtype=object).reshape(*z.shape, -1)


def _marks(heads: HeadSet, kind: int, cell: int | float) -> list[go.Scatter]:
    """Rings (0) or crosses (1) in the cells of these heads, black on a white halo to be seen on any colour."""
    if not len(heads):
        return []
    size = float(np.clip(0.62 * cell, 5, 11))
    symbol = ("circle-open", "x-thin-open")[kind]
    what = ("Right more often than chance", "Inverse: wrong more often than chance")[kind]
    common: dict[str, Any] = {
        "x": [h.head for h in heads],
        "y": [h.layer for h in heads],
        "mode": "markers",
        "hoverinfo": "skip",
        "cliponaxis": False,
        "legendgroup": what,
    }
    thick = 2.0 if size > 7 else 1.4

    def marker(colour: str, width: int | float) -> dict[str, Any]:
        return {"symbol": symbol, "size": size, "color": colour, "line": {"width": width, "color": colour}}

    return [
        go.Scatter(marker=marker("white", thick + 2), showlegend=False, name=f"{what}, halo", **common),
        go.Scatter(marker=marker("black", thick), showlegend=True, name=what, meta={"heads": heads.labels}, **common),
    ]


def _described(judgement: Judgement, on: str, z: np.ndarray, alpha: float) -> str:
    """In words: the shape, the best and the worst head, and the verdict where it is about these trials."""
    text = (
        f"Heatmap of the accuracy of {plural(z.size, 'attention head')} ({plural(z.shape[0], 'layer')} by "
        f"{plural(z.shape[1], 'head')}) on {_trials(judgement, on)}."
    )
    defined = np.isfinite(z)
    if not defined.any():
        return f"{text} No head has a score in every trial."
    high, low = (tuple(map(int, np.unravel_index(f(z), z.shape))) for f in (np.nanargmax, np.nanargmin))
    text += f" The highest is L{high[0]}H{high[1]} with {number(z[high])}, the lowest L{low[0]}H{low[1]} with "
    text += f"{number(z[low])}; guessing gives {number(judgement.chance(on))}."
    if not defined.all():
        text += f" Undefined: {plural(int((~defined).sum()), 'head')}."
    if on == judgement.side(None):
        return f"{text} {judgement.verdict(alpha)}"
    right, inverse = len(judgement.significant(alpha, on=on)), len(judgement.inverse(alpha, on=on))
    passing = f"{plural(right, 'head')} right more often than chance" if right else "No head passes correction"
    return f"{text} {passing}; {inverse} inverse. The model's own output is right in {judgement.baseline(on)}."
