"""Scores from weights alone against dense matrices of a plain Hugging Face model, and the accessors they rest on."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import weights_reference as dense
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import mechheads as mh
from mechheads import kernels_weights
from mechheads.kernels_weights import (
    VocabularyProducts,
    eigenvalue_score,
    own_token_rank,
    product_norm,
    vocabulary_product,
)
from mechheads.methods.weights import ov_copying, ov_norm, ov_token_copying, qk_matching, qk_norm
from mechheads.model import Model

FUNCTIONS = {"ov_copying": ov_copying, "qk_matching": qk_matching, "ov_norm": ov_norm, "qk_norm": qk_norm}
each_architecture = pytest.mark.parametrize("name", tiny.ARCHITECTURES)


# -- accessors ---------------------------------------------------------------------------------------


def check_weights(model: Model, name: str) -> None:
    """Every accessor against the Hugging Face weights."""
    reference = tiny.Reference(name)
    kv = dense.kv_heads(name)
    for layer in range(tiny.LAYERS):
        want = dense.qkv(reference, layer)
        for part, value in want.items():
            got = getattr(model, part)(layer)
            assert got.shape[0] == (tiny.HEADS if part.endswith("Q") else kv)
            assert tiny.relative(tiny.array(got), value) == 0, (part, layer)
        norm, module = model.input_norm(layer), dense.input_norm(reference, layer)
        assert (norm is None) is (module is None) is (name in dense.NO_INPUT_NORM)
        if norm is not None:
            assert norm.weight is not None and norm.centers is (name in tiny.LAYER_NORM)
            weight = tiny.array(module.weight) + (1 if name.startswith("gemma") else 0)
            assert tiny.relative(tiny.array(norm.weight), weight) < 1e-6
            assert (norm.bias is None) is (name not in tiny.LAYER_NORM)
        assert (model.post_norm(layer) is not None) is (name in dense.POST_NORM)
        pair = model.qk_norm(layer)
        assert (pair is not None) is (name in dense.QK_NORM)
        attention = reference.attentions[layer]
        for norm, kind, heads in zip(pair or (), ("q", "k"), (tiny.HEADS, kv), strict=False):
            weight = tiny.array(getattr(attention, f"{kind}_norm").weight) + (1 if name == "gemma3" else 0)
            assert norm.weight is not None and not norm.centers
            want_weight = np.broadcast_to(weight.reshape(-1, tiny.D_HEAD), (heads, tiny.D_HEAD))
            assert tiny.relative(tiny.array(norm.weight), want_weight) < 1e-6
    assert tiny.relative(tiny.array(model.W_E), dense.embedding(reference)) < 1e-6


def captured(model: Model, layer: int, tokens: Sequence[int]) -> dict[str, np.ndarray]:
    """``q k v [pos head d_head]`` as TransformerLens' hooks show them."""
    seen: dict[str, np.ndarray] = {}
    names = {part: f"blocks.{layer}.attn.hook_{part}" for part in "qkv"}
    with model.hooks([(at, lambda t, part=part: seen.update({part: tiny.array(t[0])})) for part, at in names.items()]):
        model.logits(tokens)
    return seen


def normalised_stream(reference: tiny.Reference, layer: int, tokens: Sequence[int]) -> np.ndarray:
    """``[pos d_model]`` what attention reads, by hooks on the Hugging Face model: its norm's output, or the stream."""
    seen: list[Tensor] = []
    module = dense.input_norm(reference, layer)
    if module is None:
        handle = reference.layers[layer].register_forward_pre_hook(lambda m, args: seen.append(args[0][0]))
    else:
        handle = module.register_forward_hook(lambda m, args, output: seen.append(output[0]))
    reference.logits(tokens)
    handle.remove()
    return tiny.array(seen[0])


def check_projections(model: Model, name: str) -> None:
    """``norm(resid) @ W + b`` is what the hooks show."""
    reference, tokens = tiny.Reference(name), tiny.prompt(11, seed=4)
    for layer in range(tiny.LAYERS):
        x, seen = normalised_stream(reference, layer, tokens), captured(model, layer, tokens)
        for part in "qkv":
            weight = tiny.array(getattr(model, f"W_{part.upper()}")(layer))
            bias = tiny.array(getattr(model, f"b_{part.upper()}")(layer))
            got = np.einsum("pm,hmd->phd", x, weight) + bias
            assert tiny.relative(got, seen[part]) < 1e-5, (layer, part)


