"""The text of published head files, to plain values and back; ``mechheads.head_files`` makes scores of them.

Readers raise ``ValueError`` naming the cell; the caller adds the file's name.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import yaml

from mechheads.heads import Head, HeadSet

FULL_HEADS = "full_heads"
HEAD_SET_KEY = "attn_head_set"
# From here on float32 rounds to infinity; its largest number, in decimal, may lie a little above that number.
_TOO_LARGE = (2 - 2**-24) * 2.0**127
_DEEPEST = 32
# float() alone also reads "1_000", "nan" and digits of other scripts.
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)
_SAVETXT = re.compile(r"-?\d\.\d{18}e[+-]\d{2,3}", re.ASCII)
_UNDERSCORED = re.compile(r"\s*(\d+)_(\d+)\s*", re.ASCII)


# -- numbers and labels --------------------------------------------------------------------------


def number(cell: Any, where: str) -> float:
    """A finite JSON number that float32 can hold; null is NaN, undefined."""
    if cell is None:
        return np.nan
    if isinstance(cell, bool) or not isinstance(cell, (int, float)):
        raise ValueError(f"{where} is {cell!r}; expected a number, or null where a score is undefined")
    if not abs(cell) < _TOO_LARGE:
        shown = str(cell) if isinstance(cell, float) else "a huge whole number"
        raise ValueError(f"{where} is {shown}; expected a finite number (float32), or null where undefined")
    return float(cell)


def short(value: Any) -> float | None:
    """A number as JSON should show it: 0.83 rather than the 0.829999983... of its float32; None for NaN."""
    value = float(value)
    if np.isnan(value):
        return None
    near = np.float32(value)
    shortest = float(str(near))
    return shortest if float(near) == value and np.float32(shortest) == near else value


def label(head: Head) -> str:
    """``16-19``, as published files write it."""
    return f"{head.layer}-{head.head}"


def distinct(labels: Iterable[Any], *, underscores: bool = False) -> list[Head]:
    """The heads that the labels name, in order, no head twice."""
    seen: dict[Head, Any] = {}
    for text in labels:
        match = _UNDERSCORED.fullmatch(text) if underscores and isinstance(text, str) else None
        head = Head(int(match[1]), int(match[2])) if match else Head.parse(text)
        if head in seen:
            raise ValueError(f"it names a head twice, {head}: as {seen[head]!r} and as {text!r}")
        seen[head] = text
    return list(seen)


# -- JSON: maps, the envelope, pairs -------------------------------------------------------------


def parse_json(text: str) -> Any:
    """JSON in which no key stands twice (Python would keep the last without a word)."""
    try:
        return json.loads(text, object_pairs_hook=_once)
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    out = dict(pairs)
    if len(out) < len(pairs):
        key, _ = Counter(key for key, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {key!r} stands twice")
    return out


def is_means(raw: Any) -> bool:
    """Does a head map hold one number a head rather than lists?"""
    return isinstance(raw, dict) and any(not isinstance(row, list) for row in raw.values())


def read_map(raw: Any, *, means: bool = False) -> dict[Head, list[float]]:
    """``{"16-19": [score of each trial]}``, or with ``means`` ``{"16-19": score}``, as rows of equal length."""
    kind = "a score" if means else "a list of scores, one per trial"
    if not isinstance(raw, dict) or not raw:
        raise ValueError(f"expected a map from 'layer-head' to {kind}, found {_kind(raw)}")
    heads = distinct(raw)
    rows = []
    for key, row in raw.items():
        if means:
            rows.append([number(row, f"the score of {key!r}")])
        elif not isinstance(row, list) or not row:
            single = isinstance(row, (int, float)) and not isinstance(row, bool)
            hint = "; a map of single numbers has the format 'flat_means' of read_heads" if single else ""
            raise ValueError(f"the entry {key!r} is not a list of scores{hint}")
        else:
            rows.append([number(x, f"score {i} of {key!r}") for i, x in enumerate(row)])
    sizes = Counter(map(len, rows))
    if len(sizes) > 1:
        raise ValueError(f"it has heads with {min(sizes)} and with {max(sizes)} scores; each needs one per trial")
    return dict(zip(heads, rows, strict=True))


def read_envelope(raw: Any) -> tuple[Any, list[Any] | None, dict[str, Any]]:
    """The map, the trial ids (None if left out) and everything else of ``{"meta", "scores", "trial_ids", ...}``."""
    if not isinstance(raw, dict) or not isinstance(raw.get("scores"), dict):
        raise ValueError(f"expected an object whose 'scores' is a map of head scores, found {_kind(raw)}")
    rest = {key: value for key, value in raw.items() if key not in ("scores", "trial_ids")}
    if not isinstance(rest.get("meta", {}), dict):
        raise ValueError(f"'meta' is {_kind(rest['meta'])}; expected an object")
    if "confidence_intervals" in rest:
        _check_intervals(rest["confidence_intervals"], set(distinct(raw["scores"])))
    ids = raw.get("trial_ids")
    if "trial_ids" in raw and not isinstance(ids, list):
        raise ValueError(f"'trial_ids' is {_kind(ids)}; expected a list")
    for i, trial in enumerate(ids or ()):
        if isinstance(trial, bool) or not isinstance(trial, (str, int)):
            raise ValueError(f"trial id {i} is {trial!r}; expected text or a whole number")
    twice = [trial for trial, count in Counter(map(str, ids or ())).items() if count > 1]
    if twice:
        raise ValueError(f"trial id {twice[0]!r} stands more than once")
    return raw["scores"], ids, rest


def _check_intervals(intervals: Any, scored: set[Head]) -> None:
    """Each interval belongs to a head with scores, and its low is not above its high."""
    if not isinstance(intervals, dict):
        raise ValueError(
            f"'confidence_intervals' is {_kind(intervals)}; expected a map from 'layer-head' to [low, high]"
        )
    for head, (key, pair) in zip(distinct(intervals), intervals.items(), strict=True):
        where = f"the confidence interval of {key!r}"
        if head not in scored:
            raise ValueError(f"{where} belongs to no head of 'scores'")
        if isinstance(pair, dict) and {"low", "high"} <= set(pair):
            pair = [pair["low"], pair["high"]]
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"{where} is {str(pair)[:60]}; expected [low, high] or {{'low': ..., 'high': ...}}")
        low, high = (number(x, where) for x in pair)
        if low > high:
            raise ValueError(f"{where} has the low end {low} above the high end {high}")


def read_pairs(raw: Any) -> dict[Head, list[float]]:
    """``[["14-22", score], ...]`` as one-trial rows."""
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"expected a list of ['layer-head', score] pairs, found {_kind(raw)}")
    for i, pair in enumerate(raw):
        if not isinstance(pair, list) or len(pair) != 2:
            raise ValueError(f"entry {i} is {str(pair)[:60]}; expected a pair ['layer-head', score]")
        if pair[1] is None:
            raise ValueError(f"the score of {pair[0]!r} is null; leave a head without a score out")
    heads = distinct(pair[0] for pair in raw)
    return {h: [number(pair[1], f"the score of {pair[0]!r}")] for h, pair in zip(heads, raw, strict=True)}


def _kind(value: Any) -> str:
    """What a JSON value is, in words."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)[:60]
    name = "a list" if isinstance(value, list) else "a map"
    return name if value else f"an empty {name.split()[1]}"


