"""Logic questions as text: premises, a statement, candidate verdicts; their negations and reductions."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

from mechheads.errors import InvalidInput
from mechheads.provenance import json_ready

TRUE_FALSE = ("true", "false")
THREE = ("true", "false", "unknown")
YES_NO = ("yes", "no")
# What a trial's metadata say besides a question's own.
RESERVED = frozenset(
    {"dataset", "group", "rule", "depth", "distractors", "statement", "premises", "proof"}
    | {"verdicts", "template", "layout", "wording", "twin", "kept"}
)


@dataclass(frozen=True)
class LogicQuestion:
    """What is asked, before a template and a tokenizer make a ``Trial`` of it.

    Attributes:
        id: Unique within its set.
        premises: Sentences, in the order in which they are shown; empty where only the statement is.
        statement: What is to be judged, its final punctuation included; a question where the candidates are yes and no.
        candidates: Verdicts to choose from, without leading space: ``TRUE_FALSE``, ``THREE``, ``YES_NO`` or options.
        label: Index of the right candidate.
        rule: Name of the inference rule, or None if unknown.
        depth: Inference steps, or None if unknown.
        distractors: Premises besides, or None if unknown.
        proof: Indices into the premises that the verdict rests on, or None if unknown.
        group: Questions of one group (a world, a context) must not be torn apart by a split; the id if not given.
        dataset: Where it comes from.
        meta: Anything else that JSON can hold. ``meta["flip"]``: statement and proof of the opposite verdict, where the
            source knows them (our worlds do).

    Raises:
        InvalidInput: Naming the question and the field that cannot be used.
    """

    id: str
    premises: Sequence[str]
    statement: str
    candidates: Sequence[str]
    label: int
    rule: str | None = None
    depth: int | None = None
    distractors: int | None = None
    proof: Sequence[int] | None = None
    group: str = ""
    dataset: str = "own"
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        me = f"question {self.id!r}"
        for name in ("id", "statement"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value.strip():
                raise InvalidInput(f"{me}: {name} is {value!r}; give some text.")
        for name in ("premises", "candidates"):
            value = getattr(self, name)
            if isinstance(value, str) or not all(isinstance(text, str) and text.strip() for text in value):
                raise InvalidInput(f"{me}: {name} are {str(value)[:80]!r}; give a list of non-empty texts.")
        if len(self.candidates) < 2 or len(set(self.candidates)) < len(self.candidates):
            raise InvalidInput(f"{me} has the candidates {list(self.candidates)}; give two or more, all different.")
        if isinstance(self.label, bool) or not 0 <= self.label < len(self.candidates):
            raise InvalidInput(f"{me} has the label {self.label!r}; expected 0 to {len(self.candidates) - 1}.")
        proof = None if self.proof is None else tuple(sorted(set(self.proof)))
        if proof and not 0 <= proof[0] <= proof[-1] < len(self.premises):
            raise InvalidInput(f"{me}: the proof {list(proof)} names no premises; there are {len(self.premises)}.")
        if taken := sorted(RESERVED & set(self.meta)):
            raise InvalidInput(f"{me}: meta has {taken[0]!r}, a name that trials use themselves; call it otherwise.")
        fixed = {
            "premises": tuple(" ".join(p.split()) for p in self.premises),
            "statement": " ".join(self.statement.split()),
            "candidates": tuple(self.candidates),
            "proof": proof,
            "group": self.group or self.id,
            "meta": json_ready(self.meta, where=f"{me}: meta"),
        }
        for name, value in fixed.items():
            object.__setattr__(self, name, value)

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready form; ``from_dict`` reads it back."""
        return json_ready(asdict(self), where=f"question {self.id!r}")

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> LogicQuestion:
        """Read what ``to_dict`` wrote.

        Raises:
            InvalidInput: If there is a field that questions do not have, or one is missing.
        """
        known = {f.name for f in fields(cls)}
        missing = [f for f in ("id", "premises", "statement", "candidates", "label") if f not in data]
        if unknown := sorted(set(data) - known):
            raise InvalidInput(f"a logic question has no {unknown}; its fields are {sorted(known)}.")
        if missing:
            raise InvalidInput(f"the logic question {data.get('id')!r} lacks {missing}.")
        return cls(**data)

    def keeping(self, premises: Iterable[int]) -> LogicQuestion:
        """The same question with only some of its premises, by index, in their order; the label stays as it was.

        Raises:
            InvalidInput: If an index names no premise.
        """
        kept = sorted(set(premises))
        if kept and not 0 <= kept[0] <= kept[-1] < len(self.premises):
            raise InvalidInput(
                f"question {self.id!r} has {len(self.premises)} premises; the indices {kept} go beyond them."
            )
        place = {old: new for new, old in enumerate(kept)}

        def moved(proof: Sequence[int] | None) -> list[int] | None:
            return None if proof is None else [place[i] for i in proof if i in place]

        meta = dict(self.meta)
        if "flip" in meta:
            meta["flip"] = {**meta["flip"], "proof": moved(meta["flip"].get("proof"))}
        return replace(self, premises=tuple(self.premises[i] for i in kept), proof=moved(self.proof), meta=meta)

    def flipped(self) -> LogicQuestion | None:
        """The question whose verdict is the opposite, or None if none can be made by rule.

        In our worlds the same is said of the other person. Elsewhere the statement is negated (``negated``); unknown
        stays unknown. A yes/no question has no such form: where "can we conclude X?" is answered no, not X need not
        follow; nor have options other than true and false.
        """
        if tuple(self.candidates) not in (TRUE_FALSE, THREE):
            return None
        label = {0: 1, 1: 0}.get(self.label, self.label)
        if "flip" in self.meta:
            there = self.meta["flip"]
            back = {"statement": self.statement, "proof": None if self.proof is None else list(self.proof)}
            return replace(
                self,
                statement=there["statement"],
                proof=there.get("proof"),
                label=label,
                meta={**self.meta, "flip": back},
            )
        return replace(self, statement=negated(self.statement), label=label)


