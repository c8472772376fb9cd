"""Jobs and tables of a scoring run: what to compute for each trial, and the rows as they come in."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mechheads.capture import LayerActs
from mechheads.errors import InvalidInput, MechheadsError
from mechheads.heads import HeadSet
from mechheads.methods.registry import Method
from mechheads.model import Model
from mechheads.provenance import collect
from mechheads.scores import HeadScores
from mechheads.trials import Trial, TrialSet


class ScoringError(Exception):
    """A method raised; the message names method and trial."""


@dataclass(frozen=True)
class Job:
    """One method with its options.

    Attributes:
        label: Its name among the results.
        method: The method.
        options: All its options with their values.
    """

    label: str
    method: Method
    options: Mapping[str, Any]

    def positions(self, trial: Trial) -> tuple[int, ...]:
        """Positions of the prompt rows it reads; empty for a method that reads generated steps."""
        rows = self.method.rows
        if not callable(rows):
            return ()
        found = tuple(rows(trial, self.options))
        if not found or min(found) < 0 or max(found) >= len(trial.tokens):
            raise InvalidInput(
                f"method {self.method.name!r} reads the prompt rows {list(found)[:5]} of trial {trial.id!r}, which has "
                f"positions 0 to {len(trial.tokens) - 1}; it must name at least one of these."
            )
        return found

    def null(self, model: Model, trial: Trial) -> Trial | None:
        """The null variant of a trial, if the method wants one."""
        return None if self.method.null is None else self.method.null(model, trial, self.options)

    def record(self) -> dict[str, Any]:
        """Options as provenance holds them; objects say for themselves what they are."""
        return {k: v.describe() if hasattr(v, "describe") else v for k, v in self.options.items()}


@dataclass
class Table:
    """Rows of one job as they come in, by trial index.

    Attributes:
        job: The job.
        rows: ``[layer head]`` arrays by name; NaN for a trial that is not kept.
        records: What is known of the trial.
        weights: Its weight in means: answer steps, or 1 for a method that gives one number a trial.
    """

    job: Job
    rows: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)
    records: dict[int, dict[str, Any]] = field(default_factory=dict)
    weights: dict[int, float] = field(default_factory=dict)

    def add(
        self, i: int, trial: Trial, parts: dict[str, np.ndarray] | None, record: dict[str, Any], weight: float
    ) -> None:
        """File one trial; ``parts`` is None if it is not kept."""
        if parts is not None and self.job.method.finish is not None:
            parts, reason = self.job.method.finish(parts, trial, self.job.options)
            if reason is not None:
                record, parts = {**record, "reason": reason}, None
        if parts is not None and np.isnan(parts["score"]).all():
            record, parts = {**record, "reason": "the score is undefined for every head"}, None
        self.rows[i] = {} if parts is None else parts
        self.records[i] = record
        self.weights[i] = weight

    def drop(self, keep: set[int]) -> None:
        """Forget trials of an unfinished batch."""
        for store in (self.rows, self.records, self.weights):
            for i in set(store) - keep:
                del store[i]

    def scores(self, model: Model, described: Mapping[str, Any], trials: TrialSet, *, pooling: str, complete: bool,
               run: Mapping[str, Any], **extra: Any) -> HeadScores:  # fmt: skip
        """HeadScores of the trials that are done, in the order of the trial set."""
        done = sorted(self.records)
        method, spec = self.job.method, model.spec
        empty = np.full((spec.n_layers, spec.n_heads), np.nan, dtype=np.float32)
        names = sorted({name for i in done for name in self.rows[i]} - {"score"})
        meta = collect(
            described,
            method.name,
            {**(run if method.gated else {}), **self.job.record()},
            trials.name,
            trials.hash,
            trials.options,
            seed=trials.options.get("seed"),
            complete=complete,
            n_trials_asked=len(trials),
            paper=method.paper,
            ablated=model.backend.hooked(),
            interventions=list(model.ablations),
            **extra,
        )
        return HeadScores(
            method=method.name,
            values=np.stack([self.rows[i].get("score", empty) for i in done]),
            kept=np.array([self.records[i]["reason"] is None for i in done]),
            weights=np.array([self.weights[i] for i in done]),
            trial_ids=tuple(trials[i].id for i in done),
            unit=method.unit_for(self.job.options),
            pooling=pooling,
            parts={p: np.stack([self.rows[i].get(p, empty) for i in done]) for p in names},
            records=tuple(self.records[i] for i in done),
            meta=meta,
        )


def by_layer(job: Job, model: Model, where: str, one_layer: Callable[[int], Sequence[Any]]) -> dict[str, np.ndarray]:
    """Call a method layer by layer and stack what it returns.

    Args:
        job: The method and its options.
        model: The model.
        where: What is scored, for errors (``trial 'x'``).
        one_layer: The positional arguments of the method for a layer.
    """
    spec = model.spec
    parts: dict[str, np.ndarray] = {}
    for layer in range(spec.n_layers):
        add_layer(job, parts, layer, one_layer(layer), (spec.n_layers, spec.n_heads), where)
    return parts


def add_layer(
    job: Job, parts: dict[str, np.ndarray], layer: int, arguments: Sequence[Any], shape: tuple[int, int], where: str
) -> None:
    """One layer's scores into the ``[layer head]`` arrays of a trial."""
    for name, value in call(job, arguments, (shape[1],), f"{where}, layer {layer}").items():
        parts.setdefault(name, np.full(shape, np.nan, dtype=np.float32))[layer] = value


def call(job: Job, arguments: Sequence[Any], shape: tuple[int, ...], where: str) -> dict[str, np.ndarray]:
    """Call a method and check what it returns."""
    name = job.method.name
    try:
        with torch.no_grad():
            out = job.method.function(*arguments, **job.options)
    except MechheadsError:
        raise
    except Exception as error:
        raise ScoringError(f"method {name!r} failed on {where}: {error}") from error
    out = out if isinstance(out, Mapping) else {"score": out}
    if "score" not in out:
        raise InvalidInput(f"method {name!r} returned {sorted(out)}; a dict must have the key 'score'.")
    for key, value in out.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != shape:
            given = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InvalidInput(f"method {name!r} returned {given} for {key!r}; expected a tensor of shape {shape}.")
        if torch.isinf(value).any():
            raise InvalidInput(f"method {name!r} returned an infinite {key!r} on {where}; use NaN for undefined.")
    return {key: value.detach().float().cpu().numpy() for key, value in out.items()}


def undefine_silenced(model: Model, parts: dict[str, np.ndarray]) -> None:
    """NaN for heads now ablated at z, or pruned: patterns and values come before, so they would still seem to write."""
    for intervention in model.ablations:
        if intervention.get("site") in ("z", "weights"):
            for head in HeadSet(intervention["heads"]):
                for values in parts.values():
                    values[head.layer, head.head] = np.nan


def select(acts: LayerActs, steps: tuple[int, ...], null_steps: tuple[int, ...] | None) -> LayerActs:
    """The rows of a layer that a method reads."""
    chosen = acts.at_steps(steps)
    if null_steps is None:
        return replace(chosen, null=None) if chosen.null is not None else chosen
    assert chosen.null is not None
    return replace(chosen, null=chosen.null.at_steps(null_steps))
