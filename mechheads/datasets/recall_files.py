"""Recall from files: relations of subject and object, PopQA, and other forms of an answer."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mechheads.datasets.assemble import Item
from mechheads.datasets.build import build, check_common, check_context, sizes_of
from mechheads.datasets.haystack import Haystack, HaystackSource, shuffled
from mechheads.datasets.pools import closing
from mechheads.datasets.sources import Record, Source, cut, cut_all, grouped, read_records
from mechheads.datasets.words import WordFinder, folded, names_alike
from mechheads.errors import InvalidInput, UnknownName
from mechheads.provenance import content_hash
from mechheads.trials import Encoder, TrialSet

POPQA_SPLIT = "test"
TEMPLATES = ("zero_shot", "plain")
_KEYS = {"zero_shot": "prompt_templates_zs", "plain": "prompt_templates"}
_PLENTY = 20
_MANY = 2000
_HINT = "Answer with a name or a few words."
# What else the answers of ``recall`` are called.
ALIASES: Mapping[str, tuple[str, ...]] = {
    "Beijing": ("Peking",),
    "Bogota": ("Bogot\u00e1",),
    "Cambodia": ("Kampuchea",),
    "England": ("the United Kingdom", "Great Britain", "the UK", "Britain"),
    "Kyiv": ("Kiev",),
    "Scotland": ("the United Kingdom", "Great Britain", "the UK"),
    "Tehran": ("Teheran",),
    "Vienna": ("Wien",),
}


@dataclass(frozen=True)
class _Fact:
    """One thing to recall.

    Attributes:
        where: File and place, for messages.
        relation: What is asked of the subject.
        subject: Whom or what it is asked of.
        answer: The gold answer.
        aliases: Other forms of it.
        wordings: Sentences that the answer ends, with ``{}`` for the subject; or one question.
        meta: What else the file knows.
    """

    where: str
    relation: str
    subject: str
    answer: str
    aliases: tuple[str, ...]
    wordings: tuple[str, ...]
    meta: Mapping[str, Any]


def relations(
    model: Encoder,
    source: Source | Sequence[str | Path],
    *,
    names: str | Sequence[str] | None = None,
    template: str = "zero_shot",
    shots: int = 0,
    n: int | None = None,
    context_length: int | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
) -> TrialSet:
    """Recall trials from relation files (Hernandez et al. 2023, arXiv 2308.09124).

    A file is ``{"name", "prompt_templates", "prompt_templates_zs", "samples": [{"subject", "object"}]}``; a prompt is a
    template with the subject in it, which the object ends. Several objects of one subject are forms of one answer
    (``meta["aliases"]``). A sample whose object stands in its own prompt is left out and counted. The two splits
    share no answer; the prompt never holds it. The only span is ``question``, the sentence to be ended.

    Args:
        model: A model, or anything with ``encode``.
        source: A file, a folder of ``.json`` files (with its subfolders), a hub name with a file, records, or a list
            of files.
        names: Only relations of these names.
        template: ``"zero_shot"`` (``prompt_templates_zs``, which say what kind of thing is wanted) or ``"plain"``;
            a file without the one uses the other. Of several wordings trials take turns.
        shots: Solved sentences of the same relation before the question, about other subjects, with other answers.
        n: Number of trials; None takes every sample.
        context_length: Tokens of the whole prompt, which then begins with haystack prose; None: no haystack.
        seed: Of every choice.
        split: Calibration share; see ``needles``.
        chat: Put the prompt through the chat template, with the request to end the sentence.
        haystack: See ``needles``.

    Raises:
        UnknownName: If no relation has a name asked for, or the template is unknown.
        InvalidInput: Naming file and field, if a file cannot be used, or as ``needles`` does.
    """
    if template not in TEMPLATES:
        raise UnknownName("template of relations", template, TEMPLATES)
    if isinstance(shots, bool) or not isinstance(shots, int) or shots < 0:
        raise InvalidInput(f"shots={shots!r}: give a whole number of 0 or more.")
    records, where, hashes = _relation_records(source)
    wanted = None if names is None else [names] if isinstance(names, str) else list(names)
    known = [r.get("name", str) for r in records]
    for name in wanted or ():
        if name not in known:
            raise UnknownName(f"relation of {where}", name, known)
    facts = [
        f for r, own in zip(records, known, strict=True) if wanted is None or own in wanted for f in _facts(r, template)
    ]
    own_options = {"names": wanted, "template": template, "shots": shots}
    others: dict[str, list[_Fact]] = {}
    for fact in facts:
        others.setdefault(fact.relation, []).append(fact)

    def item(fact: _Fact, k: int, rng: random.Random) -> Item:
        return _sentence(fact, others[fact.relation], k, shots, rng, chat=chat)

    return _recall_trials(
        "relations", model, facts, item, where, hashes, own_options, n=n, context_length=context_length, seed=seed,
        split=split, chat=chat, haystack=haystack,
    )  # fmt: skip


def popqa(
    model: Encoder,
    source: Source,
    *,
    props: str | Sequence[str] | None = None,
    min_popularity: int = 0,
    n: int | None = None,
    context_length: int | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
) -> TrialSet:
    """Recall trials from PopQA (Mallen et al. 2023, arXiv 2212.10511).

    A record has ``question``, ``obj`` and ``possible_answers`` (a list, or a JSON text that holds one, as published),
    and perhaps ``id``, ``subj``, ``prop``, ``s_pop`` and ``o_pop``, which go into ``meta``. The gold answer is ``obj``,
    all other possible answers are its aliases. A record whose answer, in any form, stands in the question is left out
    and counted. The two splits share no answer.

    Args:
        model: A model, or anything with ``encode``.
        source: A file, records, or a hub name, of which the split ``"test"`` is read by default.
        props: Only these relations (``"capital"``, ``"occupation"``, ...).
        min_popularity: Least ``s_pop`` (monthly page views of the subject): small models know only the popular.
        n: Number of trials; None takes every record.
        context_length: As in ``relations``.
        seed: Of every choice.
        split: Calibration share; see ``needles``.
        chat: Put the prompt through the chat template.
        haystack: See ``needles``.

    Raises:
        UnknownName: If no record has a relation asked for.
        InvalidInput: Naming file, record and key, if a record cannot be used, or as ``needles`` does.
    """
    if isinstance(min_popularity, bool) or not isinstance(min_popularity, (int, float)):
        raise InvalidInput(f"min_popularity={min_popularity!r}: give a number of page views, such as 1000.")
    records = read_records(source, what="PopQA file", split=POPQA_SPLIT)
    wanted = None if props is None else [props] if isinstance(props, str) else list(props)
    known = {r.get("prop", str, default="") for r in records.records}
    for name in wanted or ():
        if name not in known:
            raise UnknownName(f"prop of {records.source}", name, known)
    facts = [
        _popqa_fact(r)
        for r in records.records
        if (wanted is None or r.data.get("prop") in wanted)
        and (not min_popularity or r.get("s_pop", (int, float)) >= min_popularity)
    ]
    if not facts:
        raise InvalidInput(f"{records.source} has no record with min_popularity={min_popularity}; use a smaller one.")

    def item(fact: _Fact, k: int, rng: random.Random) -> Item:
        question = fact.wordings[0]
        return _item(fact, question, closing(question, "", _HINT, chat=chat))

    return _recall_trials(
        "popqa", model, facts, item, records.source, records.hash, {"props": wanted, "min_popularity": min_popularity},
        n=n, context_length=context_length, seed=seed, split=split, chat=chat, haystack=haystack,
    )  # fmt: skip


def with_aliases(trials: TrialSet, aliases: Mapping[str, Sequence[str]] | None = None) -> TrialSet:
    """The same trials, their answers with other forms in ``meta["aliases"]``, over which tasks take the best.

    Args:
        trials: Trials with gold answers.
        aliases: Other forms by gold answer (case does not matter); None is what the answers of ``recall`` are called
            besides (``ALIASES``). Forms that a trial has already stay.

    Raises:
        InvalidInput: If the aliases are no lists of texts, or none of them is of an answer of these trials.
    """
    given = ALIASES if aliases is None else aliases
    named: dict[str, tuple[str, ...]] = {}
    for answer, forms in given.items():
        if isinstance(forms, str) or not all(isinstance(f, str) and f.strip() for f in forms):
            raise InvalidInput(f"the aliases of {answer!r} are {forms!r}; give a list of non-empty texts.")
        named[folded(answer).strip()] = tuple(forms)
    out, met = [], False
    for trial in trials:
        more = named.get(folded(trial.answer or "").strip(), ())
        met = met or bool(more)
        both = [f for f in dict.fromkeys((*trial.meta.get("aliases", []), *more)) if f != trial.answer]
        out.append(replace(trial, meta={**trial.meta, "aliases": both}) if trial.answer else trial)
    if aliases is not None and not met:
        raise InvalidInput(
            f"none of the {len(named)} answers with aliases ({sorted(named)[:3]}...) is an answer of {trials.name!r}."
        )
    options = {**trials.options, "aliases": content_hash({k: list(v) for k, v in named.items()})}
    return TrialSet(out, name=trials.name, options=options)


def _relation_records(source: Any) -> tuple[list[Record], str, str]:
    """Relations of a file, a folder, or several files, with their source's name and hash."""
    if isinstance(source, (str, Path)) and Path(source).is_dir():
        files: list[Any] = sorted(Path(source).rglob("*.json"), key=lambda p: p.relative_to(source).as_posix())
        if not files:
            raise InvalidInput(f"the folder {source} holds no .json file; give relation files.")
        name = str(source)
    elif isinstance(source, (list, tuple)) and source and all(isinstance(s, (str, Path)) for s in source):
        files, name = list(source), ", ".join(map(str, source))
    else:
        files, name = [source], ""
    read = [read_records(file, what="relation file") for file in files]
    records = [r for each in read for r in each.records]
    return records, name or read[0].source, content_hash([each.hash for each in read])


