"""Every detector of the published comparison against its published implementation's numbers, on a real model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mechheads as mh
from mechheads import runner
from mechheads.capture import TrialCapture, capture
from mechheads.methods import get_method
from mechheads.runner import RunOptions, score_jobs
from mechheads.tables import Job

pytestmark = pytest.mark.smollm2

GOLDEN = Path(__file__).parent / "golden"
REFERENCE = json.loads((GOLDEN / "locos_reference_smollm2.json").read_text(encoding="utf-8"))["trials"]
BY_ID = {t["id"]: t for t in REFERENCE}
WITH_STEPS = [t["id"] for t in REFERENCE if t["answer_steps"]]
WITHOUT = [t["id"] for t in REFERENCE if not t["answer_steps"]]
# What is asked for, all on one capture: label -> (method, its options).
JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "locos": ("locos", {}),
    "attention_spatial": ("attention_spatial", {}),
    "dla": ("dla", {}),
    "wu": ("wu", {"counting": "step"}),
    "wu_answer": ("wu", {"counting": "step", "span": "answer"}),
    "mass": ("contrastive", {"form": "mass", "filtered": False}),
    "topk": ("contrastive", {"form": "topk", "filtered": False}),
    "mass_filtered": ("contrastive", {"form": "mass"}),
    "headkv": ("headkv", {}),
}
# (label, part) here -> detector.matrix there
ARRAYS = {
    ("locos", "score"): "logit_contrib.S",
    ("locos", "plus"): "logit_contrib.L_plus",
    ("locos", "minus"): "logit_contrib.L_minus",
    ("attention_spatial", "score"): "attention_spatial.S",
    ("attention_spatial", "plus"): "attention_spatial.L_plus",
    ("attention_spatial", "minus"): "attention_spatial.L_minus",
    ("dla", "score"): "dla.S",
    ("mass", "contrast"): "contrastive_mass.S",
    ("mass", "plus"): "contrastive_mass.A_plus",
    ("mass", "minus"): "contrastive_mass.A_minus",
    ("topk", "contrast"): "contrastive_topk10.S",
    ("topk", "plus"): "contrastive_topk10.A_plus",
    ("topk", "minus"): "contrastive_topk10.A_minus",
}
BY_STEP = [pair for pair in ARRAYS if pair[0] in ("locos", "attention_spatial", "dla")]


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
def run(smollm2_model: mh.Model, trials: mh.TrialSet) -> tuple[dict[str, mh.HeadScores], dict[str, TrialCapture]]:
    """All scores from one capture, and the capture of each trial."""
    seen: dict[str, TrialCapture] = {}

    def watched(*args: Any, **kwargs: Any) -> list[TrialCapture]:
        captures = capture(*args, **kwargs)
        seen.update({one.trial.id: one for one in captures})
        return captures

    jobs = [Job(label, get_method(name), get_method(name).resolve(given)) for label, (name, given) in JOBS.items()]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "capture", watched)
        scores = score_jobs(smollm2_model, jobs, trials, run=RunOptions(pooling="trial"), progress=False)
    return scores, seen


@pytest.fixture(scope="module")
def scores(run: tuple[dict[str, mh.HeadScores], Any]) -> dict[str, mh.HeadScores]:
    return run[0]


@pytest.fixture(scope="module")
def captures(run: tuple[Any, dict[str, TrialCapture]]) -> dict[str, TrialCapture]:
    return run[1]


def of_trial(scores: mh.HeadScores, trial: str, part: str) -> np.ndarray:
    row = scores.trial_ids.index(trial)
    return (scores.values if part == "score" else scores.parts[part])[row]


def assert_near(got: np.ndarray, want: np.ndarray) -> None:
    largest = np.abs(want).max()
    assert largest > 0
    np.testing.assert_allclose(got, want, rtol=0, atol=1e-4 * largest)


def needle_mass(one: TrialCapture, steps: range) -> np.ndarray:
    """``[layer head step]`` attention on the needle, from the captured rows."""
    layers = (one.rows(i).at_steps(steps) for i in range(one.model.spec.n_layers))
    return np.stack([acts.need("pattern")[..., acts.mask("needle")].sum(-1).numpy() for acts in layers])


def test_reference_has_both_kinds_of_trials() -> None:
    assert len(WITH_STEPS) == 4 and len(WITHOUT) == 2


def test_no_array_is_left_out(arrays: dict[str, np.ndarray]) -> None:
    elsewhere = {"behavioral.S", "behavioral_answer_span.S", "headkv.S", "headkv.per_step_phi"}
    elsewhere |= {f"contrastive_{form}.step_scores" for form in ("mass", "topk10")}
    assert {key.split(".", 1)[1] for key in arrays} == {*ARRAYS.values(), *elsewhere}


@pytest.mark.parametrize("trial", WITH_STEPS)
@pytest.mark.parametrize(("label", "part"), ARRAYS)
def test_equals_the_published_numbers(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], trial: str, label: str, part: str
) -> None:
    assert_near(of_trial(scores[label], trial, part), arrays[f"{trial}.{ARRAYS[label, part]}"])


@pytest.mark.parametrize("trial", WITH_STEPS)
def test_copies_are_counted_exactly(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], trial: str
) -> None:
    n = BY_ID[trial]["needle_end"] - BY_ID[trial]["needle_start"]
    want = arrays[f"{trial}.behavioral.S"] * n
    counts = np.rint(want)
    np.testing.assert_allclose(want, counts, atol=1e-4)
    got = of_trial(scores["wu"], trial, "score") * n
    np.testing.assert_allclose(got, np.rint(got), atol=1e-4)
    assert (np.rint(got) == counts).all()


def test_some_copies_are_counted(arrays: dict[str, np.ndarray]) -> None:
    assert max(arrays[f"{t}.behavioral.S"].max() for t in WITH_STEPS) > 0


def test_copies_of_the_answer_are_counted_exactly(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray]
) -> None:
    """The reference finds the answer in the needle only where it is tokenised there as it is by itself."""
    found = [t for t in WITH_STEPS if f"{t}.behavioral_answer_span.S" in arrays]
    assert found == ["p4_raw_number_d100"]
    n = len(BY_ID[found[0]]["answer_steps"])
    want = arrays[f"{found[0]}.behavioral_answer_span.S"]
    got = of_trial(scores["wu_answer"], found[0], "score")
    assert (np.rint(got * n) == np.rint(want * n)).all() and want.max() > 0
    np.testing.assert_allclose(got, want, atol=1e-6)
    for trial in WITH_STEPS:  # ours finds it wherever its text stands
        assert BY_ID[trial]["answer"] in BY_ID[trial]["needle"]
        assert np.isfinite(of_trial(scores["wu_answer"], trial, "score")).all()


@pytest.mark.parametrize("trial", WITH_STEPS)
@pytest.mark.parametrize("form", ["mass", "topk"])
def test_contrastive_scores_are_shares_of_the_published_contrast(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], trial: str, form: str
) -> None:
    want = arrays[f"{trial}.{ARRAYS[form, 'contrast']}"]
    got = of_trial(scores[form], trial, "score")
    assert_near(got, want / want.sum())
    assert got.sum() == pytest.approx(1, abs=1e-5)


@pytest.mark.parametrize("trial", WITH_STEPS)
def test_the_published_filter_drops_the_same_trials(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], trial: str
) -> None:
    want = BY_ID[trial]
    n = want["needle_end"] - want["needle_start"]
    kept = arrays[f"{trial}.contrastive_mass.S"].max() >= 2 * n / len(want["input_ids"])
    row = scores["mass_filtered"].trial_ids.index(trial)
    assert scores["mass_filtered"].kept[row] == kept
    assert (scores["mass_filtered"].records[row]["reason"] is None) == kept


@pytest.mark.parametrize("trial", WITH_STEPS)
def test_every_step_of_the_contrast_is_the_published_one(
    captures: dict[str, TrialCapture], arrays: dict[str, np.ndarray], trial: str
) -> None:
    one = captures[trial]
    want = arrays[f"{trial}.contrastive_mass.step_scores"]
    assert len(want) == one.decoded.steps == len(one.decoded.tokens) + 1  # the stop token's step is the last
    assert_near(needle_mass(one, range(one.decoded.steps)).transpose(2, 0, 1), want)
    top10 = arrays[f"{trial}.contrastive_topk10.step_scores"]
    for layer in range(one.model.spec.n_layers):
        acts = one.rows(layer).at_steps(range(one.decoded.steps))
        best = acts.need("pattern").topk(10, dim=-1).indices
        got = acts.mask("needle")[best].float().mean(-1).numpy()
        np.testing.assert_allclose(got.T, top10[:, layer], atol=1e-6)


@pytest.mark.parametrize("trial", [t["id"] for t in REFERENCE])
def test_headkv_equals_the_published_numbers_on_every_trial(
    scores: dict[str, mh.HeadScores], captures: dict[str, TrialCapture], arrays: dict[str, np.ndarray], trial: str
) -> None:
    assert_near(of_trial(scores["headkv"], trial, "score"), arrays[f"{trial}.headkv.S"])
    assert_near(needle_mass(captures[trial], range(-7, 1)), arrays[f"{trial}.headkv.per_step_phi"])
    assert scores["headkv"].kept.all() and (scores["headkv"].weights == 1).all()


@pytest.mark.parametrize(("label", "part"), [*ARRAYS, ("wu", "score")])
@pytest.mark.parametrize("trial", WITHOUT)
def test_trials_without_an_answer_step_are_undefined_not_zero(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], trial: str, label: str, part: str
) -> None:
    if label in ("locos", "attention_spatial", "dla"):
        assert not arrays[f"{trial}.{ARRAYS[label, part]}"].any()
    assert np.isnan(of_trial(scores[label], trial, part)).all()
    assert not scores[label].kept[scores[label].trial_ids.index(trial)]


def test_gate_and_answer_steps_agree(scores: dict[str, mh.HeadScores]) -> None:
    for label in ("locos", "attention_spatial", "dla", "wu", "mass"):
        one = scores[label]
        assert one.kept.tolist() == [t["passes_reference_gate"] for t in REFERENCE]
        for record, want in zip(one.records, REFERENCE, strict=True):
            assert record["answer_steps"] == want["answer_steps"]
            assert record["rouge1_recall"] * 100 == pytest.approx(want["rouge1_recall_x100"])
            assert record["generated"].strip() == want["generated_text"]
            assert (record["reason"] is None) == want["passes_reference_gate"]
    assert scores["locos"].weights.tolist() == [len(t["answer_steps"]) for t in REFERENCE]


def test_generated_tokens_are_identical(captures: dict[str, TrialCapture]) -> None:
    assert {i: one.decoded.tokens for i, one in captures.items()} == {t["id"]: t["generated_ids"] for t in REFERENCE}


@pytest.mark.parametrize(("label", "part"), ARRAYS)
def test_pooled_means_over_kept_trials(
    scores: dict[str, mh.HeadScores], arrays: dict[str, np.ndarray], label: str, part: str
) -> None:
    stack = np.stack([arrays[f"{t}.{ARRAYS[label, part]}"] for t in WITH_STEPS])
    assert_near(scores[label].pooled(part), stack.mean(0))
    steps = np.array([len(t["answer_steps"]) for t in REFERENCE if t["answer_steps"]])
    assert len(set(steps.tolist())) > 1  # else both poolings would be one
    by_step = scores[label].with_pooling("step").pooled(part)
    assert_near(by_step, np.average(stack, axis=0, weights=steps) if (label, part) in BY_STEP else stack.mean(0))


def test_batch_composition_and_padding_side_change_nothing(
    smollm2_model: mh.Model, trials: mh.TrialSet, arrays: dict[str, np.ndarray]
) -> None:
    few = mh.TrialSet([trials[0], trials[3]])
    ca = mh.CircuitAnalysis(smollm2_model, progress=False)
    options: list[dict[str, Any]] = [{"batch_size": 1}, {"batch_size": 2, "padding": "right"}]
    assert len({len(t.tokens) for t in few}) == 2
    for run in options:
        again = ca.score(["locos", "headkv"], few, **run)
        for trial in few:
            assert_near(of_trial(again["locos"], trial.id, "score"), arrays[f"{trial.id}.logit_contrib.S"])
            assert_near(of_trial(again["headkv"], trial.id, "score"), arrays[f"{trial.id}.headkv.S"])
