"""Blocks on Ray: one actor a worker, on a cluster that is there or on one started here for the run."""

from __future__ import annotations

import os
import pickle
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mechheads.cell_store import CellStore
from mechheads.cells import CellFailure, CellKey, CellResult
from mechheads.engines.blocks import Block, EngineError, Recipe, Worker, work_on
from mechheads.engines.crew import Event, run_crew
from mechheads.engines.interrupts import Interrupts
from mechheads.engines.ledger import Ledger
from mechheads.engines.local import check_whole
from mechheads.errors import InvalidInput, MechheadsError, OutputNotWritable


@dataclass(frozen=True)
class RayEngine:
    """Runs blocks on Ray actors, each with a worker of its own.

    A worker that sees the store's folder writes there itself; from one that does not (another machine, no shared
    disk) results travel back, and this process writes them. Ray is started only where it is not running yet in this
    process, and stopped only if it was started here.

    Attributes:
        workers: How many actors at most.
        address: ``"auto"`` or a URL: an existing cluster. None: that of ``RAY_ADDRESS``, else one of this machine.
        num_cpus: CPUs that Ray reserves for each worker; torch gets so many threads there.
        num_gpus: GPUs that Ray reserves for each; fractions share one.
        retries: How often a block is tried again whose worker died, before its cells are tried one by one.

    Raises:
        InvalidInput: If a number is too small or no number.
    """

    workers: int = 2
    address: str | None = None
    num_cpus: int | float = 1
    num_gpus: int | float = 0
    retries: int = 2

    def __post_init__(self) -> None:
        check_whole("workers", self.workers, 1)
        check_whole("retries", self.retries, 0)
        for name in ("num_cpus", "num_gpus"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
                raise InvalidInput(f"{name} is {value!r}; it must be a number of at least 0.")

    def run(self, recipe: Recipe, ledger: Ledger, interrupts: Interrupts) -> None:
        """Work off the ledger; returns when nothing is left to take, or after a signal.

        Raises:
            EngineError: If Ray is not installed or cannot be reached, or as ``run_crew`` says.
        """
        size = min(self.workers, ledger.size)
        with _connected(self, size), _probe(ledger.store) as probe:
            interrupts.install()  # Ray has a handler of its own for SIGTERM, which would end the program
            options = {"num_cpus": self.num_cpus, "num_gpus": self.num_gpus, "max_restarts": 0}
            run_crew(Actors(recipe, ledger.store, probe, options), ledger, interrupts, size=size, retries=self.retries)


@contextmanager
def _connected(engine: RayEngine, size: int) -> Iterator[None]:
    """Ray, started or joined if this process has none yet; what was begun here is ended here."""
    try:
        import ray
    except ImportError as error:
        raise EngineError(
            "engine 'ray' needs Ray, which is not installed: pip install 'mechheads[ray]'. Or use LocalEngine."
        ) from error
    if ray.is_initialized():
        yield
        return
    # None would join any cluster that was ever started on this machine; that should be asked for by name.
    address = engine.address or os.environ.get("RAY_ADDRESS") or "local"
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": "ERROR"}
    if address == "local":
        quiet |= {"include_dashboard": False, "num_cpus": max(1, round(size * engine.num_cpus + 0.5 - 1e-9))}
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")  # a research tool reports to nobody unless it is asked to
    try:
        ray.init(address=address, **quiet)
    except (ConnectionError, RuntimeError, ValueError, OSError) as error:
        raise EngineError(
            f"Ray cannot be reached or started at {address!r}: {str(error).rstrip('.')}. "
            "Start a cluster (`ray start --head`), give its address, or leave the address out."
        ) from error
    try:
        yield
    finally:
        ray.shutdown()


@contextmanager
def _probe(store: CellStore) -> Iterator[str]:
    """Name of a file in the store by which a worker knows that it sees the very same folder."""
    name = f".{uuid.uuid4().hex}.probe.tmp"
    try:
        (store.path / name).touch()
    except OSError as error:
        raise OutputNotWritable(f"the store {store.path} cannot be written: {error}.") from error
    try:
        yield name
    finally:
        (store.path / name).unlink(missing_ok=True)


@dataclass
class _Carried:
    """A sink that travels: what a worker without the store's folder has for it, in order."""

    results: list[tuple[CellKey, CellResult]] = field(default_factory=list)
    failures: list[CellFailure] = field(default_factory=list)

    def put(self, key: CellKey, result: CellResult) -> None:
        self.results.append((key, result))

    def put_failure(self, failure: CellFailure) -> None:
        self.failures.append(failure)


@dataclass(frozen=True)
class _Outcome:
    """What an actor says of a block: the cells settled, what is to be stored yet, whether its disk failed."""

    told: tuple[tuple[CellKey, str | None], ...]
    carried: _Carried | None
    unwritable: str | None = None


class _Actor:
    """The worker's side."""

    def __init__(self, recipe: bytes, path: str, probe: str):
        self._recipe, self._path, self._probe = recipe, path, probe
        self._worker: Worker | None = None
        self._store: CellStore | None = None

    def build(self) -> str | None:
        """Build the worker; the error as text, None if there is none."""
        try:
            self._worker = pickle.loads(self._recipe).build()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        if (Path(self._path) / self._probe).is_file():
            try:
                store = CellStore(self._path, create=False)
                store.check_writable()
                self._store = store
            except MechheadsError:
                self._store = None  # seen but not ours to write: results travel, and the driver writes them
        return None

    def run(self, block: Block, wanted: tuple[CellKey, ...]) -> _Outcome:
        """Run a block."""
        assert self._worker is not None
        told: list[tuple[CellKey, str | None]] = []
        carried = _Carried() if self._store is None else None
        problem = None
        try:
            sink = self._store if carried is None else carried
            assert sink is not None
            work_on(self._worker, block, wanted, sink, tell=lambda cell, error: told.append((cell, error)))
        except OutputNotWritable as error:
            problem = str(error)
        return _Outcome(tuple(told), carried, problem)


class Actors:
    """A crew of Ray actors.

    Args:
        recipe: Builds the worker.
        store: Where cells go.
        probe: Name of a file in the store.
        options: Resources of an actor, as Ray names them.
    """

    def __init__(self, recipe: Recipe, store: CellStore, probe: str, options: Mapping[str, Any]):
        import ray
        import ray.cloudpickle as cloudpickle

        self._ray, self._store = ray, store
        self._make: Any = ray.remote(**options)(_Actor)
        self._setup = (
            cloudpickle.dumps(recipe),  # pyright: ignore[reportPrivateImportUsage]
            str(store.path),
            probe,
        )
        self._actors: dict[int, Any] = {}
        self._building: dict[
            int, tuple[Block, tuple[CellKey, ...]] | None
        ] = {}  # and the block it gets when it is built
        self._calls: dict[Any, int] = {}  # a call under way -> its actor
        self._hired = 0

    def hire(self) -> int:
        """Start an actor; see ``Crew``."""
        self._hired += 1
        actor = self._actors[self._hired] = self._make.remote(*self._setup)
        self._calls[actor.build.remote()] = self._hired
        self._building[self._hired] = None
        return self._hired

    def give(self, worker: int, block: Block, wanted: Sequence[CellKey]) -> None:
        """Let an actor run a block, now or when it is built."""
        if worker in self._building:
            self._building[worker] = (block, tuple(wanted))
        else:
            self._calls[self._actors[worker].run.remote(block, tuple(wanted))] = worker

    def hear(self, timeout: float | None) -> list[Event]:
        """What the actors tell; see ``Crew``."""
        ready, _ = self._ray.wait(list(self._calls), num_returns=1, timeout=timeout)
        return [event for call in ready for event in self._hear_one(call)]

    def _hear_one(self, call: Any) -> list[Event]:
        worker = self._calls.pop(call)
        built = worker not in self._building
        due = self._building.pop(worker, None)
        try:
            said = self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            raise EngineError(f"a Ray worker cannot take a block or give its result: {error}") from error
        except self._ray.exceptions.RayError as error:
            self._ray.kill(self._actors.pop(worker), no_restart=True)  # Ray may only have lost sight of it
            reason = " ".join(str(error).split())[:200]
            return [Event(worker, "lost", f"Ray says: {reason}", built=built)]
        if built:
            return [*self._settled(worker, said), Event(worker, "done")]
        if said is not None:
            return [Event(worker, "unbuilt", said)]
        if due is not None:
            self.give(worker, *due)
        return []

    def _settled(self, worker: int, outcome: _Outcome) -> Iterator[Event]:
        if outcome.carried is not None:
            for key, result in outcome.carried.results:
                self._store.put(key, result)
            for failure in outcome.carried.failures:
                self._store.put_failure(failure)
        for cell, error in outcome.told:
            yield Event(worker, "cell", error, cell)
        if outcome.unwritable is not None:
            yield Event(worker, "unwritable", outcome.unwritable)

    def close(self, *, drop: bool) -> None:
        """End the actors; see ``Crew``."""
        for actor in self._actors.values():
            self._ray.kill(actor, no_restart=True)
        self._actors.clear()
        self._calls.clear()
