"""Premise ablation: take the premises a verdict may rest on away, run again, and see whether it moves.

The heavy alternative that the QK-score is offered against (arXiv 2502.17017): one run for every removal, where the
score needs one pass. It shows what the verdict rests on, and what that costs.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pandas as pd

from mechheads.candidate_scores import CandidateScores
from mechheads.candidates import candidate_logprobs, capture_candidates, read_question, tokens_run, without_queries
from mechheads.errors import InvalidInput, MechheadsError, UnknownName
from mechheads.heads import HeadSet
from mechheads.methods.registry import get_method
from mechheads.model import Model
from mechheads.premise_prompts import (
    attention_tokens,
    neutral_sentences,
    premise_attention,
    premise_spans,
    rebuilt,
)
from mechheads.premise_result import ARMS, CUMULATIVE, SINGLY, PremiseAblation
from mechheads.progress import progress_bar
from mechheads.provenance import collect, content_hash
from mechheads.runner import prompt_hash
from mechheads.stats import check_count
from mechheads.trials import Span, Trial, TrialSet
from mechheads.verdicts.decisions import answered, with_sign
from mechheads.verdicts.evaluation import chosen_heads, head_credit

REPLACE = ("remove", "distractor")
_NEED_PROOF = ("gold", "random")
_KEPT_META = ("rule", "depth", "distractors", "dataset", "wording")
_Key = tuple[tuple[int, ...], tuple[tuple[int, ...], ...]]


def run_premises(
    model: Model,
    trials: Trial | Sequence[Trial],
    *,
    heads: Any = None,
    inverse: Any = (),
    offset: np.ndarray | None = None,
    qk: CandidateScores | None = None,
    rounds: int = 3,
    arms: str | Sequence[str] | None = None,
    replace: str = "remove",
    seed: int = 0,
    batch_size: int = 8,
    rebuild: Callable[..., Trial] | None = None,
    locate: Callable[[Model, Trial], Sequence[Span]] | None = None,
    progress: bool | None = None,
) -> PremiseAblation:
    """Remove premises one at a time and cumulatively, and run the model again after each removal.

    Each arm says which premises go, and in which order; all remove as many: the size of the proof, at most ``rounds``
    (``rounds`` where no proof is known).

    * ``gold``: the proof's premises, in random order.
    * ``best heads``: those that the heads attend to most. Scores ``q . k`` of different keys are not comparable across
      positions, so this goes by attention: each head's weights from the last prompt token and from the last token of
      the candidate that the model chose, summed over a premise's tokens, mean over the two and over heads. Longer
      premises can gather more.
    * ``model``: those whose removal alone lowers the log-odds of the model's own verdict most (leave one out: a run for
      every premise, which counts in the cost).
    * ``random``: premises from outside the proof, as many where there are so many.
    * ``random any``: any premises.

    Removal makes the prompt shorter. ``replace="distractor"`` puts a sentence about words that the question does not
    use in the premise's place, as near in tokens as its forms allow, so that length is not what moves the verdict.

    The model's verdict is the candidate with the highest log-probability; a tie with its first verdict is no move. With
    the evidence gone the right answer is unknown, so among true and false a verdict that rested on it falls back to the
    model's standing answer and may well stay where it was: read flips by label, beside the log-odds.

    Args:
        model: The model, with whatever hooks are in force.
        trials: Questions with ``meta["premises"]`` and, where known, ``meta["proof"]``.
        heads: QK heads, for the arm ``best heads`` and for QK verdicts (the majority of the heads, ties in part).
        inverse: Heads among them whose sign is turned for the QK verdict.
        offset: Calibration offset ``[candidate layer head]`` for the QK verdict, or None.
        qk: Scores of these trials, of this model; scored anew if None. The pass that the cost is compared with is run
            either way.
        rounds: Most premises removed from one question.
        arms: Arms to run; None for all (``best heads`` only with heads).
        replace: ``"remove"`` or ``"distractor"``.
        seed: Seed of every order and of the sentences put in.
        batch_size: Prompts run together; equal prompts run once.
        rebuild: ``rebuild(model, trial, premises=[indices kept]) -> Trial``, for trials not of our logic data sets;
            with ``replace="distractor"`` it is given ``replaced={index: sentence}`` as well.
        locate: ``locate(model, trial)`` gives each premise's token span; needed for ``best heads`` beside ``rebuild``.
        progress: Show a bar (None: only on a terminal).

    Ctrl-C keeps the questions that are done, with a warning and ``meta["complete"]`` False.

    Returns:
        Every run, question by question; rates, differences and ratios are derived from them.

    Raises:
        UnknownName: For an unknown arm or way to replace.
        InvalidInput: If a trial has no premises or a proof that names none, heads are missing for an arm that needs
            them, ``qk`` is of other trials or weights, or no question is left for any arm.
    """
    asked = TrialSet.of(trials)
    chosen = None if heads is None else HeadSet.parse(heads)
    wanted = _checked_arms(arms, chosen, rebuild, locate)
    if replace not in REPLACE:
        raise UnknownName("way to replace a premise", replace, REPLACE)
    check_count("rounds", rounds)
    check_count("batch_size", batch_size)
    check_count("seed", seed, least=0)
    asking = [_read(model, trial, rounds) for trial in _nonempty(asked)]
    _left_out(asking, wanted)  # says so before the first pass if there is nothing to do
    scores, qk_cost = _qk_pass(model, asked, batch_size)
    verdicts = None
    if chosen is not None:
        verdicts = qk_verdicts(scores if qk is None else _matching(model, asked, qk), chosen, inverse, offset)
    how = _How(wanted, replace, seed, batch_size, rebuild or rebuilt, locate or premise_spans, chosen)
    options = {
        "arms": list(wanted), "rounds": rounds, "replace": replace, "batch_size": batch_size,
        "heads": None if chosen is None else chosen.labels, "inverse": HeadSet.parse(inverse).labels,
        "offset": offset is not None, "qk": None if qk is None else dict(qk.meta.get("options", {})),
        "rebuild": None if rebuild is None else getattr(rebuild, "__name__", "own"),
    }  # fmt: skip
    setting = _Setting(model, asked, asking, how, verdicts, qk_cost, model.describe(), options)
    return _run_all(setting, progress)


@dataclass(frozen=True)
class _Setting:
    """All that a result is made of, besides the runs."""

    model: Model
    trials: TrialSet
    asking: list[_Asked]
    how: _How
    verdicts: tuple[np.ndarray, np.ndarray] | None
    qk_cost: dict[str, Any]
    described: dict[str, Any]
    options: dict[str, Any]

    def result(self, run: _Run, *, complete: bool) -> PremiseAblation:
        """What is done, in the order of the trial set; costs and counts are those of the questions done."""
        places = {trial.id: i for i, trial in enumerate(self.trials)}
        questions = [
            {**q, **_qk_entry(self.verdicts, places[q["trial_id"]])}
            for q in sorted(run.questions, key=lambda q: places[q["trial_id"]])
        ]
        done = {q["trial_id"] for q in questions}
        one_pass = self.qk_cost if complete else _share(self.model, self.trials, done, self.qk_cost)
        meta = collect(
            self.described, "premise_ablation", self.options, self.trials.name, self.trials.hash, self.trials.options,
            seed=self.how.seed, complete=complete, n_trials_asked=len(self.trials),
            ablated=self.model.backend.hooked(), interventions=list(self.model.ablations),
        )  # fmt: skip
        return PremiseAblation(
            questions=questions,
            rows=pd.DataFrame(sorted(run.rows, key=lambda r: places[r["trial_id"]])),
            cost={**run.cost(), "qk": one_pass},
            left_out=_left_out([one for one in self.asking if one.trial.id in done], self.how.arms),
            meta=meta,
        )


def _run_all(setting: _Setting, progress: bool | None) -> PremiseAblation:
    """Every question, some at a time, so that an interruption loses no finished one."""
    run, asking, step = _Run(setting.model, setting.how), setting.asking, setting.how.batch_size
    with progress_bar("questions without premises", len(asking), show=progress) as advance:
        for start in range(0, len(asking), step):
            some = asking[start : start + step]
            try:
                run.chunk(some)
            except KeyboardInterrupt:
                if not run.rows:
                    raise
                warnings.warn(
                    f"interrupted: {len(run.questions)} of {len(asking)} questions are done and kept; the result says "
                    "so in meta['complete'].",
                    stacklevel=4,
                )
                return setting.result(run, complete=False)
            except MechheadsError as error:
                error.partial = {"premises": setting.result(run, complete=False)} if run.rows else {}
                raise
            advance(len(some))
    return setting.result(run, complete=True)


# -- what is asked --------------------------------------------------------------------------------------------


@dataclass
class _Asked:
    """A question, how many premises every arm removes from it, and its first verdict once known."""

    trial: Trial
    premises: list[str]
    proof: list[int] | None
    number: int
    first: tuple[float, ...] = ()
    verdict: int = -1
    neutral: list[str] = field(default_factory=list)

    def pool(self, arm: str) -> list[int]:
        """Premises that an arm may remove."""
        if arm in _NEED_PROOF and not self.proof:
            return []
        everything = list(range(len(self.premises)))
        proof = self.proof or []
        return {"gold": proof, "random": [i for i in everything if i not in proof]}.get(arm, everything)


def _checked_arms(
    arms: str | Sequence[str] | None, heads: HeadSet | None, rebuild: Any, locate: Any
) -> tuple[str, ...]:
    """Names of the arms in their fixed order."""
    if arms is None:
        usable = heads is not None and (rebuild is None or locate is not None)
        return tuple(a for a in ARMS if a != "best heads" or usable)
    named = (arms,) if isinstance(arms, str) else tuple(arms)
    for arm in named:
        if arm not in ARMS:
            raise UnknownName("arm of the premise ablation", arm, ARMS)
    if not named:
        raise InvalidInput(f"arms is empty; name at least one of: {', '.join(ARMS)}.")
    if "best heads" in named and not heads:
        raise InvalidInput(
            "the arm 'best heads' removes the premises that QK heads attend to, but no heads are given; pass "
            "heads=..., such as qk.select(5)."
        )
    if "best heads" in named and rebuild is not None and locate is None:
        raise InvalidInput(
            "the arm 'best heads' must know each premise's tokens, and trials with a rebuild of their own do not tell; "
            "pass locate=..., which gives a trial's premise spans."
        )
    return tuple(a for a in ARMS if a in named)


def _nonempty(trials: TrialSet) -> TrialSet:
    if not len(trials):
        raise InvalidInput("there are no trials to take premises from.")
    return trials


def _read(model: Model, trial: Trial, rounds: int) -> _Asked:
    """A trial's premises and proof, checked."""
    read_question(model, trial)
    me, premises = f"trial {trial.id!r}", trial.meta.get("premises")
    if not isinstance(premises, list) or not premises or not all(isinstance(p, str) for p in premises):
        raise InvalidInput(
            f"{me} has the premises {premises!r} in its meta; premise ablation needs a list of sentences, as the logic "
            "data sets give it."
        )
    proof = trial.meta.get("proof")
    fine = proof is None or (isinstance(proof, list) and all(isinstance(i, int) for i in proof))
    if not fine or (proof and not 0 <= min(proof) <= max(proof) < len(premises)):
        raise InvalidInput(f"{me}: the proof {proof!r} names no premises; there are {len(premises)}.")
    number = min(rounds, len(set(proof)) if proof else len(premises))
    return _Asked(trial, premises, sorted(set(proof)) if proof else None, number)


