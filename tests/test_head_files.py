"""Head files in the formats in the wild: what comes back, what is left out, what is refused and how it is named."""

from __future__ import annotations

import copy
import json
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from mechheads.errors import InvalidInput, OutputNotWritable, ResultFileError, UnknownName
from mechheads.head_files import HEAD_FILE_FORMATS, ListedHeads, left_out, output_format, read_heads, write_heads
from mechheads.heads import Head, HeadSet
from mechheads.scores import HeadScores

FLAT = {"0-0": [0.83, 0.1], "0-1": [1, None], "1-0": [-0.5, 3.25], "1-1": [None, None]}
ENVELOPE = {
    "meta": {"model": "org/name", "n": 2, "nested": {"a": [1, None, "ü"]}},
    "scores": FLAT,
    "trial_ids": ["b", "a"],
    "confidence_intervals": {"0-0": [0.1, 0.83], "0-1": {"low": None, "high": None, "level": 0.9}, "1.0": [-0.5, 3.25]},
    "version": 3,
}
QRHEAD = """# Default configuration

attn_head_set: "1-1,0-3,1-0" # top3
model_base_class: "Tiny"
model_name_or_path: "o/t"
"""
PAIRS = [["1-0", 0.9], ["0-1", 0.25], ["0-0", 0.25], ["1-1", -1e-05]]
DUO = (
    "-9.584426879882812500e-05\t5.585937500000000000e-01\n"
    "1.000000000000000000e+00\t7.812500000000000000e-01\n"
    "9.882812500000000000e-01\t0.000000000000000000e+00\n"
)
PLAIN = settings(max_examples=60, deadline=None)


def put(folder: Path, name: str, content: Any) -> Path:
    """A file with this text, these bytes or this JSON."""
    path = folder / name
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def read_scores(path: Path, **options: Any) -> HeadScores:
    found = read_heads(path, **options)
    assert isinstance(found, HeadScores)
    return found


def make(n: int = 5, layers: int = 2, heads: int = 4, *, seed: int = 0, **fields: Any) -> HeadScores:
    rng = np.random.default_rng(seed)
    base = {
        "method": "locos",
        "values": rng.normal(size=(n, layers, heads)).astype(np.float32),
        "kept": np.arange(n) != 1,
        "weights": np.where(np.arange(n) != 1, rng.integers(1, 5, n), 0).astype(float),
        "trial_ids": [f"t{i}" for i in range(n)],
        "unit": "logits",
        "meta": {"model": {"name": "nano"}, "options": {"unembed": "raw"}},
    }
    return HeadScores(**{**base, **fields})


def same(a: np.ndarray, b: np.ndarray) -> bool:
    return a.shape == b.shape and np.array_equal(a, b, equal_nan=True)


# -- reading each format -------------------------------------------------------------------------


def by_hand(raw: dict[str, Any], layers: int, heads: int) -> np.ndarray:
    """``[trial layer head]`` of a flat map, by loops."""
    n = len(next(iter(raw.values())))
    out = np.full((n, layers, heads), np.nan, dtype=np.float32)
    for key, row in raw.items():
        layer, head = key.split("-")
        for trial, score in enumerate(row):
            if score is not None:
                out[trial, int(layer), int(head)] = score
    return out


def test_flat(tmp_path):
    scores = read_scores(put(tmp_path, "heads.json", FLAT))
    assert same(scores.values, by_hand(FLAT, 2, 2))
    assert scores.trial_ids == ("0", "1") and scores.n_kept == 2 and scores.pooling == "trial"
    assert (scores.method, scores.unit) == ("flat", "")
    assert scores.meta == {"source": "heads.json", "head_file": {"format": "flat"}}
    named = read_scores(tmp_path / "heads.json", n_layers=2, n_heads=2, n_key_value_heads=1, method="wu", unit="p")
    assert (named.method, named.unit) == ("wu", "p") and named.meta["head_file"]["n_key_value_heads"] == 1
    some = read_scores(put(tmp_path, "some.json", {"1-2": [1.0]}), n_layers=4, n_heads=6)
    assert some.shape == (1, 4, 6) and some.ranking() == HeadSet(["L1H2"])


def test_one_number_a_head(tmp_path):
    scores = read_scores(put(tmp_path, "heads.json", {"0-0": 0.83, "0-1": None, "0-2": 2}))
    assert scores.method == "flat_means" and scores.shape == (1, 1, 3)
    assert same(scores.values[0], np.array([[0.83, np.nan, 2]], dtype=np.float32))


def test_envelope(tmp_path):
    scores = read_scores(put(tmp_path, "heads.json", ENVELOPE))
    assert same(scores.values, by_hand(FLAT, 2, 2)) and scores.trial_ids == ("b", "a")
    assert scores.method == "locos" and scores.unit == ""
    kept = scores.meta["head_file"]["envelope"]
    assert kept == {key: ENVELOPE[key] for key in ("meta", "confidence_intervals", "version")}
    named = read_scores(put(tmp_path, "m.json", {"meta": {"method": "dla", "unit": "logits"}, "scores": FLAT}))
    assert (named.method, named.unit) == ("dla", "logits") and named.trial_ids == ("0", "1")
    means = read_scores(put(tmp_path, "s.json", {"scores": {"0-0": 0.5}, "trial_ids": [7]}))
    assert means.shape == (1, 1, 1) and means.trial_ids == ("7",)


