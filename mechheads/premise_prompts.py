"""What premise ablation needs of prompts: where premises stand, what heads attend to, and prompts without some."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import torch

from mechheads.backends.base import SITES, HookFn
from mechheads.candidates import read_question
from mechheads.datasets import logic
from mechheads.datasets.logic_prompts import make_trial, question_of, template_of
from mechheads.datasets.logic_worlds import word_pools
from mechheads.decode import pad
from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.model import Model
from mechheads.provenance import content_hash
from mechheads.trials import Span, Trial

# -- attention to premises ------------------------------------------------------------------------------------


def premise_spans(model: Model, trial: Trial) -> list[Span]:
    """Token spans of a logic trial's premises, in their order.

    Raises:
        InvalidInput: If the trial is no logic trial, its text gives other tokens with this model, or the premises do
            not stand in it as one text.
    """
    question = question_of(trial)
    template = template_of(trial)
    prompt = template.fill(question)
    encoding = model.encode(prompt.text, chat=template.chat)
    if tuple(encoding.tokens) != tuple(trial.tokens):
        raise InvalidInput(f"trial {trial.id!r} was made with another tokenizer or chat template than this model's.")
    base, context = encoding.text.find(prompt.text), " ".join(question.premises)
    start, (begin, end) = prompt.text.find(context), prompt.statement
    while 0 <= start < end and start + len(context) > begin:  # that is the statement, which may read as a premise does
        start = prompt.text.find(context, start + 1)
    if base < 0 or start < 0:
        raise InvalidInput(f"the premises of trial {trial.id!r} do not stand in its prompt, so none can be located.")
    spans, at = [], base + start
    for i, text in enumerate(question.premises):
        spans.append(encoding.span_of(at, at + len(text), what=f"premise {i}"))
        at += len(text) + 1
    return spans


def attention_tokens(model: Model, trial: Trial, verdict: int) -> tuple[int, ...]:
    """The prompt, followed by the chosen candidate unless that stands in it."""
    question = read_question(model, trial)
    return (*trial.tokens, *(question.tokens[verdict] if question.places is None else ()))


@torch.no_grad()
def premise_attention(
    model: Model, heads: HeadSet, trials: Sequence[Trial], spans: Sequence[Sequence[Span]], verdicts: Sequence[int]
) -> list[np.ndarray]:
    """How much the heads attend to each premise, one batch.

    ``mean over heads and over t of sum_{j in premise} alpha[t, j]``, t being the last prompt token and the last token
    of the candidate chosen.

    Args:
        model: The model.
        heads: The heads.
        trials: The batch.
        spans: For each trial the premises' token spans.
        verdicts: For each trial the index of the candidate chosen.

    Returns:
        For each trial ``[premise]``, 0 to 1.

    Raises:
        InvalidInput: If a head does not exist in the model.
    """
    heads.check(model.spec.n_layers, model.spec.n_heads)
    questions = [read_question(model, trial) for trial in trials]
    prompts = [attention_tokens(model, trial, v) for trial, v in zip(trials, verdicts, strict=True)]
    lasts = [
        (len(q.trial.tokens) - 1, q.places[v] if q.places else len(p) - 1)
        for q, p, v in zip(questions, prompts, verdicts, strict=True)
    ]
    tokens, mask = pad(prompts, "left", model.backend.device)
    width = tokens.shape[1]
    masses = [np.zeros(len(mine)) for mine in spans]

    def reader(chosen: list[int]) -> HookFn:
        def read(pattern: torch.Tensor) -> None:
            for i, (prompt, rows) in enumerate(zip(prompts, lasts, strict=True)):
                shift = width - len(prompt)
                seen = pattern[i, chosen][:, [shift + t for t in rows], shift:].float().sum((0, 1)).double().cpu()
                masses[i] += [float(seen[span.start : span.stop].sum()) for span in spans[i]]

        return read

    hooks = [(f"blocks.{layer}.{SITES['pattern']}", reader(chosen)) for layer, chosen in heads.by_layer().items()]
    with model.lock, model.hooks(hooks):
        model.backend.run(tokens, mask, model.backend.new_cache(len(prompts)), last_only=True)
    return [mass / (2 * len(heads)) for mass in masses]


# -- other prompts --------------------------------------------------------------------------------------------


def rebuilt(model: Model, trial: Trial, *, premises: Sequence[int], replaced: Mapping[int, str] | None = None) -> Trial:
    """A logic trial with only some of its premises, or with other sentences in the place of some.

    Args:
        model: Whose tokenizer to use.
        trial: Of a logic data set.
        premises: Indices of the premises to keep.
        replaced: Sentences by the index of the premise whose place they take, for all that are not kept; None to
            leave these out.

    Raises:
        InvalidInput: If the trial is no logic trial.
    """
    if not replaced:
        return logic.rebuild(model, trial, premises=premises)
    question = question_of(trial)
    changed = replace(
        question,
        id=f"{trial.id}/replaced {json.dumps(sorted(replaced), separators=(',', ':'))}",
        premises=[replaced.get(i, text) for i, text in enumerate(question.premises)],
        proof=None if question.proof is None else [i for i in question.proof if i not in replaced],
    )
    wording = trial.meta["wording"]
    return make_trial(model, changed, template_of(trial), split=trial.split, wording=wording, twin=trial.id)


def neutral_sentences(model: Model, trial: Trial, *, seed: int = 0) -> list[str]:
    """For each premise a sentence about nothing in the question, in its length as nearly as may be.

    It speaks of people, kinds and adjectives of our worlds that neither premises nor statement name. Of several forms
    the one nearest the premise in tokens is taken.

    Raises:
        InvalidInput: If the question leaves too few words, or the tokenizer does not know them.
    """
    said = " ".join([*trial.meta["premises"], str(trial.meta.get("statement", ""))]).lower()
    used = set("".join(c if c.isalnum() else " " for c in said).split())
    rng = np.random.default_rng(int(content_hash([seed, trial.id, "neutral"])[:12], 16))
    pools = {}
    for sort, least in (("people", 1), ("kinds", 2), ("adjectives", 2)):
        words = [w for w in word_pools()[sort] if w.lower() not in used]
        if len(words) < least:
            raise InvalidInput(f"trial {trial.id!r} leaves no {sort} unused; use replace='remove'.")
        pools[sort] = [words[i] for i in rng.permutation(len(words))]
    place = dict.fromkeys(pools, 0)

    def take(sort: str) -> str:
        place[sort] += 1
        return pools[sort][(place[sort] - 1) % len(pools[sort])]

    out = []
    for premise in trial.meta["premises"]:
        forms = _forms(take("people"), take("kinds"), take("kinds"), take("adjectives"), take("adjectives"))
        wanted = len(_known_tokens(model, trial, premise, strict=False))
        forms = [forms[i] for i in rng.permutation(len(forms))]
        out.append(min(forms, key=lambda text: abs(len(_known_tokens(model, trial, text)) - wanted)))
    return out


def _forms(person: str, kind: str, other: str, adjective: str, second: str) -> list[str]:
    """Sentences of several lengths over the same words, in the wordings of our worlds."""
    facts = [f"a {kind}", f"not a {kind}", adjective, f"not {adjective}", f"{adjective} and {second}"]
    facts += [f"{adjective} and not {second}", f"a {kind} or a {other}"]
    out = [f"{person} is {fact}." for fact in facts]
    for frame in word_pools()["rules"]:
        for what in (f"a {other}", f"not a {other}", adjective, f"not {adjective}", f"{adjective} and {second}"):
            text = frame.format(noun=kind, condition=f"a {kind}", what=what)
            out.append(text[0].upper() + text[1:])
    return out


def _known_tokens(model: Model, trial: Trial, text: str, *, strict: bool = True) -> list[int]:
    """Tokens of a sentence; strict refuses words that the tokenizer does not know."""
    tokens = list(model.tokenizer(text, add_special_tokens=False)["input_ids"])
    unknown = getattr(model.tokenizer, "unk_token_id", None)
    if strict and unknown is not None and unknown in tokens:
        raise InvalidInput(
            f"the tokenizer of {model.spec.name!r} does not know the words of {text!r}, which would take the place of "
            f"a premise of trial {trial.id!r}; use replace='remove'."
        )
    return tokens
