"""Reading records from the user's files, and cutting them into splits that share nothing."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Any

from mechheads.datasets import hub_files as hubs
from mechheads.datasets.haystack import shuffled
from mechheads.errors import InvalidInput

Source = str | Path | hubs.Hub | Sequence[Mapping[str, Any]]

_PLACEHOLDER = re.compile(r"\{([^{}]*)\}")
_LINES = (".jsonl", ".ndjson", ".jsonlines")


@dataclass(frozen=True)
class Record:
    """One record of a file.

    Attributes:
        data: The mapping that was read.
        where: File and line or entry, for messages.
        place: Line or entry alone (``"line 3"``), which is the same on every machine.
    """

    data: Mapping[str, Any]
    where: str
    place: str = ""

    def get(self, key: str, kind: type | tuple[type, ...], *, default: Any = ...) -> Any:
        """A value of the record, of the type asked for; text must not be blank.

        Raises:
            InvalidInput: If the key is absent and there is no default, or the value is of another type.
        """
        value = self.data.get(key)
        if value is None:
            if default is ...:
                raise InvalidInput(f"{self.where} has no {key!r}; it has {sorted(map(str, self.data))}.")
            return default
        if (isinstance(value, bool) and kind is not bool) or not isinstance(value, kind):
            raise InvalidInput(f"{self.where}: {key!r} is {_shown(value)}, a {type(value).__name__}; {_wanted(kind)}.")
        if isinstance(value, str) and not value.strip() and default is ...:
            raise InvalidInput(f"{self.where}: {key!r} is empty; give some text.")
        return value

    def texts(self, key: str, *, default: Any = ..., empty: bool = False) -> tuple[str, ...]:
        """A list of non-empty texts (one text counts as a list of one), the list itself empty only if allowed.

        Raises:
            InvalidInput: If it is anything else, or is absent without a default.
        """
        value = self.get(key, (list, tuple, str), default=default)
        if value is default:
            return tuple(default)
        listed = (value,) if isinstance(value, str) else tuple(value)
        if not (listed or empty) or not all(isinstance(x, str) and x.strip() for x in listed):
            raise InvalidInput(f"{self.where}: {key!r} is {_shown(value)}; give a list of non-empty texts.")
        return listed


@dataclass(frozen=True)
class Records:
    """What was read, and from where.

    Attributes:
        records: In file order.
        source: Path or hub name, or ``"records"`` if they were handed in.
        hash: SHA-256 over the content, hex, 16 characters.
    """

    records: tuple[Record, ...]
    source: str
    hash: str


def read_records(path: Source, *, what: str, file: str | None = None, split: str | None = None) -> Records:
    """Records of a JSON list, of JSON Lines, of a hub data set, or handed in as a list of dicts.

    Args:
        path: A UTF-8 file, ``"hub:owner/name..."`` or ``hub(...)``, or the records themselves.
        what: What they are, for messages (``"NoLiMa needle set"``).
        file: Default file of a hub repository.
        split: Default split of a hub repository without a default file.

    Raises:
        InvalidInput: Naming the file, the line and the key, if it cannot be read.
    """
    if hubs.is_hub(path):
        named = hubs.of(path).with_defaults(file=file, split=split)
        if named.split:
            return _records(named.rows(), what, str(named), "row")
        return _read_file(named.fetch(), what, str(named))
    if isinstance(path, (str, Path)):
        return _read_file(Path(path), what, str(path))
    if isinstance(path, Mapping) or not isinstance(path, Iterable):
        raise InvalidInput(f"cannot read a {what} from a {type(path).__name__}; give a path or a list of dicts.")
    return _records(list(path), what, "records", "record")


def _read_file(path: Path, what: str, source: str) -> Records:
    """Records of one local file."""
    if not path.is_file():
        reason = "is a folder; give one file" if path.is_dir() else "does not exist; check the path"
        raise InvalidInput(f"the {what} {source} {reason}.")
    text = read_text(path, f"{what} {source}")
    if not text.strip():
        raise InvalidInput(f"the {what} {source} is empty.")
    if path.suffix.lower() in _LINES or not _is_json(text):
        return _records(_json_lines(text, what, source), what, source, "line")
    try:
        data = json.loads(text)
    except ValueError as error:
        raise InvalidInput(f"the {what} {source} is not JSON: {error}.") from error
    return _records(data if isinstance(data, list) else [data], what, source, "entry")


def _is_json(text: str) -> bool:
    """Whether a file is one JSON value rather than one a line: a list, or an object over several lines."""
    start = text.lstrip()
    if start.startswith("{"):
        try:
            json.loads(start.splitlines()[0])
        except ValueError:
            return not start.splitlines()[0].rstrip().endswith("}")
        return False
    return True


def _json_lines(text: str, what: str, source: str) -> list[Any]:
    """One value a line, blank lines passed over but counted (as None, so that line numbers stay right)."""
    out: list[Any] = []
    # Not splitlines(): JSON allows U+2028 and the like inside texts.
    for number, line in enumerate(text.split("\n"), 1):
        try:
            out.append(json.loads(line) if line.strip() else _Blank)
        except ValueError as error:
            raise InvalidInput(
                f"the {what} {source}, line {number}, is not JSON: {error}; the line begins {line[:60]!r}."
            ) from error
    return out


class _Blank:
    """Stands for a blank line."""


def _records(values: Sequence[Any], what: str, source: str, unit: str) -> Records:
    """Records with their places; nothing but mappings is taken."""
    records = []
    for number, value in enumerate(values, 1):
        if value is _Blank:
            continue
        if not isinstance(value, Mapping):
            raise InvalidInput(
                f"the {what} {source}, {unit} {number}, is {_shown(value)}, a {type(value).__name__}; "
                "each must be an object with named fields."
            )
        records.append(Record(value, f"{source}, {unit} {number}", f"{unit} {number}"))
    if not records:
        raise InvalidInput(f"the {what} {source} is empty.")
    try:
        plain = json.dumps([dict(r.data) for r in records], sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"the {what} {source} holds what JSON cannot: {error}.") from error
    return Records(tuple(records), source, hashlib.sha256(plain.encode()).hexdigest()[:16])


def read_text(path: Path, what: str) -> str:
    """Text of a UTF-8 file (a byte order mark is dropped).

    Raises:
        InvalidInput: Naming the file, if it cannot be read or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"the {what} is not UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8."
        ) from error
    except OSError as error:
        raise InvalidInput(f"the {what} cannot be read: {error}") from error


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."


