"""The one place where interventions are put in force, and taken back."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from mechheads.errors import HookNeverFired, InvalidInput
from mechheads.heads import HeadSet
from mechheads.interventions.acting import Act, Acting, put_back, set_to_zero, unaltered
from mechheads.interventions.values import WEIGHTS, Intervention
from mechheads.model import Model

_TAKEN_ON_THE_MODEL = ("mean", "mean_positional", "resample", "patch")


@contextmanager
def apply(model: Model, *interventions: Intervention) -> Iterator[None]:
    """Apply interventions for the time of a ``with`` block.

    Hooks are installed (and weights pruned) on entry and all is undone on exit, also after an exception. At one site
    several interventions act in the order given; sites are passed in the model's order (``q``, ``attn_scores``,
    ``pattern``, ``z``). None, or only empty head sets, leave the model untouched. Means, donors and partners are those
    of the model without any intervention; hooks that others install inside the block act on donors and partners too.

    Raises:
        HookNeverFired: On leaving, if the model did not run inside the block, or ran without firing a hook.
        InvalidInput: If a head does not exist in the model, a mean was taken on a model of another shape, or it
            would have to be taken now, with other hooks on the model.
    """
    with model.lock:
        acting_ones = [i for i in interventions if heads_of(i, model)]
        prepared = [prepared_on(model, i) for i in acting_ones]
        pruned = [i.heads for i in prepared if i.site == WEIGHTS and i.heads]
        acting = Acting(model, [Act(i, i.heads or HeadSet()) for i in prepared if i.site != WEIGHTS])
        with in_force(model, acting, [i.describe() for i in acting_ones]), pruned_weights(model, pruned, acting):
            yield
    check_fired(acting)


@contextmanager
def in_force(model: Model, acting: Acting, described: Sequence[dict]) -> Iterator[None]:
    """Hooks and listener of what acts, for the time of a ``with`` block; the model says what is done to it."""
    with model.hooks(acting.hooks()):
        model.ablations += described
        model.row_listeners.append(acting.begin)
        try:
            yield
        finally:
            model.row_listeners.remove(acting.begin)
            del model.ablations[len(model.ablations) - len(described) :]


def check_fired(acting: Acting) -> None:
    """Raise if a hook was installed and the model never passed it."""
    silent = sorted(name for name, n in acting.counts.items() if n == 0)
    if silent:
        raise HookNeverFired(
            f"{len(silent)} of {len(acting.counts)} hooks never fired (first: {silent[0]!r}), so nothing was ablated "
            "there: the model was not run inside the block, or this architecture does not pass through that hook."
        )


def heads_of(intervention: Intervention, model: Model) -> HeadSet:
    """The heads of an intervention, which must be named and exist."""
    if not isinstance(intervention, Intervention):
        raise InvalidInput(f"{intervention!r} is no intervention; make one, such as mh.zero_ablation().on('L1H2').")
    if intervention.heads is None:
        raise InvalidInput("this intervention names no heads, so it would do nothing; say which: .on('L1H2, L3H4').")
    return intervention.heads.check(model.spec.n_layers, model.spec.n_heads)


def prepared_on(model: Model, intervention: Intervention, *, batch_size: int = 8) -> Intervention:
    """The intervention with its means, which must be those of this model without other hooks.

    Raises:
        InvalidInput: If what it needs would have to be taken on an altered model, or was taken on one of another shape.
    """
    warn_shared_norm(model, intervention)
    if intervention.kind in _TAKEN_ON_THE_MODEL and intervention.values is None and model.backend.hooked():
        what = "mean" if intervention.kind.startswith("mean") else "other prompt's activation"
        how = (
            "Take it before: intervention = intervention.prepare(model) first, then apply both."
            if what == "mean"
            else "Apply it together with the others, in one call, or take those hooks off."
        )
        raise InvalidInput(
            f"there are other hooks on the model, so the {what} would be that of an altered model. {how}"
        )
    with unaltered(model):
        prepared = intervention.prepare(model, batch_size=batch_size)
    shape = (model.spec.n_layers, model.spec.n_heads, model.spec.d_head)
    if prepared.values is not None and tuple(prepared.values.shape[-3:]) != shape:
        raise InvalidInput(
            f"the means have the shape {tuple(prepared.values.shape)}, but this model's are {shape} (layer, head, "
            "d_head); they were taken on another model."
        )
    return prepared


@contextmanager
def pruned_weights(model: Model, sets: Sequence[HeadSet], acting: Acting) -> Iterator[None]:
    """``W_O`` of some heads zero for the time of a ``with`` block, put back bit by bit after it."""
    heads = sorted({head for one in sets for head in one})
    kept = [(model.W_O(h.layer)[h.head], model.W_O(h.layer)[h.head].detach().clone()) for h in heads]
    acting.pruned = kept
    try:
        set_to_zero(kept)
        for head in heads:  # a back end that hands out copies would leave the model as it was
            if model.W_O(head.layer)[head.head].any():
                raise InvalidInput(
                    f"{model.spec.architecture} does not let W_O be changed in place, so its heads cannot be pruned "
                    "while it is loaded; mh.zero_ablation() at 'z' does the same."
                )
        yield
    finally:
        put_back(kept)
        acting.pruned = []


def warn_shared_norm(model: Model, intervention: Intervention) -> None:
    """One norm over all heads' queries (OLMo-2/3) makes an edit at q reach the other heads."""
    if intervention.site == "q" and model.backend.flat_qk_norm:
        warnings.warn(
            f"{model.spec.architecture} normalises the queries of all heads together, so replacing some at 'q' also "
            "rescales the others; ablate at 'z' to touch these heads alone.",
            stacklevel=5,
        )
