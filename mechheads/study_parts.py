"""What a study needs before it can be planned: trials, tasks, interventions, scores; and the plan itself."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from mechheads import datasets
from mechheads.analysis import CircuitAnalysis
from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput
from mechheads.head_files import read_heads
from mechheads.heads import HeadSet
from mechheads.interventions import (
    Intervention,
    attention_bias,
    mean_ablation,
    mean_positional_ablation,
    prune,
    resample_ablation,
    zero_ablation,
)
from mechheads.runner import RunOptions
from mechheads.scores import HeadScores
from mechheads.study import Study
from mechheads.study_fields import InterventionPart, TaskPart
from mechheads.study_trials import make_trials, measured_trials, pick
from mechheads.sweep import as_tasks
from mechheads.sweep_controls import RandomHeads, caveats
from mechheads.sweep_plan import SweepPlan, plan_study
from mechheads.sweep_sets import Ranked
from mechheads.tasks import Task
from mechheads.trials import TrialSet

Say = Callable[[str], None]
Scored = HeadScores | CandidateScores | HeadSet


@dataclass(frozen=True, eq=False)
class Prepared:
    """A study whose trials are made, whose heads are ranked, and whose cells are known.

    Attributes:
        made: All trials of every task, tested or not.
        tasks: What is measured, on the trials that are tested.
        interventions: What is done, by label, without heads.
        scores: What ranks the heads, by ranking.
        heads: The heads of each ranking, best first.
        random: The random control, or None.
        plan: Every cell.
        notes: How many trials each ranking rests on, and what else the reader should know of it.
        caveats: What makes the sweep say less than it seems to.
    """

    made: Mapping[str, TrialSet]
    tasks: Mapping[str, Task]
    interventions: Mapping[str, Intervention]
    scores: Mapping[str, Scored]
    heads: Mapping[str, HeadSet]
    random: RandomHeads | None
    plan: SweepPlan
    notes: tuple[str, ...]
    caveats: tuple[str, ...]


def prepare_study(study: Study, ca: CircuitAnalysis, say: Say) -> Prepared:
    """Make trials, rank heads and plan; what cannot be run is refused before the first pass where that can be known.

    Args:
        study: The study.
        ca: Model and store of scores; scores that are stored are read.
        say: Told what is going on.

    Raises:
        InvalidInput: If trials, rankings or interventions do not fit together or the model; or as the plan does.
        KeyboardInterrupt: If scoring was interrupted.
    """
    say("making trials")
    made = {name: _trials(study, name, ca.model) for name in study.tasks}
    tested = measured_trials(study, made)
    tasks = as_tasks(ca.model, {name: task_of(name, part, tested[name]) for name, part in study.tasks.items()})
    notes: list[str] = []
    interventions = {
        part.label: intervention_of(part, made, tested, notes=notes) for part in study.interventions
    }  # fmt: skip
    scores = rank(study, ca, made, say)
    spec = ca.model.spec
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", UserWarning)
        heads = {name: Ranked.of(one, by=study.rankings[name].by).heads for name, one in scores.items()}
        sizes = {name: len(task.trials) for name, task in tasks.items()}
        made_plan = plan_study(study, scores, tasks=sizes, shape=(spec.n_layers, spec.n_heads))
    warned = [str(one.message) for one in caught if issubclass(one.category, UserWarning)]
    found = [
        caveat
        for target in study.targets
        for what in interventions.values()
        for caveat in caveats(ca.model, scores, what, {target: tasks[target].trials})
    ]
    part = study.controls.random
    random = None
    if part is not None:
        seed = study.seed if part.seed is None else part.seed
        random = RandomHeads(part.draws, part.exclude_tested, part.match_layers, seed, part.at)
    notes += [f"{name}: {text}" for name, one in scores.items() if (text := _rests_on(study, name, one))]
    return Prepared(
        made, tasks, interventions, scores, heads, random, made_plan, tuple(notes),
        tuple(dict.fromkeys([*warned, *found])),
    )  # fmt: skip


def task_of(name: str, part: TaskPart, trials: TrialSet) -> Task:
    """The task of a part, on the trials that are tested.

    Raises:
        InvalidInput: As ``Task`` does.
    """
    return Task.of(
        name,
        trials,
        metrics=part.metrics,
        max_new_tokens=part.max_new_tokens,
        stop_at_newline=part.stop_at_newline,
        foil=part.foil,
        **({} if part.measure is None else {"measure": part.measure}),
    )


def headline(part: TaskPart, task: Task) -> str:
    """The metric a task is judged by: the first that the study names, or else the first of its measure."""
    return part.metrics[0] if part.metrics else task.measured[0]


def _trials(study: Study, name: str, model: Any) -> TrialSet:
    """Trials of a task; recall is judged over the other names of what it asks for."""
    trials = make_trials(study, name, model)
    return datasets.with_aliases(trials) if study.tasks[name].dataset == "recall" else trials


# -- interventions -----------------------------------------------------------------------------------


def intervention_of(
    part: InterventionPart,
    made: Mapping[str, TrialSet],
    tested: Mapping[str, TrialSet],
    *,
    notes: list[str] | None = None,
) -> Intervention:
    """What a study does to heads, as a value.

    Args:
        part: What the study says.
        made: All trials by task, for references.
        tested: The trials that are tested, for spans.
        notes: Takes a line where fewer reference trials are there than were asked for.

    Raises:
        InvalidInput: If a span that keys name is missing in a prompt, or does not stand at the same positions in all.
        UnknownName: If a reference names no trials.
    """
    site, where = part.site, part.positions
    if part.kind == "zero":
        return zero_ablation(site=site, positions=where)
    if part.kind == "prune":
        return prune()
    if part.kind == "bias":
        return attention_bias(part.strength or 0.0, keys=_keys(part, tested), positions=where)
    reference = pick(dict(made), str(part.reference))
    asked = part.n_reference
    if asked is not None and asked > len(reference) and notes is not None:
        notes.append(f"{part.label}: {part.reference} has {len(reference)} trials, of {asked} asked for; all are taken")
    reference = reference[:asked]
    if part.kind == "mean":
        return mean_ablation(site=site, reference=reference, positions=where)
    if part.kind == "mean_positional":
        return mean_positional_ablation(site=site, reference=reference, positions=where)
    return resample_ablation(site=site, reference=reference, seed=part.seeds[0], positions=where)


def _keys(part: InterventionPart, tested: Mapping[str, TrialSet]) -> tuple[int, ...]:
    """Positions whose keys are biased. One intervention is the same for every prompt, so a span must be too."""
    if isinstance(part.keys, tuple):
        return part.keys
    name = str(part.keys)
    from_start: dict[tuple[int, ...], str] = {}
    from_end: dict[tuple[int, ...], str] = {}
    for task, trials in tested.items():
        for trial in trials:
            if name not in trial.spans:
                raise InvalidInput(
                    f"{part.label} biases the keys of the span {name!r}, but trial {trial.id!r} of task {task!r} has "
                    f"the spans {sorted(trial.spans)}; bias positions, or leave that task out."
                )
            at = tuple(i for span in trial.spans[name] for i in range(span.start, span.stop))
            what = f"trial {trial.id!r} of task {task!r}"
            from_start.setdefault(at, what)
            from_end.setdefault(tuple(i - len(trial.tokens) for i in at), what)
    for found in (from_start, from_end):
        if len(found) == 1:
            return next(iter(found))
    (first, one), (second, other) = list(from_start.items())[:2]
    raise InvalidInput(
        f"{part.label} biases the keys of the span {name!r}, which stands at {_shown(first)} in {one} and at "
        f"{_shown(second)} in {other}; a study biases the same positions in every prompt. Give positions, or trials "
        "whose span does not move (a fixed depth and length)."
    )


def _shown(positions: tuple[int, ...]) -> str:
    return f"positions {positions[0]} to {positions[-1]}"


# -- rankings ----------------------------------------------------------------------------------------


def rank(study: Study, ca: CircuitAnalysis, made: Mapping[str, TrialSet], say: Say) -> dict[str, Scored]:
    """What ranks the heads, by ranking: scores, or heads that were listed.

    Methods that are scored on the same trials share one capture; what the store has is read.

    Raises:
        InvalidInput: If a listed head is not in the model, a file holds no heads of it, or no trial could be scored.
        KeyboardInterrupt: If scoring was interrupted.
    """
    found: dict[str, Scored] = {}
    for name, part in study.rankings.items():
        if part.heads is not None:
            found[name] = part.head_set
        elif part.file is not None:
            spec = ca.model.spec
            found[name] = read_heads(
                part.file, n_layers=spec.n_layers, n_heads=spec.n_heads, n_key_value_heads=spec.n_key_value_heads
            )
        if isinstance(one := found.get(name), HeadSet):
            one.check(ca.model.spec.n_layers, ca.model.spec.n_heads)
    for names in _captures(study):
        found |= _scored(study, names, ca, made, say)
    return {name: found[name] for name in study.rankings}


def _captures(study: Study) -> list[list[str]]:
    """Rankings by method that can share a capture: the same trials and options of the run, each method once."""
    groups: dict[tuple[str, str], list[list[str]]] = {}
    for name, part in study.rankings.items():
        if part.method is None:
            continue
        key = (study.trials_of(name), json.dumps(_run_options(part.options), sort_keys=True, default=str))
        mine = groups.setdefault(key, [[]])
        free = [g for g in mine if part.method not in [study.rankings[other].method for other in g]]
        if free:
            free[0].append(name)
        else:
            mine.append([name])
    return [names for several in groups.values() for names in several if names]


def _run_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Options of scoring, not of a method."""
    return {key: value for key, value in options.items() if key in RunOptions.__dataclass_fields__}


