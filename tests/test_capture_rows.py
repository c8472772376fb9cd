"""What capture hands to methods beyond the answer's steps: prompt rows, the stop token's step, null variants."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import counted

import mechheads as mh
from mechheads.acts import LayerActs
from mechheads.capture import capture
from mechheads.methods import get_method, method_names
from mechheads.model import Model

NAMES = ("gpt2", "llama", "llama_mqa", "gemma3", "mistral", "gptoss")
each_model = pytest.mark.parametrize("name", NAMES)
EVERYTHING = ("q", "k", "v", "z", "pattern")
PASS_BASED = ["locos", "attention_spatial", "dla", "wu", "contrastive", "headkv", "qrhead"]
NULL = {"null_query": "w7 w8"}  # as long as the questions below, so that all endings run together


def of(tokens: Sequence[int], name: str = "t", **spans: Any) -> mh.Trial:
    return mh.Trial(id=name, tokens=tokens, spans=spans or {"needle": (1, 3)})


def some(lengths: Sequence[int] = (22, 13, 17, 30)) -> list[mh.Trial]:
    return [of(tiny.prompt(n, seed=40 + n), f"t{n}") for n in lengths]


def asked(lengths: Sequence[int] = (22, 13, 17)) -> list[mh.Trial]:
    """Trials with a question of two tokens, three tokens before the end."""
    return [of(tiny.prompt(n, seed=40 + n), f"t{n}", needle=(2, 5), question=(n - 5, n - 3)) for n in lengths]


def check_rows(name: str, acts: LayerActs, run: tiny.Run, layer: int, first: int, *, bound: float = 1e-5) -> None:
    """All rows from a position on are those of one uncached forward of the plain model."""
    n_prompt = len(acts.trial.tokens)
    positions = [n_prompt - 1 + t for t in acts.steps.tolist()]
    assert positions == list(range(first, first + len(positions)))
    keys = len(acts.tokens)
    for row, query in enumerate(positions):
        want = np.zeros((tiny.HEADS, keys))
        want[:, : query + 1] = run.attention[layer][:, query, : query + 1]
        assert np.abs(tiny.array(acts.need("pattern")[:, row]) - want).max() < bound
        window = tiny.windows(name)[layer]
        seen = [key for key in range(query + 1) if window is None or key > query - window]
        assert [key for key, there in enumerate(acts.visible[row].tolist()) if there] == seen
    if acts.v is not None:
        ran = positions[-1] + 1  # the last token generated was never run
        assert np.abs(tiny.array(acts.need("v"))[:, :ran].transpose(1, 0, 2) - run.v[layer][:ran]).max() < 1e-4


# -- prompt rows -------------------------------------------------------------------------------------


@each_model
@pytest.mark.parametrize("tail", [1, 6, 13, 50])
def test_prompt_rows_without_an_answer(name: str, tail: int) -> None:
    """13: as long as the shortest prompt, so whole prompts are run; 50: longer than any."""
    model, reference, trials = tiny.shared(name), tiny.Reference(name), some()
    taken = capture(model, trials, needs=EVERYTHING, tail=tail, generate=False)
    for one, trial in zip(taken, trials, strict=True):
        assert one.decoded.tokens == [] and one.decoded.stopped == "not generated" and one.text == ""
        run = reference.run(trial.tokens)
        for layer in range(tiny.LAYERS):
            acts = one.rows(layer)
            check_rows(name, acts, run, layer, max(0, len(trial.tokens) - tail))
            assert acts.tokens.tolist() == list(trial.tokens)
            n = min(tail, len(trial.tokens))
            assert acts.need("q").shape == acts.need("z").shape == (tiny.HEADS, n, tiny.D_HEAD)
            written = torch.einsum("hsd,hdm->sm", acts.need("z"), acts.W_O) + model.b_O(layer)
            want = run.attention_out[layer][-n:]
            assert tiny.relative(tiny.array(written), want) < 1e-4


@each_model
@pytest.mark.parametrize("padding", ["left", "right"])
def test_prompt_rows_and_steps_of_the_answer(name: str, padding: str) -> None:
    model, reference, trials = tiny.shared(name), tiny.Reference(name), some()
    if padding == "right" and name in tiny.WINDOWS:
        pytest.skip("right padding is refused where a window would count it")
    taken = capture(model, trials, tail=6, max_new_tokens=4, padding=padding)
    plain = capture(model, trials, max_new_tokens=4)
    for one, other, trial in zip(taken, plain, trials, strict=True):
        said = one.decoded.tokens
        assert said == other.decoded.tokens == reference.greedy(trial.tokens, 4)[0]
        run = reference.run([*trial.tokens, *said])
        for layer in range(tiny.LAYERS):
            check_rows(name, one.rows(layer), run, layer, len(trial.tokens) - 6)
            answer, again = one.layer(layer), other.layer(layer)
            assert answer.steps.tolist() == list(range(len(said)))
            torch.testing.assert_close(answer.need("pattern"), again.need("pattern"), atol=1e-5, rtol=0)


@each_model
def test_prompt_rows_through_hooks(name: str) -> None:
    """With a hook of the user's own, the twin stands aside and whole prompts run."""
    model, reference, trials = tiny.shared(name), tiny.Reference(name), some()
    with model.hooks([("blocks.1.attn.hook_z", lambda z: None)]):
        taken = capture(model, trials, tail=6, max_new_tokens=3)
    for one, trial in zip(taken, trials, strict=True):
        run = reference.run([*trial.tokens, *one.decoded.tokens])
        for layer in range(tiny.LAYERS):
            check_rows(name, one.rows(layer), run, layer, len(trial.tokens) - 6)


