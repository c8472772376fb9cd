"""Every architecture against its plain Hugging Face model, taken apart by loops."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import tiny
import torch
from torch import Tensor

import mechheads as mh
from mechheads.capture import TrialCapture, capture
from mechheads.generate import generate
from mechheads.interventions import apply
from mechheads.model import Model

SCORES = ["locos", "attention_spatial", "dla"]
EVERYTHING = ("q", "k", "v", "z", "pattern")

each_architecture = pytest.mark.parametrize("name", tiny.ARCHITECTURES)


def score(model: Model, trials: Sequence[mh.Trial], **options: object) -> dict[str, mh.HeadScores]:
    return mh.CircuitAnalysis(model).score(SCORES, trials, max_new_tokens=5, **options)


def one_capture(name: str, i: int = 0, *, needs: Sequence[str] = EVERYTHING) -> tuple[TrialCapture, tiny.Case]:
    case = tiny.cases(name)[i]
    [taken] = capture(tiny.shared(name), [case.trial], needs=needs, max_new_tokens=5)
    assert taken.decoded.tokens == case.said
    return taken, case


@each_architecture
def test_verifies_at_load(name: str) -> None:
    model = tiny.shared(name)
    found = model.verification
    assert found is not None and found.normed_exact and found.qk_exact
    assert 0 < found.head_sum < 1e-5 and 0 < found.cache < 1e-5 and found.prefill is not None
    assert model.spec.weights == "raw"
    assert [model.backend.window(i) for i in range(tiny.LAYERS)] == list(tiny.windows(name))


@each_architecture
def test_logits_are_those_of_hugging_face(name: str) -> None:
    tokens = tiny.prompt(26, seed=3)
    got = tiny.array(tiny.shared(name).logits(tokens))
    assert tiny.relative(got, tiny.Reference(name).run(tokens).logits) < 1e-5


@each_architecture
def test_heads_sum_to_the_attention_output(name: str) -> None:
    taken, case = one_capture(name, 1)
    reference = tiny.Reference(name)
    run = reference.run([*case.trial.tokens, *case.said])
    model = tiny.shared(name)
    for layer in range(tiny.LAYERS):
        acts = taken.layer(layer)
        w_o, b_o = tiny.array(model.W_O(layer)), tiny.array(model.b_O(layer))
        pattern, v, z = (tiny.array(acts.need(part)) for part in ("pattern", "v", "z"))
        group = tiny.HEADS // len(v)
        got, from_z = (np.zeros((len(case.said), tiny.WIDTH)) for _ in range(2))
        for step in range(len(case.said)):
            got[step], from_z[step] = b_o, b_o
            for head in range(tiny.HEADS):
                from_z[step] += z[head, step] @ w_o[head]
                for key in range(len(acts.tokens)):
                    got[step] += pattern[head, step, key] * (v[head // group, key] @ w_o[head])
        want = run.attention_out[layer][len(case.trial.tokens) - 1 : -1]
        assert tiny.relative(got, want) < 1e-5
        assert tiny.relative(from_z, want) < 1e-5


@each_architecture
def test_captured_rows_are_those_of_an_uncached_run(name: str) -> None:
    taken, case = one_capture(name, 1)
    run = tiny.Reference(name).run([*case.trial.tokens, *case.said])
    first = len(case.trial.tokens) - 1
    for layer, window in enumerate(tiny.windows(name)):
        acts = taken.layer(layer)
        assert np.abs(tiny.array(acts.need("pattern")) - run.attention[layer][:, first:-1]).max() < 1e-5
        v = tiny.array(acts.need("v")).transpose(1, 0, 2)
        assert tiny.relative(v[:-1], run.v[layer][:-1]) < 1e-5
        assert not v[-1].any()  # the last token was said, not run
        for step, row in enumerate(acts.visible.tolist()):
            query = first + step
            keys = range(0 if window is None else max(0, query - window + 1), query + 1)
            assert [key for key, seen in enumerate(row) if seen] == list(keys)


@each_architecture
def test_normed_parts_sum_to_the_logit(name: str) -> None:
    model = tiny.shared(name)
    taken, case = one_capture(name)
    tokens = [*case.trial.tokens, *case.said]
    reference = tiny.Reference(name)
    run = reference.run(tokens)
    mlps: dict[int, Tensor] = {}
    hooks = [(f"blocks.{i}.hook_mlp_out", lambda t, i=i: mlps.__setitem__(i, t[0])) for i in range(tiny.LAYERS)]
    with model.hooks(hooks):
        model.logits(tokens)
    heads = sum(taken.layer(i).phi("normed").double().sum((0, 2)) for i in range(tiny.LAYERS))
    assert isinstance(heads, Tensor)
    heads = heads.detach()
    u = reference.w_u()
    for step, token in enumerate(case.said):
        at = len(case.trial.tokens) - 1 + step
        parts = [run.embedding[at], *(tiny.array(mlps[i][at]) for i in range(tiny.LAYERS))]
        parts += [reference.b_o(i) for i in range(tiny.LAYERS)]  # no architecture has both this and a post norm
        total = float(heads[step]) + float(reference.final_bias() @ u[:, token])
        total += sum(reference.through_final_norm(part, run.resid[at]) @ u[:, token] for part in parts)
        assert abs(total - run.uncapped[at, token]) < 1e-4
        assert abs(float(heads[step])) > 1e-3  # the heads' share is not a rounding error


@each_architecture
def test_queries_and_keys_reproduce_attention(name: str) -> None:
    model = tiny.shared(name)
    taken, case = one_capture(name, 1)
    seen: dict[int, Tensor] = {}
    hooks = [
        (f"blocks.{i}.attn.hook_attn_scores", lambda t, i=i: seen.__setitem__(i, t[0])) for i in range(tiny.LAYERS)
    ]
    with model.hooks(hooks):
        model.logits([*case.trial.tokens, *case.said])
    run = tiny.Reference(name).run([*case.trial.tokens, *case.said])
    cap = 50.0 if name == "gemma2" else None
    first = len(case.trial.tokens) - 1
    for layer in range(tiny.LAYERS):
        acts = taken.layer(layer)
        q, k = tiny.array(acts.need("q")), tiny.array(acts.need("k"))
        scores = np.zeros((tiny.HEADS, len(case.said), k.shape[1]))
        for head in range(tiny.HEADS):
            scores[head] = q[head] @ k[head // (tiny.HEADS // len(k))].T * model.backend.score_scale(layer)
        scores = scores if cap is None else cap * np.tanh(scores / cap)
        visible = np.broadcast_to(acts.visible.numpy(), scores.shape)
        assert scores[visible].std() > 0.1
        if name != "opt":  # there, this hook holds the pattern
            theirs = tiny.array(seen[layer])[:, first:-1]
            assert tiny.relative(scores[visible], theirs[visible]) < 1e-4
        # The log of the attention weights differs from the scores by one number a row.
        log = np.log(np.where(visible, run.attention[layer][:, first:-1], 1.0))
        gap = np.where(visible, log - scores, np.nan)
        assert np.nanmax(np.nanmax(gap, -1) - np.nanmin(gap, -1)) < 1e-4


@each_architecture
@pytest.mark.parametrize("head", [(0, 1), (1, 3), (2, 0)])
def test_zero_ablation_is_zeroing_the_head_in_the_weights(name: str, head: tuple[int, int]) -> None:
    model = tiny.shared(name)
    case = tiny.cases(name)[0]
    reference = tiny.Reference(name)
    before = reference.logits(case.trial.tokens)
    reference.zero_head(*head)
    want = reference.logits(case.trial.tokens)
    assert tiny.relative(want, before) > 1e-3
    said, logprobs = reference.greedy(case.trial.tokens, 5)
    with apply(model, mh.zero_ablation().on([head])):
        got = tiny.array(model.logits(case.trial.tokens))
        [answer] = generate(model, [case.trial.tokens], max_new_tokens=5)
    assert tiny.relative(got, want) < 1e-5
    assert list(answer.tokens) == said
    assert np.abs(np.subtract(answer.logprobs, logprobs)).max(initial=0) < 1e-4
    assert tiny.relative(tiny.array(model.logits(case.trial.tokens)), before) < 1e-5


@each_architecture
def test_zero_query_attends_uniformly_and_still_writes(name: str) -> None:
    model = tiny.shared(name)
    case = tiny.cases(name)[1]
    layer, head = 1, 2
    intervention = mh.zero_ablation(site="q").on([(layer, head)])
    flat = name in ("olmo2", "olmo3")
    assert model.backend.flat_qk_norm is flat
    if flat:
        with pytest.warns(UserWarning, match="normalises the queries of all heads"), apply(model, intervention):
            [taken] = capture(model, [case.trial], needs=EVERYTHING, max_new_tokens=3)
    else:
        with apply(model, intervention):
            [taken] = capture(model, [case.trial], needs=EVERYTHING, max_new_tokens=3)
    [before] = capture(model, [case.trial], needs=EVERYTHING, max_new_tokens=3)
    acts = taken.layer(layer)
    for row, visible in zip(acts.need("pattern")[head], acts.visible, strict=True):
        weights = row[visible]
        assert (weights - weights.mean()).abs().max() < 1e-6
        # In gpt-oss part of the mass goes to the sink.
        assert 0.1 < weights.sum() < 0.999 if name == "gptoss" else abs(float(weights.sum()) - 1) < 1e-5
    assert float(acts.need("z")[head].abs().max()) > 1e-2
    there = before.layer(layer).need("pattern")[head][before.layer(layer).visible]
    assert there.std() > 1e-3  # it did not attend uniformly before


@each_architecture
def test_scores_are_those_of_a_loop(name: str) -> None:
    cases = tiny.cases(name)
    got = score(tiny.shared(name), [case.trial for case in cases])
    exact = 1e-5 if name in ("gpt2", "llama", "llama_mqa") else 1e-4
    reference = tiny.Reference(name)
    for i, case in enumerate(cases):
        want = tiny.loop_scores(name, case, reference)
        for method in SCORES:
            record = got[method].records[i]
            assert got[method].kept[i], record["reason"]
            assert record["answer_steps"] == case.steps
            assert got[method].weights[i] == len(case.steps)
            assert tiny.relative(got[method].values[i], want[method]) < exact, (method, i)
            # Where every layer's window has moved past the needle there is nothing to contrast.
            gone = name == "mistral" and i in (0, 2) and method != "dla"
            assert (np.abs(want[method]).max() > 1e-3) is not gone
    assert len({len(case.steps) for case in cases}) > 1


@each_architecture
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_and_company_change_nothing(name: str, padding: str) -> None:
    model = tiny.shared(name)
    trials = [case.trial for case in tiny.cases(name)]
    alone = score(model, trials, batch_size=1)
    if padding == "right" and name in tiny.WINDOWS:
        with pytest.raises(mh.InvalidInput, match="sliding windows"):
            score(model, trials, padding=padding)
        return
    for some in (trials, trials[::-1], [trials[1], trials[3]]):
        got = score(model, some, padding=padding, batch_size=len(some))
        for method in SCORES:
            for trial_id, values in zip(got[method].trial_ids, got[method].values, strict=True):
                want = alone[method].values[alone[method].trial_ids.index(trial_id)]
                assert tiny.relative(values, want) < 1e-4, (method, trial_id)


@each_architecture
def test_prompts_of_one_token_and_of_the_whole_context(name: str) -> None:
    """A row ends where its own context ends, whatever the length of its neighbours."""
    model = tiny.shared(name)
    prompts = [[11], tiny.prompt(tiny.N_CTX - 2, seed=5), tiny.prompt(12, seed=6), [12]]
    reference = tiny.Reference(name)
    together = generate(model, prompts, max_new_tokens=6)
    for i, tokens in enumerate(prompts):
        [alone] = generate(model, [tokens], max_new_tokens=6)
        said, logprobs = reference.greedy(tokens, min(6, tiny.N_CTX - len(tokens) + 1))
        for answer in (alone, together[i]):
            assert list(answer.tokens) == said
            assert np.abs(np.subtract(answer.logprobs, logprobs)).max(initial=0) < 1e-4
    assert len(together[1].tokens) <= 3


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3"])
def test_half_precision_verifies_at_its_own_rounding(name: str) -> None:
    model = mh.load(tiny.folder(name), dtype="bfloat16")
    assert model.spec.dtype == "bfloat16"
    case = tiny.cases(name)[3]
    got = score(model, [case.trial])["dla"]
    assert got.values.dtype == np.float32 and np.isfinite(got.values).all()
    assert torch.equal(model.W_U.float().bfloat16(), model.W_U)
