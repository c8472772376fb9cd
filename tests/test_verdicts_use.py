"""Chosen heads put to use: selection, evaluation, transfer."""

from __future__ import annotations

import json
import warnings
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from scipy import stats as sps
from verdict_samples import TEXTS, made, noisy, own, splits

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.stats import holm, paired_permutation
from mechheads.verdicts import (
    accuracy,
    auroc,
    credit,
    evaluate,
    label_credit,
    offsets,
    permutation_test,
    select,
    transfer,
)

# -- select --------------------------------------------------------------------------------------


@pytest.mark.parametrize("by", ["accuracy", "auroc"])
@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("width", [2, 3])
def test_selecting_is_sorting_with_ties_by_the_other_criterion(by, inverse, width):
    """Few trials of whole numbers, so that accuracies tie."""
    rng = np.random.default_rng(5)
    scores = made(rng.integers(0, 3, size=(12, width, 4, 6)), np.arange(12) % width)
    right, area = accuracy(scores), auroc(scores)
    sign = 1 if inverse else -1
    keys = {"accuracy": (right, area), "auroc": (area, right)}[by]
    order = sorted(
        ((i, h) for i in range(4) for h in range(6)),
        key=lambda at: (*(round(sign * key[at], 9) for key in keys), at),
    )
    assert len({round(float(keys[0][at]), 9) for at in order}) < 24
    for k in (1, 5, 24):
        assert select(scores, k, by=by, inverse=inverse, min_trials=0) == HeadSet(order[:k])


def test_selecting_leaves_out_heads_without_scores_and_says_how_many_there_are():
    values = np.random.default_rng(0).normal(size=(40, 2, 2, 2))
    values[:, :, 0, 1] = np.nan
    scores = made(values, np.arange(40) % 2)
    for by in ("accuracy", "auroc"):
        assert set(select(scores, 3, by=by, min_trials=0)) == set(HeadSet.parse("L0H0, L1H0, L1H1"))
    with pytest.raises(InvalidInput, match=r"k is 4, but only 3 heads have a score in every trial; ask for no more\."):
        select(scores, 4, min_trials=0)
    with pytest.raises(UnknownName, match=r"unknown criterion 'margin'\. .*Known: accuracy, auroc\."):
        select(scores, 1, by="margin")
    one_sided = replace(scores, labels=np.zeros(40, dtype=int))
    with pytest.raises(
        InvalidInput, match=r"one candidate is right in every trial, so no AUROC exists; use by='accuracy'\."
    ):
        select(one_sided, 1, by="auroc", min_trials=0)


