"""Studies run on nano: what is computed, what is kept, what goes on after it was stopped, and what the page says."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from engine_toys import content
from helpers import counted
from jaxtyping import config

import mechheads as mh
from mechheads import cell_runs, study_parts, study_run
from mechheads.cell_runs import CellWorker
from mechheads.cell_store import CellStore
from mechheads.errors import InvalidInput, MechheadsError, OutputNotWritable, ResultFileError
from mechheads.generate import generate
from mechheads.heads import HeadSet
from mechheads.interventions import apply
from mechheads.study import Study, load_study, parse_study
from mechheads.study_parts import intervention_of
from mechheads.study_run import Estimate, StudyResult, duration, engine_of, limits_of, run_study
from mechheads.study_status import PlannedBlock, PlannedRun, study_status, write_plan
from mechheads.study_summary import measure
from mechheads.sweep_result import SweepResult
from mechheads.sweep_set import SweepSet
from mechheads.tasks import Task
from mechheads.text import contains_answer
from mechheads.trials import Trial, TrialSet

SMALL = """\
name: small
model: nano
tasks:
  needles:
    dataset: nano.retrieval
    calibration: 0.5
    options: {n: 8, context_length: 120}
    max_new_tokens: 2
    metrics: [correct, answer_logprob]
  recall: {dataset: nano.recall, role: control, options: {n: 3}, max_new_tokens: 2, metrics: [correct]}
rankings:
  locos: {method: locos}
  dla: {method: dla}
  mine: {heads: L1H0 L0H0 L2H1}
k: [1, 2]
interventions:
  - {kind: mean, reference: needles.calibration, n_reference: 3}
  - zero
sides: [ablated, kept]
controls: {random: {draws: 2, tested: [mine]}, bottom: [locos]}
heads_per_block: 8
"""
# Thirteen cells a task, in five blocks; nothing to score.
QUICK = """\
name: quick
model: nano
tasks:
  needles: {dataset: nano.retrieval, calibration: 0.5, options: {n: 6, context_length: 80}, max_new_tokens: 2}
  recall: {dataset: nano.recall, role: control, options: {n: 2}, max_new_tokens: 2}
rankings: {mine: {heads: L1H0 L0H0 L2H1}}
k: [1, 2, 3]
interventions: {kind: resample, reference: needles.calibration}
controls: {random: {draws: 3}}
heads_per_block: 3
"""


@pytest.fixture(scope="module", autouse=True)
def as_users_run_it() -> Iterator[None]:
    """Without type checks at every call, which would take longer than the studies themselves."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config, "jaxtyping_disable", True)
        yield


@pytest.fixture(scope="module")
def nano() -> mh.Model:
    return mh.load("nano")


@pytest.fixture(scope="module")
def whole(nano: mh.Model, tmp_path_factory: pytest.TempPathFactory) -> StudyResult:
    """The small study, run without a stop."""
    said: list[str] = []
    folder = tmp_path_factory.mktemp("whole")
    result = run_study(parse_study(SMALL), model=nano, store=folder, say=said.append, progress=False)
    assert said[0] == "making trials"
    assert "ranking heads by locos, dla on 4 trials (needles.calibration)" in said
    assert any(text.startswith("measured for a row: needles ") for text in said)
    return result


