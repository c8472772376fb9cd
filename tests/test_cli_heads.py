"""``mechheads heads``: what it converts, prints, and refuses."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

from mechheads.cli_heads import app
from mechheads.head_files import HEAD_FILE_FORMATS

FLAT = {"0-0": [1.0, 2.0], "0-1": [4.0, 5.0], "1-0": [7.0, 8.0], "1-1": [0.0, 1.0]}


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("COLUMNS", "200")
    return lambda *args: CliRunner().invoke(app, [str(a) for a in args])


@pytest.fixture
def source(tmp_path):
    path = tmp_path / "heads.json"
    path.write_text(json.dumps(FLAT))
    return path


def test_formats(run):
    shown = run("formats")
    assert shown.exit_code == 0 and all(name in shown.stdout for name in HEAD_FILE_FORMATS)
    assert json.loads(run("formats", "--json").stdout) == dict(HEAD_FILE_FORMATS)


def test_convert_says_what_is_left_out(run, source, tmp_path):
    out = tmp_path / "new" / "a.tsv"
    result = run("convert", source, out, "--n-key-value-heads", 1)
    assert result.exit_code == 0, result.stderr
    assert f"{source} (2 trials, 2 layers, 2 heads) written to {out} as duo" in result.stdout
    assert "left out: single trials: each score is the mean over 2" in result.stdout
    assert "left out: query heads: each column is the max over the query heads" in result.stdout
    np.testing.assert_array_equal(np.loadtxt(out), [4.5, 7.5])
    mean = run("convert", source, out, "--n-key-value-heads", 1, "--kv-groups", "mean")
    assert "each column is the mean over" in mean.stdout
    np.testing.assert_array_equal(np.loadtxt(out), [3.0, 4.0])


def test_convert_prints_json_alone_on_standard_output(run, source, tmp_path):
    out = tmp_path / "a.yaml"
    result = run("convert", source, out, "--k", 2, "--json")
    assert json.loads(result.stdout) == {
        "in": str(source), "out": str(out), "format": "qrhead", "n_trials": 2, "n_layers": 2, "n_heads": 2,
        "left_out": ["scores: the ranking alone is written (pooling 'trial')"],
    }  # fmt: skip
    assert "written to" in result.stderr
    assert yaml.safe_load(out.read_text()) == {"attn_head_set": "1-0,0-1"}
    again = run("convert", out, tmp_path / "b.yaml", "--k", 1, "--json")
    assert json.loads(again.stdout)["n_heads_listed"] == 2
    assert json.loads(again.stdout)["left_out"] == ["the heads after the first 1"]


def test_convert_with_named_formats(run, source, tmp_path):
    plain = tmp_path / "heads"
    assert run("convert", source, plain, "--to", "flat_means").exit_code == 0
    assert json.loads(plain.read_text()) == {"0-0": 1.5, "0-1": 4.5, "1-0": 7.5, "1-1": 0.5}
    result = run("convert", plain, tmp_path / "b.json", "--from", "flat_means", "--to", "locos", "--n-heads", 2)
    assert result.exit_code == 0 and "left out" not in result.stdout
    assert json.loads((tmp_path / "b.json").read_text())["scores"]["1-0"] == [7.5]


@pytest.mark.parametrize(
    ("options", "code", "message"),
    [
        (["--to", "csv"], 2, "unknown head file format 'csv'"),
        (["--from", "duo", "--n-heads", "2"], 1, "line 1, column 1 is"),
        (["--n-layers", "3"], 1, "does not fit a model of 3 layers"),
        (["--k", "2"], 2, "k goes with the format 'qrhead'"),
        (["--to", "duo"], 2, "give n_key_value_heads"),
        (["--kv-groups", "max"], 2, "kv_groups goes with the format 'duo'"),
    ],
)
def test_convert_says_no(run, source, tmp_path, options, code, message):
    result = run("convert", source, tmp_path / "out.json", *options)
    assert result.exit_code == code and message in result.stderr and not result.stdout
    assert not (tmp_path / "out.json").exists()
