"""The words that needles and questions are made of: names, objects, places, landmarks, recall facts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from string import Formatter
from typing import Any

from mechheads.errors import InvalidInput, UnknownName


@dataclass(frozen=True)
class Template:
    """Wording of a needle and its question, with fields in braces.

    Attributes:
        name: For the trial's metadata.
        needle: The sentence(s) hidden in the prose.
        question: What is asked.
        prefix: How the answer begins after ``Answer:`` (left out with a chat template).
        answer: The gold answer.
        hint: Follows the question with a chat template.
    """

    name: str
    needle: str
    question: str
    prefix: str
    answer: str
    hint: str = ""

    def fill(self, fields: Mapping[str, str]) -> Template:
        """The template with its fields replaced."""
        parts = {k: getattr(self, k).format_map(fields) for k in _PARTS}
        return Template(name=self.name, **parts)

    def closing(self, *, chat: bool) -> str:
        """What follows the passage."""
        return closing(self.question, self.prefix, self.hint, chat=chat)

    def to_dict(self) -> dict[str, str]:
        """Plain form, as ``template=`` takes it."""
        return {"name": self.name, **{k: getattr(self, k) for k in _PARTS}}


_PARTS = ("needle", "question", "prefix", "answer", "hint")
FIELDS = {
    "passkey": ("key",),
    "facts": ("name", "object", "place"),
    "landmarks": ("name", "landmark", "country"),
}


def closing(question: str, prefix: str, hint: str, *, chat: bool) -> str:
    """Question and start of the answer, after the passage; in a chat the question and a hint."""
    if chat:
        return f"\n\nQuestion: {question} {hint}".rstrip()
    return f"\n\nQuestion: {question}\nAnswer: {prefix}".rstrip()


@cache
def _data(name: str) -> Any:
    return json.loads(resources.files("mechheads.datasets").joinpath(name).read_text(encoding="utf-8"))


def pool(name: str) -> tuple[Any, ...]:
    """A list of words by its name in ``pools.json``."""
    return tuple(_data("pools.json")[name])


def templates(kind: str, chosen: str | Mapping[str, str] | None) -> tuple[Template, ...]:
    """The templates of a kind: all that are shipped, one of them by name, or the caller's own.

    Raises:
        UnknownName: If no shipped template of the kind has that name.
        InvalidInput: If an own template lacks a part or names a field the kind does not have.
    """
    shipped = {t["name"]: Template(**t) for t in _data("templates.json")[kind]}
    if chosen is None:
        return tuple(shipped.values())
    if isinstance(chosen, str):
        if chosen not in shipped:
            raise UnknownName(f"template of {kind!r}", chosen, shipped)
        return (shipped[chosen],)
    if not isinstance(chosen, Mapping):
        raise InvalidInput(f"template={chosen!r}: give a shipped template's name or a mapping of its parts.")
    return (_own_template(kind, chosen),)


def _own_template(kind: str, chosen: Mapping[str, str]) -> Template:
    needed = ("needle", "question", "answer")
    missing = [k for k in needed if not str(chosen.get(k, "")).strip()]
    unknown = sorted(set(chosen) - {"name", *_PARTS})
    if missing or unknown:
        raise InvalidInput(
            f"the template lacks {missing} and has unknown parts {unknown}; it needs {list(needed)}, "
            "and may have 'name', 'prefix' and 'hint'."
        )
    template = Template(**{"name": "own", "prefix": "", **chosen})
    for part in _PARTS:
        try:
            used = [name for _, name, _, _ in Formatter().parse(getattr(template, part)) if name is not None]
        except ValueError as error:
            raise InvalidInput(f"the template's {part} {getattr(template, part)!r}: {error}.") from error
        if wrong := [u for u in used if u not in FIELDS[kind]]:
            raise InvalidInput(f"the template's {part} uses the fields {wrong}; {kind!r} has {list(FIELDS[kind])}.")
    return template
