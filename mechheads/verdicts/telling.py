"""A judgement in plain words."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.heads import HeadSet
from mechheads.stats import Interval

if TYPE_CHECKING:
    import pandas as pd

    from mechheads.verdicts.judgement import Judgement

_NAMED = 3


def judgement_told(judgement: Judgement, alpha: float) -> str:
    """One paragraph: what passes, how good it is, and how the model's own output compares."""
    on = judgement.side(None)
    n = len(judgement.scores(on))
    trials = f"{n} held-out trials" if on == "test" else f"the {n} calibration trials"
    test = judgement.permutation(on)
    base = judgement.baseline(on)
    own = f"The model's own output is right in {base}; guessing would be in {judgement.chance(on):.2f}."
    right, inverse = judgement.significant(alpha, on=on), judgement.inverse(alpha, on=on)
    parts = []
    if len(right):
        parts.append(
            f"{len(right)} of {test.n_heads} heads {_are(right)} right more often than chance on {trials}, corrected "
            f"for having looked at all (p <= {alpha:g}). {_named(judgement, right, test.p, 'Best on calibration', on)}"
        )
        parts += [own, difference_told(str(right[0]), judgement.difference(right[0], on))]
    else:
        least = np.nanmin(test.p) if test.n_heads else float("nan")
        parts.append(
            f"No head passes correction: on {trials} none of {test.n_heads} heads is right more often than chance "
            f"allows for the best of so many (smallest corrected p = {least:.3g}, needed {alpha:g})."
        )
        parts.append(own)
    if len(inverse):
        parts.append(
            f"{len(inverse)} {'head is' if len(inverse) == 1 else 'heads are'} wrong more often than chance (inverse): "
            f"{_named(judgement, inverse, test.p_inverse, 'most on calibration', on)}"
        )
    return " ".join(parts)


def _are(heads: HeadSet) -> str:
    return "is" if len(heads) == 1 else "are"


def _named(judgement: Judgement, heads: HeadSet, p: np.ndarray, lead: str, on: str) -> str:
    """The first few heads with accuracy, interval and p-value."""
    told = [f"{h}, right in {judgement.accuracy_of(h, on)} (p = {p[h.layer, h.head]:.2g})" for h in heads[:_NAMED]]
    lead = f"{lead}: " if len(heads) > 1 else "It is " if lead[0].isupper() else ""
    more = f"; and {len(heads) - _NAMED} more" if len(heads) > _NAMED else ""
    return f"{lead}{'; '.join(told)}{more}."


def difference_told(name: str, difference: Interval, other: str = "the model's own output") -> str:
    """Whether one is better than the other, as far as the interval tells."""
    d = f"{difference.estimate:+.2f} [{difference.low:+.2f}, {difference.high:+.2f}]"
    if difference.low > 0:
        return f"{name} is better than {other} by {d}."
    if difference.high < 0:
        return f"{name} is worse than {other} by {d}."
    return f"{name} cannot be told from {other}: difference {d}."


def plain(value: Any) -> Any:
    """A number JSON can hold; None if undefined."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_rows(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """A table as a list of JSON-ready rows."""
    return [{str(key): plain(v) for key, v in row.items()} for row in frame.to_dict("records")]
