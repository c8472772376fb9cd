"""A folder of cells: one file each, named by what it is a result of, shared by any number of processes."""

from __future__ import annotations

import json
import time
import uuid
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from mechheads.cells import RESERVED, CellFailure, CellKey, CellResult
from mechheads.errors import InvalidInput, OutputNotWritable, ResultFileError
from mechheads.provenance import canonical_json, content_hash
from mechheads.result_files import FORMAT, KEY, read_table, write_atomically

KIND = "cell"
MARK = "cells.json"  # says that a folder is a store; its absence says that a store was deleted
STALE_S = 3600.0


class Claim:
    """A block that this process works on; nobody else gets it until ``release``, or the end of the process."""

    def __init__(self, lock: Any):
        self._lock = lock

    def release(self) -> None:
        """Let others have the block; twice does nothing."""
        self._lock.release()

    def __enter__(self) -> Claim:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self.release()


class CellStore:
    """Cells on disk, found again by what they are results of.

    In the folder: ``<digest>.parquet`` for each cell, ``failed/<digest>.json`` for each that failed, ``claims/`` with
    the lock files of blocks in hand, and ``cells.json``, which marks the folder as a store. Every file appears whole,
    in one step, so a half-written one cannot be read, and the same result is the same bytes (given the same pyarrow).
    Several processes may share a store; several machines too, where the file system carries ``flock`` between them.

    Args:
        path: The folder.
        create: Make it if it is not there. False: open what is there; a store that can only be read is fine then.

    Raises:
        OutputNotWritable: If the folder cannot be made.
        ResultFileError: If ``create`` is False and there is no store, or it is of a newer format.
    """

    def __init__(self, path: str | Path, *, create: bool = True):
        self.path = Path(path).absolute()
        mark = self.path / MARK
        if not mark.is_file():
            if not create:
                raise ResultFileError(f"{self.path} is no store of cells: there is no {MARK} in it. Check the path.")
            write_atomically(mark, lambda target: _write_text(target, {"format": FORMAT, "kind": "cells"}))
        try:
            found = json.loads(mark.read_text(encoding="utf-8"))
            kind, number = found["kind"], int(found["format"])
        except (ValueError, KeyError, TypeError) as error:
            raise ResultFileError(
                f"{mark} cannot be read ({error!r}), so {self.path} may be no store of cells; "
                "delete that one file if you are sure that it is one."
            ) from error
        if kind != "cells" or number > FORMAT:
            raise ResultFileError(
                f"{mark} says kind {kind!r}, format {number}; this mechheads reads kind 'cells' up to format {FORMAT}."
            )

    def file(self, key: CellKey) -> Path:
        """Where a cell lies, whether it is there or not."""
        return self.path / f"{key.digest}.parquet"

    # Reading

    def get(self, key: CellKey) -> CellResult | None:
        """The stored result of a cell, or None.

        Raises:
            ResultFileError: If its file is damaged, or holds another cell; delete it to compute it again.
        """
        file = self.file(key)
        if not file.exists():
            return None
        found, result = _read(file)
        if found != key:
            raise ResultFileError(f"{file} holds {found}, not {key}: delete it, and the cell is computed again.")
        return result

    def intact(self, key: CellKey) -> bool:
        """Whether the cell is there and can be read, all of it."""
        try:
            return self.get(key) is not None
        except ResultFileError:
            return False

    def missing(self, keys: Iterable[CellKey]) -> tuple[CellKey, ...]:
        """The cells still to be computed, in the order given.

        Every file is read in full; one that is damaged counts as missing, with a warning that names it. Computing the
        cell again replaces it.
        """
        absent, damaged = [], []
        for key in dict.fromkeys(keys):
            try:
                if self.get(key) is not None:
                    continue
            except ResultFileError as error:
                damaged.append(str(error))
            absent.append(key)
        if damaged:
            warnings.warn(
                f"{len(damaged)} stored cells are damaged and will be computed again: {damaged[0]}"
                + (f" And {len(damaged) - 1} more." if len(damaged) > 1 else ""),
                stacklevel=2,
            )
        return tuple(absent)

    def keys(self) -> Iterator[CellKey]:
        """The cells that are stored, in the order of their digests.

        Raises:
            ResultFileError: At the first file that is damaged, naming it.
        """
        for file in sorted(self.path.glob("[!.]*.parquet")):
            yield _read(file)[0]

    def __len__(self) -> int:
        return sum(1 for _ in self.path.glob("[!.]*.parquet"))

    def __bool__(self) -> bool:
        return True  # an empty store is a store: ``store or other`` must not pass it over

    # Writing

    def put(self, key: CellKey, result: CellResult) -> Path:
        """Store the result of a cell, and drop the record of its failure, if there is one.

        Raises:
            OutputNotWritable: If the disk is full, the store read-only or deleted. What is stored already stays.
        """
        import pyarrow as pa
        import pyarrow.parquet as pq

        columns: dict[str, Any] = {"trial_id": pa.array(result.trial_ids, pa.string())}
        if result.said:
            columns["said"] = pa.array(result.said, pa.string())
        columns.update({name: pa.array(values) for name, values in result.values.items()})
        # No version, time or host: they would make the same result different bytes.
        header = canonical_json({"format": FORMAT, "kind": KIND, "key": key.describe()})
        table = pa.table(columns).replace_schema_metadata({KEY: header.encode()})
        path = self._write(
            self.file(key), lambda target: pq.write_table(table, target, compression="zstd", write_page_checksum=True)
        )
        self._failure_file(key).unlink(missing_ok=True)
        return path

    def put_failure(self, failure: CellFailure) -> Path:
        """Record why a cell failed.

        Raises:
            OutputNotWritable: As for ``put``.
        """
        record = {"format": FORMAT, "key": failure.key.describe(), "error": failure.error}
        record |= {"message": failure.message, "traceback": failure.traceback}
        return self._write(self._failure_file(failure.key), lambda target: _write_text(target, record))

    def failure(self, key: CellKey) -> CellFailure | None:
        """Why a cell failed when it was last tried; None if it was not, or its result is there.

        Raises:
            ResultFileError: If the record is damaged.
        """
        file = self._failure_file(key)
        return None if not file.exists() or self.intact(key) else _read_failure(file)

    def failures(self) -> tuple[CellFailure, ...]:
        """The cells that failed when they were last tried, in the order of their digests.

        Raises:
            ResultFileError: If a record is damaged.
        """
        found = (_read_failure(file) for file in sorted((self.path / "failed").glob("[!.]*.json")))
        # A process killed between a result and the removal of the old failure leaves both: the result counts.
        return tuple(failure for failure in found if not self.intact(failure.key))

    def failure_time(self, key: CellKey) -> int:
        """When the cell's failure was recorded, nanoseconds by the file system's clock; 0 where there is none."""
        try:
            return self._failure_file(key).stat().st_mtime_ns
        except FileNotFoundError:
            return 0

    def check_writable(self) -> None:
        """Write a small file and remove it: better now than after the computation.

        Raises:
            OutputNotWritable: If that fails.
        """
        probe = self.path / f".{uuid.uuid4().hex[:8]}.probe.tmp"
        self._write(probe, lambda target: _write_text(target, {})).unlink(missing_ok=True)

    def clean(self, *, stale_s: int | float = STALE_S) -> int:
        """Remove what killed processes left: temporary files older than ``stale_s`` seconds; returns how many.

        Records of failures go too where the result is there, or the record is damaged (with a warning). Nothing ever
        reads a temporary file, whatever its age.
        """
        removed = 0
        for file in [*self.path.glob(".*.tmp"), *self.path.glob("failed/.*.tmp")]:
            try:
                if time.time() - file.stat().st_mtime > stale_s:
                    file.unlink()
                    removed += 1
            except FileNotFoundError:
                continue  # another process was faster
        for file in self.path.glob("failed/[!.]*.json"):
            try:
                stale = self.intact(_read_failure(file).key)
            except ResultFileError as error:
                warnings.warn(f"{error} Removed: the cell is tried again anyway.", stacklevel=2)
                stale = True
            if stale:
                file.unlink(missing_ok=True)
        return removed

    def claim(self, name: str) -> Claim | None:
        """Take a block for this process, without waiting; None if another has it.

        The claim is a lock on an open file, so it ends with the process, however that dies.

        Raises:
            OutputNotWritable: If the lock file cannot be made.
        """
        import filelock

        self._check_there()
        lock = filelock.FileLock(str(self.path / "claims" / f"{content_hash(name)}.lock"), thread_local=False)
        try:
            (self.path / "claims").mkdir(exist_ok=True)
            lock.acquire(blocking=False)
        except filelock.Timeout:
            return None
        except (OSError, NotImplementedError) as error:
            raise self._not_writable(str(error)) from error
        return Claim(lock)

    def _failure_file(self, key: CellKey) -> Path:
        return self.path / "failed" / f"{key.digest}.json"

    def _write(self, path: Path, write: Any) -> Path:
        self._check_there()
        try:
            return write_atomically(path, write)
        except OutputNotWritable as error:
            cause = error.__cause__  # says what the disk said; the advice to choose another folder does not fit here
            raise self._not_writable(str(getattr(cause, "strerror", None) or cause or error)) from error

    def _check_there(self) -> None:
        """A store that somebody deleted is not made anew in silence: its cells are gone, and that must be said."""
        if not (self.path / MARK).is_file():
            raise OutputNotWritable(
                f"the store {self.path} was deleted or moved while it was in use ({MARK} is gone). "
                "Put it back, or start again: the cells that are not there are computed again."
            )

    def _not_writable(self, reason: str) -> OutputNotWritable:
        return OutputNotWritable(
            f"the store {self.path} cannot be written: {reason.rstrip('.')}. "
            "What is stored already is whole; run again when that is mended, and only the rest is computed."
        )

    def __repr__(self) -> str:
        return f"CellStore({str(self.path)!r})"


