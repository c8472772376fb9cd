"""``mechheads prune``: a model without some heads, written as a Hugging Face folder."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mechheads.cli_common import DtypeOption, JsonOption, reported_errors, sayer
from mechheads.errors import InvalidInput

if TYPE_CHECKING:
    from mechheads.heads import HeadSet
    from mechheads.model import Model


def prune(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="'nano', 'smollm2', a hub id such as Qwen/Qwen3-8B, or a local folder."),
    ],
    heads: Annotated[
        str,
        typer.Argument(metavar="HEADS", help="Heads such as 'L1H2, L3H4', or a head file or saved scores (with --k)."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the pruned model; must be new or empty.")],
    k: Annotated[int | None, typer.Option("--k", min=1, help="Of a file: its first k heads, best first.")] = None,
    method: Annotated[
        str,
        typer.Option(
            help="auto: leave out what the configuration can say, mask the rest; masked: zero all of them and leave "
            "heads their numbers; physical: refuse unless all can be left out."
        ),
    ] = "auto",
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace a pruned model in the folder.")] = False,
    verify: Annotated[
        bool,
        typer.Option(help="Load the folder again and compare logits; takes the memory of a second model."),
    ] = True,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write a model without some of its heads, for other tools to load.

    The folder's logits are those of the model with these heads zero-ablated. What was left out, what was masked
    and why is printed, and stands in the folder.

    Example: mechheads prune smollm2 "L0H0, L0H1, L0H2" --out pruned/
    """
    from rich.markup import escape

    from mechheads.model import load
    from mechheads.pruned_models import save_pruned

    os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
    say = sayer(as_json)
    with reported_errors():
        loaded = load(model, dtype=dtype)
        record = save_pruned(
            loaded, _read_heads(heads, loaded, k), out, method=method, overwrite=overwrite, verify=verify
        )
        say(f"{escape(str(out))}: {escape(record.summary())}", soft_wrap=True)
        if record.logit_error is not None:
            say(f"loaded again: logits within {record.logit_error:.1e} of the zero-ablated model's")
        if as_json:
            print(json.dumps({"out": str(out), **record.to_dict()}))


def _read_heads(heads: str, model: Model, k: int | None) -> HeadSet:
    """Heads from the command line, or the first of a file.

    Raises:
        InvalidInput: If a file of scores comes without ``k``, ``k`` without a file, or the file has fewer heads.
    """
    from mechheads.head_files import read_heads
    from mechheads.heads import HeadSet

    if not Path(heads).is_file():
        if k is not None:
            raise InvalidInput(f"--k goes with a file of heads, but there is no file {heads!r}; name the heads alone.")
        return HeadSet.parse(heads)
    spec = model.spec
    found = read_heads(heads, n_layers=spec.n_layers, n_heads=spec.n_heads, n_key_value_heads=spec.n_key_value_heads)
    if not isinstance(found, HeadSet):
        if k is None:
            raise InvalidInput(f"{heads} holds scores of every head; say how many of the best to prune with --k.")
        return found.top(k)
    if k is not None and k > len(found):
        raise InvalidInput(f"--k is {k}, but {heads} lists {len(found)} heads.")
    return HeadSet(list(found)[:k])
