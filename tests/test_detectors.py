"""The detectors that read attention against loops over a plain Hugging Face model, and what they refuse."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import detector_loops as loops
import numpy as np
import pytest
import tiny
import torch
from detector_loops import Echo, echoes
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import Bool, Float
from torch import Tensor

import mechheads as mh
from mechheads.capture import LayerActs
from mechheads.methods import get_method
from mechheads.methods.attention import contrastive, headkv, qrhead, sum_of, wu
from mechheads.model import Model
from mechheads.runner import RunOptions, score_jobs
from mechheads.tables import Job

# Multi-head, grouped and multi-query attention; sliding windows; post norms; sinks.
NAMES = ("gpt2", "llama", "llama_mqa", "gemma3", "mistral", "olmo2", "gptoss")
each_model = pytest.mark.parametrize("name", NAMES)
UNKNOWN_WORD = 2  # what the published null query "N/A" is to the word-level tokenizer


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that makes a token of a model an end token for the test."""

    def make(model: Model, token: int) -> None:
        monkeypatch.setattr(model.backend, "stop_tokens", lambda: frozenset({tiny.EOS, token}))

    return make


def run(
    model: Model, jobs: dict[str, tuple[str, dict[str, Any]]], trials: Sequence[mh.Trial], **options: Any
) -> dict[str, mh.HeadScores]:
    """Several jobs on one capture; the same method may stand there with several options."""
    made = [Job(label, get_method(m), get_method(m).resolve(given)) for label, (m, given) in jobs.items()]
    return score_jobs(model, made, mh.TrialSet(trials), run=RunOptions(**options), progress=False)


def near(got: np.ndarray, want: np.ndarray, bound: float = 1e-5) -> None:
    """Within a bound in probability; undefined at the same places."""
    np.testing.assert_allclose(got, want, rtol=0, atol=bound, equal_nan=True)


# -- Wu and contrastive: every generated step --------------------------------------------------------

GENERATED: dict[str, tuple[str, dict[str, Any]]] = {
    **{f"wu {c} {s}": ("wu", {"counting": c, "span": s}) for c in ("distinct", "step") for s in ("needle", "answer")},
    **{
        f"contrastive {form} {normalised}": (
            "contrastive", {"form": form, "normalised": normalised, "filtered": False},
        )
        for form in ("mass", "topk") for normalised in (True, False)
    },
    "filtered": ("contrastive", {}),
    "top 3": ("contrastive", {"form": "topk", "top": 3, "normalised": False, "filtered": False}),
}  # fmt: skip


def check_generated(name: str, got: dict[str, mh.HeadScores], row: int, echo: Echo, reference: tiny.Reference) -> None:
    """One trial of each job in ``GENERATED``."""
    assert got["wu step needle"].kept[row], got["wu step needle"].records[row]
    assert got["wu step needle"].records[row]["answer_steps"] == echo.steps
    for label, (method, options) in GENERATED.items():
        scores = got[label]
        if method == "wu":
            near(scores.values[row], loops.wu(name, echo, reference, **options))
            continue
        want = loops.contrastive(name, echo, reference, form=options.get("form", "mass"), top=options.get("top", 10))
        n, total = len(echo.trial.positions("needle")), want["contrast"].sum()
        if total == 0 and options.get("normalised", True):
            assert not scores.kept[row]
        elif options.get("filtered", True) and want["contrast"].max() < 2 * n / len(echo.trial.tokens):
            assert not scores.kept[row] and "no head's contrast reaches" in scores.records[row]["reason"]
            assert np.isnan(scores.values[row]).all()
        else:
            assert scores.kept[row]
            near(scores.values[row], want["contrast"] / (total if options.get("normalised", True) else 1), 2e-5)
            for part in ("contrast", "plus", "minus"):
                near(scores.parts[part][row], want[part])


@each_model
def test_scores_over_generated_steps_are_those_of_loops(name: str, ending: Any) -> None:
    model, reference, found = tiny.shared(name), tiny.Reference(name), echoes(name)
    going_on = [e for e in found if e.stop is None]
    got = run(model, GENERATED, [e.trial for e in going_on], max_new_tokens=6, batch_size=2)
    for row, echo in enumerate(going_on):
        check_generated(name, got, row, echo, reference)
    assert got["wu step needle"].values.max() > 0
    for echo in found[len(going_on) :]:
        ending(model, echo.stop)
        got = run(model, GENERATED, [echo.trial], max_new_tokens=9)
        assert got["wu step needle"].records[0]["stopped"] == "stop token"
        check_generated(name, got, 0, echo, reference)


