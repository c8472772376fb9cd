"""What an intervention is: a frozen value. Nothing here touches a model but ``prepare``, which takes means on it."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from torch import Tensor

from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import HeadSet
from mechheads.interventions.reference import mean_activation, positional_mean
from mechheads.model import Model
from mechheads.provenance import content_hash
from mechheads.trials import Trial, TrialSet

WEIGHTS = "weights"
# What can be done, and where; the first site is the default.
KINDS: dict[str, tuple[str, ...]] = {
    "zero": ("z", "q", "pattern", "attn_scores"),
    "mean": ("z", "q"),
    "mean_positional": ("z", "q"),
    "resample": ("z", "q"),
    "patch": ("z", "q"),
    "bias": ("attn_scores",),
    "prune": (WEIGHTS,),
}
POSITIONS = ("all", "prompt", "answer")
_REFERRING = ("mean", "mean_positional", "resample")

_PARTNERS_ARE = "give the tokens of each prompt's partner by its own: {tuple(corrupted.tokens): clean.tokens}."
_STRONGEST = 1e4

Tokens = tuple[int, ...]
Positions = str | tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Intervention:
    """Replace something of some heads while the model runs; see the functions that make one for what it means.

    Attributes:
        kind: One of ``zero mean mean_positional resample patch bias prune``.
        site: ``z`` (head output before ``W_O``), ``q`` (query before QK-norm and rotary), ``pattern``, ``attn_scores``
            or ``weights``; which of them depends on the kind.
        heads: The heads it acts on; None until ``.on(heads)`` names them.
        reference: Trials whose prompts a mean is taken over, or donors are drawn from.
        values: What stands in their place, once ``prepare`` computed it: ``[layer head d_head]`` for a mean,
            ``[position layer head d_head]`` for one by position, whose last entry is the mean over all positions.
        positions: Query positions it acts at: ``"all"``, ``"prompt"`` (every prompt token), ``"answer"`` (the rows that
            predict the answer: from the last prompt token on), or indices into the prompt (negative: from its end),
            which every prompt must have.
        seed: Seed of the draw of donors.
        partners: Prompt whose activations a prompt gets (patch only).
        strength: What is added to scores, in units of the scores before softmax, so nats of attention odds; at most
            10,000 either way, beyond which nothing would change.
        keys: Where it is added: token ids, wherever they stand (a frozenset), or positions in the prompt (a tuple).

    Raises:
        UnknownName: For another kind or site.
        InvalidInput: If what the kind needs is missing, or a value makes no sense.
    """

    kind: str
    site: str = "z"
    heads: HeadSet | None = None
    reference: TrialSet | None = None
    values: Tensor | None = None
    positions: Positions = "all"
    seed: int = 0
    partners: Mapping[Tokens, Tokens] | None = None
    strength: float = 0.0
    keys: frozenset[int] | tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise UnknownName("intervention", self.kind, KINDS)
        if self.site not in KINDS[self.kind]:
            raise UnknownName("site", self.site, KINDS[self.kind], hint=f"These are the sites of {self.kind!r}.")
        if self.kind in _REFERRING and not self.reference:
            what = "prompts to draw from" if self.kind == "resample" else "a reference set to take the mean over"
            name = "resample ablation" if self.kind == "resample" else "mean ablation"
            raise InvalidInput(
                f'{name} needs {what}; pass reference=trials, for instance needles.split("calibration").'
            )
        _check_positions(self.positions)
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or self.seed < 0:
            raise InvalidInput(f"seed is {self.seed!r}; it must be a whole number from 0.")
        if self.kind == "patch":
            _check_partners(self.partners)
        if self.kind == "bias":
            _check_bias(self.strength, self.keys)
        if self.kind == "prune" and self.positions != "all":
            raise InvalidInput(f"pruned weights act at all positions; positions={self.positions!r} cannot be had.")

    def on(self, heads: Any) -> Intervention:
        """The same intervention on these heads (a HeadSet, or anything a head set parses from)."""
        return replace(self, heads=HeadSet.parse(heads))

    def at(self, positions: str | int | Sequence[int]) -> Intervention:
        """The same intervention at these query positions; see the attribute."""
        return replace(self, positions=as_positions(positions))

    def describe(self) -> dict[str, Any]:
        """JSON-ready record for provenance: everything that changes what it does."""
        out: dict[str, Any] = {"kind": self.kind, "site": self.site}
        if self.heads is not None:
            out["heads"] = self.heads.labels
        if self.reference is not None:
            out["reference"] = {
                "name": self.reference.name, "hash": self.reference.hash, "n": len(self.reference),
            }  # fmt: skip
        if self.positions != "all":
            out["positions"] = self.positions if isinstance(self.positions, str) else list(self.positions)
        if self.kind == "resample":
            out["seed"] = self.seed
        if self.partners is not None:
            pairs = sorted([list(a), list(b)] for a, b in self.partners.items())
            out["partners"] = {"hash": content_hash(pairs), "n": len(pairs)}
        if self.kind == "bias":
            keys = sorted(self.keys or ())
            out |= {"strength": self.strength, "keys": keys, "keys_are": _kind_of_keys(self.keys)}
        return out

    def prepare(self, model: Model, *, batch_size: int = 8) -> Intervention:
        """Compute what needs the model (the means), once; a no-op otherwise.

        The model is taken as it stands, with any hooks now on it.

        Raises:
            InvalidInput: If a reference prompt, a partner or a token id is not one that this model can run.
        """
        self._check_tokens(model)
        if self.reference is None or self.values is not None or self.kind == "resample":
            return self
        taken = mean_activation if self.kind == "mean" else positional_mean
        return replace(self, values=taken(model, self.site, self.reference, batch_size=batch_size))

    def _check_tokens(self, model: Model) -> None:
        """Refuse what was made with another model's tokenizer; a mean looks at its prompts itself."""
        if self.kind == "resample":
            for trial in self.reference or ():
                model.check_tokens(trial.tokens, what=f"reference trial {trial.id!r}")
        for partner in (self.partners or {}).values():
            model.check_tokens(partner, what=f"a partner of {len(partner)} tokens")
        if isinstance(self.keys, frozenset):
            model.check_tokens(sorted(self.keys)[-1:], what="the list of tokens that attention is biased to")


