"""What a scored trial costs against a plain greedy generation of the same tokens, and where the memory goes.

Prints a table; run with ``make bench``. The claim under test: a capture costs about one generation.
"""

from __future__ import annotations

import resource
import time
from statistics import median

import torch

import mechheads as mh
from mechheads.capture import capture
from mechheads.decode import greedy
from mechheads.model import Model
from mechheads.trials import TrialSet

REPEATS = 3


def timed(function) -> float:
    """Median seconds over the repeats."""
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        function()
        seconds.append(time.perf_counter() - start)
    return median(seconds)


def plain(model: Model, trials: TrialSet) -> float:
    """Hugging Face's own greedy generation of the same answers on sdpa attention, one trial at a time."""
    twin = model.backend.twin.model
    stop = sorted(model.stop_tokens)
    answers = greedy(model, [t.tokens for t in trials], stop_at_newline=True)

    def run() -> None:
        for trial, answer in zip(trials, answers, strict=True):
            prompt = torch.tensor([list(trial.tokens)])
            twin.generate(
                prompt, attention_mask=torch.ones_like(prompt), do_sample=False, pad_token_id=stop[0],
                max_new_tokens=max(1, answer.steps), min_new_tokens=max(1, answer.steps),
            )  # fmt: skip

    return timed(run)


def main() -> None:
    """Print the table."""
    model = mh.load("smollm2")
    print(f"torch threads: {torch.get_num_threads()}; {REPEATS} repeats, median seconds a trial")
    print(f"{'context':>8} {'plain generate':>15} {'captured':>10} {'all methods':>12} {'captured/plain':>15}")
    for length in (256, 1024):
        trials = mh.datasets.needles("passkey", model, n=4, context_length=length, split=None)
        n = len(trials)
        base = plain(model, trials) / n
        captured = timed(lambda trials=trials: [capture(model, [t]) for t in trials]) / n
        ca = mh.CircuitAnalysis(model, progress=False)
        scored = timed(
            lambda trials=trials, ca=ca: ca.score(["locos", "attention_spatial", "dla"], trials, batch_size=1)
        )
        print(f"{length:>8} {base:>15.2f} {captured:>10.2f} {scored / n:>12.2f} {captured / base:>15.2f}")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the process: {peak:.2f} GiB")


if __name__ == "__main__":
    main()
