"""Head files: the names of the formats, what of a file rides along with its scores, and writing.

``mechheads.head_files`` has the table of formats, reads them, and offers all of this.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from mechheads import head_formats as text_of
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head, HeadSet
from mechheads.result_files import write_atomically
from mechheads.scores import HeadScores
from mechheads.stats import check_count

HEAD_FILE_FORMATS: Mapping[str, str] = MappingProxyType(
    {
        "flat": "JSON map from 'layer-head' to the list of its scores, one per trial",
        "flat_means": "JSON map from 'layer-head' to one score",
        "locos": "JSON envelope: meta, scores (the flat map), trial_ids, confidence_intervals",
        "qrhead": "YAML with attn_head_set: 'layer-head,...', best first; no scores",
        "qrhead_scores": "JSON list of ['layer-head', score], best first",
        "duo": "TSV of floats, a row a layer, a column a key/value head",
        "parquet": "mechheads' own, with every trial and the provenance",
    }
)
_JSON_FORMATS = ("flat", "flat_means", "locos", "qrhead_scores")
BY_EXTENSION: Mapping[str, str] = MappingProxyType(
    {".yaml": "qrhead", ".yml": "qrhead", ".tsv": "duo", ".parquet": "parquet"}
)
KV_GROUPS = ("max", "mean")
_LEVEL, _N_BOOT, _SEED = 0.95, 2000, 0


class ListedHeads(HeadSet):
    """The ranking of a head file, with what else stood there, so that writing it again loses nothing.

    Attributes:
        source: Name of the file.
        rest: The other keys of the file (``model_base_class``, ``model_name_or_path``, ...).
        full: Whether the file said ``full_heads`` rather than name every head.
    """

    def __init__(
        self, heads: Iterable[Any] = (), *, source: str = "", rest: Mapping[Any, Any] | None = None, full: bool = False
    ):
        super().__init__(heads)
        self.source, self.rest, self.full = source, dict(rest or {}), full


class Shape(NamedTuple):
    """What the caller says of the model."""

    n_layers: int | None
    n_heads: int | None
    n_key_value_heads: int | None


def checked_shape(n_layers: int | None, n_heads: int | None, n_key_value_heads: int | None) -> Shape:
    """The counts, if each is None or a whole number from 1 and the groups are of equal size."""
    for name, count in (("n_layers", n_layers), ("n_heads", n_heads), ("n_key_value_heads", n_key_value_heads)):
        if count is not None:
            check_count(name, count)
    if n_heads and n_key_value_heads and n_heads % n_key_value_heads:
        raise InvalidInput(
            f"n_heads is {n_heads} and n_key_value_heads {n_key_value_heads}; "
            "expected the same number of query heads for each key/value head."
        )
    return Shape(n_layers, n_heads, n_key_value_heads)


def head_file(scores: HeadScores) -> Mapping[str, Any]:
    """What the file that the scores were read from said besides; empty for others."""
    found = scores.meta.get("head_file", {})
    return found if isinstance(found, Mapping) else {}


def named_in(meta: Mapping[str, Any], format: str) -> tuple[str, str]:
    """Method and unit as a file's meta names them; the format's name and none where it does not."""
    method, unit = meta.get("method"), meta.get("unit")
    return (method if isinstance(method, str) else format), (unit if isinstance(unit, str) else "")


def fingerprint(scores: HeadScores) -> str:
    """Changes with the trials, their order and their scores: intervals of others are not theirs."""
    digest = hashlib.sha256(json.dumps([scores.shape[1:], _kept_ids(scores)]).encode())
    digest.update(scores.values[scores.kept].tobytes())
    return digest.hexdigest()[:16]


def _kept_ids(scores: HeadScores) -> list[str]:
    return [trial for trial, kept in zip(scores.trial_ids, scores.kept, strict=True) if kept]


# -- writing -------------------------------------------------------------------------------------


def write_heads(
    what: Any,
    path: str | Path,
    *,
    format: str | None = None,
    n_key_value_heads: int | None = None,
    kv_groups: str | None = None,
    k: int | None = None,
    model_base_class: str | None = None,
    model_name_or_path: str | None = None,
) -> Path:
    """Write scores or a ranking as a head file.

    What each format cannot hold: ``flat`` and ``locos`` leave out trials that are not kept and the weights of the
    others, so the plain mean of a list is the score under ``pooling="trial"``; ``flat_means``, ``qrhead_scores``
    and ``duo`` hold the pooled score in place of the trials; ``duo`` in place of query heads, moreover, one value
    for each key/value head, ``max`` or mean over the group's query heads; ``qrhead`` holds the ranking alone.
    ``left_out`` says so of a given result. Intervals of an envelope are the file's own while the scores are those
    it came with, else 95% bootstrap intervals of the mean over trials.

    Args:
        what: ``HeadScores``, or for ``qrhead`` also a ranking: a HeadSet or anything that reads as one.
        path: The file, written as named (``parquet`` adds its extension); missing folders are made.
        format: One of ``HEAD_FILE_FORMATS``. If None: by the extension, where ``.json`` is the form that the
            scores were read in, else ``flat``.
        n_key_value_heads: For ``duo``: key/value heads a layer; what the scores know of their model if None.
        kv_groups: For ``duo``: ``"max"`` (the default: a group is kept whole if one head needs it) or ``"mean"``.
        k: For ``qrhead``: only the first k heads; all with a score if None.
        model_base_class: For ``qrhead``: the key of that name; as read if None.
        model_name_or_path: For ``qrhead``: likewise.

    Returns:
        The path written.

    Raises:
        InvalidInput: If the format cannot hold this, an option goes with another format, or no trial is kept.
        UnknownName: If there is no such format or way to aggregate.
        OutputNotWritable: If the folder cannot be written.
    """
    path = Path(path)
    what = what if isinstance(what, HeadScores) else HeadSet.parse(what)
    format = output_format(what, path, format)
    named = {"model_base_class": model_base_class, "model_name_or_path": model_name_or_path}
    for name, value, goes_with in (
        ("n_key_value_heads", n_key_value_heads, "duo"), ("kv_groups", kv_groups, "duo"), ("k", k, "qrhead"),
        *((name, value, "qrhead") for name, value in named.items()),
    ):  # fmt: skip
        if value is not None and format != goes_with:
            raise InvalidInput(f"{name} goes with the format {goes_with!r}, but {path.name} is written as {format!r}.")
    if format == "qrhead":
        return _write_text(path, _ranking_text(what, k, {n: v for n, v in named.items() if v is not None}))
    if isinstance(what, HeadSet):
        raise InvalidInput(f"a ranking has no scores for the format {format!r}; write it as 'qrhead' (.yaml).")
    if format == "parquet":
        return what.save(path)
    pooled = what.mean()  # says why, if no trial is kept
    if format == "duo":
        matrix = _by_group(what, pooled, n_key_value_heads, "max" if kv_groups is None else kv_groups)
        return _write_text(path, text_of.write_tsv(matrix))
    return _write_text(path, json.dumps(_json_value(what, pooled, format), allow_nan=False))


def output_format(what: HeadScores | HeadSet, path: str | Path, format: str | None = None) -> str:
    """The format ``write_heads`` would write.

    Raises:
        InvalidInput: If no format is given and the extension does not show one.
        UnknownName: If there is no such format.
    """
    path = Path(path)
    if format is not None:
        if format not in HEAD_FILE_FORMATS:
            raise UnknownName("head file format", format, HEAD_FILE_FORMATS)
        return format
    if path.suffix.lower() in BY_EXTENSION:
        return BY_EXTENSION[path.suffix.lower()]
    if path.suffix.lower() == ".json":
        read_as = head_file(what).get("format") if isinstance(what, HeadScores) else None
        return read_as if read_as in _JSON_FORMATS else "flat"
    raise InvalidInput(
        f"{path.name!r} does not show its format; end it in .json, .yaml, .tsv or .parquet, "
        f"or name the format: {', '.join(HEAD_FILE_FORMATS)}."
    )


def left_out(
    what: HeadScores | HeadSet,
    format: str,
    *,
    n_key_value_heads: int | None = None,
    kv_groups: str | None = None,
    k: int | None = None,
) -> list[str]:
    """What a file of this format would not hold of a result, a phrase each; empty if it holds everything.

    Args:
        what: What is to be written.
        format: One of ``HEAD_FILE_FORMATS``.
        n_key_value_heads: As for ``write_heads``.
        kv_groups: As for ``write_heads``.
        k: As for ``write_heads``.
    """
    if isinstance(what, HeadSet):
        return [] if k is None or k >= len(what) else [f"the heads after the first {k}"]
    if format == "parquet":
        return []
    if format == "qrhead":
        return [f"scores: the ranking alone is written (pooling {what.pooling!r})"]
    out = []
    if format in ("flat", "locos"):
        if what.n_kept < what.shape[0]:
            out.append(f"{what.shape[0] - what.n_kept} trials that are not kept")
        if what.pooling == "step" and len(set(what.weights[what.kept])) > 1:
            out.append("answer steps: the mean of a list weighs every trial the same")
    elif what.shape[0] > 1:
        out.append(f"single trials: each score is the mean over {what.n_kept} (pooling {what.pooling!r})")
    if format == "duo" and known_kv(what, n_key_value_heads) != what.n_heads:
        out.append(f"query heads: each column is the {kv_groups or 'max'} over the query heads of its key/value head")
    if format != "locos" and ("envelope" in head_file(what) or "model" in what.meta):
        out.append("provenance, and names and intervals where there are any")
    if what.parts:
        out.append(f"parts: {', '.join(what.parts)}")
    return out


def _write_text(path: Path, text: str) -> Path:
    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8", newline="\n")

    return write_atomically(path, write)


def _ranking_text(what: HeadScores | HeadSet, k: int | None, named: Mapping[str, str]) -> str:
    """A QRHead config of a ranking."""
    if k is not None:
        check_count("k", k)
    every = what if isinstance(what, HeadSet) else what.ranking()
    if k is not None and k > len(every):
        raise InvalidInput(f"k is {k}, but there are {len(every)} heads to write.")
    heads = every if k is None else every[:k]
    if not heads:
        raise InvalidInput("there is no head to write: the ranking is empty.")
    listed = what if isinstance(what, ListedHeads) else ListedHeads()
    return text_of.write_yaml(None if listed.full and len(heads) == len(every) else heads, {**listed.rest, **named})


def _by_group(scores: HeadScores, pooled: np.ndarray, n_key_value_heads: int | None, kv_groups: str) -> np.ndarray:
    """Max or mean of the pooled score over each group's query heads, ``[layer kv_head]``."""
    if kv_groups not in KV_GROUPS:
        raise UnknownName("way to aggregate a KV group", kv_groups, KV_GROUPS)
    n_kv = known_kv(scores, n_key_value_heads)
    if n_kv is None:
        raise InvalidInput(
            "a DuoAttention file has a column for each key/value head, and these scores do not know how many their "
            f"model has; give n_key_value_heads ({scores.n_heads} where every head has its own)."
        )
    checked_shape(None, scores.n_heads, n_kv)
    _require_all(pooled, "duo")
    grouped = pooled.reshape(scores.n_layers, n_kv, -1)
    return grouped.max(axis=-1) if kv_groups == "max" else grouped.mean(axis=-1)


