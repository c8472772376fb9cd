"""Finding a word or phrase in a text however it is spelt there, and words too alike to stand in both splits."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Sequence

# Kana, ideographs, hangul, and the scripts of South-East Asia: words run on without spaces, or inflect at their end.
_UNSPACED = re.compile(
    "[\u0e00-\u0eff\u1000-\u109f\u1780-\u17ff\u3040-\u30ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff]"
)
# Invisible, yet of no category of their own: the grapheme joiner and the variation selectors.
_INVISIBLE = re.compile("[\u034f\ufe00-\ufe0f]")
_ALIKE = str.maketrans({"\u2018": "'", "\u2019": "'", "\u02bc": "'", "\u2010": "-", "\u2011": "-"})
# A letter or digit. Not ``\w``: an underscore is how plain text writes italics, so it ends a word.
_LETTER = r"[^\W_]"
_GAP = r"[\s_]+"


def canonical(text: str) -> str:
    """Text in NFKC without soft hyphens, zero-width and other invisible characters; quotes and hyphens made plain."""
    if text.isascii():
        return text
    return unicodedata.normalize("NFKC", "".join(c for c in text if _seen(c))).translate(_ALIKE)


def folded(text: str) -> str:
    """``canonical`` text without case."""
    return unicodedata.normalize("NFKC", canonical(text).casefold())


def _seen(char: str) -> bool:
    return unicodedata.category(char) != "Cf" and not _INVISIBLE.match(char)


class WordFinder:
    """Finds words and phrases as whole words, in any case and any encoding of their characters.

    No letter or digit may stand beside them; an underscore may (``_zulu_`` holds ``zulu``), and in scripts without
    spaces anything may. Texts are compared after ``folded``: ``café`` is found whether its accent is a character of
    its own or not, and with a soft hyphen inside.

    Args:
        words: What is looked for; empty ones are passed over.
        forms: Find simple English plurals of a word as well (``oaks``, ``oaks'``, ``boxes``, ``ponies``, ``knives``).
            ``oak's`` is always found, since an apostrophe ends a word; irregular plurals (``mice``) and the singular
            of a plural never are.
    """

    def __init__(self, words: Iterable[str], *, forms: bool = False):
        parts = [_whole_word(w, forms=forms) for w in map(_bare, words) if w]
        self._pattern = re.compile("|".join(parts) if parts else r"(?!)")

    def found_in(self, text: str) -> bool:
        """Whether any of the words stands in a text."""
        return self._pattern.search(folded(text)) is not None

    def count(self, text: str) -> int:
        """How often they do."""
        return sum(1 for _ in self._pattern.finditer(folded(text)))


def _bare(word: str) -> str:
    """A word folded, without the marks of italics around it."""
    plain = folded(word).strip()
    return plain.strip("_*").strip() or plain


def _whole_word(word: str, *, forms: bool = False) -> str:
    """Regular expression of a word or phrase with no letter or digit beside it (unspaced scripts: anywhere)."""
    before = "" if _UNSPACED.match(word[0]) else f"(?<!{_LETTER})"
    after = "" if _UNSPACED.match(word[-1]) else f"(?!{_LETTER})"
    *first, last = word.split()
    ending = _with_plurals(last) if forms and last[-1].isalpha() and not _UNSPACED.match(last[-1]) else re.escape(last)
    return before + _GAP.join([*map(re.escape, first), ending]) + after


def _with_plurals(word: str) -> str:
    """Regular expression of a word and its regular plurals."""
    either = [f"{re.escape(word)}(?:e?s)?"]
    for ending, plural in (("y", "ies"), ("fe", "ves"), ("f", "ves")):
        if word.endswith(ending) and len(word) > len(ending):
            either.append(re.escape(word.removesuffix(ending) + plural))
    return f"(?:{'|'.join(either)})"


def occurrences(text: str, word: str) -> list[tuple[int, int]]:
    """Characters ``[start, stop)`` of a word or phrase wherever it stands in a text as whole words.

    Its case must be the same. How characters are encoded, what white space parts the words, and invisible characters
    do not matter, so ``text[start:stop]`` may be spelt otherwise than the word.
    """
    wanted = canonical(word).strip()
    if not wanted:
        return []
    plain, at = _aligned(text)
    return [(at[m.start()][0], at[m.end() - 1][1]) for m in re.finditer(_whole_word(wanted), plain)]


def _aligned(text: str) -> tuple[str, list[tuple[int, int]]]:
    """``canonical(text)``, and for each of its characters the characters of the text it came from."""
    if text.isascii():
        return text, [(i, i + 1) for i in range(len(text))]
    clusters: list[tuple[str, int, int]] = []
    for i, char in enumerate(text):
        if not _seen(char):
            continue
        if clusters and _joins(clusters[-1][0], char):
            before, start, _ = clusters[-1]
            clusters[-1] = (before + char, start, i + 1)
        else:
            clusters.append((char, i, i + 1))
    made = [
        (unicodedata.normalize("NFKC", cluster).translate(_ALIKE), start, stop) for cluster, start, stop in clusters
    ]
    return "".join(plain for plain, _, _ in made), [(start, stop) for plain, start, stop in made for _ in plain]


def _joins(before: str, char: str) -> bool:
    """Whether a character changes with what stands before it: an accent, or a vowel of hangul."""
    nfkc = unicodedata.normalize
    alone = nfkc("NFKC", char)
    return bool(unicodedata.combining(alone[0])) or nfkc("NFKC", before + char) != nfkc("NFKC", before) + alone


def names_alike(names: Sequence[str], *, what: str = "word") -> list[list[str]]:
    """Keys for ``grouped``, one list a name, such that two names share a key if one cannot be told from the other.

    That is if they are the same after ``folded``, or one contains the other as whole words (``Ann`` and ``Ann Lee``):
    an answer that names the one then half names the other.

    Args:
        names: In any order, repeats allowed.
        what: Beginning of the keys, so that keys of different kinds do not meet.
    """
    plain = [" ".join(_bare(name).split()) for name in names]
    pieces = {name: set(re.findall(f"{_LETTER}+", name)) for name in plain}
    known = [name for name in pieces if name]
    holding: dict[str, list[str]] = {}
    for name in known:
        for piece in pieces[name]:
            holding.setdefault(piece, []).append(name)
    keys: dict[str, list[str]] = {name: [f"{what} {name}"] for name in pieces}
    for name in known:
        # Only a name that shares its rarest piece can contain it; one of no letters, or run on, may be anywhere.
        run_on = not pieces[name] or _UNSPACED.search(name)
        near = known if run_on else min((holding[p] for p in pieces[name]), key=len)
        pattern = re.compile(_whole_word(name))
        for other in near:
            if other != name and pattern.search(other):
                keys[other].append(f"{what} {name}")
    return [keys[name] for name in plain]


def shared_names(left: Iterable[str], right: Iterable[str]) -> list[str]:
    """Names of the left that are, contain, or are contained in one of the right, in order."""
    mine, theirs = list(dict.fromkeys(left)), list(dict.fromkeys(right))
    keys = names_alike([*mine, *theirs])
    others = keys[len(mine) :]
    whole, inside = {each[0] for each in others}, {key for each in others for key in each}
    # The first key of a name is its own, the others are those of names it contains.
    return [n for n, each in zip(mine, keys[: len(mine)], strict=True) if each[0] in inside or whole & set(each)]
