"""Candidate answers on a shared prefix: one prefill a question, then every candidate's token as one batched step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.backends.base import HookFn, Row
from mechheads.decode import PADDINGS, check_right_padding, pad
from mechheads.errors import InvalidInput, UnknownName
from mechheads.model import Model
from mechheads.stats import check_count
from mechheads.trials import Trial

STATEMENT = "statement"
IN_PROMPT = "candidates"


@dataclass(frozen=True)
class CandidateActs:
    """One layer at the candidates of one trial.

    Attributes:
        model: The model.
        trial: The trial.
        layer: Layer index.
        q: ``[candidate head d_head]`` query of each candidate's last token, after QK-norm; rotated as the model
            multiplies it, unless rotation was left out.
        k: ``[kv_head d_head]`` key of the statement's last token, likewise.
    """

    model: Model
    trial: Trial
    layer: int
    q: Float[Tensor, "candidate head d_head"]
    k: Float[Tensor, "kv_head d_head"]


@dataclass(frozen=True, eq=False)
class CandidateCapture:
    """One trial's candidates, as every layer and the model's output see them.

    Attributes:
        trial: The trial.
        tokens: Token ids of each candidate.
        logprobs: Log-probability of each candidate after the prompt (nats, summed over its tokens).
    """

    trial: Trial
    tokens: tuple[tuple[int, ...], ...]
    logprobs: tuple[float, ...]
    _model: Model
    _q: list[dict[int, Tensor]]
    _k: list[Tensor]

    def layer(self, layer: int) -> CandidateActs:
        """Queries and key of one layer."""
        self._model.check_layer(layer)
        found = self._q[layer]
        q = torch.stack([found[c] for c in range(len(self.tokens))])
        return CandidateActs(self._model, self.trial, layer, q, self._k[layer])


@dataclass(frozen=True)
class Question:
    """A trial with its candidates tokenised and the positions that are read.

    Attributes:
        trial: The trial.
        tokens: Token ids of each candidate.
        statement: Position of the statement's last token.
        places: Position of each candidate's last token in the prompt; None if candidates follow the prompt.
    """

    trial: Trial
    tokens: tuple[tuple[int, ...], ...]
    statement: int
    places: tuple[int, ...] | None

    @property
    def first_row(self) -> int:
        """First prompt position whose query must be seen."""
        return min(self.places or (len(self.trial.tokens) - 1,))


def candidate_tokens(model: Model, text: str) -> list[int]:
    """Token ids of a candidate as it continues a text, without special tokens.

    The text is tokenised after a line break or, where it begins with a space, after a letter, so that tokenizers that
    put a mark of their own before a first word do not count it as part of the candidate.
    """

    def encode(part: str) -> list[int]:
        return list(model.tokenizer(part, add_special_tokens=False)["input_ids"])

    anchor = "a" if text[:1].isspace() else "\n"
    before, whole = encode(anchor), encode(anchor + text)
    follows = before and whole[: len(before)] == before and len(whole) > len(before)
    return whole[len(before) :] if follows else encode(text)


def read_question(model: Model, trial: Trial) -> Question:
    """A trial as a question, or an error that says what it lacks.

    Raises:
        UnknownName: If it has no ``statement`` span.
        InvalidInput: If it has fewer than two candidates, no label, candidates that cannot be told apart, or one that
            the tokenizer does not know.
    """
    me = f"trial {trial.id!r}"
    model.check_tokens(trial.tokens, what=me)
    if STATEMENT not in trial.spans:
        raise UnknownName(
            f"span of {me}",
            STATEMENT,
            trial.spans,
            hint="Candidates are judged by the key of the statement's last token: name it when the trial is made "
            "(Trial.from_text(..., spans={'statement': 'its text'})).",
        )
    if len(trial.candidates) < 2 or trial.label is None:
        raise InvalidInput(
            f"{me} has {len(trial.candidates)} candidates and the label {trial.label}; it needs two candidates or more "
            "and the index of the right one: Trial(..., candidates=(' true', ' false'), label=0)."
        )
    tokens = _tokens_of(model, trial, me)
    for i, one in enumerate(tokens):
        if one in tokens[:i]:
            raise InvalidInput(
                f"{me}: the candidates {trial.candidates[tokens.index(one)]!r} and {trial.candidates[i]!r} are the "
                f"same tokens {list(one)}; give candidates that this tokenizer tells apart."
            )
    statement = trial.spans[STATEMENT][-1].stop - 1
    places = _places(trial, statement, me)
    longest = len(trial.tokens) + max(map(len, tokens))
    if places is None and longest > model.spec.n_ctx:
        raise InvalidInput(
            f"{me} has {longest} tokens with its longest candidate, but {model.spec.name!r} takes at most "
            f"{model.spec.n_ctx}; make the context shorter."
        )
    return Question(trial, tokens, statement, places)


def _tokens_of(model: Model, trial: Trial, me: str) -> tuple[tuple[int, ...], ...]:
    """Token ids of the candidates: the trial's own ``meta["candidate_tokens"]``, else its texts' ."""
    given = trial.meta.get("candidate_tokens")
    if given is None:
        tokens = [candidate_tokens(model, text) for text in trial.candidates]
        _check_known(model, trial, tokens, me)
    elif len(given) != len(trial.candidates):
        raise InvalidInput(
            f"{me}: meta['candidate_tokens'] has {len(given)} entries for {len(trial.candidates)} candidates."
        )
    else:
        tokens = given
    for text, one in zip(trial.candidates, tokens, strict=True):
        if not one:
            raise InvalidInput(f"{me}: the candidate {text!r} has no tokens; give text that the tokenizer keeps.")
        model.check_tokens(one, what=f"the candidate {text!r} of {me}")
    return tuple(tuple(one) for one in tokens)


def _check_known(model: Model, trial: Trial, tokens: Sequence[Sequence[int]], me: str) -> None:
    """Refuse a candidate that the tokenizer has no token for: it would be scored as any other unknown word."""
    unknown, written = (getattr(model.tokenizer, name, None) for name in ("unk_token_id", "unk_token"))
    if unknown is None:
        return
    for text, one in zip(trial.candidates, tokens, strict=True):
        if unknown in one and str(written) not in text:
            raise InvalidInput(
                f"{me}: the candidate {text!r} holds what the tokenizer of {model.spec.name!r} does not know (its "
                f"tokens {list(one)} hold {written!r}); give candidates in its vocabulary, or ids in "
                "meta['candidate_tokens']."
            )


def _places(trial: Trial, statement: int, me: str) -> tuple[int, ...] | None:
    """Positions of candidates that stand in the prompt."""
    if IN_PROMPT not in trial.spans:
        return None
    spans = trial.spans[IN_PROMPT]
    if len(spans) != len(trial.candidates):
        raise InvalidInput(f"{me} has {len(trial.candidates)} candidates, but {len(spans)} spans named 'candidates'.")
    places = tuple(span.stop - 1 for span in spans)
    if min(places) <= statement:
        raise InvalidInput(
            f"{me}: the candidate at position {min(places)} stands before the end of the statement ({statement}), so "
            "its query cannot see it; put the candidates after the statement."
        )
    return places


@dataclass
class _Found:
    """What is known of one question so far."""

    q: list[dict[int, Tensor]]
    k: dict[int, Tensor] = field(default_factory=dict)
    logprobs: dict[int, float] = field(default_factory=dict)


@dataclass(frozen=True)
class _Row:
    """One row of the step that follows the prefill: a question with one of its candidates appended, or none."""

    question: int
    candidate: int | None
    extra: tuple[int, ...]


@torch.no_grad()
def capture_candidates(
    model: Model, trials: Sequence[Trial], *, rotary: bool = True, padding: str = "left"
) -> list[CandidateCapture]:
    """Run one batch of questions and keep what each head asks at every candidate.

    Every prompt is prefilled once. Its last token and each candidate then run as rows of one batched step on copies of
    the prefix cache (one step for each length of candidates, in tokens). Candidates that stand in the prompt are read
    where they stand.

    Args:
        model: The model, with whatever hooks are in force.
        trials: The batch; see ``read_question`` for what each needs.
        rotary: Queries and keys as multiplied (True), or before rotation; the same where there is none.
        padding: ``"left"`` or ``"right"``; changes no result.

    Raises:
        UnknownName: For an unknown padding side, or a trial without a statement.
        InvalidInput: For trials that cannot be run, or a ``rotary`` that is neither True nor False.
    """
    if padding not in PADDINGS:
        raise UnknownName("padding side", padding, PADDINGS)
    if not isinstance(rotary, bool):
        raise InvalidInput(f"rotary is {rotary!r}; give True (as the model multiplies them) or False.")
    questions = [read_question(model, trial) for trial in trials]
    found = [_Found([{} for _ in range(model.spec.n_layers)]) for _ in questions]
    with model.lock:
        start = _prefilled(model, questions, rotary, padding)
        groups = _rows(questions)
        for i, group in enumerate(groups):
            _run_rows(model, questions, group, start, found, rotary=rotary, last=i + 1 == len(groups))
    return [
        CandidateCapture(
            q.trial,
            q.tokens,
            tuple(one.logprobs[c] for c in range(len(q.tokens))),
            model,
            one.q,
            [one.k[layer] for layer in range(model.spec.n_layers)],
        )
        for q, one in zip(questions, found, strict=True)
    ]


@torch.no_grad()
def candidate_logprobs(
    model: Model, trials: Sequence[Trial], *, batch_size: int = 8, padding: str = "left"
) -> list[tuple[float, ...]]:
    """The model's own log-probability of every candidate after the prompt, and nothing else.

    The same numbers as ``CandidateCapture.logprobs``, without queries and keys: candidates of one token each are read
    from the prompt's last row and need no step of their own.

    Args:
        model: The model, with whatever hooks are in force.
        trials: Any number; those of similar length run together.
        batch_size: Trials run together; changes nothing beyond rounding.
        padding: ``"left"`` or ``"right"``; likewise.

    Returns:
        For each trial, in the order given, one number a candidate (nats, summed over the candidate's tokens).

    Raises:
        UnknownName: For an unknown padding side, or a trial without a statement.
        InvalidInput: For trials that cannot be run, or a batch size below 1.
    """
    if padding not in PADDINGS:
        raise UnknownName("padding side", padding, PADDINGS)
    check_count("batch_size", batch_size)
    questions = [without_queries(read_question(model, trial)) for trial in trials]
    order = sorted(range(len(questions)), key=lambda i: len(questions[i].trial.tokens))
    found = [_Found([]) for _ in questions]
    for first in range(0, len(order), batch_size):
        places = order[first : first + batch_size]
        some, filed = [questions[i] for i in places], [found[i] for i in places]
        with model.lock:
            start = _prefilled(model, some, True, padding)
            groups = _rows(some)
            for i, group in enumerate(groups):
                _run_rows(model, some, group, start, filed, rotary=True, last=i + 1 == len(groups), queries=False)
    return [tuple(one.logprobs[c] for c in range(len(q.tokens))) for q, one in zip(questions, found, strict=True)]


def without_queries(question: Question) -> Question:
    """The question where no candidate's query is wanted: only a candidate of several tokens still needs a row."""
    return replace(question, places=())


def tokens_run(question: Question) -> int:
    """How many tokens a question costs, padding left out: its prompt once, and what each further row runs again."""
    length = len(question.trial.tokens)
    tail = length - question.first_row
    return length - tail + sum(tail + len(row.extra) for group in _rows([question]) for row in group)


@dataclass
class _Start:
    """Where every row starts from: a cache of the prompts up to their last ``tail`` tokens, and its mask."""

    tail: int | None
    mask: Tensor
    cache: Any
    padding: str


def _prefilled(model: Model, questions: Sequence[Question], rotary: bool, padding: str) -> _Start:
    """Prefill what no query is wanted of; nothing if some prompt is wanted whole."""
    backend = model.backend
    first = [q.first_row if rotary else min(q.first_row, q.statement) for q in questions]
    lengths = [len(q.trial.tokens) for q in questions]
    tail = max(n - f for n, f in zip(lengths, first, strict=True))
    if min(lengths) <= tail:
        return _Start(None, torch.empty(0), None, padding)
    if padding == "right":
        check_right_padding(model, [q.trial.tokens for q in questions], tail)
    tokens, mask = pad([q.trial.tokens[:-tail] for q in questions], padding, backend.device)
    with model.running([Row(tuple(q.trial.tokens)) for q in questions]):
        return _Start(tail, mask, backend.prefill(tokens, mask), padding)


def _rows(questions: Sequence[Question]) -> list[list[_Row]]:
    """Rows to run, grouped by how many tokens they add to the prompt.

    A candidate that stands in the prompt is run again after it only if it has several tokens, for its probability.
    """
    rows = []
    for i, q in enumerate(questions):
        if q.places is not None and max(map(len, q.tokens)) == 1:
            rows.append(_Row(i, None, ()))
            continue
        rows += [_Row(i, c, tokens) for c, tokens in enumerate(q.tokens)]
    lengths = sorted({len(row.extra) for row in rows})
    return [[row for row in rows if len(row.extra) == n] for n in lengths]


def _run_rows(
    model: Model, questions: Sequence[Question], rows: list[_Row], start: _Start, found: list[_Found], *,
    rotary: bool, last: bool, queries: bool = True,
) -> None:  # fmt: skip
    """Run one group of rows and file what was seen of each; without queries, the log-probabilities alone."""
    backend = model.backend
    added = len(rows[0].extra)
    if start.tail is None:
        pending, mask = pad([(*questions[r.question].trial.tokens, *r.extra) for r in rows], "left", backend.device)
        cache = backend.new_cache(len(rows))
    else:
        ends = [(*questions[r.question].trial.tokens[-start.tail :], *r.extra) for r in rows]
        pending = torch.tensor(ends, device=backend.device)
        index = torch.tensor([r.question for r in rows], device=backend.device)
        cache = backend.select_rows(start.cache if last else backend.copy_cache(start.cache), index)
        mask = torch.cat([start.mask[index], torch.ones_like(pending)], dim=1)
    seen: dict[tuple[str, int], Tensor] = {}
    running = [Row(tuple(questions[r.question].trial.tokens), list(r.extra)) for r in rows]
    with model.running(running), model.hooks(_hooks(model, seen, rotary) if queries else []):
        logits = backend.run(pending, mask, cache, last_only=False)
    keys = _Keys(model, seen, cache, pending.shape[1], rotary)
    for i, row in enumerate(rows):
        question, one = questions[row.question], found[row.question]
        # The pending tokens stand at the end of the row, so positions count back from there.
        length = len(question.trial.tokens) + added
        own = mask[i].nonzero().squeeze(-1)
        _file_logprobs(one, question, row, logits[i])
        for layer in range(model.spec.n_layers if queries else 0):
            for c, position in _query_places(question, row):
                one.q[layer].setdefault(c, seen["q", layer][i][:, position - length].float())
            if layer not in one.k:
                one.k[layer] = keys.at(i, layer, own, question.statement, length).float()


def _hooks(model: Model, seen: dict[tuple[str, int], Tensor], rotary: bool) -> list[tuple[str, HookFn]]:
    """Hooks that keep the queries of every layer, and keys where the cache does not hold them as wanted."""

    def keeper(layer: int) -> Callable[[str, Tensor], None]:
        def keep(name: str, t: Tensor) -> None:
            seen[name, layer] = t.detach()

        return keep

    layers = range(model.spec.n_layers)
    return [pair for n in layers for pair in model.backend.query_hooks(n, keeper(n), rotated=rotary)]


@dataclass(frozen=True)
class _Keys:
    """Where the keys of a finished run are found."""

    model: Model
    seen: dict[tuple[str, int], Tensor]
    cache: Any
    n_pending: int
    rotary: bool

    def at(self, i: int, layer: int, own: Tensor, position: int, length: int) -> Float[Tensor, "kv_head d_head"]:
        """Key of a row's token at a position; ``own`` are the row's columns of the key axis."""
        reported = self.seen.get(("k", layer))
        if reported is None:
            return self.model.backend.cached_kv(self.cache, layer)[0][i][:, own[position]]
        if reported.shape[2] == self.n_pending:  # of the tokens run now, counted from the end
            return reported[i][:, position - length]
        return reported[i][:, own[position]]


def _query_places(question: Question, row: _Row) -> list[tuple[int, int]]:
    """Candidates whose query this row holds, and where."""
    if question.places is not None:
        return list(enumerate(question.places))
    assert row.candidate is not None
    return [(row.candidate, len(question.trial.tokens) + len(row.extra) - 1)]


def _file_logprobs(one: _Found, question: Question, row: _Row, logits: Tensor) -> None:
    """Log-probabilities of the row's candidate, or of all one-token candidates where none was appended."""
    n = len(row.extra)
    after = logits[logits.shape[0] - n - 1 :].float().log_softmax(-1)
    if row.candidate is None:
        for c, tokens in enumerate(question.tokens):
            one.logprobs[c] = float(after[0, tokens[0]])
        return
    picked = after[torch.arange(n, device=after.device), torch.tensor(row.extra, device=after.device)]
    one.logprobs[row.candidate] = float(picked.sum())
