"""The detectors that read attention, once more: loops over a plain Hugging Face model's attention, nothing shared.

Every function returns ``[layer head]`` and takes one uncached forward of prompt and answer.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import tiny
import torch
from tiny import FIRST_WORD, HEADS, LAYERS, Reference

import mechheads as mh


@dataclass(frozen=True)
class Echo:
    """A trial whose prompt holds what the model says to it.

    Attributes:
        trial: With a needle and a question after it; its answer is what the model says at ``steps``.
        said: Tokens before the end.
        stop: The token taken to end the answer, or None if it just goes on.
        steps: Where the answer stands in ``said``.
    """

    trial: mh.Trial
    said: list[int]
    stop: int | None
    steps: list[int]

    @property
    def following(self) -> list[int]:
        """The token that each generated step leads to."""
        return [*self.said, *([] if self.stop is None else [self.stop])]


def seen(name: str, layer: int, query: int) -> range:
    """Positions of the keys that a query can see."""
    window = tiny.windows(name)[layer]
    return range(0 if window is None else max(0, query - window + 1), query + 1)


def each_head(value: Callable[[int, int], float]) -> np.ndarray:
    """``[layer head]`` of a function of both."""
    out = np.zeros((LAYERS, HEADS))
    for layer in range(LAYERS):
        for head in range(HEADS):
            out[layer, head] = value(layer, head)
    return out


def wu(name: str, echo: Echo, reference: Reference, *, counting: str, span: str) -> np.ndarray:
    """Copies over the span's tokens."""
    prompt = list(echo.trial.tokens)
    tokens = [*prompt, *echo.said]
    rows = reference.run(tokens).attention
    needle = [p for s in echo.trial.spans["needle"] for p in range(s.start, s.stop)]
    if span == "answer":
        wanted = [echo.said[s] for s in echo.steps]
        starts = [p for p in needle if prompt[p : p + len(wanted)] == wanted and p + len(wanted) - 1 in needle]
        needle = list(range(starts[0], starts[0] + len(wanted))) if starts else []
        if not needle:
            return np.full((LAYERS, HEADS), np.nan)

    def one(layer: int, head: int) -> float:
        copied = []
        for step, token in enumerate(echo.following):
            query = len(prompt) - 1 + step
            best = max(seen(name, layer, query), key=lambda j: rows[layer][head, query, j])
            if best in needle and tokens[best] == token:
                copied.append(token)
        if counting == "step":
            return len(copied) / len(needle)
        return len(set(copied)) / len({tokens[p] for p in needle})

    return each_head(one)


def contrastive(name: str, echo: Echo, reference: Reference, *, form: str, top: int = 10) -> dict[str, np.ndarray]:
    """``plus``, ``minus`` and ``contrast``."""
    prompt = list(echo.trial.tokens)
    rows = reference.run([*prompt, *echo.said]).attention
    needle = set(echo.trial.positions("needle"))

    def at_step(layer: int, head: int, step: int) -> float:
        query = len(prompt) - 1 + step
        weights = {j: rows[layer][head, query, j] for j in seen(name, layer, query)}
        if form == "mass":
            return sum(w for j, w in weights.items() if j in needle)
        best = sorted(weights, key=lambda j: -weights[j])[:top]
        return sum(j in needle for j in best) / top

    def mean(which: Sequence[int]) -> np.ndarray:
        return each_head(lambda layer, head: float(np.mean([at_step(layer, head, s) for s in which])))

    others = [s for s in range(len(echo.following)) if s not in echo.steps]
    plus, minus = mean(echo.steps), mean(others)
    return {"plus": plus, "minus": minus, "contrast": np.where(plus > minus, plus - minus, 0.0)}


def headkv(name: str, trial: mh.Trial, reference: Reference, *, window: int) -> np.ndarray:
    """Most needle attention of any of the last prompt tokens."""
    n, rows = len(trial.tokens), reference.run(trial.tokens).attention
    needle = trial.positions("needle")

    def one(layer: int, head: int) -> float:
        return max(sum(rows[layer][head, query, j] for j in needle) for query in range(max(0, n - window), n))

    return each_head(one)