def test_from_heads_json_reads_the_envelope_too(tmp_path):
    path = put(tmp_path, "heads.json", ENVELOPE)
    scores = HeadScores.from_heads_json(path, n_layers=2, n_heads=2)
    assert scores.trial_ids == ("b", "a") and scores.method == "locos"
    assert HeadScores.from_heads_json(path, method="mine", unit="u").unit == "u"
    assert HeadScores.from_heads_json(put(tmp_path, "flat.json", FLAT)).method == "heads_json"


def test_qrhead(tmp_path):
    heads = read_heads(put(tmp_path, "heads.yaml", QRHEAD), n_layers=2, n_heads=4)
    assert isinstance(heads, ListedHeads) and heads == HeadSet(["L1H1", "L0H3", "L1H0"])
    assert heads.source == "heads.yaml" and heads.rest == {"model_base_class": "Tiny", "model_name_or_path": "o/t"}
    assert HeadSet.parse(heads) is heads and heads[:2] == HeadSet(["L1H1", "L0H3"]) and not heads.full
    for copied in (copy.deepcopy(heads), pickle.loads(pickle.dumps(heads))):
        assert copied == heads and copied.rest == heads.rest


@pytest.mark.parametrize(
    "text",
    [
        'attn_head_set: "1_1,0_3, 1_0"',  # Gemma-3's list is written so
        "attn_head_set: 1-1,0-3,1-0",
        "attn_head_set: [1-1, 0-3, 1-0]",
        'attn_head_set:\n- "1_1"\n- 0-3\n- L1H0',
        "attn_head_set: [[1, 1], [0, 3], [1, 0]]",
        "- 1-1\n- 0-3\n- 1-0",
    ],
)
def test_qrhead_spellings(tmp_path, text):
    assert read_heads(put(tmp_path, "heads.yml", text)) == HeadSet(["L1H1", "L0H3", "L1H0"])


def test_all_heads_need_the_shape(tmp_path):
    path = put(tmp_path, "full.yaml", 'attn_head_set: "full_heads"\nmodel_base_class: T\n')
    with pytest.raises(InvalidInput, match=r"full\.yaml lists 'full_heads'.*give n_layers and n_heads"):
        read_heads(path, n_layers=2)
    heads = read_heads(path, n_layers=2, n_heads=3)
    assert isinstance(heads, ListedHeads) and heads.full
    assert heads.labels == ["L0H0", "L0H1", "L0H2", "L1H0", "L1H1", "L1H2"]
    assert yaml.safe_load(write_heads(heads, tmp_path / "again.yaml").read_text()) == yaml.safe_load(path.read_text())
    assert yaml.safe_load(write_heads(heads, path, k=2).read_text())["attn_head_set"] == "0-0,0-1"


def test_qrhead_scores(tmp_path):
    scores = read_scores(put(tmp_path, "detected.json", PAIRS))
    assert scores.method == "qrhead_scores" and scores.ranking().labels == ["L1H0", "L0H0", "L0H1", "L1H1"]
    assert same(scores.values[0], np.array([[0.25, 0.25], [0.9, -1e-05]], dtype=np.float32))
    some = read_scores(put(tmp_path, "top.json", PAIRS[:2]), n_layers=3, n_heads=2)
    assert some.ranking().labels == ["L1H0", "L0H1"] and some.n_layers == 3


def test_duo_repeats_each_group(tmp_path):
    path = put(tmp_path, "full_attention_heads.tsv", DUO)
    scores = read_scores(path, n_heads=6)
    table = np.loadtxt(path, delimiter="\t")
    assert scores.shape == (1, 3, 6) and scores.meta["head_file"] == {"format": "duo", "n_key_value_heads": 2}
    for layer in range(3):
        for head in range(6):
            assert scores.values[0, layer, head] == np.float32(table[layer, Head(layer, head).kv_group(6, 2)])
    assert read_scores(path, n_layers=3, n_heads=2, n_key_value_heads=2).n_heads == 2
    with pytest.raises(InvalidInput, match=r"has 2 columns, one for each key/value head; give n_heads"):
        read_heads(path)


def test_parquet_comes_whole(tmp_path):
    path = make().save(tmp_path / "locos")
    scores = read_scores(path, n_layers=2, n_heads=4)
    assert scores.values.tobytes() == make().values.tobytes() and scores.meta == make().meta
    assert read_scores(path, method="x").method == "x" and read_scores(path, unit="u").unit == "u"
    with pytest.raises(ResultFileError, match=r"locos\.parquet has 4 heads, not 8"):
        read_heads(path, n_heads=8)
    with pytest.raises(ResultFileError, match=r"locos\.parquet has 2 layers, not 3"):
        read_heads(path, n_layers=3)
    known = make(meta={"model": {"n_key_value_heads": 2}}).save(tmp_path / "known")
    assert read_scores(known, n_key_value_heads=2).n_heads == 4
    with pytest.raises(ResultFileError, match=r"known\.parquet is of a model with 2 key/value heads, not 4"):
        read_heads(known, n_key_value_heads=4)
    with pytest.raises(InvalidInput, match="n_heads is 4 and n_key_value_heads 3"):
        read_heads(path, n_key_value_heads=3)
    assert write_heads(make(), tmp_path / "again.parquet").is_file()


