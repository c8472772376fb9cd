"""BABILong: the facts of a bAbI story scattered through long prose, and one question about them."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mechheads.datasets import hub_files as hubs
from mechheads.datasets.assemble import Insert, Item
from mechheads.datasets.build import build, check_common, check_context, sizes_of
from mechheads.datasets.haystack import Haystack, HaystackSource, below
from mechheads.datasets.pools import closing
from mechheads.datasets.sources import cut, cut_all, frame, grouped, read_text
from mechheads.datasets.words import occurrences
from mechheads.errors import InvalidInput
from mechheads.provenance import content_hash
from mechheads.trials import Encoder, Trial, TrialSet

_LINE = re.compile(r"(\d+) (.*)")
_PLACES = 1_000_000  # depths are drawn in millionths, so that those of one story always differ
_DIRECTIONS = frozenset("nsew")
_MOST_ORDERS = 3  # answers of up to so many items are accepted in any order
_HINT = "Answer with one word."
# Words of bAbI's questions that name nothing the prose could be mistaken for.
_COMMON_WORDS = (
    "where what who why how which is are was were did does do will the a an to in of from at on go get got you before "
    "after many objects carrying color afraid left right side above below bigger smaller fit fits inside than give "
    "gave given receive received north south east west yes no nothing none"
)
_COMMON = frozenset(_COMMON_WORDS.split())


@dataclass(frozen=True)
class Story:
    """One question with the facts told before it, earlier questions left out.

    Attributes:
        file: Name of the file.
        line: Line of the question in the file, from 1.
        start: Line where its story begins.
        facts: In the order told.
        question: Text.
        answers: The answer; several where the file lists several.
        supporting: Indices into ``facts``, rising.
    """

    file: str
    line: int
    start: int
    facts: tuple[str, ...]
    question: str
    answers: tuple[str, ...]
    supporting: tuple[int, ...]

    @property
    def task(self) -> str:
        """The task as files are named after it (``"qa1"``), else the file's name without ending."""
        named = re.match(r"qa\d+", self.file)
        return named[0] if named else Path(self.file).stem