# -- YAML: a ranking -----------------------------------------------------------------------------


def read_yaml(text: str) -> tuple[list[Head] | None, dict[Any, Any]]:
    """The heads of a QRHead config, best first (None for all heads), and its other keys."""
    try:
        _check_plain(text)
        _keys_once(yaml.compose(text, Loader=yaml.SafeLoader))
        raw = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"it is not YAML ({' '.join(str(error).split())[:200]})") from error
    rest = {}
    if isinstance(raw, dict):
        if HEAD_SET_KEY not in raw:
            raise ValueError(f"it has no {HEAD_SET_KEY!r}, such as '14-22,13-16,14-28'")
        rest = {key: value for key, value in raw.items() if key != HEAD_SET_KEY}
        raw = raw[HEAD_SET_KEY]
    if isinstance(raw, str) and raw.strip() == FULL_HEADS:
        return None, rest
    labels = raw.split(",") if isinstance(raw, str) else raw
    if not isinstance(labels, list) or not labels:
        raise ValueError(
            f"{HEAD_SET_KEY} is {raw!r}; expected heads such as '14-22,13-16', best first, a list of them, "
            f"or {FULL_HEADS!r} (quoted: YAML reads a bare 10_3 as the number 103)"
        )
    return distinct(labels, underscores=True), rest


