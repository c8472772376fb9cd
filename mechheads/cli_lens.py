"""``mechheads lens``: fit a tuned lens to a model, and look at one."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from mechheads.cli_common import reported_errors, rich_table, sayer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="Tuned lenses: read a middle residual stream in the basis the unembedding expects.",
)

_JsonOption = Annotated[
    bool,
    typer.Option(
        "--json", help="Print what the lens is as JSON on standard output, everything else on standard error."
    ),
]


@app.command()
def fit(
    out: Annotated[
        Path, typer.Option("--out", "-o", help="File to write: .safetensors, .npz, or .pt as tuned-lens reads it.")
    ],
    model: Annotated[
        str, typer.Option("--model", "-m", help="'smollm2', a hub id such as Qwen/Qwen3-8B, or a local folder.")
    ] = "smollm2",
    text: Annotated[
        Path | None,
        typer.Option(help="Text file, or folder of .txt files, to fit on; the built-in prose (short) if not given."),
    ] = None,
    steps: Annotated[int, typer.Option(min=0, help="Training steps after the regression; 0 for the regression.")] = 250,
    tokens: Annotated[int, typer.Option(min=1, help="Positions to fit on, at most.")] = 8192,
    lr: Annotated[float, typer.Option(help="Learning rate at the start; it falls to zero.")] = 3e-4,
    batch: Annotated[int, typer.Option(min=1, help="Positions a step.")] = 64,
    holdout: Annotated[int, typer.Option(min=1, help="Held-out positions the KL is reported on.")] = 256,
    context: Annotated[int, typer.Option(min=2, help="Tokens the model reads at a time.")] = 128,
    init: Annotated[str, typer.Option(help="Where training starts: least_squares or identity.")] = "least_squares",
    seed: Annotated[int, typer.Option(min=0, help="Of every draw; the same seed gives the same lens.")] = 0,
    dtype: Annotated[
        str | None, typer.Option(help="Weight type: float32, bfloat16, float16; as stored if not given.")
    ] = None,
    as_json: _JsonOption = False,
) -> None:
    """Fit a tuned lens on text, and say how well it reads text it has not seen.

    Prints for each residual stream the mean KL divergence from the model's own prediction, in nats a token, of the
    logit lens and of the tuned lens. A stream that the lens reads worse is marked.

    Example: mechheads lens fit -m smollm2 --text books/ -o lens.safetensors
    """
    from rich.markup import escape

    from mechheads.lens_files import check_lens_path
    from mechheads.lens_fit import fit_lens, haystack_texts
    from mechheads.model import load

    say = sayer(as_json)
    with reported_errors():
        check_lens_path(out)
        texts = haystack_texts(text)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        loaded = load(model, dtype=dtype)
        with _bars() as report:
            found = fit_lens(
                loaded, texts, steps=steps, tokens=tokens, lr=lr, batch=batch, seed=seed, holdout=holdout,
                init=init, context=context, progress=report,
            )  # fmt: skip
        path = found.lens.save(out)
        say(rich_table(_columns(found.to_frame()), _title(found.lens)))
        say(f"Fitted on {found.n_train} positions. Written to [bold]{escape(str(path))}[/bold]", soft_wrap=True)
        if as_json:
            print(json.dumps(found.lens.describe()))


@app.command()
def show(
    file: Annotated[Path, typer.Argument(help="A lens file, or the folder of a published one.")],
    layout: Annotated[
        str | None, typer.Option(help="What the matrices mean, if the file does not show it: residual or full.")
    ] = None,
    reads: Annotated[
        str | None, typer.Option(help="Which stream translator i reads: entering (the usual) or leaving block i.")
    ] = None,
    as_json: _JsonOption = False,
) -> None:
    """Show what a lens file holds: its sizes, how far each translator is from the identity, and its KL if known."""
    from rich.markup import escape

    from mechheads.lens_files import load_lens

    say = sayer(as_json)
    with reported_errors():
        lens = load_lens(file, layout=layout, reads=reads)
        say(f"[bold]{escape(lens.name)}[/bold]: {lens.n_layers} layers, d_model {lens.d_model}, hash {lens.hash}")
        say(escape(lens.convention), soft_wrap=True)
        say(rich_table(_columns(_sizes(lens)), _title(lens)))
        if as_json:
            print(json.dumps(lens.describe()))


def _title(lens: Any) -> str:
    """A caption that says what the columns are measured in."""
    held = lens.meta.get("n_holdout")
    over = "" if held is None else f"; KL in nats a token over {held} held-out positions"
    return f"Streams of {lens.name}{over}"


def _sizes(lens: Any) -> Any:
    """A row a stream: how far its translator is from the identity, and its KL where the file records it."""
    import pandas as pd

    from mechheads.lens_fit import kl_frame

    frame = pd.DataFrame(
        {
            "stream": range(lens.first, lens.n_layers),
            # Root mean square of the singular values of A: how much of a random stream's length is added.
            "size of A": (lens.weights.square().sum((-2, -1)) / lens.d_model).sqrt().tolist(),
            "length of b": lens.biases.norm(dim=-1).tolist(),
        }
    )
    return frame.merge(kl_frame(lens.meta), on="stream") if "kl" in lens.meta else frame


def _columns(frame: Any) -> Any:
    """The frame for people: a stream that is read worse is called out, the others are not."""
    if "worse" not in frame:
        return frame
    return frame.assign(worse=["worse than the logit lens" if w else "" for w in frame["worse"]])


@contextmanager
def _bars() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar for each kind of work that reports."""
    from mechheads.progress import Advance, progress_bar

    done: dict[str, tuple[Advance, int]] = {}
    with ExitStack() as stack:

        def report(what: str, at: int, total: int) -> None:
            # Work of the same name begins again: its bar is full already.
            if what not in done or at <= done[what][1]:
                stack.close()
                done[what] = (stack.enter_context(progress_bar(what, total)), 0)
            advance, before = done[what]
            advance(at - before)
            done[what] = (advance, at)

        yield report
