"""The tables of a study's page: numbers as one reads them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from mechheads.plots.style import MISSING
from mechheads.study_summary import StudyStats


def area_rows(stats: StudyStats) -> list[dict[str, Any]]:
    """What each ranking takes away, and where it halves the metric."""
    halved = {
        _cell(row): row["told"] if row["valid"] else "" for row in stats.minimal.to_dict("records")
    }  # fmt: skip
    return [
        {
            "intervention": row["intervention"],
            "task": row["task"],
            "ranking": row["ranking"],
            "mean over k": with_ends(row, "auc", "auc_low", "auc_high"),
            "share lost": with_ends(row, "over", "over_low", "over_high") if row["valid"] else row["reason"],
            "halved at": halved.get(_cell(row), ""),
        }
        for row in stats.areas.to_dict("records")
    ]


def comparison_rows(stats: StudyStats) -> list[dict[str, Any]]:
    """Pairs of rankings over the whole curve."""
    frame = stats.comparisons
    if frame.empty:
        return []
    return [
        {
            "intervention": row["intervention"],
            "task": row["task"],
            "a": row["a"],
            "b": row["b"],
            "up to k": row["k"],
            "a - b": with_ends(row, "difference", "ci_low", "ci_high"),
            "p": p_value(row["p_value"]),
            "p, corrected": p_value(row["p_holm"]),
            "tests": row["n_tests"],
        }
        for row in frame.loc[frame["of"] == "area"].to_dict("records")
    ]


def dissociation_rows(stats: StudyStats) -> list[dict[str, Any]]:
    """Shares lost on target and controls, for each ranking where it halves the target, or else at its greatest k."""
    return [
        {
            "intervention": row["intervention"],
            "target": row["target"],
            "control": row["control"],
            "ranking": row["ranking"],
            "k": row["k"],
            "target loses": with_ends(row, "lost", "lost_low", "lost_high"),
            "control loses": with_ends(row, "control_lost", "control_low", "control_high"),
            "difference": with_ends(row, "difference", "ci_low", "ci_high") if row["valid"] else row["reason"],
            "p, corrected": p_value(row["p_holm"]),
        }
        for row in _at_shown_k(stats)
    ]


def _at_shown_k(stats: StudyStats) -> list[dict[str, Any]]:
    minimal = {_cell(row): row["k"] for row in stats.minimal.to_dict("records")}
    groups: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in stats.dissociation.to_dict("records"):
        key = tuple(str(row[name]) for name in ("intervention", "target", "control", "ranking"))
        groups.setdefault(key, []).append({str(k): v for k, v in row.items()})
    out = []
    for (label, target, _, ranking), rows in groups.items():
        k = minimal.get((label, target, ranking), math.nan)
        here = [row for row in rows if row["k"] == k]
        out.append(here[0] if here else max(rows, key=lambda row: row["k"]))
    return out


def side_rows(stats: StudyStats) -> list[dict[str, Any]]:
    """Necessity and sufficiency."""
    return [
        {
            "intervention": row["intervention"],
            "task": row["task"],
            "ranking": row["ranking"],
            "k": row["k"],
            "lost without them": with_ends(row, "necessity", "necessity_low", "necessity_high"),
            "left with them alone": with_ends(row, "sufficiency", "sufficiency_low", "sufficiency_high"),
            "score with no head": rounded(row["empty"]),
            "so they are": row["call"] if row["valid"] else row["reason"],
        }
        for row in stats.sides.to_dict("records")
    ]


def agreement_rows(stats: StudyStats) -> list[dict[str, Any]]:
    """How alike interventions order the rankings."""
    return [
        {
            "task": target,
            "a": row["a"],
            "b": row["b"],
            "of": "area" if row["of"] == "area" else f"k = {row['k']}",
            "Spearman": rounded(row["spearman"]),
            "Kendall": rounded(row["kendall"]),
            "rankings": row["n_rankings"],
            "note": row["reason"],
        }
        for target, found in stats.agreement.items()
        for row in found.ranks.to_dict("records")
    ]


def as_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame | None:
    """Rows as a table, without an intervention column that says the same in every row; None if there are no rows."""
    if not rows:
        return None
    frame = pd.DataFrame(list(rows))
    single = "intervention" in frame and frame["intervention"].nunique() == 1
    return frame.drop(columns="intervention") if single else frame


def with_ends(row: Mapping[str, Any], value: str, low: str, high: str) -> str:
    """``0.31 [0.20, 0.42]``."""
    ends = f" [{row[low]:.2f}, {row[high]:.2f}]" if math.isfinite(row[low]) and math.isfinite(row[high]) else ""
    return f"{row[value]:.2f}{ends}" if math.isfinite(row[value]) else MISSING


def rounded(value: float) -> str:
    """Two decimals."""
    return f"{value:.2f}" if math.isfinite(value) else MISSING


def p_value(value: float) -> str:
    """Two digits."""
    return f"{value:.2g}" if math.isfinite(value) else MISSING


def listed(names: Sequence[str]) -> str:
    """``a, b and c``."""
    names = list(names)
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"


def _cell(row: Mapping[Any, Any]) -> tuple[str, str, str]:
    return str(row["intervention"]), str(row["task"]), str(row["ranking"])