def zero_ablation(*, site: str = "z", positions: str | int | Sequence[int] = "all") -> Intervention:
    """Set heads to zero at a site.

    Args:
        site: ``"z"``: the head writes nothing (the layer's ``b_O`` stays). ``"q"``: a zero query makes all scores
            equal, so the head attends uniformly over what it may see **and still writes**. ``"attn_scores"``: zero
            scores at visible keys, so uniform attention whatever else goes into scores. ``"pattern"``: no attention
            at all, so the head writes nothing, as at ``"z"``. Where the model has an attention sink, it keeps the
            share that its own score gives it beside scores of zero.
        positions: Query positions; see ``Intervention``.

    Raises:
        UnknownName: For another site.
        InvalidInput: For positions that are none.
    """
    return Intervention("zero", site, positions=as_positions(positions))


def mean_ablation(
    *,
    site: str = "z",
    reference: Sequence[Trial] | None = None,
    positions: str | int | Sequence[int] = "all",
) -> Intervention:
    """Set heads to their mean activation over a reference set.

    The mean is taken for each head over all prompt positions of all reference trials, and put in at every position
    of prompt and answer (arXiv 2607.01002 does this at ``q``, over 50 calibration prompts).

    Args:
        site: ``"z"`` or ``"q"``.
        reference: Trials for the mean; keep them apart from the test trials. Required.
        positions: Query positions at which it is put in; see ``Intervention``.

    Raises:
        InvalidInput: Without a reference, or with an empty one.
        UnknownName: For another site.
    """
    return Intervention("mean", site, reference=_trials(reference), positions=as_positions(positions))


def mean_positional_ablation(
    *,
    site: str = "z",
    reference: Sequence[Trial] | None = None,
    positions: str | int | Sequence[int] = "all",
) -> Intervention:
    """Set heads to their mean activation at the same position, over a reference set.

    Positions count from the prompt's start; the mean at a position is over the reference prompts that reach it. Beyond
    the longest of them (generated tokens, mostly) stands the mean over all positions, as in ``mean_ablation``.

    Args:
        site: ``"z"`` or ``"q"``.
        reference: Trials for the mean. Required.
        positions: Query positions at which it is put in; see ``Intervention``.

    Raises:
        InvalidInput: Without a reference, or with an empty one.
        UnknownName: For another site.
    """
    return Intervention("mean_positional", site, reference=_trials(reference), positions=as_positions(positions))


def resample_ablation(
    *,
    site: str = "z",
    reference: Sequence[Trial] | None = None,
    seed: int = 0,
    positions: str | int | Sequence[int] = "all",
) -> Intervention:
    """Give heads what they had in another prompt of a reference set.

    Each prompt has one donor, drawn from the seed and the prompt's own tokens, never the prompt itself: so the draw
    depends on nothing else, batch, order and machine included. The two are aligned at their **ends**, where prompts
    ask; before the donor's beginning stands its first position, at generated tokens its last.

    Args:
        site: ``"z"`` or ``"q"``.
        reference: Trials to draw donors from. Required.
        seed: Seed of the draw; another seed, other donors.
        positions: Query positions at which it is put in; see ``Intervention``.

    Raises:
        InvalidInput: Without a reference, with an empty one, or for a seed that is none.
        UnknownName: For another site.
    """
    return Intervention("resample", site, reference=_trials(reference), seed=seed, positions=as_positions(positions))


