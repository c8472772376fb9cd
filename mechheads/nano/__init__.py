"""nano: a tiny model of our own that truly works, for tests, notebooks and documentation.

``mh.load("nano")`` loads it; ``retrieval``, ``recall`` and ``arithmetic`` make trials in its language, and so does
``mh.datasets.prontoqa(model, ...)`` for logic. ``python -m mechheads.nano.train`` trains it from scratch.
"""

from __future__ import annotations

from mechheads.nano.tasks import TASKS, arithmetic, recall, retrieval, trials

__all__ = ["TASKS", "arithmetic", "recall", "retrieval", "trials"]
