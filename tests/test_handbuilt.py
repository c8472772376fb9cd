"""Why attention alone does not find the heads that answer: detectors on a model whose heads are known by construction.

Head A attends hard to the needle and writes what no word's unembedding looks for. Head B attends less and writes the
answer, which is not in the needle. Head C copies. See ``handbuilt`` for how they are made.
"""

from __future__ import annotations

from typing import Any

import handbuilt
import numpy as np
import pytest
from handbuilt import A, B, C

import mechheads as mh

ATTENTION_READERS = ("attention_spatial", "contrastive", "headkv", "qrhead")
WRITE_READERS = ("locos", "dla")
CAUSAL = ("cri", "attribution_patching")


@pytest.fixture(scope="module")
def model() -> mh.Model:
    return handbuilt.model()


@pytest.fixture(scope="module")
def ca(model: mh.Model) -> mh.CircuitAnalysis:
    return mh.CircuitAnalysis(model, progress=False)


@pytest.fixture(scope="module")
def non_literal(ca: mh.CircuitAnalysis) -> dict[str, mh.HeadScores]:
    """Every detector on needles that do not hold the answer."""
    return ca.score([*ATTENTION_READERS, *WRITE_READERS, *CAUSAL, "wu"], handbuilt.non_literal())


@pytest.fixture(scope="module")
def literal(ca: mh.CircuitAnalysis) -> dict[str, mh.HeadScores]:
    """Every detector on needles that hold it."""
    return ca.score([*ATTENTION_READERS, *WRITE_READERS, *CAUSAL, "wu"], handbuilt.literal())


def answers(ca: mh.CircuitAnalysis, trials: mh.TrialSet, ablated: str | None = None) -> list[str]:
    """What the model says to each prompt, one head silenced or none."""
    silence = [] if ablated is None else [mh.zero_ablation(site="z").on(ablated)]
    with ca.intervene(*silence):
        return [ca.generate(tokens=t.tokens, max_new_tokens=4).text for t in trials]


def score(scores: mh.HeadScores, head: str) -> float:
    return float(scores.mean()[mh.Head.parse(head).layer, mh.Head.parse(head).head])


# -- the model is what it is said to be --------------------------------------------------------------


def test_the_model_answers_and_stops(ca: mh.CircuitAnalysis) -> None:
    for trials in (handbuilt.non_literal(), handbuilt.literal()):
        assert answers(ca, trials) == [t.answer for t in trials]
        for trial in trials:
            said = ca.generate(tokens=trial.tokens, max_new_tokens=4)
            assert len(said.tokens) == 1  # and then the end token, which is left out
    needles = [[handbuilt.WORDS[t.tokens[p]] for p in t.positions("needle")] for t in handbuilt.non_literal()]
    assert not any(t.answer in words for t, words in zip(handbuilt.non_literal(), needles, strict=True))


def test_heads_attend_as_built(non_literal: dict[str, mh.HeadScores], literal: dict[str, mh.HeadScores]) -> None:
    mass = {head: non_literal["attention_spatial"].parts["plus"][:, 0, i] for i, head in enumerate((A, B, C))}
    assert mass[A].min() > 0.9 and mass[B].min() > 0.4 and mass[B].max() < 0.7 and mass[C].max() < 0.1
    mass = {head: literal["attention_spatial"].parts["plus"][:, 0, i] for i, head in enumerate((A, B, C))}
    assert mass[C].min() > 0.8 and mass[A].max() < 0.1 and mass[B].max() < 0.1


@pytest.mark.parametrize(("head", "lost"), [(A, False), (B, True), (C, False)])
def test_only_the_head_that_writes_the_answer_is_needed_for_it(ca: mh.CircuitAnalysis, head: str, lost: bool) -> None:
    trials = handbuilt.non_literal()
    told = [handbuilt.UNKNOWN] * len(trials) if lost else [t.answer for t in trials]
    assert answers(ca, trials, head) == told


@pytest.mark.parametrize(("head", "lost"), [(A, False), (B, False), (C, True)])
def test_only_the_head_that_copies_is_needed_for_a_literal_answer(
    ca: mh.CircuitAnalysis, head: str, lost: bool
) -> None:
    trials = handbuilt.literal()
    told = [handbuilt.UNKNOWN] * len(trials) if lost else [t.answer for t in trials]
    assert answers(ca, trials, head) == told


# -- what the detectors say of it --------------------------------------------------------------------


def test_no_trial_is_lost(non_literal: dict[str, mh.HeadScores], literal: dict[str, mh.HeadScores]) -> None:
    for results in (non_literal, literal):
        for scores in results.values():
            assert scores.kept.all(), (scores.method, scores.records)


@pytest.mark.parametrize("method", ATTENTION_READERS)
def test_detectors_that_read_attention_name_the_head_that_only_looks(
    non_literal: dict[str, mh.HeadScores], method: str
) -> None:
    assert non_literal[method].top(3).labels[:2] == [A, B]
    assert score(non_literal[method], A) > 1.2 * score(non_literal[method], B) > 0


@pytest.mark.parametrize("method", [*WRITE_READERS, *CAUSAL])
def test_detectors_that_read_what_is_written_name_the_head_that_answers(
    non_literal: dict[str, mh.HeadScores], method: str
) -> None:
    assert non_literal[method].top(1).labels == [B]
    assert score(non_literal[method], B) > 5 * abs(score(non_literal[method], A))


@pytest.mark.parametrize("unembed", ["raw", "normed", "centered"])
def test_whichever_way_the_unembedding_is_read(ca: mh.CircuitAnalysis, unembed: str) -> None:
    for method in WRITE_READERS:
        scores = ca.score(method, handbuilt.non_literal(), unembed=unembed)
        assert scores.top(1).labels == [B]
        assert np.abs(scores.values[:, 0, 0]).max() < 1e-6  # A writes past every unembedding


def test_counting_copies_sees_nothing_where_nothing_is_copied(non_literal: dict[str, mh.HeadScores]) -> None:
    assert (non_literal["wu"].values == 0).all()


@pytest.mark.parametrize("options", [{}, {"counting": "step"}])
def test_counting_copies_finds_the_head_that_copies(ca: mh.CircuitAnalysis, options: dict[str, Any]) -> None:
    trials = handbuilt.literal()
    whole, narrow = (ca.score("wu", trials, span=span, **options).values[:, 0] for span in ("needle", "answer"))
    np.testing.assert_allclose(whole, [[0, 0, 1 / 3]] * len(trials), atol=1e-6)  # one of the needle's three words
    np.testing.assert_allclose(narrow, [[0, 0, 1]] * len(trials), atol=1e-6)


@pytest.mark.parametrize("method", [*ATTENTION_READERS, *WRITE_READERS, *CAUSAL])
def test_every_detector_finds_the_head_that_copies(literal: dict[str, mh.HeadScores], method: str) -> None:
    assert literal[method].top(1).labels == [C]


def test_ablating_what_attention_names_costs_nothing(
    ca: mh.CircuitAnalysis, non_literal: dict[str, mh.HeadScores]
) -> None:
    """The same as a user would see it, as a sweep."""
    rankings = {name: non_literal[name] for name in ("attention_spatial", "locos")}
    with pytest.warns(UserWarning, match="trials it is tested on"):
        sweep = ca.sweep(rankings, k=1, trials=handbuilt.non_literal(), intervention=mh.zero_ablation())
    curve = sweep.curve("correct").query("k == 1").set_index("ranking")["mean"]
    assert curve["attention_spatial"] == 1 and curve["locos"] == 0
