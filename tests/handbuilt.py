"""A retrieval model whose weights are set by hand, so that what each head does is known and not measured.

One attention layer, three heads, no MLP and no positions. A *feature* is a pair of residual dimensions holding (1, -1),
so features are orthogonal and the norms (whose mean is then 0) only scale. Every word has a feature that it brings in
(``reads``) and another one that the unembedding looks for (``says``).

``in which city ?`` (the answer is not in the needle: "Yuki lives beside Semperoper" means Dresden)
    * head A attends hard to every word of the needle, and writes a feature that no word's unembedding looks for;
    * head B attends less, to the landmark alone, and writes "say the landmark's city";
    * head C looks at the prompt's first token.
``in which colour :`` (literal: the needle says "Mila paints red")
    * head C attends to the colour and writes "say that colour";
    * heads A and B look at the prompt's first token.

The embedding of a question mark says ``unknown`` faintly: what the model answers if no head knows better. After an
answer it says the end token.
"""

from __future__ import annotations

import atexit
import functools
import math
import shutil
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers

import mechheads as mh
from mechheads.model import Model

A, B, C = "L0H0", "L0H1", "L0H2"

CITIES = {"Semperoper": "Dresden", "Colosseum": "Rome", "Kremlin": "Moscow", "Parthenon": "Athens"}
COLOURS = ("red", "green", "blue", "white")
NEEDLE_WORDS = ("Yuki", "lives", "beside", *CITIES)
ANSWERS = (*CITIES.values(), *COLOURS)
HAYSTACK = ("rice", "river", "snow", "bread", "clock", "train", "goat", "hill", "lamp", "door")
FIRST, LAST, UNKNOWN, CITY_QUESTION, COLOUR_QUESTION = "<first>", "<end>", "unknown", "?", ":"
WORDS = (
    "<pad>", LAST, "<unk>", FIRST, UNKNOWN, ".", "N/A", "in", "which", "city", "colour", CITY_QUESTION,
    COLOUR_QUESTION, "Mila", "paints", *NEEDLE_WORDS, *ANSWERS, *HAYSTACK,
)  # fmt: skip
TOKEN = {word: i for i, word in enumerate(WORDS)}
N_HEADS = 3
# Two features a word, and one that no unembedding looks for; as many dimensions as the heads can share.
N_FEATURES = 2 * len(WORDS) + 1
WIDTH = N_HEADS * math.ceil(2 * N_FEATURES / N_HEADS)
D_HEAD = WIDTH // N_HEADS

# How strongly keys match the query, as attention scores (nats before the softmax).
SINK, HARD, LESS, COPY = 4.0, 6.0, 4.5, 6.0


def feature(i: int) -> torch.Tensor:
    """``[d_model]`` a direction of the residual stream: orthogonal to every other, and to the all-ones vector."""
    out = torch.zeros(WIDTH)
    out[2 * i], out[2 * i + 1] = 1.0, -1.0
    return out


def reads(word: str) -> torch.Tensor:
    """What a word brings in."""
    return feature(TOKEN[word])


def says(word: str) -> torch.Tensor:
    """What the unembedding of a word looks for."""
    return feature(len(WORDS) + TOKEN[word])


USELESS = feature(2 * len(WORDS))


class Head:
    """Weights of one head, to be filled in by what it should do; rows of its four matrices are ``[d_head ...]``."""

    def __init__(self) -> None:
        self.q, self.k, self.v = (torch.zeros(WIDTH, D_HEAD) for _ in range(3))
        self.q_bias = torch.zeros(D_HEAD)
        self.out = torch.zeros(D_HEAD, WIDTH)
        self.n_read = 0
        # Whatever the query: the prompt's first token, which holds nothing.
        self.q_bias[0] = math.sqrt(D_HEAD)
        self.k[:, 0] = SINK * _detect(FIRST)

    def attend(self, query: str, keys: Sequence[str], score: float) -> None:
        """From one query word to some key words, with that attention score."""
        self.q[:, 1] = math.sqrt(D_HEAD) * _detect(query)
        for key in keys:
            self.k[:, 1] += score * _detect(key)

    def write(self, word: str, direction: torch.Tensor) -> None:
        """What is written where that word is read."""
        self.v[:, self.n_read] = _detect(word)
        self.out[self.n_read] = direction
        self.n_read += 1


def _detect(word: str) -> torch.Tensor:
    """``[d_model]`` whose product with a word's embedding is 1, and 0 with any other's."""
    return reads(word) / 2


