"""QK-score as a full protocol: score, judge on held-out questions, doubt, intervene, and put it on one page."""

from __future__ import annotations

import itertools
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechheads.analysis import CircuitAnalysis
from mechheads.candidate_scores import CandidateScores
from mechheads.datasets import flipped, statement_only
from mechheads.demo import writable_folder, write_json
from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.premise_result import PremiseAblation
from mechheads.premises import run_premises
from mechheads.pruning import head_counts, run_pruning
from mechheads.qk_page import write_qk_page
from mechheads.qk_summary import summarise
from mechheads.scores import SweepResult
from mechheads.trials import Trial, TrialSet
from mechheads.verdicts import (
    Debias,
    DepthProfile,
    Evaluation,
    Judgement,
    LearningCurve,
    Transfer,
    debias,
    depth_profile,
    evaluate,
    learning_curve,
    transfer,
)
from mechheads.verdicts.decisions import OFFSETS
from mechheads.verdicts.transferring import MIX

# Below this many heads, shares of them are pruned instead of 10 and 20.
_SMALL = 100


@dataclass(frozen=True)
class QKOptions:
    """What a study of logic heads does.

    Attributes:
        k: Heads chosen on calibration questions, most accurate first.
        rotary: Queries and keys as the model multiplies them.
        offset: ``"none"``, or ``"median"`` to take off each head's standing preference for an answer.
        alpha: Level of the corrected tests.
        prune: Sizes of the head sets of the pruning check (whole numbers, or shares of all heads below 1); None: 10 and
            20, or a tenth and a fifth of the heads where there are fewer than 100; empty: no pruning check.
        draws: Random head sets of the pruning check.
        premise_questions: Held-out questions on which premises are taken away, 0 for none.
        rounds: Most premises taken from one question.
        debias: Run label-flipped twins and bare statements of the held-out questions.
        seed: Seed of draws, bootstraps and permutations.
        batch_size: Questions run together.
    """

    k: int = 5
    rotary: bool = True
    offset: str = "none"
    alpha: float = 0.05
    prune: tuple[int | float, ...] | None = None
    draws: int = 7
    premise_questions: int = 60
    rounds: int = 3
    debias: bool = True
    seed: int = 0
    batch_size: int = 16

    def __post_init__(self) -> None:
        if self.k < 1:
            raise InvalidInput(f"k is {self.k}; choose at least one head.")
        if self.offset not in OFFSETS:
            raise InvalidInput(f"offset is {self.offset!r}; it must be one of {', '.join(OFFSETS)}.")
        if self.premise_questions < 0:
            raise InvalidInput(f"premise_questions is {self.premise_questions}; it must be 0 or more.")


@dataclass(frozen=True, eq=False)
class SetResult:
    """All that was found on one data set.

    Attributes:
        name: Its name.
        trials: The questions.
        scores: QK-scores of all of them.
        judgement: Every head, chosen on calibration and reported on test.
        heads: The k heads chosen, those that answer with their sign turned included.
        inverse: Those of them whose sign is turned: significantly worse than chance on calibration.
        evaluation: The chosen heads against the model's own output.
        profile: Where in depth the heads lie.
        curve: What calibration size gives, or None.
        debias: What is left of their accuracy on flipped twins and bare statements, or None.
        pruning: The pruning check, or None.
        premises: The premise ablation, or None.
        notes: Why a part is missing.
    """

    name: str
    trials: TrialSet
    scores: CandidateScores
    judgement: Judgement
    heads: HeadSet
    inverse: HeadSet
    evaluation: Evaluation
    profile: DepthProfile
    curve: LearningCurve | None = None
    debias: Debias | None = None
    pruning: SweepResult | None = None
    premises: PremiseAblation | None = None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, eq=False)
class QKResult:
    """What ``run_qk`` found, and where it lies."""

    sets: dict[str, SetResult]
    transfer: Transfer | None
    summary: dict[str, Any]
    page: Path