def _wanted(kind: Any) -> str:
    names: dict[Any, str] = {str: "text", list: "a list", Mapping: "an object", dict: "an object", tuple: "a list"}
    kinds: list[str] = [names.get(k) or str(k.__name__) for k in (kind if isinstance(kind, tuple) else (kind,))]
    return "it must be " + " or ".join(dict.fromkeys(kinds))


def fill(text: str, fields: Mapping[str, str], where: str) -> str:
    """Replace ``{NAME}`` and 1-based ``{1}`` by their values, in one pass.

    Raises:
        InvalidInput: If the text names a placeholder that has no value.
    """

    def value(match: re.Match[str]) -> str:
        if match[1] not in fields:
            known = ", ".join(f"{{{name}}}" for name in fields) or "(none)"
            raise InvalidInput(f"{where} uses the placeholder {match[0]}, which has no value here; known: {known}.")
        return fields[match[1]]

    return _PLACEHOLDER.sub(value, text)


def placeholders(text: str) -> set[str]:
    """Names of the placeholders in a text, without braces."""
    return set(_PLACEHOLDER.findall(text))


@dataclass(frozen=True)
class Frame:
    """What stands around a passage.

    Attributes:
        opening: Text before it.
        closing: Text after it.
        question_at: Where the question stands: ``("opening" or "closing", character)``, in order.
    """

    opening: str
    closing: str
    question_at: tuple[tuple[str, int], ...]


