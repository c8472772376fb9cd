"""The registry of scoring methods."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mechheads.capture import NEEDS
from mechheads.errors import InvalidInput, UnknownName
from mechheads.model import Model
from mechheads.trials import Trial, TrialSet

# Modules that register the built-in methods; imported on the first look-up.
_FAMILIES = ("locos", "attention", "patterns", "weights", "causal", "qk")
_REGISTRY: dict[str, Method] = {}

KINDS = ("capture", "weights", "causal", "candidates")
ROWS = ("answer", "generated")
# Query rows of the prompt that a method reads: positions, from the trial and the method's options.
PromptRows = Callable[[Trial, Mapping[str, Any]], Sequence[int]]


@dataclass(frozen=True)
class Method:
    """A scoring method.

    Attributes:
        name: What ``ca.score`` calls it.
        function: What computes it, by kind. Capture: ``(acts, trial, **options) -> Float[Tensor, "head"]``, a layer at
            a time. Weights: ``(model, layer, **options) -> Float[Tensor, "head"]``. Causal: ``(model, trial,
            **options) -> Float[Tensor, "layer head"]``. Each of these may return a dict of several such tensors whose
            key ``"score"`` is the score and whose other keys are kept as parts. Candidates: ``(acts, trial, **options)
            -> Float[Tensor, "candidate head"]``, a layer at a time, with ``CandidateActs``.
        needs: Which activations it reads, of ``q k v z pattern``.
        unit: Unit of the score.
        options: Its keyword options with their defaults.
        spans: Named spans a trial must have.
        builtin: Whether mechheads ships it.
        kind: ``"capture"`` (reads activations), ``"weights"`` (reads the model alone; its result has one trial called
            ``weights``), ``"causal"`` (runs the model itself) or ``"candidates"`` (reads candidate answers; its result
            is a ``CandidateScores``. An option called ``rotary`` says how queries and keys are captured).
        rows: The query rows a capture method sees: ``"answer"`` (the steps that generated the gold answer),
            ``"generated"`` (every step, the stop token's last; ``acts.answer`` marks the answer's), or a function
            ``(trial, options) -> positions`` for rows of the prompt. Prompt rows need no answer: no trial is gated.
        prompts: ``(model, options) -> TrialSet`` if the method brings prompts of its own.
        null: ``(model, trial, options) -> Trial``: the same context with another ending, captured on the shared
            prefix and given as ``acts.null``.
        finish: ``(parts, trial, options) -> (parts, reason)`` over ``[layer head]`` arrays of one trial, where a score
            is only known once every head is; a reason drops the trial.
        paper: Where it was published.
    """

    name: str
    function: Callable[..., Any]
    needs: tuple[str, ...]
    unit: str
    options: Mapping[str, Any]
    spans: tuple[str, ...] = ()
    builtin: bool = False
    kind: str = "capture"
    rows: str | PromptRows = "answer"
    prompts: Callable[[Model, Mapping[str, Any]], TrialSet] | None = None
    null: Callable[[Model, Trial, Mapping[str, Any]], Trial | None] | None = None
    finish: Callable[..., Any] | None = None
    paper: str = ""

    @property
    def reads_trials(self) -> bool:
        """Whether the caller's trials matter (not for weights, nor for methods with prompts of their own)."""
        return self.kind != "weights" and self.prompts is None

    @property
    def gated(self) -> bool:
        """Whether only trials that the model answers right count."""
        return self.kind == "causal" or (self.kind == "capture" and not callable(self.rows))

    def unit_for(self, options: Mapping[str, Any]) -> str:
        """The unit under these options: without the final norm, logits are not shares of the model's logit."""
        if options.get("metric") == "logprob":
            return "nats"
        return f"{self.unit}, norm left out" if options.get("unembed") in ("raw", "centered") else self.unit

    def resolve(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """All options with their values, of those given that this method knows."""
        return {**self.options, **{k: v for k, v in given.items() if k in self.options}}


def method(
    name: str,
    *,
    needs: str | Sequence[str] = ("pattern",),
    unit: str = "",
    spans: Sequence[str] = (),
    kind: str = "capture",
    rows: str | PromptRows = "answer",
    prompts: Callable[[Model, Mapping[str, Any]], TrialSet] | None = None,
    null: Callable[[Model, Trial, Mapping[str, Any]], Trial | None] | None = None,
    finish: Callable[..., Any] | None = None,
    paper: str = "",
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a scoring method.

    The function receives one layer of one trial at the answer's steps and returns a score for each head::

        @mh.method("needle_mass", needs=("pattern",))
        def needle_mass(acts: mh.LayerActs, trial: mh.Trial) -> Float[Tensor, "head"]:
            return acts.pattern[..., acts.mask("needle")].sum(-1).mean(-1)

    Keyword-only parameters become options of ``ca.score``. Registering the same function again (a notebook
    cell run twice) replaces it.

    Args:
        name: What ``ca.score`` will call it.
        needs: Which activations it reads, of ``q k v z pattern``; the others are None.
        unit: Unit of the score, for axes.
        spans: Named spans that a trial must have, so that one without is refused before the first pass.
        kind: ``"capture"``, ``"weights"``, ``"causal"`` or ``"candidates"``; see ``Method`` for this and what follows.
        rows: Which query rows it sees.
        prompts: Makes prompts of its own.
        null: Makes the null variant of a trial.
        finish: Completes a trial's scores once every head has one.
        paper: Where it was published.

    Raises:
        InvalidInput: If another function holds the name, or kind and rows do not fit.
        UnknownName: For an unknown need, kind or kind of rows.
    """
    if kind not in KINDS:
        raise UnknownName("kind of method", kind, KINDS)
    if not callable(rows) and rows not in ROWS:
        raise UnknownName("rows", rows, ROWS, hint="Or give a function (trial, options) -> prompt positions.")
    if (prompts or null) and not callable(rows):
        raise InvalidInput(f"method {name!r} brings prompts of its own, so rows must be a function that names theirs.")
    needs = (needs,) if isinstance(needs, str) else tuple(needs)
    for need in needs:
        if need not in NEEDS:
            raise UnknownName("capture", need, NEEDS)

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        _load_families()
        held = _REGISTRY.get(name)
        if held is not None and _identity(held.function) != _identity(function):
            raise InvalidInput(
                f"the method name {name!r} is taken by {held.function.__module__}.{held.function.__qualname__}; "
                "choose another."
            )
        _REGISTRY[name] = Method(
            name,
            function,
            needs if kind == "capture" else (),
            unit,
            _options(name, function),
            tuple(spans),
            builtin=(function.__module__ or "").startswith("mechheads.methods."),
            kind=kind,
            rows=rows,
            prompts=prompts,
            null=null,
            finish=finish,
            paper=paper,
        )
        return function

    return register


def _options(name: str, function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword options of a function, with their defaults."""
    parameters = list(inspect.signature(function).parameters.values())
    options = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    missing = [k for k, v in options.items() if v is inspect.Parameter.empty]
    if len(parameters) - len(options) != 2 or missing:
        raise InvalidInput(
            f"method {name!r} must take (acts, trial) and keyword-only options with defaults; "
            f"it takes {inspect.signature(function)}."
        )
    return options


def _identity(function: Callable[..., Any]) -> tuple[str, str]:
    """Where a function was defined; a cell run again gives the same."""
    return function.__module__, function.__qualname__


_loaded: list[str] = []


def _load_families() -> None:
    """Import the built-in families once."""
    if not _loaded:
        _loaded.extend(_FAMILIES)
        for family in _FAMILIES:
            importlib.import_module(f"mechheads.methods.{family}")


def get_method(name: str) -> Method:
    """The method of a name.

    Raises:
        UnknownName: With the near matches, if nobody registered it.
    """
    _load_families()
    if name not in _REGISTRY:
        raise UnknownName("method", name, _REGISTRY, hint="Register your own with @mh.method(...).")
    return _REGISTRY[name]


def method_names() -> list[str]:
    """Names of all registered methods, sorted."""
    _load_families()
    return sorted(_REGISTRY)
