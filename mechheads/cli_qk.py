"""``mechheads qk``: logic heads, from scores to a page."""

from __future__ import annotations

import json
import shlex
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mechheads.cli_common import (
    BatchOption,
    DtypeOption,
    JsonOption,
    ModelOption,
    OutOption,
    SeedOption,
    load_analysis,
    reported_errors,
    rich_table,
    sayer,
)
from mechheads.errors import InvalidInput, ResultFileError, UnknownName

if TYPE_CHECKING:
    from mechheads.candidate_scores import CandidateScores
    from mechheads.trials import TrialSet

app = typer.Typer(
    name="qk",
    help="Logic heads by QK-score: score, select, evaluate, or the whole protocol on one page (report).",
    no_args_is_help=True,
    rich_markup_mode="rich",
)
LOADERS = ("prontoqa", "prontoqa_ood", "pararule_plus", "multi_logieval", "folio", "proofwriter")
DataOption = Annotated[
    list[str] | None,
    typer.Option(
        "--data",
        "-d",
        help="'worlds' (made here), 'LOADER:PATH' with a loader of prontoqa, prontoqa_ood, pararule_plus, "
        "multi_logieval, folio, proofwriter, or a file that TrialSet.save wrote. Repeat for several. Default: worlds.",
    ),
]
NQuestions = Annotated[
    int | None, typer.Option("--n", min=4, help="Questions of each data set; 800 worlds, all of a file.")
]
RulesOption = Annotated[
    str, typer.Option(help="Rules of the worlds, with commas, or 'all'.")
]  # fmt: skip
DepthOption = Annotated[str, typer.Option(help="Depths of the worlds, with commas.")]
DistractorsOption = Annotated[str, typer.Option(help="Numbers of distractors of the worlds, with commas.")]
TemplateOption = Annotated[
    str | None, typer.Option(help="Prompt template: base, chat, nano, options, or a YAML file; the model's default.")
]
RotaryOption = Annotated[bool, typer.Option("--rotary/--no-rotary", help="Queries and keys after or before rotation.")]
OffsetOption = Annotated[
    str, typer.Option(help="'median' takes off each head's standing preference for an answer; 'none' does not.")
]
ScoresArgument = Annotated[Path, typer.Argument(help="Scores that 'mechheads qk score' wrote.")]
KOption = Annotated[int, typer.Option("--k", "-k", min=1, help="How many heads.")]


