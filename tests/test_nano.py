"""nano: its language, what its training rows teach, how it is trained, and whether it is what its card says."""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import random
import re
import subprocess
import sys
import zipfile
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_logic_worlds import entails, read, refutes

import mechheads as mh
from mechheads.datasets.logic_worlds import RULES, Claim, make_world, word_pools
from mechheads.errors import InvalidInput, OutputNotWritable, UnknownName
from mechheads.nano import rows as rows_module
from mechheads.nano import train as training
from mechheads.nano.evaluate import CHANCE, accuracies, logic_prompt, retrieval_prompt
from mechheads.nano.export import export
from mechheads.nano.language import SPECIAL, pieces, vocabulary
from mechheads.nano.rows import LEVELS, Level, Row, ids, logic_row, memory_row, retrieval_row, warmup_row
from mechheads.nano.tokens import build_tokenizer
from mechheads.nano.train import RECIPES, Recipe, batches, build, loss_of, tensors, train

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "mechheads" / "nano"
WEIGHTS = PACKAGE / "weights"
LANGUAGE = json.loads((PACKAGE / "language.json").read_text(encoding="utf-8"))
# Another vocabulary needs other weights: after a change of the language train anew, then write the new numbers here.
VOCABULARY_SIZE = 264
VOCABULARY_HASH = "4173193c8cb4af1c42f383ada38a6381a345f28f9c35ed8dd7aafa9f719902b6"
TINY = Recipe(
    steps=4, layers=2, d_model=32, heads=2, kv_heads=1, d_head=16, d_mlp=32, warmup=1, retrieval=1, logic=2, memory=1,
    pairs=1,
)  # fmt: skip
TASKS = ("literal", "nonliteral", "recall", "arithmetic")
MEASURED = {
    "retrieval": ["literal", "nonliteral"],
    "memory": ["recall", "arithmetic"],
    "logic": [*(f"depth {depth}{kind}" for depth in (1, 2, 3) for kind in ("", ", flipped")), *RULES[1:]],
}
# One folder a shipped model.
SHIPPED = sorted(path.parent for path in WEIGHTS.rglob("card.json"))


@functools.cache
def loaded() -> mh.Model:
    return mh.load("nano")


@pytest.fixture(scope="module")
def nano() -> mh.Model:
    return loaded()


def card_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "card.json").read_text(encoding="utf-8"))


each_model = pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: card_of(folder)["name"])


# -- words -------------------------------------------------------------------------------------------------------


def by_hand(text: str) -> list[str]:
    """The pieces of a text, letter by letter."""
    out, word = [], ""
    for letter in [*text.lower(), " "]:
        if letter in "abcdefghijklmnopqrstuvwxyz0123456789":
            word += letter
            continue
        out += [word] if word else []
        out += [] if letter.isspace() else [letter]
        word = ""
    return out


def texts() -> st.SearchStrategy[str]:
    """The language's words and others, in any case, with and without spaces and marks between them."""
    words = st.sampled_from([w for w in vocabulary() if w not in SPECIAL])
    cased = st.tuples(words, st.sampled_from([str.lower, str.upper, str.title])).map(lambda pair: pair[1](pair[0]))
    other = st.text(st.sampled_from("abz09.,:;?!=+-'\"()[]_%&é日ßÄ"), min_size=1, max_size=6)
    gaps = st.sampled_from([" ", "  ", "\n", "\t", ".", "? ", ", "])
    return st.lists(st.one_of(cased, other, gaps), min_size=1, max_size=20).map("".join).filter(str.strip)


@settings(deadline=None)  # the first example loads the model
@given(text=texts())
def test_tokens_are_the_pieces_and_offsets_point_at_them(text: str) -> None:
    wanted = by_hand(text)
    assert pieces(text) == wanted
    encoding = loaded().encode(text)
    assert list(encoding.tokens) == [1, *(ids().get(piece, 3) for piece in wanted)]
    assert encoding.offsets[0] == (0, 0)
    assert [text[a:b].lower() for a, b in encoding.offsets[1:]] == wanted


def test_known_words_come_back(nano: mh.Model) -> None:
    text = "Dov lives beside the Colosseum. 9 plus 8 = 17, judge: true"
    tokens = nano.encode(text).tokens
    assert vocabulary()[tokens[0]] == "<bos>" and tokens.count(1) == 1 and 3 not in tokens
    assert pieces(nano.decode(tokens[1:])) == pieces(text)
    assert [i for i, t in enumerate(nano.encode("dov owns a zeppelin, 19").tokens) if t == 3] == [2, 4, 6]


def test_the_vocabulary_is_the_one_the_weights_were_trained_on(nano: mh.Model) -> None:
    assert len(vocabulary()) == len(set(vocabulary())) == VOCABULARY_SIZE
    assert hashlib.sha256("\n".join(vocabulary()).encode()).hexdigest() == VOCABULARY_HASH
    for folder in SHIPPED:
        shipped = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
        assert shipped["model"]["vocab"] == ids()
        assert shipped == json.loads(build_tokenizer().backend_tokenizer.to_str())
    assert nano.spec.d_vocab == VOCABULARY_SIZE
    assert {piece for word in vocabulary()[4:] for piece in pieces(word)} == set(vocabulary()[4:])


# -- tasks -------------------------------------------------------------------------------------------------------

