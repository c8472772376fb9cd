"""The container of candidate scores: what it refuses, and that nothing is lost on the way to a file and back."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from verdict_samples import made, noisy

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, ResultFileError, UnknownName


def mixed() -> CandidateScores:
    """Three trials with two or three candidates, one head without scores."""
    values = np.arange(3 * 3 * 1 * 2, dtype=np.float32).reshape(3, 3, 1, 2)
    values[1, 2] = np.nan
    values[:, :, 0, 1] = np.nan
    return made(
        values,
        [0, 1, 2],
        candidates=[(" a", " b", " c"), (" a", " b"), (" b", " c", " a")],
        records=[{"split": "calibration", "group": "w"}, {"split": "test"}, {"split": "test", "depth": 2}],
    )


def test_it_knows_its_shape_groups_splits_and_columns():
    scores = mixed()
    assert (len(scores), scores.n_layers, scores.n_heads) == (3, 1, 2)
    assert scores.n_candidates.tolist() == [3, 2, 3]
    assert scores.groups == ("w", "t0001", "t0002")
    assert scores.splits == ["calibration", "test"]
    assert scores.column("depth") == [None, None, 2]
    assert repr(scores) == (
        "CandidateScores('qk', 3 trials (1 calibration, 2 test) with 2 to 3 candidates, 1 layers x 2 heads)"
    )


def test_its_arrays_cannot_be_changed_and_are_its_own():
    values = np.zeros((2, 2, 1, 1), dtype=np.float32)
    scores = made(values, [0, 1])
    values[0] = 9
    assert scores.values.max() == 0
    for array in (scores.values, scores.baseline, scores.labels):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_a_split_and_a_mask_take_the_right_trials():
    scores = mixed()
    test = scores.split("test")
    assert test.trial_ids == ("t0001", "t0002") and test.labels.tolist() == [1, 2]
    np.testing.assert_array_equal(test.values, scores.values[1:])
    assert scores.take(np.array([False, True, True])).trial_ids == test.trial_ids
    assert scores.take([2, 0]).candidates == (scores.candidates[2], scores.candidates[0])
    with pytest.raises(UnknownName, match=r"unknown split of these 'qk' scores 'train'\. .*Known: calibration, test\."):
        scores.split("train")


def test_merging_widens_and_keeps_the_order():
    a, b = mixed(), noisy(4, shape=(1, 2), name="u")
    whole = a.merge(b)
    assert whole.values.shape == (7, 3, 1, 2) and whole.baseline.shape == (7, 3)
    assert np.isnan(whole.values[3:, 2]).all() and np.isnan(whole.baseline[3:, 2]).all()
    np.testing.assert_array_equal(whole.values[3:, :2], b.values)
    assert whole.trial_ids == (*a.trial_ids, *b.trial_ids) and whole.n_candidates.tolist() == [3, 2, 3, 2, 2, 2, 2]


def test_merging_refuses_what_does_not_belong_together():
    a = noisy(4)
    with pytest.raises(InvalidInput, match=r"trial 't0000' stands in both results \(4 such\); merge distinct trials\."):
        a.merge(noisy(4))
    with pytest.raises(InvalidInput, match=r"differ in shape \(layer, head\): \(4, 5\) and \(2, 5\)"):
        a.merge(noisy(4, shape=(2, 5), name="u"))
    other = replace(noisy(4, name="u"), meta={"options": {"rotary": False}})
    with pytest.raises(InvalidInput, match=r"differ in meta\['options'\]: None and \{'rotary': False\}"):
        a.merge(other)


def test_the_frame_has_a_row_per_candidate_that_is_there():
    scores = mixed()
    frame = scores.to_frame()
    assert list(frame.columns) == ["trial_id", "candidate", "text", "right", "layer", "head", "score", "baseline"]
    assert len(frame) == (3 + 2 + 3) * 2
    for row in frame.to_dict("records"):
        t = scores.trial_ids.index(row["trial_id"])
        assert row["text"] == scores.candidates[t][row["candidate"]]
        assert row["right"] == (scores.labels[t] == row["candidate"])
        want = scores.values[t, row["candidate"], row["layer"], row["head"]]
        assert row["score"] == want or (math.isnan(row["score"]) and math.isnan(want))
        assert row["baseline"] == scores.baseline[t, row["candidate"]]


def test_a_file_gives_back_every_bit(tmp_path):
    scores = replace(mixed(), meta={"options": {"rotary": True}}, unit="1", method="qk raw")
    path = scores.save(tmp_path / "scores")
    assert path.name == "scores.parquet"
    back = CandidateScores.load(path)
    for name, value in vars(scores).items():
        if isinstance(value, np.ndarray):
            assert getattr(back, name).dtype == value.dtype
            np.testing.assert_array_equal(getattr(back, name), value)
        else:
            assert getattr(back, name) == value
    assert json.dumps(back.meta) == json.dumps(scores.meta)


def test_other_and_missing_files_are_refused(tmp_path):
    with pytest.raises(ResultFileError, match="does not exist"):
        CandidateScores.load(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 not really")
    with pytest.raises(ResultFileError, match=r"bad\.parquet"):
        CandidateScores.load(tmp_path / "bad.parquet")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"values": np.zeros((2, 2, 1))}, r"values has shape \(2, 2, 1\); expected \(trial, candidate, layer, head\)"),
        ({"baseline": np.zeros((2, 3))}, r"baseline has shape \(2, 3\); expected that of values' first axes"),
        ({"labels": [0]}, "labels has 1 entries; expected one per trial, 2"),
        ({"labels": [0.0, 1.0]}, "labels has dtype float64; expected whole numbers"),
        ({"labels": [0, 2]}, r"trial 'y' has the label 2; expected 0 to 1\."),
        ({"labels": [-1, 1]}, r"trial 'x' has the label -1; expected 0 to 1\."),
        ({"candidates": [("a", "b")]}, "candidates has 1 entries; expected one per trial, 2"),
        ({"candidates": [("a",), ("a", "b")]}, r"trial 'x' has 1 candidates; expected 2 to 2, values' second axis\."),
        ({"trial_ids": ("x", "x")}, r"trial id 'x' stands more than once; ids must be unique\."),
        ({"records": [{}]}, "records has 1 entries; expected one per trial, 2"),
        ({"records": [{"a": np.nan}, {}]}, r"record of trial 'x'\['a'\] is nan, which JSON cannot hold"),
        ({"baseline": [[0.0, np.nan], [0.0, 0.0]]}, "the baseline of trial 'x' is .*; expected a number per candidate"),
        ({"values": np.full((2, 2, 1, 1), np.inf)}, "trial 'x' has infinite scores"),
    ],
)
def test_it_refuses_what_makes_no_sense(change: dict[str, Any], message: str):
    fields: dict[str, Any] = {
        "values": np.zeros((2, 2, 1, 1)),
        "baseline": np.zeros((2, 2)),
        "labels": [0, 1],
        "candidates": [("a", "b")] * 2,
        "trial_ids": ("x", "y"),
    }
    with pytest.raises(InvalidInput, match=message):
        fields |= change
        arrays: dict[str, Any] = {name: np.asarray(fields.pop(name)) for name in ("values", "baseline", "labels")}
        CandidateScores(**arrays, **fields)


def test_scores_of_candidates_that_a_trial_lacks_are_refused():
    with pytest.raises(InvalidInput, match="or scores of candidates that it does not have"):
        made(np.zeros((1, 3, 1, 1)), [0], candidates=[("a", "b")])


def test_choosing_goes_by_the_calibration_split():
    scores = noisy(400, planted={(2, 3): 0.9}, split="calibration").merge(
        noisy(400, planted={(1, 1): 0.9}, split="test", name="u")
    )
    assert scores.select(1).labels == ["L2H3"]
    assert scores.select(1, split="test").labels == ["L1H1"]
    with pytest.warns(UserWarning, match="There are 399 calibration trials"):
        assert scores.take(range(1, 800)).select(2, inverse=False)[0] == scores.select(1)[0]
