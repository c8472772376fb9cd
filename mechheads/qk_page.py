"""A study of logic heads on one page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from mechheads.plots import (
    ablation_curve,
    accuracy_heatmap,
    accuracy_profile,
    calibration_curve,
    debias_plot,
    premise_curves,
    transfer_matrix,
    verdict_curves,
)
from mechheads.plots.style import display_name
from mechheads.qk_summary import passing, pruning_told, verdict
from mechheads.report import Section, write_report
from mechheads.verdicts import Transfer

if TYPE_CHECKING:
    from mechheads.qk_study import QKOptions, SetResult


def write_qk_page(
    path: Path,
    sets: Mapping[str, SetResult],
    moved: Transfer | None,
    summary: Mapping[str, Any],
    options: QKOptions,
    commands: Sequence[str],
) -> Path:
    """One self-contained page."""
    name = summary["model"]["name"]
    sections = [
        Section("Verdict", text=verdict(sets, moved, options), verdict=True),
        _data_section(sets, options),
    ]
    for result in sets.values():
        sections += _sections(result, options, lead=f"{display_name(result.name)}: " if len(sets) > 1 else "")
    if moved is not None:
        sections.append(
            Section(
                "From one data set to another",
                text=[moved.summary()],
                figure=transfer_matrix(moved),
                figure_caption=f"Held-out accuracy of {options.k} heads, by the set they were chosen on.",
            )
        )
    sections.append(Section("Caveats", items=_caveats(sets, options)))
    return write_report(
        path,
        title=f"Do heads of {name} know what follows?",
        question="Do some attention heads tell valid from invalid inferences by how well an answer's query matches the "
        "statement's key, better than the model's own output does?",
        sections=sections,
        provenance={**{f"{n} scores": s.scores.meta for n, s in sets.items()}, "seconds": summary["seconds"]},
        commands=commands,
    )


def _data_section(sets: Mapping[str, SetResult], options: QKOptions) -> Section:
    items = []
    for name, result in sets.items():
        counts = {s: len(result.trials.split(s)) for s in ("calibration", "test")}
        labels = ", ".join(f"{n} {label}" for label, n in (result.trials.options.get("labels") or {}).items())
        items.append(
            f"{name}: {counts['calibration']} calibration questions choose heads, {counts['test']} others test them"
            + (f" ({labels})." if labels else ".")
        )
        items += [f"{name}: {text}" for text in result.judgement.warnings]
        items += [f"{name}: {text}" for text in result.notes]
    rotated = "as the model multiplies them" if options.rotary else "before rotation"
    return Section(
        "Data and score",
        text=[
            f"A head's score for a candidate answer is the product of the answer token's query and the key of the "
            f"statement's last token ({rotated}); its answer is the candidate with the highest score. One prefill a "
            "question; all candidates run on that prefix (arXiv 2502.17017). The model's own output is its "
            "log-probability of the same candidates."
        ],
        items=items,
    )


def _sections(result: SetResult, options: QKOptions, *, lead: str) -> list[Section]:
    """All that was found on one data set."""
    judged, found = result.judgement, result.evaluation
    several = [column for column in found.by if len(set(found.scores.column(column))) > 1]
    out = [
        Section(
            _heading(lead, "every head"),
            text=[judged.verdict(options.alpha), result.profile.summary()],
            figure=[
                accuracy_heatmap(judged, heads=result.heads, alpha=options.alpha),
                accuracy_profile(result.profile),
            ],
            figure_caption=[
                "Accuracy on held-out questions; white is chance. Outlined: the heads chosen on calibration questions.",
                "Where in depth they lie.",
            ],
            table=_table(result, options),
            table_caption=f"The {len(result.heads)} heads chosen on calibration questions, reported on the others",
        ),
        Section(
            _heading(lead, "against the model's own output"),
            text=[found.summary()],
            figure=[verdict_curves(found, by=column) for column in several],
            figure_caption=[f"Accuracy by {column}, with 95% intervals." for column in several],
        ),
    ]
    if result.curve is not None:
        out.append(
            Section(
                _heading(lead, "how many questions it takes to choose"),
                text=[result.curve.summary(), *_nothing_to_choose(result, options)],
                figure=calibration_curve(result.curve),
                figure_caption="The best head of calibration sets of each size.",
            )
        )
    if result.debias is not None:
        out.append(
            Section(
                _heading(lead, "is it the wording?"),
                text=[result.debias.summary()],
                figure=debias_plot(result.debias),
                figure_caption="Accuracy on the questions and on their label-flipped twins.",
            )
        )
    if result.pruning is not None:
        out.append(
            Section(
                _heading(lead, "pruning them"),
                text=[pruning_told(result)],
                figure=ablation_curve(result.pruning, metric="choice_accuracy"),
                figure_caption="The model's own accuracy without its best heads, and without random ones.",
            )
        )
    if result.premises is not None:
        out.append(_premise_section(result, lead))
    return out


def _heading(lead: str, text: str) -> str:
    """A heading that begins with a capital, or with the data set's name."""
    return lead + text if lead else text[0].upper() + text[1:]


def _nothing_to_choose(result: SetResult, options: QKOptions) -> list[str]:
    if len(result.judgement.significant(options.alpha)):
        return []
    return ["No head is right more often than chance, so the curve shows luck alone."]


def _premise_section(result: SetResult, lead: str) -> Section:
    assert result.premises is not None
    return Section(
        _heading(lead, "taking premises away"),
        text=[result.premises.summary()],
        figure=[premise_curves(result.premises), premise_curves(result.premises, measure="change")],
        figure_caption=[
            "Verdicts that moved as premises were removed.",
            "What the right answer's log-odds gained; below zero they lost (nats).",
        ],
    )


def _table(result: SetResult, options: QKOptions) -> pd.DataFrame:
    """The chosen heads with what is known of each."""
    frame = result.judgement.frame(options.alpha).set_index("label")
    kept = passing(result, options)
    flagged = set() if result.debias is None else set(result.debias.flagged.labels)
    rows = []
    for head in result.heads:
        row, turned = frame.loc[str(head)], head in result.inverse
        rows.append(
            {
                "head": str(head) + (" (sign turned)" if turned else ""),
                "calibration": f"{row['accuracy_calibration']:.3f}",
                "held out": f"{row['accuracy']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]",
                "AUROC": f"{row['auroc']:.3f}",
                "p, corrected": f"{row['p_inverse' if turned else 'p']:.2g}",
                "stands": "yes" if head in kept else "wording" if str(head) in flagged else "no",
            }
        )
    return pd.DataFrame(rows)


def _caveats(sets: Mapping[str, SetResult], options: QKOptions) -> list[str]:
    out = [
        "A head that scores well reads validity off query and key alone; that says nothing of what it writes, nor that "
        "the model uses it. Pruning and premises bear on that.",
        "The heads found are those of the rules in these data; heads for other rules can be missed.",
        f"A head stands if it is right more often than chance on held-out questions, corrected for all heads (p <= "
        f"{options.alpha:g}), and was not flagged for its wording.",
    ]
    for name, result in sets.items():
        if not len(passing(result, options)):
            out.append(f"On {name} no chosen head stands: read nothing into the best of them.")
    return out