def babilong(
    model: Encoder,
    source: str | Path | hubs.Hub | Sequence[str | Path | hubs.Hub],
    *,
    haystack: HaystackSource = None,
    n: int | None = None,
    context_length: int | None = 256,
    seed: int = 0,
    split: int | float | None = 0.5,
    chat: bool = False,
    task_template: str | None = None,
    max_facts: int | None = None,
) -> TrialSet:
    """Trials in the manner of BABILong (Kuratov et al. 2024, arXiv 2406.10149), from bAbI files and any prose.

    Each question of a file is one sample: the facts told before it, in their order, each at a random sentence
    boundary of the prose; questions asked earlier are left out. Supporting facts are the spans ``needle``, the others
    ``distractor``; ``answer_span`` the answer where a supporting fact holds it. ``meta`` has ``facts``, ``supporting``
    (indices into them), ``fact_depths``, ``task``, ``file``, ``line``, ``aliases`` (other orders of an answer with
    several items), and what ``needles`` gives; its ``depth`` is that of the last supporting fact with the answer.

    The two splits share no story; its answers are a handful of rooms, so those they do share: heads that are chosen
    on one split are tested on other stories, not on other words. Haystack sentences with the answer or a word
    of the question (``_COMMON`` ones aside) are left out of that trial, so that no prose says where John went.

    Args:
        model: A model, or anything with ``encode``.
        source: A bAbI file (``N text`` a line, questions as ``N question<TAB>answer<TAB>supporting lines``), a hub name
            with a file, or several of them.
        haystack: See ``needles``; the published set uses books.
        n: Number of trials; None takes every question.
        context_length: Tokens of the whole prompt; see ``needles``. None puts no prose between the facts.
        seed: Of every choice.
        split: Calibration share; see ``needles``.
        chat: Put the prompt through the chat template.
        task_template: The prompt, with ``{haystack}`` and ``{question}``; None asks as ``needles`` does.
        max_facts: Leave out questions with more facts before them (counted in the options): long stories need long
            contexts.

    Raises:
        InvalidInput: Naming file and line, if a file cannot be used; or as ``needles`` does.
    """
    check_context("babilong", model, context_length, None, needed=False)
    if max_facts is not None and (isinstance(max_facts, bool) or not isinstance(max_facts, int) or max_facts < 1):
        raise InvalidInput(f"max_facts={max_facts!r}: give a whole number of 1 or more, or None.")
    every, names = _read_all(source)
    stories = [s for s in every if max_facts is None or len(s.facts) <= max_facts]
    what = ", ".join(names)
    if not stories:
        raise InvalidInput(f"{what} has no question with at most max_facts={max_facts} facts before it.")
    total = len(stories) if n is None else n
    check_common(total, seed, split)
    rng = random.Random(f"mechheads/babilong/{seed}")
    groups = grouped([[f"{s.file} {s.start}"] for s in stories])
    if n is None:
        chosen = cut_all(groups, split, rng, what=what, unit="questions")
    else:
        chosen = cut(groups, sizes_of(n, split), rng, what=what, unit="questions")
    made = [[_item(stories[i], rng, chat=chat, template=task_template) for i in part] for part in chosen]
    prose = Haystack.load(haystack) if context_length is not None or haystack is not None else None
    options = {
        "kind": "babilong",
        "source": what,
        "source_hash": content_hash([[s.question, *s.facts, *s.answers] for s in every]),
        "n": total,
        "context_length": context_length,
        "seed": seed,
        "split": split,
        "chat": chat,
        **(prose.options() if prose else {"haystack": None, "haystack_hash": None}),
        "task_template": task_template,
        "max_facts": max_facts,
        "left_out": len(every) - len(stories),
    }
    parts = [[item for item, _ in part] for part in made]
    depths = [[depth for _, depth in part] for part in made]
    trials = build("babilong", model, parts, depths, prose, rng, options)
    return TrialSet(map(_without_a_chance_answer, trials), name="babilong", options=options)


def _read_all(source: Any) -> tuple[list[Story], list[str]]:
    """The questions of one file or several, and the files' names."""
    given = [source] if isinstance(source, (str, Path, hubs.Hub)) else source
    if not isinstance(given, Sequence) or not given or not all(isinstance(g, (str, Path, hubs.Hub)) for g in given):
        raise InvalidInput(f"cannot read bAbI files from {source!r}; give a file or a list of files.")
    stories: list[Story] = []
    names: list[str] = []
    for one in given:
        name, path = str(one), Path(str(one))
        if hubs.is_hub(one):
            path = hubs.of(one).fetch()
        if not path.is_file():
            reason = "is a folder; give its files" if path.is_dir() else "does not exist; check the path"
            raise InvalidInput(f"the bAbI file {name} {reason}.")
        if name in names:
            raise InvalidInput(f"the bAbI file {name} is given twice; give it once.")
        names.append(name)
        stories += read_stories(read_text(path, f"bAbI file {name}"), name)
    by_name: dict[str, str] = {}
    for name in names:
        other = by_name.setdefault(Path(name).name, name)
        if other != name:
            raise InvalidInput(f"{other} and {name} have one file name, which trials are known by; rename one.")
    return stories, names


def read_stories(text: str, where: str) -> list[Story]:
    """Every question of a bAbI file with the facts before it.

    Args:
        text: The file's content.
        where: Its name.

    Raises:
        InvalidInput: Naming the line, if it is none of bAbI's or refers to no fact of its story.
    """
    stories: list[Story] = []
    facts: dict[int, str] = {}
    start = last = 0
    for number, line in enumerate(text.replace("\r\n", "\n").split("\n"), 1):
        if not line.strip():
            continue
        at = f"{where}, line {number}"
        match = _LINE.fullmatch(line.strip(" "))
        if match is None:
            raise InvalidInput(f"{at} is {line[:60]!r}; a bAbI line is a number, a space and a text.")
        own, rest = int(match[1]), match[2]
        if own == 1:
            facts, start = {}, number
        elif not start or own <= last:
            raise InvalidInput(f"{at} has the number {own} after {last}; numbers rise in a story, which begins with 1.")
        last = own
        if "\t" not in rest:
            facts[own] = " ".join(rest.split())
        else:
            stories.append(_story(rest, facts, at, Path(where).name, number, start))
    if not stories:
        raise InvalidInput(f"{where} has no question; one is 'N question<TAB>answer<TAB>supporting line numbers'.")
    return stories


