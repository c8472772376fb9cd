"""Where a number came from: versions, options, hashes, all as plain JSON."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import math
import platform
from collections.abc import Mapping
from datetime import datetime, timezone
from typing import Any

import numpy as np

from mechheads.errors import InvalidInput

PACKAGES = ("mechheads", "torch", "transformers", "transformer_lens", "numpy")


def json_ready(obj: Any, *, where: str = "value") -> Any:
    """A copy of ``obj`` made only of dict, list, str, int, float, bool and None.

    Tuples become lists and numpy scalars become Python numbers, so that what is written is what
    is read back.

    Args:
        obj: The value to convert.
        where: Name of the value, for the error message.

    Raises:
        InvalidInput: Naming the key of the first value that JSON cannot hold (NaN and infinity
            included, and keys that are not text).
    """
    if isinstance(obj, np.generic):
        obj = obj.item()
    if obj is None or isinstance(obj, (bool, int)):
        return obj
    if isinstance(obj, str):
        return str(obj)
    if isinstance(obj, float):
        if math.isfinite(obj):
            return obj
        raise InvalidInput(f"{where} is {obj!r}, which JSON cannot hold; use None for an undefined number.")
    if isinstance(obj, Mapping):
        for key in obj:
            if not isinstance(key, str):
                raise InvalidInput(f"{where} has the key {key!r}; JSON keys must be text.")
        return {str(key): json_ready(value, where=f"{where}[{key!r}]") for key, value in obj.items()}
    if isinstance(obj, (list, tuple)):
        return [json_ready(value, where=f"{where}[{i}]") for i, value in enumerate(obj)]
    raise InvalidInput(
        f"{where} is a {type(obj).__name__} ({str(obj)[:60]!r}), which JSON cannot hold; give text, "
        "a number, a list, a dict or None."
    )


def canonical_json(obj: Any) -> str:
    """JSON text that is the same for equal content: keys sorted, no spaces, no NaN.

    Raises:
        InvalidInput: Naming the key of a value that JSON cannot hold.
    """
    return json.dumps(json_ready(obj), sort_keys=True, separators=(",", ":"), ensure_ascii=True)


def content_hash(obj: Any) -> str:
    """SHA-256 of ``canonical_json(obj)``, hex, the first 16 characters."""
    return hashlib.sha256(canonical_json(obj).encode()).hexdigest()[:16]


def package_versions() -> dict[str, str | None]:
    """Versions of Python and of the packages a score depends on.

    Read from the installed metadata, so that nothing heavy is imported. None = not installed.
    """
    versions: dict[str, str | None] = {"python": platform.python_version()}
    for name in PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            versions[name] = None
    return versions


def collect(
    model_spec: Mapping[str, Any],
    method: str,
    options: Mapping[str, Any],
    trials_name: str,
    trials_hash: str,
    trials_options: Mapping[str, Any],
    seed: int | None = None,
    **extra: Any,
) -> dict[str, Any]:
    """Provenance of one result as a JSON-ready dict.

    Args:
        model_spec: What identifies the model (name, revision or weight hash, dtype, weights, ...).
        method: Name of the scoring method or of the experiment.
        options: The options of the method, defaults included.
        trials_name: Name of the trial set.
        trials_hash: ``TrialSet.hash``.
        trials_options: ``TrialSet.options``.
        seed: Seed of the run, or None if nothing was random.
        **extra: Further JSON-ready values, kept at the top level.

    Returns:
        A dict with the keys ``model method options trials seed versions created`` and the extras;
        ``created`` is the UTC time in ISO 8601, ``trials`` holds ``name hash options``.

    Raises:
        InvalidInput: If a value is not JSON-ready, or an extra takes one of the names above.
    """
    meta: dict[str, Any] = {
        "model": dict(model_spec),
        "method": method,
        "options": dict(options),
        "trials": {"name": trials_name, "hash": trials_hash, "options": dict(trials_options)},
        "seed": seed,
        "versions": package_versions(),
        "created": datetime.now(timezone.utc).isoformat(timespec="seconds"),
    }
    taken = sorted(set(meta) & set(extra))
    if taken:
        raise InvalidInput(f"provenance already has the key {taken[0]!r}; give the extra value another name.")
    return json_ready({**meta, **extra}, where="provenance")
