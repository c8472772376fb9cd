from __future__ import annotations

import hashlib
import json
import re
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mechheads.datasets import KINDS, arithmetic, needles, recall
from mechheads.datasets.haystack import Haystack, split_sentences
from mechheads.datasets.pools import pool, templates
from mechheads.datasets.words import WordFinder
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoding, TrialSet

WITH_NEEDLE = ("passkey", "facts", "landmarks")
DIGESTS = [
    ("passkey", "a890242f1b19"),
    ("facts", "53fea26d0bbe"),
    ("landmarks", "fe68947ebb64"),
    ("recall", "bf23e1551234"),
    ("arithmetic", "0c9913c058c1"),
]


class Words:
    """One token per word (its space included) or punctuation mark; a chat template; no special tokens."""

    pattern = re.compile(r"\s?\w+|[^\w\s]|\s")
    bos = False

    def __init__(self, n_ctx: int | None = None):
        self.ids: dict[str, int] = {}
        self.calls = 0
        self.characters = 0
        self.spec = SimpleNamespace(n_ctx=n_ctx)

    def encode(self, text: str, *, chat: bool = False) -> Encoding:
        self.calls += 1
        self.characters += len(text)
        if chat:
            text = f"<system> Be useful. <user> {text} <end> <assistant>"
        offsets = [m.span() for m in self.pattern.finditer(text)]
        tokens = [self.ids.setdefault(text[a:b], len(self.ids) + 1) for a, b in offsets]
        if self.bos:
            offsets, tokens = [(0, 0), *offsets], [0, *tokens]
        return Encoding(text, tuple(tokens), tuple(offsets))

    def decode(self, tokens) -> str:
        texts = {i: t for t, i in self.ids.items()}
        return "".join(texts[t] for t in tokens if t)


class Pieces(Words):
    """Words in pieces of three characters, sentence seams that merge (". A" is one token), and BOS."""

    pattern = re.compile(r"[.!?] \w|\s?\w{1,3}|[^\w\s]|\s")
    bos = True


class Plain:
    """An encoder without ``spec``."""

    def encode(self, text: str, *, chat: bool = False) -> Encoding:
        return Words().encode(text, chat=chat)


def text_of(model: Words, trial, span: str | None = None) -> str:
    if span is None:
        return model.decode(trial.tokens)
    (only,) = trial.spans[span]
    return model.decode(trial.tokens[only.start : only.stop])


def mentions(word: str, text: str) -> int:
    return WordFinder((word,)).count(text)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("encoder", [Words, Pieces])
@pytest.mark.parametrize("kind", KINDS)
def test_length_and_spans(kind, encoder, chat):
    model = encoder()
    trials = needles(kind, model, n=12, context_length=256, chat=chat, seed=3)
    assert len(trials) == 12 and trials.name == kind
    assert [t.id for t in trials][:2] == [f"{kind}-0000", f"{kind}-0001"]
    for trial in trials:
        assert 256 - 8 <= len(trial.tokens) <= 256
        assert trial.meta["context_length"] == 256
        assert trial.meta["context_length_achieved"] == len(trial.tokens)
        assert trial.meta["question"] in text_of(model, trial, "question")
        assert trial.meta["answer"] == trial.answer
        assert ("needle" in trial.spans) == (kind in WITH_NEEDLE)
        if kind in WITH_NEEDLE:
            assert trial.meta["needle"] in text_of(model, trial, "needle")
            assert len(text_of(model, trial, "needle")) <= len(trial.meta["needle"]) + 6
            assert trial.meta["answer"] in text_of(model, trial, "answer_span")
            assert len(text_of(model, trial, "answer_span")) <= len(trial.meta["answer"]) + 4
            assert set(trial.positions("answer_span")) <= set(trial.positions("needle"))


