"""Ray on this machine: the same bytes as everywhere, workers that die, and no Ray left where there was none."""

from __future__ import annotations

import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from engine_toys import Toys, content, key, logged, plan, workers

import mechheads.engines.ray as ray_engine
from mechheads.cell_store import CellStore
from mechheads.engines import EngineError, EngineReport, LocalEngine, RayEngine, run_blocks
from mechheads.errors import InvalidInput, OutputNotWritable


@pytest.fixture(scope="module")
def ray() -> Iterator[Any]:
    """Ray, which belongs to the development packages: without it these tests fail, they are not skipped."""
    try:
        import ray
    except ImportError:
        if sys.version_info >= (3, 15):
            pytest.skip("Ray has no wheels for this Python")
        pytest.fail("Ray is not installed: pip install -e '.[dev]'")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(Path(__file__).parent))  # where workers find the toys
        yield ray


@pytest.fixture(scope="module")
def cluster(ray: Any) -> Iterator[Any]:
    """A Ray of our own that several tests use, as on a cluster that is there already."""
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    yield ray
    ray.shutdown()


@pytest.fixture
def store(tmp_path: Path) -> CellStore:
    return CellStore(tmp_path / "store")


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def alone(tmp_path: Path) -> CellStore:
    """What a run in this process makes of six well-behaved cells."""
    store = CellStore(tmp_path / "alone")
    run_blocks(Toys(str(tmp_path / "other log")), plan(3, 2), store)
    return store


def test_two_workers_one_killed_the_sweep_completes_on_a_ray_started_for_it(
    ray: Any, store: CellStore, log: Path, alone: CellStore, tmp_path: Path
) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    flag = tmp_path / "died"
    report = run_blocks(
        Toys(str(log), delay=0.05), plan(3, 2, {3: f"once:{flag}"}), store, engine=RayEngine(workers=2), progress=False
    )
    assert report == EngineReport(done=6) and store.failures() == () and content(store) == content(alone)
    assert flag.exists() and Counter(logged(log))[key(3).digest] == 2 and len(workers(log)) >= 2
    assert not ray.is_initialized()
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)] == before
    assert not list(store.path.glob(".*.tmp"))


def test_a_ray_that_runs_already_is_used_and_left(cluster: Any, store: CellStore, log: Path) -> None:
    seen: dict = {}
    report = run_blocks(
        Toys(str(log)), plan(2, 2, {1: "raise:one"}), store, engine=RayEngine(), on_cell=seen.__setitem__
    )
    assert (
        report == EngineReport(done=3, failed=((key(1), "RuntimeError: poison in one"),)) and cluster.is_initialized()
    )
    assert seen == {key(n): None for n in range(4)} | {key(1): "RuntimeError: poison in one"}
    (failure,) = store.failures()
    assert failure.error == "RuntimeError" and "obey" in failure.traceback
    report = run_blocks(Toys(str(log)), plan(2, 2), store, engine=RayEngine())
    assert report == EngineReport(done=1, skipped=3) and store.failures() == ()


def test_results_travel_where_a_worker_does_not_see_the_store(
    cluster: Any, store: CellStore, log: Path, alone: CellStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def unseen(store: CellStore) -> Iterator[str]:
        yield "a file that is not there"

    monkeypatch.setattr(ray_engine, "_probe", unseen)
    puts: list[str] = []
    put = CellStore.put
    monkeypatch.setattr(CellStore, "put", lambda self, cell, made: puts.append(cell.digest) or put(self, cell, made))
    blocks = plan(3, 2, {1: "nan"})
    report = run_blocks(Toys(str(log)), blocks, store, engine=RayEngine())
    assert report.done == 5 and [cell for cell, _ in report.failed] == [key(1)]
    assert sorted(puts) == sorted(key(n).digest for n in (0, 2, 3, 4, 5))  # written by this process
    assert [failure.key for failure in store.failures()] == [key(1)]
    assert run_blocks(Toys(str(log)), plan(3, 2), store, engine=RayEngine()).done == 1
    assert content(store) == content(alone)


def test_a_cell_that_kills_every_worker_is_found_and_recorded(cluster: Any, store: CellStore, log: Path) -> None:
    report = run_blocks(Toys(str(log)), plan(1, 2, {1: "kill"}), store, engine=RayEngine(workers=1, retries=0))
    ((cell, message),) = report.failed
    assert report.done == 1 and cell == key(1)
    assert message.startswith("WorkerLost: the worker died on this cell, once: Ray says: ")


def test_ctrl_c_lets_the_blocks_in_hand_finish(cluster: Any, store: CellStore, log: Path) -> None:
    def on_cell(cell: Any, error: str | None) -> None:
        if cell == key(1):
            signal.raise_signal(signal.SIGINT)

    report = run_blocks(Toys(str(log)), plan(5, 2), store, engine=RayEngine(workers=1), on_cell=on_cell)
    assert report == EngineReport(done=2, interrupted=True, left=8)


def test_a_store_that_a_worker_cannot_write_any_more_ends_the_run(cluster: Any, store: CellStore, log: Path) -> None:
    with pytest.raises(OutputNotWritable, match=r"store was deleted or moved while it was in use"):
        run_blocks(Toys(str(log)), plan(4, 2, {1: f"delete:{store.path}"}), store, engine=RayEngine(workers=1))
    assert len(logged(log)) == 2 and not store.path.exists()


def test_a_worker_that_cannot_be_built_ends_the_run(cluster: Any, store: CellStore, log: Path) -> None:
    with pytest.raises(EngineError, match=r"no worker can be built: ValueError: no such model"):
        run_blocks(Toys(str(log), fail="no such model"), plan(2, 2), store, engine=RayEngine())
    with pytest.raises(EngineError, match=r"1 of them, while they were being built"):
        run_blocks(Toys(str(log), fail="kill"), plan(1, 2), store, engine=RayEngine(retries=0))


def test_ray_that_is_missing_or_out_of_reach_is_said(
    ray: Any, store: CellStore, log: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if ray.is_initialized():
        ray.shutdown()
    with pytest.raises(EngineError, match=r"Ray cannot be reached or started at 'auto': .* \(`ray start --head`\)"):
        run_blocks(Toys(str(log)), plan(1, 1), store, engine=RayEngine(address="auto"))
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(EngineError, match=r"needs Ray, which is not installed: pip install 'mechheads\[ray\]'"):
        run_blocks(Toys(str(log)), plan(1, 1), store, engine=RayEngine())
    assert run_blocks(Toys(str(log)), plan(1, 1), store, engine=LocalEngine()).done == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"workers": 0}, r"workers is 0; it must be a whole number of at least 1\."),
        ({"retries": -1}, r"retries is -1; it must be a whole number of at least 0\."),
        ({"num_cpus": -1}, r"num_cpus is -1; it must be a number of at least 0\."),
        ({"num_gpus": float("nan")}, r"num_gpus is nan; it must be a number of at least 0\."),
    ],
)
def test_unfit_options_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        RayEngine(**options)
