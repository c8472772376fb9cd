"""QK-score: how well a candidate answer's query matches the statement it judges (arXiv 2502.17017)."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from mechheads.candidates import CandidateActs
from mechheads.errors import InvalidInput
from mechheads.kernels import candidate_qk
from mechheads.methods.registry import method
from mechheads.trials import Trial


@method("qk", kind="candidates", unit="q.k", spans=("statement",), paper="arXiv 2502.17017")
def qk(
    acts: CandidateActs, trial: Trial, *, rotary: bool = True, scaled: bool = False
) -> Float[Tensor, "candidate head"]:
    """QK-score of every candidate: ``S(candidate i) = q[a_i] . k[s]``.

    ``a_i`` is the last token of candidate i, ``s`` the last token of the statement; the head's answer is the candidate
    with the highest score. It reads neither values nor the output projection.

    Args:
        acts: Queries of the candidates and the statement's key, one layer.
        trial: The trial; needs a ``statement`` span, candidates and a label.
        rotary: As the model multiplies them (True), or before rotation; the same where positions are not rotary.
        scaled: Multiply by the model's attention scale, so that scores are attention scores before any soft-cap.

    Returns:
        ``[candidate head]``, unscaled products of query and key (or attention scores). Only differences between
        candidates of one trial mean anything; positive differences speak for a candidate.

    Raises:
        InvalidInput: If an option is neither True nor False: ``"no"`` would count as yes.
    """
    for name, value in (("rotary", rotary), ("scaled", scaled)):
        if not isinstance(value, bool):
            raise InvalidInput(f"{name} is {value!r}; give True or False.")
    products = candidate_qk(acts.q, acts.k)
    return products * acts.model.backend.score_scale(acts.layer) if scaled else products
