"""Ablation sweeps: the plan of cells, and results equal to cells run by hand."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import numpy as np
import pandas as pd
import pytest
import torch
from helpers import answered, counted
from hypothesis import given
from hypothesis import strategies as st

import mechheads as mh
from mechheads.generate import generate
from mechheads.interventions import apply
from mechheads.sweep import run_sweep
from mechheads.sweep_controls import plan_cells, random_heads
from mechheads.tasks import Outcome, Task, continuation
from mechheads.text import answer_f1, contains_answer, exact_match, rouge1_recall, rougeL_f

A = mh.HeadSet(["L0H0", "L1H1", "L2H2", "L0H3", "L1H0"])
B = mh.HeadSet(["L1H1", "L0H0", "L2H3", "L2H0", "L0H1"])


# -- the plan ------------------------------------------------------------------------------------


def test_plan_without_controls() -> None:
    cells = plan_cells({"a": A, "b": B}, (3, 0, 1, 3), (3, 4), None)
    assert [(c.ranking, c.draw, c.k, c.heads.labels) for c in cells] == [
        ("none", 0, 0, []),
        ("a", 0, 1, ["L0H0"]),
        ("a", 0, 3, ["L0H0", "L1H1", "L2H2"]),
        ("b", 0, 1, ["L1H1"]),
        ("b", 0, 3, ["L1H1", "L0H0", "L2H3"]),
    ]


def test_the_baseline_is_always_there() -> None:
    assert [c.k for c in plan_cells({"a": A}, (2,), (3, 4), None)] == [0, 2]
    for controls in (None, random_heads()):
        assert [c.ranking for c in plan_cells({"a": A}, (0,), (3, 4), controls)] == ["none"]


heads = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 7)), min_size=4, max_size=12, unique=True)


@given(a=heads, b=heads, seed=st.integers(0, 2**31), draws=st.integers(1, 5))
def test_random_never_draws_a_tested_head(a: list, b: list, seed: int, draws: int) -> None:
    rankings = {"a": mh.HeadSet(a), "b": mh.HeadSet(b)}
    cells = plan_cells(rankings, (2, 4), (6, 8), random_heads(draws=draws, seed=seed))
    tested = set(rankings["a"][:4]) | set(rankings["b"][:4])
    drawn = [c for c in cells if c.ranking == "random"]
    assert [(c.k, c.draw) for c in drawn] == [(k, d) for k in (2, 4) for d in range(draws)]
    for cell in drawn:
        assert len(set(cell.heads)) == len(cell.heads) == cell.k
        assert not set(cell.heads) & tested
        cell.heads.check(6, 8)
    assert cells == plan_cells(rankings, (2, 4), (6, 8), random_heads(draws=draws, seed=seed))


def test_random_draws_differ_by_seed_size_and_draw() -> None:
    def drawn(seed: int) -> list[mh.HeadSet]:
        cells = plan_cells({"a": A}, (2, 4), (12, 12), random_heads(draws=4, seed=seed))
        return [c.heads for c in cells if c.ranking == "random"]

    sets = [frozenset(h) for seed in (0, 1) for h in drawn(seed)]
    assert len(set(sets)) == len(sets) == 16


def test_tested_heads_may_be_drawn_only_if_asked() -> None:
    every = mh.HeadSet([(layer, head) for layer in range(3) for head in range(4)])
    cells = plan_cells({"a": every}, (12,), (3, 4), random_heads(draws=1, exclude_tested=False))
    assert set(cells[-1].heads) == set(every)
    with pytest.raises(mh.InvalidInput, match="cannot draw 12 random heads: 12 heads less 12 excluded leaves 0"):
        plan_cells({"a": every}, (12,), (3, 4), random_heads(draws=1))


def test_random_heads_can_match_layers() -> None:
    cells = plan_cells({"a": A}, (4,), (3, 4), random_heads(draws=5, match_layers=True))
    drawn = [c for c in cells if c.ranking == "random"]
    assert len(drawn) == 5
    for cell in drawn:
        assert {layer: len(h) for layer, h in cell.heads.by_layer().items()} == {0: 2, 1: 1, 2: 1}
        assert not set(cell.heads) & set(A[:4])


def test_random_heads_at_some_sizes_only() -> None:
    cells = plan_cells({"a": A}, (1, 2, 4), (3, 4), random_heads(draws=2, at=(2,)))
    assert [(c.k, c.draw) for c in cells if c.ranking == "random"] == [(2, 0), (2, 1)]
    with pytest.raises(mh.InvalidInput, match=r"asked at k = \[3\], but the sweep has k = \[1, 2, 4\]"):
        plan_cells({"a": A}, (1, 2, 4), (3, 4), random_heads(at=(3,)))


@pytest.mark.parametrize(
    ("rankings", "k", "told"),
    [
        ({"a": A}, (6,), "k = 6, but the ranking 'a' has 5 heads"),
        ({"a": A}, (-1,), "k holds -1; set sizes are whole numbers"),
        ({"a": A}, (True,), "k holds True; set sizes are whole numbers"),
        ({"none": A}, (1,), "a ranking cannot be called 'none'"),
        ({"random": A}, (1,), "a ranking cannot be called 'random'"),
        ({"a": mh.HeadSet(["L3H0"])}, (1,), "L3H0 does not exist: the model has layers 0 to 2"),
    ],
)
def test_plans_that_cannot_be(rankings: Any, k: Any, told: str) -> None:
    with pytest.raises(mh.InvalidInput, match=told):
        plan_cells(rankings, k, (3, 4), None)


def test_no_draws() -> None:
    with pytest.raises(mh.InvalidInput, match="draws is 0"):
        random_heads(draws=0)


# -- results -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tasks(llama: mh.Model) -> dict[str, mh.TrialSet]:
    return {
        "target": answered(llama, name="target"),
        "control": answered(llama, (11, 16, 23), at=slice(0, 1), seed=3, name="control"),
    }


@pytest.fixture(scope="module")
def mean(llama: mh.Model) -> mh.Intervention:
    return mh.mean_ablation(reference=answered(llama, seed=7, at=slice(0, 1))).prepare(llama)


@pytest.fixture(scope="module")
def sweep(llama: mh.Model, tasks: dict[str, mh.TrialSet], mean: mh.Intervention) -> Any:
    return run_sweep(
        llama, {"a": A, "b": B}, k=(0, 1, 3), tasks=tasks, intervention=mean,
        controls=random_heads(draws=2, seed=5), max_new_tokens=6, batch_size=4,
    )  # fmt: skip


def forced_logprob(model: mh.Model, trial: mh.Trial, intervention: mh.Intervention) -> float:
    """Mean log-probability of the gold answer's tokens, from one uncached run of prompt and answer."""
    answer = continuation(model, trial, trial.answer or "")
    with apply(model, intervention):
        logprobs = model.logits([*trial.tokens, *answer]).log_softmax(-1)
    at = range(len(trial.tokens) - 1, len(trial.tokens) - 1 + len(answer))
    return float(np.mean([logprobs[i, token].item() for i, token in zip(at, answer, strict=True)]))


