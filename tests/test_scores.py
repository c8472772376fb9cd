"""Head scores: means by hand, intervals by loop, files that come back bit for bit or not."""

from __future__ import annotations

import json
import os
import re

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mechheads.errors import InvalidInput, OutputNotWritable, ResultFileError, UnknownName
from mechheads.heads import HeadSet
from mechheads.scores import HeadScores, SweepResult
from mechheads.stats import bootstrap_weights

META = {
    "model": {"name": "nano", "weight_hash": "ab"},
    "method": "locos",
    "options": {"unembed": "raw"},
    "trials": {"name": "facts", "hash": "1", "options": {}},
}


def make(n=6, layers=2, heads=3, *, seed=0, nan=0, prefix="t", **fields) -> HeadScores:
    rng = np.random.default_rng(seed)
    values = rng.normal(size=(n, layers, heads)).astype(np.float32)
    values.ravel()[rng.choice(values.size, nan, replace=False)] = np.nan
    base = {
        "method": "locos",
        "values": values,
        "kept": np.arange(n) != n - 1,
        "weights": np.where(np.arange(n) != n - 1, rng.integers(1, 5, n), 0).astype(float),
        "trial_ids": [f"{prefix}{i}" for i in range(n)],
        "unit": "logits",
        "parts": {"plus": values + 1, "minus": values * 0 + 1},
        "records": [{"split": ("calibration", "test")[i % 2], "reason": None, "ü": "é"} for i in range(n)],
        "meta": META,
    }
    return HeadScores(**{**base, **fields})


def of(matrix, **fields) -> HeadScores:
    """One kept trial with these scores."""
    values = np.array(matrix, dtype=np.float32)[None]
    one = {"kept": np.array([True]), "weights": np.array([1.0]), "trial_ids": ["a"]}
    return HeadScores(method="m", values=values, **{**one, **fields})


# -- means ---------------------------------------------------------------------------------------


def by_hand(scores: HeadScores, array: np.ndarray, rows) -> np.ndarray:
    """Pooled mean over the given trials (repeats count), by loops."""
    out = np.full(array.shape[1:], np.nan)
    for head in np.ndindex(out.shape):
        total = weight = 0.0
        for i in rows:
            if np.isfinite(array[i][head]):
                w = scores.weights[i] if scores.pooling == "step" else 1.0
                total, weight = total + w * float(array[i][head]), weight + w
        if weight:
            out[head] = total / weight
    return out


@given(st.integers(0, 10**6), st.integers(0, 20), st.sampled_from(["step", "trial"]))
@settings(max_examples=40)
def test_pooled_equals_loops(seed, nan, pooling):
    scores = make(seed=seed, nan=nan, pooling=pooling)
    rows = np.flatnonzero(scores.kept)
    np.testing.assert_allclose(scores.mean(), by_hand(scores, scores.values, rows), rtol=1e-12)
    plus = by_hand(scores, scores.parts["plus"], rows)
    np.testing.assert_allclose(scores.part_mean("plus"), plus, rtol=1e-12)
    np.testing.assert_array_equal(scores.pooled("plus"), scores.part_mean("plus"))


def test_step_pooling_weighs_every_answer_step_the_same():
    values = np.array([1.0, 4.0]).reshape(2, 1, 1)
    scores = make(2, 1, 1, values=values, kept=np.array([True, True]), weights=np.array([1.0, 3.0]), parts={})
    assert scores.mean()[0, 0] == 13 / 4
    assert scores.with_pooling("trial").mean()[0, 0] == 2.5
    assert scores.pooling == "step"


def test_trials_that_are_not_kept_take_no_part():
    scores = make()
    changed = scores.values.copy()
    changed[~scores.kept] = 1e6
    other = make(values=changed, parts={})
    np.testing.assert_array_equal(scores.mean(), other.mean())
    np.testing.assert_array_equal(scores.ci(n_boot=50), other.ci(n_boot=50))


def test_a_head_no_kept_trial_defines_is_undefined_everywhere():
    values = make().values.copy()
    values[:-1, 1, 2] = np.nan
    scores = make(values=values)
    assert np.isnan([scores.mean()[1, 2], scores.rank()[1, 2], scores.score_of("L1H2")]).all()
    assert "L1H2" not in scores.ranking() and len(scores.ranking()) == 5
    assert np.isnan(scores.ci(n_boot=20)[0][1, 2])
    with pytest.raises(InvalidInput, match="k is 6, but the model has 6 heads, of which 1 have no score"):
        scores.top(6)


