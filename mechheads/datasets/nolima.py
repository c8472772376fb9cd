"""NoLiMa: needles that share no words with their question, from published needle sets."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mechheads.datasets.assemble import Item
from mechheads.datasets.build import build, check_common, check_context, depths_of, is_number, sizes_of
from mechheads.datasets.chat import has_system_role
from mechheads.datasets.haystack import Haystack, HaystackSource, below, shuffled
from mechheads.datasets.sources import Record, Records, Source, fill, frame, grouped, placeholders, read_records
from mechheads.datasets.words import WordFinder, folded, names_alike, shared_names
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoder, TrialSet

DEFAULT_FILE = "needlesets/needle_set.json"
DEFAULT_TEMPLATE = "{haystack}\n\nQuestion: {question}\nAnswer:"
_CHAR = "CHAR"


@dataclass(frozen=True)
class Case:
    """One test of one entry of a needle set, before a character is chosen.

    Attributes:
        entry: Id of the entry.
        test: Name of the test.
        where: File, entry and test, for messages.
        needle: Text with ``{CHAR}`` left in.
        question: Text with ``{CHAR}`` left in.
        distractors: Texts.
        characters: Names that may stand for ``{CHAR}``; one empty name if there is no such placeholder.
        gold: Gold answers; empty if the character is the answer.
        arguments: What stands for ``{1}``, ``{2}``, ...
        template: Template of the prompt.
        system: System prompt, or empty.
        reasoning: The entry's reasoning type, or None.
    """

    entry: str
    test: str
    where: str
    needle: str
    question: str
    distractors: tuple[str, ...]
    characters: tuple[str, ...]
    gold: tuple[str, ...]
    arguments: tuple[str, ...]
    template: str
    system: str
    reasoning: str | None


def nolima(
    model: Encoder,
    path: Source,
    *,
    question: str = "onehop",
    n: int = 60,
    context_length: int = 256,
    depth: int | float | None = None,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    haystack: HaystackSource = None,
    distractors: bool = True,
    distractor_gap: int | float = 0.2,
    task_template: str | None = None,
    split_tests: bool = True,
) -> TrialSet:
    """Trials from a NoLiMa needle set (Modarressi et al. 2025, arXiv 2502.05167).

    A set is a JSON list of entries ``{id, needle, questions, character_set, tests, ...}``. Every test of an entry
    gives the values of ``{1}``, ``{2}``, ... in needle, question and distractor; ``{CHAR}`` is a name of the character
    set, and the gold answer. Where the needle has no ``{CHAR}`` the test's ``gold_answers`` are. A question with
    ``{CHAR}`` is one of multiple choice (``meta["multiple_choice"]``), and the only kind in which the answer may stand.

    The two splits share no character, so neither needle texts nor answers, and no test arguments (``split_tests``).
    Names that differ in case alone, or of which one contains the other (``Ann``, ``Ann Lee``), are in one split.
    Within a split tests and characters take turns.

    Spans, metadata and the options not listed here are those of ``needles``; ``meta`` has further ``entry``, ``test``,
    ``character``, ``input_args``, ``reasoning_type``, ``question_type``, ``answers``, ``system_prompt`` and
    ``system_prompt_place``, ``distractor_depths``. A haystack sentence that names the answer, a test argument or
    another character of the set that the question offers is left out of that trial.

    Args:
        model: A model, or anything with ``encode``.
        path: A needle set file, records, or a hub name: ``"hub:amodaresi/NoLiMa"`` takes the file
            ``needlesets/needle_set.json`` by default.
        question: Which of the entries' questions (``"onehop"``, ``"twohop"``, ``"direct"``, ...). Entries without it
            are passed over and counted in the options.
        n: Number of trials, both splits together.
        context_length: Tokens of the whole prompt; see ``needles``.
        depth: Where the needle stands; see ``needles``.
        seed: Of every choice.
        split: Calibration share; see ``needles``.
        chat: Put the prompt through the chat template. An entry's system prompt goes into the template's system
            role; where there is none, or without ``chat``, it precedes the prompt (``"before the prompt"``).
        haystack: See ``needles``; NoLiMa's books are text files.
        distractors: Insert the distractors a set has.
        distractor_gap: Least distance of a distractor's depth from the needle's (share of the passage, as the
            depth is).
        task_template: Instead of the entries' own; holds ``{haystack}`` once and ``{question}``, anywhere.
            An entry without one has ``DEFAULT_TEMPLATE``, which asks as ``needles`` does.
        split_tests: Keep tests with the same arguments in one split, where the set has several. False lets a small
            set give more trials, whose splits differ in characters alone.

    Raises:
        UnknownName: If no entry has that question.
        InvalidInput: Naming entry and field, if the file cannot be used; or as ``needles`` does.
    """
    check_common(n, seed, split)
    check_context("nolima", model, context_length, depth)
    _check_own(question, distractors, distractor_gap, split_tests)
    records = read_records(path, what="NoLiMa needle set", file=DEFAULT_FILE)
    cases, without = _cases(records, question, task_template)
    rng = random.Random(f"mechheads/nolima/{seed}")
    drawn = _draw(cases, sizes_of(n, split), rng, records.source, split_tests)
    depths = [depths_of(len(part), depth, rng) for part in drawn]
    role = chat and has_system_role(model)
    gap = float(distractor_gap) if distractors else None
    parts = [
        [
            _item(case, who, at, rng, question, chat=chat, role=role, gap=gap)
            for (case, who), at in zip(p, d, strict=True)
        ]
        for p, d in zip(drawn, depths, strict=True)
    ]
    prose = Haystack.load(haystack)
    options = {
        "kind": "nolima",
        "source": records.source,
        "source_hash": records.hash,
        "question": question,
        "entries_without_question": without,
        "n": n,
        "context_length": context_length,
        "depth": depth,
        "seed": seed,
        "split": split,
        "chat": chat,
        **prose.options(),
        "distractors": distractors,
        "distractor_gap": distractor_gap,
        "task_template": task_template,
        "split_tests": split_tests,
    }
    return build("nolima", model, parts, depths, prose, rng, options)


def _check_own(question: Any, distractors: Any, gap: Any, split_tests: Any) -> None:
    if not isinstance(question, str):
        raise InvalidInput(f"question={question!r}: give the name of a question, such as 'onehop'.")
    if not isinstance(distractors, bool):
        raise InvalidInput(f"distractors={distractors!r}: give True or False; the set says which and how many.")
    if not isinstance(split_tests, bool):
        raise InvalidInput(f"split_tests={split_tests!r}: give True or False.")
    if not (is_number(gap) and 0 < gap <= 0.5):
        raise InvalidInput(f"distractor_gap={gap!r}: give a share of the passage, above 0 and at most 0.5.")


def _cases(records: Records, question: str, template: str | None) -> tuple[list[Case], int]:
    """All tests of the entries that have the question, and how many entries have it not."""
    cases: list[Case] = []
    known: set[str] = set()
    without = 0
    for record in records.records:
        asked = record.get("questions", Mapping)
        known |= set(map(str, asked))
        if question not in asked:
            without += 1
            continue
        cases += _entry(record, question, template)
    if not cases:
        raise UnknownName("question type", question, known, hint=f"They are those of {records.source}.")
    return cases, without


def _entry(record: Record, question: str, template: str | None) -> list[Case]:
    """The tests of one entry."""
    name = str(record.get("id", (str, int)))
    where = f"{record.where} (id {name!r})"
    needle = record.get("needle", str)
    asked = Record(record.get("questions", Mapping), where).get(question, str)
    has_char = _CHAR in placeholders(needle)
    names = dict.fromkeys(record.texts("character_set")) if has_char else ("",)
    tests = record.get("tests", Mapping)
    if not tests:
        raise InvalidInput(f"{where} has no tests; each needs 'input_args'.")
    out = []
    for test, body in tests.items():
        at = f"{where}, test {test!r}"
        if not isinstance(body, Mapping):
            raise InvalidInput(f"{at} is {body!r}; it must be an object with 'input_args'.")
        row = Record(body, at)
        arguments = row.texts("input_args", default=(), empty=True)
        if "input_args" not in body:
            raise InvalidInput(f"{at} has no 'input_args'; it has {sorted(body)}.")
        fields = {str(i): a for i, a in enumerate(arguments, 1)}
        if has_char:
            fields[_CHAR] = "{CHAR}"
        if not has_char and "gold_answers" not in body:
            raise InvalidInput(f"{at}: the needle has no {{CHAR}}, so the test needs 'gold_answers'.")
        out.append(
            Case(
                entry=name,
                test=str(test),
                where=at,
                needle=fill(needle, fields, f"{at}: the needle"),
                question=fill(asked, fields, f"{at}: the question {question!r}"),
                distractors=_distractors(record, question, fields, at),
                characters=tuple(names),
                gold=() if has_char else row.texts("gold_answers"),
                arguments=arguments,
                template=template or record.get("task_template", str, default="") or DEFAULT_TEMPLATE,
                system=record.get("system_prompt", str, default="").strip(),
                reasoning=record.get("reasoning_type", str, default="") or None,
            )
        )
    return out


def _distractors(record: Record, question: str, fields: Mapping[str, str], where: str) -> tuple[str, ...]:
    """The entry's distractors for a question: keyed by question type, one text or several."""
    given = record.get("distractors", (Mapping, list, str), default=())
    if isinstance(given, Mapping):
        keyed = Record(given, f"{record.where}: 'distractors'")
        texts = keyed.texts(question, default=())
    else:
        texts = record.texts("distractors", default=())
    # With the character in it a distractor would be a second needle with the same answer.
    plain = {k: v for k, v in fields.items() if k != _CHAR}
    return tuple(fill(text, plain, f"{where}: the distractor") for text in texts)


