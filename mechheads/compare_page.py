"""A comparison of detectors in tables and on one page."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mechheads.agreement import Dissociation
from mechheads.compare_summary import share, verdict
from mechheads.methods.registry import get_method
from mechheads.plots import (
    ablation_forest,
    agreement_matrix,
    kv_group_view,
    layer_profile,
    method_scatter,
    overlap_curves,
    score_heatmaps,
)
from mechheads.plots.style import MISSING, display_name
from mechheads.report import Section, write_report
from mechheads.result_files import write_atomically
from mechheads.scores import HeadScores

if TYPE_CHECKING:
    from mechheads.compare import CompareOptions, TaskResult


# -- tables -------------------------------------------------------------------------------------


def method_table(numbers: Mapping[str, Any], k: int) -> pd.DataFrame:
    """One row a detector: what its k best heads cost, most costly first."""
    rows = []
    for name, m in _by_cost(numbers):
        if "ablated" in m:
            low, high = m["beyond_random_ci"]
            beyond = f"{m['beyond_random']:.2f}" + ("" if low is None else f" [{low:.2f}, {high:.2f}]")
            rows.append(
                {
                    "detector": name,
                    f"right without its {k}": share(m["ablated"]),
                    "cost beyond random": beyond,
                    "corrected": MISSING if m["beyond_random_ci_corrected"][0] is None else _interval(m),
                    "control": share(m["control"]),
                }
            )
    return pd.DataFrame(rows)


def _interval(method: Mapping[str, Any]) -> str:
    """The interval corrected for the number of detectors."""
    low, high = method["beyond_random_ci_corrected"]
    return f"[{low:.2f}, {high:.2f}]"


def ranking_table(numbers: Mapping[str, Any], k: int) -> pd.DataFrame:
    """One row a detector: its k best heads, and how sure its ranking is."""
    rows = []
    for name, m in _by_cost(numbers):
        needed = m["trials_for_0.9"]
        rows.append(
            {
                "detector": name,
                f"best {k} heads": " ".join(m["top"]) + (f" ({m['ties']} of them tied)" if m["ties"] else ""),
                "trials": m["n_kept"],
                "reliable": MISSING if m["reliability"] is None else f"{m['reliability']:.2f}",
                "for 0.9": MISSING if needed is None else str(needed),
            }
        )
    return pd.DataFrame(rows)


def _by_cost(numbers: Mapping[str, Any]) -> list[tuple[str, dict[str, Any]]]:
    return sorted(numbers["methods"].items(), key=lambda item: -item[1].get("cost", 0.0))


def write_tables(folder: Path, results: Mapping[str, TaskResult], summary: Mapping[str, Any]) -> None:
    """compare.csv (a row a task and detector), agreement.csv (a row a pair and statistic)."""
    rows, pairs = [], []
    for task, one in results.items():
        for name, m in summary["tasks"][task]["methods"].items():
            flat = {k: v for k, v in m.items() if not isinstance(v, (dict, list))}
            ablated = {f"{what}_mean": m[what]["mean"] for what in ("ablated", "control") if what in m}
            rows.append({"task": task, "method": name, **flat, **ablated, "top": " ".join(m["top"])})
        if one.agreement is not None:
            pairs.append(one.agreement.to_frame().assign(task=task))
    _write_csv(folder / "compare.csv", pd.DataFrame(rows))
    if pairs:
        _write_csv(folder / "agreement.csv", pd.concat(pairs, ignore_index=True))


def _write_csv(path: Path, frame: pd.DataFrame) -> None:
    def write(target: Path) -> None:
        frame.to_csv(target, index=False)

    write_atomically(path, write)


# -- the page -----------------------------------------------------------------------------------


def write_page(
    path: Path,
    results: Mapping[str, TaskResult],
    apart: Dissociation | None,
    summary: Mapping[str, Any],
    options: CompareOptions,
) -> Path:
    """One self-contained page."""
    name = summary["model"]["name"]
    sections = [Section("Verdict", text=verdict(summary), verdict=True), _data_section(summary, options)]
    for task, one in results.items():
        sections += _task_sections(task, one, summary["tasks"][task], summary["k"])
    if apart is not None:
        sections.append(_apart_section(apart))
    sections.append(Section("Caveats", items=_caveats(results, summary, options)))
    flags = {
        "model": shlex.quote(name),
        **{"n": options.n, "context-length": options.context_length, "k": summary["k"], "draws": options.draws},
        "n-control": options.n_control,
        "seed": options.seed,
    }
    repeated = "".join(f" --task {shlex.quote(t)}" for t in options.tasks) + "".join(
        f" --method {m}" for m in options.methods
    )
    return write_report(
        path,
        title=f"Which heads of {name} retrieve?",
        question="Which attention heads retrieve in this model, how far do published detectors agree on them, and "
        "whose heads matter?",
        sections=sections,
        provenance={
            **{f"{t} {n}": s.meta for t, one in results.items() for n, s in one.scores.items()},
            **{f"{t} ablation": one.sweep.meta for t, one in results.items() if one.sweep is not None},
            "seconds": summary["seconds"],
        },
        commands=[
            "mechheads compare " + " ".join(f"--{k} {v}" for k, v in flags.items()) + repeated
            + (" --chat" if options.chat else "")
        ],
    )  # fmt: skip


def _data_section(summary: Mapping[str, Any], options: CompareOptions) -> Section:
    told = []
    for task, numbers in summary["tasks"].items():
        low, high = numbers["prompt_tokens"]
        tested = f", {numbers['baseline']['n_trials']} others test them" if "baseline" in numbers else ""
        kept = "" if numbers["n_kept"] is None else f" ({numbers['n_kept']} answered rightly)"
        told.append(
            f"{task}: prompts of {low if low == high else f'{low} to {high}'} tokens; {numbers['n_calibration']} "
            f"calibration trials{kept} choose the heads{tested}."
        )
    papers = [
        f"{name}: {first_line(get_method(name).function.__doc__)}"
        + (f" ({get_method(name).paper})" if get_method(name).paper else "")
        for name in options.methods
    ]
    return Section(
        "Data and detectors",
        text=[
            f"The control asks {options.n_control} facts that stand in no context. All detectors that read the trials "
            "share one capture."
        ],
        items=[*told, *papers],
    )


def first_line(text: str | None) -> str:
    """The first sentence of a docstring."""
    return " ".join((text or "").strip().split("\n\n")[0].split()).rstrip(".").replace("``", "") + "."


def _task_sections(task: str, one: TaskResult, numbers: Mapping[str, Any], k: int) -> list[Section]:
    usable = {name: one.scores[name] for name in one.ranked}
    if not usable:
        return [Section(f"{display_name(task)}: nothing to rank", items=[f"{n}: {w}" for n, w in one.unranked.items()])]
    sections = []
    if one.sweep is not None:
        sections.append(
            Section(
                f"{display_name(task)}: whose heads matter",
                text=[
                    f"The {k} best heads of each detector are set to their mean over the calibration prompts, at every "
                    "position; an answer is right if it holds the gold answer as whole words. Cost beyond random is "
                    f"the paired difference to {k} random heads, positive if the detector's heads cost more; its "
                    "interval asks whether they cost more than one random set, not than the average of several."
                ],
                figure=ablation_forest(one.sweep, k=k, metric="correct"),
                figure_caption=f"Right answers without the {k} best heads of each detector, with 95% intervals.",
                table=method_table(numbers, k),
                table_caption=f"Detectors on {task}, by what taking out their {k} best heads costs",
            )
        )
    if one.agreement is not None:
        sections.append(_agreement_section(task, one, usable, k))
    sections.append(_maps_section(task, usable, numbers, k))
    return sections


def _agreement_section(task: str, one: TaskResult, usable: Mapping[str, HeadScores], k: int) -> Section:
    assert one.agreement is not None and one.consensus is not None
    first = next(iter(usable))
    second = "attention_spatial" if "attention_spatial" in usable and first != "attention_spatial" else list(usable)[1]
    shared = one.consensus.frame.head(2 * k)[["label", "count", "mean_rank", "which"]]
    shared = shared.rename(
        columns={"label": "head", "count": "detectors", "mean_rank": "mean rank", "which": "found by"}
    )
    return Section(
        f"{display_name(task)}: which detectors agree",
        text=[
            f"Rank correlation over the heads that both score, and how many of the {k} best are shared. Intervals "
            "are over trials; detectors scored on the same trials are resampled together."
        ],
        figure=[
            agreement_matrix(one.agreement, "spearman"),
            agreement_matrix(one.agreement, "overlap", k=k),
            overlap_curves(usable, reference=first),
            method_scatter(usable[first], usable[second], k=k),
        ],
        figure_caption=[
            "Spearman correlation of the scores.",
            f"Heads shared by the {k} best of each.",
            f"Share of the top k that each detector has in common with {first}.",
            f"Every head under {first} and {second}; hover names it.",
        ],
        table=shared,
        table_caption=f"Heads that most detectors have among their {k} best",
    )


def _maps_section(task: str, usable: Mapping[str, HeadScores], numbers: Mapping[str, Any], k: int) -> Section:
    figures = [score_heatmaps(list(usable.values()), top=k), layer_profile(usable, k=k)]
    captions = [
        f"Score of every head by each detector; the {k} best outlined.",
        "Where in depth the scores lie.",
    ]
    first = next(iter(usable.values()))
    groups = first.meta["model"].get("n_key_value_heads")
    if groups and groups < first.n_heads:
        figures.append(kv_group_view(first))
        captions.append(f"Key/value groups by {first.method}: what a KV cache can keep or drop.")
    return Section(
        f"{display_name(task)}: the heads",
        text=[
            "Reliable is the rank correlation between the rankings of two halves of a detector's trials (for "
            "random-token "
            "scores, of its sequences), stepped up to all of them; beside it, the trials at which it would reach 0.9 "
            "(past the trials here an extrapolation)."
        ],
        figure=figures,
        figure_caption=captions,
        table=ranking_table(numbers, k),
        table_caption=f"The {k} best heads of each detector, and how sure its ranking is",
    )


def _apart_section(apart: Dissociation) -> Section:
    frame = apart.frame.loc[apart.frame["call"] != ""] if "call" in apart.frame else apart.frame
    columns = [c for c in ("label", "difference", "ci_low", "ci_high", "call") if c in frame]
    return Section(
        "Heads of one task against heads of the other",
        text=[
            f"{apart.names[0]} against {apart.names[1]}: scores over their standard deviation, first less second; a "
            "call is made only where a band over all heads excludes zero."
        ],
        table=frame[columns].head(30),
        table_caption="Heads with a call",
    )


def _caveats(results: Mapping[str, TaskResult], summary: Mapping[str, Any], options: CompareOptions) -> list[str]:
    out = [
        "One model, one prompt format, one seed. Intervals are over trials, and where random heads are concerned "
        "over draws too.",
        f"Each detector is judged by its {summary['k']} best heads alone; it can be right about heads further down.",
        "Induction, previous-token, duplicate-token and weight-only scores do not claim to find retrieval heads; they "
        "show what those would give.",
        "LOCOS and DLA are shown as published, on the raw unembedding: their values rank heads, they are not shares of "
        "the logit (for those: unembed='normed').",
    ]
    for task, numbers in summary["tasks"].items():
        if numbers["n_kept"] is not None and 0 < numbers["n_kept"] < 10:
            out.append(
                f"On {task} only {numbers['n_kept']} calibration trials were answered rightly: rankings are noisy."
            )
        base = numbers.get("baseline")
        if base is not None and base["mean"] < 0.5:
            out.append(
                f"On {task} the model answers only {base['mean']:.2f} of the questions, so there is little to break "
                "and intervals are wide."
            )
        for name, m in numbers["methods"].items():
            if m["ties"]:
                out.append(
                    f"On {task}, {m['ties']} of the {summary['k']} best heads of {name} tie with others; which of them "
                    "were taken out is an accident of their order."
                )
        out += numbers.get("caveats", [])
    return out