def test_selecting_warns_with_the_numbers_and_not_without_cause():
    with pytest.warns(UserWarning) as caught:
        select(noisy(60).take(range(50)), 1)
    (told,) = [str(w.message) for w in caught]
    assert told.startswith(
        "Heads were chosen on weak calibration trials. There are 50 calibration trials; with fewer than"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        select(noisy(400), 1)
        select(noisy(60), 1, min_trials=60)


def test_an_offset_finds_a_head_that_says_one_answer_only():
    labels = np.arange(400) % 2
    values = np.random.default_rng(0).normal(size=(400, 2, 2, 3))
    values[:, 1, 1, 1] += 6 + 3 * labels
    scores = made(values, labels)
    assert select(scores, 1, offset="median").labels == ["L1H1"] == select(scores, 1, by="auroc").labels
    assert select(scores, 1).labels != ["L1H1"]


# -- evaluate ------------------------------------------------------------------------------------


def varied(n: int = 240, **options: Any) -> CandidateScores:
    rng = np.random.default_rng(3)
    return noisy(
        n,
        planted={(1, 2): 0.8, (3, 4): 0.75, (0, 0): 0.2},
        own=0.6,
        depth=[int(d) for d in rng.integers(1, 4, n)],
        rule=[("composed", None, "modus_ponens")[i % 3] for i in range(n)],
        **options,
    )


@pytest.mark.parametrize("width", [2, 4])
def test_every_cell_equals_the_trials_of_its_kind(width):
    scores = varied(width=width, group_size=2)
    heads = HeadSet.parse("L1H2, L3H4, L0H0")
    got = evaluate(scores, heads, n_boot=200, n_perm=500)
    frame = got.frame()
    assert got.scorers == ("L1H2", "L3H4", "L0H0", "majority", "model") and got.by == ("depth", "rule")
    kinds = [
        ("overall", "all"),
        *(("depth", d) for d in (1, 2, 3)),
        *(("rule", r) for r in ("composed", "modus_ponens")),
    ]
    assert " ".join(frame.columns) == (
        "by value scorer kind n n_groups chance accuracy ci_low ci_high baseline difference difference_low "
        "difference_high p p_holm"
    )
    assert list(frame.groupby(["by", "value"], sort=False).groups) == [*kinds, ("rule", "none")]
    votes = np.sum([credit(scores)[:, :, h.layer, h.head] for h in heads], axis=0)
    for row in frame.to_dict("records"):
        column = None if row["by"] == "overall" else scores.column(row["by"])
        wanted = None if row["value"] == "none" else row["value"]
        places = [i for i in range(len(scores)) if column is None or column[i] == wanted]
        if row["scorer"] == "majority":
            best = [np.flatnonzero(np.isclose(votes[i], votes[i].max())) for i in places]
            right = [(scores.labels[i] in b) / len(b) for i, b in zip(places, best, strict=True)]
        elif row["scorer"] == "model":
            right = own(scores)[places].tolist()
        else:
            at = HeadSet(row["scorer"])[0]
            right = label_credit(scores)[places, at.layer, at.head].tolist()
        base = own(scores)[places]
        assert row["n"] == len(places) and row["n_groups"] == len({scores.groups[i] for i in places})
        assert row["accuracy"] == pytest.approx(np.mean(right)) and row["baseline"] == pytest.approx(base.mean())
        assert row["chance"] == pytest.approx(1 / width)
        assert row["ci_low"] <= row["accuracy"] <= row["ci_high"]
        if row["scorer"] == "model":
            assert row["kind"] == "model" and np.isnan([row["difference"], row["p"], row["p_holm"]]).all()
            continue
        assert row["difference"] == pytest.approx(row["accuracy"] - row["baseline"])
        assert row["difference_low"] <= row["difference"] <= row["difference_high"]
        away: dict[str, float] = {}
        for i, x, y in zip(places, right, base, strict=True):
            away[scores.groups[i]] = away.get(scores.groups[i], 0.0) + x - y
        sums = [away[g] for g in sorted(away)]
        assert row["p"] == pytest.approx(paired_permutation(sums, [0.0] * len(sums), n_perm=500))
    for _, cell in frame.groupby(["by", "value"]):
        tested = cell.loc[cell["scorer"] != "model"]
        np.testing.assert_allclose(tested["p_holm"], holm(tested["p"]))


def test_a_head_with_its_sign_turned_answers_what_it_scores_lowest():
    scores = varied(width=3)
    got = evaluate(scores, "L0H0, L1H2", inverse="L0H0", n_boot=50).overall().set_index("scorer")
    lowest = scores.values[:, :, 0, 0].argmin(axis=1)
    assert got.loc["L0H0", "accuracy"] == pytest.approx((lowest == scores.labels).mean())
    assert got.loc["L0H0", "kind"] == "inverse head" and got.loc["L1H2", "kind"] == "head"
    assert got.loc["L1H2", "accuracy"] == pytest.approx(accuracy(scores)[1, 2])
    two = varied()
    offset = offsets(two, "median")
    plain, turned = (
        evaluate(two, "L0H0", offset=offset, inverse=i, n_boot=50).overall()["accuracy"][0] for i in ((), "L0H0")
    )
    assert plain + turned == pytest.approx(1) and plain == pytest.approx(accuracy(two, offset)[0, 0])


def test_votes_that_are_equal_on_paper_tie():
    """0.5 + 0.2 + 0.2 and 0.2 + 0.2 + 0.5 differ in the last digit."""
    heads = np.array([[0, 1, 1, 0, 0], [1, 1, 1, 1, 1], [1, 1, 1, 1, 1], [1, 0, 0, 1, 0]], dtype=float)
    scores = made(heads.T[None, :, None].repeat(5, axis=0), np.arange(5))
    got = evaluate(scores, "L0H0, L0H1, L0H2, L0H3", n_boot=2)
    np.testing.assert_allclose(got.credit[:, got.scorers.index("majority")], [1 / 4] * 4 + [0])


def test_intervals_of_differences_are_paired():
    """A head that always agrees with the model cannot differ from it, however uncertain both are."""
    scores = noisy(100, own=0.7)
    values = scores.values.copy()
    values[:, :, 1, 1] = scores.baseline
    same = evaluate(replace(scores, values=values), "L1H1", by=()).overall().iloc[0]
    assert same["difference"] == 0 and same["p"] == 1.0
    assert -0.05 < same["difference_low"] < 0 < same["difference_high"] < 0.05 < same["ci_high"] - same["ci_low"]


def test_one_head_has_no_majority_and_columns_may_be_chosen():
    scores = varied()
    got = evaluate(scores, "L1H2", by="depth", n_boot=50)
    assert got.scorers == ("L1H2", "model") and got.by == ("depth",)
    assert set(got.frame()["by"]) == {"overall", "depth"}
    assert evaluate(noisy(20), "L1H2", n_boot=50).by == ()
    with pytest.raises(UnknownName, match=r"unknown column of the records 'deepness'\. .*Known: depth, group, rule\."):
        evaluate(scores, "L1H2", by="deepness")


def test_evaluation_tells_the_comparison_in_words_and_in_json():
    got = evaluate(varied(), "L1H2, L3H4", by="depth", n_boot=200, n_perm=200)
    told = got.summary()
    rows = got.overall().set_index("scorer")
    assert told.startswith(f"On 240 trials the model's own output is right in {rows.loc['model', 'accuracy']:.2f} [")
    assert f"L1H2 is right in {rows.loc['L1H2', 'accuracy']:.2f} [" in told
    assert "It is better than the model's own output by +0." in told and "The majority of 2 heads is right in" in told
    assert "By depth, L1H2 against the model: 1: 0." in told
    data = json.loads(json.dumps(got.to_dict()))
    assert data["summary"] == told and data["rows"][3]["p"] is None and data["heads"] == ["L1H2", "L3H4"]


def test_evaluation_refuses_heads_that_it_cannot_judge():
    scores = varied()
    for heads, inverse, message in (
        ((), (), r"heads is empty; name at least one head, such as 'L9H6'\."),
        ("L9H9", (), "L9H9 does not exist: the model has layers 0 to 3"),
        ("L1H2", "L0H0", r"L0H0 is in inverse but not in heads; inverse says which of the heads to turn\."),
    ):
        with pytest.raises(InvalidInput, match=message):
            evaluate(scores, heads, inverse=inverse)
    values = scores.values.copy()
    values[7, 0, 1, 2] = np.nan
    with pytest.raises(InvalidInput, match=r"L1H2 has no score in trial 't0007'; leave the head or the trial out\."):
        evaluate(replace(scores, values=values), "L1H2")
    with pytest.raises(InvalidInput, match=r"scores holds no trials; give at least one\."):
        evaluate(scores.take([]), "L1H2")


def hashed(scores: CandidateScores, prompts: list[str]) -> CandidateScores:
    return replace(scores, records=[{**r, "prompt_hash": p} for r, p in zip(scores.records, prompts, strict=True)])


def test_evaluating_where_heads_were_chosen_is_warned_of_and_told():
    scores = splits({(1, 2): 0.8}, n=60, n_test=40)
    calibration, test = scores.split("calibration"), scores.split("test")
    quick: dict[str, Any] = {"n_boot": 50, "n_perm": 50}
    message = (
        r"60 of the 60 trials are calibration trials, on which heads are chosen, so the accuracy of the chosen is "
    )
    message += r"flattered; evaluate them on scores\.split\('test'\)\."
    with pytest.warns(UserWarning, match=f"^{message}$"):
        got = evaluate(calibration, "L1H2", **quick)
    assert got.caveats == (str(got.to_dict()["caveats"][0]),) and got.summary().endswith(got.caveats[0])
    with pytest.warns(UserWarning, match="60 of the 100 trials are calibration trials"):
        evaluate(scores, "L1H2", **quick)
    # Without a split the trials tell, by prompt where it is known, whatever they are called.
    unmarked = replace(calibration, records=[{}] * 60)
    with pytest.warns(UserWarning, match="60 of the 60 trials are calibration trials"):
        evaluate(unmarked, "L1H2", calibration=calibration, **quick)
    prompts = [f"p{i}" for i in range(60)]
    renamed = replace(
        hashed(test, [*prompts[:7], *(f"q{i}" for i in range(33))]), trial_ids=[f"x{i}" for i in range(40)]
    )
    with pytest.warns(UserWarning, match="7 of the 40 trials are calibration trials"):
        evaluate(renamed, "L1H2", calibration=hashed(calibration, prompts), **quick)
    # Other prompts under the same ids are other trials; nothing is said, here or on test trials alone.
    same_ids = hashed(unmarked, [f"q{i}" for i in range(60)])
    for one, known in ((same_ids, hashed(calibration, prompts)), (test, calibration), (test, None)):
        clean = evaluate(one, "L1H2", calibration=known, **quick)
        assert clean.caveats == () and "flattered" not in clean.summary()


def test_varying_numbers_of_candidates_are_evaluated():
    values = np.random.default_rng(0).normal(size=(60, 4, 2, 2))
    counts = [2 + i % 3 for i in range(60)]
    for i, count in enumerate(counts):
        values[i, count:] = np.nan
    scores = made(values, [0] * 60, candidates=[TEXTS[:c] for c in counts])
    got = evaluate(scores, "L0H0, L1H1, L1H0", n_boot=50).overall()
    assert got["chance"].tolist() == pytest.approx([(1 / 2 + 1 / 3 + 1 / 4) / 3] * 5)
    assert got["accuracy"][4] == pytest.approx(got["chance"][4])  # the model finds all candidates alike


# -- transfer ------------------------------------------------------------------------------------


def test_transfer_chooses_on_one_set_and_tests_on_every_other():
    sets = {
        "a": splits({(1, 2): 0.9, (3, 3): 0.8, (0, 1): 0.75}, name="a", group_size=2),
        "b": splits({(1, 2): 0.8, (3, 3): 0.1, (2, 2): 0.9}, name="b", n=200, seed=5, own=0.7),
    }
    got = transfer(sets, k=2, n_boot=200, n_perm=199)
    assert got.rows == ("a", "b", "mix") and got.names == ("a", "b") and got.matrix.shape == (3, 2)
    assert got.heads["a"].labels == ["L1H2", "L3H3"] and got.heads["b"].labels == ["L2H2", "L1H2"]
    assert got.trials == {"a": 400, "b": 200, "mix": 400}
    assert got.heads["mix"][0] == HeadSet("L1H2")[0]
    cells = got.frame().set_index(["chosen_on", "tested_on"])
    for (row, name), cell in cells.to_dict("index").items():
        test = sets[str(name)].split("test")
        right = label_credit(test)
        assert cell["accuracy"] == pytest.approx(np.mean([right[:, h.layer, h.head] for h in got.heads[row]]))
        assert cell["baseline"] == pytest.approx(own(test).mean()) and cell["n"] == 300
        assert cell["difference"] == pytest.approx(cell["accuracy"] - cell["baseline"])
        for lead, value in (("ci", "accuracy"), ("baseline", "baseline"), ("difference", "difference")):
            assert cell[f"{lead}_low"] < cell[value] < cell[f"{lead}_high"]
        p = permutation_test(test, heads=got.heads[row], n_perm=199)
        assert (cell["right"], cell["inverted"]) == ((p.p <= 0.05).sum(), (p.p_inverse <= 0.05).sum())
    assert cells.loc[("a", "b"), ["right", "inverted"]].tolist() == [1, 1]
    assert cells.loc[("a", "a"), ["right", "inverted"]].tolist() == [2, 0]
    np.testing.assert_allclose(got.baseline, [own(one.split("test")).mean() for one in sets.values()])
    told = got.summary()
    assert (
        "Tested on b (the model itself: 0.7" in told and "1 of the 2 heads chosen on a is wrong more often than" in told
    )
    assert json.loads(json.dumps(got.to_dict()))["heads"]["a"] == ["L1H2", "L3H3"]


def test_rank_stability_of_the_sets():
    sets = {"a": splits({(1, 2): 0.9}, name="a"), "b": splits({(1, 2): 0.9}, name="b", seed=5)}
    got = transfer(sets, k=1, mix=False, n_boot=2, n_perm=9)
    (row,) = got.stability.to_dict("records")
    x, y = (accuracy(one.split("calibration")).ravel() for one in sets.values())
    rho: Any = sps.spearmanr(x, y)
    assert row["spearman"] == pytest.approx(rho.statistic)
    assert (row["a"], row["b"], row["overlap"], row["n_heads"]) == ("a", "b", 1, 20) and row["expected"] == 1 / 20
    flat = {
        name: replace(one, values=np.broadcast_to([[[[1.0]], [[0.0]]]], one.values.shape)) for name, one in sets.items()
    }
    assert np.isnan(transfer(flat, k=1, mix=False, n_boot=2, n_perm=9).stability["spearman"][0])


def test_the_mix_counts_sets_alike_and_can_be_chosen_by_auroc():
    """A head good on the small set and one good on the large one come out level."""
    big = splits({(1, 2): 0.9, (2, 2): 0.7, (0, 0): 0.85}, name="a", n=1200)
    small = splits({(1, 2): 0.5, (2, 2): 0.95, (0, 0): 0.85}, name="b", n=120, seed=3)
    for by in ("accuracy", "auroc"):
        got = transfer({"a": big, "b": small}, k=1, by=by, n_boot=2, n_perm=9)
        assert {row: heads.labels for row, heads in got.heads.items()} == {
            "a": ["L1H2"],
            "b": ["L2H2"],
            "mix": ["L0H0"],
        }
        assert got.trials["mix"] == 240


def test_transfer_refuses_what_cannot_be_compared():
    a = splits({}, name="a", n=40, n_test=20)
    with pytest.raises(InvalidInput, match="transfer needs a mapping of at least two data sets' scores by name"):
        transfer({"a": a})
    with pytest.raises(InvalidInput, match="a set is named 'mix', the name of the row for all sets mixed"):
        transfer({"a": a, "mix": a})
    with pytest.raises(
        InvalidInput, match="'b' scores 2 layers x 2 heads, 'a' 4 x 5; transfer compares the heads of one"
    ):
        transfer({"a": a, "b": splits({}, n=40, n_test=20, shape=(2, 2))})
    with pytest.raises(UnknownName, match=r"unknown split of these 'qk' scores 'calibration'\. .*Known: test\."):
        transfer({"a": a, "b": a.split("test")}, n_boot=2, n_perm=9)
    with pytest.raises(UnknownName, match=r"unknown calibration offset 'mode'\. .*Known: median, none\."):
        transfer({"a": a, "b": a}, offset="mode")
    with pytest.raises(InvalidInput, match=r"alpha is 1\.5; a significance level lies between 0 and 1"):
        transfer({"a": a, "b": a}, alpha=1.5)
    lumps = replace(a, records=[{"split": r["split"], "group": r["split"]} for r in a.records])
    tiny = splits({}, name="b", n=10, n_test=20)
    with pytest.raises(
        InvalidInput, match="no group of 'a' has at most 10 calibration trials, so the mix can take none"
    ):
        transfer({"a": lumps, "b": tiny}, k=1, n_boot=2, n_perm=9)


def test_sets_that_share_trials_are_warned_of():
    a, b = (splits({(1, 2): 0.9}, name=name, n=60, n_test=40) for name in "ab")
    quick: dict[str, Any] = {"k": 1, "n_boot": 2, "n_perm": 9}
    message = "'one' and 'other' share 100 trials: between these two the matrix shows no transfer to other data."
    with pytest.warns(UserWarning) as caught:
        got = transfer({"one": a, "other": a, "b": b}, **quick)
    assert [str(w.message) for w in caught] == [message] == list(got.caveats) == got.to_dict()["caveats"]
    assert got.summary().endswith(message)
    # By prompt where it is known: other ids, and the splits the other way round for some.
    prompts = [f"p{i}" for i in range(100)]
    turned = hashed(replace(b, trial_ids=[f"x{i}" for i in range(100)]), [*prompts[90:], *(f"q{i}" for i in range(90))])
    crossing = "'a' and 'b' share 10 trials, 10 of which choose heads in one and test them in the other: between"
    with pytest.warns(UserWarning, match=crossing):
        transfer({"a": hashed(a, prompts), "b": turned}, **quick)
    # Two sets may use one id for two prompts.
    apart = transfer({"a": hashed(a, prompts), "b": hashed(a, [f"q{i}" for i in range(100)])}, **quick)
    assert apart.caveats == () == transfer({"a": a, "b": b}, **quick).caveats


def leaning(name: str, seed: int, lean: float) -> CandidateScores:
    """L1H1 knows the label but likes the second answer by so much; L0H2 is right in 0.7 and likes none."""
    scores = splits({(0, 2): 0.7}, name=name, n=120, n_test=80, seed=seed, shape=(2, 3))
    values = scores.values.copy()
    values[:, 1, 1, 1] = values[:, 0, 1, 1] + lean + (2.0 * scores.labels - 1)
    return replace(scores, values=values)


def test_transfer_with_an_offset_takes_each_sets_own():
    """By hand: the median margin of a set's calibration trials is taken off wherever that set is scored."""
    sets = {"a": leaning("a", 0, 6.0), "b": leaning("b", 9, -4.0)}
    quick: dict[str, Any] = {"k": 1, "n_boot": 50, "n_perm": 19}
    got, plain = transfer(sets, offset="median", **quick), transfer(sets, **quick)
    assert (got.offset, plain.offset) == ("median", "none") and got.to_dict()["offset"] == "median"
    assert [h.labels for h in got.heads.values()] == [["L1H1"]] * 3
    assert [h.labels for h in plain.heads.values()] == [["L0H2"]] * 3
    right: dict[str, np.ndarray] = {}
    for name, one in sets.items():
        calibration, test = one.split("calibration"), one.split("test")
        margins = [part.values[:, 1].astype(float) - part.values[:, 0].astype(float) for part in (calibration, test)]
        answers = (margins[1] - np.median(margins[0], axis=0) > 0).astype(int)
        right[name] = (answers == test.labels[:, None, None]).mean(axis=0)
    assert (right["a"][1, 1], right["b"][1, 1]) == (1.0, 1.0)
    for row in got.frame().to_dict("records"):
        assert row["accuracy"] == pytest.approx(right[row["tested_on"]][1, 1]) and (row["right"], row["inverted"]) == (
            1,
            0,
        )
    # The same for a head whose accuracy is in between, chosen by AUROC, which no offset moves.
    third = transfer(
        {n: replace(s, values=s.values[:, :, :1]) for n, s in sets.items()}, offset="median", by="auroc", **quick
    )
    for row in third.frame().to_dict("records"):
        assert third.heads[row["chosen_on"]].labels == ["L0H2"]
        assert row["accuracy"] == pytest.approx(right[row["tested_on"]][0, 2]) and 0.5 < row["accuracy"] < 0.9
    other = replace(sets["b"], candidates=[(" yes", " no")] * 100 + [(" no", " maybe")] * 100)
    with pytest.raises(
        InvalidInput, match="a median offset belongs to one candidate, so all trials must have the same"
    ):
        transfer({"a": sets["a"], "b": other}, offset="median", **quick)


@pytest.mark.parametrize("value", ["no", 0, 1, None])
def test_switches_are_true_or_false(value, as_users_run):
    a = splits({}, name="a", n=40, n_test=20)
    with pytest.raises(InvalidInput, match=rf"^inverse is {value!r}; give True \(the heads most reliably wrong\) or F"):
        select(a, 1, inverse=value)
    with pytest.raises(InvalidInput, match=rf"^mix is {value!r}; give True \(also choose on all sets mixed\) or F"):
        transfer({"a": a, "b": a}, mix=value)