def test_the_trials_of_the_loops_show_what_they_should() -> None:
    found = [e for name in NAMES for e in echoes(name)]
    assert sum(e.stop is not None for e in found) >= 4  # answers that end
    assert {len(e.steps) for e in found} == {2} and len({e.steps[0] for e in found}) > 1
    held = [
        np.isfinite(loops.wu(name, e, tiny.Reference(name), counting="step", span="answer")).all()
        for name in NAMES
        for e in echoes(name)
    ]
    assert any(held) and not all(held)  # answers in the needle, and not


def test_the_stop_tokens_step_is_one_of_the_others(ending: Any) -> None:
    """Without it there would be nothing to contrast with here."""
    echo = next(e for e in echoes("llama") if e.stop is not None)
    model = tiny.shared("llama")
    trial = dataclasses.replace(echo.trial, answer=" ".join(f"w{t}" for t in echo.said))
    cut_off = run(model, {"c": ("contrastive", {})}, [trial], max_new_tokens=len(echo.said))["c"]
    assert not cut_off.kept[0]
    assert "every generated step is an answer step" in cut_off.records[0]["reason"]
    ending(model, echo.stop)
    options = {"normalised": False, "filtered": False}
    whole = run(model, {"c": ("contrastive", options)}, [trial], max_new_tokens=9)["c"]
    assert whole.kept[0]
    all_said = dataclasses.replace(echo, trial=trial, steps=list(range(len(echo.said))))
    near(whole.parts["minus"][0], loops.contrastive("llama", all_said, tiny.Reference("llama"), form="mass")["minus"])


def test_a_trial_without_an_answer_has_nothing_to_contrast() -> None:
    trial = dataclasses.replace(echoes("llama")[0].trial, answer=None)
    got = run(tiny.shared("llama"), {"c": ("contrastive", {}), "w": ("wu", {})}, [trial], max_new_tokens=6)
    assert not got["c"].kept[0] and "no answer to contrast with" in got["c"].records[0]["reason"]
    assert got["w"].kept[0] and np.isfinite(got["w"].values).all()
    narrow = run(tiny.shared("llama"), {"w": ("wu", {"span": "answer"})}, [trial], max_new_tokens=6)["w"]
    assert np.isnan(narrow.values).all()  # no answer, so no answer's span


def test_filtered_trials_are_told_with_the_bar() -> None:
    """The published filter: the best head's contrast must reach twice the needle's share of the prompt."""
    trials = [e.trial for e in echoes("llama") if e.stop is None]
    wide = [dataclasses.replace(t, spans={"needle": (0, len(t.tokens) - 2)}) for t in trials]
    got = run(tiny.shared("llama"), {"c": ("contrastive", {}), "free": ("contrastive", {"filtered": False})}, wide,
              max_new_tokens=6)  # fmt: skip
    for record, trial in zip(got["c"].records, wide, strict=True):
        bar = 2 * (len(trial.tokens) - 2) / len(trial.tokens)  # above 1: nothing reaches it
        assert record["reason"] == f"no head's contrast reaches 2 n / context length = {bar:.3g}"
    assert not got["c"].kept.any() and got["free"].kept.any()


# -- HeadKV and QRHead: rows of the prompt -----------------------------------------------------------


def prompts() -> list[mh.Trial]:
    """Several lengths, documents and golds; one with two golds, one question at the end, one near the front."""
    return [
        mh.Trial(
            id="long", tokens=tiny.prompt(34, seed=11),
            spans={"needle": [(4, 9), (15, 19)], "question": (24, 29),
                   "documents": [(1, 4), (4, 9), (9, 15), (15, 19), (19, 24)]},
        ),
        mh.Trial(id="at the end", tokens=tiny.prompt(19, seed=12), spans={"needle": (10, 15), "question": (15, 19)}),
        mh.Trial(
            id="short", tokens=tiny.prompt(11, seed=13),
            spans={"needle": (0, 3), "question": (4, 6), "documents": [(0, 3), (3, 4)]},
        ),
    ]  # fmt: skip


