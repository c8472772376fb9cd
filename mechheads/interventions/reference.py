"""What stands in an ablated head's place: means over a reference set, and activations of single prompts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.backends.base import SITES, HookFn
from mechheads.decode import pad
from mechheads.errors import InvalidInput
from mechheads.model import Model
from mechheads.trials import TrialSet


@torch.no_grad()
def mean_activation(
    model: Model, site: str, reference: TrialSet, *, batch_size: int = 8
) -> Float[Tensor, "layer head d_head"]:
    """Mean of ``z`` or ``q`` for each head, over all prompt positions of the reference trials, in float32.

    Raises:
        InvalidInput: If a reference prompt is too long for the model or was made for another one.
    """
    spec = model.spec
    total = torch.zeros(spec.n_layers, spec.n_heads, spec.d_head, dtype=torch.float64)

    def add(layer: int, t: Tensor, mask: Tensor) -> None:
        total[layer] += (t.float() * mask[:, :, None, None]).sum((0, 1)).double().cpu()

    count = _over_prompts(model, site, reference, batch_size, add)
    return (total / sum(count)).float()


@torch.no_grad()
def positional_mean(
    model: Model, site: str, reference: TrialSet, *, batch_size: int = 8
) -> Float[Tensor, "position layer head d_head"]:
    """Mean of ``z`` or ``q`` at each position, over the reference prompts that reach it, in float32.

    Its last entry, one behind the longest prompt's, is the mean over all positions of all prompts. It takes
    ``4 x longest prompt x n_layers x n_heads x d_head`` bytes.

    Raises:
        InvalidInput: If a reference prompt is too long for the model or was made for another one.
    """
    spec = model.spec
    longest = max(len(trial.tokens) for trial in reference)
    total = torch.zeros(longest, spec.n_layers, spec.n_heads, spec.d_head, dtype=torch.float64)

    def add(layer: int, t: Tensor, mask: Tensor) -> None:
        for row, kept in zip(t.double().cpu(), mask.bool().cpu(), strict=True):
            own = row[kept]
            total[: len(own), layer] += own

    lengths = torch.tensor(_over_prompts(model, site, reference, batch_size, add))
    reach = (lengths[:, None] > torch.arange(longest)).sum(0)
    by_position = total / reach[:, None, None, None]
    overall = total.sum(0, keepdim=True) / lengths.sum()
    return torch.cat([by_position, overall]).float()


def _over_prompts(
    model: Model, site: str, reference: TrialSet, batch_size: int, add: Callable[[int, Tensor, Tensor], None]
) -> list[int]:
    """Run every reference prompt and hand over what each layer had, ``[row pos head d_head]``; the prompts' lengths."""
    for trial in reference:
        model.check_tokens(trial.tokens, what=f"reference trial {trial.id!r}")
    ordered = sorted((trial.tokens for trial in reference), key=len)
    for start in range(0, len(ordered), batch_size):
        tokens, mask = pad(ordered[start : start + batch_size], "left", model.backend.device)

        def hook(layer: int, mask: Tensor = mask) -> HookFn:
            return lambda t: add(layer, t, mask)

        pairs = [(f"blocks.{layer}.{SITES[site]}", hook(layer)) for layer in range(model.spec.n_layers)]
        with model.lock, model.hooks(pairs):
            model.backend.run(tokens, mask, None, last_only=True)
    return [len(tokens) for tokens in ordered]


@torch.no_grad()
def activations(
    model: Model, site: str, prompts: Sequence[Sequence[int]], heads: Mapping[int, Sequence[int]]
) -> dict[tuple[int, ...], dict[int, Float[Tensor, "pos head d_head"]]]:
    """``z`` or ``q`` of single prompts at some heads of some layers, by the prompt's tokens."""
    out: dict[tuple[int, ...], dict[int, Tensor]] = {}
    for prompt in dict.fromkeys(map(tuple, prompts)):
        kept: dict[int, Tensor] = {}

        def hook(layer: int, kept: dict[int, Tensor] = kept) -> HookFn:
            def keep(t: Tensor) -> None:
                kept[layer] = t[0, :, list(heads[layer])].detach().clone()

            return keep

        tokens = torch.tensor([prompt], device=model.backend.device)
        with model.hooks([(f"blocks.{layer}.{SITES[site]}", hook(layer)) for layer in heads]):
            model.backend.run(tokens, torch.ones_like(tokens), None, last_only=True)
        out[prompt] = kept
    return out


def donor_of(prompt: Sequence[int], reference: TrialSet, seed: int) -> tuple[int, ...]:
    """The reference prompt whose activations a prompt gets, drawn from the seed and the prompt alone.

    Raises:
        InvalidInput: If the reference set holds no prompt but this one.
    """
    own = tuple(prompt)
    others = list(dict.fromkeys(tuple(t.tokens) for t in reference if tuple(t.tokens) != own))
    if not others:
        raise InvalidInput(
            f"the reference set {reference.name!r} holds no prompt but the one that is run, so there is nothing to "
            "resample from; give more trials."
        )
    digest = hashlib.sha256(f"{seed}:{' '.join(map(str, own))}".encode()).digest()
    return others[int.from_bytes(digest[:8], "big") % len(others)]
