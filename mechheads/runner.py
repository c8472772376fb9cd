"""The trial loop: batches of trials through one capture, the correctness gate, scores out."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mechheads.capture import TrialCapture, capture
from mechheads.errors import InvalidInput, MechheadsError, UnknownName
from mechheads.heads import HeadSet
from mechheads.methods.registry import Method, get_method
from mechheads.model import Model
from mechheads.progress import progress_bar
from mechheads.provenance import collect, content_hash
from mechheads.scores import POOLINGS, HeadScores
from mechheads.text import contains_answer, exact_match
from mechheads.trials import Trial, TrialSet


@dataclass(frozen=True)
class RunOptions:
    """How trials are run; the same for every method on one capture.

    Attributes:
        pooling: ``"step"`` or ``"trial"``; see ``HeadScores``.
        rouge_threshold: A trial is kept if ROUGE-1 recall of the answer is above this (0 to 1); None keeps every
            trial whose output holds the answer's tokens.
        max_new_tokens: Longest answer, tokens.
        stop_at_newline: End the answer before a line break.
        batch_size: Trials run together; changes no score beyond rounding.
        padding: ``"left"`` or ``"right"``; likewise.
    """

    pooling: str = "step"
    rouge_threshold: float | None = 0.5
    max_new_tokens: int = 50
    stop_at_newline: bool = True
    batch_size: int = 8
    padding: str = "left"

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise InvalidInput(f"pooling is {self.pooling!r}; it must be one of {', '.join(POOLINGS)}.")
        if self.rouge_threshold is not None and not 0 <= self.rouge_threshold <= 1:
            raise InvalidInput(f"rouge_threshold is {self.rouge_threshold}; it must lie between 0 and 1.")
        if self.batch_size < 1:
            raise InvalidInput(f"batch_size is {self.batch_size}; it must be at least 1.")

    def record(self) -> dict[str, Any]:
        """What changes the numbers, for provenance and keys."""
        return {
            "rouge_threshold": self.rouge_threshold,
            "max_new_tokens": self.max_new_tokens,
            "stop_at_newline": self.stop_at_newline,
        }


class MethodFailed(MechheadsError, RuntimeError):
    """A scoring method raised on a trial. ``partial`` holds the scores of the trials before it, by method."""

    def __init__(self, message: str, partial: dict[str, HeadScores]):
        super().__init__(message)
        self.partial = partial


@dataclass
class _Table:
    """Rows of one method as they come in."""

    method: Method
    options: dict[str, Any]
    rows: dict[int, dict[str, np.ndarray]] = field(default_factory=dict)


def score_trials(
    model: Model,
    methods: Sequence[str],
    trials: TrialSet,
    *,
    run: RunOptions,
    options: Mapping[str, Any],
    progress: bool | None = None,
) -> dict[str, HeadScores]:
    """Score trials with several methods on one capture.

    A trial with a gold answer is kept if its greedy answer passes the ROUGE gate and holds the answer's tokens;
    methods see the steps that generated them. A trial without an answer is kept if the model said anything, and
    methods see every step.

    Under an intervention at ``z`` the ablated heads are undefined (NaN) for methods that do not read ``z``.

    Ctrl-C ends the run and returns the trials that are done, with a warning; before the first is done it is an
    ordinary KeyboardInterrupt.

    Args:
        model: The model.
        methods: Names of registered methods.
        trials: The trials.
        run: How to run them.
        options: Options of the methods; each method takes those it knows.
        progress: Show a bar (None: only on a terminal).

    Raises:
        InvalidInput: If an option belongs to no method, or a trial cannot be run.
        MethodFailed: If a method raises. This error, like any of mechheads' own in the middle of a run, keeps what
            was done as ``error.partial``.
    """
    tables = [_Table(m, m.resolve(options)) for m in check_options(methods, options)]
    _check_trials(model, trials, [t.method for t in tables])
    needs = sorted({need for t in tables for need in t.method.needs})
    order = sorted(range(len(trials)), key=lambda i: len(trials[i].tokens))
    records: dict[int, dict[str, Any]] = {}
    interrupted = False
    with progress_bar("scoring trials", len(trials), show=progress) as advance:
        for start in range(0, len(order), run.batch_size):
            some = order[start : start + run.batch_size]
            try:
                captures = capture(
                    model,
                    [trials[i] for i in some],
                    needs=needs,
                    max_new_tokens=run.max_new_tokens,
                    stop_at_newline=run.stop_at_newline,
                    padding=run.padding,
                )
                for i, one in zip(some, captures, strict=True):
                    record, steps = judge(one, run)
                    _score_one(model, tables, i, one, steps)
                    records[i] = record
            except KeyboardInterrupt:
                if not records:
                    raise  # nothing to keep, so it is an ordinary Ctrl-C
                interrupted = True
                break
            except MechheadsError as error:
                error.partial = _assemble(model, tables, trials, records, run, complete=False) if records else {}
                raise
            except _ScoringError as error:
                # The first trial may be the one that fails; then there is nothing to keep.
                partial = _assemble(model, tables, trials, records, run, complete=False) if records else {}
                raise MethodFailed(str(error), partial) from error.__cause__
            advance(len(some))
    if interrupted:
        warnings.warn(
            f"interrupted: {len(records)} of {len(trials)} trials are done and kept; the result says so in "
            "meta['complete'].",
            stacklevel=2,
        )
    return _assemble(model, tables, trials, records, run, complete=not interrupted)


class _ScoringError(Exception):
    """A method raised; the message names method and trial."""


def check_options(methods: Sequence[str], options: Mapping[str, Any]) -> list[Method]:
    """The methods, if every option given belongs to one of them.

    Raises:
        UnknownName: For an unknown method.
        InvalidInput: For an option that none of them has.
    """
    found = [get_method(name) for name in methods]
    known = {k for m in found for k in m.options}
    for key in options:
        if key not in known:
            raise InvalidInput(
                f"no option {key!r} for {', '.join(methods)}. Options of these methods: "
                f"{', '.join(sorted(known)) or '(none)'}; of every run: {', '.join(RunOptions.__dataclass_fields__)}."
            )
    return found


def _check_trials(model: Model, trials: TrialSet, methods: Sequence[Method]) -> None:
    """Refuse before the first pass what would fail in the middle of the run."""
    if not len(trials):
        raise InvalidInput("there are no trials to score.")
    for trial in trials:
        model.check_tokens(trial.tokens, what=f"trial {trial.id!r}")
        for method in methods:
            for span in method.spans:
                if span not in trial.spans:
                    raise UnknownName(
                        f"span of trial {trial.id!r}",
                        span,
                        trial.spans,
                        hint=f"The method {method.name!r} reads it; score such trials with another (dla needs none).",
                    )


def prompt_hash(trial: Trial) -> str:
    """Hash of a trial's prompt, by which a sweep sees that it tests heads on the trials that chose them."""
    return content_hash(list(trial.tokens))


