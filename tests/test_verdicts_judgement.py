"""The permutation test against all exchanges there are, its error rates by simulation, and what a judgement says."""

from __future__ import annotations

import itertools
import json
import math
from collections import Counter
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
from mechheads.heads import HeadSet
from mechheads.verdicts import accuracy, auroc, judge, label_credit, offsets, permutation_test
from mechheads.verdicts.permutation import permuted_labels

# -- exchanges -----------------------------------------------------------------------------------


def all_exchanges(scores: CandidateScores) -> list[list[int]]:
    """Every way to exchange the label blocks of groups of the same make and to shuffle labels within a group."""
    names = sorted(set(scores.groups))
    places = {g: [i for i, mine in enumerate(scores.groups) if mine == g] for g in names}
    make = {g: tuple(sorted(len(scores.candidates[i]) for i in places[g])) for g in names}
    counts = [len(c) for c in scores.candidates]
    out = []
    for source in itertools.permutations(names):
        if any(make[a] != make[b] for a, b in zip(names, source, strict=True)):
            continue
        choices = []
        for target, origin in zip(names, source, strict=True):
            ways = []
            for order in itertools.permutations(places[origin]):
                if all(counts[i] == counts[j] for i, j in zip(places[target], order, strict=True)):
                    ways.append([(i, int(scores.labels[j])) for i, j in zip(places[target], order, strict=True)])
            choices.append(ways)
        for way in itertools.product(*choices):
            labels = dict(pair for block in way for pair in block)
            out.append([labels[i] for i in range(len(scores))])
    return out


def exact(scores: CandidateScores) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """``p``, ``p_inverse`` and expected accuracy over all exchanges, ``[head]`` each."""
    right = np.array(
        [label_credit(replace(scores, labels=np.array(e))).mean(axis=0).ravel() for e in all_exchanges(scores)]
    )
    expected = right.mean(axis=0)
    away, mine = right - expected, accuracy(scores).ravel() - expected
    p = [(away.max(axis=1) >= one - 1e-9).mean() for one in mine]
    inverse = [(away.min(axis=1) <= one + 1e-9).mean() for one in mine]
    return np.array(p), np.array(inverse), expected


def small(seed: int, groups: list[str] | None, counts: list[int]) -> CandidateScores:
    rng = np.random.default_rng(seed)
    n, width = len(counts), max(counts)
    values = rng.integers(0, 4, size=(n, width, 1, 4)).astype(float)
    values[:, :, 0, 3] = np.arange(width)  # answers alike everywhere
    for i, count in enumerate(counts):
        values[i, count:] = np.nan
    labels = [int(rng.integers(count)) for count in counts]
    return made(values, labels, candidates=[TEXTS[:c] for c in counts], groups=groups)


CASES = {
    "plain": (None, [2] * 6),
    "three candidates": (None, [3] * 6),
    "mixed candidates": (None, [2, 3, 2, 3, 2, 3]),
    "groups": (["a", "a", "b", "b", "c", "c"], [2] * 6),
    "unequal groups": (["a", "a", "a", "b", "b", "c", "c"], [2] * 7),
    "mixed groups": (["a", "a", "b", "b", "c", "c"], [2, 3, 3, 2, 2, 2]),
}


@pytest.mark.parametrize("case", CASES)
def test_p_values_equal_those_of_all_exchanges(case):
    for seed in (0, 1):
        scores = small(seed, *CASES[case])
        p, inverse, expected = exact(scores)
        got = permutation_test(scores, n_perm=20000, seed=seed)
        np.testing.assert_allclose(got.expected.ravel(), expected, atol=1e-12)
        np.testing.assert_allclose(got.excess, accuracy(scores) - got.expected, atol=1e-12)
        np.testing.assert_allclose(got.p.ravel(), p, atol=0.02)
        np.testing.assert_allclose(got.p_inverse.ravel(), inverse, atol=0.02)


