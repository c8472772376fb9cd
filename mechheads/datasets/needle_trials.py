"""Needle trials and their control tasks: the public functions."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

from mechheads.datasets.build import build, check_common, check_context, check_disjoint, depths_of, sizes_of
from mechheads.datasets.haystack import Haystack, HaystackSource
from mechheads.datasets.items import draw
from mechheads.datasets.pools import templates
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoder, TrialSet

NEEDLE_KINDS = ("passkey", "facts", "landmarks")
CONTROL_KINDS = ("recall", "arithmetic")
KINDS = NEEDLE_KINDS + CONTROL_KINDS


def needles(
    kind: str,
    model: Encoder,
    *,
    n: int = 60,
    context_length: int | None = 256,
    depth: int | float | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
    template: str | Mapping[str, str] | None = None,
    distractors: int = 0,
) -> TrialSet:
    """Trials with one fact hidden in prose and a question about it, or a control task.

    Kinds with a needle, which stands at a sentence boundary at the depth asked for:

    * ``passkey``: a five-digit key, asked for in its own words (literal).
    * ``facts``: who keeps what where, asked for in its own words (literal).
    * ``landmarks``: a person beside a landmark; asked for is who is in that country. Question and needle
      share no content word. With ``distractors`` of 1 or more the answer takes world knowledge; without,
      the person of the needle is the only one in the text.

    Control tasks, whose answer is not in the context (see ``recall`` and ``arithmetic``).

    Spans are ``needle``, ``answer_span`` (the answer within the needle, where it stands there literally),
    ``question`` and ``distractor``. ``meta`` holds the kind, the depth and the context length requested and
    achieved, the texts of needle, question and answer, and what was done to the haystack. The same arguments
    and tokenizer give the same trials on every machine.

    Args:
        kind: One of ``KINDS``.
        model: A model, or anything with ``encode``.
        n: Number of trials, both splits together.
        context_length: Tokens of the whole prompt, chat template included. Whole haystack sentences are
            added until it is reached, so a prompt may be a few tokens shorter, never longer (with long
            sentences in a haystack of your own it may be many: above 10% there is a warning). None, for control
            tasks alone: no haystack.
        depth: Where the needle stands, from 0 (first) to 1 (last); None varies it evenly over the trials of
            each split.
        seed: Of every choice.
        split: Share of the trials marked ``calibration``; the rest is ``test``. The two share no needle
            and no answer. None marks none.
        chat: Put the prompt through the model's chat template.
        haystack: A UTF-8 text file, a folder of ``.txt`` or ``.jsonl`` files (see ``Haystack.load``), or None for
            the prose that comes with mechheads. Sentences that contain a word of the needle or the answer are
            left out of that trial.
        template: The name of one shipped template of the kind, or a mapping with ``needle``, ``question``,
            ``answer`` and perhaps ``prefix`` and ``hint``, whose fields in braces are ``key``, or ``name``,
            ``object`` and ``place``, or ``name``, ``landmark`` and ``country``. None uses all shipped ones.
        distractors: Sentences like the needle about other people and things, strewn into the prose of each
            trial (``facts`` and ``landmarks``).

    Raises:
        UnknownName: If the kind or the template is unknown.
        InvalidInput: If an option is out of range, the context is too small or over the model's limit,
            the haystack cannot be read or is too short, or there are fewer than ``n`` distinct needles.
    """
    if kind not in KINDS:
        raise UnknownName("kind of needle trials", kind, KINDS)
    control = kind in CONTROL_KINDS
    check_common(n, seed, split)
    if control and (depth is not None or template is not None):
        raise InvalidInput(f"{kind!r} has no needle, so it takes no depth and no template; leave them None.")
    check_context(kind, model, context_length, depth, needed=not control)
    _check_distractors(kind, distractors)
    rng = random.Random(f"mechheads/{kind}/{seed}")
    wording = () if control else templates(kind, template)
    parts = draw(kind, sizes_of(n, split), rng, wording, chat=chat, distractors=distractors)
    check_disjoint(parts)
    depths = [depths_of(len(part), depth, rng) for part in parts]
    prose = Haystack.load(haystack) if context_length is not None or haystack is not None else None
    options = {
        "kind": kind,
        "n": n,
        "context_length": context_length,
        "depth": depth,
        "seed": seed,
        "split": split,
        "chat": chat,
        **(prose.options() if prose else {"haystack": None, "haystack_hash": None}),
        "templates": [t.to_dict() for t in wording],
        "distractors": distractors,
    }
    return build(kind, model, parts, depths, prose, rng, options)


def recall(
    model: Encoder,
    *,
    n: int = 60,
    context_length: int | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
) -> TrialSet:
    """Control task of parametric recall: capitals, countries of landmarks and the like.

    The answer stands nowhere in the prompt. With a ``context_length`` the question follows haystack prose, so
    that the length matches a needle task's. The only span is ``question``. Options and errors are those of
    ``needles``.
    """
    return needles(
        "recall",
        model,
        n=n,
        context_length=context_length,
        seed=seed,
        split=split,
        chat=chat,
        haystack=haystack,
    )


def arithmetic(
    model: Encoder,
    *,
    n: int = 60,
    context_length: int | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
) -> TrialSet:
    """Control task of arithmetic: sums of two one-digit numbers after three solved examples.

    The answer stands nowhere in the prompt, the examples included. With a ``context_length`` the examples
    follow haystack prose. The only span is ``question``. Options and errors are those of ``needles``.
    """
    return needles(
        "arithmetic",
        model,
        n=n,
        context_length=context_length,
        seed=seed,
        split=split,
        chat=chat,
        haystack=haystack,
    )


def _check_distractors(kind: str, distractors: Any) -> None:
    """Refuse a number that is none, and kinds where a second needle would be a second answer."""
    if isinstance(distractors, bool) or not isinstance(distractors, int) or distractors < 0:
        raise InvalidInput(f"distractors={distractors!r}: give a whole number of 0 or more.")
    if distractors and kind not in ("facts", "landmarks"):
        raise InvalidInput(f"{kind!r} has no distractors; use 0, or the kind 'facts' or 'landmarks'.")
