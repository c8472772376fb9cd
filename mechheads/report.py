"""Results as one self-contained HTML page: it opens with no network and needs no other file."""

from __future__ import annotations

import copy
import html
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.offline import get_plotlyjs

from mechheads.errors import InvalidInput
from mechheads.plots.describe import describe
from mechheads.plots.style import MISSING, number
from mechheads.provenance import canonical_json, json_ready
from mechheads.result_files import with_extension, write_atomically

# Dark text on white, a line length that reads well, wide tables that scroll on their own.
_CSS = """
:root { color-scheme: light; --ink: #1a1a1a; --soft: #4a4a4a; --line: #d0d0d0; --accent: #0072b2; }
* { box-sizing: border-box; }
html { -webkit-text-size-adjust: 100%; }
body { margin: 0 auto; padding: 2rem 1.25rem 4rem; max-width: 62rem; background: #fff; color: var(--ink);
  font: 1rem/1.6 Helvetica, Arial, "Liberation Sans", "DejaVu Sans", sans-serif; }
h1 { font-size: 1.9rem; line-height: 1.25; margin: 0 0 .75rem; }
h2 { font-size: 1.3rem; line-height: 1.3; margin: 2.5rem 0 .5rem; }
p, ul { margin: .5rem 0 .9rem; max-width: 46rem; overflow-wrap: anywhere; }
li { margin: .2rem 0; }
a { color: #005a8c; }
.question { font-size: 1.15rem; border-left: 4px solid var(--accent); padding-left: .9rem; }
.tag { display: block; font-size: .8rem; font-weight: bold; text-transform: uppercase; letter-spacing: .05em;
  color: var(--soft); }
nav { border-top: 1px solid var(--line); border-bottom: 1px solid var(--line); margin: 1.25rem 0; }
nav ol { display: flex; flex-wrap: wrap; gap: .2rem 1.4rem; list-style: none; padding: 0; margin: .5rem 0;
  max-width: none; }
.verdict { border: 2px solid var(--accent); border-radius: 6px; padding: .25rem 1.1rem .4rem;
  margin: 2rem 0; }
.verdict h2 { margin-top: .6rem; }
.verdict p { font-size: 1.08rem; }
figure { margin: 1.25rem 0; overflow-x: auto; }
figcaption { font-size: .95rem; color: var(--soft); max-width: 46rem; margin-top: .3rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font-size: .95rem; font-variant-numeric: tabular-nums; }
caption { text-align: left; font-weight: bold; padding-bottom: .4rem; }
th, td { text-align: left; padding: .32rem .9rem .32rem 0; border-bottom: 1px solid var(--line);
  vertical-align: top; overflow-wrap: anywhere; }
thead th { border-bottom: 2px solid var(--ink); vertical-align: bottom; }
tbody th { font-weight: normal; }
th.number, td.number { text-align: right; padding: .32rem .9rem; white-space: nowrap; }
pre { background: #f5f5f5; border: 1px solid var(--line); border-radius: 4px; padding: .7rem .9rem;
  overflow-x: auto; font-size: .9rem; line-height: 1.45; }
details pre { white-space: pre-wrap; overflow-wrap: anywhere; }
summary { cursor: pointer; padding: .3rem 0; font-weight: bold; }
:focus-visible { outline: 3px solid var(--accent); outline-offset: 2px; }
@media print {
  body { max-width: none; padding: 0; font-size: 10.5pt; }
  nav { display: none; }
  figure, .scroll { overflow: visible; }
  figure, .verdict, tr { break-inside: avoid; }
  h2 { break-after: avoid; }
  pre { white-space: pre-wrap; }
  .modebar { display: none; }
}
"""

# On paper nothing can be unfolded, so all is; and no picture may be wider than the paper (A4 less margins).
_SCRIPT = """
addEventListener("beforeprint", () => {
  for (const d of document.querySelectorAll("details")) d.open = true;
  for (const p of document.querySelectorAll(".js-plotly-plot"))
    Plotly.relayout(p, {autosize: false, width: Math.min(p.clientWidth, 680)});
});
addEventListener("afterprint", () => {
  for (const p of document.querySelectorAll(".js-plotly-plot"))
    Plotly.relayout(p, {autosize: true, width: null});
});
"""


class Html(str):
    """Markup that goes into the report as it is. Everything else is escaped."""

    __slots__ = ()


