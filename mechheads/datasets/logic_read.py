"""Reading rows of logic data from files and folders, and what all such sources have in common."""

from __future__ import annotations

import hashlib
import json
import random
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from mechheads.datasets import hub_files as hubs
from mechheads.datasets.haystack import shuffled
from mechheads.datasets.logic import build_trials
from mechheads.datasets.logic_prompts import TemplateSource
from mechheads.datasets.logic_questions import LogicQuestion
from mechheads.datasets.sources import Record, Source
from mechheads.errors import InvalidInput
from mechheads.trials import Encoder, TrialSet

_LINES = (".jsonl", ".ndjson", ".jsonlines")
_SUFFIXES = (".json", *_LINES)
VERDICTS = {"true": "true", "false": "false", "unknown": "unknown", "uncertain": "unknown"}
TRUTHS = {"true": "true", "false": "false"}


@dataclass(frozen=True)
class Row(Record):
    """One row of a file.

    Attributes:
        file: Path of the file within the folder that was given, with ``/``; the file's name if it was given itself;
            empty if rows were handed in.
    """

    file: str = ""

    @property
    def stem(self) -> str:
        """The file's name without its ending; empty if rows were handed in."""
        return Path(self.file).stem

    def whole(self, key: str, *, default: Any = ...) -> Any:
        """A whole number, as one or as text (``"2"``, ``"d2"``)."""
        value = self.get(key, (int, str), default=default)
        if value is default or isinstance(value, int):
            return value
        if match := re.fullmatch(r"d?(\d+)", value.strip()):
            return int(match[1])
        raise InvalidInput(f"{self.where}: {key!r} is {value!r}; it must be a whole number.")

    def verdict(self, key: str, known: Mapping[str, str]) -> str:
        """A verdict in any case, given as text, true or false, or 1 or 0."""
        value = self.data.get(key)
        text = {"1": "true", "0": "false"}.get(str(value).strip().lower(), str(value).strip().lower())
        if value is None:
            self.get(key, str)  # says what is there
        if text not in known:
            raise InvalidInput(f"{self.where}: {key!r} is {value!r}; it must be one of {sorted(known)}.")
        return known[text]

    def part(self, data: Any, name: str) -> Row:
        """A row within this one.

        Raises:
            InvalidInput: If it is no object.
        """
        where = f"{self.where}, {name}"
        if not isinstance(data, Mapping):
            raise InvalidInput(f"{where}, is {str(data)[:60]!r}, a {type(data).__name__}; it must be an object.")
        return Row(data, where, f"{self.place}, {name}", self.file)


@dataclass(frozen=True)
class Rows:
    """What was read.

    Attributes:
        rows: In file order, files by path.
        source: Path or hub name, or ``"records"``.
        hash: SHA-256 over the content, hex, 16 characters.
        recoded: Files that are not UTF-8 and were read as cp1252.
    """

    rows: tuple[Row, ...]
    source: str
    hash: str
    recoded: tuple[str, ...] = ()


def read_rows(path: Source, *, what: str, split: str, cp1252: bool = False) -> Rows:
    """Rows of one file, of every ``.json`` and ``.jsonl`` file in a folder, of a hub data set, or handed in.

    Args:
        path: File, folder, ``"hub:owner/name..."`` or ``hub(...)``, or a list of dicts.
        what: What they are, for messages.
        split: Split of a hub data set where neither file nor split is named.
        cp1252: Read files that are not UTF-8 as Windows-1252 instead of refusing them.

    Raises:
        InvalidInput: Naming the file and the row, if it cannot be read.
    """
    if hubs.is_hub(path):
        named = hubs.of(path).with_defaults(split=split)
        if named.split:
            return _made(_rows(named.rows(), str(named), "row", ""), str(named))
        return _read_path(named.fetch(), str(named), what, cp1252)
    if isinstance(path, (str, Path)):
        return _read_path(Path(path), str(path), what, cp1252)
    if isinstance(path, Mapping) or not isinstance(path, Sequence):
        raise InvalidInput(f"cannot read {what} from a {type(path).__name__}; give a path or a list of dicts.")
    return _made(_rows(list(path), "records", "record", ""), "records")


