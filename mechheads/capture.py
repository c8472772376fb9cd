"""Capture: one pass over a batch of trials becomes per-layer activations at the answer's query rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from mechheads.backends.base import SITES, HookFn
from mechheads.decode import Batch, Decoded, Observer, greedy
from mechheads.errors import InvalidInput, ModelRefused, UnknownName
from mechheads.kernels import norm_direction, phi
from mechheads.model import Model
from mechheads.text import char_offsets, find_answer_tokens, rouge1_recall
from mechheads.trials import Trial

NEEDS = ("q", "k", "v", "z", "pattern")
UNEMBEDS = ("raw", "normed", "centered")


@dataclass(frozen=True)
class LayerActs:
    """Activations of one layer on one trial, at some of its query rows.

    Step t is the query row that predicts generated token t; step 0 is the last prompt token. Key j is token
    j of the prompt followed by the generated tokens; keys a row cannot see hold 0 in ``pattern``.

    Attributes:
        model: The model, for its weights.
        trial: The trial.
        layer: Layer index.
        steps: ``[step]`` indices of the generated tokens these rows predict (the answer's, for a method).
        targets: ``[step]`` the token each row predicted.
        tokens: ``[key]`` token ids of prompt and answer.
        visible: ``[step key]`` what each row can see (causal mask and sliding window).
        q: ``[head step d_head]`` queries as multiplied (after QK-norm and rotation), or None if not captured.
        k: ``[kv_head key d_head]`` keys as multiplied.
        v: ``[kv_head key d_head]`` values, bias included.
        z: ``[head step d_head]`` head outputs before ``W_O``.
        pattern: ``[head step key]`` attention weights.
        final_scale: ``[step 1]`` scale of the norm before the unembedding.
        post_scale: ``[step 1]`` scale of the post-attention norm, or None where there is none.
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

    def direction(self, unembed: str = "raw") -> Float[Tensor, "step d_model"]:
        """The residual-stream direction that raises each row's predicted token, as read at this layer.

        Args:
            unembed: ``"raw"``: the row of ``W_U`` as it is. ``"centered"``: less the mean row. ``"normed"``: pulled
                back through the final norm and this layer's post-attention norm, their scales frozen at this row,
                so that ``z @ W_O . direction`` is an exact share of the logit (before its soft-cap).

        Raises:
            UnknownName: For another ``unembed``.
            ModelRefused: For ``"normed"`` on a model whose logit does not decompose (see ``model.verify()``).
        """
        if unembed not in UNEMBEDS:
            raise UnknownName("unembed", unembed, UNEMBEDS)
        W_U = self.model.W_U
        rows = W_U[:, self.targets].T.float()
        if unembed == "centered":
            return rows - W_U.float().mean(-1)
        if unembed == "raw":
            return rows
        checked = self.model.verification
        if checked is not None and not checked.normed_exact:
            raise ModelRefused(
                f"unembed='normed' would not be an exact share of the logit on {self.model.spec.name!r}: the frozen "
                f"final norm reproduces the logit only to {checked.logit:.1e}. Use 'raw' or 'centered'."
            )
        norm = self.model.final_norm
        rows = norm_direction(rows, norm.weight, self.need("final_scale"), centers=norm.centers)
        post = self.model.backend.post_norm(self.layer)
        if post is not None:
            rows = norm_direction(rows, post[0].weight, self.need("post_scale"), centers=post[0].centers)
        return rows

    def phi(self, unembed: str = "raw") -> Float[Tensor, "head step key"]:
        """Contribution of each source token through each head to the predicted token (``kernels.phi``)."""
        return phi(self.need("pattern"), self.need("v"), self.W_O, self.direction(unembed))

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
        )


