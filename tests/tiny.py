"""Tiny random models of every supported architecture, and a reference that reads them without TransformerLens.

Every weight, norm and bias is random, so that no term of an identity is zero by accident.
"""

from __future__ import annotations

import atexit
import functools
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers as hf
from tokenizers import Tokenizer, models, pre_tokenizers
from torch import Tensor, nn

import mechheads as mh
from mechheads.model import Model

VOCAB, LAYERS, HEADS, D_HEAD, WIDTH, WINDOW, N_CTX = 97, 3, 4, 16, 64, 8, 128
EOS = 1
FIRST_WORD = 3

_IDS: dict[str, Any] = {"bos_token_id": EOS, "eos_token_id": EOS, "pad_token_id": 0}
_COMMON: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": WIDTH,
    "intermediate_size": 96,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "max_position_embeddings": N_CTX,
    **_IDS,
}
_GROUPED: dict[str, Any] = {**_COMMON, "num_key_value_heads": 2}
_MIXED = ["sliding_attention", "full_attention", "sliding_attention"]
_SLIDING: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": _MIXED}

_CONFIGS: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: hf.GPT2Config(
        vocab_size=VOCAB, n_embd=WIDTH, n_layer=LAYERS, n_head=HEADS, n_positions=N_CTX, **{"n_ctx": N_CTX, **_IDS}
    ),
    "opt": lambda: hf.OPTConfig(
        vocab_size=VOCAB, hidden_size=WIDTH, ffn_dim=96, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        max_position_embeddings=N_CTX, word_embed_proj_dim=WIDTH, **_IDS,
    ),
    "neox": lambda: hf.GPTNeoXConfig(**{**_COMMON, "rotary_pct": 0.25}),
    "llama": lambda: hf.LlamaConfig(**_GROUPED),
    "llama_mqa": lambda: hf.LlamaConfig(**{**_GROUPED, "num_key_value_heads": 1}),
    "mistral": lambda: hf.MistralConfig(**_GROUPED, sliding_window=WINDOW, head_dim=D_HEAD),
    "qwen2": lambda: hf.Qwen2Config(**_GROUPED),
    "qwen3": lambda: hf.Qwen3Config(**_GROUPED, head_dim=D_HEAD),
    "gemma2": lambda: hf.Gemma2Config(
        **_GROUPED, head_dim=D_HEAD, sliding_window=WINDOW, query_pre_attn_scalar=24
    ),
    "gemma3": lambda: hf.Gemma3TextConfig(**_GROUPED, **_SLIDING, head_dim=D_HEAD, query_pre_attn_scalar=24),
    "olmo2": lambda: hf.Olmo2Config(**_GROUPED),
    "olmo3": lambda: hf.Olmo3Config(**_GROUPED, **_SLIDING),
    "phi3": lambda: hf.Phi3Config(**_GROUPED),
    "gptoss": lambda: hf.GptOssConfig(
        **_GROUPED, **_SLIDING, head_dim=D_HEAD, num_local_experts=4, num_experts_per_tok=2
    ),
}  # fmt: skip
ARCHITECTURES = tuple(_CONFIGS)
# HookedTransformer converts OLMo-2 only with as many key/value heads as query heads.
_CONFIGS["olmo2_mha"] = lambda: hf.Olmo2Config(**_COMMON)
# Written down by hand, so that the package's own reading of the configurations is checked against it.
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "mistral": (WINDOW,) * 3,
    "gemma2": (WINDOW, None, WINDOW),
    "gemma3": (WINDOW, None, WINDOW),
    "olmo3": (WINDOW, None, WINDOW),
    "gptoss": (WINDOW, None, WINDOW),
}
JOINT = ("gpt2", "neox", "phi3")
LAYER_NORM = ("gpt2", "opt", "neox")


def windows(name: str) -> tuple[int | None, ...]:
    """Keys each layer may see, itself included; None for all."""
    return WINDOWS.get(name, (None,) * LAYERS)


def tokenizer() -> Any:
    """One token a word: ``w3`` to ``w96``."""
    vocab = {"<pad>": 0, "<eos>": EOS, "<unk>": 2, **{f"w{i}": i for i in range(FIRST_WORD, VOCAB)}}
    words = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return hf.PreTrainedTokenizerFast(
        tokenizer_object=words, eos_token="<eos>", pad_token="<pad>", unk_token="<unk>", bos_token="<eos>"
    )


