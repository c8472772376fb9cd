"""Needle trials and their control tasks: the public functions."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from mechheads.datasets.assemble import Item, Prompt, assemble
from mechheads.datasets.haystack import Haystack, SentenceCosts, Window, below, shuffled
from mechheads.datasets.items import draw
from mechheads.datasets.pools import templates
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoder, Trial, TrialSet

NEEDLE_KINDS = ("passkey", "facts", "landmarks")
CONTROL_KINDS = ("recall", "arithmetic")
KINDS = NEEDLE_KINDS + CONTROL_KINDS
_MUCH = 0.1  # share of the context length by which prompts may fall short before it is said


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
    haystack: str | Path | None = None,
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
        haystack: A UTF-8 text file, a folder of ``.txt`` files, or None for the prose that comes with
            mechheads. Sentences that contain a word of the needle or the answer are left out of that trial.
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
    _check(kind, n, context_length, depth, seed, split, template, control)
    _check_distractors(kind, distractors)
    limit = getattr(getattr(model, "spec", None), "n_ctx", None)
    if limit is not None and context_length is not None and context_length > limit:
        raise InvalidInput(
            f"context_length={context_length} is over the model's limit of {limit} tokens; use at most {limit}."
        )
    rng = random.Random(f"mechheads/{kind}/{seed}")
    wording = () if control else templates(kind, template)
    sizes = _sizes(n, split)
    parts = draw(kind, sizes, rng, wording, chat=chat, distractors=distractors)
    _check_disjoint(parts)
    depths = [_depths(len(part), depth, rng) for part in parts]
    prose = Haystack.load(haystack) if context_length is not None or haystack is not None else None
    options = {
        "kind": kind,
        "n": n,
        "context_length": context_length,
        "depth": depth,
        "seed": seed,
        "split": split,
        "chat": chat,
        "haystack": prose and prose.source,
        "haystack_hash": prose and prose.hash,
        "templates": [t.to_dict() for t in wording],
        "distractors": distractors,
    }
    plan = _plan(parts, depths, split)
    trials = _trials(kind, model, plan, prose, rng, options)
    if prose is not None and haystack is not None and context_length is not None:
        _say_if_short(trials, prose.source, context_length)
    return TrialSet(trials, name=kind, options=options)


def recall(
    model: Encoder,
    *,
    n: int = 60,
    context_length: int | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: str | Path | None = None,
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
    haystack: str | Path | None = None,
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


def _check(
    kind: str, n: Any, context_length: Any, depth: Any, seed: Any, split: Any, template: Any, control: bool
) -> None:
    """Refuse options out of range."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidInput(f"n={n!r} trials: give a whole number of 1 or more.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInput(f"seed={seed!r}: give a whole number.")
    if context_length is None and not control:
        raise InvalidInput(f"{kind!r} needs a context_length in tokens, such as 256.")
    if context_length is not None and (
        isinstance(context_length, bool) or not isinstance(context_length, int) or context_length < 1
    ):
        raise InvalidInput(f"context_length={context_length!r}: give a whole number of tokens, such as 256.")
    if control and (depth is not None or template is not None):
        raise InvalidInput(f"{kind!r} has no needle, so it takes no depth and no template; leave them None.")
    if depth is not None and not (_is_number(depth) and 0 <= depth <= 1):
        raise InvalidInput(f"depth={depth!r}: give a number from 0 (needle first) to 1 (last), or None.")
    if split is not None and not (_is_number(split) and 0 < split < 1):
        raise InvalidInput(f"split={split!r}: give the calibration share, above 0 and below 1, or None for no splits.")


def _check_distractors(kind: str, distractors: Any) -> None:
    """Refuse a number that is none, and kinds where a second needle would be a second answer."""
    if isinstance(distractors, bool) or not isinstance(distractors, int) or distractors < 0:
        raise InvalidInput(f"distractors={distractors!r}: give a whole number of 0 or more.")
    if distractors and kind not in ("facts", "landmarks"):
        raise InvalidInput(f"{kind!r} has no distractors; use 0, or the kind 'facts' or 'landmarks'.")


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sizes(n: int, split: int | float | None) -> tuple[int, ...]:
    """Trials per split: calibration and test, or all of them."""
    if split is None:
        return (n,)
    calibration = int(n * split + 0.5)
    if not 0 < calibration < n:
        raise InvalidInput(f"n={n} with split={split} leaves a split without a trial; use a larger n or split=None.")
    return calibration, n - calibration


