"""Trials: needles in a haystack, several documents, published sets, running text, and controls without a needle."""

from __future__ import annotations

from mechheads.datasets.arithmetic_files import calculations, completions
from mechheads.datasets.babilong import babilong
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
from mechheads.datasets.musique import musique
from mechheads.datasets.needle_trials import KINDS, arithmetic, needles, recall
from mechheads.datasets.niah import niah
from mechheads.datasets.nolima import nolima
from mechheads.datasets.recall_files import popqa, relations, with_aliases
from mechheads.datasets.ruler import VARIANTS, ruler
from mechheads.datasets.windows import text_windows

__all__ = [
    "KINDS",
    "RULES",
    "VARIANTS",
    "Haystack",
    "Hub",
    "LogicQuestion",
    "LogicTemplate",
    "arithmetic",
    "babilong",
    "build_trials",
    "calculations",
    "completions",
    "documents",
    "flipped",
    "folio",
    "hub",
    "logic_template",
    "multi_logieval",
    "musique",
    "needles",
    "niah",
    "nolima",
    "pararule_plus",
    "popqa",
    "prontoqa",
    "prontoqa_ood",
    "proofwriter",
    "question_of",
    "rebuild",
    "recall",
    "relations",
    "ruler",
    "statement_only",
    "text_windows",
    "with_aliases",
    "world_questions",
]
