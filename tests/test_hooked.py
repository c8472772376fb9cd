"""HookedTransformer (TransformerLens 3.9) with the same weights as the bridge gives the same numbers."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers as hf
from test_interventions_everywhere import TRIALS, check, compositions, kinds, seen_under

import mechheads as mh
from mechheads.capture import capture
from mechheads.generate import generate
from mechheads.interventions import apply, attention_bias, patch, prune, resample_ablation
from mechheads.lens import TunedLens
from mechheads.lens_fit import fit_lens
from mechheads.model import Model

pytestmark = [
    pytest.mark.tl3,
    pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning"),
]

NAMES = tuple("olmo2_mha" if name == "olmo2" else name for name in tiny.ARCHITECTURES)
SCORES = ["locos", "attention_spatial", "dla"]
PARTS = ("q", "k", "v", "z", "pattern", "final_scale", "post_scale")
RAW = {
    "fold_ln": False,
    "center_writing_weights": False,
    "center_unembed": False,
    "fold_value_biases": False,
}

each_architecture = pytest.mark.parametrize("name", NAMES)


def lens() -> Any:
    """TransformerLens 3.9; asked for late and by name, because 4 has no such classes."""
    return importlib.import_module("transformer_lens")


def loading() -> Any:
    """Its conversion of Hugging Face models."""
    return importlib.import_module("transformer_lens.loading_from_pretrained")


def neutral(name: str) -> str:
    """The model's folder under a name that says nothing: TransformerLens guesses architectures from names."""
    folder = tiny.folder(name).parent / f"number-{tiny.ARCHITECTURES.index(name.removesuffix('_mha'))}"
    if not folder.exists():
        folder.symlink_to(tiny.folder(name), target_is_directory=True)
    return str(folder)


def hooked_config(name: str, model: Any, *, fold_ln: bool) -> Any:
    """TransformerLens' configuration of a tiny model; three families are known to it by hub id alone."""

    def known(source: str, like: Any) -> Any:
        return loading().get_pretrained_model_config(
            source, hf_cfg=like.config.to_dict(), fold_ln=fold_ln, device="cpu", n_ctx=tiny.N_CTX
        )

    changes: dict[str, Any]
    if name == "olmo2_mha":
        like = known(neutral("olmo3"), model).to_dict()
        changes = {
            "original_architecture": "Olmo2ForCausalLM", "use_local_attn": False, "n_key_value_heads": None,
            "attn_types": ["global"] * tiny.LAYERS, "rotary_base": model.config.rope_parameters["rope_theta"],
        }  # fmt: skip
    elif name in ("gemma2", "gemma3"):
        like = known({"gemma2": "google/gemma-2-2b", "gemma3": "google/gemma-3-1b-it"}[name], model).to_dict()
        changes = {
            "d_model": tiny.WIDTH, "d_head": tiny.D_HEAD, "rotary_dim": tiny.D_HEAD, "n_heads": tiny.HEADS,
            "n_key_value_heads": 2, "d_mlp": 96, "n_layers": tiny.LAYERS, "n_ctx": tiny.N_CTX,
            "window_size": tiny.WINDOW, "attn_scale": math.sqrt(24), "d_vocab_out": tiny.VOCAB,
            "attn_types": ["global" if w is None else "local" for w in tiny.windows(name)],
        }  # fmt: skip
    else:
        return known(neutral(name), model)
    return lens().HookedTransformerConfig.from_dict({**like, **changes})


def hooked_transformer(name: str, **processing: bool) -> Any:
    """A HookedTransformer with the weights of the tiny model; raw unless asked otherwise."""
    model = tiny.plain(name)
    options = {**RAW, **processing}
    config = hooked_config(name, model, fold_ln=options["fold_ln"])
    weights = loading().get_pretrained_state_dict(neutral(name), config, model, dtype=torch.float32)
    words = hf.PreTrainedTokenizerFast.from_pretrained(tiny.folder(name))
    out = lens().HookedTransformer(config, tokenizer=words, move_to_device=False)
    out.load_and_process_state_dict(weights, **options)
    return out


