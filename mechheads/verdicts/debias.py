"""Whether heads follow the reasoning or the wording: twins with the label turned, and statements without premises."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput
from mechheads.heads import Head, HeadSet
from mechheads.provenance import json_ready
from mechheads.stats import check_count
from mechheads.verdicts.decisions import check_some, label_credit, with_sign
from mechheads.verdicts.evaluation import chosen_heads, head_credit
from mechheads.verdicts.permutation import permutation_test
from mechheads.verdicts.resampling import check_draws, intervals
from mechheads.verdicts.telling import plain_rows

if TYPE_CHECKING:
    import pandas as pd

_DROP = "wording: less often right on flipped twins"
_ALONE = "statement alone tells it"


@dataclass(frozen=True, eq=False, repr=False)
class Debias:
    """Accuracy of heads on original, flipped and statement-only wordings, made by ``debias``.

    Attributes:
        heads: The heads looked at.
        original: ``[pair head]`` float64, how far each head is right on the originals that have a twin.
        flipped: ``[pair head]`` the same on the twins.
        statement_only: ``[trial head]`` the same on the statements alone; None if not given.
        p_statement: ``[head]`` corrected two-sided p-value that accuracy there is not chance; NaN if not given.
        groups: ``[pair]`` groups of the originals.
        statement_groups: ``[trial]`` groups of the statements alone.
        statement_chance: ``[head]`` accuracy on statements alone if labels had nothing to do with answers.
        tolerance: Drop of accuracy that is put up with.
        alpha: Largest p-value that counts.
        level: Confidence level.
        n_boot: Bootstrap samples.
        seed: Seed of the draws.
    """

    heads: HeadSet
    original: np.ndarray
    flipped: np.ndarray
    statement_only: np.ndarray | None
    p_statement: np.ndarray
    groups: tuple[str, ...]
    statement_groups: tuple[str, ...]
    statement_chance: np.ndarray
    tolerance: float
    alpha: float
    level: float
    n_boot: int
    seed: int

    @property
    def flagged(self) -> HeadSet:
        """Heads that exploit wording, in the order looked at; drops are not corrected for the number of heads."""
        return HeadSet(self._frame.loc[self._frame["flagged"], "label"].tolist())

    def frame(self) -> pd.DataFrame:
        """One row per head.

        Returns:
            ``layer head label original original_low original_high flipped flipped_low flipped_high difference
            difference_low difference_high statement_only statement_low statement_high p_statement flagged reason``:
            accuracies with their intervals, ``difference`` = original less flipped (paired), and why a head is flagged.
        """
        return self._frame.copy()

    @cached_property
    def _frame(self) -> pd.DataFrame:
        import pandas as pd

        draws = {"level": self.level, "n_boot": self.n_boot, "seed": self.seed}
        columns: dict[str, Any] = {
            "layer": [h.layer for h in self.heads],
            "head": [h.head for h in self.heads],
            "label": self.heads.labels,
        }
        alone = self.statement_only
        absent = np.full((1, len(self.heads)), np.nan)
        for name, lead, x, groups, low in (
            ("original", "original", self.original, self.groups, 0.0),
            ("flipped", "flipped", self.flipped, self.groups, 0.0),
            ("difference", "difference", self.original - self.flipped, self.groups, -1.0),
            ("statement_only", "statement", absent if alone is None else alone, self.statement_groups or ("",), 0.0),
        ):
            columns[name] = x.mean(axis=0)
            columns[f"{lead}_low"], columns[f"{lead}_high"] = intervals(x, groups, **draws, low=low)
        drop = columns["difference_low"] > self.tolerance
        told = self.p_statement <= self.alpha
        columns["p_statement"] = self.p_statement
        columns["flagged"] = drop | told
        pairs = zip(drop, told, strict=True)
        columns["reason"] = ["; ".join(text for text, yes in ((_DROP, d), (_ALONE, t)) if yes) for d, t in pairs]
        return pd.DataFrame(columns)

    def summary(self) -> str:
        """How many heads exploit wording, and which, in plain words."""
        frame, n = self._frame, len(self.original)
        alone = "" if self.statement_only is None else f" and {len(self.statement_only)} statements alone"
        over = f"{len(self.heads)} {'head' if len(self.heads) == 1 else 'heads'} on {n} pairs of twins{alone}"
        worst = frame.loc[frame["difference"].idxmax()]
        drop = f"{worst['difference']:+.2f} [{worst['difference_low']:+.2f}, {worst['difference_high']:+.2f}]"
        largest = f"The largest drop from original to flipped wording is {drop} ({worst['label']})."
        flagged = frame.loc[frame["flagged"]]
        if not len(flagged):
            return f"Of {over} none is flagged for exploiting wording. {largest}"
        told = [f"{r.label} ({r.reason})" for r in flagged.head(5).itertuples()]
        more = f" and {len(flagged) - 5} more" if len(flagged) > 5 else ""
        caution = (
            f" Flags by a drop are for one head each, not corrected for {len(self.heads)}: some may be luck."
            if len(self.heads) > 1 and flagged["reason"].str.contains(_DROP, regex=False).any()
            else ""
        )
        return f"Of {over} {len(flagged)} flagged for exploiting wording: {', '.join(told)}{more}. {largest}{caution}"

    def __repr__(self) -> str:
        return f"Debias({len(self.heads)} heads on {len(self.original)} pairs, {len(self.flagged)} flagged)"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        fields = ("tolerance", "alpha", "level", "n_boot", "seed")
        return json_ready(
            {
                "n_pairs": len(self.original),
                "n_statements": 0 if self.statement_only is None else len(self.statement_only),
                **{name: getattr(self, name) for name in fields},
                "flagged": self.flagged.labels,
                "summary": self.summary(),
                "heads": plain_rows(self._frame),
            }
        )


def debias(
    original: CandidateScores,
    flipped: CandidateScores,
    statement_only: CandidateScores | None = None,
    *,
    heads: Any = None,
    inverse: Any = (),
    offset: np.ndarray | None = None,
    tolerance: float = 0.03,
    alpha: float = 0.05,
    level: float = 0.95,
    n_boot: int = 2000,
    n_perm: int = 1000,
    seed: int = 0,
) -> Debias:
    """Find heads that exploit wording.

    A twin's record names its original under ``twin``; wording is kept and the label turned (or the label kept and the
    wording turned), so a head that follows the reasoning is as often right on both. A head is flagged if the interval
    of (accuracy on originals - accuracy on their twins) lies above ``tolerance``, or if its accuracy on statements
    without premises differs from chance (``permutation_test``, two-sided, corrected over the heads looked at).

    The first of the two is *not* corrected for the number of heads: each interval is for one head, so of many heads
    that all follow the reasoning some are flagged by luck (at most about ``(1 - level) / 2`` of them, fewer with a
    tolerance above 0). For a check that heads have to pass this errs on the side of caution; a flag of one head among
    hundreds proves little.

    Args:
        original: Scores on the original trials; those without a twin are left out.
        flipped: Scores on label-flipped wordings.
        statement_only: Scores on prompts without premises; labels are the originals'.
        heads: Heads to look at; None for all that have scores everywhere.
        inverse: Heads among them whose sign is turned.
        offset: ``[candidate layer head]`` from ``offsets`` of calibration trials, or None.
        tolerance: Drop of accuracy that is put up with, 0 to 1.
        alpha: Largest corrected p-value that counts.
        level: Confidence level; intervals come from a bootstrap over groups of originals.
        n_boot: Bootstrap samples.
        n_perm: Permutations.
        seed: Seed of both.

    Raises:
        InvalidInput: If a variant names no original or one that is not there, two name the same one, shapes differ, a
            head does not exist or lacks scores, or an option is out of range.
    """
    check_draws(level, n_boot, seed)
    check_count("n_perm", n_perm)
    for name, value in (("tolerance", tolerance), ("alpha", alpha)):
        if not 0 <= value < 1:
            raise InvalidInput(f"{name} is {value!r}; expected a number from 0 to below 1.")
    check_some(original, "original")
    sets = {"flipped": flipped} | ({} if statement_only is None else {"statement_only": statement_only})
    twins = {name: _twins(original, one, name) for name, one in sets.items()}
    paired = original.take(twins["flipped"])
    looked = _all_scored([paired, *sets.values()], offset) if heads is None else HeadSet.parse(heads)
    for one in (paired, *sets.values()):
        looked, turned = chosen_heads(one, looked, inverse)

    def right(one: CandidateScores) -> np.ndarray:
        signed, taken = with_sign(one, offset, turned)
        return head_credit(signed, looked, taken)[np.arange(len(one)), one.labels]

    nan = np.full(len(looked), np.nan)
    p, chance, groups = nan, nan, ()
    if statement_only is not None:
        signed, taken = with_sign(statement_only, offset, turned)
        test = permutation_test(signed, offset=taken, heads=looked, n_perm=n_perm, seed=seed)
        p, chance = (np.array([x[h.layer, h.head] for h in looked]) for x in (test.p_two_sided, test.expected))
        all_groups = original.groups
        groups = tuple(all_groups[i] for i in twins["statement_only"])
    return Debias(
        heads=looked,
        original=right(paired),
        flipped=right(flipped),
        statement_only=None if statement_only is None else right(statement_only),
        p_statement=p,
        groups=paired.groups,
        statement_groups=groups,
        statement_chance=chance,
        tolerance=tolerance,
        alpha=alpha,
        level=level,
        n_boot=n_boot,
        seed=seed,
    )


def _twins(original: CandidateScores, variant: CandidateScores, name: str) -> np.ndarray:
    """``[trial of the variant]`` place of its original."""
    check_some(variant, name)
    if variant.values.shape[2:] != original.values.shape[2:]:
        raise InvalidInput(
            f"{name} has (layers, heads) {variant.values.shape[2:]}, original {original.values.shape[2:]}; both must "
            "come from one model."
        )
    place = {trial: i for i, trial in enumerate(original.trial_ids)}
    found: dict[str, str] = {}
    for trial, twin in zip(variant.trial_ids, variant.column("twin"), strict=True):
        if twin not in place:
            raise InvalidInput(
                f"trial {trial!r} of {name} has twin {twin!r}, which is no trial of original; its record must name the "
                "original it is a variant of."
            )
        if twin in found:
            raise InvalidInput(
                f"trials {found[twin]!r} and {trial!r} of {name} both have twin {twin!r}; give one each."
            )
        found[twin] = trial
    return np.array([place[twin] for twin in found], dtype=np.intp)


def _all_scored(sets: list[CandidateScores], offset: np.ndarray | None) -> HeadSet:
    """Heads that have a score in every trial of every set."""
    right = sum(label_credit(one, offset).mean(axis=0) for one in sets)
    heads = HeadSet(Head(int(i), int(j)) for i, j in np.argwhere(np.isfinite(right)))
    if not len(heads):
        raise InvalidInput("no head has a score in every trial of all sets; there is nothing to compare.")
    return heads
