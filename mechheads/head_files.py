"""Head files in the formats in the wild, read as scores or as a ranking, and written.

======================  ==========================================================================  ==================
format                  what it is                                                                  holds
======================  ==========================================================================  ==================
``flat``                JSON ``{"16-19": [score of each trial]}`` (Wu et al., arXiv 2404.15574)     every kept trial
``flat_means``          JSON ``{"16-19": score}``                                                   the pooled score
``locos``               JSON ``{"meta", "scores", "trial_ids", "confidence_intervals"}``            kept trials, their
                        (arXiv 2607.01002)                                                          ids, intervals
``qrhead``              YAML ``attn_head_set: "14-22,13-16"``, best first (arXiv 2506.09944)        a ranking
``qrhead_scores``       JSON ``[["14-22", score], ...]``, best first: QRHead's detection            the pooled score
``duo``                 TSV, row = layer, column = key/value head (DuoAttention, arXiv 2410.10819)  a score a KV group
``parquet``             what ``HeadScores.save`` writes                                             everything
======================  ==========================================================================  ==================

Scores are float32 once read. In JSON, ``null`` is an undefined score; NaN and infinity are refused everywhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mechheads import head_formats as text_of
from mechheads.errors import InvalidInput, ResultFileError, UnknownName
from mechheads.head_writing import (
    BY_EXTENSION,
    HEAD_FILE_FORMATS,
    ListedHeads,
    Shape,
    checked_shape,
    fingerprint,
    known_kv,
    left_out,
    named_in,
    output_format,
    write_heads,
)
from mechheads.heads import Head, HeadSet
from mechheads.provenance import json_ready
from mechheads.scores import HeadScores

__all__ = ["HEAD_FILE_FORMATS", "ListedHeads", "left_out", "output_format", "read_heads", "write_heads"]

# A map that names few heads of a huge layer is damaged; no model comes near this many heads.
_MOST_HEADS = 1_000_000


class _Content(NamedTuple):
    """What a file with scores holds: rows of equal length, trial ids, and what else stands in it."""

    rows: dict[Head, list[float]]
    ids: list[Any] | None = None
    rest: Mapping[str, Any] = MappingProxyType({})


def read_heads(
    path: str | Path,
    *,
    format: str | None = None,
    n_layers: int | None = None,
    n_heads: int | None = None,
    n_key_value_heads: int | None = None,
    method: str | None = None,
    unit: str | None = None,
) -> HeadScores | HeadSet:
    """Read a head file: scores, or a ranking where the file has no scores (``qrhead``).

    Scores come with every trial kept and pooled by trial; heads that the file leaves out are undefined, and a
    file of one number a head has one trial. What an envelope holds besides scores stays in ``meta["head_file"]``
    as it stands there, and ``write_heads`` writes it back. A DuoAttention file has one value for each key/value
    head, 1 where the group needs its whole cache and 0 where it does not, up to training noise (nothing is
    clipped): every query head of the group gets it.

    Args:
        path: The file.
        format: One of ``HEAD_FILE_FORMATS``; by the extension and the content if None.
        n_layers: Layers of the model; what the file shows if None.
        n_heads: Query heads a layer; likewise, but needed for ``duo``, whose columns are key/value heads.
        n_key_value_heads: Key/value heads a layer; checked against a ``duo`` file, remembered for writing one.
        method: Name to give the scores; what the file says, or its format, if None.
        unit: Unit to give them; what the file says, or none, if None.

    Returns:
        ``HeadScores``, or for ``qrhead`` the ``ListedHeads``, best first.

    Raises:
        ResultFileError: If the file cannot be read as this format or does not fit the shape; the message names
            the file and the cell.
        InvalidInput: If a count is not a whole number from 1, or one that the file needs is missing.
        UnknownName: If there is no such format.
    """
    path = Path(path)
    given = checked_shape(n_layers, n_heads, n_key_value_heads)
    if format is not None and format not in HEAD_FILE_FORMATS:
        raise UnknownName("head file format", format, HEAD_FILE_FORMATS)
    if format == "parquet" or (format is None and _is_parquet(path)):
        return _read_parquet(path, given, method, unit)
    with _refused(path):
        text = path.read_text(encoding="utf-8-sig")
        format = format or _format_of(path, text)
    if format == "qrhead":
        return _read_ranking(path, text, given)
    if format == "duo":
        content, given = _read_duo(path, text, given)
    else:
        with _refused(path):
            content = _read_json(text, format)
    return _scores(path, format, content, given, method, unit)


def read_heads_json(
    path: str | Path, *, n_layers: int | None, n_heads: int | None, method: str | None, unit: str | None
) -> HeadScores:
    """Scores of each trial from a JSON file, flat or in an envelope; see ``HeadScores.from_heads_json``."""
    path = Path(path)
    given = checked_shape(n_layers, n_heads, None)
    with _refused(path):
        raw = text_of.parse_json(path.read_text(encoding="utf-8-sig"))
        format = "locos" if isinstance(raw, dict) and isinstance(raw.get("scores"), dict) else "flat"
        content = _json_content(raw, format)
    if method is None and format == "flat":
        method = "heads_json"
    return _scores(path, format, content, given, method, unit)


@contextmanager
def _refused(path: Path) -> Iterator[None]:
    """Name the file in whatever is wrong with its content."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise ResultFileError(
            f"{path} is not a readable head file: byte {error.start} is not UTF-8 text; save it as UTF-8."
        ) from error
    except OSError as error:
        raise ResultFileError(f"{path} is not a readable head file: {error.strerror or error}.") from error
    except ValueError as error:
        raise ResultFileError(f"{path} is not a readable head file: {str(error).rstrip('.')}.") from error