@pytest.mark.parametrize("case", CASES)
def test_every_exchange_is_drawn_and_equally_often(case):
    scores = small(3, *CASES[case])
    possible = Counter(tuple(e) for e in all_exchanges(scores))
    drawn, shares = permuted_labels(scores, 30000, 0)
    seen = Counter(map(tuple, drawn.tolist()))
    assert set(seen) == set(possible)
    total = sum(possible.values())
    for one, times in possible.items():
        assert seen[one] / 30000 == pytest.approx(times / total, abs=0.015)
    often = np.array([[(drawn[:, t] == c).mean() for c in range(shares.shape[1])] for t in range(len(scores))])
    np.testing.assert_allclose(often, shares, atol=0.02)


def test_p_values_can_be_had_for_some_heads_and_in_blocks(monkeypatch):
    scores = noisy(60, planted={(1, 2): 0.75}, width=3)
    whole = permutation_test(scores, n_perm=200)
    few = permutation_test(scores, heads=HeadSet.parse("L1H2, L3H0"), n_perm=200)
    assert few.n_heads == 2 and np.isfinite(few.p).sum() == 2
    assert few.p[1, 2] <= whole.p[1, 2] and few.p[3, 0] <= whole.p[3, 0]
    assert (few.null_max <= whole.null_max + 1e-12).all()
    np.testing.assert_allclose(whole.p_two_sided, np.clip(whole.p_two_sided, np.minimum(whole.p, whole.p_inverse), 1))
    monkeypatch.setattr("mechheads.verdicts.permutation._BLOCK", 60 * 2 * 7)
    np.testing.assert_array_equal(permutation_test(scores, n_perm=200).p, whole.p)


def test_heads_without_scores_take_no_part():
    values = np.random.default_rng(0).normal(size=(40, 2, 2, 2))
    values[:, :, 1, 1] = np.nan
    values[3, 0, 0, 1] = np.nan
    got = permutation_test(made(values, np.arange(40) % 2), n_perm=99)
    assert got.n_heads == 2
    assert np.isnan(got.p[[1, 0], [1, 1]]).all() and np.isfinite(got.p[[0, 1], [0, 0]]).all()
    nothing = permutation_test(made(np.full((4, 2, 1, 1), np.nan), [0, 1, 0, 1]), n_perm=9)
    assert np.isnan(nothing.p).all() and nothing.n_heads == 0


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_a_constant_head_is_never_significant(share):
    """Not even where its answer is right in 9 of 10 trials."""
    labels = (np.arange(200) >= share * 200).astype(int)
    values = np.random.default_rng(0).normal(size=(200, 2, 1, 3))
    values[:, :, 0, 0] = [1, 0]
    values[:, :, 0, 1] = [0, 1]
    scores = made(values, labels)
    assert accuracy(scores)[0, 0] == pytest.approx(share)
    got = permutation_test(scores, n_perm=200)
    np.testing.assert_allclose(got.excess[0, :2], 0, atol=1e-12)
    alone = permutation_test(scores, heads=HeadSet("L0H0"), n_perm=200)
    assert alone.p[0, 0] == alone.p_inverse[0, 0] == 1.0
    assert got.p[0, 0] > 0.5 and got.p_inverse[0, 1] > 0.5


# -- error rates by simulation --------------------------------------------------------------------


def rejections(scores: CandidateScores, labellings: list[np.ndarray], name: str = "p") -> int:
    """In how many labellings some head is called at 0.05."""
    found = 0
    for i, labels in enumerate(labellings):
        test = permutation_test(replace(scores, labels=labels), n_perm=199, seed=i)
        found += bool((getattr(test, name) <= 0.05).any())
    return found


# With a true rate of 0.05, more than this many of 200 happen once in a thousand.
MOST = int(sps.binom.isf(0.001, 200, 0.05))


