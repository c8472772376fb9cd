"""Heads and ordered sets of heads. No numbers live here, only names."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, overload

import numpy as np

from mechheads.errors import InvalidInput

_LABEL = re.compile(r"^\s*(?:[Ll](\d+)[Hh](\d+)|(\d+)[.\-](\d+))\s*$")


@dataclass(frozen=True, order=True)
class Head:
    """One attention head, counted from zero.

    Attributes:
        layer: Index of the transformer block.
        head: Index of the query head inside the block.
    """

    layer: int
    head: int

    def __post_init__(self) -> None:
        for name, value in (("layer", self.layer), ("head", self.head)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 0:
                raise InvalidInput(f"{name} of a head is {value!r}; it must be a whole number >= 0.")
        object.__setattr__(self, "layer", int(self.layer))
        object.__setattr__(self, "head", int(self.head))

    def __str__(self) -> str:
        return f"L{self.layer}H{self.head}"

    __repr__ = __str__

    @classmethod
    def parse(cls, value: Any) -> Head:
        """Read a head from ``"L9H6"``, ``"9.6"``, ``"9-6"``, ``(9, 6)`` or a Head.

        Raises:
            InvalidInput: If the value has none of these forms.
        """
        if isinstance(value, Head):
            return value
        if isinstance(value, str):
            match = _LABEL.match(value)
            if match:
                layer, head = (g for g in match.groups() if g is not None)
                return cls(int(layer), int(head))
        elif (isinstance(value, (Sequence, np.ndarray))) and len(value) == 2:
            return cls(*(v.item() if isinstance(v, np.integer) else v for v in value))
        raise InvalidInput(
            f"cannot read a head from {value!r}; write it as 'L9H6', '9.6', '9-6' or (9, 6) "
            "(layer, head, both counted from zero)."
        )

    def kv_group(self, n_heads: int, n_key_value_heads: int) -> int:
        """Index of the key/value head that this query head reads.

        Under grouped-query attention ``kv = head // (n_heads // n_key_value_heads)``.
        """
        return self.head // (n_heads // n_key_value_heads)


class HeadSet(Sequence[Head]):
    """An ordered collection of distinct heads; the order is the ranking it came from.

    Equality compares order as well. Use ``set(a) == set(b)`` to ignore it.
    """

    __slots__ = ("_heads",)

    def __init__(self, heads: Any = ()):
        if isinstance(heads, (str, Head)):
            heads = [heads]
        try:
            members = list(heads)
        except TypeError:
            raise InvalidInput(
                f"cannot read heads from {heads!r}; give one head such as 'L9H6', or several: 'L9H6, L3H0' or a list."
            ) from None
        parsed = [Head.parse(h) for h in members]
        seen: set[Head] = set()
        for head in parsed:
            if head in seen:
                raise InvalidInput(f"{head} stands twice in a head set; name every head once.")
            seen.add(head)
        self._heads: tuple[Head, ...] = tuple(parsed)

    @classmethod
    def parse(cls, value: Any) -> HeadSet:
        """Read a head set from a HeadSet, one head, ``"L1H2, L3H4"`` or an iterable of heads.

        Raises:
            InvalidInput: If the value is none of these, or names a head twice.
        """
        if isinstance(value, HeadSet):
            return value
        if isinstance(value, str):
            return cls(part for part in re.split(r"[,\s]+", value) if part)
        if isinstance(value, tuple) and len(value) == 2 and all(isinstance(v, (int, np.integer)) for v in value):
            return cls([value])
        return cls(value)

    @overload
    def __getitem__(self, index: int) -> Head: ...
    @overload
    def __getitem__(self, index: slice) -> HeadSet: ...
    def __getitem__(self, index: int | slice) -> Head | HeadSet:
        if isinstance(index, slice):
            return HeadSet(self._heads[index])
        return self._heads[index]

    def __len__(self) -> int:
        return len(self._heads)

    def __iter__(self) -> Iterator[Head]:
        return iter(self._heads)

    def __contains__(self, item: object) -> bool:
        try:
            return Head.parse(item) in self._heads
        except InvalidInput:
            return False

    def __eq__(self, other: object) -> bool:
        return isinstance(other, HeadSet) and self._heads == other._heads

    def __hash__(self) -> int:
        return hash(self._heads)

    def __repr__(self) -> str:
        return f"HeadSet([{', '.join(map(str, self._heads))}])"

    def __or__(self, other: HeadSet) -> HeadSet:
        return HeadSet([*self._heads, *(h for h in other if h not in set(self._heads))])

    def __and__(self, other: HeadSet) -> HeadSet:
        keep = set(other)
        return HeadSet(h for h in self._heads if h in keep)

    def __sub__(self, other: HeadSet) -> HeadSet:
        drop = set(other)
        return HeadSet(h for h in self._heads if h not in drop)

    @property
    def labels(self) -> list[str]:
        """``["L9H6", ...]`` in order."""
        return [str(h) for h in self._heads]

    def by_layer(self) -> dict[int, list[int]]:
        """Heads of each layer that has any, both in rising order."""
        layers: dict[int, list[int]] = {}
        for head in sorted(self._heads):
            layers.setdefault(head.layer, []).append(head.head)
        return layers

    def check(self, n_layers: int, n_heads: int) -> HeadSet:
        """Return self if every head exists in a model of this shape.

        Raises:
            InvalidInput: Naming the first head that does not.
        """
        for head in self._heads:
            if head.layer >= n_layers or head.head >= n_heads:
                raise InvalidInput(
                    f"{head} does not exist: the model has layers 0 to {n_layers - 1} and heads 0 to {n_heads - 1}."
                )
        return self

    def mask(self, n_layers: int, n_heads: int) -> np.ndarray:
        """Boolean ``[layer, head]`` array, True at the heads of the set."""
        self.check(n_layers, n_heads)
        out = np.zeros((n_layers, n_heads), dtype=bool)
        for head in self._heads:
            out[head.layer, head.head] = True
        return out


def draw_random_heads(
    n_layers: int,
    n_heads: int,
    k: int,
    *,
    seed: int,
    exclude: HeadSet | None = None,
    match_layers: HeadSet | None = None,
) -> HeadSet:
    """Draw k distinct heads uniformly, never one of ``exclude``.

    Args:
        n_layers: Layers of the model.
        n_heads: Query heads a layer.
        k: How many heads to draw.
        seed: Seed of the draw; the same seed gives the same heads on every machine.
        exclude: Heads that must not be drawn (the tested ones).
        match_layers: Draw as many heads in each layer as this set has there.

    Raises:
        InvalidInput: If fewer than k heads are left to draw from.
    """
    rng = np.random.default_rng(seed)
    excluded = set(exclude or ())
    pool = [
        Head(layer, head) for layer in range(n_layers) for head in range(n_heads) if Head(layer, head) not in excluded
    ]
    if match_layers is None:
        if k > len(pool):
            raise InvalidInput(
                f"cannot draw {k} random heads: {n_layers * n_heads} heads less "
                f"{len(excluded)} excluded leaves {len(pool)}."
            )
        return HeadSet(pool[i] for i in rng.choice(len(pool), size=k, replace=False))
    drawn: list[Head] = []
    for layer, heads in match_layers.by_layer().items():
        here = [h for h in pool if h.layer == layer]
        if len(heads) > len(here):
            raise InvalidInput(
                f"cannot draw {len(heads)} random heads in layer {layer}: "
                f"only {len(here)} are left there after the exclusion."
            )
        drawn += [here[i] for i in rng.choice(len(here), size=len(heads), replace=False)]
    if len(drawn) != k:
        raise InvalidInput(f"match_layers has {len(drawn)} heads but k is {k}.")
    return HeadSet(drawn)
