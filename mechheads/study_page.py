"""A study on one page: question, plan, curves, controls, statistics, what it says and what it does not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
import plotly.graph_objects as go

from mechheads.engines import EngineReport
from mechheads.errors import InvalidInput
from mechheads.plots import (
    ablation_curve,
    control_scatter,
    dose_response_plot,
    intervention_curves,
    necessity_curves,
)
from mechheads.report import Section, write_report
from mechheads.study import Study
from mechheads.study_fields import InterventionPart
from mechheads.study_parts import Prepared
from mechheads.study_summary import SHARE, StudyStats
from mechheads.study_tables import (
    agreement_rows,
    area_rows,
    as_table,
    comparison_rows,
    dissociation_rows,
    listed,
    side_rows,
)
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.tasks import METRICS

_MOST_FAILURES = 30
_FIRST_HEADS = 5
_MOST_LABELS = 6  # side by side in one figure

Drawn = tuple[go.Figure, str]


def write_study_page(
    path: Path,
    study: Study,
    ready: Prepared,
    sweeps: SweepSet,
    report: EngineReport,
    stats: StudyStats,
    summary: Mapping[str, Any],
    commands: Sequence[str],
) -> Path:
    """One self-contained page; see ``run_study``.

    Raises:
        OutputNotWritable: If the folder cannot be written.
    """
    page = _Page(study, ready, sweeps, report, stats, str(summary["model"]["name"]))
    sections = [
        page.verdict(), page.plan(), *page.curves(), *page.interventions(), *page.sides(), *page.controls(),
        *page.statistics(), *page.agreement(), *page.other_metrics(), *page.failures(), page.caveats(),
    ]  # fmt: skip
    return write_report(
        path,
        title=f"{study.name}: ablating heads of {page.model}",
        question=page.question(),
        sections=sections,
        provenance={
            "study": summary["study"], "model": summary["model"], "plan": summary["plan"], "tasks": summary["tasks"],
            "sweeps": {label: sweep.meta for label, sweep in sweeps.items()}, "seconds": summary["seconds"],
        },
        commands=commands,
    )  # fmt: skip


def _section(heading: str, found: Sequence[Drawn], **parts: Any) -> Section:
    """A section with figures and their captions, as many as there are."""
    if not found:
        return Section(heading, **parts)
    return Section(
        heading, figure=[figure for figure, _ in found], figure_caption=[caption for _, caption in found], **parts
    )


class _Page:
    """The sections of one study's page."""

    def __init__(
        self, study: Study, ready: Prepared, sweeps: SweepSet, report: EngineReport, stats: StudyStats, model: str
    ):
        self.study, self.ready, self.sweeps = study, ready, sweeps
        self.report, self.stats, self.model = report, stats, model
        self.targets = study.targets
        self.others = [name for name in ready.tasks if name not in self.targets]
        self.missed: list[str] = []

    def question(self) -> str:
        names = listed(list(self.study.rankings))
        need = listed(self.targets)
        spared = f", while {listed(self.others)} survive{'s' if len(self.others) == 1 else ''}" if self.others else ""
        which = f"Which ranking's heads does {self.model} need" if len(self.study.rankings) > 1 else (
            f"Does {self.model} need the heads that {names} ranks first"
        )  # fmt: skip
        return f"{which} for {need}, more than it needs random heads{spared}?"

    def verdict(self) -> Section:
        told = [self.stats.verdict[name] for name in self.targets]
        if self.others:
            told.append("Shares lost on other tasks are each of that task's own first metric.")
        if self.report.failed or self.report.left:
            told.append(
                f"{_missing(len(self.report.failed) + self.report.left)} not there; what is said rests on the others."
            )
        return Section("Verdict", text=told, verdict=True)

    def plan(self) -> Section:
        count = self.ready.plan.count(heads_per_block=self.study.heads_per_block)
        items = [
            f"Ranking {text}; first {' '.join(self.ready.heads[text.split(':')[0]].labels[:_FIRST_HEADS])}."
            for text in self.ready.notes
            if text.split(":")[0] in self.study.rankings
        ]
        items += [f"Intervention {_intervention(part)}." for part in self.study.interventions]
        items += [f"k: {', '.join(str(k) for k in self.ready.plan.ks if k)} heads."]
        items += [f"Controls: {text}." for text in self._control_sets()]
        items += [f"{text.rstrip('.')}." for text in self.ready.plan.notes]
        rows = [
            {
                "task": name,
                "role": self.study.tasks[name].role,
                "trials": len(task.trials),
                "from": self.study.tasks[name].dataset or self.study.tasks[name].file,
                "judged by": self.stats.metrics[name],
                "unit": METRICS[self.stats.metrics[name]].unit,
                "without ablation": self._baseline(name),
            }
            for name, task in self.ready.tasks.items()
        ]
        return Section(
            "What was done",
            text=[
                f"{count.cells:,} cells: {count.head_sets:,} head sets on {_tasks(len(rows))}, in {count.runs:,} runs "
                f"of {count.rows:,} prompts in all. Heads were ranked on calibration trials and are tested on "
                "others. Sides: "
                + listed([{"ablated": "the set is ablated", "kept": "all heads but the set are ablated"}[s]
                        for s in self.study.sides]) + "."
            ],
            items=items,
            table=pd.DataFrame(rows),
            table_caption="Tasks",
        )  # fmt: skip

    def _control_sets(self) -> list[str]:
        part, out = self.study.controls, []
        if (random := part.random) is not None:
            tested = "any ranking's" if random.tested is None else f"{listed(random.tested)}'s"
            kept = f", none of them one of {tested} best {max(self.ready.plan.ks)}" if random.exclude_tested else ""
            out.append(f"random heads ({random.draws} draws for each k{kept})")
        for name, words in (("bottom", "the lowest scores of"), ("nearest_zero", "the scores nearest zero of")):
            given = getattr(part, name)
            if given:
                out.append(f"{words} {'every ranking with scores' if given is True else listed(given)}")
        return out

    def _baseline(self, task: str) -> str:
        metric = self.stats.metrics[task]
        for label in self.sweeps.ablated:
            frame = self.sweeps[label].frame
            here = (frame["ranking"] == "none") & (frame["task"] == task) & (frame["metric"] == metric)
            if here.any():
                return f"{frame.loc[here, 'value'].mean():.3g}"
        return "not measured"

    # -- figures -------------------------------------------------------------------------------------

    def drawn(self, caption: str, make: Callable[[], go.Figure]) -> list[Drawn]:
        """A figure with its caption, or none and a line among what is missing."""
        try:
            return [(make(), caption)]
        except InvalidInput as error:
            self.missed.append(f"the figure of {caption.rstrip('.')}: {error}")
            return []

    def by_metric(self, sweep: SweepResult) -> list[tuple[str, list[str]]]:
        """Tasks that are judged by each metric."""
        out: dict[str, list[str]] = {}
        for name in self.ready.tasks:
            if name in sweep.tasks:
                out.setdefault(self.stats.metrics[name], []).append(name)
        return list(out.items())

    def curves(self) -> list[Section]:
        first = next(iter(self.sweeps.ablated), None)
        if first is None:
            return []
        sweep, found = self.sweeps[first], []
        for metric, tasks in self.by_metric(sweep):
            found += self.drawn(
                f"{listed(tasks)} by {metric}, under {first}. Bands: 95% bootstrap intervals over trials. Grey: random "
                "heads, from the lowest to the highest draw.",
                lambda m=metric, t=tasks: ablation_curve(sweep, metric=m, tasks=t),
            )
        ranking = next(iter(self.study.rankings))
        for target in self.targets:
            found += self.drawn(
                f"What each further group of {ranking}'s heads adds on {target}.",
                lambda t=target: dose_response_plot(sweep, ranking, metric=self.stats.metrics[t], tasks=t),
            )
        return [_section("Curves", found)] if found else []

    def interventions(self) -> list[Section]:
        labels, found = self.sweeps.ablated, []
        if len(labels) < 2:
            return []
        for i in range(0, len(labels), _MOST_LABELS):
            some = labels[i : i + _MOST_LABELS]
            for metric, tasks in self.by_metric(self.sweeps[some[0]]):
                found += self.drawn(
                    f"{listed(tasks)} by {metric}, under {listed(some)}.",
                    lambda m=metric, t=tasks, s=some: intervention_curves(self.sweeps, metric=m, tasks=t, labels=s),
                )
        return [_section("Interventions side by side", found)] if found else []

    def sides(self) -> list[Section]:
        labels = [label for label in self.sweeps.ablated if self.sweeps.complement(label) is not None]
        if not labels:
            return []
        found = []
        for label in labels:
            for metric, tasks in self.by_metric(self.sweeps[label]):
                found += self.drawn(
                    f"{listed(tasks)} by {metric}, under {label}: the set ablated, and all but the set.",
                    lambda n=label, m=metric, t=tasks: necessity_curves(self.sweeps, n, metric=m, tasks=t),
                )
        return [
            _section(
                "Necessary, sufficient?",
                found,
                text="Shares of the value without ablation. Necessary: more than half is lost without the heads; "
                "sufficient: more than half is left when all others are ablated; beyond the interval.",
                table=as_table(side_rows(self.stats)),
                table_caption="Necessity and sufficiency on the targets",
            )
        ]

    def controls(self) -> list[Section]:
        first = next(iter(self.sweeps.ablated), None)
        if not self.others or first is None:
            return []
        found = []
        for target in self.targets:
            metric = self.stats.metrics[target]
            alike = [name for name in self.others if self.stats.metrics[name] == metric]
            if alike:
                found += self.drawn(
                    f"Share lost on {target} against that on other tasks, under {first}.",
                    lambda t=target, m=metric, a=alike: control_scatter(
                        self.sweeps[first], t, a, metric=m, worst=dict(self.stats.worst)
                    ),
                )
        return [
            _section(
                "Controls",
                found,
                text="Share of its own value that each task loses. A difference above 0: the target loses more. The "
                f"table is at the k where a ranking has taken {SHARE:.0%} of the target, or else at its greatest; p is "
                "corrected (Holm) for all k, rankings and controls of one intervention and target.",
                table=as_table(dissociation_rows(self.stats)),
                table_caption="What the target loses, and what other tasks lose",
            )
        ]

    # -- tables --------------------------------------------------------------------------------------

    def statistics(self) -> list[Section]:
        out = []
        if (areas := as_table(area_rows(self.stats))) is not None:
            out.append(
                Section(
                    "What each ranking takes away",
                    text="Mean height of the curve over k, and the share of the value without ablation that is lost on "
                    "average over k (area over the curve): 0 nothing, 1 everything from the first head on. Where a "
                    "task can be guessed, the share is counted down to chance. Areas of rankings with other k "
                    "cannot be compared.",
                    table=areas,
                    table_caption="Area over the curve, and the fewest heads that halve the metric, with 95% intervals",
                )
            )
        if (pairs := as_table(comparison_rows(self.stats))) is not None:
            out.append(
                Section(
                    "Rankings against each other",
                    text="Difference of the mean heights of two curves over the k they share, paired over trials. "
                    "Below 0: a's heads matter more (where a higher metric is better). Paired sign-flip tests, "
                    "corrected (Holm) for the number of comparisons of one task and intervention; random heads stand "
                    "for these draws. Comparisons at every single k are in summary.json.",
                    table=pairs,
                    table_caption="Pairs of rankings on the targets",
                )
            )
        return out

    def agreement(self) -> list[Section]:
        if not self.stats.agreement:
            return []
        text = []
        for target, found in self.stats.agreement.items():
            opposite = int(found.pairs["opposite"].sum()) if len(found.pairs) else 0
            text.append(
                f"{target}: of {len(found.pairs)} pairs of interventions at the same ranking and k, "
                f"{len(found.disagreements)} are told apart, {opposite} of them in opposite directions."
            )
        return [
            Section(
                "Do the interventions agree?",
                text=text,
                table=as_table(agreement_rows(self.stats)),
                table_caption="How alike two interventions order the rankings",
            )
        ]

    def other_metrics(self) -> list[Section]:
        first = next(iter(self.sweeps.ablated), None)
        if first is None:
            return []
        sweep, found = self.sweeps[first], []
        for metric in sorted(sweep.metrics, key=list(METRICS).index):
            tasks = [
                name
                for name, task in self.ready.tasks.items()
                if metric in task.measured and metric != self.stats.metrics[name] and name in sweep.tasks
            ]
            if tasks:
                found += self.drawn(
                    f"{listed(tasks)} by {metric} ({METRICS[metric].about}; {METRICS[metric].unit}).",
                    lambda m=metric, t=tasks: ablation_curve(sweep, metric=m, tasks=t),
                )
        return [_section("Other metrics", found)] if found else []

    def failures(self) -> list[Section]:
        failed = self.report.failed
        if not failed and not self.report.left:
            return []
        rows = [{"cell": str(key), "error": error} for key, error in failed[:_MOST_FAILURES]]
        more = f" The first {_MOST_FAILURES} are shown." if len(failed) > _MOST_FAILURES else ""
        return [
            Section(
                "What failed",
                text=f"{_cells(len(failed))} failed and {_cells(self.report.left)} were not reached. Run the same "
                f"command again to try them again; tracebacks are in the store.{more}",
                table=pd.DataFrame(rows) if rows else None,
                table_caption="Cells that failed" if rows else "",
            )
        ]

    def caveats(self) -> Section:
        items = [
            "A fall under ablation shows that these heads matter in this state of the model; it does not say what they "
            "compute. Heads that stand in for each other can hide a need.",
            *(f"{one[0].upper()}{one[1:].rstrip('.')}." for one in self.ready.caveats),
            *(f"{one}." for one in self.ready.notes if one.split(":")[0] not in self.study.rankings),
        ]
        weak = [
            name for name in self.targets
            if (b := self._baseline(name)) != "not measured" and METRICS[self.stats.metrics[name]].higher_is_better
            and "share" in METRICS[self.stats.metrics[name]].unit and float(b) <= self.stats.worst[name] + 0.1
        ]  # fmt: skip
        items += [
            f"Without ablation the model hardly does better than nothing (or guessing) on {name}: there is little to "
            "lose, so little can be learnt."
            for name in weak
        ]
        few = [f"{name} ({len(task.trials)})" for name, task in self.ready.tasks.items() if len(task.trials) < 20]
        if few:
            items.append(
                f"Few trials are tested on {listed(few)}: intervals are wide, and small effects cannot be seen."
            )
        items += [f"Not computed: {one}" for one in [*self.stats.unsaid, *dict.fromkeys(self.missed)]]
        return Section("Caveats", items=items)


def _intervention(part: InterventionPart) -> str:
    """What was done, in words."""
    usual = part.label in (part.kind, f"{part.kind} at {part.site}")
    said = f"{part.kind} at {part.site}" if usual else f"{part.label}: {part.kind} at {part.site}"
    if part.reference is not None:
        first = "" if part.n_reference is None else f"the first {part.n_reference} trials of "
        said += f", from {first}{part.reference}"
    if part.kind == "bias":
        said += f", {part.strength:+g} at the keys of {part.keys}"
    if part.positions != "all":
        said += f", at positions {part.positions}"
    if len(part.seeds) > 1:
        said += f", {len(part.seeds)} seeds"
    return said


def _cells(n: int) -> str:
    return "1 cell" if n == 1 else f"{n} cells"


def _tasks(n: int) -> str:
    return "1 task" if n == 1 else f"{n} tasks"


def _missing(n: int) -> str:
    return f"{_cells(n)} of the plan {'is' if n == 1 else 'are'}"