QR_OPTIONS = [
    {},
    {"calibrated": False},
    {"query": "to_end"},
    {"drop_outliers": True, "null_query": "w7 w8 w9"},
    {"query": "to_end", "drop_outliers": True, "calibrated": False},
]


def null_tokens(options: dict[str, Any]) -> list[int] | None:
    """Token ids of the null query under these options."""
    if not options.get("calibrated", True):
        return None
    return [int(word[1:]) for word in options["null_query"].split()] if "null_query" in options else [UNKNOWN_WORD]


@each_model
def test_headkv_is_its_loop(name: str) -> None:
    model, reference, trials = tiny.shared(name), tiny.Reference(name), prompts()
    jobs = {str(w): ("headkv", {"window": w}) for w in (1, 8, 50)}  # 50: whole prompts
    for batch_size in (1, 3):
        got = run(model, jobs, trials, batch_size=batch_size)
        for row, trial in enumerate(trials):
            for window in (1, 8, 50):
                near(got[str(window)].values[row], loops.headkv(name, trial, reference, window=window))
        assert got["8"].kept.all() and (got["8"].values <= got["50"].values + 1e-6).all()


@each_model
@pytest.mark.parametrize("options", QR_OPTIONS, ids=str)
def test_qrhead_is_its_loop(name: str, options: dict[str, Any]) -> None:
    model, reference, trials = tiny.shared(name), tiny.Reference(name), prompts()
    got = run(model, {"qr": ("qrhead", options)}, trials, batch_size=3)["qr"]
    for row, trial in enumerate(trials):
        want = loops.qrhead(
            name, trial, reference, null=null_tokens(options), query=options.get("query", "question"),
            drop_outliers=options.get("drop_outliers", False),
        )  # fmt: skip
        near(got.values[row], want["score"])
        near(got.parts["raw"][row], want["raw"])
        if "first" in want:
            near(got.parts["first"][row], want["first"])
        else:
            assert np.isnan(got.parts["first"][row]).all()
    assert np.abs(got.values).max() > 1e-3
    assert got.kept.all()


def test_outliers_are_dropped_somewhere() -> None:
    """Else the two ways would not be told apart above."""
    reference, trial = tiny.Reference("llama"), prompts()[0]
    wide = dataclasses.replace(trial, spans={"needle": (0, 20), "question": (24, 29)})
    want, kept = (
        loops.qrhead("llama", wide, reference, null=[UNKNOWN_WORD], query="question", drop_outliers=drop)["score"]
        for drop in (True, False)
    )
    assert np.abs(want - kept).max() > 1e-3
    model = tiny.shared("llama")
    near(run(model, {"q": ("qrhead", {"drop_outliers": True})}, [wide])["q"].values[0], want)


PROMPT_JOBS: dict[str, tuple[str, dict[str, Any]]] = {
    "headkv": ("headkv", {}),
    "qrhead": ("qrhead", {}),
    "to_end": ("qrhead", {"query": "to_end"}),
}


@each_model
def test_padding_company_and_hooks_change_no_prompt_row(name: str) -> None:
    """With a hook of the user's own on the model, whole prompts run through it, and nothing is shared."""
    model, trials = tiny.shared(name), prompts()
    alone = run(model, PROMPT_JOBS, trials, batch_size=1)
    together = run(model, PROMPT_JOBS, trials, batch_size=3)
    if name not in tiny.WINDOWS:
        long_enough = run(model, {"headkv": ("headkv", {})}, trials, batch_size=3, padding="right")
        near(long_enough["headkv"].values, alone["headkv"].values)
    with model.hooks([("blocks.0.attn.hook_z", lambda z: None)]):
        assert model.backend.hooked()
        hooked = run(model, PROMPT_JOBS, trials, batch_size=3)
    for got in (together, hooked):
        for label in PROMPT_JOBS:
            near(got[label].values, alone[label].values)


def test_right_padding_with_a_prompt_shorter_than_the_tail_is_refused() -> None:
    with pytest.raises(mh.InvalidInput, match=r"padding='right' needs prompts of at least 31 tokens"):
        run(tiny.shared("llama"), {"h": ("headkv", {"window": 30})}, prompts(), padding="right")