@pytest.mark.parametrize("name", ["p", "p_inverse", "p_two_sided"])
def test_under_permuted_labels_false_positives_are_at_most_the_level(name):
    """200 permutations on fixed scores; heads are alike, biased, tied and constant."""
    rng = np.random.default_rng(1)
    values = rng.normal(size=(120, 2, 5, 6)) + 0.8 * rng.normal(size=(120, 2, 1, 1))
    values[:, 0, 1] += 1.5
    values[:, :, 2] = np.round(values[:, :, 2])
    values[:, :, 3, 0] = [1, 0]
    scores = made(values, np.arange(120) % 2)
    found = rejections(scores, [rng.permutation(scores.labels) for _ in range(200)], name)
    assert 1 <= found <= MOST


def test_with_unbalanced_labels_and_more_candidates_the_level_holds_too():
    rng = np.random.default_rng(2)
    labels = rng.choice(4, size=100, p=[0.7, 0.1, 0.1, 0.1])
    scores = made(rng.normal(size=(100, 4, 4, 4)) + np.array([1, 0, 0, 0])[:, None, None], labels)
    found = rejections(scores, [rng.permutation(labels) for _ in range(200)])
    assert 1 <= found <= MOST


def test_with_groups_the_level_holds_only_because_blocks_are_exchanged():
    """Questions of a world share label and answer: 30 worlds, not 150 questions, are what is known."""
    rng = np.random.default_rng(3)
    answer = np.repeat(rng.normal(size=(30, 2, 4, 5)), 5, axis=0)
    scores = made(
        answer + 0.1 * rng.normal(size=answer.shape), [0] * 150, groups=[f"w{i // 5:02d}" for i in range(150)]
    )
    labellings = [np.repeat(rng.permutation(np.arange(30) % 2), 5) for _ in range(200)]
    assert rejections(scores, labellings) <= MOST
    assert rejections(replace(scores, records=()), labellings[:40]) > 20


def test_a_head_that_knows_is_found_and_so_is_one_that_knows_the_opposite():
    planted = {(1, 2): 0.7, (3, 4): 0.3}
    found = inverse = wrong = 0
    for seed in range(20):
        j = judge(noisy(400, shape=(6, 8), planted=planted, seed=seed), n_perm=199, n_boot=2)
        found += "L1H2" in j.significant()
        inverse += "L3H4" in j.inverse()
        wrong += len(j.significant() - HeadSet("L1H2")) + len(j.inverse() - HeadSet("L3H4")) > 0
    assert found == 20 and inverse == 20 and wrong <= 6


# -- a judgement ----------------------------------------------------------------------------------


def pair(planted: dict[tuple[int, int], float], *, own: float = 0.5, n: int = 400, **options):
    a = noisy(n, planted=planted, own=own, name="a", **options)
    return a, noisy(200, planted=planted, own=own, seed=1, name="b", **options)


def test_its_numbers_are_those_of_the_trials():
    a, b = pair({(2, 1): 0.8, (0, 0): 0.2}, own=0.65)
    j = judge(a, b)
    frame = j.frame()
    names = (
        "layer head label accuracy_calibration accuracy ci_low ci_high auroc auroc_low auroc_high p_calibration "
        "p_inverse_calibration p p_inverse direction"
    )
    assert " ".join(frame.columns) == names
    assert frame["label"].tolist() == [f"L{i}H{h}" for i in range(4) for h in range(5)]
    np.testing.assert_array_equal(frame["accuracy_calibration"], accuracy(a).ravel())
    np.testing.assert_array_equal(frame["accuracy"], accuracy(b).ravel())
    np.testing.assert_array_equal(frame["auroc"], auroc(b).ravel())
    assert ((frame["ci_low"] <= frame["accuracy"]) & (frame["accuracy"] <= frame["ci_high"])).all()
    assert ((frame["auroc_low"] <= frame["auroc"]) & (frame["auroc"] <= frame["auroc_high"])).all()
    for side, scores in (("calibration", a), ("test", b)):
        test = permutation_test(scores)
        np.testing.assert_array_equal(j.p(side), test.p)
        np.testing.assert_array_equal(j.p_inverse(side), test.p_inverse)
        np.testing.assert_array_equal(j.credit(side), label_credit(scores))
        assert j.chance(side) == 0.5
    directions = dict(zip(frame["label"], frame["direction"], strict=True))
    assert directions.pop("L2H1") == "right" and directions.pop("L0H0") == "inverse"
    assert set(directions.values()) == {"none"}
    own = (b.baseline.argmax(axis=1) == b.labels).astype(float)
    assert j.baseline().estimate == pytest.approx(own.mean())
    d = j.difference("L2H1")
    assert d.estimate == pytest.approx(label_credit(b)[:, 2, 1].mean() - own.mean())
    assert d.low < d.estimate < d.high
    assert repr(j) == "Judgement(400 calibration trials, 200 test trials, 4 layers x 5 heads)"


