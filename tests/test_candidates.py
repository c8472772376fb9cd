"""Candidate answers: QK-scores against Hugging Face's own projections, and one shared prefix against separate runs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import qk_reference
import tiny
import torch
from helpers import counted

import mechheads as mh
from mechheads.candidates import candidate_tokens, capture_candidates, read_question
from mechheads.errors import InvalidInput, UnknownName
from mechheads.kernels import candidate_qk

CANDIDATES = ((5,), (9,), (7, 31), (44, 8, 20))


def question(i: int, length: int, *, statement: int, n: int = 2, **fields: Any) -> mh.Trial:
    """A random prompt whose statement ends at a position, with candidates of one token and of several."""
    chosen = CANDIDATES[:n]
    texts = tuple(" " + " ".join(f"w{t}" for t in c) for c in chosen)
    return mh.Trial(
        id=f"q{i}", tokens=tiny.prompt(length, seed=50 + i), spans={"statement": (statement - 2, statement + 1)},
        candidates=texts, label=i % n, **fields,
    )  # fmt: skip


QUESTIONS = (
    question(0, 17, statement=16),
    question(1, 23, statement=19, n=4),
    question(2, 9, statement=5, n=3),
    question(3, 12, statement=11),
)


def reference(name: str, trial: mh.Trial, ref: tiny.Reference, *, rotary: bool = True) -> tuple[np.ndarray, np.ndarray]:
    statement = trial.positions("statement")[-1]
    return qk_reference.loop_qk(name, ref, trial.tokens, CANDIDATES[: len(trial.candidates)], statement, rotary=rotary)


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
def test_qk_agrees_with_hugging_faces_projections(name: str, rotary: bool) -> None:
    """Each candidate run alone, no cache, projections read by module name, rotation by loops."""
    ref = tiny.Reference(name)
    scores = mh.CircuitAnalysis(tiny.shared(name)).score("qk", QUESTIONS, rotary=rotary, batch_size=4)
    for i, trial in enumerate(QUESTIONS):
        values, logprobs = reference(name, trial, ref, rotary=rotary)
        n = len(trial.candidates)
        assert tiny.relative(scores.values[i, :n], values) < 1e-5
        assert np.abs(scores.baseline[i, :n] - logprobs).max() < 1e-4
        assert np.isnan(scores.values[i, n:]).all()


def test_rotation_matters_where_there_is_one() -> None:
    ca = mh.CircuitAnalysis(tiny.shared("llama"))
    turned, plain = (ca.score("qk", QUESTIONS, rotary=r).values for r in (True, False))
    assert np.nanmax(np.abs(turned - plain)) > 0.1
    ca = mh.CircuitAnalysis(tiny.shared("gpt2"))
    same = (ca.score("qk", QUESTIONS, rotary=r).values for r in (True, False))
    np.testing.assert_allclose(*same, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "gptoss"])
def test_scaled_scores_are_the_attention_scores_of_the_candidate(name: str) -> None:
    """With the scale, q.k is what TransformerLens hooks as attention score."""
    model = tiny.fresh(name)  # a run with TransformerLens' own cache leaves its hooks behind
    trial = QUESTIONS[0]
    bridge: Any = getattr(model.backend, "bridge")  # noqa: B009
    scores = mh.CircuitAnalysis(model).score("qk", [trial], scaled=True)
    assert scores.unit == "attention score"
    statement = trial.positions("statement")[-1]
    for c, extra in enumerate(CANDIDATES[:2]):
        _, cache = bridge.run_with_cache(torch.tensor([[*trial.tokens, *extra]]))
        for layer in range(tiny.LAYERS):
            raw = cache[f"blocks.{layer}.attn.hook_attn_scores"][0, :, -1, statement].numpy()
            assert np.abs(scores.values[0, c, layer] - raw).max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen3", "gemma3", "olmo3"])
@pytest.mark.parametrize("padding", ["left", "right"])
def test_batching_and_padding_change_nothing(name: str, padding: str) -> None:
    ca = mh.CircuitAnalysis(tiny.shared(name))
    alone = ca.score("qk", QUESTIONS, batch_size=1)
    if padding == "right" and tiny.windows(name) != (None,) * 3:
        with pytest.raises(InvalidInput, match="sliding windows, which count padding"):
            ca.score("qk", QUESTIONS, batch_size=4, padding=padding)
        return
    together = ca.score("qk", QUESTIONS, batch_size=4, padding=padding)
    assert np.nanmax(np.abs(alone.values - together.values)) < 1e-4
    assert np.nanmax(np.abs(alone.baseline - together.baseline)) < 1e-5


def in_prompt(i: int, length: int, *, statement: int, spans: list[tuple[int, int]], texts: tuple[str, ...]) -> mh.Trial:
    return mh.Trial(
        id=f"p{i}", tokens=tiny.prompt(length, seed=80 + i), label=0, candidates=texts,
        spans={"statement": (statement - 1, statement + 1), "candidates": spans},
    )  # fmt: skip


@pytest.mark.parametrize("rotary", [True, False])
@pytest.mark.parametrize("name", ["gpt2", "neox", "llama", "qwen3", "gemma2", "olmo2", "phi3", "gptoss"])
def test_candidates_in_the_prompt_are_read_where_they_stand(name: str, rotary: bool) -> None:
    ref = tiny.Reference(name)
    trials = [
        in_prompt(0, 24, statement=9, spans=[(11, 13), (15, 16), (17, 20)], texts=(" w5", " w9", " w11")),
        in_prompt(1, 19, statement=4, spans=[(6, 7), (12, 14)], texts=(" w7 w31", " w9")),
    ]
    tokens = [[[5], [9], [11]], [[7, 31], [9]]]
    scores = mh.CircuitAnalysis(tiny.shared(name)).score("qk", trials, rotary=rotary)
    for i, trial in enumerate(trials):
        layers = qk_reference.queries_and_keys(name, ref, trial.tokens, rotary=rotary)
        statement = trial.positions("statement")[-1]
        for c, span in enumerate(trial.spans["candidates"]):
            for layer, (q, k) in enumerate(layers):
                group = tiny.HEADS // k.shape[1]
                want = [q[span.stop - 1, h] @ k[statement, h // group] for h in range(tiny.HEADS)]
                assert tiny.relative(scores.values[i, c, layer], np.array(want)) < 1e-5
        _, logprobs = qk_reference.loop_qk(name, ref, trial.tokens, tokens[i], statement)
        assert np.abs(scores.baseline[i, : len(tokens[i])] - logprobs).max() < 1e-4


def test_prompts_shorter_than_the_tail_of_another_run_whole() -> None:
    """A batch in which one statement begins before another prompt's length cannot share one split."""
    ca = mh.CircuitAnalysis(tiny.shared("llama"))
    trials = [question(7, 30, statement=4), question(8, 6, statement=5)]
    together = ca.score("qk", trials, rotary=False, batch_size=2)
    alone = ca.score("qk", trials, rotary=False, batch_size=1)
    assert np.nanmax(np.abs(together.values - alone.values)) < 1e-4


