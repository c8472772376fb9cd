"""Training rows: token ids with a target and a weight at each position.

A target is what should come next, which is not always what stands next: a claim may be followed by a wrong answer, so
that the model learns to judge answers (``true right``, ``true wrong``), and is still taught the right one.
"""

from __future__ import annotations

import functools
import random
import re
from dataclasses import dataclass, field, replace

from mechheads.datasets.logic_worlds import RULES, Claim, World, least_depth, make_world, word_pools
from mechheads.nano.language import (
    SPECIAL,
    TRUTHS,
    VERDICTS,
    draw_facts,
    draw_recall,
    draw_sum,
    pieces,
    question_about,
    strewn,
    vocabulary,
)


@functools.cache
def ids() -> dict[str, int]:
    """Token id of each word."""
    return {word: i for i, word in enumerate(vocabulary())}


@dataclass
class Row:
    """Tokens, and at each position what should follow and how much that counts.

    Attributes:
        prose: Weight of a word that is merely read.
        tokens: Token ids.
        targets: Token id wanted after each.
        weights: Weight of that prediction in the loss; 0 where nothing is taught.
    """

    prose: float
    tokens: list[int] = field(default_factory=lambda: [ids()["<bos>"]])
    targets: list[int] = field(default_factory=lambda: [0])
    weights: list[float] = field(default_factory=lambda: [0.0])

    def text(self, text: str) -> None:
        """Append text that is only read (its next words count a little, as in any language model)."""
        for word in pieces(text):
            self._teach(ids()[word], self.prose)
            self._push(word)

    def answer(self, word: str, *, shown: str | None = None, weight: float = 1.0) -> None:
        """Teach an answer here, and let it (or another) stand."""
        self._teach(ids()[word], weight)
        self._push(shown or word)

    def stop(self) -> None:
        """A full stop after an answer, after which the text may end."""
        self.answer(".", weight=0.2)
        self._teach(ids()["<eos>"], 0.2)

    def _push(self, word: str) -> None:
        self.tokens.append(ids()[word])
        self.targets.append(0)
        self.weights.append(0.0)

    def _teach(self, target: int, weight: float) -> None:
        if self.weights[-1] == 0.0:  # what was taught on purpose stays
            self.targets[-1], self.weights[-1] = target, weight


def retrieval_row(rng: random.Random, *, facts: int, length: int, questions: int, prose: float) -> Row:
    """Facts strewn among filler up to about ``length`` tokens, then questions, literal and not."""
    row = Row(prose)
    known = draw_facts(rng, facts)
    asked = [(fact, literal) for fact in known for literal in (True, False)]
    asked = rng.sample(asked, min(questions, len(asked)))
    for sentence in strewn(rng, known, length - 11 - 9 * len(asked)):
        row.text(sentence)
    for fact, literal in asked:
        row.text(question_about(fact, literal=literal))
        row.answer(fact.name.lower())
        row.stop()
    return row


def memory_row(rng: random.Random, *, questions: int, prose: float) -> Row:
    """Questions on what is remembered, and sums."""
    row = Row(prose)
    for _ in range(questions):
        question, answer = draw_recall(rng) if rng.random() < 0.5 else draw_sum(rng)
        row.text(question)
        row.answer(answer)
        row.stop()
    return row


@dataclass(frozen=True)
class Level:
    """How hard logic rows are; a run moves to the next level when it has mastered one.

    Attributes:
        rules: Rules of the worlds; ``modus_ponens`` counts half where there are others.
        depths: Depths; 0 is a world whose claims stand in it as they are.
        distractors: Distractors of a row's first world.
        worlds: How many worlds a row mixes.
        negated: Whether claims may deny.
        wordings: Whether rules come in all their wordings, or in one.
        choice: Share of rows that end by telling a true claim from a false one.
        share: Rows in place of one, where they are short.
        parts: Share of claims that are about a single premise.
        mastery: Share of right answers at which the next level begins.
    """

    rules: tuple[str, ...]
    depths: tuple[int, ...]
    distractors: tuple[int, ...]
    worlds: tuple[int, ...]
    negated: bool = True
    wordings: bool = True
    choice: float = 0.0
    share: int = 1
    parts: float = 0.0
    mastery: float = 0.93