def test_passing_heads_are_ordered_by_calibration_and_may_have_to_pass_twice():
    a, b = pair({(2, 1): 0.75, (3, 3): 0.95, (1, 0): 0.1, (1, 1): 0.25})
    j = judge(a, b)
    assert j.significant().labels == ["L3H3", "L2H1"] and j.inverse().labels == ["L1H0", "L1H1"]
    assert j.significant(on="both") == j.significant(on="calibration") == j.significant(on="test")
    lost = judge(a, noisy(200, planted={(3, 3): 0.95}, seed=1, name="b"))
    assert lost.significant(on="calibration").labels == ["L3H3", "L2H1"]
    assert lost.significant(on="both").labels == lost.significant().labels == ["L3H3"]


def test_its_verdict_names_heads_that_pass_with_their_numbers_and_the_models():
    a, b = pair({(2, 1): 0.85, (3, 3): 0.8, (0, 0): 0.2}, own=0.6)
    j = judge(a, b)
    told = j.verdict()
    assert told.startswith(
        "2 of 20 heads are right more often than chance on 200 held-out trials, corrected for having"
    )
    assert f"L2H1, right in {j.accuracy_of('L2H1')} (p = 0.001); L3H3" in told
    assert f"The model's own output is right in {j.baseline()}; guessing would be in 0.50." in told
    assert f"L2H1 is better than the model's own output by {j.difference('L2H1').estimate:+.2f}" in told
    assert "1 head is wrong more often than chance (inverse): L0H0, right in" in told
    assert "No head passes" not in told


def test_its_verdict_says_plainly_that_no_head_passes():
    a, b = pair({})
    j = judge(a, b)
    told = j.verdict()
    lucky = np.unravel_index(int(j.accuracy().argmax()), (4, 5))
    assert told == (
        "No head passes correction: on 200 held-out trials none of 20 heads is right more often than chance allows for "
        f"the best of so many (smallest corrected p = {j.p().min():.3g}, needed 0.05). The model's own output is right "
        f"in {j.baseline()}; guessing would be in 0.50."
    )
    assert f"L{lucky[0]}H{lucky[1]}" not in told and len(j.significant()) == 0


def test_without_test_trials_it_speaks_of_calibration_and_warns():
    j = judge(noisy(400, planted={(2, 1): 0.85}))
    assert "on the 400 calibration trials" in j.verdict()
    assert j.warnings == [
        "There are no held-out trials: accuracies are of the trials that heads are chosen by, so the best are "
        "flattered."
    ]
    frame = j.frame()
    assert frame[["accuracy", "ci_low", "auroc", "p", "p_inverse"]].isna().to_numpy().all()
    assert frame.set_index("label")["direction"]["L2H1"] == "right"
    assert j.significant() == j.significant(on="calibration")
    with pytest.raises(
        InvalidInput, match=r"this judgement has no test trials; give judge\(calibration, test\), or on="
    ):
        j.accuracy("test")
    with pytest.raises(UnknownName, match=r"unknown split of a judgement 'train'\. .*Known: calibration, test\."):
        j.p("train")


