"""Results as plotly figures. Every function returns a ``Figure`` and shows nothing."""

from __future__ import annotations

from mechheads.plots.accuracy_map import accuracy_heatmap
from mechheads.plots.agreement import agreement_matrix, overlap_curves
from mechheads.plots.calibration import calibration_curve
from mechheads.plots.controls import control_scatter
from mechheads.plots.curves import ablation_curve, ablation_curves
from mechheads.plots.depths import accuracy_profile
from mechheads.plots.describe import describe
from mechheads.plots.doses import dose_response_plot
from mechheads.plots.forest import ablation_forest
from mechheads.plots.heatmap import head_heatmap, score_heatmaps
from mechheads.plots.kv_groups import kv_group_view
from mechheads.plots.premises import premise_curves
from mechheads.plots.profile import layer_profile
from mechheads.plots.scatter import method_scatter
from mechheads.plots.style import template
from mechheads.plots.sweep_grid import intervention_curves, necessity_curves
from mechheads.plots.transfers import transfer_matrix
from mechheads.plots.verdict_lines import verdict_curves
from mechheads.plots.wording import debias_plot

__all__ = [
    "ablation_curve",
    "ablation_curves",
    "ablation_forest",
    "accuracy_heatmap",
    "accuracy_profile",
    "agreement_matrix",
    "calibration_curve",
    "control_scatter",
    "debias_plot",
    "describe",
    "dose_response_plot",
    "head_heatmap",
    "intervention_curves",
    "kv_group_view",
    "layer_profile",
    "method_scatter",
    "necessity_curves",
    "overlap_curves",
    "premise_curves",
    "score_heatmaps",
    "template",
    "transfer_matrix",
    "verdict_curves",
]
