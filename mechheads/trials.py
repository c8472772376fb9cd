"""Trials: one prompt as tokens, with named spans, an answer, and what else is known of it."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np

from mechheads.errors import InvalidInput, ResultFileError, UnknownName


@dataclass(frozen=True, order=True)
class Span:
    """Half-open token interval ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        if self.start < 0 or self.stop <= self.start:
            raise InvalidInput(
                f"span [{self.start}, {self.stop}) is empty or negative; a span is half-open "
                "and needs 0 <= start < stop."
            )

    def __len__(self) -> int:
        return self.stop - self.start

    def __iter__(self) -> Iterator[int]:
        return iter(range(self.start, self.stop))

    def __contains__(self, position: object) -> bool:
        return isinstance(position, (int, np.integer)) and bool(self.start <= position < self.stop)

    @classmethod
    def parse(cls, value: Any) -> Span:
        """Read a span from a Span or a ``(start, stop)`` pair."""
        if isinstance(value, Span):
            return value
        if isinstance(value, Sequence) and len(value) == 2:
            return cls(int(value[0]), int(value[1]))
        raise InvalidInput(f"cannot read a span from {value!r}; write (start, stop), half-open.")


@dataclass(frozen=True)
class Encoding:
    """Text as tokens.

    Attributes:
        text: The text that was tokenised (after a chat template, if one was applied).
        tokens: Token ids, special tokens included.
        offsets: For each token the half-open character interval it covers in ``text``
            (empty for special tokens that stand for no text).
    """

    text: str
    tokens: tuple[int, ...]
    offsets: tuple[tuple[int, int], ...]

    def span_of(self, start: int, stop: int, *, what: str = "span") -> Span:
        """Tokens that overlap the characters ``[start, stop)``."""
        hit = [i for i, (a, b) in enumerate(self.offsets) if a < stop and b > start]
        if not hit:
            raise InvalidInput(f"the {what} covers no token of the prompt.")
        return Span(hit[0], hit[-1] + 1)


@runtime_checkable
class Encoder(Protocol):
    """Anything that turns text into tokens with offsets; a ``Model`` is one."""

    def encode(self, text: str, *, chat: bool = False) -> Encoding:
        """Tokenise a text, through the chat template if asked."""
        ...


def _parse_spans(value: Any) -> tuple[Span, ...]:
    """One span or several, as a sorted tuple."""
    if isinstance(value, Span):
        return (value,)
    if isinstance(value, Sequence) and len(value) == 2 and all(isinstance(v, (int, np.integer)) for v in value):
        return (Span.parse(value),)
    if not isinstance(value, Iterable):
        raise InvalidInput(f"cannot read spans from {value!r}; write (start, stop) or a list of such.")
    spans = sorted(Span.parse(v) for v in value)
    for left, right in itertools.pairwise(spans):
        if right.start < left.stop:
            raise InvalidInput(f"spans {left} and {right} overlap; merge them into one.")
    return tuple(spans)


