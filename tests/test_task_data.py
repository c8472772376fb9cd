"""Trials of tasks: MuSiQue, BABILong, recall and arithmetic from files, windows of running text."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dataset_files import MUSIQUE, lines, pieces
from test_datasets import Pieces, Plain, Words, mentions, text_of

from mechheads import datasets
from mechheads.datasets import (
    babilong,
    calculations,
    completions,
    musique,
    popqa,
    relations,
    text_windows,
    with_aliases,
)
from mechheads.datasets.babilong import read_stories
from mechheads.datasets.haystack import Haystack
from mechheads.datasets.recall_files import ALIASES
from mechheads.errors import InvalidInput, UnknownName
from mechheads.tasks import Task, scored_positions
from mechheads.trials import TrialSet

REAL = Path(__file__).parents[2] / "shared" / "data"

STORIES = "\n".join(
    f"1 {who} went to the {a}.\n2 {other} took the {thing} there.\n3 Where is {who}? \t{a}\t1\n"
    f"4 {who} moved to the {b}.\n5 {other} walked to the {a}.\n6 Where is the {thing}? \t{a}\t2 5\n"
    f"7 Where is {who}? \t{b}\t4"
    for (who, other), (a, b), thing in [
        (("Ann", "Bob"), ("attic", "cellar"), "lamp"),
        (("Cid", "Dot"), ("pantry", "attic"), "drum"),
        (("Eve", "Fay"), ("cellar", "pantry"), "cane"),
        (("Gus", "Hal"), ("studio", "cellar"), "flute"),
    ]
)
CAPITALS = {
    "name": "capital",
    "prompt_templates": ["The capital of {} is"],
    "prompt_templates_zs": ["The capital of {} is the city of", "{} is governed from the city of"],
    "samples": [
        {"subject": "France", "object": "Paris"},
        {"subject": "Japan", "object": "Tokyo"},
        {"subject": "Peru", "object": "Lima"},
        {"subject": "Ukraine", "object": "Kyiv"},
        {"subject": "Ukraine", "object": "Kiev"},
        {"subject": "Norway", "object": "Oslo"},
        {"subject": "Panama City", "object": "Panama"},
    ],
}
SPOKEN = {
    "name": "language",
    "prompt_templates": ["People in {} speak"],
    "samples": [{"subject": c, "object": f"{c}ish"} for c in ("Arrav", "Borun", "Cestol")],
}
POPQA = [
    {"id": 7, "question": "What is Ada's job?", "prop": "job", "subj": "Ada", "obj": "miller", "s_pop": 50,
     "possible_answers": '["miller", "mill owner"]'},
    {"id": 8, "question": "What is Ben's job?", "prop": "job", "subj": "Ben", "obj": "smith", "s_pop": 5000,
     "possible_answers": ["smith", "blacksmith", "miller"]},
    {"id": 9, "question": "Where was Ben born?", "prop": "birthplace", "subj": "Ben", "obj": "Velda", "s_pop": 5000,
     "possible_answers": '["Velda"]'},
    {"id": 10, "question": "Where in Velda was Cy born?", "prop": "birthplace", "subj": "Cy", "obj": "Old Velda",
     "s_pop": 9, "possible_answers": '["Old Velda", "Velda"]'},
    {"id": 11, "question": "What is Cy's job?", "prop": "job", "subj": "Cy", "obj": "baker", "s_pop": 9,
     "possible_answers": '["baker"]'},
]  # fmt: skip
SUMS = [{"context": f"\n\nQ: What is ({a} + 8) * 2?\n\nA:", "completion": f" {(a + 8) * 2}"} for a in (9, 1, 5, 3)]


@pytest.fixture
def story_file(tmp_path: Path) -> Path:
    path = tmp_path / "qa2_small_test.txt"
    path.write_text(STORIES, encoding="utf-8")
    return path


def prose(name: str, count: int = 40) -> str:
    return " ".join(f"The {name} mule number {k} slept well under a hedge." for k in range(count))


# -- BABILong ------------------------------------------------------------------------------------------


def slow_stories(text: str) -> list[tuple[str, str, list[str], list[str]]]:
    """Question, answer, facts before it and supporting ones, one line at a time."""
    found, told = [], {}
    for line in text.splitlines():
        number, rest = line.split(" ", 1)
        if number == "1":
            told = {}
        if "?" in rest:
            question, answer, support = rest.split("\t")
            found.append((question.strip(), answer, list(told.values()), [told[s] for s in support.split()]))
        else:
            told[number] = rest
    return found


def test_stories_are_read():
    read = read_stories(STORIES, "here/qa2_small_test.txt")
    mine = [(s.question, ", ".join(s.answers), list(s.facts), [s.facts[i] for i in s.supporting]) for s in read]
    assert mine == slow_stories(STORIES) and len(mine) == 12
    assert {s.task for s in read} == {"qa2"} and {s.start for s in read} == {1, 8, 15, 22}


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("encoder", [Words, Pieces])
def test_babilong_scatters_the_facts_in_order(encoder, chat, story_file):
    model = encoder()
    trials = babilong(model, story_file, context_length=300, chat=chat)
    assert len(trials) == 12 and trials.name == "babilong" and trials[0].id == "babilong-0000"
    told = {(q, a, tuple(f)): s for q, a, f, s in slow_stories(STORIES)}
    for trial in trials:
        assert 280 <= len(trial.tokens) <= 300
        meta, whole = trial.meta, text_of(model, trial)
        support = told[meta["question"], trial.answer or "", tuple(meta["facts"])]
        places = [whole.index(fact) for fact in meta["facts"]]
        assert places == sorted(places) and meta["fact_depths"] == sorted(set(meta["fact_depths"]))
        # Neighbours that share a token at their seam are one span.
        needles, others = (" ".join(pieces(model, trial, k)) for k in ("needle", "distractor"))
        assert all(f in needles and f not in others for f in support)
        assert all(f in others and f not in needles for f in meta["facts"] if f not in support)
        assert [meta["facts"][i] for i in meta["supporting"]] == support
        assert all((trial.answer or "?") in p for p in pieces(model, trial, "answer_span"))
        assert set(trial.positions("answer_span")) <= set(trial.positions("needle"))
        assert whole.count("Where is") == 1 and meta["question"] in text_of(model, trial, "question")
        assert meta["aliases"] == [] and meta["task"] == "qa2" and meta["file"] == story_file.name
    assert Task.of("b", trials).measure == "answer"


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 10**6), length=st.integers(140, 500))
def test_babilong_splits_share_no_story(seed, length):
    path = Path(__file__).parent / "data" / "babi.txt"
    trials = babilong(Words(), path, n=6, seed=seed, context_length=length)
    where = {(t.meta["file"], t.meta["story"]): t.split for t in trials}
    assert all(where[t.meta["file"], t.meta["story"]] == t.split for t in trials)
    assert [t.split for t in trials].count("test") == 3
    assert all(len(t.tokens) <= length for t in trials)


def test_babilong_keeps_prose_that_would_mislead_out(story_file, tmp_path):
    own = tmp_path / "own.txt"
    own.write_text("Ann sang. An attic burned. A lamp fell. Where is the sea? No rain fell. " + prose("old", 60))
    model = Words()
    trials = babilong(model, story_file, context_length=400, haystack=own, split=None)
    ask = {
        t.meta["question"]: t.meta["haystack_left_out"] for t in trials if t.meta["story"] == 1 and t.answer != "attic"
    }
    assert ask == {"Where is Ann?": ["Ann sang."]}
    lamp = next(t for t in trials if t.meta["question"] == "Where is the lamp?")
    assert lamp.meta["haystack_left_out"] == ["An attic burned.", "A lamp fell."]


def test_babilong_without_prose_and_with_a_template(story_file):
    model = Words()
    trial = babilong(model, story_file, n=1, split=None, context_length=None, seed=4)[0]
    assert text_of(model, trial) == f"{' '.join(trial.meta['facts'])}\n\nQuestion: {trial.meta['question']}\nAnswer:"
    asked = babilong(model, story_file, n=2, context_length=200, task_template="{question}\n{haystack}\nSo, {question}")
    assert all(len(t.spans["question"]) == 2 and text_of(model, t).startswith(t.meta["question"]) for t in asked)


def test_babilong_answers_of_several_items(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(
        "1 Ann took the apple.\n2 Ann took the milk.\n3 What is Ann carrying?\tapple,milk\t1 2\n"
        "1 Go north to the inn.\n2 How do you go?\tn,s\t1\n"
        "1 Bob went north.\n2 Is Bob here?\tno\t1\n"
    )
    listed, way, no = babilong(Words(), path, split=None, context_length=None, n=3, seed=0)[:3]
    by = {t.answer: t for t in (listed, way, no)}
    assert by["apple, milk"].meta["aliases"] == ["milk, apple", "apple and milk", "milk and apple"]
    assert by["n, s"].meta["aliases"] == [] and by["no"].meta["task"] == "own"
    assert "answer_span" not in by["no"].spans and not by["no"].meta["answer_in_needle"]  # the "no" of "north"


def test_babilong_takes_several_files(story_file, tmp_path):
    other = tmp_path / "qa1.txt"
    other.write_text(STORIES.replace("attic", "loft"), encoding="utf-8")
    trials = babilong(Words(), [story_file, other], context_length=None, max_facts=2)
    assert len(trials) == 8 and trials.options["left_out"] == 16 and {t.meta["task"] for t in trials} == {"qa1", "qa2"}
    (tmp_path / "sub").mkdir()
    again = tmp_path / "sub" / "qa1.txt"
    again.write_text(STORIES)
    with pytest.raises(InvalidInput, match=r"qa1\.txt and .*qa1\.txt have one file name, which trials are known by"):
        babilong(Words(), [other, again])
    with pytest.raises(InvalidInput, match=r"qa1\.txt is given twice; give it once\.$"):
        babilong(Words(), [other, other])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"own\.txt has no question; one is 'N question<TAB>answer<TAB>supporting line numbers'\.$"),
        ("1 Ann sat.\nhello", r"own\.txt, line 2 is 'hello'; a bAbI line is a number, a space and a text\.$"),
        ("2 Ann sat.", r"line 1 has the number 2 after 0; numbers rise in a story, which begins with 1\.$"),
        ("1 Ann sat.\n3 Bob sat.\n2 Cy sat.", r"line 3 has the number 2 after 3; numbers rise in a story"),
        ("1 Ann sat.\n2 Who?\t\t1", r"line 2 has the question 'Who\?' with the answer ''; give both\.$"),
        (
            "1 Ann sat.\n2 Who?\tAnn",
            r"line 2 names the supporting lines \(none\); give numbers of facts told before it",
        ),
        ("1 Ann sat.\n2 Who?\tAnn\t3", r"names the supporting lines 3; give numbers of facts told before it \(1\)\.$"),
        ("1 Who?\tAnn\t1", r"names the supporting lines 1; give numbers of facts told before it \(there are none\)"),
    ],
)
def test_babilong_broken_files_are_named(content, message, tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(content)
    with pytest.raises(InvalidInput, match=message):
        babilong(Words(), path)


def test_babilong_options_refused(story_file, tmp_path):
    with pytest.raises(InvalidInput, match=r"^the bAbI file .*none\.txt does not exist; check the path\.$"):
        babilong(Words(), tmp_path / "none.txt")
    with pytest.raises(InvalidInput, match=r"is a folder; give its files\.$"):
        babilong(Words(), tmp_path)
    with pytest.raises(InvalidInput, match=r"has no question with at most max_facts=1 facts before it\.$"):
        babilong(Words(), story_file, max_facts=1)
    with pytest.raises(InvalidInput, match=r"^max_facts=0: give a whole number of 1 or more, or None\.$"):
        babilong(Words(), story_file, max_facts=0)
    with pytest.raises(InvalidInput, match=r"has 12 questions, too few for n=13; use n=12 at most"):
        babilong(Words(), story_file, n=13)
    with pytest.raises(InvalidInput, match=r"^context_length=40 is too small: the needle, the question and what"):
        babilong(Words(), story_file, context_length=40)
    with pytest.raises(InvalidInput, match=r"^cannot read bAbI files from \[\]; give a file or a list of files\.$"):
        babilong(Words(), [])


# -- MuSiQue ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", [Words, Pieces])
def test_musique(encoder):
    model = encoder()
    rows = {row["id"]: row for row in lines(MUSIQUE)}
    trials = musique(model, MUSIQUE)
    assert trials.options["left_out"] == {"unanswerable": 1} and len(trials) == trials.options["n"] == 4
    assert [t.id for t in trials] == [f"musique-{i:04d}" for i in range(4)] and trials.name == "musique"
    for trial in trials:
        row = rows[trial.meta["record"]]
        assert trial.answer == row["answer"] and trial.meta["aliases"] == row["answer_aliases"]
        assert trial.meta["kind"] == "musique" and trial.meta["hops"] == int(row["id"][0])
        want = sorted(p["paragraph_text"] for p in row["paragraphs"] if p["is_supporting"])
        assert sorted(p.split("\n", 1)[1].strip() for p in pieces(model, trial, "needle")) == want
        assert sorted(trial.meta["titles"]) == sorted(p["title"] for p in row["paragraphs"])
    orders = {tuple(t.meta["titles"]) for seed in range(4) for t in musique(model, MUSIQUE, seed=seed)}
    assert len(orders) > 8  # of four questions, each in its own order with every seed
    assert Task.of("m", trials).measured[:5] == ("correct", "exact_match", "rouge1_recall", "rougeL_f", "f1")


def test_musique_drops_paragraphs_that_do_not_support():
    supporting = {r["id"]: sum(p["is_supporting"] for p in r["paragraphs"]) for r in lines(MUSIQUE)}
    for count in (2, 3):
        for trial in musique(Words(), MUSIQUE, n_paragraphs=count, split=None):
            assert len(trial.spans["documents"]) <= count
            assert len(trial.spans["needle"]) == supporting[trial.meta["record"]]
    lengths = [len(t.tokens) for t in musique(Words(), MUSIQUE, context_length=90, split=None)]
    assert max(lengths) <= 90


def test_musique_hops_and_decomposition():
    rows = lines(MUSIQUE)
    rows[0]["question_decomposition"] = [{"id": k, "question": f"Step {k}?"} for k in range(3)]
    (trial,) = musique(Words(), rows, hops=3, split=None)
    assert trial.meta["hops"] == 3 and trial.meta["single_hops"] == ["Step 0?", "Step 1?", "Step 2?"]
    with pytest.raises(UnknownName, match=r"^unknown number of hops of records '4'\. Known: 2, 3\.$"):
        musique(Words(), rows, hops=4)
    with pytest.raises(InvalidInput, match=r"^hops=5: give 2, 3 or 4, several of them such as \(2, 3\), or None"):
        musique(Words(), rows, hops=5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answer": " "}, r"^records, record 1 has no answer; give 'answer', or mark it \"answerable\": false\.$"),
        ({"answerable": False}, r"^records has no answerable question\.$"),
        ({"question": None}, "record 1 has no 'question'"),
    ],
)
def test_musique_broken_records_are_named(change, message):
    with pytest.raises(InvalidInput, match=message):
        musique(Words(), [{**lines(MUSIQUE)[0], **change}], split=None)


# -- recall --------------------------------------------------------------------------------------------


def test_relations():
    model = Words()
    trials = relations(model, [CAPITALS, SPOKEN])
    assert trials.options["given_away_left_out"] == 1  # Panama, of Panama City
    assert len(trials) == trials.options["n"] == 8
    kyiv = next(t for t in trials if t.meta["subject"] == "Ukraine")
    assert kyiv.answer == "Kyiv" and kyiv.meta["aliases"] == ["Kiev"]
    wordings = [*CAPITALS["prompt_templates_zs"], *SPOKEN["prompt_templates"]]
    for trial in trials:
        whole = text_of(model, trial)
        assert whole in [w.replace("{}", trial.meta["subject"]) for w in wordings]
        assert text_of(model, trial, "question") == whole and set(trial.spans) == {"question"}
    left, right = ({t.answer for t in trials.split(s)} for s in ("calibration", "test"))
    assert len(left) == len(right) == 4 and not left & right


def test_relations_with_solved_ones_before():
    model = Words()
    trials = relations(model, [CAPITALS, SPOKEN], names="capital", template="plain", shots=2, split=None)
    for trial in trials:
        *solved, last = text_of(model, trial).split("\n\n")
        assert last == f"The capital of {trial.meta['subject']} is"
        pairs = [re.fullmatch(r"The capital of (.+) is (\w+)\.", line) for line in solved]
        assert len(pairs) == 2 and all(
            m and {m[1], m[2]}.isdisjoint({trial.answer, trial.meta["subject"]}) for m in pairs
        )
        assert all(mentions(gold, text_of(model, trial)) == 0 for gold in (str(trial.answer), *trial.meta["aliases"]))
    with pytest.raises(InvalidInput, match=r"shots=6, but the relation 'capital' has only 5 samples that do not hold"):
        relations(model, [CAPITALS, SPOKEN], names=["capital"], shots=6, split=None)


def test_relations_of_a_folder(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, content in (("b.json", CAPITALS), ("sub/a.json", SPOKEN)):
        (tmp_path / name).write_text(json.dumps(content, indent=1), encoding="utf-8")
    folder = relations(Words(), tmp_path, split=None, n=8)
    assert {t.answer for t in folder} == {t.answer for t in relations(Words(), [CAPITALS, SPOKEN], split=None)}
    files = relations(Words(), [tmp_path / "b.json"], split=None)
    assert {t.meta["relation"] for t in files} == {"capital"}
    with pytest.raises(InvalidInput, match=r"^the folder .* holds no \.json file; give relation files\.$"):
        (tmp_path / "empty").mkdir()
        relations(Words(), tmp_path / "empty")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": []}, r"record 1 has no samples; each is"),
        ({"samples": ["x"]}, r"record 1, sample 1 is 'x'; it must be an object with 'subject' and 'object'\.$"),
        ({"samples": [{"subject": "x"}]}, r"record 1, sample 1 has no 'object'"),
        ({"prompt_templates_zs": ["no place"]}, r"the template 'no place' must hold \{\} once, for the subject\.$"),
        ({"prompt_templates": None, "prompt_templates_zs": None}, "record 1 has no 'prompt_templates'"),
        ({"name": None}, "record 1 has no 'name'"),
    ],
)
def test_relations_broken_records_are_named(change, message):
    with pytest.raises(InvalidInput, match=message):
        relations(Words(), [{**CAPITALS, **change}], split=None)


def test_relations_options_refused():
    with pytest.raises(UnknownName, match=r"^unknown relation of records 'capitals'\. Did you mean 'capital'"):
        relations(Words(), [CAPITALS], names="capitals")
    with pytest.raises(UnknownName, match=r"^unknown template of relations 'zs'"):
        relations(Words(), [CAPITALS], template="zs")
    with pytest.raises(InvalidInput, match=r"^shots=-1: give a whole number of 0 or more\.$"):
        relations(Words(), [CAPITALS], shots=-1)


def test_popqa():
    model = Words()
    trials = popqa(model, POPQA, split=None)
    assert trials.options["given_away_left_out"] == 1  # the one born in Velda
    by = {t.meta["record"]: t for t in trials}
    assert set(by) == {7, 8, 9, 11}
    assert by[7].answer == "miller" and by[7].meta["aliases"] == ["mill owner"]
    assert by[8].meta["aliases"] == ["blacksmith", "miller"] and by[8].meta["s_pop"] == 5000
    assert text_of(model, by[9]) == "Question: Where was Ben born?\nAnswer:"
    assert [t.meta["record"] for t in popqa(model, POPQA, split=None, min_popularity=1000, props="job")] == [8]


def test_popqa_answers_in_any_form_stay_in_one_split():
    for seed in range(6):
        where = {t.meta["record"]: t.split for t in popqa(Words(), POPQA, seed=seed)}
        assert where[7] == where[8] and set(where.values()) == {"calibration", "test"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"possible_answers": "[miller"}, r"record 1: 'possible_answers' is '\[miller', not JSON"),
        ({"possible_answers": "3"}, r"record 1: 'possible_answers' is 3, a int"),
        ({"possible_answers": []}, r"'possible_answers' is \[\]; give a list of non-empty texts"),
        ({"question": ""}, "'question' is empty"),
    ],
)
def test_popqa_broken_records_are_named(change, message):
    with pytest.raises(InvalidInput, match=message):
        popqa(Words(), [{**POPQA[0], **change}], split=None)


def test_popqa_options_refused():
    with pytest.raises(UnknownName, match=r"^unknown prop of records 'jobs'\. Did you mean 'job'"):
        popqa(Words(), POPQA, props="jobs")
    with pytest.raises(InvalidInput, match=r"^records has no record with min_popularity=10000; use a smaller one\.$"):
        popqa(Words(), POPQA, min_popularity=10000)


def test_aliases_are_added_to_trials():
    trials = datasets.recall(Words(), n=75, split=None)
    more = with_aliases(trials)
    assert {t.answer for t in more if t.meta["aliases"]} == set(ALIASES)
    assert next(t for t in more if t.answer == "Kyiv").meta["aliases"] == ["Kiev"] and more.hash != trials.hash
    twice = with_aliases(more, {"kyiv": ["Kiew", "Kiev"]})
    assert next(t for t in twice if t.answer == "Kyiv").meta["aliases"] == ["Kiev", "Kiew"]
    with pytest.raises(InvalidInput, match=r"^none of the 1 answers with aliases \(\['narnia'\]\.\.\.\) is an"):
        with_aliases(trials, {"Narnia": ["Cair Paravel"]})
    with pytest.raises(InvalidInput, match=r"^the aliases of 'Kyiv' are 'Kiev'; give a list of non-empty texts\.$"):
        with_aliases(trials, {"Kyiv": "Kiev"})


# -- arithmetic ----------------------------------------------------------------------------------------


@settings(max_examples=20, deadline=None)
@given(
    digits=st.sampled_from([1, 2]),
    signs=st.sampled_from(["+", "-", "*", "+-", "+-*"]),
    shots=st.integers(0, 4),
    seed=st.integers(0, 10**6),
)
def test_calculations_are_right_and_given_away_nowhere(digits, signs, shots, seed):
    model = Words()
    trials = calculations(model, digits=digits, operations=list(signs), shots=shots, seed=seed, n=10)
    for trial in trials:
        sums = re.findall(r"What is (\d+) ([-+*]) (\d+)\?\nA:(?: (\d+))?", text_of(model, trial))
        assert len(sums) == shots + 1 and {op for _, op, _, _ in sums} <= set(signs)
        for left, op, right, result in sums:
            assert len(left) == len(right) == digits
            value = {"+": int.__add__, "-": int.__sub__, "*": int.__mul__}[op](int(left), int(right))
            assert value >= 0 and str(value) == (result or trial.answer)
        assert mentions(trial.answer or "", text_of(model, trial)) == 0
    left, right = ({t.answer for t in trials.split(s)} for s in ("calibration", "test"))
    assert not left & right


def test_calculations_take_turns_and_follow_prose():
    trials = calculations(Words(), n=12, operations=("+", "*"), split=None, context_length=200, chat=True)
    assert all(190 <= len(t.tokens) <= 200 for t in trials)
    assert {t.meta["operation"] for t in trials} == {"+", "*"}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"digits": 3}, r"^digits=3: give 1 or 2\.$"),
        ({"operations": ()}, r"^operations is empty; give '\+', '-' or '\*', or several of them\.$"),
        ({"operations": "/"}, r"^unknown operation '/'\. Known: \*, \+, -\.$"),
        ({"shots": 21}, r"^shots=21: give a whole number from 0 to 20\.$"),
        ({"n": 100, "digits": 1, "operations": "*"}, r"^arithmetic of 1 digits has 64 calculations, too few for n=100"),
    ],
)
def test_calculations_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        calculations(Words(), **options)


def test_completions(tmp_path):
    path = tmp_path / "sums.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in SUMS), encoding="utf-8")
    model = Words()
    trials = completions(model, path)
    assert {t.answer for t in trials} == {"34", "18", "26", "22"} and len(trials.split("test")) == 2
    for trial in trials:
        assert trial.meta["completion"] == f" {trial.answer}" and trial.meta["aliases"] == []
        assert text_of(model, trial) == SUMS[int(trial.meta["record"][-1]) - 1]["context"].lstrip()
        assert text_of(model, trial, "question") == text_of(model, trial)
    (chat,) = completions(model, [{**SUMS[0], "aliases": ["thirty-four"]}], split=None, chat=True)
    assert "completion" not in chat.meta and chat.meta["aliases"] == ["thirty-four"]
    assert all(80 <= len(t.tokens) <= 100 for t in completions(model, SUMS, context_length=100))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"context": "Q:"}, r"^records, record 1 has no 'completion'"),
        ({"context": "Q:", "completion": " "}, "'completion' is empty"),
        ({"context": 3, "completion": "4"}, "'context' is 3, a int"),
        ({"context": "Q:", "completion": "4", "aliases": [4]}, r"'aliases' is \[4\]; give a list of non-empty texts"),
    ],
)
def test_completions_broken_records_are_named(row, message):
    with pytest.raises(InvalidInput, match=message):
        completions(Words(), [row], split=None)


# -- running text ---------------------------------------------------------------------------------------

WIKI = (
    f" = Mules = \n {prose('red')}\n = = Sleep = = \n {prose('blue')}\n = Goats = \n {prose('green')}\n x = y = z \n"
    f" = Carts = \n {prose('brown')}\n = Empty = \n"
)


@pytest.mark.parametrize("encoder", [Words, Pieces])
def test_windows_of_articles(encoder, tmp_path):
    path = tmp_path / "wiki.txt"
    path.write_text(WIKI, encoding="utf-8")
    model = encoder()
    trials = text_windows(model, path, n=8, length=50)
    assert trials.options["split_by"] == "document" and trials.options["n"] == len(trials) == 8
    colours = {"red": "Mules", "blue": "Mules", "green": "Goats", "brown": "Carts"}
    for trial in trials:
        whole = text_of(model, trial)
        assert len(trial.tokens) == 50 and not re.search("= (Mules|Sleep|Goats|Carts|Empty)", whole)
        assert {f"wiki.txt: {colours[c]}" for c in colours if c in whole.split()} <= {trial.meta["document"]}
        assert scored_positions(trial) == tuple(range(1, 50)) and not trial.spans
        assert (trial.tokens[0] == 0) == model.bos
    where = {}
    for trial in trials:
        assert where.setdefault(trial.meta["document"], trial.split) == trial.split
        assert trial.meta["kind"] == "text" and trial.answer is None
    assert Task.of("t", trials).measure == "text"


@settings(max_examples=20, deadline=None)
@given(length=st.integers(2, 60), n=st.integers(2, 12), seed=st.integers(0, 999), unscored=st.integers(1, 59))
def test_windows_of_one_document_share_no_token(length, n, seed, unscored):
    text = prose("grey", 80)
    hay = Haystack((text,), "mine", False)
    unscored = min(unscored, length - 1)
    model = Words()
    trials = text_windows(model, hay, n=n, length=length, seed=seed, unscored=unscored)
    assert trials.options["split_by"] == "window" and len({t.id for t in trials}) == n
    places = sorted((t.meta["start"], t.meta["stop"]) for t in trials)
    assert all(left[1] <= right[0] for left, right in itertools.pairwise(places))
    for trial in trials:
        assert model.decode(trial.tokens) == text[trial.meta["start"] : trial.meta["stop"]]
        assert scored_positions(trial) == tuple(range(unscored, length))
        assert trial.split in ("calibration", "test")


def test_windows_of_folders_and_json_lines(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(prose(name), encoding="utf-8")
    trials = text_windows(Words(), tmp_path, n=4, length=20)
    assert {t.meta["document"] for t in trials} == {"a.txt", "b.txt"}
    other = tmp_path / "c.jsonl"
    other.write_text(json.dumps({"text": prose("c")}), encoding="utf-8")
    assert len(text_windows(Words(), other, n=4, length=20)) == 4
    assert text_windows(Words(), n=4, length=20).options["source"] == "shipped"


def test_windows_refused(tmp_path, llama):
    path = tmp_path / "short.txt"
    path.write_text(" = One = \nA mule slept.\n", encoding="utf-8")
    for options, message in (
        ({"length": 1}, r"^length=1: give a whole number of tokens of 2 or more, such as 256\.$"),
        ({"length": 8, "unscored": 8}, r"^unscored=8: give a whole number of tokens from 1 to 7, so that some of the"),
        ({"length": 9}, r"short\.txt has no document of 9 tokens, so no window of length=9 can be cut; use a"),
        ({"length": 2, "n": 9}, r"short\.txt has 2 windows of 2 tokens, too few for n=9; use n=2 at most\.$"),
    ):
        with pytest.raises(InvalidInput, match=message):
            text_windows(Words(), path, **options)
    path.write_text(" = One = \n\n", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"short\.txt holds nothing but white space and headings\.$"):
        text_windows(Words(), path)
    with pytest.raises(InvalidInput, match=r"none\.txt does not exist"):
        text_windows(Words(), tmp_path / "none.txt")
    with pytest.raises(InvalidInput, match="context_length=129 is over the model's limit of 128 tokens"):
        text_windows(llama, length=129)


# -- all of them --------------------------------------------------------------------------------------

MAKERS: dict[str, Any] = {
    "babilong": lambda model, **o: babilong(model, Path(__file__).parent / "data" / "babi.txt", **{"n": 6, **o}),
    "musique": lambda model, **o: musique(model, MUSIQUE, **o),
    "relations": lambda model, **o: relations(model, [CAPITALS, SPOKEN], **o),
    "popqa": lambda model, **o: popqa(model, POPQA, **o),
    "calculations": lambda model, **o: calculations(model, **{"n": 8, **o}),
    "completions": lambda model, **o: completions(model, SUMS, **o),
    "text": lambda model, **o: text_windows(model, **{"n": 6, "length": 40, **o}),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_plain_data_and_seeded(kind, tmp_path):
    trials = MAKERS[kind](Plain(), seed=1)
    assert trials.name == trials.options["kind"] == kind
    assert TrialSet.load(trials.save(tmp_path / "set.jsonl")).hash == trials.hash
    assert trials.hash == MAKERS[kind](Plain(), seed=1).hash
    assert any(trials.hash != MAKERS[kind](Plain(), seed=seed).hash for seed in range(2, 6))
    assert [t.id for t in trials] == [f"{kind}-{i:04d}" for i in range(len(trials))]
    assert {t.split for t in trials} == {"calibration", "test"}
    assert {t.split for t in MAKERS[kind](Plain(), split=None)} == {None}
    assert str(Path(__file__).parent) not in json.dumps([t.to_dict() for t in trials])


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n=0 trials"),
        ({"split": 1}, "split=1: give the calibration share"),
        ({"n": 1}, "leaves a split without a trial"),
    ],
)
def test_options_refused(kind, options, message):
    with pytest.raises(InvalidInput, match=message):
        MAKERS[kind](Words(), **options)


# -- real files -----------------------------------------------------------------------------------------


def real(*parts: str) -> Path:
    path = REAL.joinpath(*parts)
    if not path.exists():
        pytest.skip(f"{path} is not there")
    return path


@pytest.mark.realdata
def test_published_babi():
    files = [real("babi", f) for f in ("qa1_single-supporting-fact_test.txt", "qa2_two-supporting-facts_test.txt")]
    trials = babilong(Words(), files, n=40, context_length=1024, max_facts=20, haystack=real("prose"))
    assert {t.meta["task"] for t in trials} == {"qa1", "qa2"} and all(len(t.tokens) <= 1024 for t in trials)
    for trial in trials:
        assert len(trial.meta["supporting"]) == int(trial.meta["task"][2:]) and trial.meta["answer_in_needle"]
    assert len(babilong(Words(), files[0], context_length=None)) == 1000


@pytest.mark.realdata
def test_published_musique():
    trials = musique(Words(), real("musique", "musique_100.jsonl"), n=20, context_length=1024, n_paragraphs=10)
    assert all(len(t.tokens) <= 1024 and len(t.spans["needle"]) == t.meta["hops"] == 2 for t in trials)
    orders = [t.meta["document_ids"] for t in trials]
    assert any(o != sorted(o, key=int) for o in orders)


@pytest.mark.realdata
def test_published_recall():
    facts = relations(Words(), real("relations", "factual"), n=40, shots=1)
    assert len({t.meta["relation"] for t in facts}) > 5 and facts.options["given_away_left_out"] == 27
    known = popqa(Words(), real("popqa", "popqa_fields_1000.json"), n=40)
    assert sum(len(t.meta["aliases"]) for t in known) > 40


@pytest.mark.realdata
def test_published_wikitext():
    trials = text_windows(Words(), real("wikitext", "wikitext2_raw_test_first_half.txt"), n=20, length=128)
    assert trials.options["split_by"] == "document" and len({t.meta["document"] for t in trials}) > 3
    assert all(": " in t.meta["document"] and len(t.tokens) == 128 for t in trials)