def test_passkey_wording():
    model = Words()
    trial = needles("passkey", model, n=2)[0]
    assert re.fullmatch(r"[1-9]\d{4}", trial.meta["answer"])
    assert trial.meta["needle"] == "The pass key is {}. Remember it.".format(trial.meta["answer"])
    assert text_of(model, trial).endswith("\n\nQuestion: What is the pass key?\nAnswer: The pass key is")


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(KINDS),
    encoder=st.sampled_from([Words, Pieces]),
    length=st.integers(160, 700),
    seed=st.integers(0, 10**6),
    chat=st.booleans(),
)
def test_never_longer_than_asked(kind, encoder, length, seed, chat):
    for trial in needles(kind, encoder(), n=3, context_length=length, seed=seed, chat=chat):
        assert length - 8 <= len(trial.tokens) <= length


def test_few_encodings():
    model = Words()
    sentences = Haystack.load(None).sentences
    needles("facts", model, n=60, context_length=256)
    assert model.calls <= 60 * 6 + len(sentences) // 64 + 1
    assert model.characters < 60 * 6 * 256 * 8 + 2 * sum(map(len, sentences))


@pytest.mark.parametrize("depth", [0.0, 0.25, 0.5, 1.0])
def test_depth_asked_for(depth):
    model = Words()
    for trial in needles("passkey", model, n=6, context_length=500, depth=depth):
        assert trial.meta["depth"] == depth
        assert abs(trial.meta["depth_achieved"] - depth) < 0.04
        needle = trial.spans["needle"][0]
        closing = model.encode("\n\nQuestion: What is the pass key?\nAnswer: The pass key is").tokens
        share = needle.start / (len(trial.tokens) - len(closing) - len(needle))
        assert share == pytest.approx(trial.meta["depth_achieved"], abs=0.01)
        before = model.decode(trial.tokens[: needle.start]).strip()
        assert before == "" or before[-1] in ".!?"


def test_depth_none_is_even_within_each_split():
    trials = needles("facts", Words(), n=22, context_length=300)
    for split in ("calibration", "test"):
        depths = sorted(t.meta["depth"] for t in trials.split(split))
        assert depths == pytest.approx([k / 10 for k in range(11)])


@settings(max_examples=20, deadline=None)
@given(kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6), split=st.sampled_from([0.2, 0.5, 0.7]))
def test_splits_share_neither_needles_nor_answers(kind, seed, split):
    trials = needles(kind, Words(), n=20, context_length=160, seed=seed, split=split)
    left, right = trials.split("calibration"), trials.split("test")
    assert len(left) == round(20 * split) and len(left) + len(right) == 20
    assert not {t.answer for t in left} & {t.answer for t in right}
    asked = [t.meta["needle"] or t.meta["question"] for t in trials]
    assert len(set(asked)) == 20
    for key in ("name", "object", "place", "landmark", "country"):
        assert not {t.meta.get(key) for t in left} & {t.meta.get(key) for t in right} - {None}


def test_splits_are_interleaved_and_optional():
    assert Counter(t.split for t in needles("passkey", Words(), n=30)[:10]) == {"calibration": 5, "test": 5}
    assert needles("passkey", Words(), n=3, split=None).splits == []


def test_seeded():
    def make(**options):
        return needles("facts", Words(), n=8, context_length=200, **options)

    assert make(seed=1).hash == make(seed=1).hash
    assert make(seed=1).hash != make(seed=2).hash
    assert len({t.tokens[:20] for t in make(depth=1.0)}) == 8, "each trial has its own window"


@pytest.mark.parametrize(("kind", "digest"), DIGESTS)
def test_same_draws_on_every_machine(kind, digest):
    keys = ("needle", "question", "answer", "depth", "haystack_start", "distractors")
    trials = needles(kind, Words(), n=10, distractors=1 if kind in ("facts", "landmarks") else 0)
    drawn = json.dumps([[t.id, t.split, *(t.meta[k] for k in keys)] for t in trials])
    assert hashlib.sha256(drawn.encode()).hexdigest()[:12] == digest


