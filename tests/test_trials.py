"""Trials refuse what cannot be scored, and survive the way to a file and back."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from mechheads.errors import InvalidInput, OutputNotWritable, ResultFileError, UnknownName
from mechheads.trials import Encoding, Span, Trial, TrialSet, find_once


class WordEncoder:
    """One token a word; a leading special token without text, as real tokenizers have."""

    def encode(self, text: str, *, chat: bool = False) -> Encoding:
        if chat:
            text = f"<user> {text} <assistant>"
        offsets = [(0, 0)] + [m.span() for m in re.finditer(r"\S+", text)]
        return Encoding(text=text, tokens=tuple(range(len(offsets))), offsets=tuple(offsets))


PROMPT = "The river is wide. The code is 4711 today. Birds sing. What is the code?"


def make(i: int = 0, split: str | None = None, **fields) -> Trial:
    spans = {"needle": (2, 5)}
    return Trial(id=f"t{i}", tokens=tuple(range(10)), spans=spans, answer="x", split=split, **fields)


def test_span_is_half_open():
    span = Span(2, 5)
    assert list(span) == [2, 3, 4] and len(span) == 3
    assert 2 in span and 4 in span and 5 not in span and "2" not in span
    assert Span.parse((2, 5)) == Span.parse([2, 5]) == Span.parse(span) == span


@pytest.mark.parametrize(("start", "stop"), [(3, 3), (4, 3), (-1, 2)])
def test_empty_or_negative_span_is_refused(start, stop):
    with pytest.raises(InvalidInput, match=r"is empty or negative; a span is half-open"):
        Span(start, stop)


def test_span_of_something_else_is_refused():
    with pytest.raises(InvalidInput, match=r"cannot read a span from 7; write \(start, stop\)"):
        Span.parse(7)


def test_spans_are_given_as_one_pair_or_several_in_any_order():
    trial = Trial(id="a", tokens=tuple(range(10)), spans={"needle": [(6, 8), (1, 3)], "question": (8, 10)})
    assert trial.spans["needle"] == (Span(1, 3), Span(6, 8))
    assert trial.positions("needle") == (1, 2, 6, 7)
    assert trial.positions("question") == (8, 9)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"tokens": ()}, "has no tokens"),
        ({"spans": {"needle": (8, 11)}}, "10 tokens"),
        ({"spans": {"needle": ()}}, "names the span 'needle' but gives no interval"),
        ({"spans": {"needle": [(1, 4), (3, 6)]}}, "overlap; merge them"),
        ({"spans": {"needle": 3}}, "cannot read spans from 3"),
        ({"spans": {"needle": (0, 10)}}, "needle is as long as the whole context"),
        ({"spans": {"needle": [(0, 4), (4, 10)]}}, "needle is as long as the whole context"),
        ({"answer": "  "}, "empty answer"),
        ({"candidates": ("a", "b"), "label": 2}, "label 2 but 2 candidates"),
        ({"candidates": ("a", "b"), "label": -1}, "label -1 but 2 candidates"),
        ({"candidates": ("a", "b"), "label": 0.5}, r"'bad': label is 0\.5; it must be a whole number"),
        ({"candidates": ("a", "b"), "label": True}, "label is True"),
        ({"candidates": "ab"}, "candidates are 'ab'; give a list of texts"),
        ({"candidates": ["a", 3]}, "a candidate is 3; candidates are texts, such as '3'"),
        ({"id": 3}, "trial 3: the id must be text; write '3'"),
        ({"answer": 5}, "'bad': answer is 5; it must be text, such as '5', or None"),
        ({"split": 1}, "'bad': split is 1; it must be text"),
        ({"tokens": "abc"}, "tokens are 'abc'; give token ids, or use Trial.from_text"),
        ({"tokens": None}, "tokens are None; give token ids"),
        ({"tokens": [1, 2.0]}, r"a token id is 2\.0; it must be a whole number"),
        ({"tokens": [1, "2"]}, "a token id is '2'; it must be a whole number"),
        ({"spans": [(1, 2)]}, r"'bad': spans is \[\(1, 2\)\]; give a dict"),
        ({"spans": {1: (1, 2)}}, "names a span 1; span names are text"),
        ({"spans": {"needle": (1.0, 3.5)}}, r"a span is 1\.0; it must be a whole number"),
        ({"spans": {"needle": "13"}}, "cannot read spans from '13'"),
        ({"spans": {"needle": ["13"]}}, "cannot read a span from '13'"),
        ({"spans": {"needle": {"start": 1, "stop": 2}}}, "cannot read spans from {'start'"),
        ({"spans": {"needle": [(1, None)]}}, "the stop of a span is None"),
        ({"meta": {"p": Path("x")}}, r"'bad': meta\['p'\] is a (Posix|Windows)Path .* JSON cannot hold"),
        ({"meta": {"a": 1, 2: 3}}, "'bad': meta has the key 2; JSON keys must be text"),
        ({"meta": {"a": float("nan")}}, r"meta\['a'\] is nan"),
        ({"meta": 4}, "'bad': meta is 4; give a dict"),
    ],
)
def test_bad_trials_are_refused_by_name(as_users_run, fields, message):
    with pytest.raises(InvalidInput, match=message):
        Trial(**{"id": "bad", "tokens": tuple(range(10)), **fields})


def test_numpy_and_torch_numbers_become_plain_ones(as_users_run):
    tokens = np.arange(10)
    trial = Trial(
        id=np.str_("a"), tokens=torch.arange(10), candidates=(c for c in "xy"), label=np.int64(1),  # pyright: ignore[reportArgumentType]
        spans={"needle": np.array([1, 3]), "q": [np.array([4, 5]), (np.int32(6), 7)]},
        meta={"depth": np.float32(0.5), "at": (1, 2), "n": {"k": np.int8(3), "ok": np.bool_(True)}},
    )  # fmt: skip
    plain = Trial(
        id="a", tokens=tokens, candidates=("x", "y"), label=1, spans={"needle": (1, 3), "q": [(4, 5), (6, 7)]},  # pyright: ignore[reportArgumentType]
        meta={"depth": 0.5, "at": [1, 2], "n": {"k": 3, "ok": True}},
    )  # fmt: skip
    assert trial == plain and TrialSet([trial]).hash == TrialSet([plain]).hash
    assert type(trial.label) is int and type(trial.spans["needle"][0].start) is int and type(trial.tokens[0]) is int
    assert Trial.from_dict(json.loads(json.dumps(trial.to_dict()))) == trial


def test_meta_is_a_copy():
    inner = [1]
    trial = make(meta={"a": inner})
    before = TrialSet([trial]).hash
    inner.append(2)
    assert TrialSet([trial]).hash == before


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (lambda: TrialSet([], options={"path": Path("x")}), r"options\['path'\] is a (Posix|Windows)Path"),
        (lambda: TrialSet([], options={1: 2}), "options has the key 1"),  # pyright: ignore[reportArgumentType]
        (lambda: TrialSet([], name=3), "name of a trial set is 3"),  # pyright: ignore[reportArgumentType]
        (lambda: TrialSet.of([{"id": 1}]), "item 0 of the trials is \"{'id': 1}\", a dict; make trials with Trial"),  # pyright: ignore[reportArgumentType]
        (lambda: TrialSet.of([make(), "t1"]), "item 1 of the trials is 't1', a str"),  # pyright: ignore[reportArgumentType]
        (lambda: TrialSet.of(7), "cannot read trials from 7; give a Trial"),  # pyright: ignore[reportArgumentType]
        (lambda: Trial.from_text(WordEncoder(), 7), "the prompt is 7; give text"),  # pyright: ignore[reportArgumentType]
        (lambda: Trial.from_text(WordEncoder(), PROMPT, needle=4711), "the needle is 4711; give the text"),  # pyright: ignore[reportArgumentType]
        (lambda: Trial.from_text(WordEncoder(), PROMPT, answer=Path("x")), "answer is (Posix|Windows)Path"),  # pyright: ignore[reportArgumentType]
    ],
)
def test_bad_sets_and_texts_are_refused_at_once(as_users_run, act, message):
    with pytest.raises(InvalidInput, match=message):
        act()


def test_options_of_a_set_are_what_a_file_gives_back(tmp_path):
    trials = TrialSet([make()], options={"n": np.int64(2), "sizes": (1, 2)})
    assert trials.options == {"n": 2, "sizes": [1, 2]} == TrialSet.load(trials.save(tmp_path / "t")).options


def test_trial_files_that_are_not_there_or_cannot_be_written(tmp_path):
    with pytest.raises(ResultFileError, match=r"none\.jsonl does not exist; give the path that save\(\) returned"):
        TrialSet.load(tmp_path / "none.jsonl")
    with pytest.raises(ResultFileError, match="is a folder, not a file"):
        TrialSet.load(tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputNotWritable, match=r"cannot write 't\.jsonl'"):
        TrialSet([make()]).save(tmp_path / "file" / "t.jsonl")
    assert TrialSet([make()]).save(tmp_path / "new" / "t.jsonl").exists()


def test_a_missing_span_name_lists_the_known_ones():
    with pytest.raises(UnknownName, match="Did you mean 'needle'"):
        make().positions("needel")


def test_from_text_finds_the_tokens_that_cover_the_text():
    spans = {"question": "What is the code?"}
    trial = Trial.from_text(WordEncoder(), PROMPT, needle="The code is 4711 today.", answer="4711", spans=spans)
    words = ["", *PROMPT.split()]
    assert [words[i] for i in trial.positions("needle")] == ["The", "code", "is", "4711", "today."]
    assert [words[i] for i in trial.positions("question")] == ["What", "is", "the", "code?"]
    assert trial.answer == "4711"


def test_from_text_takes_tokens_that_the_text_covers_in_part():
    trial = Trial.from_text(WordEncoder(), PROMPT, needle="ode is 47")
    assert [["", *PROMPT.split()][i] for i in trial.positions("needle")] == ["code", "is", "4711"]


def test_from_text_through_the_chat_template_moves_the_span():
    plain = Trial.from_text(WordEncoder(), PROMPT, needle="4711")
    chat = Trial.from_text(WordEncoder(), PROMPT, needle="4711", chat=True)
    assert chat.positions("needle") == tuple(p + 1 for p in plain.positions("needle"))


def test_from_text_names_a_trial_by_its_content():
    a, b = (Trial.from_text(WordEncoder(), PROMPT, needle="4711", answer=x) for x in ("1", "2"))
    assert a.id != b.id
    assert a.id == Trial.from_text(WordEncoder(), PROMPT, needle="4711", answer="1").id
    assert Trial.from_text(WordEncoder(), PROMPT, id="mine").id == "mine"


@pytest.mark.parametrize(
    ("needle", "message"),
    [
        ("the code is 4711", "is not in the prompt; it must be an exact substring"),
        ("is", "stands 3 times in the prompt"),
        (" ", "text is empty"),
    ],
)
def test_needle_text_absent_or_ambiguous(needle, message):
    with pytest.raises(InvalidInput, match=message):
        Trial.from_text(WordEncoder(), PROMPT, needle=needle)


def test_long_needle_is_shortened_in_the_message():
    with pytest.raises(InvalidInput) as caught:
        find_once("short", "x" * 500)
    assert len(str(caught.value)) < 250


def test_characters_without_a_token_are_refused():
    with pytest.raises(InvalidInput, match="covers no token"):
        Encoding(text="a  b", tokens=(1, 2), offsets=((0, 1), (3, 4))).span_of(1, 3, what="needle")


names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=5)


@given(
    st.lists(st.integers(0, 50000), min_size=6, max_size=12),
    st.dictionaries(names, st.one_of(st.integers(), st.booleans(), st.none(), names), max_size=3),
    st.one_of(st.none(), names.filter(str.strip)),
)
def test_dict_round_trip_through_json(tokens, meta, answer):
    trial = Trial(
        id="a",
        tokens=tuple(tokens),
        spans={"needle": [(0, 1), (3, 5)]},
        answer=answer,
        candidates=(" true", " false"),
        label=1,
        split="test",
        meta=meta,
    )
    back = Trial.from_dict(json.loads(json.dumps(trial.to_dict())))
    assert back == trial and hash(back) == hash(trial)


def test_trial_set_file_round_trip(tmp_path):
    second = make(1, "calibration", meta={"depth": 0.5, "ü": [1]})
    trials = TrialSet([make(0, "test"), second], name="f", options={"n": 2})
    back = TrialSet.load(trials.save(tmp_path / "trials.jsonl"))
    assert list(back) == list(trials)
    assert (back.name, back.options, back.hash) == ("f", {"n": 2}, trials.hash)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not a readable trial file"),
        ("not json", "not a readable trial file"),
        ('{"a": 1}', "first line is not a mechheads header"),
        ('{"mechheads_trials": 2, "name": "a", "options": {}}', "format 2 is newer"),
        ('{"mechheads_trials": 1, "name": "a", "options": {}}\n{"id": "a"', "not a readable trial file"),
        ('{"mechheads_trials": 1, "name": "a", "options": {}}\n{"id": "a"}', "not a readable trial file"),
    ],
)
def test_damaged_or_foreign_trial_file(tmp_path, content, message):
    path = tmp_path / "trials.jsonl"
    path.write_text(content)
    with pytest.raises(ResultFileError, match=message) as caught:
        TrialSet.load(path)
    assert str(path) in str(caught.value)


def test_splits():
    trials = TrialSet([make(0, "test"), make(1, "calibration"), make(2, "test"), make(3)], name="facts")
    assert trials.splits == ["calibration", "test"]
    assert [t.id for t in trials.split("test")] == ["t0", "t2"]
    assert trials.split("test").name == "facts"
    assert trials.with_split("test").split("test").splits == ["test"]
    assert len(trials.with_split("test").split("test")) == 4
    assert repr(trials) == "TrialSet('facts', 4 trials: 1 calibration, 2 test)"
    with pytest.raises(UnknownName, match=r"unknown split of 'facts' 'tets'\. Did you mean 'test'"):
        trials.split("tets")


def test_set_behaves_as_a_sequence_and_wraps_what_it_is_given():
    trials = TrialSet([make(i) for i in range(4)])
    assert len(trials[1:3]) == 2 and isinstance(trials[1:3], TrialSet)
    assert trials[0] == make(0) and make(3) in trials
    assert TrialSet.of(trials) is trials
    assert list(TrialSet.of(make(1))) == [make(1)]
    assert len(TrialSet.of([make(1), make(2)])) == 2


def test_two_trials_of_one_id_are_refused():
    with pytest.raises(InvalidInput, match="two trials have the id 't1'"):
        TrialSet([make(1), make(1)])


def test_hash_depends_on_content_and_order_only():
    a, b = make(0), make(1)
    assert TrialSet([a, b], name="x").hash == TrialSet([a, b], name="y").hash
    assert TrialSet([a, b]).hash != TrialSet([b, a]).hash
    assert TrialSet([a]).hash != TrialSet([make(0, meta={"depth": 1})]).hash
    assert re.fullmatch(r"[0-9a-f]{16}", TrialSet([a]).hash)
