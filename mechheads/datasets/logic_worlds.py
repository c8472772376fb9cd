"""Worlds of made-up kinds in which a statement is proved or refuted, built so that its wording gives nothing away.

A world has two people for whom everything is alike but the verdict: the same predicate is derived for the one and
refuted for the other, by premises of the same form and number, over kinds of their own. So whether a statement is true
cannot be told from its words, from how many negations the premises hold, or from which word stands beside which; only
following the premises tells. Exchanging the two names turns the label (the *twin*).

The rules and their names follow ProntoQA-OOD (Saparov et al., "Testing the General Deductive Reasoning Capacity of
Large Language Models Using OOD Examples", NeurIPS 2023, arXiv 2305.15269); text and code are our own.
"""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mechheads.errors import InvalidInput, UnknownName


@dataclass(frozen=True)
class Literal:
    """A property a thing has or lacks: an adjective (``kind``) or membership of a kind (``a lorpus``)."""

    words: str
    holds: bool = True

    def negated(self) -> Literal:
        """The same property the other way round."""
        return Literal(self.words, not self.holds)

    def matching(self, truth: bool) -> Literal:
        """Itself if ``truth``, else its negation."""
        return self if truth else self.negated()

    def __str__(self) -> str:
        return self.words if self.holds else f"not {self.words}"


@dataclass(frozen=True)
class Claim:
    """A statement that can be put about either person of a world.

    Attributes:
        person: Whom it is about.
        statement: As a sentence.
        label: Whether it follows (True) or its opposite does (False).
        proof: Indices into the world's premises of those its verdict rests on, rising.
    """

    person: str
    statement: str
    label: bool
    proof: tuple[int, ...]


@dataclass(frozen=True)
class World:
    """Premises, and every claim they decide.

    Attributes:
        premises: Sentences, shuffled.
        claims: For each of the two people: the predicate, and its negation where the rule has one.
        rule: One of ``RULES``.
        depth: Inference steps from the premises to the verdict.
        distractors: Premises that bear on neither person nor predicate.
    """

    premises: tuple[str, ...]
    claims: tuple[Claim, ...]
    rule: str
    depth: int
    distractors: int


@functools.cache
def word_pools() -> dict[str, list[str]]:
    """The words of the worlds: people, kinds, adjectives, and wordings of a rule."""
    return json.loads(resources.files("mechheads.datasets").joinpath("logic_words.json").read_text(encoding="utf-8"))


class _Supply:
    """Words of each sort, none given out twice in one world."""

    def __init__(self, rng: random.Random):
        pools = word_pools()
        self._left = {sort: rng.sample(pools[sort], len(pools[sort])) for sort in ("people", "kinds", "adjectives")}

    def person(self) -> str:
        return self._take("people")

    def kind(self) -> Literal:
        return Literal("a " + self._take("kinds"))

    def adjective(self) -> str:
        return self._take("adjectives")

    def _take(self, sort: str) -> str:
        return self._left[sort].pop()


@dataclass
class _Side:
    """What is said of one person: premises its verdict rests on, and others of the same form it does not rest on."""

    person: str
    truth: bool
    proof: list[str]
    beside: list[str]


class _Writer:
    """Sentences, in one wording a world draws for each rule."""

    def __init__(self, rng: random.Random, words: _Supply):
        self.rng = rng
        self.words = words
        self._frames = word_pools()["rules"]

    def fact(self, person: str, what: Any) -> str:
        return f"{person} is {what}."

    def rule(self, condition: Literal, what: Any) -> str:
        if not condition.holds:
            text = f"everything that is {condition} is {what}."
        else:
            noun = condition.words.removeprefix("a ")
            frames = [f for f in self._frames if "{noun}" not in f or condition.words.startswith("a ")]
            text = self.rng.choice(frames).format(noun=noun, condition=condition, what=what)
        return text[0].upper() + text[1:]

    def chain(self, person: str, goal: Any, hops: int) -> list[str]:
        """Premises from which ``goal`` follows for a person in ``hops`` applications of a rule."""
        if hops == 0:
            return [self.fact(person, goal)]
        kinds = [self.words.kind() for _ in range(hops)]
        links = [self.rule(a, b) for a, b in zip(kinds, [*kinds[1:], goal], strict=True)]
        return [self.fact(person, kinds[0]), *links]

    def literal(self) -> Literal:
        return Literal(self.words.adjective(), self.rng.random() < 0.5)