@functools.cache
def hooked(name: str) -> Model:
    """Loaded once; for tests that leave it as it is."""
    # HookedTransformer reads the tokenizer again, which for Qwen2 finds another.
    words = hf.PreTrainedTokenizerFast.from_pretrained(tiny.folder(name))
    return mh.load(hooked_transformer(name), tokenizer=words)


def score(model: Model, trials: Sequence[mh.Trial], **options: Any) -> dict[str, mh.HeadScores]:
    return mh.CircuitAnalysis(model).score(SCORES, trials, max_new_tokens=5, **options)


def trials_of(name: str) -> list[mh.Trial]:
    return [case.trial for case in tiny.cases(name)]


@each_architecture
def test_verifies_and_agrees_with_hugging_face(name: str) -> None:
    model = hooked(name)
    found = model.verification
    assert found is not None and found.normed_exact and found.qk_exact
    assert model.spec.backend == "HookedTransformer"
    assert model.spec.weights == "raw"
    tokens = tiny.prompt(26, seed=3)
    assert tiny.relative(tiny.array(model.logits(tokens)), tiny.Reference(name).logits(tokens)) < 1e-5


@each_architecture
def test_adapter_says_what_the_bridge_says(name: str) -> None:
    model, bridge = hooked(name), tiny.shared(name)
    for field in ("architecture", "n_layers", "n_heads", "n_key_value_heads", "d_head", "d_model", "d_vocab", "n_ctx"):
        assert getattr(model.spec, field) == getattr(bridge.spec, field), field
    ours, theirs = model.backend, bridge.backend
    for field in ("logit_softcap", "score_softcap", "flat_qk_norm"):
        assert getattr(ours, field) == getattr(theirs, field), field
    assert ours.has_sinks() == theirs.has_sinks() == (name == "gptoss")
    assert model.stop_tokens == bridge.stop_tokens
    assert torch.equal(model.W_U, bridge.W_U)
    assert torch.equal(model.b_U, bridge.b_U)
    pairs = [(model.final_norm, bridge.final_norm)]
    for layer in range(tiny.LAYERS):
        assert torch.equal(model.W_O(layer), bridge.W_O(layer))
        assert torch.equal(model.b_O(layer), bridge.b_O(layer))
        assert ours.window(layer) == theirs.window(layer) == tiny.windows(name)[layer]
        assert ours.score_scale(layer) == pytest.approx(theirs.score_scale(layer))
        mine, other = ours.post_norm(layer), theirs.post_norm(layer)
        assert (mine is None) is (other is None)
        if mine is not None and other is not None:
            pairs.append((mine[0], other[0]))
    for mine, other in pairs:
        assert mine.centers is other.centers
        for a, b in ((mine.weight, other.weight), (mine.bias, other.bias)):
            assert (a is None) is (b is None)
            assert a is None or b is None or torch.allclose(a, b)


@each_architecture
def test_captures_agree_with_the_bridge(name: str) -> None:
    trials = trials_of(name)
    some, others = (
        capture(model, trials, needs=PARTS[:5], max_new_tokens=5) for model in (hooked(name), tiny.shared(name))
    )
    for one, other in zip(some, others, strict=True):
        assert one.decoded.tokens == other.decoded.tokens
        assert len(one.decoded.tokens) == 5
        for layer in range(tiny.LAYERS):
            a, b = one.layer(layer), other.layer(layer)
            assert torch.equal(a.visible, b.visible)
            for part in PARTS:
                x, y = getattr(a, part), getattr(b, part)
                assert (x is None) is (y is None), part
                if x is not None:
                    assert tiny.relative(tiny.array(x), tiny.array(y)) < 1e-4, (part, layer)


