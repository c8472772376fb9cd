"""Which heads retrieve in this model: every detector, how far they agree, and which of them finds heads that matter."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mechheads.agreement import (
    Agreement,
    Consensus,
    Dissociation,
    TrialsNeeded,
    agreement,
    consensus,
    dissociation,
    trials_needed,
)
from mechheads.analysis import CircuitAnalysis
from mechheads.compare_page import write_page, write_tables
from mechheads.compare_summary import CONTROL, summarise
from mechheads.datasets import needles, recall
from mechheads.datasets.needle_trials import CONTROL_KINDS
from mechheads.demo import writable_folder, write_json
from mechheads.errors import InvalidInput
from mechheads.interventions import mean_ablation
from mechheads.methods.registry import get_method
from mechheads.scores import HeadScores, SweepResult
from mechheads.sweep_controls import random_heads
from mechheads.trials import TrialSet, is_trial_file

# Every published detector that is cheap; cri costs dozens of captures a trial, so it is asked for by name.
METHODS = (
    "locos",
    "attention_spatial",
    "dla",
    "wu",
    "contrastive",
    "headkv",
    "qrhead",
    "attribution_patching",
    "induction",
    "previous_token",
    "duplicate_token",
    "ov_copying",
)
MAX_NEW_TOKENS = 12
MAX_CONTROL_TOKENS = 6
RELIABLE = 0.9
CALIBRATION = 0.6  # scoring a trial is cheaper than testing head sets on it


@dataclass(frozen=True)
class CompareOptions:
    """What is compared on what.

    Attributes:
        tasks: Kinds of needle trials, or files that ``TrialSet.save`` wrote.
        methods: Detectors.
        n: Trials of each task; 60% calibrate (choose heads), the rest test. A file's trials are taken as they are.
        context_length: Tokens of each prompt.
        k: Heads taken out for each detector; None: 2% of the model's heads, at least 5.
        draws: Random head sets.
        n_control: Trials of the control task.
        seed: Seed of trials and draws.
        chat: Ask through the chat template.
        batch_size: Trials run together.
    """

    tasks: tuple[str, ...] = ("facts", "landmarks")
    methods: tuple[str, ...] = METHODS
    n: int = 50
    context_length: int = 160
    k: int | None = None
    draws: int = 7
    n_control: int = 20
    seed: int = 0
    chat: bool = False
    batch_size: int = 16

    def __post_init__(self) -> None:
        if not self.tasks:
            raise InvalidInput("name at least one task, such as 'facts'.")
        if len(self.methods) < 2:
            raise InvalidInput(f"{len(self.methods)} method(s) given; a comparison needs at least two.")
        for kind, names in (("task", [Path(t).stem for t in self.tasks]), ("method", self.methods)):
            twice = [name for name, n in Counter(names).items() if n > 1]
            if twice:
                raise InvalidInput(f"the {kind} {twice[0]!r} is named twice; name each once.")
        for name in self.tasks:
            if Path(name).stem == CONTROL or name in CONTROL_KINDS:
                raise InvalidInput(
                    f"the task {name!r} cannot be compared on: {CONTROL!r} is the name of the control, and control "
                    "kinds have no needle. Name a task with a needle (passkey, facts, landmarks), or another file name."
                )


@dataclass(frozen=True, eq=False)
class TaskResult:
    """All that was measured on one task.

    Attributes:
        task: Its name.
        n_calibration: Trials that choose the heads.
        lengths: Shortest and longest prompt, tokens.
        scores: Results of every method, by name, on the calibration trials.
        ranked: The methods that have a ranking.
        unranked: Why the others have none, by method.
        agreement: Pairwise agreement of the ranked, or None if fewer than two are.
        consensus: Heads that several detectors share, or None likewise.
        reliability: How sure each ranking is and how many trials it needs, None where it cannot be told.
        sweep: The ablations on the test trials and the control, or None if nothing could be ranked.
        ties: Heads in a method's top k that tie with heads outside it, by method: which of them were taken is chance.
    """

    task: str
    n_calibration: int
    lengths: tuple[int, int]
    scores: dict[str, HeadScores]
    ranked: tuple[str, ...]
    unranked: dict[str, str]
    agreement: Agreement | None
    consensus: Consensus | None
    reliability: dict[str, TrialsNeeded | None]
    sweep: SweepResult | None
    ties: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class CompareResult:
    """What ``run_compare`` found, and where it lies."""

    tasks: dict[str, TaskResult]
    dissociation: Dissociation | None
    summary: dict[str, Any]
    page: Path


def run_compare(
    model: Any, out: str | Path, options: CompareOptions, *, say: Callable[[str], None], progress: bool | None = None
) -> CompareResult:
    """Score with every detector, compare, ablate each one's best heads, and write the page and the tables.

    Args:
        model: Anything ``mh.load`` takes.
        out: Folder for the results.
        options: What to compare.
        say: Told what is going on.
        progress: Show progress bars (None: only on a terminal).

    Raises:
        UnknownName: For an unknown method before anything is computed, for an unknown task before anything is scored.
        InvalidInput: For trials or sizes that cannot be used, likewise.
        OutputNotWritable: If the folder cannot be written, before anything is computed.
    """
    started = time.time()
    folder = writable_folder(out)
    for name in options.methods:
        get_method(name)
    say(f"loading {str(model)!r} and checking that its parts add up")
    ca = CircuitAnalysis(model, store=folder / "store", progress=progress)
    spec = ca.model.spec
    k = _size(options, spec.n_layers * spec.n_heads)
    sources = {Path(name).stem: _trials(ca, name, options) for name in options.tasks}
    control = recall(ca.model, n=options.n_control, seed=options.seed, split=None, chat=options.chat)
    results: dict[str, TaskResult] = {}
    for task, trials in sources.items():
        results[task] = _run_task(ca, folder, task, trials, control, options, k, say)
    apart = _dissociation(results, k)
    summary = summarise(ca.model.describe(), results, apart, options, k)
    summary["seconds"] = round(time.time() - started, 1)
    write_json(folder / "compare.json", summary)
    write_tables(folder, results, summary)
    page = write_page(folder / "compare.html", results, apart, summary, options)
    return CompareResult(results, apart, summary, page)


def _size(options: CompareOptions, n_heads: int) -> int:
    """How many heads to take out; random sets of as many must be left beside every detector's best."""
    most = n_heads // (len(options.methods) + 1)
    if options.k is None:
        return max(1, min(max(5, round(0.02 * n_heads)), most))
    if not 1 <= options.k <= most:
        raise InvalidInput(
            f"k is {options.k}; with {len(options.methods)} detectors and {n_heads} heads it must be from 1 to "
            f"{most}, so that as many random heads are left that no detector names. Choose a smaller k or fewer "
            "methods."
        )
    return options.k


