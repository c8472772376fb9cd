"""What a sweep is compared with, and what speaks against it: random heads in place of the tested ones, caveats."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet, draw_random_heads
from mechheads.interventions import Intervention
from mechheads.model import Model
from mechheads.provenance import content_hash
from mechheads.runner import prompt_hash
from mechheads.scores import HeadScores
from mechheads.trials import TrialSet


@dataclass(frozen=True)
class RandomHeads:
    """A control: random heads in place of the tested ones.

    Attributes:
        draws: Independent draws for each k.
        exclude_tested: Never draw a head that any ranking's largest k tests.
        match_layers: Draw as many heads in each layer as the first ranking's set has there.
        seed: Seed of the draws.
        at: The k at which to draw; all of the sweep's if None.
    """

    draws: int = 7
    exclude_tested: bool = True
    match_layers: bool = False
    seed: int = 0
    at: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.draws < 1:
            raise InvalidInput(f"draws is {self.draws}; a random control needs at least 1.")


def random_heads(
    *,
    draws: int = 7,
    exclude_tested: bool = True,
    match_layers: bool = False,
    seed: int = 0,
    at: Sequence[int] | None = None,
) -> RandomHeads:
    """The random-heads control of a sweep; see ``RandomHeads``."""
    return RandomHeads(draws, exclude_tested, match_layers, seed, None if at is None else tuple(at))


@dataclass(frozen=True)
class Cell:
    """One head set to ablate on one task."""

    ranking: str
    draw: int
    k: int
    heads: HeadSet


def plan_cells(
    rankings: Mapping[str, HeadSet],
    k: int | Sequence[int],
    shape: tuple[int, int],
    controls: RandomHeads | None,
) -> list[Cell]:
    """The head sets of a sweep: a baseline, the first k of each ranking, and random sets.

    Args:
        rankings: Heads by ranking, best first.
        k: Set sizes; 0 is the baseline and always there.
        shape: Layers and heads of the model.
        controls: Random control, or None.

    Raises:
        InvalidInput: If a k is larger than a ranking, or too few heads are left to draw from.
    """
    n_layers, n_heads = shape
    sizes = _sizes(k)
    reserved = {"none", "random"} & set(rankings)
    if reserved:
        raise InvalidInput(f"a ranking cannot be called {reserved.pop()!r}; that names a control.")
    cells = [Cell("none", 0, 0, HeadSet())]
    for name, heads in rankings.items():
        heads.check(n_layers, n_heads)
        for size in sizes:
            if size > len(heads):
                raise InvalidInput(f"k = {size}, but the ranking {name!r} has {len(heads)} heads.")
            cells.append(Cell(name, 0, size, heads[:size]))
    if controls is None or not sizes:
        return cells
    tested = HeadSet()
    for heads in rankings.values():
        tested = tested | heads[: sizes[-1]]
    first = next(iter(rankings.values()), HeadSet())
    drawn_at = sizes if controls.at is None else _sizes(controls.at)
    if not set(drawn_at) <= set(sizes):
        raise InvalidInput(f"random heads are asked at k = {drawn_at}, but the sweep has k = {sizes}.")
    for size in drawn_at:
        for draw in range(controls.draws):
            drawn = draw_random_heads(
                n_layers,
                n_heads,
                size,
                seed=_seed(controls.seed, size, draw),
                exclude=tested if controls.exclude_tested else None,
                match_layers=first[:size] if controls.match_layers else None,
            )
            cells.append(Cell("random", draw, size, drawn))
    return cells


def _sizes(k: int | Sequence[int]) -> list[int]:
    """Set sizes without the baseline, rising, each once."""
    k = [k] if isinstance(k, int) else list(k)
    for x in k:
        if isinstance(x, bool) or x != int(x) or x < 0:
            raise InvalidInput(f"k holds {x!r}; set sizes are whole numbers from 0.")
    return sorted({int(x) for x in k} - {0})


def _seed(*parts: int) -> int:
    """One seed from several numbers, the same on every machine."""
    return int(content_hash(list(parts))[:12], 16)


def named_rankings(rankings: Any) -> dict[str, Any]:
    """Rankings by name, from a mapping, one HeadScores (named by its method) or one head set."""
    if isinstance(rankings, Mapping):
        return dict(rankings)
    if isinstance(rankings, HeadScores):
        return {rankings.method: rankings}
    return {"given": HeadSet.parse(rankings)}


def as_rankings(rankings: Mapping[str, Any]) -> dict[str, HeadSet]:
    """Head sets from HeadScores (their full ranking) or from anything a head set parses from."""
    if not rankings:
        raise InvalidInput("a sweep needs at least one ranking, such as {'locos': locos}.")
    return {
        name: value.ranking() if isinstance(value, HeadScores) else HeadSet.parse(value)
        for name, value in rankings.items()
    }


def caveats(
    model: Model, rankings: Mapping[str, Any], intervention: Intervention, tasks: Mapping[str, TrialSet]
) -> list[str]:
    """What would make the sweep say less than it seems to."""
    target = next(iter(tasks.values()))
    tested = {prompt_hash(t) for t in target}
    weights = None
    out = []
    for name, scores in rankings.items():
        if not isinstance(scores, HeadScores):
            continue
        shared = len(tested & {r.get("prompt_hash") for r in scores.records})
        if shared:
            out.append(
                f"the ranking {name!r} was chosen on {shared} of the {len(target)} trials it is tested on; choose "
                "heads on the calibration split and test them on the other."
            )
        weights = weights or model.weight_hash()
        if scores.meta.get("model", {}).get("weight_hash", weights) != weights:
            out.append(f"the ranking {name!r} was scored on other weights than the model it is tested on.")
    shared = len(tested & {prompt_hash(t) for t in intervention.reference or ()})
    if shared:
        out.append(f"the mean is taken over {shared} of the {len(target)} trials it is tested on.")
    return out
