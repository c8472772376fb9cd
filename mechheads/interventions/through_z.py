"""Edits of attention where the model does not read what its attention hooks return.

On some architectures (OPT) TransformerLens shows scores and pattern once the head's output is made, and runs on with
its own. There the scores are computed here from queries and keys, edited, and the head's output is put in at ``z``: the
same thing, one step later. Whether that is the head's output is tried on each model first.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.backends.base import SITES, HookFn, Row
from mechheads.errors import ModelRefused
from mechheads.model import Model

if TYPE_CHECKING:
    from mechheads.interventions.acting import Acting

_PROBE = 6


@torch.no_grad()
def takes_effect(model: Model, site: str) -> bool:
    """Whether what a hook at ``pattern`` or ``attn_scores`` returns is what the model runs on; tried once a model.

    Raises:
        ModelRefused: If it is not, and the heads' output cannot be computed from queries, keys and values either.
    """
    with model.lock:
        if site not in model.site_effects:
            model.site_effects[site] = _probe(model, site)
    return model.site_effects[site]


def _probe(model: Model, site: str) -> bool:
    """Turn the attention of one head round on a short prompt, and see whether its output follows."""

    def turn(t: Tensor) -> Tensor:
        out = t.clone()
        out[:, 0, -1] = out[:, 0, -1].flip(-1)
        return out

    seen: list[Tensor] = []
    for edits in ([], [(f"blocks.0.{SITES[site]}", turn)]):
        pairs = [*edits, (f"blocks.0.{SITES['z']}", lambda t: seen.append(t[0, -1, 0].detach().clone()))]
        _run_probe(model, pairs)
    if not torch.equal(*seen):
        return True
    if not _rebuilds(model):
        raise ModelRefused(
            f"{model.spec.architecture}: what is put in at {site!r} does not reach the head's output, and queries, "
            "keys and values alone do not give that output, so attention cannot be edited here. Intervene at 'z' or "
            "'q'."
        )
    return False


def _run_probe(model: Model, pairs: Sequence[tuple[str, HookFn]]) -> None:
    """A run of a few tokens under some hooks."""
    length = min(_PROBE, model.spec.n_ctx)
    tokens = torch.arange(length, device=model.backend.device)[None] % model.spec.d_vocab
    with model.running([Row(tuple(tokens[0].tolist()))]), model.hooks(pairs), warnings.catch_warnings():
        # TransformerLens says of some architectures what is found out here.
        warnings.filterwarnings("ignore", message=".*The edit is discarded")
        model.backend.run(tokens, torch.ones_like(tokens), None, last_only=True)


def _rebuilds(model: Model) -> bool:
    """Whether what is computed here without any edit is the output of every layer's heads."""
    worst = 0.0

    def compare(plain: PlainAttention) -> HookFn:
        def hook(z: Tensor) -> None:
            nonlocal worst
            found = plain.output(plain.scores().softmax(-1))
            worst = max(worst, float((found - z).abs().max() / z.abs().max()))

        return hook

    pairs: list[tuple[str, HookFn]] = []
    for layer in range(model.spec.n_layers):
        plain = PlainAttention(model, layer)
        pairs += [*plain.hooks(), (f"blocks.{layer}.{SITES['z']}", compare(plain))]
    _run_probe(model, pairs)
    return worst <= 1e-4