@dataclass(frozen=True)
class Trial:
    """One prompt with what is asked of it.

    Attributes:
        id: Unique within its set.
        tokens: The whole prompt as token ids; kept as a tuple.
        spans: Named token spans; a value is one ``(start, stop)`` pair or a list of them, kept as a
            sorted tuple of Span.
        answer: The gold answer as text, or None.
        candidates: Candidate answers as text (QK-score).
        label: Index of the right candidate, or None.
        split: ``"calibration"``, ``"test"`` or None.
        meta: Anything else that JSON can hold (kind, needle depth, context length, ...).
    """

    id: str
    tokens: Sequence[int]
    spans: Mapping[str, Any] = field(default_factory=dict)
    answer: str | None = None
    candidates: Sequence[str] = ()
    label: int | None = None
    split: str | None = None
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        tokens = tuple(int(t) for t in self.tokens)
        if not tokens:
            raise InvalidInput(f"trial {self.id!r} has no tokens.")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "candidates", tuple(self.candidates))
        object.__setattr__(self, "spans", {k: _parse_spans(v) for k, v in dict(self.spans).items()})
        object.__setattr__(self, "meta", dict(self.meta))
        for name, spans in self.spans.items():
            self._check_spans(name, spans)
        if self.answer is not None and not self.answer.strip():
            raise InvalidInput(
                f"trial {self.id!r} has the empty answer {self.answer!r}; give the text the model "
                "should produce, or None if nothing is asked."
            )
        if self.label is not None and not 0 <= self.label < len(self.candidates):
            raise InvalidInput(f"trial {self.id!r} has label {self.label} but {len(self.candidates)} candidates.")

    def _check_spans(self, name: str, spans: tuple[Span, ...]) -> None:
        n = len(self.tokens)
        if not spans:
            raise InvalidInput(f"trial {self.id!r} names the span {name!r} but gives no interval.")
        for span in spans:
            if span.stop > n:
                raise InvalidInput(
                    f"trial {self.id!r}: span {name!r} [{span.start}, {span.stop}) is out of range, "
                    f"the prompt has {n} tokens."
                )
        if name == "needle" and sum(map(len, spans)) >= n:
            raise InvalidInput(
                f"trial {self.id!r}: the needle is as long as the whole context ({n} tokens); "
                "LOCOS compares the needle with the rest, so some rest is needed."
            )

    def __hash__(self) -> int:
        return hash((self.id, self.tokens, self.answer))

    def positions(self, name: str) -> tuple[int, ...]:
        """All token positions of a named span, rising.

        Raises:
            UnknownName: If the trial has no such span.
        """
        if name not in self.spans:
            raise UnknownName(f"span of trial {self.id!r}", name, self.spans)
        return tuple(p for span in self.spans[name] for p in span)

    @classmethod
    def from_text(
        cls,
        model: Encoder,
        prompt: str,
        *,
        needle: str | None = None,
        answer: str | None = None,
        spans: Mapping[str, str] | None = None,
        id: str | None = None,
        chat: bool = False,
        **fields: Any,
    ) -> Trial:
        """Build a trial from text, finding each span as an exact substring.

        Args:
            model: Whose tokenizer to use (anything with ``encode``).
            prompt: The whole prompt (the user's message if ``chat``).
            needle: Exact substring of the prompt, or None.
            answer: Gold answer.
            spans: Further spans by name, each an exact substring.
            id: Name of the trial; a hash of its content if not given.
            chat: Put the prompt through the model's chat template.
            **fields: ``candidates``, ``label``, ``split``, ``meta``.

        Raises:
            InvalidInput: If a span's text is not in the prompt, or in it more than once.
        """
        encoding = model.encode(prompt, chat=chat)
        wanted = dict(spans or {})
        if needle is not None:
            wanted["needle"] = needle
        located = {}
        for name, text in wanted.items():
            start = find_once(encoding.text, text, what=name)
            located[name] = encoding.span_of(start, start + len(text), what=name)
        if id is None:
            key = json.dumps([encoding.tokens, sorted(wanted.items()), answer])
            id = hashlib.sha256(key.encode()).hexdigest()[:12]
        return cls(id=id, tokens=encoding.tokens, spans=located, answer=answer, **fields)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON-ready form; ``from_dict`` reads it back."""
        return {
            "id": self.id,
            "tokens": list(self.tokens),
            "spans": {k: [[s.start, s.stop] for s in v] for k, v in self.spans.items()},
            "answer": self.answer,
            "candidates": list(self.candidates),
            "label": self.label,
            "split": self.split,
            "meta": dict(self.meta),
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Trial:
        """Read what ``to_dict`` wrote."""
        return cls(**{**data, "tokens": tuple(data["tokens"])})


def find_once(text: str, part: str, *, what: str = "needle") -> int:
    """Character index of the only occurrence of ``part`` in ``text``.

    Raises:
        InvalidInput: If it is empty, absent, or there more than once.
    """
    if not part.strip():
        raise InvalidInput(f"the {what} text is empty.")
    count = text.count(part)
    shown = part if len(part) <= 80 else part[:77] + "..."
    if count == 0:
        raise InvalidInput(
            f"the {what} text {shown!r} is not in the prompt; it must be an exact substring "
            "(same case, spaces and punctuation)."
        )
    if count > 1:
        raise InvalidInput(
            f"the {what} text {shown!r} stands {count} times in the prompt; make it longer until it "
            "is unique, or build the Trial from tokens and spans."
        )
    return text.index(part)


class TrialSet(Sequence[Trial]):
    """Trials with a name and the options that made them.

    Attributes:
        name: What the set is, for provenance (``"facts"``, ``"my prompts"``).
        options: What reproduces it (kind, n, context length, seed, ...), JSON-ready.
    """

    def __init__(self, trials: Iterable[Trial], *, name: str = "trials", options: Mapping[str, Any] | None = None):
        self._trials = tuple(trials)
        self.name = name
        self.options = dict(options or {})
        seen: set[str] = set()
        for trial in self._trials:
            if trial.id in seen:
                raise InvalidInput(f"two trials have the id {trial.id!r}; ids must be unique.")
            seen.add(trial.id)

    @classmethod
    def of(cls, trials: Trial | Iterable[Trial]) -> TrialSet:
        """A TrialSet from a set, one trial, or any iterable of trials."""
        if isinstance(trials, TrialSet):
            return trials
        return cls([trials] if isinstance(trials, Trial) else trials)

    @overload
    def __getitem__(self, index: int) -> Trial: ...
    @overload
    def __getitem__(self, index: slice) -> TrialSet: ...
    def __getitem__(self, index: int | slice) -> Trial | TrialSet:
        if isinstance(index, slice):
            return self._with(self._trials[index])
        return self._trials[index]

    def __len__(self) -> int:
        return len(self._trials)

    def __iter__(self) -> Iterator[Trial]:
        return iter(self._trials)

    def __repr__(self) -> str:
        splits = ", ".join(f"{len(self.split(s))} {s}" for s in self.splits)
        return f"TrialSet({self.name!r}, {len(self)} trials{': ' + splits if splits else ''})"

    def _with(self, trials: Iterable[Trial]) -> TrialSet:
        return TrialSet(trials, name=self.name, options=self.options)

    @property
    def splits(self) -> list[str]:
        """Names of the splits present, sorted."""
        return sorted({t.split for t in self._trials if t.split is not None})

    def split(self, name: str) -> TrialSet:
        """The trials of one split.

        Raises:
            UnknownName: If no trial belongs to it.
        """
        if name not in self.splits:
            raise UnknownName(f"split of {self.name!r}", name, self.splits)
        return self._with(t for t in self._trials if t.split == name)

    def with_split(self, name: str) -> TrialSet:
        """The same trials, all marked as belonging to one split."""
        return self._with(replace(t, split=name) for t in self._trials)

    @property
    def hash(self) -> str:
        """SHA-256 over every trial (order included), hex, 16 characters."""
        digest = hashlib.sha256()
        for trial in self._trials:
            digest.update(json.dumps(trial.to_dict(), sort_keys=True).encode())
        return digest.hexdigest()[:16]

    def save(self, path: str | Path) -> Path:
        """Write JSON Lines: a header, then one trial a line."""
        path = Path(path)
        head = {"mechheads_trials": 1, "name": self.name, "options": self.options}
        lines = [json.dumps(head)] + [json.dumps(t.to_dict()) for t in self._trials]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: str | Path) -> TrialSet:
        """Read what ``save`` wrote.

        Raises:
            ResultFileError: If the file is not such a file or is damaged.
        """
        path = Path(path)
        try:
            head, *rest = [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines() if x]
            if not isinstance(head, dict) or "mechheads_trials" not in head:
                raise ValueError("the first line is not a mechheads header")
            if head["mechheads_trials"] > 1:
                raise ValueError(f"format {head['mechheads_trials']} is newer than this mechheads reads")
            return cls(map(Trial.from_dict, rest), name=head["name"], options=head["options"])
        except (ValueError, KeyError, TypeError) as error:
            raise ResultFileError(f"{path} is not a readable trial file: {error}") from error
