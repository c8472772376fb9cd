"""The trial loop: batches of trials through one capture, the correctness gate, scores out."""

from __future__ import annotations

import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mechheads.capture import TrialCapture, capture
from mechheads.errors import InvalidInput, MechheadsError, UnknownName
from mechheads.lens import TunedLens
from mechheads.lens_files import load_lens
from mechheads.methods.registry import Method, get_method
from mechheads.model import Model
from mechheads.progress import progress_bar
from mechheads.provenance import canonical_json, content_hash
from mechheads.scores import POOLINGS, HeadScores
from mechheads.stats import check_count
from mechheads.tables import Job, ScoringError, Table, add_layer, by_layer, call, select, undefine_silenced
from mechheads.text import contains_answer, denies_answer, exact_match
from mechheads.trials import Trial, TrialSet


@dataclass(frozen=True)
class RunOptions:
    """How trials are run; the same for every method on one capture.

    Attributes:
        pooling: ``"step"`` or ``"trial"``; see ``HeadScores``.
        rouge_threshold: A trial is kept if ROUGE-1 recall of the answer is above this (0 to 1); None keeps every
            trial whose output holds the answer's tokens.
        reject_denials: Drop a trial whose output only denies the answer ("It is not Yuki"); the published gate
            keeps it.
        max_new_tokens: Longest answer, tokens.
        stop_at_newline: End the answer before a line break.
        batch_size: Trials run together; changes no score beyond rounding.
        padding: ``"left"`` or ``"right"``; likewise.
    """

    pooling: str = "step"
    rouge_threshold: float | None = 0.5
    reject_denials: bool = True
    max_new_tokens: int = 50
    stop_at_newline: bool = True
    batch_size: int = 8
    padding: str = "left"

    def __post_init__(self) -> None:
        if self.pooling not in POOLINGS:
            raise InvalidInput(f"pooling is {self.pooling!r}; it must be one of {', '.join(POOLINGS)}.")
        if self.rouge_threshold is not None and not 0 <= self.rouge_threshold <= 1:
            raise InvalidInput(f"rouge_threshold is {self.rouge_threshold}; it must lie between 0 and 1.")
        check_count("batch_size", self.batch_size)
        check_count("max_new_tokens", self.max_new_tokens)

    def record(self) -> dict[str, Any]:
        """What changes the numbers, for provenance and keys."""
        return {
            "rouge_threshold": self.rouge_threshold,
            "reject_denials": self.reject_denials,
            "max_new_tokens": self.max_new_tokens,
            "stop_at_newline": self.stop_at_newline,
        }