@each_model
def test_prompt_rows_and_generated_steps_come_from_one_capture(name: str) -> None:
    """Asked together, every detector gives what it gives alone."""
    model, trials = tiny.shared(name), [e.trial for e in echoes(name) if e.stop is None]
    jobs = {"wu": ("wu", {}), "c": ("contrastive", {"filtered": False, "normalised": False}), "locos": ("locos", {}),
            **PROMPT_JOBS}  # fmt: skip
    together = run(model, jobs, trials, max_new_tokens=6)
    for label, job in jobs.items():
        alone = run(model, {label: job}, trials, max_new_tokens=6)[label]
        near(together[label].values, alone.values, 1e-5 * max(1, float(np.nanmax(np.abs(alone.values)))))
    assert set(together) == set(jobs)


def test_the_published_names_have_papers_and_units() -> None:
    for name in ("wu", "contrastive", "headkv", "qrhead", "attention_spatial"):
        method = get_method(name)
        assert method.builtin and method.paper.startswith("arXiv ") and method.unit and method.needs == ("pattern",)
    assert not get_method("headkv").gated and not get_method("qrhead").gated and get_method("wu").gated


# -- kernels on random patterns ----------------------------------------------------------------------


# Heads, steps, keys, where the needle starts and how long it is, how many steps are the answer's, seed. The checked
# objects are built in the tests: type checks draw random numbers, which hypothesis does not allow inside a strategy.
Drawn = tuple[int, int, int, int, int, int, int]
drawn_layers = st.tuples(
    st.integers(1, 4), st.integers(1, 5), st.integers(6, 14), st.integers(0, 13), st.integers(1, 5), st.integers(1, 5),
    st.integers(0, 2**31),
)  # fmt: skip


def layer_of(drawn: Drawn) -> LayerActs:
    """One layer with random attention and few kinds of tokens, so that copies happen."""
    heads, steps, keys, start, length, answered, seed = drawn
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(5, 8, (keys,), generator=generator)
    start %= keys - 1
    trial = mh.Trial(id="made", tokens=tokens.tolist(), spans={"needle": (start, min(start + length, keys - 1))})
    answer = torch.arange(steps) < min(answered, steps)
    return LayerActs(
        model=tiny.shared("llama"), trial=trial, layer=0, steps=torch.arange(steps),
        targets=torch.randint(5, 8, (steps,), generator=generator), tokens=tokens,
        visible=torch.ones(steps, keys, dtype=torch.bool),
        pattern=(3 * torch.randn(heads, steps, keys, generator=generator)).softmax(-1), answer=answer,
    )  # fmt: skip


def shuffled(acts: LayerActs, order: list[int]) -> LayerActs:
    return dataclasses.replace(acts, pattern=acts.need("pattern")[order])


ALL_KERNELS = {
    "wu": lambda a: wu(a, a.trial),
    "wu step": lambda a: wu(a, a.trial, counting="step"),
    "mass": lambda a: contrastive(a, a.trial)["score"],
    "topk": lambda a: contrastive(a, a.trial, form="topk", top=3)["score"],
    "headkv": lambda a: headkv(a, a.trial),
    "qrhead": lambda a: qrhead(a, a.trial, calibrated=False)["score"],
}