def run_qk(
    ca: CircuitAnalysis,
    data: Mapping[str, TrialSet],
    out: str | Path,
    options: QKOptions | None = None,
    *,
    commands: Sequence[str] = (),
    say: Callable[[str], None] = lambda text: None,
) -> QKResult:
    """The whole protocol on one data set or several, and the page.

    Args:
        ca: The model, with a store if results are to be remembered.
        data: Logic trials by name, each with a calibration and a test split.
        out: Folder for ``qk.html``, ``qk.json``, and for each set ``NAME.heads.csv`` and ``NAME.qk.parquet``.
        options: What to do.
        commands: How to repeat it, for the page.
        say: Told what is going on.

    Raises:
        InvalidInput: For a set without both splits, or more heads asked for than there are, before anything is run.
        OutputNotWritable: If the folder cannot be written, likewise.
    """
    options = options or QKOptions()
    started = time.time()
    folder = writable_folder(out)
    _check(ca, data, options)
    sets = {name: _study(ca, name, trials, folder, options, say) for name, trials in data.items()}
    moved = None
    if len(sets) > 1:
        say("choosing heads on one data set and testing them on the others")
        moved = transfer({n: s.scores for n, s in sets.items()}, k=options.k, offset=options.offset, seed=options.seed)
    summary = summarise(ca.model.describe(), sets, moved, options)
    summary["seconds"] = round(time.time() - started, 1)
    write_json(folder / "qk.json", summary)
    page = write_qk_page(folder / "qk.html", sets, moved, summary, options, commands)
    return QKResult(sets, moved, summary, page)


def _check(ca: CircuitAnalysis, data: Mapping[str, TrialSet], options: QKOptions) -> None:
    """Every set must have both splits, and the model enough heads."""
    if not data:
        raise InvalidInput("there is no data; name at least one set of logic trials.")
    spec = ca.model.spec
    n_heads = spec.n_layers * spec.n_heads
    if options.k > n_heads:
        raise InvalidInput(f"k is {options.k}, but {spec.name} has {n_heads} heads; choose at most {n_heads}.")
    sizes = pruned_sizes(options, n_heads)
    if sizes and 2 * sizes[-1] > n_heads:
        raise InvalidInput(
            f"prune asks for {sizes[-1]} heads, but {spec.name} has {n_heads}, and as many random ones are drawn from "
            f"the others; prune at most {n_heads // 2}."
        )
    if len(data) > 1 and MIX in data:
        raise InvalidInput(f"a data set is named {MIX!r}, the name of all sets mixed; give it another name.")
    for name, trials in data.items():
        if not {"calibration", "test"} <= set(trials.splits):
            raise InvalidInput(
                f"the trials of {name!r} have the splits {trials.splits}; heads are chosen on 'calibration' and "
                "reported on 'test'. Give the loader calibration=0.5, or mark trials with TrialSet.with_split."
            )


def _study(
    ca: CircuitAnalysis, name: str, trials: TrialSet, folder: Path, options: QKOptions, say: Callable[[str], None]
) -> SetResult:
    """One data set."""
    say(f"{name}: scoring {len(trials)} questions, one prefill each")
    how: dict[str, Any] = {"rotary": options.rotary, "batch_size": options.batch_size}
    scores = ca.score("qk", trials, **how)
    scores.save(folder / f"{name}.qk.parquet")
    judged = scores.judge(offset=options.offset, seed=options.seed)
    judged.frame(options.alpha).to_csv(folder / f"{name}.heads.csv", index=False)
    heads, inverse = chosen_heads(judged, options)
    test = scores.split("test")
    found = evaluate(
        test, heads, inverse=inverse, offset=judged.offset, calibration=scores.split("calibration"), seed=options.seed
    )
    notes: list[str] = []
    curve = _curve(scores, options, notes)
    doubted = None
    if options.debias:
        doubted = _doubt(ca, trials.split("test"), test, judged, heads, inverse, how, notes, say)
    pruned = _prune(ca, scores, trials.split("test"), options, notes, say)
    taken = _take_premises(ca, heads, inverse, trials.split("test"), judged, options, notes, say)
    return SetResult(
        name, trials, scores, judged, heads, inverse, found, depth_profile(judged, alpha=options.alpha), curve,
        doubted, pruned, taken, tuple(notes),
    )  # fmt: skip


