"""The arithmetic of scores from weights alone: tensors in, tensors out, in float64.

The circuits of a head over the vocabulary, such as ``W_E W_V W_O W_U [vocab vocab]``, have rank ``d_head`` at most,
so nothing here is ever larger than ``[d_model d_model]`` or ``[head d_head vocab-chunk]``. Axis names as in
``mechheads.kernels``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from mechheads.errors import InvalidInput

_CHUNK = 8192


def vocabulary_product(
    left: Float[Tensor, "rows vocab"], right: Float[Tensor, "vocab columns"], *, chunk: int = _CHUNK
) -> Float[Tensor, "rows columns"]:
    """``left @ right``, a sum over the whole vocabulary, in float64 on the CPU.

    Chunks of the vocabulary are multiplied in float32 where ``right`` lies and added up in float64.

    Args:
        left: For example ``W_U``.
        right: For example ``W_E``.
        chunk: Tokens at a time; bounds the memory beside the weights.

    Raises:
        InvalidInput: If the two have different vocabularies.
    """
    if left.shape[1] != right.shape[0]:
        raise InvalidInput(
            f"one side has {left.shape[1]} tokens and the other {right.shape[0]}; embedding and unembedding must "
            "share one vocabulary."
        )
    out = torch.zeros(left.shape[0], right.shape[1], dtype=torch.float64)
    for start in range(0, left.shape[1], chunk):
        tokens = slice(start, start + chunk)
        part = left[:, tokens].to(right.device).float() @ right[tokens].float()
        out += part.to("cpu", torch.float64)
    return out


@dataclass
class VocabularyProducts:
    """Products over the vocabulary, remembered for as long as their factors hold the same numbers.

    Every layer of a model needs the same one, and it is the only costly part of the eigenvalue scores. Each request
    takes fingerprints of both factors, so that an edit of a weight is seen, by whatever means it was made.
    """

    _kept: dict[str, tuple[list[Tensor], Tensor]] = field(default_factory=dict, repr=False)

    def get(
        self, name: str, left: Float[Tensor, "rows vocab"], right: Float[Tensor, "vocab columns"]
    ) -> Float[Tensor, "rows columns"]:
        """``left @ right`` in float64 on the CPU, computed when a factor is new or has changed.

        Args:
            name: What the product is called, one for each pair of factors.
            left: Left factor.
            right: Right factor.

        Raises:
            InvalidInput: If the two have different vocabularies.
        """
        tied = left.data_ptr() == right.data_ptr() and left.shape == right.shape[::-1]
        prints = [_fingerprint(right)] if tied else [_fingerprint(left.T), _fingerprint(right)]
        kept = self._kept.get(name)
        if kept is None or not _same(kept[0], prints):
            kept = (prints, vocabulary_product(left.detach(), right.detach()))
            self._kept[name] = kept
        return kept[1]


def _fingerprint(matrix: Float[Tensor, "vocab width"], *, chunk: int = _CHUNK) -> Float[Tensor, " vocab"]:
    """Each row times one fixed random vector: a change of any row that is more than rounding shows in its number."""
    exact = torch.promote_types(matrix.dtype, torch.float32)
    probe = torch.randn(matrix.shape[1], generator=torch.Generator().manual_seed(0)).to(matrix.device, exact)
    return torch.cat([rows.to(exact) @ probe for rows in matrix.detach().split(chunk)])


def _same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    """Whether all fingerprints agree, and lie where they lay."""
    return len(some) == len(others) and all(
        a.device == b.device and torch.equal(a, b) for a, b in zip(some, others, strict=True)
    )


def eigenvalue_score(matrices: Float[Tensor, "head d_head d_head"]) -> Float[Tensor, " head"]:
    """``sum Re(lambda) / sum |lambda|`` over the eigenvalues of each matrix.

    1 if all eigenvalues are positive, -1 if all are negative, 0 if they balance or are imaginary; NaN for a matrix
    without eigenvalues other than 0 (a pruned head). Unchanged by positive factors and by changes of basis.

    Raises:
        InvalidInput: If a matrix holds NaN or infinity.
    """
    if not bool(matrices.isfinite().all()):
        raise InvalidInput("the weights hold NaN or infinity, so they have no eigenvalues; load the model again.")
    values = torch.linalg.eigvals(matrices.double())
    total = values.abs().sum(-1)
    # Rounding leaves eigenvalues of this size where there are none.
    floor = matrices.shape[-1] * torch.finfo(torch.float64).eps * torch.linalg.matrix_norm(matrices.double())
    return torch.where(total > floor, values.real.sum(-1) / total, torch.nan)


def product_norm(
    left: Float[Tensor, "head d_model d_head"], right: Float[Tensor, "head d_head d_model"]
) -> Float[Tensor, " head"]:
    """Frobenius norm of ``left @ right`` for each head, without making that ``[d_model d_model]`` matrix.

    ``|L R|^2 = trace(L^T L R R^T)``.
    """
    left, right = left.double(), right.double()
    squared = ((left.mT @ left) * (right @ right.mT)).sum((-2, -1))
    return squared.clamp(min=0).sqrt()


def own_token_rank(
    values: Float[Tensor, "head token d_head"],
    write: Float[Tensor, "head d_head d_model"],
    W_U: Float[Tensor, "d_model vocab"],
    tokens: Int[Tensor, " token"],
    *,
    chunk: int = _CHUNK,
) -> Int[Tensor, "head token"]:
    """How many other tokens have a logit not below that of the token read, for each head and each token read.

    The logits are ``values @ write @ W_U``; 0 means that the token itself comes first. Ties count against it.

    Args:
        values: What a head carries of each token.
        write: Its output projection.
        W_U: Unembedding.
        tokens: Ids of the tokens that ``values`` were read from.
        chunk: Vocabulary entries at a time.
    """
    values, write = values.float(), write.float()
    own = torch.einsum("hnd,hdm,mn->hn", values, write, W_U[:, tokens].float())
    above = torch.zeros(own.shape, dtype=torch.int64, device=own.device)
    for start in range(0, W_U.shape[1], chunk):
        read = write @ W_U[:, start : start + chunk].float()
        higher = values @ read >= own[..., None]
        # The token itself is no competitor.
        inside = (tokens >= start) & (tokens < start + chunk)
        higher[:, inside, tokens[inside] - start] = False
        above += higher.sum(-1)
    return above