def _trials(ca: CircuitAnalysis, name: str, options: CompareOptions) -> TrialSet:
    """Trials of a task, with both splits and an answer each."""
    if is_trial_file(name):
        trials = TrialSet.load(name)
        if not {"calibration", "test"} <= set(trials.splits):
            raise InvalidInput(
                f"the trials of {name} have the splits {trials.splits}; a comparison chooses heads on 'calibration' "
                "and tests them on 'test'. Mark them with TrialSet.with_split."
            )
        for trial in trials:
            if trial.answer is None:
                raise InvalidInput(
                    f"trial {trial.id!r} of {name} has no gold answer, so what is lost without its heads cannot be "
                    "told; give every trial an answer."
                )
        return trials
    return needles(
        name,
        ca.model,
        n=options.n,
        context_length=options.context_length,
        seed=options.seed,
        chat=options.chat,
        split=CALIBRATION,
    )


def _run_task(
    ca: CircuitAnalysis,
    folder: Path,
    task: str,
    trials: TrialSet,
    control: TrialSet,
    options: CompareOptions,
    k: int,
    say: Callable[[str], None],
) -> TaskResult:
    """Score, compare and ablate on one task."""
    calibration, test = trials.split("calibration"), trials.split("test")
    say(f"{task}: {len(options.methods)} detectors on {len(calibration)} calibration trials")
    longest = max([MAX_NEW_TOKENS, *_answer_lengths(ca, trials)])
    unfit = _unfit(options.methods, trials)
    asked = [name for name in options.methods if name not in unfit]
    scores = ca.score(asked, calibration, max_new_tokens=longest, batch_size=options.batch_size) if asked else {}
    whole = len(scores) == len(asked) and all(one.meta["complete"] for one in scores.values())
    for name, one in scores.items():
        one.save(folder / f"{task}-{name}{'' if whole else '-partial'}.parquet")
    if not whole:
        raise KeyboardInterrupt  # a comparison on part of the trials would claim what it did not measure
    unranked = unfit | {name: why for name, one in scores.items() if (why := _no_ranking(one)) is not None}
    ranked = tuple(name for name in scores if name not in unranked)
    usable = {name: scores[name] for name in ranked}
    sweep = None
    if usable:
        say(f"{task}: mean-ablating the {k} best heads of each on {len(test)} test trials")
        sweep = ca.sweep(
            usable,
            k=(0, k),
            trials={task: test, CONTROL: control},
            intervention=mean_ablation(site="z", reference=calibration),
            controls=random_heads(draws=options.draws, seed=options.seed, at=(k,)),
            max_new_tokens={task: longest, CONTROL: MAX_CONTROL_TOKENS},
            batch_size=options.batch_size,
        )
        sweep.save(folder / f"{task}-ablation.parquet")
        if not sweep.meta["complete"]:
            raise KeyboardInterrupt
    half = ca.model.spec.n_layers * ca.model.spec.n_heads // 2
    ks = tuple(sorted({k, *(x for x in (10, 20) if x <= half)}))
    pairs = len(usable) > 1
    return TaskResult(
        task=task,
        n_calibration=len(calibration),
        lengths=(min(len(t.tokens) for t in trials), max(len(t.tokens) for t in trials)),
        scores=scores,
        ranked=ranked,
        unranked=unranked,
        agreement=agreement(usable, k=ks, statistics=("spearman", "overlap")) if pairs else None,
        consensus=consensus(usable, k=k) if pairs else None,
        reliability={name: _reliability(one) for name, one in usable.items()},
        sweep=sweep,
        ties={name: n for name, one in usable.items() if (n := tied(one, k))},
    )


