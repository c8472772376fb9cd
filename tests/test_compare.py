"""``compare``: its numbers against the results they come from, its words, its files, and what it refuses."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import tiny
from helpers import answered
from typer.testing import CliRunner

import mechheads as mh
from mechheads import compare as module
from mechheads.cli import app
from mechheads.compare import CompareOptions, CompareResult, run_compare, tied
from mechheads.compare_page import method_table, ranking_table
from mechheads.compare_summary import families, verdict

CHEAP = ("locos", "attention_spatial", "dla", "wu", "headkv", "previous_token", "ov_copying")
LENGTHS = (20, 13, 17, 29, 13, 8, 15, 22)


def task(model: mh.Model, name: str, *, seed: int = 1, right: bool = True) -> mh.TrialSet:
    """Trials of the tiny model in both splits; all answered rightly, or none."""
    trials = [
        dataclasses.replace(
            t,
            id=f"{name}-{i}",
            split="calibration" if i % 2 else "test",
            answer=t.answer if right else "w2 w2 w2 w2",
        )
        for i, t in enumerate(answered(model, LENGTHS, seed=seed))
    ]
    return mh.TrialSet(trials, name=name)


@pytest.fixture(scope="module")
def llama() -> mh.Model:
    return tiny.shared("llama")


@pytest.fixture(scope="module")
def patched(llama: mh.Model) -> Any:
    """The control is text of the shipped pools, which a tokenizer of numbered words cannot read."""
    control = mh.TrialSet([dataclasses.replace(t, split=None) for t in answered(llama, (9, 12, 10), seed=1)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "recall", lambda *args, **kwargs: control)
        yield patch


@pytest.fixture(scope="module")
def files(llama: mh.Model, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("trials")
    made = {"one": task(llama, "one"), "two": task(llama, "two"), "wrong": task(llama, "wrong", right=False)}
    return {name: str(trials.save(folder / f"{name}.jsonl")) for name, trials in made.items()}


def options(*tasks: str, **changes: Any) -> CompareOptions:
    given: dict[str, Any] = {"tasks": tasks, "methods": CHEAP, "k": 1, "draws": 2, "batch_size": 4}
    return CompareOptions(**{**given, **changes})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compare")


@pytest.fixture(scope="module")
def result(llama: mh.Model, patched: Any, files: dict[str, str], folder: Path) -> CompareResult:
    said: list[str] = []
    return run_compare(llama, folder, options(files["one"], files["two"]), say=said.append, progress=False)


def test_every_file_is_written_and_says_the_same(result: CompareResult, folder: Path) -> None:
    assert json.loads((folder / "compare.json").read_text()) == result.summary
    table = pd.read_csv(folder / "compare.csv")
    assert sorted(table["task"].unique()) == ["one", "two"]
    for row in table.to_dict("records"):
        numbers = result.summary["tasks"][row["task"]]["methods"][row["method"]]
        assert row["top"] == " ".join(numbers["top"]) and row["cost"] == pytest.approx(numbers["cost"])
    pairs = pd.read_csv(folder / "agreement.csv")
    assert {"spearman", "overlap"} == set(pairs["statistic"])
    page = (folder / "compare.html").read_text()
    assert "<svg" in page or "plotly" in page
    for name in CHEAP:
        assert (folder / f"one-{name}.parquet").is_file()
        assert name in page
    loaded = mh.HeadScores.load(folder / "two-locos.parquet")
    assert np.array_equal(loaded.values, result.tasks["two"].scores["locos"].values, equal_nan=True)


def test_numbers_are_those_of_the_sweep(result: CompareResult) -> None:
    one = result.tasks["one"]
    assert one.sweep is not None
    for name, numbers in result.summary["tasks"]["one"]["methods"].items():
        assert numbers["top"] == one.scores[name].top(1).labels
        rows = one.sweep.cell(name, 1, "one", "correct")
        assert numbers["ablated"]["mean"] == pytest.approx(rows["value"].mean(), abs=1e-4)
        base = one.sweep.cell("none", 0, "one", "correct").set_index("trial_id")["value"]
        paired = rows.set_index("trial_id")["value"]
        assert numbers["cost"] == pytest.approx((base - paired).mean(), abs=1e-4)
        random = one.sweep.cell("random", 1, "one", "correct").groupby("trial_id")["value"].mean()
        assert numbers["beyond_random"] == pytest.approx((random - paired).mean(), abs=1e-4)


def test_random_heads_are_nobodys_best(result: CompareResult) -> None:
    one = result.tasks["one"]
    assert one.sweep is not None
    tested = {h for name in one.ranked for h in one.scores[name].top(1).labels}
    frame = one.sweep.frame
    drawn = {h for heads in frame.loc[frame["ranking"] == "random", "heads"] for h in heads.split()}
    assert drawn and not drawn & tested


def test_words_hold_the_numbers(result: CompareResult) -> None:
    lines = verdict(result.summary)
    numbers = result.summary["tasks"]["one"]
    assert lines[0].startswith(f"On one the model answers {numbers['baseline']['mean']:.2f} [")
    assert any(f"{numbers['pairs'][0]['spearman']:.2f}" in line for line in lines)
    assert any("control" in line for line in lines)
    assert "Between the tasks, by locos on one against locos on two" in lines[-1]


def test_a_second_run_reads_the_store(
    llama: mh.Model, patched: Any, files: dict[str, str], folder: Path, result: CompareResult,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    from mechheads import runner

    monkeypatch.setattr(runner, "capture", lambda *a, **k: pytest.fail("captured again"))
    again = run_compare(llama, folder, options(files["one"], files["two"]), say=lambda text: None, progress=False)
    same = {k: v for k, v in again.summary.items() if k != "seconds"}
    assert same == {k: v for k, v in result.summary.items() if k != "seconds"}


def test_a_task_the_model_cannot_do_is_said_not_raised(
    llama: mh.Model, patched: Any, files: dict[str, str], tmp_path: Path
) -> None:
    gated = ("locos", "attention_spatial", "dla")
    found = run_compare(
        llama, tmp_path, options(files["wrong"], files["one"], methods=gated), say=lambda text: None, progress=False
    )
    lines = verdict(found.summary)
    assert "On wrong nothing can be said" in lines[0] and "ROUGE-1 recall is not above 0.5" in lines[0]
    assert found.tasks["wrong"].sweep is None and found.dissociation is None
    assert "locos" in found.summary["tasks"]["one"]["methods"]
    assert "nothing to rank" in found.page.read_text()


def test_gated_methods_without_trials_leave_the_others_ranked(
    llama: mh.Model, patched: Any, files: dict[str, str], tmp_path: Path
) -> None:
    found = run_compare(
        llama, tmp_path, options(files["wrong"], methods=("locos", "headkv", "ov_copying")), say=print, progress=False
    )
    numbers = found.summary["tasks"]["wrong"]
    assert set(numbers["methods"]) == {"headkv", "ov_copying"} and "locos" in numbers["unranked"]
    assert any(line.startswith("Not ranked: locos (no trial kept") for line in verdict(found.summary))


# -- parts ---------------------------------------------------------------------------------------


def scores(values: Any, method: str = "m") -> mh.HeadScores:
    array = np.asarray(values, dtype=float)[None]
    return mh.HeadScores(method=method, values=array, kept=np.array([True]), weights=np.ones(1), trial_ids=("t",))


@pytest.mark.parametrize(
    ("values", "k", "expected"),
    [
        ([[3.0, 2.0], [1.0, 0.0]], 2, 0),
        ([[3.0, 0.0], [0.0, 0.0]], 2, 1),
        ([[3.0, 1.0], [1.0, 0.0]], 3, 0),  # both that tie are in
        ([[0.0, 0.0], [0.0, 0.0]], 3, 3),
        ([[1.0, np.nan], [np.nan, np.nan]], 2, 0),
    ],
)
def test_ties_with_heads_outside_are_counted(values: Any, k: int, expected: int) -> None:
    assert tied(scores(values), k) == expected


def test_families_are_linked_through_others() -> None:
    rng = np.random.default_rng(0)
    a = rng.normal(size=(6, 5))
    b = a + 0.6 * rng.normal(size=a.shape)
    c = b + 0.6 * rng.normal(size=a.shape)
    alone = rng.normal(size=a.shape)
    maps = {n: dataclasses.replace(scores(v, n), trial_ids=(n,)) for n, v in zip("abcx", (a, b, c, alone), strict=True)}
    found = families(mh.agreement.agreement(maps, k=3, n_boot=20), alike=0.75)
    assert found == [["a", "b", "c"], ["x"]]
    direct = mh.agreement.agreement(maps, k=3, n_boot=20).matrix("spearman")
    assert direct.loc["a", "b"] >= 0.75 and direct.loc["b", "c"] >= 0.75


def test_the_table_is_ordered_by_cost(result: CompareResult) -> None:
    numbers = result.summary["tasks"]["two"]
    table = method_table(numbers, 1)
    costs = [numbers["methods"][name]["cost"] for name in table["detector"]]
    assert costs == sorted(costs, reverse=True) and len(table) == len(numbers["methods"])
    ranked = ranking_table(numbers, 1)
    assert list(ranked["detector"]) == list(table["detector"])
    for row in ranked.to_dict("records"):
        assert row["best 1 heads"].startswith(" ".join(numbers["methods"][row["detector"]]["top"]))


def test_the_corrected_interval_is_the_wider_one(result: CompareResult) -> None:
    wider = 0
    for numbers in result.summary["tasks"]["one"]["methods"].values():
        (low, high), (lower, higher) = numbers["beyond_random_ci"], numbers["beyond_random_ci_corrected"]
        assert lower <= low + 1e-9 and high <= higher + 1e-9
        wider += lower < low or higher > high
    assert wider


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tasks": ()}, "at least one task"),
        ({"methods": ("locos",)}, "at least two"),
        ({"methods": ("locos", "locos")}, "'locos' is named twice"),
        ({"tasks": ("a/facts.jsonl", "b/facts.jsonl")}, "'facts' is named twice"),
        ({"tasks": ("recall",)}, "'recall' cannot be compared on"),
        ({"tasks": ("arithmetic",)}, "'arithmetic' cannot be compared on"),
        ({"tasks": ("mine/recall.jsonl",)}, "cannot be compared on"),
    ],
)
def test_options_are_checked(given: dict[str, Any], message: str) -> None:
    with pytest.raises(mh.InvalidInput, match=message):
        CompareOptions(**given)


def test_bad_names_are_refused_before_anything_runs(llama: mh.Model, files: dict[str, str], tmp_path: Path) -> None:
    def fail(text: str) -> None:
        assert "detectors on" not in text

    with pytest.raises(mh.UnknownName, match=r"unknown method 'lokos'.*'locos'"):
        run_compare(llama, tmp_path, options(files["one"], methods=("lokos", "dla")), say=fail)
    with pytest.raises(mh.InvalidInput, match="k is 9; with 7 detectors and 12 heads it must be from 1 to 1,"):
        run_compare(llama, tmp_path, options(files["one"], k=9), say=fail)
    unsplit = mh.TrialSet([dataclasses.replace(t, split=None) for t in mh.TrialSet.load(files["one"])], name="u")
    with pytest.raises(mh.InvalidInput, match="'calibration'"):
        run_compare(llama, tmp_path, options(str(unsplit.save(tmp_path / "u.jsonl"))), say=fail)


def test_the_command_prints_what_the_page_says(
    llama: mh.Model, patched: Any, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    patched.setattr(module, "CircuitAnalysis", lambda model, **kwargs: mh.CircuitAnalysis(llama, **kwargs))
    chosen = [x for name in ("locos", "headkv") for x in ("--method", name)]
    arguments = ["compare", "-t", files["one"], "--k", "2", "--draws", "1", "-o", str(tmp_path), "--json", *chosen]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    summary = json.loads(done.stdout)
    assert set(summary["tasks"]["one"]["methods"]) == {"locos", "headkv"}
    assert "On one the model answers" in done.stderr and "compare.html" in done.stderr


def test_the_command_refuses_in_one_line(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    done = CliRunner().invoke(app, ["compare", "--method", "locos", "-o", str(tmp_path)])
    assert done.exit_code == 2 and "at least two" in done.stderr


def test_a_method_whose_span_is_missing_is_named_not_raised(
    llama: mh.Model, patched: Any, files: dict[str, str], tmp_path: Path
) -> None:
    found = run_compare(llama, tmp_path, options(files["one"], methods=("locos", "dla", "qrhead")), say=print)
    assert "'question'" in found.tasks["one"].unranked["qrhead"] and "'one-" in found.tasks["one"].unranked["qrhead"]
    assert set(found.tasks["one"].ranked) == {"locos", "dla"}


def test_a_trial_without_an_answer_is_refused_before_scoring(
    llama: mh.Model, files: dict[str, str], tmp_path: Path
) -> None:
    trials = list(mh.TrialSet.load(files["one"]))
    trials[2] = dataclasses.replace(trials[2], answer=None)
    path = mh.TrialSet(trials, name="gap").save(tmp_path / "gap.jsonl")
    with pytest.raises(mh.InvalidInput, match=r"'one-2' .* has no gold answer"):
        run_compare(llama, tmp_path, options(str(path)), say=lambda text: None)


def test_heads_chosen_without_answers_are_said_to_be(
    llama: mh.Model, patched: Any, files: dict[str, str], tmp_path: Path
) -> None:
    found = run_compare(llama, tmp_path, options(files["one"], methods=("headkv", "previous_token")), say=print)
    assert "heads are chosen on 4 calibration trials, whether answered or not" in verdict(found.summary)[0]


def test_one_random_draw_decides_nothing(llama: mh.Model, patched: Any, files: dict[str, str], tmp_path: Path) -> None:
    found = run_compare(llama, tmp_path, options(files["one"], methods=("locos", "dla"), draws=1), say=print)
    assert found.summary["tasks"]["one"]["methods"]["locos"]["beyond_random_ci"] == [None, None]
    assert any("With one random draw it cannot be said" in line for line in verdict(found.summary))


def test_an_undefined_correlation_is_left_out_of_the_words(result: CompareResult) -> None:
    from mechheads.compare_summary import _agreement_words

    numbers = {"families": [["a"], ["b"], ["c"]], "pairs": []}
    assert _agreement_words(numbers) == "On their own are a, b and c."


def test_a_task_that_fits_no_method_is_said_not_raised(
    llama: mh.Model, patched: Any, files: dict[str, str], tmp_path: Path
) -> None:
    bare = [dataclasses.replace(t, spans={}) for t in mh.TrialSet.load(files["one"])]
    path = mh.TrialSet(bare, name="bare").save(tmp_path / "bare.jsonl")
    given = options(str(path), files["two"], methods=("locos", "headkv"))
    found = run_compare(llama, tmp_path, given, say=lambda text: None, progress=False)
    assert found.tasks["bare"].scores == {} and "On bare nothing can be said" in verdict(found.summary)[0]
    assert found.summary["model"] == llama.describe() and "two locos" in found.page.read_text()
