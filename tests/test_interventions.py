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
from torch import Tensor, nn

import mechheads as mh
from mechheads.generate import generate
from mechheads.interventions import Intervention, apply, mean_activation

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
    with pytest.raises(mh.UnknownName, match=r"unknown site 'zz'.*Known: q, z"):
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
