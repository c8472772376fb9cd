"""A head's weights and full circuits, read from a plain Hugging Face model: dense, in float64, no TransformerLens."""

from __future__ import annotations

from typing import Any

import numpy as np
import tiny
import torch

NO_INPUT_NORM = ("olmo2", "olmo2_mha", "olmo3")
POST_NORM = ("gemma2", "gemma3", *NO_INPUT_NORM)
QK_NORM = ("qwen3", "gemma3", *NO_INPUT_NORM)
KV_HEADS = {"gpt2": 4, "opt": 4, "neox": 4, "olmo2_mha": 4, "llama_mqa": 1}


def kv_heads(name: str) -> int:
    """Key/value heads of a tiny model."""
    return KV_HEADS.get(name, 2)


def qkv(reference: tiny.Reference, layer: int) -> dict[str, np.ndarray]:
    """``W_Q W_K W_V [head d_model d_head]`` and ``b_Q b_K b_V [head d_head]``, zeros where there is no bias."""
    name, attention, kv = reference.name, reference.attentions[layer], kv_heads(reference.name)
    sizes = [tiny.HEADS * tiny.D_HEAD, kv * tiny.D_HEAD, kv * tiny.D_HEAD]
    if name in ("gpt2", "phi3"):
        joint = attention.c_attn if name == "gpt2" else attention.qkv_proj
        weight = tiny.array(joint.weight if name == "gpt2" else joint.weight.T)
        bias = np.zeros(sum(sizes)) if joint.bias is None else tiny.array(joint.bias)
        ends = np.cumsum(sizes)
        weights, biases = np.split(weight, ends[:2], axis=1), np.split(bias, ends[:2])
    elif name == "neox":
        joint = attention.query_key_value
        weight = tiny.array(joint.weight).reshape(tiny.HEADS, 3, tiny.D_HEAD, tiny.WIDTH)
        bias = tiny.array(joint.bias).reshape(tiny.HEADS, 3, tiny.D_HEAD)
        weights = [weight[:, i].reshape(-1, tiny.WIDTH).T for i in range(3)]
        biases = [bias[:, i].reshape(-1) for i in range(3)]
    else:
        modules = [attention.q_proj, attention.k_proj, attention.v_proj]
        weights = [tiny.array(m.weight).T for m in modules]
        biases = [np.zeros(n) if m.bias is None else tiny.array(m.bias) for m, n in zip(modules, sizes, strict=True)]
    out = {}
    for letter, weight, bias in zip("QKV", weights, biases, strict=True):
        out[f"W_{letter}"] = weight.reshape(tiny.WIDTH, -1, tiny.D_HEAD).transpose(1, 0, 2)
        out[f"b_{letter}"] = bias.reshape(-1, tiny.D_HEAD)
    return out


def input_norm(reference: tiny.Reference, layer: int) -> Any:
    """The Hugging Face norm module before attention, or None."""
    if reference.name in NO_INPUT_NORM:
        return None
    names = {"gpt2": "ln_1", "opt": "self_attn_layer_norm"}
    return getattr(reference.layers[layer], names.get(reference.name, "input_layernorm"))


def norm_matrix(reference: tiny.Reference, module: Any) -> np.ndarray:
    """The ``[width width]`` matrix N of a norm ``x -> x @ N`` whose scale is left out; the identity for None."""
    if module is None:
        return np.eye(tiny.WIDTH)
    weight = tiny.array(module.weight) + (1 if reference.name.startswith("gemma") else 0)
    n = len(weight)
    centre = np.eye(n) - np.ones((n, n)) / n if reference.name in tiny.LAYER_NORM else np.eye(n)
    return centre @ np.diag(weight)


def embedding(reference: tiny.Reference) -> np.ndarray:
    """``[vocab d_model]`` what each token embeds to."""
    with torch.no_grad():
        return tiny.array(reference.model.get_input_embeddings()(torch.arange(tiny.VOCAB)))


def circuits(reference: tiny.Reference, layer: int, head: int, *, fold: bool) -> dict[str, np.ndarray]:
    """Dense circuits of one head: ``ov qk [d_model d_model]``, ``full_ov full_qk [vocab vocab]``."""
    w, kv = qkv(reference, layer), head // (tiny.HEADS // kv_heads(reference.name))
    eye, d = np.eye(tiny.WIDTH), tiny.D_HEAD
    before = after = final = eye
    on_q = on_k = np.eye(d)
    block, attention = reference.layers[layer], reference.attentions[layer]
    if fold:
        before = norm_matrix(reference, input_norm(reference, layer))
        after = norm_matrix(reference, block.post_attention_layernorm if reference.name in POST_NORM else None)
        final = norm_matrix(reference, reference.final_norm)
        if reference.name in QK_NORM:
            on_q, on_k = norm_matrix(reference, attention.q_norm), norm_matrix(reference, attention.k_norm)
            if len(on_q) > d:  # one norm over all heads
                on_q = on_q[head * d : (head + 1) * d, head * d : (head + 1) * d]
                on_k = on_k[kv * d : (kv + 1) * d, kv * d : (kv + 1) * d]
    embed = embedding(reference)
    ov = before @ w["W_V"][kv] @ reference.w_o(layer)[head] @ after
    qk = before @ w["W_Q"][head] @ on_q @ on_k.T @ w["W_K"][kv].T @ before.T
    return {"ov": ov, "qk": qk, "full_ov": embed @ ov @ final @ reference.w_u(), "full_qk": embed @ qk @ embed.T}


def eigenvalue_score(matrix: np.ndarray) -> float:
    """From all eigenvalues of the ``[vocab vocab]`` matrix."""
    values = np.linalg.eigvals(matrix)
    return float(values.real.sum() / np.abs(values).sum())


def scores(reference: tiny.Reference, layer: int, *, fold: bool) -> dict[str, list[float]]:
    """The weight-only scores of a layer's heads, from dense matrices."""
    out: dict[str, list[float]] = {"ov_copying": [], "qk_matching": [], "ov_norm": [], "qk_norm": []}
    for head in range(tiny.HEADS):
        dense = circuits(reference, layer, head, fold=fold)
        out["ov_copying"].append(eigenvalue_score(dense["full_ov"]))
        out["qk_matching"].append(eigenvalue_score(dense["full_qk"]))
        out["ov_norm"].append(float(np.sqrt((dense["ov"] ** 2).sum())))
        out["qk_norm"].append(float(np.sqrt((dense["qk"] ** 2).sum())))
    return out