def test_it_warns_with_numbers():
    labels = [0] * 90 + [1] * 30
    records = [{"rule": "modus_ponens" if i < 100 else "composed", "depth": 1 + (i % 2)} for i in range(120)]
    a = made(np.random.default_rng(0).normal(size=(120, 2, 2, 2)), labels, records=records)
    found = judge(a, noisy(50, shape=(2, 2), name="b")).warnings
    assert found == [
        "There are 120 calibration trials; with fewer than 400 the choice of heads is unsteady.",
        "The label is unbalanced: ' true' is right in 0.75 of 120 calibration trials (evenly: 0.50).",
        "Rules are unbalanced in calibration (trials each): modus_ponens 100, composed 20.",
        "The label goes with the rule: candidate 0 is right in 0.00 of 20 calibration trials with rule composed, "
        "overall in 0.75.",
    ]
    depths = replace(a, labels=np.arange(120) % 2, records=[{"depth": min(i, 9)} for i in range(120)])
    (_, told, *_) = judge(depths, noisy(50, shape=(2, 2), name="b")).warnings
    assert told == (
        "Depths are unbalanced in calibration (trials each): 9 111, 0 1, 1 1, 2 1, 3 1, 4 1, 5 1, ..., 8 1."
    )
    fine = judge(noisy(400, depth=[1 + i % 3 for i in range(400)]), noisy(50, name="b"))
    assert fine.warnings == []


def test_the_label_is_judged_by_text_where_texts_change_places():
    order = [(" true", " false"), (" false", " true")]
    values = np.random.default_rng(0).normal(size=(400, 2, 1, 2))
    a = made(values, [i % 2 for i in range(400)], candidates=[order[i % 2] for i in range(400)])
    (told,) = [w for w in judge(a, noisy(20, shape=(1, 2), name="b")).warnings if "label" in w]
    assert told == "The label is unbalanced: ' true' is right in 1.00 of 400 calibration trials (evenly: 0.50)."
    assert np.isnan(auroc(a)).all()
    j = judge(a, noisy(20, shape=(1, 2), name="b"), n_perm=50)
    np.testing.assert_allclose(j.permutation("calibration").excess, 0, atol=1e-12)


def test_groups_torn_apart_are_refused():
    a, b = noisy(40, group_size=4, name="t"), noisy(40, group_size=4, name="u")
    torn = replace(b, records=[{"group": f"t{i // 8}"} for i in range(40)])
    with pytest.raises(
        InvalidInput,
        match=r"group 't0' has trials in calibration and in test \(5 such groups\): heads would be tested on questions "
        r"they were chosen by\. Split the trials anew with groups kept whole\.",
    ):
        judge(a, torn)
    with pytest.raises(InvalidInput, match=r"group 't0000' has trials in calibration and in test \(40 such groups\)"):
        judge(replace(a, records=()), replace(a, records=()))


def test_bad_options_are_refused():
    a = noisy(20)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"level": 2.0}, "level is 2.0; a confidence level"),
        ({"n_boot": 1}, "n_boot is 1; it must be a whole number >= 2"),
        ({"n_perm": 0}, "n_perm is 0; it must be a whole number >= 1"),
        ({"seed": -1}, "seed is -1; it must be a whole number >= 0"),
        ({"offset": "mean"}, "unknown calibration offset 'mean'"),
        ({"normalise": "none"}, "unknown normalisation 'none'"),
    ]
    for options, message in cases:
        with pytest.raises(InvalidInput, match=message):
            judge(a, **options)
    with pytest.raises(
        InvalidInput, match=r"calibration has \(layers, heads\) \(4, 5\), test \(2, 2\); both must come from"
    ):
        judge(a, noisy(20, shape=(2, 2), name="b"))
    with pytest.raises(InvalidInput, match=r"calibration holds no trials; give at least one\."):
        judge(a.take([]))
    with pytest.raises(InvalidInput, match=r"alpha is 5\.0; a significance level lies between 0 and 1"):
        judge(a).significant(5.0)
    with pytest.raises(InvalidInput, match="L9H0 does not exist"):
        judge(a).difference("L9H0")