@each_architecture
def test_accessors_are_the_hugging_face_weights(name: str) -> None:
    check_weights(tiny.shared(name), name)


@each_architecture
def test_accessors_make_the_queries_keys_and_values(name: str) -> None:
    check_projections(tiny.shared(name), name)


def test_accessors_are_live() -> None:
    model = tiny.fresh("llama")
    with torch.no_grad():
        dict(model.backend.parameters())["model.layers.1.self_attn.v_proj.weight"].mul_(2)
    assert torch.equal(model.W_V(1), 2 * tiny.shared("llama").W_V(1))


@pytest.mark.parametrize("part", ["W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V", "input_norm", "post_norm", "qk_norm"])
def test_a_layer_that_does_not_exist_is_named(part: str) -> None:
    with pytest.raises(mh.InvalidInput, match="layer 3 does not exist: the model has layers 0 to 2"):
        getattr(tiny.shared("llama"), part)(3)


@pytest.mark.parametrize(("found", "said"), [(None, "absent"), (torch.zeros(3, 5), r"\[3, 5\]")])
def test_weights_of_another_layout_are_refused(found: Tensor | None, said: str, monkeypatch: Any) -> None:
    model = tiny.shared("llama")
    monkeypatch.setattr(type(model.backend), "qkv", lambda self, layer: {"W_V": found})
    with pytest.raises(mh.ModelRefused, match=rf"W_V of layer 1 is {said}, not \[2, 64, 16\] \(one matrix a head\)"):
        ov_copying(model, 1)


def test_a_norm_after_attention_by_another_name_is_refused() -> None:
    model = tiny.fresh("opt")
    model.backend.text_config.do_layer_norm_before = False  # type: ignore[attr-defined]
    with pytest.raises(mh.ModelRefused, match="where layer 0 normalises what its attention reads is unknown"):
        ov_copying(model, 0)
    assert ov_copying(model, 0, fold_norm=False).isfinite().all()


# -- scores ------------------------------------------------------------------------------------------


def check_scores(model: Model, name: str) -> None:
    """Every score against dense matrices."""
    reference = tiny.Reference(name)
    for fold in (True, False):
        for layer in range(tiny.LAYERS):
            for method, want in dense.scores(reference, layer, fold=fold).items():
                got = FUNCTIONS[method](model, layer, fold_norm=fold)
                assert got.dtype == torch.float32
                assert tiny.relative(tiny.array(got), np.array(want)) < 1e-5, (method, layer, fold)


@each_architecture
def test_scores_are_those_of_the_dense_circuits(name: str) -> None:
    check_scores(tiny.shared(name), name)


@pytest.mark.parametrize("name", ["gpt2", "llama", "llama_mqa", "gemma2", "olmo2"])
@pytest.mark.parametrize("fold", [True, False])
def test_token_copying_is_its_loop(name: str, fold: bool) -> None:
    model, reference = tiny.shared(name), tiny.Reference(name)
    ordinary = list(range(tiny.FIRST_WORD, tiny.VOCAB))  # all but <pad>, <eos> and <unk>
    for layer in range(tiny.LAYERS):
        # With as many tokens as there are, the sample is all of them.
        got = ov_token_copying(model, layer, n_tokens=len(ordinary), top_k=20, fold_norm=fold)
        for head in range(tiny.HEADS):
            logits = dense.circuits(reference, layer, head, fold=fold)["full_ov"]
            hits = sum(token in np.argsort(-logits[token])[:20] for token in ordinary)
            assert float(got[head]) == pytest.approx(hits / len(ordinary), abs=1e-6)


def test_token_copying_tries_100_tokens_or_all_there_are(monkeypatch: Any) -> None:
    model = tiny.shared("llama")
    everything = ov_token_copying(model, 1, n_tokens=94, top_k=30)  # all ordinary tokens there are
    assert torch.equal(ov_token_copying(model, 1, top_k=30), everything)
    monkeypatch.setattr("mechheads.methods.weights._SAMPLE", 20)
    few = ov_token_copying(model, 1, n_tokens=20, top_k=30)
    assert torch.equal(ov_token_copying(model, 1, top_k=30), few) and not torch.equal(few, everything)