# -- sentences ------------------------------------------------------------------------------------------------

_END = re.compile(r"(?<=[.!?])[\"'\u201d\u2019)\]]*\s+(?=[\"'\u201c\u2018(\[]?[A-Z0-9])")
_ABBREVIATED = re.compile(r"(?:\b(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|Inc|Ltd|e\.g|i\.e)|\b[A-Z])\.$")


def sentences_of(text: str) -> tuple[str, ...]:
    """The sentences of a context, split after ``. ! ?`` before a capital or digit; abbreviations do not end one."""
    flat = " ".join(text.split())
    out, start = [], 0
    for match in _END.finditer(flat):
        piece = flat[start : match.end()].strip()
        if not _ABBREVIATED.search(piece):
            out.append(piece)
            start = match.end()
    if flat[start:].strip():
        out.append(flat[start:].strip())
    return tuple(out)


_DENIED = "It is not the case that "
# A sentence that begins so speaks of many, of none or of a condition: "not" after its verb would not negate it.
_WIDE = frozenset(
    {"all", "any", "both", "each", "either", "every", "everybody", "everyone", "everything", "few", "if", "many"}
    | {"most", "neither", "no", "nobody", "none", "nothing", "only", "some", "somebody", "someone", "something"}
    | {"there", "these", "those", "what", "when", "who", "whoever", "a", "an", "it", "people"}
)
# Nor where the verb is followed by any of these ("is not both red and blue" leaves open which).
_SCOPE = re.compile(
    r"\b(?:and|or|nor|either|neither|both|if|then|unless|but|because|who|which|that|only|always|never|also|all|any|"
    r"every|each|no|some|when|while|to|than)\b|[,;:]"
)
_NOUN = re.compile(r"[A-Z][\w'\u2019-]*(?: (?:[A-Z0-9][\w'\u2019-]*|of|the))*")
_PLAIN = re.compile(r"(?P<who>.+?) (?P<verb>is|was) (?P<no>not )?(?P<rest>.+)")
_LOWERED = _WIDE | {"the", "his", "her", "its", "their", "this", "that", "our", "my", "he", "she", "they", "we", "you"}


def negated(statement: str) -> str:
    """The statement's negation, as a sentence; negating twice gives it back.

    ``X is Y`` and ``X is not Y`` are exchanged where X is a name or ``The ...`` and nothing in Y (``and``, ``only``,
    ``every``, a comma, ...) could take the negation differently; else "It is not the case that" is put before it, or
    taken away.
    """
    if plain := plainly_negated(statement):
        return plain
    if statement.startswith(_DENIED):
        rest = statement.removeprefix(_DENIED)
        return rest[0].upper() + rest[1:]
    first = statement.split(" ", 1)[0]
    lowered = first.lower() in _LOWERED
    return _DENIED + (statement[0].lower() + statement[1:] if lowered else statement)


def plainly_negated(statement: str) -> str | None:
    """The negation by ``not`` alone, or None where that is not safe."""
    match = _PLAIN.fullmatch(statement)
    if match is None or statement.startswith(_DENIED):
        return None
    who, rest = match["who"], match["rest"]
    named = _NOUN.fullmatch(who) if not who.startswith("The ") else re.fullmatch(r"The [a-z][\w-]*", who)
    if named is None or who.split(" ", 1)[0].lower() in _WIDE or _SCOPE.search(rest) or rest.startswith("not "):
        return None
    return f"{who} {match['verb']} {'' if match['no'] else 'not '}{rest}"
