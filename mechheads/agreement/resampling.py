"""Bootstrap over trials for several score maps at once: methods that share trials share the draws."""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterator, Mapping

import numpy as np

from mechheads.errors import InvalidInput
from mechheads.scores import HeadScores
from mechheads.stats import bootstrap_weights, check_count, percentiles

# A result with this one trial reads the model's weights alone: another run would give the same numbers.
WEIGHTS_TRIAL = "weights"
# Samples are worked on in blocks of about this many numbers.
BLOCK = 4_000_000


def check_maps(scores: Mapping[str, HeadScores], *, least: int = 2, why: str = "") -> dict[str, HeadScores]:
    """The named score maps, if there are enough, all of the same heads and with trials to average.

    Raises:
        InvalidInput: Saying which map cannot be used, and why.
    """
    if not isinstance(scores, Mapping):
        raise InvalidInput(
            f"scores is a {type(scores).__name__}; expected a mapping from name to HeadScores, such as "
            "{'locos': locos, 'dla': dla}."
        )
    for name, one in scores.items():
        if not isinstance(one, HeadScores):
            raise InvalidInput(f"scores[{name!r}] is a {type(one).__name__}; expected HeadScores.")
    if len(scores) < least:
        names = ", ".join(map(repr, scores)) or "none"
        raise InvalidInput(f"there are {len(scores)} score maps ({names}); {why or 'give'} at least {least}.")
    first, shape = next(((name, one.shape[1:]) for name, one in scores.items()), ("", (0, 0)))
    for name, one in scores.items():
        if one.shape[1:] != shape:
            raise InvalidInput(
                f"{name!r} scores {one.n_layers} layers x {one.n_heads} heads, {first!r} {shape[0]} x {shape[1]}; "
                "only maps of the same model can be compared."
            )
        one.mean()  # raises, saying why, if no trial is kept
    return {str(name): one for name, one in scores.items()}


def is_fixed(scores: HeadScores) -> bool:
    """Whether there is nothing to resample: scores of the weights alone, or a single kept trial."""
    return scores.n_kept < 2 or tuple(scores.trial_ids) == (WEIGHTS_TRIAL,)


def trial_groups(scores: Mapping[str, HeadScores]) -> list[list[str]]:
    """Names of the methods that stand on common trials, group by group; methods without trial noise are in none.

    Two methods belong together if they share a kept trial, by its id, or both share one with a third. Trials that are
    different and happen to have the same id do no harm: paired draws of independent values are independent.
    """
    groups: list[tuple[set[str], list[str]]] = []
    for name, one in scores.items():
        if is_fixed(one):
            continue
        ids, members = set(kept_ids(one)), [name]
        touching = [g for g in groups if g[0] & ids]
        for group in touching:
            ids |= group[0]
            members = [*group[1], *members]
            groups.remove(group)
        groups.append((ids, members))
    place = {name: i for i, name in enumerate(scores)}
    return sorted((sorted(members, key=place.__getitem__) for _, members in groups), key=lambda m: place[m[0]])


def kept_ids(scores: HeadScores) -> list[str]:
    """Ids of the kept trials, in order."""
    return [trial for trial, kept in zip(scores.trial_ids, scores.kept, strict=True) if kept]


def draw_counts(scores: Mapping[str, HeadScores], n_boot: int, seed: int) -> dict[str, np.ndarray | None]:
    """How often each sample draws each kept trial of each method.

    The trials of a group (``trial_groups``) are drawn together, so a trial counts equally often for every method that
    kept it. The draws of a group depend on the seed and its trials alone, not on what else is compared.

    Returns:
        By method ``[n_boot, kept trial]``, or None for one without trial noise.
    """
    check_count("n_boot", n_boot)
    counts: dict[str, np.ndarray | None] = dict.fromkeys(scores)
    for members in trial_groups(scores):
        pool = sorted({trial for name in members for trial in kept_ids(scores[name])})
        rng = np.random.default_rng([seed, zlib.crc32("\n".join(pool).encode())])
        drawn = bootstrap_weights(len(pool), n_boot, rng)
        place = {trial: i for i, trial in enumerate(pool)}
        for name in members:
            counts[name] = drawn[:, [place[trial] for trial in kept_ids(scores[name])]]
    return counts