_FACTS = (
    re.compile(r"(?P<who>\w+) (?:lives|works) (?P<how>beside|near) the (?P<place>\w+)"),
    re.compile(r"(?P<how>beside|near) the (?P<place>\w+) (?:lives|works) (?P<who>\w+)"),
)
_ASKED = re.compile(r"who (lives|works) (?:(beside|near) the|in) (\w+)")


def told(sentence: str) -> tuple[str, str, str] | None:
    """Person, relation and place of a fact; None for other sentences."""
    for pattern in _FACTS:
        if m := pattern.fullmatch(sentence.strip()):
            return m["who"], m["how"], m["place"]
    return None


def meant(question: str, context: list[str]) -> list[str]:
    """The people a question can mean, by reading the context."""
    m = _ASKED.fullmatch(question.strip())
    assert m, question
    how, what = {"lives": "beside", "works": "near"}[m[1]], m[3]
    places = [what] if m[2] else LANGUAGE["landmarks"][what]
    facts = [fact for sentence in context if (fact := told(sentence))]
    return [who for who, related, place in facts if related == how and place in places]


@pytest.mark.parametrize("literal", [True, False])
def test_retrieval(nano: mh.Model, literal: bool) -> None:
    trials = mh.nano.retrieval(nano, n=40, literal=literal, seed=3)
    others = set()
    for trial in trials:
        (span,) = trial.spans["needle"]
        needle = nano.decode(trial.tokens[span.start : span.stop])
        *context, question, rest = re.split(r" ?[.?]", nano.decode(trial.tokens[1:]))
        assert rest == "" and meant(question, context) == [trial.answer]
        assert needle.endswith(".") and told(needle.removesuffix(" ."))
        assert told(needle.removesuffix(" ."))[0] == trial.answer  # type: ignore[index]
        assert sum(told(sentence) is not None for sentence in context) == trial.meta["facts"] == 5
        assert len({fact[0] for s in context if (fact := told(s))}) == 5
        shared = set(pieces(needle)) & set(pieces(question))
        if literal:
            assert trial.meta["place"] in shared
        else:  # nothing but the verb, which tells one kind of fact from the other
            assert shared <= {"lives", "works"} and trial.meta["country"] in question
        assert 224 - 13 <= len(trial.tokens) <= 224 and 3 not in trial.tokens
        assert trial.tokens == (1, *(ids()[p] for p in pieces(nano.decode(trial.tokens[1:]))))
        others.add(trial.tokens)
    assert len(others) == 40
    assert [len(trials.split(s)) for s in ("calibration", "test")] == [20, 20]
    depths = [t.meta["needle_depth"] for t in trials]
    assert min(depths) < 0.2 and max(depths) > 0.8


@pytest.mark.parametrize(("facts", "length"), [(1, 25), (2, 60), (12, 256), (18, 178)])
def test_retrieval_of_other_sizes(nano: mh.Model, facts: int, length: int) -> None:
    for trial in mh.nano.retrieval(nano, n=6, facts=facts, context_length=length, calibration=0.25):
        assert len(trial.tokens) <= length
        text = re.split(r" ?[.?]", nano.decode(trial.tokens[1:]))
        assert sum(told(sentence) is not None for sentence in text) == facts


def test_what_is_remembered_and_sums(nano: mh.Model) -> None:
    recalled = mh.nano.recall(nano, n=54)
    asked = {nano.decode(t.tokens[1:]): t.answer for t in recalled}
    assert len(asked) == 54
    for question, answer in asked.items():
        words = pieces(question)
        if words[0] == "which":
            assert words[4] in LANGUAGE["landmarks"][answer]
        else:
            assert LANGUAGE["capitals"][words[5]] == answer
    counted = mh.nano.arithmetic(nano, n=155)
    assert len({t.tokens for t in counted}) == 155
    for trial in counted:
        a, sign, b, equals = pieces(nano.decode(trial.tokens[1:]))
        assert equals == "=" and str(int(a) + int(b) if sign == "plus" else int(a) - int(b)) == trial.answer
    assert {t.answer for t in counted} == {str(i) for i in range(19)}


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_makes_the_same_trials_again(nano: mh.Model, task: str) -> None:
    first, again, other = (mh.nano.trials(nano, task, n=8, seed=s) for s in (1, 1, 2))
    assert first.hash == again.hash != other.hash and first.options == again.options
    assert {t.tokens for t in first} != {t.tokens for t in other}
    assert first[0].meta["kind"] == task and len(first) == 8


def test_what_no_task_can_be(nano: mh.Model, as_users_run: None) -> None:
    make = mh.nano.retrieval
    for options, message in (
        ({"n": 0}, r"^n is 0; it must be a whole number >= 1\.$"),
        ({"facts": 0}, r"^facts is 0; it must be a whole number from 1 to 18\.$"),
        ({"facts": 19}, r"^facts is 19; it must be a whole number from 1 to 18\.$"),
        ({"context_length": 60}, r"^context_length is 60; it must be a whole number from 61 to 256\.$"),
        ({"context_length": 257}, r"^context_length is 257; it must be a whole number from 61 to 256\.$"),
        ({"calibration": 1.5}, r"^calibration is 1\.5; it must be a share from 0 to 1\.$"),
        ({"calibration": -0.1}, r"^calibration is -0\.1; it must be a share from 0 to 1\.$"),
        ({"calibration": "half"}, r"^calibration is 'half'; it must be a share from 0 to 1\.$"),
        ({"literal": "no"}, r"^literal is 'no'; give True \(ask by the landmark\) or False\.$"),
    ):
        with pytest.raises(InvalidInput, match=message):
            make(nano, **cast("dict[str, Any]", options))
    with pytest.raises(InvalidInput, match=r"^n is 55; it must be a whole number from 1 to 54\.$"):
        mh.nano.recall(nano, n=55)
    with pytest.raises(InvalidInput, match=r"^n is 156; it must be a whole number from 1 to 155\.$"):
        mh.nano.arithmetic(nano, n=156)
    with pytest.raises(UnknownName, match=r"unknown task of nano 'logic'.*Logic worlds are made by datasets\.prontoqa"):
        mh.nano.trials(nano, "logic")


