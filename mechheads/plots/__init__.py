"""Results as plotly figures. Every function returns a ``Figure`` and shows nothing."""

from __future__ import annotations

from mechheads.plots.agreement import agreement_matrix, overlap_curves
from mechheads.plots.curves import ablation_curve, ablation_curves
from mechheads.plots.describe import describe
from mechheads.plots.forest import ablation_forest
from mechheads.plots.heatmap import head_heatmap, score_heatmaps
from mechheads.plots.kv_groups import kv_group_view
from mechheads.plots.profile import layer_profile
from mechheads.plots.scatter import method_scatter
from mechheads.plots.style import template

__all__ = [
    "ablation_curve",
    "ablation_curves",
    "ablation_forest",
    "agreement_matrix",
    "describe",
    "head_heatmap",
    "kv_group_view",
    "layer_profile",
    "method_scatter",
    "overlap_curves",
    "score_heatmaps",
    "template",
]
