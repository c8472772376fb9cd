"""The loop over questions with candidate answers: batches through one capture, candidate scores out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mechheads.candidate_scores import CandidateScores
from mechheads.candidates import CandidateCapture, capture_candidates, read_question
from mechheads.errors import InvalidInput, MechheadsError
from mechheads.methods.registry import Method
from mechheads.model import Model
from mechheads.progress import progress_bar
from mechheads.provenance import collect
from mechheads.runner import MethodFailed, prompt_hash
from mechheads.stats import check_count
from mechheads.trials import Trial, TrialSet

# What of a trial's meta the statistics need.
_KEPT_META = ("group", "rule", "depth", "distractors", "dataset", "wording", "twin")


@dataclass(frozen=True)
class CandidateOptions:
    """How questions are run.

    Attributes:
        batch_size: Questions run together; changes no score beyond rounding.
        padding: ``"left"`` or ``"right"``; likewise.
    """

    batch_size: int = 8
    padding: str = "left"

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)


@dataclass(frozen=True)
class CandidateJob:
    """A method that reads candidates, with all its options."""

    method: Method
    options: Mapping[str, Any]


@dataclass
class _Done:
    """Results so far, by trial."""

    values: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    captures: dict[int, tuple[tuple[float, ...], list[int]]] = field(default_factory=dict)


def score_candidates(
    model: Model,
    jobs: Sequence[CandidateJob],
    trials: TrialSet,
    *,
    run: CandidateOptions,
    progress: bool | None = None,
) -> dict[str, CandidateScores]:
    """Score every candidate of every trial with each method, by name.

    Methods that capture alike (rotation or not) share their captures. Ctrl-C keeps the trials that are done, with a
    warning; before the first is done it is an ordinary KeyboardInterrupt.

    Raises:
        UnknownName: If a trial has no statement.
        InvalidInput: If a trial cannot be run, or a method returns another shape.
        MethodFailed: If a method raises; ``error.partial`` keeps what was done.
    """
    if not len(trials):
        raise InvalidInput("there are no trials to score.")
    for trial in trials:  # all of them, before the first pass
        read_question(model, trial)
    described = model.describe()
    out: dict[str, CandidateScores] = {}
    for job in jobs:
        for name in ("rotary", "scaled"):
            if not isinstance(value := job.options.get(name, True), bool):
                raise InvalidInput(f"{name} is {value!r}; give True or False.")
    for rotary in sorted({j.options.get("rotary", True) for j in jobs}, reverse=True):
        some = [j for j in jobs if j.options.get("rotary", True) == rotary]
        try:
            out |= _score(model, some, trials, described, run, rotary=rotary, progress=progress)
        except MechheadsError as error:
            error.partial = {**out, **error.partial}
            raise
    return out


def _score(
    model: Model, jobs: Sequence[CandidateJob], trials: TrialSet, described: Mapping[str, Any],
    run: CandidateOptions, *, rotary: bool, progress: bool | None,
) -> dict[str, CandidateScores]:  # fmt: skip
    """The jobs that share a capture."""
    done = _Done()
    order = sorted(range(len(trials)), key=lambda i: len(trials[i].tokens))

    def results(*, complete: bool) -> dict[str, CandidateScores]:
        return {j.method.name: _collected(model, j, trials, done, described, complete=complete) for j in jobs}

    with progress_bar("scoring questions", len(trials), show=progress) as advance:
        for start in range(0, len(order), run.batch_size):
            some = order[start : start + run.batch_size]
            try:
                captures = capture_candidates(model, [trials[i] for i in some], rotary=rotary, padding=run.padding)
                for i, one in zip(some, captures, strict=True):
                    done.values[i] = {j.method.name: _values(model, j, one) for j in jobs}
                    done.captures[i] = (one.logprobs, [len(t) for t in one.tokens])
            except KeyboardInterrupt:
                if not done.captures:
                    raise
                warnings.warn(
                    f"interrupted: {len(done.captures)} of {len(trials)} questions are done and kept; the result says "
                    "so in meta['complete'].",
                    stacklevel=3,
                )
                return results(complete=False)
            except MechheadsError as error:
                error.partial = results(complete=False) if done.captures else {}
                raise
            advance(len(some))
    return results(complete=True)


def _values(model: Model, job: CandidateJob, one: CandidateCapture) -> np.ndarray:
    """``[candidate layer head]`` of one trial."""
    name, shape = job.method.name, (len(one.tokens), model.spec.n_heads)
    layers = []
    for layer in range(model.spec.n_layers):
        try:
            with torch.no_grad():
                value = job.method.function(one.layer(layer), one.trial, **job.options)
        except MechheadsError:
            raise
        except Exception as error:
            where = f"trial {one.trial.id!r}, layer {layer}"
            raise MethodFailed(f"method {name!r} failed on {where}: {error}", {}) from error
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InvalidInput(
                f"method {name!r} returned {given}; expected a tensor of shape {shape}, [candidate head]."
            )
        layers.append(value.detach().float().cpu().numpy())
    return np.stack(layers, axis=1)


def _collected(
    model: Model, job: CandidateJob, trials: TrialSet, done: _Done, described: Mapping[str, Any], *, complete: bool
) -> CandidateScores:
    """What is done, in the order of the trial set."""
    places = sorted(done.captures)
    some = [trials[i] for i in places]
    width = max(len(t.candidates) for t in some)
    values = np.full((len(some), width, model.spec.n_layers, model.spec.n_heads), np.nan, dtype=np.float32)
    baseline = np.full((len(some), width), np.nan)
    for row, i in enumerate(places):
        mine = done.values[i][job.method.name]
        values[row, : len(mine)] = mine
        baseline[row, : len(mine)] = done.captures[i][0]
    meta = collect(
        described, job.method.name, job.options, trials.name, trials.hash, trials.options,
        seed=trials.options.get("seed"), complete=complete, n_trials_asked=len(trials), paper=job.method.paper,
        ablated=model.backend.hooked(), interventions=list(model.ablations),
    )  # fmt: skip
    return CandidateScores(
        values=values,
        baseline=baseline,
        labels=np.array([t.label for t in some], dtype=np.int64),
        candidates=[t.candidates for t in some],
        trial_ids=[t.id for t in some],
        method=job.method.name,
        unit="attention score" if job.options.get("scaled") else job.method.unit,
        records=[_record(t, done.captures[i][1]) for t, i in zip(some, places, strict=True)],
        meta=meta,
    )


def _record(trial: Trial, candidate_tokens: list[int]) -> dict[str, Any]:
    """What the statistics need to know of a trial."""
    known = {key: trial.meta[key] for key in _KEPT_META if key in trial.meta}
    return {"split": trial.split, "prompt_hash": prompt_hash(trial), "candidate_tokens": candidate_tokens, **known}


def candidate_key(
    described: Mapping[str, Any], versions: Mapping[str, Any], job: CandidateJob, trials: TrialSet
) -> dict[str, Any]:
    """What a stored result is a result of."""
    return {
        "format": 3, "versions": versions, "method": job.method.name, "model": described, "options": dict(job.options),
        "trials": trials.hash,
    }  # fmt: skip
