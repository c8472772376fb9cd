"""How heads are judged by their candidate scores: what they answer, how sure that is, what it is worth elsewhere."""

from __future__ import annotations

from mechheads.verdicts.debias import Debias, debias
from mechheads.verdicts.decisions import accuracy, align, baseline_credit, credit, label_credit, offsets
from mechheads.verdicts.depth import DepthProfile, depth_profile
from mechheads.verdicts.discrimination import auroc
from mechheads.verdicts.evaluation import Evaluation, evaluate
from mechheads.verdicts.judgement import Judgement, judge
from mechheads.verdicts.learning import LearningCurve, learning_curve
from mechheads.verdicts.permutation import PermutationTest, permutation_test
from mechheads.verdicts.selection import select
from mechheads.verdicts.transferring import Transfer, transfer

__all__ = [
    "Debias",
    "DepthProfile",
    "Evaluation",
    "Judgement",
    "LearningCurve",
    "PermutationTest",
    "Transfer",
    "accuracy",
    "align",
    "auroc",
    "baseline_credit",
    "credit",
    "debias",
    "depth_profile",
    "evaluate",
    "judge",
    "label_credit",
    "learning_curve",
    "offsets",
    "permutation_test",
    "select",
    "transfer",
]
