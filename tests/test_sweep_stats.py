"""Statistics of sweeps: each number against loops over trials, draws and samples; simulations; refusals."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from sweep_samples import Slow, planted, right, study, sweep, widened

from mechheads.errors import InvalidInput, UnknownName
from mechheads.stats import holm, paired_permutation, wilson
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats import (
    areas,
    compare_interventions,
    compare_rankings,
    dose_response,
    minimal_k,
    necessity_sufficiency,
    task_dissociation,
    verdict,
)
from mechheads.sweep_stats.dissociating import two_sample_test
from mechheads.sweep_stats.joint import joints

QUICK: Any = {"n_boot": 40}
NONE = ("none", 0)


def holed(seed: int = 0, n: int = 9, *, draws: int = 3) -> SweepResult:
    """Numbers far from 0 and 1, with trials that are not measured everywhere, and draws."""
    rng = np.random.default_rng(seed)
    base = rng.normal(5.0, 1.0, n)
    cells: dict[Any, Any] = {}
    for task, felt in (("needles", 1.0), ("recall", 0.3)):
        cells[task, "none", 0] = base + rng.normal(0, 0.2, n)
        for ranking, step in (("locos", 1.2), ("dla", 0.5)):
            for i, k in enumerate((1, 4, 10)):
                cells[task, ranking, k] = base - felt * step * (i + 1) + rng.normal(0, 0.5, n)
        for i, k in enumerate((1, 4, 10)):
            cells[task, "random", k] = base - felt * 0.2 * i + rng.normal(0, 0.5, (draws, n))
    cells["needles", "locos", 4][2] = np.nan
    cells["needles", "none", 0][5] = np.nan
    cells["needles", "random", 10][0, 3] = np.nan  # one draw lacks it
    cells["needles", "random", 1][:, n - 2] = np.nan  # all draws lack it
    return sweep(cells, metric="score")


def only(frame: pd.DataFrame, **where: Any) -> Any:
    """The one row that fits, as an object with the columns as attributes."""
    for name, value in where.items():
        frame = frame.loc[frame[name] == value]
    (row,) = frame.itertuples(index=False)
    return row


def trapezoid(ks, heights) -> Any:
    return sum((ks[i + 1] - ks[i]) * (heights[i] + heights[i + 1]) / 2 for i in range(len(ks) - 1)) / (ks[-1] - ks[0])


def ratio_ends(value: float, samples: np.ndarray, n: int) -> tuple[float, float]:
    """Order statistics, stretched for few trials."""
    ordered = np.sort(samples)
    low, high = ordered[math.floor(0.025 * (len(ordered) - 1))], ordered[math.ceil(0.975 * (len(ordered) - 1))]
    stretch = np.sqrt(n / (n - 1)) * stats.t.ppf(0.975, n - 1) / stats.norm.ppf(0.975)
    return value + stretch * (low - value), value + stretch * (high - value)


# -- areas ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranking", ["locos", "random"])
@pytest.mark.parametrize("seed", [0, 1])
def test_areas_are_those_of_loops(ranking, seed):
    result = holed(seed)
    row = only(areas(result, worst=1.0, task="needles", seed=seed, **QUICK), ranking=ranking)
    slow = Slow(result, seed=seed)
    keys = [NONE, *((ranking, k) for k in (1, 4, 10))]
    trials = slow.common(*keys)
    assert row.n_trials == len(trials) == 7 and row.n_k == 4 and row.k_max == 10
    auc = trapezoid((0, 1, 4, 10), [slow.mean(key, trials) for key in keys])
    base = slow.mean(NONE, trials)
    assert row.auc == pytest.approx(auc) and row.baseline == pytest.approx(base)
    assert row.over == pytest.approx(1 - (auc - 1) / (base - 1)) and row.valid and row.reason == ""
    of_auc = trapezoid((0, 1, 4, 10), [slow.samples(key, trials) for key in keys])
    assert (row.auc_low, row.auc_high) == pytest.approx(widened(auc, of_auc, len(trials)))
    left = (of_auc - 1) / (slow.samples(NONE, trials) - 1)
    low, high = ratio_ends(1 - row.over, left, len(trials))
    assert (row.over_low, row.over_high) == pytest.approx((1 - high, 1 - low))
    assert row.n_draws == (3 if ranking == "random" else 1)


def test_area_by_hand():
    result = sweep({("none", 0): right(8, 8), ("a", 1): right(4, 8), ("a", 5): right(0, 8)})
    row = only(areas(result))
    # 0 to 1: mean height 0.75; 1 to 5: 0.25.
    assert row.auc == pytest.approx((0.75 + 4 * 0.25) / 5) and row.over == pytest.approx(1 - 0.35)
    assert list(areas(result).columns) == [
        "task", "ranking", "metric", "auc", "auc_low", "auc_high", "baseline", "over", "over_low", "over_high",
        "valid", "reason", "k_max", "n_k", "n_trials", "n_draws",
    ]  # fmt: skip
    assert areas(result, n_boot=50, seed=3).attrs == {"level": 0.95, "n_boot": 50, "seed": 3}


def test_a_set_has_a_table_for_each_intervention_that_ablates_the_sets():
    sweeps = study(n=8)
    frame = areas(sweeps, **QUICK)
    assert list(dict.fromkeys(frame["intervention"])) == ["mean", "zero", "resample"]
    own = areas(sweeps["zero"], **QUICK)
    whole = frame.loc[frame["intervention"] == "zero"].drop(columns="intervention").reset_index(drop=True)
    pd.testing.assert_frame_equal(whole, own)


# -- intervals that a bootstrap does not see ---------------------------------------------------------


@pytest.mark.parametrize("n", [2, 9, 40])
def test_trials_that_are_all_alike_leave_what_wilson_leaves(n):
    result = sweep({NONE: right(n, n), ("a", 1): right(n, n), ("a", 5): right(0, n), ("b", 5): right(n, n)})
    cells = compare_interventions(SweepSet({"mean": result, "zero": result}), **QUICK).cells
    whole, gone = (only(cells, intervention="mean", ranking="a", k=k) for k in (1, 5))
    assert (whole.ci_low, whole.ci_high) == pytest.approx((wilson(n, n).low, 1.0))
    assert (gone.ci_low, gone.ci_high) == pytest.approx((0.0, wilson(0, n).high))
    open_ = wilson(0, n).high
    assert (whole.change, whole.change_low, whole.change_high) == pytest.approx((0.0, -open_, open_))
    assert (gone.change_low, gone.change_high) == pytest.approx((-1.0, -1.0 + 2 * open_))
    # A share of what all trials have: nothing is left, but something may hide.
    lost = only(task_dissociation(both_tasks(result), "needles", **QUICK), ranking="a", k=5)
    assert (lost.lost, lost.lost_low, lost.lost_high) == pytest.approx((1.0, 1.0 - open_, 1.0))


def both_tasks(result: SweepResult) -> SweepResult:
    other = result.frame.assign(task="recall", trial_id="r" + result.frame["trial_id"])
    return SweepResult(pd.concat([result.frame, other]))


def test_numbers_without_bounds_are_not_held_to_any():
    values = np.full(6, 7.0)
    result = sweep({NONE: values, ("a", 5): values - 2}, metric="score")
    row = only(areas(result, **QUICK))
    assert (row.auc, row.auc_low, row.auc_high) == pytest.approx((6.0, 6.0, 6.0))


def test_fewer_than_two_trials_have_no_interval_and_no_share():
    row = only(areas(sweep({NONE: [1.0], ("a", 5): [0.0]}), **QUICK))
    assert row.auc == 0.5 and math.isnan(row.auc_low) and math.isnan(row.auc_high)
    assert not row.valid and row.reason == "too few trials (1) were measured both with and without ablation"


@pytest.mark.parametrize("d", [2, 3, 7])
def test_draws_spread_as_a_mean_of_so_many_should(d):
    values = np.repeat(np.random.default_rng(d).normal(size=(d, 1)), 3, axis=1)  # trials alike: only draws vary
    result = sweep({NONE: [9.0] * 3, ("random", 5): values}, metric="score")
    (joint,) = joints({"": result}, "score", ["needles"], level=0.95, n_boot=20000, seed=0).values()
    spread = joint.contrast([(("", "random", 5), 1.0)]).samples.std()
    assert spread == pytest.approx(values[:, 0].std(ddof=1) / np.sqrt(d), rel=0.03)


# -- rankings against each other -----------------------------------------------------------------


@pytest.mark.parametrize("pair", [("locos", "dla"), ("locos", "random")])
def test_comparisons_are_those_of_loops(pair):
    result = holed(3)
    table = compare_rankings(result, task="needles", n_perm=1000, **QUICK)
    slow = Slow(result)
    for k in (1, 4, 10):
        row = only(table, of="k", k=k, a=pair[0], b=pair[1])
        keys = [(name, k) for name in pair]
        trials = slow.common(*keys)
        a, b = (slow.per_trial(key, trials) for key in keys)
        assert (row.mean_a, row.mean_b) == pytest.approx((np.mean(a), np.mean(b))) and row.n_trials == len(trials)
        assert row.difference == pytest.approx(np.mean(a) - np.mean(b))
        samples = slow.samples(keys[0], trials) - slow.samples(keys[1], trials)
        assert (row.ci_low, row.ci_high) == pytest.approx(widened(row.difference, samples, len(trials)))
        assert row.p_value == pytest.approx(paired_permutation(a, b, n_perm=1000))
        assert (row.n_draws_a, row.n_draws_b) == (1, 3 if pair[1] == "random" else 1)
    area = only(table, of="area", a=pair[0], b=pair[1])
    keys = [NONE, *((name, k) for name in pair for k in (1, 4, 10))]
    trials = slow.common(*keys)
    heights = [[slow.per_trial(NONE, trials), *(slow.per_trial((r, k), trials) for k in (1, 4, 10))] for r in pair]
    a, b = (trapezoid((0, 1, 4, 10), np.array(h)) for h in heights)
    assert area.difference == pytest.approx(np.mean(a - b)) and area.k == 10
    assert area.p_value == pytest.approx(paired_permutation(a, b, n_perm=1000))


def test_correction_counts_every_comparison_of_its_kind():
    table = compare_rankings(holed(1), n_perm=600, **QUICK)
    assert set(table["task"]) == {"needles", "recall"}
    for of, n in (("k", 2 * 3 * 3), ("area", 2 * 3)):
        rows = table.loc[table["of"] == of]
        assert len(rows) == n and set(rows["n_tests"]) == {n}
        assert rows["p_holm"].tolist() == holm(rows["p_value"]).tolist()


def test_more_trials_than_can_be_gone_through_use_drawn_signs():
    result = planted(2, n=40, draws=0, tasks={"needles": 1.0})
    row = only(compare_rankings(result, n_perm=3000, **QUICK), of="k", k=5)
    wide = result.frame.pivot_table(index="trial_id", columns=["ranking", "k"], values="value")
    p = paired_permutation(wide["locos", 5], wide["dla", 5], n_perm=3000, seed=5)
    assert row.p_value == pytest.approx(p, abs=0.02) and row.p_value >= 1 / 3001


def test_kept_heads_are_compared_where_there_are_any():
    result = planted(n=10, kept=True, draws=0, tasks={"needles": 1.0})
    table = compare_rankings(result, **QUICK)
    assert table.loc[table["of"] == "k", "k"].tolist() == [1, 5, 10]
    # From no head kept on, where all are alike.
    frame: Any = result.frame.groupby(["ranking", "k"])["value"].mean()
    want = trapezoid((0, 1, 5, 10), [frame["locos", k] - frame["dla", k] for k in (0, 1, 5, 10)])
    assert only(table, of="area").difference == pytest.approx(want)


# -- the least k ---------------------------------------------------------------------------------


@pytest.mark.parametrize(("ranking", "share"), [("locos", 0.5), ("dla", 0.8), ("random", 0.9)])
def test_minimal_k_is_that_of_loops(ranking, share):
    result = holed(2, n=12)
    row = only(minimal_k(result, task="needles", share=share, worst=1.0, **QUICK), ranking=ranking)
    slow, ks = Slow(result), (1, 4, 10)
    keys = [(ranking, k) for k in ks]
    trials = slow.common(NONE, *keys)
    left = [(slow.mean(key, trials) - 1) / (slow.mean(NONE, trials) - 1) for key in keys]
    fallen = [k for k, x in zip(ks, left, strict=True) if x <= share]
    assert (row.k == fallen[0]) if fallen else math.isnan(row.k)
    first = []
    samples = np.array([(slow.samples(key, trials) - 1) / (slow.samples(NONE, trials) - 1) for key in keys])
    for one in samples.T:
        first.append(min((k for k, x in zip(ks, one, strict=True) if x <= share), default=math.inf))
    assert row.reached == np.isfinite(first).mean() and row.n_trials == len(trials)
    ordered = sorted(first)
    assert row.k_low <= ordered[0] and row.k_high >= ordered[-1]  # 40 samples: 2.5% is the outermost
    gaps = [slow.samples(key, trials) - share * slow.samples(NONE, trials) - (1 - share) for key in keys]
    at = [slow.mean(key, trials) - share * slow.mean(NONE, trials) - (1 - share) for key in keys]
    ends = [widened(value, gap, len(trials)) for value, gap in zip(at, gaps, strict=True)]
    low = min([ordered[0], *(k for k, end in zip(ks, ends, strict=True) if end[0] <= 0)])
    sure = min((k for k, end in zip(ks, ends, strict=True) if end[1] <= 0), default=math.inf)
    assert (row.k_low, row.k_high) == (low, max(ordered[-1], sure))


def test_minimal_k_by_hand_and_censored():
    result = sweep(
        {
            NONE: right(20, 20),
            ("falls", 1): right(20, 20),
            ("falls", 5): right(10, 20),
            ("falls", 20): right(0, 20),
            ("stays", 1): right(20, 20),
            ("stays", 20): right(20, 20),
        }
    )
    falls, stays = (only(minimal_k(result), ranking=name) for name in ("falls", "stays"))
    assert falls.k == 5 and falls.k_low == 5 and falls.k_high == 20 and falls.told == "k = 5 [5, 20]"
    assert 0.4 < falls.reached <= 1 and falls.valid
    assert math.isnan(stays.k) and math.isinf(stays.k_low) and math.isinf(stays.k_high) and stays.reached == 0
    assert stays.told == "not reached by k = 20" and stays.valid
    # The tenth of twenty that is left is just allowed: no more than half.
    assert only(minimal_k(result, share=0.49), ranking="falls").k == 20


def test_few_trials_all_alike_do_not_settle_the_least_k():
    result = sweep({NONE: right(10, 10), ("a", 1): right(10, 10), ("a", 5): right(0, 10)})
    # Ten of ten right leave 28% open, so that three quarters may be true at k = 1, but not half.
    assert only(minimal_k(result, share=0.5)).told == "k = 5 [5, 5]"
    assert only(minimal_k(result, share=0.75)).told == "k = 5 [1, 5]"


# -- target and controls -------------------------------------------------------------------------


def test_dissociation_is_that_of_loops():
    result = holed(4, n=6)
    table = task_dissociation(result, "needles", worst=1.0, n_perm=2000, **QUICK)
    assert set(table["control"]) == {"recall"} and len(table) == 9
    for ranking, k in (("locos", 4), ("random", 10)):
        row = only(table, ranking=ranking, k=k)
        values, ends, of_trial = {}, {}, {}
        for task in ("needles", "recall"):
            slow = Slow(result, task)
            trials = slow.common(NONE, (ranking, k))
            a, b = (np.array(slow.per_trial(key, trials)) - 1 for key in ((ranking, k), NONE))
            left = a.mean() / b.mean()
            samples = (slow.samples((ranking, k), trials) - 1) / (slow.samples(NONE, trials) - 1)
            low, high = ratio_ends(left, samples, len(trials))
            values[task], ends[task] = 1 - left, (1 - high, 1 - low)
            of_trial[task] = [1 - left - (x - left * y) / b.mean() for x, y in zip(a, b, strict=True)]
        assert (row.lost, row.control_lost) == pytest.approx((values["needles"], values["recall"]))
        assert (row.lost_low, row.lost_high) == pytest.approx(ends["needles"])
        assert (row.control_low, row.control_high) == pytest.approx(ends["recall"])
        difference = values["needles"] - values["recall"]
        below = math.hypot(values["needles"] - ends["needles"][0], ends["recall"][1] - values["recall"])
        above = math.hypot(ends["needles"][1] - values["needles"], values["recall"] - ends["recall"][0])
        want = (difference, difference - below, difference + above)
        assert (row.difference, row.ci_low, row.ci_high) == pytest.approx(want)
        assert row.p_value == pytest.approx(slow_deal(of_trial["needles"], of_trial["recall"]))
    assert table["p_holm"].tolist() == holm(table["p_value"]).tolist() and set(table["n_tests"]) == {9}


def slow_deal(x: list[float], y: list[float]) -> float:
    """Every way to deal the trials out, by Welch's t."""
    both = [*x, *y]

    def t(chosen: tuple[int, ...]) -> float:
        a = [both[i] for i in chosen]
        b = [both[i] for i in range(len(both)) if i not in chosen]
        found: Any = stats.ttest_ind(a, b, equal_var=False)
        return abs(float(found.statistic))

    seen = t(tuple(range(len(x))))
    found = [t(chosen) for chosen in itertools.combinations(range(len(both)), len(x))]
    return float(np.mean([one >= seen * (1 - 1e-9) for one in found]))


