"""Intervals and tests agree with scipy and with counting by hand."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from scipy import stats as sps

from mechheads import stats
from mechheads.errors import InvalidInput

numbers = st.floats(-1e3, 1e3, allow_nan=False, width=32)
vectors = hnp.arrays(np.float64, st.integers(2, 8), elements=numbers)
pairs = st.integers(1, 8).flatmap(lambda n: st.tuples(*[hnp.arrays(np.float64, n, elements=numbers)] * 2))


def test_interval_prints_for_a_reader():
    assert str(stats.Interval(0.812, 0.731, 0.879, 0.95, 40)) == "0.81 [0.73, 0.88]"
    assert str(stats.Interval(0.5, math.nan, math.nan, 0.95, 1)) == "0.50 [no interval, n=1]"


def test_bootstrap_weights_are_counts_of_n_uniform_draws():
    counts = stats.bootstrap_weights(5, 4000, np.random.default_rng(0))
    assert counts.shape == (4000, 5)
    assert (counts.sum(axis=1) == 5).all() and (counts >= 0).all() and (counts == counts.round()).all()
    assert np.abs(counts.mean(axis=0) - 1).max() < 0.06
    assert abs(counts.var() - 0.8) < 0.05  # multinomial: n * (1/n) * (1 - 1/n)


def test_bootstrap_mean_agrees_with_scipy():
    x = np.random.default_rng(1).gamma(2.0, size=60)
    ours = stats.bootstrap_mean(x, n_boot=20000, seed=3)
    theirs = sps.bootstrap((x,), np.mean, n_resamples=20000, method="percentile", rng=4).confidence_interval
    assert ours.estimate == pytest.approx(x.mean())
    assert ours.low == pytest.approx(theirs.low, abs=0.02)
    assert ours.high == pytest.approx(theirs.high, abs=0.02)
    assert ours.n == 60 and ours.level == 0.95


def test_weighted_bootstrap_agrees_with_a_loop_over_resampled_trials():
    rng = np.random.default_rng(2)
    x, w = rng.normal(size=12), rng.integers(1, 6, size=12).astype(float)
    counts = stats.bootstrap_weights(12, 300, np.random.default_rng(7))
    means = []
    for row in counts:
        drawn = [i for i, c in enumerate(row) for _ in range(int(c))]
        means.append(sum(w[i] * x[i] for i in drawn) / sum(w[i] for i in drawn))
    got = stats.bootstrap_mean(x, w, n_boot=300, seed=7)
    assert (got.low, got.high) == pytest.approx(tuple(np.quantile(means, [0.025, 0.975])))
    assert got.estimate == pytest.approx(np.average(x, weights=w))


@given(vectors, st.integers(0, 1000))
@settings(max_examples=40)
def test_interval_of_a_symmetric_sample_holds_its_centre_and_stays_inside_the_data(x, seed):
    x = np.concatenate([x, -x])
    got = stats.bootstrap_mean(x, n_boot=500, seed=seed)
    slack = 1e-9 * (1 + np.abs(x).max())
    assert got.low - slack <= got.estimate <= got.high + slack
    assert x.min() - slack <= got.low <= got.high <= x.max() + slack


@given(vectors, numbers)
@settings(max_examples=40)
def test_bootstrap_moves_with_the_data(x, shift):
    a, b = stats.bootstrap_mean(x, n_boot=100), stats.bootstrap_mean(x + shift, n_boot=100)
    for name in ("estimate", "low", "high"):
        assert getattr(b, name) == pytest.approx(getattr(a, name) + shift, abs=1e-6)


def test_a_wider_level_gives_a_wider_interval_and_seeds_repeat():
    x = np.random.default_rng(0).normal(size=30)
    narrow, wide = stats.bootstrap_mean(x, level=0.5), stats.bootstrap_mean(x, level=0.99)
    assert wide.low < narrow.low < narrow.high < wide.high
    assert stats.bootstrap_mean(x, seed=5) == stats.bootstrap_mean(x, seed=5)
    assert stats.bootstrap_mean(x, seed=5) != stats.bootstrap_mean(x, seed=6)


def test_interval_covers_the_truth_about_as_often_as_it_says():
    rng = np.random.default_rng(0)
    hits = 0
    for seed in range(300):
        got = stats.bootstrap_mean(rng.normal(size=50), n_boot=300, seed=seed, level=0.9)
        hits += got.low <= 0 <= got.high
    assert 0.84 <= hits / 300 <= 0.95


def test_one_trial_has_no_interval():
    got = stats.bootstrap_mean([0.5])
    assert got.estimate == 0.5 and math.isnan(got.low) and math.isnan(got.high) and got.n == 1


def test_percentiles_ignore_nan_column_by_column():
    samples = np.array([[1.0, np.nan, 1.0], [2.0, np.nan, np.nan], [3.0, np.nan, 5.0]])
    low, high = stats.percentiles(samples, 0.5)
    assert low[0] == 1.5 and high[0] == 2.5
    assert np.isnan(low[1]) and np.isnan(high[1])
    assert low[2] == 2.0 and high[2] == 4.0


@given(pairs)
@settings(max_examples=60)
def test_permutation_p_equals_enumeration_by_hand(pair):
    a, b = pair
    d = a - b
    seen = abs(d.sum()) * (1 - 1e-9)
    slack = 1e-12 * np.abs(d).sum()
    sums = [
        abs(sum(s * x for s, x in zip(signs, d, strict=True))) for signs in itertools.product([1, -1], repeat=len(d))
    ]
    got = stats.paired_permutation(a, b)
    least = np.mean([s >= abs(d.sum()) + slack for s in sums])
    assert least <= got <= np.mean([s >= seen - slack for s in sums])


@given(pairs, st.randoms())
@settings(max_examples=40)
def test_permutation_p_ignores_trial_order_and_which_is_first(pair, random):
    a, b = pair
    order = list(range(len(a)))
    random.shuffle(order)
    p = stats.paired_permutation(a, b)
    assert p == stats.paired_permutation(b, a)
    assert p == pytest.approx(stats.paired_permutation(a[order], b[order]))
    assert 0 < p <= 1


def test_permutation_p_agrees_with_scipy():
    rng = np.random.default_rng(0)
    for n, n_perm in ((10, 10000), (40, 20000)):
        a, b = rng.normal(0.3, size=n), rng.normal(size=n)
        theirs = sps.permutation_test(
            (a, b), lambda x, y: np.mean(x - y), permutation_type="samples", n_resamples=20000, rng=1
        ).pvalue
        tolerance = 0.01 if n > 13 else 1e-9  # drawn, or enumerated by both
        assert stats.paired_permutation(a, b, n_perm=n_perm) == pytest.approx(theirs, abs=tolerance)


def test_permutation_p_at_the_extremes():
    assert stats.paired_permutation([1.0] * 5, [1.0] * 5) == 1.0
    assert stats.paired_permutation([1.0] * 5, [0.0] * 5) == 2 / 32
    assert stats.paired_permutation([1.0] * 40, [0.0] * 40, n_perm=999) == 1 / 1000


def test_paired_bootstrap_is_narrower_than_unpaired_when_trials_differ_more_than_conditions():
    rng = np.random.default_rng(0)
    base = rng.normal(size=30) * 10
    got = stats.paired_bootstrap(base + 0.5 + 0.1 * rng.normal(size=30), base)
    assert got.estimate == pytest.approx(0.5, abs=0.1)
    assert 0.4 < got.low < got.high < 0.6


@pytest.mark.parametrize(("successes", "n", "level"), [(0, 10, 0.95), (7, 10, 0.95), (10, 10, 0.9), (30, 61, 0.99)])
def test_wilson_agrees_with_scipy(successes, n, level):
    ours = stats.wilson(successes, n, level=level)
    theirs = sps.binomtest(successes, n).proportion_ci(level, method="wilson")
    assert (ours.low, ours.high) == pytest.approx((theirs.low, theirs.high), abs=1e-12)
    assert ours.estimate == successes / n


@given(st.integers(1, 50).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_proportion_and_mirrors(case):
    successes, n = case
    got, mirror = stats.wilson(successes, n), stats.wilson(n - successes, n)
    assert 0 <= got.low <= got.estimate <= got.high <= 1
    assert got.low == pytest.approx(1 - mirror.high)


def test_rank_agreement_agrees_with_scipy_on_jointly_finite_entries():
    rng = np.random.default_rng(0)
    a = rng.normal(size=(4, 5))
    b = a + rng.normal(size=(4, 5))
    a[0, 0], b[1, 1] = np.nan, np.nan
    both = np.isfinite(a) & np.isfinite(b)
    got = stats.rank_agreement(a, b)
    assert got.n == 18
    assert got.spearman == pytest.approx(sps.spearmanr(a[both], b[both])[0])
    assert got.kendall == pytest.approx(sps.kendalltau(a[both], b[both])[0])


@given(hnp.arrays(np.float64, 6, elements=st.integers(-20, 20), unique=True))
def test_rank_agreement_sees_only_the_order(x):
    same, turned = stats.rank_agreement(x, np.exp(x / 10)), stats.rank_agreement(x, -x)
    assert same.spearman == pytest.approx(1) and same.kendall == pytest.approx(1)
    assert turned.spearman == pytest.approx(-1) and turned.kendall == pytest.approx(-1)


def test_topk_overlap_counts_and_breaks_ties_by_place():
    a = np.array([[5.0, 4.0, np.nan], [3.0, 0.0, -1.0]])
    b = np.array([[5.0, -1.0, 9.0], [3.0, 4.0, 0.0]])
    assert stats.topk_overlap(a, b, 3) == stats.TopKOverlap(count=1, jaccard=1 / 5, k=3)
    assert stats.topk_overlap(a, a, 5).jaccard == 1
    flat = np.zeros((2, 3))
    assert stats.topk_overlap(flat, np.array([[1.0, 1, 0], [0, 0, 0]]), 2).count == 2


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: stats.bootstrap_mean([]), "values is empty"),
        (lambda: stats.bootstrap_mean([[1.0]]), r"values has shape \(1, 1\); expected one number per trial"),
        (lambda: stats.bootstrap_mean([1.0, math.nan]), r"values\[1\] is nan; drop undefined"),
        (lambda: stats.bootstrap_mean([1.0, math.inf]), r"values\[1\] is inf"),
        (lambda: stats.bootstrap_mean([1.0, 2.0], [1.0]), "2 values but 1 weights"),
        (lambda: stats.bootstrap_mean([1.0, 2.0], [1.0, -1.0]), "weights must be >= 0 and not all zero"),
        (lambda: stats.bootstrap_mean([1.0, 2.0], [0.0, 0.0]), "weights must be >= 0 and not all zero"),
        (lambda: stats.bootstrap_mean([1.0, 2.0], level=95.0), "level is 95.0; a confidence level"),
        (lambda: stats.bootstrap_mean([1.0, 2.0], n_boot=0), "n_boot is 0; it must be a whole number >= 1"),
        (lambda: stats.paired_bootstrap([1.0], [1.0, 2.0]), "a has 1 trials and b has 2"),
        (lambda: stats.paired_permutation([1.0, math.nan], [1.0, 2.0]), r"a\[1\] is nan"),
        (lambda: stats.paired_permutation([], []), "a is empty"),
        (lambda: stats.paired_permutation([1.0], [1.0], n_perm=0), "n_perm is 0"),
        (lambda: stats.wilson(0, 0), "n is 0"),
        (lambda: stats.wilson(3, 2), "successes is 3 but there are only 2 trials"),
        (lambda: stats.wilson(-1, 2), "successes is -1"),
        (lambda: stats.rank_agreement([1.0, 2.0], [1.0]), "must score the same heads"),
        (lambda: stats.rank_agreement([1.0, math.nan], [1.0, 2.0]), "only 1 entries are finite in both"),
        (lambda: stats.rank_agreement([1.0, 1.0], [1.0, 2.0]), r"every entry of a is 1\.0; a constant map"),
        (lambda: stats.topk_overlap([1.0, math.nan], [1.0, 2.0], 2), "k is 2, but only 1 entries of a"),
        (lambda: stats.topk_overlap([1.0], [1.0], 0), "k is 0"),
    ],
)
def test_unfit_input_is_refused_by_name(call, message):
    with pytest.raises(InvalidInput, match=message):
        call()


# -- several tests -------------------------------------------------------------------------------


def test_holm_by_hand() -> None:
    np.testing.assert_allclose(stats.holm([0.01, 0.04, 0.03, 0.005]), [0.03, 0.06, 0.06, 0.02])
    np.testing.assert_allclose(stats.holm([0.5, 0.9]), [1.0, 1.0])
    np.testing.assert_allclose(stats.holm([0.2]), [0.2])


@given(st.lists(st.floats(0, 1), min_size=1, max_size=12))
def test_holm_rejects_what_its_steps_reject(p: list[float]) -> None:
    corrected, level, rejected = stats.holm(p), 0.05, set()
    for step, i in enumerate(sorted(range(len(p)), key=lambda i: p[i])):
        if p[i] * (len(p) - step) > level:
            break
        rejected.add(i)
    assert {i for i, q in enumerate(corrected) if q <= level} == rejected
    assert (corrected >= np.array(p)).all()


@pytest.mark.parametrize("bad", [[], [0.1, 1.2], [-0.1], [float("nan")]])
def test_holm_refuses_what_is_no_p_value(bad: list[float]) -> None:
    with pytest.raises(InvalidInput, match="p_values"):
        stats.holm(bad)
