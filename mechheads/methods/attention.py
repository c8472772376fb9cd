"""Scores that look at attention alone, the detectors LOCOS is measured against."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from mechheads.capture import LayerActs
from mechheads.kernels import contrast
from mechheads.methods.registry import method
from mechheads.trials import Trial


@method("attention_spatial", needs=("pattern",), unit="probability", spans=("needle",))
def attention_spatial(acts: LayerActs, trial: Trial) -> dict[str, Float[Tensor, " head"]]:
    """LOCOS with ``alpha`` in place of ``phi``: needle attention less its share of the rest.

    ``plus = sum_{j in needle} alpha[t, j]``; ``minus = n / (N - n) * sum_{j not in needle} alpha[t, j]``; mean over
    answer steps (arXiv 2607.01002, the control without OV). Between -n/(N-n) and 1; 0 for uniform attention.

    Args:
        acts: One layer at the answer's steps.
        trial: The trial; needs a ``needle`` span.

    Returns:
        ``score``, ``plus`` (needle mass) and ``minus``, as probabilities.

    Raises:
        UnknownName: If the trial has no needle.
    """
    plus, minus = contrast(acts.need("pattern"), acts.mask("needle"), acts.visible)
    return {"score": (plus - minus).mean(-1), "plus": plus.mean(-1), "minus": minus.mean(-1)}