@settings(max_examples=40, deadline=None)
@given(drawn=drawn_layers, by=st.permutations(range(4)))
def test_every_head_is_scored_by_itself(drawn: Drawn, by: list[int]) -> None:
    acts = layer_of(drawn)
    order = [head for head in by if head < acts.need("pattern").shape[0]]
    for kernel in ALL_KERNELS.values():
        one, other = kernel(acts), kernel(shuffled(acts, order))
        torch.testing.assert_close(other, one[order], equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(drawn=drawn_layers)
def test_scores_lie_where_they_are_said_to(drawn: Drawn) -> None:
    acts = layer_of(drawn)
    distinct, by_step = wu(acts, acts.trial), wu(acts, acts.trial, counting="step")
    assert (distinct >= 0).all() and (distinct <= 1).all()
    assert (by_step >= 0).all() and (by_step <= len(acts.steps) / len(acts.trial.positions("needle"))).all()
    assert ((distinct > 0) == (by_step > 0)).all()
    for form in ("mass", "topk"):
        parts = contrastive(acts, acts.trial, form=form)
        contrast = parts["contrast"]
        assert (torch.isnan(contrast) == bool(acts.answer is not None and acts.answer.all())).all()
        assert ((parts["plus"] >= 0) & (parts["plus"] <= 1 + 1e-6)).all()
        fine = contrast[~contrast.isnan()]
        assert ((fine >= 0) & (fine <= 1 + 1e-6)).all()
    reach = headkv(acts, acts.trial)
    mean = qrhead(acts, acts.trial, calibrated=False)["score"]
    assert (reach <= 1 + 1e-6).all() and (mean >= 0).all() and (mean <= reach + 1e-6).all()


@settings(max_examples=30, deadline=None)
@given(drawn=drawn_layers)
def test_what_happens_outside_the_needle_does_not_matter(drawn: Drawn) -> None:
    """Attention moved about among the other keys leaves mass scores as they are."""
    acts = layer_of(drawn)
    off = ~acts.mask("needle")
    pattern = acts.need("pattern").clone()
    pattern[..., off] = pattern[..., off].flip(-1)
    other = dataclasses.replace(acts, pattern=pattern)
    for name in ("mass", "headkv", "qrhead"):
        torch.testing.assert_close(ALL_KERNELS[name](other), ALL_KERNELS[name](acts), equal_nan=True)


@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**31), n=st.integers(1, 12), drop=st.booleans())
def test_sum_of_spans_is_its_loop(seed: int, n: int, drop: bool) -> None:
    reads = torch.randn(2, 12, generator=torch.Generator().manual_seed(seed)) ** 3  # heavy tails: outliers
    spans = [list(range(n)), list(range(n, 12))]
    got = sum_of(reads, [s for s in spans if s], drop_outliers=drop)
    for head in range(2):
        total = 0.0
        for span in spans:
            keys = [float(reads[head, j]) for j in span]
            if drop and len(keys) > 1:
                low = np.mean(keys) - 2 * np.std(keys, ddof=1)
                keys = [k for k in keys if k > low]
            total += sum(keys)
        assert float(got[head]) == pytest.approx(total, abs=1e-4)


def hand_made(
    pattern: Float[Tensor, "head step key"], tokens: list[int], targets: list[int], needle: tuple[int, int],
    answer: Bool[Tensor, " step"],
) -> LayerActs:  # fmt: skip
    steps = len(targets)
    trial = mh.Trial(id="made", tokens=tokens, spans={"needle": needle}, answer="w10 w11")
    return LayerActs(
        model=tiny.shared("llama"), trial=trial, layer=0, steps=torch.arange(steps), targets=torch.tensor(targets),
        tokens=torch.tensor(tokens), visible=torch.ones(steps, len(tokens), dtype=torch.bool), pattern=pattern,
        answer=answer,
    )  # fmt: skip


def test_the_ways_of_counting_copies_by_hand() -> None:
    tokens = [20, 10, 11, 10, 21, 22]
    needle = (1, 5)  # 10 11 10 21: four tokens, three kinds
    looks = torch.zeros(2, 4, 6)
    for step, key in enumerate((1, 2, 3, 0)):  # 10, 11, 10 again, and something out of the needle
        looks[0, step, key] = 1
    for step, key in enumerate((2, 1, 4, 1)):  # always into the needle, at what is not said
        looks[1, step, key] = 1
    acts = hand_made(looks, tokens, [10, 11, 10, 20], needle, torch.tensor([True, True, False, False]))
    assert wu(acts, acts.trial).tolist() == pytest.approx([2 / 3, 0])
    assert wu(acts, acts.trial, counting="step").tolist() == pytest.approx([3 / 4, 0])
    assert wu(acts, acts.trial, span="answer").tolist() == pytest.approx([1, 0])  # 10 11, at keys 1 and 2
    assert wu(acts, acts.trial, span="answer", counting="step").tolist() == pytest.approx([1, 0])


def test_contrast_by_hand() -> None:
    pattern = torch.tensor([[[0.1, 0.8, 0.1], [0.3, 0.5, 0.2], [0.6, 0.2, 0.2]]])
    acts = hand_made(pattern, [5, 6, 7], [8, 9, 3], (1, 2), torch.tensor([True, True, False]))
    parts = contrastive(acts, acts.trial)
    assert parts["plus"].tolist() == pytest.approx([0.65]) and parts["minus"].tolist() == pytest.approx([0.2])
    assert parts["contrast"].tolist() == pytest.approx([0.45])
    turned = dataclasses.replace(acts, answer=~torch.tensor([True, True, False]))
    assert contrastive(turned, acts.trial)["contrast"].tolist() == [0]  # no negative contrast
    best = contrastive(acts, acts.trial, form="topk", top=1)
    assert best["plus"].tolist() == [1] and best["minus"].tolist() == [0]


