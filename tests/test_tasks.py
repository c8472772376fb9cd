"""Tasks: which trials they take, what they need, and what each metric comes to."""

from __future__ import annotations

import dataclasses
import math
import pickle
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mechheads as mh
from mechheads.errors import InvalidInput, UnknownName
from mechheads.pruning import choice_metrics
from mechheads.tasks import METRICS, Metric, Outcome, Task, continuation, gold_answers, scored_positions
from mechheads.text import answer_f1, best_over, contains_answer, exact_match, normalise, rouge1_recall, rougeL_f

SAID = ("correct", "exact_match", "rouge1_recall", "rougeL_f", "f1")


def asked(id: str = "a", **fields: Any) -> mh.Trial:
    return mh.Trial(id=id, **{"tokens": [5, 6, 7], "answer": "Kyiv", **fields})


def choice(id: str = "c", label: int = 1, candidates: tuple[str, ...] = (" true", " false", " unknown")) -> mh.Trial:
    return mh.Trial(id=id, tokens=[5, 6, 7], candidates=candidates, label=label)


def text(id: str = "t", tokens: Any = (5, 6, 7, 8), **fields: Any) -> mh.Trial:
    return mh.Trial(id=id, tokens=tokens, **fields)


def written(text: str, logprobs: tuple[float, ...] = (-1.0, -3.0), **fields: Any) -> Outcome:
    return Outcome(tokens=(1, 2), text=text, answer_logprobs=logprobs, **fields)


# -- F1 over words -----------------------------------------------------------------------------------


def slow_f1(said: str, gold: str) -> float:
    """Words crossed off one by one, precision and recall apart."""
    left, right = normalise(said).split(), normalise(gold).split()
    common, rest = 0, list(left)
    for word in right:
        if word in rest:
            rest.remove(word)
            common += 1
    if common == 0:
        return 0.0
    precision, recall = common / len(left), common / len(right)
    return 2 * precision * recall / (precision + recall)


@given(
    st.lists(st.sampled_from(["red", "Red,", "the", "a", "fox", "ran", "."]), max_size=8),
    st.lists(st.sampled_from(["red", "the", "fox", "over"]), min_size=1, max_size=8),
)
def test_f1_is_that_of_words_crossed_off(said, gold):
    assert answer_f1(" ".join(said), " ".join(gold)) == pytest.approx(slow_f1(" ".join(said), " ".join(gold)))


@pytest.mark.parametrize(
    ("said", "gold", "value"),
    [
        ("The Grey Lighthouse", "grey lighthouse", 1.0),
        ("It is in the old town of Saltby", "Saltby", 2 / 8),
        ("Saltby Saltby", "Saltby", 2 / 3),
        ("", "Saltby", 0.0),
        ("...", "Saltby", 0.0),
        ("!", "!", 1.0),
        ("?", "!", 0.0),
        ("the", "the", 1.0),
        ("Caf\u00e9", "cafe\u0301", 1.0),
    ],
)
def test_f1_by_hand(said, gold, value):
    assert answer_f1(said, gold) == pytest.approx(value)


def test_f1_counts_characters_where_no_spaces_part_words():
    said, gold = "\u6771\u4eac\u3067\u3059\u3002", "\u6771\u4eac"  # four characters, two of them the answer
    assert answer_f1(said, gold) == pytest.approx(2 * 2 / (4 + 2))
    assert answer_f1(said, gold, cjk=False) == 0


def test_f1_refuses_an_empty_gold_answer():
    with pytest.raises(InvalidInput, match=r"the gold answer is ' '; give the text that was to be found\."):
        answer_f1("x", " ")


def test_best_over_several_golds():
    assert best_over(answer_f1, "Kiev", ["Kyiv", "Kiev"]) == 1 and best_over(contains_answer, "Oslo", ["Kyiv"]) == 0
    with pytest.raises(InvalidInput, match=r"there is no gold answer; give at least one text that was to be found\."):
        best_over(answer_f1, "Kiev", [])


# -- what a task measures ----------------------------------------------------------------------------


def test_the_measure_is_told_by_the_trials():
    answer, either, prose = Task.of("a", asked()), Task.of("c", choice()), Task.of("t", text(meta={"kind": "text"}))
    assert (answer.measure, either.measure, prose.measure) == ("answer", "choice", "text")
    assert answer.measured == (*SAID, "answer_logprob") and answer.needs == {"generate", "answer"}
    assert either.measured == ("choice_accuracy", "label_probability") and either.needs == {"candidates"}
    assert prose.measured == ("nll", "perplexity") and prose.needs == {"text"}
    assert Task.of("t", text(spans={"scored": (2, 4)})).measure == "text"
    assert Task.of("t", [text("x"), text("y")], measure="text").needs == {"text"}
    assert Task.of("a", asked(candidates=("Kyiv", "Oslo"), label=0)).measure == "answer"
    assert Task.of("a", asked(), metrics=("f1",)).needs == {"generate"}
    assert Task.of("a", asked(), metrics=("answer_logprob",)).needs == {"answer"}
    assert Task.of("a", asked(), metrics="f1").measured == ("f1",)


