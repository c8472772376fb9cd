"""Trials: needles in a haystack, several documents, published sets, and control tasks whose answer is not there."""

from __future__ import annotations

from mechheads.datasets.documents import documents
from mechheads.datasets.haystack import Haystack
from mechheads.datasets.hub_files import Hub, hub
from mechheads.datasets.needle_trials import KINDS, arithmetic, needles, recall
from mechheads.datasets.niah import niah
from mechheads.datasets.nolima import nolima
from mechheads.datasets.ruler import VARIANTS, ruler

__all__ = [
    "KINDS",
    "VARIANTS",
    "Haystack",
    "Hub",
    "arithmetic",
    "documents",
    "hub",
    "needles",
    "niah",
    "nolima",
    "recall",
    "ruler",
]