def _read_path(path: Path, source: str, what: str, cp1252: bool) -> Rows:
    """A file, or all of a folder."""
    if path.is_dir():
        files = sorted(f for f in path.rglob("*") if f.is_file() and f.suffix.lower() in _SUFFIXES)
        if not files:
            raise InvalidInput(f"the folder {source} of {what} holds no .json or .jsonl file.")
        named = [(f, f.relative_to(path).as_posix(), f"{source}/{f.relative_to(path).as_posix()}") for f in files]
    elif path.is_file():
        named = [(path, path.name, source)]
    else:
        raise InvalidInput(f"{source} of {what} does not exist; check the path.")
    rows, recoded = [], []
    for file, name, where in named:
        text, changed = _text(file, where, what, cp1252)
        recoded += [name] if changed else []
        values, unit = _values(text, where, what, file.suffix.lower() in _LINES)
        rows += _rows(values, where, unit, name)
    return _made(rows, source, tuple(recoded))


def _text(file: Path, where: str, what: str, cp1252: bool) -> tuple[str, bool]:
    """Text of a file, and whether it was not UTF-8."""
    try:
        raw = file.read_bytes()
    except OSError as error:
        raise InvalidInput(f"{where} cannot be read: {error}") from error
    if b"\0" in raw:  # as in pictures, tables and archives; cp1252 would read it
        raise InvalidInput(f"{where} is no UTF-8 text (it holds zero bytes). {_expected(what)}")
    try:
        return raw.decode("utf-8-sig"), False
    except UnicodeDecodeError as error:
        try:
            if cp1252:
                return raw.decode("cp1252"), True
        except UnicodeDecodeError:
            pass  # neither: said below
        raise InvalidInput(
            f"{where} is not UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8. {_expected(what)}"
        ) from error


def _expected(what: str) -> str:
    return f"{what} is read from a JSON or JSON Lines file, one question an object."


def _values(text: str, where: str, what: str, lines: bool) -> tuple[list[Any], str]:
    """The values of a file: a list's entries, one object, or one value a line; and what each is called."""
    if not text.strip():
        raise InvalidInput(f"{where} is empty.")
    if not lines:
        try:
            data = json.loads(text)
            return (data, "entry") if isinstance(data, list) else ([data], "entry")
        except ValueError as error:
            if "\n{" not in text.strip():  # not one object a line either
                raise InvalidInput(f"{where} is not JSON: {error}. {_expected(what)}") from error
    out: list[Any] = []
    for number, line in enumerate(text.split("\n"), 1):  # not splitlines(): JSON allows U+2028 inside texts
        try:
            out.append(json.loads(line) if line.strip() else None)
        except ValueError as error:
            raise InvalidInput(f"{where}, line {number}, is not JSON: {error}; it begins {line[:60]!r}.") from error
    while out and out[-1] is None:
        out.pop()
    return out, "line"


def _rows(values: Sequence[Any], where: str, unit: str, file: str) -> list[Row]:
    rows = []
    for number, value in enumerate(values, 1):
        if value is None and unit == "line":
            continue  # a blank line
        if not isinstance(value, Mapping):
            raise InvalidInput(
                f"{where}, {unit} {number}, is {str(value)[:60]!r}, a {type(value).__name__}; each must be an object "
                "with named fields."
            )
        place = f"{file}, {unit} {number}" if file else f"{unit} {number}"
        rows.append(Row(value, f"{where}, {unit} {number}", place, file))
    return rows


def _made(rows: Sequence[Row], source: str, recoded: tuple[str, ...] = ()) -> Rows:
    if not rows:
        raise InvalidInput(f"{source} is empty.")
    try:
        plain = json.dumps([[r.file, dict(r.data)] for r in rows], sort_keys=True)
    except (TypeError, ValueError) as error:
        raise InvalidInput(f"{source} holds what JSON cannot: {error}.") from error
    return Rows(tuple(rows), source, hashlib.sha256(plain.encode()).hexdigest()[:16], recoded)


# -- from questions to trials ---------------------------------------------------------------------------------