@pytest.fixture
def plain_page(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page without figures: for tests of what is computed."""

    def write(path: Path, *given: Any) -> Path:
        path.write_text("a page")
        return path

    monkeypatch.setattr(study_run, "write_study_page", write)
    monkeypatch.setattr(study_run, "measure", lambda *given: measure(*given, n_boot=50))


@pytest.fixture(scope="module")
def quick(nano: mh.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The cells of the quick study, run without a stop."""
    folder = tmp_path_factory.mktemp("quick")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(study_run, "write_study_page", lambda *given: given[0])
        result = run_study(parse_study(QUICK), model=nano, store=folder, progress=False)
    assert result.complete and len(cells(result)) == 26
    return cells(result)


def cells(result: StudyResult) -> dict[str, bytes]:
    return content(CellStore(result.folder / "cells", create=False))


def page(result: StudyResult) -> str:
    assert result.page is not None
    text = result.page.read_text(encoding="utf-8")
    text = re.sub(r"<(script|style)\b.*?</\1>", " ", text, flags=re.DOTALL)
    return " ".join(re.sub(r"<[^>]*>", " ", text).split()).replace("&#x27;", "'")


# -- what is computed --------------------------------------------------------------------------------


def test_every_cell_of_the_plan_is_there_once(whole: StudyResult) -> None:
    assert whole.complete and whole.report is not None and whole.sweep_set is not None
    assert (whole.report.done, whole.report.skipped) == (len(whole.plan.works), 0) == (len(cells(whole)), 0)
    assert whole.sweep_set.labels == ["mean", "zero", "mean, kept", "zero, kept"]
    assert whole.sweep_set["zero"].rankings == ["locos", "dla", "mine", "locos bottom", "random"]
    assert whole.scores["mine"] == HeadSet.parse("L1H0 L0H0 L2H1")


@pytest.mark.parametrize("label", ["zero", "zero, kept", "mean"])
def test_a_cell_is_what_the_model_says_without_these_heads(whole: StudyResult, nano: mh.Model, label: str) -> None:
    assert whole.sweep_set is not None
    trials = mh.nano.retrieval(model=nano, n=8, context_length=120, calibration=0.5, seed=0)
    tested = trials.split("test")
    scores = mh.CircuitAnalysis(nano, progress=False).score("locos", trials.split("calibration"))
    heads = scores.ranking()[:2]
    if label.endswith("kept"):
        heads = HeadSet((i, j) for i in range(nano.spec.n_layers) for j in range(nano.spec.n_heads)) - heads
    what = mh.zero_ablation() if label != "mean" else mh.mean_ablation(reference=trials.split("calibration")[:3])
    with apply(nano, what.on(heads)):
        said = generate(nano, [t.tokens for t in tested], max_new_tokens=2)
    expected = [
        float(contains_answer(nano.decode(one.tokens), t.answer or "")) for one, t in zip(said, tested, strict=True)
    ]
    cell = whole.sweep_set[label].cell("locos", 2, "needles", "correct").set_index("trial_id")["value"]
    assert [cell[t.id] for t in tested] == expected


def test_a_second_run_computes_nothing_and_says_the_same(
    whole: StudyResult, nano: mh.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = cells(whole)
    said: list[str] = []
    monkeypatch.setattr(study_run, "write_study_page", lambda *given: given[0])
    with counted(nano, monkeypatch) as calls:
        again = run_study(parse_study(SMALL), model=nano, store=whole.folder, say=said.append, progress=False)
    assert calls == {"run": 0, "prefill": 0} and cells(again) == before
    assert again.report is not None and (again.report.done, again.report.skipped) == (0, len(before))
    assert again.estimate is None and not any("timing" in text for text in said)
    old, new = (dict(one.summary) for one in (whole, again))
    for summary in (old, new):
        del summary["seconds"], summary["cells"]
    assert old == new


def test_what_is_written_is_read_back(whole: StudyResult, nano: mh.Model) -> None:
    assert whole.sweep_set is not None
    loaded = SweepSet.load(whole.folder / "sweep")
    assert loaded.to_frame().equals(whole.sweep_set.to_frame())
    assert loaded.meta["study"] == whole.study.to_dict() and loaded.meta["complete"] is True
    again = load_study(whole.folder / "study.yaml")
    assert again.to_dict() == whole.study.to_dict() and again.store == str(whole.folder)
    summary = json.loads((whole.folder / "summary.json").read_text(encoding="utf-8"))
    assert summary["areas"] == whole.summary["areas"] and summary["complete"] is True
    assert summary["metrics"] == {"needles": "correct", "recall": "correct"}
    assert set(summary["verdict"]) == {"needles"} and summary["model"]["name"] == "nano"
    assert {row["ranking"] for row in summary["areas"]} == set(whole.sweep_set["zero"].rankings)
    assert {(row["a"], row["b"]) for row in summary["comparisons"]} >= {("locos", "dla"), ("mine", "random")}
    assert {row["control"] for row in summary["dissociation"]} == {"recall"}
    assert {row["intervention"] for row in summary["sides"]} == {"mean", "zero"}
    assert summary["agreement"]["needles"]["ranks"]


def test_rankings_share_a_capture_where_they_can(whole: StudyResult) -> None:
    study = parse_study(
        SMALL.replace("  dla: {method: dla}", "  dla: {method: dla}\n  raw: {method: locos, options: {unembed: normed}}"
        "\n  loose: {method: wu, options: {rouge_threshold: 0.9}}")
    )  # fmt: skip
    assert study_parts._captures(study) == [["locos", "dla"], ["raw"], ["loose"]]


# -- the page ----------------------------------------------------------------------------------------


def test_the_page_says_it_all(whole: StudyResult) -> None:
    text = page(whole)
    for words in (
        "Which ranking's heads does nano need for needles, more than it needs random heads, while recall survives?",
        "On needles (correct, heads ablated by mean) the model scores",
        "Ranking locos: 4 of 4 trials of needles.calibration kept; first L",
        "Intervention mean at z, from the first 3 trials of needles.calibration.",
        "Intervention zero at z.",
        "Controls: random heads (2 draws for each k, none of them one of mine's best 2).",
        "Controls: the lowest scores of locos.",
        "Interventions side by side", "Necessary, sufficient?", "What each ranking takes away",
        "Rankings against each other", "Do the interventions agree?", "needles by answer_logprob (mean log-probability",
        "Few trials are tested on needles (4) and recall (3)",
        f"mechheads sweep {whole.folder / 'study.yaml'} --store {whole.folder}",
    ):  # fmt: skip
        assert words in text, words
    assert "Not computed" not in text and "What failed" not in text and ".." not in text.replace("...", "")


def test_controls_are_judged_by_their_own_metric_and_choices_against_chance(nano: mh.Model, tmp_path: Path) -> None:
    study = parse_study(
        """\
        model: nano
        tasks:
          logic: {dataset: prontoqa, calibration: 0.5, measure: choice, options: {n: 16, depth: [1], distractors: [0]}}
          recall: {dataset: nano.recall, role: control, options: {n: 3}, max_new_tokens: 2, metrics: [correct]}
        rankings: {qk: {method: qk, by: auroc}}
        k: [0.1]
        interventions: prune
        controls: {random: {draws: 2}, bottom: [qk]}
        """
    )
    result = run_study(study, model=nano, store=tmp_path, progress=False)
    assert result.stats is not None and result.complete
    assert dict(result.stats.metrics) == {"logic": "choice_accuracy", "recall": "correct"}
    assert dict(result.stats.worst) == {"logic": 0.5, "recall": 0.0}
    text = page(result)
    assert "Does nano need the heads that qk ranks first for logic" in text
    assert "Ranking qk: auroc on 8 trials of logic.calibration" in text
    assert "400" in text  # what speaks against so few calibration questions
    assert result.sweep_set is not None and result.sweep_set["prune"].ks == [0, 2]


def test_the_verdict_takes_controls_by_their_own_metric_and_no_list_of_bad_heads_for_a_winner() -> None:
    study = parse_study(
        """\
        model: some
        tasks:
          logic: {dataset: prontoqa, calibration: 0.5, measure: choice}
          recall: {dataset: recall, role: control, metrics: [correct]}
        rankings: {qk: {method: qk}}
        k: [1]
        interventions: prune
        controls: {bottom: [qk]}
        """
    )
    n = 30
    value = {  # the worst heads break the target first, and recall stays
        ("none", 0): (1.0, 1.0), ("qk", 1): (0.5, 1.0), ("qk bottom", 1): (0.0, 1.0),
        ("random", 1): (1.0, 1.0),
    }  # fmt: skip
    rows = [
        {"ranking": r, "draw": d, "k": k, "task": task, "trial_id": f"t{i}", "metric": metric, "value": v, "heads": ""}
        for (r, k), values in value.items()
        for task, metric, v in zip(("logic", "recall"), ("choice_accuracy", "correct"), values, strict=True)
        for d in range(2 if r == "random" else 1)
        for i in range(n)
    ]
    sweeps = SweepSet({"prune": SweepResult(pd.DataFrame(rows))})
    choice = TrialSet([Trial(f"t{i}", [1], candidates=("a", "b"), label=0) for i in range(n)])
    answer = TrialSet([Trial(f"t{i}", [1], answer="a") for i in range(n)])
    tasks = {"logic": Task.of("logic", choice), "recall": Task.of("recall", answer, metrics=["correct"])}
    stats = measure(study, sweeps, tasks, n_boot=200)
    told = stats.verdict["logic"]
    assert "qk falls: down to 50% of that at k = 1" in told and "qk bottom" not in told
    assert "At 1 head recall loses 0.00" in told and "none were measured" not in told
    assert told.endswith("Shares of logic are of what it scores above chance, 0.5.")
    assert {row["control_metric"] for row in stats.dissociation.to_dict("records")} == {"correct"}
    assert stats.areas.set_index(["task", "ranking"]).loc[("logic", "qk"), "over"] == pytest.approx(0.5)  # to chance


# -- plan and estimate -------------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_page")
def test_a_plan_times_a_block_and_keeps_it(nano: mh.Model, quick: dict[str, bytes], tmp_path: Path) -> None:
    said: list[str] = []
    study = parse_study(QUICK)
    planned = run_study(study, model=nano, store=tmp_path, say=said.append, progress=False, plan_only=True)
    assert planned.sweep_set is None and planned.report is None and planned.page is None and not planned.complete
    assert planned.plan.describe(heads_per_block=3) in said
    found = planned.estimate
    assert found is not None and set(found.seconds_per_row) == {"needles", "recall"} and found.workers == 1
    assert str(found) in said
    # A block of three runs of either task is there already, of three and of two trials.
    each = found.seconds_per_row
    assert found.rows == 10 * 3 + 10 * 2
    assert found.seconds == pytest.approx(10 * 3 * each["needles"] + 10 * 2 * each["recall"])
    assert len(CellStore(tmp_path / "cells")) == 6 and not (tmp_path / "study.html").exists()
    rest = run_study(study, model=nano, store=tmp_path, progress=False)
    assert rest.report is not None and (rest.report.done, rest.report.skipped) == (20, 6)
    assert cells(rest) == quick


@pytest.mark.usefixtures("plain_page")
def test_blocks_that_others_work_on_are_not_timed(nano: mh.Model, tmp_path: Path) -> None:
    study = parse_study(QUICK)
    run_study(study, model=nano, store=tmp_path, progress=False, plan_only=True)
    store = CellStore(tmp_path / "cells")
    blocks = json.loads((tmp_path / "plan.json").read_text())["blocks"]
    claims = [store.claim(block["name"]) for block in blocks]
    try:
        again = run_study(study, model=nano, store=tmp_path, progress=False, plan_only=True)
        assert again.estimate is None and len(store) == 6
    finally:
        for claim in claims:
            assert claim is not None
            claim.release()


def test_estimates_and_durations_in_words() -> None:
    text = str(Estimate({"a": 0.0123, "b": 2.0}, 7500.0, 1000, 3))
    assert text == (
        "measured for a row: a 12.3 ms, b 2e+03 ms; the 1,000 rows left take about 2.1 h, shared by 3 workers"
    )
    assert [duration(s) for s in (0.4, 99, 100, 5999, 7200)] == ["0 s", "99 s", "2 min", "100 min", "2.0 h"]


def test_engine_and_limits_of_a_study() -> None:
    def study(more: str) -> Study:
        return parse_study(SMALL + more)

    assert engine_of(study("engine: {processes: 3, threads: 2}\n")) == mh.engines.LocalEngine(3, 2)
    ray = engine_of(study("engine: {kind: ray, workers: 4, threads: 2, num_gpus: 0.5, address: auto, retries: 1}\n"))
    assert ray == mh.engines.RayEngine(4, "auto", num_cpus=2, num_gpus=0.5, retries=1)
    assert limits_of(study("batch: {rows: 5, memory_gb: 0.5}\n")) == cell_runs.RunLimits(5, 500_000_000)
    assert limits_of(study("batch: {rows: 5}\n")) == cell_runs.RunLimits(5)


# -- stopped, and gone on ----------------------------------------------------------------------------


@pytest.mark.usefixtures("plain_page")
def test_an_interrupted_run_keeps_what_it_has_and_goes_on(
    nano: mh.Model, quick: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, calls = CellWorker.run, []

    def run(self: CellWorker, block: Any, keep: Any) -> None:
        calls.append(block.name)
        if len(calls) == stop:
            os.kill(os.getpid(), signal.SIGINT)
        real(self, block, keep)

    study, stop = parse_study(QUICK), 4  # two blocks are timed
    with monkeypatch.context() as patch:
        patch.setattr(CellWorker, "run", run)
        stopped = run_study(study, model=nano, store=tmp_path, progress=False)
    assert stopped.report is not None and stopped.report.interrupted and len(calls) == 4
    assert stopped.report.done == len(CellStore(tmp_path / "cells")) == 12 and stopped.report.left == 14
    assert stopped.stats is None and stopped.page is None and not (tmp_path / "sweep").exists()
    status = study_status(tmp_path)
    assert (len(status.done), status.left, status.finished) == (12, 14, False)
    assert cells(run_study(study, model=nano, store=tmp_path, progress=False)) == quick
    assert study_status(tmp_path).finished

    calls.clear()
    stop = 1
    with monkeypatch.context() as patch:
        patch.setattr(CellWorker, "run", run)
        with pytest.raises(KeyboardInterrupt):  # while blocks are timed
            run_study(study, model=nano, store=tmp_path / "other", progress=False)
    assert len(CellStore(tmp_path / "other" / "cells")) == 3


def test_a_cell_that_fails_is_left_out_named_and_tried_again(
    nano: mh.Model, quick: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = CellWorker.results
    poison = ("needles", HeadSet.parse("L1H0"))

    def results(self: CellWorker, name: str, works: Any) -> Any:
        if poison in [(work.task, work.heads) for work in works]:
            raise RuntimeError("a poisoned cell")
        return real(self, name, works)

    study = parse_study(QUICK)
    with monkeypatch.context() as patch:
        patch.setattr(CellWorker, "results", results)
        result = run_study(study, model=nano, store=tmp_path, progress=False)
    assert result.report is not None and len(result.report.failed) == 1 and not result.complete
    key, error = result.report.failed[0]
    assert key.heads == ("L1H0",) and error == "RuntimeError: a poisoned cell"
    assert set(quick) - set(content(CellStore(tmp_path / "cells"))) == {f"{key.digest}.parquet"}
    assert result.summary["complete"] is False and result.summary["cells"]["failed"][0]["error"] == error
    text = page(result)
    assert "1 cell of the plan is not there; what is said rests on the others." in text
    assert "What failed" in text and "RuntimeError: a poisoned cell" in text
    status = study_status(tmp_path)
    assert [status.named(f.key) for f in status.failures] == ["needles, resample of L1H0"] and not status.finished
    assert status.by_task().set_index(["task", "intervention"]).loc[("needles", "resample"), "failed"] == 1

    with monkeypatch.context() as patch:
        patch.setattr(study_run, "write_study_page", lambda *given: given[0])
        healed = run_study(study, model=nano, store=tmp_path, progress=False)
    assert healed.report is not None and healed.report.done == 1 and healed.complete
    store, expected = CellStore(tmp_path / "cells"), tmp_path / "expected"
    assert set(cells(healed)) == set(quick)
    for name, raw in quick.items():
        CellStore(expected).path.joinpath(name).write_bytes(raw)
    for cell in list(store.keys()):  # the others of its block ran alone, so they are equal to rounding
        got, want = store.get(cell), CellStore(expected).get(cell)
        assert got is not None and want is not None and got.said == want.said
        for metric, values in got.values.items():
            np.testing.assert_allclose(values, want.values[metric], atol=2e-5)


def test_where_nothing_can_be_computed_the_first_error_is_said(
    nano: mh.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def results(self: CellWorker, name: str, works: Any) -> Any:
        raise RuntimeError("no luck")

    monkeypatch.setattr(CellWorker, "results", results)
    with pytest.raises(
        MechheadsError, match=r"not one of \d+ cells could be computed; the first: RuntimeError: no luck"
    ):
        run_study(parse_study(QUICK), model=nano, store=tmp_path, progress=False)


def test_interrupted_scoring_is_no_ranking(nano: mh.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = mh.CircuitAnalysis.score

    def score(self: Any, methods: Any, *args: Any, **options: Any) -> Any:
        found = real(self, methods, *args, **options)
        return {name: replace(one, meta={**one.meta, "complete": False}) for name, one in found.items()}

    monkeypatch.setattr(mh.CircuitAnalysis, "score", score)
    with pytest.raises(KeyboardInterrupt):
        run_study(parse_study(SMALL), model=nano, store=tmp_path, progress=False)
    assert not (tmp_path / "plan.json").exists()
    with pytest.raises(ResultFileError, match=r"holds no plan\.json: its heads are still being ranked, or that was"):
        study_status(tmp_path)


# -- what is refused ---------------------------------------------------------------------------------


def test_folders_that_cannot_be_written_are_refused_before_anything_is_run(
    nano: mh.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputNotWritable, match=r"cannot write 'cells\.json' into the folder .*file/cells"):
        run_study(parse_study(SMALL), model=nano, store=tmp_path / "file")
    CellStore(tmp_path / "cells")
    monkeypatch.setattr(study_run, "prepare_study", lambda *args: pytest.fail("it was begun"))
    monkeypatch.setattr(os, "replace", _refuse)
    with pytest.raises(OutputNotWritable, match=r"the store .* cannot be written: Read-only file system"):
        run_study(parse_study(SMALL), model=nano, store=tmp_path)


def _refuse(*args: object, **options: object) -> None:
    raise OSError(30, os.strerror(30))


def test_a_hooked_model_is_refused(nano: mh.Model, tmp_path: Path) -> None:
    with (
        apply(nano, mh.zero_ablation().on("L0H0")),
        pytest.raises(InvalidInput, match="there are hooks on the model, which no store remembers; take them off"),
    ):
        try:
            run_study(parse_study(SMALL), model=nano, store=tmp_path)
        finally:
            nano.logits([1, 2, 3])  # so that the hooks have fired


def test_heads_that_the_model_lacks_are_refused(nano: mh.Model, tmp_path: Path) -> None:
    text = SMALL.replace("L1H0 L0H0 L2H1", "L1H0 L99H0")
    with pytest.raises(InvalidInput, match="L99H0"):
        run_study(parse_study(text), model=nano, store=tmp_path)


def test_rankings_without_a_trial_are_refused(nano: mh.Model, tmp_path: Path) -> None:
    text = SMALL.replace("locos: {method: locos}", "locos: {method: locos, options: {rouge_threshold: 1.0}}")
    message = r"the ranking 'locos' \(locos\) has no trial to rest on: of 4 in needles\.calibration, none is kept"
    with pytest.raises(InvalidInput, match=message):
        run_study(parse_study(text), model=nano, store=tmp_path)


# -- interventions -----------------------------------------------------------------------------------

BIAS = """\
model: some
tasks: {a: {file: A}, b: {file: A, role: control}}
rankings: {mine: {heads: L0H0}}
k: 1
interventions: {kind: bias, keys: KEYS, strength: -2.0, positions: answer}
"""


def prompt(name: str, length: int, at: tuple[int, int] | None) -> Trial:
    spans = {} if at is None else {"needle": at}
    return Trial(name, list(range(length)), spans=spans, answer="x", split="test")


def biased(tmp_path: Path, keys: str, *trials: Trial) -> Any:
    TrialSet(trials).save(tmp_path / "A")
    study = parse_study(BIAS.replace("KEYS", keys), folder=tmp_path)
    made = {"a": TrialSet(trials)}
    return intervention_of(study.interventions[0], made, made)


def test_a_bias_takes_positions_or_a_span_that_does_not_move(tmp_path: Path) -> None:
    made = biased(tmp_path, "[0, -1]", prompt("p", 9, None))
    assert (made.kind, made.keys, made.strength, made.positions) == ("bias", (0, -1), -2.0, "answer")
    still = biased(tmp_path, "needle", prompt("p", 9, (2, 5)), prompt("q", 12, (2, 5)))
    assert still.keys == (2, 3, 4)
    at_the_end = biased(tmp_path, "needle", prompt("p", 9, (6, 8)), prompt("q", 12, (9, 11)))
    assert at_the_end.keys == (-3, -2)


def test_a_span_that_moves_or_is_missing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidInput,
        match=r"bias biases the keys of the span 'needle', which stands at positions 2 to 4 in trial 'p' of task 'a' "
        r"and at positions 3 to 5 in trial 'q' of task 'a'; a study biases the same positions in every prompt",
    ):
        biased(tmp_path, "needle", prompt("p", 9, (2, 5)), prompt("q", 9, (3, 6)))
    with pytest.raises(InvalidInput, match=r"but trial 'q' of task 'a' has the spans \[\]; bias positions, or leave"):
        biased(tmp_path, "needle", prompt("p", 9, (2, 5)), prompt("q", 9, None))


def test_interventions_of_a_study(nano: mh.Model) -> None:
    more = """\
  - {kind: zero, site: pattern, positions: [-1]}
  - prune
  - {kind: mean_positional, site: q, reference: needles.calibration, n_reference: 9}
"""
    text = SMALL.replace("  - zero\n", more)
    study = parse_study(text)
    made = {name: study_parts.make_trials(study, name, nano) for name in study.tasks}
    notes: list[str] = []
    got = {part.label: intervention_of(part, made, made, notes=notes) for part in study.interventions}
    assert {label: (one.kind, one.site, one.positions) for label, one in got.items()} == {
        "mean": ("mean", "z", "all"), "zero at pattern": ("zero", "pattern", (-1,)),
        "prune": ("prune", "weights", "all"),
        "mean_positional at q": ("mean_positional", "q", "all"), 
    }  # fmt: skip
    assert [len(one.reference or ()) for one in got.values()] == [3, 0, 0, 4]
    assert notes == [
        "mean_positional at q: needles.calibration has 4 trials, of 9 asked for; all are taken",
    ]  # fmt: skip


def test_recall_is_judged_over_other_names(nano: mh.Model) -> None:
    study = parse_study(SMALL.replace("nano.recall", "recall"))
    trials = study_parts._trials(study, "recall", nano)
    assert any(trial.meta.get("aliases") for trial in trials) or all("aliases" in t.meta for t in trials)
    assert trials.options["aliases"]


# -- how far it is -----------------------------------------------------------------------------------


@pytest.fixture
def planned(tmp_path: Path) -> Iterator[tuple[Path, CellStore, list[PlannedBlock]]]:
    """A plan of four cells in two blocks, of which nothing is done."""
    from engine_toys import key

    runs = [PlannedRun(key(n), "a" if n < 2 else "b", "zero") for n in range(4)]
    blocks = [PlannedBlock("one", tuple(runs[:2])), PlannedBlock("two", tuple(runs[2:]))]
    write_plan(tmp_path, "toys", "toy", blocks)
    yield tmp_path, CellStore(tmp_path / "cells"), blocks


def test_status_counts_by_task_what_is_done_left_and_in_hand(planned: Any) -> None:
    from engine_toys import key, result

    folder, store, _ = planned
    assert study_status(folder).left == 4
    store.put(key(0), result(key(0)))
    claim = store.claim("one")
    assert claim is not None
    with claim:
        status = study_status(folder)
        assert status.working == {key(1)}
        assert status.by_task().to_numpy().tolist() == [["a", "zero", 2, 1, 0, 1, 1], ["b", "zero", 2, 0, 0, 2, 0]]
    status = study_status(folder)
    assert status.working == frozenset() and status.left == 3 and not status.finished
    assert status.to_dict()["by_task"][0]["done"] == 1 and json.dumps(status.to_dict())


def test_a_damaged_cell_is_not_done(planned: Any) -> None:
    from engine_toys import key, result

    folder, store, _ = planned
    store.put(key(0), result(key(0))).write_bytes(b"damaged")
    with pytest.warns(UserWarning, match="1 stored cells are damaged"):
        assert study_status(folder).left == 4


def test_a_plan_that_cannot_be_read_is_refused(planned: Any) -> None:
    folder, _, _ = planned
    (folder / "plan.json").write_text('{"kind": "study plan", "format": 99, "blocks": []}')
    with pytest.raises(ResultFileError, match=r"plan\.json cannot be read \(ValueError.*format 99.*run 'mechheads"):
        study_status(folder)
    (folder / "plan.json").unlink()
    with pytest.raises(ResultFileError, match=r"holds no plan\.json: no sweep was begun there\. Run 'mechheads sweep'"):
        study_status(folder)


def test_values_are_finite_shares(whole: StudyResult) -> None:
    assert whole.sweep_set is not None
    frame = whole.sweep_set.to_frame()
    assert np.isfinite(frame["value"]).all() and set(frame.loc[frame["metric"] == "correct", "value"]) <= {0.0, 1.0}
