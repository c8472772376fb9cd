"""Head scores: one number per trial and head, with where it came from.

Means, intervals and rankings are always derived from the per-trial values, never stored.
"""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mechheads.errors import InvalidInput, UnknownName
from mechheads.heads import Head, HeadSet
from mechheads.provenance import json_ready
from mechheads.stats import bootstrap_weights, check_count, check_level, percentiles
from mechheads.sweep_result import Comparison, SweepResult

if TYPE_CHECKING:
    import pandas as pd

__all__ = ["Comparison", "HeadScores", "SweepResult"]

POOLINGS = ("step", "trial")
# What two results must share before their trials may stand in one.
_SAME_META = ("model", "method", "options")
_SAME_STATE = ("ablated", "interventions")


@dataclass(frozen=True, eq=False, repr=False)
class HeadScores:
    """Scores of every head on every trial.

    Attributes:
        method: Name of the method that made them.
        values: ``[trial layer head]`` float32, the trial's mean over its answer steps; NaN = undefined.
        kept: ``[trial]`` bool, False for trials that take no part in means (failed the gate, no answer step).
        weights: ``[trial]`` float64, number of answer steps.
        trial_ids: One id per trial, all different; kept as a tuple.
        unit: Unit of the values (``"logits"``, ``"probability"``, ...).
        pooling: ``"step"``: every (trial, answer step) pair weighs the same; ``"trial"``: every trial does.
        parts: Further arrays of the same shape by name (``plus``, ``minus``, ...).
        records: One JSON-ready dict per trial (``generated``, ``rouge1_recall``, ``n_answer_steps``,
            ``split``, and ``reason``: why it is not kept, or None), kept as a tuple; empty if not given.
        meta: Provenance, JSON-ready, as ``mechheads.provenance.collect`` makes it.
    """

    method: str
    values: np.ndarray
    kept: np.ndarray
    weights: np.ndarray
    trial_ids: Sequence[str]
    unit: str = ""
    pooling: str = "step"
    parts: Mapping[str, np.ndarray] = field(default_factory=dict)
    records: Sequence[Mapping[str, Any]] = ()
    meta: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        values = _frozen(self.values, np.float32)
        if values.ndim != 3 or 0 in values.shape[1:]:
            raise InvalidInput(f"values has shape {values.shape}; expected (trial, layer, head), such as (60, 30, 9).")
        n = values.shape[0]
        ids = tuple(self.trial_ids)
        records = tuple(self.records) or ({},) * n
        for name, size in (("trial_ids", len(ids)), ("records", len(records))):
            if size != n:
                raise InvalidInput(f"{name} has {size} entries; expected one per trial, {n}.")
        _check_ids(ids)
        if self.pooling not in POOLINGS:
            raise UnknownName("pooling", self.pooling, POOLINGS)
        if np.asarray(self.kept).dtype != bool and np.size(self.kept):
            raise InvalidInput(f"kept has dtype {np.asarray(self.kept).dtype}; expected bool.")
        kept, weights = _frozen(self.kept, bool), _frozen(self.weights, np.float64)
        for name, array in (("kept", kept), ("weights", weights)):
            if array.shape != (n,):
                raise InvalidInput(f"{name} has shape {array.shape}; expected one per trial, {(n,)}.")
        _check_weights(weights, kept, ids)
        parts = {str(name): _frozen(part, np.float32) for name, part in dict(self.parts).items()}
        if "score" in parts:
            raise InvalidInput("a part is named 'score'; that name is taken by the values themselves.")
        for name, part in parts.items():
            if part.shape != values.shape:
                raise InvalidInput(f"part {name!r} has shape {part.shape}; expected that of values, {values.shape}.")
        for name, array in (("values", values), *parts.items()):
            _check_not_infinite(name, array, ids)
        ready = tuple(json_ready(r, where=f"record of trial {i!r}") for i, r in zip(ids, records, strict=True))
        fixed = {
            "values": values,
            "kept": kept,
            "weights": weights,
            "trial_ids": ids,
            "parts": parts,
            "records": ready,
            "meta": json_ready(self.meta, where="meta"),
        }
        for name, value in fixed.items():
            object.__setattr__(self, name, value)

    def __repr__(self) -> str:
        unit = f", {self.unit}" if self.unit else ""
        return (
            f"HeadScores({self.method!r}, {self.n_kept} of {self.shape[0]} trials kept, "
            f"{self.n_layers} layers x {self.n_heads} heads{unit}, pooling={self.pooling!r})"
        )

    # -- shape -------------------------------------------------------------------------------

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(trials, layers, heads)``."""
        n, layers, heads = self.values.shape
        return n, layers, heads

    @property
    def n_layers(self) -> int:
        """Layers of the model."""
        return self.values.shape[1]

    @property
    def n_heads(self) -> int:
        """Query heads a layer."""
        return self.values.shape[2]

    @property
    def n_kept(self) -> int:
        """Trials that take part in means."""
        return int(self.kept.sum())

    # -- means and intervals -----------------------------------------------------------------

    def pooled(self, name: str = "score") -> np.ndarray:
        """Mean over kept trials of the score or of a part.

        With trial weights w (answer steps for ``pooling="step"``, 1 for ``"trial"``):
        ``sum(w * value) / sum(w)`` over the kept trials whose value is defined.

        Args:
            name: ``"score"`` or the name of a part.

        Returns:
            ``[layer head]`` float64, in the unit and with the sign of the values; NaN where no
            kept trial defines the head.

        Raises:
            InvalidInput: If no trial is kept.
            UnknownName: If there is no such part.
        """
        array = self._array(name)
        self._require_kept()
        with_value, total = self._sums(array, np.ones((1, self.n_kept)))
        return _divide(with_value, total).reshape(self.n_layers, self.n_heads)

    def mean(self) -> np.ndarray:
        """The pooled score, ``[layer head]``; see ``pooled``."""
        return self.pooled("score")

    def part_mean(self, name: str) -> np.ndarray:
        """The pooled mean of a part, ``[layer head]``; see ``pooled``."""
        if name not in self.parts:
            raise UnknownName(f"part of {self.method!r}", name, self.parts)
        return self.pooled(name)

    def ci(
        self, level: float = 0.95, n_boot: int = 2000, seed: int = 0, *, name: str = "score"
    ) -> tuple[np.ndarray, np.ndarray]:
        """Percentile bootstrap interval of the pooled score, over trials.

        Kept trials are drawn with replacement and the pooled statistic is computed anew each time;
        the same draw serves all heads.

        Args:
            level: Confidence level.
            n_boot: Number of bootstrap samples.
            seed: Seed of the draws.
            name: ``"score"`` or the name of a part.

        Returns:
            ``(low, high)``, each ``[layer head]``; NaN for heads that fewer than two kept trials define.

        Raises:
            InvalidInput: If level or n_boot cannot be used.
            UnknownName: If there is no such part.
        """
        check_level(level)
        array = self._array(name)
        low, high = np.full((2, self.n_layers * self.n_heads), np.nan)
        if self.n_kept >= 2:
            counts = bootstrap_weights(self.n_kept, n_boot, np.random.default_rng(seed))
            flat = array.reshape(len(array), -1)
            for start in range(0, flat.shape[1], 1024):  # bounds memory at n_boot x 1024 numbers
                block = slice(start, start + 1024)
                low[block], high[block] = percentiles(_divide(*self._sums(flat[:, block], counts)), level)
            too_few = np.isfinite(flat[self.kept]).sum(axis=0) < 2
            low[too_few] = high[too_few] = np.nan
        shape = (self.n_layers, self.n_heads)
        return low.reshape(shape), high.reshape(shape)

    def _array(self, name: str) -> np.ndarray:
        if name == "score":
            return self.values
        if name not in self.parts:
            raise UnknownName(f"part of {self.method!r}", name, ["score", *self.parts])
        return self.parts[name]

    def _sums(self, array: np.ndarray, counts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Weighted sums and weight totals over kept trials, each ``[sample, head]``."""
        kept = array[self.kept].reshape(self.n_kept, -1).astype(np.float64)
        weights = self.weights[self.kept] if self.pooling == "step" else np.ones(self.n_kept)
        defined = np.isfinite(kept)
        drawn = counts * weights
        if defined.all():
            return drawn @ kept, drawn.sum(axis=1, keepdims=True)
        return drawn @ np.where(defined, kept, 0.0), drawn @ defined.astype(np.float64)

    def _require_kept(self) -> None:
        if self.n_kept:
            return
        reasons = Counter(str(r.get("reason") or "no reason recorded") for r in self.records)
        told = ", ".join(f"{count} x {reason}" for reason, count in reasons.most_common())
        said = next((str(r["generated"]) for r in self.records if r.get("generated")), None)
        raise InvalidInput(
            f"none of the {self.shape[0]} trials of {self.method!r} is kept"
            f"{f' ({told})' if told else ''}, so there is nothing to average. "
            + ("" if said is None else f"To the first the model said {said[:80]!r} (all answers: .records). ")
            + "Use trials the model can answer (shorter context, plainer needle), a lower answer threshold, or a "
            "stronger model."
        )

    def with_pooling(self, pooling: str) -> HeadScores:
        """The same values, pooled by ``"step"`` or by ``"trial"``."""
        return replace(self, pooling=pooling)

    # -- rankings ----------------------------------------------------------------------------

    def ranking(self) -> HeadSet:
        """All heads with a defined score, highest first; ties in order of (layer, head)."""
        return self._order(-self.mean())

    def top(self, k: int) -> HeadSet:
        """The k heads with the highest pooled score.

        Raises:
            InvalidInput: If no trial is kept, or k is more than the heads with a defined score.
        """
        return self._first(self.ranking(), k)

    def bottom(self, k: int) -> HeadSet:
        """The k heads with the lowest score, most negative first.

        They are not the unimportant ones: a strongly negative head acts, against. See ``nearest_zero``.
        """
        return self._first(self._order(self.mean()), k)

    def nearest_zero(self, k: int) -> HeadSet:
        """The k heads whose score is smallest in magnitude, smallest first."""
        return self._first(self._order(np.abs(self.mean())), k)

    def score_of(self, head: Any) -> float:
        """Pooled score of one head (anything a Head parses from); NaN if undefined."""
        head = Head.parse(head)
        HeadSet([head]).check(self.n_layers, self.n_heads)
        return float(self.mean()[head.layer, head.head])

    def rank(self) -> np.ndarray:
        """Place of each head in ``ranking()``, ``[layer head]``, from 1; NaN if its score is undefined."""
        ranks = np.full((self.n_layers, self.n_heads), np.nan)
        for place, head in enumerate(self.ranking(), start=1):
            ranks[head.layer, head.head] = place
        return ranks

    def _order(self, key: np.ndarray) -> HeadSet:
        """Heads with a finite key, rising; the stable sort keeps ties in order of (layer, head)."""
        flat = key.ravel()
        order = np.argsort(flat, kind="stable")
        return HeadSet(divmod(int(i), self.n_heads) for i in order if np.isfinite(flat[i]))

    def _first(self, heads: HeadSet, k: int) -> HeadSet:
        check_count("k", k, least=0)
        if k > len(heads):
            total = self.n_layers * self.n_heads
            undefined = f", of which {total - len(heads)} have no score" if len(heads) < total else ""
            raise InvalidInput(f"k is {k}, but the model has {total} heads{undefined}; ask for at most {len(heads)}.")
        return heads[:k]

    # -- tables and subsets ------------------------------------------------------------------

    def to_frame(self, ci: bool = False, **ci_options: Any) -> pd.DataFrame:
        """One row per head.

        Args:
            ci: Add ``ci_low`` and ``ci_high``.
            **ci_options: ``level``, ``n_boot``, ``seed`` of ``ci``.

        Returns:
            Columns ``layer head label score rank n_trials``, the interval if asked, and the pooled
            mean of each part under its name. ``n_trials`` counts kept trials with a defined value.
        """
        import pandas as pd

        heads = [Head(layer, head) for layer in range(self.n_layers) for head in range(self.n_heads)]
        columns: dict[str, Any] = {
            "layer": [h.layer for h in heads],
            "head": [h.head for h in heads],
            "label": [str(h) for h in heads],
            "score": self.mean().ravel(),
            "rank": self.rank().ravel(),
            "n_trials": np.isfinite(self.values[self.kept]).sum(axis=0).ravel(),
        }
        if ci:
            low, high = self.ci(**ci_options)
            columns |= {"ci_low": low.ravel(), "ci_high": high.ravel()}
        columns |= {name: self.part_mean(name).ravel() for name in self.parts}
        return pd.DataFrame(columns)

    def select_trials(self, which: Any) -> HeadScores:
        """The scores on some trials only.

        Args:
            which: A boolean mask ``[trial]``, or trial ids in the order wanted.

        Raises:
            InvalidInput: If the mask has another length or an id is not there.
        """
        if isinstance(which, str):
            which = [which]
        chosen = which if isinstance(which, np.ndarray) else list(which)
        if len(chosen) and all(isinstance(x, (bool, np.bool_)) for x in chosen):
            if len(chosen) != len(self.trial_ids):
                raise InvalidInput(
                    f"the mask has {len(chosen)} entries; expected one per trial, {len(self.trial_ids)}."
                )
            return self._take(np.flatnonzero(chosen))
        place = {trial: i for i, trial in enumerate(self.trial_ids)}
        for trial in chosen:
            if trial not in place:
                near = difflib.get_close_matches(str(trial), self.trial_ids, n=3, cutoff=0.5)
                hint = f" Did you mean {' or '.join(map(repr, near))}?" if near else ""
                raise InvalidInput(f"there is no trial {trial!r} among the {len(place)} of {self.method!r}.{hint}")
        return self._take([place[trial] for trial in chosen])

    def split(self, name: str) -> HeadScores:
        """The scores on the trials of one split, as their records name it.

        Raises:
            UnknownName: If no trial belongs to it.
        """
        splits = [r.get("split") for r in self.records]
        if name not in splits:
            raise UnknownName(f"split of {self.method!r}", name, {s for s in splits if s is not None})
        return self._take([i for i, split in enumerate(splits) if split == name])

    def _take(self, index: Any) -> HeadScores:
        index = np.asarray(index, dtype=np.intp)
        return replace(
            self,
            values=self.values[index],
            kept=self.kept[index],
            weights=self.weights[index],
            trial_ids=tuple(self.trial_ids[i] for i in index),
            parts={name: part[index] for name, part in self.parts.items()},
            records=tuple(self.records[i] for i in index),
        )

    def merge(self, other: HeadScores) -> HeadScores:
        """The trials of both, this one's first.

        Both must come from the same model, method and options. Where the trial sets differ,
        ``meta["trials"]`` becomes the list of both.

        Raises:
            InvalidInput: Naming the first thing that differs, or a trial that stands in both.
        """
        for name, a, b in [
            *((key, getattr(self, key), getattr(other, key)) for key in ("method", "pooling", "unit")),
            ("shape (layer, head)", self.shape[1:], other.shape[1:]),
            ("parts", sorted(self.parts), sorted(other.parts)),
            *((f"meta[{key!r}]", self.meta.get(key), other.meta.get(key)) for key in (*_SAME_META, *_SAME_STATE)),
        ]:
            difference = _first_difference(name, a, b)
            if difference:
                raise InvalidInput(f"cannot merge scores that differ in {difference}.")
        both = set(self.trial_ids) & set(other.trial_ids)
        if both:
            raise InvalidInput(f"trial {min(both)!r} stands in both results ({len(both)} such); merge distinct trials.")
        meta = dict(self.meta)
        if self.meta.get("trials") != other.meta.get("trials"):
            meta["trials"] = [*_listed(self.meta.get("trials")), *_listed(other.meta.get("trials"))]
        if "complete" in self.meta and "complete" in other.meta:
            meta["complete"] = bool(self.meta["complete"] and other.meta["complete"])
            meta["n_trials_asked"] = self.meta["n_trials_asked"] + other.meta["n_trials_asked"]
        return replace(
            self,
            values=np.concatenate([self.values, other.values]),
            kept=np.concatenate([self.kept, other.kept]),
            weights=np.concatenate([self.weights, other.weights]),
            trial_ids=(*self.trial_ids, *other.trial_ids),
            parts={name: np.concatenate([part, other.parts[name]]) for name, part in self.parts.items()},
            records=(*self.records, *other.records),
            meta=meta,
        )

    # -- files -------------------------------------------------------------------------------

    def save(self, path: str | Path) -> Path:
        """Write one Parquet file, a row per trial, with the provenance inside.

        Args:
            path: Where; ``.parquet`` is added if the name has no extension. Folders are made.

        Returns:
            The path written.

        Raises:
            OutputNotWritable: If the folder cannot be written.
        """
        from mechheads.score_files import write_scores

        return write_scores(self, path)

    @classmethod
    def load(cls, path: str | Path) -> HeadScores:
        """Read what ``save`` wrote, bit for bit.

        Raises:
            ResultFileError: If the file is missing, damaged, foreign, inconsistent or newer than this
                mechheads reads; the message names the file and the reason.
        """
        from mechheads.score_files import read_scores

        return read_scores(path)

    def to_heads_json(self, path: str | Path) -> Path:
        """Write the flat map of published head files: ``{"layer-head": [score of each kept trial]}``.

        Undefined scores are ``null``. The file keeps no answer-step weights: the plain mean of a list is the score
        under ``pooling="trial"``. ``mechheads.head_files.write_heads`` writes further formats.

        Raises:
            InvalidInput: If no trial is kept.
            OutputNotWritable: If the folder cannot be written.
        """
        from mechheads.head_files import write_heads

        return write_heads(self, path, format="flat")

    @classmethod
    def from_heads_json(
        cls, path: str | Path, *, n_layers: int | None = None, n_heads: int | None = None,
        method: str | None = None, unit: str | None = None,
    ) -> HeadScores:  # fmt: skip
        """Read a published head file ``{"layer-head": [score of each trial]}``, bare or in the LOCOS envelope.

        Trials are all kept and pooled by trial, named ``"0", "1", ...`` if the file does not name them. Heads that
        it leaves out are undefined. ``mechheads.head_files.read_heads`` reads further formats.

        Args:
            path: The file.
            n_layers: Layers of the model; what the file shows if None.
            n_heads: Heads a layer; likewise.
            method: Name to give the scores; an envelope's own, else ``"heads_json"``, if None.
            unit: Unit to give them; likewise, else none.

        Raises:
            ResultFileError: If the file is not such a map, or does not fit the shape.
        """
        from mechheads.head_files import read_heads_json

        return read_heads_json(path, n_layers=n_layers, n_heads=n_heads, method=method, unit=unit)


