"""Statistics of ablation sweeps: areas, comparisons, dissociation, agreement of interventions, dose and response.

Everything takes a ``SweepResult`` or a ``SweepSet`` and returns a tidy table (or a frozen record of some), in whose
``attrs`` level, number of samples and seed stand. Equations, units and signs: ``docs/sweep_statistics.md``.
"""

from __future__ import annotations

from mechheads.sweep_stats.agreeing import InterventionAgreement, compare_interventions
from mechheads.sweep_stats.comparing import compare_rankings
from mechheads.sweep_stats.dissociating import task_dissociation
from mechheads.sweep_stats.doses import dose_response
from mechheads.sweep_stats.paragraph import verdict
from mechheads.sweep_stats.ratio import Ratio
from mechheads.sweep_stats.sides import necessity_sufficiency
from mechheads.sweep_stats.whole_curves import areas, minimal_k

__all__ = [
    "InterventionAgreement",
    "Ratio",
    "areas",
    "compare_interventions",
    "compare_rankings",
    "dose_response",
    "minimal_k",
    "necessity_sufficiency",
    "task_dissociation",
    "verdict",
]
