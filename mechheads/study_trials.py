"""The trials of a study's tasks, and what a study may name: data sets and scoring methods, with their options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any

from mechheads import datasets, nano
from mechheads.errors import InvalidInput, UnknownName
from mechheads.methods.registry import get_method, method_names
from mechheads.runner import RunOptions
from mechheads.study import Reference, Study, Vocabulary
from mechheads.trials import TrialSet

NANO = "nano."
# Public functions that make trials out of other trials or questions, which a file cannot name.
_NOT_NAMED = ("build_trials", "flipped", "statement_only")
# Fields of a task itself, or given by the study.
_OWN = ("model", "seed", "split", "calibration")
# What scoring takes besides a method's own options.
_SCORING = tuple(f.name for f in fields(RunOptions))


def dataset_functions() -> dict[str, Callable[..., TrialSet]]:
    """Every function that makes trials, by the name a study gives it; those of nano have ``nano.`` before it."""
    found = {}
    for prefix, module in (("", datasets), (NANO, nano)):
        for name in module.__all__:
            function = getattr(module, name)
            if inspect.isfunction(function) and name not in _NOT_NAMED:
                taken = inspect.signature(function)
                if (
                    str(taken.return_annotation) == "TrialSet"
                    and "model" in taken.parameters
                    and "task" not in taken.parameters
                ):
                    found[prefix + name] = function
    return found


def vocabulary() -> Vocabulary:
    """Data sets and methods that can be named, methods of the user's own included, with their options."""
    options, required = {}, {}
    for name, function in dataset_functions().items():
        given = inspect.signature(function).parameters
        own = {k: p for k, p in given.items() if k not in _OWN}
        options[name] = tuple(own)
        required[name] = tuple(k for k, p in own.items() if p.default is p.empty)
    methods = {name: (*get_method(name).options, *_SCORING) for name in method_names()}
    return Vocabulary(options, methods, required)


def make_trials(study: Study, task: str, model: Any) -> TrialSet:
    """All trials of a task, tested or not.

    Args:
        study: The study.
        task: Name of the task.
        model: The model, or anything with its tokenizer.

    Raises:
        UnknownName: If there is no such task or data set.
        InvalidInput: As the data set does; or if the task has calibration trials and the data set marks none.
    """
    if task not in study.tasks:
        raise UnknownName("task of the study", task, study.tasks)
    part = study.tasks[task]
    if part.file is not None:
        return TrialSet.load(part.file)
    functions = dataset_functions()
    name = str(part.dataset)
    if name not in functions:
        raise UnknownName("data set", name, functions)
    taken = inspect.signature(functions[name]).parameters
    options: dict[str, Any] = {key: _source(value) for key, value in part.options.items()}
    if "seed" in taken:
        options["seed"] = study.task_seed(task)
    share = next((key for key in ("split", "calibration") if key in taken), None)
    if share is not None:
        # A data set that wants a number marks no calibration trials at 0.
        options[share] = (
            0.0 if part.calibration is None and "None" not in str(taken[share].annotation) else part.calibration
        )
    elif part.calibration is not None:
        raise InvalidInput(f"the task {task!r} asks for calibration trials, but {name} marks none; leave it out.")
    return functions[name](model=model, **options)


def pick(made: dict[str, TrialSet], reference: str) -> TrialSet:
    """The trials that a reference such as ``"needles.calibration"`` names.

    Args:
        made: Trials of every task.
        reference: The reference.

    Raises:
        UnknownName: If there is no such task, or the task has no such split.
    """
    asked = Reference.parse(reference)
    if asked.task not in made:
        raise UnknownName("task of the study", asked.task, made)
    trials = made[asked.task]
    return trials if asked.split is None else trials.split(asked.split)


def measured_trials(study: Study, made: dict[str, TrialSet]) -> dict[str, TrialSet]:
    """The trials of each task that are tested.

    Raises:
        UnknownName: If a task's trials, from a file, have no split ``test``; say ``tested: all`` there.
    """
    return {
        name: made[name].split("test") if part.tested == "test" else made[name] for name, part in study.tasks.items()
    }


def _source(value: Any) -> Any:
    """``{hub: repo, split: ...}`` as a data set of the hub; anything else as it is."""
    if isinstance(value, Mapping) and "hub" in value:
        return datasets.hub(value["hub"], **{key: one for key, one in value.items() if key != "hub"})
    return value
