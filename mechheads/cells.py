"""Cells of a sweep: what each is a result of, what it measured, and what went wrong where it failed."""

from __future__ import annotations

import traceback as tracebacks
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.provenance import content_hash

FORMAT = 1
UNTOUCHED = "none"  # the intervention of a cell without heads
RESERVED = ("trial_id", "said")  # columns of a cell's file, so no names of metrics


@dataclass(frozen=True)
class CellKey:
    """What a cell is a result of: the same key, the same numbers.

    Attributes:
        model: Content hash of what the model is, its weights included.
        task: Hash of the task: its trials and how they are measured.
        heads: Labels of the heads acted on, by layer and head, whatever the order they were given in.
        intervention: Content hash of what is done to them, their names left out; ``"none"`` where there are no heads.

    Raises:
        InvalidInput: If a part is empty or no text, a head is named twice or cannot be read, or the intervention is
            ``"none"`` with heads or something else without (that would give one cell two names).
    """

    model: str
    task: str
    heads: tuple[str, ...]
    intervention: str

    def __post_init__(self) -> None:
        for name in ("model", "task", "intervention"):
            value = getattr(self, name)
            if not isinstance(value, str) or not value:
                raise InvalidInput(f"{name} of a cell is {value!r}; give its hash, a text that is not empty.")
        if isinstance(self.heads, str):
            raise InvalidInput(f"heads of a cell are {self.heads!r}; give a tuple of labels, such as ('L9H6',).")
        object.__setattr__(self, "heads", tuple(str(head) for head in sorted(HeadSet(self.heads))))
        if (self.intervention == UNTOUCHED) != (not self.heads):
            what = f"{len(self.heads)} heads" if self.heads else "no heads"
            raise InvalidInput(
                f"a cell has {what} and the intervention {self.intervention!r}; the intervention is {UNTOUCHED!r} "
                "where there are no heads, and only there."
            )

    @property
    def digest(self) -> str:
        """Content hash of all of it and of the format's number, 16 hex digits; names the cell's file."""
        return content_hash({"format": FORMAT, **self.describe()})

    def describe(self) -> dict[str, Any]:
        """The key as plain JSON."""
        return {"model": self.model, "task": self.task, "heads": list(self.heads), "intervention": self.intervention}

    @classmethod
    def from_description(cls, found: Mapping[str, Any]) -> CellKey:
        """The key that ``describe`` wrote.

        Raises:
            InvalidInput: If a part is missing or does not fit.
        """
        try:
            return cls(found["model"], found["task"], tuple(found["heads"]), found["intervention"])
        except (KeyError, TypeError) as error:
            raise InvalidInput(f"{found!r} is no description of a cell: {error!r}.") from error

    def __str__(self) -> str:
        heads = " ".join(self.heads[:3]) + (f" and {len(self.heads) - 3} more" if len(self.heads) > 3 else "")
        return f"cell {self.digest} (task {self.task}, {self.intervention} of {heads or 'no heads'})"


@dataclass(frozen=True, eq=False)
class CellResult:
    """What one cell measured, trial by trial.

    The arrays are copied and cannot be written to. A minus zero becomes zero and every NaN the same NaN, so that
    equal results are equal bytes; nothing is rounded here.

    Attributes:
        trial_ids: The trials, each named once.
        values: Metric -> ``[trial]`` float64, in the metric's unit; NaN where it is undefined for a trial.
        said: What the model answered, one text a trial; empty where it answers nothing.

    Raises:
        InvalidInput: If there is no trial or no metric, a trial stands twice, a length does not fit, a value is
            infinite or no number, or a metric has no name or that of a column (``trial_id``, ``said``).
    """

    trial_ids: tuple[str, ...]
    values: Mapping[str, np.ndarray]
    said: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("trial_ids", "said"):
            entries = getattr(self, name)
            if isinstance(entries, str) or not all(isinstance(entry, str) for entry in entries):
                raise InvalidInput(f"{name} of a cell are {entries!r:.80}; give a tuple of texts, one for each trial.")
            object.__setattr__(self, name, tuple(entries))
        n = len(self.trial_ids)
        if n == 0 or not self.values:
            raise InvalidInput(f"a cell has {n} trials and {len(self.values)} metrics; it needs one of each at least.")
        if len(set(self.trial_ids)) < n:
            twice = next(t for i, t in enumerate(self.trial_ids) if t in self.trial_ids[:i])
            raise InvalidInput(f"trial {twice!r} stands twice in a cell; give every trial a name of its own.")
        if self.said and len(self.said) != n:
            raise InvalidInput(f"a cell has {n} trials and {len(self.said)} answers; give one a trial, or none at all.")
        values = {name: _checked(name, self.values[name], self.trial_ids) for name in sorted(self.values)}
        object.__setattr__(self, "values", MappingProxyType(values))

    def __reduce__(self) -> Any:
        # A read-only mapping cannot be pickled; the checks run again where it is read.
        return CellResult, (self.trial_ids, dict(self.values), self.said)

    @property
    def undefined(self) -> bool:
        """Whether no metric has a value for any trial: a cell that measured nothing."""
        return all(np.isnan(values).all() for values in self.values.values())

    def equals(self, other: CellResult) -> bool:
        """Whether trials, answers and every value are the same, NaN being equal to NaN."""
        return (
            (self.trial_ids, self.said, list(self.values)) == (other.trial_ids, other.said, list(other.values))
        ) and all(np.array_equal(self.values[name], other.values[name], equal_nan=True) for name in self.values)


def _checked(name: str, values: Any, trial_ids: tuple[str, ...]) -> np.ndarray:
    """A metric's values as a fresh float64 vector that nobody can change."""
    if not isinstance(name, str) or not name or name in RESERVED:
        raise InvalidInput(f"a metric is named {name!r}; give it a text, but not {' or '.join(map(repr, RESERVED))}.")
    try:
        vector = np.array(values, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"metric {name!r} holds {values!r:.60}, which is no list of numbers.") from error
    if vector.shape != (len(trial_ids),):
        raise InvalidInput(
            f"metric {name!r} has the shape {vector.shape}, but the cell has {len(trial_ids)} trials; "
            "give one value a trial, NaN where it is undefined."
        )
    if np.isinf(vector).any():
        trial = trial_ids[int(np.flatnonzero(np.isinf(vector))[0])]
        raise InvalidInput(f"metric {name!r} is infinite for trial {trial!r}; use NaN where it is undefined.")
    vector[np.isnan(vector)] = np.nan
    vector += 0.0  # -0.0 + 0.0 is 0.0
    vector.flags.writeable = False
    return vector


@dataclass(frozen=True)
class CellFailure:
    """Why a cell has no result.

    Attributes:
        key: The cell.
        error: Name of the error's type.
        message: What it said.
        traceback: Where it was raised, as text; empty where there is none (a worker that died).
    """

    key: CellKey
    error: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, key: CellKey, error: BaseException) -> CellFailure:
        """The record of an error that was raised."""
        text = "".join(tracebacks.format_exception(type(error), error, error.__traceback__))
        return cls(key, type(error).__name__, str(error), text)

    def __str__(self) -> str:
        return f"{self.error}: {self.message}" if self.message else self.error
