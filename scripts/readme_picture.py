"""Draw docs/img/demo.png from what ``make demo`` wrote, in headless Chromium.

Usage: python scripts/readme_picture.py [demo-out]
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from mechheads.plots import ablation_curve, score_heatmaps
from mechheads.scores import HeadScores, SweepResult

OUT = Path(__file__).parent.parent / "docs" / "img" / "demo.png"


def main(folder: Path) -> None:
    """Heatmaps above, ablation curves below, on one page, as one PNG."""
    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    if chromium is None:
        sys.exit("no Chromium on this machine; install one to draw the picture")
    scores = [HeadScores.load(folder / f"{name}.parquet") for name in ("locos", "attention_spatial")]
    figures = [score_heatmaps(scores, top=5), ablation_curve(SweepResult.load(folder / "sweep.parquet"))]
    with tempfile.TemporaryDirectory() as temp:
        page = Path(temp) / "page.html"
        body = "".join(
            f.to_html(full_html=False, include_plotlyjs=i == 0, config={"displayModeBar": False})
            for i, f in enumerate(figures)
        )
        page.write_text(f"<body style='margin:0;width:840px'>{body}</body>", encoding="utf-8")
        height = int(sum((f.layout.height or 450) for f in figures))
        command = [
            chromium, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={temp}/profile", "--virtual-time-budget=8000",
            f"--window-size=840,{height}", f"--screenshot={OUT}", page.as_uri(),
        ]  # fmt: skip
        subprocess.run(command, check=True, capture_output=True, timeout=120)
    print(f"drew {OUT}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "demo-out"))
