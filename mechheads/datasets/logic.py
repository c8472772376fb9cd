"""Logic trials: from questions to a set of trials with splits, and the variants that tell reasoning from wording.

A question's variants keep its candidates and split, have ids of their own (``id/flipped``) and name the original in
``meta["twin"]``: ``flipped`` turns the verdict, ``statement_only`` takes all premises away, ``rebuild`` some.
"""

from __future__ import annotations

import json
import random
import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mechheads.datasets.build import is_number
from mechheads.datasets.haystack import shuffled
from mechheads.datasets.logic_prompts import (
    LogicTemplate,
    TemplateSource,
    logic_template,
    make_trial,
    question_of,
    template_names,
    template_of,
)
from mechheads.datasets.logic_questions import THREE, TRUE_FALSE, YES_NO, LogicQuestion, negated
from mechheads.errors import InvalidInput
from mechheads.trials import Encoder, Trial, TrialSet

__all__ = [
    "THREE",
    "TRUE_FALSE",
    "YES_NO",
    "LogicQuestion",
    "LogicTemplate",
    "build_trials",
    "flipped",
    "logic_template",
    "negated",
    "question_of",
    "rebuild",
    "split_groups",
    "statement_only",
    "template_names",
    "template_of",
]

_SPLITS = ("calibration", "test")


def build_trials(
    model: Encoder,
    questions: Iterable[LogicQuestion],
    *,
    template: TemplateSource = None,
    calibration: float | None = 0.5,
    splits: Mapping[str, str | None] | None = None,
    seed: int = 0,
    wording: str = "plain",
    name: str | None = None,
    options: Mapping[str, Any] | None = None,
) -> TrialSet:
    """Trials of logic questions, cut into calibration and test.

    Args:
        model: A model, or anything with ``encode``.
        questions: Their ids must differ.
        template: See ``logic_template``; None is the model's default.
        calibration: Share of the questions that goes to calibration, above 0 and below 1; None makes no splits. Groups
            stay whole, and (label, rule, depth), and each of label, rule, depth and distractors, have the share on
            either side as nearly as groups allow.
        splits: Split of each group by name, instead of a share.
        seed: Of the split.
        wording: Goes into ``meta["wording"]``.
        name: Name of the set; that of the questions' data set if not given.
        options: Further options to record.

    Raises:
        InvalidInput: If there is no question, two have one id, a split would be empty, a verdict has no wording in
            the template, or a prompt is longer than the model's context (naming the question).
    """
    asked = list(questions)
    if not asked or not all(isinstance(q, LogicQuestion) for q in asked):
        raise InvalidInput(f"questions are {str(asked)[:60]}; give LogicQuestions, at least one.")
    chosen = logic_template(template, model=model)
    where = dict(splits) if splits is not None else split_groups(asked, calibration, seed=seed)
    if lacking := [q.group for q in asked if q.group not in where]:
        raise InvalidInput(f"splits name no split for the group {lacking[0]!r} ({len(set(lacking))} such).")
    trials = [make_trial(model, q, chosen, split=where[q.group], wording=wording) for q in asked]
    sources = sorted({q.dataset for q in asked})
    recorded = {
        "kind": "logic",
        "datasets": sources,
        "n": len(trials),
        "template": chosen.to_dict(),
        "calibration": calibration if splits is None else None,
        "seed": seed,
        "wording": wording,
        "labels": dict(Counter(q.candidates[q.label] for q in asked)),
        **(options or {}),
    }
    return TrialSet(trials, name=name or "+".join(sources), options=recorded)