@dataclass(frozen=True, eq=False)
class Section:
    """One section of a report; what is left out is not shown.

    The parts stand in the order of the fields: paragraphs, list, figures, table.

    Attributes:
        heading: Heading, plain text.
        text: A paragraph or several; plain text, or ``Html`` for markup of your own.
        items: Points of a list, likewise.
        figure: A plotly Figure or several.
        figure_caption: Caption of each figure, one text or as many as there are figures.
        table: A DataFrame; its first column heads the rows, its index is not shown.
        table_caption: Caption of the table.
        verdict: Set the section off as the answer to the question.
    """

    heading: str
    text: str | Sequence[str] = ()
    items: Sequence[str] = ()
    figure: go.Figure | Sequence[go.Figure] | None = None
    figure_caption: str | Sequence[str] = ""
    table: pd.DataFrame | None = None
    table_caption: str = ""
    verdict: bool = False

    def __post_init__(self) -> None:
        if not self.heading.strip():
            raise InvalidInput("a section of the report has no heading; give it one.")
        if self.table is not None and not self.table_caption.strip():
            raise InvalidInput(f"the table in {self.heading!r} has no table_caption; say what it shows.")
        captions = self.figure_captions
        if len(captions) != len(self.figures):
            raise InvalidInput(
                f"{self.heading!r} has {len(self.figures)} figures but {len(captions)} captions; give one each."
            )

    @property
    def figures(self) -> list[go.Figure]:
        """The figures, as a list."""
        if self.figure is None:
            return []
        return [self.figure] if isinstance(self.figure, go.Figure) else list(self.figure)

    @property
    def figure_captions(self) -> list[str]:
        """One caption per figure; an empty one where none was given."""
        if not self.figure_caption:
            return [""] * len(self.figures)
        return [self.figure_caption] if isinstance(self.figure_caption, str) else list(self.figure_caption)


def write_report(
    path: str | Path,
    *,
    title: str,
    sections: Sequence[Section],
    provenance: Mapping[str, Any],
    question: str = "",
    commands: Sequence[str] = (),
    lang: str = "en",
) -> Path:
    """Write one HTML file with figures, tables, provenance and how to reproduce it.

    plotly.js stands in the file once (about 5 MB), fonts are the reader's own, and a content policy in the
    page forbids the browser to fetch anything. All text is escaped unless it is ``Html``.

    Args:
        path: Where; ``.html`` is added if the name has no extension. Folders are made.
        title: Title of the page.
        sections: The body, in order: data, scores, curve, table, verdict, caveats.
        provenance: JSON-ready values, as ``mechheads.provenance.collect`` makes them.
        question: The question the report answers, in a sentence under the title.
        commands: Shell commands that make the results again.
        lang: Language of the texts, as HTML writes it.

    Returns:
        The path written.

    Raises:
        InvalidInput: If the title is empty, there is no section, or the provenance is not JSON-ready.
        OutputNotWritable: If the folder cannot be written.
    """
    if not title.strip():
        raise InvalidInput("the report has no title; give it one.")
    if not sections:
        raise InvalidInput("the report has no sections; give at least one Section.")
    page = "\n".join(_page(title, question, list(sections), json_ready(provenance), list(commands), lang))

    def write(target: Path) -> None:
        # Generated text may hold half a surrogate pair, which UTF-8 has no bytes for.
        target.write_text(page, encoding="utf-8", errors="replace")

    return write_atomically(with_extension(path, ".html"), write)


def _page(
    title: str, question: str, sections: list[Section], provenance: Any, commands: list[str], lang: str
) -> Iterator[str]:
    """The page, piece by piece."""
    policy = (
        "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:; "
        "worker-src blob:; base-uri 'none'; form-action 'none'"
    )
    yield f"""<!doctype html>
<html lang="{_text(lang)}">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="generator" content="mechheads">
<link rel="icon" href="data:,">
<title>{_text(title)}</title>
<style>{_CSS}</style>"""
    if any(section.figures for section in sections):
        yield f'<script id="plotly-js">{get_plotlyjs()}</script>'
    yield "</head>\n<body>\n<header>"
    yield f"<h1>{_text(title)}</h1>"
    if question:
        yield f'<p class="question"><span class="tag">Question</span> {_text(question)}</p>'
    yield "</header>"
    headings = [s.heading for s in sections] + (["How to reproduce"] if commands else []) + ["Provenance"]
    if len(headings) > 3:
        links = "".join(f'<li><a href="#s{i}">{_text(h)}</a></li>' for i, h in enumerate(headings, start=1))
        yield f'<nav aria-label="Contents"><ol>{links}</ol></nav>'
    yield "<main>"
    first_figure = 1
    for i, section in enumerate(sections, start=1):
        yield from _section(section, i, first_figure)
        first_figure += len(section.figures)
    if commands:
        yield _open(len(sections) + 1, "How to reproduce")
        yield f"<pre><code>{_text(chr(10).join(commands))}</code></pre>\n</section>"
    yield from _provenance(provenance, len(headings))
    yield f"</main>\n<script>{_SCRIPT}</script>\n</body>\n</html>\n"


def _open(i: int, heading: str, kind: str = "") -> str:
    css = f' class="{kind}"' if kind else ""
    return f'<section id="s{i}" aria-labelledby="h{i}"{css}>\n<h2 id="h{i}">{_text(heading)}</h2>'


