"""How far score maps agree, how sure a ranking is, and what is left when heads are taken by group or by contrast."""

from __future__ import annotations

from mechheads.agreement.consensus import Consensus, consensus
from mechheads.agreement.dissociation import Dissociation, dissociation
from mechheads.agreement.groups import KVGroups, by_kv_group, kv_coverage, kv_ranking
from mechheads.agreement.pairs import Agreement, agreement
from mechheads.agreement.reliability import SplitHalf, TrialsNeeded, split_half, trials_needed
from mechheads.agreement.selectivity import Selectivity, selectivity

__all__ = [
    "Agreement",
    "Consensus",
    "Dissociation",
    "KVGroups",
    "Selectivity",
    "SplitHalf",
    "TrialsNeeded",
    "agreement",
    "by_kv_group",
    "consensus",
    "dissociation",
    "kv_coverage",
    "kv_ranking",
    "selectivity",
    "split_half",
    "trials_needed",
]
