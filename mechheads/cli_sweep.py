"""``mechheads sweep``, ``status`` and ``export``: study files run, watched, and handed on as tables."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechheads.cli_common import EXIT_INTERRUPTED, reported_errors, rich_table, sayer
from mechheads.errors import InvalidInput, ResultFileError, UnknownName

if TYPE_CHECKING:
    from mechheads.study import Study, Vocabulary
    from mechheads.study_run import StudyResult

EXIT_CELLS_FAILED = 3
ENGINES = ("local", "ray")
_OTHER = {"local": ("workers", "address", "num_gpus", "retries"), "ray": ("processes",)}
_SHOWN_FAILURES = 10

ModelOption = Annotated[
    str | None,
    typer.Option("--model", "-m", help="Another model than the study's: a name, a hub id or a folder."),
]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set", help="Another value for a field, FIELD=VALUE, the value as in YAML: --set seed=1 --set 'k=[1, 5]'."
    ),
]
StoreOption = Annotated[
    Path | None, typer.Option("--store", help="Folder of results; the study's (runs/NAME) if not given.")
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print JSON on standard output, everything else on standard error.")
]


def sweep(
    study: Annotated[str | None, typer.Argument(metavar="STUDY.yaml", help="The study file (docs/studies.md).")] = None,
    model: ModelOption = None,
    changes: SetOption = None,
    plan: Annotated[
        bool, typer.Option("--plan", help="Rank the heads, print the plan and how long it takes, and stop.")
    ] = False,
    explain: Annotated[
        bool, typer.Option("--explain", help="Print every field of a study file with its default, and stop.")
    ] = False,
    store: StoreOption = None,
    engine: Annotated[str | None, typer.Option(help="What runs the cells: local or ray.")] = None,
    processes: Annotated[
        int | None, typer.Option(min=1, help="Processes of this machine (local), or workers (ray).")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with what is there; this is always done.")] = True,
    as_json: JsonOption = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but warnings and errors.")] = False,
) -> None:
    """Run a study file: rank heads, ablate them, and see what the model still does.

    Only what is missing is computed, so the same command goes on with a run that was stopped, even one that was
    killed; several processes, and machines that share the folder, may run it at once. Writes study.html (opens with no
    network), summary.json, the study with every default filled in, and the sweep's tables.

    Exit codes: 0 done; 3 some cells failed (all else is written; run again to try them again); 130 interrupted.

    Example: mechheads sweep studies/locos.yaml --model nano --set 'k=[1, 5]'
    """
    say = sayer(as_json)
    with reported_errors():
        if explain:
            from mechheads.study import explain as fields_explained

            print(fields_explained())
            return
        if study is None:
            raise InvalidInput("name a study file: mechheads sweep studies/locos.yaml. --explain lists its fields.")
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        _sweep(study, model, changes, plan, store, engine, processes, as_json, quiet, say)


def _sweep(
    path: str, model: str | None, changes: Sequence[str] | None, plan_only: bool, store: Path | None,
    engine: str | None, processes: int | None, as_json: bool, quiet: bool, say: Any,
) -> None:  # fmt: skip
    """The sweep of a study file."""
    from rich.markup import escape

    from mechheads.study_run import run_study
    from mechheads.study_trials import vocabulary

    known = vocabulary()
    study = read_study(path, model, changes, known)
    if engine is not None or processes is not None:
        study = read_study(path, model, changes, known, more=_engine(study, engine, processes))
    folder = store if store is not None else _folder(study, path, model)

    def tell(text: str) -> None:
        if not quiet:
            say(escape(text), soft_wrap=True, style="dim")

    result = run_study(
        study, store=folder, say=tell, progress=False if quiet else None, plan_only=plan_only,
        commands=[shlex.join(["mechheads", *sys.argv[1:]])],
    )  # fmt: skip
    if plan_only:
        if as_json:
            print(json.dumps(_planned(result)))
        return
    report = result.report
    assert report is not None
    if report.interrupted:
        kept = report.done + report.skipped
        say(f"Interrupted: {kept} cells are kept, {report.left} are left; run the same command to go on.")
        raise typer.Exit(EXIT_INTERRUPTED)
    if not quiet:
        _print(result, say)
    if as_json:
        print(json.dumps(dict(result.summary)))
    if report.failed:
        first = report.failed[0]
        sayer(True)(
            f"[bold red]{len(report.failed)} cells failed[/bold red] and are left out; run again to try them again. "
            f"The first: {escape(f'{first[0]}: {first[1]}')}", soft_wrap=True,
        )  # fmt: skip
        raise typer.Exit(EXIT_CELLS_FAILED)


def _print(result: StudyResult, say: Any) -> None:
    """What a study found, for people."""
    from rich.markup import escape

    from mechheads.study_tables import area_rows, as_table

    stats = result.stats
    assert stats is not None
    rows = as_table([row for row in area_rows(stats) if row["task"] in result.study.targets])
    if rows is not None:
        say(rich_table(rows.drop(columns="mean over k"), "Share lost on average over k [95% interval]", justify="left"))
    for text in stats.verdict.values():
        say(escape(text), soft_wrap=True)
    say(f"\n{escape(str(result.report))}. {result.summary['seconds']} s.", soft_wrap=True)
    say(f"Open [bold]{escape(str(result.page))}[/bold] in a browser.", soft_wrap=True)


def _planned(result: StudyResult) -> dict[str, Any]:
    """A plan as JSON."""
    from dataclasses import asdict

    count = asdict(result.plan.count(heads_per_block=result.study.heads_per_block))
    estimate = result.estimate
    seconds = None if estimate is None else {**asdict(estimate), "seconds_per_row": dict(estimate.seconds_per_row)}
    return {
        "study": result.study.name, "folder": str(result.folder), **count, "notes": list(result.plan.notes),
        "estimate": seconds,
    }  # fmt: skip


def status(
    study: Annotated[str, typer.Argument(metavar="STUDY.yaml|STORE", help="The study file, or its folder of results.")],
    model: ModelOption = None,
    store: StoreOption = None,
    as_json: JsonOption = False,
) -> None:
    """Say how far a study is: cells done, failed with their errors, left, and being worked on.

    Changes nothing, needs no model, and may be asked while the study runs.

    Example: mechheads status runs/locos
    """
    from rich.markup import escape

    from mechheads.study_status import study_status

    say = sayer(as_json)
    with reported_errors():
        found = study_status(_results(study, model, store))
        say(escape(f"{found.study} on {found.model}, in {found.folder}"), soft_wrap=True)
        say(rich_table(found.by_task(), "Cells"))
        for failure in found.failures[:_SHOWN_FAILURES]:
            say(escape(f"failed: {found.named(failure.key)} ({failure.key.digest}): {failure}"), soft_wrap=True)
        if len(found.failures) > _SHOWN_FAILURES:
            say(f"... and {len(found.failures) - _SHOWN_FAILURES} more failed")
        say(escape(_told(found)), soft_wrap=True)
        if as_json:
            print(json.dumps(found.to_dict()))


def _told(found: Any) -> str:
    """How far it is, in a line."""
    parts = [
        f"{len(found.done)} of {len(found.runs)} cells done",
        f"{len(found.failures)} failed",
        f"{found.left} left",
    ]
    if found.working is None:
        parts.append("whether any are being worked on cannot be told, because the folder cannot be written")
    else:
        parts.append(f"{len(found.working)} being worked on")
    end = " Sweep and page are written." if found.finished else ""
    if not found.finished and not found.left and not found.failures:
        end = " Sweep and page are not written yet: run 'mechheads sweep' to write them."
    return f"{', '.join(parts)}.{end}"


def export(
    study: Annotated[str, typer.Argument(metavar="STORE", help="Folder of results, or the study file.")],
    format: Annotated[
        str | None, typer.Option("--format", "-f", help="parquet, csv or json; by the ending of --out if not given.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", help="File to write; sweep.FORMAT in the folder if not given.")
    ] = None,
    model: ModelOption = None,
    store: StoreOption = None,
) -> None:
    """Write every measured value of a finished sweep as one table, one row a value.

    Columns: intervention, ranking, draw, k, task, trial_id, metric, value, heads.

    Example: mechheads export runs/locos --format csv
    """
    from rich.markup import escape

    from mechheads.study_status import PLAN, SWEEP
    from mechheads.sweep_set import FORMATS, SweepSet

    with reported_errors():
        if format is not None and format not in FORMATS:
            raise UnknownName("export format", format, FORMATS)
        folder = _results(study, model, store)
        try:
            found = SweepSet.load(folder / SWEEP)
        except ResultFileError as error:
            if (folder / PLAN).is_file() and not (folder / SWEEP).exists():
                raise ResultFileError(
                    f"{folder} holds no finished sweep yet; 'mechheads status {folder}' says how far it is."
                ) from error
            raise
        target = out if out is not None else folder / f"sweep.{format or 'parquet'}"
        written = found.export(target, format)
        sayer(False)(f"{len(found.to_frame()):,} rows are in [bold]{escape(str(written))}[/bold]", soft_wrap=True)


# -- studies from the command line --------------------------------------------------------------------


def read_study(
    path: str,
    model: str | None,
    changes: Sequence[str] | None,
    vocabulary: Vocabulary | None = None,
    *,
    more: dict[str, Any] | None = None,
) -> Study:
    """The study of a file with what the command line changes.

    Raises:
        InvalidInput: As ``load_study``; or if a change is not FIELD=VALUE.
    """
    from mechheads.study import load_study

    overrides = {**dict(_change(text) for text in changes or ()), **(more or {})}
    # Absolute, so that the files it names are found again from the study that is written into the folder of results.
    return load_study(Path(path).absolute(), model=model, overrides=overrides, vocabulary=vocabulary)


def _change(text: str) -> tuple[str, Any]:
    """``FIELD=VALUE``, the value as YAML."""
    import yaml

    name, equals, value = text.partition("=")
    if not equals or not name.strip():
        raise InvalidInput(f"--set {text!r}: write FIELD=VALUE, such as --set seed=1.")
    try:
        return name.strip(), yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise InvalidInput(f"--set {text!r}: the value is not YAML ({' '.join(str(error).split())}).") from error


def _engine(study: Study, kind: str | None, processes: int | None) -> dict[str, Any]:
    """The engine's fields from --engine and --processes; those that belong to another kind are taken out."""
    if kind is not None and kind not in ENGINES:
        raise UnknownName("engine", kind, ENGINES)
    named = kind or study.engine.kind
    out: dict[str, Any] = {"engine.kind": named}
    if named != study.engine.kind:
        out |= {f"engine.{name}": None for name in _OTHER[named]}
    if processes is not None:
        out["engine.processes" if named == "local" else "engine.workers"] = processes
    return out


def _folder(study: Study, path: str, model: str | None) -> Path:
    """Where a study's results go: another model than the file's has a folder of its own."""
    if model is None or read_study(path, None, None).model.name == model:
        return Path(study.store)
    safe = "".join(c if c.isalnum() or c in "-_." else "-" for c in model.rstrip("/")).strip("-.")
    return Path(f"{study.store}-{safe or 'model'}")


def _results(given: str, model: str | None, store: Path | None) -> Path:
    """The folder of results, given as itself or as the study file."""
    if store is not None:
        return store
    path = Path(given)
    if path.is_dir():
        if model is not None:
            raise InvalidInput(f"{path} is a folder of results of one model; leave --model out.")
        return path
    if not path.exists():
        raise InvalidInput(f"there is no {given!r}; give a study file or its folder of results.")
    return _folder(read_study(given, model, None), given, model)
