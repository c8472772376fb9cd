"""The study of logic heads: its numbers against the results they come from, what it names and what it does not."""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from helpers import counted
from test_pruning import question
from test_readme import ROOT, script
from test_report import Outline, render, without_bundle

import mechheads as mh
from mechheads.candidate_scores import CandidateScores
from mechheads.errors import InvalidInput, OutputNotWritable
from mechheads.qk_study import QKOptions, QKResult, chosen_heads, run_qk
from mechheads.qk_summary import verdict

FILES = {"qk.html", "qk.json", "worlds.heads.csv", "worlds.qk.parquet"}
LIGHT: dict[str, Any] = {"k": 3, "draws": 1, "prune": (0.1,), "premise_questions": 4, "rounds": 2}


@pytest.fixture(scope="module")
def nano() -> mh.Model:
    return mh.load("nano-logic")


@pytest.fixture(scope="module")
def worlds(nano: mh.Model) -> mh.TrialSet:
    return mh.datasets.prontoqa(nano, n=72, depth=(1, 2), distractors=0, seed=0)


def n_heads(model: mh.Model) -> int:
    return model.spec.n_layers * model.spec.n_heads


class Planted(mh.CircuitAnalysis):
    """Scores of noise, but for one head that knows, one that knows and says the opposite, and one that follows wording.

    L1H2 and L2H0 tell the label wherever there are premises; L3H1 tells it from the statement alone as well.
    """

    heads = True

    def score(self, methods: Any, trials: Any, **options: Any) -> Any:
        scores = super().score(methods, trials, **options)
        values = np.random.default_rng(3).normal(size=scores.values.shape)
        if self.heads:
            right = np.eye(values.shape[1])[scores.labels]
            bare = np.array([w == "statement_only" for w in scores.column("wording")])
            values[~bare, :, 1, 2] = right[~bare]
            values[~bare, :, 2, 0] = -right[~bare]
            values[:, :, 3, 1] = right
        return dataclasses.replace(scores, values=values)


class Noise(Planted):
    """Scores of noise alone: no head knows anything."""

    heads = False


@pytest.fixture(scope="module")
def planted(nano: mh.Model, worlds: mh.TrialSet, tmp_path_factory: pytest.TempPathFactory) -> tuple[QKResult, Path]:
    folder = tmp_path_factory.mktemp("planted")
    said: list[str] = []
    found = run_qk(
        Planted(nano, progress=False), {"worlds": worlds}, folder, QKOptions(**LIGHT), commands=["mechheads qk"],
        say=said.append,
    )  # fmt: skip
    assert said == [
        "worlds: scoring 72 questions, one prefill each",
        "asking the label-flipped twins, and the statements without any premise",
        "pruning the best heads against random ones",
        "taking premises away from 4 questions",
    ]
    return found, folder


# -- what is there to find is found ----------------------------------------------------------------------------


def test_planted_heads_are_named_and_the_one_of_wording_is_not(planted: tuple[QKResult, Path], nano: mh.Model) -> None:
    found, _ = planted
    one = found.sets["worlds"]
    assert set(one.heads.labels) == {"L1H2", "L2H0", "L3H1"} and one.inverse.labels == ["L2H0"]
    assert one.debias is not None and one.debias.flagged.labels == ["L3H1"]
    numbers = found.summary["sets"]["worlds"]
    assert set(numbers["passing"]) == {"L1H2", "L2H0"} and numbers["inverse"] == ["L2H0"]
    told = numbers["judgement"]["verdict"]
    assert f"2 of {n_heads(nano)} heads are right more often than chance on 36 held-out trials" in told
    assert "L1H2, right in 1.00 [0.90, 1.00]" in told
    assert "1 head is wrong more often than chance (inverse): " in told and "L2H0, right in 0.00 [0.00, 0.10]" in told
    rows = pd.DataFrame(numbers["evaluation"]["rows"]).query("by == 'overall'").set_index("scorer")
    assert rows.loc[["L1H2", "L2H0", "L3H1"], "accuracy"].tolist() == [1.0, 1.0, 1.0]
    assert rows.loc["L2H0", "kind"] == "inverse head"


