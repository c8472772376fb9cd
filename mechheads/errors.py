"""The errors mechheads raises, and the near-match helper they share.

Every message names the value that was refused, what was expected, and what to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Any


class MechheadsError(Exception):
    """Base of every error raised on purpose by mechheads.

    Attributes:
        partial: Results that were finished before the error, by method; empty where there are none.
    """

    partial: dict[str, Any] = {}  # noqa: RUF012 (replaced, never changed)


class InvalidInput(MechheadsError, ValueError):
    """A value given by the caller cannot be used."""


class UnknownName(InvalidInput):
    """A method, site, model, split or data set name that nobody registered."""

    def __init__(self, kind: str, name: object, known: Iterable[str], *, hint: str = ""):
        known = sorted(known)
        near = difflib.get_close_matches(str(name), known, n=3, cutoff=0.5)
        message = f"unknown {kind} {name!r}."
        if near:
            message += f" Did you mean {' or '.join(repr(n) for n in near)}?"
        message += f" Known: {', '.join(known) if known else '(none)'}."
        super().__init__(f"{message} {hint}".rstrip())


class ModelRefused(MechheadsError, RuntimeError):
    """A model breaks an identity that the scores rest on, so no score is returned."""


class HookNeverFired(MechheadsError, RuntimeError):
    """An intervention was installed and the model ran, but its hook was never called."""


class ResultFileError(MechheadsError, ValueError):
    """A result file is damaged, foreign, or written by a newer mechheads."""


class OutputNotWritable(MechheadsError, OSError):
    """The folder or file for results cannot be written."""