def test_every_cell_equals_one_run_by_hand(
    llama: mh.Model, tasks: dict[str, mh.TrialSet], mean: mh.Intervention, sweep: mh.SweepResult
) -> None:
    frame = sweep.frame
    cells = frame.groupby(["ranking", "draw", "k", "task", "heads"], sort=False)
    assert len(cells) == (1 + 2 * 2 + 2 * 2) * 2
    changed = 0
    for cell, rows in cells:
        ranking, _, k, task, heads = cast(tuple[str, int, int, str, str], cell)
        assert len(heads.split()) == k and (ranking == "none") == (k == 0)
        trials = tasks[task]
        with apply(llama, mean.on(heads)):
            said = generate(llama, [t.tokens for t in trials], max_new_tokens=6, stop_at_newline=True)
        want = {
            (t.id, metric): value
            for t, g in zip(trials, said, strict=True)
            if t.answer is not None
            for metric, value in (
                ("answer_logprob", forced_logprob(llama, t, mean.on(heads))),
                ("correct", float(contains_answer(g.text, t.answer))),
                ("exact_match", float(exact_match(g.text, t.answer))),
                ("f1", answer_f1(g.text, t.answer)),
                ("rouge1_recall", rouge1_recall(g.text, t.answer)),
                ("rougeL_f", rougeL_f(g.text, t.answer)),
            )
        }
        got = {(t, m): v for t, m, v in rows[["trial_id", "metric", "value"]].itertuples(index=False, name=None)}
        assert got == pytest.approx(want, abs=2e-6) and len(rows) == len(want)
        changed += any(value < 1 for (_, metric), value in want.items() if metric == "correct")
    assert changed > 4  # ablation does change answers here