def _facts(record: Record, template: str) -> list[_Fact]:
    """The samples of a relation; several objects of a subject are one answer."""
    other = next(t for t in TEMPLATES if t != template)
    wordings = record.texts(_KEYS[template], default=()) or record.texts(_KEYS[other])
    for wording in wordings:
        if wording.count("{}") != 1:
            raise InvalidInput(f"{record.where}: the template {wording!r} must hold {{}} once, for the subject.")
    relation = record.get("name", str)
    objects: dict[str, list[str]] = {}
    for k, sample in enumerate(record.get("samples", list), 1):
        at = f"{record.where}, sample {k}"
        if not isinstance(sample, Mapping):
            raise InvalidInput(f"{at} is {str(sample)[:60]!r}; it must be an object with 'subject' and 'object'.")
        row = Record(sample, at)
        objects.setdefault(row.get("subject", str).strip(), []).append(row.get("object", str).strip())
    facts = []
    for subject, given in objects.items():
        answer, *aliases = dict.fromkeys(given)
        facts.append(_Fact(record.where, relation, subject, answer, tuple(aliases), wordings, {}))
    if not facts:
        raise InvalidInput(f"{record.where} has no samples; each is {{'subject': ..., 'object': ...}}.")
    return facts


def _sentence(fact: _Fact, relation: Sequence[_Fact], k: int, shots: int, rng: random.Random, *, chat: bool) -> Item:
    """The item of a relation's sample, with solved samples of the relation before it."""
    which = k % len(fact.wordings)
    asked = fact.wordings[which].replace("{}", fact.subject)
    golds = WordFinder((fact.answer, *fact.aliases))
    solved = []
    for other in shuffled([f for f in relation if f.subject != fact.subject], rng) if shots else ():
        if len(solved) == shots:
            break
        line = f"{other.wordings[which % len(other.wordings)].replace('{}', other.subject)} {other.answer}."
        if not golds.found_in(line):
            solved.append(line)
    if len(solved) < shots:
        raise InvalidInput(
            f"{fact.where}: shots={shots}, but the relation {fact.relation!r} has only {len(solved)} samples that do "
            f"not hold the answer {fact.answer!r}; use fewer."
        )
    before = "".join(f"\n\n{line}" for line in solved)
    last = f"\n\nEnd this sentence with a name or a word alone: {asked}" if chat else f"\n\n{asked}"
    return _item(fact, asked, before + last)


