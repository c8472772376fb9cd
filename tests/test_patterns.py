"""Induction, previous-token and duplicate-token scores against loops over a plain Hugging Face model's attention."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import tiny
import torch
import transformers as hf
from helpers import counted
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers.processors import TemplateProcessing
from torch import Tensor

import mechheads as mh
from mechheads.capture import LayerActs
from mechheads.methods.patterns import (
    attention_to_offset,
    duplicate_token,
    induction,
    ordinary_tokens,
    previous_token,
    repeated_tokens,
    second_copy,
)
from mechheads.model import Model

FUNCTIONS = {"induction": induction, "previous_token": previous_token, "duplicate_token": duplicate_token}
DEFAULTS = {"seq_len": 12, "n_sequences": 3, "seed": 0, "bos": None}
FAMILIES = ("gpt2", "llama", "llama_mqa", "mistral", "gemma3", "gptoss", "opt")


def offset(name: str, seq_len: int) -> int:
    """How far before the query each method's key lies."""
    return {"induction": seq_len - 1, "previous_token": 1, "duplicate_token": seq_len}[name]


def prompts(model: Model, **changes: Any) -> mh.TrialSet:
    return repeated_tokens(model, {**DEFAULTS, **changes})


def hand_made(pattern: Tensor, *, prompt: int, rows: list[int], window: int | None = None) -> LayerActs:
    """One layer whose rows of the prompt attend as given, ``[head row key]``."""
    key, query = torch.arange(prompt)[None], torch.tensor(rows)[:, None]
    visible = (key <= query) & (key > query - (window or prompt + 1))
    trial = mh.Trial(id="made", tokens=[5] * prompt, spans={"second": (rows[0], rows[-1] + 1)})
    return LayerActs(
        model=tiny.shared("llama"),
        trial=trial,
        layer=0,
        steps=torch.tensor(rows) - (prompt - 1),
        targets=torch.full((len(rows),), -1),
        tokens=torch.tensor(trial.tokens),
        visible=visible,
        pattern=pattern,
    )


# -- prompts -----------------------------------------------------------------------------------------


def test_prompts_are_one_row_twice() -> None:
    model = tiny.shared("llama")
    trials = prompts(model)
    assert len(trials) == 3 and trials.name == "repeated_tokens"
    assert trials.options == {"seq_len": 12, "n_sequences": 3, "seed": 0, "bos": False}
    for trial in trials:
        assert trial.positions("first") == tuple(range(12)) and trial.positions("second") == tuple(range(12, 24))
        first, second = trial.tokens[:12], trial.tokens[12:]
        assert first == second and len(set(first)) == 12
        assert min(first) >= tiny.FIRST_WORD
        assert second_copy(trial, DEFAULTS) == tuple(range(12, 24))
    assert len({trial.tokens for trial in trials}) == 3


def test_prompts_follow_the_seed() -> None:
    model = tiny.shared("llama")
    some, same, others = (prompts(model, seed=seed) for seed in (3, 3, 4))
    assert [t.tokens for t in some] == [t.tokens for t in same]
    assert not {t.tokens for t in some} & {t.tokens for t in others}
    assert not {t.id for t in some} & {t.id for t in others}
    longer = prompts(model, seed=3, n_sequences=5)
    assert [t.tokens for t in longer][:3] == [t.tokens for t in some]


def with_bos() -> Any:
    """A tokenizer that puts a BOS before every text."""
    words = hf.PreTrainedTokenizerFast.from_pretrained(tiny.folder("llama"))
    words.backend_tokenizer.post_processor = TemplateProcessing(single="<eos> $A", special_tokens=[("<eos>", tiny.EOS)])
    return words


@pytest.mark.parametrize(("own", "asked", "there"), [
    (False, None, False), (True, None, True), (False, True, True), (True, False, False), (False, False, False),
])  # fmt: skip
def test_a_bos_is_put_where_the_tokenizer_puts_one_or_as_asked(own: bool, asked: bool | None, there: bool) -> None:
    model = mh.load(tiny.folder("llama"), tokenizer=with_bos()) if own else tiny.shared("llama")
    trials = prompts(model, bos=asked)
    assert trials.options["bos"] is there
    for trial in trials:
        assert (trial.tokens[0] == tiny.EOS) is there
        assert len(trial.tokens) == 24 + there
        assert trial.positions("second") == tuple(range(12 + there, 24 + there))


