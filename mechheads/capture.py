"""Capture: one pass over a batch of trials becomes per-layer activations at the query rows that methods read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from jaxtyping import Bool
from torch import Tensor

from mechheads.acts import UNEMBEDS, LayerActs
from mechheads.backends.base import SITES, HookFn, Row
from mechheads.decode import Batch, Decoded, Observer, greedy, pad
from mechheads.errors import InvalidInput, UnknownName
from mechheads.model import Model
from mechheads.text import char_offsets, find_answer_tokens, rouge1_recall
from mechheads.trials import Trial

__all__ = ["NEEDS", "UNEMBEDS", "LayerActs", "TrialCapture", "answer_tokens", "capture"]

NEEDS = ("q", "k", "v", "z", "pattern")
# Where the query rows stand in each hooked tensor of one trial, the batch axis taken off.
_ROW_AXIS = {"q": 1, "z": 0, "pattern": 1, "final_scale": 0, "post_scale": 0}
_Step = dict[tuple[str, int], Tensor]


@dataclass
class _Rows:
    """What was seen of one prompt: tensors by step, and its keys and values by layer."""

    steps: list[_Step] = field(default_factory=list)
    kv: list[tuple[Tensor, Tensor]] = field(default_factory=list)


class _Collector(Observer):
    """Receives hooked tensors step by step and cuts them back to each trial's own positions."""

    def __init__(
        self,
        model: Model,
        needs: frozenset[str],
        prompts: Sequence[Sequence[int]],
        *,
        tail: int = 1,
        nulls: Sequence[Sequence[int] | None] = (),
    ):
        self.model, self.needs, self.tail = model, needs, tail
        self.prompts, self.nulls = prompts, nulls
        # Rows kept of a run: the tail, and more of a null variant whose ending is longer.
        self.kept = tail
        self.fresh: _Step = {}
        self.rows = [_Rows() for _ in prompts]
        self.null_rows = [_Rows() for _ in nulls]
        self.whole_keys: dict[int, Tensor] = {}

    def hooks(self) -> list[tuple[str, HookFn]]:
        """Hooks for what is needed; each keeps the last query rows only."""
        pairs: list[tuple[str, HookFn]] = [("ln_final.hook_scale", self._keep("final_scale", -1, 1))]
        for layer in range(self.model.spec.n_layers):
            at = f"blocks.{layer}."
            if self.needs & {"q", "k"}:
                pairs += self.model.backend.query_hooks(layer, self._keep_qk(layer))
            if "pattern" in self.needs:
                pairs.append((at + SITES["pattern"], self._keep("pattern", layer, 2)))
            if "z" in self.needs:
                pairs.append((at + SITES["z"], self._keep("z", layer, 1)))
            post = self.model.backend.post_norm(layer)
            if post is not None:
                pairs.append((post[1], self._keep("post_scale", layer, 1)))
        return pairs

    def _keep(self, name: str, layer: int, axis: int) -> HookFn:
        def hook(t: Tensor) -> None:
            n = min(self.kept, t.shape[axis])
            self.fresh[name, layer] = t.detach().narrow(axis, t.shape[axis] - n, n).clone()

        return hook

    def _keep_qk(self, layer: int):
        def keep(name: str, t: Tensor) -> None:
            if name == "q":
                self.fresh[name, layer] = t.detach()[..., -self.kept :, :].clone()
            else:
                self.whole_keys[layer] = t.detach()

        return keep

    def on_prefill(self, batch: Batch, cached: int | None) -> None:
        """Run the null variants on a copy of the prefix they share with their trials."""
        ends: dict[int | None, list[int]] = {}
        for i, null in enumerate(self.nulls):
            if null is not None:  # one length a run, so that no padding stands between prefix and ending
                ends.setdefault(self._ending(i, null, cached), []).append(i)
        model, backend = self.model, self.model.backend
        for length, rows in ends.items():
            nulls = [list(self.nulls[i] or ()) for i in rows]
            if length is None or cached is None:
                tokens, mask = pad(nulls, "left", backend.device)
                cache = backend.new_cache(len(rows))
            else:
                index = torch.tensor(rows, device=backend.device)
                cache = backend.select_rows(backend.copy_cache(batch.cache), index)
                tokens = torch.tensor([n[-length:] for n in nulls], device=backend.device)
                mask = torch.cat([batch.mask[index][:, :-cached], torch.ones_like(tokens)], dim=1)
            own = Batch([len(n) for n in nulls], list(rows), mask, cache)
            longer = max(len(n) - len(self.prompts[i]) for n, i in zip(nulls, rows, strict=True))
            self.kept = self.tail + max(longer, 0)
            with model.running([Row(tuple(n)) for n in nulls]), model.hooks(self.hooks()):
                backend.run(tokens, mask, cache, last_only=True)
            self.kept = self.tail
            self._file(own, self.null_rows, own.lengths)
            for j in range(len(rows)):
                self._file_kv(j, own, self.null_rows)

    def _ending(self, i: int, null: Sequence[int], cached: int | None) -> int | None:
        """Tokens of a null prompt after what is cached of its trial; None if it does not go on from there."""
        prefix = len(self.prompts[i]) - (cached or 0)
        if cached is None or len(null) <= prefix or list(null[:prefix]) != list(self.prompts[i][:prefix]):
            return None
        return len(null) - prefix

    def on_step(self, batch: Batch) -> None:
        """File one step's tensors under their trials."""
        first = not self.rows[batch.rows[0]].steps
        self._file(batch, self.rows, [batch.lengths[row] if first else 1 for row in batch.rows])

    def _file(self, batch: Batch, into: list[_Rows], lengths: Sequence[int]) -> None:
        """Cut what the hooks saw back to each trial's own rows and keys; at most ``lengths`` rows are a trial's own."""
        for i, (row, length) in enumerate(zip(batch.rows, lengths, strict=True)):
            own = batch.positions(i)
            step: _Step = {}
            for (name, layer), t in self.fresh.items():
                axis = _ROW_AXIS[name]
                one = t[i]
                n = min(length, one.shape[axis])
                one = one.narrow(axis, one.shape[axis] - n, n)
                step[name, layer] = one[..., own] if name == "pattern" else one
            into[row].steps.append(step)
        self.fresh.clear()

    def on_end(self, i: int, batch: Batch) -> None:
        """Copy a finished trial's keys and values out of the cache."""
        self._file_kv(i, batch, self.rows)

    def _file_kv(self, i: int, batch: Batch, into: list[_Rows]) -> None:
        if not self.needs & {"k", "v"}:
            return
        own = batch.positions(i)
        for layer in range(self.model.spec.n_layers):
            k, v = self.model.backend.cached_kv(batch.cache, layer)
            k = self.whole_keys.get(layer, k)
            into[batch.rows[i]].kv.append((k[i][:, own], v[i][:, own]))

    def acts(self, trial: Trial, rows: _Rows, layer: int, decoded: Decoded) -> LayerActs:
        """Put one trial's layer together, at every row that was seen."""
        device = self.model.backend.device
        n_prompt = len(trial.tokens)
        tokens = [*trial.tokens, *decoded.tokens]
        n_keys = len(tokens)

        def joined(name: str) -> Tensor | None:
            at = -1 if name == "final_scale" else layer
            seen = [s[name, at] for s in rows.steps if (name, at) in s]
            if name == "pattern":
                seen = [_to_width(p, n_keys) for p in seen]
            return torch.cat(seen, dim=_ROW_AXIS[name]).float() if seen else None

        first, later = rows.steps[0], len(rows.steps) - 1
        n_first = first["final_scale", -1].shape[0] if ("final_scale", -1) in first else 1
        steps = torch.arange(1 - n_first, later + 1)
        after = [*tokens[1:], decoded.stop_token if decoded.stop_token is not None else -1]
        targets = [after[n_prompt - 1 + t] if n_prompt - 1 + t < len(after) else -1 for t in steps.tolist()]
        z = joined("z")
        k, v = rows.kv[layer] if rows.kv else (None, None)
        return LayerActs(
            model=self.model,
            trial=trial,
            layer=layer,
            steps=steps.to(device),
            targets=torch.tensor(targets, dtype=torch.long, device=device),
            tokens=torch.tensor(tokens, device=device),
            visible=_visible(n_prompt, steps, n_keys, self.model.backend.window(layer)).to(device),
            q=joined("q"),
            k=_pad(k, n_keys) if k is not None and "k" in self.needs else None,
            v=_pad(v, n_keys) if v is not None and "v" in self.needs else None,
            z=None if z is None else z.transpose(0, 1),
            pattern=joined("pattern"),
            final_scale=joined("final_scale"),
            post_scale=joined("post_scale"),
        )


