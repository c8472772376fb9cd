"""Ablation sweeps: rankings x k x tasks, with random heads that are never the tested ones."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import pandas as pd

from mechheads.errors import InvalidInput
from mechheads.generate import Generation, generate
from mechheads.heads import HeadSet, draw_random_heads
from mechheads.interventions import Intervention, apply
from mechheads.model import Model
from mechheads.progress import progress_bar
from mechheads.provenance import collect, content_hash
from mechheads.runner import prompt_hash
from mechheads.scores import HeadScores, SweepResult
from mechheads.text import contains_answer, exact_match, rouge1_recall, rougeL_f
from mechheads.trials import Trial, TrialSet


@dataclass(frozen=True)
class RandomHeads:
    """A control: random heads in place of the tested ones.

    Attributes:
        draws: Independent draws for each k.
        exclude_tested: Never draw a head that any ranking's largest k tests.
        match_layers: Draw as many heads in each layer as the first ranking's set has there.
        seed: Seed of the draws.
        at: The k at which to draw; all of the sweep's if None.
    """

    draws: int = 7
    exclude_tested: bool = True
    match_layers: bool = False
    seed: int = 0
    at: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise InvalidInput(f"draws is {self.draws}; a random control needs at least 1.")


def random_heads(
    *,
    draws: int = 7,
    exclude_tested: bool = True,
    match_layers: bool = False,
    seed: int = 0,
    at: Sequence[int] | None = None,
) -> RandomHeads:
    """The random-heads control of a sweep; see ``RandomHeads``."""
    return RandomHeads(draws, exclude_tested, match_layers, seed, None if at is None else tuple(at))


@dataclass(frozen=True)
class Cell:
    """One head set to ablate on one task."""

    ranking: str
    draw: int
    k: int
    heads: HeadSet


def plan_cells(
    rankings: Mapping[str, HeadSet],
    k: int | Sequence[int],
    shape: tuple[int, int],
    controls: RandomHeads | None,
) -> list[Cell]:
    """The head sets of a sweep: a baseline, the first k of each ranking, and random sets.

    Args:
        rankings: Heads by ranking, best first.
        k: Set sizes; 0 is the baseline and always there.
        shape: Layers and heads of the model.
        controls: Random control, or None.

    Raises:
        InvalidInput: If a k is larger than a ranking, or too few heads are left to draw from.
    """
    n_layers, n_heads = shape
    sizes = _sizes(k)
    reserved = {"none", "random"} & set(rankings)
    if reserved:
        raise InvalidInput(f"a ranking cannot be called {reserved.pop()!r}; that names a control.")
    cells = [Cell("none", 0, 0, HeadSet())]
    for name, heads in rankings.items():
        heads.check(n_layers, n_heads)
        for size in sizes:
            if size > len(heads):
                raise InvalidInput(f"k = {size}, but the ranking {name!r} has {len(heads)} heads.")
            cells.append(Cell(name, 0, size, heads[:size]))
    if controls is None or not sizes:
        return cells
    tested = HeadSet()
    for heads in rankings.values():
        tested = tested | heads[: sizes[-1]]
    first = next(iter(rankings.values()), HeadSet())
    drawn_at = sizes if controls.at is None else _sizes(controls.at)
    if not set(drawn_at) <= set(sizes):
        raise InvalidInput(f"random heads are asked at k = {drawn_at}, but the sweep has k = {sizes}.")
    for size in drawn_at:
        for draw in range(controls.draws):
            drawn = draw_random_heads(
                n_layers,
                n_heads,
                size,
                seed=_seed(controls.seed, size, draw),
                exclude=tested if controls.exclude_tested else None,
                match_layers=first[:size] if controls.match_layers else None,
            )
            cells.append(Cell("random", draw, size, drawn))
    return cells


def _sizes(k: int | Sequence[int]) -> list[int]:
    """Set sizes without the baseline, rising, each once."""
    k = [k] if isinstance(k, int) else list(k)
    for x in k:
        if isinstance(x, bool) or x != int(x) or x < 0:
            raise InvalidInput(f"k holds {x!r}; set sizes are whole numbers from 0.")
    return sorted({int(x) for x in k} - {0})


def _seed(*parts: int) -> int:
    """One seed from several numbers, the same on every machine."""
    return int(content_hash(list(parts))[:12], 16)


def named_rankings(rankings: Any) -> dict[str, Any]:
    """Rankings by name, from a mapping, one HeadScores (named by its method) or one head set."""
    if isinstance(rankings, Mapping):
        return dict(rankings)
    if isinstance(rankings, HeadScores):
        return {rankings.method: rankings}
    return {"given": HeadSet.parse(rankings)}


def as_rankings(rankings: Mapping[str, Any]) -> dict[str, HeadSet]:
    """Head sets from HeadScores (their full ranking) or from anything a head set parses from."""
    if not rankings:
        raise InvalidInput("a sweep needs at least one ranking, such as {'locos': locos}.")
    return {
        name: value.ranking() if isinstance(value, HeadScores) else HeadSet.parse(value)
        for name, value in rankings.items()
    }


def _check_tasks(model: Model, tasks: Mapping[str, TrialSet]) -> None:
    """Refuse before the first pass what would fail in the middle of the sweep."""
    if not tasks:
        raise InvalidInput("a sweep needs at least one task, such as {'passkey': trials}.")
    for task, trials in tasks.items():
        if not len(trials):
            raise InvalidInput(f"the task {task!r} has no trials.")
        for trial in trials:
            model.check_tokens(trial.tokens, what=f"trial {trial.id!r} of task {task!r}")
            if trial.answer is None:
                raise InvalidInput(f"trial {trial.id!r} has no gold answer, so a sweep cannot judge it.")


def judge_answer(trial: Trial, said: Generation) -> dict[str, float]:
    """Metrics of one answer: ``correct`` (the gold answer stands in it as whole words), and how close it is."""
    if trial.answer is None:
        raise InvalidInput(f"trial {trial.id!r} has no gold answer, so a sweep cannot judge it.")
    return {
        "correct": float(contains_answer(said.text, trial.answer)),
        "exact_match": float(exact_match(said.text, trial.answer)),
        "rouge1_recall": rouge1_recall(said.text, trial.answer),
        "rougeL_f": rougeL_f(said.text, trial.answer),
    }


def run_sweep(
    model: Model,
    rankings: Any,
    *,
    k: int | Sequence[int],
    tasks: Mapping[str, TrialSet],
    intervention: Intervention,
    controls: RandomHeads | None = None,
    max_new_tokens: int | Mapping[str, int] = 20,
    batch_size: int = 8,
    progress: bool | None = None,
) -> SweepResult:
    """Ablate the first k heads of each ranking and see what the model still answers.

    Args:
        model: The model.
        rankings: HeadScores or head sets by name, best first; or one of them alone.
        k: Set sizes; the baseline (0) is always run.
        tasks: Trials by task name; the first is the target, the others are controls.
        intervention: What to do to the heads (``mean_ablation(...)``, ``zero_ablation()``).
        controls: Random heads, or None.
        max_new_tokens: Longest answer, tokens; one number, or one for each task.
        batch_size: Trials run together.
        progress: Show a bar (None: only on a terminal).

    Ctrl-C keeps the cells that are done and says so in ``meta["complete"]``. A warning says when heads were chosen
    on trials they are tested on, when a mean was taken on them, or when scores come from other weights; the same
    stands in ``meta["caveats"]``.

    Returns:
        Per-trial results of every cell.

    Raises:
        InvalidInput: If rankings, sizes or trials do not fit, or the intervention names heads already.
    """
    given = named_rankings(rankings)
    ranked = as_rankings(given)
    if not isinstance(intervention, Intervention) or intervention.heads is not None:
        raise InvalidInput("a sweep takes an intervention without heads, such as mh.zero_ablation(), and chooses them.")
    cells = plan_cells(ranked, k, (model.spec.n_layers, model.spec.n_heads), controls)
    _check_tasks(model, tasks)
    longest = _longest_answers(max_new_tokens, tasks)
    found = caveats(model, given, intervention, tasks)
    for caveat in found:
        warnings.warn(caveat, stacklevel=3)
    prepared = intervention.prepare(model, batch_size=batch_size)
    rows, complete = _run_cells(model, cells, prepared, tasks, longest, batch_size, progress)
    meta = collect(
        model.describe(),
        "sweep",
        {
            "intervention": prepared.describe(),
            "k": [0, *_sizes(k)],
            "controls": None if controls is None else asdict(controls),
            "max_new_tokens": longest,
            "stop_at_newline": True,
            "rankings": {name: heads.labels for name, heads in ranked.items()},
        },
        "+".join(tasks),
        content_hash({name: t.hash for name, t in tasks.items()}),
        {name: t.options for name, t in tasks.items()},
        seed=None if controls is None else controls.seed,
        complete=complete,
        caveats=found,
        ablated=model.backend.hooked(),
        interventions=list(model.ablations),
        task_hashes={name: t.hash for name, t in tasks.items()},
    )
    return SweepResult(pd.DataFrame(rows), meta)


def _run_cells(
    model: Model,
    cells: list[Cell],
    prepared: Intervention,
    tasks: Mapping[str, TrialSet],
    longest: Mapping[str, int],
    batch_size: int,
    progress: bool | None,
) -> tuple[list[dict[str, Any]], bool]:
    """Rows of every cell, each head set run once a task; False if Ctrl-C ended it early."""
    rows: list[dict[str, Any]] = []
    done: dict[tuple[str, frozenset], list[Generation]] = {}
    with progress_bar("ablation cells", len(cells) * len(tasks), show=progress) as advance:
        for task, trials in tasks.items():
            for cell in cells:
                key = (task, frozenset(cell.heads))
                try:
                    if key not in done:
                        with apply(model, prepared.on(cell.heads)):
                            done[key] = generate(
                                model,
                                [t.tokens for t in trials],
                                max_new_tokens=longest[task],
                                stop_at_newline=True,
                                batch_size=batch_size,
                            )
                except KeyboardInterrupt:
                    if not rows:
                        raise  # nothing to keep, so it is an ordinary Ctrl-C
                    warnings.warn("interrupted: the cells that are done are kept.", stacklevel=4)
                    return rows, False
                rows += _rows(cell, task, trials, done[key])
                advance(1)
    return rows, True


def caveats(
    model: Model, rankings: Mapping[str, Any], intervention: Intervention, tasks: Mapping[str, TrialSet]
) -> list[str]:
    """What would make the sweep say less than it seems to."""
    target = next(iter(tasks.values()))
    tested = {prompt_hash(t) for t in target}
    weights = None
    out = []
    for name, scores in rankings.items():
        if not isinstance(scores, HeadScores):
            continue
        shared = len(tested & {r.get("prompt_hash") for r in scores.records})
        if shared:
            out.append(
                f"the ranking {name!r} was chosen on {shared} of the {len(target)} trials it is tested on; choose "
                "heads on the calibration split and test them on the other."
            )
        weights = weights or model.weight_hash()
        if scores.meta.get("model", {}).get("weight_hash", weights) != weights:
            out.append(f"the ranking {name!r} was scored on other weights than the model it is tested on.")
    shared = len(tested & {prompt_hash(t) for t in intervention.reference or ()})
    if shared:
        out.append(f"the mean is taken over {shared} of the {len(target)} trials it is tested on.")
    return out


def _longest_answers(given: int | Mapping[str, int], tasks: Mapping[str, TrialSet]) -> dict[str, int]:
    """Longest answer of each task, from one number or a number for each."""
    if isinstance(given, int):
        return dict.fromkeys(tasks, given)
    missing = [task for task in tasks if task not in given]
    if missing:
        raise InvalidInput(f"max_new_tokens names no length for the task {missing[0]!r}; it names {sorted(given)}.")
    return {task: given[task] for task in tasks}


def _rows(cell: Cell, task: str, trials: TrialSet, said: list[Generation]) -> list[dict[str, Any]]:
    """Tidy rows of one cell."""
    return [
        {
            "ranking": cell.ranking,
            "draw": cell.draw,
            "k": cell.k,
            "task": task,
            "trial_id": trial.id,
            "metric": metric,
            "value": value,
            "heads": " ".join(cell.heads.labels),
        }
        for trial, one in zip(trials, said, strict=True)
        for metric, value in judge_answer(trial, one).items()
    ]
