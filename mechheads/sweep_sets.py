"""The head sets of a sweep: sizes of each ranking, random ones, the lowest and those nearest to zero."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head, HeadSet, draw_random_heads
from mechheads.provenance import content_hash
from mechheads.pruning import head_counts
from mechheads.scores import HeadScores
from mechheads.study_fields import BOTTOM, NEAREST_ZERO, RANDOM
from mechheads.sweep_controls import RandomHeads
from mechheads.verdicts.decisions import accuracy, align, offsets
from mechheads.verdicts.discrimination import auroc_parts


@dataclass(frozen=True)
class Threshold:
    """All heads of a ranking that score above a value, as a size.

    Attributes:
        above: The value, in the unit of the scores.
        rankings: Rankings it is for; None is all.
    """

    above: float
    rankings: tuple[str, ...] | None = None


@dataclass(frozen=True, eq=False)
class Ranked:
    """A ranking: heads, best first, and the scores it came from where there are any.

    Attributes:
        heads: Every ranked head, best first.
        means: ``[layer head]`` scores, NaN where undefined, or None.
        zero: The score of a head that does nothing; None where there is no such score (accuracies).
    """

    heads: HeadSet
    means: np.ndarray | None = None
    zero: float | None = None

    @classmethod
    def of(cls, value: Any, *, by: str = "accuracy") -> Ranked:
        """A ranking from HeadScores, QK-scores of calibration trials, or anything a head set parses from.

        Args:
            value: What to rank by.
            by: ``"accuracy"`` or ``"auroc"``, for QK-scores.

        Raises:
            InvalidInput: If it is none of these, or no head has a score.
        """
        if isinstance(value, Ranked):
            return value
        if isinstance(value, HeadScores):
            return cls(value.ranking(), value.mean(), 0.0)
        if isinstance(value, CandidateScores):
            aligned = align(value)
            right = accuracy(aligned, offsets(aligned, "none"))
            heads = value.select(int(np.isfinite(right).sum()), split=None, by=by)
            if by == "auroc":
                flat = aligned.values.reshape(*aligned.values.shape[:2], -1)
                right = auroc_parts(flat, aligned.labels, aligned.n_candidates)[0].reshape(right.shape)
            return cls(heads, right, None)
        return cls(HeadSet.parse(value))

    def above(self, value: float) -> int:
        """How many heads score above a value."""
        return 0 if self.means is None else sum(bool(self.means[h.layer, h.head] > value) for h in self.heads)

    def lowest(self) -> HeadSet:
        """Heads with a score, lowest first, ties in order of (layer, head)."""
        return self._by(lambda means: means)

    def nearest_zero(self) -> HeadSet:
        """Heads with a score, smallest in magnitude first."""
        return self._by(np.abs)

    def _by(self, key: Any) -> HeadSet:
        if self.means is None:
            raise InvalidInput("a list of heads has no scores, so no lowest and none nearest to zero.")
        flat = key(self.means).ravel()
        order = np.argsort(flat, kind="stable")
        return HeadSet(Head(*divmod(int(i), self.means.shape[1])) for i in order if np.isfinite(flat[i]))


@dataclass(frozen=True)
class Controls:
    """The control head sets of a sweep.

    Attributes:
        random: Random heads, or None.
        tested: Rankings whose first max(k) heads no random set may hold; None is all.
        bottom: Rankings whose lowest k are run too; True is all with scores.
        nearest_zero: Rankings whose k nearest to zero are run too; likewise.
    """

    random: RandomHeads | None = None
    tested: tuple[str, ...] | None = None
    bottom: bool | tuple[str, ...] = False
    nearest_zero: bool | tuple[str, ...] = False


@dataclass(frozen=True)
class NamedSet:
    """A head set of a plan.

    Attributes:
        ranking: Where it comes from.
        draw: Which random draw it is; 0 elsewhere.
        k: Its heads.
        heads: The heads, best first.
    """

    ranking: str
    draw: int
    k: int
    heads: HeadSet


def named_sets(
    ranked: Mapping[str, Ranked], k: Sequence[Any], shape: tuple[int, int], controls: Controls, k_beyond: str
) -> tuple[list[NamedSet], list[str]]:
    """Every head set of a sweep but the empty one, and notes on what was left out; see ``sweep_plan.plan``."""
    for name, one in ranked.items():
        one.heads.check(*shape)
        if one.means is not None and one.means.shape != shape:
            raise InvalidInput(f"the ranking {name!r} has scores {list(one.means.shape)}; the model is {list(shape)}.")
    sets = _Sets(ranked)
    for name, one in ranked.items():
        sets.sizes[name] = _sizes(name, one, k, shape, sets)
    _check_lengths(sets, k_beyond)
    drawn = _drawn(sets, controls, shape, k_beyond)
    if not sets.all_sizes:
        raise InvalidInput(f"no k is left to test. {'; '.join(sets.notes)}".rstrip(". ") + ".")
    random = [NamedSet(RANDOM, draw, size, heads) for (size, draw), heads in drawn.items()]
    return [*_ranked_sets(sets, controls), *random], list(dict.fromkeys(sets.notes))


@dataclass
class _Sets:
    """The head sets of a plan while it is made: sizes of each ranking, and what was left out."""

    ranked: Mapping[str, Ranked]
    sizes: dict[str, list[int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    @property
    def all_sizes(self) -> list[int]:
        return sorted({size for sizes in self.sizes.values() for size in sizes})

    def drop(self, size: int, why: str) -> None:
        """Leave a size out of every ranking."""
        for sizes in self.sizes.values():
            if size in sizes:
                sizes.remove(size)
        self.notes.append(f"k = {size}: left out, {why}")


def _sizes(name: str, ranked: Ranked, k: Sequence[Any], shape: tuple[int, int], sets: _Sets) -> list[int]:
    """Sizes of one ranking, rising, each once."""
    counts: set[int] = set()
    if not k:
        raise InvalidInput("k is empty; give numbers of heads, such as (5, 10).")
    for size in k:
        if not isinstance(size, Threshold):
            counts.update([] if _is_zero(size) else head_counts(size, shape[0] * shape[1]))
        elif size.rankings is None or name in size.rankings:
            if ranked.means is None:
                raise InvalidInput(f"k holds a threshold, but the ranking {name!r} is a list of heads without scores.")
            above = ranked.above(size.above)
            counts.update([above] if above else [])
            if not above:
                sets.notes.append(f"no head of {name!r} scores above {size.above:g}")
        for other in (size.rankings or ()) if isinstance(size, Threshold) else ():
            if other not in sets.ranked:
                raise UnknownName("ranking of a threshold", other, sets.ranked)
    return sorted(counts)


def _is_zero(size: Any) -> bool:
    return isinstance(size, (int, np.integer)) and not isinstance(size, bool) and bool(size == 0)


def _check_lengths(sets: _Sets, k_beyond: str) -> None:
    """Refuse or leave out sizes beyond a ranking."""
    left_out: dict[tuple[tuple[int, ...], int], list[str]] = {}
    for name, sizes in sets.sizes.items():
        longest = len(sets.ranked[name].heads)
        beyond = [size for size in sizes if size > longest]
        if beyond and k_beyond == "refuse":
            raise InvalidInput(
                f"k = {beyond[0]}, but the ranking {name!r} has {longest} heads; ask for at most {longest}, or let "
                "k_beyond be 'drop'."
            )
        if beyond:
            sizes[:] = [size for size in sizes if size <= longest]
            left_out.setdefault((tuple(beyond), longest), []).append(name)
    for (beyond, longest), names in left_out.items():
        sets.notes.append(
            f"k = {', '.join(map(str, beyond))}: left out for {', '.join(names)}, which rank {longest} heads"
            if len(names) > 1
            else f"k = {', '.join(map(str, beyond))}: left out for {names[0]}, which ranks {longest} heads"
        )


def _drawn(sets: _Sets, controls: Controls, shape: tuple[int, int], k_beyond: str) -> dict[tuple[int, int], HeadSet]:
    """Random sets by (size, draw); under ``"drop"`` the largest sizes go until there is room to draw the others."""
    random = controls.random
    if random is None:
        return {}
    for name in controls.tested or ():
        if name not in sets.ranked:
            raise UnknownName("ranking of the random control", name, sets.ranked)
    asked = sets.all_sizes
    while sets.all_sizes:
        try:
            return _draw(sets, random, controls.tested, shape, asked)
        except _NoRoom as error:
            if k_beyond == "refuse":
                raise InvalidInput(
                    f"{error} Ask for smaller k, let fewer rankings count as tested, or let k_beyond be 'drop'."
                ) from error
            sets.drop(sets.all_sizes[-1], str(error))
    return {}


class _NoRoom(InvalidInput):
    """Too few heads are left to draw from."""


def _draw(
    sets: _Sets, random: RandomHeads, tested: Sequence[str] | None, shape: tuple[int, int], asked: Sequence[int]
) -> dict[tuple[int, int], HeadSet]:
    sizes = sets.all_sizes
    if random.at is not None:
        stray = sorted(set(random.at) - set(asked) - {0})
        if stray:
            raise InvalidInput(f"random heads are asked at k = {stray[0]}, but the sweep has k = {list(asked)}.")
        sizes = [size for size in sizes if size in random.at]
    excluded = HeadSet()
    for name in tested or sets.ranked if random.exclude_tested else ():
        excluded = excluded | sets.ranked[name].heads[: max(sets.sizes[name], default=0)]
    first = next(iter(sets.ranked.values())).heads
    out = {}
    for size in sizes:
        if random.match_layers and size > len(first):
            raise InvalidInput(
                f"random heads match the layers of the first ranking, which has fewer than {size} heads."
            )
        for draw in range(random.draws):
            try:
                out[size, draw] = draw_random_heads(
                    *shape,
                    size,
                    seed=int(content_hash([random.seed, size, draw])[:12], 16),
                    exclude=excluded,
                    match_layers=first[:size] if random.match_layers else None,
                )
            except InvalidInput as error:
                raise _NoRoom(str(error)) from error
    return out


def _ranked_sets(sets: _Sets, controls: Controls) -> list[NamedSet]:
    """The sets of the rankings and their bottom and nearest-to-zero sets."""
    out = [NamedSet(name, 0, size, one.heads[:size]) for name, one in sets.ranked.items() for size in sets.sizes[name]]
    for what, given, form in (
        ("bottom", controls.bottom, BOTTOM),
        ("nearest_zero", controls.nearest_zero, NEAREST_ZERO),
    ):
        for name, one in sets.ranked.items():
            usable = one.means is not None and (what == "bottom" or one.zero is not None)
            if (given is True and usable) or (not isinstance(given, bool) and name in given):
                if not usable:
                    why = "is a list of heads without scores" if one.means is None else "is ranked by accuracy"
                    raise InvalidInput(f"the control {what} names {name!r}, which {why}; leave it out.")
                order = one.lowest() if what == "bottom" else one.nearest_zero()
                out += [NamedSet(form.format(name), 0, size, order[:size]) for size in sets.sizes[name]]
        for name in () if isinstance(given, bool) else given:
            if name not in sets.ranked:
                raise UnknownName(f"ranking of the control {what}", name, sets.ranked)
    return out
