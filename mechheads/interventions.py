"""Interventions: frozen values that say what to do to which heads, and one place that does it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.backends.base import SITES, HookFn
from mechheads.decode import pad
from mechheads.errors import HookNeverFired, InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.model import Model
from mechheads.trials import Trial, TrialSet

ABLATION_SITES = ("z", "q")
KINDS = ("zero", "mean")


@dataclass(frozen=True, eq=False)
class Intervention:
    """Replace the activation of some heads while the model runs, at every position of prompt and answer.

    At ``z`` (head output before ``W_O``) a zeroed head writes nothing. At ``q`` (query before QK-norm and rotary) a
    zeroed query makes all its scores equal, so the head attends uniformly **and still writes**.

    Attributes:
        kind: ``"zero"`` or ``"mean"``.
        site: ``"z"`` or ``"q"``.
        heads: The heads it acts on; None until ``.on(heads)`` names them.
        reference: Trials whose prompts the mean is taken over (mean only).
        values: ``[layer head d_head]`` the means, once ``prepare`` computed them.

    Raises:
        UnknownName: For another kind or site.
        InvalidInput: For a mean without a reference.
    """

    kind: str
    site: str = "z"
    heads: HeadSet | None = None
    reference: TrialSet | None = None
    values: Float[Tensor, "layer head d_head"] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("intervention", self.kind, KINDS)
        if self.site not in ABLATION_SITES:
            raise UnknownName("site", self.site, ABLATION_SITES)
        if self.kind == "mean" and not self.reference:
            raise InvalidInput(
                "mean ablation needs a reference set to take the mean over; pass reference=trials, for instance "
                'needles.split("calibration").'
            )

    def on(self, heads: Any) -> Intervention:
        """The same intervention on these heads (a HeadSet, or anything a head set parses from)."""
        return replace(self, heads=HeadSet.parse(heads))

    def describe(self) -> dict[str, Any]:
        """JSON-ready record for provenance."""
        out: dict[str, Any] = {"kind": self.kind, "site": self.site}
        if self.heads is not None:
            out["heads"] = self.heads.labels
        if self.reference is not None:
            out["reference"] = {
                "name": self.reference.name, "hash": self.reference.hash, "n": len(self.reference),
            }  # fmt: skip
        return out

    def prepare(self, model: Model, *, batch_size: int = 8) -> Intervention:
        """Compute what needs the model (the means), once; a no-op otherwise.

        The model is taken as it stands, with any hooks now on it.
        """
        if self.reference is None or self.values is not None:
            return self
        return replace(self, values=mean_activation(model, self.site, self.reference, batch_size=batch_size))


def zero_ablation(*, site: str = "z") -> Intervention:
    """Set heads to zero at a site.

    Args:
        site: ``"z"``: the head writes nothing. ``"q"``: the head attends uniformly and still writes.

    Raises:
        UnknownName: For another site.
    """
    return Intervention("zero", site)


def mean_ablation(*, site: str = "z", reference: Sequence[Trial] | None = None) -> Intervention:
    """Set heads to their mean activation over a reference set.

    The mean is taken for each head over all prompt positions of all reference trials, and put in at every position
    of prompt and answer (arXiv 2607.01002 does this at ``q``, over 50 calibration prompts).

    Args:
        site: ``"z"`` or ``"q"``.
        reference: Trials for the mean; keep them apart from the test trials. Required.

    Raises:
        InvalidInput: Without a reference, or with an empty one.
        UnknownName: For another site.
    """
    return Intervention("mean", site, reference=None if reference is None else TrialSet.of(reference))


@torch.no_grad()
def mean_activation(
    model: Model, site: str, reference: TrialSet, *, batch_size: int = 8
) -> Float[Tensor, "layer head d_head"]:
    """Mean of ``z`` or ``q`` for each head, over all prompt positions of the reference trials, in float32.

    Raises:
        InvalidInput: If a reference prompt is too long for the model or was made for another one.
    """
    spec = model.spec
    for trial in reference:
        model.check_tokens(trial.tokens, what=f"reference trial {trial.id!r}")
    total = torch.zeros(spec.n_layers, spec.n_heads, spec.d_head, dtype=torch.float64)
    count = 0
    ordered = sorted((trial.tokens for trial in reference), key=len)
    for start in range(0, len(ordered), batch_size):
        prompts = ordered[start : start + batch_size]
        tokens, mask = pad(prompts, "left", model.backend.device)

        def add(layer: int, mask: Tensor = mask) -> HookFn:
            def hook(t: Tensor) -> None:
                kept = t.float() * mask[:, :, None, None]
                total[layer] += kept.sum((0, 1)).double().cpu()

            return hook

        pairs = [(f"blocks.{layer}.{SITES[site]}", add(layer)) for layer in range(spec.n_layers)]
        with model.lock, model.hooks(pairs):
            model.backend.run(tokens, mask, None, last_only=True)
        count += int(mask.sum())
    return (total / count).float()


@contextmanager
def apply(model: Model, *interventions: Intervention) -> Iterator[None]:
    """Apply interventions for the time of a ``with`` block.

    Hooks are installed on entry and removed on exit, also after an exception. Several interventions act in the
    order given; none, or only empty head sets, leave the model untouched.

    Raises:
        HookNeverFired: On leaving, if the model did not run inside the block, or ran without firing a hook.
        InvalidInput: If a head does not exist in the model, a mean was taken on a model of another shape, or it
            would have to be taken now, with other hooks on the model.
    """
    counts: dict[str, int] = {}
    pairs: list[tuple[str, HookFn]] = []
    with model.lock:
        for intervention in interventions:
            if _heads_of(intervention, model):
                _warn_shared_norm(model, intervention)
                pairs += _hooks(model, _with_values(model, intervention), counts)
        acting = [i.describe() for i in interventions if i.heads]
        with model.hooks(pairs):
            model.ablations += acting
            try:
                yield
            finally:
                del model.ablations[len(model.ablations) - len(acting) :]
    silent = sorted(name for name, n in counts.items() if n == 0)
    if silent:
        raise HookNeverFired(
            f"{len(silent)} of {len(counts)} hooks never fired (first: {silent[0]!r}), so nothing was ablated there: "
            "the model was not run inside the block, or this architecture does not pass through that hook."
        )


def _heads_of(intervention: Intervention, model: Model) -> HeadSet:
    """The heads of an intervention, which must be named and exist."""
    if not isinstance(intervention, Intervention):
        raise InvalidInput(f"{intervention!r} is no intervention; make one, such as mh.zero_ablation().on('L1H2').")
    if intervention.heads is None:
        raise InvalidInput("this intervention names no heads, so it would do nothing; say which: .on('L1H2, L3H4').")
    return intervention.heads.check(model.spec.n_layers, model.spec.n_heads)


def _with_values(model: Model, intervention: Intervention) -> Intervention:
    """The intervention with its means, which must be those of this model without other hooks."""
    if intervention.kind == "mean" and intervention.values is None and model.backend.hooked():
        raise InvalidInput(
            "there are other hooks on the model, so the mean would be that of an altered model. Take it before: "
            "intervention = intervention.prepare(model) first, then apply both."
        )
    prepared = intervention.prepare(model)
    shape = (model.spec.n_layers, model.spec.n_heads, model.spec.d_head)
    if prepared.values is not None and tuple(prepared.values.shape) != shape:
        raise InvalidInput(
            f"the means have the shape {tuple(prepared.values.shape)}, but this model's are {shape} (layer, head, "
            "d_head); they were taken on another model."
        )
    return prepared


def _hooks(model: Model, intervention: Intervention, counts: dict[str, int]) -> list[tuple[str, HookFn]]:
    """One counting hook for each layer that has heads in the set."""
    pairs = []
    for layer, heads in (intervention.heads or HeadSet()).by_layer().items():
        name = f"blocks.{layer}.{SITES[intervention.site]}"
        counts.setdefault(name, 0)
        value = None if intervention.values is None else intervention.values[layer, heads]
        pairs.append((name, _replace_heads(name, heads, value, counts)))
    return pairs


def _replace_heads(name: str, heads: list[int], value: Tensor | None, counts: dict[str, int]) -> HookFn:
    """A hook that overwrites ``[batch pos head d_head]`` at some heads."""

    def hook(t: Tensor) -> Tensor:
        counts[name] += 1
        out = t.clone()
        out[:, :, heads] = 0 if value is None else value.to(out)
        return out

    return hook


def _warn_shared_norm(model: Model, intervention: Intervention) -> None:
    """One norm over all heads' queries (OLMo-2/3) makes an edit at q reach the other heads."""
    if intervention.site == "q" and model.backend.flat_qk_norm:
        warnings.warn(
            f"{model.spec.architecture} normalises the queries of all heads together, so replacing some at 'q' also "
            "rescales the others; ablate at 'z' to touch these heads alone.",
            stacklevel=4,
        )
