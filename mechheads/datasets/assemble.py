"""From an item and a walk through the haystack to a prompt of the length asked for."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from mechheads.datasets.chat import encode
from mechheads.datasets.haystack import Window
from mechheads.datasets.words import occurrences
from mechheads.errors import InvalidInput
from mechheads.trials import Encoder, Encoding, Span

_ATTEMPTS = 5
_POOL = 24
_STEP = 4
_SHORTFALL = 32
_ROOM = 40  # tokens that hold a common sentence or two
_LOOK = 1000  # how many sentences are looked through for an error message
_LONG = 64  # a sentence above this many tokens that does not fit is passed over: it must not end the walk


@dataclass(frozen=True)
class Insert:
    """A further sentence that goes into the prose.

    Attributes:
        name: The span it makes part of (``"needle"``, ``"distractor"``).
        text: The sentence.
        depth: Where it stands, 0 to 1.
        answer: What of it is the answer, or empty.
    """

    name: str
    text: str
    depth: float
    answer: str = ""


@dataclass(frozen=True)
class Item:
    """What one trial asks, before it is hidden in prose.

    A distractor is a sentence worded like the needle about somebody and something else.

    Attributes:
        needle: Sentence(s) that hold the answer, or None for a control task.
        question: The question as it stands in the prompt.
        closing: All that follows the passage; contains ``question`` once.
        answer: Gold answer.
        avoid: Words the haystack must not contain in this trial.
        distractors: Sentences, each with the depth it goes in at.
        meta: What else the trial should remember (template, name, object, ...).
        opening: All that precedes the passage.
        question_at: Where the question stands, as ``("opening" or "closing", character)``; if empty, at its last
            occurrence.
        inserts: Further sentences; of two at one sentence boundary the one with the smaller depth comes first.
        inside: Parts of the needle that get a span of their own, as ``(name, text)``.
        prose: Name of a span of every haystack sentence (``"distractor"`` where all of them are needles), or None.
        mark: What of the needle is its answer; the answer if empty.
        system: System prompt, for the chat template.
        apart: Whether a distractor right beside the needle is refused.
    """

    needle: str | None
    question: str
    closing: str
    answer: str
    avoid: tuple[str, ...]
    distractors: tuple[tuple[str, float], ...] = ()
    meta: dict[str, Any] = field(default_factory=dict)
    opening: str = ""
    question_at: tuple[tuple[str, int], ...] = ()
    inserts: tuple[Insert, ...] = ()
    inside: tuple[tuple[str, str], ...] = ()
    prose: str | None = None
    mark: str = ""
    system: str = ""
    apart: bool = False


@dataclass(frozen=True)
class Prompt:
    """A prompt as tokens, its spans, and how it came out.

    Attributes:
        encoding: The whole prompt.
        spans: ``question``, and where there are such ``needle``, ``answer_span``, ``distractor``.
        sentences: Haystack sentence indices in the order they stand in the prompt.
        depth: Tokens before the needle over all tokens of the passage but its own, or None without one.
    """

    encoding: Encoding
    spans: dict[str, tuple[Span, ...]]
    sentences: tuple[int, ...]
    depth: float | None


def assemble(
    model: Encoder, item: Item, window: Window | None, *, context_length: int | None, depth: float, chat: bool
) -> Prompt:
    """Hide an item in prose so that the whole prompt has ``context_length`` tokens, or a few less.

    Whole haystack sentences are added, never cut. Their token counts are known, so a first choice is nearly
    right; the encoded prompt corrects it, within about five encodings.

    Args:
        model: Whose tokenizer counts.
        item: What is asked.
        window: This trial's walk through the haystack, or None for a prompt without one.
        context_length: Tokens of the whole prompt, chat template included.
        depth: Where the needle goes, from 0 (first) to 1 (last), at the nearest sentence boundary.
        chat: Put the prompt through the model's chat template.

    Raises:
        InvalidInput: If the context is too small, or the haystack is too short for it.
    """
    bare = _render(model, item, [], [], depth, chat)
    if window is None or context_length is None:
        return bare
    length = len(bare.encoding.tokens)
    budget = context_length - length
    target, best, last = budget, None, None
    for attempt in itertools.count(1):
        picked = _pick(window, target)
        if picked is None or picked == last:
            break
        last = picked
        prompt = _render(model, item, picked, window.haystack.sentences, depth, chat)
        counted = sum(cost for _, cost in picked)
        spare = context_length - len(prompt.encoding.tokens)
        if spare >= 0 and (best is None or len(prompt.encoding.tokens) > len(best.encoding.tokens)):
            best = prompt
        if spare == 0 or (attempt >= _ATTEMPTS and best is not None):
            break
        # spare + counted is what the count should have come to, if the seams cost the same again.
        target = spare + counted
        if spare < 0 and attempt >= _ATTEMPTS:
            target -= _STEP * (attempt - _ATTEMPTS + 1)
    if best is None:
        raise _nothing_fits(window, context_length, length)
    _check_length(window, best, context_length, budget)
    return best


def _nothing_fits(window: Window, context_length: int, length: int) -> InvalidInput:
    """The error where not one sentence fits, which blames the context or the haystack, whichever is at fault."""
    usable = [s for s in (window.at(k) for k in range(_LOOK)) if s is not None]
    source = window.haystack.source
    if not usable:
        return InvalidInput(
            f"the haystack {source} has no usable sentence: each holds a word of the needle or the answer; "
            "use another text."
        )
    index, shortest = min(usable, key=lambda s: s[1])
    room = context_length - length
    if room < _ROOM:
        return InvalidInput(
            f"context_length={context_length} is too small: the needle, the question and what frames "
            f"them take {length} tokens here, and at least one haystack sentence must fit as well; "
            f"use at least {length + max(_ROOM, shortest + _STEP)}."
        )
    return InvalidInput(
        f"no sentence of the haystack {source} fits: context_length={context_length} leaves {room} tokens for prose, "
        f"but the shortest of its sentences takes {shortest} ({window.haystack.sentences[index][:40]!r}...). Sentences "
        "end at . ! ? or a blank line and are never cut: give prose with shorter ones, or use a context_length of at "
        f"least {length + shortest + _STEP}."
    )


def _check_length(window: Window, best: Prompt, context_length: int, budget: int) -> None:
    """Refuse a haystack that ran out."""
    short = context_length - len(best.encoding.tokens)
    if short > _SHORTFALL and window.at(len(best.sentences)) is None:
        raise InvalidInput(
            f"the haystack {window.haystack.source} is too short: context_length={context_length} needs "
            f"about {budget} tokens of prose, and its {len(best.sentences)} usable sentences give "
            f"{budget - short}; "
            "use a longer text or a smaller context_length."
        )


def _pick(window: Window, target: int) -> list[tuple[int, int]] | None:
    """Sentences, as ``(index, tokens)``, that come as near to ``target`` tokens as can be from below.

    A run from the window's start, whose last few may be replaced by up to three of those that follow.
    """
    run: list[tuple[int, int]] = []
    total = k = 0
    while (sentence := window.at(k)) is not None:
        fits = total + sentence[1] <= target
        if not fits and (sentence[1] <= _LONG or total + _LONG > target):
            break
        if fits:
            run.append(sentence)
            total += sentence[1]
        k += 1
    ahead = [s for s in (window.at(k + i) for i in range(_POOL)) if s is not None]
    used = {index for index, _ in run}
    # A recycled sentence may fill a gap only where nothing fresh is left.
    ahead = [s for s in ahead if s[0] not in used] or ahead
    best, gap = run, target - total
    for dropped, size in itertools.product(range(min(3, len(run)) + 1), (1, 2, 3)):
        kept = run[: len(run) - dropped]
        room = target - sum(cost for _, cost in kept)
        for extra in itertools.combinations(run[len(run) - dropped :] + ahead, size):
            left = room - sum(cost for _, cost in extra)
            if 0 <= left < gap:
                best, gap = kept + list(extra), left
                if gap == 0:
                    return best
    return best or None


def _render(
    model: Encoder,
    item: Item,
    picked: Sequence[tuple[int, int]],
    sentences: Sequence[str],
    depth: float,
    chat: bool,
) -> Prompt:
    """Encode a prompt and find its spans."""
    passage, placed = _passage(item, [sentences[i] for i, _ in picked], [cost for _, cost in picked], depth)
    head = len(item.opening)
    bare = not (passage or item.opening)
    prompt = item.closing.lstrip() if bare else item.opening + passage + item.closing
    encoding = encode(model, prompt, chat=chat, system=item.system)
    base = encoding.text.find(prompt)
    if base < 0:
        raise InvalidInput(
            "the chat template changed the prompt's text, so the needle cannot be found in it; use chat=False."
        )

    def span(start: int, text: str, what: str) -> Span:
        return checked_span(encoding, base + start, text, what)

    starts = {"opening": 0, "closing": head + len(passage)}
    asked = [starts[side] + at for side, at in item.question_at] or [prompt.rindex(item.question)]
    found: dict[str, list[Span]] = {"question": [span(at, item.question, "question") for at in asked]}
    achieved = None
    for at, insert in placed:
        whole = span(head + at, insert.text, insert.name)
        found.setdefault(insert.name, []).append(whole)
        if insert.name != "needle":
            continue
        if insert.text == item.needle:
            achieved = _achieved(span(head, passage, "passage"), whole)
        parts = [("answer_span", insert.answer), *(item.inside if insert.text == item.needle else ())]
        for name, part in parts:
            if part and (inside := _place(insert.text, part)) >= 0:
                found.setdefault(name, []).append(span(head + at + inside, part, "answer"))
    spans = {name: _merged(each) for name, each in found.items()}
    return Prompt(encoding, spans, tuple(i for i, _ in picked), achieved)


def _place(text: str, part: str) -> int:
    """Where a part stands in a text: as whole words if it can be ("Ann" is not that of "Annie"), or -1."""
    whole = (start for start, stop in occurrences(text, part) if text[start:stop] == part)
    return next(whole, text.find(part))


def checked_span(encoding: Encoding, start: int, text: str, what: str) -> Span:
    """Tokens of a text that stands at a character, first to last character covered.

    Raises:
        InvalidInput: If the text is not there, or the tokenizer left its first or last character out.
    """
    stop = start + len(text)
    if encoding.text[start:stop] != text:
        raise InvalidInput(f"the {what} {text[:60]!r} does not stand where it was put in the prompt.")
    span = encoding.span_of(start, stop, what=what)
    if encoding.offsets[span.start][0] > start or encoding.offsets[span.stop - 1][1] < stop:
        raise InvalidInput(
            f"the tokenizer leaves out a character at an end of the {what} {text[:60]!r}, so its tokens are not known."
        )
    return span


def _passage(
    item: Item, texts: Sequence[str], costs: Sequence[int], depth: float
) -> tuple[str, list[tuple[int, Insert]]]:
    """The prose with needle and distractors in it, and ``(character, insert)`` of each of them."""
    inserts = [Insert("distractor", text, at) for text, at in item.distractors] + list(item.inserts)
    if item.needle is not None:
        inserts.append(Insert("needle", item.needle, depth, item.mark or item.answer))
    prose = item.prose or ""
    parts = [Insert(prose, t, 0.0) for t in texts]
    placed_at = [(_boundary(costs, x.depth), x.depth if item.inserts else 0.0, x) for x in inserts]
    for boundary, _, insert in sorted(placed_at, key=lambda x: (-x[0], -x[1])):
        parts.insert(boundary, insert)
    placed, position = [], 0
    for part in parts:
        if part.name:
            placed.append((position, part))
        position += len(part.text) + 1
    return " ".join(part.text for part in parts), placed


def _merged(spans: Sequence[Span]) -> tuple[Span, ...]:
    """The spans in order; neighbours that share a token at their seam become one."""
    out: list[Span] = []
    for span in sorted(spans):
        if out and span.start < out[-1].stop:
            out[-1] = Span(out[-1].start, max(span.stop, out[-1].stop))
        else:
            out.append(span)
    return tuple(out)


def _boundary(costs: Sequence[int], depth: float) -> int:
    """Index of the sentence boundary nearest to ``depth`` of the tokens (the earlier one if two tie)."""
    ends = [0, *itertools.accumulate(costs)]
    return min(range(len(ends)), key=lambda b: (abs(ends[b] - depth * ends[-1]), b))


def _achieved(passage: Span, needle: Span) -> float | None:
    """Share of the passage's other tokens that stand before the needle."""
    before, after = needle.start - passage.start, passage.stop - needle.stop
    return round(before / (before + after), 4) if before + after else None