class _Collector(Observer):
    """Receives hooked tensors step by step and cuts them back to each trial's own positions."""

    def __init__(self, model: Model, needs: frozenset[str], n: int):
        self.model, self.needs = model, needs
        self.fresh: dict[tuple[str, int], Tensor] = {}
        self.rows: list[list[dict[tuple[str, int], Tensor]]] = [[] for _ in range(n)]
        self.kv: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(n)]
        self.whole_keys: dict[int, Tensor] = {}

    def hooks(self) -> list[tuple[str, HookFn]]:
        """Hooks for what is needed; each keeps the last query row only."""
        pairs: list[tuple[str, HookFn]] = [("ln_final.hook_scale", self._keep("final_scale", -1, 1))]
        for layer in range(self.model.spec.n_layers):
            at = f"blocks.{layer}."
            if self.needs & {"q", "k"}:
                pairs += self.model.backend.query_hooks(layer, self._keep_qk(layer))
            if "pattern" in self.needs:
                pairs.append((at + SITES["pattern"], self._keep("pattern", layer, 2)))
            if "z" in self.needs:
                pairs.append((at + SITES["z"], self._keep("z", layer, 1)))
            post = self.model.backend.post_norm(layer)
            if post is not None:
                pairs.append((post[1], self._keep("post_scale", layer, 1)))
        return pairs

    def _keep(self, name: str, layer: int, axis: int) -> HookFn:
        def hook(t: Tensor) -> None:
            self.fresh[name, layer] = t.detach().narrow(axis, t.shape[axis] - 1, 1).clone()

        return hook

    def _keep_qk(self, layer: int):
        def keep(name: str, t: Tensor) -> None:
            if name == "q":
                self.fresh[name, layer] = t.detach()[..., -1:, :].clone()
            else:
                self.whole_keys[layer] = t.detach()

        return keep

    def on_step(self, batch: Batch) -> None:
        """File one step's tensors under their trials."""
        for i, row in enumerate(batch.rows):
            own = batch.positions(i)
            self.rows[row].append(
                {
                    (name, layer): t[i][..., own] if name == "pattern" else t[i]
                    for (name, layer), t in self.fresh.items()
                }
            )
        self.fresh.clear()

    def on_end(self, i: int, batch: Batch) -> None:
        """Copy a finished trial's keys and values out of the cache."""
        if not self.needs & {"k", "v"}:
            return
        own = batch.positions(i)
        for layer in range(self.model.spec.n_layers):
            k, v = self.model.backend.cached_kv(batch.cache, layer)
            k = self.whole_keys.get(layer, k)
            self.kv[batch.rows[i]].append((k[i][:, own], v[i][:, own]))

    def layer(self, trial: Trial, row: int, layer: int, decoded: Decoded) -> LayerActs:
        """Put one trial's layer together."""
        device = self.model.backend.device
        steps = len(decoded.tokens)
        n_keys = len(trial.tokens) + steps
        rows = self.rows[row][:steps]
        stack = {name: [r[name, layer] for r in rows] for name in ("q", "z", "pattern") if name in self.needs}
        k, v = self.kv[row][layer] if self.kv[row] else (None, None)
        post = [r["post_scale", layer] for r in rows if ("post_scale", layer) in r]
        return LayerActs(
            model=self.model,
            trial=trial,
            layer=layer,
            steps=torch.arange(steps, device=device),
            targets=torch.tensor(decoded.tokens, dtype=torch.long, device=device),
            tokens=torch.tensor([*trial.tokens, *decoded.tokens], device=device),
            visible=_visible(len(trial.tokens), steps, n_keys, self.model.backend.window(layer)).to(device),
            q=torch.cat(stack["q"], dim=1).float() if stack.get("q") else None,
            k=_pad(k, n_keys) if k is not None and "k" in self.needs else None,
            v=_pad(v, n_keys) if v is not None and "v" in self.needs else None,
            z=torch.cat([z.transpose(0, 1) for z in stack["z"]], dim=1).float() if stack.get("z") else None,
            pattern=(
                torch.cat(
                    [torch.nn.functional.pad(p, (0, n_keys - p.shape[-1])) for p in stack["pattern"]], dim=1
                ).float()
                if stack.get("pattern")
                else None
            ),
            final_scale=torch.cat([r["final_scale", -1] for r in rows]).float() if rows else None,
            post_scale=torch.cat(post).float() if post else None,
        )


