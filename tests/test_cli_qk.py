"""``mechheads qk``: every command and option, what is printed, written and refused."""

from __future__ import annotations

import itertools
import json
import re
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from helpers import counted
from typer.testing import CliRunner

import mechheads as mh
from mechheads import cli_qk as module
from mechheads.candidate_scores import CandidateScores
from mechheads.cli import app
from mechheads.verdicts import evaluate, offsets

# A sample of our own in FOLIO's form: two stories, each with statements that are true, false and unknown.
STORIES = [
    (["Every baker owns an oven.", "Mira is a baker.", "Jon does not own an oven."],
     [("Mira owns an oven.", "True"), ("Jon is a baker.", "False"), ("Jon is tall.", "Uncertain")]),
    (["All ferries that leave at noon are full.", "The Elsa leaves at noon.", "The Ida is not full."],
     [("The Elsa is full.", "True"), ("The Ida leaves at noon.", "False"), ("The Ida is red.", "Unknown")]),
]  # fmt: skip


@pytest.fixture(scope="module")
def nano() -> mh.Model:
    return mh.load("nano-logic")


@pytest.fixture
def run(nano: mh.Model, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The command line, with the model loaded once for all tests."""

    def load_analysis(name: str, dtype: str | None) -> mh.CircuitAnalysis:
        assert (name, dtype) == ("nano-logic", None)
        return mh.CircuitAnalysis(nano, progress=False)

    monkeypatch.setattr(module, "load_analysis", load_analysis)
    monkeypatch.setenv("COLUMNS", "250")
    return lambda *args: CliRunner().invoke(app, ["qk", *(str(a) for a in args)])


def said(result: Any) -> str:
    """What went to standard error, on one line and without colours."""
    return " ".join(re.sub(r"\x1b\[[0-9;]*m", "", result.stderr).split())


@pytest.fixture(scope="module")
def scored(nano: mh.Model, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Scores of 64 questions of depths 1 and 2."""
    trials = mh.datasets.prontoqa(nano, n=64, depth=(1, 2), distractors=0, seed=5)
    scores = mh.CircuitAnalysis(nano, progress=False).score("qk", trials)
    return scores.save(tmp_path_factory.mktemp("scores") / "scores")


@pytest.fixture(scope="module")
def folio(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Twelve stories: the two above with the people's and ships' names changed."""
    rows = []
    for k, (premises, statements) in itertools.product(range(6), STORIES):
        names = {"Mira": f"Mira{k}", "Jon": f"Jon{k}", "Elsa": f"Elsa{k}", "Ida": f"Ida{k}"}

        def put(text: str, names: dict[str, str] = names) -> str:
            for old, new in names.items():
                text = text.replace(old, new)
            return text

        rows += [
            {"premises": [put(p) for p in premises], "conclusion": put(s), "label": label} for s, label in statements
        ]
    path = tmp_path_factory.mktemp("folio") / "stories.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


# -- score -------------------------------------------------------------------------------------------------------


def test_score_writes_what_the_library_scores(run: Any, nano: mh.Model, tmp_path: Path) -> None:
    out = tmp_path / "deep" / "qk"
    result = run(
        "score", "-o", out, "--n", 24, "--rules", "modus_ponens, disjunction_elimination", "--depth", "1,2",
        "--distractors", "1", "--no-rotary", "--seed", 3, "--batch-size", 5, "--template", "nano", "--json",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    written = CandidateScores.load(printed.pop("scores"))
    assert written.splits == ["calibration", "test"] and printed == written.judge(seed=3).to_dict()
    trials = mh.datasets.prontoqa(
        nano, n=24, rules=("modus_ponens", "disjunction_elimination"), depth=(1, 2), distractors=(1,), seed=3
    )
    direct = mh.CircuitAnalysis(nano, progress=False).score("qk", trials, rotary=False, batch_size=5)
    assert written.trial_ids == direct.trial_ids and (written.values == direct.values).all()
    assert written.meta["options"] == direct.meta["options"] and written.meta["options"]["rotary"] is False


def test_score_in_words(run: Any, tmp_path: Path) -> None:
    result = run("score", "--n", 12, "--depth", 1, "--rules", "all", "--distractors", 0, "-o", tmp_path / "a.parquet")
    assert result.exit_code != 0  # composed rules begin at depth 2
    result = run("score", "--n", 14, "--depth", 2, "--rules", "all", "--distractors", 0, "-o", tmp_path / "a.parquet")
    assert result.exit_code == 0, result.stderr
    text = " ".join(result.stdout.split())
    assert "CandidateScores('qk', 14 trials (7 calibration, 7 test)" in text
    assert "heads" in text and "warning: " in text and f"Scores are in {tmp_path / 'a.parquet'}." in text
    assert (tmp_path / "a.parquet").is_file()


def test_score_loads_the_model_that_is_named(tmp_path: Path) -> None:
    args = ["qk", "score", "--n", "8", "--dtype", "bfloat16", "-o", str(tmp_path / "s"), "--json"]
    result = CliRunner().invoke(app, args)
    assert result.exit_code == 0, result.stderr
    scores = CandidateScores.load(tmp_path / "s.parquet")
    assert scores.meta["model"]["name"] == "nano-logic" and scores.meta["model"]["dtype"] == "bfloat16"


def test_trials_from_a_file(run: Any, nano: mh.Model, tmp_path: Path) -> None:
    path = mh.datasets.prontoqa(nano, n=8, depth=1, distractors=0).save(tmp_path / "own.jsonl")
    assert run("score", "-d", path, "-o", tmp_path / "s").exit_code == 0
    assert len(CandidateScores.load(tmp_path / "s.parquet")) == 8
    with pytest.warns(UserWarning, match=r"holds finished trials; --n and --template do not change them\.$"):
        assert run("score", "-d", path, "-o", tmp_path / "s", "--n", 4).exit_code == 0


# -- select and evaluate -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "options"),
    [
        (["-k", 3], {"k": 3}),
        (["--by", "auroc"], {"k": 5, "by": "auroc"}),
        (["--offset", "median", "-k", 2], {"k": 2, "offset": "median"}),
        (["--inverse"], {"k": 5, "inverse": True}),
        (["--seed", 3], {"k": 5, "seed": 3}),
    ],
)
def test_select(run: Any, scored: Path, flags: list[Any], options: dict[str, Any]) -> None:
    found = CandidateScores.load(scored)
    seed = options.pop("seed", 0)
    with pytest.warns(UserWarning, match="32 calibration trials"):
        wanted = found.select(options.pop("k"), **options).labels
        plain = run("select", scored, *flags)
        result = run("select", scored, *flags, "--json")
    assert plain.exit_code == result.exit_code == 0, result.stderr
    assert plain.stdout.strip().splitlines()[-1] == " ".join(wanted)
    printed = json.loads(result.stdout)
    assert printed["heads"] == wanted == [row["label"] for row in printed["rows"]]
    judged = found.judge(offset=options.get("offset", "none"), seed=seed)
    frame = judged.frame().set_index("label")
    for row in printed["rows"]:
        assert row["accuracy"] == pytest.approx(frame.loc[row["label"], "accuracy"])
        assert row["p"] == pytest.approx(frame.loc[row["label"], "p"])
        assert row["ci_low"] == pytest.approx(frame.loc[row["label"], "ci_low"])
    assert judged.verdict() in said(result)
    if seed:
        assert (abs(found.judge().frame()["ci_low"] - judged.frame()["ci_low"]) > 1e-4).any()


def test_evaluate(run: Any, scored: Path) -> None:
    found = CandidateScores.load(scored)
    test, calibration = found.split("test"), found.split("calibration")
    result = run("evaluate", scored, "--heads", "L2H1, L3H0", "--inverse", "L3H0", "--seed", 4, "--json")
    assert result.exit_code == 0, result.stderr
    wanted = evaluate(test, ["L2H1", "L3H0"], inverse=["L3H0"], seed=4)
    assert json.loads(result.stdout) == wanted.to_dict() and wanted.summary() in said(result)
    result = run("evaluate", scored, "--heads", "L2H1", "--by", "depth", "--offset", "median", "--json")
    wanted = evaluate(test, ["L2H1"], by="depth", offset=offsets(calibration, "median"))
    assert json.loads(result.stdout) == wanted.to_dict()
    assert {row["by"] for row in json.loads(result.stdout)["rows"]} == {"overall", "depth"}


def test_evaluate_takes_the_best_of_calibration_if_none_is_named(run: Any, scored: Path) -> None:
    with pytest.warns(UserWarning, match="32 calibration trials"):
        best = CandidateScores.load(scored).select(2).labels
        result = run("evaluate", scored, "-k", 2)
    assert result.exit_code == 0, result.stderr
    assert all(head in result.stdout for head in best) and "Held-out accuracy" in result.stdout


# -- report ------------------------------------------------------------------------------------------------------


# To nano, which knows few of their words, many of these stories are one and the same.
@pytest.mark.filterwarnings("ignore:.*of the 18 trials are calibration trials", "ignore:.*stand in both")
def test_report(run: Any, nano: mh.Model, folio: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out, template = tmp_path / "out", tmp_path / "words.yaml"
    # In words that nano knows; "unknown" is none of them.
    template.write_text(
        'text: "{context} claim: {statement}"\nwords: {"true": "true", "false": "false", "unknown": "open"}\n',
        encoding="utf-8",
    )
    flags = [
        "report", "-d", "worlds", "-d", f"folio:{folio}", "-o", out, "-k", 2, "--n", 36, "--depth", "1,2",
        "--distractors", "0", "--template", template, "--draws", 1, "--premise-questions", 2, "--offset", "none",
        "--seed", 1, "--batch-size", 12,
    ]  # fmt: skip
    result = run(*flags, "--json")
    assert result.exit_code == 0, result.stderr
    printed = json.loads(result.stdout)
    assert printed == json.loads((out / "qk.json").read_text(encoding="utf-8"))
    assert list(printed["sets"]) == ["worlds", "folio"] and printed["transfer"]["names"] == ["worlds", "folio"]
    assert printed["options"]["seed"] == 1 and printed["options"]["k"] == 2 and printed["options"]["draws"] == 1
    worlds, stories = printed["sets"].values()
    heads = nano.spec.n_layers * nano.spec.n_heads
    assert worlds["n_questions"] == stories["n_questions"] == 36
    assert worlds["judgement"]["chance"] == 0.5 and stories["judgement"]["chance"] == pytest.approx(1 / 3)
    assert worlds["premises"]["n_questions"] == 2 and stories["premises"] is None and stories["notes"]
    assert {row["k"] for row in worlds["pruning"]} == {0, *(round(x * heads) for x in (0.1, 0.2))}
    for name, numbers in printed["sets"].items():
        frame = pd.read_csv(out / f"{name}.heads.csv").set_index("label")
        best = numbers["judgement"]["heads"][0]
        assert frame.loc[best["label"], "accuracy"] == pytest.approx(best["accuracy"])
        scores = CandidateScores.load(out / f"{name}.qk.parquet")
        assert scores.judge(seed=1).to_dict()["verdict"] == numbers["judgement"]["verdict"]
    page = (out / "qk.html").read_text(encoding="utf-8")
    assert "From one data set to another" in page and "Folio: every head" in page
    assert f"Open {out / 'qk.html'} in a browser." in said(result)
    # Scores, twins and bare statements come from the store the second time; the rest can be left out.
    with counted(nano, monkeypatch) as calls:
        again = run(*flags[:-6], "--seed", 1, "--no-prune", "--premise-questions", 0, "--json")
    assert again.exit_code == 0, again.stderr
    assert calls == {"run": 0, "prefill": 0}
    second = json.loads(again.stdout)
    assert second["sets"]["worlds"]["judgement"] == worlds["judgement"]
    assert second["sets"]["worlds"]["debias"] == worlds["debias"] and second["sets"]["worlds"]["pruning"] is None


def test_report_without_doubts(run: Any, tmp_path: Path) -> None:
    result = run(
        "report", "-o", tmp_path, "--n", 12, "--depth", 1, "--no-debias", "--no-prune", "--premise-questions", 0,
        "--no-rotary", "--offset", "median",
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    numbers = json.loads((tmp_path / "qk.json").read_text(encoding="utf-8"))
    assert numbers["options"]["rotary"] is False and numbers["sets"]["worlds"]["judgement"]["offset_kind"] == "median"
    assert numbers["sets"]["worlds"]["debias"] is None and "before rotation" in (tmp_path / "qk.html").read_text()
    assert numbers["sets"]["worlds"]["judgement"]["verdict"][:40] in " ".join(result.stdout.split())


def test_data_sets_are_named_after_loader_or_file_and_numbered() -> None:
    names: dict[str, int] = {}
    for data in ("worlds", "folio:a/b.jsonl", "folio:c.jsonl", "deep/own trials.jsonl", "worlds"):
        names[module._short(data, names)] = 0
    assert list(names) == ["worlds", "folio", "folio 2", "own trials", "worlds 2"]


# -- what is refused ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-d", "nli"], "unknown data set 'nli'. Did you mean 'folio'? Known: folio, multi_logieval, pararule_plus, "
                        "prontoqa, prontoqa_ood, proofwriter, worlds."),
        (["-d", "folio"], "Write LOADER:PATH, such as folio:data/folio.jsonl."),
        (["-d", "folio:nowhere.jsonl"], "nowhere.jsonl"),
        (["-d", "worlds", "-d", "worlds"], "2 data sets are named; score them one by one, or use"),
        (["--depth", "one"], "--depth is 'one'; write whole numbers with commas, such as 1,2,3."),
        (["--distractors", "0,,2"], "--distractors is '0,,2'; write whole numbers with commas, such as 1,2,3."),
        (["--depth", "9"], "depth is 9; it counts inference steps, 1 to 6: give one of these or several"),
        (["--depth", "0"], "depth is 0; it counts inference steps, 1 to 6: give one of these or several"),
        (["--distractors", "6"], "distractors is 6; worlds have 0 to 5."),
        (["--rules", "syllogism"], "unknown rule 'syllogism'"),
        (["--template", "poem"], "poem"),
        (["--n", "3"], "Invalid value for '--n'"),
        (["--batch-size", "0"], "Invalid value for '--batch-size'"),
        (["--seed", "-1"], "Invalid value for '--seed'"),
    ],
)  # fmt: skip
def test_score_refuses(run: Any, tmp_path: Path, flags: list[str], message: str) -> None:
    result = run("score", "-o", tmp_path / "s.parquet", *flags)
    assert result.exit_code == 2 and message in said(result), said(result)
    assert not (tmp_path / "s.parquet").exists()


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("scores.parquet", b"PAR1\x15\x04\x90\x00"),
        ("picture.png", b"\x89PNG\r\n\x1a\n\x00"),
        ("table.csv", b"a,b\n1,2\n"),
        ("latin.jsonl", b'{"context": "caf\xe9"}\n'),
        ("rows.jsonl", b'{"context": "Mira is a baker."}\n'),
        ("list.json", b"[1, 2]"),
        ("empty.jsonl", b""),
    ],
)
def test_files_that_are_no_trials(run: Any, tmp_path: Path, name: str, content: bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    result = run("score", "-o", tmp_path / "s.parquet", "-d", path)
    wanted = (
        f"error: {path} is no file of finished trials. --data takes 'worlds', a file that TrialSet.save wrote, or, for "
        f"a data set's own file, its loader as well: LOADER:PATH, such as folio:{path}."
    )
    assert (result.exit_code, said(result)) == (2, wanted)
    assert not (tmp_path / "s.parquet").exists()


def test_files_that_a_loader_cannot_read_are_told_what_it_reads(run: Any, tmp_path: Path) -> None:
    expected = "FOLIO is read from a JSON or JSON Lines file, one question an object."
    for name, content, wrong in (
        ("scores.parquet", b"PAR1\x15\x04\x90\x00", "is no UTF-8 text (it holds zero bytes). "),
        ("latin.json", b'["caf\xe9"]', "is not UTF-8 (byte 5: invalid continuation byte); save it as UTF-8. "),
        ("table.csv", b"a,b\n1,2\n", "is not JSON: Expecting value: line 1 column 1 (char 0). "),
    ):
        path = tmp_path / name
        path.write_bytes(content)
        result = run("score", "-o", tmp_path / "s.parquet", "-d", f"folio:{path}")
        assert (result.exit_code, said(result)) == (2, f"error: {path} {wrong}{expected}")


def test_a_candidate_that_the_model_has_no_word_for_is_refused(run: Any, folio: Path, tmp_path: Path) -> None:
    result = run("score", "-o", tmp_path / "s.parquet", "-d", f"folio:{folio}", "--template", "base")
    assert result.exit_code == 2 and not (tmp_path / "s.parquet").exists()
    assert "the candidate ' unknown' holds what the tokenizer of 'nano-logic' does not know" in said(result)


def test_damaged_and_missing_trial_files_are_told_as_such(run: Any, nano: mh.Model, tmp_path: Path) -> None:
    path = mh.datasets.prontoqa(nano, n=4, depth=1, distractors=0).save(tmp_path / "own.jsonl")
    path.write_text(path.read_text(encoding="utf-8")[:-40], encoding="utf-8")
    for given, message in (
        (path, f"{path} is not a readable trial file: "),
        (tmp_path / "nowhere.jsonl", f"the trial file {tmp_path / 'nowhere.jsonl'} does not exist; give the path that"),
        (tmp_path, f"the trial file {tmp_path} is a folder, not a file"),
    ):
        result = run("score", "-o", tmp_path / "s.parquet", "-d", given)
        assert result.exit_code == 1 and said(result).startswith(f"error: {message}"), said(result)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["select", "-k", "99"], "99"),
        (["select", "-k", "0"], "Invalid value for"),
        (["select", "--by", "luck"], "luck"),
        (["select", "--offset", "mode"], "mode"),
        (["evaluate", "--heads", "L9H0"], "L9H0"),
        (["evaluate", "--heads", "the best"], "cannot read a head from 'the'"),
        (["evaluate", "--heads", "L1H0", "--inverse", "L1H1"], "L1H1"),
        (["evaluate", "--heads", "L1H0", "--by", "colour"], "colour"),
        (["evaluate", "--heads", "L1H0", "--offset", "mode"], "mode"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*calibration.*:UserWarning")
def test_select_and_evaluate_refuse(run: Any, scored: Path, args: list[str], message: str) -> None:
    result = run(args[0], scored, *args[1:])
    assert result.exit_code == 2 and message in said(result), said(result)
    assert "error: " in said(result) or "Invalid value" in message


@pytest.mark.parametrize("command", ["select", "evaluate"])
def test_files_that_are_no_scores(run: Any, scored: Path, tmp_path: Path, command: str) -> None:
    result = run(command, tmp_path / "nowhere.parquet")
    assert result.exit_code == 1 and "nowhere.parquet" in said(result)
    torn = tmp_path / "torn.parquet"
    torn.write_bytes(scored.with_suffix(".parquet").read_bytes()[:-500])
    result = run(command, torn)
    assert result.exit_code == 1 and "torn.parquet" in said(result)


def test_scores_without_splits(run: Any, scored: Path, nano: mh.Model, tmp_path: Path) -> None:
    half = CandidateScores.load(scored).split("test").save(tmp_path / "half")
    result = run("evaluate", half, "--heads", "L1H0")
    assert result.exit_code == 2
    assert "has the splits ['test']; heads are chosen on 'calibration' and evaluated on 'test'." in said(result)
    result = run("select", half)
    assert result.exit_code == 2 and "unknown split of these 'qk' scores 'calibration'" in said(result)
    trials = mh.datasets.prontoqa(nano, n=8, depth=1, distractors=0, calibration=None)
    path = trials.save(tmp_path / "unsplit.jsonl")
    result = run("report", "-d", path, "-o", tmp_path / "out")
    assert result.exit_code == 2 and "the trials of 'unsplit' have the splits []" in said(result)
    assert not (tmp_path / "out" / "qk.json").exists()


@pytest.mark.parametrize(
    ("flags", "code", "message"),
    [
        (["-k", "99"], 2, "k is 99, but nano-logic has "),
        (["--offset", "mode"], 2, "offset is 'mode'; it must be one of none, median."),
        (["--draws", "0"], 2, "Invalid value for '--draws'"),
        (["--premise-questions", "-1"], 2, "Invalid value for '--premise-questions'"),
        (["-d", "worlds", "-d", "nli"], 2, "unknown data set 'nli'"),
    ],
)
def test_report_refuses(run: Any, tmp_path: Path, flags: list[str], code: int, message: str) -> None:
    result = run("report", "-o", tmp_path / "out", "--n", 8, *flags)
    assert result.exit_code == code and message in said(result), said(result)
    assert not (tmp_path / "out" / "qk.json").exists()


def test_report_into_what_is_no_folder(run: Any, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    result = run("report", "-o", tmp_path / "file", "--n", 8)
    assert result.exit_code == 1 and f"{tmp_path / 'file'}" in said(result) and "Choose a folder" in said(result)


def test_help_lists_the_commands(run: Any) -> None:
    shown = run("--help").stdout
    assert all(command in shown for command in ("score", "select", "evaluate", "report"))