def build(name: str, *, seed: int = 0, **changes: Any) -> Any:
    """A Hugging Face model with random weights, norms and biases, in float32, with eager attention."""
    config = _CONFIGS[name]()
    for key, value in changes.items():
        setattr(config, key, value)
    torch.manual_seed(seed)
    model = hf.AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    model.config.architectures = [type(model).__name__]
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(parameter + 0.1 * noise if parameter.ndim == 1 else 0.15 * noise)
    return model


def save(model: Any, folder: Path) -> Path:
    """Write a model with the tokenizer."""
    model.save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


@functools.cache
def _root() -> Path:
    root = Path(tempfile.mkdtemp(prefix="tiny-models-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


@functools.cache
def folder(name: str) -> Path:
    """Folder of a tiny model, written once a session."""
    return save(build(name), _root() / name)


def fresh(name: str) -> Model:
    """A model of one's own, to edit."""
    # For this one architecture transformers replaces the folder's word-level tokenizer with a byte-level one.
    words = hf.PreTrainedTokenizerFast.from_pretrained(folder(name)) if name == "qwen2" else None
    return mh.load(folder(name), tokenizer=words)


@functools.cache
def shared(name: str) -> Model:
    """The model of an architecture, loaded once a session; for tests that leave it as it is."""
    return fresh(name)


def plain(name: str) -> Any:
    """The Hugging Face model in the folder, without TransformerLens."""
    return hf.AutoModelForCausalLM.from_pretrained(
        folder(name), attn_implementation="eager", dtype=torch.float32
    ).eval()


def prompt(length: int, *, seed: int) -> list[int]:
    """Random words."""
    return np.random.default_rng(seed).integers(FIRST_WORD, VOCAB, length).tolist()


@dataclass(frozen=True)
class Run:
    """One uncached forward of the Hugging Face model, as numpy float64 arrays.

    Attributes:
        logits: ``[pos vocab]``.
        uncapped: ``[pos vocab]`` before a soft-cap.
        attention: For each layer ``[head query key]``.
        v: For each layer ``[pos kv_head d_head]``.
        attention_out: For each layer ``[pos d_model]``, before any post norm.
        embedding: ``[pos d_model]`` what enters the first block.
        resid: ``[pos d_model]`` what enters the final norm.
    """

    logits: np.ndarray
    uncapped: np.ndarray
    attention: list[np.ndarray]
    v: list[np.ndarray]
    attention_out: list[np.ndarray]
    embedding: np.ndarray
    resid: np.ndarray


def array(x: Tensor) -> np.ndarray:
    """A tensor as float64."""
    return x.detach().double().numpy()


class Reference:
    """A Hugging Face model taken apart by its own module names, with plain PyTorch hooks."""

    def __init__(self, name: str, model: Any = None):
        self.name = name
        self.model = plain(name) if model is None else model
        base = self.model.base_model
        blocks = {"gpt2": "h", "opt": "decoder.layers"}.get(name, "layers")
        self.layers: list[Any] = list(base.get_submodule(blocks))
        at = {"gpt2": "attn", "neox": "attention"}.get(name, "self_attn")
        self.attentions = [getattr(layer, at) for layer in self.layers]
        out = {"gpt2": "c_proj", "opt": "out_proj", "neox": "dense"}.get(name, "o_proj")
        self.outs = [getattr(attention, out) for attention in self.attentions]
        norm = {"gpt2": "ln_f", "opt": "decoder.final_layer_norm", "neox": "final_layer_norm"}.get(name, "norm")
        self.final_norm = base.get_submodule(norm)
        self.head = self.model.get_output_embeddings()

    @torch.no_grad()
    def run(self, tokens: Sequence[int]) -> Run:
        """Everything at once."""
        seen: dict[Any, Tensor] = {}

        def keep(module: nn.Module, key: Any, *, ingoing: bool = False) -> Any:
            if ingoing:
                return module.register_forward_pre_hook(lambda m, args: seen.__setitem__(key, args[0][0]))
            return module.register_forward_hook(lambda m, args, output: seen.__setitem__(key, output[0]))

        handles = [
            keep(self.layers[0], "embedding", ingoing=True),
            keep(self.final_norm, "resid", ingoing=True),
            keep(self.head, "uncapped"),
        ]
        for i in range(LAYERS):
            handles += [keep(self.outs[i], ("out", i)), keep(self._value_module(i), ("v", i))]
        result = self.model(torch.tensor([list(tokens)]), output_attentions=True)
        for handle in handles:
            handle.remove()
        return Run(
            logits=array(result.logits[0]),
            uncapped=array(seen["uncapped"]),
            attention=[array(a[0]) for a in result.attentions],
            v=[array(self._values(seen["v", i])) for i in range(LAYERS)],
            attention_out=[array(seen["out", i]) for i in range(LAYERS)],
            embedding=array(seen["embedding"]),
            resid=array(seen["resid"]),
        )

    @torch.no_grad()
    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """``[pos vocab]`` without a cache."""
        return array(self.model(torch.tensor([list(tokens)]), use_cache=False).logits[0])

    def greedy(self, tokens: Sequence[int], n: int) -> tuple[list[int], list[float]]:
        """Greedy answer without a cache: tokens before the end token, and their log-probabilities."""
        said: list[int] = []
        logprobs: list[float] = []
        for _ in range(n):
            row = self.logits([*tokens, *said])[-1]
            best = int(row.argmax())
            if best == EOS:
                break
            said.append(best)
            logprobs.append(float(row[best] - row.max() - np.log(np.exp(row - row.max()).sum())))
        return said, logprobs

    def _value_module(self, layer: int) -> nn.Module:
        names = {"gpt2": "c_attn", "neox": "query_key_value", "phi3": "qkv_proj"}
        return getattr(self.attentions[layer], names.get(self.name, "v_proj"))

    def _values(self, x: Tensor) -> Tensor:
        """``[pos kv_head d_head]`` from the projection's output."""
        if self.name == "gpt2":
            x = x[:, 2 * WIDTH :]
        elif self.name == "neox":  # for each head: its query, its key, its value
            return x.reshape(len(x), HEADS, 3, D_HEAD)[:, :, 2]
        elif self.name == "phi3":  # all queries, two keys, two values
            x = x[:, (HEADS + 2) * D_HEAD :]
        return x.reshape(len(x), -1, D_HEAD)

    def w_o(self, layer: int) -> np.ndarray:
        """``[head d_head d_model]``."""
        weight = self.outs[layer].weight
        weight = weight if self.name == "gpt2" else weight.T  # GPT-2 stores its matrices transposed
        return array(weight).reshape(HEADS, D_HEAD, WIDTH)

    def b_o(self, layer: int) -> np.ndarray:
        """``[d_model]``."""
        bias = self.outs[layer].bias
        return np.zeros(WIDTH) if bias is None else array(bias)

    def w_u(self) -> np.ndarray:
        """``[d_model vocab]``."""
        return array(self.head.weight).T

    @torch.no_grad()
    def zero_head(self, layer: int, head: int) -> None:
        """Zero a head's rows of the output projection."""
        rows = slice(head * D_HEAD, (head + 1) * D_HEAD)
        if self.name == "gpt2":
            self.outs[layer].weight[rows] = 0
        else:
            self.outs[layer].weight[:, rows] = 0

    def through_final_norm(self, part: np.ndarray, resid: np.ndarray) -> np.ndarray:
        """A part of one position's residual stream, after the final norm with that position's scale, bias left out."""
        norm = self.final_norm
        weight = array(norm.weight) + (1 if self.name.startswith("gemma") else 0)
        eps = norm.variance_epsilon if hasattr(norm, "variance_epsilon") else norm.eps
        if self.name in LAYER_NORM:
            part, resid = part - part.mean(), resid - resid.mean()
        return part / np.sqrt((resid**2).mean() + eps) * weight

    def final_bias(self) -> np.ndarray:
        """Bias of the final norm."""
        return array(self.final_norm.bias) if self.name in LAYER_NORM else np.zeros(WIDTH)


def relative(got: np.ndarray, want: np.ndarray) -> float:
    """Largest difference over the largest magnitude; 0 only for equal zeros if nothing is wanted."""
    got, want = np.asarray(got, dtype=float), np.asarray(want, dtype=float)
    assert got.shape == want.shape and np.isfinite(want).all()
    return float(np.abs(got - want).max() / max(np.abs(want).max(), 1e-30))


@dataclass(frozen=True)
class Case:
    """A trial with what the Hugging Face model answers to it without a cache.

    Attributes:
        trial: Its answer is what the model says at ``steps``, so that it passes the gate.
        said: Greedy tokens.
        logprobs: Their log-probabilities.
        steps: Where the answer stands first in ``said``.
    """

    trial: mh.Trial
    said: list[int]
    logprobs: list[float]
    steps: list[int]


@functools.cache
def cases(name: str, *, new_tokens: int = 5) -> tuple[Case, ...]:
    """Trials of several lengths: one needle or two, in and out of the sliding window, answers of 1 to 3 tokens."""
    layouts = (
        (21, ((3, 6),), slice(1, 3)),
        (30, ((4, 7), (22, 25)), slice(0, 3)),
        (14, ((9, 12),), slice(2, 3)),
        (9, ((0, 2), (5, 6)), None),
    )
    reference = Reference(name)
    found = []
    for i, (length, needle, part) in enumerate(layouts):
        tokens, said, logprobs = talkative(reference, length, new_tokens, seed=100 * i)
        steps = list(range(len(said)))
        answer = None
        if part is not None:
            wanted = said[part]
            first = next(s for s in steps if said[s : s + len(wanted)] == wanted)
            steps = list(range(first, first + len(wanted)))
            answer = " ".join(f"w{t}" for t in wanted)
        trial = mh.Trial(id=f"{name}-{i}", tokens=tokens, spans={"needle": list(needle)}, answer=answer)
        found.append(Case(trial, said, logprobs, steps))
    return tuple(found)


def talkative(
    reference: Reference, length: int, new_tokens: int, *, seed: int
) -> tuple[list[int], list[int], list[float]]:
    """The first prompt to which the model says that many plain words, none of them by a hair."""
    for attempt in range(100):
        tokens = prompt(length, seed=seed + attempt)
        said, logprobs = reference.greedy(tokens, new_tokens)
        if len(said) < new_tokens or min(said) < FIRST_WORD:
            continue
        rows = np.sort(reference.logits([*tokens, *said])[length - 1 : -1], axis=-1)
        if (rows[:, -1] - rows[:, -2]).min() > 0.02:
            return tokens, said, logprobs
    raise AssertionError(f"{reference.name} never says {new_tokens} words")


def loop_scores(name: str, case: Case, ref: Reference) -> dict[str, np.ndarray]:
    """LOCOS, DLA and attention-spatial of one trial, ``[layer head]``, by loops over layers, steps, heads and keys."""
    run = ref.run([*case.trial.tokens, *case.said])
    needle = case.trial.positions("needle")
    u = ref.w_u()
    out = {m: np.zeros((LAYERS, HEADS)) for m in ("locos", "attention_spatial", "dla")}
    for layer in range(LAYERS):
        w_o, window = ref.w_o(layer), windows(name)[layer]
        group = HEADS // run.v[layer].shape[1]
        for head in range(HEADS):
            for step in case.steps:
                query = len(case.trial.tokens) - 1 + step
                first = 0 if window is None else max(0, query - window + 1)
                total, inside = query - first + 1, 0
                parts = {"phi": [0.0, 0.0], "alpha": [0.0, 0.0]}
                for key in range(first, query + 1):
                    alpha = run.attention[layer][head, query, key]
                    written = run.v[layer][key, head // group] @ w_o[head]
                    on = key in needle
                    inside += on
                    parts["phi"][on] += alpha * (written @ u[:, case.said[step]])
                    parts["alpha"][on] += alpha
                for method, part in (("locos", "phi"), ("attention_spatial", "alpha")):
                    off, plus = parts[part]
                    minus = inside / (total - inside) * off if inside else 0.0
                    out[method][layer, head] += (plus - minus) / len(case.steps)
                out["dla"][layer, head] += sum(parts["phi"]) / len(case.steps)
    return out
