"""Curves, areas and comparisons of a sweep by hand, and its file."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pyarrow.parquet as pq
import pytest

from mechheads.errors import InvalidInput, OutputNotWritable, ResultFileError, UnknownName
from mechheads.scores import SweepResult
from mechheads.stats import bootstrap_weights, wilson

TRIALS = [f"t{i}" for i in range(8)]


def rows(ranking, k, values, *, draw=0, task="needles", metric="correct"):
    trials = zip(TRIALS, values, strict=False)
    return [(ranking, draw, k, task, trial, metric, value, "L0H0" if k else "") for trial, value in trials]


def sweep(extra=(), **fields) -> SweepResult:
    """Baseline all right; locos loses 4 then 8 of 8; two random draws lose 1 and 3 at k=5, none at k=10."""
    data = [
        *rows("none", 0, [1.0] * 8),
        *rows("locos", 5, [1.0] * 4 + [0.0] * 4),
        *rows("locos", 10, [0.0] * 8),
        *rows("random", 5, [1.0] * 7 + [0.0], draw=0),
        *rows("random", 5, [1.0] * 5 + [0.0] * 3, draw=1),
        *rows("random", 10, [1.0] * 8, draw=0),
        *rows("random", 10, [1.0] * 8, draw=1),
        *rows("none", 0, [1.0, 1.0, 0.0], task="recall"),
        *rows("locos", 5, [1.0, 1.0, 0.0], task="recall"),
        *extra,
    ]
    columns = ["ranking", "draw", "k", "task", "trial_id", "metric", "value", "heads"]
    return SweepResult(frame=pd.DataFrame(data, columns=columns), **fields)


def test_sweep_names():
    result = sweep()
    assert result.rankings == ["locos", "random"] and result.ks == [0, 5, 10]
    assert result.tasks == ["needles", "recall"] and result.metrics == ["correct"]
    assert repr(result).startswith("SweepResult(rankings=['locos', 'random'], k=[0, 5, 10]")


def test_curve_by_hand():
    curve = sweep().curve("correct", task="needles").set_index(["ranking", "k"])
    assert list(curve.index) == [(r, k) for r in ("locos", "random") for k in (0, 5, 10)]
    assert curve["mean"].tolist() == [1, 0.5, 0, 1, 0.75, 1]
    assert curve["n_trials"].tolist() == [8] * 6 and curve["n_draws"].tolist() == [1, 1, 1, 1, 2, 2]
    assert curve.loc[("random", 5), ["draw_min", "draw_max"]].tolist() == [5 / 8, 7 / 8]
    assert (curve["ci_low"] <= curve["mean"]).all() and (curve["mean"] <= curve["ci_high"]).all()
    none_right, all_right = wilson(0, 8), wilson(8, 8)
    assert curve.loc[("locos", 10), ["ci_low", "ci_high"]].tolist() == [none_right.low, none_right.high]
    assert curve.loc[("locos", 0), ["ci_low", "ci_high"]].tolist() == [all_right.low, all_right.high]
    assert none_right.high > 0.3


def test_curve_of_all_tasks_and_of_one_ranking():
    curve = sweep().curve("correct")
    assert set(curve["task"]) == {"needles", "recall"}
    # random was not run on recall, so the baseline alone must not pose as its curve
    assert set(zip(curve["ranking"], curve["task"], strict=True)) == {
        ("locos", "needles"),
        ("random", "needles"),
        ("locos", "recall"),
    }
    assert set(sweep().curve("correct", ranking="random")["ranking"]) == {"random"}


def test_curve_interval_resamples_trials_and_draws():
    frame = sweep().frame.query("ranking == 'random' and task == 'needles' and k == 5 and metric == 'correct'")
    table = frame.pivot(index="draw", columns="trial_id", values="value").to_numpy()
    assert table.shape == (2, 8)
    rng = np.random.default_rng(4)
    trials, _one, draws = (bootstrap_weights(n, 500, rng) for n in (8, 1, 2))
    want = [(d[:, None] * t[None, :] * table).sum() / (d.sum() * t.sum()) for d, t in zip(draws, trials, strict=True)]
    row = sweep().curve("correct", "needles", "random", level=0.9, n_boot=500, seed=4).query("k == 5").iloc[0]
    assert [row.ci_low, row.ci_high] == pytest.approx(np.quantile(want, [0.05, 0.95]).tolist())


def test_draws_that_disagree_widen_the_interval():
    halves = [*rows("random", 5, [1.0, 0.0] * 4, draw=0), *rows("random", 5, [0.0, 1.0] * 4, draw=1)]
    apart = [*rows("random", 5, [1.0] * 8, draw=0), *rows("random", 5, [0.0] * 8, draw=1)]
    widths = []
    for cells in (halves, apart):
        frame = pd.DataFrame([*rows("none", 0, [1.0] * 8), *cells], columns=sweep().frame.columns)
        row = SweepResult(frame, {}).curve("correct", "needles", "random").query("k == 5").iloc[0]
        assert row["mean"] == 0.5
        widths.append(row.ci_high - row.ci_low)
    assert widths[1] == 1.0 and 0 < widths[0] < 1


def test_auc_by_hand_and_paired_over_k():
    auc = sweep().auc("correct", task="needles").set_index("ranking")
    assert auc.loc["locos", "auc"] == pytest.approx((0.75 * 5 + 0.25 * 5) / 10)
    assert auc.loc["random", "auc"] == pytest.approx((0.875 * 5 + 0.875 * 5) / 10)
    assert auc.loc["locos", ["k_min", "k_max", "n_k", "n_trials"]].tolist() == [0, 10, 3, 8]
    areas = bootstrap_weights(8, 2000, np.random.default_rng(0)) @ np.array([0.75] * 4 + [0.25] * 4) / 8
    want = np.quantile(areas, [0.025, 0.975])
    assert auc.loc["locos", ["ci_low", "ci_high"]].tolist() == pytest.approx(want)


def test_auc_weighs_uneven_steps_of_k_by_their_width():
    result = sweep(rows("locos", 50, [0.0] * 8))
    auc = result.auc("correct", "needles", "locos")["auc"].item()
    assert auc == pytest.approx((0.75 * 5 + 0.25 * 5 + 0) / 50)


def test_auc_of_one_point_is_refused():
    result = SweepResult(frame=sweep().frame.query("ranking == 'locos' and k == 5"))
    with pytest.raises(InvalidInput, match=r"'locos' on 'needles' has only k=\[5\]; an area needs two"):
        result.auc("correct", "needles")


def test_compare_is_paired_and_averages_draws_first():
    got = sweep().compare("locos", "random", 5, "correct", "needles")
    assert (got.mean_a, got.mean_b, got.n) == (0.5, 0.75, 8)
    assert got.difference.estimate == -0.25 and got.difference.low <= -0.25 <= got.difference.high
    # differences 0,0,0,0,-1,-.5,-.5,0: of the 8 sign patterns two reach 2 in size
    assert got.p_value == 0.25
    assert str(got).startswith("locos - random at k=5: -0.25 [")


def test_compare_with_the_baseline():
    got = sweep().compare("none", "locos", 10, "correct", "needles")
    assert got.difference.estimate == 1 and got.p_value == 2 / 2**8


def test_compare_pairs_only_trials_measured_under_both():
    extra = [*rows("dla", 5, [float("nan"), 0.0, 0.0])]
    got = sweep(extra).compare("dla", "locos", 5, "correct", "needles")
    assert got.n == 2 and got.mean_b == 1
    missing = sweep(rows("dla", 5, [float("nan")]))
    with pytest.raises(InvalidInput, match="'dla' and 'locos' share no trial"):
        missing.compare("dla", "locos", 5, "correct", "needles")


def test_compare_needs_the_task_where_there_are_several():
    with pytest.raises(InvalidInput, match=r"has the tasks \['needles', 'recall'\]; say which"):
        sweep().compare("locos", "random", 5, "correct")


def test_trials_not_measured_lower_the_count_and_nothing_else():
    curve = sweep(rows("dla", 5, [float("nan"), 1.0, 0.0])).curve("correct", "needles", "dla").set_index("k")
    assert curve.loc[5, "mean"] == 0.5 and curve.loc[5, "n_trials"] == 2 and curve.loc[0, "n_trials"] == 8
    single = sweep(rows("dla", 5, [1.0])).curve("correct", "needles", "dla").set_index("k")
    assert np.isnan(single.loc[5, "ci_low"]) and single.loc[5, "mean"] == 1


def test_baseline_alone_has_a_curve():
    result = SweepResult(frame=sweep().frame.query("ranking == 'none'"))
    assert result.rankings == []
    assert result.curve("correct")["ranking"].tolist() == ["none", "none"]


def test_cell_gives_the_rows_and_the_baseline_at_zero():
    result = sweep()
    assert len(result.cell("random", 5, "needles", "correct")) == 16
    assert result.cell("random", 0, "needles", "correct")["ranking"].unique().tolist() == ["none"]
    with pytest.raises(InvalidInput, match=r"not measured for 'random' at k=7; .* k in \[5, 10\]"):
        result.cell("random", 7, "needles", "correct")


def test_unknown_names_are_answered_with_the_known_ones():
    result = sweep()
    for call in (
        lambda: result.curve("corect"),
        lambda: result.curve("correct", "needle"),
        lambda: result.auc("correct", ranking="loco"),
        lambda: result.cell("rnd", 5, "needles", "correct"),
    ):
        with pytest.raises(UnknownName, match="of the sweep"):
            call()
    with pytest.raises(InvalidInput, match="'correct' was not measured on 'recall' for random"):
        result.curve("correct", "recall", "random")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns="draw"), "lacks the column 'draw'"),
        (lambda f: f.iloc[:0], "has no rows"),
        (lambda f: pd.concat([f, f.iloc[:1]]), "two values for .*'ranking': 'none'"),
        (lambda f: f.assign(k=f["k"].where(f["k"] != 5, 0)), "ranking 'locos' and k 0"),
        (lambda f: f.assign(k=f["k"] + 1), "ranking 'none' and k 1"),
        (lambda f: f.assign(k=f["k"] + 0.5), "the column 'k' of the sweep's table must hold whole numbers"),
        (lambda f: f.assign(draw=np.nan), "the column 'draw' of the sweep's table must hold whole numbers"),
        (lambda f: f.assign(value=np.inf), "correct of trial 't0' is inf"),
    ],
)
def test_unfit_sweep_tables_are_refused(change, message):
    with pytest.raises(InvalidInput, match=message):
        SweepResult(frame=change(sweep().frame))


def test_sweep_file_round_trip(tmp_path):
    result = sweep(rows("dla", 5, [float("nan"), 1 / 3]), meta={"seed": 0, "k": [0, 5]})
    back = SweepResult.load(result.save(tmp_path / "sweep"))
    pd.testing.assert_frame_equal(back.frame, result.frame, check_exact=True)
    assert back.meta == result.meta
    assert json.loads(pq.read_schema(tmp_path / "sweep.parquet").metadata[b"mechheads"])["kind"] == "sweep"


def test_inconsistent_sweep_files_are_refused(tmp_path):
    path = sweep().save(tmp_path / "sweep")
    table = pq.read_table(path)
    header = json.loads((table.schema.metadata or {})[b"mechheads"])
    short = json.dumps({**header, "n_rows": 1}).encode()
    pq.write_table(table.replace_schema_metadata({b"mechheads": short}), path)
    with pytest.raises(ResultFileError, match="rows but its header says 1"):
        SweepResult.load(path)
    pq.write_table(table.drop_columns(["value"]), path)
    with pytest.raises(ResultFileError, match="lacks the column 'value'"):
        SweepResult.load(path)


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(OutputNotWritable, match="into the folder"):
        sweep().save(tmp_path / "file" / "sweep")


# -- against a random set -------------------------------------------------------------------------


def random_sets(own: list[float], draws: list[list[float]]) -> SweepResult:
    """A sweep of one ranking and several random draws at k=1; one value a trial."""
    rows = [("mine", 0, own), *(("random", d, values) for d, values in enumerate(draws)), ("none", 0, [1.0] * len(own))]
    frame = pd.DataFrame(
        [
            {"ranking": r, "draw": d, "k": 0 if r == "none" else 1, "task": "t", "trial_id": f"t{i}",
             "metric": "correct", "value": v, "heads": "" if r == "none" else "L0H0"}
            for r, d, values in rows for i, v in enumerate(values)
        ]
    )  # fmt: skip
    return SweepResult(frame, {})


def test_beyond_control_is_the_paired_difference_to_the_mean_draw() -> None:
    sweep = random_sets([0, 0, 1, 0], [[1, 1, 1, 0], [1, 0, 1, 1]])
    found = sweep.beyond_control("mine", 1, "correct", "t")
    assert found.estimate == pytest.approx(0.75 - 0.25) and found.n == 4
    assert found.low <= found.estimate <= found.high


def test_one_set_as_bad_as_mine_is_enough_for_doubt() -> None:
    good, bad = [1.0] * 12, [0.0] * 12
    clear = random_sets(bad, [good] * 5).beyond_control("mine", 1, "correct", "t")
    assert (clear.low, clear.high) == (1.0, 1.0)
    doubtful = random_sets(bad, [good] * 4 + [bad]).beyond_control("mine", 1, "correct", "t")
    assert doubtful.low == 0.0 and doubtful.estimate == pytest.approx(0.8)


def test_another_random_set_is_seldom_called_worse() -> None:
    rng = np.random.default_rng(0)
    called = 0
    for seed in range(60):
        shifts = rng.normal(0, 0.2, size=8)  # sets differ, and mine is one of them
        sets = [(rng.random(20) < np.clip(0.7 + s, 0, 1)).astype(float).tolist() for s in shifts]
        found = random_sets(sets[0], sets[1:]).beyond_control("mine", 1, "correct", "t", n_boot=400, seed=seed)
        called += found.low > 0
    assert called <= 6


def test_one_draw_gives_no_interval_and_a_missing_cell_an_error() -> None:
    sweep = random_sets([0, 1], [[1, 1]])
    assert np.isnan(sweep.beyond_control("mine", 1, "correct", "t").low)
    with pytest.raises(InvalidInput):
        sweep.beyond_control("mine", 2, "correct", "t")