@given(st.integers(0, 10**6), st.integers(0, 20), st.sampled_from(["step", "trial"]))
@settings(max_examples=15)
def test_interval_equals_a_loop_over_resampled_trials(seed, nan, pooling):
    scores = make(seed=seed, nan=nan, pooling=pooling)
    rows = np.flatnonzero(scores.kept)
    counts = bootstrap_weights(len(rows), 40, np.random.default_rng(9)).astype(int)
    samples = np.array([by_hand(scores, scores.values, np.repeat(rows, c)) for c in counts])
    low, high = scores.ci(0.8, n_boot=40, seed=9)
    for head in np.ndindex(low.shape):
        column = samples[(slice(None), *head)]
        if np.isfinite(scores.values[rows][(slice(None), *head)]).sum() < 2:
            assert np.isnan(low[head]) and np.isnan(high[head])
        else:
            want = np.nanquantile(column, [0.1, 0.9])
            np.testing.assert_allclose([low[head], high[head]], want, rtol=1e-9, atol=1e-12)


def test_intervals_hold_the_mean_and_repeat_with_the_seed():
    scores = make(40, 3, 700, parts={}, records=())  # more heads than one block of the bootstrap
    low, high = scores.ci(n_boot=200)
    assert low.shape == (3, 700) and (low < scores.mean()).all() and (scores.mean() < high).all()
    np.testing.assert_array_equal(scores.ci(n_boot=200), (low, high))
    assert not np.array_equal(scores.ci(n_boot=200, seed=1)[0], low)


def test_fewer_than_two_kept_trials_have_no_interval():
    low, high = of([[1.0, 2.0]]).ci()
    assert low.shape == high.shape == (1, 2)
    assert np.isnan(low).all() and np.isnan(high).all()


def test_no_kept_trial_is_said_with_the_reasons_and_what_to_do():
    records = [{"reason": "no answer step"}] + [{"reason": "wrong answer"}] * 4 + [{}]
    scores = make(kept=np.zeros(6, dtype=bool), records=records)
    message = (
        r"none of the 6 trials of 'locos' is kept "
        r"\(4 x wrong answer, 1 x no answer step, 1 x no reason recorded\).*"
        "Use trials the model can answer"
    )
    for call in (
        scores.mean,
        scores.ranking,
        scores.rank,
        lambda: scores.top(1),
        lambda: scores.bottom(1),
        lambda: scores.nearest_zero(1),
        lambda: scores.score_of("L0H0"),
        scores.to_frame,
    ):
        with pytest.raises(InvalidInput, match=message):
            call()
    assert np.isnan(scores.ci()[0]).all() and scores.n_kept == 0


# -- rankings ------------------------------------------------------------------------------------


def test_rankings_by_hand_with_ties_in_order_of_layer_and_head():
    scores = of([[0.5, -2.0, 0.0], [0.5, 3.0, -0.1]])
    assert scores.ranking().labels == ["L1H1", "L0H0", "L1H0", "L0H2", "L1H2", "L0H1"]
    assert scores.top(3) == HeadSet(["L1H1", "L0H0", "L1H0"])
    assert scores.bottom(2) == HeadSet(["L0H1", "L1H2"])
    assert scores.nearest_zero(4) == HeadSet(["L0H2", "L1H2", "L0H0", "L1H0"])
    np.testing.assert_array_equal(scores.rank(), [[2, 6, 4], [3, 1, 5]])
    assert scores.score_of("1.1") == 3.0
    assert len(scores.top(0)) == 0
    flat = of(np.zeros((2, 2)))
    assert flat.top(4) == flat.bottom(4) == flat.nearest_zero(4) == HeadSet(["L0H0", "L0H1", "L1H0", "L1H1"])


@pytest.mark.parametrize("k", [7, -1, True])
def test_k_that_cannot_be(k):
    scores = make()
    for pick in (scores.top, scores.bottom, scores.nearest_zero):
        with pytest.raises(InvalidInput, match=f"k is {k}"):
            pick(k)


def test_score_of_a_head_outside_the_model():
    with pytest.raises(InvalidInput, match="L2H0 does not exist"):
        make().score_of("L2H0")


