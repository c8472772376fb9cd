"""Questions from our own worlds, balanced in label, rule, depth, distractors and polarity."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

from mechheads.datasets.build import check_common
from mechheads.datasets.haystack import below, shuffled
from mechheads.datasets.logic import build_trials
from mechheads.datasets.logic_prompts import TemplateSource
from mechheads.datasets.logic_prontoqa import prontoqa_file
from mechheads.datasets.logic_questions import TRUE_FALSE, LogicQuestion
from mechheads.datasets.logic_worlds import (
    MAX_DEPTH,
    RULES,
    Claim,
    World,
    check_world,
    least_depth,
    make_world,
)
from mechheads.datasets.sources import Source
from mechheads.errors import InvalidInput, UnknownName
from mechheads.trials import Encoder, TrialSet

_DEPTH, _DISTRACTORS, _RULES, _N = (1, 2, 3), (0, 2), ("modus_ponens",), 500
# A cell: rule, depth, distractors, label (None: both, where a world gives claims of either).
_Cell = tuple[str, int, int, bool | None]


def prontoqa(
    model: Encoder,
    *,
    n: int | None = None,
    depth: int | Sequence[int] = _DEPTH,
    distractors: int | Sequence[int] = _DISTRACTORS,
    rules: str | Sequence[str] = _RULES,
    seed: int = 0,
    template: TemplateSource = None,
    calibration: float | None = 0.5,
    claims_per_world: int = 1,
    path: Source | None = None,
) -> TrialSet:
    """Trials in the manner of ProntoQA (Saparov and He 2023, arXiv 2210.01240): our own worlds, or a file of it.

    Our worlds are described in ``mechheads.datasets.logic_worlds``. Label, distractors and every pair of rule and depth
    come equally often, and so does every cell of these, to within one where ``n`` is no multiple; statements with and
    without "not" take turns in each cell (rules with compound statements have one wording alone). Composed rules begin
    at depth 2, so with depth 1 among the depths they have one depth fewer. No world comes twice. Ids and groups name
    the seed (``prontoqa-SEED-NUMBER``, ``world SEED-NUMBER``), so that sets of different seeds can be joined.

    A file is a list of ``{id, context, question, options, answer, explanation}``, the statement following the question
    mark of ``question``; depth is the number of steps of ``explanation``, distractors are the premises besides its own.
    On the hub: ``hub("renma/ProntoQA", split="validation")``.

    Args:
        model: A model, or anything with ``encode``.
        n: Number of trials; None is 500 of our own, or all of a file. A smaller number of a file is a seeded sample, in
            file order, its labels in proportion.
        depth: A depth, or depths to be balanced over, 1 to 6.
        distractors: A number of distractors, or numbers to be balanced over, 0 to 5.
        rules: A rule, or rules to be balanced over (``RULES``), or ``"all"``.
        seed: Of every choice.
        template: See ``logic_template``.
        calibration: Calibration share; see ``build_trials``.
        claims_per_world: 1; 2 asks the same about both people, once true and once false; 4 asks each of these with
            "not" as well. Claims of one world share a split.
        path: A file, folder, records or hub data set, instead of our own worlds.

    Raises:
        UnknownName: If there is no such rule.
        InvalidInput: If an option is out of range, or given with ``path`` though it is of our worlds alone; naming
            file, row and field, if a file cannot be used; or as ``build_trials`` does.
    """
    if path is not None:
        ours = {"depth": (depth, _DEPTH), "distractors": (distractors, _DISTRACTORS), "rules": (rules, _RULES),
                "claims_per_world": (claims_per_world, 1)}  # fmt: skip
        if given := [name for name, (value, default) in ours.items() if value != default]:
            raise InvalidInput(f"{given[0]} is an option of our own worlds; a file has what it has. Leave it out.")
        return prontoqa_file(model, path, n=n, seed=seed, template=template, calibration=calibration)
    total = _N if n is None else n
    questions = world_questions(
        total, depth=depth, distractors=distractors, rules=rules, seed=seed, claims_per_world=claims_per_world
    )
    options = {
        "kind": "prontoqa",
        "depth": list(_several(depth, "depth")),
        "distractors": list(_several(distractors, "distractors")),
        "rules": list(_rules(rules)),
        "claims_per_world": claims_per_world,
    }
    return build_trials(
        model, questions, template=template, calibration=calibration, seed=seed, name="prontoqa", options=options
    )


def world_questions(
    n: int,
    *,
    depth: int | Sequence[int] = _DEPTH,
    distractors: int | Sequence[int] = _DISTRACTORS,
    rules: str | Sequence[str] = _RULES,
    seed: int = 0,
    claims_per_world: int = 1,
) -> list[LogicQuestion]:
    """Questions of our own worlds as text; see ``prontoqa``."""
    check_common(n, seed, None)
    names, depths, numbers = _rules(rules), _several(depth, "depth"), _several(distractors, "distractors")
    pairs = [(rule, d) for rule in names for d in depths if d >= least_depth(rule)]
    _check_depths(names, depths, pairs)
    for (rule, d), k in itertools.product(pairs, numbers):
        check_world(rule, d, k)
    if claims_per_world not in (1, 2, 4) or n % claims_per_world:
        raise InvalidInput(f"claims_per_world={claims_per_world!r}: give 1, 2 or 4, and n (here {n}) a multiple of it.")
    labels = (True, False) if claims_per_world == 1 else (None,)
    cells = [(*pair, k, label) for pair, k, label in itertools.product(pairs, numbers, labels)]
    rng = random.Random(f"mechheads/prontoqa/{seed}")
    made: list[LogicQuestion] = []
    used: Counter[Any] = Counter()
    seen: set[frozenset[str]] = set()
    for cell in _spread(cells, n // claims_per_world, rng):
        world = make_world(rng, rule=cell[0], depth=cell[1], distractors=cell[2])
        while frozenset(world.premises) in seen:
            world = make_world(rng, rule=cell[0], depth=cell[1], distractors=cell[2])
        seen.add(frozenset(world.premises))
        for claim in _claims(world, cell, claims_per_world, used, rng):
            made.append(_question(f"prontoqa-{seed}-{len(made):04d}", f"world {seed}-{len(seen)}", world, claim))
    return made


def _several(value: int | Sequence[int], what: str) -> tuple[int, ...]:
    """A number or numbers, as a tuple without repeats."""
    values = (value,) if isinstance(value, int) else tuple(value) if isinstance(value, Sequence) else ()
    if not values or any(isinstance(v, bool) or not isinstance(v, int) for v in values):
        raise InvalidInput(f"{what}={value!r}: give a whole number, or several such as (1, 2, 3).")
    if len(set(values)) < len(values):
        raise InvalidInput(f"{what}={value!r} names a number twice.")
    return values


def _check_depths(names: Sequence[str], depths: Sequence[int], pairs: Sequence[tuple[str, int]]) -> None:
    """Refuse depths that no rule can have, and rules without any of the depths."""
    for d in sorted(depths):
        if not 1 <= d <= MAX_DEPTH:
            raise InvalidInput(
                f"depth is {d}; it counts inference steps, 1 to {MAX_DEPTH}: give one of these or several, such as "
                "depth=(1, 2, 3)."
            )
        if d not in {depth for _, depth in pairs}:
            raise InvalidInput(
                f"depth is {d}, but worlds of {', '.join(names)} begin at depth {min(map(least_depth, names))}: leave "
                "it out, or add a rule that begins earlier, such as 'modus_ponens'."
            )
    for name in names:
        if name not in {rule for rule, _ in pairs}:
            raise InvalidInput(
                f"worlds of {name!r} begin at depth {least_depth(name)}, but depth is {list(depths)}: leave the rule "
                f"out, or add a depth of {least_depth(name)} to {MAX_DEPTH}."
            )


def _rules(rules: str | Sequence[str]) -> tuple[str, ...]:
    """Names of rules."""
    names = RULES if rules == "all" else (rules,) if isinstance(rules, str) else tuple(rules)
    for name in names:
        if name not in RULES:
            raise UnknownName("rule", name, (*RULES, "all"))
    if not names or len(set(names)) < len(names):
        raise InvalidInput(f"rules={rules!r}: give at least one rule, none of them twice.")
    return names


def _spread(cells: Sequence[_Cell], n: int, rng: random.Random) -> list[_Cell]:
    """``n`` cells in random order: each equally often, the rest so that labels, then rules and so on stay even."""
    each, rest = divmod(n, len(cells))
    left = shuffled(cells, rng)
    seen: Counter[Any] = Counter()
    chosen = [cell for cell in cells for _ in range(each)]
    for _ in range(rest):
        best = min(left, key=lambda c: (seen[c[3]], sum(seen[i, c[i]] for i in range(3)), seen[c[0], c[1]],
                                        sum(seen[i, c[i], c[3]] for i in range(3))))  # fmt: skip
        left.remove(best)
        chosen.append(best)
        seen.update([best[3], best[:2], *((i, best[i]) for i in range(3)), *((i, best[i], best[3]) for i in range(3))])
    return shuffled(chosen, rng)


def _negates(claim: Claim) -> bool:
    return claim.statement.startswith(f"{claim.person} is not ")


def _claims(world: World, cell: _Cell, wanted: int, used: Counter[Any], rng: random.Random) -> list[Claim]:
    """The claims asked about: of the cell's label, with or without "not" in turn within the cell and the rule."""
    # Compound statements come in one wording, of the two people; others with "not" as well.
    compound = len(world.claims) == 2
    if wanted > len(world.claims):
        raise InvalidInput(
            f"claims_per_world={wanted}, but the worlds of {world.rule} have {len(world.claims)} claims; use 1 or 2."
        )
    if wanted == len(world.claims):
        return shuffled(world.claims, rng)
    first = below(rng, 2) == 1
    rule, _, _, label = cell
    ways = [None] if compound else [first, not first]
    way = min(ways, key=lambda w: (used[cell, w], used[rule, label, w], used[label, w]))
    used.update([(cell, way), (rule, label, way), (label, way)])
    pool = [c for c in world.claims if (compound or _negates(c) == way) and label in (None, c.label)]
    return shuffled(pool, rng)[:wanted]


def _question(id: str, group: str, world: World, claim: Claim) -> LogicQuestion:
    """The question of a claim, which knows the claim of the opposite label in the same words."""
    said = claim.statement.removeprefix(claim.person)
    twin = next(c for c in world.claims if c.person != claim.person and c.statement == c.person + said)
    compound = len(world.claims) == 2
    return LogicQuestion(
        id=id,
        premises=world.premises,
        statement=claim.statement,
        candidates=TRUE_FALSE,
        label=0 if claim.label else 1,
        rule=world.rule,
        depth=world.depth,
        distractors=world.distractors,
        proof=claim.proof,
        group=group,
        dataset="prontoqa",
        meta={
            "polarity": None if compound else "negated" if _negates(claim) else "plain",
            "flip": {"statement": twin.statement, "proof": list(twin.proof)},
        },
    )
