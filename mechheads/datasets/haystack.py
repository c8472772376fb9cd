"""The prose that needles are hidden in: reading it, counting its tokens, walking through it."""

from __future__ import annotations

import hashlib
import random
import re
from bisect import bisect_right
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

from mechheads.errors import InvalidInput
from mechheads.trials import Encoder

T = TypeVar("T")

SHIPPED = "haystack.txt"
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
        source: ``"shipped"`` or the path it was read from.
        recycles: Whether sentences may come again, in a new order, once all have been used.
    """

    sentences: tuple[str, ...]
    source: str
    recycles: bool

    @property
    def hash(self) -> str:
        """SHA-256 over the sentences, hex, 16 characters."""
        return hashlib.sha256("\n".join(self.sentences).encode()).hexdigest()[:16]

    @classmethod
    def load(cls, path: str | Path | None) -> Haystack:
        """Read the shipped prose (``None``), a text file, or the ``.txt`` files of a folder.

        Raises:
            InvalidInput: If the path is absent, holds no text, or is not UTF-8.
        """
        if path is None:
            text = resources.files("mechheads.datasets").joinpath(SHIPPED).read_text(encoding="utf-8")
            return cls(tuple(split_sentences(text)), "shipped", True)
        path = Path(path)
        if path.is_dir():
            files = sorted(p for p in path.iterdir() if p.suffix.lower() == ".txt" and p.is_file())
            if not files:
                raise InvalidInput(f"the haystack folder {path} holds no .txt file; put some prose in it.")
        elif path.is_file():
            files = [path]
        else:
            raise InvalidInput(
                f"the haystack {path} does not exist; give a text file, a folder of .txt files, "
                "or None for the prose that comes with mechheads."
            )
        sentences = tuple(s for f in files for s in split_sentences(_read(f)))
        if not sentences:
            raise InvalidInput(f"the haystack {path} holds no text.")
        return cls(sentences, str(path), False)


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
        avoid: Words or phrases no sentence may contain (whole words, any case).
        seed: Of the shuffled rounds.
    """

    def __init__(self, haystack: Haystack, costs: SentenceCosts, *, start: int, avoid: tuple[str, ...], seed: str):
        self.haystack = haystack
        self.start = start
        self._costs = costs
        self._seed = seed
        self._avoid = word_pattern(avoid)
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
            if self._avoid.search(sentence):
                self._left_out.append(sentence)
            else:
                usable.append(index)
                yield index
        round_ = 1
        while self.haystack.recycles and usable:
            order = shuffled(usable, random.Random(f"{self._seed}/{round_}"))
            yield from order
            round_ += 1


def word_pattern(words: tuple[str, ...]) -> re.Pattern[str]:
    """Pattern that finds any of the words or phrases as whole words, in any case."""
    parts = [re.escape(w) for w in words if w]
    return re.compile(rf"(?<!\w)(?:{'|'.join(parts)})(?!\w)" if parts else r"(?!)", re.IGNORECASE)


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
