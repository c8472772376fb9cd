"""``mechheads sweep``, ``status`` and ``export``: what is printed, written and refused; killed runs and processes."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from engine_toys import content
from test_study_run import QUICK
from typer.testing import CliRunner

import mechheads as mh
from mechheads import cli_sweep, study_run
from mechheads.cell_runs import CellWorker
from mechheads.cell_store import CellStore
from mechheads.cli import app
from mechheads.study import load_study
from mechheads.study_fields import EnginePart
from mechheads.sweep_set import SweepSet


@pytest.fixture(scope="module")
def nano() -> mh.Model:
    return mh.load("nano")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "quick.yaml"
    path.write_text(QUICK, encoding="utf-8")
    return path


@pytest.fixture
def run(nano: mh.Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line, with the model loaded once for all tests, and few bootstrap samples."""
    real = study_run.measure

    def load(name: str, **options: Any) -> mh.Model:
        assert name == "nano" and not any(options.values())
        return nano

    monkeypatch.setattr(study_run, "load", load)
    monkeypatch.setattr(study_run, "measure", lambda *given: real(*given, n_boot=50))
    monkeypatch.setattr(study_run, "write_study_page", _page)
    monkeypatch.setenv("COLUMNS", "250")
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


def _page(path: Path, *given: Any) -> Path:
    """A page without figures: those are tested elsewhere."""
    path.write_text(f"a page\n{given[-1]}")
    return path


def words(text: str) -> str:
    """On one line and without colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", text).split())


def cells(folder: Path) -> dict[str, bytes]:
    return content(CellStore(folder / "cells", create=False))


@pytest.fixture(scope="module")
def expected(nano: mh.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The cells of the quick study, run here without a stop."""
    folder = tmp_path_factory.mktemp("expected")
    (folder / "quick.yaml").write_text(QUICK, encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_run, "write_study_page", _page)
        study_run.run_study(load_study(folder / "quick.yaml"), model=nano, store=folder / "out", progress=False)
    return cells(folder / "out")


# -- sweep -------------------------------------------------------------------------------------------


