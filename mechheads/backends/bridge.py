"""``TransformerBridge`` behind the back-end interface, and its twin for fast prefill."""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import DynamicCache

from mechheads.backends.base import QKV, HookFn, Norm, Running, Shape, frozen, has_global_hooks
from mechheads.backends.twin import Twin, build_twin, foreign_hooks
from mechheads.errors import InvalidInput, ModelRefused
from mechheads.provenance import content_hash

_WRAP = "_original_component"


class BridgeBackend:
    """A ``TransformerBridge`` as mechheads sees it.

    Args:
        bridge: The booted bridge.
        tokenizer: Tokenizer to use; the bridge's own if None.
        fresh: True if the bridge was booted just now, so hooks it has already are TransformerLens' own.
    """

    kind = "TransformerBridge"
    splits_rows = True

    def __init__(self, bridge: Any, tokenizer: Any = None, *, fresh: bool = False):
        self.bridge = bridge
        self.tokenizer = tokenizer if tokenizer is not None else bridge.tokenizer
        self.config = bridge.original_model.config
        self.text_config = self.config.get_text_config()
        cfg = bridge.cfg
        self.architecture = str(cfg.architecture)
        self.shape = Shape(
            n_layers=cfg.n_layers,
            n_heads=cfg.n_heads,
            n_key_value_heads=getattr(cfg, "n_key_value_heads", None) or cfg.n_heads,
            d_head=cfg.d_head,
            d_model=cfg.d_model,
            d_vocab=bridge.unembed.W_U.shape[1],
            n_ctx=int(cfg.n_ctx),
        )
        self._refuse_unusable_layout()
        weight = bridge.unembed.W_U
        self.device, self.dtype = weight.device, weight.dtype
        self.logit_softcap = getattr(self.text_config, "final_logit_softcapping", None)
        self.score_softcap = getattr(self.text_config, "attn_logit_softcapping", None)
        self.flat_qk_norm = self._has_flat_qk_norm()
        self._own_hooks = foreign_hooks(bridge) if fresh else 0
        self.twin: Twin | None = build_twin(bridge)
        self.running: Running | None = None

    def _refuse_unusable_layout(self) -> None:
        """Refuse what TransformerLens cannot run with caches, or what has no attention to take apart."""
        width = getattr(self.text_config, "word_embed_proj_dim", None)
        if width is not None and width != self.shape.d_model:
            raise ModelRefused(
                f"{self.architecture} projects its embeddings in and out ({width} -> {self.shape.d_model}, the "
                "OPT-350m layout); TransformerLens cannot capture it, so no head score would be right. "
                "Use another size of the family."
            )
        odd = {
            t
            for t in (getattr(self.text_config, "layer_types", None) or [])
            if t not in ("full_attention", "sliding_attention")
        }
        if odd:
            raise ModelRefused(
                f"{self.architecture} has layers of type {sorted(odd)}; mechheads takes softmax attention "
                "layers apart ('full_attention', 'sliding_attention') and cannot score the others."
            )
        if self.bridge._weights_processed and self.has_sinks():
            raise ModelRefused(
                f"{self.architecture} has attention sinks, so its rows sum to less than one, but TransformerLens' "
                "weight processing folds value biases as if they summed to one: this bridge is no longer the "
                "model. Boot it again without enable_compatibility_mode(), or with no_processing=True."
            )
        missing = [i for i, b in enumerate(self.bridge.blocks) if not hasattr(b.attn, "hook_pattern")]
        if missing:
            raise ModelRefused(f"{self.architecture}: layers {missing} have no attention pattern to read.")

    @property
    def weights(self) -> str:
        """``raw``, or ``processed`` after TransformerLens folded or centred something.

        The compatibility mode alone (``no_processing=True``) renames hooks and leaves the weights as they are.
        """
        return "processed" if self.bridge._weights_processed else "raw"

    def _has_flat_qk_norm(self) -> bool:
        """True where one norm spans all heads' queries (OLMo-2/3), so heads are not independent at q."""
        norm = getattr(self.bridge.blocks[0].attn, "q_norm", None)
        weight = getattr(norm, "weight", None)
        return isinstance(weight, Tensor) and weight.numel() == self.shape.n_heads * self.shape.d_head > (
            self.shape.d_head
        )

    # -- running ---------------------------------------------------------------------------------

    @contextmanager
    def hooks(self, pairs: Sequence[tuple[str, HookFn]]) -> Iterator[None]:
        """Install hooks by name; removed on exit, whatever happens inside."""
        if not pairs:
            yield
            return
        wrapped = [(name, lambda t, hook, fn=fn: fn(t)) for name, fn in pairs]
        with self.bridge.hooks(fwd_hooks=wrapped):
            yield

    def hooked(self) -> bool:
        """Whether anybody's hook sits on the model, through TransformerLens or plain PyTorch."""
        return has_global_hooks() or foreign_hooks(self.bridge) != self._own_hooks

    def new_cache(self, batch: int) -> DynamicCache:
        """A cache without windows: made without a config it keeps full-length keys on every layer."""
        return DynamicCache()

    @torch.no_grad()
    def run(self, tokens: Tensor, mask: Tensor, cache: Any, *, last_only: bool) -> Tensor:
        """See ``Backend.run``."""
        return self._forward(tokens, mask, cache, last_only=last_only)

    def run_with_grad(self, tokens: Tensor, mask: Tensor, cache: Any, *, last_only: bool) -> Tensor:
        """See ``Backend.run_with_grad``."""
        with frozen(self.bridge, self.bridge.original_model), torch.enable_grad():
            return self._forward(tokens, mask, cache, last_only=last_only)

    def _forward(self, tokens: Tensor, mask: Tensor, cache: Any, *, last_only: bool) -> Tensor:
        """One pass of the hooked model."""
        self._refuse_training_mode()
        extra = {"logits_to_keep": 1} if last_only and self._accepts("logits_to_keep") else {}
        kwargs: dict[str, Any] = {"attention_mask": mask, **extra}
        if cache is not None:
            kwargs |= {"past_key_values": cache, "use_cache": True}
        self.running = Running(mask, tokens.shape[1], cache)
        try:
            logits = self.bridge(tokens, return_type="logits", **kwargs)
        finally:
            self.running = None
        return logits[:, -1:] if last_only else logits

    def _refuse_training_mode(self) -> None:
        """Dropout would make every run another model."""
        hf = self.bridge.original_model
        if hf.training or any(isinstance(m, torch.nn.Dropout) and m.training and m.p > 0 for m in hf.modules()):
            raise InvalidInput("the model is in training mode, where dropout changes every run; call .eval() on it.")

    def _accepts(self, name: str) -> bool:
        """Whether the wrapped Hugging Face forward takes an argument."""
        return name in inspect.signature(type(self.bridge.original_model).forward).parameters

    def fast_prefill(self) -> bool:
        """The twin is used only while it computes exactly what the hooked model computes."""
        return self.twin is not None and not self.hooked() and self.twin.in_step()

    @torch.no_grad()
    def prefill(self, tokens: Tensor, mask: Tensor, *, fast: bool | None = None) -> DynamicCache:
        """See ``Backend.prefill``."""
        self._refuse_training_mode()
        cache = self.new_cache(tokens.shape[0])
        fast = self.fast_prefill() if fast is None else fast
        if self.twin is not None and fast:
            self.twin.run(tokens, mask, cache)
        else:
            self.run(tokens, mask, cache, last_only=True)
        return cache

    def select_rows(self, cache: DynamicCache, rows: Tensor) -> DynamicCache:
        """Keep some rows of the batch, in place."""
        cache.batch_select_indices(rows)
        return cache

    def copy_cache(self, cache: Any) -> Any:
        """A deep copy."""
        return copy.deepcopy(cache)

    def fork(self, cache: DynamicCache, rows: int = 1, *, above: int = -1) -> DynamicCache:
        """See ``Backend.fork``."""
        out = self.new_cache(1)
        for layer in range(len(cache.layers)):
            n = rows if layer > above else 1
            k, v = self.cached_kv(cache, layer)
            out.update(k.expand(n, -1, -1, -1), v.expand(n, -1, -1, -1), layer)
        return out

    def fan_out(self, cache: DynamicCache, rows: Sequence[int]) -> DynamicCache:
        """See ``Backend.fan_out``."""
        out = self.new_cache(max(rows))
        for layer, n in enumerate(rows):
            k, v = self.cached_kv(cache, layer)
            out.update(_more_rows(k, n), _more_rows(v, n), layer)
        return out

    def join(self, caches: Sequence[DynamicCache]) -> DynamicCache:
        """See ``Backend.join``."""
        if len(caches) == 1:
            return caches[0]
        out = self.new_cache(0)
        for layer in range(self.shape.n_layers):
            pairs = [self.cached_kv(cache, layer) for cache in caches]
            width = max(k.shape[2] for k, _ in pairs)
            k, v = (
                torch.cat([F.pad(t, (0, 0, width - t.shape[2], 0)) for t in some]) for some in zip(*pairs, strict=True)
            )
            out.update(k, v, layer)
        return out

    def crop(self, cache: DynamicCache, length: int) -> DynamicCache:
        """See ``Backend.crop``; what ``DynamicCache.crop`` is given has changed its meaning between versions."""
        for layer in range(self.shape.n_layers):
            entry: Any = cache.layers[layer]
            entry.keys, entry.values = entry.keys[:, :, :length], entry.values[:, :, :length]
        return cache

    def cached_kv(self, cache: DynamicCache, layer: int) -> tuple[Tensor, Tensor]:
        """Keys (rotated) and values of a layer."""
        entry: Any = cache.layers[layer]
        return entry.keys, entry.values

    def cached_keys_are_final(self) -> bool:
        """Hugging Face caches keys after their norm and rotation."""
        return True

    # -- queries as multiplied -------------------------------------------------------------------

    def query_hooks(
        self, layer: int, keep: Callable[[str, Tensor], None], *, rotated: bool = True
    ) -> list[tuple[str, HookFn]]:
        """Hooks that report the query after QK-norm and rotation, or query and key before rotation.

        ``hook_rot_q`` exists but never fires on NeoX and Phi-3, so the rotation is done here from the
        cosines and sines that the layer received, which do fire on every rotary architecture.
        """
        prefix = f"blocks.{layer}.attn."
        attn = self.bridge.blocks[layer].attn
        seen: dict[str, Tensor] = {}

        def note(key: str) -> HookFn:
            def hook(t: Tensor) -> None:
                seen[key] = t

            return hook

        heads = {"q": self.shape.n_heads, "k": self.shape.n_key_value_heads}
        wanted = ("q",) if rotated else ("q", "k")

        def finish(_: Tensor) -> None:
            for name in wanted:
                found = self._head_first(seen.get(f"{name} normed"), seen[name], heads[name])
                keep(name, _rotate(found, seen["cos"], seen["sin"]) if rotated and "cos" in seen else found)
            seen.clear()

        pairs: list[tuple[str, HookFn]] = []
        for name in wanted:
            pairs.append((prefix + f"hook_{name}", note(name)))
            if hasattr(attn, f"hook_{name}_normed"):
                pairs.append((prefix + f"hook_{name}_normed", note(f"{name} normed")))
        if rotated and hasattr(attn, "hook_cos") and hasattr(self.bridge, "rotary_emb"):
            pairs += [(prefix + "hook_cos", note("cos")), (prefix + "hook_sin", note("sin"))]
        return [*pairs, (prefix + "hook_pattern", finish)]

    def _head_first(self, normed: Tensor | None, plain: Tensor, heads: int) -> Tensor:
        """``[batch head pos d_head]`` of queries or keys, after their norm where there is one."""
        if normed is None:
            return plain.transpose(1, 2)
        if normed.ndim == 3:  # OLMo-2/3 normalise all heads together
            return normed.reshape(*normed.shape[:2], heads, self.shape.d_head).transpose(1, 2)
        return normed

    # -- weights ---------------------------------------------------------------------------------

    def W_O(self, layer: int) -> Tensor:
        """Output projection ``[head d_head d_model]``."""
        return self.bridge.blocks[layer].attn.W_O

    def b_O(self, layer: int) -> Tensor | None:
        """Output bias or None; None too where a bias parameter is absent."""
        return getattr(self.bridge.blocks[layer].attn, "b_O", None)

    def qkv(self, layer: int) -> dict[str, Tensor | None]:
        """See ``Backend.qkv``; joint projections have been split by the bridge, which runs on the parts."""
        attn = self.bridge.blocks[layer].attn
        return {name: getattr(attn, name, None) for name in QKV}

    def qk_norm(self, layer: int) -> tuple[Norm, Norm] | None:
        """See ``Backend.qk_norm``."""
        modules = self.bridge.blocks[layer].attn._modules
        return (_norm(modules["q_norm"]), _norm(modules["k_norm"])) if "q_norm" in modules else None

    def embedding(self) -> Tensor:
        """See ``Backend.embedding``."""
        embed = self.bridge.embed
        scale = getattr(embed.original_component, "embed_scale", None)
        return embed.W_E if scale is None else embed.W_E * torch.as_tensor(scale).to(embed.W_E)

    def input_norm(self, layer: int) -> Norm | None:
        """See ``Backend.input_norm``."""
        block = self.bridge.blocks[layer]
        post = self.post_norm(layer)
        if post is not None and post[1] == f"blocks.{layer}.ln1.hook_scale":
            return None
        if "ln1" in block._modules and getattr(self.text_config, "do_layer_norm_before", True):
            return _norm(block.ln1)
        if post is not None and "ln1" not in block._modules:
            return None
        raise ModelRefused(
            f"{self.architecture}: where layer {layer} normalises what its attention reads is unknown, so no score "
            "from weights alone would be right. Use methods that read activations."
        )

    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """``W_U`` and ``b_U``."""
        return self.bridge.unembed.W_U, self.bridge.unembed.b_U

    def final_norm(self) -> Norm:
        """Norm before the unembedding."""
        return _norm(self.bridge.ln_final)

    def post_norm(self, layer: int) -> tuple[Norm, str] | None:
        """Norm between the attention output and the residual stream (Gemma-2/3, OLMo-2/3)."""
        block = self.bridge.blocks[layer]
        if "ln1_post" in block._modules:
            return _norm(block.ln1_post), f"blocks.{layer}.ln1_post.hook_scale"
        # The bridge of TransformerLens 3.9 calls OLMo-2/3's only norm around attention ln1, though it comes after.
        if "ln1" in block._modules and block.ln1.name == "post_attention_layernorm":
            return _norm(block.ln1), f"blocks.{layer}.ln1.hook_scale"
        return None

    def window(self, layer: int) -> int | None:
        """Sliding window of a layer, from the Hugging Face configuration."""
        config = self.text_config
        local = getattr(config, "attention_layers", None)  # GPT-Neo
        if local is not None:
            return int(config.window_size) if local[layer] == "local" else None
        size = getattr(config, "sliding_window", None)
        if size is None or getattr(config, "use_sliding_window", True) is False:
            return None
        types = getattr(config, "layer_types", None)
        if types is not None and types[layer] != "sliding_attention":
            return None
        return int(size)

    def score_scale(self, layer: int) -> float:
        """Attention scale; ``cfg.attn_scale`` is not filled in by the bridge, the layer knows it."""
        scaling = getattr(self.bridge.blocks[layer].attn.original_component, "scaling", None)
        return float(scaling) if scaling is not None else self.shape.d_head**-0.5

    def has_sinks(self) -> bool:
        """Whether attention rows leave part of their mass to a sink (gpt-oss)."""
        return hasattr(self.bridge.blocks[0].attn.original_component, "sinks")

    def settings(self) -> dict[str, Any]:
        """What changes results beside the weights, JSON-ready: configuration, and scales as they are now."""
        layers = range(self.shape.n_layers)
        config = {k: v for k, v in self.config.to_dict().items() if k not in ("_name_or_path", "transformers_version")}
        return {
            "config": json.loads(json.dumps(config, default=str, sort_keys=True)),
            "score_scale": [self.score_scale(layer) for layer in layers],
            "window": [self.window(layer) for layer in layers],
            "buffers": {name: content_hash(b.float().cpu().flatten().tolist()) for name, b in self._buffers()},
            "eps": sorted(
                {v for m in self.bridge.modules() for k, v in vars(m).items() if "eps" in k and isinstance(v, float)}
            ),
        }

    def _buffers(self) -> list[tuple[str, Tensor]]:
        """Small buffers (rotary tables), by Hugging Face name."""
        found = self.bridge.original_model.named_buffers()
        return sorted((n.replace(f".{_WRAP}", ""), b) for n, b in found if b.is_floating_point() and b.numel() < 4096)

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Live weights by Hugging Face name, each storage once."""
        seen: set[int] = set()
        out = []
        for name, tensor in self.bridge.original_model.state_dict().items():
            if tensor.data_ptr() not in seen:
                seen.add(tensor.data_ptr())
                out.append((name.replace(f".{_WRAP}", ""), tensor))
        return sorted(out, key=lambda pair: pair[0])

    def stop_tokens(self) -> frozenset[int]:
        """End tokens of the generation config and the tokenizer."""
        generation = getattr(self.bridge.original_model, "generation_config", None)
        found: list[Any] = [getattr(self.tokenizer, "eos_token_id", None)]
        eos = getattr(generation, "eos_token_id", None)
        found += list(eos) if isinstance(eos, (list, tuple)) else [eos]
        return frozenset(int(t) for t in found if t is not None and 0 <= t < self.shape.d_vocab)


def _more_rows(t: Tensor, rows: int) -> Tensor:
    """The rows of a tensor, then copies of its first up to a number."""
    return torch.cat([t, t[:1].expand(rows - len(t), *t.shape[1:])])


def _norm(module: Any) -> Norm:
    """Effective weight and bias of a TransformerLens norm component."""
    component = module.original_component
    weight = getattr(component, "weight", None)
    # TransformerLens 3.9 has no property for it, only the configuration's word.
    offset = getattr(module, "uses_weight_offset", None)
    if offset is None:
        offset = module.uses_rms_norm and getattr(module.config, "rmsnorm_uses_offset", False)
    if weight is not None and offset:
        weight = weight + 1.0
    centers = not module.uses_rms_norm
    return Norm(weight, getattr(component, "bias", None) if centers else None, centers)


def _rotate(q: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate ``[batch head pos d_head]`` by halves, over the first dimensions if partial.

    ``cos`` and ``sin`` are ``[batch pos width]``; a half-width pair (gpt-oss) is doubled.
    """
    width = cos.shape[-1]
    if width * 2 == q.shape[-1] and not _is_duplicated(cos):
        cos, sin, width = cos.repeat(1, 1, 2), sin.repeat(1, 1, 2), width * 2
    turned, kept = q[..., :width].float(), q[..., width:]
    a, b = turned.chunk(2, dim=-1)
    cos, sin = cos[:, None].float(), sin[:, None].float()
    out = turned * cos + torch.cat([-b, a], dim=-1) * sin
    return torch.cat([out.to(q.dtype), kept], dim=-1)


def _is_duplicated(cos: Tensor) -> bool:
    """Whether the second half of the last axis repeats the first, as full-width tables do."""
    a, b = cos.chunk(2, dim=-1) if cos.shape[-1] % 2 == 0 else (cos, None)
    return b is not None and torch.equal(a, b)
