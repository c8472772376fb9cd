"""Questions over several documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_dataset_files import MUSIQUE, QRHEAD, lines, pieces
from test_datasets import Pieces, Words, text_of

from mechheads.datasets import documents
from mechheads.errors import InvalidInput, UnknownName

# -- documents ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("encoder", [Words, Pieces])
def test_documents_spans(encoder, chat):
    model = encoder()
    rows = {row["id"]: row for row in lines(MUSIQUE)}
    trials = documents(model, MUSIQUE, chat=chat)
    assert trials.options["unanswerable_left_out"] == 1 and len(trials) == 4
    for trial in trials:
        row = rows[trial.meta["record"]]
        spans = trial.spans["documents"]
        assert len(spans) == len(row["paragraphs"]) and trial.meta["documents_dropped"] == 0
        for k, (paragraph, text) in enumerate(
            zip(row["paragraphs"], pieces(model, trial, "documents"), strict=True), 1
        ):
            assert f"{paragraph['title']}\n{paragraph['paragraph_text']}" in text
            assert str(k) in text[:3] and len(text) <= len(paragraph["title"] + paragraph["paragraph_text"]) + 9
        gold = [k for k, p in enumerate(row["paragraphs"]) if p["is_supporting"]]
        assert trial.meta["gold"] == gold and trial.spans["needle"] == tuple(spans[k] for k in gold)
        assert row["question"] in text_of(model, trial, "question")
        assert trial.answer == row["answer"] and trial.meta["aliases"] == row["answer_aliases"]
        found = pieces(model, trial, "answer_span")
        gold_text = " ".join(f"{p['title']}\n{p['paragraph_text']}" for p in map(row["paragraphs"].__getitem__, gold))
        assert len(found) == gold_text.count(row["answer"])
        assert all(row["answer"] in text for text in found)
        assert set(trial.positions("answer_span")) <= set(trial.positions("needle"))


def test_documents_in_the_layout_of_qrhead():
    model = Words()
    towns, boats = documents(model, QRHEAD, split=None)
    assert towns.answer is None and towns.meta["gold"] == [1] and towns.meta["document_ids"] == ["q0_a", "q0_b"]
    assert pieces(model, towns, "documents")[1].strip() == "[2] Marston\nMarston is a town of 20000 people."
    assert pieces(model, towns, "documents")[0].strip() == "[1] Kelby is a town of 900 people."
    assert "answer_span" not in towns.spans
    assert boats.answer == "12" and pieces(model, boats, "answer_span") == [" 12"]


def test_documents_that_share_gold_stay_in_one_split():
    for seed in range(8):
        where = {t.meta["record"]: t.split for t in documents(Words(), MUSIQUE, seed=seed)}
        assert where["2hop__2"] == where["2hop__3"]


@settings(max_examples=30, deadline=None)
@given(length=st.integers(70, 140), seed=st.integers(0, 99), order=st.sampled_from(["file", "shuffled"]))
def test_documents_budget_keeps_gold_and_as_many_others_as_fit(length, seed, order):
    model = Words()
    whole = documents(model, MUSIQUE, split=None, seed=seed)
    trials = documents(model, MUSIQUE, split=None, seed=seed, context_length=length, order=order)
    for trial, full in zip(trials, whole, strict=True):
        assert trial.meta["record"] == full.meta["record"]
        assert len(trial.tokens) <= length
        gold = {trial.meta["titles"][k] for k in trial.meta["gold"]}
        assert gold == {full.meta["titles"][k] for k in full.meta["gold"]}
        assert trial.meta["documents_dropped"] == len(full.meta["titles"]) - len(trial.meta["titles"])
        if order == "file":
            assert trial.meta["document_ids"] == sorted(trial.meta["document_ids"])
        if len(full.tokens) <= length:
            assert trial.meta["documents_dropped"] == 0


def test_documents_most():
    trials = documents(Words(), MUSIQUE, split=None, max_documents=3)
    assert [len(t.spans["documents"]) for t in trials] == [3, 3, 2, 2]
    assert {t.meta["record"]: t.meta["answer_in_other_documents"] for t in documents(Words(), MUSIQUE, split=None)} == {
        "2hop__1": 1, "2hop__2": 0, "2hop__3": 0, "2hop__5": 0
    }  # fmt: skip
    with pytest.raises(InvalidInput, match="line 1 has 2 gold paragraphs, more than max_documents=1"):
        documents(Words(), MUSIQUE, max_documents=1)


def test_documents_too_long_names_the_length_that_is_enough():
    with pytest.raises(InvalidInput, match=r"of 4 questions do not fit in context_length=50.*line 1") as caught:
        documents(Words(), MUSIQUE, context_length=50)
    enough = int(re.search(r"context_length of (\d+) or more", str(caught.value))[1])  # pyright: ignore[reportOptionalSubscript]
    assert max(len(t.tokens) for t in documents(Words(), MUSIQUE, context_length=enough)) == enough
    with pytest.raises(InvalidInput, match="the model's limit of 50 tokens"):
        documents(Words(n_ctx=50), MUSIQUE)


def test_documents_template_and_answers_in_a_list():
    rows = [{**lines(MUSIQUE)[0], "answer": ["Edith Marsh", "Marsh"]}]
    model = Words()
    (trial,) = documents(model, rows, split=None, template="{question}\n{documents}\nSo, {question}")
    assert len(trial.spans["question"]) == 2 and trial.spans["question"][0].start == 0
    assert trial.answer == "Edith Marsh" and trial.meta["aliases"] == ["Marsh", "E. Marsh"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"paragraphs": None}, "record 1 has no 'paragraphs'"),
        ({"paragraphs": []}, "record 1 has no paragraphs"),
        ({"paragraphs": ["text"]}, "record 1, paragraph 1 is 'text'; it must be an object"),
        ({"paragraphs": [{"idx": 0}]}, "paragraph 1 has no 'paragraph_text'"),
        ({"paragraphs": [{"paragraph_text": "A."}]}, "record 1 has no gold paragraph"),
        ({"paragraphs": [{"paragraph_text": "A.", "is_supporting": "yes"}]}, "'is_supporting' is 'yes', a str"),
        ({"gt_docs": [9]}, r"gt_docs names \['9'\], but no paragraph has that idx"),
        ({"gt_docs": []}, "record 1 has no gold paragraph"),
        ({"paragraphs": [{"idx": 1, "paragraph_text": "A.", "is_supporting": True}] * 2}, "have the same idx"),
        ({"question": None}, "record 1 has no 'question'"),
        ({"answer": {"a": 1}}, "'answer' is {'a': 1}, a dict"),
        ({"answer_aliases": [1]}, r"'answer_aliases' is \[1\]"),
        ({"answerable": False}, "has no answerable question"),
        ({"answerable": "no"}, "'answerable' is 'no', a str"),
    ],
)
def test_documents_broken_records_are_named(change, message):
    with pytest.raises(InvalidInput, match=message):
        documents(Words(), [{**lines(MUSIQUE)[0], **change}], split=None)


def test_documents_options_refused():
    with pytest.raises(UnknownName, match=r"order of documents 'shuffle'\. Did you mean 'shuffled'"):
        documents(Words(), MUSIQUE, order="shuffle")
    with pytest.raises(InvalidInput, match="max_documents=0: give a whole number"):
        documents(Words(), MUSIQUE, max_documents=0)
    with pytest.raises(InvalidInput, match=r"has 4 questions, too few for n=5; use n=4"):
        documents(Words(), MUSIQUE, n=5)
    with pytest.raises(InvalidInput, match=r"record 2 has the id '2hop__1' of record 1"):
        documents(Words(), [lines(MUSIQUE)[0]] * 2)
    with pytest.raises(InvalidInput, match=r"template: the template has the placeholders \['question'\]"):
        documents(Words(), MUSIQUE, template="{question}")


# -- real text ---------------------------------------------------------------------------------------


@pytest.mark.realdata
def test_published_questions():
    path = Path(__file__).parents[2] / "shared" / "data" / "musique" / "musique_100.jsonl"
    if not path.is_file():
        pytest.skip(f"{path} is not there")
    model = Words()
    trials = documents(model, path, n=30, context_length=1500)
    assert len(trials) == 30
    for trial in trials:
        assert 2 <= len(trial.spans["needle"]) <= 4 and len(trial.tokens) <= 1500
        for k, text in enumerate(pieces(model, trial, "documents")):
            assert text.strip().startswith(f"[{k + 1}] {trial.meta['titles'][k]}")