def test_logit_diff_is_measured_where_there_is_a_foil():
    own = [asked("a", meta={"foil": "Oslo"}), asked("b")]
    task = Task.of("a", own)
    assert "logit_diff" in task.measured and [task.foil_of(t) for t in own] == ["Oslo", None]
    values = [task.judge(t, written("Kyiv", logit_diff=2.5)) for t in own]
    assert values[0]["logit_diff"] == 2.5 and math.isnan(values[1]["logit_diff"])
    both = Task.of("a", own, foil="Rome", metrics=("logit_diff",))
    assert [both.foil_of(t) for t in own] == ["Oslo", "Rome"] and both.needs == {"answer"}


def test_registry():
    for name, metric in METRICS.items():
        assert isinstance(metric, Metric) and metric.name == name and metric.unit and metric.about
        assert metric.needs in {"generate", "answer", "candidates", "text"}
    assert {m.name for m in METRICS.values() if not m.higher_is_better} == {"nll", "perplexity"}
    assert METRICS["choice_accuracy"].chance(choice()) == 1 / 3 and METRICS["f1"].chance(asked()) is None
    with pytest.raises(TypeError):
        METRICS["own"] = METRICS["f1"]  # pyright: ignore[reportIndexIssue]


# -- hash ---------------------------------------------------------------------------------------------


def test_hash_is_of_what_changes_numbers():
    base = Task.of("a", asked())
    assert base.hash == Task.of("other name", asked()).hash == Task.of("a", asked(), metrics=base.measured[::-1]).hash
    other = [
        Task.of("a", asked(answer="Oslo")),
        Task.of("a", asked(meta={"aliases": ["Kiev"]})),
        Task.of("a", asked(), metrics=("f1",)),
        Task.of("a", asked(), max_new_tokens=21),
        Task.of("a", asked(), stop_at_newline=False),
        Task.of("a", asked(), foil="Oslo"),
        Task.of("a", asked(), foil="Rome"),
        Task.of("c", choice()),
    ]
    assert len({base.hash, *(t.hash for t in other)}) == len(other) + 1
    # Lengths of answers change nothing where nothing is generated.
    assert Task.of("c", choice(), max_new_tokens=3).hash == Task.of("c", choice()).hash
    only = Task.of("a", asked(), metrics=("answer_logprob",))
    assert dataclasses.replace(only, max_new_tokens=3, stop_at_newline=False).hash == only.hash


def test_a_task_travels():
    task = Task.of("a", asked(meta={"foil": "Oslo"}))
    again = pickle.loads(pickle.dumps(task))
    assert again.hash == task.hash and again.describe() == task.describe()
    assert task.describe()["trials"]["n"] == 1 and task.describe()["metrics"] == list(task.measured)


# -- what is refused ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("trials", "options", "message"),
    [
        ([], {}, r"^the task 'x' has no trials\.$"),
        ([text()], {}, r"^the task 'x': trial 't' has neither a gold answer nor candidates with a label, so how to"),
        ([asked(), choice()], {}, r"^the task 'x' mixes trials of 'answer' \('a'\) and 'choice' \('c'\); make a task"),
        ([text()], {"measure": "answer"}, r"^the task 'x' measures 'answer', but trial 't' has no gold answer; give "),
        (
            [asked()],
            {"measure": "choice"},
            r"^the task 'x' measures 'choice', but trial 'a' has 0 candidates and",
        ),
        (
            [choice(label=0, candidates=(" a",))],
            {"measure": "choice"},
            r"has 1 candidates and the label 0; it",
        ),
        ([text(tokens=[3])], {"measure": "text"}, r"^trial 't' has 1 token; a text needs two or more, since the first"),
        ([text(spans={"scored": (0, 2)})], {}, r"^trial 't': the span 'scored' holds the first token, which nothing"),
        ([asked(meta={"aliases": "Kiev"})], {}, r"^trial 'a': meta\[\"aliases\"\] is 'Kiev'; give a list of texts"),
        ([asked(meta={"aliases": [""]})], {}, r"meta\[\"aliases\"\] is \[''\]; give a list of texts, other forms of"),
        ([asked(meta={"foil": 3})], {}, r"^trial 'a': meta\[\"foil\"\] is 3; give the text of a wrong answer\.$"),
        ([asked(meta={"foil": "KYIV"})], {}, r"^trial 'a': the foil 'KYIV' is the gold answer; give a wrong one\.$"),
        ([asked()], {"metrics": ("logit_diff",)}, r"^the task 'x' asks for logit_diff, but no trial names a wrong an"),
        ([asked()], {"metrics": ("nll",)}, r"measures 'answer', and the metric 'nll' belongs to 'text'; metrics of 'a"),
        ([asked()], {"metrics": ()}, r"^the task 'x' has the metrics \[\]; name at least one, and each once\.$"),
        ([asked()], {"metrics": ("f1", "f1")}, r"has the metrics \['f1', 'f1'\]; name at least one, and each once"),
        ([asked()], {"max_new_tokens": 0}, r"^the task 'x' has max_new_tokens=0; give a whole number of 1 or more\.$"),
        ([asked()], {"foil": " "}, r"^the task 'x' has foil=' '; give the text of a wrong answer, or None\.$"),
        (
            [asked()],
            {"foil": "Oslo", "metrics": ("f1",)},
            r"has foil='Oslo', but does not measure logit_diff",
        ),
        ([choice()], {"foil": "Oslo"}, r"has foil='Oslo', which only the measure 'answer' uses; leave it None\.$"),
    ],
)
def test_what_cannot_be_measured_is_refused(trials, options, message):
    with pytest.raises(InvalidInput, match=message):
        Task.of("x", trials, **options)


