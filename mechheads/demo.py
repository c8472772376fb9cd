"""The demonstration: which heads retrieve a pass key, and what breaks when they are taken out."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from mechheads.analysis import CircuitAnalysis
from mechheads.datasets import needles, recall
from mechheads.errors import OutputNotWritable
from mechheads.interventions import mean_ablation
from mechheads.plots import ablation_curve, score_heatmaps
from mechheads.plots.style import plural
from mechheads.report import Section, write_report
from mechheads.result_files import write_atomically
from mechheads.scores import HeadScores, SweepResult
from mechheads.stats import topk_overlap
from mechheads.sweep_controls import random_heads

TESTED_K = 5
MAX_NEW_TOKENS = 12  # "The pass key is 48213." takes eleven
MAX_CONTROL_TOKENS = 6
BATCH = 20
METHODS = ["locos", "attention_spatial", "dla"]


@dataclass(frozen=True)
class DemoOptions:
    """Size of the demonstration; the defaults take about three minutes on two cores.

    Attributes:
        kind: Needle trials to use.
        n: Trials; half calibrate (choose heads), half test.
        context_length: Tokens of each prompt.
        n_control: Trials of the control task (recall of facts that are not in the context).
        draws: Random head sets.
        seed: Seed of trials and draws.
        chat: Ask through the chat template; None does so where the model has one.
    """

    kind: str = "passkey"
    n: int = 40
    context_length: int = 160
    n_control: int = 20
    draws: int = 7
    seed: int = 0
    chat: bool | None = None


@dataclass(frozen=True)
class DemoResult:
    """What the demonstration measured, and where it lies."""

    scores: dict[str, HeadScores]
    sweep: SweepResult
    summary: dict[str, Any]
    page: Path


def writable_folder(out: str | Path) -> Path:
    """The folder for results, made and tried before anything is computed.

    Raises:
        OutputNotWritable: Naming the folder and the reason.
    """
    path = Path(out)
    probe = path / ".mechheads-write-test"
    try:
        path.mkdir(parents=True, exist_ok=True)
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise OutputNotWritable(
            f"cannot write to the output folder {str(path)!r}: {error}. Choose another with --out."
        ) from error
    return path


def write_json(path: Path, value: Any) -> Path:
    """Write JSON whole or not at all."""
    text = json.dumps(value, indent=2) + "\n"

    def write(target: Path) -> None:
        target.write_text(text, encoding="utf-8")

    return write_atomically(path, write)


def run_demo(
    model: Any, out: str | Path, options: DemoOptions, *, say: Callable[[str], None], progress: bool | None = None
) -> DemoResult:
    """Score, ablate, and write the page, the tables and the figures' data to a folder.

    Args:
        model: Anything ``mh.load`` takes.
        out: Folder for the results.
        options: Sizes and seed.
        say: Told what is going on.
        progress: Show progress bars (None: only on a terminal).

    Raises:
        OutputNotWritable: Before anything is computed, if the folder cannot be written.
    """
    started = time.time()
    folder = writable_folder(out)
    say(f"loading {model!r} and checking that its parts add up")
    ca = CircuitAnalysis(model, progress=progress)
    if options.chat is None:
        options = replace(options, chat=ca.model.has_chat_template)
    trials = needles(
        options.kind, ca.model, n=options.n, context_length=options.context_length, seed=options.seed,
        chat=bool(options.chat),
    )  # fmt: skip
    control = recall(ca.model, n=options.n_control, seed=options.seed, split=None)
    calibration, test = trials.split("calibration"), trials.split("test")
    say(f"scoring {ca.model.spec.n_layers * ca.model.spec.n_heads} heads on {len(calibration)} calibration trials")
    scores = ca.score(METHODS, calibration, max_new_tokens=MAX_NEW_TOKENS, batch_size=BATCH)
    for name, one in scores.items():
        one.save(folder / f"{name}.parquet")
    _stop_if_interrupted(all(one.meta["complete"] for one in scores.values()))
    say(f"mean-ablating the best heads on {len(test)} test trials, with {options.draws} random sets")
    sweep = ca.sweep(
        {name: scores[name] for name in ("locos", "attention_spatial")},
        k=(0, 1, 2, TESTED_K),
        trials={options.kind: test, "recall": control},
        intervention=mean_ablation(site="z", reference=calibration),
        controls=random_heads(draws=options.draws, seed=options.seed, at=(TESTED_K,)),
        max_new_tokens={options.kind: MAX_NEW_TOKENS, "recall": MAX_CONTROL_TOKENS},
        batch_size=BATCH,
    )
    sweep.save(folder / "sweep.parquet")
    _stop_if_interrupted(sweep.meta["complete"])
    summary = summarise(scores, sweep, options)
    summary["seconds"] = round(time.time() - started, 1)
    write_json(folder / "summary.json", summary)
    sweep.curve("correct").to_csv(folder / "ablation.csv", index=False)
    page = _write_page(folder / "demo.html", scores, sweep, summary, options)
    return DemoResult(scores, sweep, summary, page)


def _stop_if_interrupted(complete: bool) -> None:
    """A demonstration on part of its trials would claim what it did not measure; the parts are on disk."""
    if not complete:
        raise KeyboardInterrupt


def summarise(scores: dict[str, HeadScores], sweep: SweepResult, options: DemoOptions) -> dict[str, Any]:
    """The numbers of the demonstration, with intervals, and whether each claim holds."""
    locos, attention = scores["locos"], scores["attention_spatial"]
    curve = sweep.curve("correct").set_index(["ranking", "task", "k"])

    def cell(ranking: str, task: str, k: int) -> dict[str, Any]:
        row = curve.loc[(ranking, task, k)]
        return {
            "mean": round(float(row["mean"]), 4),
            "ci": [round(float(row["ci_low"]), 4), round(float(row["ci_high"]), 4)],
            "n_trials": int(row["n_trials"]),
            "n_draws": int(row["n_draws"]),
        }

    kind = options.kind
    numbers = {
        "baseline": cell("locos", kind, 0),
        "locos": cell("locos", kind, TESTED_K),
        "attention_spatial": cell("attention_spatial", kind, TESTED_K),
        "random": cell("random", kind, TESTED_K),
        "recall_baseline": cell("locos", "recall", 0),
        "recall_locos": cell("locos", "recall", TESTED_K),
        "recall_attention_spatial": cell("attention_spatial", "recall", TESTED_K),
        "recall_random": cell("random", "recall", TESTED_K),
    }
    base = numbers["recall_baseline"]["mean"]
    able = numbers["baseline"]["mean"] >= 0.7  # nothing can be said to break in a model that cannot do the task
    claims = {
        "intact, it is right at least 0.7 of the time": able,
        f"without its top {TESTED_K} LOCOS heads, at most 0.1": able and numbers["locos"]["mean"] <= 0.1,
        f"without {TESTED_K} random heads, still at least 0.7": able and numbers["random"]["mean"] >= 0.7,
        "recall from memory keeps at least 0.7 of its baseline": numbers["recall_locos"]["mean"] >= 0.7 * base,
    }
    return {
        "model": locos.meta["model"],
        "options": asdict(options),
        "k": TESTED_K,
        "n_kept": locos.n_kept,
        "n_calibration": len(locos.trial_ids),
        "top": {name: one.top(10).labels for name, one in scores.items()},
        "top10_shared_by_locos_and_attention": topk_overlap(locos.mean(), attention.mean(), 10).count,
        "accuracy": numbers,
        "claims": claims,
    }


def verdict(summary: dict[str, Any]) -> list[str]:
    """The outcome in plain words, built from the numbers."""
    a, k = summary["accuracy"], summary["k"]
    lines = [
        f"Without ablation the model answers {_share(a['baseline'])} of the test questions.",
        f"With its {k} best LOCOS heads mean-ablated it answers {_share(a['locos'])}; with the {k} best heads by "
        f"attention alone, {_share(a['attention_spatial'])}; with {k} random heads, {_share(a['random'])} "
        f"(mean over {plural(a['random']['n_draws'], 'draw')} that never took a tested head).",
        f"Recall of facts that are not in the context: {_share(a['recall_baseline'])} without ablation, "
        f"{_share(a['recall_locos'])} with the LOCOS heads ablated.",
    ]
    failed = [claim for claim, holds in summary["claims"].items() if not holds]
    if failed:
        lines.append("Expected, and not found here: " + "; ".join(failed) + ".")
    else:
        lines.append("All that was expected was found: " + "; ".join(summary["claims"]) + ".")
    return lines


def _share(cell: dict[str, Any]) -> str:
    """``0.77 [0.60, 0.90]``."""
    low, high = cell["ci"]
    return f"{cell['mean']:.2f} [{low:.2f}, {high:.2f}]"


def accuracy_table(summary: dict[str, Any]) -> pd.DataFrame:
    """Accuracy by condition, on the task and on the control."""
    a, k = summary["accuracy"], summary["k"]
    rows = [
        ("no ablation", "baseline", "recall_baseline"),
        (f"top {k} by LOCOS", "locos", "recall_locos"),
        (f"top {k} by attention", "attention_spatial", "recall_attention_spatial"),
        (f"{k} random heads", "random", "recall_random"),
    ]
    return pd.DataFrame(
        [
            {"mean-ablated": name, summary["options"]["kind"]: _share(a[task]), "recall (control)": _share(a[control])}
            for name, task, control in rows
        ]
    )


def head_table(scores: dict[str, HeadScores]) -> pd.DataFrame:
    """The ten best heads of each method, with scores."""
    columns: dict[str, list[Any]] = {"rank": list(range(1, 11))}
    for name, one in scores.items():
        columns[name] = [f"{h} ({one.score_of(h):.3g})" for h in one.top(10)]
    return pd.DataFrame(columns)


def _write_page(
    path: Path, scores: dict[str, HeadScores], sweep: SweepResult, summary: dict[str, Any], options: DemoOptions
) -> Path:
    """One self-contained page."""
    locos, attention = scores["locos"], scores["attention_spatial"]
    n_cal, n_test = summary["n_calibration"], summary["accuracy"]["baseline"]["n_trials"]
    name = summary["model"]["name"]
    sections = [
        Section("Verdict", text=verdict(summary), verdict=True),
        Section(
            "Data",
            text=[
                f"{options.n} prompts{' (through the chat template)' if options.chat else ''} of "
                f"{options.context_length} tokens of ordinary prose with one needle in it, at varying depth.",
                f"{n_cal} calibration prompts choose the heads ({summary['n_kept']} answered rightly and kept); "
                f"{n_test} other prompts, with other needles, test them.",
                f"The control asks {options.n_control} facts that stand in no context.",
            ],
        ),
        Section(
            "Which heads retrieve",
            text=[
                "LOCOS asks what a head writes toward the answer when it reads the needle, less what it writes from "
                "everywhere else; attention_spatial asks the same of attention alone. Outlined are the "
                f"{TESTED_K} best of each. Of their ten best heads they share "
                f"{summary['top10_shared_by_locos_and_attention']}."
            ],
            figure=score_heatmaps([locos, attention], top=TESTED_K),
            figure_caption="Score of every head. Hover for the value, its interval and rank.",
            table=head_table(scores),
            table_caption="Ten best heads by each method, with their scores",
        ),
        Section(
            "What breaks without them",
            text=[
                "The k best heads of each ranking are set to their mean over the calibration prompts, at every "
                "position. An answer is right if it holds the gold answer as whole words."
            ],
            figure=ablation_curve(sweep, metric="correct"),
            figure_caption="Share of right answers against the number of ablated heads, with 95% intervals.",
            table=accuracy_table(summary),
            table_caption="Share of right answers, with 95% intervals over trials and random draws",
        ),
        Section(
            "Caveats",
            items=[
                "A pass key is copied word for word; this is literal retrieval, the easy kind.",
                "One model, one prompt format, one seed. Intervals are over trials only.",
                "How far attention's best heads matter too depends on the prompt: compare with --no-chat.",
                "LOCOS is shown as published, on the raw unembedding: its values rank heads, they are not shares of "
                "the logit (for those: unembed='normed').",
            ],
        ),
    ]
    flags = {
        "model": name,
        "kind": options.kind,
        "n": options.n,
        "context-length": options.context_length,
        "n-control": options.n_control,
        "draws": options.draws,
        "seed": options.seed,
    }
    chat = " --chat" if options.chat else " --no-chat"
    return write_report(
        path,
        title=f"Which heads of {name} retrieve?",
        question="Which attention heads find a pass key in a text, and does the model need them?",
        sections=sections,
        provenance={"scores": locos.meta, "sweep": sweep.meta, "seconds": summary.get("seconds")},
        commands=[
            "mechheads demo " + " ".join(f"--{k} {v}" for k, v in flags.items()) + chat,
        ],
    )
