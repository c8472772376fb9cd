"""Random parts of a set of trials that keep groups whole."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def draw_groups(groups: Sequence[str], classes: np.ndarray, quota: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Whole groups in random order, each taken if no class goes over its quota.

    Args:
        groups: ``[trial]`` names.
        classes: ``[trial]`` class of each trial, from 0.
        quota: ``[class]`` how many trials of each class to take at most.
        rng: Source of randomness; groups are shuffled by name, whatever the trials' order.

    Returns:
        Places of the trials taken, rising.
    """
    names, codes = np.unique(np.asarray(groups, dtype=str), return_inverse=True)
    made_of = np.zeros((len(names), len(quota)), dtype=np.int64)
    np.add.at(made_of, (codes, classes), 1)
    left, taken = np.array(quota, dtype=np.int64), np.zeros(len(names), dtype=bool)
    for i in rng.permutation(len(names)):
        if (made_of[i] <= left).all():
            left -= made_of[i]
            taken[i] = True
            if not left.any():
                break
    return np.flatnonzero(taken[codes])
