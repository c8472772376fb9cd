"""Did the text answer the question, and which tokens said so. Pure functions of text and token ids."""

from __future__ import annotations

import itertools
import re
import string
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

from mechheads.errors import InvalidInput

# Kana, ideographs and hangul: no spaces between words or, in Korean, words that inflect at the end.
_CJK_RANGES = (
    "\u1100-\u11ff\u3005\u3040-\u30ff\u31f0-\u31ff\u3400-\u4dbf\u4e00-\u9fff\uac00-\ud7af\uf900-\ufaff"
    "\U00020000-\U0003ffff"
)
_CJK = re.compile(f"[{_CJK_RANGES}]")
# A letter or digit that would go on a word: not one of a script without spaces ("\u7b54\u3048\u306fYuki\u3067\u3059").
_WORDLIKE = rf"[^\W{_CJK_RANGES}]"
_ARTICLES = frozenset({"a", "an", "the"})


class _WideTokenizer:
    """Words of any script; one token a character for CJK."""

    def tokenize(self, text: str) -> list[str]:
        """Lower-cased tokens of the text, without punctuation."""
        spaced: list[str] = []
        for char in unicodedata.normalize("NFKC", text).casefold():
            if _CJK.match(char):
                spaced.append(f" {char} ")
            else:  # marks are letters' vowels and accents in many scripts, though not \w
                spaced.append(char if unicodedata.category(char)[0] in "LNM" else " ")
        return "".join(spaced).split()


@lru_cache(maxsize=1)
def _default_tokenizer() -> Any:
    from rouge_score.tokenizers import DefaultTokenizer

    return DefaultTokenizer(use_stemmer=True)


def _rouge(kind: str, prediction: str, gold: str, cjk: bool) -> Any:
    """The rouge_score result of one kind, with the tokenizer that fits the gold answer."""
    from rouge_score.rouge_scorer import RougeScorer

    if not gold.strip():
        raise InvalidInput(f"the gold answer is {gold!r}; give the text that was to be found.")
    tokenizer = _default_tokenizer()
    if cjk and not tokenizer.tokenize(gold):
        tokenizer = _WideTokenizer()
    return RougeScorer([kind], tokenizer=tokenizer).score(gold, prediction)[kind]


def rouge1_recall(prediction: str, gold: str, *, cjk: bool = True) -> float:
    """Share of the gold answer's words that stand in the prediction.

    ROUGE-1 recall with stemming: ``sum over words of min(count in gold, count in prediction) / words in
    gold``. A trial passes the published gate if this is above 0.5.

    The published tokenizer knows only ``a-z`` and ``0-9``, so an answer in another script keeps no token and
    can never pass. With ``cjk=True`` such an answer (and only such a one) is cut into words of any script
    instead, and into single characters in Chinese, Japanese and Korean.

    Args:
        prediction: What the model said.
        gold: What it should have said.
        cjk: Use the fallback tokenizer where the published one leaves nothing of the gold answer.

    Returns:
        0 to 1; 0 if the gold answer has no word in either tokenizer.

    Raises:
        InvalidInput: If the gold answer is empty.
    """
    return float(_rouge("rouge1", prediction, gold, cjk).recall)


def rougeL_recall(prediction: str, gold: str, *, cjk: bool = True) -> float:
    """Longest common subsequence of words over the words of the gold answer, 0 to 1.

    Tokens and errors as in ``rouge1_recall``.
    """
    return float(_rouge("rougeL", prediction, gold, cjk).recall)


def rougeL_f(prediction: str, gold: str, *, cjk: bool = True) -> float:
    """Harmonic mean of ROUGE-L recall and precision, 0 to 1.

    It falls with the length of the prediction: a right answer in a full sentence scores low.
    Tokens and errors as in ``rouge1_recall``.
    """
    return float(_rouge("rougeL", prediction, gold, cjk).fmeasure)


def normalise(text: str) -> str:
    """Text without case, punctuation, articles and repeated spaces (the SQuAD rule, for any script).

    Articles stay if nothing else would.
    """
    folded = unicodedata.normalize("NFKC", text).casefold()
    bare = "".join(c for c in folded if c not in string.punctuation and not unicodedata.category(c).startswith("P"))
    words = bare.split()
    return " ".join([w for w in words if w not in _ARTICLES] or words)


def exact_match(prediction: str, gold: str) -> bool:
    """Whether both are the same text after ``normalise``.

    Raises:
        InvalidInput: If the gold answer is empty.
    """
    if not gold.strip():
        raise InvalidInput(f"the gold answer is {gold!r}; give the text that was to be found.")
    wanted = normalise(gold)
    # An answer of punctuation alone is compared as it stands.
    return normalise(prediction) == wanted if wanted else prediction.strip() == gold.strip()


