"""What the commands share: options, exit codes, errors as one line, tables."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechheads.errors import InvalidInput, MechheadsError

if TYPE_CHECKING:
    from mechheads.analysis import CircuitAnalysis
    from mechheads.trials import TrialSet

EXIT_FAILED, EXIT_USAGE, EXIT_INTERRUPTED = 1, 2, 130
ModelOption = Annotated[
    str,
    typer.Option("--model", "-m", help="'nano', 'smollm2', a hub id such as Qwen/Qwen3-8B, or a local folder."),
]
SeedOption = Annotated[
    int, typer.Option(min=0, help="Seed of trials and random draws; the same seed gives the same run.")
]
OutOption = Annotated[Path, typer.Option("--out", "-o", help="Folder for results; made if it is not there.")]
JsonOption = Annotated[
    bool,
    typer.Option("--json", help="Print the summary as JSON on standard output, everything else on standard error."),
]
TrialsOption = Annotated[
    str,
    typer.Option(
        "--trials", "-t",
        help="Kind of trials to make (passkey, facts, landmarks, recall, arithmetic), "
        "or a file that TrialSet.save wrote.",
    ),
]  # fmt: skip
NOption = Annotated[int, typer.Option("--n", min=1, help="How many trials to make.")]
LengthOption = Annotated[int, typer.Option(min=1, help="Prompt length, tokens.")]
BatchOption = Annotated[int, typer.Option(min=1, help="Trials run together; changes speed and memory, not results.")]
DtypeOption = Annotated[
    str | None, typer.Option(help="Weight type: float32, bfloat16, float16; as stored if not given.")
]
ChatOption = Annotated[bool, typer.Option("--chat", help="Put prompts through the model's chat template.")]
HaystackOption = Annotated[
    Path | None,
    typer.Option(help="Text file, or folder of .txt files, to hide needles in instead of the built-in prose."),
]


@contextmanager
def reported_errors() -> Iterator[None]:
    """Turn errors into one clear line and an exit code, and warnings into one line each."""
    # The format alone is changed: what is shown, recorded or raised stays as the caller's filters say.
    as_before, warnings.formatwarning = warnings.formatwarning, _one_line
    try:
        yield
    except InvalidInput as error:
        _complain(error)
        raise typer.Exit(EXIT_USAGE) from error
    except MechheadsError as error:
        _complain(error)
        raise typer.Exit(EXIT_FAILED) from error
    except KeyboardInterrupt as error:
        _complain("interrupted")
        raise typer.Exit(EXIT_INTERRUPTED) from error
    finally:
        warnings.formatwarning = as_before


def _one_line(message: Warning | str, *_: Any, **__: Any) -> str:
    """A warning as one line, without the place in the code it came from."""
    return f"warning: {' '.join(str(message).split())}\n"


def _complain(error: object) -> None:
    """An error, on standard error, in full."""
    from rich.console import Console
    from rich.text import Text

    Console(stderr=True).print(Text.assemble(("error: ", "bold red"), str(error)), soft_wrap=True)


def sayer(as_json: bool) -> Callable[..., None]:
    """Where human output goes: standard output, or standard error beside JSON.

    It reads rich markup, so whatever the user or a file named goes through ``escape`` first.
    """
    from rich.console import Console

    return Console(stderr=as_json).print


def rich_table(frame: Any, title: str, *, justify: Any = "right") -> Any:
    """A rich table of a data frame."""
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=escape(title), title_justify="left", show_lines=justify == "left")
    for i, column in enumerate(frame.columns):
        # On a narrow terminal text is folded, never cut.
        table.add_column(escape(str(column)), justify="left" if i == 0 else justify, overflow="fold")
    for row in frame.itertuples(index=False):
        table.add_row(*(f"{v:.4g}" if isinstance(v, float) else escape(str(v)) for v in row))
    return table


def load_analysis(model: str, dtype: str | None) -> CircuitAnalysis:
    """The model, quietly."""
    from mechheads.analysis import CircuitAnalysis
    from mechheads.model import load

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    return CircuitAnalysis(load(model, dtype=dtype))


def make_trials(
    what: str, model: Any, *, n: int, context_length: int, seed: int, chat: bool, haystack: Path | None
) -> TrialSet:
    """Trials of a kind, or from a file."""
    from mechheads.datasets import needles
    from mechheads.trials import TrialSet, is_trial_file

    if is_trial_file(what):
        return TrialSet.load(what)
    return needles(
        what, model, n=n, context_length=context_length, seed=seed, chat=chat,
        haystack=None if haystack is None else str(haystack),
    )  # fmt: skip