def test_a_median_offset_comes_from_calibration_and_needs_the_same_candidates():
    labels = np.arange(400) % 2
    values = np.random.default_rng(0).normal(size=(400, 2, 1, 2))
    values[:, 1, 0, 0] += 3 + 2 * labels
    a = made(values, labels)
    b = made(values[:200], labels[:200], name="b")
    j = judge(a, b, offset="median")
    offset = offsets(a, "median")
    assert offset is not None and j.offset is not None
    np.testing.assert_array_equal(j.offset, offset)
    np.testing.assert_array_equal(j.accuracy(), accuracy(b, offset))
    assert j.accuracy()[0, 0] > 0.75 > 0.6 > judge(a, b).accuracy()[0, 0]
    assert j.significant().labels == ["L0H0"]
    yes = made(values[:200], labels[:200], candidates=[(" yes", " no")] * 200, name="b")
    with pytest.raises(
        InvalidInput, match=r"test trials have the candidates \(' yes', ' no'\), calibration \(' true', ' fal"
    ):
        judge(a, yes, offset="median")
    turned = made(values[:200, ::-1], 1 - labels[:200], candidates=[(" false", " true")] * 200, name="b")
    np.testing.assert_array_equal(judge(a, turned, offset="median").accuracy(), j.accuracy())


@given(st.integers(0, 10_000), st.integers(2, 4), st.integers(1, 3))
@settings(max_examples=15, deadline=None)
def test_the_order_of_trials_and_of_candidates_changes_nothing(seed, width, group_size):
    scores = noisy(24, shape=(1, 3), width=width, planted={(0, 0): 0.8}, seed=seed, group_size=group_size)
    rng = np.random.default_rng(seed)
    order, places = rng.permutation(24), rng.permutation(width)
    other = replace(
        scores,
        values=scores.values[:, places],
        baseline=scores.baseline[:, places],
        labels=np.argsort(places)[scores.labels],
        candidates=[tuple(c[i] for i in places) for c in scores.candidates],
    ).take(order)
    one, two = (judge(s, n_perm=99, n_boot=50) for s in (scores, other))
    np.testing.assert_allclose(two.accuracy(), one.accuracy(), atol=1e-12)
    np.testing.assert_allclose(two.auroc(), one.auroc(), atol=1e-12)
    np.testing.assert_allclose(two.interval(), one.interval(), atol=1e-5)
    np.testing.assert_allclose(two.auroc_interval(), one.auroc_interval(), atol=1e-5)
    np.testing.assert_array_equal(two.p(), one.p())
    np.testing.assert_array_equal(two.p_inverse(), one.p_inverse())


def test_one_head_ties_and_heads_without_scores_go_through():
    one = judge(made(np.zeros((10, 3, 1, 1)), np.arange(10) % 3))
    assert one.accuracy()[0, 0] == pytest.approx(1 / 3) and one.p()[0, 0] == 1.0
    assert "none of 1 heads" in one.verdict()
    values = np.random.default_rng(0).normal(size=(20, 2, 1, 2))
    values[:, :, 0, 1] = np.nan
    some = judge(made(values, np.arange(20) % 2))
    assert math.isnan(some.accuracy()[0, 1]) and np.isnan(some.interval()[0][0, 1])
    assert some.frame()["direction"][1] == "none"
    assert json.loads(json.dumps(some.to_dict()))["heads"][1]["accuracy_calibration"] is None


def test_the_report_dict_holds_what_was_said():
    a, b = pair({(2, 1): 0.85}, own=0.6)
    j = judge(a, b, n_perm=199)
    got = json.loads(json.dumps(j.to_dict()))
    assert got["verdict"] == j.verdict() and got["significant"] == ["L2H1"] and got["inverse"] == []
    assert (got["n_calibration"], got["n_test"], got["on"], got["chance"]) == (400, 200, "test", 0.5)
    assert got["baseline"]["estimate"] == j.baseline().estimate and len(got["heads"]) == 20
    assert got["heads"][11]["p"] == pytest.approx(1 / 200)


def test_seeds_repeat_and_matter():
    a, b = pair({(2, 1): 0.6})
    one, again, other = (judge(a, b, seed=s, n_perm=99).frame() for s in (0, 0, 1))
    assert one.equals(again) and not one["ci_low"].equals(other["ci_low"]) and not one["p"].equals(other["p"])
