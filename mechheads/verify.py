"""The identities that head scores rest on, measured on a short prompt.

Three of them must hold or the model is refused: heads sum to the attention output; cached and uncached runs
agree; attention rows are causal and sum to one (or, with sinks, to no more). Two open features: the frozen-norm
decomposition of the logit (``unembed="normed"``), and q . k reproducing the pattern (QK scores).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mechheads.backends.base import SITES
from mechheads.errors import ModelRefused
from mechheads.kernels import expand_kv, norm_direction, qk_scores

if TYPE_CHECKING:
    from mechheads.model import Model

PROBE_LENGTH = 24
_CACHED = 16

# How much looser the bars are, for identities inside a layer and for logits, which pass through the whole depth.
# Honest bfloat16 errors are about a tenth of these bars; a cache that is not read errs by about 1.
_SLACK = {torch.float16: (4e2, 2e3), torch.bfloat16: (3e3, 1e4)}
_EXACT = (1.0, 10.0)


@dataclass(frozen=True)
class Verification:
    """Largest error of each identity, relative to the largest magnitude of what it is compared with.

    Attributes:
        head_sum: ``sum_heads sum_j alpha v W_O + b_O`` (through the post norm, where there is one) against
            the attention output, worst layer.
        cache: Logits with and without the KV cache.
        rows: Distance of attention rows from summing to one, or mass where a query cannot look.
        logit: Final residual stream through the frozen norm and ``W_U``, against the logit before its soft-cap.
        qk: ``q . k`` against the log of the pattern, up to a constant for each row.
        prefill: Logits after a fast prefill, or None where there is no twin.
        tolerance: What identities inside a layer were held to.
        logit_tolerance: What logits were held to.
    """

    head_sum: float
    cache: float
    rows: float
    logit: float
    qk: float
    prefill: float | None
    tolerance: float
    logit_tolerance: float

    @property
    def normed_exact(self) -> bool:
        """Whether ``unembed="normed"`` is an exact share of the logit."""
        return self.logit <= self.logit_tolerance

    @property
    def qk_exact(self) -> bool:
        """Whether q . k is what the model turns into attention."""
        return self.qk <= self.logit_tolerance


@torch.no_grad()
def verify(model: Model, *, tolerance: float = 1e-5) -> Verification:
    """Measure every identity; refuse the model if a necessary one fails.

    Args:
        model: The model, as loaded.
        tolerance: Largest relative error inside a layer for float32 weights; logits, whose error passes through
            the whole depth, get ten times as much. Half precision is held to what its rounding makes.

    Raises:
        ModelRefused: Naming the identity and the size of its error.
    """
    try:
        return _measure(model, tolerance)
    except ModelRefused:
        raise
    except RuntimeError as error:
        raise ModelRefused(
            f"TransformerLens cannot run {model.spec.name!r} ({model.spec.architecture}) in {model.spec.dtype}: "
            f"{error}. Try mh.load(..., dtype='float32')."
        ) from error


def _measure(model: Model, tolerance: float) -> Verification:
    """Every identity in turn."""
    inside, through = (tolerance * slack for slack in _SLACK.get(model.backend.dtype, _EXACT))
    probe = _Probe(model)
    prefill = probe.prefill_error()
    if prefill is not None and prefill > through:
        # A twin that computes something else is left out; the hooked model prefills instead.
        model.backend.twin = None
    # In this order, and each refused before the next is measured: nothing can be read from a broken cache.
    cache = _necessary(model, "cache", probe.cache_error(), through)
    return Verification(
        head_sum=_necessary(model, "head_sum", probe.head_sum_error(), inside),
        cache=cache,
        rows=_necessary(model, "rows", probe.row_error(), inside),
        logit=probe.logit_error(),
        qk=probe.qk_error(),
        prefill=prefill,
        tolerance=inside,
        logit_tolerance=through,
    )


_NECESSARY = {
    "cache": (
        "cached and uncached logits agree",
        "The KV cache is broken: transformers 5.24 renamed the argument that TransformerLens reads, so new "
        "tokens see only each other. Install 'transformers>=5.9,<5.24'.",
    ),
    "head_sum": (
        "the heads sum to the attention output",
        "Something stands between the heads and the residual stream that mechheads does not know.",
    ),
    "rows": (
        "attention rows are causal and sum to one",
        "A mask, a window or a sink of this architecture is not what its configuration says.",
    ),
}


def _necessary(model: Model, name: str, error: float, allowed: float) -> float:
    """The error of an identity, or ModelRefused if it is more than allowed (or not a number)."""
    if error <= allowed:
        return error
    identity, why = _NECESSARY[name]
    raise ModelRefused(
        f"{model.spec.name!r} ({model.spec.architecture} via {model.spec.backend}) fails the identity "
        f"'{identity}': relative error {error:.2e}, allowed {allowed:.0e}. {why} "
        "No score is computed on a model whose parts do not add up."
    )


class _Probe:
    """One short prompt run through the hooked model, with everything the identities need."""

    def __init__(self, model: Model):
        self.model, self.backend, self.spec = model, model.backend, model.spec
        generator = torch.Generator().manual_seed(0)
        length = min(PROBE_LENGTH, self.spec.n_ctx - 1)
        self.tokens = torch.randint(self.spec.d_vocab, (1, length), generator=generator).to(self.backend.device)
        self.mask = torch.ones_like(self.tokens)
        self.seen: dict[tuple[str, int], Tensor] = {}
        with self.backend.hooks(self._hooks()):
            self.logits = self.backend.run(self.tokens, self.mask, None, last_only=False)[0].float()

    def _keep(self, name: str, layer: int):
        def hook(t: Tensor) -> None:
            self.seen[name, layer] = t[0].detach()

        return hook

    def _hooks(self) -> list:
        """Hooks for every tensor of the identities."""
        pairs = [("ln_final.hook_scale", self._keep("final_scale", -1))]
        for layer in range(self.spec.n_layers):
            at = f"blocks.{layer}."
            pairs += self.backend.query_hooks(
                layer, lambda name, t, layer=layer: self.seen.__setitem__((name, layer), t[0].detach())
            )
            pairs += [
                (at + SITES["pattern"], self._keep("pattern", layer)),
                (at + "attn.hook_v", self._keep("v", layer)),
                (at + "hook_attn_out", self._keep("attn_out", layer)),
                (at + "hook_resid_post", self._keep("resid", layer)),
            ]
            post = self.backend.post_norm(layer)
            if post is not None:
                pairs.append((post[1], self._keep("post_scale", layer)))
        return pairs

    def head_sum_error(self) -> float:
        """Worst layer of heads against attention output."""
        worst = 0.0
        for layer in range(self.spec.n_layers):
            v = expand_kv(self.seen["v", layer].float().transpose(0, 1), self.spec.n_heads)
            z = self.seen["pattern", layer].float() @ v
            out = torch.einsum("hqd,hdm->qm", z, self.model.W_O(layer).float())
            out = out + self.model.b_O(layer).float()
            post = self.backend.post_norm(layer)
            if post is not None:
                norm, _ = post
                out = out - out.mean(-1, keepdim=True) if norm.centers else out
                out = out / self.seen["post_scale", layer].float()
                out = out * norm.weight.float() if norm.weight is not None else out
                out = out + norm.bias.float() if norm.bias is not None else out
            worst = max(worst, _relative(out, self.seen["attn_out", layer].float()))
        return worst

    def cache_error(self) -> float:
        """The second part of the prompt token by token on a cache of the first, against the whole."""
        cut = min(_CACHED, self.tokens.shape[1] - 1)
        cache = self.backend.new_cache(1)
        self.backend.run(self.tokens[:, :cut], self.mask[:, :cut], cache, last_only=True)
        rows = [
            self.backend.run(self.tokens[:, i : i + 1], self.mask[:, : i + 1], cache, last_only=True)[0, 0]
            for i in range(cut, self.tokens.shape[1])
        ]
        return _relative(torch.stack(rows).float(), self.logits[cut:])

    def prefill_error(self) -> float | None:
        """The last token on the twin's cache, against the whole."""
        if self.backend.twin is None or not self.backend.fast_prefill():
            return None
        cache = self.backend.prefill(self.tokens[:, :-1], self.mask[:, :-1])
        last = self.backend.run(self.tokens[:, -1:], self.mask, cache, last_only=True)[0, 0]
        return _relative(last.float(), self.logits[-1])

    def row_error(self) -> float:
        """Mass outside what a query may see, and rows that do not sum to one (to at most one, with sinks)."""
        worst = 0.0
        for layer in range(self.spec.n_layers):
            pattern = self.seen["pattern", layer].float()
            hidden = ~visible_keys(pattern.shape[-1], self.backend.window(layer)).to(pattern.device)
            outside = pattern.masked_fill(~hidden, 0.0).abs().max()
            missing = 1 - pattern.sum(-1)
            wrong = (-missing).clamp(min=0) if self.backend.has_sinks() else missing.abs()
            worst = max(worst, float(outside), float(wrong.max()))
            if not torch.isfinite(pattern).all() or _narrower_than_believed(pattern, self.backend.window(layer)):
                return float("inf")
        return worst

    def logit_error(self) -> float:
        """Frozen-norm logits against the model's, before their soft-cap."""
        norm = self.model.final_norm
        resid = self.seen["resid", self.spec.n_layers - 1].float()
        scale = self.seen["final_scale", -1].float()
        W_U, b_U = self.model.W_U.float(), self.model.b_U.float()
        # Every row of W_U is pulled back through the norm by each position's scale; the last position is enough.
        directions = norm_direction(W_U.T, norm.weight, scale[-1:].expand(W_U.shape[1], 1), centers=norm.centers)
        logits = directions @ resid[-1] + b_U
        if norm.bias is not None:
            logits = logits + norm.bias.float() @ W_U
        cap = self.backend.logit_softcap
        if cap is not None:
            logits = cap * torch.tanh(logits / cap)
        return _relative(logits, self.logits[-1])

    def qk_error(self) -> float:
        """Log-pattern minus scaled q . k, which should be one constant for each row."""
        cache = self.backend.new_cache(1)
        self.backend.run(self.tokens, self.mask, cache, last_only=True)
        worst = 0.0
        for layer in range(self.spec.n_layers):
            q = self.seen["q", layer]
            k = self.seen.get(("k", layer))
            k = self.backend.cached_kv(cache, layer)[0][0] if k is None else k
            scores = self.soft_capped(qk_scores(q, k) * self.backend.score_scale(layer))
            pattern = self.seen["pattern", layer].float()
            ok = pattern > 1e-6
            gap = torch.where(ok, pattern.clamp(min=1e-12).log() - scores, torch.nan)
            gap = gap - gap.nanmean(-1, keepdim=True)
            top = scores.masked_fill(~ok, 0).abs().max().clamp(min=1.0)
            worst = max(worst, float((gap.nan_to_num(0).abs() / top).max()))
        return worst

    def soft_capped(self, scores: Tensor) -> Tensor:
        """Scores after the architecture's tanh cap, if it has one."""
        cap = self.backend.score_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)


def _narrower_than_believed(pattern: Tensor, window: int | None) -> bool:
    """Whether no head ever looks as far back as it may: the mark of a window that the configuration did not show."""
    length = pattern.shape[-1]
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    looked = (pattern > 0).any(0).cpu()
    reach = int((query - key)[looked].max()) if looked.any() else 0
    return reach < min(length, window or length) - 1


def visible_keys(length: int, window: int | None) -> Tensor:
    """Boolean ``[query key]``: causal, and inside the window if there is one."""
    query, key = torch.arange(length)[:, None], torch.arange(length)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


def _relative(got: Tensor, want: Tensor) -> float:
    """Largest absolute difference over the largest magnitude; infinite if anything is not finite."""
    if got.shape != want.shape or not (torch.isfinite(got).all() and torch.isfinite(want).all()):
        return float("inf")
    return float((got - want).abs().max() / want.abs().max().clamp(min=1e-12))
