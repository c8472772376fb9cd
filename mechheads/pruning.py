"""The pruning check: what the model still answers without a method's best heads, against random ones."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import pandas as pd

from mechheads.candidates import candidate_logprobs, read_question
from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.interventions import Intervention, apply, zero_ablation
from mechheads.model import Model
from mechheads.progress import progress_bar
from mechheads.provenance import collect
from mechheads.stats import check_count
from mechheads.sweep_controls import Cell, RandomHeads, caveats, plan_cells
from mechheads.sweep_result import SweepResult
from mechheads.trials import Trial, TrialSet
from mechheads.verdicts.decisions import answered

BEST = "best"
METRICS = ("choice_accuracy", "label_probability")


def run_pruning(
    model: Model,
    heads: Any,
    trials: Trial | Sequence[Trial],
    *,
    k: int | float | Sequence[int | float] = (10, 20),
    draws: int = 7,
    seed: int = 0,
    match_layers: bool = False,
    intervention: Intervention | None = None,
    batch_size: int = 8,
    progress: bool | None = None,
) -> SweepResult:
    """Prune the K best heads, then K random ones, and see what the model still answers (arXiv 2502.17017).

    A pruned head's rows of ``W_O`` are zero, so it writes nothing; its output ``z`` set to zero at every position
    (``zero_ablation()``, the default) is the same thing and leaves the weights alone. Biases stay, as they do when
    weights are pruned. Other query heads of the same key/value head go on as before.

    The model's answer is the candidate with the highest log-probability, summed over the candidate's tokens. Metrics:
    ``choice_accuracy`` (1 right, 0 wrong, 1/m where the right candidate is one of m equally best) and
    ``label_probability`` (softmax over the candidates' log-probabilities, the right one's share, 0 to 1).

    Args:
        model: The model.
        heads: Heads, best first (``CandidateScores.select(k)``, an ordered list of labels).
        trials: Questions with a statement, candidates and label; not those the heads were chosen on.
        k: How many heads to prune: whole numbers, or fractions of all heads (0.1 is a tenth, at least one head).
        draws: Independent random sets for each K.
        seed: Seed of the draws. No random set holds one of the best ``max(k)`` heads.
        match_layers: Draw as many heads in each layer as the best K have there.
        intervention: Something else to do to the heads, such as ``mean_ablation(reference=...)``; without heads.
        batch_size: Questions run together.
        progress: Show a bar (None: only on a terminal).

    Ctrl-C keeps the cells that are done and says so in ``meta["complete"]``. A warning, also in ``meta["caveats"]``,
    says when trials of the calibration split are among those tested.

    Returns:
        Per-trial results: rankings ``"best"`` and ``"random"``, k 0 being the whole model; ``compare("best", "random",
        k, "choice_accuracy")`` gives the paired difference (negative: these heads matter more than random ones).

    Raises:
        InvalidInput: If a size is no number of heads, there are fewer heads than K, or besides the best K too few are
            left to draw K random ones from; if a trial is no question, or the intervention names heads already.
    """
    ranked, asked = HeadSet.parse(heads), TrialSet.of(trials)
    shape = (model.spec.n_layers, model.spec.n_heads)
    ranked.check(*shape)
    sizes = head_counts(k, shape[0] * shape[1])
    _check_room(sizes, len(ranked), shape[0] * shape[1])
    controls = RandomHeads(draws=draws, match_layers=match_layers, seed=seed)
    acting = zero_ablation() if intervention is None else intervention
    if not isinstance(acting, Intervention) or acting.heads is not None:
        raise InvalidInput(
            "the pruning check takes an intervention without heads, such as mh.zero_ablation(), and chooses them."
        )
    check_count("batch_size", batch_size)
    if not len(asked):
        raise InvalidInput("there are no trials to test the pruned model on.")
    for trial in asked:  # all of them, before the first pass
        read_question(model, trial)
    cells = plan_cells({BEST: ranked}, sizes, shape, controls)
    found = [*_seen_before(asked), *caveats(model, {}, acting, {asked.name: asked})]
    for caveat in found:
        warnings.warn(caveat, stacklevel=3)
    prepared = acting.prepare(model, batch_size=batch_size)
    rows, complete = _run_cells(model, cells, prepared, asked, batch_size, progress)
    meta = collect(
        model.describe(),
        "pruning",
        {
            "intervention": prepared.describe(),
            "k": [0, *sizes],
            "k_asked": [k] if isinstance(k, (int, float)) else list(k),
            "controls": asdict(controls),
            "rankings": {BEST: ranked.labels},
        },
        asked.name,
        asked.hash,
        asked.options,
        seed=seed,
        complete=complete,
        caveats=found,
        ablated=model.backend.hooked(),
        interventions=list(model.ablations),
    )
    return SweepResult(pd.DataFrame(rows), meta)


def head_counts(k: Any, n_heads: int) -> list[int]:
    """Numbers of heads, rising, each once: whole numbers as they are, fractions of all heads rounded, at least 1.

    Raises:
        InvalidInput: If there is none, or one is neither a whole number from 1 nor a fraction between 0 and 1.
    """
    given = [k] if isinstance(k, (int, float, np.number)) else list(k)
    counts = set()
    for x in given:
        if isinstance(x, (int, np.integer)) and not isinstance(x, bool) and x >= 1:
            counts.add(int(x))
        elif isinstance(x, (float, np.floating)) and 0 < x < 1:
            counts.add(max(1, round(float(x) * n_heads)))
        else:
            raise InvalidInput(
                f"k holds {x!r}; give numbers of heads from 1, such as (10, 20), or fractions of all heads between 0 "
                "and 1, such as (0.1, 0.2)."
            )
    if not counts:
        raise InvalidInput("k is empty; give numbers of heads, such as (10, 20).")
    return sorted(counts)


def _check_room(sizes: Sequence[int], n_ranked: int, n_heads: int) -> None:
    """Refuse a K for which there are too few heads, tested or random."""
    largest = sizes[-1]
    if 2 * largest > n_heads:
        raise InvalidInput(
            f"k = {largest}: the model has {n_heads} heads, so besides the best {largest} only {n_heads - largest} are "
            f"left to draw {largest} random ones from; use k of at most {n_heads // 2}, or fractions such as 0.1."
        )
    if largest > n_ranked:
        raise InvalidInput(f"k = {largest}, but only {n_ranked} heads are given; give at least {largest}, best first.")


def _seen_before(trials: TrialSet) -> list[str]:
    """The caveat that heads are tested where they were chosen."""
    n = sum(t.split == "calibration" for t in trials)
    if not n:
        return []
    return [
        f"{n} of the {len(trials)} trials belong to the calibration split, on which heads are chosen; test them on "
        'trials.split("test").'
    ]


def _run_cells(
    model: Model,
    cells: Sequence[Cell],
    prepared: Intervention,
    trials: TrialSet,
    batch_size: int,
    progress: bool | None,
) -> tuple[list[dict[str, Any]], bool]:
    """Rows of every cell, each head set run once; False if Ctrl-C ended it early."""
    rows: list[dict[str, Any]] = []
    done: dict[frozenset[Any], np.ndarray] = {}
    with progress_bar("pruned head sets", len(cells), show=progress) as advance:
        for cell in cells:
            key = frozenset(cell.heads)
            try:
                if key not in done:
                    with apply(model, prepared.on(cell.heads)):
                        logprobs = candidate_logprobs(model, trials, batch_size=batch_size)
                    done[key] = choice_metrics(logprobs, [t.label or 0 for t in trials])
            except KeyboardInterrupt:
                if not rows:
                    raise  # nothing to keep, so it is an ordinary Ctrl-C
                warnings.warn("interrupted: the head sets that are done are kept.", stacklevel=4)
                return rows, False
            rows += [
                {
                    "ranking": cell.ranking,
                    "draw": cell.draw,
                    "k": cell.k,
                    "task": trials.name,
                    "trial_id": trial.id,
                    "metric": metric,
                    "value": float(value),
                    "heads": " ".join(cell.heads.labels),
                }
                for trial, values in zip(trials, done[key], strict=True)
                for metric, value in zip(METRICS, values, strict=True)
            ]
            advance(1)
    return rows, True


def choice_metrics(logprobs: Sequence[Sequence[float]], labels: Sequence[int]) -> np.ndarray:
    """How far the model's own answer is right, and the right candidate's probability among the candidates.

    Args:
        logprobs: Log-probability of each candidate, trial by trial (nats).
        labels: Index of the right one.

    Returns:
        ``[trial metric]`` float64, in the order of ``METRICS``: credit (ties shared) and
        ``exp(l_right) / sum_i exp(l_i)``, both 0 to 1.
    """
    counts = np.array([len(one) for one in logprobs])
    table = np.full((len(counts), counts.max()), -np.inf)
    for row, one in zip(table, logprobs, strict=True):
        row[: len(one)] = one
    at = (np.arange(len(counts)), np.asarray(labels))
    shares = np.exp(table - table.max(axis=1, keepdims=True))
    shares /= shares.sum(axis=1, keepdims=True)
    return np.stack([answered(table, counts)[at], shares[at]], axis=1)