def test_token_copying_samples_by_its_seed() -> None:
    model = tiny.shared("llama")
    runs = [ov_token_copying(model, 1, n_tokens=20, top_k=30, seed=seed) for seed in (0, 0, 1, 2)]
    assert torch.equal(runs[0], runs[1])
    assert not (torch.equal(runs[0], runs[2]) and torch.equal(runs[0], runs[3]))
    assert all(float(20 * x) == pytest.approx(round(float(20 * x))) for x in runs[0])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"n_tokens": 95}, "n_tokens is 95; it must be a whole number from 1 to 94"),
        ({"n_tokens": 0}, "n_tokens is 0; it must be a whole number from 1 to 94"),
        ({"n_tokens": 5, "fold_norm": "no"}, "fold_norm is 'no'; it must be True or False"),
        ({"n_tokens": 2.0}, r"n_tokens is 2\.0; it must be a whole number"),
        ({"n_tokens": 5, "top_k": 97}, "top_k is 97; it must be a whole number from 1 to 96"),
        ({"n_tokens": 5, "seed": -1}, "seed is -1; it must be a whole number from 0"),
    ],
)
def test_token_copying_names_an_option_out_of_range(options: dict[str, Any], message: str, as_users_run: None) -> None:
    with pytest.raises(mh.InvalidInput, match=message):
        ov_token_copying(tiny.shared("llama"), 0, **options)


def hand_built() -> Model:
    """A model whose layer 1 has by hand: head 0 a copier, head 1 its opposite, head 2 a matcher, head 3 nothing."""
    model = tiny.fresh("gpt2")
    random = torch.linalg.qr(torch.randn(tiny.WIDTH, tiny.D_HEAD, generator=torch.Generator().manual_seed(0)))[0]
    with torch.no_grad():
        through = (model.W_U @ model.W_E).T
        model.W_V(1)[:] = random
        model.W_O(1)[0] = random.T @ through  # W_O W_U W_E W_V = R^T P^T P R, with positive eigenvalues
        model.W_O(1)[1] = -model.W_O(1)[0]
        model.W_O(1)[3] = 0
        model.W_Q(1)[:] = random
        model.W_K(1)[:] = random
        model.W_K(1)[1] = -random
        model.W_K(1)[3] = 0
    return model


def test_copiers_and_their_opposites() -> None:
    model = hand_built()
    copying = ov_copying(model, 1, fold_norm=False)
    assert copying[:2].tolist() == pytest.approx([1, -1], abs=1e-6)
    assert abs(float(copying[2])) < 0.9
    assert copying[3].isnan()  # a head without weights copies nothing, nor its opposite
    matching = qk_matching(model, 1, fold_norm=False)
    assert matching[:3].tolist() == pytest.approx([1, -1, 1], abs=1e-6)
    assert matching[3].isnan()
    assert ov_norm(model, 1)[3] == 0 and qk_norm(model, 1)[3] == 0
    assert ov_token_copying(model, 1, n_tokens=90)[3] == 0
    named = ov_token_copying(model, 1, n_tokens=90, fold_norm=False)
    assert named[0] > 0.5 and named[1] == 0


def test_grouped_heads_are_scored_with_the_value_head_they_read() -> None:
    model, other = tiny.fresh("llama"), tiny.shared("llama")
    with torch.no_grad():
        model.W_V(1)[1].neg_()
        model.W_K(1)[1].mul_(3)
    flipped = torch.tensor([1.0, 1, -1, -1])
    assert torch.allclose(ov_copying(model, 1), flipped * ov_copying(other, 1), atol=1e-6)
    assert torch.allclose(qk_norm(model, 1), torch.tensor([1.0, 1, 3, 3]) * qk_norm(other, 1))


def test_weights_that_are_no_numbers_are_refused() -> None:
    model = tiny.fresh("llama")
    with torch.no_grad():
        model.W_V(1)[0, 0, 0] = torch.nan
    with pytest.raises(mh.InvalidInput, match="the weights hold NaN or infinity"):
        ov_copying(model, 1)


def test_different_vocabularies_are_refused(monkeypatch: Any, as_users_run: None) -> None:
    model = tiny.shared("llama")
    shorter = model.W_E[:90]
    monkeypatch.setattr(type(model.backend), "embedding", lambda self: shorter)
    with pytest.raises(mh.InvalidInput, match="one side has 97 tokens and the other 90"):
        ov_copying(model, 1)
    with pytest.raises(mh.InvalidInput, match="embeds 90 tokens and unembeds 97"):
        ov_token_copying(model, 1, n_tokens=5)


