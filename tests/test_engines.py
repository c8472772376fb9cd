"""Engines on this machine: the same bytes however a run is cut up, killed, shared or poisoned; no orphans."""

from __future__ import annotations

import errno
import os
import pickle
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from engine_toys import TRIALS, Orders, Toys, content, key, logged, plan, result, workers

from mechheads.cell_store import CellStore
from mechheads.cells import CellFailure
from mechheads.engines import Block, EngineError, EngineReport, LocalEngine, run_blocks
from mechheads.errors import InvalidInput, OutputNotWritable

TOYS = Path(__file__).with_name("engine_toys.py")
ENGINES = [LocalEngine(), LocalEngine(processes=2)]


@pytest.fixture
def store(tmp_path: Path) -> CellStore:
    return CellStore(tmp_path / "store")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def run(store: CellStore, log: Path) -> Callable[..., EngineReport]:
    """Works off toys in the test's store."""

    def run(blocks: list[Block], **options: Any) -> EngineReport:
        return run_blocks(Toys(str(log)), blocks, store, progress=False, **options)

    return run


def toys(store: CellStore, log: Path, *options: object) -> subprocess.Popen[str]:
    """The toys as a program of their own, in a session of its own, as from another terminal."""
    command = [sys.executable, str(TOYS), str(store.path), str(log), *map(str, options)]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, start_new_session=True)


def read_until(process: subprocess.Popen[str], start: str, times: int = 1) -> None:
    """Read the program's lines until so many have begun with ``start``."""
    assert process.stdout is not None
    for line in process.stdout:
        times -= line.startswith(start)
        if times == 0:
            return
    assert process.stderr is not None
    raise AssertionError(process.stderr.read())