def finish(
    model: Encoder,
    kind: str,
    read: Rows,
    questions: Sequence[tuple[Row, LogicQuestion]],
    *,
    n: int | None,
    seed: int,
    template: TemplateSource,
    calibration: float | None,
    left_out: Mapping[str, int] | None = None,
    **options: Any,
) -> TrialSet:
    """Trials of what a loader made of its rows: same premises one group, a seeded sample, counts in the options.

    Raises:
        InvalidInput: If two rows have one id, or there are fewer than ``n`` questions.
    """
    first: dict[str, Row] = {}
    for row, question in questions:
        other = first.setdefault(question.id, row)
        if other is not row:
            raise InvalidInput(
                f"{row.where}: the id {question.id!r} is that of {other.where} too; ids must differ within a set."
            )
    groups: dict[tuple[str, ...], str] = {}
    asked = [replace(q, group=groups.setdefault(tuple(q.premises), f"{kind} {len(groups)}")) for _, q in questions]
    if not asked:
        raise InvalidInput(f"{read.source} has no question that can be used; left out: {dict(left_out or {})}.")
    recorded = {
        "kind": kind,
        "source": read.source,
        "source_hash": read.hash,
        "questions": len(asked),
        "left_out": dict(left_out or {}),
        "recoded": list(read.recoded),
        **options,
    }
    return build_trials(
        model,
        sample(asked, n, seed, source=read.source),
        template=template,
        calibration=calibration,
        seed=seed,
        name=kind,
        options=recorded,
    )


def sample(questions: Sequence[LogicQuestion], n: int | None, seed: int, *, source: str) -> list[LogicQuestion]:
    """``n`` of the questions, in their order, labels in proportion; all if n is None.

    Raises:
        InvalidInput: If there are fewer, or n or seed is no whole number.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise InvalidInput(f"seed={seed!r}: give a whole number.")
    if n is None:
        return list(questions)
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise InvalidInput(f"n={n!r} trials: give a whole number of 1 or more, or None for all.")
    if n > len(questions):
        raise InvalidInput(
            f"{source} has {len(questions)} questions, too few for n={n}; use n={len(questions)} at most."
        )
    rng = random.Random(f"mechheads/logic sample/{seed}")
    order = shuffled(range(len(questions)), rng)
    counts = Counter(questions[i].candidates[questions[i].label] for i in order)
    taken: Counter[str] = Counter()
    # A label's k-th question comes when its share of all questions is due.
    due = []
    for i in order:
        label = questions[i].candidates[questions[i].label]
        taken[label] += 1
        due.append(((taken[label] - 0.5) / counts[label], i))
    return [questions[i] for i in sorted(i for _, i in sorted(due)[:n])]


def balanced(
    questions: Sequence[tuple[Row, LogicQuestion]], seed: int
) -> tuple[list[tuple[Row, LogicQuestion]], dict[str, int]]:
    """As many questions of each label, thinned where a rule's labels are the most unequal; and how many went.

    Rules whose questions all have one label stay unequal: what can be made even is the whole, and rules that have both.
    """
    rng = random.Random(f"mechheads/logic balance/{seed}")

    def label(q: LogicQuestion) -> str:
        return q.candidates[q.label]

    totals = Counter(label(q) for _, q in questions)
    if len(totals) < 2:
        raise InvalidInput(
            f"balance=True, but all {len(questions)} questions have the label {next(iter(totals), None)!r}."
        )
    least = min(totals.values())
    pools: dict[tuple[Any, str], list[int]] = {}
    for i in shuffled(range(len(questions)), rng):
        q = questions[i][1]
        pools.setdefault((q.rule, label(q)), []).append(i)
    gone: set[int] = set()
    for name, total in totals.items():
        for _ in range(total - least):
            mine = [rule for (rule, said), left in pools.items() if said == name and left]

            def excess(rule: Any, name: str = name) -> int:
                others = [len(left) for (r, said), left in pools.items() if r == rule and said != name]
                return len(pools[rule, name]) - max(others, default=0)

            gone.add(pools[max(mine, key=excess), name].pop())
    return [x for i, x in enumerate(questions) if i not in gone], {"for balance": len(gone)} if gone else {}
