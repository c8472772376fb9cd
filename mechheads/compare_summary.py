"""A comparison of detectors in numbers and in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from mechheads.agreement import Agreement, Dissociation
from mechheads.methods.registry import get_method
from mechheads.plots.style import plural
from mechheads.sweep_result import SweepResult

if TYPE_CHECKING:
    from mechheads.compare import CompareOptions, TaskResult

CONTROL = "recall"
ALIKE = 0.5  # Spearman from which two detectors are said to rank heads alike
LEVEL = 0.95


# -- numbers ------------------------------------------------------------------------------------


def summarise(
    model: Mapping[str, Any],
    results: Mapping[str, TaskResult],
    apart: Dissociation | None,
    options: CompareOptions,
    k: int,
) -> dict[str, Any]:
    """Every number of the page, JSON-ready."""
    return {
        "model": dict(model),
        "options": {**asdict(options), "tasks": list(results), "methods": list(options.methods)},
        "k": k,
        "tasks": {name: _task_numbers(one, k) for name, one in results.items()},
        "dissociation": None if apart is None else apart.to_dict(),
    }


def _task_numbers(result: TaskResult, k: int) -> dict[str, Any]:
    scores = result.scores
    gated = [one for name, one in scores.items() if get_method(name).gated]
    out: dict[str, Any] = {
        "n_calibration": result.n_calibration,
        "prompt_tokens": list(result.lengths),
        "n_kept": max((one.n_kept for one in gated), default=None),
        "unranked": dict(result.unranked),
        "methods": {name: _method_numbers(result, name, k) for name in result.ranked},
    }
    if result.agreement is not None:
        rows = result.agreement.rows("spearman").dropna(subset="value").sort_values("value", ascending=False)
        out["families"] = families(result.agreement)
        out["pairs"] = [_pair(rows.iloc[i]) for i in sorted({0, len(rows) - 1})] if len(rows) else []
    if result.consensus is not None:
        frame = result.consensus.frame
        out["consensus"] = [
            {"head": row["label"], "detectors": str(row["which"]).split(", ")}
            for row in frame.loc[frame["count"] >= 2].head(2 * k).to_dict("records")
        ]
    if result.sweep is not None:
        out["baseline"] = _cell(result.sweep, "none", 0, result.task)
        out["control_baseline"] = _cell(result.sweep, "none", 0, CONTROL)
        out["random"] = {
            "task": _cell(result.sweep, "random", k, result.task),
            "control": _cell(result.sweep, "random", k, CONTROL),
        }
        out["caveats"] = list(result.sweep.meta["caveats"])
    return out


def _pair(row: pd.Series) -> dict[str, Any]:
    return {
        "a": row["a"],
        "b": row["b"],
        "spearman": _number(row["value"]),
        "ci": [_number(row["ci_low"]), _number(row["ci_high"])],
    }


def _number(value: Any) -> float | None:
    """A JSON number; None for an undefined one."""
    return None if value is None or not np.isfinite(value) else round(float(value), 4)


def _method_numbers(result: TaskResult, name: str, k: int) -> dict[str, Any]:
    """One detector: its heads, its reliability, what taking them out costs."""
    one, sure = result.scores[name], result.reliability[name]
    out: dict[str, Any] = {
        "unit": one.unit,
        "n_kept": one.n_kept,
        "reliability": None if sure is None else _number(sure.reliability),
        "trials_for_0.9": None if sure is None else sure.n,
        "top": one.ranking()[:k].labels,
        "ties": result.ties.get(name, 0),
    }
    if result.sweep is not None:
        lost = result.sweep.compare("none", name, k, "correct", result.task)
        beyond = result.sweep.beyond_control(name, k, "correct", result.task)
        corrected = result.sweep.beyond_control(
            name, k, "correct", result.task, level=1 - (1 - LEVEL) / len(result.ranked), n_boot=20_000
        )
        out |= {
            "ablated": _cell(result.sweep, name, k, result.task),
            "control": _cell(result.sweep, name, k, CONTROL),
            "cost": _number(lost.difference.estimate),
            "cost_ci": [_number(lost.difference.low), _number(lost.difference.high)],
            "beyond_random": _number(beyond.estimate),
            "beyond_random_ci": [_number(beyond.low), _number(beyond.high)],
            "beyond_random_ci_corrected": [_number(corrected.low), _number(corrected.high)],
        }
    return out


def _cell(sweep: SweepResult, ranking: str, k: int, task: str) -> dict[str, Any]:
    """Share of right answers in one cell, with its interval."""
    curve = sweep.curve("correct", task=task)
    rows = curve.loc[(curve["k"] == k) & ((curve["ranking"] == ranking) | (ranking == "none"))]
    row = rows.iloc[0]
    return {
        "mean": _number(row["mean"]),
        "ci": [_number(row["ci_low"]), _number(row["ci_high"])],
        "n_trials": int(row["n_trials"]),
        "n_draws": int(row["n_draws"]),
    }


def families(agreement: Agreement, *, alike: float = ALIKE) -> list[list[str]]:
    """Detectors in groups: each is joined to every other that it ranks heads alike with, directly or through others.

    Args:
        agreement: Pairwise Spearman correlations.
        alike: From this value on two detectors are alike.

    Returns:
        Groups, largest first; a detector like no other stands alone.
    """
    groups = [{name} for name in agreement.names]
    for row in agreement.rows("spearman").to_dict("records"):
        if np.isfinite(row["value"]) and row["value"] >= alike:
            a, b = (next(g for g in groups if row[side] in g) for side in ("a", "b"))
            if a is not b:
                groups.remove(b)
                a |= b
    order = {name: i for i, name in enumerate(agreement.names)}
    ordered = [sorted(g, key=order.__getitem__) for g in groups]
    return sorted(ordered, key=lambda g: (-len(g), order[g[0]]))


# -- words --------------------------------------------------------------------------------------


def verdict(summary: Mapping[str, Any]) -> list[str]:
    """The outcome in plain words, built from the numbers alone."""
    lines = []
    for task, numbers in summary["tasks"].items():
        lines += _task_words(task, numbers, summary["k"])
    if summary["dissociation"] is not None:
        lines.append(_dissociation_words(summary["dissociation"]))
    return lines


def _task_words(task: str, numbers: Mapping[str, Any], k: int) -> list[str]:
    if "baseline" not in numbers:
        return [
            f"On {task} nothing can be said: no detector could rank the heads. "
            + "; ".join(f"{name}: {why}" for name, why in numbers["unranked"].items())
            + "."
        ]
    base = numbers["baseline"]
    lines = [
        f"On {task} the model answers {share(base)} of the {base['n_trials']} test questions; {_chosen_on(numbers)}."
    ]
    if "families" in numbers:
        lines.append(_agreement_words(numbers))
    if numbers.get("consensus") is not None:
        lines.append(_head_words(numbers, k))
    lines.append(_cost_words(numbers, k))
    lines.append(_control_words(numbers, k))
    if numbers["unranked"]:
        lines.append("Not ranked: " + "; ".join(f"{name} ({why})" for name, why in numbers["unranked"].items()) + ".")
    return lines


def _chosen_on(numbers: Mapping[str, Any]) -> str:
    """Which trials choose the heads."""
    if numbers["n_kept"] is None:
        return f"heads are chosen on {numbers['n_calibration']} calibration trials, whether answered or not"
    return (
        f"{numbers['n_kept']} of {numbers['n_calibration']} calibration trials were answered rightly and choose the "
        "heads of the detectors that ask for an answer"
    )


def _agreement_words(numbers: Mapping[str, Any]) -> str:
    together = [g for g in numbers["families"] if len(g) > 1]
    alone = [g[0] for g in numbers["families"] if len(g) == 1]
    parts = []
    if together:
        parts.append(
            "These rank the heads alike: "
            + "; ".join(_names(g) for g in together)
            + f" (each linked to another by a rank correlation of {ALIKE} or more)"
        )
    if alone:
        parts.append(
            f"on {'its' if len(alone) == 1 else 'their'} own {'is' if len(alone) == 1 else 'are'} {_names(alone)}"
        )
    text = "; ".join(parts)
    text = f"{text[0].upper()}{text[1:]}."
    told = [f"{p['a']} and {p['b']} ({p['spearman']:.2f})" for p in numbers["pairs"]]
    if len(told) == 2:
        text += f" Closest are {told[0]}, furthest apart {told[1]}."
    return text


def _head_words(numbers: Mapping[str, Any], k: int) -> str:
    """Heads that most detectors name, and what LOCOS (or the first detector) and attention alone name apart."""
    methods, shared = numbers["methods"], numbers["consensus"]
    half = [row for row in shared if 2 * len(row["detectors"]) > len(methods)]
    if half:
        text = f"In the {k} best of most detectors: {_heads([row['head'] for row in half])}. "
    elif shared:
        most = shared[0]
        text = f"No head is in the {k} best of most detectors; {most['head']} is named by {len(most['detectors'])}. "
    else:
        text = f"No head is in the {k} best of two detectors. "
    a, b = ("locos", "attention_spatial") if {"locos", "attention_spatial"} <= set(methods) else list(methods)[:2]
    only_a = [h for h in methods[a]["top"] if h not in methods[b]["top"]]
    only_b = [h for h in methods[b]["top"] if h not in methods[a]["top"]]
    if not only_a and not only_b:
        return text + f"{a} and {b} name the same {k}."
    return text + f"Of the {k} best, {a} alone has {_heads(only_a)}, {b} alone {_heads(only_b)}."


def _cost_words(numbers: Mapping[str, Any], k: int) -> str:
    """What taking each detector's heads out costs, and which cost more than as many random heads."""
    base = numbers["baseline"]["mean"]
    methods = numbers["methods"]
    ranked = sorted(methods, key=lambda name: -methods[name]["cost"])
    sure = [n for n in ranked if _above_zero(methods[n]["beyond_random_ci_corrected"])]
    likely = [n for n in ranked if _above_zero(methods[n]["beyond_random_ci"]) and n not in sure]
    random = numbers["random"]["task"]
    text = (
        f"With {k} random heads mean-ablated, {share(random)} of the answers are right, against {base:.2f} without "
        f"ablation (mean of {plural(random['n_draws'], 'draw')} that took no tested head). Without a detector's {k} "
        "best heads: " + ", ".join(f"{n} {methods[n]['ablated']['mean']:.2f}" for n in ranked) + ". "
    )
    if random["n_draws"] < 2:
        return text + "With one random draw it cannot be said which of them cost more than random heads."
    m = plural(len(ranked), "detector")
    if sure:
        text += f"These cost more than a random set, also after correcting for {m}: {_names(sure)}."
    else:
        text += f"After correcting for {m}, none can be told from a random set."
    if likely:
        text += f" Taken by {'itself' if len(likely) == 1 else 'themselves'}, {_names(likely)} "
        text += "can" + (" be told from one too." if sure else ".")
    return text