def _item(fact: _Fact, question: str, end: str) -> Item:
    meta = {"relation": fact.relation, "subject": fact.subject, "aliases": list(fact.aliases), **fact.meta}
    avoid = tuple(dict.fromkeys(w for w in (fact.answer, *fact.aliases, fact.subject) if len(w) > 2))
    return Item(None, question, end, fact.answer, avoid, meta=meta)


def _popqa_fact(record: Record) -> _Fact:
    """One record of PopQA."""
    listed = record.data.get("possible_answers")
    if isinstance(listed, str):
        try:
            listed = json.loads(listed)
        except ValueError as error:
            raise InvalidInput(f"{record.where}: 'possible_answers' is {listed[:60]!r}, not JSON: {error}.") from error
    golds = Record({"possible_answers": listed}, record.where).texts("possible_answers")
    answer = record.get("obj", str, default="").strip() or golds[0].strip()
    aliases = tuple(dict.fromkeys(g.strip() for g in golds if g.strip() != answer))
    meta = {k: record.data[k] for k in ("id", "s_pop", "o_pop") if isinstance(record.data.get(k), (int, float))}
    relation, subject = (record.get(k, str, default="").strip() for k in ("prop", "subj"))
    question = record.get("question", str).strip()
    named = {("record" if k == "id" else k): v for k, v in meta.items()}
    return _Fact(record.where, relation, subject, answer, aliases, (question,), named)


