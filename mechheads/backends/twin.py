"""A Hugging Face model that shares the bridge's parameters, for prefill without [query, key] matrices."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

_WRAP = "_original_component"


def foreign_hooks(module: nn.Module) -> int:
    """Forward hooks on all submodules, less those the bridge installs for its own use on its first run."""
    return sum(
        not (getattr(hook, "__module__", None) or "").startswith("transformer_lens.model_bridge")
        for m in module.modules()
        for hooks in (m._forward_hooks, m._forward_pre_hooks)
        for hook in hooks.values()
    )


@dataclass
class Twin:
    """The twin model and what must hold for it to speak for the bridge.

    Attributes:
        model: Hugging Face model whose parameters are the bridge's own objects.
        shared: Pairs (twin module, bridge module, parameter name) that must stay the same object.
        copies: Bridge parameters that are copies (split joint projections) with the row sums they had, and
            the joint parameters they came from: if any of these changes, the twin is out of step.
        attention: ``sdpa`` or ``eager``.
    """

    model: nn.Module
    shared: list[tuple[nn.Module, nn.Module, str]]
    copies: list[tuple[nn.Module, str, Tensor]]
    attention: str

    def in_step(self) -> bool:
        """Whether the twin still computes what the bridge computes."""
        return all(t._parameters.get(n) is b._parameters.get(n) for t, b, n in self.shared) and all(
            torch.equal(_row_sums(m._parameters[n]), sums) for m, n, sums in self.copies
        )

    def run(self, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
        """Fill the cache; returns the logits of the last position."""
        accepted = inspect.signature(type(self.model).forward).parameters
        kwargs: dict[str, Any] = {"logits_to_keep": 1} if "logits_to_keep" in accepted else {}
        if "position_ids" in accepted:
            kwargs["position_ids"] = (mask.long().cumsum(-1) - 1).clamp(min=0)
        return self.model(
            input_ids=tokens, attention_mask=mask, past_key_values=cache, use_cache=True, **kwargs
        ).logits[:, -1:]


def _row_sums(tensor: Tensor | None) -> Tensor:
    """Exact integer sums over the last axis of a tensor's bits; changes with any edit in practice."""
    assert tensor is not None
    bits = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()]
    return tensor.detach().contiguous().view(bits).sum(-1, dtype=torch.int64)


def build_twin(bridge: Any) -> Twin | None:
    """Make the twin of a bridge, or None where none can stand in for it.

    No twin: weights processed by the compatibility mode, models spread over devices, classes that cannot be
    built from their configuration, or parameters that cannot be matched by name.
    """
    hf = bridge.original_model
    if getattr(bridge, "compatibility_mode", False) or getattr(hf, "hf_device_map", None):
        return None
    if getattr(hf, "is_quantized", False):
        return None
    config = type(hf.config).from_dict(hf.config.to_dict())
    attention = "sdpa" if getattr(type(hf), "_supports_sdpa", False) else "eager"
    config._attn_implementation = attention
    with init_empty_weights(include_buffers=False):
        twin = type(hf)(config)
    live: dict[str, tuple[nn.Module, str]] = {}
    for path, module in hf.named_modules(remove_duplicate=False):
        clean = ".".join(p for p in path.split(".") if p != _WRAP)
        for name in module._parameters:
            live.setdefault(f"{clean}.{name}", (module, name))
    shared = []
    for path, module in twin.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            source = live.get(f"{path}.{name}")
            if source is None or source[0]._parameters[source[1]] is None:
                return None
            module._parameters[name] = source[0]._parameters[source[1]]
            shared.append((module, source[0], name))
    weight = next(iter(twin.parameters()))
    twin = twin.to(device=weight.device).eval()
    _copy_buffers(hf, twin)
    return Twin(twin, shared, _copied_parameters(hf, twin), attention)


def _copy_buffers(hf: nn.Module, twin: nn.Module) -> None:
    """Give the twin the values of the bridge's buffers (rotary tables may have been patched)."""
    have = {
        ".".join(p for p in path.split(".") if p != _WRAP): b
        for path, b in hf.named_buffers(remove_duplicate=False)
    }
    for path, buffer in twin.named_buffers(remove_duplicate=False):
        source = have.get(path)
        if source is not None and source.shape == buffer.shape:
            buffer.data = source.detach().clone()


def _copied_parameters(hf: nn.Module, twin: nn.Module) -> list[tuple[nn.Module, str, Tensor]]:
    """Bridge parameters the twin does not hold, and the joint ones they were split from, with row sums."""
    ours = {id(p) for p in twin.parameters()}
    extra: list[tuple[nn.Module, str, Tensor]] = []
    seen: set[int] = set()
    for module in hf.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in ours and id(p) not in seen:
                seen.add(id(p))
                extra.append((module, name, _row_sums(p)))
    if not extra:
        return []
    for path, module in hf.named_modules():
        if any(key in path for key in ("c_attn", "query_key_value", "qkv_proj", "gate_up_proj")):
            for name, p in module._parameters.items():
                if p is not None and id(p) not in seen:
                    seen.add(id(p))
                    extra.append((module, name, _row_sums(p)))
    return extra
