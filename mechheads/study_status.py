"""The folder of a study's results: what is planned in it, and how far that is. No model and no torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mechheads.cell_store import CellStore
from mechheads.cells import CellFailure, CellKey
from mechheads.errors import OutputNotWritable, ResultFileError
from mechheads.provenance import canonical_json
from mechheads.result_files import write_atomically

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
KIND = "study plan"
# In the folder: scores of heads, cells, the sweep that is put together from them, and what is written about it.
SCORES, CELLS, SWEEP = "scores", "cells", "sweep"
PLAN, STUDY, SUMMARY, PAGE = "plan.json", "study.yaml", "summary.json", "study.html"


@dataclass(frozen=True)
class PlannedRun:
    """What one cell of the store is.

    Attributes:
        key: The cell.
        task: Name of the task.
        intervention: Label of what is done; ``"none"`` for the run without ablation.
    """

    key: CellKey
    task: str
    intervention: str


@dataclass(frozen=True)
class PlannedBlock:
    """Cells that run together.

    Attributes:
        name: Name of the block, by which it is claimed.
        runs: Its cells.
    """

    name: str
    runs: tuple[PlannedRun, ...]


@dataclass(frozen=True)
class StudyStatus:
    """How far a study is.

    Attributes:
        study: Its name.
        model: The model's name.
        folder: Where its results lie.
        runs: Every cell of its plan.
        done: Those that are stored.
        failures: Those that failed when they were last tried.
        working: Those not stored whose block a process works on now; None if that cannot be told, in a folder that
            cannot be written.
        finished: Whether sweep and page were written.
    """

    study: str
    model: str
    folder: Path
    runs: tuple[PlannedRun, ...]
    done: frozenset[CellKey]
    failures: tuple[CellFailure, ...]
    working: frozenset[CellKey] | None
    finished: bool

    @property
    def left(self) -> int:
        """Cells neither stored nor failed."""
        return len(self.runs) - len(self.done) - len(self.failures)

    def by_task(self) -> pd.DataFrame:
        """A row per task and intervention: ``task intervention cells done failed left working``."""
        import pandas as pd

        failed = {failure.key for failure in self.failures}
        working = self.working or frozenset()
        counts: dict[tuple[str, str], list[int]] = {}
        for run in self.runs:
            row = counts.setdefault((run.task, run.intervention), [0] * 5)
            state = (run.key in self.done, run.key in failed)
            for i, here in enumerate((True, *state, not any(state), run.key in working)):
                row[i] += here
        columns = ["task", "intervention", "cells", "done", "failed", "left", "working"]
        return pd.DataFrame([[*names, *row] for names, row in counts.items()], columns=columns)

    def named(self, key: CellKey) -> str:
        """A cell in words."""
        run = next(run for run in self.runs if run.key == key)
        heads = " ".join(key.heads[:4]) + (f" and {len(key.heads) - 4} more" if len(key.heads) > 4 else "")
        return f"{run.task}, {run.intervention} of {heads}" if heads else f"{run.task}, without ablation"

    def to_dict(self) -> dict[str, Any]:
        """All of it, JSON-ready."""
        return {
            "study": self.study,
            "model": self.model,
            "folder": str(self.folder),
            "cells": len(self.runs),
            "done": len(self.done),
            "failed": [{"cell": f.key.digest, "what": self.named(f.key), "error": str(f)} for f in self.failures],
            "left": self.left,
            "working": None if self.working is None else len(self.working),
            "finished": self.finished,
            "by_task": self.by_task().to_dict("records"),
        }


def write_plan(folder: Path, study: str, model: str, blocks: Sequence[PlannedBlock]) -> Path:
    """Write what is planned, before it is run, so that it can be told how far it is.

    Raises:
        OutputNotWritable: If the folder cannot be written.
    """
    content = {
        "format": FORMAT, "kind": KIND, "study": study, "model": model,
        "blocks": [
            {"name": block.name, "cells": [[run.key.describe(), run.task, run.intervention] for run in block.runs]}
            for block in blocks
        ],
    }  # fmt: skip
    text = canonical_json(content) + "\n"
    return write_atomically(folder / PLAN, lambda target: _write(target, text))


def study_status(folder: str | Path) -> StudyStatus:
    """How far the study of a folder is.

    Cells are read in full, so that a damaged one does not count as done. Nothing is computed and nothing changed.

    Raises:
        ResultFileError: If there is no plan in it, or it cannot be read.
    """
    folder = Path(folder)
    content, blocks = _read_plan(folder)
    store = CellStore(folder / CELLS, create=False)
    runs = tuple(run for block in blocks for run in block.runs)
    missing = frozenset(store.missing(run.key for run in runs))
    done = frozenset(run.key for run in runs) - missing
    failures = tuple(f for run in runs if run.key in missing and (f := store.failure(run.key)) is not None)
    return StudyStatus(
        content["study"], content["model"], folder, runs, done, failures, _working(store, blocks, missing),
        _finished(folder),
    )  # fmt: skip


def _working(
    store: CellStore, blocks: Sequence[PlannedBlock], missing: frozenset[CellKey]
) -> frozenset[CellKey] | None:
    """Missing cells of blocks that some process holds."""
    held: set[CellKey] = set()
    for block in blocks:
        open_cells = {run.key for run in block.runs} & missing
        if not open_cells:
            continue
        try:
            claim = store.claim(block.name)
        except OutputNotWritable:
            return None
        if claim is None:
            held |= open_cells
        else:
            claim.release()
    return frozenset(held)


def _finished(folder: Path) -> bool:
    """Whether the last run came to its end and no cell was left out."""
    try:
        return json.loads((folder / SUMMARY).read_text(encoding="utf-8"))["complete"] is True
    except (OSError, ValueError, KeyError, TypeError):
        return False  # not written yet


def _read_plan(folder: Path) -> tuple[dict[str, Any], list[PlannedBlock]]:
    path = folder / PLAN
    if not path.is_file():
        began = (folder / SCORES).is_dir()
        why = "its heads are still being ranked, or that was stopped" if began else "no sweep was begun there"
        raise ResultFileError(f"{folder} holds no {PLAN}: {why}. Run 'mechheads sweep'.")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if content["kind"] != KIND or int(content["format"]) > FORMAT:
            raise ValueError(f"it is of the kind {content['kind']!r}, format {content['format']}")
        blocks = [
            PlannedBlock(
                block["name"],
                tuple(PlannedRun(CellKey.from_description(key), task, what) for key, task, what in block["cells"]),
            )
            for block in content["blocks"]
        ]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ResultFileError(f"{path} cannot be read ({error!r}); run 'mechheads sweep' again to write it.") from error
    return content, blocks


def _write(path: Path, text: str) -> None:
    path.write_bytes(text.encode())
