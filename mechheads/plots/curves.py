"""What is left of a task as more heads are ablated."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.errors import InvalidInput, UnknownName
from mechheads.plots.describe import describe_curves
from mechheads.plots.style import (
    CONTROL_COLOUR,
    DASHES,
    PALETTE,
    SYMBOLS,
    display_name,
    fade,
    interval,
    number,
    percent,
    plain,
    spread_ticks,
    template,
)
from mechheads.sweep_result import BASELINE, SweepResult

# Axis title with its unit, and whether the metric lives between 0 and 1.
_METRICS = {
    "correct": ("Correct answers (proportion)", True),
    "accuracy": ("Correct answers (proportion)", True),
    "exact_match": ("Exact match (proportion)", True),
    "rouge1_recall": ("ROUGE-1 recall (0 to 1)", True),
    "rougeL_f": ("ROUGE-L F1 (0 to 1)", True),
    "f1": ("F1 over words (0 to 1)", True),
    "choice_accuracy": ("Right choices (proportion)", True),
    "label_probability": ("Right candidate's share of probability (0 to 1)", True),
    "logprob": ("Answer log-probability (nats)", False),
    "answer_logprob": ("Answer log-probability (nats)", False),
    "logit_difference": ("Logit difference (logits)", False),
    "logit_diff": ("Logit difference (logits)", False),
    "nll": ("Negative log-likelihood (nats a token)", False),
    "perplexity": ("Perplexity (1 or more)", False),
}
_CONTROL_DASHES = ("dash", "dot", "dashdot")
_COLUMNS = 3


def ablation_curve(
    sweep: SweepResult,
    *,
    metric: str = "correct",
    tasks: Sequence[str] | str | None = None,
    rankings: Sequence[str] | str | None = None,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
    title: str | None = None,
) -> go.Figure:
    """Draw the mean of a metric against the number of ablated heads, one panel per task.

    One line per ranking, with the bootstrap interval over trials as a band. Random controls are dashed grey: the line
    is the mean over draws, the bars run from the lowest to the highest draw. The run without ablation stands at k=0 of
    every line. Where k counts the heads kept, the axis says so. Hovering shows value, interval, trials and heads.

    Args:
        sweep: What to draw.
        metric: One of ``sweep.metrics``.
        tasks: Tasks to draw, in that order; all that have the metric if None.
        rankings: Rankings to draw, in that order; all if None.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of the bootstrap.
        title: Title; a plain one if None.

    Returns:
        A plotly Figure; it is not shown.

    Raises:
        UnknownName: If a metric, task or ranking is not in the sweep.
        InvalidInput: If the metric was not measured there, or the tasks or rankings asked for are none.
    """
    wanted_tasks = chosen("task", tasks, sweep.tasks)
    wanted = chosen("ranking", rankings, sweep.rankings or [BASELINE])
    curve = sweep.curve(metric, level=level, n_boot=n_boot, seed=seed)
    if tasks is None:
        wanted_tasks = [t for t in wanted_tasks if (curve["task"] == t).any()]
    curve = curve.loc[curve["ranking"].isin(wanted) & curve["task"].isin(wanted_tasks)]
    for task in wanted_tasks:
        if curve.loc[curve["task"] == task].empty:
            sweep.curve(metric, task=task, n_boot=2)  # raises, saying what was not measured
    label, proportion = metric_axis(sweep, metric)
    figure = go.Figure()
    named: set[str] = set()
    styles = ranking_styles(sweep.rankings or [BASELINE], curve, drawn=drawn_rankings(sweep))
    for i, task in enumerate(wanted_tasks, start=1):
        for ranking in wanted:
            rows = curve.loc[(curve["task"] == task) & (curve["ranking"] == ranking)].sort_values("k")
            if rows.empty:
                continue
            heads = heads_at(sweep, ranking, task, metric)
            legend = ranking not in named
            figure.add_traces(curve_traces(rows, styles[ranking], heads, i, level, legend=legend, kept=sweep.kept))
            named.add(ranking)
    _lay_out(figure, wanted_tasks, curve, label, proportion=proportion, kept=sweep.kept)
    bands = f"bands: {percent(level)} bootstrap intervals over trials and draws"
    if any(styles[r]["control"] for r in named):
        bands += "; bars: lowest to highest random draw"
    figure.update_layout(
        title={"text": plain(sweep_title(sweep) if title is None else title), "subtitle": {"text": bands}},
        meta={"description": describe_curves(curve, label, level=level, kept=sweep.kept)},
    )
    return figure


def ablation_curves(sweep: SweepResult, **options: Any) -> go.Figure:
    """The same as ``ablation_curve``."""
    return ablation_curve(sweep, **options)


def sweep_title(sweep: SweepResult) -> str:
    """A plain title, with the model's name if it is known."""
    model = sweep.meta.get("model")
    name = str(model.get("name", "")) if isinstance(model, dict) else ""
    what = "Keeping only the highest-ranked heads" if sweep.kept else "Ablating the highest-ranked heads"
    return what + (f", {name}" if name else "")


