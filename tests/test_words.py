"""Words in texts however they are spelt, answers that must not leak into the prose, and names too alike to part."""

from __future__ import annotations

import random
import re
import unicodedata
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from test_dataset_files import entries, pieces
from test_datasets import Words, prose, text_of

from mechheads.datasets import documents, needles, niah, nolima, ruler
from mechheads.datasets.assemble import Item
from mechheads.datasets.build import check_disjoint
from mechheads.datasets.items import _grouped
from mechheads.datasets.sources import grouped
from mechheads.datasets.words import WordFinder, _aligned, canonical, folded, names_alike, occurrences, shared_names
from mechheads.errors import InvalidInput

# The word, and how it stands in a text: between underscores, split by what is not seen, in other encodings.
SPELT = [
    ("zulu", "They said _zulu_ twice."),
    ("zulu", "the ZULU's hat"),
    ("_zulu_", "A zulu."),
    ("Ann Lee", "So _Ann_ _Lee_ went."),
    ("Ann Lee", "So ANN\u00a0LEE went."),
    ("caf\u00e9", "the cafe\u0301 was shut"),
    ("cafe\u0301", "the CAF\u00c9 was shut"),
    ("harbour", "the har\u00adbour wall"),
    ("harbour", "the har\u200bb\u2060our\ufeff wall"),
    ("har\u00adbour", "the harbour wall"),
    ("office", "the o\ufb03ce clock"),
    ("Fisherman's", "the Fisherman\u2019s Bastion"),
    ("sea-salt", "with sea\u2011salt"),
    ("42", "a \uff14\uff12 bus"),
    ("\u30ab\u30e1\u30e9", "\u65b0\u3057\u3044\uff76\uff92\uff97\u3067\u3059"),
    ("\u0e2a\u0e38\u0e14\u0e32", "\u0e27\u0e48\u0e32\u0e2a\u0e38\u0e14\u0e32\u0e21\u0e32"),
]


@pytest.mark.parametrize(("word", "text"), SPELT)
def test_a_word_is_found_however_it_is_spelt(word: str, text: str) -> None:
    assert WordFinder((word,)).found_in(text)
    assert WordFinder(("never", word, "")).count(f"{text} {text}") == 2
    assert not WordFinder(()).found_in(text)


@pytest.mark.parametrize(
    ("word", "text"),
    [("Ana", "Banana, Anas, and Anatole."), ("5", "15 and 50 and x5"), ("cafe", "caf\u00e9"), ("a b", "ab a-b")],
)
def test_a_part_of_a_word_is_not_the_word(word: str, text: str) -> None:
    assert not WordFinder((word,)).found_in(text)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("oak", "two oaks"),
        ("oak", "the oak's root"),
        ("oak", "the oaks' roots"),
        ("box", "two boxes"),
        ("pony", "two ponies"),
        ("knife", "two knives"),
        ("wolf", "two _wolves_"),
        ("toy", "two toys"),
        ("old oak", "two old oaks"),
    ],
)
def test_plurals_are_forms_of_a_word(word: str, text: str) -> None:
    assert WordFinder((word,), forms=True).found_in(text)
    assert WordFinder((word,), forms=True).found_in(f"one {word} here")
    assert WordFinder((word,)).found_in(text) == ("'s" in text), "an apostrophe ends a word"


def test_what_is_no_form_of_a_word() -> None:
    assert not WordFinder(("oak", "y", "f"), forms=True).found_in("oaken soak oaksy ies ves oakesses")
    assert not WordFinder(("oaks", "12345", "mouse"), forms=True).found_in("an oak, 12345s, and mice")


@given(
    st.text(
        alphabet=st.sampled_from("aeC _\u0301\u0327\u00ad\u200b\u200d\ufb03\u1100\u1161\u11a8\uff76\uff9e\u2019\u00e9")
    )
)
def test_aligned_text_is_the_canonical_one_and_knows_where_it_came_from(text: str) -> None:
    plain, at = _aligned(text)
    assert plain == canonical(text) and len(at) == len(plain)
    for char, (start, stop) in zip(plain, at, strict=True):
        assert char in canonical(text[start:stop])
        assert canonical(text[start]) and canonical(text[stop - 1]), "nothing unseen at the ends"
    assert at == sorted(at)


@given(st.text(max_size=20))
def test_encodings_of_a_text_fold_alike(text: str) -> None:
    for form in ("NFC", "NFD", "NFKC", "NFKD"):
        assert folded(unicodedata.normalize(form, text)) == folded(text)  # type: ignore[arg-type]
    assert folded(folded(text)) == folded(text)


def test_occurrences_are_those_of_the_text_itself() -> None:
    text = "At _Caf\u00e9_ and cafe\u0301, Cafe\u0301\u200b is not Cafes nor Caf\u00e9's."
    assert [text[a:b] for a, b in occurrences(text, "Caf\u00e9")] == ["Caf\u00e9", "Cafe\u0301", "Caf\u00e9"]
    assert occurrences("a\nb", "a b") == [(0, 3)] and occurrences("anything", " \u200b") == []


