"""QK-scores read from a plain Hugging Face model: its own projections and norms, rotation by loops over dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tiny
import torch


def queries_and_keys(
    name: str, ref: tiny.Reference, tokens: Sequence[int], *, rotary: bool
) -> list[tuple[np.ndarray, np.ndarray]]:
    """For each layer ``q [pos head d_head]`` and ``k [pos kv_head d_head]`` of one uncached forward."""
    seen: dict[Any, Any] = {}
    handles = []
    for i, attention in enumerate(ref.attentions):
        for part in _modules(name, attention):
            module = getattr(attention, part)
            handles.append(module.register_forward_hook(lambda m, a, out, key=(part, i): seen.__setitem__(key, out[0])))
        handles.append(
            attention.register_forward_pre_hook(
                lambda m, a, kw, i=i: seen.__setitem__(("turn", i), kw.get("position_embeddings")), with_kwargs=True
            )
        )
    ref.logits(tokens)
    for handle in handles:
        handle.remove()
    out = []
    for i in range(tiny.LAYERS):
        q, k = _split(name, seen, i)
        turn = seen["turn", i]
        if rotary and turn is not None:
            cos, sin = (tiny.array(t[0]) for t in turn)
            q, k = _rotated(q, cos, sin), _rotated(k, cos, sin)
        out.append((q, k))
    return out


def _modules(name: str, attention: Any) -> list[str]:
    joint = {"gpt2": ["c_attn"], "neox": ["query_key_value"], "phi3": ["qkv_proj"]}.get(name)
    if joint:
        return joint
    return ["q_norm", "k_norm"] if hasattr(attention, "q_norm") else ["q_proj", "k_proj"]


def _split(name: str, seen: dict[Any, Any], i: int) -> tuple[np.ndarray, np.ndarray]:
    d = tiny.D_HEAD
    if name == "gpt2":
        x = tiny.array(seen["c_attn", i])
        q, k = x[:, : tiny.WIDTH], x[:, tiny.WIDTH : 2 * tiny.WIDTH]
    elif name == "neox":
        x = tiny.array(seen["query_key_value", i]).reshape(-1, tiny.HEADS, 3, d)
        return x[:, :, 0], x[:, :, 1]
    elif name == "phi3":
        x = tiny.array(seen["qkv_proj", i])
        q, k = x[:, : tiny.HEADS * d], x[:, tiny.HEADS * d : (tiny.HEADS + 2) * d]
    else:
        kind = "norm" if ("q_norm", i) in seen else "proj"
        q, k = tiny.array(seen[f"q_{kind}", i]), tiny.array(seen[f"k_{kind}", i])
        if name == "gemma3":  # normalises after it has put heads first
            return q.swapaxes(0, 1), k.swapaxes(0, 1)
    return q.reshape(len(q), -1, d), k.reshape(len(k), -1, d)


def _rotated(x: np.ndarray, cos: np.ndarray, sin: np.ndarray) -> np.ndarray:
    """Each pair (j, j + half) turned by its angle; dimensions past the table stay."""
    out = x.copy()
    half = cos.shape[1] // 2
    if cos.shape[1] * 2 == x.shape[2] and not np.array_equal(cos[:, :half], cos[:, half:]):
        half = cos.shape[1]  # gpt-oss gives each angle once
    for pos in range(len(x)):
        for j in range(half):
            c, s = cos[pos, j], sin[pos, j]
            a, b = x[pos, :, j], x[pos, :, j + half]
            out[pos, :, j], out[pos, :, j + half] = a * c - b * s, b * c + a * s
    return out


def loop_qk(name: str, ref: tiny.Reference, tokens: Sequence[int], candidates: Sequence[Sequence[int]], statement: int,
            *, rotary: bool = True) -> tuple[np.ndarray, np.ndarray]:  # fmt: skip
    """``[candidate layer head]`` QK-scores and ``[candidate]`` log-probabilities, each candidate run by itself."""
    values = np.zeros((len(candidates), tiny.LAYERS, tiny.HEADS))
    logprobs = np.zeros(len(candidates))
    for c, extra in enumerate(candidates):
        whole = [*tokens, *extra]
        rows = torch.from_numpy(ref.logits(whole)).log_softmax(-1).numpy()
        logprobs[c] = sum(rows[len(tokens) - 1 + j, t] for j, t in enumerate(extra))
        for layer, (q, k) in enumerate(queries_and_keys(name, ref, whole, rotary=rotary)):
            for head in range(tiny.HEADS):
                key = k[statement, head // (tiny.HEADS // k.shape[1])]
                values[c, layer, head] = sum(a * b for a, b in zip(q[-1, head], key, strict=True))
    return values, logprobs