def _write_text(target: Path, content: dict[str, Any]) -> None:
    target.write_text(canonical_json(content) + "\n", encoding="utf-8")


def _read(file: Path) -> tuple[CellKey, CellResult]:
    """A cell's file, checked as its maker would check it."""
    advice = "Delete it, and the cell is computed again."
    try:
        table, header = read_table(file, kind=KIND)
    except ResultFileError as error:
        raise ResultFileError(f"{error} {advice}") from error
    try:
        key = CellKey.from_description(header["key"])
        said = tuple(table["said"].to_pylist()) if "said" in table.column_names else ()
        metrics = [name for name in table.column_names if name not in RESERVED]
        values: dict[str, np.ndarray] = {name: table[name].to_numpy() for name in metrics}
        return key, CellResult(tuple(table["trial_id"].to_pylist()), values, said)
    except (KeyError, TypeError, ValueError) as error:
        raise ResultFileError(f"{file} does not hold a whole cell: {error} {advice}") from error


def _read_failure(file: Path) -> CellFailure:
    """The record of a failed cell."""
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        key = CellKey.from_description(found["key"])
        return CellFailure(key, found["error"], found["message"], found["traceback"])
    except (KeyError, TypeError, ValueError, InvalidInput) as error:
        raise ResultFileError(f"{file} is no record of a failed cell: {error!r}. Delete it.") from error
