"""Figures and results in one or two plain sentences, for people who do not see the picture."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go

from mechheads.agreement import Agreement, KVGroups
from mechheads.errors import InvalidInput
from mechheads.plots.style import display_name, interval, number, percent, plural
from mechheads.scores import HeadScores
from mechheads.sweep_result import SweepResult


def describe(what: go.Figure | HeadScores | SweepResult | Agreement) -> str:
    """Say in plain words what a figure, or the figure of a result, shows.

    Args:
        what: A figure of ``mechheads.plots`` (its sentence was written when it was drawn), any other plotly
            figure (its title is all that is known), head scores, a sweep (its first metric), or an agreement
            (Spearman's rho, or its first statistic).

    Raises:
        InvalidInput: If it is none of these, or the scores have no kept trial.
    """
    if isinstance(what, HeadScores):
        return describe_scores(what, what.to_frame(ci=True), level=0.95)
    if isinstance(what, SweepResult):
        metric = what.metrics[0]
        return describe_curves(what.curve(metric), display_name(metric), level=0.95, kept=what.kept)
    if isinstance(what, Agreement):
        first = what.frame.iloc[0]
        return describe_agreement(what, str(first["statistic"]), int(first["k"]) or None)
    if isinstance(what, go.Figure):
        layout: Any = what.layout
        meta = layout.meta
        if isinstance(meta, dict) and meta.get("description"):
            return str(meta["description"])
        title, traces = layout.title.text, len(layout.figure.data)
        return f"Figure: {title}." if title else f"Figure without a title, with {traces} traces."
    raise InvalidInput(
        f"cannot describe a value of type {type(what).__name__}; give a plotly Figure, HeadScores, a SweepResult or "
        "an Agreement."
    )


def describe_scores(scores: HeadScores, frame: pd.DataFrame, *, level: float) -> str:
    """The sentence of a heatmap, from the frame that it draws (``HeadScores.to_frame``)."""
    unit = f" ({scores.unit})" if scores.unit else ""
    text = (
        f"Heatmap of {display_name(scores.method)} scores{unit} of {plural(len(frame), 'attention head')} "
        f"({plural(scores.n_layers, 'layer')} by {plural(scores.n_heads, 'head')}), "
        f"mean over {plural(scores.n_kept, 'trial')}."
    )
    ranked = frame.loc[np.isfinite(frame["score"])].sort_values("rank")
    if ranked.empty:
        return f"{text} No head has a defined score."
    top = ranked.iloc[0]
    text += f" The highest is {top['label']} with {number(top['score'])}"
    if "ci_low" in frame and np.isfinite(top["ci_low"]):
        text += f" ({percent(level)} confidence interval {interval(top['ci_low'], top['ci_high'])})"
    if len(ranked) > 1:
        text += ", then " + ", ".join(
            f"{row['label']} ({number(row['score'])})" for _, row in ranked.iloc[1:3].iterrows()
        )
        last = ranked.iloc[-1]
        text += f"; the lowest is {last['label']} with {number(last['score'])}"
    undefined = len(frame) - len(ranked)
    return f"{text}." + (f" Undefined: {plural(undefined, 'head')}." if undefined else "")


def describe_curves(curve: pd.DataFrame, metric: str, *, level: float, kept: bool = False) -> str:
    """The sentences of an ablation curve, from ``SweepResult.curve``; ``kept``: k counts the heads kept."""
    if metric[1:2].islower():  # not an acronym, so it may stand inside a sentence
        metric = metric[:1].lower() + metric[1:]
    heads = "heads kept, all others being ablated" if kept else "ablated heads"
    text = [f"Curves of {metric} against the number of {heads}, with {percent(level)} intervals."]
    for task, of_task in curve.groupby("task", sort=False):
        parts = []
        for ranking, rows in of_task.groupby("ranking", sort=False):
            rows = rows.sort_values("k")
            first, last = rows.iloc[0], rows.iloc[-1]
            change = f"{number(first['mean'])} at {first['k']} heads"
            if len(rows) > 1:
                change += f" to {number(last['mean'])} at {last['k']} heads"
            parts.append(f"{display_name(str(ranking))} from {change}")
        text.append(f"{display_name(str(task))}: {'; '.join(parts)}.")
    return " ".join(text)


def describe_forest(rows: pd.DataFrame, baselines: pd.DataFrame, metric: str, *, k: int, level: float) -> str:
    """The sentences of an ablation forest, from the rows of ``SweepResult.curve`` at k and at 0."""
    if metric[1:2].islower():
        metric = metric[:1].lower() + metric[1:]
    heads = "the highest-ranked head" if k == 1 else f"the {k} highest-ranked heads"

    def told(row: Any) -> str:
        ends = f" ({interval(row['ci_low'], row['ci_high'])})" if np.isfinite(row["ci_low"]) else ""
        return f"{number(row['mean'])}{ends}"

    text = [
        f"Dot plot of {metric} after ablating {heads} of {plural(rows['ranking'].nunique(), 'ranking')}, with "
        f"{percent(level)} intervals."
    ]
    for task, of_task in rows.groupby("task", sort=False):
        known = of_task.loc[np.isfinite(of_task["mean"])].sort_values("mean", kind="stable")
        parts = [f"{told(row)} without ablation" for row in baselines.to_dict("records") if row["task"] == task]
        # The three lowest, the highest, and random heads: the others are in the table of the sweep.
        shown = known["ranking"].isin([*known["ranking"].iloc[:3], *known["ranking"].iloc[-1:]])
        shown |= known["ranking"].str.startswith("random") | (known["n_draws"] > 1)
        parts += [f"{display_name(str(row['ranking']))} {told(row)}" for row in known.loc[shown].to_dict("records")]
        parts += [f"{len(known) - int(shown.sum())} others between"] if not shown.all() else []
        missing = len(of_task) - len(known)
        parts += [f"{plural(missing, 'ranking')} without a value"] if missing else []
        text.append(f"{display_name(str(task))}: {'; '.join(parts)}.")
    return " ".join(text)


_STATISTIC = {
    "spearman": "Spearman's rank correlation",
    "kendall": "Kendall's rank correlation",
    "overlap": "the number of shared heads among the top {k}",
    "jaccard": "the Jaccard index of the top {k} heads",
}


def describe_agreement(result: Agreement, statistic: str, k: int | None) -> str:
    """The sentences of an agreement matrix: which methods agree most and least."""
    rows = result.rows(statistic, k)
    name = _STATISTIC[statistic].format(k=int(rows["k"].iloc[0]))
    text = f"Matrix of {name} between {plural(len(result.names), 'method')}."
    known = rows.loc[np.isfinite(rows["value"])].sort_values("value", ascending=False, kind="stable")
    if known.empty:
        return f"{text} No pair has a value: {rows['reason'].iloc[0]}."

    def told(row: Any) -> str:
        ends = f", {percent(result.level)} confidence interval {interval(row['ci_low'], row['ci_high'])}"
        return (
            f"{display_name(row['a'])} and {display_name(row['b'])} ({number(row['value'])}"
            f"{ends if np.isfinite(row['ci_low']) else ''})"
        )

    text += f" The closest are {told(known.iloc[0])}"
    if len(known) > 1:
        text += f"; the farthest apart {told(known.iloc[-1])}"
    missing = len(rows) - len(known)
    text += "."
    if statistic in ("overlap", "jaccard"):
        text += f" Chance would give {number(float(known['expected'].iloc[0]))}."
    return text + (f" {plural(missing, 'pair')} without a value." if missing else "")


def describe_overlap(result: Agreement, reference: str) -> str:
    """The sentences of overlap curves: shared heads at the smallest and the greatest k."""
    least, most = min(result.ks), max(result.ks)
    ks = f"k from {least} to {most}" if least < most else f"k = {least}"
    text = f"Curves of the share of the top k heads in common with {display_name(reference)}, {ks}."
    middle = result.ks[len(result.ks) // 2]
    rows = result.rows("overlap", middle).sort_values("value", ascending=False, kind="stable")
    parts = [
        f"{display_name(row['b'])} {number(row['value'])}"
        for row in rows.to_dict("records")
        if np.isfinite(row["value"])
    ]
    if parts:
        chance = number(float(rows["expected"].iloc[0]))
        text += f" Shared at k = {middle}: {', '.join(parts)}; by chance {chance}."
    return text


def describe_pair(result: Agreement, names: tuple[str, str], k: int, *, drawn: int, total: int) -> str:
    """The sentences of a scatter of two methods."""
    a, b = (display_name(name) for name in names)
    text = f"Scatter of {b} against {a} scores of {plural(total, 'attention head')}."
    if drawn < total:
        text += f" Only {drawn} are drawn: the top heads and a random draw of the others."
    rho, shared = result.pair(*names), result.pair(*names, "overlap", k)
    if not np.isfinite(rho["value"]):
        return f"{text} There is no rank correlation: {rho['reason']}."
    text += f" Spearman's rank correlation is {number(rho['value'])}"
    if np.isfinite(rho["ci_low"]):
        text += f" ({percent(result.level)} confidence interval {interval(rho['ci_low'], rho['ci_high'])})"
    return (
        f"{text}; the two share {number(shared['value'])} of their top {k} heads, where chance would give "
        f"{number(shared['expected'])}."
    )


def describe_profile(frame: pd.DataFrame, n_layers: int, k: int) -> str:
    """The sentences of a layer profile, from the frame that it draws (``profile_frame``)."""
    parts = []
    for method, rows in frame.groupby("method", sort=False):
        name = display_name(str(method))
        if not np.isfinite(rows["mass_share"]).any():
            parts.append(f"{name} has no positive score")
            continue
        peak = rows.loc[rows["mass_share"].idxmax()]
        most = rows.loc[rows["top"].idxmax()]
        said = f"{name} peaks in layer {peak['layer']} ({number(100 * float(peak['mass_share']), 2)}% of its mass)"
        if frame["method"].nunique() <= 4:
            said += f" and has most top heads, {number(most['top'])}, in layer {most['layer']}"
        parts.append(said)
    return (
        f"Profile over {plural(n_layers, 'layer')}: positive score mass, and where the top {k} heads lie. "
        f"{'; '.join(parts)}."
    )


def trials_behind(groups: KVGroups) -> str:
    """``"mean over 18 trials"``, or that there are none."""
    return f"mean over {plural(groups.n_trials, 'trial')}" if groups.n_trials else "from the weights alone"


def describe_groups(groups: KVGroups, listed: pd.DataFrame) -> str:
    """The sentences of a KV group view."""
    layers, n_groups = groups.values.shape
    unit = f" ({groups.unit})" if groups.unit else ""
    how = {"max": "highest", "mean": "mean", "sum": "summed"}[groups.how]
    text = (
        f"Map of the {how} {display_name(groups.method)} score{unit} of {plural(layers * n_groups, 'KV group')} "
        f"({plural(layers, 'layer')} by {plural(n_groups, 'key/value head')}), "
        f"{trials_behind(groups)}, and a list of the highest {len(listed)}."
    )
    top = listed.iloc[0]
    text += f" The highest is {top['label']} with {number(top['score'])}"
    if np.isfinite(top["ci_low"]):
        text += f" ({percent(groups.level)} confidence interval {interval(top['ci_low'], top['ci_high'])})"
    return f"{text}, through {top['best_head']}."
