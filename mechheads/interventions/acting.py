"""Interventions as hooks: which rows, heads and positions of a tensor, and what is put there.

Several sets of interventions may act in different rows of one batch: a row says which of them is its own
(``Row.which``). Hooks find out from the back end where their tensors stand, and from the decoder whose rows they are.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from mechheads.backends.base import SITES, HookFn, Row, Running
from mechheads.errors import InvalidInput
from mechheads.heads import HeadSet
from mechheads.interventions.reference import activations, donor_of
from mechheads.interventions.through_z import ThroughZ, takes_effect
from mechheads.interventions.values import WEIGHTS, Intervention
from mechheads.model import Model

ATTENTION_SITES = ("pattern", "attn_scores")
_BY_PROMPT = ("resample", "patch")
Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Act:
    """One intervention and the heads it acts on.

    Attributes:
        intervention: What is done, prepared.
        heads: Heads in every row; or, by set, in the rows whose ``which`` is that set.
    """

    intervention: Intervention
    heads: HeadSet | Mapping[int, HeadSet]

    @property
    def site(self) -> str:
        """Where it acts; pruned heads write nothing, which is zero at ``z``."""
        return "z" if self.intervention.site == WEIGHTS else self.intervention.site

    def touches(self, row: Row) -> bool:
        """Whether it acts on any head in a row."""
        heads = self.heads if isinstance(self.heads, HeadSet) else self.heads.get(row.which)
        return bool(heads)

    def by_layer(self) -> dict[int, list[tuple[int | None, int]]]:
        """(set, head) pairs of each layer; None stands for all rows."""
        sets = {None: self.heads} if isinstance(self.heads, HeadSet) else self.heads
        out: dict[int, list[tuple[int | None, int]]] = {}
        for which, heads in sets.items():
            for head in heads:
                out.setdefault(head.layer, []).append((which, head.head))
        return out


class Acting:
    """The hooks of some acts on a model, and what they need to know of the rows that are run.

    Args:
        model: The model.
        acts: What is done, in order.

    Attributes:
        counts: How often each hook fired, by name.
        held: Prompts whose donors and partners are kept although other rows are run meanwhile.
    """

    def __init__(self, model: Model, acts: Sequence[Act]):
        self.model, self.acts = model, list(acts)
        self.counts: dict[str, int] = {}
        self.held: frozenset[tuple[int, ...]] = frozenset()
        # Weights that are zero while this acts, and what they were.
        self.pruned: list[tuple[Tensor, Tensor]] = []
        self._active = True
        self._rows: list[weakref.ref[Row]] = []
        # Activations of donors and partners at the heads that need them, by act and then prompt; and who is whose.
        self._lent: dict[int, dict[Tokens, dict[int, Tensor]]] = {}
        self._lenders: dict[int, dict[Tokens, Tokens]] = {}
        self._means: dict[tuple[int, int], Tensor] = {}
        self._slot_of: dict[tuple[int, int], Tensor] = {}
        self._pairs: dict[tuple[int, int, tuple[int, ...]], tuple[Tensor, Tensor]] = {}
        self._layers = [act.by_layer() for act in self.acts]
        # Layers where attention is edited through z, and where anything is done.
        self._through: set[int] = set()
        self.layers = {layer for layers in self._layers for layer in layers}

    def hooks(self) -> list[tuple[str, HookFn]]:
        """One counting hook for each layer and site that is acted on, in the order in which the model passes them."""
        native: dict[str, list[int]] = {}
        through: dict[int, list[int]] = {}
        with unaltered(self.model):  # others in force would hide what a hook does, or be counted
            own_road = {
                act.site: not takes_effect(self.model, act.site) for act in self.acts if act.site in ATTENTION_SITES
            }
        for i, act in enumerate(self.acts):
            for layer in self._layers[i]:
                if own_road.get(act.site):
                    through.setdefault(layer, []).append(i)
                else:
                    native.setdefault(f"blocks.{layer}.{SITES[act.site]}", []).append(i)
        self._through = set(through)
        self._refuse_mixed_roads()
        # Those that go through z must see queries as they are edited, and leave the last word to edits at z.
        before, after = ([n for n in native if n.endswith(SITES["z"]) == last] for last in (False, True))
        pairs = [(name, self._hook(name, native[name])) for name in before]
        for layer, places in through.items():
            pairs += ThroughZ(self, layer, places).hooks()
        pairs += [(name, self._hook(name, native[name])) for name in after]
        for name, _ in pairs:
            self.counts.setdefault(name, 0)
        return pairs

    def _refuse_mixed_roads(self) -> None:
        """Refuse what would act in another order than on other architectures.

        Raises:
            InvalidInput: If an edit of attention that goes through ``z`` meets another one in force in its layer.
        """
        for other in _in_force(self.model):
            both = (self._through & other.layers) | (other._through & self.layers)
            if both and other is not self:
                raise InvalidInput(
                    f"layer {min(both)} is under an intervention already, and {self.model.spec.architecture} lets its "
                    "attention be edited at 'z' alone, where the two would meet in the wrong order; apply them "
                    "together, in one call."
                )

    def begin(self, rows: list[Row]) -> None:
        """Run the donors and partners of rows that are about to be run, on the model without any intervention.

        Raises:
            InvalidInput: If a prompt has no donor or partner, or lacks positions that are acted at.
        """
        if not self._active:
            return
        # Rows of a run that this one interrupts are still to go on; those of a run that is over are gone.
        alive = [row for ref in self._rows if (row := ref()) is not None]
        self._rows = [weakref.ref(row) for row in [*alive, *rows]]
        for i, act in enumerate(self.acts):
            for length in {len(row.prompt) for row in rows if act.touches(row)}:
                _check_inside(act.intervention, length)
            if act.intervention.kind not in _BY_PROMPT or not self._layers[i]:
                continue
            known = self._lenders.get(i, {})
            kept = {row.prompt: known[row.prompt] for row in alive if row.prompt in known}
            prompts = {row.prompt for row in rows if act.touches(row)} | self.held
            self._lenders[i] = kept | {p: known.get(p) or lender_of(act.intervention, p) for p in prompts}
            wanted = dict.fromkeys(self._lenders[i].values())
            have = {p: a for p, a in self._lent.get(i, {}).items() if p in wanted}
            heads = {layer: self._heads(i, layer) for layer in self._layers[i]}
            with self.lifted(), unaltered(self.model):
                new = activations(self.model, act.site, [p for p in wanted if p not in have], heads)
            self._lent[i] = have | new

    @contextmanager
    def lifted(self) -> Iterator[None]:
        """Without what acts here, pruned weights included, for the time of a ``with`` block."""
        if not self._active:
            yield
            return
        self._active = False
        try:
            put_back(self.pruned)
            yield
        finally:
            set_to_zero(self.pruned)
            self._active = True

    def fired(self, name: str) -> bool:
        """Count a hook; False while it must not act."""
        if self._active:
            self.counts[name] += 1
        return self._active

    # -- where a tensor stands -------------------------------------------------------------------

    def _heads(self, i: int, layer: int) -> list[int]:
        """Heads of a layer that act i touches in any row, rising."""
        return sorted({head for _, head in self._layers[i][layer]})

    def _slots(self, i: int, layer: int, head: Tensor) -> Tensor:
        """Where heads stand among those."""
        if (i, layer) not in self._slot_of:
            self._slot_of[i, layer] = torch.tensor(self._heads(i, layer), device=head.device)
        return torch.searchsorted(self._slot_of[i, layer], head)

    def pairs_of(self, i: int, layer: int, rows: int) -> tuple[Tensor, Tensor]:
        """Row and head of everything act i touches in a layer of a tensor with so many rows."""
        which = self._which(i, rows)
        key = (i, layer, which)
        if key not in self._pairs:
            found = [
                (row, head)
                for of_set, head in self._layers[i].get(layer, [])
                for row, own in enumerate(which)
                if of_set is None or own == of_set
            ]
            index = torch.tensor(found, dtype=torch.long, device=self.model.backend.device).reshape(-1, 2)
            self._pairs[key] = (index[:, 0].contiguous(), index[:, 1].contiguous())
        return self._pairs[key]

    def _which(self, i: int, rows: int) -> tuple[int, ...]:
        if isinstance(self.acts[i].heads, HeadSet):
            return (0,) * rows
        return tuple(row.which for row in self.rows(rows))

    def rows(self, n: int) -> list[Row]:
        """The rows of a tensor; where rows split off in mid-model, a tensor has the first of them."""
        rows = self.model.rows
        if rows is None or len(rows) < n:
            raise InvalidInput(
                "this intervention differs from prompt to prompt, and the model is run in a way that does not say "
                "which prompt a row is; run it by ca.generate, ca.score, ca.sweep or model.logits."
            )
        return rows[:n]

    def running(self) -> Running:
        """The run in progress."""
        if self.model.backend.running is None:
            raise InvalidInput(
                "this intervention depends on positions, and the model is run past mechheads, which then does not know "
                "them; run it by ca.generate, ca.score, ca.sweep or model.logits."
            )
        return self.model.backend.running

    def positions(self, rows: int) -> Tensor:
        """``[row pos]`` of the tokens now run, counted from each prompt's start; padding is below 0."""
        running = self.running()
        at = (running.mask.long().cumsum(-1) - 1).masked_fill(running.mask == 0, -1)[:, -running.n_new :]
        return at.expand(rows, -1) if len(at) == 1 else at

    def chosen(self, i: int, rows: int) -> Tensor | None:
        """``[row pos]`` true where act i acts; None for everywhere."""
        wanted = self.acts[i].intervention.positions
        partner = self.acts[i].intervention.kind == "patch"
        if wanted == "all" and not partner:
            return None
        at = self.positions(rows)
        lengths = torch.tensor([len(row.prompt) for row in self.rows(rows)], device=at.device)[:, None]
        inside = (at >= 0) & ((at < lengths) if partner else True)
        if wanted == "all":
            return inside
        if wanted == "prompt":
            return inside & (at < lengths)
        if wanted == "answer":
            return inside & (at >= lengths - 1)
        hit = torch.zeros_like(inside)
        for p in wanted:
            assert isinstance(p, int)
            hit |= at == (p if p >= 0 else lengths + p)
        return inside & hit & (at < lengths)

    # -- what is put there -----------------------------------------------------------------------

    def _hook(self, name: str, places: Sequence[int]) -> HookFn:
        """A hook that does what some acts do at one layer and site."""
        layer = int(name.split(".")[1])

        def hook(t: Tensor) -> Tensor | None:
            if not self.fired(name):
                return None
            out = t.clone()
            for i in places:
                row, head = self.pairs_of(i, layer, len(out))
                if len(row) and self.acts[i].site in ATTENTION_SITES:
                    out[row, head] = self.attention(i, out[row, head], row, len(out))
                elif len(row):
                    self._replace(i, layer, out, row, head)
            return out

        return hook

    def _replace(self, i: int, layer: int, out: Tensor, row: Tensor, head: Tensor) -> None:
        """Overwrite ``[row pos head d_head]`` at some rows and heads, where act i acts."""
        chosen = self.chosen(i, len(out))
        value = self._value(i, layer, out, row, head).to(out)
        if chosen is not None:
            value = torch.where(chosen[row][:, :, None], value, out[row, :, head])
        out[row, :, head] = value

    def _value(self, i: int, layer: int, out: Tensor, row: Tensor, head: Tensor) -> Tensor:
        """``[pair pos d_head]`` (or one position for all) of what stands in the heads' place."""
        act = self.acts[i].intervention
        if act.kind in ("zero", "prune"):
            return out.new_zeros(len(row), 1, out.shape[-1])
        slot = self._slots(i, layer, head)
        if act.kind == "mean":
            return self._mean(i, layer, out)[slot][:, None]
        at = self.positions(len(out))
        if act.kind == "mean_positional":
            table = self._mean(i, layer, out)
            return table[at[row].clamp(0, len(table) - 1), slot[:, None]]
        return self._lent_value(i, layer, at, row, slot)

    def _mean(self, i: int, layer: int, like: Tensor) -> Tensor:
        """``[(position) head d_head]`` of the heads that act i touches, moved once to where the model runs."""
        if (i, layer) not in self._means:
            values = self.acts[i].intervention.values
            if values is None:
                raise InvalidInput("the mean was not taken yet; call intervention.prepare(model) first.")
            self._means[i, layer] = values[..., layer, self._heads(i, layer), :].to(like.device)
        return self._means[i, layer]

    def _lent_value(self, i: int, layer: int, at: Tensor, row: Tensor, slot: Tensor) -> Tensor:
        """What donors or partners had: at the same distance from the end, or at the same position."""
        act, rows = self.acts[i].intervention, self.rows(len(at))
        by_row = {}
        for r in sorted(set(row.tolist())):
            lent = self._lent[i][self._lenders[i][rows[r].prompt]][layer]
            shift = len(lent) - len(rows[r].prompt) if act.kind == "resample" else 0
            by_row[r] = lent[(at[r] + shift).clamp(0, len(lent) - 1)]
        return torch.stack([by_row[r][:, h] for r, h in zip(row.tolist(), slot.tolist(), strict=True)])

    def attention(self, i: int, t: Tensor, row: Tensor, rows: int) -> Tensor:
        """``[pair query key]`` scores or weights as they are to be."""
        act = self.acts[i].intervention
        if act.site == "pattern":
            new = torch.zeros_like(t)
        else:
            # Masked scores are the lowest number there is, or minus infinity; they stay.
            masked = t <= torch.finfo(t.dtype).min / 2
            to = 0.0 if act.kind == "zero" else t + self._bias(i, row, rows, masked).to(t)
            new = torch.where(masked, t, to)
        chosen = self.chosen(i, rows)
        return new if chosen is None else torch.where(chosen[row][:, :, None], new, t)

    def _bias(self, i: int, row: Tensor, rows: int, masked: Tensor) -> Tensor:
        """What is added to the scores ``[pair query key]``: at most 0 where no sink stands beside them.

        A softmax does not see a constant, and large scores would lose the digits in which they differ.
        """
        bias = self.acts[i].intervention.strength * self.biased_keys(i, rows)[row][:, None].float()
        if self.model.backend.has_sinks():
            return bias
        highest = torch.where(masked, -torch.inf, bias).amax(-1, keepdim=True)
        return bias - torch.where(highest.isfinite(), highest, 0.0)

    def biased_keys(self, i: int, rows: int) -> Tensor:
        """``[row key]`` true at the keys that act i biases attention to."""
        keys = self.acts[i].intervention.keys
        mask = self.running().mask
        mask = mask.expand(rows, -1) if len(mask) == 1 else mask
        out = torch.zeros_like(mask, dtype=torch.bool)
        for r, row in enumerate(self.rows(rows)):
            columns = mask[r].nonzero().squeeze(-1)
            if isinstance(keys, frozenset):
                tokens = [*row.prompt, *row.said][: len(columns)]
                hit = [k for k, token in enumerate(tokens) if token in keys]
            else:
                length = len(row.prompt)
                hit = [k for p in keys or () if (k := p + length * (p < 0)) < len(columns)]
            out[r, columns[hit]] = True
        return out


