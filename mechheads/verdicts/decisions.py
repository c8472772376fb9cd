"""What a head answers, and whether that is right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet

# Scores of one trial agree to about a tenth of this share of their size, however it is batched.
ROUNDING = 1e-5
OFFSETS = ("none", "median")
NORMALISATIONS = ("sum", "mean")


def align(scores: CandidateScores, order: Sequence[str] | None = None) -> CandidateScores:
    """The same scores with every trial's candidates in one order, where all trials have the same candidates.

    Which text stands first may differ between trials. A head's liking for a word only shows once each word has one
    place, so everything that goes by place (offsets, AUROC, permuted labels) starts from here.

    Args:
        scores: Any candidate scores.
        order: Texts in the order wanted; the first trial's if None.

    Returns:
        Scores with candidates, values, baseline, labels and the records' ``candidate_tokens`` reordered; the very same
        object where nothing has to move, or where trials have other candidates than ``order`` (then places stay).

    Raises:
        InvalidInput: If a record has ``candidate_tokens`` of another length than its trial has candidates.
    """
    if not len(scores):
        return scores
    wanted = tuple(scores.candidates[0] if order is None else order)
    if len(set(wanted)) != len(wanted) or any(sorted(c) != sorted(wanted) for c in scores.candidates):
        return scores
    if all(tuple(c) == wanted for c in scores.candidates):
        return scores
    places = np.array([[c.index(text) for text in wanted] for c in map(list, scores.candidates)])
    values, baseline = scores.values.copy(), scores.baseline.copy()
    width = len(wanted)
    values[:, :width] = np.take_along_axis(scores.values, places[:, :, None, None], axis=1)
    baseline[:, :width] = np.take_along_axis(scores.baseline, places, axis=1)
    records = []
    for i, record in enumerate(scores.records):
        tokens = record.get("candidate_tokens")
        if tokens is not None:
            _check_tokens(scores, i, tokens)
            record = {**record, "candidate_tokens": [tokens[p] for p in places[i]]}
        records.append(record)
    return replace(
        scores,
        values=values,
        baseline=baseline,
        labels=(places == scores.labels[:, None]).argmax(axis=1),
        candidates=[wanted] * len(scores),
        records=records,
    )


def centred(values: np.ndarray, counts: np.ndarray) -> np.ndarray:
    """Scores less the mean over the trial's candidates: ``S_i - mean_j S_j``.

    The mean is taken as ``(n S_i - sum_j S_j) / n``: numerator and denominator are exact for ordinary scores, so trials
    that tie on paper tie here.

    Args:
        values: ``[trial candidate ...]``, NaN for absent candidates and undefined heads.
        counts: ``[trial]`` number of candidates.

    Returns:
        float64 of the same shape, NaN likewise.
    """
    wide = values.astype(np.float64)
    shape = (-1,) + (1,) * (wide.ndim - 2)
    present = (np.arange(wide.shape[1]) < counts[:, None]).reshape(*wide.shape[:2], *(1,) * (wide.ndim - 2))
    total = np.where(present, wide, 0.0).sum(axis=1, keepdims=True)
    n = counts.reshape(shape)[:, None].astype(np.float64)
    return (n * wide - total) / n


def offsets(calibration: CandidateScores, kind: str = "none") -> np.ndarray | None:
    """What to take off a head's scores before comparing candidates, so that it has no standing answer.

    ``median``: ``o_i = median over calibration trials of (S_i - mean_j S_j)``. With two candidates the head then
    answers the second where ``S_1 - S_0`` is above its calibration median margin.

    Args:
        calibration: Scores on calibration trials only.
        kind: ``"none"`` or ``"median"``.

    Returns:
        ``[candidate layer head]`` float64 in the scores' unit, NaN for undefined heads; None for ``"none"``.

    Raises:
        UnknownName: If there is no such kind.
        InvalidInput: If there is no trial, or the trials do not all have the same candidates in the same order.
    """
    if kind not in OFFSETS:
        raise UnknownName("calibration offset", kind, OFFSETS)
    if kind == "none":
        return None
    if not len(calibration):
        raise InvalidInput("there are no calibration trials to take a median offset from; give some, or offset='none'.")
    _check_one_order(calibration, calibration.candidates[0])
    width = len(calibration.candidates[0])
    out = np.full(calibration.values.shape[1:], np.nan)
    counts = calibration.n_candidates
    for layer in range(calibration.n_layers):  # a layer at a time: the centred scores of all would double the memory
        out[:width, layer] = np.median(centred(calibration.values[:, :width, layer], counts), axis=0)
    return out


def fitted(
    calibration: CandidateScores, test: CandidateScores, kind: str
) -> tuple[CandidateScores, CandidateScores, np.ndarray | None]:
    """Both sets with their candidates in one order, and the offset that the first gives for the two.

    Raises:
        UnknownName: If there is no such kind of offset.
        InvalidInput: As ``offsets`` does, for either set, or if the two have other candidates.
    """
    calibration = align(calibration)
    test = align(test, calibration.candidates[0])
    taken = offsets(calibration, kind)
    if taken is not None:
        offsets(test, kind)  # the same refusals: an offset belongs to one candidate
        if test.candidates[0] != calibration.candidates[0]:
            raise InvalidInput(
                f"test trials have the candidates {test.candidates[0]}, calibration {calibration.candidates[0]}; a "
                "median offset belongs to one candidate. Use offset='none', or calibrate on trials with the same ones."
            )
    return calibration, test, taken


def trial_keys(scores: CandidateScores) -> list[str]:
    """``[trial]`` what tells a trial from others: its prompt's hash, or its id where the record has none."""
    pairs = zip(scores.trial_ids, scores.column("prompt_hash"), strict=True)
    return [f"id {trial}" if prompt is None else f"prompt {prompt}" for trial, prompt in pairs]


