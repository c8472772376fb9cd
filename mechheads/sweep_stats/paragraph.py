"""What a sweep says, in a paragraph: built from the numbers, and plain about what cannot be said."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from mechheads.errors import InvalidInput
from mechheads.stats import check_count
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.sweep_stats.agreeing import compare_interventions
from mechheads.sweep_stats.comparing import compare_rankings
from mechheads.sweep_stats.dissociating import task_dissociation
from mechheads.sweep_stats.joint import check_names, direction, refuse_kept, the_metric
from mechheads.sweep_stats.sides import necessity_sufficiency
from mechheads.sweep_stats.whole_curves import Worst, minimal_k

if TYPE_CHECKING:
    import pandas as pd

# Rankings that end so, such as "locos bottom", are controls too: nobody expects them to fall first.
_OTHER_CONTROLS = (" bottom", " nearest zero")


@dataclass(frozen=True)
class _Asked:
    """What the paragraph is about."""

    sweeps: SweepSet
    label: str
    target: str
    controls: tuple[str, ...]
    metric: str
    random: tuple[str, ...]
    other: tuple[str, ...]
    share: float
    spared: float
    worst: Worst
    level: float
    n_boot: int
    seed: int

    @property
    def result(self) -> SweepResult:
        return self.sweeps[self.label]

    @property
    def tested(self) -> list[str]:
        """Rankings that are no controls."""
        return [r for r in self.result.rankings if r not in self.random + self.other]

    @property
    def options(self) -> dict[str, Any]:
        return {"level": self.level, "n_boot": self.n_boot, "seed": self.seed}


def verdict(
    sweeps: SweepSet | SweepResult,
    *,
    label: str | None = None,
    target: str | None = None,
    controls: Sequence[str] | str | None = None,
    metric: str | None = None,
    random: Sequence[str] | str | None = None,
    ranking: str | None = None,
    k: int | None = None,
    share: float = 0.5,
    spared: float = 0.1,
    worst: Worst = 0.0,
    level: float = 0.95,
    n_boot: int = 2000,
    seed: int = 0,
) -> str:
    """What the sweep says, in plain words: which ranking falls first, beyond random heads or not, what is spared.

    Every statement rests on an interval or a corrected test of this package; where these do not settle it, the
    paragraph says so. In order: the value without ablation; the ranking of the least ``minimal_k``, and whether its
    area is told from the others'; whether its k heads cost more than a random set of k
    (``SweepResult.beyond_control``); what each control task loses there (spared: the interval lies below ``spared``;
    not spared: above) and whether the target loses more (``task_dissociation``); what its heads alone still do;
    whether the other interventions agree.

    Args:
        sweeps: A set, or one sweep.
        label: The intervention to speak about; the first that ablates the sets if None.
        target: The task that should suffer; the first if None.
        controls: Tasks that should not; all others if None.
        metric: The metric; the first if None.
        random: Random controls among the rankings; those whose name begins with "random" if None.
        ranking: The ranking to speak about; the one that falls first if None.
        k: Number of heads to speak about; where the ranking falls, or else its greatest, if None.
        share: Share of the baseline to which a curve must fall.
        spared: Share lost below which a control is spared.
        worst: Value at which nothing is left, or one a task.
        level: Confidence level.
        n_boot: Number of bootstrap samples.
        seed: Seed of everything drawn.

    Raises:
        UnknownName: If a name is not in the set.
        InvalidInput: If no ranking but random ones was measured.
    """
    if isinstance(sweeps, SweepResult):
        refuse_kept(sweeps, "a verdict")
        sweeps = SweepSet({"the intervention": sweeps})
    label = label if label is not None else next(iter(sweeps.ablated), None)
    if label is None or sweeps[label].kept:
        raise InvalidInput(
            f"{label or ', '.join(sweeps)!r} has no run without ablation; give a sweep that ablates the sets."
        )
    result = sweeps[label]
    target = check_names(result, "task", target)[0]
    named = [r for r in result.rankings if r.startswith("random")]
    others = tuple(t for t in check_names(result, "task", controls) if t != target)
    asked = _Asked(
        sweeps=sweeps,
        label=label,
        target=target,
        controls=others,
        metric=the_metric(result, metric),
        random=tuple(named if random is None else check_names(result, "ranking", random)),
        other=tuple(r for r in result.rankings if f" {r}".endswith(_OTHER_CONTROLS)),
        share=share,
        spared=spared,
        worst=worst,
        level=level,
        n_boot=n_boot,
        seed=seed,
    )
    if not asked.tested:
        raise InvalidInput(
            f"the sweep has only random rankings ({', '.join(result.rankings)}); there is none to judge."
        )
    fall = minimal_k(result, asked.metric, target, asked.tested, share=share, worst=worst, **asked.options)
    said = [_opening(asked)]
    if not fall["valid"].any():
        return f"{said[0]} What ablation takes away cannot be said: {fall['reason'].iloc[0]}."
    leader = _leader(fall) if ranking is None else check_names(result, "ranking", ranking)[0]
    at = _at(asked, fall, leader, k)
    said += [_first(asked, fall, leader), _told_apart(asked, leader), _beyond(asked, leader, at)]
    said += [_controls(asked, leader, at), _sufficiency(asked, leader, at), _interventions(asked, leader, at)]
    return " ".join(part for part in said if part)


def _ends(low: float, high: float) -> str:
    return f"[{low:.2f}, {high:.2f}]" if math.isfinite(low) and math.isfinite(high) else "[no interval]"


def _heads(k: int) -> str:
    return "1 head" if k == 1 else f"{k} heads"


def _opening(asked: _Asked) -> str:
    """The value without ablation."""
    frame = asked.result.frame
    here = (frame["ranking"] == "none") & (frame["task"] == asked.target) & (frame["metric"] == asked.metric)
    values = frame.loc[here, "value"].dropna()
    what = f"On {asked.target} ({asked.metric}, heads ablated by {asked.label})"
    if values.empty:
        return f"{what} the model was not measured without ablation."
    return f"{what} the model scores {values.mean():.2f} without ablation, over {len(values)} trials."


def _leader(fall: pd.DataFrame) -> str:
    """The ranking that falls first; the first named of several."""
    known = fall.loc[fall["valid"]].sort_values("k", kind="stable", na_position="last")
    return str(known["ranking"].iloc[0])


def _at(asked: _Asked, fall: pd.DataFrame, leader: str, k: int | None) -> int:
    """The number of heads to speak about."""
    if k is not None:
        check_count("k", k)
        asked.result.cell(leader, k, asked.target, asked.metric)  # raises, saying what was measured
        return int(k)
    rows = fall.loc[fall["ranking"] == leader].to_dict("records")
    if rows and math.isfinite(rows[0]["k"]):
        return int(rows[0]["k"])
    frame = asked.result.frame
    here = (frame["ranking"] == leader) & (frame["task"] == asked.target) & (frame["metric"] == asked.metric)
    return int(frame.loc[here, "k"].max())


def _first(asked: _Asked, fall: pd.DataFrame, leader: str) -> str:
    """Which falls to the share first, and the others."""
    told = {row["ranking"]: row["told"] for row in fall.to_dict("records")}
    ks = {row["ranking"]: row["k"] for row in fall.to_dict("records")}
    left = f"{asked.share:.0%} of that"
    others = "; ".join(f"{name} {words}" for name, words in told.items() if name != leader)
    if not any(math.isfinite(k) for k in ks.values()):
        return f"No ranking brings it down to {left}: {'; '.join(f'{n} {w}' for n, w in told.items())}."
    if leader not in ks or not math.isfinite(ks[leader]):
        return f"{leader} does not bring it down to {left}: {told.get(leader, 'not measured')} (others: {others})."
    tied = [name for name, k in ks.items() if name != leader and k <= ks[leader]]
    how = f"falls no later than {', '.join(tied)}" if tied else "falls first"
    if any(ks[name] < ks[leader] for name in tied):
        how = "falls"
    elif tied:
        how = f"falls together with {', '.join(tied)}"
    elif len(told) == 1:
        how = "falls"
    return f"{leader} {how}: down to {left} at {told[leader]}" + (f" ({others})." if others else ".")


def _told_apart(asked: _Asked, leader: str) -> str:
    """Whether the leader's area is told from the other rankings'."""
    if len(asked.tested) < 2:
        return ""
    try:
        pairs = compare_rankings(asked.result, asked.metric, asked.target, asked.tested, **asked.options)
    except InvalidInput as error:
        return f"Whether it is told from the others cannot be said: {error}"
    pairs = pairs.loc[(pairs["of"] == "area") & ((pairs["a"] == leader) | (pairs["b"] == leader))]
    apart, alike = [], []
    for row in pairs.to_dict("records"):
        other = row["b"] if row["a"] == leader else row["a"]
        (apart if row["p_holm"] <= 1 - asked.level else alike).append(f"{other} (p {row['p_holm']:.2g})")
    said = []
    if apart:
        said.append(f"Over the whole curve it is told from {', '.join(apart)}.")
    if alike:
        said.append(f"Over the whole curve it is not told from {', '.join(alike)}.")
    return " ".join(said)


def _beyond(asked: _Asked, leader: str, k: int) -> str:
    """Whether the heads cost more than random ones."""
    if not asked.random:
        return "Whether it is more than random heads do cannot be said: none were ablated."
    said = []
    for control in asked.random:
        try:
            found = asked.result.beyond_control(leader, k, asked.metric, asked.target, control=control, **asked.options)
        except InvalidInput as error:
            said.append(f"Against {control} nothing can be said at {_heads(k)}: {error}")
            continue
        sign = direction({asked.label: asked.result}, asked.metric)
        low, high = sorted((sign * found.low, sign * found.high))
        cost = f"{sign * found.estimate:.2f} {_ends(low, high)}"
        if not math.isfinite(low):
            said.append(
                f"At {_heads(k)} it costs {cost} more than {control}; with a single draw or trial it cannot be said "
                "whether that is beyond random heads."
            )
        elif low > 0:
            said.append(f"At {_heads(k)} it costs {cost} more than {control} heads: beyond them.")
        else:
            said.append(f"At {_heads(k)} its cost is not told from that of {control} heads ({cost} more).")
    return " ".join(said)


def _controls(asked: _Asked, leader: str, k: int) -> str:
    """What other tasks lose, and whether the target loses more."""
    if not asked.controls:
        return "Whether other tasks are spared cannot be said: none were measured."
    said = []
    for control in asked.controls:
        try:
            rows = task_dissociation(
                asked.result, asked.target, control, asked.metric, ranking=leader, worst=asked.worst, **asked.options
            )
        except InvalidInput as error:
            said.append(f"Of {control} nothing can be said: {error}")
            continue
        here = rows.loc[rows["k"] == k].to_dict("records")
        if not here:
            said.append(f"Of {control} nothing can be said: it was not measured with {_heads(k)} of {leader}.")
            continue
        row = here[0]
        if not row["valid"]:
            said.append(f"Of {control} nothing can be said: {row['reason']}.")
            continue
        ends = _ends(row["control_low"], row["control_high"])
        lost = f"{control} loses {row['control_lost']:.2f} {ends} of its own value"
        if row["control_high"] < asked.spared:
            how = "spared"
        elif row["control_low"] >= asked.spared:
            how = "not spared"
        else:
            how = f"whether it is spared (below {asked.spared:g}) is not settled"
        more = f"{row['difference']:.2f} {_ends(row['ci_low'], row['ci_high'])}"
        if row["ci_low"] > 0:
            apart = f"{asked.target} loses a share greater by {more}"
        elif row["ci_high"] < 0:
            apart = f"{asked.target} loses the smaller share (by {more})"
        else:
            apart = f"that {asked.target} loses a greater share is not settled ({more})"
        said.append(f"At {_heads(k)} {lost}: {how}; {apart}.")
    return " ".join(said)


def _sufficiency(asked: _Asked, leader: str, k: int) -> str:
    """What the heads alone still do."""
    if asked.sweeps.complement(asked.label) is None:
        return "Whether its heads suffice cannot be said: no complement was ablated."
    try:
        rows = necessity_sufficiency(
            asked.sweeps,
            asked.label,
            asked.metric,
            asked.target,
            leader,
            share=asked.share,
            worst=asked.worst,
            **asked.options,
        )
    except InvalidInput as error:
        return f"Whether its heads suffice cannot be said: {error}"
    rows = rows.sort_values("k")
    here = rows.loc[rows["k"] == k]
    row = (here if len(here) else rows.tail(1)).to_dict("records")[0]
    if not row["valid"]:
        return f"Whether its heads suffice cannot be said: {row['reason']}."
    kept = f"{row['sufficiency']:.2f} {_ends(row['sufficiency_low'], row['sufficiency_high'])}"
    if row["sufficiency_low"] > asked.share:
        how = "they suffice"
    elif row["sufficiency_high"] < asked.share:
        how = "they do not suffice"
    else:
        how = f"whether they suffice (above {asked.share:g}) is not settled"
    return f"Its {_heads(row['k'])} alone keep {kept} of the value without ablation: {how}."


def _interventions(asked: _Asked, leader: str, k: int) -> str:
    """Whether the other interventions of the set say the same."""
    if len(asked.sweeps.ablated) < 2:
        return ""
    try:
        found = compare_interventions(asked.sweeps, asked.metric, asked.target, leader, **asked.options)
    except InvalidInput as error:
        return f"Whether interventions agree cannot be said: {error}"
    rows = found.pairs.loc[found.pairs["k"] == k].to_dict("records")
    if not rows:
        return f"Whether interventions agree at {_heads(k)} cannot be said: no two measured it."
    said = []
    for row in rows:
        apart = f"{row['difference']:+.2f} {_ends(row['ci_low'], row['ci_high'])}".replace("+-", "-")
        pair = f"{row['a']} and {row['b']}"
        if row["opposite"]:
            said.append(f"{pair} change it in opposite directions (difference {apart})")
        elif row["apart"]:
            said.append(f"{pair} differ ({apart})")
        else:
            said.append(f"{pair} are not told apart ({apart})")
    return f"At {_heads(k)} of {leader}, {'; '.join(said)}."
