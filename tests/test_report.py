"""The report: one file, escaped, readable by machines and by a real browser, with no network."""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
import pytest
from plotly.offline import get_plotlyjs
from test_plots import scores, sweep

from mechheads.errors import InvalidInput, OutputNotWritable
from mechheads.plots import ablation_curve, head_heatmap, score_heatmaps
from mechheads.report import Html, Section, write_report

EVIL = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"quoted\" & 'so'"
VOID = {"meta", "link", "br", "img"}


class Outline(HTMLParser):
    """Tags with attributes, headings, and whether every tag is closed in order."""

    def __init__(self, text: str):
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text: list[tuple[str, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append((self.open[-1] if self.open else "", data))

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.tags if name == tag]

    def inside(self, tag: str) -> list[str]:
        return [data for name, data in self.text if name == tag]


def sections() -> list[Section]:
    table = pd.DataFrame(
        {
            "ranking": ["locos", EVIL],
            "k": [5, 1234],
            "mean": [0.123456, np.nan],
            "significant": [True, False],
        }
    )
    both = [scores(), scores(method="attention_spatial", unit="probability", undefined=[(0, 0)])]
    return [
        Section("Data", ["First.", EVIL]),
        Section(
            "Scores", figure=[score_heatmaps(both, top=2), head_heatmap(both[0])], figure_caption=["Side by side", EVIL]
        ),
        Section("Ablation", figure=ablation_curve(sweep()), table=table, table_caption="Comparisons"),
        Section("Verdict", "Yes.", verdict=True),
        Section("Caveats", items=["One model only.", EVIL]),
    ]


def write(folder: Path, **options: Any) -> Path:
    defaults: dict[str, Any] = {
        "title": f"Which heads? {EVIL}",
        "question": "Which heads fetch the pass-key?",
        "provenance": {"model": {"name": "tiny", "layers": [1, 2]}, "note": EVIL, "seed": None},
        "commands": ["mechheads demo --seed 0", "echo '<&>'"],
    }
    if "sections" not in options:
        defaults["sections"] = sections()
    return write_report(folder / "report.html", **(defaults | options))


def without_bundle(page: str) -> str:
    """The page without plotly.js, whose dormant map code names many addresses."""
    bundle = get_plotlyjs()
    assert page.count(bundle) == 1
    return page.replace(bundle, "")


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> str:
    return write(tmp_path_factory.mktemp("report")).read_text(encoding="utf-8")


def test_one_file_of_bearable_size(tmp_path):
    path = write(tmp_path)
    assert path == tmp_path / "report.html" and [p.name for p in tmp_path.iterdir()] == ["report.html"]
    assert 4e6 < path.stat().st_size < 10e6


def test_one_bundle_and_no_address(page):
    rest = without_bundle(page)
    assert page.count('id="plotly-js"') == 1
    assert "https://cdn" not in rest and "http://" not in rest and "https://" not in rest
    outline = Outline(rest)
    assert not any("src" in attributes for _, attributes in outline.tags)
    assert {a["href"] for a in outline.all("link")} == {"data:,"}
    assert all((a["href"] or "").startswith("#") for a in outline.all("a"))
    (policy,) = [m["content"] or "" for m in outline.all("meta") if "http-equiv" in m]
    assert "default-src 'none'" in policy and "http" not in policy


def test_the_cloud_button_is_off(page):
    assert page.count('"showSendToCloud": false') == 3


def test_structure(page):
    outline = Outline(without_bundle(page))
    assert not outline.open
    assert outline.all("html")[0]["lang"] == "en"
    headings = [tag for tag, _ in outline.tags if re.fullmatch(r"h[1-6]", tag)]
    assert headings[0] == "h1" and headings.count("h1") == 1
    assert all(int(b[1]) <= int(a[1]) + 1 for a, b in itertools.pairwise(headings))
    assert outline.inside("h2") == [
        "Data",
        "Scores",
        "Ablation",
        "Verdict",
        "Caveats",
        "How to reproduce",
        "Provenance",
    ]
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert len(ids) == len(set(ids))
    assert {f"#{i}" for i in ids} >= {a["href"] for a in outline.all("a")}
    assert [s.get("class") for s in outline.all("section")].count("verdict") == 1
    assert "viewport" in [m.get("name") for m in outline.all("meta")]


def test_figures_are_described_and_numbered(page):
    outline = Outline(without_bundle(page))
    plots = [a for a in outline.all("div") if a.get("class") == "plot"]
    assert len(plots) == len(outline.all("figure")) == 3 and all(a["role"] == "img" for a in plots)
    labels = [a["aria-label"] or "" for a in plots]
    assert "LOCOS scores (logits)" in labels[0] and "Attention-spatial" in labels[0]
    assert "Passkey: LOCOS from 1" in labels[2]
    assert outline.inside("b") == ["Figure 1.", "Figure 2.", "Figure 3."]
    assert sum("needs JavaScript" in t for t in outline.inside("p")) == 3


def test_tables_have_caption_and_scope(page):
    outline = Outline(without_bundle(page))
    assert outline.inside("caption") == ["Comparisons", "Where the numbers come from"]
    assert {a.get("scope") for a in outline.all("th")} == {"row", "col"}
    cells = outline.inside("td")
    assert cells[:3] == ["5", "0.123", "yes"] and cells[3:6] == ["1234", "\u2013", "no"]


def test_user_text_is_escaped(page):
    rest = without_bundle(page)
    assert "<script>alert" not in rest and "<img" not in rest
    outline = Outline(rest)
    assert not outline.all("img")
    assert EVIL in outline.inside("p") and EVIL in outline.inside("li") and EVIL in outline.inside("th")
    assert outline.inside("h1") == outline.inside("title") == [f"Which heads? {EVIL}"]


def test_text_inside_a_figure_cannot_end_its_script(tmp_path):
    figure = go.Figure(go.Scatter(x=[1], y=[1], text=[EVIL], name=EVIL), layout={"title": {"text": EVIL}})
    path = write(tmp_path, sections=[Section("A", figure=figure)])
    rest = without_bundle(path.read_text(encoding="utf-8"))
    assert "<script>alert" not in rest and not Outline(rest).all("img")


def test_html_passes_as_it_is(tmp_path):
    parts = [Section("A", Html("<p>see <em>this</em></p>"), items=[Html("<b>bold</b>"), "<i>"])]
    page = write(tmp_path, sections=parts).read_text(encoding="utf-8")
    assert "<p>see <em>this</em></p>" in page
    assert "<li><b>bold</b></li>" in page and "<li>&lt;i&gt;</li>" in page


def test_provenance_and_commands(page):
    outline = Outline(without_bundle(page))
    assert len(outline.all("details")) == 2
    rows = outline.inside("th")
    assert {"model.name", "model.layers", "note", "seed"} <= set(rows)
    assert "1, 2" in outline.inside("td") and "mechheads demo --seed 0\necho '<&>'" in outline.inside("code")


def test_without_figures_there_is_no_bundle(tmp_path):
    path = write(tmp_path, sections=[Section("A", "text")])
    assert path.stat().st_size < 20_000


def test_extension_folders_and_the_figure_stays_as_it_was(tmp_path):
    figure: Any = head_heatmap(scores())
    width = figure.layout.width
    path = write_report(
        tmp_path / "deep" / "er" / "page", title="T", provenance={}, sections=[Section("A", figure=figure)]
    )
    assert path == tmp_path / "deep" / "er" / "page.html" and path.is_file()
    assert figure.layout.width == width and not figure.layout.autosize


def test_a_lone_surrogate_is_written(tmp_path):
    page = write(tmp_path, sections=[Section("A", "broken \ud800 token")]).read_text(encoding="utf-8")
    assert "broken ? token" in page


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"title": " "}, "no title"),
        ({"sections": []}, "no sections"),
        ({"provenance": {"x": np.zeros(2)}}, "JSON cannot hold"),
    ],
)
def test_bad_input(tmp_path, options, message):
    with pytest.raises(InvalidInput, match=message):
        write(tmp_path, **options)
    assert not list(tmp_path.iterdir())


