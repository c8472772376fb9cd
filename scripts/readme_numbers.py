"""Put what the commands measured into README.md and docs/detectors.md, and keep the measurements in docs/.

Usage: python scripts/readme_numbers.py demo-out          (what ``make demo`` wrote)
       python scripts/readme_numbers.py compare-out       (what ``mechheads compare`` wrote)
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pandas as pd

from mechheads.compare_page import method_table, ranking_table
from mechheads.compare_summary import verdict
from mechheads.demo import accuracy_table

ROOT = Path(__file__).parent.parent
SUMMARY = ROOT / "docs" / "demo_summary.json"
COMPARE = ROOT / "docs" / "compare_summary.json"
START, END = "<!-- demo numbers -->", "<!-- end of demo numbers -->"
COMPARE_START, COMPARE_END = "<!-- compare numbers -->", "<!-- end of compare numbers -->"


def rows(table: pd.DataFrame) -> list[str]:
    """A data frame as Markdown lines."""
    lines = ["| " + " | ".join(table.columns) + " |", "| --- " * len(table.columns) + "|"]
    return lines + ["| " + " | ".join(map(str, row)) + " |" for row in table.itertuples(index=False)]


def markdown(summary: dict[str, Any]) -> str:
    """The demonstration's accuracy table and best heads."""
    top = {name: ", ".join(heads[:5]) for name, heads in summary["top"].items()}
    return "\n".join(
        [
            *rows(accuracy_table(summary)),
            "",
            f"Best heads by LOCOS: {top['locos']}; by attention alone: {top['attention_spatial']}.",
        ]
    )


def compare_markdown(summary: dict[str, Any]) -> str:
    """The comparison's verdict, and tables of the detectors for each task."""
    model = f"{summary['model']['name']}, {summary['seconds'] / 60:.1f} minutes on the machine it was run on."
    lines = [f"Model: {model}", "", *(f"* {line}" for line in verdict(summary))]
    for task, numbers in summary["tasks"].items():
        lines += ["", f"## {task}", "", *rows(method_table(numbers, summary["k"]))]
        lines += ["", *rows(ranking_table(numbers, summary["k"]))]
    return "\n".join(lines)


def put(path: Path, start: str, end: str, text: str) -> None:
    """Rewrite the block between two marks of a file."""
    before, rest = path.read_text(encoding="utf-8").split(start)
    after = rest.split(end)[1]
    path.write_text(f"{before}{start}\n\n{text}\n\n{end}{after}", encoding="utf-8")


def keep(path: Path, summary: dict[str, Any]) -> None:
    """Keep a measurement."""
    path.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def main(folder: Path) -> None:
    """Rewrite the blocks of the command that wrote the folder."""
    if (folder / "compare.json").exists():
        summary = json.loads((folder / "compare.json").read_text(encoding="utf-8"))
        put(ROOT / "docs" / "detectors.md", COMPARE_START, COMPARE_END, compare_markdown(summary))
        if summary["dissociation"] is not None:
            del summary["dissociation"]["heads"]  # a row for every head, of which nothing is quoted
        keep(COMPARE, summary)
        return
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    put(ROOT / "README.md", START, END, markdown(summary))
    keep(SUMMARY, summary)


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out"))
