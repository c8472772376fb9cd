"""Rank statistics of many samples at once: each row is one score map, each column one head.

Undefined heads are NaN. A statistic of two maps leaves out the heads that either of them leaves undefined.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, eq=False)
class Ranked:
    """Rows of scores in order.

    Attributes:
        order: ``[row head]`` indices of the heads, lowest score first, undefined heads last; ties in order of the head.
        dense: ``[row head]`` integers, place of the head's value among the row's distinct values, from 0; all undefined
            heads share the last place.
        average: ``[row head]`` float64 ranks from 1, rising with the score, ties sharing their mean rank; NaN where
            undefined.
        defined: ``[row head]`` bool.
    """

    order: np.ndarray
    dense: np.ndarray
    average: np.ndarray
    defined: np.ndarray

    @property
    def n(self) -> np.ndarray:
        """``[row]`` number of defined heads."""
        return self.defined.sum(axis=1)

    @property
    def distinct(self) -> np.ndarray:
        """``[row]`` number of different values among the defined heads; 1 where a map is constant."""
        return self.dense.max(axis=1).astype(np.int64) + self.defined.all(axis=1)

    def repeated(self, n: int) -> Ranked:
        """The one row n times, without copying."""
        width = self.order.shape[1]
        return Ranked(*(np.broadcast_to(x, (n, width)) for x in (self.order, self.dense, self.average, self.defined)))


def ranked(values: np.ndarray) -> Ranked:
    """Order the heads of every row of ``values [row head]``."""
    defined = np.isfinite(values)
    values = np.where(defined, values, np.nan)
    order = np.argsort(values, axis=1, kind="stable")
    rising = np.take_along_axis(values, order, axis=1)
    new = np.ones(values.shape, dtype=bool)
    new[:, 1:] = (rising[:, 1:] != rising[:, :-1]) & ~(np.isnan(rising[:, 1:]) & np.isnan(rising[:, :-1]))
    dense_sorted = np.cumsum(new, axis=1, dtype=np.int32) - 1
    start, end = _runs(new)
    average_sorted = np.where(np.isnan(rising), np.nan, (start + end) / 2 + 1)
    small = np.uint16 if values.shape[1] <= 1 << 16 else np.int32  # 16 bits sort in linear time
    dense, average = np.empty(values.shape, small), np.empty(values.shape)
    np.put_along_axis(dense, order, dense_sorted.astype(small), axis=1)
    np.put_along_axis(average, order, average_sorted, axis=1)
    return Ranked(order, dense, average, defined)


def _runs(new: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First and last column of the run of equal values that each column of a sorted row lies in."""
    column = np.arange(new.shape[1])
    start = np.maximum.accumulate(np.where(new, column, 0), axis=1)
    last = np.ones(new.shape, dtype=bool)
    last[:, :-1] = new[:, 1:]
    end = np.where(last, column, new.shape[1])
    end = np.minimum.accumulate(end[:, ::-1], axis=1)[:, ::-1]
    return start, end


def spearman_rows(a: Ranked, b: Ranked) -> np.ndarray:
    """Spearman's rho of each pair of rows ``[row]``; both must define the same heads.

    ``rho = cov(rank a, rank b) / (sd(rank a) sd(rank b))``, tied heads sharing their mean rank. NaN where fewer than
    two heads are defined or one map is constant.
    """
    n = np.maximum(a.n, 1)[:, None]
    x, y = (np.where(r.defined, r.average, 0.0) for r in (a, b))
    x, y = (np.where(a.defined, r - r.sum(axis=1, keepdims=True) / n, 0.0) for r in (x, y))
    spread = np.sqrt(np.einsum("rh,rh->r", x, x) * np.einsum("rh,rh->r", y, y))
    rho = np.full(len(x), np.nan)
    np.divide(np.einsum("rh,rh->r", x, y), spread, out=rho, where=spread > 1e-9)
    return np.clip(rho, -1.0, 1.0)