def answer_f1(prediction: str, gold: str, *, cjk: bool = True) -> float:
    """Harmonic mean of precision and recall over words (the F1 of SQuAD and MuSiQue), 0 to 1.

    Words are those of ``normalise``, so case, punctuation and articles do not count. With ``c`` the words that both
    have, each as often as in the text that has fewer, ``precision = c / words in prediction``,
    ``recall = c / words in gold`` and ``F1 = 2 * precision * recall / (precision + recall)``; 0 where ``c`` is 0. An
    answer of punctuation alone has no words and is compared as it stands.

    Args:
        prediction: What the model said.
        gold: What it should have said.
        cjk: Count each character of Chinese, Japanese and Korean as a word, since no spaces part them.

    Raises:
        InvalidInput: If the gold answer is empty.
    """
    if not gold.strip():
        raise InvalidInput(f"the gold answer is {gold!r}; give the text that was to be found.")
    said, wanted = (Counter(_words(text, cjk)) for text in (prediction, gold))
    if not wanted:
        return float(prediction.strip() == gold.strip())
    common = (said & wanted).total()
    return 2 * common / (said.total() + wanted.total())  # the harmonic mean, without dividing by zero


def _words(text: str, cjk: bool) -> list[str]:
    """The words of a text after ``normalise``, each CJK character one of them if asked."""
    plain = normalise(text)
    return (_CJK.sub(lambda m: f" {m[0]} ", plain) if cjk else plain).split()


def best_over(measure: Callable[[str, str], float], prediction: str, golds: Sequence[str]) -> float:
    """The best a prediction gets over several forms of the gold answer.

    Args:
        measure: ``(prediction, gold)`` to a number that is higher if better, such as ``answer_f1``.
        prediction: What the model said.
        golds: The gold answer and its aliases.

    Raises:
        InvalidInput: If there is no gold answer, or the measure refuses one.
    """
    if not golds:
        raise InvalidInput("there is no gold answer; give at least one text that was to be found.")
    return max(float(measure(prediction, gold)) for gold in golds)


def contains_answer(prediction: str, gold: str) -> bool:
    """Whether the gold answer stands in the prediction as a run of whole words, in any case.

    ``5`` is not in ``15``, ``3.5`` or ``-5``; CJK text has no word borders, so in it and beside it any place counts.

    Raises:
        InvalidInput: If the gold answer is empty.
    """
    folded = unicodedata.normalize("NFKC", prediction).casefold()
    return re.search(_whole_words(gold), folded) is not None


def _whole_words(gold: str) -> str:
    """Pattern of the gold answer as a run of whole words, in folded text."""
    words = unicodedata.normalize("NFKC", gold).casefold().split()
    if not words:
        raise InvalidInput(f"the gold answer is {gold!r}; give the text that was to be found.")
    before = _border(words[0][0], f"(?<!{_WORDLIKE})", r"(?<!\d[.,])(?<!(?<!\w)[-\u2212])")
    after = _border(words[-1][-1], f"(?!{_WORDLIKE})", r"(?![.,]\d)")
    return before + r"\s+".join(map(re.escape, words)) + after


# A denial just before the answer, with at most two words between ("is not Yuki", "wasn't in Rome"), none of which
# takes the denial back ("not Katie but Yuki", "not only Yuki").
_DENIAL = re.compile(
    r"(?:\b(?:not|never|neither|nor|cannot)|n['\u2019]t)(?:\s+(?!(?:but|only|just|merely|simply)\b)[^\W\d_]+){0,2}"
    r"\s+[\"'\u201c\u2018(]?$"
)
_DENIAL_BEFORE_CJK = re.compile(
    "(?:\u4e0d\u662f|\u5e76\u975e|\u5e76\u4e0d\u662f|\u7edd\u975e|\u4e26\u975e)[\u300c\u201c]?$"
)
_DENIAL_AFTER_CJK = re.compile(
    "^[\u300d\u201d]?(?:\u3067\u306f|\u3058\u3083)(?:\u306a\u3044|\u306a\u304f|\u3042\u308a\u307e\u305b\u3093)"
)


def denies_answer(prediction: str, gold: str) -> bool:
    """Whether every place where the gold answer stands in the prediction denies it.

    ``"It is not Yuki, it is Katie"`` denies Yuki; ``"It is not Katie, it is Yuki"`` does not. Looked for just before
    the answer in the same clause (not, n't, never, neither, nor, cannot; in Chinese), and after it in Japanese;
    other ways of saying no are not seen.

    Raises:
        InvalidInput: If the gold answer is empty.
    """
    said = unicodedata.normalize("NFKC", prediction).casefold()
    places = list(re.finditer(_whole_words(gold), said))
    return bool(places) and all(_denied(said[: m.start()], said[m.end() :]) for m in places)


