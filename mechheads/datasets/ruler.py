"""RULER-like trials: key-value needles of our own making, with other keys, several values, or several questions."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from mechheads.datasets.assemble import Insert, Item
from mechheads.datasets.build import build, check_common, check_context, depths_of, sizes_of
from mechheads.datasets.haystack import Haystack, HaystackSource, below, shuffled
from mechheads.datasets.pools import closing
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoder, TrialSet

VARIANTS = ("single", "multikey", "multivalue", "multiquery")
TYPES = ("words", "numbers", "uuids")
# Keys in the context and values of each, where the caller says nothing.
_DEFAULTS = {"single": (1, 1), "multikey": (4, 1), "multivalue": (1, 4), "multiquery": (4, 1)}
_NUMBERS = 9_000_000
_SENTENCE_TOKENS = 8  # fewer than any needle sentence has
_LEAST, _MOST = 24, 1500  # sentences of a haystack of needles; there are words for no more


@dataclass(frozen=True)
class _Shape:
    """What a trial is made of."""

    variant: str
    keys: int
    values: int
    key_type: str
    value_type: str

    @property
    def asked(self) -> int:
        """Number of keys that are asked for."""
        return self.keys if self.variant == "multiquery" else 1

    @property
    def noun(self) -> str:
        """What a value is called."""
        return {"words": "word", "numbers": "number", "uuids": "uuid"}[self.value_type]

    def sentence(self, key: str, value: str) -> str:
        """A needle."""
        return f"One of the special magic {self.noun}s for {key} is: {value}."


def ruler(
    model: Encoder,
    *,
    variant: str = "single",
    keys: int | None = None,
    values: int | None = None,
    key_type: str = "words",
    value_type: str = "numbers",
    n: int = 60,
    context_length: int = 256,
    depth: int | float | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
) -> TrialSet:
    """Trials in the manner of RULER's needle tasks (Hsieh et al. 2024, arXiv 2404.06654), generated here.

    A needle reads "One of the special magic numbers for {key} is: {value}." and the question asks for the value.

    * ``single``: one key with one value.
    * ``multikey``: one key is asked for; the others are distractors.
    * ``multivalue``: one key has several values, and all are asked for.
    * ``multiquery``: several keys have a value each, and all are asked for.

    Spans and metadata are those of ``needles``; of several needles all are in ``needle`` and all values in
    ``answer_span``, in the order of the text (neighbours whose tokenizer merges them at the seam are one span).
    With several values the gold answer lists them, comma and space between, in the order in which they stand in the
    text (``multivalue``) or are asked for (``multiquery``), so a method that looks for the answer's tokens sees only
    trials whose answer keeps that order. ``meta["answers"]`` has them one by one, ``meta["needles"]`` the sentences,
    ``meta["keys"]`` the keys asked for, ``meta["depths"]`` where the needles were put.
    The two splits share no key and no value.

    Args:
        model: A model, or anything with ``encode``.
        variant: One of ``VARIANTS``.
        keys: Keys in the context: 4 by default for ``multikey`` and ``multiquery``, else 1.
        values: Values of the key asked for: 4 by default for ``multivalue``, else 1.
        key_type: ``"words"`` (an adjective and a noun), ``"numbers"`` (seven digits) or ``"uuids"``.
        value_type: The same for values.
        n: Number of trials, both splits together.
        context_length: Tokens of the whole prompt; see ``needles``.
        depth: Where the (first) needle stands; further needles and distractors stand anywhere.
        seed: Of every choice.
        split: Calibration share; see ``needles``.
        chat: Put the prompt through the chat template.
        haystack: See ``needles``; besides, ``"noise"`` for a few short sentences over and over, and ``"needles"`` for
            needle sentences about other keys, all of them in the span ``distractor``.

    Raises:
        UnknownName: If the variant or a type is unknown.
        InvalidInput: If the number of keys or values does not fit the variant; or as ``needles`` does.
    """
    shape = _shape(variant, keys, values, key_type, value_type)
    check_common(n, seed, split)
    check_context("ruler", model, context_length, depth)
    rng = random.Random(f"mechheads/ruler/{seed}")
    sizes = sizes_of(n, split)
    pools = _key_pools(shape, sizes, rng)
    fresh = _Fresh(shape.value_type, rng)
    depths = [depths_of(size, depth, rng) for size in sizes]
    among = haystack == "needles"
    parts = [
        [_item(shape, pool, fresh, at, rng, chat=chat, among=among) for at in each]
        for pool, each in zip(pools, depths, strict=True)
    ]
    prose = _prose(haystack, shape, context_length, fresh, rng)
    options = {
        "kind": "ruler",
        "variant": variant,
        "keys": shape.keys,
        "values": shape.values,
        "key_type": key_type,
        "value_type": value_type,
        "n": n,
        "context_length": context_length,
        "depth": depth,
        "seed": seed,
        "split": split,
        "chat": chat,
        **prose.options(),
    }
    return build("ruler", model, parts, depths, prose, rng, options)


def _shape(variant: str, keys: Any, values: Any, key_type: str, value_type: str) -> _Shape:
    """The numbers a variant takes, checked."""
    if variant not in VARIANTS:
        raise UnknownName("variant of ruler trials", variant, VARIANTS)
    for what, kind in (("key_type", key_type), ("value_type", value_type)):
        if kind not in TYPES:
            raise UnknownName(what, kind, TYPES)
    counts = {}
    several = {"keys": variant in ("multikey", "multiquery"), "values": variant == "multivalue"}
    for (name, many), given, default in zip(several.items(), (keys, values), _DEFAULTS[variant], strict=True):
        count = default if given is None else given
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise InvalidInput(f"{name}={count!r}: give a whole number of 1 or more.")
        if (count > 1) != many:
            wants = "2 or more" if many else "1"
            raise InvalidInput(f"{name}={count}: the variant {variant!r} has {wants} of them; see VARIANTS.")
        counts[name] = count
    return _Shape(variant, counts["keys"], counts["values"], key_type, value_type)


@cache
def _words(name: str) -> tuple[str, ...]:
    return tuple(json.loads(resources.files("mechheads.datasets").joinpath("ruler.json").read_text("utf-8"))[name])


@cache
def _word_pairs() -> tuple[str, ...]:
    return tuple(f"{a}-{b}" for a in _words("adjectives") for b in _words("nouns"))


class _Fresh:
    """Words, numbers or uuids, none twice."""

    def __init__(self, kind: str, rng: random.Random):
        self._kind = kind
        self._rng = rng
        self._used: set[str] = set()
        self._pairs = iter(shuffled(_word_pairs(), rng)) if kind == "words" else iter(())

    def __call__(self, but: Sequence[str] = ()) -> str:
        """The next one that is none of these."""
        while True:
            value = self._draw()
            if value not in self._used and value not in but:
                self._used.add(value)
                return value

    def _draw(self) -> str:
        if self._kind == "numbers":
            return str(1_000_000 + below(self._rng, _NUMBERS))
        if self._kind == "uuids":
            digits = f"{self._rng.getrandbits(128):032x}"
            return "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))
        pair = next(self._pairs, None)
        if pair is None:
            raise InvalidInput(
                f"there are only {len(_word_pairs())} different words to draw; use a smaller n, a shorter context, "
                "or the type 'numbers' or 'uuids'."
            )
        return pair


def _key_pools(shape: _Shape, sizes: Sequence[int], rng: random.Random) -> list[list[str]]:
    """Keys for each split, none in both: enough that every trial has its own, or all words there are."""
    if shape.key_type == "words":
        words = shuffled(_word_pairs(), rng)
        cut = len(words) * sizes[0] // sum(sizes) if len(sizes) > 1 else len(words)
        pools = [words[:cut], words[cut:]][: len(sizes)]
    else:
        fresh = _Fresh(shape.key_type, rng)
        pools = [[fresh() for _ in range(size * shape.keys)] for size in sizes]
    for pool in pools:
        if len(pool) < shape.keys:
            raise InvalidInput(f"keys={shape.keys}: a split has only {len(pool)} different keys; use fewer keys.")
    return pools


def _item(
    shape: _Shape, pool: Sequence[str], fresh: _Fresh, depth: float, rng: random.Random, *, chat: bool, among: bool
) -> Item:
    """One trial's keys and values, with their places."""
    start = below(rng, len(pool))
    keys = [pool[(start + k * 7) % len(pool)] for k in range(shape.keys)]
    if len(set(keys)) < len(keys):  # the pool's size shares a factor with the step
        keys = [pool[(start + k) % len(pool)] for k in range(shape.keys)]
    asked, others = keys[: shape.asked], keys[shape.asked :]
    pairs = [(key, fresh(keys)) for key in asked for _ in range(shape.values)]
    at = _places(depth, len(pairs), rng)
    if shape.variant == "multivalue":  # the answer lists the values as they stand, whichever of them is first
        order = sorted(range(len(pairs)), key=lambda k: at[k])
        answers = [pairs[k][1] for k in order]
    else:
        answers = [value for _, value in pairs]
    needles = [shape.sentence(*pair) for pair in pairs]
    distractors = [(shape.sentence(key, fresh(keys)), key) for key in others]
    extra = [
        *(Insert("needle", t, d, v) for t, d, (_, v) in zip(needles[1:], at[1:], pairs[1:], strict=True)),
        *(Insert("distractor", text, below(rng, 1001) / 1000) for text, _ in distractors),
    ]
    question, prefix, hint = _wording(shape, asked)
    return Item(
        needle=needles[0],
        question=question,
        closing=closing(question, prefix, hint, chat=chat),
        answer=", ".join(answers),
        mark=pairs[0][1],
        avoid=tuple(dict.fromkeys((*keys, *(value for _, value in pairs)))),
        inserts=tuple(extra),
        prose="distractor" if among else None,
        meta={
            "variant": shape.variant,
            "keys": asked,
            "answers": answers,
            "needles": needles,
            "depths": at,
            "distractor_needles": [text for text, _ in distractors],
            "distractor_keys": others,
        },
    )