def judge(one: TrialCapture, run: RunOptions) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The record of a trial and the steps that methods see (empty if it is not kept)."""
    trial, said = one.trial, one.text
    record: dict[str, Any] = {
        "split": trial.split,
        "generated": said,
        "stopped": one.decoded.stopped,
        "n_generated": len(one.decoded.tokens),
        "answer": trial.answer,
        "prompt_hash": prompt_hash(trial),
    }
    if trial.answer is None:
        steps = tuple(range(len(one.decoded.tokens)))
        reason = None if steps else "the model said nothing"
    else:
        steps = one.answer_steps
        record |= {
            "rouge1_recall": one.rouge1_recall,
            "exact_match": exact_match(said, trial.answer),
            "contains_answer": contains_answer(said, trial.answer),
        }
        if not one.decoded.tokens:
            reason = "the model said nothing"
        elif run.rouge_threshold is not None and one.rouge1_recall <= run.rouge_threshold:
            reason = f"ROUGE-1 recall is not above {run.rouge_threshold}"
        else:
            reason = None if steps else "the answer's tokens are not in the output"
    record |= {"n_answer_steps": len(steps), "answer_steps": list(steps), "reason": reason}
    return record, steps if reason is None else ()


def _score_one(model: Model, tables: list[_Table], i: int, one: TrialCapture, steps: tuple[int, ...]) -> None:
    """Run every method on one trial, layer by layer; NaN for a trial that is not kept."""
    spec = model.spec
    empty = np.full((spec.n_layers, spec.n_heads), np.nan, dtype=np.float32)
    rows: list[dict[str, np.ndarray]] = [{"score": empty.copy()} for _ in tables]
    for layer in range(spec.n_layers) if steps else ():
        acts = one.layer(layer).at(steps)
        for table, row in zip(tables, rows, strict=True):
            for name, value in _call(table, acts, one.trial, spec.n_heads).items():
                row.setdefault(name, empty.copy())[layer] = value
    for table, row in zip(tables, rows, strict=True):
        if "z" not in table.method.needs:
            _undefine_silenced(model, row)
        table.rows[i] = row


def _undefine_silenced(model: Model, row: dict[str, np.ndarray]) -> None:
    """NaN for heads now ablated at z: patterns and values come before z, so they would still seem to write."""
    for intervention in model.ablations:
        if intervention["site"] == "z":
            for head in HeadSet(intervention["heads"]):
                for values in row.values():
                    values[head.layer, head.head] = np.nan


def _call(table: _Table, acts: Any, trial: Trial, n_heads: int) -> dict[str, np.ndarray]:
    """One method on one layer, its output checked."""
    name = table.method.name
    try:
        with torch.no_grad():
            out = table.method.function(acts, trial, **table.options)
    except MechheadsError:
        raise
    except Exception as error:
        raise _ScoringError(f"method {name!r} failed on trial {trial.id!r}, layer {acts.layer}: {error}") from error
    out = out if isinstance(out, Mapping) else {"score": out}
    if "score" not in out:
        raise InvalidInput(f"method {name!r} returned {sorted(out)}; a dict must have the key 'score'.")
    for key, value in out.items():
        if not isinstance(value, Tensor) or tuple(value.shape) != (n_heads,):
            shape = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
            raise InvalidInput(
                f"method {name!r} returned {shape} for {key!r}; expected a tensor of shape ({n_heads},)."
            )
        if torch.isinf(value).any():
            raise InvalidInput(
                f"method {name!r} returned an infinite {key!r} on trial {trial.id!r}; use NaN for undefined."
            )
    return {key: value.detach().float().cpu().numpy() for key, value in out.items()}


def _assemble(
    model: Model,
    tables: list[_Table],
    trials: TrialSet,
    records: Mapping[int, Mapping[str, Any]],
    run: RunOptions,
    *,
    complete: bool,
) -> dict[str, HeadScores]:
    """HeadScores of the trials that are done, in the order of the trial set."""
    done = sorted(records)
    spec = model.spec
    described = model.describe()
    out = {}
    for table in tables:
        parts = sorted({name for i in done for name in table.rows[i]} - {"score"})
        empty = np.full((spec.n_layers, spec.n_heads), np.nan, dtype=np.float32)
        meta = collect(
            described,
            table.method.name,
            {**table.options, **run.record()},
            trials.name,
            trials.hash,
            trials.options,
            seed=trials.options.get("seed"),
            complete=complete,
            n_trials_asked=len(trials),
            prefill="twin" if model.backend.twin is not None and model.backend.fast_prefill() else "hooked model",
            ablated=model.backend.hooked(),
            interventions=list(model.ablations),
        )
        out[table.method.name] = HeadScores(
            method=table.method.name,
            values=np.stack([table.rows[i]["score"] for i in done]),
            kept=np.array([records[i]["reason"] is None for i in done]),
            weights=np.array([float(records[i]["n_answer_steps"]) for i in done]),
            trial_ids=tuple(trials[i].id for i in done),
            unit=table.method.unit_for(table.options),
            pooling=run.pooling,
            parts={p: np.stack([table.rows[i].get(p, empty) for i in done]) for p in parts},
            records=tuple(records[i] for i in done),
            meta=meta,
        )
    return out