def _denied(before: str, after: str) -> bool:
    return bool(_DENIAL.search(before) or _DENIAL_BEFORE_CJK.search(before) or _DENIAL_AFTER_CJK.search(after))


def _border(edge: str, word: str, number: str) -> str:
    """What must hold beside the outermost character of an answer."""
    if _CJK.match(edge) or re.match(r"\W", edge):
        return ""
    return word + (number if edge.isdigit() else "")


def char_offsets(decode: Callable[[Sequence[int]], str], ids: Sequence[int]) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Text of some tokens, and the half-open character interval that each token had a part in.

    Decoded token by token, a character whose bytes are spread over several tokens (most scripts but Latin under
    a byte-level BPE) would come out as replacement characters. Here ever longer prefixes are decoded instead,
    and every token that carries a byte of a character overlaps it, so neighbours may share a character.

    Args:
        decode: Token ids to text.
        ids: The tokens.

    Returns:
        The whole text, and one ``(start, stop)`` into it per token; empty for a token that stands for no text.
    """
    full = decode(ids)
    offsets, done = [], 0  # done: characters complete before this token
    for i in range(len(ids)):
        prefix = decode(ids[: i + 1])
        complete = max(done, _common(prefix, full))
        # What does not agree with the whole is a character whose last bytes are still to come.
        open_end = not full.startswith(prefix)
        offsets.append((done, min(complete + open_end, len(full))))
        done = complete
    return full, tuple(offsets)


def _common(a: str, b: str) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def find_answer_tokens(
    generated_pieces: Sequence[str],
    generated_ids: Sequence[int],
    answer_ids_variants: Sequence[Sequence[int]],
    answer: str,
    *,
    offsets: Sequence[tuple[int, int]] | None = None,
) -> tuple[int, ...]:
    """Indices of the generated tokens that said the answer.

    First the earliest place where any tokenised form of the answer stands token for token (of several at
    the same place, the longest). Failing that, the first place where the answer stands, in any case, in the
    generated text; then every token that overlaps it, even in part.

    Args:
        generated_pieces: Decoded text of each generated token; together they make the generated text. With
            ``offsets`` the text may be cut in any way.
        generated_ids: Token ids, one per piece (one per offset, if offsets are given).
        answer_ids_variants: Token ids of the answer in each form it may take (with a leading space, ...).
        answer: The gold answer as text.
        offsets: The characters of the joined pieces that each token had a part in (``char_offsets``); needed
            where a token may hold part of a character. None: the tokens are the pieces.

    Returns:
        Rising indices into the generated tokens; empty if the answer was not said.

    Raises:
        InvalidInput: If the answer is empty, or pieces (or offsets) and ids differ in number.
    """
    if not answer.strip():
        raise InvalidInput(f"the gold answer is {answer!r}; give the text that was to be found.")
    what, given = ("pieces", generated_pieces) if offsets is None else ("offsets", offsets)
    if len(given) != len(generated_ids):
        raise InvalidInput(
            f"there are {len(given)} {what} but {len(generated_ids)} token ids; give one {what[:-1]} per token."
        )
    ids = list(generated_ids)
    variants = sorted((list(v) for v in answer_ids_variants if len(v)), key=len, reverse=True)
    for start in range(len(ids)):
        for variant in variants:
            if ids[start : start + len(variant)] == variant:
                return tuple(range(start, start + len(variant)))
    if offsets is None:
        ends = list(itertools.accumulate(map(len, generated_pieces)))
        offsets = list(zip([0, *ends], ends, strict=False))
    return _overlapping("".join(generated_pieces), offsets, answer)


def _overlapping(text: str, offsets: Sequence[tuple[int, int]], answer: str) -> tuple[int, ...]:
    """Indices of the tokens that overlap the first case-insensitive place of the answer."""
    # Folding may change a text's length (\u0130 gives two characters), so it is done one character at a time.
    folded = [char.casefold() for char in text]
    wanted = answer.strip().casefold()
    at = "".join(folded).find(wanted)
    if at < 0:
        return ()
    owner = [i for i, char in enumerate(folded) for _ in char]
    start, stop = owner[at], owner[at + len(wanted) - 1] + 1
    hit = [i for i, (a, b) in enumerate(offsets) if a < stop and b > start and a < b]
    return tuple(range(hit[0], hit[-1] + 1)) if hit else ()