def known_kv(scores: HeadScores, given: int | None = None) -> int | None:
    """Key/value heads a layer: as given, or as the scores' file or model says."""
    model = scores.meta.get("model")
    said = (head_file(scores), model if isinstance(model, Mapping) else {})
    known = (given, *(where.get("n_key_value_heads") for where in said))
    return next((n for n in known if n is not None), None)


def _require_all(pooled: np.ndarray, format: str) -> None:
    missing = np.argwhere(np.isnan(pooled))
    if len(missing):
        raise InvalidInput(
            f"{Head(*missing[0].tolist())} has no score ({len(missing)} such), and the format {format!r} holds no "
            "undefined score; write 'flat_means', or 'qrhead' for the ranking of the others."
        )


def _json_value(scores: HeadScores, pooled: np.ndarray, format: str) -> Any:
    """What a JSON file of this format holds."""
    heads = [Head(layer, head) for layer in range(scores.n_layers) for head in range(scores.n_heads)]
    if format == "flat_means":
        return {text_of.label(h): text_of.short(pooled[h.layer, h.head]) for h in heads}
    if format == "qrhead_scores":
        _require_all(pooled, format)
        return [[text_of.label(h), text_of.short(pooled[h.layer, h.head])] for h in scores.ranking()]
    rows = scores.values[scores.kept]
    flat = {text_of.label(h): [text_of.short(x) for x in rows[:, h.layer, h.head]] for h in heads}
    return flat if format == "flat" else _envelope(scores, flat)


