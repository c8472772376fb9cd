"""Whether heads chosen on one data set are any good on another."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.provenance import json_ready
from mechheads.stats import check_count, rank_agreement
from mechheads.verdicts.decisions import baseline_credit, check_some, fitted, label_credit, offsets, trial_keys
from mechheads.verdicts.evaluation import chosen_heads, head_credit
from mechheads.verdicts.permutation import permutation_test
from mechheads.verdicts.resampling import check_draws, interval
from mechheads.verdicts.selection import best_heads, check_criterion
from mechheads.verdicts.subsets import draw_groups
from mechheads.verdicts.telling import plain_rows

if TYPE_CHECKING:
    import pandas as pd

MIX = "mix"


@dataclass(frozen=True, eq=False, repr=False)
class Transfer:
    """Heads chosen on each data set and tested on each, made by ``transfer``.

    Attributes:
        names: The data sets, tested on (columns of the matrix).
        rows: What heads were chosen on: the data sets, then ``"mix"`` if asked for.
        heads: The heads chosen, by row.
        cells: One row per pair: ``chosen_on tested_on n accuracy ci_low ci_high chance baseline baseline_low
            baseline_high difference difference_low difference_high right inverted``. ``accuracy`` is the mean of the
            heads' accuracies on the test trials, ``difference`` it less ``baseline``, the model's own, paired.
            ``right`` and ``inverted`` count the heads that are significantly above and below chance there, corrected
            over the chosen heads.
        stability: One row per two rows of the matrix: ``a b spearman overlap expected n_heads``: rank correlation of
            the heads' calibration accuracies (NaN if one is constant), chosen heads shared, and how many chance would
            give.
        trials: Calibration trials behind each row.
        k: Heads chosen.
        alpha: Significance level of ``right`` and ``inverted``.
        level: Confidence level.
        n_boot: Bootstrap samples.
        n_perm: Permutations.
        seed: Seed of the draws.
        offset: ``"none"`` or ``"median"``, what was taken off the scores.
        caveats: What speaks against reading this as transfer, in sentences; empty if nothing does.
    """

    names: tuple[str, ...]
    rows: tuple[str, ...]
    heads: Mapping[str, HeadSet]
    cells: pd.DataFrame
    stability: pd.DataFrame
    trials: Mapping[str, int]
    k: int
    alpha: float
    level: float
    n_boot: int
    n_perm: int
    seed: int
    offset: str = "none"
    caveats: tuple[str, ...] = ()

    @property
    def matrix(self) -> np.ndarray:
        """``[chosen on, tested on]`` mean test accuracy, 0 to 1."""
        return self.cells["accuracy"].to_numpy().reshape(len(self.rows), len(self.names))

    @property
    def baseline(self) -> np.ndarray:
        """``[tested on]`` accuracy of the model's own output."""
        return self.cells["baseline"].to_numpy()[: len(self.names)]

    def frame(self) -> pd.DataFrame:
        """``cells``, a copy."""
        return self.cells.copy()

    def summary(self) -> str:
        """What travels and what does not, in plain words."""
        parts = []
        for name in self.names:
            mine = self.cells.loc[self.cells["tested_on"] == name].set_index("chosen_on")
            told = [f"{row} {mine.loc[row, 'accuracy']:.2f}" for row in self.rows]
            parts.append(
                f"Tested on {name} (the model itself: {mine['baseline'].iloc[0]:.2f}, chance "
                f"{mine['chance'].iloc[0]:.2f}), the {self.k} heads chosen on each set are right in: {', '.join(told)}."
            )
        for r in self.cells.loc[self.cells["inverted"] > 0].to_dict("records"):
            n = r["inverted"]
            verb = "is" if n == 1 else "are"
            parts.append(
                f"{n} of the {self.k} heads chosen on {r['chosen_on']} {verb} wrong more often than chance on "
                f"{r['tested_on']}."
            )
        return " ".join([*parts, *self.caveats])

    def __repr__(self) -> str:
        return f"Transfer({self.k} heads chosen on {', '.join(self.rows)}; tested on {', '.join(self.names)})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        fields = ("names", "rows", "trials", "k", "offset", "alpha", "level", "n_boot", "n_perm", "seed", "caveats")
        return json_ready(
            {
                **{name: getattr(self, name) for name in fields},
                "heads": {row: heads.labels for row, heads in self.heads.items()},
                "summary": self.summary(),
                "cells": plain_rows(self.cells),
                "stability": plain_rows(self.stability),
            }
        )


