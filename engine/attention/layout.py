"""What paged kernels are told about a batch: its pieces, and their flat arrays. NumPy alone, no device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from engine.executor.batch import Batch


class Piece(NamedTuple):
    """Neighbouring tokens of one sequence that attend alike."""

    start: int
    """The first one's row within the batch."""
    length: int
    context: int
    """Tokens of the sequence before them; each of them sees all of those."""
    pages: list[int]
    """The sequence's page table."""
    sees: np.ndarray | None = None
    """bool [length, length]: which of the piece's tokens each of them sees; None: itself and those before it."""

    @property
    def keys(self) -> int:
        """Tokens of the sequence up to the piece's end."""
        return self.context + self.length


class PagedKeys(NamedTuple):
    """Where the keys of B pieces are, all int32."""

    indptr: np.ndarray
    """[B + 1], into `indices`."""
    indices: np.ndarray
    """Pages of the cache. A piece without keys has a page too: kernels need not be told of empty tables."""
    last_page_len: np.ndarray
    """[B]: keys in the last page."""


def cut(batch: Batch) -> list[Piece]:
    """The pieces of a batch, in its order.

    A draft tree is a piece of its own, led by the last committed token as its root. So every token of it sees at
    least one of the piece, and of the context either all or nothing is seen.
    """
    pieces = []
    for span in batch.spans:
        if span.tree is None:
            pieces.append(Piece(span.start, span.length, span.computed, span.pages))
            continue
        nodes = len(span.tree.parents)
        before = span.length - nodes - 1
        if before:
            pieces.append(Piece(span.start, before, span.computed, span.pages))
        sees = rooted(span.tree.sees)
        pieces.append(Piece(span.start + before, 1 + nodes, span.computed + before, span.pages, sees))
    return pieces


def rooted(sees: np.ndarray) -> np.ndarray:
    """`DraftTree.sees`, bool [k, k], with a root before all, bool [k + 1, k + 1]."""
    whole = np.zeros((len(sees) + 1, len(sees) + 1), bool)
    whole[:, 0] = True
    whole[1:, 1:] = sees
    return whole


def indptr(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Where each of neighbouring segments begins, and the end of the last one, int32 [B + 1]."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def paged_keys(tables: Sequence[list[int]], lengths: Sequence[int], page_size: int) -> PagedKeys:
    """The first `lengths` keys of each page table."""
    counts = [max(1, -(-length // page_size)) for length in lengths]
    indices = np.concatenate([table[:count] for table, count in zip(tables, counts, strict=True)], dtype=np.int32)
    return PagedKeys(indptr(counts), indices, last_page_lengths(lengths, counts, page_size))


def last_page_lengths(
    lengths: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray, page_size: int
) -> np.ndarray:
    """Keys in the last of `counts` pages, int32 [B], such that (counts - 1) * page_size + these are `lengths`.

    Where tables are longer than the lengths need, a number here may be 0 or less: kernels of the FA2 kind only ever
    use the sum.
    """
    return (np.asarray(lengths) - (np.asarray(counts) - 1) * page_size).astype(np.int32)


def among_themselves(piece: Piece) -> np.ndarray:
    """Which of a piece's tokens each of them sees, bool [length, length]."""
    return np.tri(piece.length, dtype=bool) if piece.sees is None else piece.sees


def flat_mask(pieces: Sequence[Piece]) -> np.ndarray:
    """What each token sees of its piece; bool, rows end to end."""
    return np.concatenate([among_themselves(piece).ravel() for piece in pieces])


def rows_of(pieces: Sequence[Piece]) -> slice | np.ndarray:
    """The rows of the batch that pieces, in its order, consist of: a slice where they are neighbours, or int64."""
    rows = np.concatenate([np.arange(piece.start, piece.start + piece.length) for piece in pieces])
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else rows
