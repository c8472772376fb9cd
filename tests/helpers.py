"""Prompts and trials for the tiny models of ``tiny``, and a count of forward passes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

import mechheads as mh
from mechheads.generate import generate

LENGTHS = (20, 13, 17, 29, 13, 8)


def prompts(lengths: Sequence[int] = LENGTHS, *, seed: int = 1) -> list[list[int]]:
    """Random prompts of ordinary words; with seed 1 the tiny Llama and GPT-2 say at least 12 tokens to each."""
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(4, 97, (n,), generator=generator).tolist() for n in lengths]


def answered(
    model: mh.Model,
    lengths: Sequence[int] = LENGTHS,
    *,
    at: slice | Sequence[slice] = slice(1, 3),
    seed: int = 1,
    name: str = "tiny",
) -> mh.TrialSet:
    """Trials whose gold answer is what the model says at some of its first tokens (the same for all, or each)."""
    tokens = prompts(lengths, seed=seed)
    slices = [at] * len(tokens) if isinstance(at, slice) else at
    said = generate(model, tokens, max_new_tokens=6, batch_size=len(tokens))
    trials = [
        mh.Trial(id=f"t{i}", tokens=p, spans={"needle": (2, 5)}, answer=model.decode(s.tokens[where]))
        for i, (p, s, where) in enumerate(zip(tokens, said, slices, strict=True))
    ]
    return mh.TrialSet(trials, name=name, options={"seed": seed})


@contextlib.contextmanager
def counted(model: mh.Model, monkeypatch: Any) -> Iterator[dict[str, int]]:
    """Count the back end's forward passes, by kind."""
    calls = {"run": 0, "prefill": 0}

    def counting(name: str) -> Any:
        inner = getattr(model.backend, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            calls[name] += 1
            return inner(*args, **kwargs)

        return call

    with monkeypatch.context() as patch:
        for name in calls:
            patch.setattr(model.backend, name, counting(name))
        yield calls


def texts(figure: Any) -> list[str]:
    """Every text of a figure that a reader sees or hovers over."""
    found: list[str] = []

    def collect(value: Any) -> None:
        if isinstance(value, str):
            found.append(value)
        elif isinstance(value, dict):
            for part in value.values():
                collect(part)
        elif isinstance(value, (list, tuple, np.ndarray)):
            for part in value:
                collect(part)

    collect(figure.to_dict()["layout"])
    for trace in figure.data:
        collect(trace.customdata)
        collect([trace.name or "", trace.hovertemplate or ""])
    return found