def _check_plain(text: str) -> None:
    """Refuse aliases, which a few lines can grow without bound, and nesting, which costs the parser its square."""
    depth = 0
    for event in yaml.parse(text, Loader=yaml.SafeLoader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if isinstance(event, yaml.AliasEvent):
            raise ValueError("it uses YAML aliases; write every value out")
        if depth > _DEEPEST:
            raise ValueError("it is nested too deeply")


def _keys_once(node: yaml.Node | None) -> None:
    """Refuse a top-level key that stands twice (YAML would keep the last)."""
    if isinstance(node, yaml.MappingNode):
        keys = Counter(str(key.value) for key, _ in node.value)
        twice = [key for key, count in keys.items() if count > 1]
        if twice:
            raise ValueError(f"the key {twice[0]!r} stands twice")


def write_yaml(heads: HeadSet | None, rest: Mapping[Any, Any]) -> str:
    """A QRHead config; None writes ``full_heads``."""
    value = FULL_HEADS if heads is None else ",".join(map(label, heads))
    # Escaped to ASCII: unescaped, PyYAML writes line breaks of other alphabets that it then reads as spaces.
    others = yaml.safe_dump(dict(rest), sort_keys=False, allow_unicode=False, width=2**31) if rest else ""
    return f'{HEAD_SET_KEY}: "{value}"\n{others}'


# -- TSV: a matrix of key/value heads ------------------------------------------------------------


def read_tsv(text: str) -> np.ndarray:
    """``[layer kv_head]`` float64."""
    lines = text.split("\n")
    ended = lines[-1] == ""
    rows = [line.rstrip("\r").split("\t") for line in (lines[:-1] if ended else lines)]
    if not rows:
        raise ValueError("it is empty; expected one row a layer of tab-separated numbers")
    matrix = [[_tsv_number(cell, i, j) for j, cell in enumerate(row)] for i, row in enumerate(rows, start=1)]
    for i, row in enumerate(rows, start=1):
        if len(row) != len(rows[0]):
            raise ValueError(
                f"line {i} has {len(row)} columns and line 1 has {len(rows[0])}; each needs one per KV head"
            )
    # A file cut inside its last number still reads as a matrix, of another number: 9.96e-0 for 9.96e-01.
    cells = [cell.strip() for row in rows for cell in row]
    if not ended and len(cells) > 1 and all(map(_SAVETXT.fullmatch, cells[:-1])) and not _SAVETXT.fullmatch(cells[-1]):
        raise ValueError(f"it is cut off in its last number, {cells[-1]!r}")
    return np.array(matrix)


def _tsv_number(cell: str, line: int, column: int) -> float:
    if not _NUMBER.fullmatch(cell.strip()) or not abs(float(cell)) < _TOO_LARGE:
        raise ValueError(f"line {line}, column {column + 1} is {cell[:60]!r}; expected a finite number (float32)")
    return float(cell)


def write_tsv(matrix: Sequence[Sequence[float]] | np.ndarray) -> str:
    """A matrix with 19 digits a number, as ``numpy.savetxt`` writes it."""
    return "".join("\t".join(f"{x:.18e}" for x in row) + "\n" for row in matrix)