def _check_disjoint(parts: Sequence[Sequence[Item]]) -> None:
    """No needle twice, and no answer in both splits (a template of the caller's could do either)."""
    texts = [i.needle or i.question for part in parts for i in part]
    if len(set(texts)) < len(texts):
        raise InvalidInput(
            f"only {len(set(texts))} of {len(texts)} needles are distinct; let the template's needle use "
            "every field, or use a smaller n."
        )
    answers = [{i.answer for i in part} for part in parts]
    if len(answers) == 2 and (shared := answers[0] & answers[1]):
        raise InvalidInput(
            f"calibration and test would share the answers {sorted(shared)[:5]}; let the template's answer "
            "use a field, or use split=None."
        )


def _depths(n: int, depth: int | float | None, rng: random.Random) -> list[float]:
    """The depth of each trial: the one asked for, or evenly from 0 to 1 in random order."""
    if depth is not None:
        return [float(depth)] * n
    return shuffled([k / (n - 1) for k in range(n)] if n > 1 else [0.5], rng)


def _plan(
    parts: Sequence[Sequence[Item]], depths: Sequence[Sequence[float]], split: int | float | None
) -> list[tuple[Item, float, str | None]]:
    """Items in trial order with depth and split; the splits are interleaved in proportion."""
    queues = [list(zip(items, at, strict=True))[::-1] for items, at in zip(parts, depths, strict=True)]
    if split is None:
        return [(item, at, None) for item, at in queues[0][::-1]]
    first, n = len(queues[0]), sum(map(len, queues))
    out: list[tuple[Item, float, str | None]] = []
    for i in range(n):
        calibration = (i + 1) * first // n > i * first // n
        item, at = queues[0 if calibration else 1].pop()
        out.append((item, at, "calibration" if calibration else "test"))
    return out


def _say_if_short(trials: Sequence[Trial], source: str, context_length: int) -> None:
    """Warn once where the caller's own haystack left prompts much shorter than asked for."""
    lengths = [t.meta["context_length_achieved"] for t in trials]
    short = [n for n in lengths if n < (1 - _MUCH) * context_length]
    if short:
        warnings.warn(
            f"{len(short)} of {len(trials)} prompts are more than {_MUCH:.0%} shorter than "
            f"context_length={context_length} (the shortest has {min(short)} tokens): sentences of the haystack "
            f"{source} are long, and none is cut. Give prose with shorter sentences; "
            "meta['context_length_achieved'] holds each prompt's length.",
            stacklevel=3,
        )


def _trials(
    kind: str,
    model: Encoder,
    plan: Sequence[tuple[Item, float, str | None]],
    prose: Haystack | None,
    rng: random.Random,
    options: Mapping[str, Any],
) -> list[Trial]:
    """Assemble every trial, each from a haystack start of its own."""
    costs = SentenceCosts(prose, model) if prose else None
    total = len(prose.sentences) if prose else 0
    offset = below(rng, total) if total else 0
    trials = []
    for i, (item, depth, split) in enumerate(plan):
        window = None
        if prose and costs and options["context_length"] is not None:
            start = (offset + i * total // len(plan)) % total
            seed = f"mechheads/{kind}/{options['seed']}/{i}"
            window = Window(prose, costs, start=start, avoid=item.avoid, seed=seed)
        prompt = assemble(
            model, item, window, context_length=options["context_length"], depth=depth, chat=options["chat"]
        )
        trials.append(_trial(f"{kind}-{i:04d}", kind, item, depth, split, prompt, window, options))
    return trials


def _trial(
    id: str,
    kind: str,
    item: Item,
    depth: float,
    split: str | None,
    prompt: Prompt,
    window: Window | None,
    options: Mapping[str, Any],
) -> Trial:
    """The finished trial with its metadata."""
    meta: dict[str, Any] = {
        "kind": kind,
        **item.meta,
        "depth": depth if item.needle is not None else None,
        "depth_achieved": prompt.depth,
        "context_length": options["context_length"],
        "context_length_achieved": len(prompt.encoding.tokens),
        "needle": item.needle,
        "question": item.question,
        "answer": item.answer,
        "chat": options["chat"],
        "distractors": [text for text, _ in item.distractors],
        "haystack_start": window.start if window else None,
        "haystack_sentences": len(prompt.sentences),
        "haystack_repeats": len(prompt.sentences) - len(set(prompt.sentences)),
        "haystack_left_out": list(window.left_out) if window else [],
    }
    return Trial(id=id, tokens=prompt.encoding.tokens, spans=prompt.spans, answer=item.answer, split=split, meta=meta)