def test_half_precision_weights_are_scored_in_float64() -> None:
    model = mh.load(tiny.folder("llama"), dtype="bfloat16")
    rounded = tiny.Reference("llama", tiny.plain("llama").to(torch.bfloat16).float())
    want = dense.scores(rounded, 1, fold=True)
    for method, function in FUNCTIONS.items():
        assert tiny.relative(tiny.array(function(model, 1)), np.array(want[method])) < 1e-5, method


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["gpt2", "llama", "gemma2", "opt"])
def test_transformer_lens_own_folding_gives_the_same(name: str) -> None:
    model, raw = tiny.fresh(name), tiny.shared(name)
    bridge: Any = model.backend.bridge  # type: ignore[attr-defined]
    bridge.enable_compatibility_mode(
        disable_warnings=True, fold_ln=True, center_writing_weights=False, center_unembed=False, fold_value_biases=False
    )
    folded = mh.load(bridge, tokenizer=model.tokenizer)
    assert folded.spec.weights == "processed"
    assert not torch.equal(folded.W_V(1), raw.W_V(1))
    for layer in range(tiny.LAYERS):
        for method, function in FUNCTIONS.items():
            got, want = function(folded, layer), function(raw, layer)
            assert tiny.relative(tiny.array(got), tiny.array(want)) < 1e-5, (method, layer)


# -- registration ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*FUNCTIONS, "ov_token_copying"])
def test_scores_run_by_name(name: str) -> None:
    model = tiny.shared("llama")
    trials = [mh.Trial(id="unread", tokens=[5, 6, 7])]
    result = mh.CircuitAnalysis(model).score(name, trials)
    function = {**FUNCTIONS, "ov_token_copying": ov_token_copying}[name]
    want = torch.stack([function(model, layer) for layer in range(tiny.LAYERS)]).numpy()
    assert list(result.trial_ids) == ["weights"]
    assert np.array_equal(result.values[0], want)


# -- arithmetic --------------------------------------------------------------------------------------