def _pad(x: Tensor, n_keys: int) -> Tensor:
    """Cut or zero-pad the key axis: the last generated token was never run, so it has no key or value."""
    x = x[:, :n_keys].float()
    return torch.nn.functional.pad(x, (0, 0, 0, n_keys - x.shape[1]))


def _visible(n_prompt: int, steps: int, n_keys: int, window: int | None) -> Tensor:
    """``[step key]``: row t sits at position ``n_prompt - 1 + t``."""
    query = torch.arange(steps)[:, None] + n_prompt - 1
    key = torch.arange(n_keys)[None, :]
    seen = key <= query
    return seen if window is None else seen & (key > query - window)


@dataclass(frozen=True, eq=False)
class TrialCapture:
    """One trial's greedy answer and the activations at every step of it.

    Attributes:
        model: The model.
        trial: The trial.
        decoded: The greedy answer.
        text: Its text.
    """

    model: Model
    trial: Trial
    decoded: Decoded
    text: str
    _collector: _Collector
    _row: int

    def layer(self, layer: int) -> LayerActs:
        """Activations of one layer at every step that predicted a token of the answer."""
        self.model.check_layer(layer)
        return self._collector.layer(self.trial, self._row, layer, self.decoded)

    @cached_property
    def answer_steps(self) -> tuple[int, ...]:
        """Steps that generated the gold answer's tokens (empty if the answer is not in the output).

        The first exact match of the tokenised answer; failing that the first case-insensitive match in the text,
        taking every token it overlaps.
        """
        if self.trial.answer is None or not self.decoded.tokens:
            return ()
        text, offsets = char_offsets(self.model.decode, self.decoded.tokens)
        return find_answer_tokens(
            [text],
            self.decoded.tokens,
            [answer_tokens(self.model, self.trial.answer)],
            self.trial.answer,
            offsets=offsets,
        )

    @cached_property
    def rouge1_recall(self) -> float:
        """ROUGE-1 recall of the greedy answer against the gold answer, 0 to 1."""
        return rouge1_recall(self.text, self.trial.answer or "")


def answer_tokens(model: Model, answer: str) -> list[int]:
    """Token ids of an answer by itself, without special tokens."""
    return list(model.tokenizer(answer, add_special_tokens=False)["input_ids"])


def capture(
    model: Model,
    trials: Sequence[Trial],
    *,
    needs: Sequence[str] = ("pattern", "v"),
    max_new_tokens: int = 50,
    stop_at_newline: bool = True,
    padding: str = "left",
) -> list[TrialCapture]:
    """Run one batch of trials and keep what heads did at each step of the greedy answer.

    One prefill a trial (no [query, key] pattern is stored), then one hooked step a token: about the cost of
    generating the answer.

    Args:
        model: The model.
        trials: The batch; all are run together.
        needs: Which tensors to keep, of ``q k v z pattern``.
        max_new_tokens: Longest answer.
        stop_at_newline: End the answer before a line break, as published for LOCOS.
        padding: ``"left"`` or ``"right"``; changes no result.

    Raises:
        UnknownName: For an unknown need.
        InvalidInput: For prompts the model cannot run.
    """
    for name in needs:
        if name not in NEEDS:
            raise UnknownName("capture", name, NEEDS)
    collector = _Collector(model, frozenset(needs), len(trials))
    answers = greedy(
        model,
        [t.tokens for t in trials],
        max_new_tokens=max_new_tokens,
        stop_at_newline=stop_at_newline,
        padding=padding,
        observer=collector,
    )
    return [
        TrialCapture(model, trial, answer, model.decode(answer.tokens), collector, i)
        for i, (trial, answer) in enumerate(zip(trials, answers, strict=True))
    ]