def ended(pid: int) -> bool:
    """Whether a process is gone, or a zombie that somebody has yet to bury."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_for(condition: Callable[[], bool]) -> bool:
    """Whether it comes true within ten seconds."""
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.02)
    return condition()


# The plain run


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_run_stores_every_cell_and_a_second_does_nothing(run, store: CellStore, log: Path, engine) -> None:
    blocks = plan(3, 4)
    seen: dict = {}
    report = run(blocks, engine=engine, on_cell=seen.__setitem__)
    assert report == EngineReport(done=12)
    assert seen == {key(n): None for n in range(12)}
    for number in range(12):
        got = store.get(key(number))
        assert got is not None and got.equals(result(key(number)))
    assert Counter(logged(log)) == Counter(key(n).digest for n in range(12))
    assert run(blocks, engine=engine) == EngineReport(skipped=12) and len(logged(log)) == 12
    assert (os.getpid() in workers(log)) == (engine.processes == 1)


def test_a_block_with_anything_missing_runs_whole_and_the_others_not_at_all(run, store: CellStore, log: Path) -> None:
    run(plan(3, 4))
    whole = content(store)
    store.file(key(5)).unlink()
    store.file(key(6)).write_bytes(b"damaged")
    log.unlink()
    with pytest.warns(UserWarning, match=rf"1 stored cells are damaged and will be computed again: .*{key(6).digest}"):
        assert run(plan(3, 4)) == EngineReport(done=2, skipped=10)
    assert logged(log) == [key(n).digest for n in range(4, 8)] and content(store) == whole


def test_nothing_missing_builds_no_worker(run, store: CellStore, log: Path) -> None:
    run(plan(1, 2))
    assert run_blocks(Toys(str(log), fail="cannot be built"), plan(1, 2), store).skipped == 2
    assert run_blocks(Toys(str(log)), [], store) == EngineReport()


def test_processes_take_their_threads_from_torch_only_if_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from mechheads.engines.local import set_threads

    class Torch:
        threads = 4

        @classmethod
        def get_num_threads(cls) -> int:
            return cls.threads

        @classmethod
        def set_num_threads(cls, threads: int) -> None:
            cls.threads = threads

    monkeypatch.setitem(sys.modules, "torch", Torch)
    assert set_threads(None) is None and Torch.threads == 4
    assert set_threads(3, at_most=1) == 4 and Torch.threads == 3
    assert set_threads(None, at_most=8) == 3 and Torch.threads == 3
    assert set_threads(None, at_most=2) == 3 and Torch.threads == 2
    monkeypatch.delitem(sys.modules, "torch")
    assert set_threads(3) is None and "torch" not in sys.modules


# Poison


@pytest.mark.parametrize(
    ("order", "error", "message"),
    [
        ("nan", "InvalidInput", "every value of the cell is NaN (hit, rank), so it measured nothing."),
        ("short", "InvalidInput", "the result has 3 trials, but the task has 5."),
        ("raise:here", "RuntimeError", "poison in here"),
        ("memory", "MemoryError", "no memory for the toy"),
        ("nothing", "InvalidInput", "the worker came back from block 'block-1/1' without a result for the cell."),
    ],
)
def test_a_poisoned_cell_is_recorded_and_stops_no_other(
    run, store: CellStore, log: Path, order: str, error: str, message: str
) -> None:
    seen: dict = {}
    report = run(plan(3, 3, {4: order}), on_cell=seen.__setitem__)
    assert report == EngineReport(done=8, failed=((key(4), f"{error}: {message}"),))
    assert len(store) == 8 and store.get(key(4)) is None
    (failure,) = store.failures()
    assert (failure.key, failure.error, failure.message) == (key(4), error, message)
    assert error in failure.traceback
    assert seen == {key(n): None for n in range(9)} | {key(4): f"{error}: {message}"}
    # The next run tries it again, in its whole block, and forgets the failure.
    log.unlink()
    assert run(plan(3, 3)) == EngineReport(done=1, skipped=8)
    assert logged(log) == [key(n).digest for n in (3, 4, 5)] and store.failures() == ()
    clean = CellStore(store.path.with_name("clean"))
    run_blocks(Toys(str(log)), plan(3, 3), clean)
    assert content(store) == content(clean)


def test_poison_in_processes_is_the_same(run, store: CellStore) -> None:
    report = run(plan(3, 2, {1: "raise:one", 4: "nan"}), engine=LocalEngine(processes=2))
    assert (report.done, dict(report.failed)[key(1)]) == (4, "RuntimeError: poison in one")
    assert {failure.key for failure in store.failures()} == {key(1), key(4)}


def test_a_failure_lets_go_of_what_its_frames_held(store: CellStore) -> None:
    """An error keeps its frames, and so their tensors, alive: they must be free when the cells run one by one."""
    import weakref

    class Big:
        pass

    held: list[weakref.ref] = []
    alive: list[int] = []

    class Hungry:
        def run(self, block: Block, keep) -> None:
            alive.append(sum(ref() is not None for ref in held))
            activations = Big()
            held.append(weakref.ref(activations))
            cell, *more = block.cells
            if more:
                raise MemoryError("batch too large")
            keep(cell, result(cell))

    class Feed:
        def build(self) -> Hungry:
            return Hungry()

    assert run_blocks(Feed(), plan(1, 3), store) == EngineReport(done=3)
    assert alive == [0, 0, 0, 0]


def test_what_is_no_result_or_not_of_the_block_is_a_failure(store: CellStore, as_users_run: None) -> None:
    class Wrong:
        def run(self, block: Block, keep) -> None:
            keep(key(7), result(key(7)))
            keep(block.cells[0], {"hit": 1})

    class Recipe:
        def build(self) -> Wrong:
            return Wrong()

    report = run_blocks(Recipe(), [Block("a", (key(0),)), Block("b", (key(1), key(2)), Orders(("", "")))], store)
    assert report.done == 0 and len(store) == 0
    assert {cell for cell, _ in report.failed} == {key(0), key(1), key(2)}
    assert dict(report.failed)[key(0)] == f"InvalidInput: the worker kept {key(7)}, which is not in block 'a'."


# Blocks


def test_a_block_splits_into_its_cells() -> None:
    block = plan(1, 3, {1: "nan"})[0]
    parts = block.split()
    assert [part.cells for part in parts] == [(key(n),) for n in range(3)]
    assert [part.payload.orders for part in parts] == [("",), ("nan",), ("",)]
    assert [part.name for part in parts] == ["block-0/0", "block-0/1", "block-0/2"]
    assert [part.trials for part in parts] == [(TRIALS,)] * 3
    assert parts[1].split() == (parts[1],) and pickle.loads(pickle.dumps(block)) == block


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Block("", (key(0),)), r"block '' has 1 cells, 1 of them different; give it a name and at least one"),
        (lambda: Block("a", ()), r"block 'a' has 0 cells"),
        (lambda: Block("a", (key(0), key(0))), r"block 'a' has 2 cells, 1 of them different"),
        (lambda: Block("a", (key(0),), trials=(1, 2)), r"block 'a' has 1 cells and 2 numbers of trials"),
        (lambda: LocalEngine(processes=0), r"processes is 0; it must be a whole number of at least 1\."),
        (lambda: LocalEngine(threads=0), r"threads is 0; it must be a whole number of at least 1\."),
        (lambda: LocalEngine(retries=-1), r"retries is -1; it must be a whole number of at least 0\."),
        (lambda: LocalEngine(processes=True), r"processes is True"),
    ],
)
def test_unfit_blocks_and_engines_are_refused(make: Callable[[], object], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        make()


def test_two_blocks_of_one_name_are_refused(run) -> None:
    with pytest.raises(InvalidInput, match=r"two blocks are named 'block-0'; give each a name of its own\."):
        run([*plan(1, 1), *plan(1, 2)])


def test_a_cell_in_two_blocks_is_stored_once(run) -> None:
    shared = Block("shared", (key(0), key(9)), Orders(("", "")))
    assert run([*plan(1, 2), shared]) == EngineReport(done=3)


# Workers that cannot be built, and workers that die


def test_a_worker_that_cannot_be_built_ends_the_run(store: CellStore, log: Path) -> None:
    recipe = Toys(str(log), fail="no such model")
    with pytest.raises(ValueError, match="no such model"):
        run_blocks(recipe, plan(2, 2), store)
    with pytest.raises(EngineError, match="no worker can be built: ValueError: no such model") as caught:
        run_blocks(recipe, plan(2, 2), store, engine=LocalEngine(processes=2))
    assert caught.value.partial["report"] == EngineReport(left=4)
    with pytest.raises(
        EngineError,
        match=r"workers died one after the other, 2 of them, while they were being built; .* ended by SIGKILL",
    ):
        run_blocks(Toys(str(log), fail="kill"), plan(1, 2), store, engine=LocalEngine(processes=2, retries=1))
    claim = store.claim("block-0")
    assert claim is not None  # claims are given back
    claim.release()


def test_a_recipe_that_cannot_travel_is_refused(store: CellStore) -> None:
    class Here:
        def build(self) -> Any: ...

    with pytest.raises(EngineError, match=r"the recipe Here cannot be sent to another process: .* use processes=1\."):
        run_blocks(Here(), plan(1, 1), store, engine=LocalEngine(processes=2))


def test_a_block_whose_worker_dies_is_tried_again(run, store: CellStore, log: Path, tmp_path: Path) -> None:
    flag = tmp_path / "died"
    report = run(plan(2, 3, {1: f"once:{flag}"}), engine=LocalEngine(processes=2))
    assert report == EngineReport(done=6) and flag.exists() and store.failures() == ()
    assert Counter(logged(log))[key(1).digest] == 2


def test_a_cell_that_kills_every_worker_is_found_and_recorded(run, store: CellStore, log: Path) -> None:
    report = run(plan(2, 3, {1: "kill"}), engine=LocalEngine(processes=2, retries=1))
    message = (
        "WorkerLost: the worker died on this cell, 2 times in a row: its process was ended by SIGKILL "
        "(the system does so when memory runs out)"
    )
    assert report == EngineReport(done=5, failed=((key(1), message),))
    (failure,) = store.failures()
    assert failure.error == "WorkerLost" and failure.traceback == ""
    assert Counter(logged(log))[key(1).digest] == 3  # twice in its block, once alone


def test_a_machine_on_which_every_worker_dies_ends_the_run(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mechheads.engines.crew.DEATHS_IN_A_ROW", 2)
    with pytest.raises(EngineError, match=r"3 of them, without a single cell between; .* memory"):
        run(plan(4, 1, dict.fromkeys(range(4), "kill")), engine=LocalEngine(processes=2, retries=5))


# A store that cannot be written


@pytest.mark.parametrize("engine", ENGINES, ids=str)
def test_a_store_that_cannot_be_written_is_refused_before_anything_is_computed(
    run, log: Path, monkeypatch: pytest.MonkeyPatch, engine
) -> None:
    def refuse(*args: object) -> None:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "replace", refuse)
    with pytest.raises(OutputNotWritable, match=r"cannot be written: Read-only file system\. What is stored"):
        run(plan(2, 2), engine=engine)
    assert logged(log) == []


def test_a_disk_that_fills_up_stops_the_run_and_loses_nothing(
    run, store: CellStore, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    replace, left = os.replace, [4]  # the probe and three cells

    def fill(*args: Any) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        replace(*args)

    monkeypatch.setattr(os, "replace", fill)
    with pytest.raises(
        OutputNotWritable, match=r"cannot be written: No space left on device\. What is stored"
    ) as caught:
        run(plan(3, 2))
    assert caught.value.partial["report"] == EngineReport(done=3, left=3)
    assert len(logged(log)) == 4  # nothing was computed after that
    assert len(store) == 3 and store.failures() == () and not list(store.path.rglob(".*.tmp"))
    monkeypatch.undo()
    assert run(plan(3, 2)) == EngineReport(done=3, skipped=3)


def test_a_real_limit_of_the_disk_stops_all_processes(store: CellStore, log: Path) -> None:
    with toys(store, log, "--processes", 2, "--file-size", 1000) as process:
        out, err = process.communicate(timeout=60)
    assert process.returncode == 1 and "stored" not in out
    assert f"OutputNotWritable: the store {store.path} cannot be written" in err and "File too large" in err
    assert len(store) == 0 and all(map(ended, workers(log)))


def test_a_store_that_is_deleted_stops_the_run(run, store: CellStore, log: Path) -> None:
    with pytest.raises(OutputNotWritable, match=r"store was deleted or moved while it was in use") as caught:
        run(plan(3, 2, {1: f"delete:{store.path}"}))
    assert caught.value.partial["report"] == EngineReport(done=1, left=5)
    assert len(logged(log)) == 2 and not store.path.exists()


# Ctrl-C and SIGTERM


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM"])
def test_a_signal_lets_the_block_finish(run, store: CellStore, capfd: pytest.CaptureFixture, name: str) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    report = run(plan(3, 3, {1: f"signal:{name}"}))
    assert report == EngineReport(done=3, interrupted=True, left=6)
    assert "the block in hand is finished and kept; once more drops it." in capfd.readouterr().err
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert run(plan(3, 3)) == EngineReport(done=6, skipped=3)


def test_a_second_signal_drops_the_block_and_keeps_what_is_kept(run, store: CellStore) -> None:
    report = run(plan(3, 3, {1: "signal:SIGINT", 2: "signal:SIGTERM"}))
    assert report == EngineReport(done=2, interrupted=True, left=7) and store.failures() == ()
    assert "interrupted: run again to go on" in str(report)


def test_a_worker_that_makes_its_own_end_of_ctrl_c_fails_no_cell(run, store: CellStore) -> None:
    report = run(plan(2, 2, {1: "stubborn"}))
    assert report == EngineReport(done=1, interrupted=True, left=3) and store.failures() == ()


def test_a_signal_between_cells_that_run_alone_leaves_the_rest(run, store: CellStore) -> None:
    report = run(plan(1, 4, {0: "raise:first", 1: "signal:SIGINT"}))
    assert (report.done, len(report.failed), report.left, report.interrupted) == (1, 1, 2, True)


def test_an_ignored_signal_stays_ignored(run) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        assert run(plan(1, 2, {0: "signal:SIGINT"})) == EngineReport(done=2)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_outside_the_main_thread_signals_are_left_alone(run) -> None:
    import threading

    reports: list[EngineReport] = []
    thread = threading.Thread(target=lambda: reports.append(run(plan(1, 2))))
    thread.start()
    thread.join()
    assert reports == [EngineReport(done=2)]


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("name", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_to_all_processes_ends_the_program_in_order(
    store: CellStore, log: Path, processes: int, name: int
) -> None:
    with toys(store, log, "--processes", processes, "--delay", 0.05, "--blocks", 20, "--cells", 2) as process:
        read_until(process, "cell")
        os.killpg(process.pid, name)  # a terminal sends Ctrl-C to every process of the program
        out, err = process.communicate(timeout=60)
    assert process.returncode == 0 and err.count("the block in hand is finished") == 1 and "Traceback" not in err
    done, skipped, failed, interrupted, left = out.split("\n")[-2].split()
    assert (skipped, failed, interrupted) == ("0", "0", "True")
    assert int(done) == len(store) and len(store) % 2 == 0 and int(done) + int(left) == 40 and int(left) > 0
    assert all(map(ended, workers(log)))


def test_a_second_ctrl_c_ends_workers_at_once(store: CellStore, log: Path) -> None:
    with toys(
        store, log, "--processes", 2, "--order", 1, "sleep:600", "--order", 3, "sleep:600", "--cells", 2
    ) as process:
        read_until(process, "cell", times=2)  # the first cells of both blocks; the second ones sleep
        assert process.stderr is not None
        process.send_signal(signal.SIGINT)
        assert "once more drops it" in process.stderr.readline()
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    assert out == "2 0 0 True 6\n" and err == "" and len(store) == 2 and all(map(ended, workers(log)))


# Killed, and shared


def test_killed_at_ten_random_moments_and_restarted_it_is_the_same_store(store: CellStore, log: Path, run) -> None:
    options = ("--blocks", 120, "--cells", 3, "--delay", 0.004)
    rng = random.Random(5)
    for _ in range(10):
        with toys(store, log, *options) as process:
            after = rng.randint(0, 9)
            read_until(process, "cell" if after else "go", times=max(after, 1))
            time.sleep(rng.uniform(0, 0.012))
            process.kill()
        assert process.returncode == -signal.SIGKILL
    killed = len(store)
    assert 0 < killed < 360
    report = run(plan(120, 3))
    assert (report.done, report.skipped, report.left) == (360 - killed, killed, 0)
    whole = CellStore(store.path.with_name("never killed"))
    assert run_blocks(Toys(str(log.with_name("other log"))), plan(120, 3), whole) == EngineReport(done=360)
    assert content(store) == content(whole)
    # No cell twice beyond those of the block in hand when a kill came.
    assert set(logged(log)) == {key(n).digest for n in range(360)} and len(logged(log)) <= 360 + 10 * 3


def test_workers_end_with_a_killed_program(store: CellStore, log: Path, run) -> None:
    options = ("--processes", 2, "--delay", 0.05, "--blocks", 10, "--cells", 3)
    with toys(store, log, *options) as process:
        read_until(process, "cell", times=2)
        process.kill()
    assert wait_for(lambda: all(map(ended, workers(log))))
    report = run(plan(10, 3))
    assert report.failed == () and report.done + report.skipped == 30
    whole = CellStore(store.path.with_name("never killed"))
    run_blocks(Toys(str(log)), plan(10, 3), whole)
    assert content(store) == content(whole)


def test_two_programs_share_a_store_and_do_no_cell_twice(store: CellStore, log: Path) -> None:
    options = ("--blocks", 12, "--cells", 3, "--delay", 0.03, "--wait")
    with toys(store, log, *options) as one, toys(store, log, *options) as two:
        for process in (one, two):
            read_until(process, "go")
        for process in (one, two):
            assert process.stdin is not None
            process.stdin.write("\n")
            process.stdin.flush()
        said = [process.communicate(timeout=60)[0].split("\n")[-2].split() for process in (one, two)]
    assert sum(int(done) for done, *_ in said) == 36 and all(int(done) > 0 for done, *_ in said)
    assert all(rest == [str(36 - int(done)), "0", "False", "0"] for done, *rest in said)
    assert Counter(logged(log)) == Counter(key(n).digest for n in range(36)) and len(workers(log)) == 2
    whole = CellStore(store.path.with_name("alone"))
    run_blocks(Toys(str(log.with_name("other log"))), plan(12, 3), whole)
    assert content(store) == content(whole)


def test_a_block_claimed_elsewhere_is_waited_for(run, store: CellStore, log: Path) -> None:
    """Its holder finishes one cell, fails on another, and dies before the third."""
    claim = store.claim("block-0")
    assert claim is not None
    held = [claim]

    def on_cell(cell, error) -> None:
        if cell == key(5):  # the last of the blocks that are free
            store.put(key(0), result(key(0)))
            store.put_failure(CellFailure(key(1), "MemoryError", "over there"))
            held.pop().release()

    report = run(plan(2, 3), on_cell=on_cell)
    assert logged(log) == [key(n).digest for n in (3, 4, 5, 0, 1, 2)]  # whole, for its batches
    assert report == EngineReport(done=4, skipped=1, failed=((key(1), "MemoryError: over there"),))


def test_a_block_finished_elsewhere_is_skipped(run, store: CellStore, log: Path) -> None:
    claim = store.claim("block-0")
    assert claim is not None

    def on_cell(cell, error) -> None:
        if cell == key(3):
            for number in range(2):
                store.put(key(number), result(key(number)))
            claim.release()

    assert run(plan(2, 2), on_cell=on_cell, engine=LocalEngine(processes=2)) == EngineReport(done=2, skipped=2)
    assert sorted(logged(log)) == sorted(key(n).digest for n in (2, 3))


def test_waiting_for_another_process_ends_with_a_signal(run, store: CellStore) -> None:
    with store.claim("block-0") or pytest.fail("the claim is free"):
        report = run(
            plan(2, 2), on_cell=lambda cell, error: signal.raise_signal(signal.SIGINT) if cell == key(3) else None
        )
    assert report == EngineReport(done=2, interrupted=True, left=2)


def test_an_error_of_the_listener_is_not_taken_for_the_workers(run, store: CellStore) -> None:
    def on_cell(cell, error) -> None:
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        run(plan(1, 2), on_cell=on_cell)
    assert store.failures() == ()