def test_unknown_names():
    with pytest.raises(UnknownName, match=r"^unknown metric of the task 'x' 'rougeL'\. Did you mean 'rougeL_f'"):
        Task.of("x", asked(), metrics=("rougeL",))
    with pytest.raises(UnknownName, match=r"^unknown measure of the task 'x' 'choices'\. Did you mean 'choice'"):
        Task.of("x", choice(), measure="choices")


def test_values_of_the_wrong_type(as_users_run):
    given: Any
    for given, message in (
        ({"stop_at_newline": 1}, r"has stop_at_newline=1; give True or False"),
        ({"max_new_tokens": True}, r"has max_new_tokens=True; give a whole number"),
    ):
        with pytest.raises(InvalidInput, match=message):
            Task.of("x", asked(), **given)
    with pytest.raises(InvalidInput, match=r"^the name of a task is ' '; give text, such as 'passkey'\.$"):
        Task.of(" ", asked())


# -- what metrics come to ------------------------------------------------------------------------------


def test_answers_are_judged_over_all_their_forms():
    trial = asked(meta={"aliases": ["Kiev", "Kyiv"]})
    assert gold_answers(trial) == ("Kyiv", "Kiev")
    task = Task.of("a", trial)
    for said in ("Kiev", "It is Kiev, the city.", "Kyiv", "Lviv"):
        found = task.judge(trial, written(said))
        assert list(found) == [*SAID, "answer_logprob"]
        for name, measure in zip(SAID, (contains_answer, exact_match, rouge1_recall, rougeL_f, answer_f1), strict=True):
            assert found[name] == max(float(measure(said, gold)) for gold in ("Kyiv", "Kiev")), (said, name)
        assert found["answer_logprob"] == -2.0
    assert Task.of("a", asked()).judge(asked(), written("Kiev"))["correct"] == 0


@given(st.lists(st.floats(-30, 0), min_size=2, max_size=6), st.data())
def test_choices_are_those_of_the_pruning_check(logprobs, data):
    label = data.draw(st.integers(0, len(logprobs) - 1))
    trial = choice(label=label, candidates=tuple(f" {i}" for i in range(len(logprobs))))
    found = Task.of("c", trial).judge(trial, Outcome(candidate_logprobs=tuple(logprobs)))
    np.testing.assert_allclose([*found.values()], choice_metrics([logprobs], [label])[0], rtol=1e-12)
    slow = sum(math.exp(x - logprobs[label]) for x in logprobs)
    assert found["label_probability"] == pytest.approx(1 / slow)


def test_ties_are_shared():
    trial = choice(label=0)
    found = Task.of("c", trial).judge(trial, Outcome(candidate_logprobs=(-1.0, -1.0, -2.0)))
    assert found["choice_accuracy"] == 0.5


@given(st.lists(st.floats(-20, 0), min_size=1, max_size=20))
def test_perplexity_is_the_geometric_mean_of_inverse_probabilities(logprobs):
    trial = text(tokens=[3] * (len(logprobs) + 1))
    found = Task.of("t", trial, measure="text").judge(trial, Outcome(token_logprobs=tuple(logprobs)))
    slow = math.prod(math.exp(-x) ** (1 / len(logprobs)) for x in logprobs)
    assert found["perplexity"] == pytest.approx(slow, rel=1e-9)
    assert found["nll"] == pytest.approx(-sum(logprobs) / len(logprobs), abs=1e-12)