def test_one_prefill_and_one_step_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.fresh("llama")
    trials = [question(i, 15 + i, statement=14 + i) for i in range(4)]
    ca = mh.CircuitAnalysis(model)
    ca.score("qk", trials, batch_size=4)
    with counted(model, monkeypatch) as calls:
        ca.score("qk", trials, batch_size=4)
    assert calls == {"run": 1, "prefill": 1}


def test_hooks_in_force_are_seen() -> None:
    """An intervention reaches both the scores of later layers and the model's own verdict."""
    ca = mh.CircuitAnalysis(tiny.fresh("llama"))
    plain = ca.score("qk", QUESTIONS[:1])
    with ca.intervene(mh.zero_ablation().on("L0H1")):
        ablated = ca.score("qk", QUESTIONS[:1])
    assert np.abs(plain.values[:, :, 0] - ablated.values[:, :, 0]).max() < 1e-4
    assert np.abs(plain.values[:, :, 1:] - ablated.values[:, :, 1:]).max() > 1e-3
    assert np.abs(plain.baseline - ablated.baseline).max() > 1e-4
    assert ablated.meta["interventions"][0]["heads"] == ["L0H1"] and not plain.meta["ablated"]


def test_the_store_remembers_candidate_scores(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.fresh("llama")
    first = mh.CircuitAnalysis(model, store=tmp_path).score("qk", QUESTIONS)
    with counted(model, monkeypatch) as calls:
        again = mh.CircuitAnalysis(model, store=tmp_path).score("qk", QUESTIONS)
    assert calls == {"run": 0, "prefill": 0}
    np.testing.assert_array_equal(first.values, again.values)
    with counted(model, monkeypatch) as calls:
        mh.CircuitAnalysis(model, store=tmp_path).score("qk", QUESTIONS, scaled=True)
    assert calls["run"] > 0


def test_several_kinds_of_method_in_one_call() -> None:
    trial = mh.Trial(
        id="both", tokens=tiny.prompt(20, seed=3), spans={"statement": (15, 19), "needle": (2, 5)},
        candidates=(" w5", " w9"), label=1,
    )  # fmt: skip
    found = mh.CircuitAnalysis(tiny.shared("llama")).score(["qk", "locos"], [trial], max_new_tokens=3)
    assert isinstance(found["qk"], mh.CandidateScores) and isinstance(found["locos"], mh.HeadScores)


def test_a_method_of_the_users_own(own_registry: Any) -> None:
    @mh.method("twice_qk", kind="candidates")
    def twice(acts: Any, trial: mh.Trial, *, factor: float = 2.0) -> torch.Tensor:
        return factor * candidate_qk(acts.q, acts.k)

    ca = mh.CircuitAnalysis(tiny.shared("llama"))
    own, plain = ca.score("twice_qk", QUESTIONS, factor=3.0), ca.score("qk", QUESTIONS)
    np.testing.assert_allclose(own.values, 3 * plain.values, rtol=1e-6)
    assert own.meta["options"] == {"factor": 3.0}


def test_a_method_that_fails_names_trial_and_layer(own_registry: Any) -> None:
    @mh.method("broken", kind="candidates")
    def broken(acts: Any, trial: mh.Trial) -> torch.Tensor:
        raise ValueError("no")

    @mh.method("flat", kind="candidates")
    def flat(acts: Any, trial: mh.Trial) -> torch.Tensor:
        return acts.k.sum()

    ca = mh.CircuitAnalysis(tiny.shared("llama"))
    with pytest.raises(mh.MechheadsError, match=r"method 'broken' failed on trial 'q.', layer 0: no"):
        ca.score("broken", QUESTIONS)
    with pytest.raises(InvalidInput, match=r"method 'flat' returned \(\); expected a tensor of shape \(., 4\)"):
        ca.score("flat", QUESTIONS)


def test_interrupted_runs_keep_what_is_done(own_registry: Any) -> None:
    seen: list[str] = []

    @mh.method("tired", kind="candidates")
    def tired(acts: Any, trial: mh.Trial) -> torch.Tensor:
        if acts.layer == 0:
            seen.append(trial.id)
        if len(seen) == 3:
            raise KeyboardInterrupt
        return candidate_qk(acts.q, acts.k)

    ca = mh.CircuitAnalysis(tiny.shared("llama"))
    with pytest.warns(UserWarning, match="interrupted: 2 of 4 questions are done and kept"):
        scores: Any = ca.score("tired", QUESTIONS, batch_size=1)
    assert len(scores) == 2 and scores.meta["complete"] is False


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no statement": ({"spans": {"needle": (1, 2)}}, UnknownName, "statement"),
    "one candidate": ({"candidates": (" w5",), "label": 0}, InvalidInput, "has 1 candidates and the label 0"),
    "no label": ({"label": None}, InvalidInput, "the label None"),
    "same tokens": ({"candidates": (" w5", "w5")}, InvalidInput, "are the same tokens"),
    "an unknown word": (
        {"candidates": (" w5", " perhaps")}, InvalidInput,
        r"^trial 'bad': the candidate ' perhaps' holds what the tokenizer of '.*' does not know \(its tokens \[\d+\] "
        r"hold '<unk>'\); give candidates in its vocabulary, or ids in meta\['candidate_tokens'\]\.$",
    ),
    "unknown in part": ({"candidates": (" w5 maybe", " w9")}, InvalidInput, "the candidate ' w5 maybe' holds what"),
    "no tokens": ({"candidates": (" w5", " ")}, InvalidInput, "the candidate ' ' has no tokens"),
    "before the statement": (
        {"spans": {"statement": (8, 10), "candidates": [(3, 4), (12, 13)]}}, InvalidInput, "position 3 stands before",
    ),
    "spans too few": (
        {"spans": {"statement": (1, 3), "candidates": [(5, 6)]}}, InvalidInput, "1 spans named 'candidates'",
    ),
    "ids too few": ({"meta": {"candidate_tokens": [[5]]}}, InvalidInput, "has 1 entries for 2 candidates"),
    "ids of another model": (
        {"meta": {"candidate_tokens": [[5], [4000]]}}, InvalidInput, "the candidate ' w9' of trial",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_questions_are_refused_by_name(case: str) -> None:
    change, error, message = BAD[case]
    fields: dict[str, Any] = {
        "id": "bad", "tokens": tiny.prompt(20, seed=1), "spans": {"statement": (8, 10)}, "candidates": (" w5", " w9"),
        "label": 0, **change,
    }  # fmt: skip
    with pytest.raises(error, match=message):
        read_question(tiny.shared("llama"), mh.Trial(**fields))


def test_no_room_for_the_candidate() -> None:
    trial = question(0, tiny.N_CTX, statement=20)
    with pytest.raises(InvalidInput, match=r"has 129 tokens with its longest candidate, but .* takes at most 128"):
        mh.CircuitAnalysis(tiny.shared("llama")).score("qk", [trial])


def test_given_token_ids_serve_without_text() -> None:
    trial = mh.Trial(
        id="raw", tokens=tiny.prompt(20, seed=1), spans={"statement": (8, 10)}, candidates=("yes", "no"), label=0,
        meta={"candidate_tokens": [[5], [7, 31]]},
    )  # fmt: skip
    one = capture_candidates(tiny.shared("llama"), [trial])[0]
    assert one.tokens == ((5,), (7, 31))


def test_the_unknown_token_may_be_named() -> None:
    """By its own text, or by its id: then it is meant."""
    model = tiny.shared("llama")
    unknown = model.tokenizer.unk_token_id
    fields: dict[str, Any] = {"id": "u", "tokens": tiny.prompt(20, seed=1), "spans": {"statement": (8, 10)}, "label": 0}
    written = mh.Trial(**fields, candidates=(" w5", " <unk>"))
    given = mh.Trial(**fields, candidates=(" w5", " perhaps"), meta={"candidate_tokens": [[5], [unknown]]})
    for trial in (written, given):
        assert read_question(model, trial).tokens == ((5,), (unknown,))


@pytest.mark.parametrize("value", ["no", "false", 1, 0, None])
def test_switches_are_true_or_false(value: Any, as_users_run: None) -> None:
    ca = mh.CircuitAnalysis(tiny.shared("llama"))
    for name in ("rotary", "scaled"):
        for given in ({name: value}, {"qk": {name: value}}):
            with pytest.raises(InvalidInput, match=rf"^{name} is {value!r}; give True or False\.$"):
                ca.score("qk", QUESTIONS[:1], **given)
    with pytest.raises(
        InvalidInput, match=rf"^rotary is {value!r}; give True \(as the model multiplies them\) or False\.$"
    ):
        capture_candidates(ca.model, QUESTIONS[:1], rotary=value)


def test_unknown_padding_is_refused() -> None:
    with pytest.raises(UnknownName, match="padding side"):
        capture_candidates(tiny.shared("llama"), QUESTIONS, padding="centre")


def test_candidate_tokens_of_a_real_tokenizer(smollm2_model: mh.Model) -> None:
    assert smollm2_model.pieces(candidate_tokens(smollm2_model, " true")) == [" true"]
    assert smollm2_model.pieces(candidate_tokens(smollm2_model, "true")) == ["true"]


def test_a_later_failure_keeps_what_another_method_has_done(own_registry: Any) -> None:
    """Unrotated captures come after rotated ones; a method that reads no candidates comes after both."""

    @mh.method("late", kind="candidates")
    def late(acts: Any, trial: mh.Trial, *, rotary: bool = False) -> torch.Tensor:
        raise ValueError("no")

    @mh.method("later", needs=("z",))
    def later(acts: mh.LayerActs, trial: mh.Trial) -> torch.Tensor:
        raise ValueError("no")

    ca = mh.CircuitAnalysis(tiny.shared("llama"))
    for name in ("late", "later"):
        with pytest.raises(mh.MechheadsError, match=f"method '{name}' failed") as caught:
            ca.score(["qk", name], QUESTIONS[:2], max_new_tokens=2, rouge_threshold=None)
        assert len(caught.value.partial["qk"]) == 2