# -- which format --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("content", "format"),
    [
        (FLAT, "flat"),
        ({"0-0": 1.5}, "flat_means"),
        (ENVELOPE, "locos"),
        (PAIRS, "qrhead_scores"),
        ("0.5\t1\n0\t1\n", "duo"),
    ],
)
@pytest.mark.parametrize("name", ["heads", "heads.txt", "v1.0"])
def test_the_content_shows_the_format(tmp_path, name, content, format):
    scores = read_scores(put(tmp_path, name, content), n_heads=2 if format != "flat_means" else 1)
    assert scores.meta["head_file"]["format"] == format


def test_the_content_shows_the_other_formats(tmp_path):
    assert read_heads(put(tmp_path, "heads.txt", QRHEAD)) == HeadSet(["L1H1", "L0H3", "L1H0"])
    (tmp_path / "p").write_bytes(make().save(tmp_path / "locos").read_bytes())
    assert read_scores(tmp_path / "p").method == "locos"
    with pytest.raises(
        ResultFileError, match="its format shows neither in its name nor in its content; name one: flat"
    ):
        read_heads(put(tmp_path, "notes.txt", "some heads"))


def test_a_byte_order_mark_and_capitals_do_no_harm(tmp_path):
    assert read_scores(put(tmp_path, "H.JSON", b"\xef\xbb\xbf" + json.dumps(FLAT).encode())).n_heads == 2
    assert read_scores(put(tmp_path, "H.TSV", DUO.replace("\n", "\r\n")), n_heads=2).n_layers == 3


@pytest.mark.parametrize(
    ("name", "format"), [("a.json", "flat"), ("a.yml", "qrhead"), ("a.tsv", "duo"), ("a.parquet", "parquet")]
)
def test_the_extension_shows_what_is_written(name, format):
    assert output_format(make(), name) == format


def test_json_is_written_in_the_form_it_was_read(tmp_path):
    for content, format in ((ENVELOPE, "locos"), (PAIRS, "qrhead_scores"), ({"0-0": 1}, "flat_means")):
        assert output_format(read_scores(put(tmp_path, "a.json", content)), "b.json") == format
    assert output_format(read_scores(put(tmp_path, "a.tsv", DUO), n_heads=2), "b.json") == "flat"


def test_formats_that_are_not_there(tmp_path):
    with pytest.raises(UnknownName, match=r"unknown head file format 'flt'. Did you mean 'flat'\?"):
        read_heads(put(tmp_path, "a.json", FLAT), format="flt")
    with pytest.raises(UnknownName, match="unknown head file format 'csv'"):
        write_heads(make(), tmp_path / "a.csv", format="csv")
    with pytest.raises(InvalidInput, match=r"'a\.csv' does not show its format; end it in \.json"):
        write_heads(make(), tmp_path / "a.csv")
    assert set(HEAD_FILE_FORMATS) == {"flat", "flat_means", "locos", "qrhead", "qrhead_scores", "duo", "parquet"}


# -- round trips ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "options"),
    [
        ("a.json", FLAT, {}),
        ("a.json", {"0-0": 0.83, "0-1": None, "1-0": 1e-07, "1-1": -16777216.0}, {}),
        ("a.json", ENVELOPE, {}),
        ("a.json", {**ENVELOPE, "trial_ids": [10, 3]}, {}),
        ("a.json", [PAIRS[i] for i in (0, 2, 1, 3)], {}),
    ],
)
def test_json_files_come_back_equal(tmp_path, name, content, options):
    again = write_heads(read_heads(put(tmp_path, name, content), **options), tmp_path / "again.json")
    assert json.loads(again.read_text()) == content


def test_the_largest_and_the_smallest_numbers(tmp_path):
    values = np.array([np.finfo(np.float32).max, -np.finfo(np.float32).max, 1e-45, -0.0], dtype=np.float32)
    scores = make(1, 1, kept=np.array([True]), weights=np.array([1.0]), values=values.reshape(1, 1, 4))
    path = write_heads(scores, tmp_path / "a.json")
    assert json.loads(path.read_text())["0-0"] == [3.4028235e38]
    assert read_scores(path).values.tobytes() == values.tobytes()
    with pytest.raises(ResultFileError, match=r"score 0 of '0-0' is 3\.4028236e\+38; expected a finite number"):
        read_heads(put(tmp_path, "b.json", '{"0-0": [3.4028236e38]}'))
    table = write_heads(scores, tmp_path / "a.tsv", n_key_value_heads=4)
    assert np.array_equal(read_scores(table, n_heads=4).values, values.reshape(1, 1, 4))


def test_a_published_table_comes_back_byte_for_byte(tmp_path):
    path = put(tmp_path, "a.tsv", DUO)
    assert write_heads(read_heads(path, n_heads=4), tmp_path / "b.tsv").read_bytes() == path.read_bytes()


def test_a_published_list_comes_back(tmp_path):
    path = put(tmp_path, "a.yaml", QRHEAD)
    again = write_heads(read_heads(path), tmp_path / "b.yaml")
    assert yaml.safe_load(again.read_text()) == yaml.safe_load(QRHEAD)
    assert again.read_text().startswith('attn_head_set: "1-1,0-3,1-0"\n')
    named = write_heads(read_heads(path), again, model_base_class="Other", model_name_or_path="x/y")
    assert yaml.safe_load(named.read_text()) == {
        "attn_head_set": "1-1,0-3,1-0", "model_base_class": "Other", "model_name_or_path": "x/y"
    }  # fmt: skip


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)


