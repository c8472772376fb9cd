"""Sweeps that belong together, one for each thing that was done to the heads: zero, mean, resample, complement."""

from __future__ import annotations

import hashlib
import json
import re
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput, OutputNotWritable, ResultFileError, UnknownName
from mechheads.provenance import canonical_json, json_ready
from mechheads.result_files import write_atomically, write_table
from mechheads.sweep_result import SweepResult

if TYPE_CHECKING:
    import pandas as pd

FORMAT = 1
INDEX = "sweep_set.json"
KIND = "sweep set"
# Between the label of an intervention and the word for its complement: "mean" and "mean, kept".
KEPT_SUFFIX = ", kept"
FORMATS = ("parquet", "csv", "json")


@dataclass(frozen=True, eq=False, repr=False)
class SweepSet:
    """Results of one study by what was done, in order: ``{"mean": ..., "zero": ..., "mean, kept": ...}``.

    ``sweep_set["mean"]`` is a ``SweepResult``; ``for label in sweep_set`` goes through the labels, ``items()`` through
    both. What has the label of another and ``", kept"`` after it is that one's complement: all heads but the set were
    ablated, and k counts the heads kept.

    Attributes:
        results: Label to result.
        meta: Provenance of the whole, JSON-ready.
    """

    results: Mapping[str, SweepResult]
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not isinstance(self.results, Mapping) or not self.results:
            got = "no result" if isinstance(self.results, Mapping) else f"a {type(self.results).__name__}"
            raise InvalidInput(f"a SweepSet was given {got}; give a mapping such as {{'mean': sweep, 'zero': other}}.")
        for label, result in self.results.items():
            if not isinstance(label, str) or not label.strip():
                raise InvalidInput(f"{label!r} labels a sweep; a label is text such as 'mean'.")
            if not isinstance(result, SweepResult):
                raise InvalidInput(f"{label!r} is a {type(result).__name__}; expected a SweepResult.")
            if label.endswith(KEPT_SUFFIX) != result.kept:
                side = "kept" if result.kept else "ablated"
                raise InvalidInput(
                    f"{label!r} labels a sweep in which k counts the heads {side}; labels of complements, and only "
                    f"these, end in {KEPT_SUFFIX!r}."
                )
        object.__setattr__(self, "results", MappingProxyType(dict(self.results)))
        object.__setattr__(self, "meta", json_ready(self.meta, where="meta"))

    def __repr__(self) -> str:
        first = next(iter(self.results.values()))
        return f"SweepSet({', '.join(map(repr, self.results))}; rankings={first.rankings}, tasks={first.tasks})"

    def __getitem__(self, label: str) -> SweepResult:
        if label not in self.results:
            raise UnknownName("sweep of the set", label, self.results)
        return self.results[label]

    def __iter__(self) -> Iterator[str]:
        return iter(self.results)

    def __len__(self) -> int:
        return len(self.results)

    def __contains__(self, label: object) -> bool:
        return label in self.results

    def __reduce__(self) -> tuple[Any, ...]:
        return SweepSet, (dict(self.results), self.meta)

    def items(self) -> list[tuple[str, SweepResult]]:
        """Labels with their results, in order."""
        return list(self.results.items())

    @property
    def labels(self) -> list[str]:
        """All labels, in order."""
        return list(self.results)

    @property
    def ablated(self) -> list[str]:
        """Labels of the sweeps in which k counts the heads ablated."""
        return [label for label, result in self.results.items() if not result.kept]

    def complement(self, label: str) -> str | None:
        """Label of the sweep that ablates all heads but the sets of ``label``; None if there is none.

        Raises:
            UnknownName: If the label is not in the set.
        """
        if label not in self.results:
            raise UnknownName("sweep of the set", label, self.results)
        other = f"{label}{KEPT_SUFFIX}"
        return other if other in self.results else None

    def to_frame(self) -> pd.DataFrame:
        """All rows of all results, the column ``intervention`` (the label) first."""
        import pandas as pd

        parts = []
        for label, result in self.results.items():
            part = result.frame.copy()
            part.insert(0, "intervention", label)
            parts.append(part)
        return pd.concat(parts, ignore_index=True)

    def save(self, folder: str | Path) -> Path:
        """Write one Parquet file a label and, last of all, the index that names them.

        A reader sees the set that stood there before or the whole new one: files have their content's hash in their
        name, and the index is replaced in one step. Files that only the old index named are removed afterwards.

        Returns:
            The folder.

        Raises:
            OutputNotWritable: If the folder cannot be written.
            ResultFileError: If an index is there that is not that of a sweep set; it is left alone.
        """
        folder = Path(folder)
        old = {entry["file"] for entry in _index(folder)["sweeps"]} if (folder / INDEX).exists() else set()
        entries = [self._save_one(folder, label) for label in self.results]
        text = canonical_json({"format": FORMAT, "kind": KIND, "meta": self.meta, "sweeps": entries})
        write_atomically(folder / INDEX, lambda path: _write(path, f"{text}\n"))
        for name in old - {entry["file"] for entry in entries}:
            (folder / name).unlink(missing_ok=True)
        return folder

    def _save_one(self, folder: Path, label: str) -> dict[str, str]:
        """Write one result under a safe name that tells label and content."""
        temporary = folder / f".{uuid.uuid4().hex[:12]}.parquet"
        try:
            self.results[label].save(temporary)
            digest = _hash_of(temporary)
            name = f"{_safe(label)}-{digest[:12]}.parquet"
            temporary.replace(folder / name)
        except OSError as error:
            if isinstance(error, OutputNotWritable):
                raise
            raise OutputNotWritable(
                f"cannot write the sweep {label!r} into the folder {folder.absolute()}: {error.strerror or error}. "
                "Choose a folder you may write to."
            ) from error
        finally:
            # Where the folder itself could not be made there is nothing to take away.
            if folder.is_dir():
                temporary.unlink(missing_ok=True)
        return {"label": label, "file": name, "sha256": digest}

    @classmethod
    def load(cls, folder: str | Path) -> SweepSet:
        """Read what ``save`` wrote.

        Raises:
            ResultFileError: If the index or a file is missing, damaged, foreign, or too new; the message names it.
        """
        folder = Path(folder)
        index = _index(folder)
        results = {}
        for entry in index["sweeps"]:
            path = folder / entry["file"]
            if not path.is_file():
                raise ResultFileError(f"{path} is missing, though {INDEX} names it; save the sweep set again.")
            if _hash_of(path) != entry["sha256"]:
                raise ResultFileError(f"{path} is not the file that {INDEX} names (its hash differs); save again.")
            results[entry["label"]] = SweepResult.load(path)
        try:
            return cls(results, index["meta"])
        except InvalidInput as error:
            raise ResultFileError(f"{folder / INDEX} does not index a consistent sweep set: {error}") from error

    def export(self, path: str | Path, format: str | None = None) -> Path:
        """Write all rows as one tidy table, one row a measured value, the column ``intervention`` first.

        Undefined values are empty in CSV and null in JSON (a list of objects, one a row).

        Args:
            path: File to write.
            format: ``"parquet"``, ``"csv"`` or ``"json"``; by the ending of the path if None.

        Returns:
            The path written.

        Raises:
            UnknownName: If the format, or the ending, is none of these.
            OutputNotWritable: If the file cannot be written.
        """
        return export_frame(self.to_frame(), path, format, kind="sweep table", meta=self.meta)


