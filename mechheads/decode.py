"""Batched greedy decoding under a KV cache, with a view of every step. Capture and generation share it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mechheads.backends.base import HookFn, Row
from mechheads.errors import InvalidInput, UnknownName
from mechheads.model import Model

PADDINGS = ("left", "right")


@dataclass
class Batch:
    """Prompts padded to one length, and the rows of them still being decoded.

    Attributes:
        lengths: True length of every prompt.
        rows: Index of the prompt behind each live row.
        mask: ``[row total]``, 1 at real tokens, over all cached positions and the ones now run.
        cache: The back end's cache.
    """

    lengths: list[int]
    rows: list[int]
    mask: Tensor
    cache: Any = None

    def positions(self, row: int) -> Tensor:
        """Columns of the key axis that hold a live row's own tokens, in order."""
        return self.mask[row].nonzero().squeeze(-1)


class Observer:
    """Hooks for the decoding steps, and what to do with the tensors they saw. This one watches nothing."""

    def hooks(self) -> list[tuple[str, HookFn]]:
        """Hooks by TransformerLens name, installed after the prefill."""
        return []

    def on_prefill(self, batch: Batch, cached: int | None) -> None:
        """Called before the first step; ``cached`` is how many last tokens of each prompt are not in the cache yet.

        None if the cache is empty and the first step runs whole prompts.
        """

    def on_step(self, batch: Batch) -> None:
        """Called after each step, while what the hooks saw is fresh."""

    def on_end(self, i: int, batch: Batch) -> None:
        """Called once for each prompt, at its last step, while its rows are still in the cache."""


@dataclass
class Decoded:
    """One greedy answer.

    Attributes:
        tokens: New tokens, the stop token left out.
        logprobs: Natural-log probability of each under the model (nats).
        steps: Query rows run: one for each new token, and one more for the stop token if one came.
        stopped: Why it ended: ``"stop token"``, ``"newline"``, ``"length"`` or ``"not generated"``.
        stop_token: The token that ended it, left out of ``tokens``; None if the length did.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    steps: int = 0
    stopped: str = "length"
    stop_token: int | None = None


@torch.no_grad()
def greedy(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 50,
    stop_at_newline: bool = False,
    padding: str = "left",
    observer: Observer | None = None,
    tail: int = 1,
    generate: bool = True,
) -> list[Decoded]:
    """Decode a batch of prompts greedily.

    The prompt up to its last ``tail`` tokens is prefilled without storing any pattern (on the twin where it is in step
    with the hooked model); from there on, every step runs on the hooked model, so hooks see ``tail`` query rows in
    the first step and one in each after it. With hooks already on the model, or a prompt not longer than the tail,
    whole prompts run through them.

    Args:
        model: The model.
        prompts: Token ids of each prompt.
        max_new_tokens: At most so many new tokens; fewer where the context ends first.
        stop_at_newline: End before a token whose text contains a line break.
        padding: Side on which shorter prompts are padded; changes no result.
        observer: Watches the steps (capture).
        tail: Tokens at the end of each prompt whose query rows the observer wants.
        generate: False to run the prompts alone, without an answer.

    Raises:
        InvalidInput: If a prompt is empty, out of vocabulary, or longer than the model's context.
    """
    _check(model, prompts, max_new_tokens, padding, tail)
    observer = observer or Observer()
    out = [Decoded() for _ in prompts]
    rows = [Row(tuple(p), done.tokens) for p, done in zip(prompts, out, strict=True)]
    with model.lock, model.running(rows):
        batch, pending, cached = _start(model, prompts, padding, tail)
        observer.on_prefill(batch, cached)
        return _decode(model, batch, pending, out, observer, max_new_tokens, stop_at_newline, generate)


def _decode(
    model: Model, batch: Batch, pending: Tensor, out: list[Decoded], observer: Observer,
    max_new_tokens: int, stop_at_newline: bool, generate: bool,
) -> list[Decoded]:  # fmt: skip
    """The steps of ``greedy`` after the prefill."""
    limits = answer_limits(model, batch.lengths, max_new_tokens)
    with model.hooks(observer.hooks()):
        while True:
            logits = model.backend.run(pending, batch.mask, batch.cache, last_only=True)[:, -1].float()
            observer.on_step(batch)
            if not generate:
                for i, row in enumerate(batch.rows):
                    out[row] = Decoded(steps=1, stopped="not generated")
                    observer.on_end(i, batch)
                break
            best, alive = take_best(model, logits, out, batch.rows, limits, stop_at_newline)
            for i in range(len(batch.rows)):
                if i not in alive:
                    observer.on_end(i, batch)
            if not alive:
                break
            pending = next_step(model, batch, alive, best)
    return out


def answer_limits(model: Model, lengths: Sequence[int], max_new_tokens: int) -> list[int]:
    """Longest answer of each prompt: each has its own end of context, or a long one would cut a short one's answer."""
    return [min(max_new_tokens, model.spec.n_ctx - length + 1) for length in lengths]