def test_frame_has_a_row_per_head():
    scores = make(nan=4)
    frame = scores.to_frame(ci=True, n_boot=50, seed=3)
    assert list(frame.columns) == [
        "layer",
        "head",
        "label",
        "score",
        "rank",
        "n_trials",
        "ci_low",
        "ci_high",
        "plus",
        "minus",
    ]
    assert len(frame) == 6
    low, high = scores.ci(n_boot=50, seed=3)
    for row in frame.to_dict("records"):
        at = row["layer"], row["head"]
        assert row["label"] == "L{}H{}".format(*at)
        assert row["score"] == scores.mean()[at]
        assert (row["ci_low"], row["ci_high"]) == (low[at], high[at])
        assert row["n_trials"] == np.isfinite(scores.values[scores.kept][:, at[0], at[1]]).sum()
        assert row["plus"] == scores.part_mean("plus")[at]
    assert "ci_low" not in scores.to_frame()
    best = frame.sort_values("rank")["label"].tolist()
    assert best == scores.ranking().labels


# -- validation ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"values": np.zeros((6, 2))}, r"values has shape \(6, 2\); expected \(trial, layer, head\)"),
        ({"values": np.zeros((6, 0, 3))}, r"values has shape \(6, 0, 3\)"),
        ({"kept": np.ones(5, dtype=bool)}, r"kept has shape \(5,\); expected one per trial, \(6,\)"),
        ({"kept": np.ones(6)}, "kept has dtype float64; expected bool"),
        ({"weights": np.ones((6, 1))}, r"weights has shape \(6, 1\); expected one per trial"),
        ({"weights": np.zeros(6)}, "trial 't0' has weight 0.0; expected its number of answer steps"),
        ({"weights": np.array([1, 1, np.nan, 1, 1, 1])}, "trial 't2' has weight nan"),
        ({"weights": np.array([1, 1, 1, 1, 1, -1.0])}, "trial 't5' has weight -1.0"),
        ({"trial_ids": ["a", "b"]}, "trial_ids has 2 entries; expected one per trial, 6"),
        ({"trial_ids": list("aabcde")}, "trial id 'a' stands more than once"),
        ({"records": [{}]}, "records has 1 entries; expected one per trial, 6"),
        ({"pooling": "steps"}, "unknown pooling 'steps'. Did you mean 'step'"),
        ({"parts": {"plus": np.zeros((6, 2, 2))}}, r"part 'plus' has shape \(6, 2, 2\); .* \(6, 2, 3\)"),
        ({"parts": {"score": np.zeros((6, 2, 3))}}, "a part is named 'score'"),
        ({"meta": {"options": {"f": print}}}, r"meta\['options'\]\['f'\] is a builtin_function_or_method"),
        ({"records": [{}, {"x": float("nan")}, *[{}] * 4]}, r"record of trial 't1'\['x'\] is nan.*use None"),
    ],
)
def test_inconsistent_scores_are_refused_by_name(fields, message):
    with pytest.raises(InvalidInput, match=message):
        make(**fields)


def test_infinite_scores_are_refused_at_their_place():
    values = make().values.copy()
    values[2, 1, 0] = -np.inf
    with pytest.raises(InvalidInput, match="values is -inf at trial 't2', L1H0"):
        make(values=values)


def test_scores_cannot_be_changed_from_outside():
    values = np.zeros((6, 2, 3), dtype=np.float32)
    scores = make(values=values)
    values[:] = 7
    assert (scores.values == 0).all()
    for array in (scores.values, scores.kept, scores.weights, scores.parts["plus"]):
        with pytest.raises(ValueError, match="read-only"):
            array[0] = 1


def test_repr_is_short():
    shown = "HeadScores('locos', 5 of 6 trials kept, 2 layers x 3 heads, logits, pooling='step')"
    assert repr(make()) == shown


# -- subsets -------------------------------------------------------------------------------------


def test_trials_are_selected_by_mask_or_by_id_in_the_order_given():
    scores = make()
    picked = scores.select_trials(["t3", "t1"])
    assert picked.trial_ids == ("t3", "t1")
    np.testing.assert_array_equal(picked.values, scores.values[[3, 1]])
    np.testing.assert_array_equal(picked.parts["plus"], scores.parts["plus"][[3, 1]])
    np.testing.assert_array_equal(picked.weights, scores.weights[[3, 1]])
    assert picked.records == (scores.records[3], scores.records[1])
    mask = np.array([False, True, False, True, False, False])
    for which in (mask, mask.tolist()):
        assert scores.select_trials(which).trial_ids == ("t1", "t3")
    assert scores.select_trials([]).shape == (0, 2, 3)
    assert scores.select_trials("t2").trial_ids == ("t2",)