def _is_parquet(path: Path) -> bool:
    if path.suffix.lower() in BY_EXTENSION:
        return BY_EXTENSION[path.suffix.lower()] == "parquet"
    with _refused(path), path.open("rb") as file:
        return file.read(4) == b"PAR1"


def _format_of(path: Path, text: str) -> str:
    """The format of a text file, by its extension or else by how it begins."""
    if path.suffix.lower() in BY_EXTENSION:
        return BY_EXTENSION[path.suffix.lower()]
    begin = text.lstrip()[:1]
    if path.suffix.lower() == ".json" or begin in ("{", "["):
        raw = text_of.parse_json(text)
        if isinstance(raw, list):
            return "qrhead_scores"
        if isinstance(raw, dict) and isinstance(raw.get("scores"), dict):
            return "locos"
        return "flat_means" if text_of.is_means(raw) else "flat"
    if text_of.HEAD_SET_KEY in text:
        return "qrhead"
    if "\t" in text:
        return "duo"
    raise ValueError(
        f"its format shows neither in its name nor in its content; name one: {', '.join(HEAD_FILE_FORMATS)}"
    )


def _read_json(text: str, format: str) -> _Content:
    return _json_content(text_of.parse_json(text), format, means=None)


def _json_content(raw: Any, format: str, *, means: bool | None = False) -> _Content:
    """The content of a JSON head file; ``means``: one number a head (None: in an envelope, as it stands)."""
    if format == "qrhead_scores":
        return _Content(text_of.read_pairs(raw))
    if format != "locos":
        return _Content(text_of.read_map(raw, means=format == "flat_means"))
    scores, ids, rest = text_of.read_envelope(raw)
    rows = text_of.read_map(scores, means=text_of.is_means(scores) if means is None else means)
    n = len(next(iter(rows.values())))
    if ids is not None and len(ids) != n:
        raise ValueError(f"'trial_ids' names {len(ids)} trials, but each head has {n} scores")
    return _Content(rows, ids, json_ready(rest, where="it"))


def _read_duo(path: Path, text: str, given: Shape) -> tuple[_Content, Shape]:
    """Each column's value for every query head of its group; the shape, completed from the file."""
    with _refused(path):
        matrix = text_of.read_tsv(text)
    n_layers, n_kv = matrix.shape
    if given.n_heads is None:
        raise InvalidInput(
            f"{path} has {n_kv} columns, one for each key/value head; give n_heads, the model's query heads a layer "
            f"({n_kv} too where each has a key/value head of its own), so that every head gets its group's value."
        )
    wrong = (given.n_layers or n_layers) != n_layers or (given.n_key_value_heads or n_kv) != n_kv
    if wrong or given.n_heads % n_kv:
        raise ResultFileError(
            f"{path} has {n_layers} rows of {n_kv} columns; that does not fit a model of "
            f"{given.n_layers or n_layers} layers with {given.n_heads} heads"
            f"{f' and {given.n_key_value_heads} key/value heads' if given.n_key_value_heads else ''}. "
            "Was it made with another model?"
        )
    rows = {
        Head(layer, head): [float(matrix[layer, Head(layer, head).kv_group(given.n_heads, n_kv)])]
        for layer in range(n_layers)
        for head in range(given.n_heads)
    }
    return _Content(rows), Shape(n_layers, given.n_heads, n_kv)


