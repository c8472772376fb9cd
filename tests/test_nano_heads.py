"""What nano is for: a model in which a method's heads can be shown to matter."""

from __future__ import annotations

import pytest

import mechheads as mh


@pytest.fixture(scope="module")
def ca() -> mh.CircuitAnalysis:
    return mh.CircuitAnalysis("nano", progress=False)


def test_the_best_locos_head_alone_carries_retrieval(ca: mh.CircuitAnalysis) -> None:
    """One head of 24: retrieval falls to at most 0.1, what is remembered stays, random heads cost little."""
    needles = mh.nano.retrieval(ca.model, n=60, seed=3)
    locos = ca.score("locos", needles.split("calibration"), max_new_tokens=2, batch_size=15)
    assert locos.n_kept >= 28
    sweep = ca.sweep(
        {"locos": locos},
        k=1,
        trials={
            "nonliteral": needles.split("test"),
            "recall": mh.nano.recall(ca.model, n=30),
            "arithmetic": mh.nano.arithmetic(ca.model, n=30),
        },
        intervention=mh.mean_ablation(reference=needles.split("calibration")),
        controls=mh.random_heads(draws=5),
        max_new_tokens=2,
        batch_size=30,
    )
    curve = sweep.curve("correct").set_index(["task", "ranking", "k"])["mean"]
    assert curve["nonliteral", "locos", 0] >= 0.95 and curve["nonliteral", "locos", 1] <= 0.1
    assert curve["nonliteral", "random", 1] >= 0.8 * curve["nonliteral", "locos", 0]
    for task in ("recall", "arithmetic"):
        assert curve[task, "locos", 1] >= 0.9 * curve[task, "locos", 0] >= 0.85


def test_attention_finds_the_same_head_and_dla_agrees(ca: mh.CircuitAnalysis) -> None:
    needles = mh.nano.retrieval(ca.model, n=24, seed=4)
    found = ca.score(["locos", "attention_spatial", "dla"], needles, max_new_tokens=2, batch_size=12)
    assert {str(scores.top(1)[0]) for scores in found.values()} == {"L1H0"}


def test_literal_and_non_literal_share_it(ca: mh.CircuitAnalysis) -> None:
    literal = mh.nano.retrieval(ca.model, n=24, literal=True, seed=5)
    assert ca.score("locos", literal, max_new_tokens=2, batch_size=12).top(1).labels == ["L1H0"]
