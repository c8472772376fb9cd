"""Put what ``make demo`` measured into README.md, and keep the measurement in docs/demo_summary.json.

Usage: python scripts/readme_numbers.py [demo-out]
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mechheads.demo import accuracy_table

ROOT = Path(__file__).parent.parent
SUMMARY = ROOT / "docs" / "demo_summary.json"
START, END = "<!-- demo numbers -->", "<!-- end of demo numbers -->"


def markdown(summary: dict[str, Any]) -> str:
    """The accuracy table and the best heads, as Markdown."""
    table = accuracy_table(summary)
    lines = ["| " + " | ".join(table.columns) + " |", "| --- " * len(table.columns) + "|"]
    lines += ["| " + " | ".join(row) + " |" for row in table.itertuples(index=False)]
    top = {name: ", ".join(heads[:5]) for name, heads in summary["top"].items()}
    lines += ["", f"Best heads by LOCOS: {top['locos']}; by attention alone: {top['attention_spatial']}."]
    return "\n".join(lines)


def main(folder: Path) -> None:
    """Rewrite the block between the two marks."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split(START)
    after = rest.split(END)[1]
    readme.write_text(f"{before}{START}\n\n{markdown(summary)}\n\n{END}{after}", encoding="utf-8")
    SUMMARY.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out"))