def credit(scores: CandidateScores, offset: np.ndarray | None = None) -> np.ndarray:
    """What each head answers: ``credit_i = [i is a best candidate] / (number of best)``, best by ``S_i - offset_i``.

    Args:
        scores: Any candidate scores.
        offset: ``[candidate layer head]`` from ``offsets``, or None.

    Returns:
        ``[trial candidate layer head]`` float64, 0 to 1, summing to 1 over a trial's candidates; NaN for candidates
        that a trial does not have, and for all candidates where the head lacks a score for one of them.

    Raises:
        InvalidInput: If the offset has another shape, or is infinite.
    """
    check_offset(scores, offset)
    out = np.empty(scores.values.shape)
    for layer in range(scores.n_layers):
        out[:, :, layer] = layer_credit(scores, layer, offset)
    return out


def label_credit(scores: CandidateScores, offset: np.ndarray | None = None) -> np.ndarray:
    """How far each head is right: the credit of the right candidate.

    Returns:
        ``[trial layer head]`` float64: 1 right, 0 wrong, ``1/m`` where the right candidate is one of m equally best;
        NaN where the head has no answer.

    Raises:
        InvalidInput: If the offset has another shape, or is infinite.
    """
    check_offset(scores, offset)
    out = np.empty((len(scores), *scores.values.shape[2:]))
    rows = np.arange(len(scores))
    for layer in range(scores.n_layers):
        out[:, layer] = layer_credit(scores, layer, offset)[rows, scores.labels]
    return out


def accuracy(scores: CandidateScores, offset: np.ndarray | None = None) -> np.ndarray:
    """Share of trials a head is right in, ties counting in part.

    A head is judged on all trials or on none: with a score missing in some trial it would be compared with its
    neighbours over other questions, so it is NaN.

    Returns:
        ``[layer head]`` float64, 0 to 1.

    Raises:
        InvalidInput: If there is no trial, or the offset has another shape.
    """
    check_some(scores)
    return label_credit(scores, offset).mean(axis=0)


def baseline_credit(scores: CandidateScores, *, normalise: str = "sum") -> np.ndarray:
    """What the model itself answers over the same candidates, by its own log-probabilities.

    Args:
        scores: Any candidate scores.
        normalise: ``"sum"``: the candidate's log-probability as it is (nats); ``"mean"``: a token's, so that longer
            candidates are not at a disadvantage (needs ``candidate_tokens`` in the records).

    Returns:
        ``[trial candidate]`` float64 as ``credit``'s, NaN for candidates that a trial does not have.

    Raises:
        UnknownName: If there is no such normalisation.
        InvalidInput: If a record lacks a usable ``candidate_tokens`` for ``"mean"``.
    """
    if normalise not in NORMALISATIONS:
        raise UnknownName("normalisation", normalise, NORMALISATIONS)
    values = scores.baseline
    if normalise == "mean":
        lengths = np.ones(values.shape)
        for i, record in enumerate(scores.records):
            _check_tokens(scores, i, record.get("candidate_tokens"))
            lengths[i, : len(scores.candidates[i])] = record["candidate_tokens"]
        values = values / lengths
    return answered(values, scores.n_candidates)


