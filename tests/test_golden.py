"""LOCOS, attention-spatial and DLA against the published implementation's numbers on a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mechheads as mh
from mechheads import runner
from mechheads.capture import TrialCapture, capture

pytestmark = pytest.mark.smollm2

GOLDEN = Path(__file__).parent / "golden"
REFERENCE = json.loads((GOLDEN / "locos_reference_smollm2.json").read_text(encoding="utf-8"))["trials"]
WITH_STEPS = [t["id"] for t in REFERENCE if t["answer_steps"]]
WITHOUT = [t["id"] for t in REFERENCE if not t["answer_steps"]]
# (method, part) here -> detector.matrix there
ARRAYS = {
    ("locos", "score"): "logit_contrib.S",
    ("locos", "plus"): "logit_contrib.L_plus",
    ("locos", "minus"): "logit_contrib.L_minus",
    ("attention_spatial", "score"): "attention_spatial.S",
    ("attention_spatial", "plus"): "attention_spatial.L_plus",
    ("attention_spatial", "minus"): "attention_spatial.L_minus",
    ("dla", "score"): "dla.S",
}


@pytest.fixture(scope="module")
def arrays() -> dict[str, np.ndarray]:
    with np.load(GOLDEN / "locos_reference_smollm2.npz") as file:
        return {key: file[key] for key in file.files}


@pytest.fixture(scope="module")
def trials() -> mh.TrialSet:
    return mh.TrialSet(
        (
            mh.Trial(
                id=t["id"],
                tokens=t["input_ids"],
                spans={"needle": (t["needle_start"], t["needle_end"])},
                answer=t["answer"],
            )
            for t in REFERENCE
        ),
        name="golden",
    )


@pytest.fixture(scope="module")
def run(smollm2_model: mh.Model, trials: mh.TrialSet) -> tuple[dict[str, mh.HeadScores], dict[str, list[int]]]:
    """Scores of the three methods, and the tokens that were generated for them."""
    said: dict[str, list[int]] = {}

    def watched(*args: Any, **kwargs: Any) -> list[TrialCapture]:
        captures = capture(*args, **kwargs)
        said.update({one.trial.id: one.decoded.tokens for one in captures})
        return captures

    ca = mh.CircuitAnalysis(smollm2_model, progress=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "capture", watched)
        scores = ca.score(["locos", "attention_spatial", "dla"], trials, pooling="trial")
    return scores, said


@pytest.fixture(scope="module")
def scores(run: tuple[dict[str, mh.HeadScores], dict[str, list[int]]]) -> dict[str, mh.HeadScores]:
    return run[0]


def of_trial(scores: mh.HeadScores, trial: str, part: str) -> np.ndarray:
    row = scores.trial_ids.index(trial)
    return (scores.values if part == "score" else scores.parts[part])[row]


def assert_near(got: np.ndarray, want: np.ndarray) -> None:
    largest = np.abs(want).max()
    assert largest > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * largest)


def test_reference_has_both_kinds_of_trials() -> None:
    assert len(WITH_STEPS) == 4 and len(WITHOUT) == 2


@pytest.mark.parametrize("trial", WITH_STEPS)
@pytest.mark.parametrize(("method", "part"), ARRAYS)
def test_equals_the_published_numbers(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], trial: str, method: str, part: str
) -> None:
    assert_near(of_trial(scores[method], trial, part), arrays[f"{trial}.{ARRAYS[method, part]}"])


@pytest.mark.parametrize(("method", "part"), ARRAYS)
@pytest.mark.parametrize("trial", WITHOUT)
def test_trials_without_an_answer_step_are_undefined_not_zero(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], trial: str, method: str, part: str
) -> None:
    assert not arrays[f"{trial}.{ARRAYS[method, part]}"].any()
    assert np.isnan(of_trial(scores[method], trial, part)).all()


def test_gate_and_answer_steps_agree(scores: dict[str, mh.HeadScores]) -> None:
    for one in scores.values():
        assert one.kept.tolist() == [t["passes_reference_gate"] for t in REFERENCE]
        assert one.weights.tolist() == [len(t["answer_steps"]) for t in REFERENCE]
        for record, want in zip(one.records, REFERENCE, strict=True):
            assert record["answer_steps"] == want["answer_steps"]
            assert record["rouge1_recall"] * 100 == pytest.approx(want["rouge1_recall_x100"])
            assert record["generated"].strip() == want["generated_text"]
            assert (record["reason"] is None) == want["passes_reference_gate"]


def test_generated_tokens_are_identical(run: tuple[dict[str, mh.HeadScores], dict[str, list[int]]]) -> None:
    assert run[1] == {t["id"]: t["generated_ids"] for t in REFERENCE}


@pytest.mark.parametrize(("method", "part"), ARRAYS)
def test_pooled_means_over_kept_trials(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], method: str, part: str
) -> None:
    stack = np.stack([arrays[f"{t}.{ARRAYS[method, part]}"] for t in WITH_STEPS])
    steps = np.array([len(t["answer_steps"]) for t in REFERENCE if t["answer_steps"]])
    assert len(set(steps.tolist())) > 1  # else both poolings would be one
    assert_near(scores[method].pooled(part), stack.mean(0))
    by_step = scores[method].with_pooling("step")
    assert_near(by_step.pooled(part), np.average(stack, axis=0, weights=steps))


def test_batch_composition_and_padding_side_change_nothing(
    smollm2_model: mh.Model, trials: mh.TrialSet, arrays: dict[str, np.ndarray]
) -> None:
    few = mh.TrialSet([trials[0], trials[3]])
    ca = mh.CircuitAnalysis(smollm2_model, progress=False)
    options: list[dict[str, Any]] = [{"batch_size": 1}, {"batch_size": 2, "padding": "right"}]
    assert len({len(t.tokens) for t in few}) == 2
    for run in options:
        again = ca.score("locos", few, **run)
        for trial in few:
            assert_near(of_trial(again, trial.id, "score"), arrays[f"{trial.id}.logit_contrib.S"])
