"""Faults that once passed silently: each must be refused, or noticed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import prompts
from safetensors.torch import load_file, save_file

import mechheads as mh
from mechheads.backends.bridge import BridgeBackend


def altered_checkpoint(folder: Path, change: Any) -> Path:
    """A copy of the tiny Llama whose weights went through a change."""
    shutil.copytree(tiny.folder("llama"), folder)
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_checkpoint_with_missing_weights_is_refused(tmp_path: Path) -> None:
    key = "model.layers.1.self_attn.v_proj.weight"
    with pytest.raises(mh.ModelRefused, match=r"1 missing keys \(first: '.*layers\.1\.self_attn\.v_proj\.weight'"):
        mh.load(str(altered_checkpoint(tmp_path / "m", lambda w: w.pop(key))))


def test_a_truncated_checkpoint_is_refused(tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny.folder("llama"), folder)
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(mh.InvalidInput, match="cannot load the model"):
        mh.load(str(folder))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_cache_that_is_not_read_is_refused_in_every_dtype(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    """New tokens see only each other, though the cache is filled: what transformers 5.24 does to TransformerLens."""
    real = BridgeBackend.run

    def run(self: Any, tokens: Any, mask: Any, cache: Any, *, last_only: bool) -> Any:
        if cache is not None and cache.get_seq_length() > 0:
            real(self, tokens, mask, cache, last_only=last_only)
            return real(self, tokens, torch.ones_like(tokens), None, last_only=last_only)
        return real(self, tokens, mask, cache, last_only=last_only)

    monkeypatch.setattr(BridgeBackend, "run", run)
    with pytest.raises(mh.ModelRefused, match=r"cached and uncached logits agree.*relative error"):
        mh.load(str(tiny.folder("llama")), dtype=dtype)


def test_a_slightly_wrong_cache_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    real = BridgeBackend.run

    def run(self: Any, tokens: Any, mask: Any, cache: Any, *, last_only: bool) -> Any:
        logits = real(self, tokens, mask, cache, last_only=last_only)
        return logits * 1.001 if cache is not None else logits

    monkeypatch.setattr(BridgeBackend, "run", run)
    with pytest.raises(mh.ModelRefused, match="cached and uncached"):
        mh.load(str(tiny.folder("llama")))


@pytest.mark.parametrize(
    ("believed", "name"), [(4, "llama"), (None, "mistral")], ids=["wider than believed", "narrower than believed"]
)
def test_a_window_that_is_not_the_models_is_refused(
    monkeypatch: pytest.MonkeyPatch, believed: int | None, name: str
) -> None:
    monkeypatch.setattr(BridgeBackend, "window", lambda self, layer: believed)
    with pytest.raises(mh.ModelRefused, match="attention rows are causal and sum to one"):
        mh.load(str(tiny.folder(name)))


def test_gpt_neo_local_layers_are_seen(tmp_path: Path) -> None:
    from transformers import GPTNeoConfig, GPTNeoForCausalLM

    config = GPTNeoConfig(
        vocab_size=97, hidden_size=64, num_layers=2, num_heads=4, max_position_embeddings=128, window_size=8,
        attention_types=[[["global", "local"], 1]], intermediate_size=96, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(0)
    GPTNeoForCausalLM(config).save_pretrained(tmp_path)
    tiny.tokenizer().save_pretrained(tmp_path)
    model = mh.load(str(tmp_path))
    assert [model.backend.window(layer) for layer in range(2)] == [None, 8]
    trial = mh.Trial(id="far", tokens=tiny.prompt(30, seed=3), spans={"needle": (2, 5)})
    scores = mh.CircuitAnalysis(model, progress=False).score("attention_spatial", trial, max_new_tokens=2)
    assert (scores.values[0, 1] == 0).all() and (scores.values[0, 0] != 0).all()


@pytest.mark.parametrize("edit", ["rotary", "epsilon", "scaling"])
def test_the_twin_steps_aside_after_edits_that_are_no_weights(edit: str) -> None:
    model = tiny.fresh("llama")
    bridge = model.backend.bridge  # pyright: ignore[reportAttributeAccessIssue]
    trial = mh.Trial(id="a", tokens=tiny.prompt(20, seed=2), spans={"needle": (2, 5)})
    ca = mh.CircuitAnalysis(model, progress=False)
    before = ca.score("attention_spatial", trial, max_new_tokens=3)
    described = model.describe()
    if edit == "rotary":
        bridge.original_model.model.rotary_emb.original_component.inv_freq.mul_(0.3)
    elif edit == "epsilon":
        bridge.blocks[1].ln1.original_component.variance_epsilon = 1.0
    else:
        bridge.blocks[1].attn.original_component.scaling = 2.0
    assert not model.backend.fast_prefill()
    after = ca.score("attention_spatial", trial, max_new_tokens=3)
    model.backend.twin = None
    plain = ca.score("attention_spatial", trial, max_new_tokens=3)
    assert np.array_equal(after.values, plain.values) and after.meta["prefill"] == "hooked model"
    assert not np.allclose(before.values, after.values, atol=1e-4)
    assert model.describe()["settings_hash"] != described["settings_hash"]


def test_the_store_knows_settings_tokenizer_and_versions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "other"
    shutil.copytree(tiny.folder("llama"), folder)
    config = json.loads((folder / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "default", "rope_theta": 50.0}
    (folder / "config.json").write_text(json.dumps(config))
    one, two = mh.load(str(tiny.folder("llama"))), mh.load(str(folder))
    assert one.weight_hash() == two.weight_hash()
    assert one.describe()["settings_hash"] != two.describe()["settings_hash"]
    before = one.describe()["tokenizer_hash"]
    one.backend.tokenizer.eos_token = "w9"
    assert one.describe()["tokenizer_hash"] != before


def test_a_store_does_not_ask_for_spans_that_nobody_needs(llama: mh.Model, tmp_path: Path) -> None:
    bare = mh.Trial(id="bare", tokens=prompts()[0])
    stored = mh.CircuitAnalysis(llama, store=tmp_path, progress=False).score("dla", bare, max_new_tokens=2)
    assert np.array_equal(
        stored.values, mh.CircuitAnalysis(llama, progress=False).score("dla", bare, max_new_tokens=2).values
    )


def test_a_ready_bridge_reads_text_as_the_folder_does() -> None:
    from transformer_lens.model_bridge import TransformerBridge

    folder = str(tiny.folder("llama"))
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    bridge = TransformerBridge.boot_transformers(folder, tokenizer=tokenizer, device="cpu")
    text = "w5 w6 w7"
    assert mh.load(bridge).encode(text).tokens == mh.load(folder).encode(text).tokens


def test_a_single_part_in_training_mode_is_refused() -> None:
    model = tiny.fresh("gpt2")
    model.backend.bridge.blocks[1].train()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(mh.InvalidInput, match="training mode"):
        mh.CircuitAnalysis(model, progress=False).generate(tokens=[5, 6], max_new_tokens=1)


def test_half_precision_that_cannot_run_is_refused() -> None:
    with pytest.raises(mh.ModelRefused, match=r"cannot run .* in bfloat16.*dtype='float32'"):
        mh.load(str(tiny.folder("olmo2")), dtype="bfloat16")


def test_processing_after_loading_shows_in_the_record() -> None:
    model = tiny.fresh("gpt2")
    assert model.describe()["weights"] == "raw"
    model.backend.bridge.enable_compatibility_mode()  # pyright: ignore[reportAttributeAccessIssue]
    assert model.describe()["weights"].startswith("processed")


def test_ablated_and_clean_scores_do_not_merge(llama: mh.Model) -> None:
    ca = mh.CircuitAnalysis(llama, progress=False)
    trials = [mh.Trial(id=f"t{i}", tokens=p) for i, p in enumerate(prompts()[:2])]
    clean = ca.score("dla", trials[0], max_new_tokens=2)
    with ca.intervene(mh.zero_ablation(site="q").on("L0H0")):
        ablated = ca.score("dla", trials[1], max_new_tokens=2)
    with pytest.raises(mh.InvalidInput, match="cannot merge scores that differ in meta"):
        clean.merge(ablated)
    both = clean.merge(ca.score("dla", trials[1], max_new_tokens=2))
    assert both.meta["complete"] is True and both.meta["n_trials_asked"] == 2