def test_two_sample_test_by_hand():
    # Of 20 ways to deal three and three, two keep them apart.
    assert two_sample_test(np.ones(3), np.zeros(3)) == 2 / 20
    assert two_sample_test(np.ones(3), np.ones(4)) == 1.0
    assert math.isnan(two_sample_test(np.ones(1), np.ones(4)))
    assert two_sample_test(np.arange(30.0), np.arange(30.0) + 20, n_perm=99) == 1 / 100


def test_each_control_may_have_its_own_metric_and_worst():
    frame = planted(n=20, draws=0, tasks={"needles": 1.0, "text": 0.5, "recall": 0.0}).frame
    text = frame["task"] == "text"
    frame.loc[text, "metric"] = "nll"
    frame.loc[text, "value"] = 5.0 - frame.loc[text, "value"]
    frame.loc[text & (frame["ranking"] == "none"), "value"] -= 1.0
    table = task_dissociation(
        SweepResult(frame), "needles", control_metric={"text": "nll"}, worst={"text": 6.0}, n_perm=50, **QUICK
    )
    row = only(table, control="text", ranking="locos", k=10)
    means: Any = frame.loc[text].groupby(["ranking", "k"])["value"].mean()
    assert row.control_metric == "nll" and row.metric == "correct" and row.valid
    assert row.control_lost == pytest.approx(1 - (means["locos", 10] - 6) / (means["none", 0] - 6))
    assert only(table, control="recall", ranking="locos", k=10).control_metric == "correct"
    # A metric of which less is better, without a worst value, has nothing to take a share of.
    bare = task_dissociation(
        SweepResult(frame), "needles", "text", control_metric="nll", n_perm=50, **QUICK
    )  # fmt: skip
    assert not bare["valid"].any() and bare["p_holm"].isna().all() and set(bare["n_tests"]) == {0}
    assert bare["reason"].str.match(r"text: inverted: .* \(less is better here: worst must be given\)$").all()


