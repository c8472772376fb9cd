"""How many calibration trials it takes, where the heads lie in depth, and whether they follow the wording."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_samples import made, noisy, own, splits

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.verdicts import (
    accuracy,
    debias,
    depth_profile,
    judge,
    label_credit,
    learning_curve,
    permutation_test,
    select,
)
from mechheads.verdicts.subsets import draw_groups

# -- parts of a set ------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2)), min_size=1, max_size=40),
    st.integers(0, 12),
    st.integers(0, 99),
)
@settings(max_examples=80, deadline=None)
def test_parts_keep_groups_whole_and_quotas(trials, quota, seed):
    groups = [f"g{g}" for g, _ in trials]
    classes = np.array([c for _, c in trials])
    places = draw_groups(groups, classes, np.full(3, quota), np.random.default_rng(seed))
    assert (np.bincount(classes[places], minlength=3) <= quota).all()
    taken = {groups[i] for i in places}
    assert sorted(places) == places.tolist() == [i for i, g in enumerate(groups) if g in taken]
    left = quota - np.bincount(classes[places], minlength=3)
    for g in set(groups) - taken:  # what is left out would not have fitted
        made_of = np.bincount(classes[[i for i, mine in enumerate(groups) if mine == g]], minlength=3)
        assert (made_of > left).any()


# -- learning curve ------------------------------------------------------------------------------


def test_the_learning_curve_follows_its_draws():
    scores = splits({(1, 2): 0.8, (2, 2): 0.75}, n=400)
    got = learning_curve(scores, sizes=(20, 100, 400), draws=6, k=2)
    cal, test = scores.split("calibration"), accuracy(scores.split("test"))
    assert got.heads == select(cal, 2) == HeadSet.parse("L1H2, L2H2")
    assert got.full == pytest.approx((test[1, 2] + test[2, 2]) / 2)
    assert (got.n_calibration, got.n_test, got.chance) == (400, 300, 0.5)
    assert got.baseline == pytest.approx(own(scores.split("test")).mean())
    assert list(got.draws.groupby("size").size()) == [6, 6, 6] and (got.draws["n"] == got.draws["size"]).all()
    for row in got.draws.to_dict("records"):
        heads = HeadSet.parse(row["heads"])
        assert row["test"] == pytest.approx(np.mean([test[h.layer, h.head] for h in heads]))
        assert row["overlap"] == len(heads & got.heads) / 2
    whole = got.draws.loc[got.draws["size"] == 400]
    assert (whole["overlap"] == 1).all() and (whole["test"] == got.full).all()
    assert whole["calibration"].iloc[0] == pytest.approx(np.mean([accuracy(cal)[1, 2], accuracy(cal)[2, 2]]))
    bands = got.bands().set_index("size")
    mine = got.draws.loc[got.draws["size"] == 20, "test"]
    assert bands.loc[20, "test"] == pytest.approx(mine.mean())
    assert (bands.loc[20, "test_low"], bands.loc[20, "test_high"]) == pytest.approx(
        tuple(np.quantile(mine, [0.05, 0.95]))
    )
    assert bands.loc[20, "calibration"] > bands.loc[20, "test"]  # flattered
    assert bands.loc[20, "test"] < bands.loc[400, "test"]


def test_enough_is_where_the_curve_stays_within_tolerance():
    import pandas as pd

    curve = learning_curve(splits({(1, 2): 0.8}, n=80, n_test=40), sizes=(20, 40, 60, 80), draws=1)
    heights = {20: 0.8, 40: 0.7, 60: 0.795, 80: 0.8}
    shaped = replace(
        curve, draws=pd.DataFrame([r | {"test": heights[r["size"]]} for r in curve.draws.to_dict("records")])
    )
    assert [shaped.enough(t) for t in (0.0, 0.004, 0.005, 0.01, 0.1)] == [80, 80, 60, 60, 20]
    assert "From 60 trials on it stays within 0.01 of what 80 give." in shaped.summary()
    assert "more trials may do better still" in shaped.summary(tolerance=0.001)
    assert json.loads(json.dumps(shaped.to_dict()))["enough"] == 60
    with pytest.raises(InvalidInput, match=r"tolerance is -1\.0; expected a difference of accuracies, 0 or more"):
        shaped.enough(-1.0)


def test_parts_of_the_learning_curve_are_balanced_in_label_and_keep_groups_whole():
    from mechheads.verdicts.learning import _balanced

    scores = noisy(300, width=3, group_size=3)
    for size in (30, 100, 299):
        places = _balanced(scores, size, np.random.default_rng(size))
        labels = np.bincount(scores.labels[places], minlength=3)
        assert (labels <= -(-size // 3)).all() and size * 0.85 <= len(places) <= size
        taken = {scores.groups[i] for i in places}
        assert len(places) == sum(g in taken for g in scores.groups)
    singles = _balanced(noisy(300, width=3), 100, np.random.default_rng(0))
    assert sorted(np.bincount(noisy(300, width=3).labels[singles])) == [33, 33, 34]


def test_sizes_beyond_what_there_is_are_dropped_with_a_warning():
    scores = splits({}, n=120, n_test=20)
    with pytest.warns(
        UserWarning, match=r"Sizes 200, 400 are left out: balanced parts of the 120 calibration trials have"
    ):
        got = learning_curve(scores, sizes=(60, 400, 200), draws=2)
    assert sorted(set(got.draws["size"])) == [60]
    assert sorted(set(learning_curve(scores, draws=1).draws["size"])) == [25, 50, 100, 120]
    skewed = scores.take([i for i in range(140) if scores.labels[i] == 0 or i % 4 == 0])
    most = 2 * int((skewed.split("calibration").labels == 1).sum())
    assert sorted(set(learning_curve(skewed, draws=1).draws["size"]))[-1] == most
    with pytest.raises(
        InvalidInput, match=r"sizes are \[200\], but balanced parts of the 120 calibration trials have at most"
    ):
        learning_curve(scores, sizes=[200])
    with pytest.raises(InvalidInput, match="candidate 1 is right in no calibration trial, so no part is balanced"):
        learning_curve(replace(scores, labels=np.zeros(140, dtype=int)))
    with pytest.raises(InvalidInput, match="a size is 1; it must be a whole number >= 2"):
        learning_curve(scores, sizes=[1])


def test_the_learning_curve_repeats_by_seed():
    scores = splits({(1, 2): 0.6}, n=120, n_test=60)
    one, again, other = (learning_curve(scores, sizes=(30,), draws=5, seed=s).draws for s in (0, 0, 1))
    assert one.equals(again) and not one.equals(other)


def test_the_learning_curve_with_an_offset_takes_that_of_each_part():
    """By hand: median margins of the part drawn, for choosing and for the test trials."""
    from mechheads.verdicts.learning import _balanced

    scores = splits({(0, 2): 0.7}, n=80, n_test=60, shape=(2, 3))
    values = scores.values.copy()
    noise = np.random.default_rng(3).normal(size=140)
    values[:, 1, 1, 1] = values[:, 0, 1, 1] + 6 + (2.0 * scores.labels - 1) + 0.7 * noise  # knows, but likes one answer
    scores = replace(scores, values=values)
    got, plain = (
        learning_curve(scores, sizes=(20, 80), draws=4, offset="median"),
        learning_curve(scores, sizes=(80,), draws=1),
    )
    assert got.heads.labels == ["L1H1"] and plain.heads.labels == ["L0H2"]
    assert (got.offset, plain.offset) == ("median", "none") and got.to_dict()["offset"] == "median"
    calibration, test = scores.split("calibration"), scores.split("test")
    margins, held_out = (x.values[:, 1].astype(float) - x.values[:, 0].astype(float) for x in (calibration, test))

    def right(part: np.ndarray, labels: np.ndarray, off: np.ndarray) -> np.ndarray:
        return ((part - off > 0) == labels[:, None, None]).mean(axis=0)

    for row in got.draws.to_dict("records"):
        places = _balanced(calibration, row["size"], np.random.default_rng([0, row["size"], row["draw"]]))
        off = np.median(margins[places], axis=0)
        own_accuracy = right(margins[places], calibration.labels[places], off)
        head = HeadSet.parse(row["heads"])[0]
        assert own_accuracy[head.layer, head.head] == own_accuracy.max() == row["calibration"]
        assert row["test"] == pytest.approx(right(held_out, test.labels, off)[head.layer, head.head])
    off = np.median(margins, axis=0)
    assert got.full == pytest.approx(right(held_out, test.labels, off)[1, 1]) and got.full > 0.8 > plain.full
    judged = judge(calibration, test, offset="median", n_boot=2, n_perm=9)
    assert got.full == pytest.approx(judged.accuracy("test")[1, 1])


def test_an_offset_that_the_learning_curve_cannot_take_is_refused():
    scores = splits({}, n=40, n_test=20)
    mixed = replace(scores, candidates=[(" yes", " no")] * 30 + [(" true", " false")] * 30)
    with pytest.raises(
        InvalidInput, match="a median offset belongs to one candidate, so all trials must have the same"
    ):
        learning_curve(mixed, sizes=(20,), draws=1, offset="median")
    with pytest.raises(UnknownName, match=r"unknown calibration offset 'mode'\. .*Known: median, none\."):
        learning_curve(scores, sizes=(20,), draws=1, offset="mode")


# -- depth ---------------------------------------------------------------------------------------


def test_the_depth_profile_counts_by_layer():
    planted = {(5, 0): 0.85, (4, 1): 0.8, (4, 2): 0.8, (1, 1): 0.2, (0, 3): 0.85}
    j = judge(noisy(400, shape=(6, 4), planted=planted), noisy(300, shape=(6, 4), planted=planted, seed=1, name="b"))
    got = depth_profile(j)
    assert got.frame["significant"].tolist() == [1, 0, 0, 0, 2, 1] and got.frame["inverse"].tolist() == [
        0,
        1,
        0,
        0,
        0,
        0,
    ]
    assert (got.first_third_share, got.last_third_share) == (0.25, 0.75) and got.inverse_first_third_share == 1.0
    assert got.mean_depth == pytest.approx((0.5 + 2 * 4.5 + 5.5) / 6 / 4)
    right = j.accuracy("test")
    np.testing.assert_allclose(got.frame["best"], right.max(axis=1))
    np.testing.assert_allclose(got.frame["mean"], right.mean(axis=1))
    assert got.frame["best_head"].tolist() == [f"L{i}H{h}" for i, h in enumerate(right.argmax(axis=1))]
    assert got.on == "test" and depth_profile(j, on="calibration").n_trials == 400
    assert (
        "4 heads significantly more often right than chance, in layers 0, 4, 5 of 6; 25% in the first" in got.summary()
    )
    assert json.loads(json.dumps(got.to_dict()))["first_third_share"] == 0.25


def test_a_depth_profile_without_significant_heads_says_so():
    values = np.random.default_rng(0).normal(size=(60, 2, 3, 2))
    values[:, :, 1] = np.nan
    got = depth_profile(judge(made(values, np.arange(60) % 2), n_perm=99))
    assert np.isnan([got.first_third_share, got.mean_depth, got.inverse_first_third_share]).all()
    assert got.summary() == "No head is significant on 60 calibration trials, so there is no depth to tell."
    assert got.frame["heads"].tolist() == [2, 0, 2] and np.isnan(got.frame["best"][1])
    assert json.loads(json.dumps(got.to_dict()))["layers"][1]["best"] is None


# -- wording -------------------------------------------------------------------------------------


def worded(n: int = 300) -> tuple[CandidateScores, CandidateScores, CandidateScores]:
    """L0H0 reasons, L0H1 reads a word that flipping leaves in place, L0H2 knows from the statement, others nothing."""
    rng = np.random.default_rng(0)
    labels = np.arange(n) % 2
    groups = [f"w{i // 2}" for i in range(n)]

    def scores(labels: np.ndarray, says: dict[int, np.ndarray], name: str, twins: bool) -> CandidateScores:
        values = rng.normal(size=(n, 2, 1, 6))
        for head, answer in says.items():
            right = np.where(rng.random(n) < 0.85, answer, 1 - answer)
            values[:, :, 0, head] = (right[:, None] == [0, 1]) + 0.1 * rng.random((n, 2))
        rows = [{"twin": f"o{i:04d}"} if twins else {} for i in range(n)]
        return made(values, labels, groups=groups, records=rows, name=name)

    return (
        scores(labels, {0: labels, 1: labels, 2: labels}, "o", False),
        scores(1 - labels, {0: 1 - labels, 1: labels, 2: 1 - labels}, "f", True),
        scores(labels, {2: labels}, "s", True),
    )


def test_heads_that_exploit_wording_are_flagged_and_others_not():
    original, flipped, alone = worded()
    got = debias(original, flipped, alone)
    frame = got.frame().set_index("label")
    assert got.flagged.labels == ["L0H1", "L0H2"]
    assert frame["reason"].tolist()[:3] == [
        "",
        "wording: less often right on flipped twins",
        "statement alone tells it",
    ]
    np.testing.assert_array_equal(frame["original"], accuracy(original)[0])
    np.testing.assert_array_equal(frame["flipped"], accuracy(flipped)[0])
    np.testing.assert_array_equal(frame["statement_only"], accuracy(alone)[0])
    np.testing.assert_allclose(frame["difference"], accuracy(original)[0] - accuracy(flipped)[0], atol=1e-12)
    same_groups = replace(alone, records=[{"group": f"w{i // 2}"} for i in range(300)])
    np.testing.assert_array_equal(frame["p_statement"], permutation_test(same_groups).p_two_sided[0])
    for lead, value in (("original",) * 2, ("flipped",) * 2, ("difference",) * 2, ("statement", "statement_only")):
        assert (frame[f"{lead}_low"] <= frame[value]).all() and (frame[value] <= frame[f"{lead}_high"]).all()
    told = got.summary()
    assert told.startswith(
        "Of 6 heads on 300 pairs of twins and 300 statements alone 2 flagged for exploiting wording: L0H1"
    )
    assert told.endswith(" Flags by a drop are for one head each, not corrected for 6: some may be luck.")
    assert json.loads(json.dumps(got.to_dict()))["flagged"] == ["L0H1", "L0H2"]
    for heads in ("L0H1", "L0H2, L0H0"):  # one head needs no correction, and statements alone are corrected
        assert "luck" not in debias(original, flipped, alone, heads=heads).summary()


def test_wording_can_be_checked_for_some_heads_and_without_statements():
    original, flipped, alone = worded()
    got = debias(original, flipped, heads="L0H3, L0H0")
    assert got.heads.labels == ["L0H3", "L0H0"] and len(got.flagged) == 0
    assert got.statement_only is None
    assert got.frame()[["statement_only", "statement_low", "p_statement"]].isna().to_numpy().all()
    assert "none is flagged for exploiting wording. The largest drop from original to flipped" in got.summary()
    assert json.loads(json.dumps(got.to_dict()))["heads"][0]["p_statement"] is None
    turned = debias(original, flipped, alone, heads="L0H1", inverse="L0H1").frame().iloc[0]
    straight = debias(original, flipped, alone, heads="L0H1").frame().iloc[0]
    assert turned["difference"] == pytest.approx(-straight["difference"]) and not turned["flagged"]
    assert turned["p_statement"] == straight["p_statement"]


def test_twins_are_paired_by_name_in_any_order():
    original, flipped, alone = worded()
    order = np.random.default_rng(1).permutation(300)[:200]
    got = debias(original, flipped.take(order), alone.take(order[:50]), tolerance=0.0)
    right = label_credit(original)[order, 0]
    np.testing.assert_array_equal(got.original, right)
    np.testing.assert_array_equal(got.flipped, label_credit(flipped)[order, 0])
    assert got.groups == tuple(original.groups[i] for i in order)
    sorted_twins = debias(original, flipped.take(np.sort(order)), alone.take(np.sort(order[:50])), tolerance=0.0)
    np.testing.assert_allclose(got.frame()["difference_low"], sorted_twins.frame()["difference_low"], atol=1e-5)
    np.testing.assert_array_equal(got.p_statement, sorted_twins.p_statement)


def test_twins_that_do_not_match_are_refused():
    original, flipped, _ = worded(20)
    with pytest.raises(InvalidInput, match=r"trial 'f0000' of flipped has twin 'o0000', which is no trial of original"):
        debias(original.take(range(1, 20)), flipped)
    with pytest.raises(InvalidInput, match="trial 'o0000' of flipped has twin None, which is no trial of original"):
        debias(original, original)
    same = replace(flipped, records=[{"twin": "o0003"}] * 20)
    with pytest.raises(
        InvalidInput, match="trials 'f0000' and 'f0001' of flipped both have twin 'o0003'; give one each"
    ):
        debias(original, same)
    with pytest.raises(
        InvalidInput, match=r"statement_only has \(layers, heads\) \(4, 5\), original \(1, 6\); both must come"
    ):
        debias(original, flipped, noisy(20))
    with pytest.raises(InvalidInput, match=r"tolerance is 1\.2; expected a number from 0 to below 1\."):
        debias(original, flipped, tolerance=1.2)
    with pytest.raises(InvalidInput, match="flipped holds no trials"):
        debias(original, flipped.take([]))


def test_heads_without_scores_are_left_out_of_the_wording_check_unless_named():
    original, flipped, _ = worded(40)
    values = flipped.values.copy()
    values[2, 1, 0, 4] = np.nan
    holed = replace(flipped, values=values)
    assert debias(original, holed).heads.labels == ["L0H0", "L0H1", "L0H2", "L0H3", "L0H5"]
    with pytest.raises(InvalidInput, match=r"L0H4 has no score in trial 'f0002'; leave the head or the trial out\."):
        debias(original, holed, heads="L0H4")
    with pytest.raises(
        InvalidInput, match="no head has a score in every trial of all sets; there is nothing to compare"
    ):
        debias(original, replace(flipped, values=np.full_like(values, np.nan)))