def split_groups(
    questions: Sequence[LogicQuestion], calibration: float | None, *, seed: int = 0
) -> dict[str, str | None]:
    """The split of each group: whole groups, in shares that hold within label, rule and depth as nearly as can be.

    Larger groups are placed first; each goes where the squared deviations from the share, over all questions, over each
    label, rule, depth and number of distractors, and over each (label, rule, depth), come out smaller.

    Raises:
        InvalidInput: If the share is none, or there is but one group.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInput(f"seed={seed!r}: give a whole number.")
    groups: dict[str, list[LogicQuestion]] = {}
    for question in questions:
        groups.setdefault(question.group, []).append(question)
    if calibration is None:
        return dict.fromkeys(groups)
    if not (is_number(calibration) and 0 < calibration < 1):
        raise InvalidInput(
            f"calibration={calibration!r}: give the calibration share, above 0 and below 1, or None for no splits."
        )
    if len(groups) < 2:
        raise InvalidInput(
            f"all {len(questions)} questions are in one group, which must not be torn apart; use calibration=None."
        )
    order = shuffled(list(groups), random.Random(f"mechheads/logic split/{seed}"))
    order.sort(key=lambda g: -len(groups[g]))
    off: defaultdict[Hashable, float] = defaultdict(float)  # how far calibration is ahead of its share in each feature
    where: dict[str, str | None] = {}
    for group in order:
        mine = Counter(f for q in groups[group] for f in _features(q))
        # In calibration a question moves its features by 1 - share, in test by -share.
        costs = [
            sum(weight * ((off[f] + step * c) ** 2 - off[f] ** 2) for (f, weight), c in mine.items())
            for step in (1 - calibration, -calibration)
        ]
        first = costs[0] < costs[1] or (costs[0] == costs[1] and off["all"] <= 0)
        where[group] = _SPLITS[0] if first else _SPLITS[1]
        for (f, _), c in mine.items():
            off[f] += (1 - calibration if first else -calibration) * c
    for split in _SPLITS:  # a share near 0 or 1 may leave one side without a group
        if split not in where.values():
            where[order[-1]] = split
    return where


def _features(question: LogicQuestion) -> list[tuple[Hashable, int]]:
    """What must be shared out evenly, and its weight: labels before all else, since chance is read from them."""
    verdict = question.candidates[question.label]
    return [
        ("all", 16),
        (("label", verdict), 16),
        ((verdict, question.rule, question.depth), 4),
        (("rule", question.rule), 1),
        (("depth", question.depth), 1),
        (("distractors", question.distractors), 1),
    ]


# -- variants -------------------------------------------------------------------------------------------------


def flipped(
    model: Encoder, what: TrialSet | Iterable[Trial | LogicQuestion], *, template: TemplateSource = None, **options: Any
) -> TrialSet:
    """The label-flipped twin of each question: the same premises, and a statement of the opposite verdict.

    In our worlds the same is claimed of the other person, in the same words, so accuracy that rests on reasoning is the
    same. Statements from files are negated by rule (see ``negated``); unknown stays unknown. Questions for which no
    rule can do it (yes/no questions, options) are left out, with a warning that counts them; their ids are in
    ``options["left_out"]``.

    Args:
        model: A model, or anything with ``encode``.
        what: Trials of a logic data set, or questions. Trials keep their split and template.
        template: Another template than theirs.
        **options: Where questions are given: ``calibration``, ``splits``, ``seed`` as in ``build_trials``.

    Raises:
        InvalidInput: If no question can be flipped, or as ``build_trials`` does.
    """
    return _variants(model, what, "flipped", LogicQuestion.flipped, template, options)


def statement_only(
    model: Encoder, what: TrialSet | Iterable[Trial | LogicQuestion], *, template: TemplateSource = None, **options: Any
) -> TrialSet:
    """Each question without any premise: what can still be told is told by the wording of the statement.

    The label is the original's; where it can be guessed better than by chance, so can the original's.

    Args and errors as in ``flipped``.
    """
    return _variants(model, what, "statement_only", lambda q: q.keeping(()), template, options)


def _variants(
    model: Encoder, what: Any, wording: str, change: Any, template: TemplateSource, options: Mapping[str, Any]
) -> TrialSet:
    """The changed questions as trials, each tied to its original."""
    given = list(what)
    if not given or len({isinstance(x, Trial) for x in given}) > 1:
        raise InvalidInput(f"{wording}() was given {str(given)[:60]}; give trials or questions, at least one.")
    if not isinstance(given[0], Trial):
        given = list(build_trials(model, given, template=template, **options))
    elif options:
        raise InvalidInput(f"{sorted(options)} say how questions are split; trials keep their split.")
    trials, without = [], []
    for trial in given:
        question = question_of(trial)
        changed = change(question)
        if changed is None:
            without.append(trial.id)
            continue
        chosen = template_of(trial) if template is None else logic_template(template, model=model)
        changed = replace(changed, id=f"{trial.id}/{wording}")
        trials.append(make_trial(model, changed, chosen, split=trial.split, wording=wording, twin=trial.id))
    if not trials:
        raise InvalidInput(
            f"none of the {len(given)} questions can be {wording}: yes/no questions and options have no opposite that "
            "a rule could make."
        )
    if without:
        warnings.warn(
            f"{len(without)} of {len(given)} questions have no {wording} form and are left out, such as "
            f"{without[0]!r}.",
            stacklevel=3,
        )
    name = what.name if isinstance(what, TrialSet) else "+".join(sorted({t.meta["dataset"] for t in given}))
    before = what.options if isinstance(what, TrialSet) else {}
    recorded = {
        **before,
        "wording": wording,
        "n": len(trials),
        "left_out": without,
        "labels": dict(Counter(t.meta["verdicts"][t.label or 0] for t in trials)),
    }
    return TrialSet(trials, name=f"{name}/{wording}", options=recorded)


def rebuild(model: Encoder, trial: Trial, *, premises: Iterable[int]) -> Trial:
    """The same question with only some of its premises, in the same template.

    Label, candidates, split and rule stay as they were, so that one sees whether the verdict moves; ``meta["proof"]``
    are the proof's premises that are left, by their new indices. ``meta["kept"]`` are the indices kept, and
    ``meta["twin"]`` names the trial. With all premises kept the trial itself comes back.

    Args:
        model: Whose tokenizer to use.
        trial: Of a logic data set.
        premises: Indices into ``trial.meta["premises"]`` of those to keep.

    Raises:
        InvalidInput: If the trial is no logic trial, or an index names no premise.
    """
    question = question_of(trial)
    kept = sorted(set(premises))
    changed = question.keeping(kept)
    if len(kept) == len(question.premises):
        return trial
    changed = replace(changed, id=f"{trial.id}/kept {json.dumps(kept, separators=(',', ':'))}")
    return make_trial(
        model,
        changed,
        template_of(trial),
        split=trial.split,
        wording=trial.meta["wording"],
        twin=trial.id,
        kept=kept,
    )