def chosen(kind: str, names: Sequence[str] | str | None, known: list[str]) -> list[str]:
    """The names asked for, checked; all known ones if None."""
    if names is None:
        return list(known)
    names = [names] if isinstance(names, str) else list(dict.fromkeys(names))
    if not names:
        raise InvalidInput(f"no {kind} is left to draw; give some of {', '.join(known)}, or None for all.")
    for name in names:
        if name not in known:
            raise UnknownName(f"{kind} of the sweep", name, known)
    return names


def metric_axis(sweep: SweepResult, metric: str) -> tuple[str, bool]:
    """Axis title with unit, and whether values are shares of one."""
    if metric in _METRICS:
        return _METRICS[metric]
    values = sweep.frame.loc[sweep.frame["metric"] == metric, "value"].dropna()
    proportion = bool(len(values)) and set(values) <= {0.0, 1.0}
    units = sweep.meta.get("units")
    unit = str(units.get(metric, "")) if isinstance(units, dict) else ""
    unit = unit or ("proportion" if proportion else "")
    return display_name(metric) + (f" ({unit})" if unit else ""), proportion


def drawn_rankings(sweep: SweepResult) -> set[str]:
    """Rankings whose heads differ from draw to draw: random controls. Seeds of an intervention share their heads."""
    # Within a task: a ranking may be chosen for each task anew.
    sets = sweep.frame.drop_duplicates(["ranking", "k", "task", "heads"])
    several = sets.loc[sets.duplicated(["ranking", "k", "task"]), "ranking"]
    return set(several.tolist())