def _pad(x: Tensor, n_keys: int) -> Tensor:
    """Cut or zero-pad the key axis: the last generated token was never run, so it has no key or value."""
    x = x[:, :n_keys].float()
    return torch.nn.functional.pad(x, (0, 0, 0, n_keys - x.shape[1]))


def _to_width(pattern: Tensor, n_keys: int) -> Tensor:
    """Patterns of different steps, brought to one number of keys."""
    return torch.nn.functional.pad(pattern, (0, n_keys - pattern.shape[-1]))


def _visible(n_prompt: int, steps: Tensor, n_keys: int, window: int | None) -> Bool[Tensor, "step key"]:
    """Row t sits at position ``n_prompt - 1 + t``."""
    query = steps[:, None] + n_prompt - 1
    key = torch.arange(n_keys)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


@dataclass(frozen=True, eq=False)
class TrialCapture:
    """One trial's greedy answer and the activations at every step of it.

    Attributes:
        model: The model.
        trial: The trial.
        decoded: The greedy answer.
        text: Its text; empty if the model has no tokenizer.
        null: The trial's null variant, or None.
    """

    model: Model
    trial: Trial
    decoded: Decoded
    text: str
    _collector: _Collector
    _row: int
    null: Trial | None = None

    def layer(self, layer: int) -> LayerActs:
        """Activations of one layer at every step that predicted a token of the greedy answer."""
        return self.rows(layer).at_steps(range(len(self.decoded.tokens)))

    def rows(self, layer: int, *, answer_steps: Sequence[int] | None = None) -> LayerActs:
        """Activations of one layer at every query row that was captured, those of the prompt first.

        Args:
            layer: The layer.
            answer_steps: Steps to mark as the answer's; the trial's own ``answer_steps`` if None.
        """
        self.model.check_layer(layer)
        collector = self._collector
        acts = collector.acts(self.trial, collector.rows[self._row], layer, self.decoded)
        steps = self.answer_steps if answer_steps is None else answer_steps
        answer = torch.isin(acts.steps, torch.tensor(steps, dtype=torch.long, device=acts.steps.device))
        null = None
        if self.null is not None:
            null = collector.acts(self.null, collector.null_rows[self._row], layer, Decoded())
        return replace(acts, answer=answer, null=null)

    @cached_property
    def answer_steps(self) -> tuple[int, ...]:
        """Steps that generated the gold answer's tokens (empty if the answer is not in the output).

        The first exact match of the tokenised answer; failing that the first case-insensitive match in the text,
        taking every token it overlaps.
        """
        if self.trial.answer is None or not self.decoded.tokens:
            return ()
        text, offsets = char_offsets(self.model.decode, self.decoded.tokens)
        return find_answer_tokens(
            [text],
            self.decoded.tokens,
            [answer_tokens(self.model, self.trial.answer)],
            self.trial.answer,
            offsets=offsets,
        )

    @cached_property
    def rouge1_recall(self) -> float:
        """ROUGE-1 recall of the greedy answer against the gold answer, 0 to 1."""
        return rouge1_recall(self.text, self.trial.answer or "")