@contextmanager
def unaltered(model: Model) -> Iterator[None]:
    """The model without any intervention now in force, for the time of a ``with`` block."""
    with ExitStack() as stack:
        # The one put in force first knows the weights as they were, so it is lifted last.
        for acting in reversed(_in_force(model)):
            stack.enter_context(acting.lifted())
        yield


def _in_force(model: Model) -> list[Acting]:
    """Everything that acts on a model now, in the order in which it was put in force."""
    owners = [getattr(listener, "__self__", None) for listener in model.row_listeners]
    return [owner for owner in owners if isinstance(owner, Acting)]


def put_back(pruned: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Pruned weights as they were."""
    with torch.no_grad():
        for live, was in pruned:
            live.copy_(was)


def set_to_zero(pruned: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Prune them again."""
    with torch.no_grad():
        for live, _ in pruned:
            live.zero_()


def lender_of(act: Intervention, prompt: Tokens) -> Tokens:
    """The prompt whose activations a prompt gets.

    Raises:
        InvalidInput: If there is none.
    """
    if act.kind == "resample":
        assert act.reference is not None
        return donor_of(prompt, act.reference, act.seed)
    partner = (act.partners or {}).get(prompt)
    if partner is None:
        raise InvalidInput(
            f"the prompt of {len(prompt)} tokens that begins {list(prompt[:5])} has no partner to be patched from; "
            "patch(partners) needs one for every prompt that is run."
        )
    return partner


def _check_inside(act: Intervention, length: int) -> None:
    """Positions that a prompt does not have would leave it as it is, unnoticed."""
    for what, given in (("at the positions", act.positions), ("on the keys", act.keys)):
        wrong = [p for p in given if not -length <= p < length] if isinstance(given, tuple) else []
        if wrong:
            raise InvalidInput(
                f"an intervention acts {what} {list(given or ())}, but a prompt has {length} tokens, so {wrong[0]} is "
                "outside it; give indices inside every prompt, or run the others without it."
            )
