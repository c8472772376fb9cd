"""The plan of a sweep: its cells, work without repeats, blocks and counts, and tables put together again."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from verdict_samples import made as candidate_scores

from mechheads.cells import CellResult
from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head, HeadSet
from mechheads.scores import HeadScores
from mechheads.study import parse_study
from mechheads.sweep_controls import RandomHeads, plan_cells
from mechheads.sweep_plan import Work, assemble, plan, plan_study
from mechheads.sweep_result import SweepResult
from mechheads.sweep_sets import Controls, Ranked, Threshold

SHAPE = (3, 4)
A = HeadSet(["L0H0", "L1H1", "L2H2", "L0H3", "L1H0"])
B = HeadSet(["L1H1", "L0H0", "L2H3", "L2H0", "L0H1"])
MEAN = {"mean": (0,)}


def scores(means: Any) -> HeadScores:
    values = np.asarray(means, dtype=np.float32)[None]
    return HeadScores("m", values, np.array([True]), np.array([1.0]), ["t"])


def rows(made: Any, **only: Any) -> list[tuple[Any, ...]]:
    return [
        (c.ranking, c.draw, c.k, " ".join(c.heads.labels))
        for c in made.cells
        if all(getattr(c, name) == value for name, value in only.items())
    ]


# -- cells -------------------------------------------------------------------------------------------


def test_a_plan_without_controls() -> None:
    made = plan({"a": A, "b": B}, k=(3, 0, 1, 3), tasks={"t": 5}, shape=SHAPE, interventions=MEAN)
    assert rows(made) == [
        ("none", 0, 0, ""),
        ("a", 0, 1, "L0H0"),
        ("a", 0, 3, "L0H0 L1H1 L2H2"),
        ("b", 0, 1, "L1H1"),
        ("b", 0, 3, "L1H1 L0H0 L2H3"),
    ]
    assert made.works[0] == Work("t", HeadSet(), "none", 0)
    assert made.cells[4].work == Work("t", HeadSet(["L0H0", "L1H1", "L2H3"]), "mean", 0)
    assert (made.rankings, made.ks, made.labels) == (["a", "b"], [0, 1, 3], ["mean"])


def test_equal_work_is_planned_once() -> None:
    both = HeadSet(["L1H1", "L0H0"])
    made = plan({"a": A, "b": both}, k=2, tasks={"t": 5, "u": 2}, shape=SHAPE,
                interventions={"mean": (0,), "resample": (1, 2)})  # fmt: skip
    # Head sets that differ in order alone are the same work; so is the run without ablation under every intervention.
    assert len(made.cells) == 2 * (1 + 2 + 1 + 2 * 2)
    pair = HeadSet(["L0H0", "L1H1"])
    ways = [(HeadSet(), "none", 0), (pair, "mean", 0), (pair, "resample", 1), (pair, "resample", 2)]
    assert set(made.works) == {Work(task, *way) for task in ("t", "u") for way in ways}
    assert len(made.works) == 8


def test_seeds_are_draws() -> None:
    controls = Controls(RandomHeads(draws=2))
    made = plan({"a": A}, k=2, tasks={"t": 5}, shape=SHAPE, interventions={"resample": (7, 3, 5)}, controls=controls)
    assert [(c.draw, c.seed) for c in made.cells if c.ranking == "a"] == [(0, 7), (1, 3), (2, 5)]
    drawn = [c for c in made.cells if c.ranking == "random"]
    assert [(c.draw, c.seed) for c in drawn] == [(0, 7), (1, 3), (2, 5), (3, 7), (4, 3), (5, 5)]
    assert len({c.heads for c in drawn[:3]}) == len({c.heads for c in drawn[3:]}) == 1
    assert [c.draw for c in made.cells if c.ranking == "none"] == [0]


def test_random_sets_are_those_of_a_sweep_in_memory() -> None:
    control = RandomHeads(draws=3, seed=11)
    made = plan(
        {"a": A, "b": B}, k=(1, 2), tasks={"t": 1}, shape=(6, 8), interventions=MEAN, controls=Controls(control)
    )
    expected = plan_cells({"a": A, "b": B}, (1, 2), (6, 8), control)
    assert rows(made) == [(c.ranking, c.draw, c.k, " ".join(c.heads.labels)) for c in expected]


def test_the_complement() -> None:
    every = {Head(layer, head) for layer in range(3) for head in range(4)}
    whole = HeadSet(sorted(every, reverse=True))
    made = plan({"a": A, "w": whole}, k=(2, 12), tasks={"t": 5}, shape=SHAPE, interventions=MEAN,
                sides=("ablated", "kept"), k_beyond="drop")  # fmt: skip
    assert made.labels == ["mean", "mean, kept"]
    kept = [c for c in made.cells if c.side == "kept"]
    assert [(c.ranking, c.k) for c in kept] == [("a", 0), ("w", 0), ("a", 2), ("w", 2), ("w", 12)]
    for cell in kept:
        assert set(cell.work.heads) == every - set(cell.heads) and len(cell.heads) == cell.k
        assert list(cell.work.heads) == sorted(cell.work.heads)
    # Nothing kept is the same for both rankings, and everything kept is the run without ablation.
    assert kept[0].work == kept[1].work and kept[4].work == Work("t", HeadSet(), "none", 0)
    assert made.notes == ("k = 12: left out for a, which ranks 5 heads",)


def test_fractions_and_thresholds() -> None:
    means = np.array([[0.9, 0.1, -0.5, 0.4], [0.3, np.nan, 0.8, 0.2], [0.5, 0.0, -0.1, 0.6]])
    made = plan({"a": scores(means), "b": B}, k=(0.25, Threshold(0.45, ("a",))), tasks={"t": 1}, shape=SHAPE,
                interventions=MEAN)  # fmt: skip
    assert rows(made)[1:] == [
        ("a", 0, 3, "L0H0 L1H2 L2H3"),
        ("a", 0, 4, "L0H0 L1H2 L2H3 L2H0"),
        ("b", 0, 3, "L1H1 L0H0 L2H3"),
    ]
    none_above = plan({"a": scores(means)}, k=(1, Threshold(5.0)), tasks={"t": 1}, shape=SHAPE, interventions=MEAN)
    assert none_above.notes == ("no head of 'a' scores above 5",) and none_above.ks == [0, 1]
    # Above means above: a head at the threshold stays out.
    exact = plan({"a": scores(means)}, k=Threshold(float(np.float32(0.5))), tasks={"t": 1}, shape=SHAPE,
                 interventions=MEAN)  # fmt: skip
    assert exact.ks == [0, 3]


def test_lowest_and_nearest_to_zero() -> None:
    means = np.array([[0.9, 0.1, -0.5, 0.4], [0.3, np.nan, 0.8, 0.2], [0.5, 0.0, -0.1, 0.6]])
    controls = Controls(bottom=True, nearest_zero=("a",))
    made = plan({"a": scores(means), "b": B}, k=3, tasks={"t": 1}, shape=SHAPE, interventions=MEAN, controls=controls)
    assert rows(made)[3:] == [
        ("a bottom", 0, 3, "L0H2 L2H2 L2H1"),
        ("a nearest zero", 0, 3, "L2H1 L0H1 L2H2"),
    ]
    given = scores(means)
    assert Ranked.of(given).lowest()[:3] == given.bottom(3)
    assert Ranked.of(given).nearest_zero()[:3] == given.nearest_zero(3)


@pytest.mark.parametrize("by", ["accuracy", "auroc"])
@pytest.mark.filterwarnings("ignore:Heads were chosen on weak calibration trials")
def test_qk_scores_rank_by_what_is_asked(by: str) -> None:
    rng = np.random.default_rng(0)
    found = candidate_scores(rng.normal(size=(40, 2, 3, 4)), rng.integers(0, 2, 40))
    ranked = Ranked.of(found, by=by)
    assert ranked.heads[:3] == found.select(3, split=None, by=by) and ranked.zero is None
    assert ranked.means is not None
    values = [ranked.means[h.layer, h.head] for h in ranked.heads]
    assert values == sorted(values, reverse=True) and 0 <= values[-1] < values[0] <= 1
    if by == "accuracy":
        top = ranked.heads[0]
        margins = found.values[:, :, top.layer, top.head]
        right = np.mean([int(np.argmax(m)) == label for m, label in zip(margins, found.labels, strict=True)])
        assert values[0] == pytest.approx(right)


# -- random controls ---------------------------------------------------------------------------------

ranking = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=4, max_size=12, unique=True).map(HeadSet)


@given(a=ranking, b=ranking, seed=st.integers(0, 2**31), draws=st.integers(1, 4), match=st.booleans())
@settings(max_examples=40, deadline=None)
def test_random_never_draws_a_tested_head(a: HeadSet, b: HeadSet, seed: int, draws: int, match: bool) -> None:
    def planned() -> Any:
        control = Controls(RandomHeads(draws=draws, seed=seed, match_layers=match))
        return plan({"a": a, "b": b}, k=(2, 4), tasks={"t": 3}, shape=(6, 8), interventions=MEAN, controls=control,
                    k_beyond="drop")  # fmt: skip

    made = planned()
    assert made.cells == planned().cells and made.blocks() == planned().blocks()
    tested = {head for c in made.cells if c.ranking in ("a", "b") for head in c.heads}
    drawn = [c for c in made.cells if c.ranking == "random"]
    assert [(c.k, c.draw) for c in drawn] == [(k, d) for k in made.ks[1:] for d in range(draws)]
    for cell in drawn:
        assert len(set(cell.heads)) == cell.k and not set(cell.heads) & tested
        cell.heads.check(6, 8)
        if match:
            count = {layer: len(heads) for layer, heads in cell.heads.by_layer().items()}
            assert count == {layer: len(heads) for layer, heads in a[: cell.k].by_layer().items()}


def test_fewer_rankings_may_count_as_tested() -> None:
    first, other = HeadSet((0, h) for h in range(4)), HeadSet((1, h) for h in range(4))
    control = RandomHeads(draws=30)
    narrow = plan(
        {"a": first, "b": other}, k=4, tasks={"t": 1}, shape=SHAPE, interventions=MEAN, controls=Controls(control)
    )
    assert {c.heads.by_layer().keys() == {2} for c in narrow.cells if c.ranking == "random"} == {True}
    wide = plan({"a": first, "b": other}, k=4, tasks={"t": 1}, shape=SHAPE, interventions=MEAN,
                controls=Controls(control, tested=("a",)))  # fmt: skip
    drawn = {head for c in wide.cells if c.ranking == "random" for head in c.heads}
    assert {head.layer for head in drawn} == {1, 2}
    free = plan({"a": first, "b": other}, k=4, tasks={"t": 1}, shape=SHAPE, interventions=MEAN,
                controls=Controls(RandomHeads(draws=30, exclude_tested=False)))  # fmt: skip
    assert {head.layer for c in free.cells if c.ranking == "random" for head in c.heads} == {0, 1, 2}


def test_sizes_without_room_are_refused_or_left_out() -> None:
    every = HeadSet((layer, head) for layer in range(3) for head in range(4))
    asked: dict[str, Any] = {"k": (1, 5, 9, 20), "tasks": {"t": 1}, "shape": SHAPE, "interventions": MEAN}
    with pytest.raises(
        InvalidInput, match="k = 20, but the ranking 'a' has 12 heads; ask for at most 12, or let k_bey"
    ):
        plan({"a": every}, **asked)
    made = plan({"a": every, "b": every}, **asked, controls=Controls(RandomHeads(draws=2)), k_beyond="drop")
    assert made.ks == [0, 1, 5]
    assert made.notes == (
        "k = 20: left out for a, b, which rank 12 heads",
        "k = 9: left out, cannot draw 5 random heads: 12 heads less 9 excluded leaves 3.",
    )
    asked["k"] = (1, 7)
    with pytest.raises(InvalidInput, match=r"less 7 excluded leaves 5\. Ask for smaller k, let fewer rankings count"):
        plan({"a": every}, **asked, controls=Controls(RandomHeads()))
    with pytest.raises(InvalidInput, match=r"no k is left to test\. k = 7: left out, cannot draw 7 random heads: "):
        plan({"a": every}, **{**asked, "k": 7}, controls=Controls(RandomHeads()), k_beyond="drop")


def test_random_sets_at_some_sizes_alone() -> None:
    asked: dict[str, Any] = {"tasks": {"t": 1}, "shape": SHAPE, "interventions": MEAN}
    made = plan({"a": A}, k=(1, 2, 4), **asked, controls=Controls(RandomHeads(draws=2, at=(2,))))
    assert [(c.k, c.draw) for c in made.cells if c.ranking == "random"] == [(2, 0), (2, 1)]
    with pytest.raises(InvalidInput, match=r"random heads are asked at k = 3, but the sweep has k = \[1, 2, 4\]"):
        plan({"a": A}, k=(1, 2, 4), **asked, controls=Controls(RandomHeads(at=(3,))))


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"rankings": {}}, "a sweep needs at least one ranking by name"),
        ({"rankings": {"none": A}}, "a ranking cannot be called 'none'; that names a control"),
        ({"rankings": {"a": A, "a bottom": B}}, "a ranking cannot be called 'a bottom'; that names a control"),
        ({"rankings": {"a": HeadSet(["L3H0"])}}, "L3H0 does not exist: the model has layers 0 to 2"),
        ({"rankings": {"a": scores(np.ones((2, 4)))}}, r"the ranking 'a' has scores \[2, 4\]; the model is \[3, 4\]"),
        ({"k": ()}, "k is empty; give numbers of heads"),
        ({"k": (0,)}, "no k is left to test"),
        ({"k": (True,)}, "k holds True; give numbers of heads from 1"),
        ({"k": (1.5,)}, "k holds 1.5; give numbers of heads from 1"),
        ({"k": Threshold(0.1)}, "k holds a threshold, but the ranking 'a' is a list of heads without scores"),
        ({"k": (1, Threshold(0.1, ("x",)))}, "unknown ranking of a threshold 'x'"),
        ({"tasks": {}}, "a sweep needs at least one task"),
        ({"tasks": {"t": 0}}, "trials of the task 't' is 0; it must be a whole number >= 1"),
        ({"interventions": {}}, "a sweep needs at least one intervention"),
        ({"interventions": {"none": (0,)}}, "an intervention cannot be called 'none'"),
        ({"interventions": {"mean, kept": (0,)}}, "an intervention cannot be called 'mean, kept'"),
        ({"interventions": {"mean": (1, 1)}}, r"has the seeds \[1, 1\]; give at least one, each once"),
        ({"sides": ()}, r"sides is \[\]; name at least one of ablated, kept"),
        ({"sides": ("keep",)}, "unknown side 'keep'. Did you mean 'kept'"),
        ({"k_beyond": "cut"}, "unknown k_beyond 'cut'"),
        (
            {"controls": Controls(bottom=("a",))},
            "the control bottom names 'a', which is a list of heads without scores",
        ),
        ({"controls": Controls(nearest_zero=("x",))}, "unknown ranking of the control nearest_zero 'x'"),
        ({"controls": Controls(RandomHeads(), tested=("x",))}, "unknown ranking of the random control 'x'"),
    ],
)
def test_plans_that_cannot_be(changes: dict[str, Any], told: str) -> None:
    asked: dict[str, Any] = {
        "rankings": {"a": A},
        "k": (1, 2),
        "tasks": {"t": 1},
        "shape": SHAPE,
        "interventions": MEAN,
    }
    asked |= changes
    with pytest.raises(InvalidInput, match=told):
        plan(asked.pop("rankings"), **asked)


def test_accuracies_have_no_zero() -> None:
    ranked = Ranked(A, np.full(SHAPE, 0.5), None)
    with pytest.raises(
        InvalidInput, match="the control nearest_zero names 'a', which is ranked by accuracy; leave it out"
    ):
        plan(
            {"a": ranked}, k=1, tasks={"t": 1}, shape=SHAPE, interventions=MEAN, controls=Controls(nearest_zero=("a",))
        )


# -- blocks and counts -------------------------------------------------------------------------------


@given(a=ranking, b=ranking, per_block=st.integers(1, 7), kept=st.booleans(), seeds=st.integers(1, 2))
@settings(max_examples=30, deadline=None)
def test_blocks_hold_all_work_once_and_counts_are_right(
    a: HeadSet, b: HeadSet, per_block: int, kept: bool, seeds: int
) -> None:
    tasks = {"t": 5, "u": 3}
    made = plan(
        {"a": a, "b": b},
        k=(1, 3),
        tasks=tasks,
        shape=(6, 8),
        sides=("ablated", "kept") if kept else ("ablated",),
        interventions={"mean": (0,), "resample": tuple(range(seeds))},
        controls=Controls(RandomHeads(draws=2)),
    )
    blocks = made.blocks(heads_per_block=per_block)
    assert sorted(map(repr, itertools.chain(*blocks))) == sorted(map(repr, set(made.works)))
    assert len(set(made.works)) == len(made.works)
    lowest: dict[str, int] = {}
    for block in blocks:
        assert 1 <= len(block) <= per_block and len({w.task for w in block}) == 1
        for work in block:  # first layers never fall within a task
            first = min((h.layer for h in work.heads), default=6)
            assert lowest.get(work.task, 0) <= first
            lowest[work.task] = first
    # The count by hand: every row of every block, layer by layer.
    n = made.count(heads_per_block=per_block)
    computed = naive = prompts = 0
    for block in blocks:
        for _ in range(tasks[block[0].task]):
            firsts = [min((h.layer for h in w.heads), default=6) for w in block]
            naive += 6 * len(block)
            prompts += 1
            for layer in range(6):
                computed += any(first > layer for first in firsts)  # the clean row, until the last row has split off
                computed += sum(first <= layer for first in firsts)
    assert n.prompts == prompts and n.rows == naive // 6 == sum(n.rows_by_task.values())
    assert n.layers_saved == pytest.approx(1 - computed / naive)
    assert (n.cells, n.runs, n.head_sets) == (len(made.cells), len(made.works), len({w.heads for w in made.works}))
    assert n.rows_by_task == {t: tasks[t] * sum(w.task == t for w in made.works) for t in tasks}
    sets = 1 + 2 * 2 + 2 * 2 + (3 * 1 + 2 * 2 + 2 * 2 if kept else 0)  # kept: nothing kept stands under every ranking
    assert n.named_sets == sets


def test_a_plan_can_be_read() -> None:
    made = plan({"a": A, "b": B}, k=(1, 3), tasks={"needles": 10, "recall": 4}, shape=SHAPE,
                interventions={"mean": (0,), "resample": (0, 1)}, controls=Controls(RandomHeads(draws=2)),
                sides=("ablated", "kept"))  # fmt: skip
    text = str(made)
    assert text == made.describe()
    for part in (
        "rankings        a, b, random (2 draws)\n",
        "k               0 1 3\n",
        "interventions   mean, resample (2 seeds)\n",
        "sides           ablated, kept\n",
        "tasks           needles (10 trials), recall (4 trials)\n",
        f"cells           {len(made.cells)}\n",
        f"runs            {len(made.works)} (a head set on a task)\n",
    ):
        assert part in text
    assert len({len(line) - len(line.lstrip()) for line in text.splitlines()}) == 1


def test_estimates() -> None:
    made = plan({"a": A}, k=(1, 2), tasks={"t": 10, "u": 4}, shape=SHAPE, interventions=MEAN)
    assert made.estimate(0.5) == pytest.approx(0.5 * 3 * 14)
    assert made.estimate({"t": 1.0, "u": 2.0}, workers=2) == pytest.approx((30 + 2 * 12) / 2)
    with pytest.raises(InvalidInput, match=r"seconds_per_row names no time for the task 'u'; it names \['t'\]"):
        made.estimate({"t": 1.0})
    with pytest.raises(InvalidInput, match=r"seconds_per_row is 0\.0 for 't'; it must be above 0"):
        made.estimate(0.0)
    with pytest.raises(InvalidInput, match="heads_per_block is 0; it must be a whole number >= 1"):
        made.blocks(heads_per_block=0)


# -- tables ------------------------------------------------------------------------------------------


def run_all(made: Any, *, seed: int = 0) -> dict[Work, CellResult]:
    """A result for every work, all numbers different, with a NaN in each."""
    rng = np.random.default_rng(seed)
    out = {}
    for work in made.works:
        n = made.tasks[work.task]
        values = {"correct": rng.random(n), "answer_logprob": -rng.random(n)}
        values["answer_logprob"][0] = np.nan
        out[work] = CellResult(tuple(f"{work.task}{i}" for i in range(n)), values)
    return out


@given(a=ranking, b=ranking, draws=st.integers(1, 2), kept=st.booleans())
@settings(max_examples=15, deadline=None)
def test_tables_lose_nothing(a: HeadSet, b: HeadSet, draws: int, kept: bool) -> None:
    made = plan(
        {"a": a, "b": b},
        k=(1, 3),
        tasks={"t": 3, "u": 2},
        shape=(6, 8),
        sides=("ablated", "kept") if kept else ("ablated",),
        interventions={"mean": (0,), "resample": (4, 2)},
        controls=Controls(RandomHeads(draws=draws)),
    )
    results = run_all(made)
    tables = assemble(made, results)
    assert list(tables) == made.labels
    # Cell by cell, trial by trial: exactly these rows, and no other.
    for label, table in tables.items():
        expected = []
        for cell in made.cells:
            if cell.label != label:
                continue
            result = results[cell.work]
            for metric, values in result.values.items():
                for trial, value in zip(result.trial_ids, values, strict=True):
                    where = (cell.ranking, cell.draw, cell.k, cell.task, trial, metric)
                    expected.append((*where, float(value), " ".join(cell.heads.labels)))
        # As text, since NaN is not equal to itself; one line each, so that a failure stays short.
        told = map(repr, table.itertuples(index=False, name=None))
        wrong = [(a, b) for a, b in itertools.zip_longest(told, map(repr, expected)) if a != b]
        assert not wrong[:3]
        # And it is a result: names, sides and draws are those a SweepResult takes.
        side = "kept" if label.endswith("kept") else "ablated"
        assert SweepResult(table, {"side": side}).rankings == ["a", "b", "random"]
        assert (table["ranking"] == "none").any() == (side == "ablated")


def test_missing_results_are_refused_or_left_out() -> None:
    made = plan({"a": A}, k=(1, 2), tasks={"t": 2}, shape=SHAPE, interventions=MEAN)
    results = run_all(made)
    gone = made.cells[2].work
    del results[gone]
    assert made.missing(results) == [gone]
    told = r"1 of 3 results are missing, the first on 't' with 'mean' of 2 heads; run the sweep again to fill them in\."
    with pytest.raises(InvalidInput, match=told):
        assemble(made, results)
    table = assemble(made, results, allow_missing=True)["mean"]
    assert set(zip(table["ranking"], table["k"], strict=True)) == {("none", 0), ("a", 1)}
    assert assemble(made, {}, allow_missing=True) == {}


@pytest.mark.parametrize(
    ("result", "told"),
    [
        (CellResult(("t0",), {"correct": np.zeros(1)}), "a result on 't' has 1 trials; the plan has 2"),
        (CellResult(("t1", "t0"), {"correct": np.zeros(2)}), "results on 't' are of different trials"),
        (CellResult(("t0", "t1"), {"f1": np.zeros(2)}), r"have the metrics \['correct'\] and \['f1'\]; they cannot"),
    ],
)
def test_results_that_do_not_fit(result: CellResult, told: str) -> None:
    made = plan({"a": A}, k=1, tasks={"t": 2}, shape=SHAPE, interventions=MEAN)
    good = CellResult(("t0", "t1"), {"correct": np.zeros(2)})
    with pytest.raises(InvalidInput, match=told):
        assemble(made, {made.works[0]: good, made.works[1]: result})


# -- from a study ------------------------------------------------------------------------------------

STUDY = """\
model: nano
seed: 9
tasks: {needles: {dataset: nano.retrieval, calibration: 0.5}}
rankings: {a: {method: locos}, b: {heads: L0H0 L1H1 L2H2}}
k: [1, 0.25, {threshold: 0.5, rankings: a}]
k_beyond: drop
interventions: [{kind: resample, reference: needles.calibration, seeds: [3, 4]}, zero]
sides: [ablated, kept]
controls: {random: {draws: 2, tested: a, at: [1]}, bottom: true}
"""


def test_a_study_is_planned_as_it_says() -> None:
    study = parse_study(STUDY)
    means = np.linspace(1, -1, 12).reshape(SHAPE)
    given: dict[str, Any] = {"a": scores(means), "b": study.rankings["b"].head_set}
    made = plan_study(study, given, tasks={"needles": 6}, shape=SHAPE)
    expected = plan(
        given,
        k=(1, 0.25, Threshold(0.5, ("a",))),
        tasks={"needles": 6},
        shape=SHAPE,
        interventions={"resample": (3, 4), "zero": (0,)},
        sides=("ablated", "kept"),
        controls=Controls(RandomHeads(draws=2, seed=9, at=(1,)), tested=("a",), bottom=True),
        k_beyond="drop",
    )
    assert made.cells == expected.cells and made.notes == expected.notes
    assert made.rankings == ["a", "b", "a bottom", "random"] and made.ks == [0, 1, 3]
    with pytest.raises(InvalidInput, match=r"has the rankings \['a', 'b'\], but \['a'\] were given"):
        plan_study(study, {"a": given["a"]}, tasks={"needles": 6}, shape=SHAPE)


def test_no_random_control_in_a_study() -> None:
    study = parse_study(STUDY.replace("random: {draws: 2, tested: a, at: [1]}", "random: false"))
    given: dict[str, Any] = {"a": scores(np.linspace(1, -1, 12).reshape(SHAPE)), "b": study.rankings["b"].head_set}
    assert "random" not in plan_study(study, given, tasks={"needles": 6}, shape=SHAPE).rankings


def test_an_unknown_ranking_is_no_head_set() -> None:
    with pytest.raises(InvalidInput, match="cannot read heads from 3"):
        Ranked.of(3)
    assert issubclass(UnknownName, InvalidInput)