def seeded(*shape: int) -> Tensor:
    """Normal numbers, the same every time."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@st.composite
def circuits(draw: st.DrawFn) -> tuple[Tensor, Tensor]:
    """Left ``[head d_model d_head]`` and right ``[head d_head d_model]`` factors."""
    heads, width, d = draw(st.integers(1, 3)), draw(st.integers(2, 6)), draw(st.integers(1, 4))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 10_000)))

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    return normal(heads, width, d), normal(heads, d, width)


@given(circuits(), st.floats(0.01, 100))
@settings(max_examples=40, deadline=None)
def test_eigenvalue_score_properties(factors: tuple[Tensor, Tensor], factor: float) -> None:
    left, right = factors
    small = right @ left
    got = eigenvalue_score(small)
    assert bool((got.abs() <= 1 + 1e-12).all())
    assert torch.allclose(eigenvalue_score(factor * small), got)
    assert torch.allclose(eigenvalue_score(-small), -got)
    turn = np.random.default_rng(0).normal(size=small.shape[1:])
    basis = torch.linalg.qr(torch.from_numpy(turn))[0]
    assert torch.allclose(eigenvalue_score((basis.T @ right) @ (left @ basis)), got, atol=1e-6)
    for head, matrix in enumerate(left @ right):  # the nonzero eigenvalues are those of the large matrix
        if left.shape[2] <= left.shape[1]:
            assert float(got[head]) == pytest.approx(dense.eigenvalue_score(matrix.numpy()), abs=1e-5)


def test_eigenvalue_score_of_known_matrices() -> None:
    turn = torch.tensor([[0.0, -1], [1, 0]])
    known = torch.stack([torch.eye(2), -torch.eye(2), torch.diag(torch.tensor([3.0, -1])), turn, torch.zeros(2, 2)])
    got = eigenvalue_score(known)
    assert got[:4].tolist() == pytest.approx([1, -1, 0.5, 0], abs=1e-12)
    assert got[4].isnan()


@given(circuits())
@settings(max_examples=40, deadline=None)
def test_product_norm_is_that_of_the_dense_product(factors: tuple[Tensor, Tensor]) -> None:
    left, right = factors
    want = torch.linalg.matrix_norm(left @ right)
    assert torch.allclose(product_norm(left, right), want)


@given(st.integers(0, 1000), st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_own_token_rank_is_its_loop(seed: int, chunk: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(2, 3, 4, generator=generator)
    write, W_U = torch.randn(2, 4, 5, generator=generator), torch.randn(5, 8, generator=generator)
    tokens = torch.randperm(8, generator=generator)[:3]
    got = own_token_rank(values, write, W_U, tokens, chunk=chunk)
    for head, n in np.ndindex(2, 3):
        logits = (values[head, n] @ write[head] @ W_U).tolist()
        own = logits[int(tokens[n])]
        assert int(got[head, n]) == sum(x >= own for i, x in enumerate(logits) if i != int(tokens[n]))


def test_vocabulary_product_in_chunks() -> None:
    left, right = seeded(5, 23), seeded(23, 4)
    want = left.double() @ right.double()
    for chunk in (1, 7, 23, 100):
        assert torch.allclose(vocabulary_product(left, right, chunk=chunk), want, atol=1e-5)


def test_vocabulary_product_is_made_once_a_model(monkeypatch: Any) -> None:
    model, made = tiny.fresh("gpt2"), []

    def counting(left: Tensor, right: Tensor) -> Tensor:
        made.append(left.shape)
        return vocabulary_product(left, right)

    monkeypatch.setattr(kernels_weights, "vocabulary_product", counting)
    first = [ov_copying(model, layer, fold_norm=fold) for layer in range(tiny.LAYERS) for fold in (True, False)]
    assert len(made) == 1
    assert len([qk_matching(model, layer) for layer in range(tiny.LAYERS)]) == 3 and len(made) == 2
    model.W_U.data[3, 5] += 1  # an edit behind autograd's back
    assert not torch.equal(ov_copying(model, 0), first[0]) and len(made) == 3


@pytest.mark.parametrize("width", [6, 7])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_vocabulary_products_see_every_edit(dtype: torch.dtype, width: int) -> None:
    left, right = seeded(width, 12).to(dtype), seeded(12, width).to(dtype)
    products = VocabularyProducts()

    def current() -> Tensor:
        got = products.get("some", left, right)
        assert torch.equal(got, vocabulary_product(left, right))
        return got

    first = current()
    assert current() is first
    edits = [
        lambda: right[3].copy_(right[3].flip(0)),  # within a row
        lambda: right.copy_(right.roll(1, 0)),  # rows among each other
        lambda: left[2, 3].mul_(1.02),
        lambda: left.neg_(),
        lambda: right[5, 1].zero_(),
    ]
    for edit in edits:
        before = current()
        edit()
        assert current() is not before
    left = right.T
    assert current() is current()


# -- the other back end ------------------------------------------------------------------------------


@pytest.fixture
def hooked_tests() -> Any:
    """The builders of HookedTransformers; the module cannot be imported by name twice over."""
    return importlib.import_module("test_hooked")


NAMES = tuple("olmo2_mha" if name == "olmo2" else name for name in tiny.ARCHITECTURES)


@pytest.mark.tl3
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("kind", ["hooked", "bridge"])
def test_transformer_lens_3_gives_the_same(name: str, kind: str, hooked_tests: Any) -> None:
    model = hooked_tests.hooked(name) if kind == "hooked" else tiny.shared(name)
    check_weights(model, name)
    check_projections(model, name)
    check_scores(model, name)


@pytest.mark.tl3
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", ["gpt2", "llama", "neox", "qwen3", "opt"])
def test_folded_weights_score_as_raw_ones_with_the_norms_put_in(name: str, hooked_tests: Any) -> None:
    changes = dict.fromkeys(hooked_tests.RAW, True) | {"center_unembed": False}
    model = mh.load(hooked_tests.hooked_transformer(name, **changes))
    assert model.spec.weights.startswith("folded")
    for layer in range(tiny.LAYERS):
        for method, function in FUNCTIONS.items():
            if method == "ov_norm" and name in tiny.LAYER_NORM:
                continue  # what is written is centred there, so its norm is smaller
            got, want = function(model, layer), function(hooked_tests.hooked(name), layer)
            assert tiny.relative(tiny.array(got), tiny.array(want)) < 1e-4, (method, layer)