# -- ratios that are none ------------------------------------------------------------------------


REFUSED: Mapping[str, tuple[dict[Any, Any], float, str]] = {
    "not measured": ({("a", 1): right(3, 6), ("a", 5): right(0, 6)}, 0.0, r"not measured without ablation"),
    "nothing there": (
        {NONE: right(0, 6), ("a", 5): right(0, 6)},
        0.0,
        r"degenerate: 0 \[0, 0\.39\] without ablation cannot be told from 0, the value at which nothing is left",
    ),
    "chance": (
        {NONE: right(6, 12), ("a", 5): right(3, 12)},
        0.5,
        r"degenerate: 0\.5 \[.*\] without ablation cannot be told from 0\.5, the value at which nothing is left",
    ),
    "worse than chance": (
        {NONE: right(1, 12), ("a", 5): right(3, 12)},
        0.6,
        r"inverted: 0\.0833 \[.*\] without ablation is worse than 0\.6, the value at which nothing is left",
    ),
    "log-probabilities": (
        {NONE: np.linspace(-1, -0.5, 9), ("a", 5): np.linspace(-3, -2, 9)},
        0.0,
        r"inverted: -0\.75 \[.*\] without ablation is worse than 0, the value at which nothing is left "
        r"\(its values are below 0: worst must be given\)",
    ),
    "tiny": (
        {NONE: np.linspace(0.01, 0.02, 9), ("a", 5): np.linspace(-50, 50, 9)},
        0.0,
        r"degenerate: 0\.015 \[.*\] without ablation is tiny beside values as far as (25|50) from 0",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_ratio_without_a_denominator_is_refused_and_says_why(case):
    cells, worst, reason = REFUSED[case]
    result = sweep(cells, metric="score")
    row = only(areas(result, worst=worst, **QUICK))
    assert not row.valid and np.isnan([row.over, row.over_low, row.over_high]).all()
    assert pd.Series([row.reason]).str.fullmatch(reason).all(), row.reason
    assert math.isfinite(row.auc)
    least = only(minimal_k(result, worst=worst, **QUICK))
    assert not least.valid and math.isnan(least.k) and least.told == f"cannot be said: {least.reason}"
    assert pd.Series([least.reason]).str.fullmatch(reason).all()
    lost = task_dissociation(both_tasks(result), "needles", worst=worst, n_perm=20, **QUICK)
    assert not lost["valid"].any() and np.isnan(lost[["difference", "ci_low", "p_value"]].to_numpy()).all()
    assert lost["reason"].str.fullmatch(f"needles: {reason}; recall: {reason}").all()


def test_less_is_better_with_a_worst_value():
    low = np.linspace(2.0, 3.0, 9)
    for name, meta in (
        ("perplexity", {}),
        ("pain", {"lower_is_better": ["pain"]}),
        ("pain", {"lower_is_better": "pain"}),
    ):
        result = sweep({NONE: low, ("a", 1): low + 1, ("a", 5): low + 6}, metric=name, **meta)
        row = only(areas(result, worst=10.5, **QUICK))
        heights = [2.5, 3.5, 8.5]
        assert row.over == pytest.approx(1 - (trapezoid((0, 1, 5), heights) - 10.5) / (2.5 - 10.5)) and row.valid
        assert only(minimal_k(result, worst=10.5, **QUICK)).k == 5


# -- both sides ----------------------------------------------------------------------------------


def test_necessity_and_sufficiency_are_those_of_loops():
    sweeps = SweepSet({"mean": holed(5), "mean, kept": kept_side()})
    table = necessity_sufficiency(sweeps, task="needles", worst=1.0, **QUICK)
    assert table[["ranking", "k"]].to_numpy().tolist() == [["locos", 1], ["locos", 4]]
    slow, other = Slow(sweeps["mean"]), Slow(sweeps["mean, kept"])
    row: Any
    for row in table.itertuples():
        for values, key, name in ((slow, ("locos", row.k), "necessity"), (other, ("locos", row.k), "sufficiency")):
            trials = [t for t in slow.common(NONE) if t in values.common(key)]
            left = (values.mean(key, trials) - 1) / (slow.mean(NONE, trials) - 1)
            samples = (values.samples(key, trials) - 1) / (slow.samples(NONE, trials) - 1)
            low, high = ratio_ends(left, samples, len(trials))
            want = (left, low, high) if name == "sufficiency" else (1 - left, 1 - high, 1 - low)
            assert [getattr(row, f"{name}{end}") for end in ("", "_low", "_high")] == pytest.approx(want)
        assert row.empty == pytest.approx(other.mean(("locos", 0), other.trials))
        assert row.baseline == pytest.approx(slow.mean(NONE, slow.common(NONE)))


def kept_side() -> SweepResult:
    rng = np.random.default_rng(8)
    cells = {("locos", k): rng.normal(1.2 + 0.5 * k, 0.3, 9) for k in (0, 1, 4)}
    return sweep(cells, metric="score", side="kept")


@pytest.mark.parametrize(
    ("ablated", "kept", "call"),
    [
        (0, 30, "necessary and sufficient"),
        (0, 0, "necessary"),
        (30, 30, "sufficient"),
        (30, 0, "neither"),
        (15, 30, "unsettled"),
    ],
)
def test_calls(ablated, kept, call):
    sweeps = SweepSet(
        {
            "mean": sweep({NONE: right(30, 30), ("a", 5): right(ablated, 30)}),
            "mean, kept": sweep({("a", 5): right(kept, 30)}, side="kept"),
        }
    )
    row = only(necessity_sufficiency(sweeps, **QUICK))
    assert row.call == call and math.isnan(row.empty)
    assert (row.ablated, row.kept) == (ablated / 30, kept / 30)


def test_sides_that_cannot_be_set_side_by_side():
    one = planted(n=6, draws=0)
    message = r"^the set holds 'mean', and no complement; sufficiency needs a sweep .*, labelled like 'mean, kept'\.$"
    with pytest.raises(InvalidInput, match=message):
        necessity_sufficiency(SweepSet({"mean": one}))
    both = SweepSet({"mean": one, "mean, kept": planted(n=6, kept=True)})
    with pytest.raises(InvalidInput, match=r"^'mean, kept' is itself a complement; give the label that .*, 'mean'\.$"):
        necessity_sufficiency(both, "mean, kept")
    with pytest.raises(UnknownName, match="zero"):
        necessity_sufficiency(both, "zero")
    for share in (0.0, 1.0, -0.5):
        with pytest.raises(InvalidInput, match=rf"^share is {share}; give a share of the baseline between 0 and 1\.$"):
            necessity_sufficiency(both, share=share)
    strange = SweepSet({"mean": one, "mean, kept": sweep({("wu", 5): right(2, 6)}, side="kept")})
    with pytest.raises(InvalidInput, match=r"^'mean' and 'mean, kept' have no ranking and k in common; there is"):
        necessity_sufficiency(strange)


# -- doses ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("ranking", ["locos", "random"])
def test_doses_are_those_of_loops(ranking):
    result = holed(6)
    table = dose_response(result, task="needles", n_perm=1000, **QUICK)
    slow, before = Slow(result), NONE
    for k in (1, 4, 10):
        row = only(table, ranking=ranking, k_to=k)
        trials = slow.common(before, (ranking, k))
        a, b = slow.per_trial((ranking, k), trials), slow.per_trial(before, trials)
        assert row.change == pytest.approx(np.mean(a) - np.mean(b)) and row.k_from == before[1]
        assert row.per_head == pytest.approx(row.change / (k - before[1])) and row.kind == "step"
        samples = slow.samples((ranking, k), trials) - slow.samples(before, trials)
        assert (row.ci_low, row.ci_high) == pytest.approx(widened(row.change, samples, len(trials)))
        assert row.p_value == pytest.approx(paired_permutation(a, b, n_perm=1000))
        before = (ranking, k)
    assert table["p_holm"].tolist() == holm(table["p_value"]).tolist()
    # Steps go from the run without ablation to the last k, so their changes sum to the whole.
    whole = sweep({NONE: right(9, 10), ("a", 1): right(7, 10), ("a", 5): right(2, 10)})
    assert dose_response(whole, **QUICK)["change"].sum() == pytest.approx(0.2 - 0.9)


def test_added_heads_and_single_heads():
    table = dose_response(holed(0, draws=2), task="needles", **QUICK)
    assert only(table, ranking="locos", k_to=4).heads == "L1H0 L2H0 L3H0"
    assert only(table, ranking="random", k_to=4).heads == ""  # each draw adds others
    cells = {NONE: right(6, 6), ("L0H0", 1): right(1, 6), ("L3H1", 1): right(6, 6), ("locos", 1): right(2, 6)}
    cells[("locos", 2)] = right(0, 6)
    table = dose_response(sweep(cells), **QUICK)
    assert dict(zip(table["ranking"], table["kind"], strict=True)) == {
        "L0H0": "single",
        "L3H1": "single",
        "locos": "step",
    }
    assert only(table, ranking="L0H0").change == pytest.approx(-5 / 6)
    assert table.groupby("kind")["n_tests"].first().to_dict() == {"single": 2, "step": 2}


def test_heads_kept_begin_from_none():
    table = dose_response(planted(n=8, kept=True, draws=0, tasks={"needles": 1.0}), **QUICK)
    assert table.loc[table["ranking"] == "dla", ["k_from", "k_to"]].to_numpy().tolist() == [[0, 1], [1, 5], [5, 10]]
    with pytest.raises(InvalidInput, match="was measured for none of the rankings"):
        dose_response(sweep({("a", 5): right(2, 6)}, side="kept"))


# -- interventions side by side ------------------------------------------------------------------


def test_interventions_are_those_of_loops():
    sweeps = SweepSet({"mean": holed(7), "zero": holed(8), "mean, kept": kept_side()})
    found = compare_interventions(sweeps, task="needles", n_perm=1000, **QUICK)
    mean, zero = Slow(sweeps["mean"]), Slow(sweeps["zero"])
    for ranking, k in (("locos", 4), ("random", 10)):
        key = (ranking, k)
        row = only(found.pairs, ranking=ranking, k=k)
        trials = [t for t in mean.common(key) if t in zero.common(key)]
        a, b = mean.per_trial(key, trials), zero.per_trial(key, trials)
        assert (row.a, row.b, row.n_trials) == ("mean", "zero", len(trials))
        assert row.difference == pytest.approx(np.mean(a) - np.mean(b))
        ends = widened(row.difference, mean.samples(key, trials) - zero.samples(key, trials), len(trials))
        assert (row.ci_low, row.ci_high) == pytest.approx(ends) and row.apart == (ends[0] > 0 or ends[1] < 0)
        assert row.p_value == pytest.approx(paired_permutation(a, b, n_perm=1000))
        cell = only(found.cells, intervention="zero", ranking=ranking, k=k)
        trials = zero.common(key)
        assert (cell.ci_low, cell.ci_high) == pytest.approx(widened(cell.mean, zero.samples(key, trials), len(trials)))
        trials = zero.common(key, NONE)
        change = zero.mean(key, trials) - zero.mean(NONE, trials)
        low, high = widened(change, zero.samples(key, trials) - zero.samples(NONE, trials), len(trials))
        assert (cell.change, cell.change_low, cell.change_high) == pytest.approx((change, low, high))
        assert cell.direction == (1 if low > 0 else -1 if high < 0 else 0)
    assert found.pairs["p_holm"].tolist() == holm(found.pairs["p_value"]).tolist()
    assert len(found.disagreements) == (found.pairs["apart"] | found.pairs["opposite"]).sum()
    row = only(found.ranks, of="k", k=4)
    keys = [(name, 4) for name in ("locos", "dla", "random")]
    trials = [t for t in mean.common(*keys) if t in zero.common(*keys)]
    x, y = ([one.mean(key, trials) for key in keys] for one in (mean, zero))
    rho: Any = stats.spearmanr(x, y)
    tau: Any = stats.kendalltau(x, y)
    assert row.spearman == pytest.approx(rho.statistic) and row.n_trials == len(trials)
    assert row.kendall == pytest.approx(tau.statistic) and row.n_rankings == 3


def test_opposite_interventions_are_found():
    base = right(10, 20)
    down = sweep({NONE: base, ("a", 5): right(0, 20), ("b", 5): right(10, 20)})
    up = sweep({NONE: base, ("a", 5): right(20, 20), ("b", 5): right(10, 20)})
    found = compare_interventions(SweepSet({"mean": down, "zero": up}), **QUICK)
    row = only(found.pairs, ranking="a")
    assert row.opposite and row.apart and row.difference == -1 and row.p_holm < 0.001
    assert not only(found.pairs, ranking="b").opposite and not only(found.pairs, ranking="b").apart
    assert found.disagreements["ranking"].tolist() == ["a"]
    assert set(found.ranks["reason"]) == {"only 2 rankings; an order needs 3"}


def test_why_there_is_no_order():
    flat = sweep({NONE: right(4, 4), **{(r, 5): right(2, 4) for r in "abc"}})
    found = compare_interventions(SweepSet({"mean": flat, "zero": flat}), **QUICK)
    assert set(found.ranks["reason"]) == {"all rankings have the same mean under one of the two"}
    only_a = sweep({NONE: right(4, 4), ("a", 5): right(2, 4)})
    ranks = compare_interventions(SweepSet({"mean": flat, "zero": only_a}), **QUICK).ranks
    assert set(ranks["reason"]) == {"only 1 ranking; an order needs 3"} and set(ranks["of"]) == {"k", "area"}


def test_interventions_are_refused():
    sweeps = study(n=6)
    with pytest.raises(UnknownName, match=r"intervention of the set.*'mean, kept'|'mean, kept'"):
        compare_interventions(sweeps, labels=["mean", "mean, kept"])
    with pytest.raises(InvalidInput, match=r"^the set has only the intervention 'mean'; an agreement needs two\.$"):
        compare_interventions(sweeps, labels=["mean"])
    other = sweep({("needles", "none", 0): right(4, 4), ("needles", "wu", 5): right(2, 4)})
    with pytest.raises(InvalidInput, match=r"^mean and zero share no ranking, k and trial of 'correct'\.$"):
        compare_interventions(SweepSet({"mean": sweeps["mean"], "zero": other}), **QUICK)


# -- properties ----------------------------------------------------------------------------------


def tables(result: SweepResult, worst: float = 0.0, **options: Any) -> list[pd.DataFrame]:
    options = QUICK | options
    return [
        areas(result, worst=worst, **options),
        minimal_k(result, worst=worst, **options),
        compare_rankings(result, n_perm=200, **options),
        dose_response(result, n_perm=200, **options),
        task_dissociation(result, "needles", worst=worst, n_perm=100, **options),
    ]


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), order=st.randoms(use_true_random=False))
def test_the_order_of_rows_does_not_matter(seed, order):
    result = planted(seed, n=7, draws=2)
    places = list(range(len(result.frame)))
    order.shuffle(places)
    shuffled = SweepResult(result.frame.iloc[places])
    named = {"task": result.tasks, "ranking": result.rankings}
    for build in (areas, minimal_k, compare_rankings, dose_response):
        pd.testing.assert_frame_equal(build(result, **named, **QUICK), build(shuffled, **named, **QUICK))