def _recall_trials(
    kind: str,
    model: Encoder,
    facts: Sequence[_Fact],
    item: Any,
    source: str,
    source_hash: str,
    own: Mapping[str, Any],
    *,
    n: int | None,
    context_length: int | None,
    seed: int,
    split: int | float | None,
    chat: bool,
    haystack: HaystackSource,
) -> TrialSet:
    """Trials of the facts that their own prompts do not give away."""
    kept = [f for f in facts if not _gives_away(f)]
    left_out = len(facts) - len(kept)
    total = len(kept) if n is None else n
    check_common(total, seed, split)
    check_context(kind, model, context_length, None, needed=False)
    rng = random.Random(f"mechheads/{kind}/{seed}")
    if n is not None:  # of thousands of facts a few times those asked for are enough to cut from
        kept = shuffled(kept, rng)[: max(_PLENTY * n, _PLENTY)]
    groups = _bound(kept)
    if n is None and len(kept) > _MANY:
        chosen = _halves(groups, split, rng)
    elif n is None:
        chosen = cut_all(groups, split, rng, what=source, unit="facts")
    else:
        chosen = cut(groups, sizes_of(n, split), rng, what=source, unit="facts")
    parts = [[item(kept[i], k, rng) for k, i in enumerate(part)] for part in chosen]
    prose = Haystack.load(haystack) if context_length is not None or haystack is not None else None
    options = {
        "kind": kind,
        "source": source,
        "source_hash": source_hash,
        **own,
        "n": total,
        "context_length": context_length,
        "seed": seed,
        "split": split,
        "chat": chat,
        **(prose.options() if prose else {"haystack": None, "haystack_hash": None}),
        "given_away_left_out": left_out,
    }
    return build(kind, model, parts, [[0.5] * len(part) for part in parts], prose, rng, options)


def _bound(facts: Sequence[_Fact]) -> list[list[int]]:
    """Facts that must stay in one split: those that share an answer, in any form, or of which one's holds the other's.

    That an alias merely contains another answer does not bind, or short forms would tie all facts together.
    """
    alike = names_alike([f.answer for f in facts], what="answer")
    forms = [[f"answer {' '.join(folded(alias).split())}" for alias in f.aliases] for f in facts]
    return grouped([[*own, *more] for own, more in zip(alike, forms, strict=True)])


def _halves(groups: Sequence[Sequence[int]], split: int | float | None, rng: random.Random) -> list[list[int]]:
    """All indices in two splits, group by group as they come, which is near enough where there are thousands."""
    order = shuffled(groups, rng)
    if split is None:
        return [shuffled([i for group in order for i in group], rng)]
    total, first, second = sum(map(len, groups)), [], []
    for group in order:
        side = first if len(first) + len(group) / 2 <= split * total else second
        side.extend(group)
    return [shuffled(first, rng), shuffled(second, rng)]


def _gives_away(fact: _Fact) -> bool:
    """Whether the answer, in any form, stands in one of the fact's own wordings."""
    finder = WordFinder((fact.answer, *fact.aliases))
    return any(finder.found_in(wording.replace("{}", fact.subject)) for wording in fact.wordings)
