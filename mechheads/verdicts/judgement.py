"""Which heads know the right answer, with what is due to chance, and to having looked at many heads, taken off."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head, HeadSet
from mechheads.provenance import json_ready
from mechheads.stats import Interval, check_count
from mechheads.verdicts.balance import concerns
from mechheads.verdicts.decisions import (
    NORMALISATIONS,
    align,
    baseline_credit,
    check_offset,
    check_some,
    fitted,
    label_credit,
    offsets,
)
from mechheads.verdicts.discrimination import auroc, auroc_intervals
from mechheads.verdicts.permutation import PermutationTest, permutation_test
from mechheads.verdicts.resampling import check_draws, interval, intervals
from mechheads.verdicts.telling import judgement_told, plain, plain_rows

if TYPE_CHECKING:
    import pandas as pd

SIDES = ("calibration", "test")
_OPTIONS = ("offset_kind", "normalise", "level", "n_boot", "n_perm", "seed")


@dataclass(frozen=True, eq=False)
class _Side:
    """Everything about the heads on one split, worked out when first asked for."""

    scores: CandidateScores
    offset: np.ndarray | None
    normalise: str
    level: float
    n_boot: int
    n_perm: int
    seed: int

    @cached_property
    def credit(self) -> np.ndarray:
        return label_credit(self.scores, self.offset)

    @cached_property
    def accuracy(self) -> np.ndarray:
        return self.credit.mean(axis=0)

    @cached_property
    def base(self) -> np.ndarray:
        """``[trial]`` how far the model itself is right."""
        rows = np.arange(len(self.scores))
        return baseline_credit(self.scores, normalise=self.normalise)[rows, self.scores.labels]

    @cached_property
    def interval(self) -> tuple[np.ndarray, np.ndarray]:
        shape = self.credit.shape[1:]
        low, high = intervals(self.credit.reshape(len(self.credit), -1), self.scores.groups, **self.draws)
        return low.reshape(shape), high.reshape(shape)

    @cached_property
    def auroc(self) -> np.ndarray:
        return auroc(self.scores)

    @cached_property
    def auroc_interval(self) -> tuple[np.ndarray, np.ndarray]:
        return auroc_intervals(self.scores, **self.draws)

    @cached_property
    def permutation(self) -> PermutationTest:
        return permutation_test(self.scores, offset=self.offset, n_perm=self.n_perm, seed=self.seed)

    @property
    def draws(self) -> dict[str, Any]:
        return {"level": self.level, "n_boot": self.n_boot, "seed": self.seed}


@dataclass(frozen=True, eq=False, repr=False)
class Judgement:
    """What candidate scores say about every head, made by ``judge``.

    The trials' scores are kept and all else is worked out from them when first asked for. Where a method takes ``on``,
    that is ``"calibration"`` or ``"test"``; None means the test trials where there are any, else calibration.

    Attributes:
        calibration: Scores on calibration trials, candidates in one order.
        test: Scores on held-out trials, or None.
        offset: ``[candidate layer head]`` taken off the scores, from calibration trials; None for none.
        offset_kind: ``"none"`` or ``"median"``.
        normalise: How the model's own log-probabilities are compared, ``"sum"`` or ``"mean"`` over tokens.
        level: Confidence level of intervals.
        n_boot: Bootstrap samples.
        n_perm: Permutations.
        seed: Seed of both.
    """

    calibration: CandidateScores
    test: CandidateScores | None
    offset: np.ndarray | None
    offset_kind: str
    normalise: str
    level: float
    n_boot: int
    n_perm: int
    seed: int

    def __post_init__(self) -> None:
        check_some(self.calibration, "calibration")
        check_draws(self.level, self.n_boot, self.seed)
        check_count("n_perm", self.n_perm)
        if self.normalise not in NORMALISATIONS:
            raise UnknownName("normalisation", self.normalise, NORMALISATIONS)
        check_offset(self.calibration, self.offset)
        if self.test is None:
            return
        check_some(self.test, "test")
        check_offset(self.test, self.offset)
        if self.calibration.values.shape[2:] != self.test.values.shape[2:]:
            raise InvalidInput(
                f"calibration has (layers, heads) {self.calibration.values.shape[2:]}, test "
                f"{self.test.values.shape[2:]}; both must come from one model."
            )
        torn = set(self.calibration.groups) & set(self.test.groups)
        if torn:
            raise InvalidInput(
                f"group {min(torn)!r} has trials in calibration and in test ({len(torn)} such groups): heads would be "
                "tested on questions they were chosen by. Split the trials anew with groups kept whole."
            )

    @cached_property
    def _sides(self) -> dict[str, _Side]:
        rest = (self.offset, self.normalise, self.level, self.n_boot, self.n_perm, self.seed)
        sides = {"calibration": _Side(self.calibration, *rest)}
        return sides if self.test is None else {**sides, "test": _Side(self.test, *rest)}

    def side(self, on: str | None) -> str:
        """The split that ``on`` names.

        Raises:
            UnknownName: If it names none.
            InvalidInput: If it names the test trials and there are none.
        """
        if on is None:
            return "calibration" if self.test is None else "test"
        if on not in SIDES:
            raise UnknownName("split of a judgement", on, SIDES)
        if on not in self._sides:
            raise InvalidInput("this judgement has no test trials; give judge(calibration, test), or on='calibration'.")
        return on

    def scores(self, on: str | None = None) -> CandidateScores:
        """The scores of a split."""
        return self._sides[self.side(on)].scores

    def credit(self, on: str | None = None) -> np.ndarray:
        """``[trial layer head]`` how far each head is right (``label_credit``)."""
        return self._sides[self.side(on)].credit

    def accuracy(self, on: str | None = None) -> np.ndarray:
        """``[layer head]`` share of trials each head is right in, 0 to 1; NaN for heads without scores."""
        return self._sides[self.side(on)].accuracy

    def interval(self, on: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """``(low, high)`` of the accuracies, each ``[layer head]``: bootstrap over groups of trials, one head each."""
        return self._sides[self.side(on)].interval

    def auroc(self, on: str | None = None) -> np.ndarray:
        """``[layer head]`` AUROC, 0 to 1, 0.5 is chance (``auroc``)."""
        return self._sides[self.side(on)].auroc

    def auroc_interval(self, on: str | None = None) -> tuple[np.ndarray, np.ndarray]:
        """``(low, high)`` of the AUROCs, each ``[layer head]``."""
        return self._sides[self.side(on)].auroc_interval

    def permutation(self, on: str | None = None) -> PermutationTest:
        """The permutation test over all heads."""
        return self._sides[self.side(on)].permutation

    def p(self, on: str | None = None) -> np.ndarray:
        """``[layer head]`` corrected p-value of being right more often than chance."""
        return self.permutation(on).p

    def p_inverse(self, on: str | None = None) -> np.ndarray:
        """``[layer head]`` corrected p-value of being wrong more often than chance."""
        return self.permutation(on).p_inverse

    def chance(self, on: str | None = None) -> float:
        """Accuracy of guessing: the mean of one over the number of candidates."""
        return float((1 / self.scores(on).n_candidates).mean())

    def baseline(self, on: str | None = None) -> Interval:
        """Accuracy of the model's own output over the same candidates."""
        side = self._sides[self.side(on)]
        return interval(side.base, side.scores.groups, **side.draws)

    def accuracy_of(self, head: Any, on: str | None = None) -> Interval:
        """Accuracy of one head with its interval."""
        at = self._at(head)
        low, high = self.interval(on)
        return Interval(float(self.accuracy(on)[at]), float(low[at]), float(high[at]), self.level, len(self.scores(on)))

    def difference(self, head: Any, on: str | None = None) -> Interval:
        """Accuracy of a head less that of the model's own output on the same trials, -1 to 1, paired."""
        at = self._at(head)
        side = self._sides[self.side(on)]
        return interval(side.credit[:, at[0], at[1]] - side.base, side.scores.groups, **side.draws, low=-1.0)

    def _at(self, head: Any) -> tuple[int, int]:
        one = Head.parse(head)
        HeadSet([one]).check(*self.calibration.values.shape[2:])
        return one.layer, one.head

    def significant(self, alpha: float = 0.05, *, on: str | None = None) -> HeadSet:
        """Heads right more often than chance, corrected for having looked at all; best on calibration first.

        Args:
            alpha: Largest corrected p-value.
            on: ``"calibration"``, ``"test"``, ``"both"`` (must pass on each), or None.
        """
        return self._passing("p", alpha, on, -self.accuracy("calibration"))

    def inverse(self, alpha: float = 0.05, *, on: str | None = None) -> HeadSet:
        """Heads wrong more often than chance, corrected likewise; worst on calibration first."""
        return self._passing("p_inverse", alpha, on, self.accuracy("calibration"))

    def _passing(self, name: str, alpha: float, on: str | None, key: np.ndarray) -> HeadSet:
        if not 0 < alpha < 1:
            raise InvalidInput(f"alpha is {alpha!r}; a significance level lies between 0 and 1, such as 0.05.")
        passing = np.ones(key.shape, dtype=bool)
        for side in SIDES if on == "both" else (self.side(on),):
            passing &= getattr(self, name)(self.side(side)) <= alpha
        flat = np.flatnonzero(passing)
        order = flat[np.argsort(key.ravel()[flat], kind="stable")]
        return HeadSet(Head(*divmod(int(i), key.shape[1])) for i in order)

    def frame(self, alpha: float = 0.05) -> pd.DataFrame:
        """One row per head.

        Returns:
            ``layer head label accuracy_calibration accuracy ci_low ci_high auroc auroc_low auroc_high p_calibration
            p_inverse_calibration p p_inverse direction``. Columns without ``calibration`` are of the test trials, NaN
            without any. ``direction`` is ``"right"`` or ``"inverse"`` for heads that pass at alpha (on test trials
            where there are any), else ``"none"``.
        """
        import pandas as pd

        shape = self.accuracy("calibration").shape
        heads = [Head(*divmod(i, shape[1])) for i in range(shape[0] * shape[1])]
        absent = np.full(shape, np.nan)
        tested = self.test is not None
        ci = self.interval("test") if tested else (absent, absent)
        areas = (self.auroc("test"), *self.auroc_interval("test")) if tested else (absent,) * 3
        columns = {
            "accuracy_calibration": self.accuracy("calibration"),
            "accuracy": self.accuracy("test") if tested else absent,
            **dict(zip(("ci_low", "ci_high"), ci, strict=True)),
            **dict(zip(("auroc", "auroc_low", "auroc_high"), areas, strict=True)),
            "p_calibration": self.p("calibration"),
            "p_inverse_calibration": self.p_inverse("calibration"),
            "p": self.p("test") if tested else absent,
            "p_inverse": self.p_inverse("test") if tested else absent,
        }
        frame = pd.DataFrame(
            {"layer": [h.layer for h in heads], "head": [h.head for h in heads], "label": [str(h) for h in heads]}
            | {name: values.ravel() for name, values in columns.items()}
        )
        found = {h: "right" for h in self.significant(alpha)} | {h: "inverse" for h in self.inverse(alpha)}
        return frame.assign(direction=[found.get(h, "none") for h in heads])

    @property
    def warnings(self) -> list[str]:
        """What speaks against trusting this judgement, in sentences with numbers; empty if nothing does."""
        found = concerns(self.calibration)
        if self.test is None:
            found.append(
                "There are no held-out trials: accuracies are of the trials that heads are chosen by, so the best are "
                "flattered."
            )
        return found

    def verdict(self, alpha: float = 0.05) -> str:
        """What was found, in one paragraph of plain words and numbers."""
        return judgement_told(self, alpha)

    def __repr__(self) -> str:
        n = "no test trials" if self.test is None else f"{len(self.test)} test trials"
        layers, heads = self.calibration.values.shape[2:]
        return f"Judgement({len(self.calibration)} calibration trials, {n}, {layers} layers x {heads} heads)"

    def to_dict(self, alpha: float = 0.05) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        base = self.baseline()
        return json_ready(
            {
                "n_calibration": len(self.calibration),
                "n_test": 0 if self.test is None else len(self.test),
                "on": self.side(None),
                "alpha": alpha,
                **{name: getattr(self, name) for name in _OPTIONS},
                "chance": self.chance(),
                "baseline": {name: plain(value) for name, value in vars(base).items()},
                "significant": self.significant(alpha).labels,
                "inverse": self.inverse(alpha).labels,
                "warnings": self.warnings,
                "verdict": self.verdict(alpha),
                "heads": plain_rows(self.frame(alpha)),
            }
        )