@pytest.mark.parametrize("encoder", [Words, Pieces])
@pytest.mark.parametrize("kind", ["facts", "landmarks"])
def test_distractors(kind, encoder):
    model = encoder()
    for trial in needles(kind, model, n=20, context_length=300, distractors=3):
        assert 292 <= len(trial.tokens) <= 300
        assert len(trial.meta["distractors"]) == 3
        text = " ".join(model.decode(trial.tokens[s.start : s.stop]) for s in trial.spans["distractor"])
        assert not set(trial.positions("distractor")) >= set(trial.positions("needle"))
        for sentence in trial.meta["distractors"]:
            assert sentence in text
            assert mentions(trial.meta["answer"], sentence) == 0
        assert mentions(trial.meta["answer"], text_of(model, trial)) == 1


def test_too_few_trials_for_the_distractors():
    with pytest.raises(InvalidInput, match="distractors=3: a split of 2 trials gives only 1"):
        needles("landmarks", Words(), n=4, distractors=3)


@pytest.mark.parametrize("kind", WITH_NEEDLE)
def test_answer_stands_in_the_needle_alone(kind):
    model = Words()
    for trial in needles(kind, model, n=30, context_length=400, seed=5):
        assert mentions(trial.meta["answer"], text_of(model, trial)) == 1
        assert trial.meta["haystack_left_out"] == []


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("make", [recall, arithmetic])
def test_answer_of_a_control_is_not_in_the_context(make, chat):
    model = Words()
    short = make(model, n=60, chat=chat)
    long = make(model, n=60, chat=chat, context_length=300)
    assert max(len(t.tokens) for t in short) < 80
    assert [t.answer for t in short] == [t.answer for t in long]
    for trial in [*short, *long]:
        assert mentions(trial.meta["answer"], text_of(model, trial)) == 0
        assert set(trial.spans) == {"question"}
        assert trial.meta["needle"] is None and trial.meta["depth"] is None
    assert all(292 <= len(t.tokens) <= 300 for t in long)


def test_arithmetic_is_right():
    model = Words()
    for trial in arithmetic(model, n=40, split=None):
        solved = re.findall(r"What is (\d) \+ (\d)\?\nA: (\d+)", text_of(model, trial))
        assert len(solved) == 3
        assert all(int(a) + int(b) == int(c) for a, b, c in solved)
        a, b = re.findall(r"\d", trial.meta["question"])
        assert int(a) + int(b) == int(trial.meta["answer"])


def test_needles_reaches_the_controls():
    assert needles("recall", Words(), n=6, context_length=None).hash == recall(Words(), n=6).hash
    assert needles("arithmetic", Words(), n=6, context_length=None).hash == arithmetic(Words(), n=6).hash


STOP = {"the", "of", "to", "in", "on", "is", "a", "from", "next", "out", "what", "who", "which", "s"}


def test_landmark_questions_share_no_content_word_with_the_needle():
    for template in templates("landmarks", None):
        for landmark, country in pool("landmarks"):
            full = template.fill({"name": "Yuki", "landmark": landmark, "country": country})
            needle, asked = (set(re.findall(r"\w+", t.lower())) - STOP for t in (full.needle, full.question))
            assert not needle & asked, (needle, asked)


def test_pools_are_large_and_distinct():
    countries = [c for _, c in pool("landmarks")]
    assert len(pool("landmarks")) >= 30 and len(set(countries)) == len(countries)
    for name, least in (("names", 40), ("objects", 30), ("places", 30)):
        assert len(pool(name)) >= least and len(set(pool(name))) == len(pool(name))
    answers = [t.answer for t in recall(Words(), n=60, split=None)]
    assert len(set(answers)) == 60


def test_shipped_prose():
    sentences = Haystack.load(None).sentences
    text = " ".join(sentences)
    assert len(text.split()) >= 4200
    assert len(set(sentences)) == len(sentences)
    assert all(6 <= len(s.split()) <= 25 and s[-1] == "." for s in sentences)
    assert not re.search(r"\d", text)
    words = {*pool("names"), *pool("objects"), *pool("places"), "key", "pass key", "character"}
    words |= {w.removeprefix("the ") for pair in (*pool("landmarks"), *pool("capitals")) for w in pair}
    words |= {row[2] for row in pool("recall_others")}
    for word in words:
        assert mentions(word, text) + mentions(word + "s", text) == 0, word
    inside = {w for s in sentences for w in re.findall(r"(?<=\s)[A-Z]\w+", s)}
    assert inside <= {"Sunday", "Monday", "Tuesday", "June", "November"}, "a proper name got in"


