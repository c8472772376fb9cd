"""Arithmetic: generated calculations of one or two digits, and files of contexts with their completions."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mechheads.datasets.assemble import Item
from mechheads.datasets.build import build, check_common, check_context, sizes_of
from mechheads.datasets.haystack import Haystack, HaystackSource, below, shuffled
from mechheads.datasets.sources import Record, Source, cut, cut_all, grouped, read_records
from mechheads.datasets.words import WordFinder, names_alike
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoder, TrialSet

OPERATIONS = ("+", "-", "*")
DIGITS = (1, 2)
_HINT = "Answer with the number alone."
_ENOUGH = 10  # so many times the trials asked for are drawn at most, where a split cannot have them all
_LOOK = 200  # how many solved examples are tried before an answer counts as unavoidable


@dataclass(frozen=True)
class _Sum:
    """A calculation of two numbers."""

    left: int
    operation: str
    right: int

    @property
    def result(self) -> int:
        """What it comes to."""
        if self.operation == "+":
            return self.left + self.right
        return self.left - self.right if self.operation == "-" else self.left * self.right

    @property
    def question(self) -> str:
        """How it is asked."""
        return f"What is {self.left} {self.operation} {self.right}?"


def calculations(
    model: Encoder,
    *,
    digits: int = 2,
    operations: str | Sequence[str] = ("+", "-"),
    shots: int = 3,
    n: int = 60,
    context_length: int | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
) -> TrialSet:
    """Control task of arithmetic: two numbers of one or two digits added, subtracted or multiplied.

    ``arithmetic`` is the easy form of it. Numbers are drawn without zeros before them, results are never negative, and
    none stands in its prompt, neither in the question nor in the solved examples. Operations take turns. The two
    splits share no result. The only span is ``question``; ``meta`` has ``left``, ``operation``, ``right``.

    Args:
        model: A model, or anything with ``encode``.
        digits: Digits of both numbers, 1 or 2.
        operations: ``"+"``, ``"-"``, ``"*"``, or several of them.
        shots: Solved examples before the question.
        n: Number of trials.
        context_length: Tokens of the whole prompt, which then begins with haystack prose; None: no haystack.
        seed: Of every choice.
        split: Calibration share; see ``needles``.
        chat: Put the prompt through the chat template.
        haystack: See ``needles``.

    Raises:
        UnknownName: For an operation that is none.
        InvalidInput: If a number is out of range, there are too few calculations with different results, or as
            ``needles`` does.
    """
    check_common(n, seed, split)
    check_context("calculations", model, context_length, None, needed=False)
    if isinstance(digits, bool) or digits not in DIGITS:
        raise InvalidInput(f"digits={digits!r}: give 1 or 2.")
    if isinstance(shots, bool) or not isinstance(shots, int) or not 0 <= shots <= 20:
        raise InvalidInput(f"shots={shots!r}: give a whole number from 0 to 20.")
    signs = tuple(dict.fromkeys(operations))
    if not signs:
        raise InvalidInput("operations is empty; give '+', '-' or '*', or several of them.")
    for sign in signs:
        if sign not in OPERATIONS:
            raise UnknownName("operation", sign, OPERATIONS)
    rng = random.Random(f"mechheads/calculations/{seed}")
    sums = _drawn(digits, signs, n, rng)
    groups = grouped([[str(s.result)] for s in sums])
    what = f"arithmetic of {digits} digits"
    chosen = cut(groups, sizes_of(n, split), rng, what=what, unit="calculations")
    parts = [[_item(sums[i], digits, signs, shots, rng, chat=chat) for i in part] for part in chosen]
    own = {"digits": digits, "operations": list(signs), "shots": shots}
    return _build("calculations", model, parts, own, rng, n, context_length, seed, split, chat, haystack)


def completions(
    model: Encoder,
    source: Source,
    *,
    n: int | None = None,
    context_length: int | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
) -> TrialSet:
    r"""Trials from records ``{"context", "completion"}``, such as GPT-3's arithmetic (Brown et al. 2020).

    ``{"context": "\n\nQ: What is (9 + 8) * 2?\n\nA:", "completion": " 34"}``: the context is the prompt, and the
    completion, without white space around it, the gold answer; as it stands it is ``meta["completion"]``, which says
    how the answer goes on after the prompt. Without prose before it the prompt begins at the context's first character
    that is no white space. The only span is ``question``, the whole context. The two splits share no answer. A record
    may have ``aliases``, a list of other forms of the answer.

    Args:
        model: A model, or anything with ``encode``.
        source: A file (a JSON list or JSON Lines), records, or a hub name with a file.
        n: Number of trials; None takes every record.
        context_length: As in ``calculations``.
        seed: Of every choice.
        split: Calibration share; see ``needles``.
        chat: Put the prompt through the chat template.
        haystack: See ``needles``.

    Raises:
        InvalidInput: Naming file, record and key, if a record cannot be used, or as ``needles`` does.
    """
    records = read_records(source, what="completion file")
    items = [_completion(record, chat=chat) for record in records.records]
    total = len(items) if n is None else n
    check_common(total, seed, split)
    check_context("completions", model, context_length, None, needed=False)
    rng = random.Random(f"mechheads/completions/{seed}")
    groups = grouped(names_alike([item.answer for item in items], what="answer"))
    if n is None:
        chosen = cut_all(groups, split, rng, what=records.source, unit="records")
    else:
        chosen = cut(groups, sizes_of(n, split), rng, what=records.source, unit="records")
    parts = [[items[i] for i in part] for part in chosen]
    own = {"source": records.source, "source_hash": records.hash}
    return _build("completions", model, parts, own, rng, total, context_length, seed, split, chat, haystack)


def _drawn(digits: int, signs: Sequence[str], n: int, rng: random.Random) -> list[_Sum]:
    """Calculations in a seeded order, operations taking turns, none twice, whose result is none of their numbers."""
    low, high = (1, 9) if digits == 1 else (10, 99)
    numbers = range(low, high + 1)
    queues = []
    for sign in signs:
        every = [_Sum(a, sign, b) for a in numbers for b in numbers]
        fit = [s for s in every if s.result >= 0 and s.result not in (s.left, s.right)]
        queues.append(shuffled(fit, rng)[: _ENOUGH * n])
    longest = max(map(len, queues))
    return [queue[k] for k in range(longest) for queue in queues if k < len(queue)]


def _item(asked: _Sum, digits: int, signs: Sequence[str], shots: int, rng: random.Random, *, chat: bool) -> Item:
    """A calculation after solved ones, in which its result does not stand."""
    low, high = (1, 9) if digits == 1 else (10, 99)
    answer, solved = str(asked.result), []
    for k in range(_LOOK * (shots + 1)):
        if len(solved) == shots:
            break
        left, right = (low + below(rng, high - low + 1) for _ in range(2))
        shot = _Sum(left, signs[k % len(signs)], right)
        line = f"\n\nQ: {shot.question}\nA: {shot.result}"
        if shot.result >= 0 and shot != asked and line not in solved and not WordFinder((answer,)).found_in(line):
            solved.append(line)
    if len(solved) < shots:
        raise InvalidInput(f"shots={shots}: there are too few calculations without the result {answer}; use fewer.")
    end = "".join(solved) + f"\n\nQ: {asked.question}" + (f" {_HINT}" if chat else "\nA:")
    meta = {"left": asked.left, "operation": asked.operation, "right": asked.right, "digits": digits}
    return Item(None, asked.question, end, answer, (answer,), meta=meta)


def _completion(record: Record, *, chat: bool) -> Item:
    """The item of one record."""
    context, completion = record.get("context", str), record.get("completion", str)
    answer = completion.strip()
    aliases = [a for a in record.texts("aliases", default=(), empty=True) if a != answer]
    meta = {"record": record.place, "aliases": aliases, **({} if chat else {"completion": completion})}
    # White space at the end of a prompt is the model's business, at that of a chat message the template's.
    end = "\n\n" + (context.strip() if chat else context.lstrip())
    return Item(None, context.strip(), end, answer, (answer, *aliases), meta=meta)


def _build(
    kind: str,
    model: Encoder,
    parts: list[list[Item]],
    own: dict[str, Any],
    rng: random.Random,
    n: int,
    context_length: int | None,
    seed: int,
    split: int | float | None,
    chat: bool,
    haystack: HaystackSource,
) -> TrialSet:
    prose = Haystack.load(haystack) if context_length is not None or haystack is not None else None
    options = {
        "kind": kind,
        **own,
        "n": n,
        "context_length": context_length,
        "seed": seed,
        "split": split,
        "chat": chat,
        **(prose.options() if prose else {"haystack": None, "haystack_hash": None}),
    }
    return build(kind, model, parts, [[0.5] * len(part) for part in parts], prose, rng, options)
