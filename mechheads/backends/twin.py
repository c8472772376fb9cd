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
    """Forward hooks on all submodules, less those the bridge installs for its own use."""
    return sum(
        not _is_own(hook)
        for m in module.modules()
        for hooks in (m._forward_hooks, m._forward_pre_hooks)
        for hook in hooks.values()
    )


def _is_own(hook: Any) -> bool:
    """Whether TransformerLens installed a hook for itself: plainly, or through a HookPoint while setting up."""
    if (getattr(hook, "__module__", None) or "").startswith("transformer_lens.model_bridge"):
        return True
    code, cells = getattr(hook, "__code__", None), getattr(hook, "__closure__", None) or ()
    # A HookPoint wraps the function it is given, a user's or its own (OPT's MLP is put together so).
    inner = dict(zip(code.co_freevars, cells, strict=True)).get("hook") if code is not None else None
    owner = getattr(inner.cell_contents, "__module__", None) if inner is not None else None
    return owner == "transformer_lens.model_bridge.component_setup"


@dataclass
class Twin:
    """The twin model and what must hold for it to speak for the bridge.

    Attributes:
        model: Hugging Face model whose parameters are the bridge's own objects.
        bridge: The bridge.
        parts: Modules, patched forwards and parameters of the bridge by path, as they were when the twin was made: if
            one is another object now, the twin is out of step.
        copies: Bridge parameters that are copies (split joint projections) and the joint parameters they came from,
            with their bit sums: if any of these changes in place, the twin is out of step.
        buffers: Floating-point buffers of the bridge (rotary tables) with the values they had.
        attention: ``sdpa`` or ``eager``.
    """

    model: nn.Module
    bridge: Any
    parts: dict[str, Any]
    copies: list[tuple[nn.Module, str, list[Tensor]]]
    buffers: list[tuple[Tensor, Tensor]]
    attention: str

    def in_step(self) -> bool:
        """Whether the twin still computes what the bridge computes."""
        now = _parts(self.bridge)
        if now.keys() != self.parts.keys() or any(now[k] is not part for k, part in self.parts.items()):
            return False
        if any(not torch.equal(buffer, kept) for buffer, kept in self.buffers):
            return False
        return all(
            torch.equal(new, old)
            for module, name, sums in self.copies
            for new, old in zip(_bit_sums(module._parameters[name]), sums, strict=True)
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


def _parts(bridge: Any) -> dict[str, Any]:
    """What a forward is made of, by path: modules, forwards patched onto them, parameter objects."""
    out: dict[str, Any] = {}
    for root, top in (("bridge", bridge), ("model", bridge.original_model)):
        for path, module in top.named_modules(prefix=root, remove_duplicate=False):
            out[path] = module
            out[f"{path}()"] = module.__dict__.get("forward")
            out |= {f"{path}.{name}": p for name, p in module._parameters.items()}
            # Scales and epsilons are plain attributes; an edit puts another object there.
            out |= {f"{path}.{name}=": v for name, v in vars(module).items() if isinstance(v, float)}
    return out


def _bit_sums(tensor: Tensor | None) -> list[Tensor]:
    """Exact integer sums of a tensor's bits over its last and its first axis; any edit in practice changes one.

    One alone would not do: changing the signs of as many positive as negative numbers of a row keeps its sum.
    """
    assert tensor is not None
    kind = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.int8}[tensor.element_size()]
    bits = tensor.detach().contiguous().view(kind)
    return [bits.sum(axis, dtype=torch.int64) for axis in {-1, -bits.ndim}]


def build_twin(bridge: Any) -> Twin | None:
    """Make the twin of a bridge, or None where none can stand in for it.

    No twin: the compatibility mode or processed weights, models spread over devices, classes that cannot be
    built from their configuration, or parameters that cannot be matched by name.
    """
    hf: Any = bridge.original_model
    if bridge.compatibility_mode or bridge._weights_processed or getattr(hf, "hf_device_map", None):
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
    for path, module in twin.named_modules(remove_duplicate=False):
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            source = live.get(f"{path}.{name}")
            if source is None or source[0]._parameters[source[1]] is None:
                return None
            module._parameters[name] = source[0]._parameters[source[1]]
    weight = next(iter(twin.parameters()))
    twin = twin.to(device=weight.device).eval()
    _copy_buffers(hf, twin)
    buffers = [(b, b.detach().clone()) for b in hf.buffers() if b.is_floating_point()]
    return Twin(twin, bridge, _parts(bridge), _copied_parameters(hf, twin), buffers, attention)


def _copy_buffers(hf: nn.Module, twin: nn.Module) -> None:
    """Give the twin the values of the bridge's buffers (rotary tables may have been patched)."""
    have = {
        ".".join(p for p in path.split(".") if p != _WRAP): b for path, b in hf.named_buffers(remove_duplicate=False)
    }
    for path, buffer in twin.named_buffers(remove_duplicate=False):
        source = have.get(path)
        if source is not None and source.shape == buffer.shape:
            buffer.data = source.detach().clone()


def _copied_parameters(hf: nn.Module, twin: nn.Module) -> list[tuple[nn.Module, str, list[Tensor]]]:
    """Bridge parameters the twin does not hold, and the joint ones they were split from, with bit sums."""
    ours = {id(p) for p in twin.parameters()}
    extra: list[tuple[nn.Module, str, list[Tensor]]] = []
    seen: set[int] = set()
    for module in hf.modules():
        for name, p in module._parameters.items():
            if p is not None and id(p) not in ours and id(p) not in seen:
                seen.add(id(p))
                extra.append((module, name, _bit_sums(p)))
    if not extra:
        return []
    # A module may be met first under another name (TransformerLens' own for the joint projection), so all names count.
    for path, module in hf.named_modules(remove_duplicate=False):
        if any(key in path for key in ("c_attn", "query_key_value", "qkv_proj", "gate_up_proj")):
            for name, p in module._parameters.items():
                if p is not None and id(p) not in seen:
                    seen.add(id(p))
                    extra.append((module, name, _bit_sums(p)))
    return extra
