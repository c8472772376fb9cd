"""Parquet files with the metadata inside: written in one piece, refused by name when unfit.

Every result of mechheads is one Parquet table whose schema metadata holds, under the key
``mechheads``, a JSON object with ``format``, ``kind``, the ``mechheads`` version and what the kind needs.
"""

from __future__ import annotations

import json
import os
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import OutputNotWritable, ResultFileError
from mechheads.provenance import canonical_json, package_versions

if TYPE_CHECKING:
    import pyarrow as pa

FORMAT = 1
KEY = b"mechheads"


def with_extension(path: str | Path, extension: str = ".parquet") -> Path:
    """The path, with the extension added unless it ends in it; ``llama-3.1`` has a dot but no extension."""
    path = Path(path)
    return path if path.suffix == extension else path.with_name(path.name + extension)


def write_atomically(path: Path, write: Callable[[Path], None]) -> Path:
    """Let ``write`` fill a temporary file beside ``path``, then move it there in one step.

    Missing folders are made. A reader therefore sees the old file or the whole new one.

    Raises:
        OutputNotWritable: If the folder cannot be made or written, naming it.
    """
    folder = path.parent
    temporary = folder / f".{path.name}.{uuid.uuid4().hex[:8]}.tmp"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write(temporary)
        os.replace(temporary, path)
    except OSError as error:
        raise OutputNotWritable(
            f"cannot write {path.name!r} into the folder {folder.absolute()}: "
            f"{error.strerror or error}. Choose a folder you may write to."
        ) from error
    finally:
        # The folder itself may be what is broken; then there is no temporary file either.
        if os.path.lexists(temporary):
            temporary.unlink()
    return path


def write_table(path: str | Path, table: pa.Table, *, kind: str, header: Mapping[str, Any]) -> Path:
    """Write a table with its header as one Parquet file; returns the path written.

    Raises:
        OutputNotWritable: If the folder cannot be written.
        InvalidInput: If the header is not JSON-ready.
    """
    import pyarrow.parquet as pq

    full = {"format": FORMAT, "kind": kind, "mechheads": package_versions()["mechheads"], **header}
    table = table.replace_schema_metadata({KEY: canonical_json(full).encode()})

    def write(target: Path) -> None:
        pq.write_table(table, target, compression="zstd", write_page_checksum=True)

    return write_atomically(with_extension(path), write)


def read_table(path: str | Path, *, kind: str) -> tuple[pa.Table, dict[str, Any]]:
    """Read what ``write_table`` wrote, as the table and its header.

    Raises:
        ResultFileError: If the file is missing, truncated, damaged, foreign, of another kind, or
            written by a newer mechheads; the message names the file and the reason.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    if not path.exists():
        path = with_extension(path)
    if not path.is_file():
        reason = "is a folder, not a file" if path.is_dir() else "does not exist"
        raise ResultFileError(f"{path} {reason}; give the path that save() returned.")
    try:
        # ParquetFile rather than read_table: folder names such as "k=5" must not become columns.
        with pq.ParquetFile(path, page_checksum_verification=True) as file:
            header = _header(path, file.schema_arrow.metadata or {}, kind)
            return file.read(), header
    except (pa.ArrowException, OSError, UnicodeDecodeError) as error:
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ResultFileError(
            f"{path} is truncated or damaged, or not a Parquet file ({reason}); write it again."
        ) from error


def _header(path: Path, metadata: Mapping[bytes, bytes], kind: str) -> dict[str, Any]:
    """The mechheads header of a file, checked for format and kind."""
    if KEY not in metadata:
        raise ResultFileError(f"{path} is a Parquet file without mechheads metadata; mechheads did not write it.")
    try:
        header = json.loads(metadata[KEY])
        found, found_kind = int(header["format"]), header["kind"]
    except (ValueError, KeyError, TypeError) as error:
        raise ResultFileError(f"{path} has mechheads metadata that cannot be read: {error!r}.") from error
    if found > FORMAT:
        raise ResultFileError(
            f"{path} was written by a newer mechheads (format {found}); this one reads up to {FORMAT}: upgrade."
        )
    if found_kind != kind:
        raise ResultFileError(f"{path} holds {found_kind!r}, but {kind!r} was asked for.")
    return header


def to_column(array: np.ndarray) -> pa.Array:
    """``[trial ...]`` as a column of fixed-size lists of the same number type."""
    import pyarrow as pa

    return pa.FixedSizeListArray.from_arrays(pa.array(array.ravel()), int(np.prod(array.shape[1:])))


def from_column(table: pa.Table, name: str, shape: tuple[int, ...], *, dtype: Any = np.float32) -> np.ndarray:
    """What ``to_column`` wrote, ``[trial ...]``; ValueError if it does not fit shape and number type."""
    column = table[name].combine_chunks()
    flat = column.flatten().to_numpy(zero_copy_only=False)
    if flat.dtype != dtype or flat.size != np.prod(shape):
        raise ValueError(f"column {name!r} holds {flat.size} {flat.dtype} numbers, not {np.dtype(dtype)} {shape}")
    return flat.reshape(shape)
