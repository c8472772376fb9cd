"""Trials: one prompt as tokens, with named spans, an answer, and what else is known of it."""

from __future__ import annotations

import hashlib
import itertools
import json
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol, overload, runtime_checkable

import numpy as np

from mechheads.errors import InvalidInput, ResultFileError, UnknownName
from mechheads.provenance import json_ready
from mechheads.result_files import write_atomically


def _whole(value: Any, what: str) -> int:
    """A whole number of any integer type (numpy and torch too) as an int; a number given as a float is none."""
    try:
        if not isinstance(value, (bool, np.bool_)):
            return operator.index(value)
    except TypeError:
        pass
    raise InvalidInput(f"{what} is {value!r}; it must be a whole number.")


@dataclass(frozen=True, order=True)
class Span:
    """Half-open token interval ``[start, stop)``."""

    start: int
    stop: int

    def __post_init__(self) -> None:
        for name in ("start", "stop"):
            object.__setattr__(self, name, _whole(getattr(self, name), f"the {name} of a span"))
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
        if isinstance(value, np.ndarray):
            value = value.tolist()
        if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 2:
            return cls(value[0], value[1])
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
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, Sequence) and len(value) == 2 and not any(isinstance(v, Iterable) for v in value):
        return (Span.parse(value),)
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
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
        meta: Anything else that JSON can hold (kind, needle depth, context length, ...); kept as a copy, with
            tuples as lists and numpy scalars as Python numbers.

    Raises:
        InvalidInput: Naming the trial and the field that cannot be used.
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
        me = f"trial {self.id!r}"
        self._check_texts(me)
        if isinstance(self.tokens, (str, bytes)) or not isinstance(self.tokens, Iterable):
            raise InvalidInput(f"{me}: tokens are {self.tokens!r}; give token ids, or use Trial.from_text.")
        tokens = tuple(_whole(t, f"{me}: a token id") for t in self.tokens)
        if not tokens:
            raise InvalidInput(f"{me} has no tokens.")
        object.__setattr__(self, "tokens", tokens)
        object.__setattr__(self, "spans", {k: _parse_spans(v) for k, v in self.spans.items()})
        # A copy, so that the set's hash cannot change later; and what a file cannot hold is refused before a run.
        object.__setattr__(self, "meta", json_ready(self.meta, where=f"{me}: meta"))
        if self.label is not None:
            object.__setattr__(self, "label", _whole(self.label, f"{me}: label"))
        for name, spans in self.spans.items():
            self._check_spans(name, spans)
        if self.answer is not None and not self.answer.strip():
            raise InvalidInput(
                f"trial {self.id!r} has the empty answer {self.answer!r}; give the text the model "
                "should produce, or None if nothing is asked."
            )
        if self.label is not None and not 0 <= self.label < len(self.candidates):
            raise InvalidInput(f"trial {self.id!r} has label {self.label} but {len(self.candidates)} candidates.")

    def _check_texts(self, me: str) -> None:
        """Refuse fields of the wrong type; they would come up only when something is hashed or written."""
        if not isinstance(self.id, str):
            raise InvalidInput(f"{me}: the id must be text; write {str(self.id)!r}.")
        for name in ("answer", "split"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise InvalidInput(f"{me}: {name} is {value!r}; it must be text, such as {str(value)!r}, or None.")
        given = self.candidates
        if isinstance(given, str) or not isinstance(given, Iterable):
            raise InvalidInput(f"{me}: candidates are {given!r}; give a list of texts.")
        object.__setattr__(self, "candidates", tuple(given))
        for text in self.candidates:
            if not isinstance(text, str):
                raise InvalidInput(f"{me}: a candidate is {text!r}; candidates are texts, such as {str(text)!r}.")
        for name in ("spans", "meta"):
            value = getattr(self, name)
            if not isinstance(value, Mapping):
                raise InvalidInput(f"{me}: {name} is {value!r}; give a dict.")
        for name in self.spans:
            if not isinstance(name, str):
                raise InvalidInput(f"{me} names a span {name!r}; span names are text.")

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
        if not isinstance(prompt, str):
            raise InvalidInput(f"the prompt is {prompt!r}; give text, or build the Trial from tokens.")
        encoding = model.encode(prompt, chat=chat)
        wanted = dict(spans or {})
        if needle is not None:
            wanted["needle"] = needle
        located = {}
        for name, text in wanted.items():
            start = find_once(encoding.text, text, what=name)
            located[name] = encoding.span_of(start, start + len(text), what=name)
        if id is None:
            key = json.dumps([encoding.tokens, sorted(wanted.items()), answer], default=repr)
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


def _write(target: Path, text: str) -> None:
    target.write_text(text, encoding="utf-8")


def find_once(text: str, part: str, *, what: str = "needle") -> int:
    """Character index of the only occurrence of ``part`` in ``text``.

    Raises:
        InvalidInput: If it is empty, absent, or there more than once.
    """
    if not isinstance(part, str):
        raise InvalidInput(f"the {what} is {part!r}; give the text as it stands in the prompt.")
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
        if not isinstance(trials, Iterable):
            raise InvalidInput(f"cannot read trials from {trials!r}; give a Trial, a TrialSet or a list of trials.")
        self._trials = tuple(trials)
        if not isinstance(name, str):
            raise InvalidInput(f"the name of a trial set is {name!r}; it must be text.")
        self.name = name
        self.options = json_ready(options or {}, where="options")
        seen: set[str] = set()
        for i, trial in enumerate(self._trials):
            if not isinstance(trial, Trial):
                raise InvalidInput(
                    f"item {i} of the trials is {str(trial)[:60]!r}, a {type(trial).__name__}; make trials with "
                    "Trial(...), Trial.from_text or Trial.from_dict."
                )
            if trial.id in seen:
                raise InvalidInput(f"two trials have the id {trial.id!r}; ids must be unique.")
            seen.add(trial.id)

    @classmethod
    def of(cls, trials: Trial | Iterable[Trial]) -> TrialSet:
        """A TrialSet from a set, one trial, or any iterable of trials.

        Raises:
            InvalidInput: If it holds anything but trials.
        """
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
        """Write JSON Lines: a header, then one trial a line.

        Raises:
            OutputNotWritable: If the folder cannot be written.
        """
        head = {"mechheads_trials": 1, "name": self.name, "options": self.options}
        lines = [json.dumps(head)] + [json.dumps(t.to_dict()) for t in self._trials]
        text = "\n".join(lines) + "\n"
        return write_atomically(Path(path), lambda target: _write(target, text))

    @classmethod
    def load(cls, path: str | Path) -> TrialSet:
        """Read what ``save`` wrote.

        Raises:
            ResultFileError: If the file is missing, is not such a file, or is damaged.
        """
        path = Path(path)
        if not path.is_file():
            reason = "is a folder, not a file" if path.is_dir() else "does not exist"
            raise ResultFileError(f"the trial file {path} {reason}; give the path that save() returned.")
        try:
            head, *rest = [json.loads(x) for x in path.read_text(encoding="utf-8").splitlines() if x]
            if not isinstance(head, dict) or "mechheads_trials" not in head:
                raise ValueError("the first line is not a mechheads header")
            if head["mechheads_trials"] > 1:
                raise ValueError(f"format {head['mechheads_trials']} is newer than this mechheads reads")
            return cls(map(Trial.from_dict, rest), name=head["name"], options=head["options"])
        except (ValueError, KeyError, TypeError, OSError) as error:
            raise ResultFileError(f"{path} is not a readable trial file: {error}") from error


def is_trial_file(what: str) -> bool:
    """Whether a name stands for a file of trials rather than a kind: it exists, or has an extension or a folder.

    So a file that is not there is said to be missing, rather than to be an unknown kind.
    """
    path = Path(what)
    return path.is_file() or bool(path.suffix) or path.name != what