def _envelope(scores: HeadScores, flat: dict[str, Any]) -> dict[str, Any]:
    """The LOCOS envelope, with what the file that the scores came from held besides."""
    file = head_file(scores)
    rest = dict(file.get("envelope", {}))
    own = {key: value for key, value in scores.meta.items() if key != "head_file"}
    meta = dict(rest.pop("meta", {}) if "envelope" in file else own)
    if named_in(meta, "locos") != (scores.method, scores.unit):
        meta |= {"method": scores.method, "unit": scores.unit}
    ids = _kept_ids(scores)
    raw_ids = file.get("trial_ids", ids)
    intervals = rest.pop("confidence_intervals", None)
    if intervals is None or file.get("fingerprint") != fingerprint(scores):
        low, high = scores.with_pooling("trial").ci(_LEVEL, _N_BOOT, _SEED)
        places = zip(flat, low.ravel(), high.ravel(), strict=True)
        intervals = {key: [text_of.short(a), text_of.short(b)] for key, a, b in places}
        rest["confidence"] = {"level": _LEVEL, "n_boot": _N_BOOT, "seed": _SEED, "of": "mean over trials"}
    return {
        "meta": meta,
        "scores": flat,
        "trial_ids": raw_ids if list(map(str, raw_ids)) == ids else ids,
        "confidence_intervals": intervals,
        **rest,
    }