def _scored(
    study: Study, names: list[str], ca: CircuitAnalysis, made: Mapping[str, TrialSet], say: Say
) -> dict[str, Scored]:
    """The scores of rankings that share a capture."""
    reference = study.trials_of(names[0])
    trials = pick(dict(made), reference)
    methods = {str(study.rankings[name].method): name for name in names}
    say(f"ranking heads by {', '.join(methods)} on {len(trials)} trials ({reference})")
    run = _run_options(study.rankings[names[0]].options)
    own = {
        method: {k: v for k, v in study.rankings[name].options.items() if k not in run}
        for method, name in methods.items()
        if set(study.rankings[name].options) - set(run)
    }
    with warnings.catch_warnings():
        # Said again below, as an interruption.
        warnings.filterwarnings("ignore", message=".*interrupted.*")
        got = ca.score(list(methods), trials, **run, **own)
    for method, name in methods.items():
        if method not in got or got[method].meta.get("complete") is False:
            raise KeyboardInterrupt
        if isinstance(scores := got[method], HeadScores) and not scores.n_kept:
            why = sorted({str(record.get("reason")) for record in scores.records})
            raise InvalidInput(
                f"the ranking {name!r} ({method}) has no trial to rest on: of {len(trials)} in {reference}, none is "
                f"kept ({'; '.join(why[:2])}). Give it easier trials, or other options."
            )
    return {name: got[method] for method, name in methods.items()}


def _rests_on(study: Study, name: str, scores: Scored) -> str:
    """How many trials a ranking rests on, in words."""
    part = study.rankings[name]
    if isinstance(scores, CandidateScores):
        return f"{part.by} on {len(scores.trial_ids)} trials of {study.trials_of(name)}"
    if isinstance(scores, HeadSet):
        return f"{len(scores)} heads, from {'the study' if part.heads is not None else part.file}"
    if part.method is None:
        return f"scores of {part.file}"
    return f"{scores.n_kept} of {len(scores.trial_ids)} trials of {study.trials_of(name)} kept"
