"""Candidate scores: one number per trial, candidate answer and head, with the model's own verdict beside it.

What a head answers, how often it is right and how sure that is are derived (``mechheads.verdicts``), never stored.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput, ResultFileError, UnknownName
from mechheads.provenance import json_ready
from mechheads.result_files import from_column, read_table, to_column, write_table

if TYPE_CHECKING:
    import pandas as pd

    from mechheads.heads import HeadSet
    from mechheads.verdicts import Judgement

# What two results must share before their trials may stand in one.
_SAME_META = ("model", "method", "options", "ablated", "interventions")


@dataclass(frozen=True, eq=False, repr=False)
class CandidateScores:
    """Scores of every head for every candidate answer of every trial.

    Attributes:
        method: Name of the method that made them (``"qk"``).
        values: ``[trial candidate layer head]`` float32, higher means the head speaks for the candidate; NaN where a
            trial has no such candidate, or a head no score.
        baseline: ``[trial candidate]`` float64, the model's own log-probability of each candidate after the prompt
            (nats, summed over the candidate's tokens); NaN where a trial has no such candidate.
        labels: ``[trial]`` int64, index of the right candidate.
        candidates: The candidates' texts of each trial; kept as a tuple of tuples.
        trial_ids: One id per trial, all different; kept as a tuple.
        unit: Unit of the values.
        records: One JSON-ready dict per trial (``split``, ``group``, ``rule``, ``depth``, ``distractors``,
            ``candidate_tokens``: the number of tokens of each), kept as a tuple; empty dicts if not given.
        meta: Provenance, JSON-ready.
    """

    values: np.ndarray
    baseline: np.ndarray
    labels: np.ndarray
    candidates: Sequence[Sequence[str]]
    trial_ids: Sequence[str]
    method: str = "qk"
    unit: str = ""
    records: Sequence[Mapping[str, Any]] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = np.array(self.values, dtype=np.float32)
        if values.ndim != 4 or 0 in values.shape[1:]:
            raise InvalidInput(
                f"values has shape {values.shape}; expected (trial, candidate, layer, head), such as (400, 2, 30, 9)."
            )
        n, width = values.shape[:2]
        baseline, labels = np.array(self.baseline, dtype=np.float64), np.array(self.labels)
        ids, records = tuple(self.trial_ids), tuple(self.records) or ({},) * n
        texts = tuple(tuple(each) for each in self.candidates)
        if baseline.shape != (n, width):
            raise InvalidInput(
                f"baseline has shape {baseline.shape}; expected that of values' first axes, {(n, width)}."
            )
        for name, size in (("labels", len(labels)), ("candidates", len(texts)), ("trial_ids", len(ids)),
                           ("records", len(records))):  # fmt: skip
            if size != n:
                raise InvalidInput(f"{name} has {size} entries; expected one per trial, {n}.")
        if len(set(ids)) != n:
            twice = next(i for k, i in enumerate(ids) if i in ids[:k])
            raise InvalidInput(f"trial id {twice!r} stands more than once; ids must be unique.")
        if labels.size and not np.issubdtype(labels.dtype, np.integer):
            raise InvalidInput(
                f"labels has dtype {labels.dtype}; expected whole numbers, the right candidates' indices."
            )
        _check_candidates(ids, texts, labels, baseline, values)
        ready = tuple(json_ready(r, where=f"record of trial {i!r}") for i, r in zip(ids, records, strict=True))
        fixed = {
            "values": values, "baseline": baseline, "labels": labels.astype(np.int64), "candidates": texts,
            "trial_ids": ids, "records": ready, "meta": json_ready(self.meta, where="meta"),
        }  # fmt: skip
        for name, value in fixed.items():
            if isinstance(value, np.ndarray):
                value.setflags(write=False)
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        counts = sorted({len(c) for c in self.candidates})
        shown = f"{counts[0]}" if len(counts) == 1 else f"{counts[0]} to {counts[-1]}" if counts else "no"
        splits = ", ".join(f"{len(self.split(s))} {s}" for s in self.splits)
        return (
            f"CandidateScores({self.method!r}, {len(self)} trials{f' ({splits})' if splits else ''} with {shown} "
            f"candidates, {self.n_layers} layers x {self.n_heads} heads)"
        )

    def __len__(self) -> int:
        return len(self.trial_ids)

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return self.values.shape[2]

    @property
    def n_heads(self) -> int:
        """Query heads a layer."""
        return self.values.shape[3]

    @property
    def n_candidates(self) -> np.ndarray:
        """``[trial]`` how many candidates each trial has."""
        return np.array([len(c) for c in self.candidates], dtype=np.int64)

    @property
    def groups(self) -> tuple[str, ...]:
        """``[trial]`` name of the group a trial belongs to (the same world or context); its own id if it has none."""
        return tuple(str(r.get("group") or i) for i, r in zip(self.trial_ids, self.records, strict=True))

    @property
    def splits(self) -> list[str]:
        """Names of the splits present, sorted."""
        return sorted({r["split"] for r in self.records if r.get("split") is not None})

    def column(self, name: str) -> list[Any]:
        """What the records say under a name, one entry a trial; None where a record has no such entry."""
        return [r.get(name) for r in self.records]

    def split(self, name: str) -> CandidateScores:
        """The scores on the trials of one split.

        Raises:
            UnknownName: If no trial belongs to it.
        """
        if name not in self.splits:
            raise UnknownName(f"split of these {self.method!r} scores", name, self.splits)
        return self.take([i for i, r in enumerate(self.records) if r.get("split") == name])

    def take(self, index: Any) -> CandidateScores:
        """The scores on some trials, by their places.

        Args:
            index: Places, or a boolean mask ``[trial]``.
        """
        index = np.asarray(index)
        index = np.flatnonzero(index) if index.dtype == bool else index.astype(np.intp)
        return replace(
            self,
            values=self.values[index],
            baseline=self.baseline[index],
            labels=self.labels[index],
            candidates=[self.candidates[i] for i in index],
            trial_ids=[self.trial_ids[i] for i in index],
            records=[self.records[i] for i in index],
        )

    def merge(self, other: CandidateScores) -> CandidateScores:
        """The trials of both, this one's first; both must come from the same model, method and options.

        Raises:
            InvalidInput: Naming what differs, or a trial that stands in both.
        """
        for name, a, b in [
            ("method", self.method, other.method),
            ("unit", self.unit, other.unit),
            ("shape (layer, head)", self.values.shape[2:], other.values.shape[2:]),
            *((f"meta[{key!r}]", self.meta.get(key), other.meta.get(key)) for key in _SAME_META),
        ]:
            if a != b:
                raise InvalidInput(f"cannot merge scores that differ in {name}: {str(a)[:80]} and {str(b)[:80]}.")
        both = set(self.trial_ids) & set(other.trial_ids)
        if both:
            raise InvalidInput(f"trial {min(both)!r} stands in both results ({len(both)} such); merge distinct trials.")
        width = max(self.values.shape[1], other.values.shape[1])
        return replace(
            self,
            values=np.concatenate([_widened(self.values, width), _widened(other.values, width)]),
            baseline=np.concatenate([_widened(self.baseline, width), _widened(other.baseline, width)]),
            labels=np.concatenate([self.labels, other.labels]),
            candidates=[*self.candidates, *other.candidates],
            trial_ids=[*self.trial_ids, *other.trial_ids],
            records=[*self.records, *other.records],
        )

    def select(self, k: int = 1, *, split: str | None = "calibration", **options: Any) -> HeadSet:
        """The k heads most accurate on a split, best first; see ``mechheads.verdicts.select``."""
        from mechheads.verdicts import select

        return select(self if split is None else self.split(split), k, **options)

    def judge(self, **options: Any) -> Judgement:
        """Every head judged: on the splits ``calibration`` and ``test``, or on all trials if there are no splits.

        See ``mechheads.verdicts.judge`` for the options.

        Raises:
            UnknownName: If there are splits, but none called calibration.
        """
        from mechheads.verdicts import judge

        if not self.splits:
            return judge(self, **options)
        return judge(self.split("calibration"), self.split("test") if "test" in self.splits else None, **options)

    def to_frame(self) -> pd.DataFrame:
        """One row per trial, candidate and head: ``trial_id candidate text right layer head score baseline``."""
        import pandas as pd

        n, width, layers, heads = self.values.shape
        at = np.stack(np.meshgrid(*map(np.arange, (n, width, layers, heads)), indexing="ij"), -1).reshape(-1, 4)
        at = at[np.repeat(np.arange(width)[None] < self.n_candidates[:, None], layers * heads)]
        trial, candidate = at[:, 0], at[:, 1]
        return pd.DataFrame(
            {
                "trial_id": np.array(self.trial_ids, dtype=object)[trial],
                "candidate": candidate,
                "text": [self.candidates[t][c] for t, c in zip(trial, candidate, strict=True)],
                "right": self.labels[trial] == candidate,
                "layer": at[:, 2],
                "head": at[:, 3],
                "score": self.values[tuple(at.T)],
                "baseline": self.baseline[trial, candidate],
            }
        )

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file, a row per trial, with the provenance inside; ``.parquet`` is added if missing.

        Raises:
            OutputNotWritable: If the folder cannot be written.
        """
        import pyarrow as pa

        columns: dict[str, Any] = {
            "trial_id": pa.array(self.trial_ids, pa.string()),
            "label": pa.array(self.labels),
            "candidates": pa.array([list(c) for c in self.candidates], pa.list_(pa.string())),
            "record": pa.array([json.dumps(r) for r in self.records], pa.string()),
            "values": to_column(self.values),
            "baseline": to_column(self.baseline),
        }
        header = {"shape": list(self.values.shape), "method": self.method, "unit": self.unit, "meta": self.meta}
        return write_table(path, pa.table(columns), kind="candidate_scores", header=header)

    @classmethod
    def load(cls, path: str | Path) -> CandidateScores:
        """Read what ``save`` wrote, bit for bit.

        Raises:
            ResultFileError: If the file is missing, damaged, foreign, inconsistent or newer than this mechheads reads.
        """
        table, header = read_table(path, kind="candidate_scores")
        try:
            shape = tuple(header["shape"])
            if table.num_rows != shape[0]:
                raise ValueError(f"it has {table.num_rows} rows but its header says {shape[0]} trials")
            return cls(
                values=from_column(table, "values", shape),
                baseline=from_column(table, "baseline", shape[:2], dtype=np.float64),
                labels=np.array(table["label"].to_pylist(), dtype=np.int64),
                candidates=table["candidates"].to_pylist(),
                trial_ids=table["trial_id"].to_pylist(),
                method=header["method"],
                unit=header["unit"],
                records=[json.loads(r) for r in table["record"].to_pylist()],
                meta=header["meta"],
            )
        except (KeyError, TypeError, ValueError, IndexError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ResultFileError(f"{path} is not a consistent candidate score file: {reason}") from error


def _check_candidates(
    ids: Sequence[str], texts: Sequence[Sequence[str]], labels: np.ndarray, baseline: np.ndarray, values: np.ndarray
) -> None:
    """Refuse labels that name no candidate, and numbers where a trial has no candidate or none where it has one."""
    for i, (trial, mine) in enumerate(zip(ids, texts, strict=True)):
        if not 2 <= len(mine) <= values.shape[1]:
            raise InvalidInput(
                f"trial {trial!r} has {len(mine)} candidates; expected 2 to {values.shape[1]}, values' second axis."
            )
        if not 0 <= labels[i] < len(mine):
            raise InvalidInput(f"trial {trial!r} has the label {labels[i]}; expected 0 to {len(mine) - 1}.")
        if not np.isfinite(baseline[i, : len(mine)]).all():
            raise InvalidInput(f"the baseline of trial {trial!r} is {baseline[i]}; expected a number per candidate.")
        if np.isinf(values[i]).any() or np.isfinite(values[i, len(mine) :]).any():
            raise InvalidInput(f"trial {trial!r} has infinite scores, or scores of candidates that it does not have.")


def _widened(array: np.ndarray, width: int) -> np.ndarray:
    """More candidates, all absent."""
    more = np.full((array.shape[0], width - array.shape[1], *array.shape[2:]), np.nan, dtype=array.dtype)
    return np.concatenate([array, more], axis=1)