def _frozen(array: Any, dtype: Any) -> np.ndarray:
    """A read-only copy."""
    copy = np.array(array, dtype=dtype)
    copy.setflags(write=False)
    return copy


def _check_ids(ids: Sequence[Any]) -> None:
    for trial in ids:
        if not isinstance(trial, str):
            raise InvalidInput(f"trial id {trial!r} is a {type(trial).__name__}; expected text.")
    twice = [trial for trial, count in Counter(ids).items() if count > 1]
    if twice:
        raise InvalidInput(f"trial id {twice[0]!r} stands more than once; ids must be unique.")


def _check_weights(weights: np.ndarray, kept: np.ndarray, ids: Sequence[str]) -> None:
    bad = ~np.isfinite(weights) | (weights < 0) | (kept & (weights == 0))
    if bad.any():
        i = int(np.flatnonzero(bad)[0])
        raise InvalidInput(
            f"trial {ids[i]!r} has weight {weights[i]}; expected its number of answer steps, "
            "at least 1 for a trial that is kept."
        )


def _check_not_infinite(name: str, array: np.ndarray, ids: Sequence[str]) -> None:
    if np.isinf(array).any():
        trial, layer, head = (int(i) for i in np.argwhere(np.isinf(array))[0])
        raise InvalidInput(
            f"{name} is {array[trial, layer, head]} at trial {ids[trial]!r}, {Head(layer, head)}; "
            "expected finite numbers, or NaN where a score is undefined."
        )


def _divide(total: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """``total / weight``, NaN where the weight is zero."""
    weight = np.broadcast_to(weight, total.shape)
    return np.divide(total, weight, out=np.full(total.shape, np.nan), where=weight > 0)


def _first_difference(name: str, a: Any, b: Any) -> str:
    """Dotted path and both values of the first difference, or an empty text."""
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        for key in sorted({*a, *b}):
            found = _first_difference(f"{name}[{key!r}]", a.get(key), b.get(key))
            if found:
                return found
        return ""
    return "" if a == b else f"{name}: {a!r} and {b!r}"


def _listed(value: Any) -> Iterable[Any]:
    return value if isinstance(value, list) else [value]
