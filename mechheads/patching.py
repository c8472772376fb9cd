"""Activation patching at ``z`` between a trial's prompt and the same prompt without its needle."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.backends.base import SITES, HookFn
from mechheads.capture import answer_tokens, capture
from mechheads.errors import HookNeverFired, InvalidInput, UnknownName
from mechheads.model import Model
from mechheads.stats import check_count
from mechheads.trials import Trial

# ``(z, span)`` with ``z [row pos head d_head]`` of the positions in ``span``, counted from the first position run.
Edit = Callable[[Tensor, slice], Tensor]

METRICS = ("logit_diff", "logprob")
_PATTERN_BYTES = 2**30
_MOST_ROWS = 16
PATCH_BATCH = "patch_batch (None for a size that fits)"


@dataclass(frozen=True)
class Pair:
    """A trial's prompt with and without its needle, up to the answer, and the answer to force.

    Attributes:
        clean: Prompt, then what the model said before the answer.
        corrupt: The same, with every token of the needle replaced; equal in length.
        answer: The answer's tokens as the model said them after the clean prompt; the first is *gold*.
        start: First position at which the two differ.
    """

    clean: tuple[int, ...]
    corrupt: tuple[int, ...]
    answer: tuple[int, ...]
    start: int

    @property
    def gold(self) -> int:
        """The answer's first token."""
        return self.answer[0]


def make_pair(
    model: Model, trial: Trial, *, filler: str | int, max_new_tokens: int = 50, stop_at_newline: bool = True
) -> Pair | None:
    """The clean and the corrupted prompt of a trial, from the model's own greedy answer.

    The answer's tokens are those the model generated where it said the gold answer (``TrialCapture.answer_steps``), so
    spaces and case are as the model writes them at that place; what it said before them belongs to both prompts. A
    trial without a gold answer takes everything that was said.

    Args:
        model: The model.
        trial: The trial; needs a ``needle`` span.
        filler: What each token of the needle becomes; see ``filler_token``.
        max_new_tokens: Longest answer.
        stop_at_newline: End the answer before a line break.

    Returns:
        The pair, or None if the model did not say the answer.

    Raises:
        UnknownName: If the trial has no needle.
        InvalidInput: If the filler cannot be used, the needle holds nothing else, or an option is of another type.
    """
    check_count("max_new_tokens", max_new_tokens)
    if not isinstance(stop_at_newline, bool):
        raise InvalidInput(f"stop_at_newline is {stop_at_newline!r}; it must be True or False.")
    needle = trial.positions("needle")
    token = filler_token(model, filler)
    corrupt = list(trial.tokens)
    for position in needle:
        corrupt[position] = token
    if corrupt == list(trial.tokens):
        raise InvalidInput(
            f"trial {trial.id!r}: the needle is nothing but the filler {filler!r}, so replacing it changes nothing; "
            "choose another filler."
        )
    one = capture(model, [trial], needs=(), max_new_tokens=max_new_tokens, stop_at_newline=stop_at_newline)[0]
    said = list(one.decoded.tokens)
    steps = range(len(said)) if trial.answer is None else one.answer_steps
    if not steps:
        return None
    before = said[: steps[0]]
    return Pair(
        clean=(*trial.tokens, *before),
        corrupt=(*corrupt, *before),
        answer=tuple(said[s] for s in steps),
        start=next(p for p in needle if corrupt[p] != trial.tokens[p]),
    )


def filler_token(model: Model, filler: str | int) -> int:
    """The token that stands in for the needle's.

    Args:
        model: Whose tokenizer to use.
        filler: Text that is one token by itself, or a token id.

    Raises:
        InvalidInput: If the text is not exactly one token of this model, there is no such token id, or it is neither.
    """
    if isinstance(filler, bool) or not isinstance(filler, (str, int, np.integer)):
        raise InvalidInput(
            f"filler is {filler!r}, a {type(filler).__name__}; it must be text that is exactly one token "
            "(filler=' the'), or a token id (filler=5)."
        )
    if not isinstance(filler, str):
        if not 0 <= filler < model.spec.d_vocab:
            raise InvalidInput(f"the filler {filler} is no token id of this model: 0 to {model.spec.d_vocab - 1}.")
        return int(filler)
    ids = answer_tokens(model, filler)
    if len(ids) != 1 or ids[0] == getattr(model.tokenizer, "unk_token_id", None):
        is_what = "unknown to" if len(ids) == 1 else f"{len(ids)} tokens for"
        raise InvalidInput(
            f"the filler {filler!r} is {is_what} the tokenizer of {model.spec.name!r}; the needle is replaced token by "
            "token, so give a text that is exactly one (filler=' the'), or a token id (filler=5)."
        )
    return ids[0]


