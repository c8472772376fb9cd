"""``mechheads heads``: head files from one published format into another."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from mechheads.cli_common import reported_errors, rich_table, sayer

app = typer.Typer(
    no_args_is_help=True,
    help="Read and write head files: retrieval-head maps, the LOCOS envelope, QRHead lists, DuoAttention tables.",
)

_CountOption = Annotated[int | None, typer.Option(min=1, help="Of the model; what the file shows if not given.")]


@app.command()
def formats(as_json: Annotated[bool, typer.Option("--json", help="Print them as JSON.")] = False) -> None:
    """List the head file formats that 'convert' reads and writes."""
    import pandas as pd

    from mechheads.head_files import HEAD_FILE_FORMATS

    if as_json:
        print(json.dumps(dict(HEAD_FILE_FORMATS)))
        return
    frame = pd.DataFrame({"format": list(HEAD_FILE_FORMATS), "what it is": list(HEAD_FILE_FORMATS.values())})
    sayer(False)(rich_table(frame, "Head file formats"))


@app.command()
def convert(
    source: Annotated[Path, typer.Argument(metavar="IN", help="The head file to read.")],
    target: Annotated[Path, typer.Argument(metavar="OUT", help="The head file to write.")],
    to: Annotated[
        str | None, typer.Option("--to", help="Format to write, of 'heads formats'; by OUT's extension if not given.")
    ] = None,
    read_as: Annotated[
        str | None, typer.Option("--from", help="Format to read; by IN's extension and content if not given.")
    ] = None,
    n_layers: _CountOption = None,
    n_heads: Annotated[
        int | None, typer.Option(min=1, help="Query heads a layer; needed to read a DuoAttention table.")
    ] = None,
    n_key_value_heads: Annotated[
        int | None, typer.Option(min=1, help="Key/value heads a layer; needed to write a DuoAttention table.")
    ] = None,
    kv_groups: Annotated[
        str | None, typer.Option(help="max (the default) or mean over a group's query heads, for a DuoAttention table.")
    ] = None,
    k: Annotated[int | None, typer.Option("--k", min=1, help="Write only the first k heads of a QRHead list.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print what was done as JSON, everything else on standard error.")
    ] = False,
) -> None:
    """Convert a head file, and say what the new format cannot hold.

    Example: mechheads heads convert scores-out/locos.parquet heads.yaml --k 16
    """
    from rich.markup import escape

    from mechheads.head_files import left_out, output_format, read_heads, write_heads

    say = sayer(as_json)
    with reported_errors():
        what = read_heads(
            source, format=read_as, n_layers=n_layers, n_heads=n_heads, n_key_value_heads=n_key_value_heads
        )
        format = output_format(what, target, to)
        duo = {"n_key_value_heads": n_key_value_heads if format == "duo" else None, "kv_groups": kv_groups}
        written = write_heads(what, target, format=format, k=k, **duo)
        summary = {
            "in": str(source), "out": str(written), "format": format, **_size(what),
            "left_out": left_out(what, format, k=k, **duo),
        }  # fmt: skip
        size = ", ".join(f"{count} {name.removeprefix('n_')}" for name, count in _size(what).items())
        say(f"{escape(str(source))} ({size}) written to {escape(str(written))} as {format}", soft_wrap=True)
        for phrase in summary["left_out"]:
            say(f"left out: {escape(phrase)}", soft_wrap=True)
        if as_json:
            print(json.dumps(summary))


def _size(what: Any) -> dict[str, int]:
    """How much was read."""
    from mechheads.heads import HeadSet

    if isinstance(what, HeadSet):
        return {"n_heads_listed": len(what)}
    return {"n_trials": what.shape[0], "n_layers": what.n_layers, "n_heads": what.n_heads}
