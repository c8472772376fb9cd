"""Chosen heads on held-out trials, beside the model's own output on the same."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.provenance import json_ready
from mechheads.stats import Interval, check_count, holm, paired_permutation
from mechheads.verdicts.balance import shown
from mechheads.verdicts.decisions import answered, baseline_credit, check_some, layer_credit, trial_keys, with_sign
from mechheads.verdicts.resampling import check_draws, group_codes, group_sums, intervals
from mechheads.verdicts.telling import difference_told, plain_rows

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("depth", "distractors", "rule")


@dataclass(frozen=True, eq=False, repr=False)
class Evaluation:
    """Accuracy of chosen heads and of the model, overall and by kind of trial, made by ``evaluate``.

    Attributes:
        scores: Scores on the trials it is about.
        heads: The heads, in the order given.
        inverse: Those of them that answer with their sign turned.
        by: Names of the records' columns it is broken down by.
        scorers: What is scored: the heads' labels, ``"majority"`` where there are several, ``"model"``.
        credit: ``[trial scorer]`` float64, how far each is right: 1, 0, or a part for ties.
        level: Confidence level.
        n_boot: Bootstrap samples.
        n_perm: Sign patterns of the paired test.
        seed: Seed of both.
        caveats: What speaks against the numbers, in sentences; empty if nothing does.
    """

    scores: CandidateScores
    heads: HeadSet
    inverse: HeadSet
    by: tuple[str, ...]
    scorers: tuple[str, ...]
    credit: np.ndarray
    level: float
    n_boot: int
    n_perm: int
    seed: int
    caveats: tuple[str, ...] = ()

    def frame(self) -> pd.DataFrame:
        """One row per kind of trial and scorer.

        Returns:
            ``by value scorer kind n n_groups chance accuracy ci_low ci_high baseline difference difference_low
            difference_high p p_holm``. The rows over all trials have ``by`` ``"overall"`` and ``value`` ``"all"``; a
            record without an entry has the value ``"none"``. ``kind`` is ``"head"``, ``"inverse head"``,
            ``"majority"`` or ``"model"``. ``difference`` is accuracy less ``baseline``, the model's own on the same
            trials, with its paired interval; ``p`` is of the paired permutation test over groups of trials (two-sided),
            ``p_holm`` corrected over the scorers of the same kind of trial. These five are NaN for the model.
        """
        return self._frame.copy()

    def overall(self) -> pd.DataFrame:
        """The rows of ``frame`` over all trials."""
        return self._frame.loc[self._frame["by"] == "overall"].reset_index(drop=True)

    @cached_property
    def _frame(self) -> pd.DataFrame:
        import pandas as pd

        rows = self._cell("overall", "all", np.arange(len(self.scores)))
        for column in self.by:
            values = self.scores.column(column)
            for value in sorted(set(values), key=_order):
                rows += self._cell(column, value, np.flatnonzero([v == value for v in values]))
        frame = pd.DataFrame(rows)
        return frame.assign(value=pd.Series([r["value"] for r in rows], dtype=object))

    def _cell(self, column: str, value: Any, places: np.ndarray) -> list[dict[str, Any]]:
        """Rows of one kind of trial."""
        groups = [self.scores.groups[i] for i in places]
        credit = self.credit[places]
        away = credit[:, :-1] - credit[:, -1:]
        draws = {"level": self.level, "n_boot": self.n_boot, "seed": self.seed}
        low, high = intervals(credit, groups, **draws)
        below, above = intervals(away, groups, **draws, low=-1.0)
        sums = group_sums(away, group_codes(groups))
        p = [paired_permutation(one, np.zeros(len(one)), n_perm=self.n_perm, seed=self.seed) for one in sums.T]
        counts = {
            "n": len(places),
            "n_groups": len(set(groups)),
            "chance": float((1 / self.scores.n_candidates[places]).mean()),
        }
        columns = {
            "accuracy": credit.mean(axis=0),
            "ci_low": low,
            "ci_high": high,
            "baseline": np.full(len(self.scorers), credit[:, -1].mean()),
        }
        compared = {
            "difference": away.mean(axis=0),
            "difference_low": below,
            "difference_high": above,
            "p": p,
            "p_holm": holm(p),
        }
        columns |= {name: [*entries, np.nan] for name, entries in compared.items()}  # the model, last, is what to beat
        told = "none" if value is None else value
        return [
            {"by": column, "value": told, "scorer": scorer, "kind": self._kind(i)}
            | counts
            | {name: float(entries[i]) for name, entries in columns.items()}
            for i, scorer in enumerate(self.scorers)
        ]

    def _kind(self, i: int) -> str:
        if i >= len(self.heads):
            return self.scorers[i]
        return "inverse head" if self.heads[i] in self.inverse else "head"

    def summary(self) -> str:
        """The first head (and the majority) against the model's own output, in plain words."""
        rows = self.overall().set_index("scorer")
        n, groups = len(self.scores), int(rows["n_groups"].iloc[0])
        parts = [
            f"On {n} trials{'' if groups == n else f' in {groups} groups'} the model's own output is right in "
            f"{self._interval(rows, 'model')} (guessing: {rows['chance'].iloc[0]:.2f})."
        ]
        for name in dict.fromkeys((self.scorers[0], *(s for s in self.scorers if s == "majority"))):
            told = f"the majority of {len(self.heads)} heads" if name == "majority" else name
            sign = " (sign turned)" if name == self.scorers[0] and self.heads[0] in self.inverse else ""
            row = rows.loc[name]
            d = Interval(row["difference"], row["difference_low"], row["difference_high"], self.level, n)
            parts.append(f"{told[0].upper()}{told[1:]}{sign} is right in {self._interval(rows, name)}.")
            parts.append(difference_told("It", d))
        for column in self.by:
            cells = self._frame.loc[self._frame["by"] == column]
            first, own = (cells.loc[cells["scorer"] == s, "accuracy"] for s in (self.scorers[0], "model"))
            values = cells.loc[cells["scorer"] == "model", "value"]
            told = [f"{shown(v)}: {a:.2f} against {b:.2f}" for v, a, b in zip(values, first, own, strict=True)]
            parts.append(f"By {column}, {self.scorers[0]} against the model: {'; '.join(told)}.")
        return " ".join([*parts, *self.caveats])

    def _interval(self, rows: pd.DataFrame, name: str) -> Interval:
        row = rows.loc[name]
        return Interval(row["accuracy"], row["ci_low"], row["ci_high"], self.level, len(self.scores))

    def __repr__(self) -> str:
        return f"Evaluation({len(self.heads)} heads on {len(self.scores)} trials, by {', '.join(self.by) or 'nothing'})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        fields = {name: getattr(self, name) for name in ("by", "scorers", "level", "n_boot", "n_perm", "seed")}
        return json_ready(
            {
                "n_trials": len(self.scores),
                "heads": self.heads.labels,
                "inverse": self.inverse.labels,
                **fields,
                "caveats": self.caveats,
                "summary": self.summary(),
                "rows": plain_rows(self._frame),
            }
        )


