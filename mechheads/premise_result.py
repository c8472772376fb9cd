"""Results of premise ablation: whether verdicts rest on the evidence, what that says of QK verdicts, what it cost."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput, ResultFileError, UnknownName
from mechheads.provenance import json_ready
from mechheads.result_files import read_table, write_table
from mechheads.stats import Interval, paired_permutation, percentiles
from mechheads.verdicts.resampling import check_draws, group_codes, group_sums, interval

if TYPE_CHECKING:
    import pandas as pd

ARMS = ("gold", "best heads", "model", "random", "random any")
SINGLY, CUMULATIVE = ORDERS = ("one at a time", "cumulative")
ALL = "all"
# Each measure with its least and greatest value.
MEASURES = {"flipped": (0.0, 1.0), "drop": (-math.inf, math.inf), "change": (-math.inf, math.inf)}
SPLITS = ("verdict", "label")
ROW_COLUMNS = (
    "trial_id", "arm", "order", "round", "removed", "verdict", "p_label", "log_odds", "verdict_log_odds",
)  # fmt: skip
QUESTION_KEYS = (
    "trial_id", "group", "candidates", "label", "verdict", "p_label", "log_odds", "verdict_log_odds", "n_premises",
    "proof", "number", "qk_right", "qk_margin",
)  # fmt: skip
_KEY = ["trial_id", "arm", "order", "round"]


@dataclass(frozen=True)
class EvidenceAgreement:
    """QK verdicts beside what the model's verdicts rest on, over the questions of the gold arm.

    Attributes:
        table: Number of questions by ``(QK verdict right, model's verdict turned without its evidence)``.
        n_tied: Questions left out of the table because the QK verdict is a tie.
        right_if_rests: Share of right QK verdicts where the model's verdict turned; None if there is no such question.
        right_if_not: The same where it stayed.
        correlation: Spearman's rho of the QK margin for the right answer and the loss of the right answer's log-odds
            without the evidence (positive: surer heads where the evidence matters more), with its bootstrap interval.
    """

    table: Mapping[tuple[bool, bool], int]
    n_tied: int
    right_if_rests: Interval | None
    right_if_not: Interval | None
    correlation: Interval


@dataclass(frozen=True, eq=False, repr=False)
class PremiseAblation:
    """What happens to the model's verdicts as premises are taken away, made by ``run_premises``.

    Three measures, with the model's first verdict (on the whole prompt) as the reference: ``flipped`` is 1 where the
    verdict moved away from it; ``drop`` is how far its log-odds against the best other candidate fell (nats, positive:
    it rested on what was removed); ``change`` is what the right answer's log-odds against the best other candidate
    gained (nats, negative: the right answer lost).

    Attributes:
        questions: One JSON-ready dict per question: ``trial_id group candidates label verdict p_label log_odds
            verdict_log_odds n_premises proof number qk_right qk_margin`` and, where known, ``split rule depth
            distractors``. ``number`` is how many premises each arm removes in the end, ``proof`` None if unknown;
            ``qk_right`` is 1, 0 or a part for a tie and ``qk_margin`` in standard deviations, None without heads.
        rows: One row per run: ``trial_id arm order round removed verdict p_label log_odds verdict_log_odds``;
            ``removed`` lists premises in the order of removal, ``verdict_log_odds`` are those of the first verdict.
        cost: ``qk`` and ``ablation``, each with ``passes`` (prompts run, one each), ``tokens`` (padding left out) and
            ``seconds``; ``by_arm`` the passes and tokens that each arm would take by itself.
        left_out: For each arm how many questions it could not be run on.
        meta: Provenance, JSON-ready.
    """

    questions: Sequence[Mapping[str, Any]]
    rows: pd.DataFrame
    cost: Mapping[str, Any]
    left_out: Mapping[str, int] = field(default_factory=dict)
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        questions = tuple(json_ready(q, where="a question") for q in self.questions)
        for question in questions:
            missing = [key for key in QUESTION_KEYS if key not in question]
            if missing:
                raise InvalidInput(f"the question {question.get('trial_id')!r} lacks {missing[0]!r}.")
        object.__setattr__(self, "questions", questions)
        object.__setattr__(self, "rows", _checked_rows(self.rows, questions))
        for name in ("cost", "left_out", "meta"):
            object.__setattr__(self, name, json_ready(getattr(self, name), where=name))
        _check_cost(self.cost)

    def __repr__(self) -> str:
        return f"PremiseAblation({len(self.questions)} questions, arms={self.arms}, rounds={self.rounds})"

    @property
    def arms(self) -> list[str]:
        """Arms in order of appearance."""
        return list(dict.fromkeys(self.rows["arm"]))

    @property
    def rounds(self) -> int:
        """Most premises removed from one question."""
        return int(self.rows["round"].max())

    @property
    def cost_ratio(self) -> float:
        """Tokens that premise ablation runs, over those of one QK-score pass on the same questions."""
        return float(self.cost["ablation"]["tokens"] / self.cost["qk"]["tokens"])

    @property
    def seconds_ratio(self) -> float:
        """The same in seconds measured; depends on the machine and on the batch size."""
        return float(self.cost["ablation"]["seconds"] / self.cost["qk"]["seconds"])

    def frame(self) -> pd.DataFrame:
        """One row per run, with the question's first verdict and the three measures.

        Returns:
            ``trial_id group arm order round removed number label first_verdict right_before verdict p_label_before
            p_label log_odds_before log_odds flipped drop change``.
        """
        return self._frame.copy()

    @cached_property
    def _frame(self) -> pd.DataFrame:
        by_id = {q["trial_id"]: q for q in self.questions}
        frame = self.rows.copy()
        asked = [by_id[i] for i in frame["trial_id"]]
        before = {name: np.array([q[name] for q in asked]) for name in ("verdict", "log_odds", "verdict_log_odds")}
        frame["group"] = [q["group"] for q in asked]
        frame["number"] = [q["number"] for q in asked]
        frame["label"] = [q["candidates"][q["label"]].strip() for q in asked]
        frame["first_verdict"] = before["verdict"]
        frame["right_before"] = [q["verdict"] == q["label"] for q in asked]
        frame["p_label_before"] = [q["p_label"] for q in asked]
        frame["log_odds_before"] = before["log_odds"]
        frame["flipped"] = (frame["verdict"] != before["verdict"]).astype(float)
        frame["drop"] = before["verdict_log_odds"] - frame["verdict_log_odds"]
        frame["change"] = frame["log_odds"] - before["log_odds"]
        order = (
            "trial_id group arm order round removed number label first_verdict right_before verdict p_label_before "
            "p_label log_odds_before log_odds flipped drop change"
        )
        return frame[order.split()]

    def per_question(self, arm: str, order: str = CUMULATIVE, round: int | str = ALL) -> pd.DataFrame:
        """The measures of one arm, a row per question, indexed by trial id.

        Args:
            arm: One of ``arms``.
            order: ``"cumulative"`` or ``"one at a time"``.
            round: Which removal, from 1. ``"all"``: with every premise the arm removes gone (cumulative), or the mean
                over its single removals; questions where the arm had fewer premises than the others are not in it.

        Returns:
            ``group label right_before flipped drop change``.

        Raises:
            UnknownName: If the arm or order is not in the result.
        """
        for kind, name, known in (("arm", arm, self.arms), ("order", order, list(ORDERS))):
            if name not in known:
                raise UnknownName(f"{kind} of the premise ablation", name, known)
        here: Any = self._frame
        here = here[(here["arm"] == arm) & (here["order"] == order)]
        if round != ALL:
            here = here[here["round"] == round]
        else:
            full = here.loc[here["round"] == here["number"], "trial_id"]
            here = here[here["trial_id"].isin(full)]
            if order == CUMULATIVE:
                here = here[here["round"] == here["number"]]
        kept = {"group": "first", "label": "first", "right_before": "first"} | dict.fromkeys(MEASURES, "mean")
        return here.groupby("trial_id", sort=True).agg(kept)

    def by_arm(
        self,
        order: str = CUMULATIVE,
        *,
        by: str | None = None,
        level: float = 0.95,
        n_boot: int = 2000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Flip rate and mean movement of the log-odds by arm and round, with cluster bootstrap intervals.

        Args:
            order: ``"cumulative"`` or ``"one at a time"``.
            by: ``"verdict"`` (whether the first verdict was right), ``"label"`` (the right answer's text), or None.
            level: Confidence level.
            n_boot: Bootstrap samples; whole groups of questions (a world) are drawn.
            seed: Seed of the draws.

        Returns:
            ``by value arm round n n_groups`` and ``flipped drop change``, each with ``_low`` and ``_high``. Rounds are
            numbers and, as in ``per_question``, ``"all"``. An interval is NaN with fewer than two groups, and for
            log-odds where all questions move by exactly the same.

        Raises:
            UnknownName: For another order or split.
        """
        import pandas as pd

        check_draws(level, n_boot, seed)
        rows = []
        for arm in self.arms:
            for round in (*range(1, self.rounds + 1), ALL):
                for value, cell in _parts(self.per_question(arm, order, round), by):
                    row = {"by": by or "overall", "value": value, "arm": arm, "round": round, "n": len(cell)}
                    row["n_groups"] = cell["group"].nunique()
                    for measure in MEASURES:
                        found = _interval(cell[measure], cell["group"], measure, level, n_boot, seed)
                        row |= {measure: found.estimate, f"{measure}_low": found.low, f"{measure}_high": found.high}
                    rows.append(row)
        return pd.DataFrame(rows)

    def differences(
        self,
        a: str = "gold",
        b: str = "random",
        *,
        order: str = CUMULATIVE,
        level: float = 0.95,
        n_boot: int = 2000,
        n_perm: int = 10000,
        seed: int = 0,
    ) -> pd.DataFrame:
        """Arm a less arm b over the questions of both, with as many premises removed in each.

        Args:
            a: First arm.
            b: Second arm.
            order: As in ``by_arm``.
            level: Confidence level.
            n_boot: Bootstrap samples over groups of questions.
            n_perm: Sign patterns of the paired permutation test, drawn over groups.
            seed: Seed of both.

        Returns:
            ``by value measure n n_groups mean_a mean_b difference low high p``: over all questions, by whether the
            first verdict was right, and by label. p is two-sided and not corrected for the several rows.

        Raises:
            UnknownName: If an arm or the order is not in the result.
            InvalidInput: If no question is in both arms.
        """
        import pandas as pd

        check_draws(level, n_boot, seed)
        left, right = (self.per_question(arm, order) for arm in (a, b))
        both = left.index.intersection(right.index)
        if not len(both):
            raise InvalidInput(f"no question is in both arms, {a!r} and {b!r}; nothing can be paired.")
        left, right = left.loc[both], right.loc[both]
        rows = []
        for by in (None, *SPLITS):
            for value, cell in _parts(left, by):
                other = right.loc[cell.index]
                for measure in MEASURES:
                    away = cell[measure] - other[measure]
                    found = _interval(away, cell["group"], measure, level, n_boot, seed, paired=True)
                    sums = group_sums(np.asarray(away, dtype=float), group_codes(cell["group"].tolist()))
                    rows.append(
                        {
                            "by": by or "overall",
                            "value": value,
                            "measure": measure,
                            "n": len(cell),
                            "n_groups": len(sums),
                            "mean_a": float(cell[measure].mean()),
                            "mean_b": float(other[measure].mean()),
                            "difference": found.estimate,
                            "low": found.low,
                            "high": found.high,
                            "p": paired_permutation(sums, np.zeros(len(sums)), n_perm=n_perm, seed=seed),
                        }
                    )
        return pd.DataFrame(rows)

    def dependence(self) -> pd.DataFrame:
        """What each verdict rests on: one row per question of the gold arm, all its proof's premises removed.

        Returns:
            ``trial_id group label right_before flipped drop change turned_at qk_right qk_margin``; ``turned_at`` is the
            cumulative round in which the verdict first moved (NaN: never), ``flipped`` whether it had in the end.
        """
        frame = self.per_question("gold")
        gold: Any = self._frame.query(f"arm == 'gold' and order == {CUMULATIVE!r}")
        first = gold[gold["flipped"] == 1].groupby("trial_id")["round"].min()
        frame["turned_at"] = first.reindex(frame.index)
        for key in ("qk_right", "qk_margin"):
            known = {q["trial_id"]: q[key] for q in self.questions}
            frame[key] = [np.nan if known[i] is None else float(known[i]) for i in frame.index]
        return frame.reset_index()

    def agreement(self, *, level: float = 0.95, n_boot: int = 2000, seed: int = 0) -> EvidenceAgreement:
        """Whether QK verdicts are right, and sure, where the model's verdict rests on the evidence.

        Args:
            level: Confidence level.
            n_boot: Bootstrap samples over groups of questions.
            seed: Seed of the draws.

        Raises:
            InvalidInput: If no heads were given to ``run_premises``, or no question has a known proof.
        """
        check_draws(level, n_boot, seed)
        if "gold" not in self.arms or not len(frame := self.dependence()):
            raise InvalidInput("no question was run without the premises of its proof, so there is nothing to compare.")
        if frame["qk_right"].isna().any():
            raise InvalidInput("there are no QK verdicts here; give run_premises the heads that should give them.")
        decided = frame[frame["qk_right"].isin((0.0, 1.0))]
        rests = frame["flipped"] == 1
        table = {
            (right, turned): int(((decided["qk_right"] == right) & (decided["flipped"] == turned)).sum())
            for right in (True, False)
            for turned in (True, False)
        }
        shares = [
            _interval(part["qk_right"], part["group"], "flipped", level, n_boot, seed) if len(part) else None
            for part in (frame[rests], frame[~rests])
        ]
        rho = _rank_correlation(frame["qk_margin"], -frame["change"], frame["group"], level, n_boot, seed)
        return EvidenceAgreement(table, len(frame) - len(decided), shares[0], shares[1], rho)

    def summary(self) -> str:
        """The result in plain words."""
        right = sum(q["verdict"] == q["label"] for q in self.questions)
        parts = [f"The model's first verdict is right in {right} of {len(self.questions)} questions."]
        cells = self.by_arm().query("round == 'all'").set_index("arm")
        for arm in self.arms:
            row = cells.loc[arm] if arm in cells.index else None
            if row is not None:
                parts.append(
                    f"Without {_TOLD[arm]}, verdicts move in {_told(row, 'flipped')} and the first verdict's log-odds "
                    f"{_moved(row)} nats (n = {row['n']})."
                )
        if {"gold", "random"} <= set(self.arms):
            parts += self._difference_told()
        if any(q["qk_right"] is not None for q in self.questions) and "gold" in self.arms:
            found = self.agreement()
            shown = [("moved", found.right_if_rests), ("stayed", found.right_if_not)]
            told = [f"{share} where it {what}" for what, share in shown if share is not None]
            parts.append(f"The QK verdict is right in {' and in '.join(told)} without the proof's premises.")
            parts.append(f"Its margin and the log-odds lost have the rank correlation {found.correlation}.")
        run, one = self.cost["ablation"], self.cost["qk"]
        parts.append(
            f"This took {run['passes']} passes and {run['tokens']} tokens, {self.cost_ratio:.1f} times the "
            f"{one['tokens']} of one QK-score pass over the same questions, and {self.seconds_ratio:.1f} times the "
            "seconds."
        )
        parts += [f"{n} questions are left out of the arm {arm!r}." for arm, n in self.left_out.items() if n]
        return " ".join(parts)

    def _difference_told(self) -> list[str]:
        """Gold less random in words; nothing where no question is in both."""
        if not len(self.per_question("gold").index.intersection(self.per_question("random").index)):
            return []
        rows = self.differences().query("by == 'overall'").set_index("measure")
        told = [
            f"{rows.loc[m, 'difference']:+.2f} [{rows.loc[m, 'low']:+.2f}, {rows.loc[m, 'high']:+.2f}] {unit} "
            f"(p = {rows.loc[m, 'p']:.2g})"
            for m, unit in (("flipped", "of verdicts"), ("drop", "nats"))
        ]
        return [f"Proof less other premises, question by question: {' and '.join(told)}."]

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file, a row per run, with questions, cost and provenance inside.

        Raises:
            OutputNotWritable: If the folder cannot be written.
        """
        import pyarrow as pa

        columns = {name: self.rows[name].tolist() for name in ROW_COLUMNS if name != "removed"}
        removed = [json.dumps(r) for r in self.rows["removed"]]
        header = {name: getattr(self, name) for name in ("questions", "cost", "left_out", "meta")}
        table = pa.table({**columns, "removed": pa.array(removed, pa.string())})
        return write_table(path, table, kind="premise_ablation", header={"n_rows": len(self.rows), **header})

    @classmethod
    def load(cls, path: str | Path) -> PremiseAblation:
        """Read what ``save`` wrote.

        Raises:
            ResultFileError: If the file is missing, damaged, foreign, inconsistent or too new.
        """
        table, header = read_table(path, kind="premise_ablation")
        try:
            if header["n_rows"] != table.num_rows:
                raise ValueError(f"it has {table.num_rows} rows but its header says {header['n_rows']}")
            rows = table.to_pandas()
            rows["removed"] = [json.loads(r) for r in rows["removed"]]
            return cls(header["questions"], rows, header["cost"], header["left_out"], header["meta"])
        except (KeyError, TypeError, ValueError) as error:
            reason = f"it lacks {error}" if isinstance(error, KeyError) else error
            raise ResultFileError(f"{path} is not a consistent premise ablation file: {reason}") from error


_TOLD = {
    "gold": "the proof's premises",
    "best heads": "the premises that the heads attend to",
    "model": "the premises that each alone move the model most",
    "random": "as many premises from outside the proof",
    "random any": "as many premises at random",
}


def _told(row: Any, measure: str) -> str:
    return str(Interval(row[measure], row[f"{measure}_low"], row[f"{measure}_high"], 0.95, int(row["n"])))


def _moved(row: Any) -> str:
    """Which way the log-odds went and how far; the interval goes with the direction named."""
    if not row["drop"] < 0:
        return f"fall by {_told(row, 'drop')}"
    return f"rise by {Interval(-row['drop'], -row['drop_high'], -row['drop_low'], 0.95, int(row['n']))}"


def _parts(cell: pd.DataFrame, by: str | None) -> list[tuple[str, pd.DataFrame]]:
    """The questions, or those with each value of what they are split by; empty parts left out."""
    if by is None:
        return [(ALL, cell)] if len(cell) else []
    if by not in SPLITS:
        raise UnknownName("split of the premise ablation", by, SPLITS)
    told = {True: "right", False: "wrong"}
    values: Any = cell["right_before"].map(told) if by == "verdict" else cell["label"]
    return [(value, cell.loc[values == value]) for value in sorted(set(values))]


def _interval(
    x: Any, groups: Any, measure: str, level: float, n_boot: int, seed: int, *, paired: bool = False
) -> Interval:
    """Mean with its cluster bootstrap interval; log-odds that are all the same have none."""
    x, names = np.asarray(x, dtype=np.float64), [str(g) for g in groups]
    low, high = MEASURES[measure]
    if math.isinf(high) and (x == x[0]).all():
        return Interval(float(x[0]), math.nan, math.nan, level, len(x))
    return interval(x, names, level=level, n_boot=n_boot, seed=seed, low=low - high if paired else low, high=high)


def _rank_correlation(x: Any, y: Any, groups: Any, level: float, n_boot: int, seed: int) -> Interval:
    """Spearman's rho with a percentile interval from a bootstrap over groups; NaN where one side is constant."""
    x, y = np.asarray(x, dtype=np.float64), np.asarray(y, dtype=np.float64)
    codes = group_codes([str(g) for g in groups])
    members = [np.flatnonzero(codes == g) for g in range(codes.max() + 1)]
    estimate = _spearman(x, y)
    if len(members) < 2 or math.isnan(estimate):
        return Interval(estimate, math.nan, math.nan, level, len(x))
    rng = np.random.default_rng(seed)
    samples = np.empty(n_boot)
    for i in range(n_boot):
        drawn = np.concatenate([members[g] for g in rng.integers(0, len(members), len(members))])
        samples[i] = _spearman(x[drawn], y[drawn])
    low, high = percentiles(samples[:, None], level)
    return Interval(estimate, float(low[0]), float(high[0]), level, len(x))


def _spearman(x: np.ndarray, y: np.ndarray) -> float:
    from scipy.stats import rankdata

    a, b = rankdata(x), rankdata(y)
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt((a @ a) * (b @ b))
    return float(a @ b / size) if size > 0 else math.nan


def _checked_rows(rows: Any, questions: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A copy with its columns in order, or InvalidInput."""
    missing = [c for c in ROW_COLUMNS if c not in rows.columns]
    if missing or rows.empty:
        what = f"lacks the column {missing[0]!r}" if missing else "has no rows"
        raise InvalidInput(f"the premise ablation's table {what}; it needs the columns {', '.join(ROW_COLUMNS)}.")
    rows = rows[list(ROW_COLUMNS)].reset_index(drop=True)
    for column, known in (("trial_id", {q["trial_id"] for q in questions}), ("arm", ARMS), ("order", ORDERS)):
        stray = ~rows[column].isin(known)
        if stray.any():
            raise UnknownName(f"{column} in the premise ablation's table", rows.loc[stray, column].iloc[0], known)
    if rows.duplicated(_KEY).any():
        row = rows.loc[rows.duplicated(_KEY), _KEY].iloc[0].to_dict()
        raise InvalidInput(f"the premise ablation's table has two rows for {row}; every removal needs one.")
    for column in ("p_label", "log_odds", "verdict_log_odds"):
        if not np.isfinite(rows[column]).all():
            row = rows.loc[~np.isfinite(rows[column])].iloc[0]
            raise InvalidInput(f"{column} of trial {row['trial_id']!r} is {row[column]}; expected a finite number.")
    return rows


def _check_cost(cost: Mapping[str, Any]) -> None:
    """Refuse a cost without the numbers that ratios are made of."""
    for name in ("qk", "ablation"):
        for key in ("passes", "tokens", "seconds"):
            if not cost.get(name, {}).get(key, 0) > 0:
                raise InvalidInput(f"cost[{name!r}] needs {key!r} above 0; it is {cost.get(name)}.")