def frame(template: str, body: str, question: str, *, where: str, strip: bool) -> Frame:
    """Cut a template such as ``"{haystack} {question}"`` at its body, with the question filled in.

    Braces that are meant as such are doubled, as in ``str.format``.

    Args:
        template: Holds ``{body}`` once, and ``{question}`` at least once, anywhere.
        body: Name of the body's placeholder (``"haystack"``, ``"documents"``).
        question: Text of the question.
        where: Whose template it is, for messages.
        strip: Drop white space at the prompt's ends (chat templates do, and spans would be lost).

    Raises:
        InvalidInput: If a placeholder is missing, repeated or unknown.
    """
    template = template.strip() if strip else template
    try:
        pieces = list(Formatter().parse(template))
    except ValueError as error:
        raise InvalidInput(f"{where}: the template {_shown(template)} cannot be read: {error}.") from error
    names: list[str] = [name for _, name, _, _ in pieces if name is not None]
    if names.count(body) != 1 or "question" not in names or set(names) - {body, "question"}:
        raise InvalidInput(
            f"{where}: the template has the placeholders {names}; it needs {{{body}}} once and {{question}}, "
            "and no other (write braces that are meant as such twice)."
        )
    parts, at = {"opening": "", "closing": ""}, []
    side = "opening"
    for text, name, _, _ in pieces:
        parts[side] += text
        if name == body:
            side = "closing"
        elif name == "question":
            at.append((side, len(parts[side])))
            parts[side] += question
    return Frame(parts["opening"], parts["closing"], tuple(at))


def grouped(keys: Sequence[Iterable[str]]) -> list[list[int]]:
    """Indices in groups such that two that share a key, directly or through others, are together.

    Args:
        keys: The keys of each index.

    Returns:
        Groups in order of their first index.
    """
    parent = list(range(len(keys)))

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[str, int] = {}
    for i, mine in enumerate(keys):
        for key in mine:
            a, b = root(first.setdefault(key, i)), root(i)
            parent[max(a, b)] = min(a, b)
    groups: dict[int, list[int]] = {}
    for i in range(len(keys)):
        groups.setdefault(root(i), []).append(i)
    return list(groups.values())


def cut(
    groups: Sequence[Sequence[int]], sizes: Sequence[int], rng: random.Random, *, what: str, unit: str
) -> list[list[int]]:
    """As many indices for each split as asked for, no group in both splits, in a seeded order.

    Raises:
        InvalidInput: If there are too few, or the groups are too large to be cut so.
    """
    total = sum(map(len, groups))
    if sum(sizes) > total:
        raise InvalidInput(f"{what} has {total} {unit}, too few for n={sum(sizes)}; use n={total} at most.")
    order = shuffled(range(len(groups)), rng)
    if len(sizes) == 1:
        return [shuffled([i for g in order for i in groups[g]], rng)[: sizes[0]]]
    reach = _reachable(groups, order)
    fits = [c for c in reach if c >= sizes[0] and total - c >= sizes[1]]
    if not fits:
        raise InvalidInput(
            f"{what} has {total} {unit}, but they cannot be cut into {sizes[0]} + {sizes[1]}: those with the same "
            f"needle or answer must stay in one split (the largest such group has {max(map(len, groups))}); "
            "use a smaller n, another split share, or split=None."
        )
    parts = _sides(groups, order, reach[min(fits)], rng)
    return [part[:size] for part, size in zip(parts, sizes, strict=True)]


def cut_all(
    groups: Sequence[Sequence[int]], split: float | None, rng: random.Random, *, what: str, unit: str
) -> list[list[int]]:
    """All indices, cut as near to the calibration share as the groups allow.

    Raises:
        InvalidInput: If there is but one group, so that a split would be empty.
    """
    total = sum(map(len, groups))
    order = shuffled(range(len(groups)), rng)
    if split is None:
        return [shuffled([i for g in order for i in groups[g]], rng)]
    reach = _reachable(groups, order)
    between = [c for c in reach if 0 < c < total]
    if not between:
        raise InvalidInput(
            f"{what} has {total} {unit}, all with the same needle or answer, directly or through others, so no two "
            "splits can be made that share none; use split=None."
        )
    return _sides(groups, order, reach[min(between, key=lambda c: (abs(c - split * total), c))], rng)


def _reachable(groups: Sequence[Sequence[int]], order: Sequence[int]) -> dict[int, tuple[int, ...]]:
    """For every count that whole groups can make together, the first way found to make it."""
    reach: dict[int, tuple[int, ...]] = {0: ()}
    for g in order:
        for count, chosen in list(reach.items()):
            reach.setdefault(count + len(groups[g]), (*chosen, g))
    return reach


def _sides(
    groups: Sequence[Sequence[int]], order: Sequence[int], chosen: Sequence[int], rng: random.Random
) -> list[list[int]]:
    """Indices in the chosen groups, and those in the others."""
    first = set(chosen)
    return [shuffled([i for g in order if (g in first) == side for i in groups[g]], rng) for side in (True, False)]