def test_shipped_prose_serves_4000_tokens_and_recycles_beyond():
    long = needles("passkey", Words(), n=2, context_length=4000)
    assert [t.meta["haystack_repeats"] for t in long] == [0, 0]
    model = Words()
    longer = needles("passkey", model, n=2, context_length=9000)
    assert all(t.meta["haystack_repeats"] > 100 and 8992 <= len(t.tokens) <= 9000 for t in longer)
    sentences = split_sentences(text_of(model, longer[0]).split("\n\nQuestion")[0])
    once, again = sentences[:250], sentences[300:550]
    assert set(once) & set(again) and once != again


def prose(n: int, word: str = "") -> str:
    numbers = ("one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")
    names = [f"{a} {b} {c}" for a in numbers for b in numbers for c in numbers]
    return " ".join(f"The {names[i]} birds sat quietly upon a {word or 'grey'} fence." for i in range(n))


def test_own_haystack(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(prose(60), encoding="utf-8")
    model = Words()
    trials = needles("passkey", model, n=4, context_length=300, haystack=path)
    assert "birds sat quietly" in text_of(model, trials[0])
    assert trials.options["haystack"] == str(path)
    assert trials.options["haystack_hash"] == Haystack.load(path).hash != Haystack.load(None).hash


def test_folder_of_text_files_is_read_in_order(tmp_path):
    (tmp_path / "b.txt").write_text("Second file here.", encoding="utf-8")
    (tmp_path / "a.txt").write_bytes("\ufeffFirst one.\r\n\r\nIts end".encode())
    (tmp_path / "c.md").write_text("Not read.", encoding="utf-8")
    assert Haystack.load(tmp_path).sentences == ("First one.", "Its end", "Second file here.")


def test_sentences_with_the_answer_are_left_out_and_recorded(tmp_path):
    path = tmp_path / "own.txt"
    spoiled = " ".join(f"Every {p} was locked." for p in pool("places"))
    path.write_text(spoiled + " " + prose(80), encoding="utf-8")
    model = Words()
    trials = needles("facts", model, n=12, context_length=900, haystack=path, template="keep")
    for trial in trials:
        assert mentions(trial.meta["answer"], text_of(model, trial)) == 1
    assert any(f"Every {t.answer} was locked." in t.meta["haystack_left_out"] for t in trials)


def test_an_overlong_sentence_does_not_end_the_walk(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text("Here is " + "more and " * 400 + "more. " + prose(60), encoding="utf-8")
    for trial in needles("passkey", Words(), n=4, context_length=300, haystack=path):
        assert 285 <= len(trial.tokens) <= 300


def test_sentence_splitting():
    text = 'He said "Go." Then Mr. Hall, i.e. the owner, left.\nWhy?  (Nobody knows.)\n\nA title\n\n'
    text += "It cost 3.5 coins."
    assert split_sentences(text) == [
        'He said "Go."',
        "Then Mr. Hall, i.e. the owner, left.",
        "Why?",
        "(Nobody knows.)",
        "A title",
        "It cost 3.5 coins.",
    ]


def test_own_template():
    model = Words()
    own = {"needle": "Please note that the code of the day is {key}.", "answer": "{key}"}
    own["question"] = "Which code is it?"
    trials = needles("passkey", model, n=4, template=own)
    assert trials[0].meta["needle"] == f"Please note that the code of the day is {trials[0].answer}."
    assert text_of(model, trials[0]).endswith("\n\nQuestion: Which code is it?\nAnswer:")
    assert trials.options["templates"][0]["needle"] == own["needle"]


def test_one_shipped_template_by_name():
    trials = needles("facts", Words(), n=6, template="repair")
    assert {t.meta["template"] for t in trials} == {"repair"}
    assert all(t.answer == t.meta["name"] for t in trials)


@pytest.mark.parametrize("kind", KINDS)
def test_sets_are_plain_data(kind, tmp_path):
    trials = needles(kind, Plain(), n=4, context_length=200)
    json.dumps(trials.options)
    assert TrialSet.load(trials.save(tmp_path / "set.jsonl")).hash == trials.hash
    wanted = {"kind", "n", "context_length", "depth", "seed", "split", "chat", "haystack_hash", "templates"}
    assert wanted <= set(trials.options)


def test_unknown_kind_and_template_name_their_neighbours():
    with pytest.raises(UnknownName, match=r"kind of needle trials 'pass_key'\. Did you mean 'passkey'"):
        needles("pass_key", Words())
    with pytest.raises(UnknownName, match="Did you mean 'keep'"):
        needles("facts", Words(), template="keeps")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"context_length": 20}, "context_length=20 is too small: .* take 24 tokens here.*use at least 64"),
        ({"context_length": 33}, "context_length=33 is too small"),
        ({"context_length": None}, "needs a context_length in tokens"),
        ({"context_length": -1}, "context_length=-1: give a whole number"),
        ({"context_length": 2049}, "context_length=2049 is over the model's limit of 2048 tokens"),
        ({"n": 0}, "n=0 trials"),
        ({"n": True}, "n=True trials"),
        ({"n": 1}, "leaves a split without a trial"),
        ({"n": 100_000}, "cannot give n=100000 trials .*there are 90000 five-digit keys"),
        ({"seed": True}, "seed=True: give a whole number"),
        ({"depth": 1.01}, "depth=1.01: give a number from 0"),
        ({"depth": float("nan")}, "depth=nan"),
        ({"distractors": -1}, "distractors=-1: give a whole number"),
        ({"distractors": 1}, "'passkey' has no distractors"),
        ({"split": 0.0}, "split=0.0: give the calibration share"),
        ({"split": 1}, "split=1: give the calibration share"),
        ({"haystack": "/no/such/prose.txt"}, "does not exist; give a text file"),
        ({"template": {"needle": "a", "answer": "b"}}, r"lacks \['question'\]"),
        ({"template": {"needle": "{key}", "question": "?", "answer": "b", "ask": "c"}}, r"parts \['ask'\]"),
        ({"template": {"needle": "{kye}", "question": "?", "answer": "b"}}, r"fields \['kye'\].*has \['key'\]"),
        ({"template": {"needle": "{key", "question": "?", "answer": "b"}}, "template's needle '{key'"),
        ({"template": {"needle": "Same.", "question": "What?", "answer": "{key}"}}, "only 1 of 60 needles"),
        ({"template": {"needle": "It is {key}.", "question": "What?", "answer": "x"}}, r"answers \['x'\]"),
    ],
)
def test_refused(options: dict[str, Any], message: str):
    with pytest.raises(InvalidInput, match=message):
        needles("passkey", Words(n_ctx=2048), **options)