# -- what is refused ---------------------------------------------------------------------------------

TOKENS = list(range(10, 24))


def trial(**spans: Any) -> mh.Trial:
    return mh.Trial(id="bad", tokens=TOKENS, spans=spans, answer="w5")


@pytest.mark.parametrize(
    ("method", "options", "made", "error", "told"),
    [
        ("wu", {"counting": "steps"}, None, mh.UnknownName, r"unknown counting 'steps'.*'step'"),
        ("wu", {"span": "answers"}, None, mh.UnknownName, r"unknown span of the retrieval score 'answers'.*'answer'"),
        ("contrastive", {"form": "top"}, None, mh.UnknownName, r"unknown form of contrastive attention 'top'.*'topk'"),
        ("contrastive", {"top": 0}, None, mh.InvalidInput, r"top is 0; it must be a whole number >= 1"),
        ("headkv", {"window": 0}, None, mh.InvalidInput, r"window is 0; it must be a whole number >= 1"),
        ("headkv", {"window": True}, None, mh.InvalidInput, r"window is True; it must be a whole number"),
        ("headkv", {"window": 2.0}, None, mh.InvalidInput, r"window is 2.0; it must be a whole number"),
        ("qrhead", {"query": "end"}, None, mh.UnknownName, r"unknown query of qrhead 'end'"),
        ("qrhead", {"null_query": ""}, None, mh.InvalidInput, r"null_query '' has no tokens; the published one is"),
        ("qrhead", {}, trial(needle=(2, 5)), mh.UnknownName, r"span of trial 'bad' 'question'.*'qrhead' reads it"),
        ("qrhead", {}, trial(question=(2, 5)), mh.UnknownName, r"span of trial 'bad' 'needle'.*'qrhead' reads it"),
        ("qrhead", {}, trial(needle=(8, 11), question=(2, 5)), mh.InvalidInput,
         r"trial 'bad' the question does not come after the needle"),
        ("qrhead", {}, trial(needle=(4, 7), question=(6, 9)), mh.InvalidInput,
         r"the question does not come after the needle"),
        ("qrhead", {}, trial(needle=(1, 3), question=[(5, 7), (9, 11)]), mh.InvalidInput,
         r"trial 'bad' has 2 question spans; qrhead needs one"),
        *(
            (m, {}, mh.Trial(id="bad", tokens=TOKENS, answer="w5"), mh.UnknownName, rf"'needle'.*'{m}' reads it")
            for m in ("wu", "contrastive", "headkv", "qrhead")
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_scored_is_refused(
    method: str, options: dict[str, Any], made: mh.Trial | None, error: type[Exception], told: str, as_users_run: None
) -> None:
    good = echoes("llama")[0].trial
    with pytest.raises(error, match=told):
        mh.CircuitAnalysis(tiny.shared("llama"), progress=False).score(
            method, [made or good], max_new_tokens=6, **options
        )


def test_two_question_spans_are_fine_without_a_null_query() -> None:
    """Their tokens are all asked; only the null prompt would not know where to stand."""
    both = trial(needle=(1, 3), question=[(5, 7), (9, 11)])
    got = run(tiny.shared("llama"), {"q": ("qrhead", {"calibrated": False})}, [both])["q"]
    rows = tiny.Reference("llama").run(TOKENS).attention
    want = [layer[:, [5, 6, 9, 10]][..., [1, 2]].mean(1).sum(-1) for layer in rows]
    near(got.values[0], np.stack(want))


def test_a_question_longer_or_shorter_than_the_null_query_is_no_matter() -> None:
    model, reference = tiny.shared("gpt2"), tiny.Reference("gpt2")
    one_word = mh.Trial(id="one", tokens=TOKENS, spans={"needle": (1, 4), "question": (6, 7)})
    options = {"null_query": "w7 w8 w9 w10"}
    got = run(model, {"q": ("qrhead", options)}, [one_word])["q"].values[0]
    null = null_tokens(options)
    near(got, loops.qrhead("gpt2", one_word, reference, null=null, query="question", drop_outliers=False)["score"])
