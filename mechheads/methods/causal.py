"""Scores by intervention: what restoring one head's clean output does to a run without the needle."""

from __future__ import annotations

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.errors import InvalidInput
from mechheads.methods.registry import method
from mechheads.model import Model
from mechheads.patching import METRICS, PATCH_BATCH, Edit, PatchRuns, Readout, check_metric, make_pair
from mechheads.stats import check_count
from mechheads.trials import Trial

Maps = dict[str, Float[Tensor, "layer head"]]


@method("cri", kind="causal", unit="logits", spans=("needle",), paper="code of arXiv 2607.01002")
def cri(
    model: Model,
    trial: Trial,
    *,
    metric: str = "logit_diff",
    filler: str | int = ".",
    patch_batch: int | None = None,
    max_new_tokens: int = 50,
    stop_at_newline: bool = True,
) -> Maps:
    """How much of the answer one head's clean output brings back: activation patching, head by head.

    The corrupted prompt has the filler in place of each token of the needle. For head h,
    ``score = m(corrupted run with z_h := clean z_h) - m(corrupted run)``, ``z_h`` being the head's input to ``W_O``,
    replaced at all positions of prompt and forced answer. Heads above it see the change and react to it.

    ``logit_diff``: ``m = logit(gold) - logit(counterfactual)`` at the answer's first step; gold is the token with which
    the model begins the answer after the clean prompt, the counterfactual the likeliest other token of the corrupted
    run. ``logprob``: ``m`` is the mean log-probability of the answer's tokens, teacher-forced.

    Args:
        model: The model, with whatever interventions are in force in all runs alike.
        trial: The trial; needs a ``needle`` span.
        metric: ``"logit_diff"`` or ``"logprob"``: which is the score. The other is a part.
        filler: What replaces a needle token: text that is one token, or a token id.
        patch_batch: Heads patched at once, each in its row; None: up to 16, as memory allows. Changes only rounding.
        max_new_tokens: Longest greedy answer in which the gold answer is looked for.
        stop_at_newline: End that answer before a line break.

    Returns:
        ``score`` and the other metric under its name: changes in logits (``logit_diff``) or nats (``logprob``).
        Positive: this head's clean output moves the model back toward the gold answer. All NaN if the model
        did not say the answer.

    Raises:
        UnknownName: If the trial has no needle, or for another metric.
        InvalidInput: If the filler is not one token, a needle holds nothing else, an option is of another type, or
            the model's logits are no numbers.
    """
    check_metric(metric)
    if patch_batch is not None:
        check_count(PATCH_BATCH, patch_batch)
    size = (model.spec.n_layers, model.spec.n_heads)
    found = {name: torch.full(size, torch.nan) for name in METRICS}
    pair = make_pair(model, trial, filler=filler, max_new_tokens=max_new_tokens, stop_at_newline=stop_at_newline)
    if pair is not None:
        with model.lock:
            runs = PatchRuns(model, pair)
            rows = runs.rows(patch_batch)
            base = runs.run(pair.corrupt, {})
            read = Readout.of(pair, base)
            before = {name: read.metric(name, base) for name in METRICS}
            for layer in range(size[0]):
                for start in range(0, size[1], rows):
                    heads = list(range(size[1]))[start : start + rows]
                    logits = runs.patched(layer, heads)
                    for name in METRICS:
                        found[name][layer, heads] = (read.metric(name, logits) - before[name]).float().cpu()
        for name in METRICS:
            _check_finite(found[name], trial, name)
    return {"score": found.pop(metric), **found}


def _check_finite(scores: Float[Tensor, "layer head"], trial: Trial, metric: str) -> None:
    """Refuse scores that are no numbers: NaN is kept for a trial whose answer was not said."""
    bad = (~scores.isfinite()).nonzero()
    if len(bad):
        layer, head = bad[0].tolist()
        raise InvalidInput(
            f"trial {trial.id!r}: the {metric} score of L{layer}H{head} is {scores[layer, head].item()} "
            f"({len(bad)} of {scores.numel()} heads), so logits or gradients of the patched runs hold NaN or infinity; "
            "load the model in float32, or take the intervention off that makes them so."
        )


