"""The prose that needles are hidden in: reading it, counting its tokens, walking through it."""

from __future__ import annotations

import hashlib
import json
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, TypeVar

from mechheads.datasets import hub_files as hubs
from mechheads.datasets.words import WordFinder
from mechheads.errors import InvalidInput
from mechheads.trials import Encoder

T = TypeVar("T")

SHIPPED = "haystack.txt"
_LINES = (".jsonl", ".ndjson", ".jsonlines")
_BLOCK = 64
# Closing quotes are U+201D and U+2019; U+3002, U+FF01 and U+FF1F end sentences in Chinese and Japanese.
_END = re.compile("[.!?\u2026][\"'\u201d\u2019)\\]]*\\s+(?=[^\\sa-z])|[\u3002\uff01\uff1f]\\s*")
_ABBREVIATION = re.compile(
    r"(?:^|[\s(\"'\u201c\u2018])(?:Mr|Mrs|Ms|Dr|Prof|St|Jr|Sr|vs|etc|No|Fig|e\.g|i\.e|cf|[A-Z])\.$"
)


def split_sentences(text: str) -> list[str]:
    """Split prose into sentences by a simple rule.

    A sentence ends at ``. ! ? …`` (closing quotes included) before white space and anything but a lower-case
    letter, or at a blank line. Common abbreviations and single initials do not end one. White space
    inside a sentence, line breaks included, becomes one space.
    """
    sentences = []
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n").replace("\r", "\n")):
        flat = " ".join(paragraph.split())
        start = 0
        for match in _END.finditer(flat):
            piece = flat[start : match.end()].strip()
            if not _ABBREVIATION.search(piece):
                sentences.append(piece)
                start = match.end()
        if flat[start:].strip():
            sentences.append(flat[start:].strip())
    return sentences


@dataclass(frozen=True)
class Haystack:
    """Sentences to hide a needle among.

    Attributes:
        sentences: In reading order.
        source: ``"shipped"``, or the path or hub name it was read from.
        recycles: Whether sentences may come again, in a new order, once all have been used.
        files: Number of files it was read from; 0 if it was generated.
        truncated: Number of JSON Lines files whose last line was cut off and left out.
    """

    sentences: tuple[str, ...]
    source: str
    recycles: bool
    files: int = 1
    truncated: int = 0

    @property
    def hash(self) -> str:
        """SHA-256 over the sentences, hex, 16 characters."""
        return hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, path: HaystackSource, *, field: str = "text") -> Haystack:
        """Read the shipped prose (``None``), a file, or the files of a folder.

        A file is plain text, or JSON Lines (``.jsonl``) with the prose in one field. Of a folder all ``.txt`` files
        are read in the order of their names, or, where it has none, all ``.jsonl`` files; a folder without either
        is searched with its subfolders. The last line of a JSON Lines file may be cut off, as published ones are:
        it is left out and counted in ``truncated``.

        Args:
            path: A file, a folder, ``"hub:owner/name/file"``, ``hub(...)``, or a Haystack, which is given back.
            field: Of JSON Lines.

        Raises:
            InvalidInput: If the path is absent, holds no text, is not UTF-8, or a line is no JSON.
        """
        if isinstance(path, Haystack):
            return path
        if path is None:
            text = resources.files("mechheads.datasets").joinpath(SHIPPED).read_text(encoding="utf-8")
            return cls(tuple(split_sentences(text)), "shipped", True)
        source = str(path)
        if hubs.is_hub(path):
            wanted = hubs.of(path)
            source, path = str(wanted), wanted.fetch()
        files = _files(Path(str(path)), source)
        sentences: list[str] = []
        truncated = 0
        for file in files:
            texts, cut = _texts(file, field)
            truncated += cut
            sentences += [s for text in texts for s in split_sentences(text)]
        if not sentences:
            raise InvalidInput(f"the haystack {source} holds no text.")
        return cls(tuple(sentences), source, False, len(files), truncated)

    @property
    def is_own(self) -> bool:
        """Whether it was read from the caller's files rather than shipped or generated."""
        return self.source != "shipped" and self.files > 0

    def options(self) -> dict[str, Any]:
        """Where it came from, for a trial set's options."""
        out: dict[str, Any] = {"haystack": self.source, "haystack_hash": self.hash}
        if self.is_own:
            out |= {"haystack_files": self.files, "haystack_truncated_lines": self.truncated}
        return out


HaystackSource = str | Path | hubs.Hub | Haystack | None