class MethodFailed(MechheadsError, RuntimeError):
    """A scoring method raised on a trial. ``partial`` holds the scores of the trials before it, by method."""

    def __init__(self, message: str, partial: dict[str, HeadScores]):
        super().__init__(message)
        self.partial = partial


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
    methods see every step. Methods that read the prompt alone keep every trial; those that read no trial at all
    (weights, random tokens) have trials of their own.

    Under an intervention at ``z`` the ablated heads are undefined (NaN) for methods that do not read ``z``.

    Ctrl-C ends the run and returns the trials that are done, with a warning; before the first is done it is an
    ordinary KeyboardInterrupt.

    Args:
        model: The model.
        methods: Names of registered methods.
        trials: The trials.
        run: How to run them.
        options: Options of the methods; each method takes those it knows. A method's own name as a key holds a
            dict of options for it alone.
        progress: Show a bar (None: only on a terminal).

    Raises:
        InvalidInput: If an option belongs to no method, or a trial cannot be run.
        MethodFailed: If a method raises. This error, like any of mechheads' own in the middle of a run, keeps what
            was done as ``error.partial``.
    """
    jobs = [Job(m.name, m, live(model, given)) for m, given in zip(*_resolved(methods, options, run), strict=True)]
    return score_jobs(model, jobs, trials, run=run, progress=progress)


def score_jobs(
    model: Model, jobs: Sequence[Job], trials: TrialSet, *, run: RunOptions, progress: bool | None = None
) -> dict[str, HeadScores]:
    """As ``score_trials``, for jobs: the same method may stand there several times with other options.

    Returns:
        Results by label; after Ctrl-C those of methods that had not begun are left out.
    """
    described = model.describe()
    reading = [j for j in jobs if j.method.reads_trials]
    if reading:
        _check_trials(model, trials, reading)
    out: dict[str, HeadScores] = {}
    groups: list[tuple[TrialSet, list[Job]]] = [(trials, group) for group in _one_null_each(reading)]
    groups = [*_own_prompts(model, jobs), *groups]
    try:
        for job in jobs:
            if job.method.kind == "weights":
                out[job.label] = _score_weights(model, job, described, run)
        for some, group in groups:
            try:
                found = _score_group(model, group, some, described, run=run, progress=progress)
            except KeyboardInterrupt:
                if not out:
                    raise  # nothing to keep, so it is an ordinary Ctrl-C
                _say_interrupted(jobs, out)
                break
            out |= found
            if not all(one.meta["complete"] for one in found.values()):
                _say_interrupted(jobs, out)
                break
    except MechheadsError as error:
        error.partial = {**out, **error.partial}
        raise
    except ScoringError as error:
        raise MethodFailed(str(error), out) from error.__cause__
    return {job.label: out[job.label] for job in jobs if job.label in out}


def _say_interrupted(jobs: Sequence[Job], done: Mapping[str, HeadScores]) -> None:
    """Warn which methods are left out."""
    missing = [job.label for job in jobs if job.label not in done]
    if missing:
        warnings.warn(f"interrupted: {', '.join(missing)} had not begun and are left out.", stacklevel=4)


def live(model: Model, options: Mapping[str, Any]) -> dict[str, Any]:
    """Options as methods take them: a lens by its path becomes the lens, which must fit the model."""
    lens = options.get("lens")
    if lens is None:
        return dict(options)
    lens = load_lens(lens) if isinstance(lens, (str, Path)) else lens
    if not isinstance(lens, TunedLens):
        raise InvalidInput(f"lens is a {type(lens).__name__}; give a TunedLens (mh.load_lens) or the path of one.")
    lens.check(model)
    return {**options, "lens": lens}


def _own_prompts(model: Model, jobs: Sequence[Job]) -> list[tuple[TrialSet, list[Job]]]:
    """Jobs that bring prompts of their own; those that bring the same ones together."""
    found: dict[tuple[int, str], list[Job]] = {}
    for job in jobs:
        if job.method.prompts is not None:
            found.setdefault((id(job.method.prompts), canonical_json(job.record())), []).append(job)
    groups = []
    for group in found.values():
        make = group[0].method.prompts
        assert make is not None
        trials = make(model, group[0].options)
        _check_trials(model, trials, group)
        groups.append((trials, group))
    return groups


def _one_null_each(jobs: Sequence[Job]) -> list[list[Job]]:
    """Jobs in groups that share a capture: at most one kind of null variant in each."""
    plain = [j for j in jobs if j.method.null is None]
    groups: dict[str, list[Job]] = {}
    for job in jobs:
        if job.method.null is not None:
            groups.setdefault(canonical_json([str(id(job.method.null)), job.record()]), []).append(job)
    first, *rest = list(groups.values()) or [[]]
    return [g for g in ([*plain, *first], *rest) if g]


def _score_weights(model: Model, job: Job, described: Mapping[str, Any], run: RunOptions) -> HeadScores:
    """Scores that need no run: one trial called ``weights``."""
    table = Table(job)
    one = TrialSet([Trial(id="weights", tokens=[0])], name="weights")
    parts = by_layer(job, model, "the weights", lambda layer: (model, layer))
    table.add(0, one[0], parts, {"split": None, "reason": None}, 1.0)
    return table.scores(model, described, one, pooling=run.pooling, complete=True, run={})


def _score_group(
    model: Model,
    jobs: Sequence[Job],
    trials: TrialSet,
    described: Mapping[str, Any],
    *,
    run: RunOptions,
    progress: bool | None,
) -> dict[str, HeadScores]:
    """Score the jobs that share a capture, batch by batch."""
    tables = [Table(job) for job in jobs]
    done: set[int] = set()

    def results(*, complete: bool) -> dict[str, HeadScores]:
        if not done:
            return {}
        fast = model.backend.twin is not None and model.backend.fast_prefill()
        prefill = "twin" if fast else "hooked model"
        for table in tables:
            table.drop(done)
        return {
            t.job.label: t.scores(
                model, described, trials, pooling=run.pooling, complete=complete, run=run.record(), prefill=prefill
            )
            for t in tables
        }

    order = sorted(range(len(trials)), key=lambda i: len(trials[i].tokens))
    with progress_bar("scoring trials", len(trials), show=progress) as advance:
        for start in range(0, len(order), run.batch_size):
            some = order[start : start + run.batch_size]
            try:
                for i in _score_batch(model, tables, trials, some, run):
                    done.add(i)
            except KeyboardInterrupt:
                if not done:
                    raise  # nothing to keep, so it is an ordinary Ctrl-C
                warnings.warn(
                    f"interrupted: {len(done)} of {len(trials)} trials are done and kept; the result says so in "
                    "meta['complete'].",
                    stacklevel=2,
                )
                return results(complete=False)
            except MechheadsError as error:
                error.partial = results(complete=False)
                raise
            except ScoringError as error:
                raise MethodFailed(str(error), results(complete=False)) from error.__cause__
            advance(len(some))
    return results(complete=True)


def _score_batch(
    model: Model, tables: Sequence[Table], trials: TrialSet, some: Sequence[int], run: RunOptions
) -> Iterator[int]:
    """Capture some trials together and score each; yields the index of each trial that is done."""
    jobs = [t.job for t in tables]
    gated = any(j.method.gated for j in jobs)
    batch = [trials[i] for i in some]
    makes_null = next((j for j in jobs if j.method.null is not None), None)
    nulls = [] if makes_null is None else [makes_null.null(model, t) for t in batch]
    first_rows = [[len(t.tokens) - 1, *(p for j in jobs for p in j.positions(t))] for t in batch]
    captures = capture(
        model,
        batch,
        needs=sorted({need for j in jobs for need in j.method.needs}),
        max_new_tokens=run.max_new_tokens,
        stop_at_newline=run.stop_at_newline,
        padding=run.padding,
        tail=max(len(t.tokens) - min(rows) for t, rows in zip(batch, first_rows, strict=True)),
        nulls=nulls,
        generate=gated,
    )
    for i, one in zip(some, captures, strict=True):
        _score_one(model, tables, i, one, run, gated=gated)
        yield i


def _score_one(
    model: Model, tables: Sequence[Table], i: int, one: TrialCapture, run: RunOptions, *, gated: bool
) -> None:
    """Run every method on one trial, layer by layer."""
    trial = one.trial
    plain = {"split": trial.split, "answer": trial.answer, "prompt_hash": prompt_hash(trial), "reason": None}
    record, steps = judge(one, run) if gated else (plain, ())
    views = [_view(t.job, one, steps) for t in tables]
    shape = (model.spec.n_layers, model.spec.n_heads)
    found: list[dict[str, np.ndarray]] = [{} for _ in tables]
    for layer in range(shape[0]) if any(views) else ():
        acts = one.rows(layer, answer_steps=steps)
        seen: dict[Any, Any] = {}
        for table, view, parts in zip(tables, views, found, strict=True):
            if view is not None:
                if view not in seen:
                    seen[view] = select(acts, *view)
                add_layer(table.job, parts, layer, (seen[view], trial), shape, f"trial {trial.id!r}")
    for table, view, parts in zip(tables, views, found, strict=True):
        method, seen_at_all = table.job.method, view is not None
        if method.kind == "causal" and steps:
            parts, seen_at_all = call(table.job, (model, trial), shape, f"trial {trial.id!r}"), True
        if method.kind == "capture" and "z" not in method.needs:
            undefine_silenced(model, parts)
        by_step = method.kind == "capture" and method.rows == "answer"
        weight = float(record["n_answer_steps"]) if by_step else 1.0
        table.add(i, trial, parts if seen_at_all else None, record if method.gated else plain, weight)


def _view(job: Job, one: TrialCapture, steps: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...] | None] | None:
    """Steps that a method sees of a trial and of its null variant; None if it sees nothing of it."""
    method = job.method
    if method.kind != "capture":
        return None
    if not callable(method.rows):
        if not steps:
            return None
        return (steps if method.rows == "answer" else tuple(range(one.decoded.steps))), None
    last = len(one.trial.tokens) - 1
    wanted = tuple(p - last for p in job.positions(one.trial))
    if method.null is None or one.null is None:
        return wanted, None
    last = len(one.null.tokens) - 1
    return wanted, tuple(p - last for p in job.positions(one.null))


def _resolved(
    methods: Sequence[str], options: Mapping[str, Any], run: RunOptions
) -> tuple[list[Method], list[dict[str, Any]]]:
    """Methods and the options of each: those of the run and the shared ones it knows, then its own."""
    found = check_options(methods, options)
    named = {m.name: options[m.name] for m in found if isinstance(options.get(m.name), Mapping)}
    shared = {**run.record(), **{k: v for k, v in options.items() if k not in named}}
    return found, [m.resolve({**shared, **named.get(m.name, {})}) for m in found]


def resolved_options(
    model: Model, methods: Sequence[str], options: Mapping[str, Any], run: RunOptions
) -> dict[str, dict[str, Any]]:
    """Options of each method as provenance and store keys hold them, by method."""
    found, given = _resolved(methods, options, run)
    return {
        m.name: {**(run.record() if m.gated else {}), **Job(m.name, m, live(model, o)).record()}
        for m, o in zip(found, given, strict=True)
    }


def check_options(methods: Sequence[str], options: Mapping[str, Any]) -> list[Method]:
    """The methods, if every option given belongs to one of them.

    Raises:
        UnknownName: For an unknown method.
        InvalidInput: For an option that none of them has.
    """
    found = [get_method(name) for name in methods]
    twice = sorted({name for name in methods if list(methods).count(name) > 1})
    if twice:
        raise InvalidInput(f"the method {twice[0]!r} is named twice; name each once.")
    known = {k for m in found for k in m.options}
    for key, value in options.items():
        if isinstance(value, Mapping) and key in methods:
            of_run = [k for k in value if k in RunOptions.__dataclass_fields__]
            if of_run:
                raise InvalidInput(
                    f"{of_run[0]!r} is an option of the whole run, since one capture serves all methods; give it "
                    f"beside the methods, not for {key!r} alone."
                )
            strange = [k for k in value if k not in get_method(key).options]
            if strange:
                raise InvalidInput(
                    f"no option {strange[0]!r} for {key}. It has: "
                    f"{', '.join(sorted(get_method(key).options)) or '(none)'}."
                )
        elif key not in known:
            near = difflib.get_close_matches(key, [*known, *RunOptions.__dataclass_fields__], n=1)
            raise InvalidInput(
                f"no option {key!r} for {', '.join(methods)}. "
                f"{f'Did you mean {near[0]!r}? ' if near else ''}Options of these methods: "
                f"{', '.join(sorted(known)) or '(none)'}; of every run: {', '.join(RunOptions.__dataclass_fields__)}."
            )
    return found


def _check_trials(model: Model, trials: TrialSet, jobs: Sequence[Job]) -> None:
    """Refuse before the first pass what would fail in the middle of the run."""
    if not len(trials):
        raise InvalidInput("there are no trials to score.")
    for trial in trials:
        model.check_tokens(trial.tokens, what=f"trial {trial.id!r}")
        for job in jobs:
            method = job.method
            for span in method.spans:
                if span not in trial.spans:
                    raise UnknownName(
                        f"span of trial {trial.id!r}",
                        span,
                        trial.spans,
                        hint=f"The method {method.name!r} reads it: name it when the trial is made (Trial.from_text("
                        f"..., spans={{{span!r}: 'its text'}})), or score with another method (dla needs none).",
                    )
            job.positions(trial)
            null = job.null(model, trial)
            if null is not None:
                model.check_tokens(null.tokens, what=f"the null variant of trial {trial.id!r}")
                job.positions(null)


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
        elif run.reject_denials and denies_answer(said, trial.answer):
            reason = "the output denies the answer"
        else:
            reason = None if steps else "the answer's tokens are not in the output"
    record |= {"n_answer_steps": len(steps), "answer_steps": list(steps), "reason": reason}
    return record, steps if reason is None else ()
