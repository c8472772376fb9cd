"""Agreement of score maps, against loops written apart from it and against cases whose answer is known."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats as sps

from mechheads.agreement import (
    agreement,
    by_kv_group,
    consensus,
    dissociation,
    kv_coverage,
    kv_ranking,
    selectivity,
    split_half,
    trials_needed,
)
from mechheads.agreement.rank_rows import clear_top, kendall_rows, ranked, spearman_rows, top_share_rows
from mechheads.agreement.resampling import draw_counts, shifted_interval, trial_groups, weighted_means, widening
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.scores import HeadScores, SweepResult
from mechheads.stats import rank_agreement, spearman_brown, topk_overlap


def make(values: Any, ids: Sequence[str] | str = "t", *, method: str = "m", **fields: Any) -> HeadScores:
    values = np.asarray(values, dtype=np.float32)
    n = len(values)
    ids = [f"{ids}{i}" for i in range(n)] if isinstance(ids, str) else ids
    fields = {"kept": np.ones(n, dtype=bool), "weights": np.ones(n)} | fields
    return HeadScores(method=method, values=values, trial_ids=ids, **fields)


def noisy(true: np.ndarray, n: int, *, noise: float = 1.0, seed: int = 0, ids: str = "t", **fields: Any) -> HeadScores:
    rng = np.random.default_rng([seed, 1])  # not the stream that the truth is drawn from
    return make(true + noise * rng.normal(size=(n, *true.shape)), ids, **fields)


def truth(layers: int = 5, heads: int = 8, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=(layers, heads))


# -- rank statistics of many rows ----------------------------------------------------------------

maps = st.integers(2, 24).flatmap(
    lambda n: st.tuples(
        *(st.lists(st.integers(-3, 3) | st.floats(-5, 5, width=32), min_size=n, max_size=n) for _ in range(2)),
        st.lists(st.booleans(), min_size=n, max_size=n),
    )
)


def slow_tau(x: list[float], y: list[float]) -> float:
    concordant = discordant = in_x = in_y = 0
    for i, j in itertools.combinations(range(len(x)), 2):
        a, b = np.sign(x[i] - x[j]), np.sign(y[i] - y[j])
        concordant += a * b > 0
        discordant += a * b < 0
        in_x += a != 0
        in_y += b != 0
    return (concordant - discordant) / math.sqrt(in_x * in_y) if in_x and in_y else math.nan


def slow_ranks(x: list[float]) -> list[float]:
    return [sum(other < value for other in x) + (sum(other == value for other in x) + 1) / 2 for value in x]


@given(maps)
@settings(max_examples=150, deadline=None)
def test_row_correlations_equal_loops(case):
    x, y, hole = (np.array(part, dtype=float) for part in case)
    x[hole > 0], y[hole > 0] = np.nan, np.nan
    a, b = ranked(np.stack([x, -x])), ranked(np.stack([y, y]))
    rho, tau = spearman_rows(a, b), kendall_rows(a, b)
    left, right = x[hole == 0].tolist(), y[hole == 0].tolist()
    expected = slow_tau(left, right) if len(left) > 1 else math.nan
    np.testing.assert_allclose(tau, [expected, -expected], atol=1e-12)
    if math.isnan(expected):
        assert np.isnan(rho).all()
    else:
        r, s = slow_ranks(left), slow_ranks(right)
        pearson = float(np.corrcoef(r, s)[0, 1])
        np.testing.assert_allclose(rho, [pearson, -pearson], atol=1e-9)


@pytest.mark.parametrize("n", [2, 3, 64, 65, 200, 1000])
def test_kendall_counts_inversions_at_any_width(n):
    rng = np.random.default_rng(n)
    x, y = rng.normal(size=(2, 3, n))
    tau = kendall_rows(ranked(x), ranked(y))
    expected: list[Any] = [sps.kendalltau(*pair) for pair in zip(x, y, strict=True)]
    assert tau == pytest.approx([one.statistic for one in expected], abs=1e-12)


@given(maps, st.integers(1, 8))
@settings(max_examples=100, deadline=None)
def test_top_shares_are_the_mean_over_all_ways_to_break_ties(case, k):
    x, _, hole = (np.array(part, dtype=float) for part in case)
    x = np.where(hole > 0, np.nan, np.round(x))
    share = top_share_rows(ranked(x[None]), k)[0]
    finite = x[np.isfinite(x)]
    if k > len(finite):
        assert np.isnan(share).all()
        return
    last = sorted(finite, reverse=True)[k - 1]
    above, tied = (finite > last).sum(), (finite == last).sum()
    for value, got in zip(x, share, strict=True):
        want = 0.0 if math.isnan(value) or value < last else 1.0 if value > last else (k - above) / tied
        assert got == pytest.approx(want)
    clear = clear_top(x, k)
    assert clear.tolist() == [s == pytest.approx(1.0) for s in share]


# -- resampling ----------------------------------------------------------------------------------


def test_weighted_means_are_the_pooled_scores_of_the_drawn_trials():
    rng = np.random.default_rng(0)
    values = rng.normal(size=(6, 2, 3))
    values[:, 1, 2] = np.nan
    values[2:, 0, 1] = np.nan
    kept = np.array([True, True, False, True, True, True])
    for pooling in ("step", "trial"):
        scores = make(values, kept=kept, weights=np.array([1.0, 4, 9, 2, 3, 5]), pooling=pooling)
        draws = [[0, 0, 1, 3, 4], [2, 3, 4, 4, 4]]
        counts = np.array([[draw.count(i) for i in range(5)] for draw in draws], dtype=float)
        got = weighted_means(scores, counts)
        where = np.flatnonzero(kept)
        for row, draw in zip(got, draws, strict=True):
            for head in range(6):
                total = weight = 0.0
                for i in draw:
                    value = scores.values[where[i]].ravel()[head]
                    w = scores.weights[where[i]] if pooling == "step" else 1.0
                    if not np.isnan(value):
                        total, weight = total + w * float(value), weight + w
                assert row[head] == pytest.approx(total / weight if weight else math.nan, nan_ok=True)


def test_methods_on_the_same_trials_share_their_draws():
    a, b = noisy(truth(), 6), noisy(truth(), 6, seed=1)
    own = noisy(truth(), 6, seed=2, ids="own")
    weights = make(truth()[None], ["weights"])
    part = make(b.values[:4], [f"t{i}" for i in (5, 4, 3, 2)], kept=np.array([True, True, False, True]))
    maps = {"own": own, "a": a, "w": weights, "b": b, "part": part}
    assert trial_groups(maps) == [["own"], ["a", "b", "part"]]
    counts = draw_counts(maps, 50, 3)
    assert counts["w"] is None
    np.testing.assert_array_equal(counts["a"], counts["b"])
    a_counts, part_counts, own_counts = counts["a"], counts["part"], counts["own"]
    assert a_counts is not None and part_counts is not None and own_counts is not None
    np.testing.assert_array_equal(part_counts, a_counts[:, [5, 4, 2]])
    assert not np.array_equal(own_counts, a_counts)
    assert (a_counts.sum(axis=1) == 6).all()
    alone = draw_counts({"b": b}, 50, 3)["b"]
    np.testing.assert_array_equal(alone, counts["b"])  # what else is compared changes nothing


def test_trials_of_a_chain_of_methods_are_one_group():
    a = make(np.zeros((2, 1, 2)), ["x", "y"])
    b = make(np.zeros((2, 1, 2)), ["z", "w"])
    c = make(np.zeros((2, 1, 2)), ["y", "z"])
    assert trial_groups({"a": a, "b": b, "c": c}) == [["a", "b", "c"]]


def test_interval_stands_at_the_estimate_and_is_widened():
    samples = np.linspace(0.2, 0.4, 1001)
    low, high = shifted_interval(0.6, samples, 0.9, 10, low=0.0, high=1.0)
    half = 0.09 * math.sqrt(10 / 9) * sps.t.ppf(0.95, 9) / sps.norm.ppf(0.95)
    assert (low, high) == (pytest.approx(0.6 - half), pytest.approx(0.6 + half))
    assert shifted_interval(0.95, samples, 0.9, 10, low=0.0, high=1.0)[1] == 1.0
    assert all(math.isnan(x) for x in shifted_interval(math.nan, samples, 0.9, 10, low=0.0, high=1.0))
    assert all(math.isnan(x) for x in shifted_interval(0.5, samples[:1], 0.9, 10, low=0.0, high=1.0))
    low, high = shifted_interval(0.6, samples, 0.9, 10, low=-1.0, high=1.0, fisher=True)
    assert -1 < low < 0.6 < high < 1 and 0.6 - low > high - 0.6  # a correlation has more room below
    assert widening(15, 0.95) == pytest.approx(1.133, abs=1e-3)
    assert widening(10_000, 0.95) == pytest.approx(1, abs=1e-3)


# -- agreement -----------------------------------------------------------------------------------


def test_agreement_equals_the_plain_statistics_of_the_pooled_maps():
    rng = np.random.default_rng(5)
    maps = {}
    for name in ("a", "b", "c"):
        values = rng.normal(size=(7, 4, 5))
        values[:, 0, int(rng.integers(5))] = np.nan
        maps[name] = make(values, weights=rng.integers(1, 5, size=7).astype(float), kept=rng.random(7) < 0.8)
    result = agreement(maps, k=(3, 6), n_boot=20)
    assert len(result.frame) == 3 * (2 + 2 * 2)
    for a, b in itertools.combinations(maps, 2):
        x, y = maps[a].mean(), maps[b].mean()
        both = np.isfinite(x) & np.isfinite(y)
        plain = rank_agreement(x, y)
        assert result.pair(a, b)["value"] == pytest.approx(plain.spearman)
        assert result.pair(b, a, "kendall")["value"] == pytest.approx(plain.kendall)
        for k in (3, 6):
            shared = topk_overlap(np.where(both, x, np.nan), np.where(both, y, np.nan), k)
            row = result.pair(a, b, "overlap", k)
            assert row["value"] == pytest.approx(shared.count)
            assert row["expected"] == pytest.approx(k * k / both.sum())
            assert row["n_heads"] == both.sum()
            assert result.pair(a, b, "jaccard", k)["value"] == pytest.approx(shared.jaccard)
            assert row["n_trials_shared"] == (maps[a].kept & maps[b].kept).sum()


def test_bootstrap_equals_a_loop_over_samples():
    maps = {"a": noisy(truth(), 6), "b": noisy(truth(), 6, seed=1), "w": make(truth(seed=4)[None], ["weights"])}
    result = agreement(maps, k=4, n_boot=40, seed=7)
    counts = draw_counts(maps, 40, 7)
    for a, b in itertools.combinations(maps, 2):
        rho, tau, shared = [], [], []
        for i in range(40):
            sample = {}
            for name in (a, b):
                drawn = counts[name]
                values = maps[name].values.astype(float)
                sample[name] = np.average(values, axis=0, weights=None if drawn is None else drawn[i])
            plain = rank_agreement(sample[a], sample[b])
            rho.append(plain.spearman)
            tau.append(plain.kendall)
            shared.append(float(topk_overlap(sample[a], sample[b], 4).count))
        for statistic, k, samples, greatest in (
            ("spearman", None, rho, 1.0),
            ("kendall", None, tau, 1.0),
            ("overlap", 4, shared, 4.0),
        ):
            row = result.pair(a, b, statistic, k)
            least = 0.0 if k else -1.0
            ends = shifted_interval(
                row["value"], np.array(samples), 0.95, 6, low=least, high=greatest, fisher=k is None
            )
            assert (row["ci_low"], row["ci_high"]) == pytest.approx(ends)
            assert row["ci_low"] <= row["value"] <= row["ci_high"]


def test_identical_reversed_and_independent_maps():
    one = noisy(truth(10, 20), 8)
    other = noisy(truth(10, 20, seed=9), 8, seed=9, ids="u")
    maps = {"one": one, "same": one, "reversed": make(-one.values), "other": other}
    result = agreement(maps, k=20, n_boot=200)
    for statistic in ("spearman", "kendall"):
        row = result.pair("one", "same", statistic)
        assert (row["value"], row["ci_low"], row["ci_high"]) == (pytest.approx(1), pytest.approx(1), pytest.approx(1))
        row = result.pair("one", "reversed", statistic)
        assert row["value"] == row["ci_low"] == row["ci_high"] == pytest.approx(-1)
        assert abs(result.pair("one", "other", statistic)["value"]) < 0.2
    assert result.pair("one", "same", "overlap", 20)["value"] == 20
    assert result.pair("one", "same", "jaccard", 20)["ci_low"] == 1
    assert result.pair("one", "reversed", "overlap", 20)["value"] == 0
    assert result.pair("one", "other", "overlap", 20)["expected"] == pytest.approx(2.0)


def test_expected_overlap_is_the_mean_over_random_rankings():
    rng = np.random.default_rng(0)
    shared = [
        float(agreement({"a": make(a), "b": make(b)}, k=5, n_boot=1).pair("a", "b", "overlap", 5)["value"])
        for a, b in rng.normal(size=(300, 2, 1, 4, 5))
    ]
    assert np.mean(shared) == pytest.approx(5 * 5 / 20, abs=0.15)


@pytest.mark.parametrize("shared", [False, True])
def test_intervals_hold_the_expected_agreement_as_often_as_they_say(shared):
    rng = np.random.default_rng(3)
    a = truth(6, 10, seed=1)
    b = 0.7 * a + 0.5 * truth(6, 10, seed=2)
    values, ends = [], []
    for i in range(60):
        noise = rng.normal(size=(2, 12, 6, 10))
        if shared:  # the same trials: most of the noise is common to both
            noise[1] = 0.8 * noise[0] + 0.6 * noise[1]
        maps = {"a": make(a + 1.5 * noise[0]), "b": make(b + 1.5 * noise[1], "t" if shared else "u")}
        row = agreement(maps, k=5, n_boot=200, seed=i, statistics=("spearman",)).pair("a", "b")
        assert row["n_trials_shared"] == (12 if shared else 0)
        values.append(row["value"])
        ends.append((row["ci_low"], row["ci_high"]))
    held = np.mean([low <= np.mean(values) <= high for low, high in ends])
    assert 0.85 <= held <= 1.0
    widths = np.mean([high - low for low, high in ends])
    assert widths < 6 * np.std(values)  # not by being far too wide


def test_what_has_no_ranking_is_nan_with_its_reason():
    maps = {"a": noisy(truth(), 4), "zero": make(np.zeros((4, 5, 8)))}
    result = agreement(maps, k=3, n_boot=20)
    assert result.frame["value"].isna().all() and result.frame["ci_low"].isna().all()
    assert set(result.frame["reason"]) == {"every score of 'zero' is 0, so it ranks nothing"}
    holes = np.full((4, 5, 8), np.nan)
    holes[:, 0, 0] = 1.0
    row = agreement({"a": maps["a"], "hole": make(holes)}, k=1, n_boot=20).pair("a", "hole")
    assert math.isnan(row["value"]) and row["reason"] == "only 1 heads are defined in both"


def test_sparse_detectors_do_not_agree_by_the_order_of_their_zeros():
    a, b = np.zeros((1, 5, 8)), np.zeros((1, 5, 8))
    a[0, 4, 6], b[0, 4, 7] = 1.0, 1.0
    row = agreement({"a": make(a), "b": make(b)}, k=10, n_boot=2).pair("a", "b", "overlap", 10)
    # 9 of 39 tied heads fill each set: 9/39 of each one's clear head, and 81 / 39**2 of each of the 38 others.
    assert row["value"] == pytest.approx(2 * 9 / 39 + 38 * (9 / 39) ** 2)
    assert "39 heads of 'a' tie at 0 for the last 9 of its top 10" in row["reason"]
    assert topk_overlap(a, b, 10).count == 9  # filling up in order would say this


def test_noise_that_no_interval_can_show_is_named():
    maps = {"a": noisy(truth(), 5), "w": make(truth()[None], ["weights"]), "one": make(truth(seed=2)[None], ["p"])}
    result = agreement(maps, k=3, n_boot=30)
    assert result.groups == (("a",),)
    assert result.pair("a", "w")["reason"] == ""
    assert np.isfinite(result.pair("a", "w")["ci_low"])
    assert result.pair("a", "one")["reason"] == "the interval leaves out the noise of 'one', which has one trial"
    row = result.pair("w", "one")
    assert row["reason"] == "no interval: neither has two trials to resample" and math.isnan(row["ci_low"])


def test_blocks_of_samples_change_nothing(monkeypatch):
    maps = {"a": noisy(truth(), 5), "b": noisy(truth(), 5, seed=1, ids="u")}
    whole = agreement(maps, k=3, n_boot=30).frame
    monkeypatch.setattr("mechheads.agreement.resampling.BLOCK", 7 * 80)
    pd.testing.assert_frame_equal(whole, agreement(maps, k=3, n_boot=30).frame)


def test_agreement_tables():
    maps = {name: noisy(truth(), 5, seed=i) for i, name in enumerate("abc")}
    result = agreement(maps, k=(2, 4), n_boot=20)
    square = result.matrix()
    assert list(square.index) == list(square.columns) == ["a", "b", "c"]
    assert (square.to_numpy() == square.to_numpy().T).all() and (np.diag(square) == 1).all()
    assert square.loc["c", "a"] == result.pair("a", "c")["value"]
    assert np.diag(result.matrix("overlap", 4)).tolist() == [4, 4, 4]
    low = result.matrix(column="ci_low")
    assert math.isnan(low.loc["a", "a"]) and low.loc["a", "b"] == result.pair("a", "b")["ci_low"]
    again = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert len(again["pairs"]) == len(result.to_frame()) == 18 and again["ks"] == [2, 4]
    assert again["pairs"][0]["value"] == result.frame["value"][0]
    copy = result.to_frame()
    copy["value"] = 0.0
    assert result.frame["value"].iloc[0] != 0.0
    assert "3 methods, 40 heads" in repr(result)
    one = agreement(maps, k=2, n_boot=20, reference="b", statistics=("overlap",))
    assert one.frame[["a", "b"]].to_numpy().tolist() == [["b", "a"], ["b", "c"]]
    assert len(one.rows("overlap")) == 2  # the only k need not be named
    assert math.isnan(one.matrix("overlap").loc["a", "c"])


def refuses(error: type[Exception], message: str, call: Any, *args: Any, **options: Any) -> None:
    with pytest.raises(error) as caught:
        call(*args, **options)
    assert message in str(caught.value)


def test_agreement_refuses(as_users_run):
    a, b = noisy(truth(), 4, method="locos"), noisy(truth(), 4, seed=1)
    maps = {"a": a, "b": b}
    refuses(InvalidInput, "there are 1 score maps ('a'); agreement needs at least 2.", agreement, {"a": a})
    refuses(InvalidInput, "scores is a list; expected a mapping", agreement, [a, b])
    refuses(InvalidInput, "scores['b'] is a ndarray; expected HeadScores.", agreement, {"a": a, "b": b.values})
    small = noisy(truth(3, 8), 4)
    refuses(InvalidInput, "'s' scores 3 layers x 8 heads, 'a' 5 x 8", agreement, {"a": a, "s": small})
    none = make(b.values, kept=np.zeros(4, dtype=bool))
    refuses(InvalidInput, "none of the 4 trials of 'm' is kept", agreement, {"a": a, "none": none})
    refuses(InvalidInput, "k is 41, but 'a' and 'b' both score only 40 heads", agreement, maps, k=(5, 41))
    refuses(InvalidInput, "k is 0; it must be a whole number >= 1.", agreement, maps, k=0)
    refuses(InvalidInput, "k is empty", agreement, maps, k=())
    refuses(InvalidInput, "level is 1.0", agreement, maps, level=1.0)
    refuses(InvalidInput, "n_boot is 0", agreement, maps, n_boot=0)
    refuses(UnknownName, "unknown statistic of an agreement 'pearson'", agreement, maps, statistics=("pearson",))
    refuses(UnknownName, "unknown method of the agreement 'c'", agreement, maps, reference="c")
    result = agreement(maps, k=(2, 4), n_boot=5)
    refuses(
        UnknownName, "unknown statistic of an agreement 'spearmen'. Did you mean 'spearman'?", result.rows, "spearmen"
    )
    refuses(InvalidInput, "k is 5, but spearman is over all heads", result.matrix, "spearman", 5)
    refuses(InvalidInput, "k is None; the overlap was computed at k in [2, 4].", result.matrix, "overlap")
    refuses(UnknownName, "unknown column of the agreement 'p'", result.matrix, column="p")
    refuses(UnknownName, "unknown method of the agreement 'z'", result.pair, "a", "z")
    refuses(InvalidInput, "there is no pair of 'a' and 'a'", result.pair, "a", "a")


# -- consensus -----------------------------------------------------------------------------------


def test_consensus_counts_heads_and_names_their_methods():
    def having(*heads: tuple[int, int]) -> HeadScores:
        values = -np.arange(8.0).reshape(1, 2, 4) / 100
        for i, head in enumerate(heads):
            values[(0, *head)] = 10.0 - i
        return make(values)

    maps = {"a": having((1, 0), (1, 1)), "b": having((1, 1), (1, 2)), "c": having((1, 1), (1, 0))}
    result = consensus(maps, k=2)
    assert result.at_least == 2 and result.heads == HeadSet(["L1H1", "L1H0"])
    assert result.frame.to_dict("records") == [
        {"layer": 1, "head": 1, "label": "L1H1", "count": 3, "mean_rank": pytest.approx(4 / 3), "which": "a, b, c"},
        {"layer": 1, "head": 0, "label": "L1H0", "count": 2, "mean_rank": pytest.approx(10 / 3), "which": "a, c"},
        {"layer": 1, "head": 2, "label": "L1H2", "count": 1, "mean_rank": pytest.approx(16 / 3), "which": "b"},
    ]
    assert result.by_count["heads"].tolist() == [3, 2, 1]
    binomial = [8 * sps.binom.sf(m - 1, 3, 2 / 8) for m in (1, 2, 3)]
    assert result.by_count["expected"].tolist() == pytest.approx(binomial)
    assert result.expected == pytest.approx(binomial[1])
    assert consensus(maps, k=2, at_least=3).heads == HeadSet(["L1H1"])
    assert consensus({"a": maps["a"], "b": maps["b"]}, k=2).at_least == 2
    assert repr(result).startswith("Consensus(2 heads in the top 2 of at least 2 of 3 methods")


def test_expected_consensus_is_the_mean_over_random_rankings():
    rng = np.random.default_rng(1)
    counts, expected = [], []
    for _ in range(150):
        values = rng.normal(size=(3, 1, 4, 5))
        values[2, 0, 0] = np.nan  # one method leaves five heads undefined
        result = consensus({name: make(v) for name, v in zip("abc", values, strict=True)}, k=6)
        counts.append(result.by_count["heads"].tolist())
        expected = result.by_count["expected"].tolist()
    assert np.mean(counts, axis=0) == pytest.approx(expected, abs=0.35)


def test_consensus_leaves_out_tied_heads():
    sparse = np.zeros((1, 2, 4))
    sparse[0, 1, 3] = 1.0
    maps = {"sparse": make(sparse), "full": make(np.arange(8.0).reshape(1, 2, 4))}
    result = consensus(maps, k=3, at_least=1)
    assert result.n_top == {"sparse": 1, "full": 3}
    assert result.notes == ("the top 3 of 'sparse' is 1 heads: 7 more tie at 0, and are left out",)
    assert result.frame["which"].tolist() == ["sparse, full", "full", "full"]


def test_consensus_refuses():
    maps = {"a": noisy(truth(), 4), "b": noisy(truth(), 4, seed=1)}
    refuses(InvalidInput, "a consensus needs at least 2.", consensus, {"a": maps["a"]})
    refuses(InvalidInput, "at_least is 3, but there are only 2 methods.", consensus, maps, at_least=3)
    refuses(InvalidInput, "k is 41, but 'a' scores only 40 heads; ask for at most 40.", consensus, maps, k=41)


# -- KV groups -----------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["max", "mean", "sum"])
@pytest.mark.parametrize("kv", [1, 2, 4, 8])
def test_groups_equal_a_loop(how, kv):
    values = np.random.default_rng(0).normal(size=(6, 3, 8))
    values[:, 1, 2] = np.nan
    scores = make(values, weights=np.arange(1.0, 7.0))
    groups = by_kv_group(scores, kv, how=how, n_boot=50)
    mean, size = scores.mean(), 8 // kv
    for layer in range(3):
        for group in range(kv):
            heads = [h for h in range(8) if h // size == group]
            own = [mean[layer, h] for h in heads if not math.isnan(mean[layer, h])]
            if not own or (how == "sum" and len(own) < size):
                want = math.nan
            else:
                want = {"max": max, "mean": np.mean, "sum": sum}[how](own)
            assert groups.values[layer, group] == pytest.approx(want, nan_ok=True)
            if own:
                assert mean[layer, groups.best[layer, group]] == max(own)
            else:
                assert groups.best[layer, group] == -1
    assert (groups.low <= groups.high)[np.isfinite(groups.values)].all()


def test_groups_of_one_head_are_the_heads():
    scores = noisy(truth(), 6)
    groups = by_kv_group(scores, 8, n_boot=100, seed=4)
    low, high = scores.ci(n_boot=100, seed=4)
    np.testing.assert_allclose(groups.values, scores.mean())
    np.testing.assert_allclose(groups.low, low)
    np.testing.assert_allclose(groups.high, high)
    assert np.isnan(by_kv_group(make(truth()[None]), 8).low).all()  # one trial: no interval


def test_kv_ranking_and_coverage():
    values = np.zeros((1, 2, 4))
    values[0] = [[5, 0, 0, 1], [0, 4, 3, 2]]
    scores = make(values, meta={"model": {"n_key_value_heads": 2}})
    ranking = kv_ranking(scores)
    assert ranking["label"].tolist() == ["L0KV0", "L1KV0", "L1KV1", "L0KV1"]
    assert ranking["rank"].tolist() == [1, 2, 3, 4]
    assert ranking["heads"].tolist()[2] == "L1H2, L1H3" and ranking["best_head"].tolist()[2] == "L1H2"
    assert kv_ranking(scores, how="sum")["label"].tolist()[:2] == ["L0KV0", "L1KV1"]
    coverage = kv_coverage(scores, k=(1, 3, 4))
    assert coverage["groups"].tolist() == [1, 3, 3]
    sets = list(itertools.combinations(range(8), 3))
    by_hand = np.mean([len({head // 2 for head in chosen}) for chosen in sets])
    assert coverage["expected"].tolist()[1] == pytest.approx(by_hand)
    assert coverage["share"].tolist()[2] == pytest.approx(3 / 4)
    assert by_kv_group(scores, 2).to_frame()["label"].tolist() == ["L0KV0", "L0KV1", "L1KV0", "L1KV1"]


def test_groups_refuse():
    scores = noisy(truth(), 4, method="locos")
    known = noisy(truth(), 4, meta={"model": {"n_key_value_heads": 2}})
    refuses(InvalidInput, "the scores of 'locos' do not say how many key/value heads", by_kv_group, scores)
    refuses(InvalidInput, "n_key_value_heads is 3, which does not divide the 8 query heads", by_kv_group, scores, 3)
    refuses(InvalidInput, "n_key_value_heads is 4, but the scores come from a model with 2", kv_ranking, known, 4)
    refuses(InvalidInput, "n_key_value_heads is 0", by_kv_group, scores, 0)
    refuses(UnknownName, "unknown way to put heads together 'median'", by_kv_group, scores, 2, how="median")
    refuses(InvalidInput, "k is 41", kv_coverage, known, k=41)


# -- dissociation --------------------------------------------------------------------------------


def test_dissociation_finds_what_was_planted():
    base = np.abs(truth(6, 8))
    a, b = base.copy(), base.copy()
    a[5, 0], b[5, 1] = 12.0, 12.0
    a[5, 2] = b[5, 2] = 11.0
    result = dissociation(noisy(a, 20, noise=0.5), noisy(b, 20, noise=0.5, seed=1, ids="u"), k=4, n_boot=400)
    assert result.names == ("m 1", "m 2") and result.n_shared == 0
    assert result.a_only == HeadSet(["L5H0"]) and result.b_only == HeadSet(["L5H1"])
    assert "L5H2" in result.shared
    row = result.frame.set_index("label").loc["L5H0"]
    assert row["all_low"] > 0 and row["ci_low"] > row["all_low"] and row["ci_high"] < row["all_high"]
    ranks = dissociation(noisy(a, 20, noise=0.5), noisy(b, 20, noise=0.5, seed=1), k=4, n_boot=100, scale="rank")
    assert ranks.frame["difference"].abs().max() <= 1 and ranks.n_shared == 20
    again = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert again["a_only"] == ["L5H0"] and len(again["heads"]) == 48
    assert "1 only in the first, 1 only in the second" in repr(result)


@pytest.mark.parametrize("scale", ["sd", "rank"])
def test_differences_equal_a_loop(scale):
    a, b = noisy(truth(), 6, method="a"), noisy(2 * truth(seed=3), 6, seed=1, method="b")
    holes = b.values.copy()
    holes[:, 2, 3] = np.nan
    b = make(holes, method="b")
    result = dissociation(a, b, k=3, n_boot=30, scale=scale, seed=2)
    both = np.isfinite(b.mean().ravel())
    counts = draw_counts({"a": a, "b": b}, 30, 2)

    def scaled(scores: HeadScores, weights: Any) -> np.ndarray:
        mean = np.average(scores.values.astype(float), axis=0, weights=weights).ravel()[both]
        if scale == "sd":
            return mean / np.std(mean)
        return (np.array(slow_ranks(mean.tolist())) - 1) / (len(mean) - 1)

    difference = scaled(a, None) - scaled(b, None)
    np.testing.assert_allclose(result.frame.loc[both, "difference"], difference, atol=1e-6)
    assert result.frame.loc[~both, "difference"].isna().all() and set(result.frame.loc[~both, "call"]) == {""}
    a_counts, b_counts = counts["a"], counts["b"]
    assert a_counts is not None and b_counts is not None
    samples = np.array([scaled(a, x) - scaled(b, y) for x, y in zip(a_counts, b_counts, strict=True)])
    low, high = np.quantile(samples, [0.025, 0.975], axis=0)
    middle, wide = np.median(samples, axis=0), widening(6, 0.95)
    np.testing.assert_allclose(result.frame.loc[both, "ci_low"], difference + wide * (low - middle), atol=1e-6)
    np.testing.assert_allclose(result.frame.loc[both, "ci_high"], difference + wide * (high - middle), atol=1e-6)
    se = samples.std(axis=0)
    c = np.quantile(np.max(np.abs(samples - samples.mean(axis=0)) / se, axis=1), 0.95)
    half = se * math.sqrt(6 / 5) * sps.t.isf(sps.norm.sf(c), 5)
    np.testing.assert_allclose(result.frame.loc[both, "all_low"], difference - half, rtol=1e-5, atol=1e-6)


def test_equal_maps_are_seldom_told_apart():
    base, called = truth(6, 10), 0
    for i in range(20):
        a, b = noisy(base, 10, seed=2 * i), noisy(base, 10, seed=2 * i + 1, ids="u")
        result = dissociation(a, b, k=10, n_boot=200, seed=i)
        called += bool(((result.frame["all_low"] > 0) | (result.frame["all_high"] < 0)).any())
    assert called <= 3  # one in twenty is promised


def test_calls_rest_on_the_band_of_all_heads():
    a, b = noisy(truth(), 12, noise=2.0), noisy(0.5 * truth() + 0.6 * truth(seed=3), 12, noise=2.0, seed=1, ids="u")
    frame = dissociation(a, b, k=15, n_boot=300).frame
    only = frame["top_a"] & ~frame["top_b"]
    alone = only & (frame["ci_low"] > 0) & (frame["all_low"] <= 0)  # would be called if looked at by itself
    assert alone.any() and set(frame.loc[alone, "call"]) == {""}
    assert set(frame.loc[only & (frame["all_low"] > 0), "call"]) <= {"a_only"}


def test_dissociation_without_trials_calls_no_difference():
    a, b = make(truth()[None], ["weights"], method="x"), make(truth(seed=1)[None], ["weights"], method="y")
    result = dissociation(a, b, k=5)
    assert result.reason == "neither map has two trials to resample"
    assert result.frame["all_low"].isna().all()
    assert len(result.a_only) == len(result.b_only) == 0


def test_dissociation_refuses():
    a, b = noisy(truth(), 4, method="a"), noisy(truth(), 4, seed=1, method="b")
    refuses(InvalidInput, "'b' scores 3 layers x 8 heads", dissociation, a, noisy(truth(3, 8), 4, method="b"))
    flat = make(np.ones((4, 5, 8)), method="flat")
    refuses(InvalidInput, "every score of 'flat' is 1; a constant map has no scale.", dissociation, a, flat)
    refuses(InvalidInput, "k is 41, but both maps score only 40 heads", dissociation, a, b, k=41)
    refuses(UnknownName, "unknown scale 'z'", dissociation, a, b, scale="z")
    refuses(InvalidInput, "both maps are named 'x'", dissociation, a, b, names=("x", "x"))
    hole = np.full((4, 5, 8), np.nan)
    hole[:, 0, 0] = 1
    refuses(InvalidInput, "only 1 heads are defined in both maps", dissociation, a, make(hole, method="hole"))
    refuses(UnknownName, "unknown kind of head 'c_only'", dissociation(a, b, k=3, n_boot=10).heads, "c_only")


def swept(task: str, by_k: Mapping[int, Sequence[float]], ranking: str = "locos", draw: int = 0) -> list[tuple]:
    return [
        ("none" if k == 0 else ranking, draw, k, task, f"{task}{i}", "correct", value, "")
        for k, values in by_k.items()
        for i, value in enumerate(values)
    ]


def sweep_of(*rows: list[tuple]) -> SweepResult:
    columns = ["ranking", "draw", "k", "task", "trial_id", "metric", "value", "heads"]
    return SweepResult(frame=pd.DataFrame([r for part in rows for r in part], columns=columns))


def test_selectivity_is_the_published_score_with_paired_intervals():
    needle = {0: [1, 1, 1, 0], 5: [1, 0, 0, 0], 10: [0, 0, 0, 0]}
    recall = {0: [1, 1, 0, 0], 5: [1, 1, 0, 0], 10: [1, 0, 0, 0]}
    result = selectivity(sweep_of(swept("needle", needle), swept("recall", recall)), task="needle", control="recall")
    assert result.frame["score"].tolist() == pytest.approx([2 / 3 - 0, 1 - 1 / 2])
    assert result.best.to_dict("records") == [{"ranking": "locos", "k": 5, "score": pytest.approx(2 / 3)}]
    assert (result.frame["ci_low"] <= result.frame["score"]).all()
    same = {0: [1, 1, 0, 1], 5: [1, 1, 0, 1]}
    both = selectivity(sweep_of(swept("needle", same), swept("recall", same)), task="needle", control="recall")
    # Nothing changes in any trial, so pairing leaves no width; unpaired draws would.
    assert both.frame[["score", "ci_low", "ci_high"]].to_numpy().tolist() == [[0, 0, 0]]


def test_selectivity_averages_draws_and_refuses():
    base = {0: [1.0, 1.0]}
    rows = [swept("needle", base), swept("recall", base)]
    rows += [swept("needle", {5: [1.0, float(draw)]}, "random", draw) for draw in (0, 1)]
    rows += [swept("recall", {5: [1.0, 1.0]}, "random", draw) for draw in (0, 1)]
    result = selectivity(sweep_of(*rows), task="needle", control="recall")
    assert result.frame["drop"].tolist() == [pytest.approx(0.25)]
    sweep = sweep_of(*rows)
    refuses(InvalidInput, "task and control are both 'needle'", selectivity, sweep, task="needle", control="needle")
    refuses(UnknownName, "unknown task of the sweep 'x'", selectivity, sweep, task="needle", control="x")
    refuses(UnknownName, "unknown metric", selectivity, sweep, task="needle", control="recall", metric="f1")
    dead = sweep_of(swept("needle", {0: [0, 0], 5: [0, 0]}), swept("recall", {0: [1, 1], 5: [1, 1]}))
    refuses(InvalidInput, "'needle' is 0 without ablation", selectivity, dead, task="needle", control="recall")
    bare = sweep_of(swept("needle", {5: [1, 1]}), swept("recall", {0: [1, 1], 5: [1, 1]}))
    refuses(InvalidInput, "was not measured without ablation", selectivity, bare, task="needle", control="recall")
    apart = sweep_of(swept("needle", {0: [1, 1], 5: [1, 1]}), swept("recall", {0: [1, 1], 6: [1, 1]}))
    refuses(InvalidInput, "measured at no common ranking and k", selectivity, apart, task="needle", control="recall")


# -- reliability ---------------------------------------------------------------------------------


def test_spearman_brown():
    assert spearman_brown(0.5, 2.0) == pytest.approx(2 / 3)
    assert spearman_brown(spearman_brown(0.3, 4.0), 1 / 4) == pytest.approx(0.3)
    assert spearman_brown(1.0, 7.0) == 1.0 and spearman_brown(0.0, 7.0) == 0.0
    assert math.isnan(spearman_brown(-0.5, 3.0)) and math.isnan(spearman_brown(math.nan, 2.0))
    refuses(InvalidInput, "r is 1.5", spearman_brown, 1.5, 2.0)
    refuses(InvalidInput, "factor is 0", spearman_brown, 0.5, 0.0)


def test_halves_equal_a_loop():
    scores = noisy(truth(), 7, weights=np.arange(1.0, 8))
    result = split_half(scores, n_splits=12, seed=3, k=4)
    assert (result.n_half, result.n_trials) == (3, 7)
    order = np.argsort(np.random.default_rng([3, 3]).random((12, 7)), axis=1)
    rho, shared = [], []
    for split in order:
        a, b = (
            np.average(scores.values[half].astype(float), axis=0, weights=scores.weights[half])
            for half in (split[:3], split[3:6])
        )
        rho.append(rank_agreement(a, b).spearman)
        shared.append(topk_overlap(a, b, 4).count)
    assert result.spearman == pytest.approx(np.mean(rho))
    assert (result.split_low, result.split_high) == pytest.approx(tuple(np.quantile(rho, [0.025, 0.975])))
    assert result.reliability == pytest.approx(spearman_brown(float(np.mean(rho)), 7 / 3))
    assert result.overlap["overlap"].tolist() == pytest.approx([np.mean(shared)])
    assert result.overlap["expected"].tolist() == pytest.approx([16 / 40])
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["overlap"][0]["k"] == 4


def test_reliability_of_simulated_scores_is_what_theory_says():
    # Scores = truth + noise, both normal: n trials have reliability s2 / (s2 + noise2 / n).
    true, n, noise = truth(40, 25), 16, 3.0
    result = split_half(noisy(true, n, noise=noise), n_splits=50, k=10)
    s2 = float(true.var())
    want = s2 / (s2 + noise**2 / n)
    assert result.reliability == pytest.approx(want, abs=0.05)
    half = s2 / (s2 + noise**2 / (n / 2))
    assert result.spearman == pytest.approx(6 / math.pi * math.asin(half / 2), abs=0.05)
    needed = trials_needed(noisy(true, n, noise=noise), target=0.9, n_splits=50)
    assert needed.extrapolated and needed.n == pytest.approx(0.9 / 0.1 * noise**2 / s2, rel=0.2)
    assert "an extrapolation by the Spearman-Brown formula from two sets of 8 trials" in needed.reason
    assert needed.curve["m"].tolist() == [2, 4, 8]
    np.testing.assert_allclose(needed.curve["spearman"], needed.curve["spearman_brown"], atol=0.06)
    assert json.loads(json.dumps(needed.to_dict(), allow_nan=False))["n"] == needed.n


def test_a_ranking_without_noise_and_one_without_signal():
    sure = make(np.repeat(truth()[None], 6, axis=0))
    result = split_half(sure, n_splits=10, k=5)
    assert result.spearman == pytest.approx(1) and result.reliability == pytest.approx(1)
    assert result.overlap["overlap"].tolist() == [5]
    needed = trials_needed(sure, n_splits=10)
    assert needed.n == 2 and not needed.extrapolated and needed.reason.startswith("measured")
    # Halves that are each other's reverse: no number of trials helps.
    signs = np.array([1.0, 1.0, -1.0, -1.0])[:, None, None]
    never = trials_needed(make(signs * truth()[None]), n_splits=200)
    assert never.n is None and "no number of trials can be named" in never.reason
    flat = make(np.ones((6, 5, 8)))
    assert trials_needed(flat).n is None and "constant" in trials_needed(flat).reason
    result = split_half(flat)
    assert math.isnan(result.spearman) and "constant" in result.reason


def test_trials_needed_within_the_data():
    needed = trials_needed(noisy(truth(10, 20), 40, noise=1.0), target=0.9, n_splits=40)
    assert needed.n is not None and not needed.extrapolated
    curve = needed.curve.set_index("m")["spearman"]
    reached = min(m for m in curve.index if curve[m] >= 0.9)
    before = max(m for m in curve.index if m < reached)
    assert before < needed.n <= reached
    assert needed.curve["m"].tolist() == [2, 4, 8, 16, 20]


def test_reliability_refuses():
    weights = make(truth()[None], ["weights"], method="ov_copying")
    refuses(InvalidInput, "'ov_copying' is computed from the weights alone", split_half, weights)
    one = make(truth()[None])
    refuses(InvalidInput, "'m' kept 1 trials; this needs at least 2.", split_half, one)
    three = noisy(truth(), 3)
    refuses(InvalidInput, "'m' kept 3 trials; this needs at least 4.", trials_needed, three)
    refuses(InvalidInput, "target is 1.0", trials_needed, noisy(truth(), 6), target=1.0)
    refuses(InvalidInput, "k is 41, but only 40 heads have a score", split_half, three, k=41)
    refuses(InvalidInput, "n_splits is 0", split_half, three, n_splits=0)
    none = make(three.values, kept=np.zeros(3, dtype=bool))
    refuses(InvalidInput, "none of the 3 trials", split_half, none)
