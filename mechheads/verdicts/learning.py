"""How many calibration trials it takes to choose the right heads."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.provenance import json_ready
from mechheads.stats import check_count, check_level, percentiles
from mechheads.verdicts.decisions import baseline_credit, check_some, fitted, label_credit, offsets
from mechheads.verdicts.evaluation import head_credit
from mechheads.verdicts.selection import best_heads, check_criterion
from mechheads.verdicts.subsets import draw_groups
from mechheads.verdicts.telling import plain_rows

if TYPE_CHECKING:
    import pandas as pd

SIZES = (25, 50, 100, 200, 400, 800, 1600)


@dataclass(frozen=True, eq=False, repr=False)
class LearningCurve:
    """Heads chosen on ever more calibration trials, made by ``learning_curve``.

    Attributes:
        draws: One row per size and draw: ``size n draw calibration test overlap heads``. ``n`` is how many trials were
            drawn (below ``size`` where whole groups do not fill it); ``calibration`` the mean accuracy of the chosen
            heads on the very trials they were chosen by (flattered), ``test`` on the test trials, ``overlap`` the part
            of the heads that the whole calibration set chooses too, ``heads`` their labels.
        heads: Heads chosen on the whole calibration set.
        full: Their mean accuracy on the test trials.
        k: Heads chosen.
        chance: Accuracy of guessing on the test trials.
        baseline: Accuracy of the model's own output on the test trials.
        n_calibration: Calibration trials in all.
        n_test: Test trials.
        seed: Seed of the draws.
        offset: ``"none"`` or ``"median"``, what was taken off the scores.
    """

    draws: pd.DataFrame
    heads: HeadSet
    full: float
    k: int
    chance: float
    baseline: float
    n_calibration: int
    n_test: int
    seed: int
    offset: str = "none"

    def bands(self, level: float = 0.9) -> pd.DataFrame:
        """Mean and percentiles over draws, a row per size.

        They show how much the choice of calibration trials matters, on the same test trials throughout; they are no
        confidence interval for other test trials.

        Returns:
            ``size n draws`` and, for each of ``calibration test overlap``, its mean and ``_low`` and ``_high``.
        """
        import pandas as pd

        check_level(level)
        rows = []
        for size, mine in self.draws.groupby("size", sort=True):
            row: dict[str, Any] = {"size": size, "n": float(mine["n"].mean()), "draws": len(mine)}
            for name in ("calibration", "test", "overlap"):
                low, high = percentiles(mine[name].to_numpy(), level)
                row |= {name: float(mine[name].mean()), f"{name}_low": float(low), f"{name}_high": float(high)}
            rows.append(row)
        return pd.DataFrame(rows)

    def enough(self, tolerance: float = 0.01) -> int:
        """Smallest size from which on the mean test accuracy stays within ``tolerance`` of that at the largest size.

        If that is the largest size itself, more trials may well do better still.

        Raises:
            InvalidInput: If the tolerance is negative.
        """
        if not tolerance >= 0:
            raise InvalidInput(f"tolerance is {tolerance!r}; expected a difference of accuracies, 0 or more.")
        bands = self.bands()
        near = (bands["test"] >= bands["test"].iloc[-1] - tolerance - 1e-12).to_numpy()
        return int(bands["size"].iloc[len(near) - int(np.argmin([*near[::-1], False]))])

    def summary(self, tolerance: float = 0.01) -> str:
        """What more trials bring, in plain words."""
        bands, size = self.bands(), self.enough(tolerance)
        one = "head" if self.k == 1 else f"{self.k} heads"
        rows = zip(bands["size"], bands["test"], bands["calibration"], strict=True)
        told = [f"{n}: {test:.2f} (on its own trials {own:.2f})" for n, test, own in rows]
        last = int(bands["size"].iloc[-1])
        end = (
            f"The largest size is the first within {tolerance:g} of itself: more trials may do better still."
            if size == last
            else f"From {size} trials on it stays within {tolerance:g} of what {last} give."
        )
        return (
            f"Accuracy of the chosen {one} on {self.n_test} test trials, by number of calibration trials: "
            f"{'; '.join(told)}. {end} The model's own output is right in {self.baseline:.2f}, guessing in "
            f"{self.chance:.2f}."
        )

    def __repr__(self) -> str:
        sizes = sorted(set(self.draws["size"]))
        return f"LearningCurve({self.k} heads, sizes {', '.join(map(str, sizes))})"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        fields = ("full", "k", "offset", "chance", "baseline", "n_calibration", "n_test", "seed")
        return json_ready(
            {
                **{name: getattr(self, name) for name in fields},
                "heads": self.heads.labels,
                "enough": self.enough(),
                "summary": self.summary(),
                "bands": plain_rows(self.bands()),
            }
        )


def learning_curve(
    scores: CandidateScores,
    *,
    sizes: Sequence[int] | None = None,
    draws: int = 20,
    k: int = 1,
    by: str = "accuracy",
    offset: str = "none",
    normalise: str = "sum",
    calibration: str = "calibration",
    test: str = "test",
    seed: int = 0,
) -> LearningCurve:
    """Choose heads on random parts of the calibration trials and see what they are worth on the test trials.

    A part holds equally many trials of each right answer, and whole groups. An offset is taken from the part alone, as
    one would who had no more trials, and holds for the test trials too.

    Args:
        scores: Scores with both splits.
        sizes: Numbers of calibration trials; None for 25, 50, 100, ... as far as they reach, and all that there are.
        draws: Parts drawn of each size.
        k: Heads to choose.
        by: ``"accuracy"`` or ``"auroc"``, what they are chosen by.
        offset: ``"none"``, or ``"median"`` to take off each head's standing preference (``offsets``).
        normalise: ``"sum"`` or ``"mean"`` over tokens of the model's own log-probabilities.
        calibration: Name of the split heads are chosen on.
        test: Name of the split they are tested on.
        seed: Seed of the draws.

    Warns:
        UserWarning: If sizes are dropped because a balanced part of so many trials cannot be drawn.

    Raises:
        InvalidInput: If no size can be drawn, an option is out of range, fewer than k heads have scores, or a median
            offset cannot be taken.
        UnknownName: If a split is missing, or the criterion or the offset is unknown.
    """
    import pandas as pd

    check_some(scores)
    check_criterion(by)
    for name, value in (("draws", draws), ("k", k)):
        check_count(name, value)
    check_count("seed", seed, least=0)
    chosen_from, held_out, taken = fitted(scores.split(calibration), scores.split(test), offset)
    # Only groups are needed from here on, and parts are made by the hundred.
    chosen_from = replace(chosen_from, records=[{"group": g} for g in chosen_from.groups])
    right = label_credit(chosen_from, taken)
    full = best_heads([chosen_from], [right.mean(axis=0)], k, by=by)
    whole = _tested(held_out, full, taken)
    rows = []
    for size in _sizes(chosen_from, sizes):
        for draw in range(draws):
            places = _balanced(chosen_from, size, np.random.default_rng([seed, size, draw]))
            part = chosen_from.take(places)
            taken = offsets(part, offset)
            mean = (right[places] if taken is None else label_credit(part, taken)).mean(axis=0)
            heads = best_heads([part], [mean], k, by=by)
            rows.append(
                {
                    "size": size,
                    "n": len(places),
                    "draw": draw,
                    "calibration": float(np.mean([mean[h.layer, h.head] for h in heads])),
                    "test": _tested(held_out, heads, taken),
                    "overlap": len(heads & full) / k,
                    "heads": " ".join(heads.labels),
                }
            )
    base = baseline_credit(held_out, normalise=normalise)[np.arange(len(held_out)), held_out.labels]
    return LearningCurve(
        draws=pd.DataFrame(rows),
        heads=full,
        full=whole,
        k=k,
        chance=float((1 / held_out.n_candidates).mean()),
        baseline=float(base.mean()),
        n_calibration=len(chosen_from),
        n_test=len(held_out),
        seed=seed,
        offset=offset,
    )


def _sizes(scores: CandidateScores, wanted: Sequence[int] | None) -> list[int]:
    """The sizes that balanced parts can have, rising."""
    counts = np.bincount(scores.labels, minlength=int(scores.n_candidates.max()))
    most = len(counts) * int(counts.min())
    if wanted is None:
        if not most:
            raise InvalidInput(
                f"candidate {int(counts.argmin())} is right in no calibration trial, so no part is balanced; give "
                "other trials."
            )
        return sorted({size for size in SIZES if size < most} | {most})
    sizes = sorted({check_count("a size", size, least=len(counts)) for size in wanted})
    beyond = [size for size in sizes if size > most]
    if len(beyond) == len(sizes):
        raise InvalidInput(
            f"sizes are {sizes}, but balanced parts of the {len(scores)} calibration trials have at most {most}; give "
            "smaller sizes."
        )
    if beyond:
        warnings.warn(
            f"Sizes {', '.join(map(str, beyond))} are left out: balanced parts of the {len(scores)} calibration trials "
            f"have at most {most}.",
            stacklevel=3,
        )
    return [size for size in sizes if size <= most]


def _balanced(scores: CandidateScores, size: int, rng: np.random.Generator) -> np.ndarray:
    """Places of a random part with equally many trials of each right answer, as far as size divides."""
    width = int(scores.n_candidates.max())
    quota = np.full(width, size // width)
    quota[rng.permutation(width)[: size % width]] += 1
    quota = np.minimum(quota, np.bincount(scores.labels, minlength=width))
    return draw_groups(scores.groups, scores.labels, quota, rng)


def _tested(held_out: CandidateScores, heads: HeadSet, offset: np.ndarray | None) -> float:
    """Mean accuracy of some heads on the test trials."""
    return float(head_credit(held_out, heads, offset)[np.arange(len(held_out)), held_out.labels].mean())