def heads() -> tuple[Head, Head, Head]:
    """The three heads."""
    a, b, c = Head(), Head(), Head()
    a.attend(CITY_QUESTION, NEEDLE_WORDS, HARD)
    for word in NEEDLE_WORDS:
        a.write(word, USELESS)
    b.attend(CITY_QUESTION, list(CITIES), LESS)
    for landmark, city in CITIES.items():
        b.write(landmark, 4 * says(city))
    c.attend(COLOUR_QUESTION, COLOURS, COPY)
    for colour in COLOURS:
        c.write(colour, 4 * says(colour))
    return a, b, c


@functools.cache
def folder() -> Path:
    """The model as a folder, written once a session."""
    made = Path(tempfile.mkdtemp(prefix="hand-built-"))
    atexit.register(shutil.rmtree, made, ignore_errors=True)
    _network().save_pretrained(made)
    _tokenizer().save_pretrained(made)
    return made


@functools.cache
def model() -> Model:
    """The model, loaded the way a user's is."""
    return mh.load(folder())


@torch.no_grad()
def _network() -> Any:
    end = TOKEN[LAST]
    config = hf.GPT2Config(
        vocab_size=len(WORDS), n_embd=WIDTH, n_layer=1, n_head=N_HEADS, n_positions=128, n_inner=8,
        tie_word_embeddings=False, bos_token_id=end, eos_token_id=end, pad_token_id=0,
    )  # fmt: skip
    network: Any = hf.GPT2LMHeadModel(config).eval()
    for parameter in network.parameters():
        parameter.zero_()
    network.config.architectures = ["GPT2LMHeadModel"]
    base, attention = network.transformer, network.transformer.h[0].attn
    base.wte.weight.copy_(torch.stack([reads(word) for word in WORDS]))
    # A feature has a mean square of 2 / d_model; with this weight the norms give an embedding back as it is.
    for norm in (base.h[0].ln_1, base.h[0].ln_2, base.ln_f):
        norm.weight.fill_(math.sqrt(2 / WIDTH))
    all_heads = heads()
    attention.c_attn.weight.copy_(torch.cat([getattr(h, part) for part in "qkv" for h in all_heads], dim=1))
    attention.c_attn.bias[:WIDTH] = torch.cat([h.q_bias for h in all_heads])
    attention.c_proj.weight.copy_(torch.cat([h.out for h in all_heads]))
    looked_for = {word: says(word) / 2 for word in WORDS}
    looked_for[UNKNOWN] = looked_for[UNKNOWN] + 0.5 * (_detect(CITY_QUESTION) + _detect(COLOUR_QUESTION))
    for word in (*ANSWERS, UNKNOWN):
        looked_for[LAST] = looked_for[LAST] + _detect(word)
    network.lm_head.weight.copy_(torch.stack([looked_for[word] for word in WORDS]))
    return network


def _tokenizer() -> Any:
    words = Tokenizer(models.WordLevel(TOKEN, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token=LAST, bos_token=LAST, pad_token="<pad>", unk_token="<unk>"
    )


def _trial(name: str, needle: str, question: str, answer: str, before: int, after: int) -> mh.Trial:
    text = [FIRST, *(HAYSTACK[i % len(HAYSTACK)] for i in range(before)), *needle.split()]
    at = (len(text) - len(needle.split()), len(text))
    text += [HAYSTACK[(3 * i + 1) % len(HAYSTACK)] for i in range(after)]
    asked = (len(text), len(text) + len(question.split()))
    tokens = [TOKEN[word] for word in (*text, *question.split())]
    return mh.Trial(id=name, tokens=tokens, spans={"needle": at, "question": asked}, answer=answer)


def non_literal() -> mh.TrialSet:
    """Needles that mean the answer without holding it, at several depths and lengths."""
    return mh.TrialSet(
        (
            _trial(f"city {city}", f"Yuki lives beside {landmark}", f"in which city {CITY_QUESTION}", city, 3 * i + 1,
                   14 - 2 * i)
            for i, (landmark, city) in enumerate(CITIES.items())
        ),
        name="non-literal",
    )  # fmt: skip


def literal() -> mh.TrialSet:
    """Needles that hold the answer."""
    return mh.TrialSet(
        (
            _trial(f"colour {c}", f"Mila paints {c}", f"in which colour {COLOUR_QUESTION}", c, 2 * i + 2, 12 - i)
            for i, c in enumerate(COLOURS)
        ),
        name="literal",
    )