def weighted_means(scores: HeadScores, counts: np.ndarray) -> np.ndarray:
    """Pooled score of every head under trial counts: ``[sample, kept trial]`` to ``[sample, head]``.

    ``sum(count * w * value) / sum(count * w)`` over the trials that define the head, w the answer steps for
    ``pooling="step"`` and 1 for ``"trial"``; NaN where a sample has no such trial.
    """
    values = scores.values[scores.kept].reshape(scores.n_kept, -1).astype(np.float64)
    drawn = counts * (scores.weights[scores.kept] if scores.pooling == "step" else 1.0)
    defined = np.isfinite(values)
    total = drawn @ np.where(defined, values, 0.0)
    weight = drawn @ defined.astype(np.float64)
    return np.divide(total, weight, out=np.full(total.shape, np.nan), where=weight > 0)


def sample_blocks(
    scores: Mapping[str, HeadScores], n_boot: int, seed: int
) -> Iterator[tuple[slice, dict[str, np.ndarray]]]:
    """Bootstrap samples of every pooled map, block by block.

    Yields:
        Which samples, and by method their means ``[sample, head]``; one row for a method without trial noise.
    """
    counts = draw_counts(scores, n_boot, seed)
    still = {name: scores[name].mean().reshape(1, -1) for name, drawn in counts.items() if drawn is None}
    size = max(1, BLOCK // max(sum(s.n_layers * s.n_heads for s in scores.values()), 1))
    for start in range(0, n_boot, size):
        block = slice(start, min(start + size, n_boot))
        means = dict(still)
        means |= {name: weighted_means(scores[name], c[block]) for name, c in counts.items() if c is not None}
        yield block, {name: means[name] for name in scores}


def shifted_interval(
    estimate: float, samples: np.ndarray, level: float, n: int, *, low: float, high: float, fisher: bool = False
) -> tuple[float, float]:
    """Percentile interval, widened for few trials and moved so that the samples' median stands at the estimate.

    A bootstrap sample has the noise of the trials twice, so the agreement of noisy maps is lower in every sample than
    in the data, and its plain percentiles may all lie below the estimate. Their spread is what a bootstrap can tell,
    not their place. So the interval is for the agreement to expect from another set of as many trials, their noise
    included. A bootstrap of n trials is too narrow by ``sqrt((n - 1) / n)``, and uses the normal distribution's tails
    where Student's belong: both are made good (Hesterberg, The American Statistician 69, 2015, section 5.3).

    Args:
        estimate: The statistic on the data.
        samples: ``[n_boot]``, NaN where undefined.
        level: Confidence level.
        n: Number of trials; of two maps the smaller number.
        low: Least value the statistic can take.
        high: Greatest.
        fisher: Work on the scale ``artanh``, for correlations.

    Returns:
        ``(low, high)``; NaN if the estimate is, or fewer than two samples are defined.
    """
    samples = samples[np.isfinite(samples)]
    if samples.size < 2 or not np.isfinite(estimate):
        return float("nan"), float("nan")
    bound = 1 - 1e-12
    centre, on_scale = np.float64(estimate), samples
    if fisher:
        centre, on_scale = (np.arctanh(np.clip(x, -bound, bound)) for x in (estimate, samples))
    away = np.array([float(end) for end in percentiles(on_scale, level)]) - np.median(on_scale)
    ends = centre + widening(n, level) * away
    if fisher:
        # Through tanh and back a perfect agreement would lose its last digits.
        ends = np.where(away == 0, estimate, np.tanh(ends))
    return float(np.clip(ends[0], low, high)), float(np.clip(ends[1], low, high))


def student(z: float, n: int) -> float:
    """Limit for n trials that is as rarely passed as z is by a normal deviate, widened by ``sqrt(n / (n - 1))``."""
    from scipy import stats

    return float(np.sqrt(n / (n - 1)) * stats.t.isf(stats.norm.sf(z), n - 1))


@functools.lru_cache(maxsize=256)
def widening(n: int, level: float) -> float:
    """Factor that makes good what a percentile bootstrap of n trials is too narrow by: 1.13 for 15 at 95%."""
    from scipy import stats

    z = float(stats.norm.ppf((1 + level) / 2))
    return student(z, n) / z
