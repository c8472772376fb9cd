"""Many head sets on one prompt against each alone, on every architecture; and what happens when memory runs out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import answered
from hypothesis import given, settings
from hypothesis import strategies as st

import mechheads as mh
from mechheads import head_set_runs as module
from mechheads.backends.base import Row
from mechheads.generate import generate
from mechheads.head_set_runs import Ask, Program, RunLimits, Told, run_head_sets, unique
from mechheads.interventions import (
    Intervention,
    apply,
    attention_bias,
    mean_ablation,
    mean_positional_ablation,
    prune,
    resample_ablation,
    zero_ablation,
)

PROMPTS = [tuple(tiny.prompt(n, seed=n)) for n in (20, 9, 14, 14)]
REFERENCE = mh.TrialSet([mh.Trial(id=f"r{i}", tokens=tiny.prompt(12 + i, seed=50 + i)) for i in range(4)], name="ref")
ANSWER, FOIL, CANDIDATES, SCORED = (7, 8, 9), 11, ((5,), (6, 7)), (3, 4, 5)
ASKS = [Ask(p, generate=True, answer=ANSWER, foil=FOIL, candidates=CANDIDATES, scored=SCORED) for p in PROMPTS]


def interventions(model: mh.Model) -> list[Intervention]:
    return [
        i.prepare(model)
        for i in (
            zero_ablation(),
            zero_ablation(site="q"),
            zero_ablation(site="attn_scores"),
            mean_ablation(reference=REFERENCE),
            mean_positional_ablation(reference=REFERENCE),
            resample_ablation(reference=REFERENCE, seed=3),
            attention_bias(2.0, tokens=[5, 6, 7, 40, 41, 42]),
            zero_ablation(positions="answer"),
            prune(),
        )
    ]


def program(*steps: tuple[int, str]) -> Program:
    return tuple((i, mh.HeadSet.parse(heads)) for i, heads in steps)


PROGRAMS = [
    program(),
    program((0, "L1H2")),
    program((0, "L2H0 L2H3")),
    program((1, "L0H1")),
    program((2, "L1H1 L2H2")),
    program((3, "L1H0 L2H2")),
    program((4, "L0H0 L2H2")),
    program((5, "L1H3 L2H2")),
    program((6, "L1H3 L2H2")),
    program((7, "L1H3 L2H2")),
    program((8, "L1H3 L0H2")),
    program((0, "L1H3"), (3, "L2H2")),
]


def alone(model: mh.Model, ask: Ask, doing: Sequence[Intervention], *, longest: int) -> Told:
    """One prompt under one program, by ``apply``: an uncached forward for each continuation."""

    def logprobs(tokens: Sequence[int]) -> torch.Tensor:
        batch = torch.tensor([[*ask.prompt, *tokens]])
        with apply(model, *doing), model.running([Row(ask.prompt, list(tokens))]):
            return model.backend.run(batch, torch.ones_like(batch), None, last_only=False)[0].float()

    def of(tokens: Sequence[int]) -> tuple[float, ...]:
        after = logprobs(tokens)[len(ask.prompt) - 1 :].log_softmax(-1)
        return tuple(after[i, token].item() for i, token in enumerate(tokens))

    told = Told()
    with apply(model, *doing):
        (said,) = generate(model, [ask.prompt], max_new_tokens=longest, stop_at_newline=True)
    told.decoded.tokens, told.decoded.logprobs = list(said.tokens), list(said.logprobs)
    told.answer_logprobs = of(ask.answer)
    last = logprobs(())[-1]
    told.logit_diff = (last[ask.answer[0]] - last[ask.foil]).item() if ask.foil is not None else None
    told.candidate_logprobs = tuple(sum(of(c)) for c in ask.candidates)
    plain = logprobs(()).log_softmax(-1)
    told.token_logprobs = tuple(plain[i - 1, ask.prompt[i]].item() for i in ask.scored)
    return told


def assert_same(got: Told, want: Told, *, atol: float = 2e-5) -> None:
    assert got.decoded.tokens == want.decoded.tokens
    for name in ("answer_logprobs", "candidate_logprobs", "token_logprobs"):
        np.testing.assert_allclose(getattr(got, name), getattr(want, name), atol=atol, err_msg=name)
    np.testing.assert_allclose(got.decoded.logprobs, want.decoded.logprobs, atol=atol)
    assert got.logit_diff == pytest.approx(want.logit_diff, abs=atol)


@pytest.mark.parametrize("name", tiny.ARCHITECTURES)
@pytest.mark.filterwarnings("ignore:.*normalises the queries of all heads together")
def test_every_program_equals_it_alone(name: str) -> None:
    model = tiny.shared(name)
    doing = interventions(model)
    told = run_head_sets(model, ASKS, doing, PROGRAMS, max_new_tokens=5)
    said = set()
    for ask, rows in zip(ASKS[1:3], told[1:3], strict=True):  # the shortest, and one of two as long as each other
        for one, row in zip(PROGRAMS, rows, strict=True):
            assert_same(row, alone(model, ask, [doing[i].on(heads) for i, heads in one], longest=5))
            said.add(tuple(row.decoded.tokens))
    assert len(said) > 4  # they do differ
    assert not model.backend.hooked() and model.ablations == [] and model.row_listeners == []


@pytest.mark.parametrize("limits", [RunLimits(rows=1), RunLimits(rows=5), RunLimits(memory=1), RunLimits(rows=1000)])
def test_how_much_runs_at_once_changes_nothing(llama: mh.Model, limits: RunLimits) -> None:
    doing = interventions(llama)
    want = run_head_sets(llama, ASKS, doing, PROGRAMS, max_new_tokens=5)
    got = run_head_sets(llama, ASKS, doing, PROGRAMS, max_new_tokens=5, limits=limits)
    for a, b in zip(want, got, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_same(y, x)


heads = st.sets(st.tuples(st.integers(0, 2), st.integers(0, 3)), max_size=5)


@settings(max_examples=15, deadline=None)
@given(sets=st.lists(heads, min_size=1, max_size=6), at=st.sampled_from([0, 3, 5]))
def test_any_sets(sets: list[set[tuple[int, int]]], at: int) -> None:
    model = tiny.shared("qwen3")
    doing = interventions(model)
    programs = [((at, mh.HeadSet(sorted(one))),) if one else () for one in sets]
    told = run_head_sets(model, ASKS[:2], doing, programs, max_new_tokens=4)
    for p, one in enumerate(programs):
        want = alone(model, ASKS[0], [doing[i].on(h) for i, h in one], longest=4)
        assert_same(told[0][p], want)


def test_a_layer_below_the_first_touched_runs_one_row(llama: mh.Model) -> None:
    rows: dict[int, list[int]] = {}

    def note(layer: int) -> Any:
        return lambda t: rows.setdefault(layer, []).append(len(t))

    watch = [(f"blocks.{layer}.mlp.hook_out", note(layer)) for layer in range(3)]
    real = llama.backend.hooks

    programs = [program((0, "L1H0")), program((0, "L2H1")), program((0, "L2H2")), ()]
    ask = Ask(PROMPTS[0], candidates=((5,), (6,)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(llama.backend, "hooks", lambda pairs: real([*pairs, *(watch if len(pairs) else [])]))
        run_head_sets(llama, [ask], [zero_ablation()], programs)
    # In force twice at a time (the acts, and the rows splitting off), so each pass is seen twice.
    assert {layer: max(seen) for layer, seen in rows.items()} == {0: 1, 1: 2, 2: 4}


def test_answers_alone_are_prefilled_once_without_hooks(llama: mh.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    from helpers import counted

    ask = Ask(PROMPTS[0], candidates=((5,), (6,)))
    with counted(llama, monkeypatch) as calls:
        run_head_sets(llama, [ask], [zero_ablation(positions="answer")], [program((0, "L0H0")), ()])
    assert calls["prefill"] == 1
    with counted(llama, monkeypatch) as calls:
        run_head_sets(llama, [ask], [zero_ablation()], [program((0, "L0H0")), ()])
    assert calls["prefill"] == 0


class _Full:
    """A back end's run that fails as memory runs out, where it is asked for more rows than there is room for."""

    def __init__(self, real: Any, room: int, error: BaseException):
        self.real, self.room, self.error, self.tried = real, room, error, []

    def __call__(self, tokens: torch.Tensor, mask: torch.Tensor, cache: Any, **options: Any) -> torch.Tensor:
        rows = max(
            len(tokens), len(mask), *(len(e.keys) for e in (cache.layers if cache else ()) if e.keys is not None), 1
        )
        self.tried.append(rows)
        if rows > self.room:
            raise self.error
        logits = self.real(tokens, mask, cache, **options)
        if len(logits) > self.room:
            raise self.error
        return logits


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: not enough memory: you tried to allocate 9 bytes"),
        MemoryError(),
    ],
)
@pytest.mark.parametrize("room", [3, 7])
def test_half_as_much_is_tried_when_memory_runs_out(
    llama: mh.Model, monkeypatch: pytest.MonkeyPatch, error: BaseException, room: int
) -> None:
    doing = interventions(llama)
    want = run_head_sets(llama, ASKS, doing, PROGRAMS, max_new_tokens=5)
    full = _Full(llama.backend.run, room, error)
    monkeypatch.setattr(llama.backend, "run", full)
    got = run_head_sets(llama, ASKS, doing, PROGRAMS, max_new_tokens=5)
    for a, b in zip(want, got, strict=True):
        for x, y in zip(a, b, strict=True):
            assert_same(y, x)
    assert not llama.backend.hooked() and llama.ablations == []


