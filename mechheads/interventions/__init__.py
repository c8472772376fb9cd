"""Interventions: frozen values that say what to do to which heads, and one place that does it."""

from mechheads.interventions.applying import apply
from mechheads.interventions.reference import mean_activation, positional_mean
from mechheads.interventions.values import (
    Intervention,
    attention_bias,
    mean_ablation,
    mean_positional_ablation,
    patch,
    prune,
    resample_ablation,
    zero_ablation,
)

__all__ = [
    "Intervention",
    "apply",
    "attention_bias",
    "mean_ablation",
    "mean_activation",
    "mean_positional_ablation",
    "patch",
    "positional_mean",
    "prune",
    "resample_ablation",
    "zero_ablation",
]