@method("attribution_patching", kind="causal", unit="logits", spans=("needle",), paper="arXiv 2310.10348")
def attribution_patching(
    model: Model,
    trial: Trial,
    *,
    metric: str = "logit_diff",
    filler: str | int = ".",
    steps: int = 1,
    max_new_tokens: int = 50,
    stop_at_newline: bool = True,
) -> Float[Tensor, "layer head"]:
    """First-order estimate of ``cri``: one backward pass for all heads.

    ``score = sum over positions and d_head of (z_clean - z_corrupt) * d m / d z``, the gradient taken in the corrupted
    run; ``m``, both runs and the sign are those of ``cri``.

    With ``steps=n`` above 1 the gradient is averaged along the line from corrupted to clean ``z``, all heads of a
    layer moving together and one layer at a time, at the n nodes of Gauss-Radau quadrature (the corrupted end is one of
    them, so that n = 1 is the plain form). A layer's scores then add up to the effect of patching the whole layer.

    Args:
        model: The model, with whatever interventions are in force in all runs alike.
        trial: The trial; needs a ``needle`` span.
        metric: ``"logit_diff"`` or ``"logprob"``.
        filler: What replaces a needle token: text that is one token, or a token id.
        steps: Points at which the gradient is taken; above 1 there is a run of so many rows for every layer.
        max_new_tokens: Longest greedy answer in which the gold answer is looked for.
        stop_at_newline: End that answer before a line break.

    Returns:
        Estimated change in logits (``logit_diff``) or nats (``logprob``). Positive: as for ``cri``. All NaN if the
        model did not say the answer.

    Raises:
        UnknownName: If the trial has no needle, or for another metric.
        InvalidInput: If the filler is not one token, a needle holds nothing else, an option is of another type, or
            the model's logits or gradients are no numbers.
    """
    check_metric(metric)
    steps = check_count("steps", steps)
    pair = make_pair(model, trial, filler=filler, max_new_tokens=max_new_tokens, stop_at_newline=stop_at_newline)
    if pair is None:
        return torch.full((model.spec.n_layers, model.spec.n_heads), torch.nan)
    with model.lock, torch.enable_grad():
        runs = PatchRuns(model, pair)
        scores = _plain(runs, metric) if steps == 1 else _integrated(runs, metric, steps)
    _check_finite(scores, trial, metric)
    return scores


def _plain(runs: PatchRuns, metric: str) -> Float[Tensor, "layer head"]:
    """Gradients at every layer's ``z`` from one backward pass through the corrupted run."""
    kept: list[tuple[int, slice, Tensor]] = []

    def keep(layer: int) -> Edit:
        def edit(t: Tensor, at: slice) -> Tensor:
            # Nothing below the first z asks for gradients, so that one begins the graph.
            t = t if t.requires_grad else t.detach().requires_grad_()
            kept.append((layer, at, t))
            return t

        return edit

    spec = runs.model.spec
    logits = runs.run(runs.pair.corrupt, {layer: keep(layer) for layer in range(spec.n_layers)}, grad=True)
    value = Readout.of(runs.pair, logits).metric(metric, logits)
    gradients = torch.autograd.grad(value.sum(), [t for _, _, t in kept])
    out = torch.zeros(spec.n_layers, spec.n_heads)
    for (layer, at, z), gradient in zip(kept, gradients, strict=True):
        moved = runs.z_clean[layer, at].to(z) - z[0].detach()
        out[layer] += (gradient[0].float() * moved.float()).sum((0, 2)).cpu()
    return out


def _integrated(runs: PatchRuns, metric: str, steps: int) -> Float[Tensor, "layer head"]:
    """For each layer, one run whose rows lie between corrupted and clean ``z``, and one backward pass."""
    z_corrupt, corrupted = runs.record(runs.pair.corrupt)
    read = Readout.of(runs.pair, corrupted)
    nodes, weights = radau(steps)
    spec, like = runs.model.spec, runs.z_clean
    moved = runs.z_clean - z_corrupt
    out = torch.zeros(spec.n_layers, spec.n_heads)
    far = torch.as_tensor(nodes).to(like)[:, None, None, None]
    for layer in range(spec.n_layers):
        kept: list[tuple[slice, Tensor]] = []

        def edit(t: Tensor, at: slice, layer: int = layer, kept: list[tuple[slice, Tensor]] = kept) -> Tensor:
            rows = (t.detach() + (far * moved[layer, at]).to(t)).requires_grad_()
            kept.append((at, rows))
            return rows

        logits = runs.run(runs.pair.corrupt, {layer: edit}, rows=steps, above=layer, grad=True)
        values = read.metric(metric, logits)
        total = (values * torch.as_tensor(weights).to(values)).sum()
        for (at, _), gradient in zip(kept, torch.autograd.grad(total, [rows for _, rows in kept]), strict=True):
            out[layer] += (gradient.float().sum(0).to(moved.device) * moved[layer, at].float()).sum((0, 2)).cpu()
    return out


def radau(n: int) -> tuple[np.ndarray, np.ndarray]:
    """Nodes and weights of n-point Gauss-Radau quadrature on [0, 1] with 0 as a node; exact to degree 2n - 2."""
    legendre = np.polynomial.legendre.Legendre
    below, at = legendre.basis(n - 1), legendre.basis(n)
    # Both Legendre polynomials have opposite signs at -1, so their sum has that root, the fixed node.
    inner = np.sort((below + at).roots().real)[1:]
    nodes = np.concatenate([[-1.0], inner])
    weights = (1 - nodes) / (n * below(nodes)) ** 2
    return (nodes + 1) / 2, weights / 2
