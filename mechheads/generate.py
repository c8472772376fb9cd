"""Greedy generation, batched, under whatever interventions are in force."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mechheads.decode import greedy
from mechheads.errors import InvalidInput
from mechheads.model import Model


@dataclass(frozen=True)
class Generation:
    """What a model said.

    Attributes:
        tokens: New tokens alone; the stop token is left out.
        text: Their text.
        logprobs: Log-probability of each token under the model, in nats.
        stopped: ``"stop token"``, ``"newline"`` or ``"length"``.
    """

    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[float, ...]
    stopped: str


def generate(
    model: Model,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int = 50,
    stop_at_newline: bool = False,
    batch_size: int = 8,
    padding: str = "left",
) -> list[Generation]:
    """Generate greedily from token prompts, in batches of similar length, with a KV cache.

    Args:
        model: The model, with any interventions already applied (``with apply(model, ...)``).
        prompts: Token ids of each prompt.
        max_new_tokens: Longest answer.
        stop_at_newline: End before a line break.
        batch_size: Prompts run together.
        padding: ``"left"`` or ``"right"``; changes no result.

    Returns:
        One Generation a prompt, in the order given.

    Raises:
        InvalidInput: For no prompts, or one that the model cannot run.
    """
    if not prompts:
        raise InvalidInput("there are no prompts to run.")
    if batch_size < 1:
        raise InvalidInput(f"batch_size is {batch_size}; it must be at least 1.")
    for i, prompt in enumerate(prompts):
        model.check_tokens(prompt, what=f"prompt {i}")
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    out: dict[int, Generation] = {}
    for start in range(0, len(order), batch_size):
        some = order[start : start + batch_size]
        decoded = greedy(
            model,
            [prompts[i] for i in some],
            max_new_tokens=max_new_tokens,
            stop_at_newline=stop_at_newline,
            padding=padding,
        )
        for i, d in zip(some, decoded, strict=True):
            text = model.decode(d.tokens) if d.tokens else ""
            out[i] = Generation(tuple(d.tokens), text, tuple(d.logprobs), d.stopped)
    return [out[i] for i in range(len(prompts))]