def evaluate(
    scores: CandidateScores,
    heads: Any,
    *,
    by: Sequence[str] | str | None = None,
    offset: np.ndarray | None = None,
    inverse: Any = (),
    calibration: CandidateScores | None = None,
    normalise: str = "sum",
    level: float = 0.95,
    n_boot: int = 2000,
    n_perm: int = 2000,
    seed: int = 0,
) -> Evaluation:
    """Accuracy of chosen heads and of their majority against the model's own output on the same trials.

    The majority answers what most of the heads answer, a head's vote being its credit and ties counting in part. Votes
    are plain: margins are in units of ``q . k`` that differ between heads, and weights for them would have to be learnt
    from calibration trials, which a few hundred do not pay for.

    Args:
        scores: Scores on trials that the heads were *not* chosen by.
        heads: A HeadSet, or anything one parses from.
        by: Columns of the records to break accuracy down by; None for those of depth, distractors and rule there are.
        offset: ``[candidate layer head]`` from ``offsets`` of the calibration trials, or None.
        inverse: Heads among them whose sign is turned: they answer the candidate they score lowest.
        calibration: Scores that the heads were chosen by, if at hand: trials that stand in both are warned of (the same
            prompt, or the same id where records know no prompt).
        normalise: ``"sum"`` or ``"mean"`` over tokens of the model's own log-probabilities.
        level: Confidence level; intervals come from a bootstrap over groups of trials.
        n_boot: Bootstrap samples.
        n_perm: Sign patterns of the paired permutation test, drawn over groups.
        seed: Seed of both.

    Warns:
        UserWarning: With their number, also in ``caveats``, if trials are of the split ``"calibration"`` or stand in
            ``calibration``: there heads look better than they are.

    Raises:
        InvalidInput: If there are no trials or heads, a head does not exist or lacks scores, an inverse head is not
            among the heads, or no record has a column asked for.
        UnknownName: If the normalisation is unknown.
    """
    check_some(scores)
    check_draws(level, n_boot, seed)
    check_count("n_perm", n_perm)
    chosen, turned = chosen_heads(scores, heads, inverse)
    columns = _columns(scores, by)
    signed, offset = with_sign(scores, offset, turned)
    rows = np.arange(len(scores))
    votes = head_credit(signed, chosen, offset)
    credit = [votes[rows, scores.labels]]
    scorers = [*chosen.labels]
    if len(chosen) > 1:
        scorers.append("majority")
        total = np.round(votes.sum(axis=2), 9)
        credit.append(answered(total, scores.n_candidates)[rows, scores.labels][:, None])
    base = baseline_credit(scores, normalise=normalise)[rows, scores.labels]
    caveats = _seen_before(scores, calibration)
    for caveat in caveats:
        warnings.warn(caveat, stacklevel=2)
    return Evaluation(
        scores=scores,
        heads=chosen,
        inverse=turned,
        by=columns,
        scorers=(*scorers, "model"),
        credit=np.concatenate([*credit, base[:, None]], axis=1),
        level=level,
        n_boot=n_boot,
        n_perm=n_perm,
        seed=seed,
        caveats=caveats,
    )


