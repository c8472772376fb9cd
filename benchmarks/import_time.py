"""How long ``import mechheads`` takes in a fresh interpreter, beside starting Python itself."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time

REPEATS = 15


def seconds(code: str) -> float:
    """Median wall time of a fresh interpreter that runs ``code``."""
    times = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-c", code], check=True)
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    bare = seconds("pass")
    for code in ("import mechheads", "import mechheads; mechheads.HeadScores"):
        print(f"{code}: {seconds(code) - bare:.3f} s above a bare interpreter ({bare:.3f} s)")


if __name__ == "__main__":
    main()