class Letters(Words):
    """One token per character."""

    pattern = re.compile(".", re.DOTALL)


# -- nothing of the answer in the prose ------------------------------------------------------------------

LEAKS = ["the _{}_ door", "the {}s", "the {}'s door", "a {}\u00ad", "{}_"]


def test_no_spelling_of_the_answer_is_left_in_the_prose(tmp_path: Any) -> None:
    path = tmp_path / "own.txt"
    leaks = [f"Once more {leak.format(word)} was seen." for word in ("attic", "vault", "sau\u00adna") for leak in LEAKS]
    path.write_text(" ".join(leaks) + " " + prose(120), encoding="utf-8")
    model = Words()
    template = {"needle": "{name} keeps it in the {place}. {object}", "question": "Where?", "answer": "{place}"}
    trials = needles("facts", model, n=36, split=None, context_length=700, haystack=path, template=template)
    for trial in trials:
        word = {"sauna": "sau\u00adna"}.get(str(trial.answer), str(trial.answer))
        about = [s for s in leaks if word in s]
        assert not [s for s in about if s in text_of(model, trial)]
    assert any(t.answer == "sauna" and len(t.meta["haystack_left_out"]) >= len(LEAKS) for t in trials)


def test_accents_of_their_own_do_not_hide_the_answer(tmp_path: Any) -> None:
    path = tmp_path / "own.txt"
    spoiled = "The cafe\u0301 was shut. The _R\u00e9gnier_ road. "
    path.write_text(spoiled.join(f"{s}. " for s in prose(60).split(". ")), encoding="utf-8")
    row = {
        "needle": "In town _R\u00e9gnier_ owns a caf\u00e9.",
        "question": "What is owned?",
        "real_needle": "caf\u00e9",
    }
    (trial,) = niah(Words(), [row], split=None, context_length=300, haystack=path)
    assert set(trial.meta["haystack_left_out"]) == {"The cafe\u0301 was shut.", "The _R\u00e9gnier_ road."}


def test_niah_finds_its_answer_in_another_encoding() -> None:
    row = {"needle": "She owns a cafe\u0301 in town.", "question": "What is owned?", "real_needle": "caf\u00e9"}
    model = Words()
    (trial,) = niah(model, [row], split=None, context_length=200)
    assert trial.meta["real_needle_in_needle"] and trial.answer == "caf\u00e9"
    assert text_of(model, trial, "answer_span") == text_of(model, trial, "real_needle") == " cafe\u0301"


def test_the_answer_of_a_needle_is_its_word_and_not_a_part_of_another() -> None:
    row = {"needle": "Annabel was seen by Ann.", "question": "Who saw her?", "real_needle": "Ann"}
    model = Words()
    (trial,) = niah(model, [row], split=None, context_length=200)
    assert text_of(model, trial, "answer_span") == " Ann"
    assert trial.spans["answer_span"][0].start > trial.spans["needle"][0].start


def test_answers_of_documents_are_found_in_italics_and_other_encodings() -> None:
    text = "The _Caf\u00e9_ is old. A Cafe\u0301 stands."
    row = {
        "id": "a",
        "question": "Which?",
        "answer": "Caf\u00e9",
        "paragraphs": [
            {"paragraph_text": text, "is_supporting": True},
            {"paragraph_text": "No cafe\u0301 here.", "is_supporting": False},
            {"paragraph_text": "Nor cafeterias.", "is_supporting": False},
        ],
    }

    model = Letters()
    (trial,) = documents(model, [row], split=None)
    assert pieces(model, trial, "answer_span") == ["Caf\u00e9", "Cafe\u0301"]
    assert trial.meta["answer_in_other_documents"] == 1


# -- names too alike to part -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("left", "right", "alike"),
    [
        ("Yuki", "yuki", True),
        ("Ann", "Ann Lee", True),
        ("Lee", "ann _lee_", True),
        ("Caf\u00e9", "cafe\u0301", True),
        ("Ann", "Annabel", False),
        ("Ann Lee", "Lee Ann", False),
        ("\u7530\u4e2d", "\u7530\u4e2d\u3055\u3093", True),
    ],
)
def test_names_alike(left: str, right: str, alike: bool) -> None:
    for pair in ((left, right), (right, left)):
        assert (len(grouped(names_alike(["Igor", *pair]))) == 2) is alike
        assert shared_names([pair[0], "Igor"], [pair[1], "Olga"]) == ([pair[0]] if alike else [])


