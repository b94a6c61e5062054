"""Interpolated Kneser-Ney n-gram model, a baseline for the shipped target.

Modified Kneser-Ney smoothing with three discounts per order, after Chen and Goodman, "An Empirical Study
of Smoothing Techniques for Language Modeling" (1999), section 3.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

ORDER = 5


@dataclass(frozen=True)
class NgramTable:
    """Counts of one order: occurrences for the highest, numbers of distinct preceding tokens below it."""

    keys: np.ndarray
    """uint64 [n], ascending: the tokens of an n-gram packed into one number, the last token in the lowest bits."""
    discounted: np.ndarray
    """float64 [n]: count minus its discount, divided by the total of the context."""
    contexts: np.ndarray
    """uint64 [m], ascending: the keys without their last token."""
    backoff: np.ndarray
    """float64 [m]: weight of the next lower order in each context."""


class KneserNey:
    """N-gram model that is built once and returns the probabilities of texts."""

    def __init__(self, tokens: np.ndarray, vocab_size: int, order: int = ORDER) -> None:
        """Count `tokens`, integers [N].

        Raises ValueError if `order` tokens do not fit into 64 bits.
        """
        self.vocab_size = vocab_size
        self.bits = max(1, int(vocab_size - 1).bit_length())
        if self.bits * order > 64:
            raise ValueError(f"{order} tokens of {self.bits} bits do not fit into a 64-bit key")
        self.tables: list[NgramTable] = []
        keys, counts = np.unique(self._pack(tokens, order), return_counts=True)
        for size in range(order, 0, -1):
            self.tables.insert(0, self._smoothed(keys, counts))
            # Below the highest order a count is the number of distinct preceding tokens.
            keys, counts = np.unique(keys & np.uint64((1 << self.bits * (size - 1)) - 1), return_counts=True)

    def probabilities(self, tokens: np.ndarray) -> np.ndarray:
        """Return the probability of each token given those before, float64 [N - order + 1], from token order - 1 on."""
        order = len(self.tables)
        full = self._pack(tokens, order)
        probability = np.full(len(full), 1.0 / self.vocab_size)
        for size, table in enumerate(self.tables, start=1):
            keys = full & np.uint64((1 << self.bits * size) - 1)
            backoff = _look_up(table.contexts, table.backoff, keys >> np.uint64(self.bits), missing=1.0)
            probability = _look_up(table.keys, table.discounted, keys, missing=0.0) + backoff * probability
        return probability

    def _pack(self, tokens: np.ndarray, size: int) -> np.ndarray:
        """Pack every window of `size` tokens into one uint64, the first token in the highest bits."""
        wide = tokens.astype(np.uint64)
        packed = np.zeros(len(wide) - size + 1, dtype=np.uint64)
        for offset in range(size):
            packed = (packed << np.uint64(self.bits)) | wide[offset : offset + len(packed)]
        return packed

    def _smoothed(self, keys: np.ndarray, counts: np.ndarray) -> NgramTable:
        discount = _discounts(counts)[np.minimum(counts, 3)]
        contexts, starts = np.unique(keys >> np.uint64(self.bits), return_index=True)
        totals = np.add.reduceat(counts, starts).astype(np.float64)
        per_key = np.repeat(totals, np.diff(np.append(starts, len(keys))))
        return NgramTable(keys, (counts - discount) / per_key, contexts, np.add.reduceat(discount, starts) / totals)


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts of counts 0, 1, 2 and 3 or more (Chen and Goodman 1999, equation 17)."""
    n1, n2, n3, n4 = (max(1, int(np.count_nonzero(counts == value))) for value in (1, 2, 3, 4))
    y = n1 / (n1 + 2 * n2)
    raw = np.array([0.0, 1 - 2 * y * n2 / n1, 2 - 3 * y * n3 / n2, 3 - 4 * y * n4 / n3])
    # Small or unusual texts can give estimates out of range; a discount never exceeds its count.
    return np.clip(raw, 0.0, [0.0, 1.0, 2.0, 3.0])


def _look_up(keys: np.ndarray, values: np.ndarray, wanted: np.ndarray, missing: float) -> np.ndarray:
    at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
    return np.where(keys[at] == wanted, values[at], missing)