def _above_zero(interval: Sequence[float | None]) -> bool:
    return interval[0] is not None and interval[0] > 0


def _control_words(numbers: Mapping[str, Any], k: int) -> str:
    base = numbers["control_baseline"]["mean"]
    hurt = [
        f"{n} ({m['control']['mean']:.2f})"
        for n, m in numbers["methods"].items()
        if m["control"]["ci"][1] is not None and m["control"]["ci"][1] < base
    ]
    text = f"Recall of facts that stand in no context, the control, is {base:.2f} without ablation"
    if hurt:
        return f"{text}; it falls, interval and all, below that without the heads of {', '.join(hurt)}: not specific."
    return f"{text}, and no detector's {k} heads push its whole interval below that."


def _dissociation_words(apart: Mapping[str, Any]) -> str:
    a, b = apart["names"]
    if not apart["a_only"] and not apart["b_only"]:
        return (
            f"Between the tasks, by {a} against {b}: {_heads(apart['shared'])} in the top {apart['k']} of both, and no "
            "head that clearly belongs to one alone."
        )
    return (
        f"Between the tasks, by {a} against {b}: {_heads(apart['shared'])} in the top {apart['k']} of both; clearly "
        f"belonging to the first alone {_heads(apart['a_only'])}, to the second alone {_heads(apart['b_only'])}."
    )


def _heads(labels: list[str]) -> str:
    if not labels:
        return "no head"
    return ", ".join(labels[:8]) + (f" and {len(labels) - 8} more" if len(labels) > 8 else "")


def _names(names: list[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]


def share(cell: Mapping[str, Any]) -> str:
    """``0.77 [0.60, 0.90]``."""
    low, high = cell["ci"]
    return f"{cell['mean']:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")