def test_a_text_without_a_chance_has_infinite_perplexity():
    trial = text(tokens=[3, 4])
    found = Task.of("t", trial, measure="text").judge(trial, Outcome(token_logprobs=(-1e4,)))
    assert found == {"nll": 1e4, "perplexity": math.inf}


def test_scored_positions():
    assert scored_positions(text()) == (1, 2, 3)
    assert scored_positions(text(spans={"scored": [(1, 2), (3, 4)]})) == (1, 3)


@pytest.mark.parametrize(
    ("trial", "outcome", "message"),
    [
        (
            asked(),
            Outcome(text="x"),
            r"^the outcome of trial 'a' has no answer_logprobs, which the task's metrics",
        ),
        (asked(), written("x", ()), r"^the outcome of trial 'a' has no answer_logprobs"),
        (
            asked(),
            written("x", (-1.0, math.nan)),
            r"has .*nan.* in answer_logprobs at 1; log-probabilities are",
        ),
        (
            asked(),
            written("x", (0.5,)),
            r"has .*0\.5.* in answer_logprobs at 0; log-probabilities are",
        ),
        (
            asked(meta={"foil": "Oslo"}),
            written("x"),
            r"^trial 'a' has a foil, but its outcome's logit_diff is None;",
        ),
        (asked(meta={"foil": "Oslo"}), written("x", logit_diff=math.nan), r"its outcome's logit_diff is nan; give the"),
        (
            choice(),
            Outcome(candidate_logprobs=(-1.0,)),
            r"^the outcome of trial 'c' has 1 candidate_logprobs; the",
        ),
        (choice(), Outcome(candidate_logprobs=(-math.inf,) * 3), r"^trial 'c': every candidate has probability 0, so"),
        (
            text(meta={"kind": "text"}),
            Outcome(token_logprobs=(-1.0,)),
            r"has 1 token_logprobs; the trial asks for 3",
        ),
    ],
)
def test_outcomes_that_fit_no_trial_are_refused(trial, outcome, message):
    with pytest.raises(InvalidInput, match=message):
        Task.of("x", trial).judge(trial, outcome)


# -- how an answer goes on ----------------------------------------------------------------------------


class Letters:
    """A model whose tokens are characters."""

    def tokenizer(self, text: str, **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(c) for c in text]}

    def decode(self, tokens: Any) -> str:
        return "".join(map(chr, tokens))


@pytest.mark.parametrize(
    ("prompt", "answer", "goes_on"),
    [
        ("Answer:", "Kyiv", " Kyiv"),
        ("Answer: ", "Kyiv", "Kyiv"),
        ("assistant\n", "Kyiv", "Kyiv"),
        ("the city (", "Kyiv", "Kyiv"),
        ("the city \u201c", "Kyiv", "Kyiv"),
        ("\u7b54\u6848\u662f", "Kyiv", "Kyiv"),
        ("Answer:", "\u6771\u4eac", "\u6771\u4eac"),
        ("Answer:", "5", " 5"),
    ],
)
def test_an_answer_goes_on_after_its_prompt(prompt, answer, goes_on, as_users_run):
    trial = mh.Trial(id="x", tokens=[ord(c) for c in prompt], answer=answer)
    model: Any = Letters()
    assert model.decode(continuation(model, trial, answer)) == goes_on


def test_a_completion_says_itself_how_it_goes_on(as_users_run):
    trial = mh.Trial(id="x", tokens=[65], answer="34", meta={"completion": "34 "})
    model: Any = Letters()
    assert model.decode(continuation(model, trial, "34")) == "34 "
    assert model.decode(continuation(model, trial, "35")) == " 35"


def test_gold_and_foil_must_begin_differently(as_users_run):
    model: Any = Letters()
    trials = [asked(str(i), tokens=[65, 58, 32], meta={"foil": foil}) for i, foil in enumerate(("Oslo", "Kassel"))]
    task = Task.of("a", [*trials, asked("none")])
    assert task.contrast(model, trials[0]) == (ord("K"), ord("O"))
    assert task.contrast(model, asked("none")) is None
    with pytest.raises(InvalidInput, match=r"^trial '1': the answer 'Kyiv' and the foil 'Kassel' begin with the"):
        task.contrast(model, trials[1])


def test_with_a_model(llama):
    said = llama.decode([10, 11])
    trial = mh.Trial(id="x", tokens=[5, 6, 7], answer=said, meta={"foil": llama.decode([20])})
    assert continuation(llama, trial, said) == (10, 11)
    assert Task.of("a", trial).contrast(llama, trial) == (10, 20)