def _left_out(asking: Sequence[_Asked], arms: Sequence[str]) -> dict[str, int]:
    """For each arm how many questions it has no premise for; an error if that is all of all arms."""
    left = {arm: sum(not one.pool(arm) for one in asking) for arm in arms}
    if all(n == len(asking) for n in left.values()):
        raise InvalidInput(
            f"none of the {len(asking)} questions has a known proof, so the arms {', '.join(arms)} have nothing to "
            "remove; name others, such as 'model' or 'random any'."
        )
    return left


def _matching(model: Model, trials: TrialSet, qk: CandidateScores) -> CandidateScores:
    """The given scores of these trials, in their order, if they are of these prompts and weights."""
    place = {trial: i for i, trial in enumerate(qk.trial_ids)}
    missing = [t.id for t in trials if t.id not in place]
    if missing:
        raise InvalidInput(f"qk has no scores of trial {missing[0]!r} ({len(missing)} such); score these trials.")
    taken = qk.take([place[t.id] for t in trials])
    for trial, record in zip(trials, taken.records, strict=True):
        if record.get("prompt_hash", prompt_hash(trial)) != prompt_hash(trial):
            raise InvalidInput(f"qk scored another prompt under the id {trial.id!r}; score these trials.")
    weights = qk.meta.get("model", {}).get("weight_hash")
    if weights is not None and weights != model.weight_hash():
        raise InvalidInput("qk was scored on other weights than this model's; score these trials with it.")
    return taken