def test_trials_that_are_not_there():
    with pytest.raises(InvalidInput, match=r"there is no trial 't9' among the 6 of 'locos'\. Did you mean"):
        make().select_trials(["t9"])
    with pytest.raises(InvalidInput, match="the mask has 2 entries; expected one per trial, 6"):
        make().select_trials([True, False])


def test_split_by_records():
    scores = make()
    assert scores.split("test").trial_ids == ("t1", "t3", "t5")
    with pytest.raises(UnknownName, match=r"unknown split of 'locos' 'tset'\. Did you mean 'test'"):
        scores.split("tset")


@given(st.integers(0, 6), st.integers(0, 10**6))
@settings(max_examples=20)
def test_merging_the_parts_of_a_result_gives_it_back(cut, seed):
    whole = make(seed=seed, nan=5)
    again = whole.select_trials(whole.trial_ids[:cut]).merge(whole.select_trials(whole.trial_ids[cut:]))
    assert again.trial_ids == whole.trial_ids and again.records == whole.records and again.meta == whole.meta
    for a, b in (
        (again.values, whole.values),
        (again.kept, whole.kept),
        (again.weights, whole.weights),
        (again.parts["plus"], whole.parts["plus"]),
    ):
        assert a.tobytes() == b.tobytes()


def test_merging_other_trials_names_both_sets():
    other = make(prefix="u", meta={**META, "trials": {"name": "passkey", "hash": "2", "options": {}}})
    merged = make().merge(other)
    assert merged.shape == (12, 2, 3)
    assert [t["name"] for t in merged.meta["trials"]] == ["facts", "passkey"]


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"method": "dla"}, "method: 'locos' and 'dla'"),
        ({"pooling": "trial"}, "pooling: 'step' and 'trial'"),
        ({"unit": "probability"}, "unit: 'logits' and 'probability'"),
        ({"heads": 4}, r"shape \(layer, head\): \(2, 3\) and \(2, 4\)"),
        ({"parts": {}}, r"parts: \['minus', 'plus'\] and \[\]"),
        (
            {"meta": {**META, "model": {"name": "nano", "weight_hash": "cd"}}},
            r"meta\['model'\]\['weight_hash'\]: 'ab' and 'cd'",
        ),
        (
            {"meta": {**META, "options": {"unembed": "normed"}}},
            r"meta\['options'\]\['unembed'\]: 'raw' and 'normed'",
        ),
        ({"meta": {**META, "options": {}}}, r"meta\['options'\]\['unembed'\]: 'raw' and None"),
    ],
)
def test_merging_what_does_not_belong_together(fields, message):
    with pytest.raises(InvalidInput, match=f"cannot merge scores that differ in {message}"):
        make().merge(make(prefix="u", **fields))


def test_merging_a_trial_twice():
    with pytest.raises(InvalidInput, match="trial 't0' stands in both results"):
        make().merge(make())


# -- files ---------------------------------------------------------------------------------------


@given(st.integers(0, 5), st.integers(0, 10**6), st.sampled_from(["step", "trial"]))
@settings(max_examples=15)
def test_file_round_trip_is_bit_exact(tmp_path_factory, n, seed, pooling):
    scores = make(n, seed=seed, nan=min(n, 3), pooling=pooling)
    back = HeadScores.load(scores.save(tmp_path_factory.mktemp("s") / "locos"))
    for name in ("values", "kept", "weights"):
        a, b = getattr(scores, name), getattr(back, name)
        assert a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    assert list(back.parts) == list(scores.parts)
    assert all(back.parts[name].tobytes() == part.tobytes() for name, part in scores.parts.items())
    for name in ("method", "trial_ids", "unit", "pooling", "records", "meta"):
        assert getattr(back, name) == getattr(scores, name)


def test_a_nan_with_a_payload_keeps_its_bits(tmp_path):
    values = np.array([0x7FC00001, 0xFFC00000, 0x80000000, 1, 2, 3], dtype=np.uint32).view(np.float32)
    scores = of(values.reshape(2, 3))
    assert HeadScores.load(scores.save(tmp_path / "a")).values.tobytes() == values.tobytes()


