"""Interventions on a Hugging Face model with plain PyTorch hooks and an attention function of our own.

Slow on purpose: one prompt at a time, no padding, no cache (every generated token is a whole new run), loops over
positions. Nothing here knows TransformerLens or the package's interventions, only what they are declared to mean.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import tiny
import torch
from tiny import D_HEAD, HEADS, LAYERS, WIDTH
from torch import Tensor
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

Heads = Sequence[tuple[int, int]]
Prompt = tuple[int, ...]


@dataclass(frozen=True)
class Edit:
    """One intervention, as plain values.

    Attributes:
        kind: ``zero mean mean_positional resample patch bias prune``.
        site: ``z q pattern attn_scores``.
        heads: (layer, head) pairs.
        positions: ``all``, ``prompt``, ``answer`` or indices.
        prompts: Prompts that means are taken over and donors drawn from.
        seed: Of the draw.
        partners: Partner of each prompt.
        strength: Added to scores.
        tokens: At the keys of these tokens, or
        keys: at these positions.
    """

    kind: str
    site: str
    heads: Heads
    positions: str | tuple[int, ...] = "all"
    prompts: Sequence[Prompt] = ()
    seed: int = 0
    partners: Mapping[Prompt, Prompt] = field(default_factory=dict)
    strength: float = 0.0
    tokens: frozenset[int] = frozenset()
    keys: tuple[int, ...] = ()

    def acts_at(self, position: int, n_prompt: int) -> bool:
        """Whether a query position is one of its own."""
        if self.kind == "patch" and position >= n_prompt:
            return False
        if self.positions == "all":
            return True
        if self.positions == "prompt":
            return position < n_prompt
        if self.positions == "answer":
            return position >= n_prompt - 1
        return any(position == (p if p >= 0 else n_prompt + p) for p in self.positions if isinstance(p, int))

    def on_key(self, position: int, token: int, n_prompt: int) -> bool:
        """Whether attention to a position is biased."""
        return token in self.tokens or any(position == (k if k >= 0 else n_prompt + k) for k in self.keys)


def donor(prompt: Prompt, prompts: Sequence[Prompt], seed: int) -> Prompt:
    """The draw, written down so that it cannot change unnoticed: others in order of appearance, hash modulo number."""
    others: list[Prompt] = []
    for one in prompts:
        if one != prompt and one not in others:
            others.append(one)
    text = f"{seed}:" + " ".join(str(t) for t in prompt)
    number = int(hashlib.sha256(text.encode()).hexdigest()[:16], 16)
    return others[number % len(others)]


def _attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *, scaling: float,
    softcap: float | None = None, s_aux: Tensor | None = None, **_: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Attention as every architecture here means it, in float64, with whatever edits are in force."""
    owner, layer = module.plain_owner
    group = query.shape[1] // key.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1)[0] for t in (key, value))
    scores = query.double()[0] @ k.transpose(1, 2) * scaling
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    length, window = scores.shape[-1], tiny.windows(owner.name)[layer]
    at = torch.arange(length)
    hidden = at[None] > at[:, None]
    if window is not None:
        hidden = hidden | (at[:, None] - at[None] >= window)
    scores = owner.edited(scores, layer, "attn_scores").masked_fill(hidden, -torch.inf)
    if s_aux is not None:
        sink = s_aux.double()[:, None, None].expand(-1, length, 1)
        pattern = torch.cat([scores, sink], dim=-1).softmax(-1)[..., :-1]
    else:
        pattern = scores.softmax(-1)
    pattern = owner.edited(pattern, layer, "pattern")
    return (pattern @ v).to(query.dtype).transpose(0, 1)[None], pattern[None]


ALL_ATTENTION_FUNCTIONS.register("plain_interventions", _attention)


