"""What heads answer, offsets, AUROC and intervals, against loops written apart from them and cases known by hand."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sps
from verdict_samples import TEXTS, made, noisy

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.stats import wilson
from mechheads.verdicts import accuracy, align, auroc, baseline_credit, credit, label_credit, offsets
from mechheads.verdicts.discrimination import auroc_intervals, auroc_parts
from mechheads.verdicts.resampling import group_codes, group_sums, interval, intervals

# -- made-up scores: few whole numbers, so that ties abound ---------------------------------------


@st.composite
def scored(draw: Any, *, width: int | None = None, holes: bool = True, least: int = 1) -> dict[str, Any]:
    """Arguments for ``made``; the scores themselves are made in the test."""
    n = draw(st.integers(least, 9))
    widest = width or draw(st.integers(2, 5))
    counts = [widest if width else draw(st.integers(2, widest)) for _ in range(n)]
    layers, heads = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    size = n * widest * layers * heads
    values = np.array(draw(st.lists(st.integers(-2, 2), min_size=size, max_size=size)), dtype=float)
    values = values.reshape(n, widest, layers, heads)
    for i, count in enumerate(counts):
        values[i, count:] = np.nan
    if holes and draw(st.booleans()):
        values[draw(st.integers(0, n - 1)), 0, 0, 0] = np.nan
    labels = [draw(st.integers(0, count - 1)) for count in counts]
    return {"values": values, "labels": labels, "candidates": [TEXTS[:count] for count in counts]}


def slow_credit(scores: CandidateScores, offset: np.ndarray | None = None) -> np.ndarray:
    out = np.full(scores.values.shape, np.nan)
    for t, c, layer, h in itertools.product(*map(range, scores.values.shape)):
        mine = [float(scores.values[t, i, layer, h]) for i in range(len(scores.candidates[t]))]
        if offset is not None:
            mine = [x - float(offset[i, layer, h]) for i, x in enumerate(mine)]
        if c < len(mine) and not any(map(math.isnan, mine)):
            out[t, c, layer, h] = (mine[c] == max(mine)) / mine.count(max(mine))
    return out


def slow_auroc(scores: CandidateScores, layer: int, head: int) -> float:
    """Every pair of a trial that has c as its answer and one that has not, for every c."""
    areas = []
    for c in range(scores.values.shape[1]):
        sides: tuple[list[float], list[float]] = ([], [])
        for t, texts in enumerate(scores.candidates):
            if c < len(texts):
                mine = [float(x) for x in scores.values[t, : len(texts), layer, head]]
                sides[int(scores.labels[t] != c)].append(round(mine[c] - sum(mine) / len(mine), 9))
        wins = [(a > b) + (a == b) / 2 for a in sides[0] for b in sides[1]]
        if wins:
            areas.append(sum(wins) / len(wins))
    missing = any(
        math.isnan(scores.values[t, i, layer, head])
        for t, texts in enumerate(scores.candidates)
        for i in range(len(texts))
    )
    return math.nan if missing or not areas else sum(areas) / len(areas)


# -- answers -------------------------------------------------------------------------------------


@given(scored())
@settings(max_examples=80, deadline=None)
def test_credit_equals_a_loop(case):
    scores = made(**case)
    got = credit(scores)
    np.testing.assert_allclose(got, slow_credit(scores), atol=1e-12)
    rows = np.arange(len(scores))
    np.testing.assert_array_equal(label_credit(scores), got[rows, scores.labels])
    np.testing.assert_array_equal(accuracy(scores), got[rows, scores.labels].mean(axis=0))


@given(scored(width=3, holes=False), st.lists(st.integers(-2, 2), min_size=3, max_size=3))
@settings(max_examples=40, deadline=None)
def test_credit_with_an_offset_equals_a_loop(case, taken):
    scores = made(**case)
    offset = np.broadcast_to(np.array(taken, dtype=float)[:, None, None], scores.values.shape[1:])
    np.testing.assert_allclose(credit(scores, offset), slow_credit(scores, offset), atol=1e-12)


def test_ties_share_and_a_head_that_lacks_one_score_has_no_answer():
    values = np.array([[1, 1, 0], [0, 2, 1], [2, 2, 2], [3, np.nan, 1]], dtype=float)[:, :, None, None]
    scores = made(values, [0, 1, 2, 0])
    np.testing.assert_allclose(credit(scores)[:3, :, 0, 0], [[0.5, 0.5, 0], [0, 1, 0], [1 / 3] * 3])
    assert np.isnan(credit(scores)[3]).all()
    np.testing.assert_allclose(label_credit(scores)[:3, 0, 0], [0.5, 1, 1 / 3])
    assert np.isnan(accuracy(scores)).all()
    assert accuracy(scores.take([0, 1, 2]))[0, 0] == pytest.approx((0.5 + 1 + 1 / 3) / 3)


@given(scored(), st.integers(-3, 3))
@settings(max_examples=40, deadline=None)
def test_a_constant_on_all_candidates_changes_nothing(case, shift):
    scores = made(**case)
    moved = replace(scores, values=scores.values + shift)
    np.testing.assert_array_equal(credit(moved), credit(scores))
    np.testing.assert_array_equal(auroc(moved), auroc(scores))


@given(scored(), st.randoms(use_true_random=False))
@settings(max_examples=40, deadline=None)
def test_the_order_of_trials_changes_nothing(case, random):
    scores = made(**case)
    order = list(range(len(scores)))
    random.shuffle(order)
    np.testing.assert_allclose(accuracy(scores.take(order)), accuracy(scores), atol=1e-12)
    np.testing.assert_allclose(auroc(scores.take(order)), auroc(scores), atol=1e-12)


@given(scored(width=3), st.permutations(range(3)))
@settings(max_examples=40, deadline=None)
def test_renaming_the_places_of_candidates_mirrors_everything(case, order):
    scores = made(**case)
    swapped = made(
        scores.values[:, order],
        [order.index(label) for label in scores.labels],
        candidates=[tuple(str(c[i]) for i in order) for c in scores.candidates],
    )
    np.testing.assert_array_equal(credit(swapped), credit(scores)[:, order])
    np.testing.assert_array_equal(label_credit(swapped), label_credit(scores))
    np.testing.assert_allclose(auroc(swapped), auroc(scores), atol=1e-12)


def test_the_models_own_answers_by_sum_and_by_token():
    scores = made(
        np.zeros((2, 2, 1, 1)),
        [0, 1],
        baseline=[[-4.0, -3.0], [-1.0, -1.0]],
        records=[{"candidate_tokens": [2, 1]}, {"candidate_tokens": [1, 1]}],
    )
    np.testing.assert_array_equal(baseline_credit(scores), [[0, 1], [0.5, 0.5]])
    np.testing.assert_array_equal(baseline_credit(scores, normalise="mean"), [[1, 0], [0.5, 0.5]])
    with pytest.raises(UnknownName, match=r"unknown normalisation 'max'\. .*Known: mean, sum\."):
        baseline_credit(scores, normalise="max")


@pytest.mark.parametrize("tokens", [None, [1], [1, 0], 3, ["a", "b"]])
def test_a_mean_over_tokens_needs_their_number(tokens):
    scores = made(np.zeros((1, 2, 1, 1)), [0], records=[{"candidate_tokens": tokens}])
    with pytest.raises(
        InvalidInput,
        match=r"record of trial 't0000' has candidate_tokens .*; expected 2 numbers of tokens, one a candidate\. "
        r"Without them use normalise='sum'\.",
    ):
        baseline_credit(scores, normalise="mean")


def test_the_models_answers_where_trials_have_other_numbers_of_candidates():
    values = np.zeros((2, 3, 1, 1))
    values[1, 2] = np.nan
    scores = made(values, [0, 1], candidates=[TEXTS[:3], TEXTS[:2]], baseline=[[-2, -3, -1], [-3, -2, np.nan]])
    np.testing.assert_array_equal(baseline_credit(scores), [[0, 0, 1], [0, 1, np.nan]])


# -- one order of candidates ---------------------------------------------------------------------


def test_aligning_moves_everything_that_belongs_to_a_candidate():
    values = np.arange(8, dtype=float).reshape(2, 2, 1, 2)
    scores = made(
        values,
        [0, 0],
        candidates=[(" a", " b"), (" b", " a")],
        baseline=[[-1, -2], [-3, -4]],
        records=[{"candidate_tokens": [1, 2]}, {"candidate_tokens": [2, 1]}],
    )
    got = align(scores)
    assert got.candidates == ((" a", " b"),) * 2 and got.labels.tolist() == [0, 1]
    np.testing.assert_array_equal(got.values, [values[0], values[1, ::-1]])
    assert got.baseline.tolist() == [[-1, -2], [-4, -3]]
    assert got.column("candidate_tokens") == [[1, 2], [1, 2]]
    np.testing.assert_array_equal(label_credit(got), label_credit(scores))
    assert align(scores, (" b", " a")).candidates == ((" b", " a"),) * 2
    assert align(got) is got


def test_aligning_leaves_alone_what_has_no_common_candidates():
    scores = made(np.zeros((2, 2, 1, 1)), [0, 1], candidates=[(" Ann", " Bob"), (" Eve", " Ann")])
    assert align(scores) is scores
    two = made(np.zeros((2, 2, 1, 1)), [0, 1])
    assert align(two, (" x", " y")) is two
    nobody = two.take([])
    assert align(nobody) is nobody


def test_auroc_sees_a_word_wherever_it_stands():
    """A head that always likes " a" has AUROC 0.5 by word, though by place it looks perfect."""
    values = np.array([[1, 0], [0, 1]] * 4, dtype=float)[:, :, None, None]
    scores = made(values, [0, 1] * 4, candidates=[(" a", " b"), (" b", " a")] * 4)
    assert accuracy(scores)[0, 0] == 1
    assert math.isnan(auroc(scores)[0, 0])  # " a" is right in every trial
    half = replace(scores, labels=np.array([0, 1, 1, 0] * 2))
    assert auroc(half)[0, 0] == 0.5


# -- offsets -------------------------------------------------------------------------------------


@given(scored(width=2, holes=False, least=3))
@settings(max_examples=60, deadline=None)
def test_a_median_offset_of_two_candidates_takes_off_the_median_margin(case):
    scores = made(**case)
    offset = offsets(scores, "median")
    margin = scores.values[:, 1].astype(float) - scores.values[:, 0]
    above = margin - np.median(margin, axis=0)
    want = np.where(above > 0, 1.0, np.where(above < 0, 0.0, 0.5))
    np.testing.assert_array_equal(credit(scores, offset)[:, 1], want)


def test_a_median_offset_equals_a_loop_and_leaves_auroc_alone():
    scores = noisy(31, width=4, shape=(2, 3))
    offset = offsets(scores, "median")
    assert offset is not None and offset.shape == (4, 2, 3)
    for c, layer, h in itertools.product(range(4), range(2), range(3)):
        away = [float(s[c] - s.mean()) for s in scores.values[:, :, layer, h].astype(float)]
        assert offset[c, layer, h] == pytest.approx(sorted(away)[15], abs=1e-12)
    moved = replace(scores, values=scores.values.astype(float) - offset)
    np.testing.assert_allclose(auroc(moved), auroc(scores), atol=1e-6)
    assert offsets(scores) is None


def test_offsets_are_refused_where_candidates_differ():
    values = np.zeros((2, 2, 1, 1))
    turned = made(values, [0, 1], candidates=[(" a", " b"), (" b", " a")])
    with pytest.raises(
        InvalidInput,
        match=r"trial 't0001' has the candidates \(' b', ' a'\), another \(' a', ' b'\): a median offset belongs to "
        r"one candidate, so they must stand in one order\. Bring them into it with "
        r"mechheads\.verdicts\.align\(scores\)\.",
    ):
        offsets(turned, "median")
    assert offsets(align(turned), "median") is not None
    other = made(values, [0, 1], candidates=[(" a", " b"), (" a", " c")])
    with pytest.raises(InvalidInput, match=r"all trials must have the same ones\. Use offset='none', or judge"):
        offsets(other, "median")
    ragged = np.zeros((2, 3, 1, 1))
    ragged[1, 2] = np.nan
    with pytest.raises(InvalidInput, match="all trials must have the same ones"):
        offsets(made(ragged, [0, 1], candidates=[TEXTS[:3], TEXTS[:2]]), "median")
    with pytest.raises(UnknownName, match=r"unknown calibration offset 'mean'\. .*Known: median, none\."):
        offsets(turned, "mean")
    with pytest.raises(InvalidInput, match="no calibration trials to take a median offset from"):
        offsets(turned.take([]), "median")


def test_an_offset_that_does_not_fit_is_refused():
    scores = noisy(5)
    with pytest.raises(
        InvalidInput, match=r"offset has shape \(2, 5, 4\); expected \(candidate, layer, head\), \(2, 4"
    ):
        credit(scores, np.zeros((2, 5, 4)))
    with pytest.raises(InvalidInput, match="offset holds an infinite number"):
        label_credit(scores, np.full((2, 4, 5), np.inf))
    with pytest.raises(InvalidInput, match=r"scores holds no trials; give at least one\."):
        accuracy(scores.take([]))
    assert np.isnan(credit(scores, np.where(np.arange(5) == 2, np.nan, np.zeros((2, 4, 5))))[..., 2]).all()


# -- AUROC ---------------------------------------------------------------------------------------


@given(scored())
@settings(max_examples=100, deadline=None)
def test_auroc_equals_counting_pairs(case):
    scores = made(**case)
    got = auroc(scores)
    for layer, head in itertools.product(range(scores.n_layers), range(scores.n_heads)):
        assert got[layer, head] == pytest.approx(slow_auroc(scores, layer, head), abs=1e-9, nan_ok=True)


def test_auroc_of_two_candidates_is_mann_whitney_of_the_margin():
    scores = noisy(83, planted={(1, 2): 0.8}, shape=(2, 4))
    margin = scores.values[:, 1].astype(float) - scores.values[:, 0]
    got = auroc(scores)
    for layer, head in itertools.product(range(2), range(4)):
        x = margin[:, layer, head]
        u: Any = sps.mannwhitneyu(x[scores.labels == 1], x[scores.labels == 0])
        n = (scores.labels == 1).sum() * (scores.labels == 0).sum()
        assert got[layer, head] == pytest.approx(u.statistic / n)


def test_auroc_is_blind_to_a_preference_that_ruins_accuracy():
    labels = np.array([0, 1] * 50)
    values = np.zeros((100, 2, 1, 1))
    values[:, 1, 0, 0] = 10 + labels
    scores = made(values, labels)
    assert accuracy(scores)[0, 0] == 0.5 and auroc(scores)[0, 0] == 1.0
    assert accuracy(scores, offsets(scores, "median"))[0, 0] == 1.0


def test_auroc_intervals_are_those_of_resampled_rankings():
    """The first-order bootstrap against one that ranks every sample anew."""
    scores = noisy(150, planted={(0, 1): 0.8, (1, 0): 0.95}, shape=(2, 2), width=3, group_size=3)
    low, high = auroc_intervals(scores, n_boot=2000, seed=1)
    rng = np.random.default_rng(5)
    groups = [np.flatnonzero(np.array(scores.groups) == g) for g in sorted(set(scores.groups))]
    flat, samples = scores.values.reshape(150, 3, 4), []
    for _ in range(600):
        places = np.concatenate([groups[i] for i in rng.integers(0, len(groups), len(groups))])
        samples.append(auroc_parts(flat[places], scores.labels[places], scores.n_candidates[places])[0])
    want = np.quantile(samples, [0.025, 0.975], axis=0).reshape(2, 2, 2)
    np.testing.assert_allclose(low, want[0], atol=0.03)
    np.testing.assert_allclose(high, want[1], atol=0.03)
    assert (low < auroc(scores)).all() and (auroc(scores) < high).all()


def test_auroc_of_a_head_that_separates_all_trials_is_not_certain():
    labels = np.array([0, 1] * 20 + [0] * 20)
    values = np.zeros((60, 2, 1, 2))
    values[:, 1, 0, 0], values[:, 1, 0, 1] = labels, -labels
    low, high = auroc_intervals(made(values, labels))
    rule = wilson(20, 20)
    assert (low[0, 0], high[0, 0]) == (rule.low, 1.0)
    assert (low[0, 1], high[0, 1]) == pytest.approx((0.0, 1 - rule.low))


# -- intervals -----------------------------------------------------------------------------------


def test_group_sums_equal_a_loop():
    rng = np.random.default_rng(0)
    groups = [f"g{i}" for i in rng.integers(0, 7, 40)]
    x = rng.normal(size=(40, 3))
    codes = group_codes(groups)
    names = sorted(set(groups))
    assert [names[c] for c in codes] == groups
    want = [sum(x[i] for i in range(40) if groups[i] == name) for name in names]
    np.testing.assert_allclose(group_sums(x, codes), want)


def coverage(x: np.ndarray, truth: float, groups: list[str]) -> float:
    low, high = intervals(x, groups, n_boot=1000)
    return float(((low <= truth) & (truth <= high)).mean())


@pytest.mark.parametrize(("n", "p"), [(40, 0.5), (200, 0.7), (400, 0.95)])
def test_intervals_hold_the_truth_as_often_as_they_say(n, p):
    x = (np.random.default_rng(n).random((n, 1500)) < p).astype(float)
    assert 0.925 <= coverage(x, p, [str(i) for i in range(n)]) <= 0.98


def test_intervals_hold_the_truth_with_groups_only_if_they_know_of_them():
    rng = np.random.default_rng(3)
    chance = np.repeat(rng.beta(1, 1, size=(60, 1500)), 5, axis=0)
    x = (rng.random(chance.shape) < chance).astype(float)
    groups = [str(i // 5) for i in range(300)]
    assert 0.925 <= coverage(x, 0.5, groups) <= 0.975
    assert coverage(x, 0.5, [str(i) for i in range(300)]) < 0.85


def test_intervals_of_few_groups_are_wide_enough():
    """Percentiles alone would hold the truth in 89 of 100 with eight groups."""
    x = np.random.default_rng(6).normal(size=(8, 4000))
    low, high = intervals(x, [str(i) for i in range(8)], n_boot=1000, low=-100.0, high=100.0)
    assert 0.93 <= ((low <= 0) & (high >= 0)).mean() <= 0.965


def test_auroc_intervals_hold_the_truth():
    rng = np.random.default_rng(4)
    labels = np.arange(200) % 2
    values = np.zeros((200, 2, 1, 800))
    values[:, 1, 0] = rng.normal(size=(200, 800)) + labels[:, None]
    low, high = auroc_intervals(made(values, labels), n_boot=1000)
    truth = sps.norm.cdf(1 / math.sqrt(2))
    assert 0.92 <= ((low <= truth) & (truth <= high)).mean() <= 0.975


def test_intervals_without_spread_fall_back_on_wilson():
    groups = [str(i) for i in range(20)]
    x = np.stack([np.ones(20), np.zeros(20), np.full(20, 0.5)], axis=1)
    low, high = intervals(x, groups)
    rule = wilson(20, 20)
    assert (low[0], high[0]) == (rule.low, 1.0)
    assert (low[1], high[1]) == pytest.approx((0.0, 1 - rule.low))
    assert (low[2], high[2]) == (0.5, 0.5)
    low, high = intervals(np.stack([np.zeros(20), np.ones(20)], axis=1), groups, low=-1.0)
    assert (low[0], high[0]) == pytest.approx((rule.low - 1, 1 - rule.low))
    assert (low[1], high[1]) == pytest.approx((2 * rule.low - 1, 1.0))
    pairs, _ = intervals(x, [str(i // 2) for i in range(20)])
    assert pairs[0] == wilson(10, 10).low


def test_intervals_know_when_they_cannot_be():
    low, high = intervals(np.ones((4, 1)), ["a"] * 4)
    assert np.isnan(low).all() and np.isnan(high).all()
    x = np.random.default_rng(0).random((30, 2))
    x[3, 1] = np.nan
    low, high = intervals(x, [str(i) for i in range(30)])
    assert np.isfinite([low[0], high[0]]).all() and np.isnan([low[1], high[1]]).all()
    with pytest.raises(InvalidInput, match=r"level is 1\.5; a confidence level lies between 0 and 1"):
        intervals(x, ["a"] * 30, level=1.5)
    with pytest.raises(InvalidInput, match="there are no trials to take an interval over"):
        interval(np.array([]), [])


def test_intervals_come_out_alike_in_blocks_and_for_one(monkeypatch):
    x = np.random.default_rng(0).random((50, 30))
    groups = [str(i // 2) for i in range(50)]
    whole = intervals(x, groups, seed=3)
    monkeypatch.setattr("mechheads.verdicts.resampling.BLOCK", 7 * 2000)
    np.testing.assert_allclose(intervals(x, groups, seed=3), whole, atol=1e-6)
    one = interval(x[:, 4], groups, seed=3)
    assert (one.low, one.high) == pytest.approx((whole[0][4], whole[1][4]), abs=1e-6)
    assert one.estimate == pytest.approx(x[:, 4].mean()) and one.n == 50


def test_what_an_offset_leaves_of_a_constant_margin_is_a_tie() -> None:
    """Heads of the first layer see the candidate and the statement's last token alone: only rounding differs."""
    rng = np.random.default_rng(5)
    values = np.zeros((60, 2, 1, 2))
    values[:, 0] = 14.4
    values[:, :, 0, 0] += rng.normal(0, 1e-6, (60, 2)) * 14.4
    values[:, :, 0, 1] = rng.normal(0, 1, (60, 2))
    scores = CandidateScores(
        values=values, baseline=np.zeros((60, 2)), labels=np.arange(60) % 2, candidates=[("a", "b")] * 60,
        trial_ids=[str(i) for i in range(60)],
    )  # fmt: skip
    taken = offsets(scores, "median")
    assert (credit(scores, taken)[:, :, 0, 0] == 0.5).all() and auroc(scores)[0, 0] == 0.5
    assert set(np.unique(credit(scores, taken)[:, :, 0, 1])) == {0.0, 1.0} and auroc(scores)[0, 1] != 0.5
