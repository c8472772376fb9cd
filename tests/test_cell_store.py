"""The store of cells: whole files, the same bytes, claims that end with their process, errors that help."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from engine_toys import content, key, result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mechheads.cell_store import CellStore
from mechheads.cells import CellFailure, CellKey, CellResult
from mechheads.errors import OutputNotWritable, ResultFileError


@pytest.fixture
def store(tmp_path: Path) -> CellStore:
    return CellStore(tmp_path / "store")


def failure(number: int) -> CellFailure:
    return CellFailure(key(number), "MemoryError", "too little", "Traceback ...\n")


def test_what_is_put_is_got(store: CellStore) -> None:
    assert store.get(key(0)) is None and len(store) == 0 and store and list(store.keys()) == []
    path = store.put(key(0), result(key(0)))
    got = store.get(key(0))
    assert path == store.file(key(0)) == store.path / f"{key(0).digest}.parquet"
    assert got is not None and got.equals(result(key(0)))
    store.put(key(1), result(key(1)))
    assert store.missing([key(2), key(1), key(3), key(2)]) == (key(2), key(3))
    assert len(store) == 2 and set(store.keys()) == {key(0), key(1)}
    assert store.intact(key(0)) and not store.intact(key(2))


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    st.dictionaries(
        st.text(min_size=1, max_size=4).filter(lambda t: t not in ("trial_id", "said")), st.just(0), min_size=1
    ),
    st.lists(st.floats(allow_infinity=False), min_size=1, max_size=4),
    st.booleans(),
)
def test_any_result_comes_back_whole(store: CellStore, names: list[str], values: list[float], answers: bool) -> None:
    ids = tuple(f"trial {i}" for i in range(len(values)))
    made = CellResult(ids, {name: np.array(values) for name in names}, ids if answers else ())
    store.put(key(0), made)
    got = store.get(key(0))
    assert got is not None and got.equals(made)


def test_the_same_result_is_the_same_bytes_and_holds_nothing_of_this_host(store: CellStore, tmp_path: Path) -> None:
    other = CellStore(tmp_path / "other")
    store.put(key(0), result(key(0)))
    time.sleep(0.01)
    other.put(key(0), result(key(0)))
    assert content(store) == content(other)
    metadata = pq.read_schema(store.file(key(0))).metadata
    assert list(metadata) == [b"mechheads"]
    assert metadata[b"mechheads"] == (
        b'{"format":1,"key":{"heads":["L0H0"],"intervention":"toy-zero","model":"toy-model","task":"toy-task"},'
        b'"kind":"cell"}'
    )


def test_a_folder_that_is_no_store_is_not_opened_for_reading(tmp_path: Path) -> None:
    with pytest.raises(ResultFileError, match=r"is no store of cells: there is no cells\.json in it\."):
        CellStore(tmp_path / "nothing", create=False)
    assert not (tmp_path / "nothing").exists()
    CellStore(tmp_path / "some")
    assert CellStore(tmp_path / "some", create=False).path == tmp_path / "some"


def test_a_store_of_a_newer_format_is_refused(store: CellStore) -> None:
    (store.path / "cells.json").write_text('{"format": 9, "kind": "cells"}')
    with pytest.raises(ResultFileError, match=r"says kind 'cells', format 9; this mechheads reads kind 'cells' up to"):
        CellStore(store.path)
    (store.path / "cells.json").write_text("{")
    with pytest.raises(ResultFileError, match=r"cells\.json cannot be read .* delete that one file if you are sure"):
        CellStore(store.path)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-20])


def empty(file: Path) -> None:
    file.write_bytes(b"")


def foreign(file: Path) -> None:
    pq.write_table(pa.table({"a": [1]}), file)


def fewer_columns(file: Path) -> None:
    table = pq.read_table(file)
    pq.write_table(table.drop_columns(["trial_id"]), file)


def infinite(file: Path) -> None:
    table = pq.read_table(file)
    at = table.column_names.index("rank")
    pq.write_table(table.set_column(at, "rank", pa.array(np.full(table.num_rows, np.inf))), file)


def another_cell(file: Path) -> None:
    shutil.copy(file.with_name(f"{key(1).digest}.parquet"), file)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (truncate, "is truncated or damaged, or not a Parquet file"),
        (empty, "is truncated or damaged, or not a Parquet file"),
        (foreign, "is a Parquet file without mechheads metadata; mechheads did not write it."),
        (fewer_columns, "does not hold a whole cell"),
        (infinite, "does not hold a whole cell: metric 'rank' is infinite for trial 'trial-0'"),
        (another_cell, f"holds cell {key(1).digest}"),
    ],
)
def test_a_damaged_cell_is_named_and_counts_as_missing(store: CellStore, damage, reason: str) -> None:
    for number in (0, 1):
        store.put(key(number), result(key(number)))
    damage(store.file(key(0)))
    with pytest.raises(ResultFileError, match=rf"{key(0).digest}\.parquet {reason}.*[Dd]elete it, and the cell"):
        store.get(key(0))
    assert not store.intact(key(0))
    with pytest.warns(UserWarning, match=rf"1 stored cells are damaged and will be computed again: .*{key(0).digest}"):
        assert store.missing([key(0), key(1)]) == (key(0),)
    store.put(key(0), result(key(0)))
    assert store.missing([key(0), key(1)]) == ()


def test_no_flipped_byte_gives_another_number(store: CellStore) -> None:
    made = result(key(0))
    file = store.put(key(0), made)
    whole, named = file.read_bytes(), 0
    for at in range(0, len(whole), 5):
        file.write_bytes(whole[:at] + bytes([whole[at] ^ 0xFF]) + whole[at + 1 :])
        try:
            got = store.get(key(0))
            assert got is not None and got.equals(made)  # a byte that no number hangs on
        except ResultFileError:
            named += 1
    assert named > len(range(0, len(whole), 5)) / 2


def test_the_same_damage_many_times_is_one_warning(store: CellStore) -> None:
    for number in range(3):
        empty(store.put(key(number), result(key(number))))
    with pytest.warns(UserWarning, match=r"3 stored cells are damaged.* And 2 more\.$"):
        assert len(store.missing([key(n) for n in range(3)])) == 3


def test_a_failure_is_recorded_and_goes_when_the_cell_succeeds(store: CellStore) -> None:
    assert store.failure(key(0)) is None and store.failures() == () and store.failure_time(key(0)) == 0
    store.put_failure(failure(0))
    store.put_failure(failure(1))
    assert store.failure(key(0)) == failure(0) and store.failure_time(key(0)) > 0
    assert set(store.failures()) == {failure(0), failure(1)}
    assert store.missing([key(0)]) == (key(0),)
    store.put(key(0), result(key(0)))
    assert store.failure(key(0)) is None and store.failures() == (failure(1),)


def test_a_process_killed_between_result_and_failure_leaves_no_contradiction(store: CellStore) -> None:
    store.put(key(0), result(key(0)))
    store.put_failure(failure(0))  # as if the removal had not come to pass
    assert store.failure(key(0)) is None and store.failures() == ()
    store.clean()
    assert not list((store.path / "failed").glob("*.json"))


def test_a_damaged_record_of_a_failure_is_named_and_cleaned(store: CellStore) -> None:
    file = store.put_failure(failure(0))
    file.write_text("{}")
    with pytest.raises(ResultFileError, match=rf"{key(0).digest}\.json is no record of a failed cell: .* Delete it\."):
        store.failures()
    with pytest.warns(UserWarning, match=r"is no record of a failed cell.* Removed: the cell is tried again anyway\."):
        store.clean()
    assert store.failures() == ()


def test_temporary_files_are_never_read_and_removed_when_stale(store: CellStore) -> None:
    store.put(key(0), result(key(0)))
    store.put_failure(failure(1))
    old = [store.path / f".{key(2).digest}.parquet.1234.tmp", store.path / "failed" / f".{key(2).digest}.json.12.tmp"]
    new = store.path / f".{key(3).digest}.parquet.5678.tmp"
    for file in [*old, new]:
        file.write_bytes(b"half")
    for file in old:
        os.utime(file, (time.time() - 7200, time.time() - 7200))
    assert len(store) == 1 and list(store.keys()) == [key(0)] and len(store.failures()) == 1
    assert store.clean() == 2
    assert new.exists() and not any(file.exists() for file in old)
    assert store.clean(stale_s=-1) == 1 and len(store) == 1


def test_a_full_disk_is_said_and_loses_nothing(store: CellStore, monkeypatch: pytest.MonkeyPatch) -> None:
    store.put(key(0), result(key(0)))
    before = content(store)

    def full(*args: object, **options: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(pq, "write_table", full)
    with pytest.raises(OutputNotWritable, match=r"store cannot be written: No space left on device\. What is stored"):
        store.put(key(1), result(key(1)))
    with pytest.raises(OutputNotWritable, match=r"No space left on device"):
        store.put(key(0), result(key(0)))  # what is replaced stays until the new one is whole
    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputNotWritable, match=r"No space left on device"):
        store.put_failure(failure(1))
    with pytest.raises(OutputNotWritable, match=r"No space left on device"):
        store.check_writable()
    monkeypatch.undo()
    assert content(store) == before and not list(store.path.rglob(".*.tmp"))


@pytest.fixture
def read_only() -> Iterator[CellStore]:
    """A store of one cell that this process may only read."""
    folder = Path(tempfile.mkdtemp())  # not under tmp_path, which others than its owner may not enter
    store = CellStore(folder)
    store.put(key(0), result(key(0)))
    store.check_writable()
    claim = store.claim("warm up")  # what is imported now needs no permission later
    assert claim is not None
    claim.release()
    for path in [folder, *folder.rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # permissions do not bind root
    try:
        yield store
    finally:
        if root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_a_read_only_store_is_read_and_refuses_to_be_written(read_only: CellStore) -> None:
    store = CellStore(read_only.path)
    got = store.get(key(0))
    assert got is not None and got.equals(result(key(0))) and store.missing([key(0), key(1)]) == (key(1),)
    for write in (
        lambda: store.put(key(1), result(key(1))),
        lambda: store.put_failure(failure(1)),
        lambda: store.check_writable(),
        lambda: store.claim("a block"),
    ):
        with pytest.raises(OutputNotWritable, match=r"the store .* cannot be written: .*Permission denied"):
            write()


def test_a_deleted_store_is_not_made_anew_in_silence(store: CellStore) -> None:
    shutil.rmtree(store.path)
    for write in (lambda: store.put(key(1), result(key(1))), lambda: store.claim("a"), lambda: store.check_writable()):
        with pytest.raises(OutputNotWritable, match=r"was deleted or moved while it was in use \(cells\.json is"):
            write()
    assert not store.path.exists()


def test_one_block_one_claim(store: CellStore) -> None:
    claim = store.claim("a/b: c")
    assert claim is not None
    assert store.claim("a/b: c") is None and CellStore(store.path).claim("a/b: c") is None
    other = store.claim("another")
    assert other is not None
    other.release()
    with claim:
        pass
    claim.release()
    again = store.claim("a/b: c")
    assert again is not None
    again.release()


def test_a_claim_ends_with_its_process_however_that_dies(store: CellStore) -> None:
    code = (
        "import sys; from mechheads.cell_store import CellStore\n"
        "claim = CellStore(sys.argv[1]).claim('a'); print(claim is not None, flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(store.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "True\n"
        assert store.claim("a") is None
        holder.kill()
    claim = store.claim("a")
    assert claim is not None
    claim.release()


def test_a_key_whose_file_holds_another_is_not_believed(store: CellStore) -> None:
    other = CellKey("m", "t", (), "none")
    store.put(other, result(other))
    store.file(other).rename(store.file(key(0)))
    with pytest.raises(ResultFileError, match=rf"holds cell {other.digest} \(task t, none of no heads\), not cell"):
        store.get(key(0))
