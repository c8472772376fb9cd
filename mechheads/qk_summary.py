"""The numbers of a study of logic heads, JSON-ready, and what they say in plain words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from mechheads.provenance import json_ready
from mechheads.verdicts import Transfer
from mechheads.verdicts.telling import plain

if TYPE_CHECKING:
    from mechheads.qk_study import QKOptions, SetResult


def summarise(
    model: Mapping[str, Any], sets: Mapping[str, SetResult], moved: Transfer | None, options: QKOptions
) -> dict[str, Any]:
    """Everything a script would want, by data set."""
    return json_ready(
        {
            "model": dict(model),
            "options": {**vars(options), "prune": None if options.prune is None else list(options.prune)},
            "sets": {name: _one(result, options) for name, result in sets.items()},
            "transfer": None if moved is None else moved.to_dict(),
        },
        where="summary",
    )


def _one(result: SetResult, options: QKOptions) -> dict[str, Any]:
    judged = result.judgement.to_dict(options.alpha)
    return {
        "n_questions": len(result.trials),
        "labels": result.trials.options.get("labels"),
        "judgement": judged,
        "heads": result.heads.labels,
        "inverse": result.inverse.labels,
        "passing": passing(result, options).labels,
        "evaluation": result.evaluation.to_dict(),
        "learning_curve": None if result.curve is None else result.curve.to_dict(),
        "depth": result.profile.to_dict(),
        "debias": None if result.debias is None else result.debias.to_dict(),
        "pruning": None if result.pruning is None else pruning_rows(result),
        "premises": None if result.premises is None else premise_numbers(result),
        "notes": list(result.notes),
    }


def passing(result: SetResult, options: QKOptions) -> Any:
    """Chosen heads that are significant on held-out questions too, in their own direction, and not flagged."""
    right = result.judgement.significant(options.alpha) | result.judgement.inverse(options.alpha) & result.inverse
    kept = result.heads & right
    return kept if result.debias is None else kept - result.debias.flagged


def pruning_rows(result: SetResult) -> list[dict[str, Any]]:
    """Accuracy of the model by size of the pruned set, best against random."""
    assert result.pruning is not None
    curve = result.pruning.curve("choice_accuracy")
    columns = [c for c in ("ranking", "k", "mean", "ci_low", "ci_high", "n_trials") if c in curve]
    return [{c: plain(row[c]) if isinstance(row[c], float) else row[c] for c in columns} for _, row in curve.iterrows()]


def premise_numbers(result: SetResult) -> dict[str, Any]:
    """Flip rates by arm when all its premises are gone, and what it cost."""
    assert result.premises is not None
    taken = result.premises
    frame = taken.by_arm()
    return {
        "n_questions": len(taken.questions),
        "arms": [{k: _ready(v) for k, v in row.items()} for row in frame.to_dict("records")],
        "cost_ratio": taken.cost_ratio,
        "seconds_ratio": taken.seconds_ratio,
        "summary": taken.summary(),
    }


def _ready(value: Any) -> Any:
    value = value.item() if hasattr(value, "item") else value
    return plain(value)


def verdict(sets: Mapping[str, SetResult], moved: Transfer | None, options: QKOptions) -> list[str]:
    """The study in a few paragraphs."""
    told = []
    for name, result in sets.items():
        lead = f"{name}: " if len(sets) > 1 else ""
        told.append(lead + result.judgement.verdict(options.alpha))
        judged = result.judgement
        # Where no head passes, what is said of the wording would only name the luckiest.
        if result.debias is not None and len(judged.significant(options.alpha) | judged.inverse(options.alpha)):
            told.append(lead + result.debias.summary())
        if result.pruning is not None:
            told.append(lead + pruning_told(result))
        if result.premises is not None:
            told.append(lead + premises_told(result))
    if moved is not None:
        told.append(moved.summary())
    return told


def premises_told(result: SetResult) -> str:
    """How far verdicts rest on the proof's premises, and what it cost to see."""
    assert result.premises is not None
    taken = result.premises
    parts = [f"Premises were taken away from {len(taken.questions)} questions."]
    if {"gold", "random"} <= set(taken.arms):
        arms = taken.by_arm().query("round == 'all'").set_index("arm")
        rates = [
            f"{arms.loc[arm, 'flipped']:.2f} [{arms.loc[arm, 'flipped_low']:.2f}, {arms.loc[arm, 'flipped_high']:.2f}]"
            for arm in ("gold", "random")
            if arm in arms.index
        ]
        if len(rates) == 2:
            parts.append(
                f"Without the proof's, verdicts move in {rates[0]}; without as many from outside the proof, in "
                f"{rates[1]}."
            )
    parts.append(f"That took {taken.cost_ratio:.1f} times the tokens of one QK-score pass over the same questions.")
    return " ".join(parts)


def pruning_told(result: SetResult) -> str:
    """What pruning the best heads costs beside pruning random ones."""
    assert result.pruning is not None
    sweep = result.pruning
    rows = sweep.curve("choice_accuracy")
    base = rows.loc[rows["k"] == 0].iloc[0]
    task = str(base["task"])
    parts = [f"Whole, the model is right in {base['mean']:.2f} of {int(base['n_trials'])} held-out questions."]
    for k in sorted({int(x) for x in rows["k"]} - {0}):
        at = rows.loc[rows["k"] == k].set_index("ranking")["mean"]
        d = sweep.beyond_control("best", k, "choice_accuracy", task)
        said = "cost more than" if d.low > 0 else "cost less than" if d.high < 0 else "cannot be told from"
        parts.append(
            f"Without its {k} best heads it is right in {at['best']:.2f}, without {k} random ones in "
            f"{at['random']:.2f}: the best {said} a random set ({d.estimate:+.2f} [{d.low:+.2f}, {d.high:+.2f}])."
        )
    return " ".join(parts)