class Plain:
    """A Hugging Face model whose heads can be edited."""

    def __init__(self, name: str):
        self.name = name
        self.reference = tiny.Reference(name)
        self.model = self.reference.model
        self.model.config._attn_implementation = "plain_interventions"
        self._edits: Sequence[Edit] = ()
        self._tokens: list[int] = []
        self._n_prompt = 0
        self._records: dict[tuple[str, Prompt], Tensor] = {}
        self._means: dict[Any, Tensor] = {}
        for layer, attention in enumerate(self.reference.attentions):
            attention.plain_owner = (self, layer)
            self._hook(layer)

    # -- running ---------------------------------------------------------------------------------

    def logits(self, tokens: Sequence[int], edits: Sequence[Edit] = (), n_prompt: int | None = None) -> np.ndarray:
        """``[pos vocab]`` of a prompt with perhaps some answer behind it."""
        for edit in edits:  # before anything is in force
            self._prepare(edit, tuple(tokens[:n_prompt]))
        with self._in_force(edits, tokens, len(tokens) if n_prompt is None else n_prompt):
            return self.reference.logits(tokens)

    def greedy(
        self, prompt: Sequence[int], edits: Sequence[Edit], n: int
    ) -> tuple[list[int], list[float], list[float]]:
        """Tokens before the end token, their log-probabilities, and by how much each step was decided."""
        said: list[int] = []
        logprobs, margins = [], []
        for _ in range(n):
            row = self.logits([*prompt, *said], edits, len(prompt))[-1]
            best, second = np.sort(row)[:-3:-1]
            margins.append(float(best - second))
            if int(row.argmax()) == tiny.EOS:
                break
            said.append(int(row.argmax()))
            logprobs.append(float(best - np.logaddexp.reduce(row)))
        return said, logprobs, margins

    @contextlib.contextmanager
    def _in_force(self, edits: Sequence[Edit], tokens: Sequence[int], n_prompt: int) -> Iterator[None]:
        self._edits, self._tokens, self._n_prompt = edits, list(tokens), n_prompt
        kept = [out.weight.detach().clone() for out in self.reference.outs]
        for edit in edits:
            if edit.kind == "prune":
                for layer, head in edit.heads:
                    self.reference.zero_head(layer, head)
        try:
            yield
        finally:
            self._edits = ()
            with torch.no_grad():
                for out, weight in zip(self.reference.outs, kept, strict=True):
                    out.weight.copy_(weight)

    # -- the edits -------------------------------------------------------------------------------

    def edited(self, t: Tensor, layer: int, site: str) -> Tensor:
        """``[head query key]`` scores or weights under the edits at a site, in their order."""
        t = t.clone()
        for edit in self._edits:
            for at, head in edit.heads:
                if (at, edit.site) != (layer, site):
                    continue
                for query in range(t.shape[1]):
                    if not edit.acts_at(query, self._n_prompt):
                        continue
                    if edit.kind == "zero":
                        t[head, query] = 0.0
                        continue
                    for key in range(t.shape[2]):
                        if edit.on_key(key, self._tokens[key], self._n_prompt):
                            t[head, query, key] += edit.strength
        return t

    def _replaced(self, x: Tensor, layer: int, site: str) -> Tensor:
        """``[pos head d_head]`` under the edits at ``z`` or ``q``."""
        x = x.clone()
        for edit in self._edits:
            for at, head in edit.heads:
                if (at, edit.site) != (layer, site) or edit.kind == "prune":
                    continue
                for p in range(len(x)):
                    if edit.acts_at(p, self._n_prompt):
                        x[p, head] = self._value(edit, layer, head, p)
        return x

    def _value(self, edit: Edit, layer: int, head: int, position: int) -> Tensor:
        """What stands in a head's place."""
        prompt = tuple(self._tokens[: self._n_prompt])
        if edit.kind == "zero":
            return torch.zeros(D_HEAD)
        if edit.kind == "patch":
            return self._records[edit.site, edit.partners[prompt]][layer, position, head]
        if edit.kind == "resample":
            other = donor(prompt, edit.prompts, edit.seed)
            from_end = min(max(position - len(prompt) + len(other), 0), len(other) - 1)
            return self._records[edit.site, other][layer, from_end, head]
        own = [p for p in edit.prompts if len(p) > position]
        if edit.kind == "mean" or not own:
            return self._mean(edit, layer, head)
        return torch.stack([self._records[edit.site, p][layer, position, head] for p in own]).double().mean(0).float()

    def _mean(self, edit: Edit, layer: int, head: int) -> Tensor:
        key = (edit.site, tuple(edit.prompts), layer, head)
        if key not in self._means:
            every = [self._records[edit.site, p][layer, :, head] for p in edit.prompts]
            self._means[key] = torch.cat(every).double().mean(0).float()
        return self._means[key]

    def _prepare(self, edit: Edit, prompt: Prompt) -> None:
        """Run the prompts it takes something from, unedited."""
        needed = list(edit.prompts)
        if edit.kind == "patch":
            needed = [edit.partners[prompt]]
        for one in needed:
            if (edit.site, one) not in self._records:
                self._records[edit.site, one] = self.record(one, edit.site)

    def record(self, tokens: Sequence[int], site: str) -> Tensor:
        """``[layer pos head d_head]`` of an unedited run."""
        kept: dict[int, Tensor] = {}
        self._keep = lambda layer, at, x: kept.__setitem__(layer, x.clone()) if at == site else None
        try:
            self.reference.logits(tokens)
        finally:
            self._keep = None
        return torch.stack([kept[layer] for layer in range(LAYERS)])

    # -- where z and q are -----------------------------------------------------------------------

    _keep: Any = None

    def _pass(self, x: Tensor, layer: int, site: str) -> Tensor:
        if self._keep is not None:
            self._keep(layer, site, x)
        return self._replaced(x, layer, site)

    def _hook(self, layer: int) -> None:
        attention, out = self.reference.attentions[layer], self.reference.outs[layer]

        def at_z(module: Any, args: Any) -> Any:
            x = args[0]
            return (self._pass(x[0].reshape(-1, HEADS, D_HEAD), layer, "z").reshape(x.shape), *args[1:])

        def at_q(module: Any, args: Any, output: Tensor) -> Tensor:
            new = output.clone()
            if self.name == "neox":  # for each head: its query, its key, its value
                own = new[0].view(-1, HEADS, 3, D_HEAD)[:, :, 0]
            else:  # queries come first, or alone
                own = new[0, :, :WIDTH].view(-1, HEADS, D_HEAD)
            own.copy_(self._pass(own.clone(), layer, "q"))
            return new

        names = {"gpt2": "c_attn", "neox": "query_key_value", "phi3": "qkv_proj"}
        out.register_forward_pre_hook(at_z)
        getattr(attention, names.get(self.name, "q_proj")).register_forward_hook(at_q)