class PlainAttention:
    """Softmax attention of one layer, computed from the queries, keys and values its hooks show.

    Args:
        model: The model.
        layer: Layer.
    """

    def __init__(self, model: Model, layer: int):
        self.model, self.layer = model, layer
        self._seen: dict[str, Tensor] = {}

    def hooks(self) -> list[tuple[str, HookFn]]:
        """Hooks that note queries, keys and values of the tokens now run."""

        def noter(name: str) -> HookFn:
            def note(t: Tensor) -> None:
                self._seen[name] = t

            return note

        return [(f"blocks.{self.layer}.attn.hook_{name}", noter(name)) for name in ("q", "k", "v")]

    def scores(self) -> Float[Tensor, "row head query key"]:
        """Scaled scores; the lowest number there is where a query may not look."""
        q = self._seen["q"].transpose(1, 2)
        k, _ = self._keys_and_values(len(q))
        scores = q @ k.transpose(-1, -2) * self.model.backend.score_scale(self.layer)
        return scores.masked_fill(~self._visible()[:, None], torch.finfo(scores.dtype).min)

    def output(self, pattern: Float[Tensor, "row head query key"]) -> Float[Tensor, "row query head d_head"]:
        """The heads' output under a pattern."""
        return (pattern @ self._keys_and_values(len(pattern))[1]).transpose(1, 2)

    def _keys_and_values(self, rows: int) -> tuple[Tensor, Tensor]:
        """``[row head key d_head]`` of all positions, each repeated for the query heads that share it."""
        running = self.model.backend.running
        if running is not None and running.cache is not None:
            k, v = self.model.backend.cached_kv(running.cache, self.layer)
        else:
            k, v = (self._seen[name].transpose(1, 2) for name in ("k", "v"))
        group = self.model.spec.n_heads // k.shape[1]
        k, v = (t.expand(rows, -1, -1, -1).repeat_interleave(group, dim=1) for t in (k, v))
        return k, v

    def _visible(self) -> Tensor:
        """``[row query key]`` true where a query may look."""
        running = self.model.backend.running
        assert running is not None
        column = torch.arange(running.mask.shape[1], device=running.mask.device)
        query = column[-running.n_new :]
        seen = (column[None] <= query[:, None]) & (running.mask[:, None] > 0)
        window = self.model.backend.window(self.layer)
        return seen if window is None else seen & (query[:, None] - column[None] < window)


class ThroughZ:
    """The edits of some acts on the attention of one layer, put in at ``z``.

    Args:
        acting: Whose acts they are.
        layer: Layer.
        places: Which acts, in order.
    """

    def __init__(self, acting: Acting, layer: int, places: Sequence[int]):
        self.acting, self.layer, self.places = acting, layer, places
        self._plain = PlainAttention(acting.model, layer)
        self._edited: list[tuple[Tensor, Tensor, Tensor]] = []

    def hooks(self) -> list[tuple[str, HookFn]]:
        """Hooks that note queries, keys and values, one that replaces the output, and one that shows the pattern."""
        name, shown = (f"blocks.{self.layer}.{SITES[site]}" for site in ("z", "pattern"))

        def put(z: Tensor) -> Tensor | None:
            return self._put(z) if self.acting.fired(name) else None

        def show(pattern: Tensor) -> None:
            if self.acting.fired(shown):
                self._show(pattern)

        def counted(name: str, note: HookFn) -> HookFn:
            def hook(t: Tensor) -> None:
                if self.acting.fired(name):
                    note(t)

            return hook

        return [*((n, counted(n, note)) for n, note in self._plain.hooks()), (name, put), (shown, show)]

    def _put(self, z: Tensor) -> Tensor:
        """The heads' output under the edited attention."""
        self.acting.running()  # refuses where positions are not known
        edited = self._plain.scores()
        touched = [self.acting.pairs_of(i, self.layer, len(z)) for i in self.places]
        for i, (row, head) in zip(self.places, touched, strict=True):
            if len(row) and self.acting.acts[i].site == "attn_scores":
                edited[row, head] = self.acting.attention(i, edited[row, head], row, len(z))
        edited = edited.softmax(-1)
        for i, (row, head) in zip(self.places, touched, strict=True):
            if len(row) and self.acting.acts[i].site == "pattern":
                edited[row, head] = self.acting.attention(i, edited[row, head], row, len(z))
        new, out = self._plain.output(edited), z.clone()
        for row, head in touched:
            out[row, :, head] = new[row, :, head].to(out)
        self._edited = [(row, head, edited[row, head]) for row, head in touched]
        return out

    def _show(self, pattern: Tensor) -> None:
        """Write the edited pattern over the model's own, which it is done with, so that whoever reads it sees it."""
        if not pattern.requires_grad:  # a gradient would still need the other
            for row, head, edited in self._edited:
                pattern[row, head] = edited.to(pattern)
        self._edited = []