def test_ordinary_tokens_leave_special_and_added_ones_out() -> None:
    assert ordinary_tokens(tiny.shared("llama")) == list(range(3, 97))
    words = hf.PreTrainedTokenizerFast.from_pretrained(tiny.folder("llama"))
    words.add_tokens(["w7"])  # known already: stays ordinary text, but is added now
    words.add_tokens(["more"])  # id 97, which the model has no row for
    assert ordinary_tokens(mh.load(tiny.folder("llama"), tokenizer=words)) == [i for i in range(3, 97) if i != 7]
    bare = tiny.fresh("llama")
    bare.backend.tokenizer = None
    assert ordinary_tokens(bare) == [i for i in range(97) if i != tiny.EOS]
    assert prompts(bare).options["bos"] is False


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"seq_len": 2}, r"seq_len \(so that the two copies fit the context\) is 2; it must be a whole number from 3"),
        ({"seq_len": 65}, "is 65; it must be a whole number from 3 to 64"),
        ({"seq_len": 64, "bos": True}, "is 64; it must be a whole number from 3 to 63"),
        ({"seq_len": 8.0}, r"is 8\.0; it must be a whole number"),
        ({"bos": 1}, "bos is 1; it must be None"),
        ({"n_sequences": True}, "n_sequences is True; it must be a whole number from 1"),
        ({"n_sequences": 0}, "n_sequences is 0; it must be a whole number from 1"),
        ({"seed": -1}, "seed is -1; it must be a whole number from 0"),
        ({"bos": "yes"}, r"bos is 'yes'; it must be None \(as the model's own tokenizer does\), True or False"),
    ],
)
def test_an_option_out_of_range_is_named(changes: dict[str, Any], message: str, as_users_run: None) -> None:
    with pytest.raises(mh.InvalidInput, match=message):
        prompts(tiny.shared("llama"), **changes)


def test_a_bos_that_does_not_exist_and_a_context_too_short_are_named() -> None:
    bare = tiny.fresh("llama")
    bare.backend.tokenizer = None
    with pytest.raises(mh.InvalidInput, match=r"bos is True, but .* has no tokenizer with a BOS token"):
        prompts(bare, bos=True)
    bare.spec = replace(bare.spec, n_ctx=5)
    with pytest.raises(mh.InvalidInput, match="96 ordinary tokens and a context of 5: too few for 3 tokens repeated"):
        prompts(bare)


# -- the arithmetic ----------------------------------------------------------------------------------


def test_hand_built_heads() -> None:
    """On r r with three tokens: an induction head, a duplicate head, a previous head and one that reads token 0."""
    rows, width = [3, 4, 5], 6
    pattern = torch.zeros(4, 3, width)
    for row, query in enumerate(rows):
        for head, key in enumerate((query - 2, query - 3, query - 1, 0)):
            pattern[head, row, key] = 0.75
            pattern[head, row, query] += 0.25
    acts = hand_made(pattern, prompt=6, rows=rows)
    want = {
        "induction": [0.75, 0, 0, 0],
        "duplicate_token": [0, 0.75, 0, 0.25],  # token 0 is the first row's duplicate
        "previous_token": [0, 0, 0.75, 0],
    }
    for name, function in FUNCTIONS.items():
        assert function(acts, acts.trial, seq_len=3).tolist() == pytest.approx(want[name]), name


def test_a_head_that_reads_the_bos_alone_scores_0_and_keeps_its_pattern() -> None:
    pattern = torch.zeros(1, 3, 7)
    pattern[..., 0] = 1
    acts = hand_made(pattern, prompt=7, rows=[4, 5, 6])
    assert [float(f(acts, acts.trial, seq_len=3)) for f in FUNCTIONS.values()] == [0, 0, 0]
    assert torch.equal(acts.need("pattern")[..., 0], torch.ones(1, 3))


def test_keys_before_the_prompt_or_out_of_the_window_do_not_count() -> None:
    pattern = torch.full((2, 4, 6), 0.1)
    pattern[0, :, 0] = torch.tensor([0.2, 0.4, 0.6, 0.8])
    acts = hand_made(pattern, prompt=6, rows=[2, 3, 4, 5])
    assert attention_to_offset(acts, 2).tolist() == pytest.approx([(0.2 + 0.1 * 3) / 4, 0.1])
    assert attention_to_offset(acts, 3).tolist() == pytest.approx([(0.4 + 0.1 * 2) / 3, 0.1])  # row 2 has no such key
    assert attention_to_offset(acts, 6).isnan().all()
    near = hand_made(pattern, prompt=6, rows=[2, 3, 4, 5], window=3)
    assert attention_to_offset(near, 2).tolist() == pytest.approx([(0.2 + 0.1 * 3) / 4, 0.1])
    assert attention_to_offset(near, 3).isnan().all()