@st.composite
def any_fields(draw: Any, undefined: bool = True) -> dict[str, Any]:
    """Fields of HeadScores; made inside the test, because the type checks of its construction draw random cells."""
    n, layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3)), draw(st.sampled_from([1, 2, 4]))
    size = n * layers * heads
    cells = draw(st.lists(finite | st.just(math.nan) if undefined else finite, min_size=size, max_size=size))
    return dict(
        method=draw(st.text(max_size=5)),
        values=np.array(cells, dtype=np.float32).reshape(n, layers, heads),
        kept=np.ones(n, dtype=bool),
        weights=np.ones(n),
        trial_ids=draw(st.lists(st.text(max_size=4), min_size=n, max_size=n, unique=True)),
        unit=draw(st.text(max_size=5)),
        pooling="trial",
    )


@PLAIN
@given(fields=any_fields(), format=st.sampled_from(["flat", "locos"]))
def test_every_trial_comes_back(tmp_path_factory, fields, format):
    scores = HeadScores(**fields)
    folder = tmp_path_factory.mktemp("r")
    path = write_heads(scores, folder / "a.json", format=format)
    back = read_scores(path)
    assert same(back.values, scores.values)
    if format == "locos":
        assert (back.trial_ids, back.method, back.unit) == (scores.trial_ids, scores.method, scores.unit)
    assert write_heads(back, folder / "b.json").read_bytes() == path.read_bytes()


@PLAIN
@given(fields=any_fields(undefined=False), format=st.sampled_from(["flat_means", "qrhead_scores", "duo"]))
def test_pooled_scores_come_back(tmp_path_factory, fields, format):
    scores = HeadScores(**fields)
    folder = tmp_path_factory.mktemp("r")
    heads = scores.n_heads
    path = write_heads(scores, folder / "a", format=format, n_key_value_heads=heads if format == "duo" else None)
    back = read_scores(path, format=format, n_layers=scores.n_layers, n_heads=heads)
    assert same(back.values[0], scores.mean().astype(np.float32))
    again = write_heads(back, folder / "b", format=format)
    twice = read_scores(again, format=format, n_layers=scores.n_layers, n_heads=heads)
    assert same(twice.values, back.values)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=6,
)


@PLAIN
@given(data=st.data())
def test_an_envelope_comes_back_equal(tmp_path_factory, data):
    layers, heads, n = data.draw(st.integers(1, 2)), data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3))
    keys = [f"{layer}-{head}" for layer in range(layers) for head in range(heads)]
    cell = finite.map(lambda x: float(str(np.float32(x)))) | st.none()
    ends = st.tuples(st.floats(-1, 0), st.floats(0, 1))
    interval = ends.map(list) | ends.map(lambda e: {"low": e[0], "high": e[1]}) | st.just([None, None])
    content = {
        "meta": data.draw(st.dictionaries(st.text(max_size=6), json_values, max_size=3)),
        "scores": {key: data.draw(st.lists(cell, min_size=n, max_size=n)) for key in keys},
        "trial_ids": data.draw(st.lists(st.text(max_size=3) | st.integers(), min_size=n, max_size=n, unique_by=str)),
        "confidence_intervals": {key: data.draw(interval) for key in keys if data.draw(st.booleans())},
    }
    folder = tmp_path_factory.mktemp("r")
    scores = read_scores(put(folder, "a.json", content))
    assert json.loads(write_heads(scores, folder / "b.json").read_text()) == content
    stored = read_scores(scores.save(folder / "c.parquet"))
    assert json.loads(write_heads(stored, folder / "d.json").read_text()) == content


plain = st.none() | st.booleans() | st.integers() | st.text(max_size=8) | st.dates()


@PLAIN
@given(
    heads=st.lists(st.tuples(st.integers(0, 99), st.integers(0, 99)), min_size=1, max_size=9, unique=True),
    rest=st.dictionaries(st.text(max_size=6).filter(lambda key: key != "attn_head_set"), plain, max_size=3),
)
def test_a_ranking_comes_back(tmp_path_factory, heads, rest):
    folder = tmp_path_factory.mktemp("r")
    back = read_heads(write_heads(ListedHeads(heads, rest=rest), folder / "a.yaml"))
    assert isinstance(back, ListedHeads) and back == HeadSet(heads) and back.rest == rest


# -- what is written -----------------------------------------------------------------------------


def test_kept_trials_are_written_in_every_json_form(tmp_path):
    scores = make()
    flat = json.loads(write_heads(scores, tmp_path / "a.json").read_text())
    assert flat.keys() == {f"{layer}-{head}" for layer in range(2) for head in range(4)}
    assert np.float32(flat["1-2"]).tolist() == scores.values[scores.kept, 1, 2].tolist()
    means = json.loads(write_heads(scores, tmp_path / "b.json", format="flat_means").read_text())
    pairs = json.loads(write_heads(scores, tmp_path / "c.json", format="qrhead_scores").read_text())
    assert [Head.parse(key) for key, _ in pairs] == list(scores.ranking()) and dict(pairs) == means
    assert means["1-2"] == pytest.approx(np.average(scores.values[:, 1, 2], weights=scores.weights), rel=1e-12)
    envelope = json.loads(write_heads(scores, tmp_path / "d.json", format="locos").read_text())
    assert envelope["scores"] == flat and envelope["trial_ids"] == ["t0", "t2", "t3", "t4"]
    assert envelope["meta"] == {**scores.meta, "method": "locos", "unit": "logits"}
    assert scores.to_heads_json(tmp_path / "e.json").read_bytes() == (tmp_path / "a.json").read_bytes()


