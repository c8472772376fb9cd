"""Attention patterns that name a head, on repeated random tokens: induction, previous token, duplicate token.

All three read the same prompts: ``[BOS] r r`` with r a row of distinct random tokens, so that nothing but position and
repetition tells tokens apart, and they are looked at from the second copy alone. Asked for together, with the same
options, they share one capture.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.capture import LayerActs
from mechheads.errors import InvalidInput
from mechheads.methods.registry import method
from mechheads.model import Model
from mechheads.stats import check_count
from mechheads.trials import Trial, TrialSet

# Below this the induction key, the previous token and the duplicate are not three different positions.
_SHORTEST = 3


def ordinary_tokens(model: Model) -> list[int]:
    """Token ids that stand for text: all but special and added tokens, the end tokens and ids past the tokenizer.

    Without a tokenizer: every id but the end tokens.
    """
    tokenizer = model.backend.tokenizer
    out, size = set(model.stop_tokens), model.spec.d_vocab
    if tokenizer is not None:
        size = min(size, len(tokenizer))
        out |= {*tokenizer.all_special_ids, *getattr(tokenizer, "added_tokens_decoder", ())}
    return [token for token in range(size) if token not in out]


def repeated_tokens(model: Model, options: Mapping[str, Any]) -> TrialSet:
    """Prompts ``[BOS] r r`` of random tokens repeated once.

    Args:
        model: The model; its tokenizer says which tokens are special and whether prompts start with a BOS.
        options: ``seq_len`` (tokens of r), ``n_sequences``, ``seed`` and ``bos`` (None: as the model's own tokenizer
            does; True; False).

    Returns:
        Trials with the spans ``first`` and ``second``, the two copies.

    Raises:
        InvalidInput: For options out of range, prompts longer than the context, or a BOS that does not exist.
    """
    ordinary = ordinary_tokens(model)
    start = _bos(model, options["bos"])
    longest = min(len(ordinary), (model.spec.n_ctx - len(start)) // 2)
    if longest < _SHORTEST:
        raise InvalidInput(
            f"{model.spec.name!r} has {len(ordinary)} ordinary tokens and a context of {model.spec.n_ctx}: too few for "
            f"{_SHORTEST} tokens repeated once."
        )
    length = check_count(
        "seq_len (so that the two copies fit the context)", options["seq_len"], least=_SHORTEST, most=longest
    )
    n = check_count("n_sequences", options["n_sequences"], most=1_000_000)
    seed = check_count("seed", options["seed"], least=0, most=2**63 - 1)
    rng = np.random.default_rng(seed)
    first = (len(start), len(start) + length)
    spans = {"first": first, "second": (first[1], first[1] + length)}
    trials = []
    for i in range(n):
        row = rng.choice(ordinary, size=length, replace=False).tolist()
        trials.append(Trial(id=f"repeat-{seed}-{i}", tokens=[*start, *row, *row], spans=spans))
    used = {"seq_len": length, "n_sequences": n, "seed": seed, "bos": bool(start)}
    return TrialSet(trials, name="repeated_tokens", options=used)


def _bos(model: Model, wanted: bool | None) -> list[int]:
    """The BOS token a prompt starts with, or nothing."""
    if wanted is not None and not isinstance(wanted, bool):
        raise InvalidInput(f"bos is {wanted!r}; it must be None (as the model's own tokenizer does), True or False.")
    tokenizer = model.backend.tokenizer
    bos = getattr(tokenizer, "bos_token_id", None)
    if wanted and bos is None:
        raise InvalidInput(f"bos is True, but {model.spec.name!r} has no tokenizer with a BOS token; use bos=False.")
    if wanted is None:
        wanted = bos is not None and list(tokenizer("a")["input_ids"])[:1] == [bos]
    return [int(bos)] if wanted and bos is not None else []


def second_copy(trial: Trial, options: Mapping[str, Any]) -> tuple[int, ...]:
    """Query positions that are read: the whole second copy."""
    return trial.positions("second")


def attention_to_offset(acts: LayerActs, back: int) -> Float[Tensor, " head"]:
    """Mean attention from each captured row to the key that lies ``back`` positions before it.

    Args:
        acts: One layer at rows of the prompt.
        back: Distance from query to key, at least 0.

    Returns:
        Probability, 0 to 1, mean over the rows that can see their key (a sliding window may hide it); NaN where none
        can.
    """
    query = acts.steps + (len(acts.trial.tokens) - 1)
    key = query - back
    index = key.clamp(min=0)
    seen = (key >= 0) & acts.visible.gather(1, index[:, None])[:, 0]
    pattern = acts.need("pattern").float()
    found = pattern.gather(2, index[None, :, None].expand(len(pattern), -1, 1))[..., 0]
    return torch.where(seen, found, torch.nan).nanmean(-1)


@method(
    "induction", needs=("pattern",), unit="probability", rows=second_copy, prompts=repeated_tokens,
    paper="https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads/index.html",
)  # fmt: skip
def induction(
    acts: LayerActs, trial: Trial, *, seq_len: int = 32, n_sequences: int = 8, seed: int = 0, bos: bool | None = None
) -> Float[Tensor, " head"]:
    """Prefix matching: attention to the token that followed the current one the last time.

    On ``[BOS] r r``, ``mean over i in the second copy of alpha[i, i - seq_len + 1]`` (Olsson et al. 2022, "In-context
    Learning and Induction Heads"). Brings its own prompts: the caller's trials are not read, and nothing is generated.

    The number is a plain share of the row. TransformerLens' ``detect_head(exclude_bos=True)`` divides by the attention
    that is left beside the BOS, which is NaN for a head that attends to nothing else; here such a head scores 0.
    Rows whose key a sliding window hides are left out, and a head with no other rows is NaN.

    Where the tokenizer puts no BOS, the first random token has to take the attention of heads with nothing to do. A
    token that cannot makes the model fail on that sequence, and its scores (kept by sequence) are low: see ``bos``.

    Args:
        acts: One layer at the second copy.
        trial: One repeated sequence.
        seq_len: Tokens of r, at least 3.
        n_sequences: Sequences drawn.
        seed: Of the tokens.
        bos: Start with a BOS: None as the model's own tokenizer does, True, False.

    Returns:
        Probability, 0 to 1. Uniform attention gives about ``1 / (1.5 seq_len)``; an induction head nears 1.

    Raises:
        InvalidInput: For options out of range, or prompts longer than the context.
    """
    return attention_to_offset(acts, seq_len - 1)


@method(
    "previous_token", needs=("pattern",), unit="probability", rows=second_copy, prompts=repeated_tokens,
    paper="https://transformer-circuits.pub/2022/in-context-learning-and-induction-heads/index.html",
)  # fmt: skip
def previous_token(
    acts: LayerActs, trial: Trial, *, seq_len: int = 32, n_sequences: int = 8, seed: int = 0, bos: bool | None = None
) -> Float[Tensor, " head"]:
    """Attention to the token just before.

    On ``[BOS] r r``, ``mean over i in the second copy of alpha[i, i - 1]``: such heads write into each position what
    induction heads look for (Olsson et al. 2022). Prompts, rows and options as for ``induction``.

    Args:
        acts: One layer at the second copy.
        trial: One repeated sequence.
        seq_len: Tokens of r, at least 3.
        n_sequences: Sequences drawn.
        seed: Of the tokens.
        bos: Start with a BOS: None as the model's own tokenizer does, True, False.

    Returns:
        Probability, 0 to 1.

    Raises:
        InvalidInput: As for ``induction``.
    """
    return attention_to_offset(acts, 1)


@method(
    "duplicate_token", needs=("pattern",), unit="probability", rows=second_copy, prompts=repeated_tokens,
    paper="arXiv 2211.00593",
)  # fmt: skip
def duplicate_token(
    acts: LayerActs, trial: Trial, *, seq_len: int = 32, n_sequences: int = 8, seed: int = 0, bos: bool | None = None
) -> Float[Tensor, " head"]:
    """Attention to the same token where it stood before.

    On ``[BOS] r r``, ``mean over i in the second copy of alpha[i, i - seq_len]`` (Wang et al. 2022, "Interpretability
    in the Wild"). Prompts, rows and options as for ``induction``.

    Args:
        acts: One layer at the second copy.
        trial: One repeated sequence.
        seq_len: Tokens of r, at least 3.
        n_sequences: Sequences drawn.
        seed: Of the tokens.
        bos: Start with a BOS: None as the model's own tokenizer does, True, False.

    Returns:
        Probability, 0 to 1.

    Raises:
        InvalidInput: As for ``induction``.
    """
    return attention_to_offset(acts, seq_len)
