"""The arithmetic of head scores: tensors in, tensors out, always in float32.

Axis names: ``head`` counts query heads, ``kv_head`` key/value heads, ``step`` the captured query rows,
``key`` the source positions. ``head`` is a multiple of ``kv_head``; query head h reads key/value head
``h // (n_heads // n_key_value_heads)``.
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from jaxtyping import Bool, Float
from torch import Tensor

from mechheads.errors import InvalidInput


def group_size(n_heads: int, n_key_value_heads: int) -> int:
    """Query heads for each key/value head.

    Raises:
        InvalidInput: If the heads do not divide evenly.
    """
    if n_key_value_heads < 1 or n_heads % n_key_value_heads:
        raise InvalidInput(f"{n_heads} query heads cannot share {n_key_value_heads} key/value heads evenly.")
    return n_heads // n_key_value_heads


def expand_kv(x: Float[Tensor, "kv_head key d_head"], n_heads: int) -> Float[Tensor, "head key d_head"]:
    """Repeat each key/value head for the query heads that read it."""
    return x.repeat_interleave(group_size(n_heads, x.shape[0]), dim=0)


def value_gain(
    v: Float[Tensor, "kv_head key d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    direction: Float[Tensor, "step d_model"],
) -> Float[Tensor, "head step key"]:
    """What each source token would write along a direction, before attention weighs it.

    ``gain[h, t, j] = v[j] @ W_O[h] . direction[t]``, in logits if the direction is an unembedding row.
    """
    read = einsum(W_O.float(), direction.float(), "head d_head d_model, step d_model -> head step d_head")
    read = rearrange(read, "(kv group) step d_head -> kv group step d_head", kv=v.shape[0])
    gain = einsum(read, v.float(), "kv group step d_head, kv key d_head -> kv group step key")
    return rearrange(gain, "kv group step key -> (kv group) step key")


def phi(
    pattern: Float[Tensor, "head step key"],
    v: Float[Tensor, "kv_head key d_head"],
    W_O: Float[Tensor, "head d_head d_model"],
    direction: Float[Tensor, "step d_model"],
) -> Float[Tensor, "head step key"]:
    """Contribution of each source token through each head to a direction.

    ``phi[h, t, j] = alpha[h, t, j] * (direction[t] . v[j] @ W_O[h])`` (DESIGN: LOCOS; arXiv 2607.01002).
    Unit: that of the direction (logits for rows of W_U). Positive values push the answer up.
    """
    group_size(pattern.shape[0], v.shape[0])
    return pattern.float() * value_gain(v, W_O, direction)


def contrast(
    values: Float[Tensor, "head step key"],
    needle: Bool[Tensor, " key"],
    visible: Bool[Tensor, "step key"],
) -> tuple[Float[Tensor, "head step"], Float[Tensor, "head step"]]:
    """Needle part and its off-needle counterpart, per step.

    ``plus = sum_{j in needle} values``; ``minus = n / (N - n) * sum_{j not in needle} values``, with N the keys
    visible at that step in that layer and n the needle's positions among them. Where the needle is out of
    sight (a sliding window moved past it) both are 0; where nothing but needle is visible ``minus`` is NaN.
    """
    inside = needle[None, :] & visible
    n = inside.sum(-1).float()
    rest = visible.sum(-1).float() - n
    seen = torch.where(visible, values.float(), torch.zeros((), device=values.device))
    plus = torch.where(inside, seen, 0.0).sum(-1)
    off = torch.where(inside, 0.0, seen).sum(-1)
    return plus, torch.where(n == 0, 0.0, off * (n / rest))


def qk_scores(
    q: Float[Tensor, "head step d_head"], k: Float[Tensor, "kv_head key d_head"]
) -> Float[Tensor, "head step key"]:
    """Unscaled query-key products, ``q[h, t] . k[kv(h), j]``."""
    return einsum(q.float(), expand_kv(k.float(), q.shape[0]), "head step d, head key d -> head step key")


def candidate_qk(
    q: Float[Tensor, "candidate head d_head"], k: Float[Tensor, "kv_head d_head"]
) -> Float[Tensor, "candidate head"]:
    """Unscaled products of each candidate's query with one key, ``q[i, h] . k[kv(h)]`` (arXiv 2502.17017)."""
    keys = expand_kv(k.float()[:, None], q.shape[1])[:, 0]
    return einsum(q.float(), keys, "candidate head d, head d -> candidate head")


def norm_direction(
    direction: Float[Tensor, "step d_model"],
    weight: Float[Tensor, " d_model"] | None,
    scale: Float[Tensor, "step 1"],
    *,
    centers: bool,
) -> Float[Tensor, "step d_model"]:
    """Pull a direction back through a norm whose scale is frozen.

    For ``norm(x) = (x - mean(x)) / scale * weight`` (LayerNorm, ``centers``) or ``x / scale * weight`` (RMSNorm),
    returns the d' with ``d . norm(x) = d' . x`` (bias left out).
    """
    out = direction.float()
    if weight is not None:
        out = out * weight.float()
    if centers:
        out = out - out.mean(-1, keepdim=True)
    return out / scale.float()