def kendall_rows(a: Ranked, b: Ranked) -> np.ndarray:
    """Kendall's tau-b of each pair of rows ``[row]``; both must define the same heads.

    ``tau = (concordant - discordant) / sqrt((pairs - ties in a) (pairs - ties in b))``. Discordant pairs are counted as
    the inversions of b's order once the heads stand in a's. NaN as for ``spearman_rows``.
    """
    width = a.dense.shape[1]
    # Heads in order of b, then stably in order of a: rising in a, and in b where a ties.
    by_a = np.argsort(np.take_along_axis(a.dense, b.order, axis=1), axis=1, kind="stable")
    by_a = np.take_along_axis(b.order, by_a, axis=1)
    of_a, of_b = (np.take_along_axis(r.dense, by_a, axis=1) for r in (a, b))
    discordant = _inversions(np.argsort(of_b, axis=1, kind="stable"))
    ties_a = _tied_pairs(of_a)
    ties_b = _tied_pairs(np.take_along_axis(b.dense, b.order, axis=1))
    ties_both = _tied_pairs(of_a, of_b)
    defined = a.n.astype(np.int64)
    undefined = width - defined
    # Undefined heads stand last in both maps, tied with each other: their pairs come off again.
    pairs = width * (width - 1) // 2
    agree = pairs - ties_a - ties_b + ties_both - 2 * discordant - defined * undefined
    among = undefined * (undefined - 1) // 2
    pairs_defined = defined * (defined - 1) // 2
    free = (pairs_defined - (ties_a - among)) * (pairs_defined - (ties_b - among)).astype(np.float64)
    tau = np.full(len(agree), np.nan)
    np.divide(agree, np.sqrt(free), out=tau, where=free > 0)
    return np.clip(tau, -1.0, 1.0)


def _tied_pairs(*keys: np.ndarray) -> np.ndarray:
    """Pairs of columns equal in all keys ``[row]``, where equal columns stand side by side."""
    rows, columns = keys[0].shape
    new = np.zeros((rows, columns), dtype=bool)
    new[:, 0] = True
    for key in keys:
        new[:, 1:] |= key[:, 1:] != key[:, :-1]
    start, _ = _runs(new)
    return (np.arange(columns) - start).sum(axis=1)


def _inversions(permutation: np.ndarray) -> np.ndarray:
    """Pairs of columns in falling order ``[row]``, for rows that are permutations of ``0 .. n - 1``.

    Goes through the bits from the highest. Columns are kept in blocks of equal higher bits, so a pair is falling if and
    only if its earlier column has a 1 and its later a 0 at the first bit where they differ.
    """
    rows, n = permutation.shape
    bits = max(int(n - 1).bit_length(), 1)
    width = 1 << bits
    held = np.empty((rows, width), dtype=np.uint16 if bits <= 16 else np.uint32)
    held[:, :n] = permutation
    held[:, n:] = np.arange(n, width)  # the padding is in order
    count = np.zeros(rows, dtype=np.int64)
    for bit in range(bits - 1, -1, -1):
        half = 1 << bit  # a block of 2 * half columns holds each value once: half of them have a 0 at this bit
        flat = held.ravel()
        one = (flat & half) != 0
        zeros = np.flatnonzero(~one)
        # The i-th zero of a block, at column p, has p - i ones before it.
        count += (zeros & (2 * half - 1)).reshape(rows, -1).sum(axis=1) - width // (2 * half) * (half * (half - 1) // 2)
        if bit:
            parts = (flat[zeros].reshape(-1, half), flat[one].reshape(-1, half))
            held = np.stack(parts, axis=1).reshape(rows, width)
    return count


def top_share_rows(r: Ranked, k: int) -> np.ndarray:
    """How surely each head is among the k highest, ``[row head]`` in 0 to 1.

    1 above the k-th score, 0 below; heads that tie for the last places share them evenly, since nothing says which of
    them is in. Rows sum to k; a row that defines fewer than k heads is NaN.
    """
    n = r.n
    at = np.clip(n - k, 0, None)[:, None]
    threshold = np.take_along_axis(r.dense, np.take_along_axis(r.order, at, axis=1), axis=1)
    above = r.defined & (r.dense > threshold)
    tied = r.defined & (r.dense == threshold)
    left = k - above.sum(axis=1, keepdims=True)
    share = above + tied * (left / np.maximum(tied.sum(axis=1, keepdims=True), 1))
    share[n < k] = np.nan
    return share


def clear_top(values: np.ndarray, k: int) -> np.ndarray:
    """The heads of one map ``[head]`` that are surely among the k highest, as a mask.

    Heads that tie for the last places are left out, since nothing says which of them is in: the set may be smaller
    than k. At least k heads must be defined.
    """
    last = np.sort(values[np.isfinite(values)])[-k]
    top = values >= last  # NaN compares as False
    return top if top.sum() == k else values > last
