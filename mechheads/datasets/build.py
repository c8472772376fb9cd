"""From drawn items to a set of trials: splits, depths, walks through the haystack, metadata."""

from __future__ import annotations

import random
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from mechheads.datasets.assemble import Item, Prompt, assemble
from mechheads.datasets.haystack import Haystack, SentenceCosts, Window, below, shuffled
from mechheads.datasets.words import shared_names
from mechheads.errors import InvalidInput
from mechheads.trials import Encoder, Trial, TrialSet

_MUCH = 0.1  # share of the context length by which prompts may fall short before it is said
_APART = 2  # tokens between needle and distractor: less is no sentence


def check_common(n: Any, seed: Any, split: Any) -> None:
    """Refuse a number of trials, a seed or a split share that is none."""
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidInput(f"n={n!r} trials: give a whole number of 1 or more.")
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInput(f"seed={seed!r}: give a whole number.")
    if split is not None and not (is_number(split) and 0 < split < 1):
        raise InvalidInput(f"split={split!r}: give the calibration share, above 0 and below 1, or None for no splits.")


def check_context(kind: str, model: Encoder, context_length: Any, depth: Any, *, needed: bool = True) -> None:
    """Refuse a context length that is none or over the model's limit, and a depth out of range."""
    if context_length is None and needed:
        raise InvalidInput(f"{kind!r} needs a context_length in tokens, such as 256.")
    if context_length is not None and (
        isinstance(context_length, bool) or not isinstance(context_length, int) or context_length < 1
    ):
        raise InvalidInput(f"context_length={context_length!r}: give a whole number of tokens, such as 256.")
    if depth is not None and not (is_number(depth) and 0 <= depth <= 1):
        raise InvalidInput(f"depth={depth!r}: give a number from 0 (needle first) to 1 (last), or None.")
    limit = getattr(getattr(model, "spec", None), "n_ctx", None)
    if limit is not None and context_length is not None and context_length > limit:
        raise InvalidInput(
            f"context_length={context_length} is over the model's limit of {limit} tokens; use at most {limit}."
        )


def is_number(value: Any) -> bool:
    """Whether a value is an int or a float, and no bool."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def sizes_of(n: int, split: int | float | None) -> tuple[int, ...]:
    """Trials per split: calibration and test, or all of them."""
    if split is None:
        return (n,)
    calibration = int(n * split + 0.5)
    if not 0 < calibration < n:
        raise InvalidInput(f"n={n} with split={split} leaves a split without a trial; use a larger n or split=None.")
    return calibration, n - calibration


def check_disjoint(parts: Sequence[Sequence[Item]]) -> None:
    """No needle twice, and no answer in both splits, nor within one (a template of the caller's could do any)."""
    texts = [i.needle or i.question for part in parts for i in part]
    if len(set(texts)) < len(texts):
        raise InvalidInput(
            f"only {len(set(texts))} of {len(texts)} needles are distinct; let the template's needle use "
            "every field, or use a smaller n."
        )
    answers = [[i.answer for i in part] for part in parts]
    if len(answers) == 2 and (shared := shared_names(*answers)):
        raise InvalidInput(
            f"calibration and test would share the answers {sorted(shared)[:5]}; let the template's answer "
            "use a field, or use split=None."
        )


def depths_of(n: int, depth: int | float | None, rng: random.Random) -> list[float]:
    """The depth of each trial: the one asked for, or evenly from 0 to 1 in random order."""
    if depth is not None:
        return [float(depth)] * n
    return shuffled([k / (n - 1) for k in range(n)] if n > 1 else [0.5], rng)


def build(
    kind: str,
    model: Encoder,
    parts: Sequence[Sequence[Item]],
    depths: Sequence[Sequence[float]],
    prose: Haystack | None,
    rng: random.Random,
    options: Mapping[str, Any],
) -> TrialSet:
    """Trials of the items of each split.

    Args:
        kind: Name of the set, and beginning of every id.
        model: Whose tokenizer to use.
        parts: Items of each split.
        depths: A depth for each of them.
        prose: What they are hidden in, or None.
        rng: Draws where the walk through the haystack begins.
        options: The set's options; ``context_length``, ``seed``, ``split`` and ``chat`` are read here.
    """
    trials = _trials(kind, model, _plan(parts, depths, options["split"]), prose, rng, options)
    if prose is not None and prose.is_own and options["context_length"] is not None:
        _say_if_short(trials, prose.source, options["context_length"])
    return TrialSet(trials, name=kind, options=options)


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
            stacklevel=4,  # whoever called needles(), nolima(), ...
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
        if item.apart:
            _check_apart(prompt, depth, options)
        trials.append(_trial(f"{kind}-{i:04d}", kind, item, depth, split, prompt, window, options))
    return trials


def _check_apart(prompt: Prompt, depth: float, options: Mapping[str, Any]) -> None:
    """Refuse a distractor that stands right beside the needle, because there was no sentence to put between."""
    (needle,) = prompt.spans["needle"]
    for span in prompt.spans.get("distractor", ()):
        if max(span.start - needle.stop, needle.start - span.stop) < _APART:
            raise InvalidInput(
                f"context_length={options['context_length']} leaves too little prose to part the distractor from the "
                f"needle at depth {depth:.2f}; use a longer context, or distractors=False."
            )


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
