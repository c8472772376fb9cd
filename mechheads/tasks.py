"""Tasks: trials with how they are measured, and the metrics of one trial's outcome."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any

import numpy as np

from mechheads.candidates import candidate_tokens
from mechheads.errors import InvalidInput, UnknownName
from mechheads.model import Model
from mechheads.provenance import content_hash
from mechheads.text import answer_f1, best_over, contains_answer, exact_match, rouge1_recall, rougeL_f
from mechheads.trials import Span, Trial, TrialSet
from mechheads.verdicts.decisions import answered

MEASURES = ("answer", "choice", "text")
SCORED = "scored"  # the span of a text that limits which of its tokens are scored
_FORMAT = 1  # of Task.hash: raise it when a metric's meaning changes
_ABOVE_ZERO = 1e-4  # nats: how far above 0 rounding may carry a log-probability
# Written without a space before what follows: brackets and quotes open, CJK text runs on.
_RUNS_ON = "([{\u2018\u201c\u300c\u300e\uff08\uff1a"


@dataclass(frozen=True)
class Outcome:
    """What a model did with one trial; a task asks only for what it ``needs``.

    Attributes:
        tokens: Generated token ids.
        text: Their text.
        answer_logprobs: Log-probability of each token of the gold answer after the prompt, each after the true ones
            before it (nats); see ``continuation``.
        logit_diff: ``logit(gold) - logit(foil)`` at the answer's first step (logits), of the first token of either.
        candidate_logprobs: Log-probability of each candidate after the prompt, summed over its tokens (nats).
        token_logprobs: Log-probability of each scored token of a text (nats); see ``scored_positions``.
    """

    tokens: tuple[int, ...] = ()
    text: str = ""
    answer_logprobs: tuple[float, ...] | None = None
    logit_diff: float | None = None
    candidate_logprobs: tuple[float, ...] | None = None
    token_logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Metric:
    """One number of one trial.

    Attributes:
        name: Its name in tasks and results.
        measure: The measure it belongs to.
        needs: What must be run for it: ``"generate"``, ``"answer"``, ``"candidates"`` or ``"text"``.
        unit: What it is counted in.
        higher_is_better: Its direction.
        about: One line.
    """

    name: str
    measure: str
    needs: str
    unit: str
    higher_is_better: bool
    about: str

    def chance(self, trial: Trial) -> float | None:
        """What guessing gets on a trial: one over its candidates for a choice, None where there is no such number."""
        return 1 / len(trial.candidates) if self.measure == "choice" else None


def _metrics(*rows: tuple[str, str, str, str, bool, str]) -> Mapping[str, Metric]:
    return MappingProxyType({row[0]: Metric(*row) for row in rows})


METRICS: Mapping[str, Metric] = _metrics(
    ("correct", "answer", "generate", "share, 0 or 1", True, "a gold answer stands in what was said, as whole words"),
    ("exact_match", "answer", "generate", "share, 0 or 1", True, "what was said is a gold answer, normalised"),
    ("rouge1_recall", "answer", "generate", "share, 0 to 1", True, "gold answer's words that were said"),
    ("rougeL_f", "answer", "generate", "share, 0 to 1", True, "ROUGE-L F-measure of what was said"),
    ("f1", "answer", "generate", "share, 0 to 1", True, "F1 over normalised words (SQuAD)"),
    ("answer_logprob", "answer", "answer", "nats a token", True, "mean log-probability of the gold answer's tokens"),
    ("logit_diff", "answer", "answer", "logits", True, "logit of the gold answer's first token minus the foil's"),
    ("choice_accuracy", "choice", "candidates", "share, 0 to 1", True, "the likeliest candidate is right, ties shared"),
    ("label_probability", "choice", "candidates", "share, 0 to 1", True, "right candidate's share of probability"),
    ("nll", "text", "text", "nats a token", False, "minus the mean log-probability of the scored tokens"),
    ("perplexity", "text", "text", "tokens", False, "exp(nll)"),
)
_SAID: Mapping[str, Callable[[str, str], float]] = MappingProxyType(
    {
        "correct": contains_answer,
        "exact_match": exact_match,
        "rouge1_recall": rouge1_recall,
        "rougeL_f": rougeL_f,
        "f1": answer_f1,
    }
)


@dataclass(frozen=True)
class Task:
    """A named set of trials with how it is measured. Everything unusable in it is refused when it is made.

    Attributes:
        name: What results call it; not part of ``hash``.
        trials: The trials.
        measure: ``"answer"`` (generate greedily and judge), ``"choice"`` (log-probabilities of the candidates) or
            ``"text"`` (log-probabilities of the trial's own tokens).
        metrics: Names from ``METRICS``, all of this measure; None is all of the measure (``logit_diff`` only where a
            trial has a foil).
        max_new_tokens: Longest answer.
        stop_at_newline: End an answer before a line break.
        foil: The wrong answer of ``logit_diff``, as text, for trials whose ``meta["foil"]`` names none. A trial without
            either has no such number (NaN).

    Raises:
        UnknownName: For a measure or metric nobody knows.
        InvalidInput: Naming task, trial and what it lacks, for trials that cannot be measured so.
    """

    name: str
    trials: TrialSet
    measure: str
    metrics: tuple[str, ...] | None = None
    max_new_tokens: int = 20
    stop_at_newline: bool = True
    foil: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise InvalidInput(f"the name of a task is {self.name!r}; give text, such as 'passkey'.")
        object.__setattr__(self, "trials", TrialSet.of(self.trials))
        if self.measure not in MEASURES:
            raise UnknownName(f"measure of the task {self.name!r}", self.measure, MEASURES)
        object.__setattr__(self, "metrics", None if self.metrics is None else tuple(self.metrics))
        self._check_options()
        if not len(self.trials):
            raise InvalidInput(f"the task {self.name!r} has no trials.")
        for trial in self.trials:
            _check_trial(self, trial)
        if "logit_diff" in self.measured and not any(map(self.foil_of, self.trials)):
            raise InvalidInput(
                f"the task {self.name!r} asks for logit_diff, but no trial names a wrong answer to compare with; give "
                'meta["foil"] in the trials, or foil= in the task.'
            )

    def _check_options(self) -> None:
        me = f"the task {self.name!r}"
        for name in self.metrics or ():
            if name not in METRICS:
                raise UnknownName(f"metric of {me}", name, METRICS)
            if (its := METRICS[name].measure) != self.measure:
                known = [m.name for m in METRICS.values() if m.measure == self.measure]
                raise InvalidInput(
                    f"{me} measures {self.measure!r}, and the metric {name!r} belongs to {its!r}; metrics of "
                    f"{self.measure!r}: {', '.join(known)}."
                )
        if self.metrics is not None and len(set(self.metrics)) < max(1, len(self.metrics)):
            raise InvalidInput(f"{me} has the metrics {list(self.metrics)}; name at least one, and each once.")
        if isinstance(self.max_new_tokens, bool) or not isinstance(self.max_new_tokens, int) or self.max_new_tokens < 1:
            raise InvalidInput(f"{me} has max_new_tokens={self.max_new_tokens!r}; give a whole number of 1 or more.")
        if not isinstance(self.stop_at_newline, bool):
            raise InvalidInput(f"{me} has stop_at_newline={self.stop_at_newline!r}; give True or False.")
        if self.foil is not None and not (isinstance(self.foil, str) and self.foil.strip()):
            raise InvalidInput(f"{me} has foil={self.foil!r}; give the text of a wrong answer, or None.")
        if self.foil is not None and "logit_diff" not in (self.metrics or ("logit_diff",)):
            raise InvalidInput(f"{me} has foil={self.foil!r}, but does not measure logit_diff; leave it None.")
        if self.foil is not None and self.measure != "answer":
            raise InvalidInput(f"{me} has foil={self.foil!r}, which only the measure 'answer' uses; leave it None.")

    @classmethod
    def of(cls, name: str, trials: Trial | Iterable[Trial], **options: Any) -> Task:
        """A task whose measure is told from its trials, unless ``measure=`` says it.

        Trials with candidates, a label and no gold answer are a choice; trials with a gold answer are answered; trials
        with a span ``scored``, or made by ``datasets.text_windows``, are text.

        Args:
            name: What results call it.
            trials: The trials.
            **options: Fields of ``Task``; ``metrics`` may be one name or a list.

        Raises:
            UnknownName: For a measure or metric nobody knows.
            InvalidInput: If the trials tell different measures, or none; or as ``Task`` does.
        """
        given = TrialSet.of(trials)
        if "measure" not in options:
            options["measure"] = _told_measure(name, given)
        if (metrics := options.get("metrics")) is not None:
            options["metrics"] = (metrics,) if isinstance(metrics, str) else tuple(metrics)
        return cls(name, given, **options)

    @cached_property
    def measured(self) -> tuple[str, ...]:
        """Names of the metrics, in the order of ``METRICS``, whatever order they were given in."""
        if self.metrics is not None:
            return tuple(name for name in METRICS if name in self.metrics)
        foils = self.measure == "answer" and any(map(self.foil_of, self.trials))
        return tuple(
            m.name for m in METRICS.values() if m.measure == self.measure and (m.name != "logit_diff" or foils)
        )

    @property
    def needs(self) -> frozenset[str]:
        """What must be run: of ``generate``, ``answer``, ``candidates`` and ``text`` those the metrics rest on."""
        return frozenset(METRICS[name].needs for name in self.measured)

    @cached_property
    def hash(self) -> str:
        """Content hash of all that changes the numbers: not of the name, nor of options that no metric uses."""
        content: dict[str, Any] = {
            "format": _FORMAT,
            "trials": self.trials.hash,
            "measure": self.measure,
            "metrics": list(self.measured),
        }
        if "generate" in self.needs:
            content |= {"max_new_tokens": self.max_new_tokens, "stop_at_newline": self.stop_at_newline}
        if "logit_diff" in self.measured:
            content["foil"] = self.foil
        return content_hash(content)

    def describe(self) -> dict[str, Any]:
        """All of it but the trials themselves, for a result's metadata; JSON-ready."""
        return {
            "name": self.name,
            "hash": self.hash,
            "measure": self.measure,
            "metrics": list(self.measured),
            "max_new_tokens": self.max_new_tokens,
            "stop_at_newline": self.stop_at_newline,
            "foil": self.foil,
            "trials": {
                "name": self.trials.name,
                "n": len(self.trials),
                "hash": self.trials.hash,
                "options": self.trials.options,
            },
        }

    def foil_of(self, trial: Trial) -> str | None:
        """The wrong answer that a trial's gold answer is compared with: its own, else the task's, else None.

        Raises:
            InvalidInput: If ``meta["foil"]`` is no text.
        """
        own = trial.meta.get("foil")
        if own is None:
            return self.foil
        if not (isinstance(own, str) and own.strip()):
            raise InvalidInput(f'trial {trial.id!r}: meta["foil"] is {own!r}; give the text of a wrong answer.')
        return own

    def contrast(self, model: Model, trial: Trial) -> tuple[int, int] | None:
        """Token ids whose logits ``logit_diff`` compares: the first of the gold answer and of the foil; None without.

        Raises:
            InvalidInput: If the two begin with the same token, so that their difference would always be 0.
        """
        foil = self.foil_of(trial)
        if foil is None or trial.answer is None or "logit_diff" not in self.measured:
            return None
        gold_token, foil_token = (continuation(model, trial, text)[0] for text in (trial.answer, foil))
        if gold_token == foil_token:
            raise InvalidInput(
                f"trial {trial.id!r}: the answer {trial.answer!r} and the foil {foil!r} begin with the same token "
                f"{gold_token}, so their logits are one; give a foil that begins otherwise."
            )
        return gold_token, foil_token

    def judge(self, trial: Trial, outcome: Outcome) -> dict[str, float]:
        """Every metric of one trial.

        Args:
            trial: One of the task's trials.
            outcome: What the model did with it.

        Returns:
            ``{metric: value}`` in the order of ``measured``; NaN only for ``logit_diff`` of a trial without a foil.

        Raises:
            InvalidInput: If the outcome lacks what a metric rests on, has another length than the trial asks for, or
                holds a number that is no log-probability (NaN, above 0).
        """
        return {name: self._value(name, trial, outcome) for name in self.measured}

    def _value(self, name: str, trial: Trial, outcome: Outcome) -> float:
        if name in _SAID:
            return best_over(_SAID[name], outcome.text, gold_answers(trial))
        if name == "answer_logprob":
            return float(np.mean(_logprobs(trial, "answer_logprobs", outcome)))
        if name == "logit_diff":
            return self._logit_diff(trial, outcome)
        if self.measure == "choice":
            given = _logprobs(trial, "candidate_logprobs", outcome, len(trial.candidates))
            return _choice(name, trial, given)
        nll = -float(np.mean(_logprobs(trial, "token_logprobs", outcome, len(scored_positions(trial)))))
        return nll if name == "nll" else _exp(nll)

    def _logit_diff(self, trial: Trial, outcome: Outcome) -> float:
        if self.foil_of(trial) is None:
            return math.nan
        if outcome.logit_diff is None or math.isnan(outcome.logit_diff):
            raise InvalidInput(
                f"trial {trial.id!r} has a foil, but its outcome's logit_diff is {outcome.logit_diff!r}; give the "
                "difference of the two logits at the answer's first step."
            )
        return float(outcome.logit_diff)


def gold_answers(trial: Trial) -> tuple[str, ...]:
    """The gold answer and the other forms of it in ``meta["aliases"]``, each once.

    Raises:
        InvalidInput: If the trial has no gold answer, or its aliases are no list of texts.
    """
    if trial.answer is None:
        raise InvalidInput(f"trial {trial.id!r} has no gold answer, so no answer can be judged.")
    aliases = trial.meta.get("aliases", [])
    if not isinstance(aliases, list) or not all(isinstance(a, str) and a.strip() for a in aliases):
        raise InvalidInput(
            f'trial {trial.id!r}: meta["aliases"] is {aliases!r}; give a list of texts, other forms of the answer '
            f"{trial.answer!r}."
        )
    return tuple(dict.fromkeys((trial.answer, *aliases)))


def scored_positions(trial: Trial) -> tuple[int, ...]:
    """Positions of the tokens of a text whose log-probability counts, rising.

    Those of the span ``scored``, or all but the first: nothing stands before it that could predict it.

    Raises:
        InvalidInput: If the text has one token, or the span holds the first.
    """
    if len(trial.tokens) < 2:
        raise InvalidInput(
            f"trial {trial.id!r} has 1 token; a text needs two or more, since the first is predicted by nothing."
        )
    if SCORED not in trial.spans:
        return tuple(Span(1, len(trial.tokens)))
    positions = trial.positions(SCORED)
    if positions[0] == 0:
        raise InvalidInput(
            f"trial {trial.id!r}: the span {SCORED!r} holds the first token, which nothing predicts; begin it at 1."
        )
    return positions


def continuation(model: Model, trial: Trial, text: str) -> tuple[int, ...]:
    """Token ids of an answer (or a foil) as it goes on after a trial's prompt, without special tokens.

    A space comes between them unless the prompt ends in white space or an opening bracket or quote, the text begins
    with white space, or one of the two is Chinese, Japanese or Korean where they meet. A trial made from a
    ``completion`` (``meta["completion"]``) says itself how its own answer goes on.

    Args:
        model: Whose tokenizer to use.
        trial: The trial, for the end of its prompt.
        text: The gold answer, or another text.

    Raises:
        InvalidInput: If the tokenizer makes nothing of it.
    """
    exact = trial.meta.get("completion")
    if text == trial.answer and isinstance(exact, str) and exact.strip() == text:
        written = exact
    else:
        before = model.decode(trial.tokens[-8:])[-1:]
        joined = not before or before.isspace() or before in _RUNS_ON or text[:1].isspace()
        joined = joined or _is_cjk(before) or _is_cjk(text[:1])
        written = text if joined else f" {text}"
    tokens = tuple(candidate_tokens(model, written))
    if not tokens:
        raise InvalidInput(f"trial {trial.id!r}: the tokenizer makes no token of the answer {text!r}.")
    return tokens


def _is_cjk(char: str) -> bool:
    return "\u3040" <= char <= "\u30ff" or "\u3400" <= char <= "\u9fff" or "\uac00" <= char <= "\ud7af"


def _told_measure(name: str, trials: TrialSet) -> str:
    """The measure that all trials tell."""
    if not len(trials):
        raise InvalidInput(f"the task {name!r} has no trials.")
    told: dict[str | None, str] = {}
    for trial in trials:
        told.setdefault(_measure_of(trial), trial.id)
    if None in told:
        raise InvalidInput(
            f"the task {name!r}: trial {told[None]!r} has neither a gold answer nor candidates with a label, so how to "
            "measure it is not known; give one of them, or measure='text' for the perplexity of its tokens."
        )
    if len(told) > 1:
        each = " and ".join(f"{measure!r} ({trial!r})" for measure, trial in told.items())
        raise InvalidInput(f"the task {name!r} mixes trials of {each}; make a task of each.")
    return str(next(iter(told)))


def _measure_of(trial: Trial) -> str | None:
    if trial.answer is not None:
        return "answer"
    if trial.candidates and trial.label is not None:
        return "choice"
    return "text" if SCORED in trial.spans or trial.meta.get("kind") == "text" else None


def _check_trial(task: Task, trial: Trial) -> None:
    """Refuse a trial that the task's measure cannot be taken of."""
    me = f"the task {task.name!r} measures {task.measure!r}"
    if task.measure == "text":
        scored_positions(trial)
    elif task.measure == "choice":
        if len(trial.candidates) < 2 or trial.label is None:
            raise InvalidInput(
                f"{me}, but trial {trial.id!r} has {len(trial.candidates)} candidates and the label {trial.label}; it "
                "needs two candidates or more and the index of the right one."
            )
    else:
        if trial.answer is None:
            raise InvalidInput(f"{me}, but trial {trial.id!r} has no gold answer; give Trial(..., answer='...').")
        golds = gold_answers(trial)
        foil = task.foil_of(trial)
        if foil is not None and _plain(foil) in map(_plain, golds):
            raise InvalidInput(f"trial {trial.id!r}: the foil {foil!r} is the gold answer; give a wrong one.")


def _plain(text: str) -> str:
    return " ".join(text.casefold().split())


def _logprobs(trial: Trial, name: str, outcome: Outcome, count: int | None = None) -> np.ndarray:
    """Log-probabilities of an outcome as float64, checked."""
    given: Sequence[float] | None = getattr(outcome, name)
    if not given:
        raise InvalidInput(f"the outcome of trial {trial.id!r} has no {name}, which the task's metrics rest on.")
    if count is not None and len(given) != count:
        raise InvalidInput(f"the outcome of trial {trial.id!r} has {len(given)} {name}; the trial asks for {count}.")
    values = np.asarray(given, dtype=np.float64)
    bad = np.isnan(values) | (values > _ABOVE_ZERO)
    if bad.any():
        at = int(np.argmax(bad))
        raise InvalidInput(
            f"the outcome of trial {trial.id!r} has {values[at]!r} in {name} at {at}; log-probabilities are numbers of "
            "at most 0 nats, so the model's output is broken there."
        )
    return values


def _choice(name: str, trial: Trial, logprobs: np.ndarray) -> float:
    """Credit of the likeliest candidate with ties shared, or the right candidate's softmax share."""
    if not np.isfinite(logprobs).any():
        raise InvalidInput(f"trial {trial.id!r}: every candidate has probability 0, so none of them is the answer.")
    label = trial.label or 0
    if name == "choice_accuracy":
        return float(answered(logprobs[None], np.array([len(logprobs)]))[0, label])
    shares = np.exp(logprobs - logprobs.max())
    return float(shares[label] / shares.sum())


def _exp(x: float) -> float:
    try:
        return math.exp(x)
    except OverflowError:  # a perplexity beyond float64: the model gives the text no chance at all
        return math.inf
