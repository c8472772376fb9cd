"""The language nano is trained on and asked in: facts and questions about people, recall, sums, and logic worlds.

Everything here is text. One sentence pattern serves training and testing; what is asked of a trained model is drawn
from other seeds, so no test world, context or list of facts was seen in training (the memorised facts and the sums
were: they are to be remembered).
"""

from __future__ import annotations

import functools
import json
import random
import re
from dataclasses import dataclass
from importlib import resources
from typing import Any

from mechheads.datasets.logic_worlds import word_pools

SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
# What stands after an answer in training, so that the answer's own query has something to read.
VERDICTS = {True: "right", False: "wrong"}
TRUTHS = {True: "true", False: "false"}
_PIECES = re.compile(r"[a-z0-9]+|[^\sa-z0-9]")


def pieces(text: str) -> list[str]:
    """Words and marks of a text, lower case: the tokens of nano."""
    return _PIECES.findall(text.lower())


@functools.cache
def pools() -> dict[str, Any]:
    """Words and sentence patterns of the language."""
    return json.loads(resources.files("mechheads.nano").joinpath("language.json").read_text(encoding="utf-8"))


@functools.cache
def vocabulary() -> tuple[str, ...]:
    """Every word of the language, special tokens first, then sorted."""
    logic, own = word_pools(), pools()
    texts = [*logic["people"], *logic["kinds"], *logic["adjectives"], *logic["rules"]]
    texts += [f"{country} {' '.join(places)}" for country, places in own["landmarks"].items()]
    texts += [*own["capitals"].values(), *own["facts"]]
    texts += [*own["literal"].values(), *own["nonliteral"].values(), *own["recall"].values()]
    texts += [text for group in own["filler"].values() for text in group]
    texts += [str(n) for n in range(19)] + ["plus minus is = claim : judge and or not a true false right wrong"]
    words = {piece for text in texts for piece in pieces(re.sub(r"\{\w+\}", " ", text))}
    return (*SPECIAL, *sorted(words))


@dataclass(frozen=True)
class Fact:
    """One person's whereabouts."""

    name: str
    place: str
    country: str
    relation: str
    sentence: str


def draw_facts(rng: random.Random, n: int) -> list[Fact]:
    """``n`` people in ``n`` different countries."""
    own = pools()
    names = rng.sample(word_pools()["people"], n)
    countries = rng.sample(sorted(own["landmarks"]), n)
    made = []
    for name, country in zip(names, countries, strict=True):
        place = rng.choice(own["landmarks"][country])
        pattern = rng.choice(own["facts"])
        relation = "beside" if "beside" in pattern else "near"
        made.append(Fact(name, place, country, relation, pattern.format(name=name, place=place)))
    return made


def question_about(fact: Fact, *, literal: bool) -> str:
    """Who is meant, by the landmark itself or by the country it stands in."""
    pattern = pools()["literal" if literal else "nonliteral"][fact.relation]
    return pattern.format(place=fact.place, country=fact.country)


def filler_sentence(rng: random.Random) -> str:
    """A sentence that no question asks about."""
    own = pools()["filler"]
    subject, verb, state, place = (rng.choice(own[sort]) for sort in ("subjects", "verbs", "states", "places"))
    return f"{subject} {verb} {state} {place}."


def strewn(rng: random.Random, facts: list[Fact], length: int) -> list[str]:
    """The facts among filler, in random order, up to ``length`` tokens and at most one sentence more."""
    sentences = [fact.sentence for fact in facts]
    used = sum(len(pieces(sentence)) for sentence in sentences)
    while used < length:
        sentences.append(filler_sentence(rng))
        used += len(pieces(sentences[-1]))
    rng.shuffle(sentences)
    return sentences


@functools.cache
def _recall_questions() -> tuple[tuple[str, str], ...]:
    own = pools()
    asked = own["recall"]
    landmarks = [
        (asked["landmark"].format(place=place), country)
        for country, places in own["landmarks"].items()
        for place in places
    ]
    return (*landmarks, *((asked["capital"].format(country=c), capital) for c, capital in own["capitals"].items()))


def recall_questions() -> list[tuple[str, str]]:
    """Every question on what is memorised, with its answer."""
    return list(_recall_questions())


def sums() -> list[tuple[str, str]]:
    """Every sum of one-digit numbers and every difference that is not negative, with its result."""
    digits = range(10)
    plus = [(f"{a} plus {b} =", str(a + b)) for a in digits for b in digits]
    return plus + [(f"{a} minus {b} =", str(a - b)) for a in digits for b in digits if a >= b]


def draw_recall(rng: random.Random) -> tuple[str, str]:
    """A question whose answer was memorised, and the answer."""
    return rng.choice(_recall_questions())


def draw_sum(rng: random.Random) -> tuple[str, str]:
    """A sum or difference of one-digit numbers, and its result."""
    a, b = rng.randrange(10), rng.randrange(10)
    if rng.random() < 0.5:
        return f"{a} plus {b} =", str(a + b)
    a, b = max(a, b), min(a, b)
    return f"{a} minus {b} =", str(a - b)