def _section(section: Section, i: int, first_figure: int) -> Iterator[str]:
    """One section, its parts in the order of the fields."""
    yield _open(i, section.heading, "verdict" if section.verdict else "")
    paragraphs = [section.text] if isinstance(section.text, str) else section.text
    for paragraph in paragraphs:
        if paragraph:
            yield _text(paragraph) if isinstance(paragraph, Html) else f"<p>{_text(paragraph)}</p>"
    if section.items:
        yield "<ul>" + "".join(f"<li>{_text(item)}</li>" for item in section.items) + "</ul>"
    pairs = zip(section.figures, section.figure_captions, strict=True)
    for n, (figure, caption) in enumerate(pairs, start=first_figure):
        yield _figure(figure, caption, n)
    if section.table is not None:
        yield _table(section.table, section.table_caption)
    yield "</section>"


def _figure(figure: go.Figure, caption: str, n: int) -> str:
    """A figure as wide as the page allows, with its description for those who do not see it."""
    drawn = copy.deepcopy(figure)
    layout: Any = drawn.layout
    width, height = layout.width or 720, layout.height or 450
    # Without a width of its own the picture follows its box, which shrinks on a narrow screen.
    drawn.update_layout(width=None, height=height, autosize=True)
    name = f"mechheads-figure-{n}"
    body = drawn.to_html(
        full_html=False,
        include_plotlyjs=False,
        include_mathjax=False,
        div_id=name,
        config={
            # plotly.js shows a button that uploads the chart unless told not to.
            "displaylogo": False,
            "responsive": True,
            "showSendToCloud": False,
            "toImageButtonOptions": {"format": "svg", "filename": name},
        },
    )
    alt = _text(describe(figure))
    # Narrower than this the labels would collide; the figure then scrolls.
    least = (layout.meta or {}).get("least_width", min(0.8 * width, 640))
    text = f"<b>Figure {n}.</b> {_text(caption)}" if caption else f"<b>Figure {n}.</b>"
    return (
        f'<figure>\n<div class="plot" role="img" aria-label="{alt}" '
        f'style="max-width:{width:.0f}px;min-width:{least:.0f}px;height:{height:.0f}px">\n{body}\n'
        f"</div>\n<noscript><p>The figure needs JavaScript. What it shows: {alt}</p></noscript>\n"
        f"<figcaption>{text}</figcaption>\n</figure>"
    )


def _table(table: pd.DataFrame, caption: str) -> str:
    """A table with a caption; numbers to three digits and right-aligned, the first column as row headings."""
    columns = list(table.columns)
    right = [pd.api.types.is_numeric_dtype(table[c]) and table[c].dtype != bool for c in columns]
    head = "".join(f'<th scope="col"{_number_class(r)}>{_text(c)}</th>' for c, r in zip(columns, right, strict=True))
    rows = []
    for values in table.itertuples(index=False, name=None):
        cells = [
            f'<th scope="row"{_number_class(r)}>{_cell(v)}</th>' if j == 0 else f"<td{_number_class(r)}>{_cell(v)}</td>"
            for j, (v, r) in enumerate(zip(values, right, strict=True))
        ]
        rows.append(f"<tr>{''.join(cells)}</tr>")
    body = "\n".join(rows)
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{_text(caption)}"><table>\n'
        f"<caption>{_text(caption)}</caption>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>"
    )


def _number_class(is_number: bool) -> str:
    return ' class="number"' if is_number else ""


def _cell(value: Any) -> str:
    """A cell's text: floats to three significant digits, a dash for what is missing."""
    if isinstance(value, (bool, np.bool_)):
        return "yes" if value else "no"
    if isinstance(value, (float, np.floating)):
        return number(float(value))
    if value is None or value is pd.NA or value is pd.NaT:
        return MISSING
    return _text(value)


def _provenance(provenance: dict[str, Any], i: int) -> Iterator[str]:
    """Every value with its path, folded away, and the same as JSON to copy."""
    yield _open(i, "Provenance")
    rows = pd.DataFrame(list(_flat(provenance)), columns=["Name", "Value"])
    yield "<details>\n<summary>Model, data, options and versions</summary>"
    yield _table(rows, "Where the numbers come from")
    yield "</details>\n<details>\n<summary>The same as JSON</summary>"
    yield f"<pre><code>{_text(canonical_json(provenance))}</code></pre>\n</details>\n</section>"


def _flat(value: Any, path: str = "") -> Iterator[tuple[str, str]]:
    """Leaves of nested JSON as ``("model.name", "...")``."""
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(inner, f"{path}.{key}" if path else key)
    elif isinstance(value, list) and any(isinstance(v, (dict, list)) for v in value):
        for i, inner in enumerate(value):
            yield from _flat(inner, f"{path}[{i}]")
    elif path:
        texts = [MISSING if v is None else str(v) for v in (value if isinstance(value, list) else [value])]
        yield path, ", ".join(texts)


def _text(value: Any) -> str:
    """The value as HTML text, escaped; ``Html`` passes as it is."""
    return str(value) if isinstance(value, Html) else html.escape(str(value), quote=True)