def test_intervals_are_of_the_trials_in_the_file(tmp_path):
    scores = make()
    written = json.loads(write_heads(scores, tmp_path / "a.json", format="locos").read_text())
    low, high = scores.with_pooling("trial").ci()  # of the plain mean that a reader of the lists takes
    assert not np.allclose(low, scores.ci()[0])
    for layer in range(2):
        for head in range(4):
            interval = pytest.approx([low[layer, head], high[layer, head]], rel=1e-7)
            assert written["confidence_intervals"][f"{layer}-{head}"] == interval
    assert written["confidence"] == {"level": 0.95, "n_boot": 2000, "seed": 0, "of": "mean over trials"}
    # Intervals of other trials are not carried on: that is how a resumed run came to report those of its last part.
    content = {"scores": {"0-0": [1, 2, 6]}, "trial_ids": ["a", "b", "c"], "confidence_intervals": {"0-0": [-9, 9]}}
    whole = read_scores(put(tmp_path, "b.json", content))
    for part in (whole.select_trials(["a", "b"]), whole.select_trials(["c", "b", "a"])):
        again = json.loads(write_heads(part, tmp_path / "c.json").read_text())
        low, high = part.ci()
        assert again["confidence_intervals"] == {"0-0": [low[0, 0], high[0, 0]]} != content["confidence_intervals"]
        assert again["trial_ids"] == list(part.trial_ids)
    ints = read_scores(put(tmp_path, "i.json", {**content, "trial_ids": [1, 2, 3]})).select_trials(["3", "1"])
    assert json.loads(write_heads(ints, tmp_path / "j.json").read_text())["trial_ids"] == ["3", "1"]


def test_a_new_name_is_written_into_the_envelope(tmp_path):
    scores = read_scores(put(tmp_path, "a.json", ENVELOPE), method="mine", unit="u")
    back = read_scores(write_heads(scores, tmp_path / "b.json"))
    assert (back.method, back.unit) == ("mine", "u")
    assert back.meta["head_file"]["envelope"]["meta"] == {**ENVELOPE["meta"], "method": "mine", "unit": "u"}


@pytest.mark.parametrize(("how", "of"), [(None, max), ("max", max), ("mean", lambda xs: sum(xs) / len(xs))])
@pytest.mark.parametrize("n_kv", [1, 2, 4])
def test_a_duo_table_aggregates_each_group(tmp_path, how, of, n_kv):
    scores = make()
    table = np.loadtxt(
        write_heads(scores, tmp_path / "a.tsv", n_key_value_heads=n_kv, kv_groups=how), delimiter="\t", ndmin=2
    )
    assert table.shape == (2, n_kv)
    for layer in range(2):
        for kv in range(n_kv):
            group = [scores.score_of((layer, h)) for h in range(4) if Head(layer, h).kv_group(4, n_kv) == kv]
            assert table[layer, kv] == pytest.approx(of(group), rel=1e-12)


def test_the_scores_may_know_their_key_value_heads(tmp_path):
    known = make(meta={"model": {"n_key_value_heads": 2}})
    assert np.loadtxt(write_heads(known, tmp_path / "a.tsv")).shape == (2, 2)
    read = read_scores(put(tmp_path, "b.json", FLAT), n_key_value_heads=1)
    with pytest.raises(InvalidInput, match=r"L1H1 has no score \(1 such\), and the format 'duo' holds no undefined"):
        write_heads(read, tmp_path / "b.tsv")
    with pytest.raises(InvalidInput, match=r"do not know how many their model has; give n_key_value_heads \(4 where"):
        write_heads(make(), tmp_path / "c.tsv")
    with pytest.raises(InvalidInput, match="n_heads is 4 and n_key_value_heads 3; expected the same number of query"):
        write_heads(make(), tmp_path / "c.tsv", n_key_value_heads=3)


def test_a_ranking_of_scores(tmp_path):
    scores = make()
    text = write_heads(scores, tmp_path / "a.yaml", k=3, model_base_class="nano").read_text()
    assert yaml.safe_load(text) == {
        "attn_head_set": ",".join(f"{h.layer}-{h.head}" for h in scores.top(3)), "model_base_class": "nano"
    }  # fmt: skip
    assert read_heads(write_heads(scores, tmp_path / "b.yaml")) == scores.ranking()
    assert read_heads(write_heads("L1H2, L0H3", tmp_path / "c.yaml")) == HeadSet(["L1H2", "L0H3"])