def _read_ranking(path: Path, text: str, given: Shape) -> ListedHeads:
    with _refused(path):
        heads, rest = text_of.read_yaml(text)
    if heads is not None:
        listed = ListedHeads(heads, source=path.name, rest=rest)
        _fit(path, listed, given)
        return listed
    if given.n_layers is None or given.n_heads is None:
        raise InvalidInput(f"{path} lists 'full_heads', all heads of its model; give n_layers and n_heads.")
    every = [Head(layer, head) for layer in range(given.n_layers) for head in range(given.n_heads)]
    return ListedHeads(every, source=path.name, rest=rest, full=True)


def _read_parquet(path: Path, given: Shape, method: str | None, unit: str | None) -> HeadScores:
    scores = HeadScores.load(path)
    for name, wanted, found in (("layers", given.n_layers, scores.n_layers), ("heads", given.n_heads, scores.n_heads)):
        if wanted is not None and wanted != found:
            raise ResultFileError(f"{path} has {found} {name}, not {wanted}. Was it made with another model?")
    known = known_kv(scores)
    if given.n_key_value_heads is not None and known not in (None, given.n_key_value_heads):
        raise ResultFileError(f"{path} is of a model with {known} key/value heads, not {given.n_key_value_heads}.")
    checked_shape(*scores.shape[1:], given.n_key_value_heads)
    return replace(
        scores,
        method=scores.method if method is None else method,
        unit=scores.unit if unit is None else unit,
    )


def _fit(path: Path, heads: Collection[Head], given: Shape) -> tuple[int, int]:
    """Layers and heads a layer of the model; refused if the file's heads do not fit it."""
    found = (max(h.layer for h in heads) + 1, max(h.head for h in heads) + 1)
    wanted = (given.n_layers or found[0], given.n_heads or found[1])
    beyond = [h for h in heads if h.layer >= wanted[0] or h.head >= wanted[1]]
    complete = len(heads) == found[0] * found[1]
    if beyond or (complete and found != wanted and not isinstance(heads, HeadSet)):
        raise ResultFileError(
            f"{path} has {len(heads)} heads in {found[0]} layers of {found[1]}; that does not fit "
            f"a model of {wanted[0]} layers with {wanted[1]} heads{f', which lacks {beyond[0]}' if beyond else ''}. "
            "Was it made with another model?"
        )
    if wanted[0] * wanted[1] > _MOST_HEADS:
        raise ResultFileError(f"{path} names {max(heads)}, beyond any model; it is damaged.")
    return wanted


def _scores(
    path: Path, format: str, content: _Content, given: Shape, method: str | None, unit: str | None
) -> HeadScores:
    shape = _fit(path, content.rows, given)
    checked_shape(*shape, given.n_key_value_heads)
    n = len(next(iter(content.rows.values())))
    values = np.full((n, *shape), np.nan, dtype=np.float32)
    for head, row in content.rows.items():
        values[:, head.layer, head.head] = row
    said = named_in(content.rest.get("meta", {}), format)
    scores = HeadScores(
        method=said[0] if method is None else method,
        values=values,
        kept=np.ones(n, dtype=bool),
        weights=np.ones(n),
        trial_ids=tuple(map(str, range(n) if content.ids is None else content.ids)),
        unit=said[1] if unit is None else unit,
        pooling="trial",
    )
    file: dict[str, Any] = {"format": format}
    if content.ids is not None and not all(isinstance(trial, str) for trial in content.ids):
        file["trial_ids"] = content.ids
    if given.n_key_value_heads is not None:
        file["n_key_value_heads"] = given.n_key_value_heads
    if format == "locos":
        file |= {"envelope": dict(content.rest), "fingerprint": fingerprint(scores)}
    return replace(scores, meta={"source": path.name, "head_file": file})
