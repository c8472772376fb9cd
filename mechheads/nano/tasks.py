"""nano's tasks as trials: retrieval, literal or not, recall and sums; logic worlds come from ``datasets.prontoqa``."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from mechheads.errors import InvalidInput, UnknownName
from mechheads.nano.language import (
    draw_facts,
    question_about,
    recall_questions,
    strewn,
    sums,
)
from mechheads.stats import check_count
from mechheads.trials import Trial, TrialSet

if TYPE_CHECKING:
    from mechheads.model import Model

TASKS = ("literal", "nonliteral", "recall", "arithmetic")


def retrieval(
    model: Model,
    *,
    n: int = 60,
    literal: bool = False,
    facts: int = 5,
    context_length: int = 224,
    calibration: float = 0.5,
    seed: int = 0,
) -> TrialSet:
    """Facts about people strewn in filler, and a question about one of them.

    ``dov lives beside the colosseum.`` is asked for literally (``who lives beside the colosseum?``) or by what is
    known of the landmark (``who lives in italy?``), so that needle and question share no content word but the verb,
    which other facts have too. The needle is the fact's sentence, the answer the person's name; the other facts name
    other people and other countries.

    Args:
        model: nano, or another loaded model with its tokenizer.
        n: Trials.
        literal: Ask by the landmark itself.
        facts: Facts in the context, 1 to 18; the chance of naming a person who is in it is ``1 / facts``.
        context_length: Tokens of the prompt, at most; it is filled up with sentences to within 13.
        calibration: Share of calibration trials; the others are test trials.
        seed: Seed, a whole number from 0.

    Raises:
        InvalidInput: If the model is not loaded, or n, facts, the length, the share or the seed cannot be used.
    """
    _check_common(model, seed)
    check_count("n", n)
    if not isinstance(literal, bool):
        raise InvalidInput(f"literal is {literal!r}; give True (ask by the landmark) or False.")
    check_count("facts", facts, most=18)
    check_count("context_length", context_length, least=9 * facts + 16, most=256)
    if isinstance(calibration, (bool, str)) or not 0 <= calibration <= 1:
        raise InvalidInput(f"calibration is {calibration!r}; it must be a share from 0 to 1.")
    kind = "literal" if literal else "nonliteral"

    def make(rng: random.Random, i: int, split: str) -> Trial:
        known = draw_facts(rng, facts)
        sentences = strewn(rng, known, context_length - 19)
        asked = rng.choice(known)
        prompt = " ".join([*sentences, question_about(asked, literal=literal)])
        meta = {
            "kind": kind, "facts": facts, "needle_depth": sentences.index(asked.sentence) / len(sentences),
            "place": asked.place, "country": asked.country,
        }  # fmt: skip
        return Trial.from_text(
            model,
            prompt,
            needle=asked.sentence,
            answer=asked.name.lower(),
            id=f"{kind}-{seed}-{i}",
            split=split,
            meta=meta,
        )

    options = {"kind": kind, "n": n, "facts": facts, "context_length": context_length, "calibration": calibration,
               "seed": seed}  # fmt: skip
    return _drawn(f"nano {kind}", make, n, calibration, seed, options)


def recall(model: Model, *, n: int = 40, seed: int = 0) -> TrialSet:
    """Questions on memorised facts: in which country a landmark is, what a country's capital is; at most 54."""
    return _listed(model, "recall", recall_questions(), n, seed)


def arithmetic(model: Model, *, n: int = 40, seed: int = 0) -> TrialSet:
    """Sums and differences of one-digit numbers; at most 155."""
    return _listed(model, "arithmetic", sums(), n, seed)


def trials(model: Model, task: str, *, n: int = 60, seed: int = 0) -> TrialSet:
    """One of nano's tasks by name: ``literal``, ``nonliteral``, ``recall`` or ``arithmetic``.

    Raises:
        UnknownName: For another task.
    """
    if task not in TASKS:
        raise UnknownName("task of nano", task, TASKS, hint="Logic worlds are made by datasets.prontoqa.")
    if task in ("literal", "nonliteral"):
        return retrieval(model, n=n, literal=task == "literal", seed=seed)
    return (recall if task == "recall" else arithmetic)(model, n=n, seed=seed)


def _check_common(model: Any, seed: Any) -> None:
    """Refuse what is no loaded model, and a seed that is none."""
    from mechheads.model import Model  # brings torch along, which a loaded model has done already

    if not isinstance(model, Model):
        raise InvalidInput(
            f"model is {model!r}, a {type(model).__name__}; trials need a loaded model's tokenizer: "
            'give mh.load("nano").'
        )
    check_count("seed", seed, least=0)


def _drawn(
    name: str, make: Callable[[random.Random, int, str], Trial], n: int, calibration: float, seed: int, options: dict
) -> TrialSet:
    """Trials drawn one by one, those of a split from seeds of their own."""
    cut = round(n * calibration)
    drawn = []
    for i in range(n):
        split = "calibration" if i < cut else "test"
        drawn.append(make(random.Random(f"{name}:{seed}:{split}:{i}"), i, split))
    return TrialSet(drawn, name=name, options=options)


def _listed(model: Model, kind: str, known: list[tuple[str, str]], n: int, seed: int) -> TrialSet:
    """Some of a fixed list of questions, none twice."""
    _check_common(model, seed)
    check_count("n", n, most=len(known))
    asked = random.Random(f"{kind}:{seed}").sample(known, n)
    drawn = [
        Trial.from_text(model, question, answer=answer, id=f"{kind}-{i}", meta={"kind": kind})
        for i, (question, answer) in enumerate(asked)
    ]
    return TrialSet(drawn, name=f"nano {kind}", options={"kind": kind, "n": n, "seed": seed})
