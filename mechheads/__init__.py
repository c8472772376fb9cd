"""Score the attention heads of a language model, and prove the scores by intervening.

Every public name is imported when it is first used, so ``import mechheads`` is quick, and a saved result
opens and draws where torch is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# Each public name and the module that defines it. The imports under TYPE_CHECKING say the same to type
# checkers; tests/test_import.py holds the two together.
_HOME = {
    "Head": "heads",
    "HeadSet": "heads",
    "Span": "trials",
    "Trial": "trials",
    "TrialSet": "trials",
    "HeadScores": "scores",
    "CandidateScores": "candidate_scores",
    "SweepResult": "scores",
    "MechheadsError": "errors",
    "InvalidInput": "errors",
    "UnknownName": "errors",
    "ModelRefused": "errors",
    "HookNeverFired": "errors",
    "ResultFileError": "errors",
    "OutputNotWritable": "errors",
    "load": "model",
    "Model": "model",
    "CircuitAnalysis": "analysis",
    "method": "methods",
    "LayerActs": "capture",
    "Intervention": "interventions",
    "zero_ablation": "interventions",
    "mean_ablation": "interventions",
    "random_heads": "sweep_controls",
    "CellStore": "cell_store",
    "Controls": "sweep_sets",
    "LocalEngine": "engines",
    "Outcome": "tasks",
    "RayEngine": "engines",
    "SweepSet": "sweep_set",
    "Task": "tasks",
    "Threshold": "sweep_sets",
    "attention_bias": "interventions",
    "load_study": "study",
    "mean_positional_ablation": "interventions",
    "patch": "interventions",
    "prune": "interventions",
    "resample_ablation": "interventions",
    "run_study": "study_run",
    "save_pruned": "pruned_models",
    "read_heads": "head_files",
    "write_heads": "head_files",
    "TunedLens": "lens",
    "load_lens": "lens_files",
    "fit_lens": "lens_fit",
}
_SUBMODULES = ("agreement", "datasets", "nano", "plots", "stats", "verdicts")

__all__ = [
    "CandidateScores",
    "CellStore",
    "CircuitAnalysis",
    "Controls",
    "Head",
    "HeadScores",
    "HeadSet",
    "HookNeverFired",
    "Intervention",
    "InvalidInput",
    "LayerActs",
    "LocalEngine",
    "MechheadsError",
    "Model",
    "ModelRefused",
    "Outcome",
    "OutputNotWritable",
    "RayEngine",
    "ResultFileError",
    "Span",
    "SweepResult",
    "SweepSet",
    "Task",
    "Threshold",
    "Trial",
    "TrialSet",
    "TunedLens",
    "UnknownName",
    "__version__",
    "agreement",
    "attention_bias",
    "datasets",
    "fit_lens",
    "load",
    "load_lens",
    "load_study",
    "mean_ablation",
    "mean_positional_ablation",
    "method",
    "nano",
    "patch",
    "plots",
    "prune",
    "random_heads",
    "read_heads",
    "resample_ablation",
    "run_study",
    "save_pruned",
    "stats",
    "verdicts",
    "write_heads",
    "zero_ablation",
]

if TYPE_CHECKING:
    from mechheads import agreement, datasets, nano, plots, stats, verdicts
    from mechheads.analysis import CircuitAnalysis
    from mechheads.candidate_scores import CandidateScores
    from mechheads.capture import LayerActs
    from mechheads.cell_store import CellStore
    from mechheads.engines import LocalEngine, RayEngine
    from mechheads.errors import (
        HookNeverFired,
        InvalidInput,
        MechheadsError,
        ModelRefused,
        OutputNotWritable,
        ResultFileError,
        UnknownName,
    )
    from mechheads.head_files import read_heads, write_heads
    from mechheads.heads import Head, HeadSet
    from mechheads.interventions import (
        Intervention,
        attention_bias,
        mean_ablation,
        mean_positional_ablation,
        patch,
        prune,
        resample_ablation,
        zero_ablation,
    )
    from mechheads.lens import TunedLens
    from mechheads.lens_files import load_lens
    from mechheads.lens_fit import fit_lens
    from mechheads.methods import method
    from mechheads.model import Model, load
    from mechheads.pruned_models import save_pruned
    from mechheads.scores import HeadScores, SweepResult
    from mechheads.study import load_study
    from mechheads.study_run import run_study
    from mechheads.sweep_controls import random_heads
    from mechheads.sweep_set import SweepSet
    from mechheads.sweep_sets import Controls, Threshold
    from mechheads.tasks import Outcome, Task
    from mechheads.trials import Span, Trial, TrialSet


def __getattr__(name: str) -> Any:
    """Import the module behind a public name on first use, and remember the value."""
    if name in _SUBMODULES:
        return importlib.import_module(f"{__name__}.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{home}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """Public names too, though most of them are not imported yet."""
    return sorted({*globals(), *__all__})
