"""The trial loop: gate, records, pooling, interruption, progress, provenance."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from helpers import LENGTHS, answered, counted, prompts

import mechheads as mh
from mechheads import runner
from mechheads.capture import capture
from mechheads.runner import RunOptions

pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture(scope="module")
def trials(llama: mh.Model) -> mh.TrialSet:
    """Answers of one, two and three tokens."""
    return answered(llama, at=[slice(0, 1), slice(1, 3), slice(1, 4), slice(0, 3), slice(2, 4), slice(0, 1)])


@pytest.fixture
def ca(llama: mh.Model) -> mh.CircuitAnalysis:
    return mh.CircuitAnalysis(llama)


@pytest.fixture(scope="module")
def locos(llama: mh.Model, trials: mh.TrialSet) -> mh.HeadScores:
    return mh.CircuitAnalysis(llama).score("locos", trials)


def altered(trial: mh.Trial, **changes: Any) -> mh.Trial:
    return dataclasses.replace(trial, **changes)


# -- the gate ------------------------------------------------------------------------------------


def judged(ca: mh.CircuitAnalysis, trial: mh.Trial, **run: Any) -> tuple[bool, dict[str, Any], float]:
    """Kept, record and weight of one trial; checks that values are defined exactly if it is kept."""
    scores = ca.score("locos", trial, **{"max_new_tokens": 6, **run})
    assert np.isfinite(scores.values).all() == scores.kept[0]
    assert np.isnan(scores.values).all() == (not scores.kept[0])
    return bool(scores.kept[0]), dict(scores.records[0]), float(scores.weights[0])


def test_right_answer_is_kept_with_its_record(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    trial = altered(trials[1], split="test")
    kept, record, weight = judged(ca, trial)
    assert kept and weight == 2
    assert record["reason"] is None and record["answer_steps"] == [1, 2] and record["n_answer_steps"] == 2
    assert record["rouge1_recall"] == 1.0 and record["contains_answer"] and not record["exact_match"]
    assert record["split"] == "test" and record["answer"] == trial.answer
    assert record["n_generated"] == 6 and record["stopped"] == "length" and trial.answer in record["generated"]


def test_wrong_answer_fails_the_gate(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    kept, record, _ = judged(ca, altered(trials[1], answer="w93 w94"))
    assert not kept and record["rouge1_recall"] == 0.0
    assert record["reason"] == "ROUGE-1 recall is not above 0.5" and record["answer_steps"] == []


def test_half_the_words_are_not_above_one_half(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    assert trials[1].answer is not None
    half = altered(trials[1], answer=trials[1].answer.split()[0] + " w94")
    kept, record, _ = judged(ca, half)
    assert not kept and record["rouge1_recall"] == 0.5 and record["reason"] == "ROUGE-1 recall is not above 0.5"
    kept, record, _ = judged(ca, half, rouge_threshold=0.4)
    assert not kept and record["reason"] == "the answer's tokens are not in the output"


def test_the_right_words_in_another_order_have_no_answer_step(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    assert trials[1].answer is not None
    first, second = trials[1].answer.split()
    assert first != second
    kept, record, weight = judged(ca, altered(trials[1], answer=f"{second} {first}"))
    assert not kept and weight == 0 and record["rouge1_recall"] == 1.0
    assert record["reason"] == "the answer's tokens are not in the output"


def test_nothing_passes_a_threshold_of_one(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    kept, record, _ = judged(ca, trials[1], rouge_threshold=1.0)
    assert not kept and record["reason"] == "ROUGE-1 recall is not above 1.0"


def test_silence_is_not_kept(ca: mh.CircuitAnalysis) -> None:
    silent = prompts(seed=2)[5]
    for answer in ("w5", None):
        kept, record, weight = judged(ca, mh.Trial(id="s", tokens=silent, spans={"needle": (2, 5)}, answer=answer))
        assert not kept and weight == 0 and record["reason"] == "the model said nothing"
        assert record["stopped"] == "stop token" and record["n_generated"] == 0 and record["generated"] == ""


def test_without_an_answer_every_step_counts(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    kept, record, weight = judged(ca, altered(trials[1], answer=None))
    assert kept and weight == 6 and record["answer_steps"] == [0, 1, 2, 3, 4, 5]
    assert "rouge1_recall" not in record and record["reason"] is None


def test_an_answer_cut_off_by_the_length_is_not_kept(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    kept, record, _ = judged(ca, trials[1], max_new_tokens=2)
    assert not kept and record["n_generated"] == 2


def test_kept_and_weights_belong_to_their_trials(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    mixed = [altered(t, answer="w93 w94") if i in (0, 4) else t for i, t in enumerate(trials)]
    scores = ca.score("locos", mixed)
    assert scores.kept.tolist() == [False, True, True, True, False, True]
    assert scores.weights.tolist() == [0, 2, 3, 3, 0, 1]
    assert np.isnan(scores.values).all((1, 2)).tolist() == (~scores.kept).tolist()


def test_if_no_trial_is_kept_the_mean_says_why(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    none = ca.score("locos", mh.TrialSet(altered(t, answer="w93 w94") for t in trials))
    assert none.n_kept == 0
    with pytest.raises(mh.InvalidInput, match=r"none of the 6 trials.*6 x ROUGE-1 recall"):
        none.mean()


# -- numbers -------------------------------------------------------------------------------------


def test_pooling_by_hand(ca: mh.CircuitAnalysis, trials: mh.TrialSet, locos: mh.HeadScores) -> None:
    """From the capture itself: mean over all pairs (trial, answer step), and mean of the trials' means."""
    by_trial: list[list[np.ndarray]] = []
    for trial in trials:
        one = capture(ca.model, [trial], max_new_tokens=6)[0]
        steps: list[np.ndarray] = []
        for step in one.answer_steps:
            layers = []
            for layer in range(3):
                acts = one.layer(layer)
                phi = acts.phi()[:, step].detach().double().numpy()  # [head key]
                seen = len(trial.tokens) + step
                on, n = phi[:, 2:5].sum(1), 3
                layers.append(on - n / (seen - n) * (phi[:, :seen].sum(1) - on))
            steps.append(np.stack(layers))
        by_trial.append(steps)
    assert [len(s) for s in by_trial] == [1, 2, 3, 3, 2, 1] == locos.weights.tolist()
    by_step = np.mean([s for steps in by_trial for s in steps], axis=0)
    of_trials = np.mean([np.mean(steps, axis=0) for steps in by_trial], axis=0)
    assert not np.allclose(by_step, of_trials, atol=1e-3)
    np.testing.assert_allclose(locos.mean(), by_step, atol=1e-4)
    assert locos.pooling == "step"
    again = ca.score("locos", trials, pooling="trial")
    np.testing.assert_allclose(again.mean(), of_trials, atol=1e-4)
    np.testing.assert_array_equal(again.values, locos.values)