def export_frame(
    frame: pd.DataFrame,
    path: str | Path,
    format: str | None = None,
    *,
    kind: str = "table",
    meta: Mapping[str, Any] | None = None,
) -> Path:
    """Write a tidy table, such as one that ``mechheads.sweep_stats`` returns; see ``SweepSet.export``.

    Raises:
        UnknownName: If the format, or the ending, is unknown.
        OutputNotWritable: If the file cannot be written.
    """
    path = Path(path)
    named = path.suffix.removeprefix(".").lower() if format is None else format
    if named not in FORMATS:
        raise UnknownName("export format", named, FORMATS, hint="Give format=..., or a path that ends in one of them.")
    if path.suffix.lower() != f".{named}":
        path = path.with_name(f"{path.name}.{named}")
    if named == "parquet":
        import pyarrow as pa

        return write_table(path, pa.Table.from_pandas(frame, preserve_index=False), kind=kind, header={"meta": meta})
    if named == "csv":
        csv = frame.to_csv(index=False, lineterminator="\n")
        return write_atomically(path, lambda p: _write(p, csv))
    rows = [{str(k): _json_value(v) for k, v in row.items()} for row in frame.to_dict("records")]
    text = "[\n" + ",\n".join(json.dumps(row, allow_nan=False) for row in rows) + "\n]\n"
    return write_atomically(path, lambda p: _write(p, text))


def _write(path: Path, text: str) -> None:
    # As bytes, so that line ends are the same on every system.
    path.write_bytes(text.encode())


def _json_value(value: Any) -> Any:
    """A number, text or list for JSON; None where a number is undefined or has no end."""
    if isinstance(value, np.generic):
        value = value.item()
    return None if isinstance(value, float) and not np.isfinite(value) else value


def _safe(label: str) -> str:
    """A file name that every system takes; labels that look alike are told apart by the hash beside it."""
    return re.sub(r"[^a-z0-9]+", "-", label.lower()).strip("-")[:40] or "sweep"


def _hash_of(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _index(folder: Path) -> dict[str, Any]:
    """The index of a folder, checked."""
    path = folder / INDEX
    if not path.is_file():
        reason = "is not a folder" if folder.exists() and not folder.is_dir() else f"holds no {INDEX}"
        raise ResultFileError(
            f"{folder} {reason}, so there is no sweep set in it; give the folder that save() returned."
        )
    try:
        index = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, UnicodeDecodeError) as error:
        raise ResultFileError(f"{path} is damaged or not JSON ({error}); save the sweep set again.") from error
    if not isinstance(index, dict) or index.get("kind") != KIND:
        raise ResultFileError(f"{path} is not the index of a sweep set; mechheads did not write it.")
    found = index.get("format")
    if not isinstance(found, int) or isinstance(found, bool) or found < 1:
        raise ResultFileError(f"{path} is damaged: its format is {found!r}, not a number; save the sweep set again.")
    if found > FORMAT:
        raise ResultFileError(
            f"{path} was written by a newer mechheads (format {found}); this one reads up to {FORMAT}: upgrade."
        )
    sweeps: Any = index.get("sweeps")
    fit = isinstance(sweeps, list) and bool(sweeps) and isinstance(index.get("meta"), dict)
    # Only plain names inside the folder: an index from elsewhere must not lead out of it.
    if not fit or not all(_fit(entry) for entry in sweeps):
        raise ResultFileError(f"{path} is damaged: it does not name the files of the sweep set; save it again.")
    labels = [entry["label"] for entry in sweeps]
    if len(set(labels)) < len(labels):
        raise ResultFileError(f"{path} is damaged: it names a label twice ({', '.join(labels)}); save it again.")
    return index


def _fit(entry: Any) -> bool:
    if not isinstance(entry, dict) or not all(isinstance(entry.get(k), str) for k in ("label", "file", "sha256")):
        return False
    return re.fullmatch(r"[a-z0-9][a-z0-9-]*\.parquet", entry["file"]) is not None