def test_save_adds_the_extension_makes_folders_and_leaves_nothing_else(tmp_path):
    path = make().save(tmp_path / "runs" / "a" / "locos")
    assert path == tmp_path / "runs" / "a" / "locos.parquet"
    make(seed=1).save(path)
    assert os.listdir(path.parent) == ["locos.parquet"]
    back = HeadScores.load(tmp_path / "runs" / "a" / "locos")
    assert back.values.tobytes() == make(seed=1).values.tobytes()


def test_a_folder_named_like_a_partition_changes_nothing(tmp_path):
    assert HeadScores.load(make().save(tmp_path / "kept=5" / "locos")).n_kept == 5


def test_the_file_reads_without_mechheads(tmp_path):
    path = make().save(tmp_path / "locos")
    table = pq.read_table(path)
    assert table.column_names == ["trial_id", "kept", "weight", "record", "values", "part:plus", "part:minus"]
    header = json.loads(table.schema.metadata[b"mechheads"])
    assert header["format"] == 1 and header["kind"] == "head_scores" and header["shape"] == [6, 2, 3]
    np.testing.assert_array_equal(table["values"][1].as_py(), make().values[1].ravel())


def test_a_folder_that_cannot_be_written_is_named(tmp_path):
    (tmp_path / "file").write_text("in the way")
    for save in (make().save, make().to_heads_json):
        with pytest.raises(OutputNotWritable, match=re.escape(f"into the folder {tmp_path / 'file'}")):
            save(tmp_path / "file" / "locos.parquet")


def test_a_failed_write_leaves_the_old_file_and_no_rubbish(tmp_path, monkeypatch):
    path = make().save(tmp_path / "locos")
    before = path.read_bytes()

    def full(table, target, **_):
        target.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OutputNotWritable, match="No space left on device"):
        make(seed=1).save(path)
    assert path.read_bytes() == before and os.listdir(tmp_path) == ["locos.parquet"]


def rewrite(path, *, header=None, table=None):
    """The same file with another header or table."""
    old = pq.ParquetFile(path).read()
    meta = {**json.loads(old.schema.metadata[b"mechheads"]), **(header or {})}
    new = (old if table is None else table).replace_schema_metadata({b"mechheads": json.dumps(meta).encode()})
    pq.write_table(new, path)


def test_missing_file_and_folder(tmp_path):
    with pytest.raises(ResultFileError, match=re.escape(f"{tmp_path / 'nothing.parquet'} does not exist")):
        HeadScores.load(tmp_path / "nothing")
    with pytest.raises(ResultFileError, match="is a folder, not a file"):
        HeadScores.load(tmp_path)


def test_every_truncation_is_refused(tmp_path):
    path = make().save(tmp_path / "locos")
    content = path.read_bytes()
    for size in (0, 1, 4, 11, len(content) // 3, len(content) // 2, len(content) - 9, len(content) - 1):
        path.write_bytes(content[:size])
        with pytest.raises(ResultFileError, match=re.escape(f"{path} is truncated or damaged")):
            HeadScores.load(path)


def test_a_flipped_bit_in_any_column_is_refused(tmp_path):
    path = make(60, 6, 6).save(tmp_path / "locos")
    content = path.read_bytes()
    group = pq.ParquetFile(path).metadata.row_group(0)
    for column in map(group.column, range(group.num_columns)):
        # Past the middle: the header of a page is short and comes first.
        last = (column.dictionary_page_offset or column.data_page_offset) + column.total_compressed_size - 1
        damaged = bytearray(content)
        damaged[last] ^= 1
        path.write_bytes(damaged)
        with pytest.raises(ResultFileError, match="truncated or damaged"):
            HeadScores.load(path)


def test_a_foreign_file_is_refused(tmp_path):
    path = tmp_path / "foreign.parquet"
    pq.write_table(pa.table({"a": [1]}), path)
    with pytest.raises(ResultFileError, match=r"foreign\.parquet is .* without mechheads metadata"):
        HeadScores.load(path)
    pq.write_table(pa.table({"a": [1]}).replace_schema_metadata({b"mechheads": b"[1"}), path)
    with pytest.raises(ResultFileError, match="metadata that cannot be read"):
        HeadScores.load(path)


def test_a_newer_format_is_refused_with_the_way_out(tmp_path):
    path = make().save(tmp_path / "locos")
    rewrite(path, header={"format": 2})
    message = r"locos\.parquet was written by a newer mechheads \(format 2\); this one reads up to 1: upgrade"
    with pytest.raises(ResultFileError, match=message):
        HeadScores.load(path)


def test_another_kind_is_refused(tmp_path):
    path = make().save(tmp_path / "locos")
    with pytest.raises(ResultFileError, match=r"locos\.parquet holds 'head_scores', but 'sweep' was"):
        SweepResult.load(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ({"shape": [7, 2, 3]}, "6 rows but its header says 7 trials"),
        ({"shape": [6, 3, 3]}, r"column 'values' holds 36 float32 numbers, not float32 \(6, 3, 3\)"),
        ({"parts": ["plus", "other"]}, "it lacks .*part:other"),
        ({"pooling": "x"}, "unknown pooling 'x'"),
        ({"shape": None}, "is not a consistent head score file"),
    ],
)
def test_inconsistent_files_are_refused(tmp_path, header, message):
    path = make().save(tmp_path / "locos")
    rewrite(path, header=header)
    with pytest.raises(ResultFileError, match=message) as caught:
        HeadScores.load(path)
    assert str(path) in str(caught.value)


