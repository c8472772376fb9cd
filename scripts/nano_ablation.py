"""Which head of nano retrieves, and what is left without it: prints the table of docs/nano.md.

Usage: python scripts/nano_ablation.py [trials]
"""

from __future__ import annotations

import sys
import warnings

import mechheads as mh

K = (1, 2)
METRIC = "correct"


def main(n: int = 200) -> None:
    """Score on calibration trials, mean-ablate on test trials; random heads and memorised tasks are the controls."""
    ca = mh.CircuitAnalysis("nano", progress=False)
    model = ca.model
    needles = mh.nano.retrieval(model, n=n, seed=1)
    literal = mh.nano.retrieval(model, n=n, literal=True, seed=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        locos = ca.score("locos", needles.split("calibration"), max_new_tokens=3, batch_size=16)
    tasks = {
        "non-literal": needles.split("test"),
        "literal": literal.split("test"),
        "recall": mh.nano.recall(model, n=54),
        "arithmetic": mh.nano.arithmetic(model, n=100),
    }
    sweep = ca.sweep(
        {"locos": locos},
        k=K,
        trials=tasks,
        intervention=mh.mean_ablation(reference=needles.split("calibration")),
        controls=mh.random_heads(draws=7),
        max_new_tokens=2,
        batch_size=32,
    )
    rows = sweep.curve(METRIC)
    print(f"Best heads by LOCOS: {', '.join(f'{h} {locos.score_of(h):.2f}' for h in locos.top(4))}\n")
    print(f"| mean-ablated | {' | '.join(tasks)} |\n| --- |{' --- |' * len(tasks)}")
    named = [("locos", 0, "no ablation")]
    named += [("locos", k, f"best {k} by LOCOS") for k in K] + [("random", k, f"{k} random") for k in K]
    for ranking, k, told in named:
        some = rows[(rows["ranking"] == ranking) & (rows["k"] == k)].set_index("task")
        cells = [
            f"{r['mean']:.2f} [{r['ci_low']:.2f}, {r['ci_high']:.2f}]" for _, r in some.loc[list(tasks)].iterrows()
        ]
        print(f"| {told} | {' | '.join(cells)} |")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
