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


# Pairs of rotary dimensions, slowest first, that a word keeps over a whole context.
_SLOW = 10
_NEAR = 4


@torch.no_grad()
def hopping_start(model: Any, *, heads: int, kv_heads: int, d_head: int, theta: float, seed: int, hops: int) -> None:
    """Start a model with heads that follow a rule from its condition to its consequence, one layer a step.

    Room in the residual stream is given out beforehand: one part for the words themselves, one for each of the four
    words before, one for what was found. Heads of the first layer write the words before (a previous-token head, one
    for the word before that, and so on). In each of the next ``hops`` layers one head looks two and three places
    behind where the word found last stands (in the first of them: three places behind another place of the word just
    before its own), one behind another place of its own word, and both write what is there. Everything else is random,
    and everything is trained from there.

    Args:
        model: The model: an untrained Qwen3 with tied embeddings.
        heads: Query heads a layer.
        kv_heads: Key/value heads a layer.
        d_head: Width of a head.
        theta: Base of the rotary angles.
        seed: Seed.
        hops: Layers with such heads, from the second.
    """
    draw = torch.Generator().manual_seed(seed)
    embedding = model.model.embed_tokens.weight
    d_model, half, group = embedding.shape[1], d_head // 2, heads // kv_heads
    slow = torch.cat([torch.arange(half - _SLOW, half), torch.arange(d_head - _SLOW, d_head)])
    width = len(slow)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=draw)

    basis = torch.linalg.qr(random(d_model, d_model))[0]
    shared, rest = basis[:, 0], basis[:, 1:]
    places = [rest[:, n * width : (n + 1) * width] for n in range(_NEAR + 1)]
    own = rest[:, (_NEAR + 1) * width :]

    def as_head(room: Tensor) -> Tensor:
        """``[d_head d_model]``: a part of the stream, read into the dimensions that turn slowly."""
        out = torch.zeros(d_head, d_model)
        out[slow] = room.T
        return out

    words = as_head(own @ torch.linalg.qr(random(own.shape[1], width))[0])
    before, found = [as_head(room) for room in places[:_NEAR]], as_head(places[_NEAR])
    embedding.copy_(random(embedding.shape[0], own.shape[1]) / own.shape[1] ** 0.5 @ own.T + shared)
    here = torch.zeros(d_head)
    here[:_FAST] = 1.0
    for i, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        q, k, v, o = (getattr(attention, f"{name}_proj").weight for name in "qkvo")
        for weight, scale in ((q, 0.5), (k, 0.5), (v, 1.0), (o, 0.1)):
            weight.copy_(random(*weight.shape) * scale / d_model**0.5)
        if i <= hops:
            attention.q_norm.weight.fill_(_SHARPNESS)
            attention.k_norm.weight.fill_(_SHARPNESS)
        if i == 0:
            for n in range(_NEAR):
                mine, of_group = slice(n * d_head, (n + 1) * d_head), n // group
                k[of_group * d_head : (of_group + 1) * d_head] = torch.outer(here, shared)
                v[of_group * d_head : (of_group + 1) * d_head] = words
                q[mine] = torch.outer(_turned(here, -float(n + 1), theta), shared)
                o[:, mine] = 0.25 * before[n].T
        elif i <= hops:
            k[:d_head], v[:d_head] = before[2] if i == 1 else before[1] + before[2], words
            q[:d_head] = before[0] if i == 1 else found
            q[d_head : 2 * d_head] = words
            for n, strength in enumerate((1.0, 0.2)):
                o[:, n * d_head : (n + 1) * d_head] = strength * (found + words).T
