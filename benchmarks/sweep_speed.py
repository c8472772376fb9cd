"""A top-k ablation sweep with random controls: the engine against the loop everybody writes first.

The loop: for each head set and each trial, a hook on every layer that has a head of the set, the whole prompt, then the
answer token by token with a KV cache. The engine runs the same cells in blocks. Both on the same model in the same
process; their answers must be equal and their log-probabilities agree within 1e-4, or nothing is printed.

Run with ``OMP_NUM_THREADS=1 python benchmarks/sweep_speed.py``, or with two threads; ``--memory 500`` watches memory
over so many cells instead.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Sequence

import torch

import mechheads as mh
from mechheads.decode import greedy
from mechheads.head_set_runs import Ask, run_head_sets
from mechheads.heads import HeadSet, draw_random_heads
from mechheads.interventions import Intervention, apply
from mechheads.model import Model


def head_sets(model: Model, ranking: HeadSet, sizes: Sequence[int], draws: int) -> list[HeadSet]:
    """The baseline, the first k of the ranking, and random sets of as many other heads."""
    shape = (model.spec.n_layers, model.spec.n_heads)
    out = [HeadSet(), *(ranking[:k] for k in sizes)]
    tested = ranking[: max(sizes)]
    for k in sizes:
        out += [draw_random_heads(*shape, k, seed=100 * k + draw, exclude=tested) for draw in range(draws)]
    return out


def loop(
    model: Model, prompts: Sequence[Sequence[int]], sets: Sequence[HeadSet], mean: Intervention, longest: int
) -> tuple[list, float]:
    """One trial at a time under one head set at a time; processor seconds with it."""
    began = time.process_time()
    out = []
    for heads in sets:
        for prompt in prompts:
            with apply(model, mean.on(heads)):
                (one,) = greedy(model, [prompt], max_new_tokens=longest, stop_at_newline=True)
            out.append((one.tokens, one.logprobs))
    return out, time.process_time() - began


def blocks(
    model: Model,
    prompts: Sequence[Sequence[int]],
    sets: Sequence[HeadSet],
    mean: Intervention,
    longest: int,
    per_block: int,
) -> tuple[list, float]:
    """The same cells in blocks; processor seconds with it."""
    began = time.process_time()
    asks = [Ask(tuple(prompt), generate=True) for prompt in prompts]
    order = sorted(range(len(sets)), key=lambda i: min((h.layer for h in sets[i]), default=model.spec.n_layers))
    found = {}
    for start in range(0, len(order), per_block):
        some = order[start : start + per_block]
        programs = [((0, sets[i]),) if sets[i] else () for i in some]
        told = run_head_sets(model, asks, [mean], programs, max_new_tokens=longest)
        found |= {(i, p): told[p][n].decoded for n, i in enumerate(some) for p in range(len(prompts))}
    out = [(found[i, p].tokens, found[i, p].logprobs) for i in range(len(sets)) for p in range(len(prompts))]
    return out, time.process_time() - began


def difference(a: list, b: list) -> float:
    """Largest difference in log-probability of two lists of answers, whose tokens must be equal."""
    worst = 0.0
    for i, ((tokens, logprobs), (others, theirs)) in enumerate(zip(a, b, strict=True)):
        if tokens != others:
            raise SystemExit(f"answer {i} differs: {tokens} and {others}; no time is worth printing.")
        worst = max([worst, *(abs(x - y) for x, y in zip(logprobs, theirs, strict=True))])
    return worst


def peak() -> float:
    """Most memory this process has held so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    """Time both, and print what they cost."""
    parser = argparse.ArgumentParser(description="Cost of an ablation sweep.")
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--trials", type=int, default=6)
    parser.add_argument("--context", type=int, default=160, help="prompt length, tokens")
    parser.add_argument("--k", type=int, nargs="+", default=[1, 5, 10, 20, 50])
    parser.add_argument("--draws", type=int, default=3)
    parser.add_argument("--longest", type=int, default=10, help="longest answer, tokens")
    parser.add_argument("--per-block", type=int, default=32)
    parser.add_argument("--memory", type=int, default=0, metavar="CELLS", help="watch memory over so many cells")
    args = parser.parse_args()
    torch.set_num_threads(torch.get_num_threads())
    model = mh.load(args.model)
    needles = mh.datasets.needles("passkey", model, n=2 * args.trials, context_length=args.context, seed=0)
    calibration, test = needles[: args.trials], needles[args.trials :]
    scores = mh.CircuitAnalysis(model, progress=False).score("locos", calibration)
    mean = mh.mean_ablation(reference=calibration).prepare(model)
    sets = head_sets(model, scores.ranking(), args.k, args.draws)
    prompts = [trial.tokens for trial in test]
    if args.memory:
        watch(model, prompts, sets, mean, args)
        return
    ours, fast = blocks(model, prompts, sets, mean, args.longest, args.per_block)
    theirs, slow = loop(model, prompts, sets, mean, args.longest)
    worst = difference(ours, theirs)
    print(
        f"{args.model}, {torch.get_num_threads()} thread(s): {len(sets)} head sets (k = {args.k}, {args.draws} random "
        f"draws each), {len(prompts)} prompts of {args.context} tokens, answers of up to {args.longest}"
    )
    print(f"loop    {slow:8.1f} s processor time  {slow / len(ours):.3f} s a trial and cell")
    print(f"engine  {fast:8.1f} s processor time  {fast / len(ours):.3f} s a trial and cell   {slow / fast:.2f} times "
          f"faster; tokens equal, log-probabilities within {worst:.0e}")  # fmt: skip


def watch(
    model: Model, prompts: Sequence[Sequence[int]], sets: list[HeadSet], mean: Intervention, args: argparse.Namespace
) -> None:
    """Run cells again and again, and print the most memory held."""
    done = 0
    print(f"{args.model}: peak memory as cells are run\n{'cells':>8}{'MiB':>10}")
    while done < args.memory:
        blocks(model, prompts, sets, mean, args.longest, args.per_block)
        done += len(sets)
        print(f"{done:8d}{peak():10.0f}", flush=True)


if __name__ == "__main__":
    main()