@each_architecture
@pytest.mark.parametrize("unembed", ["raw", "normed", "centered"])
def test_scores_agree_with_the_bridge_and_with_a_loop(name: str, unembed: str) -> None:
    got, want = (score(model, trials_of(name), unembed=unembed) for model in (hooked(name), tiny.shared(name)))
    reference = tiny.Reference(name)
    for i, case in enumerate(tiny.cases(name)):
        loop = tiny.loop_scores(name, case, reference)
        for method in SCORES:
            assert got[method].kept[i] and want[method].kept[i]
            assert tiny.relative(got[method].values[i], want[method].values[i]) < 1e-4, (method, i)
            if unembed == "raw":
                assert tiny.relative(got[method].values[i], loop[method]) < 1e-4, (method, i)


@each_architecture
@pytest.mark.parametrize("site", ["z", "q"])
@pytest.mark.parametrize("kind", ["zero", "mean"])
def test_ablated_generation_agrees_with_the_bridge(name: str, site: str, kind: str) -> None:
    trials = trials_of(name)
    kinds = {"zero": mh.zero_ablation(site=site), "mean": mh.mean_ablation(site=site, reference=trials[:2])}
    intervention = kinds[kind].on([(0, 1), (1, 2), (2, 3)])
    prompts = [trial.tokens for trial in trials]
    answers = []
    for model in (hooked(name), tiny.shared(name)):
        if site == "q" and name.startswith("olmo"):
            with pytest.warns(UserWarning, match="all heads together"), apply(model, intervention):
                answers.append(generate(model, prompts, max_new_tokens=5))
        else:
            with apply(model, intervention):
                answers.append(generate(model, prompts, max_new_tokens=5))
    plain = generate(hooked(name), prompts, max_new_tokens=5)
    moved = 0.0
    for one, other, before in zip(*answers, plain, strict=True):
        assert one.tokens == other.tokens
        assert np.abs(np.subtract(one.logprobs, other.logprobs)).max(initial=0) < 1e-4
        if one.tokens and before.tokens:
            moved = max(moved, abs(one.logprobs[0] - before.logprobs[0]))
    assert moved > 1e-3


@each_architecture
def test_every_intervention_equals_plain_hooks(name: str) -> None:
    turn = NAMES.index(name)
    for i, one in enumerate(kinds(turn)):
        check(name, [one], turn=turn + i, n_new=2, model=hooked(name))
    for several in compositions()[turn % 2 :: 2]:
        check(name, several, n_new=0, model=hooked(name))


@pytest.mark.parametrize("name", ["llama", "opt", "gemma2"])
def test_interventions_leave_nothing_behind(name: str) -> None:
    model, tokens = hooked(name), tiny.prompt(13, seed=2)
    before, weights = model.logits(tokens), model.weight_hash()
    interventions = [
        attention_bias(2.0, tokens=tokens[:3]).on("L0H1"), resample_ablation(reference=TRIALS).on("L1H1"),
        patch({tuple(tokens): tokens[::-1]}, site="q").on("L1H2"), prune().on("L2H0"),
    ]  # fmt: skip
    with pytest.raises(KeyboardInterrupt), apply(model, *interventions):
        assert not torch.equal(model.logits(tokens), before)
        raise KeyboardInterrupt
    assert torch.equal(model.logits(tokens), before) and model.weight_hash() == weights
    assert not model.backend.hooked() and model.ablations == [] and model.row_listeners == []
    assert model.site_effects["attn_scores"]  # of OPT too: here its scores are real


def test_a_bias_multiplies_attention_where_masked_scores_are_infinite() -> None:
    model, tokens = hooked("llama"), tiny.prompt(13, seed=2)
    before = seen_under(model, tokens, "pattern")[0]
    after = seen_under(model, tokens, "pattern", attention_bias(1.0, keys=[2]).on("L0H1"))[0]
    want = before[1].clone()
    want[:, 2] *= math.e
    torch.testing.assert_close(after[1], want / want.sum(-1, keepdim=True))
    torch.testing.assert_close(after[0], before[0])


