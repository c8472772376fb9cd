"""MuSiQue: questions that take two to four of twenty paragraphs to answer."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from mechheads.datasets.documents import DEFAULT_SPLIT, documents
from mechheads.datasets.sources import Record, Source, read_records
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoder, Trial, TrialSet

HOPS = (2, 3, 4)
_HOPS_IN_ID = re.compile(r"(\d)hop")


def musique(
    model: Encoder,
    source: Source,
    *,
    n: int | None = None,
    hops: int | Sequence[int] | None = None,
    context_length: int | None = None,
    n_paragraphs: int | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    template: str | None = None,
) -> TrialSet:
    """Trials from MuSiQue (Trivedi et al. 2022, arXiv 2108.00573): multi-hop questions over up to twenty paragraphs.

    A record is ``{id, question, paragraphs: [{idx, title, paragraph_text, is_supporting}], answer, answer_aliases,
    question_decomposition, answerable}``, one JSON object a line. Paragraphs stand in an order shuffled by the seed,
    another for each question. Supporting paragraphs are the spans ``needle``; ``documents``, ``answer_span``,
    ``question`` and the metadata are those of ``documents``, with ``hops`` and ``single_hops`` (the decomposition's
    questions) besides; ``meta["aliases"]`` are the other forms of the answer, over which tasks take the best. The
    two splits share no supporting paragraph and no answer.

    Records marked ``"answerable": false`` (MuSiQue-Full) are left out and counted in the options: their paragraphs do
    not hold what is asked, so the answer that the file names would judge a guess.

    Args:
        model: A model, or anything with ``encode``.
        source: A file, records, or a hub name, of which the split ``"validation"`` is read by default.
        n: Number of trials; None takes all.
        hops: Only questions of so many steps (2, 3, 4, or several of them).
        context_length: Most tokens a whole prompt may have; paragraphs that do not support are dropped, in a seeded
            random order, until it fits. None is the model's limit, where it has one.
        n_paragraphs: Paragraphs of a prompt, supporting ones included (fewer where a record has fewer).
        seed: Of every choice.
        split: Calibration share; see ``documents``.
        chat: Put the prompt through the chat template.
        template: As ``documents`` takes it.

    Raises:
        UnknownName: If no question has that many hops.
        InvalidInput: Naming file, record and key, if a record cannot be used, or as ``documents`` does.
    """
    records = read_records(source, what="MuSiQue file", split=DEFAULT_SPLIT)
    wanted = _wanted(hops)
    chosen, left_out = [], Counter[str]()
    for record in records.records:
        steps = _hops(record)
        if record.get("answerable", bool, default=True) is False:
            left_out["unanswerable"] += 1
        elif wanted is not None and steps not in wanted:
            left_out["other hops"] += 1
        else:
            chosen.append((record, steps))
    if not chosen:
        if wanted is not None and left_out["other hops"]:
            known = {str(_hops(r)) for r in records.records}
            raise UnknownName(f"number of hops of {records.source}", ", ".join(map(str, sorted(wanted))), known)
        raise InvalidInput(f"{records.source} has no answerable question.")
    rows = [_row(record) for record, _ in chosen]
    made = documents(
        model,
        rows,
        n=n,
        context_length=context_length,
        max_documents=n_paragraphs,
        order="shuffled",
        seed=seed,
        split=split,
        chat=chat,
        template=template,
    )
    known = {str(row["id"]): (record, steps) for row, (record, steps) in zip(rows, chosen, strict=True)}
    trials = [_trial(trial, i, *known[trial.meta["record"]]) for i, trial in enumerate(made)]
    options = {
        "kind": "musique",
        "source": records.source,
        "source_hash": records.hash,
        "n": len(trials),
        "hops": sorted(wanted) if wanted else None,
        "context_length": context_length,
        "n_paragraphs": n_paragraphs,
        "seed": seed,
        "split": split,
        "chat": chat,
        "template": made.options["template"],
        "left_out": dict(left_out),
    }
    return TrialSet(trials, name="musique", options=options)


def _wanted(hops: Any) -> frozenset[int] | None:
    """The numbers of hops asked for, checked."""
    if hops is None:
        return None
    given = [hops] if isinstance(hops, int) else list(hops) if isinstance(hops, (list, tuple, set, range)) else []
    if not given or not all(isinstance(h, int) and not isinstance(h, bool) and h in HOPS for h in given):
        raise InvalidInput(f"hops={hops!r}: give 2, 3 or 4, several of them such as (2, 3), or None for all.")
    return frozenset(given)


def _hops(record: Record) -> int | None:
    """Steps of a question: those of its decomposition, else what its id says (``"3hop1__..."``)."""
    steps = record.get("question_decomposition", list, default=())
    named = _HOPS_IN_ID.match(str(record.data.get("id", "")))
    return len(steps) or (int(named[1]) if named else None)


def _row(record: Record) -> dict[str, Any]:
    """A record as ``documents`` takes it, its gold answer there and its id without doubt."""
    answer = record.data.get("answer")
    if answer is None or (isinstance(answer, str) and not answer.strip()):
        raise InvalidInput(f"{record.where} has no answer; give 'answer', or mark it \"answerable\": false.")
    name = record.data.get("id", record.place)
    return {**record.data, "id": str(name)}


def _trial(trial: Trial, number: int, record: Record, steps: int | None) -> Trial:
    """The trial under its own name, with what else the record knows."""
    single = [
        str(step["question"])
        for step in record.get("question_decomposition", list, default=())
        if isinstance(step, dict) and step.get("question")
    ]
    meta = {**trial.meta, "kind": "musique", "hops": steps, "single_hops": single}
    return replace(trial, id=f"musique-{number:04d}", meta=meta)