def _answer_lengths(ca: CircuitAnalysis, trials: TrialSet) -> list[int]:
    """Tokens to allow for each answer: its own, and some around it."""
    return [len(ca.model.tokenizer(t.answer)["input_ids"]) + 8 for t in trials if t.answer is not None]


def _unfit(methods: Sequence[str], trials: TrialSet) -> dict[str, str]:
    """Methods that need a span which some trial lacks, and which."""
    out = {}
    for name in methods:
        for span in get_method(name).spans:
            lacking = next((t.id for t in trials if span not in t.spans), None)
            if lacking is not None and get_method(name).reads_trials:
                out[name] = f"it reads the span {span!r}, which trial {lacking!r} lacks"
    return out


def _no_ranking(scores: HeadScores) -> str | None:
    """Why a method ranks nothing, or None."""
    if not scores.n_kept:
        reasons = Counter(str(r.get("reason")) for r in scores.records)
        return f"no trial kept ({', '.join(f'{n} x {why}' for why, n in reasons.most_common(3))})"
    mean = scores.mean()
    if not np.isfinite(mean).any():
        return "no head has a score"
    if np.nanmin(mean) == np.nanmax(mean):
        return f"every head scores {np.nanmax(mean):.3g}"
    return None


def tied(scores: HeadScores, k: int) -> int:
    """How many of the top k heads tie with heads outside it."""
    mean = scores.mean()
    falling = np.sort(mean[np.isfinite(mean)])[::-1]
    if k >= len(falling):
        return 0
    last = falling[k - 1]
    return int((falling[:k] == last).sum()) if falling[k] == last else 0


def _reliability(scores: HeadScores) -> TrialsNeeded | None:
    """How sure the whole ranking is; None with fewer than four kept trials, or none at all to halve."""
    if scores.trial_ids == ("weights",) or scores.n_kept < 4:
        return None
    return trials_needed(scores, target=RELIABLE, n_splits=100)


def _dissociation(results: Mapping[str, TaskResult], k: int) -> Dissociation | None:
    """LOCOS (or else the first common detector) on the first task against the second."""
    if len(results) < 2:
        return None
    a, b = list(results.values())[:2]
    common = [m for m in a.ranked if m in b.ranked and get_method(m).reads_trials]
    if not common:
        return None
    name = "locos" if "locos" in common else common[0]
    if min(a.scores[name].n_kept, b.scores[name].n_kept) < 2:
        return None
    names = (f"{name} on {a.task}", f"{name} on {b.task}")
    return dissociation(a.scores[name], b.scores[name], names=names, k=k)