@each_architecture
@pytest.mark.parametrize("padding", ["left", "right"])
def test_padding_and_company_change_nothing(name: str, padding: str) -> None:
    model, trials = hooked(name), trials_of(name)
    if padding == "right" and any(tiny.windows(name)):
        with pytest.raises(mh.InvalidInput, match="sliding windows"):
            score(model, trials, padding=padding)
        return
    alone = score(model, trials, batch_size=1)
    got = score(model, trials[::-1], padding=padding, batch_size=len(trials))
    for method in SCORES:
        for trial_id, values in zip(got[method].trial_ids, got[method].values, strict=True):
            want = alone[method].values[alone[method].trial_ids.index(trial_id)]
            assert tiny.relative(values, want) < 1e-4, (method, trial_id)


@each_architecture
def test_prompts_of_one_token_and_of_the_whole_context(name: str) -> None:
    prompts = [[11], tiny.prompt(tiny.N_CTX - 2, seed=5), tiny.prompt(12, seed=6)]
    got = generate(hooked(name), prompts, max_new_tokens=6)
    want = generate(tiny.shared(name), prompts, max_new_tokens=6)
    for one, other in zip(got, want, strict=True):
        assert one.tokens == other.tokens
        assert np.abs(np.subtract(one.logprobs, other.logprobs)).max(initial=0) < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "qwen3", "opt"])
def test_folded_weights_verify_and_are_recorded(name: str) -> None:
    model = mh.load(hooked_transformer(name, **dict.fromkeys(RAW, True)))
    assert model.spec.weights == "folded+centred"
    found = model.verification
    assert found is not None and found.normed_exact and found.qk_exact
    case = tiny.cases(name)[0]
    got, raw = score(model, [case.trial]), score(hooked(name), [case.trial])
    assert got["locos"].meta["model"]["weights"] == "folded+centred"
    assert tiny.relative(got["attention_spatial"].values, raw["attention_spatial"].values) < 1e-4
    [answer] = generate(model, [case.trial.tokens], max_new_tokens=5)
    assert list(answer.tokens) == case.said
    assert np.abs(np.subtract(answer.logprobs, case.logprobs)).max() < 1e-4


def test_a_hook_of_the_users_own_is_honoured() -> None:
    model = mh.load(hooked_transformer("llama"))
    case = tiny.cases("llama")[0]
    before = score(model, [case.trial])
    model.backend.model.add_hook("blocks.1.hook_mlp_out", lambda t, hook: t * 0.5)  # type: ignore[attr-defined]
    assert model.backend.hooked()
    reference = tiny.Reference("llama")
    with torch.no_grad():
        reference.layers[1].mlp.down_proj.weight.mul_(0.5)
    tokens, said, logprobs = tiny.talkative(reference, 21, 4, seed=7)
    trial = mh.Trial(id="hooked", tokens=tokens, spans={"needle": (14, 19)})
    want = tiny.loop_scores("llama", tiny.Case(trial, said, logprobs, [0, 1, 2, 3]), reference)
    got = mh.CircuitAnalysis(model).score(SCORES, [trial], max_new_tokens=4)
    for method in SCORES:
        assert tiny.relative(got[method].values[0], want[method]) < 1e-4
    model.backend.model.reset_hooks()  # type: ignore[attr-defined]
    assert not model.backend.hooked()
    again = score(model, [case.trial])
    assert np.array_equal(again["locos"].values, before["locos"].values)


def test_a_model_that_cannot_be_taken_apart_is_refused() -> None:
    toy = lens().HookedTransformerConfig(
        n_layers=1, d_model=8, n_ctx=8, d_head=4, n_heads=2, d_vocab=11, attn_only=True, device="cpu"
    )
    with pytest.raises(mh.ModelRefused, match="without MLPs"):
        mh.load(lens().HookedTransformer(toy))


