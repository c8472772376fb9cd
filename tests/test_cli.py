"""Every command: what it prints for people, what it writes for programs, and how it says no."""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from mechheads.cli import app
from mechheads.cli_common import EXIT_FAILED, EXIT_INTERRUPTED, EXIT_USAGE, reported_errors, rich_table
from mechheads.scores import HeadScores, SweepResult

COMMANDS = ("get", "demo", "score", "ablate", "methods", "verify")
SMALL = ["--n", "6", "--context-length", "80", "--chat", "--max-new-tokens", "12", "--batch-size", "6"]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Run a command; standard output and error apart, wide enough not to wrap."""
    monkeypatch.setenv("COLUMNS", "200")
    runner = CliRunner()
    return lambda *args: runner.invoke(app, [str(a) for a in args])


@pytest.fixture
def shown_warnings() -> Iterator[None]:
    """Warnings go to standard error, as outside of tests, where pytest would collect or raise them."""

    def show(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        sys.stderr.write(warnings.formatwarning(message, category, filename, lineno))

    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = show
        yield


@pytest.fixture
def one_load(smollm2_model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Commands reuse the model that is loaded already; loading by name is tested elsewhere."""
    import mechheads.analysis
    import mechheads.model

    real = mechheads.model.load

    def load(model: Any, **options: Any) -> Any:
        return smollm2_model if model == "smollm2" else real(model, **options)

    monkeypatch.setattr(mechheads.model, "load", load)
    monkeypatch.setattr(mechheads.analysis, "load", load)


