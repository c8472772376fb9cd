"""One prompt, many sets of ablated heads: run together, nothing twice.

A prompt is run once, as one clean row. Where a layer is the first that a set of interventions touches, that set's row
splits off as a copy of the clean one, so what lies below is computed once for all sets. The rows of several prompts
then decode together. Every result is that of the set alone, to rounding.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.backends.base import HookFn, Row
from mechheads.decode import Batch, Decoded, answer_limits, next_step, take_best
from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.interventions.acting import Act, Acting
from mechheads.interventions.applying import check_fired, in_force
from mechheads.interventions.values import Intervention
from mechheads.model import Model
from mechheads.stats import check_count

CLEAN = -1
# What is done in one row: indices of interventions with the heads each acts on, in order; nothing for a clean row.
Program = tuple[tuple[int, HeadSet], ...]


@dataclass(frozen=True)
class Ask:
    """What is wanted of one prompt.

    Attributes:
        prompt: Token ids.
        generate: A greedy answer.
        answer: Tokens whose log-probabilities after the prompt are wanted, each after the ones before it.
        foil: A token that the answer's first is set against.
        candidates: Continuations whose log-probabilities are wanted.
        scored: Positions of the prompt whose token's log-probability is wanted, given those before it; from 1.
    """

    prompt: tuple[int, ...]
    generate: bool = False
    answer: tuple[int, ...] = ()
    foil: int | None = None
    candidates: tuple[tuple[int, ...], ...] = ()
    scored: tuple[int, ...] = ()


@dataclass
class Told:
    """What one row said to an ``Ask``; what was not asked is empty or None.

    Attributes:
        decoded: The greedy answer, with the log-probability of each token (nats).
        answer_logprobs: Of the given answer's tokens (nats).
        logit_diff: Logit of the answer's first token less the foil's (logits).
        candidate_logprobs: Of each candidate, summed over its tokens (nats).
        token_logprobs: Of the scored tokens (nats).
    """

    decoded: Decoded = field(default_factory=Decoded)
    answer_logprobs: tuple[float, ...] = ()
    logit_diff: float | None = None
    candidate_logprobs: tuple[float, ...] = ()
    token_logprobs: tuple[float, ...] = ()


@dataclass(frozen=True)
class RunLimits:
    """How much is run at once; changes nothing but rounding.

    Attributes:
        rows: Most rows of a batch.
        memory: Bytes that attention weights of a layer, or keys and values of a batch, may take.
    """

    rows: int = 64
    memory: int = 2**30

    def __post_init__(self) -> None:
        check_count("rows", self.rows)
        check_count("memory", self.memory)


@torch.no_grad()
def run_head_sets(
    model: Model,
    asks: Sequence[Ask],
    interventions: Sequence[Intervention],
    programs: Sequence[Program],
    *,
    max_new_tokens: int = 20,
    stop_at_newline: bool = True,
    limits: RunLimits | None = None,
) -> list[list[Told]]:
    """Run every prompt under every program.

    Args:
        model: The model, without other hooks.
        asks: Prompts, and what is wanted of each.
        interventions: What can be done, prepared, without heads.
        programs: What is done in each row.
        max_new_tokens: Longest greedy answer.
        stop_at_newline: End a greedy answer before a line break.
        limits: How much is run at once. Where memory does not suffice all the same, half as many rows are tried.

    Returns:
        ``[ask][program]``.

    Raises:
        InvalidInput: If there are other hooks on the model, or a prompt cannot be run.
        HookNeverFired: If the model does not pass a hook that was to act.
    """
    if model.backend.hooked():
        raise InvalidInput("there are other hooks on the model; many head sets are run on a model without any.")
    for i, ask in enumerate(asks):
        model.check_tokens(ask.prompt, what=f"prompt {i}")
    run = _Run(model, list(interventions), list(programs), max_new_tokens, stop_at_newline)
    out = [[Told() for _ in programs] for _ in asks]
    order = sorted(range(len(asks)), key=lambda i: (len(asks[i].prompt), asks[i].prompt))
    limits = limits or RunLimits()
    for some in run.groups(run.rows_at_once(asks, limits)):
        pending = [(asks[i], {p: out[i][p] for p in some}) for i in order]
        _shrinking(run, pending, some, limits)
    return out


# Prompts still to be run, each with where its programs' results go.
_Pending = list[tuple[Ask, dict[int, Told]]]


def _shrinking(run: _Run, pending: _Pending, programs: list[int], limits: RunLimits) -> None:
    """Run prompts under some programs, with ever fewer rows at once where memory does not suffice."""
    done = 0
    while done < len(pending):
        n = run.prompts_at_once([ask for ask, _ in pending[done:]], len(programs) + 1, limits)
        try:
            run.chunk(pending[done : done + n], programs)
        except Exception as error:
            if not is_out_of_memory(error) or (n == 1 and len(programs) == 1):
                raise
            _forget(error)
        else:
            done += n
            continue
        limits = RunLimits(max(1, min(limits.rows, n * (len(programs) + 1)) // 2), limits.memory)
        if n == 1:  # one prompt under all of them was too much
            for half in (programs[: len(programs) // 2], programs[len(programs) // 2 :]):
                part = [(ask, {p: told[p] for p in half}) for ask, told in pending[done:]]
                _shrinking(run, part, half, limits)
            return


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that memory did not suffice, on whatever device."""
    words = ("out of memory", "not enough memory", "can't allocate memory", "cannot allocate memory")
    return isinstance(error, (MemoryError, torch.OutOfMemoryError)) or (
        isinstance(error, RuntimeError) and any(w in str(error).lower() for w in words)
    )


