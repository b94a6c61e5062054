"""Arrays that describe a batch to paged kernels: its segments, and their flat arrays. Only uses NumPy."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from engine.executor.batch import Batch
from engine.speculation.draft_tree import DraftTree


class Segment(NamedTuple):
    """Consecutive tokens of one sequence: a path, or a draft tree with its root."""

    start: int
    """Row of the first token within the batch."""
    length: int
    context: int
    """Number of the sequence's tokens before the segment; all tokens of the segment attend to them."""
    pages: list[int]
    """The sequence's page table."""
    mask: np.ndarray | None = None
    """bool [length, length]: the segment's tokens that each token of a tree attends to; None for a path."""

    @property
    def keys(self) -> int:
        """Number of the sequence's tokens up to the segment's end."""
        return self.context + self.length


class PagedKeys(NamedTuple):
    """Pages of the keys of B segments, all int32."""

    indptr: np.ndarray
    """[B + 1], into `indices`."""
    indices: np.ndarray
    """Pages of the cache. A segment without keys also has one page, so that no table is empty."""
    last_page_len: np.ndarray
    """[B]: number of keys in the last page."""


def segments_of(batch: Batch) -> list[Segment]:
    """Return the segments of a batch, in its order.

    A draft tree is a separate segment with the last committed token as its root, so that every token attends to the
    whole context and to at least one token of its segment.
    """
    segments = []
    for index, (start, end) in enumerate(pairwise(batch.starts.tolist())):
        computed, pages = int(batch.computed[index]), batch.pages[index].tolist()
        parents = batch.parents[batch.nodes[index] : batch.nodes[index + 1]]
        if not len(parents):
            segments.append(Segment(start, end - start, computed, pages))
            continue
        before = end - start - len(parents) - 1
        if before:
            segments.append(Segment(start, before, computed, pages))
        mask = with_root(DraftTree(parents).sees)
        segments.append(Segment(start + before, 1 + len(parents), computed + before, pages, mask))
    return segments


def with_root(mask: np.ndarray) -> np.ndarray:
    """Add a root before all nodes to a tree's mask, bool [k, k]; return bool [k + 1, k + 1]."""
    whole = np.zeros((len(mask) + 1, len(mask) + 1), bool)
    whole[:, 0] = True
    whole[1:, 1:] = mask
    return whole


def indptr(lengths: Sequence[int] | np.ndarray) -> np.ndarray:
    """Return the first index of each of B consecutive ranges, and the end of the last one, int32 [B + 1]."""
    return np.cumsum([0, *lengths], dtype=np.int32)


def paged_keys(tables: Sequence[list[int]], lengths: Sequence[int], page_size: int) -> PagedKeys:
    """Return the pages of the first `lengths` keys of each page table."""
    counts = [max(1, -(-length // page_size)) for length in lengths]
    indices = np.concatenate([table[:count] for table, count in zip(tables, counts, strict=True)], dtype=np.int32)
    return PagedKeys(indptr(counts), indices, last_page_lengths(lengths, counts, page_size))


def last_page_lengths(
    lengths: Sequence[int] | np.ndarray, counts: Sequence[int] | np.ndarray, page_size: int
) -> np.ndarray:
    """Return the number of keys in the last of `counts` pages, int32 [B]: lengths - (counts - 1) * page_size.

    It is 0 or less where a table has more pages than its length needs; FA2's kernels only use the sum of the keys in
    full pages and in the last page.
    """
    return (np.asarray(lengths) - (np.asarray(counts) - 1) * page_size).astype(np.int32)


def flat_masks(segments: Sequence[Segment]) -> np.ndarray:
    """Return the masks of trees, flattened and concatenated, bool."""
    masks = [np.tri(one.length, dtype=bool) if one.mask is None else one.mask for one in segments]
    return np.concatenate([mask.ravel() for mask in masks])


def rows_of(segments: Sequence[Segment]) -> slice | np.ndarray:
    """Return the rows of segments within the batch, in order: a slice if consecutive, otherwise int64 indices."""
    rows = np.concatenate([np.arange(segment.start, segment.start + segment.length) for segment in segments])
    first, end = int(rows[0]), int(rows[-1]) + 1
    return slice(first, end) if end - first == len(rows) else rows
