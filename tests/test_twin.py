"""The twin prefills only while it computes what the hooked model computes; broken models are refused."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers as hf
from torch import Tensor, nn
from transformer_lens.model_bridge import TransformerBridge

import mechheads as mh
from mechheads.backends.twin import Twin
from mechheads.capture import TrialCapture, capture
from mechheads.model import Model

SCORES = ["locos", "attention_spatial", "dla"]
PARTS = ("q", "k", "v", "z", "pattern", "final_scale", "post_scale")

each_architecture = pytest.mark.parametrize("name", tiny.ARCHITECTURES)


def run(model: Model, trials: Sequence[mh.Trial]) -> list[TrialCapture]:
    return capture(model, trials, needs=PARTS[:5], max_new_tokens=4)


def assert_same(some: list[TrialCapture], others: list[TrialCapture], bound: float = 1e-4) -> None:
    for one, other in zip(some, others, strict=True):
        assert one.decoded.tokens == other.decoded.tokens
        for layer in range(tiny.LAYERS):
            a, b = one.layer(layer), other.layer(layer)
            for part in PARTS:
                x, y = getattr(a, part), getattr(b, part)
                assert (x is None) is (y is None), part
                if x is not None:
                    assert tiny.relative(tiny.array(x), tiny.array(y)) < bound, (part, layer)


@contextmanager
def counted(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Prefills of any twin inside the block, by number of prompts."""
    prefills: list[int] = []
    original = Twin.run

    def spy(self: Twin, tokens: Tensor, mask: Tensor, cache: Any) -> Tensor:
        prefills.append(len(tokens))
        return original(self, tokens, mask, cache)

    with monkeypatch.context() as patch:
        patch.setattr(Twin, "run", spy)
        yield prefills


def used_twin(model: Model, trials: Sequence[mh.Trial], monkeypatch: pytest.MonkeyPatch) -> bool:
    with counted(monkeypatch) as prefills:
        run(model, trials)
    return bool(prefills)


def bridge_of(model: Model) -> Any:
    return model.backend.bridge  # type: ignore[attr-defined]


def boot(name: str) -> Any:
    """A bridge as a user makes one."""
    return TransformerBridge.boot_transformers(
        str(tiny.folder(name)),
        hf_model=tiny.plain(name),
        tokenizer=hf.PreTrainedTokenizerFast.from_pretrained(tiny.folder(name)),
        dtype=torch.float32,
    )


def load_ready(bridge: Any) -> Model:
    """With the folder's words: TransformerLens reads the tokenizer again, which for Qwen2 finds another."""
    return mh.load(bridge, tokenizer=hf.PreTrainedTokenizerFast.from_pretrained(bridge.cfg.model_name))


def assert_analyses(model: Model, name: str, reference: tiny.Reference, bound: float = 1e-4) -> None:
    """The next scores are those of the reference's weights, and not of the folder's."""
    tokens, said, logprobs = tiny.talkative(reference, 21, 4, seed=7)
    trial = mh.Trial(id="edited", tokens=tokens, spans={"needle": (14, 19)})
    case = tiny.Case(trial, said, logprobs, list(range(len(said))))
    got = mh.CircuitAnalysis(model).score(SCORES, [trial], max_new_tokens=4)
    want = tiny.loop_scores(name, case, reference)
    for method in SCORES:
        assert tiny.relative(got[method].values[0], want[method]) < bound, method
    before = tiny.loop_scores(name, case, tiny.Reference(name))
    assert tiny.relative(before["dla"], want["dla"]) > 1e-3


# -- the twin ------------------------------------------------------------------------------------