def answer_tokens(model: Model, answer: str) -> list[int]:
    """Token ids of an answer by itself, without special tokens."""
    return list(model.tokenizer(answer, add_special_tokens=False)["input_ids"])


def capture(
    model: Model,
    trials: Sequence[Trial],
    *,
    needs: Sequence[str] = ("pattern", "v"),
    max_new_tokens: int = 50,
    stop_at_newline: bool = True,
    padding: str = "left",
    tail: int = 1,
    nulls: Sequence[Trial | None] = (),
    generate: bool = True,
) -> list[TrialCapture]:
    """Run one batch of trials and keep what heads did at each step of the greedy answer.

    One prefill a trial (no [query, key] pattern is stored), then one hooked step a token: about the cost of
    generating the answer. The rows of the last ``tail`` prompt tokens are run in the first of these steps.

    Args:
        model: The model.
        trials: The batch; all are run together.
        needs: Which tensors to keep, of ``q k v z pattern``.
        max_new_tokens: Longest answer.
        stop_at_newline: End the answer before a line break, as published for LOCOS.
        padding: ``"left"`` or ``"right"``; changes no result.
        tail: How many prompt rows to keep, counted from the end.
        nulls: For each trial a variant of it with another ending, or None; where both share what comes before the
            last ``tail`` tokens, that is run once.
        generate: False to read the prompts alone.

    Raises:
        UnknownName: For an unknown need.
        InvalidInput: For prompts the model cannot run.
    """
    for name in needs:
        if name not in NEEDS:
            raise UnknownName("capture", name, NEEDS)
    if nulls and len(nulls) != len(trials):
        raise InvalidInput(f"there are {len(nulls)} null variants for {len(trials)} trials; give one each, or None.")
    for null in nulls:
        if null is not None:
            model.check_tokens(null.tokens, what=f"the null variant of trial {null.id!r}")
    collector = _Collector(
        model,
        frozenset(needs),
        [t.tokens for t in trials],
        tail=tail,
        nulls=[None if n is None else n.tokens for n in nulls],
    )
    answers = greedy(
        model,
        [t.tokens for t in trials],
        max_new_tokens=max_new_tokens,
        stop_at_newline=stop_at_newline,
        padding=padding,
        observer=collector,
        tail=tail,
        generate=generate,
    )
    return [
        TrialCapture(
            model,
            trial,
            answer,
            model.decode(answer.tokens) if answer.tokens and model.backend.tokenizer is not None else "",
            collector,
            i,
            nulls[i] if nulls else None,
        )
        for i, (trial, answer) in enumerate(zip(trials, answers, strict=True))
    ]
