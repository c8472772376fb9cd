"""Head scores in Parquet files, with everything inside; ``head_files`` reads and writes published formats."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mechheads.errors import ResultFileError
from mechheads.result_files import (
    from_column,
    read_table,
    to_column,
    write_table,
)
from mechheads.scores import HeadScores


def write_scores(scores: HeadScores, path: str | Path) -> Path:
    """One row a trial, one column for each array, the rest in the schema's metadata; see ``HeadScores.save``."""
    import pyarrow as pa

    columns: dict[str, Any] = {
        "trial_id": pa.array(scores.trial_ids, pa.string()),
        "kept": pa.array(scores.kept),
        "weight": pa.array(scores.weights),
        "record": pa.array([json.dumps(r) for r in scores.records], pa.string()),
        "values": to_column(scores.values),
        **{f"part:{name}": to_column(part) for name, part in scores.parts.items()},
    }
    header = {
        "shape": list(scores.shape),
        "method": scores.method,
        "unit": scores.unit,
        "pooling": scores.pooling,
        "parts": list(scores.parts),
        "meta": scores.meta,
    }
    return write_table(path, pa.table(columns), kind="head_scores", header=header)


def read_scores(path: str | Path) -> HeadScores:
    """Read what ``write_scores`` wrote; see ``HeadScores.load``."""
    table, header = read_table(path, kind="head_scores")
    try:
        shape = tuple(header["shape"])
        if table.num_rows != shape[0]:
            raise ValueError(f"it has {table.num_rows} rows but its header says {shape[0]} trials")
        for name in table.column_names:
            if table[name].null_count:  # an empty "kept" would else read as False
                raise ValueError(f"column {name!r} has empty entries")
        return HeadScores(
            method=header["method"],
            values=from_column(table, "values", shape),
            kept=np.array(table["kept"].to_pylist(), dtype=bool),
            weights=np.array(table["weight"].to_pylist(), dtype=np.float64),
            trial_ids=tuple(table["trial_id"].to_pylist()),
            unit=header["unit"],
            pooling=header["pooling"],
            parts={name: from_column(table, f"part:{name}", shape) for name in header["parts"]},
            records=tuple(json.loads(r) for r in table["record"].to_pylist()),
            meta=header["meta"],
        )
    except (KeyError, TypeError, ValueError, IndexError) as error:
        reason = f"it lacks {error}" if isinstance(error, KeyError) else error
        raise ResultFileError(f"{path} is not a consistent head score file: {reason}") from error
