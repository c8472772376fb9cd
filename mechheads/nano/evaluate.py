"""How well nano does each of its tasks, on worlds, contexts and lists of facts it has not seen."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mechheads.datasets.logic_worlds import RULES, least_depth, make_world
from mechheads.nano.language import (
    TRUTHS,
    draw_facts,
    draw_recall,
    draw_sum,
    pieces,
    question_about,
    strewn,
)
from mechheads.nano.rows import ids

# Guessing one of the five people of a context; the commonest answer of a list; one of two verdicts.
CHANCE = {"literal": 0.2, "nonliteral": 0.2, "recall": 0.04, "arithmetic": 0.1, "logic": 0.5}
# Never a seed of training: those are written "seed:step".
_HELD_OUT = "held out"


def retrieval_prompt(rng: random.Random, *, literal: bool, facts: int = 5, length: int = 224) -> tuple[str, str]:
    """A context of several facts, a question about one of them, and its answer."""
    known = draw_facts(rng, facts)
    sentences = strewn(rng, known, length - 18)
    asked = rng.choice(known)
    return " ".join([*sentences, question_about(asked, literal=literal)]), asked.name.lower()


def logic_prompt(rng: random.Random, *, rule: str, depth: int, distractors: int = 2) -> tuple[str, str, str, str]:
    """A world with a claim, its answer, and its twin: the same world with the claim about the other person."""
    world = make_world(rng, rule=rule, depth=depth, distractors=distractors)
    claim = rng.choice(world.claims)
    polarity = [c for c in world.claims if c.person == claim.person].index(claim)
    twin = [c for c in world.claims if c.person != claim.person][polarity]
    context = " ".join(world.premises)
    return (
        f"{context} claim: {claim.statement}",
        TRUTHS[claim.label],
        f"{context} claim: {twin.statement}",
        TRUTHS[twin.label],
    )


@torch.no_grad()
def right(model: Any, asked: Sequence[tuple[str, str]]) -> float:
    """Share of prompts after which the right word is the most likely."""
    rows = [[ids()["<bos>"], *(ids()[p] for p in pieces(prompt))] for prompt, _ in asked]
    width = max(map(len, rows))
    tokens = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    logits = model(input_ids=tokens, use_cache=False).logits
    last = torch.tensor([len(row) - 1 for row in rows])
    best = logits[torch.arange(len(rows)), last].argmax(-1).tolist()
    return sum(b == ids()[answer] for b, (_, answer) in zip(best, asked, strict=True)) / len(rows)


def accuracies(
    model: Any, *, tasks: Sequence[str] = ("retrieval", "memory", "logic"), n: int = 64, seed: int = 0
) -> dict[str, float]:
    """Accuracy over ``n`` held-out prompts of each kind: of the tasks ``retrieval``, ``memory`` and ``logic``."""
    model.eval()
    found = {}
    drawn: dict[str, Callable[[random.Random], tuple[str, str]]] = {}
    if "retrieval" in tasks:
        drawn["literal"] = lambda rng: retrieval_prompt(rng, literal=True)
        drawn["nonliteral"] = lambda rng: retrieval_prompt(rng, literal=False)
    if "memory" in tasks:
        drawn |= {"recall": draw_recall, "arithmetic": draw_sum}
    for kind, draw in drawn.items():
        rng = random.Random(f"{_HELD_OUT}:{seed}:{kind}")
        found[kind] = right(model, [draw(rng) for _ in range(n)])
    return found | (_logic_accuracies(model, n, seed) if "logic" in tasks else {})


def _logic_accuracies(model: Any, n: int, seed: int) -> dict[str, float]:
    """Modus ponens by depth with its label-flipped twins, then every other rule over the depths 1 to 3."""
    found = {}
    for depth in (1, 2, 3):
        rng = random.Random(f"{_HELD_OUT}:{seed}:logic:{depth}")
        asked = [logic_prompt(rng, rule="modus_ponens", depth=depth) for _ in range(n)]
        found[f"depth {depth}"] = right(model, [(a, b) for a, b, _, _ in asked])
        found[f"depth {depth}, flipped"] = right(model, [(a, b) for _, _, a, b in asked])
    for rule in RULES[1:]:
        rng = random.Random(f"{_HELD_OUT}:{seed}:{rule}")
        asked = [logic_prompt(rng, rule=rule, depth=max(least_depth(rule), rng.randint(1, 3))) for _ in range(n)]
        found[rule] = right(model, [(a, b) for a, b, _, _ in asked])
    return found