def patch(
    partners: Mapping[tuple[int, ...], Sequence[int]],
    *,
    site: str = "z",
    positions: str | int | Sequence[int] = "all",
) -> Intervention:
    """Give heads what they had in the prompt's partner: the clean prompt for a corrupted one, or the other way round.

    The partner's unaltered run is taken at the same positions; generated tokens have no partner and are left alone.

    Args:
        partners: Token ids of each prompt's partner by the prompt's own, equal in length:
            ``{tuple(corrupted.tokens): clean.tokens}``. A prompt without one is refused when it is run.
        site: ``"z"`` or ``"q"``.
        positions: Query positions at which it is put in; see ``Intervention``.

    Raises:
        InvalidInput: If there are none, or two differ in length.
        UnknownName: For another site.
    """
    if not isinstance(partners, Mapping):
        raise InvalidInput(f"partners are a {type(partners).__name__}; {_PARTNERS_ARE}")
    pairs = {_ints(a, "a prompt"): _ints(b, "a partner") for a, b in partners.items()}
    return Intervention("patch", site, partners=pairs, positions=as_positions(positions))


def attention_bias(
    strength: float,
    *,
    tokens: Sequence[int] | None = None,
    keys: Sequence[int] | None = None,
    positions: str | int | Sequence[int] = "all",
) -> Intervention:
    """Add to the attention scores at chosen keys, before the softmax.

    A head's attention on those keys is multiplied by ``exp(strength)`` and the row normalised again (with its sink,
    where the model has one); positive draws attention there. Where scores have a soft-cap it is added after the cap.
    Keys that a query may not see stay unseen; if all it sees are biased alike, nothing changes.

    Args:
        strength: What is added (nats of attention odds); 0 changes nothing, -10,000 takes a key away.
        tokens: Token ids at whose keys it is added, in prompt and answer, or
        keys: positions of the prompt (negative: from its end).
        positions: Query positions at which it is added; see ``Intervention``.

    Raises:
        InvalidInput: Unless exactly one of tokens and keys is given, for a strength beyond 10,000, or for what is no
            token id or position.
    """
    if (tokens is None) == (keys is None):
        raise InvalidInput("say where attention is biased: tokens=(ids) wherever they stand, or keys=(positions).")
    at = frozenset(_ints(tokens, "tokens")) if tokens is not None else _ints(keys, "keys")
    return Intervention("bias", "attn_scores", strength=strength, keys=at, positions=as_positions(positions))


def prune() -> Intervention:
    """Set heads' rows of ``W_O`` to zero while it is in force: they write nothing, as with zero at ``z``.

    Biases stay, and so do keys and values that other heads of a group share. ``save_pruned`` writes such a model to
    disk.
    """
    return Intervention("prune", WEIGHTS)


def as_positions(given: str | int | Sequence[int]) -> Positions:
    """Positions as they are kept: a word, or a tuple of indices."""
    if isinstance(given, str):
        return given
    return _ints([given] if _whole(given) is not None else given, "positions")


def _whole(value: Any) -> int | None:
    """A whole number, of numpy or not; None for anything else, truth values included."""
    if isinstance(value, (bool, np.bool_)):
        return None
    try:
        return operator.index(value)
    except TypeError:
        return None


def _ints(given: Any, what: str) -> tuple[int, ...]:
    """Whole numbers as a tuple."""
    found = [_whole(v) for v in given] if isinstance(given, Iterable) and not isinstance(given, str) else [None]
    if None in found:
        extra = f"one of {', '.join(POSITIONS)}, or " if what == "positions" else ""
        raise InvalidInput(f"{what} are {given!r}; give {extra}whole numbers, such as (0, -1).")
    return tuple(v for v in found if v is not None)


def _trials(reference: Sequence[Trial] | None) -> TrialSet | None:
    return None if reference is None else TrialSet.of(reference)


def _kind_of_keys(keys: Any) -> str:
    return "tokens" if isinstance(keys, frozenset) else "positions"


def _check_positions(positions: Positions) -> None:
    """A word that is known, or whole numbers."""
    if isinstance(positions, str):
        if positions not in POSITIONS:
            raise UnknownName("positions", positions, POSITIONS, hint="Or give indices, such as (0, -1).")
        return
    wrong = [p for p in positions if isinstance(p, bool) or not isinstance(p, int)]
    if wrong or not positions:
        raise InvalidInput(
            f"positions are {positions!r}; give one of {', '.join(POSITIONS)}, or whole numbers: indices into the "
            "prompt, negative ones from its end."
        )


def _check_partners(partners: Mapping[Tokens, Tokens] | None) -> None:
    if not partners:
        raise InvalidInput(f"patching needs partners; {_PARTNERS_ARE}")
    for prompt, partner in partners.items():
        if len(prompt) != len(partner):
            raise InvalidInput(
                f"a prompt of {len(prompt)} tokens has a partner of {len(partner)}; positions are matched one to one, "
                "so partners must be equal in length."
            )


def _check_bias(strength: float, keys: Any) -> None:
    number = isinstance(strength, (int, float)) and not isinstance(strength, bool)
    if not number or not math.isfinite(strength) or abs(strength) > _STRONGEST:
        raise InvalidInput(
            f"strength is {strength!r}; give a number to add to the scores, {-_STRONGEST:g} to {_STRONGEST:g}."
        )
    if not keys:
        raise InvalidInput("there are no keys to bias attention to; give token ids or positions.")
    if isinstance(keys, frozenset) and min(keys) < 0:
        raise InvalidInput(f"there is no token {min(keys)}; token ids begin at 0. Positions are given as keys=.")
