"""Loading a model by name, and its text, weights and description."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import answered, prompts

import mechheads as mh

# -- names ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("smolm2", "unknown model 'smolm2'. Did you mean 'smollm2'?"),
        ("SmolLM2", "Did you mean 'smollm2'?"),
        ("zebra-7000", "unknown model 'zebra-7000'. Known: nano, nano-logic, smollm2"),
        ("/no/such/folder", "unknown model '/no/such/folder'"),
        ("./no-such-folder", "unknown model './no-such-folder'"),
        (Path("no-such-folder"), "unknown model 'no-such-folder'"),
    ],
)
def test_unknown_names(name: Any, told: str) -> None:
    with pytest.raises(mh.UnknownName) as caught:
        mh.load(name)
    message = str(caught.value)
    assert told in message
    assert "Or give a hub id such as 'Qwen/Qwen3-8B', or an existing folder." in message


def test_a_known_name_of_transformer_lens_is_suggested() -> None:
    with pytest.raises(mh.UnknownName, match=r"'gpt3'\. Did you mean 'gpt2'"):
        mh.load("gpt3")


@pytest.mark.parametrize("name", ["nobody/nothing", "no/such/folder"])
def test_a_hub_id_that_cannot_be_reached(name: str) -> None:
    with pytest.raises(
        mh.InvalidInput, match=f"cannot load the model '{name}': .*a hub id that this machine can reach"
    ):
        mh.load(name)


def test_a_folder_without_a_model(tmp_path: Path) -> None:
    with pytest.raises(mh.InvalidInput, match=r"cannot load the model .*config\.json, weights and tokenizer"):
        mh.load(tmp_path)


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.folder("llama"), tmp_path / "copy")
    (folder / "model.safetensors").unlink()
    with pytest.raises(mh.InvalidInput, match=r"cannot load the model .*model\.safetensors"):
        mh.load(folder)


def test_a_folder_without_a_tokenizer_takes_one(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny.folder("llama"), tmp_path / "copy")
    for file in folder.glob("tokenizer*"):
        file.unlink()
    with pytest.raises(mh.InvalidInput, match="cannot load the model"):
        mh.load(folder)
    model = mh.load(folder, tokenizer=tiny.tokenizer())
    assert model.encode("w5 w6").tokens == (5, 6)


@pytest.mark.parametrize("thing", [3, None, {"name": "smollm2"}, torch.nn.Linear(2, 2)])
def test_things_that_are_no_model(thing: Any) -> None:
    kind = type(thing).__name__
    message = f"cannot load a model from a {kind}; pass 'nano', 'smollm2', a hub id, a folder"
    with pytest.raises(mh.InvalidInput, match=message):
        mh.load(thing)


def test_a_hugging_face_model_is_told_how_to_be_wrapped() -> None:
    with pytest.raises(mh.InvalidInput, match=r"LlamaForCausalLM.*boot_transformers\(hf_model=\.\.\.\)"):
        mh.load(tiny.build("llama"))


def test_unknown_dtype_names_the_near_ones() -> None:
    with pytest.raises(mh.UnknownName) as caught:
        mh.load(tiny.folder("llama"), dtype="float23")
    assert "unknown dtype 'float23'. Did you mean 'float32'" in str(caught.value)
    assert "hub id" not in str(caught.value)


def test_smollm2_that_is_not_here_names_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MECHHEADS_CACHE", str(tmp_path))
    with pytest.raises(mh.InvalidInput, match="mechheads get smollm2") as caught:
        mh.load("smollm2")
    assert "not here yet" in str(caught.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.smollm2
def test_smollm2_is_what_it_says(smollm2_model: mh.Model) -> None:
    spec = smollm2_model.spec
    assert (spec.n_layers, spec.n_heads, spec.n_key_value_heads, spec.d_head, spec.d_model) == (30, 9, 3, 64, 576)
    assert spec.name == "smollm2" and spec.weights == "raw" and spec.dtype == "float32"
    assert smollm2_model.backend.fast_prefill()
    said = mh.CircuitAnalysis(smollm2_model).generate("The capital of France is", max_new_tokens=3)
    assert said.text.startswith(" Paris")
    encoded = smollm2_model.encode("Where is Paris?", chat=True)
    assert "Where is Paris?" in encoded.text and encoded.text.endswith("<|im_start|>assistant\n")
    start = encoded.text.index("Paris")
    span = encoded.span_of(start, start + 5)
    assert smollm2_model.decode(encoded.tokens[span.start : span.stop]) == " Paris"
    # The template writes the special tokens itself; the tokenizer must not add them again.
    assert smollm2_model.decode(encoded.tokens) == encoded.text


# -- ready models --------------------------------------------------------------------------------


def test_a_ready_bridge_is_taken_as_it_is() -> None:
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(tiny.folder("llama"))
    bridge = TransformerBridge.boot_transformers("tiny", hf_model=tiny.build("llama"), tokenizer=made)
    model: Any = mh.load(bridge)
    assert model.backend.bridge is bridge and model.spec.backend == "TransformerBridge"
    tokens = prompts()[0]
    torch.testing.assert_close(model.logits(tokens), tiny.shared("llama").logits(tokens))


def test_a_model_is_returned_as_it_is(llama: mh.Model) -> None:
    assert mh.load(llama) is llama


def test_loading_checks_unless_told_not_to() -> None:
    assert tiny.fresh("llama").verification is not None
    model = mh.load(tiny.folder("llama"), verify=False)
    assert model.verification is None
    assert model.verify().head_sum < 1e-5 and model.verification is not None


def test_loading_says_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    mh.load(tiny.folder("llama"))
    assert capfd.readouterr() == ("", "")


def test_loading_changes_no_setting() -> None:
    grad, verbosity = torch.is_grad_enabled(), __import__("transformers").logging.get_verbosity()
    tiny.fresh("llama")
    assert torch.is_grad_enabled() == grad and __import__("transformers").logging.get_verbosity() == verbosity


# -- types ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float16])
def test_half_precision_weights(llama: mh.Model, dtype: Any) -> None:
    half = mh.load(tiny.folder("llama"), dtype=dtype)
    assert half.spec.dtype == str(dtype).removeprefix("torch.") and half.verification is not None
    assert half.weight_hash() != llama.weight_hash()
    trials = answered(half, at=slice(0, 1))
    scores = mh.CircuitAnalysis(half).score(["locos", "dla"], trials)["locos"]
    assert scores.values.dtype == np.float32 and scores.n_kept >= 4
    full = mh.CircuitAnalysis(llama).score("locos", trials)
    both = scores.kept & full.kept
    assert both.sum() >= 3
    error = np.abs(scores.values - full.values)[both].max() / np.abs(full.values[both]).max()
    assert 1e-6 < error < 0.05
    reference = trials.with_split("calibration")
    with mh.CircuitAnalysis(half).intervene(mh.mean_ablation(reference=reference).on("L1H1")):
        assert torch.isfinite(half.logits(trials[0].tokens)).all()


# -- text ----------------------------------------------------------------------------------------


def test_encode_gives_tokens_with_their_characters(llama: mh.Model) -> None:
    encoded = llama.encode("w5 w16  w7")
    assert encoded.tokens == (5, 16, 7) and encoded.offsets == ((0, 2), (3, 6), (8, 10))
    assert [encoded.text[a:b] for a, b in encoded.offsets] == ["w5", "w16", "w7"]
    assert tuple(encoded.span_of(3, 10)) == (1, 2)
    assert llama.decode([5, 16]) == "w5 w16" and llama.pieces([5, 16]) == ["w5", "w16"]


def test_encode_refuses_an_empty_prompt(llama: mh.Model) -> None:
    with pytest.raises(mh.InvalidInput, match="the prompt is empty; give at least one character"):
        llama.encode("")


def test_chat_without_a_template(llama: mh.Model) -> None:
    with pytest.raises(mh.InvalidInput, match="has no chat template; use chat=False"):
        llama.encode("w5", chat=True)


def test_chat_with_a_template() -> None:
    made = tiny.tokenizer()
    made.chat_template = (
        "{% for m in messages %}w9 {{ m.content }} w8{% endfor %}{% if add_generation_prompt %} w7{% endif %}"
    )
    model = mh.load(tiny.folder("llama"), tokenizer=made)
    encoded = model.encode("w5 w6", chat=True)
    assert encoded.text == "w9 w5 w6 w8 w7" and encoded.tokens == (9, 5, 6, 8, 7)
    trial = mh.Trial.from_text(model, "w5 w6", needle="w6", chat=True)
    assert trial.positions("needle") == (2,)


def test_a_tokenizer_without_offsets_is_refused() -> None:
    class Slow:
        is_fast = False
        eos_token_id = 1

        def decode(self, tokens: list[int], **_: Any) -> str:
            return " ".join(map(str, tokens))

    model = mh.load(tiny.folder("llama"), verify=False)
    model.backend.tokenizer = Slow()
    with pytest.raises(mh.InvalidInput, match=r"no character offsets.*build trials from tokens and spans"):
        model.encode("w5")
    bare = mh.Trial(id="t", tokens=prompts()[0], spans={"needle": (2, 5)})
    assert mh.CircuitAnalysis(model).score("dla", bare).kept.all()


def test_a_model_without_a_tokenizer_says_so() -> None:
    model = mh.load(tiny.folder("llama"), verify=False)
    model.backend.tokenizer = None
    with pytest.raises(mh.InvalidInput, match=r"has no tokenizer.*mh\.Trial\(tokens=\.\.\.\)"):
        model.encode("w5")


# -- weights -------------------------------------------------------------------------------------


def test_description_is_json(llama: mh.Model) -> None:
    record = llama.describe()
    assert json.loads(json.dumps(record)) == record
    assert record["architecture"] == "LlamaForCausalLM" and record["weight_hash"] == llama.weight_hash()
    assert (record["n_layers"], record["n_heads"], record["n_key_value_heads"], record["d_head"]) == (3, 4, 2, 16)
    assert (record["d_model"], record["d_vocab"], record["n_ctx"]) == (64, 97, 128)
    assert "3 layers x 4 heads, 2 key/value heads, float32, raw weights" in repr(llama)


def test_the_hash_is_of_the_weights_not_of_the_object() -> None:
    assert tiny.fresh("llama").weight_hash() == tiny.shared("llama").weight_hash() != tiny.shared("gpt2").weight_hash()


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_hash_follows_every_edit_in_place(name: str) -> None:
    model = tiny.fresh(name)
    before = model.weight_hash()
    seen = {before}
    parameters = model.backend.parameters()
    assert len(parameters) > 20
    for _, tensor in parameters:
        kept = tensor.detach().clone()
        with torch.no_grad():
            tensor[(-1,) * tensor.ndim] += 0.5
        seen.add(model.weight_hash())
        with torch.no_grad():
            tensor.copy_(kept)
        assert model.weight_hash() == before
    assert len(seen) == len(parameters) + 1


def test_the_hash_covers_every_weight_that_moves_the_logits() -> None:
    """Edits through TransformerLens' own view of the weights, which GPT-2's joint projection copies."""
    for name in ("llama", "gpt2"):
        model: Any = tiny.fresh(name)
        logits, before = model.logits(prompts()[0]), model.weight_hash()
        with torch.no_grad():
            model.backend.bridge.blocks[1].attn.q.original_component.weight.mul_(1.5)
        assert not torch.allclose(model.logits(prompts()[0]), logits, atol=1e-3)
        assert model.weight_hash() != before


def test_weights_are_live_views(llama: mh.Model) -> None:
    model: Any = tiny.fresh("llama")
    before = model.W_O(1).detach().clone()
    hf_weight = model.backend.bridge.blocks[1].attn.o.original_component.weight
    with torch.no_grad():
        hf_weight[:, 16:32] = 0
    after = model.W_O(1)
    assert (after[1] == 0).all() and torch.equal(after[0], before[0])
    assert model.W_O(0).shape == (4, 16, 64) and model.W_U.shape == (64, 97)
    assert model.b_O(0).shape == (64,) and not model.b_O(0).any() and model.b_U.shape == (97,)


@pytest.mark.parametrize("layer", [-1, 3])
def test_layers_that_do_not_exist(llama: mh.Model, layer: int) -> None:
    for read in (llama.W_O, llama.b_O):
        with pytest.raises(mh.InvalidInput, match=f"layer {layer} does not exist: the model has layers 0 to 2"):
            read(layer)


def test_options_beside_a_loaded_model_are_refused(llama: Any) -> None:
    with pytest.raises(mh.InvalidInput, match="dtype cannot be applied to a Model"):
        mh.load(llama, dtype="bfloat16")


def test_placement_is_passed_on_for_folders() -> None:
    import tiny

    model = mh.load(str(tiny.folder("llama")), device_map={"": "cpu"})
    assert model.verification is not None and model.backend.device.type == "cpu"


def test_training_mode_is_refused() -> None:
    import tiny

    model = tiny.fresh("gpt2")
    model.backend.bridge.train()  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(mh.InvalidInput, match="training mode"):
        mh.CircuitAnalysis(model, progress=False).generate(tokens=[5, 6, 7], max_new_tokens=2)
    model.backend.bridge.eval()  # pyright: ignore[reportAttributeAccessIssue]
    assert mh.CircuitAnalysis(model, progress=False).generate(tokens=[5, 6, 7], max_new_tokens=2).tokens
