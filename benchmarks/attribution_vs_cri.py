"""How far attribution patching agrees with patching itself, and what each costs.

Prints two tables; run with ``python benchmarks/attribution_vs_cri.py``. Costs are in multiples of a capture, the one
pass that serves all single-pass detectors.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import numpy as np
import torch
from scipy.stats import spearmanr

import mechheads as mh
from mechheads.capture import capture
from mechheads.methods.causal import attribution_patching, cri

METRICS = ("logit_diff", "logprob")


def seconds(function: Callable[[], object]) -> tuple[float, object]:
    """Time one call."""
    start = time.perf_counter()
    out = function()
    return time.perf_counter() - start, out


def overlap(a: np.ndarray, b: np.ndarray, k: int) -> float:
    """Share of the k highest heads that two maps have in common."""
    return len(set(np.argsort(-a.ravel())[:k]) & set(np.argsort(-b.ravel())[:k])) / k


def main() -> None:
    """Score the trials both ways and print how the two compare, trial by trial and on their mean."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--context-length", type=int, default=160)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3])
    args = parser.parse_args()
    model = mh.load("smollm2")
    trials = mh.datasets.needles(
        "passkey", model, n=args.n, context_length=args.context_length, seed=0, chat=True
    )  # fmt: skip
    capture(model, [trials[0]])  # the first pass warms up
    base = [seconds(lambda t=t: capture(model, [t]))[0] for t in trials]
    maps: dict[str, list[np.ndarray]] = {}
    spent: dict[str, list[float]] = {}

    def note(name: str, took: float, value: torch.Tensor) -> None:
        maps.setdefault(name, []).append(value.numpy())
        spent.setdefault(name, []).append(took)

    for trial in trials:
        took, found = seconds(lambda t=trial: cri(model, t))
        note("cri logit_diff", took, found["score"])
        note("cri logprob", took, found["logprob"])
        for metric in METRICS:
            for steps in args.steps:
                run = lambda t=trial, m=metric, s=steps: attribution_patching(model, t, metric=m, steps=s)  # noqa: E731
                note(f"attribution {metric}, {steps} steps", *seconds(run))
    said = [not np.isnan(m).any() for m in maps["cri logit_diff"]]
    tokens = sum(len(t.tokens) for t in trials) / len(trials)
    print(f"{model.spec.name}, {len(trials)} passkey trials of about {tokens:.0f} tokens, {sum(said)} answered;")
    print(f"torch threads: {torch.get_num_threads()}; a capture takes {np.mean(base):.2f} s")
    print(f"\n{'method':<32} {'s a trial':>10} {'captures':>9}")
    for name, times in spent.items():
        print(f"{name:<32} {np.mean(times):>10.2f} {np.sum(times) / np.sum(base):>9.1f}")
    print(
        f"\n{'against cri of the same metric':<32} {'Spearman':>9} {'of the mean':>12} {'top 5':>6} {'10':>5} {'20':>5}"
    )
    for name in maps:
        if name.startswith("cri"):
            continue
        metric = name.split()[1].rstrip(",")
        pairs = [(a, b) for a, b, ok in zip(maps[name], maps[f"cri {metric}"], said, strict=True) if ok]
        each = np.mean([spearmanr(a.ravel(), b.ravel()).statistic for a, b in pairs])
        mean_a, mean_b = (np.mean([pair[i] for pair in pairs], axis=0) for i in (0, 1))
        whole = spearmanr(mean_a.ravel(), mean_b.ravel()).statistic
        tops = " ".join(f"{overlap(mean_a, mean_b, k):>5.2f}" for k in (5, 10, 20))
        print(f"{name:<32} {each:>9.3f} {whole:>12.3f} {tops:>18}")


if __name__ == "__main__":
    main()
