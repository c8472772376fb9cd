"""``HookedTransformer`` (TransformerLens 3.9) behind the back-end interface."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from mechheads.backends.base import QKV, HookFn, Norm, Running, Shape, frozen, has_global_hooks
from mechheads.errors import ModelRefused

# Post-norm architectures whose attention output norm carries the pre-norm's name in HookedTransformer.
_POST_NORM_IS_LN1 = ("Olmo2ForCausalLM", "Olmo3ForCausalLM")


class HookedBackend:
    """A ``HookedTransformer`` as mechheads sees it. It has no twin: prefill runs on the model itself.

    Args:
        model: The HookedTransformer.
        cache_class: TransformerLens' key/value cache class (handed in, so only ``model.py`` imports it).
        tokenizer: Tokenizer to use; the model's own if None.
    """

    kind = "HookedTransformer"
    twin = None
    splits_rows = False  # its cache has one number of rows for all layers

    def __init__(self, model: Any, cache_class: Any, tokenizer: Any = None):
        self.model = model
        self._cache_class = cache_class
        self.tokenizer = tokenizer if tokenizer is not None else model.tokenizer
        cfg = model.cfg
        if cfg.attn_only or not cfg.normalization_type:
            raise ModelRefused(
                "a HookedTransformer without MLPs or without norms is a toy that mechheads does not take apart; "
                "pass a full decoder."
            )
        self.architecture = str(cfg.original_architecture or "HookedTransformer")
        self.shape = Shape(
            n_layers=cfg.n_layers,
            n_heads=cfg.n_heads,
            n_key_value_heads=cfg.n_key_value_heads or cfg.n_heads,
            d_head=cfg.d_head,
            d_model=cfg.d_model,
            d_vocab=cfg.d_vocab_out if cfg.d_vocab_out > 0 else cfg.d_vocab,
            n_ctx=int(cfg.n_ctx),
        )
        self.device, self.dtype = model.W_U.device, model.W_U.dtype
        self.logit_softcap = _positive(getattr(cfg, "output_logits_soft_cap", None))
        self.score_softcap = _positive(getattr(cfg, "attn_scores_soft_cap", None))
        self.flat_qk_norm = self.architecture in _POST_NORM_IS_LN1
        self.running: Running | None = None

    @property
    def weights(self) -> str:
        """``folded`` where norms have no weights left, else ``raw``."""
        return "folded" if str(self.model.cfg.normalization_type).endswith("Pre") else "raw"

    # -- running ---------------------------------------------------------------------------------

    @contextmanager
    def hooks(self, pairs: Sequence[tuple[str, HookFn]]) -> Iterator[None]:
        """Install hooks by name; removed on exit, whatever happens inside."""
        if not pairs:
            yield
            return
        wrapped = [(name, lambda t, hook, fn=fn: fn(t)) for name, fn in pairs]
        with self.model.hooks(fwd_hooks=wrapped):
            yield

    def hooked(self) -> bool:
        """Whether any hook sits on the model."""
        return has_global_hooks() or any(m._forward_hooks or m._forward_pre_hooks for m in self.model.modules())

    def new_cache(self, batch: int) -> Any:
        """TransformerLens' own cache; its keys are full length on every layer."""
        return self._cache_class.init_cache(self.model.cfg, self.device, batch)

    @torch.no_grad()
    def run(self, tokens: Tensor, mask: Tensor, cache: Any, *, last_only: bool) -> Tensor:
        """See ``Backend.run``; the cache remembers the mask of what it holds."""
        return self._forward(tokens, mask, cache, last_only=last_only)

    def run_with_grad(self, tokens: Tensor, mask: Tensor, cache: Any, *, last_only: bool) -> Tensor:
        """See ``Backend.run_with_grad``."""
        with frozen(self.model), torch.enable_grad():
            return self._forward(tokens, mask, cache, last_only=last_only)

    def _forward(self, tokens: Tensor, mask: Tensor, cache: Any, *, last_only: bool) -> Tensor:
        """One pass of the model."""
        kwargs: dict[str, Any] = {"attention_mask": mask}
        if cache is not None:
            kwargs = {"attention_mask": mask[:, -tokens.shape[1] :], "past_kv_cache": cache}
        self.running = Running(mask, tokens.shape[1], cache)
        try:
            logits = self.model(tokens, return_type="logits", **kwargs)
        finally:
            self.running = None
        return logits[:, -1:] if last_only else logits

    def fast_prefill(self) -> bool:
        """There is no twin, so a prompt is prefilled on the model itself, storing nothing."""
        return not self.hooked()

    def prefill(self, tokens: Tensor, mask: Tensor, *, fast: bool | None = None) -> Any:
        """See ``Backend.prefill``."""
        cache = self.new_cache(tokens.shape[0])
        self.run(tokens, mask, cache, last_only=True)
        return cache

    def select_rows(self, cache: Any, rows: Tensor) -> Any:
        """A cache of some rows of the batch."""
        out = self.new_cache(len(rows))
        out.previous_attention_mask = cache.previous_attention_mask[rows]
        for mine, theirs in zip(out.entries, cache.entries, strict=True):
            mine.past_keys, mine.past_values = theirs.past_keys[rows], theirs.past_values[rows]
        return out

    def copy_cache(self, cache: Any) -> Any:
        """A deep copy."""
        return copy.deepcopy(cache)

    def fork(self, cache: Any, rows: int = 1, *, above: int = -1) -> Any:
        """See ``Backend.fork``; the mask stays one row and is broadcast."""
        out = self.new_cache(1)
        out.previous_attention_mask = cache.previous_attention_mask.clone()
        for layer, (mine, theirs) in enumerate(zip(out.entries, cache.entries, strict=True)):
            n = rows if layer > above else 1
            mine.past_keys = theirs.past_keys.expand(n, -1, -1, -1).clone()
            mine.past_values = theirs.past_values.expand(n, -1, -1, -1).clone()
        return out

    def fan_out(self, cache: Any, rows: Sequence[int]) -> Any:
        """See ``Backend.fan_out``; the mask has as many rows as the layer with most."""
        out = self.new_cache(max(rows))
        mask = cache.previous_attention_mask
        out.previous_attention_mask = torch.cat([mask, mask[:1].expand(max(rows) - len(mask), -1)])
        for n, mine, theirs in zip(rows, out.entries, cache.entries, strict=True):
            mine.past_keys = _more_rows(theirs.past_keys, n)
            mine.past_values = _more_rows(theirs.past_values, n)
        return out

    def join(self, caches: Sequence[Any]) -> Any:
        """See ``Backend.join``."""
        if len(caches) == 1:
            return caches[0]
        width = max(cache.previous_attention_mask.shape[1] for cache in caches)

        def padded(t: Tensor) -> Tensor:  # position is the second axis of keys, values and mask
            return torch.cat([t.new_zeros(len(t), width - t.shape[1], *t.shape[2:]), t], dim=1)

        out = self.new_cache(sum(len(cache.previous_attention_mask) for cache in caches))
        out.previous_attention_mask = torch.cat([padded(cache.previous_attention_mask) for cache in caches])
        for layer, mine in enumerate(out.entries):
            mine.past_keys = torch.cat([padded(cache[layer].past_keys) for cache in caches])
            mine.past_values = torch.cat([padded(cache[layer].past_values) for cache in caches])
        return out

    def crop(self, cache: Any, length: int) -> Any:
        """See ``Backend.crop``."""
        cache.previous_attention_mask = cache.previous_attention_mask[:, :length]
        for entry in cache.entries:
            entry.past_keys, entry.past_values = entry.past_keys[:, :length], entry.past_values[:, :length]
        return cache

    def cached_kv(self, cache: Any, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (not rotated here) and values of a layer."""
        entry = cache[layer]
        return entry.past_keys.transpose(1, 2), entry.past_values.transpose(1, 2)

    def cached_keys_are_final(self) -> bool:
        """The cache holds keys before rotation."""
        return self.model.cfg.positional_embedding_type != "rotary"

    def query_hooks(
        self, layer: int, keep: Callable[[str, Tensor], None], *, rotated: bool = True
    ) -> list[tuple[str, HookFn]]:
        """Hooks that report ``"q"`` and, under rotary positions, the whole ``"k"`` as multiplied.

        Before rotation: both, of the tokens run now. QK-norm has no hook of its own here, so it is applied again.
        """
        prefix = f"blocks.{layer}.attn."
        if not rotated:
            return [(prefix + f"hook_{n}", lambda t, n=n: keep(n, self._normed(layer, n, t))) for n in ("q", "k")]
        if self.cached_keys_are_final():
            return [(prefix + "hook_q", lambda t: keep("q", t.transpose(1, 2)))]
        return [
            (prefix + "hook_rot_q", lambda t: keep("q", t.transpose(1, 2))),
            (prefix + "hook_rot_k", lambda t: keep("k", t.transpose(1, 2))),
        ]

    def _normed(self, layer: int, name: str, t: Tensor) -> Tensor:
        """``[batch head pos d_head]`` of queries or keys ``[batch pos head d_head]``, after their norm."""
        norm = getattr(self.model.blocks[layer].attn, f"{name}_norm", None)
        if norm is not None:  # over each head, or (OLMo) over all heads together
            width = t.shape[-1] if norm.w.numel() == t.shape[-1] else t.shape[-1] * t.shape[-2]
            t = norm(t.reshape(-1, width)).reshape(t.shape)
        return t.transpose(1, 2)

    # -- weights ---------------------------------------------------------------------------------

    def W_O(self, layer: int) -> Tensor:
        """Output projection ``[head d_head d_model]``."""
        return self.model.blocks[layer].attn.W_O

    def b_O(self, layer: int) -> Tensor | None:
        """Output bias (zeros where the architecture has none)."""
        return self.model.blocks[layer].attn.b_O

    def qkv(self, layer: int) -> dict[str, Tensor | None]:
        """See ``Backend.qkv``; under grouped queries the raw key and value weights have an underscore."""
        attn = self.model.blocks[layer].attn
        return {name: getattr(attn, f"_{name}") if hasattr(attn, f"_{name}") else getattr(attn, name) for name in QKV}

    def qk_norm(self, layer: int) -> tuple[Norm, Norm] | None:
        """See ``Backend.qk_norm``; these are RMSNorms whatever the model's other norms are."""
        attn = self.model.blocks[layer].attn
        if getattr(attn, "q_norm", None) is None:
            return None
        return Norm(attn.q_norm.w, None, False), Norm(attn.k_norm.w, None, False)

    def embedding(self) -> Tensor:
        """See ``Backend.embedding``; HookedTransformer's Gemma weights include the scale."""
        return self.model.W_E

    def input_norm(self, layer: int) -> Norm | None:
        """See ``Backend.input_norm``."""
        return None if self.architecture in _POST_NORM_IS_LN1 else self._norm(self.model.blocks[layer].ln1)

    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """``W_U`` and ``b_U``."""
        return self.model.W_U, self.model.b_U

    def final_norm(self) -> Norm:
        """Norm before the unembedding."""
        return self._norm(self.model.ln_final)

    def post_norm(self, layer: int) -> tuple[Norm, str] | None:
        """Norm between the attention output and the residual stream."""
        block = self.model.blocks[layer]
        if self.architecture in _POST_NORM_IS_LN1:
            return self._norm(block.ln1), f"blocks.{layer}.ln1.hook_scale"
        if hasattr(block, "ln1_post"):
            return self._norm(block.ln1_post), f"blocks.{layer}.ln1_post.hook_scale"
        return None

    def _norm(self, module: Any) -> Norm:
        """Weight and bias of a norm; HookedTransformer's Gemma weights include the + 1."""
        centers = not str(self.model.cfg.normalization_type).startswith("RMS")
        return Norm(getattr(module, "w", None), getattr(module, "b", None) if centers else None, centers)

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer."""
        cfg = self.model.cfg
        if not getattr(cfg, "use_local_attn", False) or cfg.attn_types[layer] != "local":
            return None
        return int(cfg.window_size)

    def score_scale(self, layer: int) -> float:
        """HookedTransformer divides q . k by ``cfg.attn_scale`` (and by layer + 1 where GPT-2 asks)."""
        cfg = self.model.cfg
        scale = 1.0 / cfg.attn_scale if cfg.use_attn_scale else 1.0
        return scale / (layer + 1) if cfg.scale_attn_by_inverse_layer_idx else scale

    def has_sinks(self) -> bool:
        """Whether attention rows leave part of their mass to a sink."""
        return hasattr(self.model.blocks[0].attn, "sinks")

    def settings(self) -> dict[str, Any]:
        """What changes results beside the weights, JSON-ready."""
        return {"config": json.loads(json.dumps(self.model.cfg.to_dict(), default=str, sort_keys=True))}

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Live weights by TransformerLens name."""
        return sorted(self.model.named_parameters(), key=lambda pair: pair[0])

    def stop_tokens(self) -> frozenset[int]:
        """The tokenizer's end token."""
        eos = getattr(self.tokenizer, "eos_token_id", None)
        return frozenset() if eos is None else frozenset([int(eos)])


def _more_rows(t: Tensor, rows: int) -> Tensor:
    """The rows of a tensor, then copies of its first up to a number."""
    return torch.cat([t, t[:1].expand(rows - len(t), *t.shape[1:])])


def _positive(value: Any) -> float | None:
    """TransformerLens writes 'no soft-cap' as -1."""
    return float(value) if value is not None and value > 0 else None