def test_the_baseline_answers_everything_and_is_run_once(tasks: dict[str, mh.TrialSet], sweep: mh.SweepResult) -> None:
    for task, trials in tasks.items():
        base = sweep.cell("a", 0, task, "correct")
        assert base["value"].tolist() == [1.0] * len(trials) and set(base["heads"]) == {""}
    assert len(sweep.frame.query("ranking == 'none' and metric == 'correct'")) == 9
    assert sweep.frame.query("ranking == 'none'")["draw"].unique().tolist() == [0]


def test_equal_head_sets_are_run_once(
    llama: mh.Model, tasks: dict[str, mh.TrialSet], mean: mh.Intervention, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mechheads import cell_runs as module

    real = module.run_head_sets

    def runs(rankings: dict[str, mh.HeadSet]) -> int:
        ran = []

        def count(model: Any, asks: Any, interventions: Any, programs: Any, **options: Any) -> Any:
            ran.extend(programs)
            return real(model, asks, interventions, programs, **options)

        monkeypatch.setattr(module, "run_head_sets", count)
        run_sweep(llama, rankings, k=(2,), tasks=tasks, intervention=mean, max_new_tokens=2)
        return len(ran)

    assert set(A[:2]) == set(B[:2])
    assert runs({"a": A, "b": B}) == runs({"a": A}) == 2 * 2  # tasks x (the set and the baseline)
    assert runs({"a": A, "b": B[2:]}) == 2 * 3


def test_the_result_knows_where_it_came_from(
    llama: mh.Model, tasks: dict[str, mh.TrialSet], sweep: mh.SweepResult, mean: mh.Intervention
) -> None:
    meta = sweep.meta
    assert meta["model"]["weight_hash"] == llama.weight_hash() and meta["method"] == "sweep" and meta["seed"] == 5
    options = meta["options"]
    assert (
        options["k"] == [0, 1, 3]
        and options["max_new_tokens"] == {"target": 6, "control": 6}
        and options["stop_at_newline"] is True
    )
    assert options["intervention"] == mean.describe() and options["intervention"]["reference"]["n"] == 6
    assert options["rankings"] == {"a": A.labels, "b": B.labels}
    assert options["controls"]["draws"] == 2 and options["controls"]["exclude_tested"] is True
    assert meta["trials"]["name"] == "target+control"
    assert set(meta["trials"]["options"]) == {"target", "control"}
    assert sweep.tasks == ["target", "control"] and sweep.rankings == ["a", "b", "random"] and sweep.ks == [0, 1, 3]
    tested = {*A[:3].labels, *B[:3].labels}
    drawn = {h for text in sweep.frame.query("ranking == 'random'")["heads"] for h in text.split()}
    assert drawn and not drawn & tested


def test_the_same_sweep_twice_is_the_same(
    llama: mh.Model, tasks: dict[str, mh.TrialSet], mean: mh.Intervention, sweep: mh.SweepResult
) -> None:
    again: Any = run_sweep(
        llama, {"a": A, "b": B}, k=(3, 1), tasks=tasks, intervention=mean,
        controls=random_heads(draws=2, seed=5), max_new_tokens=6, batch_size=4,
    )  # fmt: skip
    pd.testing.assert_frame_equal(again.frame, sweep.frame)
    assert {**again.meta, "created": ""} == {**sweep.meta, "created": ""}


def test_head_scores_are_rankings(llama: mh.Model, tasks: dict[str, mh.TrialSet]) -> None:
    ca = mh.CircuitAnalysis(llama)
    locos = ca.score("locos", tasks["control"], rouge_threshold=None)
    by_scores = ca.sweep({"x": locos}, k=(2,), trials=tasks["target"], intervention=mh.zero_ablation())
    by_heads = ca.sweep({"x": locos.top(2)}, k=(2,), trials=tasks["target"], intervention=mh.zero_ablation())
    pd.testing.assert_frame_equal(by_scores.frame, by_heads.frame)
    assert set(by_scores.frame.query("k == 2")["heads"]) == {" ".join(locos.top(2).labels)}


def test_results_survive_a_file(sweep: mh.SweepResult, tmp_path: Any) -> None:
    again = mh.SweepResult.load(sweep.save(tmp_path / "sweep"))
    pd.testing.assert_frame_equal(again.frame, sweep.frame)
    curve = again.curve("correct", task="target")
    assert set(curve["ranking"]) == {"a", "b", "random"} and np.isfinite(curve["mean"]).all()
    assert (curve.query("k == 0")["mean"] == 1).all() and (curve.query("k == 3")["mean"] < 1).any()


def test_judging_an_answer() -> None:
    task = Task.of(
        "t", [mh.Trial(id="t", tokens=[5], answer="red door")], metrics=("correct", "exact_match", "rougeL_f")
    )

    def judge(text: str) -> dict[str, float]:
        return task.judge(task.trials[0], Outcome(text=text))

    assert judge("Red door.") == {"correct": 1, "exact_match": 1, "rougeL_f": 1}
    long = judge("It is the red door")
    assert long["correct"] == 1 and long["exact_match"] == 0 and 0 < long["rougeL_f"] < 1
    assert judge("a door, red") == {"correct": 0, "exact_match": 0, "rougeL_f": pytest.approx(0.4)}
    assert set(judge("").values()) == {0.0}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"rankings": {}}, "a sweep needs at least one ranking"),
        ({"tasks": {}}, "a sweep needs at least one task"),
        ({"tasks": {"target": mh.TrialSet([])}}, "the task 'target' has no trials"),
        (
            {"tasks": {"target": mh.TrialSet([mh.Trial(id="t", tokens=[5])])}},
            "trial 't' has neither a gold answer nor candidates",
        ),
        (
            {"tasks": {"target": mh.TrialSet([mh.Trial(id="t", tokens=[5] * 129, answer="w5")])}},
            "trial 't' of task 'target' has 129 tokens",
        ),
        ({"k": (1, 99)}, "k = 99, but the ranking 'a' has 5 heads"),
    ],
)
def test_sweeps_that_cannot_run_are_refused_before_any_pass(
    llama: mh.Model, tasks: dict[str, mh.TrialSet], change: dict[str, Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    good: dict[str, Any] = {"rankings": {"a": A}, "k": (1,), "tasks": tasks, "intervention": mh.zero_ablation()}
    asked = {**good, **change}
    with counted(llama, monkeypatch) as calls, pytest.raises(mh.InvalidInput, match=told):
        run_sweep(llama, asked.pop("rankings"), **asked)
    assert calls == {"run": 0, "prefill": 0}


def test_choosing_heads_on_the_tested_trials_warns_and_is_recorded(
    llama: mh.Model, tasks: dict[str, mh.TrialSet]
) -> None:
    ca, target = mh.CircuitAnalysis(llama), tasks["target"]
    locos = ca.score("locos", target)
    mean = mh.mean_ablation(reference=target)
    with pytest.warns(UserWarning) as told:
        result = ca.sweep(locos, k=1, trials=target, intervention=mean, max_new_tokens=2)
    assert [str(w.message) for w in told] == result.meta["caveats"] and len(told) == 2
    assert f"chosen on {len(target)} of the {len(target)} trials" in result.meta["caveats"][0]
    assert "the mean is taken over" in result.meta["caveats"][1]
    other = mh.HeadScores(
        **{**vars(locos), "meta": {**locos.meta, "model": {"weight_hash": "of another"}}, "records": ()}
    )
    with pytest.warns(UserWarning, match="other weights"):
        ca.sweep({"x": other}, k=1, trials=target, intervention=mh.zero_ablation(), max_new_tokens=2)


def test_one_ranking_needs_no_name(llama: mh.Model, tasks: dict[str, mh.TrialSet]) -> None:
    ca = mh.CircuitAnalysis(llama)
    result = ca.sweep("L0H1 L1H2", k=2, trials=tasks["target"], intervention=mh.zero_ablation(), max_new_tokens=2)
    assert result.rankings == ["given"] or set(result.rankings) == {"none", "given"}
    with pytest.raises(mh.InvalidInput, match="chooses them"):
        ca.sweep("L0H1", k=1, trials=tasks["target"], intervention=mh.zero_ablation().on("L0H0"))


def test_interrupted_sweep_keeps_its_cells(
    llama: mh.Model, tasks: dict[str, mh.TrialSet], monkeypatch: pytest.MonkeyPatch
) -> None:
    from mechheads import cell_runs as module

    real, calls = module.run_head_sets, []

    def stop_at_third(*args: Any, **options: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return real(*args, **options)

    monkeypatch.setattr(module, "run_head_sets", stop_at_third)
    with pytest.warns(UserWarning, match="interrupted: the 2 cells that are done are kept, 1 are left"):
        result = mh.CircuitAnalysis(llama).sweep(
            "L2H1 L1H2", k=(1, 2), trials=tasks["target"], intervention=mh.zero_ablation(), max_new_tokens=2,
            heads_per_block=1,
        )  # fmt: skip
    assert result.meta["complete"] is False and set(result.frame["k"]) == {1, 2}
    assert llama.ablations == [] and not llama.backend.hooked()


# -- what a key stands for ----------------------------------------------------------------------------


def test_values_taken_elsewhere_are_not_what_a_store_keeps(
    llama: mh.Model, tasks: dict[str, mh.TrialSet], tmp_path: Any
) -> None:
    plain = mh.mean_ablation(reference=answered(llama, seed=7, at=slice(0, 1)))
    other = dataclasses.replace(plain, values=torch.full((3, 4, 16), 9.0))
    ca = mh.CircuitAnalysis(llama, store=tmp_path, progress=False)
    first = ca.sweep("L1H1", k=1, trials=tasks["target"], intervention=other, max_new_tokens=2)
    second = ca.sweep("L1H1", k=1, trials=tasks["target"], intervention=plain, max_new_tokens=2)
    fresh = mh.CircuitAnalysis(llama, progress=False).sweep(
        "L1H1", k=1, trials=tasks["target"], intervention=plain, max_new_tokens=2
    )
    pd.testing.assert_frame_equal(second.frame, fresh.frame)
    pd.testing.assert_frame_equal(first.frame, fresh.frame)  # the mean is that of the reference, whoever took it


def test_a_resample_has_its_own_seed(llama: mh.Model, tasks: dict[str, mh.TrialSet]) -> None:
    reference = answered(llama, seed=7, at=slice(0, 1))
    ca = mh.CircuitAnalysis(llama, progress=False)

    def swept(**options: Any) -> pd.DataFrame:
        return ca.sweep("L0H0 L1H1", k=2, trials=tasks["target"], max_new_tokens=2, **options).frame

    apart = [swept(intervention=mh.resample_ablation(reference=reference, seed=seed)) for seed in (0, 3)]
    values = [one.query("metric == 'answer_logprob' and k == 2")["value"].to_numpy() for one in apart]
    assert not np.allclose(values[0], values[1])
    together = swept(intervention=mh.resample_ablation(reference=reference), seeds=(0, 3))
    for draw, one in enumerate(values):
        cell = together.query(f"metric == 'answer_logprob' and k == 2 and draw == {draw}")
        assert cell["value"].to_numpy() == pytest.approx(one, abs=2e-6)


def test_a_worker_refuses_another_model(llama: mh.Model, tasks: dict[str, mh.TrialSet]) -> None:
    from mechheads.cell_runs import CellRecipe, model_identity

    described = llama.describe()
    good = CellRecipe(llama, {}, {}, identity=model_identity({**described, "name": "moved elsewhere"}))
    assert good.build().model is llama
    for changed in ("weight_hash", "tokenizer_hash", "settings_hash"):
        recipe = CellRecipe(llama, {}, {}, identity=model_identity({**described, changed: "other"}))
        with pytest.raises(mh.InvalidInput, match="as a worker loads it has other weights, another tokenizer or other"):
            recipe.build()


def test_a_numpy_number_of_heads(llama: mh.Model, tasks: dict[str, mh.TrialSet]) -> None:
    ca = mh.CircuitAnalysis(llama, progress=False)
    done = ca.sweep("L0H0", k=np.int64(1), trials=tasks["target"], intervention=mh.zero_ablation(), max_new_tokens=1)
    assert done.ks == [0, 1]


def test_a_hooked_model_is_not_swept(llama: mh.Model, tasks: dict[str, mh.TrialSet]) -> None:
    ca = mh.CircuitAnalysis(llama, progress=False)
    with apply(llama, mh.zero_ablation().on("L0H0")):
        with pytest.raises(mh.InvalidInput, match=r"there are hooks on the model"):
            ca.sweep("L1H1", k=1, trials=tasks["target"], intervention=mh.zero_ablation())
        llama.logits([5, 6])  # or the hook of this test would complain that it never fired
