"""Small multiples: where panels stand, and what is written above them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go

from mechheads.plots.style import plain, template
from mechheads.plots.verdict_parts import heading, wrapped

# A report's page is so wide; what is wider must be scrolled sideways there.
PAGE = 950
# Pixels of a letter of a panel's title (bold, 14 px) and of an axis title, and of a line of either.
_LETTER, _AXIS_LETTER, _LINE = 7.9, 6.8, 18
# An entry of the legend: pixels beside its words, a letter of it, and a row.
_ENTRY, _ENTRY_LETTER, _ROW = 45, 6.0, 29


@dataclass(frozen=True)
class Grid:
    """Panels in rows and columns, all of one size; pixels.

    Attributes:
        columns: Panels a row.
        rows: Rows of panels.
        panel_width: Width of a panel.
        panel_height: Height of a panel.
        between: From a panel to the next in its row.
        below: From a row of panels to the next.
        left: Margin left of all.
        right: Margin right of all.
        bottom: Room below the lowest axes for their ticks and title; the legend's is added.
        titles: Titles of all panels; those that are too long for a panel are broken, and rows move apart for them.
        x_title: The longest title of an axis below a panel, likewise.
    """

    columns: int
    rows: int
    panel_width: int | float
    panel_height: int | float
    between: int | float = 36
    below: int | float = 86
    left: int | float = 66
    right: int | float = 16
    bottom: int | float = 60
    titles: tuple[str, ...] = ()
    x_title: str = ""

    @property
    def above(self) -> int:
        """Height of the panels' titles."""
        return _LINE * max((len(self._lines(title)) for title in self.titles), default=1)

    @property
    def apart(self) -> int | float:
        """From a row of panels to the next, with further lines of titles."""
        return self.below + self.above - _LINE + self._under

    @property
    def _under(self) -> int:
        return _LINE * (len(self.broken(self.x_title)) - 1)

    def broken(self, text: str) -> list[str]:
        """An axis title in lines that fit below a panel."""
        return wrapped(text, self.panel_width + 0.5 * self.between, _AXIS_LETTER)

    def _lines(self, title: str) -> list[str]:
        return wrapped(title, self.panel_width + 0.5 * self.between, _LETTER)

    @property
    def inner(self) -> tuple[int | float, int | float]:
        """Width and height of all panels with what is between them."""
        return (
            self.columns * self.panel_width + (self.columns - 1) * self.between,
            self.rows * self.panel_height + (self.rows - 1) * self.apart,
        )

    def domains(self, row: int, column: int) -> tuple[list[float], list[float]]:
        """Share of the plot, from and to, of a panel, sideways and upward; row 0 is the highest."""
        width, height = self.inner
        x0 = column * (self.panel_width + self.between) / width
        y1 = 1 - row * (self.panel_height + self.apart) / height
        return [x0, min(x0 + self.panel_width / width, 1.0)], [max(y1 - self.panel_height / height, 0.0), y1]

    def place(self, figure: go.Figure, row: int, column: int, title: str, *, x: Any, y: Any) -> None:
        """Lay out one panel: its axes (numbered along the rows) with the options given, and a bold title."""
        number = row * self.columns + column + 1
        n = "" if number == 1 else str(number)
        across, up = self.domains(row, column)
        figure.update_layout(
            {
                f"xaxis{n}": {"domain": across, "anchor": f"y{n}", **x},
                f"yaxis{n}": {"domain": up, "anchor": f"x{n}", **y},
            }
        )
        figure.add_annotation(
            text="<br>".join(f"<b>{plain(line)}</b>" for line in self._lines(title)),
            align="left",
            x=across[0],
            y=up[1],
            xref="paper",
            yref="paper",
            xanchor="left",
            yanchor="bottom",
            yshift=6,
            showarrow=False,
            font={"size": 14},
        )

    def finish(self, figure: go.Figure, title: str, lines: Iterable[str], description: str) -> go.Figure:
        """Size, template, heading (the lines below the title) and the sentence for those who do not see the figure."""
        width, height = self.inner
        text, top = heading(title, lines, width=self.left + width + self.right, left=self.left)
        # Room for the bold titles of the panels.
        top += 10 + self.above
        traces: Any = figure.data
        bottom = self.bottom + self._under
        bottom += legend_rows([t.name for t in traces if t.showlegend is not False], width)
        figure.update_layout(
            template=template(),
            width=self.left + width + self.right,
            height=top + height + bottom,
            hovermode="closest",
            margin={"l": self.left, "r": self.right, "t": top, "b": bottom},
            title=text,
            meta={"description": description},
        )
        return figure


def legend_rows(names: Sequence[str], width: int | float) -> int:
    """Pixels that a legend of entries one after another takes below the plot."""
    if not names:
        return 0
    rows, used = 1, 0.0
    for name in names:
        size = _ENTRY + _ENTRY_LETTER * len(name)
        if used and used + size > width:
            rows, used = rows + 1, 0.0
        used += size
    return 8 + _ROW * rows