@given(st.lists(st.lists(st.sampled_from(["Ann", "ANN", "Lee", "Bo"]), min_size=1, max_size=3), max_size=7))
def test_groups_of_names_are_those_of_the_slow_way(parts: list[list[str]]) -> None:
    names = [" ".join(p) for p in parts]
    together = {i: k for k, group in enumerate(grouped(names_alike(names))) for i in group}
    reach = {i: {i} for i in range(len(names))}
    spaced = [f" {n.casefold()} " for n in names]
    for _ in names:
        for i in reach:
            for j in reach:
                if spaced[i] in spaced[j] or spaced[j] in spaced[i]:
                    reach[i] |= reach[j]
                    reach[j] |= reach[i]
    assert all((j in reach[i]) == (together[i] == together[j]) for i in reach for j in reach)


@pytest.mark.parametrize("names", [["Yuki", "yuki", "Katie", "Ann"], ["Ann", "Ann Lee", "Yuki", "Katie"]])
def test_nolima_characters_that_are_alike_stay_in_one_split(names: list[str]) -> None:
    one = [{**entries()[0], "character_set": names}]
    both = set()
    for seed in range(12):
        trials = nolima(Words(), one, n=4, context_length=300, seed=seed, split_tests=False, distractors=False)
        left, right = ([str(t.answer) for t in trials.split(s)] for s in ("calibration", "test"))
        assert not shared_names(left, right)
        both |= {frozenset(left), frozenset(right)}
    assert len(both) > 2, "the seed decides"


def test_nolima_characters_that_are_all_alike_cannot_be_split() -> None:
    one = [{**entries()[0], "character_set": ["Ann", "Ann Lee", "ANN"]}]
    with pytest.raises(
        InvalidInput, match=r"would share the answers \['.*, or answers that contain them: .*split=None"
    ):
        nolima(Words(), one, n=2, context_length=300)


def test_nolima_arguments_and_gold_answers_in_another_case_stay_in_one_split() -> None:
    def entry(*golds: str) -> list[dict[str, Any]]:
        tests = {f"T{i}": {"input_args": [f"door {i}"], "gold_answers": [g]} for i, g in enumerate(golds)}
        return [{"id": "1", "needle": "The {1} is painted.", "questions": {"onehop": "Which colour?"}, "tests": tests}]

    for seed in range(6):
        trials = nolima(Words(), entry("Red", "red", "dark red", "blue", "green"), n=4, context_length=300, seed=seed)
        where = {t.answer: t.split for t in trials}
        assert len({where[a] for a in where if "red" in str(a).casefold()}) == 1
    with pytest.raises(InvalidInput, match="would share the answers"):
        nolima(Words(), entry("Red", "red"), n=2, context_length=300)


def test_niah_answers_inside_one_another_stay_in_one_split() -> None:
    answers = ["Ann", "ann lee", "Bo", "Cy", "Dee"]
    rows = [
        {"needle": f"Thing {i} is with {who}.", "question": f"Who, {i}?", "real_needle": who}
        for i, who in enumerate(answers)
    ]
    for seed in range(8):
        where = {t.answer: t.split for t in niah(Words(), rows, context_length=200, seed=seed)}
        assert where["Ann"] == where["ann lee"] and len(set(where.values())) == 2


def test_documents_answers_in_another_encoding_stay_in_one_split() -> None:
    def row(name: str, answer: str) -> dict[str, Any]:
        gold = {"paragraph_text": f"It is {answer} {name}.", "is_supporting": True}
        return {"id": name, "question": "Which?", "answer": answer, "paragraphs": [gold]}

    rows = [row("a", "Caf\u00e9"), row("b", "cafe\u0301"), row("c", "Pub"), row("d", "Inn")]
    for seed in range(8):
        where = {t.meta["record"]: t.split for t in documents(Words(), rows, seed=seed)}
        assert where["a"] == where["b"] and len(set(where.values())) == 2


def item(question: str, answer: str) -> Item:
    return Item(None, question, f"\n{question}", answer, ())


def test_needles_never_share_an_answer_by_case_or_by_containing_one() -> None:
    for answer in ("ann", "Ann Lee"):
        with pytest.raises(InvalidInput, match=r"would share the answers \['Ann'\]"):
            check_disjoint([[item("1?", "Ann")], [item("2?", answer)]])
    check_disjoint([[item("1?", "Ann")], [item("2?", "Annabel")]])
    items = [item(f"{i}?", a) for i, a in enumerate(("Rome", "ROME", "New Rome", "Oslo", "Bern", "Kyiv"))]
    for seed in range(8):
        left, right = _grouped("recall", items, (3, 3), random.Random(seed))
        assert not shared_names([i.answer for i in left], [i.answer for i in right])


@pytest.mark.parametrize("kind", ["words", "numbers", "uuids"])
@pytest.mark.parametrize("variant", ["single", "multiquery"])
def test_keys_and_values_of_ruler_are_never_alike(variant: str, kind: str) -> None:
    trials = ruler(Words(), variant=variant, key_type=kind, value_type=kind, n=12, context_length=700)
    left, right = (trials.split(s) for s in ("calibration", "test"))
    for key in ("keys", "answers"):
        assert not shared_names(*([x for t in part for x in t.meta[key]] for part in (left, right)))
