"""What asking for every single-pass detector costs beside asking for LOCOS alone, in one run.

Prints a table; run with ``make bench``. The claim under test: at most 1.3 times.
"""

from __future__ import annotations

import time
from statistics import median

import torch

import mechheads as mh

DETECTORS = ["locos", "attention_spatial", "dla", "wu", "contrastive", "headkv", "qrhead"]
REPEATS = 5
TRIALS = 8


def main() -> None:
    """Print the table; the two are timed in turn, so that a busy machine slows both."""
    ca = mh.CircuitAnalysis("smollm2", progress=False)
    print(f"torch threads: {torch.get_num_threads()}; {REPEATS} repeats, median seconds a trial")
    print(f"{'context':>8} {'batch':>6} {'locos':>8} {f'all {len(DETECTORS)}':>8} {'ratio':>6}")
    for length in (160, 512):
        trials = mh.datasets.needles("facts", ca.model, n=TRIALS, context_length=length, split=None)
        for batch in (1, TRIALS):
            seconds: dict[str, list[float]] = {"one": [], "all": []}
            for _ in range(REPEATS):
                for name, methods in (("one", ["locos"]), ("all", DETECTORS)):
                    start = time.perf_counter()
                    ca.score(methods, trials, max_new_tokens=20, batch_size=batch)
                    seconds[name].append((time.perf_counter() - start) / TRIALS)
            one, every = median(seconds["one"]), median(seconds["all"])
            print(f"{length:>8} {batch:>6} {one:>8.3f} {every:>8.3f} {every / one:>6.2f}")


if __name__ == "__main__":
    main()