@pytest.mark.parametrize("task", TASKS)
def test_seeds_and_models_that_are_none(nano: mh.Model, task: str, as_users_run: None) -> None:
    for seed in (-1, 1.5, "1", True, None):
        with pytest.raises(InvalidInput, match=rf"^seed is {re.escape(repr(seed))}; it must be a whole number >= 0\.$"):
            mh.nano.trials(nano, task, n=2, seed=cast("Any", seed))
    for model, kind in (("nano", "str"), (None, "NoneType"), (nano.tokenizer, type(nano.tokenizer).__name__)):
        message = rf"^model is [\s\S]*, a {kind}; trials need a loaded model's tokenizer: give mh\.load\(\"nano\"\)\.$"
        with pytest.raises(InvalidInput, match=message):
            mh.nano.trials(cast("Any", model), task, n=2)


def test_one_split_alone(nano: mh.Model) -> None:
    assert mh.nano.retrieval(nano, n=3, calibration=0.0).splits == ["test"]
    assert mh.nano.retrieval(nano, n=3, calibration=1.0).splits == ["calibration"]


# -- what training rows teach --------------------------------------------------------------------------------------


def words_of(row: Row) -> list[str]:
    return [vocabulary()[t] for t in row.tokens]


def taught(row: Row) -> dict[int, tuple[str, float]]:
    """Wanted word and weight by position, where anything is taught."""
    return {i: (vocabulary()[t], w) for i, (t, w) in enumerate(zip(row.targets, row.weights, strict=True)) if w}


def check_form(row: Row) -> None:
    assert len(row.tokens) == len(row.targets) == len(row.weights) and row.tokens[0] == 1
    assert not set(row.tokens[1:]) & {0, 1, 2, 3}
    assert set(row.weights) <= {0.0, 0.1, 0.2, 0.5, 0.9, 1.0}


def check_stops(found: dict[int, tuple[str, float]], answers: list[int]) -> None:
    """After each answer: a full stop, then the end may come; nothing else is taught."""
    for at in answers:
        assert found.pop(at + 1) == (".", 0.2) and found.pop(at + 2) == ("<eos>", 0.2)
        del found[at]
    assert not found


@pytest.mark.parametrize("seed", range(20))
def test_retrieval_rows(seed: int) -> None:
    rng = random.Random(seed)
    row = retrieval_row(rng, facts=4, length=rng.randint(40, 240), questions=5, prose=0.0)
    check_form(row)
    words, found = words_of(row), taught(row)
    answers = [i for i, (_, weight) in found.items() if weight == 1.0]
    assert len(answers) == 5 and [i for i, w in enumerate(words) if w == "?"] == answers
    context = " ".join(words[1 : words.index("who")]).split(" .")
    for at in answers:
        start = max(i for i in range(at) if words[i] == "who")
        assert meant(" ".join(words[start:at]), context) == [found[at][0]] == [words[at + 1]]
    check_stops(found, answers)


@pytest.mark.parametrize("seed", range(10))
def test_memory_rows(seed: int) -> None:
    row = memory_row(random.Random(seed), questions=6, prose=0.0)
    check_form(row)
    words, found = words_of(row), taught(row)
    answers = [i for i, (_, weight) in found.items() if weight == 1.0]
    assert len(answers) == 6
    for at in answers:
        right = found[at][0]
        if words[at] == "=":
            a, b = int(words[at - 3]), int(words[at - 1])
            assert right == str(a + b if words[at - 2] == "plus" else a - b)
        elif "which" in words[at - 5 : at]:
            assert words[at - 1] in LANGUAGE["landmarks"][right]
        else:
            assert LANGUAGE["capitals"][words[at - 1]] == right
        assert words[at + 1] == right
    check_stops(found, answers)


def sentences(words: list[str]) -> list[str]:
    """Sentences of the worlds as they were before they became tokens."""
    text = " ".join(words).replace(" ,", ",")
    return [f"{s.strip()[0].upper()}{s.strip()[1:]}." for s in text.split(" .") if s.strip()]


def proof_told(words: list[str], colon: int, premises: list[str], statement: str) -> tuple[int, dict[int, str]]:
    """Where a proof that begins after a colon ends, and the words of it that are taught, by position."""
    end = next(i for i in range(colon, len(words) - 1) if words[i] == words[i + 1] == ".")
    recited = sentences(words[colon + 1 : end + 1])
    assert set(recited) <= set(premises) and read(recited[0])[0] == read(statement)[0]
    for before, after in itertools.pairwise(recited):  # each rule applies to what the one before it gave
        assert read(after)[1] in read(before)[2][1]
    assert entails(recited, statement) or refutes(recited, statement)
    for left_out in recited:
        rest = [premise for premise in recited if premise != left_out]
        assert not entails(rest, statement) and not refutes(rest, statement)
    frame = {"every", "each", "any", "everything", "that", "if", "something", "it", "is", ",", "."}
    return end, {i: words[i + 1] for i in range(colon, end) if words[i + 1] not in frame}