def transfer(
    sets: Mapping[str, CandidateScores],
    *,
    k: int = 5,
    calibration: str = "calibration",
    test: str = "test",
    mix: bool = True,
    by: str = "accuracy",
    offset: str = "none",
    normalise: str = "sum",
    alpha: float = 0.05,
    level: float = 0.95,
    n_boot: int = 2000,
    n_perm: int = 1000,
    seed: int = 0,
) -> Transfer:
    """Choose k heads on the calibration trials of each set, and test them on the test trials of every set.

    The mix takes equal numbers of calibration trials from each set (as many as the smallest has; whole groups, drawn
    at random) and counts the sets alike.

    A calibration offset belongs to the candidates of one set, so it never travels: heads are chosen with the offset of
    the trials they are chosen by, and tested with the offset of the tested set's own calibration trials. It looks at no
    label, but with it a head is no longer tested on a set of which nothing is known.

    Args:
        sets: Scores of one model by name of the data set, each with both splits.
        k: Heads to choose.
        calibration: Name of the split heads are chosen on.
        test: Name of the split they are tested on.
        mix: Also choose on a mix of all sets.
        by: ``"accuracy"`` or ``"auroc"``, what they are chosen by.
        offset: ``"none"``, or ``"median"`` to take off each head's standing preference, as each set's calibration
            trials show it (``offsets``).
        normalise: ``"sum"`` or ``"mean"`` over tokens of the model's own log-probabilities.
        alpha: Significance level for calling a head right or inverted on a set.
        level: Confidence level.
        n_boot: Bootstrap samples, over groups of test trials.
        n_perm: Permutations.
        seed: Seed of the draws.

    Warns:
        UserWarning: With their number, also in ``caveats``, if two sets share trials (the same prompt, or the same id
            where records know no prompt): heads are then not tested on other data.

    Raises:
        InvalidInput: If there are fewer than two sets, they are of models of different shape, a set is named ``"mix"``,
            fewer than k heads have scores, a chosen head lacks scores in a test set, a median offset cannot be taken in
            a set, or an option is out of range.
        UnknownName: If a set lacks a split, or the criterion or the offset is unknown.
    """
    import pandas as pd

    _check_sets(sets, mix)
    check_criterion(by)
    check_draws(level, n_boot, seed)
    check_count("n_perm", n_perm)
    if not 0 < alpha < 1:
        raise InvalidInput(f"alpha is {alpha!r}; a significance level lies between 0 and 1, such as 0.05.")
    parts, tested = {}, {}
    for name, one in sets.items():
        chosen_from, held_out, taken = fitted(one.split(calibration), one.split(test), offset)
        parts[name], tested[name] = [chosen_from], (held_out, taken)
    caveats = _shared({name: (parts[name][0], tested[name][0]) for name in sets})
    for caveat in caveats:
        warnings.warn(caveat, stacklevel=2)
    if mix:
        parts[MIX] = _mixed({name: part[0] for name, part in parts.items()}, seed)
    rights = {row: [label_credit(p, offsets(p, offset)).mean(axis=0) for p in part] for row, part in parts.items()}
    heads = {row: best_heads(part, rights[row], k, by=by) for row, part in parts.items()}
    draws = {"level": level, "n_boot": n_boot, "seed": seed}
    rows = [
        {"chosen_on": row, "tested_on": name} | _cell(held_out, taken, chosen, normalise, alpha, n_perm, draws)
        for row, chosen in heads.items()
        for name, (held_out, taken) in tested.items()
    ]
    return Transfer(
        names=tuple(sets),
        rows=tuple(parts),
        heads=heads,
        cells=pd.DataFrame(rows),
        stability=_stability({row: np.mean(r, axis=0) for row, r in rights.items()}, heads),
        trials={row: sum(map(len, part)) for row, part in parts.items()},
        k=k,
        alpha=alpha,
        level=level,
        n_boot=n_boot,
        n_perm=n_perm,
        seed=seed,
        offset=offset,
        caveats=caveats,
    )


