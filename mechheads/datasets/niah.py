"""Needle-in-a-haystack lines: a needle, a question, and the part of the needle that answers it."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from mechheads.datasets.assemble import Item
from mechheads.datasets.build import build, check_common, check_context, depths_of, sizes_of
from mechheads.datasets.haystack import Haystack, HaystackSource
from mechheads.datasets.pools import closing
from mechheads.datasets.sources import Record, Source, cut, cut_all, frame, grouped, read_records
from mechheads.datasets.words import WordFinder, canonical, folded, names_alike, occurrences
from mechheads.errors import InvalidInput
from mechheads.trials import Encoder, TrialSet

# A name or number; an underscore, as plain text has for italics, is none of it.
_KEYWORD = re.compile(r"(?<![^\W_])(?<!\.)(?:[^\W\d_][^\W_]{2,}|\d[^\W_]*)(?![^\W_])")


def niah(
    model: Encoder,
    path: Source,
    *,
    n: int | None = None,
    context_length: int = 256,
    depth: int | float | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
    task_template: str | None = None,
    reuse: bool = False,
) -> TrialSet:
    """Trials from needle-in-a-haystack lines ``{"needle", "question", "real_needle"}``, one JSON object a line.

    The layout is that of the retrieval-head detection of Wu et al. (2024, arXiv 2404.15574). The gold answer is
    ``real_needle``. Where it stands literally in the needle it has the spans ``real_needle`` and ``answer_span``
    (other encodings of the same characters are the same); where it does not, it has none, and
    ``meta["real_needle_in_needle"]`` is False.

    The two splits share neither needle nor answer, and no answer of one contains one of the other. Spans, metadata
    and the options not listed here are those of ``needles``. Haystack sentences with the answer, or with a name or
    number of the needle (a capitalised word that does not begin it), are left out of that trial.

    Args:
        model: A model, or anything with ``encode``.
        path: A file, records, or a hub name with a file (``"hub:owner/name/needles.jsonl"``).
        n: Number of trials; None gives each needle one.
        context_length: Tokens of the whole prompt; see ``needles``.
        depth: Where the needle stands; see ``needles``.
        seed: Of every choice.
        split: Calibration share; see ``needles``.
        chat: Put the prompt through the chat template.
        haystack: See ``needles``.
        task_template: The prompt, with ``{haystack}`` and ``{question}``. None asks as ``needles`` does.
        reuse: Let each needle come several times, at other depths in other prose (published files hold three
            needles). Such trials are not independent: an interval over them is too narrow to speak of other needles.

    Raises:
        InvalidInput: Naming file, line and key, if a line cannot be used, there are too few needles, or the answer
            stands in the question; or as ``needles`` does.
    """
    records = read_records(path, what="NIAH needle file")
    items = [_item(record, chat=chat, template=task_template) for record in records.records]
    _check_distinct(items, records.source)
    total = len(items) if n is None else n
    check_common(total, seed, split)
    check_context("niah", model, context_length, depth)
    if not isinstance(reuse, bool):
        raise InvalidInput(f"reuse={reuse!r}: give True or False.")
    rng = random.Random(f"mechheads/niah/{seed}")
    answers = names_alike([i.answer for i in items], what="answer")
    groups = grouped([(f"needle {folded(i.needle or '')}", *keys) for i, keys in zip(items, answers, strict=True)])
    what = records.source
    if total > len(items) and not reuse:
        raise InvalidInput(
            f"{records.source} has {len(items)} needles, too few for n={total}; use n={len(items)} at most, or "
            "reuse=True to let each come at several depths."
        )
    if total >= len(items) and (n is None or reuse):
        chosen = cut_all(groups, split, rng, what=what, unit="needles")
    else:
        chosen = cut(groups, sizes_of(total, split), rng, what=what, unit="needles")
    if total > len(items):
        sizes = sizes_of(total, split)
        chosen = [[part[k % len(part)] for k in range(size)] for part, size in zip(chosen, sizes, strict=True)]
    parts = [[items[i] for i in part] for part in chosen]
    depths = [depths_of(len(part), depth, rng) for part in parts]
    prose = Haystack.load(haystack)
    options = {
        "kind": "niah",
        "source": records.source,
        "source_hash": records.hash,
        "n": total,
        "context_length": context_length,
        "depth": depth,
        "seed": seed,
        "split": split,
        "chat": chat,
        **prose.options(),
        "task_template": task_template,
        "reuse": reuse,
        "distinct_needles": len({i.needle for part in parts for i in part}),
    }
    return build("niah", model, parts, depths, prose, rng, options)


def _item(record: Record, *, chat: bool, template: str | None) -> Item:
    """The item of one line."""
    needle, question, real = (record.get(k, str).strip() for k in ("needle", "question", "real_needle"))
    if WordFinder((real,)).found_in(question):
        raise InvalidInput(
            f"{record.where}: the answer {real!r} stands in the question {question!r}, so no needle is needed to "
            "give it."
        )
    spelt = real if real in needle else next((needle[a:b] for a, b in occurrences(needle, real)), "")
    if template is None:
        around = None
        after, before = closing(question, "", "", chat=chat), ""
    else:
        around = frame(template, "haystack", question, where="task_template", strip=chat)
        after, before = around.closing, around.opening
    names = [m[0] for m in _KEYWORD.finditer(canonical(needle)) if m.start() > 0 and not m[0][0].islower()]
    return Item(
        needle=needle,
        question=question,
        opening=before,
        closing=after,
        question_at=around.question_at if around else (),
        answer=real,
        avoid=tuple(dict.fromkeys((real, needle, *names))),
        mark=spelt,
        inside=(("real_needle", spelt),),
        meta={
            "record": record.place,
            "real_needle": real,
            "real_needle_in_needle": bool(spelt),
        },
    )


def _check_distinct(items: Sequence[Item], source: str) -> None:
    """Refuse the same line twice."""
    seen: dict[tuple[str | None, str], str] = {}
    for item in items:
        place = item.meta["record"]
        first = seen.setdefault((item.needle, item.question), place)
        if first != place:
            raise InvalidInput(f"{source}: {place} has the needle and question of {first}; take one of them out.")