def test_every_file_is_written_and_says_the_same(planted: tuple[QKResult, Path], nano: mh.Model) -> None:
    found, folder = planted
    assert {p.name for p in folder.iterdir()} == FILES
    assert json.loads((folder / "qk.json").read_text(encoding="utf-8")) == found.summary
    one = found.sets["worlds"]
    again = CandidateScores.load(folder / "worlds.qk.parquet")
    np.testing.assert_array_equal(again.values, one.scores.values)
    table = pd.read_csv(folder / "worlds.heads.csv")
    assert len(table) == n_heads(nano) and table.set_index("label").loc["L1H2", "accuracy"] == 1.0
    assert table.loc[table["direction"] == "inverse", "label"].tolist() == ["L2H0"]


def test_numbers_are_those_of_the_results(planted: tuple[QKResult, Path], nano: mh.Model) -> None:
    found, _ = planted
    one, numbers = found.sets["worlds"], found.summary["sets"]["worlds"]
    test = one.scores.split("test")
    own = float((test.baseline.argmax(1) == test.labels).mean())
    assert numbers["judgement"]["baseline"]["estimate"] == pytest.approx(own)
    assert numbers["n_questions"] == 72 and numbers["labels"] == {"true": 36, "false": 36}
    size = round(0.1 * n_heads(nano))
    whole = next(r for r in numbers["pruning"] if r["k"] == 0)
    assert whole["mean"] == pytest.approx(own) and whole["n_trials"] == 36
    assert {(r["ranking"], r["k"]) for r in numbers["pruning"]} >= {("best", size), ("random", size)}
    pruned = one.pruning
    assert pruned is not None
    heads = pruned.frame.query("ranking == 'best' and k == @size")["heads"].iloc[0].split()
    with pytest.warns(UserWarning, match="36 calibration trials"):
        assert heads == one.scores.select(size).labels
    taken = one.premises
    assert taken is not None and numbers["premises"]["n_questions"] == len(taken.questions) == 4
    assert numbers["premises"]["cost_ratio"] == taken.cost_ratio > 1
    asked = {q["trial_id"] for q in taken.questions}
    assert asked <= {t.id for t in one.trials.split("test")}
    labels = [t.label for t in one.trials if t.id in asked]
    assert sorted(x for x in labels if x is not None) == [0, 0, 1, 1]
    assert found.summary["model"] == nano.describe() and found.summary["options"]["prune"] == [0.1]


def test_the_page_says_it_and_needs_nothing_else(planted: tuple[QKResult, Path]) -> None:
    found, folder = planted
    page = (folder / "qk.html").read_text(encoding="utf-8")
    rest = without_bundle(page)
    outline = Outline(rest)
    assert outline.inside("h1") == ["Do heads of nano-logic know what follows?"]
    headings = [" ".join(h.split()) for h in outline.inside("h2")]
    for wanted in (
        "Verdict", "Data and score", "every head", "against the model's own output",
        "how many questions it takes to choose", "is it the wording?", "pruning them", "taking premises away",
        "Caveats",
    ):  # fmt: skip
        assert sum(wanted.lower() == h.lower() for h in headings) == 1, (wanted, headings)
    assert not any("src" in attributes for _, attributes in outline.tags)
    assert {a["href"] for a in outline.all("link")} == {"data:,"} and "http://" not in rest and "https://" not in rest
    assert all((a["href"] or "").startswith("#") for a in outline.all("a"))
    told = outline.inside("p")
    for text in verdict(found.sets, found.transfer, QKOptions(**LIGHT)):
        assert text in told
    cells = outline.inside("td")
    heads = [h for h in outline.inside("th") if re.match(r"L\d+H\d+", h)]
    assert set(heads) >= {"L1H2", "L2H0 (sign turned)", "L3H1"}
    assert cells.count("wording") >= 1 and "no" not in cells[: cells.index("wording")]
    assert "36 calibration questions choose heads, 36 others test them" in " ".join(outline.inside("li"))


@pytest.mark.slow
def test_the_page_renders_in_a_browser(planted: tuple[QKResult, Path], tmp_path: Path) -> None:
    dom, log = render(planted[1] / "qk.html", tmp_path / "profile")
    assert dom.count('class="cartesianlayer"') >= 7 and "CONSOLE" not in log, log


# -- what is not there is not named ----------------------------------------------------------------------------


