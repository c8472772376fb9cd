"""The interface every back end offers, and the two small records it speaks in."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

HookFn = Callable[[Tensor], Tensor | None]

SITES = {
    "z": "attn.hook_z",
    "q": "attn.hook_q",
    "pattern": "attn.hook_pattern",
    "attn_scores": "attn.hook_attn_scores",
}
QKV = ("W_Q", "W_K", "W_V", "b_Q", "b_K", "b_V")


def has_global_hooks() -> bool:
    """Whether PyTorch hooks on every module are in force."""
    from torch.nn.modules import module

    return bool(module._global_forward_hooks or module._global_forward_pre_hooks)


@contextmanager
def frozen(*modules: nn.Module) -> Iterator[None]:
    """No gradients to parameters for the time of a ``with`` block, so that a graph holds activations alone."""
    learning = {id(p): p for module in modules for p in module.parameters() if p.requires_grad}
    try:
        for parameter in learning.values():
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning.values():
            parameter.requires_grad_(True)


@dataclass
class Row:
    """What one row of a batch is, for interventions that differ from prompt to prompt or from row to row.

    Attributes:
        prompt: Token ids of the whole prompt, also while only a part of it has been run.
        said: Tokens put behind the prompt so far; the decoder adds to them.
        which: Which of several sets of interventions acts in this row.
    """

    prompt: tuple[int, ...]
    said: list[int] = field(default_factory=list)
    which: int = 0


@dataclass(frozen=True)
class Running:
    """The run a back end is in, for hooks that need to know where their tensors stand.

    Attributes:
        mask: ``[row total]``, 1 at real tokens, over cached positions and those now run; one row may stand for all.
        n_new: Positions run now: the last of them.
        cache: The cache, or None.
    """

    mask: Tensor
    n_new: int
    cache: Any


@dataclass(frozen=True)
class Norm:
    """A norm as it acts: ``(x - mean) / scale * weight + bias``.

    Attributes:
        weight: Effective weight (Gemma's ``1 + w`` already added), or None for a weightless norm.
        bias: Bias, or None.
        centers: True for LayerNorm, which subtracts the mean; False for RMSNorm.
    """

    weight: Tensor | None
    bias: Tensor | None
    centers: bool


@dataclass(frozen=True)
class Shape:
    """Sizes of a model; see ``ModelSpec`` for the meaning."""

    n_layers: int
    n_heads: int
    n_key_value_heads: int
    d_head: int
    d_model: int
    d_vocab: int
    n_ctx: int


@runtime_checkable
class Backend(Protocol):
    """How the rest of mechheads talks to a TransformerLens model.

    Tensors follow TransformerLens' layout: ``q z [batch pos head d_head]``, ``pattern [batch head query key]``.
    ``running`` is set while ``run`` runs. ``splits_rows``: a hook may put more rows behind the residual stream's than
    there were, and the layers from there on run them all.
    """

    kind: str
    shape: Shape
    tokenizer: Any
    architecture: str
    device: torch.device
    dtype: torch.dtype
    flat_qk_norm: bool
    twin: Any
    logit_softcap: float | None
    score_softcap: float | None
    running: Running | None
    splits_rows: bool

    @property
    def weights(self) -> str:
        """``raw``, ``folded`` or ``processed``, as they are now."""
        ...

    def hooks(self, pairs: Sequence[tuple[str, HookFn]]) -> AbstractContextManager[None]:
        """Install hooks by TransformerLens name for the time of a ``with`` block."""
        ...

    def hooked(self) -> bool:
        """Whether any hook now sits on the model beyond those it was loaded with."""
        ...

    def run(self, tokens: Tensor, mask: Tensor, cache: Any, *, last_only: bool) -> Tensor:
        """Run tokens ``[batch pos]`` after what the cache holds; extends the cache in place.

        ``mask [batch total]`` is 1 for real tokens, over cached and new positions. Returns logits
        ``[batch pos vocab]``, or their last position if ``last_only``.
        """
        ...

    def run_with_grad(self, tokens: Tensor, mask: Tensor, cache: Any, *, last_only: bool) -> Tensor:
        """``run``, with gradients to activations that hooks mark as requiring them, and none to parameters."""
        ...

    def prefill(self, tokens: Tensor, mask: Tensor, *, fast: bool | None = None) -> Any:
        """Cache of the tokens, made without any [query, key] matrix where the back end can.

        ``fast`` is what ``fast_prefill`` said a moment ago; None asks it again.
        """
        ...

    def fast_prefill(self) -> bool:
        """Whether ``prefill`` would now use the twin and give what the hooked model gives."""
        ...

    def new_cache(self, batch: int) -> Any:
        """An empty cache whose keys keep absolute positions on every layer."""
        ...

    def select_rows(self, cache: Any, rows: Tensor) -> Any:
        """The cache of some rows of the batch."""
        ...

    def copy_cache(self, cache: Any) -> Any:
        """A cache of its own that holds the same; running on extends a cache in place."""
        ...

    def fork(self, cache: Any, rows: int = 1, *, above: int = -1) -> Any:
        """A copy of a one-row cache, which stays as it is; layers above one hold ``rows`` copies of the row.

        A hook that turns one row into several at a layer's ``z`` lets the layers up to there run only once.
        """
        ...

    def fan_out(self, cache: Any, rows: Sequence[int]) -> Any:
        """A copy in which layer i has ``rows[i]`` rows: those it has, then copies of its first."""
        ...

    def join(self, caches: Sequence[Any]) -> Any:
        """One cache of all rows of several, the shorter ones padded on the left."""
        ...

    def crop(self, cache: Any, length: int) -> Any:
        """The cache with its first ``length`` positions alone; the one given may not be used any more."""
        ...

    def cached_kv(self, cache: Any, layer: int) -> tuple[Tensor, Tensor]:
        """``k, v [batch kv_head pos d_head]``; k as the cache holds it."""
        ...

    def query_hooks(
        self, layer: int, keep: Callable[[str, Tensor], None], *, rotated: bool = True
    ) -> list[tuple[str, HookFn]]:
        """Hooks that report ``"q"`` as multiplied (``[batch head pos d_head]``).

        With ``rotated=False``: ``"q"`` and ``"k"`` (``[batch kv_head pos d_head]``) of the tokens run now, after
        QK-norm and before rotation.
        """
        ...

    def cached_keys_are_final(self) -> bool:
        """Whether cached keys are already normalised and rotated."""
        ...

    def W_O(self, layer: int) -> Tensor:
        """Output projection ``[head d_head d_model]``, a view of the live weights."""
        ...

    def b_O(self, layer: int) -> Tensor | None:
        """Output bias ``[d_model]`` or None."""
        ...

    def qkv(self, layer: int) -> dict[str, Tensor | None]:
        """Input projections by name: ``W_Q W_K W_V [head d_model d_head]`` and ``b_Q b_K b_V [head d_head]`` or None.

        Keys and values by key/value head, not repeated for the query heads that share one.
        """
        ...

    def qk_norm(self, layer: int) -> tuple[Norm, Norm] | None:
        """The norms on a layer's queries and keys, if it has them; weights are ``[d_head]`` or flat over all heads."""
        ...

    def embedding(self) -> Tensor:
        """``W_E [vocab d_model]``: what each token writes into the residual stream (Gemma's scale included)."""
        ...

    def input_norm(self, layer: int) -> Norm | None:
        """The norm whose output attention reads; None where attention reads the stream itself (OLMo-2/3)."""
        ...

    def unembedding(self) -> tuple[Tensor, Tensor | None]:
        """``W_U [d_model vocab]`` and ``b_U [vocab]`` or None."""
        ...

    def final_norm(self) -> Norm:
        """The norm before the unembedding."""
        ...

    def post_norm(self, layer: int) -> tuple[Norm, str] | None:
        """The norm on the attention output, and the name of its scale hook, if there is one."""
        ...

    def window(self, layer: int) -> int | None:
        """Keys a query of this layer may see (itself included), or None for all."""
        ...

    def score_scale(self, layer: int) -> float:
        """What q . k is multiplied by."""
        ...

    def has_sinks(self) -> bool:
        """Whether attention rows may sum to less than one."""
        ...

    def settings(self) -> dict[str, Any]:
        """What changes results beside the weights (configuration, scales, rotary tables), JSON-ready."""
        ...

    def parameters(self) -> list[tuple[str, Tensor]]:
        """Every weight once, by name, in a fixed order."""
        ...

    def stop_tokens(self) -> frozenset[int]:
        """Token ids that end a generation."""
        ...