def _forget(error: BaseException) -> None:
    """Let go of what the failed run held: its frames keep tensors alive."""
    error.__traceback__ = None
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@dataclass
class _Bundle:
    """The rows of one prompt after it was run: their cache, what they are, and what they say next."""

    ask: Ask
    told: list[Told]
    rows: list[Row]
    cache: Any
    logits: Float[Tensor, "row vocab"]


@dataclass
class _Run:
    """A call of ``run_head_sets``: what does not change from prompt to prompt."""

    model: Model
    interventions: list[Intervention]
    programs: list[Program]
    max_new_tokens: int
    stop_at_newline: bool

    def __post_init__(self) -> None:
        spec = self.model.spec
        for program in self.programs:
            for _, heads in program:
                heads.check(spec.n_layers, spec.n_heads)

    def first_layer(self, p: int) -> int:
        """The first layer a program touches; the number of layers where it touches none."""
        return min((h.layer for _, heads in self.programs[p] for h in heads), default=self.model.spec.n_layers)

    def groups(self, rows: int) -> list[list[int]]:
        """Programs that run together: at most ``rows`` with the clean one, those that split off early first."""
        order = sorted(range(len(self.programs)), key=lambda p: (self.first_layer(p), p))
        size = max(1, rows - 1)
        return [order[start : start + size] for start in range(0, len(order), size)]

    def rows_at_once(self, asks: Sequence[Ask], limits: RunLimits) -> int:
        """Most rows of one prompt: its attention weights (and logits, where a text is scored) have to fit."""
        length = max((len(ask.prompt) for ask in asks), default=1)
        a_row = 8 * self.model.spec.n_heads * length**2
        if any(ask.scored for ask in asks):
            a_row += 8 * self.model.spec.d_vocab * length
        return max(2, min(limits.rows, limits.memory // a_row))

    def prompts_at_once(self, asks: Sequence[Ask], rows: int, limits: RunLimits) -> int:
        """How many prompts, from the first, decode together."""
        backend, spec = self.model.backend, self.model.spec
        a_token = 2 * spec.n_layers * spec.n_key_value_heads * spec.d_head * backend.dtype.itemsize
        n = 0
        for ask in asks:  # rising in length, so the last decides what each row takes
            a_row = a_token * (len(ask.prompt) + self.max_new_tokens)
            if n and (rows * (n + 1) > limits.rows or rows * (n + 1) * a_row > limits.memory):
                break
            n += 1
        return n

    def chunk(self, pending: _Pending, programs: list[int]) -> None:
        """Run some prompts under some programs, and file what they say."""
        for one in (one for _, told in pending for one in told.values()):
            one.decoded, one.candidate_logprobs = (
                Decoded(),
                (),
            )  # a run that memory did not suffice for began to fill it
        acting = Acting(self.model, self.acts(programs))
        acting.held = frozenset(ask.prompt for ask, _ in pending)
        names = [{"kind": "head sets", "n": len(programs)}]
        bundles = []
        with self.model.lock:
            for ask, told in pending:
                prefix = self.shared_prefix(ask, programs)
                with in_force(self.model, acting, names):
                    bundles.append(self.prompt(ask, told, programs, prefix))
            with in_force(self.model, acting, names):
                self.decode([b for b in bundles if b.ask.generate])
        check_fired(acting)

    def acts(self, programs: Sequence[int]) -> list[Act]:
        """Acts of some programs: step by step, each intervention once, with the heads of every program that has it."""
        out = []
        for step in range(max((len(self.programs[p]) for p in programs), default=0)):
            for i, intervention in enumerate(self.interventions):
                heads = {
                    p: self.programs[p][step][1]
                    for p in programs
                    if len(self.programs[p]) > step and self.programs[p][step][0] == i
                }
                if heads:
                    out.append(Act(intervention, heads))
        return out

    def shared_prefix(self, ask: Ask, programs: Sequence[int]) -> Any:
        """Cache of the prompt but its last token, where no program acts before that; else None."""
        used = {i for p in programs for i, heads in self.programs[p] if heads}
        if len(ask.prompt) < 2 or ask.scored or any(self.interventions[i].positions != "answer" for i in used):
            return None
        tokens = torch.tensor([ask.prompt[:-1]], device=self.model.backend.device)
        return self.model.backend.prefill(tokens, torch.ones_like(tokens))

    def prompt(self, ask: Ask, told: dict[int, Told], programs: list[int], prefix: Any) -> _Bundle:
        """Run one prompt under some programs, and file all that needs no decoding."""
        backend = self.model.backend
        rows = [Row(ask.prompt, which=CLEAN), *(Row(ask.prompt, which=p) for p in programs)]
        with self.model.running(rows):
            logits, cache = self.split_run(ask, programs, prefix)
            if ask.scored:
                at = torch.tensor(ask.scored, device=logits.device)
                tokens = torch.tensor(ask.prompt, device=logits.device)[at]
                for p, row in zip(programs, logits[1:], strict=True):
                    each = row[at - 1].float().log_softmax(-1).gather(-1, tokens[:, None])
                    told[p].token_logprobs = tuple(each.squeeze(-1).tolist())
            last = logits[:, -1].float()
            self.forced(ask, [Told(), *(told[p] for p in programs)], rows, cache, last)
        if not ask.generate:
            return _Bundle(ask, [], [], None, last[:0])
        keep = torch.arange(1, len(rows), device=last.device)
        return _Bundle(ask, [told[p] for p in programs], rows[1:], backend.select_rows(cache, keep), last[1:])

    def split_run(self, ask: Ask, programs: list[int], prefix: Any) -> tuple[Tensor, Any]:
        """Logits ``[row pos vocab]`` and cache of the prompt: a clean row, then one for each program."""
        backend, n_layers = self.model.backend, self.model.spec.n_layers
        first = [self.first_layer(p) for p in programs]
        total = 1 + len(programs)
        rows = [1 + sum(f <= layer for f in first) for layer in range(n_layers)]
        tokens = torch.tensor([ask.prompt], device=backend.device)
        mask = torch.ones_like(tokens)
        if not backend.splits_rows:
            rows, mask = [total] * n_layers, mask.expand(total, -1)
        cache = backend.new_cache(1) if prefix is None else backend.fan_out(prefix, rows)
        if prefix is not None:
            tokens = tokens[:, -1:]
        pairs: list[tuple[str, HookFn]] = []
        if backend.splits_rows:
            grown = [(layer, n - before) for layer, (before, n) in enumerate(zip([1, *rows], rows, strict=False))]
            pairs = [(f"blocks.{layer}.hook_resid_pre", _split(n)) for layer, n in grown if n]
        else:
            tokens = tokens.expand(total, -1)
            cache = backend.new_cache(total) if prefix is None else cache
        with self.model.hooks(pairs):
            logits = backend.run(tokens, mask, cache, last_only=not ask.scored)
        # Programs that touch no layer say what the clean row says.
        logits = torch.cat([logits, logits[:1].expand(total - len(logits), *logits.shape[1:])])
        needs_cache = ask.generate or len(ask.answer) > 1 or any(len(c) > 1 for c in ask.candidates)
        return logits, backend.fan_out(cache, [total] * n_layers) if needs_cache else None

    def forced(self, ask: Ask, told: list[Told], rows: list[Row], cache: Any, last: Tensor) -> None:
        """File log-probabilities of given continuations, each run behind the prompt and taken back."""
        if ask.answer:
            found = self.continuation(ask.answer, rows, cache, last)
            for one, each in zip(told, found.tolist(), strict=True):
                one.answer_logprobs = tuple(each)
            if ask.foil is not None:
                for one, row in zip(told, last, strict=True):
                    one.logit_diff = float(row[ask.answer[0]] - row[ask.foil])
        for candidate in ask.candidates:
            found = self.continuation(candidate, rows, cache, last).double().sum(-1)
            for one, value in zip(told, found.tolist(), strict=True):
                one.candidate_logprobs += (value,)

    def continuation(
        self, tokens: Sequence[int], rows: list[Row], cache: Any, last: Float[Tensor, "row vocab"]
    ) -> Float[Tensor, "row token"]:
        """Log-probability of each token of a continuation, after the ones before it (nats)."""
        logits = last[:, None]
        if len(tokens) > 1:
            backend, length = self.model.backend, len(rows[0].prompt)
            forced = torch.tensor([tokens[:-1]], device=last.device).expand(len(rows), -1)
            for row in rows:
                row.said[:] = tokens[:-1]
            mask = torch.ones(len(rows), length + forced.shape[1], dtype=torch.long, device=last.device)
            logits = torch.cat([logits, backend.run(forced, mask, cache, last_only=False).float()], dim=1)
            backend.crop(cache, length)
            for row in rows:
                row.said.clear()
        at = torch.tensor(tokens, device=last.device).expand(len(rows), -1)[:, :, None]
        return logits.log_softmax(-1).gather(-1, at).squeeze(-1)

    def decode(self, bundles: list[_Bundle]) -> None:
        """Greedy answers of all rows of some prompts, in one batch padded on the left."""
        if not bundles:
            return
        backend = self.model.backend
        rows = [row for bundle in bundles for row in bundle.rows]
        told = [one for bundle in bundles for one in bundle.told]
        for row, one in zip(rows, told, strict=True):
            row.said = one.decoded.tokens  # grows as the row decodes
        lengths = [len(row.prompt) for row in rows]
        width = max(lengths)
        mask = torch.tensor([[0] * (width - n) + [1] * n for n in lengths], device=backend.device)
        batch = Batch(lengths, list(range(len(rows))), mask, backend.join([b.cache for b in bundles]))
        limits = answer_limits(self.model, lengths, self.max_new_tokens)
        logits = torch.cat([bundle.logits for bundle in bundles])
        for bundle in bundles:
            bundle.cache = None
        out = [one.decoded for one in told]
        with self.model.running(rows):
            while True:
                best, alive = take_best(self.model, logits, out, batch.rows, limits, self.stop_at_newline)
                if not alive:
                    return
                pending = next_step(self.model, batch, alive, best)
                logits = backend.run(pending, batch.mask, batch.cache, last_only=True)[:, -1].float()


def _split(n: int) -> Callable[[Tensor], Tensor]:
    """A hook that puts copies of the clean row behind the others."""

    def split(t: Tensor) -> Tensor:
        return torch.cat([t, t[:1].expand(n, *t.shape[1:])])

    return split


def unique(asks: Sequence[Ask]) -> tuple[list[Ask], list[int]]:
    """Each different ask once, and for every given one its place among them."""
    place: dict[Ask, int] = {}
    at = [place.setdefault(ask, len(place)) for ask in asks]
    return list(place), at