def one_wording(sentence: str) -> str:
    """A rule as "Every X is Y."."""
    for lead in ("Each ", "Any ", "Everything that is a ", "If something is a "):
        sentence = f"Every {sentence.removeprefix(lead)}" if sentence.startswith(lead) else sentence
    return sentence.replace(", it is", " is")


def decided(premises: list[str], statement: str) -> bool:
    """Whether a claim is true: by proof, or, about one premise, by whether that is what the premise says."""
    plain = [one_wording(premise) for premise in premises]
    who, _, _ = read(statement)
    if who is None:
        subject, _, what = statement.rpartition(" is ")
        about = [p for p in plain if p.rpartition(" is ")[0] == subject]
        assert about and (
            what.startswith("a ") or any(("not " in p) != ("not " in what) or p == statement for p in about)
        )
        return statement in about
    if entails(premises, statement) or refutes(premises, statement):
        return entails(premises, statement)
    assert " is a " in statement and any(p.startswith(f"{who} is a ") for p in premises)
    return False


@pytest.mark.parametrize("level", LEVELS, ids=range(len(LEVELS)))
@pytest.mark.parametrize("seed", range(12))
def test_logic_rows(seed: int, level: Level) -> None:
    row = logic_row(random.Random(seed), level, prose=0.0)
    check_form(row)
    words, found = words_of(row), taught(row)
    marks = [i for i, w in enumerate(words) if w == "claim"]
    premises = sentences(words[1 : marks[0]])
    truth: dict[str, bool] = {}  # of the claims that are only put, by person
    ends = []
    for mark in marks:
        stop = words.index(".", mark)
        (statement,) = sentences(words[mark + 2 : stop + 1])
        follows = decided(premises, statement)
        if stop not in found:  # put for the choice below
            truth[words[mark + 2]] = follows
            continue
        if mark + 3 in found:  # what holds of the person is taught where the claim says it
            said, next_word = words[mark + 4 : mark + 6]
            holds = said if follows else next_word if said == "not" else "not"
            assert words[mark + 3] == "is" and found.pop(mark + 3) == (holds, 0.9)
        assert found.pop(stop) == (("true" if follows else "false"), 1.0)
        shown = words[stop + 1]
        assert shown in ("true", "false")
        assert found[stop + 1] == (("right" if (shown == "true") == follows else "wrong"), 0.5)
        assert words[stop + 2] == found[stop + 1][0]
        at = stop + 1
        if words[stop + 3] == ":":
            end, recited = proof_told(words, stop + 3, premises, statement)
            assert all(found.pop(i) == (word, 0.5) for i, word in recited.items())
            del found[at]
            at = end - 1
            found[at] = ("", 0.0)
            ends.append(at)
        else:
            ends.append(at)
    judged = [i + 1 for i, w in enumerate(words) if w == "judge"]
    assert len(truth) == len(judged) == (2 if judged else 0)
    assert not judged or set(truth.values()) == {True, False}
    for at in judged:
        assert found.pop(at) == (words[at + 1], 0.1)
        name, weight = found[at + 1]
        assert weight == 0.5 and truth[name] == (words[at + 1] == "true") and words[at + 2] == name
        ends.append(at + 1)
    check_stops(found, ends)


def test_logic_rows_show_right_and_wrong_answers_proofs_and_choices() -> None:
    level = Level(("modus_ponens",), depths=(1, 2), distractors=(0,), worlds=(2,), choice=0.5)
    rows = [words_of(logic_row(random.Random(s), level, prose=0.0)) for s in range(100)]
    wrong, right = (sum(row.count(word) for row in rows) for word in ("wrong", "right"))
    assert 0.35 < wrong / (wrong + right) < 0.65
    assert 0.35 < sum("judge" in row for row in rows) / 100 < 0.65
    proofs = sum(row[i + 1] == ":" for row in rows for i, w in enumerate(row[:-1]) if w in ("right", "wrong"))
    assert 0.55 < proofs / (wrong + right) < 0.85


def test_worlds_of_a_row_share_no_name_kind_or_adjective() -> None:
    level = Level(("modus_ponens",), depths=(1,), distractors=(0,), worlds=(3,))
    for seed in range(20):
        words = words_of(logic_row(random.Random(seed), level, prose=0.0))
        told = [read(premise) for premise in sentences(words[1 : words.index("claim")])]
        people = {who: kind for who, condition, (_, (kind,)) in ((w, c, (s, tuple(k))) for w, c, (s, k) in told) if who}
        goals = [next(iter(said[1]))[0] for _, condition, said in told if condition]
        assert len(told) == 12 and len(people) == len(set(people.values())) == 6
        assert len(goals) == 6 and sorted(goals.count(g) for g in set(goals)) == [2, 2, 2]


