"""Answers are recognised as published, and in scripts the published tokenizer does not know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rouge_score.rouge_scorer import RougeScorer

from mechheads import text
from mechheads.capture import TrialCapture, _Collector
from mechheads.decode import Decoded
from mechheads.errors import InvalidInput
from mechheads.trials import Trial

ascii_text = st.text("abcde 019.,'", min_size=1, max_size=30).filter(lambda s: any(c.isalnum() for c in s))


@given(ascii_text, ascii_text)
def test_rouge_equals_the_published_scorer(prediction, gold):
    theirs = RougeScorer(["rouge1", "rougeL"], use_stemmer=True).score(gold, prediction)
    assert text.rouge1_recall(prediction, gold) == theirs["rouge1"].recall
    assert text.rougeL_recall(prediction, gold) == theirs["rougeL"].recall
    assert text.rougeL_f(prediction, gold) == theirs["rougeL"].fmeasure


@pytest.mark.parametrize(
    ("prediction", "gold", "recall"),
    [
        ("The password is marigold.", "marigold", 1.0),
        ("Two cats", "cat", 1.0),  # stemmed
        ("Okoro", "Thandiwe Okoro", 0.5),
        ("It is not Yuki, it is Katie", "Yuki", 1.0),  # the published gate passes this; exact_match does not
        ("", "7492", 0.0),
        ("7493", "7492", 0.0),
        ("one one", "one", 1.0),
        ("one", "one one", 0.5),
    ],
)
def test_rouge1_recall_by_hand(prediction, gold, recall):
    assert text.rouge1_recall(prediction, gold) == recall


def test_a_full_sentence_keeps_its_recall_and_loses_its_f():
    said = "The character who has been to Dresden is Yuki according to the book"
    assert text.rougeL_recall(said, "Yuki") == 1.0
    assert text.rougeL_f(said, "Yuki") == pytest.approx(2 / 14)


@pytest.mark.parametrize(
    ("prediction", "gold", "recall"),
    [
        ("答えは東京です", "東京", 1.0),
        ("京都です", "東京", 0.5),
        ("ｶﾀｶﾅ", "カタカナ", 1.0),
        ("정답은 서울입니다", "서울", 1.0),
        ("Это Москва.", "москва", 1.0),
        ("Это Тверь.", "Москва", 0.0),
        ("हिन्दी है", "हिन्दी", 1.0),
        ("हिमालय", "हिन्दी", 0.0),  # shares letters, not the word
    ],
)
def test_other_scripts_pass_with_the_fallback_and_never_without(prediction, gold, recall):
    assert text.rouge1_recall(prediction, gold) == recall
    assert text.rouge1_recall(prediction, gold, cjk=False) == 0.0


def test_the_fallback_leaves_answers_the_published_tokenizer_can_read():
    # "2023" is what the published gate reads of this answer, and the default must agree with it.
    assert text.rouge1_recall("2023", "2023年") == text.rouge1_recall("2023", "2023年", cjk=False) == 1.0


@pytest.mark.parametrize(
    ("prediction", "gold", "same"),
    [
        ("The Cat.", "cat", True),
        ("  an  old cat ", "Old Cat", True),
        ("the cat sat", "cat", False),
        ("“Oslo”", "Oslo", True),
        ("東京。", "東京", True),
        ("the", "a", False),  # nothing but articles: they stay
        ("The", "the", True),
        ("?", "!", False),
        ("!", " ! ", True),
        ("", "cat", False),
    ],
)
def test_exact_match(prediction, gold, same):
    assert text.exact_match(prediction, gold) is same


@given(st.text(min_size=1, max_size=20).filter(str.strip))
def test_a_text_matches_itself(gold):
    assert text.exact_match(gold, gold)
    assert text.contains_answer(gold, gold)
    assert text.contains_answer(f"so: {gold} !", gold)


@pytest.mark.parametrize(
    ("prediction", "gold", "there"),
    [
        ("It is new  york, of course", "New York", True),
        ("It is Newark", "New", False),
        ("the code is 4711.", "4711", True),
        ("47110", "4711", False),
        ("14711", "4711", False),
        ("3.5", "5", False),
        ("5.3", "5", False),
        ("1,500", "500", False),
        ("it is 5, or so", "5", True),
        ("-5", "5", False),
        ("between 3-5", "5", True),
        ("-5", "-5", True),
        ("5", "-5", False),
        ("costs $5", "$5", True),
        ("costs $50", "$5", False),
        ("答えは東京です", "東京", True),
        ("", "x", False),
        ("a.b", "axb", False),
        ("york new", "New York", False),
    ],
)
def test_contains_answer(prediction, gold, there):
    assert text.contains_answer(prediction, gold) is there


def find(pieces, ids, variants, answer):
    return text.find_answer_tokens(pieces, ids, variants, answer)


def test_answer_tokens_by_exact_match():
    pieces, ids = ["It", " is", " Lis", "bon", ".", " Lis", "bon"], [1, 2, 30, 40, 5, 30, 40]
    assert find(pieces, ids, [[31, 40], [30, 40]], "Lisbon") == (2, 3)


def test_exact_match_comes_before_an_earlier_substring():
    pieces, ids = ["lis", "bon", " or", " Lis", "bon"], [7, 8, 9, 30, 40]
    assert find(pieces, ids, [[30, 40]], "Lisbon") == (3, 4)


def test_earliest_exact_match_and_of_those_the_longest():
    pieces, ids = [" 7", "4", "9", " 7"], [1, 2, 3, 1]
    assert find(pieces, ids, [[1], [1, 2, 3], []], "749") == (0, 1, 2)


def test_substring_takes_every_token_that_overlaps():
    pieces = ["The", " pass", "word", " mari", "gold", ".</"]
    assert find(pieces, list(range(6)), [[99]], "MARIGOLD") == (3, 4)
    assert find(pieces, list(range(6)), [], "ssword ma") == (1, 2, 3)


def test_empty_pieces_inside_the_answer_belong_to_it_and_outside_do_not():
    # Byte tokens of one character decode to nothing until the last of them.
    assert find(["", "a", "", "é", "", "x"], list(range(6)), [], "aé") == (1, 2, 3)


def test_folding_that_changes_length_keeps_the_tokens_straight():
    assert find(["İİ", " Straße", " x"], [1, 2, 3], [], "STRASSE") == (1,)
    assert find(["İİ", " Straße", " x"], [1, 2, 3], [], "x") == (2,)


def test_no_answer_gives_no_tokens():
    assert find(["The", " end"], [1, 2], [[3]], "Lisbon") == ()
    assert find([], [], [[3]], "Lisbon") == ()


@given(st.lists(st.text("abAB ", max_size=3), max_size=8), st.text("abAB", min_size=1, max_size=4))
def test_found_tokens_cover_the_answer_and_no_more(pieces, answer):
    found = find(pieces, list(range(len(pieces))), [], answer)
    joined = "".join(pieces).lower()
    assert bool(found) == (answer.lower() in joined)
    if found:
        assert found == tuple(range(found[0], found[-1] + 1))
        covered = [pieces[i] for i in found]
        assert answer.lower() in "".join(covered).lower()
        assert answer.lower() not in "".join(covered[:-1]).lower()
        start = joined.find(answer.lower())
        assert len("".join(pieces[: found[0]])) <= start < len("".join(pieces[: found[0] + 1]))


@pytest.mark.parametrize("function", [text.rouge1_recall, text.rougeL_f, text.exact_match, text.contains_answer])
def test_an_empty_gold_answer_is_refused(function):
    with pytest.raises(InvalidInput, match="the gold answer is ' '; give the text that was to be found"):
        function("something", " ")


def test_find_answer_tokens_refuses_what_does_not_fit():
    with pytest.raises(InvalidInput, match="2 pieces but 1 token ids"):
        find(["a", "b"], [1], [], "a")
    with pytest.raises(InvalidInput, match="the gold answer is ''"):
        find(["a"], [1], [], "")


TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\ufffd"), min_size=1, max_size=12)


@given(TEXTS, st.data())
def test_offsets_of_tokens_that_cut_through_characters(whole, data):
    """A tokenizer of arbitrary bytes: a token overlaps exactly the characters it holds a byte of."""
    raw = whole.encode()
    cuts = sorted(data.draw(st.sets(st.integers(1, len(raw)), max_size=len(raw))) | {len(raw)})
    edges = list(zip([0, *cuts], cuts, strict=False))

    def decode(ids):
        return b"".join(raw[a:b] for a, b in (edges[i] for i in ids)).decode(errors="replace")

    found, offsets = text.char_offsets(decode, list(range(len(edges))))
    assert found == whole
    owner = [i for i, char in enumerate(whole) for _ in char.encode()]
    for (a, b), (start, stop) in zip(edges, offsets, strict=True):
        assert set(range(start, stop)) == set(owner[a:b])


def test_offsets_where_one_open_character_spoils_the_whole_run_of_bytes():
    """Byte-fallback decoders show a replacement character for every byte until all are there."""
    raw = "東京".encode()

    def decode(ids):
        try:
            return bytes(raw[i] for i in ids).decode()
        except UnicodeDecodeError:
            return "\ufffd" * len(ids)

    assert text.char_offsets(decode, range(6)) == ("東京", ((0, 1),) * 3 + ((1, 2),) * 3)


def test_offsets_of_tokens_without_text_and_of_an_answer_cut_short():
    assert text.char_offsets(lambda ids: "".join("ab"[i] if i < 2 else "" for i in ids), [0, 2, 1]) == (
        "ab", ((0, 1), (1, 1), (1, 2)),
    )  # fmt: skip
    raw = "x東".encode()[:-1]
    assert text.char_offsets(lambda ids: bytes(raw[i] for i in ids).decode(errors="replace"), range(3))[0] == "x\ufffd"


def test_answer_found_by_offsets_where_tokens_share_a_character():
    offsets = [(0, 2), (1, 2), (2, 3), (3, 4)]
    assert text.find_answer_tokens([" 東京。"], [1, 2, 3, 4], [[9]], "東京", offsets=offsets) == (0, 1, 2)
    assert text.find_answer_tokens([" 東京。"], [1, 2, 3, 4], [[2, 3]], "東京", offsets=offsets) == (1, 2)
    with pytest.raises(InvalidInput, match="1 offsets but 2 token ids; give one offset per token"):
        text.find_answer_tokens(["ab"], [1, 2], [], "a", offsets=[(0, 2)])


def test_a_letter_that_folds_to_two_shifts_nothing():
    assert find(["İ", "İ", "stan", "bul", " x"], range(5), [], "İSTANBUL") == (1, 2, 3)
    assert find(["İİİ", " stop"], [1, 2], [], "stop") == (1,)


ANSWERS = ["東京", "Москва", "Ελλάδα", "हिन्दी", "서울", "İstanbul", "Łódź", "القاهرة", "🦉 owl", "Lisbon"]


@pytest.mark.smollm2
@pytest.mark.parametrize("answer", ANSWERS)
@pytest.mark.parametrize("frame", ["{}", "It is {}.", '"{}"', "é{}é"])
def test_answers_of_any_script_have_answer_steps(smollm2_model, answer, frame):
    said = frame.format(answer)
    tokens = smollm2_model.tokenizer(said, add_special_tokens=False)["input_ids"]
    trial = Trial(id="t", tokens=[5, 6], answer=answer)
    nothing = _Collector(smollm2_model, frozenset(), [[5, 6]])
    steps = TrialCapture(smollm2_model, trial, Decoded(tokens=tokens), said, nothing, 0).answer_steps
    assert steps == tuple(range(steps[0], steps[-1] + 1))
    raw = [smollm2_model.tokenizer.convert_ids_to_tokens(t) for t in tokens]
    # One byte-level character a byte: the tokens found hold all bytes of the answer, and none could be spared.
    at = len(said[: said.index(answer)].encode())
    ends = [sum(map(len, raw[: i + 1])) for i in range(len(raw))]
    assert steps == tuple(i for i, end in enumerate(ends) if end > at and end - len(raw[i]) < at + len(answer.encode()))