def _draw(
    cases: Sequence[Case], sizes: Sequence[int], rng: random.Random, source: str, split_tests: bool
) -> list[list[tuple[Case, str]]]:
    """Cases with characters for each split: shared are neither characters nor, if it can be, arguments."""
    groups = shuffled(grouped(_keys(cases)), rng)
    given = list(dict.fromkeys(name for c in cases for name in c.characters if name))
    names = shuffled([[given[i] for i in same] for same in grouped(names_alike(given))], rng)
    ordered = [[cases[i] for i in g] for g in groups]
    # Without {CHAR} only the tests keep the answers apart.
    case_parts = _shares(ordered if split_tests or not names else [[c for part in ordered for c in part]], sizes)
    name_parts = _shares(names, sizes)
    out = []
    for k, size in enumerate(sizes):
        mine = shuffled(case_parts[k], rng)
        pairs = _pairs(mine, name_parts[k])
        if len(pairs) < size:
            splits = " + ".join(map(str, sizes))
            raise InvalidInput(
                f"{source} cannot give n={sum(sizes)} trials ({splits} in splits that share neither characters nor "
                f"needles): a split of {size} has {len(mine)} tests and {len(name_parts[k])} characters, which make "
                f"{len(pairs)} distinct needles; use a smaller n, split_tests=False, or split=None."
            )
        out.append(pairs[:size])
    _check_shared(out)
    return out