def test_a_missing_column_or_null_is_refused(tmp_path):
    path = make().save(tmp_path / "locos")
    table = pq.read_table(path)
    rewrite(path, table=table.drop_columns(["kept"]))
    with pytest.raises(ResultFileError, match=r"it lacks .*kept"):
        HeadScores.load(path)
    rewrite(path, table=table.set_column(1, "kept", pa.array([True, None, True, True, True, False])))
    with pytest.raises(ResultFileError, match="column 'kept' has empty entries"):
        HeadScores.load(path)


# -- published head files ------------------------------------------------------------------------


def test_heads_json_holds_the_kept_trials_and_comes_back(tmp_path):
    scores = make(nan=5)
    path = scores.to_heads_json(tmp_path / "heads.json")
    raw = json.loads(path.read_text())
    assert list(raw)[:4] == ["0-0", "0-1", "0-2", "1-0"] and {len(v) for v in raw.values()} == {5}
    assert "NaN" not in path.read_text()
    back = HeadScores.from_heads_json(path, n_layers=2, n_heads=3, method="locos", unit="logits")
    np.testing.assert_array_equal(back.values, scores.values[scores.kept])
    np.testing.assert_array_equal(back.mean(), scores.with_pooling("trial").mean())
    assert back.pooling == "trial" and back.method == "locos" and back.n_kept == 5


def test_heads_json_with_some_heads_leaves_the_others_undefined(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps({"1-2": [0.5, 0.7], "0-0": [1, None]}))
    assert HeadScores.from_heads_json(path).shape == (2, 2, 3)
    scores = HeadScores.from_heads_json(path, n_layers=4, n_heads=4)
    assert scores.shape == (2, 4, 4) and scores.ranking().labels == ["L0H0", "L1H2"]
    assert scores.score_of("L1H2") == pytest.approx(0.6) and scores.score_of("L0H0") == 1


@pytest.mark.parametrize(("layers", "heads"), [(2, 2), (1, 3), (3, 3), (2, 4)])
def test_heads_json_of_another_model_is_refused(tmp_path, layers, heads):
    path = make().to_heads_json(tmp_path / "heads.json")
    message = f"6 heads in 2 layers of 3; that does not fit a model of {layers} layers with {heads} heads"
    with pytest.raises(ResultFileError, match=message):
        HeadScores.from_heads_json(path, n_layers=layers, n_heads=heads)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "is not a readable head file"),
        ("[]", "expected a map from 'layer-head' to a list"),
        ("{}", "expected a map from 'layer-head' to a list"),
        ('{"a": [1]}', "cannot read a head from 'a'"),
        ('{"0-0": 1}', "the entry '0-0' is not a list of scores"),
        ('{"0-0": ["x"]}', "is not a readable head file"),
        ('{"0-0": [1], "0-1": [1, 2]}', "heads with 1 and with 2 scores"),
        ('{"0-0": [1], "0.0": [2]}', "names a head twice"),
    ],
)
def test_damaged_head_files(tmp_path, content, message):
    path = tmp_path / "heads.json"
    path.write_text(content)
    with pytest.raises(ResultFileError, match=message):
        HeadScores.from_heads_json(path)


def test_missing_head_file(tmp_path):
    with pytest.raises(ResultFileError, match="is not a readable head file"):
        HeadScores.from_heads_json(tmp_path / "none.json")
