"""Trials from files: NoLiMa, needle-in-a-haystack lines, RULER-like needles, documents, haystack folders, the hub."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datasets import Pieces, Plain, Words, mentions, text_of

from mechheads.datasets import documents, niah, nolima, ruler
from mechheads.errors import InvalidInput
from mechheads.trials import TrialSet

DATA = Path(__file__).parent / "data"
NOLIMA, NIAH, MUSIQUE, QRHEAD = (DATA / f for f in ("nolima_set.json", "niah.jsonl", "musique.jsonl", "qrhead.json"))
MAKERS = {
    "nolima": lambda model, **o: nolima(model, NOLIMA, **{"n": 4, **o}),
    "niah": lambda model, **o: niah(model, NIAH, **o),
    "ruler": lambda model, **o: ruler(model, **{"n": 4, **o}),
    "documents": lambda model, **o: documents(model, MUSIQUE, **o),
}
IN_PROSE = ("nolima", "niah", "ruler")


def module(name: str, **contents: Any) -> ModuleType:
    fake = ModuleType(name)
    vars(fake).update(contents)
    return fake


def pieces(model: Words, trial, name: str) -> list[str]:
    return [model.decode(trial.tokens[s.start : s.stop]) for s in trial.spans[name]]


def entries() -> list[dict[str, Any]]:
    return json.loads(NOLIMA.read_text(encoding="utf-8"))


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]


# -- all of them -------------------------------------------------------------------------------------


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("encoder", [Words, Pieces])
@pytest.mark.parametrize("kind", IN_PROSE)
def test_length_and_spans(kind, encoder, chat):
    model = encoder()
    for trial in MAKERS[kind](model, context_length=300, chat=chat, seed=3):
        assert 292 <= len(trial.tokens) <= 300 == trial.meta["context_length"]
        assert trial.meta["context_length_achieved"] == len(trial.tokens)
        for span, text in (("needle", trial.meta["needle"]), ("question", trial.meta["question"])):
            assert text in text_of(model, trial, span)
            assert len(text_of(model, trial, span)) <= len(text) + 6
        if "answer_span" in trial.spans:
            assert trial.meta["answer"] in text_of(model, trial, "answer_span")
            assert set(trial.positions("answer_span")) <= set(trial.positions("needle"))
        assert trial.meta["kind"] == kind and 0 <= trial.meta["depth_achieved"] <= 1


@pytest.mark.parametrize("kind", MAKERS)
def test_splits_share_neither_needle_nor_answer(kind):
    model = Words()
    trials = MAKERS[kind](model)
    left, right = trials.split("calibration"), trials.split("test")
    assert len(left) + len(right) == len(trials) >= 4
    assert not {t.answer for t in left} & {t.answer for t in right}
    assert not {x for t in left for x in pieces(model, t, "needle")} & {
        x for t in right for x in pieces(model, t, "needle")
    }


@pytest.mark.parametrize("kind", MAKERS)
def test_plain_data_and_seeded(kind, tmp_path):
    trials = MAKERS[kind](Plain(), seed=1)
    assert TrialSet.load(trials.save(tmp_path / "set.jsonl")).hash == trials.hash
    assert trials.hash == MAKERS[kind](Plain(), seed=1).hash
    order = [t.id for t in trials]
    assert order == sorted(order)
    others = [MAKERS[kind](Plain(), seed=seed) for seed in range(2, 6)]
    assert any(trials.hash != other.hash for other in others)
    assert {"kind", "n", "context_length", "seed", "split", "chat"} <= set(trials.options)


DIGESTS = [
    ("nolima", "79a74be52bb5"),
    ("niah", "09485f178b86"),
    ("ruler", "8979c1a75d12"),
    ("documents", "5ea05ee92fb8"),
]


@pytest.mark.parametrize(("kind", "digest"), DIGESTS)
def test_same_draws_on_every_machine(kind, digest):
    keys = ("needle", "question", "answer", "depth", "haystack_start", "distractors", "distractor_depths", "titles")
    trials = MAKERS[kind](Words(), seed=5)
    drawn = json.dumps([[t.id, t.split, *(t.meta.get(k) for k in keys)] for t in trials])
    assert hashlib.sha256(drawn.encode()).hexdigest()[:12] == digest


@pytest.mark.parametrize("kind", MAKERS)
def test_nothing_of_the_machine_is_in_a_trial(kind):
    assert str(DATA) not in json.dumps([t.to_dict() for t in MAKERS[kind](Words())])


@pytest.mark.parametrize("kind", MAKERS)
def test_with_a_model(kind, llama):
    longest = {"documents": 120}.get(kind, 126)
    trials = MAKERS[kind](llama, context_length=longest)
    assert all(len(t.tokens) <= longest for t in trials)
    assert all(max(t.positions(name)) < len(t.tokens) for t in trials for name in t.spans)
    with pytest.raises(InvalidInput, match="over the model's limit of 128 tokens"):
        MAKERS[kind](llama, context_length=129)


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n=0 trials"),
        ({"n": True}, "n=True trials"),
        ({"seed": 1.0}, "seed=1.0: give a whole number"),
        ({"split": 1}, "split=1: give the calibration share"),
        ({"context_length": 0}, "context_length=0: give a whole number"),
        ({"n": 1}, "leaves a split without a trial"),
    ],
)
def test_options_refused(kind, options, message, as_users_run):
    with pytest.raises(InvalidInput, match=message):
        MAKERS[kind](Words(), **options)


@pytest.mark.parametrize("kind", IN_PROSE)
def test_depth(kind):
    for trial in MAKERS[kind](Words(), context_length=500, depth=0.25):
        assert trial.meta["depth"] == 0.25 and abs(trial.meta["depth_achieved"] - 0.25) < 0.05
    with pytest.raises(InvalidInput, match="depth=2: give a number"):
        MAKERS[kind](Words(), depth=2)


# -- needle lines ------------------------------------------------------------------------------------


def test_niah_spans_the_real_needle_where_it_stands():
    model = Words()
    trials = niah(model, NIAH, context_length=300)
    assert len(trials) == 4 and trials.options["n"] == 4 and trials.options["distinct_needles"] == 4
    for trial in trials:
        assert trial.answer == trial.meta["real_needle"]
        literal = not trial.meta["answer"].startswith("Because")
        assert trial.meta["real_needle_in_needle"] is literal
        assert ("real_needle" in trial.spans) == ("answer_span" in trial.spans) == literal
        if literal:
            assert text_of(model, trial, "real_needle").strip() == trial.answer
            assert trial.spans["real_needle"] == trial.spans["answer_span"]


def test_niah_leaves_out_sentences_with_names_of_the_needle(tmp_path):
    path = tmp_path / "own.txt"
    filler = " ".join(f"The {a} {b} slept under a hedge." for a in ("red", "old", "wet") for b in "abcdefghijk")
    path.write_text("Snow fell on Oslo. Lindqvist waved. The Guild met. 47 geese flew. " + filler, encoding="utf-8")
    trials = niah(Words(), NIAH, context_length=200, haystack=path)
    out = {t.meta["record"]: t.meta["haystack_left_out"] for t in trials}
    assert out == {
        "line 1": ["Snow fell on Oslo."],
        "line 2": [],
        "line 4": ["The Guild met.", "47 geese flew."],
        "line 5": ["Lindqvist waved."],
    }


def test_niah_reuse(as_users_run):
    with pytest.raises(InvalidInput, match=r"has 4 needles, too few for n=20; use n=4 at most, or reuse=True"):
        niah(Words(), NIAH, n=20)
    trials = niah(Words(), NIAH, n=20, reuse=True, context_length=200)
    assert len(trials) == 20 and trials.options["distinct_needles"] == 4
    assert len({(t.meta["needle"], t.meta["depth"]) for t in trials}) == 20
    with pytest.raises(InvalidInput, match="reuse='yes': give True or False"):
        niah(Words(), NIAH, reuse="yes")  # pyright: ignore[reportArgumentType]


def test_niah_needles_with_one_answer_stay_in_one_split():
    rows = lines(NIAH)
    rows[1] = {**rows[1], "real_needle": rows[0]["real_needle"].upper()}
    trials = niah(Words(), rows, n=4, context_length=200)
    where = {t.meta["answer"].casefold(): t.split for t in trials}
    assert len(where) == 3 and [t.split for t in trials].count("test") == 2
    same = [{**row, "real_needle": "a moth"} for row in rows]
    with pytest.raises(InvalidInput, match="all with the same needle or answer, directly or through others"):
        niah(Words(), same)
    with pytest.raises(InvalidInput, match=r"cannot be cut into 2 \+ 2.*the largest such group has 4"):
        niah(Words(), same, n=4)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "niah.jsonl is empty"),
        ("\n \n", "niah.jsonl is empty"),
        ('{"needle": "A b.", "question": "Who?"}', r"line 1 has no 'real_needle'; it has \['needle', 'question'\]"),
        ('\n{"needle": "A b.", "question": "Who?", "real_needle": 1}', "line 2: 'real_needle' is 1, a int"),
        ('{"needle": "A b.", "question": "Who?", "real_needle": " "}', "line 1: 'real_needle' is empty"),
        (
            '{"needle": "A b.", "question": "Was it b?", "real_needle": "b"}',
            "line 1: the answer 'b' stands in the quest",
        ),
        ('{"needle": "A b."\n', r"line 1, is not JSON: .*the line begins '\{\"needle\": \"A b.\"'"),
        ('["needle"]', r"line 1, is \['needle'\], a list; each must be an object"),
        (
            '{"needle": "A b.", "question": "Who?", "real_needle": "b"}\n' * 2,
            "line 2 has the needle and question of line 1",
        ),
    ],
)
def test_niah_broken_lines_are_named(text, message, tmp_path):
    path = tmp_path / "niah.jsonl"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=message):
        niah(Words(), path)


def test_niah_own_template_and_line_separators_inside_texts(tmp_path):
    path = tmp_path / "needles.jsonl"
    row = {"needle": "A b\u2028c.", "question": "Who?", "real_needle": "b"}
    path.write_text(json.dumps(row, ensure_ascii=False), encoding="utf-8-sig")
    model = Words()
    trial = niah(model, path, split=None, context_length=120, task_template="{question}\n{haystack}\nSo?")[0]
    assert text_of(model, trial).startswith("Who?\n") and text_of(model, trial).endswith("\nSo?")
    assert trial.meta["needle"] == "A b\u2028c."


def test_unreadable_files(tmp_path):
    with pytest.raises(InvalidInput, match=r"NIAH needle file .*none.jsonl does not exist"):
        niah(Words(), tmp_path / "none.jsonl")
    with pytest.raises(InvalidInput, match="is a folder; give one file"):
        niah(Words(), tmp_path)
    bad = tmp_path / "bad.json"
    bad.write_bytes(b'[{"needle": "caf\xe9"}]')
    with pytest.raises(InvalidInput, match=r"bad.json is not UTF-8 \(byte 16"):
        niah(Words(), bad)
    bad.write_text('[{"needle": 1},\n {"needle" 2}]', encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"bad.json is not JSON: .*line 2 column"):
        niah(Words(), bad)
    bad.write_text("[]", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"bad\.json is empty"):
        niah(Words(), bad)


def test_records_of_the_wrong_kind(as_users_run):
    given: Any
    for given, message in (({"needle": "x"}, "from a dict"), (3, "from a int"), ([3], "record 1, is 3, a int")):
        with pytest.raises(InvalidInput, match=message):
            niah(Words(), given)
    with pytest.raises(InvalidInput, match="holds what JSON cannot"):
        niah(Words(), [{"needle": {1}, "question": "a", "real_needle": "b"}])


# -- RULER -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("haystack", [None, "noise", "needles"])
@pytest.mark.parametrize("encoder", [Words, Pieces])
@pytest.mark.parametrize("variant", ["single", "multikey", "multivalue", "multiquery"])
def test_ruler(variant, encoder, haystack):
    model = encoder()
    trials = ruler(model, variant=variant, n=10, context_length=500, haystack=haystack)
    for trial in trials:
        assert (430 if haystack == "needles" else 490) <= len(trial.tokens) <= 500
        text, meta = text_of(model, trial), trial.meta
        assert trial.answer == ", ".join(meta["answers"]) == meta["answer"]
        needles_there = " ".join(pieces(model, trial, "needle"))
        assert len(meta["needles"]) == (4 if variant in ("multivalue", "multiquery") else 1)
        assert all(sentence in needles_there and text.count(sentence) == 1 for sentence in meta["needles"])
        values = [re.findall(r"\d{7}", p) for p in pieces(model, trial, "answer_span")]
        assert sorted(v for found in values for v in found) == sorted(meta["answers"])
        assert set(trial.positions("answer_span")) <= set(trial.positions("needle"))
        assert all(mentions(value, text) == 1 for value in meta["answers"])
        assert all(key in meta["question"] for key in meta["keys"])
        if variant == "multivalue":
            assert sorted(meta["answers"], key=text.index) == meta["answers"]
        if variant == "multiquery":
            assert [s.split(" is: ")[1][:-1] for s in meta["needles"]] == meta["answers"]
        others = " ".join(pieces(model, trial, "distractor")) if "distractor" in trial.spans else ""
        assert len(meta["distractor_needles"]) == (3 if variant == "multikey" else 0)
        assert all(sentence in others for sentence in meta["distractor_needles"])
        if haystack == "needles":
            count = others.count("ne of the special")
            assert count == meta["haystack_sentences"] + len(meta["distractor_needles"])
            # This tokenizer has tokens over the seam of two sentences, so that neighbours are one span.
            assert encoder is Pieces or len(trial.spans["distractor"]) == count
            assert not any(key in others for key in meta["keys"])
        assert bool(others) == (haystack == "needles" or variant == "multikey")
    keys = [{k for t in trials.split(s) for k in t.meta["keys"]} for s in ("calibration", "test")]
    assert not keys[0] & keys[1]


def test_ruler_haystack_of_needles_is_nothing_else():
    model = Words()
    trial = ruler(model, haystack="needles", n=2, context_length=400)[0]
    passage = text_of(model, trial).split("\n\nQuestion")[0]
    assert len(re.findall(r"One of the special magic numbers for [a-z]+-[a-z]+ is: \d{7}\.", passage)) == (
        trial.meta["haystack_sentences"] + 1
    )
    assert passage.count(".") == trial.meta["haystack_sentences"] + 1


@pytest.mark.parametrize(
    ("kind", "pattern"),
    [("words", "[a-z]+-[a-z]+"), ("numbers", r"\d{7}"), ("uuids", "[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")],
)
def test_ruler_types(kind, pattern):
    trials = ruler(Words(), n=6, key_type=kind, value_type=kind, variant="multikey", keys=3, context_length=400)
    for trial in trials:
        assert re.fullmatch(pattern, trial.meta["answer"]) and re.fullmatch(pattern, trial.meta["keys"][0])
        assert trial.answer not in trial.meta["keys"] + trial.meta["distractor_keys"]
        assert len(set(trial.meta["keys"] + trial.meta["distractor_keys"])) == 3


@settings(max_examples=15, deadline=None)
@given(
    variant=st.sampled_from(["multikey", "multivalue", "multiquery"]),
    count=st.integers(2, 8),
    seed=st.integers(0, 10**6),
)
def test_ruler_any_number_of_needles(variant, count, seed):
    option = "values" if variant == "multivalue" else "keys"
    model = Words()
    for trial in ruler(model, variant=variant, n=2, context_length=600, seed=seed, **{option: count}):
        places = [*trial.spans["needle"], *trial.spans.get("distractor", ())]
        assert len(places) == count
        assert trial.spans["answer_span"][0] in trial.spans["answer_span"]
        text = text_of(model, trial)
        assert variant != "multivalue" or sorted(trial.meta["answers"], key=text.index) == trial.meta["answers"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "multikeys"}, r"variant of ruler trials 'multikeys'\. Did you mean 'multikey'"),
        ({"key_type": "word"}, "unknown key_type 'word'"),
        ({"value_type": "digits"}, "unknown value_type 'digits'"),
        ({"keys": 2}, "keys=2: the variant 'single' has 1 of them"),
        ({"variant": "multikey", "keys": 1}, "keys=1: the variant 'multikey' has 2 or more"),
        ({"variant": "multiquery", "values": 2}, "values=2: the variant 'multiquery' has 1"),
        ({"variant": "multivalue", "values": 0}, "values=0: give a whole number"),
        ({"variant": "multikey", "keys": 2000}, "keys=2000: a split has only 1800 different keys"),
        ({"n": 4000, "value_type": "words"}, "there are only 3600 different words"),
        ({"variant": "multivalue", "context_length": 60}, "context_length=60 is too small"),
    ],
)
def test_ruler_refused(options, message):
    with pytest.raises(InvalidInput, match=message):
        ruler(Words(), **options)