def test_a_study_is_run_and_said(run: Any, file: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    result = run("sweep", file, "--store", out)
    assert result.exit_code == 0, result.stderr
    text = words(result.stdout)
    for said in (
        "making trials", "runs 26 (a head set on a task)", "measured for a row: needles",
        "Share lost on average over k [95% interval]", "On needles (correct, heads ablated by resample) the model",
        "26 cells computed, 0 there already, 0 failed, 0 left.", f"Open {out / 'study.html'} in a browser.",
    ):  # fmt: skip
        assert said in text, said
    assert cells(out) == expected
    names = {path.name for path in out.iterdir()}
    assert names >= {"cells", "scores", "sweep", "plan.json", "study.yaml", "summary.json", "study.html"}
    again = run("sweep", file, "--store", out, "--resume")
    assert again.exit_code == 0 and "0 cells computed, 26 there already" in words(again.stdout)


def test_json_goes_to_standard_output_alone(run: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("sweep", file, "--store", out, "--json", "--set", "k=[1]", "--set", "controls.random=false")
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary == json.loads((out / "summary.json").read_text(encoding="utf-8"))
    assert summary["plan"]["runs"] == 4 and summary["cells"]["computed"] == 4 and summary["study"]["k"] == [1]
    assert "making trials" in result.stderr
    quiet = run("sweep", file, "--store", out, "--quiet", "--set", "k=[1]", "--set", "controls.random=false")
    assert (quiet.exit_code, quiet.stdout, quiet.stderr) == (0, "", "")


def test_plan_stops_before_the_bulk(run: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = run("sweep", file, "--store", out, "--plan", "--json")
    assert result.exit_code == 0, result.stderr
    planned = json.loads(result.stdout)
    assert (planned["study"], planned["runs"], planned["estimate"]["rows"]) == ("quick", 26, 50)
    assert planned["estimate"]["seconds"] > 0 and not (out / "sweep").exists()
    assert "clean prefills" in result.stderr
    status = json.loads(run("status", out, "--json").stdout)
    assert (status["done"], status["left"], status["finished"]) == (6, 20, False)


@pytest.mark.parametrize("command", ["sweep", "status", "export", "prune"])
def test_commands_are_there_and_help(run: Any, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0 and "Example: mechheads " + command in words(result.stdout)


def test_explain_lists_the_fields_and_needs_no_file(run: Any) -> None:
    result = run("sweep", "--explain")
    assert result.exit_code == 0
    assert "interventions[].kind: one of zero, mean" in result.stdout and "for_model" in result.stdout


def test_a_study_runs_where_it_says_or_in_a_folder_of_the_models_own(
    run: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = ["--set", "k=[1]", "--set", "controls.random=false", "--quiet"]
    assert run("sweep", file, *short).exit_code == 0
    assert (tmp_path / "runs" / "quick" / "summary.json").exists()
    assert json.loads(run("status", file, "--json").stdout)["folder"] == "runs/quick"
    file.write_text(QUICK.replace("model: nano", "model: smollm2"), encoding="utf-8")
    assert run("sweep", file, "--model", "nano", *short).exit_code == 0
    assert (tmp_path / "runs" / "quick-nano" / "summary.json").exists()
    assert json.loads(run("status", file, "-m", "nano", "--json").stdout)["model"] == "nano"
    assert cli_sweep._folder(load_study(file), str(file), "some/Model-1.5/") == Path("runs/quick-some-Model-1.5")


@pytest.mark.parametrize(
    ("written", "asked", "got"),
    [
        ("", {"engine": "ray", "processes": 3}, EnginePart(kind="ray", workers=3)),
        ("", {"processes": 3}, EnginePart(processes=3)),
        ("engine: ray", {"processes": 3}, EnginePart(kind="ray", workers=3)),
        ("engine: {kind: ray, workers: 5, num_gpus: 1.0, threads: 2}", {"engine": "local", "processes": 4},
         EnginePart(processes=4, threads=2)),
        ("engine: {processes: 4}", {"engine": "ray"}, EnginePart(kind="ray")),
        ("engine: {kind: ray, workers: 5}", {"engine": "ray"}, EnginePart(kind="ray", workers=5)),
    ],
)  # fmt: skip
def test_engines_from_the_command_line(
    run: Any, file: Path, monkeypatch: pytest.MonkeyPatch, written: str, asked: dict[str, Any], got: EnginePart
) -> None:
    seen = []
    monkeypatch.setattr(study_run, "run_study", lambda study, **_: seen.append(study.engine) or exit_())
    file.write_text(f"{QUICK}{written}\n", encoding="utf-8")
    run("sweep", file, *(str(x) for name, value in asked.items() for x in (f"--{name}", value)))
    assert seen == [got]


def exit_() -> None:
    raise KeyboardInterrupt


def test_interrupted_is_130_and_says_how_to_go_on(
    run: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = CellWorker.run, []

    def stop(self: CellWorker, block: Any, keep: Any) -> None:
        calls.append(block)
        if len(calls) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, block, keep)

    monkeypatch.setattr(CellWorker, "run", stop)
    result = run("sweep", file, "--store", tmp_path / "out")
    assert result.exit_code == 130
    assert "Interrupted: 9 cells are kept, 17 are left; run the same command to go on." in words(result.stdout)


def test_failed_cells_are_3_and_status_names_them(
    run: Any, file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, out = CellWorker.results, tmp_path / "out"

    def results(self: CellWorker, name: str, works: Any) -> Any:
        if name == "recall" and any(work.heads == mh.HeadSet.parse("L1H0") for work in works):
            raise ValueError("[poison]")
        return real(self, name, works)

    with monkeypatch.context() as patch:
        patch.setattr(CellWorker, "results", results)
        result = run("sweep", file, "--store", out)
    assert result.exit_code == 3
    assert "1 cells failed and are left out; run again to try them again. The first: cell" in words(result.stderr)
    assert "ValueError: [poison]" in words(result.stderr)
    status = run("status", out)
    assert status.exit_code == 0
    assert re.search(r"failed: recall, resample of L1H0 \([0-9a-f]{16}\): ValueError: \[poison\]", words(status.stdout))
    assert "25 of 26 cells done, 1 failed, 0 left, 0 being worked on." in words(status.stdout)
    assert len(json.loads(run("status", out, "--json").stdout)["failed"]) == 1
    assert run("sweep", file, "--store", out).exit_code == 0
    assert "26 of 26 cells done, 0 failed, 0 left, 0 being worked on. Sweep and page are written." in words(
        run("status", out).stdout
    )


# -- what is refused ---------------------------------------------------------------------------------


def test_a_bad_study_names_the_line(run: Any, file: Path) -> None:
    wrong = QUICK.replace("{kind: resample, reference: needles.calibration}", "[{kind: resampel}]")
    file.write_text(wrong, encoding="utf-8")
    result = run("sweep", file)
    assert result.exit_code == 2
    assert "quick.yaml, line 8: interventions[0].kind is 'resampel'; it must be one of" in words(result.stderr)
    assert "Did you mean 'resample'?" in words(result.stderr)
    file.write_text(QUICK.replace("context_length: 80", "context_lenght: 80"), encoding="utf-8")
    result = run("sweep", file)
    assert result.exit_code == 2 and "line 4: nano.retrieval has no option 'context_lenght'" in words(result.stderr)
    file.write_text("k: [1, 2", encoding="utf-8")
    assert "this is not YAML" in words(run("sweep", file).stderr)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["sweep"], 2, "name a study file: mechheads sweep studies/locos.yaml. --explain lists its fields."),
        (["sweep", "no.yaml"], 2, "no.yaml does not exist; give the path of a YAML file."),
        (["sweep", "FILE", "--set", "seed"], 2, "--set 'seed': write FIELD=VALUE, such as --set seed=1."),
        (["sweep", "FILE", "--set", "k=[1"], 2, "--set 'k=[1': the value is not YAML"),
        (["sweep", "FILE", "--set", "batch.rosw=1"], 2, "given as batch.rosw: batch has no field 'rosw'. Did you mean"),
        (["sweep", "FILE", "--engine", "rey"], 2, "unknown engine 'rey'. Did you mean 'ray'?"),
        (["status", "nowhere"], 2, "there is no 'nowhere'; give a study file or its folder of results."),
        (["status", "FOLDER"], 1, "holds no plan.json: no sweep was begun there. Run 'mechheads sweep'."),
        (["status", "FOLDER", "-m", "nano"], 2, "is a folder of results of one model; leave --model out."),
        (["export", "FOLDER", "-f", "xlsx"], 2, "unknown export format 'xlsx'. Known: csv, json, parquet."),
        (["export", "FOLDER"], 1, "holds no sweep_set.json, so there is no sweep set in it"),
    ],
)
def test_what_cannot_be_used_is_refused(
    run: Any, file: Path, tmp_path: Path, arguments: list[str], code: int, message: str
) -> None:
    (tmp_path / "folder").mkdir()
    named = {"FILE": str(file), "FOLDER": str(tmp_path / "folder")}
    result = run(*(named.get(a, a) for a in arguments))
    assert result.exit_code == code and message in words(result.stderr).replace("is not a folder", "holds no "
                                                                                "sweep_set.json")  # fmt: skip


@pytest.fixture
def read_only(nano: mh.Model) -> Iterator[Path]:
    """A folder of results with a part of the cells, which this process may only read."""
    folder = Path(tempfile.mkdtemp())  # not under tmp_path, which others than its owner may not enter
    (folder / "quick.yaml").write_text(QUICK, encoding="utf-8")
    study_run.run_study(
        load_study(folder / "quick.yaml"), model=nano, store=folder / "out", progress=False, plan_only=True
    )
    folder.chmod(0o755)
    for path in [folder / "out", *(folder / "out").rglob("*")]:
        path.chmod(0o555 if path.is_dir() else 0o444)
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)  # permissions do not bind root
    try:
        yield folder
    finally:
        if root:
            os.seteuid(0)
        for path in [folder, *folder.rglob("*")]:
            path.chmod(0o755)
        shutil.rmtree(folder)


def test_a_read_only_folder_is_refused_and_can_be_asked(run: Any, read_only: Path) -> None:
    result = run("sweep", read_only / "quick.yaml", "--store", read_only / "out")
    assert result.exit_code == 1
    assert "cells cannot be written: Permission denied. What is stored already is whole" in words(result.stderr)
    status = run("status", read_only / "out")
    assert status.exit_code == 0, status.stderr
    assert "6 of 26 cells done, 0 failed, 20 left, whether any are being worked on cannot be told" in words(
        status.stdout
    )


# -- export ------------------------------------------------------------------------------------------


def test_export_in_every_format(run: Any, file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run("sweep", file, "--store", out, "--plan").exit_code == 0
    early = run("export", out)
    assert early.exit_code == 1 and "holds no finished sweep yet; 'mechheads status" in words(early.stderr)
    assert run("sweep", file, "--store", out, "--quiet").exit_code == 0
    frame = SweepSet.load(out / "sweep").to_frame()
    for format, read in (("parquet", pd.read_parquet), ("csv", pd.read_csv), ("json", pd.read_json)):
        result = run("export", out, "--format", format)
        assert result.exit_code == 0 and f"{len(frame):,} rows are in {out / f'sweep.{format}'}" in words(result.stdout)
        table = read(out / f"sweep.{format}")
        assert list(table.columns) == list(frame.columns) and len(table) == len(frame)
        assert table["value"].sum() == pytest.approx(frame["value"].sum())
    assert run("export", file, "--store", out, "-o", tmp_path / "mine.csv").exit_code == 0
    assert len(pd.read_csv(tmp_path / "mine.csv")) == len(frame)


# -- processes ---------------------------------------------------------------------------------------


def started(*arguments: object) -> subprocess.Popen[str]:
    """``mechheads`` as a program of its own."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "200"}
    return subprocess.Popen(
        [sys.executable, "-m", "mechheads", *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        text=True, env=environment, start_new_session=True,
    )  # fmt: skip


def test_killed_anywhere_the_same_cells_in_the_end(file: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    rng, out = random.Random(5), tmp_path / "out"
    for least in (rng.randint(1, 8), rng.randint(9, 20)):
        process = started("sweep", file, "--store", out, "--quiet")
        end = time.monotonic() + 120
        while process.poll() is None and time.monotonic() < end and _count(out) < least:
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.02))
        os.killpg(process.pid, signal.SIGKILL)
        _, said = process.communicate()
        assert process.returncode == -signal.SIGKILL, said
        assert cells(out).items() <= expected.items() and _count(out) >= least
    process = started("sweep", file, "--store", out, "--quiet")
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert cells(out) == expected
    assert len(SweepSet.load(out / "sweep")["resample"].frame) > 0 and (out / "study.html").stat().st_size > 1e6


def _count(folder: Path) -> int:
    return len([*(folder / "cells").glob("[!.]*.parquet")])


def test_two_processes_write_the_same_bytes(run: Any, file: Path, tmp_path: Path, expected: dict[str, bytes]) -> None:
    out = tmp_path / "out"
    result = run("sweep", file, "--store", out, "--processes", 2, "--json")
    assert result.exit_code == 0, result.stderr
    assert cells(out) == expected
    assert json.loads(result.stdout)["study"]["engine"]["processes"] == 2 and "shared by 2 workers" in result.stderr