@pytest.mark.parametrize(("kind", "n"), [("facts", 5000), ("landmarks", 5000), ("recall", 200), ("arithmetic", 82)])
def test_more_trials_than_distinct_needles(kind, n):
    with pytest.raises(InvalidInput, match=rf"cannot give n={n} trials .*use a smaller n"):
        needles(kind, Words(), n=n, context_length=200)


def test_controls_take_no_depth_and_no_template():
    refused: list[dict[str, Any]] = [{"depth": 0.5}, {"template": "keep"}]
    for options in refused:
        with pytest.raises(InvalidInput, match="'recall' has no needle"):
            needles("recall", Words(), **options)


def test_haystack_too_short(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(prose(10), encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"is too short: context_length=400 needs about 376 .* 10 usable"):
        needles("passkey", Words(), n=2, context_length=400, haystack=path)


def long_sentences(words: int, n: int) -> str:
    return " ".join("The " + " ".join(f"w{i}x{j}" for j in range(words - 2)) + "." for i in range(n))


@pytest.mark.parametrize("text", [long_sentences(300, 40), long_sentences(300, 1), long_sentences(300, 1)[:-1]])
def test_a_haystack_without_a_sentence_that_fits_is_named_as_the_cause(tmp_path, text):
    path = tmp_path / "own.txt"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"no sentence of the haystack .*own\.txt fits") as caught:
        needles("passkey", Words(), n=2, context_length=256, haystack=path)
    message = str(caught.value)
    assert (
        "context_length=256 leaves 232 tokens" in message
        and re.search(r"The w\d+x0", message)
        and "blank line" in message
    )
    enough = int(re.search(r"at least (\d+)\.$", message)[1])  # pyright: ignore[reportOptionalSubscript]
    assert 320 < enough < 340
    if text.count(".") > 1:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trials = needles("passkey", Words(), n=2, context_length=enough, haystack=path)
        assert all(t.meta["haystack_sentences"] == 1 for t in trials)