def judge(
    calibration: CandidateScores,
    test: CandidateScores | None = None,
    *,
    offset: str = "none",
    normalise: str = "sum",
    level: float = 0.95,
    n_boot: int = 2000,
    n_perm: int = 1000,
    seed: int = 0,
) -> Judgement:
    """Judge every head: accuracy, AUROC, and p-values corrected for having looked at all heads.

    Accuracy is the share of trials whose right candidate has the head's highest score (less the calibration offset),
    ties counting in part. The p-values are of ``permutation_test``, on calibration and on test trials each over all
    heads. Where trials have the same candidates in changing order, they are brought into one order first (``align``).

    Args:
        calibration: Scores on calibration trials: heads are chosen here.
        test: Scores on held-out trials: heads are reported here. None if there are none.
        offset: ``"none"``, or ``"median"`` to take off each head's standing preference (``offsets``).
        normalise: ``"sum"`` or ``"mean"`` (over tokens) of the model's own log-probabilities (``baseline_credit``).
        level: Confidence level.
        n_boot: Bootstrap samples, over groups of trials.
        n_perm: Permutations.
        seed: Seed of both.

    Raises:
        InvalidInput: If a set is empty, shapes differ, a group stands in both sets, a median offset cannot be taken, or
            an option is out of range.
        UnknownName: If the offset or the normalisation is unknown.
    """
    check_some(calibration, "calibration")
    if test is None:
        calibration = align(calibration)
        taken = offsets(calibration, offset)
    else:
        check_some(test, "test")
        calibration, test, taken = fitted(calibration, test, offset)
    return Judgement(calibration, test, taken, offset, normalise, level, n_boot, n_perm, seed)