def qrhead(
    name: str, trial: mh.Trial, reference: Reference, *, null: Sequence[int] | None, query: str, drop_outliers: bool
) -> dict[str, np.ndarray]:
    """``score``, ``raw`` and, with documents, ``first``; ``null`` stands for the question in the null prompt."""
    tokens, [question] = list(trial.tokens), trial.spans["question"]
    rows = reference.run(tokens).attention
    last = question.stop if query == "question" else len(tokens)
    # The null prompt: a whole forward of its own.
    other: list[np.ndarray] | None = None
    null_last = 0
    if null is not None:
        without = [*tokens[: question.start], *null, *tokens[question.stop :]]
        other = reference.run(without).attention
        null_last = question.start + len(null) if query == "question" else len(without)

    def read(layer: int, head: int, key: int, *, calibrated: bool = True) -> float:
        total = float(np.mean([rows[layer][head, i, key] for i in range(question.start, last)]))
        if calibrated and other is not None:
            total -= float(np.mean([other[layer][head, i, key] for i in range(question.start, null_last)]))
        return total

    def document(layer: int, head: int, span: mh.Span, *, raw: bool = False) -> float:
        values = [read(layer, head, j, calibrated=not raw) for j in range(span.start, span.stop)]
        if drop_outliers and not raw and len(values) > 1:
            mean = sum(values) / len(values)
            deviation = (sum((v - mean) ** 2 for v in values) / (len(values) - 1)) ** 0.5
            values = [v for v in values if v > mean - 2 * deviation]
        return sum(values)

    gold = trial.spans["needle"]
    out = {
        "score": each_head(lambda la, h: sum(document(la, h, s) for s in gold)),
        "raw": each_head(lambda la, h: sum(document(la, h, s, raw=True) for s in gold)),
    }
    if "documents" in trial.spans:
        documents = trial.spans["documents"]

        def first(layer: int, head: int) -> float:
            best = max(documents, key=lambda s: document(layer, head, s))
            return float(any(best.start <= p < best.stop for p in trial.positions("needle")))

        out["first"] = each_head(first)
    return out


@functools.cache
def echoes(name: str) -> tuple[Echo, ...]:
    """Prompts that go on from what the model said itself, of two lengths; a third whose answer ends, if any."""
    reference = Reference(name)
    found: list[Echo] = []
    for i, (length, ends) in enumerate(((20, False), (27, False), (33, True))):
        possible = (_echo(name, reference, line, ends, f"{name}-{i}") for line in _lines(reference, length + 6, seed=i))
        echo = next((echo for echo in possible if echo is not None), None)
        assert echo is not None or ends, f"{name} never copies from a prompt of {length} tokens"
        found += [] if echo is None else [echo]
    return tuple(found)


@torch.no_grad()
def _lines(reference: Reference, length: int, *, seed: int, n: int = 40) -> list[list[int]]:
    """Random starts of 8 words, gone on with greedily."""
    starts = torch.tensor([tiny.prompt(8, seed=1000 * seed + i) for i in range(n)])
    whole = reference.model.generate(
        starts, attention_mask=torch.ones_like(starts), max_new_tokens=length - 8, do_sample=False
    )
    return [line for line in whole.tolist() if len(line) == length and min(line) >= FIRST_WORD]


def _echo(name: str, reference: Reference, line: list[int], ends: bool, trial_id: str) -> Echo | None:
    """A trial whose last 6 tokens the model says, or None if it wavers or copies nothing."""
    tokens, said, length = line[:-6], line[-6:], len(line) - 6
    stop = None
    if ends:  # what the model says sixth is declared an end token, so it must not come earlier
        if said[5] in said[:5]:
            return None
        said, stop = said[:5], said[5]
    wanted = said[1:3]
    first = next(s for s in range(len(said)) if said[s : s + 2] == wanted)
    # The needle ends three tokens before the prompt's end (the question's), within the reach of any window.
    needle = (length - 12, length - 3)
    logits = np.sort(reference.logits(line)[length - 1 : -1], axis=-1)
    if reference.greedy(tokens, 6)[0] != line[-6:] or (logits[:, -1] - logits[:, -2]).min() < 0.02:
        return None
    trial = mh.Trial(
        id=trial_id,
        tokens=tokens,
        spans={"needle": needle, "question": (length - 3, length - 1)},
        answer=" ".join(f"w{t}" for t in wanted),
    )
    echo = Echo(trial, said, stop, [first, first + 1])
    return echo if ends or wu(name, echo, reference, counting="step", span="needle").any() else None
