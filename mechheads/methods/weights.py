"""Scores from a head's weights alone: what it would copy, and what it would match, whatever the prompt.

The circuits are those of Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"
(https://transformer-circuits.pub/2021/framework/index.html). Rows are vectors: a token t enters as ``W_E[t]``.

``fold_norm=True`` (the default) puts in the weights of the norms on the way (before attention, on queries and keys,
after attention, before the unembedding; and LayerNorm's subtraction of the mean). Their scales depend on the prompt,
are positive and are left out, as are all biases. ``fold_norm=False`` takes the matrices as they are.
Position is left out throughout: learned position embeddings, and rotary positions as if query and key stood at one
place. Under grouped queries each query head is scored with the key or value head it reads.
"""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.backends.base import Norm
from mechheads.errors import InvalidInput
from mechheads.kernels import group_size
from mechheads.kernels_weights import eigenvalue_score, own_token_rank, product_norm
from mechheads.methods.patterns import ordinary_tokens
from mechheads.methods.registry import method
from mechheads.model import Model
from mechheads.stats import check_count

_FRAMEWORK = "https://transformer-circuits.pub/2021/framework/index.html"
_SAMPLE = 100  # tokens that ov_token_copying tries


def _exact(x: Tensor) -> Tensor:
    """In float64, on the CPU where the device has no such numbers."""
    x = x.detach()
    return (x.cpu() if x.device.type == "mps" else x).double()


def _reading(norm: Norm | None, W: Float[Tensor, "head d_model d_head"]) -> Float[Tensor, "head d_model d_head"]:
    """``N @ W``: a matrix that reads the stream through a norm ``x -> x @ N`` (its scale left out)."""
    if norm is None:
        return W
    if norm.weight is not None:
        W = W * _exact(norm.weight).to(W.device)[:, None]
    return W - W.mean(-2, keepdim=True) if norm.centers else W


def _writing(W: Float[Tensor, "head row width"], norm: Norm | None) -> Float[Tensor, "head row width"]:
    """``W @ N``: a matrix whose output goes through a norm; weights ``[width]``, or ``[head width]`` each its own."""
    if norm is None:
        return W
    if norm.centers:
        W = W - W.mean(-1, keepdim=True)
    return W if norm.weight is None else W * _exact(norm.weight).to(W.device).reshape(-1, 1, W.shape[-1])


def _checked(fold_norm: bool) -> bool:
    """The option, if it is one of the two: the text "false" would count as true."""
    if not isinstance(fold_norm, bool):
        raise InvalidInput(f"fold_norm is {fold_norm!r}; it must be True or False.")
    return fold_norm


def _ov(
    model: Model, layer: int, fold_norm: bool
) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_head d_model"]]:
    """``W_V`` of each query head and ``W_O``, with the norms before and after attention if asked."""
    W_V, W_O = _exact(model.W_V(layer)), _exact(model.W_O(layer))
    if _checked(fold_norm):
        W_V, W_O = _reading(model.input_norm(layer), W_V), _writing(W_O, model.post_norm(layer))
    return W_V.repeat_interleave(group_size(len(W_O), len(W_V)), 0), W_O


def _qk(
    model: Model, layer: int, fold_norm: bool
) -> tuple[Float[Tensor, "head d_model d_head"], Float[Tensor, "head d_model d_head"]]:
    """``W_Q`` and ``W_K`` of each query head, with the norms before attention and on queries and keys if asked."""
    W_Q, W_K = _exact(model.W_Q(layer)), _exact(model.W_K(layer))
    if _checked(fold_norm):
        norm = model.input_norm(layer)
        on_q, on_k = model.qk_norm(layer) or (None, None)
        W_Q, W_K = _writing(_reading(norm, W_Q), on_q), _writing(_reading(norm, W_K), on_k)
    return W_Q, W_K.repeat_interleave(group_size(len(W_Q), len(W_K)), 0)


@method("ov_copying", kind="weights", unit="", paper=_FRAMEWORK)
def ov_copying(model: Model, layer: int, *, fold_norm: bool = True) -> Float[Tensor, " head"]:
    """Whether a head raises the logit of the tokens it attends to: the eigenvalue copying score.

    ``sum Re(lambda) / sum |lambda|`` over the eigenvalues of the full OV circuit ``W_E W_V W_O W_U [vocab vocab]``,
    whose nonzero ones are those of ``W_O W_U W_E W_V [d_head d_head]`` (Elhage et al. 2021). An unembedding that
    TransformerLens has centred gives another number, though the same probabilities: compare scores of the same weights.

    Args:
        model: The model.
        layer: Layer index.
        fold_norm: Put the norms' weights in (see the module), also the final one's.

    Returns:
        -1 to 1, no unit. Positive: attending to a token raises that token's logit (on average over directions),
        1 for a head that copies; negative: it lowers it. NaN for a head whose circuit is zero.

    Raises:
        InvalidInput: If embedding and unembedding have different vocabularies, or weights are not finite.
        ModelRefused: If the architecture's weights cannot be told apart by head.
    """
    W_V, W_O = _ov(model, layer, fold_norm)
    if fold_norm:
        W_O = _writing(W_O, model.final_norm)
    product = model.vocabulary_products.get("W_U W_E", model.W_U, model.W_E).to(W_O.device)
    return eigenvalue_score(W_O @ product @ W_V).float()


