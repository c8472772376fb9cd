"""The tuned lens: an affine map for each residual stream, into the basis that the unembedding reads.

Belrose et al. 2023, "Eliciting Latent Predictions from Transformers with the Tuned Lens" (arXiv 2303.08112). The logit
lens reads a middle stream with the final norm and the unembedding as if nothing came after; a tuned lens first passes
it through ``h -> h + h A^T + b``, trained so that the reading says what the model will say at the end.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor

from mechheads.errors import InvalidInput, UnknownName
from mechheads.provenance import json_ready

if TYPE_CHECKING:
    from mechheads.model import Model

CONVENTION = (
    "row vectors, h -> h + h A^T + b; translator i reads the residual stream that enters block i; "
    "the last block's output is read as it is"
)
PLACES = ("after", "before")


@dataclass(frozen=True, eq=False)
class TunedLens:
    """Affine translators, one for each residual stream that enters a block.

    Vectors are rows: ``T_i(h) = h + h A_i^T + b_i``, so that ``A_i`` is the weight of a ``torch.nn.Linear`` beside a
    skip connection, the form in which tuned lenses are published. Stream i enters block i; stream 0 is the embedding.
    The stream that leaves the last block has number ``n_layers`` and no translator: the model itself reads it.

    Tensors are copied to float32 when the lens is made; do not write into them, the hash would not notice.

    Attributes:
        weights: ``[stream d_model d_model]`` the matrices A, of the streams ``first`` to ``n_layers - 1``.
        biases: ``[stream d_model]`` the vectors b.
        n_layers: Blocks of the model it is for.
        first: First stream that has a translator; 0 unless the file it came from begins later.
        name: What to call it.
        meta: Where it came from, JSON-ready: the model it was fitted on, options, KL by stream.

    Raises:
        InvalidInput: For shapes that do not fit each other, or numbers that are not finite.
    """

    weights: Float[Tensor, "stream d_model d_model"]
    biases: Float[Tensor, "stream d_model"]
    n_layers: int
    first: int = 0
    name: str = "tuned lens"
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Check, and keep copies of one's own."""
        w, b = self.weights, self.biases
        if w.ndim != 3 or w.shape[1] != w.shape[2] or not w.shape[1]:
            raise InvalidInput(
                f"the translators have the shape {tuple(w.shape)}; expected square matrices, [stream d_model d_model]."
            )
        if b.shape != w.shape[:2]:
            raise InvalidInput(
                f"the biases have the shape {tuple(b.shape)}; expected {tuple(w.shape[:2])}, a vector for each matrix."
            )
        if self.n_layers < 1 or not 0 <= self.first < self.n_layers or len(w) != self.n_layers - self.first:
            raise InvalidInput(
                f"a lens of {len(w)} translators that begins at stream {self.first} cannot be for {self.n_layers} "
                f"layers: it needs one for each of the streams {self.first} to {self.n_layers - 1}."
            )
        object.__setattr__(self, "weights", w.detach().to(torch.float32, copy=True))
        object.__setattr__(self, "biases", b.detach().to(torch.float32, copy=True))
        object.__setattr__(self, "meta", json_ready(self.meta, where="meta of the lens"))
        finite = torch.isfinite(self.weights).all(-1).all(-1) & torch.isfinite(self.biases).all(-1)
        if not finite.all():
            bad = [self.first + i for i in (~finite).nonzero().flatten().tolist()]
            raise InvalidInput(
                f"the translators of the streams {bad} hold NaN or infinity (in float32); the lens is not usable."
            )

    @classmethod
    def identity(cls, n_layers: int, d_model: int) -> TunedLens:
        """The lens that changes nothing: reading through it is the logit lens."""
        return cls(torch.zeros(n_layers, d_model, d_model), torch.zeros(n_layers, d_model), n_layers, name="identity")

    @classmethod
    def from_full(
        cls,
        matrices: Float[Tensor, "stream d_model d_model"],
        biases: Float[Tensor, "stream d_model"] | None = None,
        *,
        n_layers: int,
        first: int = 0,
        name: str = "tuned lens",
        meta: Mapping[str, Any] | None = None,
    ) -> TunedLens:
        """A lens from whole matrices M, ``h -> h M^T + b``; ``A = M - I``."""
        if matrices.ndim != 3 or matrices.shape[1] != matrices.shape[2]:
            raise InvalidInput(
                f"the matrices have the shape {tuple(matrices.shape)}; expected square ones, [stream d_model d_model]."
            )
        weights = matrices.detach().float() - torch.eye(matrices.shape[-1], device=matrices.device)
        biases = weights.new_zeros(weights.shape[:2]) if biases is None else biases
        return cls(weights, biases, n_layers, first, name, meta or {})

    def __repr__(self) -> str:
        return f"TunedLens({self.name!r}, {self.n_layers} layers, d_model {self.d_model}, hash {self.hash})"

    @property
    def d_model(self) -> int:
        """Width of the residual stream."""
        return self.weights.shape[-1]

    @property
    def convention(self) -> str:
        """What the numbers mean, in words."""
        return CONVENTION

    @cached_property
    def hash(self) -> str:
        """SHA-256 over translators and their place, hex, 16 characters; the name and ``meta`` do not count."""
        digest = hashlib.sha256(f"{self.first} {self.n_layers} {tuple(self.weights.shape)}".encode())
        for tensor in (self.weights, self.biases):
            digest.update(tensor.contiguous().cpu().numpy().tobytes())
        return digest.hexdigest()[:16]

    def describe(self) -> dict[str, Any]:
        """What results record of a lens, JSON-ready."""
        return {
            "name": self.name,
            "hash": self.hash,
            "n_layers": self.n_layers,
            "d_model": self.d_model,
            "first": self.first,
            "convention": self.convention,
            "meta": dict(self.meta),
        }

    # -- reading ---------------------------------------------------------------------------------

    def for_head(self, layer: int, *, at: str = "after") -> int:
        """The stream through which what a head of this layer writes is read.

        A head adds to the stream after its block's attention, and the first stream with a translator that holds
        the sum is the one that enters the next block. ``at="before"`` is the stream that enters the head's own block
        instead, for comparison with work that numbers translators so: that translator was fitted to streams in which
        the head had not written yet.

        Args:
            layer: Layer of the head.
            at: ``"after"``: stream ``layer + 1`` (``n_layers``, the identity, for the last layer). ``"before"``: stream
                ``layer``.

        Raises:
            InvalidInput: If there is no such layer.
            UnknownName: For another ``at``.
        """
        if at not in PLACES:
            raise UnknownName("place to read a head at", at, PLACES)
        if not 0 <= layer < self.n_layers:
            raise InvalidInput(f"layer {layer} does not exist: the lens is for layers 0 to {self.n_layers - 1}.")
        return layer + (at == "after")

    def pull_back(
        self, direction: Float[Tensor, "step d_model"], layer: int, *, at: str = "after"
    ) -> Float[Tensor, "step d_model"]:
        """Pull directions back through the translator that reads a layer's heads.

        Returns the d' with ``d . T(h) = d' . h + d . b`` for every h: ``d' = d + d A``. The constant ``d . b`` belongs
        to no head. Units are those of ``direction . h``.

        Args:
            direction: ``[step d_model]`` directions in the basis that the final norm reads.
            layer: Layer of the heads.
            at: See ``for_head``.

        Returns:
            ``[step d_model]`` float32, on the device of ``direction``.

        Raises:
            InvalidInput: If the layer does not exist, the width is another, or the stream has no translator.
            UnknownName: For another ``at``.
        """
        direction = direction.float()
        found = self._translator(self.for_head(layer, at=at), direction)
        return direction if found is None else direction + direction @ found[0]

    def translate(self, hidden: Float[Tensor, "*at d_model"], stream: int) -> Float[Tensor, "*at d_model"]:
        """``T(h)``: a residual stream in the basis that the final norm reads, float32.

        Args:
            hidden: ``[... d_model]`` the stream that enters block ``stream``; or, at ``n_layers``, leaves the last.
            stream: Number of the stream, 0 to ``n_layers``.

        Raises:
            InvalidInput: If there is no such stream, it has no translator, or the width is another.
        """
        if not 0 <= stream <= self.n_layers:
            raise InvalidInput(f"stream {stream} does not exist: the lens reads streams 0 to {self.n_layers}.")
        hidden = hidden.float()
        found = self._translator(stream, hidden)
        return hidden if found is None else hidden + hidden @ found[0].T + found[1]

    def _translator(self, stream: int, like: Tensor) -> tuple[Tensor, Tensor] | None:
        """A and b of a stream on the device of ``like``; None for the identity."""
        if like.shape[-1] != self.d_model:
            raise InvalidInput(
                f"the last axis is {like.shape[-1]} wide, but the lens is for d_model {self.d_model}; it belongs to "
                "another model."
            )
        if stream == self.n_layers:
            return None
        if stream < self.first:
            raise InvalidInput(
                f"the lens {self.name!r} has no translator for stream {stream}: it begins at stream {self.first}."
            )
        i = stream - self.first
        return self.weights[i].to(like.device), self.biases[i].to(like.device)

    # -- fitting a model, files ------------------------------------------------------------------

    def check(self, model: Model) -> None:
        """Refuse a model the lens cannot be for.

        Warns:
            UserWarning: If the lens records that it was fitted on other weights of this shape.

        Raises:
            InvalidInput: If width or depth differ, or TransformerLens changed the weights of one of the two and not of
                the other, which puts the residual stream in another basis.
        """
        spec = model.spec
        if (spec.d_model, spec.n_layers) != (self.d_model, self.n_layers):
            raise InvalidInput(
                f"the lens {self.name!r} is for {self.n_layers} layers of d_model {self.d_model}, but {spec.name!r} "
                f"has {spec.n_layers} layers of d_model {spec.d_model}; it belongs to another model."
            )
        fitted = self.meta.get("model")
        if not isinstance(fitted, Mapping):
            return
        now = model.describe()
        if fitted.get("weights") != now["weights"]:
            raise InvalidInput(
                f"the lens {self.name!r} was fitted on {fitted.get('weights')} weights, but {spec.name!r} has "
                f"{now['weights']} ones, whose residual stream is in another basis; load the model the same way."
            )
        if fitted.get("dtype") == now["dtype"] and fitted.get("weight_hash") != now["weight_hash"]:
            warnings.warn(
                f"the lens {self.name!r} was fitted on {fitted.get('name')!r} (weights {fitted.get('weight_hash')}), "
                f"and is read on {spec.name!r} (weights {now['weight_hash']}); fit one on these weights to be sure.",
                stacklevel=2,
            )

    def save(self, path: str | Path, *, layout: str = "residual") -> Path:
        """Write the lens; see ``mechheads.lens_files.save_lens``."""
        from mechheads.lens_files import save_lens

        return save_lens(self, path, layout=layout)
