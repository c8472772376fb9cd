"""Interventions against plain PyTorch hooks on the Hugging Face model, and what they leave behind."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import answered, counted, prompts
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_interventions import Edit, Plain
from torch import Tensor, nn

import mechheads as mh
from mechheads.backends.base import Row
from mechheads.generate import generate
from mechheads.interventions import (
    Intervention,
    apply,
    attention_bias,
    mean_activation,
    mean_positional_ablation,
    patch,
    prune,
    resample_ablation,
)
from mechheads.interventions.reference import donor_of

MODELS = ("llama", "gpt2")
HEADS = {0: [1], 1: [0, 3], 2: [2]}
HEAD_SET = mh.HeadSet([(layer, head) for layer, heads in HEADS.items() for head in heads])


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> mh.Model:
    return tiny.shared(name)


# -- the same thing, written against Hugging Face's own modules -------------------------------------


def module_of(name: str, hf: Any, layer: int, site: str) -> nn.Module:
    """The module whose input (z) or output (q) holds the site."""
    if name == "gpt2":
        attn = hf.transformer.h[layer].attn
        return attn.c_proj if site == "z" else attn.c_attn
    attn = hf.model.layers[layer].self_attn
    return attn.o_proj if site == "z" else attn.q_proj


@contextlib.contextmanager
def plain_hooks(name: str, hf: Any, site: str, values: Mapping[tuple[int, int], Tensor]) -> Iterator[None]:
    """Replace heads of a Hugging Face model; queries are the first columns of GPT-2's joint projection."""

    def put(x: Tensor, layer: int) -> Tensor:
        x = x.clone()
        for (at, head), value in values.items():
            if at == layer:
                x[..., head * 16 : (head + 1) * 16] = value
        return x

    def put_in(layer: int) -> Any:
        return lambda m, args: (put(args[0], layer), *args[1:])

    def put_out(layer: int) -> Any:
        return lambda m, args, out: put(out, layer)

    handles = []
    for layer in range(3):
        module = module_of(name, hf, layer, site)
        if site == "z":
            handles.append(module.register_forward_pre_hook(put_in(layer)))
        else:
            handles.append(module.register_forward_hook(put_out(layer)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def plain_mean(name: str, hf: Any, site: str, tokens: list[list[int]]) -> Tensor:
    """``[layer head d_head]``: one prompt at a time, no padding, one sum over all positions."""
    total, count = torch.zeros(3, 4, 16, dtype=torch.float64), 0

    def add(x: Tensor, layer: int) -> None:
        total[layer] += x[0, :, :64].double().sum(0).view(4, 16)

    def add_in(layer: int) -> Any:
        return lambda m, args: add(args[0], layer)

    def add_out(layer: int) -> Any:
        return lambda m, args, out: add(out, layer)

    for prompt in tokens:
        handles = []
        for layer in range(3):
            module = module_of(name, hf, layer, site)
            if site == "z":
                handles.append(module.register_forward_pre_hook(add_in(layer)))
            else:
                handles.append(module.register_forward_hook(add_out(layer)))
        hf(torch.tensor([prompt]))
        for handle in handles:
            handle.remove()
        count += len(prompt)
    assert count == sum(map(len, tokens))
    return total / count


def reference_trials() -> mh.TrialSet:
    return mh.TrialSet((mh.Trial(id=f"r{i}", tokens=p) for i, p in enumerate(prompts(seed=7))), name="reference")


@pytest.mark.parametrize("site", ["z", "q"])
@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_equals_plain_hooks(name: str, model: mh.Model, kind: str, site: str) -> None:
    hf = tiny.plain(name)
    asked = prompts()
    if kind == "zero":
        intervention = mh.zero_ablation(site=site)
        values = {(h.layer, h.head): torch.zeros(16) for h in HEAD_SET}
    else:
        intervention = mh.mean_ablation(site=site, reference=reference_trials()).prepare(model)
        mean = plain_mean(name, hf, site, prompts(seed=7)).float()
        values = {(h.layer, h.head): mean[h.layer, h.head] for h in HEAD_SET}
    reference = tiny.Reference(name, hf)
    with plain_hooks(name, hf, site, values):
        wanted = [reference.greedy(p, 6) for p in asked]
        logits = [reference.logits(p) for p in asked]
    clean = [reference.logits(p) for p in asked]
    assert all(tiny.relative(a, b) > 0.05 for a, b in zip(logits, clean, strict=True))  # it does something
    with apply(model, intervention.on(HEAD_SET)):
        batched = generate(model, asked, max_new_tokens=6, batch_size=6)
        single = generate(model, asked, max_new_tokens=6, batch_size=1)
        for p, want in zip(asked, logits, strict=True):
            assert tiny.relative(model.logits(p).numpy(), want) < 1e-5
    for said in (batched, single):
        for got, (tokens, logprobs) in zip(said, wanted, strict=True):
            assert list(got.tokens) == tokens
            np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-4)
    assert [g.tokens for g in batched] != [g.tokens for g in generate(model, asked, max_new_tokens=6)]


@pytest.mark.parametrize("site", ["z", "q"])
@pytest.mark.parametrize("batch_size", [1, 4])
def test_mean_is_over_all_real_positions(name: str, model: mh.Model, site: str, batch_size: int) -> None:
    got = mean_activation(model, site, reference_trials(), batch_size=batch_size)
    want = plain_mean(name, tiny.plain(name), site, prompts(seed=7))
    assert got.shape == (3, 4, 16) and got.dtype == torch.float32
    assert tiny.relative(got.numpy(), want.numpy()) < 1e-5


def test_zero_at_q_still_writes_and_attends_evenly(llama: mh.Model) -> None:
    tokens = prompts()[0]
    seen = {}
    pairs = [("blocks.1.attn.hook_pattern", lambda t: seen.__setitem__("pattern", t[0].clone()))]
    with apply(llama, mh.zero_ablation(site="q").on("L1H2")), llama.hooks(pairs):
        llama.logits(tokens)
    pattern = seen["pattern"]
    even = torch.tril(torch.ones(20, 20)) / torch.arange(1, 21)[:, None]
    torch.testing.assert_close(pattern[2], even)
    assert not torch.allclose(pattern[1], even, atol=1e-2)


# -- nothing and several ----------------------------------------------------------------------------


def test_an_empty_head_set_costs_nothing(llama: mh.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    with counted(llama, monkeypatch) as calls, apply(llama, mh.mean_ablation(reference=reference_trials()).on([])):
        pass
    assert calls == {"run": 0, "prefill": 0}


@pytest.mark.parametrize("kind", ["none", "zero", "mean"])
def test_an_empty_head_set_changes_nothing_bit_for_bit(
    model: mh.Model, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = prompts()
    clean, logits = generate(model, asked, max_new_tokens=6), model.logits(asked[0])
    interventions = {
        "none": [],
        "zero": [mh.zero_ablation().on([])],
        "mean": [mh.mean_ablation(reference=reference_trials()).on([]), mh.zero_ablation(site="q").on([])],
    }[kind]
    with apply(model, *interventions), counted(model, monkeypatch) as calls:
        assert not model.backend.hooked() and model.backend.fast_prefill()
        again, same = generate(model, asked, max_new_tokens=6), model.logits(asked[0])
    assert again == clean  # tokens, texts and log-probabilities
    assert torch.equal(same, logits)
    assert calls["prefill"] == 1


def test_the_twin_is_not_used_under_an_intervention(model: mh.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    assert model.backend.fast_prefill()
    with apply(model, mh.zero_ablation().on("L0H0")):
        assert model.backend.hooked() and not model.backend.fast_prefill()
        generate(model, prompts(), max_new_tokens=2)
    assert model.backend.fast_prefill()


def test_two_interventions_act_together(name: str, model: mh.Model) -> None:
    hf = tiny.plain(name)
    reference, tokens = tiny.Reference(name, hf), prompts()[0]
    zero = {(0, 1): torch.zeros(16)}
    with plain_hooks(name, hf, "z", zero), plain_hooks(name, hf, "q", {(1, 2): torch.zeros(16)}):
        both = reference.logits(tokens)
    with plain_hooks(name, hf, "z", zero):
        one = reference.logits(tokens)
    assert tiny.relative(one, both) > 1e-3
    with apply(model, mh.zero_ablation(site="z").on("L0H1"), mh.zero_ablation(site="q").on("L1H2")):
        assert tiny.relative(model.logits(tokens).numpy(), both) < 1e-5
    with apply(model, mh.zero_ablation(site="z").on("L0H1")):
        assert tiny.relative(model.logits(tokens).numpy(), one) < 1e-5
        with apply(model, mh.zero_ablation(site="q").on("L1H2")):
            assert tiny.relative(model.logits(tokens).numpy(), both) < 1e-5
        assert tiny.relative(model.logits(tokens).numpy(), one) < 1e-5


def test_the_last_of_two_on_one_head_wins(llama: mh.Model) -> None:
    tokens = prompts()[0]
    mean = mh.mean_ablation(reference=reference_trials()).prepare(llama).on("L1H1")
    zero = mh.zero_ablation().on("L1H1")

    def logits(*interventions: Intervention) -> Tensor:
        with apply(llama, *interventions):
            return llama.logits(tokens)

    assert torch.equal(logits(zero, mean), logits(mean))
    assert torch.equal(logits(mean, zero), logits(zero))
    assert not torch.allclose(logits(mean), logits(zero), atol=1e-3)


def test_the_mean_is_that_of_the_untouched_model(llama: mh.Model) -> None:
    tokens = prompts()[0]
    mean = mh.mean_ablation(reference=reference_trials()).on("L2H0")
    zero = mh.zero_ablation().on("L0H0, L0H1, L0H2, L0H3")
    with apply(llama, zero, mean.prepare(llama)):
        wanted = llama.logits(tokens)
    with apply(llama, zero, mean):
        assert torch.equal(llama.logits(tokens), wanted)


def test_a_mean_cannot_be_taken_under_another_intervention(llama: mh.Model) -> None:
    mean = mh.mean_ablation(reference=reference_trials()).on("L2H0")
    prepared = mean.prepare(llama)
    with apply(llama, mh.zero_ablation().on("L0H0")):
        with pytest.raises(mh.InvalidInput, match=r"other hooks.*prepare\(model\) first"), apply(llama, mean):
            pass
        with apply(llama, prepared):
            llama.logits(prompts()[0])


# -- restoration ------------------------------------------------------------------------------------


def torch_hooks(model: Any) -> int:
    bridge = model.backend.bridge
    return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in bridge.modules())


@pytest.mark.parametrize("fails", [False, True])
def test_the_model_is_as_before(model: mh.Model, fails: bool) -> None:
    tokens = prompts()[0]
    before = model.logits(tokens)
    hooks, weights = torch_hooks(model), model.weight_hash()
    intervention = mh.mean_ablation(reference=reference_trials()).on(HEAD_SET)
    expected = pytest.raises(ZeroDivisionError, match="inside") if fails else contextlib.nullcontext()
    with expected, apply(model, intervention, mh.zero_ablation(site="q").on("L0H0")):
        assert not torch.equal(model.logits(tokens), before)
        if fails:
            raise ZeroDivisionError("inside")
    assert torch.equal(model.logits(tokens), before)
    assert torch_hooks(model) == hooks and not model.backend.hooked() and model.weight_hash() == weights


def test_an_exception_before_any_run_is_not_masked(llama: mh.Model) -> None:
    with pytest.raises(ZeroDivisionError), apply(llama, mh.zero_ablation().on("L0H0")):
        raise ZeroDivisionError
    assert not llama.backend.hooked()


def test_hooks_that_never_fire_are_told(llama: mh.Model) -> None:
    told = r"2 of 2 hooks never fired \(first: 'blocks\.0\.attn\.hook_z'\).*was not run inside the block"
    with pytest.raises(mh.HookNeverFired, match=told), apply(llama, mh.zero_ablation().on("L0H0, L1H3")):
        pass
    assert not llama.backend.hooked()


# -- values and refusals ----------------------------------------------------------------------------


def test_an_intervention_is_a_frozen_value() -> None:
    zero = mh.zero_ablation()
    on = zero.on("L0H1, L2H3")
    assert zero.heads is None and on.heads == mh.HeadSet(["L0H1", "L2H3"])
    assert zero.on((1, 2)).heads == zero.on("1.2").heads == zero.on([mh.Head(1, 2)]).heads
    with pytest.raises(dataclasses.FrozenInstanceError):
        zero.kind = "mean"  # pyright: ignore[reportAttributeAccessIssue]


def test_the_mean_records_its_reference() -> None:
    reference = reference_trials()
    record = mh.mean_ablation(site="q", reference=reference).describe()
    told = {"name": "reference", "hash": reference.hash, "n": 6}
    assert record == {"kind": "mean", "site": "q", "reference": told}
    assert mh.zero_ablation().describe() == {"kind": "zero", "site": "z"}


@pytest.mark.parametrize("head", ["L3H0", "L0H4"])
def test_heads_that_do_not_exist(llama: mh.Model, head: str) -> None:
    told = rf"{head} does not exist: the model has layers 0 to 2 and heads 0 to 3"
    with pytest.raises(mh.InvalidInput, match=told), apply(llama, mh.zero_ablation().on(head)):
        pass


@pytest.mark.parametrize(
    "make",
    [
        mh.zero_ablation,
        lambda site: mh.mean_ablation(site=site, reference=reference_trials()),
        lambda site: Intervention("zero", site),
    ],
)
def test_unknown_site(make: Any) -> None:
    with pytest.raises(mh.UnknownName, match=r"unknown site 'zz'.*Known: .*q, z\. These are the sites of"):
        make(site="zz")


def test_unknown_kind() -> None:
    with pytest.raises(mh.UnknownName, match=r"unknown intervention 'zeros'.*'zero'"):
        Intervention("zeros")


@pytest.mark.parametrize("reference", [None, [], mh.TrialSet([])])
def test_a_mean_needs_a_reference(reference: Any) -> None:
    with pytest.raises(mh.InvalidInput, match=r"needs a reference set.*reference=trials"):
        mh.mean_ablation(reference=reference)


def test_a_mean_made_by_hand_needs_a_reference() -> None:
    with pytest.raises(mh.InvalidInput, match="needs a reference set"):
        Intervention("mean").on("L0H0")


def test_reference_prompts_must_fit_the_model(llama: mh.Model) -> None:
    for tokens in ([5] * 129, [5, 97]):
        mean = mh.mean_ablation(reference=[mh.Trial(id="long", tokens=tokens)]).on("L0H0")
        with pytest.raises(mh.InvalidInput, match="'long'"), apply(llama, mean):
            pass


def test_means_of_another_model_are_refused(llama: mh.Model) -> None:
    foreign = dataclasses.replace(
        mh.mean_ablation(reference=reference_trials()).on("L0H0"), values=torch.zeros(3, 4, 8)
    )
    with pytest.raises(mh.InvalidInput, match=r"\(3, 4, 8\).*\(3, 4, 16\)"), apply(llama, foreign):
        pass


def test_a_shared_query_norm_warns_at_q_only() -> None:
    model, tokens = tiny.shared("olmo2"), prompts()[0]
    hf = tiny.plain("olmo2")
    with plain_hooks("olmo2", hf, "q", {(1, 2): torch.zeros(16)}):
        wanted = tiny.Reference("olmo2", hf).logits(tokens)
    told = "normalises the queries of all heads together.*ablate at 'z'"
    with pytest.warns(UserWarning, match=told), apply(model, mh.zero_ablation(site="q").on("L1H2")):
        assert tiny.relative(model.logits(tokens).numpy(), wanted) < 1e-5
    with apply(model, mh.zero_ablation(site="z").on("L1H2")):  # a warning here would be an error
        model.logits(tokens)


def test_scores_see_the_intervention(llama: mh.Model) -> None:
    trials = answered(llama, at=slice(0, 2))
    bare = mh.TrialSet(dataclasses.replace(t, answer=None) for t in trials)
    ca = mh.CircuitAnalysis(llama)
    with ca.intervene(mh.zero_ablation().on("L0H0, L2H3")) as same:
        assert same is ca
        dla = ca.score("dla", bare)
    assert dla.kept.all()
    clean = ca.score("dla", bare)
    assert not np.allclose(dla.values[:, 1], clean.values[:, 1], atol=1e-3)


def test_an_intervention_without_heads_is_refused(llama: mh.Model) -> None:
    with pytest.raises(mh.InvalidInput, match=r"names no heads.*\.on\("), apply(llama, mh.zero_ablation()):
        pass
    assert llama.ablations == [] and not llama.backend.hooked()


def test_threads_take_turns(llama: mh.Model) -> None:
    from concurrent.futures import ThreadPoolExecutor

    asked = prompts()[:2]
    clean = generate(llama, asked, max_new_tokens=4)

    def ablated() -> list:
        with apply(llama, mh.zero_ablation().on("L0H0, L1H1, L2H2")):
            return generate(llama, asked, max_new_tokens=4)

    alone = ablated()
    assert alone != clean
    with ThreadPoolExecutor(4) as pool:
        jobs = [pool.submit(ablated if i % 2 else lambda: generate(llama, asked, max_new_tokens=4)) for i in range(12)]
        for i, job in enumerate(jobs):
            assert job.result() == (alone if i % 2 else clean)


def test_a_mean_waits_for_whoever_holds_the_model(llama: mh.Model) -> None:
    from concurrent.futures import ThreadPoolExecutor
    from concurrent.futures import TimeoutError as StillWaiting

    with ThreadPoolExecutor(1) as pool:
        with llama.lock:
            job = pool.submit(mean_activation, llama, "z", reference_trials())
            with pytest.raises(StillWaiting):
                job.result(timeout=0.5)
            assert not llama.backend.hooked()
        assert torch.equal(job.result(), mean_activation(llama, "z", reference_trials()))


# -- all kinds, in and out of force ----------------------------------------------------------------


def every_kind() -> dict[str, Intervention]:
    """One of each, on heads of two layers."""
    reference = reference_trials()
    partners = {tuple(a): b for a, b in zip(prompts(), prompts(seed=3), strict=True)}
    made = {
        "zero": mh.zero_ablation(),
        "zero q": mh.zero_ablation(site="q"),
        "zero pattern": mh.zero_ablation(site="pattern"),
        "zero scores": mh.zero_ablation(site="attn_scores"),
        "mean": mh.mean_ablation(reference=reference),
        "mean_positional": mean_positional_ablation(reference=reference),
        "resample": resample_ablation(reference=reference),
        "patch": patch(partners),
        "bias": attention_bias(2.0, keys=[0, -1]),
        "prune": prune(),
    }
    return {name: one.on("L0H1, L1H2") for name, one in made.items()}


class Stopped(BaseException):
    """Neither an Exception nor Ctrl-C."""


@pytest.mark.parametrize("ends", [None, ValueError, KeyboardInterrupt, Stopped])
@pytest.mark.parametrize("kind", list(every_kind()))
def test_nothing_is_left_behind(llama: mh.Model, kind: str, ends: type[BaseException] | None) -> None:
    tokens = prompts()[0]
    before, hooks, weights = llama.logits(tokens), torch_hooks(llama), llama.weight_hash()

    def stop(t: Tensor) -> None:
        if ends is not None:
            raise ends

    expected = pytest.raises(ends) if ends is not None else contextlib.nullcontext()
    with expected, apply(llama, every_kind()[kind], mh.zero_ablation().on("L2H3")):
        assert len(llama.ablations) == 2 and len(llama.row_listeners) == 1
        assert not torch.equal(llama.logits(tokens), before)
        with llama.hooks([("blocks.1.attn.hook_out", stop)]):  # in the middle of a run
            llama.logits(tokens)
    assert torch.equal(llama.logits(tokens), before)
    assert torch_hooks(llama) == hooks and llama.weight_hash() == weights
    assert llama.ablations == [] and llama.row_listeners == [] and llama.rows is None
    assert llama.backend.running is None and not llama.backend.hooked()
    with llama.lock:
        pass


@pytest.mark.parametrize("kind", [k for k in every_kind() if k != "prune"])
def test_every_kind_tells_that_nothing_ran(llama: mh.Model, kind: str) -> None:
    with pytest.raises(mh.HookNeverFired, match="2 of 2 hooks never fired"), apply(llama, every_kind()[kind]):
        pass


def test_a_hook_that_the_model_does_not_pass_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from mechheads.backends.base import SITES

    model = tiny.shared("phi3")
    monkeypatch.setitem(SITES, "q", "attn.hook_rot_q")  # exists there, and never fires
    told = r"1 of 2 hooks never fired \(first: 'blocks\.1\.attn\.hook_rot_q'\).*does not pass through that hook"
    with (
        pytest.raises(mh.HookNeverFired, match=told),
        apply(model, mh.zero_ablation().on("L0H0"), mh.zero_ablation(site="q").on("L1H0")),
    ):
        model.logits(prompts()[0])
    assert not model.backend.hooked() and model.ablations == []


def test_a_prepared_mean_and_its_record_stay_as_they_are(llama: mh.Model) -> None:
    made = every_kind()["mean_positional"].prepare(llama)
    assert made.values is not None and made.values.shape == (30, 3, 4, 16)  # the longest prompt has 29
    kept = made.values.clone()
    with apply(llama, made):
        llama.logits(prompts()[0])
    assert torch.equal(made.values, kept) and made.prepare(llama) is made
    assert made.describe() == every_kind()["mean_positional"].describe()


def test_records_say_what_is_done() -> None:
    found = {name: one.describe() for name, one in every_kind().items()}
    assert found["prune"] == {"kind": "prune", "site": "weights", "heads": ["L0H1", "L1H2"]}
    assert found["resample"]["seed"] == 0 and found["resample"]["reference"]["n"] == 6
    assert found["patch"]["partners"]["n"] == 6 and len(found["patch"]["partners"]["hash"]) >= 16
    assert {k: found["bias"][k] for k in ("strength", "keys", "keys_are")} == {
        "strength": 2.0, "keys": [-1, 0], "keys_are": "positions",
    }  # fmt: skip
    assert len({str(one) for one in found.values()}) == len(found)
    assert mh.zero_ablation(positions=[2, -1]).describe()["positions"] == [2, -1]
    assert mh.zero_ablation(positions=3).positions == mh.zero_ablation().at([3]).positions == (3,)


# -- donors and partners ----------------------------------------------------------------------------


def test_a_draw_depends_on_seed_and_prompt_alone(llama: mh.Model) -> None:
    asked = prompts()
    own = mh.TrialSet([*reference_trials(), *(mh.Trial(id=f"o{i}", tokens=p) for i, p in enumerate(asked))])
    made = resample_ablation(reference=own, seed=4).on(HEAD_SET)
    with apply(llama, made):
        alone = [generate(llama, [p], max_new_tokens=4)[0] for p in asked]
        for batch_size, order in ((6, [0, 1, 2, 3, 4, 5]), (2, [5, 3, 1, 0, 2, 4]), (3, [2, 2, 0])):
            got = generate(llama, [asked[i] for i in order], max_new_tokens=4, batch_size=batch_size)
            for i, one in zip(order, got, strict=True):
                assert one.tokens == alone[i].tokens
                np.testing.assert_allclose(one.logprobs, alone[i].logprobs, atol=1e-4)
    with apply(llama, resample_ablation(reference=own, seed=5).on(HEAD_SET)):
        other = [generate(llama, [p], max_new_tokens=4)[0] for p in asked]
    assert sum(a.logprobs != b.logprobs for a, b in zip(alone, other, strict=True)) >= 3


@given(seed=st.integers(0, 2**40), prompt=st.lists(st.integers(0, 5), min_size=1, max_size=3), again=st.integers(0, 9))
@settings(max_examples=100, deadline=None)
def test_a_donor_is_another_prompt_of_the_set(seed: int, prompt: list[int], again: int) -> None:
    held = [[1], [2, 3], [1], prompt, [4, 4, 4], [0]]
    reference = mh.TrialSet(mh.Trial(id=f"r{i}", tokens=p) for i, p in enumerate(held))
    donor = donor_of(prompt, reference, seed)
    assert list(donor) in held and list(donor) != prompt
    assert donor == donor_of(tuple(prompt), reference, seed)


def test_all_donors_are_drawn() -> None:
    reference = mh.TrialSet(mh.Trial(id=f"r{i}", tokens=[i + 1]) for i in range(5))
    drawn = [donor_of([50 + i], reference, 0)[0] for i in range(500)]
    assert all(70 < drawn.count(i + 1) < 130 for i in range(5))


def test_a_prompt_that_is_all_there_is_has_no_donor(llama: mh.Model) -> None:
    alone = mh.TrialSet([mh.Trial(id="only", tokens=prompts()[0])], name="small")
    told = r"'small' holds no prompt but the one that is run.*give more trials"
    with apply(llama, resample_ablation(reference=alone).on("L0H0")):
        with pytest.raises(mh.InvalidInput, match=told):
            llama.logits(prompts()[0])
        llama.logits(prompts()[1])


def test_a_run_within_a_run_has_donors_of_its_own(llama: mh.Model) -> None:
    one, *others = prompts()[:4]
    with apply(llama, resample_ablation(reference=reference_trials()).on("L1H1, L2H0")):
        want = [llama.logits(p) for p in (one, *others)]
        tokens = torch.tensor([one])
        with llama.running([Row(tuple(one))]):
            assert all(torch.equal(llama.logits(p), w) for p, w in zip(others, want[1:], strict=True))
            got = llama.backend.run(tokens, torch.ones_like(tokens), None, last_only=False)[0]
    assert torch.equal(got, want[0])


def test_a_prompt_without_a_partner_is_refused(llama: mh.Model) -> None:
    one, other = prompts()[:2]
    told = r"prompt of 13 tokens that begins \[.*\] has no partner.*one for every prompt"
    with apply(llama, patch({tuple(one): one[::-1]}).on("L0H0")):
        llama.logits(one)
        with pytest.raises(mh.InvalidInput, match=told):
            generate(llama, [one, other], max_new_tokens=2)
        assert torch.equal(llama.logits(one), llama.logits(one))  # what was refused is not asked for again


def test_partners_are_looked_at_without_any_intervention(llama: mh.Model) -> None:
    """However the others are put in force: together, around or inside; hooks or weights."""
    tokens, clean = prompts()[0], prompts(seed=3)[0]
    every = [(layer, h) for layer in range(3) for h in range(4)]
    patched = patch({tuple(tokens): clean}).on("L2H0, L2H1")
    lent = resample_ablation(reference=reference_trials()).on("L2H2")
    for other in (mh.zero_ablation().on(every[:8]), prune().on(every[:8])):
        for taking in (patched, lent):
            with apply(llama, other, taking):
                want = llama.logits(tokens)
            with apply(llama, taking), apply(llama, other):
                assert torch.equal(llama.logits(tokens), want)
            if other.kind == "prune":
                with apply(llama, other), apply(llama, taking):
                    assert torch.equal(llama.logits(tokens), want)
            with apply(llama, other):
                assert not torch.equal(llama.logits(tokens), want)


def test_a_mean_under_pruned_heads_is_that_of_the_whole_model(llama: mh.Model) -> None:
    tokens, pruned = prompts()[0], prune().on("L0H0, L0H1, L0H2")
    for mean in (
        mh.mean_ablation(reference=reference_trials()),
        mean_positional_ablation(reference=reference_trials()),
    ):
        with apply(llama, pruned, mean.on("L2H1")):
            want = llama.logits(tokens)
        with apply(llama, pruned), apply(llama, mean.on("L2H1")):
            assert torch.equal(llama.logits(tokens), want)
    weights = llama.weight_hash()
    with apply(llama, pruned), apply(llama, prune().on("L0H0, L1H1")):
        llama.logits(tokens)
    assert llama.weight_hash() == weights


# -- where hooks at attention change nothing ---------------------------------------------------------


def test_whether_attention_can_be_edited_is_not_judged_under_another_intervention() -> None:
    tokens = prompts()[0]
    for name in ("llama", "opt"):
        model = tiny.fresh(name)
        dark = mh.zero_ablation(site="pattern").on("L1H1")
        with apply(tiny.shared(name), mh.zero_ablation().on("L0H0"), dark):
            want = tiny.shared(name).logits(tokens)
        assert model.site_effects == {}
        with apply(model, mh.zero_ablation().on("L0H0")), apply(model, dark):  # L0H0 is where it is tried
            assert torch.equal(model.logits(tokens), want)
        assert model.site_effects == {"pattern": name != "opt"}


def test_edits_that_would_meet_in_the_wrong_order_are_refused() -> None:
    model, tokens = tiny.shared("opt"), prompts()[0]
    bias, blind = attention_bias(2.0, keys=[0]).on("L1H1"), mh.zero_ablation(site="q").on("L1H1")
    told = r"layer 1 is under an intervention already, and OPTForCausalLM.*apply them together, in one call"
    for first, second in ((bias, blind), (blind, bias)):
        with apply(model, first):
            with pytest.raises(mh.InvalidInput, match=told), apply(model, second):
                pass
            with apply(model, mh.zero_ablation().on("L0H1")):
                model.logits(tokens)
    assert not model.backend.hooked() and model.row_listeners == []


def test_attention_that_cannot_be_rebuilt_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.fresh("opt")
    monkeypatch.setattr(model.backend, "score_scale", lambda layer: 0.3)
    told = r"'attn_scores' does not reach the head's output.*Intervene at 'z' or 'q'"
    with pytest.raises(mh.ModelRefused, match=told), apply(model, attention_bias(1.0, keys=[0]).on("L0H0")):
        pass
    assert not model.backend.hooked()


# -- refusals ---------------------------------------------------------------------------------------


_zero: Any = mh.zero_ablation
_patch: Any = patch
_bias: Any = attention_bias


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize(
    ("make", "told"),
    [
        (lambda: _zero(positions="prompts"), r"unknown positions 'prompts'.*'prompt'.*Or give indices"),
        (lambda: _zero(positions=[]), r"positions are \(\); give one of all, prompt, answer, or whole numbers"),
        (lambda: _zero(positions=[0.5]), r"positions are \[0\.5\]; give one of all, .*such as \(0, -1\)\."),
        (lambda: _zero(positions=None), r"positions are None; give one of all, prompt, answer"),
        (lambda: _zero(positions=True), r"positions are True; give one of all, prompt, answer"),
        (lambda: mh.mean_ablation(site="pattern", reference=reference_trials()), r"unknown site 'pattern'.*: q, z"),
        (lambda: Intervention("prune"), r"unknown site 'z'.*Known: weights.*sites of 'prune'"),
        (lambda: resample_ablation(), r"resample ablation needs prompts to draw from; pass reference=trials"),
        (lambda: resample_ablation(reference=[]), r"resample ablation needs prompts to draw from"),
        (lambda: resample_ablation(reference=reference_trials(), seed=-1), r"seed is -1; .*whole number from 0"),
        (lambda: mean_positional_ablation(), r"needs a reference set"),
        (lambda: _patch({}), r"patching needs partners; give the tokens of each prompt's partner by its own"),
        (lambda: _patch([(1, 2)]), r"partners are a list; give the tokens of each prompt's partner"),
        (lambda: _patch({(1, 2): (1, 2, 3)}), r"prompt of 2 tokens has a partner of 3; .*equal in length"),
        (lambda: _patch({(1, 2): ("a", 2)}), r"a partner are \('a', 2\); give whole numbers"),
        (lambda: _bias(1.0), r"say where attention is biased: tokens=.*keys="),
        (lambda: _bias(1.0, tokens=[1], keys=[1]), r"say where attention is biased"),
        (lambda: _bias(1.0, tokens=[]), r"no keys to bias attention to"),
        (lambda: _bias(1.0, tokens=[-1]), r"there is no token -1; .*keys="),
        (lambda: _bias(1.0, tokens=["the"]), r"tokens are \['the'\]; give whole numbers"),
        (lambda: _bias(1.0, keys="abc"), r"keys are 'abc'; give whole numbers"),
        (lambda: _bias(float("nan"), keys=[0]), r"strength is nan; .*-10000 to 10000"),
        (lambda: _bias(1e5, keys=[0]), r"strength is 100000\.0; .*-10000 to 10000"),
        (lambda: _bias("2", keys=[0]), r"strength is '2'; give a number"),
        (lambda: prune().at("answer"), r"pruned weights act at all positions; positions='answer' cannot be had"),
        (lambda: mh.zero_ablation().on("H3"), r"H3"),
    ],
)  # fmt: skip
def test_what_makes_no_sense_is_refused(make: Any, told: str) -> None:
    with pytest.raises(mh.InvalidInput, match=told):
        make()


@pytest.mark.usefixtures("as_users_run")
def test_numbers_of_numpy_are_numbers(llama: mh.Model) -> None:
    tokens = np.array(prompts()[0])
    assert _zero(positions=np.array([2, -1])).positions == (2, -1) and _zero(positions=tokens[0]).positions == (14,)
    assert _bias(1.0, tokens=tokens[:2]).keys == frozenset({14, 60}) and _bias(1.0, keys=tokens[:1] * 0).keys == (0,)
    assert _patch({tuple(tokens): tokens}).partners == {tuple(prompts()[0]): tuple(prompts()[0])}
    clean = llama.logits(prompts()[0])
    with apply(llama, _patch({tuple(tokens): tokens}).on("L0H0")):
        assert torch.equal(llama.logits(prompts()[0]), clean)


@pytest.mark.parametrize(
    ("intervention", "told"),
    [
        (mh.zero_ablation(positions=[0, 13]), r"acts at the positions \[0, 13\], but a prompt has 13 tokens, so 13 is"),
        (
            mh.zero_ablation(positions=-14),
            r"at the positions \[-14\], but a prompt has 13 tokens, so -14 is",
        ),
        (attention_bias(1.0, keys=[5, 13]), r"acts on the keys \[5, 13\], but a prompt has 13 tokens.*give indices"),
    ],
)
def test_positions_that_a_prompt_does_not_have(llama: mh.Model, intervention: Intervention, told: str) -> None:
    long, short = prompts()[:2]
    with apply(llama, intervention.on("L0H0")):
        generate(llama, [long], max_new_tokens=2)
        with pytest.raises(mh.InvalidInput, match=told):
            generate(llama, [long, short], max_new_tokens=2)
        assert llama.rows is None


def test_tokens_of_another_model_are_refused(llama: mh.Model) -> None:
    foreign = mh.TrialSet([mh.Trial(id="a", tokens=[5, 97]), mh.Trial(id="b", tokens=[6])])
    cases = [
        (resample_ablation(reference=foreign), r"reference trial 'a' holds token ids outside 0 to 96"),
        (patch({(5, 6): (5, 97)}), r"a partner of 2 tokens holds token ids outside"),
        (
            attention_bias(1.0, tokens=[3, 97]),
            r"list of tokens that attention is biased to holds token ids outside",
        ),
    ]
    for intervention, told in cases:
        with pytest.raises(mh.InvalidInput, match=told), apply(llama, intervention.on("L0H0")):
            pass
    assert not llama.backend.hooked() and llama.ablations == []


@pytest.mark.parametrize("kind", ["patch", "resample", "bias"])
def test_a_run_that_does_not_say_whose_rows_they_are(llama: mh.Model, kind: str) -> None:
    tokens = torch.tensor([prompts()[0]])
    with apply(llama, every_kind()[kind]):
        llama.logits(prompts()[0])
        with pytest.raises(mh.InvalidInput, match="does not say which prompt a row is; run it by"):
            llama.backend.run(tokens, torch.ones_like(tokens), None, last_only=True)
        with pytest.raises(mh.InvalidInput, match=r"run past mechheads.*run it by|which prompt a row is"):
            llama.backend.bridge(tokens)  # pyright: ignore[reportAttributeAccessIssue]


def test_donors_of_a_hooked_model_are_refused(llama: mh.Model) -> None:
    with llama.hooks([("blocks.0.hook_mlp_out", lambda t: t * 0.5)]):
        told = r"other hooks on the model, so the other prompt's activation would be that of an altered model"
        for kind in ("resample", "patch"):
            with pytest.raises(mh.InvalidInput, match=told), apply(llama, every_kind()[kind]):
                pass


# -- in the rest of the package ---------------------------------------------------------------------


def spelled_out() -> tuple[list[Intervention], list[Edit], dict]:
    """Interventions that need to know prompts and positions, as ours and as plain ones."""
    asked = prompts()
    partners = {tuple(p): tuple(q) for p, q in zip(asked, prompts(seed=3), strict=True)}
    heads, others = ((0, 1), (2, 2)), ((1, 0), (1, 3))
    tokens = frozenset(range(3, 50))
    held = tuple(tuple(t.tokens) for t in reference_trials())
    ours = [
        resample_ablation(reference=reference_trials(), seed=2).on(list(heads)),
        patch(partners, site="q", positions="answer").on(list(others)),
        attention_bias(1.5, tokens=sorted(tokens)).on(list(others)),
    ]
    edits = [
        Edit("resample", "z", heads, prompts=held, seed=2),
        Edit("patch", "q", others, "answer", partners=partners),
        Edit("bias", "attn_scores", others, strength=1.5, tokens=tokens),
    ]
    return ours, edits, partners


def test_answers_and_scores_under_interventions_that_look_at_the_prompt(llama: mh.Model) -> None:
    ours, edits, _ = spelled_out()
    slow, ca = Plain("llama"), mh.CircuitAnalysis(llama, progress=False)
    asked = prompts()[:3]
    with ca.intervene(*ours):
        answers = [ca.generate(tokens=p, max_new_tokens=4) for p in asked]
    for p, answer in zip(asked, answers, strict=True):
        said, logprobs, _ = slow.greedy(p, edits, 4)
        assert list(answer.tokens) == said
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=1e-4)
    trials = [mh.Trial(id=f"t{i}", tokens=p, spans={"needle": (2, 5)}) for i, p in enumerate(asked)]
    with ca.intervene(*ours, mh.zero_ablation().on("L2H0")):
        found = ca.score(["attention_spatial", "dla"], trials, max_new_tokens=4)
        one_by_one = ca.score("dla", trials[::-1], max_new_tokens=4, batch_size=1)
    dla = found["dla"]
    # A head that is replaced at z has no score of its own.
    assert np.isnan(dla.values[:, 2, 0]).all() and (np.abs(dla.values[:, 2, 1]) > 0).all()
    np.testing.assert_allclose(one_by_one.values[::-1], dla.values, atol=1e-4)
    assert [i["kind"] for i in dla.meta["interventions"]] == ["resample", "patch", "bias", "zero"]


def test_candidates_under_interventions_that_look_at_the_prompt(llama: mh.Model) -> None:
    from mechheads.candidates import candidate_logprobs

    ours, edits, _ = spelled_out()
    slow, ca = Plain("llama"), mh.CircuitAnalysis(llama, progress=False)
    texts = ("w5", "w9 w31", "w60 w7 w12")
    trials = [
        mh.Trial(id=f"q{i}", tokens=p, spans={"statement": (1, 5)}, candidates=texts, label=0)
        for i, p in enumerate(prompts()[:3])
    ]
    with ca.intervene(*ours):
        got = candidate_logprobs(llama, trials, batch_size=3)
        qk = ca.score("qk", trials, batch_size=2)
    clean = candidate_logprobs(llama, trials)
    assert np.abs(np.subtract(clean, got)).max() > 1e-2
    for trial, some, scored in zip(trials, got, qk.baseline, strict=True):
        for text, logprob, again in zip(texts, some, scored, strict=True):
            tokens = [int(word[1:]) for word in text.split()]
            n = len(trial.tokens)
            logits = slow.logits([*trial.tokens, *tokens], edits, n)[n - 1 : -1]
            each = logits - np.logaddexp.reduce(logits, axis=-1, keepdims=True)
            want = sum(each[i, token] for i, token in enumerate(tokens))
            assert logprob == pytest.approx(want, abs=1e-4) and again == pytest.approx(want, abs=1e-4)


@pytest.mark.parametrize("compatible", [False, True])
def test_a_bridge_of_the_users_own(llama: mh.Model, compatible: bool) -> None:
    """In the compatibility mode masked scores are minus infinity."""
    from transformer_lens.model_bridge import TransformerBridge

    bridge = TransformerBridge.boot_transformers(str(tiny.folder("llama")), hf_model=tiny.plain("llama"))
    if compatible:
        bridge.enable_compatibility_mode(no_processing=True)
    model = mh.load(bridge, tokenizer=llama.tokenizer)
    assert model.spec.weights == "raw"
    asked = prompts()[:3]
    for name, intervention in every_kind().items():
        answers = []
        for one in (model, llama):
            with apply(one, intervention):
                answers.append((generate(one, asked, max_new_tokens=3), one.logits(asked[0])))
        (said, logits), (other, want) = answers
        assert [g.tokens for g in said] == [g.tokens for g in other], name
        assert tiny.relative(tiny.array(logits), tiny.array(want)) < 1e-5, name


def test_a_null_prompt_is_altered_as_itself() -> None:
    """QRHead's null query runs beside the trial's own; a resample draws its donor for it, not for the trial."""
    model = tiny.shared("llama")
    tokens = tuple(tiny.prompt(18, seed=4))
    trial = mh.Trial(id="t", tokens=tokens, spans={"needle": (3, 6), "question": (12, 15)})
    null = mh.Trial(
        id="null", tokens=(*tokens[:12], 20, 21), spans={"needle": (3, 6), "question": (12, 14)}
    )  # as far as its rows are read
    ca = mh.CircuitAnalysis(model, progress=False)
    resample = mh.resample_ablation(reference=reference_trials(), seed=1).on([(0, 0), (0, 1), (0, 2), (1, 3)])

    def scored(trial: mh.Trial, **options: Any) -> np.ndarray:
        return np.nan_to_num(ca.score("qrhead", trial, rouge_threshold=None, **options).values[0])

    with apply(model, resample):
        want = scored(trial, calibrated=False) - scored(null, calibrated=False)
        got = scored(trial, null_query=[20, 21])
    np.testing.assert_allclose(got, want, atol=1e-5)
    assert np.abs(want).max() > 1e-3
