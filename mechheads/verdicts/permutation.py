"""Whether any head knows the labels: one permutation test for all heads looked at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.heads import HeadSet
from mechheads.stats import check_count
from mechheads.verdicts.decisions import align, check_offset, check_some, layer_credit

# Numbers held at once in the matrix of permuted labels.
_BLOCK = 16_000_000
# Accuracies that are equal on paper differ in the last digits; they count as equal.
_CLOSE = 1e-9


@dataclass(frozen=True, eq=False)
class PermutationTest:
    """Result of ``permutation_test``.

    Attributes:
        p: ``[layer head]`` corrected p-value that the head is right more often than its chance; NaN for heads not
            looked at or without scores.
        p_inverse: ``[layer head]`` the same for being wrong more often.
        p_two_sided: ``[layer head]`` the same for either.
        excess: ``[layer head]`` accuracy less ``expected``.
        expected: ``[layer head]`` the head's accuracy if labels had nothing to do with its answers, 0 to 1.
        null_max: ``[permutation]`` greatest excess of all heads.
        null_min: ``[permutation]`` least.
        n_heads: Heads the correction is for.
    """

    p: np.ndarray
    p_inverse: np.ndarray
    p_two_sided: np.ndarray
    excess: np.ndarray
    expected: np.ndarray
    null_max: np.ndarray
    null_min: np.ndarray
    n_heads: int


def permutation_test(
    scores: CandidateScores,
    *,
    offset: np.ndarray | None = None,
    heads: HeadSet | None = None,
    n_perm: int = 1000,
    seed: int = 0,
) -> PermutationTest:
    """Max-statistic permutation test over heads (Westfall and Young, 1993): the chance that *any* head does as well.

    Under the null the labels have nothing to do with what heads answer, so they may be exchanged between trials with
    the same number of candidates. A head's statistic is its accuracy less its mean accuracy under all such exchanges:
    a head that always answers alike has exactly 0 whatever the balance of labels, and of balanced labels the
    statistic is accuracy less 1/n. In every permutation the greatest statistic of all heads is taken, and
    ``p = (1 + #{max* >= statistic}) / (1 + n_perm)``. All heads see the same permuted labels, so however alike heads
    are, the chance of any false call stays at most alpha.

    With several trials a group (questions about one world) labels within a group hang together, and so do a head's
    answers. Free exchange would break the first tie and understate chance. So the block of labels of a group is
    exchanged with that of another group of the same make (as many trials, of as many candidates), and shuffled within
    the group among trials of as many candidates. Under the null, which of the worlds has which set of labels, and
    which question in it has which label, is open; how many of each a world has is kept.

    Args:
        scores: Scores on calibration or test trials.
        offset: ``[candidate layer head]`` from ``offsets``, or None. It must come from other trials or, on the same
            ones, be blind to labels, as ``offsets`` is.
        heads: Heads to look at; all if None.
        n_perm: Number of permutations; no p-value is below ``1 / (1 + n_perm)``.
        seed: Seed of the draws.

    Raises:
        InvalidInput: If there is no trial, the offset has another shape, or a head does not exist.
    """
    check_some(scores)
    check_count("n_perm", n_perm)
    check_count("seed", seed, least=0)
    if offset is None:
        scores = align(scores)
    check_offset(scores, offset)
    shape = scores.values.shape[2:]
    looked = np.ones(shape, dtype=bool) if heads is None else heads.mask(*shape)
    drawn, shares = permuted_labels(scores, n_perm, seed)
    observed, expected = np.full(shape, np.nan), np.full(shape, np.nan)
    top, bottom = np.full(n_perm, -np.inf), np.full(n_perm, np.inf)
    rows, width = np.arange(len(scores)), scores.values.shape[1]
    for part, told in _told(drawn, width):
        for layer in np.flatnonzero(looked.any(axis=1)).tolist():
            credit = np.nan_to_num(layer_credit(scores, layer, offset)[:, :, looked[layer]])
            undefined = ~credit.any(axis=1).all(axis=0)
            chance = np.einsum("tc,tch->h", shares, credit) / len(scores)
            # Credits of a trial sum to one, so the first candidate's need not be carried along.
            more = (credit[:, 1:] - credit[:, :1]).transpose(1, 0, 2).reshape(-1, credit.shape[2])
            excess = (credit[:, 0].sum(axis=0) + told @ more) / len(scores) - chance
            top[part] = np.maximum(top[part], excess[:, ~undefined].max(axis=1, initial=-np.inf))
            bottom[part] = np.minimum(bottom[part], excess[:, ~undefined].min(axis=1, initial=np.inf))
            expected[layer, looked[layer]] = np.where(undefined, np.nan, chance)
            right = credit[rows, scores.labels].mean(axis=0)
            observed[layer, looked[layer]] = np.where(undefined, np.nan, right)
    excess = observed - expected
    return PermutationTest(
        p=_p_values(excess, top),
        p_inverse=_p_values(-excess, -bottom),
        p_two_sided=_p_values(np.abs(excess), np.maximum(top, -bottom)),
        excess=excess,
        expected=expected,
        null_max=top,
        null_min=bottom,
        n_heads=int(np.isfinite(excess).sum()),
    )


def _p_values(statistic: np.ndarray, null: np.ndarray) -> np.ndarray:
    """``(1 + #{null >= statistic}) / (1 + n)``, NaN where the statistic is."""
    at = np.searchsorted(np.sort(null), statistic - _CLOSE)
    return np.where(np.isfinite(statistic), (1 + len(null) - at) / (1 + len(null)), np.nan)


def _told(drawn: np.ndarray, width: int) -> Iterator[tuple[slice, np.ndarray]]:
    """Permuted labels as a matrix of zeros and ones ``[permutation, candidate from 1 on x trial]``, block by block."""
    n_perm, n = drawn.shape
    step = max(1, _BLOCK // max(1, n * (width - 1)))
    for start in range(0, n_perm, step):
        block = drawn[start : start + step]
        yield slice(start, start + step), np.concatenate([block == c for c in range(1, width)], axis=1).astype(float)


def permuted_labels(scores: CandidateScores, n_perm: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels exchanged as the null allows.

    Returns:
        ``[permutation trial]`` labels, and ``[trial candidate]`` how often each label comes up at a trial over all
        exchanges there are. Draws do not depend on the order of trials.
    """
    rng = np.random.default_rng(seed)
    drawn = np.empty((n_perm, len(scores)), dtype=np.int32)
    shares = np.zeros(scores.values.shape[:2])
    for makeup, places in _alike_groups(scores):
        labels = scores.labels[places]
        order = rng.permuted(np.tile(np.arange(len(places)), (n_perm, 1)), axis=1)
        blocks = labels[order]
        for count in sorted(set(makeup)):
            run = np.array([c == count for c in makeup])
            if run.sum() > 1:
                blocks[:, :, run] = rng.permuted(blocks[:, :, run], axis=2)
            often = np.bincount(labels[:, run].ravel(), minlength=scores.values.shape[1]) / labels[:, run].size
            shares[places[:, run]] = often
        drawn[:, places] = blocks
    return drawn, shares


def _alike_groups(scores: CandidateScores) -> list[tuple[tuple[int, ...], np.ndarray]]:
    """Groups of the same make: the numbers of candidates of their trials, rising, and places ``[group trial]``."""
    groups, counts = scores.groups, scores.n_candidates
    members: dict[str, list[int]] = {}
    for i in sorted(range(len(scores)), key=lambda i: (groups[i], counts[i], scores.trial_ids[i])):
        members.setdefault(groups[i], []).append(i)
    alike: dict[tuple[int, ...], list[list[int]]] = {}
    for places in members.values():
        alike.setdefault(tuple(int(counts[i]) for i in places), []).append(places)
    return [(makeup, np.array(alike[makeup])) for makeup in sorted(alike)]