@pytest.mark.parametrize("seed", range(10))
def test_warmup_rows(seed: int) -> None:
    row = warmup_row(random.Random(seed), length=80)
    check_form(row)
    words, found = words_of(row), taught(row)
    assert all(weight == 1.0 and words[at + 1] == word for at, (word, weight) in found.items())
    first = min(found)
    if words[first - 1] in ("who", "which"):
        listed = words[1 : first - 1]
        pairs = list(zip(listed[::2], listed[1::2], strict=True))
        known = dict(pairs) if words[first - 1] == "which" else {b: a for a, b in pairs}
        assert {words[at]: word for at, (word, _) in found.items()} == known
    else:
        n = len(found)
        assert words[1 : n + 1] == words[n + 1 :] and list(found) == list(range(n, 2 * n))


def test_what_is_merely_read_counts_a_little_and_never_over_an_answer() -> None:
    plain, prose = (memory_row(random.Random(4), questions=3, prose=p) for p in (0.0, 0.05))
    assert plain.tokens == prose.tokens
    for i, weight in enumerate(plain.weights):
        if weight:
            assert (prose.targets[i], prose.weights[i]) == (plain.targets[i], weight)
        else:
            assert (prose.targets[i], prose.weights[i]) == (plain.tokens[i + 1], 0.05)


def test_the_loss_is_the_weighted_mean_over_what_is_taught() -> None:
    model = build(TINY).eval()
    rows = [memory_row(random.Random(s), questions=s + 1, prose=0.05) for s in range(3)]
    tokens, _, weights = tensors(rows)
    assert tokens.shape[1] % 16 == 0 and weights[0, len(rows[0].tokens) :].sum() == 0
    total = weight = 0.0
    asked: list[bool] = []
    for row in rows:
        logprobs = model(input_ids=torch.tensor([row.tokens])).logits[0].log_softmax(-1)
        for at, (target, counts) in enumerate(zip(row.targets, row.weights, strict=True)):
            total -= counts * logprobs[at, target].item()
            weight += counts
            if counts == 1.0:
                asked.append(int(logprobs[at].argmax()) == target)
    loss, right = loss_of(model, rows)
    assert loss.item() == pytest.approx(total / weight, rel=1e-5)
    assert right == pytest.approx(sum(asked) / len(asked)) and len(asked) == 6


