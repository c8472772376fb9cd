"""What is wrong with a set of calibration trials, in sentences with numbers."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.verdicts.decisions import align

# Below this many calibration trials another draw of them would choose other heads (Tulchinskii et al., 2025).
MIN_TRIALS = 400
# An answer may be the right one in this much more than its even share.
_LABEL_SLACK = 0.1
# The rarest rule or depth should have at least this part of the trials of the most frequent.
_LEAST_PART = 0.5
_SHOWN = 8


def concerns(scores: CandidateScores, *, min_trials: int = MIN_TRIALS) -> list[str]:
    """Why heads chosen on these trials may be the wrong ones; empty if nothing speaks against them."""
    found = []
    if len(scores) < min_trials:
        found.append(
            f"There are {len(scores)} calibration trials; with fewer than {min_trials} the choice of heads is unsteady."
        )
    found += _label(scores)
    for column, plural in (("rule", "Rules"), ("depth", "Depths")):
        found += _spread(scores, column, plural)
    return found


def _label(scores: CandidateScores) -> list[str]:
    """Whether one answer is right too often."""
    scores = align(scores)
    counts = scores.n_candidates
    there = np.arange(scores.values.shape[1]) < counts[:, None]
    even = (there / counts[:, None]).mean(axis=0)
    share = np.bincount(scores.labels, minlength=len(even)) / len(scores)
    worst = int((share - even).argmax())
    if share[worst] - even[worst] <= _LABEL_SLACK + 1e-9:
        return []
    texts = {c[worst] for c in scores.candidates if len(c) > worst}
    name = repr(texts.pop()) if len(texts) == 1 else f"candidate {worst}"
    return [
        f"The label is unbalanced: {name} is right in {share[worst]:.2f} of {len(scores)} calibration trials "
        f"(evenly: {even[worst]:.2f})."
    ]


def _spread(scores: CandidateScores, column: str, plural: str) -> list[str]:
    """Whether the values of a column are unevenly frequent, or go with the label."""
    values = scores.column(column)
    counted = Counter(values)
    if len(counted) < 2:
        return []
    ordered = sorted(counted, key=lambda v: (-counted[v], str(v)))
    found = []
    if counted[ordered[-1]] < _LEAST_PART * counted[ordered[0]]:
        told = [f"{shown(v)} {counted[v]}" for v in ordered]
        if len(told) > _SHOWN:
            told = [*told[: _SHOWN - 1], "...", told[-1]]
        found.append(f"{plural} are unbalanced in calibration (trials each): {', '.join(told)}.")
    labels = align(scores).labels
    overall = np.bincount(labels) / len(labels)
    for value in ordered:
        mine = np.array([v == value for v in values])
        share = np.bincount(labels[mine], minlength=len(overall)) / mine.sum()
        away = share - overall
        worst = int(np.abs(away).argmax())
        if abs(away[worst]) > _LABEL_SLACK + 1 / math.sqrt(mine.sum()):
            found.append(
                f"The label goes with the {column}: candidate {worst} is right in {share[worst]:.2f} of {mine.sum()} "
                f"calibration trials with {column} {shown(value)}, overall in {overall[worst]:.2f}."
            )
    return found


def shown(value: Any) -> str:
    """A value of a record as it is told; "none" where the record has none."""
    return "none" if value is None else str(value)
