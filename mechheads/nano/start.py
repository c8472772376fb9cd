"""How nano's weights start: random, but for two heads that begin as what every such model must first discover.

Small models spend most of their training on finding that a token can be looked up by the one before it. nano is trained
on two cores, so it starts with that: a head of the first layer begins as a previous-token head, a head of the second as
one that matches the token it stands on with what the first head wrote, and copies what it finds. Everything is trained
from there; nothing is held fixed.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# Pairs of rotary dimensions, fastest first, that tell neighbours apart.
_FAST = 5
_SHARPNESS = 1.5


@torch.no_grad()
def structured_start(
    model: Any, *, heads: int, kv_heads: int, d_head: int, theta: float, seed: int, reach: int = 1
) -> None:
    """Overwrite the weights of an untrained Llama or Qwen3 with tied embeddings; see the module's text.

    Args:
        model: The model.
        heads: Query heads a layer.
        kv_heads: Key/value heads a layer.
        d_head: Width of a head.
        theta: Base of the rotary angles.
        seed: Seed.
        reach: How many heads of the first layer start by looking back, the n-th at the n-th token before its own.
    """
    draw = torch.Generator().manual_seed(seed)
    embedding = model.model.embed_tokens.weight
    d_model = embedding.shape[1]

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    def orthogonal() -> Tensor:
        return torch.linalg.qr(random(d_model, d_head))[0]

    # A direction all tokens share, which a head can attend by position alone.
    shared = torch.nn.functional.normalize(random(d_model), dim=0)
    own = random(*embedding.shape) / d_model**0.5
    embedding.copy_(own - torch.outer(own @ shared, shared) + shared)
    for layer in model.model.layers:
        attention = layer.self_attn
        attention.q_proj.weight.copy_(random(heads * d_head, d_model) * 0.5 / d_model**0.5)
        attention.k_proj.weight.copy_(random(kv_heads * d_head, d_model) * 0.5 / d_model**0.5)
        attention.v_proj.weight.copy_(random(kv_heads * d_head, d_model) / d_model**0.5)
        attention.o_proj.weight.copy_(random(d_model, heads * d_head) * 0.1 / d_model**0.5)

    code = random(d_head, d_model) / d_model**0.5
    code -= torch.outer(code @ shared, shared)
    written = orthogonal()
    written -= torch.outer(shared, shared @ written)
    copied = orthogonal()
    first, second = (model.model.layers[i].self_attn for i in (0, 1))
    for attention in (first, second):
        for norm in (attention.q_norm, attention.k_norm):
            norm.weight.fill_(_SHARPNESS)
    here = torch.zeros(d_head)
    here[:_FAST] = 1.0
    first.k_proj.weight[:d_head] = torch.outer(here, shared)
    first.q_proj.weight[:d_head] = torch.outer(_turned(here, -1.0, theta), shared)
    first.v_proj.weight[:d_head] = code
    first.o_proj.weight[:, :d_head] = 0.7 * written
    second.q_proj.weight[:d_head] = code
    second.k_proj.weight[:d_head] = written.T
    second.v_proj.weight[:d_head] = copied.T
    second.o_proj.weight[:, :d_head] = copied
    for back in range(2, reach + 1):
        mine = slice((back - 1) * d_head, back * d_head)
        group = (back - 1) // (heads // kv_heads)
        shared_with = slice(group * d_head, (group + 1) * d_head)
        first.k_proj.weight[shared_with] = torch.outer(here, shared)
        first.v_proj.weight[shared_with] = code
        first.q_proj.weight[mine] = torch.outer(_turned(here, -float(back), theta), shared)
        further = orthogonal()
        first.o_proj.weight[:, mine] = 0.7 * (further - torch.outer(shared, shared @ further))


def _turned(x: Tensor, positions: float, theta: float) -> Tensor:
    """A vector rotated as if it stood some positions further on."""
    half = len(x) // 2
    angle = positions / theta ** (torch.arange(half) / half)
    a, b = x[:half], x[half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()])