@method("qk_matching", kind="weights", unit="", paper=_FRAMEWORK)
def qk_matching(model: Model, layer: int, *, fold_norm: bool = True) -> Float[Tensor, " head"]:
    """Whether a head attends to tokens like the current one: the eigenvalue score of the QK circuit.

    ``sum Re(lambda) / sum |lambda|`` over the eigenvalues of ``W_E W_Q W_K^T W_E^T [vocab vocab]``, from
    ``W_K^T W_E^T W_E W_Q [d_head d_head]`` (Elhage et al. 2021). Rotary positions are ignored, as if query and key
    stood at the same place; a head whose match depends on distance is not described by it.

    Args:
        model: The model.
        layer: Layer index.
        fold_norm: Put the norms' weights in (see the module).

    Returns:
        -1 to 1, no unit. Positive: the attention score to a token like the current one is raised; negative: lowered.
        NaN for a head whose circuit is zero.

    Raises:
        InvalidInput: If weights are not finite.
        ModelRefused: If the architecture's weights cannot be told apart by head.
    """
    W_Q, W_K = _qk(model, layer, fold_norm)
    W_E = model.W_E
    product = model.vocabulary_products.get("W_E^T W_E", W_E.T, W_E).to(W_Q.device)
    return eigenvalue_score(W_K.mT @ product @ W_Q).float()


@method("ov_norm", kind="weights", unit="norm", paper=_FRAMEWORK)
def ov_norm(model: Model, layer: int, *, fold_norm: bool = True) -> Float[Tensor, " head"]:
    """How much a head can write: the Frobenius norm ``|W_V W_O|`` of its OV circuit.

    Args:
        model: The model.
        layer: Layer index.
        fold_norm: Put the weights of the norms before and after attention in (see the module). Comparable between
            layers only then.

    Returns:
        Norm, at least 0; 0 for a pruned head. No sign.

    Raises:
        ModelRefused: If the architecture's weights cannot be told apart by head.
    """
    return product_norm(*_ov(model, layer, fold_norm)).float()


@method("qk_norm", kind="weights", unit="norm", paper=_FRAMEWORK)
def qk_norm(model: Model, layer: int, *, fold_norm: bool = True) -> Float[Tensor, " head"]:
    """How sharply a head can tell keys apart: the Frobenius norm ``|W_Q W_K^T|`` of its QK circuit.

    The attention scale is not in it.

    Args:
        model: The model.
        layer: Layer index.
        fold_norm: Put the weights of the norms before attention and on queries and keys in (see the module).

    Returns:
        Norm, at least 0. No sign.

    Raises:
        ModelRefused: If the architecture's weights cannot be told apart by head.
    """
    W_Q, W_K = _qk(model, layer, fold_norm)
    return product_norm(W_Q, W_K.mT).float()


@method("ov_token_copying", kind="weights", unit="fraction", paper="arXiv 2211.00593")
def ov_token_copying(
    model: Model, layer: int, *, n_tokens: int | None = None, top_k: int = 5, seed: int = 0, fold_norm: bool = True
) -> Float[Tensor, " head"]:
    """How often a head that attends to a token writes that very token: the copy score of Wang et al. 2022.

    The fraction of a sample of tokens t for which t is among the ``top_k`` logits of ``W_E[t] W_V W_O W_U``. The paper
    reads names after the first MLP; here that MLP is left out and every layer reads the embedding as it is. Ties count
    against the token.

    Args:
        model: The model.
        layer: Layer index.
        n_tokens: Size of the sample of ordinary tokens (no special ones), the same for all heads; None: 100, or all
            of them where the vocabulary has fewer.
        top_k: Logits that count.
        seed: Of the sample.
        fold_norm: Put the norms' weights in (see the module), also the final one's.

    Returns:
        Fraction, 0 to 1, in steps of one over the sample's size; ``top_k / vocab`` by chance. 0 for a pruned head.

    Raises:
        InvalidInput: For options out of range.
        ModelRefused: If the architecture's weights cannot be told apart by head.
    """
    ordinary = ordinary_tokens(model)
    wanted = min(_SAMPLE, len(ordinary)) if n_tokens is None else n_tokens
    n = check_count("n_tokens", wanted, most=len(ordinary))
    top_k = check_count("top_k", top_k, most=model.spec.d_vocab - 1)
    seed = check_count("seed", seed, least=0, most=2**63 - 1)
    sample = np.random.default_rng(seed).choice(ordinary, size=n, replace=False)
    W_V, W_O = _ov(model, layer, fold_norm)
    if fold_norm:
        W_O = _writing(W_O, model.final_norm)
    W_U, W_E = model.W_U.detach(), model.W_E.detach()
    if len(W_E) != W_U.shape[1]:
        raise InvalidInput(
            f"{model.spec.name!r} embeds {len(W_E)} tokens and unembeds {W_U.shape[1]}; copying a token needs one "
            "vocabulary."
        )
    tokens = torch.as_tensor(sample, device=W_U.device)
    values = _exact(W_E[tokens.to(W_E.device)]).to(W_V.device) @ W_V
    rank = own_token_rank(values.to(W_U.device), W_O.to(W_U.device), W_U, tokens)
    return (rank < top_k).float().mean(-1)