def test_no_arguments_shows_the_commands(run: Any) -> None:
    result = run()
    assert all(command in result.output for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_teaches(run: Any, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert "Usage" in result.output
    assert len(result.output) > 200


def test_methods_lists_units_and_options(run: Any) -> None:
    result = run("methods")
    assert result.exit_code == 0
    for word in ("locos", "attention_spatial", "dla", "logits", "unembed='raw'"):
        assert word in result.output


def test_get_of_an_unknown_model(run: Any) -> None:
    result = run("get", "smolm2")
    assert result.exit_code == EXIT_USAGE
    assert "Did you mean 'smollm2'" in result.stderr


@pytest.mark.smollm2
def test_get_says_where_the_weights_are(run: Any, smollm2_folder: Path) -> None:
    result = run("get", "smollm2")
    assert result.exit_code == 0
    assert str(smollm2_folder) in result.output.replace("\n", "")


def test_verify_prints_json(run: Any, tmp_path: Path) -> None:
    import tiny

    result = run("verify", "--model", tiny.folder("llama"), "--json")
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    assert 0 < found["head_sum"] < 1e-5
    assert found["model"]["n_key_value_heads"] == 2


def test_unknown_model_is_a_usage_error(run: Any, tmp_path: Path) -> None:
    result = run("score", "--model", "smolm2", "--out", tmp_path / "out")
    assert result.exit_code == EXIT_USAGE
    assert "'smolm2'" in result.stderr and "Did you mean 'smollm2'" in result.stderr


@pytest.mark.parametrize("command", ["demo", "score", "ablate"])
def test_unwritable_folder_is_refused_before_any_work(run: Any, tmp_path: Path, command: str) -> None:
    (tmp_path / "file").write_text("")
    result = run(
        command,
        "--model",
        "no/such-model",
        "--out",
        tmp_path / "file" / "out",
        *(["--heads", "L0H0"] if command == "ablate" else []),
    )
    assert result.exit_code == EXIT_FAILED
    assert "cannot write to the output folder" in result.stderr


@pytest.mark.smollm2
def test_score_writes_what_it_prints(run: Any, one_load: None, tmp_path: Path) -> None:
    result = run("score", "-s", "locos", "-s", "dla", "--split", "all", "-o", tmp_path, "--json", *SMALL)
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    for name in ("locos", "dla"):
        scores = HeadScores.load(tmp_path / f"{name}.parquet")
        assert scores.shape == (6, 30, 9)
        assert [t["head"] for t in summary["top"][name]] == scores.top(10).labels
        frame = pd.read_csv(tmp_path / f"{name}.csv")
        assert len(frame) == 270 and {"label", "score", "ci_low", "ci_high", "rank"} <= set(frame)
    assert summary["n_kept"] >= 4
    assert "plotly" in (tmp_path / "heatmap.html").read_text(encoding="utf-8")
    assert f"{summary['n_kept']} of 6 trials kept" in result.stderr


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("extra", "part"),
    [
        (["-t", "paskey"], "Did you mean 'passkey'"),
        (["-t", "[/x]none.jsonl"], "[/x]none.jsonl does not exist"),
        (["-s", "locus"], "Did you mean 'locos'"),
        (["--unembed", "norm", "--n", "2"], "Did you mean 'normed'"),
        (["--split", "tset"], "Did you mean 'test'"),
        (["--pooling", "mean"], "pooling"),
        (["-s", "attention_spatial", "--unembed", "raw"], "no option 'unembed'"),
    ],
)
def test_score_refuses_unknown_names(run: Any, one_load: None, tmp_path: Path, extra: list[str], part: str) -> None:
    result = run("score", "-o", tmp_path, *SMALL, *extra)
    assert result.exit_code == (EXIT_FAILED if "jsonl" in extra[-1] else EXIT_USAGE)
    assert part in result.stderr


@pytest.mark.smollm2
def test_interrupted_score_keeps_what_is_done(
    run: Any, one_load: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mechheads.runner

    real, calls = mechheads.runner.capture, []

    def capture(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > 1:
            raise KeyboardInterrupt
        return real(*args, **kwargs)

    monkeypatch.setattr(mechheads.runner, "capture", capture)
    with pytest.warns(UserWarning, match="interrupted: 3 of 6"):
        result = run("score", "--split", "all", "-o", tmp_path, *SMALL[:-1], "3")
    assert result.exit_code == EXIT_INTERRUPTED
    kept = HeadScores.load(tmp_path / "locos.parquet")
    assert len(kept.trial_ids) == 3 and kept.meta["complete"] is False


@pytest.mark.smollm2
def test_ablate_with_heads_and_with_scores(run: Any, one_load: None, tmp_path: Path) -> None:
    assert run("score", "-o", tmp_path / "s", *SMALL).exit_code == 0
    result = run(
        "ablate", "--scores", tmp_path / "s" / "locos.parquet", "--heads", "L18H6, L23H2", "--k", "2",
        "--draws", "1", "--control", "none", "-o", tmp_path / "a", "--json", *SMALL,
    )  # fmt: skip
    assert result.exit_code == 0, result.stderr
    sweep = SweepResult.load(tmp_path / "a" / "sweep.parquet")
    assert sweep.rankings == ["none", "given", "locos", "random"] or set(sweep.rankings) == {"given", "locos", "random"}
    table = pd.read_csv(tmp_path / "a" / "ablation.csv")
    summary = json.loads(result.stdout)
    assert len(summary["correct"]) == len(table)
    assert summary["meta"]["options"]["intervention"]["reference"]["n"] == 3
    assert (tmp_path / "a" / "ablation.html").exists()


@pytest.mark.smollm2
@pytest.mark.parametrize(
    ("args", "part"),
    [
        ([], "name the heads"),
        (["--heads", "L99H0"], "L99H0 does not exist"),
        (["--heads", "H9L1"], "cannot read a head"),
        (["--heads", "L0H0", "--k", "one"], "--k is 'one'"),
        (["--heads", "L0H0", "--control", "recal"], "Did you mean 'recall'"),
        (["--heads", "L0H0", "--intervention", "men"], "Did you mean 'mean'"),
        (["--heads", "L0H0", "--site", "v"], "unknown site"),
        (["--scores", "nowhere.parquet"], "nowhere.parquet"),
    ],
)
def test_ablate_refuses(run: Any, one_load: None, tmp_path: Path, args: list[str], part: str) -> None:
    result = run("ablate", "-o", tmp_path, *SMALL, *args)
    assert result.exit_code in (EXIT_USAGE, EXIT_FAILED)
    assert part in result.stderr


@pytest.mark.smollm2
def test_demo_writes_one_page_and_says_the_same_everywhere(run: Any, one_load: None, tmp_path: Path) -> None:
    result = run(
        "demo", "--n", "8", "--context-length", "80", "--n-control", "4", "--draws", "1", "-o", tmp_path, "--json"
    )
    assert result.exit_code == 0, result.stderr
    summary = json.loads(result.stdout)
    assert summary == json.loads((tmp_path / "summary.json").read_text())
    page = (tmp_path / "demo.html").read_text(encoding="utf-8")
    low, high = summary["accuracy"]["locos"]["ci"]
    shown = f"{summary['accuracy']['locos']['mean']:.2f} [{low:.2f}, {high:.2f}]"
    assert shown in page and shown in result.stderr.replace("\n", " ")
    assert summary["accuracy"]["locos"]["mean"] < summary["accuracy"]["baseline"]["mean"]
    sweep = SweepResult.load(tmp_path / "sweep.parquet")
    tested = {
        h
        for r in ("locos", "attention_spatial")
        for h in sweep.cell(r, 5, "passkey", "correct")["heads"].iloc[0].split()
    }
    drawn = set(sweep.cell("random", 5, "passkey", "correct")["heads"].iloc[0].split())
    assert len(drawn) == 5 and not drawn & tested


@pytest.mark.parametrize(
    ("command", "option", "value"),
    [
        (command, option, value)
        for command, options in {
            "demo": ("--n", "--context-length", "--n-control", "--draws"),
            "score": ("--n", "--context-length", "--max-new-tokens", "--batch-size", "--top"),
            "ablate": ("--n", "--context-length", "--max-new-tokens", "--batch-size"),
        }.items()
        for option in options
        for value in ("0", "-1")
    ]
    + [("ablate", "--draws", "-1"), ("score", "--seed", "-1")],
)
def test_numbers_out_of_range_are_refused_before_any_work(
    run: Any, tmp_path: Path, command: str, option: str, value: str
) -> None:
    result = run(command, "--model", "no/such-model", "--out", tmp_path / "out", option, value)
    assert result.exit_code == EXIT_USAGE
    assert f"Invalid value for '{option}'" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("args", "part"),
    [
        (["score", "-s", "locus"], "Did you mean 'locos'"),
        (["ablate", "--heads", ""], "--heads is '', which names no head"),
        (["ablate", "--heads", " , "], "which names no head"),
        (["ablate", "--heads", "L0H0", "--k", "-1"], "--k is '-1'"),
        (["ablate", "--heads", "L0H0", "--k", ""], "--k is ''"),
        (["ablate", "--heads", "L0H0", "--control", "recal"], "Did you mean 'recall'"),
        (["ablate", "--heads", "L0H0", "--intervention", "men"], "Did you mean 'mean'"),
        (["ablate", "--heads", "L0H0", "--site", "v"], "unknown site"),
    ],
)
def test_names_are_checked_before_the_model_is_loaded(run: Any, tmp_path: Path, args: list[str], part: str) -> None:
    result = run(*args, "--model", "no/such-model", "--out", tmp_path)
    assert result.exit_code == EXIT_USAGE
    assert part in result.stderr and "no/such-model" not in result.stderr


def test_brackets_in_what_is_printed_are_no_markup(run: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import mechheads.smollm2

    def fetch(*, force: bool, progress: Any) -> Path:
        progress("reading [/x]")
        return Path("cache[/y]")

    monkeypatch.setattr(mechheads.smollm2, "get_smollm2", fetch)
    result = run("get", "smollm2")
    assert result.exit_code == 0, result.exception
    assert "reading [/x]" in result.stdout and "ready in cache[/y]" in result.stdout

    frame = pd.DataFrame({"a[/b]": ["c[/d]"], "e": [0.5]})
    Console = pytest.importorskip("rich.console").Console
    with (console := Console(width=80)).capture() as shown:
        console.print(rich_table(frame, "t[/u]"))
    assert all(x in shown.get() for x in ("a[/b]", "c[/d]", "t[/u]", "0.5"))


@pytest.mark.smollm2
def test_an_output_folder_with_brackets(run: Any, one_load: None, tmp_path: Path) -> None:
    folder = tmp_path / "out[" / "x]"
    result = run("score", "-o", folder, *SMALL)
    assert result.exit_code == 0, result.exception
    assert f"Written to {folder}" in result.stdout and (folder / "locos.parquet").exists()
    result = run("ablate", "--heads", "L18H6", "--k", "1", "--draws", "0", "--control", "none", "-o", folder, *SMALL)
    assert result.exit_code == 0, result.exception
    assert f"Written to {folder}" in result.stdout


@pytest.mark.smollm2
@pytest.mark.parametrize("kept", [0, 1, 2])
def test_interrupted_ablate_writes_what_is_done(
    run: Any, one_load: None, shown_warnings: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """Ctrl-C before the first cell, after the baseline, and after the last."""
    from mechheads.analysis import CircuitAnalysis

    real = CircuitAnalysis.sweep

    def sweep(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not kept:
            raise KeyboardInterrupt
        found = real(self, *args, **kwargs)
        cells = list(found.frame.groupby(["ranking", "k"], sort=False).groups.values())[:kept]
        frame = found.frame.loc[[i for cell in cells for i in cell]].reset_index(drop=True)
        warnings.warn("interrupted:\n  some cells", stacklevel=2)
        return replace(found, frame=frame, meta={**found.meta, "complete": False})

    monkeypatch.setattr(CircuitAnalysis, "sweep", sweep)
    result = run("ablate", "--heads", "L18H6", "--k", "1", "--draws", "0", "--control", "none", "-o", tmp_path, *SMALL)
    assert result.exit_code == EXIT_INTERRUPTED, result.exception
    written = (tmp_path / "sweep.parquet").exists()
    assert written is (kept > 0)
    if written:
        assert "warning: interrupted: some cells\n" in result.stderr and "cli.py" not in result.stderr
        assert SweepResult.load(tmp_path / "sweep.parquet").meta["complete"] is False
        assert (tmp_path / "ablation.html").exists() and len(pd.read_csv(tmp_path / "ablation.csv"))
    else:
        assert "error: interrupted" in result.stderr


def test_warnings_are_one_line_and_the_format_is_put_back(
    shown_warnings: None, capsys: pytest.CaptureFixture[str]
) -> None:
    before = warnings.formatwarning
    with reported_errors():
        warnings.warn("one\ntwo [/x]", stacklevel=1)
    assert capsys.readouterr().err == "warning: one two [/x]\n"
    with pytest.raises(typer.Exit), reported_errors():
        raise KeyboardInterrupt
    assert warnings.formatwarning is before
    with pytest.warns(UserWarning, match="still recorded"), reported_errors():
        warnings.warn("still recorded", stacklevel=1)


def test_the_module_runs_as_a_program() -> None:
    import subprocess
    import sys

    done = subprocess.run([sys.executable, "-m", "mechheads", "--help"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "demo" in done.stdout


def test_version(run: Any) -> None:
    result = run("--version")
    assert result.exit_code == 0 and result.output.strip() == f"mechheads {__import__('mechheads').__version__}"


@pytest.mark.parametrize(
    ("k", "heads", "sizes"),
    [(None, None, [1, 2, 5, 10]), (None, "L0H0 L1H1 L2H2", [1, 2, 3]), ("7", "L0H0", [7]), ("1,4", None, [1, 4])],
)
def test_set_sizes_are_only_shortened_when_nobody_chose_them(
    k: str | None, heads: str | None, sizes: list[int]
) -> None:
    from mechheads.cli import _sizes

    assert _sizes(k, heads) == sizes


def test_verify_says_what_holds(run: Any) -> None:
    import tiny

    result = run("verify", "--model", tiny.folder("llama"))
    assert result.exit_code == 0
    assert result.output.count("yes") == 6 and "allowed" in result.output and "logit_tolerance" not in result.output
