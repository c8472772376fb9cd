"""The worker of a sweep: cells of (model, task, head set, intervention), a block of them at a time.

The same block gives the same numbers wherever it runs: its batches are made from it alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from mechheads.cells import UNTOUCHED, CellKey, CellResult
from mechheads.engines import Block
from mechheads.engines.blocks import Keep
from mechheads.errors import InvalidInput
from mechheads.head_set_runs import Ask, Program, RunLimits, Told, run_head_sets, unique
from mechheads.interventions import Intervention
from mechheads.interventions.applying import prepared_on
from mechheads.model import Model, load
from mechheads.provenance import content_hash, package_versions
from mechheads.sweep_plan import SweepPlan, Work
from mechheads.tasks import Outcome, Task, continuation, scored_positions
from mechheads.trials import Trial

# Rounding of what is stored: far below what is promised (1e-4), far above what batches and machines differ in.
DECIMALS = 6


@dataclass(frozen=True)
class Works:
    """The payload of a block: what each of its cells runs."""

    works: tuple[Work, ...]

    def only(self, i: int) -> Works:
        """That of one cell."""
        return Works(self.works[i : i + 1])


@dataclass(frozen=True, eq=False)
class CellRecipe:
    """How to make a worker: by name, so that it can be made on another machine, or with a model at hand.

    Attributes:
        model: A name, hub id or folder that ``mh.load`` takes there too; or a loaded ``Model``, in this process only.
        tasks: Tasks by name.
        interventions: What can be done, by label, without heads.
        options: Options of ``mh.load`` (``dtype``, ``device``, ``device_map``, ...).
        limits: How much is run at once.
        identity: What the model must be (``model_identity``): a worker that loads other weights, another tokenizer or
            other settings refuses to work. None: not checked.
    """

    model: Any
    tasks: Mapping[str, Task]
    interventions: Mapping[str, Intervention]
    options: Mapping[str, Any] = field(default_factory=dict)
    limits: RunLimits = field(default_factory=RunLimits)
    identity: str | None = None

    def __getstate__(self) -> dict[str, Any]:
        if isinstance(self.model, Model):
            raise InvalidInput(
                f"the model {self.model.spec.name!r} is loaded in this process and cannot be sent to another; give its "
                "name or folder instead (mh.CircuitAnalysis('smollm2')), or run in this process: LocalEngine()."
            )
        return dict(self.__dict__)

    def build(self) -> CellWorker:
        """The worker, its model loaded and its means taken when they are first wanted.

        Raises:
            InvalidInput: If what is loaded here is not the model the cells are of.
        """
        model = self.model if isinstance(self.model, Model) else load(self.model, **self.options)
        if self.identity is not None and model_identity(model.describe()) != self.identity:
            raise InvalidInput(
                f"{model.spec.name!r} as a worker loads it has other weights, another tokenizer or other settings than "
                "the model the sweep was planned on, so its cells would be another model's. Give every worker the same "
                "files; a model changed after loading, or one with a tokenizer of its own, can be swept in this "
                "process."
            )
        return CellWorker(model, self)


class CellWorker:
    """Runs blocks of cells on one model.

    Args:
        model: The model.
        recipe: Tasks and interventions.
    """

    def __init__(self, model: Model, recipe: CellRecipe):
        self.model, self.recipe = model, recipe
        self._prepared: dict[tuple[str, int], Intervention] = {}

    def run(self, block: Block, keep: Keep) -> None:
        """Compute the cells of a block, task by task; see ``engines.Worker``."""
        works: tuple[Work, ...] = block.payload.works
        for name in dict.fromkeys(work.task for work in works):
            mine = [(cell, work) for cell, work in zip(block.cells, works, strict=True) if work.task == name]
            for (cell, _), result in zip(mine, self.results(name, [work for _, work in mine]), strict=True):
                keep(cell, result)

    def results(self, name: str, works: Sequence[Work]) -> list[CellResult]:
        """The results of some works on one task."""
        task = self.recipe.tasks[name]
        bases = list(dict.fromkeys((w.intervention, w.seed) for w in works if w.intervention != UNTOUCHED))
        programs: list[Program] = [
            ((bases.index((w.intervention, w.seed)), w.heads),) if w.intervention != UNTOUCHED else () for w in works
        ]
        asks, at = unique([ask_of(self.model, task, trial) for trial in task.trials])
        told = run_head_sets(
            self.model,
            asks,
            [self.intervention(*base) for base in bases],
            programs,
            max_new_tokens=task.max_new_tokens,
            stop_at_newline=task.stop_at_newline,
            limits=self.recipe.limits,
        )
        return [result_of(self.model, task, [told[i][w] for i in at]) for w in range(len(works))]

    def intervention(self, label: str, seed: int) -> Intervention:
        """An intervention with its means, taken once."""
        if (label, seed) not in self._prepared:
            # A cell's key knows the reference, not values somebody took elsewhere: they are taken here.
            given = replace(self.recipe.interventions[label], values=None)
            same = next((one for (other, _), one in self._prepared.items() if other == label), None)
            prepared = same or prepared_on(self.model, given)
            self._prepared[label, seed] = replace(prepared, seed=seed)
        return self._prepared[label, seed]


def ask_of(model: Model, task: Task, trial: Trial) -> Ask:
    """What a task wants of one trial's prompt.

    Raises:
        InvalidInput: If the prompt with its longest continuation does not fit into the model's context.
    """
    model.check_tokens(trial.tokens, what=f"trial {trial.id!r} of task {task.name!r}")
    needs = task.needs
    answer: tuple[int, ...] = ()
    foil = None
    if "answer" in needs and trial.answer is not None:
        answer = continuation(model, trial, trial.answer)
        contrast = task.contrast(model, trial)
        foil = None if contrast is None else contrast[1]
    candidates = ()
    if "candidates" in needs:
        given = trial.meta.get("candidate_tokens")
        texts = [continuation(model, trial, text) for text in trial.candidates] if given is None else given
        candidates = tuple(tuple(one) for one in texts)
    longest = max(map(len, (answer, *candidates)), default=0)
    if len(trial.tokens) + longest - 1 > model.spec.n_ctx:
        raise InvalidInput(
            f"trial {trial.id!r} of task {task.name!r} has {len(trial.tokens)} tokens and a continuation of {longest}, "
            f"but {model.spec.name!r} takes at most {model.spec.n_ctx}; make the context shorter."
        )
    scored = scored_positions(trial) if "text" in needs else ()
    return Ask(tuple(trial.tokens), "generate" in needs, answer, foil, candidates, scored)


def result_of(model: Model, task: Task, told: Sequence[Told]) -> CellResult:
    """What a cell measured, from what its rows said, trial by trial."""
    judged, said = [], []
    for trial, one in zip(task.trials, told, strict=True):
        outcome = outcome_of(model, task, one)
        judged.append(task.judge(trial, outcome))
        said.append(outcome.text)
    values = {
        metric: np.round([each[metric] for each in judged], DECIMALS)
        for metric in task.measured
    }  # fmt: skip
    ids = tuple(trial.id for trial in task.trials)
    return CellResult(ids, values, tuple(said) if "generate" in task.needs else ())


def outcome_of(model: Model, task: Task, told: Told) -> Outcome:
    """What one row said, as a task judges it."""
    needs, tokens = task.needs, tuple(told.decoded.tokens)
    return Outcome(
        tokens=tokens,
        text=model.decode(tokens) if tokens else "",
        answer_logprobs=told.answer_logprobs if "answer" in needs else None,
        logit_diff=told.logit_diff,
        candidate_logprobs=told.candidate_logprobs if "candidates" in needs else None,
        token_logprobs=told.token_logprobs if "text" in needs else None,
    )


@dataclass(frozen=True, eq=False)
class CellNames:
    """The keys of a sweep's cells.

    Attributes:
        model: Content hash of the model, and of the packages that compute.
        tasks: Hash of each task.
        interventions: Content hash of each intervention by label and seed.
    """

    model: str
    tasks: Mapping[str, str]
    interventions: Mapping[tuple[str, int], str]

    @classmethod
    def of(
        cls,
        described: Mapping[str, Any],
        tasks: Mapping[str, Task],
        interventions: Mapping[str, Intervention],
        seeds: Mapping[str, Sequence[int]],
    ) -> CellNames:
        """From what the model is (``Model.describe()``), the tasks, and the interventions with their seeds."""
        return cls(
            model_identity(described),
            {name: task.hash for name, task in tasks.items()},
            {
                (label, seed): content_hash(_without_names(replace(intervention, seed=seed).describe()))
                for label, intervention in interventions.items()
                for seed in seeds[label]
            },
        )

    def key(self, work: Work) -> CellKey:
        """The key of one work."""
        untouched = work.intervention == UNTOUCHED
        what = UNTOUCHED if untouched else self.interventions[work.intervention, work.seed]
        return CellKey(self.model, self.tasks[work.task], tuple(work.heads.labels), what)


def model_identity(described: Mapping[str, Any]) -> str:
    """Content hash of what a model is (``Model.describe()``) and of the packages that compute.

    A folder may be moved, so the name it was loaded by does not count; weights, settings and tokenizer do.
    """
    what = {k: v for k, v in described.items() if k not in ("name", "revision")}
    return content_hash({"model": what, "versions": package_versions()})


def _without_names(described: dict[str, Any]) -> dict[str, Any]:
    """What an intervention is, without the heads and the reference's name."""
    out = {k: v for k, v in described.items() if k != "heads"}
    if "reference" in out:
        out["reference"] = {k: v for k, v in out["reference"].items() if k != "name"}
    return out


def blocks_of(made: SweepPlan, names: CellNames, *, heads_per_block: int = 16) -> list[Block]:
    """The blocks of a plan, as engines take them: each key once, although two works may have the same one."""
    out, seen = [], set()
    for works in made.blocks(heads_per_block=heads_per_block):
        fresh = {key: work for work in works if (key := names.key(work)) not in seen}
        seen |= set(fresh)
        if fresh:
            cells = tuple(fresh)
            name = content_hash([cell.digest for cell in cells])
            trials = tuple(made.tasks[work.task] for work in fresh.values())
            out.append(Block(name, cells, Works(tuple(fresh.values())), trials))
    return out