def _seen_before(scores: CandidateScores, calibration: CandidateScores | None) -> tuple[str, ...]:
    """The caveat that heads are tested where they were chosen."""
    chosen_by = set() if calibration is None else set(trial_keys(calibration))
    keys, splits = trial_keys(scores), scores.column("split")
    n = sum(key in chosen_by or split == "calibration" for key, split in zip(keys, splits, strict=True))
    if not n:
        return ()
    return (
        f"{n} of the {len(scores)} trials are calibration trials, on which heads are chosen, so the accuracy of the "
        "chosen is flattered; evaluate them on scores.split('test').",
    )


def chosen_heads(scores: CandidateScores, heads: Any, inverse: Any) -> tuple[HeadSet, HeadSet]:
    """The heads and those with their sign turned, if they are there and have scores."""
    chosen, turned = HeadSet.parse(heads), HeadSet.parse(inverse)
    if not len(chosen):
        raise InvalidInput("heads is empty; name at least one head, such as 'L9H6'.")
    chosen.check(scores.n_layers, scores.n_heads)
    stray = turned - chosen
    if len(stray):
        raise InvalidInput(f"{stray[0]} is in inverse but not in heads; inverse says which of the heads to turn.")
    there = np.arange(scores.values.shape[1]) < scores.n_candidates[:, None]
    for head in chosen:
        missing = np.isnan(scores.values[:, :, head.layer, head.head]) & there
        if missing.any():
            trial = scores.trial_ids[int(missing.any(axis=1).argmax())]
            raise InvalidInput(f"{head} has no score in trial {trial!r}; leave the head or the trial out.")
    return chosen, turned


def head_credit(scores: CandidateScores, heads: HeadSet, offset: np.ndarray | None) -> np.ndarray:
    """Credit of some heads, ``[trial candidate head]`` in their order."""
    out = np.empty((*scores.values.shape[:2], len(heads)))
    for layer in heads.by_layer():
        credit = layer_credit(scores, layer, offset)
        for i, head in enumerate(heads):
            if head.layer == layer:
                out[:, :, i] = credit[:, :, head.head]
    return out


def _columns(scores: CandidateScores, by: Sequence[str] | str | None) -> tuple[str, ...]:
    """Columns to break down by, if records have them."""
    have = sorted({name for record in scores.records for name in record})
    if by is None:
        return tuple(c for c in COLUMNS if any(v is not None for v in scores.column(c)))
    wanted = (by,) if isinstance(by, str) else tuple(by)
    for name in wanted:
        if name not in have:
            raise UnknownName("column of the records", name, have)
    return wanted


def _order(value: Any) -> tuple[int, float, str]:
    """Numbers rise, then texts, then what is absent."""
    if value is None:
        return 2, 0.0, ""
    if isinstance(value, (int, float)):
        return 0, float(value), ""
    return 1, 0.0, str(value)