@app.command()
def score(
    model: ModelOption = "nano-logic",
    data: DataOption = None,
    out: Annotated[Path, typer.Option("--out", "-o", help="Parquet file for the scores.")] = Path("qk.parquet"),
    n: NQuestions = None,
    rules: RulesOption = "modus_ponens",
    depth: DepthOption = "1,2,3",
    distractors: DistractorsOption = "0,2",
    template: TemplateOption = None,
    rotary: RotaryOption = True,
    seed: SeedOption = 0,
    batch_size: BatchOption = 16,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """Score every head for every candidate answer: one prefill a question."""
    from rich.markup import escape

    say = sayer(as_json)
    with reported_errors():
        names = data or ["worlds"]
        if len(names) > 1:
            raise InvalidInput(
                f"{len(names)} data sets are named; score them one by one, or use 'mechheads qk report'."
            )
        ca = load_analysis(model, dtype)
        trials = logic_data(
            names[0], ca.model, n=n, rules=rules, depth=depth, distractors=distractors, template=template, seed=seed
        )
        scores = ca.score("qk", trials, rotary=rotary, batch_size=batch_size)
        path = scores.save(out)
        judged = scores.judge(seed=seed)
        say(escape(f"{scores!r}\n{judged.verdict()}"))
        for text in judged.warnings:
            say(escape(f"warning: {text}"))
        say(escape(f"Scores are in {path}."), soft_wrap=True)
        if as_json:
            print(json.dumps({"scores": str(path), **judged.to_dict()}))


@app.command()
def select(
    scores: ScoresArgument,
    k: KOption = 5,
    by: Annotated[str, typer.Option(help="'accuracy' or 'auroc'.")] = "accuracy",
    offset: OffsetOption = "none",
    inverse: Annotated[bool, typer.Option("--inverse", help="The heads most reliably wrong instead.")] = False,
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Choose the k best heads on the calibration questions, and say how they do on the others."""
    from mechheads.candidate_scores import CandidateScores

    say = sayer(as_json)
    with reported_errors():
        found = CandidateScores.load(scores)
        heads = found.select(k, split="calibration" if found.splits else None, by=by, offset=offset, inverse=inverse)
        judged = found.judge(offset=offset, seed=seed)
        frame = judged.frame().set_index("label").loc[heads.labels].reset_index()
        shown = frame[["label", "accuracy_calibration", "accuracy", "ci_low", "ci_high", "auroc", "p", "p_inverse"]]
        say(rich_table(shown, f"The {k} heads chosen, and held-out questions"))
        say(judged.verdict(), markup=False)
        if as_json:
            print(json.dumps({"heads": heads.labels, "rows": json.loads(frame.to_json(orient="records"))}))
        else:
            print(" ".join(heads.labels))


@app.command()
def evaluate(
    scores: ScoresArgument,
    heads: Annotated[
        str, typer.Option(help="Heads, such as 'L2H1, L3H0'; the k best of calibration if not given.")
    ] = "",
    inverse: Annotated[str, typer.Option(help="Those of them whose sign is turned.")] = "",
    k: KOption = 5,
    by: Annotated[str | None, typer.Option(help="Break down by depth, distractors or rule; all of them.")] = None,
    offset: OffsetOption = "none",
    seed: SeedOption = 0,
    as_json: JsonOption = False,
) -> None:
    """Heads on held-out questions against the model's own output, by depth, distractors and rule."""
    from mechheads.candidate_scores import CandidateScores
    from mechheads.verdicts import evaluate as evaluate_heads
    from mechheads.verdicts import offsets

    say = sayer(as_json)
    with reported_errors():
        found = CandidateScores.load(scores)
        _need_splits(found, scores)
        calibration, test = found.split("calibration"), found.split("test")
        chosen = heads or calibration.select(k, split=None, offset=offset)
        result = evaluate_heads(
            test, chosen, by=by, inverse=inverse or (), offset=offsets(calibration, offset), calibration=calibration,
            seed=seed,
        )  # fmt: skip
        columns = ["by", "value", "scorer", "n", "accuracy", "ci_low", "ci_high", "difference", "p_holm"]
        say(rich_table(result.frame()[columns], "Held-out accuracy, and the difference from the model's own output"))
        say(result.summary(), markup=False)
        if as_json:
            print(json.dumps(result.to_dict()))


@app.command()
def report(
    model: ModelOption = "nano-logic",
    data: DataOption = None,
    out: OutOption = Path("qk-out"),
    k: KOption = 5,
    n: NQuestions = None,
    rules: RulesOption = "modus_ponens",
    depth: DepthOption = "1,2,3",
    distractors: DistractorsOption = "0,2",
    template: TemplateOption = None,
    rotary: RotaryOption = True,
    offset: OffsetOption = "none",
    draws: Annotated[int, typer.Option(min=1, help="Random head sets of the pruning check.")] = 7,
    premise_questions: Annotated[
        int, typer.Option(min=0, help="Held-out questions on which premises are taken away.")
    ] = 60,
    prune: Annotated[bool, typer.Option("--prune/--no-prune", help="Prune the best heads against random ones.")] = True,
    debias: Annotated[
        bool, typer.Option("--debias/--no-debias", help="Ask label-flipped twins and bare statements.")
    ] = True,
    seed: SeedOption = 0,
    batch_size: BatchOption = 16,
    dtype: DtypeOption = None,
    as_json: JsonOption = False,
) -> None:
    """The whole protocol: score, choose, test, doubt, prune, take premises away; one page.

    Writes qk.html (opens with no network), qk.json, a table of heads and the scores of every data set. A second run
    into the same folder reads the scores and repeats the rest.
    """
    from rich.markup import escape

    from mechheads.analysis import CircuitAnalysis
    from mechheads.qk_study import QKOptions, run_qk
    from mechheads.qk_summary import verdict

    say = sayer(as_json)
    with reported_errors():
        options = QKOptions(
            k=k, rotary=rotary, offset=offset, prune=None if prune else (), draws=draws,
            premise_questions=premise_questions, debias=debias, seed=seed, batch_size=batch_size,
        )  # fmt: skip
        loaded = load_analysis(model, dtype).model
        ca = CircuitAnalysis(loaded, store=out / "store")
        sets = {}
        for name in data or ["worlds"]:
            trials = logic_data(
                name, loaded, n=n, rules=rules, depth=depth, distractors=distractors, template=template, seed=seed
            )
            sets[_short(name, sets)] = trials
        result = run_qk(
            ca, sets, out, options, commands=[_command()], say=lambda text: say(f"[dim]{escape(text)}[/dim]")
        )
        for text in verdict(result.sets, result.transfer, options):
            say(escape(text))
        page = escape(str(result.page))
        say(f"\n{result.summary['seconds']} s. Open [bold]{page}[/bold] in a browser.", soft_wrap=True)
        if as_json:
            print(json.dumps(result.summary))


def _command() -> str:
    """The command line as it was typed."""
    import sys

    return shlex.join(["mechheads", *sys.argv[1:]])


def _need_splits(found: CandidateScores, path: Path) -> None:
    if not {"calibration", "test"} <= set(found.splits):
        raise InvalidInput(
            f"{path} has the splits {found.splits}; heads are chosen on 'calibration' and evaluated on 'test'."
        )


def _short(name: str, taken: dict[str, Any]) -> str:
    """A name for a data set, from the option: its loader, or its file's stem; numbered if it is taken."""
    loader, _, rest = name.partition(":")
    base = loader if rest and loader in LOADERS else Path(name).stem
    made, i = base, 2
    while made in taken:
        made, i = f"{base} {i}", i + 1
    return made


def logic_data(
    name: str, model: Any, *, n: int | None, rules: str, depth: str, distractors: str, template: str | None, seed: int
) -> TrialSet:
    """Logic trials by the name the command line gives them."""
    from mechheads import datasets
    from mechheads.trials import is_trial_file

    loader, _, path = name.partition(":")
    if name == "worlds":
        wanted: Any = rules if rules == "all" else tuple(r.strip() for r in rules.split(","))
        return datasets.prontoqa(
            model, n=n or 800, rules=wanted, depth=_numbers("depth", depth),
            distractors=_numbers("distractors", distractors), template=template, seed=seed,
        )  # fmt: skip
    if path and loader in LOADERS:
        return getattr(datasets, loader)(model, path=path, n=n, template=template, seed=seed)
    if is_trial_file(name):
        if n is not None or template is not None:
            warnings.warn(f"{name} holds finished trials; --n and --template do not change them.", stacklevel=2)
        return _finished(name)
    raise UnknownName(
        "data set", loader, ("worlds", *LOADERS), hint="Write LOADER:PATH, such as folio:data/folio.jsonl."
    )


def _finished(name: str) -> TrialSet:
    """Trials of a file, which must be one of ours."""
    from mechheads.trials import TrialSet

    try:
        return TrialSet.load(name)
    except ResultFileError as error:
        cause = error.__cause__
        if cause is None or isinstance(cause, OSError) or b"mechheads_trials" in Path(name).read_bytes()[:100]:
            raise  # missing, not readable, or ours and damaged: that is said already
        raise InvalidInput(
            f"{name} is no file of finished trials. --data takes 'worlds', a file that TrialSet.save wrote, or, for a "
            f"data set's own file, its loader as well: LOADER:PATH, such as folio:{name}."
        ) from error


def _numbers(name: str, text: str) -> tuple[int, ...]:
    """Whole numbers with commas between them."""
    try:
        return tuple(int(x) for x in text.split(","))
    except ValueError:
        raise InvalidInput(f"--{name} is {text!r}; write whole numbers with commas, such as 1,2,3.") from None
