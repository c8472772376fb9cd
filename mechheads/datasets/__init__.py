"""Trials: needles in a haystack, several documents, published sets, and control tasks whose answer is not there."""

from __future__ import annotations

from mechheads.datasets.documents import documents
from mechheads.datasets.haystack import Haystack
from mechheads.datasets.hub_files import Hub, hub
from mechheads.datasets.logic import (
    LogicQuestion,
    LogicTemplate,
    build_trials,
    flipped,
    logic_template,
    question_of,
    rebuild,
    statement_only,
)
from mechheads.datasets.logic_build import prontoqa, world_questions
from mechheads.datasets.logic_files import folio, multi_logieval, pararule_plus, proofwriter
from mechheads.datasets.logic_prontoqa import prontoqa_ood
from mechheads.datasets.logic_worlds import RULES
from mechheads.datasets.needle_trials import KINDS, arithmetic, needles, recall
from mechheads.datasets.niah import niah
from mechheads.datasets.nolima import nolima
from mechheads.datasets.ruler import VARIANTS, ruler

__all__ = [
    "KINDS",
    "RULES",
    "VARIANTS",
    "Haystack",
    "Hub",
    "LogicQuestion",
    "LogicTemplate",
    "arithmetic",
    "build_trials",
    "documents",
    "flipped",
    "folio",
    "hub",
    "logic_template",
    "multi_logieval",
    "needles",
    "niah",
    "nolima",
    "pararule_plus",
    "prontoqa",
    "prontoqa_ood",
    "proofwriter",
    "question_of",
    "rebuild",
    "recall",
    "ruler",
    "statement_only",
    "world_questions",
]
