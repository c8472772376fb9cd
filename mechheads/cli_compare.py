"""``mechheads compare``: every published detector on one model."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from mechheads.cli_common import (
    BatchOption,
    ChatOption,
    JsonOption,
    LengthOption,
    ModelOption,
    NOption,
    OutOption,
    SeedOption,
    reported_errors,
    rich_table,
    sayer,
)


def compare(
    model: ModelOption = "smollm2",
    task: Annotated[
        list[str] | None,
        typer.Option(
            "--task",
            "-t",
            help="Needle trials (passkey, facts, landmarks) or a file that TrialSet.save wrote; repeat for several. "
            "Default: facts and landmarks.",
        ),
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            "--method",
            "-s",
            help="Detector; repeat. Default: all published ones but cri, which is causal and dozens of times dearer.",
        ),
    ] = None,
    out: OutOption = Path("compare-out"),
    seed: SeedOption = 0,
    n: NOption = 50,
    context_length: LengthOption = 160,
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="Heads taken out for each detector; 2% of all, at least 5.")
    ] = None,
    draws: Annotated[int, typer.Option(min=1, help="Random head sets; two or more.")] = 7,
    n_control: Annotated[int, typer.Option(min=1, help="Trials of the control task, recall from memory.")] = 20,
    chat: ChatOption = False,
    batch_size: BatchOption = 16,
    as_json: JsonOption = False,
) -> None:
    """Which heads retrieve in this model? Every detector, how far they agree, and whose heads matter.

    Scores all heads with every detector on one capture, compares the rankings, then mean-ablates each one's best heads
    on other trials, with random heads and recall from memory as controls. Writes compare.html (opens with no network),
    compare.json, compare.csv, agreement.csv and the scores as Parquet. A second run into the same folder reads the
    scores and ablates anew.
    """
    from rich.markup import escape

    from mechheads.compare import METHODS, CompareOptions, run_compare
    from mechheads.compare_page import method_table
    from mechheads.compare_summary import verdict

    say = sayer(as_json)
    with reported_errors():
        options = CompareOptions(
            tasks=tuple(task or ("facts", "landmarks")),
            methods=tuple(method or METHODS),
            n=n,
            context_length=context_length,
            k=k,
            draws=draws,
            n_control=n_control,
            seed=seed,
            chat=chat,
            batch_size=batch_size,
        )
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        result = run_compare(model, out, options, say=lambda text: say(f"[dim]{escape(text)}[/dim]"))
        for name, numbers in result.summary["tasks"].items():
            if "baseline" in numbers:
                table = method_table(numbers, result.summary["k"]).drop(columns="corrected")
                say(rich_table(table, f"{name}: what taking out the best heads costs"))
        for line in verdict(result.summary):
            say(escape(line))
        page = escape(str(result.page))
        say(f"\n{result.summary['seconds']} s. Open [bold]{page}[/bold] in a browser.", soft_wrap=True)
        if as_json:
            print(json.dumps(result.summary))