def _files(path: Path, source: str) -> list[Path]:
    """The files of a haystack, sorted by their names in the folder, the same way on every system."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise InvalidInput(
            f"the haystack {source} does not exist; give a text file, a folder of .txt files, "
            "or None for the prose that comes with mechheads."
        )
    for walk in (path.iterdir, lambda: path.rglob("*")):
        found = [p for p in walk() if p.is_file()]
        for endings in ((".txt",), _LINES):
            if files := [p for p in found if p.suffix.lower() in endings]:
                return sorted(files, key=lambda p: p.relative_to(path).as_posix())
    raise InvalidInput(f"the haystack folder {source} holds no .txt file and no .jsonl file; put some prose in it.")


def _texts(path: Path, field: str) -> tuple[list[str], int]:
    """The texts of one file, and 1 if its last line was cut off."""
    if path.suffix.lower() not in _LINES:
        return [_read(path)], 0
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")
    except OSError as error:
        raise InvalidInput(f"the haystack file {path} cannot be read: {error}") from error
    last = max((i for i, line in enumerate(lines) if line.strip()), default=-1)
    texts: list[str] = []
    for i, line in enumerate(lines):
        if not line.strip():
            continue
        try:
            row = json.loads(line.decode("utf-8"))
        except ValueError as error:  # of the encoding or of JSON
            if i == last and texts:
                return texts, 1
            raise _bad_line(path, i + 1, error) from error
        texts.append(_field(row, field, path, i + 1))
    return texts, 0


def _bad_line(path: Path, number: int, error: ValueError) -> InvalidInput:
    kind = "UTF-8" if isinstance(error, UnicodeDecodeError) else "JSON"
    return InvalidInput(
        f"the haystack file {path}, line {number}, is not {kind}: {error}. Only a cut-off last line is passed over; "
        "mend the line or take it out."
    )


def _field(row: Any, field: str, path: Path, number: int) -> str:
    """The prose of one line."""
    if not isinstance(row, dict) or not isinstance(row.get(field), str):
        has = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise InvalidInput(
            f"the haystack file {path}, line {number}, has no text field {field!r} (it has {has}); name the field: "
            "haystack=Haystack.load(path, field=...)."
        )
    return row[field]


def _read(path: Path) -> str:
    """Text of one UTF-8 file, with errors a newcomer can act on."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidInput(
            f"the haystack file {path} is not UTF-8 (byte {error.start}: {error.reason}); save it as UTF-8 plain text."
        ) from error
    except OSError as error:
        raise InvalidInput(f"the haystack file {path} cannot be read: {error}") from error


class SentenceCosts:
    """Tokens each sentence adds to a passage, from one encoding per block of sentences.

    An estimate: what a tokenizer does at the seam of two sentences can differ by a token, so whoever
    uses it encodes the whole prompt once more to be sure.
    """

    def __init__(self, haystack: Haystack, model: Encoder):
        self._sentences = haystack.sentences
        self._model = model
        self._blocks: dict[int, list[int]] = {}

    def __getitem__(self, index: int) -> int:
        block, inside = divmod(index, _BLOCK)
        if block not in self._blocks:
            self._blocks[block] = self._count(self._sentences[block * _BLOCK : (block + 1) * _BLOCK])
        return self._blocks[block][inside]

    def _count(self, sentences: tuple[str, ...]) -> list[int]:
        """Tokens per sentence of one block; a token belongs to the sentence its last character is in."""
        starts, position = [], 0
        for sentence in sentences:
            starts.append(position)
            position += len(sentence) + 1
        counts = [0] * len(sentences)
        for start, stop in self._model.encode(" ".join(sentences)).offsets:
            if stop > start:
                counts[bisect_right(starts, stop - 1) - 1] += 1
        # A sentence can look free only if its characters merged into a neighbour's token.
        return [max(1, c) for c in counts]


class Window:
    """One trial's walk through a haystack, from its own start, around the end and back.

    Sentences that hold a word to avoid (the answer, the words of the needle) are passed over. A haystack
    that recycles goes on after a full round in a shuffled order; another one ends there.

    Args:
        haystack: The sentences.
        costs: Their token counts.
        start: Index of the first sentence.
        avoid: Words or phrases no sentence may contain, nor their regular plurals (see ``WordFinder``).
        seed: Of the shuffled rounds.
    """

    def __init__(self, haystack: Haystack, costs: SentenceCosts, *, start: int, avoid: tuple[str, ...], seed: str):
        self.haystack = haystack
        self.start = start
        self._costs = costs
        self._seed = seed
        self._avoid = WordFinder(avoid, forms=True)
        self._taken: list[tuple[int, int]] = []
        self._walk = self._indices()
        self._left_out: list[str] = []

    @property
    def left_out(self) -> tuple[str, ...]:
        """Sentences passed over so far because of a word to avoid."""
        return tuple(self._left_out)

    def at(self, k: int) -> tuple[int, int] | None:
        """``(sentence index, tokens)`` of the k-th usable sentence, or None past the end."""
        while len(self._taken) <= k:
            index = next(self._walk, None)
            if index is None:
                return None
            self._taken.append((index, self._costs[index]))
        return self._taken[k]

    def _indices(self) -> Iterator[int]:
        """Usable sentence indices in walking order."""
        n = len(self.haystack.sentences)
        usable = []
        for step in range(n):
            index = (self.start + step) % n
            sentence = self.haystack.sentences[index]
            if self._avoid.found_in(sentence):
                self._left_out.append(sentence)
            else:
                usable.append(index)
                yield index
        round_ = 1
        while self.haystack.recycles and usable:
            order = shuffled(usable, random.Random(f"{self._seed}/{round_}"))
            yield from order
            round_ += 1


def shuffled(items: Iterable[T], rng: random.Random) -> list[T]:
    """Fisher-Yates with integer draws alone, so every Python version gives the same order."""
    out = list(items)
    for i in range(len(out) - 1, 0, -1):
        j = below(rng, i + 1)
        out[i], out[j] = out[j], out[i]
    return out


def below(rng: random.Random, n: int) -> int:
    """A uniform integer in ``[0, n)`` from raw generator bits, by rejection."""
    bits = n.bit_length()
    value = rng.getrandbits(bits)
    while value >= n:
        value = rng.getrandbits(bits)
    return value