# -- targets -----------------------------------------------------------------------------------------


def test_targets_of_prompt_rows_are_the_prompts_next_tokens() -> None:
    trial = some()[0]
    [one] = capture(tiny.shared("llama"), [trial], tail=5, max_new_tokens=3)
    acts = one.rows(0)
    said = one.decoded.tokens
    assert len(said) == 3 and one.decoded.stopped == "length"
    assert acts.steps.tolist() == [-4, -3, -2, -1, 0, 1, 2]
    assert acts.targets.tolist() == [*trial.tokens[-4:], *said]
    assert acts.direction().shape == (7, tiny.WIDTH)
    [read] = capture(tiny.shared("llama"), [trial], tail=5, generate=False)
    assert read.rows(0).targets.tolist() == [*trial.tokens[-4:], -1]


def test_a_row_that_predicted_nothing_has_no_direction() -> None:
    [one] = capture(tiny.shared("llama"), [some()[0]], tail=3, generate=False)
    acts = one.rows(0)
    with pytest.raises(mh.InvalidInput, match="some rows of trial 't22' predicted no token"):
        acts.direction()
    with pytest.raises(mh.InvalidInput, match="predicted no token"):
        acts.phi()
    before = acts.at_steps([-2, -1])
    want = tiny.Reference("llama").w_u()[:, before.targets.numpy()].T
    assert np.abs(tiny.array(before.direction()) - want).max() < 1e-6


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_the_stop_tokens_step_is_the_last(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, reference = tiny.shared(name), tiny.Reference(name)
    case = tiny.cases(name)[0]
    stop = case.said[-1]
    at = case.said.index(stop)
    monkeypatch.setattr(model.backend, "stop_tokens", lambda: frozenset({stop}))
    [one] = capture(model, [case.trial], max_new_tokens=9)
    assert one.decoded.tokens == case.said[:at] and one.decoded.stop_token == stop
    assert one.decoded.steps == at + 1
    acts = one.rows(0)
    assert acts.targets.tolist() == case.said[: at + 1] and acts.steps.tolist() == list(range(at + 1))
    run = reference.run([*case.trial.tokens, *case.said[:at]])
    for layer in range(tiny.LAYERS):
        check_rows(name, one.rows(layer), run, layer, len(case.trial.tokens) - 1)
        assert one.layer(layer).steps.tolist() == list(range(at))  # the answer's own steps stop before it


def test_a_line_break_that_ends_the_answer_is_a_target_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model, case = tiny.shared("llama"), tiny.cases("llama")[0]
    stop = case.said[-1]
    monkeypatch.setattr(model, "is_newline", lambda token: token == stop)
    [one] = capture(model, [case.trial], max_new_tokens=9)
    assert one.decoded.stopped == "newline" and one.decoded.stop_token == stop
    assert one.rows(0).targets[-1] == stop


def test_steps_that_were_not_captured_are_named() -> None:
    [one] = capture(tiny.shared("llama"), [some()[0]], tail=3, generate=False)
    with pytest.raises(mh.InvalidInput, match="step -3 of trial 't22' was not captured"):
        one.rows(0).at_steps([-3])


# -- null variants -----------------------------------------------------------------------------------


def null_of(trial: mh.Trial, ending: Sequence[int], keep: int) -> mh.Trial:
    """The trial's first ``keep`` tokens and another ending."""
    return dataclasses.replace(trial, tokens=[*trial.tokens[:keep], *ending], spans={})


NULLS = {
    "equal endings": lambda trials: [null_of(t, [50, 51, 52, 53], len(t.tokens) - 6) for t in trials],
    "unequal endings": lambda trials: [
        null_of(t, tiny.prompt(i + 1, seed=i), len(t.tokens) - 6) for i, t in enumerate(trials)
    ],
    "longer than the tail": lambda trials: [null_of(t, tiny.prompt(15, seed=3), len(t.tokens) - 6) for t in trials],
    "nothing shared": lambda trials: [null_of(t, tiny.prompt(9 + i, seed=i), 0) for i, t in enumerate(trials)],
    "some shared": lambda trials: [
        null_of(t, tiny.prompt(4, seed=i), len(t.tokens) - 6 if i % 2 else 2) for i, t in enumerate(trials)
    ],
    "none for some": lambda trials: [
        None if i == 1 else null_of(t, [50, 51], len(t.tokens) - 6) for i, t in enumerate(trials)
    ],
}


@each_model
@pytest.mark.parametrize("kind", NULLS)
@pytest.mark.parametrize("hooked", [False, True], ids=["twin", "hooked"])
def test_null_rows_are_those_of_the_null_prompt_alone(name: str, kind: str, hooked: bool) -> None:
    model, reference, trials = tiny.shared(name), tiny.Reference(name), some()
    nulls = NULLS[kind](trials)
    with model.hooks([("blocks.1.attn.hook_z", lambda z: None)] if hooked else []):
        taken = capture(model, trials, tail=6, nulls=nulls, max_new_tokens=3)
    for one, trial, null in zip(taken, trials, nulls, strict=True):
        run = reference.run([*trial.tokens, *one.decoded.tokens])
        for layer in range(tiny.LAYERS):
            acts = one.rows(layer)
            check_rows(name, acts, run, layer, len(trial.tokens) - 6)  # the trial's own cache is as it was
            if null is None:
                assert acts.null is None
                continue
            assert acts.null is not None and acts.null.tokens.tolist() == list(null.tokens)
            n_ending = max(len(null.tokens) - (len(trial.tokens) - 6), 1)
            assert len(acts.null.steps) >= min(n_ending, len(null.tokens))
            check_rows(name, acts.null, reference.run(null.tokens), layer, len(null.tokens) - len(acts.null.steps))
            assert acts.null.targets.tolist() == [*null.tokens[len(null.tokens) - len(acts.null.steps) + 1 :], -1]


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_null_rows_with_right_padding(name: str) -> None:
    model, reference, trials = tiny.shared(name), tiny.Reference(name), some()
    nulls = NULLS["unequal endings"](trials)
    for one, null in zip(capture(model, trials, tail=6, nulls=nulls, padding="right", generate=False), nulls,
                         strict=True):  # fmt: skip
        for layer in range(tiny.LAYERS):
            acts = one.rows(layer).null
            assert acts is not None
            check_rows(name, acts, reference.run(null.tokens), layer, len(null.tokens) - len(acts.steps))


def test_each_trial_has_its_null_or_none() -> None:
    model, trials = tiny.shared("llama"), some()
    with pytest.raises(mh.InvalidInput, match="there are 1 null variants for 4 trials; give one each, or None"):
        capture(model, trials, nulls=[None])
    long = null_of(trials[0], [5] * 200, 4)
    with pytest.raises(mh.InvalidInput, match="the null variant of trial 't22' has 204 tokens"):
        capture(model, trials[:1], nulls=[long])
    foreign = null_of(trials[0], [tiny.VOCAB], 4)
    with pytest.raises(mh.InvalidInput, match="the null variant of trial 't22' holds token ids outside 0 to 96"):
        capture(model, trials[:1], nulls=[foreign])


# -- one pass for all --------------------------------------------------------------------------------


def calls_of(
    model: Model, methods: Sequence[str], trials: Sequence[mh.Trial], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> dict[str, int]:
    with counted(model, monkeypatch) as calls:
        mh.CircuitAnalysis(model, progress=False).score(list(methods), trials, max_new_tokens=4, **options)
    return calls


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_all_detectors_cost_the_passes_of_locos_and_one_null_ending(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, trials = tiny.shared(name), asked()
    locos = calls_of(model, ["locos"], trials, monkeypatch)
    others = [m for m in PASS_BASED if m != "qrhead"]
    assert calls_of(model, others, trials, monkeypatch) == locos
    every = calls_of(model, PASS_BASED, trials, monkeypatch, qrhead=NULL)
    assert locos["prefill"] == 1 == every["prefill"] and every["run"] == locos["run"] + 1
    uncalibrated = calls_of(model, PASS_BASED, trials, monkeypatch, qrhead={"calibrated": False})
    assert uncalibrated == locos


def test_those_are_all_the_methods_that_read_the_callers_trials_in_one_pass() -> None:
    found = [n for n in method_names() if get_method(n).builtin and get_method(n).kind == "capture"]
    assert sorted(PASS_BASED) == [n for n in found if get_method(n).prompts is None]


def test_reading_the_prompt_alone_generates_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = calls_of(tiny.shared("llama"), ["headkv"], asked(), monkeypatch)
    assert calls == {"run": 1, "prefill": 1}
    calls = calls_of(tiny.shared("llama"), ["headkv", "qrhead"], asked(), monkeypatch, qrhead=NULL)
    assert calls == {"run": 2, "prefill": 1}


@each_model
def test_asking_for_the_null_query_changes_no_other_score(name: str) -> None:
    """The null endings run on a copy of the cache: the trials' own goes on untouched."""
    ca = mh.CircuitAnalysis(tiny.shared(name), progress=False)
    trials = asked()
    others = [m for m in PASS_BASED if m not in ("qrhead", "contrastive")]
    alone = ca.score(others, trials, max_new_tokens=4)
    for options in (NULL, {"null_query": "w7"}, {"null_query": "w7 w8 w9 w10"}):
        both = ca.score([*others, "qrhead"], trials, max_new_tokens=4, qrhead=options)
        for method in others:
            scale = np.abs(alone[method].values).max()
            np.testing.assert_allclose(both[method].values, alone[method].values, rtol=0, atol=1e-5 * max(scale, 1))
            for mine, theirs in zip(both[method].records, alone[method].records, strict=True):
                assert mine.get("generated") == theirs.get("generated")


def test_two_null_queries_at_once_take_two_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    from mechheads.methods.registry import get_method as found
    from mechheads.runner import RunOptions, score_jobs
    from mechheads.tables import Job

    model, trials, method = tiny.shared("llama"), mh.TrialSet(asked()), found("qrhead")
    jobs = [Job(q, method, method.resolve({"null_query": q})) for q in ("w7 w8", "w9 w10")]
    with counted(model, monkeypatch) as calls:
        both = score_jobs(model, jobs, trials, run=RunOptions(), progress=False)
    assert calls["prefill"] == 2
    assert np.abs(both["w7 w8"].values - both["w9 w10"].values).max() > 1e-4
    np.testing.assert_allclose(both["w7 w8"].parts["raw"], both["w9 w10"].parts["raw"], atol=1e-6)