def test_what_cannot_be_written_is_refused(tmp_path):
    heads = HeadSet(["L0H1"])
    for name in ("a.json", "a.tsv", "a.parquet"):
        with pytest.raises(InvalidInput, match=r"a ranking has no scores for the format .*write it as 'qrhead'"):
            write_heads(heads, tmp_path / name)
    with pytest.raises(InvalidInput, match="there is no head to write"):
        write_heads(HeadSet(), tmp_path / "a.yaml")
    with pytest.raises(InvalidInput, match="k is 2, but there are 1 heads to write"):
        write_heads(heads, tmp_path / "a.yaml", k=2)
    with pytest.raises(InvalidInput, match="k is 0; it must be a whole number >= 1"):
        write_heads(heads, tmp_path / "a.yaml", k=0)
    with pytest.raises(InvalidInput, match="cannot read heads from 3"):
        write_heads(3, tmp_path / "a.yaml")
    with pytest.raises(InvalidInput, match=r"L1H1 has no score .*'qrhead_scores' holds no undefined score"):
        write_heads(read_heads(put(tmp_path, "f.json", FLAT)), tmp_path / "a.json", format="qrhead_scores")
    none = make(kept=np.zeros(5, dtype=bool), weights=np.zeros(5))
    for format in ("flat", "locos", "flat_means", "qrhead_scores", "qrhead", "duo"):
        with pytest.raises(InvalidInput, match="none of the 5 trials of 'locos' is kept"):
            write_heads(none, tmp_path / "n", format=format)
    with pytest.raises(UnknownName, match="unknown way to aggregate a KV group 'median'"):
        write_heads(make(), tmp_path / "a.tsv", n_key_value_heads=2, kv_groups="median")
    assert not any((tmp_path / name).exists() for name in ("a.json", "a.tsv", "a.yaml", "a.parquet", "n"))


@pytest.mark.parametrize(
    ("name", "option", "goes_with"),
    [
        ("a.json", {"k": 2}, "qrhead"),
        ("a.tsv", {"model_base_class": "x"}, "qrhead"),
        ("a.json", {"model_name_or_path": "x"}, "qrhead"),
        ("a.json", {"kv_groups": "max"}, "duo"),
        ("a.yaml", {"n_key_value_heads": 2}, "duo"),
    ],
)
def test_options_of_another_format(tmp_path, name, option, goes_with):
    message = f"{next(iter(option))} goes with the format '{goes_with}', but {re.escape(name)} is written as"
    with pytest.raises(InvalidInput, match=message):
        write_heads(make(), tmp_path / name, **option)


def test_a_folder_that_cannot_be_written(tmp_path):
    put(tmp_path, "file", "in the way")
    with pytest.raises(OutputNotWritable, match=re.escape(f"into the folder {tmp_path / 'file'}")):
        write_heads(make(), tmp_path / "file" / "a.json")


def test_left_out():
    scores = make(parts={"plus": np.zeros((5, 2, 4))})
    assert left_out(scores, "parquet") == [] and left_out(scores, "qrhead") == [
        f"scores: the ranking alone is written (pooling {scores.pooling!r})"
    ]
    flat = left_out(scores, "flat")
    assert flat[0] == "1 trials that are not kept" and flat[1].startswith("answer steps") and flat[-1] == "parts: plus"
    assert left_out(scores, "locos") == [*flat[:2], "parts: plus"]
    assert left_out(scores, "flat_means")[0] == "single trials: each score is the mean over 4 (pooling 'step')"
    column = "query heads: each column is the {} over the query heads of its key/value head"
    assert column.format("max") in left_out(scores, "duo")
    assert column.format("mean") in left_out(scores, "duo", n_key_value_heads=2, kv_groups="mean")
    assert not any("query heads" in phrase for phrase in left_out(scores, "duo", n_key_value_heads=4))
    bare = make(1, kept=np.array([True]), weights=np.array([1.0]), meta={})
    assert left_out(bare, "flat_means") == left_out(bare, "locos") == []
    heads = HeadSet(["L0H1", "L0H0"])
    assert left_out(heads, "qrhead") == [] and left_out(heads, "qrhead", k=1) == ["the heads after the first 1"]


# -- what does not fit the model -----------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "content", "shape", "message"),
    [
        ("a.json", FLAT, {"n_layers": 1}, "4 heads in 2 layers of 2; .* 1 layers with 2 heads, which lacks L1H0"),
        ("a.json", FLAT, {"n_heads": 1}, "does not fit a model of 2 layers with 1 heads, which lacks L0H1"),
        ("a.json", FLAT, {"n_layers": 3}, "does not fit a model of 3 layers with 2 heads"),
        ("a.json", {"0-0": 1, "0-1": 2}, {"n_heads": 4}, "does not fit a model of 1 layers with 4 heads"),
        ("a.json", PAIRS, {"n_layers": 1, "n_heads": 2}, "which lacks L1H0"),
        ("a.json", ENVELOPE, {"n_layers": 5}, "does not fit a model of 5 layers"),
        ("a.json", {"999999999-0": [1]}, {}, "names L999999999H0, beyond any model; it is damaged"),
        ("a.yaml", QRHEAD, {"n_heads": 3}, "does not fit a model of 2 layers with 3 heads, which lacks L0H3"),
        ("a.yaml", QRHEAD, {"n_layers": 1}, "which lacks L1H1"),
        ("a.tsv", DUO, {"n_layers": 4, "n_heads": 2}, "3 rows of 2 columns; .* 4 layers with 2 heads"),
        ("a.tsv", DUO, {"n_heads": 3}, "3 rows of 2 columns; that does not fit a model of 3 layers with 3 heads"),
        ("a.tsv", DUO, {"n_heads": 4, "n_key_value_heads": 4}, "3 layers with 4 heads and 4 key/value heads"),
    ],
)
def test_another_model(tmp_path, name, content, shape, message):
    path = put(tmp_path, name, content)
    with pytest.raises(ResultFileError, match=f"{re.escape(str(path))} .*{message}"):
        read_heads(path, **shape)