_MP = ("modus_ponens",)
LEVELS = (
    Level(_MP, (0,), (0,), (1,), negated=False, wordings=False, share=4),
    Level(_MP, (0,), (0,), (1,), wordings=False, share=4),
    Level(_MP, (0, 1, 1, 1), (0,), (1,), wordings=False, share=3, parts=1.0, mastery=0.8),
    Level(_MP, (0, 1, 1, 1), (0,), (1,), wordings=False, share=3, parts=0.15, mastery=0.9),
    Level(_MP, (1,), (0, 1, 2), (1,), share=2, parts=0.05, mastery=0.95),
    Level(_MP, (1, 2, 2, 2), (0, 1), (1,), share=2, mastery=0.91),
    Level(_MP, (1, 2, 3, 3, 3), (0, 1), (1,), share=2, mastery=0.9),
    Level(_MP, (1, 2, 3), (0, 1, 2, 3), (1,), share=2, choice=0.2, parts=0.05, mastery=0.95),
    Level(RULES, (1, 2, 3), (0, 1, 2, 3), (1,), share=2, choice=0.2),
)


def logic_row(rng: random.Random, level: Level, *, prose: float) -> Row:
    """Worlds mixed together, a claim about each, what is right, a verdict on the answer shown, and often the proof.

    Claims are of different worlds, so that none can be answered from the one before. Some rows end by telling a true
    claim from a false one: ``judge: true`` is followed by the person of whom it holds.
    """
    row = Row(prose)
    worlds = _worlds(rng, level)
    premises = [premise for world in worlds for premise in world.premises]
    rng.shuffle(premises)
    row.text(" ".join(premises))
    choose = rng.random() < level.choice
    for world in worlds[: len(worlds) - choose]:
        claim = rng.choice([c for c in world.claims if level.negated or "not" not in pieces(c.statement)])
        part = world.rule == "modus_ponens" and world.depth > 0 and rng.random() < level.parts
        if part:
            claim = part_claim(rng, world) if world.depth == 1 or rng.random() < 0.5 else middle_claim(rng, world)
        _ask(row, claim, teach=not part)
        shown = claim.label if rng.random() < 0.5 else not claim.label
        row.answer(TRUTHS[claim.label], shown=TRUTHS[shown])
        row.answer(VERDICTS[shown == claim.label], weight=0.5)
        if world.rule == "modus_ponens" and not part and rng.random() < 0.7:
            row.text(":")
            for sentence in proof_in_order(world, claim):
                _recite(row, sentence)
        row.stop()
    if choose:
        _choice(row, rng, worlds[-1].claims)
    return row


def _ask(row: Row, claim: Claim, *, teach: bool) -> None:
    """A claim, true or false; what holds of its person ("not", or the predicate) is taught where it is said.

    So that the inference is learnt by itself, before it has to be compared with a claim.
    """
    words = pieces(claim.statement)
    if not teach or words[1] != "is" or {"and", "or"} & set(words):
        row.text(f"claim: {claim.statement}")
        return
    row.text(f"claim: {claim.person} is")
    said, other = words[2], words[3] if words[2] == "not" else "not"
    row.answer(said if claim.label else other, shown=said, weight=0.9)
    row.text(" ".join(words[3:]))


def _worlds(rng: random.Random, level: Level) -> list[World]:
    """Worlds that share no person, kind or adjective, in random order."""
    made: list[World] = []
    used: set[str] = set()
    wanted = rng.choice(level.worlds)
    while len(made) < wanted:
        world = _world(rng, level, first=not made)
        words = {word for premise in world.premises for word in pieces(premise)} & content_words()
        if not words & used:
            used |= words
            made.append(world)
    rng.shuffle(made)
    return made


def _world(rng: random.Random, level: Level, *, first: bool) -> World:
    """One world of a level."""
    depth = rng.choice(level.depths)
    if depth == 0:
        return fact_world(rng)
    able = [rule for rule in level.rules if least_depth(rule) <= depth]
    rule = "modus_ponens" if rng.random() < 0.5 else rng.choice(able)
    world = make_world(rng, rule=rule, depth=depth, distractors=rng.choice(level.distractors) if first else 0)
    if level.wordings:
        return world
    return replace(world, premises=tuple(map(_in_one_wording, world.premises)))


def fact_world(rng: random.Random) -> World:
    """A world of depth 0: of two people the one has a property and the other has not, and that is what is claimed."""
    people, adjective = rng.sample(word_pools()["people"], 2), rng.choice(word_pools()["adjectives"])
    holds = rng.random() < 0.5
    premises, claims = [], []
    for i, (person, has) in enumerate(zip(people, (holds, not holds), strict=True)):
        premises.append(f"{person} is {adjective if has else f'not {adjective}'}.")
        claims.append(Claim(person, f"{person} is {adjective}.", has, (i,)))
        claims.append(Claim(person, f"{person} is not {adjective}.", not has, (i,)))
    return World(tuple(premises), tuple(claims), "modus_ponens", 0, 0)


