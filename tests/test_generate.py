"""Greedy generation: batches, stops, limits and log-probabilities."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import tiny
import torch
from helpers import LENGTHS, prompts

import mechheads as mh
from mechheads.generate import generate

MODELS = ("llama", "gpt2")


@pytest.fixture(scope="module", params=MODELS)
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def model(name: str) -> mh.Model:
    return tiny.shared(name)


def test_equals_plain_greedy_decoding_in_the_order_given(name: str, model: mh.Model) -> None:
    asked = prompts()
    said = generate(model, asked, max_new_tokens=8, batch_size=4)
    assert list(LENGTHS) != sorted(LENGTHS)  # they are run by length
    reference = tiny.Reference(name)
    for p, got in zip(asked, said, strict=True):
        tokens, logprobs = reference.greedy(p, 8)
        assert list(got.tokens) == tokens and len(tokens) == 8 and got.stopped == "length"
        np.testing.assert_allclose(got.logprobs, logprobs, atol=1e-4)
        assert got.text == model.decode(tokens)
    assert len({g.tokens for g in said}) == len(said)


@pytest.mark.parametrize("run", [{"batch_size": 1}, {"batch_size": 4}, {"padding": "right"}])
def test_batches_equal_singles(model: mh.Model, run: dict[str, Any]) -> None:
    asked = prompts()
    together = generate(model, asked, max_new_tokens=8, batch_size=6)
    for a, b in zip(together, generate(model, asked, max_new_tokens=8, **run), strict=True):
        assert a.tokens == b.tokens and a.stopped == b.stopped
        np.testing.assert_allclose(a.logprobs, b.logprobs, atol=1e-4)


def test_logprobs_are_those_of_the_uncached_logits(model: mh.Model) -> None:
    prompt = prompts()[0]
    said = generate(model, [prompt], max_new_tokens=6)[0]
    rows = model.logits([*prompt, *said.tokens]).float().log_softmax(-1)
    at = range(len(prompt) - 1, len(prompt) + 5)
    want = [float(rows[i, t]) for i, t in zip(at, said.tokens, strict=True)]
    np.testing.assert_allclose(said.logprobs, want, atol=1e-4)
    assert all(p < 0 for p in said.logprobs)


def test_the_stop_token_is_left_out(llama: mh.Model) -> None:
    asked = prompts(seed=2)
    said = generate(llama, asked, max_new_tokens=12)
    ends = [g.stopped for g in said]
    assert ends.count("stop token") == 2 and ends.count("length") == 4
    for p, got in zip(asked, said, strict=True):
        assert len(got.tokens) == len(got.logprobs)
        if got.stopped == "stop token":
            assert len(got.tokens) < 12 and tiny.EOS not in got.tokens
            assert int(llama.logits([*p, *got.tokens])[-1].argmax()) == tiny.EOS
    silent = said[5]
    assert silent.tokens == () and silent.text == "" and silent.logprobs == ()


def newline_model(token: int) -> mh.Model:
    """The tiny Llama with a tokenizer in which one token's text holds a line break."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocab = {"<pad>": 0, "<eos>": 1, "<unk>": 2} | {f"w{i}": i for i in range(3, 97)}
    vocab = {word + ("\n" if i == token else ""): i for word, i in vocab.items()}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # pyright: ignore[reportAttributeAccessIssue]
    made = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="<eos>", unk_token="<unk>")
    return mh.load(tiny.folder("llama"), tokenizer=made)


def test_an_answer_may_end_before_a_line_break() -> None:
    prompt = prompts()[0]
    free = generate(tiny.shared("llama"), [prompt], max_new_tokens=6)[0]
    third = free.tokens[2]
    assert third not in free.tokens[:2]
    model = newline_model(third)
    assert model.is_newline(third) and not model.is_newline(free.tokens[0])
    cut = generate(model, [prompt], max_new_tokens=6, stop_at_newline=True)[0]
    assert cut.tokens == free.tokens[:2] and cut.stopped == "newline" and "\n" not in cut.text
    on = generate(model, [prompt], max_new_tokens=6)[0]
    assert on.tokens == free.tokens and on.stopped == "length"
    both = generate(model, [prompt, prompts()[1]], max_new_tokens=6, stop_at_newline=True)
    assert both[0].tokens == cut.tokens and len(both[1].tokens) == 6  # the other row goes on


def test_the_context_limits_the_answer(name: str, model: mh.Model) -> None:
    full, near, short = (prompts((n,), seed=s)[0] for n, s in ((128, 1), (126, 1), (9, 1)))
    reference = tiny.Reference(name)
    assert list(generate(model, [full], max_new_tokens=10)[0].tokens) == reference.greedy(full, 1)[0]
    assert list(generate(model, [near], max_new_tokens=10)[0].tokens) == reference.greedy(near, 3)[0]
    said = generate(model, [full, short, near], max_new_tokens=10)
    assert [len(g.tokens) for g in said] == [1, 10, 3]  # a long neighbour does not shorten an answer
    assert list(said[1].tokens) == reference.greedy(short, 10)[0]
    assert {g.stopped for g in said} == {"length"}


def test_one_token_prompts(name: str, model: mh.Model) -> None:
    said = generate(model, [[17], [5, 6, 7, 8]], max_new_tokens=4)
    reference = tiny.Reference(name)
    assert [list(g.tokens) for g in said] == [reference.greedy(p, 4)[0] for p in ([17], [5, 6, 7, 8])]


def test_the_same_call_twice_is_bit_for_bit_the_same(model: mh.Model) -> None:
    first, second = (generate(model, prompts(), max_new_tokens=6) for _ in range(2))
    assert first == second
    assert torch.equal(model.logits(prompts()[0]), model.logits(prompts()[0]))


@pytest.mark.parametrize(
    ("asked", "options", "told"),
    [
        ([[]], {}, "prompt 0 has no tokens"),
        ([[5] * 129], {}, "prompt 0 has 129 tokens, but .* takes at most 128"),
        ([[5], [97]], {}, "token ids outside 0 to 96"),
        ([[5]], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([[5]], {"padding": "middle"}, "unknown padding side 'middle'"),
        ([[5]], {"batch_size": 0}, "batch_size is 0; it must be at least 1"),
        ([[5], [6, 7]], {"padding": "right"}, "at least 2 tokens here; use padding='left'"),
    ],
)
def test_prompts_that_cannot_run(llama: mh.Model, asked: Any, options: dict[str, Any], told: str) -> None:
    with pytest.raises(mh.InvalidInput, match=told):
        generate(llama, asked, **options)


def test_the_message_names_the_prompt_as_the_caller_counts(llama: mh.Model) -> None:
    asked = [[5] * 3, [5] * 2, [5] * 129, [5] * 20]
    with pytest.raises(mh.InvalidInput, match="prompt 2 has 129 tokens"):
        generate(llama, asked, batch_size=2)


def test_no_prompts(llama: mh.Model) -> None:
    with pytest.raises(mh.InvalidInput, match="no prompts"):
        generate(llama, [])