@settings(max_examples=6, deadline=None)
@given(seed=st.integers(0, 999), binary=st.booleans())
def test_a_ranking_against_itself_is_a_tie(seed, binary):
    frame = planted(seed, n=8, binary=binary, tasks={"needles": 1.0}).frame
    twin = frame.loc[frame["ranking"] == "locos"].assign(ranking="twin")
    table = compare_rankings(SweepResult(pd.concat([frame, twin])), ranking=["locos", "twin"], **QUICK)
    assert len(table) == 4 and (table["difference"] == 0).all() and (table["p_value"] == 1).all()
    assert (table["ci_low"] <= 0).all() and (table["ci_high"] >= 0).all() and (table["p_holm"] == 1).all()


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 999), factor=st.sampled_from([0.125, 3.0, 1000.0]), shift=st.sampled_from([0.0, -7.0, 40.0]))
def test_scaling_and_shifting_with_the_worst_value_changes_no_share(seed, factor, shift):
    frame = holed(seed).frame
    scaled = SweepResult(frame.assign(value=factor * frame["value"] + shift))
    a, b = tables(SweepResult(frame), 1.0), tables(scaled, factor + shift)
    for name in ("over", "over_low", "over_high"):
        np.testing.assert_allclose(a[0][name], b[0][name], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(factor * a[0]["auc"] + shift, b[0]["auc"])
    assert a[1][["k", "k_low", "k_high"]].equals(b[1][["k", "k_low", "k_high"]])
    for name in ("difference", "ci_low", "ci_high"):
        np.testing.assert_allclose(factor * a[2][name], b[2][name], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(a[2]["p_value"], b[2]["p_value"])
    np.testing.assert_allclose(factor * a[3]["change"], b[3]["change"], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(a[4]["difference"], b[4]["difference"], rtol=1e-6, atol=1e-9)


@settings(max_examples=8, deadline=None)
@given(seed=st.integers(0, 9999), n=st.integers(2, 9))
def test_intervals_hold_their_value_and_stay_in_bounds(seed, n):
    result = planted(seed, n=n, draws=2)
    area, least, pairs, doses, lost = tables(result)
    for frame, names in (
        (area, ("auc", "auc_low", "auc_high")),
        (pairs, ("difference", "ci_low", "ci_high")),
        (doses, ("change", "ci_low", "ci_high")),
        (lost, ("difference", "ci_low", "ci_high")),
    ):
        value, low, high = (frame[name].dropna() for name in names)
        assert (low <= value).all() and (value <= high).all()
    assert area["auc_low"].min() >= 0 and area["auc_high"].max() <= 1
    assert pairs["ci_low"].min() >= -1 and pairs["ci_high"].max() <= 1
    reached = least.loc[np.isfinite(least["k"])]
    assert (reached["k_low"] <= reached["k"]).all() and (reached["k"] <= reached["k_high"]).all()
    assert lost.loc[lost["valid"], "lost_high"].max() <= 1 + 1e-12 or not lost["valid"].any()


def test_a_number_does_not_depend_on_what_else_is_asked_for():
    result = planted(3, n=10)
    whole = tables(result)
    for at, build in ((0, areas), (1, minimal_k)):
        alone = build(result, task="recall", ranking="dla", **QUICK)
        rows = whole[at].query("task == 'recall' and ranking == 'dla'").reset_index(drop=True)
        pd.testing.assert_frame_equal(alone, rows)


# -- simulations ---------------------------------------------------------------------------------

CHANCES = {"a": (0.7, 0.4, 0.2), "b": (0.7, 0.4, 0.2), "c": (0.8, 0.7, 0.6)}


def simulated(binary: bool, runs: int) -> list[SweepResult]:
    """Sweeps in which a and b do the same and c less."""
    options: Any = {"rankings": CHANCES, "draws": 0, "n": 16, "binary": binary}
    return [planted(seed, tasks={"needles": 1.0, "same": 1.0, "spared": 0.0}, **options) for seed in range(runs)]


def truth(binary: bool) -> SweepResult:
    tasks = {"needles": 1.0, "same": 1.0, "spared": 0.0}
    return planted(12345, rankings=CHANCES, draws=0, n=20000, binary=binary, tasks=tasks)


@pytest.mark.parametrize("binary", [True, False])
def test_coverage_and_false_positives_of_simulated_sweeps(binary):
    runs = 60
    means: Any = truth(binary).frame.groupby(["task", "ranking", "k"])["value"].mean()
    height = {r: trapezoid((0, 1, 5, 10), [means["needles", "none", 0], *(means["needles", r, k] for k in (1, 5, 10))])
              for r in "abc"}  # fmt: skip
    over = {r: 1 - height[r] / means["needles", "none", 0] for r in "abc"}
    share = {task: 1 - means[task, "a", 10] / means[task, "none", 0] for task in ("needles", "same", "spared")}
    hits: dict[str, list[bool]] = {}
    for result in simulated(binary, runs):
        area = areas(result, task="needles", n_boot=200)
        pairs = compare_rankings(result, task="needles", n_boot=200, n_perm=300)
        lost = task_dissociation(result, "needles", ranking="a", n_boot=200, n_perm=200)
        of_a = only(area, ranking="a")
        null, real = only(pairs, of="area", a="a", b="b"), only(pairs, of="area", a="a", b="c")
        same, apart = (only(lost, control=task, k=10) for task in ("same", "spared"))
        for name, hit in (
            ("auc", of_a.auc_low <= height["a"] <= of_a.auc_high),
            ("over", of_a.over_low <= over["a"] <= of_a.over_high),
            ("difference", real.ci_low <= height["a"] - height["c"] <= real.ci_high),
            ("null difference", null.ci_low <= 0 <= null.ci_high),
            ("dissociation", apart.ci_low <= share["needles"] - share["spared"] <= apart.ci_high),
            ("null dissociation", same.ci_low <= 0 <= same.ci_high),
            ("false p", null.p_value > 0.05),
            ("false dissociation", same.p_value > 0.05),
            ("any false", pairs.loc[(pairs["a"] == "a") & (pairs["b"] == "b"), "p_holm"].min() > 0.05),
            ("found difference", real.p_holm <= 0.05),
            ("found dissociation", apart.p_value <= 0.05),
        ):
            hits.setdefault(name, []).append(bool(hit))
    rates = {name: np.mean(hit) for name, hit in hits.items()}
    found = {name: rates.pop(name) for name in ("found difference", "found dissociation")}
    # Of 60 runs at 95%, fewer than 52 happen less than once in 400.
    assert {name: rate for name, rate in rates.items() if rate < 52 / runs} == {}
    assert found["found difference"] > 0.6 and found["found dissociation"] > 0.9


def test_minimal_k_of_simulated_sweeps_holds_the_true_one():
    # The true curve is at half of 0.9 between 1 (0.7) and 5 (0.4) heads.
    told = [only(minimal_k(result, task="needles", n_boot=100), ranking="a") for result in simulated(True, 40)]
    assert np.mean([row.k == 5 for row in told]) > 0.5
    assert np.mean([row.k_low <= 5 <= row.k_high for row in told]) >= 0.87


# -- the paragraph -------------------------------------------------------------------------------


def test_verdict_tells_what_was_planted():
    text = verdict(study(1, n=40), target="needles", n_boot=200)
    for said in (
        "On needles (correct, heads ablated by mean) the model scores",
        "locos falls first: down to 50% of that at k = 5 [",
        "Over the whole curve it is told from dla (p ",
        "more than random heads: beyond them.",
        "of its own value: spared; needles loses a share greater by",
        "heads alone keep",
        "At 5 heads of locos, mean and zero are not told apart",
    ):
        assert said in text, text
    assert "nan" not in text.lower()


def test_verdict_says_what_it_cannot():
    alone = sweep({NONE: right(19, 20), ("locos", 5): right(19, 20)})
    text = verdict(alone, n_boot=100)
    for said in (
        "No ranking brings it down to 50% of that: locos not reached by k = 5.",
        "Whether it is more than random heads do cannot be said: none were ablated.",
        "Whether other tasks are spared cannot be said: none were measured.",
        "Whether its heads suffice cannot be said: no complement was ablated.",
    ):
        assert said in text, text
    nothing = verdict(sweep({NONE: right(0, 20), ("locos", 5): right(0, 20)}), n_boot=100)
    assert "What ablation takes away cannot be said: degenerate: 0 [" in nothing


def test_verdict_weighs_controls_by_what_they_lose():
    def told(lost: int) -> str:
        cells: dict[Any, Any] = {
            ("needles", "none", 0): right(60, 60), ("needles", "locos", 5): right(0, 60),
            ("recall", "none", 0): right(60, 60), ("recall", "locos", 5): right(60 - lost, 60),
        }  # fmt: skip
        return verdict(sweep(cells), n_boot=200)

    assert "recall loses 0.00 [" in told(0) and ": spared; needles loses a share greater by" in told(0)
    assert "recall loses 0.50 [" in told(30) and ": not spared;" in told(30)
    assert "whether it is spared (below 0.1) is not settled" in told(7)


def test_verdict_at_a_k_and_ranking_of_choice():
    sweeps = study(1, n=20)
    text = verdict(sweeps, ranking="dla", k=1, n_boot=60)
    assert "dla falls" in text or "dla does not bring it down" in text
    assert "At 1 head" in text and "of dla, mean and zero" in text
    with pytest.raises(InvalidInput, match=r"was not measured for 'dla' at k=3; measured there: k in \[1, 5, 10\]"):
        verdict(sweeps, ranking="dla", k=3, n_boot=60)
    with pytest.raises(InvalidInput, match=r"^k is 0; it must be a whole number >= 1\.$"):
        verdict(sweeps, k=0, n_boot=60)


def test_bottom_and_nearest_sets_are_controls_and_not_judged():
    cells: dict[Any, Any] = {NONE: right(20, 20), ("locos", 5): right(4, 20), ("bottom_up", 5): right(9, 20)}
    text = verdict(
        sweep(cells | {("locos bottom", 5): right(1, 20), ("locos nearest zero", 5): right(0, 20)}), n_boot=60
    )
    assert "bottom_up k = 5" in text and "locos bottom" not in text and "nearest" not in text
    assert "locos falls together with bottom_up" in text


def test_seeds_of_an_intervention_are_averaged_before_a_random_set_is_drawn():
    rng = np.random.default_rng(3)
    n, sets, seeds = 14, 4, 3
    own = rng.integers(0, 2, (seeds, n)).astype(float)
    drawn = rng.integers(0, 2, (sets * seeds, n)).astype(float)  # draw = set * seeds + seed, as plans number them
    result = sweep({NONE: right(n, n), ("locos", 5): own, ("random", 5): drawn})
    found = result.beyond_control("locos", 5, "correct", "needles", n_boot=300)
    by_set = [[np.mean([drawn[s * seeds + i][t] for i in range(seeds)]) for t in range(n)] for s in range(sets)]
    averaged = sweep({NONE: right(n, n), ("locos", 5): own.mean(axis=0), ("random", 5): np.array(by_set)})
    want = averaged.beyond_control("locos", 5, "correct", "needles", n_boot=300)
    assert found.estimate == pytest.approx(drawn.mean() - own.mean())
    assert (found.low, found.high, found.n) == pytest.approx((want.low, want.high, n))
    said = verdict(result, k=5, n_boot=60)
    assert f"its cost is not told from that of random heads ({found.estimate:.2f} [" in said, said


def test_verdict_refuses():
    with pytest.raises(InvalidInput, match=r"^in this sweep k counts the heads kept, .*; a verdict needs one\."):
        verdict(planted(n=6, kept=True))
    with pytest.raises(InvalidInput, match=r"^'mean, kept' has no run without ablation; give a sweep that ablates"):
        verdict(study(n=6), label="mean, kept")
    only_random = sweep({NONE: right(4, 4), ("random", 5): [right(3, 4), right(4, 4)]})
    with pytest.raises(
        InvalidInput, match=r"^the sweep has only random rankings \(random\); there is none to judge\.$"
    ):
        verdict(only_random)


# -- bad input -----------------------------------------------------------------------------------


@pytest.mark.parametrize("build", [areas, minimal_k, compare_rankings, dose_response])
def test_unknown_names_and_options_are_refused(build):
    result = planted(n=6)
    for name, kind in (("metric", "metric"), ("task", "task"), ("ranking", "ranking")):
        with pytest.raises(UnknownName, match=rf"{kind} of the sweep"):
            build(result, **{name: "no such"})
    with pytest.raises(InvalidInput, match=r"^level is 1\.5; a confidence level lies between 0 and 1"):
        build(result, level=1.5)
    with pytest.raises(InvalidInput, match=r"^n_boot is 1; it must be a whole number >= 2\.$"):
        build(result, n_boot=1)
    with pytest.raises(InvalidInput, match=r"^seed is -1; it must be a whole number >= 0\.$"):
        build(result, seed=-1)


@pytest.mark.parametrize("build", [areas, minimal_k, lambda s: task_dissociation(s, "needles")])
def test_kept_sides_are_sent_to_where_they_belong(build):
    with pytest.raises(
        InvalidInput, match=r"^in this sweep k counts the heads kept, .* to necessity_sufficiency\(\)\.$"
    ):
        build(planted(n=6, kept=True))
    with pytest.raises(InvalidInput, match=r"^the set has complements alone \(mean, kept\); give one that ablates"):
        build(SweepSet({"mean, kept": planted(n=6, kept=True)}))


@pytest.mark.usefixtures("as_users_run")
def test_values_of_the_wrong_kind_are_refused():
    result: Any = planted(n=6)
    with pytest.raises(InvalidInput, match=r"^sweep is a dict; give a SweepResult or a SweepSet\.$"):
        areas({})  # type: ignore[arg-type]
    worst: Any
    for worst in (math.nan, "low", True, {"needles": None}):
        with pytest.raises(InvalidInput, match=r"^worst is .* for 'needles'; give the value at which nothing is left"):
            areas(result, worst=worst, n_boot=5)
    for share in (1.0, -0.1):
        with pytest.raises(InvalidInput, match=rf"^share is {share}; give the share .* that may be left, 0 to below 1"):
            minimal_k(result, share=share)
    with pytest.raises(InvalidInput, match=r"^there is only the ranking 'locos'; a comparison needs two\.$"):
        compare_rankings(result, ranking="locos")
    with pytest.raises(InvalidInput, match=r"^the controls of 'needles' are \['needles'\]; give other tasks of"):
        task_dissociation(result, "needles", "needles")
    with pytest.raises(InvalidInput, match=r"^n_perm is 0; it must be a whole number >= 1\.$"):
        compare_rankings(result, n_perm=0)
    with pytest.raises(InvalidInput, match=r"^'a' on 'needles' has only k=\[5\]; an area needs two values of k"):
        areas(sweep({("a", 5): right(2, 4)}))
    with pytest.raises(InvalidInput, match=r"^no two of a, b share a k and a trial of 'correct'\.$"):
        compare_rankings(sweep({NONE: right(4, 4), ("a", 5): right(2, 4), ("b", 6): right(2, 4)}))