def test_bad_sections():
    with pytest.raises(InvalidInput, match="no heading"):
        Section("  ")
    with pytest.raises(InvalidInput, match="no table_caption"):
        Section("A", table=pd.DataFrame({"a": [1]}))
    with pytest.raises(InvalidInput, match="1 figures but 2 captions"):
        Section("A", figure=go.Figure(), figure_caption=["a", "b"])


def test_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputNotWritable, match="file"):
        write_report(tmp_path / "file" / "r.html", title="T", sections=[Section("A")], provenance={})


def test_a_failed_write_leaves_the_old_page(tmp_path, monkeypatch):
    path = write(tmp_path, sections=[Section("A", "old")])
    before = path.read_bytes()

    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OutputNotWritable, match="No space left"):
        write(tmp_path, sections=[Section("A", "new")])
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["report.html"]


# -- in a browser ----------------------------------------------------------------------------


def browser() -> str:
    """Path of a Chromium-like browser; skips, saying so, where there is none."""
    for name in ("chromium", "chromium-browser", "google-chrome", "chrome"):
        found = shutil.which(name)
        if found:
            return found
    pytest.skip("no chromium or chrome on the PATH: the report was not rendered")


def render(path: Path, profile: Path) -> tuple[str, str]:
    """The DOM after scripts ran, and the browser's log."""
    done = subprocess.run(
        [
            browser(),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--no-first-run",
            "--disable-sync",
            "--disable-background-networking",
            "--disable-component-update",
            f"--user-data-dir={profile}",
            "--virtual-time-budget=8000",
            "--window-size=1200,2000",
            "--enable-logging=stderr",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout, done.stderr


def test_the_report_renders_in_a_browser(tmp_path):
    dom, log = render(write(tmp_path), tmp_path / "profile")
    drawn = dom[dom.index("<body") :]
    assert len(re.findall(r'<svg class="main-svg"', drawn)) >= 3
    assert drawn.count('class="cartesianlayer"') == 3
    # Two scores, the grey cells of one of them, and one score: each heatmap is a picture in the svg.
    assert len(re.findall(r'<g class="hm"', drawn)) == 4
    assert len(re.findall(r'class="js-line"', drawn)) >= 6
    assert "LOCOS score (logits)" in drawn and "Attention-spatial score (probability)" in drawn
    assert "Heads ablated (number, k)" in drawn
    # The page's own content policy, and plotly under it, complain of nothing.
    assert "CONSOLE" not in log, [line for line in log.splitlines() if "CONSOLE" in line]