# -- QK verdicts and their cost -------------------------------------------------------------------------------


def _qk_pass(model: Model, trials: TrialSet, batch_size: int) -> tuple[CandidateScores, dict[str, Any]]:
    """Scores of one pass, and what it took; the first batch runs once before, so that no start-up is measured."""
    method = get_method("qk")
    options, layers = method.resolve({}), range(model.spec.n_layers)
    width = max(len(t.candidates) for t in trials)
    values = np.full((len(trials), width, model.spec.n_layers, model.spec.n_heads), np.nan, dtype=np.float32)
    baseline = np.full((len(trials), width), np.nan)
    order = sorted(range(len(trials)), key=lambda i: len(trials[i].tokens))
    capture_candidates(model, [trials[i] for i in order[:batch_size]])
    began = time.perf_counter()
    for start in range(0, len(order), batch_size):
        places = order[start : start + batch_size]
        for i, one in zip(places, capture_candidates(model, [trials[i] for i in places]), strict=True):
            n = len(one.logprobs)
            of_layers = [method.function(one.layer(layer), one.trial, **options).float().cpu() for layer in layers]
            values[i, :n], baseline[i, :n] = np.stack(of_layers, axis=1), one.logprobs
    seconds = time.perf_counter() - began
    scores = CandidateScores(
        values=values,
        baseline=baseline,
        labels=np.array([t.label for t in trials], dtype=np.int64),
        candidates=[t.candidates for t in trials],
        trial_ids=[t.id for t in trials],
    )
    tokens = sum(tokens_run(read_question(model, t)) for t in trials)
    return scores, {"passes": len(trials), "tokens": tokens, "seconds": seconds}