def test_where_no_head_knows_none_is_named(nano: mh.Model, worlds: mh.TrialSet, tmp_path: Path) -> None:
    options = QKOptions(k=2, prune=(), premise_questions=0)
    found = run_qk(Noise(nano, progress=False), {"worlds": worlds}, tmp_path, options)
    (told,) = verdict(found.sets, None, options)
    assert told.startswith(f"No head passes correction: on 36 held-out trials none of {n_heads(nano)} heads")
    assert not re.search(r"L\d+H\d+", told)
    numbers = found.summary["sets"]["worlds"]
    assert numbers["passing"] == [] and len(numbers["heads"]) == 2
    assert numbers["pruning"] is None and numbers["premises"] is None and numbers["debias"]["flagged"] == []
    assert numbers["notes"] == ["No pruning check was asked for.", "No premises were taken away: none was asked for."]
    outline = Outline(without_bundle((tmp_path / "qk.html").read_text(encoding="utf-8")))
    items = outline.inside("li")
    assert "On worlds no chosen head stands: read nothing into the best of them." in items
    assert "worlds: No pruning check was asked for." in items
    assert not {"Pruning them", "Taking premises away"} & set(outline.inside("h2"))
    assert "No head is right more often than chance, so the curve shows luck alone." in outline.inside("p")


def test_a_random_model_and_trials_of_ones_own(llama: mh.Model, tmp_path: Path) -> None:
    trials = [
        question(i, 9 + i % 7, split="calibration" if i % 4 < 2 else "test", meta={"group": f"g{i}"}) for i in range(40)
    ]
    options = QKOptions(k=2, draws=1, prune=(0.1,))
    found = run_qk(mh.CircuitAnalysis(llama, progress=False), {"mine": mh.TrialSet(trials)}, tmp_path, options)
    one = found.sets["mine"]
    assert one.judgement.verdict().startswith("No head passes correction") and one.pruning is not None
    assert one.debias is None and one.premises is None and one.evaluation.by == ()
    assert [note.split(":")[0] for note in one.notes] == ["No label-flipped twins", "No premises were taken away"]
    assert (tmp_path / "mine.heads.csv").is_file() and (tmp_path / "qk.html").is_file()


def test_where_one_answer_is_never_right_there_is_no_learning_curve(llama: mh.Model, tmp_path: Path) -> None:
    trials = [question(i, 9 + i % 5, n=3, split="calibration" if i % 4 < 2 else "test") for i in range(24)]
    trials = [dataclasses.replace(t, label=i % 2) for i, t in enumerate(trials)]
    options = QKOptions(k=1, prune=(), debias=False)
    found = run_qk(mh.CircuitAnalysis(llama, progress=False), {"mine": mh.TrialSet(trials)}, tmp_path, options)
    assert found.sets["mine"].curve is None and found.summary["sets"]["mine"]["learning_curve"] is None
    assert found.sets["mine"].notes[0].startswith("No learning curve: candidate 2 is right in no calibration trial")
    assert "how many questions it takes" not in (tmp_path / "qk.html").read_text(encoding="utf-8").lower()


# -- which heads are chosen --------------------------------------------------------------------------------------


def judged(accuracies: np.ndarray, n: int = 400) -> Any:
    """A judgement of heads right in given shares of n calibration and n test trials."""
    rng = np.random.default_rng(0)
    labels = np.arange(2 * n) % 2
    right = rng.random((2 * n, *accuracies.shape)) < accuracies
    margin = np.where(right, 1.0, -1.0) * (2 * labels - 1)[:, None, None]
    scores = CandidateScores(
        values=np.stack([np.zeros_like(margin), margin], axis=1),
        baseline=np.zeros((2 * n, 2)),
        labels=labels,
        candidates=[(" true", " false")] * (2 * n),
        trial_ids=[f"t{i}" for i in range(2 * n)],
        records=[{"split": "calibration" if i < n else "test"} for i in range(2 * n)],
    )
    return scores.judge()


def test_the_most_accurate_are_chosen_inverse_ones_with_their_sign_turned() -> None:
    found = judged(np.array([[0.5, 0.9, 0.52], [0.02, 0.7, 0.48], [0.2, 0.5, 0.5]]))
    heads, inverse = chosen_heads(found, QKOptions(k=4))
    assert heads.labels == ["L1H0", "L0H1", "L2H0", "L1H1"] and inverse.labels == ["L1H0", "L2H0"]
    heads, inverse = chosen_heads(found, QKOptions(k=2))
    assert heads.labels == ["L1H0", "L0H1"] and inverse.labels == ["L1H0"]


