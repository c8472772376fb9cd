"""NoLiMa needle sets, and the system prompts they bring along."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
import tiny
from test_dataset_files import NOLIMA, entries, pieces
from test_datasets import Pieces, Words, mentions, text_of

from mechheads.datasets import nolima
from mechheads.datasets.chat import encode, has_system_role
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoding

# -- NoLiMa ------------------------------------------------------------------------------------------


def test_nolima_fills_placeholders_and_honours_the_template():
    model = Words()
    seen = set()
    for trial in nolima(model, NOLIMA, n=8, context_length=400, split_tests=False, distractors=False):
        mark, town, _ = trial.meta["input_args"]
        who = trial.meta["character"]
        assert trial.answer == who and trial.meta["question"] == f"Which character has been to {town}?"
        text = text_of(model, trial)
        seen.add(trial.meta["entry"])
        if trial.meta["entry"] == "0101":
            assert trial.meta["needle"] == f"In those days {who} rented a room across from the {mark}."
            assert text.startswith("Be brief.\n\nRead the passage.\n\n")
            assert text.endswith(f"\n\nQuestion: Which character has been to {town}?\n\nGive the name alone.")
            assert trial.meta["system_prompt_place"] == "before the prompt"
        else:
            assert trial.meta["needle"] == f"The {mark} stood across from the room that {who} rented."
            assert text.endswith(f"\n\nQuestion: Which character has been to {town}?\nAnswer:")
            assert trial.meta["system_prompt"] is trial.meta["system_prompt_place"] is None
        assert "{" not in text and "distractor" not in trial.spans
    assert seen == {"0101", "0101Inv"}


def test_nolima_splits_share_no_arguments_unless_asked():
    def arguments(trials, split):
        return {tuple(t.meta["input_args"]) for t in trials.split(split)}

    trials = nolima(Words(), NOLIMA, n=8, context_length=300)
    assert not arguments(trials, "calibration") & arguments(trials, "test")
    shared = nolima(Words(), NOLIMA, n=24, context_length=300, split_tests=False)
    assert arguments(shared, "calibration") & arguments(shared, "test")
    assert not {t.answer for t in shared.split("test")} & {t.answer for t in shared.split("calibration")}


@pytest.mark.parametrize("encoder", [Words, Pieces])
@pytest.mark.parametrize("depth", [None, 0.0, 0.5, 1.0])
def test_nolima_distractors_stay_away_from_the_needle(encoder, depth):
    model = encoder()
    for trial in nolima(model, NOLIMA, question="twohop", n=8, context_length=500, depth=depth):
        assert trial.meta["distractors"] == [
            f"A map of {trial.meta['input_args'][2]} hung there.",
            f"Nobody sold stamps of {trial.meta['input_args'][2]} any more.",
        ]
        found = " ".join(pieces(model, trial, "distractor"))
        assert all(text in found for text in trial.meta["distractors"])
        assert all(abs(at - trial.meta["depth"]) >= 0.2 for at in trial.meta["distractor_depths"])
        (needle,) = trial.spans["needle"]
        passage = len(trial.tokens)
        for span in trial.spans["distractor"]:
            assert max(span.start - needle.stop, needle.start - span.stop) > 0.1 * passage


def test_nolima_distractors_without_room_are_refused():
    with pytest.raises(InvalidInput, match=r"context_length=\d+ leaves too little prose to part the distractor"):
        for length in range(70, 120):
            nolima(Words(), NOLIMA, n=4, context_length=length, distractor_gap=0.01, seed=length)


def test_nolima_multiple_choice_holds_the_answer_in_its_question():
    model = Words()
    for trial in nolima(model, NOLIMA, question="choice", n=4, context_length=300):
        assert trial.meta["multiple_choice"] and trial.answer in trial.meta["question"]
        assert f"Boris, {trial.answer} or Lena?" in text_of(model, trial, "question")
        assert mentions(trial.meta["answer"], text_of(model, trial)) == 2


def test_nolima_gold_answers_and_a_question_on_both_sides():
    model = Words()
    trials = nolima(model, NOLIMA, question="colour", n=2, context_length=200)
    assert {t.answer for t in trials} == {"crimson", "turquoise"}
    for trial in trials:
        before, after = pieces(model, trial, "question")
        assert before.strip() == after.strip() == trial.meta["question"]
        assert trial.spans["question"][0].start == 0
        assert text_of(model, trial).endswith("Use {brackets}.")
        assert trial.meta["character"] is None
    assert [t.meta["answers"] for t in trials if t.answer == "crimson"] == [["crimson", "red"]]
    assert trials.options["entries_without_question"] == 2


def test_nolima_leaves_out_sentences_with_the_answer_or_an_argument(tmp_path):
    words = ["Yuki", "Stuart", "Katie", "Veronica", "Gary", "Megan", "Granada", "Paris", "Berlin", "Prague"]
    prose = " ".join(f"Somebody shouted {w} over the wall at noon." for w in words)
    filler = " ".join(f"The {a} {b} slept under a hedge." for a in ("red", "old", "wet") for b in "abcdefghijk")
    (tmp_path / "a.txt").write_text(prose + " " + filler, encoding="utf-8")
    model = Words()
    trials = nolima(model, NOLIMA, n=4, context_length=240, haystack=tmp_path, distractors=False)
    for trial in trials:
        text = text_of(model, trial)
        assert mentions(trial.meta["answer"], text) == 1
        assert mentions(trial.meta["input_args"][1], text) == 1, "in the question alone"
        assert trial.meta["haystack_left_out"]


def test_nolima_own_template():
    model = Words()
    trial = nolima(model, NOLIMA, n=2, context_length=200, task_template="{haystack} Now: {question}")[0]
    assert text_of(model, trial).endswith(f" Now: {trial.meta['question']}")


BROKEN: list[tuple[Any, str]] = [
    (lambda e: e.pop("needle"), r"entry 1 has no 'needle'; it has \["),
    (lambda e: e.update(needle=3), r"entry 1: 'needle' is 3, a int; it must be text"),
    (lambda e: e.update(needle="  "), "entry 1: 'needle' is empty"),
    (lambda e: e.update(needle="{CHAR} met {5}."), r"test 'T01': the needle uses the placeholder \{5\}.*known: \{1\}"),
    (lambda e: e.update(needle="{CHAR} met {name}."), r"placeholder \{name\}"),
    (lambda e: e.update(needle="{CHAR} met {0}."), r"placeholder \{0\}"),
    (lambda e: e["questions"].update(onehop="Who was in {4}?"), r"the question 'onehop' uses the placeholder \{4\}"),
    (lambda e: e["questions"].update(onehop=["Who?"]), r"'onehop' is \['Who\?'\], a list; it must be text"),
    (lambda e: e.update(questions=[]), r"'questions' is \[\], a list; it must be an object"),
    (lambda e: e.update(tests={}), "has no tests"),
    (lambda e: e["tests"].update(T01=["x"]), r"test 'T01' is \['x'\]; it must be an object"),
    (lambda e: e["tests"].update(T01={}), "test 'T01' has no 'input_args'"),
    (lambda e: e["tests"].update(T01={"input_args": [1]}), r"'input_args' is \[1\]; give a list of non-empty texts"),
    (lambda e: e.pop("character_set"), "has no 'character_set'"),
    (lambda e: e.update(character_set=[]), r"'character_set' is \[\]; give a list"),
    (lambda e: e.update(needle="A room by the {1}."), r"the needle has no \{CHAR\}, so the test needs 'gold_answers'"),
    (lambda e: e.update(distractors={"onehop": "{CHAR} lied."}), r"the distractor uses the placeholder \{CHAR\}"),
    (lambda e: e.update(distractors={"onehop": 5}), "'onehop' is 5, a int"),
    (lambda e: e.update(task_template="{haystack} only"), r"the placeholders \['haystack'\]; it needs \{haystack\}"),
    (lambda e: e.update(task_template="{haystack}{haystack}{question}"), "it needs {haystack} once"),
    (lambda e: e.update(task_template="{haystack} {question} {x}"), "and no other"),
    (lambda e: e.update(task_template="{haystack} {question} {"), "the template .* cannot be read"),
    (lambda e: e["questions"].update(onehop="Yuki, Stuart, Katie, Veronica, Gary, Megan?"), "stands in the question"),
]  # fmt: skip


@pytest.mark.parametrize(("damage", "message"), BROKEN)
def test_nolima_broken_entries_are_named(damage, message, tmp_path):
    broken = copy.deepcopy(entries()[:1])
    damage(broken[0])
    path = tmp_path / "set.json"
    path.write_text(json.dumps(broken), encoding="utf-8")
    with pytest.raises(InvalidInput, match=message) as caught:
        nolima(Words(), path, n=4, context_length=300)
    assert str(path) in str(caught.value) or "entry 1" in str(caught.value)


def test_nolima_what_cannot_be_given():
    with pytest.raises(UnknownName, match=r"question type 'twohops'\. Did you mean 'twohop'.*nolima_set\.json"):
        nolima(Words(), NOLIMA, question="twohops")
    with pytest.raises(InvalidInput, match=r"cannot give n=100 trials \(50 \+ 50 .* distinct needles; use a smaller n"):
        nolima(Words(), NOLIMA, n=100)
    alone = copy.deepcopy(entries()[:1])
    alone[0]["character_set"] = ["Yuki"]
    with pytest.raises(InvalidInput, match=r"would share the answers \['Yuki'\].*use split=None"):
        nolima(Words(), alone, n=2)
    assert [t.answer for t in nolima(Words(), alone, n=2, split=None)] == ["Yuki", "Yuki"]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"question": 1}, "question=1: give the name"),
        ({"distractors": 2}, "distractors=2: give True or False"),
        ({"distractor_gap": 0.6}, "distractor_gap=0.6: give a share"),
        ({"split_tests": 1}, "split_tests=1: give True or False"),
        ({"context_length": None}, "'nolima' needs a context_length"),
    ],
)
def test_nolima_options_refused(options, message, as_users_run):
    with pytest.raises(InvalidInput, match=message):
        nolima(Words(), NOLIMA, **options)


# -- system prompts ----------------------------------------------------------------------------------

WITH_ROLE = "{% for m in messages %}<{{ m.role }}> {{ m.content }} {% endfor %}<assistant>"
REFUSES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
DROPS = "{% for m in messages if m.role == 'user' %}<user> {{ m.content }} {% endfor %}<assistant>"


class Chatty:
    """An encoder with a real tokenizer and a chat template."""

    def __init__(self, template: str):
        self.tokenizer = tiny.tokenizer()
        self.tokenizer.chat_template = template

    def encode(self, text: str, *, chat: bool = False) -> Encoding:
        if chat:
            message = [{"role": "user", "content": text}]
            text = self.tokenizer.apply_chat_template(message, tokenize=False, add_generation_prompt=True)
        out = self.tokenizer(text, add_special_tokens=not chat, return_offsets_mapping=True)
        return Encoding(text, tuple(out["input_ids"]), tuple(map(tuple, out["offset_mapping"])))


@pytest.mark.parametrize(
    ("template", "role"), [(WITH_ROLE, True), (REFUSES + WITH_ROLE, False), (DROPS, False)], ids=["role", "no", "drop"]
)
def test_system_prompt_goes_where_the_template_takes_it(template, role):
    model = Chatty(template)
    assert has_system_role(model) is role
    trials = nolima(model, entries()[:1], n=4, context_length=200, chat=True)
    for trial in trials:
        assert trial.meta["system_prompt_place"] == ("system role" if role else "before the prompt")
        assert 190 <= len(trial.tokens) <= 200
    text = encode(model, "Hello there.", chat=True, system="Be brief.").text if role else ""
    assert text == ("<system> Be brief. <user> Hello there. <assistant>" if role else "")


def test_a_system_prompt_needs_a_chat_and_offsets():
    with pytest.raises(InvalidInput, match="a system prompt needs chat=True"):
        encode(Chatty(WITH_ROLE), "Hello.", chat=False, system="Be brief.")
    assert not has_system_role(Words())