def test_what_does_not_fit_alone_is_an_error(llama: mh.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    full = _Full(llama.backend.run, 1, torch.OutOfMemoryError("out of memory"))
    monkeypatch.setattr(llama.backend, "run", full)
    with pytest.raises(torch.OutOfMemoryError):
        run_head_sets(llama, ASKS[:1], [zero_ablation()], [program((0, "L1H1"))])


def test_other_errors_are_not_taken_for_memory(llama: mh.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []

    def broken(*args: Any, **options: Any) -> Any:
        calls.append(1)
        raise RuntimeError("a shape does not fit")

    monkeypatch.setattr(llama.backend, "run", broken)
    with pytest.raises(RuntimeError, match="a shape does not fit"):
        run_head_sets(llama, ASKS, [zero_ablation()], [program((0, "L1H1"))])
    assert len(calls) == 1


def test_hooks_of_others_are_refused(llama: mh.Model) -> None:
    with (
        apply(llama, zero_ablation().on("L0H0")),
        pytest.raises(mh.InvalidInput, match="there are other hooks on the model; many head sets are run on a model"),
    ):
        try:
            run_head_sets(llama, ASKS, [], [()])
        finally:
            llama.logits([5, 6])  # or the hook of this test would complain that it never fired


def test_a_head_that_is_not_there(llama: mh.Model) -> None:
    with pytest.raises(mh.InvalidInput, match="L9H9"):
        run_head_sets(llama, ASKS, [zero_ablation()], [program((0, "L9H9"))])


def test_unique_asks() -> None:
    a, b = Ask((5, 6)), Ask((5, 6), answer=(7,))
    assert unique([a, b, Ask((5, 6)), b]) == ([a, b], [0, 1, 0, 1])


def test_a_sweep_of_trials_with_one_prompt_runs_it_once(llama: mh.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    real = module.run_head_sets
    from mechheads import cell_runs

    monkeypatch.setattr(
        cell_runs, "run_head_sets", lambda model, asks, *a, **o: seen.append(len(asks)) or real(model, asks, *a, **o)
    )
    one = answered(llama)[0]
    twice = mh.TrialSet([one, mh.Trial(id="again", tokens=one.tokens, answer=one.answer)], name="twice")
    result = mh.CircuitAnalysis(llama).sweep("L1H1", k=1, trials=twice, intervention=zero_ablation(), max_new_tokens=3)
    assert seen == [1] and len(result.frame["trial_id"].unique()) == 2