def _shared(sets: Mapping[str, tuple[CandidateScores, CandidateScores]]) -> tuple[str, ...]:
    """A caveat for each two sets (calibration and test trials by name) that have trials in common."""
    keys = {name: tuple(set(trial_keys(part)) for part in parts) for name, parts in sets.items()}
    found = []
    for (a, (a_chosen, a_tested)), (b, (b_chosen, b_tested)) in itertools.combinations(keys.items(), 2):
        both = (a_chosen | a_tested) & (b_chosen | b_tested)
        crossing = (a_chosen & b_tested) | (b_chosen & a_tested)
        if both:
            worse = f", {len(crossing)} of which choose heads in one and test them in the other" if crossing else ""
            found.append(
                f"{a!r} and {b!r} share {len(both)} trials{worse}: between these two the matrix shows no transfer to "
                "other data."
            )
    return tuple(found)


def _check_sets(sets: Mapping[str, CandidateScores], mix: bool) -> None:
    if not isinstance(mix, bool):
        raise InvalidInput(f"mix is {mix!r}; give True (also choose on all sets mixed) or False.")
    if not isinstance(sets, Mapping) or len(sets) < 2:
        raise InvalidInput(
            "transfer needs a mapping of at least two data sets' scores by name, such as {'a': a, 'b': b}."
        )
    if mix and MIX in sets:
        raise InvalidInput(
            f"a set is named {MIX!r}, the name of the row for all sets mixed; rename it, or give mix=False."
        )
    first = next(iter(sets))
    for name, one in sets.items():
        check_some(one, f"sets[{name!r}]")
        if one.values.shape[2:] != sets[first].values.shape[2:]:
            raise InvalidInput(
                f"{name!r} scores {one.n_layers} layers x {one.n_heads} heads, {first!r} {sets[first].n_layers} x "
                f"{sets[first].n_heads}; transfer compares the heads of one model."
            )


def _mixed(parts: Mapping[str, CandidateScores], seed: int) -> list[CandidateScores]:
    """Equal numbers of trials of each set."""
    rng = np.random.default_rng(seed)
    n = min(map(len, parts.values()))
    drawn = [draw_groups(p.groups, np.zeros(len(p), dtype=np.int64), np.array([n]), rng) for p in parts.values()]
    for name, places in zip(parts, drawn, strict=True):
        if not len(places):
            raise InvalidInput(
                f"no group of {name!r} has at most {n} calibration trials, so the mix can take none; give mix=False."
            )
    return [p.take(places) for p, places in zip(parts.values(), drawn, strict=True)]


def _cell(
    scores: CandidateScores, offset: np.ndarray | None, heads: HeadSet, normalise: str, alpha: float, n_perm: int,
    draws: dict[str, Any],
) -> dict[str, Any]:  # fmt: skip
    """One pair of sets."""
    chosen_heads(scores, heads, ())
    rows = np.arange(len(scores))
    credit = head_credit(scores, heads, offset)[rows, scores.labels].mean(axis=1)
    base = baseline_credit(scores, normalise=normalise)[rows, scores.labels]
    test = permutation_test(scores, offset=offset, heads=heads, n_perm=n_perm, seed=draws["seed"])
    cell: dict[str, Any] = {"n": len(scores)}
    for name, x, low in (("accuracy", credit, 0.0), ("baseline", base, 0.0), ("difference", credit - base, -1.0)):
        one = interval(x, scores.groups, **draws, low=low)
        lead = "ci" if name == "accuracy" else name
        cell |= {name: one.estimate, f"{lead}_low": one.low, f"{lead}_high": one.high}
        if name == "accuracy":
            cell["chance"] = float((1 / scores.n_candidates).mean())
    return cell | {"right": int((test.p <= alpha).sum()), "inverted": int((test.p_inverse <= alpha).sum())}


def _stability(rights: Mapping[str, np.ndarray], heads: Mapping[str, HeadSet]) -> pd.DataFrame:
    """How alike the rows' rankings are."""
    import pandas as pd

    names, out = list(rights), []
    for i, a in enumerate(names):
        for b in names[i + 1 :]:
            both = np.isfinite(rights[a]) & np.isfinite(rights[b])
            x, y = rights[a][both], rights[b][both]
            varied = len(x) > 1 and np.ptp(x) > 0 and np.ptp(y) > 0
            out.append(
                {
                    "a": a,
                    "b": b,
                    "spearman": rank_agreement(x, y).spearman if varied else np.nan,
                    "overlap": len(heads[a] & heads[b]),
                    "expected": len(heads[a]) ** 2 / max(int(both.sum()), 1),
                    "n_heads": int(both.sum()),
                }
            )
    return pd.DataFrame(out)
