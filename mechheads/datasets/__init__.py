"""Trials: needles in a haystack, and control tasks whose answer is not in the context."""

from __future__ import annotations

from mechheads.datasets.needle_trials import KINDS, arithmetic, needles, recall

__all__ = ["KINDS", "arithmetic", "needles", "recall"]