@dataclass(frozen=True)
class _Predicate:
    """What a world decides: its text for either polarity (None: it has no negation)."""

    said: str
    negated: str | None


def _modus_ponens(w: _Writer, sides: Sequence[_Side], depth: int) -> _Predicate:
    goal = Literal(w.words.adjective())
    for side in sides:
        side.proof += w.chain(side.person, goal.matching(side.truth), depth)
    return _Predicate(str(goal), str(goal.negated()))


def _conjunction_introduction(w: _Writer, sides: Sequence[_Side], depth: int) -> _Predicate:
    pair = [w.literal(), w.literal()]
    failing = w.rng.randrange(2)
    for side in sides:
        for i, part in enumerate(pair):
            premises = w.chain(side.person, part.matching(side.truth or i != failing), depth - 1)
            (side.proof if side.truth or i == failing else side.beside).extend(premises)
    return _Predicate(_joined("and", pair), None)


def _conjunction_elimination(w: _Writer, sides: Sequence[_Side], depth: int) -> _Predicate:
    goal, other = Literal(w.words.adjective()), w.words.adjective()
    for side in sides:
        parts = [goal.matching(side.truth), Literal(other, w.rng.random() < 0.5)]
        w.rng.shuffle(parts)
        side.proof += w.chain(side.person, _joined("and", parts), depth - 1)
    return _Predicate(str(goal), str(goal.negated()))


def _disjunction_introduction(w: _Writer, sides: Sequence[_Side], depth: int) -> _Predicate:
    pair = [w.literal(), w.literal()]
    holding = w.rng.randrange(2)
    for side in sides:
        for i, part in enumerate(pair):
            premises = w.chain(side.person, part.matching(side.truth and i == holding), depth - 1)
            (side.proof if not side.truth or i == holding else side.beside).extend(premises)
    return _Predicate(_joined("or", pair), None)


def _disjunction_elimination(w: _Writer, sides: Sequence[_Side], depth: int) -> _Predicate:
    goal = Literal(w.words.adjective())
    for side in sides:
        cases = [w.words.kind(), w.words.kind()]
        side.proof += w.chain(side.person, _joined("or", cases), depth - 1)
        side.proof += [w.rule(case, goal.matching(side.truth)) for case in cases]
    return _Predicate(str(goal), str(goal.negated()))


def _contradiction(w: _Writer, sides: Sequence[_Side], depth: int) -> _Predicate:
    """Both rules bear on both people; each breaks the consequence of one, so the opposite of its condition holds."""
    goal = w.words.kind()
    rules = {holds: (w.literal(), goal.matching(holds)) for holds in (True, False)}
    sentences = {holds: w.rule(condition, result) for holds, (result, condition) in rules.items()}
    for side in sides:
        for holds, (result, _) in rules.items():
            broken = holds != side.truth
            premises = w.chain(side.person, result.matching(not broken), depth - 1)
            (side.proof if broken else side.beside).extend(premises)
        side.proof.append(sentences[not side.truth])
        side.beside.append(sentences[side.truth])
    return _Predicate(str(goal), str(goal.negated()))


def _composed(w: _Writer, sides: Sequence[_Side], depth: int) -> _Predicate:
    """A conjunction or a disjunction taken apart, rules followed, and a conjunction or disjunction put together."""
    joined, opened = w.rng.choice(("and", "or")), w.rng.choice(("and", "or"))
    pair = [w.literal(), w.literal()]
    critical = w.rng.randrange(2)
    aside = w.words.adjective()
    for side in sides:
        for i, part in enumerate(pair):
            # The other conjunct holds for both people, the other disjunct for neither.
            truth = side.truth if i == critical else joined == "and"
            goal = part.matching(truth)
            rests = i == critical or (side.truth if joined == "and" else not side.truth)
            premises = (
                _opened(w, side.person, goal, depth - 1, opened, aside)
                if i == critical
                else w.chain(side.person, goal, 0)
            )
            (side.proof if rests else side.beside).extend(premises)
    return _Predicate(_joined(joined, pair), None)


