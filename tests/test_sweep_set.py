"""Sets of sweeps: their labels, their folder, and tables that other programs read."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sweep_samples import planted, right, sweep

from mechheads.errors import InvalidInput, OutputNotWritable, ResultFileError, UnknownName
from mechheads.result_files import read_table
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet, export_frame


def small(**fields) -> SweepResult:
    return sweep({("none", 0): [1.0, 1.0, np.nan], ("locos", 5): right(1, 3)}, **fields)


def kept() -> SweepResult:
    return sweep({("locos", 0): right(0, 3), ("locos", 5): right(2, 3)}, side="kept")


def three() -> SweepSet:
    return SweepSet({"mean": small(), "Zero, at q!": small(seed=1), "mean, kept": kept()}, {"study": "locos"})


def same(a: SweepSet, b: SweepSet) -> None:
    assert a.labels == b.labels and a.meta == b.meta
    for label in a:
        pd.testing.assert_frame_equal(a[label].frame, b[label].frame)
        assert a[label].meta == b[label].meta and a[label].kept == b[label].kept


# -- in memory -----------------------------------------------------------------------------------


def test_a_set_is_an_ordered_mapping():
    sweeps = three()
    assert list(sweeps) == sweeps.labels == ["mean", "Zero, at q!", "mean, kept"] and len(sweeps) == 3
    assert sweeps.ablated == ["mean", "Zero, at q!"] and "mean" in sweeps and "zero" not in sweeps
    assert sweeps.complement("mean") == "mean, kept" and sweeps.complement("Zero, at q!") is None
    assert [label for label, _ in sweeps.items()] == sweeps.labels
    assert repr(sweeps) == "SweepSet('mean', 'Zero, at q!', 'mean, kept'; rankings=['locos'], tasks=['needles'])"
    same(sweeps, pickle.loads(pickle.dumps(sweeps)))
    with pytest.raises(TypeError):
        sweeps.results["other"] = small()  # type: ignore[index]


def test_table_of_all_rows_has_the_label_first():
    frame = three().to_frame()
    assert next(iter(frame.columns)) == "intervention" and len(frame) == 18
    assert frame["intervention"].value_counts().to_dict() == {"mean": 6, "Zero, at q!": 6, "mean, kept": 6}


@pytest.mark.usefixtures("as_users_run")
@pytest.mark.parametrize(
    ("results", "message"),
    [
        ({}, r"a SweepSet was given no result; give a mapping such as \{'mean': sweep, 'zero': other\}\."),
        ([1], r"a SweepSet was given a list; give a mapping such as .*"),
        ({3: small()}, r"3 labels a sweep; a label is text such as 'mean'\."),
        ({"  ": small()}, r"'  ' labels a sweep; a label is text such as 'mean'\."),
        ({"mean": "x"}, r"'mean' is a str; expected a SweepResult\."),
    ],
)
def test_what_is_no_set_is_refused(results, message):
    with pytest.raises(InvalidInput, match=rf"^{message}$"):
        SweepSet(results)


def test_labels_say_which_side_was_ablated():
    tail = r"; labels of complements, and only these, end in ', kept'\."
    with pytest.raises(InvalidInput, match=r"^'mean, kept' labels a sweep in which k counts the heads ablated" + tail):
        SweepSet({"mean, kept": small()})
    with pytest.raises(InvalidInput, match=r"^'mean' labels a sweep in which k counts the heads kept" + tail):
        SweepSet({"mean": kept()})


def test_unknown_labels_are_named():
    for ask in (lambda s: s["men"], lambda s: s.complement("men")):
        with pytest.raises(UnknownName, match=r"'men'.*mean"):
            ask(three())


# -- the folder ----------------------------------------------------------------------------------


def test_save_and_load(tmp_path):
    sweeps = three()
    folder = sweeps.save(tmp_path / "new" / "set")
    assert folder == tmp_path / "new" / "set"
    names = sorted(path.name for path in folder.iterdir())
    assert [name.rsplit("-", 1)[0] for name in names] == ["mean", "mean-kept", "sweep_set.json", "zero-at-q"]
    same(SweepSet.load(folder), sweeps)
    same(SweepSet.load(str(folder)), sweeps)


def test_saving_again_changes_no_byte_and_another_set_takes_the_old_files_away(tmp_path):
    three().save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    three().save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    (tmp_path / "notes.txt").write_text("mine")
    SweepSet({"mean": small()}).save(tmp_path)
    assert SweepSet.load(tmp_path).labels == ["mean"] and (tmp_path / "notes.txt").exists()
    assert len(list(tmp_path.iterdir())) == 3


def test_labels_whose_file_names_are_alike_do_not_meet(tmp_path):
    sweeps = SweepSet({"mean q": small(seed=1), "mean-q": small(seed=2), "???": small(), "é": small(seed=3)})
    same(SweepSet.load(sweeps.save(tmp_path)), sweeps)


def test_a_failed_save_leaves_the_old_set(tmp_path, monkeypatch):
    sweeps = three()
    sweeps.save(tmp_path)
    monkeypatch.setattr(Path, "replace", lambda self, target: (_ for _ in ()).throw(OSError(28, "No space left")))
    with pytest.raises(OutputNotWritable, match=r"^cannot write the sweep 'other' into the folder .*: No space left"):
        SweepSet({"other": small()}).save(tmp_path)
    monkeypatch.undo()
    same(SweepSet.load(tmp_path), sweeps)
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


def test_a_folder_that_is_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputNotWritable, match="cannot write"):
        three().save(tmp_path / "file" / "set")
    with pytest.raises(ResultFileError, match=r"file is not a folder, so there is no sweep set in it; give the folder"):
        SweepSet.load(tmp_path / "file")


def parquet(folder: Path, label: str = "zero") -> Path:
    (found,) = [path for path in folder.glob("*.parquet") if path.name.startswith(label)]
    return found


def test_an_empty_folder_is_refused(tmp_path):
    with pytest.raises(ResultFileError, match=r"holds no sweep_set\.json, so there is no sweep set in it"):
        SweepSet.load(tmp_path)
    with pytest.raises(ResultFileError, match=r"nowhere holds no sweep_set\.json"):
        SweepSet.load(tmp_path / "nowhere")


def test_missing_changed_and_truncated_files_are_named(tmp_path):
    folder = three().save(tmp_path / "set")
    name = parquet(folder).name
    whole = parquet(folder).read_bytes()
    for damaged in (whole[:-20], b"", whole[:100] + bytes([whole[100] ^ 1]) + whole[101:]):
        (folder / name).write_bytes(damaged)
        with pytest.raises(ResultFileError, match=rf"{name} is not the file that sweep_set.json names \(its hash"):
            SweepSet.load(folder)
    (folder / name).unlink()
    with pytest.raises(ResultFileError, match=rf"{name} is missing, though sweep_set.json names it; save the sweep"):
        SweepSet.load(folder)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"kind": "store"}, r"is not the index of a sweep set; mechheads did not write it"),
        ({"format": 9}, r"was written by a newer mechheads \(format 9\); this one reads up to 1: upgrade"),
        ({"format": None}, r"is damaged: its format is None, not a number; save the sweep set again"),
        ({"format": True}, r"is damaged: its format is True, not a number"),
        ({"sweeps": []}, r"is damaged: it does not name the files of the sweep set; save it again"),
        ({"meta": None}, r"is damaged: it does not name the files"),
        ({"sweeps": [{"label": "x", "file": "../x.parquet", "sha256": ""}]}, r"is damaged: it does not name the files"),
        ({"sweeps": [{"label": "x", "file": "x.parquet"}]}, r"is damaged: it does not name the files"),
        ({"sweeps": ["x"]}, r"is damaged: it does not name the files"),
    ],
)
def test_damaged_and_foreign_indices_are_named(tmp_path, change, message):
    index = three().save(tmp_path) / "sweep_set.json"
    index.write_text(json.dumps(json.loads(index.read_text()) | change))
    with pytest.raises(ResultFileError, match=rf"sweep_set\.json {message}"):
        SweepSet.load(tmp_path)
    # What mechheads did not write, or cannot read, is not overwritten.
    with pytest.raises(ResultFileError, match=rf"sweep_set\.json {message}"):
        three().save(tmp_path)


@pytest.mark.parametrize("text", [b"{", b"[1]", b"\xff\xfe", b""])
def test_an_index_that_is_no_json_is_refused(tmp_path, text):
    (tmp_path / "sweep_set.json").write_bytes(text)
    with pytest.raises(ResultFileError, match=r"sweep_set\.json is (damaged or not JSON|not the index of a sweep set)"):
        SweepSet.load(tmp_path)


def test_an_index_that_contradicts_its_files_is_refused(tmp_path):
    index = three().save(tmp_path) / "sweep_set.json"
    known = json.loads(index.read_text())
    first, _, last = known["sweeps"]
    index.write_text(json.dumps(known | {"sweeps": [first, {**last, "label": "zero"}]}))
    with pytest.raises(ResultFileError, match=r"does not index a consistent sweep set: 'zero' labels a sweep in which"):
        SweepSet.load(tmp_path)
    index.write_text(json.dumps(known | {"sweeps": [first, first]}))
    with pytest.raises(ResultFileError, match=r"is damaged: it names a label twice \(mean, mean\); save it again"):
        SweepSet.load(tmp_path)


def test_another_result_in_the_place_of_a_sweep_is_refused(tmp_path):
    import hashlib

    folder = three().save(tmp_path / "set")
    other = three().export(tmp_path / "other.parquet")
    shutil.copy(other, parquet(folder))
    index = folder / "sweep_set.json"
    known = json.loads(index.read_text())
    known["sweeps"][1]["sha256"] = hashlib.sha256(other.read_bytes()).hexdigest()
    index.write_text(json.dumps(known))
    with pytest.raises(ResultFileError, match=r"zero-at-q-.*\.parquet holds 'sweep table', but 'sweep' was asked for"):
        SweepSet.load(folder)


# -- tables for other programs -------------------------------------------------------------------


def test_export_round_trips(tmp_path):
    sweeps = SweepSet({"mean": planted(n=4), "mean, kept": planted(n=4, kept=True)}, {"study": "x"})
    frame = sweeps.to_frame()
    csv = pd.read_csv(sweeps.export(tmp_path / "a" / "rows.csv"), keep_default_na=False)
    pd.testing.assert_frame_equal(csv.astype(frame.dtypes.to_dict()), frame)
    rows = json.loads(sweeps.export(tmp_path / "rows.JSON").read_text())
    assert rows == frame.to_dict("records")
    table, header = read_table(sweeps.export(tmp_path / "rows.parquet"), kind="sweep table")
    pd.testing.assert_frame_equal(table.to_pandas(), frame)
    assert header["meta"] == {"study": "x"}


def test_undefined_values_are_empty_or_null(tmp_path):
    sweeps = SweepSet({"mean, a": small()})
    text = sweeps.export(tmp_path / "rows.csv").read_bytes().decode()
    assert "\r" not in text and text.splitlines()[3] == '"mean, a",none,0,0,needles,needles002,correct,,'
    assert json.loads(sweeps.export(tmp_path / "rows.json").read_text())[2]["value"] is None
    table, _ = read_table(sweeps.export(tmp_path / "rows.parquet"), kind="sweep table")
    assert table.column("value").null_count == 1
    statistics = export_frame(pd.DataFrame({"k": [5.0, np.inf], "ok": [True, False]}), tmp_path / "s.json")
    assert json.loads(statistics.read_text()) == [{"k": 5.0, "ok": True}, {"k": None, "ok": False}]


def test_the_format_is_by_ending_or_as_asked(tmp_path):
    sweeps = three()
    assert sweeps.export(tmp_path / "rows.v1", "csv").name == "rows.v1.csv"
    assert sweeps.export(tmp_path / "rows.csv", "json").name == "rows.csv.json"
    for path, format, shown in (("rows.xlsx", None, "xlsx"), ("rows", None, ""), ("rows.csv", "tsv", "tsv")):
        with pytest.raises(UnknownName, match=rf"export format.*'{shown}'|'{shown}'.*export format"):
            sweeps.export(tmp_path / path, format)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["rows.csv.json", "rows.v1.csv"]


def test_a_table_that_cannot_be_written_names_the_folder(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputNotWritable, match=r"cannot write 'rows\.csv' into the folder .*file"):
        three().export(tmp_path / "file" / "rows.csv")