def _share(model: Model, trials: TrialSet, done: set[str], cost: Mapping[str, Any]) -> dict[str, Any]:
    """The cost of the pass over some of the trials, seconds in proportion to tokens."""
    tokens = sum(tokens_run(read_question(model, t)) for t in trials if t.id in done)
    return {"passes": len(done), "tokens": tokens, "seconds": cost["seconds"] * tokens / cost["tokens"]}


def qk_verdicts(
    scores: CandidateScores, heads: Any, inverse: Any = (), offset: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """How far the heads' majority is right in each trial, and by what margin.

    The margin of a head is ``S_right - max over others of S`` (less the offset), over its standard deviation across
    these trials, since heads score in units of their own; the heads' mean is returned. Positive: for the right answer.

    Returns:
        ``[trial]`` credit (1, 0, a part for ties) and ``[trial]`` margins in standard deviations.

    Raises:
        InvalidInput: As ``mechheads.verdicts.evaluate`` does for heads and offsets that do not fit.
    """
    chosen, turned = chosen_heads(scores, heads, inverse)
    signed, taken = with_sign(scores, offset, turned)
    votes = np.round(head_credit(signed, chosen, taken).sum(axis=2), 9)
    rows = np.arange(len(scores))
    margins = []
    for head in chosen:
        values = signed.values[:, :, head.layer, head.head].astype(np.float64)
        values = values if taken is None else values - taken[:, head.layer, head.head]
        own = values[rows, scores.labels]
        others = np.where(np.isnan(values), -np.inf, values)
        others[rows, scores.labels] = -np.inf
        margin = own - others.max(axis=1)
        spread = margin.std()
        margins.append(margin / spread if spread > 0 else np.zeros(len(margin)))
    return answered(votes, scores.n_candidates)[rows, scores.labels], np.mean(margins, axis=0)


def _qk_entry(verdicts: tuple[np.ndarray, np.ndarray] | None, place: int) -> dict[str, float | None]:
    if verdicts is None:
        return {"qk_right": None, "qk_margin": None}
    return {"qk_right": float(verdicts[0][place]), "qk_margin": float(verdicts[1][place])}


# -- running --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _How:
    """Options of a run."""

    arms: tuple[str, ...]
    replace: str
    seed: int
    batch_size: int
    rebuild: Callable[..., Trial]
    locate: Callable[[Model, Trial], Sequence[Span]]
    heads: HeadSet | None


class _Run:
    """Questions run so far, their rows, and what they took."""

    def __init__(self, model: Model, how: _How):
        self.model, self.how = model, how
        self.questions: list[dict[str, Any]] = []
        self.rows: list[dict[str, Any]] = []
        self.known: dict[_Key, tuple[float, ...]] = {}
        self.spent = {"passes": 0, "tokens": 0, "seconds": 0.0}
        self.of_arm: dict[str, dict[Any, int]] = {arm: {} for arm in how.arms}

    def cost(self) -> dict[str, Any]:
        """What was run, and what each arm would take by itself."""
        alone = {arm: {"passes": len(used), "tokens": sum(used.values())} for arm, used in self.of_arm.items()}
        return {"ablation": dict(self.spent), "by_arm": alone}

    def chunk(self, some: Sequence[_Asked]) -> None:
        """Run some questions whole; nothing of them is kept, nor counted, if this is interrupted."""
        before = dict(self.spent), {arm: dict(used) for arm, used in self.of_arm.items()}
        try:
            self._run(some)
        except BaseException:
            self.spent, self.of_arm = before
            raise

    def _run(self, some: Sequence[_Asked]) -> None:
        began = time.perf_counter()
        for one, logprobs in zip(some, self.logprobs([(one.trial, self.how.arms) for one in some]), strict=True):
            one.first, one.verdict = logprobs, verdict_of(logprobs)
            if self.how.replace == "distractor":
                one.neutral = neutral_sentences(self.model, one.trial, seed=self.how.seed)
        plans = self._plans(some)
        found = self.logprobs([(self.without(one, gone), (arm,)) for one, arm, _, _, gone in plans])
        rows = [
            {"trial_id": one.trial.id, "arm": arm, "order": order, "round": round, "removed": gone}
            | _measured(logprobs, one)
            for (one, arm, order, round, gone), logprobs in zip(plans, found, strict=True)
        ]
        self.spent["seconds"] += time.perf_counter() - began
        self.rows += rows
        self.questions += [_question_entry(one) for one in some]

    def _plans(self, some: Sequence[_Asked]) -> list[tuple[_Asked, str, str, int, list[int]]]:
        """Every removal: question, arm, order, round and the premises gone."""
        orders = {arm: [self._drawn(arm, one) for one in some] for arm in self.how.arms}
        if "model" in orders:
            orders["model"] = self._by_leaving_out(some)
        if "best heads" in orders:
            orders["best heads"] = self._by_attention(some)
        plans = []
        for arm, chosen in orders.items():
            for one, all_of_arm in zip(some, chosen, strict=True):
                gone = all_of_arm[: one.number]
                plans += [(one, arm, SINGLY, i + 1, [p]) for i, p in enumerate(gone)]
                plans += [(one, arm, CUMULATIVE, i + 1, gone[: i + 1]) for i in range(len(gone))]
        return plans

    def _drawn(self, arm: str, one: _Asked) -> list[int]:
        """An arm's premises in random order, by the seed and the trial's id alone."""
        rng = np.random.default_rng(int(content_hash([self.how.seed, one.trial.id, arm])[:12], 16))
        pool = one.pool(arm)
        return [pool[i] for i in rng.permutation(len(pool))]

    def _by_leaving_out(self, some: Sequence[_Asked]) -> list[list[int]]:
        """Premises by how far the first verdict's log-odds fall when each alone is gone."""
        every = [(one, i) for one in some for i in range(len(one.premises))]
        found = iter(self.logprobs([(self.without(one, [i]), ("model",)) for one, i in every]))
        out = []
        for one in some:
            left = np.array([log_odds(next(found), one.verdict) for _ in one.premises])
            out.append([int(i) for i in np.argsort(left, kind="stable")])
        return out

    def _by_attention(self, some: Sequence[_Asked]) -> list[list[int]]:
        """Premises by the heads' attention to them."""
        assert self.how.heads is not None
        trials = [one.trial for one in some]
        spans = [self.how.locate(self.model, trial) for trial in trials]
        for one, mine in zip(some, spans, strict=True):
            if len(mine) != len(one.premises):
                raise InvalidInput(
                    f"trial {one.trial.id!r} has {len(one.premises)} premises, but locate gave {len(mine)} spans."
                )
        masses = premise_attention(self.model, self.how.heads, trials, spans, [one.verdict for one in some])
        for one in some:
            tokens = attention_tokens(self.model, one.trial, one.verdict)
            self.of_arm["best heads"]["attention", one.trial.id] = len(tokens)
            self.spent["passes"] += 1
            self.spent["tokens"] += len(tokens)
        return [[int(i) for i in np.argsort(-mass, kind="stable")] for mass in masses]

    def without(self, one: _Asked, gone: Sequence[int]) -> Trial:
        """The question with some premises gone, or neutral sentences in their place."""
        kept = [i for i in range(len(one.premises)) if i not in gone]
        if self.how.replace == "distractor":
            replaced = {i: one.neutral[i] for i in sorted(gone)}
            made = self.how.rebuild(self.model, one.trial, premises=kept, replaced=replaced)
        else:
            made = self.how.rebuild(self.model, one.trial, premises=kept)
        if made.candidates != one.trial.candidates:
            raise InvalidInput(
                f"trial {one.trial.id!r} has the candidates {one.trial.candidates}, without premises {list(gone)} "
                f"{made.candidates}; rebuild must keep them."
            )
        return made

    def logprobs(self, wanted: Sequence[tuple[Trial, Sequence[str]]]) -> list[tuple[float, ...]]:
        """Log-probabilities of each prompt's candidates, every distinct prompt run once and counted for its arms."""
        keys: list[_Key] = []
        new: dict[_Key, tuple[Trial, int]] = {}
        for trial, arms in wanted:
            question = without_queries(read_question(self.model, trial))
            key = (tuple(trial.tokens), question.tokens)
            keys.append(key)
            for arm in arms:
                self.of_arm[arm][key] = tokens_run(question)
            if key not in self.known:
                new.setdefault(key, (trial, tokens_run(question)))
        found = candidate_logprobs(self.model, [t for t, _ in new.values()], batch_size=self.how.batch_size)
        self.known.update(zip(new, found, strict=True))
        self.spent["passes"] += len(new)
        self.spent["tokens"] += sum(n for _, n in new.values())
        return [self.known[key] for key in keys]


def log_odds(logprobs: Sequence[float], i: int) -> float:
    """Log-probability of a candidate less that of the best other (nats)."""
    return logprobs[i] - max(x for j, x in enumerate(logprobs) if j != i)


def verdict_of(logprobs: Sequence[float], first: int | None = None) -> int:
    """The most probable candidate; of several equal ones the first verdict if it is among them, else the earliest."""
    best = max(logprobs)
    return first if first is not None and logprobs[first] == best else list(logprobs).index(best)


def _measured(logprobs: Sequence[float], one: _Asked) -> dict[str, Any]:
    """A run's verdict, the right answer's probability and log-odds, and the log-odds of the first verdict."""
    label = one.trial.label or 0
    shares = np.exp(np.array(logprobs) - max(logprobs))
    return {
        "verdict": verdict_of(logprobs, one.verdict),
        "p_label": float(shares[label] / shares.sum()),
        "log_odds": float(log_odds(logprobs, label)),
        "verdict_log_odds": float(log_odds(logprobs, one.verdict)),
    }


def _question_entry(one: _Asked) -> dict[str, Any]:
    trial = one.trial
    return {
        "trial_id": trial.id,
        "group": str(trial.meta.get("group") or trial.id),
        "candidates": list(trial.candidates),
        "label": trial.label,
        **_measured(one.first, one),
        "n_premises": len(one.premises),
        "proof": one.proof,
        "number": one.number,
        "split": trial.split,
        **{key: trial.meta[key] for key in _KEPT_META if key in trial.meta},
    }
