"""What a method sees: the activations of one layer on one trial, at some of its query rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechheads.errors import InvalidInput, ModelRefused, UnknownName
from mechheads.kernels import norm_direction, phi
from mechheads.model import Model
from mechheads.trials import Trial

UNEMBEDS = ("raw", "normed", "centered", "tuned_lens")


@dataclass(frozen=True)
class LayerActs:
    """Activations of one layer on one trial, at some of its query rows.

    Step t is the query row that predicts generated token t; it sits at position ``n_prompt - 1 + t``, so step 0 is the
    last prompt token and prompt rows before it have negative steps. Key j is token j of the prompt followed by
    the generated tokens; keys a row cannot see hold 0 in ``pattern``.

    Attributes:
        model: The model, for its weights.
        trial: The trial.
        layer: Layer index.
        steps: ``[step]`` indices of the generated tokens these rows predict (the answer's, for most methods).
        targets: ``[step]`` the token after each row: generated, the stop token, or the prompt's; -1 if there is none.
        tokens: ``[key]`` token ids of prompt and answer.
        visible: ``[step key]`` what each row can see (causal mask and sliding window).
        q: ``[head step d_head]`` queries as multiplied (after QK-norm and rotation), or None if not captured.
        k: ``[kv_head key d_head]`` keys as multiplied.
        v: ``[kv_head key d_head]`` values, bias included.
        z: ``[head step d_head]`` head outputs before ``W_O``.
        pattern: ``[head step key]`` attention weights.
        final_scale: ``[step 1]`` scale of the norm before the unembedding.
        post_scale: ``[step 1]`` scale of the post-attention norm, or None where there is none.
        answer: ``[step]`` True at the rows that generated the gold answer's tokens.
        null: The same layer on the trial's null variant, at its own rows, for a method that asked for one.
    """

    model: Model
    trial: Trial
    layer: int
    steps: Int[Tensor, " step"]
    targets: Int[Tensor, " step"]
    tokens: Int[Tensor, " key"]
    visible: Bool[Tensor, "step key"]
    q: Float[Tensor, "head step d_head"] | None = None
    k: Float[Tensor, "kv_head key d_head"] | None = None
    v: Float[Tensor, "kv_head key d_head"] | None = None
    z: Float[Tensor, "head step d_head"] | None = None
    pattern: Float[Tensor, "head step key"] | None = None
    final_scale: Float[Tensor, "step 1"] | None = None
    post_scale: Float[Tensor, "step 1"] | None = None
    answer: Bool[Tensor, " step"] | None = None
    null: LayerActs | None = None

    def mask(self, span: str) -> Bool[Tensor, " key"]:
        """True at the keys of a named span of the trial.

        Raises:
            UnknownName: If the trial has no such span.
        """
        out = torch.zeros(len(self.tokens), dtype=torch.bool, device=self.tokens.device)
        out[list(self.trial.positions(span))] = True
        return out

    def need(self, name: str) -> Tensor:
        """A captured tensor, or an error that says how to get it."""
        value = getattr(self, name)
        if value is None:
            raise InvalidInput(f"{name!r} was not captured; register the method with needs=({name!r}, ...).")
        return value

    @property
    def W_O(self) -> Float[Tensor, "head d_head d_model"]:
        """Output projection of this layer."""
        return self.model.W_O(self.layer)

    def direction(self, unembed: str = "raw", *, lens: Any = None) -> Float[Tensor, "step d_model"]:
        """The residual-stream direction that raises each row's predicted token, as read at this layer.

        Args:
            unembed: ``"raw"``: the row of ``W_U`` as it is. ``"centered"``: less the mean row. ``"normed"``: pulled
                back through the final norm and this layer's post-attention norm, their scales frozen at this row,
                so that ``z @ W_O . direction`` is an exact share of the logit (before its soft-cap).
                ``"tuned_lens"``: as ``"normed"``, with the lens' translator of this layer between the two norms: what
                the rest of the network makes of the write, to first order, on average.
            lens: A ``TunedLens``, for ``"tuned_lens"``.

        Raises:
            UnknownName: For another ``unembed``.
            InvalidInput: For ``"tuned_lens"`` without a lens, or a row that predicted no token.
            ModelRefused: For ``"normed"`` on a model whose logit does not decompose (see ``model.verify()``).
        """
        if unembed not in UNEMBEDS:
            raise UnknownName("unembed", unembed, UNEMBEDS)
        if (unembed == "tuned_lens") != (lens is not None):
            raise InvalidInput(
                "unembed='tuned_lens' and lens=... go together: give a lens (mh.load_lens(path), or its path), or "
                "another unembed."
            )
        if (self.targets < 0).any():
            raise InvalidInput(f"some rows of trial {self.trial.id!r} predicted no token, so they have no direction.")
        W_U = self.model.W_U
        rows = W_U[:, self.targets].T.float()
        if unembed == "centered":
            return rows - W_U.float().mean(-1)
        if unembed == "raw":
            return rows
        checked = self.model.verification
        if checked is not None and not checked.normed_exact:
            raise ModelRefused(
                f"unembed={unembed!r} would not be an exact share of the logit on {self.model.spec.name!r}: the frozen "
                f"final norm reproduces the logit only to {checked.logit:.1e}. Use 'raw' or 'centered'."
            )
        norm = self.model.final_norm
        rows = norm_direction(rows, norm.weight, self.need("final_scale"), centers=norm.centers)
        if lens is not None:
            rows = lens.pull_back(rows, self.layer)
        post = self.model.backend.post_norm(self.layer)
        if post is not None:
            rows = norm_direction(rows, post[0].weight, self.need("post_scale"), centers=post[0].centers)
        return rows

    def phi(self, unembed: str = "raw", *, lens: Any = None) -> Float[Tensor, "head step key"]:
        """Contribution of each source token through each head to the predicted token (``kernels.phi``)."""
        return phi(self.need("pattern"), self.need("v"), self.W_O, self.direction(unembed, lens=lens))

    def at_steps(self, steps: Sequence[int]) -> LayerActs:
        """The same layer at the rows of some steps (numbers as in ``steps``).

        Raises:
            InvalidInput: If a step was not captured.
        """
        place = {step: i for i, step in enumerate(self.steps.tolist())}
        missing = [s for s in steps if s not in place]
        if missing:
            raise InvalidInput(f"step {missing[0]} of trial {self.trial.id!r} was not captured.")
        return self.at([place[s] for s in steps])

    def at(self, steps: Sequence[int]) -> LayerActs:
        """The same layer at some of these rows (indices into this object's step axis)."""
        index = torch.as_tensor(list(steps), dtype=torch.long, device=self.tokens.device)

        def rows(t: Tensor | None, axis: int) -> Tensor | None:
            return None if t is None else t.index_select(axis, index)

        return replace(
            self,
            steps=self.steps[index],
            targets=self.targets[index],
            visible=self.visible[index],
            q=rows(self.q, 1),
            z=rows(self.z, 1),
            pattern=rows(self.pattern, 1),
            final_scale=rows(self.final_scale, 0),
            post_scale=rows(self.post_scale, 0),
            answer=rows(self.answer, 0),
        )
