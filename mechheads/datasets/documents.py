"""Questions over several documents, of which some hold the answer (MuSiQue, QRHead)."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mechheads.datasets.assemble import checked_span
from mechheads.datasets.build import check_common, check_context, sizes_of
from mechheads.datasets.haystack import shuffled
from mechheads.datasets.sources import Record, Records, Source, cut, cut_all, frame, grouped, read_records
from mechheads.datasets.words import WordFinder, folded, occurrences
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoder, Encoding, Span, Trial, TrialSet

DEFAULT_TEMPLATE = "Here are some paragraphs:\n\n{documents}\n\nQuestion: {question}\nAnswer:"
CHAT_TEMPLATE = "Here are some paragraphs:\n\n{documents}\n\nQuestion: {question} Answer in a few words."
DEFAULT_SPLIT = "validation"
ORDERS = ("file", "shuffled")
_SEPARATOR = "\n\n"


@dataclass(frozen=True)
class _Paragraph:
    """A paragraph as it stands in the prompt, its number left out."""

    id: str
    title: str
    text: str
    gold: bool


@dataclass(frozen=True)
class _Question:
    """A question with its paragraphs."""

    id: str
    where: str
    question: str
    paragraphs: tuple[_Paragraph, ...]
    answer: str | None
    aliases: tuple[str, ...]


def documents(
    model: Encoder,
    path_or_records: Source,
    *,
    n: int | None = None,
    context_length: int | None = None,
    max_documents: int | None = None,
    order: str = "file",
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    template: str | None = None,
) -> TrialSet:
    """Trials of a question over several paragraphs, some of which are gold.

    Two layouts are read, as JSON Lines or as a JSON list. MuSiQue's: ``{id, question, paragraphs: [{idx, title,
    paragraph_text, is_supporting}], answer, answer_aliases, answerable}``. QRHead's: ``{idx, question, paragraphs:
    [{idx, title?, paragraph_text}], gt_docs: [idx, ...]}``, perhaps with an ``answer``. Records marked
    ``"answerable": false`` are left out and counted in the options.

    A paragraph stands in the prompt as ``[1] Title``, a line break, and its text. Spans: ``documents`` has every
    paragraph's tokens, number and title included, in order; ``needle`` those of the gold ones; ``answer_span`` the
    answer wherever it stands in gold paragraphs; ``question``. ``meta`` has ``gold`` (indices into ``documents``),
    ``document_ids``, ``titles``, ``aliases``, ``documents_dropped``, ``answer_in_other_documents`` (how many of the
    others hold the answer as well) and what was asked. The two splits share no gold paragraph and no answer.

    Args:
        model: A model, or anything with ``encode``.
        path_or_records: A file, records, or a hub name. Of a hub data set without a file the split ``"validation"``
            is read by default.
        n: Number of trials; None takes all.
        context_length: Most tokens a whole prompt may have; paragraphs that are not gold are dropped, in a seeded
            random order, until it fits. None is the model's limit, where it has one.
        max_documents: Most paragraphs a prompt may have; dropped as above.
        order: ``"file"``, or ``"shuffled"`` (seeded, for each question another).
        seed: Of every choice.
        split: Share of the trials marked ``calibration`` (with ``n=None`` as near to it as questions that share
            a gold paragraph or an answer allow); the rest is ``test``. None marks none.
        chat: Put the prompt through the chat template.
        template: Holds ``{documents}`` once and ``{question}``, anywhere; None is ``DEFAULT_TEMPLATE``, in a chat
            ``CHAT_TEMPLATE``.

    Raises:
        UnknownName: If the order is unknown.
        InvalidInput: Naming file, record and key, if a record cannot be used, if the gold paragraphs alone are over
            a limit, or there are too few records for ``n``.
    """
    _check_own(max_documents, order)
    check_context("documents", model, context_length, None, needed=False)
    records = read_records(path_or_records, what="document file", split=DEFAULT_SPLIT)
    questions, unanswerable = _questions(records)
    total = len(questions) if n is None else n
    check_common(total, seed, split)
    rng = random.Random(f"mechheads/documents/{seed}")
    groups = grouped([_keys(q) for q in questions])
    what = records.source
    if n is None:
        chosen = cut_all(groups, split, rng, what=what, unit="questions")
    else:
        chosen = cut(groups, sizes_of(total, split), rng, what=what, unit="questions")
    names = ("calibration", "test") if split is not None else (None,)
    marks = {i: name for name, part in zip(names, chosen, strict=True) for i in part}
    wording = template or (CHAT_TEMPLATE if chat else DEFAULT_TEMPLATE)
    limit = context_length or getattr(getattr(model, "spec", None), "n_ctx", None)
    trials, over = [], []
    for i in sorted(marks):
        seeded = random.Random(f"mechheads/documents/{seed}/{questions[i].id}")
        built = _fit(model, questions[i], seeded, wording, chat=chat, limit=limit, most=max_documents, order=order)
        if isinstance(built, int):
            over.append((built, questions[i].where))
        else:
            trials.append(_trial(f"documents-{len(trials):04d}", questions[i], marks[i], context_length, built))
    if over:
        raise _too_long(over, len(marks), limit, context_length)
    options = {
        "kind": "documents",
        "source": records.source,
        "source_hash": records.hash,
        "n": total,
        "context_length": context_length,
        "max_documents": max_documents,
        "order": order,
        "seed": seed,
        "split": split,
        "chat": chat,
        "template": wording,
        "unanswerable_left_out": unanswerable,
    }
    return TrialSet(trials, name="documents", options=options)


def _check_own(most: Any, order: Any) -> None:
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 1):
        raise InvalidInput(f"max_documents={most!r}: give a whole number of 1 or more, or None.")
    if order not in ORDERS:
        raise UnknownName("order of documents", order, ORDERS)


def _too_long(over: Sequence[tuple[int, str]], of: int, limit: Any, asked: int | None) -> InvalidInput:
    longest, where = max(over)
    name = f"context_length={asked}" if asked is not None else f"the model's limit of {limit} tokens"
    return InvalidInput(
        f"{len(over)} of {of} questions do not fit in {name}, even with nothing but their gold paragraphs; the longest "
        f"({where}) takes {longest} tokens. Use a context_length of {longest} or more, or leave such records out."
    )


def _questions(records: Records) -> tuple[list[_Question], int]:
    """All answerable questions, and how many are not."""
    questions, unanswerable, seen = [], 0, {}
    for record in records.records:
        if record.get("answerable", bool, default=True) is False:
            unanswerable += 1
            continue
        question = _question(record)
        if question.id in seen:
            raise InvalidInput(f"{record.where} has the id {question.id!r} of {seen[question.id]}; ids must differ.")
        seen[question.id] = record.place
        questions.append(question)
    if not questions:
        raise InvalidInput(f"{records.source} has no answerable question.")
    return questions, unanswerable


def _question(record: Record) -> _Question:
    """One record of either layout."""
    given = record.get("paragraphs", list)
    if not given:
        raise InvalidInput(f"{record.where} has no paragraphs.")
    wanted = record.get("gt_docs", list, default=None)
    paragraphs = [_paragraph(p, k, record.where, wanted is None) for k, p in enumerate(given)]
    if wanted is not None:
        ids = {str(w) for w in wanted}
        if missing := sorted(ids - {p.id for p in paragraphs}):
            raise InvalidInput(f"{record.where}: gt_docs names {missing}, but no paragraph has that idx.")
        paragraphs = [_Paragraph(p.id, p.title, p.text, p.id in ids) for p in paragraphs]
    if len({p.id for p in paragraphs}) < len(paragraphs):
        raise InvalidInput(f"{record.where}: two paragraphs have the same idx; they must differ.")
    if not any(p.gold for p in paragraphs):
        raise InvalidInput(
            f"{record.where} has no gold paragraph; mark one with is_supporting, or name its idx in gt_docs."
        )
    answer, aliases = _answer(record)
    name = record.data.get("id", record.data.get("idx", record.place))
    question = record.get("question", str).strip()
    return _Question(str(name), record.where, question, tuple(paragraphs), answer, aliases)


def _paragraph(value: Any, k: int, where: str, marked: bool) -> _Paragraph:
    """One paragraph; without an ``idx`` its place in the record is its id."""
    at = f"{where}, paragraph {k + 1}"
    if not isinstance(value, Mapping):
        raise InvalidInput(f"{at} is {str(value)[:60]!r}; it must be an object with 'paragraph_text'.")
    row = Record(value, at)
    gold = row.get("is_supporting", bool, default=False) if marked else False
    title = row.get("title", str, default="").strip()
    return _Paragraph(str(value.get("idx", k)), title, row.get("paragraph_text", str).strip(), bool(gold))


def _answer(record: Record) -> tuple[str | None, tuple[str, ...]]:
    """The gold answer and its other forms; a list of answers gives both."""
    given = record.data.get("answer")
    if isinstance(given, (int, float)) and not isinstance(given, bool):
        given = str(given)
    listed = Record({"answer": given}, record.where).texts("answer", default=())
    aliases = record.get("answer_aliases", list, default=())
    if not all(isinstance(a, str) for a in aliases):
        raise InvalidInput(f"{record.where}: 'answer_aliases' is {aliases!r}; give a list of texts.")
    others = [a for a in (*listed[1:], *aliases) if a.strip() and a not in listed[:1]]
    return (listed[0].strip() if listed else None), tuple(dict.fromkeys(others))


def _keys(question: _Question) -> list[str]:
    """What must not stand in both splits: gold paragraphs and answers, spelling of case and space aside.

    An answer that contains another ("12 May", "12") does not bind: short answers would tie all questions together.
    """
    gold = [f"needle {_plain(f'{p.title} {p.text}')}" for p in question.paragraphs if p.gold]
    answers = [question.answer, *question.aliases] if question.answer else []
    return gold + [f"answer {_plain(a)}" for a in answers if a]


def _plain(text: str) -> str:
    return " ".join(folded(text).split())


@dataclass(frozen=True)
class _Built:
    """A prompt with its paragraphs and spans."""

    encoding: Encoding
    paragraphs: tuple[_Paragraph, ...]
    documents: tuple[Span, ...]
    question: tuple[Span, ...]
    answers: tuple[Span, ...]


def _fit(
    model: Encoder,
    question: _Question,
    rng: random.Random,
    template: str,
    *,
    chat: bool,
    limit: int | None,
    most: int | None,
    order: str,
) -> _Built | int:
    """The prompt with as many paragraphs as fit, or the tokens its gold paragraphs alone take."""
    shown = list(question.paragraphs) if order == "file" else shuffled(question.paragraphs, rng)
    kept_first = shuffled([p for p in question.paragraphs if not p.gold], rng)
    gold = sum(p.gold for p in shown)
    if most is not None and gold > most:
        raise InvalidInput(f"{question.where} has {gold} gold paragraphs, more than max_documents={most}.")

    def with_others(count: int) -> _Built:
        kept = {p.id for p in kept_first[:count]}
        return _render(model, question, [p for p in shown if p.gold or p.id in kept], template, chat)

    high = len(kept_first) if most is None else min(len(kept_first), most - gold)
    best = with_others(high)
    if limit is None or len(best.encoding.tokens) <= limit:
        return best
    low, best = 0, with_others(0)
    if len(best.encoding.tokens) > limit:
        return len(best.encoding.tokens)
    while high - low > 1:  # low fits, high does not
        middle = (low + high) // 2
        built = with_others(middle)
        if len(built.encoding.tokens) <= limit:
            low, best = middle, built
        else:
            high = middle
    return best


def _render(model: Encoder, question: _Question, paragraphs: Sequence[_Paragraph], template: str, chat: bool) -> _Built:
    """Encode a prompt of these paragraphs and find its spans."""
    around = frame(template, "documents", question.question, where="template", strip=chat)
    texts = [f"[{k}] {p.title}\n{p.text}" if p.title else f"[{k}] {p.text}" for k, p in enumerate(paragraphs, 1)]
    body = _SEPARATOR.join(texts)
    prompt = around.opening + body + around.closing
    encoding = model.encode(prompt, chat=chat)
    base = encoding.text.find(prompt)
    if base < 0:
        raise InvalidInput(
            "the chat template changed the prompt's text, so the documents cannot be found in it; use chat=False."
        )
    spans: list[Span] = []
    answers: list[Span] = []
    at = base + len(around.opening)
    for paragraph, text in zip(paragraphs, texts, strict=True):
        span = checked_span(encoding, at, text, "document")
        # A token over the end of one paragraph and the start of the next goes with the first.
        start = max(span.start, spans[-1].stop) if spans else span.start
        spans.append(Span(start, span.stop))
        if paragraph.gold and question.answer:
            found = occurrences(text, question.answer)
            answers += [checked_span(encoding, at + a, text[a:b], "answer") for a, b in found]
        at += len(text) + len(_SEPARATOR)
    starts = {"opening": base, "closing": base + len(around.opening) + len(body)}
    asked = [checked_span(encoding, starts[s] + i, question.question, "question") for s, i in around.question_at]
    return _Built(encoding, tuple(paragraphs), tuple(spans), tuple(asked), tuple(_apart(answers)))


def _apart(spans: Sequence[Span]) -> list[Span]:
    """Spans without those that share a token with an earlier one."""
    out: list[Span] = []
    for span in spans:
        if not out or span.start >= out[-1].stop:
            out.append(span)
    return out


def _trial(id: str, question: _Question, split: str | None, context_length: int | None, built: _Built) -> Trial:
    """The finished trial with its metadata."""
    gold = [k for k, p in enumerate(built.paragraphs) if p.gold]
    spans: dict[str, Any] = {
        "needle": [built.documents[k] for k in gold],
        "documents": built.documents,
        "question": built.question,
    }
    if built.answers:
        spans["answer_span"] = built.answers
    others = [f"{p.title}\n{p.text}" for p in built.paragraphs if not p.gold]
    finder = WordFinder((question.answer,) if question.answer else ())
    meta = {
        "kind": "documents",
        "record": question.id,
        "question": question.question,
        "answer": question.answer,
        "aliases": list(question.aliases),
        "gold": gold,
        "document_ids": [p.id for p in built.paragraphs],
        "titles": [p.title for p in built.paragraphs],
        "documents_dropped": len(question.paragraphs) - len(built.paragraphs),
        "answer_in_other_documents": sum(map(finder.found_in, others)),
        "context_length": context_length,
        "context_length_achieved": len(built.encoding.tokens),
    }
    return Trial(id=id, tokens=built.encoding.tokens, spans=spans, answer=question.answer, split=split, meta=meta)