# -- several sets, and what is read from the store ---------------------------------------------------------------


def test_two_sets_and_a_second_run(
    nano: mh.Model, worlds: mh.TrialSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = mh.datasets.prontoqa(nano, n=24, depth=1, distractors=2, rules="disjunction_elimination", seed=1)
    data = {"worlds": worlds, "choices": other}
    options = QKOptions(k=2, prune=(), premise_questions=0)

    def go() -> tuple[QKResult, dict[str, int]]:
        ca = mh.CircuitAnalysis(nano, store=tmp_path / "store", progress=False)
        with counted(nano, monkeypatch) as calls:
            return run_qk(ca, data, tmp_path, options), calls

    first, calls = go()
    assert calls["run"] + calls["prefill"] > 0
    second, calls = go()
    assert calls == {"run": 0, "prefill": 0}
    same = [{k: v for k, v in r.summary.items() if k != "seconds"} for r in (first, second)]
    assert same[0] == same[1]
    moved = first.summary["transfer"]
    assert moved["names"] == ["worlds", "choices"] and moved["k"] == 2 and len(moved["cells"]) == 6
    page = (tmp_path / "qk.html").read_text(encoding="utf-8")
    assert "From one data set to another" in page and "Choices: every head" in page
    assert {p.name for p in tmp_path.iterdir()} == FILES | {"store", "choices.heads.csv", "choices.qk.parquet"}
    told = verdict(first.sets, first.transfer, options)
    assert told[0].startswith("worlds: ") and told[-1].startswith("Tested on worlds")


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"k": 0}, r"^k is 0; choose at least one head\.$"),
        ({"offset": "mode"}, r"^offset is 'mode'; it must be one of none, median\.$"),
        ({"premise_questions": -1}, r"^premise_questions is -1; it must be 0 or more\.$"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidInput, match=message):
        QKOptions(**options)