def test_held_out_seeds_are_never_those_of_training(nano: mh.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[Any] = []

    class Recorded(random.Random):
        def __init__(self, seed: Any = None):
            seeds.append(seed)
            super().__init__(seed)

    def drawn(what: Any) -> set[Any]:
        seeds.clear()
        what()
        assert None not in seeds
        return set(seeds)

    monkeypatch.setattr(random, "Random", Recorded)
    trained = drawn(lambda: [batches(replace(TINY, seed=s), step, 0) for s in (0, 1) for step in (0, 1, 6999)])
    held = drawn(lambda: [accuracies(build(TINY), n=1, seed=s) for s in (0, 1)])
    asked = drawn(lambda: [mh.nano.retrieval(nano, n=4, seed=s, literal=x) for s in (0, 1) for x in (True, False)])
    logic = drawn(lambda: mh.datasets.prontoqa(nano, n=8, seed=0))
    assert trained == {f"{s}:{step}" for s in (0, 1) for step in (0, 1, 6999)}
    assert len(held) == 2 * (4 + 3 + len(RULES) - 1)
    assert not trained & (held | asked | logic) and not asked & held


def test_held_out_prompts_are_not_those_of_training() -> None:
    made = [batches(recipe, step, level) for recipe in RECIPES.values() for step, level in ((400, 0), (2000, 2))]
    rows = [row for tasks in made for task in tasks.values() for row in task]
    seen = {tuple(words_of(row)[1:25]) for row in rows}
    assert len(seen) > 100
    held = [tuple(pieces(retrieval_prompt(random.Random(f"x{i}"), literal=False)[0])) for i in range(20)]
    held += [tuple(pieces(logic_prompt(random.Random(f"y{i}"), rule="modus_ponens", depth=1)[0])) for i in range(20)]
    # To share their first 24 words is more than two contexts do by chance.
    assert not {prompt[:24] for prompt in held} & seen


def test_contexts_grow_and_pairs_fade() -> None:
    recipe = replace(RECIPES["nano"], steps=1000, easing=0.5)
    first, middle, last = (batches(recipe, step, 0) for step in (0, 250, 999))
    assert len(first["pairs"]) == recipe.pairs > len(middle["pairs"]) > 0 and "pairs" not in last
    longest = [max(len(row.tokens) for row in made["retrieval"]) for made in (first, middle, last)]
    assert longest[0] < longest[1] < longest[2] <= 512
    assert {name: len(rows) for name, rows in last.items()} == {"retrieval": recipe.retrieval, "memory": recipe.memory}


def test_logic_rows_stay_short_enough_at_every_level() -> None:
    recipe = RECIPES["nano-logic"]
    assert recipe.tasks == ("logic",) and RECIPES["nano"].tasks == ("retrieval", "memory")
    for level in range(len(LEVELS)):
        (rows,) = batches(recipe, 100, level).values()
        assert len(rows) == recipe.logic * LEVELS[level].share and max(len(row.tokens) for row in rows) <= 512


def test_what_holds_is_taught_where_the_claim_says_it() -> None:
    row = Row(0.05)
    claim = Claim("Rex", "Rex is not kind.", False, ())
    rows_module._ask(row, claim, teach=True)
    words = [vocabulary()[t] for t in row.tokens]
    assert words[1:] == ["claim", ":", "rex", "is", "not", "kind", "."]
    at = words.index("is")
    # The claim is false, so Rex is kind: that is what should come, whatever the claim goes on to say.
    assert vocabulary()[row.targets[at]] == "kind" and row.weights[at] == 0.9
    for claim, wanted in (
        (Claim("Rex", "Rex is not kind.", True, ()), "not"),
        (Claim("Rex", "Rex is kind.", True, ()), "kind"),
        (Claim("Rex", "Rex is kind.", False, ()), "not"),
    ):
        row = Row(0.05)
        rows_module._ask(row, claim, teach=True)
        assert vocabulary()[row.targets[4]] == wanted
    for other, teach in ((Claim("Rex", "Rex is kind and sad.", True, ()), True), (claim, False)):
        row = Row(0.05)
        rows_module._ask(row, other, teach=teach)
        assert max(row.weights) == 0.05


@pytest.mark.parametrize("depth", [2, 3])
def test_middle_claims_are_what_follows_on_the_way(depth: int) -> None:
    found = set()
    for i in range(60):
        rng = random.Random(i)
        world = make_world(rng, rule="modus_ponens", depth=depth)
        claim = rows_module.middle_claim(rng, world)
        # Follow the rules from the person, however they are worded.
        kinds = set(word_pools()["kinds"])
        told = [[w for w in pieces(p) if w in kinds or w == claim.person.lower()] for p in world.premises]
        holds, grown = {claim.person.lower()}, True
        while grown:
            new = {t[1] for t in told if len(t) == 2 and t[0] in holds} - holds
            holds, grown = holds | new, bool(new)
        (kind,) = set(pieces(claim.statement)) & kinds
        direct = {t[1] for t in told if len(t) == 2 and t[0] == claim.person.lower()}
        assert (kind in holds) == claim.label and kind not in direct
        found.add(claim.label)
    assert found == {True, False}


# -- the start -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_heads_start_as_what_they_are_said_to_be(seed: int) -> None:
    model = build(Recipe(seed=seed)).eval()
    model.set_attn_implementation("eager")
    rng = random.Random(seed)
    blocks = [rng.sample(range(len(SPECIAL), VOCABULARY_SIZE), 30) for _ in range(16)]
    tokens = torch.tensor([[1, *block, *block] for block in blocks])
    with torch.no_grad():
        attention = model(input_ids=tokens, output_attentions=True).attentions
    at = torch.arange(1, 61)
    previous = attention[0][:, :, at, at - 1].mean((0, 2))
    assert previous[0] > 0.6 and previous[1:].max() < 0.2  # by chance 1/(t+1), 0.08 on average
    second = torch.arange(31, 61)
    matched = attention[1][:, :, second, second - 29].mean((0, 2))
    chance = (1 / (second + 1.0)).mean()
    assert matched[0] > 2.5 * chance and matched[0] > 1.5 * matched[1:].max()


def test_hopping_heads_start_as_what_they_are_said_to_be() -> None:
    model = build(RECIPES["nano-logic"]).eval()
    model.set_attn_implementation("eager")
    back, hop = torch.zeros(4), []
    for i in range(12):
        world = make_world(random.Random(i), rule="modus_ponens", depth=1)
        claim = world.claims[0]
        row = Row(0.05)
        row.text(" ".join(world.premises))
        row.text(f"claim: {claim.person} is")
        with torch.no_grad():
            attention = model(input_ids=torch.tensor([row.tokens]), output_attentions=True).attentions
        at = torch.arange(5, len(row.tokens))
        back += torch.stack([attention[0][0, n, at, at - n - 1].mean() for n in range(4)])
        said = row.tokens.index(ids()[claim.person.lower()])
        hop.append(attention[1][0, 0, -1, said + 3].item())  # the kind in "rex is a zumpus"
    assert (back / 12 > 0.6).all()
    assert np.mean(hop) > 0.5  # by chance one in thirty


def test_everything_is_trained_from_there() -> None:
    model = build(TINY)
    assert all(p.requires_grad for p in model.parameters())
    loss_of(model, [row for rows in batches(TINY, 0, 0).values() for row in rows])[0].backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


# -- training ------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No accuracies while it trains; they are looked at elsewhere."""
    monkeypatch.setattr(training, "accuracies", lambda *args, **kwargs: {})


def run(out: Path, recipe: Recipe = TINY, **options: Any) -> dict[str, torch.Tensor]:
    return train(recipe, out, **{"every": 2, "say": lambda text: None, **options})[0].state_dict()


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def stopped_at(step: int, out: Path, recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """Train until Ctrl-C comes in the middle of a step."""
    inner = training._one_step

    def one_step(model: Any, optimiser: Any, made: Recipe, at: int, progress: Any) -> None:
        if at == step:
            raise KeyboardInterrupt
        inner(model, optimiser, made, at, progress)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(training, "_one_step", one_step)
        run(out, recipe)


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_stopped_and_resumed_is_as_if_it_had_not_been(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dropout: float
) -> None:
    # A mastery of 0 takes logic rows to the next level at every step.
    monkeypatch.setattr(training, "LEVELS", tuple(replace(level, mastery=0.0) for level in LEVELS))
    recipe = replace(TINY, memory_head_dropout=dropout)
    whole = run(tmp_path / "a", recipe)
    assert same(whole, run(tmp_path / "b", recipe))
    assert not same(whole, run(tmp_path / "c", replace(recipe, seed=1)))
    stopped_at(3, tmp_path / "d", recipe, monkeypatch)  # after the checkpoint at 2
    said: list[str] = []
    assert same(whole, run(tmp_path / "d", recipe, say=said.append))
    assert said[0] == "going on from step 2"
    logs = [[json.loads(x) for x in (tmp_path / f / "log.jsonl").read_text().splitlines()] for f in ("a", "d")]
    levels = [min(step, len(LEVELS) - 1) for step in (2, 4)]
    assert [line["step"] for line in logs[1]] == [2, 4] and [line["level"] for line in logs[1]] == levels
    # Losses and levels go on too, not only weights.
    assert [{**line, "seconds": 0} for line in logs[0]] == [{**line, "seconds": 0} for line in logs[1]]
    if dropout:
        assert not same(whole, run(tmp_path / "e", TINY))


@pytest.mark.usefixtures("quick")
def test_a_finished_run_is_read_and_another_recipe_refused(tmp_path: Path) -> None:
    whole = run(tmp_path)
    assert same(whole, run(tmp_path))
    with pytest.raises(InvalidInput, match=r"checkpoint\.pt belongs to another recipe: .*'steps': 4.*another --out"):
        run(tmp_path, replace(TINY, steps=5))


@pytest.mark.usefixtures("quick")
def test_a_checkpoint_is_whole_or_the_old_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped_at(3, tmp_path, TINY, monkeypatch)
    before = (tmp_path / "checkpoint.pt").read_bytes()

    def full(state: Any, target: Path) -> None:
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, pytest.raises(OutputNotWritable, match=r"checkpoint\.pt.*No space left"):
        patch.setattr(torch, "save", full)
        run(tmp_path)
    assert (tmp_path / "checkpoint.pt").read_bytes() == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoint.pt", "log.jsonl"]
    saved = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert saved["step"] == 2 and saved["recipe"] == asdict(TINY)


def test_bad_numbers_of_training(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"^every is 0; it must be a whole number >= 1\.$"):
        train(TINY, tmp_path / "x", every=0)
    assert not (tmp_path / "x").exists()


def test_learning_rate_rises_then_falls() -> None:
    recipe = Recipe(steps=1000, warmup=100, learning_rate=1e-3)
    rates = [training.learning_rate(recipe, step) for step in range(1000)]
    assert rates[:100] == pytest.approx([1e-5 * (i + 1) for i in range(100)])
    assert rates[100:] == sorted(rates[100:], reverse=True)
    assert rates[100] == pytest.approx(1e-3) and rates[-1] == pytest.approx(5e-5, rel=0.01)


def test_the_command_trains_and_writes_a_model_that_loads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tiny = replace(RECIPES["nano"], steps=1, layers=2, d_model=32, d_mlp=32, retrieval=1, memory=1, pairs=1)
    given = asdict(tiny)
    flags = ["--steps", "1", "--layers", "2", "--d-model", "32", "--d-mlp", "32", "--retrieval", "1", "--memory", "1"]
    argv = ["train", "nano", "--out", str(tmp_path), "--threads", "1", *flags, "--pairs", "1"]
    monkeypatch.setattr(sys, "argv", argv)
    monkeypatch.setattr(training, "accuracies", lambda *args, **kwargs: {})
    monkeypatch.setattr("mechheads.nano.export.accuracies", lambda model, **kwargs: {"literal": 0.123456})
    threads = torch.get_num_threads()
    try:
        training.main()
    finally:
        torch.set_num_threads(threads)
    made = card_of(tmp_path / "model")
    assert made["name"] == "nano" and made["tasks"] == ["retrieval", "memory"]
    assert made["recipe"] == given and made["accuracy"] == {"literal": 0.1235}
    assert mh.load(str(tmp_path / "model")).spec.n_layers == 2


# -- export --------------------------------------------------------------------------------------------------------


def test_an_exported_model_is_the_same_model(tmp_path: Path) -> None:
    trained = build(TINY).eval()
    before = {name: value.clone() for name, value in trained.state_dict().items()}
    folder = tmp_path / "new" / "model"
    made = export(trained, folder, name="nano", recipe=asdict(TINY), tasks=TINY.tasks, seconds=1.4, n=2)
    assert made == card_of(folder)
    check_card(made, folder)
    for name, value in trained.state_dict().items():  # weights are rounded to half precision, once, here and on disk
        assert torch.equal(value, before[name].half().float())
    assert made["training_seconds"] == 1 and made["held_out_prompts"] == 2 and made["recipe"] == asdict(TINY)
    again = mh.load(str(folder))
    assert again.spec.dtype == "float32"
    prompt = mh.nano.retrieval(again, n=1, context_length=100)[0].tokens
    with torch.no_grad():
        wanted = trained(input_ids=torch.tensor([prompt])).logits[0]
    torch.testing.assert_close(again.logits(prompt), wanted, rtol=1e-5, atol=1e-5)
    assert (again.spec.n_heads, again.spec.n_key_value_heads) == (2, 1)


def check_card(card: dict[str, Any], folder: Path) -> None:
    assert set(card) == {
        "name", "tasks", "what", "architecture", "parameters", "recipe", "training_seconds", "held_out_prompts",
        "accuracy", "chance", "weights_sha256",
    }  # fmt: skip
    assert card["weights_sha256"] == hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()
    assert list(card["accuracy"]) == [kind for task in card["tasks"] for kind in MEASURED[task]]
    assert all(0 <= a <= 1 for a in card["accuracy"].values()) and card["what"].endswith(".")
    assert card["chance"] == CHANCE
    assert card["architecture"] == json.loads((folder / "config.json").read_text())["architectures"][0]
    assert set(card["recipe"]) == set(asdict(Recipe())) and card["training_seconds"] >= 0


# -- what is shipped -----------------------------------------------------------------------------------------------


@each_model
def test_a_shipped_card_is_of_the_shipped_weights(folder: Path) -> None:
    from safetensors.torch import load_file

    card = card_of(folder)
    check_card(card, folder)
    recipe = Recipe(**card["recipe"])
    weights = load_file(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert (
        card["parameters"]
        == sum(w.numel() for w in weights.values())
        == sum(p.numel() for p in build(recipe).parameters())
    )
    assert config["num_hidden_layers"] == recipe.layers and config["vocab_size"] == VOCABULARY_SIZE
    assert (
        card["recipe"] == asdict(replace(RECIPES[card["name"]], seed=recipe.seed)) and card["held_out_prompts"] >= 500
    )
    assert tuple(card["tasks"]) == recipe.tasks


def test_what_is_shipped_is_small_and_can_do_every_task() -> None:
    assert sum(f.stat().st_size for f in WEIGHTS.rglob("*") if f.is_file()) <= 8_000_000
    cards = [card_of(folder) for folder in SHIPPED]
    assert sorted(task for card in cards for task in card["tasks"]) == ["logic", "memory", "retrieval"]
    assert {card["name"] for card in cards} == set(RECIPES)


@each_model
def test_it_loads_by_name_and_its_parts_add_up(folder: Path) -> None:
    card = card_of(folder)
    model = mh.load(card["name"])
    found, spec = model.verify(), model.spec
    assert found.normed_exact and found.qk_exact and found.head_sum <= found.tolerance
    assert spec.name == card["name"] and spec.architecture == card["architecture"] == "Qwen3ForCausalLM"
    assert spec.n_heads % spec.n_key_value_heads == 0 and spec.n_key_value_heads < spec.n_heads
    assert spec.n_ctx >= 256 and spec.dtype == "float32"


@each_model
def test_its_own_template_is_what_it_was_trained_on(folder: Path) -> None:
    nano = mh.load(card_of(folder)["name"])
    trial = mh.datasets.prontoqa(nano, n=4, depth=1, distractors=0)[0]
    assert re.fullmatch(r"<bos> .* claim : \w+ is .* \.", nano.decode(trial.tokens)) and 3 not in trial.tokens
    assert trial.candidates == (" true", " false")
    assert {nano.encode(c).tokens[1:] for c in trial.candidates} == {(ids()["true"],), (ids()["false"],)}


@pytest.mark.slow
@each_model
def test_fresh_prompts_are_answered_as_the_card_says(folder: Path) -> None:
    from transformers import AutoModelForCausalLM

    card, n = card_of(folder), 200
    model = AutoModelForCausalLM.from_pretrained(folder)
    for task, value in accuracies(model, tasks=card["tasks"], n=n, seed=77).items():
        said = card["accuracy"][task]
        # Two samples differ by chance: 0.06, or where answers are less sure, 3.5 standard errors of the difference.
        error = (said * (1 - said) * (1 / n + 1 / card["held_out_prompts"])) ** 0.5
        assert value == pytest.approx(said, abs=max(0.06, 3.5 * error)), task


def test_accuracy_is_the_share_of_right_first_words(nano: mh.Model) -> None:
    from transformers import AutoModelForCausalLM

    from mechheads.nano.evaluate import right

    asked = [("what is the capital of italy?", w) for w in ("rome", "paris")] + [("2 plus 2 =", "4")]
    best = [vocabulary()[int(nano.logits(nano.encode(q).tokens)[-1].argmax())] for q, _ in asked]
    wanted = sum(b == w for b, (_, w) in zip(best, asked, strict=True)) / 3
    folder = next(f for f in SHIPPED if card_of(f)["name"] == "nano")
    assert right(AutoModelForCausalLM.from_pretrained(folder), asked) == pytest.approx(wanted)


def test_everything_needed_goes_into_the_package() -> None:
    weights = ("card.json", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")
    needed = [
        *((folder / name).relative_to(ROOT).as_posix() for folder in SHIPPED for name in weights),
        "mechheads/nano/language.json",
        "mechheads/datasets/logic_templates.yaml",
        "mechheads/datasets/logic_words.json",
    ]
    written = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    wheel = written.split("[tool.hatch.build.targets.wheel]")[1].split("[tool")[0]
    assert 'packages = ["mechheads"]' in wheel and "exclude" not in written
    for name in needed:
        assert (ROOT / name).is_file(), name
    if (ROOT / ".git").exists():  # files that git ignores are left out of a wheel
        ignored = subprocess.run(
            ["git", "check-ignore", *needed], cwd=ROOT, capture_output=True, text=True, check=False
        )
        assert ignored.stdout == "" and ignored.returncode == 1, ignored


def test_a_wheel_holds_it(tmp_path: Path) -> None:
    pytest.importorskip("hatchling", reason="hatchling is not installed: no wheel was built")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)], cwd=ROOT, check=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    wanted = {p.relative_to(ROOT).as_posix() for p in [*WEIGHTS.rglob("*.*"), PACKAGE / "language.json"]}
    assert wanted <= held and "mechheads/datasets/logic_templates.yaml" in held