# -- every detector, and the lens -----------------------------------------------------------------


@each_architecture
def test_every_pass_based_detector_agrees_with_the_bridge(name: str) -> None:
    """Prompt rows, the stop step and the null ending on a copied cache, which this back end keeps in its own way."""
    methods = ["wu", "contrastive", "headkv", "qrhead"]
    trials = []
    for trial in trials_of(name):
        at = max(trial.positions("needle")) + 1
        trials.append(dataclasses.replace(trial, spans={**trial.spans, "question": (at, at + 1)}))
    options: dict[str, Any] = {"max_new_tokens": 5, "null_query": "w7 w8", "contrastive": {"filtered": False}}
    got, want = (
        mh.CircuitAnalysis(model, progress=False).score(methods, trials, **options)
        for model in (hooked(name), tiny.shared(name))
    )
    for method in methods:
        assert got[method].kept.tolist() == want[method].kept.tolist(), method
        np.testing.assert_allclose(got[method].values, want[method].values, atol=1e-4, err_msg=method)
    assert got["headkv"].kept.all() and got["qrhead"].kept.all()


@pytest.mark.parametrize("rotary", [True, False])
@each_architecture
def test_qk_scores_agree_with_the_bridge(name: str, rotary: bool) -> None:
    """Candidates of one token and of two, after the prompt and in it, batched and alone."""
    texts = ("w5", "w9 w31")
    layouts: list[Any] = [(14, 14, {}), (21, 17, {}), (19, 8, {"candidates": [(9, 10), (12, 14)]})]
    trials = [
        mh.Trial(
            id=f"q{i}", tokens=tiny.prompt(length, seed=90 + i), spans={"statement": (3, stop), **more},
            candidates=texts, label=i % 2,
        )
        for i, (length, stop, more) in enumerate(layouts)
    ]  # fmt: skip
    mine = mh.CircuitAnalysis(hooked(name)).score("qk", trials, rotary=rotary, batch_size=3)
    alone = mh.CircuitAnalysis(hooked(name)).score("qk", trials, rotary=rotary, batch_size=1)
    theirs = mh.CircuitAnalysis(tiny.shared(name)).score("qk", trials, rotary=rotary)
    assert tiny.relative(mine.values, theirs.values) < 1e-5
    assert tiny.relative(mine.values, alone.values) < 1e-5
    assert np.abs(mine.baseline - theirs.baseline).max() < 1e-4


@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma3", "olmo2_mha"])
def test_the_tuned_lens_agrees_with_the_bridge(name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    weights = 0.03 * torch.randn(tiny.LAYERS, tiny.WIDTH, tiny.WIDTH, generator=generator)
    made = TunedLens(weights, torch.zeros(tiny.LAYERS, tiny.WIDTH), tiny.LAYERS)
    got, want = (
        score(model, trials_of(name), unembed="tuned_lens", lens=made) for model in (hooked(name), tiny.shared(name))
    )
    for method in ("locos", "dla"):
        kept = want[method].kept
        assert kept.any() and got[method].kept.tolist() == kept.tolist()
        assert tiny.relative(got[method].values[kept], want[method].values[kept]) < 1e-4, method


def test_a_lens_is_fitted_as_on_the_bridge() -> None:
    text = [" ".join(f"w{(7 * i + 3 * j) % 90 + 4}" for j in range(200)) for i in range(20)]
    small: dict[str, Any] = {"steps": 0, "tokens": 400, "holdout": 64, "context": 32}
    got, want = (fit_lens(model, text, **small) for model in (hooked("llama"), tiny.shared("llama")))
    np.testing.assert_allclose(got.kl_tuned_lens, want.kl_tuned_lens, rtol=1e-2)
    np.testing.assert_allclose(got.kl_logit_lens, want.kl_logit_lens, rtol=1e-3)