def _keys(cases: Sequence[Case]) -> list[list[str]]:
    """What tests must not share between the splits: arguments, and gold answers or such as contain one another."""
    golds = iter(names_alike([g for c in cases for g in c.gold], what="gold"))
    arguments = [tuple(map(folded, c.arguments)) or folded(c.needle) for c in cases]
    return [[f"of {of}", *(key for _ in c.gold for key in next(golds))] for c, of in zip(cases, arguments, strict=True)]


def _shares(groups: Sequence[list[Any]], sizes: Sequence[int]) -> list[list[Any]]:
    """Whole groups for each split in proportion, at least one each; a single group is shared by both."""
    flat = [x for g in groups for x in g]
    if len(sizes) == 1 or len(groups) < 2:
        return [flat] * len(sizes)
    wanted = len(flat) * sizes[0] / sum(sizes)
    first = min(range(1, len(groups)), key=lambda k: abs(sum(map(len, groups[:k])) - wanted))
    return [[x for g in half for x in g] for half in (groups[:first], groups[first:])]


def _pairs(cases: Sequence[Case], names: Sequence[str]) -> list[tuple[Case, str]]:
    """Every case with every character it may have, in rounds over the cases, each round with other characters."""
    allowed = [[x for x in names if x in c.characters] or [x for x in c.characters if not x] for c in cases]
    rounds = max(map(len, allowed), default=0)
    pairs = [
        (case, mine[(k + r) % len(mine)])
        for r in range(rounds)
        for k, (case, mine) in enumerate(zip(cases, allowed, strict=True))
        if r < len(mine)
    ]
    seen: dict[str, tuple[Case, str]] = {}
    for case, who in pairs:
        seen.setdefault(folded(_named(case.needle, who)), (case, who))
    return list(seen.values())


