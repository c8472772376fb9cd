"""Logic trials: templates, spans, splits, balance, variants. The prover of the worlds' tests judges what comes out."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_datasets import Pieces, Plain, Words, text_of
from test_logic_worlds import NOISE, entails, naive_bayes, refutes

from mechheads.datasets import (
    RULES,
    LogicQuestion,
    LogicTemplate,
    build_trials,
    flipped,
    logic_template,
    prontoqa,
    question_of,
    rebuild,
    statement_only,
    world_questions,
)
from mechheads.datasets.logic import split_groups
from mechheads.datasets.logic_prompts import template_names
from mechheads.datasets.logic_questions import THREE, TRUE_FALSE, YES_NO, negated, plainly_negated, sentences_of
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Trial, TrialSet


def asked(id: str = "q", **changes: Any) -> LogicQuestion:
    fields: dict[str, Any] = {
        "id": id,
        "premises": ("Wren is a tovik.", "Every tovik is kind.", "Max is loud."),
        "statement": "Wren is kind.",
        "candidates": TRUE_FALSE,
        "label": 0,
        "rule": "modus_ponens",
        "depth": 1,
        "proof": (0, 1),
    }
    return LogicQuestion(**{**fields, **changes})


def prompt(model: Words, trial: Trial) -> str:
    return model.decode(trial.tokens)


# -- templates and spans ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("encoder", [Words, Pieces])
@pytest.mark.parametrize("template", template_names())
@pytest.mark.parametrize("candidates", [TRUE_FALSE, THREE, YES_NO])
def test_spans_are_exact(encoder, template, candidates):
    model = encoder()
    # The statement's text stands in the context too, twice.
    question = asked(
        premises=("Wren is kind.", "If so, Wren is kind. Or not."), proof=None, candidates=candidates, label=1
    )
    if template == "nano" and candidates != TRUE_FALSE:
        with pytest.raises(InvalidInput, match=r"template 'nano' has no wording for the candidate '(unknown|yes)' of"):
            build_trials(model, [question], template=template, calibration=None)
        return
    (trial,) = build_trials(model, [question], template=template, calibration=None)
    text = prompt(model, trial)
    (span,) = trial.spans["statement"]
    shown = text_of(model, trial, "statement")
    assert "Wren is kind." in shown and len(shown) <= len("Wren is kind.") + 4
    # It is the last of the places where that text stands.
    before = model.decode(trial.tokens[: span.start])
    assert before.count("Wren is kind.") == 2 == text.count("Wren is kind.") - 1
    assert trial.label == 1 and len(trial.candidates) == len(candidates)
    assert ("candidates" in trial.spans) == (template == "options")
    if template == "options":
        words = [{"true": "True"}.get(c, c.capitalize()) for c in candidates]
        for span, letter, word in zip(trial.spans["candidates"], "ABC", words, strict=False):
            assert f"{letter}) {word}" in model.decode(trial.tokens[span.start : span.stop])
        assert trial.candidates == tuple(f" {x}" for x in "ABC"[: len(candidates)])


@pytest.mark.parametrize(
    ("template", "text", "candidates"),
    [
        (
            "base",
            "Wren is a tovik. Every tovik is kind. Max is loud.\nTrue or false: Wren is kind.\nAnswer:",
            (" true", " false"),
        ),
        ("nano", "Wren is a tovik. Every tovik is kind. Max is loud. claim: Wren is kind.", (" true", " false")),
        (
            "options",
            "Wren is a tovik. Every tovik is kind. Max is loud.\nWhich is right of this statement? Wren is kind.\n"
            "Options: A) True B) False\nAnswer:",
            (" A", " B"),
        ),
    ],
)
def test_prompts(template, text, candidates):
    model = Words()
    (trial,) = build_trials(model, [asked()], template=template, calibration=None)
    assert prompt(model, trial) == text
    assert trial.candidates == candidates
    assert trial.meta["template"] == template and trial.meta["wording"] == "plain"


def test_chat_prompts_go_through_the_template():
    model = Words()
    (trial,) = build_trials(model, [asked()], template="chat", calibration=None)
    assert prompt(model, trial).startswith("<system> Be useful. <user> Wren is a tovik.")
    assert prompt(model, trial).endswith("True or False. <end> <assistant>")
    assert trial.candidates == ("True", "False")
    assert text_of(model, trial, "statement").strip() == "Wren is kind."


class Changing(Words):
    def encode(self, text: str, *, chat: bool = False):
        return super().encode(text.replace("tovik", "T") if chat else text, chat=chat)


def test_a_chat_template_that_changes_the_prompt_is_refused():
    with pytest.raises(InvalidInput, match="question 'q': the chat template changes the prompt"):
        build_trials(Changing(), [asked()], template="chat", calibration=None)


def test_default_template():
    model = Words()
    assert logic_template(model=model).name == "base"
    model.has_chat_template = True  # type: ignore[attr-defined]
    assert logic_template(model=model).name == "chat"
    model.spec.name = "nano"
    assert logic_template(model=model).name == "nano"
    assert logic_template("base", model=model).name == "base"


def test_own_templates(tmp_path):
    parts = {"text": "{{Judge}} {statement} given {context} so", "prefix": "", "words": {"true": "T", "false": "F"}}
    file = tmp_path / "mine.yaml"
    file.write_text(json.dumps(parts), encoding="utf-8")
    for source, name in ((parts, "own"), (file, "mine"), (str(file), "mine"), (LogicTemplate("x", **parts), "x")):
        model = Words()
        (trial,) = build_trials(model, [asked()], template=source, calibration=None)
        assert prompt(model, trial) == (
            "{Judge} Wren is kind. given Wren is a tovik. Every tovik is kind. Max is loud. so"
        )
        assert text_of(model, trial, "statement") == " Wren is kind."
        assert trial.candidates == ("T", "F") and trial.meta["template"] == name


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("bse", r"unknown logic template 'bse'\. Did you mean 'base'\? Known: base, chat, nano, options\."),
        ({"text": "{context}"}, r"'own', 'text' has the placeholders \{context\}; it needs \{context\}, \{statement\}"),
        ({"text": "{context} {statement} {statement}"}, "each once"),
        ({"text": "{context} {statement} {options}"}, r"it needs \{context\}, \{statement\}, each once"),
        ({"text": "{context} {statement}", "letters": True}, r"it needs \{context\}, \{statement\}, \{options\}"),
        ({"text": "{context} {statement"}, "'own', 'text' cannot be read"),
        ({"text": "{context} {statement}", "three": "x"}, "'three' has the placeholders"),
        ({"text": 3}, "is 3; it must be text"),
        ({"prefix": " "}, r"has only \['prefix'\]; it needs 'text'"),
        ({"text": "{context} {statement}", "word": {}}, r"a logic template has no \['word'\]"),
        ({"text": "{context} {statement}", "words": {True: "yes"}}, r"words has True; .* \(in YAML, quote them\)"),
        ({"text": "{context} {statement}", "words": {"true": "a", "false": "a"}}, "two verdicts the same wording"),
        ({"text": "{context} {statement}", "chat": 1}, "chat is 1; give true or false"),
        (7, "template=7: give a shipped template's name"),
        ("none.yaml", "the logic template none.yaml cannot be read"),
    ],
)
def test_bad_templates(source, message, as_users_run):
    with pytest.raises((InvalidInput, UnknownName), match=message):
        logic_template(source)


def test_yaml_that_is_no_mapping(tmp_path):
    (tmp_path / "a.yml").write_text("- 1", encoding="utf-8")
    with pytest.raises(InvalidInput, match="is no mapping; it needs at least 'text'"):
        logic_template(tmp_path / "a.yml")


def test_options_of_any_number():
    model = Words()
    question = asked(candidates=("a dog", "a cat", "a bird", "a fish"), label=3)
    (trial,) = build_trials(model, [question], template="options", calibration=None)
    shown = [model.decode(trial.tokens[s.start : s.stop]).strip() for s in trial.spans["candidates"]]
    assert shown == ["A) a dog", "B) a cat", "C) a bird", "D) a fish"]
    assert trial.candidates == (" A", " B", " C", " D") and trial.label == 3
    (plain,) = build_trials(model, [question], template="base", calibration=None)
    assert plain.candidates == (" a dog", " a cat", " a bird", " a fish")


def test_prompts_over_the_limit_are_refused_by_name():
    question = asked("long")
    n = len(build_trials(Words(), [question], calibration=None)[0].tokens)
    assert build_trials(Words(n + 1), [question], calibration=None)
    with pytest.raises(InvalidInput, match=f"question 'long' takes {n} tokens and its candidates up to 1 more, over"):
        build_trials(Words(n), [question], calibration=None)


def test_with_a_model(llama):
    trials = build_trials(llama, [asked("a"), asked("b", label=1)])
    assert all(len(t.tokens) < 40 for t in trials) and {t.split for t in trials} == {"calibration", "test"}
    for trial in trials:
        (span,) = trial.spans["statement"]
        assert len(span) == 3  # one token a word in this tokenizer


# -- questions --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"statement": " "}, "question 'q': statement is ' '; give some text"),
        ({"premises": "Wren is kind."}, "question 'q': premises are 'Wren is kind.'; give a list"),
        ({"premises": ["", "x"]}, "premises are .*; give a list of non-empty texts"),
        ({"candidates": ("true",)}, r"has the candidates \['true'\]; give two or more, all different"),
        ({"candidates": ("a", "a")}, "give two or more, all different"),
        ({"label": 2}, "has the label 2; expected 0 to 1"),
        ({"label": True}, "has the label True"),
        ({"proof": (0, 3)}, r"the proof \[0, 3\] names no premises; there are 3"),
        ({"meta": {"twin": 1}}, "meta has 'twin', a name that trials use themselves"),
        ({"meta": {"a": {1}}}, r"meta\['a'\] is a set"),
    ],
)
def test_bad_questions(changes, message, as_users_run):
    with pytest.raises(InvalidInput, match=message):
        asked(**changes)


def test_questions_are_plain_data():
    question = asked(meta={"a": [1, None]}, group="g")
    again = LogicQuestion.from_dict(json.loads(json.dumps(question.to_dict())))
    assert again == question
    with pytest.raises(InvalidInput, match=r"a logic question has no \['lable'\]"):
        LogicQuestion.from_dict({**question.to_dict(), "lable": 1})
    with pytest.raises(InvalidInput, match=r"the logic question 'x' lacks \['premises', 'statement'"):
        LogicQuestion.from_dict({"id": "x"})


def test_a_trial_knows_its_question(tmp_path):
    model = Words()
    questions = world_questions(12, rules="all", depth=(2, 3), seed=4)
    trials = build_trials(model, questions, template="options")
    assert [question_of(t) for t in trials] == questions
    loaded = TrialSet.load(trials.save(tmp_path / "t.jsonl"))
    assert loaded.hash == trials.hash
    assert [t.to_dict() for t in flipped(model, loaded)] == [t.to_dict() for t in flipped(model, trials)]
    needed = {"dataset", "group", "rule", "depth", "distractors", "statement", "premises", "proof", "template"}
    assert all(needed | {"wording"} <= set(t.meta) for t in trials)


def test_other_trials_are_no_logic_trials():
    with pytest.raises(InvalidInput, match="trial 't' is no logic trial: its meta lacks 'dataset'"):
        question_of(Trial(id="t", tokens=[1]))


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("Wren is shy. Max is not.  Is he?\nYes!", ["Wren is shy.", "Max is not.", "Is he?", "Yes!"]),
        (" Sam is sour. Sam is a numpus.", ["Sam is sour.", "Sam is a numpus."]),
        ("Dr. Lee met J. Smith at 5 p.m. today. He left.", ["Dr. Lee met J. Smith at 5 p.m. today.", "He left."]),
        ('She said "Go." Then she went. 3 stayed', ['She said "Go."', "Then she went.", "3 stayed"]),
        ("", []),
    ],
)
def test_sentences(text, sentences):
    assert list(sentences_of(text)) == sentences


@pytest.mark.parametrize(
    ("statement", "opposite"),
    [
        ("Wren is kind.", "Wren is not kind."),
        ("The lion is not big.", "The lion is big."),
        ("Coco Gauff is a player.", "Coco Gauff is not a player."),
        ("Tom was born in Boston.", "Tom was not born in Boston."),
        ("Everyone is kind.", "It is not the case that everyone is kind."),
        ("A cat is shy.", "It is not the case that a cat is shy."),
        ("Cats are shy.", "It is not the case that Cats are shy."),
        ("Wren is kind and bright.", "It is not the case that Wren is kind and bright."),
        ("If Wren is kind, Max is.", "It is not the case that if Wren is kind, Max is."),
        ("Wren is either kind or shy.", "It is not the case that Wren is either kind or shy."),
        ("The lion chases the mouse.", "It is not the case that the lion chases the mouse."),
        ("There is an animal.", "It is not the case that there is an animal."),
    ],
)
def test_negation(statement, opposite):
    assert negated(statement) == opposite
    assert negated(opposite) == statement


_WORDS = st.lists(
    st.sampled_from(["the", "a", "not", "is", "was", "and", "or", "kind", "every", "Wren", "Max", "it", "lion", "of"]),
    min_size=2,
    max_size=8,
)


@given(words=_WORDS)
def test_negating_twice_gives_the_statement_back(words):
    text = " ".join(words) + "."
    text = text[0].upper() + text[1:]
    assert negated(negated(text)) == text != negated(text)


# -- our own worlds ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rules", ["modus_ponens", "all", ("contradiction", "composed")])
@pytest.mark.parametrize("claims_per_world", [1, 2])
def test_exact_balance(rules, claims_per_world):
    depths, numbers = (2, 4), (0, 3, 5)
    names = RULES if rules == "all" else (rules,) if isinstance(rules, str) else rules
    n = len(names) * 2 * 3 * 4
    questions = world_questions(
        n, depth=depths, distractors=numbers, rules=rules, claims_per_world=claims_per_world, seed=1
    )
    assert len(questions) == n
    cells = Counter((q.rule, q.depth, q.distractors, q.label) for q in questions)
    assert len(cells) == n / 2 and set(cells.values()) == {2}
    turned = Counter((q.rule, q.label, q.meta["polarity"]) for q in questions)
    for rule in names:
        ways = {w: turned[rule, 0, w] for w in ("plain", "negated", None)}
        assert ways == {w: turned[rule, 1, w] for w in ways}
        if ways["plain"] and claims_per_world == 1:
            assert ways["plain"] == ways["negated"]


@settings(max_examples=25, deadline=None)
@given(
    n=st.integers(2, 90),
    rules=st.lists(st.sampled_from(RULES), min_size=1, max_size=7, unique=True),
    depth=st.lists(st.integers(2, 6), min_size=1, max_size=3, unique=True),
    seed=st.integers(0, 99),
)
def test_balance_as_far_as_n_allows(n, rules, depth, seed):
    questions = world_questions(n, rules=rules, depth=depth, seed=seed)
    labels = Counter(q.label for q in questions)
    assert abs(labels[0] - labels[1]) <= 1
    cells = Counter((q.rule, q.depth, q.distractors, q.label) for q in questions)
    wanted = len(rules) * len(depth) * 2 * 2
    assert max(cells.values()) - (min(cells.values()) if len(cells) == wanted else 0) <= 1
    for axis, values in (("rule", rules), ("depth", depth), ("distractors", (0, 2))):
        counts = Counter(getattr(q, axis) for q in questions)
        assert max(counts.values()) - min(counts[v] for v in values) <= 2


def test_composed_rules_have_no_depth_one():
    questions = world_questions(26 * 2, rules="all", depth=(1, 2), distractors=0)
    counts = Counter((q.rule, q.depth) for q in questions)
    assert len(counts) == 13 and set(counts.values()) == {4}


@pytest.mark.parametrize("rule", RULES)
def test_labels_proofs_and_twins_by_the_prover(rule):
    model = Words()
    trials = prontoqa(model, n=24, rules=rule, depth=(2, 3), seed=9)
    assert [t.label for t in trials] == [_verdict(t) for t in trials]
    twins = flipped(model, trials)
    assert [t.label for t in twins] == [_verdict(t) for t in twins] == [1 - (t.label or 0) for t in trials]
    for trial in trials:
        for gone in trial.meta["proof"]:
            kept = [i for i in range(len(trial.meta["premises"])) if i != gone]
            assert _verdict(rebuild(model, trial, premises=kept)) is None
        assert _verdict(rebuild(model, trial, premises=trial.meta["proof"])) == trial.label


def _verdict(trial: Trial) -> int | None:
    """What follows from the premises of a trial: 0 for true, 1 for false, None for neither."""
    premises, statement = trial.meta["premises"], trial.meta["statement"]
    return 0 if entails(premises, statement) else 1 if refutes(premises, statement) else None


def test_the_questions_wording_does_not_tell_the_label():
    """The balancing draws from the worlds, and could let in what they keep out."""
    questions = world_questions(3000, rules="all", seed=3)
    rows = [({*q.statement.split(), q.statement.split()[2], str(q.meta["polarity"])}, not q.label) for q in questions]
    assert abs(naive_bayes(rows[:2000], rows[2000:]) - 0.5) < NOISE
    bags = [({*" ".join(q.premises).split(), *(f"s {w}" for w in q.statement.split())}, not q.label) for q in questions]
    assert abs(naive_bayes(bags[:2000], bags[2000:]) - 0.5) < NOISE
    counts = [({f"{' '.join(q.premises).count(' not ')} {q.statement.count(' not ')}"}, not q.label) for q in questions]
    assert abs(naive_bayes(counts[:2000], counts[2000:]) - 0.5) < NOISE


def test_claims_of_a_world():
    four = world_questions(40, claims_per_world=4, seed=2)
    for group in {q.group for q in four}:
        mine = [q for q in four if q.group == group]
        assert len(mine) == 4 and len({q.premises for q in mine}) == 1 and len({q.statement for q in mine}) == 4
        assert sorted(q.label for q in mine) == [0, 0, 1, 1]
    two = world_questions(40, claims_per_world=2, seed=2)
    for group in {q.group for q in two}:
        one, other = (q for q in two if q.group == group)
        assert one.meta["flip"]["statement"] == other.statement and one.label != other.label


def test_no_world_comes_twice():
    questions = world_questions(400, depth=1, distractors=0)
    assert len({frozenset(q.premises) for q in questions}) == len({q.group for q in questions}) == 400


def test_seeded():
    first, again, other = (prontoqa(Plain(), n=20, rules="all", seed=s) for s in (1, 1, 2))
    assert first.hash == again.hash != other.hash
    assert [t.id for t in first] == [f"prontoqa-1-{i:04d}" for i in range(20)]
    drawn = json.dumps([[t.meta["premises"], t.meta["statement"], t.label, t.split] for t in first])
    assert hashlib.sha256(drawn.encode()).hexdigest()[:12] == "9f0b5e6c95dd"


def test_sets_of_two_seeds_can_be_joined():
    one, two = (prontoqa(Plain(), n=20, claims_per_world=2, seed=s) for s in (1, 2))
    assert len(TrialSet([*one, *two])) == 40
    groups = [{t.meta["group"] for t in s} for s in (one, two)]
    assert groups == [{f"world {seed}-{k}" for k in range(1, 11)} for seed in (1, 2)]
    variants = [flipped(Plain(), [*one, *two]), statement_only(Plain(), [*one, *two])]
    assert all(t.id.startswith(f"{t.meta['twin']}/") for s in variants for t in s)


def test_default_number():
    assert len(prontoqa(Plain())) == 500


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n": 0}, "n=0 trials"),
        *(
            (
                {"depth": given},
                rf"^depth is {bad}; it counts inference steps, 1 to 6: give one of these or several, such as "
                r"depth=\(1, 2, 3\)\.$",
            )
            for given, bad in ((0, 0), (7, 7), (-1, -1), ((1, 0), 0))
        ),
        ({"depth": (1, 1)}, r"depth=\(1, 1\) names a number twice"),
        ({"depth": ()}, r"depth=\(\): give a whole number, or several"),
        ({"depth": True}, "depth=True: give a whole number"),
        ({"distractors": (0, 9)}, r"distractors is 9; worlds have 0 to 5\."),
        ({"rules": "modus_ponnens"}, "unknown rule 'modus_ponnens'. Did you mean 'modus_ponens'"),
        ({"rules": ()}, r"rules=\(\): give at least one rule"),
        (
            {"rules": "composed", "depth": (1, 2)},
            "depth is 1, but worlds of composed begin at depth 2: leave it out, or",
        ),
        (
            {"rules": ("composed", "modus_ponens"), "depth": 1},
            r"worlds of 'composed' begin at depth 2, but depth is \[1\]: "
            r"leave the rule out, or add a depth of 2 to 6\.",
        ),
        ({"claims_per_world": 3}, "claims_per_world=3: give 1, 2 or 4"),
        ({"claims_per_world": 4, "n": 6}, r"claims_per_world=4: give 1, 2 or 4, and n \(here 6\) a multiple"),
        ({"claims_per_world": 4, "n": 8, "rules": "conjunction_introduction"}, "claims_per_world=4, but the worlds of"),
        ({"seed": 0.5}, "seed=0.5: give a whole number"),
        ({"calibration": 1}, "calibration=1: give the calibration share"),
        ({"path": [{}], "depth": 2}, "depth is an option of our own worlds; a file has what it has"),
    ],
)
def test_bad_options(options, message, as_users_run):
    with pytest.raises((InvalidInput, UnknownName), match=message):
        prontoqa(Words(), **{"n": 4, **options})


# -- splits -----------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 6), min_size=2, max_size=30),
    share=st.floats(0.05, 0.95),
    seed=st.integers(0, 20),
)
def test_groups_are_never_torn_apart(sizes, share, seed):
    rng = random.Random(seed)
    questions = [
        asked(f"{g}-{i}", group=f"g{g}", label=rng.randrange(2), depth=rng.randrange(3))
        for g, size in enumerate(sizes)
        for i in range(size)
    ]
    trials = build_trials(Plain(), questions, calibration=share, seed=seed)
    sides: dict[str, set] = {}
    for trial in trials:
        sides.setdefault(trial.meta["group"], set()).add(trial.split)
    assert all(len(side) == 1 for side in sides.values())
    assert {t.split for t in trials} == {"calibration", "test"}
    assert abs(len(trials.split("calibration")) - share * len(trials)) <= max(sizes)


@pytest.mark.parametrize("share", [0.5, 0.2, 0.8])
def test_splits_are_stratified(share):
    trials = prontoqa(Plain(), n=500, rules=("modus_ponens", "contradiction"), calibration=share, seed=5)
    parts = {s: trials.split(s) for s in ("calibration", "test")}
    assert abs(len(parts["calibration"]) - 500 * share) <= 1
    labels = Counter(t.label for t in parts["calibration"])
    assert abs(labels[0] - labels[1]) <= 2
    everything = Counter((t.label, t.meta["rule"], t.meta["depth"]) for t in trials)
    for cell, count in Counter((t.label, t.meta["rule"], t.meta["depth"]) for t in parts["calibration"]).items():
        assert abs(count - share * everything[cell]) <= 2


def test_a_models_name_is_no_model(as_users_run):
    named: Any = "smollm2"
    message = r"^model is 'smollm2', a str; trials need its tokenizer, so load it first: mh\.load\('nano-logic'\)\.$"
    trials = prontoqa(Plain(), n=4)
    for make in (
        lambda: prontoqa(named, n=4),
        lambda: flipped(named, trials),
        lambda: rebuild(named, trials[0], premises=[0]),
    ):
        with pytest.raises(InvalidInput, match=message):
            make()


def test_splits_by_seed_and_by_hand():
    questions = world_questions(60, seed=1)
    one, two = (split_groups(questions, 0.5, seed=s) for s in (1, 2))
    assert one != two and one == split_groups(questions, 0.5, seed=1)
    given = {q.group: "test" if i % 3 else "calibration" for i, q in enumerate(questions)}
    trials = build_trials(Plain(), questions, splits=given)
    assert [t.split for t in trials] == ["test" if i % 3 else "calibration" for i in range(60)]
    assert {t.split for t in build_trials(Plain(), questions, calibration=None)} == {None}
    with pytest.raises(InvalidInput, match=r"splits name no split for the group 'world 1-1' \(59 such\)"):
        build_trials(Plain(), questions, splits={"world 1-2": "test"})


@pytest.mark.parametrize(
    ("questions", "message"),
    [
        ([], r"questions are \[\]; give LogicQuestions, at least one"),
        ([1], r"questions are \[1\]; give LogicQuestions"),
        ([asked("a"), asked("a", group="x")], "two trials have the id 'a'"),
        ([asked("a", group="g"), asked("b", group="g")], "all 2 questions are in one group, .* use calibration=None"),
    ],
)
def test_sets_that_cannot_be_built(questions, message, as_users_run):
    with pytest.raises(InvalidInput, match=message):
        build_trials(Plain(), questions)


# -- variants ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("template", ["base", "nano", "options"])
def test_flipped_twins_of_worlds(template):
    model = Words()
    trials = prontoqa(model, n=20, rules="all", depth=2, template=template)
    twins = flipped(model, trials)
    assert len(twins) == len(trials) and twins.options["wording"] == "flipped"
    for trial, twin in zip(trials, twins, strict=True):
        assert twin.id == f"{trial.id}/flipped" and twin.meta["twin"] == trial.id
        assert (twin.split, twin.candidates, twin.meta["premises"]) == (
            trial.split, trial.candidates, trial.meta["premises"],
        )  # fmt: skip
        assert twin.label == 1 - (trial.label or 0)
        # The same words but for the name.
        assert twin.meta["statement"].split(" ", 1)[1] == trial.meta["statement"].split(" ", 1)[1]
        assert twin.meta["statement"] != trial.meta["statement"]
        assert twin.meta["template"] == template
    back = flipped(model, twins)
    assert [(t.tokens, t.label, t.meta["proof"]) for t in back] == [
        (t.tokens, t.label, t.meta["proof"]) for t in trials
    ]


def test_flipped_statements_of_files():
    model = Words()
    questions = [
        asked("plain"),
        asked("wide", statement="Every tovik is kind."),
        asked("open", statement="Max is shy.", candidates=THREE, label=2),
        asked("refuted", statement="Wren is not kind.", label=1),
    ]
    twins = {t.meta["twin"]: t for t in flipped(model, questions, calibration=0.5)}
    said = {k: (t.meta["statement"], t.meta["verdicts"][t.label or 0]) for k, t in twins.items()}
    assert said == {
        "plain": ("Wren is not kind.", "false"),
        "wide": ("It is not the case that every tovik is kind.", "false"),
        "open": ("Max is not shy.", "unknown"),
        "refuted": ("Wren is kind.", "true"),
    }


def test_what_cannot_be_flipped_is_counted():
    model = Words()
    questions = [asked("a"), asked("b", statement="Is Wren kind?", candidates=YES_NO)]
    with pytest.warns(UserWarning, match="1 of 2 questions have no flipped form and are left out, such as 'b'"):
        twins = flipped(model, questions)
    assert [t.meta["twin"] for t in twins] == ["a"] and twins.options["left_out"] == ["b"]
    with pytest.raises(InvalidInput, match="none of the 1 questions can be flipped"):
        flipped(model, questions[1:], calibration=None)


def test_statements_alone():
    model = Words()
    trials = prontoqa(model, n=10, template="base")
    alone = statement_only(model, trials)
    for trial, bare in zip(trials, alone, strict=True):
        assert prompt(model, bare) == f"True or false: {trial.meta['statement']}\nAnswer:"
        assert (bare.label, bare.split, bare.candidates) == (trial.label, trial.split, trial.candidates)
        assert bare.meta["twin"] == trial.id and bare.meta["wording"] == "statement_only"
        assert bare.meta["premises"] == [] and bare.meta["depth"] == trial.meta["depth"]
        assert text_of(model, bare, "statement").strip() == trial.meta["statement"]
    nano = statement_only(model, trials, template="nano")
    assert prompt(model, nano[0]) == f"claim: {trials[0].meta['statement']}"
    chat = statement_only(model, trials, template="chat")
    assert "<user> Judge by" in prompt(model, chat[0])


@pytest.mark.parametrize("make", [flipped, statement_only])
def test_variants_refuse(make, as_users_run):
    with pytest.raises(InvalidInput, match="give trials or questions, at least one"):
        make(Words(), [])
    trials = prontoqa(Words(), n=4)
    with pytest.raises(InvalidInput, match="give trials or questions"):
        make(Words(), [trials[0], asked()])
    with pytest.raises(InvalidInput, match=r"\['calibration'\] say how questions are split; trials keep their split"):
        make(Words(), trials, calibration=0.3)


def test_rebuilt_with_some_premises():
    model = Words()
    (trial,) = build_trials(model, [asked(meta={"note": 1})], calibration=None, template="options")
    part = rebuild(model, trial, premises=[2, 1])
    assert part.meta["premises"] == ["Every tovik is kind.", "Max is loud."] and part.meta["proof"] == [0]
    assert part.meta["kept"] == [1, 2] and part.meta["twin"] == "q" and part.meta["note"] == 1
    assert part.id == "q/kept [1,2]" and part.label == trial.label and part.candidates == trial.candidates
    assert prompt(model, part) == prompt(model, trial).replace("Wren is a tovik. ", "")
    assert len(part.spans["candidates"]) == 2
    assert rebuild(model, trial, premises=range(3)) == trial
    none = rebuild(model, trial, premises=[])
    assert prompt(model, none).startswith("Which is right") and none.meta["proof"] == []
    again = rebuild(model, part, premises=[0])
    assert again.meta["premises"] == ["Every tovik is kind."]
    for wrong in ([3], [-1, 0]):
        with pytest.raises(InvalidInput, match=r"question 'q' has 3 premises; the indices .* go beyond them"):
            rebuild(model, trial, premises=wrong)


def test_plain_negation_is_only_given_where_safe():
    assert plainly_negated("Wren is kind.") == "Wren is not kind."
    for unsafe in ("Nobody is kind.", "Wren is only kind.", "Wren sings.", "Peter is shorter than a man."):
        assert plainly_negated(unsafe) is None
    assert re.match("It is not the case", negated("Nobody is kind."))