def ranking_styles(
    rankings: list[str], curve: pd.DataFrame, *, drawn: Collection[str] = ()
) -> dict[str, dict[str, Any]]:
    """Colour, dash and symbol of each ranking; by its place in the sweep, so that subsets keep theirs.

    Controls, named "random..." or among those ``drawn``, are dashed grey.
    """
    styles: dict[str, dict[str, Any]] = {}
    free = controls = 0
    for ranking in rankings:
        draws = curve.loc[curve["ranking"] == ranking, "n_draws"]
        n_draws = int(draws.max()) if len(draws) else 1
        control = ranking in drawn or ranking.startswith("random")
        name = display_name(ranking)
        if control:
            name += f" ({n_draws} draws)" if n_draws > 1 else ""
            styles[ranking] = {
                "colour": CONTROL_COLOUR,
                "dash": _CONTROL_DASHES[controls % 3],
                "symbol": f"{SYMBOLS[controls % 3]}-open",
            }
            controls += 1
        else:
            dash = DASHES[free // len(PALETTE) % len(DASHES)]
            styles[ranking] = {
                "colour": PALETTE[free % len(PALETTE)],
                "dash": dash,
                "symbol": SYMBOLS[free % len(SYMBOLS)],
            }
            free += 1
        styles[ranking] |= {"control": control, "name": name}
    return styles


def heads_at(sweep: SweepResult, ranking: str, task: str, metric: str) -> dict[int, list[str]]:
    """Names of the ablated heads at each k, one text per draw."""
    frame = sweep.frame
    here = (frame["ranking"] == ranking) & (frame["task"] == task) & (frame["metric"] == metric)
    rows = frame.loc[here].drop_duplicates(["k", "draw"]).sort_values(["k", "draw"])
    heads: dict[int, list[str]] = {}
    for k, text in zip(rows["k"].tolist(), rows["heads"].tolist(), strict=True):
        heads.setdefault(k, []).append(text)
    return heads


def curve_traces(
    rows: pd.DataFrame,
    style: dict[str, Any],
    heads: dict[int, list[str]],
    i: int,
    level: float,
    *,
    legend: bool,
    kept: bool = False,
) -> list[go.Scatter]:
    """Band and line of one ranking in one panel; ``kept``: k counts the heads kept."""
    name, colour = plain(style["name"]), style["colour"]
    where = {"xaxis": f"x{i}", "yaxis": f"y{i}", "legendgroup": name}
    x, y = rows["k"].tolist(), rows["mean"].tolist()
    traces = []
    band = _band(rows)
    if band[0]:
        traces.append(
            go.Scatter(
                x=band[0],
                y=band[1],
                mode="lines",
                line={"width": 0},
                fill="toself",
                fillcolor=fade(colour, 0.16),
                hoverinfo="skip",
                showlegend=False,
                name=f"{name}, interval",
                **where,
            )
        )
    lines = [f"%{{customdata[{j}]}}" for j in range(5)]
    line = go.Scatter(
        x=x,
        y=y,
        mode="lines+markers",
        name=name,
        showlegend=legend,
        customdata=hover_texts(rows, heads, level, kept=kept),
        line={"color": colour, "width": 2, "dash": style["dash"]},
        marker={"symbol": style["symbol"], "size": 7, "color": colour},
        cliponaxis=False,
        hovertemplate=f"<b>{name}</b><br>{'<br>'.join(lines)}<extra></extra>",
        **where,
    )
    if style["control"] and (rows["n_draws"] > 1).any():
        line.error_y = {
            "type": "data",
            "symmetric": False,
            "thickness": 1,
            "width": 4,
            "color": colour,
            "array": (rows["draw_max"] - rows["mean"]).tolist(),
            "arrayminus": (rows["mean"] - rows["draw_min"]).tolist(),
        }
    return [*traces, line]


def _band(rows: pd.DataFrame) -> tuple[list[float | None], list[float | None]]:
    """Outline of the interval, one closed piece per unbroken run of k that has one."""
    x: list[float | None] = []
    y: list[float | None] = []
    run: list[tuple[float, float, float]] = []
    points = rows[["k", "ci_low", "ci_high"]].to_numpy(dtype=float).tolist()
    for k, low, high in [*points, (np.nan, np.nan, np.nan)]:
        if math.isfinite(low) and math.isfinite(high):
            run.append((k, low, high))
        elif run:
            x += [r[0] for r in run] + [r[0] for r in reversed(run)] + [run[0][0], None]
            y += [r[1] for r in run] + [r[2] for r in reversed(run)] + [run[0][1], None]
            run = []
    return x[:-1], y[:-1]


def hover_texts(
    rows: pd.DataFrame, heads: dict[int, list[str]], level: float, *, kept: bool = False
) -> list[list[str]]:
    """Ready texts of each point: heads ablated (or kept), value, interval, trials, names."""
    out = []
    for row in rows.to_dict("records"):
        k, draws = row["k"], row["n_draws"]
        trials = f"{row['n_trials']} trials" + (f", {draws} draws" if draws > 1 else "")
        if draws > 1:
            trials += f" (means {number(row['draw_min'])} to {number(row['draw_max'])})"
        out.append(
            [
                f"{'no' if k == 0 else k} head{'s' if k > 1 else ''} {'kept' if kept else 'ablated'}",
                f"mean: {number(row['mean'])}",
                f"{percent(level)} CI: {interval(row['ci_low'], row['ci_high'])}",
                trials,
                "" if kept else _names(heads.get(k, [])),
            ]
        )
    return out


def _names(draws: list[str]) -> str:
    """Heads in lines of six, cut after 24; a set that differs from draw to draw is only said to."""
    texts = [t for t in dict.fromkeys(draws) if t]
    if not texts:
        return ""
    if len(texts) > 1:
        return "heads differ by draw"
    names = [n for n in texts[0].replace(",", " ").split() if n]
    shown = [plain(n) for n in names[:24]]
    lines = [", ".join(shown[j : j + 6]) for j in range(0, len(shown), 6)]
    more = f"<br>and {len(names) - 24} more" if len(names) > 24 else ""
    return "heads: " + ",<br>".join(lines) + more


def _lay_out(
    figure: go.Figure, tasks: list[str], curve: pd.DataFrame, label: str, *, proportion: bool, kept: bool
) -> None:
    """Axes, panel titles and size; panels share the range of y."""
    columns = min(len(tasks), _COLUMNS)
    lines = math.ceil(len(tasks) / columns)
    width = 560 if columns == 1 else 340 * columns
    left, right, top, bottom = 66, 16, 92, 104
    plot_width, gap = width - left - right, 44
    panel_width = (plot_width - gap * (columns - 1)) / columns
    panel_height, row_gap = 260, 86
    plot_height = lines * panel_height + (lines - 1) * row_gap
    y_range = [-0.03, 1.03] if proportion else common_range(curve)
    ks = sorted(set(curve["k"].tolist()))
    pad = 0.03 * (ks[-1] - ks[0]) or 0.5
    for i, task in enumerate(tasks, start=1):
        line, column = divmod(i - 1, columns)
        x0 = column * (panel_width + gap) / plot_width
        y1 = 1 - line * (panel_height + row_gap) / plot_height
        domain = [x0, min(x0 + panel_width / plot_width, 1.0)]
        n = "" if i == 1 else str(i)
        figure.update_layout(
            {
                f"xaxis{n}": {
                    "domain": domain,
                    "anchor": f"y{n}",
                    "title": {"text": k_axis(kept)},
                    "tickvals": spread_ticks(ks),
                    "range": [ks[0] - pad, ks[-1] + pad],
                    "showgrid": False,
                },
                f"yaxis{n}": {
                    "domain": [max(y1 - panel_height / plot_height, 0.0), y1],
                    "anchor": f"x{n}",
                    "range": y_range,
                    "title": {"text": plain(label) if column == 0 else ""},
                    "showticklabels": column == 0,
                    "dtick": 0.2 if proportion else None,
                },
            }
        )
        figure.add_annotation(
            text=f"<b>{plain(display_name(task))}</b>",
            x=domain[0],
            y=y1,
            xref="paper",
            yref="paper",
            xanchor="left",
            yanchor="bottom",
            yshift=6,
            showarrow=False,
            font={"size": 14},
        )
    figure.update_layout(
        template=template(),
        width=width,
        height=top + plot_height + bottom,
        hovermode="closest",
        margin={"l": left, "r": right, "t": top, "b": bottom},
    )


def k_axis(kept: bool) -> str:
    """Title of the axis of k."""
    return "Heads kept (number, k)" if kept else "Heads ablated (number, k)"


def common_range(curve: pd.DataFrame) -> list[float] | None:
    """Common range of y with a little room; None (plotly's own) if nothing is finite."""
    values = curve[["mean", "ci_low", "ci_high", "draw_min", "draw_max"]].to_numpy(dtype=float)
    values = values[np.isfinite(values)]
    if not values.size:
        return None
    low, high = float(values.min()), float(values.max())
    room = 0.06 * (high - low) or 0.5
    return [low - room, high + room]
