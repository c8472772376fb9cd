"""Text trials: windows cut from running text, for perplexity."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mechheads.datasets import hub_files as hubs
from mechheads.datasets.build import check_common, check_context, sizes_of
from mechheads.datasets.haystack import Haystack, HaystackSource, shuffled
from mechheads.datasets.sources import cut, grouped, read_text
from mechheads.errors import InvalidInput
from mechheads.provenance import content_hash
from mechheads.trials import Encoder, Trial, TrialSet

# WikiText writes a heading as " = Title = ", one "=" more for each level, on a line of its own.
_HEADING = re.compile(r"[ \t]*((?:=[ \t]+)+)(\S.*?)[ \t]+((?:=[ \t]*)+)")
_ENOUGH = 8  # so many times the windows asked for are cut before more documents are read
_PLAIN = (".txt", ".text", ".md", ".raw", ".tokens", "")


@dataclass(frozen=True)
class _Document:
    """Running text that belongs together: a file, or an article of one.

    Attributes:
        name: File or title, without a folder.
        text: Without headings.
    """

    name: str
    text: str


@dataclass(frozen=True)
class _Window:
    """Tokens of one document.

    Attributes:
        document: Its name.
        place: Which of the document's windows it is.
        tokens: Ids, special tokens at the beginning included.
        start: First character in the document.
        stop: After its last character.
    """

    document: str
    place: int
    tokens: tuple[int, ...]
    start: int
    stop: int


def text_windows(
    model: Encoder,
    source: HaystackSource = None,
    *,
    n: int = 20,
    length: int = 256,
    unscored: int = 1,
    seed: int = 0,
    split: int | float | None = 0.5,
) -> TrialSet:
    """Trials that are windows of running text, of which the tokens themselves are predicted (perplexity).

    A document's tokens are cut, from its beginning, into windows of the same length that share no token; what is left
    at its end is not used. Where the tokenizer begins a text with special tokens (BOS), every window begins with them
    and they count in its length. Lines that are WikiText headings (`` = Title = ``) are dropped, and a heading of the
    first level begins another document, so no window runs from one article into the next; other oddities of the text
    (WikiText's ``@-@`` and spaced punctuation) stay as they are and cost the model what they cost.

    Args:
        model: A model, or anything with ``encode``.
        source: A UTF-8 text file, a folder, a hub name, a ``Haystack``, or None for the prose that comes with
            mechheads, as in ``needles``.
        n: Number of windows.
        length: Tokens of each.
        unscored: Tokens at the beginning of a window that only serve as context. 1 is the least, since nothing predicts
            the first; more is written as the span ``scored`` over the rest.
        seed: Which windows are drawn.
        split: Calibration share; see ``needles``. Windows of one document go into one split, or, where the source is
            one document, any window into either (``options["split_by"]``). None marks none.

    Returns:
        Trials with ``meta["document"]``, ``start`` and ``stop`` (its characters there), without answer or candidates.

    Raises:
        InvalidInput: If a number is out of range, the length is over the model's limit, the source cannot be read, or
            it gives fewer windows than asked for.
    """
    check_common(n, seed, split)
    _check_lengths(length, unscored)
    check_context("text", model, length, None)
    documents, name = _documents(source)
    rng = random.Random(f"mechheads/text/{seed}")
    windows = _cut_windows(model, documents, length, _ENOUGH * n, rng, name)
    by_document = len({w.document for w in windows}) > 1
    unit, sizes = f"windows of {length} tokens", sizes_of(n, split)
    if by_document:
        chosen = cut(grouped([[w.document] for w in windows]), sizes, rng, what=name, unit=unit)
    elif n > len(windows):
        raise InvalidInput(f"{name} has {len(windows)} {unit}, too few for n={n}; use n={len(windows)} at most.")
    else:
        order = shuffled(range(len(windows)), rng)[:n]
        chosen = [order[: sizes[0]], order[sizes[0] :]][: len(sizes)]
    marks = ("calibration", "test") if split is not None else (None,)
    drawn = shuffled([(windows[i], mark) for part, mark in zip(chosen, marks, strict=True) for i in part], rng)
    spans = {"scored": (unscored, length)} if unscored > 1 else {}
    trials = [
        Trial(
            id=f"text-{i:04d}",
            tokens=window.tokens,
            spans=spans,
            split=mark,
            meta={"kind": "text", "document": window.document, "start": window.start, "stop": window.stop},
        )
        for i, (window, mark) in enumerate(drawn)
    ]
    options = {
        "kind": "text",
        "source": name,
        "source_hash": content_hash([d.text for d in documents]),
        "n": n,
        "length": length,
        "unscored": unscored,
        "seed": seed,
        "split": split,
        "split_by": "document" if by_document else "window",
    }
    return TrialSet(trials, name="text", options=options)


def _check_lengths(length: Any, unscored: Any) -> None:
    if isinstance(length, bool) or not isinstance(length, int) or length < 2:
        raise InvalidInput(f"length={length!r}: give a whole number of tokens of 2 or more, such as 256.")
    if isinstance(unscored, bool) or not isinstance(unscored, int) or not 1 <= unscored < length:
        raise InvalidInput(
            f"unscored={unscored!r}: give a whole number of tokens from 1 to {length - 1}, so that some of the "
            f"length={length} are scored."
        )


def _documents(source: HaystackSource) -> tuple[list[_Document], str]:
    """The documents of a source, and its name."""
    if source is None or isinstance(source, Haystack):
        prose = Haystack.load(source)
        return [_Document(prose.source, " ".join(prose.sentences))], prose.source
    path, name = Path(str(source)), str(source)
    if hubs.is_hub(source):
        path = hubs.of(source).fetch()
    files = sorted(path.glob("*.txt")) if path.is_dir() else [path]
    if not files or not files[0].is_file() or files[0].suffix.lower() not in _PLAIN:
        # JSON Lines, deeper folders and what is missing: read, or refused, as a haystack is.
        prose = Haystack.load(source)
        return [_Document(Path(name).name, " ".join(prose.sentences))], name
    documents = [d for file in files for d in _articles(read_text(file, f"text file {file}"), file.name)]
    if not documents:
        raise InvalidInput(f"the text {name} holds nothing but white space and headings.")
    return documents, name


def _articles(text: str, name: str) -> list[_Document]:
    """One document, or one for each heading of the first level; headings are left out."""
    parts: list[tuple[str, list[str]]] = [(name, [])]
    for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n"):
        heading = _HEADING.fullmatch(line)
        if heading is None or heading[1].count("=") != heading[3].count("="):
            parts[-1][1].append(line)
        elif heading[1].count("=") == 1:
            parts.append((f"{name}: {heading[2]}", []))
    made = [(title, "\n".join(lines).strip()) for title, lines in parts]
    seen: dict[str, int] = {}
    documents = []
    for title, body in made:
        if body:
            seen[title] = seen.get(title, 0) + 1
            documents.append(_Document(title if seen[title] == 1 else f"{title} ({seen[title]})", body))
    return documents


def _cut_windows(
    model: Encoder, documents: Sequence[_Document], length: int, enough: int, rng: random.Random, name: str
) -> list[_Window]:
    """Windows of the documents, in a seeded order of documents, until there are plenty of several."""
    windows: list[_Window] = []
    for document in shuffled(documents, rng):
        if len(windows) >= enough and len({w.document for w in windows}) > 1:
            break
        encoding = model.encode(document.text)
        # Special tokens stand for no text; a tokenizer that ends a text with one would end a window with it.
        real = [i for i, (a, b) in enumerate(encoding.offsets) if b > a]
        if not real:
            continue
        before = encoding.tokens[: real[0]]
        size = length - len(before)
        if size < 1:
            raise InvalidInput(
                f"length={length}: this tokenizer begins a text with {len(before)} special tokens, so use at least "
                f"length={len(before) + 1}."
            )
        body = range(real[0], real[-1] + 1)
        for place, at in enumerate(range(body.start, body.stop - size + 1, size)):
            tokens = (*before, *encoding.tokens[at : at + size])
            inside = encoding.offsets[at : at + size]
            windows.append(_Window(document.name, place, tokens, inside[0][0], inside[-1][1]))
    if not windows:
        raise InvalidInput(
            f"the text {name} has no document of {length} tokens, so no window of length={length} can be cut; use a "
            "longer text or a smaller length."
        )
    return windows