def next_step(model: Model, batch: Batch, alive: list[int], best: Tensor) -> Tensor:
    """Drop the rows that ended, from the batch and its cache, and make room for a token; returns it ``[row 1]``."""
    if len(alive) < len(batch.rows):
        keep = torch.tensor(alive, device=batch.mask.device)
        batch.cache = model.backend.select_rows(batch.cache, keep)
        batch.mask, best = batch.mask[keep], best[keep]
        batch.rows = [batch.rows[i] for i in alive]
        if model.rows is not None:
            model.rows[:] = [model.rows[i] for i in alive]
    batch.mask = torch.cat([batch.mask, torch.ones_like(batch.mask[:, :1])], dim=1)
    return best[:, None]


def take_best(
    model: Model, logits: Tensor, out: list[Decoded], rows: list[int], limits: list[int], stop_at_newline: bool
) -> tuple[Tensor, list[int]]:
    """Record the likeliest token of every live row; returns them ``[row]``, and the places of rows that go on.

    Args:
        model: The model.
        logits: ``[row vocab]`` float32.
        out: Answers, extended here.
        rows: Which answer each live row is.
        limits: Longest answer of each.
        stop_at_newline: End before a token with a line break.
    """
    best = logits.argmax(-1)
    logprobs = logits.log_softmax(-1).gather(-1, best[:, None]).squeeze(-1)
    alive = []
    for i, (row, token, logprob) in enumerate(zip(rows, best.tolist(), logprobs.tolist(), strict=True)):
        done = out[row]
        done.steps += 1
        if token in model.stop_tokens:
            done.stopped, done.stop_token = "stop token", token
        elif stop_at_newline and model.is_newline(token):
            done.stopped, done.stop_token = "newline", token
        else:
            done.tokens.append(token)
            done.logprobs.append(logprob)
            if len(done.tokens) < limits[row]:
                alive.append(i)
    return best, alive


def _check(model: Model, prompts: Sequence[Sequence[int]], max_new_tokens: int, padding: str, tail: int) -> None:
    """Refuse prompts the model cannot run as asked."""
    if padding not in PADDINGS:
        raise UnknownName("padding side", padding, PADDINGS)
    if max_new_tokens < 1:
        raise InvalidInput(f"max_new_tokens is {max_new_tokens}; it must be at least 1.")
    if not prompts:
        raise InvalidInput("there are no prompts to run.")
    for i, prompt in enumerate(prompts):
        if not prompt:
            raise InvalidInput(f"prompt {i} has no tokens.")
        if len(prompt) > model.spec.n_ctx:
            raise InvalidInput(
                f"prompt {i} has {len(prompt)} tokens, but {model.spec.name!r} takes at most {model.spec.n_ctx}; "
                "shorten it."
            )
        if min(prompt) < 0 or max(prompt) >= model.spec.d_vocab:
            raise InvalidInput(
                f"prompt {i} holds token ids outside 0 to {model.spec.d_vocab - 1}; it was made for another model."
            )
    if padding == "right":
        check_right_padding(model, prompts, tail)


def check_right_padding(model: Model, prompts: Sequence[Sequence[int]], tail: int) -> None:
    """A gap of padding between prompt and answer would count as distance in a sliding window."""
    windows = [model.backend.window(layer) for layer in range(model.spec.n_layers)]
    if any(w is not None for w in windows) and len({len(p) for p in prompts}) > 1:
        raise InvalidInput(
            f"{model.spec.name!r} has sliding windows, which count padding between prompt and answer as distance; "
            "use padding='left'."
        )
    lengths = {len(p) for p in prompts}
    if min(lengths) <= tail and len(lengths) > 1:
        raise InvalidInput(f"padding='right' needs prompts of at least {tail + 1} tokens here; use padding='left'.")


def pad(prompts: Sequence[Sequence[int]], side: str, device: torch.device) -> tuple[Tensor, Tensor]:
    """Prompts as one ``[batch pos]`` tensor, shorter ones padded on a side, and the mask of their own tokens."""
    width = max(map(len, prompts))
    tokens = torch.zeros(len(prompts), width, dtype=torch.long)
    mask = torch.zeros_like(tokens)
    for i, prompt in enumerate(prompts):
        at = slice(width - len(prompt), width) if side == "left" else slice(0, len(prompt))
        tokens[i, at] = torch.tensor(list(prompt), dtype=torch.long)
        mask[i, at] = 1
    return tokens.to(device), mask.to(device)


def _start(model: Model, prompts: Sequence[Sequence[int]], padding: str, tail: int) -> tuple[Batch, Tensor, int | None]:
    """Pad, prefill, and say which tokens the first step runs; None if it runs whole prompts."""
    device = model.backend.device
    lengths = [len(p) for p in prompts]
    fast = model.backend.fast_prefill()
    split = min(lengths) > tail and (fast or padding == "right")
    heads = [p[:-tail] if split else p for p in prompts]
    tokens, mask = pad(heads, padding, device)
    batch = Batch(lengths, list(range(len(prompts))), mask)
    if not split:
        batch.cache = model.backend.new_cache(len(prompts))
        return batch, tokens, None
    batch.cache = model.backend.prefill(tokens, mask, fast=fast)
    last = torch.tensor([list(p[-tail:]) for p in prompts], device=device)
    batch.mask = torch.cat([mask, torch.ones_like(last)], dim=1)
    return batch, last, tail