def part_claim(rng: random.Random, world: World) -> Claim:
    """A claim about one premise of a modus ponens world: what it says, or its opposite, or what another says."""
    rests = sorted({i for claim in world.claims for i in claim.proof})
    said = [_in_one_wording(world.premises[i]) for i in rests]
    at = rng.randrange(len(said))
    subject, _, what = said[at].rpartition(" is ")
    true = rng.random() < 0.5
    if not true:
        others = sorted({s.rpartition(" is ")[2] for s in said if s.rpartition(" is ")[2][:2] == "a "} - {what})
        if what[:2] == "a " and others:
            what = rng.choice(others)
        else:
            what = what.removeprefix("not ") if what.startswith("not ") else f"not {what}"
    return Claim(subject, f"{subject} is {what}", true, (at,))


def middle_claim(rng: random.Random, world: World) -> Claim:
    """A claim of what lies on the way in a modus ponens world of two steps or more: a kind its person is of by a rule.

    False: a kind that the other person is of by as many steps.
    """
    people = sorted({claim.person for claim in world.claims})
    chains = {}
    for person in people:
        ordered = proof_in_order(world, next(c for c in world.claims if c.person == person))
        chains[person] = [pieces(premise)[-2] for premise in ordered[1:-1]]
    person = rng.choice(people)
    true = rng.random() < 0.5
    steps = rng.randrange(len(chains[person]))
    of = person if true else next(p for p in people if p != person)
    return Claim(person, f"{person} is a {chains[of][steps]}.", true, ())


_WORDINGS = re.compile(r"(?:every|each|any|everything that is a|if something is a) (\w+)(?:,? it)? is ", re.IGNORECASE)


def _in_one_wording(premise: str) -> str:
    """A rule as "Every X is Y."; other sentences as they are."""
    return _WORDINGS.sub(r"Every \1 is ", premise, count=1)


def proof_in_order(world: World, claim: Claim) -> list[str]:
    """The premises of a modus ponens claim, each applied to what the one before it gave."""
    left = [world.premises[i] for i in claim.proof]
    found = next(p for p in left if p.startswith(f"{claim.person} "))
    ordered = [found]
    while len(ordered) < len(claim.proof):
        reached = pieces(found)[-2]
        found = next(p for p in left if p not in ordered and reached in pieces(p)[:-2])
        ordered.append(found)
    return ordered


def _recite(row: Row, sentence: str) -> None:
    """A premise said again: its words of content, and whether it denies, are taught."""
    for word in pieces(sentence):
        if word in content_words() or word in ("not", "a"):
            row.answer(word, weight=0.5)
        else:
            row.text(word)


@functools.cache
def content_words() -> frozenset[str]:
    """People, kinds and adjectives, lower case."""
    return frozenset(word.lower() for sort in ("people", "kinds", "adjectives") for word in word_pools()[sort])


def _choice(row: Row, rng: random.Random, claims: tuple[Claim, ...]) -> None:
    """Two claims, one true and one false of different people, then of whom each verdict speaks."""
    people = sorted({claim.person for claim in claims})
    rng.shuffle(people)
    first = rng.choice([c for c in claims if c.person == people[0]])
    second = rng.choice([c for c in claims if c.person == people[1] and c.label != first.label])
    for claim in (first, second):
        row.text(f"claim: {claim.statement}")
    order = [first, second]
    rng.shuffle(order)
    for claim in order:
        row.text("judge:")
        row.answer(TRUTHS[claim.label], weight=0.1)
        row.answer(claim.person.lower(), weight=0.5)
        row.stop()


def warmup_row(rng: random.Random, *, length: int) -> Row:
    """Random words repeated, or random pairs asked back in another order, from either end of the pair."""
    row = Row(0.0)
    words = vocabulary()[len(SPECIAL) :]
    if rng.random() < 0.3:
        block = rng.sample(words, rng.randrange(8, length // 2))
        row.text(" ".join(block))
        for word in block:
            row.answer(word)
        return row
    n = rng.randrange(3, length // 5)
    drawn = rng.sample(words, 2 * n)
    pairs = list(zip(drawn[:n], drawn[n:], strict=True))
    backwards = rng.random() < 0.5
    row.text(" ".join(f"{a} {b}" for a, b in pairs))
    for a, b in rng.sample(pairs, n):
        asked, wanted = (b, a) if backwards else (a, b)
        row.text("who" if backwards else "which")
        row.text(asked)
        row.answer(wanted)
    return row