class PatchRuns:
    """Runs of a pair in which some ``z`` are replaced, all teacher-forced through the answer.

    Keys and values before the first difference are computed once. A run holds one row up to and including the
    attention of the layer that is patched, where an edit may turn it into several. With anything hooked onto the model,
    whole prompts are run, so that those hooks see every position at once.

    Args:
        model: The model, as it stands.
        pair: The pair.

    Attributes:
        first: First position run; ``z`` tensors begin there.
        z_clean: ``[layer pos head d_head]`` of the clean run.
    """

    def __init__(self, model: Model, pair: Pair):
        self.model, self.pair = model, pair
        backend = model.backend
        with model.lock:
            self.first = 0 if backend.hooked() else pair.start
            self._prefix: Any = None
            if self.first:
                shared = torch.tensor([pair.clean[: self.first]], device=backend.device)
                self._prefix = backend.prefill(shared, torch.ones_like(shared))
        self.z_clean, _ = self.record(pair.clean)

    @property
    def length(self) -> int:
        """Positions of a run."""
        return len(self.pair.clean) + len(self.pair.answer) - 1 - self.first

    def record(
        self, tokens: Sequence[int]
    ) -> tuple[Float[Tensor, "layer pos head d_head"], Float[Tensor, "1 step vocab"]]:
        """``z`` of every head on one of the two prompts, and the logits at the answer's steps."""
        spec = self.model.spec
        z = torch.empty(
            (spec.n_layers, self.length, spec.n_heads, spec.d_head),
            dtype=self.model.backend.dtype,
            device=self.model.backend.device,
        )

        def keep(layer: int) -> Edit:
            def edit(t: Tensor, at: slice) -> Tensor:
                z[layer, at] = t[0]
                return t

            return edit

        logits = self.run(tokens, {layer: keep(layer) for layer in range(spec.n_layers)})
        return z, logits

    def patched(self, layer: int, heads: Sequence[int]) -> Float[Tensor, "row step vocab"]:
        """Logits of the corrupted run with one head's clean ``z`` in each row, at all positions."""

        def edit(t: Tensor, at: slice) -> Tensor:
            out = t.expand(len(heads), -1, -1, -1).clone()
            for row, head in enumerate(heads):
                out[row, :, head] = self.z_clean[layer, at, head].to(out)
            return out

        return self.run(self.pair.corrupt, {layer: edit}, rows=len(heads), above=layer)

    def run(
        self, tokens: Sequence[int], edits: dict[int, Edit], *, rows: int = 1, above: int = -1, grad: bool = False
    ) -> Float[Tensor, "row step vocab"]:
        """Logits at the answer's steps, in float32 at least.

        Args:
            tokens: The clean or the corrupted prompt.
            edits: What to do to ``z`` at some layers.
            rows: Rows that come out of the edit at layer ``above``; one goes in.
            above: The layer that makes them.
            grad: Let gradients reach tensors that edits return; none reach parameters.

        Raises:
            HookNeverFired: If the model runs past one of these layers without passing through its ``z``.
        """
        backend, seen = self.model.backend, set[int]()
        full = torch.tensor([[*tokens, *self.pair.answer[:-1]]], device=backend.device)
        forward = backend.run_with_grad if grad else backend.run
        out = []
        with self.model.lock:
            cache = backend.new_cache(1) if self._prefix is None else backend.fork(self._prefix, rows, above=above)
            # The answer goes by itself, because only there are logits wanted at every position.
            for start, stop in ((self.first, len(tokens)), (len(tokens), full.shape[1])):
                if start == stop:
                    continue
                at = slice(start - self.first, stop - self.first)
                pairs = [(f"blocks.{i}.{SITES['z']}", _hook(edit, at, i, seen)) for i, edit in edits.items()]
                with self.model.hooks(pairs):
                    mask = torch.ones_like(full[:, :stop])
                    out.append(forward(full[:, start:stop], mask, cache, last_only=start == self.first))
                if missed := sorted(set(edits) - seen):
                    raise HookNeverFired(
                        f"the hook at 'blocks.{missed[0]}.{SITES['z']}' never fired, so nothing was patched there: "
                        f"{self.model.spec.architecture} does not pass through it."
                    )
                seen.clear()
        logits = torch.cat(out, dim=1)
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits

    def rows(self, asked: int | None) -> int:
        """Rows to run at once: as asked, or at most 16 and no more than 1 GiB of attention weights in a layer."""
        if asked is not None:
            return check_count(PATCH_BATCH, asked)
        total = self.first + self.length
        one = 4 * self.model.spec.n_heads * self.length * total
        return max(1, min(_MOST_ROWS, _PATTERN_BYTES // one))


def _hook(edit: Edit, at: slice, layer: int, seen: set[int]) -> HookFn:
    """An edit as a hook that says it fired."""

    def hook(t: Tensor) -> Tensor:
        seen.add(layer)
        return edit(t, at)

    return hook


@dataclass(frozen=True)
class Readout:
    """What is read from the logits at the answer's steps.

    Attributes:
        answer: Token ids of the answer; the first is gold.
        counterfactual: The likeliest token but gold in the corrupted run, at the answer's first step.
    """

    answer: tuple[int, ...]
    counterfactual: int

    @classmethod
    def of(cls, pair: Pair, corrupted: Float[Tensor, "row step vocab"]) -> Readout:
        """For the corrupted run's logits."""
        others = corrupted[0, 0].detach().clone()
        others[pair.gold] = -torch.inf
        return cls(pair.answer, int(others.argmax()))

    def logit_diff(self, logits: Float[Tensor, "row step vocab"]) -> Float[Tensor, " row"]:
        """``logit(gold) - logit(counterfactual)`` at the first step, in logits (after a soft-cap, if any)."""
        return logits[:, 0, self.answer[0]] - logits[:, 0, self.counterfactual]

    def logprob(self, logits: Float[Tensor, "row step vocab"]) -> Float[Tensor, " row"]:
        """Mean log-probability of the answer's tokens, each after the true ones before it, in nats."""
        answer = torch.tensor(self.answer, device=logits.device)
        return logits.log_softmax(-1)[:, range(len(answer)), answer].mean(-1)

    def metric(self, name: str, logits: Float[Tensor, "row step vocab"]) -> Float[Tensor, " row"]:
        """One of the two by name."""
        return (self.logit_diff if check_metric(name) == "logit_diff" else self.logprob)(logits)


def check_metric(name: str) -> str:
    """The name, if there is such a metric.

    Raises:
        UnknownName: If not.
    """
    if not isinstance(name, str) or name not in METRICS:
        raise UnknownName("metric", name, METRICS)
    return name