def _places(depth: float, count: int, rng: random.Random) -> list[float]:
    """The needle's depth and those of further needles, all different."""
    out = [depth]
    while len(out) < count:
        place = below(rng, 1001) / 1000
        if place not in out:
            out.append(place)
    return out


def _wording(shape: _Shape, asked: Sequence[str]) -> tuple[str, str, str]:
    """Question, beginning of the answer, and the hint for a chat."""
    listed = asked[0] if len(asked) == 1 else f"{', '.join(asked[:-1])} and {asked[-1]}"
    if shape.asked == shape.values == 1:
        noun = shape.noun
        return (
            f"What is the special magic {noun} for {listed}?",
            f"The special magic {noun} for {listed} is:",
            f"Answer with the {noun} alone.",
        )
    return (
        f"What are all the special magic {shape.noun}s for {listed}?",
        f"The special magic {shape.noun}s for {listed} are:",
        f"Answer with the {shape.noun}s alone, separated by commas.",
    )


def _prose(haystack: HaystackSource, shape: _Shape, context_length: int, fresh: _Fresh, rng: random.Random) -> Haystack:
    """The haystack: the caller's, noise, or needles about keys that no trial asks for."""
    if haystack == "noise":
        return Haystack(_words("noise"), "noise", True, 0)
    if haystack != "needles":
        return Haystack.load(haystack)
    # A key asked for in some trial may come; its sentence is passed over there, as every sentence with a word to avoid.
    count = min(max(_LEAST, context_length // _SENTENCE_TOKENS), _MOST)
    key = _Fresh(shape.key_type, rng)
    return Haystack(tuple(shape.sentence(key(), fresh()) for _ in range(count)), "needles", True, 0)