def test_trials_stay_in_the_order_of_the_set(trials: mh.TrialSet, locos: mh.HeadScores) -> None:
    assert list(LENGTHS) != sorted(LENGTHS)  # they are run by length
    assert locos.trial_ids == tuple(t.id for t in trials)
    assert [r["answer"] for r in locos.records] == [t.answer for t in trials]


@pytest.mark.parametrize("run", [{"batch_size": 1}, {"batch_size": 4}, {"padding": "right"}])
def test_batches_and_padding_change_no_score(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, locos: mh.HeadScores, run: dict[str, Any]
) -> None:
    again = ca.score("locos", trials, **run)
    assert again.n_kept == 6
    np.testing.assert_allclose(again.values, locos.values, atol=1e-4 * np.abs(locos.values).max())


def test_minus_and_plus_make_the_score(locos: mh.HeadScores) -> None:
    np.testing.assert_allclose(locos.parts["plus"] - locos.parts["minus"], locos.values, atol=1e-5)


# -- interruption --------------------------------------------------------------------------------


def interrupting(on: str) -> Any:
    def stops(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        if trial.id == on:
            raise KeyboardInterrupt
        return acts.need("pattern").sum((1, 2))

    return stops


def test_ctrl_c_in_a_method_keeps_finished_trials(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, locos: mh.HeadScores
) -> None:
    by_length = sorted(trials, key=lambda t: len(t.tokens))
    mh.method("stops")(interrupting(by_length[3].id))
    with pytest.warns(UserWarning, match=r"interrupted: 3 of 6 trials are done and kept.*meta\['complete'\]"):
        both = ca.score(["locos", "stops"], trials, batch_size=2)
    finished = {t.id for t in by_length[:3]}
    for scores in both.values():
        assert scores.trial_ids == tuple(t.id for t in trials if t.id in finished)
        assert scores.meta["complete"] is False and scores.meta["n_trials_asked"] == 6
    rows = [locos.trial_ids.index(i) for i in both["locos"].trial_ids]
    np.testing.assert_allclose(both["locos"].values, locos.values[rows], atol=1e-4 * np.abs(locos.values).max())
    low, high = both["locos"].ci(n_boot=50)
    assert np.isfinite(low).all() and (low <= high).all()


def test_ctrl_c_in_a_forward_pass_keeps_finished_trials(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def second_stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return capture(*args, **kwargs)

    monkeypatch.setattr(runner, "capture", second_stops)
    with pytest.warns(UserWarning, match="interrupted: 4 of 6"):
        scores = ca.score("locos", trials, batch_size=4)
    assert len(calls) == 2 and len(scores.trial_ids) == 4 and scores.kept.all()


def test_ctrl_c_before_anything_is_done_is_a_keyboard_interrupt(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    mh.method("stops")(interrupting(min(trials, key=lambda t: len(t.tokens)).id))
    with pytest.raises(KeyboardInterrupt):
        ca.score("stops", trials)


def test_interrupted_results_are_not_stored(
    llama: mh.Model, trials: mh.TrialSet, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = mh.CircuitAnalysis(llama, store=tmp_path)
    calls = []

    def second_stops(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) == 2:
            raise KeyboardInterrupt
        return capture(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(runner, "capture", second_stops)
        with pytest.warns(UserWarning, match="interrupted: 4 of 6"):
            assert len(ca.score("locos", trials, batch_size=4).trial_ids) == 4
    assert not list(tmp_path.iterdir())
    whole = ca.score("locos", trials)
    assert len(whole.trial_ids) == 6 and whole.meta["complete"] is True
    assert list(tmp_path.glob("locos-*.parquet"))


# -- progress ------------------------------------------------------------------------------------


def test_progress_is_quiet_when_nobody_watches(
    llama: mh.Model, trials: mh.TrialSet, capfd: pytest.CaptureFixture[str]
) -> None:
    mh.CircuitAnalysis(llama).score("locos", trials)
    mh.CircuitAnalysis(llama, progress=False).score("locos", trials)
    assert capfd.readouterr() == ("", "")


def test_progress_shows_when_asked(llama: mh.Model, trials: mh.TrialSet, capfd: pytest.CaptureFixture[str]) -> None:
    mh.CircuitAnalysis(llama, progress=True).score("locos", trials, batch_size=2)
    out, err = capfd.readouterr()
    assert out == "" and "scoring trials" in err and "6/6" in err


# -- provenance ----------------------------------------------------------------------------------


def test_provenance_is_complete(llama: mh.Model, trials: mh.TrialSet, locos: mh.HeadScores) -> None:
    meta = locos.meta
    assert meta["model"] == llama.describe()
    assert meta["model"].items() >= {**dataclasses.asdict(llama.spec), "weight_hash": llama.weight_hash()}.items()
    assert meta["model"]["settings_hash"] and meta["model"]["tokenizer_hash"] and meta["interventions"] == []
    assert meta["model"]["weights"] == "raw" and meta["model"]["dtype"] == "float32"
    assert meta["model"]["name"] and meta["model"]["backend"] == "TransformerBridge"
    assert "revision" in meta["model"]
    assert meta["method"] == "locos"
    assert meta["options"] == {
        "unembed": "raw", "lens": None, "rouge_threshold": 0.5, "reject_denials": True, "max_new_tokens": 50,
        "stop_at_newline": True,
    }  # fmt: skip
    assert meta["trials"] == {"name": "tiny", "hash": trials.hash, "options": {"seed": 1}}
    assert meta["seed"] == 1 and meta["complete"] is True and meta["n_trials_asked"] == 6
    assert {"python", "torch", "transformers", "transformer_lens", "mechheads"} <= set(meta["versions"])
    assert meta["prefill"] == "twin" and meta["ablated"] is False


def test_scores_under_an_intervention_say_so(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    @mh.method("written", needs=("z",))
    def written(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        return acts.need("z").abs().sum((1, 2))

    with ca.intervene(mh.zero_ablation().on("L1H2")):
        scores = ca.score("written", altered(trials[0], answer=None))
    assert scores.meta["ablated"] is True and scores.meta["prefill"] == "hooked model"
    assert scores.meta["interventions"] == [{"kind": "zero", "site": "z", "heads": ["L1H2"]}]
    zero = np.argwhere(scores.values[0] == 0)
    assert zero.tolist() == [[1, 2]]


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pooling": "steps"}, "pooling is 'steps'; it must be one of step, trial"),
        ({"rouge_threshold": 1.5}, "rouge_threshold is 1.5"),
        ({"rouge_threshold": -0.1}, "rouge_threshold is -0.1"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"max_new_tokens": 0}, "max_new_tokens is 0; it must be a whole number >= 1"),
        ({"padding": "rigt"}, "unknown padding side 'rigt'.*'right'"),
    ],
)
def test_run_options_are_checked_before_any_pass(
    llama: mh.Model, trials: mh.TrialSet, options: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(llama, monkeypatch) as calls, pytest.raises(mh.InvalidInput, match=told):
        mh.CircuitAnalysis(llama).score("locos", trials, **options)
    assert calls == {"run": 0, "prefill": 0}


@pytest.mark.parametrize(
    ("tokens", "told"),
    [
        ([5] * 129, r"trial 'bad' has 129 tokens, but .* takes at most 128; make the context shorter"),
        ([5, 97, 5, 5, 5, 5], r"trial 'bad' holds token ids outside 0 to 96.*another model's tokenizer"),
        ([5, -1, 5, 5, 5, 5], r"trial 'bad' holds token ids outside 0 to 96"),
    ],
)
def test_unfit_trials_are_refused_before_any_pass(
    llama: mh.Model, trials: mh.TrialSet, tokens: Sequence[int], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = mh.Trial(id="bad", tokens=tokens, spans={"needle": (2, 5)}, answer="w5")
    with counted(llama, monkeypatch) as calls, pytest.raises(mh.InvalidInput, match=told):
        mh.CircuitAnalysis(llama).score("locos", [*trials, bad])
    assert calls == {"run": 0, "prefill": 0}


def test_no_trials(ca: mh.CircuitAnalysis) -> None:
    with pytest.raises(mh.InvalidInput, match="there are no trials to score"):
        ca.score("locos", [])


def test_options_that_change_numbers_are_recorded() -> None:
    changed = RunOptions(rouge_threshold=0.7, max_new_tokens=9, stop_at_newline=False, batch_size=3, pooling="trial")
    assert changed.record() == {
        "rouge_threshold": 0.7, "reject_denials": True, "max_new_tokens": 9, "stop_at_newline": False
    }  # fmt: skip


def test_heads_ablated_at_z_are_undefined_where_z_is_not_read(llama: Any) -> None:
    ca = mh.CircuitAnalysis(llama, progress=False)
    trial = mh.Trial(id="a", tokens=prompts()[0], spans={"needle": (2, 4)})
    with ca.intervene(mh.zero_ablation().on("L0H0, L2H3")):
        dla = ca.score("dla", trial, max_new_tokens=2)
    assert np.argwhere(np.isnan(dla.values[0])).tolist() == [[0, 0], [2, 3]]
    assert llama.ablations == []
    with ca.intervene(mh.zero_ablation(site="q").on("L0H0")):
        assert np.isfinite(ca.score("dla", trial, max_new_tokens=2).values).all()


def test_own_errors_in_the_middle_keep_what_was_done(llama: Any) -> None:
    @mh.method("second_needs_it", needs=("pattern",))
    def second_needs_it(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        return acts.need("pattern")[..., acts.mask("needle")].sum((-1, -2))

    trials = [
        mh.Trial(id="first", tokens=prompts()[0][:6], spans={"needle": (2, 4)}),
        mh.Trial(id="no needle", tokens=prompts()[0][:9]),
    ]
    ca = mh.CircuitAnalysis(llama, progress=False)
    with pytest.raises(mh.UnknownName, match="no needle") as caught:
        ca.score("second_needs_it", trials, max_new_tokens=2, batch_size=1)
    assert caught.value.partial["second_needs_it"].trial_ids == ("first",)


def test_a_missing_span_is_refused_before_the_first_pass(llama: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    bare = mh.Trial(id="bare", tokens=prompts()[0])
    with counted(llama, monkeypatch) as calls, pytest.raises(mh.UnknownName, match="'locos' reads it"):
        mh.CircuitAnalysis(llama, progress=False).score("locos", bare)
    assert calls == {"run": 0, "prefill": 0}


def test_the_gate_can_be_left_out(llama: Any, trials: mh.TrialSet) -> None:
    ca = mh.CircuitAnalysis(llama, progress=False)
    strict = ca.score("dla", trials, rouge_threshold=1.0)
    assert strict.n_kept == 0
    assert ca.score("dla", trials, rouge_threshold=None).n_kept > 0


def test_infinite_scores_are_refused_where_they_arise(llama: Any) -> None:
    @mh.method("endless", needs=("pattern",))
    def endless(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        return acts.need("pattern").sum((-1, -2)) / 0

    trial = mh.Trial(id="a", tokens=prompts()[0], spans={"needle": (2, 4)})
    with pytest.raises(mh.InvalidInput, match="infinite 'score' on trial 'a'"):
        mh.CircuitAnalysis(llama, progress=False).score("endless", trial, max_new_tokens=2)