def chosen_heads(judged: Judgement, options: QKOptions) -> tuple[HeadSet, HeadSet]:
    """The k most accurate heads of the calibration questions, and those of them that are inverse.

    A head significantly below chance there may be among the k, with its sign turned, if it is then more accurate.
    """
    accuracy, chance = judged.accuracy("calibration"), judged.chance("calibration")
    wrong = judged.inverse(options.alpha, on="calibration")
    rank: list[tuple[float, int, int]] = []
    for layer, row in enumerate(accuracy):
        for head, value in enumerate(row):
            if value == value:
                turned = 2 * chance - value if (layer, head) in wrong else value
                rank.append((-turned, layer, head))
    best = HeadSet([(layer, head) for _, layer, head in sorted(rank)[: options.k]])
    return best, HeadSet([h for h in best if h in wrong])


def _curve(scores: CandidateScores, options: QKOptions, notes: list[str]) -> LearningCurve | None:
    """The learning curve, where every candidate is right in some calibration question."""
    try:
        return learning_curve(scores, k=1, offset=options.offset, seed=options.seed)
    except InvalidInput as error:
        notes.append(f"No learning curve: {error}")
        return None


def _doubt(
    ca: CircuitAnalysis, trials: TrialSet, scores: CandidateScores, judged: Judgement, heads: HeadSet, inverse: HeadSet,
    how: Mapping[str, Any], notes: list[str], say: Callable[[str], None],
) -> Debias | None:  # fmt: skip
    """Flipped twins and bare statements of the held-out questions."""
    say("asking the label-flipped twins, and the statements without any premise")
    looked_at = heads | judged.significant()
    try:
        twins, bare = flipped(ca.model, trials), statement_only(ca.model, trials)
    except InvalidInput as error:  # questions without an opposite, or trials that are not of our logic data sets
        notes.append(f"No label-flipped twins: {error}")
        return None
    turned = HeadSet([h for h in looked_at if h in inverse])
    return debias(
        scores, ca.score("qk", twins, **how), ca.score("qk", bare, **how), heads=looked_at, inverse=turned,
        offset=judged.offset,
    )  # fmt: skip


def pruned_sizes(options: QKOptions, n_heads: int) -> list[int]:
    """Sizes of the head sets that are pruned, rising; empty if none are."""
    wanted = options.prune
    if wanted is None:
        wanted = (10, 20) if n_heads >= _SMALL else (0.1, 0.2)
    return head_counts(wanted, n_heads) if wanted else []


def _prune(
    ca: CircuitAnalysis, scores: CandidateScores, trials: TrialSet, options: QKOptions, notes: list[str],
    say: Callable[[str], None],
) -> SweepResult | None:  # fmt: skip
    """The K best heads of the calibration questions against K random ones, on held-out questions."""
    wanted = pruned_sizes(options, ca.model.spec.n_layers * ca.model.spec.n_heads)
    if not wanted:
        notes.append("No pruning check was asked for.")
        return None
    say("pruning the best heads against random ones")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what speaks against the calibration stands in the judgement
        ranking = scores.select(max(wanted), offset=options.offset)
    return run_pruning(
        ca.model, ranking, trials, k=wanted, draws=options.draws, seed=options.seed, batch_size=options.batch_size,
        progress=ca.progress,
    )  # fmt: skip


def _take_premises(
    ca: CircuitAnalysis, heads: HeadSet, inverse: HeadSet, trials: TrialSet, judged: Judgement, options: QKOptions,
    notes: list[str], say: Callable[[str], None],
) -> PremiseAblation | None:  # fmt: skip
    """Premises taken from some held-out questions whose proof is known, equally often for every label."""
    able = [t for t in trials if t.meta.get("premises") and t.meta.get("proof")]
    some = _even(able, options.premise_questions)
    if not some:
        notes.append(
            "No premises were taken away: "
            + ("none was asked for." if not options.premise_questions else "no held-out question has a known proof.")
        )
        return None
    say(f"taking premises away from {len(some)} questions")
    return run_premises(
        ca.model, TrialSet(some, name=trials.name, options=trials.options), heads=heads, inverse=inverse,
        offset=judged.offset, rounds=options.rounds, seed=options.seed, batch_size=options.batch_size,
        progress=ca.progress,
    )  # fmt: skip


def _even(trials: Sequence[Trial], n: int) -> list[Trial]:
    """At most n of the trials, in turn from each label and depth, in order."""
    kinds: dict[Any, list[Trial]] = {}
    for trial in trials:
        kinds.setdefault((trial.label, trial.meta.get("depth")), []).append(trial)
    turns = [t for turn in itertools.zip_longest(*kinds.values()) for t in turn if t is not None]
    return turns[:n]
