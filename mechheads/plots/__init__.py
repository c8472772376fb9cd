"""Results as plotly figures. Every function returns a ``Figure`` and shows nothing."""

from __future__ import annotations

from mechheads.plots.curves import ablation_curve, ablation_curves
from mechheads.plots.describe import describe
from mechheads.plots.heatmap import head_heatmap, score_heatmaps
from mechheads.plots.style import template

__all__ = ["ablation_curve", "ablation_curves", "describe", "head_heatmap", "score_heatmaps", "template"]