def test_what_is_refused_before_anything_is_run(
    nano: mh.Model, worlds: mh.TrialSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ca, n = mh.CircuitAnalysis(nano, progress=False), n_heads(nano)
    monkeypatch.setattr(ca, "score", lambda *a, **k: pytest.fail("it was run"))
    with pytest.raises(InvalidInput, match=r"^there is no data; name at least one set of logic trials\.$"):
        run_qk(ca, {}, tmp_path)
    for half in (worlds.split("test"), mh.datasets.prontoqa(nano, n=4, calibration=None)):
        with pytest.raises(InvalidInput, match=r"the trials of 'half' have the splits .*Give the loader calibration=0"):
            run_qk(ca, {"worlds": worlds, "half": half}, tmp_path)
    with pytest.raises(InvalidInput, match=r"^a data set is named 'mix', the name of all sets mixed; give it another"):
        run_qk(ca, {"worlds": worlds, "mix": worlds}, tmp_path)
    with pytest.raises(InvalidInput, match=rf"^k is 99, but nano-logic has {n} heads; choose at most {n}\.$"):
        run_qk(ca, {"worlds": worlds}, tmp_path, QKOptions(k=99))
    with pytest.raises(
        InvalidInput, match=rf"^prune asks for 98 heads, but nano-logic has {n}, .*; prune at most {n // 2}\.$"
    ):
        run_qk(ca, {"worlds": worlds}, tmp_path, QKOptions(prune=(98,)))
    with pytest.raises(InvalidInput, match=r"^k holds 1\.5; give numbers of heads from 1"):
        run_qk(ca, {"worlds": worlds}, tmp_path, QKOptions(prune=(1.5,)))
    (tmp_path / "taken").write_text("")
    with pytest.raises(OutputNotWritable, match="taken"):
        run_qk(ca, {"worlds": worlds}, tmp_path / "taken")
    assert [p.name for p in tmp_path.iterdir()] == ["taken"]


# -- the pages that tell of it -------------------------------------------------------------------------------------


def block(page: Path, start: str, end: str) -> str:
    return page.read_text(encoding="utf-8").split(start)[1].split(end)[0].strip()


def test_the_page_quotes_what_was_recorded() -> None:
    numbers = script("qk_numbers")
    reports = json.loads(numbers.SUMMARY.read_text(encoding="utf-8"))
    told = block(numbers.PAGE, numbers.START, numbers.END)
    assert told == numbers.markdown(reports) and len({r["model"]["name"] for r in reports}) == len(reports) > 0
    page = numbers.PAGE.read_text(encoding="utf-8")
    assert not re.search(r"\b0\.\d\d \[", page.replace(told, "")), "a number outside the measured block"
    assert block(numbers.NANO, numbers.NANO_START, numbers.NANO_END) == numbers.card_markdown(numbers.cards())


def test_the_numbers_are_those_of_the_report(
    planted: tuple[QKResult, Path], nano: mh.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, (found, folder) = script("qk_numbers"), planted
    for name, marks in (("PAGE", (numbers.START, numbers.END)), ("NANO", (numbers.NANO_START, numbers.NANO_END))):
        copy = tmp_path / f"{name}.md"
        copy.write_text("before\n{}\nold\n{}\nafter\n".format(*marks), encoding="utf-8")
        monkeypatch.setattr(numbers, name, copy)
    monkeypatch.setattr(numbers, "SUMMARY", tmp_path / "summary.json")
    numbers.main([str(folder)])
    told = block(numbers.PAGE, numbers.START, numbers.END)
    kept = json.loads(numbers.SUMMARY.read_text(encoding="utf-8"))
    assert told == numbers.markdown(kept) and (tmp_path / "PAGE.md").read_text().startswith("before\n")
    assert len(json.dumps(kept)) < len(json.dumps(found.summary)) / 2
    one = found.summary["sets"]["worlds"]
    rows = pd.DataFrame(one["evaluation"]["rows"])
    first = one["heads"][0]
    for by, value in (("overall", "all"), ("depth", 1), ("depth", 2)):
        cell = rows.loc[(rows["by"] == by) & (rows["value"] == value)].set_index("scorer")
        own, head = cell.loc["model"], cell.loc[first]
        shown = [
            "all" if by == "overall" else f"{by} {value}",
            str(own["n"]),
            f"{own['accuracy']:.2f} [{own['ci_low']:.2f}, {own['ci_high']:.2f}]",
            f"{head['accuracy']:.2f} [{head['ci_low']:.2f}, {head['ci_high']:.2f}]",
            f"{head['difference']:+.2f} [{head['difference_low']:+.2f}, {head['difference_high']:+.2f}]",
        ]
        assert "| " + " | ".join(shown) + " |" in told
    assert "distractors 0" not in told  # there is but one number of them
    assert (
        f"Right more often than chance, corrected for {n_heads(nano)} heads (p <= 0.05): 2; wrong more often: 1."
        in told
    )
    assert f"{one['premises']['cost_ratio']:.1f} times the tokens" in told
    gold = next(a for a in one["premises"]["arms"] if a["arm"] == "gold" and a["round"] == "all")
    assert f"| the proof's | {gold['n']} | {gold['flipped']:.2f} [" in told
    assert f"| {round(0.1 * n_heads(nano))} | " in told and "flagged: L3H1" in told
    with pytest.raises(SystemExit, match="give one folder a model"):
        numbers.main([str(folder), str(folder)])


def test_a_head_that_does_not_stand_is_not_named() -> None:
    numbers = script("qk_numbers")
    one = {"first": {"head": "L1H2", "turned": False}, "passing": ["L0H0"]}
    assert numbers._first_name(one) == "the head chosen first (it does not stand)"
    assert numbers._first_name({**one, "passing": ["L1H2"]}) == "L1H2"
    assert numbers._first_name({"first": {"head": "L1H2", "turned": True}, "passing": ["L1H2"]}) == "L1H2 (sign turned)"


@pytest.mark.parametrize("page", ["qk_score.md", "nano.md"])
def test_the_examples_run(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    for target in re.findall(r"`((?:docs|scripts|mechheads)/[^`]+)`", text):
        assert (ROOT / target).exists(), target
    given: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL):
        small = code.replace("n=800", "n=24").replace("n=60", "n=4").replace("[:40]", "[:2]")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # few calibration questions, which is the point
            exec(compile(small, page, "exec"), given)
    assert "ca" in given
