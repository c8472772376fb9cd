"""Head scores in files: Parquet with everything inside, and the flat JSON map of published head files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from mechheads.errors import ResultFileError
from mechheads.result_files import (
    from_column,
    read_heads_json,
    read_table,
    to_column,
    write_atomically,
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


def write_flat_map(scores: HeadScores, path: str | Path) -> Path:
    """``{"layer-head": [score of each kept trial]}``; see ``HeadScores.to_heads_json``."""
    rows = scores.values[scores.kept].astype(np.float64)
    content = {
        f"{layer}-{head}": [None if np.isnan(x) else x for x in rows[:, layer, head].tolist()]
        for layer in range(scores.n_layers)
        for head in range(scores.n_heads)
    }
    text = json.dumps(content)

    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    return write_atomically(Path(path), write)


def read_flat_map(path: str | Path, *, n_layers: int | None, n_heads: int | None, method: str, unit: str) -> HeadScores:
    """Read a published head file; see ``HeadScores.from_heads_json``."""
    path = Path(path)
    scores = read_heads_json(path)
    found = (max(h.layer for h in scores) + 1, max(h.head for h in scores) + 1)
    wanted = (n_layers or found[0], n_heads or found[1])
    complete = len(scores) == found[0] * found[1]
    if found[0] > wanted[0] or found[1] > wanted[1] or (complete and found != wanted):
        raise ResultFileError(
            f"{path} has {len(scores)} heads in {found[0]} layers of {found[1]}; that does not fit "
            f"a model of {wanted[0]} layers with {wanted[1]} heads. Was it made with another model?"
        )
    n = len(next(iter(scores.values())))
    values = np.full((n, *wanted), np.nan)
    for head, row in scores.items():
        values[:, head.layer, head.head] = row
    return HeadScores(
        method=method,
        values=values,
        kept=np.ones(n, dtype=bool),
        weights=np.ones(n),
        trial_ids=tuple(map(str, range(n))),
        unit=unit,
        pooling="trial",
        meta={"source": path.name},
    )