@each_architecture
def test_twin_and_hooked_model_give_the_same_capture(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.shared(name)
    trials = [case.trial for case in tiny.cases(name)]
    with counted(monkeypatch) as prefills:
        fast = run(model, trials)
    assert prefills == [len(trials)]
    with monkeypatch.context() as patch, counted(monkeypatch) as prefills:
        patch.setattr(model.backend, "twin", None)
        slow = run(model, trials)
    assert prefills == []
    assert_same(fast, slow)
    for path, parameter in model.backend.bridge.original_model.named_parameters():  # type: ignore[attr-defined]
        assert parameter.device.type == "cpu", path


def test_twin_stores_no_attention_matrix() -> None:
    for name in tiny.ARCHITECTURES:
        twin = tiny.shared(name).backend.twin
        assert twin.attention == ("eager" if name in ("gemma2", "gptoss") else "sdpa"), name


@each_architecture
def test_editing_a_head_in_place_is_what_the_next_capture_sees(name: str) -> None:
    model, reference = tiny.fresh(name), tiny.Reference(name)
    before = model.weight_hash()
    assert before == tiny.shared(name).weight_hash()
    with torch.no_grad():
        model.W_O(0)[2].zero_()
    reference.zero_head(0, 2)
    assert_analyses(model, name, reference)
    assert model.weight_hash() != before


@each_architecture
def test_editing_queries_in_place_is_what_the_next_capture_sees(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one matrix holds q, k and v, TransformerLens runs on copies of its parts, which the twin has not got."""
    model, reference = tiny.fresh(name), tiny.Reference(name)
    before = model.weight_hash()
    edit = torch.linspace(0.2, 3.0, tiny.WIDTH)
    with torch.no_grad():
        linear = bridge_of(model).blocks[0].attn.q
        linear.original_component.weight.mul_(edit)
        attention = reference.attentions[0]
        if name == "gpt2":
            attention.c_attn.weight[:, : tiny.WIDTH].mul_(edit[:, None])
        elif name == "neox":
            attention.query_key_value.weight.view(tiny.HEADS, 3, tiny.D_HEAD, -1)[:, 0].mul_(edit)
        elif name == "phi3":
            attention.qkv_proj.weight[: tiny.WIDTH].mul_(edit)
        else:
            attention.q_proj.weight.mul_(edit)
    assert_analyses(model, name, reference)
    assert model.weight_hash() != before
    assert used_twin(model, [tiny.cases(name)[0].trial], monkeypatch) is (name not in tiny.JOINT)


@pytest.mark.parametrize("name", tiny.JOINT)
@pytest.mark.parametrize("part", ["joint", "split"])
def test_no_edit_of_a_joint_projection_goes_unnoticed(name: str, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.fresh(name)
    trials = [tiny.cases(name)[1].trial]
    attention = bridge_of(model).blocks[0].attn
    joint = {"gpt2": "c_attn", "neox": "query_key_value", "phi3": "qkv_proj"}[name]
    inner = attention.original_component
    weight = getattr(inner, joint).weight if part == "joint" else attention.k.original_component.weight
    assert used_twin(model, trials, monkeypatch)
    kept = weight.detach().clone()
    with torch.no_grad():
        # An edit that leaves the sum of every row's bits as it was: as many signs go up as come down.
        row = weight[0]
        some = torch.cat([(row > 0).nonzero()[:5], (row < 0).nonzero()[:5]]).squeeze()
        assert len(some) == 10
        row[some] *= -1
    got = run(model, trials)
    assert not used_twin(model, trials, monkeypatch)
    with monkeypatch.context() as patch:
        patch.setattr(model.backend, "twin", None)
        assert_same(got, run(model, trials))
    with torch.no_grad():
        weight.copy_(kept)
    assert used_twin(model, trials, monkeypatch)


def _replace_parameter(bridge: Any) -> None:
    linear = bridge.blocks[1].mlp.out.original_component
    linear.weight = nn.Parameter(linear.weight.detach() * 2)


def _replace_module(bridge: Any) -> None:
    inner = bridge.blocks[1].mlp.original_component
    old = inner.down_proj
    inner.down_proj = nn.Linear(old.weight.shape[1], old.weight.shape[0], bias=False)
    inner.down_proj.weight = nn.Parameter(bridge.blocks[1].mlp.out.original_component.weight.detach() * 2)


def _patch_forward(bridge: Any) -> None:
    linear = bridge.blocks[1].mlp.out.original_component
    plain = linear.forward
    linear.forward = lambda x: 2 * plain(x)


@pytest.mark.parametrize("edit", [_replace_parameter, _replace_module, _patch_forward])
def test_replaced_parts_are_what_the_next_capture_sees(
    edit: Callable[[Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = tiny.fresh("llama"), tiny.Reference("llama")
    edit(bridge_of(model))
    with torch.no_grad():
        reference.layers[1].mlp.down_proj.weight.mul_(2)
    assert_analyses(model, "llama", reference)
    assert not used_twin(model, [tiny.cases("llama")[0].trial], monkeypatch)


# -- hooks of the user's own ---------------------------------------------------------------------

Remove = Callable[[], None]


def _halve(tensor: Tensor, hook: Any) -> Tensor:
    return tensor * 0.5


def _tl_hook(bridge: Any) -> Remove:
    bridge.add_hook("blocks.1.hook_mlp_out", _halve)
    return bridge.reset_hooks


def _tl_permanent_hook(bridge: Any) -> Remove:
    bridge.add_perma_hook("blocks.1.hook_mlp_out", _halve)
    return lambda: bridge.reset_hooks(including_permanent=True)


def _torch_hook(bridge: Any) -> Remove:
    linear = bridge.blocks[1].mlp.out.original_component
    return linear.register_forward_hook(lambda module, args, output: output * 0.5).remove


def _torch_pre_hook(bridge: Any) -> Remove:
    linear = bridge.blocks[1].mlp.out.original_component
    return linear.register_forward_pre_hook(lambda module, args: (args[0] * 0.5,)).remove


@pytest.mark.parametrize("put", [_tl_hook, _tl_permanent_hook, _torch_hook, _torch_pre_hook])
def test_a_hook_of_the_users_own_is_honoured_and_then_forgotten(
    put: Callable[[Any], Remove], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, reference = tiny.fresh("llama"), tiny.Reference("llama")
    trials = [tiny.cases("llama")[0].trial]
    before = run(model, trials)
    remove = put(bridge_of(model))
    with torch.no_grad():
        reference.layers[1].mlp.down_proj.weight.mul_(0.5)
    assert_analyses(model, "llama", reference)
    assert not used_twin(model, trials, monkeypatch)
    assert model.backend.hooked()
    remove()
    assert not model.backend.hooked()
    assert used_twin(model, trials, monkeypatch)
    assert_same(run(model, trials), before, 1e-6)


# -- ready bridges -------------------------------------------------------------------------------


@each_architecture
def test_a_ready_bridge_scores_like_the_folder(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = load_ready(boot(name))
    assert model.spec.weights == "raw"
    assert not model.backend.hooked()
    trials = [case.trial for case in tiny.cases(name)]
    got = mh.CircuitAnalysis(model).score(SCORES, trials, max_new_tokens=5)
    want = mh.CircuitAnalysis(tiny.shared(name)).score(SCORES, trials, max_new_tokens=5)
    for method in SCORES:
        assert np.isfinite(want[method].values).all()
        assert np.array_equal(got[method].values, want[method].values), method
    assert used_twin(model, trials, monkeypatch)
    assert model.weight_hash() == tiny.shared(name).weight_hash()


@each_architecture
@pytest.mark.filterwarnings("ignore:.*does not support fold_ln:UserWarning")
def test_compatibility_mode_is_exact_or_refused(name: str) -> None:
    bridge = boot(name)
    bridge.enable_compatibility_mode(disable_warnings=True)
    if name == "gptoss":
        with pytest.raises(mh.ModelRefused, match="sinks"):
            mh.load(bridge)
        return
    model = load_ready(bridge)
    # A soft-capped logit cannot be centred, so Gemma-2 keeps its unembedding.
    assert model.spec.weights == ("processed" if name == "gemma2" else "processed+centred")
    assert model.backend.twin is None
    found = model.verification
    assert found is not None and found.normed_exact and found.qk_exact
    case = tiny.cases(name)[1]
    logits, want = tiny.array(model.logits(case.trial.tokens)), tiny.Reference(name).logits(case.trial.tokens)
    gap = logits - want  # one constant for each position, which no probability sees
    assert np.abs(gap - gap.mean(-1, keepdims=True)).max() < 1e-4
    # Centring changes no difference between two tokens, so attention, and the whole answer, stay.
    got = mh.CircuitAnalysis(model).score("attention_spatial", [case.trial], max_new_tokens=5)
    raw = mh.CircuitAnalysis(tiny.shared(name)).score("attention_spatial", [case.trial], max_new_tokens=5)
    assert got.kept.all() and tiny.relative(got.values, raw.values) < 1e-4
    assert got.meta["model"]["weights"] == model.spec.weights


@pytest.mark.parametrize("name", ["gpt2", "gptoss"])
def test_compatibility_mode_without_processing_is_raw(name: str) -> None:
    bridge = boot(name)
    bridge.enable_compatibility_mode(disable_warnings=True, no_processing=True)
    model = mh.load(bridge)
    assert model.spec.weights == "raw"
    tokens = tiny.prompt(20, seed=1)
    assert tiny.relative(tiny.array(model.logits(tokens)), tiny.Reference(name).logits(tokens)) < 1e-5


# -- refusals ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_a_broken_cache_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As under transformers 5.24: the cache is dropped on the way, and nothing else complains."""
    model = tiny.fresh(name)
    bridge = bridge_of(model)
    forward = type(bridge).forward

    def forgetful(self: Any, *args: Any, past_key_values: Any = None, **kwargs: Any) -> Any:
        return forward(self, *args, **kwargs)

    monkeypatch.setattr(type(bridge), "forward", forgetful)
    with pytest.raises(mh.ModelRefused, match=r"cached and uncached logits agree.*relative error \d\.\d+e[+-]\d+"):
        model.verify()
    with pytest.raises(mh.ModelRefused, match=r"5\.24"):
        mh.load(tiny.folder(name))


def test_a_head_that_does_not_add_up_is_refused() -> None:
    model = tiny.fresh("llama")
    bridge_of(model).blocks[1].attn.o.original_component.register_forward_hook(lambda m, a, out: out * 1.001)
    with pytest.raises(
        mh.ModelRefused, match=r"the heads sum to the attention output.*relative error (9\.9\de-04|1\.0\de-03)"
    ):
        model.verify()


def test_attention_to_what_the_configuration_hides_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny.fresh("mistral")
    monkeypatch.setattr(model.backend, "window", lambda layer: tiny.WINDOW - 1)
    with pytest.raises(mh.ModelRefused, match="attention rows are causal"):
        model.verify()


def test_weights_that_are_not_numbers_are_refused(tmp_path: Any) -> None:
    broken = tiny.build("llama")
    with torch.no_grad():
        broken.model.layers[1].self_attn.o_proj.weight[3, 5] = float("nan")
    with pytest.raises(mh.ModelRefused, match="relative error inf"):
        mh.load(tiny.save(broken, tmp_path / "nan"))


def test_embeddings_projected_in_and_out_are_refused(tmp_path: Any) -> None:
    """The layout of OPT-350m alone."""
    folder = tiny.save(tiny.build("opt", word_embed_proj_dim=32, do_layer_norm_before=False), tmp_path / "opt")
    with pytest.raises(mh.ModelRefused, match="350m"):
        mh.load(folder)