def test_a_haystack_of_words_to_avoid_is_named_as_the_cause(tmp_path):
    path = tmp_path / "own.txt"
    answers = [t.answer for t in needles("facts", Words(), n=2)]
    path.write_text(f"Every {answers[0]} and {answers[1]} was here.", encoding="utf-8")
    with pytest.raises(InvalidInput, match=r"own\.txt has no usable sentence"):
        needles("facts", Words(), n=2, context_length=256, haystack=path)


def test_long_sentences_in_an_own_haystack_are_said_once(tmp_path):
    path = tmp_path / "own.txt"
    path.write_text(long_sentences(90, 40), encoding="utf-8")
    with pytest.warns(UserWarning) as caught:
        trials = needles("passkey", Words(), n=4, context_length=256, haystack=path)
    (only,) = caught
    lengths = [t.meta["context_length_achieved"] for t in trials]
    assert max(lengths) < 231
    assert f"4 of 4 prompts are more than 10% shorter than context_length=256 (the shortest has {min(lengths)}" in str(
        only.message
    )
    assert str(path) in str(only.message)


def test_unreadable_haystacks(tmp_path):
    with pytest.raises(InvalidInput, match=r"holds no \.txt file"):
        needles("passkey", Words(), haystack=tmp_path)
    bad = tmp_path / "bad.txt"
    bad.write_bytes(b"Caf\xe9 society. ")
    with pytest.raises(InvalidInput, match=r"bad.txt is not UTF-8 \(byte 3"):
        needles("passkey", Words(), haystack=bad)
    bad.write_text(" \n\n ", encoding="utf-8")
    with pytest.raises(InvalidInput, match="holds no text"):
        needles("passkey", Words(), haystack=bad)


def test_a_template_that_rewrites_the_prompt_is_refused():
    class Upper(Words):
        def encode(self, text: str, *, chat: bool = False) -> Encoding:
            return super().encode(text.upper() if chat else text, chat=chat)

    with pytest.raises(InvalidInput, match="chat template changed the prompt's text"):
        needles("passkey", Upper(), n=2, chat=True)


@pytest.mark.smollm2
@pytest.mark.parametrize("kind", KINDS)
def test_with_a_real_tokenizer(kind, smollm2_folder):
    tokenizers = pytest.importorskip("tokenizers")
    tokenizer = tokenizers.Tokenizer.from_file(str(smollm2_folder / "tokenizer.json"))

    class Real:
        def encode(self, text: str, *, chat: bool = False) -> Encoding:
            out = tokenizer.encode(text)
            return Encoding(text, tuple(out.ids), tuple(out.offsets))

    for trial in needles(kind, Real(), n=20, context_length=300):
        assert 296 <= len(trial.tokens) <= 300
        for name in set(trial.spans) & {"needle", "question"}:
            start, stop = trial.spans[name][0].start, trial.spans[name][0].stop
            assert tokenizer.decode(list(trial.tokens[start:stop])).strip() == trial.meta[name]