def _story(rest: str, facts: dict[int, str], at: str, file: str, number: int, start: int) -> Story:
    """One question line."""
    question, answer, *more = (part.strip() for part in rest.split("\t"))
    if not question or not answer:
        raise InvalidInput(f"{at} has the question {question!r} with the answer {answer!r}; give both.")
    wanted = " ".join(more).split()
    places = list(facts)
    if not wanted or not all(w.isdecimal() and int(w) in facts for w in wanted):
        raise InvalidInput(
            f"{at} names the supporting lines {' '.join(wanted) or '(none)'}; give numbers of facts told before it "
            f"({', '.join(map(str, places)) or 'there are none'})."
        )
    supporting = sorted({places.index(int(w)) for w in wanted})
    answers = tuple(a.strip() for a in answer.split(",") if a.strip())
    return Story(file, number, start, tuple(facts.values()), question, answers, tuple(supporting))


def _item(story: Story, rng: random.Random, *, chat: bool, template: str | None) -> tuple[Item, float]:
    """One question as an item, and the depth of its main supporting fact."""
    drawn: dict[int, None] = {}
    while len(drawn) < len(story.facts):
        drawn.setdefault(below(rng, _PLACES + 1))
    depths = [place / _PLACES for place in sorted(drawn)]
    answer = ", ".join(story.answers)
    holding = [i for i in story.supporting if occurrences(story.facts[i], answer)]
    main = (holding or story.supporting)[-1]
    inserts = tuple(
        Insert("needle" if i in story.supporting else "distractor", fact, at, answer if i in holding else "")
        for i, (fact, at) in enumerate(zip(story.facts, depths, strict=True))
        if i != main
    )
    if template is None:
        around, before, after = None, "", closing(story.question, "", _HINT, chat=chat)
    else:
        around = frame(template, "haystack", story.question, where="task_template", strip=chat)
        before, after = around.opening, around.closing
    item = Item(
        needle=story.facts[main],
        question=story.question,
        opening=before,
        closing=after,
        question_at=around.question_at if around else (),
        answer=answer,
        avoid=_avoid(story),
        inserts=inserts,
        meta={
            "task": story.task,
            "file": story.file,
            "line": story.line,
            "story": story.start,
            "facts": list(story.facts),
            "supporting": list(story.supporting),
            "fact_depths": depths,
            "aliases": _orders(story.answers),
            "answer_in_needle": bool(holding),
        },
    )
    return item, depths[main]


def _avoid(story: Story) -> tuple[str, ...]:
    """Words that no sentence of the prose may hold: those of the answer and of the question that name something."""
    words = re.findall(r"[^\W\d_]+", " ".join((*story.answers, story.question)))
    return tuple(dict.fromkeys(w for w in words if len(w) > 1 and w.casefold() not in _COMMON))


def _orders(answers: Sequence[str]) -> list[str]:
    """Other orders of an answer's items, and "and" for the comma; a way (``s, e``) has one order alone."""
    if not 1 < len(answers) <= _MOST_ORDERS or _DIRECTIONS.issuperset(answers):
        return []
    orders = [", ".join(order) for order in itertools.permutations(answers)][1:]
    joined = [f"{', '.join(order[:-1])} and {order[-1]}" for order in itertools.permutations(answers)]
    return orders + joined


def _without_a_chance_answer(trial: Trial) -> Trial:
    """Drop an answer's span where no supporting fact holds it as words ("no" in "north")."""
    if trial.meta["answer_in_needle"] or "answer_span" not in trial.spans:
        return trial
    return replace(trial, spans={k: v for k, v in trial.spans.items() if k != "answer_span"})