def test_counts_that_are_none(tmp_path):
    path = put(tmp_path, "a.json", FLAT)
    for name in ("n_layers", "n_heads", "n_key_value_heads"):
        with pytest.raises(InvalidInput, match=f"{name} is 0; it must be a whole number >= 1"):
            read_scores(path, **{name: 0})
    with pytest.raises(InvalidInput, match="n_heads is 4 and n_key_value_heads 3"):
        read_heads(path, n_heads=4, n_key_value_heads=3)
    with pytest.raises(InvalidInput, match="n_heads is 2 and n_key_value_heads 4"):
        read_heads(path, n_key_value_heads=4)


# -- damaged and foreign files -------------------------------------------------------------------


def envelope(**changes: Any) -> str:
    return json.dumps({**ENVELOPE, **changes})


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        # maps
        ("a.json", "", "Expecting value"),
        ("a.json", json.dumps(FLAT)[:-9], "Expecting|delimiter"),
        ("a.json", "[" * 200_000, "nested too deeply"),
        ("a.json", "{}", "expected a map from 'layer-head' to a list of scores, one per trial, found an empty map"),
        ("a.json", '"0-0"', "expected a map .*, found '0-0'"),
        ("a.json", '{"vocab_size": 7}', "cannot read a head from 'vocab_size'"),
        ("a.json", '{"0-0": [1], "0-0": [2]}', "the key '0-0' stands twice"),
        ("a.json", '{"0-0": [1], "0.0": [2]}', "names a head twice, L0H0: as '0-0' and as '0.0'"),
        ("a.json", '{"0-0": [1], "0-1": [1, 2]}', "heads with 1 and with 2 scores; each needs one per trial"),
        ("a.json", '{"0-0": []}', "the entry '0-0' is not a list of scores"),
        ("a.json", '{"0-0": [1], "0-1": 2}', r"the score of '0-0' is \[1\]; expected a number"),
        ("a.json", '{"0-0": [1, NaN]}', "score 1 of '0-0' is nan; expected a finite number"),
        ("a.json", '{"0-0": [-Infinity]}', "score 0 of '0-0' is -inf; expected a finite number"),
        ("a.json", '{"0-0": [1e39]}', r"score 0 of '0-0' is 1e\+39; expected a finite number \(float32\)"),
        ("a.json", '{"0-0": [1' + "0" * 400 + "]}", "score 0 of '0-0' is a huge whole number; expected a finite"),
        ("a.json", '{"0-0": ["0.5"]}', "score 0 of '0-0' is '0.5'; expected a number"),
        ("a.json", '{"0-0": [true]}', "score 0 of '0-0' is True; expected a number"),
        ("a.json", '{"0-0": Infinity}', "the score of '0-0' is inf"),
        ("a.json", b"\xff\xfe{\x00}\x00", "byte 0 is not UTF-8 text; save it as UTF-8"),
        ("a.json", b'{"0-0": [0.5], "caf\xe9', "byte 19 is not UTF-8 text"),
        # the envelope
        ("a.json", envelope(meta=[1]), "'meta' is a list; expected an object"),
        ("a.json", envelope(meta={"x": math.nan}), r"it\['meta'\]\['x'\] is nan, which JSON cannot hold"),
        ("a.json", envelope(trial_ids="ab"), "'trial_ids' is 'ab'; expected a list"),
        ("a.json", envelope(trial_ids=None), "'trial_ids' is None; expected a list"),
        ("a.json", envelope(trial_ids=["a"]), "'trial_ids' names 1 trials, but each head has 2 scores"),
        ("a.json", envelope(trial_ids=["1", 1]), "trial id '1' stands more than once"),
        ("a.json", envelope(trial_ids=["a", None]), "trial id 1 is None; expected text or a whole number"),
        ("a.json", envelope(trial_ids=[True, "b"]), "trial id 0 is True; expected text or a whole number"),
        ("a.json", envelope(scores={}, confidence_intervals={}), "expected a map from 'layer-head'"),
        ("a.json", envelope(confidence_intervals=[]), "'confidence_intervals' is an empty list; expected a map"),
        ("a.json", envelope(confidence_intervals={"0-7": [0, 1]}), "interval of '0-7' belongs to no head of 'scores'"),
        ("a.json", envelope(confidence_intervals={"0-0": [0]}), r"interval of '0-0' is \[0\]; expected \[low, high\]"),
        ("a.json", envelope(confidence_intervals={"0-0": {"low": 0}}), "interval of '0-0' is {'low': 0}; expected"),
        ("a.json", envelope(confidence_intervals={"0-0": [2, 1]}), "has the low end 2.0 above the high end 1.0"),
        ("a.json", envelope(confidence_intervals={"0-0": [0, "x"]}), "interval of '0-0' is 'x'; expected a number"),
        ("a.json", envelope(confidence_intervals={"0-0": [0, math.inf]}), "interval of '0-0' is inf; expected a"),
        ("a.json", envelope(confidence_intervals={"0-0": [0, 1], "L0H0": [0, 1]}), "names a head twice, L0H0"),
        # pairs
        ("a.json", "[]", r"expected a list of \['layer-head', score\] pairs, found an empty list"),
        ("a.json", '[["0-0", 1], ["0-1"]]', r"entry 1 is \['0-1'\]; expected a pair"),
        ("a.json", '["0-0", "0-1"]', "entry 0 is 0-0; expected a pair"),
        ("a.json", '[["0-0", 1], ["0-0", 1]]', "names a head twice, L0H0"),
        ("a.json", '[["0-0", null]]', "the score of '0-0' is null; leave a head without a score out"),
        ("a.json", '[["0-0", NaN]]', "the score of '0-0' is nan"),
        ("a.json", '[["0-0", "x"]]', "the score of '0-0' is 'x'; expected a number"),
        # YAML
        ("a.yaml", "", "attn_head_set is None; expected heads such as"),
        ("a.yaml", 'attn_head_set: "1-1,0-', "it is not YAML"),
        ("a.yaml", "attn_head_set: 1-1,0-", "cannot read a head from '0-'"),
        ("a.yaml", "attn_head_set: 1-1,", "cannot read a head from ''"),
        ("a.yaml", "attn_head_set: 1-1,1_1", "names a head twice, L1H1: as '1-1' and as '1_1'"),
        ("a.yaml", "attn_head_set: 10_3", r"attn_head_set is 103; .*YAML reads a bare 10_3 as the number 103"),
        ("a.yaml", "attn_head_set: [1_1, 1_2]", "cannot read a head from 11"),
        ("a.yaml", "attn_head_set: []", r"attn_head_set is \[\]; expected heads"),
        ("a.yaml", "model_base_class: x", "it has no 'attn_head_set', such as"),
        ("a.yaml", "attn_head_set: 1-1\nattn_head_set: 0-0", "the key 'attn_head_set' stands twice"),
        ("a.yaml", "a: &x [1]\nb: *x\nattn_head_set: 1-1", "it uses YAML aliases"),
        ("a.yaml", "attn_head_set: !!python/object/apply:os.getcwd []", "it is not YAML .*could not determine a con"),
        ("a.yaml", "[" * 50_000, "it is nested too deeply"),
        ("a.yaml", b"attn_head_set: \x00", "it is not YAML"),
        # TSV
        ("a.tsv", "", "it is empty; expected one row a layer"),
        ("a.tsv", "0.1\t0.2\n0.3\n", "line 2 has 1 columns and line 1 has 2"),
        ("a.tsv", "h0\th1\n0.1\t0.2\n", "line 1, column 1 is 'h0'; expected a finite number"),
        ("a.tsv", "0.1\t0.2\n0.3\tnan\n", "line 2, column 2 is 'nan'; expected a finite number"),
        ("a.tsv", "0.1\tinf\n", "line 1, column 2 is 'inf'"),
        ("a.tsv", "0.1\t1e99\n", "line 1, column 2 is '1e99'"),
        ("a.tsv", "0.1\t1_0\n", "line 1, column 2 is '1_0'"),
        ("a.tsv", "0.1 0.2\n", "line 1, column 1 is '0.1 0.2'"),
        ("a.tsv", "0.1\t\n", "line 1, column 2 is ''"),
        ("a.tsv", "0.1\n\n0.2\n", "line 2, column 1 is ''"),
        ("a.tsv", DUO[:-3], "it is cut off in its last number, '0.000000000000000000e'|line 3, column 2 is"),
        ("a.tsv", DUO.replace("0.000000000000000000e+00\n", "9.960937500000000000e-0"), "cut off in its last number"),
        ("a.tsv", DUO.encode("utf-16"), "byte 0 is not UTF-8 text"),
    ],
)
def test_damaged_files(tmp_path, name, content, message):
    path = put(tmp_path, name, content)
    with pytest.raises(ResultFileError, match=f"^{re.escape(str(path))} is not a readable head file: .*{message}"):
        read_heads(path, n_heads=2 if name == "a.tsv" else None)


@pytest.mark.parametrize(
    ("format", "message"),
    [
        ("flat", "the entry '0-0' is not a list of scores; a map of single numbers has the format 'flat_means'"),
        ("locos", "expected an object whose 'scores' is a map of head scores, found a map"),
        ("qrhead_scores", "expected a list of"),
        ("duo", "line 1, column 1 is"),
    ],
)
def test_a_format_named_wrongly(tmp_path, format, message):
    path = put(tmp_path, "a.json", {"0-0": 0.5})
    with pytest.raises(ResultFileError, match=message):
        read_heads(path, format=format, n_heads=1)


def test_files_that_are_not_there(tmp_path):
    (tmp_path / "folder").mkdir()
    for name in ("none.json", "none.yaml", "none"):
        with pytest.raises(ResultFileError, match=f"{name} is not a readable head file: No such file"):
            read_heads(tmp_path / name)
    with pytest.raises(ResultFileError, match=r"none\.parquet does not exist"):
        read_heads(tmp_path / "none.parquet")
    with pytest.raises(ResultFileError, match="folder is not a readable head file: Is a directory"):
        read_heads(tmp_path / "folder")
