"""Drawing what is asked: items per kind, with disjoint answers and needles in the two splits."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence

from mechheads.datasets.assemble import Item
from mechheads.datasets.haystack import below, shuffled
from mechheads.datasets.pools import Template, closing, pool
from mechheads.datasets.sources import grouped
from mechheads.datasets.words import names_alike
from mechheads.errors import InvalidInput

Sizes = tuple[int, ...]
_KEYS = 90_000
_SHOTS = 3


def draw(
    kind: str,
    sizes: Sizes,
    rng: random.Random,
    templates: Sequence[Template],
    *,
    chat: bool,
    distractors: int = 0,
) -> list[list[Item]]:
    """One list of items per split, of the sizes asked for; answers and needles are disjoint between them.

    Raises:
        InvalidInput: If the kind has too few distinct needles or answers, or too few for the distractors.
    """
    if kind == "recall":
        return _grouped(kind, _recall_pool(chat), sizes, rng)
    if kind == "arithmetic":
        return _grouped(kind, _arithmetic_pool(rng, chat), sizes, rng)
    makers: dict[str, Callable[..., list[list[dict[str, str]]]]] = {
        "passkey": _passkeys,
        "facts": _facts,
        "landmarks": _landmarks,
    }
    drawn = makers[kind](sizes, rng)
    return [
        [
            _item(templates[k % len(templates)], fields, _others(part, k, distractors), rng, chat)
            for k, fields in enumerate(part)
        ]
        for part in drawn
    ]


def _others(part: Sequence[dict[str, str]], k: int, wanted: int) -> list[dict[str, str]]:
    """The next items of the split that share no word with the k-th, nor with each other."""
    chosen: list[dict[str, str]] = []
    used = set(part[k].values())
    for step in range(1, len(part)):
        if len(chosen) == wanted:
            break
        fields = part[(k + step) % len(part)]
        if used.isdisjoint(fields.values()):
            chosen.append(fields)
            used.update(fields.values())
    if len(chosen) < wanted:
        raise InvalidInput(
            f"distractors={wanted}: a split of {len(part)} trials gives only {len(chosen)} that share no "
            "word with a trial's needle; use a larger n or fewer distractors."
        )
    return chosen


def _item(
    template: Template, fields: dict[str, str], others: list[dict[str, str]], rng: random.Random, chat: bool
) -> Item:
    filled = template.fill(fields)
    distractors = tuple((template.fill(o).needle, below(rng, 1001) / 1000) for o in others)
    return Item(
        needle=filled.needle,
        question=filled.question,
        closing=filled.closing(chat=chat),
        answer=filled.answer,
        avoid=_avoid([*fields.values(), filled.answer, *(v for o in others for v in o.values())]),
        distractors=distractors,
        meta={"template": template.name, **fields},
    )


def _avoid(words: Sequence[str]) -> tuple[str, ...]:
    """Words without their article, each once."""
    return tuple(dict.fromkeys(w.removeprefix("the ") for w in words))


def _passkeys(sizes: Sizes, rng: random.Random) -> list[list[dict[str, str]]]:
    """Five-digit keys, none twice."""
    if sum(sizes) > _KEYS:
        raise _too_many("passkey", sizes, f"there are {_KEYS} five-digit keys")
    keys: dict[int, None] = {}
    while len(keys) < sum(sizes):
        keys.setdefault(10_000 + below(rng, _KEYS))
    drawn = iter(keys)
    return [[{"key": str(next(drawn))} for _ in range(size)] for size in sizes]


def _facts(sizes: Sizes, rng: random.Random) -> list[list[dict[str, str]]]:
    """Names, objects and places; no word of one split is used in the other."""
    shares = [_shares(shuffled(pool(p), rng), sizes) for p in ("names", "objects", "places")]
    out = []
    for size, names, objects, places in zip(sizes, *shares, strict=True):
        pairs = _pairs("facts", sizes, size, names, objects)
        out.append(
            [
                {"name": name, "object": thing, "place": places[(k + k // len(places)) % len(places)]}
                for k, (name, thing) in enumerate(pairs)
            ]
        )
    return out


def _landmarks(sizes: Sizes, rng: random.Random) -> list[list[dict[str, str]]]:
    """Names and landmarks; no name and no landmark of one split is used in the other."""
    shares = [_shares(shuffled(pool(p), rng), sizes) for p in ("names", "landmarks")]
    out = []
    for size, names, places in zip(sizes, *shares, strict=True):
        pairs = _pairs("landmarks", sizes, size, names, places)
        out.append([{"name": n, "landmark": where, "country": land} for n, (where, land) in pairs])
    return out


def _shares(words: list, sizes: Sizes) -> list[list]:
    """The words cut in proportion to the splits, at least one word each."""
    if len(sizes) == 1:
        return [words]
    cut = min(max(1, len(words) * sizes[0] // sum(sizes)), len(words) - 1)
    return [words[:cut], words[cut:]]


def _pairs(kind: str, sizes: Sizes, size: int, left: Sequence, right: Sequence) -> list[tuple]:
    """``size`` distinct pairs that use every word about equally often.

    Steps through both lists at once; after a common multiple of their lengths the second is shifted by one,
    which meets pairs not met before.
    """
    a, b = len(left), len(right)
    if size > a * b:
        raise _too_many(kind, sizes, f"a split of {size} has {a} x {b} = {a * b} distinct needles")
    lcm = a * b // math.gcd(a, b)
    return [(left[k % a], right[(k + k // lcm) % b]) for k in range(size)]


def _too_many(kind: str, sizes: Sizes, why: str) -> InvalidInput:
    splits = " + ".join(map(str, sizes))
    return InvalidInput(
        f"{kind!r} cannot give n={sum(sizes)} trials ({splits} in splits that share no answer): {why}; "
        "use a smaller n, or split=None."
    )


def _recall_pool(chat: bool) -> list[Item]:
    """Questions of general knowledge, each with another answer."""
    rows = [
        (f"What is the capital of {land}?", f"The capital of {land} is", city, land) for land, city in pool("capitals")
    ]
    country = dict(pool("landmarks"))
    for mark in pool("recall_landmarks"):
        upper = mark[0].upper() + mark[1:]
        rows.append((f"In which country is {mark}?", f"{upper} is in the country of", country[mark], mark))
    rows += [(q, p, a, a) for q, p, a in pool("recall_others")]
    hint = "Answer with one word."
    return [
        Item(None, q, closing(q, p, hint, chat=chat), a, _avoid([a, about]), meta={"template": "recall"})
        for q, p, a, about in rows
    ]


def _arithmetic_pool(rng: random.Random, chat: bool) -> list[Item]:
    """Sums of two one-digit numbers after three solved examples, in which the answer does not stand."""
    pairs = [(a, b) for a in range(1, 10) for b in range(1, 10)]
    items = []
    for a, b in pairs:
        total = a + b
        clean = [(x, y) for x, y in pairs if total not in (x, y, x + y)]
        shots = shuffled(clean, rng)[:_SHOTS]
        solved = "".join(f"\n\nQ: What is {x} + {y}?\nA: {x + y}" for x, y in shots)
        question = f"What is {a} + {b}?"
        end = f"{solved}\n\nQ: {question}" + (" Answer with the number alone." if chat else "\nA:")
        items.append(Item(None, question, end, str(total), (str(total),), meta={"template": "addition"}))
    return items


def _grouped(kind: str, items: list[Item], sizes: Sizes, rng: random.Random) -> list[list[Item]]:
    """Items for each split so that all items with one answer, or with one inside it, fall into the same split."""
    if len(sizes) == 1:
        if sizes[0] > len(items):
            raise _too_many(kind, sizes, f"it has {len(items)} questions")
        return [shuffled(items, rng)[: sizes[0]]]
    alike = grouped(names_alike([item.answer for item in items]))
    groups = {items[same[0]].answer: [items[i] for i in same] for same in alike}
    first = _subset(shuffled(groups, rng), {a: len(g) for a, g in groups.items()}, sizes[0])
    parts = [
        shuffled([i for a, g in groups.items() if (a in first) == inside for i in g], rng) for inside in (True, False)
    ]
    for part, size in zip(parts, sizes, strict=True):
        if len(part) < size:
            raise _too_many(kind, sizes, f"its {len(items)} questions have {len(groups)} answers")
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def _subset(answers: Sequence[str], count: dict[str, int], wanted: int) -> set[str]:
    """Answers that together have at least ``wanted`` questions, with as few to spare as can be."""
    reach: dict[int, tuple[str, ...]] = {0: ()}
    for answer in answers:
        for total, chosen in list(reach.items()):
            reach.setdefault(total + count[answer], (*chosen, answer))
    enough = [t for t in reach if t >= wanted]
    return set(reach[min(enough)]) if enough else set(answers)
