"""Where in the network the heads lie that know the answer."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.heads import Head
from mechheads.provenance import json_ready
from mechheads.verdicts.judgement import Judgement
from mechheads.verdicts.telling import plain, plain_rows

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, eq=False, repr=False)
class DepthProfile:
    """Accuracies and significant heads by layer, made by ``depth_profile``.

    Attributes:
        frame: One row per layer: ``layer relative_depth heads best best_head mean significant inverse``.
            ``relative_depth`` is ``(layer + 1/2) / layers``, so a layer's middle between 0 and 1; ``heads`` those with
            scores; ``best`` and ``mean`` their accuracies; ``significant`` and ``inverse`` how many pass at alpha.
        on: ``"test"`` or ``"calibration"``, the trials it is about.
        alpha: Largest corrected p-value of a significant head.
        chance: Accuracy of guessing.
        n_trials: Number of trials.
    """

    frame: pd.DataFrame
    on: str
    alpha: float
    chance: float
    n_trials: int

    def _share(self, column: str, low: float, high: float) -> float:
        depth, found = self.frame["relative_depth"], self.frame[column]
        total = int(found.sum())
        return float(found[(depth >= low) & (depth < high)].sum() / total) if total else math.nan

    @property
    def first_third_share(self) -> float:
        """Share of the significant heads that lie in the first third of the depth; NaN if there are none."""
        return self._share("significant", 0.0, 1 / 3)

    @property
    def last_third_share(self) -> float:
        """Share of them in the last third."""
        return self._share("significant", 2 / 3, 1.0)

    @property
    def inverse_first_third_share(self) -> float:
        """Share of the inverse heads in the first third; NaN if there are none."""
        return self._share("inverse", 0.0, 1 / 3)

    @property
    def mean_depth(self) -> float:
        """Mean relative depth of the significant heads; NaN if there are none."""
        found = self.frame["significant"].to_numpy()
        return float(found @ self.frame["relative_depth"].to_numpy() / found.sum()) if found.sum() else math.nan

    def summary(self) -> str:
        """Where they lie, in plain words."""
        right, inverse = int(self.frame["significant"].sum()), int(self.frame["inverse"].sum())
        if not right and not inverse:
            return f"No head is significant on {self.n_trials} {self.on} trials, so there is no depth to tell."
        parts = []
        for n, what, column in ((right, "right", "significant"), (inverse, "wrong", "inverse")):
            if n:
                layers = self.frame.loc[self.frame[column] > 0, "layer"].tolist()
                parts.append(
                    f"{n} {'head' if n == 1 else 'heads'} significantly more often {what} than chance, in layers "
                    f"{', '.join(map(str, layers))} of {len(self.frame)}; {self._share(column, 0.0, 1 / 3):.0%} in the "
                    f"first third, {self._share(column, 2 / 3, 1.0):.0%} in the last."
                )
        return " ".join(parts)

    def __repr__(self) -> str:
        return f"DepthProfile({len(self.frame)} layers, {int(self.frame['significant'].sum())} significant heads)"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready; undefined numbers are None."""
        shares = ("first_third_share", "last_third_share", "inverse_first_third_share", "mean_depth")
        return json_ready(
            {
                **{name: getattr(self, name) for name in ("on", "alpha", "chance", "n_trials")},
                **{name: plain(getattr(self, name)) for name in shares},
                "summary": self.summary(),
                "layers": plain_rows(self.frame),
            }
        )


def depth_profile(judgement: Judgement, *, on: str | None = None, alpha: float = 0.05) -> DepthProfile:
    """Accuracies and significant heads layer by layer.

    Args:
        judgement: From ``judge``.
        on: ``"calibration"`` or ``"test"``; None for test where there is one.
        alpha: Largest corrected p-value of a significant head.

    Raises:
        InvalidInput: If there are no test trials but they are asked for, or alpha is out of range.
        UnknownName: If ``on`` is neither.
    """
    import pandas as pd

    side = judgement.side(on)
    right = judgement.accuracy(side)
    counts = [judgement.significant(alpha, on=side).by_layer(), judgement.inverse(alpha, on=side).by_layer()]
    rows = []
    for layer, values in enumerate(right):
        defined = np.isfinite(values)
        best = int(np.nanargmax(values)) if defined.any() else None
        rows.append(
            {
                "layer": layer,
                "relative_depth": (layer + 0.5) / len(right),
                "heads": int(defined.sum()),
                "best": math.nan if best is None else float(values[best]),
                "best_head": "" if best is None else str(Head(layer, best)),
                "mean": float(values[defined].mean()) if defined.any() else math.nan,
                "significant": len(counts[0].get(layer, ())),
                "inverse": len(counts[1].get(layer, ())),
            }
        )
    return DepthProfile(pd.DataFrame(rows), side, alpha, judgement.chance(side), len(judgement.scores(side)))