def _opened(w: _Writer, person: str, goal: Literal, steps: int, opened: str, aside: str) -> list[str]:
    """Premises for a goal in ``steps`` inferences, the first of which takes a conjunction or disjunction apart."""
    if opened == "and":
        first = w.words.kind() if steps > 1 else goal
        parts = [first, Literal(aside, w.rng.random() < 0.5)]
        w.rng.shuffle(parts)
        premises = [w.fact(person, _joined("and", parts))]
        return premises if steps == 1 else premises + _from(w, first, goal, steps - 1)
    cases = [w.words.kind(), w.words.kind()]
    middle = w.words.kind() if steps > 1 else goal
    premises = [w.fact(person, _joined("or", cases)), *(w.rule(case, middle) for case in cases)]
    return premises if steps == 1 else premises + _from(w, middle, goal, steps - 1)


def _joined(word: str, parts: Sequence[Literal]) -> str:
    """Literals joined by "and" or "or", a negated one last: "not kind and bright" could be read two ways."""
    return f" {word} ".join(map(str, sorted(parts, key=lambda part: not part.holds)))


def _from(w: _Writer, start: Literal, goal: Literal, hops: int) -> list[str]:
    """Rules that lead from a condition to a goal."""
    kinds = [start, *(w.words.kind() for _ in range(hops - 1))]
    return [w.rule(a, b) for a, b in zip(kinds, [*kinds[1:], goal], strict=True)]


_BUILDERS: dict[str, Callable[[_Writer, Sequence[_Side], int], _Predicate]] = {
    "modus_ponens": _modus_ponens,
    "conjunction_introduction": _conjunction_introduction,
    "conjunction_elimination": _conjunction_elimination,
    "disjunction_introduction": _disjunction_introduction,
    "disjunction_elimination": _disjunction_elimination,
    "contradiction": _contradiction,
    "composed": _composed,
}
RULES: tuple[str, ...] = tuple(_BUILDERS)
MAX_DEPTH = 6
MAX_DISTRACTORS = 5


def least_depth(rule: str) -> int:
    """The least depth a rule can have: 2 for composed rules, else 1."""
    return 2 if rule == "composed" else 1


def make_world(rng: random.Random, *, rule: str, depth: int, distractors: int = 0) -> World:
    """One world.

    Args:
        rng: Where its randomness comes from.
        rule: One of ``RULES``.
        depth: Inference steps, 1 to 6 (composed: 2 to 6). A disjunction taken apart counts as one.
        distractors: Premises besides, 0 to 5.

    Raises:
        UnknownName: If there is no such rule.
        InvalidInput: If depth or distractors are out of range.
    """
    check_world(rule, depth, distractors)
    words = _Supply(rng)
    writer = _Writer(rng, words)
    first = rng.random() < 0.5
    sides = [_Side(words.person(), first, [], []), _Side(words.person(), not first, [], [])]
    predicate = _BUILDERS[rule](writer, sides, depth)
    beside = [_distractor(writer) for _ in range(distractors)]
    premises = list(dict.fromkeys([p for s in sides for p in (*s.proof, *s.beside)] + beside))
    rng.shuffle(premises)
    claims = [claim for side in sides for claim in _claims(side, predicate, premises)]
    return World(tuple(premises), tuple(claims), rule, depth, distractors)


def check_world(rule: str, depth: int, distractors: int) -> None:
    """Refuse a rule, depth or number of distractors that no world can have."""
    if rule not in _BUILDERS:
        raise UnknownName("rule", rule, RULES)
    if not least_depth(rule) <= depth <= MAX_DEPTH:
        raise InvalidInput(f"depth is {depth}; worlds of {rule} have {least_depth(rule)} to {MAX_DEPTH} steps.")
    if not 0 <= distractors <= MAX_DISTRACTORS:
        raise InvalidInput(f"distractors is {distractors}; worlds have 0 to {MAX_DISTRACTORS}.")


def _claims(side: _Side, predicate: _Predicate, premises: Sequence[str]) -> list[Claim]:
    proof = tuple(sorted(premises.index(p) for p in set(side.proof)))
    made = [Claim(side.person, f"{side.person} is {predicate.said}.", side.truth, proof)]
    if predicate.negated is not None:
        made.append(Claim(side.person, f"{side.person} is {predicate.negated}.", not side.truth, proof))
    return made


def _distractor(w: _Writer) -> str:
    """A premise over words that the world uses nowhere else."""
    form = w.rng.randrange(4)
    if form == 0:
        return w.rule(w.words.kind(), w.words.kind())
    if form == 1:
        return w.rule(w.words.kind(), w.literal())
    return w.fact(w.words.person(), w.words.kind() if form == 2 else w.literal())
