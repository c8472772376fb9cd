"""A whole study: its fields, what cannot stand together between them, and the study with every default written out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import yaml
from pydantic import BeforeValidator

from mechheads.study_fields import (
    BASELINE,
    BOTTOM,
    NAME,
    NEAREST_ZERO,
    RANDOM,
    SPLITS,
    BatchPart,
    ControlsPart,
    EnginePart,
    Int,
    InterventionPart,
    ModelPart,
    Part,
    RankingPart,
    SizePart,
    TaskPart,
    Text,
    alone,
    as_size,
    described,
    several,
)
from mechheads.study_nodes import Problem, near


def _listed(value: Any) -> Any:
    """One intervention as a list of one."""
    return (value,) if isinstance(value, (str, dict)) else value


class Study(Part):
    """A sweep, as a file says it; see docs/studies.md and ``load_study``."""

    name: Text = described(..., "What it is called.", "text", shown="the file's name")
    model: Annotated[ModelPart, alone("name")] = described(..., "The model.", "a name, or a mapping")
    store: Text = described(
        ..., "Folder of its results, from the working folder.", "a path", shown="runs/NAME", min_length=1
    )
    seed: Int = described(0, "Seed of trials and draws that have none of their own.", "a whole number from 0", ge=0)
    tasks: dict[Text, TaskPart] = described(..., "Tasks by name.", "a mapping of tasks")
    rankings: dict[Text, RankingPart] = described(..., "Rankings by name.", "a mapping of rankings")
    k: Annotated[tuple[Annotated[SizePart, BeforeValidator(as_size)], ...], BeforeValidator(several)] = described(
        ..., "How many heads.", "a list of counts (10), fractions (0.1) and {threshold: x}", min_length=1
    )
    k_beyond: Literal["refuse", "drop"] = described(
        "refuse", "What to do with a k for which there are too few heads, tested or random: refuse the study, or leave "
        "that k out and say so.", "one of refuse, drop", allowed=("refuse", "drop"),
    )  # fmt: skip
    interventions: Annotated[
        tuple[Annotated[InterventionPart, alone("kind")], ...], BeforeValidator(_listed)
    ] = described(..., "What is done to the heads.", "a list of interventions", min_length=1)  # fmt: skip
    sides: Annotated[tuple[Literal["ablated", "kept"], ...], BeforeValidator(several)] = described(
        ("ablated",), "Ablate the set (is it needed?), or all but the set (does it suffice?).",
        "a list of ablated, kept", allowed=("ablated", "kept"), min_length=1,
    )  # fmt: skip
    controls: ControlsPart = described(ControlsPart(), "Control head sets.", "a mapping")
    engine: Annotated[EnginePart, alone("kind")] = described(
        EnginePart(), "What runs the cells.", "local, ray, or a mapping"
    )
    batch: BatchPart = described(BatchPart(), "How much runs together.", "a mapping")
    heads_per_block: Int = described(
        16, "Most head sets that share a prompt's clean run.", "a whole number from 1", ge=1
    )

    @property
    def targets(self) -> list[str]:
        """Tasks the heads should matter for."""
        return [name for name, task in self.tasks.items() if task.role == "target"]

    def task_seed(self, task: str) -> int:
        """Seed of a task's trials."""
        own = self.tasks[task].seed
        return self.seed if own is None else own

    def trials_of(self, ranking: str) -> str:
        """The reference to the trials a method's ranking is scored on."""
        given = self.rankings[ranking].trials
        if given is not None:
            return given
        return next(f"{name}.calibration" for name in self.targets if _has_calibration(self.tasks[name]))

    def resolved(self) -> str:
        """The study as YAML with every default filled in; ``load_study`` reads the same study from it."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False, allow_unicode=True, width=100)

    def to_dict(self) -> dict[str, Any]:
        """Every field with its value, JSON-ready, defaults that depend on others filled in."""
        data = self.model_dump(mode="json")
        data["k"] = [size.short() for size in self.k]
        for name, task in data["tasks"].items():
            task["seed"] = self.task_seed(name)
        for name, ranking in data["rankings"].items():
            if self.rankings[name].method is not None:
                ranking["trials"] = self.trials_of(name)
            if self.rankings[name].heads is not None:
                ranking["heads"] = " ".join(self.rankings[name].head_set.labels)
        for plain, intervention in zip(data["interventions"], self.interventions, strict=True):
            plain["name"] = intervention.label
        if self.controls.random is None:
            data["controls"]["random"] = False
        elif self.controls.random.seed is None:
            data["controls"]["random"]["seed"] = self.seed
        return data

    def problems(self) -> Iterator[Problem]:
        """What cannot stand together."""
        if not NAME.fullmatch(self.name):
            yield Problem(("name",), f"name is {self.name!r}; use letters, digits, spaces, - _ + and brackets.")
        yield from self._task_problems()
        yield from self._ranking_problems()
        yield from self._size_problems()
        yield from self._intervention_problems()
        yield from self._control_problems()
        if len(set(self.sides)) < len(self.sides):
            yield Problem(("sides",), f"sides is {list(self.sides)}; name each once.")

    def _task_problems(self) -> Iterator[Problem]:
        if not self.tasks:
            yield Problem(
                ("tasks",), "tasks is empty; a study needs at least one, such as needles: {dataset: needles}."
            )
        elif not self.targets:
            yield Problem(
                ("tasks",), "every task is a control; leave role: out of the one the heads should matter for."
            )
        for name in self.tasks:
            if not NAME.fullmatch(name):
                yield Problem(
                    ("tasks", name), f"a task is called {name!r}; use letters, digits, spaces, - _ + and brackets."
                )

    def _ranking_problems(self) -> Iterator[Problem]:
        if not self.rankings:
            yield Problem(
                ("rankings",), "rankings is empty; a study needs at least one, such as locos: {method: locos}."
            )
        taken = {BASELINE: "the run without ablation", RANDOM: "the random control"}
        for name in self.rankings:
            taken |= {form.format(name): f"a control of {name!r}" for form in (BOTTOM, NEAREST_ZERO)}
        for name, ranking in self.rankings.items():
            at = ("rankings", name)
            if not NAME.fullmatch(name):
                yield Problem(at, f"a ranking is called {name!r}; use letters, digits, spaces, - _ + and brackets.")
            if name in taken:
                yield Problem(at, f"a ranking cannot be called {name!r}; that names {taken[name]}.")
            if ranking.method is None:
                continue
            if ranking.trials is None:
                if self.targets and not any(_has_calibration(self.tasks[t]) for t in self.targets):
                    yield Problem(
                        at, f"rankings.{name} has no trials to be scored on, and no target has calibration trials; "
                        "give the target calibration: 0.5."
                    )  # fmt: skip
                continue
            yield from self._reference_problems((*at, "trials"), ranking.trials, ranks=True)

    def _size_problems(self) -> Iterator[Problem]:
        if not any(size.count != 0 for size in self.k):
            yield Problem(("k",), "k holds 0 alone, the run without ablation; give numbers of heads, such as [5, 10].")
        for i, size in enumerate(self.k):
            if size.threshold is None:
                continue
            for name in size.rankings or self.rankings:
                if name not in self.rankings:
                    yield Problem(("k", i, "rankings"), self._unknown_ranking(f"k[{i}].rankings names", name))
                elif self.rankings[name].scored is False:
                    yield Problem(
                        ("k", i), f"k[{i}] is a threshold, and the ranking {name!r} is a list without scores; name the "
                        "rankings it is for: {threshold: x, rankings: [...]}."
                    )  # fmt: skip

    def _intervention_problems(self) -> Iterator[Problem]:
        seen: set[str] = set()
        for i, intervention in enumerate(self.interventions):
            if intervention.label in seen:
                text = (
                    f"another intervention is called {intervention.label!r} already; give this one a name: of its own."
                )
                yield Problem(("interventions", i), text)
            seen.add(intervention.label)
            if intervention.reference is not None:
                path = ("interventions", i, "reference")
                yield from self._reference_problems(path, intervention.reference, ranks=False)

    def _control_problems(self) -> Iterator[Problem]:
        random = self.controls.random
        for name in ("bottom", "nearest_zero"):
            value = getattr(self.controls, name)
            scored = [r for r, one in self.rankings.items() if one.scored is not False]
            if name == "nearest_zero":  # an accuracy of zero is not that of a head that does nothing
                scored = [r for r in scored if self.rankings[r].method != "qk"]
            if value is True and not scored:
                yield Problem(
                    ("controls", name), f"controls.{name} is true, but no ranking has scores for it; leave it out."
                )
            for ranking in value if isinstance(value, tuple) else ():
                if ranking not in self.rankings:
                    yield Problem(("controls", name), self._unknown_ranking(f"controls.{name} names", ranking))
                elif ranking not in scored:
                    yield Problem(("controls", name), f"controls.{name} names {ranking!r}, which has no scores for it.")
        for ranking in () if random is None else random.tested or ():
            if ranking not in self.rankings:
                path = ("controls", "random", "tested")
                yield Problem(path, self._unknown_ranking("controls.random.tested names", ranking))
        if random is not None and random.at is not None and all(size.count is not None for size in self.k):
            counts = sorted({size.count for size in self.k if size.count})
            stray = sorted(set(random.at) - set(counts))
            if stray:
                yield Problem(
                    ("controls", "random", "at"), f"controls.random.at has {stray[0]}, which is not in k: {counts}."
                )

    def _unknown_ranking(self, what: str, name: str) -> str:
        return f"{what} {name!r}, which is no ranking.{near(name, self.rankings)} Rankings: {', '.join(self.rankings)}."

    def _reference_problems(self, path: tuple[str | int, ...], reference: str, *, ranks: bool) -> Iterator[Problem]:
        """What is wrong with a reference to trials; heads must not be ranked on what they are tested on."""
        what = f"{path[-1]} is {reference!r}"
        name, dot, split = reference.partition(".")
        if name not in self.tasks:
            yield Problem(path, f"{what}, and there is no task {name!r}.{near(name, self.tasks)} "
                                f"Tasks: {', '.join(self.tasks)}.")  # fmt: skip
            return
        task = self.tasks[name]
        if dot and split not in SPLITS:
            yield Problem(
                path, f"{what}; after the dot comes calibration or test.{near(split, SPLITS)} Without it, all trials "
                "are meant."
            )  # fmt: skip
        elif dot and not _has_calibration(task):
            yield Problem(
                path, f"{what}, but the task {name!r} has no splits: its calibration: is null; give it a share, "
                "such as 0.5."
            )  # fmt: skip
        elif ranks and not (split == "calibration" and task.tested == "test"):
            yield Problem(
                path, f"{what}, but heads are tested on some of these trials; rank them on {name}.calibration, and "
                "leave the task's tested: at 'test'."
            )  # fmt: skip


def _has_calibration(task: TaskPart) -> bool:
    """Whether a task has calibration trials, as far as the study can tell (a file may have them)."""
    return task.calibration is not None or task.file is not None
