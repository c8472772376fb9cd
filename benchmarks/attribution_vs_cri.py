"""How far attribution patching agrees with patching itself, and what each costs.

Prints two tables; run with ``python benchmarks/attribution_vs_cri.py``. Costs are in seconds and in multiples of a
capture, the one pass that serves all single-pass detectors.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pandas as pd
import torch

import mechheads as mh
from mechheads.capture import capture
from mechheads.methods.causal import attribution_patching, cri
from mechheads.model import Model
from mechheads.trials import TrialSet

Result = TypeVar("Result")
CRI, OTHER = "cri logit_diff", "cri logprob (same runs)"


def seconds(function: Callable[[], Result]) -> tuple[float, Result]:
    """Processor seconds of one call, which other programs on the machine do not change."""
    start = time.process_time()
    out = function()
    return time.process_time() - start, out


def rank_correlation(a: np.ndarray, b: np.ndarray) -> float:
    """Spearman's, over all heads."""
    x, y = (pd.Series(m.ravel()).rank() for m in (a, b))
    return float(np.corrcoef(x, y)[0, 1])


def overlap(a: np.ndarray, b: np.ndarray, k: int) -> float:
    """Share of the k highest heads that two maps have in common."""
    return len(set(np.argsort(-a.ravel())[:k]) & set(np.argsort(-b.ravel())[:k])) / k


def run(model: Model, trials: TrialSet, steps: list[int]) -> tuple[dict[str, list[np.ndarray]], dict[str, list[float]]]:
    """Score maps and seconds of every method on every trial; trials that the model does not answer are left out."""
    maps: dict[str, list[np.ndarray]] = {}
    spent: dict[str, list[float]] = {}
    variants = [("logit_diff", n) for n in steps] + [("logprob", 1)]
    capture(model, [trials[0]])  # the first pass warms up
    for trial in trials:
        took, found = seconds(lambda trial=trial: cri(model, trial))
        if found["score"].isnan().any():
            continue
        rows = [(CRI, took, found["score"]), (OTHER, took, found["logprob"])]
        for metric, n in variants:
            took, score = seconds(
                lambda trial=trial, metric=metric, n=n: attribution_patching(model, trial, metric=metric, steps=n)
            )
            rows.append((f"attribution {metric}, steps={n}", took, score))
        for name, took, score in rows:
            maps.setdefault(name, []).append(score.numpy())
            spent.setdefault(name, []).append(took)
        spent.setdefault("capture", []).append(seconds(lambda trial=trial: capture(model, [trial]))[0])
        print(f"{trial.id} done", file=sys.stderr, flush=True)
    return maps, spent


def main() -> None:
    """Print what each costs, then how each attribution compares with cri of the same metric."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--n", type=int, default=3)
    parser.add_argument("--context-length", type=int, default=160)
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 3])
    args = parser.parse_args()
    model = mh.load("smollm2")
    trials = mh.datasets.needles("passkey", model, n=args.n, context_length=args.context_length, seed=0, chat=True)
    maps, spent = run(model, trials, args.steps)
    answered = len(maps.get(CRI, []))
    print(f"{model.spec.name}, {model.spec.n_layers} x {model.spec.n_heads} heads, torch threads: ", end="")
    print(f"{torch.get_num_threads()}; {answered} of {len(trials)} passkey trials answered, prompts of ", end="")
    print(f"{min(len(t.tokens) for t in trials)} to {max(len(t.tokens) for t in trials)} tokens")
    if not answered:
        return
    print(f"\n{'cost':<34} {'CPU s a trial':>13} {'captures':>9}")
    for name, times in spent.items():
        print(f"{name:<34} {np.mean(times):>13.2f} {np.sum(times) / np.sum(spent['capture']):>9.1f}")
    print("\nagreement with cri of the same metric: Spearman by trial and of the mean map, top-k overlap of mean maps")
    print(f"{'':<34} {'by trial':>9} {'of mean':>8} {'top 5':>6} {'top 10':>7} {'top 20':>7}")
    for name, found in maps.items():
        if name in (CRI, OTHER):
            continue
        truth = maps[CRI if "logit_diff" in name else OTHER]
        each = np.mean([rank_correlation(a, b) for a, b in zip(found, truth, strict=True)])
        a, b = np.mean(found, axis=0), np.mean(truth, axis=0)
        print(f"{name:<34} {each:>9.3f} {rank_correlation(a, b):>8.3f} {overlap(a, b, 5):>6.2f} ", end="")
        print(f"{overlap(a, b, 10):>7.2f} {overlap(a, b, 20):>7.2f}")


if __name__ == "__main__":
    main()