@given(st.integers(0, 1000), st.integers(0, 9), st.integers(1, 10))
@settings(max_examples=40, deadline=None)
def test_offset_attention_is_its_loop(seed: int, back: int, window: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = sorted(torch.randperm(9, generator=generator)[:4].tolist())
    acts = hand_made(torch.rand(2, 4, 9, generator=generator), prompt=9, rows=rows, window=window)
    got = attention_to_offset(acts, back)
    for head in range(2):
        seen = [
            float(acts.need("pattern")[head, row, query - back])
            for row, query in enumerate(rows)
            if query - back >= 0 and back < window
        ]
        assert float(got[head]) == pytest.approx(np.mean(seen) if seen else np.nan, nan_ok=True)


# -- on models ---------------------------------------------------------------------------------------


def loop_scores(name: str, model: Model, options: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """``[trial layer head]`` by loops over the Hugging Face model's attention."""
    reference, trials = tiny.Reference(name), repeated_tokens(model, options)
    length = options["seq_len"]
    out = {m: np.full((len(trials), tiny.LAYERS, tiny.HEADS), np.nan) for m in FUNCTIONS}
    for i, trial in enumerate(trials):
        attention = reference.run(trial.tokens).attention
        start = len(trial.tokens) - length
        for layer in range(tiny.LAYERS):
            window = tiny.windows(name)[layer] or len(trial.tokens)
            for head in range(tiny.HEADS):
                for method in FUNCTIONS:
                    back = offset(method, length)
                    seen = [attention[layer][head, q, q - back] for q in range(start, start + length) if back < window]
                    if seen:
                        out[method][i, layer, head] = np.mean(seen)
    return out


def check_model(model: Model, name: str, **changes: Any) -> None:
    """All three scores of a model against the loops."""
    options = {**DEFAULTS, **changes}
    got = mh.CircuitAnalysis(model).score(list(FUNCTIONS), [mh.Trial(id="unread", tokens=[5, 6, 7])], **options)
    for method, want in loop_scores(name, model, options).items():
        values = got[method].values
        assert values.shape == want.shape
        # A sequence whose every key is out of sight says nothing of any head.
        assert got[method].kept.tolist() == (~np.isnan(want).all((1, 2))).tolist()
        assert np.array_equal(np.isnan(values), np.isnan(want)), method
        assert np.nanmax(np.abs(values - want), initial=0) < 1e-5, method
        assert (values[~np.isnan(values)] >= 0).all() and (values[~np.isnan(values)] <= 1).all()


@pytest.mark.parametrize("name", FAMILIES)
def test_scores_are_their_loops(name: str) -> None:
    check_model(tiny.shared(name), name)


@pytest.mark.parametrize("name", ["llama", "mistral"])
@pytest.mark.parametrize("seq_len", [3, 7, 8, 9])
def test_windows_around_the_length_of_a_copy(name: str, seq_len: int) -> None:
    check_model(tiny.shared(name), name, seq_len=seq_len, n_sequences=2, bos=True)


def test_the_longest_prompts_fit() -> None:
    check_model(tiny.shared("gpt2"), "gpt2", seq_len=tiny.N_CTX // 2, n_sequences=1)


def test_the_three_read_one_capture_and_no_trial(monkeypatch: Any) -> None:
    model = tiny.shared("llama")
    ca, trials = mh.CircuitAnalysis(model), [mh.Trial(id="unread", tokens=[5, 6, 7])]
    with counted(model, monkeypatch) as alone:
        ca.score("induction", trials, **DEFAULTS)
    with counted(model, monkeypatch) as together:
        ca.score(list(FUNCTIONS), trials, **DEFAULTS)
    assert alone == together and sum(alone.values()) > 0


@pytest.mark.smollm2
def test_smollm2_has_induction_heads(smollm2_model: Any) -> None:
    options = {"seq_len": 32, "n_sequences": 8, "seed": 0, "bos": None}
    trials = repeated_tokens(smollm2_model, options)
    assert len(trials[0].tokens) == 64  # its tokenizer puts no BOS
    unknown, known = [], []
    for trial in trials:
        p = smollm2_model.logits(trial.tokens).softmax(-1)
        said = p[torch.arange(63), torch.tensor(trial.tokens[1:])]
        unknown.append(float(said[:31].mean()))
        known.append(float(said[32:].mean()))
    assert np.mean(known) > 0.15 and np.mean(unknown) < 1e-4
    got = mh.CircuitAnalysis(smollm2_model).score(list(FUNCTIONS), trials, **options)
    assert {str(head) for head in got["induction"].top(3)} == {"L18H6", "L17H4", "L17H3"}
    assert {str(head) for head in got["previous_token"].top(2)} == {"L16H0", "L11H1"}
    assert {str(head) for head in got["duplicate_token"].top(2)} == {"L14H3", "L8H0"}
    for result in got.values():
        assert (result.mean() > 0.5).sum() >= 2 and np.median(result.mean()) < 0.05
    # With a token that can take the attention of heads with nothing to do, more heads are above one half.
    with_bos = mh.CircuitAnalysis(smollm2_model).score("induction", trials, **{**options, "bos": True})
    assert (with_bos.mean() > 0.5).sum() > (got["induction"].mean() > 0.5).sum()


# -- the other back end ------------------------------------------------------------------------------


@pytest.mark.tl3
@pytest.mark.filterwarnings("ignore:.*deprecated:DeprecationWarning")
@pytest.mark.parametrize("name", FAMILIES)
def test_transformer_lens_3_gives_the_same(name: str) -> None:
    check_model(importlib.import_module("test_hooked").hooked(name), name)
