"""Whose weights are whose in a Hugging Face checkpoint, and which heads its configuration lets go."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn

from mechheads.errors import ModelRefused
from mechheads.heads import Head, HeadSet
from mechheads.model import Model, ModelSpec

Owner = tuple[str, int]  # ("q", head), or ("k" or "v", key/value head)
# How attention modules call their output projection, and the norms on queries and keys.
_OUT = ("o_proj", "out_proj", "dense", "c_proj")
_NORMS = ("q_norm", "k_norm", "q_layernorm", "k_layernorm")


@dataclass(frozen=True)
class Layout:
    """Which axis of which parameter of an attention module is divided among heads, and in which order.

    Attributes:
        owners: Parameter name -> axis, and the owner of each of the equal blocks along it.
        out: Name of the output projection's weight.
        unknown: Parameters of which it is not known whose they are.
    """

    owners: Mapping[str, tuple[int, tuple[Owner, ...]]]
    out: str
    unknown: tuple[str, ...]

    def part(self, name: str, weight: Tensor, wanted: Callable[[str, int], bool]) -> Tensor:
        """A copy of what belongs to some owners, in order."""
        axis, blocks = self.owners[name]
        chosen = torch.tensor([wanted(*owner) for owner in blocks])
        positions = torch.arange(weight.shape[axis]).view(len(blocks), -1)[chosen].flatten()
        return weight.index_select(axis, positions.to(weight.device))


def read_layout(attention: nn.Module, spec: ModelSpec) -> Layout:
    """The layout of an attention module, from the names of its parameters.

    Raises:
        ModelRefused: If it has no output projection that can be divided among the heads.
    """
    q = [("q", head) for head in range(spec.n_heads)]
    k, v = ([(kind, j) for j in range(spec.n_key_value_heads)] for kind in "kv")
    each = [owner for three in zip(q, k, v, strict=False) for owner in three]  # GPT-NeoX
    joint = dict.fromkeys(("qkv_proj", "c_attn"), q + k + v)
    inputs = {"q_proj": q, "k_proj": k, "v_proj": v, **joint, "query_key_value": each}
    owners: dict[str, tuple[int, tuple[Owner, ...]]] = {}
    out, unknown = "", []
    for name, _ in attention.named_parameters():
        inner, _, kind = name.rpartition(".")
        # GPT-2 keeps its matrices transposed.
        turned = int(bool(inner) and type(attention.get_submodule(inner)).__name__ == "Conv1D")
        if inner in inputs and kind in ("weight", "bias"):
            owners[name] = (turned if kind == "weight" else 0, tuple(inputs[inner]))
        elif inner in _OUT and kind == "weight":
            out, owners[name] = name, (1 - turned, tuple(q))
        elif name == "sinks":
            owners[name] = (0, tuple(q))
        elif not (inner in _OUT and kind == "bias") and inner not in _NORMS:
            unknown.append(name)
    odd = [n for n, (axis, blocks) in owners.items() if attention.get_parameter(n).shape[axis] % len(blocks)]
    if not out or odd:
        what = (
            f"{odd[0]} of its {type(attention).__name__} cannot be divided among the heads"
            if odd
            else (f"its {type(attention).__name__} has no output projection by a name that is known")
        )
        raise ModelRefused(f"{spec.architecture}: {what}, so none can be pruned in its weights; ablate at 'z' instead.")
    return Layout(owners, out, tuple(unknown))


class Checkpoint:
    """A live model as a Hugging Face checkpoint: weights by their names there, and whose they are.

    Attributes:
        model: The model.
        hf: The Hugging Face model inside, whose modules TransformerLens wrapped.
        config: Its configuration.
        weights: Live weights by checkpoint name; nobody writes to them.
        attention: Name of each layer's attention module.
        layouts: Of each layer's attention module.

    Raises:
        ModelRefused: If a weight is not in memory, or heads as read from the checkpoint are not those that the model
            runs on.
    """

    def __init__(self, model: Model):
        backend: Any = model.backend
        self.model, self.hf = model, backend.bridge.original_model
        self.config = self.hf.config
        plain = self.empty(self.config)
        names = list(plain.state_dict())
        live = dict(_live_tensors(self.hf))
        lost = [name for name in names if name not in live or live[name].is_meta]
        if lost:
            raise ModelRefused(
                f"{model.spec.name!r}: {len(lost)} weights of its checkpoint are not in memory (first: {lost[0]!r}); "
                "load it whole, without adapters and without offloading."
            )
        self.weights = {name: live[name].detach() for name in names}
        paths = {id(module): _clean(path) for path, module in self.hf.named_modules()}
        self.attention = [paths[id(block.attn.original_component)] for block in backend.bridge.blocks]
        self.layouts = [read_layout(plain.get_submodule(path), model.spec) for path in self.attention]
        for layer in range(model.spec.n_layers):
            self._check_layer(layer)

    def empty(self, config: Any) -> nn.Module:
        """The Hugging Face model of a configuration, its weights not there yet."""
        with init_empty_weights(include_buffers=False):
            return type(self.hf)(copy.deepcopy(config))

    def weight(self, layer: int, name: str) -> Tensor:
        """A parameter of a layer's attention module."""
        return self.weights[f"{self.attention[layer]}.{name}"]

    def _check_layer(self, layer: int) -> None:
        """The bridge runs on copies of split joint projections, so an edit of either alone would be lost."""
        found, layout = self.model.backend.qkv(layer), self.layouts[layer]
        for name, (axis, blocks) in layout.owners.items():
            weight = self.weight(layer, name)
            if name == layout.out:
                rows = weight.T if axis else weight
                self._check_same(layer, name, rows, self.model.W_O(layer).reshape(rows.shape))
            elif name != "sinks":
                for kind in dict(blocks):
                    part = layout.part(name, weight, lambda owner, _, kind=kind: owner == kind)
                    live = found[f"{'b' if weight.ndim == 1 else 'W'}_{kind.upper()}"]
                    if live is not None:
                        live = live if weight.ndim == 1 else live.transpose(1, 2)  # [head d_head d_model]
                        rows = part.T if axis else part
                        self._check_same(layer, name, rows, live.reshape(rows.shape))

    def _check_same(self, layer: int, name: str, stored: Tensor, live: Tensor) -> None:
        if not torch.equal(stored, live):
            raise ModelRefused(
                f"{self.attention[layer]}.{name}, divided among heads, is not what the model runs on: it was edited "
                f"after loading, or {self.model.spec.architecture} divides it in a way that mechheads does not know. "
                "Load the model anew, or ablate at 'z' instead."
            )

    def owned(self, heads: HeadSet) -> int:
        """Parameters that belong to some heads alone; keys and values where a whole group is among them."""
        spec, total = self.model.spec, 0
        for layer, mine in heads.by_layer().items():
            full = [j for j, n in enumerate(per_group(spec, mine)) if n == spec.n_heads // spec.n_key_value_heads]
            gone = {"q": mine, "k": full, "v": full}
            for name in self.layouts[layer].owners:
                weight = self.weight(layer, name)
                total += self.layouts[layer].part(name, weight, lambda kind, i, gone=gone: i in gone[kind]).numel()
        return total

    def sliced(self, plan: Plan, *, device: str | None = None) -> dict[str, Tensor]:
        """Attention weights of the heads that stay (all of them copies), by checkpoint name; where they are if None."""
        out = {}
        for layer, path in enumerate(self.attention):
            stay = {"q": plan.kept[layer], "k": plan.kept_groups[layer], "v": plan.kept_groups[layer]}
            for name in self.layouts[layer].owners:
                weight = self.weight(layer, name)
                weight = weight if device is None else weight.to(device)
                part = self.layouts[layer].part(name, weight, lambda kind, i, stay=stay: i in stay[kind])
                out[f"{path}.{name}"] = part
        return out


def _clean(path: str) -> str:
    """A module's path without the wrappers of TransformerLens."""
    return ".".join(part for part in path.split(".") if part != "_original_component")


def _live_tensors(hf: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Every parameter and buffer of a wrapped model by its name in a checkpoint."""
    # Backwards, so that in a dict the outermost module of a name has the last word.
    for path, module in reversed(list(hf.named_modules(remove_duplicate=False))):
        for name, tensor in (*module._buffers.items(), *module._parameters.items()):
            if tensor is not None:
                yield f"{_clean(path)}.{name}".lstrip("."), tensor


def per_group(spec: ModelSpec, heads: Sequence[int]) -> list[int]:
    """How many of a layer's heads are in each key/value group."""
    counts = [0] * spec.n_key_value_heads
    for head in heads:
        counts[Head(0, head).kv_group(spec.n_heads, spec.n_key_value_heads)] += 1
    return counts


@dataclass(frozen=True)
class Plan:
    """What goes from the file, and what is masked.

    Attributes:
        kept: For each layer the query heads that stay.
        kept_groups: For each layer the key/value heads that stay.
        masked: Requested heads that stay.
        empty: The Hugging Face model to fill, with its configuration.
    """

    kept: tuple[tuple[int, ...], ...]
    kept_groups: tuple[tuple[int, ...], ...]
    masked: HeadSet
    empty: Any


def physical_plans(source: Checkpoint, requested: HeadSet, why_not: list[str]) -> Iterator[Plan]:
    """Ways to leave some of the heads out, most heads first; ``why_not`` gets why more cannot be.

    All layers have the same number of key/value heads, and of query heads for each of them. So g whole groups can go
    where every layer has g groups that were requested whole, and r query heads of every other group where every
    group of every layer has r that were requested.
    """
    fixed = _fixed(source)
    if fixed:
        why_not.append(fixed)
        return
    spec = source.model.spec
    per_layer = requested.by_layer()
    counts = [per_group(spec, per_layer.get(layer, [])) for layer in range(spec.n_layers)]
    size = spec.n_heads // spec.n_key_value_heads
    groups = min(min(layer.count(size) for layer in counts), spec.n_key_value_heads - 1)
    each = min(min(map(min, counts)), size - 1)
    stay = (spec.n_key_value_heads - groups) * (size - each)
    if len(requested) > spec.n_layers * (spec.n_heads - stay):
        alike = [f"{groups} whole key/value group{'s' * (groups > 1)}"] * bool(groups)
        alike += [f"{each} query head{'s' * (each > 1)} of every {'other ' * bool(groups)}group"] * bool(each)
        why_not.append(
            "a configuration has one number of heads for all layers, so only what goes from every layer alike can be "
            f"left out: here {' and '.join(alike) or 'nothing'}"
        )
    pairs = [(g, r) for g in range(groups + 1) for r in range(each + 1) if g or r]
    for g, r in sorted(pairs, key=lambda pair: ((spec.n_key_value_heads - pair[0]) * (size - pair[1]), -pair[0])):
        plan = _without(source, requested, counts, g, r, why_not)
        if plan is not None:
            yield plan


def masking_plan(source: Checkpoint, requested: HeadSet) -> Plan:
    """All of the heads stay, masked."""
    spec = source.model.spec
    kept, groups = ((tuple(range(n)),) * spec.n_layers for n in (spec.n_heads, spec.n_key_value_heads))
    return Plan(kept, groups, requested, source.empty(source.config))


def _fixed(source: Checkpoint) -> str:
    """Why an architecture cannot lose heads at all; empty where it can, as far as is known before trying."""
    spec, config = source.model.spec, source.config.get_text_config()
    unknown = [name for layout in source.layouts for name in layout.unknown]
    if source.model.backend.flat_qk_norm:
        return (
            f"{spec.architecture} normalises the queries and the keys of all heads together, so leaving some out would "
            "change the others"
        )
    if unknown:
        return f"it is not known which heads {unknown[0]!r} of {spec.architecture}'s attention belongs to"
    if getattr(config, "is_heterogeneous", False):
        return f"the layers of this {spec.architecture} differ in their heads already"
    # Heads of twice the width: where that changes nothing, the configuration cannot say a width.
    wider = _resized(source, (spec.n_heads, spec.n_key_value_heads, 2 * spec.d_head), [])
    out = f"{source.attention[0]}.{source.layouts[0].out}"
    if wider is not None and wider.get_parameter(out).shape == source.weights[out].shape:
        return (
            f"{type(source.config).__name__} has no head_dim: a head's width follows from the number of heads, so with "
            "fewer of them the others would be wider"
        )
    return ""


def _without(
    source: Checkpoint, requested: HeadSet, counts: list[list[int]], groups: int, each: int, why_not: list[str]
) -> Plan | None:
    """The plan without some whole groups a layer and some heads of every other group, if there can be one."""
    spec = source.model.spec
    size = spec.n_heads // spec.n_key_value_heads
    kept, kept_groups = [], []
    for layer, layer_counts in enumerate(counts):
        gone = [j for j, count in enumerate(layer_counts) if count == size][:groups]
        kept_groups.append(tuple(j for j in range(spec.n_key_value_heads) if j not in gone))
        stay: list[int] = []
        for j in kept_groups[-1]:
            mine = range(j * size, (j + 1) * size)
            leave = [h for h in mine if (layer, h) in requested][:each]
            stay += [h for h in mine if h not in leave]
        kept.append(tuple(stay))
    empty = _resized(source, (len(kept[0]), len(kept_groups[0]), spec.d_head), why_not)
    masked = HeadSet(head for head in requested if head.head in kept[head.layer])
    plan = Plan(tuple(kept), tuple(kept_groups), masked, empty)
    return plan if empty is not None and _fits(source, plan, why_not) else None


def _resized(source: Checkpoint, sizes: tuple[int, int, int], why_not: list[str]) -> Any:
    """The Hugging Face model with other numbers of query heads and key/value heads, and their width.

    None where its configuration or the model itself refuses such numbers.
    """
    from huggingface_hub.errors import StrictDataclassError

    config, text = source.config, source.config.get_text_config()
    raw = config.to_dict()
    inner = raw if text is config else raw[next(name for name, value in vars(config).items() if value is text)]
    inner |= dict(zip(("num_attention_heads", "num_key_value_heads", "head_dim"), sizes, strict=True))
    try:
        return source.empty(type(config).from_dict(raw))
    except (StrictDataclassError, ValueError, TypeError) as error:
        said = " ".join(str(error.__cause__ or error).split()).rstrip(".")
        why_not.append(f"{type(config).__name__} refuses {sizes[0]} heads a layer: {said}")
        return None


def _fits(source: Checkpoint, plan: Plan, why_not: list[str]) -> bool:
    """Whether the model of the plan's configuration has the shapes of the heads that stay."""
    wanted = {
        name: tuple(weight.shape) for name, weight in (source.weights | source.sliced(plan, device="meta")).items()
    }
    have = {name: tuple(weight.shape) for name, weight in plan.empty.state_dict().items()}
    wrong = [name for name, shape in wanted.items() if have.get(name) != shape]
    if wrong:
        why_not.append(
            f"with {len(plan.kept[0])} heads a layer, {wrong[0]} of a {type(plan.empty).__name__} is "
            f"{list(have.get(wrong[0], ()))}, but what stays is {list(wanted[wrong[0]])}"
        )
    return not wrong


__all__ = ["Checkpoint", "Layout", "Plan", "masking_plan", "per_group", "physical_plans", "read_layout"]