def with_sign(
    scores: CandidateScores, offset: np.ndarray | None, inverse: HeadSet
) -> tuple[CandidateScores, np.ndarray | None]:
    """Scores and offset with the sign of some heads turned, so that each of these answers what it scores lowest.

    Raises:
        InvalidInput: If a head does not exist, or the offset has another shape.
    """
    check_offset(scores, offset)
    if not len(inverse):
        return scores, offset
    sign = np.where(inverse.mask(*scores.values.shape[2:]), -1.0, 1.0)
    turned = replace(scores, values=scores.values * sign.astype(np.float32))
    return turned, None if offset is None else offset * sign


def layer_credit(scores: CandidateScores, layer: int, offset: np.ndarray | None) -> np.ndarray:
    """``credit`` of one layer's heads, ``[trial candidate head]``.

    With an offset, candidates are tied that lie closer than float32 can tell at the size of their scores: a head of the
    first layer has the same margin in every trial, and all that an offset leaves of it is rounding.
    """
    values = scores.values[:, :, layer].astype(np.float64)
    if offset is None:
        return answered(values, scores.n_candidates)
    close = ROUNDING * np.fmax.reduce(np.abs(values), axis=1, keepdims=True)
    return answered(values - offset[:, layer], scores.n_candidates, close=close)


def answered(values: np.ndarray, counts: np.ndarray, *, close: Any = 0.0) -> np.ndarray:
    """Credit from scores ``[trial candidate ...]``; what lies within ``close`` of the best shares with it."""
    present = np.arange(values.shape[1]) < counts[:, None]
    present = present.reshape(*present.shape, *(1,) * (values.ndim - 2))
    top = np.where(present, values, -np.inf).max(axis=1, keepdims=True)  # NaN wins, so a missing score shows
    best = present & (values >= top - close)
    share = best / np.maximum(best.sum(axis=1, keepdims=True), 1)
    return np.where(present & np.isfinite(top), share, np.nan)


def check_some(scores: CandidateScores, what: str = "scores") -> None:
    """Refuse scores without a trial."""
    if not isinstance(scores, CandidateScores):
        raise InvalidInput(f"{what} is a {type(scores).__name__}; expected CandidateScores, such as qk.split('test').")
    if not len(scores):
        raise InvalidInput(f"{what} holds no trials; give at least one.")


def check_offset(scores: CandidateScores, offset: np.ndarray | None) -> None:
    """Refuse an offset that does not fit the scores it is taken off."""
    if offset is None:
        return
    shape = scores.values.shape[1:]
    if np.shape(offset) != shape:
        raise InvalidInput(
            f"offset has shape {np.shape(offset)}; expected (candidate, layer, head), {shape}, as offsets() gives it "
            "for calibration trials with the same candidates."
        )
    if np.isinf(offset).any():
        raise InvalidInput("offset holds an infinite number; take it from offsets().")


def _check_one_order(scores: CandidateScores, wanted: Sequence[str]) -> None:
    for trial, mine in zip(scores.trial_ids, scores.candidates, strict=True):
        if tuple(mine) == tuple(wanted):
            continue
        what = f"trial {trial!r} has the candidates {tuple(mine)}, another {tuple(wanted)}"
        if sorted(mine) == sorted(wanted):
            raise InvalidInput(
                f"{what}: a median offset belongs to one candidate, so they must stand in one order. "
                "Bring them into it with mechheads.verdicts.align(scores)."
            )
        raise InvalidInput(
            f"{what}: a median offset belongs to one candidate, so all trials must have the same ones. "
            "Use offset='none', or judge the trials of each set of candidates apart."
        )


def _check_tokens(scores: CandidateScores, i: int, tokens: Any) -> None:
    n = len(scores.candidates[i])
    fine = isinstance(tokens, (list, tuple)) and len(tokens) == n
    if not (fine and all(isinstance(t, int) and t > 0 for t in tokens)):
        raise InvalidInput(
            f"record of trial {scores.trial_ids[i]!r} has candidate_tokens {tokens!r}; expected {n} numbers of tokens, "
            "one a candidate. Without them use normalise='sum'."
        )