def _check_shared(parts: Sequence[Sequence[tuple[Case, str]]]) -> None:
    """The splits of a set with one character, or one test without any, would share their answer."""
    if len(parts) < 2:
        return
    left, right = ([x for case, who in part for x in (case.gold or (who,))] for part in parts)
    if shared := shared_names(left, right):
        raise InvalidInput(
            f"calibration and test would share the answers {sorted(shared)[:5]}, or answers that contain them: the "
            "needle set has too few characters or tests to be split; use split=None."
        )


def _named(text: str, who: str) -> str:
    return text.replace("{CHAR}", who)


def _item(
    case: Case, who: str, depth: float, rng: random.Random, kind: str, *, chat: bool, role: bool, gap: float | None
) -> Item:
    """The item of a case and a character."""
    choice = bool(who) and "{CHAR}" in case.question
    needle, asked = _named(case.needle, who), _named(case.question, who)
    answers = case.gold or (who,)
    if not choice and WordFinder(answers[:1]).found_in(asked):
        raise InvalidInput(
            f"{case.where}: the answer {answers[0]!r} stands in the question {asked!r}, so no needle is needed to give "
            "it; only a multiple-choice question, with {CHAR} in it, may hold the answer."
        )
    around = frame(case.template, "haystack", asked, where=case.where, strip=chat)
    before = f"{case.system}\n\n" if case.system and not role else ""
    inserted = case.distractors if gap is not None else ()
    placed = tuple((text, _away(depth, gap or 0.0, rng)) for text in inserted)
    others = [c for c in case.characters if c and WordFinder((c,)).found_in(asked)]
    return Item(
        needle=needle,
        question=asked,
        opening=before + around.opening,
        closing=around.closing,
        question_at=tuple((side, at + (len(before) if side == "opening" else 0)) for side, at in around.question_at),
        answer=answers[0],
        avoid=tuple(dict.fromkeys((*answers, *case.arguments, *others))),
        distractors=placed,
        system=case.system if role else "",
        apart=bool(placed),
        meta={
            "entry": case.entry,
            "test": case.test,
            "character": who or None,
            "input_args": list(case.arguments),
            "reasoning_type": case.reasoning,
            "question_type": kind,
            "multiple_choice": choice,
            "answers": list(answers),
            "system_prompt": case.system or None,
            "system_prompt_place": None if not case.system else "system role" if role else "before the prompt",
            "distractor_depths": [at for _, at in placed],
        },
    )


def _away(depth: float, gap: float, rng: random.Random) -> float:
    """A depth, in thousandths, at least the gap from the needle's; one of the ends if there is no other."""
    free = [k / 1000 for k in range(1001) if abs(k / 1000 - depth) >= gap]
    return free[below(rng, len(free))] if free else float(depth < 0.5)
