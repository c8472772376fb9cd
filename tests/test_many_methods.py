"""Several kinds of methods in one call: trials of each, options of one alone, the store, projections, errors."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers import answered, counted

import mechheads as mh
from mechheads import runner
from mechheads.lens import TunedLens
from mechheads.methods import get_method
from mechheads.runner import MethodFailed

KINDS = ["locos", "wu", "headkv", "induction", "previous_token", "ov_norm"]
FEW = {"n_sequences": 2, "seq_len": 6, "max_new_tokens": 6}


pytestmark = pytest.mark.usefixtures("own_registry")


@pytest.fixture(scope="module")
def trials(llama: mh.Model) -> mh.TrialSet:
    return answered(llama, (20, 13, 17, 29))


@pytest.fixture
def ca(llama: mh.Model) -> mh.CircuitAnalysis:
    return mh.CircuitAnalysis(llama, progress=False)


def test_each_kind_has_its_own_trials(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    found = ca.score(KINDS, trials, **FEW)
    assert list(found) == KINDS
    ids = tuple(t.id for t in trials)
    assert all(found[name].trial_ids == ids for name in ("locos", "wu", "headkv"))
    assert found["induction"].trial_ids == found["previous_token"].trial_ids != ids
    assert len(found["induction"].trial_ids) == 2
    assert found["ov_norm"].trial_ids == ("weights",) and found["ov_norm"].kept.all()
    for one in found.values():
        assert one.meta["method"] == one.method and one.meta["paper"] == get_method(one.method).paper
        assert np.isfinite(one.values).all()


def test_together_and_alone_are_the_same(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    together = ca.score(KINDS, trials, **FEW)
    for name in KINDS:
        options = {k: v for k, v in FEW.items() if k == "max_new_tokens" or k in get_method(name).options}
        alone = ca.score(name, trials, **options)
        np.testing.assert_allclose(alone.values, together[name].values, rtol=1e-5, atol=1e-6)
        assert alone.meta["options"] == together[name].meta["options"]


def test_methods_of_the_prompt_alone_generate_nothing(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    with counted(ca.model, monkeypatch) as calls:
        found = ca.score("headkv", trials, batch_size=len(trials))
    assert calls == {"run": 1, "prefill": 1}
    assert found.kept.all() and (found.weights == 1).all() and "generated" not in found.records[0]
    assert "rouge_threshold" not in found.meta["options"]


def test_wrong_answers_are_dropped_by_gated_methods_alone(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    wrong = mh.TrialSet([mh.Trial(id=t.id, tokens=t.tokens, spans=t.spans, answer="w2 w2") for t in trials])
    found = ca.score(["locos", "wu", "headkv", "ov_norm"], wrong, max_new_tokens=6)
    assert [found[m].n_kept for m in ("locos", "wu")] == [0, 0]
    assert found["headkv"].n_kept == len(trials) and found["ov_norm"].n_kept == 1
    with pytest.raises(mh.InvalidInput, match="none of the 4 trials of 'wu' is kept"):
        found["wu"].mean()


def test_options_of_one_method_alone(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    found = ca.score(["wu", "locos", "dla"], trials, max_new_tokens=6, unembed="centered", dla={"unembed": "raw"})
    assert found["locos"].meta["options"]["unembed"] == "centered"
    assert found["dla"].meta["options"]["unembed"] == "raw"
    with pytest.raises(mh.InvalidInput, match=r"no option 'counted' for wu\. It has: counting, span"):
        ca.score(["wu"], trials, wu={"counted": "step"})
    with pytest.raises(mh.InvalidInput, match="no option 'dla' for wu"):
        ca.score(["wu"], trials, dla={"unembed": "raw"})


def test_the_store_knows_what_depends_on_trials(
    llama: mh.Model, trials: mh.TrialSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = mh.CircuitAnalysis(llama, store=tmp_path, progress=False)
    first = ca.score(KINDS, trials, **FEW)
    names = {p.name.split("-")[0] for p in tmp_path.iterdir()}
    assert names >= set(KINDS)
    monkeypatch.setattr(runner, "capture", lambda *a, **k: pytest.fail("captured again"))
    again = ca.score(KINDS, trials, **FEW)
    for name in KINDS:
        np.testing.assert_array_equal(again[name].values, first[name].values)
    other = ca.score(["induction", "ov_norm"], trials[:1], n_sequences=2, seq_len=6)  # not of these trials at all
    np.testing.assert_array_equal(other["induction"].values, first["induction"].values)


def test_options_of_the_run_reach_methods_that_know_them(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    seen: list[int] = []

    @mh.method("watched", kind="causal")
    def watched(model: mh.Model, trial: mh.Trial, *, max_new_tokens: int = 50) -> torch.Tensor:
        seen.append(max_new_tokens)
        return torch.zeros(model.spec.n_layers, model.spec.n_heads)

    found = ca.score("watched", trials, max_new_tokens=6)
    assert seen == [6] * len(trials) and found.meta["options"]["max_new_tokens"] == 6


def test_log_probabilities_are_in_nats(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    for metric, unit in (("logit_diff", "logits"), ("logprob", "nats")):
        for method in ("cri", "attribution_patching"):
            assert ca.score(method, trials[:1], metric=metric, filler=7, max_new_tokens=6).unit == unit


def test_a_failure_keeps_what_was_done(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    @mh.method("falls", kind="causal")
    def falls(model: mh.Model, trial: mh.Trial) -> torch.Tensor:
        if trial.id == trials[3].id:  # the longest, so the last
            raise RuntimeError("no luck")
        return torch.ones(model.spec.n_layers, model.spec.n_heads)

    with pytest.raises(MethodFailed, match="method 'falls' failed on trial 't3': no luck") as caught:
        ca.score(["ov_norm", "locos", "falls"], trials, max_new_tokens=6, batch_size=2)
    partial = caught.value.partial
    assert set(partial) == {"ov_norm", "locos", "falls"}
    assert partial["locos"].trial_ids == partial["falls"].trial_ids == ("t0", "t1", "t2")
    assert not partial["locos"].meta["complete"]


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        (torch.zeros(2), r"returned \(2,\) for 'score'; expected a tensor of shape \(3, 4\)"),
        (torch.full((3, 4), torch.inf), "infinite 'score' on trial 't0'"),
        ({"other": torch.zeros(3, 4)}, "must have the key 'score'"),
    ],
)
def test_what_causal_methods_return_is_checked(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, returned: Any, message: str
) -> None:
    @mh.method("odd", kind="causal")
    def odd(model: mh.Model, trial: mh.Trial) -> Any:
        return returned

    with pytest.raises(mh.InvalidInput, match=message):
        ca.score("odd", trials[:1], max_new_tokens=6)


def test_prompt_rows_out_of_range_are_refused(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    @mh.method("beyond", rows=lambda trial, options: [len(trial.tokens)])
    def beyond(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        return acts.need("pattern").sum((1, 2))

    with pytest.raises(mh.InvalidInput, match="reads the prompt rows"):
        ca.score("beyond", trials)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"kind": "magic"}, "unknown kind of method 'magic'"),
        ({"rows": "some"}, "unknown rows 'some'"),
        ({"prompts": lambda model, options: None}, "rows must be a function"),
    ],
)
def test_registration_is_checked(given: Mapping[str, Any], message: str) -> None:
    with pytest.raises(mh.InvalidInput, match=message):
        mh.method("mine", **given)(lambda acts, trial: None)


# -- projections ---------------------------------------------------------------------------------


def lens_for(model: mh.Model, *, seed: int = 0, size: float = 0.2) -> TunedLens:
    spec, generator = model.spec, torch.Generator().manual_seed(seed)
    weights = size * torch.randn(spec.n_layers, spec.d_model, spec.d_model, generator=generator) / spec.d_model**0.5
    biases = torch.zeros(spec.n_layers, spec.d_model)
    return TunedLens(weights, biases, spec.n_layers, name="random")


def test_projections_are_one_capture_and_equal_single_calls(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    lens = lens_for(ca.model)
    with counted(ca.model, monkeypatch) as calls:
        found = ca.projections(trials, lens=lens, max_new_tokens=6)
    assert calls["prefill"] == 1 and list(found) == ["raw", "centered", "normed", "tuned_lens"]
    for name, one in found.items():
        options: dict[str, Any] = {"lens": lens} if name == "tuned_lens" else {}
        alone = ca.score("locos", trials, unembed=name, max_new_tokens=6, **options)
        np.testing.assert_allclose(one.values, alone.values, rtol=1e-5, atol=1e-6)
    assert found["tuned_lens"].meta["options"]["lens"]["hash"] == lens.hash
    assert not np.allclose(found["tuned_lens"].values, found["normed"].values)


def test_the_identity_lens_changes_nothing(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    identity = TunedLens.identity(ca.model.spec.n_layers, ca.model.spec.d_model)
    for method in ("locos", "dla"):
        found = ca.projections(trials, method=method, lens=identity, max_new_tokens=6)
        np.testing.assert_allclose(found["tuned_lens"].values, found["normed"].values, rtol=1e-5, atol=1e-6)


def test_a_lens_is_read_from_its_path(ca: mh.CircuitAnalysis, trials: mh.TrialSet, tmp_path: Path) -> None:
    lens = lens_for(ca.model)
    path = lens.save(tmp_path / "lens.safetensors")
    a = ca.score("dla", trials, unembed="tuned_lens", lens=str(path), max_new_tokens=6)
    b = ca.score("dla", trials, unembed="tuned_lens", lens=lens, max_new_tokens=6)
    np.testing.assert_array_equal(a.values, b.values)


def test_agreement_of_projections_in_one_call(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    found = ca.projection_agreement(trials, lens=lens_for(ca.model), k=3, max_new_tokens=6)
    matrix = found.matrix("spearman")
    assert list(matrix.columns) == ["raw", "centered", "normed", "tuned_lens"]
    maps = ca.projections(trials, lens=lens_for(ca.model), max_new_tokens=6)
    expected = mh.stats.rank_agreement(maps["raw"].mean(), maps["normed"].mean()).spearman
    assert matrix.loc["raw", "normed"] == pytest.approx(expected)


def test_lens_and_unembed_go_together(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    lens = lens_for(ca.model)
    for options in ({"unembed": "tuned_lens"}, {"lens": lens}):
        with pytest.raises(mh.InvalidInput, match="go together"):
            ca.score("locos", trials, max_new_tokens=6, **options)
    with pytest.raises(mh.InvalidInput, match="lens is a int"):
        ca.score("locos", trials, unembed="tuned_lens", lens=3)
    with pytest.raises(mh.InvalidInput):
        ca.score("locos", trials, unembed="tuned_lens", lens=TunedLens.identity(2, 8))
    with pytest.raises(mh.InvalidInput, match="does not project"):
        ca.projections(trials, method="wu")


# -- faults that review found ---------------------------------------------------------------------


def test_options_of_the_run_are_not_of_one_method(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    with pytest.raises(mh.InvalidInput, match="'max_new_tokens' is an option of the whole run"):
        ca.score("cri", trials, filler=7, cri={"max_new_tokens": 2})


def test_a_method_named_twice_is_refused(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    with pytest.raises(mh.InvalidInput, match="'wu' is named twice"):
        ca.score(["wu", "locos", "wu"], trials)


def test_what_is_stored_does_not_hide_the_options_of_the_rest(
    llama: mh.Model, trials: mh.TrialSet, tmp_path: Path
) -> None:
    ca = mh.CircuitAnalysis(llama, store=tmp_path, progress=False)
    first = ca.score("contrastive", trials, form="topk", top=3, max_new_tokens=6)
    both = ca.score(["contrastive", "locos"], trials, form="topk", top=3, max_new_tokens=6)
    np.testing.assert_array_equal(both["contrastive"].values, first.values)
    counted_by_step = ca.score(["wu"], trials, wu={"counting": "step"}, max_new_tokens=6)["wu"]
    again = ca.score(["wu", "dla", "headkv"], trials, wu={"counting": "step"}, max_new_tokens=6, window=2)
    np.testing.assert_array_equal(again["wu"].values, counted_by_step.values)
    assert again["headkv"].meta["options"]["window"] == 2


def interrupting(monkeypatch: pytest.MonkeyPatch, *, after: int) -> None:
    """Ctrl-C instead of the capture after so many."""
    real, calls = runner.capture, []

    def capture(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > after:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(runner, "capture", capture)


def test_ctrl_c_between_groups_keeps_the_finished_one(
    llama: mh.Model, trials: mh.TrialSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca = mh.CircuitAnalysis(llama, store=tmp_path, progress=False)
    interrupting(monkeypatch, after=1)  # random tokens first, in one capture
    with pytest.warns(UserWarning, match=r"locos, headkv.* had not begun and are left out"):
        found = ca.score(["locos", "induction", "headkv", "ov_norm"], trials, **FEW)
    assert list(found) == ["induction", "ov_norm"] and found["induction"].meta["complete"]
    assert {p.name.split("-")[0] for p in tmp_path.iterdir()} == {"induction", "ov_norm"}


def test_ctrl_c_in_the_first_group_starts_no_other(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, after=1)
    with pytest.warns(UserWarning, match="interrupted") as warned:
        found = ca.score(["locos", "induction"], trials, n_sequences=4, seq_len=6, batch_size=2)
    assert list(found) == ["induction"] and not found["induction"].meta["complete"]
    assert any("locos had not begun" in str(w.message) for w in warned)


def test_ctrl_c_before_anything_is_one(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupting(monkeypatch, after=0)
    with pytest.raises(KeyboardInterrupt):
        ca.score(["locos", "induction"], trials, **FEW)


def test_trials_whose_score_is_undefined_are_dropped_with_a_reason(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    found = ca.score("wu", trials, span="answer", max_new_tokens=6)  # the needles do not hold the answers
    assert found.n_kept == 0 and {r["reason"] for r in found.records} == {"the score is undefined for every head"}


def test_contrastive_needs_an_answer(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    asked = [mh.Trial(id=t.id, tokens=t.tokens, spans=t.spans) for t in trials]
    found = ca.score(["contrastive", "locos"], asked, max_new_tokens=6)
    assert {r["reason"] for r in found["contrastive"].records} == {"the trial has no answer to contrast with"}
    assert found["locos"].kept.all()


def test_documents_after_the_question_are_refused(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    tokens = list(trials[3].tokens)
    spans = {"needle": (2, 6), "documents": [(2, 6), (24, 27)], "question": (18, 22)}
    with pytest.raises(mh.InvalidInput, match=r"the document at \[24, 27\) does not end before the question"):
        ca.score("qrhead", mh.Trial(id="d", tokens=tokens, spans=spans), null_query="w5")


def test_bad_prompts_are_refused_before_the_first_pass(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = [mh.Trial(id=t.id, tokens=t.tokens, spans={"needle": (2, 4), "question": (5, 7)}) for t in trials]
    bad = mh.Trial(id="bad", tokens=trials[3].tokens, spans={"needle": (9, 12), "question": (5, 7)})
    monkeypatch.setattr(runner, "capture", lambda *a, **k: pytest.fail("ran"))
    with pytest.raises(mh.InvalidInput, match="in trial 'bad' the question does not come after the needle"):
        ca.score("qrhead", [*good, bad], null_query="w5")


@pytest.mark.parametrize("query", [5, True, [1, "a"], None])
def test_null_queries_of_another_kind_are_refused(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, query: Any, as_users_run: None
) -> None:
    one = mh.Trial(id="q", tokens=trials[0].tokens, spans={"needle": (2, 4), "question": (5, 7)})
    with pytest.raises(mh.InvalidInput, match="null_query is"):
        ca.score("qrhead", one, null_query=query)


def test_null_queries_may_be_token_ids(ca: mh.CircuitAnalysis, trials: mh.TrialSet) -> None:
    one = mh.Trial(id="q", tokens=trials[0].tokens, spans={"needle": (2, 4), "question": (5, 7)})
    ids = ca.model.tokenizer("w5 w6", add_special_tokens=False)["input_ids"]
    a, b = (ca.score("qrhead", one, null_query=q) for q in ("w5 w6", ids))
    np.testing.assert_array_equal(a.values, b.values)


def test_a_model_without_a_tokenizer_scores_trials_of_tokens(
    llama: mh.Model, trials: mh.TrialSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = [mh.Trial(id=t.id, tokens=t.tokens, spans=t.spans) for t in trials]
    with_it = mh.CircuitAnalysis(llama, progress=False).score(["locos", "wu"], asked, max_new_tokens=6)
    monkeypatch.setattr(llama.backend, "tokenizer", None)
    without = mh.CircuitAnalysis(llama, progress=False).score(["locos", "wu"], asked, max_new_tokens=6)
    for name, one in without.items():
        np.testing.assert_array_equal(one.values, with_it[name].values)
        assert one.records[0]["generated"] == ""


@pytest.mark.parametrize("options", [{"batch_size": 2.5}, {"max_new_tokens": "6"}, {"batch_size": True}])
def test_sizes_of_the_run_are_whole_numbers(
    ca: mh.CircuitAnalysis, trials: mh.TrialSet, options: dict[str, Any], as_users_run: None
) -> None:
    with pytest.raises(mh.InvalidInput, match="must be a whole number"):
        ca.score("locos", trials, **options)
