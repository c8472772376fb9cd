"""``CircuitAnalysis``: the one entry. It holds a model and a store, and has no mathematics of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, overload

import numpy as np

from mechheads.agreement import Agreement, agreement
from mechheads.candidate_runner import CandidateJob, CandidateOptions, candidate_key, score_candidates
from mechheads.candidate_scores import CandidateScores
from mechheads.engines import LocalEngine, RayEngine
from mechheads.errors import InvalidInput, MechheadsError
from mechheads.generate import Generation, generate
from mechheads.interventions import Intervention, apply
from mechheads.methods.registry import get_method, method_names
from mechheads.model import Model, load
from mechheads.premise_result import PremiseAblation
from mechheads.premises import run_premises
from mechheads.provenance import package_versions
from mechheads.pruning import run_pruning
from mechheads.runner import RunOptions, check_options, live, resolved_options, score_jobs, score_trials
from mechheads.scores import HeadScores, SweepResult
from mechheads.store import Store
from mechheads.sweep import run_sweep
from mechheads.sweep_controls import RandomHeads
from mechheads.sweep_sets import Controls
from mechheads.tables import Job
from mechheads.tasks import Task
from mechheads.trials import Span, Trial, TrialSet
from mechheads.verdicts import Evaluation, evaluate, offsets


class CircuitAnalysis:
    """Score heads, then prove or refute the scores.

    Args:
        model: A ``Model``, or anything ``mh.load`` takes.
        store: Folder where results are kept and found again; without it nothing is remembered.
        progress: Show progress bars; None shows them on a terminal or in Jupyter only.
    """

    def __init__(self, model: Any, *, store: str | Path | None = None, progress: bool | None = None):
        self.model: Model = load(model)
        self.store = None if store is None else Store(store)
        self.progress = progress

    def __repr__(self) -> str:
        return f"CircuitAnalysis({self.model!r}, store={str(self.store.path) if self.store else None!r})"

    @overload
    def score(self, methods: Literal["qk"], trials: Trial | Sequence[Trial], **options: Any) -> CandidateScores: ...
    @overload
    def score(self, methods: str, trials: Trial | Sequence[Trial], **options: Any) -> HeadScores: ...
    @overload
    def score(
        self, methods: list[str] | tuple[str, ...], trials: Trial | Sequence[Trial], **options: Any
    ) -> dict[str, Any]: ...
    def score(
        self, methods: str | list[str] | tuple[str, ...], trials: Trial | Sequence[Trial], **options: Any
    ) -> HeadScores | CandidateScores | dict[str, Any]:
        """Score every head with one method or several, on one capture.

        Args:
            methods: A method's name, or several (see ``mechheads score --help`` or ``mh.methods.method_names()``).
            trials: The trials.
            **options: Options of the methods (``unembed``), each for every method that knows it, or for one alone:
                ``wu={"counting": "step"}``. And of the run: ``pooling``, ``rouge_threshold``, ``reject_denials``,
                ``max_new_tokens``, ``stop_at_newline``, ``batch_size``, ``padding`` (see ``RunOptions``).

        Returns:
            HeadScores (CandidateScores for ``qk``), or a dict of them by name if a list was given. After Ctrl-C the
            dict holds what was done: the method in progress with fewer trials, those that had not begun not at all; a
            warning says so.

        Raises:
            UnknownName: For an unknown method.
            InvalidInput: For an unknown option or a trial that cannot be run.
        """
        names = [methods] if isinstance(methods, str) else list(methods)
        if not names:
            raise InvalidInput(f"name at least one method, of: {', '.join(method_names())}.")
        run, own = _split_options(options)
        check_options(names, own)  # here, because a stored result or a companion method would let it pass
        asking = [name for name in names if get_method(name).kind == "candidates"]
        found = self._score_candidates(asking, TrialSet.of(trials), run, own) if asking else {}
        others = [name for name in names if name not in asking]
        try:
            found |= self._score(others, TrialSet.of(trials), run, own) if others else {}
        except MechheadsError as error:
            error.partial = {**found, **error.partial}
            raise
        if not isinstance(methods, str):
            return found
        if methods not in found:
            raise KeyboardInterrupt  # it had not begun
        return found[methods]

    def _score(self, names: list[str], trials: TrialSet, run: RunOptions, own: dict[str, Any]) -> dict[str, HeadScores]:
        """Scores from the store where they are, the rest from one capture."""
        if self.store is None or self.model.backend.hooked():
            return score_trials(self.model, names, trials, run=run, options=own, progress=self.progress)
        companions = _companions(names, trials)
        keys = self._keys([*names, *companions], trials, run, own)
        found = {n: s for n in names if (s := self.store.get_scores(keys[n])) is not None}
        missing = [n for n in names if n not in found]
        if missing:
            asked = [*missing, *(n for n in companions if not self.store.file(keys[n]).exists())]
            known = {key for n in asked for key in (n, *get_method(n).options)}
            own = {key: value for key, value in own.items() if key in known}  # of what is left to compute
            new = score_trials(self.model, asked, trials, run=run, options=own, progress=self.progress)
            for name, scores in new.items():
                if scores.meta["complete"] and get_method(name).builtin:
                    self.store.put_scores(keys[name], scores)
            found |= {n: new[n] for n in missing if n in new}
        return {n: found[n].with_pooling(run.pooling) for n in names if n in found}

    def _score_candidates(
        self, names: list[str], trials: TrialSet, run: RunOptions, own: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Candidate scores from the store where they are, the rest computed."""
        jobs = []
        for name in names:
            named = own.get(name)
            given = {**own, **(named if isinstance(named, Mapping) else {})}
            jobs.append(CandidateJob(get_method(name), get_method(name).resolve(given)))
        how = CandidateOptions(batch_size=run.batch_size, padding=run.padding)
        if self.store is None or self.model.backend.hooked():
            return score_candidates(self.model, jobs, trials, run=how, progress=self.progress)
        described, versions = self.model.describe(), package_versions()
        keys = {j.method.name: candidate_key(described, versions, j, trials) for j in jobs}
        found = {n: s for n, key in keys.items() if (s := self.store.get_candidates(key)) is not None}
        missing = [j for j in jobs if j.method.name not in found]
        new = score_candidates(self.model, missing, trials, run=how, progress=self.progress) if missing else {}
        for job in missing:
            scores = new[job.method.name]
            if scores.meta["complete"] and job.method.builtin:
                self.store.put_candidates(keys[job.method.name], scores)
        return {**found, **new}

    def _keys(
        self, names: Sequence[str], trials: TrialSet, run: RunOptions, own: Mapping[str, Any]
    ) -> dict[str, dict[str, Any]]:
        """What each result is a result of: everything that could change its numbers, except pooling."""
        model = self.model.describe()
        options = resolved_options(self.model, names, own, run)
        keys = {}
        for name in names:
            method = get_method(name)
            keys[name] = {
                "format": 3,
                "versions": package_versions(),
                "method": name,
                "model": model,
                "options": options[name],
                "trials": trials.hash if method.reads_trials else None,
            }
        return keys

    def evaluate(
        self,
        heads: Any,
        trials: Trial | Sequence[Trial],
        *,
        inverse: Any = (),
        by: Sequence[str] | str | None = None,
        calibration: CandidateScores | None = None,
        offset: str = "none",
        rotary: bool = True,
        batch_size: int = 8,
        seed: int = 0,
    ) -> Evaluation:
        """Logic heads on questions they were not chosen by, against the model's own output; see ``verdicts.evaluate``.

        Args:
            heads: A HeadSet, or anything one parses from.
            trials: Questions with candidates, such as ``logic.split("test")``.
            inverse: Those of the heads whose sign is turned.
            by: What to break accuracy down by; depth, distractors and rule where trials have them.
            calibration: QK-scores of the calibration questions, for an offset.
            offset: ``"median"`` takes off each head's standing preference, as ``calibration`` shows it.
            rotary: Queries and keys as multiplied.
            batch_size: Questions run together.
            seed: Seed of intervals and tests.

        Raises:
            InvalidInput: If an offset is asked for without calibration, or a trial is no question.
        """
        if offset != "none" and calibration is None:
            raise InvalidInput(
                f"offset={offset!r} is taken from calibration questions; give calibration=scores of them."
            )
        taken = None if calibration is None else offsets(calibration, offset)
        scores = self.score("qk", trials, rotary=rotary, batch_size=batch_size)
        return evaluate(scores, heads, by=by, inverse=inverse, offset=taken, calibration=calibration, seed=seed)

    def pruning_check(
        self,
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
        """The K best heads pruned against K random ones; more on it at ``mechheads.pruning.run_pruning``.

        Args:
            heads: Heads, best first, such as ``qk.select(20)``.
            trials: Questions that the heads were not chosen on, such as ``logic.split("test")``.
            k: How many heads to prune: whole numbers, or fractions of all heads, such as ``(0.1, 0.2)``.
            draws: Random head sets for each K; none holds one of the best ``max(k)``.
            seed: Seed of the draws.
            match_layers: Draw as many heads in each layer as the best K have there.
            intervention: Another one than ``mh.zero_ablation()``, without heads.
            batch_size: Questions run together.
            progress: Show a bar; None is as this analysis was made.

        Returns:
            Accuracy (``choice_accuracy``) and probability (``label_probability``) of the right candidate, 0 to 1, by
            trial, for the rankings ``"best"`` and ``"random"``.

        Raises:
            InvalidInput: If K, heads, trials or the intervention cannot be used; see ``run_pruning``.
        """
        return run_pruning(
            self.model, heads, trials, k=k, draws=draws, seed=seed, match_layers=match_layers,
            intervention=intervention, batch_size=batch_size,
            progress=self.progress if progress is None else progress,
        )  # fmt: skip

    def premise_ablation(
        self,
        trials: Trial | Sequence[Trial],
        *,
        heads: Any = None,
        inverse: Any = (),
        offset: np.ndarray | None = None,
        qk: CandidateScores | None = None,
        rounds: int = 3,
        arms: str | Sequence[str] | None = None,
        replace: str = "remove",
        seed: int = 0,
        batch_size: int = 8,
        rebuild: Callable[..., Trial] | None = None,
        locate: Callable[[Model, Trial], Sequence[Span]] | None = None,
        progress: bool | None = None,
    ) -> PremiseAblation:
        """Premises taken away, and whether verdicts move; more on it at ``mechheads.premises.run_premises``.

        Args:
            trials: Questions with ``meta["premises"]`` and, where known, ``meta["proof"]``.
            heads: QK heads, for the arm ``best heads`` and for QK verdicts.
            inverse: Heads among them whose sign is turned.
            offset: Calibration offset ``[candidate layer head]`` for the QK verdict, or None.
            qk: QK-scores of these trials; scored anew if None.
            rounds: Most premises removed from one question.
            arms: Of ``gold``, ``best heads``, ``model``, ``random``, ``random any``; None for all that can be run.
            replace: ``"remove"``, or ``"distractor"`` to put a sentence about other words in a premise's place.
            seed: Seed of every order and of the sentences put in.
            batch_size: Prompts run together.
            rebuild: Makes a question with some premises only, for trials not of our logic data sets.
            locate: Token spans of a trial's premises, likewise.
            progress: Show a bar; None is as this analysis was made.

        Returns:
            Every run; rates (0 to 1), movements of log-odds (nats) and cost ratios are derived from them.

        Raises:
            UnknownName: For an unknown arm or way to replace.
            InvalidInput: If a trial has no premises, or an option cannot be used; see ``run_premises``.
        """
        return run_premises(
            self.model, trials, heads=heads, inverse=inverse, offset=offset, qk=qk, rounds=rounds, arms=arms,
            replace=replace, seed=seed, batch_size=batch_size, rebuild=rebuild, locate=locate,
            progress=self.progress if progress is None else progress,
        )  # fmt: skip

    def projections(
        self, trials: Trial | Sequence[Trial], *, method: str = "locos", lens: Any = None, **options: Any
    ) -> dict[str, HeadScores]:
        """One method under every reading of the unembedding, on one capture.

        Args:
            trials: The trials.
            method: A method with the option ``unembed`` (``locos``, ``dla``).
            lens: A ``TunedLens`` or the path of one; without it ``tuned_lens`` is left out.
            **options: Further options of the method and of the run.

        Returns:
            HeadScores by ``raw``, ``centered``, ``normed`` (where the model's logit decomposes) and ``tuned_lens``.

        Raises:
            InvalidInput: If the method has no such option, or for an unknown one.
        """
        if "unembed" not in get_method(method).options:
            raise InvalidInput(f"the method {method!r} does not project on the unembedding; use 'locos' or 'dla'.")
        run, own = _split_options(options)
        check_options([method], own)
        checked = self.model.verification
        wanted = ["raw", "centered", *(["normed"] if checked is None or checked.normed_exact else [])]
        jobs = [Job(name, get_method(method), get_method(method).resolve({**own, "unembed": name})) for name in wanted]
        if lens is not None:
            tuned = live(self.model, get_method(method).resolve({**own, "unembed": "tuned_lens", "lens": lens}))
            jobs.append(Job("tuned_lens", get_method(method), tuned))
        return score_jobs(self.model, jobs, TrialSet.of(trials), run=run, progress=self.progress)

    def projection_agreement(
        self,
        trials: Trial | Sequence[Trial],
        *,
        method: str = "locos",
        lens: Any = None,
        k: Sequence[int] | int = (5, 10, 20),
        **options: Any,
    ) -> Agreement:
        """How far the readings of the unembedding agree on the heads: ``agreement`` of ``projections``.

        Args:
            trials: The trials.
            method: As for ``projections``, as are ``lens`` and the options.
            lens: Likewise.
            k: Sizes of the top sets.
            **options: Likewise.
        """
        return agreement(self.projections(trials, method=method, lens=lens, **options), k=k)

    def sweep(
        self,
        rankings: Any,
        *,
        k: Any,
        trials: TrialSet | Task | Sequence[Trial] | Mapping[str, TrialSet | Task],
        intervention: Intervention | Mapping[str, Intervention],
        controls: RandomHeads | Controls | None = None,
        sides: Sequence[str] = ("ablated",),
        seeds: Sequence[int] | None = None,
        max_new_tokens: int | Mapping[str, int] = 20,
        engine: LocalEngine | RayEngine | None = None,
        batch_size: int = 64,
        heads_per_block: int = 16,
    ) -> Any:
        """Ablate the top k heads of each ranking and see what the model still does.

        With a store, cells are kept in its folder ``cells``, and a sweep that was stopped goes on where it was.

        Args:
            rankings: HeadScores or head sets by name; or one HeadScores, or one head set (best first).
            k: Set sizes: counts, fractions of all heads, thresholds; the baseline is always run.
            trials: Trials or a ``Task``, or several by name (the first is the target, the rest are controls).
            intervention: ``mh.mean_ablation(...)``, ``mh.zero_ablation()``, ...; the sweep chooses the heads. Several
                by label give a ``SweepSet``.
            controls: ``mh.random_heads(...)``, ``mh.Controls(...)`` or None.
            sides: ``"ablated"``, ``"kept"`` (all heads but the set) or both.
            seeds: Seeds of resample ablations, each a draw; None: the seed that each was given.
            max_new_tokens: Longest answer, tokens; one number, or one for each task.
            engine: ``mh.LocalEngine(processes=4)`` or ``mh.RayEngine(...)``; None: this process.
            batch_size: Rows (a prompt under a head set) run together.
            heads_per_block: Most head sets that share a prompt's clean run.

        Returns:
            A ``SweepResult``: per-trial results of every cell, with means and intervals derived from them; or a
            ``SweepSet`` of them.
        """
        if isinstance(trials, Mapping):
            tasks = {name: t if isinstance(t, Task) else TrialSet.of(t) for name, t in trials.items()}
        else:
            one = trials if isinstance(trials, Task) else TrialSet.of(trials)
            tasks = {one.name: one}
        return run_sweep(
            self.model,
            rankings,
            k=k,
            tasks=tasks,
            intervention=intervention,
            controls=controls,
            sides=sides,
            seeds=seeds,
            max_new_tokens=max_new_tokens,
            store=None if self.store is None else self.store.path / "cells",
            engine=engine,
            batch_size=batch_size,
            heads_per_block=heads_per_block,
            progress=self.progress,
        )

    @contextmanager
    def intervene(self, *interventions: Intervention) -> Iterator[CircuitAnalysis]:
        """Interventions in force for a ``with`` block; see ``mechheads.interventions.apply``."""
        with apply(self.model, *interventions):
            yield self

    def generate(
        self,
        prompt: str | None = None,
        *,
        tokens: Sequence[int] | None = None,
        chat: bool = False,
        max_new_tokens: int = 50,
        stop_at_newline: bool = False,
    ) -> Generation:
        """Continue a prompt greedily, under whatever interventions are in force.

        Args:
            prompt: Text, or give ``tokens``.
            tokens: The prompt as token ids.
            chat: Put the text through the chat template.
            max_new_tokens: Longest continuation.
            stop_at_newline: End before a line break.

        Returns:
            New tokens alone, their text and log-probabilities (nats); the stop token is left out.
        """
        if (prompt is None) == (tokens is None):
            raise InvalidInput("give either a prompt as text or tokens=[...], one of the two.")
        ids = tokens if tokens is not None else self.model.encode(prompt or "", chat=chat).tokens
        return generate(self.model, [list(ids)], max_new_tokens=max_new_tokens, stop_at_newline=stop_at_newline)[0]


def _split_options(options: Mapping[str, Any]) -> tuple[RunOptions, dict[str, Any]]:
    """Options of the run, and those of the methods."""
    run_fields = {f.name for f in fields(RunOptions)}
    run = RunOptions(**{k: v for k, v in options.items() if k in run_fields})
    return run, {k: v for k, v in options.items() if k not in run_fields}


def _companions(names: Sequence[str], trials: TrialSet) -> list[str]:
    """Built-in methods that cost nothing more on the same capture, so that asking for them later is a look-up.

    Only beside a built-in method, and only those that every trial has the spans for.
    """
    if not all(get_method(name).builtin for name in names) or not any(get_method(name).gated for name in names):
        return []
    needs = {need for name in names for need in get_method(name).needs}
    return [
        name
        for name in method_names()
        if name not in names
        and get_method(name).builtin
        and get_method(name).kind == "capture"
        and not callable(get_method(name).rows)
        and set(get_method(name).needs) <= needs
        and all(set(get_method(name).spans) <= set(t.spans) for t in trials)
    ]
