"""LOCOS and DLA: what a head writes toward the answer (arXiv 2607.01002)."""

from __future__ import annotations

from typing import Any

from jaxtyping import Float
from torch import Tensor

from mechheads.capture import LayerActs
from mechheads.kernels import contrast
from mechheads.methods.registry import method
from mechheads.trials import Trial


@method("locos", needs=("pattern", "v"), unit="logits", spans=("needle",), paper="arXiv 2607.01002")
def locos(
    acts: LayerActs, trial: Trial, *, unembed: str = "raw", lens: Any = None
) -> dict[str, Float[Tensor, " head"]]:
    """Logit contribution of a head from the needle, less that from everything else.

    ``phi[t, j] = alpha[t, j] * (u_y . v[j] @ W_O)``; ``plus = sum_{j in needle} phi``;
    ``minus = n / (N - n) * sum_{j not in needle} phi``, with n needle positions among the N keys visible at that
    step; ``S_t = plus - minus``, averaged over the trial's answer steps.

    Args:
        acts: One layer at the answer's steps.
        trial: The trial; needs a ``needle`` span.
        unembed: ``"raw"`` (as published: rows of W_U, no norm), ``"normed"`` (exact share of the logit),
            ``"centered"`` (less the mean over the vocabulary) or ``"tuned_lens"`` (through the layer's translator).
        lens: A ``TunedLens`` or the path of one, for ``unembed="tuned_lens"``.

    Returns:
        ``score``, ``plus`` and ``minus``, in logits (in units of the raw unembedding for ``"raw"``: not a share of the
        logit). Positive: reading the needle raises the answer's logit more than reading elsewhere does.
        Negative scores are kept: they point to heads that push the answer down or serve it from elsewhere.

    Raises:
        UnknownName: If the trial has no needle, or for an unknown ``unembed``.
    """
    plus, minus = contrast(acts.phi(unembed, lens=lens), acts.mask("needle"), acts.visible)
    return {"score": (plus - minus).mean(-1), "plus": plus.mean(-1), "minus": minus.mean(-1)}


@method("dla", needs=("pattern", "v"), unit="logits", paper="arXiv 2607.01002")
def dla(acts: LayerActs, trial: Trial, *, unembed: str = "raw", lens: Any = None) -> Float[Tensor, " head"]:
    """Direct logit attribution: LOCOS without the contrast, ``sum_j phi[t, j]``, mean over answer steps.

    Equal to ``z[t] @ W_O . u_y``. Positive: the head as a whole raises the answer's logit, wherever it reads.

    Args:
        acts: One layer at the answer's steps.
        trial: The trial.
        unembed: As for ``locos``.
        lens: As for ``locos``.

    Returns:
        Score in logits.
    """
    return acts.phi(unembed, lens=lens).sum(-1).mean(-1)
