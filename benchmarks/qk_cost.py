"""What the QK-scores of a question cost beside a plain forward of the same prompt.

Prints a table; run with ``make bench``. The claim under test: at most 1.15 times. The plain forward is Hugging Face's
own model on scaled-dot-product attention, of the same batch, last logits only.
"""

from __future__ import annotations

import time
from statistics import median
from typing import Any

import torch

import mechheads as mh
from mechheads.candidates import capture_candidates
from mechheads.decode import pad

REPEATS = 5
QUESTIONS = 8


@torch.no_grad()
def main() -> None:
    """Print the table; the two are timed in turn, so that a busy machine slows both."""
    print(f"torch threads: {torch.get_num_threads()}; {REPEATS} repeats, median seconds a question")
    print(f"{'model':>8} {'tokens':>7} {'batch':>6} {'forward':>8} {'score':>8} {'ratio':>6} {'of it twin check':>17}")
    for name, depths in (("smollm2", ((1,), (3,), (6,))), ("nano", ((3,),))):
        model = mh.load(name)
        ca = mh.CircuitAnalysis(model, progress=False)
        for depth in depths:
            trials = mh.datasets.prontoqa(model, n=QUESTIONS, depth=depth, distractors=5, calibration=None)
            for batch in (1, QUESTIONS):
                _row(ca, name, list(trials), batch)


def _row(ca: mh.CircuitAnalysis, name: str, trials: list[mh.Trial], batch: int) -> None:
    """One line of the table."""
    model: Any = ca.model
    backend = model.backend
    seconds: dict[str, list[float]] = {"forward": [], "score": [], "check": []}
    parts = [trials[i : i + batch] for i in range(0, len(trials), batch)]
    for _ in range(REPEATS):
        start = time.perf_counter()
        for part in parts:
            tokens, mask = pad([t.tokens for t in part], "left", backend.device)
            backend.twin.model(input_ids=tokens, attention_mask=mask, logits_to_keep=1, use_cache=False)
        seconds["forward"].append(time.perf_counter() - start)
        start = time.perf_counter()
        for part in parts:
            captures = capture_candidates(model, part)
            for one in captures:
                for layer in range(model.spec.n_layers):
                    acts = one.layer(layer)
                    mh.methods.get_method("qk").function(acts, one.trial)
        seconds["score"].append(time.perf_counter() - start)
        start = time.perf_counter()
        for _part in parts:
            backend.fast_prefill()
        seconds["check"].append(time.perf_counter() - start)
    plain, score, check = (median(seconds[key]) / len(trials) for key in ("forward", "score", "check"))
    longest = max(len(t.tokens) for t in trials)
    line = f"{name:>8} {longest:>7} {batch:>6} {plain:>8.3f} {score:>8.3f} {score / plain:>6.2f} {check:>17.3f}"
    print(line, flush=True)


if __name__ == "__main__":
    main()
